// The weights of a step's rows, made in shared memory or taken from the caller's scratch.
#pragma once
#include "fold.cuh"
#include "step.cuh"

namespace replay {

// C of the new tokens beside the state's codes, in its place, and the scales that go with exp(c_t).
template <bool kScaled, class Act, int kDstate>
__device__ __forceinline__ void prepare_C(float* scales, const GroupTile<Act, kDstate>& group,
                                          int q, const Lane& lane) {
  if constexpr (kScaled) {
    scale_C(scales, group, q, lane);
  } else {
    for (int t = lane.index; t < q; t += 32) scales[t] = 1.0f;
  }
}

// The first of 16 rows of dt that has a new token: the old rows of a flush have 16 of their own.
__device__ __forceinline__ int first_token(const Window& window) {
  return window.flush ? kRows : window.live;
}

// Writes dt of the new rows of some heads.
__device__ __forceinline__ void append_dt(const CheckpointingSsuParams& params,
                                          const Request& request, int head, int heads,
                                          const float* dt, const Lane& lane) {
  const Window& window = request.window;
  const int i = lane.index % kHeadsOfItem;
  if (i >= heads) return;
  float* ring = dt_ring(params, request.slot, head + i);
  const float* of_head = dt + 2 * kRows * i + first_token(window);
  for (int t = lane.index / kHeadsOfItem; t < window.q; t += 32 / kHeadsOfItem) {
    ring[row_offset(window.new_row(t, params.ring_buffer_len), params.dt_cache_row_stride)] =
        of_head[t];
  }
}

// Writes B of the new rows of a group, which lie in shared memory.
template <class Act, int kDstate>
__device__ __forceinline__ void append_B(const CheckpointingSsuParams& params,
                                         const Request& request, int group,
                                         const GroupTile<Act, kDstate>& tile,
                                         const Spread& spread) {
  Act* ring = B_ring<Act>(params, request.slot, group) + 8 * spread.piece;
  for (int t = spread.row; t < request.window.q; t += spread.rows) {
    const int row = request.window.new_row(t, params.ring_buffer_len);
    *reinterpret_cast<uint4*>(ring + row_offset(row, params.B_cache_row_stride)) =
        *reinterpret_cast<const uint4*>(tile.B() + tile.place(tile.shape.old_rows + t, spread));
  }
}

// The weights of some heads, which lie one after another: half a warp does one, or a whole one if
// it flushes. `dt` holds 32 rows a head, `constant` what `load_constant` gave.
__device__ __forceinline__ void put_weights_of_heads(float* weights, const WeightShape& shape,
                                                     const float* dt, int heads,
                                                     const float* products,
                                                     const float* scales_of_C, float constant,
                                                     const Window& window, const Lane& lane) {
  const int rows_of_head = window.flush ? 2 * kRows : kRows;
  const int row = lane.index & (rows_of_head - 1), token = row - first_token(window);
  const bool new_row = static_cast<unsigned>(token) < static_cast<unsigned>(window.q);
  const bool live = (row < window.live) | new_row;
  for (int first = 0; first < heads; first += window.flush ? 1 : 2) {
    const int i = min(window.flush ? first : first + lane.index / kRows, heads - 1);
    const float A = __shfl_sync(kAllLanes, constant, i);
    const float D = __shfl_sync(kAllLanes, constant, kHeadsOfItem + i);
    const Decays decays(live ? dt[2 * kRows * i + row] : 0.0f, A, rows_of_head);
    float* of_head = weights + i * shape.words();
    put_weights(of_head, shape, products, scales_of_C, decays, window, D, true);
    if (window.flush) put_fold_weights(of_head + shape.fold(), decays);
  }
}

// ---- the caller's scratch -----------------------------------------------------------------------

// Of head n of all; one multiplication of 32 by 32 bits.
__device__ __forceinline__ float* scratch_of_head(float* array, unsigned n, int words) {
  return array + static_cast<uint64_t>(n) * static_cast<unsigned>(words);
}

// Calls `copy(place, scratch, pieces)` for the parts of a head's weights: where they begin in its
// `WeightShape`, where in the scratch, and their pieces of 16 bytes. Only a flush has the last one.
template <class Copy>
__device__ __forceinline__ void for_parts_in_scratch(const CheckpointingSsuParams& params,
                                                     const WeightShape& shape,
                                                     const Request& request, unsigned head,
                                                     Copy copy) {
  const unsigned n = request.row * params.nheads + head;
  const Window& window = request.window;
  copy(0, scratch_of_head(params.cb_scaled, n, params.cb_scaled_words), kRows / 4 * window.q);
  copy(shape.decays(), scratch_of_head(params.cumAdt_vec, n, params.cumAdt_vec_words),
       (window.q + 3) / 4);
  if (window.flush) {
    copy(shape.old_rows(), scratch_of_head(params.cb_old, n, params.cb_old_words),
         (shape.words() - shape.old_rows()) / 4);
  }
}

}  // namespace replay
