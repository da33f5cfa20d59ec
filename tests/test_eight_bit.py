"""8-bit states: int8 and e4m3 codes with one float32 scale for each row of the state."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case, Shape, make_step
from oracles import (
    Audit,
    Guarded,
    Recurrence,
    bits,
    float64,
    poison_dead_rows,
    processed_dt,
    relative_l2,
)
from runs import (
    EIGHT_BIT,
    NumPyBackend,
    Run,
    Stored,
    decoded,
    device_of,
    half_cells,
    make_stored,
    new_rows,
    put_state,
    reference_path,
    replayed,
)

import replayssm_cupy as ssm
from replayssm_cupy import reference
from replayssm_cupy.numerics import encode_state

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
# A flush reads the folded state out as two bf16 terms; without one the codes are exact.
OUT_TOLERANCE = 2e-5
# What is folded, relative to the largest value of a row: two bf16 terms of 16 weighted tokens in
# the replay kernel, fp32 in the plain update.
FOLD_TOLERANCE = 3e-5
PLAIN_TOLERANCE = 2e-6

SHAPES = [
    Shape(f"{head_dim}x{dstate}", 2, 1, head_dim, dstate)
    for head_dim in (64, 80, 96, 128)
    for dstate in (64, 128, 256)
]
BASE = Case(Shape("base", 4, 2, 64, 128), 4, 16, "int8")

both_types = pytest.mark.parametrize("dtype", EIGHT_BIT)


def assert_stored(
    after: Stored, exact: np.ndarray, slot: int, dtype: str, tolerance: float = FOLD_TOLERANCE
) -> None:
    """Codes and scales of a slot against the exact state that was stored."""
    amax = np.abs(exact).max(axis=-1)
    scale = after.state_scale[slot]
    np.testing.assert_allclose(scale, amax / LARGEST[dtype], rtol=tolerance)
    error = np.abs(after.values()[slot] - exact)
    slack = tolerance * amax[..., None]
    assert (error <= half_cells(exact, scale, dtype) * (1 + 1e-6) + slack).all(), error.max()
    assert (np.abs(float64(after.state[slot])).max(axis=-1) == LARGEST[dtype]).all()


def check_one(backend, case: Case, seed: int) -> None:
    """One step from random cursors: outputs, states, scales, and what must not change."""
    rng = np.random.default_rng(seed)
    batch = case.num_slots - 1
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:2] = 0, case.max_window
    poison_dead_rows(pools)
    slots = rng.permutation(case.num_slots)[:batch].astype(np.int32)
    step = make_step(case, batch, rng, slots=slots, strided=True)
    run = Run(backend, pools, case.max_window)
    out = run.step(step, np.float32)
    after = run.snapshot()

    exact = Recurrence(pools.values())
    for slot in slots:
        state = replayed(pools, step.A, slot)
        exact.resync(slot, state, 0)
        live = int(pools.prev_num_accepted_tokens[slot])
        if reference.flushes(live, case.npredicted, case.max_window):
            assert_stored(after, state, slot, case.state_dtype)
        else:
            assert np.array_equal(bits(after.state[slot]), bits(pools.state[slot]))
            assert np.array_equal(bits(after.state_scale[slot]), bits(pools.state_scale[slot]))
    error = relative_l2(out, exact.propose(step))
    assert error <= OUT_TOLERANCE, f"relative L2 error {error:.2e}"
    for b, slot in enumerate(slots):
        new = new_rows(pools, slot, case.npredicted)
        assert np.array_equal(bits(after.x_cache[slot][:, new]), bits(step.x[b].swapaxes(0, 1)))
        np.testing.assert_allclose(after.dt_cache[slot][:, new], processed_dt(step)[b].T, rtol=1e-5)
    (idle,) = np.setdiff1d(np.arange(case.num_slots), slots)
    for name, array in pools.arrays().items():
        assert np.array_equal(bits(getattr(after, name)[idle]), bits(array[idle])), name


@both_types
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape(backend, form, shape, tokens, activation, dtype):
    check_one(backend, Case(shape, tokens, 16, dtype, activation, num_slots=4), seed=tokens)


@both_types
@pytest.mark.parametrize("tokens, window", [(1, 1), (6, 8), (16, 16), (3, 11)])
def test_other_windows(backend, tokens, window, dtype):
    case = Case(Shape("grouped", 6, 2, 80, 64), tokens, window, dtype)
    check_one(backend, case, seed=window)


@both_types
def test_the_cpu_path(dtype):
    with reference_path():
        for tokens in (1, 11):
            check_one(NumPyBackend(), replace(BASE, npredicted=tokens, state_dtype=dtype), tokens)


# --- Rows with an outcome of their own -----------------------------------------------------------

KINDS = {  # dt and x of a head: its rows become dt * x * B
    "zero": (1.0, 0.0),
    "subnormal": (2.0**-70, 2.0**-70),
    "tiny": (2.0**-60, 2.0**-66),
    "small": (2.0**-50, 2.0**-50),
    "huge": (2.0**63, 2.0**63),
    "nan": (1.0, np.nan),
    "inf": (1.0, np.inf),
    "ordinary": (0.5, 1.0),
}


def odd_rows(dtype: str) -> tuple[Stored, np.ndarray, Case]:
    """One live row in slot 0, a head for each kind; its odd x stands in row 3, elsewhere x = 1."""
    case = Case(Shape("odd", 8, 1, 64, 64), 1, 16, dtype, num_slots=1)
    rng = np.random.default_rng(0)
    pools = make_stored(case, rng)
    put_state(pools, np.zeros(pools.state.shape, np.float32), dtype)
    x = np.ones((8, 64))
    x[:, 3] = [x_of_row for _, x_of_row in KINDS.values()]
    dt = np.array([dt_of_head for dt_of_head, _ in KINDS.values()], np.float32)
    B = rng.integers(65, 128, 64) / 64 * rng.choice([-1, 1], 64)
    start = int(pools.ring_start[0])
    pools.x_cache[0][:, start], pools.B_cache[0][:, start] = x, B
    pools.dt_cache[0][:, start], pools.prev_num_accepted_tokens[0] = dt, 1
    with np.errstate(invalid="ignore"):
        state = (dt[:, None] * x.astype(np.float32))[..., None] * B.astype(np.float32)
    return pools, state, case


def flush(run: Run, pools: Stored) -> None:
    """Folds what is live, without decay and without new tokens."""
    _, nheads, _, head_dim = pools.x_cache.shape
    _, ngroups, _, dstate = pools.B_cache.shape
    slots, act = len(pools.state), pools.x_cache.dtype
    B = np.zeros((1, 0, ngroups, dstate), act)
    run.step(
        make_empty(nheads, head_dim, B), force_flush=np.ones(slots, np.uint8),
        cu_seqlens=np.zeros(slots + 1, np.int32), max_seqlen=1,
    )  # fmt: skip


def make_empty(nheads: int, head_dim: int, B: np.ndarray):
    from cases import Step

    x = np.zeros((1, 0, nheads, head_dim), B.dtype)
    dt = np.zeros((1, 0, nheads), np.float32)
    return Step(x, dt, np.zeros(nheads, np.float32), B, B.copy())


def assert_outcomes(after: Stored, dtype: str, *, again: bool = False) -> None:
    """What the documentation says of row 3 of each head of `odd_rows`, stored once or `again`."""
    rows = dict(zip(KINDS, zip(after.state[0, :, 3], after.state_scale[0, :, 3], strict=True),
                    strict=True))  # fmt: skip
    values = dict(zip(KINDS, decoded(after)[0, :, 3], strict=True))
    for kind in ("zero", "subnormal"):
        assert not float64(rows[kind][0]).any()
        assert rows[kind][1] == 1
    for kind in ("nan", "inf"):
        assert not float64(rows[kind][0]).any()
        assert np.isnan(values[kind]).all()
    # The floor keeps the scale a normal number; the int8 codes are then 0, as of an empty row.
    lost = again and dtype == "int8"
    assert rows["tiny"][1] == np.float32(1.0 if lost else 2.0**-117)
    for kind in ("huge", "small", "ordinary"):
        assert np.abs(float64(rows[kind][0])).max() == LARGEST[dtype]
    others = np.delete(decoded(after)[0], 3, axis=1)
    assert np.isfinite(others).all()


@both_types
def test_odd_rows_of_a_fold(backend, dtype):
    pools, state, case = odd_rows(dtype)
    run = Run(backend, pools, case.max_window)
    flush(run, pools)
    after = run.snapshot()
    codes, scale = encode_state(state, dtype)
    assert np.array_equal(bits(after.state[0]), bits(codes))
    assert np.array_equal(bits(after.state_scale[0]), bits(scale))
    assert_outcomes(after, dtype)
    with reference_path():
        again = Run(NumPyBackend(), pools, case.max_window)
        with np.errstate(invalid="ignore", under="ignore"):
            flush(again, pools)
        for name in ("state", "state_scale"):
            assert np.array_equal(bits(again.pools[name]), bits(getattr(after, name))), name


@both_types
@pytest.mark.parametrize("flushing", [False, True])
def test_odd_rows_are_read_and_stay_visible(backend, flushing, dtype):
    """A row that holds a NaN gives NaN in its own output and nowhere else, also after a flush."""
    pools, state, case = odd_rows(dtype)
    pools.state[0], pools.state_scale[0] = encode_state(state, dtype)
    pools.prev_num_accepted_tokens[0] = 16 if flushing else 2
    pools.x_cache[...], pools.B_cache[...], pools.dt_cache[...] = 0, 0, 0
    step = make_step(case, 1, np.random.default_rng(1))
    step.C[...] = 2.0**-8  # the sum of huge values stays finite
    run = Run(backend, pools, case.max_window)
    out = run.step(replace(step, z=None, A=np.zeros(8, np.float32)), np.float32)[0, 0]
    broken = np.zeros((8, 64), bool)
    broken[[5, 6], 3] = True
    assert np.array_equal(np.isnan(out), broken)
    assert np.isfinite(out[~broken]).all()
    assert_outcomes(run.snapshot(), dtype, again=flushing)
    if not flushing:
        assert np.array_equal(bits(run.snapshot().state), bits(pools.state))


@both_types
def test_odd_rows_of_the_plain_update(backend, dtype):
    pools, state, case = odd_rows(dtype)
    start = int(pools.ring_start[0])
    step = make_empty(8, 64, np.zeros((1, 0, 1, 64), pools.x_cache.dtype))
    step = replace(
        step, x=pools.x_cache[:, :, start][:, None], B=pools.B_cache[:, :, start][:, None],
        C=pools.B_cache[:, :, start][:, None], dt=pools.dt_cache[:, :, start][:, None],
    )  # fmt: skip
    run = Run(backend, pools, case.max_window)
    run.update(step)
    after = run.snapshot()
    codes, scale = encode_state(state, dtype)
    assert np.array_equal(bits(after.state[0]), bits(codes))
    assert np.array_equal(bits(after.state_scale[0]), bits(scale))
    assert_outcomes(after, dtype)


@both_types
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_load_state_is_the_model_bit_for_bit(backend, source, dtype):
    rng = np.random.default_rng(2)
    for dstate in (64, 128, 256):
        case = Case(Shape("load", 3, 1, 80, dstate), 1, 16, dtype, num_slots=5)
        pools = make_stored(case, rng)
        given = rng.standard_normal((4, 3, 80, dstate)) * 10.0 ** rng.uniform(-3, 3, (4, 3, 80, 1))
        given[0, 0, :8] = 0
        for p, value in enumerate((0, -0.0, 1e-38, 2e-38, 1e38, np.nan, np.inf, -np.inf)):
            given[0, 0, p, 5:9] = value
        with np.errstate(over="ignore"):
            given = given.astype(np.float32).astype(DTYPES[source])
        state, scale = backend.put(pools.state), backend.put(pools.state_scale)
        slots = np.array([3, -1, 0, 9])
        ssm.load_state(state, backend.put(slots), backend.put(given), state_scale=scale)
        state, scale = backend.get(state), backend.get(scale)
        with np.errstate(over="ignore", invalid="ignore"):
            codes, scales = encode_state(given.astype(np.float32), dtype)
        for row, slot in ((0, 3), (2, 0)):
            assert np.array_equal(bits(state[slot]), bits(codes[row]))
            assert np.array_equal(bits(scale[slot]), bits(scales[row]))
        for array, before in ((state, pools.state), (scale, pools.state_scale)):
            assert np.array_equal(bits(array[[1, 2, 4]]), bits(before[[1, 2, 4]]))


# --- The plain update ----------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("activation", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dstate", [64, 128, 256])
def test_plain_update(backend, dstate, activation, dtype):
    for tokens, head_dim in ((1, 64), (4, 80), (11, 128)):
        shape = Shape("plain", 4, 2, head_dim, dstate)
        case = Case(shape, tokens, 16, dtype, activation, num_slots=4)
        rng = np.random.default_rng(tokens)
        pools = make_stored(case, rng)
        step = make_step(case, 3, rng, slots=np.array([2, -1, 0], np.int32), strided=True)
        exact = Recurrence(pools.values(), dt_dtype="float64")
        expected = exact.propose(step)
        run = Run(backend, pools, case.max_window)
        out, after = run.update(step, np.float32), run.snapshot()
        assert relative_l2(out, expected) <= 5e-6
        assert not out[1].any()
        for slot in (0, 2):
            exact.accept(slot, tokens)
            assert_stored(after, exact.state(slot), slot, dtype, PLAIN_TOLERANCE)
        for name in ("state", "state_scale"):
            untouched = getattr(after, name)[[1, 3]]
            assert np.array_equal(bits(untouched), bits(getattr(pools, name)[[1, 3]]))


# --- Memory --------------------------------------------------------------------------------------


@both_types
def test_slot_strides_and_guard_bands(backend, dtype):
    """Codes and scales lie in wider pages; nothing outside them is written."""
    rng = np.random.default_rng(3)
    case = replace(BASE, state_dtype=dtype)
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16, 2, 14, 0, 13
    step = make_step(case, case.num_slots, rng)
    compact, paged = (Run(backend, pools, case.max_window) for _ in range(2))
    guards = {}
    for name, pad in (("state", 48), ("state_scale", 3)):
        array = getattr(pools, name)
        guards[name] = guard = Guarded(array.shape, array.dtype, slot_pad=pad)
        guard.array[...] = array
        buffer = backend.put(guard.buffer)
        stride = guard.array.strides[0] // array.itemsize
        inside = buffer[guard.offset :][: len(array) * guard.array.strides[0]].view(array.dtype)
        rows = inside.reshape(len(array), stride)[:, : stride - pad]
        paged.pools[name] = rows.reshape(array.shape)
        guards[name] = guard, buffer
    assert np.array_equal(bits(paged.step(step)), bits(compact.step(step)))
    one, other = compact.snapshot(), paged.snapshot()
    for name, (guard, buffer) in guards.items():
        guard.check(name, backend.get(buffer))
        assert np.array_equal(bits(getattr(one, name)), bits(getattr(other, name))), name


@both_types
def test_reset_sets_the_scales_to_one(backend, dtype):
    rng = np.random.default_rng(4)
    case = replace(BASE, state_dtype=dtype)
    layers = [make_stored(case, rng, fill=True) for _ in range(2)]
    states = [backend.put(p.state) for p in layers]
    scales = [backend.put(p.state_scale) for p in layers]
    cursors = [backend.put(layers[0].ring_start), backend.put(layers[0].prev_num_accepted_tokens)]
    slots = backend.put(np.array([4, -1, 1, 7], np.int32))
    ssm.reset_slots(*cursors, slots, states, state_scales=scales)
    gone, kept = [1, 4], [0, 2, 3]
    for pools, state, scale in zip(layers, states, scales, strict=True):
        state, scale = backend.get(state), backend.get(scale)
        assert not float64(state[gone]).any()
        assert (scale[gone] == 1).all()
        assert np.array_equal(bits(state[kept]), bits(pools.state[kept]))
        assert np.array_equal(bits(scale[kept]), bits(pools.state_scale[kept]))


# --- LayerStack ----------------------------------------------------------------------------------


@both_types
def test_stack_owns_and_counts_scales(backend, dtype):
    stack = ssm.LayerStack(2, 8, 16, 64, 2, 128, max_window=16, npredicted=4, state_dtype=dtype,
                           device=device_of(backend))  # fmt: skip
    per_layer = 16 * 64 * 128 + 16 * 64 * 4 + 16 * 20 * 64 * 2 + 2 * 20 * 128 * 2 + 16 * 20 * 4
    assert stack.bytes_per_slot == 2 * per_layer
    assert stack.nbytes == 8 * (2 * per_layer + 8)
    assert len(stack.state_scales) == 2
    for state, scale in zip(stack.states, stack.state_scales, strict=True):
        assert not float64(backend.get(state)).any()
        assert backend.get(scale).shape == (8, 16, 64)
        assert (backend.get(scale) == 1).all()
    assert dtype in repr(stack)


@both_types
def test_stack_borrows_scales(backend, dtype):
    rng = np.random.default_rng(5)
    case = replace(BASE, state_dtype=dtype)
    pools = make_stored(case, rng, fill=True)
    given = {name: backend.put(array) for name, array in pools.arrays().items()}
    stack = ssm.LayerStack.from_arrays(
        [given["state"]], [given["x_cache"]], [given["B_cache"]], [given["dt_cache"]],
        given["ring_start"], given["prev_num_accepted_tokens"], npredicted=4,
        state_scales=[given["state_scale"]],
    )  # fmt: skip
    assert stack.state_scales[0] is given["state_scale"]
    step = make_step(case, case.num_slots, rng)
    arrays = {name: backend.put(array) for name, array in step.arrays().items()}
    run = Run(backend, pools, case.max_window)
    out = run.step(step)
    assert np.array_equal(bits(backend.get(stack.step(0, **arrays))), bits(out))
    after = run.snapshot()
    for name in ("state", "state_scale"):
        assert np.array_equal(bits(backend.get(given[name])), bits(getattr(after, name)))
    stack.reset()
    assert (backend.get(given["state_scale"]) == 1).all()
    state = rng.standard_normal((5, 4, 64, 128)).astype(np.float32)
    stack.load_state(0, None, backend.put(state))
    codes, scale = encode_state(state, dtype)
    assert np.array_equal(bits(backend.get(given["state"])), bits(codes))
    assert np.array_equal(bits(backend.get(given["state_scale"])), bits(scale))


@both_types
def test_audit_over_a_random_stream(backend, dtype):
    """Entries of a row are 0 or x, and x is the largest: codes 0 and Q, times the row's scale."""
    case = Case(Shape("audit", 2, 1, 64, 256), 4, 16, dtype, num_slots=4)
    rng = np.random.default_rng(6)
    stack = ssm.LayerStack(1, 4, 2, 64, 1, 256, npredicted=4, state_dtype=dtype,
                           device=device_of(backend))  # fmt: skip
    stream, live = Audit(case), [0, 1, 2]
    waiting = dict.fromkeys(live, 0)
    for _ in range(40):
        q = int(rng.integers(1, 5))
        slots = [*(int(slot) for slot in rng.permutation(live)), -1]
        step, expected = stream.propose(slots, q)
        given = {name: backend.put(array) for name, array in step.arrays().items()}
        given["slots"] = given.pop("state_batch_indices")
        out = backend.put(np.zeros(step.x.shape, np.float32))
        stack.step(0, **given, out=out, dt_softplus=False)
        np.testing.assert_allclose(backend.get(out), expected, rtol=2e-6)
        accepted = rng.integers(0, q + 1, 4).astype(np.int32)
        stack.advance(given["slots"], backend.put(accepted))
        for slot, kept in zip(slots[:3], accepted, strict=False):
            flushed = reference.flushes(waiting[slot], q, 16)
            waiting[slot] = int(kept) + (0 if flushed else waiting[slot])
            stream.accept(slot, int(kept))
    codes = float64(backend.get(stack.states[0]))
    scales = float64(backend.get(stack.state_scales[0]))
    for slot, rows in waiting.items():
        exact = stream.state(slot, rows)
        assert np.array_equal(codes[slot] != 0, exact != 0)
        assert set(np.unique(codes[slot])) == {0, LARGEST[dtype]}
        ulp = np.spacing(np.float32(stream.x_value(slot) / LARGEST[dtype]))
        assert (np.abs(scales[slot] - stream.x_value(slot) / LARGEST[dtype]) <= 1.001 * ulp).all()


