"""What is right, worked out without the library: exact streams of tokens and guarded memory.

A stream proposes tokens, is told how many were accepted, and knows the exact output and the
exact checkpoint. `Audit` shows which tokens are in a state, `Halving` in which order and with
which decay, `Recurrence` follows random tokens in float64. All arrays are NumPy arrays; a test
of another framework moves them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
from cases import (
    DTYPES,
    ROUNDING_SLACK,
    TOLERANCES,
    Case,
    Pools,
    Step,
    make_step,
    make_weights,
)

# --- Comparison ---------------------------------------------------------------------------------


def float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array of any format: equality of bits, also of NaN."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def relative_l2(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |b| in float64 over all elements; 0 if both are 0."""
    a, b = float64(a), float64(b)
    difference, norm = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    return difference / norm if norm else (0.0 if difference == 0.0 else math.inf)


def allowed_error(exact: np.ndarray, stored_as: str, state_dtype: str) -> float:
    """The relative L2 error that a result may have: the tolerance of the state if it was not
    rounded, else the exact result's own rounding with some slack."""
    if stored_as in ("float64", "float32"):
        return TOLERANCES[state_dtype]
    with np.errstate(over="ignore"):
        rounding = relative_l2(float64(exact).astype(DTYPES[stored_as]), exact)
    limit = ROUNDING_SLACK * rounding
    return limit if state_dtype in ("float64", "float32") else max(limit, TOLERANCES[state_dtype])


def assert_close(result: np.ndarray, exact: np.ndarray, state_dtype: str, what: str = "") -> None:
    """NaN patterns first, then the tolerance of the format that `result` has."""
    result = np.asarray(result)
    assert result.shape == exact.shape, f"{what}: shape {result.shape}, expected {exact.shape}"
    wrong = np.argwhere(np.isfinite(float64(result)) != np.isfinite(float64(exact)))
    assert not len(wrong), f"{what}: {len(wrong)} values not finite, first at {tuple(wrong[0])}"
    error, limit = relative_l2(result, exact), allowed_error(exact, result.dtype.name, state_dtype)
    assert error <= limit, f"{what}: relative L2 error {error:.3e}, allowed {limit:.3e}"


# --- The recurrence, written again from the paper ------------------------------------------------


def processed_dt(step: Step) -> np.ndarray:
    """softplus(dt + dt_bias) in float64, (batch, q, nheads)."""
    dt = float64(step.dt)
    if step.dt_bias is not None:
        dt = dt + float64(step.dt_bias)
    return np.where(dt <= 20, np.logaddexp(0, dt), dt) if step.dt_softplus else dt


def advance(
    state: np.ndarray, A: np.ndarray, x: np.ndarray, dt: np.ndarray, B: np.ndarray
) -> np.ndarray:
    """The state (nheads, head_dim, dstate) after one token: x (nheads, head_dim),
    dt (nheads,), B (ngroups, dstate)."""
    heads_per_group = state.shape[0] // B.shape[0]
    decay = np.exp(float64(A) * dt)
    added = np.einsum("h,hp,hn->hpn", dt, float64(x), np.repeat(float64(B), heads_per_group, 0))
    return decay[:, None, None] * state + added


