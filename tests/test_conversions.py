"""The conversions of convert.cuh against numerics.py, bit for bit, on the CPU and on a GPU."""

from __future__ import annotations

import ctypes
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

from replayssm_cupy import compiler, numerics, read_copy

PROBE = pathlib.Path(__file__).parent / "probe" / "convert_probe.cu"
CPP = {"bfloat16": "bf16", "float16": "fp16", "int8": "int8", "float8_e4m3fn": "e4m3"}
FIELD_BITS = {"bfloat16": 16, "float16": 13, "int8": 16, "float8_e4m3fn": 16}
# Every 97th pattern of fp32, 44.3 million, on a GPU; fewer on the CPU unless asked for.
STEP = {"cuda": 97, "host": 97 if os.environ.get("REPLAYSSM_FULL_SWEEP") else 9_700_003}


class ProbeParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("field", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    ]


def probe(backend, name: str, x, field, per_value: int = 1) -> np.ndarray:
    """Runs one probe kernel over x and field; uint32."""
    count = max(np.size(x), np.size(field)) // (2 if per_value > 1 else 1)
    x = np.ascontiguousarray(np.broadcast_to(x, count * (2 if per_value > 1 else 1)), np.float32)
    field = np.ascontiguousarray(np.broadcast_to(field, x.shape), np.uint32)
    return run_probe(backend, name, x, field, count, count * per_value)


def run_probe(backend, name: str, x, field, count: int, outputs: int) -> np.ndarray:
    """Runs one probe kernel `count` times; uint32."""
    out = np.zeros(outputs, np.uint32)
    if backend.name == "host":
        record = ProbeParams(x.ctypes.data, field.ctypes.data, out.ctypes.data, count)
        backend.launcher.run(str(PROBE), name, (8, 1, 1), (128, 1, 1), 0, record)
        return out
    import cupy

    arrays = [cupy.asarray(array) for array in (x, field, out)]
    options = (*compiler._options(), f"-I{PROBE.parent}")
    module = cupy.RawModule(code=PROBE.read_text(), options=options, name_expressions=[name])
    record = ProbeParams(*(array.data.ptr for array in arrays), count)
    parameters = ctypes.c_void_p(ctypes.addressof(record))
    handle = module.get_function(name).kernel.ptr
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.driver.launchKernel(
        handle, 1024, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(parameters), 0
    )
    return cupy.asnumpy(arrays[2])


def as_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8 if array.itemsize == 1 else np.uint16).astype(np.uint32)


def cells(state_dtype: str) -> np.ndarray:
    """Values in every binade of the format, its subnormals and its ends, both signs."""
    exponents = {"bfloat16": range(-126, 128, 9), "float16": range(-27, 17, 2)}
    if state_dtype == "int8":
        base = np.array([0, 2.0**-20, 0.5, 1 - 2.0**-24, 1.25, 63.7, 126.5, 127, 200], np.float32)
    else:
        binades = 2.0 ** np.array(exponents.get(state_dtype, range(-14, 10)), np.float64)
        inside = 1 + np.array([0, 2.0**-23, 0.06, 0.34, 0.4999, 0.77, 1 - 2.0**-23])
        base = np.outer(binades, inside).ravel().astype(np.float32)
    return np.concatenate([base, -base])


@pytest.mark.parametrize("state_dtype", CPP)
def test_every_field_on_a_sweep_of_cells(backend, state_dtype):
    bits = FIELD_BITS[state_dtype] if backend.name == "cuda" else 8
    fields = np.arange(2**bits, dtype=np.uint32) << (FIELD_BITS[state_dtype] - bits)
    for x in cells(state_dtype)[:: 1 if backend.name == "cuda" else 5]:
        expected = numerics.stochastic_round(np.full(fields.shape, x), fields, state_dtype)
        got = probe(backend, f"round_probe<{CPP[state_dtype]}>", x, fields)
        assert np.array_equal(got, as_bits(expected)), x


@pytest.mark.parametrize("state_dtype", CPP)
def test_stochastic_rounding_of_many_patterns(backend, state_dtype):
    patterns = np.arange(0, 2**32, STEP[backend.name], np.uint64).astype(np.uint32)
    x = patterns.view(np.float32)
    fields = (patterns * np.uint32(2654435761)) >> np.uint32(32 - FIELD_BITS[state_dtype])
    with np.errstate(invalid="ignore", over="ignore"):
        expected = numerics.stochastic_round(x, fields, state_dtype)
    if state_dtype == "int8":  # NaN has no code; a row with one never gets here
        keep = ~np.isnan(x)
        x, fields, expected = x[keep], fields[keep], expected[keep]
    got = probe(backend, f"round_probe<{CPP[state_dtype]}>", x, fields)
    assert np.array_equal(got, as_bits(expected))


@pytest.mark.parametrize("state_dtype", ["int8", "float8_e4m3fn"])
def test_nearest_codes_of_many_patterns_and_every_bfloat16(backend, state_dtype):
    patterns = np.arange(0, 2**32, STEP[backend.name], np.uint64).astype(np.uint32)
    every_bf16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.concatenate([patterns.view(np.float32), every_bf16])
    x = x[~np.isnan(x)]
    if state_dtype == "int8":  # a row's scale bounds its values
        x = x[np.abs(x) < 127.5]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = numerics.round_to_code(x, state_dtype)
    got = probe(backend, f"code_probe<{CPP[state_dtype]}>", x, 0)
    assert np.array_equal(got, as_bits(expected))


