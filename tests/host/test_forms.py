"""A decode step is the same, bit for bit, in both forms of the kernel and however it is spread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import SHAPES, Case, Shape, Step, make_step
from conftest import choose_form
from oracles import bits, poison_dead_rows
from runs import STATES, NumPyBackend, Run, Stored, make_stored

from host.launcher import ORDERS, HostLauncher, scratch_of
from replayssm_cupy import allocate_scratch, decode
from replayssm_cupy.keys import (
    SCALED_DTYPES,
    CheckpointingSsuKey,
    PreparedCheckpointingSsuKey,
    SmallCheckpointingSsuKey,
)
from replayssm_cupy.schedule import Processor

KEYS = {
    "stream": CheckpointingSsuKey,
    "small": SmallCheckpointingSsuKey,
    "two kernels": PreparedCheckpointingSsuKey,
}
# Of 17 sequences of two groups of three heads: an item has a whole group, two heads and then one,
# or one; a head has one part, or three with a slab that is not there.
SPREADS = {1: (3, 1), 3: (2, 1), 500: (1, 3)}
BATCH = 17


@pytest.fixture
def in_form(monkeypatch):
    """Does one step in a form of the kernel: its output, the pools after it, and its plan."""

    def run(form, case: Case, pools: Stored, step: Step, count=3, order="forward", **options):
        choose_form(monkeypatch, form)
        processor = Processor(count, 227 << 10)
        monkeypatch.setattr(decode, "processor", lambda device: processor)
        after = Run(NumPyBackend(), pools, case.max_window)
        launcher = HostLauncher(order)
        if form == "two kernels":
            batch = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else len(step.x)
            scratch = allocate_scratch(batch, case.shape.nheads, device="cpu")
            options |= {"algorithm": "two-kernel", **scratch}
            # The second kernel must not read before it waits.
            launcher.late = scratch_of
        with launcher.installed():
            out = after.step(step, **options)
            (plan,) = decode._plans.values()
        assert type(plan.key) is KEYS[form]
        return out, after.snapshot(), plan

    return run


def assert_same(one: tuple, other: tuple) -> None:
    assert np.array_equal(bits(one[0]), bits(other[0])), "out"
    for name, array in one[1].arrays().items():
        assert np.array_equal(bits(array), bits(getattr(other[1], name))), name


def full_pools(case: Case, rng: np.random.Generator) -> Stored:
    """Any number of live rows, rings that wrap, dead rows that must not be read."""
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:3] = 0, case.max_window, case.max_window - 1
    pools.ring_start[:3] = case.ring_buffer_len - 1
    poison_dead_rows(pools)
    return pools


def in_a_row(step: Step, lens: np.ndarray) -> tuple[Step, np.ndarray]:
    """The first tokens of each sequence behind one another, and cu_seqlens."""
    rows = {
        name: np.concatenate([getattr(step, name)[b, :q] for b, q in enumerate(lens)])[None]
        for name in ("x", "dt", "B", "C", "z")
    }
    ends = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return replace(step, **rows), ends


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_batch_beyond_one_list(in_form, dtype):
    """More sequences than a block lists at a time, and heads of one item that share B and C."""
    batch = 800
    case = Case(Shape("pair", 2, 1, 64, 64), 2, 8, dtype, num_slots=batch + 1)
    rng = np.random.default_rng(1)
    pools = full_pools(case, rng)
    slots = rng.permutation(case.num_slots)[:batch].astype(np.int32)
    slots[[3, 600]] = -1
    step = make_step(case, batch, rng, slots=slots)
    small = in_form("small", case, pools, step)
    for form in ("stream", "two kernels"):
        for order in ORDERS[:2]:
            assert_same(small, in_form(form, case, pools, step, order=order))


def test_more_heads_than_lanes(in_form):
    case = Case(Shape("many-heads", 34, 1, 64, 64), 2, 16, "int8", num_slots=3)
    rng = np.random.default_rng(2)
    pools, step = full_pools(case, rng), make_step(case, 3, rng)
    one, *others = (in_form(form, case, pools, step) for form in KEYS)
    for other in others:
        assert_same(one, other)


@pytest.mark.parametrize("tokens", [3, 11])
@pytest.mark.parametrize("dtype", STATES[::-1])  # those with most to go wrong first
def test_forms_agree(in_form, dtype, tokens):
    case = Case(SHAPES["three-heads-per-group"], tokens, 16, dtype, num_slots=20)
    rng = np.random.default_rng(tokens)
    pools = full_pools(case, rng)
    slots = rng.permutation(case.num_slots)[:BATCH].astype(np.int32)
    slots[[4, 11]] = -1, case.num_slots
    dense = make_step(case, BATCH, rng, slots=slots)
    ragged, ends = in_a_row(dense, rng.integers(0, tokens + 1, BATCH))
    lengths = {"cu_seqlens": ends, "max_seqlen": tokens}
    if dtype != "float32":
        lengths["rand_seed"] = np.array([8])
    for step, options in ((dense, {"pad_output": "keep"}), (ragged, lengths)):
        first = in_form("small", case, pools, step, **options)
        flushed = bits(first[1].state).reshape(20, -1) != bits(pools.state).reshape(20, -1)
        assert 0 < flushed.any(1).sum() < BATCH - 2
        for count, (heads, parts) in SPREADS.items():
            for order in ORDERS:
                of_stream, of_small, of_two = (
                    in_form(form, case, pools, step, count, order, **options) for form in KEYS
                )
                most = 1 if dtype == "float32" else 3 if dtype in SCALED_DTYPES else 2
                for of_streaming in (of_stream, of_two):
                    assert of_streaming[2].record.heads_of_item == min(heads, most)
                assert of_small[2].grid[2] == parts
                assert_same(first, of_stream)
                assert_same(first, of_small)
                assert_same(first, of_two)
