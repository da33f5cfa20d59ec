// Read copies of an fp16 state: rows of them encoded from floats. Mirrors
// replayssm_cupy/read_copy.py, which says where the bytes lie.
#pragma once
#include "replay.cuh"

namespace replay {

// Bytes of a slab of 16 rows.
template <class Copy, int kDstate>
constexpr int kCopyBytes = convert::same<Copy, e2m1> ? 9 * kDstate : kRows * kDstate;

// The same where dstate is known at run time only.
template <class Copy>
__device__ __forceinline__ int copy_bytes(int dstate) {
  return convert::same<Copy, e2m1> ? 9 * dstate : kRows * dstate;
}

// The largest magnitude of a block of 16 columns, of which two lanes hold eight each.
__device__ __forceinline__ float of_block(const float2 (&v)[4]) {
  const float amax = largest(v);
  return ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, 1));
}

// Stores eight columns of row `row` of a slab, from `column` on; they are scaled already.
template <class Copy>
__device__ __forceinline__ void store_copied(unsigned char* slab, int dstate, int row, int column,
                                             const convert::RowScale& scale, const float2 (&v)[4]) {
  if constexpr (convert::same<Copy, e2m1>) {
    const convert::BlockScale block = convert::block_scale(of_block(v));
    float u[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u[2 * i] = __fmul_rn(v[i].x, block.inverse), u[2 * i + 1] = __fmul_rn(v[i].y, block.inverse);
    }
    *reinterpret_cast<uint32_t*>(slab + (row * dstate + column) / 2) =
        scale.stored(convert::pack_e2m1(u));
    if (column % 16 == 0) {
      slab[8 * dstate + (row * dstate + column) / 16] =
          static_cast<unsigned char>(scale.stored(block.code));
    }
  } else {
    *reinterpret_cast<uint2*>(slab + row * dstate + column) =
        make_uint2(scale.stored(convert::pack_codes<Copy>(v[0], v[1])),
                   scale.stored(convert::pack_codes<Copy>(v[2], v[3])));
  }
}

// Encodes row `row` of a slab, of which lane t of four holds eight columns from 8 (4 J + t) on for
// every J, and its scale.
template <class Copy, int kDstate>
__device__ __forceinline__ void store_copied_row(unsigned char* slab, int row, float* scale,
                                                 const float2 (&v)[kDstate / 8], const Lane& lane) {
  const convert::RowScale of_all = convert::row_scale<Copy>(of_row(largest(v)));
#pragma unroll
  for (int J = 0; J < kDstate / 32; ++J) {
    float2 part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = of_all.scaled(v[4 * J + i]);
    store_copied<Copy>(slab, kDstate, row, 8 * (4 * J + lane.t), of_all, part);
  }
  if (lane.t == 0) *scale = of_all.decode;
}

}  // namespace replay
