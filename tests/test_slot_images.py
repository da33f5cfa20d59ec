"""Whole slots of a LayerStack: copies, beams, images of sequences."""

from __future__ import annotations

import io
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import Audit, bits
from runs import STATES
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

# --- Copies ---------------------------------------------------------------------------------------


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


# --- Images ---------------------------------------------------------------------------------------


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
