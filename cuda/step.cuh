// The phases of a replay step over rows and slabs in shared memory, each the work of one warp.
#pragma once
#include "rows.cuh"

namespace replay {

// Of a block of the forms for few heads. The heads of a sequence, which flush together, lie side by
// side in the grid: they are on as many multiprocessors.
__device__ __forceinline__ unsigned batch_row_of_block(int flags) {
  return flags & kRowsFirst ? blockIdx.x : blockIdx.y;
}
__device__ __forceinline__ unsigned head_of_block(int flags) {
  return flags & kRowsFirst ? blockIdx.y : blockIdx.x;
}

// ---- dt of the rows -----------------------------------------------------------------------------

constexpr int kHeadsOfItem = 8;  // most heads that are prepared together

// dt of the new tokens of some heads, loaded long before it is used: (head, token), head fastest.
template <int kTokenTiles>
struct NewDt {
  static constexpr int kCount = kTokenTiles * 8 * kHeadsOfItem / 32;  // of a lane
  convert::Bits raw[kCount];

  __device__ __forceinline__ void load(const CheckpointingSsuParams& params, const Request& request,
                                       int head, int heads, const Lane& lane) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int i = 32 * n + lane.index, t = i / kHeadsOfItem, h = i % kHeadsOfItem;
      if (t >= request.window.q || h >= heads) continue;
      const bool wide = params.dt_type == kFloat32;
      const int64_t index = dt_of_token(params, request, head + h, t);
      raw[n] = convert::load_bits(
          static_cast<const unsigned char*>(params.dt) + (index << (wide ? 2 : 1)), wide, !wide);
    }
  }

  // As it counts, to `to`, 32 values a head. `constant` of lane 16 + h is dt_bias of head h.
  __device__ __forceinline__ void put(float* to, const CheckpointingSsuParams& params, int q,
                                      int heads, float constant, const Lane& lane) const {
    const int h = lane.index % kHeadsOfItem;
    const float bias = __shfl_sync(kAllLanes, constant, 2 * kHeadsOfItem + h);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int t = (32 * n + lane.index) / kHeadsOfItem;
      if (t >= q || h >= heads) continue;
      const float dt = convert::bits_to_float(raw[n], params.dt_type) + bias;
      to[32 * h + t] = params.dt_softplus ? convert::softplus(dt) : dt;
    }
  }
};

// A, D and dt_bias of heads: 8 lanes each, a value a lane. Which array a lane reads, and how, is
// kept: it would be chosen anew for each item.
struct HeadConstants {
  const unsigned char* array;
  int64_t stride;     // in bytes
  int type;           // of FloatType, or -1: zeros
  convert::Bits raw;  // loaded long before it is used

  __device__ __forceinline__ HeadConstants(const CheckpointingSsuParams& params, const Lane& lane) {
    const int which = lane.index / kHeadsOfItem;
    const void* of_lane = which == 0 ? params.A : which == 1 ? params.D : params.dt_bias;
    type = which == 0 ? params.A_type : which == 1 ? params.D_type : params.dt_bias_type;
    stride = which == 0 ? params.A_stride : which == 1 ? params.D_stride : params.dt_bias_stride;
    if (of_lane == nullptr) type = -1, of_lane = params.A;
    type = ptx::opaque(static_cast<unsigned>(type));
    stride *= type == kFloat32 ? 4 : 2;
    array = ptx::computed_now(static_cast<const unsigned char*>(of_lane));
  }

  // Of some heads from `head` on.
  __device__ __forceinline__ void load(int head, int heads, const Lane& lane) {
    head += min(lane.index % kHeadsOfItem, heads - 1);
    raw = convert::load_bits(array + head * stride, type == kFloat32, type > kFloat32);
  }
  __device__ __forceinline__ float value() const { return convert::bits_to_float(raw, type); }
};

// ---- weights of the rows ------------------------------------------------------------------------

