"""LayerStack: its arrays, its loop, and 1,000 steps of several layers against the recurrence."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, make_pools, make_step
from oracles import RandomStream, Recurrence, assert_close, bits, relative_l2

import replayssm_cupy as ssm
from replayssm_cupy import reference

CASE = Case(Shape("stack", 4, 2, 64, 128), npredicted=4, max_window=16, num_slots=6)


def make_stack(backend, case: Case, layers: int, rng) -> tuple[ssm.LayerStack, list]:
    """A stack that borrows arrays of the backend; the layers share cursors."""
    pools = [make_pools(case, rng) for _ in range(layers)]
    put = backend.put
    stack = ssm.LayerStack.from_arrays(
        [put(p.state) for p in pools],
        [put(p.x_cache) for p in pools],
        [put(p.B_cache) for p in pools],
        [put(p.dt_cache) for p in pools],
        put(pools[0].ring_start),
        put(pools[0].prev_num_accepted_tokens),
        npredicted=case.npredicted,
    )
    return stack, pools


def arguments(backend, step) -> dict:
    arrays = {name: backend.put(array) for name, array in step.arrays().items()}
    arrays["slots"] = arrays.pop("state_batch_indices", None)
    return arrays


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_owned_arrays(state_dtype):
    stack = ssm.LayerStack(
        3, 8, 16, 64, 2, 128, max_window=16, npredicted=4, state_dtype=state_dtype, device="cpu"
    )
    size = DTYPES[state_dtype].itemsize
    per_layer = 16 * 64 * 128 * size + 16 * 20 * 64 * 2 + 2 * 20 * 128 * 2 + 16 * 20 * 4
    assert stack.bytes_per_slot == 3 * per_layer
    assert stack.nbytes == 8 * (3 * per_layer + 8)
    assert len(stack.states) == stack.num_layers == 3
    assert not any(state.astype(np.float32).any() for state in stack.states)
    assert stack.ring_start.tolist() == [0] * 8
    for text in ("3 layers", "8 slots", "nheads=16", state_dtype, "cpu"):
        assert text in repr(stack)


def test_bytes_of_a_slot_in_the_documented_shape():
    """The figures of a 16-head, 2-group, 64 x 128 layer with 20 ring rows."""
    stack = ssm.LayerStack(1, 2, 16, 64, 2, 128, npredicted=4, state_dtype="bfloat16",
                           device="cpu")  # fmt: skip
    assert stack.bytes_per_slot == 262144 + 40960 + 10240 + 1280


def test_layers_share_cursors_and_nothing_else(backend):
    rng = np.random.default_rng(0)
    stack, pools = make_stack(backend, CASE, 2, rng)
    streams = [RandomStream(CASE, p.state, rng) for p in pools]
    slots = [3, 0, -1, 5]
    waiting = dict.fromkeys((3, 0, 5), 0)
    for _ in range(12):
        q = int(rng.integers(1, 5))
        for layer, stream in enumerate(streams):
            step, exact = stream.propose(slots, q)
            out = stack.step(layer, **arguments(backend, step))
            assert_close(backend.get(out), exact, "float32", f"layer {layer}")
        accepted = rng.integers(0, q + 1, 4).astype(np.int32)
        stack.advance(backend.put(np.array(slots, np.int32)), backend.put(accepted))
        for slot, kept in zip(slots, accepted, strict=True):
            if slot >= 0:
                flushed = reference.flushes(waiting[slot], q, 16)
                waiting[slot] = int(kept) + (0 if flushed else waiting[slot])
                for stream in streams:
                    stream.accept(slot, int(kept))
    for layer, stream in enumerate(streams):
        state = backend.get(stack.states[layer])
        for slot, rows in waiting.items():
            assert_close(state[slot], stream.state(slot, rows), "float32", f"layer {layer}")
        assert np.array_equal(bits(state[[1, 2, 4]]), bits(pools[layer].state[[1, 2, 4]]))


def test_prefill_hand_off_and_reuse_of_a_slot(backend):
    """A slot full of NaN is emptied, given a prefill's state, and decoded."""
    rng = np.random.default_rng(1)
    stack, pools = make_stack(backend, CASE, 1, rng)
    stack.states[0][2] = np.nan
    stack.prev_num_accepted_tokens[2] = 11
    slots = backend.put(np.array([2, 4], np.int32))
    stack.reset(slots)
    empty = backend.get(stack.states[0])
    assert not empty[[2, 4]].any() and np.isfinite(empty).all()
    given = rng.standard_normal((2, *pools[0].state.shape[1:])).astype(np.float32)
    stack.load_state(0, slots, backend.put(given))
    start = np.zeros_like(pools[0].state)
    start[[2, 4]] = given
    step = make_step(CASE, 2, rng, slots=np.array([2, 4], np.int32))
    exact = Recurrence(start).propose(step)
    assert_close(backend.get(stack.step(0, **arguments(backend, step))), exact, "float32", "out")


