"""What a call costs beside its kernel: host time, the first call, GPU memory over many calls."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from workload import Shape

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


def host_times() -> None:
    """Microseconds of host time of eager calls with torch tensors and with CuPy arrays."""
    calls: dict[str, dict[str, Callable[[], Any]]] = {"CuPy arrays": _cupy_calls()}
    try:
        calls["torch tensors"] = _torch_calls()
    except ImportError as error:
        print(f"torch tensors: {error}")
    for kind, named in calls.items():
        for name, time_of_it in host_times_of(named, _synchronize).items():
            print(f"host time of {name} with {kind}: {time_of_it:.1f} us")


def host_times_without_launches() -> None:
    """The same with torch tensors in host memory and launches that do nothing, without a GPU."""
    with no_launches():
        for name, time_of_it in host_times_of(_torch_calls("cpu"), lambda: None).items():
            print(f"host time of {name} without its launch: {time_of_it:.1f} us")


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Host arrays take the way of a GPU's, to launches that do nothing."""
    from replayssm_cupy import decode, plan

    class Launcher:
        def launch(self, plan: Any, stream: int) -> None:
            pass

    plan.launchers["cpu"] = Launcher()
    try:
        yield
    finally:
        del plan.launchers["cpu"]
        decode._plans.clear()


def host_times_of(
    calls: dict[str, Callable[[], Any]], synchronize: Callable[[], Any], number: int = 100
) -> dict[str, float]:
    """Median microseconds of each call, queued up to `number` deep.

    The calls take turns, so that none is measured while the machine is slower than for another.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(21):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(number):
                call()
            times[name].append((time.perf_counter() - start) * 1e6 / number)
            synchronize()
    return {name: float(np.median(each[1:])) for name, each in times.items()}  # one to warm up


def _synchronize() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _layer(
    zeros: Callable[[tuple[int, ...], str], Any], ints: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """A stack of one layer and a step's arguments, `out` last, of what `zeros` and `ints` make."""
    import replayssm_cupy as ssm

    shape, batch = Shape(), 8
    rows, heads = shape.window + 1, (shape.nheads, shape.head_dim)
    stack = ssm.LayerStack.from_arrays(
        [zeros((batch, *heads, shape.dstate), "float32")],
        [zeros((batch, shape.nheads, rows, shape.head_dim), "bfloat16")],
        [zeros((batch, shape.ngroups, rows, shape.dstate), "bfloat16")],
        [zeros((batch, shape.nheads, rows), "float32")],
        ints(np.zeros(batch, np.int32)),
        ints(np.zeros(batch, np.int32)),
        npredicted=1,
    )
    inputs = {
        "x": zeros((batch, 1, *heads), "bfloat16"),
        "dt": zeros((batch, 1, shape.nheads), "float32"),
        "A": zeros((shape.nheads,), "float32"),
        **{name: zeros((batch, 1, shape.ngroups, shape.dstate), "bfloat16") for name in "BC"},
        "D": zeros((shape.nheads,), "float32"),
        "z": zeros((batch, 1, *heads), "bfloat16"),
        "dt_bias": zeros((shape.nheads,), "float32"),
        "slots": ints(np.arange(batch, dtype=np.int32)),
        "out": zeros((batch, 1, *heads), "bfloat16"),
    }
    return stack, inputs


