"""Bad input: one clear line of the right type, and not a byte is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import replayssm_cupy as ssm
from replayssm_cupy import compiler, decode, plan
from replayssm_cupy.keys import AdvanceRingKey

ROOT = Path(__file__).parents[1]
BF16 = np.dtype(ml_dtypes.bfloat16)
# Sizes that differ wherever they may, so that no message can mix two of them up.
SIZES = {"S": 6, "batch": 3, "T": 2, "H": 4, "G": 2, "P": 64, "N": 128, "L": 8}


# --- The calls ----------------------------------------------------------------------------------


@dataclass
class Call:
    """A public function with good arguments; an element of a list is called "states[1]"."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self) -> Any:
        lists: dict[str, list[Any]] = {}
        plain: dict[str, Any] = {}
        for name, value in self.arguments.items():
            if name.endswith("]"):
                lists.setdefault(name.split("[")[0], []).append(value)
            else:
                plain[name] = value
        return self.function(**lists, **plain)

    def bytes(self) -> dict[str, bytes]:
        arrays = {k: a for k, a in self.arguments.items() if isinstance(a, np.ndarray)}
        stack = getattr(self.function, "__self__", None)
        if isinstance(stack, ssm.LayerStack):
            cursors = [stack.ring_start, stack.prev_num_accepted_tokens]
            owned = [*stack.states, *stack.x_caches, *stack.B_caches, *stack.dt_caches, *cursors,
                     *stack.state_scales]  # fmt: skip
            arrays |= {f"the stack's {i}": array for i, array in enumerate(owned)}
        return {name: array.tobytes() for name, array in arrays.items()}

    def refused(self, error: type[Exception], message: str) -> None:
        """The call ends in one line of exactly this type, and every array is as it was."""
        before = self.bytes()
        with pytest.raises(error, match=message) as caught:
            self()
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)
        changed = [name for name, content in self.bytes().items() if content != before[name]]
        assert not changed, f"written before the error: {changed}"


def pools(layer: str = "", **sizes: int) -> dict[str, np.ndarray]:
    s = SIZES | sizes
    names = ("states", "x_caches", "B_caches", "dt_caches") if layer else (
        "state", "x_cache", "B_cache", "dt_cache")  # fmt: skip
    arrays = (
        np.ones((s["S"], s["H"], s["P"], s["N"]), np.float32),
        np.ones((s["S"], s["H"], s["L"], s["P"]), BF16),
        np.ones((s["S"], s["G"], s["L"], s["N"]), BF16),
        np.ones((s["S"], s["H"], s["L"]), np.float32),
    )
    return {name + layer: array for name, array in zip(names, arrays, strict=True)}


def cursors(**sizes: int) -> dict[str, np.ndarray]:
    slots = (SIZES | sizes)["S"]
    return {
        "ring_start": np.full(slots, 1, np.int32),
        "prev_num_accepted_tokens": np.full(slots, 5, np.int32),
    }


def tokens(**sizes: int) -> dict[str, np.ndarray]:
    s = SIZES | sizes
    batch, T, H = s["batch"], s["T"], s["H"]
    return {
        "x": np.ones((batch, T, H, s["P"]), BF16),
        "dt": np.ones((batch, T, H), np.float32),
        "A": -np.ones(H, np.float32),
        "B": np.ones((batch, T, s["G"], s["N"]), BF16),
        "C": np.ones((batch, T, s["G"], s["N"]), BF16),
        "D": np.ones(H, np.float32),
        "z": np.ones((batch, T, H, s["P"]), BF16),
        "dt_bias": np.ones(H, np.float32),
        "out": np.full((batch, T, H, s["P"]), 7, BF16),
    }


SLOTS = np.array([4, 0, 2], np.int32)


def label(value: Any) -> str:
    """The name of a case: its changes, without the error and the message."""
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""


def checkpointing_ssu(**sizes: int) -> Call:
    arguments = {**pools(**sizes), **cursors(**sizes), **tokens(**sizes)}
    return Call(ssm.checkpointing_ssu, {**arguments, "state_batch_indices": SLOTS.copy()})


def selective_state_update(**sizes: int) -> Call:
    arguments = {"state": pools(**sizes)["state"], **tokens(**sizes)}
    return Call(ssm.selective_state_update, {**arguments, "state_batch_indices": SLOTS.copy()})


def advance_ring() -> Call:
    step = {
        "num_accepted": np.array([1, 2, 0], np.int32),
        "query_lens": np.full(3, 2, np.int32),
        "slots": SLOTS.copy(),
        "reset": np.zeros(3, np.bool_),
        "force_flush": np.zeros(3, np.uint8),
        "rand_seed": np.array([3]),
        "max_window": 6,
        "ring_buffer_len": 8,
    }
    return Call(ssm.advance_ring, {**cursors(), **step})


def reset_slots() -> Call:
    states = {f"states[{layer}]": pools()["state"] for layer in range(2)}
    return Call(ssm.reset_slots, {**cursors(), **states, "slots": SLOTS.copy()})


