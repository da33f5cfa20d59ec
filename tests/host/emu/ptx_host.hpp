// Host twins of the wrappers in cuda/ptx.cuh: same names, same arguments, no inline PTX.
#pragma once
#include "cuda_names.hpp"

namespace ptx {

// ----------------------------------------------------------------------------------- arithmetic

inline float flush_subnormal(float x) {
  return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x;
}
inline float max_magnitude(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : std::fmax(a, std::fabs(b));
}
inline float rcp(float x) { return 1.0f / x; }
inline float ex2(float x) { return flush_subnormal(std::exp2(flush_subnormal(x))); }

// ------------------------------------------------------------------------------------------ mma

using Double4 __attribute__((vector_size(32))) = double;

struct MmaLane {
  float d[4];
  uint32_t a[4], b[2];
};

// D = A(16x16, row) * B(16x8, col) + D with the fragments of the PTX ISA. Products are exact, the
// sum is a double, the result rounds once: close to the hardware, not bit for bit.
template <float (*decode)(uint16_t)>
__attribute__((no_sanitize("address", "undefined"))) void mma_finish(emu::Slots slots) {
  double a[16][16];  // [m][k]
  Double4 b[16][2];  // [k][n]
  for (int lane = 0; lane < 32; ++lane) {
    MmaLane in;
    std::memcpy(&in, slots[lane], sizeof in);
    const int group = lane >> 2, column = 2 * (lane & 3);
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r)
        a[group + 8 * (r & 1)][column + 8 * (r >> 1) + half] = decode(in.a[r] >> 16 * half);
      for (int r = 0; r < 2; ++r)
        b[column + 8 * r + half][group / 4][group % 4] = decode(in.b[r] >> 16 * half);
    }
  }
  for (int m = 0; m < 16; ++m) {
    float d[8];  // one row: two columns in each of four lanes
    for (int t = 0; t < 4; ++t) std::memcpy(d + 2 * t, slots[m % 8 * 4 + t] + m / 8 * 8, 8);
    Double4 sum[2] = {{d[0], d[1], d[2], d[3]}, {d[4], d[5], d[6], d[7]}};
    for (int k = 0; k < 16; ++k) sum[0] += a[m][k] * b[k][0], sum[1] += a[m][k] * b[k][1];
    for (int n = 0; n < 8; ++n) d[n] = float(sum[n / 4][n % 4]);
    for (int t = 0; t < 4; ++t) std::memcpy(slots[m % 8 * 4 + t] + m / 8 * 8, d + 2 * t, 8);
  }
}

template <float (*decode)(uint16_t)>
void mma_m16n8k16(const char* name, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                  uint32_t b1) {
  const MmaLane in = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  std::memcpy(d, emu::meet(~0u, name, &in, sizeof in, mma_finish<decode>)[emu::lane()], sizeof d);
}

inline float decode_bf16(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
inline float decode_f16(uint16_t bits) { return float(emu::bit_cast<_Float16>(bits)); }

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<decode_bf16>("mma.m16n8k16.bf16", d, a, b0, b1);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<decode_f16>("mma.m16n8k16.f16", d, a, b0, b1);
}

inline void mma_m16n8k8_bf16(float (&d)[4], unsigned a0, unsigned a1, unsigned b) {
  mma_m16n8k16_bf16(d, {a0, a1, 0, 0}, b, 0);
}
inline void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned b) {
  mma_m16n8k16_f16(d, {a0, a1, 0, 0}, b, 0);
}

// The 8x8 matrix of 16-bit elements spread over a warp, transposed.
inline uint32_t movmatrix(uint32_t row) {
  const emu::Slots slots = emu::meet(~0u, "movmatrix", &row, sizeof row);
  const int group = emu::lane() >> 2, column = 2 * (emu::lane() & 3);
  uint16_t out[2];
  for (int i = 0; i < 2; ++i)
    std::memcpy(&out[i], slots[(column + i) * 4 + group / 2] + group % 2 * 2, 2);
  return out[0] | uint32_t(out[1]) << 16;
}

// -------------------------------------------------------------------------------- global memory

