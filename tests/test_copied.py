"""States in two forms: float16 carries the recurrence, and outputs come from a smaller copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, make_step
from oracles import (
    Guarded,
    Recurrence,
    bits,
    float64,
    poison_dead_rows,
    processed_dt,
    relative_l2,
)
from runs import (
    COPIED,
    NumPyBackend,
    Run,
    Stored,
    device_of,
    half_cells,
    make_stored,
    new_rows,
    put_state,
    reference_path,
    replayed,
)
from test_eight_bit import KINDS, flush, odd_rows

import replayssm_cupy as ssm
from replayssm_cupy import reference
from replayssm_cupy.read_copy import encode_copy

# Codes times block scales are exact operands; the tokens' weights are two bf16 terms.
OUT_TOLERANCE = 2e-5
FOLD_TOLERANCE = 3e-5  # of the largest value of a row: two bf16 terms of 16 weighted tokens

SHAPES = [
    Shape(f"{head_dim}x{dstate}", 2, 1, head_dim, dstate)
    for head_dim in (64, 80, 96, 128)
    for dstate in (64, 128, 256)
]
BASE = Case(Shape("base", 4, 2, 64, 128), 4, 16, "float16+fp8")

both_formats = pytest.mark.parametrize("state_format", COPIED)


def assert_copy(after: Stored, exact: np.ndarray, slot: int, state_format: str) -> None:
    """The copy of a slot against the state that it is of, before any rounding."""
    largest = {"float16+fp8": 448, "float16+nvfp4": 2688}[state_format]
    amax = np.abs(exact).max(axis=-1)
    scale = after.state_scale[slot]
    np.testing.assert_allclose(scale, amax / largest, rtol=FOLD_TOLERANCE)
    error = np.abs(after.as_read().state[slot] - exact)
    slack = FOLD_TOLERANCE * amax[..., None]
    if state_format == "float16+fp8":
        allowed = half_cells(exact, scale, "float8_e4m3fn") * (1 + 1e-6)
    else:
        blocks = np.abs(exact).reshape(*exact.shape[:-1], -1, 16).max(axis=-1)
        allowed = 17 / 96 * np.repeat(blocks, 16, axis=-1) + 2.2e-6 * amax[..., None]
    assert (error <= allowed + slack).all(), (error - allowed).max()


def plain(pools: Stored) -> Stored:
    """The float16 state alone."""
    return replace(pools, state_scale=None, state_copy=None)


def check_one(backend, case: Case, seed: int, **options) -> None:
    """One step from random cursors: outputs, both forms of the state, what must not change."""
    rng = np.random.default_rng(seed)
    batch = case.num_slots - 1
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:2] = 0, case.max_window
    poison_dead_rows(pools)
    slots = rng.permutation(case.num_slots)[:batch].astype(np.int32)
    step = make_step(case, batch, rng, slots=slots, strided=True)
    run, alone = Run(backend, pools, case.max_window), Run(backend, plain(pools), case.max_window)
    out = run.step(step, np.float32, **options)
    alone.step(step, np.float32, **options)
    after = run.snapshot()
    # The recurrence is that of a float16 state, bit for bit: the copy never gets into it.
    assert np.array_equal(bits(after.state), bits(alone.snapshot().state))

    exact = Recurrence(pools.as_read().state)
    for slot in slots:
        exact.resync(slot, replayed(pools.as_read(), step.A, slot), 0)
        live = int(pools.prev_num_accepted_tokens[slot])
        if reference.flushes(live, case.npredicted, case.max_window):
            assert_copy(after, replayed(pools, step.A, slot), slot, case.state_dtype)
        else:
            for name in ("state", "state_copy", "state_scale"):
                assert np.array_equal(
                    bits(getattr(after, name)[slot]), bits(getattr(pools, name)[slot])
                )
    error = relative_l2(out, exact.propose(step))
    assert error <= OUT_TOLERANCE, f"relative L2 error {error:.2e}"
    for b, slot in enumerate(slots):
        new = new_rows(pools, slot, case.npredicted)
        assert np.array_equal(bits(after.x_cache[slot][:, new]), bits(step.x[b].swapaxes(0, 1)))
        np.testing.assert_allclose(after.dt_cache[slot][:, new], processed_dt(step)[b].T, rtol=1e-5)
    (idle,) = np.setdiff1d(np.arange(case.num_slots), slots)
    for name, array in pools.arrays().items():
        assert np.array_equal(bits(getattr(after, name)[idle]), bits(array[idle])), name


@both_formats
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape(backend, form, shape, tokens, activation, state_format):
    case = Case(shape, tokens, 16, state_format, activation, num_slots=4)
    check_one(backend, case, seed=tokens)


@both_formats
@pytest.mark.parametrize("tokens, window", [(1, 1), (6, 8), (16, 16), (3, 11)])
def test_other_windows(backend, tokens, window, state_format):
    case = Case(Shape("grouped", 6, 2, 80, 64), tokens, window, state_format)
    check_one(backend, case, seed=window)


@both_formats
def test_many_heads_of_a_group(backend, form, state_format):
    """Heads that a warp takes one after the other."""
    check_one(backend, Case(Shape("many", 24, 2, 64, 128), 1, 16, state_format, num_slots=9), 3)


@both_formats
def test_the_cpu_path(state_format):
    with reference_path():
        for tokens in (1, 11):
            case = replace(BASE, npredicted=tokens, state_dtype=state_format)
            check_one(NumPyBackend(), case, tokens)


@both_formats
def test_sequences_of_different_lengths(backend, form, state_format):
    """The packed batch gives the bits of each sequence alone."""
    case = replace(BASE, state_dtype=state_format)
    rng = np.random.default_rng(5)
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 14, 13, 16, 3, 0
    slots = np.array([3, 0, -1, 2, 4], np.int32)
    lengths = np.array([4, 3, 2, 0, 1])
    step = make_step(case, 5, rng, slots=slots)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = {
        name: np.concatenate([getattr(step, name)[b, :q] for b, q in enumerate(lengths)])[None]
        for name in ("x", "dt", "B", "C", "z")
    }
    run = Run(backend, pools, case.max_window)
    out = run.step(replace(step, **packed), cu_seqlens=ends, max_seqlen=4)
    after = run.snapshot()
    for b, (slot, q) in enumerate(zip(slots, lengths, strict=True)):
        rows = out[0, ends[b] : ends[b + 1]]
        if slot < 0:
            assert not rows.any()
        elif q:
            alone = Run(backend, pools, case.max_window)
            one = {n: getattr(step, n)[b : b + 1, :q] for n in ("x", "dt", "B", "C", "z")}
            expected = alone.step(replace(step, **one, state_batch_indices=slots[b : b + 1]))
            assert np.array_equal(bits(rows), bits(expected[0]))
            for name in ("state", "state_copy", "state_scale"):
                got, wanted = getattr(after, name), getattr(alone.snapshot(), name)
                assert np.array_equal(bits(got[slot]), bits(wanted[slot])), name


# --- Rows with an outcome of their own -----------------------------------------------------------


@both_formats
def test_odd_rows_of_a_fold(backend, form, state_format):
    """Exact sums: both forms are those of the NumPy model, bit for bit."""
    pools, state, case = odd_rows("float8_e4m3fn")
    put_state(pools, np.zeros(state.shape, np.float32)[None], state_format)
    run = Run(backend, pools, case.max_window)
    flush(run, pools)
    after = run.snapshot()
    copy, scale = encode_copy(state, state_format)
    finite = np.isfinite(state)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = state.astype(np.float16)
    np.testing.assert_array_equal(after.state[0][finite], rounded[finite])
    assert not np.isfinite(after.state[0][~finite]).any()
    assert np.array_equal(bits(after.state_copy[0]), bits(copy))
    assert np.array_equal(bits(after.state_scale[0]), bits(scale))
    values = dict(zip(KINDS, after.as_read().state[0, :, 3], strict=True))
    for kind in ("nan", "inf"):
        assert np.isnan(values[kind]).all()
    assert np.isfinite(np.delete(after.as_read().state[0], 3, axis=1)).all()


@both_formats
def test_a_broken_row_stays_visible_and_alone(backend, form, state_format):
    rng = np.random.default_rng(6)
    case = replace(BASE, state_dtype=state_format)
    pools = make_stored(case, rng)
    state = pools.values().astype(np.float32)
    state[1, 2, 17, 40] = np.nan
    put_state(pools, state, state_format)
    step = make_step(case, case.num_slots, rng)
    out = Run(backend, pools, case.max_window).step(step, np.float32)
    broken = np.zeros(out.shape, bool)
    broken[1, :, 2, 17] = True
    assert np.array_equal(np.isnan(out), broken)


# --- Slots ---------------------------------------------------------------------------------------


@both_formats
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_load_state_is_the_model_bit_for_bit(backend, source, state_format):
    rng = np.random.default_rng(2)
    for dstate in (64, 128, 256):
        case = Case(Shape("load", 3, 1, 80, dstate), 1, 16, state_format, num_slots=5)
        pools = make_stored(case, rng)
        given = rng.standard_normal((4, 3, 80, dstate)) * 10.0 ** rng.uniform(-3, 3, (4, 3, 80, 1))
        given[0, 0, :8] = 0
        for p, value in enumerate((0, -0.0, 1e-38, 2e-38, 1e38, np.nan, np.inf, -np.inf)):
            given[0, 0, p, 5:9] = value
        with np.errstate(over="ignore"):
            given = given.astype(np.float32).astype(DTYPES[source])
        arrays = {
            name: backend.put(getattr(pools, name))
            for name in ("state", "state_copy", "state_scale")
        }
        slots = np.array([3, -1, 0, 9])
        ssm.load_state(slots=backend.put(slots), source=backend.put(given), **arrays)
        after = {name: backend.get(array) for name, array in arrays.items()}
        with np.errstate(over="ignore", invalid="ignore"):
            copy, scale = encode_copy(given.astype(np.float32), state_format)
            state = given.astype(np.float32).astype(np.float16)
        for row, slot in ((0, 3), (2, 0)):
            np.testing.assert_array_equal(after["state"][slot], state[row])
            assert np.array_equal(bits(after["state_copy"][slot]), bits(copy[row]))
            assert np.array_equal(bits(after["state_scale"][slot]), bits(scale[row]))
        for name, array in after.items():
            assert np.array_equal(bits(array[[1, 2, 4]]), bits(getattr(pools, name)[[1, 2, 4]]))


@both_formats
def test_reset_empties_both_forms(backend, state_format):
    rng = np.random.default_rng(4)
    case = replace(BASE, state_dtype=state_format)
    layers = [make_stored(case, rng, fill=True) for _ in range(2)]
    lists = {
        name: [backend.put(getattr(pools, name)) for pools in layers]
        for name in ("state", "state_copy", "state_scale")
    }
    cursors = [backend.put(layers[0].ring_start), backend.put(layers[0].prev_num_accepted_tokens)]
    slots = backend.put(np.array([4, -1, 1, 7], np.int32))
    ssm.reset_slots(
        *cursors, slots, lists["state"], state_copies=lists["state_copy"],
        state_scales=lists["state_scale"],
    )  # fmt: skip
    gone, kept = [1, 4], [0, 2, 3]
    for layer, pools in enumerate(layers):
        for name, arrays in lists.items():
            after = backend.get(arrays[layer])
            assert (float64(after[gone]) == (name == "state_scale")).all()
            assert np.array_equal(bits(after[kept]), bits(getattr(pools, name)[kept]))
    assert not backend.get(cursors[0])[gone].any()
    assert not backend.get(cursors[1])[gone].any()


@both_formats
def test_slot_strides_and_guard_bands(backend, form, state_format):
    """Both forms and the scales lie in wider pages; nothing outside them is written."""
    rng = np.random.default_rng(3)
    case = replace(BASE, state_dtype=state_format)
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16, 2, 14, 0, 13
    step = make_step(case, case.num_slots, rng)
    compact, paged = (Run(backend, pools, case.max_window) for _ in range(2))
    guards = {}
    for name, pad in (("state", 24), ("state_copy", 48), ("state_scale", 3)):
        array = getattr(pools, name)
        guard = Guarded(array.shape, array.dtype, slot_pad=pad)
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


# --- Rounding ------------------------------------------------------------------------------------


@both_formats
def test_stochastic_rounding_is_that_of_float16(backend, form, state_format):
    """The state has the bits of a float16 state with the seed; the copy does not see the noise."""
    rng = np.random.default_rng(7)
    case = replace(BASE, state_dtype=state_format)
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16
    step = make_step(case, case.num_slots, rng)
    seed = np.array([1 << 40], np.int64)
    noisy, nearest = (Run(backend, pools, case.max_window) for _ in range(2))
    alone = Run(backend, plain(pools), case.max_window)
    noisy.step(step, rand_seed=seed)
    nearest.step(step)
    alone.step(step, rand_seed=seed)
    got = noisy.snapshot()
    assert np.array_equal(bits(got.state), bits(alone.snapshot().state))
    assert not np.array_equal(bits(got.state), bits(nearest.snapshot().state))
    for name in ("state_copy", "state_scale"):
        assert np.array_equal(bits(getattr(got, name)), bits(getattr(nearest.snapshot(), name)))


# --- Errors --------------------------------------------------------------------------------------


def test_what_a_copy_must_be(backend):
    rng = np.random.default_rng(8)
    pools = make_stored(BASE, rng, fill=True)
    step = make_step(BASE, BASE.num_slots, rng)
    four = make_stored(replace(BASE, state_dtype="float16+nvfp4"), rng)

    def refused(error: type[Exception], message: str, **others) -> None:
        run = Run(backend, replace(pools, **others), BASE.max_window)
        before = run.snapshot()
        with pytest.raises(error, match=message):
            run.step(step)
        for name, array in before.arrays().items():
            assert np.array_equal(bits(array), bits(getattr(run.snapshot(), name)))

    refused(
        TypeError, "^state: expected float16 beside state_copy, got bfloat16$",
        state=pools.state.astype(DTYPES["bfloat16"]),
    )  # fmt: skip
    refused(
        TypeError, "^state_copy: expected one of float8_e4m3fn, uint8, got int8$",
        state_copy=pools.state_copy.view(np.int8),
    )  # fmt: skip
    refused(
        ValueError, r"^state_copy: expected \(5, 4, 4, 1152\) beside state of \(5, 4, 64, 128\)",
        state_copy=pools.state_copy.view(np.uint8),
    )  # fmt: skip
    refused(
        ValueError, r"^state_copy: expected \(5, 4, 64, 128\) beside state of .*, got \(5, 2, ",
        state_copy=np.ascontiguousarray(pools.state_copy[:, :2]),
    )  # fmt: skip
    refused(
        ValueError,
        "^state_scale: expected an array of float32 scales with states of float16.fp8, got None$",
        state_scale=None,
    )  # fmt: skip
    assert four.state_copy.shape == (5, 4, 4, 1152)


# --- A stack of them -----------------------------------------------------------------------------


def make_stack(backend, state_format: str, **options) -> ssm.LayerStack:
    return ssm.LayerStack(
        2, 6, 4, 64, 2, 128, max_window=16, npredicted=4, state_dtype=state_format,
        device=device_of(backend), **options,
    )  # fmt: skip


def decode_some(backend, stack: ssm.LayerStack, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Steps of 1 to 4 tokens in slots 4, 0 and 2, some of them accepted; outs of the last one."""
    rng = np.random.default_rng(seed)
    slots = backend.put(np.array([4, 0, 2], np.int32))
    case = replace(BASE, state_dtype=stack.state_dtype, npredicted=4)
    outs: list[np.ndarray] = []
    weights = None
    for _ in range(steps):
        q = int(rng.integers(1, 5))
        outs = []
        for layer in range(2):
            step = make_step(case, 3, rng, q=q, weights=weights)
            weights = weights or (step.A, step.D, step.dt_bias)
            given = {name: backend.put(array) for name, array in step.arrays().items()}
            outs.append(backend.get(stack.step(layer, **given, slots=slots)))
        stack.advance(slots, backend.put(rng.integers(0, q + 1, 3).astype(np.int32)))
    stack.A = [backend.put(weights[0])] * 2
    return outs


