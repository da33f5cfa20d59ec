"""A Mamba-2 language model over an array module: NumPy on the CPU, CuPy on a GPU.

    block(h) = h + out_proj(norm(SSM(silu(conv1d(xBC))) * silu(z))),   z, xBC, dt = in_proj(norm(h))

It computes what `transformers`' Mamba2ForCausalLM computes, in float32, except that x, B, C and
the output of the SSM are held in `activation_dtype`, which the replay kernel reads. A cache
carries what a sequence leaves behind: the recurrent state of every layer and the last inputs of
every convolution. `ReplayCache` keeps the states in a LayerStack and takes several tokens a step,
some of which may be rejected afterwards; `PlainCache` updates them token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from .arrays import numpy_dtype
from .layer_stack import LayerStack
from .mamba2_weights import LayerWeights, Mamba2Config, Mamba2Weights
from .ops import selective_state_update

# NumPy or CuPy arrays: the two share no static type.
Array = Any
PREFILL_CHUNK = 64


@dataclass(frozen=True, slots=True)
class SSMInputs:
    """What one layer's SSM reads, named as in `LayerStack.step`."""

    x: Array  # (batch, tokens, nheads, head_dim), like z
    dt: Array  # (batch, tokens, nheads)
    A: Array  # (nheads,), like D and dt_bias
    B: Array  # (batch, tokens, ngroups, dstate), like C
    C: Array
    D: Array
    z: Array | None
    dt_bias: Array | None
    dt_softplus: bool


class Cache(Protocol):
    """What a sequence leaves behind in every layer."""

    def conv_window(self, layer: int, xBC: Array) -> Array:
        """Put the last conv_kernel - 1 inputs in front of the new ones, along the tokens."""

    def scan(self, layer: int, inputs: SSMInputs) -> Array:
        """Run the SSM over the new tokens: y, of x's shape and dtype."""


class Mamba2:
    """The model: weights on one device, and the forward pass over a cache."""

    def __init__(
        self,
        config: Mamba2Config,
        weights: Mamba2Weights,
        xp: Any = np,
        activation_dtype: str = "bfloat16",
    ) -> None:
        self.config, self.xp = config, xp
        self.activation = numpy_dtype(activation_dtype)
        self.embedding = xp.asarray(weights.embedding)
        self.final_norm = xp.asarray(weights.final_norm)
        self.head = xp.asarray(weights.head)
        self.layers = [_to_device(layer, xp) for layer in weights.layers]

    def forward(self, tokens: Array, cache: Cache) -> Array:
        """Hidden states (batch, tokens, hidden_size) of token ids (batch, tokens)."""
        hidden = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            normed = rms_norm(self.xp, hidden, layer.norm, self.config.layer_norm_epsilon)
            hidden = hidden + self._mixer(index, layer, normed, cache)
        return rms_norm(self.xp, hidden, self.final_norm, self.config.layer_norm_epsilon)

    def logits(self, hidden: Array) -> Array:
        """Scores (..., vocab_size) of the next token."""
        return hidden @ self.head

    def _mixer(self, index: int, layer: LayerWeights, hidden: Array, cache: Cache) -> Array:
        config, xp = self.config, self.xp
        inner = config.intermediate_size
        projected = _linear(hidden, layer.in_proj, layer.in_bias)
        z, xBC, dt = xp.split(projected, [inner, inner + config.conv_channels], axis=-1)
        window = cache.conv_window(index, xBC)
        xBC = silu(xp, causal_conv(window, layer.conv_weight, layer.conv_bias))
        y = cache.scan(index, self._ssm_inputs(layer, xBC, z, dt)).astype(np.float32)
        y = y.reshape(z.shape)
        if layer.gate_norm is not None:
            grouped = (y * silu(xp, z)).reshape(*z.shape[:2], config.n_groups, -1)
            weight = layer.gate_norm.reshape(config.n_groups, -1)
            y = rms_norm(xp, grouped, weight, config.layer_norm_epsilon).reshape(z.shape)
        return _linear(y, layer.out_proj, layer.out_bias)

    def _ssm_inputs(self, layer: LayerWeights, xBC: Array, z: Array, dt: Array) -> SSMInputs:
        """Split the convolution's output. The kernels have no dt limits, so those come first."""
        config, xp = self.config, self.xp
        inner, tokens = config.intermediate_size, xBC.shape[:2]
        by_head = (*tokens, config.num_heads, config.head_dim)
        by_group = (*tokens, config.n_groups, config.state_size)
        x, B, C = xp.split(
            xBC.astype(self.activation),
            [inner, inner + config.n_groups * config.state_size],
            axis=-1,
        )
        limited = config.time_step_limit != (0.0, np.inf)
        if limited:
            dt = xp.clip(softplus(xp, dt + layer.dt_bias), *config.time_step_limit)
        gate = z.astype(self.activation).reshape(by_head) if layer.gate_norm is None else None
        return SSMInputs(
            x=x.reshape(by_head),
            dt=dt,
            A=layer.A,
            B=B.reshape(by_group),
            C=C.reshape(by_group),
            D=layer.D,
            z=gate,
            dt_bias=None if limited else layer.dt_bias,
            dt_softplus=not limited,
        )


