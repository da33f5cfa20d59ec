"""The arrays of a model's layers: made or borrowed, checked against each other, and read once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from . import compiler
from .arrays import (
    Device,
    View,
    device_guard,
    dtype_name,
    empty_like_framework,
    itemsize,
    numpy_dtype,
    view,
)
from .calls import SeenCalls
from .checks import (
    Letters,
    check_devices,
    check_dtype,
    check_inplace,
    check_int,
    check_rounds,
    check_value,
    first_seed,
    named_device,
)
from .decode_checks import check_layout, check_window
from .folds import Folds
from .formats import arrays_of, check_state, copy_shape, format_name, format_of
from .keys import (
    ACTIVATION_DTYPES,
    DSTATES,
    HEAD_DIMS,
    MAX_TOKENS,
    MAX_WINDOW,
    PLAIN_ACTIVATION_DTYPES,
    SCALED_FORMATS,
)
from .plan import launchers
from .snapshots import Snapshots
from .tickets import Tickets

_Stack = TypeVar("_Stack", bound="StackArrays")


class StackArrays:
    """What a :class:`LayerStack` owns or borrows, where its arguments are described: states,
    scales, rings, cursors and the seed."""

    _folds: Folds | None = None  # of checked mode, once it was used
    _tickets: Tickets | None = None  # of kernels

    def __init__(
        self,
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
        device: str = "auto",
    ) -> None:
        state_format = format_name(state_dtype, "state_dtype")
        activation = dtype_name(activation_dtype, "activation_dtype")
        sizes = {
            "num_layers": num_layers,
            "num_slots": num_slots,
            "nheads": nheads,
            "head_dim": head_dim,
            "ngroups": ngroups,
            "dstate": dstate,
            "max_window": max_window,
            "npredicted": npredicted,
        }
        for name, size in sizes.items():
            check_int(name, size)
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        check_value("head_dim", head_dim, HEAD_DIMS)
        check_value("dstate", dstate, DSTATES)
        if max_window > MAX_WINDOW:
            raise ValueError(f"max_window: expected 1 to {MAX_WINDOW}, got {max_window}")
        if npredicted > max_window:
            raise ValueError(
                f"npredicted: expected 1 to max_window = {max_window}, got {npredicted}"
            )
        if nheads % ngroups:
            raise ValueError(f"ngroups: expected a divisor of nheads = {nheads}, got {ngroups}")
        where = named_device(device)
        _check_activation("activation_dtype", activation, where)
        rows = max_window + npredicted

        def empty(shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
            make = "zeros" if zero else "empty"
            if where.kind == "cpu":
                return getattr(np, make)(shape, numpy_dtype(dtype))
            # CuPy makes no array of 8-bit floats, but views one.
            bytewise = np.dtype(np.uint8) if itemsize(dtype) == 1 else numpy_dtype(dtype)
            with device_guard(where):
                array = getattr(compiler.import_cupy(), make)(shape, bytewise)
            return array.view(numpy_dtype(dtype))

        state = (num_slots, nheads, head_dim, dstate)
        layers = range(num_layers)
        state_type, copy_type = arrays_of(state_format)
        scales = [empty(state[:3], "float32") for _ in layers if state_format in SCALED_FORMATS]
        copies: list[Any] = []
        if copy_type is not None:
            inner = copy_shape(state_format, head_dim, dstate)
            copies = [empty((*state[:2], *inner), copy_type, zero=True) for _ in layers]
        with device_guard(where):
            for scale in scales:
                scale[...] = 1
        self._round(
            stochastic_rounding, philox_rounds, state_type, where, lambda: empty((1,), "int64")
        )
        self._own(
            [empty(state, state_type, zero=True) for _ in layers],
            [empty((num_slots, nheads, rows, head_dim), activation) for _ in layers],
            [empty((num_slots, ngroups, rows, dstate), activation) for _ in layers],
            [empty((num_slots, nheads, rows), "float32") for _ in layers],
            empty((num_slots,), "int32", zero=True),
            empty((num_slots,), "int32", zero=True),
            npredicted,
            max_window,
            scales,
            copies,
        )

    @classmethod
    def from_arrays(
        cls: type[_Stack],
        states: Sequence[Any],
        x_caches: Sequence[Any],
        B_caches: Sequence[Any],
        dt_caches: Sequence[Any],
        ring_start: Any,
        prev_num_accepted_tokens: Any,
        *,
        npredicted: int,
        max_window: int | None = None,
        state_scales: Sequence[Any] = (),
        state_copies: Sequence[Any] = (),
        stochastic_rounding: bool | int = False,
        philox_rounds: int = 10,
    ) -> _Stack:
        """A stack over arrays that exist, one of each kind per layer: borrowed, changed in place.

        Parameters
        ----------
        states : each (num_slots, nheads, head_dim, dstate).
        x_caches, B_caches, dt_caches : the rings, with shapes as in ``checkpointing_ssu``.
        ring_start, prev_num_accepted_tokens : (num_slots,) int32, shared by all layers.
        npredicted : the most new tokens of a step.
        max_window : W; ring_buffer_len - npredicted if None.
        state_scales : beside 8-bit states and copies, each (num_slots, nheads, head_dim) float32.
        state_copies : beside float16 states, the copies that outputs are read from, as
            ``state_copy`` of ``checkpointing_ssu``.
        stochastic_rounding, philox_rounds : as in the constructor; the seed is the stack's own.

        Torch, CuPy and NumPy arrays will do; slots may be strided (pages), rows are packed. The
        stack keeps the arrays alive and writes into them: never into a copy. JAX arrays are
        immutable and refused.

        Raises TypeError or ValueError naming the argument.
        """
        stack = cls.__new__(cls)
        lists = {
            "states": states,
            "x_caches": x_caches,
            "B_caches": B_caches,
            "dt_caches": dt_caches,
        }
        for name, optional in (("state_scales", state_scales), ("state_copies", state_copies)):
            if optional:
                lists[name] = optional
        for name, arrays in lists.items():
            if not isinstance(arrays, Sequence):
                got = type(arrays).__name__
                raise TypeError(f"{name}: expected a list of arrays, one per layer, got {got}")
            if len(arrays) != len(states) or not arrays:
                raise ValueError(
                    f"{name}: expected one array per layer ({len(states) or 'at least one'}), "
                    f"got {len(arrays)}"
                )
        check_int("npredicted", npredicted)
        if not 1 <= npredicted <= MAX_TOKENS:
            raise ValueError(f"npredicted: expected 1 to {MAX_TOKENS}, got {npredicted}")
        if max_window is not None:
            check_int("max_window", max_window)
        first = view(states[0], "states[0]")
        stack._round(
            stochastic_rounding,
            philox_rounds,
            first.dtype,
            first.device,
            lambda: empty_like_framework(first, (1,), "int64", first.device),
        )
        stack._own(
            list(states),
            list(x_caches),
            list(B_caches),
            list(dt_caches),
            ring_start,
            prev_num_accepted_tokens,
            npredicted,
            max_window,
            list(state_scales),
            list(state_copies),
        )
        return stack

    def _round(
        self,
        stochastic: bool | int,
        rounds: int,
        state_dtype: str,
        device: Device,
        make_seed: Callable[[], Any],
    ) -> None:
        """Takes note of how states are rounded, and makes the seed."""
        self.philox_rounds = check_rounds(rounds)
        self.rand_seed = None
        seed = first_seed(stochastic, state_dtype)
        if seed is None:
            return
        with device_guard(device):
            self.rand_seed = make_seed()
            self.rand_seed[...] = seed

    def _own(
        self,
        states: list[Any],
        x_caches: list[Any],
        B_caches: list[Any],
        dt_caches: list[Any],
        ring_start: Any,
        prev_num_accepted_tokens: Any,
        npredicted: int,
        max_window: int | None,
        state_scales: list[Any],
        state_copies: list[Any],
    ) -> None:
        self.state_scales, self.state_copies = state_scales, state_copies
        self.states, self.x_caches = states, x_caches
        self.B_caches, self.dt_caches = B_caches, dt_caches
        self.ring_start, self.prev_num_accepted_tokens = ring_start, prev_num_accepted_tokens
        cursors = {
            "ring_start": view(ring_start, "ring_start"),
            "prev_num_accepted_tokens": view(prev_num_accepted_tokens, "prev_num_accepted_tokens"),
        }
        self._views: list[dict[str, View | None]] = [
            {
                "state": view(states[layer], f"states[{layer}]"),
                "state_copy": view(state_copies[layer], f"state_copies[{layer}]")
                if state_copies
                else None,
                "state_scale": view(state_scales[layer], f"state_scales[{layer}]")
                if state_scales
                else None,
                "x_cache": view(x_caches[layer], f"x_caches[{layer}]"),
                "B_cache": view(B_caches[layer], f"B_caches[{layer}]"),
                "dt_cache": view(dt_caches[layer], f"dt_caches[{layer}]"),
                **cursors,
            }
            for layer in range(len(states))
        ]
        first = self._first
        for layer in self._views:
            check_layer(layer, first)
        rings = first["x_cache"]
        self.npredicted, self.ring_buffer_len = npredicted, rings.shape[2]
        self.max_window = check_window(rings.name, rings.shape[2], npredicted, max_window)
        self._last_query_len: int | None = npredicted
        self._calls = SeenCalls()
        self._A: list[Any] | None = None
        self._snapshots: Snapshots | None = None
        layers = len(states)
        if self._folds is not None and not self._folds.fits(first["state"], layers):
            self._folds = None  # else kept: a captured graph may write there
        if self._tickets is None or not self._tickets.fits(first["state"], layers):  # else likewise
            kernels = self.device.kind in launchers
            self._tickets = Tickets(first["state"], layers) if kernels else None

    @property
    def rand_seed(self) -> Any:
        """(1,) int64 where states are rounded stochastically, None where to nearest."""
        return self._rand_seed

    @rand_seed.setter
    def rand_seed(self, seed: Any) -> None:
        self._rand_seed = seed
        self._calls = SeenCalls()  # those seen before point to the other one

    @property
    def _first(self) -> dict[str, View]:
        return {name: array for name, array in self._views[0].items() if array is not None}

    @property
    def num_layers(self) -> int:
        return len(self.states)

    @property
    def num_slots(self) -> int:
        return self._first["state"].shape[0]

    @property
    def device(self) -> Device:
        return self._first["state"].device

    @property
    def state_dtype(self) -> str:
        """The format of the states: a dtype, or "float16+fp8", "float16+nvfp4"."""
        return format_of(self._first["state"], self._first.get("state_copy"))

    @property
    def activation_dtype(self) -> str:
        return self._first["x_cache"].dtype

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence in all layers: state and rings, without padding between slots."""
        arrays = (layer.get(name) for layer in self._views for name in _PER_SLOT)
        return sum(
            math.prod(array.shape[1:]) * itemsize(array.dtype)
            for array in arrays
            if array is not None
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and the cursors, without padding between slots."""
        return self.num_slots * (self.bytes_per_slot + 2 * itemsize("int32"))

    def _layer(self, layer: int) -> int:
        check_int("layer", layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")
        return layer

    def __repr__(self) -> str:
        state, B = self._first["state"], self._first["B_cache"]
        slots, nheads, head_dim, dstate = state.shape
        return (
            f"LayerStack({self.num_layers} layers, {slots} slots, nheads={nheads}, "
            f"head_dim={head_dim}, ngroups={B.shape[1]}, dstate={dstate}, "
            f"max_window={self.max_window}, npredicted={self.npredicted}, "
            f"state {self.state_dtype}, activations {B.dtype}, "
            f"{state.framework} on {state.device}, "
            f"{self.bytes_per_slot / 2**20:.2f} MiB per slot, {self.nbytes / 2**20:.1f} MiB)"
        )


_PER_SLOT = ("state", "state_copy", "state_scale", "x_cache", "B_cache", "dt_cache")


def check_layer(layer: dict[str, View | None], first: dict[str, View]) -> None:
    """Checks the arrays of one layer against each other and against the first layer's."""
    v = {name: array for name, array in layer.items() if array is not None}
    state, x_cache = v["state"], v["x_cache"]
    _check_activation(x_cache.name, x_cache.dtype, x_cache.device)
    check_dtype(v["B_cache"], (x_cache.dtype,), f" as {x_cache.name}")
    check_dtype(v["dt_cache"], ("float32",))
    check_dtype(v["ring_start"], ("int32",))
    check_dtype(v["prev_num_accepted_tokens"], ("int32",))
    letters = Letters()
    check_state(state, layer["state_copy"], layer["state_scale"], letters)
    letters.bind(x_cache, ("num_slots", "nheads", "ring_buffer_len", "head_dim"))
    letters.bind(v["B_cache"], ("num_slots", "ngroups", "ring_buffer_len", "dstate"))
    letters.bind(v["dt_cache"], ("num_slots", "nheads", "ring_buffer_len"))
    letters.bind(v["ring_start"], ("num_slots",))
    letters.bind(v["prev_num_accepted_tokens"], ("num_slots",))
    check_value(state.name, letters["head_dim"], HEAD_DIMS, "head_dim")
    check_value(state.name, letters["dstate"], DSTATES, "dstate")
    nheads, ngroups = letters["nheads"], letters["ngroups"]
    if ngroups == 0 or nheads % ngroups:
        raise ValueError(
            f"{v['B_cache'].name}: expected ngroups that divides nheads = {nheads}, got {ngroups}"
        )
    check_devices(list(v.values()))
    check_inplace(*v.values())
    for name in v.keys() & set(_PER_SLOT):
        check_dtype(v[name], (first[name].dtype,), f" as {first[name].name}")
        if v[name].shape != first[name].shape:
            raise ValueError(
                f"{v[name].name}: expected {first[name].shape} as {first[name].name}, "
                f"got {v[name].shape}"
            )
    check_layout(layer, replay=True)


def _check_activation(name: str, dtype: str, device: Device) -> None:
    allowed = ACTIVATION_DTYPES if device.kind in launchers else PLAIN_ACTIVATION_DTYPES
    if dtype not in allowed:
        raise TypeError(
            f"{name}: expected one of {', '.join(allowed)} on {device.kind}, got {dtype}"
        )
