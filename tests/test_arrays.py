"""Views of arrays: no copy, exact pointers, strides and dtypes, and clear refusals."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replayssm_cupy import arrays
from replayssm_cupy.arrays import Device, as_numpy, require_inplace, to_framework, view

ROOT = Path(__file__).parents[1]
CPU = Device("cpu")
DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint64",
    "bool",
]
# Exact in every dtype above, bool aside, where they become 0 and 1.
VALUES = [[0, 1, 2], [3, 4, 6]]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def jax() -> Any:
    """JAX with its arrays on the CPU, also where it has a GPU."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with jax.default_device(jax.devices("cpu")[0]):
        yield jax


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def cuda_torch(torch: Any, cupy: Any) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that PyTorch can use")
    return torch


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Producer:
    """A foreign array: nothing but DLPack, from before or after version 1.0."""

    def __init__(self, array: Any, versioned: bool, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.versioned, self.device = array, versioned, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords and not self.versioned:
            raise TypeError("unexpected keyword")
        if not isinstance(self.array, np.ndarray):
            return self.array
        return self.array.__dlpack__(**keywords)


def capsule(tensor: ctypes.Structure, name: bytes) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    make.restype = ctypes.py_object
    return make(ctypes.addressof(tensor), name, None)


# NumPy


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_is_borrowed(dtype: str) -> None:
    array = np.array(VALUES).astype(arrays.numpy_dtype(dtype))[:, ::2]
    got = view(array, "x")
    assert got.ptr == address(array)
    assert (got.shape, got.strides, got.dtype) == ((2, 2), (3, 2), dtype)
    assert (got.device, got.readonly, got.framework) == (CPU, False, "numpy")
    back = as_numpy(got)
    assert back.dtype == array.dtype and address(back) == address(array)
    np.testing.assert_array_equal(back, array)
    back[1, 1] = 1
    assert array[1, 1] == 1
    assert arrays.itemsize(dtype) == array.itemsize


def test_negative_and_zero_strides() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    got = view(array[::-1, 1:], "x")
    assert (got.ptr, got.strides) == (address(array) + 4 * 9, (-4, 1))
    np.testing.assert_array_equal(as_numpy(got), array[::-1, 1:])
    tied = np.broadcast_to(np.float32(7), (2, 5))
    got = view(tied, "A")
    assert (got.strides, got.readonly) == ((0, 0), True)
    np.testing.assert_array_equal(as_numpy(got), np.full((2, 5), 7, np.float32))
    assert not as_numpy(got).flags.writeable


def test_scalar_and_empty_arrays() -> None:
    got = view(np.array(2.5, np.float32), "x")
    assert (got.shape, got.strides) == ((), ())
    assert as_numpy(got)[()] == 2.5
    got = view(np.empty((0, 3), ml_dtypes.bfloat16), "x")
    assert as_numpy(got).shape == (0, 3) and as_numpy(got).dtype == ml_dtypes.bfloat16


def test_offsets_beyond_32_bits() -> None:
    # Nothing but the first element exists: the view must neither copy nor touch the rest.
    one = np.array([3], ml_dtypes.bfloat16)
    far = np.lib.stride_tricks.as_strided(one, (4, 2), (2 * 2**33, 2 * (2**31 + 5)))
    got = view(far, "state")
    assert (got.ptr, got.strides) == (address(one), (2**33, 2**31 + 5))
    back = as_numpy(got)
    assert back.strides == far.strides and back[0, 0] == 3
    wide = np.lib.stride_tricks.as_strided(one, (2**20, 2**20), (0, 0))
    assert as_numpy(view(wide, "state")).shape == (2**20, 2**20)


def test_strides_of_size_one_axes_are_ignored() -> None:
    array = np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (2, 1, 4), (16, 999, 4))
    got = view(array, "x")
    assert arrays.contiguous_from(got, 0)
    assert arrays.strides_match(got, (4, 12345, 1))
    np.testing.assert_array_equal(as_numpy(got), np.ones((2, 1, 4)))