class PrefillCache:
    """The cache of a prompt: starts empty and ends with what decoding needs of every layer.

    `states[layer]` is (batch, nheads, head_dim, dstate) float32, `conv_tails[layer]` is
    (batch, conv_kernel - 1, conv_channels).
    """

    def __init__(self, config: Mamba2Config, xp: Any) -> None:
        self.config, self.xp = config, xp
        self.states: list[Array] = []
        self.conv_tails: list[Array] = []

    def conv_window(self, layer: int, xBC: Array) -> Array:
        """Zeros before the first token."""
        old = self.config.conv_kernel - 1
        window = self.xp.pad(xBC, ((0, 0), (old, 0), (0, 0)))
        self.conv_tails.append(window[:, -old:].copy())
        return window

    def scan(self, layer: int, inputs: SSMInputs) -> Array:
        """Run the recurrence over chunks of the prompt."""
        xp, batch = self.xp, inputs.x.shape[0]
        config = self.config
        state = xp.zeros((batch, config.num_heads, config.head_dim, config.state_size), np.float32)
        outputs = []
        size = min(config.chunk_size, PREFILL_CHUNK)
        for first in range(0, inputs.x.shape[1], size):
            y, state = scan_chunk(xp, state, inputs, slice(first, first + size))
            outputs.append(y)
        self.states.append(state)
        return xp.concatenate(outputs, axis=1)


class _DecodeCache:
    """The convolution's side of a decode cache, with its rollback.

    The inputs of the latest step are kept beside the old tail; committing `n` tokens of a row
    moves the tail by n, so rejected tokens leave no trace.
    """

    def __init__(self, prompt: PrefillCache) -> None:
        self.xp, self.tail_len = prompt.xp, prompt.config.conv_kernel - 1
        # (slots, layers, conv_kernel - 1, conv_channels)
        self._tails = self.xp.stack(prompt.conv_tails, axis=1)
        self._windows: list[Array] = []
        self.slots = self.xp.arange(self._tails.shape[0], dtype=np.int32)
        self._live = self.slots

    def select(self, slots: np.ndarray[Any, Any]) -> None:
        """Choose the slot of every batch row from here on; -1 is a row with no request."""
        self.slots = self.xp.asarray(slots, dtype=np.int32)
        self._live = self.xp.asarray(np.flatnonzero(slots >= 0))

    def conv_window(self, layer: int, xBC: Array) -> Array:
        """The slots' tails and the new inputs."""
        if layer == 0:
            self._windows = []
        # Slot -1 reads some other slot's tail; its row is never committed.
        window = self.xp.concatenate([self._tails[self.slots, layer], xBC], axis=1)
        self._windows.append(window)
        return window

    def tails_after(self, tokens: int) -> Array:
        """The tails behind `tokens` of the latest step, one row: (layers, ..., conv_channels)."""
        windows = self.xp.stack(self._windows, axis=1)[0]
        return windows[:, tokens : tokens + self.tail_len].copy()

    def set_tails(self, slot: int, tails: Array) -> None:
        """Let a slot go on behind other tokens."""
        self._tails[slot] = tails

    def _commit_conv(self, accepted: Array) -> None:
        """Keep `accepted` (batch,) of the latest step's tokens in every live row."""
        xp, live = self.xp, self._live
        windows = xp.stack(self._windows, axis=1)[live]
        rows = accepted[live][:, None] + xp.arange(self.tail_len)
        self._tails[self.slots[live]] = xp.take_along_axis(windows, rows[:, None, :, None], axis=2)


class ReplayCache(_DecodeCache):
    """States and rings in a LayerStack: a step of several tokens, of which some are kept."""

    def __init__(self, prompt: PrefillCache, stack: LayerStack) -> None:
        super().__init__(prompt)
        self.stack = stack
        for layer, state in enumerate(prompt.states):
            stack.load_state(layer, self.slots, state)

    def scan(self, layer: int, inputs: SSMInputs) -> Array:
        """One replay step of one layer."""
        i = inputs
        return self.stack.step(
            layer, i.x, i.dt, i.A, i.B, i.C, D=i.D, z=i.z, dt_bias=i.dt_bias,
            dt_softplus=i.dt_softplus, slots=self.slots,
        )  # fmt: skip

    def commit(self, accepted: Array) -> None:
        """Keep `accepted` (batch,) int32 tokens of the latest step; nothing leaves the device."""
        self._commit_conv(accepted)
        self.stack.advance(self.slots, accepted)


