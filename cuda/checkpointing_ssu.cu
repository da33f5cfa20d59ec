// One decode step of a Mamba-2 layer from checkpoint, ring and new tokens; the state is written
// only on flush. With c the sums of A dt over the rows since the checkpoint S and j the rows before
// t:
//
//   y_t = exp(c_t) S C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t,   out = y silu(z)
//   flush:  S <- exp(c_old) S + sum_{j old} exp(c_old - c_j) dt_j x_j B_j^T, then y from the new S
//
// Equals reference.replay_step. Grid: one block per (batch row, head), head fastest; one warp per
// kSlabs slabs of 16 rows p. Reads the checkpoint, live ring rows and the new tokens; writes `out`,
// the new ring rows (warp 0: dt; warp 0 of a group's first head: B), and the checkpoint on flush.
// Never reads a dead ring row, never writes a live one, touches nothing of a padded row but `out`.
#include "flush.cuh"

using namespace replay;

__device__ __forceinline__ int64_t out_index(const CheckpointingSsuParams& params, const Unit& unit,
                                             int first_row, int t) {
  return unit.row * params.out_batch_stride + (unit.token + t) * params.out_token_stride +
         unit.head * params.out_head_stride + first_row;
}

__device__ __forceinline__ void zero_outputs(const CheckpointingSsuParams& params,
                                             const Unit& unit) {
  for (int s = 0; s < unit.slabs; ++s) {
    for (int t = (threadIdx.x & 31) >> 4; t < unit.q; t += 2) {
      const int64_t index = out_index(params, unit, unit.first_row(s), t) + (threadIdx.x & 15);
      convert::store_float(params.out, index, params.out_type, 0.0f);
    }
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

// What the rows read out give to the outputs: their weights as a B operand, and exp(c_t), which
// weighs the checkpoint.
template <int kTokenTiles>
struct Weights {
  uint32_t upper[kTokenTiles][2], lower[kTokenTiles][2];  // rows 0-7 and 8-15, in bf16 terms
  float decay[kTokenTiles][2];

  __device__ Weights(const float (&cb)[2][4], const Decays& decays, const Window& window,
                     const Lane& lane) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      convert::split(make_float2(cb[0][2 * tile], cb[0][2 * tile + 1]), upper[tile]);
      convert::split(make_float2(cb[1][2 * tile], cb[1][2 * tile + 1]), lower[tile]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = window.old_rows() + 8 * tile + 2 * lane.t + e;
        decay[tile][e] = ptx::ex2(decays.a * __shfl_sync(kAllLanes, decays.sum.high, row & 15));
      }
    }
  }
};

// acc <- exp(c_t) acc + (weights of the rows) x.
template <class Act, int kTokenTiles>
__device__ __forceinline__ void add_rows(float (&acc)[kTokenTiles][4],
                                         const Weights<kTokenTiles>& weights,
                                         const uint32_t (&x)[2][2]) {
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
    for (int i = 0; i < 4; ++i) acc[tile][i] *= weights.decay[tile][i & 1];
    product(acc[tile], a, weights.upper[tile], weights.lower[tile]);
  }
}

// Multiplies the outputs of a tile by silu(z). acc holds (p, t), memory (t, p).
template <class Act>
__device__ __forceinline__ void gate(float (&acc)[4], const CheckpointingSsuParams& params,
                                     const Unit& unit, const Window& window, const Lane& lane,
                                     int first_row, int t) {
  const Act* z = static_cast<const Act*>(params.z) + unit.row * params.z_batch_stride +
                 (unit.token + t) * params.z_token_stride + unit.head * params.z_head_stride +
                 first_row + 2 * lane.t;
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
                                          const Window& window, const Lane& lane, int first_row) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int t = 8 * tile + lane.g;
    if (params.z != nullptr) gate<Act>(acc[tile], params, unit, window, lane, first_row, t);
    if (params.out_type == kFloat32) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * tile + 2 * lane.t + (i & 1), p = lane.g + 8 * (i >> 1);
        if (token < window.q) {
          static_cast<float*>(params.out)[out_index(params, unit, first_row, token) + p] =
              acc[tile][i];
        }
      }
      continue;
    }
    Act* out = static_cast<Act*>(params.out) + out_index(params, unit, first_row, t) + 2 * lane.t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t pair = convert::pack<Act>(make_float2(acc[tile][2 * h], acc[tile][2 * h + 1]));
      const uint32_t transposed = ptx::movmatrix(pair);
      if (t < window.q) *reinterpret_cast<uint32_t*>(out + 8 * h) = transposed;
    }
  }
}