def load_state() -> Call:
    source = np.ones((3, 4, 64, 128), np.float16)
    arguments = {"state": pools()["state"], "source": source, "slots": SLOTS.copy()}
    return Call(ssm.load_state, arguments)


def from_arrays() -> Call:
    arguments = {**pools("[0]"), **pools("[1]"), **cursors(), "npredicted": 2}
    return Call(ssm.LayerStack.from_arrays, arguments)


def a_stack() -> ssm.LayerStack:
    stack = from_arrays()()
    assert isinstance(stack, ssm.LayerStack)
    return stack


def step() -> Call:
    return Call(a_stack().step, {"layer": 1, **tokens(), "slots": SLOTS.copy()})


def stack_load_state() -> Call:
    state = np.ones((3, 4, 64, 128), np.float16)
    return Call(a_stack().load_state, {"layer": 1, "slots": SLOTS.copy(), "state": state})


def stack_advance() -> Call:
    accepted = np.array([1, 2, 0], np.int32)
    return Call(a_stack().advance, {"slots": SLOTS.copy(), "num_accepted": accepted})


def stack_reset() -> Call:
    return Call(a_stack().reset, {"slots": SLOTS.copy()})


def eight_bit(call: Call, *layers: str) -> Call:
    """The same call on int8 states, with scales."""
    for layer in layers or ("",):
        name = "states" + layer if layer else "state"
        codes = call.arguments[name].astype(np.int8)
        call.arguments[name] = codes
        call.arguments[name.replace("state", "state_scale")] = np.ones(codes.shape[:3], np.float32)
    return call


def eight_bit_ssu() -> Call:
    call = eight_bit(checkpointing_ssu())
    call.arguments |= {"rand_seed": np.array([3]), "force_flush": np.ones(3, np.bool_)}
    return call


def eight_bit_update() -> Call:
    call = eight_bit(selective_state_update())
    call.arguments["rand_seed"] = np.array([3])
    return call


def eight_bit_reset() -> Call:
    return eight_bit(reset_slots(), "[0]", "[1]")


def eight_bit_load() -> Call:
    return eight_bit(load_state())


def eight_bit_stack() -> Call:
    return eight_bit(from_arrays(), "[0]", "[1]")


def ragged() -> Call:
    """Three sequences of 2, 0 and 1 tokens."""
    call = checkpointing_ssu()
    for name in ("x", "dt", "B", "C", "z", "out"):
        array = call.arguments[name]
        call.arguments[name] = np.ascontiguousarray(array.reshape(1, 6, *array.shape[2:])[:, :3])
    call.arguments |= {"cu_seqlens": np.array([0, 2, 2, 3], np.int32), "max_seqlen": 2}
    return call


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


class Recorder:
    """A launcher that only counts."""

    def __init__(self) -> None:
        self.plans: list[plan.Plan] = []

    def launch(self, plan: plan.Plan, stream: int) -> None:
        self.plans.append(plan)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """NumPy arrays go to kernels that do nothing, after all the checks of a kernel."""
    launcher = Recorder()
    monkeypatch.setitem(plan.launchers, "cpu", launcher)
    return launcher


@pytest.fixture(params=["host", "kernel"])
def path(request: pytest.FixtureRequest) -> Recorder | None:
    """Both paths give the same answer to most mistakes."""
    return request.getfixturevalue("recorder") if request.param == "kernel" else None


@pytest.mark.parametrize("make", CALLS)
def test_good_arguments_pass(make, path):
    call = make()
    call()
    if path is not None:
        assert len(path.plans) == (0 if make in (from_arrays, eight_bit_stack) else 1)
        # ctypes takes a misspelt field of a record without a word.
        assert not any(vars(made.record) for made in (*path.plans, *decode._plans.values()))


# --- Every argument of every call ----------------------------------------------------------------


def named(name: str) -> str:
    return "^" + re.escape(name) + ": "


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


# --- What only a kernel asks for: packed axes and alignment --------------------------------------


def room(array: np.ndarray, offset: int, *, gap: int = 0) -> np.ndarray:
    """A copy `offset` bytes behind a multiple of 256, with `gap` elements after each first row."""
    row = int(np.prod(array.shape[1:], dtype=int))
    raw = np.zeros(256 + offset + len(array) * (row + gap) * array.itemsize, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    strides = ((row + gap) * array.itemsize, *array.strides[1:])
    result = np.ndarray(array.shape, array.dtype, raw, start, strides)
    result[...] = array
    return result


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


# --- Sizes and combinations ----------------------------------------------------------------------

DECODE = (checkpointing_ssu, selective_state_update)


@pytest.mark.parametrize("make", DECODE)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"P": 72}, "state: expected head_dim one of 64, 80, 96, 128, got 72 "
                    "(nearest supported: 64 and 80)"),
        ({"P": 256}, "state: expected head_dim one of 64, 80, 96, 128, got 256 "
                     "(nearest supported: 96 and 128)"),
        ({"N": 100}, "state: expected dstate one of 64, 128, 256, got 100 "
                     "(nearest supported: 64 and 128)"),
        ({"N": 16}, "state: expected dstate one of 64, 128, 256, got 16 "
                    "(nearest supported: 64 and 128)"),
        ({"T": 17, "L": 40}, "x: expected npredicted from 1 to 16, got 17"),
        ({"T": 0}, "x: expected npredicted from 1 to 16, got 0"),
        ({"G": 3}, "B: expected ngroups that divides nheads = 4, got 3"),
        ({"G": 0}, "B: expected ngroups that divides nheads = 4, got 0"),
    ],
    ids=label,
)  # fmt: skip
def test_unsupported_sizes(make, sizes, message, path):
    make(**sizes).refused(ValueError, f"^{re.escape(message)}$")


