"""Bad sizes, numbers and values: one clear line of the right type, and not a byte is written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from bad_input import (
    BF16,
    SIZES,
    SLOTS,
    Call,
    a_stack,
    advance_ring,
    checkpointing_ssu,
    eight_bit,
    eight_bit_reset,
    eight_bit_stack,
    from_arrays,
    label,
    load_state,
    named,
    path,
    ragged,
    recorder,
    reset_slots,
    selective_state_update,
    stack_advance,
    stack_load_state,
    stack_reset,
    step,
)

__all__ = ["path", "recorder"]  # fixtures


# --- Sizes and combinations -----------------------------------------------------------------------

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


# --- Scales, seeds and lengths --------------------------------------------------------------------


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


# --- Values that only the host can look at --------------------------------------------------------


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