def _calls(
    stack: Any, inputs: dict[str, Any], ints: Callable[[Any], Any]
) -> dict[str, Callable[[], Any]]:
    """Steps, cursor moves and snapshots of nothing."""
    without_out = {name: array for name, array in inputs.items() if name != "out"}
    slots, batch = inputs["slots"], len(inputs["slots"])
    accepted = ints(np.ones(batch, np.int32))
    stack.refresh([inputs["A"]])
    rows = np.arange(batch // 2, dtype=np.int32)
    pair = ints(rows), ints(rows + batch // 2)
    no_prefix, before, one = ints(rows * 0 - 1), ints(rows), ints(rows * 0 + 1)
    return {
        "one eager stack.step": lambda: stack.step(0, **inputs),
        "one eager stack.step that allocates out": lambda: stack.step(0, **without_out),
        "one bound step": stack.bind(0, **inputs),
        "one eager stack.advance": lambda: stack.advance(slots, accepted),
        "one eager stack.materialize": lambda: stack.materialize(*pair, no_prefix),
        "one eager stack.materialize_blocks": lambda: stack.materialize_blocks(
            *pair, before, one, block_size=64
        ),
    }


def _operator_calls(stack: Any, inputs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The same step through handles, and as torch operators."""
    import torch

    from replayssm_cupy.torch_ops import StackHandle

    handle, operator = StackHandle(stack), torch.ops.replayssm.stack_step
    *tokens, slots, out = inputs.values()  # dt_softplus lies between tokens and slots
    by_place = handle.number, handle.anchor, 0, *tokens, True, slots
    tokens = tuple(tokens)
    x, dt, A, B, C, D, z, dt_bias = tokens
    layer, operators = handle.bind_layer(0, A, D, dt_bias, slots=slots), torch.ops.replayssm
    short, number, anchor = operators.layer_step, layer.number, layer.anchor
    given = itertools.cycle([[a.clone() for a in (x, dt, B, C, z, out)] for _ in range(3)])

    def elsewhere() -> Any:
        tensors = next(given)
        short.out(number, anchor, *tensors)
        return tensors[-1]

    return {
        "one step of a bound layer": lambda: layer.step(x, dt, B, C, z, out),
        "one step of a bound layer that allocates out": lambda: layer.step(x, dt, B, C, z),
        "one operator layer_step.out": lambda: short.out(number, anchor, x, dt, B, C, z, out),
        "one operator layer_step.out on other tensors each time": elsewhere,
        "one operator layer_step.default": lambda: short.default(number, anchor, x, dt, B, C, z),
        "one operator layer_step": lambda: short(number, anchor, x, dt, B, C, z),
        "one handle.step": lambda: handle.step(0, *tokens, slots=slots, out=out),
        "one handle.step that allocates out": lambda: handle.step(0, *tokens, slots=slots),
        "one operator stack_step.out": lambda: operator.out(*by_place, out=out),
        "one operator stack_step.default": lambda: operator.default(*by_place),
        "one operator stack_step": lambda: operator(*by_place),
    }


def _torch_calls(device: str = "cuda") -> dict[str, Callable[[], Any]]:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ImportError("torch finds no CUDA device")

    def ints(array: Any) -> Any:
        return torch.from_numpy(array).to(device)

    layer = _layer(
        lambda size, dtype: torch.zeros(size, dtype=getattr(torch, dtype), device=device), ints
    )
    return _calls(*layer, ints) | _operator_calls(*layer)


def _cupy_calls() -> dict[str, Callable[[], Any]]:
    import cupy
    import ml_dtypes

    types = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    layer = _layer(lambda size, dtype: cupy.zeros(size, types[dtype]), cupy.asarray)
    return _calls(*layer, cupy.asarray)


def memory(steps: int) -> bool:
    """Prints the GPU memory in use after a warm-up, eager steps and graph replays; whether it was
    the same all the time."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        named = _cupy_calls()
        eager = [call for name, call in named.items() if name != "one bound step"]
        captured = [named["one bound step"], named["one eager stack.advance"]]
        for call in (*eager, *captured):
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in captured:
            call()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        seen = {"after the warm-up": in_use()}
        for _ in range(steps):
            for call in eager:
                call()
        stream.synchronize()
        seen[f"after {steps} eager steps"] = in_use()
        for _ in range(steps):
            graph.launch(stream)
        stream.synchronize()
        seen[f"after {steps} graph replays"] = in_use()
    return report_memory(seen)


def in_use() -> tuple[int, int, int]:
    """Bytes in use on the device, and those that CuPy's pool has handed out and holds."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    return total - free, pool.used_bytes(), pool.total_bytes()


def report_memory(seen: dict[str, tuple[int, int, int]]) -> bool:
    for when, (device, used, held) in seen.items():
        print(f"{when}: {device} bytes in use on the GPU, pool {used} used of {held}")
    same = len(set(seen.values())) == 1
    print("memory stays the same" if same else "memory changed")
    return same
