"""One configuration of the decode benchmark: layers, their launches, and the row that comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from peers import Case, Launches, Maker
from timing import Replay, TorchReplay, flush_first_time
from workload import Acceptance, Shape, Traffic, cycle, steady_cursors, traffic

BYTES_OF_CACHES = 400 << 20  # at least this much state, several times the L2
MOST_LAYERS = 128
ROUNDS, REPEATS = 3, 11
SETTLING_LAUNCHES = 16
NOISE = (1 << 20) + 1  # random numbers; odd, so that rows differ


@dataclass
class Settings:
    """What is the same in all rows of a table."""

    shape: Shape
    acceptance: Acceptance
    whole_cycle: bool
    pdl: bool
    algorithm: str
    ceiling: float  # bytes per microsecond
    peers: dict[str, Maker] = field(default_factory=dict)


def layers_of(shape: Shape, dtype: str, batch: int) -> int:
    """As many layers as make the states several times the L2, so that every step finds its own
    cold: the others were read in between."""
    return min(MOST_LAYERS, max(3, -(-BYTES_OF_CACHES // (batch * shape.state_bytes(dtype)))))


class Ours:
    """A stack in the steady state, and its launches."""

    def __init__(self, settings: Settings, case: Case, rng: np.random.Generator) -> None:
        import cupy
        import ml_dtypes

        import replayssm_cupy as ssm

        shape, batch, tokens, layers = case.shape, case.batch, case.tokens, case.layers
        self.stack = stack = ssm.LayerStack(
            layers, batch, shape.nheads, shape.head_dim, shape.ngroups, shape.dstate,
            max_window=shape.window, npredicted=tokens, state_dtype=case.dtype, device="cuda",
        )  # fmt: skip

        stack.warm_up()
        # Drawn once and repeated, because a row may need 100 million numbers.
        noise = cupy.asarray(rng.standard_normal(NOISE, np.float32))

        def random(*size: int) -> cupy.ndarray:
            return cupy.resize(noise, size)

        def activations(*size: int) -> cupy.ndarray:
            return random(*size).astype(ml_dtypes.bfloat16)

        size = stack.states[0].shape
        state = cupy.broadcast_to(random(*size[1:]), size)
        x_rows = activations(*stack.x_caches[0].shape[1:])
        B_rows = activations(*stack.B_caches[0].shape[1:])
        for layer in range(layers):
            stack.x_caches[layer][...] = x_rows
            stack.B_caches[layer][...] = B_rows
            stack.dt_caches[layer][...] = 0.05
            stack.load_state(layer, None, state)
        self.set_cursors(case.prev, case.start)
        inputs = {
            "x": activations(batch, tokens, shape.nheads, shape.head_dim),
            "dt": random(batch, tokens, shape.nheads),
            "A": -cupy.exp(random(shape.nheads)),
            "B": activations(batch, tokens, shape.ngroups, shape.dstate),
            "C": activations(batch, tokens, shape.ngroups, shape.dstate),
            "D": random(shape.nheads),
            "dt_bias": random(shape.nheads) - 3,
            "dt_softplus": True,
            "out": activations(batch, tokens, shape.nheads, shape.head_dim),
        }
        slots = cupy.asarray(case.slots)
        scratch = ssm.allocate_scratch(batch, shape.nheads, like=inputs["x"])
        options: dict[str, Any] = {**scratch, "enable_pdl": settings.pdl, "slots": slots}

        def bound(algorithm: str) -> list[Callable[[], Any]]:
            return [
                stack.bind(layer, **inputs, **options, algorithm=algorithm)
                for layer in range(layers)
            ]

        two_kernels = settings.algorithm == "two-kernel"
        self.replay = bound("monolith" if two_kernels else settings.algorithm)
        self.two_kernels = bound("two-kernel") if two_kernels else []
        # Until a process has launched some steps eagerly, its graphs are faster than ever after.
        for launch in (self.replay * SETTLING_LAUNCHES)[:SETTLING_LAUNCHES]:
            launch()
        # Beside a copy: the float16 state alone.
        scaled = bool(stack.state_scales) and not stack.state_copies
        self.plain: list[Callable[[], Any]] = [
            lambda layer=layer: ssm.selective_state_update(
                stack.states[layer],
                **inputs,
                state_batch_indices=slots,
                state_scale=stack.state_scales[layer] if scaled else None,
            )
            for layer in range(layers)
        ]

    def set_cursors(self, prev: np.ndarray, start: np.ndarray) -> None:
        import cupy

        self.stack.prev_num_accepted_tokens[...] = cupy.asarray(prev)
        self.stack.ring_start[...] = cupy.asarray(start)
        cupy.cuda.Device().synchronize()


def decode_row(settings: Settings, dtype: str, tokens: int, batch: int) -> dict[str, Any]:
    """Times one configuration; replay, plain update and peers take turns."""
    shape, acceptance = settings.shape, settings.acceptance
    rng = np.random.default_rng(batch * 31 + tokens)
    layers = layers_of(shape, dtype, batch)
    prev, start = steady_cursors(batch, tokens, shape, acceptance, rng)
    slots = rng.permutation(batch).astype(np.int32)
    case = Case(shape, dtype, tokens, batch, layers, prev, start, slots)
    phases = [(prev, start)]
    if settings.whole_cycle:
        phases = list(cycle((prev, start), tokens, shape, acceptance, rng))
    ours = Ours(settings, case, rng)
    timed: dict[str, tuple[Replay | TorchReplay, Any]] = {
        "replay_us": (Replay(ours.replay), ours.set_cursors),
        "plain_us": (Replay(ours.plain), None),
    }
    if ours.two_kernels:
        timed["two_kernels_us"] = Replay(ours.two_kernels), None
    columns: dict[str, float | None] = {}
    for name, make in settings.peers.items():
        launches: Launches | None = make(case)
        columns[f"{name}_us"] = None
        if launches is not None:
            timed[f"{name}_us"] = TorchReplay(launches.calls), launches.set_cursors
    columns = dict.fromkeys(timed) | columns
    columns |= {name: round(us, 2) for name, us in _times(timed, phases).items()}
    moved = _mean([traffic(shape, dtype, tokens, of_phase) for of_phase, _ in phases])
    floor, flush_first = moved.total / settings.ceiling, flush_first_time(moved, layers)
    replay_us = columns["replay_us"]
    assert replay_us is not None
    return {
        "shape": shape.short,
        "state": dtype,
        "tokens": tokens,
        "batch": batch,
        **columns,
        "floor_us": round(floor, 2),
        "flush_first_us": round(flush_first, 2),
        "percent": round(100 * floor / replay_us, 1),
        "flush_first_percent": round(100 * flush_first / replay_us, 1),
        "bytes_read": moved.read,
        "bytes_written": moved.written,
        "flush_share": round(moved.flushes / batch, 3),
        "phases": len(phases),
        "layers": layers,
        "acceptance": acceptance.text,
    }


def _times(
    timed: dict[str, tuple[Replay | TorchReplay, Any]],
    phases: Sequence[tuple[np.ndarray, np.ndarray]],
) -> dict[str, float]:
    """Microseconds of each: the mean over the phases of the median of interleaved rounds."""
    sums = dict.fromkeys(timed, 0.0)
    for prev, start in phases:
        rounds: dict[str, list[float]] = {name: [] for name in timed}
        for _, set_cursors in timed.values():
            if set_cursors is not None:
                set_cursors(prev, start)
        for _ in range(ROUNDS):
            for name, (replay, _) in timed.items():
                rounds[name].append(replay.time(REPEATS))
        for name, times in rounds.items():
            sums[name] += float(np.median(times)) / len(phases)
    return sums


def _mean(phases: Sequence[Traffic]) -> Traffic:
    number = len(phases)
    return Traffic(
        round(sum(p.read for p in phases) / number),
        round(sum(p.written for p in phases) / number),
        sum(p.flushes for p in phases) / number,
    )
