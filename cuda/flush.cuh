// A flush of one slab: the old rows folded into the checkpoint, rounded, stored, and read out.
#pragma once
#include "step.cuh"

namespace replay {

// Asks for the old rows of B and x, which are in no cache yet, long before the fold needs them.
template <class Act, int kDstate>
__device__ __forceinline__ void prefetch_old_rows(const CheckpointingSsuParams& params,
                                                  const Unit& unit, const Window& window,
                                                  const Lane& lane) {
  constexpr int kLine = 128 / sizeof(Act), kLines = kDstate / kLine;  // of a row of B
  const Window old = {window.start, window.live, 0, false};
  for (int i = lane.index; i < window.live * kLines; i += 32) {
    ptx::prefetch_l2(B_row<Act>(params, unit, old, i / kLines) + i % kLines * kLine);
  }
  if (lane.index < window.live) {
    ptx::prefetch_l2(x_row<Act>(params, unit, old, unit.first_row(0), lane.index));
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
                                                    const Decays& decays, const Lane& lane,
                                                    int first_row) {
  Fold<State> fold;
  const Window old = {window.start, window.live, 0, false};
  uint32_t rows[2][2], a[4];
  load_x<Act>(rows, params, unit, old, lane, first_row);
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

// Pieces of one slab, as loaded for a fold: the checkpoint, and B of the old rows.
template <class State, class Act, int kCount>
struct FoldPieces {
  static constexpr int kPiece = 16 / sizeof(State);
  uint4 upper[kCount], lower[kCount];
  uint32_t B[2][kCount * kPiece / 2];

  // From column `column` of the head on; `state` is the lane's piece there.
  template <int kDstate>
  __device__ __forceinline__ void load(const State* state, const CheckpointingSsuParams& params,
                                       const Unit& unit, const Window& window, const Lane& lane,
                                       int column) {
#pragma unroll
    for (int J = 0; J < kCount; ++J) {
      upper[J] = *reinterpret_cast<const uint4*>(state + 4 * kPiece * J);
      lower[J] = *reinterpret_cast<const uint4*>(state + 4 * kPiece * J + 8 * kDstate);
    }
    const Window old = {window.start, window.live, 0, false};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 8 * i + lane.g;
      load_row<kPiece>(B[i], B_row<Act>(params, unit, old, j) + column, lane.t, j < window.live);
    }
  }
};

// Where a fold goes. A row of an 8-bit state is encoded when all of it is known, so its values wait
// in registers; other states are stored piece by piece.
template <class State, int kDstate>
struct Target {
  const CheckpointingSsuParams& params;
  State* slab;   // the lane's first piece in row g
  float* scale;  // of row g; that of row g + 8 lies 8 behind
  float2 rows[2][convert::kScaled<State> ? kDstate / 8 : 1];

  __device__ __forceinline__ bool stochastic() const {
    return sizeof(State) < 4 && params.rand_seed != nullptr;
  }

  // A piece's place in the state's storage, in elements.
  __device__ __forceinline__ int64_t offset(const State* piece) const {
    return piece - static_cast<const State*>(params.state);
  }

  template <int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece], int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (convert::kScaled<State>) {
#pragma unroll
        for (int q = 0; q < kPairsOfPiece; ++q) rows[h][8 * piece + q] = folded[h][q];
      } else {
        State* to = slab + 8 * kPairsOfPiece * piece + 8 * h * kDstate;
        *reinterpret_cast<uint4*>(to) =
            stochastic() ? encode_piece_of_row<State, true>(folded[h], Rounding(params), offset(to))
                         : encode_piece_of_row<State, false>(folded[h], Rounding(), 0);
      }
    }
  }

  // The two ways to round are apart, so that the common one runs through short code.
  __device__ __forceinline__ void finish(const Lane& lane) {
    if (stochastic()) {
      store_rows<true>(Rounding(params), lane);
    } else {
      store_rows<false>(Rounding(), lane);
    }
  }

  template <bool kStochastic>
  __device__ __forceinline__ void store_rows(const Rounding& rounding, const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      State* to = slab + 8 * h * kDstate;
      store_scaled_row<State, kStochastic, kDstate / 64>(to, scale + 8 * h, offset(to), rows[h],
                                                         rounding, lane);
    }
  }
};

