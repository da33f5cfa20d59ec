"""ReplaySSM for JAX: functional calls that work in place where they may.

JAX arrays are immutable, so the functions of the package refuse to change them. Here a stack's
arrays are a pytree that goes in and comes out::

    from replayssm_cupy import jax_ops

    arrays = jax_ops.stack_arrays(num_layers, num_slots, nheads, head_dim, ngroups, dstate)

    @partial(jax.jit, donate_argnums=0)
    def decode(arrays, inputs, slots, accepted):
        for layer, (x, dt, A, B, C, D) in enumerate(inputs):
            y, arrays = jax_ops.step(arrays, layer, x, dt, A, B, C, D, slots=slots)
        return y, jax_ops.advance(arrays, slots, accepted, query_lens=1)

Inside ``jax.jit`` with the arrays donated nothing is copied: XLA hands their memory to the kernels,
on the stream on which it works, through ``jax.experimental.buffer_callback`` (jax 0.6.1 and newer,
CPU and GPU). Without donation XLA copies them first, and the caller's stay as they were. The calls
work under ``lax.scan``, and under ``jax.shard_map`` with the heads split over devices
(:meth:`StackArrays.specs`). ``jax.vmap`` runs them one after the other (``vmap_method`` is
"sequential"): the arrays have a batch axis of their own. They have no derivatives.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.experimental.buffer_callback import buffer_callback

from . import compiler, ops
from .arrays import dtype_name, itemsize, view
from .keys import SCALED_DTYPES
from .slots import advance_ring, reset_slots

Array = Any  # jax has no types where it is not installed


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("states", "state_scales", "x_caches", "B_caches", "dt_caches", "ring_start",
                 "prev_num_accepted_tokens"),
    meta_fields=("max_window",),
)  # fmt: skip
@dataclass(frozen=True)
class StackArrays:
    """The arrays of a model's layers, a pytree; of :func:`stack_arrays`, or of arrays that exist.

    Parameters
    ----------
    states : for each layer (num_slots, nheads, head_dim, dstate).
    state_scales : for each layer (num_slots, nheads, head_dim) float32 beside 8-bit states, or ().
    x_caches, B_caches, dt_caches : the rings of each layer, as in ``checkpointing_ssu``.
    ring_start, prev_num_accepted_tokens : (num_slots,) int32, shared by all layers.
    max_window : W, the most tokens that wait in the rings, an int. The rings' other rows are for
        the new tokens of a step.
    """

    states: Sequence[Array]
    state_scales: Sequence[Array]
    x_caches: Sequence[Array]
    B_caches: Sequence[Array]
    dt_caches: Sequence[Array]
    ring_start: Array
    prev_num_accepted_tokens: Array
    max_window: int

    def specs(self, axis: str) -> StackArrays:
        """PartitionSpecs for ``jax.shard_map``: heads and groups split over the mesh axis `axis`.

        Heads need nothing from each other, so each device steps on its own part and no device
        waits for another. Give x, dt, z, B and C with their axis of heads or groups split
        likewise, A, D and dt_bias too, slots whole, and ``check_vma=False``.
        """
        spec = jax.sharding.PartitionSpec
        by_head, whole = spec(None, axis), spec()
        split: StackArrays = jax.tree.map(lambda _: by_head, self)
        return replace(split, ring_start=whole, prev_num_accepted_tokens=whole)


def stack_arrays(
    num_layers: int,
    num_slots: int,
    nheads: int,
    head_dim: int,
    ngroups: int,
    dstate: int,
    *,
    max_window: int = 16,
    npredicted: int = 1,
    state_dtype: Any = "float32",
    activation_dtype: Any = "bfloat16",
    device: Any = None,
) -> StackArrays:
    """New arrays, all zero, scales 1; arguments as of :class:`LayerStack`.

    `device` is a jax Device or Sharding; None is JAX's default. States are rounded to nearest.
    """
    state_type = dtype_name(state_dtype, "state_dtype")
    activation = dtype_name(activation_dtype, "activation_dtype")
    rows, layers = max_window + npredicted, range(num_layers)

    def zeros(shape: tuple[int, ...], dtype: str) -> Array:
        return jax.numpy.zeros(shape, dtype, device=device)

    scaled = state_type in SCALED_DTYPES
    return StackArrays(
        [zeros((num_slots, nheads, head_dim, dstate), state_type) for _ in layers],
        [zeros((num_slots, nheads, head_dim), "float32") + 1 for _ in layers if scaled],
        [zeros((num_slots, nheads, rows, head_dim), activation) for _ in layers],
        [zeros((num_slots, ngroups, rows, dstate), activation) for _ in layers],
        [zeros((num_slots, nheads, rows), "float32") for _ in layers],
        zeros((num_slots,), "int32"),
        zeros((num_slots,), "int32"),
        max_window,
    )


def step(
    arrays: StackArrays,
    layer: int,
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    *,
    dt_softplus: bool = True,
    slots: Array | None = None,
    pad_slot_id: int = -1,
    force_flush: Array | None = None,
) -> tuple[Array, StackArrays]:
    """One decode step of one layer: out, like x, and the arrays after it.

    Arguments as in :meth:`LayerStack.step`. Of the arrays the layer's rings and, on flush, its
    states are others; the cursors stay until :func:`advance`.

    Raises ValueError for a layer that is not there; what the step itself finds comes as JAX's
    own error (``JaxRuntimeError``) with our line in it, when the call runs.
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias}
    (out,), arrays = step_layers(
        arrays, [given | {"force_flush": force_flush}], layers=[layer], slots=slots,
        dt_softplus=dt_softplus, pad_slot_id=pad_slot_id,
    )  # fmt: skip
    return out, arrays


