// What one warp of a replay step reads: its place, cursors, rows of x, B, C and dt, and the
// checkpoint.
#pragma once
#include "replay.cuh"

namespace replay {

// What one warp works on: slabs of 16 rows p that follow one another in a head, fewer at its end.
// `token` is the place of the sequence's first token among the batch's.
struct Unit {
  int row, head, group, slab, slabs;
  int64_t slot, token;
  int q;
  bool forced;  // to flush
  __device__ Unit(const CheckpointingSsuParams& params, int slabs_of_warp)
      : row(blockIdx.x / params.nheads),
        head(blockIdx.x - row * params.nheads),
        group(head / params.heads_per_group),
        slab(static_cast<int>(threadIdx.x >> 5) * slabs_of_warp),
        slabs(min(slabs_of_warp, params.head_dim / kRows - slab)),
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

  // First row p of slab `s`. One that is not there is read as the last one, and not written.
  __device__ __forceinline__ int first_row(int s) const {
    return (slab + (s == 0 ? 0 : min(s, slabs - 1))) * kRows;
  }
};

// Where the lane's first piece of row g of the head lies, and that row's scale.
template <class State, int kDstate>
__device__ __forceinline__ State* first_piece(const CheckpointingSsuParams& params,
                                              const Unit& unit, const Lane& lane) {
  return static_cast<State*>(params.state) + unit.slot * params.state_slot_stride +
         unit.head * params.state_head_stride + lane.g * kDstate +
         lane.t * Tiling<State, kDstate>::kPiece;
}

__device__ __forceinline__ float* first_scale(const CheckpointingSsuParams& params,
                                              const Unit& unit, const Lane& lane) {
  return params.state_scale + unit.slot * params.state_scale_slot_stride +
         unit.head * params.state_scale_head_stride + lane.g;
}

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
                                            const Window& window, int first_row, int j) {
  const int new_token = j - window.old_rows();
  if (new_token >= 0) {
    return static_cast<const Act*>(params.x) + unit.row * params.x_batch_stride +
           (unit.token + new_token) * params.x_token_stride + unit.head * params.x_head_stride +
           first_row;
  }
  return static_cast<const Act*>(params.x_cache) + unit.slot * params.x_cache_slot_stride +
         unit.head * params.x_cache_head_stride +
         ring_row(window.start, j, params.ring_buffer_len) * params.x_cache_row_stride + first_row;
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

template <class Act>
__device__ __forceinline__ const Act* C_row(const CheckpointingSsuParams& params, const Unit& unit,
                                            int t) {
  return static_cast<const Act*>(params.C) + unit.row * params.C_batch_stride +
         (unit.token + t) * params.C_token_stride + unit.group * params.C_group_stride;
}

// x of 16 rows j as they lie in memory: x[i][h] holds row j = 8 i + g, columns p = 8 h + 2 t.
template <class Act>
__device__ __forceinline__ void load_x(uint32_t (&x)[2][2], const CheckpointingSsuParams& params,
                                       const Unit& unit, const Window& window, const Lane& lane,
                                       int first_row) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    const bool live = j < window.rows();
    const Act* from = x_row<Act>(params, unit, window, first_row, j) + 2 * lane.t;
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

// One chunk of everything that spans dstate, as loaded: rows g and g + 8 of the slabs piece by
// piece, C of the new tokens, B of the rows read out.
template <class State, int kDstate, int kTokenTiles, int kSlabs>
struct Chunk {
  using T = Tiling<State, kDstate>;
  uint4 upper[kSlabs][T::kPieces], lower[kSlabs][T::kPieces];
  uint32_t C[kTokenTiles][T::kPairs], B[2][T::kPairs];

  // `state` is the lane's first piece of the chunk in row g of the head.
  __device__ __forceinline__ void load_state(const State* state, const Unit& unit) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      const State* slab = state + unit.first_row(s) * kDstate;
#pragma unroll
      for (int J = 0; J < T::kPieces; ++J) {
        upper[s][J] = *reinterpret_cast<const uint4*>(slab + 4 * T::kPiece * J);
        lower[s][J] = *reinterpret_cast<const uint4*>(slab + 4 * T::kPiece * J + 8 * kDstate);
      }
    }
  }

  template <class Act>
  __device__ __forceinline__ void load_rows(const CheckpointingSsuParams& params, const Unit& unit,
                                            const Window& window, const Lane& lane, int column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 8 * i + lane.g;
      load_row<T::kPiece>(B[i], B_row<Act>(params, unit, window, j) + column, lane.t,
                          j < window.rows());
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int t = 8 * tile + lane.g;
      load_row<T::kPiece>(C[tile], C_row<Act>(params, unit, t) + column, lane.t, t < window.q);
    }
  }
};

}  // namespace replay
