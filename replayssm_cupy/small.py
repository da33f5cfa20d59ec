"""What the small form of a decode step reads from the record: strides in bytes, and flags."""

from __future__ import annotations

from .arrays import View, itemsize
from .plan import INDEX_TYPES, CheckpointingSsuParams
from .schedule import SmallFlag

MOST_HEADS = 1 << 15  # that `group_of` of cuda/small.cuh divides

# The axes of each array whose strides the kernel takes.
AXES = {
    **dict.fromkeys(("C", "B"), ("batch", "token", "group")),
    **dict.fromkeys(("x", "dt", "z", "out"), ("batch", "token", "head")),
    **dict.fromkeys(("state", "state_scale"), ("slot", "head")),
    **dict.fromkeys(("x_cache", "dt_cache"), ("slot", "head", "row")),
    "B_cache": ("slot", "group", "row"),
    **dict.fromkeys(
        ("slots", "ring_start", "prev_num_accepted_tokens", "A", "D", "dt_bias"), ("",)
    ),
}


def fill_small(record: CheckpointingSsuParams, v: dict[str, View | None]) -> str | None:
    """Fills in what the small form takes.

    Returns what keeps that form from running, if anything does: its strides have 32 bits.
    """
    limit = None
    if record.nheads > MOST_HEADS:
        limit = f"x: expected at most {MOST_HEADS} heads, got {record.nheads}"
    for name, axes in AXES.items():
        array = v.get(name)
        if array is None:
            continue
        for index, axis in enumerate(axes):
            there = array.shape[index] > 1  # else the stride may be any number
            stride = itemsize(array.dtype) * array.strides[index] if there else 0
            if not 0 <= stride < 1 << 32:
                limit = f"{array.name}: expected strides from 0 to below 4 GiB, got {stride} bytes"
            for field in fields_of_axis(name, axis, packed=v.get("cu_seqlens") is not None):
                setattr(record, field, stride)
    out = v["out"]
    assert out is not None
    record.out_item_bytes = itemsize(out.dtype)
    pad = record.pad_slot_id
    record.pad_slot = pad if 0 <= pad < record.num_slots else -1
    record.flags = _flags(record, v)
    return limit


def fields_of_axis(name: str, axis: str, *, packed: bool) -> list[str]:
    """Of the record. Sequences of a packed batch begin some tokens behind one another."""
    if axis == "batch":
        return [] if packed else [f"{name}_sequence_bytes"]
    if axis == "token" and packed:
        return [f"{name}_token_bytes", f"{name}_sequence_bytes"]
    return [f"{name}_{axis}_bytes" if axis else f"{name}_bytes"]


def _flags(record: CheckpointingSsuParams, v: dict[str, View | None]) -> int:
    out = v["out"]
    assert out is not None
    flags = {
        SmallFlag.HAS_SLOTS: v["slots"] is not None,
        SmallFlag.SLOTS_INT64: record.slots_type == INDEX_TYPES["int64"],
        SmallFlag.STARTS_EARLY: record.starts_early,
        SmallFlag.PACKED: v.get("cu_seqlens") is not None,
        SmallFlag.GATED: v["z"] is not None,
        SmallFlag.WIDE_OUT: out.dtype == "float32",
        SmallFlag.SOFTPLUS: record.dt_softplus,
        SmallFlag.FORCED_FLUSHES: v.get("force_flush") is not None,
    }
    found = sum(int(flag) for flag, there in flags.items() if there)
    for i, name in enumerate(("dt", "dt_bias", "A", "D")):
        if (array := v[name]) is not None:
            wide = array.dtype == "float32"
            found |= (SmallFlag.WIDE_DT if wide else SmallFlag.NARROW_DT) << i
            found |= SmallFlag.HALF_SCALARS if array.dtype == "float16" else 0
    return found
