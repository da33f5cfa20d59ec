// The states after the first m rows of their rings, written to other slots: prefix snapshots of all
// layers in one launch.
//
//   S_dst = exp(c_m) S_src + sum_{j < m} exp(c_m - c_j) dt_j x_j B_j^T,   m = 0: a plain copy
//
// Equals reference.materialize; to nearest, the same bits as a flush of these rows. Persistent grid
// of four-warp blocks. A warp works on one head at a time, on its slabs of 16 rows p in turn: the
// next is on its way before the warp turns to it. Heads come first, then layers, then the requests
// of the active list, up to its first negative entry. Reads source states and the first m ring
// rows; writes destination states, copies and scales, never a ring or a cursor.
#include "fold.cuh"
#include "read_copy.cuh"

using namespace replay;

constexpr int kThreads = 128, kWarps = kThreads / 32;

// Blocks that share a multiprocessor: as many as the registers of the pieces in flight allow.
template <class State, class Act, int kDstate>
constexpr bool kFewRegisters =
    sizeof(State) == 2 || (sizeof(State) == 1 && convert::same<Act, bf16> && kDstate <= 128);
template <class State, class Act, int kDstate, class Copy>
constexpr int kResident =
    (convert::same<State, Copy> && kFewRegisters<State, Act, kDstate> ? 4 : 3) - (kDstate > 128);

// Columns of a head that a warp folds at a time: 256 bytes of a row, so that the next ones fit into
// registers. A row that is encoded as a whole needs all of them for its scale.
template <class State, int kDstate, class Copy>
constexpr int kColumns =
    kDstate * sizeof(State) < 256 || !convert::same<State, Copy> ? kDstate : 256 / sizeof(State);

// Folding a slab takes long for 8-bit states, and for rings whose values are two terms: the next
// one is asked for meanwhile. Else it is asked for behind the last store, in longer bursts.
template <class State, class Act, class Copy>
constexpr bool kAsksEarly =
    convert::same<State, Copy> && (sizeof(State) == 1 || kExactTerms<Act> == 2);

// A row that is encoded as a whole waits in registers; where it is too long for that it is folded
// twice, first for its scale.
template <int kDstate, class State, class Copy>
constexpr int kFolds = kDstate > 128 && !convert::same<State, Copy> ? 2 : 1;

// B of the rows that each warp folds, as operands: those of a lane, of pairs r and r + 1, lie
// together, and it alone writes and reads them.
template <int kColumns>
struct Shared {
  uint4 B[kWarps][kColumns / 16][32];
  float weights[kWarps][kRows + 4];  // as `put_fold_weights` leaves them
};

// A warp's place in the work, moved on by the number of warps without a division.
struct Place {
  int head, layer, position;  // in the active list

  __device__ Place(int index, const MaterializeParams& params) {
    const int row = index / params.nheads;
    head = index - row * params.nheads;
    position = row / params.layers;
    layer = row - position * params.layers;
  }

  __device__ __forceinline__ void advance(const Place& step, const MaterializeParams& params) {
    head += step.head, layer += step.layer, position += step.position;
    if (head >= params.nheads) head -= params.nheads, ++layer;
    if (layer >= params.layers) layer -= params.layers, ++position;
  }
};

// A slot that takes part, else a negative number.
__device__ __forceinline__ int64_t load_slot(const MaterializeParams& params, const void* slots,
                                             int64_t index, int type) {
  const int64_t slot = convert::load_index(slots, index, type);
  return slot == params.pad_slot_id || slot >= params.num_slots ? -1 : slot;
}

// One head: where it comes from and goes to. Values outside their ranges would be a caller's fault;
// they must not become stray addresses.
template <class State, class Act>
struct Item {
  int layer, head, start, rows;  // rows: m, negative where there is nothing to do
  int64_t src, dst;

