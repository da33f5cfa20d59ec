"""Exact number formats and the scalar functions of the layer, in NumPy.

`round_to` is what a store does and `to_float` what a load does; `encode_state` and `decode_state`
are the same for 8-bit states, `stochastic_round` for a store with noise from Philox. `convert.cuh`
holds the same names for the device, equal bit for bit: each step is one integer operation or one
IEEE fp32 operation (a multiply and an add stay two, division is correctly rounded), and fp32
subnormals count as zero, as they do on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SOFTPLUS_THRESHOLD = 20.0

_FLOATS: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def to_float(x: npt.ArrayLike, dtype: type[np.floating[Any]] = np.float32) -> Array:
    """Widen any float array to `dtype`. Exact unless float64 goes to float32; may alias `x`."""
    return np.asarray(x).astype(dtype, copy=False)


def round_to(x: npt.ArrayLike, dtype_name: str) -> Array:
    """Round to the nearest value of a float format, ties to even, in a single rounding.

    A magnitude above the largest finite value becomes inf, as the hardware conversion does.
    May alias `x` when nothing changes.
    """
    if dtype_name not in _FLOATS:
        raise ValueError(f"dtype_name: expected one of {', '.join(_FLOATS)}, got {dtype_name!r}")
    x, target = np.asarray(x), _FLOATS[dtype_name]
    if x.dtype == target:
        return x
    if target.itemsize == 2 and x.dtype == np.float64:
        x = _float32_round_to_odd(x)
    with np.errstate(over="ignore"):
        return x.astype(target)


def _float32_round_to_odd(x: Array) -> Array:
    """float64 to float32 so that a later rounding to 16 bits equals a direct one."""
    with np.errstate(over="ignore"):
        nearest = x.astype(np.float32)
    away = np.abs(nearest) > np.abs(x)
    truncated = np.where(away, np.nextafter(nearest, np.float32(0)), nearest)
    # A lost tail is remembered in the last bit, which no 16-bit format can hold.
    bits = truncated.view(np.uint32) | (truncated != x).astype(np.uint32)
    return np.asarray(bits).view(np.float32)


def softplus(x: npt.ArrayLike) -> Array:
    """log(1 + exp(x)) for x <= 20, else x, in the precision of `x`; never overflows."""
    x = np.asarray(x)
    return np.where(x <= SOFTPLUS_THRESHOLD, np.log1p(np.exp(np.minimum(x, x.dtype.type(20)))), x)


def silu(x: npt.ArrayLike) -> Array:
    """x / (1 + exp(-x)) in the precision of `x`; the exponential never overflows."""
    x = np.asarray(x)
    tail = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, x, x * tail) / (1 + tail))


# --- Random numbers ------------------------------------------------------------------------------

PHILOX_ROUNDS = 10

_LOW32 = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _as_uint64(x: npt.ArrayLike) -> Array:
    """The 64 bits of signed or unsigned integers."""
    return np.asarray(x).astype(np.uint64)


def _halves(x: Array) -> tuple[Array, Array]:
    """The low and the high 32 bits, as 64-bit integers."""
    return x & _LOW32, x >> np.uint64(32)


def philox4x32(offset: npt.ArrayLike, seed: npt.ArrayLike, rounds: int = PHILOX_ROUNDS) -> Array:
    """Four random words, uint32 (..., 4), for each 64-bit offset under a 64-bit seed.

    Philox-4x32 (Salmon et al., SC 2011) with key (low, high half of the seed) and counter
    (low, high half of the offset, 0, 0). `offset` and `seed` broadcast; `rounds` is 1 to 10.
    """
    if not 1 <= rounds <= 10:
        raise ValueError(f"philox_rounds: expected 1 to 10, got {rounds}")
    counter, key = np.broadcast_arrays(_as_uint64(offset), _as_uint64(seed))
    c0, c1 = _halves(counter)
    k0, k1 = _halves(key)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(rounds):
        # Products of 32-bit words, kept whole in 64 bits.
        low0, high0 = _halves(c0 * np.uint64(0xD2511F53))
        low2, high2 = _halves(c2 * np.uint64(0xCD9E8D57))
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = k0 + np.uint64(0x9E3779B9) & _LOW32
        k1 = k1 + np.uint64(0xBB67AE85) & _LOW32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_fields(words: npt.ArrayLike, state_dtype: str) -> Array:
    """The random field of each element that one Philox call serves, uint32.

    (..., 4) words become (..., 8) fields of a 16-bit state or (..., 16) of an 8-bit state, all
    of 16 bits but float16's of 13. The order is that of `cvt.rs`: a word holds two fields, the
    low half first; in 8-bit states each half also serves the next element, bits reversed.
    """
    words = np.asarray(words, np.uint32)
    low, high = words & 0xFFFF, words >> 16
    if state_dtype in ("int8", "float8_e4m3fn"):
        fields = np.stack([low, _reverse16(low), high, _reverse16(high)], axis=-1)
    elif state_dtype in ("float16", "bfloat16"):
        mask = np.uint32(0x1FFF if state_dtype == "float16" else 0xFFFF)
        fields = np.stack([low & mask, high & mask], axis=-1)
    else:
        raise ValueError(f"state_dtype: expected one of {_ROUNDED}, got {state_dtype!r}")
    return fields.reshape(*words.shape[:-1], -1)


def _reverse16(x: Array) -> Array:
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        x = (x & mask) << shift | x >> shift & mask
    return x


def row_fields(
    offset: npt.ArrayLike,
    seed: npt.ArrayLike,
    dstate: int,
    state_dtype: str,
    rounds: int = PHILOX_ROUNDS,
) -> Array:
    """The random fields (..., dstate) of rows of a state, uint32.

    `offset` is the 64-bit element offset of a row's first column in the state storage:
    slot * slot_stride + head * head_stride + p * dstate. One Philox call serves 8 neighbouring
    columns of a 16-bit state and 16 of an 8-bit state, at the offset of the first of them.
    """
    group = 16 if state_dtype in ("int8", "float8_e4m3fn") else 8
    columns = np.arange(0, dstate, group, dtype=np.uint64)
    with np.errstate(over="ignore"):
        counter = _as_uint64(offset)[..., None] + columns
    words = philox4x32(counter, _as_uint64(seed)[..., None], rounds)
    fields = random_fields(words, state_dtype)
    return fields.reshape(*fields.shape[:-2], -1)[..., :dstate]


def mix_seed(seed: npt.ArrayLike, layer: npt.ArrayLike) -> Array:
    """The seed of one layer, int64: SplitMix64's finaliser of seed XOR golden * (layer + 1)."""
    with np.errstate(over="ignore"):
        z = _as_uint64(seed) ^ _GOLDEN * (_as_uint64(layer) + np.uint64(1))
        z = (z ^ z >> 30) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> 27) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ z >> 31).astype(np.int64)


