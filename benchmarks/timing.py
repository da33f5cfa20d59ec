"""Times of CUDA graphs, the two ceilings of the memory, and what machine it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from workload import Traffic

REPEATS = 21
BLOCKS = 8  # of 128 threads on a multiprocessor, all resident

CEILINGS = r"""
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

// Reads n vectors and writes the first `written` of them back, which the L2 is asked to keep. All
// blocks of the grid are resident, so that they do so first.
extern "C" __global__ void __launch_bounds__(128, 8)
    flush_first(uint4* p, long long n, long long written, unsigned* sink) {
  unsigned sum = 0;
  unsigned long long keep;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  const long long tile = 128 * 8, tiles = (n + tile - 1) / tile;
  for (long long i = blockIdx.x; i < tiles; i += gridDim.x) {
    uint4 v[8];
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      const long long at = i * tile + u * 128 + threadIdx.x;
      v[u] = at < n ? p[at] : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int u = 0; u < 8; ++u) {
      const long long at = i * tile + u * 128 + threadIdx.x;
      if (at < written) {
        asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p + at),
                     "r"(v[u].x), "r"(v[u].y), "r"(v[u].z), "r"(v[u].w), "l"(keep)
                     : "memory");
      } else {
        sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
      }
    }
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}
"""


class Replay:
    """A CUDA graph of launches of CuPy's or this library's, and its time."""

    def __init__(self, launches: Sequence[Callable[[], Any]]) -> None:
        import cupy

        self.number = len(launches)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with self.stream:
            for launch in launches[:2]:
                launch()
            self.stream.synchronize()
            self.stream.begin_capture()
            for launch in launches:
                launch()
            self.graph = self.stream.end_capture()

    def time(self, repeats: int = REPEATS) -> float:
        """Median microseconds of one launch; the first replay warms up."""
        import cupy

        times = []
        with self.stream:
            for _ in range(repeats):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self.stream)
                self.graph.launch(self.stream)
                end.record(self.stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, end) * 1000)
        return float(np.median(times[1:])) / self.number


class TorchReplay:
    """The same for launches that go to torch's stream and may allocate."""

    def __init__(self, launches: Sequence[Callable[[], Any]]) -> None:
        import torch

        self.number = len(launches)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for launch in launches[:2]:
                launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for launch in launches:
                launch()

    def time(self, repeats: int = REPEATS) -> float:
        import torch

        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000)
        return float(np.median(times[1:])) / self.number


def _kernel(name: str) -> Any:
    import cupy

    return cupy.RawKernel(CEILINGS, name)


def read_ceiling() -> float:
    """Bytes per microsecond that plain 16-byte loads reach over 2 GiB."""
    import cupy

    data, sink = cupy.zeros(2 << 30, np.uint8), cupy.zeros(1, np.uint32)
    kernel, blocks = _kernel("read_all"), BLOCKS * _multiprocessors()
    arguments = (data, np.int64(data.size // 16), sink)
    return data.size / Replay([lambda: kernel((blocks,), (128,), arguments)] * 2).time()


def flush_first_time(bytes_: Traffic, layers: int) -> float:
    """Microseconds of a kernel that only moves the bytes of a step, those it writes first."""
    import cupy

    vectors, written = -(-bytes_.read // 16), -(-bytes_.written // 16)
    vectors = max(vectors, written)
    data, sink = cupy.zeros((layers, vectors, 4), np.uint32), cupy.zeros(1, np.uint32)
    kernel = _kernel("flush_first")
    blocks = min(BLOCKS * _multiprocessors(), -(-vectors // (128 * 8)))

    def launch(layer: int) -> Callable[[], Any]:
        arguments = (data[layer], np.int64(vectors), np.int64(written), sink)
        return lambda: kernel((blocks,), (128,), arguments)

    return Replay([launch(layer) for layer in range(layers)]).time()


def _multiprocessors() -> int:
    import cupy

    return int(cupy.cuda.Device().attributes["MultiProcessorCount"])


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
