// State warps of the small form: the checkpoint read out, the rows added, and the outputs stored.
// Eight lanes have kQuads rows p, four apart.
#pragma once
#include "small.cuh"
#include "step.cuh"

namespace replay {

// How often a state warp may take four rows at once: what leaves it registers.
template <class State, int kDstate, int kTokens>
__device__ constexpr int most_quads() {
  constexpr int kMost = kTokens == 1 ? 4 : 2;
  constexpr int kFit = 256 * kMost / (kDstate * static_cast<int>(sizeof(State)));
  return kFit > kMost ? kMost : kFit < 1 ? 1 : kFit;
}

template <class State, class Act, int kDstate, int kTokens, int kQuads>
struct StateWarp : Block<kTokens> {
  using Base = Block<kTokens>;
  using Base::first_row, Base::request, Base::token, Base::ring_offset;
  using Base::params, Base::shared, Base::warp, Base::row, Base::lane, Base::head, Base::group;
  using Pieces = RowPieces<State, kDstate>;

  __device__ __forceinline__ explicit StateWarp(const Base& block) : Base(block) {}

  // What the lane asks for: pieces of the checkpoint and their scales, C beside them, x of every
  // eighth row, and z of its token.
  struct Inputs {
    uint4 state[kQuads][Pieces::kCount];
    uint32_t C[kTokens][Pieces::kCount][Pieces::kColumns / 2];
    uint32_t x[kQuads][kRowsOfLane], z[kQuads];
    float scale[kQuads];
  };

