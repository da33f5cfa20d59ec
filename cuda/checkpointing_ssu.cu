// One decode step of a Mamba-2 layer from checkpoint, ring and new tokens; the state is written
// only on flush. With c the sums of A dt over the rows since the checkpoint S and j the rows before
// t:
//
//   y_t = exp(c_t) S C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t,   out = y silu(z)
//   flush:  S <- exp(c_old) S + sum_{j old} exp(c_old - c_j) dt_j x_j B_j^T
//
// Equals reference.replay_step. Grid: one block per multiprocessor, which stays. A warp works
// alone: it takes an item, which is a sequence and some heads of one group, prepares the weights of
// its rows, and streams the states of its heads, some slabs of 16 rows p at a time, through shared
// memory while it computes on those that came before. Writes `out`, the new ring rows, and the
// checkpoint on flush. Never reads a dead ring row, never writes a live one, touches nothing of a
// padded row but `out`.
//
// A prepared step is the second of two kernels: precompute.cu has left the weights in the caller's
// scratch, so a warp asks for them like for rows, and of B for old rows that are folded.
#include "copied.cuh"
#include "prepare.cuh"
#include "requests.cuh"

using namespace replay;

// Slabs that are copied together, and stages: on their way or in use.
template <class State, int kDstate>
constexpr int kSlabsOfStage = kDstate * sizeof(State) <= 128 ? 2 : 1;
constexpr int kStages = 2;

// Heads of one group of sequence n, from `head` on. `state` is the lane's first byte of a head.
struct Item {
  int n, group, head, heads;
  const unsigned char* state;
};

// What is read is a copy of the checkpoint where their types differ.
template <class State, class Act, int kDstate, int kTokenTiles, bool kPrepared, class Checkpoint>
struct Worker {
  using Slab = SlabTile<State, kDstate>;
  static constexpr bool kCopied = !convert::same<State, Checkpoint>;
  static constexpr int kStageSlabs = kSlabsOfStage<State, kDstate>;
  static constexpr int kStageBytes = kStageSlabs * Slab::kBytes;

  const CheckpointingSsuParams& params;
  RequestList& list;
  const int2 listed;
  const Lane lane;
  const TileShape<Act, kDstate> shape;
  const WeightShape weight_shape;
  const Spread spread_x, spread_B;
  unsigned char* const memory;  // the warp's share
  Item next;
  NewDt<kTokenTiles> new_dt;  // of `next`
  float constant;             // of its heads: A, D, dt_bias, one value a lane
  bool group_late;            // its B and C could not be asked for yet
  bool second;                // weights from scratch are in the second of two places

  __device__ __forceinline__ Worker(const CheckpointingSsuParams& p, RequestList& l, int2 of_list,
                                    unsigned char* of_warp)
      : params(p),
        list(l),
        listed(of_list),
        shape(p, p.max_window),
        weight_shape{p.npredicted},
        spread_x(threadIdx.x & 31, 32, p.head_dim / 8),
        spread_B(threadIdx.x & 31, 32, kDstate / 8),
        memory(of_warp),
        group_late(false),
        second(false) {}

  // ---- what a warp works on ---------------------------------------------------------------------