def test_stride_helpers() -> None:
    array = np.zeros((3, 4, 6), np.float32)
    got = view(array[:, :, :5], "x")
    assert arrays.strides_match(got, (24, 6, 1)) and arrays.strides_match(got, (None, None, 1))
    assert not arrays.strides_match(got, (20, 5, 1))
    assert arrays.contiguous_from(got, 2) and arrays.contiguous_from(got, -1)
    assert not arrays.contiguous_from(got, 1)
    assert arrays.contiguous_from(view(array[:2, :, :], "x"), 0)
    assert not arrays.contiguous_from(view(array[:, ::2], "x"), 0)
    assert arrays.contiguous_from(view(array[:, ::2], "x"), 2)
    empty = view(array[:0, :, :5], "x")
    assert arrays.contiguous_from(empty, 0) and arrays.strides_match(empty, (9, 9, 9))


def test_strides_between_elements_are_refused() -> None:
    packed = np.zeros(3, np.dtype([("a", np.float32), ("b", np.uint8)]))
    with pytest.raises(
        ValueError, match=r"^dt: expected strides in multiples of 4 bytes, got \(5,"
    ):
        view(packed["a"], "dt")
    assert view(packed["a"][:1], "dt").shape == (1,)


def test_view_is_immutable_and_its_repr_is_short() -> None:
    got = view(np.zeros((2, 2), np.float32), "x")
    with pytest.raises(AttributeError):
        got.ptr = 0  # type: ignore[misc]
    assert repr(got).startswith("View(name='x', ptr=") and "array" not in repr(got)
    assert str(Device("cuda", 1)) == "cuda:1" and str(CPU) == "cpu"


# Refusals


@pytest.mark.parametrize("what", [[1.0], None, 3, "x", np.float32(1)])
def test_no_array_at_all(what: object) -> None:
    got = type(what).__name__
    with pytest.raises(TypeError) as error:
        view(what, "x")
    expected = f"x: expected an array of PyTorch, JAX, CuPy or NumPy, got {got}"
    assert str(error.value) == expected


@pytest.mark.parametrize("dtype", ["complex64", "float64", ">f4", "int16", "float8_e5m2", "U3"])
def test_unsupported_dtypes(dtype: str) -> None:
    wanted = getattr(ml_dtypes, dtype, dtype)
    array = np.zeros(3, wanted)
    with pytest.raises(
        TypeError, match=r"^B: expected one of float32, bfloat16, .*, got "
    ) as error:
        view(array, "B")
    assert str(error.value).endswith(str(array.dtype))


def test_read_only_target_names_the_alternative() -> None:
    array = np.zeros(3, np.float32)
    require_inplace(view(array, "state"), "functional.step")
    array.flags.writeable = False
    with pytest.raises(TypeError) as error:
        require_inplace(view(array, "state"), "functional.step")
    assert str(error.value) == (
        "state: expected an array to change in place, got a read-only array; use functional.step"
    )


# Names of dtypes


def test_dtype_names() -> None:
    for name in DTYPES:
        assert arrays.dtype_name(name) == name
        assert arrays.dtype_name(f"torch.{name}") == name
        assert arrays.dtype_name(arrays.numpy_dtype(name)) == name
        assert arrays.dtype_name(arrays.numpy_dtype(name).type) == name
    with pytest.raises(TypeError, match=r"^state_dtype: expected one of .*, got float63$"):
        arrays.dtype_name("float63", "state_dtype")
    for bad in (None, np.complex64, np.dtype(">f4"), ml_dtypes.float8_e4m3, float, object()):
        with pytest.raises(TypeError, match=r"^dtype: expected one of"):
            arrays.dtype_name(bad)


def test_dtype_names_of_torch_and_jax(torch: Any, jax: Any) -> None:
    for name in DTYPES:
        assert arrays.dtype_name(getattr(torch, name)) == name
        assert arrays.dtype_name(getattr(jax.numpy, name)) == name
    with pytest.raises(TypeError):
        arrays.dtype_name(torch.complex64)


# DLPack


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_is_borrowed(versioned: bool) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::2]
    got = view(Producer(array, versioned), "x")
    assert (got.ptr, got.shape, got.strides) == (address(array), (3, 3), (6, 2))
    assert (got.dtype, got.device, got.readonly) == ("float32", CPU, False)
    assert got.framework == "dlpack"
    as_numpy(got)[2, 2] = -5
    assert array[2, 2] == -5


