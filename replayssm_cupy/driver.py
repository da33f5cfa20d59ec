"""Launches through the CUDA driver, prepared once: a call takes the stream and nothing else.

A plain launch goes through CuPy, whose detour is the shortest; one with attributes through
``cuLaunchKernelEx``, whose structures are those of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from .errors import ReplaySSMError

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has no current context

Shape = tuple[int, int, int]


class DriverError(Exception):
    """A status of the driver that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{_text('cuGetErrorName', status)}: {_text('cuGetErrorString', status)}")
        self.status = status


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id and a union of 64 bytes, of which an int is used here."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def plain_launch(
    handle: int, grid: Shape, block: Shape, shared_bytes: int, record: ctypes.Structure, cupy: Any
) -> Callable[[int], None]:
    """A function of a raw stream handle that launches the ``CUfunction`` `handle`.

    `record` is the kernel's one parameter; its bytes are read at every call.
    """
    launch = functools.partial(cupy.cuda.driver.launchKernel, handle, *grid, *block, shared_bytes)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(record))
    address = ctypes.addressof(parameters)

    def call(stream: int, keep: object = (record, parameters)) -> None:
        launch(stream, address, 0)

    return call


def dependent_launch(
    handle: int, grid: Shape, block: Shape, shared_bytes: int, record: ctypes.Structure
) -> Callable[[int], None]:
    """:func:`plain_launch` as a programmatic dependent launch, for one thread at a time.

    The kernel may start before the one ahead of it in the stream has ended, and waits itself.
    """
    launch = _library().cuLaunchKernelEx
    attributes = (LaunchAttribute * 1)(LaunchAttribute(SERIALIZATION, value=1))
    config = LaunchConfig(grid, block, shared_bytes, None, attributes, 1)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(record))
    pointers = [ctypes.addressof(config), handle, ctypes.addressof(parameters), None]
    arguments = [ctypes.c_void_p(pointer) for pointer in pointers]

    def call(stream: int, keep: object = (record, attributes, parameters)) -> None:
        config.stream = stream
        status = launch(*arguments)
        if status:
            raise DriverError(status)

    return call


def _text(function: str, status: int) -> str:
    text = ctypes.c_char_p()
    getattr(_library(), function)(status, ctypes.byref(text))
    return (text.value or f"CUDA error {status}".encode()).decode()


@functools.cache
def _library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        library.cuLaunchKernelEx.restype = ctypes.c_int
    except (OSError, AttributeError) as problem:
        raise ReplaySSMError(
            f"the NVIDIA driver cannot be used ({problem}): install driver 530 or newer"
        ) from problem
    return library
