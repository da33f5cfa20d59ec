// What one warp of a replay step reads: its place, cursors, rows of x, B, C and dt, and the
// checkpoint.
#pragma once
#include "replay.cuh"

namespace replay {

// What one warp works on. `token` is the place of the sequence's first token among the batch's.
struct Unit {
  int row, head, group, slab;
  int64_t slot, token;
  int q;
  bool forced;  // to flush
  __device__ explicit Unit(const CheckpointingSsuParams& params)
      : row(blockIdx.x / params.nheads),
        head(blockIdx.x - row * params.nheads),
        group(head / params.heads_per_group),
        slab(threadIdx.x >> 5),
        slot(find_slot(params, row)),
        token(0),
        q(params.npredicted),
        forced(false) {
    if (params.force_flush != nullptr) {
      forced = params.force_flush[row * params.force_flush_stride] != 0;
    }
    if (params.cu_seqlens == nullptr) return;
    token = params.cu_seqlens[row];
    q = min(max(params.cu_seqlens[row + 1] - params.cu_seqlens[row], 0), params.npredicted);
  }
};

// Cursors outside their range would be a caller's fault; they must not become stray addresses.
__device__ __forceinline__ Window read_cursors(const CheckpointingSsuParams& params,
                                               const Unit& unit) {
  const int start = params.ring_start[unit.slot * params.ring_start_stride];
  const int live =
      params.prev_num_accepted_tokens[unit.slot * params.prev_num_accepted_tokens_stride];
  Window window;
  window.start = min(max(start, 0), params.ring_buffer_len - 1);
  window.live = min(max(live, 0), params.max_window);
  window.q = unit.q;
  window.flush =
      (unit.forced && window.live > 0) || flushes(window.live, window.q, params.max_window);
  return window;
}

// dt of the lane's row: lanes 0-15 the rows read out, lanes 16-31 the rows folded, 0 where dead.
// Loading and processing are apart, so that other loads may go out in between.
__device__ __forceinline__ float load_dt(const CheckpointingSsuParams& params, const Unit& unit,
                                         const Window& window, const Lane& lane) {
  const int j = lane.index & 15, new_token = j - window.old_rows();
  const bool folded = lane.index >= kRows;
  if (folded ? window.flush && j < window.live : new_token < 0) {
    return params
        .dt_cache[unit.slot * params.dt_cache_slot_stride +
                  unit.head * params.dt_cache_head_stride +
                  ring_row(window.start, j, params.ring_buffer_len) * params.dt_cache_row_stride];
  }
  if (folded || new_token >= window.q) return 0.0f;
  const int64_t index = unit.row * params.dt_batch_stride +
                        (unit.token + new_token) * params.dt_token_stride +
                        unit.head * params.dt_head_stride;
  return convert::load_float(params.dt, index, params.dt_type);
}

__device__ __forceinline__ float process_dt(const CheckpointingSsuParams& params, const Unit& unit,
                                            const Window& window, const Lane& lane, float dt) {
  const bool fresh = lane.index >= window.old_rows() && lane.index < window.rows();
  return fresh ? processed_dt(params, dt, unit.head) : dt;
}

// The row of x, B for row j of the rows read out.
template <class Act>
__device__ __forceinline__ const Act* x_row(const CheckpointingSsuParams& params, const Unit& unit,
                                            const Window& window, int j) {
  const int new_token = j - window.old_rows();
  if (new_token >= 0) {
    return static_cast<const Act*>(params.x) + unit.row * params.x_batch_stride +
           (unit.token + new_token) * params.x_token_stride + unit.head * params.x_head_stride +
           unit.slab * kRows;
  }
  return static_cast<const Act*>(params.x_cache) + unit.slot * params.x_cache_slot_stride +
         unit.head * params.x_cache_head_stride +
         ring_row(window.start, j, params.ring_buffer_len) * params.x_cache_row_stride +
         unit.slab * kRows;
}

template <class Act>
__device__ __forceinline__ const Act* B_row(const CheckpointingSsuParams& params, const Unit& unit,
                                            const Window& window, int j) {
  const int new_token = j - window.old_rows();
  if (new_token >= 0) {
    return static_cast<const Act*>(params.B) + unit.row * params.B_batch_stride +
           (unit.token + new_token) * params.B_token_stride + unit.group * params.B_group_stride;
  }
  return static_cast<const Act*>(params.B_cache) + unit.slot * params.B_cache_slot_stride +
         unit.group * params.B_cache_group_stride +
         ring_row(window.start, j, params.ring_buffer_len) * params.B_cache_row_stride;
}

// x of 16 rows j as they lie in memory: x[i][h] holds row j = 8 i + g, columns p = 8 h + 2 t.
template <class Act>
__device__ __forceinline__ void load_x(uint32_t (&x)[2][2], const CheckpointingSsuParams& params,
                                       const Unit& unit, const Window& window, const Lane& lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    const bool live = j < window.rows();
    const Act* from = x_row<Act>(params, unit, window, j) + 2 * lane.t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[i][h] = live ? *reinterpret_cast<const uint32_t*>(from + 8 * h) : 0u;
    }
  }
}

// The same as the A operand of a product over j: rows p of the slab.
__device__ __forceinline__ void transpose_x(uint32_t (&a)[4], const uint32_t (&x)[2][2]) {
  a[0] = ptx::movmatrix(x[0][0]), a[1] = ptx::movmatrix(x[0][1]);
  a[2] = ptx::movmatrix(x[1][0]), a[3] = ptx::movmatrix(x[1][1]);
}

// One chunk of everything that spans dstate, as loaded: the slab's rows g and g + 8 piece by piece,
// C of the new tokens, B of the rows read out.
template <class State, int kDstate, int kTokenTiles>
struct Chunk {
  using T = Tiling<State, kDstate>;
  uint4 upper[T::kPieces], lower[T::kPieces];
  uint32_t C[kTokenTiles][T::kPairs], B[2][T::kPairs];

  __device__ __forceinline__ void load_state(const State* chunk) {
#pragma unroll
    for (int J = 0; J < T::kPieces; ++J) {
      upper[J] = *reinterpret_cast<const uint4*>(chunk + 4 * T::kPiece * J);
      lower[J] = *reinterpret_cast<const uint4*>(chunk + 4 * T::kPiece * J + 8 * kDstate);
    }
  }

  template <class Act>
  __device__ __forceinline__ void load_rows(const CheckpointingSsuParams& params, const Unit& unit,
                                            const Window& window, const Lane& lane, int column) {
    const Act* rows = static_cast<const Act*>(params.C) + unit.row * params.C_batch_stride +
                      unit.token * params.C_token_stride + unit.group * params.C_group_stride +
                      column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 8 * i + lane.g;
      load_row<T::kPiece>(B[i], B_row<Act>(params, unit, window, j) + column, lane.t,
                          j < window.rows());
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int t = 8 * tile + lane.g;
      load_row<T::kPiece>(C[tile], rows + t * params.C_token_stride, lane.t, t < window.q);
    }
  }
};

}  // namespace replay
