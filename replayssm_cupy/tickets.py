"""Counters by which the blocks of a step share its last items, see `take_ticket` of the kernel.

Of a layer each slot has one, because a step needs one to itself and has its slots to itself: steps
on other streams, in other threads and in captured graphs work on other slots. A step takes the
counter of the first sequence that its blocks list and leaves it at 0, as it was.
"""

from __future__ import annotations

import numpy as np

from .arrays import View, from_numpy, view

WORDS = 4  # a layer's counters begin at multiples of as many, so that layers share plans


class Tickets:
    """Counters (layers, num_slots) int32 on the device of the layers' states."""

    def __init__(self, state: View, layers: int) -> None:
        self._slots = state.shape[0]
        pitch = -(-self._slots // WORDS) * WORDS
        self._array = from_numpy(np.zeros((layers, pitch), np.int32), state)
        self._counters = view(self._array, "tickets")

    def fits(self, state: View, layers: int) -> bool:
        """Whether there are as many as these layers have slots, on the same device."""
        there = self._counters.shape[0], self._slots, self._counters.device
        return there == (layers, state.shape[0], state.device)

    def of_layer(self, layer: int) -> View:
        """The counters of one layer, (num_slots,)."""
        return self._counters._replace(
            ptr=self._counters.ptr + 4 * layer * self._counters.strides[0],
            shape=(self._slots,),
            strides=(1,),
        )
