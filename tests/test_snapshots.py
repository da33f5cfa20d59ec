"""Snapshots of a LayerStack's slots: states after a part of their rings, at block boundaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Case, make_step
from oracles import Audit, Halving, bits, float64
from runs import EIGHT_BIT, STATES, make_stored
from stacks import (
    CASE,
    assert_same,
    contents,
    cursors,
    edit,
    feed,
    integers,
    make_stack,
    step_all,
    values,
    weights,
)

import replayssm_cupy as ssm
from replayssm_cupy import reference

# --- Snapshots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATES)
def test_a_snapshot_is_the_state_after_that_many_tokens(place, state_dtype):
    """Audit: prefix k holds the first k accepted tokens, from a ring that has wrapped."""
    case = replace(CASE, state_dtype=state_dtype)
    stack, _ = make_stack(place, case)
    stack.refresh(weights(place, case, 2))
    oracle = Audit(case)
    for accepted in (3, 4, 2, 4, 4, 1, 4):  # 13 tokens, a flush, and rows on both ends of the ring
        feed(place, stack, oracle, [1], [accepted])
    start, live = cursors(place, stack, 1)
    assert start + live > case.ring_buffer_len and live > 4, "the live rows wrap"
    for prefix in range(live + 1):
        stack.materialize(integers(place, [1]), integers(place, [5]), integers(place, [prefix]))
        for layer in range(2):
            got = values(place, stack, 5, layer)
            exact = oracle.state(1, live - prefix)
            np.testing.assert_allclose(got, exact, rtol=0, atol=2e-2 if state_dtype in EIGHT_BIT
                                       else 0)  # fmt: skip
        assert cursors(place, stack, 5) == (0, 0)
    assert cursors(place, stack, 1) == (start, live)


def test_rejected_rows_do_not_reach_a_snapshot(place):
    """R12. Eight proposed, three accepted: the others lie in the ring as NaN."""
    case = replace(CASE, npredicted=8, max_window=12)
    stack, _ = make_stack(place, case, 1)
    stack.refresh(weights(place, case, 1))
    oracle = Audit(case)
    feed(place, stack, oracle, [2], [3], q=8)
    for rings in (stack.x_caches, stack.B_caches, stack.dt_caches):
        edit(place, rings[0], np.s_[2, :, 3:8], np.nan)
    stack.materialize(integers(place, [2]), integers(place, [6]), integers(place, [3]))
    got = values(place, stack, 6)
    np.testing.assert_array_equal(got, oracle.state(2))
    assert (got[..., :3] == oracle.x_value(2)).all() and not got[..., 3:].any()


def test_a_snapshot_is_its_own_request(place):
    """R2. The receiver's former ring and cursors are forgotten; the source stays bit for bit."""
    stack, pools = make_stack(place, CASE, 2, fill=True)
    stack.refresh(weights(place, CASE, 2))
    stack.ring_start[2], stack.prev_num_accepted_tokens[2] = 7, 9
    stack.prev_num_accepted_tokens[1] = 5
    for ring in stack.x_caches:
        edit(place, ring, 2, 64)
    before = contents(place, stack)
    stack.materialize(integers(place, [1]), integers(place, [2]), integers(place, [5]))
    assert cursors(place, stack, 2) == (0, 0)
    after = contents(place, stack)
    for layer, one in enumerate(pools):
        sources = np.delete(np.arange(CASE.num_slots), 2)
        state = place.get(stack.states[layer])
        assert np.array_equal(bits(state[sources]), bits(one.state[sources]))
        for name in ("x", "B", "dt"):
            assert np.array_equal(after[f"{name}[{layer}]"], before[f"{name}[{layer}]"])
    # The next step of the receiver sees the snapshot alone: D = 0, C of ones, nothing proposed.
    snapshot = values(place, stack, 2)
    step = make_step(CASE, 1, np.random.default_rng(1), q=1, slots=np.array([2], np.int32))
    step = replace(step, x=np.zeros_like(step.x), D=None, z=None, A=np.zeros_like(step.A))
    (out, _) = step_all(place, stack, step)
    seen = np.einsum("hpn,hn->hp", snapshot, np.repeat(float64(step.C[0, 0]), 2, axis=0))
    np.testing.assert_allclose(float64(out[0, 0]), seen, rtol=2e-2, atol=0.2)
    assert np.abs(seen).max() < 1000


