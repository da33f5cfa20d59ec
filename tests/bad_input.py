"""Every public call with good arguments, and what must hold when one of them is bad."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import replayssm_cupy as ssm
from replayssm_cupy import plan

BF16 = np.dtype(ml_dtypes.bfloat16)
# Sizes that differ wherever they may, so that no message can mix two of them up.
SIZES = {"S": 6, "batch": 3, "T": 2, "H": 4, "G": 2, "P": 64, "N": 128, "L": 8}


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


def eight_bit_reset() -> Call:
    return eight_bit(reset_slots(), "[0]", "[1]")


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


def named(name: str) -> str:
    return "^" + re.escape(name) + ": "


def room(array: np.ndarray, offset: int, *, gap: int = 0) -> np.ndarray:
    """A copy `offset` bytes behind a multiple of 256, with `gap` elements after each first row."""
    row = int(np.prod(array.shape[1:], dtype=int))
    raw = np.zeros(256 + offset + len(array) * (row + gap) * array.itemsize, np.uint8)
    start = -raw.ctypes.data % 256 + offset
    strides = ((row + gap) * array.itemsize, *array.strides[1:])
    result = np.ndarray(array.shape, array.dtype, raw, start, strides)
    result[...] = array
    return result


GOOD_STACK: dict[str, Any] = {
    "num_layers": 1,
    "num_slots": 2,
    "nheads": 4,
    "head_dim": 64,
    "ngroups": 2,
    "dstate": 64,
    "device": "cpu",
}
