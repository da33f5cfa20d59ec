"""What the functions of ``jax_ops`` do when they run: XLA hands over memory and its stream.

Each kind of work is a frozen dataclass of what is known when JAX traces; two that are equal do the
same, so that JAX compiles each once. Called, it gets the buffers of the results, of which the first
are the arrays to change, and the buffers that it reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.buffer_callback import buffer_callback

from . import compiler
from .arrays import View, itemsize, view
from .checked import everywhere
from .checks import optional_view
from .decode import decode
from .decode_checks import Options
from .scratch import SCRATCH
from .slots import advance_ring, load_views, reset_slots
from .snapshots import Snapshots
from .stack_arrays import check_layer

Array = Any  # jax has no types where it is not installed
SLOTS = ("states", "state_copies", "state_scales")  # of a slot, beside its rings and cursors
RINGS = ("x_caches", "B_caches", "dt_caches")
CHANGED = (*SLOTS, *RINGS)  # by a step
TOKENS = ("x", "dt", "A", "B", "C")
OPTIONAL = ("D", "z", "dt_bias", "force_flush")


def call(work: Any, changed: list[Array], results: list[Array], *read: Any) -> list[Array]:
    """Calls `work` with the memory of `results`, of which the first are `changed` in place."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in results]
    aliases = {index: index for index in range(len(changed))}
    callback = buffer_callback(work, shapes, input_output_aliases=aliases, vmap_method="sequential")
    return list(callback(*changed, *read))


def one_of(name: str) -> str:
    """What one of `states`, `state_copies` and so on is called."""
    return "state_copy" if name == "state_copies" else name.removesuffix("s")


def by_kind(arrays: Sequence[Any], sizes: Sequence[int]) -> dict[str, list[Any]]:
    """Arrays that lie one kind of SLOTS after the other, `sizes` of each."""
    rest = iter(arrays)
    return {
        name: list(itertools.islice(rest, size)) for name, size in zip(SLOTS, sizes, strict=True)
    }


@contextlib.contextmanager
def _on_stream(context: Any, array: Any) -> Iterator[None]:
    """Makes XLA's stream the current one, on a GPU."""
    kind, index = array.__dlpack_device__()
    if int(kind) == _DLPACK_CPU:
        yield
        return
    cupy = compiler.import_cupy()
    with cupy.cuda.Device(int(index)), cupy.cuda.Stream.from_external(_Stream(context.stream)):
        yield


_DLPACK_CPU = 1