inline uint32_t ld_global_u32(const void* p) { return *static_cast<const uint32_t*>(p); }
inline uint32_t ld_global_u32_if(bool on, const void* p) { return on ? ld_global_u32(p) : 0; }
inline unsigned ld_global_u16(const void* p) { return *static_cast<const uint16_t*>(p); }
inline unsigned ld_global_u16_if(bool on, const void* p) { return on ? ld_global_u16(p) : 0; }
inline uint2 ld_global_v2(const void* p) { return *static_cast<const uint2*>(p); }
inline uint4 ld_global_v4(const void* p) { return *static_cast<const uint4*>(p); }
inline void st_global_u32(void* p, unsigned v) { *static_cast<unsigned*>(p) = v; }
inline void st_global_u16(void* p, unsigned v) { *static_cast<unsigned short*>(p) = v; }
inline void st_global_v4(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline uint32_t ld_relaxed_gpu_u32(const void* p) { return ld_global_u32(p); }
// A read, so that AddressSanitizer sees where it goes.
inline void prefetch_L2(const void* p) { (void)*static_cast<const volatile unsigned char*>(p); }

// -------------------------------------------------------------------------------- shared memory

using smem_t = unsigned char*;  // a 32-bit shared address on the device
inline smem_t to_smem(const void* p) { return static_cast<smem_t>(const_cast<void*>(p)); }
inline smem_t opaque(smem_t v) { return v; }
inline unsigned opaque(unsigned v) { return v; }
template <class T>
inline T* kept(T* p) {
  return p;
}
inline int atomic_count_shared(smem_t address) {
  return emu::lane() == 0 ? atomicAdd(reinterpret_cast<int*>(address), 1) : 0;
}
inline unsigned atomic_count_global(unsigned* address, unsigned last) {
  return emu::lane() == 0 ? atomicInc(address, last) : 0;
}
inline unsigned load_shared4(const void* p) { return *static_cast<const unsigned*>(p); }
inline uint4 load_shared16(smem_t address) { return *reinterpret_cast<const uint4*>(address); }
inline void store_keep16(void* to, uint4 v) { *static_cast<uint4*>(to) = v; }
inline unsigned char* dynamic_smem() { return emu::g_block->shared; }

template <class Rare>
inline void aside(Rare rare) {
  rare();
}
inline unsigned zero_of_lane() { return 0; }
inline unsigned zero_behind(unsigned bits) { return bits & zero_of_lane(); }
inline void keep_order() {}
inline long long mul_wide(int a, int b) { return static_cast<long long>(a) * b; }
inline const unsigned char* mad_wide(unsigned a, unsigned b, const unsigned char* p) {
  return p + uint64_t{a} * b;
}
inline float cvt_f32_f64(double v) { return static_cast<float>(v); }
template <class T>
inline T* computed_now(T* p) {
  return p;
}

template <int kId>
void barrier_sync(unsigned threads) {
  emu::named_barrier(kId, threads);
}

inline void expect_aligned(const char* name, const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16)
    throw emu::Error(std::string(name) + ": an address is not 16-byte aligned");
}

template <int kCount, bool kTranspose>
void ldmatrix(uint32_t* r, smem_t row) {
  expect_aligned("ldmatrix", row);
  const emu::Slots slots =
      emu::meet(~0u, kTranspose ? "ldmatrix.trans" : "ldmatrix", &row, sizeof row);
  const int group = emu::lane() >> 2, column = 2 * (emu::lane() & 3);
  for (int i = 0; i < kCount; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      smem_t from;
      std::memcpy(&from, slots[i * 8 + (kTranspose ? column + j : group)], sizeof from);
      std::memcpy(&pair[j], from + 2 * (kTranspose ? group : column + j), 2);
    }
    r[i] = pair[0] | uint32_t(pair[1]) << 16;
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], smem_t row) { ldmatrix<4, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], smem_t row) { ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2(uint32_t (&r)[2], smem_t row) { ldmatrix<2, false>(r, row); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], smem_t row) { ldmatrix<2, true>(r, row); }

// --------------------------------------------------------------------------------- async copies

inline void land(const emu::AsyncCopy& c) { std::memcpy(c.dst, c.data.data(), c.data.size()); }

