"""Checked mode of prefix snapshots: metadata, slots and tables are looked at before anything runs.

On a GPU a kernel writes one report and the host waits for it; host arrays are read here.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from .arrays import View, current_stream, device_guard, empty_like_framework, itemsize, view
from .errors import ReplaySSMError
from .keys import COPY_DTYPES, SCALED_FORMATS, CheckMaterializeKey
from .plan import CheckMaterializeParams, Plan

Array = np.ndarray[Any, Any]
_TABLES = ("state_ptrs", "x_cache_ptrs", "B_cache_ptrs", "dt_cache_ptrs", "A_ptrs",
           "state_scale_ptrs", "state_copy_ptrs")  # fmt: skip
_VIOLATIONS = {
    1: "active_request_indices: expected requests from 0 to {bound}, got {value} at place {place}",
    2: "active_request_indices: expected only -1 behind the first negative entry, at place "
    "{bound}, got {value} at place {place}",
    3: "active_request_indices: expected each request once, got {value} at places {bound} and "
    "{place}",
    4: "ring_start: expected values from 0 to {bound}, got {value} at request {place}",
    5: "replay_prefix_len: expected at most max_window = {bound}, got {value} at request {place}",
    6: "replay_prefix_len: expected at most the {bound} live rows of the source, got {value} at "
    "request {place}",
    7: "dst_slots: expected distinct slots, got slot {value} at requests {bound} and {place}",
    8: "dst_slots: expected no other request's source, got slot {value} at request {place}, the "
    "source of request {bound}",
    9: "{table}: expected an aligned address other than 0, got {value:#x} at layer {bound}",
}


def message(violation: int, place: int, value: int, bound: int) -> str:
    """One line for what the kernel reports by number."""
    table = _TABLES[place] if violation == 9 else ""
    return _VIOLATIONS[violation].format(place=place, value=value, bound=bound, table=table)


def check_on_device(
    record: Any, like: View, prev: View | None, state_dtype: str, A_dtype: str
) -> None:
    """Looks at the metadata of a `materialize` record, and waits for the kernel that does.

    `prev` (num_slots,) tells the live rows of every slot, where that is known. Raises
    :class:`ReplaySSMError` naming the array, the place, the value and the legal range.
    """
    checked: Any = CheckMaterializeParams()
    known = {field[0] for field in type(record)._fields_}
    for name, kind in ((field[0], field[1]) for field in CheckMaterializeParams._fields_):
        if name in known:
            value = getattr(record, name)
            setattr(checked, name, value or 0 if kind is ctypes.c_void_p else value)
    if prev is not None:
        checked.prev_num_accepted_tokens = prev.ptr
        checked.prev_num_accepted_tokens_stride = prev.strides[0]
    checked.scaled = int(state_dtype in SCALED_FORMATS)
    checked.copied = int(state_dtype in COPY_DTYPES)
    checked.bytes_of_A = itemsize(A_dtype)
    report = empty_like_framework(like, (4,), "int64", like.device)
    with device_guard(like.device):
        report[...] = 0
        checked.report = view(report, "report").ptr
        grid = (record.batch, 1, 1)
        plan = Plan(CheckMaterializeKey(), grid, (128, 1, 1), checked, like.device)
        plan.launch(current_stream(like))
        violation, place, value, bound = (int(number) for number in report.tolist())
    if violation:
        raise ReplaySSMError(message(violation, place, value, bound))


class HostMetadata(NamedTuple):
    """What chooses the snapshots of a host call; slots are (layers, batch)."""

    src_slots: Array
    dst_slots: Array
    ring_start: Array
    replay_prefix_len: Array
    active_request_indices: Array | None
    pad_slot_id: int
    num_slots: int

    def requests(self) -> list[int]:
        """The active list up to its end, without requests of a negative prefix."""
        batch = self.src_slots.shape[1]
        listed = self.active_request_indices
        requests = list(range(batch)) if listed is None else [int(r) for r in listed]
        ended = next((place for place, r in enumerate(requests) if r < 0), len(requests))
        return [r for r in requests[:ended] if r >= batch or self.replay_prefix_len[r] >= 0]

    def slots(self, layer: int, request: int) -> tuple[int, int] | None:
        """Source and destination, or None where one is padding."""
        pair = int(self.src_slots[layer, request]), int(self.dst_slots[layer, request])
        live = (s != self.pad_slot_id and 0 <= s < self.num_slots for s in pair)
        return pair if all(live) else None


def check_on_host(
    given: HostMetadata, max_window: int, ring_buffer_len: int, prev: Array | None
) -> None:
    """The same for host arrays, in every call: raises ValueError."""
    layers, batch = given.src_slots.shape
    listed = given.active_request_indices
    entries = list(range(batch)) if listed is None else [int(r) for r in listed]
    for place, request in enumerate(entries):
        if request < 0:
            continue
        if request >= batch:
            raise ValueError(message(1, place, request, batch - 1))
        for other, before in enumerate(entries[:place]):
            if before < 0:
                raise ValueError(message(2, place, request, other))
            if before == request:
                raise ValueError(message(3, place, request, other))
    for request in (requests := given.requests()):
        start, rows = int(given.ring_start[request]), int(given.replay_prefix_len[request])
        if not 0 <= start < ring_buffer_len:
            raise ValueError(message(4, request, start, ring_buffer_len - 1))
        if rows > max_window:
            raise ValueError(message(5, request, rows, max_window))
    for layer in range(layers):
        _check_slots(given, layer, requests, prev)


def _check_slots(given: HostMetadata, layer: int, requests: list[int], prev: Array | None) -> None:
    pairs = {r: pair for r in requests if (pair := given.slots(layer, r)) is not None}
    for request, (src, dst) in pairs.items():
        rows = int(given.replay_prefix_len[request])
        if prev is not None and rows > prev[src]:
            raise ValueError(message(6, request, rows, int(prev[src])))
        for other, (other_src, other_dst) in pairs.items():
            if other < request and other_dst == dst:
                raise ValueError(message(7, request, dst, other))
            if other != request and other_src == dst:
                raise ValueError(message(8, request, dst, other))
