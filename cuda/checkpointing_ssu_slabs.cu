// The step for few heads and several tokens, or on a state that has a copy to read: the phases of
// checkpointing_ssu.cu, so the same bits, in another order. Grid: one block per head (x), batch row
// (y) and part of the head (z); one warp per slab of 16 rows p, and two that prepare the weights
// meanwhile. The ring's rows lie in shared memory by their places in the ring, so that nothing
// waits for the cursors but the weights. Dead rows come along and are never used.
#include "copied.cuh"
#include "prepare.cuh"

using namespace replay;

// What is read is a copy of the checkpoint where their types differ.
template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint>
struct Head {
  using Slab = SlabTile<State, kDstate>;
  static constexpr bool kCopied = !convert::same<State, Checkpoint>;

  const CheckpointingSsuParams& params;
  const Lane lane;
  const int warp, slabs;  // of the block; two warps behind them prepare
  const unsigned head;
  const int first_row;
  const TileShape<Act, kDstate> shape;
  const WeightShape weight_shape;
  unsigned char* const memory;

  __device__ __forceinline__ Head(const CheckpointingSsuParams& p, unsigned char* of_block,
                                  unsigned h, int part)
      : params(p),
        warp(threadIdx.x >> 5),
        slabs(static_cast<int>(blockDim.x >> 5) - 2),
        head(h),
        first_row(part * slabs * kRows),
        shape(p, p.ring_buffer_len),
        weight_shape{p.npredicted},
        memory(of_block) {}

  __device__ __forceinline__ float* floats(int place) const {
    return reinterpret_cast<float*>(memory + place);
  }
  __device__ __forceinline__ unsigned char* outputs() const { return memory + params.at_outputs; }
  __device__ __forceinline__ float* products() const { return floats(params.at_products); }
  __device__ __forceinline__ float* scales_of_C() const { return floats(params.at_scales_of_C); }
  __device__ __forceinline__ float* dt() const {  // of the ring, then of the new tokens
    return floats(params.at_dt);
  }
  __device__ __forceinline__ float* weights() const { return floats(params.at_weights); }
  __device__ __forceinline__ float* scales() const {  // of the warp's slab
    return floats(params.at_scales) + warp * kRows;
  }
  // ring_start, prev_num_accepted_tokens.
  __device__ __forceinline__ int* cursors() const {
    return reinterpret_cast<int*>(memory + params.at_cursors);
  }
  __device__ __forceinline__ HeadTile<Act, kDstate> head_rows() const {
    return {memory + params.at_head, shape};
  }
  __device__ __forceinline__ Slab slab() const { return {memory + warp * Slab::kBytes}; }
  __device__ __forceinline__ GroupTile<Act, kDstate> group() const {
    return {memory + params.at_group, shape};
  }
  __device__ __forceinline__ bool prepares_C() const { return warp == slabs; }
  __device__ __forceinline__ bool prepares_dt() const { return warp == slabs + 1; }
  // Half a warp has a row of x, or a quarter if that is enough; more lanes than pieces are idle.
  __device__ __forceinline__ Spread spread_x() const {
    const int pieces = params.head_dim / 8, log_lanes = pieces > 8 ? 4 : 3;
    Spread spread;
    spread.row = threadIdx.x >> log_lanes, spread.rows = 32 * slabs >> log_lanes;
    spread.piece = threadIdx.x & ((1 << log_lanes) - 1);
    if (spread.piece >= pieces) spread.row = Spread::kIdle;
    return spread;
  }
  __device__ __forceinline__ bool has_slab() const {
    return warp < slabs && first_row + warp * kRows < params.head_dim;
  }
  __device__ __forceinline__ int row_of_warp() const { return first_row + warp * kRows; }
  __device__ __forceinline__ Checkpoint* checkpoint(const Request& request) const {
    const unsigned slot = request.slot;
    return static_cast<Checkpoint*>(params.state) + slot * params.state_slot_stride +
           head * params.state_head_stride + row_of_warp() * kDstate;
  }
  __device__ __forceinline__ State* state(const Request& request) const {
    if constexpr (kCopied) {
      const unsigned slot = request.slot;
      return static_cast<State*>(params.state_copy) + slot * params.state_copy_slot_stride +
             head * params.state_copy_head_stride + row_of_warp() / kRows * Slab::kBytes;
    } else {
      return checkpoint(request);
    }
  }
  __device__ __forceinline__ float* scale(const Request& request) const {
    const unsigned slot = request.slot;
    return params.state_scale + slot * params.state_scale_slot_stride +
           head * params.state_scale_head_stride + row_of_warp();
  }

