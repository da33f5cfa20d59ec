// A flush of one slab: the old rows folded into the checkpoint, rounded and stored. Outputs do not
// wait for it: they come from the checkpoint as it was and from all rows.
#pragma once
#include "fold.cuh"
#include "step.cuh"

namespace replay {

// Where a fold goes.
template <class State, int kDstate>
struct Target {
  const CheckpointingSsuParams& params;
  State* slab;   // the lane's first piece in row g
  float* scale;  // of row g; that of row g + 8 lies 8 behind

  __device__ __forceinline__ bool stochastic() const {
    return sizeof(State) < 4 && params.rand_seed != nullptr;
  }

  // A piece's place in the state's storage, in elements.
  __device__ __forceinline__ int64_t offset(const State* piece) const {
    return piece - static_cast<const State*>(params.state);
  }

  // One piece of rows g and g + 8. The two ways to round are apart, so that the rows' instructions
  // mix.
  template <int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece], int piece) {
    if (stochastic()) {
      put<true>(folded, Rounding(params), piece);
    } else {
      put<false>(folded, Rounding(), piece);
    }
  }
  template <bool kStochastic, int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece],
                                      const Rounding& rounding, int piece) {
    State* to = slab + 8 * kPairsOfPiece * piece;
#pragma unroll
    for (int h = 0; h < 2; ++h, to += 8 * kDstate) {
      const int64_t place = kStochastic ? offset(to) : 0;
      ptx::store_keep16(to, encode_piece_of_row<State, kStochastic>(folded[h], rounding, place));
    }
  }

  // Piece J of row g + 8 h of an 8-bit state.
  __device__ __forceinline__ void put_piece(const float2 (&folded)[8], int J, int h,
                                            const convert::RowScale& scale) const {
    State* to = slab + 64 * J + 8 * h * kDstate;
    if (stochastic()) {
      store_scaled_pieces<State, true, 1>(to, offset(to), folded, scale, Rounding(params));
    } else {
      store_scaled_pieces<State, false, 1>(to, 0, folded, scale, Rounding());
    }
  }

  // Half a piece of an 8-bit state in rows g and g + 8, whose scales these are.
  __device__ __forceinline__ void put_half(const float2 (&folded)[2][4],
                                           const convert::RowScale (&scales)[2]) {
    if (stochastic()) {
      put_half<true>(folded, scales, Rounding(params));
    } else {
      put_half<false>(folded, scales, Rounding());
    }
  }
  template <bool kStochastic>
  __device__ __forceinline__ void put_half(const float2 (&folded)[2][4],
                                           const convert::RowScale (&scales)[2],
                                           const Rounding& rounding) {
    State* to = slab;
#pragma unroll
    for (int h = 0; h < 2; ++h, to += 8 * kDstate) {
      uint32_t bits[2] = {}, words[2];
      if constexpr (kStochastic) {
        const int64_t place = offset(to);
        const uint4 random = convert::philox4x32(static_cast<uint64_t>(place & ~int64_t{15}),
                                                 rounding.seed, rounding.rounds);
        bits[0] = place & 8 ? random.z : random.x, bits[1] = place & 8 ? random.w : random.y;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 a = scales[h].scaled(folded[h][2 * i]);
        const float2 b = scales[h].scaled(folded[h][2 * i + 1]);
        words[i] =
            scales[h].stored(kStochastic ? convert::pack_codes_stochastically<State>(a, b, bits[i])
                                         : convert::pack_codes<State>(a, b));
      }
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }

  // Whole rows of an 8-bit state. The two ways to round are apart, so that the common one runs
  // through short code.
  __device__ __forceinline__ void put_rows(const float2 (&folded)[2][kDstate / 8],
                                           const Lane& lane) {
    if (stochastic()) {
      put_rows<true>(folded, Rounding(params), lane);
    } else {
      put_rows<false>(folded, Rounding(), lane);
    }
  }

  template <bool kStochastic>
  __device__ __forceinline__ void put_rows(const float2 (&folded)[2][kDstate / 8],
                                           const Rounding& rounding, const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      State* to = slab + 8 * h * kDstate;
      store_scaled_row<State, kStochastic, kDstate / 64>(to, scale + 8 * h, offset(to), folded[h],
                                                         rounding, lane);
    }
  }
};

// Turns the old rows of B into operands of the fold, in their place: b0 and b1 of pairs r and r + 1
// of every lane lie together.
template <class State, class Act, int kDstate, class Map>
__device__ __forceinline__ void prepare_B(const GroupTile<Act, kDstate>& rows, const Map& map,
                                          const Window& window, const Lane& lane) {
  constexpr int kPairs = kDstate / 8;
  uint32_t b[2][kPairs];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const SwappedRow row = rows.B_row(map.old_row(window, 8 * i + lane.g));
    load_row<16 / static_cast<int>(sizeof(State))>(b[i], row, lane.t);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) b[i][r] = ptx::movmatrix(b[i][r]);
  }
  __syncwarp();  // all rows are read
  uint4* to = reinterpret_cast<uint4*>(rows.B()) + lane.index;