  __device__ __forceinline__ Request request(const Item& item) const {
    return unpack_request(list.entry(params, item.n, listed));
  }
  __device__ __forceinline__ GroupTile<Act, kDstate> group() const {
    return {memory + params.at_group, shape};
  }
  __device__ __forceinline__ unsigned char* head_tile(int parity) const {
    return memory + params.at_head + parity * shape.head_bytes();
  }
  __device__ __forceinline__ Slab slab(int place, int i) const {
    return {memory + (place * kStageSlabs + i) * Slab::kBytes};
  }
  __device__ __forceinline__ float* floats(int place) const {
    return reinterpret_cast<float*>(memory + place);
  }
  __device__ __forceinline__ float* dt(int i) const {  // of the item's head i
    return floats(params.at_dt) + 2 * kRows * i;
  }
  __device__ __forceinline__ float* weights(int i) const {
    return floats(params.at_weights) + (place_of_weights(second) + i) * weight_shape.words();
  }
  // Those from scratch come while the item before still needs its own.
  __device__ __forceinline__ int place_of_weights(bool of_second) const {
    return kPrepared && of_second ? params.heads_of_item : 0;
  }
  __device__ __forceinline__ float* scales(int parity) const {
    return floats(params.at_scales) + parity * params.head_dim;
  }
  __device__ __forceinline__ int stages() const {  // of a head
    return (params.head_dim / kRows + kStageSlabs - 1) / kStageSlabs;
  }
  __device__ __forceinline__ RowMap in_order() const { return {0, shape.old_rows}; }
  __device__ __forceinline__ Checkpoint* checkpoint_of(const Request& request,
                                                       unsigned head) const {
    const unsigned slot = request.slot;
    return static_cast<Checkpoint*>(params.state) + slot * params.state_slot_stride +
           head * params.state_head_stride;
  }
  __device__ __forceinline__ State* state_of(const Request& request, unsigned head) const {
    if constexpr (kCopied) {
      const unsigned slot = request.slot;
      return static_cast<State*>(params.state_copy) + slot * params.state_copy_slot_stride +
             head * params.state_copy_head_stride;
    } else {
      return checkpoint_of(request, head);
    }
  }
  __device__ __forceinline__ int64_t bytes_to_next_head() const {
    const int64_t stride = kCopied ? params.state_copy_head_stride : params.state_head_stride;
    return stride * static_cast<int>(sizeof(State));
  }
  __device__ __forceinline__ float* scale_of(const Request& request, unsigned head) const {
    const unsigned slot = request.slot;
    return params.state_scale + slot * params.state_scale_slot_stride +
           head * params.state_scale_head_stride;
  }

  // ---- what it asks for -------------------------------------------------------------------------

  // Takes the block's next item, and asks for its rows; heads is 0 behind the last one.
  __device__ __forceinline__ void take_item(int parity, bool after_flush) {
    unsigned index = take(list.taken) * gridDim.x + blockIdx.x;
    const unsigned flushes = listed.x * params.flushes_of_sequence;
    const bool flush = index < flushes;  // its items have fewer heads
    if (!flush) index -= flushes;
    const unsigned of_sequence = flush ? params.flushes_of_sequence : params.items_of_sequence;
    const unsigned of_group = flush ? params.flushes_of_group : params.items_of_group;
    const int heads = flush ? params.heads_of_flush : params.heads_of_item;
    const unsigned n = divide(
        index, flush ? params.inverse_flushes_of_sequence : params.inverse_items_of_sequence);
    const unsigned of_n = index - n * of_sequence;
    const unsigned group =
        divide(of_n, flush ? params.inverse_flushes_of_group : params.inverse_items_of_group);
    const int first = (of_n - group * of_group) * heads;
    next.n = flush ? n : n + listed.x, next.group = group,
    next.head = group * params.heads_per_group + first;
    next.heads = 0;
    if (next.n >= listed.x + listed.y) return;
    next.heads = min(heads, params.heads_per_group - first);
    const Request of_item = request(next);
    next.state =
        reinterpret_cast<const unsigned char*>(state_of(of_item, next.head)) + 16 * lane.index;
    group_late = after_flush;  // the fold still needs its own
    if (!after_flush) ask_for_group(of_item);
    ask_for_head(of_item, next.head, parity);
  }