// Products C_t . B_j of 16 rows, to `products` (t, j). Columns are summed in the order of 16-bit
// pieces, whatever the type of the state. `row_of(j)` is row j's place in the tile.
template <class Act, int kDstate, int kTokenTiles, class RowOf>
__device__ __forceinline__ void put_products(float* products, const GroupTile<Act, kDstate>& tile,
                                             const Window& window, const Lane& lane, RowOf row_of) {
  using Pieces = SwappedRow::Pieces<16>;
  const Pieces B[2] = {tile.B_row(row_of(lane.g)).template pieces<16>(lane.t),
                       tile.B_row(row_of(8 + lane.g)).template pieces<16>(lane.t)};
#pragma unroll
  for (int k = 0; k < kTokenTiles; ++k) {
    const int t = 8 * k + lane.g;
    const Pieces C = tile.C_row(max(min(t, window.q - 1), 0)).template pieces<16>(lane.t);
    // Both halves of an operand are C_t: of `even` the upper half counts, of `odd` the lower one.
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int J = 0; J < kDstate / 32; ++J) {
      // Word by word in this order: of a piece the compiler would make a copy for each product.
      const unsigned char* c = C.piece(J);
      const uint32_t a[4] = {ptx::load_shared4(c), ptx::load_shared4(c + 8),
                             ptx::load_shared4(c + 4), ptx::load_shared4(c + 12)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 b = B[i].load<uint4>(J);
        mma<Act>(even[i], a, b.x, b.y);
        mma<Act>(odd[i], a, b.z, b.w);
      }
    }
    if (t >= window.q) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(products + kRows * t + 8 * i + 2 * lane.t) =
          make_float2(even[i][0] + odd[i][2], even[i][1] + odd[i][3]);
    }
  }
}

// Where the weights of a head lie, in words: of token t the rows j as pairs of bf16, in the order
// in which a lane takes them as B operands: high terms of rows 2 i, 2 i + 1 and 2 i + 8, 2 i + 9,
// then the low ones. Then exp(c_t) of the tokens. Then what a flush takes: weights of the old rows
// like those before, and those of the fold.
struct WeightShape {
  int tokens;
  __device__ __forceinline__ static int row(int j) { return (j & 6) * 4 + (j & 8) / 4 + (j & 1); }
  __device__ __forceinline__ int decays() const { return kRows * tokens; }
  __device__ __forceinline__ int old_rows() const { return ((kRows + 1) * tokens + 3) & ~3; }
  __device__ __forceinline__ int fold() const { return old_rows() + kRows * tokens; }
  __device__ __forceinline__ int words() const { return fold() + kRows + 4; }
};

// Weights exp(c_t - c_j) dt_j (C_t . B_j), plus D on the token's own row, of the lane's row j.
// Half a warp does a head; if it flushes, a whole one, whose lower half has the old rows.
// `products` holds (t, j), of the new rows and then of the old ones, `scale` what exp(c_t) takes
// along.
__device__ __forceinline__ void put_weights(float* to, const WeightShape& shape,
                                            const float* products, const float* scale,
                                            const Decays& decays, const Window& window, float D,
                                            bool write) {
  const int j = threadIdx.x & 15, half = threadIdx.x & 16;
  const bool old = window.flush && half == 0;
  const int first_token = window.old_rows(),
            first_lane = (window.flush ? kRows : half) + first_token;
  products += (old ? kRows * shape.tokens : 0) + j;
  auto* halves =
      reinterpret_cast<unsigned short*>(to + (old ? shape.old_rows() : 0)) + WeightShape::row(j);
#pragma unroll 1
  for (int t = 0; t < window.q; ++t) {
    const double at_token = __shfl_sync(kAllLanes, decays.sum, first_lane + t);
    const int own = old ? -1 : first_token + t;
    const bool counts = j <= (old ? window.live - 1 : own);
    const float weight = decays.decay(decays.sum, at_token) * decays.dt * products[kRows * t];
    uint32_t terms[2];
    convert::split(make_float2((counts ? weight : 0.0f) + (j == own ? D : 0.0f), 0.0f), terms);
    if (write) {
      halves[2 * kRows * t] = static_cast<unsigned short>(terms[0]);
      halves[2 * kRows * t + 4] = static_cast<unsigned short>(terms[1]);
    }
  }
  const int t = j - first_token;
  if (write && !old && t >= 0 && t < window.q) {
    to[shape.decays() + t] = decays.decay(decays.sum) * scale[t];
  }
}