#pragma unroll
  for (int r = 0; r < kPairs; r += 2) {
    to[16 * r] = make_uint4(b[0][r], b[1][r], b[0][r + 1], b[1][r + 1]);
  }
  __syncwarp();
}

// A piece of rows g and g + 8, or half of one, with the old rows folded in; `operands(q)` are B's
// for the piece's pairs q and q + 1, in the order of `prepare_B`.
template <class State, class Act, int kPairs, class Operands>
__device__ __forceinline__ void fold_piece(float2 (&upper)[kPairs], float2 (&lower)[kPairs],
                                           const uint4& above, const uint4& below,
                                           Operands operands, const float (&decay)[2],
                                           const Fold<State>& fold) {
#pragma unroll
  for (int q = 0; q < kPairs; q += 2) {
    const uint4 b = operands(q);
    float2 u[2], l[2];
    piece_pairs<State>(above, q, u);
    piece_pairs<State>(below, q, l);
    fold_pair<State, Act>(upper[q], lower[q], u[0], l[0], b.x, b.y, decay, fold);
    fold_pair<State, Act>(upper[q + 1], lower[q + 1], u[1], l[1], b.z, b.w, decay, fold);
  }
}

// Folds the old rows into one slab of state and stores it. `B` is as `prepare_B` left it.
template <class State, class Act, int kDstate, class Pieces>
__device__ __forceinline__ void fold_slab(Target<State, kDstate>& target, const Pieces& pieces,
                                          const unsigned char* B, const Fold<State>& fold,
                                          const Lane& lane) {
  constexpr int kPairsOfPiece = 8 / sizeof(State), kPieces = kDstate / (8 * kPairsOfPiece);
  const uint4* operands = reinterpret_cast<const uint4*>(B) + lane.index;
  const float decay[2] = {fold.decay, fold.decay};
#pragma unroll 2
  for (int J = 0; J < kPieces; ++J) {
    float2 folded[2][kPairsOfPiece];
    fold_piece<State, Act>(
        folded[0], folded[1], pieces.load(0, J), pieces.load(1, J),
        [&](int q) { return operands[16 * (J * kPairsOfPiece + q)]; }, decay, fold);
    target.put(folded, J);
  }
}

// Piece J of rows g and g + 8 of an 8-bit state with the old rows folded in.
template <class State, class Act, class Pieces>
__device__ __forceinline__ void fold_codes(float2 (&folded)[2][8], int J, const Pieces& pieces,
                                           const uint4* operands, const float (&decay)[2],
                                           const Fold<State>& fold) {
  fold_piece<State, Act>(
      folded[0], folded[1], pieces.load(0, J), pieces.load(1, J),
      [&](int q) { return operands[128 * J + 16 * q]; }, decay, fold);
}

// `fold_slab` of an 8-bit state, a row of which is encoded when all of it is known. `scales` decode
// row g and, 8 behind, row g + 8 as they were.
template <class State, class Act, int kDstate, class Pieces>
__device__ __forceinline__ void fold_scaled_slab(Target<State, kDstate>& target,
                                                 const Pieces& pieces, const unsigned char* B,
                                                 const Fold<State>& fold, const float* scales,
                                                 const Lane& lane) {
  const uint4* operands = reinterpret_cast<const uint4*>(B) + lane.index;
  const float decay[2] = {fold.decay * scales[0], fold.decay * scales[8]};
  float2 rows[2][kDstate / 8];
#pragma unroll
  for (int J = 0; J < kDstate / 64; ++J) {
    float2 folded[2][8];
    fold_codes<State, Act>(folded, J, pieces, operands, decay, fold);
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      rows[0][8 * J + q] = folded[0][q], rows[1][8 * J + q] = folded[1][q];
    }
  }
  target.put_rows(rows, lane);
}

// The same in few registers: all is folded twice, first for the largest magnitudes of the rows.
template <class State, class Act, int kDstate, class Pieces>
__device__ __forceinline__ void fold_scaled_twice(const Target<State, kDstate>& target,
                                                  const Pieces& pieces, const unsigned char* B,
                                                  const Fold<State>& fold, const float* scales,
                                                  const Lane& lane) {
  const uint4* operands = reinterpret_cast<const uint4*>(B) + lane.index;
  const float decay[2] = {fold.decay * scales[0], fold.decay * scales[8]};
  float amax[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int J = 0; J < kDstate / 64; ++J) {
    float2 folded[2][8];
    fold_codes<State, Act>(folded, J, pieces, operands, decay, fold);
#pragma unroll
    for (int h = 0; h < 2; ++h) amax[h] = ptx::max_magnitude(amax[h], largest(folded[h]));
  }
  convert::RowScale scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    scale[h] = convert::row_scale<State>(of_row(amax[h]));
    if (lane.t == 0) target.scale[8 * h] = scale[h].decode;
  }
#pragma unroll 1
  for (int J = 0; J < kDstate / 64; ++J) {
    float2 folded[2][8];
    fold_codes<State, Act>(folded, J, pieces, operands, decay, fold);
#pragma unroll
    for (int h = 0; h < 2; ++h) target.put_piece(folded[h], J, h, scale[h]);
  }
}

}  // namespace replay
