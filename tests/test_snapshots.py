"""A LayerStack's whole slots: snapshots at block boundaries, copies, beams, images of sequences."""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from cases import DTYPES, Case, Shape, make_step
from oracles import Audit, Halving, bits, float64
from runs import EIGHT_BIT, STATES, NumPyBackend, make_stored, reference_path

import replayssm_cupy as ssm
from replayssm_cupy import reference

SHAPE = Shape("snapshots", 4, 2, 64, 64)
CASE = Case(SHAPE, npredicted=4, max_window=16, num_slots=8)


@pytest.fixture(params=["kernel", "reference"])
def place(request, backend):
    """The backend, or the reference beside it; the second needs no more than one backend."""
    if request.param == "kernel":
        yield backend
        return
    if backend.name == "cuda":
        pytest.skip("the reference runs with the host backend")
    with reference_path():
        yield NumPyBackend()


def make_stack(place, case: Case, layers: int = 2, *, fill: bool = False, seed: int = 0, **options):
    """A stack that borrows arrays: zero states and rings of NaN, or with `fill` random ones."""
    rng = np.random.default_rng(seed)
    pools = [make_stored(case, rng, fill=fill) for _ in range(layers)]
    for one in pools:
        if not fill:
            one.state[...] = 0
            if one.state_scale is not None:
                one.state_scale[...] = 1
            one.ring_start[:] = 0
    put = place.put
    scales = [put(p.state_scale) for p in pools if p.state_scale is not None]
    stack = ssm.LayerStack.from_arrays(
        [put(p.state) for p in pools], [put(p.x_cache) for p in pools],
        [put(p.B_cache) for p in pools], [put(p.dt_cache) for p in pools],
        put(pools[0].ring_start), put(pools[0].prev_num_accepted_tokens),
        npredicted=case.npredicted, state_scales=scales, **options,
    )  # fmt: skip
    return stack, pools


def integers(place, values, dtype=np.int32):
    return place.put(np.asarray(values, dtype))


def weights(place, case: Case, layers: int, value: float = 0.0) -> list:
    return [place.put(np.full(case.shape.nheads, value, np.float32)) for _ in range(layers)]


def step_all(place, stack, step, **options) -> list[np.ndarray]:
    given = {name: place.put(array) for name, array in step.arrays().items()}
    slots = given.pop("state_batch_indices", None)
    return [
        place.get(stack.step(layer, **given, slots=slots, dt_softplus=step.dt_softplus, **options))
        for layer in range(stack.num_layers)
    ]


def edit(place, array, index, value) -> None:
    """Writes a part of a device array through the host, which knows every format."""
    host = place.get(array)
    host[index] = value
    array[...] = place.put(host)


def values(place, stack, slot: int, layer: int = 0) -> np.ndarray:
    state = float64(place.get(stack.states[layer])[slot])
    if stack.state_scales:
        state = state * float64(place.get(stack.state_scales[layer])[slot])[..., None]
    return state


def cursors(place, stack, slot: int) -> tuple[int, int]:
    return (int(place.get(stack.ring_start)[slot]),
            int(place.get(stack.prev_num_accepted_tokens)[slot]))  # fmt: skip


def contents(place, stack) -> dict[str, np.ndarray]:
    """Every byte of a stack."""
    lists = {"states": stack.states, "scales": stack.state_scales, "x": stack.x_caches,
             "B": stack.B_caches, "dt": stack.dt_caches}  # fmt: skip
    found = {f"{name}[{i}]": bits(place.get(a)) for name, arrays in lists.items()
             for i, a in enumerate(arrays)}  # fmt: skip
    found["ring_start"] = bits(place.get(stack.ring_start))
    found["prev"] = bits(place.get(stack.prev_num_accepted_tokens))
    return found


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not np.array_equal(a[name], b[name])]


def feed(place, stack, oracle: Audit, slots: list[int], accepted: list[int], q: int = 4) -> None:
    """One audited step; `slots` are storage lines, the oracle's requests have the same numbers."""
    step, exact = oracle.propose(slots, q)
    for out in step_all(place, stack, step):
        np.testing.assert_array_equal(float64(out), exact)
    stack.advance(integers(place, slots), integers(place, accepted))
    for slot, kept in zip(slots, accepted, strict=True):
        if slot >= 0:
            oracle.accept(slot, kept)


# --- Snapshots -----------------------------------------------------------------------------------


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


# --- Tables --------------------------------------------------------------------------------------


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


