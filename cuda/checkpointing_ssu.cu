// One decode step of a Mamba-2 layer from checkpoint, ring and new tokens; the state is written
// only on flush. With c the sums of A dt over the rows since the checkpoint S and j the rows before
// t:
//
//   y_t = exp(c_t) S C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t,   out = y silu(z)
//   flush:  S <- exp(c_old) S + sum_{j old} exp(c_old - c_j) dt_j x_j B_j^T, then y from the new S
//
// Equals reference.replay_step. Grid: one block per (batch row, head), head fastest; one warp per
// slab of 16 rows p. Reads the checkpoint, live ring rows and the new tokens; writes `out`, the new
// ring rows (warp 0: dt; warp 0 of a group's first head: B), and the checkpoint on flush. Never
// reads a dead ring row, never writes a live one, touches nothing of a padded row but `out`.
#include "step.cuh"

using namespace replay;

__device__ __forceinline__ int64_t out_index(const CheckpointingSsuParams& params, const Unit& unit,
                                             int t) {
  return unit.row * params.out_batch_stride + (unit.token + t) * params.out_token_stride +
         unit.head * params.out_head_stride + unit.slab * kRows;
}

__device__ __forceinline__ void zero_outputs(const CheckpointingSsuParams& params,
                                             const Unit& unit) {
  for (int t = (threadIdx.x & 31) >> 4; t < unit.q; t += 2) {
    const int64_t index = out_index(params, unit, t) + (threadIdx.x & 15);
    convert::store_float(params.out, index, params.out_type, 0.0f);
  }
}

// Raw products C_t . B_j of the rows read out: cb[i] is a 16 x 8 fragment (t, j = 8 i + ...).
template <class Act, int kPairs, int kTokenTiles>
__device__ __forceinline__ void weigh(float (&cb)[2][4], const uint32_t (&C)[kTokenTiles][kPairs],
                                      const uint32_t (&B)[2][kPairs]) {
#pragma unroll
  for (int r = 0; r < kPairs; r += 2) {
    const uint32_t a[4] = {C[0][r], kTokenTiles > 1 ? C[kTokenTiles - 1][r] : 0u, C[0][r + 1],
                           kTokenTiles > 1 ? C[kTokenTiles - 1][r + 1] : 0u};
#pragma unroll
    for (int i = 0; i < 2; ++i) mma<Act>(cb[i], a, B[i][r], B[i][r + 1]);
  }
}

// Weights exp(c_t - c_j) dt_j (C_t . B_j), plus D on the token's own row, in place of the products.
template <int kTokenTiles>
__device__ __forceinline__ void scale_weights(float (&cb)[2][4], const Decays& decays,
                                              const Window& window, const Lane& lane, float D) {
  Sum at_token[kTokenTiles];
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    at_token[tile] = shuffle(decays.sum, (window.old_rows() + 8 * tile + lane.g) & 15);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = 8 * i + 2 * lane.t + e;
      const Sum at_j = shuffle(decays.sum, j);
      const float dt_j = __shfl_sync(kAllLanes, decays.dt, j);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float& weight = cb[i][2 * tile + e];
        const int t = 8 * tile + lane.g, row = window.old_rows() + t;
        if (tile < kTokenTiles && t < window.q && j <= row) {
          const float span = difference(at_token[tile < kTokenTiles ? tile : 0], at_j);
          weight = ptx::ex2(decays.a * span) * dt_j * weight + (j == row ? D : 0.0f);
        } else {
          weight = 0.0f;
        }
      }
    }
  }
}

// acc += S C^T for one k-step: pairs r and r + 1 of rows g and g + 8, as kTerms bf16 terms.
template <int kTerms, class Act, int kPairs, int kTokenTiles>
__device__ __forceinline__ void read_out(float (&acc)[kTokenTiles][4], const float2 (&S)[4],
                                         const uint32_t (&C)[kTokenTiles][kPairs], int r) {
  uint32_t a[kTerms][4];
  split_rows(S, a);
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    uint32_t b0[kExactTerms<Act>], b1[kExactTerms<Act>];
    activation_terms<Act>(C[tile][r], b0);
    activation_terms<Act>(C[tile][r + 1], b1);
    product(acc[tile], a, b0, b1);
  }
}

