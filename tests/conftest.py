"""The `gpu` marker, and the two places where the kernels run: on the CPU and on a GPU."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
import pytest
from host import asan

# JAX would take most of a GPU's memory at its first use, and leave little for the other tests.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

try:
    import cupy

    NO_GPU = "" if cupy.cuda.runtime.getDeviceCount() else "no GPU"
except Exception as error:
    NO_GPU = f"no GPU that CuPy can use ({type(error).__name__})"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a process a core, but not more CUDA contexts than a small GPU holds."""
    return min(os.cpu_count() or 1, 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and NO_GPU:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def _span(array: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The bytes from an array's first to its last element, the offset of element 0 in them, and
    the place of the first byte within 256."""
    low, high = np.lib.array_utils.byte_bounds(array)
    raw = np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
    return raw, array.ctypes.data - low, low % 256


class HostBackend:
    """NumPy memory; the kernels run through g++ (tests/host) in a chosen order of threads."""

    name = "host"

    def __init__(self, order: str = "forward", seed: int = 0) -> None:
        from host.launcher import HostLauncher

        self.launcher = HostLauncher(order, seed)

    def put(self, array: np.ndarray | None) -> Any:
        """A copy with the same strides and the same place within 256 bytes."""
        if array is None or array.size == 0:
            return None if array is None else array.copy()
        raw, first, low = _span(array)
        room = np.full(raw.size + 4096, 0xFF, np.uint8)
        start = (low - room.ctypes.data) % 256
        room[start : start + raw.size] = raw
        for guard in (room[:start], room[start + raw.size :]):
            asan.forbid(guard)
            weakref.finalize(room, asan.allow_at, guard.ctypes.data, guard.nbytes)
        return np.ndarray(array.shape, array.dtype, room, start + first, array.strides)

    def get(self, array: Any) -> np.ndarray:
        return np.array(array)

    def synchronize(self) -> None:
        pass


class CudaBackend:
    """CuPy memory on the current GPU."""

    name = "cuda"

    def put(self, array: np.ndarray | None) -> Any:
        """A device copy with the same strides and the same place within 256 bytes."""
        if array is None or array.size == 0:
            return None if array is None else cupy.asarray(array)
        raw, first, low = _span(array)
        room = cupy.full(raw.size + 512, 0xFF, np.uint8)
        start = (low - room.data.ptr) % 256
        room[start : start + raw.size] = cupy.asarray(raw)
        memory = room.data + start + first
        return cupy.ndarray(array.shape, array.dtype, memory, array.strides)

    def get(self, array: Any) -> np.ndarray:
        if array.dtype.itemsize == 1:  # CuPy copies no 8-bit floats
            bytewise = cupy.ascontiguousarray(array.view(np.uint8))
            return cupy.asnumpy(bytewise).view(array.dtype)
        return cupy.asnumpy(cupy.ascontiguousarray(array))

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()


def choose_form(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Replay steps take a form of the kernel, "stream" or "small", whatever their size."""
    from replayssm_cupy import calls, decode, ops, schedule

    monkeypatch.setattr(schedule, "prefers_small", lambda key, step, on: form == "small")
    monkeypatch.setattr(decode, "_plans", {})
    monkeypatch.setattr(ops, "_calls", calls.SeenCalls())


@pytest.fixture(params=["stream", "small"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of the replay step, one after the other."""
    choose_form(monkeypatch, request.param)
    return request.param


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the kernels run. With "host", NumPy arrays go to the emulated kernels."""
    if request.param == "cuda":
        return CudaBackend()
    from replayssm_cupy import plan

    order = os.environ.get("REPLAYSSM_HOST_ORDER", "forward")
    host = HostBackend(order, int(os.environ.get("REPLAYSSM_HOST_SEED", "0")))
    monkeypatch.setitem(plan.launchers, "cpu", host.launcher)
    return host


@pytest.fixture(params=["kernel", "reference"])
def place(request: pytest.FixtureRequest, backend: Any) -> Any:
    """The backend, or the reference beside it; the second needs no more than one backend."""
    from runs import NumPyBackend, reference_path

    if request.param == "kernel":
        yield backend
        return
    if backend.name == "cuda":
        pytest.skip("the reference runs with the host backend")
    with reference_path():
        yield NumPyBackend()
