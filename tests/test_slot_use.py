"""Slots in use: reuse, rejection, repeated steps, captured loops, sizes beyond 32 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, make_step
from oracles import Audit, bits, float64
from runs import NumPyBackend, reference_path
from stacks import (
    CASE,
    assert_same,
    contents,
    cursors,
    feed,
    integers,
    make_stack,
    step_all,
    values,
    weights,
)

import replayssm_cupy as ssm

# --- Cases that public users met ------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_slot_is_reused_as_new(place, state_dtype):
    """R3, R16. Cursors, state and scale start anew; the NaN of ring and state are not read."""
    case = replace(CASE, state_dtype=state_dtype)
    stack, _ = make_stack(place, case, 1)
    stack.ring_start[4], stack.prev_num_accepted_tokens[4] = 13, 11
    stack.states[0][4] = np.nan if state_dtype == "float32" else 3
    if stack.state_scales:
        stack.state_scales[0][4] = 0.5
    stack.reset(integers(place, [4]))
    assert cursors(place, stack, 4) == (0, 0) and not values(place, stack, 4).any()
    if stack.state_scales:
        assert (place.get(stack.state_scales[0])[4] == 1).all()
    oracle = Audit(case)
    feed(place, stack, oracle, [4], [1], q=1)


def test_a_rejection_is_consumed_once(place):
    """R4, R6. Accept 2, then 4 three times: live rows 2, 6, 10, 14, then a flush; 1 is legal."""
    stack, _ = make_stack(place, CASE)
    oracle, seen = Audit(CASE), []
    for accepted in (2, 4, 4, 4, 1):
        feed(place, stack, oracle, [0], [accepted])
        seen.append(cursors(place, stack, 0)[1])
    assert seen == [2, 6, 10, 14, 1]
    np.testing.assert_array_equal(values(place, stack, 0, 1), oracle.state(0, 1))
    with (
        pytest.raises(ValueError, match=r"^num_accepted: expected 0 to 4 \(query_lens\), got 5$"),
        reference_path(),
    ):
        step, _ = Audit(CASE).propose([0], 4)
        host, _ = make_stack(NumPyBackend(), CASE)
        step_all(NumPyBackend(), host, step)
        host.advance(np.array([0], np.int32), np.array([5], np.int32))


def test_the_cursor_rule_and_the_kernel_agree(place):
    """R7. Every (live rows, length): the state moves exactly where the cursor does."""
    case = replace(CASE, num_slots=17, npredicted=8)
    for q in range(1, 9):
        stack, _ = make_stack(place, case, 1)
        oracle = Audit(case)
        for slot in range(17):
            filled = 0
            while filled < slot:
                count = min(8, slot - filled)
                feed(place, stack, oracle, [slot], [count], q=count)
                filled += count
        assert place.get(stack.prev_num_accepted_tokens).tolist() == list(range(17))
        feed(place, stack, oracle, list(range(17)), [q] * 17, q=q)
        for slot in range(17):
            _, live = cursors(place, stack, slot)
            assert live == (q if slot + q > 16 else slot + q)
            np.testing.assert_array_equal(values(place, stack, slot), oracle.state(slot, live))


@pytest.mark.parametrize("way", ["materialize", "force_flush"])
def test_a_single_token_can_be_folded_before_a_reset(place, way):
    """R9. A prompt's last token goes through a decode step and is folded by force."""
    stack, _ = make_stack(place, CASE)
    oracle = Audit(CASE)
    feed(place, stack, oracle, [2], [1], q=1)
    one = integers(place, [2])
    if way == "materialize":
        stack.refresh(weights(place, CASE, 2))
        stack.materialize(one, one, integers(place, [1]))
        assert cursors(place, stack, 2) == (1, 0)
    else:
        force = place.put(np.ones(1, np.uint8))
        step, exact = oracle.propose([2], 1)
        for out in step_all(place, stack, step, force_flush=force):
            np.testing.assert_array_equal(float64(out), exact)
        stack.advance(one, integers(place, [0]), force_flush=force)
        assert cursors(place, stack, 2) == (1, 0)
    np.testing.assert_array_equal(values(place, stack, 2), oracle.state(2))


@pytest.mark.parametrize("live", [0, 7, 12])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_repeated_step_changes_nothing(place, state_dtype, live):
    """R17. The same step with unchanged cursors: the same bytes of everything."""
    stack, _ = make_stack(place, replace(CASE, state_dtype=state_dtype), 2, fill=True)
    stack.prev_num_accepted_tokens[...] = live
    step = make_step(CASE, 2, np.random.default_rng(5), slots=np.array([5, 1], np.int32))
    first = step_all(place, stack, step)
    before = contents(place, stack)
    again = step_all(place, stack, step)
    assert all(np.array_equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))
    assert_same(contents(place, stack), before)


def test_a_repeated_flush_folds_twice(place, monkeypatch):
    """R17. What the documentation warns of; `test_checked.py` has the check that sees it."""
    monkeypatch.delenv("REPLAYSSM_CHECK", raising=False)
    stack, _ = make_stack(place, CASE)
    oracle = Audit(CASE)
    for _ in range(4):
        feed(place, stack, oracle, [0], [4])
    step, _ = oracle.propose([0], 4)
    step_all(place, stack, step)
    once = values(place, stack, 0)
    assert once.any()
    step_all(place, stack, step)
    np.testing.assert_array_equal(values(place, stack, 0), 2 * once)


