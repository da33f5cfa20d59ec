"""Bad input: one clear line of the right type, and not a byte is written."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from bad_input import (
    Call,
    advance_ring,
    checkpointing_ssu,
    eight_bit,
    eight_bit_reset,
    eight_bit_stack,
    from_arrays,
    load_state,
    named,
    path,
    pools,
    ragged,
    recorder,
    reset_slots,
    room,
    selective_state_update,
    stack_advance,
    stack_load_state,
    stack_reset,
    step,
)

from replayssm_cupy import decode, plan
from replayssm_cupy.keys import AdvanceRingKey

__all__ = ["path", "recorder"]  # fixtures


# --- The calls ------------------------------------------------------------------------------------


def eight_bit_ssu() -> Call:
    call = eight_bit(checkpointing_ssu())
    call.arguments |= {"rand_seed": np.array([3]), "force_flush": np.ones(3, np.bool_)}
    return call


def eight_bit_update() -> Call:
    call = eight_bit(selective_state_update())
    call.arguments["rand_seed"] = np.array([3])
    return call


def eight_bit_load() -> Call:
    return eight_bit(load_state())


CALLS: tuple[Callable[[], Call], ...] = (
    checkpointing_ssu,
    selective_state_update,
    advance_ring,
    reset_slots,
    load_state,
    from_arrays,
    step,
    stack_load_state,
    stack_advance,
    stack_reset,
    eight_bit_ssu,
    eight_bit_update,
    eight_bit_reset,
    eight_bit_load,
    eight_bit_stack,
    ragged,
)
POOLS = {"state", "x_cache", "B_cache", "dt_cache"}
CURSORS = {"ring_start", "prev_num_accepted_tokens"}
# Of each call: the arrays that it writes, and those that its kernel reads in 16-byte vectors.
WRITTEN = {
    "checkpointing_ssu": {*POOLS, "out"},
    "selective_state_update": {"state", "out"},
    "advance_ring": {*CURSORS, "rand_seed"},
    "reset_slots": {*CURSORS, "states[0]", "states[1]"},
    "load_state": {"state"},
    "from_arrays": {*CURSORS, *pools("[0]"), *pools("[1]")},
    "step": {"out"},
    "eight_bit_ssu": {*POOLS, "out", "state_scale"},
    "eight_bit_update": {"state", "out", "state_scale"},
    "eight_bit_reset": {f"{n}[{i}]" for n in ("states", "state_scales") for i in range(2)},
    "eight_bit_load": {"state", "state_scale"},
    "eight_bit_stack": {f"{n}[{i}]" for n in ("states", "state_scales") for i in range(2)},
    "ragged": {*POOLS, "out"},
}
VECTORS = {
    "checkpointing_ssu": {"state", "x_cache", "B_cache", "x", "B", "C", "z", "out"},
    "selective_state_update": {"state", "B", "C"},
    "reset_slots": {"states[0]", "states[1]"},
    "from_arrays": {f"{n}[{i}]" for n in ("states", "x_caches", "B_caches") for i in range(2)},
    "step": {"x", "B", "C", "z", "out"},
    "eight_bit_ssu": {"state", "x_cache", "B_cache", "x", "B", "C", "z", "out"},
    "eight_bit_update": {"state", "B", "C"},
    "eight_bit_reset": {"states[0]", "states[1]"},
    "eight_bit_stack": {f"{n}[{i}]" for n in ("states", "x_caches", "B_caches") for i in range(2)},
    "ragged": {"state", "x_cache", "B_cache", "x", "B", "C", "z", "out"},
}
PACKED = {
    **VECTORS,
    "eight_bit_ssu": {"state", "state_scale"},
    "eight_bit_update": {"state", "state_scale"},
    "eight_bit_reset": {f"{n}[{i}]" for n in ("states", "state_scales") for i in range(2)},
    "eight_bit_load": {"state", "state_scale", "source"},
    "eight_bit_stack": {f"{n}[{i}]" for n in ("states", "state_scales") for i in range(2)},
    "ragged": {"x", "B", "C", "z", "out", "cu_seqlens"},
    "selective_state_update": {"state", "x", "B", "C", "z", "out"},
    "load_state": {"state", "source"},
    "stack_load_state": {"state"},
}


def arguments_of(
    table: dict[str, set[str]] | None = None, *, rest: bool = False
) -> pytest.MarkDecorator:
    """A test for every array argument of every call that the table lists, or with `rest` of those
    that it does not list."""
    cases = []
    for make in CALLS:
        arrays = {k for k, a in make().arguments.items() if isinstance(a, np.ndarray)}
        listed = arrays if table is None else table.get(make.__name__, set())
        for name in sorted(arrays - listed if rest else arrays & listed):
            cases.append(pytest.param(make, name, id=f"{make.__name__}-{name}"))
    return pytest.mark.parametrize(("make", "name"), cases)


@pytest.mark.parametrize("make", CALLS)
def test_good_arguments_pass(make, path):
    call = make()
    call()
    if path is not None:
        assert len(path.plans) == (0 if make in (from_arrays, eight_bit_stack) else 1)
        # ctypes takes a misspelt field of a record without a word.
        assert not any(vars(made.record) for made in (*path.plans, *decode._plans.values()))


# --- Every argument of every call -----------------------------------------------------------------


@arguments_of()
@pytest.mark.parametrize("value", [[1.0], "text", 3.5], ids=["list", "str", "float"])
def test_wrong_kind(make, name, value):
    call = make()
    call.arguments[name] = value
    got = type(value).__name__
    call.refused(TypeError, f"{named(name)}expected an array of PyTorch, .* or NumPy, got {got}$")


@arguments_of()
def test_wrong_rank(make, name, path):
    if name == "rand_seed":
        pytest.skip("one element of any rank will do")
    array = make().arguments[name]
    fewer = array[0] if name != "x" else array[0, 0]  # rank 3 is one token
    for wrong in (array[None], np.array(fewer)):
        call = make()
        call.arguments[name] = wrong
        got = re.escape(str(wrong.shape))
        call.refused(ValueError, rf"{named(name)}expected \(.+\) = \(.+\), got {got}($| \()")


@arguments_of()
def test_wrong_shape(make, name, path):
    """One axis too long: whichever argument is named, the message tells who set the size."""
    array = make().arguments[name]
    free = {selective_state_update: "state", load_state: "state"}  # with any number of slots
    if make in (reset_slots, stack_reset, eight_bit_reset) and name == "slots":
        pytest.skip("any number of slots may be reset")
    for axis in range(free.get(make) == name, array.ndim):
        shape = tuple(size + (axis == i) for i, size in enumerate(array.shape))
        call = make()
        call.arguments[name] = np.ones(shape, array.dtype)
        call.refused(ValueError, r"^\S+: expected .*, got .*")
        with pytest.raises(ValueError, match=rf"(^|\W){re.escape(name)}(\W|$)"):
            call()


@arguments_of()
@pytest.mark.parametrize("dtype", ["int16", "float64", "complex64", "uint64"])
def test_wrong_dtype(make, name, dtype, path):
    call = make()
    call.arguments[name] = np.ones_like(call.arguments[name], dtype)
    if name in ("x", "num_accepted", "query_lens", "slots", "state_batch_indices"):
        message = "expected one of .*, "
    else:
        message = "expected .*"
    call.refused(TypeError, f"{named(name)}{message}got {dtype}$")


@arguments_of()
def test_floats_for_integers_and_back(make, name, path):
    call = make()
    array = call.arguments[name]
    integers = array.dtype.kind in "iub" and array.dtype != np.int8
    wrong = "float32" if integers else "int32"
    call.arguments[name] = array.astype(wrong)
    call.refused(TypeError, f"{named(name)}expected .*got {wrong}$")


@arguments_of()
def test_wrong_device(make, name):
    """A CuPy array beside NumPy arrays: its pointer is made up, and nobody may follow it."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    call = make()
    good = call.arguments[name]
    memory = cupy.cuda.UnownedMemory(1 << 40, good.nbytes, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    call.arguments[name] = cupy.ndarray(good.shape, good.dtype, pointer)
    call.refused(ValueError, r"^\S+: expected device (cpu|cuda:0) as \S+, got (cpu|cuda:0)$")
    if name == "x":  # and before an output is allocated there
        call.arguments.pop("out")
        call.refused(ValueError, r"^x: expected device cpu as \S+, got cuda:0$")


@arguments_of(WRITTEN)
def test_stride_0_in_what_is_written(make, name, path):
    call = make()
    array = call.arguments[name]
    for axis in np.flatnonzero(np.array(array.shape) > 1):
        strides = tuple(0 if axis == i else n for i, n in enumerate(array.strides))
        tied = np.lib.stride_tricks.as_strided(array, strides=strides, writeable=True)
        call.arguments[name] = tied
        call.refused(ValueError, f"{named(name)}expected a stride of axis {axis} other than 0 .*")


@arguments_of()
def test_stride_between_elements(make, name, path):
    """Fields of packed records: the stride is no multiple of the element."""
    call = make()
    array = call.arguments[name]
    if array.itemsize == 1 or array.size == 1:
        pytest.skip("one byte is a multiple of everything, and one element has no stride")
    call.arguments[name] = np.ones(array.shape, [("value", array.dtype), ("odd", "u1")])["value"]
    message = f"expected strides in multiples of {array.itemsize} bytes, got "
    call.refused(ValueError, named(name) + message)


@arguments_of(WRITTEN)
def test_read_only_targets(make, name, path):
    call = make()
    call.arguments[name] = call.arguments[name].copy()
    call.arguments[name].flags.writeable = False
    message = "expected an array to change in place, got a read-only array; use an array that owns"
    call.refused(TypeError, named(name) + message)


@arguments_of(WRITTEN)
def test_jax_targets(make, name, path):
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    if name == "rand_seed":
        pytest.skip("JAX has no int64 by default")
    call = make()
    call.arguments[name] = jnp.asarray(call.arguments[name])
    before = np.array(call.arguments[name])
    message = (
        "expected an array to change in place, got a JAX array, which is immutable; use "
        "replayssm_cupy.jax_ops, or "
    )
    call.refused(TypeError, named(name) + message)
    assert np.array(call.arguments[name]).tobytes() == before.tobytes()


def test_stack_refuses_jax_arrays_that_it_would_have_to_keep():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    call = from_arrays()
    for name, array in list(call.arguments.items()):
        if isinstance(array, np.ndarray):
            call.arguments[name] = jnp.asarray(array)
    call.refused(TypeError, r"^states\[0\]: expected an array to change in place, got a JAX array")


# --- What only a kernel asks for: packed axes and alignment ---------------------------------------


@arguments_of(PACKED)
def test_rows_that_are_not_packed(make, name, recorder):
    call = make()
    good = call.arguments[name]
    wide = np.ones((*good.shape[:-1], 2 * good.shape[-1]), good.dtype)
    for wrong in (wide[..., ::2], np.ones_like(good)[..., ::-1]):
        call.arguments[name] = wrong
        call.refused(ValueError, named(name) + r"expected contiguous axes from axis \d on, got ")
    assert not recorder.plans


@arguments_of(VECTORS)
def test_vectors_that_are_not_aligned(make, name, recorder):
    call = make()
    good = call.arguments[name]
    call.arguments[name] = room(good, good.itemsize)
    call.refused(ValueError, named(name) + "expected an address aligned to 16 bytes, got 0x")
    if len(good) == 1:
        return  # a stride that leads nowhere
    call.arguments[name] = room(good, 0, gap=1)
    elements = 16 // good.itemsize
    message = rf"expected a stride of axis 0 in multiples of 16 bytes \({elements} elements\), got "
    call.refused(ValueError, named(name) + message)
    call.arguments[name] = room(good, 16, gap=elements)
    call()
    assert len(recorder.plans) == (0 if make in (from_arrays, eight_bit_stack) else 1)


@arguments_of(VECTORS, rest=True)
def test_elements_that_are_not_aligned(make, name, recorder):
    call = make()
    good = call.arguments[name]
    if good.itemsize > 1:
        call.arguments[name] = room(good, 1)
        message = f"expected an address aligned to {good.itemsize} bytes, got 0x"
        call.refused(ValueError, named(name) + message)
    call.arguments[name] = room(good, good.itemsize, gap=name != "cu_seqlens")
    call()
    assert len(recorder.plans) == (0 if make in (from_arrays, eight_bit_stack) else 1)


def test_neither_matters_on_the_host():
    call = checkpointing_ssu()
    for name in VECTORS["checkpointing_ssu"]:
        call.arguments[name] = room(call.arguments[name], call.arguments[name].itemsize, gap=1)
    other = checkpointing_ssu()
    assert call().tobytes() == other().tobytes()
    assert call.bytes() == other.bytes()


def test_float32_activations_have_no_replay_kernel(recorder):
    call = checkpointing_ssu()
    for name in ("x", "B", "C", "z", "out", "x_cache", "B_cache"):
        call.arguments[name] = call.arguments[name].astype(np.float32)
    call.refused(TypeError, "^x: expected one of bfloat16, float16, got float32$")
    call = from_arrays()
    for name in ("x_caches[0]", "B_caches[0]", "x_caches[1]", "B_caches[1]"):
        call.arguments[name] = call.arguments[name].astype(np.float32)
    message = r"^x_caches\[0\]: expected one of bfloat16, float16 on cpu, got float32$"
    call.refused(TypeError, message)


def test_the_largest_grid():
    message = f"^batch: expected at most {2**31 - 1} .* pairs in a call, got {2**31}$"
    with pytest.raises(ValueError, match=message):
        record = plan.AdvanceRingParams()
        plan.Plan(AdvanceRingKey(), (2**31, 1, 1), (1, 1, 1), record, plan.Device("cuda"))
