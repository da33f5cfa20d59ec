"""ReplaySSM in Hugging Face transformers: a cache for the Mamba-2 family, in one line.

    from replayssm_cupy.torch import ReplayMamba2Cache

    model.generate(**inputs, cache=ReplayMamba2Cache(model))
    model.generate(**inputs, cache=ReplayMamba2Cache(model), prompt_lookup_num_tokens=8)

Made for transformers 5.24, whose Mamba-2 layers (Mamba2, Bamba, NemotronH, GraniteMoeHybrid,
Zamba2, FalconH1) share one form: a cache, and two functions that work on the recurrent state.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers.cache_utils import DynamicCache

from .checks import ALIGNMENT, check_int
from .keys import ACTIVATION_DTYPES, MAX_TOKENS, MAX_WINDOW
from .layer_stack import LayerStack
from .torch_ops import layer_stack

Tensor = Any  # torch has no types where it is not installed


class ReplayMamba2Cache(DynamicCache):  # type: ignore[misc]  # Any where it is not installed
    """A cache of transformers whose Mamba-2 layers decode with ReplaySSM.

    Parameters
    ----------
    model : a Mamba-2 model of transformers, hybrids with attention too, on one device. On a GPU in
        bfloat16 or float16. The cache keeps nothing of it but the layers' A_log.
    max_window : W, the most tokens that wait in the rings before they are folded; 1 to 16.
    npredicted : the most tokens of a call that are verified with rollback, 1 to max_window: drafts
        of assisted generation are at most npredicted - 1 tokens.
    state_dtype, stochastic_rounding : of the stored states, as in :class:`LayerStack`.

    Pass it to ``generate`` or ``forward`` as ``cache``. With float32 states the tokens are those of
    the model without it, up to rounding. A prompt runs through the model's own scan; every later
    call of at most `npredicted` tokens is one replay step a layer. ``crop`` takes back tokens of
    the latest call by moving a cursor, so that assisted and prompt-lookup generation work:
    the model's mark ``_is_stateful``, by which transformers refuses them, is taken off. A longer
    call folds the rings and goes on with the scan. ``reorder_cache`` (beams), ``reset`` and
    ``copy.deepcopy`` (prefixes) work as on other caches. ``generate`` does not compile the model
    with it.

    The two functions of the model's module that work on recurrent states are wrapped, once; with
    other caches they do what they did.

    Raises
    ------
    TypeError, ValueError : naming the argument. In a call: for a batch of another size, float32
        activations on a GPU, or more tokens to remove than the latest call may take back.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_window: int = 16,
        npredicted: int = MAX_TOKENS,
        state_dtype: Any = "float32",
        stochastic_rounding: bool | int = False,
    ) -> None:
        mixers = [module for module in getattr(model, "modules", list)() if _is_mixer(module)]
        mixers.sort(key=lambda mixer: mixer.layer_idx)  # as they are called
        if not mixers:
            got = type(model).__name__
            raise TypeError(f"model: expected a Mamba-2 model of transformers, got {got}")
        _check_forward(model)
        for name in {type(mixer).__module__ for mixer in mixers}:
            _teach(name)
        _check_window(max_window, npredicted)
        super().__init__(config=model.config)
        self._places = {mixer.layer_idx: place for place, mixer in enumerate(mixers)}
        for index in self._places:
            self.layers[index] = _croppable(self.layers[index])
        self._states = _States(
            [_Mixer(mixer.A_log, tuple(mixer.time_step_limit)) for mixer in mixers],
            {
                "max_window": max_window,
                "npredicted": npredicted,
                "state_dtype": state_dtype,
                "stochastic_rounding": stochastic_rounding,
            },
        )
        model._is_stateful = False

    @property
    def stack(self) -> LayerStack | None:
        """The states and rings, slot = batch row; None before the first call."""
        return self._states.stack

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> _LayerState:
        """What a mixer hands on to the wrapped functions: this cache's states and a layer."""
        recording = self.is_recording_past(layer_idx)
        return _LayerState(self._states, self._places[layer_idx], recording)

    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Any:
        """Nothing to do: the wrapped functions have stored the state."""
        return recurrent_states

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens of the latest call; `tokens_to_remove` is 0 or negative.

        Needs ``activate_past_recording`` before that call, as assisted generation does.
        """
        self._states.check_removal(abs(tokens_to_remove))
        super().crop(tokens_to_remove)
        self._states.removed += abs(tokens_to_remove)

    def reset(self) -> None:
        """Empties the cache for new sequences; the memory stays."""
        super().reset()
        self._states.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from row beam_idx[i]; all of it is copied."""
        super().reorder_cache(beam_idx)
        self._states.reorder(beam_idx)


