"""Cursors and slots: what happens to a ring after a step, and to a slot between requests.

All of it runs on the device that holds the arrays, without a host synchronisation, and may be
captured into a CUDA graph; host arrays run the same rules in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import compiler, reference
from .arrays import Device, View, as_numpy, current_stream, device_guard, dtype_name, itemsize, view
from .calls import Seen, SeenCalls
from .checks import (
    ALIGNMENT,
    Letters,
    check_alignment,
    check_devices,
    check_dtype,
    check_inplace,
    check_int,
    check_packed,
    check_seed,
    check_value,
    index_range,
    optional_view,
)
from .decode import wait_for_jax
from .decode_checks import check_host_cursors, check_window, live_slots
from .formats import check_state, format_name
from .keys import (
    ACTIVATION_DTYPES,
    DSTATES,
    FLOAT_DTYPES,
    HEAD_DIMS,
    MAX_TOKENS,
    MAX_WINDOW,
    SCALED_DTYPES,
    STATE_DTYPES,
    TOKENS_OF_FORMS,
    AdvanceRingKey,
    CheckpointingSsuKey,
    Key,
    Layout,
    LayoutKey,
    LoadStateKey,
    ResetSlotsKey,
    SelectiveStateUpdateKey,
    precompute_key,
    step_keys,
    two_kernel_key,
)
from .numerics import PHILOX_ROUNDS
from .plan import (
    INDEX_TYPES,
    MAX_RESET_LAYERS,
    AdvanceRingParams,
    LoadStateParams,
    Plan,
    ResetSlotsParams,
    launchers,
)
from .scratch import check_algorithm

THREADS = 256


def advance_ring(
    ring_start: Any,
    prev_num_accepted_tokens: Any,
    num_accepted: Any,
    query_lens: Any,
    slots: Any = None,
    *,
    max_window: int,
    ring_buffer_len: int,
    reset: Any = None,
    force_flush: Any = None,
    rand_seed: Any = None,
    pad_slot_id: int = -1,
) -> None:
    """Moves the cursors after a step, by the rule that the step's kernel used for its flush.

    Parameters
    ----------
    ring_start, prev_num_accepted_tokens : (num_slots,) int32, changed in place.
    num_accepted : (batch,) int32 or int64: how many of the step's tokens are kept, the sampled one
        counted, from 0 to the row's length. On a device larger values count as the length and
        negative ones as 0; on the host they are a ValueError.
    query_lens : the step's tokens per row: an int for all, or (batch,) int32 or int64.
    slots : (batch,) int32 or int64, distinct; None is slot = batch row. Padding is left alone.
    max_window, ring_buffer_len : W and L of the rings.
    reset : (batch,) bool or uint8, optional: rows where it is set start anew with both cursors 0,
        whatever `num_accepted` says: a new request wins over a stale commit.
    force_flush : (batch,) bool or uint8, optional: the step's own.
    rand_seed : (1,) int64, optional: incremented, so that the next step rounds with other bits.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` as the kernels do.

    Equivalent to::

        if force_flush or prev + q > max_window:      # the step flushed
            start, prev = (start + prev) % ring_buffer_len, accepted
        else:
            prev += accepted
    """
    length, each = (query_lens, None) if isinstance(query_lens, int) else (None, query_lens)
    key = (
        max_window, ring_buffer_len, pad_slot_id, type(max_window), type(ring_buffer_len),
        type(pad_slot_id), length, type(length), slots is None, reset is None,
        force_flush is None, rand_seed is None,
    )  # fmt: skip
    given = (num_accepted, each, slots, reset, force_flush)
    own = (ring_start, prev_num_accepted_tokens, rand_seed)
    if _advances.repeat(key, (*given, *own), num_accepted) is not None:
        return
    arrays = dict(zip(ADVANCE_ARRAYS, given, strict=True))
    names = ("ring_start", "prev_num_accepted_tokens", "rand_seed")
    views = {
        name: optional_view(array, name) if name == "rand_seed" else view(array, name)
        for name, array in zip(names, own, strict=True)
    }
    seen = Seen(_advances, key, num_accepted, arrays | dict(zip(names, own, strict=True)))
    advance_views(views, query_lens, arrays, max_window, ring_buffer_len, pad_slot_id, seen)


_advances = SeenCalls()
ADVANCE_ARRAYS = ("num_accepted", "query_lens", "slots", "reset", "force_flush")


def advance_views(
    own: dict[str, View | None],
    query_lens: Any,
    arrays: dict[str, Any],
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
    seen: Seen,
) -> None:
    """:func:`advance_ring` over views of the cursors and the seed; `arrays` are all others."""
    fixed_len = query_lens if isinstance(query_lens, int) else 0
    v: dict[str, View | None] = {
        "ring_start": own["ring_start"],
        "prev_num_accepted_tokens": own["prev_num_accepted_tokens"],
        "num_accepted": view(arrays["num_accepted"], "num_accepted"),
        "query_lens": None if isinstance(query_lens, int) else view(query_lens, "query_lens"),
        **{n: optional_view(arrays[n], n) for n in ("slots", "reset", "force_flush")},
        "rand_seed": own["rand_seed"],
    }
    index_range("pad_slot_id", pad_slot_id)
    check_int("max_window", max_window)
    check_int("ring_buffer_len", ring_buffer_len)
    if v["query_lens"] is None and not 0 <= fixed_len <= MAX_TOKENS:
        raise ValueError(f"query_lens: expected 0 to {MAX_TOKENS}, got {fixed_len}")
    check_window("ring_buffer_len", ring_buffer_len, max(fixed_len, 1), max_window)
    letters = _check_cursors(
        v,
        {
            "num_accepted": ("int32", "int64"),
            "query_lens": ("int32", "int64"),
            "reset": ("bool", "uint8"),
            "force_flush": ("bool", "uint8"),
        },
    )
    check_seed(v["rand_seed"])
    if (seed := v["rand_seed"]) is not None:
        check_inplace(seed)
    first = v["num_accepted"]
    assert first is not None
    if first.device.kind not in launchers:
        _advance_on_host(v, fixed_len, max_window, ring_buffer_len, pad_slot_id)
        return
    if letters["batch"] == 0:
        return
    record: Any = AdvanceRingParams()
    for name, array in v.items():
        if array is not None:
            check_alignment(array)
            setattr(record, name, array.ptr)
            if name != "rand_seed":
                setattr(record, f"{name}_stride", array.strides[0])
            if array.dtype in INDEX_TYPES and hasattr(record, f"{name}_type"):
                setattr(record, f"{name}_type", INDEX_TYPES[array.dtype])
    record.pad_slot_id = pad_slot_id
    record.num_slots, record.batch = letters["num_slots"], letters["batch"]
    record.npredicted, record.max_window = fixed_len, max_window
    record.ring_buffer_len = ring_buffer_len
    blocks = -(-letters["batch"] // THREADS)
    stream = current_stream(first)
    plan = Plan(AdvanceRingKey(), (blocks, 1, 1), (THREADS, 1, 1), record, first.device)
    plan.launch(stream)
    seen.add(plan, v)
    wait_for_jax(v.values(), first.device, stream)


def reset_slots(
    ring_start: Any,
    prev_num_accepted_tokens: Any,
    slots: Any,
    states: Sequence[Any] = (),
    pad_slot_id: int = -1,
    *,
    state_scales: Sequence[Any] = (),
    state_copies: Sequence[Any] = (),
) -> None:
    """Empties slots for new requests: both cursors 0 and, in every array of `states`, zeros.

    Parameters
    ----------
    ring_start, prev_num_accepted_tokens : (num_slots,) int32, changed in place.
    slots : (batch,) int32 or int64; None is every slot. Padding is left alone.
    states : of the layers, each (num_slots, nheads, head_dim, dstate) of one shape, changed in
        place. The rings need nothing: their rows are dead.
    state_scales : beside 8-bit states and copies, each (num_slots, nheads, head_dim) float32: set
        to 1.
    state_copies : beside float16 states, as `state_copy` of :func:`checkpointing_ssu`: zeros.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` as the kernels do.
    """
    v: dict[str, View | None] = {
        "ring_start": view(ring_start, "ring_start"),
        "prev_num_accepted_tokens": view(prev_num_accepted_tokens, "prev_num_accepted_tokens"),
        "slots": optional_view(slots, "slots"),
    }
    index_range("pad_slot_id", pad_slot_id)
    letters = _check_cursors(v, {})
    layers = [view(state, f"states[{layer}]") for layer, state in enumerate(states)]
    for state in layers:
        check_dtype(state, STATE_DTYPES)
        check_dtype(state, (layers[0].dtype,), f" as {layers[0].name}")
        letters.bind(state, ("num_slots", "nheads", "head_dim", "dstate"))
    scales = [view(scale, f"state_scales[{layer}]") for layer, scale in enumerate(state_scales)]
    copies = [view(copy, f"state_copies[{layer}]") for layer, copy in enumerate(state_copies)]
    if copies and len(copies) != len(layers):
        raise ValueError(
            f"state_copies: expected {len(layers)} arrays, one for each state, got {len(copies)}"
        )
    scaled = len(layers) if copies or (layers and layers[0].dtype in SCALED_DTYPES) else 0
    if len(scales) != scaled:
        raise ValueError(
            f"state_scales: expected {scaled} arrays, one for each 8-bit state, got {len(scales)}"
        )
    for layer, state in enumerate(layers):
        check_state(
            state, copies[layer] if copies else None, scales[layer] if scales else None, letters
        )
        if copies:
            check_dtype(copies[layer], (copies[0].dtype,), f" as {copies[0].name}")
    first = v["ring_start"]
    assert first is not None
    check_devices([first, *layers, *copies, *scales])
    check_inplace(*layers, *copies, *scales)
    if first.device.kind not in launchers:
        _reset_on_host(v, [*layers, *copies], scales, pad_slot_id)
        return
    for array in v.values():
        if array is not None:
            check_alignment(array)
    for state in (*layers, *copies):
        check_packed(state, 2)
        check_alignment(state, 2)
    for scale in scales:
        check_packed(scale, 2)
        check_alignment(scale)
    batch = letters["num_slots"] if v["slots"] is None else letters["batch"]
    if batch == 0:
        return
    for start in range(0, max(len(layers), 1), MAX_RESET_LAYERS):
        end = start + MAX_RESET_LAYERS
        of_states = [] if copies else scales[start:end]
        _launch_reset(v, layers[start:end], of_states, letters, batch, pad_slot_id, start == 0)
        if copies:
            table = copies[start:end], scales[start:end]
            _launch_reset(v, *table, letters, batch, pad_slot_id, with_cursors=False)


def _launch_reset(
    v: dict[str, View | None],
    table: list[View],
    scales: list[View],
    letters: Letters,
    batch: int,
    pad_slot_id: int,
    with_cursors: bool,
) -> None:
    record: Any = ResetSlotsParams()
    for layer, state in enumerate(table):
        vector = ALIGNMENT // itemsize(state.dtype)
        record.states[layer] = state.ptr
        record.state_slot_strides[layer] = state.strides[0] // vector
        record.state_head_strides[layer] = state.strides[1] // vector
        record.nheads = state.shape[1]
        record.vectors_per_head = state.shape[2] * state.shape[3] // vector
    for layer, scale in enumerate(scales):
        record.head_dim = scale.shape[2]
        record.state_scales[layer] = scale.ptr
        record.state_scale_slot_strides[layer], record.state_scale_head_strides[layer] = (
            scale.strides[:2]
        )
    for name, array in v.items():
        if array is not None and (with_cursors or name == "slots"):
            setattr(record, name, array.ptr)
            setattr(record, f"{name}_stride", array.strides[0])
    slots, first = v["slots"], v["ring_start"]
    assert first is not None
    record.slots_type = INDEX_TYPES[slots.dtype] if slots is not None else 0
    record.pad_slot_id, record.num_slots, record.batch = pad_slot_id, letters["num_slots"], batch
    grid = (batch, max(len(table), 1), 1)
    stream = current_stream(slots if slots is not None else first)
    Plan(ResetSlotsKey(), grid, (THREADS, 1, 1), record, first.device).launch(stream)
    wait_for_jax([slots], first.device, stream)


def load_state(
    state: Any,
    slots: Any,
    source: Any,
    pad_slot_id: int = -1,
    *,
    state_scale: Any = None,
    state_copy: Any = None,
) -> None:
    """Writes the states that a prefill left into slots, rounded to the state's type.

    Parameters
    ----------
    state : (num_slots, nheads, head_dim, dstate), one layer's states; the slots are written.
    slots : (batch,) int32 or int64, distinct; None is slot = batch row. Padding is left alone.
    source : (batch, nheads, head_dim, dstate), any float type.
    state_scale : (num_slots, nheads, head_dim) float32, of an 8-bit state or a copy; the slots are
        written.
    state_copy : beside a float16 state, as in :func:`checkpointing_ssu`; the slots are written,
        from the source itself.

    The cursors are not touched: they belong to all layers, :func:`reset_slots` clears them.
    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` as the kernels do.
    """
    load_views(
        view(state, "state"),
        optional_view(state_copy, "state_copy"),
        optional_view(state_scale, "state_scale"),
        view(source, "source"),
        optional_view(slots, "slots"),
        pad_slot_id,
    )


def load_views(
    target: View,
    copy: View | None,
    scale: View | None,
    given: View,
    indices: View | None,
    pad_slot_id: int,
    seed: int | None = None,
) -> None:
    """:func:`load_state` over views, whose names the messages use.

    With a seed a state that has a copy is rounded stochastically.
    """
    index_range("pad_slot_id", pad_slot_id)
    letters = Letters()
    check_dtype(given, FLOAT_DTYPES)
    state_format = check_state(target, copy, scale, letters)
    letters.bind(given, ("batch", "nheads", "head_dim", "dstate"))
    if indices is not None:
        check_dtype(indices, tuple(INDEX_TYPES))
        letters.bind(indices, ("batch",))
    elif letters["batch"] > letters["num_slots"]:
        raise ValueError(
            f"{target.name}: expected num_slots >= batch = {letters['batch']} without an array of "
            f"slots, got {letters['num_slots']}"
        )
    written = [array for array in (target, copy, scale) if array is not None]
    check_devices([*written, given, indices])
    check_inplace(*written)
    for array in written:
        check_packed(array, 2)
    if target.device.kind not in launchers:
        values, to = as_numpy(given), as_numpy(target)
        storage = reference.Storage(
            to,
            None if scale is None else as_numpy(scale),
            None if seed is None else np.array([seed], np.int64),
            PHILOX_ROUNDS,
            copy=None if copy is None else as_numpy(copy),
            events=None if seed is None else np.zeros(len(to), np.int64),
        )
        rows = None if indices is None else as_numpy(indices)
        for row in range(len(values)):
            slot = row if rows is None else int(rows[row])
            if slot in live_slots(
                None if rows is None else rows[row : row + 1], row + 1, len(to), pad_slot_id
            ):
                storage.store(slot, values[row])
        return
    check_packed(given, 2)
    for array in (*written, given):
        check_alignment(array)
    if indices is not None:
        check_alignment(indices)
    if copy is not None:  # what is written in vectors
        check_alignment(copy, 2)
        check_alignment(target, 2)
    batch, nheads = given.shape[:2]
    if 0 in given.shape:
        return
    record: Any = LoadStateParams(state=target.ptr, source=given.ptr)
    record.state_slot_stride, record.state_head_stride = target.strides[:2]
    if copy is not None:
        record.state_copy = copy.ptr
        record.state_copy_slot_stride, record.state_copy_head_stride = copy.strides[:2]
    if seed is not None:
        record.seed, record.philox_rounds = seed, PHILOX_ROUNDS
    if scale is not None:
        record.state_scale = scale.ptr
        record.state_scale_slot_stride, record.state_scale_head_stride = scale.strides[:2]
    record.source_batch_stride, record.source_head_stride = given.strides[:2]
    if indices is not None:
        record.slots, record.slots_stride = indices.ptr, indices.strides[0]
        record.slots_type = INDEX_TYPES[indices.dtype]
    record.pad_slot_id, record.num_slots = pad_slot_id, target.shape[0]
    record.batch, record.nheads = batch, nheads
    record.head_dim, record.dstate = given.shape[2:]
    key = LoadStateKey(state_format, given.dtype)
    stream = current_stream(given)
    Plan(key, (batch * nheads, 1, 1), (THREADS, 1, 1), record, target.device).launch(stream)
    wait_for_jax((given, indices), target.device, stream)


def warm_up(
    *,
    dstate: int,
    state_dtype: Any = "float32",
    activation_dtype: Any = "bfloat16",
    npredicted: int = 1,
    device: int = 0,
    algorithm: str = "auto",
    nheads: int | None = None,
    ngroups: int | None = None,
    head_dim: int | None = None,
    max_window: int | None = None,
    ring_buffer_len: int | None = None,
) -> None:
    """Compiles and loads every kernel that decoding one kind of layer may need.

    Call it before a CUDA-graph capture: inside one, nothing can be compiled.

    Parameters
    ----------
    dstate, state_dtype, activation_dtype : of the layers.
    npredicted : the most tokens of a step, 1 to 16.
    device : ordinal of the CUDA device.
    algorithm : of the steps; "two-kernel" loads its kernels beside those of one kernel.
    nheads, ngroups, head_dim, max_window, ring_buffer_len : of the layers, all or none; the
        number of ring rows is ``max_window + npredicted`` unless it is given. With them kernels
        are loaded, too, that know these sizes: they give the same bits in less time. Steps take
        them that come later, on arrays that have no gaps inside a slot or a token.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` without CuPy, a
    driver, NVRTC or headers.
    """
    state = format_name(state_dtype, "state_dtype")
    activation = dtype_name(activation_dtype, "activation_dtype")
    if activation not in ACTIVATION_DTYPES:
        raise TypeError(
            f"activation_dtype: expected one of {', '.join(ACTIVATION_DTYPES)}, got {activation}"
        )
    check_int("dstate", dstate)
    check_value("dstate", dstate, DSTATES)
    check_int("npredicted", npredicted)
    check_int("device", device)
    if not 1 <= npredicted <= MAX_TOKENS:
        raise ValueError(f"npredicted: expected 1 to {MAX_TOKENS}, got {npredicted}")
    two_kernels = check_algorithm(algorithm) == "two-kernel"
    sizes = {
        "nheads": nheads,
        "ngroups": ngroups,
        "head_dim": head_dim,
        "max_window": max_window,
        "ring_buffer_len": ring_buffer_len,
    }
    layout = _layout_of_sizes(sizes, npredicted)
    keys: list[Key] = [AdvanceRingKey(), ResetSlotsKey()]
    for tokens in (least for least in TOKENS_OF_FORMS if least <= npredicted):
        keys += step_keys(state, activation, dstate, tokens)
        second = two_kernel_key(state, activation, dstate, tokens)
        if two_kernels and second is not None:
            keys += [precompute_key(second), second]
    if layout is not None:
        keys += [LayoutKey(key, layout) for key in keys if isinstance(key, CheckpointingSsuKey)]
    if state in STATE_DTYPES:
        keys.append(SelectiveStateUpdateKey(state, activation, dstate))
    keys += [LoadStateKey(state, source) for source in FLOAT_DTYPES]
    compiler.require_gpu(device)
    with device_guard(Device("cuda", device)):
        compiler.load(keys, device)


def _layout_of_sizes(sizes: dict[str, int | None], npredicted: int) -> Layout | None:
    """Of `nheads`, `ngroups`, `head_dim`, `max_window` and `ring_buffer_len`, if they are given."""
    if all(size is None for size in sizes.values()):
        return None
    if sizes["ring_buffer_len"] is None and isinstance(sizes["max_window"], int):
        sizes = sizes | {"ring_buffer_len": sizes["max_window"] + npredicted}
    for name, size in sizes.items():
        check_int(name, size)
    nheads, ngroups, head_dim, max_window, rows = (int(size or 0) for size in sizes.values())
    check_value("head_dim", head_dim, HEAD_DIMS)
    if nheads < 1 or ngroups < 1 or nheads % ngroups:
        raise ValueError(f"ngroups: expected a divisor of nheads = {nheads}, got {ngroups}")
    if not npredicted <= max_window <= MAX_WINDOW:
        raise ValueError(f"max_window: expected {npredicted} to {MAX_WINDOW}, got {max_window}")
    if rows < max_window + npredicted:
        raise ValueError(
            f"ring_buffer_len: expected at least {max_window + npredicted}, got {rows}"
        )
    return Layout(nheads, nheads // ngroups, head_dim, max_window, rows)


def _check_cursors(v: dict[str, View | None], others: dict[str, tuple[str, ...]]) -> Letters:
    """Cursors, slots and the (batch,) arrays beside them."""
    letters = Letters()
    cursors = [v["ring_start"], v["prev_num_accepted_tokens"]]
    for cursor in cursors:
        assert cursor is not None
        check_dtype(cursor, ("int32",))
        letters.bind(cursor, ("num_slots",))
    for name, allowed in {"slots": tuple(INDEX_TYPES), **others}.items():
        array = v[name]
        if array is not None:
            check_dtype(array, allowed)
            letters.bind(array, ("batch",))
    check_devices(list(v.values()))
    check_inplace(*(cursor for cursor in cursors if cursor is not None))
    if v["slots"] is None and others and letters["batch"] > letters["num_slots"]:
        raise ValueError(
            f"ring_start: expected num_slots >= batch = {letters['batch']} without an array of "
            f"slots, got {letters['num_slots']}"
        )
    return letters


def _advance_on_host(
    v: dict[str, View | None],
    fixed_len: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int,
) -> None:
    a = {name: None if array is None else as_numpy(array) for name, array in v.items()}
    forced = a["force_flush"]
    start, prev, accepted = a["ring_start"], a["prev_num_accepted_tokens"], a["num_accepted"]
    lens, slots, reset = a["query_lens"], a["slots"], a["reset"]
    assert start is not None and prev is not None and accepted is not None
    moved: dict[int, tuple[int, int]] = {}
    for row in range(len(accepted)):
        slot = row if slots is None else int(slots[row])
        if slot not in live_slots(np.array([slot]), 1, len(start), pad_slot_id):
            continue
        if reset is not None and reset[row]:
            moved[slot] = (0, 0)
            continue
        q = fixed_len if lens is None else int(lens[row])
        longest = min(max_window, ring_buffer_len - max_window)
        if not 0 <= q <= longest:
            raise ValueError(f"query_lens: expected 0 to {longest}, got {q} at row {row}")
        before = int(start[slot]), int(prev[slot])
        check_host_cursors(slot, *before, max_window, ring_buffer_len)
        moved[slot] = reference.advance_cursors(
            *before,
            int(accepted[row]),
            q,
            max_window,
            ring_buffer_len,
            forced is not None and bool(forced[row]),
        )
    for slot, cursors in moved.items():
        start[slot], prev[slot] = cursors
    if a["rand_seed"] is not None and len(accepted):
        a["rand_seed"][...] += 1


def _reset_on_host(
    v: dict[str, View | None], layers: Iterable[View], scales: Iterable[View], pad_slot_id: int
) -> None:
    a = {name: None if array is None else as_numpy(array) for name, array in v.items()}
    start, prev, slots = a["ring_start"], a["prev_num_accepted_tokens"], a["slots"]
    assert start is not None and prev is not None
    chosen = live_slots(slots, len(start), len(start), pad_slot_id)
    start[chosen] = 0
    prev[chosen] = 0
    for state in layers:
        as_numpy(state)[chosen] = 0
    for scale in scales:
        as_numpy(scale)[chosen] = 1