// acc += S C^T for one piece of state as stored.
template <class State, class Act, int kPairs, int kTokenTiles>
__device__ __forceinline__ void read_out_stored(float (&acc)[kTokenTiles][4], const uint4& upper,
                                                const uint4& lower,
                                                const uint32_t (&C)[kTokenTiles][kPairs],
                                                int piece) {
  constexpr int kPairsOfPiece = 8 / sizeof(State);
#pragma unroll
  for (int q = 0; q < kPairsOfPiece; q += 2) {
    const int r = piece * kPairsOfPiece + q;
    if constexpr (convert::same<State, Act>) {
      const uint32_t u[4] = {upper.x, upper.y, upper.z, upper.w};
      const uint32_t l[4] = {lower.x, lower.y, lower.z, lower.w};
      const uint32_t a[4] = {u[q], l[q], u[q + 1], l[q + 1]};
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile)
        mma<Act>(acc[tile], a, C[tile][r], C[tile][r + 1]);
    } else {
      const float2 v[4] = {piece_pair<State>(upper, q), piece_pair<State>(lower, q),
                           piece_pair<State>(upper, q + 1), piece_pair<State>(lower, q + 1)};
      read_out<kExactTerms<State>, Act>(acc, v, C, r);
    }
  }
}

// What a flush needs beside the state: the old rows of x, scaled, and the state's own decay.
// Three terms keep the 24 bits of exp(c_old - c_j) dt_j x_j where the state keeps them.
template <class State>
constexpr int kFoldTerms = sizeof(State) == 4 ? 3 : 2;

template <class State>
struct Fold {
  uint32_t x[kFoldTerms<State>][4];
  float decay;
};

template <class State, class Act>
__device__ __forceinline__ Fold<State> prepare_fold(const CheckpointingSsuParams& params,
                                                    const Unit& unit, const Window& window,
                                                    const Decays& decays, const Lane& lane) {
  Fold<State> fold;
  const Window old = {window.start, window.live, 0, false};
  uint32_t rows[2][2], a[4];
  load_x<Act>(rows, params, unit, old, lane);
  transpose_x(a, rows);
  const Sum total = shuffle(decays.sum, 31);
  fold.decay = ptx::ex2(decays.a * total.high);
  float2 scaled[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float coefficient[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = kRows + 8 * i + 2 * lane.t + e;
      const float span = difference(total, shuffle(decays.sum, j));
      coefficient[e] = ptx::ex2(decays.a * span) * __shfl_sync(kAllLanes, decays.dt, j);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = convert::unpack<Act>(a[2 * i + h]);
      scaled[2 * i + h] = make_float2(coefficient[0] * x.x, coefficient[1] * x.y);
    }
  }
  split_rows(scaled, fold.x);
  return fold;
}

// Where a fold goes. A row of an 8-bit state is encoded when all of it is known, so its chunks wait
// in registers; other states are stored piece by piece.
template <class State, int kDstate>
struct Target {
  State* slab;     // the lane's first piece in row g
  float* scale;    // of row g; that of row g + 8 lies 8 behind
  int64_t offset;  // of the first piece in the state's storage
  Rounding rounding;
  float2 rows[2][convert::kScaled<State> ? kDstate / 8 : 1];

  template <int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece], int column,
                                      int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (convert::kScaled<State>) {
#pragma unroll
        for (int q = 0; q < kPairsOfPiece; ++q) rows[h][column / 8 + 8 * piece + q] = folded[h][q];
      } else {
        const int64_t at = column + 8 * kPairsOfPiece * piece + 8 * h * kDstate;
        uint4* to = reinterpret_cast<uint4*>(slab + at);
        if (sizeof(State) < 4 && rounding.rounds > 0) {
          *to = encode_piece<State, true>(folded[h], rounding, offset + at);
        } else {
          *to = encode_piece<State, false>(folded[h], rounding, offset + at);
        }
      }
    }
  }

  // The two ways to round are apart, so that the common one runs through short code.
  __device__ __forceinline__ void finish(const Lane& lane) {
    if (rounding.rounds > 0) {
      store_rows<true>(lane);
    } else {
      store_rows<false>(lane);
    }
  }

  template <bool kStochastic>
  __device__ __forceinline__ void store_rows(const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = 8 * h * kDstate;
      store_scaled_row<State, kStochastic, kDstate / 64>(slab + at, scale + 8 * h, offset + at,
                                                         rows[h], rounding, lane);
    }
  }
};

