// One decode step of a Mamba-2 layer from checkpoint, ring and new tokens; the state is written
// only on flush. With c the sums of A dt over the rows since the checkpoint S and j the rows before
// t:
//
//   y_t = exp(c_t) S C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t,   out = y silu(z)
//   flush:  S <- exp(c_old) S + sum_{j old} exp(c_old - c_j) dt_j x_j B_j^T, then y from the new S
//
// Equals reference.replay_step. Grid: a few blocks per SM, which stay. A warp works alone: it
// takes an item (a sequence and some heads of one group), and streams the states of its heads,
// some slabs of 16 rows p at a time, through shared memory while it computes on those before.
// Sequences that flush come first: writes are cheaper together, and short items end the launch.
// Writes `out`, the new ring rows, and the checkpoint on flush. Never reads a dead ring row, never
// writes a live one, touches nothing of a padded row but `out`.
#include "flush.cuh"

using namespace replay;

// ---- the list of sequences ----------------------------------------------------------------------

// A sequence as it waits in shared memory.
struct alignas(16) Entry {
  int slot, row, token, cursors;  // cursors: start | live << 16 | q << 22 | flush << 28
};

__device__ __forceinline__ Entry pack_request(const Request& request) {
  const Window& w = request.window;
  return {request.slot, request.row, request.token,
          w.start | w.live << 16 | w.q << 22 | static_cast<int>(w.flush) << 28};
}

__device__ __forceinline__ Request unpack_request(const Entry& entry) {
  const int c = entry.cursors;
  return {entry.slot, entry.row, entry.token,
          {c & 0xffff, c >> 16 & 63, c >> 22 & 63, (c >> 28 & 1) != 0}};
}

constexpr int kMostListed = 512;  // sequences at a time
constexpr int kMostWarps = 16;

struct alignas(128) Shared {
  Entry list[kMostListed];  // those that flush from the front on, the others from the back
  int counts[kMostWarps][2];
  int taken, appended;  // items of this block, and tokens

  __device__ __forceinline__ const Entry& entry(int n, int2 listed) const {
    return list[n < listed.x ? n : kMostListed - listed.x - listed.y + n];
  }
};

// One after another, for the warp.
__device__ __forceinline__ int take(int& counter) {
  int taken = 0;
  if ((threadIdx.x & 31) == 0) taken = atomicAdd(&counter, 1);
  return __shfl_sync(kAllLanes, taken, 0);
}

// Lists the sequences from `first` on that have something to do. Returns how many flush and how
// many do not.
__device__ __forceinline__ int2 list_requests(Shared& shared, const CheckpointingSsuParams& params,
                                              int first) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int end = min(first + kMostListed, params.batch);
  int2 listed = make_int2(0, 0);
  for (int base = first; base < end; base += static_cast<int>(blockDim.x)) {
    const int row = base + static_cast<int>(threadIdx.x);
    Request request = {-1, 0, 0, {0, 0, 0, false}};
    if (row < end) {
      request = find_request(params, row);
      if (request.slot >= 0) read_cursors(params, request);
    }
    const bool flush = request.slot >= 0 && request.window.flush;
    const bool stay = request.slot >= 0 && !flush && request.window.q > 0;
    const unsigned flushing = __ballot_sync(kAllLanes, flush);
    const unsigned staying = __ballot_sync(kAllLanes, stay);
    if (lane == 0) {
      shared.counts[warp][0] = __popc(flushing);
      shared.counts[warp][1] = __popc(staying);
    }
    __syncthreads();
    int2 before = listed;
    for (int w = 0; w < warps; ++w) {
      listed.x += shared.counts[w][0];
      listed.y += shared.counts[w][1];
      if (w < warp) before.x += shared.counts[w][0], before.y += shared.counts[w][1];
    }
    const unsigned lower = (1u << lane) - 1u;
    if (flush) shared.list[before.x + __popc(flushing & lower)] = pack_request(request);
    if (stay) {
      shared.list[kMostListed - 1 - before.y - __popc(staying & lower)] = pack_request(request);
    }
    __syncthreads();
  }
  return listed;
}

// ---- appends and padding ------------------------------------------------------------------------