@pytest.mark.parametrize(
    ("sizes", "max_window", "message"),
    [
        ({"T": 5}, None, "x_cache: expected ring_buffer_len >= 2 * npredicted = 10, got 8"),
        ({"T": 5}, 3, "x_cache: expected ring_buffer_len >= 2 * npredicted = 10, got 8"),
        ({"L": 20}, None, "max_window: expected ring_buffer_len - npredicted from npredicted = 2 "
                          "to 16, got 18"),
        ({"L": 20}, 17, "max_window: expected max_window from npredicted = 2 to 16, got 17"),
        ({"T": 4}, 3, "max_window: expected max_window from npredicted = 4 to 16, got 3"),
        ({}, 0, "max_window: expected max_window from npredicted = 2 to 16, got 0"),
        ({}, -6, "max_window: expected max_window from npredicted = 2 to 16, got -6"),
        ({}, 7, "max_window: expected max_window + npredicted <= ring_buffer_len = 8, got 7 + 2"),
    ],
)  # fmt: skip
def test_windows(sizes, max_window, message, path):
    call = checkpointing_ssu(**sizes)
    call.arguments["max_window"] = max_window
    call.refused(ValueError, f"^{re.escape(message)}$")


@pytest.mark.parametrize("make", [*DECODE, step])
@pytest.mark.parametrize("name", ["dt", "A", "D", "dt_bias"])
def test_one_value_per_head_only(make, name, path):
    """A full array where a tied view is meant would be read wrongly."""
    call = make()
    tail = (64, 128) if name == "A" else (64,)
    call.arguments[name] = np.ones((*call.arguments[name].shape, *tail), np.float32)
    message = r"expected stride 0 over head_dim.* \(one value per head\) or the plain form .*, got"
    call.refused(ValueError, named(name) + message)


@pytest.mark.parametrize("make", [*DECODE, step])
@pytest.mark.parametrize("name", ["B", "C", "z", "out"])
def test_activations_of_two_types(make, name, path):
    call = make()
    call.arguments[name] = call.arguments[name].astype(np.float16)
    expected = "one of bfloat16, float32" if name == "out" else "bfloat16 as x"
    call.refused(TypeError, f"{named(name)}expected {expected}, got float16$")


@pytest.mark.parametrize("make", [checkpointing_ssu, step])
def test_rings_of_another_type(make, path):
    call = make()
    for name in ("x", "B", "C", "z", "out"):
        call.arguments[name] = call.arguments[name].astype(np.float16)
    call.refused(TypeError, r"^x_cache(s\[1\])?: expected float16 as x, got bfloat16$")


@pytest.mark.parametrize("make", [*DECODE, advance_ring, load_state, step, stack_load_state,
                                  stack_advance])  # fmt: skip
def test_more_rows_than_slots(make, path):
    """Without an array of slots, row b is slot b."""
    call = make()
    for name in ("slots", "state_batch_indices"):
        call.arguments.pop(name, None)
    if make not in DECODE:
        call.arguments["slots"] = None
    for name, array in list(call.arguments.items()):
        if isinstance(array, np.ndarray) and array.ndim and array.shape[0] == SIZES["batch"]:
            call.arguments[name] = np.ones((7, *array.shape[1:]), array.dtype)
    message = r"^(state|states\[1\]|ring_start): expected num_slots >= batch = 7 without an array"
    call.refused(ValueError, message + " of slots, got 6$")


@pytest.mark.parametrize("make", [*DECODE, advance_ring, reset_slots, load_state, step,
                                  stack_load_state, stack_advance, stack_reset])  # fmt: skip
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("0", TypeError, "expected an int, got str"),
        (-1.0, TypeError, "expected an int, got float"),
        (None, TypeError, "expected an int, got NoneType"),
        (True, TypeError, "expected an int, got bool"),
        (2**63, ValueError, "expected a 64-bit integer, got 9223372036854775808"),
    ],
    ids=str,
)
def test_pad_slot_id(make, value, error, message):
    call = make()
    call.arguments["pad_slot_id"] = value
    call.refused(error, f"^pad_slot_id: {message}$")