def test_dlpack_read_only_flag() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    got = view(Producer(array, True), "x")
    assert got.readonly and not as_numpy(got).flags.writeable


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_keeps_the_memory_for_as_long_as_the_view(versioned: bool) -> None:
    array = np.full(1000, 7, np.int32)
    alive = weakref.ref(array)
    got = view(Producer(array, versioned), "x")
    del array
    borrowed = as_numpy(got)
    del got
    assert alive() is not None and borrowed.sum() == 7000
    del borrowed
    assert alive() is None


def test_dlpack_by_hand() -> None:
    data = np.arange(8, dtype=np.float32).astype(ml_dtypes.bfloat16)
    shape = (ctypes.c_int64 * 2)(2, 3)
    tensor = arrays._Tensor(
        data=address(data), device_type=1, ndim=2, code=4, bits=16, lanes=1, shape=shape
    )
    tensor.byte_offset = 4
    got = view(Producer(capsule(tensor, b"dltensor"), False), "x")
    assert (got.ptr, got.strides) == (address(data) + 4, (3, 1))  # no strides: row-major
    np.testing.assert_array_equal(as_numpy(got).astype(int), [[2, 3, 4], [5, 6, 7]])
    versioned = arrays._VersionedTensor(major=1, minor=9, flags=2, tensor=tensor)
    assert view(Producer(capsule(versioned, b"dltensor_versioned"), True), "x").readonly  # a copy
    versioned.major = 2
    with pytest.raises(TypeError, match=r"x: cannot borrow Producer through DLPack: .* got 2"):
        view(Producer(capsule(versioned, b"dltensor_versioned"), True), "x")
    tensor.lanes = 2
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got bfloat16 of 2 lanes$"):
        view(Producer(capsule(tensor, b"dltensor"), False), "x")
    with pytest.raises(TypeError, match="x: cannot borrow Producer"):
        view(Producer(capsule(tensor, b"used_dltensor"), False), "x")


def test_dlpack_refusals() -> None:
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got complex64$"):
        view(Producer(np.zeros(3, np.complex64), True), "x")
    with pytest.raises(TypeError, match=r"^x: cannot borrow Producer .* device type 8$"):
        view(Producer(np.zeros(3, np.float32), True, device=(8, 0)), "x")
    with pytest.raises(TypeError, match=r"^x: cannot borrow Producer"):
        view(Producer(None, True), "x")


# PyTorch


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_is_borrowed(torch: Any, dtype: str) -> None:
    whole = torch.tensor(VALUES).to(getattr(torch, dtype))
    tensor = whole[:, 1:]
    got = view(tensor, "x")
    assert got.ptr == tensor.data_ptr() == whole.data_ptr() + whole.element_size()
    assert (got.shape, got.strides, got.dtype) == ((2, 2), (3, 1), dtype)
    assert type(got.shape) is tuple and type(got.strides) is tuple
    assert (got.device, got.readonly, got.framework) == (CPU, False, "torch")
    back = as_numpy(got)
    np.testing.assert_array_equal(back.astype(float), tensor.double().numpy())
    back[0, 1] = 0
    assert whole.double()[0, 2] == 0


def test_torch_views_and_gradients(torch: Any) -> None:
    tied = torch.tensor([1.0, 2.0], requires_grad=True)[:, None, None].expand(2, 3, 4)
    got = view(tied, "A")
    assert (got.shape, got.strides) == ((2, 3, 4), (1, 0, 0))
    np.testing.assert_array_equal(as_numpy(got), tied.detach().numpy())
    assert view(torch.nn.Parameter(torch.ones(3)), "D").framework == "torch"
    assert view(torch.empty(0, 3), "x").shape == (0, 3)
    far = torch.empty(1).as_strided((1, 1), (2**40, 1))
    assert view(far, "x").strides == (2**40, 1)