// Rows of 16-byte pieces from one array to another: loads go out together, then stores.
template <class Act>
__device__ __forceinline__ void copy_pieces(Act* to, int64_t to_stride, const Act* from,
                                            int64_t from_stride, int rows, const Spread& spread) {
  constexpr int kAtOnce = 4;
  to += spread.row * to_stride + 8 * spread.piece;
  from += spread.row * from_stride + 8 * spread.piece;
  to_stride *= spread.rows, from_stride *= spread.rows;
  for (int row = spread.row; row < rows; row += kAtOnce * spread.rows) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row + i * spread.rows < rows) v[i] = *reinterpret_cast<const uint4*>(from);
      from += from_stride;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row + i * spread.rows < rows) *reinterpret_cast<uint4*>(to) = v[i];
      to += to_stride;
    }
  }
}

// Copies one token to row `row` of the rings; a warp of its own does it.
template <class Act, int kDstate>
__device__ __forceinline__ void append_token(const CheckpointingSsuParams& params,
                                             const Request& request, int t, int row,
                                             const Spread& spread_x, const Spread& spread_B) {
  const int lane = threadIdx.x & 31, ngroups = params.nheads / params.heads_per_group;
  copy_pieces(x_ring<Act>(params, request.slot, 0) + row_offset(row, params.x_cache_row_stride),
              params.x_cache_head_stride, x_of_token<Act>(params, request, 0, t),
              params.x_head_stride, params.nheads, spread_x);
  copy_pieces(B_ring<Act>(params, request.slot, 0) + row_offset(row, params.B_cache_row_stride),
              params.B_cache_group_stride, B_of_token<Act>(params, request, 0, t),
              params.B_group_stride, ngroups, spread_B);
  for (int head = lane; head < params.nheads; head += 32) {
    const float dt =
        convert::load_float(params.dt, dt_of_token(params, request, head, t), params.dt_type);
    dt_ring(params, request.slot, head)[row_offset(row, params.dt_cache_row_stride)] =
        processed_dt(params, dt, head);
  }
}

// Writes the new rows of all listed sequences behind their live ones. A warp takes whole tokens
// when it has no item left, so that the last warps have none to write.
template <class Act, int kDstate>
__device__ __forceinline__ void append(Shared& shared, const CheckpointingSsuParams& params,
                                       int2 listed) {
  const int lane = threadIdx.x & 31, end = (listed.x + listed.y) * params.npredicted;
  const Spread spread_x(lane, 32, params.head_dim / 8), spread_B(lane, 32, kDstate / 8);
  while (true) {
    const int i = take(shared.appended) * gridDim.x + blockIdx.x;
    if (i >= end) return;
    const int n = i / params.npredicted, t = i - n * params.npredicted;
    const Request request = unpack_request(shared.entry(n, listed));
    if (t >= request.window.q) continue;
    const Window& window = request.window;
    const int first = ring_row(window.start, window.live, params.ring_buffer_len);
    append_token<Act, kDstate>(params, request, t, ring_row(first, t, params.ring_buffer_len),
                               spread_x, spread_B);
  }
}

// Outputs of padded rows become zeros: a warp takes whole rows.
__device__ __forceinline__ void zero_padding(const CheckpointingSsuParams& params) {
  const int warps = blockDim.x >> 5, warp = blockIdx.x * warps + (threadIdx.x >> 5);
  for (int row = warp; row < params.batch; row += gridDim.x * warps) {
    const Request request = find_request(params, row);
    if (request.slot >= 0) continue;
    const int per_token = params.nheads * params.head_dim;
    for (int i = threadIdx.x & 31; i < request.window.q * per_token; i += 32) {
      const int t = i / per_token, head = (i - t * per_token) / params.head_dim;
      const int p = i - t * per_token - head * params.head_dim;
      const int64_t index = out_of_token(params, request, head, t) + p;
      convert::store_float(params.out, index, params.out_type, 0.0f);
    }
  }
}

// ---- the pipeline of a warp ---------------------------------------------------------------------

// Slabs that are copied together. Some stages are on their way while one is in use.
template <class State, int kDstate>
constexpr int kSlabsOfStage = kDstate * sizeof(State) <= 128 ? 2 : 1;
template <class State>
constexpr int kStagesOf = 2;

// One head of an item, of sequence n of the list; `state` is the lane's first byte of its state.
struct Work {
  int n, head, heads_left;  // heads_left: of the item, behind this one
  const unsigned char* state;
};

template <class State, class Act, int kDstate, int kTokenTiles>
struct Pipeline {
  using Slab = SlabTile<State, kDstate>;
  static constexpr int kStageSlabs = kSlabsOfStage<State, kDstate>;
  static constexpr int kStages = kStagesOf<State>;
  __device__ static __forceinline__ RowMap in_order(int rows) { return {0, rows}; }

