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
"sequential"): the arrays have a batch axis of their own. They have no derivatives. States are
rounded stochastically if the arrays have a seed, which lies on the device and moves with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from .arrays import dtype_name
from .checks import check_int, check_rounds, first_seed, index_range
from .formats import arrays_of, copy_shape, format_name
from .jax_calls import (
    CHANGED,
    OPTIONAL,
    RINGS,
    SLOTS,
    TOKENS,
    Advance,
    LoadState,
    Materialize,
    Reset,
    Steps,
    by_kind,
    call,
)
from .keys import SCALED_FORMATS
from .prefix_plan import check_block_size

Array = Any  # jax has no types where it is not installed


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("states", "state_scales", "x_caches", "B_caches", "dt_caches", "ring_start",
                 "prev_num_accepted_tokens", "rand_seed", "state_copies"),
    meta_fields=("max_window", "philox_rounds"),
)  # fmt: skip
@dataclass(frozen=True)
class StackArrays:
    """The arrays of a model's layers, a pytree; of :func:`stack_arrays`, or of arrays that exist.

    Parameters
    ----------
    states : for each layer (num_slots, nheads, head_dim, dstate).
    state_scales : for each layer (num_slots, nheads, head_dim) float32 beside 8-bit states and
        copies, or ().
    x_caches, B_caches, dt_caches : the rings of each layer, as in ``checkpointing_ssu``.
    ring_start, prev_num_accepted_tokens : (num_slots,) int32, shared by all layers.
    max_window : W, the most tokens that wait in the rings, an int. The rings' other rows are for
        the new tokens of a step.
    rand_seed : (parts, 2) int32 where states are rounded stochastically, or None: the low and the
        high word of a seed for each part of the heads, because JAX has no int64 unless told.
    philox_rounds : of the random bits, 1 to 10.
    state_copies : beside float16 states the copies that steps read, for each layer as `state_copy`
        of ``checkpointing_ssu``, or ().
    """

    states: Sequence[Array]
    state_scales: Sequence[Array]
    x_caches: Sequence[Array]
    B_caches: Sequence[Array]
    dt_caches: Sequence[Array]
    ring_start: Array
    prev_num_accepted_tokens: Array
    max_window: int
    rand_seed: Array | None = None
    philox_rounds: int = 10
    state_copies: Sequence[Array] = ()

    def specs(self, axis: str) -> StackArrays:
        """PartitionSpecs for ``jax.shard_map``: heads and groups split over the mesh axis `axis`.

        Heads need nothing from each other, so each device steps on its own part and no device
        waits for another. Give x, dt, z, B and C with their axis of heads or groups split
        likewise, A, D and dt_bias too, slots whole, and ``check_vma=False``. States that are
        rounded stochastically need a seed on each device: `parts` of :func:`stack_arrays`.
        """
        spec = jax.sharding.PartitionSpec
        by_head, whole = spec(None, axis), spec()
        split: StackArrays = jax.tree.map(lambda _: by_head, self)
        seed = None if self.rand_seed is None else spec(axis)
        return replace(split, ring_start=whole, prev_num_accepted_tokens=whole, rand_seed=seed)


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
    stochastic_rounding: bool | int = False,
    philox_rounds: int = 10,
    parts: int = 1,
    device: Any = None,
) -> StackArrays:
    """New arrays, all zero, scales 1; arguments as of :class:`LayerStack`, read copies included.

    `parts` is over how many devices ``jax.shard_map`` will split the heads, for states that are
    rounded stochastically: each part has a seed of its own, the first one that of the stack.
    `device` is a jax Device or Sharding; None is JAX's default.
    """
    state_format = format_name(state_dtype, "state_dtype")
    state_type, copy_type = arrays_of(state_format)
    activation = dtype_name(activation_dtype, "activation_dtype")
    rows, layers = max_window + npredicted, range(num_layers)

    def zeros(shape: tuple[int, ...], dtype: str) -> Array:
        return jax.numpy.zeros(shape, dtype, device=device)

    seed = first_seed(stochastic_rounding, state_type)
    check_int("parts", parts)
    if parts < 1:
        raise ValueError(f"parts: expected at least 1, got {parts}")
    scaled = state_format in SCALED_FORMATS
    copies: list[Array] = []
    if copy_type is not None:
        inner = copy_shape(state_format, head_dim, dstate)
        copies = [zeros((num_slots, nheads, *inner), copy_type) for _ in layers]
    return StackArrays(
        [zeros((num_slots, nheads, head_dim, dstate), state_type) for _ in layers],
        [zeros((num_slots, nheads, head_dim), "float32") + 1 for _ in layers if scaled],
        [zeros((num_slots, nheads, rows, head_dim), activation) for _ in layers],
        [zeros((num_slots, ngroups, rows, dstate), activation) for _ in layers],
        [zeros((num_slots, nheads, rows), "float32") for _ in layers],
        zeros((num_slots,), "int32"),
        zeros((num_slots,), "int32"),
        max_window,
        None if seed is None else jax.numpy.asarray(_seeds(seed, parts), device=device),
        check_rounds(philox_rounds),
        copies,
    )