@pytest.mark.parametrize("make", [*DECODE, step])
@pytest.mark.parametrize("value", ["drop", None, True])
def test_pad_output(make, value, path):
    call = make()
    call.arguments["pad_output"] = value
    call.refused(ValueError, f'^pad_output: expected "zero" or "keep", got {value!r}$')


@pytest.mark.parametrize("value", ["6", 6.0, True, [6]], ids=str)
@pytest.mark.parametrize("make", [checkpointing_ssu, advance_ring, from_arrays])
def test_max_window_of_another_kind(make, value, path):
    call = make()
    call.arguments["max_window"] = value
    call.refused(TypeError, f"^max_window: expected an int, got {type(value).__name__}$")


@pytest.mark.parametrize("make", DECODE)
def test_empty_batch_is_checked_too(make, path):
    call = make(batch=0)
    call.arguments["state_batch_indices"] = np.zeros(0, np.int64)
    call()
    call.arguments["z"] = call.arguments["z"].astype(np.float16)
    call.refused(TypeError, "^z: expected bfloat16 as x, got float16$")
    assert path is None or not path.plans


# --- Scales, seeds and lengths -------------------------------------------------------------------


@pytest.mark.parametrize("make", [*DECODE, load_state])
def test_scales_go_with_eight_bits(make, path):
    call = make()
    call.arguments["state_scale"] = np.ones((6, 4, 64), np.float32)
    message = "state_scale: expected None with states of float32, got an array"
    call.refused(ValueError, f"^{message}$")
    call = eight_bit(make())
    del call.arguments["state_scale"]
    message = "state_scale: expected an array of float32 scales with states of int8, got None"
    call.refused(ValueError, f"^{message}$")


def test_scales_of_lists(path):
    call = eight_bit_reset()
    del call.arguments["state_scales[1]"]
    message = "expected 2 arrays, one for each 8-bit state, got 1"
    call.refused(ValueError, f"^state_scales: {message}$")
    call = reset_slots()
    call.arguments["state_scales[0]"] = np.ones((6, 4, 64), np.float32)
    message = "expected 0 arrays, one for each 8-bit state, got 1"
    call.refused(ValueError, f"^state_scales: {message}$")
    call = eight_bit_stack()
    del call.arguments["state_scales[1]"]
    call.refused(ValueError, r"^state_scales: expected one array per layer \(2\), got 1$")
    del call.arguments["state_scales[0]"]
    message = (
        r"state_scales\[0\]: expected an array of float32 scales with states of int8, got None"
    )
    call.refused(ValueError, f"^{message}$")


@pytest.mark.parametrize("make", DECODE)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rand_seed": np.array([1])}, ValueError,
         "rand_seed: expected None with a float32 state, which is not rounded"),
        ({"rand_seed": np.array([1, 2])}, ValueError,
         r"rand_seed: expected one element, got shape \(2,\)"),
        ({"rand_seed": 1}, TypeError, "rand_seed: expected an array of .*, got int"),
        ({"philox_rounds": 0}, ValueError, "philox_rounds: expected 1 to 10, got 0"),
        ({"philox_rounds": 11}, ValueError, "philox_rounds: expected 1 to 10, got 11"),
        ({"philox_rounds": None}, TypeError, "philox_rounds: expected an int, got NoneType"),
    ],
    ids=label,
)  # fmt: skip
def test_seeds_and_rounds(make, changes, error, message, path):
    call = make()
    call.arguments |= changes
    call.refused(error, f"^{message}$")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_seqlen": None}, ValueError,
         "max_seqlen: expected an int with cu_seqlens and None without, got None with cu_seqlens"),
        ({"cu_seqlens": None}, ValueError,
         "max_seqlen: expected an int with cu_seqlens and None without, got 2 without cu_seqlens"),
        ({"max_seqlen": "2"}, TypeError, "max_seqlen: expected an int, got str"),
        ({"max_seqlen": 0}, ValueError, "max_seqlen: expected 1 to 16, got 0"),
        ({"max_seqlen": 17}, ValueError, "max_seqlen: expected 1 to 16, got 17"),
        ({"max_seqlen": 5}, ValueError,
         r"x_cache: expected ring_buffer_len >= 2 \* npredicted = 10, got 8"),
        ({"cu_seqlens": np.zeros(0, np.int32)}, ValueError,
         r"cu_seqlens: expected \(batch \+ 1,\) with at least one element, got \(0,\)"),
        ({"x": np.ones((3, 4, 64), BF16)}, ValueError,
         r"x: expected \(rows, tokens, nheads, head_dim\) = .*, got \(3, 4, 64\).*"),
        ({"d_split": 3}, ValueError, "d_split: expected None, 1 or 2, got 3"),
        ({"check": "all"}, ValueError, 'check: expected False, True or "finite", got \'all\''),
    ],
    ids=label,
)  # fmt: skip
def test_ragged_values(changes, error, message, path):
    call = ragged()
    call.arguments |= changes
    call.refused(error, f"^{message}$")