class Recurrence:
    """The exact states of many slots over many steps of proposed and accepted tokens.

    state (slots, nheads, head_dim, dstate) is where the slots begin. The latest tokens are kept,
    so `state(slot, waiting)` can tell the checkpoint while the last `waiting` accepted tokens
    still lie in the ring. `dt_dtype` is the format that the ring gives to the processed dt.
    """

    def __init__(self, state: np.ndarray, *, keep: int = 64, dt_dtype: str = "float32"):
        self._base = [float64(one) for one in state]
        self._recent: list[deque[tuple[np.ndarray, ...]]] = [deque() for _ in state]
        self._keep, self._dt_dtype = keep, DTYPES[dt_dtype]
        self._proposed: dict[int, list[tuple[np.ndarray, ...]]] = {}

    def propose(self, step: Step) -> np.ndarray:
        """The exact output of a step, zero in the rows of padded slots."""
        dt = float64(processed_dt(step).astype(self._dt_dtype))
        out = np.zeros(step.x.shape)
        self._proposed = {}
        for b, slot in live_rows_of_batch(step, len(self._base)):
            tokens = [(step.A, step.x[b, t], dt[b, t], step.B[b, t]) for t in range(len(dt[b]))]
            self._proposed[slot] = tokens
            S = self.state(slot, 0)
            for t, token in enumerate(tokens):
                S = advance(S, *token)
                heads_per_group = S.shape[0] // step.C.shape[2]
                C = np.repeat(float64(step.C[b, t]), heads_per_group, 0)
                out[b, t] = np.einsum("hpn,hn->hp", S, C)
            if step.D is not None:
                out[b] += float64(step.D)[:, None] * float64(step.x[b])
            if step.z is not None:
                z = float64(step.z[b])
                out[b] *= z / (1 + np.exp(-z))
        return out

    def accept(self, slot: int, accepted: int) -> None:
        """The first `accepted` tokens of the latest proposal stay; the others never were."""
        tokens = self._proposed.pop(slot)
        assert 0 <= accepted <= len(tokens)
        recent = self._recent[slot]
        recent.extend(tokens[:accepted])
        while len(recent) > self._keep:
            self._base[slot] = advance(self._base[slot], *recent.popleft())

    def state(self, slot: int, waiting: int = 0) -> np.ndarray:
        """The exact state without the last `waiting` accepted tokens."""
        recent = list(self._recent[slot])
        assert 0 <= waiting <= len(recent), "more tokens wait than were kept"
        S = self._base[slot]
        for token in recent[: len(recent) - waiting]:
            S = advance(S, *token)
        return S

    def resync(self, slot: int, stored: np.ndarray, waiting: int) -> None:
        """Go on from what is stored: the roundings of a 16-bit checkpoint are its owner's."""
        recent = self._recent[slot]
        self._base[slot] = float64(stored)
        self._recent[slot] = deque(list(recent)[len(recent) - waiting :])


def live_rows_of_batch(step: Step, num_slots: int) -> list[tuple[int, int]]:
    """(batch row, slot) without the padding."""
    slots = step.state_batch_indices
    pairs = enumerate(range(step.x.shape[0]) if slots is None else map(int, slots))
    return [(b, s) for b, s in pairs if s != step.pad_slot_id and 0 <= s < num_slots]


# --- Streams whose answers are known in closed form ----------------------------------------------


class Audit:
    """Which tokens are in the state. Decay 1, dt 1, x the slot's own power of two, and the
    token with number j has B = e_(j mod dstate): entry j counts how often it was folded in.

    Every proposed token has its own number, so a rejected one must leave a 0. C is all ones by
    default and the output counts the visible tokens; with `probe` j it shows token j alone.
    All values are exact in every state format, in any order of summation.
    """

    def __init__(self, case: Case, num_slots: int | None = None):
        self.case = case
        self.num_slots = case.num_slots if num_slots is None else num_slots
        self._number = [0] * self.num_slots
        self._accepted: list[list[int]] = [[] for _ in range(self.num_slots)]
        self._proposed: dict[int, list[int]] = {}

    def x_value(self, slot: int) -> float:
        return float(2 ** (slot % 5))

    def propose(
        self, slots: Sequence[int], q: int, probe: int | None = None
    ) -> tuple[Step, np.ndarray]:
        """Inputs of a step (its slots as int32) and the exact output."""
        case, shape, batch = self.case, self.case.shape, len(slots)
        activation, weight = DTYPES[case.activation_dtype], DTYPES[case.weight_dtype]
        x = np.full((batch, q, shape.nheads, shape.head_dim), np.nan, activation)
        B = np.zeros((batch, q, shape.ngroups, shape.dstate), activation)
        C = np.full_like(B, 1 if probe is None else 0)
        if probe is not None:
            C[..., probe % shape.dstate] = 1
        out = np.zeros(x.shape)
        step = Step(
            x,
            np.ones((batch, q, shape.nheads), weight),
            np.zeros(shape.nheads, weight),
            B,
            C,
            state_batch_indices=np.array(slots, np.int32),
        )
        self._proposed = {}
        for b, slot in live_rows_of_batch(step, self.num_slots):
            numbers = [(self._number[slot] + t) % shape.dstate for t in range(q)]
            self._proposed[slot] = numbers
            x[b] = self.x_value(slot)
            B[b, np.arange(q), :, numbers] = 1
            seen = list(self._accepted[slot])
            for t in range(q):
                seen.append(numbers[t])
                visible = seen if probe is None else [j for j in seen if j == probe % shape.dstate]
                out[b, t] = self.x_value(slot) * len(visible)
            self._number[slot] += q
        return step, out

    def accept(self, slot: int, accepted: int) -> None:
        self._accepted[slot] += self._proposed.pop(slot)[:accepted]

    def state(self, slot: int, waiting: int = 0) -> np.ndarray:
        """The exact checkpoint while the last `waiting` accepted tokens lie in the ring."""
        shape, accepted = self.case.shape, self._accepted[slot]
        assert 0 <= waiting <= len(accepted)
        counts = np.bincount(accepted[: len(accepted) - waiting], minlength=shape.dstate)
        row = self.x_value(slot) * counts
        return np.broadcast_to(row, (shape.nheads, shape.head_dim, shape.dstate))


