"""The `kernels` command: what every instance needs of a multiprocessor, and how many fit on one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from .compiler import STOCHASTIC_CVT, TARGETS, Resources, by_source, compile_cubin
from .keys import (
    SLAB,
    CheckpointingSsuKey,
    Key,
    Layout,
    LayoutKey,
    PrecomputeKey,
    SelectiveStateUpdateKey,
    every_key,
)
from .schedule import typical

WARP = 32


class Multiprocessor(NamedTuple):
    """What one multiprocessor of a target has (CUDA programming guide, compute capabilities)."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    partitions: int = 4  # with a share of the registers each
    registers_unit: int = 256  # that registers of a warp come in
    shared_unit: int = 128
    reserved_bytes: int = 1024  # of shared memory, by the driver, in every block
    block_registers: int = 65536
    thread_registers: int = 255


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 << 10),
    "sm_86": Multiprocessor(48, 16, 100 << 10),
    "sm_89": Multiprocessor(48, 24, 100 << 10),
    "sm_90": Multiprocessor(64, 32, 228 << 10),
    "sm_100": Multiprocessor(64, 32, 228 << 10),
    "sm_103": Multiprocessor(64, 32, 228 << 10),
    "sm_120": Multiprocessor(48, 24, 100 << 10),
}


def resident_blocks(on: Multiprocessor, registers: int, threads: int, shared_bytes: int) -> int:
    """Blocks of a kernel that fit on one multiprocessor; 0 if it cannot be launched.

    `registers` are of a thread, `threads` and `shared_bytes` (static and dynamic) of a block.
    Equivalent to ``cudaOccupancyMaxActiveBlocksPerMultiprocessor``.
    """
    warps = -(-threads // WARP)
    of_warp = _round_up(registers * WARP, on.registers_unit)
    if registers > on.thread_registers or (
        of_warp * _round_up(warps, on.partitions) > on.block_registers
    ):
        return 0
    shared = _round_up(shared_bytes + on.reserved_bytes, on.shared_unit)
    of_partition = on.registers // on.partitions // of_warp if of_warp else on.warps
    return min(
        on.blocks,
        on.warps // warps,
        of_partition * on.partitions // warps,
        on.shared_bytes // shared,
    )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class Row:
    """One instance; what depends on its launch is None where that varies from call to call."""

    kernel: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int
    dynamic_shared_bytes: int | None = None
    threads: int | None = None
    resident_blocks: int | None = None
    resident_warps: int | None = None


def print_kernels(arch: str, as_json: bool = False, layout: str | None = None) -> int:
    """Compiles every instance for ``arch`` and prints what each needs. Needs NVRTC, no GPU.

    With a `layout`, the five numbers of :class:`Layout`, those of the decode kernels for it.
    """
    known = (*TARGETS, *(f"sm_{capability}a" for capability in STOCHASTIC_CVT))
    if arch not in known:
        raise ValueError(f"arch: expected one of {', '.join(known)}, got {arch}")
    keys: dict[str, Key] = {key.name_expression: key for key in every_key()}
    if layout is not None:
        sizes = _parse_layout(layout)
        decoding = [key for key in keys.values() if isinstance(key, CheckpointingSsuKey)]
        keys = {key.name_expression: LayoutKey(key, sizes) for key in decoding}
    found = [
        row for group in by_source(keys.values()).values() for row in compile_cubin(group, arch)[1]
    ]
    rows = [_row(resources, keys[resources.kernel], arch) for resources in found]
    rows.sort(key=lambda row: row.kernel)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    print(f"{'':56}            {'bytes of a block or thread':^39} {'on a multiprocessor':>30}")
    heads = ("registers", "static", "dynamic", "spilled", "stack", "threads", "blocks", "warps")
    print(f"{'kernel (' + arch + ')':56} " + " ".join(f"{head:>9}" for head in heads))
    for row in rows:
        cells = (
            row.registers, row.shared_bytes, row.dynamic_shared_bytes, row.spill_bytes,
            row.stack_bytes, row.threads, row.resident_blocks, row.resident_warps,
        )  # fmt: skip
        print(f"{row.kernel:56} " + " ".join(f"{_cell(cell):>9}" for cell in cells))
    return 0


def _parse_layout(text: str) -> Layout:
    names = [field.name for field in fields(Layout)]
    numbers = text.split(",")
    if len(numbers) != len(names) or not all(number.strip().isdigit() for number in numbers):
        raise ValueError(f"layout: expected {','.join(names)}, got {text}")
    return Layout(*map(int, numbers))


def _cell(number: int | None) -> str:
    return "-" if number is None else str(number)


def launch_shape(key: Key, on: Multiprocessor) -> tuple[int, int] | None:
    """Threads and dynamic shared memory of a decode kernel's block for heads of 64 rows."""
    key = key.key if isinstance(key, LayoutKey) else key
    if isinstance(key, CheckpointingSsuKey | PrecomputeKey):
        launch = typical(key, on.shared_bytes - on.reserved_bytes)
        return launch.threads, launch.shared_bytes
    if isinstance(key, SelectiveStateUpdateKey):
        return WARP * 64 // SLAB, 0
    return None


def _row(found: Resources, key: Key, arch: str) -> Row:
    on = MULTIPROCESSORS[arch.rstrip("a")]
    shape = launch_shape(key, on)
    if shape is None:
        return Row(**asdict(found))
    threads, dynamic = shape
    blocks = resident_blocks(on, found.registers, threads, found.shared_bytes + dynamic)
    return Row(
        **asdict(found),
        dynamic_shared_bytes=dynamic,
        threads=threads,
        resident_blocks=blocks,
        resident_warps=blocks * -(-threads // WARP),
    )
