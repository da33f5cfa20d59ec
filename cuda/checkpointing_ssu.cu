// One decode step of a Mamba-2 layer from checkpoint, ring and new tokens; the state is written
// only on flush. With c the sums of A dt over the rows since the checkpoint S and j the rows before
// t:
//
//   y_t = exp(c_t) S C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t,   out = y silu(z)
//   flush:  S <- exp(c_old) S + sum_{j old} exp(c_old - c_j) dt_j x_j B_j^T, then y from the new S
//
// Equals reference.replay_step. Grid: one block per multiprocessor, which stays. Its items are a
// sequence and some heads of one group; a few warps prepare items, which takes B, C and dt, and
// leave what the heads need in a ring of slots. The other warps take heads: each streams the state,
// some slabs of 16 rows p at a time, through its own shared memory, while it computes on those that
// came before. They wait for nothing but the slot of their item.
// Writes `out`, the new ring rows, and the checkpoint on flush. Never reads a dead ring row, never
// writes a live one, touches nothing of a padded row but `out`.
#include "flush.cuh"
#include "requests.cuh"

using namespace replay;

constexpr int kSlots = 4;  // items that are prepared or in use

struct alignas(128) Shared {
  RequestList list;
  uint64_t full[kSlots], empty[kSlots];  // barriers
};

// Heads of one group of sequence n.
struct Item {
  int n, group, head, heads;
};

// What producers and consumers share: items, and the slots that hold what belongs to them.
template <class Act, int kDstate>
struct Block {
  const CheckpointingSsuParams& params;
  Shared& shared;
  const int2 listed;
  const TileShape<Act, kDstate> shape;
  const WeightShape weight_shape;
  unsigned char* const slots;

  __device__ __forceinline__ Block(const CheckpointingSsuParams& p, Shared& s, int2 of_list)
      : params(p),
        shared(s),
        listed(of_list),
        shape(p, p.max_window),
        weight_shape{p.npredicted},
        slots(reinterpret_cast<unsigned char*>(&s) + sizeof(Shared)) {}

  // The block's item k; heads is 0 behind the last one.
  __device__ __forceinline__ Item item(int k) const {
    const unsigned of_group = params.items_of_group, in_group = params.heads_per_group;
    const unsigned of_request = of_group * (params.nheads / in_group);
    const unsigned index = k * gridDim.x + blockIdx.x, n = index / of_request;
    const unsigned of_n = index - n * of_request, group = of_n / of_group;
    const unsigned first = (of_n - group * of_group) * params.heads_of_item;
    Item item = {static_cast<int>(n), static_cast<int>(group),
                 static_cast<int>(group * in_group + first), 0};
    if (item.n < listed.x + listed.y) {
      item.heads = min(params.heads_of_item, static_cast<int>(in_group - first));
    }
    return item;
  }

  __device__ __forceinline__ Request request(int n) const {
    return unpack_request(shared.list.entry(n, listed));
  }
  __device__ __forceinline__ unsigned char* slot(int k) const {
    return slots + k % kSlots * params.bytes_of_slot;
  }
  __device__ __forceinline__ GroupTile<Act, kDstate> group(int k) const { return {slot(k), shape}; }
  __device__ __forceinline__ float* products(int k) const {
    return reinterpret_cast<float*>(slot(k) + shape.group_bytes());
  }
  __device__ __forceinline__ float* scales_of_C(int k) const {
    return products(k) + kRows * shape.tokens;
  }
  // 32 of a head: of the rows read out, and from 16 on of the rows folded.
  __device__ __forceinline__ float* dt(int k) const {
    return scales_of_C(k) + ((shape.tokens + 3) & ~3);
  }
  __device__ __forceinline__ float* weights(int k, int head) const {
    return dt(k) + 2 * kRows * params.heads_of_item + head * weight_shape.words();
  }
  __device__ __forceinline__ RowMap in_order() const { return {0, shape.old_rows}; }
  __device__ __forceinline__ static ptx::smem_t barrier(uint64_t (&bars)[kSlots], int k) {
    return ptx::to_smem(bars + k % kSlots);
  }
};

