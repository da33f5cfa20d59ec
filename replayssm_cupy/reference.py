"""The Mamba-2 recurrence and its replay in NumPy: the CPU path, and in float64 the tests' oracle.

One token of one head moves the state S (head_dim, dstate) and reads it:

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t (outer) B_t
    y_t = S_t C_t + D x_t,    then y_t * silu(z_t)

Unrolled over a window of tokens j after the checkpoint S, with e_tj the sum of dt over the
tokens j+1 .. t and e_t the sum over all tokens up to t, the same output is

    y_t = exp(A e_t) S C_t + sum_{j <= t} (C_t . B_j) exp(A e_tj) dt_j x_j + D x_t

so the state can stay as it is while the window's tokens wait in a ring. The window is the live
ring rows followed by the call's own tokens. A flush folds the live ring rows into the state.

Arrays of one sequence have the head (or group) first: x (nheads, tokens, head_dim),
B and C (ngroups, tokens, dstate), dt (nheads, tokens), state (nheads, head_dim, dstate).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .numerics import (
    encode_state,
    mix_seed,
    round_to,
    row_fields,
    silu,
    softplus,
    stochastic_round,
    to_float,
)
from .read_copy import decode_copy, encode_copy

Array = npt.NDArray[Any]
Precision = type[np.float32] | type[np.float64]


def flushes(prev: int, q: int, max_window: int) -> bool:
    """The flush rule: the live rows and the q tokens of this call exceed the window."""
    return bool(prev + q > max_window)


def advance_cursors(
    start: int,
    prev: int,
    accepted: int,
    q: int,
    max_window: int,
    ring_buffer_len: int,
    force_flush: bool = False,
) -> tuple[int, int]:
    """Cursors of one slot after a step of q tokens of which `accepted` are kept.

    `accepted` counts the sampled token too: 0 .. q. Rejected rows stay behind the live ones and
    the next step overwrites them.
    """
    if not 0 <= accepted <= q:
        raise ValueError(f"num_accepted: expected 0 to {q} (query_lens), got {accepted}")
    if force_flush or flushes(prev, q, max_window):
        return (start + prev) % ring_buffer_len, accepted
    return start, prev + accepted


def processed_dt(
    dt: Array, dt_bias: Array | None, dt_softplus: bool, precision: Precision
) -> Array:
    """The step size that the recurrence uses and the ring stores: dt (..., nheads)."""
    processed = to_float(dt, precision)
    if dt_bias is not None:
        processed = processed + to_float(dt_bias, precision)
    if dt_softplus:
        # float64 and one rounding: the same bits for any memory layout of the same dt.
        processed = softplus(to_float(processed, np.float64))
    return to_float(processed, precision)


def recurrence(
    state: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    precision: Precision = np.float64,
) -> tuple[Array, Array]:
    """Token by token, one sequence, nothing rounded below `precision`: the definition.

    state (nheads, head_dim, dstate); x, z (tokens, nheads, head_dim); dt (tokens, nheads);
    A, D, dt_bias (nheads,); B, C (tokens, ngroups, dstate). Returns y like x, and the last state.
    """
    S = to_float(state, precision)
    x, B, C = (to_float(array, precision) for array in (x, B, C))
    dt = processed_dt(dt, dt_bias, dt_softplus, precision)
    decay = np.exp(dt * to_float(A, precision))
    y = np.empty(x.shape, precision)
    for t in range(x.shape[0]):
        B_t, C_t = _per_head(B[t], S.shape[0]), _per_head(C[t], S.shape[0])
        S = decay[t, :, None, None] * S + (dt[t, :, None] * x[t])[:, :, None] * B_t[:, None, :]
        y[t] = np.matmul(S, C_t[:, :, None])[:, :, 0]
    return _skip_and_gate(y, x, D, z, precision), S


def replay_step(
    state: Array,
    x: Array,
    B: Array,
    dt: Array,
    A: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    *,
    prev: int,
    flush: bool,
    checkpoint: Array | None = None,
    precision: Precision = np.float64,
) -> tuple[Array, Array | None]:
    """One step of one sequence over its window: `prev` old tokens, then the new ones.

    x, B and dt hold the window, heads first, dt processed; C (ngroups, q, dstate) and
    z (q, nheads, head_dim) the new tokens. Returns y (q, nheads, head_dim) and the state to
    store, None without a flush. y is read from the checkpoint on both branches, so it is the
    same whether the step flushes or not and never sees the rounding of the stored state. A
    `checkpoint` is what is folded where `state` is a copy of it to read.
    """
    S = to_float(state, precision)
    x, B, C = (to_float(array, precision) for array in (x, B, C))
    y = _read(S, x, B, dt, A, C, prev, precision).transpose(1, 0, 2)
    y = _skip_and_gate(y, x[:, prev:].transpose(1, 0, 2), D, z, precision)
    if not flush:
        return y, None
    carried = S if checkpoint is None else checkpoint
    return y, fold(carried, x[:, :prev], B[:, :prev], dt[:, :prev], A, precision)


def fold(
    state: Array, x: Array, B: Array, dt: Array, A: Array, precision: Precision = np.float64
) -> Array:
    """The state after the given tokens: exp(A e) S + sum_j exp(A e_j) dt_j x_j (outer) B_j."""
    S = to_float(state, precision)
    x, B = to_float(x, precision), _per_head(to_float(B, precision), S.shape[0])
    decay_of_state, decay = _decays(dt, A, np.array([dt.shape[1] - 1]), precision)
    weighted = (decay[:, 0] * to_float(dt, precision))[:, :, None] * x
    return np.asarray(decay_of_state[:, :, None] * S + np.matmul(weighted.transpose(0, 2, 1), B))


def _read(
    S: Array, x: Array, B: Array, dt: Array, A: Array, C: Array, prev: int, precision: Precision
) -> Array:
    """exp(A e_t) S C_t + sum_j (C_t . B_j) exp(A e_tj) dt_j x_j: (nheads, q, head_dim)."""
    nheads, q = S.shape[0], C.shape[1]
    decay_of_state, decay = _decays(dt, A, prev + np.arange(q), precision)
    CB = _per_head(np.matmul(C, B.transpose(0, 2, 1)), nheads)
    weights = CB * decay * to_float(dt, precision)[:, None]
    # One small product a head: fast without BLAS threads, whose number no bit depends on.
    SC = np.matmul(S, _per_head(C, nheads).transpose(0, 2, 1)).transpose(0, 2, 1)
    return np.asarray(decay_of_state[:, :, None] * SC + np.matmul(weights, x))


def _per_head(array: Array, nheads: int) -> Array:
    """(ngroups, ...) to (nheads, ...): consecutive heads share a group."""
    return np.repeat(array, nheads // array.shape[0], axis=0)


def _decays(dt: Array, A: Array, last: Array, precision: Precision) -> tuple[Array, Array]:
    """Decay up to each token of `last`: of the checkpoint (nheads, last), of what every token
    added (nheads, last, tokens), the latter 0 for tokens after it.

    The elapsed dt is summed for each pair from the terms in between, in float64: the difference
    of two long sums would cancel, and exp(a) exp(-b) overflow.
    """
    dt, A = to_float(dt, np.float64), to_float(A, np.float64)
    past = np.arange(dt.shape[1]) <= last[:, None]
    terms = np.where(past, dt[:, None, :], 0.0)
    elapsed = np.zeros((*terms.shape[:2], terms.shape[2] + 1))
    elapsed[..., :-1] = np.cumsum(terms[..., ::-1], axis=-1)[..., ::-1]
    exponent = A[:, None, None] * elapsed
    # A token after `last` has no time behind it, which would read as a decay of 1.
    exponent[..., 1:] = np.where(past, exponent[..., 1:], -np.inf)
    decay = to_float(np.exp(exponent), precision)
    return decay[..., 0], decay[..., 1:]


def _skip_and_gate(
    y: Array, x: Array, D: Array | None, z: Array | None, precision: Precision
) -> Array:
    """y + D x, then * silu(z); y, x, z (tokens, nheads, head_dim)."""
    if D is not None:
        y = y + to_float(D, precision)[:, None] * x
    if z is not None:
        y = y * silu(to_float(z, precision))
    return y


@dataclass(frozen=True)
class Storage:
    """The states of all slots as they are stored: loads a slot's, and rounds what is written back.

    state (slots, nheads, head_dim, dstate); state_scale (slots, nheads, head_dim) float32 decode
    scales of codes, else None; copy, the read copy of a float16 state, as `read_copy` describes it.
    With `rounds` of Philox and a seed the rounding of the state is stochastic; the random bits
    belong to the element's place in the storage, and to the slot's number in `events` (slots,).
    """

    state: Array
    state_scale: Array | None = None
    rand_seed: Array | None = None
    rounds: int = 0
    layer: int = -1
    copy: Array | None = None
    events: Array | None = None

    def load(self, slot: int, precision: Precision) -> Array:
        """The state of a slot that carries the recurrence, in the arithmetic's precision."""
        S = to_float(self.state[slot], precision)
        if self.state_scale is None or self.copy is not None:
            return S
        return np.asarray(S * to_float(self.state_scale[slot], precision)[..., None])

    def read(self, slot: int, precision: Precision) -> Array:
        """The state of a slot that outputs are read from."""
        if self.copy is None or self.state_scale is None:
            return self.load(slot, precision)
        values = decode_copy(self.copy[slot], self.state_scale[slot], self._copy_format)
        return to_float(values, precision)

    @property
    def _copy_format(self) -> str:
        assert self.copy is not None
        return "float16+nvfp4" if self.copy.dtype == np.uint8 else "float16+fp8"

    def store(self, slot: int, S: Array) -> None:
        """Rounds and writes the state of a slot, and the scales of codes; a copy is made of what
        was not rounded yet."""
        dtype = self.state.dtype.name
        fields = self._fields(slot)
        if self.copy is not None and self.state_scale is not None:
            self.copy[slot], self.state_scale[slot] = encode_copy(S, self._copy_format)
        if self.state_scale is not None and self.copy is None:
            self.state[slot], self.state_scale[slot] = encode_state(S, dtype, fields)
        elif fields is not None:
            self.state[slot] = stochastic_round(S, fields, dtype)
        else:
            self.state[slot] = round_to(S, dtype)

    def _fields(self, slot: int) -> Array | None:
        if self.rand_seed is None:
            return None
        seed = self.rand_seed.reshape(())
        seed = seed if self.layer < 0 else mix_seed(seed, self.layer)
        if self.events is not None:
            seed = mix_seed(seed, self.events[slot])
        _, nheads, head_dim, dstate = self.state.shape
        strides = np.array(self.state.strides[:3], np.int64) // self.state.itemsize
        heads, rows = np.arange(nheads)[:, None], np.arange(head_dim)
        offset = slot * strides[0] + heads * strides[1] + rows * strides[2]
        return row_fields(offset, seed, dstate, self.state.dtype.name, self.rounds)


