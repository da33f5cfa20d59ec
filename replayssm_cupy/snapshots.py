"""What a LayerStack does with whole slots: prefix snapshots, copies, images of them.

All layers share the slots' cursors, which move along with what they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compiler
from .arrays import View, as_numpy, current_stream, device_guard, from_numpy, itemsize, view
from .calls import Seen, SeenCalls
from .checked import check_mode, everywhere
from .checks import Letters, check_alignment, check_devices, check_dtype, index_range
from .decode import wait_for_jax
from .decode_checks import check_host_cursors
from .errors import ReplaySSMError
from .formats import copy_shape
from .keys import CopySlotsKey, Key, MaterializeKey, PlanMaterializeKey
from .plan import INDEX_TYPES, CopySlotsParams, Plan, launchers
from .prefix import check_formats, materialize_views
from .prefix_plan import plan_views
from .prefix_tables import Tables

THREADS = 256
MAX_GRID_Y = 65535
PARTS = 8  # blocks that share one array of one sequence
ARRAYS = ("state", "state_copy", "state_scale", "x_cache", "B_cache", "dt_cache")
RINGS = ("x_cache", "B_cache", "dt_cache")
SCRATCH = ("planned_ring_start", "replay_prefix_len", "active_request_indices")


class Snapshots:
    """Tables, scratch and launches for the slots of one stack.

    `layers` are the views of every layer, cursors among them; `A` the layers' A, where known;
    `seed` the stack's random seed, or None.
    """

    def __init__(
        self,
        layers: Sequence[dict[str, View | None]],
        A: Sequence[View] | None,
        max_window: int,
        seed: Any,
        philox_rounds: int,
    ) -> None:
        self.tables = Tables(layers, A, max_window)
        self.layout = self.tables.layout
        self.has_weights = A is not None
        state, start, prev = (
            layers[0][name] for name in ("state", "ring_start", "prev_num_accepted_tokens")
        )
        assert state is not None and start is not None and prev is not None
        self._state, self._start, self._prev = state, start, prev
        self._seed, self._rounds = seed, philox_rounds if seed is not None else 0
        self._scratch: dict[str, View] = {}
        self._calls = SeenCalls()
        self._reserve(state.shape[0])

    def _reserve(self, batch: int) -> None:
        """Room for the plans of `batch` rows, kept so that captured launches find it again."""
        if self._scratch and self._scratch[SCRATCH[0]].shape[0] >= batch:
            return
        self._calls = SeenCalls()  # those before point to the room there was
        size = max(batch, 1)
        arrays = from_numpy(np.zeros(3 * size, np.int32), self._state)
        room = view(arrays, "scratch")
        self._scratch = {
            name: room._replace(name=name, ptr=room.ptr + 4 * size * index, shape=(size,))
            for index, name in enumerate(SCRATCH)
        }

    def load_kernels(self) -> None:
        """Compiles and loads what the stack's GPU needs; nothing to do on the CPU."""
        if self._state.device.kind != "cuda":
            return
        keys: list[Key] = [CopySlotsKey()]
        if self.has_weights:
            c = self.layout
            keys.append(MaterializeKey(c.state_dtype, c.activation_dtype, c.dstate))
            keys.append(PlanMaterializeKey())
        with device_guard(self._state.device):
            compiler.load(keys, self._state.device.index)

    def weight_address(self, layer: int) -> int:
        """Where the tables say that A of a layer lies."""
        assert self.tables.A is not None
        return self.tables.A[layer].ptr

    # --- Prefix snapshots ------------------------------------------------------------------------

    def materialize(
        self,
        src_slots: Any,
        dst_slots: Any,
        given: dict[str, Any],
        block_size: int,
        pad_slot_id: int,
        check: bool | str,
    ) -> None:
        """A plan from `given` (prefix_len, or lengths and boundaries), then its states."""
        key = (
            (block_size, pad_slot_id, type(block_size), type(pad_slot_id)),
            tuple(name for name, array in given.items() if array is not None),
        )
        arrays = {"src_slots": src_slots, "dst_slots": dst_slots, **given}
        known = check is False and not everywhere()
        if known and self._calls.repeat(key, tuple(arrays.values()), src_slots) is not None:
            return
        if not self.has_weights:
            raise ValueError("A: expected the layers' A, bound once by refresh(A), got None")
        check_formats(self.layout, self._state.device)
        src = self._by_layer(view(src_slots, "src_slots"))
        dst = self._by_layer(view(dst_slots, "dst_slots"))
        batch = src.shape[1]
        self._reserve(batch)
        out = {
            name: array._replace(shape=(batch,), strides=(1,))
            for name, array in self._scratch.items()
        }
        planned: dict[str, View | None] = {
            "ring_start": self._start,
            "prev_num_accepted_tokens": self._prev,
            "src_slots": src._replace(shape=(batch,), strides=src.strides[1:]),
            "dst_slots": dst._replace(shape=dst.shape[1:], strides=dst.strides[1:]),
            **{name: None if array is None else view(array, name) for name, array in given.items()},
            **out,
        }
        sizes = block_size, self.layout.max_window, self.layout.ring_buffer_len, pad_slot_id
        # What is wrong shows before a cursor moves: at once on the host, in checked mode elsewhere.
        first_look = bool(check_mode(check)) or self._state.device.kind not in launchers
        plan = plan_views(planned, *sizes, move_cursors=not first_look)
        metadata: dict[str, View | None] = {
            "src_slots": src,
            "dst_slots": dst,
            "ring_start": out["planned_ring_start"],
            "replay_prefix_len": out["replay_prefix_len"],
            "active_request_indices": out["active_request_indices"],
            "rand_seed": None if self._seed is None else view(self._seed, "rand_seed"),
        }
        written = materialize_views(
            self.tables.views, metadata, self.layout, pad_slot_id, self._rounds, check_mode(check),
            self._prev,
        )  # fmt: skip
        if first_look:
            plan_views(planned, *sizes)
        elif plan is not None and written is not None:
            Seen(self._calls, key, src_slots, arrays).add(written, planned, before=[plan])

    def _by_layer(self, slots: View) -> View:
        """(batch,) for all layers, or (layers, batch), as the latter."""
        layers = len(self.tables.layers)
        check_dtype(slots, tuple(INDEX_TYPES))
        if len(slots.shape) == 1:
            return slots._replace(shape=(layers, *slots.shape), strides=(0, *slots.strides))
        if len(slots.shape) != 2 or slots.shape[0] != layers:
            raise ValueError(
                f"{slots.name}: expected (batch,) or (layers, batch) = ({layers}, batch), "
                f"got {slots.shape}"
            )
        return slots

    # --- Copies and images -----------------------------------------------------------------------

    def copy(
        self, src_slots: Any, dst_slots: Any, fork: bool, pad_slot_id: int, check: bool | str
    ) -> None:
        """Slots to slots; with `fork` each source to a row of destinations."""
        index_range("pad_slot_id", pad_slot_id)
        src, dst = view(src_slots, "src_slots"), view(dst_slots, "dst_slots")
        letters = Letters()
        for slots, shape in ((src, ("batch",)), (dst, ("batch", "copies") if fork else ("batch",))):
            check_dtype(slots, tuple(INDEX_TYPES))
            letters.bind(slots, shape)
        check_devices([self._state, src, dst])
        if not fork:
            dst = dst._replace(shape=(*dst.shape, 1), strides=(*dst.strides, 0))
        on_host = self._state.device.kind not in launchers
        if on_host or check_mode(check):
            self._check_pairs(src, dst, pad_slot_id, ValueError if on_host else ReplaySSMError)
        if on_host:
            for pair in self._pairs(src, dst, pad_slot_id):
                self._copy_on_host(*pair)
            return
        record = self._record()
        record.src_slots, record.src_slots_stride = src.ptr, src.strides[0]
        record.dst_slots = dst.ptr
        record.dst_slots_batch_stride, record.dst_slots_copy_stride = dst.strides
        record.src_slots_type = INDEX_TYPES[src.dtype]
        record.dst_slots_type = INDEX_TYPES[dst.dtype]
        record.pad_slot_id = pad_slot_id
        record.batch, record.copies = dst.shape
        for slots in (src, dst):
            check_alignment(slots)
        self._launch(record, src)

    def _pairs(self, src: View, dst: View, pad_slot_id: int) -> list[tuple[int, int]]:
        """Source and destination of every copy on the host, without padding and copies in place."""
        sources, rows = _host_list(src), _host_list(dst)
        pairs = [
            (int(source), int(target))
            for source, row in zip(sources, rows, strict=True)
            for target in (row if isinstance(row, list) else [row])
        ]
        live = [all(s != pad_slot_id and 0 <= s < self.layout.num_slots for s in p) for p in pairs]
        return [p for p, is_live in zip(pairs, live, strict=True) if is_live and p[0] != p[1]]

    def _check_pairs(self, src: View, dst: View, pad_slot_id: int, error: type[Exception]) -> None:
        pairs = self._pairs(src, dst, pad_slot_id)
        sources, seen = {source for source, _ in pairs}, set()
        for _, target in pairs:
            if target in seen:
                raise error(f"dst_slots: expected distinct slots, got slot {target} twice")
            if target in sources:
                raise error(f"dst_slots: expected no source among them, got slot {target}")
            seen.add(target)
        start, prev = (_host_list(array) for array in (self._start, self._prev))
        sizes = self.layout.max_window, self.layout.ring_buffer_len
        for source in sources:
            try:
                check_host_cursors(source, start[source], prev[source], *sizes)
            except ValueError as wrong:
                raise error(str(wrong)) from None

    def _copy_on_host(self, src: int, dst: int) -> None:
        start, prev = as_numpy(self._start), as_numpy(self._prev)
        rows = (int(start[src]) + np.arange(int(prev[src]))) % self.layout.ring_buffer_len
        for layer in self.tables.layers:
            for name in ARRAYS:
                if (array := layer[name]) is None:
                    continue
                memory = as_numpy(array)
                if name in RINGS:
                    memory[dst][:, rows] = memory[src][:, rows]
                else:
                    memory[dst] = memory[src]
        start[dst], prev[dst] = start[src], prev[src]

    def cursors(self) -> tuple[list[int], list[int]]:
        """Both cursors of every slot on the host, which waits for them."""
        return _host_list(self._start), _host_list(self._prev)

    @property
    def image(self) -> ImageLayout:
        """How the image of one sequence is laid out."""
        return ImageLayout(self.tables)

    def pack(self, slots: Sequence[int]) -> np.ndarray[Any, Any]:
        """Images of slots, (slots, bytes) uint8 on the host, dead rows as zeros."""
        images = np.zeros((len(slots), self.image.nbytes), np.uint8)
        if not slots:
            return images
        if self._state.device.kind not in launchers:
            start, prev = self.cursors()
            for image, slot in zip(images, slots, strict=True):
                rows = (start[slot] + np.arange(prev[slot])) % self.layout.ring_buffer_len
                for name, array, part in self._parts(image):
                    if name in RINGS:
                        part[:, : len(rows)] = array[slot][:, rows]
                    else:
                        part[...] = array[slot]
            return images
        buffer = from_numpy(images, self._state)
        live = from_numpy(np.zeros(len(slots), np.int32), self._state)
        chosen = view(from_numpy(np.array(slots, np.int64), self._state), "slots")
        record = self._image_record(buffer, live, len(slots))
        record.src_slots, record.src_slots_stride = chosen.ptr, 1
        record.src_slots_type = INDEX_TYPES[chosen.dtype]
        self._launch(record, chosen)
        return _to_host(buffer)

    def unpack(
        self, images: np.ndarray[Any, Any], live: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Images back into slots, whose cursors become 0 and `live`; a GPU's work is waited for."""
        if not slots:
            return
        if self._state.device.kind not in launchers:
            start, prev = as_numpy(self._start), as_numpy(self._prev)
            for image, rows, slot in zip(images, live, slots, strict=True):
                for name, array, part in self._parts(image):
                    if name in RINGS:
                        array[slot][:, :rows] = part[:, :rows]
                    else:
                        array[slot] = part
                start[slot], prev[slot] = 0, rows
            return
        buffer = from_numpy(images, self._state)
        count = from_numpy(np.array(live, np.int32), self._state)
        chosen = view(from_numpy(np.array(slots, np.int64), self._state), "slots")
        record = self._image_record(buffer, count, len(slots))
        record.dst_slots, record.dst_slots_batch_stride = chosen.ptr, 1
        record.dst_slots_type = INDEX_TYPES[chosen.dtype]
        self._launch(record, chosen)
        _to_host(count)  # the buffers live until the kernel has read them

    def _parts(
        self, image: np.ndarray[Any, Any]
    ) -> list[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Every array of the stack with its part of an image, viewed in its own format."""
        found, layout = [], self.image
        for layer, arrays in enumerate(self.tables.layers):
            for name, shape in layout.shapes.items():
                array = arrays[name]
                assert array is not None
                memory = as_numpy(array)
                first = layer * layout.layer_bytes + layout.offsets[name]
                size = math.prod(shape) * memory.itemsize
                part = image[first : first + size].view(memory.dtype).reshape(shape)
                found.append((name, memory, part))
        return found

    def _record(self) -> Any:
        """What every copy has in common."""
        record: Any = CopySlotsParams()
        c, views = self.layout, self.tables.views
        strides = {
            "state": (c.state_head_stride, 0),
            "state_copy": (c.state_copy_head_stride, 0),
            "state_scale": (c.state_scale_head_stride, 0),
            "x_cache": (c.x_cache_head_stride, c.x_cache_row_stride),
            "B_cache": (c.B_cache_group_stride, c.B_cache_row_stride),
            "dt_cache": (c.dt_cache_head_stride, c.dt_cache_row_stride),
        }
        first, image = self.tables.layers[0], self.image
        for index, name in enumerate(ARRAYS):
            record.ptrs[index] = views[f"{name}_ptrs"].ptr
            record.slot_strides[index] = views[f"{name}_slot_strides"].ptr
            if (array := first[name]) is None:
                continue
            item, shape = itemsize(array.dtype), image.shapes[name]
            inner = shape[2:] if name in RINGS else shape[1:]
            record.itemsizes[index], record.blocks[index] = item, shape[0]
            record.row_bytes[index] = math.prod(inner) * item
            record.is_ring[index] = int(name in RINGS)
            record.block_strides[index], record.row_strides[index] = (
                s * item for s in strides[name]
            )
            record.image_offsets[index] = image.offsets[name]
            record.wide[index] = int(self._is_wide(name, record, index))
            words = math.prod(shape) * item // 4
            if words >= 2**31:
                raise ValueError(
                    f"{array.name}: expected less than 2^31 words in a slot to copy, got {words}"
                )
        record.image_rows, record.image_layer_stride = c.max_window, image.layer_bytes
        record.ring_start, record.prev_num_accepted_tokens = self._start.ptr, self._prev.ptr
        record.ring_start_stride = self._start.strides[0]
        record.prev_num_accepted_tokens_stride = self._prev.strides[0]
        record.num_slots, record.layers, record.copies = c.num_slots, len(self.tables.layers), 1
        record.max_window, record.ring_buffer_len = c.max_window, c.ring_buffer_len
        record.pad_slot_id = -1
        return record

    def _is_wide(self, name: str, record: Any, index: int) -> bool:
        """Whether rows of an array lie at multiples of 16 bytes in every layer."""
        numbers = [record.row_bytes[index], record.block_strides[index], record.row_strides[index]]
        for layer in self.tables.layers:
            array = layer[name]
            assert array is not None
            slot = array.strides[0] * record.itemsizes[index] if array.shape[0] > 1 else 0
            numbers += [array.ptr, slot]
        return all(number % 16 == 0 for number in numbers)

    def _image_record(self, images: Any, live: Any, count: int) -> Any:
        record = self._record()
        buffer, rows = view(images, "images"), view(live, "live")
        check_alignment(buffer, 1)
        record.image, record.image_stride = buffer.ptr, self.image.nbytes
        record.image_live, record.batch = rows.ptr, count
        return record

    def _launch(self, record: Any, slots: View) -> None:
        grid = record.batch * record.copies, record.layers * len(ARRAYS), PARTS
        if 0 in grid:
            return
        if grid[1] > MAX_GRID_Y:
            most = MAX_GRID_Y // len(ARRAYS)
            raise ValueError(f"states: expected at most {most} layers to copy, got {record.layers}")
        stream = current_stream(slots)
        device = self._state.device
        Plan(CopySlotsKey(), grid, (THREADS, 1, 1), record, device).launch(stream)
        wait_for_jax([slots], device, stream)


class ImageLayout:
    """Where the arrays of a sequence lie in its image: layer after layer, each at 16 bytes."""

    def __init__(self, tables: Tables) -> None:
        c = tables.layout
        groups = c.nheads // c.heads_per_group
        shapes = {
            "state": (c.nheads, c.head_dim, c.dstate),
            "state_copy": (c.nheads, *copy_shape(c.state_dtype, c.head_dim, c.dstate)),
            "state_scale": (c.nheads, c.head_dim),
            "x_cache": (c.nheads, c.max_window, c.head_dim),
            "B_cache": (groups, c.max_window, c.dstate),
            "dt_cache": (c.nheads, c.max_window),
        }
        first = tables.layers[0]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.offsets: dict[str, int] = {}
        place = 0
        for name, shape in shapes.items():
            if (array := first[name]) is None:
                continue
            self.shapes[name], self.offsets[name] = shape, place
            place += -(-math.prod(shape) * itemsize(array.dtype) // 16) * 16
        self.layer_bytes = place
        self.nbytes = place * len(tables.layers)


def _host_list(array: View) -> Any:
    """The values of an array as Python integers, on a GPU after a wait for them."""
    if array.device.kind == "cpu":
        return as_numpy(array).tolist()
    owner: Any = array.owner
    return (owner[0] if isinstance(owner, tuple) else owner).tolist()


def _to_host(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy copy of an array of NumPy, CuPy or torch."""
    if hasattr(array, "cpu"):
        array = array.cpu().numpy()
    return np.array(array.get() if hasattr(array, "get") else array)
