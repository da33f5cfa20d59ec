"""Stacks of bad sizes and arrays, and steps of them: one clear line of the right type."""

from __future__ import annotations

import numpy as np
import pytest
from bad_input import (
    BF16,
    GOOD_STACK,
    SLOTS,
    Call,
    a_stack,
    from_arrays,
    label,
    path,
    pools,
    recorder,
    stack_load_state,
    step,
    tokens,
)

import replayssm_cupy as ssm

__all__ = ["path", "recorder"]  # fixtures


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