def arrays_of(backend, stack: ssm.LayerStack) -> dict[str, list[np.ndarray]]:
    lists = {"state": stack.states, "copy": stack.state_copies, "scale": stack.state_scales}
    return {name: [backend.get(array) for array in arrays] for name, arrays in lists.items()}


@both_formats
def test_a_stack_carries_the_recurrence_of_float16(backend, state_format):
    copied, alone = make_stack(backend, state_format), make_stack(backend, "float16")
    assert copied.state_dtype == state_format
    assert f"state {state_format}," in repr(copied)
    bits_of_copy = {"float16+fp8": 8, "float16+nvfp4": 4.5}[state_format]
    rows = 2 * 4 * 64  # layers, heads, rows
    assert copied.bytes_per_slot - alone.bytes_per_slot == rows * (128 * bits_of_copy / 8 + 4)
    outs, plain_outs = (decode_some(backend, stack, 12) for stack in (copied, alone))
    for layer in range(2):
        states = backend.get(copied.states[layer]), backend.get(alone.states[layer])
        assert np.array_equal(bits(states[0]), bits(states[1]))
        error = relative_l2(float64(outs[layer]), float64(plain_outs[layer]))
        assert 1e-4 < error < (0.05 if state_format == "float16+fp8" else 0.15)
    copied.reset(backend.put(np.array([4], np.int64)))
    after = arrays_of(backend, copied)
    assert not any(array[4].any() for array in after["state"])
    assert not any(float64(array[4]).any() for array in after["copy"])
    assert all((array[4] == 1).all() for array in after["scale"])


