// The plain update: the state is read, advanced by every token of the call and written back.
//
//   S <- exp(A dt_t) S + dt_t x_t B_t^T,   y_t = S C_t + D x_t,   out = y silu(z)
//
// Equals reference.selective_state_update_cpu. Grid: one block per (batch row, head), head fastest;
// one warp per slab of 16 rows p, as in replay.cuh. The state stays in fp32 registers over the
// tokens and is rounded once. Touches nothing of a padded row but `out`.
#include "replay.cuh"

using namespace replay;

// The lane's elements n of one piece of a row of B or C.
template <int kPiece, class Act>
__device__ __forceinline__ void load_piece(float (&v)[kPiece], const Act* row, int J, int t) {
  const Act* piece = row + (4 * J + t) * kPiece;
#pragma unroll
  for (int i = 0; i < kPiece; i += 4) {
    if constexpr (sizeof(Act) == 4) {
      const float4 f = *reinterpret_cast<const float4*>(piece + i);
      v[i] = f.x, v[i + 1] = f.y, v[i + 2] = f.z, v[i + 3] = f.w;
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(piece + i);
      const float2 f = convert::unpack<Act>(pairs.x), g = convert::unpack<Act>(pairs.y);
      v[i] = f.x, v[i + 1] = f.y, v[i + 2] = g.x, v[i + 3] = g.y;
    }
  }
}

// The lane's part of a slab: rows g and g + 8, as stored and as the recurrence keeps it.
template <class State, int kDstate>
struct Slab {
  static constexpr int kPiece = 16 / sizeof(State), kPieces = kDstate / (4 * kPiece);
  uint4 stored[2][kPieces];
  float S[2][kPieces][kPiece];
  float scale[2];  // of an 8-bit state; 1 otherwise

  __device__ __forceinline__ void load(const State* pieces, const float* scales) {
    scale[0] = scale[1] = 1.0f;
    if constexpr (convert::kScaled<State>) scale[0] = scales[0], scale[1] = scales[8];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int J = 0; J < kPieces; ++J)
        stored[h][J] = *reinterpret_cast<const uint4*>(pieces + 8 * h * kDstate + 4 * kPiece * J);
  }

  // Decodes a pair of columns of row g + 8 h.
  __device__ __forceinline__ void decode(int h, int J, int q) {
    const float2 v = piece_pair<State>(stored[h][J], q);
    S[h][J][2 * q] = v.x * scale[h], S[h][J][2 * q + 1] = v.y * scale[h];
  }

  __device__ __forceinline__ void decode() {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int J = 0; J < kPieces; ++J)
#pragma unroll
        for (int q = 0; q < kPiece / 2; ++q) decode(h, J, q);
  }

  // One token: y of the two rows, summed over the lane's own columns. The first token of a call
  // decodes what was loaded, so its B and C are asked for before the state has arrived.
  template <bool kFirst, class Act>
  __device__ __forceinline__ void update(float (&y)[2], const float (&dx)[2], float decay,
                                         const Act* B, const Act* C, int t) {
#pragma unroll
    for (int J = 0; J < kPieces; ++J) {
      float b[kPiece], c[kPiece];
      load_piece(b, B, J, t);
      load_piece(c, C, J, t);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int q = 0; q < kPiece / 2; ++q) {
          float* s = S[h][J] + 2 * q;
          if constexpr (kFirst) decode(h, J, q);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s[e] = fmaf(s[e], decay, dx[h] * b[2 * q + e]);
            y[h] = fmaf(s[e], c[2 * q + e], y[h]);
          }
        }
      }
    }
  }

  // Rounds and stores; `offset` is the first piece's place in the state's storage.
  template <bool kStochastic>
  __device__ __forceinline__ void store(State* pieces, float* scale, int64_t offset,
                                        const Rounding& rounding, const Lane& lane) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = 8 * h * kDstate;
      if constexpr (convert::kScaled<State>) {
        float2 v[kPieces * 8];
#pragma unroll
        for (int i = 0; i < kPieces * 8; ++i) {
          v[i] = make_float2(S[h][i / 8][i % 8 * 2], S[h][i / 8][i % 8 * 2 + 1]);
        }
        store_scaled_row<State, kStochastic, kPieces>(pieces + row, scale + 8 * h, offset + row, v,
                                                      rounding, lane);
      } else {
#pragma unroll
        for (int J = 0; J < kPieces; ++J) {
          float2 v[kPiece / 2];
#pragma unroll
          for (int q = 0; q < kPiece / 2; ++q) {
            v[q] = make_float2(S[h][J][2 * q], S[h][J][2 * q + 1]);
          }
          const int64_t at = row + 4 * kPiece * J;
          *reinterpret_cast<uint4*>(pieces + at) =
              encode_piece_of_row<State, kStochastic>(v, rounding, offset + at);
        }
      }
    }
  }
};

