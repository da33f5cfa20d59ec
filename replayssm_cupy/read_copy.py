"""Read copies of a float16 state, in NumPy: what a step reads while float16 carries the recurrence.

Either copy has one float32 scale for each row of dstate numbers, and is made from the unrounded
state. "float16+fp8" keeps e4m3 codes, as an 8-bit state does. "float16+nvfp4" keeps e2m1 codes of
four bits with an e4m3 scale for each block of 16 columns:

    state = e2m1 code * e4m3 block scale * float32 row scale

Its bytes lie in slabs of 16 rows: the codes of the rows, dstate / 2 bytes each, then their block
scales, dstate / 16 bytes each. Eight columns c share four bytes: byte i holds column c + i in its
lower four bits and column c + i + 4 in its upper ones. `convert.cuh` and `copied.cuh` do the same
on the device, bit for bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .numerics import decode_state, encode_state, flushed, round_to_code

Array = npt.NDArray[Any]

SLAB_ROWS = 16
BLOCK = 16  # columns that share a block scale
LARGEST = np.float32(6 * 448)  # code times block scale
_SIXTH = np.float32(1) / np.float32(6)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_SMALLEST_NORMAL = np.float32(2**-126)


def encode_copy(S: npt.ArrayLike, state_format: str) -> tuple[Array, Array]:
    """The copy and the row scales (..., head_dim) of states (..., head_dim, dstate).

    A row of zeros (or fp32 subnormals) has codes 0 and scale 1, one with a NaN or an inf codes 0
    and scale NaN.
    """
    if state_format == "float16+fp8":
        return encode_state(S, "float8_e4m3fn")
    codes, blocks, scale = encode_e2m1(S)
    return _to_slabs(codes, blocks), scale


def decode_copy(copy: Array, scale: Array, state_format: str) -> Array:
    """The float32 states (..., head_dim, dstate) that a copy stands for."""
    if state_format == "float16+fp8":
        return decode_state(copy, scale)
    return decode_e2m1(*_from_slabs(copy), scale)


def round_to_e2m1(x: npt.ArrayLike) -> Array:
    """The codes, uint8 below 16, of numbers: nearest, ties to even, saturating at +-6.

    The lower three bits are a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6, the fourth is the sign.
    """
    x = np.asarray(x, np.float32)
    magnitude = np.minimum(np.abs(x), np.float32(6))
    # Numbers of one binade lie half of it apart, those below 1 as far as those above.
    binade = (magnitude >= 2).astype(np.uint8) + (magnitude >= 4)
    code = np.rint(magnitude * np.float32(2) / (1 << binade)).astype(np.uint8) + 2 * binade
    return np.asarray(code | np.signbit(x).astype(np.uint8) << 3)


def e2m1_values(codes: npt.ArrayLike) -> Array:
    """What codes stand for, in float32."""
    codes = np.asarray(codes)
    return np.asarray(np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7]))


def encode_e2m1(S: npt.ArrayLike) -> tuple[Array, Array, Array]:
    """Codes (..., dstate), block scales (..., dstate / 16) and row scales (...) of rows.

    With enc = 2688 / max(amax, 2688 * 2**-117) of the row's largest magnitude: a block's scale is
    s = e4m3(amax * enc / 6) of its own, its codes e2m1(S * enc / s), the row's scale 1 / enc.

    A number is off by at most 17/96 of its block's largest one plus 2.2e-6 of its row's.
    """
    S = np.asarray(S, np.float32)
    amax = np.abs(flushed(S)).max(axis=-1)  # NaN where there is one
    broken, empty = ~np.isfinite(amax), amax < _SMALLEST_NORMAL
    live = ~(broken | empty)
    amax = np.where(live, amax, LARGEST)
    enc = LARGEST / np.maximum(amax, LARGEST * np.float32(2**-117))
    scale = np.where(broken, np.float32(np.nan), np.float32(1) / enc)
    scaled = flushed(np.where(live[..., None], S, np.float32(0))) * enc[..., None]
    parts = scaled.reshape(*S.shape[:-1], -1, BLOCK)
    blocks = round_to_code(np.abs(parts).max(axis=-1) * _SIXTH, "float8_e4m3fn")
    value = blocks.astype(np.float32)
    inverse = np.where(value > 0, np.float32(1) / np.where(value > 0, value, 1), np.float32(0))
    codes = round_to_e2m1(parts * inverse[..., None]).reshape(S.shape)
    return codes, blocks, scale


def decode_e2m1(codes: Array, blocks: Array, scale: Array) -> Array:
    """float32 values of rows: (code * block scale), which is exact, times the row's scale."""
    parts = e2m1_values(codes).reshape(*blocks.shape, BLOCK)
    exact = (parts * blocks.astype(np.float32)[..., None]).reshape(codes.shape)
    with np.errstate(over="ignore"):
        return flushed(exact * flushed(np.asarray(scale, np.float32))[..., None])


def _to_slabs(codes: Array, blocks: Array) -> Array:
    """(..., head_dim, dstate) codes and their block scales as (..., head_dim / 16, 9 dstate)."""
    *leading, head_dim, dstate = codes.shape
    words = codes.reshape(*leading, head_dim, dstate // 8, 2, 4)
    halves = words[..., 0, :] | words[..., 1, :] << 4
    slabs = (*leading, head_dim // SLAB_ROWS, -1)
    return np.concatenate(
        [halves.reshape(slabs), blocks.view(np.uint8).reshape(slabs)], axis=-1
    ).astype(np.uint8)


def _from_slabs(slabs: Array) -> tuple[Array, Array]:
    """The way back."""
    *leading, count, size = slabs.shape
    dstate = size // 9
    halves = slabs[..., : 8 * dstate].reshape(*leading, count * SLAB_ROWS, dstate // 8, 4)
    codes = np.stack([halves & 15, halves >> 4], axis=-2)
    blocks = np.ascontiguousarray(slabs[..., 8 * dstate :])
    return (
        codes.reshape(*leading, count * SLAB_ROWS, dstate),
        blocks.reshape(*leading, count * SLAB_ROWS, dstate // BLOCK).view(ml_dtypes.float8_e4m3fn),
    )