  // Asks the L2 for what belongs to the slot. That is safe at any time: nothing comes of it but
  // that later reads are faster, so the slot may be one of before.
  __device__ __forceinline__ void prefetch(int row) const {
    unsigned slot = row;
    if (params.slots != nullptr) {
      const int64_t place = row * params.slots_stride * (params.slots_type == kInt64 ? 8 : 4);
      slot = ptx::ld_relaxed_gpu_u32(static_cast<const char*>(params.slots) + place);
    }
    if (slot >= static_cast<unsigned>(params.num_slots)) return;
    const unsigned group = head / params.heads_per_group;
    const int rows = params.ring_buffer_len, slab_rows = slabs * kRows;
    prefetch_rows(ring_start_of(params, slot), 0, 1, 1);
    prefetch_rows(live_rows_of(params, slot), 0, 1, 1);
    if constexpr (!kCopied) {
      const State* state = static_cast<const State*>(params.state) +
                           slot * params.state_slot_stride + head * params.state_head_stride +
                           first_row * kDstate;
      prefetch_rows(state, kDstate, min(slab_rows, params.head_dim - first_row), kDstate);
    }
    prefetch_rows(x_ring<Act>(params, slot, head), params.x_cache_row_stride, rows,
                  params.head_dim);
    prefetch_rows(B_ring<Act>(params, slot, group), params.B_cache_row_stride, rows, kDstate);
    prefetch_rows(dt_ring(params, slot, head), params.dt_cache_row_stride, rows, 1);
  }

