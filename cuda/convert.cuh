// Numeric conversions and the elementwise functions of the layer. Mirrors
// replayssm_cupy/numerics.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "params.cuh"
#include "ptx.cuh"

using bf16 = __nv_bfloat16;
using fp16 = __half;
using int8 = signed char;
using e4m3 = __nv_fp8_e4m3;
struct e2m1 {};  // two codes in a byte

namespace convert {

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(fp16 v) { return __half2float(v); }

// Nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float v) {
  return __float2half_rn(v);
}

__device__ __forceinline__ float load_float(const void* array, int64_t index, int type) {
  if (type == kFloat32) return static_cast<const float*>(array)[index];
  if (type == kBfloat16) return to_float(static_cast<const bf16*>(array)[index]);
  return to_float(static_cast<const fp16*>(array)[index]);
}

__device__ __forceinline__ void store_float(void* array, int64_t index, int type, float v) {
  if (type == kFloat32) {
    static_cast<float*>(array)[index] = v;
  } else if (type == kBfloat16) {
    static_cast<bf16*>(array)[index] = from_float<bf16>(v);
  } else {
    static_cast<fp16*>(array)[index] = from_float<fp16>(v);
  }
}

__device__ __forceinline__ int64_t load_index(const void* array, int64_t index, int type) {
  if (type == kInt32) return static_cast<const int*>(array)[index];
  return static_cast<const int64_t*>(array)[index];
}

