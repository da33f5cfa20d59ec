"""How a decode step is spread over a GPU: blocks, warps, shared memory, heads at a time."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Device, itemsize
from .compiler import import_cupy
from .keys import SCALED_DTYPES, CheckpointingSsuKey

SLAB = 16  # rows p of a head in one tile of state
STAGES = 2  # of slabs, on their way or in use
MOST_HEADS = 8  # of an item
MOST_WARPS = 8  # of a block
LIST_BYTES = 8576  # `RequestList` of cuda/requests.cuh
FORCE_WARPS = FORCE_HEADS = FORCE_PARTS = 0
FORCE_SMALL = None


@dataclass(frozen=True, slots=True)
class Processor:
    """What a launch may take: multiprocessors, and bytes of shared memory a block."""

    count: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Blocks and their warps, heads of an item, and the shared memory of a warp."""

    blocks: int
    warps: int
    heads_of_item: int
    items_of_group: int
    bytes_of_warp: int

    @property
    def shared_bytes(self) -> int:
        return LIST_BYTES + self.warps * self.bytes_of_warp


def processor(device: Device) -> Processor:
    """Of the GPU; a few small ones for kernels that run on the CPU."""
    if device.kind != "cuda":
        return Processor(3, 227 << 10)
    found = _processors.get(device.index)
    if found is None:
        attributes = import_cupy().cuda.Device(device.index).attributes
        found = _processors[device.index] = Processor(
            attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"]
        )
    return found


_processors: dict[int, Processor] = {}


@dataclass(frozen=True, slots=True)
class SmallSchedule:
    """Blocks of a head, slabs of a block, and bytes of shared memory a block."""

    parts: int
    slabs: int
    shared_bytes: int


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def bytes_of_warp(
    key: CheckpointingSsuKey, head_dim: int, tokens: int, old_rows: int, gated: bool, heads: int
) -> int:
    """Shared memory of a warp, as `Worker` of cuda/checkpointing_ssu.cu lays it out."""
    size = itemsize(key.state_dtype)
    row = key.dstate * size
    slabs = 2 if row <= 256 else 1
    pitch = key.dstate * itemsize(key.activation_dtype) + 64
    x_pitch = head_dim * itemsize(key.activation_dtype) + 16
    state = STAGES * slabs * SLAB * row
    group = tokens * pitch + max((old_rows + tokens) * pitch, key.dstate * 32)
    head = 2 * (old_rows + (2 if gated else 1) * tokens) * x_pitch + tokens * (2 * x_pitch - 16)
    products = tokens * SLAB + _round_up(tokens, 4)
    weights = 2 * SLAB + _round_up(17 * tokens, 4) + SLAB + 4
    scaled = 2 * head_dim * 4 if key.state_dtype in SCALED_DTYPES else 0
    return _round_up(state + group + head + 4 * (products + heads * weights) + scaled, 128)


def schedule(
    key: CheckpointingSsuKey,
    batch: int,
    nheads: int,
    heads_per_group: int,
    head_dim: int,
    tokens: int,
    old_rows: int,
    gated: bool,
    device: Processor,
) -> Schedule:
    """One block per multiprocessor with as many warps as its shared memory feeds."""
    heads_of_warp = batch * nheads / (device.count * MOST_WARPS)
    most = 4 if heads_of_warp >= 12 else 2 if heads_of_warp >= 4 else 1
    if key.state_dtype == "float32":
        most = 1
    most = FORCE_HEADS or most
    items = -(-heads_per_group // most)
    heads = -(-heads_per_group // items)
    size = bytes_of_warp(key, head_dim, tokens, old_rows, gated, heads)
    warps = max(1, min(FORCE_WARPS or MOST_WARPS, (device.shared_bytes - LIST_BYTES) // size))
    blocks = max(1, min(device.count, batch * nheads // heads_per_group * items))
    return Schedule(blocks, warps, heads, items, size)


def small_schedule(
    key: CheckpointingSsuKey,
    batch: int,
    nheads: int,
    head_dim: int,
    tokens: int,
    ring_rows: int,
    gated: bool,
    device: Processor,
) -> SmallSchedule | None:
    """Parts of a head while multiprocessors are left over; None if a block would not fit."""
    size = itemsize(key.state_dtype)
    pitch = key.dstate * itemsize(key.activation_dtype) + 64
    x_pitch = head_dim * itemsize(key.activation_dtype) + 16
    rows = tokens * pitch + max((ring_rows + tokens) * pitch, key.dstate * 32)
    rows += (ring_rows + (2 if gated else 1) * tokens) * x_pitch + tokens * (2 * x_pitch - 16)
    words = tokens * SLAB + _round_up(tokens, 4) + _round_up(ring_rows + tokens, 4)
    words += _round_up(17 * tokens, 4) + SLAB + 4
    all_slabs = head_dim // SLAB
    slabs = all_slabs
    while slabs > 1 and FORCE_PARTS == 0 and (
        batch * nheads * -(-all_slabs // slabs) * 2 <= device.count
        or rows + 4 * words + slabs * SLAB * (key.dstate * size + 4) > device.shared_bytes
    ):
        slabs = -(-slabs // 2)
    if FORCE_PARTS:
        slabs = -(-all_slabs // FORCE_PARTS)
    shared = _round_up(rows + 4 * words + slabs * SLAB * (key.dstate * size + 4), 128)
    if shared > device.shared_bytes:
        return None
    return SmallSchedule(-(-all_slabs // slabs), slabs, shared)


def prefers_small(key: CheckpointingSsuKey, heads: int, tokens: int, device: Processor) -> bool:
    """Whether latency counts more than traffic: up to eight heads a multiprocessor."""
    if FORCE_SMALL is not None:
        return FORCE_SMALL
    return heads <= 8 * device.count