def test_torch_refusals(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got complex64$"):
        view(torch.zeros(2, dtype=torch.complex64), "x")
    with pytest.raises(TypeError, match=r"^x: expected a strided tensor with memory, .*sparse_coo"):
        view(torch.eye(3).to_sparse(), "x")
    with pytest.raises(TypeError, match=r"^x: expected a tensor on the CPU or CUDA, .*meta"):
        view(torch.zeros(3, device="meta"), "x")
    negated = torch.ones(3, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with pytest.raises(TypeError, match=r"^x: expected plain values, got a negated view"):
        view(negated, "x")


# JAX


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_is_borrowed(jax: Any, dtype: str) -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        array = jax.numpy.array(VALUES).astype(getattr(jax.numpy, dtype))
    finally:
        jax.config.update("jax_enable_x64", False)
    got = view(array, "x")
    assert got.ptr == array.unsafe_buffer_pointer()
    assert (got.shape, got.strides, got.dtype) == ((2, 3), (3, 1), dtype)
    assert (got.device, got.readonly, got.framework) == (CPU, True, "jax")
    assert not as_numpy(got).flags.writeable
    np.testing.assert_array_equal(as_numpy(got).astype(float), np.asarray(array).astype(float))


def test_jax_is_no_inplace_target(jax: Any) -> None:
    with pytest.raises(TypeError) as error:
        require_inplace(view(jax.numpy.zeros(3), "state"), "replayssm_cupy.jax_ops.step")
    assert str(error.value) == (
        "state: expected an array to change in place, got a JAX array, which is immutable; "
        "use replayssm_cupy.jax_ops.step"
    )


def test_jax_work_is_finished_before_the_view(jax: Any) -> None:
    step = jax.jit(lambda a: (a @ a) / a.shape[0])
    array = jax.numpy.ones((500, 500))
    for _ in range(5):
        array = step(array)
    np.testing.assert_array_equal(as_numpy(view(array, "x")), np.ones((500, 500)))


def test_jax_refusals(jax: Any) -> None:
    def trace(array: Any) -> Any:
        with pytest.raises(
            TypeError, match=r"^x: expected a JAX array with values, got one traced"
        ):
            view(array, "x")
        return array

    jax.jit(trace)(jax.numpy.zeros(3))
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got complex64$"):
        view(jax.numpy.zeros(3, jax.numpy.complex64), "x")
    gone = jax.numpy.zeros(3)
    gone.delete()
    with pytest.raises(ValueError, match=r"^x: expected a live JAX array"):
        view(gone, "x")


# CuPy, which needs no driver for an array over a made-up pointer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_cupy_is_borrowed(cupy: Any, dtype: str) -> None:
    memory = cupy.cuda.UnownedMemory(0x7F0000000000, 1 << 20, None, 1)
    pointer = cupy.cuda.MemoryPointer(memory, 64)
    size = arrays.itemsize(dtype)
    array = cupy.ndarray(
        (4, 8), arrays.numpy_dtype(dtype), memptr=pointer, strides=(16 * size, 2 * size)
    )
    got = view(array, "x")
    assert (got.ptr, got.shape, got.strides) == (0x7F0000000040, (4, 8), (16, 2))
    assert (got.dtype, got.device) == (dtype, Device("cuda", 1))
    assert (got.readonly, got.framework) == (False, "cupy")
    with pytest.raises(ValueError, match=r"^x: expected memory of the host, got cuda:1$"):
        as_numpy(got)


# Outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_outputs_on_the_host(torch: Any, jax: Any, dtype: str) -> None:
    sources = [
        (np.zeros(1, np.float32), np.ndarray),
        (Producer(np.zeros(1, np.float32), True), np.ndarray),
        (torch.zeros(1), torch.Tensor),
        (jax.numpy.zeros(1), jax.Array),
    ]
    for source, cls in sources:
        like = view(source, "x")
        out = arrays.empty_like_framework(like, (16, 3), dtype, CPU)
        target = view(out, "out")
        require_inplace(target, "nothing")
        assert (target.shape, target.strides, target.dtype) == ((16, 3), (3, 1), dtype)
        as_numpy(target)[...] = np.arange(48).reshape(16, 3)
        done = to_framework(out, like)
        assert isinstance(done, cls)
        got = view(done, "out")
        assert (got.shape, got.dtype) == ((16, 3), dtype)
        np.testing.assert_array_equal(as_numpy(got).astype(int), np.arange(48).reshape(16, 3))


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_allocators(torch: Any, dtype: str, quick: bool, monkeypatch: Any) -> None:
    """New memory each time, row-major whatever the strides of the array it is to be like."""
    if not quick:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    like = view(torch.zeros(3, 2, 5, dtype=getattr(torch, dtype)).transpose(0, 1), "x")
    make = arrays.allocator_like(like)
    made = [view(make(), "out") for _ in range(3)]
    assert {(out.shape, out.strides, out.dtype, out.device, out.framework) for out in made} == {
        ((2, 3, 5), (15, 5, 1), dtype, CPU, "torch")
    }
    assert len({out.ptr for out in made}) == 3
    assert (arrays._quick_torch_allocator(like) is not None) == quick


def test_host_needs_no_stream_and_no_guard() -> None:
    assert arrays.current_stream(view(np.zeros(1, np.float32), "x")) == 0
    with arrays.device_guard(CPU):
        pass


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, numpy as np\n"
        "from replayssm_cupy import arrays\n"
        "arrays.as_numpy(arrays.view(np.zeros(3, np.float32), 'x'))\n"
        "arrays.dtype_name('bfloat16')\n"
        "print([name for name in ('torch', 'jax', 'cupy') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


# On a GPU


def test_streams_and_devices_on_cuda(cuda_torch: Any, cupy: Any) -> None:
    torch = cuda_torch
    tensor = torch.arange(6, dtype=torch.bfloat16, device="cuda").view(2, 3)
    got = view(tensor, "x")
    assert (got.ptr, got.device) == (tensor.data_ptr(), Device("cuda", tensor.get_device()))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert arrays.current_stream(got) == stream.cuda_stream
    array = cupy.arange(3, dtype=np.float32)
    other = cupy.cuda.Stream(non_blocking=True)
    with other:
        assert arrays.current_stream(view(array, "x")) == other.ptr
    last = Device("cuda", torch.cuda.device_count() - 1)
    before = torch.cuda.current_device()
    with arrays.device_guard(last):
        assert torch.cuda.current_device() == last.index
    assert torch.cuda.current_device() == before
    for source in (tensor, array):
        like = view(source, "x")
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            out = view(arrays.empty_like_framework(like, (2, 3), dtype, like.device), "out")
            assert (out.framework, out.dtype, out.device) == (like.framework, dtype, like.device)


def test_jax_on_cuda(cupy: Any, jax: Any) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("no CUDA device that JAX can use")
    array = jax.numpy.arange(12, dtype=jax.numpy.bfloat16).reshape(3, 4)
    array = jax.device_put(array, jax.devices()[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        like = view(array, "x")
        assert (like.ptr, like.device.kind) == (array.unsafe_buffer_pointer(), "cuda")
        out = arrays.empty_like_framework(like, (3, 4), "bfloat16", like.device)
        cupy.cuda.runtime.memcpyAsync(view(out, "out").ptr, like.ptr, 24, 3, stream.ptr)
        done = to_framework(out, like)
    assert done.dtype == jax.numpy.bfloat16
    assert done.unsafe_buffer_pointer() == view(out, "out").ptr
    np.testing.assert_array_equal(np.asarray(done), np.asarray(array))


def test_a_table_is_there_when_the_host_goes_on(monkeypatch):
    """Streams that do not follow the one it was copied on may read it."""
    waited = []

    class CuPy:
        def asarray(self, array: np.ndarray, blocking: bool = False) -> np.ndarray:
            waited.append(blocking)
            return array

    monkeypatch.setattr(arrays, "_cupy", CuPy)
    monkeypatch.setattr(arrays, "device_guard", lambda device: contextlib.nullcontext())
    like = view(np.zeros(1, np.float32), "like")._replace(
        framework="cupy", device=Device("cuda", 0)
    )
    arrays.from_numpy(np.zeros(3, np.int32), like)
    assert waited == [True]
