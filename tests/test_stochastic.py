"""Stochastic rounding through the public calls: exact bits, no bias, and noise of its own for every
head, slot, layer and flush."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, Step, make_step
from oracles import Guarded, bits, float64
from runs import (
    EIGHT_BIT,
    ROUNDED,
    NumPyBackend,
    Run,
    Stored,
    decoded,
    device_of,
    make_stored,
    put_state,
    reference_path,
)

import replayssm_cupy as ssm
from replayssm_cupy.numerics import encode_state, mix_seed, row_fields, stochastic_round

rounded_types = pytest.mark.parametrize("dtype", ROUNDED)


# --- States that are exact before they are rounded -----------------------------------------------


def exact_rows(case: Case, rng: np.random.Generator) -> tuple[Stored, np.ndarray]:
    """A zero checkpoint and one live row in every slot. The fold is dt * x * B, which fp32 holds:
    each factor has at most eight bits. Also returns it."""
    s, slots = case.shape, case.num_slots
    pools = make_stored(case, rng)
    put_state(pools, np.zeros(pools.state.shape, np.float32), case.state_dtype)

    def factor(*shape: int) -> np.ndarray:
        signs = rng.choice([-1.0, 1.0], shape)
        return signs * rng.integers(1, 256, shape) * 2.0 ** rng.integers(-6, 7, shape)

    dt, x, B = np.abs(factor(slots, s.nheads)), factor(slots, s.nheads, s.head_dim) / 16, None
    B = factor(slots, s.ngroups, s.dstate) / 256
    for slot in range(slots):
        row = int(pools.ring_start[slot])
        pools.dt_cache[slot][:, row] = dt[slot]
        pools.x_cache[slot][:, row], pools.B_cache[slot][:, row] = x[slot], B[slot]
    pools.prev_num_accepted_tokens[:] = 1
    per_head = np.repeat(B, s.heads_per_group, axis=1)
    state = dt[:, :, None, None] * x[..., None] * per_head[:, :, None, :]
    assert np.array_equal(state, state.astype(np.float32))
    return pools, state.astype(np.float32)


def expected_store(
    state: np.ndarray,
    dtype: str,
    seed: int,
    rounds: int = 10,
    *,
    slots: np.ndarray | None = None,
    slot_stride: int | None = None,
    layer: int | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """What the model stores of states (batch, nheads, head_dim, dstate): values, or codes and
    scales. An element's random bits follow from its place in the storage."""
    batch, nheads, head_dim, dstate = state.shape
    slots = np.arange(batch) if slots is None else slots
    stride = nheads * head_dim * dstate if slot_stride is None else slot_stride
    heads, rows = np.arange(nheads)[:, None], np.arange(head_dim)
    offset = slots[:, None, None] * stride + (heads * head_dim + rows) * dstate
    key = np.int64(seed) if layer is None else mix_seed(np.int64(seed), layer)
    fields = row_fields(offset, key, dstate, dtype, rounds)
    if dtype in EIGHT_BIT:
        return encode_state(state, dtype, fields)
    return stochastic_round(state, fields, dtype), None


def no_tokens(pools: Stored, batch: int) -> tuple[Step, dict]:
    """The arguments of a step that brings nothing and folds whatever is live; no decay."""
    _, nheads, _, head_dim = pools.x_cache.shape
    _, ngroups, _, dstate = pools.B_cache.shape
    x = np.zeros((1, 0, nheads, head_dim), pools.x_cache.dtype)
    B = np.zeros((1, 0, ngroups, dstate), pools.x_cache.dtype)
    step = Step(x, np.zeros((1, 0, nheads), np.float32), np.zeros(nheads, np.float32), B, B.copy())
    ends = np.zeros(batch + 1, np.int32)
    flush = {"cu_seqlens": ends, "max_seqlen": 1, "force_flush": np.ones(batch, np.uint8)}
    return step, flush