  __device__ Item(const MaterializeParams& params, const Place& place, int request)
      : layer(place.layer), head(place.head) {
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

  // The first element of the head in a slot, in elements of the layer's storage.
  __device__ __forceinline__ int64_t state_at(const MaterializeParams& params, int64_t slot) const {
    return slot * params.state_slot_strides[layer] + head * params.state_head_stride;
  }

  // The first byte of the head in a slot's copy.
  __device__ __forceinline__ unsigned char* copy(const MaterializeParams& params,
                                                 int64_t slot) const {
    return reinterpret_cast<unsigned char*>(params.state_copy_ptrs[layer]) +
           slot * params.state_copy_slot_strides[layer] + head * params.state_copy_head_stride;
  }

  // The scale of the head's first row, of codes.
  __device__ __forceinline__ float* scale(const MaterializeParams& params, int64_t slot) const {
    return reinterpret_cast<float*>(params.state_scale_ptrs[layer]) +
           slot * params.state_scale_slot_strides[layer] + head * params.state_scale_head_stride;
  }

  __device__ __forceinline__ const Act* x_row(const MaterializeParams& params, int j) const {
    return reinterpret_cast<const Act*>(params.x_cache_ptrs[layer]) +
           src * params.x_cache_slot_strides[layer] + head * params.x_cache_head_stride +
           ring_row(start, j, params.ring_buffer_len) * params.x_cache_row_stride;
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

// The bytes of a head in a copy, which may be no multiple of what a warp takes at once.
template <class Copy, int kDstate>
__device__ __forceinline__ void copy_bytes_of_head(unsigned char* to, const unsigned char* from,
                                                   int head_dim, const Lane& lane) {
  const int vectors = head_dim / kRows * (kCopyBytes<Copy, kDstate> / 16);
#pragma unroll 4
  for (int i = lane.index; i < vectors; i += 32) {
    ptx::st_global_v4(to + 16 * i, ptx::ld_global_v4(from + 16 * i));
  }
}

// The bytes of a head and of its scales, many loads at once.
template <class State, class Act, int kDstate, class Copy>
__device__ __forceinline__ void copy_head(const MaterializeParams& params,
                                          const Item<State, Act>& item, const Lane& lane) {
  if (item.src == item.dst) return;
  constexpr int kAtOnce = 8, kMostScales = 4;  // of a lane; a head has up to 128 rows
  State* storage = item.storage(params);
  const uint4* from =
      reinterpret_cast<const uint4*>(storage + item.state_at(params, item.src)) + lane.index;
  uint4* to = reinterpret_cast<uint4*>(storage + item.state_at(params, item.dst)) + lane.index;
  float scales[kMostScales];
  if constexpr (convert::kScaled<Copy>) {
    const float* scale = item.scale(params, item.src) + lane.index;
#pragma unroll
    for (int i = 0; i < kMostScales; ++i) {
      scales[i] = lane.index + 32 * i < params.head_dim ? scale[32 * i] : 0.0f;
    }
  }
  const int vectors = params.head_dim / kRows * (kDstate * static_cast<int>(sizeof(State)) / 32);
#pragma unroll 1
  for (int first = 0; first < vectors; first += kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] =
          first + i < vectors ? ptx::ld_global_v4(from + 32 * (first + i)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < vectors) ptx::st_global_v4(to + 32 * (first + i), v[i]);
    }
  }
  if constexpr (!convert::same<State, Copy>) {
    copy_bytes_of_head<Copy, kDstate>(item.copy(params, item.dst), item.copy(params, item.src),
                                      params.head_dim, lane);
  }
  if constexpr (convert::kScaled<Copy>) {
    float* scale = item.scale(params, item.dst) + lane.index;
#pragma unroll
    for (int i = 0; i < kMostScales; ++i) {
      if (lane.index + 32 * i < params.head_dim) scale[32 * i] = scales[i];
    }
  }
}

// Where a folded slab goes. A row of codes is encoded when all of it is known, so its values wait
// in registers; other states are stored piece by piece.
template <class State, int kDstate, bool kStochastic, class Copy>
struct Destination {
  State* to;             // the lane's first piece in row g
  const State* storage;  // its first element
  float* scale;          // of row g, of codes; in odd lanes, of row g + 8 of an 8-bit state
  unsigned char* copy;   // of the slab, where there is one
  Rounding rounding;
  static constexpr bool kTwice = kFolds<kDstate, State, Copy> == 2;
  float2 rows[2][convert::kScaled<Copy> && !kTwice ? kDstate / 8 : 1];
  float amax[2];  // of rows that are folded twice: what was found so far

  template <int kPairsOfPiece>
  __device__ __forceinline__ void put(const float2 (&folded)[2][kPairsOfPiece], int piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (convert::kScaled<Copy>) {
#pragma unroll
        for (int q = 0; q < kPairsOfPiece; ++q) rows[h][kPairsOfPiece * piece + q] = folded[h][q];
      } else {
        store(folded[h], piece, h);
      }
    }
  }

  template <int kPairsOfPiece>
  __device__ __forceinline__ void store(const float2 (&folded)[kPairsOfPiece], int piece,
                                        int h) const {
    State* at = to + 8 * kPairsOfPiece * piece + 8 * h * kDstate;
    ptx::st_global_v4(at, encode_piece_of_row<State, kStochastic>(folded, rounding, at - storage));
  }