// Where the weights that a lane takes lie, in words: those of the rows for each tile of tokens, and
// exp(c_t) of its two tokens of the first tile.
template <int kTokenTiles>
struct WeightsOfLane {
  unsigned rows[kTokenTiles], decays;

  WeightsOfLane() = default;
  __device__ __forceinline__ WeightsOfLane(const WeightShape& shape, const Window& window,
                                           const Lane& lane)
      : decays(ptx::opaque(static_cast<unsigned>(shape.decays() + 2 * lane.t))) {
    const int last = max(window.q - 1, 0);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      rows[tile] =
          ptx::opaque(static_cast<unsigned>(kRows * min(8 * tile + lane.g, last) + 4 * lane.t));
    }
  }
};

// Weights of 16 rows as a B operand: rows 0-7 and 8-15, in bf16 terms.
template <int kTokenTiles>
struct RowWeights {
  uint32_t upper[kTokenTiles][2], lower[kTokenTiles][2];

  __device__ __forceinline__ RowWeights(const float* from,
                                        const WeightsOfLane<kTokenTiles>& of_lane) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const uint4 w = *reinterpret_cast<const uint4*>(from + of_lane.rows[tile]);
      upper[tile][0] = w.x, lower[tile][0] = w.y, upper[tile][1] = w.z, lower[tile][1] = w.w;
    }
  }
};

// What the checkpoint, by exp(c_t), and the rows give to the outputs of a head. Behind the last
// token it is anything: those columns are dropped.
template <int kTokenTiles>
struct Weights {
  RowWeights<kTokenTiles> rows;
  float decay[kTokenTiles][2];

  __device__ __forceinline__ Weights(const float* from, const WeightsOfLane<kTokenTiles>& of_lane)
      : rows(from, of_lane) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const float2 v = *reinterpret_cast<const float2*>(from + of_lane.decays + 8 * tile);
      decay[tile][0] = v.x, decay[tile][1] = v.y;
    }
  }
};

// ---- read-out -----------------------------------------------------------------------------------

// 8-bit codes and fp16 are exact in fp16, so C becomes fp16 beside them: scaled by a power of two
// per token where it is bf16.
template <class State>
constexpr bool kHalf = sizeof(State) == 1 || convert::same<State, fp16>;
template <class State, class Act>
constexpr bool kScaledC = kHalf<State> && convert::same<Act, bf16>;

// Turns the rows of C into fp16 in their places, as many at once as there are lanes for a piece
// each, and writes what takes their scales back.
template <class Act, int kDstate>
__device__ __forceinline__ void scale_C(float* scales, const GroupTile<Act, kDstate>& tile, int q,
                                        const Lane& lane) {
  constexpr int kLanes = kDstate / 8, kRowsAtOnce = 32 / kLanes;
  const int part = lane.index % kLanes;
#pragma unroll 1
  for (int first = 0; first < q; first += kRowsAtOnce) {
    const int t = first + lane.index / kLanes;
    auto* row = reinterpret_cast<uint4*>(tile.C + min(t, q - 1) * tile.kPitch) + part;
    const uint4 v = *row;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      largest = max(largest, max(words[k] << 16 & 0x7fff0000u, words[k] & 0x7fff0000u));
    }
#pragma unroll
    for (int step = 1; step < kLanes; step <<= 1) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    // 2^e of the largest, kept where its inverse is a number; infinities and NaN stay what they
    // are.
    const uint32_t exponent = min(max(largest >> 23, 16u), 239u);
    const float down = __uint_as_float((254u - exponent) << 23);
    __syncwarp();  // lanes without a row have read the last one, too
    if (t >= q) continue;
    const auto scaled = [&](uint32_t word) {
      const float2 c = convert::unpack<bf16>(word);
      return convert::pack<fp16>(make_float2(c.x * down, c.y * down));
    };
    *row = make_uint4(scaled(v.x), scaled(v.y), scaled(v.z), scaled(v.w));
    if (part == 0) scales[t] = __uint_as_float(exponent << 23);
  }
}

