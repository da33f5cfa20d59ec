// The states after the first m rows of their rings, written to other slots: prefix snapshots of all
// layers in one launch.
//
//   S_dst = exp(c_m) S_src + sum_{j < m} exp(c_m - c_j) dt_j x_j B_j^T,   m = 0: a plain copy
//
// Equals reference.materialize; to nearest, the same bits as a flush of these rows. Persistent grid
// of four-warp blocks. A warp works on one slab of 16 rows p at a time; slabs and heads come first,
// then layers, then the requests of the active list, up to its first negative entry. Reads source
// states and the first m ring rows; writes destination states and scales, never a ring or a cursor.
#include "fold.cuh"

using namespace replay;

constexpr int kThreads = 128;

// Blocks that share a multiprocessor: as many as the registers of the pieces in flight allow.
template <class State, int kDstate>
constexpr int kResident = (sizeof(State) == 2 ? 4 : 3) - (kDstate > 128);

// A warp's place in the work, moved on by the number of warps without a division.
struct Place {
  int inner, layer, position;  // slab of a head of a layer; place in the active list

  __device__ Place(int index, const MaterializeParams& params, int slabs) {
    const int of_layer = params.nheads * slabs, row = index / of_layer;
    inner = index - row * of_layer;
    position = row / params.layers;
    layer = row - position * params.layers;
  }

  __device__ __forceinline__ void advance(const Place& step, const MaterializeParams& params,
                                          int slabs) {
    const int of_layer = params.nheads * slabs;
    inner += step.inner, layer += step.layer, position += step.position;
    if (inner >= of_layer) inner -= of_layer, ++layer;
    if (layer >= params.layers) layer -= params.layers, ++position;
  }
};

// A slot that takes part, else a negative number.
__device__ __forceinline__ int64_t load_slot(const MaterializeParams& params, const void* slots,
                                             int64_t index, int type) {
  const int64_t slot = convert::load_index(slots, index, type);
  return slot == params.pad_slot_id || slot >= params.num_slots ? -1 : slot;
}

// One slab: where it comes from and goes to. Values outside their ranges would be a caller's fault;
// they must not become stray addresses.
template <class State, class Act>
struct Item {
  int layer, head, first_row, start, rows;  // rows: m, negative where there is nothing to do
  int64_t src, dst;

  __device__ Item(const MaterializeParams& params, const Place& place, int request, int slabs)
      : layer(place.layer), head(place.inner / slabs), first_row(place.inner % slabs * kRows) {
    src = load_slot(params, params.src_slots,
                    layer * params.src_slots_layer_stride + request * params.src_slots_batch_stride,
                    params.src_slots_type);
    dst = load_slot(params, params.dst_slots,
                    layer * params.dst_slots_layer_stride + request * params.dst_slots_batch_stride,
                    params.dst_slots_type);
    rows =
        min(params.replay_prefix_len[request * params.replay_prefix_len_stride], params.max_window);
    start = min(max(params.ring_start[request * params.ring_start_stride], 0),
                params.ring_buffer_len - 1);
    if (src < 0 || dst < 0) rows = -1;
  }

  __device__ __forceinline__ State* storage(const MaterializeParams& params) const {
    return reinterpret_cast<State*>(params.state_ptrs[layer]);
  }

  // The first element of the slab of a slot, in elements of the layer's storage.
  template <int kDstate>
  __device__ __forceinline__ int64_t state_at(const MaterializeParams& params, int64_t slot) const {
    return slot * params.state_slot_strides[layer] + head * params.state_head_stride +
           first_row * kDstate;
  }

  // The scale of the slab's first row, or null.
  __device__ __forceinline__ float* scale(const MaterializeParams& params, int64_t slot) const {
    float* scales = reinterpret_cast<float*>(params.state_scale_ptrs[layer]);
    if (scales == nullptr) return nullptr;
    return scales + slot * params.state_scale_slot_strides[layer] +
           head * params.state_scale_head_stride + first_row;
  }

  __device__ __forceinline__ const Act* x_row(const MaterializeParams& params, int j) const {
    return reinterpret_cast<const Act*>(params.x_cache_ptrs[layer]) +
           src * params.x_cache_slot_strides[layer] + head * params.x_cache_head_stride +
           ring_row(start, j, params.ring_buffer_len) * params.x_cache_row_stride + first_row;
  }