def test_folding_in_place_keeps_the_later_rows(place):
    case, oracle = CASE, Audit(CASE)
    stack, _ = make_stack(place, case)
    stack.refresh(weights(place, case, 2))
    for accepted in (4, 3, 4):
        feed(place, stack, oracle, [3], [accepted])
    stack.materialize(integers(place, [3]), integers(place, [3]), integers(place, [7]))
    assert cursors(place, stack, 3) == (7, 4)
    np.testing.assert_array_equal(values(place, stack, 3, 1), oracle.state(3, 4))
    for accepted in (4, 2, 4, 1):
        feed(place, stack, oracle, [3], [accepted])
    live = cursors(place, stack, 3)[1]
    np.testing.assert_array_equal(values(place, stack, 3), oracle.state(3, live))


def test_order_and_decay_of_a_snapshot(place):
    """Halving: after n tokens the state is 2 - 2^-n."""
    stack, _ = make_stack(place, CASE, 1)
    stack.refresh(weights(place, CASE, 1, -np.log(2)))
    oracle = Halving(CASE)
    edit(place, stack.states[0], ..., oracle.checkpoint())
    for _ in range(3):
        step, _ = oracle.propose([0], 4)
        step_all(place, stack, step)
        stack.advance(integers(place, [0]), integers(place, [4]))
        oracle.accept(0, 4)
    for prefix in range(13):
        stack.materialize(integers(place, [0]), integers(place, [4]), integers(place, [prefix]))
        np.testing.assert_allclose(values(place, stack, 4), oracle.state(0, 12 - prefix), rtol=3e-6)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_fold_in_place_rounds_as_a_flush_does(place, state_dtype):
    """With the stack's seed, which moves on between steps and differs from layer to layer."""
    case = replace(CASE, state_dtype=state_dtype, num_slots=3)
    A = weights(place, case, 2, -0.5)
    everything = integers(place, range(3))
    results = []
    for folds in (True, False, True):
        stack, _ = make_stack(place, case, 2, fill=True, stochastic_rounding=7)
        stack.prev_num_accepted_tokens[...] = 9
        if len(results) == 2:
            stack.advance(everything, integers(place, [0, 0, 0]))
        if folds:
            stack.refresh(A)
            stack.materialize(everything, everything, integers(place, [9, 9, 9]))
        else:
            stack.flush_slots(A)
        assert cursors(place, stack, 1)[1] == 0
        results.append([bits(place.get(state)) for state in stack.states])
    for layer in range(2):
        assert np.array_equal(results[0][layer], results[1][layer])
        assert np.mean(results[0][layer] != results[2][layer]) > 0.02


def strided_stack(place, case: Case, layers: int, heads_apart: list[int]):
    """A stack whose heads, groups and ring rows lie apart inside a slot."""
    rng = np.random.default_rng(31)
    lists: dict[str, list] = {"state": [], "x_cache": [], "B_cache": [], "dt_cache": []}
    pools = [make_stored(case, rng, fill=True) for _ in range(layers)]
    for one, apart in zip(pools, heads_apart, strict=True):
        for name, arrays in lists.items():
            array = getattr(one, name)
            shape = list(array.shape)
            shape[1] *= apart
            if name in ("x_cache", "B_cache"):
                shape[2] *= 2
            wide = np.zeros(shape, array.dtype)
            view = wide[:, ::apart, ::2] if name in ("x_cache", "B_cache") else wide[:, ::apart]
            view[...] = array
            arrays.append(place.put(view) if place.name != "reference" else view)
    cursor = [place.put(pools[0].ring_start), place.put(pools[0].prev_num_accepted_tokens)]
    return ssm.LayerStack.from_arrays(*lists.values(), *cursor, npredicted=case.npredicted), pools


def test_heads_and_rows_that_lie_apart(place):
    stack, pools = strided_stack(place, CASE, 2, [3, 3])
    packed, _ = make_stack(place, CASE, 2)
    for ours, theirs in ((packed.states, "state"), (packed.x_caches, "x_cache"),
                         (packed.B_caches, "B_cache"), (packed.dt_caches, "dt_cache")):  # fmt: skip
        for layer, one in enumerate(pools):
            edit(place, ours[layer], ..., getattr(one, theirs))
    live = np.arange(CASE.num_slots, dtype=np.int32) + 3
    for one in (stack, packed):
        one.ring_start[...] = place.put(pools[0].ring_start)
        one.prev_num_accepted_tokens[...] = place.put(live)
        one.refresh(weights(place, CASE, 2, -0.5))
        one.materialize(integers(place, [0, 1]), integers(place, [4, 5]), integers(place, [3, 2]))
        one.copy_slots(integers(place, [2]), integers(place, [6]))
        one.import_slots(one.export_slots([3]), [7])
    for layer in range(2):
        for slot in range(CASE.num_slots):
            np.testing.assert_array_equal(values(place, stack, slot, layer),
                                          values(place, packed, slot, layer))  # fmt: skip
    a, b = (one.export_slots(range(CASE.num_slots))["slots"] for one in (stack, packed))
    assert np.array_equal(a, b)