@dataclass(frozen=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _carry_over(context: Any, results: Sequence[Any], changed: Sequence[Any]) -> None:
    """Copies what a call changes to where its result is, if XLA gives that memory of its own.

    It does so for a slice of a loop's result, aliases or not.
    """
    for result, array in zip(results, changed, strict=False):
        to, source = view(result, "result"), view(array, "array")
        size = math.prod(to.shape) * itemsize(to.dtype)
        if to.ptr == source.ptr or size == 0:
            continue
        if to.device.kind == "cpu":
            ctypes.memmove(to.ptr, source.ptr, size)
        else:
            runtime = compiler.import_cupy().cuda.runtime
            runtime.memcpyAsync(
                to.ptr, source.ptr, size, runtime.memcpyDeviceToDevice, context.stream
            )


def _seed(array: Any) -> View | None:
    """The two int32 of a seed as the one int64 that kernels read."""
    words = optional_view(array, "rand_seed")
    if words is None:
        return None
    if (words.dtype, words.shape) != ("int32", (1, 2)):
        raise ValueError(
            f"rand_seed: expected (parts, 2) = (1, 2) int32 on each device, got {words.shape} "
            f"{words.dtype}"
        )
    return words._replace(dtype="int64", shape=(1,), strides=(1,))


@dataclass(frozen=True)
class Steps:
    """Steps of some layers: their arrays one layer after the other, then the outs."""

    layers: tuple[int, ...]
    fields: tuple[str, ...]  # of what changes, of each layer
    max_window: int
    philox_rounds: int
    dt_softplus: bool
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        *changed, read, inputs = given
        size = len(self.fields)
        outs = results[size * len(inputs) :]
        with _on_stream(context, results[0]):
            _carry_over(context, results, changed)
            shared = self._shared(read)
            for place, (tokens, out) in enumerate(zip(inputs, outs, strict=True)):
                mine = results[place * size : (place + 1) * size]
                views = self._views(mine, tokens) | shared
                options = Options(
                    self.dt_softplus, self.pad_slot_id, True, self.max_window,
                    philox_rounds=self.philox_rounds, layer=self.layers[place], check=everywhere(),
                )  # fmt: skip
                decode(views, out, options)

    def _shared(self, read: dict[str, Any]) -> dict[str, View | None]:
        return {
            "ring_start": view(read["ring_start"], "ring_start"),
            "prev_num_accepted_tokens": view(
                read["prev_num_accepted_tokens"], "prev_num_accepted_tokens"
            ),
            "slots": optional_view(read["slots"], "slots"),
            "cu_seqlens": None,
            "rand_seed": _seed(read["rand_seed"]),
            **dict.fromkeys(SCRATCH),
        }

    def _views(self, pools: Sequence[Any], tokens: dict[str, Any]) -> dict[str, View | None]:
        """Of a layer's arrays and its tokens."""
        views: dict[str, View | None] = dict.fromkeys(map(one_of, SLOTS))
        for field, buffer in zip(self.fields, pools, strict=True):
            views[one_of(field)] = view(buffer, one_of(field))
        views |= {name: view(tokens[name], name) for name in TOKENS}
        return views | {name: optional_view(tokens.get(name), name) for name in OPTIONAL}


@dataclass(frozen=True)
class Advance:
    """The cursors, and the seed if there is one."""

    query_len: int | None
    max_window: int
    ring_buffer_len: int
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        start, prev, *seed = results
        *changed, last = given
        read: dict[str, Any] = dict(last)
        query_lens, accepted = read.pop("query_lens"), read.pop("num_accepted")
        with _on_stream(context, start):
            _carry_over(context, results, changed)
            advance_ring(
                start, prev, accepted, query_lens if self.query_len is None else self.query_len,
                max_window=self.max_window, ring_buffer_len=self.ring_buffer_len,
                pad_slot_id=self.pad_slot_id, rand_seed=_seed(seed[0]) if seed else None, **read,
            )  # fmt: skip


@dataclass(frozen=True)
class Reset:
    """The cursors, then SLOTS of all layers."""

    sizes: tuple[int, ...]  # how many of each
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        start, prev, *rest = results
        with _on_stream(context, start):
            _carry_over(context, results, given[:-1])
            reset_slots(start, prev, given[-1]["slots"], pad_slot_id=self.pad_slot_id,
                        **by_kind(rest, self.sizes))  # fmt: skip


@dataclass(frozen=True)
class LoadState:
    """One layer's SLOTS, as far as there are any."""

    fields: tuple[str, ...]
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        *changed, read = given
        with _on_stream(context, results[0]):
            _carry_over(context, results, changed)
            arrays: dict[str, View | None] = dict.fromkeys(SLOTS)
            for field, buffer in zip(self.fields, results, strict=True):
                arrays[field] = view(buffer, field)
            states, copies, scales = arrays.values()
            assert states is not None
            load_views(states, copies, scales, view(read["source"], "state"),
                       optional_view(read["slots"], "slots"), self.pad_slot_id)  # fmt: skip


@dataclass(frozen=True)
class Materialize:
    """The cursors, then SLOTS of all layers; the rings are read."""

    sizes: tuple[int, ...]  # how many of each
    max_window: int
    philox_rounds: int
    block_size: int  # 1 where boundaries or a prefix say more
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        *changed, others, read = given
        with _on_stream(context, results[0]):
            _carry_over(context, results, changed)
            layers = self._layers(results, others)
            for layer in layers:
                check_layer(layer, layers[0])
            weights = [view(array, f"A[{i}]") for i, array in enumerate(others["A"])]
            seed = _seed(others["rand_seed"])
            snapshots = Snapshots(layers, weights, self.max_window, seed, self.philox_rounds)
            lengths: dict[str, Any] = dict(read)
            slots = lengths.pop("src_slots"), lengths.pop("dst_slots")
            snapshots.materialize(*slots, lengths, self.block_size, self.pad_slot_id, False)

    def _layers(self, results: Sequence[Any], others: dict[str, Any]) -> list[dict[str, Any]]:
        """The views of every layer; of the rings as if they might be written, which no snapshot
        does."""
        cursors = {
            name: view(array, name)
            for name, array in zip(
                ("ring_start", "prev_num_accepted_tokens"), results, strict=False
            )
        }
        slots = by_kind(results[2:], self.sizes)
        return [
            {
                **{
                    one_of(name): view(arrays[i], f"{name}[{i}]") if arrays else None
                    for name, arrays in slots.items()
                },
                **{
                    one_of(name): view(others[name][i], f"{name}[{i}]")._replace(readonly=False)
                    for name in RINGS
                },
                **cursors,
            }
            for i in range(self.sizes[0])
        ]
