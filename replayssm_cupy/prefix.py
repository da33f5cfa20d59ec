"""Prefix snapshots: the states after a part of their rings, written to other slots.

A checkpoint and its ring hold every state from the checkpoint to the newest token. A prefix cache
wants one of them, at the end of a block of tokens, in a slot of its own; one launch writes it for
all layers. Sources and rings are only read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import reference
from .arrays import Device, View, as_numpy, current_stream, dtype_name, view
from .checked import check_mode
from .checks import (
    Letters,
    check_alignment,
    check_devices,
    check_dtype,
    check_int,
    check_seed,
    check_value,
    index_range,
    optional_view,
)
from .decode import wait_for_jax
from .formats import arrays_of, copy_shape, format_name
from .keys import (
    ACTIVATION_DTYPES,
    COPY_DTYPES,
    DSTATES,
    FLOAT_DTYPES,
    HEAD_DIMS,
    MAX_WINDOW,
    PLAIN_ACTIVATION_DTYPES,
    SCALED_FORMATS,
    STATE_FORMATS,
    MaterializeKey,
)
from .plan import FLOAT_TYPES, INDEX_TYPES, MaterializeParams, Plan, launchers
from .prefix_checks import HostMetadata, check_on_device, check_on_host
from .prefix_plan import MAX_BATCH
from .prefix_tables import COPY_TABLES, TABLES, Layout
from .schedule import processor

WARPS = 4
MAX_HEADS = 2**27  # the kernel counts heads in an int, with room to spare


def replayssm_materialize(
    state_ptrs: Any,
    state_slot_strides: Any,
    x_cache_ptrs: Any,
    x_cache_slot_strides: Any,
    B_cache_ptrs: Any,
    B_cache_slot_strides: Any,
    dt_cache_ptrs: Any,
    dt_cache_slot_strides: Any,
    A_ptrs: Any,
    state_scale_ptrs: Any,
    state_scale_slot_strides: Any,
    src_slots: Any,
    dst_slots: Any,
    ring_start: Any,
    replay_prefix_len: Any,
    active_request_indices: Any,
    *,
    state_dtype: Any,
    input_dtype: Any,
    matrixA_dtype: Any,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: Any = None,
    philox_rounds: int = 0,
    dependency_inputs: Sequence[Any] = (),
    dependency_outputs: Sequence[Any] = (),
    check: bool | str = False,
    state_copy_ptrs: Any = None,
    state_copy_slot_strides: Any = None,
) -> None:
    """Writes states after a prefix of their rings to other slots, for all layers in one launch.

    Parameters
    ----------
    state_ptrs, x_cache_ptrs, B_cache_ptrs, dt_cache_ptrs, A_ptrs, state_scale_ptrs : (layers,)
        int64 or uint64, addresses of each layer's arrays, on the device. Inside a slot the arrays
        are packed: state (nheads, dim, dstate), x (nheads, ring_buffer_len, dim), B (ngroups,
        ring_buffer_len, dstate), dt (nheads, ring_buffer_len) float32, A (nheads,), scale (nheads,
        dim) float32 beside an 8-bit state, else address 0.
    state_slot_strides, ... : (layers,) int64 or uint64, from slot to slot in elements.
    src_slots, dst_slots : (layers, batch) int32 or int64. A pair with a slot that is `pad_slot_id`
        or negative is left out. The states (and scales) of `dst_slots` are written. A destination
        may be its own source, but no other request's source or destination.
    ring_start : (batch,) int32, the oldest live row, in [0, ring_buffer_len).
    replay_prefix_len : (batch,) int32, how many rows of the ring to replay, at most max_window and
        the source's live rows; 0 copies the bytes of state and scale, a negative one does nothing.
    active_request_indices : (batch,) int32: the requests to look at, each once, in any order, then
        -1. None is all.
    state_dtype, input_dtype, matrixA_dtype : of the state, of x and B (bfloat16 or float16; float32
        on the CPU path), of A (any float type); of NumPy, torch, JAX, or strings.
    dim, dstate, num_heads, heads_per_group : sizes; dim is head_dim: 64, 80, 96 or 128; dstate 64,
        128 or 256.
    max_window, ring_buffer_len : W, 1 to 16, and L, at least W.
    rand_seed, philox_rounds : with rounds from 1 to 10 states (not float32) are rounded
        stochastically, with the seed (1,) int64 mixed with the layer; 0 rounds to nearest.
    dependency_inputs, dependency_outputs : arrays, not looked at: for compilers that order calls
        by their arguments.
    state_copy_ptrs, state_copy_slot_strides : with the state_dtype "float16+fp8" or
        "float16+nvfp4", tables of the read copies, packed inside a slot as `state_copy` of
        :func:`checkpointing_ssu`; else None.
    check : True looks at metadata, slots and tables first, with a kernel of its own and a wait for
        it; so does REPLAYSSM_CHECK=1. Not inside a CUDA-graph capture.

    Neither rings nor cursors are written: the owner of a destination sets its cursors to 0. All
    values are read when the kernel runs, so a captured launch follows them. To nearest, the result
    has the same bits as a flush of the same rows.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` as the kernels do,
    or for what a check found.

    Equivalent to, for every listed request and layer (``c = cumsum(A * dt)`` over m rows j)::

        state[dst] = exp(c[-1]) * state[src] + sum(exp(c[-1] - c[j]) * dt[j] * outer(x[j], B[j]))

    Source of the contract: ``replayssm_materialize`` of FlashInfer.
    """
    given = (state_ptrs, state_slot_strides, x_cache_ptrs, x_cache_slot_strides, B_cache_ptrs,
             B_cache_slot_strides, dt_cache_ptrs, dt_cache_slot_strides, A_ptrs, state_scale_ptrs,
             state_scale_slot_strides)  # fmt: skip
    tables = {name: view(array, name) for name, array in zip(TABLES, given, strict=True)}
    state_format = format_name(state_dtype, "state_dtype")
    copies = dict(zip(COPY_TABLES, (state_copy_ptrs, state_copy_slot_strides), strict=True))
    for name, array in copies.items():
        if (array is None) == (state_format in COPY_DTYPES):
            wanted = "a table" if array is None else "None"
            got = "None" if array is None else type(array).__name__
            raise ValueError(f"{name}: expected {wanted} with states of {state_format}, got {got}")
        if array is not None:
            tables[name] = view(array, name)
    metadata = {
        "src_slots": view(src_slots, "src_slots"),
        "dst_slots": view(dst_slots, "dst_slots"),
        "ring_start": view(ring_start, "ring_start"),
        "replay_prefix_len": view(replay_prefix_len, "replay_prefix_len"),
        "active_request_indices": optional_view(active_request_indices, "active_request_indices"),
        "rand_seed": optional_view(rand_seed, "rand_seed"),
    }
    for name, anchors in (
        ("dependency_inputs", dependency_inputs), ("dependency_outputs", dependency_outputs)
    ):  # fmt: skip
        for index, anchor in enumerate(anchors):
            view(anchor, f"{name}[{index}]")
    layout = _packed_layout(
        state_format, dtype_name(input_dtype, "input_dtype"),
        dtype_name(matrixA_dtype, "matrixA_dtype"), dim, dstate, num_heads, heads_per_group,
        max_window, ring_buffer_len,
    )  # fmt: skip
    materialize_views(tables, metadata, layout, pad_slot_id, philox_rounds, check_mode(check))


def _packed_layout(
    state_dtype: str,
    activation_dtype: str,
    A_dtype: str,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
) -> Layout:
    """Checked sizes of layers whose slots hold packed arrays."""
    sizes = {
        "dim": dim,
        "dstate": dstate,
        "num_heads": num_heads,
        "heads_per_group": heads_per_group,
        "max_window": max_window,
        "ring_buffer_len": ring_buffer_len,
    }
    for name, size in sizes.items():
        check_int(name, size)
    check_value("dim", dim, HEAD_DIMS)
    check_value("dstate", dstate, DSTATES)
    if not 1 <= num_heads <= MAX_HEADS:
        raise ValueError(f"num_heads: expected 1 to {MAX_HEADS}, got {num_heads}")
    if heads_per_group < 1 or num_heads % heads_per_group:
        raise ValueError(
            f"heads_per_group: expected a divisor of num_heads = {num_heads}, got {heads_per_group}"
        )
    if not 1 <= max_window <= MAX_WINDOW:
        raise ValueError(f"max_window: expected 1 to {MAX_WINDOW}, got {max_window}")
    if not max_window <= ring_buffer_len < 2**31:
        raise ValueError(
            f"ring_buffer_len: expected max_window = {max_window} to {2**31 - 1}, "
            f"got {ring_buffer_len}"
        )
    return Layout(
        state_dtype, activation_dtype, A_dtype, dim, dstate, num_heads, heads_per_group, max_window,
        ring_buffer_len,
        state_head_stride=dim * dstate,
        state_scale_head_stride=dim,
        x_cache_head_stride=ring_buffer_len * dim,
        x_cache_row_stride=dim,
        B_cache_group_stride=ring_buffer_len * dstate,
        B_cache_row_stride=dstate,
        dt_cache_head_stride=ring_buffer_len,
        dt_cache_row_stride=1,
        A_stride=1,
        state_copy_head_stride=math.prod(copy_shape(state_dtype, dim, dstate)),
    )  # fmt: skip


def materialize_views(
    tables: dict[str, View],
    metadata: dict[str, View | None],
    layout: Layout,
    pad_slot_id: int,
    philox_rounds: int,
    check: bool | str,
    prev: View | None = None,
) -> Plan | None:
    """:func:`replayssm_materialize` over views; returns what was launched, if anything.

    `prev` (num_slots,) int32 tells the live rows of every slot to checked mode, where it is known.
    """
    index_range("pad_slot_id", pad_slot_id)
    check_formats(layout, tables["state_ptrs"].device)
    letters = _check_metadata(tables, metadata)
    _check_rounding(metadata["rand_seed"], philox_rounds, layout.state_dtype)
    first = tables["state_ptrs"]
    if first.device.kind not in launchers:
        _materialize_on_host(tables, metadata, layout, pad_slot_id, philox_rounds, prev)
        return None
    layers, batch = letters["layers"], letters["batch"]
    if batch == 0:
        return None
    record: Any = MaterializeParams()
    for name, array in (*tables.items(), *metadata.items()):
        if array is not None:
            check_alignment(array)
            setattr(record, name, array.ptr)
    for name in ("src_slots", "dst_slots"):
        slots = metadata[name]
        assert slots is not None
        setattr(record, f"{name}_layer_stride", slots.strides[0])
        setattr(record, f"{name}_batch_stride", slots.strides[1])
        setattr(record, f"{name}_type", INDEX_TYPES[slots.dtype])
    for name in ("ring_start", "replay_prefix_len", "active_request_indices"):
        if (one := metadata[name]) is not None:
            setattr(record, f"{name}_stride", one.strides[0])
    for name, value in layout._asdict().items():
        if not name.endswith("_dtype") and name != "dstate":
            setattr(record, name, value)
    record.pad_slot_id, record.layers, record.batch = pad_slot_id, layers, batch
    record.A_type, record.philox_rounds = FLOAT_TYPES[layout.A_dtype], philox_rounds
    like = metadata["src_slots"]
    assert like is not None
    if check:
        check_on_device(record, like, prev, layout.state_dtype, layout.A_dtype)
    key = MaterializeKey(layout.state_dtype, layout.activation_dtype, layout.dstate)
    heads = batch * layers * layout.nheads
    blocks = min(-(-heads // WARPS), processor(first.device).count * key.resident_blocks)
    stream = current_stream(like)
    plan = Plan(key, (blocks, 1, 1), (32 * WARPS, 1, 1), record, first.device)
    plan.launch(stream)
    wait_for_jax((*tables.values(), *metadata.values()), first.device, stream)
    return plan


def check_formats(layout: Layout, device: Device) -> None:
    """The dtypes that there are kernels for, or on the CPU path a reference."""
    activations = ACTIVATION_DTYPES if device.kind in launchers else PLAIN_ACTIVATION_DTYPES
    for name, dtype, allowed in (
        ("state_dtype", layout.state_dtype, STATE_FORMATS),
        ("input_dtype", layout.activation_dtype, activations),
        ("matrixA_dtype", layout.A_dtype, FLOAT_DTYPES),
    ):
        if dtype not in allowed:
            raise TypeError(f"{name}: expected one of {', '.join(allowed)}, got {dtype}")


def _check_metadata(tables: dict[str, View], metadata: dict[str, View | None]) -> Letters:
    letters = Letters()
    for table in tables.values():
        check_dtype(table, ("int64", "uint64"))
        letters.bind(table, ("layers",))
        if table.strides != (1,) and table.shape[0] > 1:
            raise ValueError(
                f"{table.name}: expected a contiguous array, got strides {table.strides}"
            )
    if letters["layers"] == 0:
        raise ValueError("state_ptrs: expected at least one layer, got 0")
    for name, shape in (
        ("src_slots", ("layers", "batch")), ("dst_slots", ("layers", "batch")),
        ("ring_start", ("batch",)), ("replay_prefix_len", ("batch",)),
        ("active_request_indices", ("batch",)),
    ):  # fmt: skip
        if (array := metadata[name]) is not None:
            check_dtype(array, tuple(INDEX_TYPES) if len(shape) == 2 else ("int32",))
            letters.bind(array, shape)
    if letters["batch"] > MAX_BATCH:
        raise ValueError(
            f"src_slots: expected a batch of at most {MAX_BATCH}, got {letters['batch']}"
        )
    check_devices([*tables.values(), *metadata.values()])
    return letters


def _check_rounding(seed: View | None, philox_rounds: int, state_dtype: str) -> None:
    check_int("philox_rounds", philox_rounds)
    if not 0 <= philox_rounds <= 10:
        raise ValueError(f"philox_rounds: expected 0 to 10, got {philox_rounds}")
    check_seed(seed)
    if philox_rounds == 0:
        return
    if seed is None:
        raise ValueError(f"rand_seed: expected (1,) int64 with {philox_rounds} rounds, got None")
    if state_dtype == "float32":
        raise ValueError(
            f"philox_rounds: expected 0 with a float32 state, which is not rounded, got "
            f"{philox_rounds}"
        )


def _materialize_on_host(
    tables: dict[str, View],
    metadata: dict[str, View | None],
    layout: Layout,
    pad_slot_id: int,
    philox_rounds: int,
    prev: View | None,
) -> None:
    a = {name: None if v is None else as_numpy(v) for name, v in metadata.items()}
    src, dst, start, prefix = (a[name] for name in list(metadata)[:4])
    assert src is not None and dst is not None and start is not None and prefix is not None
    given = HostMetadata(src, dst, start, prefix, a["active_request_indices"], pad_slot_id,
                         layout.num_slots)  # fmt: skip
    live = None if prev is None else as_numpy(prev)
    check_on_host(given, layout.max_window, layout.ring_buffer_len, live)
    addresses = {name: as_numpy(table) for name, table in tables.items()}
    for layer in range(len(src)):
        pairs = [(r, pair) for r in given.requests() if (pair := given.slots(layer, r))]
        if not pairs:
            continue
        count = 1 + max(max(pair) for _, pair in pairs)
        arrays = _host_layer(addresses, layer, count, layout)
        stochastic = philox_rounds > 0
        storage = reference.Storage(
            arrays["state"], arrays.get("state_scale"), a["rand_seed"] if stochastic else None,
            philox_rounds, layer, arrays.get("state_copy"),
        )  # fmt: skip
        for request, (source, target) in pairs:
            reference.materialize(
                storage, arrays["x_cache"], arrays["B_cache"], arrays["dt_cache"], arrays["A"],
                source, target, int(start[request]), int(prefix[request]),
            )  # fmt: skip


def _host_layer(
    addresses: dict[str, np.ndarray[Any, Any]], layer: int, slots: int, layout: Layout
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays behind one entry of the tables, the first `slots` slots of each."""
    c = layout
    groups, rows = c.nheads // c.heads_per_group, c.ring_buffer_len
    state_dtype, copy_dtype = arrays_of(c.state_dtype)
    of_copy = copy_shape(c.state_dtype, c.head_dim, c.dstate)
    shapes = {
        "state": (state_dtype, (c.nheads, c.head_dim, c.dstate),
                  (c.state_head_stride, c.dstate, 1)),
        "state_copy": (copy_dtype or "", (c.nheads, *of_copy),
                       (c.state_copy_head_stride, of_copy[1], 1)),
        "x_cache": (c.activation_dtype, (c.nheads, rows, c.head_dim),
                    (c.x_cache_head_stride, c.x_cache_row_stride, 1)),
        "B_cache": (c.activation_dtype, (groups, rows, c.dstate),
                    (c.B_cache_group_stride, c.B_cache_row_stride, 1)),
        "dt_cache": ("float32", (c.nheads, rows), (c.dt_cache_head_stride, c.dt_cache_row_stride)),
        "state_scale": ("float32", (c.nheads, c.head_dim), (c.state_scale_head_stride, 1)),
        "A": (c.A_dtype, (c.nheads,), (c.A_stride,)),
    }  # fmt: skip
    arrays = {}
    for name, (dtype, shape, strides) in shapes.items():
        if name == "state_scale" and c.state_dtype not in SCALED_FORMATS:
            continue
        if name == "state_copy" and copy_dtype is None:
            continue
        address = int(addresses[f"{name}_ptrs"][layer])
        if address == 0:
            raise ValueError(f"{name}_ptrs: expected an address, got 0 at layer {layer}")
        if name != "A":
            stride = int(addresses[f"{name}_slot_strides"][layer])
            shape, strides = (slots, *shape), (stride, *strides)
        memory = View(name, address, shape, strides, dtype, Device("cpu"), False, "numpy", None)
        arrays[name] = as_numpy(memory)
    return arrays
