"""The demo's prefix cache: requests with a common prompt start from snapshots of it.

A prompt goes through decode steps whose tokens are all accepted. Whenever one crosses a block
boundary, the states at the boundary go to a slot of the cache, next to the tails of the
convolutions there. A later prompt begins behind its longest cached part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .mamba2 import Array, Mamba2, PrefillCache, ReplayCache
from .mamba2_weights import Mamba2Config
from .speculative import to_host


@dataclass(slots=True)
class Reuse:
    """What the prefix cache did: prompt tokens that were fed, and that snapshots stood for."""

    block: int
    fed: int = 0
    reused: int = 0
    snapshots: int = 0

    def line(self) -> str:
        """For the report."""
        return (
            f"prefix cache   {self.reused} of {self.fed + self.reused} prompt tokens reused from "
            f"{self.snapshots} snapshots, one every {self.block} tokens"
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A slot of the stack, and all convolutions' tails (layers, conv_kernel - 1, channels)."""

    slot: int
    tails: Array


class PrefixCache:
    """Snapshots of prompts at multiples of `block` tokens, in the slots of a stack that it owns."""

    def __init__(self, cache: ReplayCache, A: list[Array], slots: range, block: int) -> None:
        self.reuse = Reuse(block)
        self._cache, self._free = cache, list(reversed(slots))
        self._snapshots: dict[tuple[int, ...], Snapshot] = {}
        cache.stack.refresh(A)

    def prefill(self, model: Mamba2, request: int, prompt: list[int]) -> int:
        """Brings a request's slot behind its prompt; the model's next token."""
        tokens = self._start(request, prompt)
        self.reuse.reused += tokens
        self.reuse.fed += len(prompt) - tokens
        choice = None
        while tokens < len(prompt):
            fed = prompt[tokens : tokens + self._cache.stack.npredicted]
            hidden = model.forward(model.xp.asarray([fed]), self._cache)
            choice = model.logits(hidden[:, -1]).argmax(axis=-1)
            self._cache.commit(model.xp.full(1, len(fed), np.int32))
            self._keep(request, prompt, tokens, len(fed))
            tokens += len(fed)
        assert choice is not None
        return int(to_host(choice)[0])

    def _start(self, request: int, prompt: list[int]) -> int:
        """The longest cached part of a prompt goes to the request's slot; its number of tokens."""
        block, cache = self.reuse.block, self._cache
        cache.select(np.array([request]))
        # The last token is fed in any case: its logits choose the next one.
        for tokens in range((len(prompt) - 1) // block * block, 0, -block):
            found = self._snapshots.get(tuple(prompt[:tokens]))
            if found is not None:
                source = cache.xp.asarray([found.slot], dtype=np.int32)
                cache.stack.copy_slots(source, cache.slots)
                cache.set_tails(request, found.tails)
                return tokens
        return 0

    def _keep(self, request: int, prompt: list[int], before: int, fed: int) -> None:
        """A snapshot where the step crossed a boundary, unless there is one already or no room."""
        boundary = (before + fed) // self.reuse.block * self.reuse.block
        known = tuple(prompt[:boundary])
        if boundary <= before or known in self._snapshots or not self._free:
            return
        slot, xp = self._free.pop(), self._cache.xp
        one = [xp.asarray([number], dtype=np.int32) for number in (request, slot, before, fed)]
        self._cache.stack.materialize_blocks(*one, block_size=self.reuse.block)
        self._snapshots[known] = Snapshot(slot, self._cache.tails_after(boundary - before))
        self.reuse.snapshots += 1


def empty_prompt(config: Mamba2Config, batch: int, xp: Any) -> PrefillCache:
    """What a prompt of no tokens leaves behind."""
    prompt = PrefillCache(config, xp)
    state = batch, config.num_heads, config.head_dim, config.state_size
    tail = batch, config.conv_kernel - 1, config.conv_channels
    for _ in range(config.num_hidden_layers):
        prompt.states.append(xp.zeros(state, np.float32))
        prompt.conv_tails.append(xp.zeros(tail, np.float32))
    return prompt