def test_bytes_to_budget(place):
    """R15. The shape of the case: 16 heads, 2 groups, 64 x 128, 20 rows, bfloat16."""
    case = Case(Shape("budget", 16, 2, 64, 128), 4, 16, "bfloat16", num_slots=2)
    stack, _ = make_stack(place, case, 1)
    assert stack.bytes_per_slot == 262144 + 40960 + 10240 + 1280
    assert DTYPES["bfloat16"].itemsize == 2


# --- On a GPU only --------------------------------------------------------------------------------


class Cuda:
    """CuPy arrays, for tests that need a GPU anyway."""

    name = "cuda"

    @staticmethod
    def put(array):
        import cupy

        return None if array is None else cupy.asarray(array)

    @staticmethod
    def get(array):
        import cupy

        return cupy.asnumpy(array)


@pytest.mark.gpu
def test_a_captured_step_follows_slots_and_lengths():
    """Steps, cursors, plan and snapshots in one graph; each replay decides anew."""
    import cupy

    stack, _ = make_stack(Cuda, CASE)
    stack.refresh(weights(Cuda, CASE, 2))
    stack.warm_up()
    oracle, rng, block = Audit(CASE), np.random.default_rng(6), 8
    step, _ = oracle.propose([0, 1, 2], 4)
    oracle = Audit(CASE)
    given = {name: cupy.asarray(array) for name, array in step.arrays().items()}
    slots = given.pop("state_batch_indices")
    accepted, lens, dst = (cupy.zeros(3, np.int32) for _ in range(3))
    outs = [cupy.zeros(step.x.shape, step.x.dtype) for _ in range(2)]
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        side.begin_capture()
        for layer in range(2):
            stack.step(layer, **given, slots=slots, dt_softplus=False, out=outs[layer])
        stack.advance(slots, accepted)
        stack.materialize_blocks(slots, dst, lens, accepted, block_size=block)
        graph = side.end_capture()
    host_lens, snapshots = np.zeros(3, np.int64), 0
    for number in range(24):
        rows = [0, 1, 2] if number % 2 else [2, 0, -1]
        step, exact = oracle.propose(rows, 4)
        kept = rng.integers(0, 5, 3).astype(np.int32)
        before = np.array([host_lens[row] if row >= 0 else 0 for row in rows])
        target = np.array([4, 5, 6] if number % 3 else [7, -1, 3], np.int32)
        for name, array in step.arrays().items():
            (slots if name == "state_batch_indices" else given[name])[...] = cupy.asarray(array)
        for device, host in ((accepted, kept), (lens, before.astype(np.int32)), (dst, target)):
            device[...] = cupy.asarray(host)
        cupy.cuda.Device().synchronize()
        graph.launch(side)
        side.synchronize()
        for out in outs:
            np.testing.assert_array_equal(float64(cupy.asnumpy(out)), exact)
        for b, row in enumerate(rows):
            if row < 0:
                continue
            oracle.accept(row, int(kept[b]))
            host_lens[row] += kept[b]
            boundary = host_lens[row] // block * block
            if boundary > before[b] and target[b] >= 0:
                expected = oracle.state(row, int(host_lens[row] - boundary))
                np.testing.assert_array_equal(values(Cuda, stack, target[b], 1), expected)
                snapshots += 1
    assert snapshots > 5


@pytest.mark.gpu
def test_snapshots_and_copies_beyond_32_bit_offsets():
    """128 heads of 64 x 128 are 2^20 elements: slots 2049 and 4096 lie past 2^31 and 2^32."""
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    case = Case(Shape("big", 128, 8, 64, 128), 1, 16, "bfloat16", num_slots=3)
    small, pools = make_stack(Cuda, case, 1, fill=True)
    A = weights(Cuda, case, 1, -0.5)
    wide = []
    for name in ("state", "x_cache", "B_cache", "dt_cache", "ring_start",
                 "prev_num_accepted_tokens"):  # fmt: skip
        array = getattr(pools[0], name)
        far = cupy.zeros((4098, *array.shape[1:]), array.dtype)
        far[2049] = cupy.asarray(array[1])
        wide.append(far)
    big = ssm.LayerStack.from_arrays(*([a] for a in wide[:4]), *wide[4:], npredicted=1)
    small.refresh(A)
    big.refresh(A)
    live = int(pools[0].prev_num_accepted_tokens[1])
    small.materialize(integers(Cuda, [1]), integers(Cuda, [2]), integers(Cuda, [live]))
    big.materialize(integers(Cuda, [2049]), integers(Cuda, [4096]), integers(Cuda, [live]))
    expected = cupy.asnumpy(small.states[0][2])
    assert np.array_equal(bits(cupy.asnumpy(big.states[0][4096])), bits(expected))
    big.copy_slots(integers(Cuda, [2049]), integers(Cuda, [4097]))
    assert np.array_equal(bits(cupy.asnumpy(big.states[0][4097])), bits(pools[0].state[1]))
    assert not big.states[0][0].any() and not big.states[0][4095].any()
