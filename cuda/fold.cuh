// Rows folded into a state: the arithmetic that a flush and a prefix snapshot share, bit for bit.
#pragma once
#include "replay.cuh"

namespace replay {

// What a fold takes, exp(c_m - c_j) dt_j of all rows and exp(c_m): the lower half of a warp has the
// rows.
__device__ __forceinline__ void put_fold_weights(float* to, const Decays& decays) {
  const int j = threadIdx.x & 31;
  const double total = __shfl_sync(kAllLanes, decays.sum, kRows - 1);
  if (j >= kRows) return;
  to[j] = fold_weight(decays, total, decays.sum, decays.dt);
  if (j == 0) to[kRows] = decays.decay(total);
}

// exp(c_m - c_j) dt_j of the lane's rows j = 2 t, 2 t + 1, 2 t + 8, 2 t + 9, and exp(c_m), which is
// the decay of the state itself.
struct FoldWeights {
  float coefficient[4], decay;

  // As `put_fold_weights` left them.
  __device__ __forceinline__ FoldWeights(const float* from, const Lane& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) coefficient[i] = from[8 * (i >> 1) + 2 * lane.t + (i & 1)];
    decay = from[kRows];
  }
};

// The rows of x of one slab, weighed, as an A operand. Three terms keep the 24 bits of a weighed
// row where the state keeps them.
template <class State>
constexpr int kFoldTerms = sizeof(State) == 4 ? 3 : 2;

template <class State>
struct Fold {
  uint32_t x[kFoldTerms<State>][4];
  float decay;
};

// `x` holds the rows as an A operand.
template <class State, class Act>
__device__ __forceinline__ Fold<State> prepare_fold(const FoldWeights& weights,
                                                    const uint32_t (&x)[4]) {
  Fold<State> fold;
  fold.decay = weights.decay;
  float2 scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = convert::unpack<Act>(x[i]);
    const float* c = weights.coefficient + 2 * (i >> 1);
    scaled[i] = make_float2(c[0] * v.x, c[1] * v.y);
  }
  split_rows(scaled, fold.x);
  return fold;
}

// One pair of columns of rows g and g + 8 with the rows folded in; b0 and b1 are B's operands
// there.
template <class State, class Act>
__device__ __forceinline__ void fold_pair(float2& upper, float2& lower, float2 stored_upper,
                                          float2 stored_lower, uint32_t b0, uint32_t b1,
                                          const float (&decay)[2], const Fold<State>& fold) {
  uint32_t terms0[kExactTerms<Act>], terms1[kExactTerms<Act>];
  activation_terms<Act>(b0, terms0);
  activation_terms<Act>(b1, terms1);
  float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  product(d, fold.x, terms0, terms1);
  upper = make_float2(fmaf(decay[0], stored_upper.x, d[0]), fmaf(decay[0], stored_upper.y, d[1]));
  lower = make_float2(fmaf(decay[1], stored_lower.x, d[2]), fmaf(decay[1], stored_lower.y, d[3]));
}

}  // namespace replay
