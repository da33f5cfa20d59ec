"""Times prefix snapshots on a GPU against a device-to-device copy.

    python benchmarks/snapshots.py [--dtypes bfloat16,float32,float8_e4m3fn]
                                   [--active 0,1,16] [--prefixes 8,0]

24 layers of 128 heads in 8 groups, 64 x 128, bfloat16 activations, a batch of 256 rows of which
some are active. Microseconds are the median of CUDA-graph replays. Bytes are those of the states
and scales, read and written, and of the ring rows, read; per cent are of the rate at which the
same run copies 2 GiB, read and written. That is the better of two ways: the driver's own copy,
which falls behind on some GPUs, and a kernel of 16-byte loads and stores. ``plan`` is the pair of
launches that a step adds when it crosses as many boundaries as rows are active.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

LAYERS, NHEADS, NGROUPS, HEAD_DIM, DSTATE, WINDOW = 24, 128, 8, 64, 128, 16
BATCH, BLOCK = 256, 64
# Both forms of a state that has a copy, block scales included.
STATE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16+fp8": 3,
    "float16+nvfp4": 2 + 9 / 16,
}
SCALED = ("int8", "float8_e4m3fn", "float16+fp8", "float16+nvfp4")
REPEATS, LAUNCHES = 11, 10  # replays of a graph, launches in it
COPY_THREADS, COPY_VECTORS = 256, 4
COPY = """
extern "C" __global__ void copy(const uint4* from, uint4* to) {
  const size_t first = size_t(blockIdx.x) * blockDim.x * VECTORS + threadIdx.x;
  uint4 v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) v[i] = from[first + i * blockDim.x];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) to[first + i * blockDim.x] = v[i];
}
"""


def graph_time(launch: Any, count: int) -> float:
    """Median microseconds of one launch, `count` of them in a CUDA graph."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(count):
            launch()
        graph = stream.end_capture()
        times = []
        for _ in range(REPEATS):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000)
    return float(np.median(times[1:])) / count


def copy_rates() -> dict[str, float]:
    """Bytes per microsecond of a device-to-device copy, read and written, in either way."""
    import cupy

    source = cupy.zeros(2 << 30, np.uint8)
    target = cupy.empty_like(source)
    kernel = cupy.RawKernel(COPY, "copy", options=(f"-DVECTORS={COPY_VECTORS}",))
    blocks = source.nbytes // (16 * COPY_VECTORS * COPY_THREADS)

    def by_driver() -> None:
        stream = cupy.cuda.get_current_stream()
        target.data.copy_from_device_async(source.data, source.nbytes, stream)

    def by_kernel() -> None:
        kernel((blocks,), (COPY_THREADS,), (source, target))

    ways = {"driver": by_driver, "kernel": by_kernel}
    return {name: 2 * source.nbytes / graph_time(copy, 2) for name, copy in ways.items()}


def bytes_moved(dtype: str, prefix: int) -> int:
    """Of one request in all layers."""
    scale = HEAD_DIM * 4 if dtype in SCALED else 0
    state = NHEADS * (int(HEAD_DIM * DSTATE * STATE_BYTES[dtype]) + scale)
    row = (NHEADS * HEAD_DIM + NGROUPS * DSTATE) * 2 + NHEADS * 4
    return LAYERS * (2 * state + prefix * row)


def measure(dtype: str, args: argparse.Namespace, rate: float) -> None:
    import cupy

    import replayssm_cupy as ssm
    from replayssm_cupy.prefix_tables import COPY_TABLES, TABLES

    most = max(max(args.active), 1)
    stack = ssm.LayerStack(
        LAYERS, 2 * most, NHEADS, HEAD_DIM, NGROUPS, DSTATE, max_window=WINDOW, state_dtype=dtype,
        device="cuda",
    )  # fmt: skip
    for ring in (*stack.x_caches, *stack.B_caches, *stack.dt_caches):
        ring[...] = 0
    stack.refresh([cupy.full(NHEADS, -1, np.float32) for _ in range(LAYERS)])
    stack.prev_num_accepted_tokens[...] = WINDOW
    tables = stack._whole_slots().tables
    rows = np.full(BATCH, -1, np.int32)
    slots, targets = rows.copy(), rows.copy()
    slots[:most], targets[:most] = np.arange(most), most + np.arange(most)
    src, dst = (cupy.asarray(np.tile(one, (LAYERS, 1))) for one in (slots, targets))
    start = cupy.zeros(BATCH, np.int32)
    sizes: dict[str, Any] = {
        "state_dtype": dtype, "input_dtype": "bfloat16", "matrixA_dtype": "float32",
        "dim": HEAD_DIM, "dstate": DSTATE, "num_heads": NHEADS,
        "heads_per_group": NHEADS // NGROUPS, "max_window": WINDOW,
        "ring_buffer_len": WINDOW + 1,
    }  # fmt: skip
    columns = dict(zip((*TABLES, *COPY_TABLES), map(cupy.asarray, tables.addresses), strict=True))
    copies = {name: columns.pop(name) for name in COPY_TABLES}
    if "+" in dtype:
        sizes |= copies
    for active in args.active:
        listed = rows.copy()
        listed[:active] = np.arange(active)
        requests = cupy.asarray(listed)
        for prefix in args.prefixes if active else args.prefixes[:1]:
            lengths = cupy.full(BATCH, prefix, np.int32)

            def launch(lengths: Any = lengths, requests: Any = requests) -> None:
                ssm.replayssm_materialize(
                    *columns.values(), src, dst, start, lengths, requests, **sizes
                )

            time = graph_time(launch, LAUNCHES)
            moved = active * bytes_moved(dtype, prefix)
            share = f"{moved / time / 1e6:5.2f} TB/s {100 * moved / time / rate:5.1f} %"
            print(f"{dtype:14} {active:3} active  prefix {prefix:2}  {time:8.1f} us  "
                  f"{share if active else ''}", flush=True)  # fmt: skip
        before = cupy.full(BATCH, 2 * BLOCK, np.int32)
        before[:active] = BLOCK - 1
        one, accepted = cupy.asarray(slots), cupy.full(BATCH, 2, np.int32)
        other = cupy.asarray(targets)

        def plan(before: Any = before, one: Any = one, other: Any = other,
                 accepted: Any = accepted) -> None:  # fmt: skip
            stack.materialize_blocks(one, other, before, accepted, block_size=BLOCK)

        print(f"{dtype:14} {active:3} active  plan       {graph_time(plan, LAUNCHES):8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    dtypes = "bfloat16,float32,float8_e4m3fn"
    parser.add_argument("--dtypes", default=dtypes, type=lambda t: t.split(","))
    for name, default in (("--active", "0,1,16"), ("--prefixes", "8,0")):
        parser.add_argument(name, default=default, type=lambda t: [int(n) for n in t.split(",")])
    args = parser.parse_args()
    rates = copy_rates()
    for way, rate in rates.items():
        print(f"copy by the {way} {rate / 1e6:.2f} TB/s, read and written")
    for dtype in args.dtypes:
        measure(dtype, args, max(rates.values()))


if __name__ == "__main__":
    main()
