"""Inputs at the edges, where a wrong kernel still passes the everyday cases."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cases import (
    SHAPES,
    Case,
    Pools,
    Shape,
    Step,
    make_pools,
    make_step,
    pool_dtypes,
    pool_shapes,
)
from conftest import choose_form
from oracles import Recurrence, assert_close, relative_l2

from host.launcher import HostLauncher
from replayssm_cupy import advance_ring, checkpointing_ssu, decode
from replayssm_cupy.keys import CheckpointingSsuKey, SmallCheckpointingSsuKey

CASE = Case(SHAPES["three-heads-per-group"], npredicted=4, max_window=8, num_slots=2)
MAP_NORESERVE = 0x4000
# Few heads take one kernel for one or two tokens and another for more.
tokens_of_both = pytest.mark.parametrize("tokens", [1, 4])


@pytest.fixture(autouse=True)
def emulator(form):
    with HostLauncher().installed():
        yield


def run(pools: Pools, step: Step, case: Case = CASE, **options) -> np.ndarray:
    return checkpointing_ssu(
        pools.state,
        pools.x_cache,
        pools.B_cache,
        pools.dt_cache,
        pools.ring_start,
        pools.prev_num_accepted_tokens,
        step.x,
        step.dt,
        step.A,
        step.B,
        step.C,
        None,
        step.D,
        step.z,
        step.dt_bias,
        step.dt_softplus,
        step.state_batch_indices,
        step.pad_slot_id,
        max_window=case.max_window,
        **options,
    )


def unit_step(q: int, dt: float | np.ndarray, A: float = 0.0) -> Step:
    """x = 1, B = C = e_0, no options: outputs are sums of decays times dt."""
    s, bfloat16 = CASE.shape, ml_dtypes.bfloat16
    B = np.zeros((1, q, s.ngroups, s.dstate), bfloat16)
    B[..., 0] = 1
    times = np.broadcast_to(np.asarray(dt, np.float32).reshape(1, -1, 1), (1, q, s.nheads))
    x = np.ones((1, q, s.nheads, s.head_dim), bfloat16)
    return Step(x, times, np.full(s.nheads, A, np.float32), B, B.copy())


def fresh_pools() -> Pools:
    pools = make_pools(CASE, np.random.default_rng(0))
    pools.state[...] = 0
    return pools


def test_fp32_state_is_read_with_all_its_bits():
    """C takes the difference of two columns that agree in their upper halves."""
    pools, step = fresh_pools(), unit_step(1, 0.0)
    pools.state[..., 0], pools.state[..., 1] = 1 + 2.0**-14, 1
    step.C[..., 1] = -1
    np.testing.assert_array_equal(run(pools, step).astype(np.float32), 2.0**-14)


def test_fold_keeps_the_bits_of_fp32():
    pools, dt = fresh_pools(), np.float32(1 + 2.0**-9 + 2.0**-20)  # three terms of bf16
    run(pools, unit_step(1, dt))
    pools.prev_num_accepted_tokens[:] = 1
    pools.state[...] = 0
    step = unit_step(4, 0.0)
    window = CASE.max_window
    for _ in range(2):  # one live row and eight tokens: the second call flushes
        run(pools, step)
        pools.prev_num_accepted_tokens[:] += 4
    assert int(pools.prev_num_accepted_tokens[0]) > window
    np.testing.assert_array_equal(pools.state[0, ..., 0], dt)


@pytest.mark.parametrize("flush", [False, True])
def test_rows_behind_a_large_dt(flush):
    """Everything decays to nothing, then small steps: sums of dt would lose them."""
    pools = fresh_pools()
    times = np.array([1000.0, 1e-3, 1e-3, 1e-3], np.float32)
    step = unit_step(4, times, A=-1000.0)
    exact = Recurrence(pools.state)
    assert_close(run(pools, step), exact.propose(step), "float32", "out")
    exact.accept(0, 4)
    pools.prev_num_accepted_tokens[0] = 4
    q = 1
    if flush:  # four rows more, so that the next step folds all of them
        later = unit_step(4, 1e-3, A=-1000.0)
        assert_close(run(pools, later), exact.propose(later), "float32", "out")
        exact.accept(0, 4)
        pools.prev_num_accepted_tokens[0] = 8
    last = unit_step(q, 1e-3, A=-1000.0)
    assert_close(run(pools, last), exact.propose(last), "float32", "out")
    if flush:
        assert_close(pools.state[0], exact.state(0), "float32", "state")


@pytest.mark.parametrize("dt", [-80.0, -21.7, -8.3, 0.0, 19.99, 20.01, 90.0, 3e4])
def test_softplus_at_any_dt(dt):
    pools, step = fresh_pools(), replace(unit_step(1, dt), dt_softplus=True)
    out = run(pools, step).astype(np.float64)
    exact = np.logaddexp(0, np.float64(np.float32(dt)))
    row = int(pools.ring_start[0])
    np.testing.assert_allclose(pools.dt_cache[0, :, row], exact, rtol=5e-7)
    np.testing.assert_allclose(out, exact, rtol=2.0**-8)


@pytest.mark.parametrize(("dt", "exact"), [(np.inf, np.inf), (-np.inf, 0.0), (np.nan, np.nan)])
def test_softplus_of_no_number(dt, exact):
    pools, step = fresh_pools(), replace(unit_step(1, dt), dt_softplus=True)
    run(pools, step)
    np.testing.assert_array_equal(pools.dt_cache[0, :, int(pools.ring_start[0])], exact)


@tokens_of_both
def test_stray_cursors_are_held_inside_the_ring(tokens):
    rng = np.random.default_rng(1)
    pools = make_pools(CASE, rng, fill=True)
    rows, window = CASE.ring_buffer_len, CASE.max_window
    step = make_step(CASE, 2, rng, q=tokens, strided=True)
    inside = pools.copy()
    inside.ring_start[:] = rows - 1, 0
    inside.prev_num_accepted_tokens[:] = 0, window
    pools.ring_start[:] = 10**9, -5
    pools.prev_num_accepted_tokens[:] = -3, 10**9
    np.testing.assert_array_equal(run(pools, step), run(inside, step))
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        np.testing.assert_array_equal(getattr(pools, name), getattr(inside, name))


@pytest.mark.parametrize(("accepted", "kept"), [(99, 4), (-3, 0), (2, 2)])
def test_accepted_stay_within_the_step(accepted, kept):
    start, prev = np.array([3], np.int32), np.array([2], np.int32)
    advance_ring(start, prev, np.array([accepted], np.int32), 4, max_window=8, ring_buffer_len=12)
    assert (start[0], prev[0]) == (3, 2 + kept)


def sparse(shape: tuple[int, ...], dtype: np.dtype, stride: int = 0) -> np.ndarray:
    """Zeros with a slot stride above 2^32 elements; pages take memory when they are written."""
    inner = int(np.prod(shape[1:]))
    stride = stride or 2**32 + 2 * inner
    size = ((shape[0] - 1) * stride + inner) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for {size >> 30} GiB: {error}")
    flat = np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, dtype, 1),
        (shape[0], inner),
        (stride * dtype.itemsize, dtype.itemsize),
    )
    return flat.reshape(shape)


def run_far_and_near(count: int, tokens: int, stride: int = 0) -> list[type]:
    """Slots and batch rows that are `stride` bytes apart, or more than 2^32 elements, equal close
    ones bit for bit; the kernels of both.
    """
    case = replace(CASE, num_slots=count)
    rng = np.random.default_rng(2)
    near = make_pools(case, rng, fill=True)
    near.prev_num_accepted_tokens[:] = [2, 8, 3][:count]  # the second flushes
    far = replace(near.copy())
    for name, shape in pool_shapes(case).items():
        dtype = pool_dtypes(case)[name]
        setattr(far, name, sparse(shape, dtype, stride // dtype.itemsize))
        getattr(far, name)[...] = getattr(near, name)
    step = make_step(case, count, rng, q=tokens)
    wide = {name: getattr(step, name) for name in ("x", "dt", "B", "C", "z")}
    for name, array in wide.items():
        wide[name] = sparse(array.shape, array.dtype, stride // array.dtype.itemsize)
        wide[name][...] = array
    decode._plans.clear()
    out = run(far, replace(step, **wide), case)
    np.testing.assert_array_equal(out, run(near, step, case))
    for name in pool_shapes(case):
        np.testing.assert_array_equal(getattr(far, name), getattr(near, name))
    assert relative_l2(near.state[1], make_pools(case, np.random.default_rng(2)).state[1]) > 0
    return [type(plan.key) for plan in decode._plans.values()]


def test_offsets_are_64_bits_wide():
    run_far_and_near(2, tokens=4)


def test_offsets_of_the_small_form_are_64_bits_wide(monkeypatch):
    """Its strides have 32 bits: beyond those, another form does the step."""
    choose_form(monkeypatch, "small")
    assert run_far_and_near(3, 1, 2**32 - 2**12) == [SmallCheckpointingSsuKey] * 2
    choose_form(monkeypatch, "stream")  # whose sums are in another order
    assert run_far_and_near(2, 1) == [CheckpointingSsuKey] * 2


def test_the_small_form_takes_strides_of_32_bits(monkeypatch):
    choose_form(monkeypatch, "small")
    case = replace(CASE, state_dtype="bfloat16")
    pools = make_pools(case, np.random.default_rng(3), fill=True)
    step = make_step(case, 2, np.random.default_rng(3), q=1)
    wide = sparse(pools.x_cache.shape, pools.x_cache.dtype)
    wide[...] = pools.x_cache
    run(replace(pools.copy(), x_cache=wide), step, case)
    run(pools, step, case)
    keys = [type(plan.key) for plan in decode._plans.values()]
    assert keys == [CheckpointingSsuKey, SmallCheckpointingSsuKey]
    alone = Case(Shape("wide", 2, 1, 64, 256), 1, 8, "int8", num_slots=2)
    with np.errstate(invalid="ignore"):  # codes that start as NaN
        pools = make_pools(alone, np.random.default_rng(4), fill=True)
    step = make_step(alone, 2, np.random.default_rng(4))
    given = replace(pools, x_cache=sparse(pools.x_cache.shape, pools.x_cache.dtype))
    message = r"x_cache: expected strides .* below 4 GiB, got \d+ bytes \(int8 states with dstate"
    with pytest.raises(ValueError, match=message):
        run(given, step, alone, state_scale=np.ones((2, 2, 64), np.float32))


def test_strides_of_single_rows_do_not_matter(monkeypatch):
    """The only token of a step may have a stride of any length."""
    choose_form(monkeypatch, "small")
    pools = make_pools(CASE, np.random.default_rng(5), fill=True)
    step = make_step(CASE, 2, np.random.default_rng(5), q=1)
    strides = (step.B.strides[0], -(2**40), *step.B.strides[2:])
    odd = replace(step, B=np.lib.stride_tricks.as_strided(step.B, step.B.shape, strides))
    np.testing.assert_array_equal(run(pools.copy(), odd), run(pools, step))
    assert {type(plan.key) for plan in decode._plans.values()} == {SmallCheckpointingSsuKey}


def test_random_bits_of_slots_far_apart_differ():
    """Equal slots 2^32 elements apart: the lower halves of their offsets are the same."""
    case = replace(CASE, state_dtype="bfloat16")
    pools = make_pools(case, np.random.default_rng(4), fill=True)
    for array in pools.arrays().values():
        array[1] = array[0]
    pools.prev_num_accepted_tokens[:] = 7  # both flush
    equal = pools.state
    pools.state = sparse(equal.shape, equal.dtype, 2**32)
    pools.state[...] = equal
    step = make_step(case, 2, np.random.default_rng(5))
    run(pools, step, case, rand_seed=np.array([6]))
    first, second = pools.state.astype(np.float64)
    assert 0 < relative_l2(first, second) < 2.0**-7


def before_a_hole(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page begins that nobody may read."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    hole = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(hole), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


@tokens_of_both
@pytest.mark.parametrize("live", [2, 8], ids=["no flush", "flush"])
def test_no_slab_is_read_behind_the_last_head(live, tokens):
    """The last warp of a head of 80 rows has one slab, where the others have two."""
    case = replace(CASE, state_dtype="bfloat16")
    rng = np.random.default_rng(7)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = live
    step = make_step(case, 2, rng, q=tokens)
    edge = pools.copy()
    edge.state, edge.x_cache = before_a_hole(pools.state), before_a_hole(pools.x_cache)
    given = replace(step, x=before_a_hole(step.x), z=before_a_hole(step.z))
    np.testing.assert_array_equal(run(edge, given, case), run(pools, step, case))
    for name, array in pools.arrays().items():
        np.testing.assert_array_equal(getattr(edge, name), array)


@pytest.mark.parametrize("tokens", [2, 4])
def test_no_token_is_read_behind_the_last(tokens):
    """The last sequence of a ragged batch has one token, and memory ends there."""
    rng = np.random.default_rng(8)
    pools = make_pools(CASE, rng, fill=True)
    step = make_step(CASE, 1, rng, q=tokens + 1)
    edge = pools.copy()
    given = {name: before_a_hole(getattr(step, name)) for name in ("x", "dt", "B", "C", "z")}
    ragged = {"cu_seqlens": np.array([0, tokens, tokens + 1], np.int32), "max_seqlen": tokens}
    out = run(edge, replace(step, **given), **ragged)
    np.testing.assert_array_equal(out, run(pools, step, **ragged))
    assert np.isfinite(out.astype(np.float32)).all()


@tokens_of_both
def test_slots_have_64_bits(tokens):
    """One is padding that agrees with a slot in its lower half, and so may the sign of padding."""
    rng = np.random.default_rng(9)
    pools = make_pools(CASE, rng, fill=True)
    step = make_step(CASE, 2, rng, q=tokens, slots=np.array([1, 2**32], np.int64))
    step = replace(step, pad_slot_id=2**32 + 1)
    alone = pools.copy()
    out = run(pools, step)
    assert not out[1].astype(np.float32).any()
    first = {name: getattr(step, name)[:1] for name in ("x", "dt", "B", "C", "z")}
    slots = np.array([1], np.int64)
    expected = run(alone, replace(step, **first, state_batch_indices=slots, pad_slot_id=-1))
    np.testing.assert_array_equal(out[:1], expected)
    for name, array in pools.arrays().items():
        np.testing.assert_array_equal(getattr(alone, name), array)


@tokens_of_both
def test_padding_may_have_the_number_of_a_slot(tokens):
    rng = np.random.default_rng(10)
    pools = make_pools(CASE, rng, fill=True)
    step = make_step(CASE, 2, rng, q=tokens, slots=np.array([1, 0], np.int32))
    before = pools.copy()
    out = run(pools, replace(step, pad_slot_id=1))
    assert not out[0].astype(np.float32).any() and out[1].astype(np.float32).any()
    for name, array in before.arrays().items():
        np.testing.assert_array_equal(getattr(pools, name)[1], array[1])


@tokens_of_both
@pytest.mark.parametrize("first", range(3))
def test_numbers_of_a_head_have_types_of_their_own(tokens, first):
    """Numbers that all three types hold give the same bits in each of them."""
    rng = np.random.default_rng(11)
    pools = make_pools(CASE, rng, fill=True)
    step = make_step(CASE, 2, rng, q=tokens)
    names = ("dt", "A", "D", "dt_bias")
    short = {n: (np.round(8 * getattr(step, n)) / 8).astype(np.float32) for n in names}
    types = (np.float32, ml_dtypes.bfloat16, np.float16)
    typed = {n: short[n].astype(types[(first + i) % 3]) for i, n in enumerate(names)}
    other = pools.copy()
    out = run(pools, replace(step, **short))
    np.testing.assert_array_equal(run(other, replace(step, **typed)), out)
    np.testing.assert_array_equal(other.dt_cache, pools.dt_cache)
    assert np.isfinite(out.astype(np.float32)).all() and typed["A"].any()


def every_second(array: np.ndarray) -> np.ndarray:
    """The same values with a gap of NaN, or of a slot that does not exist, after each."""
    wide = np.full((2 * len(array), *array.shape[1:]), -1 if array.dtype.kind == "i" else np.nan)
    view = wide.astype(array.dtype)[::2]
    view[...] = array
    return view


@tokens_of_both
def test_small_arrays_may_be_strided(tokens):
    rng = np.random.default_rng(3)
    packed = make_pools(CASE, rng, fill=True)
    loose = packed.copy()
    step = make_step(CASE, 2, rng, q=tokens, slots=np.array([1, 0], np.int32))
    for name in ("ring_start", "prev_num_accepted_tokens"):
        setattr(loose, name, every_second(getattr(loose, name)))
    names = ("A", "D", "dt_bias", "state_batch_indices")
    given = replace(step, **{name: every_second(getattr(step, name)) for name in names})
    np.testing.assert_array_equal(run(loose, given), run(packed, step))
    accepted = np.array([1, tokens], np.int64)
    for pools, strided in ((packed, step), (loose, given)):
        advance_ring(
            pools.ring_start,
            pools.prev_num_accepted_tokens,
            accepted if pools is packed else every_second(accepted),
            tokens,
            strided.state_batch_indices,
            max_window=CASE.max_window,
            ring_buffer_len=CASE.ring_buffer_len,
        )
    for name, array in packed.arrays().items():
        np.testing.assert_array_equal(getattr(loose, name), array)