class Halving:
    """The order and the decay. A = -ln 2, dt = 1, B = C = e_0, x = 1, checkpoint 1 in column 0:
    after n tokens the state is 2 - 2^-n, and so is the output of token n."""

    def __init__(self, case: Case, num_slots: int | None = None):
        self.case = case
        self.num_slots = case.num_slots if num_slots is None else num_slots
        self._accepted = [0] * self.num_slots

    def checkpoint(self) -> np.ndarray:
        """What every slot must hold before the first step."""
        shape = self.case.shape
        state = np.zeros((self.num_slots, shape.nheads, shape.head_dim, shape.dstate))
        state[..., 0] = 1
        return state.astype(DTYPES[self.case.state_dtype])

    def propose(self, slots: Sequence[int], q: int) -> tuple[Step, np.ndarray]:
        case, shape, batch = self.case, self.case.shape, len(slots)
        activation, weight = DTYPES[case.activation_dtype], DTYPES[case.weight_dtype]
        B = np.zeros((batch, q, shape.ngroups, shape.dstate), activation)
        B[..., 0] = 1
        step = Step(
            np.ones((batch, q, shape.nheads, shape.head_dim), activation),
            np.ones((batch, q, shape.nheads), weight),
            np.full(shape.nheads, -math.log(2), weight),
            B,
            B.copy(),
            state_batch_indices=np.array(slots, np.int32),
        )
        out = np.zeros(step.x.shape)
        for b, slot in live_rows_of_batch(step, self.num_slots):
            n = self._accepted[slot] + 1 + np.arange(q)
            out[b] = (2 - 2.0**-n)[:, None, None]
        return step, out

    def accept(self, slot: int, accepted: int) -> None:
        self._accepted[slot] += accepted

    def state(self, slot: int, waiting: int = 0) -> np.ndarray:
        shape = self.case.shape
        state = np.zeros((shape.nheads, shape.head_dim, shape.dstate))
        state[..., 0] = 2 - 2.0 ** -(self._accepted[slot] - waiting)
        return state


class RandomStream:
    """Random tokens of one layer's fixed weights, followed by a `Recurrence`."""

    def __init__(self, case: Case, state: np.ndarray, rng: np.random.Generator):
        self.case, self._rng = case, rng
        self._weights = make_weights(case, rng)
        self.exact = Recurrence(state, keep=case.max_window + 1, dt_dtype=case.dt_cache_dtype)
        self.accept, self.state = self.exact.accept, self.exact.state

    def propose(self, slots: Sequence[int], q: int) -> tuple[Step, np.ndarray]:
        step = make_step(
            self.case,
            len(slots),
            self._rng,
            q=q,
            weights=self._weights,
            slots=np.array(slots, np.int32),
            strided=True,
        )
        return step, self.exact.propose(step)


# --- Memory --------------------------------------------------------------------------------------