// Two 16-bit values share a register, the lower index in the lower half.
template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<bf16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack<fp16>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <class T>
__device__ __forceinline__ uint32_t pack(float2 v);
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float2 v) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
  return reinterpret_cast<const uint32_t&>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<fp16>(float2 v) {
  const __half2 pair = __floats2half2_rn(v.x, v.y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// v = sum of the terms: two bf16 terms keep 16 bits of a float, three keep all 24.
template <int kTerms>
__device__ __forceinline__ void split(float2 v, uint32_t (&terms)[kTerms]) {
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    terms[i] = pack<bf16>(v);
    const float2 rounded = unpack<bf16>(terms[i]);
    v = make_float2(v.x - rounded.x, v.y - rounded.y);
  }
}

// A value as it lies in memory, and what it means: apart, so that no load waits for another. A word
// that is not loaded is 0. In a single one a load that is left out would wait for the other.
struct Bits {
  uint32_t wide, narrow;
};
__device__ __forceinline__ Bits load_bits(const void* value, bool wide, bool narrow) {
  return {ptx::ld_global_u32_if(wide, value), ptx::ld_global_u16_if(narrow, value)};
}
__device__ __forceinline__ float bits_to_float(const Bits& bits, int type) {
  const float from_bf16 = unpack<bf16>(bits.narrow).x, from_fp16 = unpack<fp16>(bits.narrow).x;
  return type == kFloat32 ? __uint_as_float(bits.wide) : type == kBfloat16 ? from_bf16 : from_fp16;
}

constexpr float kLog2e = 1.4426950408889634f;

// log(1 + exp(v)) as max(v, 0) + log(1 + e) with e = exp(-|v|), within 4e-7 of itself. The power of
// two is taken in two terms; the logarithm is 2 atanh(s) with s = e / (2 + e), an odd polynomial:
// no small result is lost. Infinities and NaN are what they are for the exact function.
__device__ __forceinline__ float softplus(float v) {
  constexpr float kRest = 1.92596299e-8f, kLog2 = 0.69314718f;  // of log2(e), which is longer
  const float magnitude = fminf(fabsf(v), 128.0f), power = -kLog2e * magnitude;
  const float lost = fmaf(-kRest, magnitude, fmaf(-kLog2e, magnitude, -power));
  float e = ptx::ex2(power);
  e = fmaf(e, kLog2 * lost, e);
  const float s = __fdividef(e, 2.0f + e), u = s * s;
  float p = fmaf(u, 0.28024462f, 0.27999142f);
  p = fmaf(u, p, 0.40021700f), p = fmaf(u, p, 0.66666411f), p = fmaf(u, p, 2.0f);
  return fmaf(s, p, v < 0.0f ? 0.0f : v);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// ---- 8-bit states: a row of codes with one fp32 decode scale ------------------------------------

template <class State>
constexpr bool kScaled = sizeof(State) == 1;

template <>
__device__ __forceinline__ float2 unpack<int8>(uint32_t codes) {
  return make_float2(static_cast<float>(static_cast<int8>(codes & 0xffu)),
                     static_cast<float>(static_cast<int8>(codes >> 8 & 0xffu)));
}
__device__ __forceinline__ uint32_t minus_1152(uint32_t pair) {
  const __half2 difference =
      __hsub2(reinterpret_cast<const __half2&>(pair), __half2half2(__half(1152.0f)));
  return reinterpret_cast<const uint32_t&>(difference);
}
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  const __half2 product =
      __hmul2_rn(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}
template <>
__device__ __forceinline__ float2 unpack<e4m3>(uint32_t codes) {
  const __nv_fp8x2_storage_t pair = static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu);
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}

// Four codes as fp16, exactly.
template <class State>
__device__ __forceinline__ void codes_to_half(uint32_t codes, uint32_t& low, uint32_t& high);
template <>
__device__ __forceinline__ void codes_to_half<e4m3>(uint32_t codes, uint32_t& low, uint32_t& high) {
  if constexpr (ptx::kHasE4m3Cvt) {
    ptx::cvt_f16x2_e4m3x2(low, high, codes);
  } else {
    const float2 a = unpack<e4m3>(codes), b = unpack<e4m3>(codes >> 16);
    low = pack<fp16>(a), high = pack<fp16>(b);
  }
}
template <>
__device__ __forceinline__ void codes_to_half<int8>(uint32_t codes, uint32_t& low, uint32_t& high) {
  // The half 0x6400 | u is 1024 + u: with u = code + 128 it is the code and 1152.
  const uint32_t biased = codes ^ 0x80808080u;
  low = minus_1152(__byte_perm(biased, 0x64646464u, 0x4140));
  high = minus_1152(__byte_perm(biased, 0x64646464u, 0x4342));
}

// Pairs `q` and q + 1 of a 16-byte piece of state as operands of a product of 16-bit values; q is
// even.
template <class State>
__device__ __forceinline__ void operands(const uint4& piece, int q, uint32_t& first,
                                         uint32_t& second) {
  const uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
  if constexpr (kScaled<State>) {
    codes_to_half<State>(word[q / 2], first, second);
  } else {
    first = word[q], second = word[q + 1];
  }
}

// Added to a float of magnitude below 2^22, this leaves the integer nearest to it in the low bits:
// one instruction, where conversions run at a quarter of the rate.
constexpr float kIntegers = 0x1.8p23f;

// How a row of largest magnitude `amax` is stored. A row of zeros or subnormals stores zeros with
// scale 1; one with a NaN or an infinity stores zeros with scale NaN, which stays visible. The
// floor keeps the decode scale a normal number, the bound the largest code finite.
struct RowScale {
  float encode, decode;
  __device__ __forceinline__ float2 scaled(float2 v) const {
    return make_float2(__fmul_rn(v.x, encode), __fmul_rn(v.y, encode));
  }
  // Four codes of scaled values: all of them are 0 in a row that stores zeros.
  __device__ __forceinline__ uint32_t stored(uint32_t codes) const {
    return encode == 0.0f ? 0u : codes;
  }
};

// a / b as a division rounds it, for positive numbers whose quotient is a normal one. It divides by
// the mantissa of b, where no step can overflow, so that it needs no branch for what could.
__device__ __forceinline__ float quotient(float a, float b) {
  const uint32_t bits = __float_as_uint(b), exponent = bits & 0x7f800000u;
  const float m = __uint_as_float(bits - exponent + 0x3f800000u);
  float r = ptx::rcp(m);
  r = fmaf(fmaf(-m, r, 1.0f), r, r);
  const float q = __fmul_rn(a, r);
  return __uint_as_float(__float_as_uint(fmaf(fmaf(-m, q, a), r, q)) - exponent + 0x3f800000u);
}

template <class State>
__device__ __forceinline__ RowScale row_scale(float amax) {
  constexpr float kLargest = same<State, int8> ? 127.0f : same<State, e2m1> ? 2688.0f : 448.0f;
  const uint32_t amax_bits = __float_as_uint(amax);  // of a number that is not negative
  const float encode = quotient(kLargest, fmaxf(amax, kLargest * 0x1p-117f));
  float decode = quotient(1.0f, encode);
  if (same<State, int8>) decode = fminf(decode, __uint_as_float(0x7c010203u));
  const bool finite = amax_bits < 0x7f800000u, kept = finite && amax_bits >= 0x00800000u;
  return {kept ? encode : 0.0f, kept ? decode : finite ? 1.0f : __uint_as_float(0x7fc00000u)};
}

// ---- stochastic rounding ------------------------------------------------------------------------

// Philox-4x32: four random words of a 64-bit counter and a 64-bit key.
__device__ __forceinline__ uint4 philox4x32(uint64_t offset, uint64_t seed, int rounds) {
  uint4 c = make_uint4(static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0, 0);
  uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c.x, b = uint64_t{0xCD9E8D57u} * c.z;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ low, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ c.w ^ high, static_cast<uint32_t>(a));
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return c;
}

