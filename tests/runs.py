"""Pools with any type of state on a backend, and the calls with every option that work on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from cases import DTYPES, Case, Pools, Step, make_pools
from oracles import advance, float64

import replayssm_cupy as ssm
from replayssm_cupy import plan
from replayssm_cupy.keys import COPY_DTYPES
from replayssm_cupy.numerics import decode_state, encode_state
from replayssm_cupy.read_copy import decode_copy, encode_copy

EIGHT_BIT = ("int8", "float8_e4m3fn")
ROUNDED = ("bfloat16", "float16", *EIGHT_BIT)
STATES = ("float32", *ROUNDED)
COPIED = tuple(COPY_DTYPES)


@dataclass
class Stored(Pools):
    """Pools whose state may be 8-bit codes with a scale for each row, or have a read copy."""

    state_scale: np.ndarray | None = None
    state_copy: np.ndarray | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: array for name, array in given.items() if array is not None}

    def copy(self) -> Stored:
        return Stored(**{name: array.copy() for name, array in self.arrays().items()})

    def values(self) -> np.ndarray:
        """The state as float64: what the stored bytes mean."""
        if self.state_scale is None or self.state_copy is not None:
            return float64(self.state)
        return float64(self.state) * float64(self.state_scale)[..., None]

    def as_read(self) -> Stored:
        """The same pools with the state that outputs are read from, in float64."""
        if self.state_copy is None or self.state_scale is None:
            return replace(self, state=self.values(), state_scale=None)
        name = next(n for n, d in COPY_DTYPES.items() if d == self.state_copy.dtype.name)
        read = float64(decode_copy(self.state_copy, self.state_scale, name))
        return replace(self, state=read, state_scale=None, state_copy=None)


def make_stored(case: Case, rng: np.random.Generator, *, fill: bool = False) -> Stored:
    """`make_pools` for a state of any type."""
    pools = make_pools(replace(case, state_dtype="float32"), rng, fill=fill)
    stored = Stored(**pools.arrays())
    put_state(stored, pools.state, case.state_dtype)
    return stored


def put_state(pools: Stored, state: np.ndarray, dtype: str) -> None:
    """Stores a float32 state in `dtype`, rounded to nearest."""
    if dtype in COPIED:
        pools.state = state.astype(np.float16)
        pools.state_copy, pools.state_scale = encode_copy(state, dtype)
    elif dtype in EIGHT_BIT:
        pools.state, pools.state_scale = encode_state(state, dtype)
    else:
        pools.state = state.astype(DTYPES[dtype])


def replayed(pools: Stored, A: np.ndarray, slot: int) -> np.ndarray:
    """The float64 state of a slot after its live ring rows."""
    rows = pools.x_cache.shape[2]
    state = pools.values()[slot]
    for j in range(int(pools.prev_num_accepted_tokens[slot])):
        row = (int(pools.ring_start[slot]) + j) % rows
        dt = float64(pools.dt_cache[slot][:, row])
        state = advance(state, A, pools.x_cache[slot][:, row], dt, pools.B_cache[slot][:, row])
    return state


def new_rows(pools: Stored, slot: int, q: int) -> np.ndarray:
    """The ring rows that q new tokens of a slot go to."""
    first = int(pools.ring_start[slot]) + int(pools.prev_num_accepted_tokens[slot])
    return (first + np.arange(q)) % pools.x_cache.shape[2]


class Run:
    """Pools on a backend, and the calls that work on them; options may be arrays too."""

    def __init__(self, backend: Any, pools: Stored, max_window: int) -> None:
        self.backend, self.max_window = backend, max_window
        self.pools = {name: backend.put(array) for name, array in pools.arrays().items()}

    def put(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self.backend.put(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }

    def step(self, step: Step, out_dtype: Any = None, **options: Any) -> np.ndarray:
        """One replay step; out starts as NaN."""
        out = np.full(step.x.shape, np.nan).astype(step.x.dtype if out_dtype is None else out_dtype)
        given = self.put({**step.arrays(), "out": out, **options})
        ssm.checkpointing_ssu(
            **self.pools, **given, dt_softplus=step.dt_softplus, pad_slot_id=step.pad_slot_id,
            max_window=self.max_window,
        )  # fmt: skip
        return self.backend.get(given["out"])

    def update(self, step: Step, out_dtype: Any = None, **options: Any) -> np.ndarray:
        """The plain update; out starts as NaN."""
        out = np.full(step.x.shape, np.nan).astype(step.x.dtype if out_dtype is None else out_dtype)
        given = self.put({**step.arrays(), "out": out, **options})
        state = {n: self.pools[n] for n in ("state", "state_scale") if n in self.pools}
        ssm.selective_state_update(
            **state, **given, dt_softplus=step.dt_softplus, pad_slot_id=step.pad_slot_id
        )
        return self.backend.get(given["out"])

    def advance(
        self, num_accepted: Any, query_lens: Any, slots: Any = None, **options: Any
    ) -> None:
        given = self.put({"num_accepted": num_accepted, "query_lens": query_lens, "slots": slots})
        ssm.advance_ring(
            self.pools["ring_start"], self.pools["prev_num_accepted_tokens"], **given,
            max_window=self.max_window, ring_buffer_len=self.pools["x_cache"].shape[2],
            **self.put(options),
        )  # fmt: skip

    def snapshot(self) -> Stored:
        return Stored(**{name: self.backend.get(array) for name, array in self.pools.items()})


@contextlib.contextmanager
def reference_path() -> Iterator[None]:
    """NumPy arrays run the reference, whatever the backend has installed."""
    launcher = plan.launchers.pop("cpu", None)
    try:
        yield
    finally:
        if launcher is not None:
            plan.launchers["cpu"] = launcher


class NumPyBackend:
    """NumPy memory and the reference; use it inside `reference_path`."""

    name = "reference"

    def put(self, array: np.ndarray | None) -> Any:
        return None if array is None else array.copy()

    def get(self, array: np.ndarray) -> np.ndarray:
        return array.copy()


def device_of(backend: Any) -> str:
    """Where a LayerStack must allocate to run on the backend."""
    return "cuda" if backend.name == "cuda" else "cpu"


def half_cells(values: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance of neighbouring decoded values around each value of an 8-bit row."""
    scale = float64(scale)[..., None]
    if dtype == "int8":
        return np.broadcast_to(0.5 * scale, values.shape)
    # Cells of e4m3 double with each binade; below 2**-6 they stay 2**-9.
    _, exponent = np.frexp(np.maximum(np.abs(values / scale), 2.0**-6))
    return 0.5 * scale * 2.0 ** (exponent - 4)


def decoded(pools: Stored) -> np.ndarray:
    """The state as the library decodes it, in float32."""
    if pools.state_scale is None:
        return pools.state.astype(np.float32)
    return decode_state(pools.state, pools.state_scale)
