"""Checked mode: what only the device knows is looked at before a step runs.

A kernel of its own writes one report, and the host waits for it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from .arrays import View, current_stream, device_guard, empty_like_framework, view
from .decode_checks import Options, Views
from .errors import ReplaySSMError
from .folds import MESSAGE as FOLDED_TWICE
from .folds import stamp_on_device
from .keys import CheckStepKey
from .plan import FLOAT_TYPES, CheckStepParams, Plan


def check_mode(check: bool | str) -> bool | str:
    """What `check` and the environment ask for: False, True or "finite"."""
    if check not in (False, True, "finite"):
        raise ValueError(f'check: expected False, True or "finite", got {check!r}')
    return check or everywhere()


def everywhere() -> bool | str:
    """What REPLAYSSM_CHECK asks of every call."""
    return _VARIABLE in _environment and _MODES.get(_environment[_VARIABLE], False)


# The dictionary behind os.environ, which is read at every step, costs a tenth of os.environ.
_environment: Any = getattr(os.environ, "_data", os.environ)
_encode: Any = getattr(os.environ, "encodekey", str)
_VARIABLE = _encode("REPLAYSSM_CHECK")
_MODES: dict[object, bool | str] = {
    spelling: mode
    for value, mode in (("1", True), ("finite", "finite"))
    for spelling in (value, _encode(value))
}


def check_step(plan: Plan, views: Views, options: Options, folds: View | None = None) -> None:
    """Checked mode: a kernel looks at what only the device knows, and the host waits for it.

    `folds` (num_slots,) are the stamps of a stack's layer; a step that passes leaves its own.

    Raises :class:`ReplaySSMError` naming the array, the batch row, the value and the legal range.
    """
    x, x_cache, ends = views["x"], views.get("x_cache"), views.get("cu_seqlens")
    if x_cache is None or x is None:
        return  # the plain update has no metadata but the slots
    record: Any = CheckStepParams()
    for name in ("num_slots", "batch", "npredicted", "nheads", "head_dim", "max_window",
                 "ring_buffer_len", "slots_type", "pad_slot_id"):  # fmt: skip
        setattr(record, name, getattr(plan.record, name))
    for name, kind in ((field[0], field[1]) for field in CheckStepParams._fields_):
        if name.endswith("_stride"):
            setattr(record, name, getattr(plan.record, name))
        elif name in views and kind is ctypes.c_void_p:
            array = views[name]
            setattr(record, name, 0 if array is None else array.ptr)
    B_cache = views["B_cache"]
    assert B_cache is not None
    record.ngroups, record.dstate = B_cache.shape[1], B_cache.shape[3]
    record.tokens = 0 if ends is None else x.shape[1]
    record.ring_type = FLOAT_TYPES[x_cache.dtype]
    record.check_finite = int(options.check == "finite")
    record.folds = None if folds is None else folds.ptr
    report = empty_like_framework(x, (4,), "int64", plan.device)
    with device_guard(plan.device):
        report[...] = 0
        record.report = view(report, "report").ptr
        stream = current_stream(x)
        Plan(CheckStepKey(), (record.batch, 1, 1), (128, 1, 1), record, plan.device).launch(stream)
        violation, row, value, bound = (int(number) for number in report.tolist())
    if violation:
        raise ReplaySSMError(_VIOLATIONS[violation].format(row=row, value=value, bound=bound))
    if folds is not None:
        with device_guard(plan.device):
            stamp_on_device(record, plan, stream)


_VIOLATIONS = {
    1: "ring_start: expected values from 0 to {bound}, got {value} at batch row {row}",
    2: "prev_num_accepted_tokens: expected values from 0 to max_window = {bound}, got {value} at "
    "batch row {row}",
    3: "state_batch_indices: expected distinct slots, got slot {value} at batch rows {bound} and "
    "{row}",
    4: "cu_seqlens: expected values that rise from 0 to at most {bound}, got {value} at batch row "
    "{row}",
    5: "cu_seqlens: expected lengths of at most max_seqlen = {bound}, got {value} at batch row "
    "{row}",
    **{
        6 + index: f"{name}: expected finite values in the {{bound}} live rows, got others in live "
        "row {value} of batch row {row}"
        for index, name in enumerate(("x_cache", "B_cache", "dt_cache"))
    },
    9: FOLDED_TWICE,
}