// Folds the old rows into one chunk of the slab, hands it to the target, and reads it out.
template <class State, class Act, int kDstate, int kPieces, int kPairs, int kTokenTiles>
__device__ __forceinline__ void fold_chunk(
    float (&acc)[kTokenTiles][4], Target<State, kDstate>& target, const uint4 (&upper)[kPieces],
    const uint4 (&lower)[kPieces], const float (&scale)[2], const Fold<State>& fold,
    const uint32_t (&C)[kTokenTiles][kPairs], const CheckpointingSsuParams& params,
    const Unit& unit, const Window& window, const Lane& lane, int column) {
  constexpr int kPiece = 16 / sizeof(State), kPairsOfPiece = kPiece / 2;
  constexpr int kBatch = sizeof(State) == 1 ? 1 : 2;  // pieces whose B is in registers at once
  const Window old = {window.start, window.live, 0, false};
  const float decay[2] = {fold.decay * scale[0], fold.decay * scale[1]};
#pragma unroll
  for (int first = 0; first < kPieces; first += kBatch) {
    uint32_t B[2][kBatch * kPairsOfPiece];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 8 * i + lane.g;
      const Act* row = B_row<Act>(params, unit, old, j) + column + 4 * kPiece * first;
      load_row<kPiece>(B[i], row, lane.t, j < window.live);
    }
#pragma unroll
    for (int J = first; J < first + kBatch; ++J) {
      float2 folded[2][kPairsOfPiece];
#pragma unroll
      for (int q = 0; q < kPairsOfPiece; ++q) {
        const int r = (J - first) * kPairsOfPiece + q;
        uint32_t b0[kExactTerms<Act>], b1[kExactTerms<Act>];
        activation_terms<Act>(ptx::movmatrix(B[0][r]), b0);
        activation_terms<Act>(ptx::movmatrix(B[1][r]), b1);
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        product(d, fold.x, b0, b1);
        const float2 u = piece_pair<State>(upper[J], q), l = piece_pair<State>(lower[J], q);
        folded[0][q] = make_float2(fmaf(decay[0], u.x, d[0]), fmaf(decay[0], u.y, d[1]));
        folded[1][q] = make_float2(fmaf(decay[1], l.x, d[2]), fmaf(decay[1], l.y, d[3]));
      }
      target.put(folded, column, J);
#pragma unroll
      for (int q = 0; q < kPairsOfPiece; q += 2) {
        const float2 v[4] = {folded[0][q], folded[1][q], folded[0][q + 1], folded[1][q + 1]};
        read_out<2, Act>(acc, v, C, J * kPairsOfPiece + q);
      }
    }
  }
}

// acc <- exp(c_t) acc + (weights of the rows) x. The weights lie as a B operand already.
template <class Act, int kTokenTiles>
__device__ __forceinline__ void add_rows(float (&acc)[kTokenTiles][4], const float (&weights)[2][4],
                                         const uint32_t (&x)[2][2], const Decays& decays,
                                         const Window& window, const Lane& lane) {
  uint32_t raw[4], a[kExactTerms<Act>][4];
  transpose_x(raw, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t terms[kExactTerms<Act>];
    activation_terms<Act>(raw[i], terms);
#pragma unroll
    for (int k = 0; k < kExactTerms<Act>; ++k) a[k][i] = terms[k];
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token_row = window.old_rows() + 8 * tile + 2 * lane.t + e;
      const float decay =
          ptx::ex2(decays.a * __shfl_sync(kAllLanes, decays.sum.high, token_row & 15));
      acc[tile][e] *= decay;
      acc[tile][2 + e] *= decay;
    }
    uint32_t b0[2], b1[2];
    convert::split(make_float2(weights[0][2 * tile], weights[0][2 * tile + 1]), b0);
    convert::split(make_float2(weights[1][2 * tile], weights[1][2 * tile + 1]), b1);
    product(acc[tile], a, b0, b1);
  }
}

