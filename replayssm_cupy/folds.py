"""Checked mode of a stack: at which cursors each layer folded each slot.

Once a step has folded a slot's live rows into its state, another one with the same cursors would
count them twice. The stamps lie beside the stack's arrays; kernels of `check.cu` compare, set and
clear them, or NumPy does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import compiler, reference
from .arrays import View, as_numpy, current_stream, device_guard, from_numpy, itemsize, view
from .decode_checks import live_slots
from .errors import ReplaySSMError
from .keys import ForgetFoldsKey, StampFoldsKey
from .plan import INDEX_TYPES, ForgetFoldsParams, Plan, launchers

THREADS = 128
MESSAGE = (
    "prev_num_accepted_tokens: expected cursors that advance() has moved since the flush, got the "
    "{value} live rows of it again at batch row {row}: folded twice, step called again before "
    "advance"
)


class Folds:
    """Stamps (layers, num_slots) int64 on the device of the layers' states: of cursors, or 0."""

    def __init__(self, state: View, layers: int) -> None:
        self._array = from_numpy(np.zeros((layers, state.shape[0]), np.int64), state)
        self._stamps = view(self._array, "folds")
        if state.device.kind == "cuda":  # now, because a capture may be next
            with device_guard(state.device):
                compiler.load([StampFoldsKey(), ForgetFoldsKey()], state.device.index)

    def fits(self, state: View, layers: int) -> bool:
        """Whether the stamps are as many as those of these layers, on the same device."""
        stamps = self._stamps
        return stamps.shape == (layers, state.shape[0]) and stamps.device == state.device

    def of_layer(self, layer: int) -> View:
        """The stamps of one layer, (num_slots,)."""
        num_slots = self._stamps.shape[1]
        return self._stamps._replace(
            ptr=self._stamps.ptr + 8 * layer * num_slots,
            shape=(num_slots,),
            strides=(1,),
        )

    def forget(self, slots: View | None, pad_slot_id: int) -> int:
        """Clears the stamps of `slots`, (batch,) or (batch, copies), None: all; their cursors have
        moved. Returns the stream that does so."""
        stamps = self._stamps
        layers, num_slots = stamps.shape
        if stamps.device.kind not in launchers:
            chosen = None if slots is None else as_numpy(slots).reshape(-1)
            as_numpy(stamps)[:, live_slots(chosen, num_slots, num_slots, pad_slot_id)] = 0
            return 0
        stream = current_stream(stamps if slots is None else slots)
        record: Any = ForgetFoldsParams(folds=stamps.ptr, pad_slot_id=pad_slot_id)
        record.num_slots, record.layers, record.batch = num_slots, layers, num_slots
        for column in [None] if slots is None else _columns(slots):
            if column is not None:
                record.slots, record.slots_stride = column.ptr, column.strides[0]
                record.slots_type, record.batch = INDEX_TYPES[column.dtype], column.shape[0]
            if record.batch:
                grid = -(-record.batch // THREADS), 1, 1
                Plan(ForgetFoldsKey(), grid, (THREADS, 1, 1), record, stamps.device).launch(stream)
        return stream


def _columns(slots: View) -> list[View]:
    """The columns of (batch, copies); (batch,) is one."""
    if len(slots.shape) == 1:
        return [slots]
    step = itemsize(slots.dtype) * slots.strides[1]
    return [
        slots._replace(
            ptr=slots.ptr + step * copy, shape=slots.shape[:1], strides=slots.strides[:1]
        )
        for copy in range(slots.shape[1])
    ]


def stamp_on_device(record: Any, plan: Plan, stream: int) -> None:
    """Stamps what a step folds, by the record of the check that it has passed."""
    grid = -(-record.batch // THREADS), 1, 1
    Plan(StampFoldsKey(), grid, (THREADS, 1, 1), record, plan.device).launch(stream)


class _Row(NamedTuple):
    """What a step does to one sequence."""

    row: int
    slot: int
    live: int
    stamp: int
    reads: bool  # the live rows
    folds: bool


def check_and_stamp_on_host(
    folds: View, arrays: dict[str, Any], pad_slot_id: int, max_window: int
) -> None:
    """The same for a step on the host, whose arrays have passed their other checks."""
    stamps = as_numpy(folds)
    rows = _rows(arrays, pad_slot_id, max_window)
    for row in rows:
        if row.reads and stamps[row.slot] == row.stamp:
            raise ReplaySSMError(MESSAGE.format(value=row.live, row=row.row))
    for row in rows:
        if row.folds:
            stamps[row.slot] = row.stamp


def _rows(arrays: dict[str, Any], pad_slot_id: int, max_window: int) -> list[_Row]:
    slots, forced = arrays["slots"], arrays["force_flush"]
    start, prev = arrays["ring_start"], arrays["prev_num_accepted_tokens"]
    rows = []
    for row, (_, tokens) in enumerate(reference.sequences(arrays["x"], arrays["cu_seqlens"])):
        slot = row if slots is None else int(slots[row])
        if not live_slots(np.array([slot]), 1, len(start), pad_slot_id):
            continue
        q, live = tokens.stop - tokens.start, int(prev[slot])
        flush = live > 0 and forced is not None and bool(forced[row])
        stamp = 1 + live + int(start[slot]) * (1 + max_window)
        folds = flush or reference.flushes(live, q, max_window)
        rows.append(_Row(row, slot, live, stamp, q > 0 or flush, folds))
    return rows