// C of the new tokens as the B operand of the read-out, columns in the order of the state's pieces.
template <class State, class Act, int kDstate, int kTokenTiles>
struct Readers {
  static constexpr int kPiece = kPieceOf<State, kDstate>, kPairs = kDstate / 8;
  uint32_t C[kTokenTiles][kPairs];

  __device__ __forceinline__ void load(const GroupTile<Act, kDstate>& rows, const Window& window,
                                       const Lane& lane) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int t = max(min(8 * tile + lane.g, window.q - 1), 0);
      load_row<kPiece>(C[tile], rows.C_row(t), lane.t);
    }
  }
};

// acc += S C^T of a slab whose words are operands as they lie in memory. A product takes one
// piece: words x and z as row g, y and w as row g + 8, both of them the state's row g or both its
// row g + 8. Beside C in the columns of x and z its upper half counts, beside those of y and w its
// lower one.
template <class State, class Act, class Pieces, int kDstate, int kTokenTiles>
__device__ __forceinline__ void read_out_words(
    float (&acc)[kTokenTiles][4], const Pieces& pieces,
    const Readers<State, Act, kDstate, kTokenTiles>& readers) {
  float even[2][kTokenTiles][4] = {}, odd[2][kTokenTiles][4] = {};
#pragma unroll
  for (int J = 0; J < kDstate / 32; ++J) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 piece = pieces.load(h, J);
      const uint32_t a[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        const uint32_t* C = readers.C[tile] + 4 * J;
        if constexpr (kHalf<State>) {
          ptx::mma_m16n8k16_f16(even[h][tile], a, C[0], C[2]);
          ptx::mma_m16n8k16_f16(odd[h][tile], a, C[1], C[3]);
        } else {
          mma<Act>(even[h][tile], a, C[0], C[2]);
          mma<Act>(odd[h][tile], a, C[1], C[3]);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        acc[tile][2 * h + e] += even[h][tile][e] + odd[h][tile][2 + e];
      }
    }
  }
}