  const CheckpointingSsuParams& params;
  Shared& shared;
  const int2 listed;
  const Lane lane;
  const TileShape<Act, kDstate> shape;
  const Spread spread_x, spread_B;
  unsigned char *stages, *rows_of_group, *heads;
  float *y, *scales;
  int count;  // of stages of a head
  Work next;
  RowDt dt;         // of `next`
  bool more;        // whether there is a next head
  bool group_late;  // its B and C could not be asked for yet

  __device__ __forceinline__ Pipeline(const CheckpointingSsuParams& p, Shared& s,
                                      int2 of_list, unsigned char* memory)
      : params(p),
        shared(s),
        listed(of_list),
        shape(p, p.max_window),
        spread_x(threadIdx.x & 31, 32, p.head_dim / 8),
        spread_B(threadIdx.x & 31, 32, kDstate / 8),
        stages(memory),
        rows_of_group(memory + kStages * kStageSlabs * Slab::kBytes),
        count((p.head_dim / kRows + kStageSlabs - 1) / kStageSlabs),
        dt(),
        more(false),
        group_late(false) {
    heads = rows_of_group + shape.group_bytes();
    y = reinterpret_cast<float*>(heads + 2 * shape.head_bytes());
    scales = y + shape.tokens * (shape.y_pitch() / 4);
  }

  __device__ __forceinline__ GroupTile<Act, kDstate> group() const {
    return {rows_of_group, shape};
  }
  __device__ __forceinline__ unsigned char* head_tile(int parity) const {
    return heads + parity * shape.head_bytes();
  }
  __device__ __forceinline__ Slab slab(int place, int i) const {
    return {stages + (place * kStageSlabs + i) * Slab::kBytes};
  }

  __device__ __forceinline__ Request request_of(const Work& work) const {
    return unpack_request(shared.entry(work.n, listed));
  }
  __device__ __forceinline__ State* state_of(const Request& request, int head) const {
    return static_cast<State*>(params.state) + request.slot * params.state_slot_stride +
           head * params.state_head_stride;
  }
  __device__ __forceinline__ float* scale_of(const Request& request, int head) const {
    return params.state_scale + request.slot * params.state_scale_slot_stride +
           head * params.state_scale_head_stride;
  }

  // Takes the block's next item, if there is one.
  __device__ __forceinline__ void take_item() {
    const unsigned item = take(shared.taken) * gridDim.x + blockIdx.x;
    const unsigned of_request = static_cast<unsigned>(params.nheads) / params.heads_of_item;
    next.n = item / of_request;
    more = next.n < listed.x + listed.y;
    if (!more) return;
    next.head = (item - next.n * of_request) * params.heads_of_item;
    next.heads_left = params.heads_of_item - 1;
    next.state =
        reinterpret_cast<const unsigned char*>(state_of(request_of(next), next.head)) +
        16 * lane.index;
  }

  __device__ __forceinline__ void ask_for_group() const {
    const Request request = request_of(next);
    const int of_head = static_cast<unsigned>(next.head) / params.heads_per_group;
    group().copy(params, request, of_head, request.window.start, request.window.live, spread_B);
  }

  __device__ __forceinline__ void ask_for_head(int parity) {
    const Request request = request_of(next);
    const HeadTile<Act, kDstate> tile = {head_tile(parity), shape};
    tile.copy(params, request, next.head, request.window.start, request.window.live, spread_x);
    if constexpr (convert::kScaled<State>) {
      const float* from = scale_of(request, next.head);
      for (int p = lane.index; p < params.head_dim; p += 32) {
        ptx::cp_async4(ptx::to_smem(scales + parity * params.head_dim + p), from + p);
      }
    }
    dt.load(params, request, next.head, lane);
  }

  // Moves `next` behind `work`, and asks for its rows.
  template <bool kFlush>
  __device__ __forceinline__ void advance(const Work& work, int parity) {
    next = work;
    if (work.heads_left > 0) {
      ++next.head, --next.heads_left;
      next.state += params.state_head_stride * static_cast<int>(sizeof(State));
    } else {
      take_item();
      if (!more) return;
      group_late = kFlush;  // a fold still needs its own
      if (!kFlush) ask_for_group();
    }
    ask_for_head(parity);
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

  __device__ __forceinline__ void start() {
    take_item();
    if (more) {
      ask_for_group();
      ask_for_head(0);
    }
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (more) ask_for_stage(next, s, s);
      ptx::cp_async_commit();
    }
  }

