"""One decode step over views: check -> plan -> launch -> out.

A call whose shapes, strides, dtypes and devices were seen before reuses its plan.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from . import compiler, reference
from .arrays import (
    Device,
    View,
    as_numpy,
    current_stream,
    device_guard,
    empty_like_framework,
    to_framework,
    view,
)
from .calls import MOST_CALLS, BoundCall, PlanPool, Seen
from .checked import check_step
from .checks import check_devices
from .decode_checks import Options, Views, check_decode, check_host_arrays, vectors_of
from .folds import check_and_stamp_on_host
from .formats import format_of
from .keys import SLAB, Layout, SelectiveStateUpdateKey
from .plan import (
    FLOAT_TYPES,
    INDEX_TYPES,
    CheckpointingSsuParams,
    Plan,
    SelectiveStateUpdateParams,
    launchers,
)
from .schedule import Schedule, Step, processor, schedule
from .scratch import SCRATCH, words_of
from .small import fill_small

_plans: dict[object, Plan] = {}


def decode(
    views: Views,
    out: Any,
    options: Options,
    seen: Seen | None = None,
    folds: View | None = None,
    before: Callable[[], tuple[list[Plan], Views]] = lambda: ([], {}),
) -> Any:
    """A decode step over views; with rings the replay step, without them the plain update.

    `folds` are the stamps of a stack's layer, for checked mode. `before` does what must come ahead
    of the step once that has passed its checks; it returns what it launched and on which arrays.
    """
    x = views["x"]
    assert x is not None
    fresh = out is None
    if fresh:
        out = _empty_out(views)
    views["out"] = view(out, "out")
    if x.device.kind in launchers:
        plan = plan_of(views, options)
        if all(plan.grid):
            if options.check:
                check_step(plan, views, options, folds)
            earlier, others = before()
            _launch(plan, views)
            if seen is not None and not options.check:
                vectors = vectors_of("x_cache" in views)
                seen.add(pointing_to(plan, views), {**views, **others}, vectors, earlier)
    else:
        canonical, window = check_decode(views, options)
        before()
        _run_on_host(canonical, options, window, folds)
    return to_framework(out, x) if fresh else out


def bind(
    views: Views,
    out: Any,
    options: Options,
    step: Callable[[Any], Any],
    after: Callable[[], object] | None = None,
) -> BoundCall:
    """The step over these views as a call without arguments; nothing is launched yet.

    `step` does all of it on a given `out`, where there is no kernel, in checked mode and for JAX,
    which has to be waited for. `after` is called after each launch.
    """
    x = views["x"]
    assert x is not None
    if out is None:
        if x.framework == "jax":
            raise ValueError(
                "out: expected an array to write at every call of a bound step, got None "
                "(JAX arrays are immutable)"
            )
        out = _empty_out(views)
    views["out"] = view(out, "out")
    pool = None
    if x.device.kind in launchers:
        plan = plan_of(views, options)
        with_jax = any(array is not None and array.framework == "jax" for array in views.values())
        if all(plan.grid) and not options.check and not with_jax:
            pool = PlanPool(pointing_to(plan, views), x._replace(owner=None))
            if x.device.kind == "cuda":  # now, because a capture may be next
                with device_guard(plan.device):
                    for one in (plan, plan.before):
                        if one is not None:
                            stream = current_stream(x)
                            compiler.function_for(one.key, one.layout, one.device.index, stream)
    else:
        check_decode(views, options)
    return BoundCall(pool, partial(step, out), views, out, after)


def _empty_out(views: Views) -> Any:
    x = views["x"]
    assert x is not None
    check_devices([views["state"], x])
    return empty_like_framework(x, x.shape, x.dtype, x.device)


def plan_of(views: Views, options: Options) -> Plan:
    """The plan of a call with a launcher: checked and made, or one that was made before."""
    signature = (options, *map(_signature, views.values()))
    plan = _plans.get(signature)
    if plan is None:
        canonical, window = check_decode(views, options)
        if len(_plans) >= MOST_CALLS:
            _plans.clear()
        plan = _plans[signature] = _plan_decode(canonical, options, window)
    return plan


def _signature(array: View | None) -> object:
    """All of a view but where exactly it lies and who owns it."""
    if array is None:
        return None
    return array.ptr & 15, array.shape, array.strides, array.dtype, array.device, array.readonly


def pointing_to(plan: Plan, views: Views) -> Plan:
    """A copy of the plan whose record has the addresses of these views."""
    plan = plan.copy()
    for name, kind, *_ in plan.record._fields_:
        if kind is ctypes.c_void_p:
            array = views.get(name)
            setattr(plan.record, name, array.ptr if array is not None else None)
    return plan


def _launch(plan: Plan, views: Views) -> None:
    x = views["x"]
    assert x is not None
    stream = current_stream(x)
    pointing_to(plan, views).launch(stream)
    wait_for_jax(views.values(), plan.device, stream)


def wait_for_jax(arrays: Iterable[View | None], device: Device, stream: int) -> None:
    """Waits for `stream` if JAX owns one of the arrays: it may free or reuse the memory at once."""
    if device.kind == "cuda" and any(
        array is not None and array.framework == "jax" for array in arrays
    ):
        with device_guard(device):
            compiler.import_cupy().cuda.runtime.streamSynchronize(stream)


def _plan_decode(v: Views, options: Options, max_window: int) -> Plan:
    state, x = v["state"], v["x"]
    assert state is not None and x is not None
    x_cache = v.get("x_cache")
    record: Any = SelectiveStateUpdateParams() if x_cache is None else CheckpointingSsuParams()
    _fill(record, v, options)
    dstate = state.shape[3]
    if x_cache is None:
        key = SelectiveStateUpdateKey(state.dtype, x.dtype, dstate)
        blocks, threads = record.batch * record.nheads, 32 * -(-record.head_dim // SLAB)
        return Plan(key, (blocks, 1, 1), (threads, 1, 1), record, x.device)
    record.max_window, record.ring_buffer_len = max_window, x_cache.shape[2]
    record.starts_early = options.enable_pdl
    step = Step(
        record.batch, record.nheads, record.heads_per_group, record.head_dim, record.npredicted,
        max_window, record.ring_buffer_len, v["z"] is not None, options.algorithm, words_of(v),
        v.get("tickets") is not None, fill_small(record, v), record.flags,
    )  # fmt: skip
    launch = schedule(
        format_of(state, v.get("state_copy")), x.dtype, dstate, step, processor(x.device)
    )
    for field, value in launch.fields.items():
        before = getattr(record, field)  # ctypes would let a name pass that is no field
        setattr(record, field, before | value if field == "flags" else value)
    plan = _plan_of_launch(launch, record, x.device, options.enable_pdl)
    plan.layout = _layout_of(record, v, dstate)
    return plan


def _layout_of(record: Any, v: Views, dstate: int) -> Layout | None:
    """That of the arrays, unless one of them has gaps; an axis of length 1 has any stride."""
    layout = Layout(**{field.name: getattr(record, field.name) for field in fields(Layout)})
    strides = layout.strides(dstate)
    for name, axes in _STRIDES.items():
        array = v.get(name)
        for axis, letter in enumerate(axes):
            expected = strides.get(f"{name}_{letter}" if letter else name)
            if array is None or expected is None or array.shape[axis] == 1:
                continue
            if array.strides[axis] != expected:
                return None
    return layout


def _plan_of_launch(launch: Schedule, record: Any, device: Device, pdl: bool) -> Plan:
    """The second of two kernels always starts early: it waits for the scratch that it reads."""
    before = None
    if launch.before is not None:
        before, pdl = _plan_of_launch(launch.before, record, device, pdl), True
    block = (launch.threads, 1, 1)
    return Plan(launch.key, launch.grid, block, record, device, launch.shared_bytes, pdl, before)


def _fill(record: Any, v: Views, options: Options) -> None:
    """Strides, types and counts of the record; its pointers come with each launch."""
    state, x, B = v["state"], v["x"], v["B"]
    assert state is not None and x is not None and B is not None
    batch, npredicted, nheads, head_dim = x.shape
    for name, axes in _STRIDES.items():
        _set_strides(record, name, v.get(name), axes)
    if (ends := v.get("cu_seqlens")) is not None:
        assert options.max_seqlen is not None
        batch, npredicted = ends.shape[0] - 1, options.max_seqlen
        for name in ("x", "dt", "B", "C", "z", "out"):  # the sequences' tokens lie in one row
            setattr(record, f"{name}_batch_stride", 0)
    for name in ("dt", "A", "D", "dt_bias", "out"):
        array = v[name]
        setattr(record, f"{name}_type", FLOAT_TYPES[array.dtype] if array is not None else 0)
    record.slots_type = _index_type(v["slots"])
    record.dt_softplus, record.pad_slot_id, record.zero_padding = options[:3]
    record.philox_rounds, record.layer = options.philox_rounds, options.layer
    record.num_slots, record.batch, record.npredicted = state.shape[0], batch, npredicted
    record.nheads, record.head_dim = nheads, head_dim
    record.heads_per_group = nheads // B.shape[2]


_STRIDES = {
    "state": ("slot", "head"),
    "state_copy": ("slot", "head"),
    "state_scale": ("slot", "head"),
    "x_cache": ("slot", "head", "row"),
    "B_cache": ("slot", "group", "row"),
    "dt_cache": ("slot", "head", "row"),
    "ring_start": ("",),
    "prev_num_accepted_tokens": ("",),
    "x": ("batch", "token", "head"),
    "dt": ("batch", "token", "head"),
    "A": ("",),
    "B": ("batch", "token", "group"),
    "C": ("batch", "token", "group"),
    "D": ("",),
    "z": ("batch", "token", "head"),
    "dt_bias": ("",),
    "out": ("batch", "token", "head"),
    "slots": ("",),
    "force_flush": ("",),
    "events": ("",),
}


def _set_strides(record: Any, name: str, array: View | None, axes: Sequence[str]) -> None:
    if array is not None:
        for axis, letter in enumerate(axes):
            field = f"{name}_{letter}_stride" if letter else f"{name}_stride"
            setattr(record, field, array.strides[axis])


def _index_type(array: View | None) -> int:
    return INDEX_TYPES[array.dtype] if array is not None else 0


def _run_on_host(v: Views, options: Options, max_window: int, folds: View | None) -> None:
    arrays: dict[str, Any] = {
        name: None if a is None else as_numpy(a)
        for name, a in v.items()
        if name not in (*SCRATCH, "tickets")
    }
    storage = reference.Storage(
        arrays.pop("state"),
        arrays.pop("state_scale"),
        arrays.pop("rand_seed"),
        options.philox_rounds,
        options.layer,
        arrays.pop("state_copy", None),
        arrays.pop("events", None),
    )
    arrays.update(
        dt_softplus=options.dt_softplus,
        pad_slot_id=options.pad_slot_id,
        zero_padding=options.zero_padding,
    )
    if "x_cache" not in v:
        reference.selective_state_update_cpu(storage, **arrays)
        return
    check_host_arrays(arrays, options, max_window)
    if folds is not None:
        check_and_stamp_on_host(folds, arrays, options.pad_slot_id, max_window)
    prev = arrays.pop("prev_num_accepted_tokens")
    reference.checkpointing_ssu_cpu(storage, prev=prev, max_window=max_window, **arrays)
