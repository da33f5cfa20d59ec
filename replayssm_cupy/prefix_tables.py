"""The pointer tables of a stack's layers, and what the layers have in common inside a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import View, from_numpy, view
from .checks import check_devices, check_dtype
from .formats import format_of
from .keys import FLOAT_DTYPES

TABLES = (
    "state_ptrs",
    "state_slot_strides",
    "x_cache_ptrs",
    "x_cache_slot_strides",
    "B_cache_ptrs",
    "B_cache_slot_strides",
    "dt_cache_ptrs",
    "dt_cache_slot_strides",
    "A_ptrs",
    "state_scale_ptrs",
    "state_scale_slot_strides",
)
COPY_TABLES = ("state_copy_ptrs", "state_copy_slot_strides")  # of states with a read copy
UNKNOWN_SLOTS = 2**62  # how many there are, where the caller does not say


class Layout(NamedTuple):
    """What the layers of a table have in common: formats, sizes, strides inside a slot."""

    state_dtype: str  # the format
    activation_dtype: str
    A_dtype: str
    head_dim: int
    dstate: int
    nheads: int
    heads_per_group: int
    max_window: int
    ring_buffer_len: int
    state_head_stride: int
    state_scale_head_stride: int
    x_cache_head_stride: int
    x_cache_row_stride: int
    B_cache_group_stride: int
    B_cache_row_stride: int
    dt_cache_head_stride: int
    dt_cache_row_stride: int
    A_stride: int
    num_slots: int = UNKNOWN_SLOTS
    state_copy_head_stride: int = 0


class Tables:
    """The pointer tables of a stack's layers, on its device; keeps the arrays alive.

    `layers` are the views of every layer by their names in `checkpointing_ssu`, `A` those of the
    layers' A, (nheads,) each, where they are known. Raises ValueError where layers do not lie alike
    inside a slot.
    """

    def __init__(
        self, layers: Sequence[dict[str, View | None]], A: Sequence[View] | None, max_window: int
    ) -> None:
        first = {name: array for name, array in layers[0].items() if array is not None}
        state, x_cache, B_cache, dt_cache = (
            first[name] for name in ("state", "x_cache", "B_cache", "dt_cache")
        )
        self.layers, self.A = list(layers), None if A is None else list(A)
        if self.A is not None:
            _check_weights(self.A, state)
        copy, scale = first.get("state_copy"), first.get("state_scale")
        self.layout = Layout(
            format_of(state, copy), x_cache.dtype, self.A[0].dtype if self.A else "float32",
            state.shape[2], state.shape[3], state.shape[1], state.shape[1] // B_cache.shape[1],
            max_window, x_cache.shape[2],
            state_head_stride=_stride(state, 1),
            state_scale_head_stride=0 if scale is None else _stride(scale, 1),
            x_cache_head_stride=_stride(x_cache, 1),
            x_cache_row_stride=_stride(x_cache, 2),
            B_cache_group_stride=_stride(B_cache, 1),
            B_cache_row_stride=_stride(B_cache, 2),
            dt_cache_head_stride=_stride(dt_cache, 1),
            dt_cache_row_stride=_stride(dt_cache, 2),
            A_stride=_stride(self.A[0], 0) if self.A else 0,
            num_slots=state.shape[0],
            state_copy_head_stride=0 if copy is None else _stride(copy, 1),
        )  # fmt: skip
        self._check_alike(first)
        self.addresses = self._collect()
        self._array = from_numpy(self.addresses, state)
        whole = view(self._array, "tables")
        count = len(layers)
        self.views = {
            name: whole._replace(
                name=name, ptr=whole.ptr + 8 * index * count, shape=(count,), strides=(1,)
            )
            for index, name in enumerate((*TABLES, *COPY_TABLES))
        }

    def _check_alike(self, first: dict[str, View]) -> None:
        for layer in self.layers:
            for name, like in first.items():
                array = layer[name]
                assert array is not None
                inside = [_stride(array, axis) for axis in range(1, len(array.shape))]
                expected = [_stride(like, axis) for axis in range(1, len(like.shape))]
                if inside != expected:
                    raise ValueError(
                        f"{array.name}: expected strides {tuple(expected)} inside a slot as "
                        f"{like.name}, got {tuple(inside)}"
                    )

    def _collect(self) -> NDArray[np.int64]:
        """(tables, layers) int64, from the views that the stack has now."""
        columns = []
        for index, layer in enumerate(self.layers):
            column = []
            for name in ("state", "x_cache", "B_cache", "dt_cache"):
                array = layer[name]
                assert array is not None
                column += [array.ptr, _stride(array, 0)]
            scale = layer["state_scale"]
            column += [0 if self.A is None else self.A[index].ptr]
            for array in (scale, layer.get("state_copy")):
                column += [0, 0] if array is None else [array.ptr, _stride(array, 0)]
            columns.append(column)
        return np.array(columns, np.int64).T.copy()


def _stride(array: View, axis: int) -> int:
    """The stride of an axis, 0 where it has no meaning."""
    return array.strides[axis] if array.shape[axis] > 1 else 0


def _check_weights(A: Sequence[View], state: View) -> None:
    for array in A:
        check_dtype(array, FLOAT_DTYPES)
        check_dtype(array, (A[0].dtype,), f" as {A[0].name}")
        if array.shape != (state.shape[1],):
            raise ValueError(
                f"{array.name}: expected (nheads,) = ({state.shape[1]},) (nheads from "
                f"{state.name}), got {array.shape}"
            )
        if _stride(array, 0) != _stride(A[0], 0):
            raise ValueError(
                f"{array.name}: expected stride {A[0].strides[0]} as {A[0].name}, "
                f"got {array.strides[0]}"
            )
    check_devices([state, *A])