// ---- a producer ---------------------------------------------------------------------------------

template <class State, class Act, int kDstate, int kTokenTiles>
struct Producer : Block<Act, kDstate> {
  using Base = Block<Act, kDstate>;
  using Base::params, Base::shape, Base::shared;
  const Lane lane;
  const Spread spread;

  __device__ __forceinline__ explicit Producer(const Base& block)
      : Base(block), spread(threadIdx.x & 31, 32, kDstate / 8) {}

  __device__ __forceinline__ void run(int first) const {
    for (int k = first;; k += params.producers) {
      const Item item = Base::item(k);
      if (item.heads == 0) return;
      if (k >= kSlots) {
        ptx::mbarrier_wait_parity(Base::barrier(shared.empty, k), k / kSlots - 1 & 1);
      }
      const Request request = Base::request(item.n);
      if (request.window.flush) {
        prepare<true>(item, request, k);
      } else {
        prepare<false>(item, request, k);
      }
      __syncwarp();
      if (lane.index == 0) ptx::mbarrier_arrive(Base::barrier(shared.full, k));
    }
  }

  __device__ __forceinline__ float load_constant(const Item& item) const {
    const int head = item.head + min(lane.index % kHeadsOfItem, item.heads - 1);
    const int which = lane.index / kHeadsOfItem;
    if (which == 0) return convert::load_float(params.A, head * params.A_stride, params.A_type);
    if (which == 1 && params.D != nullptr) {
      return convert::load_float(params.D, head * params.D_stride, params.D_type);
    }
    if (which == 2 && params.dt_bias != nullptr) {
      return convert::load_float(params.dt_bias, head * params.dt_bias_stride, params.dt_bias_type);
    }
    return 0.0f;
  }

  // Half a warp does a head, or a whole one where the other half has the rows folded.
  template <bool kFlush>
  __device__ __forceinline__ void prepare(const Item& item, const Request& request, int k) const {
    const Window& window = request.window;
    const GroupTile<Act, kDstate> group = Base::group(k);
    const int j = lane.index & 15, half = lane.index >> 4;
    float* const dt = Base::dt(k);
    // Everything is asked for before anything is used.
    group.copy(params, request, item.group, window.start, window.live, spread);
    for (int i = half; i < item.heads && j < window.live; i += 2) {
      const float* ring = dt_ring(params, request.slot, item.head + i);
      const int row = ring_row(window.start, j, params.ring_buffer_len);
      ptx::cp_async4(ptx::to_smem(dt + 32 * i + (kFlush ? kRows : 0) + j),
                     ring + row_offset(row, params.dt_cache_row_stride));
    }
    ptx::cp_async_commit();
    NewDt<kTokenTiles> fresh;
    fresh.load(params, request, item.head, item.heads, lane);
    const float constant = load_constant(item);
    ptx::cp_async_wait<0>();
    __syncwarp();
    fresh.put(dt + window.old_rows(), params, window.q, item.heads, constant, lane);
    put_products<Act, kDstate, kTokenTiles>(Base::products(k), group, Base::in_order(), window,
                                            lane);
    for (int t = 0; t < window.q; ++t) {
      float scale = 1.0f;
      if constexpr (kScaledC<State, Act> && !kFlush) {
        scale = scale_C<kDstate>(group.C + t * group.kPitch, lane);
      }
      if (lane.index == 0) Base::scales_of_C(k)[t] = scale;
    }
    if (kFlush) prepare_B<State>(group, Base::in_order(), window, lane);
    __syncwarp();
    const bool folded = kFlush && half == 1, live = j < (folded ? window.live : window.rows());
    for (int first = 0; first < item.heads; first += kFlush ? 1 : 2) {
      const int i = min(first + (kFlush ? 0 : half), item.heads - 1);
      const float A = __shfl_sync(kAllLanes, constant, i);
      const float D = __shfl_sync(kAllLanes, constant, kHeadsOfItem + i);
      const Decays decays(live ? dt[32 * i + (folded ? kRows : 0) + j] : 0.0f, A);
      float* weights = Base::weights(k, i);
      put_weights(weights, Base::weight_shape, Base::products(k), Base::scales_of_C(k), decays,
                  window, j, D, !folded);
      if (kFlush) put_fold_weights(weights + Base::weight_shape.fold(), decays, j, folded);
    }
  }
};