def test_ragged_steps_of_a_stack(path):
    stack, good = a_stack(), ragged().arguments
    names = ("x", "dt", "A", "B", "C", "out", "cu_seqlens", "max_seqlen")
    given = {"layer": 0, **{name: good[name] for name in names}, "slots": SLOTS.copy()}
    long = Call(stack.step, {**given, "max_seqlen": 3})
    long.refused(ValueError, "^x: expected at most npredicted = 2 tokens, got 3$")
    without = Call(stack.step, {**given, "max_seqlen": None})
    without.refused(ValueError, "^max_seqlen: expected an int with cu_seqlens and None without, ")
    stack.step(**given)
    advance = Call(stack.advance, {"slots": SLOTS, "num_accepted": np.zeros(3, np.int32)})
    advance.refused(ValueError, "^query_lens: expected lengths .* variable length, got None$")


@pytest.mark.parametrize("A", [None, [np.ones(4, np.float32)], np.ones((2, 4), np.float32)],
                         ids=["None", "one", "array"])  # fmt: skip
def test_flush_slots_wants_the_decays_of_every_layer(A, path):
    got = {list: "1", np.ndarray: "ndarray"}.get(type(A), "NoneType")
    call = Call(a_stack().flush_slots, {"A": A})
    call.refused(ValueError, f"^A: expected a list of 2 arrays, got {got}$")


# --- Values that only the host can look at -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ring_start", -1, "expected values from 0 to 7, got -1 at slot 2"),
        ("ring_start", 8, "expected values from 0 to 7, got 8 at slot 2"),
        ("prev_num_accepted_tokens", -1, "expected values from 0 to max_window = 6, got -1 at"),
        ("prev_num_accepted_tokens", 7, "expected values from 0 to max_window = 6, got 7 at"),
    ],
)
@pytest.mark.parametrize("make", [checkpointing_ssu, advance_ring, step, stack_advance])
def test_cursors_out_of_range(make, name, value, message):
    call = make()
    owner = call.arguments if name in call.arguments else vars(call.function.__self__)
    owner[name][[1, 3, 5]] = -7  # slots that the call does not touch
    owner[name][2] = value  # its last row: the rows before it must not be written either
    call.refused(ValueError, f"^{name}: {message}")
    owner[name][2] = 0
    call()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_accepted", 3, r"num_accepted: expected 0 to 2 \(query_lens\), got 3"),
        ("num_accepted", -1, r"num_accepted: expected 0 to 2 \(query_lens\), got -1"),
        ("query_lens", 3, r"query_lens: expected 0 to 2, got 3 at row 2"),
        ("query_lens", -1, r"query_lens: expected 0 to 2, got -1 at row 2"),
    ],
)
def test_counts_out_of_range(name, value, message):
    call = advance_ring()
    call.arguments[name][2] = value
    call.refused(ValueError, f"^{message}$")
    call.arguments["reset"][2] = True  # a new request wins over whatever is left there
    call()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query_lens": 3}, ValueError,
         r"max_window: .* max_window \+ npredicted <= ring_buffer_len = 8, got 6 \+ 3"),
        ({"query_lens": 17}, ValueError, "query_lens: expected 0 to 16, got 17"),
        ({"query_lens": -1}, ValueError, "query_lens: expected 0 to 16, got -1"),
        ({"query_lens": None}, TypeError, "query_lens: expected an .*, got NoneType"),
        ({"query_lens": 2.0}, TypeError, "query_lens: expected an .*, got float"),
        ({"max_window": None}, TypeError, "max_window: expected an int, got NoneType"),
        ({"max_window": 17, "ring_buffer_len": 40}, ValueError, "max_window: expected .*, got 17"),
        ({"max_window": 0}, ValueError, "max_window: expected .*, got 0"),
        ({"max_window": 9}, ValueError, r"max_window: expected .*, got 9 \+ 1"),
        ({"ring_buffer_len": 8.0}, TypeError, "ring_buffer_len: expected an int, got float"),
        ({"ring_buffer_len": 3, "query_lens": 2}, ValueError,
         r"ring_buffer_len: expected ring_buffer_len >= 2 \* npredicted = 4, got 3"),
        ({"reset": np.zeros(3, np.int32)}, TypeError,
         "reset: expected one of bool, uint8, got int32"),
    ],
    ids=label,
)  # fmt: skip
def test_advance_ring_values(changes, error, message, path):
    call = advance_ring()
    call.arguments |= changes
    call.refused(error, f"^{message}$")


def test_states_of_two_types_in_one_reset(path):
    call = reset_slots()
    call.arguments["states[1]"] = call.arguments["states[1]"].astype(np.float16)
    call.refused(TypeError, r"^states\[1\]: expected float32 as states\[0\], got float16$")
    call = reset_slots()
    call.arguments |= {f"states[{n}]": call.arguments["states[0]"] for n in range(2, 200)}
    call.arguments["states[199]"] = call.arguments["states[0]"].astype(np.float16)
    call.refused(TypeError, r"^states\[199\]: expected float32 as states\[0\], got float16$")
    assert path is None or not path.plans


# --- LayerStack ----------------------------------------------------------------------------------

