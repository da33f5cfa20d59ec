"""Dependent launches: nothing that the kernel ahead may write is read or written before the wait.

The emulator hides an array, with all bits set, until a block waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import SHAPES, Case, make_step
from conftest import choose_form
from oracles import bits, poison_dead_rows
from runs import make_stored

from host.launcher import HostLauncher, scratch_of
from replayssm_cupy import allocate_scratch, checkpointing_ssu
from replayssm_cupy.keys import PreparedCheckpointingSsuKey
from replayssm_cupy.plan import Plan

CASE = Case(SHAPES["three-heads-per-group"], 2, 8, "int8", num_slots=5)
BATCH = 4
WAYS = ("stream", "small", "slabs", "two-kernel")


def arguments(way: str) -> dict[str, Any]:
    """Arrays with every option on; one sequence flushes, one is padding."""
    rng = np.random.default_rng(2)
    case = replace(CASE, npredicted=3) if way == "slabs" else CASE
    pools = make_stored(case, rng, fill=True)
    pools.prev_num_accepted_tokens[:] = 1, 8, 3, 0, 2
    poison_dead_rows(pools)
    step = make_step(case, BATCH, rng, slots=np.array([1, 4, -1, 0], np.int32))
    arrays = {**pools.arrays(), **step.arrays(), "rand_seed": np.array([5])}
    arrays["force_flush"] = np.zeros(BATCH, np.uint8)
    return arrays | {"out": np.zeros_like(step.x), "dt_softplus": True, "max_window": 8}


WRITTEN = sorted(
    name for name, array in arguments("stream").items() if isinstance(array, np.ndarray)
)


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    choose_form(monkeypatch, "small" if request.param in ("small", "slabs") else "stream")
    return request.param


def run(way: str, hidden: str | None) -> dict[str, np.ndarray]:
    """All arrays after a step; `hidden` is written by the kernel ahead, if it may be so."""
    given, options = arguments(way), {"enable_pdl": hidden is not None}
    launcher = HostLauncher()
    if way == "two-kernel":
        scratch = allocate_scratch(BATCH, CASE.shape.nheads, device="cpu")
        options |= {"algorithm": "two-kernel", **scratch}

    def late(plan: Plan) -> list[np.ndarray]:
        if isinstance(plan.key, PreparedCheckpointingSsuKey):
            return scratch_of(plan)
        return [given[hidden]] if hidden else []

    launcher.late = late
    with launcher.installed():
        checkpointing_ssu(**given, **options)
    return {name: array for name, array in given.items() if isinstance(array, np.ndarray)}


@pytest.mark.parametrize("hidden", WRITTEN)
def test_nothing_is_touched_early(way, hidden):
    plain, early = run("slabs" if way == "slabs" else "one kernel", None), run(way, hidden)
    assert np.isfinite(plain["out"].astype(np.float32)).all() and (plain["out"] != 0).any()
    for name in plain:
        assert np.array_equal(bits(plain[name]), bits(early[name])), name