// ---- a consumer ---------------------------------------------------------------------------------

// Slabs that are copied together, and stages: on their way or in use.
template <class State, int kDstate>
constexpr int kSlabsOfStage = kDstate * sizeof(State) <= 256 ? 2 : 1;
constexpr int kStages = 2;

// Head `head`, number `of_item` in item k; `state` is the lane's first byte of its state.
struct Work {
  int k, of_item, n, head;
  const unsigned char* state;
};

template <class State, class Act, int kDstate, int kTokenTiles>
struct Consumer : Block<Act, kDstate> {
  using Base = Block<Act, kDstate>;
  using Base::params, Base::shape, Base::shared;
  using Slab = SlabTile<State, kDstate>;
  static constexpr int kStageSlabs = kSlabsOfStage<State, kDstate>;

  const Lane lane;
  const Spread spread;
  unsigned char *stages, *heads;
  float *y, *scales;
  float4* waiting;
  int count;  // of stages of a head
  Work next;
  bool more;  // whether there is a next head

  __device__ __forceinline__ Consumer(const Base& block, unsigned char* memory)
      : Base(block),
        spread(threadIdx.x & 31, 32, block.params.head_dim / 8),
        stages(memory),
        heads(memory + kStages * kStageSlabs * Slab::kBytes),
        count((block.params.head_dim / kRows + kStageSlabs - 1) / kStageSlabs),
        more(false) {
    y = reinterpret_cast<float*>(heads + 2 * shape.head_bytes());
    scales = y + shape.tokens * (shape.y_pitch() / 4);
    waiting = reinterpret_cast<float4*>(scales + 2 * params.head_dim) + lane.index;
  }

  __device__ __forceinline__ unsigned char* head_tile(int parity) const {
    return heads + parity * shape.head_bytes();
  }
  __device__ __forceinline__ Slab slab(int place, int i) const {
    return {stages + (place * kStageSlabs + i) * Slab::kBytes};
  }
  __device__ __forceinline__ State* state_of(const Request& request, int head) const {
    return static_cast<State*>(params.state) + request.slot * params.state_slot_stride +
           head * params.state_head_stride;
  }
  __device__ __forceinline__ float* scale_of(const Request& request, int head) const {
    return params.state_scale + request.slot * params.state_scale_slot_stride +
           head * params.state_scale_head_stride;
  }

  __device__ __forceinline__ void release(int k) const {
    if (lane.index == 0) ptx::mbarrier_arrive(Base::barrier(shared.empty, k));
  }

  // Takes the block's next head, if there is one, and asks for its rows.
  __device__ __forceinline__ void advance(int parity) {
    Item item;
    while (true) {
      const unsigned taken = take(shared.list.taken), of_item = params.heads_of_item;
      next.k = taken / of_item;
      next.of_item = taken - next.k * of_item;
      item = Base::item(next.k);
      if (item.heads == 0 || next.of_item < item.heads) break;
      release(next.k);  // its item has fewer heads
    }
    more = item.heads > 0;
    if (!more) return;
    next.n = item.n, next.head = item.head + next.of_item;
    const Request request = Base::request(next.n);
    next.state =
        reinterpret_cast<const unsigned char*>(state_of(request, next.head)) + 16 * lane.index;
    const HeadTile<Act, kDstate> tile = {head_tile(parity), shape};
    tile.copy(params, request, next.head, request.window.start, request.window.live, spread);
    if constexpr (convert::kScaled<State>) {
      const float* from = scale_of(request, next.head);
      for (int p = lane.index; p < params.head_dim; p += 32) {
        ptx::cp_async4(ptx::to_smem(scales + parity * params.head_dim + p), from + p);
      }
    }
  }

