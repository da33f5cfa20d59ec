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
// memory while it computes on those that came before. The first sequences are not sorted by whether
// they flush: a warp whose item is one of theirs asks for states while the cursors come. Writes
// `out`, the new ring rows, and the checkpoint on flush; counts in one of `tickets`, which is 0
// again behind it. Never reads a dead ring row, never writes a live one, touches nothing of a
// padded row but `out`.
//
// A prepared step is the second of two kernels: precompute.cu has left the weights in the caller's
// scratch, so a warp asks for them like for rows, and of B for old rows that are folded. The new
// rows of B and dt are written by then.
#include "copied.cuh"
#include "prepare.cuh"
#include "requests.cuh"

using namespace replay;

// Slabs that are copied together, and stages: on their way or in use.
template <class State, int kDstate>
constexpr int kSlabsOfStage = kDstate * sizeof(State) <= 128 ? 2 : 1;
constexpr int kStages = 2;

// Whether a warp may know its first item before the list is there: not with states of 8 bits, where
// instructions count.
template <class State>
constexpr bool kKnowsFirst = sizeof(State) > 1;

// Whether rows of x may have no padding and outputs be of 16 bits, where one more warp fits then.
template <class State>
constexpr bool kMayBeTight = sizeof(State) == 4;

// Where an item lies: its sequence, among those that flush or among the others, the group in it,
// and the first head in that.
struct Found {
  unsigned n, group;
  int first;
};

// Item `index` of those of the sequences that flush, or of the others.
__device__ __forceinline__ Found find_item(const CheckpointingSsuParams& params, unsigned index,
                                           bool flush) {
  const unsigned of_sequence = flush ? params.flushes_of_sequence : params.items_of_sequence;
  const unsigned of_group = flush ? params.flushes_of_group : params.items_of_group;
  const int heads = flush ? params.heads_of_flush : params.heads_of_item;
  const unsigned n =
      divide(index, flush ? params.inverse_flushes_of_sequence : params.inverse_items_of_sequence);
  const unsigned of_n = index - n * of_sequence;
  const unsigned group =
      divide(of_n, flush ? params.inverse_flushes_of_group : params.inverse_items_of_group);
  return {n, group, static_cast<int>(of_n - group * of_group) * heads};
}

// The first one that a warp takes. Without the shuffle, the compiler would not know it to be the
// same for all lanes, and have them converge again throughout the loop.
__device__ __forceinline__ unsigned first_index() {
  return __shfl_sync(kAllLanes, threadIdx.x >> 5, 0) * gridDim.x + blockIdx.x;
}

// Heads of one group of a sequence of the list, from `head` on.
struct Item {
  const Entry* entry;
  int group, head, heads;
};

// What a warp asks for next, some stages ahead of its work: stages of the heads of an item, one
// after another. Addresses are those of the lane's first bytes: of the head's state, of row 0 of
// its ring of x, of its x of the first tokens, of its scales.
struct Ahead {
  int heads, parity;  // heads behind this one; which tile its rows go to
  unsigned stage;     // the next one
  bool more;          // the lane copies more of its rows than its first ones
  Window window;
  const unsigned char *state, *ring, *token, *scales;
};

// What is read is a copy of the checkpoint where their types differ.
template <class State, class Act, int kDstate, int kTokenTiles, bool kPrepared, class Checkpoint>
struct Worker {
  using Slab = SlabTile<State, kDstate>;
  using Sums = float[kSlabsOfStage<State, kDstate>][kTokenTiles][4];  // of a stage
  static constexpr bool kCopied = !convert::same<State, Checkpoint>;
  static constexpr int kStageSlabs = kSlabsOfStage<State, kDstate>;
  static constexpr int kStageBytes = kStageSlabs * Slab::kBytes;

