"""Any history of requests in a stack of layers gives exact numbers, in any order of threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from cases import DTYPES, Case, Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Audit

from host.launcher import ORDERS, HostLauncher
from replayssm_cupy import LayerStack

NUM_SLOTS, LAYERS = 5, 2
SHAPE = Shape("history", 3, 1, 64, 64)
WINDOWS = ((1, 16), (1, 1), (3, 4), (4, 16), (6, 8), (12, 16))
FORMATS = (("float32", "bfloat16"), ("float16", "float16"))
PADDING = (-1, -7, NUM_SLOTS, 10**6)


@dataclass(frozen=True)
class Turn:
    """One step of all layers; a negative row of `rows` is padding, -1 - its index in PADDING."""

    q: int
    rows: tuple[int, ...]
    accepted: tuple[int, ...]
    ended: frozenset[int]  # slots that go to a new request afterwards
    by_reset: bool  # else by the reset of `advance` and a loaded state


@st.composite
def turns(draw: st.DrawFn, npredicted: int) -> Turn:
    q = draw(st.integers(1, npredicted))
    rows = draw(st.permutations([*range(NUM_SLOTS), -1, -2, -3, -4]))
    rows = tuple(rows[: draw(st.integers(1, len(rows)))])
    accepted = draw(st.tuples(*[st.integers(0, q)] * len(rows)))
    live = [slot for slot in rows if slot >= 0]
    ended = draw(st.frozensets(st.sampled_from(live), max_size=2)) if live else frozenset()
    return Turn(q, rows, accepted, ended, draw(st.booleans()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_history_is_exact(data):
    npredicted, max_window = data.draw(st.sampled_from(WINDOWS))
    state_dtype, activation_dtype = data.draw(st.sampled_from(FORMATS))
    case = Case(SHAPE, npredicted, max_window, state_dtype, activation_dtype)
    order, seed = data.draw(st.sampled_from(ORDERS)), data.draw(st.integers(0, 99))
    history = data.draw(st.lists(turns(npredicted), min_size=1, max_size=12))
    with HostLauncher(order, seed).installed():
        follow(case, history)


def follow(case: Case, history: list[Turn]) -> None:
    shape = case.shape
    stack = LayerStack(
        LAYERS,
        NUM_SLOTS,
        shape.nheads,
        shape.head_dim,
        shape.ngroups,
        shape.dstate,
        max_window=case.max_window,
        npredicted=case.npredicted,
        state_dtype=case.state_dtype,
        activation_dtype=case.activation_dtype,
        device="cpu",
    )
    for ring in (*stack.x_caches, *stack.B_caches, *stack.dt_caches):
        ring[...] = np.nan
    # The oracle knows requests: a slot that is given away goes on as the next one.
    oracle = Audit(case, NUM_SLOTS + NUM_SLOTS * len(history))
    request = list(range(NUM_SLOTS))
    for turn in history:
        step, exact = oracle.propose([request[r] if r >= 0 else -1 for r in turn.rows], turn.q)
        slots = np.array([r if r >= 0 else PADDING[-1 - r] for r in turn.rows], np.int64)
        step = replace(step, state_batch_indices=slots)
        for layer in range(LAYERS):
            out = stack.step(
                layer, step.x, step.dt, step.A, step.B, step.C, dt_softplus=False, slots=slots
            )
            np.testing.assert_array_equal(out.astype(np.float64), exact)
        ended = np.array([row in turn.ended for row in turn.rows])
        stack.advance(
            slots, np.array(turn.accepted, np.int32), reset=None if turn.by_reset else ended
        )
        for slot, accepted in zip(turn.rows, turn.accepted, strict=True):
            if slot >= 0:
                oracle.accept(request[slot], accepted)
        give_away(stack, turn, request)
        check(stack, oracle, request)


def give_away(stack: LayerStack, turn: Turn, request: list[int]) -> None:
    slots = np.array(sorted(turn.ended), np.int32)
    if turn.by_reset and len(slots):
        stack.reset(slots)
    for layer in range(LAYERS if len(slots) and not turn.by_reset else 0):
        empty = np.zeros((len(slots), *stack.states[0].shape[1:]), DTYPES["bfloat16"])
        stack.load_state(layer, slots, empty)
    for slot in slots:
        request[slot] = max(request) + 1


def check(stack: LayerStack, oracle: Audit, request: list[int]) -> None:
    for slot, waiting in enumerate(stack.prev_num_accepted_tokens):
        for state in stack.states:
            exact = oracle.state(request[slot], int(waiting))
            np.testing.assert_array_equal(state[slot].astype(np.float64), exact)