@both_formats
@pytest.mark.parametrize("stochastic", [False, True])
def test_snapshots_are_flushes(backend, stochastic, state_format):
    """A snapshot of all live rows has the bits of a flush, in both forms; one of none copies."""
    stack = make_stack(backend, state_format, stochastic_rounding=stochastic)
    decode_some(backend, stack, 9)
    stack.refresh(stack.A)
    live = backend.get(stack.prev_num_accepted_tokens)
    assert live[[4, 0]].any()
    before = arrays_of(backend, stack)
    src, dst = np.array([4, 0, 4], np.int64), np.array([1, 3, 5], np.int64)
    prefix = np.array([live[4], live[0], 0], np.int32)
    stack.materialize(*(backend.put(array) for array in (src, dst, prefix)), check=True)
    made = arrays_of(backend, stack)
    for name, layers in made.items():
        for layer in range(2):
            assert np.array_equal(bits(layers[layer][5]), bits(before[name][layer][4])), name
            for slot in (0, 2, 4):
                assert np.array_equal(bits(layers[layer][slot]), bits(before[name][layer][slot]))
    stack.flush_slots(stack.A, backend.put(np.array([4, 0], np.int32)))
    flushed = arrays_of(backend, stack)
    for name, layers in made.items():
        for layer in range(2):
            for source, target in ((4, 1), (0, 3)):
                same = np.array_equal(
                    bits(layers[layer][target]), bits(flushed[name][layer][source])
                )
                # Random bits belong to a place in the storage.
                assert same or (stochastic and name == "state"), name


