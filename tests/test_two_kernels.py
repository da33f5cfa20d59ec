"""Two kernels do a step as one does, bit for bit: weights that go through the caller's scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, SHAPES, Case, Shape, Step, make_step
from conftest import choose_form
from oracles import bits, poison_dead_rows
from runs import STATES, Run, Stored, make_stored

import replayssm_cupy as ssm
from replayssm_cupy import calls, decode, ops, plan, schedule
from replayssm_cupy.keys import (
    CheckpointingSsuKey,
    PreparedCheckpointingSsuKey,
    SmallCheckpointingSsuKey,
    precompute_key,
)
from replayssm_cupy.schedule import Processor
from replayssm_cupy.schedule import Step as Sizes
from replayssm_cupy.scratch import OWN_SHAPES, peer_shapes

BATCH, SLOTS = 9, 12
ODD = SHAPES["three-heads-per-group"]
PEERS = ("own", "peer")


def make_scratch(kind: str, case: Case, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Full of NaN, with a row more than the batch."""
    nheads, x = case.shape.nheads, DTYPES[case.activation_dtype]
    shapes = OWN_SHAPES if kind == "own" else peer_shapes(case.max_window)
    dtypes = {name: np.float32 if kind == "own" or name == "cumAdt_vec" else x for name in shapes}
    return {
        name: np.full((batch + 1, nheads, *shape), np.nan, np.float32).astype(dtypes[name])
        for name, shape in shapes.items()
    }


