"""Programmatic dependent launches: a step that starts early reads nothing early.

The kernel ahead lets its successor start at once, spins, and only then writes what the step reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import choose_form

import replayssm_cupy as ssm
from replayssm_cupy import driver, plan

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = pytest.mark.gpu

BF16 = np.dtype(ml_dtypes.bfloat16)
S, BATCH, T, H, G, P, N, W = 6, 3, 2, 4, 2, 64, 128, 6
STEPS, SOURCES = 1000, 16  # contents that are written in turn
SPIN = 20_000  # clock cycles, some 10 us: longer than a step

KERNELS = r"""
struct Copy {
  const unsigned* source;
  unsigned* target;
  long long words;
};

__device__ void copy(Copy c) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (long long i = first; i < c.words; i += step) c.target[i] = c.source[i];
}

// Lets the next kernel start, then takes its time, then writes.
extern "C" __global__ void late_copy(const unsigned* source, unsigned* target, long long words,
                                     long long cycles) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
  copy({source, target, words});
}

// What a step must not do.
extern "C" __global__ void early_copy(Copy c) { copy(c); }

extern "C" __global__ void waiting_copy(Copy c) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  copy(c);
}
"""


@pytest.fixture(scope="module")
def kernels() -> Any:
    """Compiled by CuPy for the current device."""
    capability = int(cupy.cuda.Device().compute_capability)
    if capability < plan.PDL_CAPABILITY:
        pytest.skip(f"dependent launches need compute capability 9.0, this GPU has {capability}")
    return cupy.RawModule(code=KERNELS)


def words(array: Any) -> Any:
    """The memory of a packed array."""
    return array.view(np.uint8).reshape(-1).view(np.uint32)


def contents(rng: np.random.Generator, name: str, array: Any, number: int = 0) -> np.ndarray:
    """Legal values for an array; others for each number."""
    if name == "slots":
        return np.roll(np.arange(S, dtype=np.int32), number)[: len(array)]
    if name == "rand_seed":
        return np.array([number], np.int64)
    if name == "ring_start":
        return rng.integers(0, W + T, S).astype(np.int32)
    if name == "prev_num_accepted_tokens":
        return rng.integers(0, W + 1, S).astype(np.int32)
    if array.dtype == np.int8:
        return rng.integers(-99, 100, array.shape).astype(np.int8)
    values = rng.standard_normal(array.shape).astype(np.float32)
    if name in ("A", "dt_cache", "state_scale"):
        values = np.abs(values) * (-1 if name == "A" else 1)
    return values.astype(array.dtype)


def write(array: Any, values: np.ndarray) -> None:
    words(array)[...] = cupy.asarray(words_of(values))


def words_of(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint32)


class Loop:
    """A stack of two layers, its inputs, and a producer of one of the arrays that a step reads."""

    def __init__(
        self, kernels: Any, written: str, state_dtype: str, options: dict[str, Any]
    ) -> None:
        self._late_copy = kernels.get_function("late_copy")
        self._options = {**options, **ssm.allocate_scratch(BATCH, H, device="cuda")}
        rng, rounds = np.random.default_rng(11), state_dtype != "float32"
        self.stack = stack = ssm.LayerStack(
            2, S, H, P, G, N, max_window=W, npredicted=T, state_dtype=state_dtype, device="cuda",
            stochastic_rounding=rounds,
        )  # fmt: skip
        tokens, groups = (BATCH, T, H, P), (BATCH, T, G, N)
        self.given = {
            **{name: cupy.zeros(tokens, BF16) for name in ("x", "z")},
            **{name: cupy.zeros(groups, BF16) for name in ("B", "C")},
            **{name: cupy.zeros(H, np.float32) for name in ("A", "D", "dt_bias")},
            "dt": cupy.zeros(tokens[:3], np.float32),
            "slots": cupy.asarray(np.array([4, 0, 2], np.int32)),
        }
        self.middle, self.outs = cupy.zeros(tokens, BF16), cupy.zeros((STEPS, *tokens), BF16)
        for layer in (0, 1):
            self.step(layer, self.given["x"], self.outs[0])  # compiles and loads
        self.layers = [
            {
                **{"state": stack.states[i], "x_cache": stack.x_caches[i]},
                **{"B_cache": stack.B_caches[i], "dt_cache": stack.dt_caches[i]},
                **({"state_scale": stack.state_scales[i]} if rounds else {}),
            }
            for i in (0, 1)
        ]
        for arrays in (self.given, *self.layers):
            for name, array in arrays.items():
                write(array, contents(rng, name, array, 4))
        # Some slots fold their rows at every step and some do not.
        write(stack.prev_num_accepted_tokens, np.array([1, 4, 3, 5, 6, 0], np.int32))
        own = {
            "ring_start": stack.ring_start,
            "prev_num_accepted_tokens": stack.prev_num_accepted_tokens,
            "rand_seed": stack.rand_seed,
        }
        target = (self.given | self.layers[0] | own)[written]
        made = [contents(rng, written, target, number) for number in range(SOURCES)]
        self._target, self._sources = words(target), cupy.asarray(np.stack([*map(words_of, made)]))
        x = self.given["x"]
        self.inputs = [cupy.asarray(contents(rng, "x", x)) for _ in range(SOURCES - 1)]
        if written == "x":
            self.inputs = [x]
        self.produce(0, 0)  # loads

    def produce(self, number: int, cycles: int) -> None:
        """Writes other values than the time before, `cycles` after the next kernel may start."""
        source = self._sources[number % SOURCES]
        self._late_copy(
            (8,), (256,), (source, self._target, np.int64(source.size), np.int64(cycles))
        )

    def x(self, number: int) -> Any:
        """Another array each time, unless the producer fills it."""
        return self.inputs[number % len(self.inputs)]

    def step(self, layer: int, x: Any, out: Any) -> None:
        self.stack.step(layer, **(self.given | {"x": x}), out=out, **self._options)

    def results(self) -> dict[str, np.ndarray]:
        named = {
            f"{name} {i}": layer[name] for i, layer in enumerate(self.layers) for name in layer
        }
        return {name: cupy.asnumpy(words(a)) for name, a in {"out": self.outs, **named}.items()}


def both(
    kernels: Any, algorithm: str, written: str, state_dtype: str, work: Callable[[Loop, int], None]
) -> None:
    """The same work by one kernel, and by dependent launches behind a producer that spins."""
    results = []
    for pdl in (False, True):
        options = {"enable_pdl": pdl, "algorithm": algorithm if pdl else "monolith"}
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            loop = Loop(kernels, written, state_dtype, options)
            stream.synchronize()
            work(loop, SPIN if pdl else 0)
            stream.synchronize()
            results.append(loop.results())
    plain, dependent = results
    outs = plain["out"].view(BF16).astype(np.float32).reshape(STEPS, -1)
    assert np.isfinite(outs).all()
    assert (outs[:-1] != outs[1:]).any(1).all(), "an output that is left from before shows"
    for name in plain:
        assert np.array_equal(plain[name], dependent[name]), name


@pytest.fixture(params=["stream", "small", "two-kernel"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of one kernel, and two."""
    choose_form(monkeypatch, "small" if request.param == "small" else "stream")
    return "two-kernel" if request.param == "two-kernel" else "monolith"


