"""The decode workload: shapes, acceptance, cursors in the steady state, and the bytes of a step.

Everything here is NumPy; a test compares it with counts made by hand.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Of a number that steps read, block scales included.
STATE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16+fp8": 1,
    "float16+nvfp4": 9 / 16,
}
COPIED = ("float16+fp8", "float16+nvfp4")  # copies of a float16 state, which flushes read and write
SCALED = ("int8", "float8_e4m3fn", *COPIED)  # with an fp32 scale for each row
ACTIVATION = "bfloat16"
ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """One layer, and the window W of its rings."""

    nheads: int = 64
    ngroups: int = 8
    head_dim: int = 64
    dstate: int = 128
    window: int = 16

    def __str__(self) -> str:
        return (
            f"{self.nheads} heads in {self.ngroups} groups, {self.head_dim} x {self.dstate}, "
            f"W = {self.window}"
        )

    @property
    def short(self) -> str:
        return f"{self.nheads}/{self.ngroups}/{self.head_dim}/{self.dstate}"

    def state_bytes(self, dtype: str) -> int:
        """Of one sequence's states as steps read them, scales included."""
        row = int(self.dstate * STATE_BYTES[dtype]) + (4 if dtype in SCALED else 0)
        return self.nheads * self.head_dim * row

    def carried_bytes(self, dtype: str) -> int:
        """Of what carries the recurrence of one sequence, where steps read a copy of it."""
        return 2 * self.nheads * self.head_dim * self.dstate if dtype in COPIED else 0


class Acceptance:
    """How many of a step's T tokens are accepted, the sampled one counted: 1 to T.

    `text` is "geometric:P", drafts that are accepted one after another with probability P each
    (truncated at T), or a CSV file whose lines are a count and how often it was seen. Counts
    beyond T are taken as T, so that one histogram serves all T.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._histogram: dict[int, float] | None = None
        kind, _, value = text.partition(":")
        if kind == "geometric":
            try:
                self._p = float(value)
            except ValueError:
                self._p = -1.0
            if not 0 <= self._p <= 1:
                raise ValueError(
                    f"acceptance: expected geometric:P with P from 0 to 1, got {text!r}"
                )
        else:
            self._histogram = _read_histogram(text)

    def probabilities(self, tokens: int) -> np.ndarray:
        """Of 1, 2, ... `tokens` accepted tokens."""
        p = np.zeros(tokens)
        if self._histogram is None:
            p[:] = (1 - self._p) * self._p ** np.arange(tokens)
            p[-1] = self._p ** (tokens - 1)
        else:
            for count, seen in self._histogram.items():
                p[min(count, tokens) - 1] += seen
        return p / p.sum()

    def draw(self, rng: np.random.Generator, rows: int, tokens: int) -> np.ndarray:
        return rng.choice(np.arange(1, tokens + 1), rows, p=self.probabilities(tokens))

    def mean(self, tokens: int) -> float:
        return float(self.probabilities(tokens) @ np.arange(1, tokens + 1))


def _read_histogram(path: str) -> dict[int, float]:
    histogram: dict[int, float] = {}
    with open(path, newline="") as file:
        for number, line in enumerate(csv.reader(file), 1):
            if not line or (number == 1 and not line[0].strip().isdecimal()):
                continue  # empty, or a header
            try:
                count, seen = int(line[0]), float(line[1])
            except (ValueError, IndexError):
                count, seen = 0, 0.0
            if count < 1 or not 0 <= seen < float("inf"):
                raise ValueError(
                    f"acceptance: expected lines 'accepted (1 or more),how often', got {line} in "
                    f"line {number} of {path}"
                )
            histogram[count] = histogram.get(count, 0.0) + seen
    if not sum(histogram.values()):
        raise ValueError(f"acceptance: expected a histogram in {path}, got nothing")
    return histogram


def advance(
    prev: np.ndarray, start: np.ndarray, accepted: np.ndarray, tokens: int, window: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The cursors after a step of all sequences."""
    flushed = prev + tokens > window
    start = np.where(flushed, (start + prev) % rows, start)
    return np.where(flushed, accepted, prev + accepted).astype(np.int32), start.astype(np.int32)


def steady_cursors(
    batch: int, tokens: int, shape: Shape, acceptance: Acceptance, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Live rows and ring starts of sequences that took 200 to 400 steps, so that every one stands
    elsewhere in its flush cycle and the share of flushes is the steady one."""
    rows = shape.window + tokens
    prev, start = np.zeros(batch, np.int32), rng.integers(0, rows, batch).astype(np.int32)
    age = rng.integers(200, 400, batch)
    for step in range(400):
        accepted = acceptance.draw(rng, batch, tokens)
        moved = advance(prev, start, accepted, tokens, shape.window, rows)
        runs = step < age
        prev, start = np.where(runs, moved[0], prev), np.where(runs, moved[1], start)
    return prev.astype(np.int32), start.astype(np.int32)


def cycle(
    cursors: tuple[np.ndarray, np.ndarray],
    tokens: int,
    shape: Shape,
    acceptance: Acceptance,
    rng: np.random.Generator,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The cursors of W consecutive steps: with one token, each sequence flushes exactly once."""
    prev, start = cursors
    for _ in range(shape.window):
        yield prev, start
        accepted = acceptance.draw(rng, len(prev), tokens)
        prev, start = advance(prev, start, accepted, tokens, shape.window, shape.window + tokens)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer step, everything moved once."""

    read: int
    written: int
    flushes: float  # sequences; a mean over a cycle is no whole number

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic(shape: Shape, dtype: str, tokens: int, prev: np.ndarray) -> Traffic:
    """What a replay step must read (checkpoints, live rows, tokens) and write (outputs, appended
    rows, the checkpoints of flushes)."""
    heads, groups = shape.nheads * shape.head_dim, shape.ngroups * shape.dstate
    row = ACTIVATION_BYTES * (heads + groups) + 4 * shape.nheads  # of the rings: x, B, dt
    token = ACTIVATION_BYTES * (heads + 2 * groups) + 4 * shape.nheads  # x, B, C, dt
    out = ACTIVATION_BYTES * heads
    steps, flushes = len(prev), int((prev + tokens > shape.window).sum())
    state, carried = shape.state_bytes(dtype), shape.carried_bytes(dtype)
    return Traffic(
        read=steps * (state + tokens * token) + int(prev.sum()) * row + flushes * carried,
        written=flushes * (state + carried) + steps * tokens * (out + row),
        flushes=flushes,
    )