def store(backend, pools: Stored, seed: int | None, **options) -> Stored:
    """The pools after a forced flush of every slot."""
    run = Run(backend, pools, 16)
    step, flush = no_tokens(pools, len(pools.state))
    run.step(step, rand_seed=None if seed is None else np.array([seed]), **flush, **options)
    return run.snapshot()


def assert_stored(after: Stored, wanted: tuple[np.ndarray, np.ndarray | None]) -> None:
    values, scale = wanted
    different = int((bits(after.state) != bits(values)).sum())
    assert not different, f"{different} of {after.state.size} values"
    if scale is not None:
        assert np.array_equal(bits(after.state_scale), bits(scale))


# --- Bit for bit ---------------------------------------------------------------------------------


@rounded_types
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(64, 128), (80, 256), (96, 64), (128, 128)], ids=str)
def test_fold_is_the_model(backend, sizes, activation, dtype):
    case = Case(Shape("exact", 4, 2, *sizes), 1, 16, dtype, activation, num_slots=3)
    pools, state = exact_rows(case, np.random.default_rng(0))
    for seed in (1234567890123, -3):
        after = store(backend, pools, seed)
        assert_stored(after, expected_store(state, dtype, seed))
    nearest = store(backend, pools, None)
    if dtype in EIGHT_BIT:
        assert_stored(nearest, encode_state(state, dtype))
    else:
        with np.errstate(over="ignore"):
            assert_stored(nearest, (state.astype(DTYPES[dtype]), None))
    assert not np.array_equal(bits(nearest.state), bits(after.state))


CASE = Case(Shape("rounds", 2, 1, 64, 64), 1, 16, num_slots=3)


def of_type(dtype: str, case: Case = CASE) -> Case:
    return Case(case.shape, case.npredicted, case.max_window, dtype, num_slots=case.num_slots)


@rounded_types
@pytest.mark.parametrize("rounds", [1, 5, 10])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 5])
def test_seeds_and_rounds(backend, seed, rounds, dtype):
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(1))
    after = store(backend, pools, seed, philox_rounds=rounds)
    assert_stored(after, expected_store(state, dtype, seed, rounds))


@rounded_types
def test_the_cpu_path_is_the_model(dtype):
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(2))
    with reference_path():
        assert_stored(store(NumPyBackend(), pools, 77), expected_store(state, dtype, 77))


@rounded_types
def test_offsets_follow_the_real_strides(backend, dtype):
    """Slots in wider pages: the bits belong to the place in memory."""
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(3))
    guard = Guarded(pools.state.shape, pools.state.dtype, slot_pad=64)
    run = Run(backend, pools, 16)
    buffer = backend.put(guard.buffer)
    slots, stride = len(pools.state), guard.array.strides[0] // pools.state.itemsize
    inside = buffer[guard.offset :][: slots * guard.array.strides[0]].view(pools.state.dtype)
    paged = inside.reshape(slots, stride)[:, : stride - 64].reshape(pools.state.shape)
    paged.view(f"u{pools.state.itemsize}")[...] = 0
    run.pools["state"] = paged
    step, flush = no_tokens(pools, slots)
    run.step(step, rand_seed=np.array([9]), **flush)
    assert_stored(run.snapshot(), expected_store(state, dtype, 9, slot_stride=stride))
    guard.check("state", backend.get(buffer))


@rounded_types
@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_bits_belong_to_the_slot_and_not_to_the_row(backend, index_type, dtype):
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(4))
    run = Run(backend, pools, 16)
    slots = np.array([2, -1, 0], index_type)
    step, flush = no_tokens(pools, 3)
    run.step(step, state_batch_indices=slots, rand_seed=np.array([9]), **flush)
    after = run.snapshot()
    values, scale = expected_store(state, dtype, 9)
    assert np.array_equal(bits(after.state[[0, 2]]), bits(values[[0, 2]]))
    assert np.array_equal(bits(after.state[1]), bits(pools.state[1]))
    if scale is not None:
        assert np.array_equal(bits(after.state_scale[[0, 2]]), bits(scale[[0, 2]]))