class Copy(ctypes.Structure):
    _fields_ = [
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("words", ctypes.c_int64),
    ]


def test_the_kernel_ahead_lets_the_next_one_start(kernels):
    """The producer is a trap: who does not wait behind it finds what was there before."""
    late_copy, seen = kernels.get_function("late_copy"), {}
    source = cupy.arange(1, 257, dtype=np.uint32)
    stream = cupy.cuda.Stream(non_blocking=True)
    for name in ("early_copy", "waiting_copy"):
        handle = kernels.get_function(name).kernel.ptr
        target, copies = cupy.zeros(256, np.uint32), cupy.zeros((20, 256), np.uint32)
        cupy.cuda.Device().synchronize()
        with stream:
            for copy in copies:
                target.fill(0)
                late_copy((8,), (256,), (source, target, np.int64(256), np.int64(20 * SPIN)))
                record = Copy(target.data.ptr, copy.data.ptr, 256)
                driver.dependent_launch(handle, (1, 1, 1), (256, 1, 1), 0, record)(stream.ptr)
                stream.synchronize()
        seen[name] = cupy.asnumpy(copies)
    assert (seen["waiting_copy"] == np.arange(1, 257)).all()
    if not (seen["early_copy"] == 0).any():
        pytest.skip("no kernel was started early here")


GIVEN = ("x", "z", "B", "C", "A", "D", "dt_bias", "dt", "slots")
OWN = ("ring_start", "prev_num_accepted_tokens", "state", "x_cache", "B_cache", "dt_cache")


@pytest.mark.parametrize(
    ("state_dtype", "written"),
    [
        *(("float32", name) for name in (*GIVEN, *OWN)),
        *(("int8", name) for name in ("x", *OWN, "state_scale", "rand_seed")),
    ],
)
def test_a_step_waits_for_what_the_kernel_ahead_writes(kernels, algorithm, state_dtype, written):
    def work(loop: Loop, cycles: int) -> None:
        for number in range(STEPS):
            loop.produce(number, cycles)
            loop.step(0, loop.x(number), loop.outs[number])

    both(kernels, algorithm, written, state_dtype, work)


def test_weights_that_change_under_the_second_kernel(kernels, algorithm):
    """Scratch of the step before is there until the first kernel is through; nothing spins."""

    def work(loop: Loop, cycles: int) -> None:
        for number in range(STEPS):
            loop.produce(number, 0)
            loop.step(0, loop.x(number), loop.outs[number])

    both(kernels, algorithm, "B", "float32", work)


def test_steps_wait_for_each_other(kernels, algorithm):
    """Layer 1 reads what layer 0 writes, and layer 0 writes where layer 1 has just read."""

    def work(loop: Loop, cycles: int) -> None:
        for number in range(STEPS):
            loop.step(0, loop.x(number), loop.middle)
            loop.step(1, loop.middle, loop.outs[number])

    both(kernels, algorithm, "z", "float32", work)


def test_steps_wait_inside_a_graph(kernels, algorithm):
    """Producer, layer 0 and layer 1, many times in one CUDA graph, which is replayed."""
    captured = 50

    def work(loop: Loop, cycles: int) -> None:
        stream, outs = cupy.cuda.get_current_stream(), cupy.zeros((captured, BATCH, T, H, P), BF16)
        stream.begin_capture()
        for number in range(captured):
            loop.produce(number, cycles)
            loop.step(0, loop.given["x"], loop.middle)
            loop.step(1, loop.middle, outs[number])
        graph = stream.end_capture()
        for first in range(0, STEPS, captured):
            graph.launch(stream)
            words(loop.outs[first : first + captured])[...] = words(outs)

    both(kernels, algorithm, "x", "float32", work)
