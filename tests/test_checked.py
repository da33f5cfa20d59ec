"""Checked mode: what only the device knows is looked at before a step writes anything."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import Case, Shape, make_step
from oracles import bits, poison_dead_rows
from runs import Run, device_of, make_stored

import replayssm_cupy as ssm
from replayssm_cupy import checked, decode

CASE = Case(Shape("checked", 4, 2, 64, 64), npredicted=2, max_window=6, num_slots=6)
SLOTS = np.array([4, 0, -1, 2], np.int32)
LENGTHS = np.array([0, 2, 3, 3, 5], np.int32)


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


# --- A flush repeated with old cursors (R17) -----------------------------------------------------

FOLDED_TWICE = (
    r"prev_num_accepted_tokens: expected cursors that advance\(\) has moved since the flush, got "
    "the 5 live rows of it again at batch row 1: folded twice, step called again before advance"
)
FLUSHING = np.array([-1, 4, 2], np.int32)  # slots; the second has 5 live rows, the third 3
ROOM = Case(Shape("folds", 4, 2, 64, 64), npredicted=2, max_window=6, num_slots=6)


class Repeated:
    """A stack of two layers whose steps take the same arrays again and again."""

    def __init__(self, place, lengths=None) -> None:
        self.place = place
        self.stack = ssm.LayerStack(
            2, 6, 4, 64, 2, 64, max_window=6, npredicted=2, device=device_of(place)
        )
        tokens = (3, 2) if lengths is None else (1, int(lengths[-1]))
        step = make_step(ROOM, tokens[0], np.random.default_rng(1), q=tokens[1])
        given = {**step.arrays(), "state_batch_indices": FLUSHING.copy()}
        if lengths is not None:
            given["cu_seqlens"] = np.array(lengths, np.int32)
        self.given = {name: place.put(array) for name, array in given.items()}
        self.given["slots"] = self.given.pop("state_batch_indices")
        if lengths is not None:
            self.given["max_seqlen"] = 2
        rings = (*self.stack.x_caches, *self.stack.B_caches, *self.stack.dt_caches)
        for array in (*rings, *self.stack.states):
            array[...] = 0.5
        self.set_cursors(7, 5)

    def set_cursors(self, start: int, live: int) -> None:
        self.stack.ring_start[...] = start
        self.stack.prev_num_accepted_tokens[...] = live
        self.stack.prev_num_accepted_tokens[2] = 3

    def step(self, layer: int = 0, check: bool | str = True, **more):
        return self.place.get(self.stack.step(layer, **self.given | more, check=check))

    def advance(self, accepted=(2, 2, 2), **more) -> None:
        put = {name: self.place.put(array) for name, array in more.items()}
        accepted = self.place.put(np.array(accepted, np.int32))
        self.stack.advance(self.given["slots"], accepted, **put)

    def contents(self):
        lists = self.stack.states, self.stack.x_caches, self.stack.B_caches, self.stack.dt_caches
        return [bits(self.place.get(array)) for arrays in lists for array in arrays]

    def refused(self, layer: int = 0, **more) -> None:
        before = self.contents()
        with pytest.raises(ssm.ReplaySSMError, match=f"^{FOLDED_TWICE}$"):
            self.step(layer, **more)
        assert all(np.array_equal(a, b) for a, b in zip(self.contents(), before, strict=True))


@pytest.mark.parametrize("lengths", [None, (0, 2, 4, 5)], ids=["fixed", "ragged"])
def test_a_flush_before_advance_is_not_repeated(place, lengths):
    calls = Repeated(place, lengths)
    for layer in (0, 1):
        calls.step(layer)
    for layer in (1, 0):
        calls.refused(layer)
        calls.stack.refresh()
    query_lens = {} if lengths is None else {"query_lens": np.diff(lengths).astype(np.int32)}
    calls.advance((1, 1, 1), **query_lens)
    for layer in (0, 1, 0):
        calls.step(layer)


def test_a_forced_flush_is_not_repeated_either(place):
    """Nor is a step that would only read the rows which are in the state by now."""
    calls = Repeated(place)
    one = {name: calls.given[name][:, :1] for name in ("x", "dt", "B", "C", "z")}
    forced = {"force_flush": place.put(np.array([0, 1, 0], np.uint8))}
    calls.step(**one)
    calls.step(**one, **forced)
    calls.refused(**one)
    calls.refused(**one, **forced)


def test_what_leaves_the_live_rows_alone_may_follow_a_flush(place):
    calls = Repeated(place, (0, 2, 4, 5))
    calls.step()
    calls.given["cu_seqlens"] = place.put(np.array([0, 2, 2, 4], np.int32))
    calls.step()  # the flushed slot has no token
    calls.given["slots"] = place.put(np.array([1, 4, 2], np.int32))
    calls.step()


def test_a_refused_step_leaves_no_stamp(place):
    calls = Repeated(place)
    calls.stack.ring_start[2] = 8
    with pytest.raises((ssm.ReplaySSMError, ValueError), match=r"^ring_start: .*"):
        calls.step()
    calls.stack.ring_start[2] = 7
    calls.step()
    calls.refused()


def test_cursors_that_come_back(place):
    """Whatever moved them, and whether the steps between were checked or not."""
    calls = Repeated(place)
    stack, one = calls.stack, place.put(np.array([4], np.int32))
    image = stack.export_slots([4])
    other = place.put(np.array([[3, 5]], np.int32))
    stack.fork(one, other)
    for layer in (0, 1):
        calls.step(layer)
    stack.import_slots(image, [4])  # its ring starts at 0
    calls.step(0)
    stack.import_slots(image, [4])
    for layer in (0, 1):
        calls.step(layer)
    calls.set_cursors(7, 5)
    calls.step(1)
    stack.copy_slots(place.put(np.array([3], np.int32)), one)
    calls.step(1)
    stack.fork(place.put(np.array([3], np.int32)), place.put(np.array([[-1, 4]], np.int32)))
    for layer in (0, 1):
        calls.step(layer)
    for _ in range(2):  # the second time is a call that was seen before
        calls.advance()
        calls.set_cursors(7, 5)
        for layer in (0, 1):
            calls.step(layer)
    calls.set_cursors(3, 5)
    calls.step()


def test_a_bound_step_is_not_repeated_either(place):
    calls = Repeated(place)
    out = place.put(np.zeros_like(place.get(calls.given["x"])))
    bound = calls.stack.bind(1, **calls.given, out=out, check=True)
    bound()
    with pytest.raises(ssm.ReplaySSMError, match=f"^{FOLDED_TWICE}$"):
        bound()
    calls.advance()
    bound()


def test_folds_are_seen_from_the_environment(place, monkeypatch):
    calls = Repeated(place)
    calls.step(check=False)
    assert calls.stack._folds is None
    monkeypatch.setenv("REPLAYSSM_CHECK", "1")
    calls.step(check=False)
    calls.refused(check=False)
    weights = [calls.given["A"]] * 2
    for _ in range(2):
        calls.advance()
        calls.stack.flush_slots(weights, calls.given["slots"])


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
              "SequenceLength": "cu_seqlens",
              "FoldedTwice": "prev_num_accepted_tokens"}  # fmt: skip
    for number, name in numbers.items():
        assert checked._VIOLATIONS[number].startswith(arrays[name] + ": ")