@rounded_types
@pytest.mark.parametrize("activation", ["bfloat16", "float32"])
def test_plain_update_is_the_model(backend, activation, dtype):
    """One token on a zero state: dt * x * B again, rounded from registers."""
    for sizes in ((64, 128), (80, 256), (128, 64)):
        case = Case(Shape("plain", 4, 2, *sizes), 1, 16, dtype, num_slots=3)
        pools, state = exact_rows(case, np.random.default_rng(5))
        at = np.arange(3), slice(None), pools.ring_start
        x = pools.x_cache[at].astype(DTYPES[activation])
        B = pools.B_cache[at].astype(DTYPES[activation])
        step = Step(x, pools.dt_cache[at], np.zeros(4, np.float32), B, B)
        for seed, rounds in ((1 << 40, 10), (-7, 5)):
            run = Run(backend, pools, 16)
            run.update(step, rand_seed=np.array([seed]), philox_rounds=rounds)
            assert_stored(run.snapshot(), expected_store(state, dtype, seed, rounds))


@rounded_types
def test_without_a_flush_nothing_moves(backend, dtype):
    case = Case(Shape("still", 4, 2, 64, 128), 4, 16, dtype, num_slots=4)
    rng = np.random.default_rng(6)
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 0, 3, 9, 12
    step = make_step(case, 4, rng)
    outs = []
    for seed in (None, 1, -9):
        run = Run(backend, pools, 16)
        outs.append(run.step(step, rand_seed=None if seed is None else np.array([seed])))
        after = run.snapshot()
        assert np.array_equal(bits(after.state), bits(pools.state))
        if dtype in EIGHT_BIT:
            assert np.array_equal(bits(after.state_scale), bits(pools.state_scale))
    assert np.array_equal(bits(outs[0]), bits(outs[1]))
    assert np.array_equal(bits(outs[0]), bits(outs[2]))


@rounded_types
def test_representable_values_never_move(backend, dtype):
    """Codes of every magnitude under a scale that is a power of two, folded again and again."""
    pools, _ = exact_rows(of_type(dtype), np.random.default_rng(7))
    values = np.ldexp(np.arange(64) % 8 + 8.0, np.arange(64) // 8 - 6)  # 8 .. 15 times 2**k
    largest = {"int8": 127.0, "float8_e4m3fn": 448.0}.get(dtype, 448.0)
    if dtype == "int8":
        values = np.arange(64) - 20.0
    values[0] = largest
    state = np.broadcast_to(values.astype(np.float32), pools.state.shape).copy()
    state[:, :, ::2] *= -0.25
    put_state(pools, state, dtype)
    assert np.array_equal(decoded(pools), state)
    pools.x_cache[...], pools.B_cache[...], pools.dt_cache[...] = 0, 0, 0
    for seed in range(8):
        after = store(backend, pools, seed)
        assert np.array_equal(decoded(after), state)


@rounded_types
def test_the_seed_is_read_when_the_kernel_runs(backend, dtype):
    """The same array with another number in it, and the same call."""
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(8))
    seed = backend.put(np.array([3]))
    step, flush = no_tokens(pools, 3)
    for number in (3, 4, -4):
        run = Run(backend, pools, 16)
        seed[...] = number
        run.step(step, rand_seed=seed, **flush)
        assert_stored(run.snapshot(), expected_store(state, dtype, number))