def checkpointing_ssu_cpu(
    storage: Storage,
    x_cache: Array,
    B_cache: Array,
    dt_cache: Array,
    ring_start: Array,
    prev: Array,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    out: Array,
    D: Array | None,
    z: Array | None,
    dt_bias: Array | None,
    dt_softplus: bool,
    slots: Array | None,
    pad_slot_id: int,
    max_window: int,
    zero_padding: bool,
    cu_seqlens: Array | None = None,
    force_flush: Array | None = None,
    precision: Precision = np.float32,
) -> None:
    """One replay step of a batch, in place on states, rings and out; cursors are only read.

    Shapes: x_cache (slots, nheads, L, head_dim), B_cache (slots, ngroups, L, dstate), dt_cache
    (slots, nheads, L) float32, cursors (slots,), x, z, out (batch, npredicted, nheads, head_dim),
    dt (batch, npredicted, nheads), B, C (batch, npredicted, ngroups, dstate), A, D, dt_bias
    (nheads,), slots, force_flush (batch,). With cu_seqlens (batch + 1,) the tokens of all
    sequences lie in one row: x (1, tokens, nheads, head_dim) and so on.
    Only live ring rows are loaded: the others may hold anything.
    """
    ring_buffer_len, num_slots = x_cache.shape[2], storage.state.shape[0]
    for b, (row, tokens) in enumerate(sequences(x, cu_seqlens)):
        slot = b if slots is None else int(slots[b])
        if _is_padding(slot, pad_slot_id, num_slots):
            if zero_padding:
                out[row, tokens] = 0
            continue
        q, live = tokens.stop - tokens.start, int(prev[slot])
        forced = force_flush is not None and bool(force_flush[b]) and live > 0
        flush = forced or flushes(live, q, max_window)
        if q == 0 and not flush:
            continue
        rows = (int(ring_start[slot]) + np.arange(live + q)) % ring_buffer_len
        old, appended = rows[:live], rows[live:]
        x_new = x[row, tokens].transpose(1, 0, 2)
        B_new = B[row, tokens].transpose(1, 0, 2)
        # Rounded to the ring's format first: what is stored is what this output uses.
        dt_new = processed_dt(dt[row, tokens], dt_bias, dt_softplus, precision).T
        dt_new = round_to(dt_new, dt_cache.dtype.name)
        y, folded = replay_step(
            storage.read(slot, precision),
            np.concatenate([x_cache[slot][:, old], x_new], axis=1),
            np.concatenate([B_cache[slot][:, old], B_new], axis=1),
            np.concatenate([dt_cache[slot][:, old], dt_new], axis=1),
            A,
            C[row, tokens].transpose(1, 0, 2),
            D,
            None if z is None else z[row, tokens],
            prev=live,
            flush=flush,
            checkpoint=storage.load(slot, precision),
            precision=precision,
        )
        x_cache[slot][:, appended] = x_new
        B_cache[slot][:, appended] = B_new
        dt_cache[slot][:, appended] = dt_new
        if folded is not None:
            storage.store(slot, folded)
        out[row, tokens] = round_to(y, out.dtype.name)