// The seed of a layer: the SplitMix64 finaliser keeps the layers' noise apart.
__device__ __forceinline__ uint64_t mix_seed(uint64_t seed, int layer) {
  uint64_t v = seed ^ uint64_t{0x9E3779B97F4A7C15u} * (layer + 1);
  v = (v ^ v >> 30) * uint64_t{0xBF58476D1CE4E5B9u};
  v = (v ^ v >> 27) * uint64_t{0x94D049BB133111EBu};
  return v ^ v >> 31;
}

// The magnitude of a finite `v` in a format of kMantissa stored bits whose normal numbers begin at
// the fp32 exponent kFirstNormal: the top kField of the bits to discard are added to, then cut.
template <int kMantissa, int kFirstNormal, int kField>
__device__ __forceinline__ uint32_t round_magnitude(uint32_t magnitude, uint32_t field) {
  const int exponent = static_cast<int>(magnitude >> 23);
  if (exponent == 0) return 0;
  // Under the first normal number one more bit is dropped per binade, all 24 in the end.
  const int dropped = min(23 - kMantissa - kField + max(kFirstNormal - exponent, 0), 24);
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = ((significand >> dropped) + field) >> kField;
  return (static_cast<uint32_t>(max(exponent - kFirstNormal, 0)) << kMantissa) + kept;
}

template <class T>
__device__ __forceinline__ uint32_t round_stochastically(float v, uint32_t field);
template <>
__device__ __forceinline__ uint32_t round_stochastically<bf16>(float v, uint32_t field) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  const uint32_t rounded =
      magnitude == 0x7f800000u ? 0x7f80u : round_magnitude<7, 1, 16>(magnitude, field);
  return rounded | (bits >> 16 & 0x8000u);
}
template <>
__device__ __forceinline__ uint32_t round_stochastically<fp16>(float v, uint32_t field) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  const uint32_t rounded = round_magnitude<10, 113, 13>(magnitude, field & 0x1fffu);
  return min(rounded, 0x7c00u) | (bits >> 16 & 0x8000u);
}
template <>
__device__ __forceinline__ uint32_t round_stochastically<e4m3>(float v, uint32_t field) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  return min(round_magnitude<3, 121, 16>(magnitude, field), 0x7eu) | (bits >> 24 & 0x80u);
}
template <>
__device__ __forceinline__ uint32_t round_stochastically<int8>(float v, uint32_t field) {
  const float below_1 = __uint_as_float(0x3f800000u | field << 7) - 1.0f;  // field / 2^16, exactly
  const float bounded = fminf(fmaxf(v, -127.0f), 127.0f);
  return __float_as_uint(__fadd_rd(bounded + below_1, kIntegers)) & 0xffu;  // the floor
}

// A pair of 16-bit values with the two fields of one random word.
template <class T>
__device__ __forceinline__ uint32_t pack_stochastically(float2 v, uint32_t word) {
  if constexpr (ptx::kHasStochasticCvt) {
    return same<T, bf16> ? ptx::cvt_rs_bf16x2(v.x, v.y, word) : ptx::cvt_rs_f16x2(v.x, v.y, word);
  } else {
    return round_stochastically<T>(v.x, word & 0xffffu) | round_stochastically<T>(v.y, word >> 16)
                                                              << 16;
  }
}

