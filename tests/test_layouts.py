"""Instances that know the layout of their arrays: when they are taken, and what they know."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import bits
from stacks import make_stack

import replayssm_cupy as ssm
from replayssm_cupy import compiler, decode
from replayssm_cupy.arrays import view
from replayssm_cupy.keys import Layout, LayoutKey, step_keys

LAYOUT = Layout(nheads=6, heads_per_group=3, head_dim=64, max_window=16, ring_buffer_len=17)
DSTATE, BATCH, SLOTS = 128, 3, 5
BF16 = ml_dtypes.bfloat16
SHAPES = {
    "state": (SLOTS, 6, 64, DSTATE),
    "state_scale": (SLOTS, 6, 64),
    "x_cache": (SLOTS, 6, 17, 64),
    "B_cache": (SLOTS, 2, 17, DSTATE),
    "dt_cache": (SLOTS, 6, 17),
    "ring_start": (SLOTS,),
    "prev_num_accepted_tokens": (SLOTS,),
    "x": (BATCH, 1, 6, 64),
    "dt": (BATCH, 1, 6),
    "B": (BATCH, 1, 2, DSTATE),
    "C": (BATCH, 1, 2, DSTATE),
    "out": (BATCH, 1, 6, 64),
    "A": (6,),
    "D": (6,),
    "dt_bias": (6,),
    "slots": (BATCH,),
}


def layout_of(**arrays: np.ndarray) -> Layout | None:
    dense = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    views = {name: view(array, name) for name, array in (dense | arrays).items()}
    record = SimpleNamespace(
        nheads=6, heads_per_group=3, head_dim=64, max_window=16, ring_buffer_len=17
    )
    return decode._layout_of(record, views, DSTATE)


def axes_that_are_known() -> list[tuple[str, int]]:
    known = LAYOUT.strides(DSTATE)
    return [
        (name, axis)
        for name, axes in decode._STRIDES.items()
        for axis, letter in enumerate(axes)
        if (f"{name}_{letter}" if letter else name) in known
    ]


def with_gaps(name: str, axis: int) -> np.ndarray:
    shape = list(SHAPES[name])
    shape[axis] *= 2
    return np.zeros(shape, np.float16)[(slice(None),) * axis + (slice(None, None, 2),)]


def test_arrays_without_gaps_have_a_layout():
    assert layout_of() == LAYOUT


@pytest.mark.parametrize(("name", "axis"), axes_that_are_known())
def test_gaps_in_any_array_have_none(name, axis):
    assert layout_of(**{name: with_gaps(name, axis)}) is None


@pytest.mark.parametrize("name", ["state", "x_cache", "B_cache", "x", "B", "out"])
def test_gaps_between_slots_and_tokens_are_none(name):
    assert layout_of(**{name: with_gaps(name, 0)}) == LAYOUT


def test_an_axis_of_one_has_any_stride():
    """Of one group, for instance, an engine may pass any view."""
    for name in ("B", "C"):
        one = np.zeros((BATCH, 1, 1, DSTATE), np.float16)
        odd = np.lib.stride_tricks.as_strided(one, strides=(2 * DSTATE, 2, 6, 2))
        assert layout_of(**{name: odd}) == LAYOUT


def test_what_is_known_is_what_a_record_of_such_arrays_has():
    """Bytes as well, which follow from the types of a key."""
    from replayssm_cupy.plan import CheckpointingSsuParams
    from replayssm_cupy.small import fill_small

    types = {
        "float32": np.float32,
        "bfloat16": BF16,
        "int8": np.int8,
        "float16+fp8": np.float16,
    }
    for state_dtype, state_type in types.items():
        of_array = {
            "state": state_type, "x_cache": BF16, "B_cache": BF16, "x": BF16,
            "B": BF16, "C": BF16, "out": BF16, "slots": np.int32,
            "ring_start": np.int32, "prev_num_accepted_tokens": np.int32,
        }  # fmt: skip
        arrays = {n: np.zeros(s, of_array.get(n, np.float32)) for n, s in SHAPES.items()}
        views = {name: view(array, name) for name, array in arrays.items()} | {"z": None}
        record = CheckpointingSsuParams()
        for name, axes in decode._STRIDES.items():
            decode._set_strides(record, name, views.get(name), axes)
        record.num_slots, record.nheads = SLOTS, 6
        assert fill_small(record, views) is None
        key = step_keys(state_dtype, "bfloat16", DSTATE, 1)[0]
        for name, value in LayoutKey(key, LAYOUT).known.items():
            if name.endswith(("_stride", "_bytes")):
                assert getattr(record, name) == value, name


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_warm_stack_gives_the_same_bits(monkeypatch, state_dtype, tokens):
    """Of few sequences and of many, which take different forms."""
    import cupy

    def put(array: np.ndarray | None) -> cupy.ndarray | None:
        if array is None:
            return None
        if array.itemsize > 1:
            return cupy.asarray(array)
        return cupy.asarray(array.view(np.uint8)).view(array.dtype)  # it knows no 8-bit floats

    place = SimpleNamespace(name="cuda", put=put)
    shape = Shape("warm", 10, 2, 64, 128)
    case = Case(shape, tokens, 16, state_dtype, num_slots=200)
    rng = np.random.default_rng(3)
    for batch in (3, 190):  # of few sequences and of many
        step = make_step(case, batch, rng, slots=rng.permutation(200)[:batch].astype(np.int32))
        arguments = {name: put(array) for name, array in step.arrays().items()}
        arguments["slots"] = arguments.pop("state_batch_indices")
        arguments["dt_softplus"] = step.dt_softplus
        found = []
        for warm in (False, True):
            stack, _ = make_stack(place, case, 1, fill=True)
            stack.warm_up()
            decode._plans.clear()
            with monkeypatch.context() as patch:
                if not warm:
                    patch.setattr(compiler, "LayoutKey", lambda key, layout: None)
                out = cupy.asnumpy(stack.step(0, **arguments))
            (plan,) = decode._plans.values()
            known = compiler._functions[LayoutKey(plan.key, plan.layout), 0]
            assert known != compiler._functions[plan.key, 0]
            assert compiler.function_for(plan.key, plan.layout, 0, 0) == known
            arrays = stack.states + stack.x_caches + stack.B_caches + stack.dt_caches
            found.append([out, *(cupy.asnumpy(a) for a in (*arrays, *stack.state_scales))])
        for one, other in zip(*found, strict=True):
            assert np.array_equal(bits(one), bits(other))


def test_sizes_of_warm_up(monkeypatch):
    """A stack gives its own; a ring has a row for each token of a window and a step."""
    loaded = []
    monkeypatch.setattr(compiler, "require_gpu", lambda device: None)
    monkeypatch.setattr(compiler, "load", lambda keys, device: loaded.append(keys))
    monkeypatch.setattr(ssm.slots, "device_guard", lambda device: nullcontext())
    ssm.warm_up(dstate=DSTATE)
    assert not any(isinstance(key, LayoutKey) for key in loaded[-1])
    ssm.warm_up(dstate=DSTATE, nheads=6, ngroups=2, head_dim=64, max_window=16)
    known = [key for key in loaded[-1] if isinstance(key, LayoutKey)]
    assert {key.layout for key in known} == {LAYOUT}
    assert [key.key for key in known] == step_keys("float32", "bfloat16", DSTATE, 1)
