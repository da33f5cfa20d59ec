"""Checked mode: what only the device knows is looked at before a step writes anything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import bits, poison_dead_rows
from runs import NumPyBackend, Run, device_of, make_stored, reference_path

import replayssm_cupy as ssm
from replayssm_cupy import checked, decode

CASE = Case(Shape("checked", 4, 2, 64, 64), npredicted=2, max_window=6, num_slots=6)
SLOTS = np.array([4, 0, -1, 2], np.int32)
LENGTHS = np.array([0, 2, 3, 3, 5], np.int32)


@pytest.fixture(params=["kernel", "reference"])
def place(request, backend):
    """The backend, or the reference beside it; the second needs no more than one backend."""
    if request.param == "kernel":
        yield backend
        return
    if backend.name == "cuda":
        pytest.skip("the reference runs with the host backend")
    with reference_path():
        yield NumPyBackend()


def pools_and_step(*, ragged: bool = False, state_dtype: str = "int8"):
    rng = np.random.default_rng(0)
    pools = make_stored(replace(CASE, state_dtype=state_dtype), rng, fill=True)
    pools.ring_start[:] = 7, -7, 3, 99, 0, -1  # slots 1, 3 and 5 are not touched
    pools.prev_num_accepted_tokens[:] = 6, 77, 0, -4, 5, 7
    for slot in (0, 2, 4):
        assert 0 <= pools.ring_start[slot] < CASE.ring_buffer_len
    if ragged:
        step = make_step(CASE, 1, rng, q=int(LENGTHS[-1]))
        return pools, replace(step, state_batch_indices=SLOTS.copy()), {
            "cu_seqlens": LENGTHS.copy(), "max_seqlen": 2}  # fmt: skip
    return pools, make_step(CASE, 4, rng, slots=SLOTS.copy()), {}


def refused(place, pools, step, options, message: str, **more) -> None:
    """The call ends in one line that matches, and no array has changed."""
    run = Run(place, pools, CASE.max_window)
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=f"^{message}$") as caught:
        run.step(step, **options, **more)
    if place.name != "reference":
        assert type(caught.value) is ssm.ReplaySSMError
    assert "\n" not in str(caught.value)
    after = run.snapshot()
    for name, array in pools.arrays().items():
        assert np.array_equal(bits(array), bits(getattr(after, name))), name


ROW = r"(batch row 3|slot 2)"


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ring_start", -1, "ring_start: expected values from 0 to 7, got -1 at " + ROW),
        ("ring_start", 8, "ring_start: expected values from 0 to 7, got 8 at " + ROW),
        ("prev_num_accepted_tokens", -1, "prev_num_accepted_tokens: expected values from 0 to "
         "max_window = 6, got -1 at " + ROW),
        ("prev_num_accepted_tokens", 7, "prev_num_accepted_tokens: expected values from 0 to "
         "max_window = 6, got 7 at " + ROW),
    ],
)  # fmt: skip
def test_cursors(place, name, value, message, ragged):
    pools, step, options = pools_and_step(ragged=ragged)
    getattr(pools, name)[2] = value
    refused(place, pools, step, options, message, check=True)


@pytest.mark.parametrize("index_type", [np.int32, np.int64])
def test_a_slot_twice(place, index_type):
    pools, step, options = pools_and_step()
    step = replace(step, state_batch_indices=np.array([4, -1, 4, -1], index_type))
    message = "state_batch_indices: expected distinct slots, got slot 4 at batch rows 0 and 2"
    refused(place, pools, step, options, message, check=True)
    distinct = replace(step, state_batch_indices=np.array([4, -1, 9, -1], index_type))
    Run(place, pools, CASE.max_window).step(distinct, check=True)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([1, 2, 3, 3, 5], r"expected values that rise from 0 to at most 5, got (1 at .* 0|\[1.*)"),
        ([0, 2, 1, 3, 5], r"expected values that rise from 0 to at most 5, got (1 at .* 1|\[0.*)"),
        ([0, 2, 3, 4, 6], r"expected values that rise from 0 to at most 5, got (6 at .* 3|\[0.*)"),
        ([0, 2, 2, 5, 5], r"expected lengths of at most max_seqlen = 2, got 3( at batch row 2)?"),
    ],
    ids=str,
)
def test_lengths(place, ends, message):
    pools, step, options = pools_and_step(ragged=True)
    options["cu_seqlens"] = np.array(ends, np.int32)
    refused(place, pools, step, options, "cu_seqlens: " + message, check=True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # what NumPy makes of inf
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["x_cache", "B_cache", "dt_cache"])
def test_rows_that_are_not_finite(place, name, value):
    pools, step, options = pools_and_step()
    ring = getattr(pools, name)
    ring[0][-1, (7 + 2) % 8, ...] = value  # live row 2 of the 6 of slot 0
    message = (
        f"{name}: expected finite values in the 6 live rows, got others in live row 2 of "
        "(batch row 1|slot 0)"
    )
    refused(place, pools, step, options, message, check="finite")
    Run(place, pools, CASE.max_window).step(step, check=True)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_clean_calls_pass_and_give_the_same_bits(place, state_dtype, ragged):
    pools, step, options = pools_and_step(ragged=ragged, state_dtype=state_dtype)
    for slot in (0, 2, 4):  # whatever lies in dead rows and other slots
        one = replace(pools, **{n: a[slot : slot + 1] for n, a in pools.arrays().items()})
        poison_dead_rows(one)
    results = []
    for check in (False, True, "finite"):
        run = Run(place, pools, CASE.max_window)
        results.append((run.step(step, **options, check=check), run.snapshot()))
    for out, after in results[1:]:
        assert np.array_equal(bits(out), bits(results[0][0]))
        for name, array in after.arrays().items():
            assert np.array_equal(bits(array), bits(getattr(results[0][1], name))), name


def test_no_array_of_slots_and_an_empty_batch(place):
    pools, step, _ = pools_and_step()
    for name in ("ring_start", "prev_num_accepted_tokens"):
        getattr(pools, name)[:] = 1
    run = Run(place, pools, CASE.max_window)
    run.step(replace(step, state_batch_indices=None), check="finite")
    empty = replace(step, state_batch_indices=np.zeros(0, np.int32))
    rows = {n: getattr(step, n)[:0] for n in ("x", "dt", "B", "C", "z")}
    assert run.step(replace(empty, **rows), check="finite").size == 0


@pytest.mark.parametrize(
    ("setting", "finite", "cursors"), [("1", False, True), ("finite", True, True),
                                       ("0", False, False), ("", False, False)],
)  # fmt: skip
def test_environment(backend, monkeypatch, setting, finite, cursors):
    monkeypatch.setenv("REPLAYSSM_CHECK", setting)
    faults = (("prev_num_accepted_tokens", 7, cursors), ("dt_cache", np.inf, finite))
    for name, value, seen in faults:
        pools, step, options = pools_and_step()
        getattr(pools, name)[0] = value
        if seen:
            refused(backend, pools, step, options, f"{name}: .* batch row 1")
        else:
            Run(backend, pools, CASE.max_window).step(step, **options)


def test_environment_does_not_weaken_an_argument(backend, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    pools, step, options = pools_and_step()
    pools.dt_cache[0] = np.nan
    refused(backend, pools, step, options, "dt_cache: .*", check="finite")


def test_stack(place, monkeypatch):
    stack = ssm.LayerStack(1, 6, 4, 64, 2, 64, max_window=6, npredicted=2, device=device_of(place))
    _, step, _ = pools_and_step()
    given = {name: place.put(array) for name, array in step.arrays().items()}
    given["slots"] = given.pop("state_batch_indices")
    stack.step(0, **given, check="finite")
    stack.ring_start[2] = 8
    message = "^ring_start: expected values from 0 to 7, got 8 at "
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=message):
        stack.step(0, **given, check=True)
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=message):
        stack.step(0, **given)


def test_check_costs_nothing_when_it_is_off(backend, monkeypatch):
    def refuse(*arguments) -> None:
        raise AssertionError("checked")

    monkeypatch.delenv("REPLAYSSM_CHECK", raising=False)
    monkeypatch.setattr(decode, "check_step", refuse)
    pools, step, options = pools_and_step()
    Run(backend, pools, CASE.max_window).step(step, **options)


def test_violations_of_the_header():
    """The kernel reports a number; the messages stand in Python under the same one."""
    header = (Path(__file__).parents[1] / "cuda" / "params.cuh").read_text()
    body = re.search(r"enum Violation : int \{(.*?)\}", header, re.DOTALL)
    numbers = {int(n): name for name, n in re.findall(r"k(\w+) = (\d+)", body[1])}
    assert numbers.pop(0) == "None"
    assert numbers.keys() == checked._VIOLATIONS.keys()
    arrays = {"XNotFinite": "x_cache", "BNotFinite": "B_cache", "DtNotFinite": "dt_cache",
              "RingStart": "ring_start", "PrevNumAcceptedTokens": "prev_num_accepted_tokens",
              "DuplicateSlot": "state_batch_indices", "CuSeqlens": "cu_seqlens",
              "SequenceLength": "cu_seqlens"}  # fmt: skip
    for number, name in numbers.items():
        assert checked._VIOLATIONS[number].startswith(arrays[name] + ": ")