class _Mixer(NamedTuple):
    """What the states have to know of a model's Mamba-2 layer."""

    A_log: Tensor  # (nheads,)
    time_step_limit: tuple[float, float]  # of dt, in prompts alone


class _States:
    """The recurrent states of all layers: a stack, and what its latest step left open.

    The layers of a call come in order, and the first one settles the call before: its tokens are
    accepted but for those that were removed since.
    """

    def __init__(self, mixers: list[_Mixer], options: dict[str, Any]) -> None:
        self.stack: LayerStack | None = None
        self._mixers, self._options = mixers, options
        self._before = self._seen = 0  # tokens before the call at work, and with it
        self._prompt = True  # whether that call is a prompt, or as long as one
        self._pending = 0  # tokens of the latest step, appended to the rings
        self.removed = 0  # of them

    def begin(self, layer: int, x: Tensor, B: Tensor, recording: bool) -> LayerStack:
        """The stack, ready for a layer's tokens x (batch, tokens, nheads, head_dim) and their B."""
        if self.stack is None:
            self.stack = self._make_stack(x, B)
        if layer == 0:
            batch, tokens = x.shape[:2]
            if batch != self.stack.num_slots:
                slots = self.stack.num_slots
                raise ValueError(f"cache: expected batch {slots} as in the first call, got {batch}")
            self._commit()
            self._before, self._seen = self._seen, self._seen + tokens
            self._pending = self._replayed(tokens, recording)
            self._prompt = not self._before or self._pending < tokens
            if self._before and self._prompt:
                self.stack.flush_slots([-torch.exp(mixer.A_log.float()) for mixer in self._mixers])
        return self.stack

    def _replayed(self, tokens: int, recording: bool) -> int:
        """How many of a call's last tokens go through the rings; the scan takes the others."""
        most = int(self._options["npredicted"])
        if tokens == 1 or (self._before and tokens <= most):
            return tokens
        return min(tokens, most) if recording else 0

    def step(
        self, layer: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **weights: Any
    ) -> Tensor:
        """One replay step of a layer: one token without a token axis, or several.

        `weights` are D, z, dt_bias and dt_softplus, as the model gives them.
        """
        assert self.stack is not None
        limits = self._mixers[layer].time_step_limit
        if self._prompt and limits != (0.0, float("inf")):
            dt = _limited(dt, weights["dt_bias"], limits)
            weights |= {"dt_bias": None, "dt_softplus": False}
        x, B, C = _readable(x), _readable(B), _readable(C)
        if (z := weights.get("z")) is not None:
            weights["z"] = _readable(z)
        return self.stack.step(layer, x, dt, A, B, C, **weights)

    def scan(
        self,
        layer: int,
        function: Callable[..., Any],
        tokens: Sequence[Tensor],
        A: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Tokens (x, dt, B, C): the first by the model's `function`, the last by a step."""
        assert self.stack is not None
        total = tokens[0].shape[1]
        split = total - self._pending
        outputs = []
        if split:
            x, dt, B, C = (array[:, :split] for array in tokens)
            start = self._current(layer) if self._before else None
            options |= {"initial_states": start, "return_final_states": True}
            y, final = function(x, dt, A, B, C, **options)
            self.stack.load_state(layer, None, final.contiguous())
            outputs.append(y)
        if split < total:
            x, dt, B, C = (array[:, split:] for array in tokens)
            weights = {name: options.get(name) for name in ("D", "z", "dt_bias")}
            y = self.step(layer, x, dt, A, B, C, **weights, dt_softplus=options["dt_softplus"])
            outputs.append(y)
        return torch.cat(outputs, dim=1) if len(outputs) == 2 else outputs[0]

    def _current(self, layer: int) -> Tensor:
        """The states of a layer with empty rings, (batch, nheads, head_dim, dstate)."""
        assert self.stack is not None
        state = self.stack.states[layer]
        scales = [] if self.stack.state_copies else self.stack.state_scales
        return state.float() * scales[layer][..., None] if scales else state

    def check_removal(self, tokens: int) -> None:
        most = self._pending - self.removed
        if tokens > most:
            raise ValueError(
                f"tokens_to_remove: expected at most the {most} last tokens of the latest call "
                f"(npredicted = {self._options['npredicted']}), got {tokens}"
            )

    def reset(self) -> None:
        self._before = self._seen = self._pending = self.removed = 0
        if self.stack is not None:
            self.stack.reset()

    def reorder(self, rows: Tensor) -> None:
        if self.stack is None:
            return
        self._commit()
        for array in _arrays(self.stack):
            array.copy_(array.index_select(0, rows.to(array.device)))

    def _commit(self) -> None:
        """Moves the cursors behind the tokens of the latest step that were not removed."""
        if self._pending:
            assert self.stack is not None
            like, accepted = self.stack.ring_start, self._pending - self.removed
            self.stack.advance(None, torch.full_like(like, accepted), self._pending)
        self._pending = self.removed = 0

    def _make_stack(self, x: Tensor, B: Tensor) -> LayerStack:
        activation = str(x.dtype).removeprefix("torch.")
        if x.is_cuda and activation not in ACTIVATION_DTYPES:
            expected = " or ".join(ACTIVATION_DTYPES)
            raise TypeError(f"model: expected {expected} on a GPU, got {activation}")
        sizes = x.shape[0], x.shape[2], x.shape[3], B.shape[2], B.shape[3]
        return layer_stack(
            len(self._mixers), *sizes, activation_dtype=x.dtype, device=x.device, **self._options
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _States:
        """With a stack of its own, for the same model."""
        other = copy.copy(self)
        other.stack = None if self.stack is None else _copy_of(self.stack)
        return other


def _arrays(stack: LayerStack) -> list[Tensor]:
    """All of a stack that is kept by slot."""
    layers = (stack.states, stack.state_copies, stack.state_scales, stack.x_caches, stack.B_caches,
              stack.dt_caches)  # fmt: skip
    cursors = [stack.ring_start, stack.prev_num_accepted_tokens]
    return [*(array for arrays in layers for array in arrays), *cursors]


def _copy_of(stack: LayerStack) -> LayerStack:
    def clones(arrays: list[Tensor]) -> list[Tensor]:
        return [array.clone() for array in arrays]

    return LayerStack.from_arrays(
        clones(stack.states),
        clones(stack.x_caches),
        clones(stack.B_caches),
        clones(stack.dt_caches),
        *clones([stack.ring_start, stack.prev_num_accepted_tokens]),
        npredicted=stack.npredicted,
        max_window=stack.max_window,
        state_scales=clones(stack.state_scales),
        state_copies=clones(stack.state_copies),
        stochastic_rounding=False if stack.rand_seed is None else int(stack.rand_seed),
        philox_rounds=stack.philox_rounds,
    )


def _readable(array: Tensor) -> Tensor:
    """The tensor as kernels read it: a convolution leaves the channels of several tokens apart,
    and what a projection is cut into may begin or step anywhere."""
    unit = ALIGNMENT // array.element_size()
    places = array.storage_offset(), *array.stride()[:-1]
    aligned = array.stride(-1) == 1 and not any(place % unit for place in places)
    return array if aligned else array.clone(memory_format=torch.contiguous_format)


def _limited(dt: Tensor, dt_bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """dt as the scan of a prompt has it: the kernels know no limits."""
    if dt_bias.dim() == 2:  # tied: one value per head, repeated over head_dim
        dt, dt_bias = dt[..., 0], dt_bias[..., 0]
    return torch.nn.functional.softplus(dt + dt_bias.to(dt.dtype)).clamp(*limits)


# The model's side: its mixers, their functions, and what is handed from one to the other.


class _LayerState(NamedTuple):
    """Stands for the recurrent state of a layer: the mixers only pass it on."""

    states: _States
    layer: int
    recording: bool  # whether tokens of this call may be removed


def _check_window(max_window: int, npredicted: int) -> None:
    """Now, and not when the first call makes the stack."""
    for name, size, most in (
        ("max_window", max_window, MAX_WINDOW),
        ("npredicted", npredicted, MAX_TOKENS),
    ):
        check_int(name, size)
        if not 1 <= size <= most:
            raise ValueError(f"{name}: expected 1 to {most}, got {size}")
    if npredicted > max_window:
        raise ValueError(f"npredicted: expected 1 to max_window = {max_window}, got {npredicted}")


def _check_forward(model: Any) -> None:
    """Other versions name the argument otherwise, and some drop what they do not know."""
    kind = type(getattr(model, "_orig_mod", model))  # of what torch.compile wraps
    if "cache" not in inspect.signature(kind.forward).parameters:
        raise TypeError(
            "model: expected one whose forward takes cache, of transformers 5.24, got "
            f"{kind.__name__} of transformers {transformers.__version__}"
        )


def _is_mixer(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("A_log", "layer_idx", "time_step_limit"))


def _teach(name: str) -> None:
    """Wraps the two functions of a model's module that work on recurrent states."""
    module = sys.modules[name]
    for function, wrap in _WRAPPERS.items():
        original = getattr(module, function, None)
        if original is None:
            raise TypeError(
                f"model: expected Mamba-2 layers of transformers 5.24, but {name} has no {function}"
            )
        if not hasattr(original, "_takes_replay_states"):
            wrapped: Any = wrap(original)
            wrapped._takes_replay_states = True
            setattr(module, function, wrapped)


def _wrap_update(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def update(state: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None,
               **options: Any) -> Any:  # fmt: skip
        if not isinstance(state, _LayerState):
            return function(state, x, dt, A, B, C, D, **options)
        states, layer, recording = state
        states.begin(layer, x[:, None], B[:, None], recording)
        weights = {name: options.get(name) for name in ("z", "dt_bias")}
        return states.step(
            layer, x, dt, A, B, C, D=D, **weights, dt_softplus=options["dt_softplus"]
        )

    return update


def _wrap_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *sizes: Any,
             **options: Any) -> Any:  # fmt: skip
        state = options.get("initial_states")
        if not isinstance(state, _LayerState):
            return function(x, dt, A, B, C, *sizes, **options)
        states, layer, recording = state
        states.begin(layer, x, B, recording)
        y = states.scan(layer, function, (x, dt, B, C), A, options)
        return (y, state) if options.get("return_final_states") else y

    return scan


_WRAPPERS = {"mamba2_selective_state_update": _wrap_update, "mamba2_chunk_scan": _wrap_scan}


# The cache's side: layers whose tokens can be removed. The convolution rolls back by itself, as the
# base class has it, and the recurrent state with the stack.


def _croppable(layer: Any) -> Any:
    """A cache layer like this fresh one, but for that."""
    base = type(layer)
    changed = {"is_croppable": True, "is_compileable": False}
    cls: Any = type(f"Replay{base.__name__}", (base,), changed)
    other = cls.__new__(cls)
    vars(other).update(vars(layer))
    return other
