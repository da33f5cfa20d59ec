"""Scratch of two kernels, named as FlashInfer's, so that its callers change one import.

`allocate_scratch` makes a format in float32 that holds the weights of any step; FlashInfer's own,
whose arrays have the type of x, is accepted too and holds those of a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .arrays import Device, View, empty_like_framework, itemsize, view
from .checks import Letters, check_dtype, check_int, named_device
from .keys import MAX_WINDOW

SCRATCH = ("cb_scaled", "cumAdt_vec", "cb_old")
ALGORITHMS = ("auto", "monolith", "two-kernel")
# Of one sequence and head, for any window.
OWN_SHAPES = {"cb_scaled": (32, 16), "cumAdt_vec": (64,), "cb_old": (32, 16)}


def peer_shapes(max_window: int) -> dict[str, tuple[int, ...]]:
    """Of one sequence and head, in FlashInfer's format."""
    columns = -(-max_window // 8) * 8
    return {"cb_scaled": (32, 8), "cumAdt_vec": (16,), "cb_old": (32, columns // 2)}


def allocate_scratch(
    batch: int,
    nheads: int,
    *,
    max_window: int = MAX_WINDOW,
    like: Any = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Scratch for steps with ``algorithm="two-kernel"``: pass it to them as ``**scratch``.

    Steps that follow one another may share it.

    Parameters
    ----------
    batch, nheads : the most sequences of a step, and its heads.
    max_window : W of the rings, 1 to 16.
    like : an array such as x: the scratch comes in its framework (CuPy or NumPy for JAX, whose
        arrays cannot be written) and on its device.
    device : without `like`: "cpu" (NumPy arrays), "cuda" or "cuda:1" (CuPy arrays), or "auto", the
        GPU if there is one.

    Returns
    -------
    ``{"cb_scaled": ..., "cumAdt_vec": ..., "cb_old": ...}``, float32, uninitialised.

    Raises TypeError or ValueError naming the argument; :class:`ReplaySSMError` without a GPU.
    """
    for name, size in (("batch", batch), ("nheads", nheads), ("max_window", max_window)):
        check_int(name, size)
        least = 0 if name == "batch" else 1
        if size < least:
            raise ValueError(f"{name}: expected at least {least}, got {size}")
    if max_window > MAX_WINDOW:
        raise ValueError(f"max_window: expected 1 to {MAX_WINDOW}, got {max_window}")
    model = _model(named_device(device)) if like is None else view(like, "like")
    return {
        name: empty_like_framework(model, (batch, nheads, *shape), "float32", model.device)
        for name, shape in OWN_SHAPES.items()
    }


def _model(device: Device) -> View:
    framework: Any = "numpy" if device.kind == "cpu" else "cupy"
    return View("device", 0, (), (), "float32", device, False, framework, None)


def words_of(v: Mapping[str, View | None]) -> tuple[int, int, int] | None:
    """The words of 4 bytes that the arrays have for a sequence and head, if there are arrays."""
    cb_scaled, cumAdt_vec, cb_old = (v.get(name) for name in SCRATCH)
    if cb_scaled is None or cumAdt_vec is None or cb_old is None:
        return None
    return _words(cb_scaled), _words(cumAdt_vec), _words(cb_old)


def _words(array: View) -> int:
    return math.prod(array.shape[2:]) * itemsize(array.dtype) // 4


def check_algorithm(algorithm: str) -> str:
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(
            f'algorithm: expected "auto", "monolith" or "two-kernel", got {algorithm!r}'
        )
    return algorithm


def check_hints(d_split: int | None, precompute_heads_per_cta: int) -> None:
    """What callers of FlashInfer may pass and these kernels need not be told."""
    if isinstance(d_split, bool) or d_split not in (None, 1, 2):
        raise ValueError(f"d_split: expected None, 1 or 2, got {d_split!r}")
    check_int("precompute_heads_per_cta", precompute_heads_per_cta)
    if precompute_heads_per_cta < 0:
        raise ValueError(
            f"precompute_heads_per_cta: expected at least 0, got {precompute_heads_per_cta}"
        )


def check_scratch(
    v: dict[str, View | None], letters: Letters, algorithm: str, max_window: int
) -> list[View]:
    """All three arrays or none, of one format, for this batch; the arrays that are there."""
    arrays = [array for name in SCRATCH if (array := v.get(name)) is not None]
    if not arrays:
        if algorithm == "two-kernel":
            raise ValueError(
                'algorithm: expected "auto" or "monolith" without scratch (cb_scaled, cumAdt_vec, '
                'cb_old), got "two-kernel"'
            )
        return []
    missing = [name for name in SCRATCH if v.get(name) is None]
    if missing:
        given = " and ".join(array.name for array in arrays)
        raise ValueError(
            f"{missing[0]}: expected an array beside {given} (all of cb_scaled, cumAdt_vec and "
            "cb_old, or none), got None"
        )
    x = v["x"]
    assert x is not None
    theirs, weights = peer_shapes(max_window), arrays[0]
    own = weights.shape[-1:] != theirs["cb_scaled"][-1:]
    own &= weights.dtype == "float32" or weights.dtype != x.dtype
    shapes = OWN_SHAPES if own else theirs
    batch, nheads = letters["batch"], letters["nheads"]
    for array in arrays:
        is_weights = array.name != "cumAdt_vec" and not own
        check_dtype(array, (x.dtype if is_weights else "float32",), " as x" * is_weights)
        shape = (nheads, *shapes[array.name])
        if array.shape[1:] != shape or array.shape[0] < batch:
            expected = f"(at least {batch}, {', '.join(map(str, shape))})"
            raise ValueError(
                f"{array.name}: expected (batch, nheads, ...) = {expected}, got {array.shape}"
            )
    return arrays