  // Refills the stage that was just read: with a later one of this head, or one of the next head.
  template <bool kFlush>
  __device__ __forceinline__ void refill(const Work& work, int s, int& place, int parity) {
    __syncwarp();  // all lanes have read it
    if (s + kStages < count) {
      ask_for_stage(work, s + kStages, place);
    } else {
      if (s + kStages == count) advance<kFlush>(work, parity ^ 1);
      if (more) ask_for_stage(next, s + kStages - count, place);
    }
    ptx::cp_async_commit();
    place = place + 1 == kStages ? 0 : place + 1;
  }

  // Works through the items, those that flush first.
  __device__ __forceinline__ void run() {
    int parity = 0, place = 0;
    while (more && next.n < listed.x) fold_item(parity, place);
    while (more) read_item(parity, place);
    ptx::cp_async_wait<0>();
  }

  // The heads of an item that flushes.
  __device__ __forceinline__ void fold_item(int& parity, int& place) {
    const Request request = request_of(next);
    const Window& window = request.window;
    float products[2][4];
    wait_for_item();
    weigh<Act, kDstate, kTokenTiles>(products, group(), in_order(), window, lane);
    prepare_B<State>(group(), in_order(), window, lane);
    bool last;
    do {
      const Work work = next;
      last = work.heads_left == 0;
      const Decays decays = find_decays(window, work.head);
      const Weights<kTokenTiles> weights = find_weights(products, decays, window, work.head);
      const FoldWeights fold_weights(decays, lane);
      const ptx::smem_t rows_x = transposed_x(
          head_tile(parity), shape.x_pitch, lane, [&](int j) { return in_order().row(window, j); });
      const ptx::smem_t old_x =
          transposed_x(head_tile(parity), shape.x_pitch, lane,
                       [&](int j) { return in_order().old_row(window, j); });
      for (int s = 0; s < count; ++s) {
        next_stage(s);
        fold_stage(request, work.head, weights, fold_weights, rows_x, old_x, s, place, parity);
        refill<true>(work, s, place, parity);
      }
      store_head(request, work, parity);
    } while (!last);
    if (more) {
      ask_for_group();
      ptx::cp_async_commit();
    }
  }

  // The heads of an item that does not.
  __device__ __forceinline__ void read_item(int& parity, int& place) {
    const Request request = request_of(next);
    const Window& window = request.window;
    float products[2][4];
    wait_for_item();
    weigh<Act, kDstate, kTokenTiles>(products, group(), in_order(), window, lane);
    Readers<State, Act, kDstate, kTokenTiles> readers;
    readers.load(group(), window, lane);
    bool last;
    do {
      const Work work = next;
      last = work.heads_left == 0;
      Weights<kTokenTiles> weights =
          find_weights(products, find_decays(window, work.head), window, work.head);
      readers.unscale(weights);
      const ptx::smem_t rows_x = transposed_x(
          head_tile(parity), shape.x_pitch, lane, [&](int j) { return in_order().row(window, j); });
      for (int s = 0; s < count; ++s) {
        next_stage(s);
        float acc[kStageSlabs][kTokenTiles][4] = {};
#pragma unroll
        for (int i = 0; i < kStageSlabs; ++i) read_out_slab(acc[i], slab(place, i), readers, lane);
        refill<false>(work, s, place, parity);
#pragma unroll
        for (int i = 0; i < kStageSlabs; ++i) {
          const int first_row = (s * kStageSlabs + i) * kRows;
          if (i > 0 && first_row >= params.head_dim) break;
          if constexpr (convert::kScaled<State>) scale_rows(acc[i], first_row, parity);
          finish(acc[i], window, weights, rows_x, first_row, parity);
        }
      }
      store_head(request, work, parity);
    } while (!last);
  }

  __device__ __forceinline__ RowMap in_order() const { return {0, shape.old_rows}; }