  __device__ __forceinline__ void ask_for_stage(const Work& work, int s, int place) const {
    const unsigned char* from = work.state + s * (kStageSlabs * Slab::kBytes);
#pragma unroll
    for (int i = 0; i < kStageSlabs; ++i) {
      if (i == 0 || (s * kStageSlabs + i) * kRows < params.head_dim) {
        slab(place, i).template copy<32>(from + i * Slab::kBytes, lane.index);
      }
    }
  }

  // Refills the stage that was just read: with a later one of this head, or one of the next head.
  __device__ __forceinline__ void refill(const Work& work, int s, int& place, int parity) {
    __syncwarp();  // all lanes have read it
    if (s + kStages < count) {
      ask_for_stage(work, s + kStages, place);
    } else {
      if (s + kStages == count) advance(parity ^ 1);
      if (more) ask_for_stage(next, s + kStages - count, place);
    }
    ptx::cp_async_commit();
    place = place + 1 == kStages ? 0 : place + 1;
  }

  __device__ __forceinline__ void run() {
    advance(0);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (more) ask_for_stage(next, s, s);
      ptx::cp_async_commit();
    }
    int place = 0;
    for (int parity = 0; more; parity ^= 1) {
      const Work work = next;
      const Request request = Base::request(work.n);
      ptx::mbarrier_wait_parity(Base::barrier(shared.full, work.k), work.k / kSlots & 1);
      if (request.window.flush) {
        fold_head(work, request, place, parity);
      } else {
        read_head(work, request.window, place, parity);
      }
      __syncwarp();
      release(work.k);
      for (int t = spread.row; t < request.window.q; t += spread.rows) {
        const int64_t index = out_of_token(params, request, work.head, t) + 8 * spread.piece;
        store_outputs<Act>(params, index, y + t * (shape.y_pitch() / 4) + 8 * spread.piece);
      }
    }
    ptx::cp_async_wait<0>();
  }

  __device__ __forceinline__ void next_stage() const {
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ ptx::smem_t rows_of_x(const Window& window, int parity) const {
    return transposed_x(head_tile(parity), shape.x_pitch, lane,
                        [&](int j) { return Base::in_order().row(window, j); });
  }

  __device__ __forceinline__ void read_head(const Work& work, const Window& window, int& place,
                                            int parity) {
    const Weights<kTokenTiles> weights(Base::weights(work.k, work.of_item), Base::weight_shape,
                                       window, lane);
    Readers<State, Act, kDstate, kTokenTiles> readers;
    readers.load(Base::group(work.k), window, lane);
    const ptx::smem_t x = rows_of_x(window, parity);
    for (int s = 0; s < count; ++s) {
      next_stage();
      float acc[kStageSlabs][kTokenTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kStageSlabs; ++i) read_out_slab(acc[i], slab(place, i), readers, lane);
      refill(work, s, place, parity);
#pragma unroll
      for (int i = 0; i < kStageSlabs; ++i) {
        const int first_row = (s * kStageSlabs + i) * kRows;
        if (i > 0 && first_row >= params.head_dim) break;
        if constexpr (convert::kScaled<State>) scale_rows(acc[i], first_row, parity);
        finish(acc[i], window, weights, x, first_row, parity);
      }
    }
  }

  __device__ __forceinline__ void scale_rows(float (&acc)[kTokenTiles][4], int first_row,
                                             int parity) const {
    const float* scale = scales + parity * params.head_dim + first_row + lane.g;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      acc[tile][0] *= scale[0], acc[tile][1] *= scale[0];
      acc[tile][2] *= scale[8], acc[tile][3] *= scale[8];
    }
  }

  __device__ __forceinline__ void fold_head(const Work& work, const Request& request, int& place,
                                            int parity) {
    const Window& window = request.window;
    const float* of_head = Base::weights(work.k, work.of_item);
    const Weights<kTokenTiles> weights(of_head, Base::weight_shape, window, lane);
    const FoldWeights fold_weights(of_head + Base::weight_shape.fold(), lane);
    const ptx::smem_t x = rows_of_x(window, parity);
    const ptx::smem_t old_x = transposed_x(head_tile(parity), shape.x_pitch, lane, [&](int j) {
      return Base::in_order().old_row(window, j);
    });
    for (int s = 0; s < count; ++s) {
      next_stage();
#pragma unroll 1
      for (int i = 0; i < kStageSlabs; ++i) {
        const int first_row = (s * kStageSlabs + i) * kRows;
        if (i > 0 && first_row >= params.head_dim) break;
        uint32_t rows[4];
        ptx::ldmatrix_x4_trans(rows, old_x + 2 * first_row);
        const Fold<State> fold = prepare_fold<State, Act>(fold_weights, rows);
        State* to = state_of(request, work.head) + (first_row + lane.g) * kDstate +
                    lane.t * static_cast<int>(16 / sizeof(State));
        Target<State, kDstate> target{params, to, nullptr, waiting};
        float scale[2] = {1.0f, 1.0f};
        if constexpr (convert::kScaled<State>) {
          target.scale = scale_of(request, work.head) + first_row + lane.g;
          const float* decode = scales + parity * params.head_dim + first_row + lane.g;
          scale[0] = decode[0], scale[1] = decode[8];
        }
        float acc[kTokenTiles][4] = {};
        fold_slab<State, Act, kDstate>(acc, target, slab(place, i), Base::group(work.k), fold,
                                       scale, window, lane);
        finish(acc, window, weights, x, first_row, parity);
      }
      refill(work, s, place, parity);
    }
  }

  // From the sums over the checkpoint to the outputs of a slab: decayed, the rows added, gated.
  __device__ __forceinline__ void finish(float (&acc)[kTokenTiles][4], const Window& window,
                                         const Weights<kTokenTiles>& weights, ptx::smem_t x,
                                         int first_row, int parity) const {
    uint32_t rows[4];
    ptx::ldmatrix_x4_trans(rows, x + 2 * first_row);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[tile][i] *= weights.decay[tile][i & 1];
    }
    add_rows<Act>(acc, weights, rows);
    if (shape.gated) {
      const unsigned char* z =
          head_tile(parity) + (shape.old_rows + shape.tokens) * shape.x_pitch + 2 * first_row;
      gate<Act>(acc, z, shape.x_pitch, window, lane);
    }
    put_outputs(acc, y + first_row, shape.y_pitch() / 4, window, lane);
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

constexpr int kMostThreads = 384;

template <class State, class Act, int kDstate, int kTokenTiles>
__global__ void __launch_bounds__(kMostThreads, 1)
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_smem());
  const int warp = threadIdx.x >> 5;
  for (int first = 0; first < params.batch; first += kMostListed) {
    if (threadIdx.x == 0) {
      shared.list.taken = shared.list.appended = 0;
      for (int i = 0; i < kSlots; ++i) {
        ptx::mbarrier_init(ptx::to_smem(shared.full + i), 1);
        ptx::mbarrier_init(ptx::to_smem(shared.empty + i), params.heads_of_item);
      }
    }
    const int2 listed = list_requests(shared.list, params, first);
    const Block<Act, kDstate> block(params, shared, listed);
    if (warp < params.producers) {
      Producer<State, Act, kDstate, kTokenTiles>(block).run(warp);
    } else {
      unsigned char* memory = block.slots + kSlots * params.bytes_of_slot +
                              (warp - params.producers) * params.bytes_of_warp;
      Consumer<State, Act, kDstate, kTokenTiles>(block, memory).run();
    }
    append<Act, kDstate>(shared.list, params, listed);
    __syncthreads();
  }
  if (params.zero_padding) zero_padding(params);
}