def step_layers(
    arrays: StackArrays,
    inputs: Sequence[dict[str, Array | None]],
    *,
    layers: Sequence[int] | None = None,
    slots: Array | None = None,
    dt_softplus: bool = True,
    pad_slot_id: int = -1,
) -> tuple[list[Array], StackArrays]:
    """Steps of several layers in one callback, for layers that do not wait for each other.

    `inputs` holds for each of `layers` (None: all) the arguments of :func:`step` by name: x, dt,
    A, B, C and, where there are any, D, z, dt_bias, force_flush. Returns the outs and the arrays.
    """
    chosen = list(range(len(arrays.states)) if layers is None else layers)
    if len(inputs) != len(chosen):
        raise ValueError(f"inputs: expected {len(chosen)} layers' arguments, got {len(inputs)}")
    for layer in chosen:
        if not 0 <= layer < len(arrays.states):
            raise ValueError(f"layer: expected 0 to {len(arrays.states) - 1}, got {layer}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"layers: expected each layer once, got {chosen}")
    fields = [name for name in _CHANGED if getattr(arrays, name)]
    changed = [getattr(arrays, name)[layer] for layer in chosen for name in fields]
    outs = [given["x"] for given in inputs]
    read = {
        "ring_start": arrays.ring_start,
        "prev_num_accepted_tokens": arrays.prev_num_accepted_tokens,
        "state_batch_indices": slots,
    }
    results = _call(
        _Steps(tuple(fields), arrays.max_window, dt_softplus, pad_slot_id),
        changed, [*changed, *outs], read, list(inputs),
    )  # fmt: skip
    after: dict[str, Any] = {name: list(getattr(arrays, name)) for name in fields}
    for place, layer in enumerate(chosen):
        for field, array in zip(fields, results[place * len(fields) :], strict=False):
            after[field][layer] = array
    return results[len(changed) :], replace(arrays, **after)


def advance(
    arrays: StackArrays,
    slots: Array | None,
    num_accepted: Array,
    query_lens: int | Array,
    *,
    reset: Array | None = None,
    force_flush: Array | None = None,
    pad_slot_id: int = -1,
) -> StackArrays:
    """The arrays with the cursors of `slots` moved after a step; see :func:`advance_ring`.

    `query_lens` is the step's length, an int or (batch,) int32: the flush went by it.
    """
    number = query_lens if isinstance(query_lens, int) else None
    read = {"slots": slots, "reset": reset, "force_flush": force_flush,
            "num_accepted": num_accepted,
            "query_lens": query_lens if number is None else None}  # fmt: skip
    cursors = [arrays.ring_start, arrays.prev_num_accepted_tokens]
    rows = arrays.x_caches[0].shape[2]
    move = _Advance(number, arrays.max_window, rows, pad_slot_id)
    start, prev = _call(move, cursors, cursors, read)
    return replace(arrays, ring_start=start, prev_num_accepted_tokens=prev)


def reset(arrays: StackArrays, slots: Array | None = None, pad_slot_id: int = -1) -> StackArrays:
    """The arrays with `slots` (None: all) emptied: zero states in all layers, cursors 0."""
    changed = [arrays.ring_start, arrays.prev_num_accepted_tokens, *arrays.states,
               *arrays.state_scales]  # fmt: skip
    layers = len(arrays.states)
    start, prev, *rest = _call(_Reset(layers, pad_slot_id), changed, changed, {"slots": slots})
    return replace(
        arrays, ring_start=start, prev_num_accepted_tokens=prev,
        states=rest[:layers], state_scales=rest[layers:],
    )  # fmt: skip


_CHANGED = ("states", "state_scales", "x_caches", "B_caches", "dt_caches")  # by a step
_ARGUMENTS = {"states": "state", "state_scales": "state_scale", "x_caches": "x_cache",
              "B_caches": "B_cache", "dt_caches": "dt_cache"}  # fmt: skip


def _call(work: Any, changed: list[Array], results: list[Array], *read: Any) -> list[Array]:
    """Calls `work` with the memory of `results`, of which the first are `changed` in place."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in results]
    aliases = {index: index for index in range(len(changed))}
    call = buffer_callback(work, shapes, input_output_aliases=aliases, vmap_method="sequential")
    return list(call(*changed, *read))


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


@dataclass(frozen=True)
class _Stream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


# What the callbacks do. They compare equal where they do the same, so that JAX compiles each once.


@dataclass(frozen=True)
class _Steps:
    fields: tuple[str, ...]  # of what changes, of each layer
    max_window: int
    dt_softplus: bool
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        *changed, read, inputs = given
        size = len(self.fields)
        outs = results[size * len(inputs) :]
        with _on_stream(context, results[0]):
            _carry_over(context, results, changed)
            for place, (tokens, out) in enumerate(zip(inputs, outs, strict=True)):
                mine = results[place * size : (place + 1) * size]
                pools = {_ARGUMENTS[name]: b for name, b in zip(self.fields, mine, strict=True)}
                ops.checkpointing_ssu(
                    **pools, **read, **tokens, out=out, max_window=self.max_window,
                    dt_softplus=self.dt_softplus, pad_slot_id=self.pad_slot_id,
                )  # fmt: skip


@dataclass(frozen=True)
class _Advance:
    query_len: int | None
    max_window: int
    ring_buffer_len: int
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        start, prev = results
        *changed, last = given
        read: dict[str, Any] = dict(last)
        query_lens, accepted = read.pop("query_lens"), read.pop("num_accepted")
        with _on_stream(context, start):
            _carry_over(context, results, changed)
            advance_ring(
                start, prev, accepted, query_lens if self.query_len is None else self.query_len,
                max_window=self.max_window, ring_buffer_len=self.ring_buffer_len,
                pad_slot_id=self.pad_slot_id, **read,
            )  # fmt: skip


@dataclass(frozen=True)
class _Reset:
    layers: int
    pad_slot_id: int

    def __call__(self, context: Any, results: list[Any], *given: Any) -> None:
        start, prev, *rest = results
        with _on_stream(context, start):
            _carry_over(context, results, given[:-1])
            reset_slots(
                start, prev, given[-1]["slots"], rest[: self.layers], self.pad_slot_id,
                state_scales=rest[self.layers :],
            )  # fmt: skip
