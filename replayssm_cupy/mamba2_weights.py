"""Configuration and weights of a Mamba-2 language model: a checkpoint folder or a fixed seed.

The folder is what Hugging Face `Mamba2ForCausalLM.save_pretrained` writes: `config.json` and one
`model.safetensors`, or several files and `model.safetensors.index.json`. Everything is read into
float32 NumPy arrays, so `residual_in_fp32` makes no difference here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  teaches NumPy the name bfloat16, which safetensors asks for
import numpy as np
from numpy.typing import NDArray

from .errors import ReplaySSMError
from .keys import DSTATES, HEAD_DIMS

Float32 = NDArray[np.float32]
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "head_dim",
    "state_size",
    "n_groups",
)


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Sizes and options of a model, under the names of Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    expand: float = 2
    conv_kernel: int = 4
    chunk_size: int = 256
    use_bias: bool = False
    use_conv_bias: bool = True
    rms_norm: bool = True
    layer_norm_epsilon: float = 1e-5
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        inner = self.num_heads * self.head_dim
        if inner != int(self.expand * self.hidden_size):
            raise ValueError(
                "num_heads * head_dim: expected expand * hidden_size = "
                f"{int(self.expand * self.hidden_size)}, got {self.num_heads} * {self.head_dim}"
            )
        if self.n_groups < 1 or self.num_heads % self.n_groups:
            raise ValueError(
                f"n_groups: expected a divisor of num_heads = {self.num_heads}, got {self.n_groups}"
            )
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: expected one of {HEAD_DIMS}, got {self.head_dim}")
        if self.state_size not in DSTATES:
            raise ValueError(f"state_size: expected one of {DSTATES}, got {self.state_size}")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act: expected silu or swish, got {self.hidden_act}")
        if self.conv_kernel < 2:
            raise ValueError(f"conv_kernel: expected at least 2, got {self.conv_kernel}")

    @property
    def intermediate_size(self) -> int:
        """Channels of x and z: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C side by side."""
        return self.intermediate_size + 2 * self.n_groups * self.state_size


@dataclass(slots=True)
class LayerWeights:
    """One residual block. Projections are stored (inputs, outputs); A is negative."""

    norm: Any  # (hidden_size,)
    in_proj: Any  # (hidden_size, intermediate_size + conv_channels + num_heads): z, x B C, dt
    in_bias: Any | None
    conv_weight: Any  # (conv_kernel, conv_channels), the newest token last
    conv_bias: Any | None
    dt_bias: Any  # (num_heads,)
    A: Any  # (num_heads,)
    D: Any  # (num_heads,)
    gate_norm: Any | None  # (intermediate_size,); None: z gates inside the SSM kernel
    out_proj: Any  # (intermediate_size, hidden_size)
    out_bias: Any | None


@dataclass(slots=True)
class Mamba2Weights:
    """A whole model."""

    embedding: Any  # (vocab_size, hidden_size)
    final_norm: Any  # (hidden_size,)
    head: Any  # (hidden_size, vocab_size)
    layers: list[LayerWeights] = field(default_factory=list)


def read_config(folder: Path) -> Mamba2Config:
    """Read `config.json` of a checkpoint folder.

    Raises FileNotFoundError for a missing folder or file, ValueError for missing keys or sizes
    that the kernels do not have.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"--checkpoint: no such folder: {folder}")
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"--checkpoint: {folder} holds no config.json")
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("model_type", "mamba2") != "mamba2":
        raise ValueError(f"{path}: expected model_type mamba2, got {raw['model_type']}")
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        raise ValueError(f"{path}: missing {', '.join(missing)}")
    known = {key: raw[key] for key in Mamba2Config.__dataclass_fields__ if raw.get(key) is not None}
    if "time_step_limit" in known:
        low, high = (_number(value) for value in known["time_step_limit"])
        known["time_step_limit"] = (low, high)
    eos = raw.get("eos_token_id")
    known["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return Mamba2Config(**known)


def read_weights(folder: Path, config: Mamba2Config) -> Mamba2Weights:
    """Read the safetensors files of a checkpoint folder into float32 arrays."""
    tensors = _read_tensors(folder)
    embedding = _take(tensors, "backbone.embeddings.weight", "backbone.embedding.weight")
    head = embedding if config.tie_word_embeddings else tensors.get("lm_head.weight", embedding)
    weights = Mamba2Weights(
        embedding=_shaped(embedding, "embeddings", config.vocab_size, config.hidden_size),
        final_norm=_take(tensors, "backbone.norm_f.weight"),
        head=_shaped(head, "lm_head", config.vocab_size, config.hidden_size).T.copy(),
    )
    for index in range(config.num_hidden_layers):
        weights.layers.append(_read_layer(tensors, f"backbone.layers.{index}.", config))
    return weights


def seeded_weights(seed: int, config: Mamba2Config) -> Mamba2Weights:
    """Draw a model from a seed, with the step sizes and decays that Mamba-2 starts training from.

    dt is log-uniform in [0.001, 0.1] and A uniform in [-16, -1], so heads remember from a single
    token to a thousand. The head is tied to the embedding; `fit_head` makes a better one.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Float32:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    inner, channels = config.intermediate_size, config.conv_channels
    embedding = normal(config.vocab_size, config.hidden_size)
    ones = np.ones(config.hidden_size, np.float32)
    weights = Mamba2Weights(embedding=embedding, final_norm=ones, head=embedding.T.copy())
    for _ in range(config.num_hidden_layers):
        dt = np.exp(rng.uniform(math.log(0.001), math.log(0.1), config.num_heads))
        weights.layers.append(
            LayerWeights(
                norm=ones,
                in_proj=normal(
                    config.hidden_size,
                    inner + channels + config.num_heads,
                    scale=config.hidden_size**-0.5,
                ),
                in_bias=None,
                conv_weight=normal(config.conv_kernel, channels, scale=config.conv_kernel**-0.5),
                conv_bias=np.zeros(channels, np.float32),
                dt_bias=np.log(np.expm1(dt)).astype(np.float32),
                A=-rng.uniform(1, 16, config.num_heads).astype(np.float32),
                D=np.ones(config.num_heads, np.float32),
                gate_norm=np.ones(inner, np.float32),
                out_proj=normal(inner, config.hidden_size, scale=inner**-0.5),
                out_bias=None,
            )
        )
    return weights


def fit_head(
    features: Float32, next_tokens: NDArray[np.int64], vocab_size: int, rounds: int = 60
) -> Float32:
    """Fit a head (hidden_size, vocab_size) to a text: softmax regression by Adam, from zero.

    `features` (tokens, hidden_size) are the hidden states of a seeded model, whose random layers
    remember the last few bytes well enough that a fitted head writes in the style of the text.
    """
    head = np.zeros((features.shape[1], vocab_size), np.float32)
    mean, square = np.zeros_like(head), np.zeros_like(head)
    rows = np.arange(len(features))
    for step in range(1, rounds + 1):
        scores = features @ head
        error = np.exp(scores - scores.max(axis=1, keepdims=True))
        error /= error.sum(axis=1, keepdims=True)
        error[rows, next_tokens] -= 1
        gradient = features.T @ error / np.float32(len(features))
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient * gradient
        scale = np.sqrt(square / (1 - 0.99**step)) + 1e-8
        head = head - 0.02 * (mean / (1 - 0.9**step)) / scale
    return np.asarray(head, np.float32)


def _number(value: Any) -> float:
    """A JSON number; infinity is also written as a string or as {"__float__": "Infinity"}."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _read_tensors(folder: Path) -> dict[str, Float32]:
    """Every tensor of the folder's safetensors files, by name."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ReplaySSMError(
            'a checkpoint needs safetensors: pip install "replayssm_cupy[demo]"'
        ) from None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    else:
        files = [folder / "model.safetensors"]
    tensors: dict[str, Float32] = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"--checkpoint: {folder} holds no {file.name}")
        try:
            with safe_open(file, framework="np") as shard:
                for name in shard.keys():  # noqa: SIM118  a safe_open handle is no dict
                    tensors[name] = np.asarray(shard.get_tensor(name)).astype(np.float32)
        except SafetensorError as error:
            raise ValueError(f"{file}: {error}") from None
    return tensors


def _take(tensors: dict[str, Float32], *names: str) -> Float32:
    for name in names:
        if name in tensors:
            return tensors[name]
    raise ValueError(f"--checkpoint: the safetensors files hold no tensor {names[0]}")


def _shaped(tensor: Float32, name: str, *shape: int) -> Float32:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {shape} as config.json says, got {tensor.shape}")
    return tensor


def _read_layer(tensors: dict[str, Float32], prefix: str, config: Mamba2Config) -> LayerWeights:
    """One block. A missing gate norm is legal only where the config says rms_norm = false."""

    def take(name: str, *shape: int) -> Float32:
        return _shaped(_take(tensors, prefix + name), prefix + name, *shape)

    hidden, inner, channels = config.hidden_size, config.intermediate_size, config.conv_channels
    heads, outputs = config.num_heads, inner + channels + config.num_heads
    gated = config.rms_norm or f"{prefix}mixer.norm.weight" in tensors
    conv = take("mixer.conv1d.weight", channels, 1, config.conv_kernel)
    return LayerWeights(
        norm=take("norm.weight", hidden),
        in_proj=take("mixer.in_proj.weight", outputs, hidden).T.copy(),
        in_bias=take("mixer.in_proj.bias", outputs) if config.use_bias else None,
        conv_weight=conv[:, 0, :].T.copy(),
        conv_bias=take("mixer.conv1d.bias", channels) if config.use_conv_bias else None,
        dt_bias=take("mixer.dt_bias", heads),
        A=-np.exp(take("mixer.A_log", heads)),
        D=take("mixer.D", heads),
        gate_norm=take("mixer.norm.weight", inner) if gated else None,
        out_proj=take("mixer.out_proj.weight", hidden, inner).T.copy(),
        out_bias=take("mixer.out_proj.bias", hidden) if config.use_bias else None,
    )