def test_advance_uses_the_length_of_the_latest_step(backend):
    rng = np.random.default_rng(2)
    stack, _ = make_stack(backend, CASE, 1, rng)
    stack.prev_num_accepted_tokens[...] = 13
    step = make_step(CASE, 1, rng, q=3, slots=np.array([1], np.int32))
    stack.step(0, **arguments(backend, step))
    one = backend.put(np.array([1], np.int32))
    stack.advance(one, backend.put(np.array([2], np.int32)))
    assert int(stack.prev_num_accepted_tokens[1]) == 15  # 13 + 3 > 16 is false: no flush
    stack.advance(one, backend.put(np.array([2], np.int32)), 4)
    assert int(stack.prev_num_accepted_tokens[1]) == 2  # 15 + 4 > 16: a flush


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.gpu)])
def test_long_random_decode_is_as_exact_as_the_plain_update(backend, steps, state_dtype):
    """Random acceptance, W = 16, T = 4: wrap and flush throughout; the plain update beside it."""
    if steps == 1000 and backend.name == "host":
        pytest.skip("1,000 steps run on the GPU; the host runs 60")
    case = Case(Shape("long", 8, 2, 64, 128), 4, 16, state_dtype, num_slots=4)
    rng = np.random.default_rng(3)
    stack, (pools,) = make_stack(backend, case, 1, rng)
    plain_state = backend.put(pools.state)
    stream, slots = RandomStream(case, pools.state, rng), [0, 1, 2, 3]
    waiting = dict.fromkeys(slots, 0)
    worst = 0.0
    for _ in range(steps):
        step, exact = stream.propose(slots, 4)
        given = arguments(backend, step)
        out = backend.get(stack.step(0, **given))
        if state_dtype == "float32":
            assert_close(out, exact, state_dtype, "out")
        worst = max(worst, relative_l2(out, exact))
        accepted = rng.integers(0, 5, 4).astype(np.int32)
        stack.advance(given["slots"], backend.put(accepted))
        for slot, kept in enumerate(accepted):
            flushed = reference.flushes(waiting[slot], 4, 16)
            waiting[slot] = int(kept) + (0 if flushed else waiting[slot])
            stream.accept(slot, int(kept))
            row = {n: None if (a := getattr(step, n)) is None else a[slot : slot + 1, :kept]
                   for n in ("x", "dt", "B", "C", "z")}  # fmt: skip
            if kept:
                ssm.selective_state_update(
                    plain_state, **{n: backend.put(a) for n, a in row.items()}, A=given["A"],
                    D=given["D"], dt_bias=given["dt_bias"], dt_softplus=True,
                    state_batch_indices=backend.put(np.array([slot], np.int32)),
                )  # fmt: skip
    stored, plain = backend.get(stack.states[0]), backend.get(plain_state)
    replay_error = max(relative_l2(stored[s], stream.state(s, waiting[s])) for s in slots)
    plain_error = max(relative_l2(plain[s], stream.state(s)) for s in slots)
    print(
        f"{steps} steps, {state_dtype} state on {backend.name}: out {worst:.2e}, "
        f"state {replay_error:.2e}, plain update's state {plain_error:.2e}"
    )
    if state_dtype == "float32":
        assert replay_error <= 5e-6
    assert replay_error <= 1.1 * plain_error


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["monolith", "two-kernel"])
def test_graph_replays_read_slots_cursors_and_inputs_anew(algorithm):
    """Captured with 4 rows, replayed with fewer live rows, other slots and other tokens."""
    import cupy

    class Cuda:
        name = "cuda"
        put = staticmethod(lambda array: None if array is None else cupy.asarray(array))
        get = staticmethod(cupy.asnumpy)

    rng = np.random.default_rng(4)
    stack, (pools,) = make_stack(Cuda, CASE, 1, rng)
    stack.warm_up(algorithm)
    scratch = ssm.allocate_scratch(4, CASE.shape.nheads, device="cuda")
    stream = RandomStream(CASE, pools.state, rng)
    step, _ = stream.propose([0, 1, 2, 3], 4)
    given = arguments(Cuda, step)
    out = cupy.full(step.x.shape, np.nan, step.x.dtype)
    accepted = cupy.zeros(4, np.int32)
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        side.begin_capture()
        stack.step(0, **given, **scratch, out=out, algorithm=algorithm)
        stack.advance(given["slots"], accepted)
        graph = side.end_capture()
    for number in range(20):
        slots = [5, 1, 2, -1] if number % 2 else [0, 4, -1, -1]
        step, exact = stream.propose(slots, 4)
        for name, array in arguments(Cuda, step).items():
            if array is not None:
                given[name][...] = array
        kept = rng.integers(0, 5, 4).astype(np.int32)
        accepted[...] = cupy.asarray(kept)
        cupy.cuda.Device().synchronize()
        graph.launch(side)
        side.synchronize()
        assert_close(cupy.asnumpy(out), exact, "float32", f"replay {number}")
        for slot, count in zip(slots, kept, strict=True):
            if slot >= 0:
                stream.accept(slot, int(count))


