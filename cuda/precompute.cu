// The weights of the rows of a step, written to the caller's scratch, from which
// checkpointing_ssu.cu takes them: the first of two kernels that do a step. A warp of the second
// one makes them for itself otherwise, by the same functions, so the bits are the same.
//
// Equals the weights of reference.replay_step. Grid: one block per batch row (x) and up to 8 heads
// of a group (y), a warp each. Reads the cursors, the live rows of B and dt, and dt, B and C of the
// tokens; writes the scratch of its heads, and the new rows of dt and B.
#include "prepare.cuh"

using namespace replay;

template <bool kScaled, class Act, int kDstate, int kTokenTiles>
struct Precompute {
  const CheckpointingSsuParams& params;
  const Request& request;
  const Lane lane;
  const TileShape<Act, kDstate> shape;
  const WeightShape weight_shape;
  int group, head, heads;
  unsigned char* const memory;

  __device__ __forceinline__ Precompute(const CheckpointingSsuParams& p, const Request& r,
                                        unsigned char* of_block)
      : params(p),
        request(r),
        shape(p, p.max_window),
        weight_shape{p.npredicted},
        memory(of_block) {
    const int blocks_of_group = (p.heads_per_group + kHeadsOfItem - 1) / kHeadsOfItem;
    group = blockIdx.y / blocks_of_group;
    const int first = (blockIdx.y - group * blocks_of_group) * kHeadsOfItem;
    head = group * p.heads_per_group + first;
    heads = min(kHeadsOfItem, p.heads_per_group - first);
  }

  // The parts of shared memory, as replayssm_cupy/schedule.py counts them.
  __device__ __forceinline__ GroupTile<Act, kDstate> rows() const { return {memory, shape}; }
  __device__ __forceinline__ float* dt() const {
    return reinterpret_cast<float*>(memory + (2 * shape.tokens + shape.old_rows) *
                                                 GroupTile<Act, kDstate>::kPitch);
  }
  __device__ __forceinline__ float* products() const { return dt() + 2 * kRows * kHeadsOfItem; }
  __device__ __forceinline__ float* scales_of_C() const {
    return products() + 2 * kRows * shape.tokens;
  }
  __device__ __forceinline__ float* weights() const {
    return scales_of_C() + ((shape.tokens + 3) & ~3);
  }

  __device__ __forceinline__ void ask_for_tokens() const {
    rows().copy_tokens(params, request, group, Spread(lane.index, 32, kDstate / 8));
  }

  __device__ __forceinline__ void ask_for_ring() const {
    const Window& window = request.window;
    rows().copy_ring(params, request, group, window.start, window.live,
                     Spread(lane.index, 32, kDstate / 8));
    const int row = ring_row(window.start, lane.index & 15, params.ring_buffer_len);
    for (int i = lane.index >> 4; i < heads && (lane.index & 15) < window.live; i += 2) {
      const float* ring = dt_ring(params, request.slot, head + i);
      ptx::cp_async4(ptx::to_smem(dt() + 2 * kRows * i + (lane.index & 15)),
                     ring + row_offset(row, params.dt_cache_row_stride));
    }
  }

  __device__ __forceinline__ void make_weights(const NewDt<kTokenTiles>& new_dt,
                                               float constant) const {
    const Window& window = request.window;
    const RowMap map = {0, shape.old_rows};
    new_dt.put(dt() + first_token(window), params, window.q, heads, constant, lane);
    put_products<Act, kDstate, kTokenTiles>(products(), rows(), window, lane,
                                            [&](int j) { return map.row(window, j); });
    if (window.flush) {
      put_products<Act, kDstate, kTokenTiles>(products() + kRows * shape.tokens, rows(), window,
                                              lane, [&](int j) { return map.old_row(window, j); });
    }
    __syncwarp();
    prepare_C<kScaled>(scales_of_C(), rows(), window.q, lane);
    __syncwarp();
    put_weights_of_heads(weights(), weight_shape, dt(), heads, products(), scales_of_C(), constant,
                         window, lane);
  }

  // The kernel behind does not take what the new rows of dt and B come from.
  __device__ __forceinline__ void append() const {
    append_dt(params, request, head, heads, dt(), lane);
    if (head != group * params.heads_per_group) return;
    append_B(params, request, group, rows(), Spread(lane.index, 32, kDstate / 8));
  }

  __device__ __forceinline__ void store_weights() const {
    for (int i = 0; i < heads; ++i) {
      const float* of_head = weights() + i * weight_shape.words();
      for_parts_in_scratch(params, weight_shape, request, head + i,
                           [&](int place, float* scratch, int pieces) {
                             for (int k = lane.index; k < pieces; k += 32) {
                               reinterpret_cast<uint4*>(scratch)[k] =
                                   reinterpret_cast<const uint4*>(of_head + place)[k];
                             }
                           });
    }
  }
};

template <bool kScaled, class Act, int kDstate, int kTokenTiles>
__global__ void __launch_bounds__(32)
    precompute(const __grid_constant__ CheckpointingSsuParams params) {
  // In this order: the kernel behind, which starts early, may take whatever was written before this
  // one for granted. Only for the scratch it has to wait.
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  Request request = find_request(params, blockIdx.x);
  if (request.slot < 0) return;
  const Precompute<kScaled, Act, kDstate, kTokenTiles> block(params, request, ptx::dynamic_smem());
  // What does not need the cursors is asked for first.
  block.ask_for_tokens();
  NewDt<kTokenTiles> new_dt;
  new_dt.load(params, request, block.head, block.heads, block.lane);
  HeadConstants constants(params, block.lane);
  constants.load(block.head, block.heads, block.lane);
  set_window(params, request, *ring_start_of(params, request.slot),
             *live_rows_of(params, request.slot));
  block.ask_for_ring();
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  block.make_weights(new_dt, constants.value());
  __syncwarp();
  block.store_weights();
  block.append();
}
