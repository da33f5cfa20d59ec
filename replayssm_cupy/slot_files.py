"""Sequences as plain arrays: to host memory, to a file, or into another stack.

The arrays of an export may be kept with `numpy.savez(path, **image)` and read with
`numpy.load(path)`: there is nothing to unpickle. States, scales, live ring rows and their number
travel together, so that no token that still waits in a ring is lost.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import as_numpy, view
from .checks import check_dtype, check_int
from .decode_checks import check_host_cursors
from .errors import ReplaySSMError
from .snapshots import Snapshots

VERSION = 1
_FORMAT = "replayssm_cupy slots"

Array = np.ndarray[Any, Any]


def export_slots(snapshots: Snapshots, slots: Any) -> dict[str, Array]:
    """Sequences of a stack as arrays on the host: see :meth:`LayerStack.export_slots`."""
    chosen = _slot_list(slots, snapshots.layout.num_slots, distinct=False)
    start, prev = snapshots.cursors()
    sizes = snapshots.layout.max_window, snapshots.layout.ring_buffer_len
    for slot in chosen:
        check_host_cursors(slot, start[slot], prev[slot], *sizes)
    images = snapshots.pack(chosen)
    header = {
        "format": _FORMAT,
        "version": VERSION,
        **_geometry(snapshots),
        "slots": len(chosen),
        "live": [int(prev[slot]) for slot in chosen],
        "crc32": [zlib.crc32(image.tobytes()) for image in images],
    }
    text = json.dumps(header, sort_keys=True).encode()
    return {
        "header": np.frombuffer(text, np.uint8).copy(),
        "header_crc32": np.array([zlib.crc32(text)], np.uint32),
        "slots": images,
    }


def import_slots(snapshots: Snapshots, image: Mapping[str, Any], slots: Any) -> list[int]:
    """The way back: see :meth:`LayerStack.import_slots`. Returns the slots that were written."""
    arrays = {
        name: _plain(image, name, dtype, rank)
        for name, dtype, rank in (
            ("header", "uint8", 1), ("header_crc32", "uint32", 1), ("slots", "uint8", 2)
        )
    }  # fmt: skip
    text = arrays["header"].tobytes()
    if arrays["header_crc32"].tolist() != [zlib.crc32(text)]:
        raise ReplaySSMError("image['header']: its checksum does not fit, the image is damaged")
    header = json.loads(text)
    if (header.get("format"), header.get("version")) != (_FORMAT, VERSION):
        raise ReplaySSMError(
            f"image['header']: expected {_FORMAT!r} of version {VERSION}, got "
            f"{header.get('format')!r} of version {header.get('version')}"
        )
    for name, expected in _geometry(snapshots).items():
        if header.get(name) != expected:
            raise ValueError(
                f"image['header']: expected {name} = {expected} as in the stack, got "
                f"{header.get(name)}"
            )
    images = arrays["slots"]
    _check_images(images, header, snapshots.layout.max_window)
    chosen = _slot_list(slots, snapshots.layout.num_slots, distinct=True)
    if len(chosen) != len(images):
        raise ValueError(f"slots: expected {len(images)} slots, one an image, got {len(chosen)}")
    snapshots.unpack(np.ascontiguousarray(images), header["live"], chosen)
    return chosen


def _check_images(images: Array, header: dict[str, Any], max_window: int) -> None:
    """The bytes are as many as the header says, and the same ones."""
    shape = header.get("slots"), header["bytes_per_slot"]
    if images.shape != shape:
        raise ReplaySSMError(f"image['slots']: expected shape {shape}, got {images.shape}")
    live, sums = header.get("live", []), header.get("crc32", [])
    if len(live) != len(images) or len(sums) != len(images):
        raise ReplaySSMError(
            f"image['header']: expected {len(images)} live counts and checksums, got {len(live)} "
            f"and {len(sums)}"
        )
    for row, rows in enumerate(live):
        if not 0 <= rows <= max_window:
            raise ReplaySSMError(
                f"image['header']: expected live rows from 0 to {max_window}, got {rows} in row "
                f"{row}"
            )
        if zlib.crc32(images[row].tobytes()) != sums[row]:
            raise ReplaySSMError(
                f"image['slots']: the checksum of row {row} does not fit, the image is damaged"
            )


def _geometry(snapshots: Snapshots) -> dict[str, Any]:
    """What an image and a stack must agree on. How long the ring is does not matter."""
    c = snapshots.layout
    return {
        "layers": len(snapshots.tables.layers),
        "nheads": c.nheads,
        "ngroups": c.nheads // c.heads_per_group,
        "head_dim": c.head_dim,
        "dstate": c.dstate,
        "max_window": c.max_window,
        "state_dtype": c.state_dtype,
        "activation_dtype": c.activation_dtype,
        "bytes_per_slot": snapshots.image.nbytes,
    }


def _plain(image: Mapping[str, Any], name: str, dtype: str, rank: int) -> Array:
    if name not in image:
        raise ValueError(f"image: expected an array {name!r}, got {', '.join(image) or 'nothing'}")
    array = image[name]
    if not isinstance(array, np.ndarray):
        raise TypeError(f"image[{name!r}]: expected a NumPy array, got {type(array).__name__}")
    if array.dtype != dtype or array.ndim != rank:
        raise TypeError(
            f"image[{name!r}]: expected {dtype} of rank {rank}, got {array.dtype} of rank "
            f"{array.ndim}"
        )
    return array


def _slot_list(slots: Any, num_slots: int, distinct: bool) -> list[int]:
    """Slots of a host call: integers, or an array of them."""
    if isinstance(slots, int):
        raise TypeError("slots: expected a list of slots, got int")
    if isinstance(slots, (list, tuple, range)):
        chosen = list(slots)
        for slot in chosen:
            check_int("slots", slot)
    else:
        array = view(slots, "slots")
        check_dtype(array, ("int32", "int64"))
        if len(array.shape) != 1:
            raise ValueError(f"slots: expected (batch,), got {array.shape}")
        owner: Any = slots
        chosen = as_numpy(array).tolist() if array.device.kind == "cpu" else owner.tolist()
    for slot in chosen:
        if not 0 <= slot < num_slots:
            raise ValueError(f"slots: expected 0 to {num_slots - 1}, got {slot}")
    if distinct and len(set(chosen)) != len(chosen):
        raise ValueError(f"slots: expected distinct slots, got {chosen}")
    return chosen