// Folds the old rows into some pieces of a slab, hands them to the target, and reads them out.
template <class State, class Act, int kDstate, int kTokenTiles, int kCount>
__device__ __forceinline__ void fold_pieces(float (&acc)[kTokenTiles][4],
                                            Target<State, kDstate>& target,
                                            const FoldPieces<State, Act, kCount>& given,
                                            const float (&decay)[2], const Fold<State>& fold,
                                            const Unit& unit, const Window& window,
                                            const Lane& lane, int first) {
  constexpr int kPiece = 16 / sizeof(State), kPairsOfPiece = kPiece / 2;
#pragma unroll
  for (int J = 0; J < kCount; ++J) {
    float2 folded[2][kPairsOfPiece];
#pragma unroll
    for (int q = 0; q < kPairsOfPiece; ++q) {
      const int r = J * kPairsOfPiece + q;
      uint32_t b0[kExactTerms<Act>], b1[kExactTerms<Act>];
      activation_terms<Act>(ptx::movmatrix(given.B[0][r]), b0);
      activation_terms<Act>(ptx::movmatrix(given.B[1][r]), b1);
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      product(d, fold.x, b0, b1);
      const float2 u = piece_pair<State>(given.upper[J], q);
      const float2 l = piece_pair<State>(given.lower[J], q);
      folded[0][q] = make_float2(fmaf(decay[0], u.x, d[0]), fmaf(decay[0], u.y, d[1]));
      folded[1][q] = make_float2(fmaf(decay[1], l.x, d[2]), fmaf(decay[1], l.y, d[3]));
    }
    target.put(folded, first + J);
    uint32_t C[kTokenTiles][kPairsOfPiece];
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int t = 8 * tile + lane.g;
      const Act* row = C_row<Act>(target.params, unit, t) + 4 * kPiece * (first + J);
      load_row<kPiece>(C[tile], row, lane.t, t < window.q);
    }
#pragma unroll
    for (int q = 0; q < kPairsOfPiece; q += 2) {
      const float2 v[4] = {folded[0][q], folded[1][q], folded[0][q + 1], folded[1][q + 1]};
      read_out<2, Act>(acc, v, C, q);
    }
  }
}

// A flush of one slab: acc <- (folded state) C^T. The checkpoint is read again, from the cache, so
// that the common path without a flush keeps its registers; the next pieces are on their way
// while some are folded.
template <class State, class Act, int kDstate, int kTokenTiles>
__device__ __forceinline__ void fold_slab(float (&acc)[kTokenTiles][4],
                                          Target<State, kDstate>& target,
                                          const CheckpointingSsuParams& params, const Unit& unit,
                                          const Window& window, const Decays& decays,
                                          const Lane& lane, int first_row) {
  constexpr int kPiece = 16 / sizeof(State), kPieces = kDstate / (4 * kPiece);
  constexpr int kCount = sizeof(State) == 4 ? 2 : 1;  // pieces at once
  FoldPieces<State, Act, kCount> next;
  next.template load<kDstate>(target.slab, params, unit, window, lane, 0);
  const Fold<State> fold = prepare_fold<State, Act>(params, unit, window, decays, lane, first_row);
  float decay[2] = {fold.decay, fold.decay};
  if constexpr (convert::kScaled<State>) decay[0] *= target.scale[0], decay[1] *= target.scale[8];
  // Rows that wait in registers for their scale need places known at compile time.
  constexpr int kUnroll = convert::kScaled<State> ? kPieces : 1;
#pragma unroll kUnroll
  for (int J = 0; J < kPieces; J += kCount) {
    const auto now = next;
    if (J + kCount < kPieces) {
      const int column = 4 * kPiece * (J + kCount);
      next.template load<kDstate>(target.slab + column, params, unit, window, lane, column);
    }
    fold_pieces<State, Act, kDstate>(acc, target, now, decay, fold, unit, window, lane, J);
  }
  if constexpr (convert::kScaled<State>) target.finish(lane);
}

}  // namespace replay
