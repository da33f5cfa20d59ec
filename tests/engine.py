"""A small inference engine over a LayerStack, with a ledger that knows every token exactly.

Requests run, verify drafts, leave snapshots at block boundaries, fork, are preempted to the host
and come back; snapshots go to new requests and are evicted. After every event the states of all
that is alive are compared with the ledger's, bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cases import Case, Step
from oracles import Audit, float64

import replayssm_cupy as ssm

LONGEST = 150  # tokens of a request: counts stay exact in 16-bit states


@dataclass
class Sequence:
    """A request or a snapshot: its number in the ledger, and its tokens so far."""

    number: int
    tokens: int = 0


@dataclass
class Preempted:
    sequence: Sequence
    image: dict[str, np.ndarray]


class Ledger(Audit):
    """An Audit whose sequences come and go; a copy has its parent's tokens and x."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, 0)
        self._x: list[float] = []

    def add(self, parent: int | None = None, without: int = 0) -> int:
        """A new sequence: empty, or a parent's without its last tokens."""
        new = self.num_slots
        self.num_slots += 1
        accepted = [] if parent is None else list(self._accepted[parent])
        self._accepted.append(accepted[: len(accepted) - without])
        self._number.append(0 if parent is None else self._number[parent])
        self._x.append(float(2 ** (new % 5)) if parent is None else self._x[parent])
        return new

    def forget(self, number: int) -> None:
        self._accepted[number] = []

    def x_value(self, slot: int) -> float:
        return self._x[slot]