# --- Stochastic rounding and 8-bit states --------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """A float format whose values, in the order of their bits, are cells of fp32."""

    dtype: np.dtype[Any]
    mantissa_bits: int
    first_exponent: int  # the biased fp32 exponent of the smallest normal value
    field_bits: int
    overflow: int  # the code of whatever is too large
    nan: int


_FORMATS = {
    "float16": _Format(_FLOATS["float16"], 10, 113, 13, 0x7C00, 0x7FFF),
    "bfloat16": _Format(_FLOATS["bfloat16"], 7, 1, 16, 0x7F80, 0x7FFF),
    "float8_e4m3fn": _Format(np.dtype(ml_dtypes.float8_e4m3fn), 3, 121, 16, 0x7E, 0x7F),
}
_ROUNDED = ", ".join((*_FORMATS, "int8"))
# The largest code of the 8-bit states, as a value.
_LARGEST = {"int8": np.float32(127), "float8_e4m3fn": np.float32(448)}

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint32(0x00800000)


def _bits(x: Array) -> Array:
    return np.asarray(x).view(np.uint32)


def flushed(x: Array) -> Array:
    """fp32 with subnormals replaced by zeros of their sign."""
    bits = _bits(x)
    subnormal = (bits & ~_SIGN) < _SMALLEST_NORMAL
    return np.where(subnormal, bits & _SIGN, bits).view(np.float32)


def _round_cells(x: Array, form: _Format, field: Array | None) -> Array:
    """Round fp32 to `form`: stochastically with a field, else to nearest, ties to even."""
    bits = _bits(x)
    magnitude = bits & ~_SIGN
    exponent = (magnitude >> 23).astype(np.int32)
    # Subnormal numbers have exponent 0 and count as zero.
    significand = np.where(exponent > 0, magnitude & 0x7FFFFF | _SMALLEST_NORMAL, 0)
    significand = significand.astype(np.uint32)
    # Below the normal values the cells stop shrinking, so one more bit is lost per binade.
    below = np.maximum(form.first_exponent - exponent, 0)
    lost = 23 - form.mantissa_bits + below
    if field is None:
        # 25 bits lose a 24-bit number and its half alike.
        lost = np.minimum(lost, 25).astype(np.uint32)
        odd = significand >> lost & 1
        cells = significand + ((np.uint32(1) << (lost - 1)) - 1) + odd >> lost
    else:
        dropped = np.minimum(lost - form.field_bits, 24).astype(np.uint32)
        cells = (significand >> dropped) + field >> form.field_bits
    # A significand of the first binade and of the subnormals is its own code.
    binades = np.maximum(exponent - form.first_exponent, 0).astype(np.uint32)
    code = np.minimum((binades << form.mantissa_bits) + cells, form.overflow)
    width = 8 * form.dtype.itemsize
    code = np.where(magnitude > _INFINITY, form.nan, code | bits >> 31 << (width - 1))
    return code.astype(f"u{form.dtype.itemsize}").view(form.dtype)