  // Both rows of an 8-bit state. Even lanes find the scale of row g, odd ones that of row g + 8.
  __device__ __forceinline__ void store_codes(const Lane& lane) {
    const bool odd = lane.t & 1;
    const float amax[2] = {largest(rows[0]), largest(rows[1])};
    const float theirs = __shfl_xor_sync(kAllLanes, odd ? amax[0] : amax[1], 1);
    float all = ptx::max_magnitude(odd ? amax[1] : amax[0], theirs);
    all = ptx::max_magnitude(all, __shfl_xor_sync(kAllLanes, all, 2));
    const convert::RowScale own = convert::row_scale<State>(all);
    if (lane.t < 2) *scale = own.decode;
    const float other = __shfl_xor_sync(kAllLanes, own.encode, 1);
    const convert::RowScale of[2] = {{odd ? other : own.encode, 0.0f},
                                     {odd ? own.encode : other, 0.0f}};
    if (__any_sync(kAllLanes, own.encode == 0.0f)) ptx::aside([&] { clear(of); });
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int J = 0; J < kDstate / 64; ++J) {
        float2 scaled[8];
#pragma unroll
        for (int q = 0; q < 8; ++q) scaled[q] = of[h].scaled(rows[h][8 * J + q]);
        store(scaled, J, h);
      }
    }
  }

  // Of rows that store zeros all values become 0, also those that are not finite.
  __device__ __forceinline__ void clear(const convert::RowScale (&of)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < kDstate / 8; ++r) {
        if (of[h].encode == 0.0f) rows[h][r] = make_float2(0.0f, 0.0f);
      }
    }
  }

  // Row g + 8 h of a state that has a copy.
  __device__ __forceinline__ void store_both(const float2 (&row)[kDstate / 8], int h,
                                             const Lane& lane) const {
#pragma unroll
    for (int J = 0; J < kDstate / 32; ++J) {
      const float2 piece[4] = {row[4 * J], row[4 * J + 1], row[4 * J + 2], row[4 * J + 3]};
      store(piece, J, h);
    }
    store_copied_row<Copy, kDstate>(copy, lane.g + 8 * h, scale + 8 * h, row, lane);
  }

  // The same for rows that are folded twice: the first time only their largest number counts.
  __device__ __forceinline__ void put_again(const float2 (&folded)[2][4], int piece, bool first,
                                            const Lane& lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (first) {
        amax[h] = ptx::max_magnitude(piece == 0 ? 0.0f : amax[h], largest(folded[h]));
        continue;
      }
      store(folded[h], piece, h);
      const convert::RowScale of_all = convert::row_scale<Copy>(of_row(amax[h]));
      float2 part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = of_all.scaled(folded[h][i]);
      store_copied<Copy>(copy, kDstate, lane.g + 8 * h, 8 * (4 * piece + lane.t), of_all, part);
      if (lane.t == 0) scale[8 * h] = of_all.decode;
    }
  }

  // Stores what waits, and moves on to the next slab.
  __device__ __forceinline__ void finish(const Lane& lane) {
    if constexpr (kTwice) {
      copy += kCopyBytes<Copy, kDstate>;
      scale += kRows;
    } else if constexpr (!convert::same<State, Copy>) {
#pragma unroll 1  // one row after the other through the same code
      for (int h = 0; h < 2; ++h) {
        store_both(rows[0], h, lane);
#pragma unroll
        for (int i = 0; i < kDstate / 8; ++i) rows[0][i] = rows[1][i];
      }
      copy += kCopyBytes<Copy, kDstate>;
      scale += kRows;
    } else if constexpr (convert::kScaled<State>) {
      store_codes(lane);
      scale += kRows;
    }
    to += kRows * kDstate;
  }
};

// What a lane needs of one slab, as loaded: pieces and scales of rows g and g + 8, and rows of x.
template <class State, class Act, int kDstate, class Copy>
struct Given {
  static constexpr int kPiece = 16 / sizeof(State);
  static constexpr int kPieces = kColumns<State, kDstate, Copy> / (4 * kPiece);
  uint4 pieces[kPieces][2];
  float scale[2];
  uint32_t x[2][2];
};

// Where a lane's loads of the next slab begin.
template <class State, class Act, int kDstate, class Copy>
struct Source {
  using Slab = Given<State, Act, kDstate, Copy>;
  const State* state;  // the lane's first piece in row g
  const float* scale;  // of row g, of an 8-bit state
  const Act* x[2];     // of ring rows g and g + 8
  bool live[2];        // these rows are among the m