// What one warp works on, and where its data lies.
template <class State, class Act, int kDstate>
struct Work {
  const SelectiveStateUpdateParams& params;
  Lane lane;
  int row, head, group, p;
  const Act *x, *B, *C;
  float a, D;

  __device__ Work(const SelectiveStateUpdateParams& params)
      : params(params),
        row(blockIdx.x / params.nheads),
        head(blockIdx.x - row * params.nheads),
        group(head / params.heads_per_group),
        p((threadIdx.x >> 5) * kRows + lane.g) {
    x = static_cast<const Act*>(params.x) + row * params.x_batch_stride +
        head * params.x_head_stride + p;
    B = static_cast<const Act*>(params.B) + row * params.B_batch_stride +
        group * params.B_group_stride;
    C = static_cast<const Act*>(params.C) + row * params.C_batch_stride +
        group * params.C_group_stride;
    a = convert::load_float(params.A, head * params.A_stride, params.A_type) * kLog2e;
    D = params.D == nullptr ? 0.0f
                            : convert::load_float(params.D, head * params.D_stride, params.D_type);
  }

  __device__ __forceinline__ void store_out(int t, int h, float y) const {
    const int64_t index = row * params.out_batch_stride + t * params.out_token_stride +
                          head * params.out_head_stride + p + 8 * h;
    convert::store_float(params.out, index, params.out_type, y);
  }

  template <bool kFirst>
  __device__ __forceinline__ void token(Slab<State, kDstate>& slab, int t) const {
    const float x_t[2] = {convert::to_float(x[t * params.x_token_stride]),
                          convert::to_float(x[t * params.x_token_stride + 8])};
    const int64_t dt_index =
        row * params.dt_batch_stride + t * params.dt_token_stride + head * params.dt_head_stride;
    const float raw_dt = convert::load_float(params.dt, dt_index, params.dt_type);
    const float dt = processed_dt(params, raw_dt, head);
    const float dx[2] = {dt * x_t[0], dt * x_t[1]};
    float y[2] = {0.0f, 0.0f};
    slab.template update<kFirst>(y, dx, ptx::ex2(a * dt), B + t * params.B_token_stride,
                                 C + t * params.C_token_stride, lane.t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      y[h] += __shfl_xor_sync(kAllLanes, y[h], 1);
      y[h] += __shfl_xor_sync(kAllLanes, y[h], 2);
    }
    if (lane.t > 1) return;  // lane t of the four that share rows stores row g + 8 t
    float of_row = lane.t == 0 ? fmaf(D, x_t[0], y[0]) : fmaf(D, x_t[1], y[1]);
    if (params.z != nullptr) {
      const Act* z = static_cast<const Act*>(params.z) + row * params.z_batch_stride +
                     t * params.z_token_stride + head * params.z_head_stride + p;
      of_row *= convert::silu(convert::to_float(z[8 * lane.t]));
    }
    store_out(t, lane.t, of_row);
  }
};

template <class State, class Act, int kDstate>
__global__ void __launch_bounds__(256, kDstate * sizeof(Act) <= 256 ? 2 : 1)
    selective_state_update(const __grid_constant__ SelectiveStateUpdateParams params) {
  const Work<State, Act, kDstate> work(params);
  const int64_t slot = find_slot(params, work.row);
  if (slot < 0) {
    for (int t = work.lane.t; params.zero_padding && t < params.npredicted; t += 4) {
      work.store_out(t, 0, 0.0f);
      work.store_out(t, 1, 0.0f);
    }
    return;
  }
  using OfLane = Slab<State, kDstate>;
  const int64_t offset = slot * params.state_slot_stride + work.head * params.state_head_stride +
                         work.p * kDstate + work.lane.t * OfLane::kPiece;
  State* pieces = static_cast<State*>(params.state) + offset;
  float* scales = nullptr;  // of rows g and, 8 behind, g + 8
  if constexpr (convert::kScaled<State>) {
    scales = params.state_scale + slot * params.state_scale_slot_stride +
             work.head * params.state_scale_head_stride + work.p;
  }
  OfLane slab;
  slab.load(pieces, scales);
  // The widest rows of B and C do not fit beside a state that is on its way.
  constexpr bool kAhead = kDstate * sizeof(Act) <= 512;
  if constexpr (kAhead)
    work.template token<true>(slab, 0);
  else
    slab.decode();
#pragma unroll 1
  for (int t = kAhead ? 1 : 0; t < params.npredicted; ++t) work.template token<false>(slab, t);
  // The two ways to round are apart, so that the common one runs through short code.
  const Rounding rounding(params);
  if (sizeof(State) < 4 && rounding.rounds > 0) {
    slab.template store<true>(pieces, scales, offset, rounding, work.lane);
  } else {
    slab.template store<false>(pieces, scales, offset, rounding, work.lane);
  }
}
