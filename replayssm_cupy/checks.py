"""What the arrays of a call must look like: one line for the first that does not.

Shapes are spelt in the letters of the field; a letter that occurs in several arguments must agree,
and the message says which argument set it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import compiler
from .arrays import Device, View, contiguous_from, itemsize, require_inplace, view

ALIGNMENT = 16  # bytes of a vector load
INPLACE_HINT = "an array that owns its memory, such as cupy.array(...) or torch.clone(...)"
JAX_HINT = "replayssm_cupy.jax_ops, or an array of CuPy or NumPy"


def optional_view(array: Any, name: str) -> View | None:
    return None if array is None else view(array, name)


class Letters:
    """The sizes that the arguments of one call agree on, and who set each."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, str]] = {}

    def __getitem__(self, letter: str) -> int:
        return self._sizes[letter][0]

    def set(self, letter: str, size: int, source: str) -> None:
        self._sizes[letter] = (size, source)

    def bind(self, array: View, letters: Sequence[str]) -> None:
        """Checks the rank and the known letters of `array` and learns the others."""
        if len(array.shape) == len(letters) and all(
            self._sizes.setdefault(letter, (size, array.name))[0] == size
            for letter, size in zip(letters, array.shape, strict=True)
        ):
            return
        known = [str(self._sizes[k][0]) if k in self._sizes else k for k in letters]
        sources = {
            f"{k} from {self._sizes[k][1]}"
            for k in letters
            if k in self._sizes and self._sizes[k][1] != array.name
        }
        raise ValueError(
            f"{array.name}: expected {_tuple(letters)} = {_tuple(known)}, got {array.shape}"
            + (f" ({', '.join(sorted(sources))})" if sources else "")
        )


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def check_dtype(array: View, allowed: Sequence[str], why: str = "") -> None:
    if array.dtype not in allowed:
        expected = allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"
        raise TypeError(f"{array.name}: expected {expected}{why}, got {array.dtype}")


def check_value(name: str, value: int, allowed: Sequence[int], letter: str = "") -> None:
    """`name` is an argument that is the value, or an array that has it as its `letter`."""
    if value not in allowed:
        nearest = sorted(allowed, key=lambda candidate: (abs(candidate - value), candidate))[:2]
        raise ValueError(
            f"{name}: expected {letter and f'{letter} '}one of {', '.join(map(str, allowed))}, "
            f"got {value} (nearest supported: {' and '.join(map(str, sorted(nearest)))})"
        )


def check_devices(arrays: Sequence[View | None]) -> None:
    """All arrays on the device of the first."""
    first = arrays[0]
    assert first is not None
    for array in arrays[1:]:
        if array is not None and array.device != first.device:
            raise ValueError(
                f"{array.name}: expected device {first.device} as {first.name}, got {array.device}"
            )


def check_inplace(*arrays: View) -> None:
    """Arrays that are written: they may be, and distinct elements have distinct addresses."""
    for array in arrays:
        require_inplace(array, JAX_HINT if array.framework == "jax" else INPLACE_HINT)
        if 0 in array.shape:
            continue
        for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            if size > 1 and stride == 0:
                raise ValueError(
                    f"{array.name}: expected a stride of axis {axis} other than 0 in an array "
                    "that is written, got 0"
                )


def check_packed(array: View, axis: int) -> None:
    """The axes from `axis` on are dense: the kernels read them as vectors."""
    if not contiguous_from(array, axis):
        raise ValueError(
            f"{array.name}: expected contiguous axes from axis {axis} on, got shape {array.shape} "
            f"with strides {array.strides}"
        )