class PlainCache(_DecodeCache):
    """States updated in place by every token: the path that ReplaySSM is compared with.

    Of the stack it takes the states, and their scales in 8-bit formats; rings and copies stay
    unused.
    """

    def __init__(self, prompt: PrefillCache, stack: LayerStack) -> None:
        super().__init__(prompt)
        self.stack = stack
        for layer, state in enumerate(prompt.states):
            stack.load_state(layer, self.slots, state)

    def scan(self, layer: int, inputs: SSMInputs) -> Array:
        """One plain update of one layer."""
        i, scales = inputs, [] if self.stack.state_copies else self.stack.state_scales
        return selective_state_update(
            self.stack.states[layer], i.x, i.dt, i.A, i.B, i.C, D=i.D, z=i.z, dt_bias=i.dt_bias,
            dt_softplus=i.dt_softplus, state_batch_indices=self.slots,
            state_scale=scales[layer] if scales else None,
        )  # fmt: skip

    def commit(self) -> None:
        """Keep every token of the latest step; the states have already moved."""
        tokens = self._windows[0].shape[1] - self.tail_len
        self._commit_conv(self.xp.full(self.slots.shape, tokens, np.int32))


def scan_chunk(xp: Any, state: Array, inputs: SSMInputs, chunk: slice) -> tuple[Array, Array]:
    """Exact recurrence over one chunk of tokens as matrix products: y and the state after it.

    With c_t the running sum of A dt inside the chunk,
    y_t = exp(c_t) S C_t + sum_{i <= t} (C_t . B_i) exp(c_t - c_i) dt_i x_i + D x_t.
    """
    heads_per_group = inputs.x.shape[2] // inputs.B.shape[2]
    x = inputs.x[:, chunk].astype(np.float32).transpose(0, 2, 1, 3)
    B, C = (
        xp.repeat(array[:, chunk].astype(np.float32).transpose(0, 2, 1, 3), heads_per_group, axis=1)
        for array in (inputs.B, inputs.C)
    )
    dt = inputs.dt[:, chunk].transpose(0, 2, 1)
    if inputs.dt_bias is not None:
        dt = dt + inputs.dt_bias[:, None]
    if inputs.dt_softplus:
        dt = softplus(xp, dt)
    c = xp.cumsum(inputs.A[:, None] * dt, axis=-1)
    causal = xp.tril(xp.ones((c.shape[-1], c.shape[-1]), bool))
    # Masked before the exponential, which would overflow above the diagonal.
    decay = xp.exp(xp.where(causal, c[..., :, None] - c[..., None, :], -np.inf))
    x_dt = x * dt[..., None]
    y = (C @ B.swapaxes(-1, -2) * decay) @ x_dt
    y = y + xp.exp(c)[..., None] * (C @ state.swapaxes(-1, -2)) + inputs.D[:, None, None] * x
    to_end = xp.exp(c[..., -1:] - c)[..., None]
    state = xp.exp(c[..., -1])[..., None, None] * state + (x_dt * to_end).swapaxes(-1, -2) @ B
    y = y.transpose(0, 2, 1, 3)
    if inputs.z is not None:
        y = y * silu(xp, inputs.z[:, chunk].astype(np.float32))
    return y.astype(inputs.x.dtype), state


def causal_conv(window: Array, weight: Array, bias: Array | None) -> Array:
    """Depthwise convolution: window (batch, kernel - 1 + tokens, channels), weight (kernel, ..)."""
    kernel = weight.shape[0]
    tokens = window.shape[1] - kernel + 1
    total = window[:, :tokens] * weight[0]
    for tap in range(1, kernel):
        total = total + window[:, tap : tap + tokens] * weight[tap]
    return total if bias is None else total + bias


def rms_norm(xp: Any, x: Array, weight: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last axis."""
    return weight * (x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon))


def silu(xp: Any, x: Array) -> Array:
    """x / (1 + exp(-x))."""
    return x * (0.5 + 0.5 * xp.tanh(0.5 * x))


def softplus(xp: Any, x: Array) -> Array:
    """log(1 + exp(x))."""
    return xp.logaddexp(x, 0.0)


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    return x @ weight if bias is None else x @ weight + bias


def _to_device(layer: LayerWeights, xp: Any) -> LayerWeights:
    values = {f.name: getattr(layer, f.name) for f in fields(layer)}
    return LayerWeights(
        **{name: None if v is None else xp.asarray(v) for name, v in values.items()}
    )