@pytest.mark.gpu
def test_first_call_inside_a_capture_is_an_error():
    import cupy

    from replayssm_cupy import compiler

    stack = ssm.LayerStack(1, 2, 4, 64, 2, 64, state_dtype="float16", device="cuda")
    compiler._functions.clear()
    case = Case(Shape("capture", 4, 2, 64, 64), 1, 16, num_slots=2)
    step = make_step(case, 1, np.random.default_rng(5))
    given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
    out = cupy.zeros(step.x.shape, step.x.dtype)
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        side.begin_capture()
        with pytest.raises(ssm.ReplaySSMError, match="warm_up"):
            stack.step(0, **given, out=out)
        side.end_capture()
    stack.step(0, **given, out=out)


@pytest.mark.gpu
def test_more_batch_rows_than_a_grid_axis_of_65535():
    """70,000 rows of which the last ones are live: batch is limited by memory alone."""
    import cupy

    case = Case(Shape("tall", 1, 1, 64, 64), 1, 16, num_slots=3)
    rng = np.random.default_rng(6)
    pools = make_pools(case, rng, fill=True)
    slots = np.full(70_000, -1, np.int64)
    slots[-3:] = 2, 0, 1
    step = make_step(case, 70_000, rng, slots=slots)
    exact_rows = make_step(case, 3, rng)
    for name in ("x", "dt", "B", "C", "z"):
        setattr(exact_rows, name, getattr(step, name)[-3:])
    exact_rows.A, exact_rows.D, exact_rows.dt_bias = step.A, step.D, step.dt_bias
    exact_rows.state_batch_indices = slots[-3:]
    expected = ssm.checkpointing_ssu(
        **pools.copy().arrays(), **exact_rows.arrays(), dt_softplus=True
    )
    device = {name: cupy.asarray(array) for name, array in pools.arrays().items()}
    given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
    out = cupy.asnumpy(ssm.checkpointing_ssu(**device, **given, dt_softplus=True))
    assert relative_l2(out[-3:], expected) < 2e-3
    assert not out[:-3].astype(np.float32).any()


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("REPLAYSSM_BIG", "1") == "0", reason="REPLAYSSM_BIG=0")
def test_slots_beyond_two_to_the_31_and_32_elements():
    """128 heads of 64 x 128 are 2^20 elements: slots 2048 and 4096 lie past 32-bit offsets."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    case = Case(Shape("big", 128, 8, 64, 128), 1, 16, "bfloat16", num_slots=3)
    rng = np.random.default_rng(7)
    pools = make_pools(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 16, 16, 3
    step = make_step(case, 3, rng, slots=np.arange(3, dtype=np.int32))
    compact = {name: cupy.asarray(array) for name, array in pools.arrays().items()}
    given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
    expected = cupy.asnumpy(ssm.checkpointing_ssu(**compact, **given, dt_softplus=True))
    places, num_slots = [2047, 2048, 4096], 4097
    wide = {}
    for name, array in pools.arrays().items():
        wide[name] = cupy.zeros((num_slots, *array.shape[1:]), array.dtype)
        wide[name][places] = compact[name] if name not in pools.arrays() else cupy.asarray(array)
    given["state_batch_indices"] = cupy.asarray(np.array(places, np.int32))
    out = cupy.asnumpy(ssm.checkpointing_ssu(**wide, **given, dt_softplus=True))
    assert np.array_equal(bits(out), bits(expected))
    for name in pools.arrays():
        assert np.array_equal(bits(cupy.asnumpy(wide[name][places])),
                              bits(cupy.asnumpy(compact[name]))), name  # fmt: skip
    assert not wide["state"][0].any()