// Multiplies the outputs of a tile by silu(z). acc holds (p, t), memory (t, p).
template <class Act>
__device__ __forceinline__ void gate(float (&acc)[4], const CheckpointingSsuParams& params,
                                     const Unit& unit, const Window& window, const Lane& lane,
                                     int t) {
  const Act* z = static_cast<const Act*>(params.z) + unit.row * params.z_batch_stride +
                 (unit.token + t) * params.z_token_stride + unit.head * params.z_head_stride +
                 unit.slab * kRows + 2 * lane.t;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t raw = t < window.q ? *reinterpret_cast<const uint32_t*>(z + 8 * h) : 0u;
    const float2 of_tokens = convert::unpack<Act>(ptx::movmatrix(raw));
    acc[2 * h] *= convert::silu(of_tokens.x);
    acc[2 * h + 1] *= convert::silu(of_tokens.y);
  }
}

template <class Act, int kTokenTiles>
__device__ __forceinline__ void store_out(float (&acc)[kTokenTiles][4],
                                          const CheckpointingSsuParams& params, const Unit& unit,
                                          const Window& window, const Lane& lane) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int t = 8 * tile + lane.g;
    if (params.z != nullptr) gate<Act>(acc[tile], params, unit, window, lane, t);
    if (params.out_type == kFloat32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * tile + 2 * lane.t + (i & 1), p = lane.g + 8 * (i >> 1);
        if (token < window.q) {
          static_cast<float*>(params.out)[out_index(params, unit, token) + p] = acc[tile][i];
        }
      }
      continue;
    }
    Act* out = static_cast<Act*>(params.out) + out_index(params, unit, t) + 2 * lane.t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t pair = convert::pack<Act>(make_float2(acc[tile][2 * h], acc[tile][2 * h + 1]));
      const uint32_t transposed = ptx::movmatrix(pair);
      if (t < window.q) *reinterpret_cast<uint32_t*>(out + 8 * h) = transposed;
    }
  }
}

// Writes the new rows behind the live ones.
template <class Act, int kDstate>
__device__ __forceinline__ void append(const CheckpointingSsuParams& params, const Unit& unit,
                                       const Window& window, const Lane& lane,
                                       const uint32_t (&x)[2][2], float dt) {
  const int first_new = window.start + window.live - window.old_rows();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    if (j < window.old_rows() || j >= window.rows()) continue;
    Act* to = static_cast<Act*>(params.x_cache) + unit.slot * params.x_cache_slot_stride +
              unit.head * params.x_cache_head_stride +
              ring_row(first_new, j, params.ring_buffer_len) * params.x_cache_row_stride +
              unit.slab * kRows + 2 * lane.t;
#pragma unroll
    for (int h = 0; h < 2; ++h) *reinterpret_cast<uint32_t*>(to + 8 * h) = x[i][h];
  }
  if (unit.slab != 0) return;
  if (lane.index >= window.old_rows() && lane.index < window.rows()) {
    params.dt_cache[unit.slot * params.dt_cache_slot_stride +
                    unit.head * params.dt_cache_head_stride +
                    ring_row(first_new, lane.index, params.ring_buffer_len) *
                        params.dt_cache_row_stride] = dt;
  }
  if (unit.head != unit.group * params.heads_per_group) return;
  constexpr int kVectors = kDstate / 8;  // of 16 bytes in a row
  for (int i = lane.index; i < window.q * kVectors; i += 32) {
    const int j = window.old_rows() + i / kVectors, column = i % kVectors * 8;
    Act* to = static_cast<Act*>(params.B_cache) + unit.slot * params.B_cache_slot_stride +
              unit.group * params.B_cache_group_stride +
              ring_row(first_new, j, params.ring_buffer_len) * params.B_cache_row_stride + column;
    *reinterpret_cast<uint4*>(to) =
        *reinterpret_cast<const uint4*>(B_row<Act>(params, unit, window, j) + column);
  }
}