def test_a_forced_flush_of_an_empty_ring_touches_nothing(backend):
    """Codes that an encoder would not choose stay as they are: nothing is live, nothing to fold."""
    bf16 = ml_dtypes.bfloat16
    state = np.full((2, 1, 64, 64), 100, np.int8)
    arrays = [
        state,
        np.full((2, 1, 2, 64), np.nan).astype(bf16),
        np.full((2, 1, 2, 64), np.nan).astype(bf16),
        np.full((2, 1, 2), np.nan, np.float32),
        np.zeros(2, np.int32),
        np.zeros(2, np.int32),
        np.zeros((1, 0, 1, 64), bf16),
        np.zeros((1, 0, 1), np.float32),
        -np.ones(1, np.float32),
        np.zeros((1, 0, 1, 64), bf16),
        np.zeros((1, 0, 1, 64), bf16),
    ]
    given = [backend.put(array) for array in arrays]
    scale = backend.put(np.full((2, 1, 64), 0.5, np.float32))
    ssm.checkpointing_ssu(
        *given,
        state_scale=scale,
        cu_seqlens=backend.put(np.zeros(3, np.int32)),
        max_seqlen=1,
        force_flush=backend.put(np.ones(2, np.uint8)),
    )
    assert np.array_equal(backend.get(given[0]), state)
    assert np.array_equal(backend.get(scale), np.full((2, 1, 64), 0.5, np.float32))