def full_pools(case: Case, rng: np.random.Generator) -> Stored:
    """Rings that wrap, empty, full and between, dead rows that must not be read."""
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:3] = 0, case.max_window, case.max_window - 1
    pools.ring_start[:3] = case.ring_buffer_len - 1
    poison_dead_rows(pools)
    return pools


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan and no call was made before; one kernel takes the form for many heads, too."""
    choose_form(monkeypatch, "stream")


class Pair:
    """The same calls by one kernel and by two, on pools of their own."""

    def __init__(self, backend: Any, case: Case, pools: Stored, scratch: str) -> None:
        self.runs = [Run(backend, pools, case.max_window) for _ in range(2)]
        self.scratch = make_scratch(scratch, case)

    def step(self, step: Step, **options: Any) -> None:
        """Both, compared in all that they write; two kernels did the second one."""
        monolith, two = self.runs
        expected = monolith.step(step, **options)
        out = two.step(step, algorithm="two-kernel", **self.scratch, **options)
        made = [*decode._plans.values()][-1]
        assert type(made.key) is PreparedCheckpointingSsuKey
        assert made.before is not None and made.before.key == precompute_key(made.key)
        assert np.array_equal(bits(out), bits(expected))
        before, after = monolith.snapshot().arrays(), two.snapshot().arrays()
        for name in before:
            assert np.array_equal(bits(before[name]), bits(after[name])), name


def slots_of(rng: np.random.Generator) -> np.ndarray:
    slots = rng.permutation(SLOTS)[:BATCH].astype(np.int32)
    slots[[2, 7]] = -1, SLOTS
    return slots


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("dtype", STATES[::-1])
def test_formats(backend, fresh, dtype, tokens):
    """Sequences of one length with padding, then of different ones; some flush, some do not."""
    case = Case(ODD, tokens, 16, dtype, num_slots=SLOTS)
    rng = np.random.default_rng(tokens)
    pair = Pair(backend, case, full_pools(case, rng), "own")
    rounding = {} if dtype == "float32" else {"rand_seed": np.array([8])}
    pair.step(make_step(case, BATCH, rng, slots=slots_of(rng)), **rounding)
    ragged = make_step(case, 1, rng, q=2 * BATCH, slots=slots_of(rng))
    lens = rng.multinomial(2 * BATCH, np.full(BATCH, 1 / BATCH)).clip(0, tokens)
    ends = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    forced = rng.integers(0, 2, BATCH).astype(np.uint8)
    pair.step(ragged, cu_seqlens=ends, max_seqlen=tokens, force_flush=forced, pad_output="keep")


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_number_of_tokens(backend, fresh, tokens):
    case = Case(ODD, tokens, 16, "float32", num_slots=SLOTS)
    rng = np.random.default_rng(tokens)
    pair = Pair(backend, case, full_pools(case, rng), "own")
    pair.step(make_step(case, BATCH, rng, slots=slots_of(rng)))


@pytest.mark.parametrize(("window", "tokens"), [(16, 1), (16, 6), (9, 6), (8, 2), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_scratch_of_the_peer(backend, fresh, dtype, window, tokens):
    case = Case(ODD, tokens, window, dtype, num_slots=SLOTS)
    rng = np.random.default_rng(window)
    pair = Pair(backend, case, full_pools(case, rng), "peer")
    pair.step(make_step(case, BATCH, rng, slots=slots_of(rng)))


@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    [
        (Shape("many-heads", 18, 1, 64, 128), "bfloat16", "float16"),
        (SHAPES["one-head-per-group"], "float16", "bfloat16"),
        (SHAPES["widest"], "float32", "bfloat16"),
    ],
    ids=str,
)
def test_shapes(backend, fresh, monkeypatch, shape, dtype, activation):
    """More heads a group than a block of the first kernel takes; one; wide states."""
    monkeypatch.setattr(decode, "processor", lambda device: Processor(1, 227 << 10))
    case = Case(shape, 2, 8, dtype, activation, num_slots=SLOTS)
    rng = np.random.default_rng(3)
    pair = Pair(backend, case, full_pools(case, rng), "own")
    for _ in range(2):  # other slots, and scratch that holds the weights of before
        pair.step(make_step(case, BATCH, rng, slots=slots_of(rng)))


def test_more_sequences_than_a_list(backend, fresh):
    case = Case(Shape("pair", 2, 1, 64, 64), 2, 8, "int8", num_slots=801)
    rng = np.random.default_rng(1)
    pair = Pair(backend, case, full_pools(case, rng), "own")
    pair.scratch = make_scratch("own", case, 800)
    slots = rng.permutation(801)[:800].astype(np.int32)
    slots[[3, 600]] = -1
    pair.step(make_step(case, 800, rng, slots=slots))


def test_no_token_and_no_sequence(backend, fresh):
    """A forced flush without tokens, and a batch that is empty."""
    case = Case(ODD, 2, 8, "float32", num_slots=SLOTS)
    rng = np.random.default_rng(5)
    pair = Pair(backend, case, full_pools(case, rng), "own")
    nothing = make_step(case, 1, rng, q=0)
    ends = np.zeros(BATCH + 1, np.int32)
    forced = np.ones(BATCH, np.uint8)
    pair.step(nothing, cu_seqlens=ends, max_seqlen=2, force_flush=forced)
    pair.step(make_step(case, 0, rng))


# --- Which algorithm -----------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch, fresh):
    """The plan of a call that nothing is done for, on a processor of one multiprocessor."""

    class Idle:
        def launch(self, plan: plan.Plan, stream: int) -> None:
            pass

    monkeypatch.setitem(plan.launchers, "cpu", Idle())
    monkeypatch.setattr(decode, "processor", lambda device: Processor(1, 227 << 10))

    def call(case: Case, scratch: str, algorithm: str, **options: Any) -> plan.Plan:
        from runs import NumPyBackend

        rng = np.random.default_rng(0)
        run = Run(NumPyBackend(), make_stored(case, rng, fill=True), case.max_window)
        arrays = make_scratch(scratch, case) if scratch else {}
        decode._plans.clear()
        monkeypatch.setattr(ops, "_calls", calls.SeenCalls())
        run.step(make_step(case, BATCH, rng), algorithm=algorithm, **arrays, **options)
        (made,) = decode._plans.values()
        return made

    return call


@pytest.mark.parametrize(
    ("window", "tokens"),
    [(w, t) for w in (6, 8, 9, 16) for t in (1, 2, 3, 6, 7, 8, 9, 16) if t <= w],
)
def test_scratch_that_holds_the_weights(planned, window, tokens):
    """Ours always does. The peer's does up to six tokens, or two with up to eight rows."""
    case = Case(ODD, tokens, window, "float32", num_slots=SLOTS)
    assert planned(case, "own", "two-kernel").before is not None
    two = planned(case, "peer", "two-kernel").before is not None
    assert two == (tokens <= (6 if window > 8 else 2))


@pytest.mark.parametrize("scratch", PEERS)
def test_one_kernel_unless_two_are_asked_for(planned, scratch):
    case = Case(ODD, 2, 16, "bfloat16", num_slots=SLOTS)
    for algorithm in ("auto", "monolith"):
        made = planned(case, scratch, algorithm)
        assert type(made.key) in (CheckpointingSsuKey, SmallCheckpointingSsuKey)
        assert made.before is None and not made.pdl


