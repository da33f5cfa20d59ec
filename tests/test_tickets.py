"""Steps with so many items that blocks share the last ones, by counters of the stack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import Audit, bits
from runs import make_stored
from stacks import feed, make_stack, step_all, values

import replayssm_cupy as ssm
from replayssm_cupy import decode, schedule
from replayssm_cupy.keys import replay_keys
from replayssm_cupy.schedule import Processor, Step

CASE = Case(Shape("many", 16, 2, 64, 64), npredicted=4, max_window=16, num_slots=28)
BLOCKS, BATCH = 3, 24


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """As many items a block on any machine."""
    monkeypatch.setattr(decode, "processor", lambda device: Processor(BLOCKS, 227 << 10))
    monkeypatch.setattr(decode, "_plans", {})


def shared_items() -> set[int]:
    return {plan.record.shared_items for plan in decode._plans.values()}


def tickets(place, stack) -> np.ndarray:
    return place.get(stack._tickets._array)


@pytest.mark.parametrize("q", [1, 4])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_every_item_is_done_once(backend, state_dtype, q):
    """Audit: outputs, rings and states are exact over flushes, with slots that change place."""
    case = replace(CASE, npredicted=q, state_dtype=state_dtype)
    stack, _ = make_stack(backend, case)
    oracle, rng = Audit(case), np.random.default_rng(1)
    slots = list(range(BATCH))
    for _ in range(18 if q == 1 else 6):
        rng.shuffle(slots)
        feed(backend, stack, oracle, slots, [int(n) for n in rng.integers(1, q + 1, BATCH)], q=q)
        assert not tickets(backend, stack).any()
    assert shared_items() == {schedule.SHARED_ITEMS * BLOCKS}
    for slot in (0, BATCH - 1):
        left = int(backend.get(stack.prev_num_accepted_tokens)[slot])
        for layer in range(2):
            exact = oracle.state(slot, left)
            loose = 2e-2 if state_dtype in ("int8", "float8_e4m3fn") else 0
            folded = values(backend, stack, slot, layer)
            np.testing.assert_allclose(folded, exact, rtol=0, atol=loose)


@pytest.mark.parametrize("real", [0, 1, 5])
def test_fewer_items_than_are_shared(backend, real):
    """All but some sequences are padding: every item is a shared one, or there is none."""
    case = replace(CASE, npredicted=1)
    stack, _ = make_stack(backend, case)
    oracle = Audit(case)
    slots = [-1] * BATCH
    slots[3 : 3 + real] = range(7, 7 + real)
    for _ in range(2):
        feed(backend, stack, oracle, slots, [1] * BATCH, q=1)
        assert not tickets(backend, stack).any()
    assert shared_items() == {schedule.SHARED_ITEMS * BLOCKS}


@pytest.mark.parametrize("padding", [0, 2])
def test_a_step_takes_the_counter_of_its_first_sequence(backend, padding):
    """Others may be in use by steps on other slots."""
    case = replace(CASE, npredicted=1)
    stack, _ = make_stack(backend, case)
    slots = [-1] * padding + [5, *range(6, 5 + BATCH - 1 - padding), 2]
    taken = np.full_like(tickets(backend, stack), 3)
    taken[:, 5] = 0
    stack._tickets._array[...] = backend.put(taken)
    feed(backend, stack, Audit(case), slots, [1] * BATCH, q=1)
    np.testing.assert_array_equal(tickets(backend, stack), taken)


def test_flushes_alone_are_shared_too(backend):
    """Sequences without tokens: their items fold, and append nothing."""
    case = replace(CASE, npredicted=1)
    stack, _ = make_stack(backend, case)
    oracle = Audit(case)
    slots = list(range(BATCH))
    for _ in range(3):
        feed(backend, stack, oracle, slots, [1] * BATCH, q=1)
    rings = bits(backend.get(stack.x_caches[0])).copy()
    A = [backend.put(np.zeros(case.shape.nheads, np.float32))] * 2
    stack.flush_slots(A, backend.put(np.array(slots, np.int32)))
    assert not tickets(backend, stack).any()
    np.testing.assert_array_equal(bits(backend.get(stack.x_caches[0])), rings)
    for slot in (0, 11, BATCH - 1):
        np.testing.assert_array_equal(values(backend, stack, slot), oracle.state(slot, 0))


def test_two_kernels_share_items(backend):
    """The second of two kernels, with the bits of one."""
    case = replace(CASE, npredicted=2)
    rng = np.random.default_rng(3)
    step = make_step(case, BATCH, rng, slots=np.arange(BATCH, dtype=np.int32))
    found = []
    for algorithm in ("monolith", "two-kernel"):
        stack, _ = make_stack(backend, case, fill=True)
        x = backend.put(step.x)
        scratch = ssm.allocate_scratch(BATCH, case.shape.nheads, like=x)
        found.append(step_all(backend, stack, step, algorithm=algorithm, **scratch))
        assert not tickets(backend, stack).any()
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(bits(one), bits(two))


def test_a_call_without_a_stack_shares_nothing(backend):
    """It has no counters."""
    case = replace(CASE, npredicted=1)
    rng = np.random.default_rng(5)
    pools = make_stored(case, rng, fill=True)
    step = make_step(case, BATCH, rng, slots=np.arange(BATCH, dtype=np.int32))
    given = {name: backend.put(array) for name, array in step.arrays().items()}
    out = ssm.checkpointing_ssu(
        backend.put(pools.state), x_cache=backend.put(pools.x_cache),
        B_cache=backend.put(pools.B_cache), dt_cache=backend.put(pools.dt_cache),
        ring_start=backend.put(pools.ring_start),
        prev_num_accepted_tokens=backend.put(pools.prev_num_accepted_tokens),
        dt_softplus=True, **given,
    )  # fmt: skip
    assert shared_items() == {0} and np.isfinite(np.asarray(backend.get(out), np.float64)).all()


def test_items_are_shared_where_there_are_many():
    key = replay_keys("float32", "bfloat16", 128, 1)[0]

    def fields(step: Step) -> tuple[int, int]:
        found = schedule._stream(key, step, Processor(132, 227 << 10)).fields
        return found["shared_items"], found["appends_late"]

    many = Step(256, 64, 8, 64, 1, 16, 17, False, tickets=True)
    shared = schedule.SHARED_ITEMS * 132
    assert fields(many) == (shared, 1)
    assert fields(replace(many, tokens=4, ring_buffer_len=20)) == (shared, 0)
    assert fields(replace(many, tickets=False)) == (0, 0)
    assert fields(replace(many, batch=32)) == (0, 0), "too few"
    assert fields(replace(many, batch=schedule.MOST_LISTED + 1)) == (0, 0), "two lists"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
def test_steps_of_one_layer_side_by_side(backend):
    """On other slots, on two streams and in captured graphs, as often as one after the other."""
    cupy = pytest.importorskip("cupy")
    case, half = replace(CASE, npredicted=2, num_slots=48), 24
    step = make_step(case, 48, np.random.default_rng(7))
    repeats = 200

    def run(side_by_side: bool) -> list[np.ndarray]:
        stack, _ = make_stack(backend, case, layers=1, fill=True)
        stack.prev_num_accepted_tokens[...] = 3
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        graphs, outs = [], []
        for n, stream in enumerate(streams):
            rows = slice(half * n, half * (n + 1))
            given = {
                name: backend.put(np.ascontiguousarray(array[rows]))
                if name in ("x", "dt", "B", "C", "z")
                else backend.put(array)
                for name, array in step.arrays().items()
                if array is not None
            }
            slots = backend.put(np.arange(48, dtype=np.int32)[rows])
            out = backend.put(np.zeros_like(step.x[rows]))
            call = stack.bind(0, **given, slots=slots, out=out)
            backend.synchronize()
            with stream:
                call()
                stream.synchronize()
                stream.begin_capture()
                for _ in range(repeats):
                    call()
                graphs.append(stream.end_capture())
            outs.append(out)
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
            if not side_by_side:
                stream.synchronize()
        backend.synchronize()
        assert shared_items() == {schedule.SHARED_ITEMS * BLOCKS}
        assert not tickets(backend, stack).any()
        return [bits(backend.get(out)) for out in outs]

    for one, other in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(one, other)
