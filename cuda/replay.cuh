// The maths of a replayed window that kernels share; names as in replayssm_cupy/reference.py.
//
// One warp owns slabs of 16 rows p of one head's state. It never talks to another warp.
// Lane 4 g + t holds, as an m16n8k16 fragment does, rows g and g + 8 of a slab. The sum over
// dstate may run in any order, so it runs in the order in which the lanes load: a lane's pair r
// (two neighbouring columns n) is the pair r % (kPiece / 2) of its 16-byte piece r / (kPiece / 2),
// and piece J of lane t starts at column 4 * kPiece * J + kPiece * t. Rows of B and C are read
// in the same order, so a piece of state is an MMA operand as it lies in memory.
#pragma once
#include "convert.cuh"

namespace replay {

using convert::kLog2e;

constexpr int kRows = 16;  // most rows in one product over j: a window never has more
constexpr unsigned kAllLanes = 0xffffffffu;

struct Lane {
  int index, g, t;
  __device__ Lane() : index(threadIdx.x & 31), g(index >> 2), t(index & 3) {}
  // Which row and 16 bytes of x the lane gives to `ldmatrix_x4_trans`: matrices (p, j), (p + 8, j),
  // (p, j + 8) and (p + 8, j + 8).
  __device__ int transposed_row() const { return (index & 7) + (index & 16) / 2; }
  __device__ int transposed_column() const { return (index & 8) * 2; }
};

// Columns of a row of state that a lane reads at once: 16 bytes, or its share of a short row.
template <class State, int kDstate>
constexpr int kPieceOf = 16 / sizeof(State);
template <int kDstate>
constexpr int kPieceOf<e2m1, kDstate> = kDstate < 128 ? kDstate / 4 : 32;

// How a state type and dstate fall into pieces and chunks. A chunk is what a lane keeps in
// registers.
template <class State, int kDstate>
struct Tiling {
  static constexpr int kPiece = 16 / sizeof(State);             // elements of a 16-byte piece
  static constexpr int kChunk = kDstate < 128 ? kDstate : 128;  // columns in registers at once
  static constexpr int kChunks = kDstate / kChunk;
  static constexpr int kPieces = kChunk / (4 * kPiece);  // of a lane, in one row
  static constexpr int kPairs = kChunk / 8;              // of a lane, in one row
  static_assert(kDstate % kChunk == 0 && kPieces >= 1, "chunks and pieces tile a row");
};

// ---- cursors ------------------------------------------------------------------------------------

// The flush rule: the window that follows would not leave room for `q` more rows.
__device__ __forceinline__ bool flushes(int prev_num_accepted, int q, int max_window) {
  return prev_num_accepted + q > max_window;
}

__device__ __forceinline__ int ring_row(int ring_start, int j, int ring_buffer_len) {
  const unsigned row = ring_start + j;
  return min(row, row - static_cast<unsigned>(ring_buffer_len));  // below 0 is much
}

// The slot of a batch row as it is given, and what it means: apart, so that whatever does not need
// the slot can be asked for in between.
struct GivenSlot {
  int low, high, pad;

  template <class Params>
  __device__ __forceinline__ GivenSlot(const Params& params, unsigned row)
      : low(row), high(0), pad(-1) {
    if (params.slots == nullptr) return;
    const int wide = params.slots_type == kInt64;
    const int* from = static_cast<const int*>(params.slots) + (row * params.slots_stride << wide);
    low = from[0];
    if (wide) high = from[1];
    pad = static_cast<int>(params.pad_slot_id);
    if (pad != params.pad_slot_id) pad = -1;  // that of no slot
  }

