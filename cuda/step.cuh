// The phases of a replay step over rows and slabs in shared memory, each the work of one warp.
#pragma once
#include "rows.cuh"

namespace replay {

// ---- dt of the rows -----------------------------------------------------------------------------

// dt of the lane's row as loaded, long before it is used. Lanes 0-15 have the rows read out, lanes
// 16-31 the rows folded.
struct RowDt {
  uint32_t raw;

  __device__ __forceinline__ void load(const CheckpointingSsuParams& params,
                                       const Request& request, int head, const Lane& lane) {
    const Window& window = request.window;
    const int j = lane.index & 15, t = j - window.old_rows();
    if (is_folded(window, lane) ? j < window.live : t < 0) {
      const int row = ring_row(window.start, j, params.ring_buffer_len);
      raw = __float_as_uint(
          dt_ring(params, request.slot, head)[row_offset(row, params.dt_cache_row_stride)]);
    } else if (is_new(window, lane)) {
      const int64_t index = dt_of_token(params, request, head, t);
      if (params.dt_type == kFloat32) {
        raw = static_cast<const uint32_t*>(params.dt)[index];
      } else {
        raw = static_cast<const unsigned short*>(params.dt)[index];
      }
    }
  }

  // As it counts, 0 where there is no row.
  __device__ __forceinline__ float value(const CheckpointingSsuParams& params,
                                         const Window& window, int head,
                                         const Lane& lane) const {
    const float stored = __uint_as_float(raw);
    float dt = stored;
    if (params.dt_type == kBfloat16) dt = convert::unpack<bf16>(raw).x;
    if (params.dt_type == kFloat16) dt = convert::unpack<fp16>(raw).x;
    const float processed = processed_dt(params, dt, head);
    if (is_new(window, lane)) return processed;
    const int rows = is_folded(window, lane) ? kRows + window.live : window.old_rows();
    return lane.index < rows ? stored : 0.0f;
  }

  __device__ static __forceinline__ bool is_folded(const Window& window, const Lane& lane) {
    return lane.index >= kRows && window.flush;
  }
  __device__ static __forceinline__ bool is_new(const Window& window, const Lane& lane) {
    return lane.index >= window.old_rows() && lane.index < window.rows();
  }
};

// ---- weights of the rows ------------------------------------------------------------------------

// Raw products C_t . B_j of the rows read out: cb[i] is a 16 x 8 fragment (t, j = 8 i + ...). The
// columns are summed in the order of 16-bit pieces, whatever the type of the state.
template <class Act, int kDstate, int kTokenTiles>
__device__ __forceinline__ void weigh(float (&cb)[2][4], const GroupTile<Act, kDstate>& tile,
                                      const RowMap& map, const Window& window, const Lane& lane) {
  const uint4* B[2];
  const uint4* C[kTokenTiles];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = map.row(window, 8 * i + lane.g);
    B[i] = reinterpret_cast<const uint4*>(tile.B_row(row)) + lane.t;
  }
#pragma unroll
  for (int k = 0; k < kTokenTiles; ++k) {
    const int t = max(min(8 * k + lane.g, window.q - 1), 0);
    C[k] = reinterpret_cast<const uint4*>(tile.C_row(t)) + lane.t;
  }
  float odd[2][4] = {};  // two short chains of products instead of a long one
#pragma unroll
  for (int i = 0; i < 8; ++i) cb[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int J = 0; J < kDstate / 32; ++J) {
    const uint4 c = C[0][4 * J];
    const uint4 d = kTokenTiles > 1 ? C[kTokenTiles - 1][4 * J] : make_uint4(0, 0, 0, 0);
    const uint32_t even_step[4] = {c.x, d.x, c.y, d.y}, odd_step[4] = {c.z, d.z, c.w, d.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 b = B[i][4 * J];
      mma<Act>(cb[i], even_step, b.x, b.y);
      mma<Act>(odd[i], odd_step, b.z, b.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) cb[i][e] += odd[i][e];
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

// What the rows read out give to the outputs: their weights as a B operand, and exp(c_t), which
// weighs the checkpoint.
template <int kTokenTiles>
struct Weights {
  uint32_t upper[kTokenTiles][2], lower[kTokenTiles][2];  // rows 0-7 and 8-15, in bf16 terms
  float decay[kTokenTiles][2];

  __device__ __forceinline__ Weights(const float (&cb)[2][4], const Decays& decays,
                                     const Window& window, const Lane& lane) {
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

// ---- read-out -----------------------------------------------------------------------------------

// C of the new tokens as the B operand of the read-out, columns in the order of the state's pieces.
// 8-bit codes and fp16 are exact in fp16, so C becomes fp16 beside them: scaled by a power of two
// per token where it is bf16, which `scale` takes back.
template <class State, class Act, int kDstate, int kTokenTiles>
struct Readers {
  static constexpr int kPiece = 16 / sizeof(State), kPairs = kDstate / 8;
  static constexpr bool kHalf = sizeof(State) == 1 || convert::same<State, fp16>;
  static constexpr bool kScaledC = kHalf && convert::same<Act, bf16>;
  uint32_t C[kTokenTiles][kPairs];
  float scale[kTokenTiles][2];  // of tokens 2 t and 2 t + 1

  __device__ __forceinline__ void load(const GroupTile<Act, kDstate>& rows, const Window& window,
                                       const Lane& lane) {
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      const int t = max(min(8 * tile + lane.g, window.q - 1), 0);
      load_row<kPiece>(C[tile], rows.C_row(t), lane.t, true);
      scale[tile][0] = scale[tile][1] = 1.0f;
      if constexpr (kScaledC) to_half(C[tile], scale[tile], lane);
    }
  }

  // Takes the scales of C into the weights of the checkpoint.
  __device__ __forceinline__ void unscale(Weights<kTokenTiles>& weights) const {
    if constexpr (kScaledC) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        weights.decay[tile][0] *= scale[tile][0], weights.decay[tile][1] *= scale[tile][1];
      }
    }
  }

  __device__ static __forceinline__ void to_half(uint32_t (&row)[kPairs], float (&scale)[2],
                                                 const Lane& lane) {
    uint32_t largest = 0;
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      largest = max(largest, max(row[r] << 16 & 0x7fff0000u, row[r] & 0x7fff0000u));
    }
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    // 2^e of the largest, kept where its inverse is a number; infinities and NaN stay what they are.
    const uint32_t exponent = min(max(largest >> 23, 16u), 239u);
    const float down = __uint_as_float((254u - exponent) << 23);
    const float up = __uint_as_float(exponent << 23);
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const float2 v = convert::unpack<bf16>(row[r]);
      row[r] = convert::pack<fp16>(make_float2(v.x * down, v.y * down));
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) scale[e] = __shfl_sync(kAllLanes, up, 4 * (2 * lane.t + e));
  }
};