  // p is the lane's first row.
  __device__ __forceinline__ void ask_for_tokens(Inputs& in, int p) const {
    constexpr int kColumns = Pieces::kColumns;
    if (request.window.q == 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Act* C = C_of_token<Act>(params, request, group, token(t)) + kColumns * lane;
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
        load_words(in.C[t][n], C + kLanesOfRow * kColumns * n);
      }
    }
    if (params.z == nullptr) return;
    const Act* z = z_of_token<Act>(params, request, head, token(Base::token_of_lane())) + p;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) in.z[i] = ptx::ld_global_u16(z + kRowsOfWarp * i);
  }

  // What does not need the slot but its place: the lane's first piece, its scale, and x of every
  // eighth row, of the ring or new.
  struct StateRows {
    const State* state;
    const float* scale;
    const Act* x[kRowsOfLane];
  };

  // x of row r but for the slot, from p on; ring row 0 lies at place `first`.
  __device__ __forceinline__ const Act* x_of_row(int r, int first, int p) const {
    const int t = r - params.ring_rows;
    if (t >= 0) return x_of_token<Act>(params, request, head, token(t)) + p;
    return x_ring<Act>(params, 0, head) + ring_offset(first, r, params.x_cache_row_stride) + p;
  }
  __device__ __forceinline__ void find_x(StateRows& rows, int first, int p) const {
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
      rows.x[k] = ptx::computed_now(x_of_row(kLanesOfRow * k + lane, first, p));
    }
  }

  __device__ __forceinline__ StateRows find_state(int p) const {
    StateRows rows;
    rows.state =
        ptx::computed_now(static_cast<const State*>(params.state) +
                          head * params.state_head_stride + p * kDstate + Pieces::kColumns * lane);
    if constexpr (convert::kScaled<State>) {
      rows.scale =
          ptx::computed_now(params.state_scale + head * params.state_scale_head_stride + p);
    }
    find_x(rows, 0, p);
    return rows;
  }

  __device__ __forceinline__ void ask_for_state(Inputs& in, const StateRows& rows) const {
    const unsigned slot = request.slot;
    const State* state = rows.state + slot * params.state_slot_stride;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
        in.state[i][n] = Pieces::load(state + kRowsOfWarp * i * kDstate, n);
      }
    }
    if constexpr (convert::kScaled<State>) {
      const float* scale = rows.scale + slot * params.state_scale_slot_stride;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) in.scale[i] = load_float(scale + kRowsOfWarp * i);
    }
  }

  __device__ __forceinline__ void ask_for_x(Inputs& in, const StateRows& rows) const {
    const int64_t of_slot = static_cast<unsigned>(request.slot) * params.x_cache_slot_stride;
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
      const int r = kLanesOfRow * k + lane;
      const Act* x = rows.x[k] + (r < params.ring_rows ? of_slot : 0);
      if (r < params.ring_rows + request.window.q) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) in.x[i][k] = ptx::ld_global_u16(x + kRowsOfWarp * i);
      }
    }
  }

  // The lane's part of S C_t, as stored, for the rows and tokens.
  __device__ __forceinline__ void sum_state(float (&sums)[kQuads][kTokens],
                                            const Inputs& in) const {
    float2 acc[kQuads][kTokens] = {};  // two chains of products each
#pragma unroll
    for (int n = 0; n < Pieces::kCount; ++n) {
#pragma unroll
      for (int q = 0; q < Pieces::kColumns / 2; q += 2) {
        float2 C[kTokens][2];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          C[t][0] = convert::unpack<Act>(in.C[t][n][q]);
          C[t][1] = convert::unpack<Act>(in.C[t][n][q + 1]);
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          float2 S[2];
          piece_pairs<State>(in.state[i][n], q, S);
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              acc[i][t].x = fmaf(S[e].x, C[t][e].x, acc[i][t].x);
              acc[i][t].y = fmaf(S[e].y, C[t][e].y, acc[i][t].y);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        sums[i][t] = acc[i][t].x + acc[i][t].y;
        if constexpr (convert::kScaled<State>) sums[i][t] *= in.scale[i];
      }
    }
  }

  // Decays the sums over the checkpoint and adds the rows.
  __device__ __forceinline__ void add_rows(float (&sums)[kQuads][kTokens], const Inputs& in) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) sums[i][t] *= shared.decays[t];
    }
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
      const int r = kLanesOfRow * k + lane;
      const bool there = r < params.ring_rows + request.window.q;
      float weights[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        weights[t] = there ? shared.weights[r][t] : __uint_as_float(kUnseen);
      }
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float x = convert::unpack<Act>(ptx::opaque(in.x[i][k])).x;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (__float_as_uint(weights[t]) != kUnseen) sums[i][t] = fmaf(weights[t], x, sums[i][t]);
        }
      }
    }
  }

  // Where the lane stores its outputs, the first at row p.
  __device__ __forceinline__ unsigned char* out_of_lane(int p) const {
    const int64_t index = out_of_token(params, request, head, Base::token_of_lane()) + p;
    return static_cast<unsigned char*>(params.out) +
           index * (params.out_type == kFloat32 ? 4 : static_cast<int>(sizeof(Act)));
  }

  // Stores the outputs from the lanes' parts of them.
  __device__ __forceinline__ void store(float (&sums)[kQuads][kTokens], const Inputs& in,
                                        unsigned char* out) const {
    const bool any = lane < kTokens && Base::token_of_lane() < request.window.q;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float y = sum_of_row(sums[i], lane);
      if (params.z != nullptr) y *= convert::silu(convert::unpack<Act>(ptx::opaque(in.z[i])).x);
      if (any) store_output<Act>(params, out, kRowsOfWarp * i, y);
    }
  }

  __device__ __forceinline__ static void wait_for_sums(const float (&sums)[kQuads][kTokens]) {
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) all += sums[i][t];
    }
    ptx::known_now(all);
  }

  // Outputs of padding become zeros.
  __device__ __forceinline__ void zero_rows(int first, int rows) const {
    if (!params.zero_padding) return;
    for (int t = 0; t < request.window.q; ++t) {
      const int64_t index = out_of_token(params, request, head, t) + first;
      for (int i = threadIdx.x & 31; i < rows; i += 32) {
        convert::store_float(params.out, index + i, params.out_type, 0.0f);
      }
    }
  }

  __device__ __forceinline__ Request run() {
    const int of_warp = first_row + kRowsOfWarp * kQuads * warp, p = of_warp + row;
    const bool has_rows = of_warp < params.head_dim;
    Inputs in;
    if (has_rows) ask_for_tokens(in, p);
    ptx::keep_order();
    StateRows rows = find_state(p);
    if (Base::is_padding()) {
      if (has_rows) zero_rows(of_warp, kRowsOfWarp * kQuads);
      return request;
    }
    if (has_rows) {
      ask_for_state(in, rows);
      ptx::keep_order();
      if (!params.by_place) find_x(rows, Base::first_place(), p);
      ask_for_x(in, rows);
      ptx::keep_order();
      unsigned char* out = ptx::computed_now(out_of_lane(p));
      float sums[kQuads][kTokens];
      sum_state(sums, in);
      wait_for_sums(sums);
      ptx::barrier_sync<1>(params.threads);
      add_rows(sums, in);
      store(sums, in, out);
    } else {
      ptx::barrier_sync<1>(params.threads);
    }
    request.window.start = shared.start, request.window.live = shared.live;
    request.window.flush = shared.flush != 0;
    return request;
  }
};

}  // namespace replay
