"""Times the kernels on a GPU against the fewest bytes they must move.

    python benchmarks/bench.py decode [--dtypes float32,bfloat16,float16,int8,float8_e4m3fn]
                                      [--tokens 1,4]
                                      [--batches 1,2,4,8,16,32,64,128,256] [--csv FILE]
    python benchmarks/bench.py host

``decode``: one layer step of the replay kernel and of the plain update (the same tokens in one
call), in microseconds: the median of CUDA-graph replays over many layers, whose caches together
are well past the L2. Every slot stands elsewhere in its flush cycle, so the share of flushing
rows is the steady one. Per cent are the fewest bytes, at the read rate measured in the same run,
over the time.

``host``: the host time of one eager ``LayerStack.step``, and the first call of a configuration in
fresh processes, without and with the disk cache.

One layer is 64 heads in 8 groups, 64 x 128, W = 16, bfloat16 activations, D, dt_bias and softplus.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

NHEADS, NGROUPS, HEAD_DIM, DSTATE, WINDOW = 64, 8, 64, 128, 16
ACTIVATION = "bfloat16"
BYTES_OF_CACHES = 400 << 20  # at least this much state, several times the L2
MOST_LAYERS = 128
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED = ("int8", "float8_e4m3fn")  # with an fp32 scale for each row
REPEATS = 21

READ = r"""
extern "C" __global__ void read_all(const uint4* p, long long n, unsigned* sink) {
  unsigned sum = 0;
  const long long tile = 128 * 16, tiles = n / tile;
  for (long long i = blockIdx.x; i < tiles; i += gridDim.x) {
    uint4 v[16];
    #pragma unroll
    for (int u = 0; u < 16; ++u) v[u] = p[i * tile + u * 128 + threadIdx.x];
    #pragma unroll
    for (int u = 0; u < 16; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}
"""


@dataclass
class Row:
    """One line of the table."""

    state: str
    tokens: int
    batch: int
    replay_us: float
    plain_us: float
    floor_us: float
    percent: float
    bytes_moved: int
    flush_share: float
    layers: int


def graph_time(launches: list, repeats: int = REPEATS) -> float:
    """Median microseconds of one launch, all of them in one CUDA graph."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for launch in launches[:2]:
            launch()
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        times = []
        for _ in range(repeats):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1000)
    return float(np.median(times[1:])) / len(launches)


def read_ceiling() -> float:
    """Bytes per microsecond that plain 16-byte loads reach over 2 GiB."""
    import cupy

    data = cupy.zeros(2 << 30, np.uint8)
    sink = cupy.zeros(1, np.uint32)
    kernel = cupy.RawKernel(READ, "read_all")
    blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    arguments = (data, np.int64(data.size // 16), sink)
    return data.size / graph_time([lambda: kernel((blocks,), (128,), arguments)] * 2)


def steady_cursors(slots: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Live rows of slots that took 200 to 400 steps, each accepted token by token at 0.7."""
    prev = np.zeros(slots, np.int32)
    for step in range(400):
        accepted = 1 + (np.cumprod(rng.random((slots, tokens - 1)) < 0.7, axis=1)).sum(1)
        stays = step < rng.integers(0, 200, slots)
        flushed = prev + tokens > WINDOW
        prev = np.where(stays, prev, np.where(flushed, accepted, prev + accepted))
    return prev.astype(np.int32)


def fewest_bytes(dtype: str, tokens: int, prev: np.ndarray) -> int:
    """What one layer step must read and write, everything once."""
    flushes = int((prev + tokens > WINDOW).sum())
    state = NHEADS * HEAD_DIM * (DSTATE * STATE_BYTES[dtype] + (4 if dtype in SCALED else 0))
    row = 2 * NHEADS * HEAD_DIM + 2 * NGROUPS * DSTATE + 4 * NHEADS  # of the rings: x, B, dt
    token = 2 * NHEADS * HEAD_DIM + 4 * NGROUPS * DSTATE + 4 * NHEADS  # x, B, C, dt
    out = 2 * NHEADS * HEAD_DIM
    steps = len(prev)
    return (steps + flushes) * state + int(prev.sum()) * row + steps * tokens * (token + out + row)


def decode_row(dtype: str, tokens: int, batch: int, ceiling: float) -> Row:
    """Times one configuration, replay and plain interleaved by their graphs."""
    import cupy
    import ml_dtypes

    import replayssm_cupy as ssm

    rng = np.random.default_rng(batch * 31 + tokens)
    layer_bytes = batch * NHEADS * HEAD_DIM * DSTATE * STATE_BYTES[dtype]
    layers = min(MOST_LAYERS, max(3, -(-BYTES_OF_CACHES // layer_bytes)))
    stack = ssm.LayerStack(
        layers, batch, NHEADS, HEAD_DIM, NGROUPS, DSTATE,
        max_window=WINDOW, npredicted=tokens, state_dtype=dtype, device="cuda",
    )  # fmt: skip

    def random(*shape: int) -> cupy.ndarray:
        return cupy.asarray(rng.standard_normal(shape).astype(np.float32))

    def activations(*shape: int) -> cupy.ndarray:
        return random(*shape).astype(ml_dtypes.bfloat16)

    for layer in range(layers):
        stack.x_caches[layer][...] = activations(*stack.x_caches[layer].shape[1:])
        stack.B_caches[layer][...] = activations(*stack.B_caches[layer].shape[1:])
        stack.dt_caches[layer][...] = 0.05
        shape = stack.states[layer].shape
        stack.load_state(layer, None, cupy.broadcast_to(random(*shape[1:]), shape))
    prev = steady_cursors(batch, tokens, rng)
    stack.prev_num_accepted_tokens[...] = cupy.asarray(prev)
    stack.ring_start[...] = cupy.asarray(
        rng.integers(0, stack.ring_buffer_len, batch).astype(np.int32)
    )
    inputs = {
        "x": activations(batch, tokens, NHEADS, HEAD_DIM),
        "dt": random(batch, tokens, NHEADS),
        "A": -cupy.exp(random(NHEADS)),
        "B": activations(batch, tokens, NGROUPS, DSTATE),
        "C": activations(batch, tokens, NGROUPS, DSTATE),
        "D": random(NHEADS),
        "dt_bias": random(NHEADS) - 3,
        "dt_softplus": True,
    }
    out = activations(batch, tokens, NHEADS, HEAD_DIM)
    slots = cupy.asarray(rng.permutation(batch).astype(np.int32))
    replay = [
        lambda layer=layer: stack.step(layer, **inputs, slots=slots, out=out)
        for layer in range(layers)
    ]
    plain = [
        lambda layer=layer: ssm.selective_state_update(
            stack.states[layer],
            **inputs,
            state_batch_indices=slots,
            out=out,
            state_scale=stack.state_scales[layer] if stack.state_scales else None,
        )
        for layer in range(layers)
    ]
    times = [(graph_time(replay, 11), graph_time(plain, 11)) for _ in range(3)]
    replay_us, plain_us = (float(np.median(column)) for column in zip(*times, strict=True))
    moved = fewest_bytes(dtype, tokens, prev)
    floor = moved / ceiling
    share = float((prev + tokens > WINDOW).mean())
    return Row(
        dtype, tokens, batch, round(replay_us, 2), round(plain_us, 2), round(floor, 2),
        round(100 * floor / replay_us, 1), moved, round(share, 3), layers,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    import cupy

    import replayssm_cupy

    commit = os.environ.get("REPLAYSSM_COMMIT", "")
    if not commit:
        run = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = run.stdout.strip() or "unknown"
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.split("\n")[0]  # fmt: skip
    return {
        "gpu": properties["name"].decode(),
        "driver": driver,
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "replayssm_cupy": replayssm_cupy.__version__,
        "commit": commit,
    }


def decode(args: argparse.Namespace) -> None:
    machine = environment()
    ceiling = read_ceiling()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"read ceiling {ceiling / 1e6:.2f} TB/s\n")
    print("| state | T | batch | replay us | plain us | floor us | floor / replay |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for dtype in args.dtypes.split(","):
        for tokens in map(int, args.tokens.split(",")):
            for batch in map(int, args.batches.split(",")):
                row = decode_row(dtype, tokens, batch, ceiling)
                rows.append({**asdict(row), "read_tb_s": round(ceiling / 1e6, 3), **machine})
                print(
                    f"| {row.state} | {row.tokens} | {row.batch} | {row.replay_us:.1f} "
                    f"| {row.plain_us:.1f} | {row.floor_us:.1f} | {row.percent:.0f} % |",
                    flush=True,
                )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


FIRST_CALL = """
import time, sys
import cupy
cupy.zeros(1).sum()  # the context and CuPy's own start are not ours
sys.path.insert(0, {root!r})
start = time.perf_counter()
import replayssm_cupy as ssm
imported = time.perf_counter()
stack = ssm.LayerStack(1, 4, 64, 64, 8, 128, device="cuda")
bf16 = stack.x_caches[0].dtype
x, B = cupy.zeros((4, 1, 64, 64), bf16), cupy.zeros((4, 1, 8, 128), bf16)
dt, A = cupy.zeros((4, 1, 64), "f4"), -cupy.ones(64, "f4")
cupy.cuda.Device().synchronize()
ready = time.perf_counter()
stack.step(0, x, dt, A, B, B)
cupy.cuda.Device().synchronize()
done = time.perf_counter()
print(imported - start, done - ready)
"""


def first_call() -> None:
    """Seconds of the first step in a fresh process, with an empty and a filled disk cache."""
    root = str(pathlib.Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "from the disk cache", "from the disk cache"):
            run = subprocess.run(
                [sys.executable, "-c", FIRST_CALL.format(root=root)],
                env={**os.environ, "CUPY_CACHE_DIR": cache},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            imported, called = map(float, run.stdout.split()[-2:])
            print(f"first call, {name}: {called:.3f} s (import {imported:.3f} s)")


def host(_: argparse.Namespace) -> None:
    """Host time of an eager step, torch and CuPy tensors, and the first call."""
    first_call()
    import torch

    import replayssm_cupy as ssm

    batch = 8
    bf16, f32 = torch.bfloat16, torch.float32
    make = {"device": "cuda"}
    stack = ssm.LayerStack.from_arrays(
        [torch.zeros(batch, NHEADS, HEAD_DIM, DSTATE, dtype=f32, **make)],
        [torch.zeros(batch, NHEADS, WINDOW + 1, HEAD_DIM, dtype=bf16, **make)],
        [torch.zeros(batch, NGROUPS, WINDOW + 1, DSTATE, dtype=bf16, **make)],
        [torch.zeros(batch, NHEADS, WINDOW + 1, dtype=f32, **make)],
        torch.zeros(batch, dtype=torch.int32, **make),
        torch.zeros(batch, dtype=torch.int32, **make),
        npredicted=1,
    )
    x = torch.randn(batch, 1, NHEADS, HEAD_DIM, dtype=bf16, **make)
    B = torch.randn(batch, 1, NGROUPS, DSTATE, dtype=bf16, **make)
    dt = torch.randn(batch, 1, NHEADS, dtype=f32, **make)
    A, D = -torch.rand(NHEADS, **make), torch.rand(NHEADS, **make)
    slots = torch.arange(batch, dtype=torch.int32, **make)
    out = torch.empty_like(x)

    def step() -> None:
        stack.step(0, x, dt, A, B, B, D=D, z=x, dt_bias=D, slots=slots, out=out)

    for name, call in (("step", step), ("advance", lambda: stack.advance(slots, slots))):
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) * 1e4)
            torch.cuda.synchronize()
        print(f"host time of one eager stack.{name} with torch tensors: {np.median(times):.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    table = commands.add_parser("decode")
    table.add_argument("--dtypes", default="float32,bfloat16")
    table.add_argument("--tokens", default="1,4")
    table.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    table.add_argument("--csv")
    table.set_defaults(run=decode)
    commands.add_parser("host").set_defaults(run=host)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
