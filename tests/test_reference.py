"""The NumPy reference: replay against the token-by-token recurrence, in exact arithmetic and in
the precision of the CPU path, with every cursor, wrap, flush, rejection and padding.

The letters and numbers in comments are public fault reports that a test repeats.
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
from cases import (
    CPU_DTYPES,
    DTYPES,
    MODELS,
    ODD,
    SHAPES,
    SLOT_PADS,
    WINDOWS,
    Case,
    Pools,
    Shape,
    Step,
    exact_case,
    make_pools,
    make_step,
    make_weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
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
    relative_l2,
)

from replayssm_cupy import reference
from replayssm_cupy.numerics import round_to

pytestmark = pytest.mark.filterwarnings("error")

# The reference takes any sizes: small ones make room for every cursor.
MICRO = Shape("micro", 4, 2, 8, 16)
MICRO_LONG = Shape("micro-long", 2, 1, 4, 128)


def replay(
    pools: Pools,
    step: Step,
    case: Case,
    *,
    out_dtype: str = "float64",
    precision: reference.Precision = np.float64,
    zero_padding: bool = True,
) -> np.ndarray:
    """One call on the pools; out starts as NaN."""
    out = np.full(step.x.shape, np.nan).astype(DTYPES[out_dtype])
    reference.checkpointing_ssu_cpu(
        reference.Storage(pools.state),
        *(pools.x_cache, pools.B_cache, pools.dt_cache),
        *(pools.ring_start, pools.prev_num_accepted_tokens),
        *(step.x, step.dt, step.A, step.B, step.C, out, step.D, step.z, step.dt_bias),
        *(step.dt_softplus, step.state_batch_indices, step.pad_slot_id),
        *(case.max_window, zero_padding),
        precision=precision,
    )
    return out


def commit(pools: Pools, slot: int, accepted: int, q: int, case: Case) -> None:
    start, prev = reference.advance_cursors(
        int(pools.ring_start[slot]),
        int(pools.prev_num_accepted_tokens[slot]),
        accepted,
        q,
        case.max_window,
        case.ring_buffer_len,
    )
    pools.ring_start[slot], pools.prev_num_accepted_tokens[slot] = start, prev


def assert_same_bits(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=what)


def assert_same_pools(a: Pools, b: Pools) -> None:
    for name, array in a.arrays().items():
        assert_same_bits(array, b.arrays()[name], name)


# --- The definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_recurrence_is_the_definition(name):
    rng = np.random.default_rng(1)
    case = exact_case(Case(SHAPES[name], npredicted=2, num_slots=1))
    pools, step = make_pools(case, rng), make_step(case, 1, rng)
    exact = Recurrence(pools.state, dt_dtype="float64")
    expected = exact.propose(step)
    exact.accept(0, 2)
    y, state = reference.recurrence(
        *(pools.state[0], step.x[0], step.dt[0], step.A, step.B[0], step.C[0]),
        *(step.D, step.z[0], step.dt_bias, True),
    )
    assert_close(y, expected[0], "float64", "y")
    assert_close(state, exact.state(0), "float64", "state")


def every_cursor(case: Case, starts: range, prevs: range, qs: range) -> None:
    """One slot for every live count, one call for every start and q."""
    rng = np.random.default_rng(2)
    case = replace(case, num_slots=len(prevs))
    full = make_pools(case, rng, fill=True)
    full.prev_num_accepted_tokens[:] = prevs
    weights = make_weights(case, rng)
    for start in starts:
        full.ring_start[:] = start
        poison_dead_rows(full)
        for q in qs:
            step = make_step(case, case.num_slots, rng, q=q, weights=weights)
            pools = full.copy()
            out = replay(pools, step, case)
            for slot, prev in enumerate(prevs):
                check_one_cursor(full, pools, step, out, slot, prev, q, case)
        for name in ("x_cache", "B_cache", "dt_cache"):
            getattr(full, name)[...] = np.nan_to_num(getattr(full, name), nan=0.25)


def check_one_cursor(
    before: Pools, after: Pools, step: Step, out: np.ndarray, slot: int, prev: int, q: int, case
) -> None:
    rows = (int(before.ring_start[slot]) + np.arange(prev + q)) % case.ring_buffer_len
    old, appended = rows[:prev], rows[prev:]
    x, B, dt = (
        np.moveaxis(ring[slot][:, old], 1, 0)
        for ring in (before.x_cache, before.B_cache, before.dt_cache)
    )
    unused = np.zeros_like(B)
    _, current = reference.recurrence(before.state[slot], x, dt, step.A, B, unused)
    y, _ = reference.recurrence(
        *(current, step.x[slot], step.dt[slot], step.A, step.B[slot], step.C[slot]),
        *(step.D, step.z[slot], step.dt_bias, step.dt_softplus),
    )
    assert relative_l2(out[slot], y) <= 1e-12
    if prev + q > case.max_window:
        assert relative_l2(after.state[slot], current) <= 1e-12
    else:
        assert_same_bits(after.state[slot], before.state[slot])
    processed = reference.processed_dt(step.dt[slot], step.dt_bias, True, np.float64)
    written = ("x_cache", step.x[slot]), ("B_cache", step.B[slot]), ("dt_cache", processed)
    for name, tokens in written:
        expected = getattr(before, name)[slot].copy()
        expected[:, appended] = np.moveaxis(tokens, 0, 1)
        assert_same_bits(getattr(after, name)[slot], expected, name)


@pytest.mark.parametrize(("T", "W"), [(1, 1), (3, 5), (5, 5), (2, 7)])
def test_every_start_every_live_count_every_length(T, W):
    case = exact_case(Case(MICRO, npredicted=T, max_window=W))
    every_cursor(case, range(T + W), range(W + 1), range(1, T + 1))


@pytest.mark.parametrize(("T", "W"), [(1, 16), (4, 16), (16, 16), (3, 32)])
def test_every_live_count_of_the_real_windows(T, W):
    case = exact_case(Case(MICRO, npredicted=T, max_window=W))
    every_cursor(case, range(0, T + W, 5), range(W + 1), range(1, T + 1, 3))


# --- Long streams with rejections ----------------------------------------------------------------


def follow(stream, pools: Pools, case: Case, rng: np.random.Generator, steps: int, **call):
    """Random batches, orders, lengths, padding and acceptance; every output and checkpoint."""
    state_dtype = case.state_dtype
    for _ in range(steps):
        batch = int(rng.integers(1, case.num_slots + 1))
        slots = rng.permutation(case.num_slots)[:batch].tolist()
        slots.insert(int(rng.integers(0, batch + 1)), int(rng.choice([-1, -7, case.num_slots])))
        q = int(rng.integers(1, case.npredicted + 1))
        step, expected = stream.propose(slots, q)
        before = pools.copy()
        out = replay(pools, step, case, **call)
        assert_close(out, expected, state_dtype, "out")
        for slot in range(case.num_slots):
            waiting = int(before.prev_num_accepted_tokens[slot])
            flushed = slot in slots and waiting + q > case.max_window
            if flushed:
                exact = stream.state(slot, 0)
                assert_close(pools.state[slot], exact, state_dtype, f"state[{slot}]")
            else:
                assert_same_bits(pools.state[slot], before.state[slot])
            if slot in slots:
                accepted = int(rng.integers(0, q + 1))
                stream.accept(slot, accepted)
                commit(pools, slot, accepted, q, case)
            if flushed and isinstance(stream, RandomStream):
                waiting = int(pools.prev_num_accepted_tokens[slot])
                stream.exact.resync(slot, pools.state[slot], waiting)
        # A rejected or stale row may never count again, whatever it holds.
        poison_dead_rows(pools, str(rng.choice(POISONS)))
    for slot in range(case.num_slots):
        waiting = int(pools.prev_num_accepted_tokens[slot])
        assert_close(pools.state[slot], stream.state(slot, waiting), state_dtype, "last state")


@pytest.mark.parametrize("dt_cache_dtype", ["float64", "float32"])
@pytest.mark.parametrize(("T", "W"), WINDOWS)
def test_random_stream_in_exact_arithmetic(T, W, dt_cache_dtype):
    # With a float32 ring the dt that is stored is the dt that every output uses.
    rng = np.random.default_rng(3)
    case = replace(exact_case(Case(MICRO, T, W)), dt_cache_dtype=dt_cache_dtype)
    pools = make_pools(case, rng)
    follow(RandomStream(case, pools.state, rng), pools, case, rng, 60)


@pytest.mark.parametrize(("T", "W"), [(1, 16), (6, 8)])
@pytest.mark.parametrize(("state_dtype", "activation_dtype"), CPU_DTYPES)
def test_random_stream_in_float32(state_dtype, activation_dtype, T, W):
    rng = np.random.default_rng(4)
    case = Case(MICRO, T, W, state_dtype, activation_dtype)
    pools = make_pools(case, rng)
    stream = RandomStream(case, pools.state, rng)
    follow(stream, pools, case, rng, 60, out_dtype=activation_dtype, precision=np.float32)


@pytest.mark.parametrize(("T", "W"), WINDOWS)
@pytest.mark.parametrize(("state_dtype", "activation_dtype"), CPU_DTYPES)
def test_audit_finds_every_token_exactly_once(state_dtype, activation_dtype, T, W):
    rng = np.random.default_rng(5)
    case = Case(MICRO_LONG, T, W, state_dtype, activation_dtype)
    pools = make_pools(case, rng)
    pools.state[...] = 0
    # Exact values and no rounding: the allowed error of assert_close is 0 in 16 bits.
    follow(Audit(case), pools, case, rng, 80, out_dtype=activation_dtype, precision=np.float32)


def test_audit_probe_shows_one_token():
    rng = np.random.default_rng(6)
    case = Case(MICRO_LONG, 4, 16)
    pools, audit = make_pools(case, rng), Audit(case)
    pools.state[...] = 0
    for accepted in (4, 2, 3):
        step, expected = audit.propose([3], 4, probe=5)
        np.testing.assert_array_equal(replay(pools, step, case), expected)
        audit.accept(3, accepted)
        commit(pools, 3, accepted, 4, case)
    # Token 5 was the second of the second call and stays; 6 and 7 were rejected.
    step, expected = audit.propose([3], 1, probe=5)
    assert replay(pools, step, case).max() == expected.max() == audit.x_value(3)
    for rejected in (6, 7, 11):
        step, _ = audit.propose([3], 1, probe=rejected)
        assert not replay(pools, step, case).any()


@pytest.mark.parametrize(("T", "W"), WINDOWS)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_halving_keeps_order_and_decay(state_dtype, T, W):
    rng = np.random.default_rng(7)
    case = Case(MICRO, T, W, state_dtype, num_slots=3)
    pools, stream = make_pools(case, rng), Halving(case)
    pools.state[...] = stream.checkpoint()
    if state_dtype == "float32":
        follow(stream, pools, case, rng, 60, out_dtype="float32", precision=np.float32)
        return
    # bfloat16 holds 2 - 2^-n up to n = 7 and no further.
    for n in range(1, 8):
        step, expected = stream.propose([1], 1)
        out = replay(pools, step, case, out_dtype="bfloat16", precision=np.float32)
        np.testing.assert_array_equal(out.astype(np.float64), expected)
        assert out[0, 0, 0, 0] == 2 - 2.0**-n
        stream.accept(1, 1)
        commit(pools, 1, 1, 1, case)


# --- Number formats and accuracy -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state_dtype", "activation_dtype"),
    [(shape.name, "float32", "bfloat16") for shape in MODELS]
    + [(shape.name, *dtypes) for shape in ODD for dtypes in CPU_DTYPES],
)
def test_shapes_and_formats(name, state_dtype, activation_dtype):
    rng = np.random.default_rng(8)
    case = Case(SHAPES[name], 2, 8, state_dtype, activation_dtype, num_slots=2)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 5, 8
    step = make_step(case, 2, rng, slots=np.array([1, 0]), strided=True)
    exact_pools, pools16 = pools.copy(), pools.copy()
    exact_pools.state = pools.state.astype(np.float64)
    out = replay(pools, step, case, out_dtype="float32", precision=np.float32)
    out16 = replay(pools16, step, case, out_dtype=activation_dtype, precision=np.float32)
    exact = replay(exact_pools, step, case)
    # Held to the limit of an fp32 state: the reference rounds no operand.
    assert_close(out, exact, "float32", "out")
    assert_close(pools.state, exact_pools.state, "float32", "state")
    assert_close(pools.dt_cache[1][:, :2], exact_pools.dt_cache[1][:, :2], "float32", "dt")
    # One rounding of the float32 output, of the state, and nothing else.
    assert_same_bits(out16, round_to(out, activation_dtype))
    assert_same_pools(pools, pools16)


def test_float32_checkpoint_after_a_thousand_flushes():
    # N7, N10: not worse than the plain update, which rounds the state at every token.
    rng = np.random.default_rng(9)
    case = Case(Shape("slow", 4, 2, 8, 16), 4, 4, num_slots=1)
    pools = make_pools(case, rng)
    plain, exact = pools.state.copy(), pools.state[0].astype(np.float64)
    A, D, dt_bias = make_weights(case, rng)
    # Slow heads remember the roundings of hundreds of flushes.
    weights = (A / 16, D, dt_bias)
    for _ in range(1001):
        step = make_step(case, 1, rng, weights=weights)
        replay(pools, step, case, out_dtype="float32", precision=np.float32)
        commit(pools, 0, 4, 4, case)
        checkpoint = exact
        update(plain, step)
        dt = reference.processed_dt(step.dt[0], dt_bias, True, np.float32)
        _, exact = reference.recurrence(exact, step.x[0], dt, step.A, step.B[0], step.C[0])
    # The ring still holds the last four tokens.
    error = relative_l2(pools.state[0], checkpoint)
    assert error <= 5e-6
    assert error <= 1.1 * relative_l2(plain[0], exact)


def test_strong_decay_is_not_factored():
    # N3: exp(-82.5) over the window, then one token of exp(-100).
    rng = np.random.default_rng(10)
    case = Case(MICRO, 16, 16, activation_dtype="float32", num_slots=2)
    pools = make_pools(case, rng)
    for gates in (np.full(16, 5.5), np.array([0.0] * 7 + [100.0] + [0.01] * 8)):
        step = make_step(case, 2, rng)
        step = replace(step, dt_softplus=False, dt_bias=None, A=-np.ones(4, np.float32))
        step.dt[...] = gates[:, None]
        exact_pools = replace(pools.copy(), state=pools.state.astype(np.float64))
        exact = replay(exact_pools, step, case)
        out = replay(pools, step, case, out_dtype="float32", precision=np.float32)
        for slot in range(2):
            y, _ = reference.recurrence(
                *(pools.state[slot], step.x[slot], step.dt[slot], step.A),
                *(step.B[slot], step.C[slot], step.D, step.z[slot]),
            )
            assert relative_l2(exact[slot], y) <= 1e-12
        assert_close(out, exact, "float32")


def test_a_long_step_does_not_blur_a_short_one():
    # The decay between two tokens after a step of 1e4 is that of their own dt alone.
    case = exact_case(Case(MICRO, 4, 16, num_slots=1))
    rng = np.random.default_rng(11)
    pools = make_pools(case, rng)
    step = make_step(case, 1, rng)
    step = replace(step, dt_softplus=False, dt_bias=None, D=None, z=None, A=np.full(4, -1.0))
    step.dt[0] = np.array([1e4, 1e-9, 1e-9, 1e-9])[:, None]
    out = replay(pools, step, case)
    B, C = np.repeat(step.B[0], 2, 1), np.repeat(step.C[0], 2, 1)
    first = np.exp(-3e-9) * 1e4 * (B[0] * C[3]).sum(-1)[:, None] * step.x[0, 0]
    assert relative_l2(out[0, 3], first) <= 1e-9
    S = np.zeros((4, 8, 16))
    for t in range(4):
        S = np.exp(-step.dt[0, t, 0]) * S + step.dt[0, t, 0] * np.einsum(
            "hp,hn->hpn", step.x[0, t], B[t]
        )
    assert relative_l2(out[0, 3], np.einsum("hpn,hn->hp", S, C[3])) <= 1e-15


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
def test_softplus_of_extreme_steps_stays_finite(weight_dtype):
    # N4, through the whole step: the values reach the ring, nothing becomes inf or NaN.
    values = np.array([-100, -20, 0, 19.999, 20, 20.001, 88, 100, 1e4])
    rng = np.random.default_rng(12)
    case = Case(MICRO, 9, 16, weight_dtype=weight_dtype, num_slots=1)
    pools, step = make_pools(case, rng), make_step(case, 1, rng)
    step.dt[0] = values.astype(step.dt.dtype)[:, None]
    step.dt_bias[...] = 0
    pools.ring_start[:] = 20
    out = replay(pools, step, case, out_dtype="float32", precision=np.float32)
    assert np.isfinite(out).all()
    stored = pools.dt_cache[0][:, (20 + np.arange(9)) % case.ring_buffer_len]
    given_dt = step.dt[0].astype(np.float64).T
    exact = np.where(given_dt <= 20, np.log1p(np.exp(np.minimum(given_dt, 20))), given_dt)
    np.testing.assert_allclose(stored, exact, rtol=2**-22, atol=5e-44)
    # The bias is added in float32, not in the format of dt.
    step.dt_bias[...] = 2.0**-7
    step.dt[0] = 1
    replay(pools, step, case, precision=np.float32)
    stored = pools.dt_cache[0][:, 20]
    np.testing.assert_allclose(stored, np.log1p(np.exp(1 + 2.0**-7)), rtol=1e-6)


def test_decay_underflow_and_zero_rows_are_finite():
    rng = np.random.default_rng(13)
    case = Case(MICRO, 4, 16, num_slots=1)
    pools, step = make_pools(case, rng, fill=True), make_step(case, 1, rng)
    pools.prev_num_accepted_tokens[:] = 16
    pools.dt_cache[...] = 1e30
    pools.x_cache[...] = 0
    step = replace(step, A=np.full(4, -1e8, np.float32))
    step.x[...] = 0
    assert not replay(pools, step, case, out_dtype="float32", precision=np.float32).any()
    assert not pools.state.any()


# --- Dead rows, splits, repeats ------------------------------------------------------------------


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize(("state_dtype", "activation_dtype"), CPU_DTYPES)
def test_dead_rows_are_never_loaded(state_dtype, activation_dtype, kind):
    # N1: the same bits as with zeros there. R12: also when the rejected tokens stand there.
    rng = np.random.default_rng(14)
    case = Case(MICRO, 4, 16, state_dtype, activation_dtype, num_slots=17)
    clean = make_pools(case, rng, fill=True)
    clean.prev_num_accepted_tokens[:] = range(17)
    for slot in range(17):
        for ring in (clean.x_cache, clean.B_cache, clean.dt_cache):
            ring[slot][:, dead_rows(clean, slot)] = 0
    poisoned = clean.copy()
    poison_dead_rows(poisoned, kind)
    step = make_step(case, 17, rng)
    call = {"out_dtype": activation_dtype, "precision": np.float32}
    assert_same_bits(replay(poisoned, step, case, **call), replay(clean, step, case, **call))
    assert_same_bits(poisoned.state, clean.state)


@pytest.mark.parametrize("T", [2, 3, 4, 8, 16])
def test_one_call_of_many_tokens_equals_many_calls_of_one(T):
    # N8: the rings bit for bit, and the next fold with them.
    rng = np.random.default_rng(15)
    case = Case(MICRO, T, 16, "bfloat16")
    whole = make_pools(case, rng)
    single = whole.copy()
    step = make_step(case, case.num_slots, rng, strided=True)
    call = {"out_dtype": "float32", "precision": np.float32}
    outs = [replay(whole, step, case, **call), []]
    for slot in range(case.num_slots):
        commit(whole, slot, T, T, case)
    for t in range(T):
        outs[1].append(replay(single, step.tokens(t, t + 1), case, **call))
        for slot in range(case.num_slots):
            commit(single, slot, 1, 1, case)
    assert_same_pools(whole, single)
    assert relative_l2(np.concatenate(outs[1], axis=1), outs[0]) <= 1e-6
    # Make it flush: both fold the same T rows.
    small = replace(case, max_window=T)
    following = make_step(case, case.num_slots, rng)
    assert_same_bits(replay(whole, following, small), replay(single, following, small))
    assert_same_pools(whole, single)


@pytest.mark.parametrize("activation_dtype", ["bfloat16", "float16"])
def test_appended_rows_are_the_inputs_bit_for_bit(activation_dtype):
    # Any pattern: -0, subnormals, inf and NaN with their payloads.
    rng = np.random.default_rng(27)
    case = Case(MICRO, 4, 16, activation_dtype=activation_dtype, num_slots=1)
    pools, step = make_pools(case, rng), make_step(case, 1, rng)
    for array in (step.x, step.B):
        array.view(np.uint16)[...] = rng.integers(0, 2**16, array.shape)
    pools.ring_start[:], pools.prev_num_accepted_tokens[:] = 15, 3
    pools.x_cache[...] = pools.B_cache[...] = pools.dt_cache[...] = 0
    with np.errstate(all="ignore"):
        replay(pools, step, case, precision=np.float32)
    for ring, tokens in ((pools.x_cache, step.x), (pools.B_cache, step.B)):
        assert_same_bits(np.moveaxis(ring[0][:, [18, 19, 0, 1]], 1, 0), tokens[0])


def test_a_step_that_does_not_flush_may_be_repeated():
    # R17.
    rng = np.random.default_rng(16)
    case = Case(MICRO, 4, 16, num_slots=13)
    pools, step = make_pools(case, rng, fill=True), make_step(case, 13, rng)
    pools.prev_num_accepted_tokens[:] = range(13)
    first = replay(pools, step, case, precision=np.float32)
    once = pools.copy()
    assert_same_bits(replay(pools, step, case, precision=np.float32), first)
    assert_same_pools(pools, once)


def test_output_does_not_depend_on_the_flush():
    rng = np.random.default_rng(17)
    case = Case(MICRO, 4, 16, "bfloat16", num_slots=1)
    pools, step = make_pools(case, rng, fill=True), make_step(case, 1, rng)
    pools.prev_num_accepted_tokens[:] = 10
    other = pools.copy()
    flushing = replay(other, step, replace(case, max_window=12))
    assert_same_bits(replay(pools, step, case), flushing)
    assert (bits(other.state) != bits(pools.state)).any()


# --- Cursors -------------------------------------------------------------------------------------


def test_partial_acceptance_is_consumed_once():
    # R4: accept 2, then 4, 4, 4.
    rng = np.random.default_rng(18)
    case = Case(MICRO_LONG, 4, 16, num_slots=1)
    pools, audit = make_pools(case, rng), Audit(case)
    pools.state[...] = 0
    seen = []
    for accepted in (2, 4, 4, 4, 4):
        step, expected = audit.propose([0], 4)
        np.testing.assert_array_equal(replay(pools, step, case), expected)
        audit.accept(0, accepted)
        commit(pools, 0, accepted, 4, case)
        seen.append(int(pools.prev_num_accepted_tokens[0]))
    assert seen == [2, 6, 10, 14, 4]
    np.testing.assert_array_equal(pools.state[0], audit.state(0, 4))
    # 14 of the first 16 proposed tokens, each once.
    assert pools.state[0, 0, 0].tolist() == [1, 1, 0, 0] + [1] * 12 + [0] * 112


def test_accepted_counts_the_sampled_token():
    # R6: no draft accepted is one token, 0 is legal too, more than q is not.
    assert reference.advance_cursors(3, 5, 1, 4, 16, 20) == (3, 6)
    assert reference.advance_cursors(3, 5, 0, 4, 16, 20) == (3, 5)
    assert reference.advance_cursors(18, 13, 0, 4, 16, 20) == (11, 0)
    assert reference.advance_cursors(18, 13, 4, 4, 16, 20) == (11, 4)
    for accepted in (-1, 5):
        with pytest.raises(ValueError, match=f"num_accepted: expected 0 to 4 .*, got {accepted}"):
            reference.advance_cursors(3, 5, accepted, 4, 16, 20)


@pytest.mark.parametrize("q", range(1, 9))
def test_cursor_rule_and_step_agree(q):
    # R7: the rule sees the length of this call, not the longest one.
    rng = np.random.default_rng(19)
    case = Case(MICRO, 8, 16, num_slots=17)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = range(17)
    before = pools.copy()
    replay(pools, make_step(case, 17, rng, q=q), case, precision=np.float32)
    for prev in range(17):
        start = int(before.ring_start[prev])
        changed = (bits(pools.state[prev]) != bits(before.state[prev])).any()
        assert changed == reference.flushes(prev, q, 16) == (prev + q > 16)
        rule = reference.advance_cursors(start, prev, 1, q, 16, 24)
        assert rule == (((start + prev) % 24, 1) if changed else (start, prev + 1))
        assert reference.advance_cursors(start, prev, 0, 0, 16, 24) == (start, prev)


def test_a_reset_slot_shows_nothing_of_its_former_owner():
    # R16, R3: cursors 0 and state 0 are enough; the ring stays as it was.
    rng = np.random.default_rng(20)
    case = Case(MICRO, 1, 16)
    used, fresh = make_pools(case, rng), make_pools(case, rng)
    for pools in (used, fresh):
        pools.state[3] = 0
        pools.ring_start[3] = pools.prev_num_accepted_tokens[3] = 0
    for ring in (fresh.x_cache, fresh.B_cache, fresh.dt_cache):
        ring[...] = 0
    step = make_step(case, 1, rng, slots=np.array([3]))
    out = replay(used, step, case)
    assert np.isfinite(out).all()
    assert_same_bits(out, replay(fresh, step, case))


# --- Padding and memory --------------------------------------------------------------------------


def both_updates(pools: Pools, step: Step, case: Case, plain: bool, **call) -> np.ndarray:
    if plain:
        return update(pools.state, step, **call)
    return replay(pools, step, case, precision=np.float32, **call)


def update(
    state: np.ndarray,
    step: Step,
    precision: reference.Precision = np.float32,
    out_dtype: str = "float64",
    zero_padding: bool = True,
) -> np.ndarray:
    """The plain update on a state pool; out starts as NaN."""
    out = np.full(step.x.shape, np.nan).astype(DTYPES[out_dtype])
    reference.selective_state_update_cpu(
        reference.Storage(state),
        *(step.x, step.dt, step.A, step.B, step.C, out, step.D, step.z, step.dt_bias),
        *(step.dt_softplus, step.state_batch_indices, step.pad_slot_id, zero_padding, precision),
    )
    return out


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("plain", [False, True])
def test_padded_rows_read_and_write_nothing(plain, index_dtype):
    # P1, P4, P5: sentinel, another negative, one past the end; guard bands and NaN slots.
    rng = np.random.default_rng(21)
    case = Case(MICRO, 4, 16, "bfloat16", num_slots=8)
    source = make_pools(case, rng, fill=True)
    for dead in (0, 1, 2, 3, 5, 6):
        source.state[dead] = np.nan
    source.prev_num_accepted_tokens[:] = 13
    pools, guards = guarded_pools(source, SLOT_PADS)
    slots = np.array([4, -1, 7, -5, 8, 2**31 - 1], index_dtype)
    step = make_step(case, 6, rng, slots=slots)
    out = both_updates(pools, step, case, plain)
    live, padded = [0, 2], [1, 3, 4, 5]
    assert np.isfinite(out[live]).all()
    assert_same_bits(out[padded], np.zeros_like(out[padded]))
    for name, guard in guards.items():
        guard.check(name)
    for name, array in pools.arrays().items():
        others = [0, 1, 2, 3, 5, 6]
        assert_same_bits(array[others], source.arrays()[name][others], name)
    kept = both_updates(guarded_pools(source, {})[0], step, case, plain, zero_padding=False)
    assert_same_bits(kept[live], out[live])
    assert np.isnan(kept[padded]).all()
    # The live rows are those of a call without the others.
    alone = replace(step.tokens(0, 4), **{n: getattr(step, n)[live] for n in ("x", "dt", "B", "C")})
    alone = replace(alone, z=step.z[live], state_batch_indices=slots[live])
    assert_same_bits(both_updates(guarded_pools(source, {})[0], alone, case, plain), out[live])


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("plain", [False, True])
def test_pad_slot_id_may_be_a_real_slot(plain, index_dtype):
    # P3.
    rng = np.random.default_rng(22)
    case = Case(MICRO, 4, 16)
    source = make_pools(case, rng, fill=True)
    source.prev_num_accepted_tokens[:] = 13
    step = make_step(case, 2, rng, slots=np.array([0, 3], index_dtype))
    outs = []
    for pad_slot_id in (-1, 0):
        pools = source.copy()
        outs.append(both_updates(pools, replace(step, pad_slot_id=pad_slot_id), case, plain))
        changed = [(bits(pools.state[s]) != bits(source.state[s])).any() for s in range(5)]
        assert changed == [pad_slot_id == -1, False, False, True, False]
    assert outs[0][0].any()
    assert not outs[1][0].any()
    assert_same_bits(outs[0][1], outs[1][1])


@pytest.mark.parametrize("plain", [False, True])
def test_empty_batch_and_no_indices(plain):
    # P8, and slot = batch row without indices.
    rng = np.random.default_rng(23)
    case = Case(MICRO, 4, 16)
    pools = make_pools(case, rng, fill=True)
    before = pools.copy()
    empty = make_step(case, 0, rng, slots=np.zeros(0, np.int32))
    assert both_updates(pools, empty, case, plain).shape == (0, 4, 4, 8)
    assert_same_pools(pools, before)
    step = make_step(case, 3, rng)
    indexed = replace(step, state_batch_indices=np.arange(3))
    other = pools.copy()
    out = both_updates(other, indexed, case, plain)
    assert_same_bits(both_updates(pools, step, case, plain), out)
    assert_same_pools(pools, other)


@pytest.mark.parametrize("cut", ["every-second-slot", "first-heads", "own-slot-strides"])
def test_strided_pools_are_updated_in_place(cut):
    # X4, X5: the caller's memory changes, the memory between stays.
    rng = np.random.default_rng(24)
    case = Case(MICRO, 4, 16, "bfloat16")
    source = make_pools(case, rng, fill=True)
    compact = source.copy()
    names = ("state", "x_cache", "B_cache", "dt_cache")
    if cut == "own-slot-strides":
        pools, guards = guarded_pools(source, SLOT_PADS)
    else:
        pools, guards = source.copy(), {}
        for name in names:
            shape = getattr(source, name).shape
            twice = (2 * shape[0], *shape[1:]) if cut == "every-second-slot" else None
            big = np.full(twice or (shape[0], 2 * shape[1], *shape[2:]), -7, pools.state.dtype)
            big = big.astype(getattr(source, name).dtype)
            view = big[::2] if cut == "every-second-slot" else big[:, : shape[1]]
            view[...] = getattr(source, name)
            setattr(pools, name, view)
            guards[name] = big[1::2] if cut == "every-second-slot" else big[:, shape[1] :]
    step = make_step(case, 5, rng, slots=np.arange(5)[::-1])
    out = replay(pools, step, case, precision=np.float32)
    assert_same_bits(out, replay(compact, step, case, precision=np.float32))
    assert_same_pools(pools, compact)
    for name, guard in guards.items():
        if cut == "own-slot-strides":
            guard.check(name)
        else:
            assert (guard.astype(np.float32) == -7).all()


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="needs sparse private memory")
def test_offsets_beyond_32_bits():
    # X1: slots 2047, 2048 and 4096 of 2^20 elements each, in memory that is never touched between.
    rng = np.random.default_rng(25)
    case = Case(MICRO, 4, 16, "bfloat16", num_slots=4)
    compact = make_pools(case, rng, fill=True)
    compact.prev_num_accepted_tokens[:] = 13
    far = [0, 2047, 2048, 4096]
    stride, num_slots = 2**20, 4097
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, num_slots * stride * 2, flags=flags)
    state = np.frombuffer(memory, np.uint16).view(compact.state.dtype).reshape(num_slots, stride)
    state = state[:, : MICRO.nheads * MICRO.head_dim * MICRO.dstate]
    state = state.reshape(num_slots, *compact.state.shape[1:])
    spread = {"state": state}
    for name, array in compact.arrays().items():
        if name != "state":
            spread[name] = np.zeros((num_slots, *array.shape[1:]), array.dtype)
        spread[name][far] = array
    pools = Pools(**spread)
    step = make_step(case, 3, rng, slots=np.array([3, 1, 2]))
    out = replay(compact, step, case, precision=np.float32)
    distant = replace(step, state_batch_indices=np.array([4096, 2047, 2048]))
    assert_same_bits(replay(pools, distant, case, precision=np.float32), out)
    for name, array in compact.arrays().items():
        assert_same_bits(pools.arrays()[name][far], array, name)


# --- The plain update ----------------------------------------------------------------------------


@pytest.mark.parametrize(("state_dtype", "activation_dtype"), CPU_DTYPES)
def test_plain_update_is_the_recurrence(state_dtype, activation_dtype):
    rng = np.random.default_rng(26)
    case = Case(MICRO, 3, 16, state_dtype, activation_dtype)
    pools = make_pools(case, rng)
    exact = Recurrence(pools.state)
    step = make_step(case, 2, rng, slots=np.array([4, 1]), strided=True)
    expected = exact.propose(step)
    wide = pools.state.astype(np.float32)
    out = update(pools.state, step, out_dtype=activation_dtype)
    out32 = update(wide, step, out_dtype="float32")
    assert_close(out32, expected, "float32", "out")
    for slot in (4, 1):
        exact.accept(slot, 3)
        assert_close(wide[slot], exact.state(slot), "float32", "state")
    # The state is rounded once a call, the output once.
    assert_same_bits(pools.state, round_to(wide, state_dtype))
    assert_same_bits(out, round_to(out32, activation_dtype))


# --- Properties ----------------------------------------------------------------------------------

calls = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(calls, st.integers(0, 10), st.integers(4, 7), st.integers(0, 2**32 - 1))
def test_any_split_gives_the_same_sequence(plan, start, W, seed):
    """Accepted tokens are all that counts: not the calls, the rejections or where a ring began."""
    rng = np.random.default_rng(seed)
    case = exact_case(Case(MICRO, 4, W, num_slots=1))
    pools = make_pools(case, rng)
    pools.ring_start[:] = start % case.ring_buffer_len
    S, weights = pools.state[0].copy(), make_weights(case, rng)
    for q, wanted in plan:
        step = make_step(case, 1, rng, q=q, weights=weights)
        out = replay(pools, step, case)
        kept = min(q, wanted)

        def play(tokens, state, step=step):
            part = step.tokens(0, tokens)
            return reference.recurrence(
                *(state, part.x[0], part.dt[0], part.A, part.B[0], part.C[0], part.D),
                *(part.z[0], part.dt_bias, True),
            )

        assert relative_l2(out[0], play(q, S)[0]) <= 1e-12
        S = play(kept, S)[1]
        commit(pools, 0, kept, q, case)
        poison_dead_rows(pools)
    # Folding what waits gives the state of the whole sequence.
    rows = int(pools.ring_start[0]) + np.arange(int(pools.prev_num_accepted_tokens[0]))
    rows %= case.ring_buffer_len
    x, B, dt = pools.x_cache[0][:, rows], pools.B_cache[0][:, rows], pools.dt_cache[0][:, rows]
    assert relative_l2(reference.fold(pools.state[0], x, B, dt, weights[0]), S) <= 1e-12


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.permutations(range(5)), st.integers(0, 2**32 - 1))
def test_permutations_of_slots_and_batch_permute_the_results(slots, order, seed):
    rng = np.random.default_rng(seed)
    case = Case(MICRO, 4, 16, "bfloat16")
    pools = make_pools(case, rng, fill=True)
    step = make_step(case, 5, rng, slots=np.array(slots))
    moved = Pools(**{name: array[slots].copy() for name, array in pools.arrays().items()})
    mixed = {n: getattr(step, n)[order] for n in ("x", "dt", "B", "C", "z")}
    other = replace(step, **mixed, state_batch_indices=np.array(order))
    out = replay(pools, step, case, out_dtype="bfloat16", precision=np.float32)
    assert_same_bits(
        replay(moved, other, case, out_dtype="bfloat16", precision=np.float32), out[order]
    )
    for name, array in pools.arrays().items():
        assert_same_bits(moved.arrays()[name], array[slots], name)