def test_layers_that_lie_differently_are_refused(place):
    stack, _ = strided_stack(place, CASE, 2, [3, 2])
    with pytest.raises(ValueError, match=r"^states\[1\]: expected strides .* inside a slot as sta"):
        stack.refresh(weights(place, CASE, 2))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("block", [4, 7, 16])
def test_block_boundaries(place, block, explicit):
    """Every step, captured once on a GPU or not: the snapshot holds whole blocks of tokens."""
    case = replace(CASE, num_slots=12)
    stack, _ = make_stack(place, case, 2)
    stack.refresh(weights(place, case, 2))
    oracle, rng = Audit(case), np.random.default_rng(block)
    slots, lens = [3, 0, 5, -1], np.zeros(4, np.int64)
    written = dict.fromkeys(range(4), 0)
    for number in range(14):
        accepted = rng.integers(0, 5, 4)
        feed(place, stack, oracle, slots, accepted.tolist())
        after = lens + accepted
        boundary = after // block * block
        crossed = (boundary > lens) & (np.array(slots) >= 0)
        dst = np.array([6, 7, -1 if number % 3 == 0 else 8, 9])
        given = {"block_size": block}
        if explicit:
            given = {"boundaries": integers(place, np.where(boundary > lens, boundary, -1))}
        stack.materialize_blocks(integers(place, slots, np.int64), integers(place, dst),
                                 integers(place, lens), integers(place, accepted, np.int64),
                                 check=True, **given)  # fmt: skip
        lens = after
        for row in range(3):
            if crossed[row] and dst[row] >= 0:
                late = int(after[row] - boundary[row])
                exact = oracle.state(slots[row], late)
                for layer in range(2):
                    np.testing.assert_array_equal(values(place, stack, dst[row], layer), exact)
                assert cursors(place, stack, dst[row]) == (0, 0)
                written[row] += 1
    assert min(written[row] for row in range(3)) >= 1 and not written[3]


def test_the_plan_against_its_rule(place):
    """Random cursors and lengths in a batch of more rows than threads; the list stays in order."""
    rng = np.random.default_rng(12)
    batch, slots = 1500, 4000
    start = rng.integers(0, 20, slots).astype(np.int32)
    prev = rng.integers(0, 17, slots).astype(np.int32)
    order = rng.permutation(slots)
    src, dst = order[:batch].copy(), order[batch : 2 * batch].copy()
    src[::11], dst[5::13] = -1, slots + 3
    committed = rng.integers(0, 1000, batch)
    accepted = rng.integers(-1, 6, batch)
    accepted = np.minimum(accepted, np.where(src < 0, 0, prev[src]))
    cursors = place.put(start), place.put(prev)
    plan = ssm.plan_materialize(
        *cursors, place.put(src), place.put(dst), place.put(committed), place.put(accepted),
        block_size=32, max_window=16, ring_buffer_len=20,
    )  # fmt: skip
    starts, prefix, active = (place.get(array) for array in plan)
    expected_start, expected_prev, listed = start.copy(), prev.copy(), []
    for row in range(batch):
        known = src[row] >= 0 and dst[row] < slots
        wanted = -1
        if known:
            wanted = reference.plan_materialize(int(prev[src[row]]), int(committed[row]),
                                                int(accepted[row]), 32)  # fmt: skip
            assert starts[row] == start[src[row]]
        assert prefix[row] == wanted, row
        if wanted >= 0:
            listed.append(row)
            expected_start[dst[row]] = expected_prev[dst[row]] = 0
    assert 50 < len(listed) < batch / 2
    assert active.tolist() == listed + [-1] * (batch - len(listed))
    assert np.array_equal(place.get(cursors[0]), expected_start)
    assert np.array_equal(place.get(cursors[1]), expected_prev)


def test_boundaries_that_no_row_of_the_ring_reaches(place):
    """22 tokens of which 5 are live: boundaries from 17, the checkpoint's own, to 22 are there."""
    boundaries, expected = [23, 22, 17, 16, -1, 0, 20], [-1, 5, 0, -1, -1, -1, 3]
    rows = len(boundaries)
    start, prev = np.full(2 * rows, 9, np.int32), np.full(2 * rows, 5, np.int32)
    cursors = place.put(start), place.put(prev)
    plan = ssm.plan_materialize(
        *cursors, integers(place, range(rows)), integers(place, range(rows, 2 * rows)),
        integers(place, [20] * rows), integers(place, [2] * rows),
        boundaries=integers(place, boundaries), max_window=16, ring_buffer_len=20,
    )  # fmt: skip
    assert place.get(plan.replay_prefix_len).tolist() == expected
    assert place.get(plan.active_request_indices).tolist() == [1, 2, 6, -1, -1, -1, -1]
    moved = [rows + row for row in (1, 2, 6)]
    assert np.flatnonzero(place.get(cursors[1]) == 0).tolist() == moved
    again = ssm.plan_materialize(
        *cursors, integers(place, range(rows)), integers(place, range(rows, 2 * rows)),
        integers(place, [20] * rows), integers(place, [-1] * rows), block_size=10, max_window=16,
        ring_buffer_len=20, out=plan,
    )  # fmt: skip
    assert again is plan and place.get(plan.active_request_indices).tolist() == [-1] * rows