  template <class T>
  __device__ __forceinline__ void prefetch_rows(const T* first, int64_t stride, int rows,
                                                int elements) const {
    constexpr int kOfLine = 128 / sizeof(T);
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
      for (int k = 0; k < elements; k += kOfLine) ptx::prefetch_L2(first + i * stride + k);
    }
  }

  // Starts the copies of all rows of a ring, of which none wraps, four at once. `from` is the
  // thread's piece of its first row, `place` where that of a row goes.
  template <class Place>
  __device__ __forceinline__ void copy_ring(const Act* from, int64_t stride, const Spread& spread,
                                            Place place) const {
    constexpr int kAtOnce = 4;
    const int rows = params.ring_buffer_len;
    stride *= spread.rows;
    for (int first = spread.row; first < rows; first += kAtOnce * spread.rows) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * spread.rows;
        ptx::cp_async16_if_less(row, rows, place(row), from);
        from += stride;
      }
    }
  }
  __device__ __forceinline__ void copy_x(unsigned slot, const Spread& spread) const {
    const int64_t stride = params.x_cache_row_stride;
    const ptx::smem_t to = ptx::to_smem(head_rows().x) + 16 * spread.piece;
    copy_ring(x_ring<Act>(params, slot, head) + row_offset(spread.row, stride) + 8 * spread.piece,
              stride, spread, [&](int row) { return to + row * shape.x_pitch; });
  }
  __device__ __forceinline__ void copy_B(unsigned slot, const Spread& spread) const {
    const int64_t stride = params.B_cache_row_stride;
    const Act* ring = B_ring<Act>(params, slot, head / params.heads_per_group);
    const ptx::smem_t to = ptx::to_smem(group().B());
    copy_ring(ring + row_offset(spread.row, stride) + 8 * spread.piece, stride, spread,
              [&](int row) { return to + group().place(row, spread); });
  }

  // Starts the copies of what belongs to the slot: the warps of slabs take state, x and B.
  __device__ __forceinline__ void ask_for_slot(const Request& request) const {
    if (has_slab()) {
      const auto* from = reinterpret_cast<const unsigned char*>(state(request)) + 16 * lane.index;
      slab().template copy<32>(from, Slab::copied_by(lane.index));
      if (convert::kScaled<State> && lane.index < kRows) {
        ptx::cp_async4(ptx::to_smem(scales() + lane.index), scale(request) + lane.index);
      }
    }
    if (warp < slabs) {
      copy_x(request.slot, spread_x());
      copy_B(request.slot, Spread(threadIdx.x, 32 * slabs, kDstate / 8));
    }
    if (!prepares_dt()) return;
    if (lane.index < 2) {
      ptx::cp_async4(ptx::to_smem(cursors() + lane.index),
                     lane.index == 0 ? ring_start_of(params, request.slot)
                                     : live_rows_of(params, request.slot));
    }
    const float* ring = dt_ring(params, request.slot, head);
    for (int j = lane.index; j < params.ring_buffer_len; j += 32) {
      ptx::cp_async4(ptx::to_smem(dt() + j), ring + row_offset(j, params.dt_cache_row_stride));
    }
  }

  // Starts the copies of the new tokens: the warps of slabs take x and z, one of the others C and
  // B.
  __device__ __forceinline__ void ask_for_tokens(const Request& request) const {
    if (warp < slabs) {
      head_rows().copy_tokens(params, request, head, spread_x());
    } else if (prepares_C()) {
      group().copy_tokens(params, request, head / params.heads_per_group,
                          Spread(lane.index, 32, kDstate / 8));
    }
  }

  // Products of C and B, and then C beside the state's codes, and B as operands of a fold.
  __device__ __forceinline__ void prepare_rows(const Window& window, const RowMap& map) const {
    put_products<Act, kDstate, kTokenTiles>(products(), group(), window, lane,
                                            [&](int j) { return map.row(window, j); });
    if (window.flush) {
      put_products<Act, kDstate, kTokenTiles>(products() + kRows * shape.tokens, group(), window,
                                              lane, [&](int j) { return map.old_row(window, j); });
    }
    __syncwarp();
    prepare_C<kScaledC<State, Act>>(scales_of_C(), group(), window.q, lane);
    if (window.flush) prepare_B<Checkpoint>(group(), map, window, lane);
  }

  __device__ __forceinline__ Decays find_decays(const Window& window, const RowMap& map,
                                                const NewDt<kTokenTiles>& new_dt,
                                                float constant) const {
    new_dt.put(dt() + params.ring_buffer_len, params, window.q, 1, constant, lane);
    __syncwarp();
    // Of a flush the upper half of the warp has the new rows, else nothing.
    const int j = lane.index & 15;
    const bool old = window.flush && lane.index < kRows;
    const int rows = old ? window.live : window.flush || lane.index < kRows ? window.rows() : 0;
    const int row = old ? map.old_row(window, j) : map.row(window, j);
    return Decays(j < rows ? dt()[row] : 0.0f, __shfl_sync(kAllLanes, constant, 0),
                  window.flush ? 2 * kRows : kRows);
  }
  __device__ __forceinline__ void prepare_weights(const Window& window, const Decays& decays,
                                                  float constant) const {
    const float D = __shfl_sync(kAllLanes, constant, kHeadsOfItem);
    put_weights(weights(), weight_shape, products(), scales_of_C(), decays, window, D,
                window.flush || lane.index < kRows);
    if (window.flush) put_fold_weights(weights() + weight_shape.fold(), decays);
  }

  __device__ __forceinline__ void fold(const Request& request, const RowMap& map) const {
    const FoldWeights fold_weights(weights() + weight_shape.fold(), lane);
    uint32_t rows[4];
    ptx::ldmatrix_x4_trans(rows, head_rows().old_x(map, request.window, lane) + 2 * row_of_warp());
    const Fold<Checkpoint> fold = prepare_fold<Checkpoint, Act>(fold_weights, rows);
    Checkpoint* to =
        checkpoint(request) + lane.g * kDstate + lane.t * static_cast<int>(16 / sizeof(Checkpoint));
    if constexpr (kCopied) {
      const BothTargets<State, kDstate> target{
          params, to, reinterpret_cast<unsigned char*>(state(request)), scale(request) + lane.g,
          static_cast<unsigned>(request.slot)};
      fold_copied_slab<State, Act, kDstate>(target, group().B(), fold, lane);
    } else {
      Target<State, kDstate> target{params, to, nullptr};
      if constexpr (convert::kScaled<State>) {
        target.scale = scale(request) + lane.g;
        fold_scaled_twice<State, Act, kDstate>(target, slab().pieces(Slab::read_by(lane)),
                                               group().B(), fold, scales() + lane.g, lane);
      } else {
        fold_slab<State, Act, kDstate>(target, slab().pieces(Slab::read_by(lane)), group().B(),
                                       fold, lane);
      }
    }
  }

  __device__ __forceinline__ void read_out(float (&acc)[kTokenTiles][4],
                                           const Window& window) const {
    Readers<State, Act, kDstate, kTokenTiles> readers;
    readers.load(group(), window, lane);
    read_out_slab(acc, slab().pieces(Slab::read_by(lane)), readers, lane);
    if constexpr (convert::kScaled<State>) scale_rows(acc, scales() + lane.g);
  }

  __device__ __forceinline__ void finish(float (&acc)[1][kTokenTiles][4], const Request& request,
                                         const RowMap& map) const {
    const Window& window = request.window;
    const WeightsOfLane<kTokenTiles> of_lane(weight_shape, window, lane);
    const Weights<kTokenTiles> of_head(weights(), of_lane);
    const OutputRows<false> rows(outputs(), params, lane);
    finish_slabs(acc, of_head, weights() + weight_shape.old_rows(), of_lane,
                 head_rows().new_x(map, window, lane), head_rows(), map, row_of_warp(),
                 params.head_dim, rows, window, lane);
    __syncwarp();
    for (int i = lane.index; i < 2 * window.q; i += 32) {
      const int t = i / 2, column = row_of_warp() + i % 2 * 8;
      rows.template store<Act>(params, out_of_token(params, request, head, t) + column,
                               outputs() + t * rows.pitch + column * rows.bytes());
    }
  }

  // Writes the new rows: x of the block's slabs, dt, and B once per group.
  __device__ __forceinline__ void append(const Request& request) const {
    const Window& window = request.window;
    const int group_index = head / params.heads_per_group;
    const bool first = first_row == 0, of_group = first && head % params.heads_per_group == 0;
    const int pieces = min(slabs * kRows, params.head_dim - first_row) / 8;
    const int end = ring_row(window.start, window.live, params.ring_buffer_len);
    for (int t = 0; t < window.q; ++t) {
      const int row = ring_row(end, t, params.ring_buffer_len);
      const unsigned char* new_x =
          head_rows().x + (shape.old_rows + t) * shape.x_pitch + 2 * first_row;
      Act* to = x_ring<Act>(params, request.slot, head) +
                row_offset(row, params.x_cache_row_stride) + first_row;
      if (lane.index < pieces) {
        reinterpret_cast<uint4*>(to)[lane.index] =
            reinterpret_cast<const uint4*>(new_x)[lane.index];
      }
      if (first && lane.index == 31) {
        dt_ring(params, request.slot, head)[row_offset(row, params.dt_cache_row_stride)] =
            dt()[params.ring_buffer_len + t];
      }
      if (of_group) {
        to = B_ring<Act>(params, request.slot, group_index) +
             row_offset(row, params.B_cache_row_stride);
        const Act* new_B = B_of_token<Act>(params, request, group_index, t);
        for (int i = lane.index; i < kDstate / 8; i += 32) {
          reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(new_B)[i];
        }
      }
    }
  }
};

