"""Arrays of any framework, borrowed as a `View`: pointer, shape, strides, dtype, device.

PyTorch, JAX, CuPy and NumPy arrays are read in place and never copied; any other object that has
`__dlpack__` is read through its DLPack capsule. A framework is looked up among the modules that
the caller has imported already; only CuPy is imported here, where a CUDA device is in play.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from .errors import ReplaySSMError

Framework = Literal["numpy", "torch", "cupy", "jax", "dlpack"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint8": np.dtype(np.uint8),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}


class Device(NamedTuple):
    """Where memory lies: the CUDA ordinal is `index`, which is 0 for the CPU."""

    kind: Literal["cpu", "cuda"]
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


# A named tuple, because several are made on every launch and a frozen dataclass costs three times.
class View(NamedTuple):
    """A borrowed array. It is immutable and keeps its owner alive; the memory is the caller's."""

    name: str  # the argument it came in as, for messages
    ptr: int  # address of element (0, ..., 0)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; may be 0 or negative; of no meaning where the size is 1
    dtype: str  # canonical name, such as "bfloat16"
    device: Device
    readonly: bool
    framework: Framework
    owner: object  # whatever keeps the memory alive

    def __repr__(self) -> str:  # not the owner, whose values may be many and on a device
        fields = (f"{key}={value!r}" for key, value in self._asdict().items() if key != "owner")
        return f"View({', '.join(fields)})"


def view(array: Any, name: str) -> View:
    """Borrow `array` without a copy; `name` is the argument's name in error messages.

    Any strided array of PyTorch, JAX, CuPy or NumPy on the CPU or a CUDA device will do, any object
    with `__dlpack__`, and a view, which comes back under the new name. Torch tensors that require
    grad are read as if detached. JAX arrays are always read-only; on CUDA their pending work is
    ordered before CuPy's current stream.

    Raises TypeError if `array` is no such array, if its dtype is not supported, or if its memory
    cannot be borrowed (sparse, traced, meta); ValueError if a stride is not a whole number of
    elements or a JAX array was donated.
    """
    cls = type(array)
    reader = _readers.get(cls)
    if reader is None:
        reader = _readers[cls] = _find_reader(array, name)
    return reader(array, name)


def as_numpy(view: View) -> np.ndarray[Any, Any]:
    """The NumPy array over the memory of a host `view`: same shape, strides, dtype, writability.

    Raises ValueError if the view is not on the CPU.
    """
    if view.device.kind != "cpu":
        raise ValueError(f"{view.name}: expected memory of the host, got {view.device}")
    dtype = _DTYPES[view.dtype]
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    # The dtypes of ml_dtypes have no code in the interface: pass raw bytes, then name the dtype.
    return np.asarray(_HostMemory(view, dtype.itemsize)).view(dtype)


