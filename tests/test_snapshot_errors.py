"""Snapshots, copies and images of wrong input, and what checked mode sees of them."""

from __future__ import annotations

import numpy as np
import pytest
from stacks import (
    CASE,
    assert_same,
    contents,
    cursors,
    edit,
    integers,
    make_stack,
    values,
    weights,
)

import replayssm_cupy as ssm

# --- Checked mode ---------------------------------------------------------------------------------


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


# --- Wrong input ----------------------------------------------------------------------------------

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
