"""Random histories of an inference engine stay exact.

REPLAYSSM_ENGINE_EVENTS sets the length of the long history: 10000 takes some minutes on the CPU.
"""

from __future__ import annotations

import os

import pytest
from cases import Case, Shape
from engine import EVENTS, Engine, run
from host.launcher import ORDERS, HostLauncher
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import NumPyBackend, reference_path

SHAPE = Shape("engine", 2, 1, 64, 64)
WINDOWS = ((4, 16), (1, 16), (3, 4), (8, 8))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_long_history(backend, state_dtype):
    events = int(os.environ.get("REPLAYSSM_ENGINE_EVENTS", "250"))
    case = Case(SHAPE, 4, 16, state_dtype, num_slots=9)
    engine = Engine(backend, case, seed=events)
    run(engine, events)
    assert all(engine.counts[name] for name in EVENTS), engine.counts


def test_a_history_on_the_cpu_path():
    with reference_path():
        engine = Engine(NumPyBackend(), Case(SHAPE, 4, 16, "float16", "float16", num_slots=9))
        run(engine, 300)
    assert all(engine.counts[name] for name in EVENTS), engine.counts


class Shared(NumPyBackend):
    """NumPy memory that the kernels run on."""

    name = "host"


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    history=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=60),
    window=st.sampled_from(WINDOWS),
    formats=st.sampled_from((("float32", "bfloat16"), ("float16", "float16"))),
    block=st.integers(1, 20),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**31),
)
def test_any_history_is_exact(history, window, formats, block, order, seed):
    with HostLauncher(order, seed % 100).installed():
        engine = Engine(Shared(), Case(SHAPE, *window, *formats, num_slots=7), 2, block, seed)
        engine.event("admit")
        for name in history:
            engine.event("verify")
            engine.event(name)