@both_formats
@pytest.mark.parametrize("dstate, head_dim", [(64, 80), (256, 64), (256, 128)])
def test_snapshots_of_other_shapes(backend, dstate, head_dim, state_format):
    rng = np.random.default_rng(9)
    stack = ssm.LayerStack(
        1, 3, 2, head_dim, 1, dstate, state_dtype=state_format, device=device_of(backend)
    )
    given = rng.standard_normal((1, 2, head_dim, dstate)).astype(np.float32)
    first = backend.put(np.array([0], np.int32))
    stack.load_state(0, first, backend.put(given))
    case = Case(Shape("other", 2, 1, head_dim, dstate), 1, 16, state_format)
    A = None
    for _ in range(5):
        step = make_step(case, 1, rng, weights=A)
        A = (step.A, step.D, step.dt_bias)
        stack.step(0, **{n: backend.put(a) for n, a in step.arrays().items()}, slots=first)
        stack.advance(first, backend.put(np.array([1], np.int32)))
    stack.refresh([backend.put(A[0])])
    for target, prefix in ((1, 5), (2, 0)):
        numbers = (np.array([number], np.int32) for number in (0, target, prefix))
        stack.materialize(*(backend.put(array) for array in numbers))
    made = arrays_of(backend, stack)
    stack.flush_slots([backend.put(A[0])], first)
    for name, (after,) in arrays_of(backend, stack).items():
        assert np.array_equal(bits(made[name][0][1]), bits(after[0])), name
        assert np.array_equal(bits(made[name][0][2]), bits(made[name][0][0])), name