def dtype_name(dtype: Any, name: str = "dtype") -> str:
    """The canonical name of a NumPy, ml_dtypes, torch or JAX dtype, or of its string.

    Strings may be canonical ("bfloat16") or torch's ("torch.bfloat16"). `name` is the argument's
    name in the error message. Raises TypeError if the dtype is not supported.
    """
    text = str(dtype).removeprefix("torch.")
    if text in _DTYPES:
        return text
    try:
        numpy = np.dtype(dtype)
    except TypeError:
        numpy = None
    if numpy is None or numpy.name not in _DTYPES or not numpy.isnative:
        raise TypeError(f"{name}: expected one of {', '.join(_DTYPES)}, got {text}")
    return str(numpy.name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy (or ml_dtypes) dtype of a canonical name. Raises KeyError for any other name."""
    return _DTYPES[name]


def itemsize(name: str) -> int:
    """Bytes of one element of the dtype with this canonical name."""
    return _DTYPES[name].itemsize


def strides_match(view: View, strides: Sequence[int | None]) -> bool:
    """Whether the strides (in elements) are these. None matches any; axes of size 1 match all."""
    pairs = zip(view.shape, view.strides, strides, strict=True)
    return 0 in view.shape or all(n == 1 or want in (None, have) for n, have, want in pairs)


def contiguous_from(view: View, axis: int) -> bool:
    """Whether the axes from `axis` on lie densely in row-major order, axes of size 1 aside."""
    if 0 in view.shape:
        return True
    dense = 1
    for size, stride in zip(view.shape[axis:][::-1], view.strides[axis:][::-1], strict=True):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return True


def require_inplace(view: View, functional: str) -> None:
    """Raise TypeError unless `view` may be written; `functional` names what to call instead."""
    if view.readonly:
        got = "a JAX array, which is immutable" if view.framework == "jax" else "a read-only array"
        raise TypeError(
            f"{view.name}: expected an array to change in place, got {got}; use {functional}"
        )


def empty_like_framework(like: View, shape: tuple[int, ...], dtype: str, device: Device) -> Any:
    """A new, uninitialised, row-major array of the framework of `like`.

    For JAX, whose arrays cannot be written, it is a CuPy or NumPy array to fill and then to pass
    to `to_framework`; likewise for arrays that are only known by DLPack. Raises ReplaySSMError if
    CuPy is needed and missing.
    """
    if like.framework == "torch":
        torch: Any = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=str(device))
    if device.kind == "cpu":
        return np.empty(shape, _DTYPES[dtype])
    with device_guard(device):
        if dtype == "float8_e4m3fn":  # CuPy makes no such array, but views one
            return _cupy().empty(shape, np.uint8).view(_DTYPES[dtype])
        return _cupy().empty(shape, _DTYPES[dtype])


def allocator_like(like: View) -> Callable[[], Any]:
    """A function that makes an uninitialised, row-major array of the kind of `like`."""
    known = like._replace(owner=None)
    if known.framework == "torch" and (quick := _quick_torch_allocator(known)) is not None:
        return quick
    return lambda: empty_like_framework(known, known.shape, known.dtype, known.device)


def _quick_torch_allocator(like: View) -> Callable[[], Any] | None:
    """What torch.compile's own code allocates with, which takes half the time; None without it."""
    torch: Any = sys.modules["torch"]
    kind, index = like.device
    strides = tuple(math.prod(like.shape[axis + 1 :]) for axis in range(len(like.shape)))
    try:
        make = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
        quick = partial(make, like.shape, strides, getattr(torch, like.dtype))
        current = torch._C._cuda_getDevice if kind == "cuda" else int
        with device_guard(like.device):
            made = view(quick(), "out")
        if made[2:6] != (like.shape, strides, like.dtype, like.device):
            return None
    except Exception:  # another version of torch
        return None
    if kind == "cpu" or torch.cuda.device_count() == 1:
        return quick
    # On several GPUs it allocates on the current one.
    usual = partial(empty_like_framework, like, like.shape, like.dtype, like.device)
    return lambda: quick() if current() == index else usual()


def from_numpy(array: np.ndarray[Any, Any], like: View) -> Any:
    """A copy of a NumPy array on the device of `like`, in its framework where that can write.

    On a GPU the host waits for the copy, so it is for tables that are built once. Raises
    ReplaySSMError if CuPy is needed and missing.
    """
    if like.framework == "torch":
        torch: Any = sys.modules["torch"]
        return torch.from_numpy(array.copy()).to(str(like.device))
    if like.device.kind == "cpu":
        return array.copy()
    with device_guard(like.device):
        return _cupy().asarray(array, blocking=True)


def to_framework(array: Any, like: View) -> Any:
    """Hand a finished array of `empty_like_framework` over to the framework of `like`.

    A JAX array takes over the memory of `array`, which must not be written afterwards; JAX copies
    host memory that is not aligned to its liking. Any other array is returned as it is. On CUDA,
    JAX waits for the work on CuPy's current stream.
    """
    if like.framework != "jax":
        return array
    jax: Any = importlib.import_module("jax")
    if isinstance(array, np.ndarray):  # NumPy cannot export bfloat16 through DLPack
        owner: Any = like.owner
        return jax.device_put(array, owner[0].sharding, may_alias=True)
    with device_guard(like.device):  # of whose stream CuPy speaks
        return importlib.import_module("jax.dlpack").from_dlpack(array)


def current_stream(view: View) -> int:
    """The raw handle of the stream that the caller works on; 0 for the CPU.

    That is torch's current stream for torch tensors and CuPy's for all others.
    """
    return stream_reader(view)()


def stream_reader(view: View) -> Callable[[], int]:
    """A function that returns :func:`current_stream`, whatever that is by then."""
    index = view.device.index
    if view.device.kind == "cpu":
        return int
    if view.framework == "torch":
        torch: Any = sys.modules["torch"]
        try:
            return partial(torch._C._cuda_getCurrentRawStream, index)
        except AttributeError:
            return lambda: int(torch.cuda.current_stream(index).cuda_stream)
    current: Any = _cupy().cuda.get_current_stream
    return lambda: int(current(index).ptr)


class Kinds:
    """Of arrays of one framework: type, dtype, shape, strides and device, quickly compared.

    Calls that come again with other arrays of the same kinds need not look at each of them.
    """

    __slots__ = ("address", "match")

    match: Callable[..., bool]  # whether as many arrays are of these kinds
    address: Callable[[Any], int]  # of one array that matches

    def __init__(self, match: Callable[..., bool], address: Callable[[Any], int]) -> None:
        self.match, self.address = match, address


def kinds_of(arrays: Sequence[Any]) -> Kinds | None:
    """The kinds of torch tensors, or of CuPy or NumPy arrays; None for all others, and mixtures."""
    for module, name, find in (
        ("torch", "Tensor", _torch_kinds),
        ("cupy", "ndarray", _strided_kinds),
        ("numpy", "ndarray", _strided_kinds),
    ):
        base = getattr(sys.modules.get(module), name, None)
        if base is not None and all(isinstance(array, base) for array in arrays):
            return find(arrays)
    return None


def _torch_kinds(tensors: Sequence[Any]) -> Kinds:
    torch: Any = sys.modules["torch"]
    match: Callable[..., bool] = _Matcher(_torch_kind, tensors)
    try:
        # What torch.compile tests its inputs with: one call for all tensors, none of them twice.
        first = [next(i for i, other in enumerate(tensors) if other is one) for one in tensors]
        unique = sorted(set(first))
        guards = torch._C._dynamo.guards.TensorGuards(
            *(tensors[i] for i in unique), dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        quick = guards.check if len(unique) == len(first) else _Repeated(guards.check, first)
        if quick(*tensors):
            match = quick
    except Exception:  # another version of torch: compare piece by piece
        pass
    return Kinds(match, torch.Tensor.data_ptr)


class _Repeated:
    """A guard of distinct tensors for calls in which some occur more than once."""

    __slots__ = ("_check", "_copies", "_unique")

    def __init__(self, check: Callable[..., bool], first: Sequence[int]) -> None:
        self._check = check
        self._unique = sorted(set(first))
        self._copies = [pair for pair in enumerate(first) if pair[0] != pair[1]]

    def __call__(self, *tensors: Any) -> bool:
        return all(tensors[i] is tensors[j] for i, j in self._copies) and self._check(
            *[tensors[i] for i in self._unique]
        )


def _torch_kind(tensor: Any) -> object:
    shape, strides = tensor.shape, tensor.stride()
    return type(tensor), tensor.dtype, shape, strides, tensor.device, tensor.is_neg()


def _strided_kinds(arrays: Sequence[Any]) -> Kinds:
    if isinstance(arrays[0], np.ndarray):
        return Kinds(_Matcher(_numpy_kind, arrays), attrgetter("ctypes.data"))
    dense = all(getattr(array, "_c_contiguous", False) for array in arrays)
    kind = _dense_cupy_kind if dense else _cupy_kind
    return Kinds(_Matcher(kind, arrays), attrgetter("data.ptr"))


_numpy_kind = attrgetter("__class__", "dtype", "shape", "strides", "flags.writeable")
_cupy_kind = attrgetter("__class__", "dtype", "shape", "strides", "data.device_id")
# CuPy makes a tuple of the strides whenever it is asked for them, but has the flag at hand.
_dense_cupy_kind = attrgetter("_c_contiguous", "dtype", "shape", "data.device_id")


class _Matcher:
    """Compares arrays with those that it was made of, by what `kind` says of each."""

    __slots__ = ("_expected", "_kind")

    def __init__(self, kind: Callable[[Any], object], arrays: Sequence[Any]) -> None:
        self._kind = kind
        self._expected = [*map(kind, arrays)]

    def __call__(self, *arrays: Any) -> bool:
        try:
            return [*map(self._kind, arrays)] == self._expected
        # Of another framework, or without strided memory; NumPy has no buffer of bfloat16 to show.
        except (AttributeError, RuntimeError, ValueError):
            return False


class device_guard:  # noqa: N801  # used like a function
    """Context manager: make `device` the current CUDA device and restore the former one.

    It does nothing for the CPU. Raises ReplaySSMError if CuPy is missing.
    """

    __slots__ = ("_device", "_former")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._former = -1

    def __enter__(self) -> None:
        if self._device.kind == "cuda":
            runtime = _cupy().cuda.runtime
            current = runtime.getDevice()
            if current != self._device.index:
                runtime.setDevice(self._device.index)
                self._former = current

    def __exit__(self, *exception: object) -> None:
        if self._former >= 0:
            _cupy().cuda.runtime.setDevice(self._former)


# Readers: one for each framework, found once for each type of array.

_Reader = Callable[[Any, str], View]
_readers: dict[type, _Reader] = {}
_names: dict[object, str] = {}  # dtype objects seen before -> canonical name
_CPU = Device("cpu")


def _find_reader(array: Any, name: str) -> _Reader:
    if isinstance(array, View):
        return _read_view
    known = (
        ("numpy", "ndarray", _read_numpy),
        ("torch", "Tensor", _read_torch),
        ("cupy", "ndarray", _read_cupy),
        ("jax", "Array", _read_jax),
    )
    for module, cls, reader in known:
        base = getattr(sys.modules.get(module), cls, None)
        if base is not None and isinstance(array, base):
            return reader
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack
    got = type(array).__name__
    raise TypeError(f"{name}: expected an array of PyTorch, JAX, CuPy or NumPy, got {got}")


def _read_view(array: View, name: str) -> View:
    return array._replace(name=name)


def _read_torch(array: Any, name: str) -> View:
    dtype = _names.get(array.dtype) or _remember(array.dtype, name)
    if array.is_cuda:
        device = _cuda(array.get_device())
    elif array.is_cpu:
        device = _CPU
    else:
        raise TypeError(f"{name}: expected a tensor on the CPU or CUDA, got one on {array.device}")
    try:
        ptr, shape, strides = array.data_ptr(), tuple(array.shape), array.stride()
    except RuntimeError as error:
        got = f"{type(array).__name__} of layout {array.layout}"
        raise TypeError(f"{name}: expected a strided tensor with memory, got {got}") from error
    if array.is_neg():
        raise TypeError(f"{name}: expected plain values, got a negated view; call resolve_neg()")
    if not ptr and array.numel():
        got = type(array).__name__
        raise TypeError(f"{name}: expected a strided tensor with memory, got {got}")
    return View(name, ptr, shape, strides, dtype, device, False, "torch", array)


def _read_numpy(array: np.ndarray[Any, Any], name: str) -> View:
    dtype = _names.get(array.dtype) or _remember(array.dtype, name)
    strides = _in_elements(array, name)
    readonly = not array.flags.writeable
    return View(
        name, array.ctypes.data, array.shape, strides, dtype, _CPU, readonly, "numpy", array
    )


def _read_cupy(array: Any, name: str) -> View:
    dtype = _names.get(array.dtype) or _remember(array.dtype, name)
    strides = _in_elements(array, name)
    memory = array.data
    device = _cuda(memory.device_id)
    return View(name, memory.ptr, array.shape, strides, dtype, device, False, "cupy", array)


def _read_jax(array: Any, name: str) -> View:
    jax: Any = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise TypeError(f"{name}: expected a JAX array with values, got one traced by jit or vmap")
    if array.is_deleted():
        raise ValueError(f"{name}: expected a live JAX array, got one that was deleted or donated")
    return _read_dlpack(array, name)._replace(readonly=True, framework="jax")


def _read_dlpack(array: Any, name: str) -> View:
    try:
        device_type, index = (int(number) for number in array.__dlpack_device__())
        if device_type not in _DLPACK_DEVICES:
            raise BufferError(f"its memory is on DLPack device type {device_type}")
        device = _cuda(index) if _DLPACK_DEVICES[device_type] == "cuda" else _CPU
        capsule = _export(array, device)
        tensor, flags = _open(capsule)
    except ReplaySSMError:
        raise
    except Exception as error:
        got = type(array).__name__
        raise TypeError(f"{name}: cannot borrow {got} through DLPack: {error}") from error
    code, bits = tensor.code, tensor.bits
    dtype = _DLPACK_DTYPES.get((code, bits)) if tensor.lanes == 1 else None
    if dtype is None:
        got = f"{_DLPACK_KINDS.get(code, f'DLPack type {code} of bits ')}{bits}"
        got += f" of {tensor.lanes} lanes" if tensor.lanes != 1 else ""
        raise TypeError(f"{name}: expected one of {', '.join(_DTYPES)}, got {got}")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    if tensor.strides and tensor.ndim:
        strides = tuple(tensor.strides[: tensor.ndim])
    else:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    ptr = (tensor.data or 0) + tensor.byte_offset
    # An unopened capsule calls the producer's deleter when it dies, so keeping it is enough.
    owner = (array, capsule)
    return View(name, ptr, shape, strides, dtype, device, bool(flags), "dlpack", owner)


def _remember(dtype: object, name: str) -> str:
    _names[dtype] = found = dtype_name(dtype, name)
    return found


def _in_elements(array: Any, name: str) -> tuple[int, ...]:
    item = array.dtype.itemsize
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size > 1 and stride % item:
            raise ValueError(
                f"{name}: expected strides in multiples of {item} bytes, got {array.strides}"
            )
    return tuple(stride // item for stride in array.strides)


class _HostMemory:
    """NumPy's array interface over a host view, which it keeps alive."""

    def __init__(self, view: View, item: int) -> None:
        self.view = view
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr, view.readonly),
            "shape": view.shape,
            "strides": tuple(stride * item for stride in view.strides),
            "typestr": f"|V{item}",
        }


@cache
def _cuda(index: int) -> Device:
    return Device("cuda", index)


@cache
def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except Exception as error:
        raise ReplaySSMError(
            f"CUDA arrays need CuPy, which cannot be imported ({error}): pip install "
            '"replayssm_cupy[cuda13]" (or [cuda12] for a CUDA 12 driver)'
        ) from error


# DLPack: the structures of dlpack.h, https://dmlc.github.io/dlpack/latest/c_api.html.


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _VersionedTensor(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3: pinned host, 13: managed
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_DTYPES = {
    (0, 8): "int8",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
}

_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_capsule.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


def _export(array: Any, device: Device) -> object:
    # JAX's CPU arrays may still be in the making, and host memory has no stream to wait on.
    if hasattr(array, "block_until_ready") and device.kind == "cpu":
        array.block_until_ready()
    keywords: dict[str, Any] = {}
    if device.kind == "cuda":
        # DLPack spells the legacy default stream 1.
        keywords["stream"] = int(_cupy().cuda.get_current_stream(device.index).ptr) or 1
    try:
        return array.__dlpack__(max_version=(1, 0), **keywords)
    except TypeError:  # a producer from before DLPack 1.0
        return array.__dlpack__(**keywords)


def _open(capsule: object) -> tuple[_Tensor, int]:
    """The tensor in a DLPack capsule, and its flags: 1 read-only, 2 a copy (so never a target)."""
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _VersionedTensor.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise BufferError(f"expected DLPack version 1, got {versioned.major}")
        return versioned.tensor, versioned.flags & 3
    return _Tensor.from_address(_capsule_pointer(capsule, b"dltensor")), 0