def test_slots_that_are_too_large_are_padding(place):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    stack.refresh(weights(place, CASE, 2))
    before = contents(place, stack)
    for src, dst in ((8, 1), (1, 8), (1, 10**6), (10**6, 1)):
        one = [integers(place, [slot], np.int64) for slot in (src, dst)]
        stack.materialize(*one, integers(place, [0]))
        layered = [place.put(np.full((2, 1), slot, np.int64)) for slot in (src, dst)]
        stack.materialize(*layered, integers(place, [0]))
        stack.copy_slots(*one)
    assert_same(contents(place, stack), before)
    # In one layer alone: the other's is written.
    src, dst = np.array([[1], [8]], np.int32), np.array([[4], [4]], np.int32)
    stack.materialize(place.put(src), place.put(dst), integers(place, [0]))
    after = contents(place, stack)
    assert np.array_equal(after["states[1]"], before["states[1]"])
    assert np.array_equal(values(place, stack, 4), values(place, stack, 1))


def test_slots_of_each_layer(place):
    stack, pools = make_stack(place, CASE, 3, fill=True)
    stack.refresh(weights(place, CASE, 3))
    src = np.array([[0, 1], [1, 2], [2, 0]], np.int32)
    dst = np.array([[5, 6], [6, 7], [7, 5]], np.int32)
    stack.prev_num_accepted_tokens[...] = 0
    stack.materialize(place.put(src), place.put(dst), integers(place, [0, 0]))
    for layer, one in enumerate(pools):
        state = place.get(stack.states[layer])
        for request in range(2):
            assert np.array_equal(bits(state[dst[layer, request]]),
                                  bits(one.state[src[layer, request]]))  # fmt: skip


# --- Tables ---------------------------------------------------------------------------------------


def test_arrays_that_moved(place):
    """R14. The tables hold their arrays; a changed pointer is seen, and refresh() mends it."""
    stack, _ = make_stack(place, CASE, 2, fill=True)
    A = weights(place, CASE, 2, -0.5)
    stack.refresh(A)
    stack.prev_num_accepted_tokens[...] = 6
    given = integers(place, [0]), integers(place, [4]), integers(place, [6])
    stack.materialize(*given, check=True)
    first = values(place, stack, 4, 1)
    stack.x_caches[1] = place.put(place.get(stack.x_caches[1]) * 2)
    before = contents(place, stack)
    with pytest.raises(ssm.ReplaySSMError, match=r"^x_caches\[1\]: expected the array of the poin"):
        stack.materialize(*given, check=True)
    assert_same(contents(place, stack), before)
    stack.refresh()
    stack.materialize(*given, check=True)
    assert not np.array_equal(values(place, stack, 4, 1), first)
    A[1] = place.put(place.get(A[1]))
    stack._A[1] = A[1]  # as if a tensor's storage had been replaced
    with pytest.raises(ssm.ReplaySSMError, match=r"^A\[1\]: expected the array of the pointer tab"):
        stack.materialize(*given, check=True)
    # Another order of the batch than when the tables were built changes nothing but the order.
    stack.refresh(A)
    both = [(0, 4), (1, 5)]
    for pairs in (both, both[::-1]):
        src, dst = zip(*pairs, strict=True)
        stack.materialize(integers(place, src), integers(place, dst), integers(place, [6, 6]))
        states = [values(place, stack, slot) for slot in (4, 5)]
        if pairs is both:
            expected = states
    assert all(np.array_equal(a, b) for a, b in zip(states, expected, strict=True))


def test_weights_are_asked_for(place):
    stack, _ = make_stack(place, CASE, 2)
    one = integers(place, [0])
    with pytest.raises(ValueError, match=r"^A: expected the layers' A, bound once by refresh\(A\)"):
        stack.materialize(one, integers(place, [1]), one)
    with pytest.raises(ValueError, match=r"^A: expected a list of 2 arrays, got 1$"):
        stack.refresh(weights(place, CASE, 1))
    with pytest.raises(ValueError, match=r"^A\[1\]: expected \(nheads,\) = \(4,\)"):
        stack.refresh([*weights(place, CASE, 1), place.put(np.zeros(5, np.float32))])
