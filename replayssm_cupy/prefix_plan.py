"""Which rows of a batch leave a snapshot after a step, decided on the device.

One small launch turns lengths and accepted counts into what ``replayssm_materialize`` reads:
prefix lengths, ring starts and the compact list of requests. It may be captured into a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import reference
from .arrays import View, as_numpy, current_stream, empty_like_framework, view
from .checks import (
    Letters,
    check_alignment,
    check_devices,
    check_dtype,
    check_inplace,
    check_int,
    index_range,
    optional_view,
)
from .decode import wait_for_jax
from .decode_checks import check_host_cursors
from .keys import MAX_WINDOW, PlanMaterializeKey
from .plan import INDEX_TYPES, Plan, PlanMaterializeParams, launchers

MAX_THREADS = 1024
MAX_BATCH = 2**30  # the kernel counts rows in an int


class MaterializePlan(NamedTuple):
    """What ``replayssm_materialize`` reads of every request: (batch,) int32 each."""

    ring_start: Any
    replay_prefix_len: Any
    active_request_indices: Any


def plan_materialize(
    ring_start: Any,
    prev_num_accepted_tokens: Any,
    src_slots: Any,
    dst_slots: Any,
    committed_lens: Any,
    num_accepted: Any,
    *,
    block_size: int | None = None,
    boundaries: Any = None,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    out: MaterializePlan | None = None,
) -> MaterializePlan:
    """Plans the snapshots of the requests that crossed a boundary of their prefix in a step.

    Call it after :func:`advance_ring` with the same `num_accepted`, and
    :func:`replayssm_materialize` with its results next. The cursors of the destinations are set to
    0: what is written there has nothing to replay.

    Parameters
    ----------
    ring_start, prev_num_accepted_tokens : (num_slots,) int32, as the step left them; changed for
        destinations. A destination that is its own source is folded in place: the rows folded
        leave its ring.
    src_slots, dst_slots : (batch,) int32 or int64. A row with a slot that is `pad_slot_id`,
        negative or >= num_slots takes no part. Destinations are distinct, and no other row's
        source.
    committed_lens : (batch,) int32 or int64, tokens of each sequence before the step.
    num_accepted : (batch,) int32 or int64, tokens that the step added, the sampled one counted.
    block_size : tokens of a block. The boundary is the last multiple of it that the step reached;
        a step that passes several leaves the last one's snapshot.
    boundaries : (batch,) int32 or int64 instead: the boundary of each row as a number of tokens,
        negative for none. One before the checkpoint or behind the newest token does nothing; the
        checkpoint's own place is a plain copy.
    max_window, ring_buffer_len : W, 1 to 16, and L of the rings.
    out : a former result, to be written again; new arrays in the framework of `ring_start` if None.

    Returns
    -------
    MaterializePlan: ring starts, prefix lengths (-1 where there is nothing to do) and the requests
    with something to do, then -1; (batch,) int32 each.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` as the kernels do.

    Equivalent to::

        boundary = (committed + accepted) // block_size * block_size
        prefix = prev - (committed + accepted - boundary) if boundary > committed else -1
    """
    check_block_size(block_size, boundaries)
    cursors = view(ring_start, "ring_start")
    slots = view(src_slots, "src_slots")
    if out is None:
        batch = slots.shape[:1]
        out = MaterializePlan(
            *(empty_like_framework(cursors, batch, "int32", cursors.device) for _ in range(3))
        )
    views: dict[str, View | None] = {
        "ring_start": cursors,
        "prev_num_accepted_tokens": view(prev_num_accepted_tokens, "prev_num_accepted_tokens"),
        "src_slots": slots,
        "dst_slots": view(dst_slots, "dst_slots"),
        "committed_lens": view(committed_lens, "committed_lens"),
        "num_accepted": view(num_accepted, "num_accepted"),
        "boundaries": optional_view(boundaries, "boundaries"),
        "prefix_len": None,
        **plan_outputs(out),
    }
    plan_views(views, block_size or 1, max_window, ring_buffer_len, pad_slot_id)
    return out


def check_block_size(block_size: int | None, boundaries: Any) -> None:
    """Either a block size or boundaries."""
    if (block_size is None) == (boundaries is None):
        got = "neither" if block_size is None else "both"
        raise ValueError(f"block_size: expected it or boundaries, got {got}")
    if block_size is not None:
        check_int("block_size", block_size)
        if not 1 <= block_size < 2**63:
            raise ValueError(f"block_size: expected at least 1, got {block_size}")


def plan_outputs(out: MaterializePlan) -> dict[str, View]:
    """The views of a plan by their names in the kernel's record."""
    return {
        "planned_ring_start": view(out.ring_start, "out.ring_start"),
        "replay_prefix_len": view(out.replay_prefix_len, "out.replay_prefix_len"),
        "active_request_indices": view(
            out.active_request_indices, "out.active_request_indices"
        ),
    }  # fmt: skip


def plan_views(
    v: dict[str, View | None],
    block_size: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    *,
    move_cursors: bool = True,
) -> Plan | None:
    """:func:`plan_materialize` over views; with `prefix_len` (batch,) instead of boundaries too.

    Without `move_cursors` the destinations' cursors stay, for a check before anything is written.
    Returns what was launched, if anything.
    """
    index_range("pad_slot_id", pad_slot_id)
    check_int("max_window", max_window)
    check_int("ring_buffer_len", ring_buffer_len)
    if not 1 <= max_window <= MAX_WINDOW:
        raise ValueError(f"max_window: expected 1 to {MAX_WINDOW}, got {max_window}")
    if not max_window <= ring_buffer_len < 2**31:
        raise ValueError(
            f"ring_buffer_len: expected max_window = {max_window} to {2**31 - 1}, "
            f"got {ring_buffer_len}"
        )
    letters = Letters()
    for name, array in v.items():
        if array is None:
            continue
        by_slot = name in ("ring_start", "prev_num_accepted_tokens")
        written = by_slot or name in ("planned_ring_start", "replay_prefix_len",
                                      "active_request_indices")  # fmt: skip
        check_dtype(array, ("int32",) if written else tuple(INDEX_TYPES))
        letters.bind(array, ("num_slots",) if by_slot else ("batch",))
        if written:
            check_inplace(array)
    check_devices(list(v.values()))
    first = v["ring_start"]
    assert first is not None
    if first.device.kind not in launchers:
        _plan_on_host(v, block_size, max_window, ring_buffer_len, pad_slot_id, move_cursors)
        return None
    batch = letters["batch"]
    if batch == 0:
        return None
    if batch > MAX_BATCH:
        raise ValueError(f"src_slots: expected a batch of at most {MAX_BATCH}, got {batch}")
    record: Any = PlanMaterializeParams()
    for name, array in v.items():
        if array is not None:
            check_alignment(array)
            setattr(record, name, array.ptr)
            setattr(record, f"{name}_stride", array.strides[0])
            if hasattr(record, f"{name}_type"):
                setattr(record, f"{name}_type", INDEX_TYPES[array.dtype])
    record.block_size, record.pad_slot_id = block_size, pad_slot_id
    record.num_slots, record.batch = letters["num_slots"], batch
    record.max_window, record.ring_buffer_len = max_window, ring_buffer_len
    record.move_cursors = int(move_cursors)
    threads = min(32 * -(-batch // 32), MAX_THREADS)
    slots = v["src_slots"]
    assert slots is not None
    stream = current_stream(slots)
    plan = Plan(PlanMaterializeKey(), (1, 1, 1), (threads, 1, 1), record, first.device)
    plan.launch(stream)
    wait_for_jax(v.values(), first.device, stream)
    return plan


def _plan_on_host(
    v: dict[str, View | None],
    block_size: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    move_cursors: bool,
) -> None:
    a = {name: None if array is None else as_numpy(array) for name, array in v.items()}
    start, prev, src, dst = (
        _known(a[name])
        for name in ("ring_start", "prev_num_accepted_tokens", "src_slots", "dst_slots")
    )
    names = ("prefix_len", "committed_lens", "num_accepted", "boundaries")
    given = {name: a.get(name) for name in names}
    planned = []
    for row in range(len(src)):
        pair = int(src[row]), int(dst[row])
        if any(slot == pad_slot_id or not 0 <= slot < len(start) for slot in pair):
            planned.append((0, -1))
            continue
        live = int(prev[pair[0]])
        check_host_cursors(pair[0], int(start[pair[0]]), live, max_window, ring_buffer_len)
        values = {name: None if array is None else int(array[row]) for name, array in given.items()}
        planned.append((int(start[pair[0]]), _prefix(live, block_size, **values)))
    active = [row for row, (_, prefix) in enumerate(planned) if prefix >= 0]
    for name, column in (
        ("planned_ring_start", [first for first, _ in planned]),
        ("replay_prefix_len", [prefix for _, prefix in planned]),
        ("active_request_indices", active + [-1] * (len(planned) - len(active))),
    ):
        _known(a[name])[...] = column
    if not move_cursors:
        return
    moved = {}
    for row in active:
        source, target, prefix = int(src[row]), int(dst[row]), planned[row][1]
        folded = min(prefix, int(prev[source]))
        in_place = (int(start[source]) + folded) % ring_buffer_len, int(prev[source]) - folded
        moved[target] = in_place if source == target else (0, 0)
    for slot, cursors in moved.items():
        start[slot], prev[slot] = cursors


def _prefix(
    live: int,
    block_size: int,
    prefix_len: int | None,
    committed_lens: int | None,
    num_accepted: int | None,
    boundaries: int | None,
) -> int:
    if prefix_len is not None:
        return max(prefix_len, -1)
    assert committed_lens is not None and num_accepted is not None
    return reference.plan_materialize(live, committed_lens, num_accepted, block_size, boundaries)


def _known(array: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    assert array is not None
    return array