  __device__ __forceinline__ void ask_for_piece(Slab& slab, int J) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      slab.pieces[J][h] = ptx::ld_global_v4(state + 4 * Slab::kPiece * J + 8 * h * kDstate);
    }
  }

  __device__ __forceinline__ void ask_for_pieces(Slab& slab) const {
#pragma unroll
    for (int J = 0; J < Slab::kPieces; ++J) ask_for_piece(slab, J);
  }

  // All the rest.
  __device__ __forceinline__ void ask_for_rows(Slab& slab) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        slab.x[i][h] = live[i] ? ptx::ld_global_u32(x[i] + 8 * h) : 0u;
      }
      if constexpr (convert::kScaled<State>) {
        slab.scale[i] = __uint_as_float(ptx::ld_global_u32(scale + 8 * i));
      }
    }
  }

  __device__ __forceinline__ void advance() {
    state += kRows * kDstate;
    if constexpr (convert::kScaled<State>) scale += kRows;
    x[0] += kRows, x[1] += kRows;
  }
};

// Asks the L2 for a head's slabs behind the first: an 8-bit slab alone leaves memory idle.
template <class State, int kDstate>
__device__ __forceinline__ void prefetch_slabs(const State* head, int head_dim, const Lane& lane) {
  constexpr int kLine = 128 / sizeof(State);
#pragma unroll 1
  for (int i = kRows * kDstate + kLine * lane.index; i < head_dim * kDstate; i += 32 * kLine) {
    ptx::prefetch_L2(head + i);
  }
}

// B of the item's rows from `column` on, which are read in the lanes' order of columns.
template <class State, class Act, int kDstate, class Copy>
__device__ __forceinline__ void prepare_B(uint4* B, const MaterializeParams& params,
                                          const Item<State, Act>& item, int column,
                                          const Lane& lane) {
  constexpr int kPairs = kColumns<State, kDstate, Copy> / 8;
  uint32_t b[2][kPairs];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = 8 * i + lane.g;
    load_row<16 / static_cast<int>(sizeof(State))>(b[i], item.B_row(params, j) + column, lane.t,
                                                   j < item.rows);
  }
#pragma unroll
  for (int r = 0; r < kPairs; r += 2) {
    B[16 * r] = make_uint4(ptx::movmatrix(b[0][r]), ptx::movmatrix(b[1][r]),
                           ptx::movmatrix(b[0][r + 1]), ptx::movmatrix(b[1][r + 1]));
  }
}

// Folds the rows into the slabs of a head, of which the first is on its way.
template <class State, class Act, int kDstate, bool kStochastic, class Copy>
__device__ __forceinline__ void fold_slabs(Given<State, Act, kDstate, Copy>& slab,
                                           Source<State, Act, kDstate, Copy>& source,
                                           Destination<State, kDstate, kStochastic, Copy> target,
                                           const float* weights, const uint4* B, int slabs,
                                           const Lane& lane) {
  using Slab = Given<State, Act, kDstate, Copy>;
  constexpr int kPairsOfPiece = Slab::kPiece / 2, kTimes = kFolds<kDstate, State, Copy>;
#pragma unroll 1
  for (int left = slabs - 1; left >= 0; --left) {
    source.advance();
    const uint32_t x[4] = {ptx::movmatrix(slab.x[0][0]), ptx::movmatrix(slab.x[0][1]),
                           ptx::movmatrix(slab.x[1][0]), ptx::movmatrix(slab.x[1][1])};
    const Fold<State> fold = prepare_fold<State, Act>(FoldWeights(weights, lane), x);
    float decay[2] = {fold.decay, fold.decay};
    if constexpr (convert::kScaled<State>) decay[0] *= slab.scale[0], decay[1] *= slab.scale[1];
    if (kAsksEarly<State, Act, Copy> && left > 0) source.ask_for_rows(slab);
#pragma unroll 1
    for (int time = 0; time < kTimes; ++time) {
#pragma unroll
      for (int J = 0; J < Slab::kPieces; ++J) {
        const uint4 upper = slab.pieces[J][0], lower = slab.pieces[J][1];
        float2 folded[2][kPairsOfPiece];
#pragma unroll
        for (int q = 0; q < kPairsOfPiece; q += 2) {
          const uint4 b = B[16 * (J * kPairsOfPiece + q)];
          float2 u[2], l[2];
          piece_pairs<State>(upper, q, u);
          piece_pairs<State>(lower, q, l);
          fold_pair<State, Act>(folded[0][q], folded[1][q], u[0], l[0], b.x, b.y, decay, fold);
          fold_pair<State, Act>(folded[0][q + 1], folded[1][q + 1], u[1], l[1], b.z, b.w, decay,
                                fold);
        }
        if (kAsksEarly<State, Act, Copy> && left > 0) source.ask_for_piece(slab, J);
        if constexpr (kTimes == 1) {
          target.put(folded, J);
        } else {
          target.put_again(folded, J, time == 0, lane);
        }
      }
    }
    target.finish(lane);
    if (!kAsksEarly<State, Act, Copy> && left > 0) {
      source.ask_for_pieces(slab);
      source.ask_for_rows(slab);
    }
  }
}