def _seeds(first: int, parts: int) -> np.ndarray[Any, Any]:
    """(parts, 2) int32: seeds so far apart that no number of steps leads from one to another."""
    apart = np.arange(parts, dtype=np.uint64) << np.uint64(40)
    return (apart + np.int64(first).view(np.uint64)).view(np.int32).reshape(parts, 2)


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
    states, scales and copies are others; the cursors stay until :func:`advance`.

    Raises ValueError for a layer or an array that is not there; what the step itself finds comes as
    JAX's own error (``JaxRuntimeError`` or ValueError) with our line in it, when the call runs.
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
        _check_layer(arrays, layer)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"layers: expected each layer once, got {chosen}")
    for index, given in enumerate(inputs):
        names = given.keys()
        if not set(TOKENS) <= names <= {*TOKENS, *OPTIONAL}:
            expected = f"{', '.join(TOKENS)} and perhaps {', '.join(OPTIONAL)}"
            raise TypeError(f"inputs[{index}]: expected {expected}, got {', '.join(names)}")
    fields = [name for name in CHANGED if getattr(arrays, name)]
    changed = [getattr(arrays, name)[layer] for layer in chosen for name in fields]
    outs = [given["x"] for given in inputs]
    read = {
        "ring_start": arrays.ring_start,
        "prev_num_accepted_tokens": arrays.prev_num_accepted_tokens,
        "slots": slots,
        "rand_seed": arrays.rand_seed,
    }
    # The number of a layer tells its noise from others': without any, all layers do the same.
    numbers = chosen if arrays.rand_seed is not None else [-1] * len(chosen)
    work = Steps(
        tuple(numbers), tuple(fields), arrays.max_window, arrays.philox_rounds, bool(dt_softplus),
        index_range("pad_slot_id", pad_slot_id),
    )  # fmt: skip
    results = call(work, changed, [*changed, *outs], read, list(inputs))
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

    `query_lens` is the step's length, an int or (batch,) int32: the flush went by it. A seed moves
    on too, so that the next step rounds with other bits.
    """
    number = query_lens if isinstance(query_lens, int) else None
    read = {"slots": slots, "reset": reset, "force_flush": force_flush,
            "num_accepted": num_accepted,
            "query_lens": query_lens if number is None else None}  # fmt: skip
    changed = [arrays.ring_start, arrays.prev_num_accepted_tokens]
    if arrays.rand_seed is not None:
        changed.append(arrays.rand_seed)
    rows = arrays.x_caches[0].shape[2]
    move = Advance(number, arrays.max_window, rows, pad_slot_id)
    start, prev, *seed = call(move, changed, changed, read)
    after = replace(arrays, ring_start=start, prev_num_accepted_tokens=prev)
    return replace(after, rand_seed=seed[0]) if seed else after


def reset(arrays: StackArrays, slots: Array | None = None, pad_slot_id: int = -1) -> StackArrays:
    """The arrays with `slots` (None: all) emptied: zero states in all layers, cursors 0."""
    work = Reset(_sizes(arrays), pad_slot_id)
    changed = _whole_slots(arrays)
    return _with_slots(arrays, call(work, changed, changed, {"slots": slots}))


def load_state(
    arrays: StackArrays,
    layer: int,
    slots: Array | None,
    state: Array,
    pad_slot_id: int = -1,
) -> StackArrays:
    """The arrays with what a prefill left in `slots` of a layer; see :meth:`LayerStack.load_state`.

    `state` is (batch, nheads, head_dim, dstate) of any float type, rounded to the arrays', with
    its scales and its copy where they have those. The cursors must be 0, as after :func:`reset`.

    Raises as :func:`step`.
    """
    _check_layer(arrays, layer)
    fields = [name for name in SLOTS if getattr(arrays, name)]
    changed = [getattr(arrays, name)[layer] for name in fields]
    work = LoadState(tuple(fields), index_range("pad_slot_id", pad_slot_id))
    results = call(work, changed, changed, {"slots": slots, "source": state})
    after: dict[str, Any] = {name: list(getattr(arrays, name)) for name in fields}
    for field, array in zip(fields, results, strict=True):
        after[field][layer] = array
    return replace(arrays, **after)


def _check_layer(arrays: StackArrays, layer: int) -> None:
    _check_lists(arrays)
    if not 0 <= layer < len(arrays.states):
        raise ValueError(f"layer: expected 0 to {len(arrays.states) - 1}, got {layer}")


def _check_lists(arrays: StackArrays) -> None:
    """One array for each layer, where there are any."""
    layers = len(arrays.states)
    for name in CHANGED:
        count = len(getattr(arrays, name))
        if count != layers and (count or name in RINGS):
            raise ValueError(f"{name}: expected {layers} arrays, one for each layer, got {count}")


def materialize(
    arrays: StackArrays,
    A: Sequence[Array],
    src_slots: Array,
    dst_slots: Array,
    prefix_len: Array,
    *,
    pad_slot_id: int = -1,
) -> StackArrays:
    """The arrays with the states of `src_slots` after `prefix_len` ring rows in `dst_slots` too.

    :meth:`LayerStack.materialize`, whose arguments these are, with the layers' `A`, (nheads,)
    each: all layers in one callback; the destinations' cursors become 0. A prefix of 0 copies a
    snapshot, to a new request for instance.
    """
    given = {"src_slots": src_slots, "dst_slots": dst_slots, "prefix_len": prefix_len}
    return _materialize(arrays, A, given, 1, pad_slot_id)


def materialize_blocks(
    arrays: StackArrays,
    A: Sequence[Array],
    src_slots: Array,
    dst_slots: Array,
    committed_lens: Array,
    num_accepted: Array,
    *,
    block_size: int | None = None,
    boundaries: Array | None = None,
    pad_slot_id: int = -1,
) -> StackArrays:
    """The arrays with snapshots of the rows that crossed a block boundary in the latest step.

    :meth:`LayerStack.materialize_blocks`, whose arguments these are, with the layers' `A`; call it
    behind :func:`advance`. The device decides; where nothing crossed, nothing is written.
    """
    check_block_size(block_size, boundaries)
    given = {
        "src_slots": src_slots, "dst_slots": dst_slots, "committed_lens": committed_lens,
        "num_accepted": num_accepted, "boundaries": boundaries,
    }  # fmt: skip
    return _materialize(arrays, A, given, block_size or 1, pad_slot_id)


def _materialize(
    arrays: StackArrays,
    A: Sequence[Array],
    given: dict[str, Array | None],
    block_size: int,
    pad_slot_id: int,
) -> StackArrays:
    layers = len(arrays.states)
    if not isinstance(A, Sequence) or len(A) != layers:
        got = len(A) if isinstance(A, Sequence) else type(A).__name__
        raise ValueError(f"A: expected a list of {layers} arrays, got {got}")
    rings: dict[str, Any] = {name: getattr(arrays, name) for name in RINGS}
    rings |= {"A": list(A), "rand_seed": arrays.rand_seed}
    work = Materialize(
        _sizes(arrays), arrays.max_window, arrays.philox_rounds, block_size,
        index_range("pad_slot_id", pad_slot_id),
    )  # fmt: skip
    changed = _whole_slots(arrays)
    return _with_slots(arrays, call(work, changed, changed, rings, given))


def _whole_slots(arrays: StackArrays) -> list[Array]:
    """What changes where slots are written as a whole: cursors, then SLOTS of all layers."""
    _check_lists(arrays)
    cursors = [arrays.ring_start, arrays.prev_num_accepted_tokens]
    return cursors + [array for name in SLOTS for array in getattr(arrays, name)]


def _sizes(arrays: StackArrays) -> tuple[int, ...]:
    """How many arrays there are of each of SLOTS."""
    return tuple(len(getattr(arrays, name)) for name in SLOTS)


def _with_slots(arrays: StackArrays, results: Sequence[Array]) -> StackArrays:
    start, prev, *rest = results
    after: dict[str, Any] = by_kind(rest, _sizes(arrays))
    return replace(arrays, ring_start=start, prev_num_accepted_tokens=prev, **after)
