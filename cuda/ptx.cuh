// Every inline PTX statement of the project: one wrapper per instruction, named like it.
// tests/host replaces this file by twins of the same names that run on the CPU.
#pragma once
#if defined(REPLAYSSM_HOST)
#include "ptx_host.hpp"
#else
namespace ptx {

// D (16 x 8, fp32) += A (16 x 16, row) * B (16 x 8, col); lane = 4 g + t holds
// a = {A[g][2t..], A[g+8][2t..], A[g][2t+8..], A[g+8][2t+8..]}, b = {B[2t..][g], B[2t+8..][g]},
// d = {D[g][2t], D[g][2t+1], D[g+8][2t], D[g+8][2t+1]}.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                 unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with half as many columns of A: a = {A[g][2t..], A[g+8][2t..]}, b = B[2t..][g].
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], unsigned a0, unsigned a1,
                                                 unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1,
                                                unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Transposes an 8 x 8 matrix of 16-bit values; lane = 4 g + t holds M[g][2t] and M[g][2t+1].
__device__ __forceinline__ unsigned movmatrix(unsigned m) {
  unsigned r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(m));
  return r;
}

// ---- global memory: for addresses of which the compiler does not know where they point ----------

// Loads stay in the order in which they are written, whatever stands between them.
__device__ __forceinline__ unsigned ld_global_u32(const void* p) {
  unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// 0 unless `on`.
__device__ __forceinline__ unsigned ld_global_u32_if(bool on, const void* p) {
  unsigned v;
  asm volatile(
      "{ .reg .pred on; setp.ne.u32 on, %2, 0; mov.u32 %0, 0; @on ld.global.u32 %0, [%1]; }"
      : "=r"(v)
      : "l"(p), "r"(static_cast<unsigned>(on))
      : "memory");
  return v;
}
__device__ __forceinline__ unsigned ld_global_u16_if(bool on, const void* p) {
  unsigned v;
  asm volatile(
      "{ .reg .pred on; setp.ne.u32 on, %2, 0; mov.u32 %0, 0; @on ld.global.u16 %0, [%1]; }"
      : "=r"(v)
      : "l"(p), "r"(static_cast<unsigned>(on))
      : "memory");
  return v;
}

__device__ __forceinline__ unsigned ld_global_u16(const void* p) {
  unsigned v;
  asm volatile("{ .reg .b16 h; ld.global.u16 h, [%1]; cvt.u32.u16 %0, h; }"
               : "=r"(v)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 ld_global_v2(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint4 ld_global_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_global_u32(void* p, unsigned v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The lower half of `v`.
__device__ __forceinline__ void st_global_u16(void* p, unsigned v) {
  asm volatile("{ .reg .b16 h; cvt.u16.u32 h, %1; st.global.u16 [%0], h; }" ::"l"(p), "r"(v)
               : "memory");
}

__device__ __forceinline__ void st_global_v4(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// From the L2, which knows what other multiprocessors have written.
__device__ __forceinline__ unsigned ld_relaxed_gpu_u32(const void* p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Asks the L2 for the line of an address.
__device__ __forceinline__ void prefetch_L2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ---- shared memory, and copies into it ----------------------------------------------------------

using smem_t = unsigned;  // an address in shared memory

__device__ __forceinline__ smem_t to_smem(const void* p) {
  return static_cast<smem_t>(__cvta_generic_to_shared(p));
}

// The same number, whose parts the compiler does not see: what it computes from them ahead of a
// loop would fill registers.
__device__ __forceinline__ unsigned opaque(unsigned v) {
  asm volatile("" : "+r"(v));
  return v;
}

// The same place in shared memory, whose address is kept in a register: the compiler would compute
// it again wherever it is used.
template <class T>
__device__ __forceinline__ T* kept(T* p) {
  return static_cast<T*>(__cvta_shared_to_generic(opaque(to_smem(p))));
}

__device__ __forceinline__ uint4 load_shared16(smem_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ unsigned load_shared4(const void* p) {
  unsigned v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(to_smem(p)));
  return v;
}

__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

// Four 8 x 8 matrices of 16-bit values, transposed: lane l gives the address of row l % 8 of matrix
// l / 8, and gets of each matrix M[2t][g] and M[2t+1][g].
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], smem_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(row)
               : "memory");
}

// The warp's first lane adds one, and gets what was there; the others get 0. What is added is
// written so that the compiler does not look for other lanes that add the same.
__device__ __forceinline__ int atomic_count_shared(smem_t address) {
  int before = 0;
  asm volatile(
      "{ .reg .pred p; .reg .u32 v; mov.u32 v, %%laneid; setp.eq.u32 p, v, 0; add.u32 v, v, 1; "
      "@p atom.shared.add.u32 %0, [%1], v; }"
      : "+r"(before)
      : "r"(address)
      : "memory");
  return before;
}

// The same of a number in global memory that starts again at 0 behind `last`.
__device__ __forceinline__ unsigned atomic_count_global(unsigned* address, unsigned last) {
  unsigned before = 0;
  asm volatile(
      "{ .reg .pred p; .reg .u32 v; mov.u32 v, %%laneid; setp.eq.u32 p, v, 0; "
      "@p atom.global.inc.u32 %0, [%1], %2; }"
      : "+r"(before)
      : "l"(address), "r"(last)
      : "memory");
  return before;
}

// `threads` of a block meet at barrier kId.
template <int kId>
__device__ __forceinline__ void barrier_sync(unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

// Copies 16 or 4 bytes in the background. A thread's copies since its last commit are one group.
__device__ __forceinline__ void cp_async16(smem_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// The same if a < b, without a branch.
__device__ __forceinline__ void cp_async16_if_less(int a, int b, smem_t dst, const void* src) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %2, %3; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(
          dst),
      "l"(src), "r"(a), "r"(b)
      : "memory");
}

__device__ __forceinline__ void cp_async4(smem_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of the thread's groups, the newest, are on their way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Stores 16 bytes that the L2 is asked to keep.
__device__ __forceinline__ void store_keep16(void* to, uint4 v) {
  unsigned long long keep;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(keep)
               : "memory");
}

// ---- programmatic dependent launch, from sm_90 on -----------------------------------------------

#if __CUDA_ARCH__ >= 900
constexpr bool kHasDependentLaunch = true;
#define PTX_SM90(...) asm volatile(__VA_ARGS__)
#else
constexpr bool kHasDependentLaunch = false;
#define PTX_SM90(...)
#endif

// Waits until the kernels ahead in the stream are complete and their writes are seen.
__device__ __forceinline__ void grid_dependency_wait() {
  PTX_SM90("griddepcontrol.wait;" :: : "memory");
}

// Lets the next kernel in the stream start; it waits for itself.
__device__ __forceinline__ void grid_dependency_launch() {
  PTX_SM90("griddepcontrol.launch_dependents;");
}

// ---- registers ----------------------------------------------------------------------------------

// Zero, as blocks have one dimension, which the compiler takes for a number of each lane's own:
// what is computed from it, and loaded from there, stays out of the registers of the whole warp,
// from which it would be copied.
__device__ __forceinline__ unsigned zero_of_lane() {
  unsigned zero;
  asm("mov.u32 %0, %%tid.y;" : "=r"(zero));
  return zero;
}

// The same pointer, computed here: the compiler cannot put it off until it is used, which may be
// behind a wait.
template <class T>
__device__ __forceinline__ T* computed_now(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Whatever is loaded in front of it is asked for there, and not when it is used.
__device__ __forceinline__ void keep_order() {
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}

// Zero, which is known when `bits` are: what takes it waits for them.
__device__ __forceinline__ unsigned zero_behind(unsigned bits) { return bits & zero_of_lane(); }

// Does what is rarely needed, out of the way of what is not: the compiler would do it without a
// branch, under a predicate. The loop ends at once, which it does not know.
template <class Rare>
__device__ __forceinline__ void aside(Rare rare) {
  unsigned zero;
  do {
    rare();
    asm volatile("bar.warp.sync 0xffffffff; mov.u32 %0, %%tid.y;" : "=r"(zero)::"memory");
  } while (zero != 0);
}

// What is written already is seen by the loads that follow, whatever the multiprocessor has cached.
__device__ __forceinline__ void fence_acq_rel_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// ---- arithmetic ---------------------------------------------------------------------------------

// All of a product of two 32-bit numbers in one instruction, which the compiler misses where one of
// them was widened before.
__device__ __forceinline__ long long mul_wide(int a, int b) {
  long long r;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
  return r;
}

// `p` and a times b bytes in one instruction: written as a mad.wide, it would be taken apart and
// its sums reordered.
__device__ __forceinline__ const unsigned char* mad_wide(unsigned a, unsigned b,
                                                         const unsigned char* p) {
  asm("{ .reg .u32 low, high; mov.b64 {low, high}, %0; mad.lo.cc.u32 low, %1, %2, low; "
      "madc.hi.u32 high, %1, %2, high; mov.b64 %0, {low, high}; }"
      : "+l"(p)
      : "r"(a), "r"(b));
  return p;
}

// To nearest, with subnormal results: the compiler's own conversion makes zeros of them, in five
// instructions.
__device__ __forceinline__ float cvt_f32_f64(double v) {
  float r;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(v));
  return r;
}

// 2^x, within 2^-22 relative; results below the normal range are 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to within a few units in the last place.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of `a` and the magnitude of `b`, NaN where one is NaN: one instruction, as the
// hardware takes magnitudes of operands.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float r;
  asm("{ .reg .f32 m; abs.f32 m, %2; max.NaN.f32 %0, %1, m; }" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Four e4m3 codes as fp16 in one instruction for two: from sm_89 on, so ask `kHasE4m3Cvt` first.
#if __CUDA_ARCH__ >= 890
constexpr bool kHasE4m3Cvt = true;
#define PTX_CVT_E4M3(...) asm(__VA_ARGS__)
#else
constexpr bool kHasE4m3Cvt = false;
#define PTX_CVT_E4M3(...) low = high = 0
#endif

__device__ __forceinline__ void cvt_f16x2_e4m3x2(unsigned& low, unsigned& high, unsigned codes) {
  PTX_CVT_E4M3(
      "{ .reg .b16 a, b; mov.b32 {a, b}, %2; "
      "cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(low),
      "=r"(high) : "r"(codes));
}

// Eight floats as e2m1 codes: to nearest, at most 6. On some targets only, so ask `kHasE2m1Cvt`
// first.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
constexpr bool kHasE2m1Cvt = true;
#define PTX_CVT_E2M1(...) asm(__VA_ARGS__)
#else
constexpr bool kHasE2m1Cvt = false;
#define PTX_CVT_E2M1(...) r = 0
#endif

// Byte i holds code i below and code i + 4 above.
__device__ __forceinline__ unsigned cvt_e2m1x2(const float (&v)[8]) {
  unsigned r;
  PTX_CVT_E2M1(
      "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %5, %1; "
      "cvt.rn.satfinite.e2m1x2.f32 b, %6, %2; cvt.rn.satfinite.e2m1x2.f32 c, %7, %3; "
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %4; mov.b32 %0, {a, b, c, d}; }" : "=r"(r) : "f"(v[0]),
      "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return r;
}

// Stochastic rounding in hardware: sm_100a and sm_103a only, so ask `kHasStochasticCvt` first.
// `bits` holds a random field for each value: 13 or 16 bits of its half, or see e4m3x4.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
constexpr bool kHasStochasticCvt = true;
#define PTX_CVT_RS(...) asm(__VA_ARGS__)
#else
constexpr bool kHasStochasticCvt = false;
#define PTX_CVT_RS(...) r = 0
#endif

__device__ __forceinline__ unsigned cvt_rs_bf16x2(float low, float high, unsigned bits) {
  unsigned r;
  PTX_CVT_RS("cvt.rs.bf16x2.f32 %0, %1, %2, %3;" : "=r"(r) : "f"(high), "f"(low), "r"(bits));
  return r;
}

__device__ __forceinline__ unsigned cvt_rs_f16x2(float low, float high, unsigned bits) {
  unsigned r;
  PTX_CVT_RS("cvt.rs.f16x2.f32 %0, %1, %2, %3;" : "=r"(r) : "f"(high), "f"(low), "r"(bits));
  return r;
}

// Fields: the low half for v0, reversed for v1, the high half for v2, reversed for v3.
__device__ __forceinline__ unsigned cvt_rs_e4m3x4(float v0, float v1, float v2, float v3,
                                                  unsigned bits) {
  unsigned r;
  PTX_CVT_RS("cvt.rs.satfinite.e4m3x4.f32 %0, {%1, %2, %3, %4}, %5;" : "=r"(r) : "f"(v3), "f"(v2),
             "f"(v1), "f"(v0), "r"(bits));
  return r;
}

}  // namespace ptx
#endif