  __device__ __forceinline__ const Act* B_row(const MaterializeParams& params, int j) const {
    return reinterpret_cast<const Act*>(params.B_cache_ptrs[layer]) +
           src * params.B_cache_slot_strides[layer] +
           head / params.heads_per_group * params.B_cache_group_stride +
           ring_row(start, j, params.ring_buffer_len) * params.B_cache_row_stride;
  }

  __device__ __forceinline__ float dt(const MaterializeParams& params, int j) const {
    if (j >= rows) return 0.0f;
    return reinterpret_cast<const float*>(params.dt_cache_ptrs[layer])
        [src * params.dt_cache_slot_strides[layer] + head * params.dt_cache_head_stride +
         ring_row(start, j, params.ring_buffer_len) * params.dt_cache_row_stride];
  }

  __device__ __forceinline__ float A(const MaterializeParams& params) const {
    return convert::load_float(reinterpret_cast<const void*>(params.A_ptrs[layer]),
                               head * params.A_stride, params.A_type);
  }
};

// The bytes of a slab and of its scales, many loads at once.
template <class State, class Act, int kDstate>
__device__ __forceinline__ void copy_slab(const MaterializeParams& params,
                                          const Item<State, Act>& item, const Lane& lane) {
  if (item.src == item.dst) return;
  constexpr int kVectors = kDstate * sizeof(State) / 32;  // of a lane
  constexpr int kAtOnce = kVectors < 16 ? kVectors : 16;
  State* storage = item.storage(params);
  const uint4* from =
      reinterpret_cast<const uint4*>(storage + item.template state_at<kDstate>(params, item.src)) +
      lane.index;
  uint4* to =
      reinterpret_cast<uint4*>(storage + item.template state_at<kDstate>(params, item.dst)) +
      lane.index;
#pragma unroll 1
  for (int first = 0; first < kVectors; first += kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = from[32 * (first + i)];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) to[32 * (first + i)] = v[i];
  }
  const float* scale = item.scale(params, item.src);
  if (scale != nullptr && lane.index < kRows) {
    item.scale(params, item.dst)[lane.index] = scale[lane.index];
  }
}

// Where a folded slab goes. A row of an 8-bit state is encoded when all of it is known, so its
// values wait in registers; other states are stored piece by piece.
template <class State, int kDstate>
struct Destination {
  State* storage;
  int64_t offset;  // of the lane's first piece in row g
  float* scale;    // of row g, of an 8-bit state
  Rounding rounding;
  float2 rows[2][convert::kScaled<State> ? kDstate / 8 : 1];

  template <int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece], int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (convert::kScaled<State>) {
#pragma unroll
        for (int q = 0; q < kPairsOfPiece; ++q) rows[h][8 * piece + q] = folded[h][q];
      } else {
        const int64_t at = offset + 8 * kPairsOfPiece * piece + 8 * h * kDstate;
        *reinterpret_cast<uint4*>(storage + at) =
            sizeof(State) < 4 && rounding.rounds > 0
                ? encode_piece_of_row<State, true>(folded[h], rounding, at)
                : encode_piece_of_row<State, false>(folded[h], rounding, 0);
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
      const int64_t at = offset + 8 * h * kDstate;
      store_scaled_row<State, kStochastic, kDstate / 64>(storage + at, scale + 8 * h, at, rows[h],
                                                         rounding, lane);
    }
  }
};

// The state of a chunk of columns and B of the rows, as loaded.
template <class State, class Act, int kDstate>
struct Given {
  using T = Tiling<State, kDstate>;
  uint4 upper[T::kPieces], lower[T::kPieces];
  uint32_t B[2][T::kPairs];

  // `state` is the lane's first piece of the chunk in row g.
  __device__ __forceinline__ void load(const State* state, const MaterializeParams& params,
                                       const Item<State, Act>& item, const Lane& lane, int column) {
#pragma unroll
    for (int J = 0; J < T::kPieces; ++J) {
      upper[J] = *reinterpret_cast<const uint4*>(state + column + 4 * T::kPiece * J);
      lower[J] = *reinterpret_cast<const uint4*>(state + column + 4 * T::kPiece * J + 8 * kDstate);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 8 * i + lane.g;
      load_row<T::kPiece>(B[i], item.B_row(params, j) + column, lane.t, j < item.rows);
    }
  }
};