template <size_t kBytes>
void cp_async(smem_t dst, const void* src) {
  for (const void* address : {static_cast<const void*>(dst), src}) {
    if (reinterpret_cast<uintptr_t>(address) % kBytes)
      throw emu::Error("cp.async: an address is not " + std::to_string(kBytes) + "-byte aligned");
  }
  const auto* from = static_cast<const unsigned char*>(src);
  emu::AsyncCopy copy{dst, {from, from + kBytes}, nullptr};
  if (emu::lands_early()) land(copy);
  emu::g_thread->open_copies.push_back(std::move(copy));
}
inline void cp_async16(smem_t dst, const void* src) { cp_async<16>(dst, src); }
inline void cp_async16_if_less(int a, int b, smem_t dst, const void* src) {
  if (a < b) cp_async16(dst, src);
}
inline void cp_async4(smem_t dst, const void* src) { cp_async<4>(dst, src); }
inline void cp_async_commit() {
  emu::Thread& me = *emu::g_thread;
  me.copy_groups.push_back(std::move(me.open_copies));
  me.open_copies.clear();
}
template <int N>
void cp_async_wait() {
  auto& groups = emu::g_thread->copy_groups;
  while (groups.size() > N) {
    for (const emu::AsyncCopy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

// ------------------------------------------------------------------------ mbarrier, bulk copies

// Phase bit, pending and expected arrivals, outstanding bytes: opaque on the hardware too.
struct Mbarrier {
  int64_t phase : 2, pending : 15, expected : 15, bytes : 32;
};
static_assert(sizeof(Mbarrier) == 8, "an mbarrier is one 64-bit word");

inline Mbarrier& mbarrier_at(smem_t bar) { return *reinterpret_cast<Mbarrier*>(bar); }
inline void mbarrier_update(smem_t bar, int arrivals, int64_t bytes) {
  Mbarrier& b = mbarrier_at(bar);
  if (arrivals > b.pending) throw emu::Error("mbarrier: more arrivals than it was made for");
  b.pending -= arrivals, b.bytes += bytes;
  if (b.pending == 0 && b.bytes == 0) b.phase = b.phase ^ 1, b.pending = b.expected;
}
inline void mbarrier_init(smem_t bar, unsigned count) {
  mbarrier_at(bar) = {0, int(count), int(count), 0};
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive(smem_t bar) { mbarrier_update(bar, 1, 0); }
inline void mbarrier_arrive_expect_tx(smem_t bar, unsigned bytes) {
  mbarrier_update(bar, 1, bytes);
}
inline void land_bulk(const emu::AsyncCopy& copy) {
  land(copy);
  mbarrier_update(static_cast<smem_t>(copy.barrier), 0, -int64_t(copy.data.size()));
}
inline void mbarrier_wait_parity(smem_t bar, unsigned parity) {
  std::vector<emu::AsyncCopy> later;
  for (emu::AsyncCopy& copy : emu::g_block->bulk_copies) {
    if (copy.barrier == bar)
      land_bulk(copy);
    else
      later.push_back(std::move(copy));
  }
  emu::g_block->bulk_copies.swap(later);
  emu::wait_until(reinterpret_cast<volatile uint64_t*>(bar), 1, parity & 1, "mbarrier wait");
}
inline void cp_async_bulk(smem_t dst, const void* src, unsigned bytes, smem_t bar) {
  expect_aligned("cp.async.bulk", dst);
  expect_aligned("cp.async.bulk", src);
  if (bytes % 16) throw emu::Error("cp.async.bulk: the size is not a multiple of 16");
  const auto* from = static_cast<const unsigned char*>(src);
  emu::AsyncCopy copy{dst, {from, from + bytes}, bar};
  if (emu::lands_early())
    land_bulk(copy);
  else
    emu::g_block->bulk_copies.push_back(std::move(copy));
}

// ------------------------------------------------------------------- programmatic dependent launch

constexpr bool kHasDependentLaunch = true;
inline void grid_dependency_wait() { emu::wait_for_kernel_ahead(); }
inline void grid_dependency_launch() {}
inline void fence_acq_rel_gpu() {}

constexpr bool kHasE4m3Cvt = false;
inline void cvt_f16x2_e4m3x2(unsigned& low, unsigned& high, unsigned codes) {
  throw emu::Error("no cvt.e4m3x2 here");
}

constexpr bool kHasE2m1Cvt = false;
inline unsigned cvt_e2m1x2(const float (&v)[8]) { throw emu::Error("no cvt.e2m1x2 here"); }

// The CPU has no stochastic conversion; convert.cuh takes its own.
constexpr bool kHasStochasticCvt = false;
inline unsigned cvt_rs_bf16x2(float low, float high, unsigned bits) {
  throw emu::Error("no cvt.rs here");
}
inline unsigned cvt_rs_f16x2(float low, float high, unsigned bits) {
  throw emu::Error("no cvt.rs here");
}
inline unsigned cvt_rs_e4m3x4(float v0, float v1, float v2, float v3, unsigned bits) {
  throw emu::Error("no cvt.rs here");
}

}  // namespace ptx