  const CheckpointingSsuParams& params;
  RequestList& list;
  int2 listed;
  const Lane lane;
  const TileShape<Act, kDstate> shape;
  const WeightShape weight_shape;
  const Spread spread_x, spread_B;
  unsigned char* const memory;  // the warp's share
  const typename Slab::Offsets copied, read;
  const unsigned all_stages, head_bytes;
  const OutputRows<kMayBeTight<State>> outputs;
  const unsigned char* const stored;  // those that the lane stores first
  // What is asked for.
  Ahead ahead;
  int place;                  // of the stage that is asked for next
  Item next;                  // the last one that was taken; 0 heads behind the last of all
  int group_due;              // 1: its B and C are not asked for yet
  unsigned asked;             // 1: for the first stage, before the list was there
  NewDt<kTokenTiles> new_dt;  // of its heads, as are A, D and dt_bias
  HeadConstants constants;
  // What is worked on.
  Request request;
  int head, heads;         // the head, and how many are left with it; -1 before the first item
  unsigned stage;          // the one that was read
  int parity;              // of the tile of its rows
  int folding;             // 1: the item needs its B to the end
  int appends_B;           // of this group, or -1
  int second;              // 1: weights from scratch are in the second of two places
  const float* of_head;    // its weights
  const float* of_scales;  // the lane's own
  WeightsOfLane<kTokenTiles> of_lane;
  unsigned char* rows;  // their tile
  unsigned new_rows;    // in it, the lane's rows of x for the outputs
  int64_t out;          // the lane's first output
  Act* appended;        // and what it appends first

  __device__ __forceinline__ Worker(const CheckpointingSsuParams& p, RequestList& l,
                                    unsigned char* of_warp)
      : params(p),
        list(l),
        shape(p, p.max_window, kMayBeTight<State> && p.tight_rows != 0 ? 0 : 16),
        weight_shape{p.npredicted},
        spread_x(Spread::of_warp(lane.index, p.head_dim / 8, p.inverse_pieces)),
        spread_B(threadIdx.x & 31, 32, kDstate / 8),
        memory(ptx::kept(of_warp)),
        copied(Slab::copied_by(lane.index)),
        read(Slab::read_by(lane)),
        all_stages(
            ptx::opaque(static_cast<unsigned>(p.head_dim / kRows + kStageSlabs - 1) / kStageSlabs)),
        head_bytes(ptx::opaque(static_cast<unsigned>(shape.head_bytes()))),
        outputs(memory + p.at_outputs, p, lane),
        stored(ptx::kept(memory + p.at_outputs + spread_x.row * outputs.pitch +
                         8 * outputs.bytes() * spread_x.piece)),
        asked(0),
        constants(p, lane) {}

  // ---- what a warp works on ---------------------------------------------------------------------