  __device__ __forceinline__ void ask_for_group(const Request& of_item) {
    const Window& window = of_item.window;
    if constexpr (kPrepared) {
      group().copy_C(params, of_item, next.group, spread_B);
      if (window.flush) {
        group().copy_ring(params, of_item, next.group, window.start, window.live, spread_B);
      }
      ask_for_weights(of_item);
      return;
    }
    group().copy_ring(params, of_item, next.group, window.start, window.live, spread_B);
    group().copy_tokens(params, of_item, next.group, spread_B);
    const int j = lane.index & 15;
    for (int i = lane.index >> 4; i < next.heads && j < window.live; i += 2) {
      const float* ring = dt_ring(params, of_item.slot, next.head + i);
      const int row = ring_row(window.start, j, params.ring_buffer_len);
      ptx::cp_async4(ptx::to_smem(dt(i) + j), ring + row_offset(row, params.dt_cache_row_stride));
    }
    new_dt.load(params, of_item, next.head, next.heads, lane);
    constant = load_constant(params, next.head, next.heads, lane);
  }

  __device__ __forceinline__ void ask_for_weights(const Request& of_item) const {
    const int bytes = 4 * weight_shape.words();
    ptx::smem_t to = ptx::to_smem(memory) + params.at_weights + place_of_weights(!second) * bytes;
#pragma unroll 1
    for (int i = 0; i < next.heads; ++i, to += bytes) {
      for_parts_in_scratch(params, weight_shape, of_item, next.head + i,
                           [&](int place, const float* scratch, int pieces) {
#pragma unroll 1
                             for (int k = lane.index; k < pieces; k += 32) {
                               ptx::cp_async16(to + 4 * place + 16 * k, scratch + 4 * k);
                             }
                           });
    }
  }

  __device__ __forceinline__ void ask_for_head(const Request& of_item, unsigned head,
                                               int parity) const {
    const HeadTile<Act, kDstate> tile = {head_tile(parity), shape};
    tile.copy_ring(params, of_item, head, of_item.window.start, of_item.window.live, spread_x);
    tile.copy_tokens(params, of_item, head, spread_x);
    if constexpr (convert::kScaled<State>) {
      const float* from = scale_of(of_item, head);
      for (int p = lane.index; p < params.head_dim; p += 32) {
        ptx::cp_async4(ptx::to_smem(scales(parity) + p), from + p);
      }
    }
    if constexpr (kCopied) {
      if (of_item.window.flush) {
        prefetch_checkpoint(checkpoint_of(of_item, head), 2 * params.head_dim * kDstate, lane);
      }
    }
  }

  // `from` is the lane's first byte of stage s of a head.
  __device__ __forceinline__ void ask_for_stage(const unsigned char* from, int s, int place) const {
#pragma unroll
    for (int i = 0; i < kStageSlabs; ++i) {
      if (i == 0 || (s * kStageSlabs + i) * kRows < params.head_dim) {
        slab(place, i).template copy<32>(from + i * Slab::kBytes, lane.index);
      }
    }
  }

  // Refills the stage that was just read: with a later one of this head, or one of the next head.
  // `item` has more heads to come if `left` is not 0.
  __device__ __forceinline__ void refill(const Item& item, const Request& of_item, int left, int s,
                                         int& place, int parity) {
    __syncwarp();                              // all lanes have read it
    const int later = s + kStages - stages();  // of the next head, or of this one if negative
    const unsigned char* from = item.state + (later + stages()) * kStageBytes;
    bool any = true;
    if (later >= 0) {
      if (left > 0) {
        if (later == 0) ask_for_head(of_item, ptx::opaque(item.head + 1u), parity ^ 1);
        from = item.state + bytes_to_next_head();
      } else {
        if (later == 0) take_item(parity ^ 1, of_item.window.flush);
        from = next.state, any = next.heads > 0;
      }
      from += later * kStageBytes;
    }
    const int first = later < 0 ? later + stages() : later;
    if (any) ask_for_stage(from, first, place);
    ptx::cp_async_commit();
    place = place + 1 == kStages ? 0 : place + 1;
  }

  __device__ __forceinline__ void next_stage() const {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }

