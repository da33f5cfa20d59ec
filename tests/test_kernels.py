"""The kernels against float64: on the CPU through g++, and on a GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    DT_TOLERANCE,
    DTYPES,
    GPU_DTYPES,
    SHAPES,
    SLOT_PADS,
    Case,
    Pools,
    Shape,
    Step,
    make_pools,
    make_step,
    make_weights,
)
from oracles import (
    POISONS,
    Audit,
    Halving,
    RandomStream,
    Recurrence,
    assert_close,
    bits,
    dead_rows,
    guarded_pools,
    poison_dead_rows,
    processed_dt,
    relative_l2,
)

import replayssm_cupy as ssm
from replayssm_cupy import reference

BASE = Case(Shape("base", 4, 2, 64, 128), npredicted=4, max_window=16)


class Run:
    """Pools on a backend, and the calls that work on them."""

    def __init__(self, backend, pools: Pools, max_window: int) -> None:
        self.backend, self.max_window = backend, max_window
        self.pools = {name: backend.put(array) for name, array in pools.arrays().items()}

    def step(self, step: Step, out_dtype=None, **options) -> np.ndarray:
        dtype = step.x.dtype if out_dtype is None else out_dtype
        out = self.backend.put(np.full(step.x.shape, np.nan).astype(dtype))
        arrays = {name: self.backend.put(array) for name, array in step.arrays().items()}
        result = ssm.checkpointing_ssu(
            **self.pools,
            **arrays,
            out=out,
            dt_softplus=step.dt_softplus,
            pad_slot_id=step.pad_slot_id,
            max_window=self.max_window,
            **options,
        )
        assert result is out
        return self.backend.get(out)

    def advance(self, accepted, q: int, slots) -> None:
        ssm.advance_ring(
            self.pools["ring_start"],
            self.pools["prev_num_accepted_tokens"],
            self.backend.put(np.asarray(accepted, np.int32)),
            q,
            self.backend.put(np.asarray(slots, np.int32)),
            max_window=self.max_window,
            ring_buffer_len=self.pools["x_cache"].shape[2],
        )

    def __getattr__(self, name: str) -> np.ndarray:
        return self.backend.get(self.pools[name])

    def snapshot(self) -> Pools:
        return Pools(**{name: self.backend.get(array) for name, array in self.pools.items()})


def follow(run: Run, case: Case, stream, rng, steps: int, what: str = "", reject: bool = True):
    """Random steps of all slots but the last, checked token by token; returns the waiting rows."""
    live = list(range(case.num_slots - 1))
    waiting = dict.fromkeys(live, 0)
    worst = 0.0
    for number in range(steps):
        order = rng.permutation(live)
        q = int(rng.integers(1, case.npredicted + 1))
        slots = [int(slot) for slot in order] + [-1]
        step, exact = stream.propose(slots, q)
        if isinstance(stream, RandomStream) and case.state_dtype != "float32":
            state = run.state
            for slot in live:
                stream.exact.resync(slot, state[slot], waiting[slot])
            exact = stream.exact.propose(step)
        out = run.step(step)
        assert_close(out, exact, case.state_dtype, f"{what} out of step {number}")
        assert not np.any(out[-1].astype(np.float64)), "padding must be 0"
        accepted = [int(rng.integers(0 if reject else q, q + 1)) for _ in live] + [q]
        run.advance(accepted, q, slots)
        for slot, kept in zip(slots[:-1], accepted, strict=False):
            flushed = reference.flushes(waiting[slot], q, case.max_window)
            waiting[slot] = kept + (0 if flushed else waiting[slot])
            stream.accept(slot, kept)
        prev = run.prev_num_accepted_tokens
        assert {slot: prev[slot] for slot in live} == waiting
        worst = max(worst, relative_l2(out, exact))
    return waiting


# --- Every shape, format and window -------------------------------------------------------------


def check_one(backend, case: Case, seed: int, out_dtype=None, **options) -> None:
    """One step from random cursors: outputs, states, rings and everything that must not change."""
    rng = np.random.default_rng(seed)
    batch = case.num_slots - 1
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:2] = 0, case.max_window
    poison_dead_rows(pools)
    slots = rng.permutation(case.num_slots)[:batch].astype(np.int32)
    step = make_step(case, batch, rng, slots=slots, strided=True)
    step = replace(step, **options)
    run = Run(backend, pools, case.max_window)
    out = run.step(step, out_dtype)
    after = run.snapshot()

    dt = processed_dt(step)
    exact = Recurrence(pools.state)
    expected_state = pools.state.astype(np.float64)
    for b, slot in enumerate(slots):
        start, live = int(pools.ring_start[slot]), int(pools.prev_num_accepted_tokens[slot])
        rows = (start + np.arange(live + case.npredicted)) % case.ring_buffer_len
        old, new = rows[:live], rows[live:]
        replayed = replay_rows(pools, step.A, slot, old)
        exact.resync(slot, replayed, 0)
        if reference.flushes(live, case.npredicted, case.max_window):
            expected_state[slot] = replayed
            assert_close(after.state[slot], replayed, case.state_dtype, f"state of slot {slot}")
        else:
            assert np.array_equal(bits(after.state[slot]), bits(pools.state[slot]))
        assert np.array_equal(bits(after.x_cache[slot][:, new]), bits(step.x[b].swapaxes(0, 1)))
        assert np.array_equal(bits(after.B_cache[slot][:, new]), bits(step.B[b].swapaxes(0, 1)))
        np.testing.assert_allclose(after.dt_cache[slot][:, new], dt[b].T, rtol=DT_TOLERANCE)
        for name in ("x_cache", "B_cache", "dt_cache"):
            untouched = np.setdiff1d(np.arange(case.ring_buffer_len), new)
            before, now = getattr(pools, name)[slot], getattr(after, name)[slot]
            assert np.array_equal(bits(now[:, untouched]), bits(before[:, untouched])), name
    assert_close(out, exact.propose(step), case.state_dtype, "out")
    for slot in np.setdiff1d(np.arange(case.num_slots), slots):
        for name in ("state", "x_cache", "B_cache", "dt_cache"):
            assert np.array_equal(
                bits(getattr(after, name)[slot]), bits(getattr(pools, name)[slot])
            ), name
    assert np.array_equal(after.ring_start, pools.ring_start)
    assert np.array_equal(after.prev_num_accepted_tokens, pools.prev_num_accepted_tokens)


def replay_rows(pools: Pools, A: np.ndarray, slot: int, rows: np.ndarray) -> np.ndarray:
    """The float64 state after the given ring rows of a slot."""
    from oracles import advance

    state = pools.state[slot].astype(np.float64)
    for j in rows:
        dt = pools.dt_cache[slot][:, j].astype(np.float64)
        state = advance(state, A, pools.x_cache[slot][:, j], dt, pools.B_cache[slot][:, j])
    return state


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
@pytest.mark.parametrize(
    "shape", ["tiny", "three-heads-per-group", "five-heads-per-group", "seven-heads-per-group",
              "one-head-per-group", "widest"],
)  # fmt: skip
def test_every_shape_and_format(backend, form, shape, dtypes):
    for tokens, window in ((1, 16), (9, 16)):
        case = Case(SHAPES[shape], tokens, window, *dtypes, num_slots=4)
        check_one(backend, case, seed=tokens)


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_number_of_tokens(backend, tokens):
    for window in sorted({tokens, 16, min(16, tokens + 3)}):
        check_one(backend, replace(BASE, npredicted=tokens, max_window=window), seed=window)


@pytest.mark.parametrize("name", ["D", "z", "dt_bias", "dt_softplus"])
@pytest.mark.parametrize("tokens", [2, 4])
def test_options_left_out(backend, form, tokens, name):
    absent = {"dt_softplus": False} if name == "dt_softplus" else {name: None}
    case = replace(BASE, npredicted=tokens, max_window=8)
    if name == "dt_softplus":
        # Without softplus dt is used as it comes, so it had better be positive.
        rng = np.random.default_rng(3)
        dt = rng.uniform(0.01, 0.3, (case.num_slots - 1, tokens, 4)).astype(np.float32)
        absent = {**absent, "dt": dt, "dt_bias": None}
    check_one(backend, case, seed=5, **absent)


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_outputs_before_rounding(backend, tokens, dtypes):
    """A float32 `out` shows the error that rounding to 16 bits would hide."""
    case = Case(BASE.shape, tokens, 16, *dtypes)
    check_one(backend, case, seed=tokens, out_dtype=np.float32)
    check_one(backend, case, seed=tokens, out_dtype=np.float32, z=None)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_types_of_per_head_values(backend, weights):
    check_one(backend, replace(BASE, weight_dtype=weights), seed=6)


def test_per_head_values_each_of_its_own_type(backend):
    rng = np.random.default_rng(0)
    A, D, dt_bias = make_weights(BASE, rng)
    given = {"A": A.astype(np.float16), "D": D.astype(DTYPES["bfloat16"]), "dt_bias": dt_bias}
    check_one(backend, BASE, seed=7, **given)


@pytest.mark.parametrize("form", ["tied", "int64 slots", "no slots"])
def test_forms_of_arguments_agree(backend, form):
    rng = np.random.default_rng(8)
    pools = make_pools(BASE, rng, fill=True)
    slots = np.arange(4, dtype=np.int32)
    step = make_step(BASE, 4, rng, slots=slots)
    other = {
        "tied": step.tied(),
        "int64 slots": replace(step, state_batch_indices=slots.astype(np.int64)),
        "no slots": replace(step, state_batch_indices=None),
    }[form]
    runs = [Run(backend, pools, BASE.max_window) for _ in range(2)]
    outs = [run.step(given) for run, given in zip(runs, (step, other), strict=True)]
    assert np.array_equal(bits(outs[0]), bits(outs[1]))
    for name in pools.arrays():
        assert np.array_equal(bits(getattr(runs[0], name)), bits(getattr(runs[1], name))), name


def test_rank_three_is_one_token(backend):
    rng = np.random.default_rng(9)
    case = replace(BASE, npredicted=1)
    pools = make_pools(case, rng, fill=True)
    step = make_step(case, 3, rng)
    single = replace(step, x=step.x[:, 0], dt=step.dt[:, 0], B=step.B[:, 0], C=step.C[:, 0],
                     z=step.z[:, 0])  # fmt: skip
    out = Run(backend, pools, case.max_window).step(step)
    assert np.array_equal(bits(out[:, 0]), bits(Run(backend, pools, 16).step(single)))


# --- Long streams -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
def test_audit_over_a_random_stream(backend, dtypes):
    case = Case(Shape("audit", 3, 1, 64, 64), 4, 16, *dtypes, num_slots=4)
    rng = np.random.default_rng(10)
    pools = make_pools(case, rng)
    pools.state[...] = 0
    run, stream = Run(backend, pools, case.max_window), Audit(case)
    waiting = follow(run, case, stream, rng, steps=24)
    state = run.state
    for slot, rows in waiting.items():
        assert np.array_equal(state[slot].astype(np.float64), stream.state(slot, rows))


@pytest.mark.parametrize("tokens, window", [(1, 16), (1, 1), (4, 16), (6, 8), (16, 16), (3, 11)])
def test_halving_over_a_random_stream(backend, tokens, window):
    case = replace(BASE, npredicted=tokens, max_window=window)
    rng = np.random.default_rng(11)
    pools, stream = make_pools(case, rng), Halving(case)
    pools.state[...] = stream.checkpoint()
    run = Run(backend, pools, case.max_window)
    waiting = follow(run, case, stream, rng, steps=20)
    state = run.state
    for slot, rows in waiting.items():
        assert_close(state[slot], stream.state(slot, rows), "float32", f"state of slot {slot}")


@pytest.mark.parametrize("dtypes", GPU_DTYPES, ids="-".join)
def test_random_stream_against_the_recurrence(backend, dtypes):
    case = Case(Shape("stream", 4, 2, 64, 128), 4, 16, *dtypes, num_slots=4)
    rng = np.random.default_rng(12)
    pools = make_pools(case, rng)
    run, stream = Run(backend, pools, case.max_window), RandomStream(case, pools.state, rng)
    waiting = follow(run, case, stream, rng, steps=24)
    state = run.state
    if case.state_dtype == "float32":
        for slot, rows in waiting.items():
            assert_close(state[slot], stream.state(slot, rows), "float32", f"slot {slot}")


def test_splitting_a_stream_gives_the_same_rings_and_states(backend):
    rng = np.random.default_rng(13)
    case = replace(BASE, npredicted=8, max_window=8, num_slots=2)
    pools = make_pools(case, rng)
    step = make_step(case, 2, rng)
    whole, split = (Run(backend, pools, case.max_window) for _ in range(2))
    one = whole.step(step)
    whole.advance([8, 8], 8, [0, 1])
    parts = []
    for t in range(8):
        parts.append(split.step(step.tokens(t, t + 1)))
        split.advance([1, 1], 1, [0, 1])
    for name in pools.arrays():
        assert np.array_equal(bits(getattr(whole, name)), bits(getattr(split, name))), name
    assert relative_l2(np.concatenate(parts, 1), one) < 2e-3


# --- What must not be touched or must not matter -------------------------------------------------


@pytest.mark.parametrize("kind", POISONS)
def test_dead_rows_may_hold_anything(backend, form, kind):
    for tokens in (1, 4):
        case = replace(BASE, npredicted=tokens)
        rng = np.random.default_rng(14)
        pools = make_pools(case, rng, fill=True)
        pools.prev_num_accepted_tokens[:] = 0, 5, 13, 16, 1
        step = make_step(case, case.num_slots, rng)
        clean, poisoned = pools.copy(), pools.copy()
        for slot in range(case.num_slots):
            for ring in (clean.x_cache, clean.B_cache, clean.dt_cache):
                ring[slot][:, dead_rows(pools, slot)] = 0
        poison_dead_rows(poisoned, kind)
        runs = [Run(backend, given, case.max_window) for given in (clean, poisoned)]
        outs = [run.step(step) for run in runs]
        assert np.isfinite(outs[0].astype(np.float64)).all()
        assert np.array_equal(bits(outs[0]), bits(outs[1]))
        assert np.array_equal(bits(runs[0].state), bits(runs[1].state))


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
@pytest.mark.parametrize("pad_slot_id", [-1, 0, 3])
@pytest.mark.parametrize("tokens", [2, 4])
def test_padding(backend, form, tokens, pad_slot_id, index_type):
    rng = np.random.default_rng(15)
    case = replace(BASE, npredicted=tokens, num_slots=5)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16  # every row would flush
    slots = np.array([4, -1, 0, 5, 3, -7], index_type)
    step = make_step(case, len(slots), rng, slots=slots)
    step = replace(step, pad_slot_id=pad_slot_id)
    live = [b for b, s in enumerate(slots) if s != pad_slot_id and 0 <= s < case.num_slots]
    run = Run(backend, pools, case.max_window)
    out = run.step(step)
    alone = Run(backend, pools, case.max_window)
    for b in live:
        rows = {name: None if (a := getattr(step, name)) is None else a[b : b + 1]
                for name in ("x", "dt", "B", "C", "z", "state_batch_indices")}  # fmt: skip
        assert np.array_equal(bits(out[b : b + 1]), bits(alone.step(replace(step, **rows))))
    padding = np.setdiff1d(np.arange(len(slots)), live)
    assert not out[padding].astype(np.float64).any()
    for name in pools.arrays():
        assert np.array_equal(bits(getattr(run, name)), bits(getattr(alone, name))), name
    kept = Run(backend, pools, case.max_window).step(step, pad_output="keep")
    assert np.isnan(kept[padding].astype(np.float64)).all()
    assert np.array_equal(bits(kept[live]), bits(out[live]))


def test_dummy_slot_full_of_nan_is_harmless(backend):
    rng = np.random.default_rng(16)
    pools = make_pools(BASE, rng, fill=True)
    spoilt = pools.copy()
    spoilt.state[2] = np.nan
    step = make_step(BASE, 3, rng, slots=np.array([0, 2, 1], np.int32))
    outs = [Run(backend, given, BASE.max_window).step(step) for given in (pools, spoilt)]
    assert np.array_equal(bits(outs[0][[0, 2]]), bits(outs[1][[0, 2]]))


def test_odd_slot_strides_and_guard_bands(backend):
    rng = np.random.default_rng(17)
    pools = make_pools(BASE, rng, fill=True)
    step = make_step(BASE, BASE.num_slots, rng)
    paged, guards = guarded_pools(pools, SLOT_PADS)
    compact, strided = (Run(backend, given, BASE.max_window) for given in (pools, paged))
    compact_out = compact.step(step)
    buffers = {name: backend.put(guard.buffer) for name, guard in guards.items()}
    for name, guard in guards.items():
        inside = buffers[name][guard.offset :][: guard.array.shape[0] * guard.array.strides[0]]
        view = inside.view(guard.array.dtype)
        if view.ndim == 1 and guard.array.ndim > 1:
            slots = guard.array.shape[0]
            view = view.reshape(slots, -1)[:, : guard.array[0].size].reshape(guard.array.shape)
        strided.pools[name] = view[: guard.array.shape[0]]
    assert np.array_equal(bits(strided.step(step)), bits(compact_out))
    for name, guard in guards.items():
        guard.check(name, backend.get(buffers[name]))
        assert np.array_equal(bits(getattr(strided, name)), bits(getattr(compact, name))), name


def test_repeating_a_step_without_flush_changes_nothing(backend):
    rng = np.random.default_rng(18)
    pools = make_pools(BASE, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 0, 3, 7, 11, 12
    step = make_step(BASE, BASE.num_slots, rng)
    run = Run(backend, pools, BASE.max_window)
    outs = [run.step(step)]
    first = run.snapshot()
    outs.append(run.step(step))
    assert np.array_equal(bits(outs[0]), bits(outs[1]))
    for name, array in first.arrays().items():
        assert np.array_equal(bits(array), bits(getattr(run, name))), name


def test_order_of_the_batch_does_not_matter(backend):
    rng = np.random.default_rng(19)
    pools = make_pools(BASE, rng, fill=True)
    step = make_step(BASE, 4, rng, slots=np.array([3, 0, 4, 1], np.int32))
    order = np.array([2, 0, 3, 1])
    rows = {name: getattr(step, name)[order]
            for name in ("x", "dt", "B", "C", "z", "state_batch_indices")}  # fmt: skip
    a, b = (Run(backend, pools, BASE.max_window) for _ in range(2))
    assert np.array_equal(bits(a.step(step)[order]), bits(b.step(replace(step, **rows))))
    assert np.array_equal(bits(a.state), bits(b.state))


# --- Numbers ------------------------------------------------------------------------------------


def test_large_gates_and_large_dt(backend):
    """Sixteen gates of -5.5, one of -100, and a dt of 1,000 before small ones."""
    case = replace(BASE, npredicted=8, max_window=8, num_slots=3)
    rng = np.random.default_rng(20)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 0, 8, 4
    pools.ring_start[:] = 0, 13, 6
    step = make_step(case, 3, rng)
    dt = np.full((3, 8, 4), 0.01, np.float32)
    dt[0], dt[1, 3] = 5.5, 100.0
    dt[2, 2] = 1000.0
    pools.dt_cache[2][:, 6] = 1000.0
    step = replace(step, dt=dt, A=-np.ones(4, np.float32), dt_softplus=False, dt_bias=None, z=None)
    exact = Recurrence(pools.state)
    for slot in range(3):
        rows = (pools.ring_start[slot] + np.arange(pools.prev_num_accepted_tokens[slot])) % 16
        exact.resync(slot, replay_rows(pools, step.A, slot, rows), 0)
    out = Run(backend, pools, case.max_window).step(step)
    expected = exact.propose(step)
    for b in range(3):
        assert_close(out[b], expected[b], "float32", f"row {b}")


def test_softplus_values_in_the_ring(backend):
    values = np.array([-100, -20, 0, 19.999, 20, 20.001, 88, 100, 1e4], np.float32)
    case = replace(BASE, npredicted=9, max_window=9, num_slots=1)
    rng = np.random.default_rng(21)
    step = make_step(case, 1, rng)
    dt = np.broadcast_to(values[None, :, None], (1, 9, 4)).copy()
    step = replace(step, dt=dt, dt_bias=np.zeros(4, np.float32), A=np.full(4, -1e-3, np.float32))
    run = Run(backend, make_pools(case, rng), case.max_window)
    run.step(step)
    start = int(run.ring_start[0])
    stored = run.dt_cache[0][:, (start + np.arange(9)) % case.ring_buffer_len]
    exact = np.logaddexp(0, values.astype(np.float64))
    # exp(-100) is below the normal range, which the GPU flushes to 0.
    exact[0] = 0
    np.testing.assert_allclose(stored, np.broadcast_to(exact, (4, 9)), rtol=1e-6, atol=1e-37)


def test_no_nan_from_finite_inputs(backend):
    case = replace(BASE, npredicted=4, num_slots=4)
    rng = np.random.default_rng(22)
    pools = make_pools(case, rng, fill=True)
    pools.state[0], pools.state[1] = 0, 1e30
    step = make_step(case, 4, rng)
    dt = step.dt.copy()
    dt[2], dt[3] = -200.0, 500.0
    z = step.z.copy()
    z[0], z[1] = -300.0, 300.0
    run = Run(backend, pools, case.max_window)
    assert np.isfinite(run.step(replace(step, dt=dt, z=z)).astype(np.float64)).all()
    assert np.isfinite(run.state).all()


# --- The plain update ---------------------------------------------------------------------------


def plain(
    backend, state: np.ndarray, step: Step, out_dtype=None, **options
) -> tuple[np.ndarray, np.ndarray]:
    device_state = backend.put(state)
    dtype = step.x.dtype if out_dtype is None else out_dtype
    out = backend.put(np.full(step.x.shape, np.nan).astype(dtype))
    arrays = {name: backend.put(array) for name, array in step.arrays().items()}
    ssm.selective_state_update(
        device_state, **arrays, out=out, dt_softplus=step.dt_softplus,
        pad_slot_id=step.pad_slot_id, **options,
    )  # fmt: skip
    return backend.get(out), backend.get(device_state)


@pytest.mark.parametrize("dtypes", [*GPU_DTYPES, ("float32", "float32"), ("bfloat16", "float32")],
                         ids="-".join)  # fmt: skip
@pytest.mark.parametrize("shape", ["tiny", "three-heads-per-group", "five-heads-per-group",
                                   "widest"])  # fmt: skip
def test_plain_update(backend, shape, dtypes):
    for tokens in (1, 4, 16):
        case = Case(SHAPES[shape], tokens, 16, *dtypes, num_slots=4)
        rng = np.random.default_rng(tokens)
        state = make_pools(case, rng).state
        slots = np.array([2, -1, 0], np.int32)
        step = make_step(case, 3, rng, slots=slots, strided=True)
        exact = Recurrence(state, dt_dtype="float64")
        expected = exact.propose(step)
        out, after = plain(backend, state, step)
        assert_close(out, expected, case.state_dtype, "out")
        assert not out[1].astype(np.float64).any()
        for slot in (0, 2):
            exact.accept(slot, tokens)
            assert_close(after[slot], exact.state(slot), case.state_dtype, "state")
        assert np.array_equal(bits(after[[1, 3]]), bits(state[[1, 3]]))
        unrounded, _ = plain(backend, state, step, np.float32)
        assert_close(unrounded, expected, "float32", "out before rounding")
        kept, _ = plain(backend, state, step, pad_output="keep")
        assert np.isnan(kept[1].astype(np.float64)).all()


@pytest.mark.parametrize("form", ["tied", "int64 slots", "without z and D"])
def test_forms_of_the_plain_update(backend, form):
    rng = np.random.default_rng(23)
    case = replace(BASE, npredicted=2)
    state = make_pools(case, rng).state
    step = make_step(case, 3, rng, slots=np.array([1, 0, 4], np.int32))
    if form == "without z and D":
        step = replace(step, z=None, D=None, dt_bias=None)
        exact = Recurrence(state, dt_dtype="float64")
        assert_close(plain(backend, state, step)[0], exact.propose(step), "float32", "out")
        return
    other = (
        step.tied()
        if form == "tied"
        else replace(step, state_batch_indices=step.state_batch_indices.astype(np.int64))
    )
    a, b = plain(backend, state, step), plain(backend, state, other)
    assert np.array_equal(bits(a[0]), bits(b[0]))
    assert np.array_equal(bits(a[1]), bits(b[1]))


# --- Cursors and slots --------------------------------------------------------------------------


@pytest.mark.parametrize("max_window, tokens", [(16, 8), (8, 8), (5, 3), (1, 1)])
def test_advance_agrees_with_the_flush_rule_everywhere(backend, max_window, tokens):
    rows = max_window + tokens
    table = [
        (prev, q, accepted)
        for prev in range(max_window + 1)
        for q in range(tokens + 1)
        for accepted in range(q + 1)
    ]
    prev, q, accepted = (np.array(column, np.int32) for column in zip(*table, strict=True))
    start = (np.arange(len(table)) % rows).astype(np.int32)
    cursors = backend.put(start), backend.put(prev)
    ssm.advance_ring(
        *cursors, backend.put(accepted), backend.put(q), max_window=max_window, ring_buffer_len=rows
    )
    expected = [
        reference.advance_cursors(int(s), *(int(v) for v in (p, a, n)), max_window, rows)
        for s, p, a, n in zip(start, prev, accepted, q, strict=True)
    ]
    result = np.stack([backend.get(cursor) for cursor in cursors], 1)
    assert np.array_equal(result, np.array(expected, np.int32))


def test_advance_clamps_resets_and_skips(backend):
    start = np.array([3, 4, 5, 6, 7, 8], np.int32)
    prev = np.array([2, 2, 2, 16, 2, 2], np.int32)
    cursors = backend.put(start), backend.put(prev)
    ssm.advance_ring(
        *cursors,
        backend.put(np.array([9, -1, 3, 0, 4, 4], np.int64)),
        4,
        backend.put(np.array([0, 1, 2, 3, -1, 99], np.int64)),
        max_window=16,
        ring_buffer_len=20,
        reset=backend.put(np.array([0, 0, 1, 0, 1, 1], bool)),
    )
    assert backend.get(cursors[0]).tolist() == [3, 4, 0, (6 + 16) % 20, 7, 8]
    assert backend.get(cursors[1]).tolist() == [2 + 4, 2, 0, 0, 2, 2]


def test_reset_empties_slots_of_all_layers(backend):
    rng = np.random.default_rng(24)
    pools = make_pools(BASE, rng, fill=True)
    states = [backend.put(pools.state), backend.put(pools.state)]
    cursors = [backend.put(pools.ring_start), backend.put(pools.prev_num_accepted_tokens)]
    ssm.reset_slots(*cursors, backend.put(np.array([4, -1, 1, 7], np.int32)), states)
    gone, kept = [1, 4], [0, 2, 3]
    for cursor, before in zip(cursors, (pools.ring_start, pools.prev_num_accepted_tokens),
                              strict=True):  # fmt: skip
        after = backend.get(cursor)
        assert not after[gone].any()
        assert np.array_equal(after[kept], before[kept])
    for state in states:
        after = backend.get(state)
        assert not after[gone].any()
        assert np.array_equal(bits(after[kept]), bits(pools.state[kept]))


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_load_state_rounds_to_nearest_even(backend, target, source):
    rng = np.random.default_rng(25)
    case = replace(BASE, state_dtype=target)
    state = make_pools(case, rng).state
    given = rng.standard_normal((4, *state.shape[1:])).astype(DTYPES[source])
    given[0, 0, 0, :4] = 1 + 2.0**-9, 1 + 3 * 2.0**-9, -0.0, 1 + 2.0**-12
    device_state = backend.put(state)
    ssm.load_state(device_state, backend.put(np.array([3, -1, 0, 9], np.int64)), backend.put(given))
    after = backend.get(device_state)
    for row, slot in ((0, 3), (2, 0)):
        expected = given[row].astype(np.float32).astype(DTYPES[target])
        assert np.array_equal(bits(after[slot]), bits(expected))
    assert np.array_equal(bits(after[[1, 2, 4]]), bits(state[[1, 2, 4]]))