  // -1 for padding.
  template <class Params>
  __device__ __forceinline__ int slot(const Params& params) const {
    const bool real = static_cast<unsigned>(low) < static_cast<unsigned>(params.num_slots);
    return real && high == 0 && low != pad ? low : -1;
  }
};

template <class Params>
__device__ __forceinline__ int find_slot(const Params& params, int row) {
  return GivenSlot(params, row).slot(params);
}

// The rows of a step, read out in one or two products over 16 rows: the old rows and then the new
// ones, at most max_window together; or, in a step that flushes, the old ones apart, which are
// folded into the state as well.
struct Window {
  int start, live, q;
  bool flush;
  // Of the product that has the new rows.
  __device__ __forceinline__ int old_rows() const { return flush ? 0 : live; }
  __device__ __forceinline__ int rows() const { return old_rows() + q; }
  // The ring's row for new token t, behind the live ones.
  __device__ __forceinline__ int new_row(int t, int ring_buffer_len) const {
    return ring_row(ring_row(start, live, ring_buffer_len), t, ring_buffer_len);
  }
};

// ---- decays -------------------------------------------------------------------------------------

// A lane holds dt of one row, and the sum of dt up to it, over as many lanes as there are rows.
// Sums are doubles: their differences stay exact after a large dt.
struct Decays {
  float dt, a;  // a = A * log2(e): decays are powers of two
  double sum;
  __device__ Decays() : dt(0.0f), a(0.0f), sum(0.0) {}
  __device__ __forceinline__ Decays(float dt_of_row, float A, int rows = kRows)
      : dt(dt_of_row), a(A * kLog2e), sum(dt_of_row) {
    const int row = threadIdx.x & (rows - 1);
#pragma unroll
    for (int step = 1; step < 2 * kRows; step <<= 1) {
      if (step == rows) break;
      const double before = __shfl_up_sync(kAllLanes, sum, step, rows);
      if (row >= step) sum += before;
    }
  }
  // exp of the sum, and of what lies between two sums.
  __device__ __forceinline__ float decay(double to) const {
    return ptx::ex2(a * ptx::cvt_f32_f64(to));
  }
  __device__ __forceinline__ float decay(double from, double to) const { return decay(to - from); }
};

// What a row weighs in a fold, exp(c_m - c_j) dt_j, and the state itself, exp(c_m).
__device__ __forceinline__ float fold_weight(const Decays& decays, double total, double sum,
                                             float dt) {
  return decays.decay(sum, total) * dt;
}

template <class Params>
__device__ __forceinline__ float processed_dt(const Params& params, float dt, int head) {
  if (params.dt_bias != nullptr) {
    dt += convert::load_float(params.dt_bias, head * params.dt_bias_stride, params.dt_bias_type);
  }
  return params.dt_softplus ? convert::softplus(dt) : dt;
}

// ---- operands -----------------------------------------------------------------------------------

// A fragment's values as a sum of bf16 terms. Activations are exact in one (bf16) or two (fp16),
// stored states in one (bf16, 8-bit codes), two (fp16), or two to 2^-17 (fp32).
template <class T>
constexpr int kExactTerms = convert::same<T, bf16> || sizeof(T) == 1 ? 1 : 2;

template <class Act>
__device__ __forceinline__ void activation_terms(uint32_t pair,
                                                 uint32_t (&terms)[kExactTerms<Act>]) {
  if constexpr (convert::same<Act, bf16>)
    terms[0] = pair;
  else
    convert::split(convert::unpack<Act>(pair), terms);
}

template <class Act>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (convert::same<Act, bf16>)
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  else
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
}

// d += (sum of a) * (sum of b), leaving out products of terms that lie below the last ones.
template <int kA, int kB>
__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[kA][4],
                                        const uint32_t (&b0)[kB], const uint32_t (&b1)[kB]) {
#pragma unroll
  for (int i = 0; i < kA; ++i)
#pragma unroll
    for (int k = 0; k < kB; ++k)
      if (i + k < (kA > kB ? kA : kB)) ptx::mma_m16n8k16_bf16(d, a[i], b0[k], b1[k]);
}

