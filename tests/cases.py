"""Named shapes, number formats, realistic inputs and the one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer, as one rank of a model holds them."""

    name: str
    nheads: int
    ngroups: int
    head_dim: int
    dstate: int

    @property
    def heads_per_group(self) -> int:
        return self.nheads // self.ngroups


# Real models, heads and groups divided by the tensor parallel degree in the name.
MODELS = (
    Shape("nemotron-3-super-tp8", 16, 1, 64, 128),
    Shape("nemotron-3-nano-tp4", 16, 2, 64, 128),
    Shape("nemotron-h-56b-tp8", 32, 1, 64, 256),
    Shape("mamba2-2.7b", 80, 1, 64, 128),
    Shape("codestral-mamba-7b", 128, 8, 64, 128),
    Shape("granite-4-h-small-tp4", 32, 1, 64, 128),
)
# Every head_dim and dstate, and group sizes that no tile divides.
ODD = (
    Shape("tiny", 1, 1, 64, 64),
    Shape("one-head-per-group", 4, 4, 64, 128),
    Shape("three-heads-per-group", 6, 2, 80, 64),
    Shape("five-heads-per-group", 5, 1, 96, 128),
    Shape("seven-heads-per-group", 14, 2, 128, 64),
    Shape("widest", 2, 1, 128, 256),
)
SHAPES = {shape.name: shape for shape in MODELS + ODD}