// What leaves the most bytes in flight an SM without spills, for blocks of four warps.
template <class State, class Act, int kDstate, int kTokenTiles>
constexpr int kRegisters = kTokenTiles > 1 || kDstate > 128                  ? 255
                           : sizeof(State) != 2 || !convert::same<Act, bf16> ? 168
                                                                             : 128;

template <class State, class Act, int kDstate, int kTokenTiles>
__global__ void __maxnreg__((kRegisters<State, Act, kDstate, kTokenTiles>))
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  using T = Tiling<State, kDstate>;
  const Lane lane;
  const Unit unit(params);
  const float A = convert::load_float(params.A, unit.head * params.A_stride, params.A_type);
  const float D = params.D == nullptr
                      ? 0.0f
                      : convert::load_float(params.D, unit.head * params.D_stride, params.D_type);
  if (unit.slot < 0) {
    if (params.zero_padding) zero_outputs(params, unit);
    return;
  }
  // Everything is asked for before anything is used. The checkpoint is most of the traffic and
  // does not wait for the cursors.
  const int row = unit.slab * kRows + lane.g;
  const int64_t offset = unit.slot * params.state_slot_stride +
                         unit.head * params.state_head_stride + row * kDstate + lane.t * T::kPiece;
  State* slab = static_cast<State*>(params.state) + offset;
  Chunk<State, kDstate, kTokenTiles> chunk;
  chunk.load_state(slab);
  float* scales = nullptr;  // of rows g and, 8 behind, g + 8
  float scale[2] = {1.0f, 1.0f};
  if constexpr (convert::kScaled<State>) {
    scales = params.state_scale + unit.slot * params.state_scale_slot_stride +
             unit.head * params.state_scale_head_stride + row;
    scale[0] = scales[0], scale[1] = scales[8];
  }
  const Window window = read_cursors(params, unit);
  uint32_t x[2][2];
  load_x<Act>(x, params, unit, window, lane);
  const float raw_dt = load_dt(params, unit, window, lane);
  chunk.template load_rows<Act>(params, unit, window, lane, 0);

  const Decays decays(process_dt(params, unit, window, lane, raw_dt), A);
  Fold<State> fold;
  if (window.flush) fold = prepare_fold<State, Act>(params, unit, window, decays, lane);
  Target<State, kDstate> target{slab, scales, offset, Rounding(params)};
  float cb[2][4] = {}, acc[kTokenTiles][4] = {};
  auto consume_chunk = [&](int column) {
    weigh<Act>(cb, chunk.C, chunk.B);
    if (window.flush) {
      fold_chunk<State, Act>(acc, target, chunk.upper, chunk.lower, scale, fold, chunk.C, params,
                             unit, window, lane, column);
    } else {
#pragma unroll
      for (int J = 0; J < T::kPieces; ++J) {
        read_out_stored<State, Act>(acc, chunk.upper[J], chunk.lower[J], chunk.C, J);
      }
    }
  };
  auto load_chunk = [&](int column) {
    chunk.load_state(slab + column);
    chunk.template load_rows<Act>(params, unit, window, lane, column);
  };
  if constexpr (convert::kScaled<State>) {
    // Rows that wait in registers for their scale need places known at compile time.
#pragma unroll
    for (int column = 0; column < kDstate; column += T::kChunk) {
      if (column > 0) load_chunk(column);
      consume_chunk(column);
    }
  } else {
#pragma unroll 1
    for (int column = 0;;) {
      consume_chunk(column);
      column += T::kChunk;
      if (column >= kDstate) break;
      load_chunk(column);
    }
  }
  if constexpr (convert::kScaled<State>) {
    if (window.flush) {
      target.finish(lane);
    } else {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[tile][i] *= scale[i >> 1];
      }
    }
  }

  scale_weights<kTokenTiles>(cb, decays, window, lane, D);
  add_rows<Act>(acc, cb, x, decays, window, lane);
  store_out<Act>(acc, params, unit, window, lane);
  append<Act, kDstate>(params, unit, window, lane, x, decays.dt);
}
