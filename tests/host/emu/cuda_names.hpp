// The CUDA names that kernels use, for the host: qualifiers, index variables, warp collectives,
// atomics, intrinsics.
#pragma once
#include "cuda_emu.hpp"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __noinline__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // blocks run one after another; only ptx::dynamic_smem() starts as NaN
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __noinline__
#define __maxnreg__(...)
#define __grid_constant__

#define threadIdx (::emu::g_thread->index)
#define blockIdx (::emu::g_block->index)
#define blockDim (::emu::g_block->dim)
#define gridDim (::emu::g_block->grid)
constexpr int warpSize = 32;

// -------------------------------------------------------------------------------------- barriers

inline void __syncthreads() { emu::block_barrier(); }
inline void __syncwarp(unsigned mask = ~0u) { emu::meet(mask, "__syncwarp", nullptr, 0); }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __trap() { throw emu::Error("__trap"); }

// ------------------------------------------------------------------------------ warp collectives

namespace emu {

// `source` is a lane, or negative for the caller's own value.
template <class T>
T shuffle(unsigned mask, const char* collective, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move 4 or 8 bytes");
  const Slots slots = meet(mask, collective, &value, sizeof value);
  if (source < 0) return value;
  if (!(mask >> source & 1))
    throw Error(std::string(collective) + " reads lane " + std::to_string(source) +
                ", which is not in its mask");
  std::memcpy(&value, slots[source], sizeof value);
  return value;
}

}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = emu::lane() & ~(width - 1);
  return emu::shuffle(mask, "__shfl_sync", value, first | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int source = emu::lane() ^ lane_mask;
  const bool inside = source < (emu::lane() | (width - 1)) + 1 && source < 32;
  return emu::shuffle(mask, "__shfl_xor_sync", value, inside ? source : -1);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = emu::lane() - int(delta);
  const bool inside = source >= (emu::lane() & ~(width - 1));
  return emu::shuffle(mask, "__shfl_up_sync", value, inside ? source : -1);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int source = emu::lane() + int(delta);
  const bool inside = source <= (emu::lane() | (width - 1));
  return emu::shuffle(mask, "__shfl_down_sync", value, inside ? source : -1);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const unsigned char bit = predicate != 0;
  const emu::Slots slots = emu::meet(mask, "__ballot_sync", &bit, 1);
  unsigned ballot = 0;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) ballot |= unsigned(slots[i][0]) << i;
  return ballot;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
  const emu::Slots slots = emu::meet(mask, "__reduce_add_sync", &value, sizeof value);
  unsigned sum = 0;
  for (unsigned i = 0; i < 32; ++i) {
    unsigned of_lane = 0;
    if (mask >> i & 1) std::memcpy(&of_lane, slots[i], sizeof of_lane);
    sum += of_lane;
  }
  return sum;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

// --------------------------------------------------------------------------------------- atomics

namespace emu {
template <class T, class Update>
T atomic(T* address, Update update) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) throw Error("misaligned atomic");
  const T before = *address;
  *address = update(before);
  return before;
}
}  // namespace emu

template <class T>
T atomicAdd(T* address, T value) {
  return emu::atomic(address, [&](T now) { return T(now + value); });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return emu::atomic(address, [&](unsigned now) { return now >= last ? 0 : now + 1; });
}
template <class T>
T atomicMax(T* address, T value) {
  return emu::atomic(address, [&](T now) { return now < value ? value : now; });
}
template <class T>
T atomicMin(T* address, T value) {
  return emu::atomic(address, [&](T now) { return value < now ? value : now; });
}
template <class T>
T atomicOr(T* address, T value) {
  return emu::atomic(address, [&](T now) { return T(now | value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return emu::atomic(address, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T compare, T value) {
  return emu::atomic(address, [&](T now) { return now == compare ? value : now; });
}

// ------------------------------------------------------------------------------------ intrinsics

namespace emu {
template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emu

inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline int __float2int_rn(float x) { return int(std::nearbyintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {  // where a double holds the sum exactly
  const double sum = double(a) + double(b);
  const float nearest = float(sum);
  return nearest > sum ? std::nextafterf(nearest, -INFINITY) : nearest;
}
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