def stochastic_round(x: npt.ArrayLike, field: npt.ArrayLike, state_dtype: str) -> Array:
    """Round fp32 up or down within one cell of a 16- or 8-bit format, as a random field decides.

    `field` is an integer below 2**13 for float16, else below 2**16 (`row_fields`), of the shape
    of `x`. Unbiased up to the resolution of the field; a representable value never moves.
    Overflow gives inf in float16 and bfloat16, the largest value in the 8-bit formats; NaN gives
    the one NaN 0x7fff or 0x7f, and 0 in int8.

    Equivalent to (floor(|x| / cell * 2**f) + field >> f) * cell with the sign of x, f the bits of
    the field; int8 to clip(floor(x + field / 65536), -127, 127). float16, bfloat16 and
    float8_e4m3fn equal the hardware's `cvt.rs`.
    """
    x, field = np.asarray(x, np.float32), np.asarray(field).astype(np.uint32)
    if state_dtype == "int8":
        shifted = flushed(x) + field.astype(np.float32) * np.float32(2**-16)
        return _to_int8(np.floor(shifted))
    if state_dtype not in _FORMATS:
        raise ValueError(f"state_dtype: expected one of {_ROUNDED}, got {state_dtype!r}")
    return _round_cells(x, _FORMATS[state_dtype], field)


def round_to_code(x: npt.ArrayLike, state_dtype: str) -> Array:
    """Round scaled fp32 values to int8 or float8_e4m3fn: nearest, ties to even, saturating at
    +-127 and +-448. NaN gives 0 in int8 and the NaN 0x7f in float8_e4m3fn.
    """
    _check_8bit(state_dtype)
    x = np.asarray(x, np.float32)
    if state_dtype == "int8":
        return _to_int8(np.rint(x))
    return _round_cells(x, _FORMATS[state_dtype], None)


def _to_int8(whole: Array) -> Array:
    whole = np.where(np.isnan(whole), np.float32(0), whole)
    return np.clip(whole, -127, 127).astype(np.int8)


def _check_8bit(state_dtype: str) -> None:
    if state_dtype not in _LARGEST:
        raise ValueError(f"state_dtype: expected one of {', '.join(_LARGEST)}, got {state_dtype!r}")


def encode_state(
    S: npt.ArrayLike, state_dtype: str, fields: npt.ArrayLike | None = None
) -> tuple[Array, Array]:
    """Codes (..., dstate) and fp32 decode scales (...) of the rows of an fp32 state.

    The row's largest magnitude becomes the largest code: enc = Q / max(amax, Q * 2**-117) with
    Q = 127 or 448, codes = round(S * enc), scale = 1 / enc, a normal number (int8: at most the
    fp32 of bits 0x7c010203). Nearest without `fields`, else stochastic with the fields
    (..., dstate) of `row_fields`.
    A row of zeros (or fp32 subnormals) has codes 0 and scale 1; a row with a NaN or an inf has
    codes 0 and the scale NaN, so that all of it decodes to NaN.
    """
    _check_8bit(state_dtype)
    S = np.asarray(S, np.float32)
    largest = _LARGEST[state_dtype]
    amax = (_bits(S) & ~_SIGN).max(axis=-1)
    broken, empty = amax >= _INFINITY, amax < _SMALLEST_NORMAL
    live = ~(broken | empty)
    # Where there is nothing to scale, enc and scale become 1.
    amax = np.where(live, amax.view(np.float32), largest)
    # The smallest e4m3 code, 2**-9, times the smallest scale, 2**-117, is still normal.
    enc = largest / np.maximum(amax, largest * np.float32(2**-117))
    # 127 times the scale of the largest fp32 number would overflow.
    most = np.uint32(0x7C010203).view(np.float32) if state_dtype == "int8" else np.float32(np.inf)
    scale = np.where(broken, np.float32(np.nan), np.minimum(np.float32(1) / enc, most))
    v = flushed(np.where(live[..., None], S, np.float32(0))) * enc[..., None]
    if fields is None:
        return round_to_code(v, state_dtype), scale
    return stochastic_round(v, fields, state_dtype), scale


def decode_state(codes: npt.ArrayLike, scale: npt.ArrayLike) -> Array:
    """fp32 values (..., dstate) of int8 or float8_e4m3fn codes: one product, code * scale."""
    scale = flushed(np.asarray(scale, np.float32))
    with np.errstate(over="ignore"):
        return flushed(to_float(codes) * scale[..., None])
