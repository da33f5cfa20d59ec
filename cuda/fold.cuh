// Rows folded into a state: the arithmetic of a flush, apart from where its operands come from.
#pragma once
#include "replay.cuh"

namespace replay {

// Rows j of x, scaled by exp(c_m - c_j) dt_j, and the decay of the state itself, exp(c_m).
// Three terms keep the 24 bits of a scaled row where the state keeps them.
template <class State>
constexpr int kOperandTerms = sizeof(State) == 4 ? 3 : 2;

template <class State>
struct FoldOperand {
  uint32_t x[kOperandTerms<State>][4];
  float decay;
};

// `rows[i][h]` holds row j = 8 i + g of x, columns p = 8 h + 2 t; zeros where j >= m. Lanes 16 + j
// of `decays` hold the rows.
template <class State, class Act>
__device__ __forceinline__ FoldOperand<State> fold_operand(const uint32_t (&rows)[2][2],
                                                           const Decays& decays, const Lane& lane) {
  FoldOperand<State> operand;
  const uint32_t a[4] = {ptx::movmatrix(rows[0][0]), ptx::movmatrix(rows[0][1]),
                         ptx::movmatrix(rows[1][0]), ptx::movmatrix(rows[1][1])};
  const Sum total = shuffle(decays.sum, 31);
  operand.decay = ptx::ex2(decays.a * total.high);
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
  split_rows(scaled, operand.x);
  return operand;
}

// One piece of rows g and g + 8 with the rows folded in; its pairs of B begin at `first`.
template <class State, class Act, int kPairsOfPiece, int kPairs>
__device__ __forceinline__ void fold_piece(float2 (&folded)[2][kPairsOfPiece], const uint4& upper,
                                           const uint4& lower, const uint32_t (&B)[2][kPairs],
                                           int first, const float (&decay)[2],
                                           const FoldOperand<State>& operand) {
#pragma unroll
  for (int q = 0; q < kPairsOfPiece; ++q) {
    uint32_t b0[kExactTerms<Act>], b1[kExactTerms<Act>];
    activation_terms<Act>(ptx::movmatrix(B[0][first + q]), b0);
    activation_terms<Act>(ptx::movmatrix(B[1][first + q]), b1);
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    product(d, operand.x, b0, b1);
    const float2 u = piece_pair<State>(upper, q), l = piece_pair<State>(lower, q);
    folded[0][q] = make_float2(fmaf(decay[0], u.x, d[0]), fmaf(decay[0], u.y, d[1]));
    folded[1][q] = make_float2(fmaf(decay[1], l.x, d[2]), fmaf(decay[1], l.y, d[3]));
  }
}

}  // namespace replay