constexpr int kMostSlabs = 6;  // of a block

// Of the largest size on a multiprocessor: with 80 registers a thread there is room for four of six
// warps, heads of 64 rows.
template <int kDstate, bool kCopied>
constexpr int kLeastBlocks = kDstate <= 128 && !kCopied ? 3 : 1;

template <class State, class Act, int kDstate, int kTokenTiles, class Checkpoint = State>
__global__ void __launch_bounds__(32 * (kMostSlabs + 2),
                                  kLeastBlocks<kDstate, !convert::same<State, Checkpoint>>)
    checkpointing_ssu_slabs(const __grid_constant__ CheckpointingSsuParams params) {
  const int row = batch_row_of_block(params.flags);
  const Head<State, Act, kDstate, kTokenTiles, Checkpoint> block(
      params, ptx::dynamic_smem(), head_of_block(params.flags), blockIdx.z);
  if (ptx::kHasDependentLaunch && params.starts_early) block.prefetch(row);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const Lane& lane = block.lane;
  // Everything is asked for before anything is used; what does not need the slot goes first.
  Request request = find_request(params, row);
  block.ask_for_tokens(request);
  NewDt<kTokenTiles> new_dt;
  HeadConstants constants(params, lane);
  if (block.prepares_dt()) {
    new_dt.load(params, request, block.head, 1, lane);
    constants.load(block.head, 1, lane);
  }
  if (request.slot < 0) {
    if (params.zero_padding && block.has_slab()) {
      for (int i = lane.index; i < request.window.q * kRows; i += 32) {
        const int64_t index = out_of_token(params, request, block.head, i / kRows);
        convert::store_float(params.out, index + block.row_of_warp() + i % kRows, params.out_type,
                             0.0f);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    return;
  }
  block.ask_for_slot(request);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  set_window(params, request, block.cursors()[0], block.cursors()[1]);
  const Window& window = request.window;
  const RowMap map = {window.start, params.ring_buffer_len};
  const bool reads = block.has_slab();
  if constexpr (!convert::same<State, Checkpoint>) {
    if (reads && window.flush) {
      prefetch_checkpoint(block.checkpoint(request), 2 * kRows * kDstate, lane);
    }
  }
  float acc[1][kTokenTiles][4] = {};
  Decays decays;
  const float constant = block.prepares_dt() ? constants.value() : 0.0f;
  if (block.prepares_dt()) decays = block.find_decays(window, map, new_dt, constant);
  if (block.prepares_C()) block.prepare_rows(window, map);
  if (reads && !kScaledC<State, Act>) block.read_out(acc[0], window);
  __syncthreads();  // the products are there, and C
  if (block.prepares_dt()) block.prepare_weights(window, decays, constant);
  if (block.prepares_C()) block.append(request);
  if (reads && kScaledC<State, Act>) block.read_out(acc[0], window);
  __syncthreads();  // the weights are there
  if (reads && (window.flush || window.q > 0)) {
    block.finish(acc, request, map);
    if (window.flush) block.fold(request, map);
  }
}