# --- Checked mode --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": [6, 2]}, "replay_prefix_len: expected at most the 5 live rows of the source, "
         "got 6 at request 0"),
        ({"prefix": [2, 17]}, "replay_prefix_len: expected at most max_window = 16, got 17 at "
         "request 1"),
        ({"dst": [4, 4]}, "dst_slots: expected distinct slots, got slot 4 at requests 0 and 1"),
        ({"dst": [1, 4]}, "dst_slots: expected no other request's source, got slot 1 at request 0, "
         "the source of request 1"),
        ({"start": 20}, r"ring_start: expected values from 0 to 19, got 20 at (request|slot) 0"),
    ],
)  # fmt: skip
def test_checks_of_a_stack(place, change, message):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    stack.refresh(weights(place, CASE, 2))
    stack.prev_num_accepted_tokens[...] = 5
    stack.ring_start[0] = change.get("start", 3)
    src, dst = integers(place, [0, 1]), integers(place, change.get("dst", [4, 5]))
    prefix = integers(place, change.get("prefix", [2, 2]))
    before = contents(place, stack)
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=f"^{message}$") as caught:
        stack.materialize(src, dst, prefix, check=True)
    if place.name != "reference":
        assert type(caught.value) is ssm.ReplaySSMError
    assert_same(contents(place, stack), before)


def test_what_a_check_lets_pass(place):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    stack.refresh(weights(place, CASE, 2))
    stack.prev_num_accepted_tokens[...] = 5
    stack.materialize(integers(place, [0, 0, 2, 3, -1]), integers(place, [4, 5, 2, -1, 4]),
                      integers(place, [5, 0, 3, 9, 9]), check=True)  # fmt: skip
    assert cursors(place, stack, 4) == (0, 0)


def test_unchecked_prefix_is_bounded_by_the_live_rows(backend):
    """On a device dead rows are never read, whatever was asked for."""
    stack, _ = make_stack(backend, CASE, 1, fill=True)
    stack.refresh(weights(backend, CASE, 1))
    stack.prev_num_accepted_tokens[...] = 3
    stack.ring_start[...] = 2
    for rings in (stack.x_caches, stack.B_caches, stack.dt_caches):
        edit(backend, rings[0], np.s_[:, :, 5:], np.nan)
    stack.materialize(integers(backend, [0]), integers(backend, [4]), integers(backend, [16]))
    stack.materialize(integers(backend, [0]), integers(backend, [5]), integers(backend, [3]))
    assert np.isfinite(values(backend, stack, 4)).all()
    np.testing.assert_array_equal(values(backend, stack, 4), values(backend, stack, 5))


# --- Wrong input ---------------------------------------------------------------------------------


INT8 = np.zeros(2, np.int8)
CALLS = {
    "materialize": {"src_slots": [0, 1], "dst_slots": [4, 5], "prefix_len": [2, 2]},
    "materialize_blocks": {"src_slots": [0, 1], "dst_slots": [4, 5], "committed_lens": [7, 7],
                           "num_accepted": [2, 2], "block_size": 4},
    "copy_slots": {"src_slots": [0, 1], "dst_slots": [4, 5]},
    "fork": {"src_slots": [0, 1], "dst_slots": [[4, 5], [6, 7]]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "change", "error", "message"),
    [
        ("materialize", {"src_slots": INT8}, TypeError, "src_slots: expected one of int32, int64, "
         "got int8"),
        ("materialize", {"dst_slots": [[1, 2]]}, ValueError, r"dst_slots: expected \(batch,\) or "
         r"\(layers, batch\) = \(2, batch\), got \(1, 2\)"),
        ("materialize", {"dst_slots": [1, 2, 3]}, ValueError, r"dst_slots: expected \(batch,\) = "
         r"\(2,\), got \(3,\) \(batch from src_slots\)"),
        ("materialize", {"prefix_len": [1]}, ValueError, r"prefix_len: expected \(batch,\) = "),
        ("materialize", {"prefix_len": INT8}, TypeError, "prefix_len: expected one of int32, "),
        ("materialize", {"prefix_len": 3}, TypeError, "prefix_len: expected an array of PyTorch"),
        ("materialize", {"check": 2}, ValueError, "check: expected False, True or"),
        ("materialize", {"pad_slot_id": "0"}, TypeError, "pad_slot_id: expected an int, got str"),
        ("materialize_blocks", {"block_size": 0}, ValueError, "block_size: expected at least 1, "),
        ("materialize_blocks", {"block_size": None}, ValueError, "block_size: expected it or "
         "boundaries, got neither"),
        ("materialize_blocks", {"boundaries": [4, 4]}, ValueError, "block_size: expected it or "
         "boundaries, got both"),
        ("materialize_blocks", {"block_size": 2.5}, TypeError, "block_size: expected an int, got"),
        ("materialize_blocks", {"num_accepted": [1, 2, 3]}, ValueError, "num_accepted: expected "),
        ("materialize_blocks", {"committed_lens": INT8}, TypeError, "committed_lens: expected one"),
        ("copy_slots", {"dst_slots": [4]}, ValueError, r"dst_slots: expected \(batch,\) = "),
        ("copy_slots", {"src_slots": INT8}, TypeError, "src_slots: expected one of int32, int64, "),
        ("fork", {"dst_slots": [4, 5]}, ValueError, r"dst_slots: expected \(batch, copies\) = "),
        ("fork", {"pad_slot_id": 2**63}, ValueError, "pad_slot_id: expected a 64-bit integer"),
    ],
)  # fmt: skip
def test_wrong_arguments(place, call, change, error, message):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    stack.refresh(weights(place, CASE, 2))
    stack.prev_num_accepted_tokens[...] = 5
    given = {
        name: place.put(value if isinstance(value, np.ndarray) else np.array(value, np.int32))
        if isinstance(value, list | np.ndarray) else value
        for name, value in (CALLS[call] | change).items()
    }  # fmt: skip
    before = contents(place, stack)
    with pytest.raises(error, match=f"^{message}") as caught:
        getattr(stack, call)(**given)
    assert "\n" not in str(caught.value)
    assert_same(contents(place, stack), before)


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        (3, TypeError, "slots: expected a list of slots, got int"),
        ([0, 8], ValueError, "slots: expected 0 to 7, got 8"),
        ([-1], ValueError, "slots: expected 0 to 7, got -1"),
        ([1.5], TypeError, "slots: expected an int, got float"),
        (np.zeros(2, np.uint8), TypeError, "slots: expected one of int32, int64, got uint8"),
        (np.zeros((2, 1), np.int32), ValueError, r"slots: expected \(batch,\), got \(2, 1\)"),
    ],
)
def test_wrong_slots_of_an_export(place, slots, error, message):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    with pytest.raises(error, match=f"^{message}$"):
        stack.export_slots(place.put(slots) if isinstance(slots, np.ndarray) else slots)


