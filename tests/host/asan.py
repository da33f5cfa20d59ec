"""Tells AddressSanitizer that guard memory beside an array may not be touched by a kernel."""

from __future__ import annotations

import ctypes

import numpy as np


def forbid(memory: np.ndarray) -> None:
    """Make every access of a kernel to these bytes an error; without the sanitizer nothing."""
    _call("__asan_poison_memory_region", memory.ctypes.data, memory.nbytes)


def allow(memory: np.ndarray) -> None:
    """Take `forbid` back; before the bytes are compared or copied."""
    allow_at(memory.ctypes.data, memory.nbytes)


def allow_at(address: int, nbytes: int) -> None:
    """The same for memory whose array is going away."""
    _call("__asan_unpoison_memory_region", address, nbytes)


def _call(name: str, address: int, nbytes: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