  // ---- what it computes -------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    take_item(0, kPrepared);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (next.heads > 0) ask_for_stage(next.state + s * kStageBytes, s, s);
      ptx::cp_async_commit();
    }
    // From here on the scratch is there, and anything may be written.
    if constexpr (kPrepared) ptx::grid_dependency_wait();
    int parity = 0, place = 0;
    while (next.heads > 0) {
      const Item item = next;
      const Request of_item = request(item);
      if (group_late) {
        ask_for_group(of_item);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        group_late = false;
      }
      next_stage();
      work(item, of_item, place, parity);
    }
    ptx::cp_async_wait<0>();
  }

  __device__ __forceinline__ void work(Item item, const Request& of_item, int& place, int& parity) {
    const Window& window = of_item.window;
    prepare(item, window);
    Readers<State, Act, kDstate, kTokenTiles> readers;
    readers.load(group(), window, lane);
    for (int i = 0; i < item.heads; ++i) {
      do_head(item, of_item, i, readers, place, parity);
      __syncwarp();
      for (int t = spread_x.row; t < window.q; t += spread_x.rows) {
        const int64_t index = out_of_token(params, of_item, item.head, t) + 8 * spread_x.piece;
        store_outputs<Act>(
            params, index,
            floats(params.at_outputs) + t * (shape.y_pitch() / 4) + 8 * spread_x.piece);
      }
      ++item.head;
      item.state += bytes_to_next_head();
      parity ^= 1;
      next_stage();
    }
  }

  // The weights of all heads, unless they come from scratch; C and, of a flush, B as operands.
  __device__ __forceinline__ void prepare(const Item& item, const Window& window) {
    float* products = floats(params.at_products);
    float* scales_of_C = floats(params.at_scales_of_C);
    if constexpr (kPrepared) {
      second = !second;
    } else {
      new_dt.put(dt(0) + first_token(window), params, window.q, item.heads, constant, lane);
      put_products<Act, kDstate, kTokenTiles>(products, group(), window, lane,
                                              [&](int j) { return in_order().row(window, j); });
      if (window.flush) {
        put_products<Act, kDstate, kTokenTiles>(
            products + kRows * shape.tokens, group(), window, lane,
            [&](int j) { return in_order().old_row(window, j); });
      }
      __syncwarp();
    }
    prepare_C<kScaledC<State, Act>>(scales_of_C, group(), window.q, lane);
    if (window.flush) prepare_B<Checkpoint>(group(), in_order(), window, lane);
    __syncwarp();
    if constexpr (!kPrepared) {
      put_weights_of_heads(weights(0), weight_shape, dt(0), item.heads, products, scales_of_C,
                           constant, window, lane);
      __syncwarp();
    }
  }

  // Head i of an item. What a fold takes is loaded for it and not kept.
  __device__ __forceinline__ void do_head(const Item& item, const Request& of_item, int i,
                                          Readers<State, Act, kDstate, kTokenTiles>& readers,
                                          int& place, int parity) {
    const Window& window = of_item.window;
    const HeadTile<Act, kDstate> tile = {head_tile(parity), shape};
    for (int s = 0; s < stages(); ++s) {
      if (s > 0) next_stage();
      const int first = s * kStageSlabs * kRows;
      if (window.flush) {
#pragma unroll 1
        for (int k = 0; k < kStageSlabs; ++k) {
          const int first_row = first + k * kRows;
          if (k > 0 && first_row >= params.head_dim) break;
          fold(item, of_item, slab(place, k), weights(i), tile, parity, first_row);
        }
        readers.load(group(), window, lane);  // a fold needs their registers
      }
      float acc[kStageSlabs][kTokenTiles][4] = {};
#pragma unroll
      for (int k = 0; k < kStageSlabs; ++k) read_out_slab(acc[k], slab(place, k), readers, lane);
      refill(item, of_item, item.heads - 1 - i, s, place, parity);
      const Weights<kTokenTiles> of_head(weights(i), weight_shape, window, lane);
      if constexpr (convert::kScaled<State>) {
#pragma unroll
        for (int k = 0; k < kStageSlabs; ++k) {
          scale_rows(acc[k], scales(parity) + first + k * kRows, lane);
        }
      }
      finish_slabs(acc, of_head, weights(i) + weight_shape.old_rows(), tile, in_order(), first,
                   params.head_dim, floats(params.at_outputs), window, lane);
    }
  }

  __device__ __forceinline__ void fold(const Item& item, const Request& of_item, const Slab& slab,
                                       const float* of_head, const HeadTile<Act, kDstate>& tile,
                                       int parity, int first_row) const {
    const FoldWeights fold_weights(of_head + weight_shape.fold(), lane);
    uint32_t rows[4];
    ptx::ldmatrix_x4_trans(rows, tile.old_x(in_order(), of_item.window, lane) + 2 * first_row);
    const Fold<Checkpoint> fold = prepare_fold<Checkpoint, Act>(fold_weights, rows);
    const int row = first_row + lane.g;
    Checkpoint* to = checkpoint_of(of_item, ptx::opaque(item.head)) + row * kDstate +
                     lane.t * static_cast<int>(16 / sizeof(Checkpoint));
    if constexpr (kCopied) {
      auto* copy = reinterpret_cast<unsigned char*>(state_of(of_item, ptx::opaque(item.head)));
      const BothTargets<State, kDstate> target{params, to, copy + first_row / kRows * Slab::kBytes,
                                               scale_of(of_item, item.head) + row,
                                               static_cast<unsigned>(of_item.slot)};
      fold_copied_slab<State, Act, kDstate>(target, group().B(), fold, lane);
    } else {
      Target<State, kDstate> target{params, to, nullptr};
      if constexpr (convert::kScaled<State>) {
        const float* decode = scales(parity) + row;
        target.scale = scale_of(of_item, item.head) + row;
        fold_scaled_slab<State, Act, kDstate>(target, slab, group().B(), fold, decode, lane);
      } else {
        fold_slab<State, Act, kDstate>(target, slab, group().B(), fold, lane);
      }
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

// 16-bit states leave room for more warps; a fold of an 8-bit one wants the registers.
template <class State, int kTokenTiles>
constexpr int kMostThreads = sizeof(State) == 2 && kTokenTiles == 1 ? 384 : 256;

// The block's items, list after list.
template <class State, class Act, int kDstate, int kTokenTiles, bool kPrepared, class Checkpoint>
__device__ __forceinline__ void do_step(const CheckpointingSsuParams& params) {
  RequestList& list = *reinterpret_cast<RequestList*>(ptx::dynamic_smem());
  const int warp = threadIdx.x >> 5;
  for (int first = 0; first < params.batch; first += params.most_listed) {
    if (threadIdx.x == 0) list.taken = list.appended = 0;
    const int2 listed = list_requests(list, params, first);
    unsigned char* memory =
        ptx::dynamic_smem() + params.bytes_of_list + warp * params.bytes_of_share;
    Worker<State, Act, kDstate, kTokenTiles, kPrepared, Checkpoint>(params, list, listed, memory)
        .run();
    append<Act, kDstate>(list, params, listed);
    __syncthreads();
  }
  if (params.zero_padding) zero_padding(params);
}

template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint = State>
__global__ void __launch_bounds__(kMostThreads<State, kTokenTiles>, 1)
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  do_step<State, Act, kDstate, kTokenTiles, false, Checkpoint>(params);
}

// What was written before the precompute is complete when this starts; what it writes itself is
// waited for by each warp.
template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint = State>
__global__ void __launch_bounds__(kMostThreads<State, kTokenTiles>, 1)
    checkpointing_ssu_prepared(const __grid_constant__ CheckpointingSsuParams params) {
  ptx::fence_acq_rel_gpu();
  ptx::grid_dependency_launch();
  do_step<State, Act, kDstate, kTokenTiles, true, Checkpoint>(params);
}