def test_an_export_looks_at_the_cursors(place):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    stack.prev_num_accepted_tokens[1] = 17
    with pytest.raises(ValueError, match=r"^prev_num_accepted_tokens: expected values from 0"):
        stack.export_slots([1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_window": 17}, ValueError, "max_window: expected 1 to 16, got 17"),
        ({"ring_buffer_len": 15}, ValueError, r"ring_buffer_len: expected max_window = 16 to "),
        ({"ring_start": np.zeros(4, np.int64)}, TypeError, "ring_start: expected int32, got int64"),
        ({"dst_slots": np.zeros(3, np.int32)}, ValueError, r"dst_slots: expected \(batch,\) = "),
        ({"prev_num_accepted_tokens": np.zeros(5, np.int32)}, ValueError,
         r"prev_num_accepted_tokens: expected \(num_slots,\) = \(4,\), got \(5,\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_plan(place, change, error, message):
    given = {"ring_start": np.zeros(4, np.int32), "prev_num_accepted_tokens": np.zeros(4, np.int32),
             "src_slots": np.zeros(2, np.int32), "dst_slots": np.ones(2, np.int32),
             "committed_lens": np.zeros(2, np.int32), "num_accepted": np.zeros(2, np.int32),
             "block_size": 4, "max_window": 16, "ring_buffer_len": 20} | change  # fmt: skip
    given = {n: place.put(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    with pytest.raises(error, match=f"^{message}"):
        ssm.plan_materialize(**given)


# --- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("rows", [20, 19])
def test_copies_take_everything_along(place, state_dtype, rows):
    """State, scale, live rows and cursors; dead rows are neither read nor written. R15."""
    case = replace(CASE, state_dtype=state_dtype, npredicted=rows - 16)
    stack, pools = make_stack(place, case, 3, fill=True)
    stack.ring_start[1], stack.prev_num_accepted_tokens[1] = 17, 7
    before = [[place.get(a) for a in arrays] for arrays in
              (stack.states, stack.x_caches, stack.B_caches, stack.dt_caches)]  # fmt: skip
    stack.copy_slots(integers(place, [1, 1, -1, 3, 4]), integers(place, [6, 0, 2, 99, 4]))
    live = (17 + np.arange(7)) % case.ring_buffer_len
    dead = np.setdiff1d(np.arange(case.ring_buffer_len), live)
    for layer in range(3):
        lists = stack.states, stack.x_caches, stack.B_caches, stack.dt_caches
        state, x, B, dt = (place.get(arrays[layer]) for arrays in lists)
        for got, had in zip((x, B, dt), (arrays[layer] for arrays in before[1:]), strict=True):
            for slot in (6, 0):
                assert np.array_equal(bits(got[slot][:, live]), bits(had[1][:, live]))
                assert np.array_equal(bits(got[slot][:, dead]), bits(had[slot][:, dead]))
            others = [1, 2, 3, 4, 5, 7]
            assert np.array_equal(bits(got[others]), bits(had[others]))
        assert np.array_equal(bits(state[[6, 0]]), bits(before[0][layer][[1, 1]]))
        if stack.state_scales:
            scale = place.get(stack.state_scales[layer])
            assert np.array_equal(scale[[6, 0]], pools[layer].state_scale[[1, 1]])
    for slot in (6, 0, 1):
        assert cursors(place, stack, slot) == (17, 7)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_copies_and_images_of_large_slots(place, state_dtype):
    """More bytes than one round of loads of the whole grid, and a dt ring of odd length."""
    case = Case(Shape("large", 24, 3, 128, 128), 1, 16, state_dtype, num_slots=3)
    stack, pools = make_stack(place, case, 1, fill=True)
    stack.ring_start[0], stack.prev_num_accepted_tokens[0] = 5, 16
    stack.copy_slots(integers(place, [0]), integers(place, [2]))
    stack.import_slots(stack.export_slots([2]), [1])
    assert cursors(place, stack, 2) == (5, 16) and cursors(place, stack, 1) == (0, 16)
    state = place.get(stack.states[0])
    assert np.array_equal(bits(state[2]), bits(pools[0].state[0]))
    assert np.array_equal(bits(state[1]), bits(pools[0].state[0]))
    rows = (5 + np.arange(16)) % case.ring_buffer_len
    for name, rings in (("x_cache", stack.x_caches), ("B_cache", stack.B_caches),
                        ("dt_cache", stack.dt_caches)):  # fmt: skip
        got, had = place.get(rings[0]), getattr(pools[0], name)
        assert np.array_equal(bits(got[2][:, rows]), bits(had[0][:, rows])), name
        assert np.array_equal(bits(got[1][:, :16]), bits(had[0][:, rows])), name


def test_beams_fork_and_go_on(place):
    """Two parents, three children each, then different tokens in all of them."""
    case = replace(CASE, num_slots=10)
    stack, _ = make_stack(place, case)
    oracle = Audit(case, 10)
    for accepted in ([4, 2], [3, 4], [4, 4], [4, 1], [2, 3]):
        feed(place, stack, oracle, [0, 5], accepted)
    stack.fork(integers(place, [0, 5]), integers(place, [[1, 2, -1], [6, 7, 8]]))
    for child, parent in ((1, 0), (2, 0), (6, 5), (7, 5), (8, 5)):
        oracle._accepted[child] = list(oracle._accepted[parent])
        oracle._number[child] = oracle._number[parent]
        assert cursors(place, stack, child) == cursors(place, stack, parent)
    oracle.x_value = lambda slot: 1.0  # type: ignore[method-assign]
    slots = [1, 6, 2, 0, 8, 7, 5]
    for number in range(4):
        feed(place, stack, oracle, slots, [(number + i) % 5 for i in range(7)])
    for slot in slots:
        live = cursors(place, stack, slot)[1]
        np.testing.assert_array_equal(values(place, stack, slot, 1), oracle.state(slot, live))


def test_copies_that_race_are_refused(place):
    stack, _ = make_stack(place, CASE, fill=True)
    before = contents(place, stack)
    for src, dst, message in (
        ([0, 1], [4, 4], "^dst_slots: expected distinct slots, got slot 4 twice$"),
        ([0, 1], [1, 4], "^dst_slots: expected no source among them, got slot 1$"),
    ):
        with pytest.raises((ssm.ReplaySSMError, ValueError), match=message):
            stack.copy_slots(integers(place, src), integers(place, dst), check=True)
    assert_same(contents(place, stack), before)
    stack.ring_start[2] = 20
    message = "^ring_start: expected values from 0 to 19, got 20 at slot 2$"
    with pytest.raises(ssm.ReplaySSMError if place.name != "reference" else ValueError,
                       match=message):  # fmt: skip
        stack.copy_slots(integers(place, [2]), integers(place, [5]), check=True)


# --- Images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", STATES)
@pytest.mark.parametrize("live", [0, 5, 16])
def test_images_carry_the_pending_rows(place, state_dtype, live):
    """R1. Ring start 18, rows on both ends of the ring; then one decode step elsewhere."""
    case = replace(CASE, state_dtype=state_dtype)
    stack, _ = make_stack(place, case, 2, fill=True)
    stack.ring_start[3], stack.prev_num_accepted_tokens[3] = 18, live
    image = stack.export_slots([3, 0])
    file = io.BytesIO()
    np.savez(file, **image)
    file.seek(0)
    stack.import_slots(np.load(file), integers(place, [6, 7]))
    assert cursors(place, stack, 6) == (0, live)
    step = make_step(case, 2, np.random.default_rng(2), slots=np.array([3, 6], np.int32))
    for name in ("x", "dt", "B", "C", "z"):
        getattr(step, name)[1] = getattr(step, name)[0]
    for out in step_all(place, stack, step):
        assert np.array_equal(bits(out[0]), bits(out[1]))
    for layer in range(2):
        state = place.get(stack.states[layer])
        assert np.array_equal(bits(state[3]), bits(state[6]))


def test_images_between_stacks(place):
    """Another ring length, other slots, an exact sequence; and all of it as plain arrays."""
    case, oracle = CASE, Audit(CASE)
    source, _ = make_stack(place, case)
    for accepted in (4, 3, 4, 2, 4, 4):
        feed(place, source, oracle, [2], [accepted])
    live = cursors(place, source, 2)[1]
    image = source.export_slots([2])
    assert {name: array.dtype.name for name, array in image.items()} == {
        "header": "uint8", "header_crc32": "uint32", "slots": "uint8"}  # fmt: skip
    assert image["slots"].shape == (1, source._whole_slots().image.nbytes)
    other, _ = make_stack(place, replace(case, npredicted=2, num_slots=4))
    other.import_slots(image, [1])
    np.testing.assert_array_equal(values(place, other, 1, 1), oracle.state(2, live))
    other.refresh(weights(place, case, 2))
    other.materialize(integers(place, [1]), integers(place, [3]), integers(place, [live]))
    np.testing.assert_array_equal(values(place, other, 3, 1), oracle.state(2))


def rewritten(image: dict, **changes) -> dict:
    """The image with another header, its checksum put right."""
    header = json.loads(image["header"].tobytes()) | changes
    text = json.dumps(header, sort_keys=True).encode()
    return image | {"header": np.frombuffer(text, np.uint8).copy(),
                    "header_crc32": np.array([zlib.crc32(text)], np.uint32)}  # fmt: skip


@pytest.mark.parametrize("fault", ["version", "format", "nheads", "state_dtype", "max_window",
                                   "byte", "header byte", "short", "missing", "dtype", "object",
                                   "slot", "slots twice", "count", "live"])  # fmt: skip
def test_images_that_are_refused(place, fault):
    stack, _ = make_stack(place, CASE, 2, fill=True)
    image, slots = stack.export_slots([3, 0]), [6, 7]
    if fault in ("version", "nheads", "max_window"):
        image = rewritten(image, **{fault: 99})
        message = {"version": "of version 1, got", "nheads": "expected nheads = 4 as in the stack",
                   "max_window": "expected max_window = 16"}[fault]  # fmt: skip
    elif fault in ("format", "state_dtype"):
        image = rewritten(image, **{fault: "bfloat16"})
        message = "expected state_dtype = float32" if fault == "state_dtype" else "expected 'replay"
    elif fault == "live":
        image, message = rewritten(image, live=[17, 0]), "live rows from 0 to 16, got 17"
    elif fault == "byte":
        image["slots"][1, 12345] ^= 1
        message = "the checksum of row 1 does not fit"
    elif fault == "header byte":
        image["header"][40] ^= 1
        message = "its checksum does not fit"
    elif fault == "short":
        image["slots"] = image["slots"][:, :-16]
        message = "expected shape"
    elif fault == "missing":
        del image["slots"]
        message = "expected an array 'slots'"
    elif fault == "dtype":
        image["slots"] = image["slots"].view(np.int8)
        message = "expected uint8 of rank 2, got int8"
    elif fault == "object":
        image["slots"] = image["slots"].tolist()
        message = "expected a NumPy array, got list"
    elif fault == "slot":
        slots, message = [6, 8], "slots: expected 0 to 7, got 8"
    elif fault == "slots twice":
        slots, message = [6, 6], "slots: expected distinct slots"
    else:
        slots, message = [6], "slots: expected 2 slots, one an image, got 1"
    before = contents(place, stack)
    with pytest.raises((ssm.ReplaySSMError, TypeError, ValueError), match=message) as caught:
        stack.import_slots(image, slots)
    assert "\n" not in str(caught.value)
    assert_same(contents(place, stack), before)


# --- Cases that public users met -----------------------------------------------------------------


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


# --- On a GPU only -------------------------------------------------------------------------------


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