def sequences(x: Array, cu_seqlens: Array | None) -> list[tuple[int, slice]]:
    """Where each sequence's tokens lie in x (rows, tokens, ...): its row and its tokens."""
    if cu_seqlens is None:
        return [(b, slice(0, x.shape[1])) for b in range(x.shape[0])]
    ends = [int(end) for end in cu_seqlens]
    return [(0, slice(first, max(first, last))) for first, last in itertools.pairwise(ends)]


def selective_state_update_cpu(
    storage: Storage,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    out: Array,
    D: Array | None,
    z: Array | None,
    dt_bias: Array | None,
    dt_softplus: bool,
    slots: Array | None,
    pad_slot_id: int,
    zero_padding: bool,
    precision: Precision = np.float32,
) -> None:
    """The plain update of a batch, in place on states and out; shapes as checkpointing_ssu_cpu.

    The state is rounded once, after the call's last token; y never sees that rounding.
    """
    for b in range(x.shape[0]):
        slot = b if slots is None else int(slots[b])
        if _is_padding(slot, pad_slot_id, storage.state.shape[0]):
            if zero_padding:
                out[b] = 0
            continue
        y, last = recurrence(
            storage.load(slot, precision),
            x[b],
            dt[b],
            A,
            B[b],
            C[b],
            D,
            None if z is None else z[b],
            dt_bias,
            dt_softplus,
            precision,
        )
        storage.store(slot, last)
        out[b] = round_to(y, out.dtype.name)