def check_alignment(array: View, axes: int = 0) -> None:
    """Base address and the strides of the first `axes` axes are multiples of 16 bytes.

    Without `axes` the elements are read one by one: an element's own alignment is enough.
    """
    if 0 in array.shape:
        return
    size = itemsize(array.dtype)
    needed = ALIGNMENT if axes else size
    if array.ptr % needed:
        raise ValueError(
            f"{array.name}: expected an address aligned to {needed} bytes, got {array.ptr:#x}"
        )
    for axis in range(axes):
        if array.shape[axis] > 1 and array.strides[axis] * size % ALIGNMENT:
            raise ValueError(
                f"{array.name}: expected a stride of axis {axis} in multiples of {ALIGNMENT} bytes "
                f"({ALIGNMENT // size} elements), got {array.strides[axis]} elements"
            )


def untie(array: View, leading: int, tied: str) -> View:
    """The per-head value of a tied view: trailing axes of stride 0 are dropped.

    `array` is either of rank `leading`, or has the axes `tied` behind with stride 0, as mamba_ssm
    and FlashInfer pass A, D, dt and dt_bias.
    """
    if len(array.shape) == leading:
        return array
    for size, stride in zip(array.shape[leading:], array.strides[leading:], strict=True):
        if size > 1 and stride != 0:
            raise ValueError(
                f"{array.name}: expected stride 0 over {tied} (one value per head) or the plain "
                f"form without {tied}, got strides {array.strides}"
            )
    return array._replace(shape=array.shape[:leading], strides=array.strides[:leading])


def with_token_axis(array: View) -> View:
    """(batch, ...) as (batch, 1, ...)."""
    shape, strides = array.shape, array.strides
    return array._replace(shape=(shape[0], 1, *shape[1:]), strides=(strides[0], 0, *strides[1:]))


def check_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def index_range(name: str, value: int) -> int:
    """An integer that must fit 64 bits, such as a sentinel."""
    check_int(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: expected a 64-bit integer, got {value}")
    return value


def pad_output_is_zero(pad_output: str) -> bool:
    if pad_output not in ("zero", "keep"):
        raise ValueError(f'pad_output: expected "zero" or "keep", got {pad_output!r}')
    return pad_output == "zero"


def check_optional_int(name: str, value: int | None) -> int | None:
    if value is not None:
        check_int(name, value)
    return value


def check_rounds(philox_rounds: int) -> int:
    check_int("philox_rounds", philox_rounds)
    if not 1 <= philox_rounds <= 10:
        raise ValueError(f"philox_rounds: expected 1 to 10, got {philox_rounds}")
    return philox_rounds


def first_seed(stochastic: bool | int, state_dtype: str) -> int | None:
    """The first seed that `stochastic_rounding` asks for; None rounds to nearest."""
    if stochastic is False:
        return None
    if not isinstance(stochastic, int):
        got = type(stochastic).__name__
        raise TypeError(f"stochastic_rounding: expected a bool or an int, got {got}")
    if state_dtype == "float32":
        raise ValueError(
            "stochastic_rounding: expected False with a float32 state, which is not rounded"
        )
    return 0 if stochastic is True else index_range("stochastic_rounding", stochastic)


def check_seed(seed: View | None) -> None:
    """A seed is one int64, read when the kernel runs."""
    if seed is not None:
        check_dtype(seed, ("int64",))
        if math.prod(seed.shape) != 1:
            raise ValueError(f"{seed.name}: expected one element, got shape {seed.shape}")


def named_device(name: str) -> Device:
    """The device that a user names; "auto" is the first GPU, or the CPU where there is none."""
    if not isinstance(name, str):
        raise TypeError(f"device: expected a string, got {type(name).__name__}")
    kind, _, index = name.partition(":")
    if kind == "cpu" and not index:
        return Device("cpu")
    if kind == "cuda" and (name == "cuda" or index.isdecimal()):
        compiler.require_gpu(int(index or 0))
        return Device("cuda", int(index or 0))
    if name != "auto":
        raise ValueError(f'device: expected "auto", "cpu", "cuda" or "cuda:1", got {name!r}')
    return Device("cuda") if compiler.gpu_count() else Device("cpu")