@both_formats
def test_copies_and_images_take_both_forms(backend, state_format):
    stack = make_stack(backend, state_format)
    decode_some(backend, stack, 9)
    stack.copy_slots(
        *(backend.put(np.array(slots, np.int32)) for slots in ([4, 0], [1, 3]))
    )  # fmt: skip
    after = arrays_of(backend, stack)
    for name, layers in after.items():
        for array in layers:
            assert np.array_equal(bits(array[[1, 3]]), bits(array[[4, 0]])), name
    image = stack.export_slots([4, 2])
    other = make_stack(backend, state_format)
    other.import_slots(image, [5, 0])
    there = arrays_of(backend, other)
    for name, layers in after.items():
        for layer in range(2):
            for source, target in ((4, 5), (2, 0)):
                assert np.array_equal(
                    bits(layers[layer][source]), bits(there[name][layer][target])
                ), name
    for wrong in {"float16", *COPIED} - {state_format}:
        with pytest.raises(ValueError, match=r"expected state_dtype = \S+ as in the stack, got"):
            make_stack(backend, wrong).import_slots(image, [0, 1])


@both_formats
def test_a_stack_over_arrays_that_exist(backend, state_format):
    made = make_stack(backend, state_format)
    lists = (made.states, made.x_caches, made.B_caches, made.dt_caches)
    cursors = (made.ring_start, made.prev_num_accepted_tokens)
    options = {"npredicted": 4, "max_window": 16, "state_scales": made.state_scales}
    stack = ssm.LayerStack.from_arrays(*lists, *cursors, **options, state_copies=made.state_copies)
    assert stack.state_dtype == state_format
    expected = decode_some(backend, make_stack(backend, state_format), 3)
    for got, wanted in zip(decode_some(backend, stack, 3), expected, strict=True):
        assert np.array_equal(bits(got), bits(wanted))
    with pytest.raises(ValueError, match=r"^state_copies: expected one array per layer \(2\)"):
        ssm.LayerStack.from_arrays(*lists, *cursors, **options, state_copies=made.state_copies[:1])