// acc += S C^T of a slab as stored, without its scales.
template <class State, class Act, class Pieces, int kDstate, int kTokenTiles>
__device__ __forceinline__ void read_out_slab(
    float (&acc)[kTokenTiles][4], const Pieces& pieces,
    const Readers<State, Act, kDstate, kTokenTiles>& readers, const Lane&) {
  using R = Readers<State, Act, kDstate, kTokenTiles>;
  constexpr int kPairsOfPiece = R::kPiece / 2;
  if constexpr (sizeof(State) == 2 && (kHalf<State> || convert::same<State, Act>)) {
    read_out_words<State, Act>(acc, pieces, readers);
    return;
  }
  float odd[kTokenTiles][4] = {};
#pragma unroll
  for (int J = 0; J < R::kPairs / kPairsOfPiece; ++J) {
    const uint4 upper = pieces.load(0, J), lower = pieces.load(1, J);
#pragma unroll
    for (int q = 0; q < kPairsOfPiece; q += 2) {
      const int r = J * kPairsOfPiece + q;
      float (&sum)[kTokenTiles][4] = r / 2 % 2 ? odd : acc;
      if constexpr (kHalf<State> || convert::same<State, Act>) {
        uint32_t a[4];
        convert::operands<State>(upper, q, a[0], a[2]);
        convert::operands<State>(lower, q, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          const uint32_t b0 = readers.C[tile][r], b1 = readers.C[tile][r + 1];
          if constexpr (kHalf<State>) {
            ptx::mma_m16n8k16_f16(sum[tile], a, b0, b1);
          } else {
            mma<Act>(sum[tile], a, b0, b1);
          }
        }
      } else {
        const float2 v[4] = {piece_pair<State>(upper, q), piece_pair<State>(lower, q),
                             piece_pair<State>(upper, q + 1), piece_pair<State>(lower, q + 1)};
        read_out<kExactTerms<State>, Act>(sum, v, readers.C, r);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[tile][i] += odd[tile][i];
  }
}

// ---- outputs ------------------------------------------------------------------------------------

// acc += (weights of the rows) x of a slab; `of_slab` is where its rows lie.
template <class Act, int kTokenTiles>
__device__ __forceinline__ void add_rows(float (&acc)[kTokenTiles][4],
                                         const RowWeights<kTokenTiles>& weights,
                                         ptx::smem_t of_slab) {
  uint32_t x[4], a[kExactTerms<Act>][4];
  ptx::ldmatrix_x4_trans(x, of_slab);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t terms[kExactTerms<Act>];
    activation_terms<Act>(x[i], terms);
#pragma unroll
    for (int k = 0; k < kExactTerms<Act>; ++k) a[k][i] = terms[k];
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    product(acc[tile], a, weights.upper[tile], weights.lower[tile]);
  }
}

// Multiplies the outputs of a slab by silu(z). `z` is row 0, the slab's first column.
template <class Act, int kTokenTiles>
__device__ __forceinline__ void gate(float (&acc)[kTokenTiles][4], const unsigned char* z,
                                     int pitch, const Window& window, const Lane& lane) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    const int t = max(min(8 * tile + (lane.index & 7), window.q - 1), 0);
    uint32_t pairs[2];
    ptx::ldmatrix_x2_trans(pairs, ptx::to_smem(z) + t * pitch + (lane.index & 8) * 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 of_tokens = convert::unpack<Act>(pairs[h]);
      acc[tile][2 * h] *= convert::silu(of_tokens.x);
      acc[tile][2 * h + 1] *= convert::silu(of_tokens.y);
    }
  }
}

// Rows of outputs in shared memory: float32, or, where space counts, of the type of x.
template <bool kMayBeNarrow>
struct OutputRows {
  unsigned char* of_lane;  // its first one of the first slab
  int pitch;               // of a row, in bytes
  unsigned narrow;         // 0 or 1

  __device__ __forceinline__ OutputRows(unsigned char* rows, const CheckpointingSsuParams& params,
                                        const Lane& lane)
      : narrow(kMayBeNarrow && params.tight_rows != 0 && params.out_type != kFloat32) {
    if constexpr (kMayBeNarrow) narrow = ptx::opaque(narrow);
    pitch = params.head_dim * bytes() + (is_narrow() ? 0 : 16);
    of_lane = ptx::kept(rows + 2 * lane.t * pitch + lane.g * bytes());
  }
  __device__ __forceinline__ bool is_narrow() const { return kMayBeNarrow && narrow != 0; }
  __device__ __forceinline__ int bytes() const { return is_narrow() ? 2 : 4; }