class Guarded:
    """An array carved out of a larger buffer, with a gap after each slot; what is outside the
    array holds bytes 0xFF, which is NaN in every float format and -1 in every integer.

    `array` is the view (alignment 256 bytes), `buffer` the bytes around it, for a test that
    carries both to a device; `offset` is where the view begins.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        *,
        slot_pad: int = 0,
        guard_bytes: int = 4096,
    ):
        dtype = np.dtype(dtype)
        slot_stride = math.prod(shape[1:]) + slot_pad
        nbytes = shape[0] * slot_stride * dtype.itemsize
        raw = np.full(2 * guard_bytes + nbytes + 256, 0xFF, np.uint8)
        first = -raw.ctypes.data % 256
        self.buffer = raw[first : first + 2 * guard_bytes + nbytes]
        self.offset = guard_bytes
        inside = self.buffer[guard_bytes : guard_bytes + nbytes].view(dtype)
        rows = inside.reshape(shape[0], slot_stride)[:, : slot_stride - slot_pad]
        self.array = rows.reshape(shape)
        assert np.shares_memory(self.array, self.buffer) or not nbytes
        outside = np.ones(len(self.buffer), bool)
        mine = np.zeros((shape[0], slot_stride), bool)
        mine[:, : slot_stride - slot_pad] = True
        outside[guard_bytes : guard_bytes + nbytes] = ~np.repeat(mine.reshape(-1), dtype.itemsize)
        self._outside = outside

    def untouched(self, buffer: np.ndarray | None = None) -> bool:
        """True if no byte around the array changed (in `buffer`, if it was carried away)."""
        buffer = self.buffer if buffer is None else buffer
        return bool((buffer[self._outside] == 0xFF).all())

    def check(self, what: str = "array", buffer: np.ndarray | None = None) -> None:
        buffer = self.buffer if buffer is None else buffer
        changed = np.flatnonzero(self._outside & (buffer != 0xFF))
        assert not len(changed), (
            f"{what}: {len(changed)} bytes written outside, the first {changed[0] - self.offset} "
            "bytes from its start"
        )


def guarded_pools(pools: Pools, slot_pads: dict[str, int]) -> tuple[Pools, dict[str, Guarded]]:
    """The same pools in guarded memory, each with its own slot stride."""
    guards = {
        name: Guarded(array.shape, array.dtype, slot_pad=slot_pads.get(name, 0))
        for name, array in pools.arrays().items()
    }
    for name, guard in guards.items():
        guard.array[...] = getattr(pools, name)
    return Pools(**{name: guard.array for name, guard in guards.items()}), guards


def largest(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


# Dead rows: what NaN x 0, inf x 0 and an overflow would give away.
POISONS = ("nan", "inf", "huge")


def poison(array: np.ndarray, index: object, kind: str) -> None:
    """Fill one part of an array with NaN, inf or the largest finite value of its format."""
    value = {"nan": math.nan, "inf": math.inf, "huge": largest(array.dtype)}[kind]
    array[index] = np.asarray(value).astype(array.dtype)


def dead_rows(pools: Pools, slot: int) -> np.ndarray:
    """The physical ring rows of a slot that hold no live token."""
    ring_buffer_len = pools.dt_cache.shape[-1]
    live = int(pools.ring_start[slot]) + np.arange(int(pools.prev_num_accepted_tokens[slot]))
    return np.setdiff1d(np.arange(ring_buffer_len), live % ring_buffer_len)


def poison_dead_rows(pools: Pools, kind: str = "nan") -> None:
    """Every ring row that is not live, in every slot."""
    for slot in range(pools.state.shape[0]):
        dead = dead_rows(pools, slot)
        for ring in (pools.x_cache, pools.B_cache, pools.dt_cache):
            poison(ring[slot], (slice(None), dead), kind)


def as_float64(pools: Pools) -> Pools:
    """The same contents as float64 arrays, dt too: what exact arithmetic starts from."""
    return replace(
        pools.copy(),
        **{n: float64(getattr(pools, n)) for n in ("state", "x_cache", "B_cache", "dt_cache")},
    )
