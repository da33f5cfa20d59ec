"""Rounding, random bits, 8-bit codes, softplus and silu against exact arithmetic.

REPLAYSSM_FULL_SWEEP=1 rounds 44 million fp32 patterns in place of 4 million.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import bits

from replayssm_cupy.numerics import (
    decode_state,
    encode_state,
    mix_seed,
    philox4x32,
    random_fields,
    round_to,
    round_to_code,
    row_fields,
    silu,
    softplus,
    stochastic_round,
    to_float,
)

pytestmark = pytest.mark.filterwarnings("error")

HALVES = ("bfloat16", "float16")


def all_halves(name: str) -> np.ndarray:
    """Every bit pattern of a 16-bit format, but one NaN only: a signalling one would warn."""
    patterns = np.arange(65536, dtype=np.uint16)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[name]
    numbers = patterns[(patterns & 0x7FFF) <= infinity].view(DTYPES[name])
    return np.append(numbers, DTYPES[name].type(np.nan))


def finite_halves(name: str) -> np.ndarray:
    """Every finite value of a 16-bit format in ascending order, -0 left out."""
    values = all_halves(name).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_representable_values_survive_a_round_trip(name, wide):
    stored = all_halves(name)
    again = round_to(to_float(stored, wide), name)
    nan = np.isnan(to_float(stored))
    np.testing.assert_array_equal(np.isnan(to_float(again)), nan)
    np.testing.assert_array_equal(bits(again[~nan]), bits(stored[~nan]))


@pytest.mark.parametrize("name", HALVES)
def test_ties_go_to_even_and_their_neighbours_to_the_nearest(name):
    values = finite_halves(name)
    below, above = values[:-1], values[1:]
    middle = (below + above) / 2
    even = np.where(round_to(below, name).view(np.uint16) & 1, above, below)
    np.testing.assert_array_equal(to_float(round_to(middle, name), np.float64), even)
    up, down = np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)
    np.testing.assert_array_equal(to_float(round_to(up, name), np.float64), above)
    np.testing.assert_array_equal(to_float(round_to(down, name), np.float64), below)


def test_float64_is_rounded_once():
    # Through float32 this becomes a tie and falls to 1.
    assert float(round_to(np.float64(1 + 2**-8 + 2**-40), "bfloat16")) == 1 + 2**-7
    assert float(round_to(np.float64(1 + 2**-11 + 2**-40), "float16")) == 1 + 2**-10


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(HALVES))
def test_result_is_the_nearest_value(x, name):
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    result = float(round_to(np.float64(x), name))
    if math.isinf(result):
        assert abs(x) > largest
        return
    values = finite_halves(name)
    i = int(np.searchsorted(values, x))
    around = values[max(0, i - 2) : i + 2]
    distance = abs(Fraction(result) - Fraction(x))
    assert distance == min(abs(Fraction(float(v)) - Fraction(x)) for v in around)


def test_overflow_subnormals_signed_zero_and_specials():
    assert float(round_to(np.float32(65519.9), "float16")) == 65504
    assert float(round_to(np.float32(65520), "float16")) == math.inf
    assert float(round_to(np.float32(-3.4e38), "bfloat16")) == -math.inf
    assert float(round_to(np.float64(1e300), "bfloat16")) == math.inf
    assert float(round_to(np.float64(1e300), "float32")) == math.inf
    assert float(round_to(np.float64(2**-24), "float16")) == 2**-24
    assert float(round_to(np.float64(2**-25), "float16")) == 0
    assert np.signbit(to_float(round_to(np.float64(-0.0), "bfloat16")))
    for name in ("float64", "float32", *HALVES):
        kept = to_float(round_to(np.array([np.nan, np.inf, -np.inf]), name))
        assert np.isnan(kept[0])
        assert kept[1:].tolist() == [math.inf, -math.inf]


def test_unknown_format_is_named():
    with pytest.raises(ValueError, match="'int4'"):
        round_to(np.zeros(1), "int4")


# N4: the published values, with dt + bias already added.
N4 = (-100.0, -20.0, 0.0, 19.999, 20.0, 20.001, 88.0, 100.0, 1e4)


@pytest.mark.parametrize("x", N4)
def test_softplus_in_float32(x):
    x = np.float32(x)
    got = softplus(x)
    assert got.dtype == np.float32
    exact = math.log1p(math.exp(x)) if x <= 20 else float(x)
    # float32 has no normal numbers at 3.8e-44: a flush to zero is as good.
    assert got == pytest.approx(exact, rel=2**-22, abs=5e-44)


def test_softplus_keeps_small_steps_and_is_continuous_at_the_threshold():
    assert float(softplus(np.float32(-20))) == pytest.approx(2.0611536e-9, rel=1e-6)
    assert float(softplus(np.float64(-20))) == pytest.approx(2.061153620314381e-09, rel=1e-14)
    assert float(softplus(np.float32(100))) == 100
    assert float(softplus(np.float32(1e4))) == 1e4
    at, above = np.float32(20), np.nextafter(np.float32(20), np.float32(30))
    assert 0 <= softplus(above) - softplus(at) <= np.spacing(at)
    # Inclusive: 20 itself still takes the logarithm.
    assert float(softplus(np.float64(20))) == math.log1p(math.exp(20)) != 20
    assert float(softplus(np.nextafter(20.0, 30.0))) == np.nextafter(20.0, 30.0)
    assert np.isnan(softplus(np.float32(np.nan)))


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_silu(precision):
    x = np.concatenate([np.linspace(-30, 30, 1001), [-1e4, -710, -89, 0, 89, 1e4]])
    x = x.astype(precision)
    got = silu(x)
    assert got.dtype == precision
    wide = np.maximum(x.astype(np.float64), -700)
    exact = x.astype(np.float64) / (1 + np.exp(-wide))
    np.testing.assert_allclose(got, exact, rtol=4 * np.finfo(precision).eps, atol=1e-37)
    assert silu(precision(-1e4)) == 0
    assert silu(precision(1e4)) == precision(1e4)


@settings(max_examples=100, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_scalar_functions_are_finite_and_ordered(x):
    x = np.float32(x)
    assert np.isfinite(softplus(x))
    assert softplus(x) >= max(x, 0)
    assert np.isfinite(silu(x))
    assert -0.2785 < silu(x) <= max(x, 0)


# --- Philox and the random fields ----------------------------------------------------------------

ALL_64 = 2**64 - 1


def philox_by_hand(counter: list[int], key: list[int], rounds: int) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q % 2**32, p >> 32 ^ c[3] ^ k[1], p % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


# The known answers of Random123: rounds, counter, key, result.
PI = "243f6a88 85a308d3 13198a2e 03707344"
KNOWN_PHILOX = (
    (7, "0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (10, "0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, PI, "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_PHILOX)
def test_philox_by_hand_gives_the_known_answers(rounds, counter, key, answer):
    words = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    counter, key, answer = words
    assert philox_by_hand(counter, key, rounds) == answer
    if counter[2:] == [0, 0]:
        assert philox4x32(0, 0, rounds).tolist() == answer


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(1, 10),
)
def test_philox_equals_philox_by_hand(offset, seed, rounds):
    low, high = (offset & ALL_64) % 2**32, (offset & ALL_64) >> 32
    key = [(seed & ALL_64) % 2**32, (seed & ALL_64) >> 32]
    answer = philox_by_hand([low, high, 0, 0], key, rounds)
    words = philox4x32(offset, seed, rounds)
    assert words.dtype == np.uint32
    assert words.tolist() == answer


def test_philox_is_elementwise_and_signs_do_not_matter():
    offsets = np.array([[0, 2**31, 2**32 + 5], [2**40, 2**62, -1]], np.int64)
    seeds = np.array([[3], [-(2**63)]], np.int64)
    words = philox4x32(offsets, seeds)
    assert words.shape == (2, 3, 4)
    for i, j in np.ndindex(2, 3):
        assert words[i, j].tolist() == philox4x32(int(offsets[i, j]), int(seeds[i, 0])).tolist()
    np.testing.assert_array_equal(words, philox4x32(offsets.view(np.uint64), seeds))


@pytest.mark.parametrize("rounds", [0, 11, -1])
def test_philox_rounds_out_of_range_are_named(rounds):
    with pytest.raises(ValueError, match=f"philox_rounds: expected 1 to 10, got {rounds}"):
        philox4x32(0, 0, rounds)


def test_the_fields_of_a_word():
    words = np.array([0x8001_C003, 0xFFFF_0000, 0x1234_5678, 0xE000_2000], np.uint32)
    bf16 = [0xC003, 0x8001, 0x0000, 0xFFFF, 0x5678, 0x1234, 0x2000, 0xE000]
    assert random_fields(words, "bfloat16").tolist() == bf16
    fp16 = [field & 0x1FFF for field in bf16]
    assert random_fields(words, "float16").tolist() == fp16

    def reverse(field: int) -> int:
        return int(f"{field:016b}"[::-1], 2)

    eight = [f for field in bf16 for f in (field, reverse(field))]
    for name in ("int8", "float8_e4m3fn"):
        assert random_fields(words, name).tolist() == eight
    assert random_fields(np.zeros((2, 3, 4), np.uint32), "int8").shape == (2, 3, 16)
    with pytest.raises(ValueError, match="'float32'"):
        random_fields(words, "float32")


@pytest.mark.parametrize(("name", "group"), [("bfloat16", 8), ("float16", 8), ("int8", 16)])
def test_the_fields_of_a_row_come_from_its_groups(name, group):
    # Beyond 32 bits, so that the high half of the counter counts.
    offsets = np.array([[0, 128], [2**32 - 64, 2**40]], np.int64)
    fields = row_fields(offsets, -7, 128, name, 6)
    assert fields.shape == (2, 2, 128)
    for i, j in np.ndindex(2, 2):
        for n in range(0, 128, group):
            words = philox4x32(int(offsets[i, j]) + n, -7, 6)
            expected = random_fields(words, name)
            assert fields[i, j, n : n + group].tolist() == expected.tolist()


def test_the_seeds_of_layers_are_the_stream_of_splitmix64():
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    seeds = mix_seed(0, np.arange(3))
    assert seeds.dtype == np.int64
    assert seeds.view(np.uint64).tolist() == known
    assert int(mix_seed(0, 2)) == known[2]
    golden = 0x9E3779B97F4A7C15
    # seed XOR golden * 2 with these seeds is golden again, or zero, which mixes to zero.
    assert int(mix_seed(golden ^ (2 * golden & ALL_64), 1)) & ALL_64 == known[0]
    assert int(mix_seed(2 * golden & ALL_64, 1)) == 0
    assert int(mix_seed(-1, 0)) != int(mix_seed(2**63 - 1, 0))


# --- Stochastic rounding -------------------------------------------------------------------------

# Mantissa bits, exponent of the smallest normal value, field bits, largest value, overflow.
FLOATS = {
    "float16": (10, -14, 13, 65504.0, math.inf),
    "bfloat16": (7, -126, 16, float(ml_dtypes.finfo(DTYPES["bfloat16"]).max), math.inf),
    "float8_e4m3fn": (3, -6, 16, 448.0, 448.0),
}
EIGHT_BITS = {"int8": 127.0, "float8_e4m3fn": 448.0}
STOCHASTIC = (*FLOATS, "int8")


def cell_of(x: np.ndarray, name: str) -> np.ndarray:
    """The distance between the neighbours of x in a format, float64."""
    if name == "int8":
        return np.ones(np.shape(x))
    mantissa, smallest, *_ = FLOATS[name]
    exponent = np.frexp(np.abs(np.asarray(x, np.float64)))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, smallest) - mantissa)


def expected_round(x: np.ndarray, field: np.ndarray, name: str) -> np.ndarray:
    """Stochastic rounding of finite fp32 to a float format, with exact float64 arithmetic."""
    _, _, field_bits, largest, overflow = FLOATS[name]
    x = np.asarray(x, np.float64)
    cell, magnitude = cell_of(x, name), np.where(np.abs(x) < 2.0**-126, 0, np.abs(x))
    whole = np.floor((np.floor(magnitude / cell * 2.0**field_bits) + field) / 2.0**field_bits)
    return np.copysign(np.where(whole * cell > largest, overflow, whole * cell), x)


def cells(name: str) -> np.ndarray:
    """fp32 values all over a cell, for cells of every kind, all below the overflow."""
    if name == "int8":
        starts = np.array([-127, -65, -64, -33, -2, -1, 0, 1, 31, 63, 100, 126.0])
    else:
        mantissa, smallest, _, largest, _ = FLOATS[name]
        subnormal, top = np.ldexp(1.0, smallest - mantissa), math.frexp(largest)[1] - 1
        # bfloat16's subnormals are fp32's, which are zero.
        units = [] if name == "bfloat16" else [0, 1, 2, 3, 2**mantissa - 1]
        starts = [subnormal * unit for unit in units]
        for exponent in (smallest, smallest + 1, -1, 0, 1, top - 1):
            for unit in (0, 1, 2**mantissa - 1):
                starts.append(math.ldexp(1 + unit / 2**mantissa, exponent))
        starts = np.array([*starts, largest - math.ldexp(1.0, top - mantissa)])
    parts = np.array([0, 2**-20, 2**-16, 2**-13, 0.1, 0.5 - 2**-15, 0.5, 2 / 3, 1 - 2**-13])
    x = starts[:, None] + parts * cell_of(starts, name)[:, None]
    return np.unique(x.astype(np.float32))


# The cells of int8 have both signs.
@pytest.mark.parametrize(
    ("name", "sign"), [("int8", 1), *((n, s) for n in FLOATS for s in (1, -1))]
)
def test_every_field_on_a_sweep_of_cells(name, sign):
    field_bits = 16 if name == "int8" else FLOATS[name][2]
    fields = np.arange(2**field_bits, dtype=np.uint32)
    for x in cells(name):
        rounded = to_float(stochastic_round(np.full(fields.shape, sign * x), fields, name))
        away = sign * rounded.astype(np.float64)
        exact, cell = float(x), float(cell_of(x, name))
        down = math.floor(exact / cell) * cell
        # One step from the lower to the upper neighbour, at the right field.
        assert (np.diff(away) >= 0).all()
        assert set(away.tolist()) <= {down, down + cell}
        ups = int((away != down).sum())
        share = (exact - down) / cell * 2**field_bits
        if name == "int8":
            # fp32 addition may round the last field into the next cell.
            assert abs(ups - share) <= 1
            assert share != int(share) or ups == share
        else:
            assert ups == math.floor(share)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_no_field_moves_an_8bit_value(name):
    codes = np.arange(256, dtype=np.uint8).view(DTYPES[name])
    values = to_float(codes)
    if name == "int8":
        codes, values = codes[values > -128], values[values > -128]
    else:
        values = values[np.isfinite(values)]
        codes = codes[np.isfinite(to_float(codes))]
    for first in range(0, 65536, 4096):
        fields = np.arange(first, first + 4096)
        spread = np.broadcast_to(values, (4096, len(values)))
        kept = stochastic_round(spread, np.broadcast_to(fields[:, None], spread.shape), name)
        np.testing.assert_array_equal(
            kept.view(np.uint8), np.broadcast_to(codes, spread.shape).view(np.uint8)
        )


@pytest.mark.parametrize("name", HALVES)
def test_no_field_moves_a_16bit_value(name):
    patterns = np.arange(65536, dtype=np.uint16)
    values = patterns.view(DTYPES[name])
    expected = patterns.copy()
    expected[np.isnan(to_float(values))] = 0x7FFF
    if name == "bfloat16":
        # The subnormal numbers of bfloat16 are those of fp32: zero.
        subnormal = (patterns & 0x7FFF) < 0x80
        expected[subnormal] &= 0x8000
    # Rounding is monotone in the field, so the ends speak for all; two more for good measure.
    last = 2 ** FLOATS[name][2] - 1
    with np.errstate(invalid="ignore"):
        wide = to_float(values)
    for field in (0, 1, last // 3, last):
        kept = stochastic_round(wide, np.full(65536, field), name)
        np.testing.assert_array_equal(kept.view(np.uint16), expected)


@pytest.mark.parametrize("name", FLOATS)
def test_stochastic_rounding_equals_exact_arithmetic(name):
    rng = np.random.default_rng(5)
    mantissa, smallest, field_bits, largest, _ = FLOATS[name]
    low = max(127 + smallest - mantissa - 8, 0)
    high = min(127 + math.frexp(largest)[1] + 2, 255)
    magnitude = rng.integers(low << 23, high << 23, 1 << 20, dtype=np.uint32)
    anything = rng.integers(0, 255 << 23, 1 << 18, dtype=np.uint32)
    x = np.concatenate([magnitude, anything])
    x = (x | rng.integers(0, 2, x.shape, dtype=np.uint32) << 31).view(np.float32)
    field = rng.integers(0, 2**field_bits, x.shape)
    rounded = to_float(stochastic_round(x, field, name))
    expected = expected_round(x, field, name)
    np.testing.assert_array_equal(rounded.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(x))


def test_stochastic_rounding_of_int8_is_the_floor_of_an_fp32_sum():
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-130, 130, 1 << 18), rng.normal(0, 1e-3, 1 << 16)])
    x = x.astype(np.float32)
    field = rng.integers(0, 65536, x.shape)
    total = (x.astype(np.float64) + field / 65536).astype(np.float32)
    expected = np.clip(np.floor(total.astype(np.float64)), -127, 127)
    np.testing.assert_array_equal(stochastic_round(x, field, "int8"), expected)


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("last", [False, True])
def test_stochastic_rounding_of_specials(name, last):
    tiny = np.float32(1e-39)
    x = np.array([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38])
    bits_of = 16 if name == "int8" else FLOATS[name][2]
    field = np.full(x.shape, 2**bits_of - 1 if last else 0)
    got = stochastic_round(x.astype(np.float32), field, name)
    assert got.dtype == DTYPES[name]
    if name == "int8":
        assert got.tolist() == [0, 0, 0, 0, 127, -127, 0, 0, 127, -127]
        return
    codes = got.view(np.uint8 if name == "float8_e4m3fn" else np.uint16).tolist()
    sign = 0x80 if name == "float8_e4m3fn" else 0x8000
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7E}[name]
    nan = 0x7F if name == "float8_e4m3fn" else 0x7FFF
    assert codes[:8] == [0, sign, 0, sign, infinity, sign | infinity, nan, nan]
    # 3.4e38 lies in the last cell of bfloat16: only a large field lifts it to inf.
    huge = 0x7F7F if name == "bfloat16" and not last else infinity
    assert codes[8:] == [huge, sign | huge]


def test_stochastic_rounding_where_the_formats_end():
    cases = {
        "float16": [(65504, 8191, 65504), (65519, 8191, math.inf), (65519, 0, 65504)],
        "float8_e4m3fn": [(448, 65535, 448), (479, 0, 448), (479, 65535, 448), (1e9, 0, 448)],
        "int8": [(126.5, 65535, 127), (127.0, 65535, 127), (127.5, 65535, 127), (-500, 0, -127)],
    }
    for name, rows in cases.items():
        for x, field, expected in rows:
            assert float(stochastic_round(np.float32(x), field, name)) == expected
    # Deep below the smallest subnormal the field cannot lift anything.
    assert float(stochastic_round(np.float32(2**-24 * 2**-13), 8191, "float16")) == 2**-24
    assert float(stochastic_round(np.float32(2**-24 * 2**-14), 8191, "float16")) == 0
    assert float(stochastic_round(np.float32(2**-9 * 2**-16), 65535, "float8_e4m3fn")) == 2**-9
    assert float(stochastic_round(np.float32(2**-9 * 2**-17), 65535, "float8_e4m3fn")) == 0
    with pytest.raises(ValueError, match="'float32'"):
        stochastic_round(np.zeros(1, np.float32), np.zeros(1), "float32")


# --- 8-bit states --------------------------------------------------------------------------------


def e4m3_by_ml_dtypes(x: np.ndarray) -> np.ndarray:
    """Codes of the saturating conversion; the one NaN is 0x7f."""
    codes = np.clip(x, -448, 448).astype(DTYPES["float8_e4m3fn"]).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, codes)


def fp32_patterns() -> Iterator[np.ndarray]:
    """fp32 values of all kinds, NaN as the quiet one."""
    if os.environ.get("REPLAYSSM_FULL_SWEEP") == "1":
        step, size = 97, 1 << 22
        chunks = (
            np.arange(i, min(i + step * size, 2**32), step) for i in range(0, 2**32, step * size)
        )
    else:
        rng = np.random.default_rng(7)
        chunks = (rng.integers(0, 2**32, 1 << 21) for _ in range(2))
    for chunk in chunks:
        patterns = chunk.astype(np.uint32)
        nan = (patterns & 0x7FFFFFFF) > 0x7F800000
        yield np.where(nan, np.uint32(0x7FC00000), patterns).view(np.float32)


def test_e4m3_equals_ml_dtypes():
    for x in (to_float(all_halves("bfloat16")), *fp32_patterns()):
        codes = round_to_code(x, "float8_e4m3fn")
        assert codes.dtype == DTYPES["float8_e4m3fn"]
        np.testing.assert_array_equal(codes.view(np.uint8), e4m3_by_ml_dtypes(x))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_codes_at_ties_and_beside_them(name):
    codes = np.arange(256, dtype=np.uint8).view(DTYPES[name])
    values = np.unique(to_float(codes)[np.isfinite(to_float(codes))])
    if name == "int8":
        values = values[1:]
    ties = (values[:-1] + values[1:]) / 2
    x = np.concatenate(
        [np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))]
    )
    expected = np.concatenate([values[:-1], values[1:]])
    np.testing.assert_array_equal(to_float(round_to_code(x, name)), expected)
    at = round_to_code(ties, name)
    assert (at.view(np.uint8) % 2 == 0).all()
    assert np.abs(to_float(at) - ties).max() == np.diff(values).max() / 2


def test_codes_of_specials():
    x = np.array([np.inf, -np.inf, np.nan, 1e9, -1e9, -0.0, 127.5, -128, 464, -1e-39], np.float32)
    assert round_to_code(x, "int8").tolist() == [127, -127, 0, 127, -127, 0, 127, -127, 127, 0]
    codes = round_to_code(x, "float8_e4m3fn").view(np.uint8)
    assert codes[:6].tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0xFE, 0x80]
    assert codes[6:].tolist() == [0x70, 0xF0, 0x7E, 0x80]
    for function in (round_to_code, encode_state):
        with pytest.raises(ValueError, match="state_dtype: expected one of int8, float8_e4m3fn"):
            function(x, "bfloat16")


def test_decode_of_every_code():
    patterns = np.arange(256)
    sign, exponent, mantissa = patterns >> 7, patterns >> 3 & 15, patterns & 7
    units = np.where(exponent > 0, 8 + mantissa, mantissa)
    e4m3 = np.ldexp(1.0, np.maximum(exponent, 1) - 10) * units
    e4m3 = np.where(patterns % 128 == 127, np.nan, np.where(sign == 1, -e4m3, e4m3))
    scales = np.array([1, 0.1, 2.0**-117, 3e35, 1 / 3], np.float32)
    for name, values in (("int8", patterns.astype(np.int8)), ("float8_e4m3fn", e4m3)):
        codes = np.broadcast_to(patterns.astype(np.uint8).view(DTYPES[name]), (5, 256))
        got = decode_state(codes, scales)
        assert got.dtype == np.float32
        expected = (scales[:, None].astype(np.float64) * values).astype(np.float32)
        np.testing.assert_array_equal(got, expected)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))
    assert np.isnan(decode_state(np.zeros(4, np.int8), np.float32(np.nan))).all()
    # fp32 subnormals count as zero: a foreign scale, and a product.
    subnormal = decode_state(np.full((2, 1), 100, np.int8), np.array([1e-39, 1e-41], np.float32))
    assert subnormal.tolist() == [[0], [0]]
    smallest = np.array([1, 0x81], np.uint8).view(DTYPES["float8_e4m3fn"])
    assert decode_state(smallest, np.float32(2**-117)).tolist() == [2**-126, -(2**-126)]
    assert decode_state(smallest, np.float32(2**-118)).tolist() == [0, 0]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_encode_of_ordinary_rows(name):
    rng = np.random.default_rng(8)
    S = (rng.normal(size=(3, 40, 64)) * 10.0 ** rng.uniform(-9, 9, (3, 40, 1))).astype(np.float32)
    codes, scale = encode_state(S, name)
    assert (codes.shape, codes.dtype, scale.shape) == (S.shape, DTYPES[name], (3, 40))
    # The same formula one row at a time, in fp32 scalars.
    for i in np.ndindex(3, 40):
        enc = np.float32(EIGHT_BITS[name]) / np.abs(S[i]).max()
        assert scale[i] == np.float32(1) / enc
        v = np.clip(S[i] * enc, -EIGHT_BITS[name], EIGHT_BITS[name])
        nearest = np.rint(v) if name == "int8" else to_float(v.astype(DTYPES[name]))
        np.testing.assert_array_equal(to_float(codes[i]), nearest)
    # The largest magnitude is the largest code, and encoding again changes nothing.
    np.testing.assert_array_equal(np.abs(to_float(codes)).max(axis=-1), EIGHT_BITS[name])
    again, _ = encode_state(decode_state(codes, scale), name)
    np.testing.assert_array_equal(bits(again), bits(codes))


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("noise", [False, True])
def test_every_bfloat16_value_as_the_largest_of_a_row(name, noise):
    top = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(DTYPES["bfloat16"]).astype(np.float32)
    parts = np.array([1, -1, 0.75, -0.5, 1 / 3, 0.01, -1e-4, 1e-20, 0], np.float32)
    S = top[:, None] * parts
    field = np.random.default_rng(9).integers(0, 65536, S.shape) if noise else None
    codes, scale = encode_state(S, name, field)
    got = decode_state(codes, scale)
    assert np.isfinite(got).all()
    smallest, largest = np.float32(2**-126), np.finfo(np.float32).max
    assert ((scale >= np.float32(2**-117)) & (scale < largest)).all()
    # In units of the scale: a cell, or half of it without noise.
    exact = S.astype(np.float64) / scale[:, None].astype(np.float64)
    allowed = cell_of(np.minimum(np.abs(exact), EIGHT_BITS[name]), name) * (1 if noise else 0.5)
    # fp32 subnormals count as zero: up to 2**-9 of the smallest scale.
    allowed = allowed * (1 + 1e-6) + smallest / scale[:, None].astype(np.float64)
    error = np.abs(to_float(codes, np.float64) - exact)
    # enc and scale are rounded, so a large code may be off by its last bits.
    assert (error <= allowed + np.abs(exact) * 3e-7).all()


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("noise", [False, True])
def test_encode_of_rows_with_one_documented_outcome(name, noise):
    tiny, huge = np.float32(2**-126), np.nextafter(np.finfo(np.float32).max, np.float32(0))
    below = np.nextafter(tiny, np.float32(0))
    rows = {
        "zero": [0, -0.0, 0, -0.0],
        "subnormal": [below, -below, 1e-45, 0],
        "smallest": [tiny, -tiny, 0, below],
        "tiny": [1e-35, -1e-35, 5e-36, 0],
        "one": [1, 0, 0, -1],
        "huge": [huge, -huge, huge / 2, 1],
        "nan": [1, np.nan, 2, 3],
        "inf": [1, np.inf, 2, 3],
        "both": [-np.inf, np.nan, 0, huge],
    }
    S = np.array(list(rows.values()), np.float32)
    field = np.full(S.shape, 65535) if noise else None
    codes, scale = encode_state(S, name, field)
    decoded = decode_state(codes, scale)
    row = {key: i for i, key in enumerate(rows)}
    for key in ("zero", "subnormal"):
        assert (bits(codes[row[key]]) == 0).all()
        assert scale[row[key]] == 1
        assert (decoded[row[key]] == 0).all()
    for key in ("nan", "inf", "both"):
        assert (bits(codes[row[key]]) == 0).all()
        assert np.isnan(scale[row[key]])
        assert np.isnan(decoded[row[key]]).all()
    finite = decoded[: row["nan"]]
    assert np.isfinite(finite).all()
    floor = np.float32(2**-117)
    assert scale[row["smallest"]] == scale[row["tiny"]] == floor
    last = EIGHT_BITS[name]
    assert to_float(codes[row["huge"]])[:2].tolist() == [last, -last]
    np.testing.assert_allclose(finite[row["huge"]][:2], S[row["huge"]][:2], rtol=3e-7)
    assert to_float(codes[row["one"]]).tolist() == [last, 0, 0, -last]
    if not noise:
        smallest = [2**-9, -(2**-9)] if name == "float8_e4m3fn" else [0, 0]
        assert to_float(codes[row["smallest"]]).tolist() == [*smallest, 0, 0]


def test_int8_values_need_no_bounds_once_they_are_scaled():
    """The kernels round them without: a row's largest is 127 or the next number."""
    significands = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    for power in (-126, -117, -110, -1, 0, 60, 126):
        amax = significands * np.float32(2.0**power)
        scaled = amax * (np.float32(127) / np.maximum(amax, np.float32(127 * 2.0**-117)))
        assert scaled.max() <= np.nextafter(np.float32(127), np.float32(128))