def test_auto_goes_by_what_was_measured(planned, monkeypatch):
    case = Case(ODD, 2, 16, "bfloat16", num_slots=SLOTS)
    heads = BATCH * ODD.nheads * ODD.head_dim / 64
    for least, two in ((heads, True), (heads + 1, False)):
        monkeypatch.setattr(schedule, "TWO_KERNEL_HEADS", {("bfloat16", 1): least})
        assert (planned(case, "own", "auto").before is not None) == two
        assert planned(case, "own", "monolith").before is None
        assert planned(case, "", "auto").before is None
        wide = Case(ODD, 2, 16, "float32", num_slots=SLOTS)
        assert planned(wide, "own", "auto").before is None


def test_states_without_a_streaming_form(planned):
    """Two kernels are for the streaming form; the others are done by one, whatever is asked for."""
    case = Case(SHAPES["widest"], 2, 16, "int8", num_slots=SLOTS)
    made = planned(case, "own", "two-kernel")
    assert type(made.key) is SmallCheckpointingSsuKey and made.before is None


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_form_that_sums_in_its_own_order_has_no_second_kernel(planned, monkeypatch, tokens):
    """Few heads and one or two tokens: one kernel, so that the bits are those of one kernel."""
    choose_form(monkeypatch, "small")
    made = planned(Case(ODD, tokens, 16, "float32", num_slots=SLOTS), "own", "two-kernel")
    small = tokens <= 2
    assert isinstance(made.key, SmallCheckpointingSsuKey) == small
    assert (made.before is None) == small


@pytest.mark.parametrize("pdl", [False, True])
def test_the_second_kernel_always_starts_early(planned, pdl):
    """The first one does if it is asked to; both read one record, in copies of the plan too."""
    case = Case(ODD, 2, 16, "float32", num_slots=SLOTS)
    made = planned(case, "own", "two-kernel", enable_pdl=pdl)
    for second in (made, made.copy(), made.copy().copy()):
        first = second.before
        assert first is not None
        assert (first.pdl, second.pdl) == (pdl, True)
        assert first.record is second.record
    assert made.copy().record is not made.record


def test_launches_in_order(monkeypatch, fresh):
    """A repeated call and a bound one launch both kernels, on the arrays that are given."""
    launched: list[tuple[Any, int]] = []

    class Recorder:
        def launch(self, plan: plan.Plan, stream: int) -> None:
            launched.append((plan.key, plan.record.cb_scaled))

    monkeypatch.setitem(plan.launchers, "cpu", Recorder())
    case = Case(ODD, 2, 8, "float32", num_slots=SLOTS)
    stack = ssm.LayerStack(
        1, SLOTS, ODD.nheads, ODD.head_dim, ODD.ngroups, ODD.dstate, max_window=8, npredicted=2,
        device="cpu",
    )  # fmt: skip
    given = make_step(case, BATCH, np.random.default_rng(0)).arrays()
    addresses = []
    kept = []  # so that no two lie in the same place
    for _ in range(3):
        scratch = make_scratch("own", case)
        kept.append(scratch)
        addresses += 2 * [scratch["cb_scaled"].ctypes.data]
        stack.step(0, **given, **scratch, algorithm="two-kernel")
    bound = stack.bind(0, **given, **kept[0], algorithm="two-kernel")
    bound()
    bound()
    second = PreparedCheckpointingSsuKey("float32", "bfloat16", ODD.dstate, 1)
    assert [key for key, _ in launched] == 5 * [precompute_key(second), second]
    assert [address for _, address in launched] == addresses + 4 * addresses[:1]


def test_shared_memory_of_the_second_kernel():
    """It has no place for what makes weights, so at one token more warps have room."""
    step = Sizes(256, 64, 8, 64, 1, 16, 17, True, "two-kernel", (512, 64, 512))
    on, case = Processor(132, 227 << 10), ("bfloat16", "bfloat16", 128)
    two = schedule.schedule(*case, step, on)
    one = schedule.schedule(*case, replace(step, algorithm="monolith"), on)
    assert two.fields["bytes_of_share"] < one.fields["bytes_of_share"]
    assert two.threads >= one.threads
    assert [two.fields[name] for name in schedule.SCRATCH_WORDS] == [512, 64, 512]
    assert one.before is None
