"""The formats of read copies in NumPy: codes, block scales, bytes, and how far they are off."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from replayssm_cupy import read_copy
from replayssm_cupy.numerics import encode_state

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def rows(seed: int, *shape: int) -> np.ndarray:
    """Numbers whose blocks differ in size by many binades."""
    rng = np.random.default_rng(seed)
    blocks = rng.standard_normal((*shape[:-1], shape[-1] // 16, 16))
    blocks *= 2.0 ** rng.integers(-18, 4, blocks.shape[:-1])[..., None]
    return blocks.reshape(shape).astype(np.float32)


def test_codes_are_those_of_e2m1():
    codes = np.arange(16, dtype=np.uint8)
    values = read_copy.e2m1_values(codes)
    assert values[:8].tolist() == E2M1
    assert np.array_equal(values[8:], -values[:8])
    assert np.array_equal(read_copy.round_to_e2m1(values[:8]), codes[:8])
    assert np.array_equal(values, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_rounding_is_that_of_ml_dtypes():
    rng = np.random.default_rng(0)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 1e30], np.float32)
    x = np.concatenate([ties, -ties, np.nextafter(ties, np.float32(0)), rng.normal(0, 3, 4096)])
    x = x.astype(np.float32)
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(read_copy.round_to_e2m1(x), expected)


@pytest.mark.parametrize("dstate", [64, 128, 256])
def test_bound_of_the_error(dstate):
    S = rows(1, 3, 80, dstate)
    codes, blocks, scale = read_copy.encode_e2m1(S)
    error = np.abs(read_copy.decode_e2m1(codes, blocks, scale) - S).reshape(3, 80, -1, 16)
    largest = np.abs(S).reshape(error.shape).max(axis=-1, keepdims=True)
    of_row = np.abs(S).max(axis=-1)[..., None, None]
    assert (error <= 17 / 96 * (1 + 1e-6) * largest + 2.2e-6 * of_row).all()
    assert (error > 0.15 * largest).any()
    # The block of the row's largest number has the largest scale.
    assert (blocks.astype(np.float32).max(axis=-1) == 448).all()


def test_bytes_of_a_slab():
    """Row 16 + 2, column 8 + 5 and its block, found by hand."""
    S = np.zeros((1, 32, 64), np.float32)
    S[0, 18, 13], S[0, 18, 9], S[0, 18, 63] = -3.0, 1.5, 6.0
    copy, scale = read_copy.encode_copy(S, "float16+nvfp4")
    assert copy.shape == (1, 2, 9 * 64)
    assert scale[0, 18] == np.float32(1) / (np.float32(2688) / np.float32(6))
    assert not copy[0, 0].any()
    slab = copy[0, 1]
    # Columns 9 and 13 share byte 1 of the word of columns 8 to 15; the block's largest number is 3.
    assert slab[2 * 32 + 5] == (0b1111 << 4 | 0b0101)
    assert slab[2 * 32 + 31] == 0b0111 << 4
    scales = slab[16 * 32 :].view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(16, 4)
    assert scales[2].tolist() == [224, 0, 0, 448]
    assert not np.delete(scales, 2, axis=0).any()
    assert np.count_nonzero(slab[: 16 * 32]) == 2
    assert np.allclose(read_copy.decode_copy(copy, scale, "float16+nvfp4"), S, rtol=1e-6)


def test_an_8_bit_copy_is_an_8_bit_state():
    S = rows(2, 2, 64, 128)
    for got, expected in zip(
        read_copy.encode_copy(S, "float16+fp8"), encode_state(S, "float8_e4m3fn"), strict=True
    ):
        assert got.dtype == expected.dtype
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("state_format", ["float16+fp8", "float16+nvfp4"])
def test_rows_with_an_outcome_of_their_own(state_format):
    S = np.zeros((1, 16, 64), np.float32)
    odd = [0.0, 1e-39, np.nan, np.inf, -np.inf, 2.0**-126, 2.0**-110, 1e38]
    for p, value in enumerate(odd):
        S[0, p, 5:9] = value
    with np.errstate(over="ignore", invalid="ignore"):
        copy, scale = read_copy.encode_copy(S, state_format)
        values = read_copy.decode_copy(copy, scale, state_format)
    assert scale[0, 0] == scale[0, 1] == 1
    assert not values[0, :2].any()
    assert np.isnan(values[0, 2:5]).all()
    assert np.isfinite(values[0, 5:]).all()
    assert scale[0, 5] == np.float32(2.0**-117)
    for p in (6, 7):
        assert np.allclose(values[0, p, 5:9], odd[p], rtol=1e-6)
    assert not values[0, 8:].any()