  // Waits for the rows and the first stage of the next item.
  __device__ __forceinline__ void wait_for_item() {
    if (group_late) ptx::cp_async_wait<0>();
    group_late = false;
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ Decays find_decays(const Window& window, int head) const {
    const float A = convert::load_float(params.A, head * params.A_stride, params.A_type);
    return Decays(dt.value(params, window, head, lane), A);
  }

  __device__ __forceinline__ Weights<kTokenTiles> find_weights(const float (&products)[2][4],
                                                               const Decays& decays,
                                                               const Window& window,
                                                               int head) const {
    float cb[2][4], D = 0.0f;
    if (params.D != nullptr) {
      D = convert::load_float(params.D, head * params.D_stride, params.D_type);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) cb[i / 4][i % 4] = products[i / 4][i % 4];
    scale_weights<kTokenTiles>(cb, decays, window, lane, D);
    return Weights<kTokenTiles>(cb, decays, window, lane);
  }

  // Waits for a stage, and with the first one of a head for its rows.
  __device__ __forceinline__ void next_stage(int s) const {
    if (s == 0) return;
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
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

  __device__ __forceinline__ void fold_stage(const Request& request, int head,
                                             const Weights<kTokenTiles>& weights,
                                             const FoldWeights& fold_weights, ptx::smem_t rows_x,
                                             ptx::smem_t old_x, int s, int place,
                                             int parity) const {
#pragma unroll 1
    for (int i = 0; i < kStageSlabs; ++i) {
      const int first_row = (s * kStageSlabs + i) * kRows;
      if (i > 0 && first_row >= params.head_dim) break;
      uint32_t rows[4];
      ptx::ldmatrix_x4_trans(rows, old_x + 2 * first_row);
      const Fold<State> fold = prepare_fold<State, Act>(fold_weights, rows);
      State* to = state_of(request, head) + (first_row + lane.g) * kDstate +
                  lane.t * static_cast<int>(16 / sizeof(State));
      Target<State, kDstate> target{params, to, nullptr};
      float scale[2] = {1.0f, 1.0f};
      if constexpr (convert::kScaled<State>) {
        target.scale = scale_of(request, head) + first_row + lane.g;
        const float* decode = scales + parity * params.head_dim + first_row + lane.g;
        scale[0] = decode[0], scale[1] = decode[8];
      }
      float acc[kTokenTiles][4] = {};
      fold_slab<State, Act, kDstate>(acc, target, slab(place, i), group(), fold, scale,
                                     request.window, lane);
      finish(acc, request.window, weights, rows_x, first_row, parity);
    }
  }

  // From the sums over the checkpoint to the outputs of a slab: decayed, the rows added, gated.
  __device__ __forceinline__ void finish(float (&acc)[kTokenTiles][4], const Window& window,
                                         const Weights<kTokenTiles>& weights, ptx::smem_t rows_x,
                                         int first_row, int parity) const {
    uint32_t rows[4];
    ptx::ldmatrix_x4_trans(rows, rows_x + 2 * first_row);
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

  // Stores the outputs of a head, and turns to the next one, whose first stage is awaited.
  __device__ __forceinline__ void store_head(const Request& request, const Work& work,
                                             int& parity) const {
    __syncwarp();
    for (int t = spread_x.row; t < request.window.q; t += spread_x.rows) {
      const int64_t index = out_of_token(params, request, work.head, t) + 8 * spread_x.piece;
      store_outputs<Act>(params, index, y + t * (shape.y_pitch() / 4) + 8 * spread_x.piece);
    }
    parity ^= 1;
    if (work.heads_left > 0) {
      ptx::cp_async_wait<kStages - 1>();
    }
    __syncwarp();
  }
};

// Registers that leave no spills, and warps for them.
template <class State, int kDstate, int kTokenTiles>
constexpr int kWarps = kTokenTiles > 1 || kDstate > 128 || sizeof(State) != 2 ? 8 : 12;

template <class State, class Act, int kDstate, int kTokenTiles>
__global__ void __launch_bounds__(32 * (kWarps<State, kDstate, kTokenTiles>), 1)
    checkpointing_ssu(const __grid_constant__ CheckpointingSsuParams params) {
  Shared& shared = *reinterpret_cast<Shared*>(ptx::dynamic_smem());
  const int warp = threadIdx.x >> 5;
  for (int first = 0; first < params.batch; first += kMostListed) {
    if (threadIdx.x == 0) shared.taken = shared.appended = 0;
    const int2 listed = list_requests(shared, params, first);
    Pipeline<State, Act, kDstate, kTokenTiles> pipeline(
        params, shared, listed,
        ptx::dynamic_smem() + sizeof(Shared) + warp * params.bytes_of_warp);
    pipeline.start();
    pipeline.run();
    append<Act, kDstate>(shared, params, listed);
    __syncthreads();
  }
  if (params.zero_padding) zero_padding(params);
}