// Folds the rows into a head's columns from `column` on.
template <class State, class Act, int kDstate, class Copy>
__device__ __forceinline__ void fold_columns(const MaterializeParams& params,
                                             const Item<State, Act>& item, uint4* B, float* weights,
                                             int column, const Lane& lane) {
  using Slab = Given<State, Act, kDstate, Copy>;
  const float A = item.A(params), dt = item.dt(params, lane.index & 15);
  State* storage = item.storage(params);
  const int in_slab = lane.g * kDstate + column + lane.t * Slab::kPiece;
  Source<State, Act, kDstate, Copy> source;
  source.state = storage + item.state_at(params, item.src) + in_slab;
  if constexpr (convert::kScaled<State>) source.scale = item.scale(params, item.src) + lane.g;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    source.live[i] = 8 * i + lane.g < item.rows;
    source.x[i] = item.x_row(params, 8 * i + lane.g) + 2 * lane.t;
  }
  Slab slab;
  source.ask_for_pieces(slab);
  source.ask_for_rows(slab);
  if constexpr (convert::kScaled<State>) {
    prefetch_slabs<State, kDstate>(storage + item.state_at(params, item.src), params.head_dim,
                                   lane);
  }
  __syncwarp();  // else the compiler asks for all of this when B has come
  prepare_B<State, Act, kDstate, Copy>(B, params, item, column, lane);
  put_fold_weights(weights, Decays(dt, A));
  __syncwarp();
  State* to = storage + item.state_at(params, item.dst) + in_slab;
  float* scale = nullptr;
  if constexpr (convert::kScaled<Copy>) scale = item.scale(params, item.dst) + lane.g;
  if constexpr (convert::kScaled<State>) scale += 8 * (lane.t & 1);
  unsigned char* copy = nullptr;
  if constexpr (!convert::same<State, Copy>) copy = item.copy(params, item.dst);
  const int slabs = params.head_dim / kRows;
  // The two ways to round are apart, so that the common one runs through short code.
  if (sizeof(State) < 4 && params.rand_seed != nullptr && params.philox_rounds > 0) {
    Rounding rounding;
    rounding.seed = convert::mix_seed(static_cast<uint64_t>(*params.rand_seed), item.layer);
    rounding.rounds = params.philox_rounds;
    fold_slabs<State, Act, kDstate, true, Copy>(slab, source, {to, storage, scale, copy, rounding},
                                                weights, B, slabs, lane);
  } else {
    fold_slabs<State, Act, kDstate, false, Copy>(slab, source, {to, storage, scale, copy}, weights,
                                                 B, slabs, lane);
  }
}

// What steps read is a copy where its type is another one.
template <class State, class Act, int kDstate, class Copy = State>
__global__ void __launch_bounds__(kThreads, kResident<State, Act, kDstate, Copy>)
    materialize(const __grid_constant__ MaterializeParams params) {
  constexpr int kAtOnce = kColumns<State, kDstate, Copy>;
  __shared__ Shared<kAtOnce> shared;
  const Lane lane;
  const int warp = threadIdx.x >> 5;
  const Place step(static_cast<int>(gridDim.x) * kWarps, params);
  Place place(static_cast<int>(blockIdx.x) * kWarps + warp, params);
  for (; place.position < params.batch; place.advance(step, params)) {
    int request = place.position;
    if (params.active_request_indices != nullptr) {
      request = params.active_request_indices[request * params.active_request_indices_stride];
      if (request < 0) break;
      if (request >= params.batch) continue;
    }
    const Item<State, Act> item(params, place, request);
    if (item.rows == 0) copy_head<State, Act, kDstate, Copy>(params, item, lane);
#pragma unroll 1
    for (int column = 0; column < kDstate && item.rows > 0; column += kAtOnce) {
      fold_columns<State, Act, kDstate, Copy>(params, item, &shared.B[warp][0][lane.index],
                                              shared.weights[warp], column, lane);
    }
  }
}
