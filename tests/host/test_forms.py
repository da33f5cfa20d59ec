"""A decode step is the same in both forms of the kernel and however it is spread.

What is stored is the same bit for bit, and so are the outputs of one form. Those of one or two
tokens are sums in another order where there are few heads: both are held against float64.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cases import SHAPES, Case, Shape, Step, make_step
from conftest import choose_form
from oracles import Recurrence, bits, live_rows_of_batch, poison_dead_rows, relative_l2
from runs import STATES, NumPyBackend, Run, Stored, make_stored, replayed

from host.launcher import ORDERS, HostLauncher, scratch_of
from replayssm_cupy import allocate_scratch, decode, schedule
from replayssm_cupy.keys import (
    SCALED_DTYPES,
    CheckpointingSsuKey,
    PreparedCheckpointingSsuKey,
    SlabCheckpointingSsuKey,
    SmallCheckpointingSsuKey,
)
from replayssm_cupy.schedule import STEP_ROWS, Processor, SmallFlag, Spread, most_quads

KEYS = {
    "stream": CheckpointingSsuKey,
    "small": SmallCheckpointingSsuKey,
    "two kernels": PreparedCheckpointingSsuKey,
}
# Multiprocessors for 17 sequences of two groups of three heads, of a few tokens and of many: an
# item of the streaming form has a whole group, two heads and then one, or one.
HEADS = {1: 3, 6: 2, 500: 1}
HEADS_OF_MANY = {1: 3, 3: 2, 500: 1}
BATCH = 17
OUT_TOLERANCE = 2e-5  # of outputs in float32, whatever the state


def small_spreads(key: SmallCheckpointingSsuKey) -> list[Spread]:
    """Parts of 80 rows: five, or two or three with rows that are not there."""
    quads = most_quads(key)
    wide = [Spread(rows // (4 * quads), quads) for rows in (16, 32, 48, 64)]
    return [Spread(4, 1), Spread(8, 1), *(s for s in wide if 2 <= s.state_warps <= 8)]


@pytest.fixture
def in_form(monkeypatch):
    """Does one step in a form of the kernel: its output, the pools after it, and its plan."""

    def run(form, case: Case, pools: Stored, step: Step, count=3, order="forward", spread=None,
            layouts=False, out=np.float32, **options):  # fmt: skip
        choose_form(monkeypatch, form)
        if spread is not None:
            monkeypatch.setattr(schedule, "spread_small", lambda *args: spread)
        processor = Processor(count, 227 << 10)
        monkeypatch.setattr(decode, "processor", lambda device: processor)
        after = Run(NumPyBackend(), pools, case.max_window)
        launcher = HostLauncher(order, layouts=layouts)
        if form == "two kernels":
            batch = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else len(step.x)
            scratch = allocate_scratch(batch, case.shape.nheads, device="cpu")
            options |= {"algorithm": "two-kernel", **scratch}
            # The second kernel must not read before it waits.
            launcher.late = scratch_of
        with launcher.installed():
            made = after.step(step, out, **options)
            (plan,) = decode._plans.values()
        few = case.npredicted > 2 and form == "small"
        assert type(plan.key) is (SlabCheckpointingSsuKey if few else KEYS[form])
        return made, after.snapshot(), plan

    return run


def assert_same(one: tuple, other: tuple) -> None:
    assert np.array_equal(bits(one[0]), bits(other[0])), "out"
    assert_stored_alike(one, other)


def assert_stored_alike(one: tuple, other: tuple) -> None:
    for name, array in one[1].arrays().items():
        assert np.array_equal(bits(array), bits(getattr(other[1], name))), name


def exact_outputs(pools: Stored, step: Step) -> np.ndarray:
    """Of a step of whole sequences, in float64."""
    exact = Recurrence(pools.values())
    for _, slot in live_rows_of_batch(step, len(pools.state)):
        exact.resync(slot, replayed(pools, step.A, slot), 0)
    return exact.propose(step)


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
    exact = exact_outputs(pools, step)
    small = in_form("small", case, pools, step)
    assert relative_l2(small[0], exact) <= OUT_TOLERANCE
    for form in ("stream", "two kernels"):
        for order in ORDERS[:2]:
            other = in_form(form, case, pools, step, order=order)
            assert_stored_alike(small, other)
            assert relative_l2(other[0], exact) <= OUT_TOLERANCE


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_heads_in_parts(in_form, dtype, head_dim):
    """By slabs a head is two blocks, of 80 rows with a slab too many; codes of a row are several
    pieces of a lane.
    """
    case = Case(Shape("parts", 4, 2, head_dim, 128), 4, 16, dtype, num_slots=6)
    rng = np.random.default_rng(3)
    pools, step = full_pools(case, rng), make_step(case, 5, rng)
    by_slabs = in_form("small", case, pools, step, count=60)
    assert by_slabs[2].grid == (4, 5, 2)
    assert_same(by_slabs, in_form("stream", case, pools, step))


@pytest.mark.parametrize("tokens", [2, 3])
def test_more_rows_than_blocks_along_y(in_form, monkeypatch, tokens):
    """The forms for few heads then have rows of the batch along x."""
    case = Case(Shape("wide", 3, 1, 64, 64), tokens, 16, "int8", num_slots=6)
    rng = np.random.default_rng(6)
    pools, step = full_pools(case, rng), make_step(case, 5, rng)
    heads_first = in_form("small", case, pools, step)
    monkeypatch.setattr(schedule, "MAX_BLOCKS_Y", 4)
    rows_first = in_form("small", case, pools, step)
    assert (heads_first[2].grid[:2], rows_first[2].grid[:2]) == ((3, 5), (5, 3))
    assert_same(heads_first, rows_first)


def test_more_heads_than_lanes(in_form):
    case = Case(Shape("many-heads", 34, 1, 64, 64), 2, 16, "int8", num_slots=3)
    rng = np.random.default_rng(2)
    pools, step = full_pools(case, rng), make_step(case, 3, rng)
    runs = [in_form(form, case, pools, step) for form in KEYS]
    for run in runs:
        assert_stored_alike(runs[0], run)
        assert relative_l2(run[0], exact_outputs(pools, step)) <= OUT_TOLERANCE


LAYOUT_CASES = [
    ("float32", 1, "three-heads-per-group"), ("int8", 2, "three-heads-per-group"),
    ("bfloat16", 4, "three-heads-per-group"), ("float8_e4m3fn", 1, "seven-heads-per-group"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tokens", "shape"), LAYOUT_CASES)
def test_instances_for_a_layout_give_the_same_bits(in_form, dtype, tokens, shape):
    case = Case(SHAPES[shape], tokens, 16, dtype, num_slots=9)
    rng = np.random.default_rng(7)
    pools = full_pools(case, rng)
    slots = rng.permutation(case.num_slots)[:7].astype(np.int32)
    gated = make_step(case, 7, rng, slots=slots)
    plain = replace(gated, z=None, state_batch_indices=slots)
    for step in (gated, plain, replace(gated, state_batch_indices=slots.astype(np.int64))):
        for form in KEYS:
            generic = in_form(form, case, pools, step)
            known = in_form(form, case, pools, step, layouts=True)
            assert known[2].layout is not None
            assert_same(generic, known)


class LongRings(Case):
    """Rings with more rows than the small form counts by their places."""

    @property
    def ring_buffer_len(self) -> int:
        return STEP_ROWS + 9


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_long_rings(in_form, dtype, tokens):
    case = LongRings(SHAPES["three-heads-per-group"], tokens, 16, dtype, num_slots=6)
    rng = np.random.default_rng(tokens)
    pools, step = full_pools(case, rng), make_step(case, 6, rng)
    small, stream = (in_form(form, case, pools, step) for form in ("small", "stream"))
    assert not (tokens <= 2 and small[2].record.flags & SmallFlag.BY_PLACE)
    assert_stored_alike(small, stream)
    for run in (small, stream):
        assert relative_l2(run[0], exact_outputs(pools, step)) <= OUT_TOLERANCE
    # A stray cursor is held inside the ring.
    pools.ring_start[:] = case.ring_buffer_len - 1
    inside = in_form("small", case, pools, step)
    pools.ring_start[:] = 10**9
    stray = in_form("small", case, pools, step)
    stray[1].ring_start[:] = inside[1].ring_start
    assert_same(stray, inside)
    # Folded without tokens, from rows that wrap and rows far behind.
    pools = make_stored(case, rng, fill=True)
    pools.ring_start[:] = [case.ring_buffer_len - 5, 20, 0, 7, case.ring_buffer_len - 1, 12]
    pools.prev_num_accepted_tokens[:] = 9
    poison_dead_rows(pools)
    ragged, ends = in_a_row(step, np.minimum([0, 1, 0, 1, 0, 0], tokens))
    forced = {"cu_seqlens": ends, "max_seqlen": tokens, "force_flush": np.ones(6, bool)}
    assert_stored_alike(
        *(in_form(form, case, pools, ragged, **forced) for form in ("small", "stream"))
    )


@pytest.mark.parametrize("tokens", [1, 4, 11])
@pytest.mark.parametrize("shape", ["three-heads-per-group", "seven-heads-per-group"])
def test_tight_rows(in_form, monkeypatch, shape, tokens):
    """Rows of x without padding and outputs of 16 bits in shared memory give the same bits."""
    case = Case(SHAPES[shape], tokens, 16, "float32", num_slots=9)
    rng = np.random.default_rng(tokens)
    pools, gated = full_pools(case, rng), make_step(case, 7, rng)
    spread = schedule._stream_of
    for step in (gated, replace(gated, z=None)):
        for form in ("stream", "two kernels"):
            for out in (np.float32, gated.x.dtype):
                runs = []
                for tight in (False, True):
                    wanted = partial(spread, tight=tight)
                    monkeypatch.setattr(
                        schedule, "_stream_of", lambda *args, wanted=wanted, **_: wanted(*args)
                    )
                    runs.append(in_form(form, case, pools, step, out=out))
                    assert runs[-1][2].record.tight_rows == tight
                assert_same(*runs)


@pytest.mark.parametrize("tokens", [1, 2, 3, 11])
@pytest.mark.parametrize("dtype", STATES[::-1])  # those with most to go wrong first
def test_forms_agree(in_form, dtype, tokens):
    case = Case(SHAPES["three-heads-per-group"], tokens, 16, dtype, num_slots=20)
    rng = np.random.default_rng(tokens)
    pools = full_pools(case, rng)
    slots = rng.permutation(case.num_slots)[:BATCH].astype(np.int32)
    slots[[4, 11]] = -1, case.num_slots
    dense = make_step(case, BATCH, rng, slots=slots)
    lens = rng.integers(0, tokens + 1, BATCH)
    ragged, ends = in_a_row(dense, lens)
    lengths = {"cu_seqlens": ends, "max_seqlen": tokens, "force_flush": np.arange(BATCH) % 3 == 0}
    if dtype != "float32":
        lengths["rand_seed"] = np.array([8])
    exact = exact_outputs(pools, dense)
    of_ragged = np.concatenate([exact[b, :q] for b, q in enumerate(lens)])[None]
    for step, options, expected in ((dense, {}, exact), (ragged, lengths, of_ragged)):
        first = in_form("small", case, pools, step, **options)
        flushed = bits(first[1].state).reshape(20, -1) != bits(pools.state).reshape(20, -1)
        assert 0 < flushed.any(1).sum() < BATCH - 2
        assert relative_l2(first[0], expected) <= OUT_TOLERANCE
        streams = []
        for count, heads in (HEADS if tokens < 9 else HEADS_OF_MANY).items():
            for order in ORDERS:
                most = 1 if dtype == "float32" else 3 if dtype in SCALED_DTYPES else 2
                for form in ("stream", "two kernels"):
                    stream = in_form(form, case, pools, step, count, order, **options)
                    assert stream[2].record.heads_of_item == min(heads, most)
                    streams.append(stream)
        assert relative_l2(streams[0][0], expected) <= OUT_TOLERANCE
        assert_stored_alike(first, streams[0])
        for stream in streams[1:]:
            assert_same(streams[0], stream)
        if tokens > 2:  # the form by slabs, which has the phases of the streaming one
            for order in ORDERS:
                assert_same(streams[0], in_form("small", case, pools, step, 3, order, **options))
            continue
        for spread in small_spreads(first[2].key):
            for order in ORDERS:
                small = in_form("small", case, pools, step, 3, order, spread, **options)
                assert small[2].grid[2] == -(-80 // spread.rows)
                assert_same(first, small)
