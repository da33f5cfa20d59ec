"""How a decode step is spread over a GPU: blocks, warps, shared memory, heads at a time."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Device, itemsize
from .compiler import import_cupy
from .keys import SCALED_DTYPES, CheckpointingSsuKey

SLAB = 16  # rows p of a head in one tile of state
STAGES = 2  # of slabs, on their way or in use
SLOTS = 4  # of items
MOST_HEADS = 8  # of an item
MOST_WARPS = 12  # of a block
LIST_BYTES = 8576  # `Shared` of cuda/checkpointing_ssu.cu
FORCE_WARPS = FORCE_PRODUCERS = 0


@dataclass(frozen=True, slots=True)
class Processor:
    """What a launch may take: multiprocessors, and bytes of shared memory a block."""

    count: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Blocks and their warps; heads of an item; shared memory of an item and of a consumer."""

    blocks: int
    warps: int
    producers: int
    heads_of_item: int
    items_of_group: int
    bytes_of_slot: int
    bytes_of_warp: int

    @property
    def shared_bytes(self) -> int:
        consumers = self.warps - self.producers
        return LIST_BYTES + SLOTS * self.bytes_of_slot + consumers * self.bytes_of_warp


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


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def bytes_of_slot(key: CheckpointingSsuKey, tokens: int, old_rows: int, heads: int) -> int:
    """Shared memory of an item: C and B of its group, their products, dt and weights of its heads."""
    pitch = key.dstate * itemsize(key.activation_dtype) + 64
    rows = tokens * pitch + max((old_rows + tokens) * pitch, key.dstate * 32)
    products = tokens * SLAB + _round_up(tokens, 4)
    weights = 2 * SLAB + _round_up(17 * tokens, 4) + SLAB + 4
    return _round_up(rows + 4 * (products + heads * weights), 128)


def bytes_of_warp(
    key: CheckpointingSsuKey, head_dim: int, tokens: int, old_rows: int, gated: bool
) -> int:
    """Shared memory of a consumer: stages of state, two tiles of x and z, outputs, scales."""
    size = itemsize(key.state_dtype)
    row = key.dstate * size
    slabs = 2 if row <= 256 else 1
    x_pitch = head_dim * itemsize(key.activation_dtype) + 16
    state = STAGES * slabs * SLAB * row
    head = 2 * (old_rows + (2 if gated else 1) * tokens) * x_pitch + tokens * (2 * x_pitch - 16)
    scaled = 2 * head_dim * 4 + 64 * key.dstate if key.state_dtype in SCALED_DTYPES else 0
    return _round_up(state + head + scaled, 128)


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
    items = -(-heads_per_group // MOST_HEADS)
    heads = -(-heads_per_group // items)
    slot = bytes_of_slot(key, tokens, old_rows, heads)
    warp = bytes_of_warp(key, head_dim, tokens, old_rows, gated)
    producers = FORCE_PRODUCERS or 4
    most = FORCE_WARPS or MOST_WARPS
    room = device.shared_bytes - LIST_BYTES - SLOTS * slot
    consumers = max(1, min(most - producers, room // warp))
    blocks = max(1, min(device.count, batch * nheads // heads_per_group * items))
    return Schedule(blocks, producers + consumers, producers, heads, items, slot, warp)