// Four codes of scaled values; a random word serves all four, halves straight and bit-reversed.
template <class T>
__device__ __forceinline__ uint32_t pack_codes_stochastically(float2 a, float2 b, uint32_t word) {
  if constexpr (ptx::kHasStochasticCvt && same<T, e4m3>) {
    return ptx::cvt_rs_e4m3x4(a.x, a.y, b.x, b.y, word);
  } else {
    const uint32_t reversed = __brev(word);  // the high half of `reversed` is the low half of word
    return round_stochastically<T>(a.x, word & 0xffffu) |
           round_stochastically<T>(a.y, reversed >> 16) << 8 |
           round_stochastically<T>(b.x, word >> 16) << 16 |
           round_stochastically<T>(b.y, reversed & 0xffffu) << 24;
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack_codes(float2 a, float2 b);
// No bounds: a row's values times its encode scale are at most 127 (1 + 2^-23).
template <>
__device__ __forceinline__ uint32_t pack_codes<int8>(float2 a, float2 b) {
  const uint32_t v[4] = {__float_as_uint(a.x + kIntegers), __float_as_uint(a.y + kIntegers),
                         __float_as_uint(b.x + kIntegers), __float_as_uint(b.y + kIntegers)};
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}
template <>
__device__ __forceinline__ uint32_t pack_codes<e4m3>(float2 a, float2 b) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3);
  return low | static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// ---- e2m1: blocks of 16 codes with an e4m3 scale ------------------------------------------------

// Eight codes share a word: byte i holds code i below and code i + 4 above.

// Codes as fp16 times 2^-14, exactly: their bits are the upper ones of a half with the same sign.
__device__ __forceinline__ void unpack_e2m1(uint32_t codes, uint32_t (&pairs)[4]) {
  const uint32_t first = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
  const uint32_t second = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
  pairs[0] = __byte_perm(first, 0, 0x1404), pairs[1] = __byte_perm(first, 0, 0x3424);
  pairs[2] = __byte_perm(second, 0, 0x1404), pairs[3] = __byte_perm(second, 0, 0x3424);
}

// A block's scale times 2^7 as a pair of halves, exactly.
__device__ __forceinline__ uint32_t block_scale_pair(uint32_t scale) {
  const uint32_t below = scale * 0x00800080u;  // times 2^-8: the bits of e4m3 in fp16's places
  return multiply_halves(below, 0x78007800u);
}

// What undoes the two powers of two.
constexpr float kE2m1Unit = 128.0f;

// How a block whose largest magnitude is `amax`, of a row that is scaled already, is stored: an
// e4m3 scale, and what its values are multiplied by.
struct BlockScale {
  uint32_t code;
  float inverse;
};

__device__ __forceinline__ BlockScale block_scale(float amax) {
  const float2 wanted = make_float2(__fmul_rn(amax, 1.0f / 6.0f), 0.0f);
  const uint32_t code = __nv_cvt_float2_to_fp8x2(wanted, __NV_SATFINITE, __NV_E4M3) & 0xffu;
  return {code, code == 0 ? 0.0f : 1.0f / unpack<e4m3>(code).x};
}

// The code of a number: nearest, ties to even, at most 6. The number added leaves steps of half a
// binade, as integers in the low bits.
__device__ __forceinline__ uint32_t round_to_e2m1(float v) {
  const uint32_t bits = __float_as_uint(v);
  const float magnitude = fminf(fabsf(v), 6.0f);
  const uint32_t binade = max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u);
  const uint32_t added = binade + (22u << 23);
  const uint32_t steps = __float_as_uint(__fadd_rn(magnitude, __uint_as_float(added))) - added;
  return (steps + (binade >> 22) - 254u) | (bits >> 28 & 8u);
}

// Eight codes in a word.
__device__ __forceinline__ uint32_t pack_e2m1(const float (&v)[8]) {
  if constexpr (ptx::kHasE2m1Cvt) {
    return ptx::cvt_e2m1x2(v);
  } else {
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= round_to_e2m1(v[i]) << (8 * (i & 3) + (i & 4));
    return codes;
  }
}

}  // namespace convert