# (state, activations). float32 activations exist on the CPU path and in the plain update only.
GPU_DTYPES = (
    ("float32", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("float16", "bfloat16"),
    ("float32", "float16"),
    ("float16", "float16"),
    ("bfloat16", "float16"),
)
CPU_DTYPES = (*GPU_DTYPES, ("float32", "float32"))

# (npredicted, max_window): plain decode, verification windows, the equal pair, a long window.
WINDOWS = ((1, 16), (4, 16), (6, 8), (16, 16), (1, 1), (3, 32))

# Odd slot strides: elements added between the slots of each pool, all multiples of 16 bytes.
SLOT_PADS = {"state": 24, "x_cache": 40, "B_cache": 72, "dt_cache": 8}

# Relative L2 error against the float64 recurrence on the stored inputs, before the output is
# rounded, keyed by the format of the state.
TOLERANCES = {
    # The oracle against itself: rounding noise of a few hundred float64 operations.
    "float64": 1e-12,
    # fp32 sums over dstate and the window, and decays to half a unit in the last place each.
    "float32": 5e-6,
    # On the stored values: operands of a 16-bit matrix product may be rounded once.
    "float16": 1e-3,
    "bfloat16": 1e-3,
}
# A rounded result may be this much worse than the exact result rounded to the same format:
# errors before the rounding add in squares, so they may be 0.3 of the rounding itself.
ROUNDING_SLACK = 1.05
# The dt ring: one fp32 softplus with a fast exponential and logarithm.
DT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A shape with its number formats and window."""

    shape: Shape = SHAPES["tiny"]
    npredicted: int = 4
    max_window: int = 16
    state_dtype: str = "float32"
    activation_dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    dt_cache_dtype: str = "float32"
    num_slots: int = 5

    @property
    def ring_buffer_len(self) -> int:
        return self.max_window + self.npredicted

    def __str__(self) -> str:
        return (
            f"{self.shape.name}-T{self.npredicted}-W{self.max_window}"
            f"-{self.state_dtype}-{self.activation_dtype}"
        )


def exact_case(case: Case) -> Case:
    """The same case with every array in float64: the reference becomes the recurrence."""
    return replace(
        case,
        state_dtype="float64",
        activation_dtype="float64",
        weight_dtype="float64",
        dt_cache_dtype="float64",
    )


@dataclass
class Pools:
    """What lives across steps: the checkpoints, the rings and the cursors of every slot."""

    state: np.ndarray
    x_cache: np.ndarray
    B_cache: np.ndarray
    dt_cache: np.ndarray
    ring_start: np.ndarray
    prev_num_accepted_tokens: np.ndarray

    def copy(self) -> Pools:
        return Pools(*(np.copy(getattr(self, f.name)) for f in fields(self)))

    def arrays(self) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Step:
    """The inputs of one call, by their names in `checkpointing_ssu`."""

    x: np.ndarray
    dt: np.ndarray
    A: np.ndarray
    B: np.ndarray
    C: np.ndarray
    D: np.ndarray | None = None
    z: np.ndarray | None = None
    dt_bias: np.ndarray | None = None
    dt_softplus: bool = False
    state_batch_indices: np.ndarray | None = None
    pad_slot_id: int = field(default=-1)

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if isinstance(getattr(self, f.name), np.ndarray)
        }

    def tokens(self, first: int, last: int) -> Step:
        """The same call with the new tokens first .. last - 1 only (views)."""
        part = {
            name: None if array is None else array[:, first:last]
            for name, array in (("x", self.x), ("dt", self.dt), ("B", self.B), ("C", self.C))
        }
        return replace(self, **part, z=None if self.z is None else self.z[:, first:last])

    def tied(self) -> Step:
        """The same call with the stride-0 views that other libraries ask for."""
        head_dim, dstate = self.x.shape[3], self.B.shape[3]

        def spread(array: np.ndarray | None, *sizes: int) -> np.ndarray | None:
            if array is None:
                return None
            spread_over = array.reshape(array.shape + (1,) * len(sizes))
            return np.broadcast_to(spread_over, array.shape + sizes)

        return replace(
            self,
            dt=spread(self.dt, head_dim),
            A=spread(self.A, head_dim, dstate),
            D=spread(self.D, head_dim),
            dt_bias=spread(self.dt_bias, head_dim),
        )


def pool_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    s, rows, slots = case.shape, case.ring_buffer_len, case.num_slots
    return {
        "state": (slots, s.nheads, s.head_dim, s.dstate),
        "x_cache": (slots, s.nheads, rows, s.head_dim),
        "B_cache": (slots, s.ngroups, rows, s.dstate),
        "dt_cache": (slots, s.nheads, rows),
    }


def pool_dtypes(case: Case) -> dict[str, np.dtype]:
    activation = DTYPES[case.activation_dtype]
    return {
        "state": DTYPES[case.state_dtype],
        "x_cache": activation,
        "B_cache": activation,
        "dt_cache": DTYPES[case.dt_cache_dtype],
    }


def make_pools(case: Case, rng: np.random.Generator, *, fill: bool = False) -> Pools:
    """A random checkpoint, ring starts anywhere, no live rows; all ring rows NaN.

    With `fill` every ring row holds a plausible token instead, and the live counts are random.
    """
    shapes, dtypes = pool_shapes(case), pool_dtypes(case)
    arrays = {name: np.full(shapes[name], np.nan).astype(dtypes[name]) for name in shapes}
    arrays["state"][...] = rng.standard_normal(shapes["state"]).astype(dtypes["state"])
    starts = rng.integers(0, case.ring_buffer_len, case.num_slots).astype(np.int32)
    prev = np.zeros(case.num_slots, np.int32)
    if fill:
        for name in ("x_cache", "B_cache"):
            arrays[name][...] = rng.standard_normal(shapes[name]).astype(dtypes[name])
        arrays["dt_cache"][...] = np.exp(rng.uniform(np.log(1e-3), np.log(0.5), shapes["dt_cache"]))
        prev[:] = rng.integers(0, case.max_window + 1, case.num_slots)
    return Pools(**arrays, ring_start=starts, prev_num_accepted_tokens=prev)


def make_weights(
    case: Case, rng: np.random.Generator, *, decay: str = "trained"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, D and dt_bias of one layer.

    A is log-uniform in [-16, -0.5] ("trained", as the models are initialised) or uniform in
    (-1.5, -0.5] ("mild"). Softplus of dt_bias is log-uniform in [0.001, 0.5].
    """
    nheads, dtype = case.shape.nheads, DTYPES[case.weight_dtype]
    if decay == "trained":
        A = -np.exp(rng.uniform(np.log(0.5), np.log(16.0), nheads))
    else:
        A = -rng.uniform(0.0, 1.0, nheads) - 0.5
    step = np.exp(rng.uniform(np.log(0.001), np.log(0.5), nheads))
    dt_bias = step + np.log(-np.expm1(-step))
    return A.astype(dtype), rng.standard_normal(nheads).astype(dtype), dt_bias.astype(dtype)


def make_step(
    case: Case,
    batch: int,
    rng: np.random.Generator,
    *,
    q: int | None = None,
    weights: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    slots: np.ndarray | None = None,
    strided: bool = False,
    decay: str = "trained",
) -> Step:
    """Random inputs of one call of q tokens (npredicted by default), every option on.

    `strided` cuts x, B, C out of one wider buffer and z, dt out of another, as the projections
    of a model leave them; the gaps hold NaN.
    """
    s, q = case.shape, case.npredicted if q is None else q
    activation, weight = DTYPES[case.activation_dtype], DTYPES[case.weight_dtype]
    A, D, dt_bias = make_weights(case, rng, decay=decay) if weights is None else weights
    x = rng.standard_normal((batch, q, s.nheads, s.head_dim)).astype(activation)
    z = rng.standard_normal((batch, q, s.nheads, s.head_dim)).astype(activation)
    B = rng.standard_normal((batch, q, s.ngroups, s.dstate)).astype(activation)
    C = rng.standard_normal((batch, q, s.ngroups, s.dstate)).astype(activation)
    dt = (0.5 * rng.standard_normal((batch, q, s.nheads))).astype(weight)
    if strided:
        x, B, C = _cut_from_one_buffer(x, B, C)
        (z,) = _cut_from_one_buffer(z)
        (dt,) = _cut_from_one_buffer(dt)
    return Step(x, dt, A, B, C, D, z, dt_bias, True, slots)


def _cut_from_one_buffer(*arrays: np.ndarray) -> list[np.ndarray]:
    """Views with the values of the arrays, side by side in each token's row, 16 gaps between."""
    batch, q = arrays[0].shape[:2]
    widths = [array.size // max(1, batch * q) for array in arrays]
    buffer = np.full((batch, q, sum(widths) + 16 * (len(widths) + 1)), np.nan, arrays[0].dtype)
    views, first = [], 16
    for array, width in zip(arrays, widths, strict=True):
        view = buffer[:, :, first : first + width].reshape(array.shape)
        assert view.base is not None
        assert np.shares_memory(view, buffer) or not array.size
        view[...] = array
        views.append(view)
        first += width + 16
    return views
