"""One decode step over views: check -> plan -> launch -> out.

A call whose shapes, strides, dtypes and devices were seen before reuses its plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
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
from .checked import check_step
from .checks import check_devices
from .decode_checks import Options, Views, check_decode, check_host_arrays
from .keys import (
    TOKENS_PER_TILE,
    CheckpointingSsuKey,
    Key,
    SelectiveStateUpdateKey,
    SmallCheckpointingSsuKey,
)
from .plan import (
    FLOAT_TYPES,
    INDEX_TYPES,
    CheckpointingSsuParams,
    Plan,
    SelectiveStateUpdateParams,
    launchers,
)
from .schedule import SLAB, prefers_small, processor, schedule, small_schedule

_plans: dict[object, Plan] = {}


def decode(views: Views, out: Any, options: Options) -> Any:
    """A decode step over views; with rings the replay step, without them the plain update."""
    x, state = views["x"], views["state"]
    assert x is not None and state is not None
    fresh = out is None
    if fresh:
        check_devices([state, x])
        out = empty_like_framework(x, x.shape, x.dtype, x.device)
    views["out"] = view(out, "out")
    if x.device.kind in launchers:
        signature = (options, *map(_signature, views.values()))
        plan = _plans.get(signature)
        if plan is None:
            canonical, window = check_decode(views, options)
            plan = _plans[signature] = _plan_decode(canonical, options, window)
        if plan.grid[0]:
            if options.check:
                check_step(plan, views, options)
            _launch(plan, views)
    else:
        canonical, window = check_decode(views, options)
        _run_on_host(canonical, options, window)
    return to_framework(out, x) if fresh else out


def _signature(array: View | None) -> object:
    """All of a view but where exactly it lies and who owns it."""
    if array is None:
        return None
    return array.ptr & 15, array.shape, array.strides, array.dtype, array.device, array.readonly


def _launch(plan: Plan, views: Views) -> None:
    """Launches a copy of the plan's record, so that threads may share the plan."""
    arrays = views.values()
    record = type(plan.record).from_buffer_copy(plan.record)
    pointers = [array.ptr if array is not None else 0 for array in arrays]
    struct.pack_into(f"{len(pointers)}Q", record, 0, *pointers)
    x = views["x"]
    assert x is not None
    stream = current_stream(x)
    replace(plan, record=record).launch(stream)
    wait_for_jax(arrays, plan.device, stream)


def wait_for_jax(arrays: Iterable[View | None], device: Device, stream: int) -> None:
    """Waits for `stream` if JAX owns one of the arrays: it may free or reuse the memory at once."""
    if device.kind == "cuda" and any(
        array is not None and array.framework == "jax" for array in arrays
    ):
        with device_guard(device):
            compiler.import_cupy().cuda.runtime.streamSynchronize(stream)


def _plan_decode(v: Views, options: Options, max_window: int) -> Plan:
    state, x, B = v["state"], v["x"], v["B"]
    assert state is not None and x is not None and B is not None
    batch, npredicted, nheads, head_dim = x.shape
    if (ends := v.get("cu_seqlens")) is not None:
        assert options.max_seqlen is not None
        batch, npredicted = ends.shape[0] - 1, options.max_seqlen
    dstate = state.shape[3]
    record: Any
    key: Key
    if "x_cache" in v:
        x_cache = v["x_cache"]
        assert x_cache is not None
        record = CheckpointingSsuParams()
        record.max_window, record.ring_buffer_len = max_window, x_cache.shape[2]
        tiles = -(-npredicted // TOKENS_PER_TILE)
        key = CheckpointingSsuKey(state.dtype, x.dtype, dstate, tiles)
    else:
        record = SelectiveStateUpdateParams()
        key = SelectiveStateUpdateKey(state.dtype, x.dtype, dstate)
    for name, axes in _STRIDES.items():
        _set_strides(record, name, v.get(name), axes)
    if ends is not None:  # the sequences' tokens follow one another in one row
        for name in ("x", "dt", "B", "C", "z", "out"):
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
    if isinstance(key, SelectiveStateUpdateKey):
        threads = 32 * -(-head_dim // SLAB)
        return Plan(key, (batch * nheads, 1, 1), (threads, 1, 1), record, x.device)
    device, gated = processor(x.device), v["z"] is not None
    small = small_schedule(
        key, batch, nheads, head_dim, npredicted, record.ring_buffer_len, gated, device
    )
    if small is not None and prefers_small(key, batch * nheads, npredicted, device):
        record.parts = small.parts
        key = SmallCheckpointingSsuKey(key.state_dtype, key.activation_dtype, dstate, tiles)
        grid, threads = (batch * nheads * small.parts, 1, 1), 32 * (small.slabs + 1)
        return Plan(key, grid, (threads, 1, 1), record, x.device, small.shared_bytes)
    spread = schedule(
        key, batch, nheads, record.heads_per_group, head_dim, npredicted, max_window, gated, device
    )
    for field in ("heads_of_item", "items_of_group", "bytes_of_warp"):
        setattr(record, field, getattr(spread, field))
    blocks = spread.blocks if batch else 0
    return Plan(
        key, (blocks, 1, 1), (32 * spread.warps, 1, 1), record, x.device, spread.shared_bytes
    )


_STRIDES = {
    "state": ("slot", "head"),
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
}


def _set_strides(record: Any, name: str, array: View | None, axes: Sequence[str]) -> None:
    if array is not None:
        for axis, letter in enumerate(axes):
            field = f"{name}_{letter}_stride" if letter else f"{name}_stride"
            setattr(record, field, array.strides[axis])


def _index_type(array: View | None) -> int:
    return INDEX_TYPES[array.dtype] if array is not None else 0


def _run_on_host(v: Views, options: Options, max_window: int) -> None:
    arrays: dict[str, Any] = {name: None if a is None else as_numpy(a) for name, a in v.items()}
    storage = reference.Storage(
        arrays.pop("state"),
        arrays.pop("state_scale"),
        arrays.pop("rand_seed"),
        options.philox_rounds,
        options.layer,
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
    prev = arrays.pop("prev_num_accepted_tokens")
    reference.checkpointing_ssu_cpu(storage, prev=prev, max_window=max_window, **arrays)