@pytest.mark.gpu
@rounded_types
def test_replays_of_one_graph_round_differently(dtype):
    import cupy

    case = of_type(dtype)
    stack = ssm.LayerStack(2, 3, 2, 64, 1, 64, state_dtype=dtype, stochastic_rounding=11,
                           device="cuda")  # fmt: skip
    stack.warm_up()
    pools, state = exact_rows(case, np.random.default_rng(9))
    rings = cupy.asarray(pools.ring_start)
    step, flush = no_tokens(pools, 3)
    given = {name: cupy.asarray(array) for name, array in {**step.arrays(), **flush}.items()
             if isinstance(array, np.ndarray)}  # fmt: skip
    nothing = cupy.zeros(3, np.int32)

    def restore() -> None:
        stack.reset()
        stack.ring_start[...], stack.prev_num_accepted_tokens[...] = rings, 1
        for layer in range(2):
            for name in ("x_cache", "B_cache", "dt_cache"):
                getattr(stack, name + "s")[layer][...] = cupy.asarray(getattr(pools, name))

    restore()
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    out = cupy.zeros(given["x"].shape, given["x"].dtype)
    with side:
        side.begin_capture()
        for layer in range(2):
            stack.step(layer, **given, out=out, max_seqlen=1)
        stack.advance(None, nothing, 0)
        graph = side.end_capture()
    for event in range(4):
        restore()
        cupy.cuda.Device().synchronize()
        graph.launch(side)
        side.synchronize()
        for layer in range(2):
            values, _ = expected_store(state, dtype, 11 + event, layer=layer)
            stored = cupy.asnumpy(stack.states[layer].view(f"u{values.itemsize}"))
            assert np.array_equal(bits(stored), bits(values)), (event, layer)


# --- No bias, no correlation ---------------------------------------------------------------------


def noisy_state(backend, dtype: str, seed: int, *, flat: bool = False) -> tuple[np.ndarray, ...]:
    """Roundings of many elements: decoded minus exact, in cells, and the chances to go up.

    Rows hold their own largest value in column 0, so that 8-bit scales are powers of two.
    """
    slots = 2 if backend.name == "host" else 32
    case = Case(Shape("noise", 8, 1, 128, 128), 1, 16, dtype, num_slots=slots)
    rng = np.random.default_rng(10)
    pools, _ = exact_rows(case, rng)
    largest = {"int8": 127, "float8_e4m3fn": 448}.get(dtype, 448)
    fractions = rng.integers(1, 256, (slots, 1, 128)) if not flat else np.full((slots, 1, 128), 77)
    B = (128 + fractions / 2) / 256 * largest / 4  # eight and a half bits: bf16 holds them rounded
    B = B.astype(pools.B_cache.dtype)
    B[..., 0] = largest
    for slot in range(slots):
        row = int(pools.ring_start[slot])
        pools.dt_cache[slot][:, row] = 1
        pools.x_cache[slot][:, row], pools.B_cache[slot][:, row] = 1, B[slot]
    # More bits than any format keeps: x = 1 + 2**-7 in half of the rows.
    x = np.where(np.arange(128) % 2, 1 + 2.0**-7, 1)
    for slot in range(slots):
        pools.x_cache[slot][:, int(pools.ring_start[slot])] = x
    exact = x[:, None] * float64(B)[:, :, None, :]
    exact = np.broadcast_to(exact, pools.state.shape)
    after = store(backend, pools, seed)
    return float64(decoded(after)), exact


@rounded_types
def test_mean_error_is_zero(backend, dtype):
    """Over 2**18 elements on the host and 2**22 on a GPU, within four standard errors."""
    stored, exact = noisy_state(backend, dtype, 42)
    assert stored.size == (2**18 if backend.name == "host" else 2**22)
    residual = stored - exact
    moved = residual[residual != 0]
    assert moved.size > stored.size // 4
    mean, error = residual.mean(), residual.std() / math.sqrt(residual.size)
    print(f"{dtype} on {backend.name}: mean residual {mean / error:+.2f} standard errors")
    assert abs(mean) <= 4 * error