# 127 * fp32(1 / fp32(127 / max)) would be one unit above max; no other row overflows.
@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_the_largest_fp32_number_stays_finite(name):
    codes, scale = encode_state(np.full(16, np.finfo(np.float32).max), name)
    assert np.isfinite(decode_state(codes, scale)).all()


# --- Noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STOCHASTIC)
def test_rounding_is_unbiased(name):
    n, dstate = 1 << 20, 128
    rng = np.random.default_rng(10)
    S = (rng.normal(size=(n // dstate, dstate)) * 3).astype(np.float32)
    fields = row_fields(np.arange(0, n, dstate), 1234, dstate, name)
    if name in EIGHT_BITS:
        codes, scale = encode_state(S, name, fields)
        residual = to_float(codes, np.float64) * scale[:, None] - S
        units = scale[:, None] * cell_of(S / scale[:, None], name)
    else:
        residual = to_float(stochastic_round(S, fields, name), np.float64) - S
        units = cell_of(S, name)
    residual = residual / units
    # One cell, but for the rounding of enc and scale.
    assert np.abs(residual).max() < 1 + 1e-4
    deviation = float(residual.std())
    # sqrt(f (1 - f)) is 0.41 over evenly spread fractions of a cell.
    assert 0.38 < deviation < 0.43
    error = deviation / math.sqrt(n)
    assert abs(float(residual.mean())) < 4 * error
    for positive in (S > 0, S < 0):
        assert abs(float(residual[positive].mean())) < 4 * deviation / math.sqrt(positive.sum())


def test_fields_are_uniform_and_independent_within_a_group():
    n = 1 << 16
    words = philox4x32(np.arange(n) * 16, 99)
    for name in STOCHASTIC:
        fields = random_fields(words, name)
        width = 13 if name == "float16" else 16
        for bit in range(width):
            share = (fields >> bit & 1).mean(axis=0)
            # 4.5 standard errors: there are 600 such shares.
            assert np.abs(share - 0.5).max() < 4.5 * 0.5 / math.sqrt(n)
        correlation = np.corrcoef(fields.T.astype(np.float64))
        others = correlation[~np.eye(len(correlation), dtype=bool)]
        # A field and its reverse have 16 * 2**15 * 3 / 2**32 = 0.0004, which is not seen here.
        assert np.abs(others).max() < 4.5 / math.sqrt(n)


def test_noise_of_heads_slots_layers_and_events_is_uncorrelated():
    n, head, slot = 1 << 18, 64 * 128, 64 * 64 * 128
    rows = np.arange(0, n, 128)

    def noise(offset: int, seed: int) -> np.ndarray:
        return row_fields(rows + offset, seed, 128, "int8").reshape(-1).astype(np.float64)

    base = noise(0, 1)
    others = {
        "head": noise(n + head, 1),
        "slot": noise(10000 * slot, 1),
        "far slot": noise(2**32, 1),
        "event": noise(0, 2),
        "high bits of the seed": noise(0, 1 + 2**32),
        "layer 0": noise(0, int(mix_seed(1, 0))),
        "layer 1": noise(0, int(mix_seed(1, 1))),
        "layer 1 of the next event": noise(0, int(mix_seed(2, 1))),
    }
    streams = np.stack([base, *others.values()])
    correlation = np.corrcoef(streams) - np.eye(len(streams))
    # 4.5 standard errors: there are 36 pairs, and the reversed columns widen them a little.
    assert np.abs(correlation).max() < 4.5 / math.sqrt(n)
    np.testing.assert_array_equal(base, noise(0, 1))


def test_repeated_rounding_has_the_value_as_its_mean():
    # One row through many events: what a long decode sees.
    S = np.array([0.3, -0.3, 1.7, -1.7, 100.25, 0.001, -0.001, 127], np.float32)
    events = np.arange(1 << 14)
    for name, largest in EIGHT_BITS.items():
        row = S * np.float32(largest / 127)
        fields = row_fields(np.full(len(events), 4096), events, 8, name)
        codes, scale = encode_state(np.broadcast_to(row, fields.shape), name, fields)
        residual = decode_state(codes, scale).astype(np.float64) - row
        limit = 4 * residual.std(axis=0) / math.sqrt(len(events)) + 1e-5
        assert (np.abs(residual.mean(axis=0)) < limit).all()
