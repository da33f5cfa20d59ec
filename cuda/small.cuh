// What the warps of the small form share: its rows, its shared memory, and how lanes lie in both.
#pragma once
#include "rows.cuh"

namespace replay {

constexpr int kLanesOfRow = 8, kRowsOfWarp = 4;
constexpr int kMostRowsOfBlock = 64;  // p

// Instead of the weight of a row that the token does not see. A NaN that was computed has other
// bits.
constexpr uint32_t kUnseen = 0xffffffffu;

// The rows of a step: those of the ring by their places, then the new tokens. A lane has every
// eighth of them.
constexpr int kStepRows = 24, kRowsOfLane = kStepRows / kLanesOfRow;

template <int kTokens>
struct Shared {
  // Of each row, and of the checkpoint, which is exp(c_t).
  alignas(16) float weights[kStepRows][kTokens];
  float decays[kTokens];
  // What a flush takes: `put_fold_weights`, and the largest magnitudes in the pieces of 8-bit rows.
  float fold_weights[kRows + 4];
  float largest[kMostRowsOfBlock][8];
  int start, live, flush;
};

// How eight lanes share a row of kDstate values: in pieces of up to 16 bytes, which lie side by
// side.
template <class T, int kDstate>
struct RowPieces {
  static constexpr int kBytes = kDstate * sizeof(T) < 128 ? kDstate * sizeof(T) / 8 : 16;
  static constexpr int kColumns = kBytes / sizeof(T), kCount = kDstate / kLanesOfRow / kColumns;
  __device__ __forceinline__ static uint4 load(const T* row, int n) {
    const T* piece = row + kLanesOfRow * kColumns * n;
    if constexpr (kBytes == 16) return ptx::ld_global_v4(piece);
    const uint2 half = ptx::ld_global_v2(piece);
    return make_uint4(half.x, half.y, 0, 0);
  }
};

__device__ __forceinline__ float load_float(const float* p) {
  return __uint_as_float(ptx::ld_global_u32(p));
}

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const void* from) {
  if constexpr (kWords == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = static_cast<const uint4*>(from)[i / 4];
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  }
}

// Sums over the lanes of a row, of which each gets that of v[lane % kCount].
template <int kCount>
__device__ __forceinline__ float sum_of_row(float (&v)[kCount], int lane) {
  int step = 1;
#pragma unroll
  for (int count = kCount; count > 1; count /= 2, step *= 2) {
    const bool odd = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float kept = odd ? v[2 * i + 1] : v[2 * i], given = odd ? v[2 * i] : v[2 * i + 1];
      v[i] = kept + __shfl_xor_sync(kAllLanes, given, step);
    }
  }
#pragma unroll
  for (; step < kLanesOfRow; step *= 2) v[0] += __shfl_xor_sync(kAllLanes, v[0], step);
  return v[0];
}

// A block of the small form as each of its warps sees it.
template <int kTokens>
struct Block {
  const CheckpointingSsuParams& params;
  Shared<kTokens>& shared;
  const int warp, row, lane;  // the lane's row in its warp, and the lane's place in the row
  const unsigned head, group;
  const int first_row;  // p of the block
  Request request;      // slot and window are known late
  GivenSlot given;

  __device__ __forceinline__ Block(const CheckpointingSsuParams& p, Shared<kTokens>& s)
      : params(p),
        shared(s),
        warp(threadIdx.x >> 5),
        row(threadIdx.x >> 3 & 3),
        lane(threadIdx.x & 7),
        head(blockIdx.y),
        group(divide(head, p.inverse_heads_per_group)),
        first_row(blockIdx.z * p.rows_of_block),
        given(p, blockIdx.x + ptx::zero_of_lane()) {
    ptx::keep_order();
    request = find_tokens(p, blockIdx.x);
  }

  __device__ __forceinline__ bool is_padding() {
    request.slot = given.slot(params);
    return request.slot < 0;
  }
  // Of two tokens of which the second is not there, the first stands in for it.
  __device__ __forceinline__ int token(int t) const {
    return kTokens == 1 ? 0 : min(t, request.window.q - 1);
  }
  // The lane's own token, as `sum_of_row` deals them.
  __device__ __forceinline__ int token_of_lane() const { return lane & (kTokens - 1); }
  __device__ __forceinline__ int rows_of_block() const {
    return min(params.rows_of_block, params.head_dim - first_row);
  }
  // Ring row r of the step, if row 0 lies at place `first`.
  __device__ __forceinline__ int64_t ring_offset(int first, int r, int64_t stride) const {
    return row_offset(ring_row(first, r, params.ring_buffer_len), stride);
  }
  // Long rings go by their live rows instead of by places, and wait for the first one's.
  __device__ __forceinline__ int first_place() const {
    return min(max(*ring_start_of(params, request.slot), 0), params.ring_buffer_len - 1);
  }
};

}  // namespace replay