// The two pairs of rows g and g + 8 that make one k-step of an A operand.
template <int kTerms>
__device__ __forceinline__ void split_rows(const float2 (&v)[4], uint32_t (&terms)[kTerms][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t parts[kTerms];
    convert::split(v[i], parts);
#pragma unroll
    for (int k = 0; k < kTerms; ++k) terms[k][i] = parts[k];
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

// One chunk of a row of B or C, in the lanes' order; zeros where the row is dead.
template <int kPiece, int kPairs, class Act>
__device__ __forceinline__ void load_row(uint32_t (&pairs)[kPairs], const Act* row, int t,
                                         bool live) {
  constexpr int kPairsOfPiece = kPiece / 2;
#pragma unroll
  for (int J = 0; J < kPairs / kPairsOfPiece; ++J) {
    const Act* piece = row + (4 * J + t) * kPiece;
    uint32_t* to = pairs + J * kPairsOfPiece;
    if constexpr (kPiece == 4) {
      const uint2 v = live ? *reinterpret_cast<const uint2*>(piece) : make_uint2(0, 0);
      to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kPiece / 8; ++i) {
        const uint4 v = live ? reinterpret_cast<const uint4*>(piece)[i] : make_uint4(0, 0, 0, 0);
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
      }
    }
  }
}

// ---- stored state -------------------------------------------------------------------------------

// Pair `q` of a 16-byte piece of state as floats: values, or the codes of an 8-bit state.
template <class State>
__device__ __forceinline__ float2 piece_pair(const uint4& piece, int q) {
  const uint32_t word[4] = {piece.x, piece.y, piece.z, piece.w};
  if constexpr (sizeof(State) == 4) {
    return make_float2(__uint_as_float(word[2 * q]), __uint_as_float(word[2 * q + 1]));
  } else if constexpr (sizeof(State) == 2) {
    return convert::unpack<State>(word[q]);
  } else {
    return convert::unpack<State>(word[q / 2] >> (16 * (q & 1)));
  }
}

// Pairs `q` and q + 1; q is even.
template <class State>
__device__ __forceinline__ void piece_pairs(const uint4& piece, int q, float2 (&pairs)[2]) {
  if constexpr (sizeof(State) == 1) {
    uint32_t first, second;
    convert::operands<State>(piece, q, first, second);
    pairs[0] = convert::unpack<fp16>(first), pairs[1] = convert::unpack<fp16>(second);
  } else {
    pairs[0] = piece_pair<State>(piece, q), pairs[1] = piece_pair<State>(piece, q + 1);
  }
}

// How states are rounded when they are stored: to nearest without rounds, else stochastically.
struct Rounding {
  uint64_t seed;
  int rounds;

  __device__ Rounding() : seed(0), rounds(0) {}
  template <class Params>
  __device__ explicit Rounding(const Params& params) : seed(0), rounds(0) {
    if (params.rand_seed == nullptr) return;
    const uint64_t given = static_cast<uint64_t>(*params.rand_seed);
    seed = params.layer < 0 ? given : convert::mix_seed(given, params.layer);
    rounds = params.philox_rounds;
  }
};

// One piece from floats; those of an 8-bit state are scaled already. `offset` is the piece's first
// element in the state's storage: one call of Philox serves a piece.
template <class State, bool kStochastic>
__device__ __forceinline__ uint4 encode_piece(const float2 (&v)[8 / sizeof(State)],
                                              const Rounding& rounding, int64_t offset) {
  if constexpr (sizeof(State) == 4) {
    return make_uint4(__float_as_uint(v[0].x), __float_as_uint(v[0].y), __float_as_uint(v[1].x),
                      __float_as_uint(v[1].y));
  } else {
    uint32_t word[4], bits[4] = {};
    if constexpr (kStochastic) {
      const uint4 random =
          convert::philox4x32(static_cast<uint64_t>(offset), rounding.seed, rounding.rounds);
      bits[0] = random.x, bits[1] = random.y, bits[2] = random.z, bits[3] = random.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(State) == 2) {
        word[i] = kStochastic ? convert::pack_stochastically<State>(v[i], bits[i])
                              : convert::pack<State>(v[i]);
      } else {
        const float2 a = v[2 * i], b = v[2 * i + 1];
        word[i] = kStochastic ? convert::pack_codes_stochastically<State>(a, b, bits[i])
                              : convert::pack_codes<State>(a, b);
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// The largest magnitude; NaN where a value is NaN.
template <int kCount>
__device__ __forceinline__ float largest(const float2 (&v)[kCount]) {
  float2 amax = make_float2(0.0f, 0.0f);  // two chains of instructions, not one
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    amax.x = ptx::max_magnitude(amax.x, v[i].x), amax.y = ptx::max_magnitude(amax.y, v[i].y);
  }
  return ptx::max_magnitude(amax.x, amax.y);
}

// Over the lanes that share a row.
__device__ __forceinline__ float of_row(float amax) {
  amax = ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, 1));
  return ptx::max_magnitude(amax, __shfl_xor_sync(kAllLanes, amax, 2));
}

template <class State>
struct Piece {
  float2 v[8 / sizeof(State)];
};

// The stochastic form as a call: many pieces of a row share its code.
template <class State>
__device__ __noinline__ uint4 encode_stochastically(Piece<State> piece, Rounding rounding,
                                                    int64_t offset) {
  return encode_piece<State, true>(piece.v, rounding, offset);
}

// A row of pieces, all to nearest or all stochastically.
template <class State, bool kStochastic>
__device__ __forceinline__ uint4 encode_piece_of_row(const float2 (&v)[8 / sizeof(State)],
                                                     const Rounding& rounding, int64_t offset) {
  if constexpr (!kStochastic) return encode_piece<State, false>(v, rounding, offset);
  Piece<State> piece;
#pragma unroll
  for (int i = 0; i < 8 / sizeof(State); ++i) piece.v[i] = v[i];
  return encode_stochastically<State>(piece, rounding, offset);
}

// Encodes the lane's pieces of one row of an 8-bit state. `to` is the first of them, `offset` its
// place in the storage; pieces lie four apart.
template <class State, bool kStochastic, int kPieces>
__device__ __forceinline__ void store_scaled_pieces(State* to, int64_t offset,
                                                    const float2 (&v)[kPieces * 8],
                                                    const convert::RowScale& row,
                                                    const Rounding& rounding) {
#pragma unroll
  for (int J = 0; J < kPieces; ++J) {
    float2 piece[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) piece[q] = row.scaled(v[8 * J + q]);
    const uint4 codes = encode_piece_of_row<State, kStochastic>(piece, rounding, offset + 64 * J);
    *reinterpret_cast<uint4*>(to + 64 * J) = make_uint4(row.stored(codes.x), row.stored(codes.y),
                                                        row.stored(codes.z), row.stored(codes.w));
  }
}

// All of a row, and its scale.
template <class State, bool kStochastic, int kPieces>
__device__ __forceinline__ void store_scaled_row(State* to, float* scale, int64_t offset,
                                                 const float2 (&v)[kPieces * 8],
                                                 const Rounding& rounding, const Lane& lane) {
  const convert::RowScale row = convert::row_scale<State>(of_row(largest(v)));
  store_scaled_pieces<State, kStochastic, kPieces>(to, offset, v, row, rounding);
  if (lane.t == 0) *scale = row.decode;
}

}  // namespace replay