@dataclass
class Engine:
    """The stack, its slots, and who lives in them."""

    backend: Any
    case: Case
    layers: int = 2
    block: int = 6
    seed: int = 0
    running: dict[int, Sequence] = field(default_factory=dict)
    cached: dict[int, Sequence] = field(default_factory=dict)
    away: list[Preempted] = field(default_factory=list)

    def __post_init__(self) -> None:
        c, s = self.case, self.case.shape
        self.rng = np.random.default_rng(self.seed)
        self.ledger = Ledger(c)
        self.stack = ssm.LayerStack(
            self.layers, c.num_slots, s.nheads, s.head_dim, s.ngroups, s.dstate,
            max_window=c.max_window, npredicted=c.npredicted, state_dtype=c.state_dtype,
            activation_dtype=c.activation_dtype,
            device="cuda" if self.backend.name == "cuda" else "cpu",
        )  # fmt: skip
        for ring in (*self.stack.x_caches, *self.stack.B_caches, *self.stack.dt_caches):
            ring[...] = self.put(np.full(ring.shape, np.nan, self.backend.get(ring).dtype))
        for state in self.stack.states:  # a slot that nobody was admitted to holds rubbish
            state[...] = self.put(np.full(state.shape, np.nan, self.backend.get(state).dtype))
        weights = [np.zeros(s.nheads, np.float32) for _ in range(self.layers)]
        self.stack.refresh([self.put(A) for A in weights])
        self.counts = dict.fromkeys(EVENTS, 0)

    def put(self, array: Any, dtype: Any = None) -> Any:
        return self.backend.put(np.asarray(array, dtype))

    def free(self) -> list[int]:
        return [s for s in range(self.case.num_slots) if s not in self.running | self.cached]

    def pick(self, of: Any) -> Any:
        choices = list(of)
        return choices[int(self.rng.integers(len(choices)))]

    def event(self, name: str) -> None:
        """One event, if there is something that it can happen to; then everything is checked."""
        if getattr(self, name)() is not False:
            self.counts[name] += 1
            self.check()

    # --- Events ------------------------------------------------------------------------------

    def admit(self) -> Any:
        if not (free := self.free()):
            return False
        slot = self.pick(free)
        self.stack.reset(self.put([slot], np.int32))
        self.running[slot] = Sequence(self.ledger.add())

    def finish(self) -> Any:
        if not self.running:
            return False
        self._end(self.pick(self.running))

    def _end(self, slot: int) -> None:
        self.ledger.forget(self.running.pop(slot).number)

    def verify(self) -> Any:
        """A step of some requests with random acceptance; those that cross a block leave a
        snapshot, as far as there are free slots."""
        if not self.running:
            return False
        rows = [s for s in self.rng.permutation(list(self.running)) if self.rng.random() < 0.8]
        rows = [int(slot) for slot in rows] + [-1] * int(self.rng.integers(0, 2))
        if not rows:
            return False
        q = int(self.rng.integers(1, self.case.npredicted + 1))
        probe = int(self.rng.integers(self.case.shape.dstate))
        numbers = [self.running[slot].number if slot >= 0 else -1 for slot in rows]
        step, exact = self.ledger.propose(numbers, q, probe)
        self._step(step, rows, exact)
        accepted = self.rng.integers(0, q + 1, len(rows))
        slots = self.put(rows, np.int32)
        self.stack.advance(slots, self.put(accepted, np.int32))
        self._snapshot_blocks(rows, accepted)
        for slot in [s for s in rows if s >= 0 and self.running[s].tokens > LONGEST]:
            self._end(slot)

    def _step(self, step: Step, rows: list[int], exact: np.ndarray) -> None:
        slots = self.put(rows, np.int64)
        given = [self.put(a) for a in (step.x, step.dt, step.A, step.B, step.C)]
        for layer in range(self.layers):
            out = self.stack.step(layer, *given, dt_softplus=False, slots=slots)
            np.testing.assert_array_equal(float64(self.backend.get(out)), exact)

    def _snapshot_blocks(self, rows: list[int], accepted: np.ndarray) -> None:
        free = self.free()
        before = [self.running[slot].tokens if slot >= 0 else 0 for slot in rows]
        targets = [free.pop() if slot >= 0 and len(free) > 2 else -1 for slot in rows]
        self.stack.materialize_blocks(
            self.put(rows, np.int32), self.put(targets, np.int32), self.put(before, np.int64),
            self.put(accepted, np.int32), block_size=self.block, check=bool(self.rng.integers(2)),
        )  # fmt: skip
        for slot, kept, had, target in zip(rows, accepted, before, targets, strict=True):
            if slot < 0:
                continue
            request = self.running[slot]
            self.ledger.accept(request.number, int(kept))
            request.tokens += int(kept)
            boundary = request.tokens // self.block * self.block
            if boundary > had and target >= 0:
                late = request.tokens - boundary
                self.cached[target] = Sequence(self.ledger.add(request.number, late), boundary)

    def snapshot(self) -> Any:
        """Any prefix of a request's ring, of several requests at once."""
        free = self.free()
        rows = list(self.running)[: len(free)]
        if not rows:
            return False
        live = self.backend.get(self.stack.prev_num_accepted_tokens)
        prefix = [int(self.rng.integers(-1, live[slot] + 1)) for slot in rows]
        targets = free[: len(rows)]
        self.stack.materialize(
            self.put(rows, np.int32), self.put(targets, np.int32), self.put(prefix, np.int32)
        )
        for slot, target, rows_taken in zip(rows, targets, prefix, strict=True):
            if rows_taken >= 0:
                request, late = self.running[slot], int(live[slot]) - rows_taken
                number = self.ledger.add(request.number, late)
                self.cached[target] = Sequence(number, request.tokens - late)

    def fold(self) -> Any:
        """Some live rows of a request go into its own state."""
        if not self.running:
            return False
        slot = self.pick(self.running)
        live = int(self.backend.get(self.stack.prev_num_accepted_tokens)[slot])
        one = self.put([slot], np.int32)
        prefix = self.put([int(self.rng.integers(live + 1))], np.int32)
        self.stack.materialize(one, one, prefix, check=True)

    def evict(self) -> Any:
        if not self.cached:
            return False
        slot = self.pick(self.cached)
        self.ledger.forget(self.cached.pop(slot).number)

    def restore(self) -> Any:
        """A snapshot becomes a new request, in a slot of its own."""
        if not self.cached or not (free := self.free()):
            return False
        source, slot = self.pick(self.cached), self.pick(free)
        self.stack.copy_slots(self.put([source, -1]), self.put([slot, source]))
        snapshot = self.cached[source]
        self.running[slot] = Sequence(self.ledger.add(snapshot.number), snapshot.tokens)

    def fork(self) -> Any:
        """A request goes on twice, live rows and all."""
        if not self.running or not (free := self.free()):
            return False
        source = self.pick(self.running)
        targets = [*free[: int(self.rng.integers(1, 3))], -1][:2]
        self.stack.fork(self.put([source]), self.put([targets]))
        for slot in targets:
            if slot >= 0:
                self.running[slot] = copy.copy(self.running[source])
                self.running[slot].number = self.ledger.add(self.running[source].number)

    def preempt(self) -> Any:
        if not self.running:
            return False
        slot = self.pick(self.running)
        self.away.append(Preempted(self.running.pop(slot), self.stack.export_slots([slot])))
        for state in self.stack.states:  # whoever gets the slot next must not need this
            state[slot] = self.put(np.full(state.shape[1:], np.nan, self.backend.get(state).dtype))

    def resume(self) -> Any:
        if not self.away or not (free := self.free()):
            return False
        back = self.away.pop(int(self.rng.integers(len(self.away))))
        slot = self.pick(free)
        self.stack.import_slots(back.image, [slot])
        self.running[slot] = back.sequence

    # --- What must be true -------------------------------------------------------------------

    def check(self) -> None:
        live = self.backend.get(self.stack.prev_num_accepted_tokens)
        for state in self.stack.states:
            got = float64(self.backend.get(state))
            for slot, sequence in (self.running | self.cached).items():
                exact = self.ledger.state(sequence.number, int(live[slot]))
                np.testing.assert_array_equal(got[slot], exact)
        for slot in self.cached:
            assert live[slot] == 0
        for slot, sequence in (self.running | self.cached).items():
            assert sequence.tokens == len(self.ledger._accepted[sequence.number]), slot


EVENTS = ("admit", "finish", "verify", "snapshot", "fold", "evict", "restore", "fork", "preempt",
          "resume")  # fmt: skip
WEIGHTS = (5, 1, 20, 2, 1, 4, 3, 2, 2, 3)


def run(engine: Engine, events: int) -> None:
    """A random history, in which every kind of event happens."""
    weights = np.array(WEIGHTS) / sum(WEIGHTS)
    for _ in range(events):
        engine.event(str(engine.rng.choice(EVENTS, p=weights)))