  __device__ __forceinline__ GroupTile<Act, kDstate> group() const {
    return {memory + params.at_group, shape};
  }
  __device__ __forceinline__ HeadTile<Act, kDstate> head_tile(int parity) const {
    return {memory + params.at_head + parity * head_bytes, shape};
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
  __device__ __forceinline__ OrderedRows in_order() const { return {shape.old_rows}; }
  __device__ __forceinline__ Checkpoint* checkpoint_of(unsigned slot, unsigned head) const {
    return static_cast<Checkpoint*>(params.state) + slot * params.state_slot_stride +
           head * params.state_head_stride;
  }
  __device__ __forceinline__ State* state_of(unsigned slot, unsigned head) const {
    if constexpr (kCopied) {
      return static_cast<State*>(params.state_copy) + slot * params.state_copy_slot_stride +
             head * params.state_copy_head_stride;
    } else {
      return checkpoint_of(slot, head);
    }
  }
  __device__ __forceinline__ int64_t bytes_to_next_head() const {
    const int64_t stride = kCopied ? params.state_copy_head_stride : params.state_head_stride;
    return stride * static_cast<int>(sizeof(State));
  }
  __device__ __forceinline__ float* scale_of(unsigned slot, unsigned head) const {
    return params.state_scale + slot * params.state_scale_slot_stride +
           head * params.state_scale_head_stride;
  }

  // ---- what it asks for -------------------------------------------------------------------------

  // One of the last items, which all blocks share: some multiprocessors stream faster than others.
  // Each warp asks until it gets none, which makes the counter 0 again.
  __device__ __forceinline__ unsigned take_ticket(unsigned shared) const {
    int n = 0;
    while (kKnowsFirst<State> && list.entry(params, n, listed).slot < 0) ++n;
    unsigned* tickets = params.tickets + list.entry(params, n, listed).slot;
    const unsigned warps = gridDim.x * (blockDim.x >> 5);
    return __shfl_sync(kAllLanes, ptx::atomic_count_global(tickets, shared + warps - 1), 0);
  }

  // Asks for the first stage of an item of an early sequence.
  __device__ __forceinline__ void ask_early(const GivenSlot& given, const Found& item) {
    const int slot = __shfl_sync(kAllLanes, given.slot(params), 0);
    if (slot < 0) return;
    const unsigned head = item.group * params.heads_per_group + item.first;
    ahead.state = reinterpret_cast<const unsigned char*>(state_of(slot, head)) + 16 * lane.index;
    ahead.stage = 0, place = 0;
    ask_for_stage();
    asked = 1;
  }

  // Takes the next item: one of the block's own, as long as there are any.
  __device__ __forceinline__ void take_item() {
    const unsigned flushes = listed.x * params.flushes_of_sequence;
    const unsigned all = flushes + listed.y * params.items_of_sequence;
    const unsigned early = min(listed.x, params.early_sequences) * params.flushes_of_sequence;
    const unsigned shared = min(all - early, static_cast<unsigned>(params.shared_items));
    unsigned index =
        kKnowsFirst<State> && heads < 0 ? first_index() : take(list.taken) * gridDim.x + blockIdx.x;
    while (true) {
      if (shared > 0 && index >= all - shared) index = all - shared + take_ticket(shared);
      if (index >= all) {
        next.heads = 0, ahead.heads = -1;
        return;
      }
      const bool flush = index < flushes;  // its items have fewer heads
      const Found item = find_item(params, flush ? index : index - flushes, flush);
      const int most = flush ? params.heads_of_flush : params.heads_of_item;
      next.entry = &list.entry(params, flush ? item.n : listed.x + item.n, listed);
      next.group = item.group, next.head = item.group * params.heads_per_group + item.first;
      next.heads = min(most, params.heads_per_group - item.first);
      if (!kKnowsFirst<State> || next.entry->slot >= 0) break;
      forget_early();
      index = take(list.taken) * gridDim.x + blockIdx.x;
    }
    group_due = 1;
    begin_ahead();
  }

  // What came for an early sequence that has nothing to do.
  __device__ __forceinline__ void forget_early() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    asked = ptx::opaque(0u);
  }

  __device__ __forceinline__ void begin_ahead() {
    const Request of_item = unpack_request(*next.entry);
    const unsigned slot = of_item.slot, head = next.head;
    const Window& window = of_item.window;
    ahead.heads = next.heads;
    ahead.window = window;
    ahead.state = reinterpret_cast<const unsigned char*>(state_of(slot, head)) + 16 * lane.index;
    ahead.ring = reinterpret_cast<const unsigned char*>(x_ring<Act>(params, slot, head)) +
                 16 * spread_x.piece;
    ahead.token = reinterpret_cast<const unsigned char*>(
                      x_of_token<Act>(params, of_item, head, spread_x.row)) +
                  16 * spread_x.piece;
    ahead.more = window.live > RingRows::kAtOnce * spread_x.rows || window.q > spread_x.rows ||
                 shape.gated || (kCopied && window.flush);
    if constexpr (convert::kScaled<State>) {
      ahead.scales = reinterpret_cast<const unsigned char*>(scale_of(slot, head)) + 4 * lane.index;
      ahead.more = ahead.more || params.head_dim > 64;
    }
  }

  // Asks for a stage, with the first of a head for its rows, and goes on to the next one.
  __device__ __forceinline__ void ask() {
    __syncwarp();  // all lanes have read what is overwritten
    if (ahead.stage == 0 && ahead.heads == 0) take_item();
    if (next.heads > 0) {
      if (!kKnowsFirst<State> || asked == 0) ask_for_stage();
      if constexpr (kKnowsFirst<State>) asked = ptx::opaque(0u);
      if (ahead.stage == 0) ask_for_head();
      if (++ahead.stage == all_stages) ahead.stage = 0, ahead.state += bytes_to_next_head();
    }
    ptx::cp_async_commit();
    place ^= 1;
  }