template <class State, class Act, int kDstate>
__device__ __forceinline__ void fold_slab(const MaterializeParams& params,
                                          const Item<State, Act>& item, const Lane& lane) {
  using T = Tiling<State, kDstate>;
  State* storage = item.storage(params);
  const int in_slab = lane.g * kDstate + lane.t * T::kPiece;
  const State* from = storage + item.template state_at<kDstate>(params, item.src) + in_slab;
  Given<State, Act, kDstate> given;
  given.load(from, params, item, lane, 0);
  uint32_t x[2][2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    const Act* row = item.x_row(params, j) + 2 * lane.t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[i][h] = j < item.rows ? *reinterpret_cast<const uint32_t*>(row + 8 * h) : 0u;
    }
  }
  const Decays decays(item.dt(params, lane.index & 15), item.A(params));
  Destination<State, kDstate> target{
      storage, item.template state_at<kDstate>(params, item.dst) + in_slab, nullptr};
  float scale[2] = {1.0f, 1.0f};
  if constexpr (convert::kScaled<State>) {
    const float* given_scale = item.scale(params, item.src) + lane.g;
    scale[0] = given_scale[0], scale[1] = given_scale[8];
    target.scale = item.scale(params, item.dst) + lane.g;
  }
  if (params.rand_seed != nullptr && params.philox_rounds > 0) {
    target.rounding.seed = convert::mix_seed(static_cast<uint64_t>(*params.rand_seed), item.layer);
    target.rounding.rounds = params.philox_rounds;
  }
  const uint32_t rows[4] = {ptx::movmatrix(x[0][0]), ptx::movmatrix(x[0][1]),
                            ptx::movmatrix(x[1][0]), ptx::movmatrix(x[1][1])};
  const Fold<State> fold = prepare_fold<State, Act>(FoldWeights(decays, lane), rows);
  float decay[2] = {fold.decay, fold.decay};
  if constexpr (convert::kScaled<State>) decay[0] *= scale[0], decay[1] *= scale[1];
  constexpr int kPairsOfPiece = T::kPiece / 2;
  // Rows that wait in registers for their scale need places known at compile time.
  constexpr int kUnroll = convert::kScaled<State> ? T::kChunks : 1;
#pragma unroll kUnroll
  for (int chunk = 0; chunk < T::kChunks; ++chunk) {
    if (chunk > 0) given.load(from, params, item, lane, chunk * T::kChunk);
#pragma unroll
    for (int J = 0; J < T::kPieces; ++J) {
      float2 folded[2][kPairsOfPiece];
#pragma unroll
      for (int q = 0; q < kPairsOfPiece; ++q) {
        const int r = J * kPairsOfPiece + q;
        fold_pair<State, Act>(folded[0][q], folded[1][q], piece_pair<State>(given.upper[J], q),
                              piece_pair<State>(given.lower[J], q), ptx::movmatrix(given.B[0][r]),
                              ptx::movmatrix(given.B[1][r]), decay, fold);
      }
      target.put(folded, chunk * T::kPieces + J);
    }
  }
  if constexpr (convert::kScaled<State>) target.finish(lane);
}

template <class State, class Act, int kDstate>
__global__ void __launch_bounds__(kThreads, kResident<State, kDstate>)
    materialize(const __grid_constant__ MaterializeParams params) {
  constexpr int kWarps = kThreads / 32;
  const Lane lane;
  const int slabs = params.head_dim / kRows;
  const Place step(static_cast<int>(gridDim.x) * kWarps, params, slabs);
  Place place(static_cast<int>(blockIdx.x * kWarps + (threadIdx.x >> 5)), params, slabs);
  for (; place.position < params.batch; place.advance(step, params, slabs)) {
    int request = place.position;
    if (params.active_request_indices != nullptr) {
      request = params.active_request_indices[request * params.active_request_indices_stride];
      if (request < 0) break;
      if (request >= params.batch) continue;
    }
    const Item<State, Act> item(params, place, request, slabs);
    if (item.rows > 0) {
      fold_slab<State, Act, kDstate>(params, item, lane);
    } else if (item.rows == 0) {
      copy_slab<State, Act, kDstate>(params, item, lane);
    }
  }
}