// acc += S C^T of a slab as stored, without its scales.
template <class State, class Act, int kDstate, int kTokenTiles>
__device__ __forceinline__ void read_out_slab(
    float (&acc)[kTokenTiles][4], const SlabTile<State, kDstate>& slab,
    const Readers<State, Act, kDstate, kTokenTiles>& readers, const Lane& lane) {
  using R = Readers<State, Act, kDstate, kTokenTiles>;
  constexpr int kPairsOfPiece = R::kPiece / 2;
  float odd[kTokenTiles][4] = {};
#pragma unroll
  for (int J = 0; J < R::kPairs / kPairsOfPiece; ++J) {
    const uint4 upper = slab.piece(lane, 0, J), lower = slab.piece(lane, 1, J);
#pragma unroll
    for (int q = 0; q < kPairsOfPiece; q += 2) {
      const int r = J * kPairsOfPiece + q;
      float(&sum)[kTokenTiles][4] = r / 2 % 2 ? odd : acc;
      if constexpr (R::kHalf || convert::same<State, Act>) {
        uint32_t a[4];
        convert::operands<State>(upper, q, a[0], a[2]);
        convert::operands<State>(lower, q, a[1], a[3]);
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          const uint32_t b0 = readers.C[tile][r], b1 = readers.C[tile][r + 1];
          if constexpr (R::kHalf) {
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

// Where the lane's share of x^T lies for `ldmatrix`: matrices (p, j), (p + 8, j), (p, j + 8) and
// (p + 8, j + 8) of the first slab. `row_of(j)` is row j's place in the tile.
template <class RowOf>
__device__ __forceinline__ ptx::smem_t transposed_x(const unsigned char* x, int pitch,
                                                    const Lane& lane, RowOf row_of) {
  const int j = (lane.index & 7) + (lane.index & 16) / 2;
  return ptx::to_smem(x) + row_of(j) * pitch + (lane.index & 8) * 2;
}

// acc += (weights of the rows) x.
template <class Act, int kTokenTiles>
__device__ __forceinline__ void add_rows(float (&acc)[kTokenTiles][4],
                                         const Weights<kTokenTiles>& weights,
                                         const uint32_t (&x)[4]) {
  uint32_t a[kExactTerms<Act>][4];
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

// Hands the outputs of a slab to rows of shared memory; `y` is row 0, the slab's first column.
template <int kTokenTiles>
__device__ __forceinline__ void put_outputs(const float (&acc)[kTokenTiles][4], float* y,
                                            int pitch, const Window& window, const Lane& lane) {
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = 8 * tile + 2 * lane.t + e;
      if (t < window.q) {
        y[t * pitch + lane.g] = acc[tile][e], y[t * pitch + lane.g + 8] = acc[tile][e + 2];
      }
    }
  }
}

// Rounds eight outputs that lie together and stores them.
template <class Act>
__device__ __forceinline__ void store_outputs(const CheckpointingSsuParams& params, int64_t index,
                                              const float* y) {
  const float4 a = reinterpret_cast<const float4*>(y)[0], b = reinterpret_cast<const float4*>(y)[1];
  if (params.out_type == kFloat32) {
    float4* out = reinterpret_cast<float4*>(static_cast<float*>(params.out) + index);
    out[0] = a, out[1] = b;
  } else {
    *reinterpret_cast<uint4*>(static_cast<Act*>(params.out) + index) = make_uint4(
        convert::pack<Act>(make_float2(a.x, a.y)), convert::pack<Act>(make_float2(a.z, a.w)),
        convert::pack<Act>(make_float2(b.x, b.y)), convert::pack<Act>(make_float2(b.z, b.w)));
  }
}

}  // namespace replay