  __device__ __forceinline__ void ask_for_head() {
    const Window& window = ahead.window;
    ahead.parity ^= 1;
    --ahead.heads;
    const HeadTile<Act, kDstate> tile = head_tile(ahead.parity);
    const RingRows rows = tile.ring_rows(params, ahead.ring, window.start, window.live);
    const auto place_of_row = [&](int row) { return row * shape.x_pitch; };
    rows.copy_pass(tile.ring_place(spread_x), 0, spread_x, place_of_row);
    tile.copy_first_token(ahead.token, window.q, spread_x);
    ptx::smem_t to_scales = {};
    if constexpr (convert::kScaled<State>) {
      to_scales = ptx::to_smem(scales(ahead.parity) + lane.index);
#pragma unroll
      for (int p = 0; p < 64; p += 32) ptx::cp_async4(to_scales + 4 * p, ahead.scales + 4 * p);
    }
    if (ahead.more) {
      rows.copy(tile.ring_place(spread_x), spread_x, place_of_row,
                RingRows::kAtOnce * spread_x.rows);
      tile.copy_later_tokens(params, ahead.token, window.q, spread_x);
      ask_for_more(tile, to_scales);
    }
    ahead.ring += params.x_cache_head_stride * static_cast<int>(sizeof(Act));
    ahead.token += params.x_head_stride * static_cast<int>(sizeof(Act));
    if constexpr (convert::kScaled<State>) ahead.scales += params.state_scale_head_stride * 4;
  }

  __device__ __forceinline__ void ask_for_more(const HeadTile<Act, kDstate>& tile,
                                               ptx::smem_t to_scales) const {
    if constexpr (convert::kScaled<State>) {
#pragma unroll 1
      for (int p = 64; p + lane.index < params.head_dim; p += 32) {
        ptx::cp_async4(to_scales + 4 * p, ahead.scales + 4 * p);
      }
    }
    const Request of_item = unpack_request(*next.entry);
    const int of_ahead = next.head + next.heads - 1 - ahead.heads;
    if (shape.gated) tile.copy_z(params, of_item, of_ahead, spread_x);
    if constexpr (kCopied) {
      if (of_item.window.flush) {
        prefetch_checkpoint(checkpoint_of(of_item.slot, of_ahead), 2 * params.head_dim * kDstate,
                            lane);
      }
    }
  }

  __device__ __forceinline__ void ask_for_stage() const {
    const unsigned char* from = ptx::mad_wide(ahead.stage, kStageBytes, ahead.state);
#pragma unroll
    for (int i = 0; i < kStageSlabs; ++i) {
      if (i == 0 || (ahead.stage * kStageSlabs + i) * kRows < params.head_dim) {
        slab(place, i).template copy<32>(from + i * Slab::kBytes, copied);
      }
    }
  }