@rounded_types
def test_noise_is_uncorrelated(backend, dtype):
    """Equal values everywhere: what differs is the noise of heads, slots, rows, events, layers."""
    seeds = (42, 43, int(mix_seed(42, 0)), int(mix_seed(42, 1)))

    def noise(seed: int) -> np.ndarray:
        stored, exact = noisy_state(backend, dtype, seed, flat=True)
        residual = (stored - exact)[:, :, :, 1:]
        return residual / residual.std()

    a, next_event, layer_0, layer_1 = map(noise, seeds)
    pairs = {
        "heads": (a[:, :-1], a[:, 1:]),
        "slots": (a[:-1], a[1:]),
        "rows": (a[:, :, :-2], a[:, :, 2:]),
        "events": (a, next_event),
        "layers": (layer_0, layer_1),
    }
    for name, (one, other) in pairs.items():
        deviations = float((one * other).mean() * math.sqrt(one.size))
        print(f"{dtype} on {backend.name}: correlation of {name} {deviations:+.2f} deviations")
        assert abs(deviations) <= 5, name


# --- LayerStack ----------------------------------------------------------------------------------


def stack_of(backend, dtype: str, pools: Stored, seed: int, layers: int = 2) -> ssm.LayerStack:
    stack = ssm.LayerStack(layers, 3, 2, 64, 1, 64, state_dtype=dtype, stochastic_rounding=seed,
                           device=device_of(backend))  # fmt: skip
    stack.ring_start[...] = backend.put(pools.ring_start)
    stack.prev_num_accepted_tokens[...] = 1
    for layer in range(layers):
        for name in ("x_cache", "B_cache", "dt_cache"):
            getattr(stack, name + "s")[layer][...] = backend.put(getattr(pools, name))
    return stack


@rounded_types
def test_layers_and_events_round_with_their_own_bits(backend, dtype):
    pools, state = exact_rows(of_type(dtype), np.random.default_rng(12))
    decays = [backend.put(np.zeros(2, np.float32))] * 2
    for event in range(2):  # the second stack has moved on by one step before it flushes
        stack = stack_of(backend, dtype, pools, -5)
        if event:
            stack.advance(None, backend.put(np.zeros(3, np.int32)), 1)
        stack.flush_slots(decays)
        for layer in range(2):
            values, scale = expected_store(state, dtype, -5 + event, layer=layer)
            assert np.array_equal(bits(backend.get(stack.states[layer])), bits(values))
            if scale is not None:
                assert np.array_equal(bits(backend.get(stack.state_scales[layer])), bits(scale))
        assert backend.get(stack.rand_seed).tolist() == [-5 + event + 1]


def test_advance_bumps_the_seed(backend):
    stack = ssm.LayerStack(1, 3, 2, 64, 1, 64, state_dtype="int8", stochastic_rounding=True,
                           philox_rounds=7, device=device_of(backend))  # fmt: skip
    assert (backend.get(stack.rand_seed).tolist(), stack.philox_rounds) == ([0], 7)
    nothing = backend.put(np.zeros(3, np.int32))
    for _ in range(3):
        stack.advance(None, nothing, 1)
    assert backend.get(stack.rand_seed).tolist() == [3]
    padding = backend.put(np.full(3, -1, np.int32))
    stack.advance(padding, nothing, 1)
    assert backend.get(stack.rand_seed).tolist() == [4]
    stack.advance(backend.put(np.zeros(0, np.int32)), backend.put(np.zeros(0, np.int32)), 1)
    assert backend.get(stack.rand_seed).tolist() == [4], "an empty batch touches nothing"


def test_an_empty_batch_touches_nothing_on_the_cpu_path():
    with reference_path():
        test_advance_bumps_the_seed(NumPyBackend())


def test_stack_rounds_to_nearest_unless_told(backend):
    pools, state = exact_rows(of_type("bfloat16"), np.random.default_rng(13))
    stack = ssm.LayerStack(1, 3, 2, 64, 1, 64, state_dtype="bfloat16", device=device_of(backend))
    assert stack.rand_seed is None
    stack = stack_of(backend, "bfloat16", pools, False)
    assert stack.rand_seed is None
    stack.flush_slots([backend.put(np.zeros(2, np.float32))] * 2)
    assert np.array_equal(
        bits(backend.get(stack.states[0])), bits(state.astype(DTYPES["bfloat16"]))
    )