// Writes the new rows behind the live ones.
template <class Act, int kDstate, int kSlabs>
__device__ __forceinline__ void append(const CheckpointingSsuParams& params, const Unit& unit,
                                       const Window& window, const Lane& lane,
                                       const uint32_t (&x)[kSlabs][2][2], float dt) {
  const int first_new = window.start + window.live - window.old_rows();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    if (j < window.old_rows() || j >= window.rows()) continue;
    Act* to = static_cast<Act*>(params.x_cache) + unit.slot * params.x_cache_slot_stride +
              unit.head * params.x_cache_head_stride +
              ring_row(first_new, j, params.ring_buffer_len) * params.x_cache_row_stride +
              unit.first_row(0) + 2 * lane.t;
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      if (s > 0 && s >= unit.slabs) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<uint32_t*>(to + kRows * s + 8 * h) = x[s][i][h];
      }
    }
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

// The slabs of a step that flushes, one after another.
template <class State, class Act, int kDstate, int kTokenTiles>
__device__ __forceinline__ void flush(const Weights<kTokenTiles>& weights,
                                      const CheckpointingSsuParams& params, Unit unit,
                                      const Window& window, const Decays& decays,
                                      const Lane& lane) {
  // Read again: what follows from it is then in no register while there is no flush.
  unit.slot = find_slot(params, unit.row);
  State* state = first_piece<State, kDstate>(params, unit, lane);
#pragma unroll 1
  for (int s = 0; s < unit.slabs; ++s) {
    const int first_row = unit.first_row(s);
    float acc[kTokenTiles][4] = {};
    Target<State, kDstate> target{params, state + first_row * kDstate, nullptr};
    if constexpr (convert::kScaled<State>) {
      target.scale = first_scale(params, unit, lane) + first_row;
    }
    fold_slab<State, Act, kDstate>(acc, target, params, unit, window, decays, lane, first_row);
    uint32_t x[2][2];
    load_x<Act>(x, params, unit, window, lane, first_row);
    add_rows<Act>(acc, weights, x);
    store_out<Act>(acc, params, unit, window, lane, first_row);
  }
}

// What leaves the most bytes in flight an SM without spills.
template <int kDstate, int kTokenTiles>
constexpr int kRegisters = kTokenTiles > 1 || kDstate > 128 ? 255 : 168;

template <class State, class Act, int kDstate, int kTokenTiles, int kSlabs>
__global__ void __maxnreg__((kRegisters<kDstate, kTokenTiles>))
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  using T = Tiling<State, kDstate>;
  const Lane lane;
  const Unit unit(params, kSlabs);
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
  State* state = first_piece<State, kDstate>(params, unit, lane);
  Chunk<State, kDstate, kTokenTiles, kSlabs> chunk;
  chunk.load_state(state, unit);
  float scale[kSlabs][2];  // of rows g and g + 8
  if constexpr (convert::kScaled<State>) {
    const float* scales = first_scale(params, unit, lane);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      scale[s][0] = scales[unit.first_row(s)], scale[s][1] = scales[unit.first_row(s) + 8];
    }
  }
  const Window window = read_cursors(params, unit);
  if (window.flush) prefetch_old_rows<Act, kDstate>(params, unit, window, lane);
  uint32_t x[kSlabs][2][2];
#pragma unroll
  for (int s = 0; s < kSlabs; ++s) load_x<Act>(x[s], params, unit, window, lane, unit.first_row(s));
  const float raw_dt = load_dt(params, unit, window, lane);
  chunk.template load_rows<Act>(params, unit, window, lane, 0);

  const Decays decays(process_dt(params, unit, window, lane, raw_dt), A);
  float cb[2][4] = {}, acc[kSlabs][kTokenTiles][4] = {};
#pragma unroll 1
  for (int column = 0;;) {
    weigh<Act>(cb, chunk.C, chunk.B);
    if (!window.flush) {
#pragma unroll
      for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
        for (int J = 0; J < T::kPieces; ++J) {
          read_out_stored<State, Act>(acc[s], chunk.upper[s][J], chunk.lower[s][J], chunk.C, J);
        }
      }
    }
    column += T::kChunk;
    if (column >= kDstate) break;
    chunk.load_state(state + column, unit);
    chunk.template load_rows<Act>(params, unit, window, lane, column);
  }
  scale_weights<kTokenTiles>(cb, decays, window, lane, D);
  const Weights<kTokenTiles> weights(cb, decays, window, lane);
  append<Act, kDstate>(params, unit, window, lane, x, decays.dt);
  if (!window.flush) {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      if (s > 0 && s >= unit.slabs) break;
      if constexpr (convert::kScaled<State>) {
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[s][tile][i] *= scale[s][i >> 1];
        }
      }
      add_rows<Act>(acc[s], weights, x[s]);
      store_out<Act>(acc[s], params, unit, window, lane, unit.first_row(s));
    }
    return;
  }
  flush<State, Act, kDstate>(weights, params, unit, window, decays, lane);
}