  __device__ __forceinline__ void ask_for_group() {
    const Request of_item = unpack_request(*next.entry);
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
    int i = lane.index >> 4;
    const int row = ring_row(window.start, j, params.ring_buffer_len);
    const float* ring =
        dt_ring(params, of_item.slot, next.head + i) + row_offset(row, params.dt_cache_row_stride);
    if (j < window.live) {
#pragma unroll 1
      for (; i < next.heads; i += 2, ring += 2 * params.dt_cache_head_stride) {
        ptx::cp_async4(ptx::to_smem(dt(i) + j), ring);
      }
    }
    new_dt.load(params, of_item, next.head, next.heads, lane);
    constants.load(next.head, next.heads, lane);
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

  // ---- what it computes -------------------------------------------------------------------------

  // One round asks for a stage, finishes the one that was read before, and reads the next one. The
  // first round only asks. The weights of an item are made behind the reading of its first stage,
  // while more of them come; a fold needs them first, which takes a round without a stage.
  __device__ __forceinline__ void run(int2 of_list) {
    static_assert(kStages == 2, "one round that only asks");
    Readers<State, Act, kDstate, kTokenTiles> readers;
    Sums acc;
    listed = of_list;
    ahead.heads = 0, ahead.stage = 0, ahead.parity = 1, place = 0;
    heads = -1, parity = 0, group_due = 0, folding = kPrepared, second = 0;
    unsigned weights_due = 0, holds = 0;  // 1: a stage that is not read before the weights are made
#pragma unroll 1
    while (true) {
      if (holds == 0) ask();
      if (weights_due != 0) prepare_weights();
      weights_due = ptx::opaque(0u);
      if (holds == 0) {
        if (heads > 0) finish(acc);
        if (heads > 0 && group_due == 0) {
          wait_for_stage();
        } else {
          const bool begins = heads == 0;
          // From here on the scratch is there, and anything may be written.
          if (kPrepared && begins) ptx::grid_dependency_wait();
          const bool asks = group_due > (begins ? 0 : folding);
          if (asks) {
            ask_for_group();
            ptx::cp_async_commit();
            group_due = 0;
          }
          if (heads < 0) {
            heads = 0;
            continue;
          }
          if (asks && !begins) {
            wait_for_stage<1>();
          } else {
            wait_for_stage();
          }
          if (begins) {
            if (next.heads == 0) break;
            begin_item();
            readers.load(group(), request.window, lane);
            weights_due = ptx::opaque(1u), holds = ptx::opaque(static_cast<unsigned>(folding));
            if (holds != 0) continue;
          }
        }
      }
      holds = ptx::opaque(0u);
      read_stage(acc, readers);
    }
    ptx::cp_async_wait<0>();
  }

  // The next one: not for what was asked for later, stages and `kMore` other groups of copies.
  template <int kMore = 0>
  __device__ __forceinline__ void wait_for_stage() const {
    ptx::cp_async_wait<kStages - 1 + kMore>();
    __syncwarp();
  }

  __device__ __forceinline__ void begin_item() {
    if (folding != 0) {  // B and C, too, were asked for just now
      ptx::cp_async_wait<0>();
      __syncwarp();
    }
    request = unpack_request(*next.entry);
    folding = request.window.flush;
    head = next.head, heads = next.heads, stage = 0;
    appends_B = head == next.group * params.heads_per_group ? next.group : -1;
    prepare_operands();
  }

  // Those of the head, by its parity.
  __device__ __forceinline__ void find_rows() {
    rows = ptx::kept(head_tile(parity).x);
    if constexpr (convert::kScaled<State>) of_scales = ptx::kept(scales(parity) + lane.g);
  }

  // What reading takes: C as an operand. Its products with B come before, as it may change there.
  __device__ __forceinline__ void prepare_operands() {
    const Window& window = request.window;
    if constexpr (!kPrepared) {
      float* products = floats(params.at_products);
      put_products<Act, kDstate, kTokenTiles>(products, group(), window, lane,
                                              [&](int j) { return in_order().row(window, j); });
      if (window.flush) {
        put_products<Act, kDstate, kTokenTiles>(
            products + kRows * shape.tokens, group(), window, lane,
            [&](int j) { return in_order().old_row(window, j); });
      }
      __syncwarp();
    }
    prepare_C<kScaledC<State, Act>>(floats(params.at_scales_of_C), group(), window.q, lane);
    __syncwarp();
  }

  // The weights of all heads, unless they come from scratch; of a flush, B as operands. Appends
  // dt and B, as they are here.
  __device__ __forceinline__ void prepare_weights() {
    const Window& window = request.window;
    float constant = 0.0f;
    if constexpr (kPrepared) {
      second = !second;
    } else {
      constant = constants.value();
      new_dt.put(dt(0) + first_token(window), params, window.q, heads, constant, lane);
      __syncwarp();
      append_dt(params, request, head, heads, dt(0), lane);
      if (appends_B >= 0) append_B(params, request, appends_B, group(), spread_B);
    }
    if (window.flush) prepare_B<Checkpoint>(group(), in_order(), window, lane);
    __syncwarp();
    if constexpr (!kPrepared) {
      put_weights_of_heads(weights(0), weight_shape, dt(0), heads, floats(params.at_products),
                           floats(params.at_scales_of_C), constant, window, lane);
      __syncwarp();
    }
    of_lane = WeightsOfLane<kTokenTiles>(weight_shape, window, lane);
    of_head = weights(0);
    new_rows = ptx::opaque(static_cast<unsigned>(
        in_order().row(window, lane.transposed_row()) * shape.x_pitch + lane.transposed_column()));
    out = out_of_token(params, request, head, spread_x.row) + 8 * spread_x.piece;
    appended = appended_x(spread_x.row, head);
    find_rows();
  }

  // The next stage. What a fold takes is loaded for it and not kept.
  __device__ __forceinline__ void read_stage(
      Sums& acc, Readers<State, Act, kDstate, kTokenTiles>& readers) const {
    if (request.window.flush) {
#pragma unroll 1
      for (int k = 0; k < kStageSlabs; ++k) {
        const int first_row = (stage * kStageSlabs + k) * kRows;
        if (k > 0 && first_row >= params.head_dim) break;
        fold(slab(place, k), first_row);
      }
      readers.load(group(), request.window, lane);  // a fold needs their registers
    }
#pragma unroll
    for (int k = 0; k < kStageSlabs; ++k) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[k][tile][i] = 0.0f;
      }
      read_out_slab(acc[k], slab(place, k).pieces(read), readers, lane);
    }
  }

  // The lane's piece of x in the ring's row for token t of a head.
  __device__ __forceinline__ Act* appended_x(int t, unsigned of_head) const {
    return x_ring<Act>(params, request.slot, of_head) + 8 * spread_x.piece +
           row_offset(request.window.new_row(t, params.ring_buffer_len), params.x_cache_row_stride);
  }

  // Writes x of the head's new rows.
  __device__ __forceinline__ void append_x() const {
    const ptx::smem_t x = HeadTile<Act, kDstate>{rows, shape}.token_place(spread_x);
    int t = spread_x.row;
    if (t < request.window.q) *reinterpret_cast<uint4*>(appended) = ptx::load_shared16(x);
#pragma unroll 1
    while ((t += spread_x.rows) < request.window.q) {
      *reinterpret_cast<uint4*>(appended_x(t, ptx::opaque(static_cast<unsigned>(head)))) =
          ptx::load_shared16(x + (t - spread_x.row) * shape.x_pitch);
    }
  }

  // From the sums over a stage to its outputs, which go to memory with the last stage of a head.
  __device__ __forceinline__ void finish(Sums& acc) {
    const int first = stage * kStageSlabs * kRows;
    const Weights<kTokenTiles> weights_of_head(of_head, of_lane);
    if constexpr (convert::kScaled<State>) {
#pragma unroll
      for (int k = 0; k < kStageSlabs; ++k) scale_rows(acc[k], of_scales + first + k * kRows);
    }
    const HeadTile<Act, kDstate> tile = {rows, shape};
    finish_slabs(acc, weights_of_head, of_head + weight_shape.old_rows(), of_lane,
                 ptx::to_smem(rows) + new_rows, tile, in_order(), first, params.head_dim, outputs,
                 request.window, lane);
    if (++stage == all_stages) finish_head();
  }

  __device__ __forceinline__ void finish_head() {
    __syncwarp();
    const unsigned char* y = stored;
    int64_t to = out;
#pragma unroll 1
    for (int t = spread_x.row; t < request.window.q; t += spread_x.rows) {
      outputs.template store<Act>(params, to, y);
      to += spread_x.rows * params.out_token_stride, y += spread_x.rows * outputs.pitch;
    }
    if (params.appends_late == 0) append_x();
    stage = 0, ++head, --heads, parity ^= 1;
    out += params.out_head_stride, of_head += weight_shape.words();
    appended += params.x_cache_head_stride;
    find_rows();
  }

  __device__ __forceinline__ void fold(const Slab& slab, int first_row) const {
    const FoldWeights fold_weights(of_head + weight_shape.fold(), lane);
    const HeadTile<Act, kDstate> tile = {rows, shape};
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, tile.old_x(in_order(), request.window, lane) + 2 * first_row);
    const Fold<Checkpoint> fold = prepare_fold<Checkpoint, Act>(fold_weights, x);
    const int row = first_row + lane.g;
    const unsigned slot = request.slot;
    const unsigned of_fold = ptx::opaque(static_cast<unsigned>(head));
    Checkpoint* to = checkpoint_of(slot, of_fold) + row * kDstate +
                     lane.t * static_cast<int>(16 / sizeof(Checkpoint));
    if constexpr (kCopied) {
      auto* copy = reinterpret_cast<unsigned char*>(state_of(slot, of_fold));
      const BothTargets<State, kDstate> target{params, to, copy + first_row / kRows * Slab::kBytes,
                                               scale_of(slot, head) + row, slot};
      fold_copied_slab<State, Act, kDstate>(target, group().B(), fold, lane);
    } else {
      Target<State, kDstate> target{params, to, nullptr};
      if constexpr (convert::kScaled<State>) {
        const float* decode = scales(parity) + row;
        target.scale = scale_of(slot, head) + row;
        fold_scaled_slab<State, Act, kDstate>(target, slab.pieces(read), group().B(), fold, decode,
                                              lane);
      } else {
        fold_slab<State, Act, kDstate>(target, slab.pieces(read), group().B(), fold, lane);
      }
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

// A second tile of tokens wants the registers of a third of the warps, and so do rows of 256, of
// which shared memory feeds hardly more, and two forms of a state beside fp16.
template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint>
constexpr int kMostThreads = kTokenTiles == 1 && kDstate <= 128 &&
                                     (convert::same<State, Checkpoint> || !convert::same<Act, fp16>)
                                 ? 384
                                 : 256;

// The block's items, list after list.
template <class State, class Act, int kDstate, int kTokenTiles, bool kPrepared, class Checkpoint>
__device__ __forceinline__ void do_step(const CheckpointingSsuParams& params) {
  RequestList& list = *reinterpret_cast<RequestList*>(ptx::dynamic_smem());
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  for (int first = 0; first < params.batch; first += params.most_listed) {
    const int end = min(first + params.most_listed, params.batch);
    const GivenSlot slot = ask_for_slot(params, first);
    Found item = {};
    if constexpr (kKnowsFirst<State>) item = find_item(params, first_index(), true);
    const bool early = kKnowsFirst<State> && item.n < min(params.early_sequences, end - first);
    const GivenSlot early_slot(params, first + (early ? item.n : 0));
    const AskedRow asked = ask_for_row(params, first + threadIdx.x, end, slot);
    if (threadIdx.x == 0) list.taken = kKnowsFirst<State> ? warps : 0, list.appended = 0;
    Worker<State, Act, kDstate, kTokenTiles, kPrepared, Checkpoint> worker(
        params, list, ptx::dynamic_smem() + params.bytes_of_list + warp * params.bytes_of_share);
    if (early) worker.ask_early(early_slot, item);
    const int2 listed = list_requests(list, params, first, asked);
    worker.run(listed);
    if (params.appends_late != 0) append_x_of_all<Act>(list, params, listed);
    __syncthreads();
  }
  if (params.zero_padding) zero_padding(params);
}

template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint = State>
__global__ void __launch_bounds__(kMostThreads<State, Act, kDstate, kTokenTiles, Checkpoint>, 1)
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  do_step<State, Act, kDstate, kTokenTiles, false, Checkpoint>(params);
}

// What was written before the precompute is complete when this starts; what it writes itself is
// waited for by each warp.
template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint = State>
__global__ void __launch_bounds__(kMostThreads<State, Act, kDstate, kTokenTiles, Checkpoint>, 1)
    checkpointing_ssu_prepared(const __grid_constant__ CheckpointingSsuParams params) {
  ptx::fence_acq_rel_gpu();
  ptx::grid_dependency_launch();
  do_step<State, Act, kDstate, kTokenTiles, true, Checkpoint>(params);
}
