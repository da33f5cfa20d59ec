"""Speculative greedy decoding with drafts from the text so far, and its check.

A step feeds every request its newest token and `draft` guesses, found by looking up the last few
tokens earlier in the text. The model's own choice after each of them says how many guesses were
right; those are kept, and the choice after the last right one comes for free.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .mamba2 import Array, Mamba2, PlainCache, ReplayCache
from .reference import advance_cursors, flushes

LONGEST_NGRAM = 6


class PromptLookup:
    """Finds the latest earlier occurrence of the last n-gram, longest n first."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        """Take one more token; the n-grams that end before it now have a continuation."""
        end = len(self.tokens)
        for n in range(1, min(LONGEST_NGRAM, end) + 1):
            self._next[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Guess the next `count` tokens; the last token repeated where nothing matches."""
        text = list(self.tokens)
        for _ in range(count):
            text.append(self._guess(text))
        return text[len(self.tokens) :]

    def _guess(self, text: list[int]) -> int:
        for n in range(min(LONGEST_NGRAM, len(text)), 0, -1):
            place = self._next.get(tuple(text[-n:]))
            if place is not None:
                return self.tokens[place]
        return text[-1]


class Request:
    """One sequence: its prompt, what was generated, and when it ends."""

    def __init__(
        self, prompt: Sequence[int], max_new_tokens: int, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self.generated: list[int] = []
        self.finished = False
        self.live_rows = 0  # mirrors prev_num_accepted_tokens of its slot, for the report
        self._limit, self._eos = max_new_tokens, eos_token_ids
        self._lookup = PromptLookup()
        for token in prompt:
            self._lookup.append(token)

    def step_tokens(self, draft: int) -> list[int]:
        """The newest token and the guesses after it."""
        return [self.generated[-1], *self._lookup.propose(draft)]

    def extend(self, tokens: Sequence[int]) -> int:
        """Append tokens up to the limit or the end of the text; how many were taken."""
        before = len(self.generated)
        for token in tokens:
            if self.finished:
                break
            self.generated.append(token)
            self._lookup.append(token)
            self.finished = len(self.generated) >= self._limit or token in self._eos
        return len(self.generated) - before


@dataclass(slots=True)
class Statistics:
    """What a replay run did, over all its requests; a row is one request in one step."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flushes: int = 0
    ring_rows_read: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def mean_accepted(self) -> float:
        """Tokens kept per request and step, the model's own one included."""
        return sum(n * rows for n, rows in self.accepted.items()) / max(self.rows, 1)


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that the plain update would have chosen otherwise after the same text."""

    request: int
    position: int
    token: int
    plain_token: int
    gap: float  # logit of the plain choice less that of the token, on the plain path
    spread: float  # largest logit less the smallest

    @property
    def relative_gap(self) -> float:
        """The gap as a part of the logits' range."""
        return self.gap / self.spread


def decode(
    model: Mamba2,
    cache: ReplayCache,
    requests: Sequence[Request],
    draft: int,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Statistics:
    """Decode until every request is finished; each must hold its first token already.

    Only token ids and accepted counts come to the host, because the look-up happens there.
    """
    cache.select(np.full(len(requests), -1))  # padding compiles what is needed and changes nothing
    _verify(model, cache, np.zeros((len(requests), draft + 1), np.int64))
    statistics, began = Statistics(), time.perf_counter()
    while not all(request.finished for request in requests):
        live = np.array([not request.finished for request in requests])
        cache.select(np.where(live, np.arange(len(requests)), -1))
        host = _verify(model, cache, [request.step_tokens(draft) for request in requests])
        taken = 0
        for b in np.flatnonzero(live).tolist():
            kept = int(host[b, 0])
            _count_row(statistics, requests[b], cache, draft + 1, kept)
            taken += requests[b].extend(host[b, 1 : 1 + kept].tolist())
        statistics.steps += 1
        statistics.tokens += taken
        on_tokens(taken)
    statistics.seconds = time.perf_counter() - began
    return statistics


def _verify(model: Mamba2, cache: ReplayCache, tokens: Any) -> np.ndarray[Any, Any]:
    """One step: feeds tokens (batch, T), commits the right ones; (batch, 1 + T) on the host with
    the accepted count and the model's token after each."""
    fed = model.xp.asarray(tokens)
    choices = model.logits(model.forward(fed, cache)).argmax(axis=-1)
    accepted = count_accepted(model.xp, fed, choices)
    cache.commit(accepted)
    return to_host(model.xp.concatenate([accepted[:, None], choices], axis=1))


def check_against_plain(
    model: Mamba2, cache: PlainCache, requests: Sequence[Request]
) -> tuple[list[Flip], float]:
    """Compare every generated token with the plain update's greedy choice after the same text.

    As long as they agree this is plain one-token greedy decoding itself; feeding the replayed
    token after a disagreement keeps the texts together, so that every later token is judged too.
    Returns the disagreements and the seconds taken.
    """
    flips: list[Flip] = []
    batch = len(requests)
    cache.select(np.full(batch, -1))
    _judge(model, cache, np.zeros((batch, 2), np.int64))
    began = time.perf_counter()
    texts = [request.generated for request in requests]
    for position in range(1, max(len(text) for text in texts)):
        live = np.array([len(text) > position for text in texts])
        cache.select(np.where(live, np.arange(batch), -1))
        pairs = [
            text[position - 1 : position + 1] if alive else [0, 0]
            for text, alive in zip(texts, live, strict=True)
        ]
        choice, gap, spread = _judge(model, cache, pairs)
        flips += [
            Flip(b, position, pairs[b][1], int(choice[b]), float(gap[b]), float(spread[b]))
            for b in range(batch)
            if live[b] and (choice[b] != pairs[b][1] or not np.isfinite(spread[b]))
        ]
    return flips, time.perf_counter() - began


def _judge(model: Mamba2, cache: PlainCache, pairs: Any) -> list[np.ndarray[Any, Any]]:
    """Feeds the first token of each pair and judges the second: the plain choice, by how much its
    logit is above the second token's, and the logits' range, each (batch,) on the host."""
    fed = model.xp.asarray(pairs)
    logits = model.logits(model.forward(fed[:, :1], cache))[:, 0]
    cache.commit()
    top, rows = logits.max(axis=1), model.xp.arange(len(fed))
    judged = [logits.argmax(axis=1), top - logits[rows, fed[:, 1]], top - logits.min(axis=1)]
    return [to_host(values) for values in judged]


def count_accepted(xp: Any, tokens: Array, choices: Array) -> Array:
    """How many of the step's tokens (batch, T) to keep: the first, and guesses while right.

    choices[:, t] is the model's token after tokens[:, t]. Returns int32 on the arrays' device.
    """
    right = xp.ones(tokens.shape, np.int32)
    right[:, 1:] = tokens[:, 1:] == choices[:, :-1]
    return right.cumprod(axis=1).sum(axis=1).astype(np.int32)


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array of a NumPy or CuPy array."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


def _count_row(
    statistics: Statistics, request: Request, cache: ReplayCache, fed: int, kept: int
) -> None:
    window = cache.stack.max_window
    statistics.rows += 1
    statistics.accepted[kept] += 1
    statistics.ring_rows_read += request.live_rows
    statistics.flushes += flushes(request.live_rows, fed, window)
    _, request.live_rows = advance_cursors(0, request.live_rows, kept, fed, window, window + fed)
