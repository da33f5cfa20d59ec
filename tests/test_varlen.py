"""Sequences of different lengths in one call, forced flushes, and the cursors that follow."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, Step, make_step, make_weights
from oracles import Guarded, Recurrence, assert_close, bits, poison_dead_rows, relative_l2
from runs import (
    EIGHT_BIT,
    STATES,
    NumPyBackend,
    Run,
    Stored,
    device_of,
    half_cells,
    make_stored,
    new_rows,
    reference_path,
    replayed,
)

import replayssm_cupy as ssm
from replayssm_cupy import reference

SHAPE = Shape("ragged", 4, 2, 64, 128)
TOKEN_ARRAYS = ("x", "dt", "B", "C", "z")
MAP_NORESERVE = 0x4000

every_state = pytest.mark.parametrize("dtype", STATES)


def ragged(
    case: Case, lens: list[int], rng: np.random.Generator, *, spare: int = 0, **fields
) -> tuple[Step, np.ndarray]:
    """A step whose sequences lie behind one another, `spare` tokens more, and cu_seqlens."""
    ends = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    step = make_step(case, 1, rng, q=int(ends[-1]) + spare, strided=True)
    return replace(step, **fields), ends


def sequence(step: Step, ends: np.ndarray, row: int, slot: int) -> Step:
    """One sequence as a dense call of its own."""
    part = step.tokens(int(ends[row]), int(ends[row + 1]))
    return replace(part, state_batch_indices=np.array([slot], np.int32))


def pools_at(case: Case, prev: list[int], rng: np.random.Generator) -> Stored:
    """Full rings with the given live counts; the starts make some of them wrap."""
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[: len(prev)] = prev
    poison_dead_rows(pools)
    return pools


def assert_same(one: Stored, other: Stored) -> None:
    for name, array in one.arrays().items():
        assert np.array_equal(bits(array), bits(getattr(other, name))), name


# --- A ragged call is its sequences, one by one --------------------------------------------------

BATCHES = [
    ([3, 1, 4, 2, 4], [0, 5, 10, 12, 8], 4),
    ([3, 5, 8, 6, 7], [14, 15, 16, 14, 15], 8),
    ([9, 16, 1, 8, 12], [3, 16, 15, 9, 0], 16),
]


def check_against_dense(
    backend, lens, prev, longest, dtype, activation, out_dtype=None, form="stream", **options
):
    case = Case(SHAPE, longest, 16, dtype, activation, num_slots=6)
    rng = np.random.default_rng(sum(lens))
    slots = np.array([4, 0, 3, 1, 2], np.int32)
    of_slots = np.zeros(6, int)
    of_slots[slots] = prev
    pools = pools_at(case, list(of_slots), rng)
    step, ends = ragged(case, lens, rng, spare=3)
    together, apart = (Run(backend, pools, 16) for _ in range(2))
    out = together.step(
        replace(step, state_batch_indices=slots), out_dtype,
        cu_seqlens=ends, max_seqlen=longest, **options,
    )  # fmt: skip
    for row, slot in enumerate(slots):
        alone = apart.step(sequence(step, ends, row, slot), out_dtype, **options)
        together_row = out[:, ends[row] : ends[row + 1]]
        assert_outputs(together_row, alone, few_tokens=form == "small" and lens[row] <= 2)
    assert np.isfinite(out[:, : ends[-1]].astype(np.float32)).all()
    assert np.isnan(out[:, ends[-1] :].astype(np.float32)).all(), "tokens of no sequence"
    assert_same(together.snapshot(), apart.snapshot())
    flushed = [p + q > 16 for p, q in zip(prev, lens, strict=True)]
    for slot, flush in zip(slots, flushed, strict=True):
        same = np.array_equal(bits(together.snapshot().state[slot]), bits(pools.state[slot]))
        assert same != flush


def assert_outputs(one: np.ndarray, other: np.ndarray, few_tokens: bool) -> None:
    """Few heads with one or two tokens are summed in another order than with more."""
    if few_tokens:
        assert relative_l2(one, other) < (2e-5 if one.dtype == np.float32 else 2e-3)
    else:
        assert np.array_equal(bits(one), bits(other))


@every_state
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
@pytest.mark.parametrize("lens, prev, longest", BATCHES, ids=["T4", "T8", "T16"])
def test_ragged_equals_dense(backend, form, lens, prev, longest, activation, dtype):
    check_against_dense(backend, lens, prev, longest, dtype, activation, form=form)
    check_against_dense(backend, lens, prev, longest, dtype, activation, np.float32, form)
    if dtype != "float32":
        seed = {"rand_seed": np.array([8]), "philox_rounds": 4}
        check_against_dense(backend, lens, prev, longest, dtype, activation, form=form, **seed)


@every_state
def test_ragged_equals_dense_on_the_cpu_path(dtype):
    with reference_path():
        for lens, prev, longest in BATCHES:
            check_against_dense(NumPyBackend(), lens, prev, longest, dtype, "bfloat16")


@every_state
def test_flush_goes_by_the_actual_length(backend, dtype):
    """One token behind 15 rows fits, whatever the longest sequence might have been."""
    case = Case(SHAPE, 8, 16, dtype, num_slots=2)
    rng = np.random.default_rng(1)
    pools = pools_at(case, [15, 15], rng)
    step, ends = ragged(case, [1, 2], rng)
    run = Run(backend, pools, 16)
    run.step(step, cu_seqlens=ends, max_seqlen=8)
    after = run.snapshot()
    assert np.array_equal(bits(after.state[0]), bits(pools.state[0]))
    assert not np.array_equal(bits(after.state[1]), bits(pools.state[1]))


@every_state
def test_empty_sequences_touch_nothing(backend, form, dtype):
    lens, prev = [3, 0, 4, 0, 1], [5, 15, 12, 16, 0]
    check_against_dense_or_untouched(backend, lens, prev, dtype, form)
    with reference_path():
        check_against_dense_or_untouched(NumPyBackend(), lens, prev, dtype, "stream")


def check_against_dense_or_untouched(backend, lens, prev, dtype, form):
    case = Case(SHAPE, 4, 16, dtype, num_slots=5)
    rng = np.random.default_rng(2)
    pools = pools_at(case, prev, rng)
    step, ends = ragged(case, lens, rng)
    together, apart = (Run(backend, pools, 16) for _ in range(2))
    out = together.step(step, cu_seqlens=ends, max_seqlen=4)
    for row in (0, 2, 4):
        alone = apart.step(sequence(step, ends, row, row))
        few_tokens = form == "small" and lens[row] <= 2
        assert_outputs(out[:, ends[row] : ends[row + 1]], alone, few_tokens)
    assert_same(together.snapshot(), apart.snapshot())


@pytest.mark.parametrize("ends", [[0], [0, 0, 0]], ids=str)
def test_batches_without_tokens(backend, ends):
    case = Case(SHAPE, 4, 16, "int8", num_slots=3)
    rng = np.random.default_rng(3)
    pools = pools_at(case, [16, 16, 16], rng)
    step, _ = ragged(case, [], rng)
    for place, path in ((backend, nullcontext()), (NumPyBackend(), reference_path())):
        with path:
            run = Run(place, pools, 16)
            assert run.step(step, cu_seqlens=np.array(ends, np.int32), max_seqlen=4).size == 0
            assert_same(run.snapshot(), pools)


@pytest.mark.parametrize("padding", ["zero", "keep"])
def test_padding_in_a_ragged_batch(backend, padding):
    case = Case(SHAPE, 4, 16, "bfloat16", num_slots=5)
    rng = np.random.default_rng(4)
    pools = pools_at(case, [16, 16, 2, 2, 9], rng)
    lens, slots = [3, 2, 4, 1], np.array([4, -1, 1, 9], np.int64)
    step, ends = ragged(case, lens, rng)
    together, apart = (Run(backend, pools, 16) for _ in range(2))
    out = together.step(
        replace(step, state_batch_indices=slots), cu_seqlens=ends, max_seqlen=4, pad_output=padding
    )
    for row in (0, 2):
        alone = apart.step(sequence(step, ends, row, int(slots[row])))
        assert np.array_equal(bits(out[:, ends[row] : ends[row + 1]]), bits(alone))
    for row in (1, 3):
        of_row = out[:, ends[row] : ends[row + 1]].astype(np.float32)
        assert np.isnan(of_row).all() if padding == "keep" else not of_row.any()
    assert_same(together.snapshot(), apart.snapshot())


# --- Lengths that break the promise --------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_sequence_longer_than_promised_stays_inside(backend, form, dtype):
    """Its first tokens are taken; nothing is written beyond, in memory or in `out`."""
    case = Case(SHAPE, 4, 16, dtype, num_slots=3)
    rng = np.random.default_rng(5)
    pools = pools_at(case, [12, 16, 0], rng)
    pools.ring_start[:] = 19, 7, 0
    step, ends = ragged(case, [6, 16, 5], rng)
    guards, buffers = {}, {}
    run, short = (Run(backend, pools, 16) for _ in range(2))
    for name in ("x_cache", "B_cache", "dt_cache", "state"):
        array = getattr(pools, name)
        guards[name] = guard = Guarded(array.shape, array.dtype)
        guard.array[...] = array
        buffers[name] = backend.put(guard.buffer)
        inside = buffers[name][guard.offset :][: array.nbytes]
        run.pools[name] = inside.view(array.dtype).reshape(array.shape)
    out = run.step(step, cu_seqlens=ends, max_seqlen=4)
    for name, guard in guards.items():
        guard.check(name, backend.get(buffers[name]))
    for row in range(3):
        alone = short.step(sequence(step, [0, ends[row] + 4], 0, row).tokens(int(ends[row]), None))
        assert np.array_equal(bits(out[:, ends[row] : ends[row] + 4]), bits(alone))
        assert np.isnan(out[:, ends[row] + 4 : ends[row + 1]].astype(np.float32)).all()
    assert_same(run.snapshot(), short.snapshot())
    fresh = Run(backend, pools, 16)
    message = r"^cu_seqlens: expected lengths of at most max_seqlen = 4, got \d+ at batch row \d$"
    with pytest.raises(ssm.ReplaySSMError, match=message):
        fresh.step(step, cu_seqlens=ends, max_seqlen=4, check=True)
    assert_same(fresh.snapshot(), pools)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 3, 9], "expected lengths of at most max_seqlen = 4, got 6"),
        ([1, 3, 5], "expected values that rise from 0 to at most 9, got"),
        ([0, 3, 2], "expected values that rise from 0 to at most 9, got"),
        ([0, 3, 10], "expected values that rise from 0 to at most 9, got"),
        ([-1, 3, 5], "expected values that rise from 0 to at most 9, got"),
    ],
    ids=str,
)
def test_wrong_lengths_on_the_cpu_path(ends, message):
    case = Case(SHAPE, 4, 16, num_slots=3)
    rng = np.random.default_rng(6)
    pools = pools_at(case, [12, 16, 0], rng)
    step, _ = ragged(case, [9], rng)
    with reference_path():
        run = Run(NumPyBackend(), pools, 16)
        with pytest.raises(ValueError, match=f"^cu_seqlens: {message}"):
            run.step(step, cu_seqlens=np.array(ends, np.int32), max_seqlen=4)
        assert_same(run.snapshot(), pools)


# --- Many tokens ---------------------------------------------------------------------------------


def far_tokens(array: np.ndarray, first: int, stride: int) -> np.ndarray:
    """The tokens of `array` as numbers `first` and on of an array that is mostly unused pages."""
    shape = (1, first + array.shape[1], *array.shape[2:])
    size = shape[1] * stride * array.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        pytest.skip(f"no address space for {size >> 30} GiB: {error}")
    inner = np.empty(array.shape[2:], array.dtype).strides
    strides = (size, stride * array.itemsize, *inner)
    wide = np.ndarray(shape, array.dtype, memory, 0, strides)
    wide[:, first:] = array
    return wide


def test_offsets_of_tokens_are_64_bits_wide(monkeypatch):
    """Sequences behind token 2**23, and more than 2**32 elements from the first token."""
    from host.launcher import HostLauncher

    from replayssm_cupy import plan

    monkeypatch.setitem(plan.launchers, "cpu", HostLauncher())
    case = Case(Shape("far", 1, 1, 64, 64), 4, 16, num_slots=3)
    rng = np.random.default_rng(7)
    pools = pools_at(case, [16, 3, 14], rng)
    step, ends = ragged(case, [4, 1, 3], rng)
    first, stride = 2**23 + 5, 512
    out = far_tokens(np.full(step.x.shape, np.nan, step.x.dtype), first, stride)
    wide = {name: far_tokens(getattr(step, name), first, stride) for name in TOKEN_ARRAYS}
    near, far = pools.copy(), pools.copy()
    rest = {"A": step.A, "D": step.D, "dt_bias": step.dt_bias, "dt_softplus": True}
    given = {name: getattr(step, name) for name in TOKEN_ARRAYS}
    expected = ssm.checkpointing_ssu(
        **near.arrays(), **given, **rest, cu_seqlens=ends, max_seqlen=4, max_window=16
    )
    # The kernel takes where a sequence begins from cu_seqlens; only checked mode asks for a 0.
    ssm.checkpointing_ssu(
        **far.arrays(), **wide, **rest, out=out, cu_seqlens=ends + np.int32(first), max_seqlen=4,
        max_window=16,
    )  # fmt: skip
    assert np.array_equal(bits(out[:, first:]), bits(expected))
    assert_same(far, near)


@pytest.mark.gpu
def test_more_than_two_to_the_23_tokens():
    """Half a million sequences of 16 tokens, of which the last two are no padding."""
    import cupy

    case = Case(Shape("many", 1, 1, 64, 64), 16, 16, num_slots=2)
    rng = np.random.default_rng(8)
    pools = pools_at(case, [16, 3], rng)
    step, ends = ragged(case, [16, 7], rng)
    rows = 2**19 + 1
    first = 16 * rows
    wide = {}
    for name in TOKEN_ARRAYS:
        array = getattr(step, name)
        wide[name] = cupy.zeros((1, first + 23, *array.shape[2:]), array.dtype)
        wide[name][:, first:] = cupy.asarray(np.ascontiguousarray(array))
    slots = cupy.full(rows + 2, -1, np.int32)
    slots[-2:] = cupy.arange(2)
    cu_seqlens = cupy.concatenate([cupy.arange(rows) * 16, cupy.asarray(first + ends)])
    rest = {name: cupy.asarray(getattr(step, name)) for name in ("A", "D", "dt_bias")}
    far, near = ({n: cupy.asarray(a) for n, a in pools.arrays().items()} for _ in range(2))
    out = ssm.checkpointing_ssu(
        **far, **wide, **rest, dt_softplus=True, state_batch_indices=slots, max_window=16,
        cu_seqlens=cu_seqlens.astype(np.int32), max_seqlen=16,
    )  # fmt: skip
    given = {n: cupy.asarray(np.ascontiguousarray(getattr(step, n))) for n in TOKEN_ARRAYS}
    expected = ssm.checkpointing_ssu(
        **near, **given, **rest, dt_softplus=True, max_window=16, cu_seqlens=cupy.asarray(ends),
        max_seqlen=16,
    )  # fmt: skip
    assert np.array_equal(bits(cupy.asnumpy(out[:, first:])), bits(cupy.asnumpy(expected)))
    for name in near:
        assert np.array_equal(bits(cupy.asnumpy(far[name])), bits(cupy.asnumpy(near[name]))), name


# --- Forced flushes ------------------------------------------------------------------------------


def assert_is_state(pools: Stored, slot: int, exact: np.ndarray) -> None:
    """A state that was just stored, against the exact one."""
    dtype = pools.state.dtype.name
    if dtype not in EIGHT_BIT:
        assert_close(pools.state[slot], exact, dtype, f"state of slot {slot}")
        return
    slack = 3e-5 * np.abs(exact).max(axis=-1, keepdims=True)
    error = np.abs(pools.values()[slot] - exact)
    assert (error <= half_cells(exact, pools.state_scale[slot], dtype) * (1 + 1e-5) + slack).all()


@every_state
def test_forced_flushes(backend, dtype):
    check_forced_flushes(backend, dtype)
    with reference_path():
        check_forced_flushes(NumPyBackend(), dtype)


def check_forced_flushes(backend, dtype):
    case = Case(SHAPE, 2, 16, dtype, num_slots=6)
    rng = np.random.default_rng(9)
    pools = pools_at(case, [0, 3, 9, 16, 16, 14], rng)
    forced = np.array([1, 1, 0, 1, 0, 255], np.uint8)
    step = make_step(case, 6, rng)
    run = Run(backend, pools, 16)
    out = run.step(step, np.float32, force_flush=forced)
    after = run.snapshot()
    exact = Recurrence(pools.values())
    for slot in range(6):
        state = replayed(pools, step.A, slot)
        exact.resync(slot, state, 0)
        if slot in (0, 2):
            assert np.array_equal(bits(after.state[slot]), bits(pools.state[slot]))
        else:
            assert_is_state(after, slot, state)
        new = new_rows(pools, slot, 2)
        assert np.array_equal(bits(after.x_cache[slot][:, new]), bits(step.x[slot].swapaxes(0, 1)))
    assert relative_l2(out, exact.propose(step)) <= 2e-5
    # A mask of bools is the same, and a narrower window flushes the same rows by itself.
    again = Run(backend, pools, 16)
    assert np.array_equal(bits(again.step(step, np.float32, force_flush=forced != 0)), bits(out))
    assert_same(again.snapshot(), after)


@every_state
def test_a_forced_flush_is_a_flush(backend, dtype):
    """The window 4 flushes by itself what the window 16 is told to flush."""
    case = Case(SHAPE, 2, 16, dtype, num_slots=3)
    rng = np.random.default_rng(10)
    pools = pools_at(case, [3, 4, 4], rng)
    step = make_step(case, 3, rng)
    wide, narrow = Run(backend, pools, 16), Run(backend, pools, 4)
    out = wide.step(step, force_flush=np.ones(3, np.bool_))
    assert np.array_equal(bits(out), bits(narrow.step(step)))
    assert_same(wide.snapshot(), narrow.snapshot())


def test_force_flush_may_be_strided(backend):
    case = Case(SHAPE, 2, 16, num_slots=3)
    rng = np.random.default_rng(11)
    pools = pools_at(case, [3, 4, 4], rng)
    step = make_step(case, 3, rng)
    mask = np.array([[1, 0], [0, 1], [1, 0]], np.uint8)[:, 0]
    one, other = (Run(backend, pools, 16) for _ in range(2))
    assert np.array_equal(
        bits(one.step(step, force_flush=mask)), bits(other.step(step, force_flush=mask.copy()))
    )
    assert_same(one.snapshot(), other.snapshot())


# --- Cursors -------------------------------------------------------------------------------------


def test_advance_with_lengths_and_forced_flushes(backend):
    table = [
        (prev, q, accepted, forced)
        for prev in range(17)
        for q in range(5)
        for accepted in range(q + 1)
        for forced in (0, 1)
    ]
    prev, q, accepted, forced = (np.array(c, np.int32) for c in zip(*table, strict=True))
    start = (np.arange(len(table)) % 20).astype(np.int32)
    expected = [
        reference.advance_cursors(int(s), int(p), int(a), int(n), 16, 20, bool(f))
        for s, p, a, n, f in zip(start, prev, accepted, q, forced, strict=True)
    ]
    for mask in (forced.astype(np.uint8), forced.astype(np.bool_)):
        cursors = backend.put(start), backend.put(prev)
        ssm.advance_ring(
            *cursors, backend.put(accepted), backend.put(q.astype(np.int64)), max_window=16,
            ring_buffer_len=20, force_flush=backend.put(mask),
        )  # fmt: skip
        result = np.stack([backend.get(cursor) for cursor in cursors], 1)
        assert np.array_equal(result, np.array(expected))


def test_stray_lengths_are_held_inside_a_step(backend):
    """As the step itself does: a length below 0 is 0, one beyond L - W tokens is that."""
    start, prev = np.full(4, 3, np.int32), np.array([2, 2, 15, 16], np.int32)
    cursors = backend.put(start), backend.put(prev)
    ssm.advance_ring(
        *cursors, backend.put(np.array([3, 9, 9, 1 << 32])),
        backend.put(np.array([-1, 99, 1 << 40, 0])), max_window=16, ring_buffer_len=20,
    )  # fmt: skip
    assert backend.get(cursors[0]).tolist() == [3, 3, (3 + 15) % 20, 3]
    assert backend.get(cursors[1]).tolist() == [2, 2 + 4, 4, 16]


# --- LayerStack ----------------------------------------------------------------------------------


def decode_ragged(backend, dtype: str, layers: int, steps: int):
    """Steps of random lengths in random order; the exact streams of all layers beside them."""
    case = Case(SHAPE, 4, 16, dtype, num_slots=5)
    rng = np.random.default_rng(12)
    stack = ssm.LayerStack(layers, 5, 4, 64, 2, 128, npredicted=4, state_dtype=dtype,
                           device=device_of(backend))  # fmt: skip
    weights = [make_weights(case, rng) for _ in range(layers)]
    exact = [Recurrence(np.zeros((5, 4, 64, 128))) for _ in range(layers)]
    for _ in range(steps):
        slots = rng.permutation(5)[:4].astype(np.int32)
        lens = rng.integers(0, 5, 4)
        ends = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        accepted = rng.integers(0, lens + 1).astype(np.int32)
        for layer in range(layers):
            step = make_step(case, 1, rng, q=int(ends[-1]), weights=weights[layer])
            arrays = {name: backend.put(array) for name, array in step.arrays().items()}
            out = stack.step(
                layer, **arrays, slots=backend.put(slots), cu_seqlens=backend.put(ends),
                max_seqlen=4,
            )  # fmt: skip
            out = backend.get(out)
            for row, slot in enumerate(slots):
                if not lens[row]:
                    continue
                part = sequence(step, ends, row, int(slot))
                expected = exact[layer].propose(part)
                if dtype == "float32":
                    got = out[:, ends[row] : ends[row + 1]]
                    assert_close(got, expected, dtype, f"layer {layer}")
                exact[layer].accept(int(slot), int(accepted[row]))
        stack.advance(backend.put(slots), backend.put(accepted), backend.put(lens))
    return stack, [A for A, _, _ in weights], exact, rng


@pytest.mark.parametrize("dtype", STATES)
def test_flush_slots_leaves_current_states_and_empty_rings(backend, dtype):
    stack, decays, exact, rng = decode_ragged(backend, dtype, 2, 10)
    before = [backend.get(state) for state in stack.states]
    live = backend.get(stack.prev_num_accepted_tokens)
    assert (live > 0).sum() >= 4
    A = [backend.put(one) for one in decays]
    stack.flush_slots(A, backend.put(np.array([3, -1, 0], np.int32)))
    now = backend.get(stack.prev_num_accepted_tokens)
    assert not now[[0, 3]].any()
    assert np.array_equal(now[[1, 2, 4]], live[[1, 2, 4]])
    for state, earlier in zip(stack.states, before, strict=True):
        assert np.array_equal(bits(backend.get(state)[[1, 2, 4]]), bits(earlier[[1, 2, 4]]))
    stack.flush_slots(A)
    assert not backend.get(stack.prev_num_accepted_tokens).any()
    tolerance = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 5e-3, "int8": 2e-2}.get(dtype, 8e-2)
    for layer in range(2):
        state = backend.get(stack.states[layer]).astype(np.float64)
        if dtype in EIGHT_BIT:
            state *= backend.get(stack.state_scales[layer])[..., None]
        for slot in range(5):
            error = relative_l2(state[slot], exact[layer].state(slot))
            assert error <= tolerance, f"layer {layer}, slot {slot}: {error:.2e}"
    # The loop goes on from there, and a second flush finds nothing to do.
    kept = [bits(backend.get(state)) for state in stack.states]
    stack.flush_slots(A)
    for state, earlier in zip(stack.states, kept, strict=True):
        assert np.array_equal(bits(backend.get(state)), earlier)
    case = Case(SHAPE, 4, 16, dtype, num_slots=5)
    step = make_step(case, 5, rng, q=3)
    arrays = {name: backend.put(array) for name, array in step.arrays().items()}
    out = stack.step(0, **arrays)
    stack.advance(None, backend.put(np.full(5, 3, np.int32)))
    assert (backend.get(stack.prev_num_accepted_tokens) == 3).all()
    assert np.isfinite(backend.get(out).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_flush_slots_on_the_cpu_path(dtype):
    with reference_path():
        test_flush_slots_leaves_current_states_and_empty_rings(NumPyBackend(), dtype)


def test_flush_slots_of_borrowed_arrays(backend):
    """The library makes its own arguments in the caller's framework and activation type."""
    case = Case(SHAPE, 4, 16, "float8_e4m3fn", "float16", num_slots=3)
    rng = np.random.default_rng(13)
    pools = pools_at(case, [0, 7, 16], rng)
    given = {name: backend.put(array) for name, array in pools.arrays().items()}
    stack = ssm.LayerStack.from_arrays(
        [given["state"]], [given["x_cache"]], [given["B_cache"]], [given["dt_cache"]],
        given["ring_start"], given["prev_num_accepted_tokens"], npredicted=4,
        state_scales=[given["state_scale"]],
    )  # fmt: skip
    A, _, _ = make_weights(case, rng)
    stack.flush_slots([backend.put(A.astype(DTYPES["bfloat16"]))])
    after = Stored(**{name: backend.get(array) for name, array in given.items()})
    assert np.array_equal(bits(after.state[0]), bits(pools.state[0]))
    for slot in (1, 2):
        assert_is_state(after, slot, replayed(pools, A.astype(DTYPES["bfloat16"]), slot))
    assert not after.prev_num_accepted_tokens.any()
    moved = (pools.ring_start + pools.prev_num_accepted_tokens) % case.ring_buffer_len
    assert np.array_equal(after.ring_start, moved)