GOOD_STACK: dict[str, Any] = {
    "num_layers": 1,
    "num_slots": 2,
    "nheads": 4,
    "head_dim": 64,
    "ngroups": 2,
    "dstate": 64,
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *[({name: value}, error, f"{name}: expected {expected}, got {got}")
          for name in ("num_layers", "num_slots", "nheads", "head_dim", "ngroups", "dstate",
                       "max_window", "npredicted")
          for value, error, expected, got in (
              (0, ValueError, "at least 1", "0"), (-3, ValueError, "at least 1", "-3"),
              (2.0, TypeError, "an int", "float"), ("2", TypeError, "an int", "str"),
              (True, TypeError, "an int", "bool"), (None, TypeError, "an int", "NoneType"))],
        ({"head_dim": 72}, ValueError,
         r"head_dim: expected one of 64, 80, 96, 128, got 72 \(nearest supported: 64 and 80\)"),
        ({"dstate": 512}, ValueError,
         r"dstate: expected one of 64, 128, 256, got 512 \(nearest supported: 128 and 256\)"),
        ({"ngroups": 3}, ValueError, "ngroups: expected a divisor of nheads = 4, got 3"),
        ({"max_window": 17}, ValueError, "max_window: expected 1 to 16, got 17"),
        ({"npredicted": 17}, ValueError, "npredicted: expected 1 to max_window = 16, got 17"),
        ({"npredicted": 5, "max_window": 4}, ValueError,
         "npredicted: expected 1 to max_window = 4, got 5"),
        ({"state_dtype": "int32"}, TypeError,
         "state_dtype: expected one of float32, bfloat16, float16, int8, float8_e4m3fn, "
         r"float16\+fp8, float16\+nvfp4, got int32"),
        ({"philox_rounds": 0}, ValueError, "philox_rounds: expected 1 to 10, got 0"),
        ({"philox_rounds": 11}, ValueError, "philox_rounds: expected 1 to 10, got 11"),
        ({"philox_rounds": "7"}, TypeError, "philox_rounds: expected an int, got str"),
        ({"state_dtype": "int8", "stochastic_rounding": "yes"}, TypeError,
         "stochastic_rounding: expected a bool or an int, got str"),
        ({"state_dtype": "int8", "stochastic_rounding": 2**63}, ValueError,
         "stochastic_rounding: expected a 64-bit integer, got 9223372036854775808"),
        ({"stochastic_rounding": True}, ValueError,
         "stochastic_rounding: expected False with a float32 state, which is not rounded"),
        ({"state_dtype": "float63"}, TypeError, "state_dtype: expected one of .*, got float63"),
        ({"activation_dtype": np.float64}, TypeError, "activation_dtype: expected one of .*"),
        ({"activation_dtype": "int32"}, TypeError,
         "activation_dtype: expected one of float32, bfloat16, float16 on cpu, got int32"),
        ({"device": "gpu"}, ValueError,
         'device: expected "auto", "cpu", "cuda" or "cuda:1", got \'gpu\''),
        ({"device": "cuda:"}, ValueError, "device: expected .*, got 'cuda:'"),
        ({"device": "cuda:x"}, ValueError, "device: expected .*, got 'cuda:x'"),
        ({"device": "cpu:1"}, ValueError, "device: expected .*, got 'cpu:1'"),
        ({"device": 0}, TypeError, "device: expected a string, got int"),
    ],
    ids=label,
)  # fmt: skip
def test_stack_of_bad_sizes(changes, error, message):
    Call(ssm.LayerStack, GOOD_STACK | changes).refused(error, f"^{message}$")


def test_stack_is_refused_before_it_is_allocated():
    """A thousand terabytes would be a MemoryError."""
    call = Call(ssm.LayerStack, GOOD_STACK | {"num_slots": 2**37, "head_dim": 72})
    call.refused(ValueError, "^head_dim: expected one of")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"states": []}, ValueError,
         r"states: expected one array per layer \(at least one\), got 0"),
        ({"B_caches": [pools()["B_cache"]]}, ValueError,
         r"B_caches: expected one array per layer \(2\), got 1"),
        ({"states": pools()["state"]}, TypeError,
         "states: expected a list of arrays, one per layer, got ndarray"),
        ({"dt_caches": None}, TypeError,
         "dt_caches: expected a list of arrays, one per layer, got NoneType"),
        ({"npredicted": 0}, ValueError, "npredicted: expected 1 to 16, got 0"),
        ({"npredicted": 17}, ValueError, "npredicted: expected 1 to 16, got 17"),
        ({"npredicted": "2"}, TypeError, "npredicted: expected an int, got str"),
        ({"npredicted": 5}, ValueError,
         r"x_caches\[0\]: expected ring_buffer_len >= 2 \* npredicted = 10, got 8"),
        ({"max_window": 7}, ValueError, "max_window: expected max_window .*, got 7 . 2"),
        ({"max_window": 1}, ValueError, "max_window: expected max_window .*, got 1"),
        ({"max_window": 17}, ValueError, "max_window: expected max_window .*, got 17"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_stack_from_bad_lists(changes, error, message, path):
    call = from_arrays()
    for name in changes:
        call.arguments = {k: v for k, v in call.arguments.items() if not k.startswith(f"{name}[")}
    call.arguments |= changes
    call.refused(error, f"^{message}$")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"P": 72}, r"states\[0\]: expected head_dim one of 64, 80, 96, 128, got 72 .*"),
        ({"N": 32}, r"states\[0\]: expected dstate one of 64, 128, 256, got 32 .*"),
        ({"G": 3}, r"B_caches\[0\]: expected ngroups that divides nheads = 4, got 3"),
        ({"L": 24}, r"max_window: expected ring_buffer_len - npredicted from .* 16, got 22"),
    ],
)
def test_stack_from_arrays_of_bad_sizes(sizes, message, path):
    call = from_arrays()
    call.arguments |= {**pools("[0]", **sizes), **pools("[1]", **sizes)}
    call.refused(ValueError, f"^{message}$")


