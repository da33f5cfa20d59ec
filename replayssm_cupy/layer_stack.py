"""``LayerStack``: the arrays of a model's Mamba-2 layers, and the loop that decodes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import slot_files
from . import slots as slot_ops
from .arrays import (
    View,
    device_guard,
    empty_like_framework,
    from_numpy,
    view,
)
from .bound_layer import BoundLayer
from .calls import BoundCall, Seen
from .checked import check_mode, everywhere
from .checks import (
    check_optional_int,
    index_range,
    optional_view,
    pad_output_is_zero,
    untie,
)
from .decode import bind, decode, wait_for_jax
from .decode_checks import Options
from .errors import ReplaySSMError
from .folds import Folds
from .prefix_plan import check_block_size
from .scratch import SCRATCH, check_algorithm
from .snapshots import Snapshots
from .stack_arrays import StackArrays


class LayerStack(StackArrays):
    """States, rings and cursors of the layers of one model; all layers share one pair of cursors.

    Parameters
    ----------
    num_layers, num_slots : layers of the model; sequences that may be in flight.
    nheads, head_dim, ngroups, dstate : of every layer; head_dim 64, 80, 96 or 128, dstate 64, 128
        or 256, nheads a multiple of ngroups.
    max_window : W, the most tokens that a ring keeps before it is folded into the state; 1 to 16.
    npredicted : the most new tokens of a step, 1 to max_window.
    state_dtype : "float32", "bfloat16", "float16", or 8-bit codes with a float32 scale for each
        row: "int8", "float8_e4m3fn". "float16+fp8" and "float16+nvfp4" keep a float16 state that
        is touched on flush only, and a copy of 8 or 4 bits, made anew then, that steps read.
    activation_dtype : of x, B, C and the rings: "bfloat16" or "float16" ("float32" on the CPU).
    stochastic_rounding : round states (not float32) stochastically when they are written; an int
        is the first seed. The stack keeps the seed on the device and :meth:`advance` bumps it, so
        that every step, in a CUDA graph too, rounds with its own bits, each layer with others.
    philox_rounds : of the random bits, 1 to 10.
    device : "cpu" (NumPy arrays), "cuda" or "cuda:1" (CuPy arrays), or "auto": the GPU if there
        is one.

    States start as zeros and cursors as 0; the rings are left uninitialised, their rows are dead.
    Use :meth:`from_arrays` to work on arrays that exist already, of PyTorch for instance.

    The loop of a serving engine::

        for layer in range(num_layers):
            y = stack.step(layer, x, dt, A, B, C, D=D, z=z, dt_bias=bias, slots=slots)
        stack.advance(slots, num_accepted)

    Raises TypeError or ValueError naming the argument; ReplaySSMError without a GPU for "cuda".
    """

    def step(
        self,
        layer: int,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any = None,
        z: Any = None,
        dt_bias: Any = None,
        *,
        dt_softplus: bool = True,
        slots: Any = None,
        pad_slot_id: int = -1,
        out: Any = None,
        cu_seqlens: Any = None,
        max_seqlen: int | None = None,
        force_flush: Any = None,
        pad_output: str = "zero",
        check: bool | str = False,
        enable_pdl: bool = False,
        cb_scaled: Any = None,
        cumAdt_vec: Any = None,
        cb_old: Any = None,
        algorithm: str = "auto",
    ) -> Any:
        """One decode step of one layer; arguments as in :func:`checkpointing_ssu`.

        A call may bring 1 to `npredicted` tokens per sequence, the same number in every layer.
        `dt_softplus` is on, as Mamba-2 has it. Appends to the layer's rings, rewrites its states
        on flush, returns out in the caller's framework. Cursors stay until :meth:`advance`.

        Repeating a step before :meth:`advance` changes nothing, unless it flushes: then the live
        rows are folded twice. `check` sees that beside what it sees in :func:`checkpointing_ssu`,
        for cursors that move through the stack's own calls.
        """
        key = (
            layer, pad_slot_id, max_seqlen, type(layer), type(pad_slot_id), type(max_seqlen),
            dt_softplus, pad_output, enable_pdl, algorithm, D is None, z is None, dt_bias is None,
            slots is None, cu_seqlens is None, force_flush is None, cb_scaled is None,
            cumAdt_vec is None, cb_old is None, out is None,
        )  # fmt: skip
        given = (
            x, dt, A, B, C, D, z, dt_bias, slots, cu_seqlens, force_flush, cb_scaled, cumAdt_vec,
            cb_old, out,
        )  # fmt: skip
        if check is False and not everywhere():
            repeated = self._calls.repeat(key, given, x)
            if repeated is not None:
                call, out = repeated
                self._last_query_len = call.query_len
                return out
        arrays = dict(zip(_STEP_ARRAYS, given, strict=False))
        options = self._options(
            layer, dt_softplus, pad_slot_id, pad_output, max_seqlen, check, enable_pdl, algorithm
        )
        return self._first_step(
            arrays, out, options, Seen(self._calls, key, x, arrays | {"out": out})
        )

    def bind(
        self,
        layer: int,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any = None,
        z: Any = None,
        dt_bias: Any = None,
        *,
        dt_softplus: bool = True,
        slots: Any = None,
        pad_slot_id: int = -1,
        out: Any = None,
        cu_seqlens: Any = None,
        max_seqlen: int | None = None,
        force_flush: Any = None,
        pad_output: str = "zero",
        check: bool | str = False,
        enable_pdl: bool = False,
        cb_scaled: Any = None,
        cumAdt_vec: Any = None,
        cb_old: Any = None,
        algorithm: str = "auto",
    ) -> BoundCall:
        """The step of :meth:`step` on these arrays, as a call without arguments.

        Everything is checked (and, on a GPU, compiled) here, once; nothing is launched. Each call
        of the result does the step on what the arrays hold by then, on the caller's current
        stream, and returns `out`, which is allocated here if None. Write new tokens, slots and
        lengths into the same arrays. Their memory must stay where it is: a tensor that is resized
        or moved needs a new bind. Works on the CPU path too, and inside CUDA-graph captures.

        Raises as :meth:`step`; ValueError if `out` is None beside a JAX x.
        """
        arrays = {
            **{"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias},
            **{"slots": slots, "cu_seqlens": cu_seqlens, "force_flush": force_flush},
            **{"cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec, "cb_old": cb_old},
        }
        options = self._options(
            layer, dt_softplus, pad_slot_id, pad_output, max_seqlen, check, enable_pdl, algorithm
        )
        views, q = self._step_views(arrays, options)

        def step(out: Any) -> Any:
            return self.step(
                layer, **arrays, out=out, dt_softplus=dt_softplus, pad_slot_id=pad_slot_id,
                pad_output=pad_output, max_seqlen=max_seqlen, check=check, enable_pdl=enable_pdl,
                algorithm=algorithm,
            )  # fmt: skip

        def after() -> None:
            self._last_query_len = q

        return bind(views, out, options, step, after)

    def bind_layer(
        self,
        layer: int,
        A: Any,
        D: Any = None,
        dt_bias: Any = None,
        *,
        dt_softplus: bool = True,
        slots: Any = None,
        pad_slot_id: int = -1,
        cu_seqlens: Any = None,
        max_seqlen: int | None = None,
        force_flush: Any = None,
        pad_output: str = "zero",
        check: bool | str = False,
        enable_pdl: bool = False,
        cb_scaled: Any = None,
        cumAdt_vec: Any = None,
        cb_old: Any = None,
        algorithm: str = "auto",
    ) -> BoundLayer:
        """A layer with its weights, slots and options, for ``step(x, dt, B, C, z, out)``.

        That is :meth:`step` for less host time. The arrays given here are held and may be written
        in place; their memory must stay where it is, as for :meth:`bind`. Nothing is launched.

        Raises as :meth:`step`; what depends on the tokens is checked when they come.
        """
        fixed = {
            **{"A": A, "D": D, "dt_bias": dt_bias, "slots": slots, "cu_seqlens": cu_seqlens},
            **{"force_flush": force_flush, "cb_scaled": cb_scaled, "cumAdt_vec": cumAdt_vec},
            "cb_old": cb_old,
        }
        for name, array in fixed.items():
            view(array, name) if name in _REQUIRED else optional_view(array, name)

        def options() -> Options:
            return self._options(
                layer, dt_softplus, pad_slot_id, pad_output, max_seqlen, check, enable_pdl,
                algorithm,
            )  # fmt: skip

        def first_step(tokens: dict[str, Any], out: Any, seen: Seen) -> Any:
            given = fixed | tokens
            arrays = {name: given[name] for name in _STEP_ARRAYS}
            return self._first_step(arrays, out, options(), seen)

        options()  # which checks them
        return BoundLayer(self, first_step, bool(check))

    def _first_step(self, arrays: dict[str, Any], out: Any, options: Options, seen: Seen) -> Any:
        """A step that was not seen before, or is to be checked again."""
        views, q = self._step_views(arrays, options)
        folds = self._folds_of(options.layer) if options.check else None
        y = decode(views, out, options, seen._replace(query_len=q), folds)
        self._last_query_len = q
        return y

    def _options(
        self,
        layer: int,
        dt_softplus: bool,
        pad_slot_id: int,
        pad_output: str,
        max_seqlen: int | None,
        check: bool | str,
        enable_pdl: bool,
        algorithm: str,
    ) -> Options:
        return Options(
            bool(dt_softplus),
            index_range("pad_slot_id", pad_slot_id),
            pad_output_is_zero(pad_output),
            self.max_window,
            max_seqlen,
            self.philox_rounds,
            self._layer(layer),
            check_mode(check),
            bool(enable_pdl),
            check_algorithm(algorithm),
        )

    def _step_views(
        self, arrays: dict[str, Any], options: Options
    ) -> tuple[dict[str, View | None], int | None]:
        """Views of a step's arrays, and its length if all sequences have the same."""
        views: dict[str, View | None] = dict(self._views[options.layer])
        for name, array in arrays.items():
            views[name] = view(array, name) if name in _REQUIRED else optional_view(array, name)
        views["rand_seed"] = optional_view(self.rand_seed, "rand_seed")
        if self._tickets is not None:
            views["tickets"] = self._tickets.of_layer(options.layer)
        tokens = views["x"]
        assert tokens is not None
        q = tokens.shape[1] if len(tokens.shape) == 4 else 1
        if views["cu_seqlens"] is not None:
            q = check_optional_int("max_seqlen", options.max_seqlen) or 0
        if q > self.npredicted:
            raise ValueError(f"x: expected at most npredicted = {self.npredicted} tokens, got {q}")
        return views, q if views["cu_seqlens"] is None else None

    def _folds_of(self, layer: int) -> View:
        """Where checked mode stamps the folds of a layer, from its first step on."""
        if self._folds is None:
            self._folds = Folds(self._first["state"], self.num_layers)
        return self._folds.of_layer(layer)

    def _forget_folds(self, slots: Any, pad_slot_id: int = -1) -> None:
        """After the calls that may bring a slot's cursors back to a fold's. What else moves them
        leaves them at 0, where there is nothing to fold, or further on."""
        if self._folds is not None:
            indices = optional_view(slots, "slots")
            stream = self._folds.forget(indices, pad_slot_id)
            wait_for_jax([indices], self.device, stream)

    def advance(
        self,
        slots: Any,
        num_accepted: Any,
        query_lens: Any = None,
        *,
        reset: Any = None,
        force_flush: Any = None,
        pad_slot_id: int = -1,
    ) -> None:
        """Moves the cursors of `slots` after a step of all layers; see :func:`advance_ring`.

        `num_accepted` (batch,) counts the sampled token too, 0 to the step's length. `query_lens`
        is the step's length: an int, (batch,) integers, or None for the latest step's, which had
        one. `force_flush` is the step's own. With stochastic rounding the seed moves on.
        """
        lengths = self._last_query_len if query_lens is None else query_lens
        if lengths is None:
            raise ValueError(
                "query_lens: expected lengths (batch,) after a step of variable length, got None"
            )
        length, each = (lengths, None) if isinstance(lengths, int) else (None, lengths)
        key = (
            "advance", pad_slot_id, type(pad_slot_id), length, type(length), slots is None,
            reset is None, force_flush is None,
        )  # fmt: skip
        given = (num_accepted, each, slots, reset, force_flush)
        if self._calls.repeat(key, given, num_accepted) is not None:
            if self._folds is not None:
                self._forget_folds(slots, pad_slot_id)
            return
        arrays = dict(zip(slot_ops.ADVANCE_ARRAYS, given, strict=True))
        own = {name: self._views[0][name] for name in ("ring_start", "prev_num_accepted_tokens")}
        slot_ops.advance_views(
            own | {"rand_seed": optional_view(self.rand_seed, "rand_seed")},
            lengths,
            arrays,
            self.max_window,
            self.ring_buffer_len,
            pad_slot_id,
            Seen(self._calls, key, num_accepted, arrays),
        )
        self._forget_folds(slots, pad_slot_id)

    def flush_slots(self, A: Sequence[Any], slots: Any = None, pad_slot_id: int = -1) -> None:
        """Folds whatever is live in `slots` (None: all) into the states of all layers.

        `A` holds the layers' A, as in :meth:`step`. Afterwards the rings of these slots are empty
        and their states are current, ready to be copied or read.
        """
        if not isinstance(A, Sequence) or len(A) != self.num_layers:
            got = len(A) if isinstance(A, Sequence) else type(A).__name__
            raise ValueError(f"A: expected a list of {self.num_layers} arrays, got {got}")
        indices, like = optional_view(slots, "slots"), self._first["state"]
        batch = self.num_slots if indices is None else indices.shape[0]
        _, nheads, _, head_dim = self._first["x_cache"].shape
        _, ngroups, _, dstate = self._first["B_cache"].shape

        def full(shape: tuple[int, ...], dtype: str, value: int) -> Any:
            with device_guard(like.device):
                array = empty_like_framework(like, shape, dtype, like.device)
                if 0 not in shape:
                    array[...] = value
            return array

        activation = self.activation_dtype
        x = full((1, 0, nheads, head_dim), activation, 0)
        B = full((1, 0, ngroups, dstate), activation, 0)
        dt = full((1, 0, nheads), "float32", 0)
        lengths, everything = full((batch + 1,), "int32", 0), full((batch,), "uint8", 1)
        latest = self._last_query_len
        for layer in range(self.num_layers):
            self.step(
                layer, x, dt, A[layer], B, B, slots=slots, pad_slot_id=pad_slot_id,
                cu_seqlens=lengths, max_seqlen=1, force_flush=everything,
            )  # fmt: skip
        nothing = full((batch,), "int32", 0)
        self.advance(slots, nothing, 0, force_flush=everything, pad_slot_id=pad_slot_id)
        self._last_query_len = latest

    def reset(self, slots: Any = None, pad_slot_id: int = -1) -> None:
        """Empties `slots` (None: all) for new requests: zero states in all layers, cursors 0."""
        slot_ops.reset_slots(
            self.ring_start,
            self.prev_num_accepted_tokens,
            slots,
            self.states,
            pad_slot_id,
            state_scales=self.state_scales,
            state_copies=self.state_copies,
        )

    def load_state(self, layer: int, slots: Any, state: Any, pad_slot_id: int = -1) -> None:
        """Hands a prefill's final states of one layer over to `slots`.

        `state` is (batch, nheads, head_dim, dstate) of any float type, rounded to the stack's. The
        cursors must be 0 (as after :meth:`reset`): rows that are live would be replayed on top.
        """
        views = self._views[self._layer(layer)]
        target, copy, scale = (views[name] for name in ("state", "state_copy", "state_scale"))
        assert target is not None
        given, indices = view(state, "state"), optional_view(slots, "slots")
        slot_ops.load_views(target, copy, scale, given, indices, pad_slot_id)

    def refresh(self, A: Sequence[Any] | None = None) -> None:
        """Reads the stack's arrays anew, builds its pointer tables and loads their kernels.

        `A` holds the layers' A, each (nheads,) or tied as in :meth:`step`: what snapshots fold
        with. They are kept; None keeps those of an earlier call. Call it once before a CUDA-graph
        capture, and again whenever an element of `states`, `x_caches` and so on was replaced or
        reallocated. The tables keep the arrays alive. The host waits for a small copy.

        Raises TypeError or ValueError naming the array.
        """
        if A is not None and (not isinstance(A, Sequence) or len(A) != self.num_layers):
            got = len(A) if isinstance(A, Sequence) else type(A).__name__
            raise ValueError(f"A: expected a list of {self.num_layers} arrays, got {got}")
        given = list(A) if A is not None else self._A
        weights = None
        if given is not None:
            weights = [untie(view(a, f"A[{i}]"), 1, "head_dim, dstate")
                       for i, a in enumerate(given)]  # fmt: skip
        latest = self._last_query_len
        self._own(
            self.states, self.x_caches, self.B_caches, self.dt_caches, self.ring_start,
            self.prev_num_accepted_tokens, self.npredicted, self.max_window, self.state_scales,
            self.state_copies,
        )  # fmt: skip
        self._last_query_len, self._A = latest, given
        self._snapshots = Snapshots(
            self._views, weights, self.max_window, self.rand_seed, self.philox_rounds
        )
        self._snapshots.load_kernels()

    def materialize(
        self,
        src_slots: Any,
        dst_slots: Any,
        prefix_len: Any,
        *,
        pad_slot_id: int = -1,
        check: bool | str = False,
    ) -> None:
        """Writes the states of `src_slots` after `prefix_len` ring rows to `dst_slots`.

        All layers in one launch; sources and rings are only read. The cursors of the destinations
        become 0: they have nothing to replay. A destination that is its own source is folded in
        place and keeps its later rows. Needs the layers' A from :meth:`refresh`.

        Parameters
        ----------
        src_slots, dst_slots : (batch,) int32 or int64 for all layers, or (layers, batch); then the
            first layer's tell the cursors. Padding is left alone. Destinations are distinct, and
            no other row's source.
        prefix_len : (batch,) int32 or int64: tokens from the checkpoint on, at most the live rows,
            which bound it on a GPU; 0 copies, a negative one leaves the row out.
        check : True looks at all of this before anything is written, and waits for it.

        Raises TypeError or ValueError naming the argument; ReplaySSMError for what a check found.
        """
        self._whole_slots(check).materialize(
            src_slots, dst_slots, {"prefix_len": prefix_len}, 1, pad_slot_id, check
        )

    def materialize_blocks(
        self,
        src_slots: Any,
        dst_slots: Any,
        committed_lens: Any,
        num_accepted: Any,
        *,
        block_size: int | None = None,
        boundaries: Any = None,
        pad_slot_id: int = -1,
        check: bool | str = False,
    ) -> None:
        """Snapshots of the rows that crossed a block boundary in the step just advanced over.

        :func:`plan_materialize`, whose arguments these are, and :meth:`materialize` in two
        launches, for every step inside a CUDA graph: the device decides, the host never waits.
        """
        check_block_size(block_size, boundaries)
        given = {"committed_lens": committed_lens, "num_accepted": num_accepted,
                 "boundaries": boundaries}  # fmt: skip
        self._whole_slots(check).materialize(
            src_slots, dst_slots, given, block_size or 1, pad_slot_id, check
        )

    def copy_slots(
        self, src_slots: Any, dst_slots: Any, *, pad_slot_id: int = -1, check: bool | str = False
    ) -> None:
        """Copies sequences: states, scales, live ring rows and cursors, all layers in one launch.

        `src_slots`, `dst_slots` (batch,) int32 or int64; a source may occur more than once,
        destinations are distinct and no sources. Rows with padding, or with one slot twice, are
        left alone. `check` looks at the slots first; on the host that is always done.
        """
        self._whole_slots(check).copy(src_slots, dst_slots, False, pad_slot_id, check)
        self._forget_folds(dst_slots, pad_slot_id)

    def fork(
        self, src_slots: Any, dst_slots: Any, *, pad_slot_id: int = -1, check: bool | str = False
    ) -> None:
        """:meth:`copy_slots` for beams: source b goes to every slot of `dst_slots[b]`.

        `src_slots` (batch,), `dst_slots` (batch, copies); negative ones are left out.
        """
        self._whole_slots(check).copy(src_slots, dst_slots, True, pad_slot_id, check)
        self._forget_folds(dst_slots, pad_slot_id)

    def export_slots(self, slots: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Sequences as plain arrays on the host, tokens that wait in their rings included.

        `slots` is a list of ints or (batch,) integers. Returns "header" (JSON as uint8: version,
        sizes, formats, live rows, checksums), "header_crc32" and "slots" (batch, bytes) uint8,
        ready for `numpy.savez`. Waits for the device.
        """
        return slot_files.export_slots(self._whole_slots(), slots)

    def import_slots(self, image: Mapping[str, np.ndarray[Any, Any]], slots: Any) -> None:
        """Takes the sequences of :meth:`export_slots`, of this stack or another, into `slots`.

        `image` may be what `numpy.load` returns. The stack must have the same layers, sizes,
        formats and max_window; ring_buffer_len may differ. Waits for the device.

        Raises TypeError, ValueError or ReplaySSMError, before anything is written, where version,
        sizes, formats or byte counts differ or a checksum does not fit.
        """
        chosen = slot_files.import_slots(self._whole_slots(), image, slots)
        if self._folds is not None:
            self._forget_folds(from_numpy(np.array(chosen, np.int64), self._first["state"]))

    def _whole_slots(self, check: bool | str = False) -> Snapshots:
        """The tables, built at the first use; checked mode sees whether they are still true."""
        if self._snapshots is None:
            self.refresh()
        elif check_mode(check):
            self._check_unmoved()
        assert self._snapshots is not None
        return self._snapshots

    def _check_unmoved(self) -> None:
        lists = {"state": self.states, "state_copy": self.state_copies,
                 "state_scale": self.state_scales, "x_cache": self.x_caches,
                 "B_cache": self.B_caches, "dt_cache": self.dt_caches}  # fmt: skip
        for layer, views in enumerate(self._views):
            for name, arrays in lists.items():
                known = views[name]
                if known is None:
                    continue
                now = view(arrays[layer], known.name)
                if (now.ptr, now.shape, now.strides) != (known.ptr, known.shape, known.strides):
                    raise ReplaySSMError(
                        f"{known.name}: expected the array of the pointer tables at "
                        f"{known.ptr:#x}, got one at {now.ptr:#x}: call refresh()"
                    )
        for layer, A in enumerate(self._A or ()):
            assert self._snapshots is not None
            address, then = view(A, f"A[{layer}]").ptr, self._snapshots.weight_address(layer)
            if address != then:
                raise ReplaySSMError(
                    f"A[{layer}]: expected the array of the pointer tables at {then:#x}, got one "
                    f"at {address:#x}: call refresh()"
                )

    def warm_up(self, algorithm: str = "auto") -> None:
        """Compiles and loads every kernel of the decode loop; nothing to do on the CPU.

        Steps that come later are faster than without it, as their kernels know the stack's sizes.
        `algorithm` is that of the steps. :meth:`refresh` does so for snapshots and copies.
        """
        check_algorithm(algorithm)
        if self.device.kind == "cuda":
            _, nheads, head_dim, dstate = self._first["state"].shape
            _, ngroups, ring_buffer_len, _ = self._first["B_cache"].shape
            slot_ops.warm_up(
                dstate=dstate,
                state_dtype=self.state_dtype,
                activation_dtype=self.activation_dtype,
                npredicted=self.npredicted,
                device=self.device.index,
                algorithm=algorithm,
                nheads=nheads,
                ngroups=ngroups,
                head_dim=head_dim,
                max_window=self.max_window,
                ring_buffer_len=ring_buffer_len,
            )


_REQUIRED = ("x", "dt", "A", "B", "C")
_STEP_ARRAYS = (
    *_REQUIRED, "D", "z", "dt_bias", "slots", "cu_seqlens", "force_flush", *SCRATCH
)  # fmt: skip