def materialize(
    storage: Storage,
    x_cache: Array,
    B_cache: Array,
    dt_cache: Array,
    A: Array,
    src: int,
    dst: int,
    start: int,
    prefix: int,
    precision: Precision = np.float32,
) -> None:
    """Writes the state of slot `src` after the first `prefix` rows of its ring to slot `dst`.

    Shapes as in `checkpointing_ssu_cpu`. Without rows the bytes are copied, scales included. Rings
    and the source are only read, dead rows not even that.
    """
    if prefix == 0:
        for array in (storage.state, storage.copy, storage.state_scale):
            if array is not None:
                array[dst] = array[src]
        return
    rows = (start + np.arange(prefix)) % x_cache.shape[2]
    S = storage.load(src, precision)
    x, B, dt = (ring[src][:, rows] for ring in (x_cache, B_cache, dt_cache))
    storage.store(dst, fold(S, x, B, dt, A, precision))


def plan_materialize(
    live: int, committed: int, accepted: int, block_size: int, boundary: int | None = None
) -> int:
    """Rows from the checkpoint to the boundary that a step crossed, or -1 if there is none.

    `live` counts the ring's rows after the step, `committed` the sequence's tokens before it. The
    boundary is the last multiple of `block_size` behind `committed`, or the one given: a number of
    tokens, negative for none.
    """
    after = committed + max(accepted, 0)
    if boundary is None:
        boundary = after // block_size * block_size
        if boundary <= committed:
            return -1
    if not 0 <= boundary <= after:
        return -1
    return max(live - (after - boundary), -1)


def _is_padding(slot: int, pad_slot_id: int, num_slots: int) -> bool:
    return slot == pad_slot_id or not 0 <= slot < num_slots