@pytest.mark.parametrize("sizes", [{"H": 8}, {"P": 80}, {"N": 64}, {"L": 9}, {"G": 4}], ids=label)
def test_stack_of_layers_that_differ(sizes, path):
    call = from_arrays()
    call.arguments |= pools("[1]", **sizes)
    call.refused(ValueError, r"^\w+\[1\]: expected \(.*\) as \w+\[0\], got \(")


def test_stack_of_layers_of_two_types(path):
    call = from_arrays()
    call.arguments["states[1]"] = call.arguments["states[1]"].astype(BF16)
    call.refused(TypeError, r"^states\[1\]: expected float32 as states\[0\], got bfloat16$")


@pytest.mark.parametrize("make", [step, stack_load_state])
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (-1, ValueError, "expected 0 to 1, got -1"),
        (2, ValueError, "expected 0 to 1, got 2"),
        ("0", TypeError, "expected an int, got str"),
        (1.0, TypeError, "expected an int, got float"),
    ],
)
def test_layer(make, layer, error, message):
    call = make()
    call.arguments["layer"] = layer
    call.refused(error, f"^layer: {message}$")


def test_step_of_more_tokens_than_the_stack_expects(path):
    stack = a_stack()
    call = Call(stack.step, {"layer": 0, **tokens(T=3), "slots": SLOTS})
    call.refused(ValueError, "^x: expected at most npredicted = 2 tokens, got 3$")


def test_a_failed_step_does_not_change_what_advance_assumes():
    stack = a_stack()
    good = {"layer": 0, **tokens(T=1), "slots": SLOTS}
    stack.step(**good)
    bad = Call(stack.step, {"layer": 0, **tokens(T=2), "slots": SLOTS.astype(np.float32)})
    bad.refused(TypeError, "^slots: expected one of int32, int64, got float32$")
    two = Call(stack.advance, {"slots": SLOTS, "num_accepted": np.full(3, 2, np.int32)})
    two.refused(ValueError, r"^num_accepted: expected 0 to 1 \(query_lens\), got 2$")


# --- What is missing on the machine --------------------------------------------------------------

NEEDS_NO_GPU = pytest.mark.skipif(compiler.gpu_count() > 0, reason="this machine has a GPU")
BLOCKER = """
import sys
sys.modules.update(dict.fromkeys({blocked}))
import numpy as np
import replayssm_cupy as ssm
from replayssm_cupy import compiler, keys
def line(function):
    try:
        function()
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
    else:
        print("no error")
"""


def lines_without(blocked: set[str], program: str) -> list[str]:
    """What `program` prints in a fresh process where some modules do not exist."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = BLOCKER.format(blocked=blocked) + program
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_cupy():
    """The CPU path works; everything else says what is missing and how to get it."""
    program = """