@pytest.mark.parametrize("state_dtype", ["int8", "float8_e4m3fn"])
def test_value_of_every_code(backend, state_dtype):
    codes = np.arange(256, dtype=np.uint32)
    dtype = np.int8 if state_dtype == "int8" else ml_dtypes.float8_e4m3fn
    expected = codes.astype(np.uint8).view(dtype).astype(np.float32)
    got = probe(backend, f"value_probe<{CPP[state_dtype]}>", 0.0, codes).view(np.float32)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert np.array_equal(got[finite].view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("rounds", [1, 5, 10])
def test_philox(backend, rounds):
    rng = np.random.default_rng(rounds)
    offsets, seeds = (rng.integers(0, 2**64, 4096, np.uint64, endpoint=False) for _ in range(2))
    got = probe(
        backend,
        f"philox_probe<{rounds}>",
        seeds.view(np.uint32).view(np.float32),
        offsets.view(np.uint32),
        per_value=4,
    )
    expected = numerics.philox4x32(offsets, seeds, rounds)
    assert np.array_equal(got.reshape(-1, 4), expected)


# --- Four bits -----------------------------------------------------------------------------------


def test_every_e2m1_code_times_every_block_scale(backend):
    """Products are exact halves, times 2^-7."""
    codes = np.arange(16, dtype=np.uint8)
    scales = np.arange(0x7F, dtype=np.uint8)  # finite ones, which are not negative
    words = codes.astype(np.uint32) * np.uint32(0x11111111)
    scale, word = (a.ravel() for a in np.meshgrid(scales, words, indexing="ij"))
    bits = scale.astype(np.uint32).view(np.float32)
    got = run_probe(backend, "e2m1_value_probe", bits, word, len(word), 4 * len(word))
    got = got.view(np.float16).reshape(len(word), 8)
    expected = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
    expected = (expected * read_copy.e2m1_values(codes)).ravel()[:, None] / 128
    assert np.array_equal(got.astype(np.float32), np.broadcast_to(expected, got.shape))


def words_of(codes: np.ndarray) -> np.ndarray:
    """Eight codes a word: byte i holds column i below and column i + 4 above."""
    plain = codes.astype(np.uint32).reshape(-1, 8)
    return sum(plain[:, i] << (8 * (i % 4) + 4 * (i // 4)) for i in range(8))


def packed(backend, x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32).ravel()
    return run_probe(backend, "e2m1_probe", x, np.zeros(1, np.uint32), len(x) // 8, len(x) // 8)


def test_codes_of_a_word_lie_where_their_columns_are_read(backend):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (512, 8)).astype(np.uint8)
    x = read_copy.e2m1_values(codes)
    assert np.array_equal(packed(backend, np.where(codes == 8, -np.float32(0), x)), words_of(codes))


def test_e2m1_codes_of_many_patterns_and_every_tie(backend):
    patterns = np.arange(0, 2**32, STEP[backend.name], np.uint64).astype(np.uint32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 6.5, 7, 9], np.float32)
    near = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    x = np.concatenate([patterns.view(np.float32), ties, -ties, *near])
    x = x[~np.isnan(x)]
    x = x[: len(x) // 8 * 8]
    assert np.array_equal(packed(backend, x), words_of(read_copy.round_to_e2m1(x)))


def test_block_scales_of_many_patterns(backend):
    patterns = np.arange(0, 0x7F800000, STEP[backend.name] // 8 + 1, np.uint64).astype(np.uint32)
    ends = 6 * 2.0 ** np.arange(-12, -5) * np.array([[1], [1.5], [1 - 2**-24]])
    x = np.concatenate([patterns.view(np.float32), ends.ravel().astype(np.float32)])
    codes = numerics.round_to_code(x * (np.float32(1) / np.float32(6)), "float8_e4m3fn")
    got = probe(backend, "block_scale_probe<false>", x, 0)
    assert np.array_equal(got, as_bits(codes))
    value = codes.astype(np.float32)
    with np.errstate(divide="ignore"):
        expected = np.where(value > 0, np.float32(1) / value, np.float32(0))
    got = probe(backend, "block_scale_probe<true>", x, 0)
    assert np.array_equal(got, expected.view(np.uint32))


@pytest.mark.parametrize(("cpp", "largest"), [("int8", 127), ("e4m3", 448), ("e2m1", 2688)])
def test_row_scales_of_every_mantissa(backend, cpp, largest):
    """Divisions as IEEE 754 rounds them, and what stands in for rows without a scale."""
    mantissas = np.arange(0, 2**23, 1 if backend.name == "cuda" else 2003, np.uint32)
    ends = np.arange(2**23 - 64, 2**23, dtype=np.uint32)  # the hardest quotients
    exponents = np.array([0, 1, 17, 18, 127, 253, 254, 255], np.uint32)
    bits = (exponents[:, None] << 23 | np.concatenate([mantissas, ends])).ravel()
    amax = bits.view(np.float32)
    finite, some = amax <= np.finfo(np.float32).max, amax >= np.finfo(np.float32).tiny
    q = np.float32(largest)
    encode = q / np.maximum(np.where(finite, amax, 1), q * np.float32(2**-117))
    decode = np.float32(1) / encode
    if cpp == "int8":
        decode = np.minimum(decode, np.uint32(0x7C010203).view(np.float32))
    got = probe(backend, f"row_scale_probe<{cpp}, false>", amax, 0)
    assert np.array_equal(got, np.where(finite & some, encode, 0).astype(np.float32).view("u4"))
    got = probe(backend, f"row_scale_probe<{cpp}, true>", amax, 0).view(np.float32)
    expected = np.where(finite, np.where(some, decode, 1), np.nan).astype(np.float32)
    assert np.array_equal(got, expected, equal_nan=True)
