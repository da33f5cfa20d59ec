"""How a decode step is spread over a GPU: blocks, warps, shared memory, heads at a time."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Device, itemsize
from .compiler import import_cupy
from .keys import SCALED_DTYPES, CheckpointingSsuKey

SLAB = 16  # rows p of a head in one tile of state
STAGES = 2  # of slabs, on their way or in use
LIST_BYTES = 8448  # `Shared` of cuda/checkpointing_ssu.cu
FORCE_WARPS = 0
FORCE_HEADS = 0


@dataclass(frozen=True, slots=True)
class Processor:
    """What a launch may take: multiprocessors, and bytes of shared memory a block."""

    count: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Blocks, warps of a block, heads that a warp takes at once, and bytes of shared memory."""

    blocks: int
    warps: int
    heads_of_item: int
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


def bytes_of_warp(
    key: CheckpointingSsuKey, head_dim: int, tokens: int, old_rows: int, gated: bool
) -> int:
    """Shared memory of a warp: stages of state, two tiles of B and C, two of x and z, outputs."""
    size = itemsize(key.state_dtype)
    row = key.dstate * size
    slabs = 2 if row <= 128 else 1
    x_pitch = head_dim * itemsize(key.activation_dtype) + 16
    pitch = key.dstate * itemsize(key.activation_dtype) + 64
    state = STAGES * slabs * SLAB * row
    group = tokens * pitch + max((old_rows + tokens) * pitch, key.dstate * 32)
    head = 2 * (old_rows + (2 if gated else 1) * tokens) * x_pitch + tokens * (2 * x_pitch - 16)
    scales = 2 * head_dim * 4 if key.state_dtype in SCALED_DTYPES else 0
    return -(-(state + group + head + scales) // 128) * 128


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
    """Items of as many heads as leave every warp a few, one block per multiprocessor."""
    size = bytes_of_warp(key, head_dim, tokens, old_rows, gated)
    most = 8 if key.token_tiles > 1 or key.dstate > 128 or key.state_dtype in ("float32", *SCALED_DTYPES) else 12
    if FORCE_WARPS: most = min(most, FORCE_WARPS)
    warps = max(1, min(most, (device.shared_bytes - LIST_BYTES) // size))
    heads = 1
    while heads_per_group % (2 * heads) == 0 and (
        batch * nheads >= 12 * heads * device.count * warps
    ):
        heads *= 2
    if FORCE_HEADS: heads = FORCE_HEADS
    items = batch * nheads // heads
    return Schedule(max(1, min(device.count, items)), warps, heads, size)