stack = ssm.LayerStack(1, 2, 4, 64, 2, 64)
print(stack.device)
x, B = np.ones((2, 4, 64), np.float32), np.ones((2, 2, 64), np.float32)
state = np.ones((2, 4, 64, 64), np.float32)
print(ssm.selective_state_update(state, x, x[..., 0], -x[0, :, 0], B, B).shape)
line(lambda: ssm.LayerStack(1, 2, 4, 64, 2, 64, device="cuda"))
line(lambda: ssm.warm_up(dstate=64))
line(lambda: compiler.compile_cubin([keys.AdvanceRingKey()], "sm_90"))
"""
    device, shape, *errors = lines_without({"cupy", "cupy_backends", "torch", "jax"}, program)
    assert (device, shape) == ("cpu", "(2, 4, 64)")
    missing = r"ReplaySSMError: CuPy is missing, .*: pip install \"replayssm_cupy\[cuda13\]\" .*"
    assert len(errors) == 3
    assert all(re.fullmatch(missing, error) for error in errors), errors


def test_with_a_cupy_that_cannot_be_imported():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    program = 'line(lambda: ssm.LayerStack(1, 2, 4, 64, 2, 64, device="cuda"))\n'
    (line,) = lines_without({"cupy_backends"}, program)  # CuPy explains itself at length, we do not
    broken = r"ReplaySSMError: CuPy cannot be imported \(.+\): pip install .*\[cuda13\].*"
    assert re.fullmatch(broken, line), line


@pytest.fixture
def nvrtc() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy has no NVRTC")


def test_nvrtc_that_cannot_be_loaded(nvrtc, monkeypatch):
    pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: no such file")

    monkeypatch.setattr(nvrtc, "createProgram", refuse)
    call = Call(compiler.compile_cubin, {"keys": [AdvanceRingKey()], "arch": "sm_90"})
    message = r"^NVRTC is missing \(CuPy failed to load libnvrtc.*\): pip install .*\[cuda13\]"
    call.refused(ssm.ReplaySSMError, message)


def test_without_headers(nvrtc, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    call = Call(compiler.compile_cubin, {"keys": [AdvanceRingKey()], "arch": "sm_90"})
    message = r"^the CUDA headers are missing: pip install .*\[cuda13\]"
    call.refused(ssm.ReplaySSMError, message)


class FakeModule:
    """`cupy.RawModule` on a machine where something is missing."""

    message = ""

    def __init__(self, **arguments: Any) -> None:
        pass

    def get_function(self, name: str) -> None:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("CuPy failed to load libnvrtc.so.13: cannot open",
         r"NVRTC is missing \(.*\): pip install"),
        ('convert.cuh(3): catastrophic error: cannot open source file "cuda_bf16.h"',
         r"the CUDA headers are missing \(.*\): pip install"),
        ("cudaErrorInsufficientDriver: CUDA driver version is insufficient: Insufficient",
         r"no NVIDIA driver or GPU \(.*\): NumPy arrays run on the CPU path"),
    ],
)  # fmt: skip
def test_first_launch_where_something_is_missing(cause, message, monkeypatch):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setattr(FakeModule, "message", cause)
    monkeypatch.setattr(cupy, "RawModule", FakeModule)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(compiler, "_target_of", lambda device: "sm_90")
    call = Call(compiler.load, {"keys": [AdvanceRingKey()], "device": 0})
    call.refused(ssm.ReplaySSMError, f"^{message}")


@NEEDS_NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu(device):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    call = Call(ssm.LayerStack, GOOD_STACK | {"device": device})
    message = r"^no NVIDIA driver or GPU \(.*\): NumPy arrays run on the CPU path$"
    call.refused(ssm.ReplaySSMError, message)
    Call(ssm.warm_up, {"dstate": 128}).refused(ssm.ReplaySSMError, message)


@NEEDS_NO_GPU
def test_auto_is_the_cpu_without_a_gpu():
    stack = ssm.LayerStack(**(GOOD_STACK | {"device": "auto"}))
    assert stack.device.kind == "cpu"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dstate": 100}, ValueError, r"dstate: expected one of .*, got 100 \(nearest .*\)"),
        ({"dstate": "128"}, TypeError, "dstate: expected an int, got str"),
        ({"state_dtype": "int32"}, TypeError, "state_dtype: expected one of .*, got int32"),
        ({"activation_dtype": "float32"}, TypeError,
         "activation_dtype: expected one of bfloat16, float16, got float32"),
        ({"npredicted": 0}, ValueError, "npredicted: expected 1 to 16, got 0"),
        ({"npredicted": 17}, ValueError, "npredicted: expected 1 to 16, got 17"),
        ({"npredicted": 1.0}, TypeError, "npredicted: expected an int, got float"),
        ({"device": "cuda"}, TypeError, "device: expected an int, got str"),
        ({"algorithm": "three"}, ValueError, "algorithm: expected .*, got 'three'"),
    ],
    ids=label,
)  # fmt: skip
def test_warm_up_values(changes, error, message):
    Call(ssm.warm_up, {"dstate": 128, **changes}).refused(error, f"^{message}$")


@pytest.mark.gpu
def test_ordinal_of_a_gpu_that_is_not_there():
    count = compiler.gpu_count()
    message = f"^device: expected a GPU ordinal below {count}, got {count}$"
    call = Call(ssm.LayerStack, GOOD_STACK | {"device": f"cuda:{count}"})
    call.refused(ssm.ReplaySSMError, message)
    Call(ssm.warm_up, {"dstate": 128, "device": count}).refused(ssm.ReplaySSMError, message)


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu_without_cupy():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device that PyTorch can use")
    program = """
import torch
state = torch.ones(2, 4, 64, 64, device="cuda")
x, B = torch.ones(2, 4, 64, device="cuda"), torch.ones(2, 2, 64, device="cuda")
line(lambda: ssm.selective_state_update(state, x, x[..., 0], -x[0, :, 0], B, B))
print(bool((state == 1).all()))
"""
    error, untouched = lines_without({"cupy", "cupy_backends"}, program)
    assert re.match(r"ReplaySSMError: .*CuPy.*: pip install \"replayssm_cupy\[cuda13\]\"", error)
    assert untouched == "True"