  // Those of a slab, `first_row` behind the first one.
  template <class Act, int kTokenTiles>
  __device__ __forceinline__ void put(const float (&acc)[kTokenTiles][4], int first_row, int q,
                                      const Lane& lane) const {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * tile + 2 * lane.t + e >= q) continue;
        unsigned char* row = of_lane + (8 * tile + e) * pitch;
        const float2 y = make_float2(acc[tile][e], acc[tile][e + 2]);
        if (is_narrow()) {
          const uint32_t pair = convert::pack<Act>(y);
          auto* to = reinterpret_cast<unsigned short*>(row) + first_row;
          to[0] = pair & 0xffff, to[8] = pair >> 16;
        } else {
          float* to = reinterpret_cast<float*>(row) + first_row;
          to[0] = y.x, to[8] = y.y;
        }
      }
    }
  }

  // Stores eight outputs that lie together, rounded if they are not yet.
  template <class Act>
  __device__ __forceinline__ void store(const CheckpointingSsuParams& params, int64_t index,
                                        const unsigned char* y) const {
    const uint4* from = reinterpret_cast<const uint4*>(y);
    if (params.out_type == kFloat32) {
      uint4* out = reinterpret_cast<uint4*>(static_cast<float*>(params.out) + index);
      out[0] = from[0], out[1] = from[1];
      return;
    }
    uint4 eight;
    if (is_narrow()) {
      eight = from[0];
    } else {
      const float4 a = reinterpret_cast<const float4*>(y)[0],
                   b = reinterpret_cast<const float4*>(y)[1];
      eight = make_uint4(
          convert::pack<Act>(make_float2(a.x, a.y)), convert::pack<Act>(make_float2(a.z, a.w)),
          convert::pack<Act>(make_float2(b.x, b.y)), convert::pack<Act>(make_float2(b.z, b.w)));
    }
    *reinterpret_cast<uint4*>(static_cast<Act*>(params.out) + index) = eight;
  }
};

// Takes the scales of rows g and g + 8 into the sums over a slab's codes.
template <int kTokenTiles>
__device__ __forceinline__ void scale_rows(float (&acc)[kTokenTiles][4], const float* of_lane) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[tile][i] *= of_lane[8 * (i >> 1)];
  }
}

// From the sums over the checkpoint to the outputs of some slabs, of which row `first_row` is the
// first: decayed, the rows added, gated, and handed to `y`; slabs behind the head are not handed
// on. `new_x` is what the tile's function gives. In a flush the old rows are apart, and so are
// their weights.
template <class Act, int kDstate, int kSlabs, int kTokenTiles, class Map, class Rows>
__device__ __forceinline__ void finish_slabs(
    float (&acc)[kSlabs][kTokenTiles][4], const Weights<kTokenTiles>& weights,
    const float* old_weights, const WeightsOfLane<kTokenTiles>& of_lane, ptx::smem_t new_x,
    const HeadTile<Act, kDstate>& rows, const Map& map, int first_row, int head_dim, const Rows& y,
    const Window& window, const Lane& lane) {
#pragma unroll
  for (int k = 0; k < kSlabs; ++k) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[k][tile][i] *= weights.decay[tile][i & 1];
    }
  }
  constexpr int kBytes = kRows * sizeof(Act);  // of a slab, in a row of x
  const int first = first_row * static_cast<int>(sizeof(Act));
  if (window.flush) {
    const RowWeights<kTokenTiles> of_old(old_weights, of_lane);
    const ptx::smem_t x = rows.old_x(map, window, lane) + first;
#pragma unroll
    for (int k = 0; k < kSlabs; ++k) add_rows<Act>(acc[k], of_old, x + k * kBytes);
  }
  const ptx::smem_t x = new_x + first;
#pragma unroll
  for (int k = 0; k < kSlabs; ++k) add_rows<Act>(acc[k], weights.rows, x + k * kBytes);
  if (rows.shape.gated != 0) {
#pragma unroll
    for (int k = 0; k < kSlabs; ++k) {
      gate<Act>(acc[k], rows.z() + first + k * kBytes, rows.shape.x_pitch, window, lane);
    }
  }
#pragma unroll
  for (int k = 0; k < kSlabs; ++k) {
    const int q = k > 0 && first_row + k * kRows >= head_dim ? 0 : window.q;
    y.template put<Act>(acc[k], first_row + k * kRows, q, lane);
  }
}

// Rounds an output and stores it, `index` elements behind `out`.
template <class Act>
__device__ __forceinline__ void store_output(const CheckpointingSsuParams& params,
                                             unsigned char* out, int index, float y) {
  if (params.out_type == kFloat32) {
    reinterpret_cast<float*>(out)[index] = y;
  } else {
    reinterpret_cast<Act*>(out)[index] = convert::from_float<Act>(y);
  }
}

}  // namespace replay
