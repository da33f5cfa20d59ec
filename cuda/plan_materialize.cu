// Which rows of a batch leave a snapshot, and after how many rows of their rings.
//
//   boundary = (committed + accepted) / block_size * block_size, where it lies behind `committed`
//   m = live rows - (committed + accepted - boundary)
//
// Equals reference.plan_materialize. One block walks the batch and writes the rows that take part
// as a compact list, in order, then -1. Runs behind advance_ring, reads every value on the device.
// The slots written start anew with empty rings; one folded in place loses the rows folded.
#include "replay.cuh"

struct Row {
  int64_t src, dst;
  int start, live, prefix;  // prefix: m, negative where there is nothing to do
};

__device__ __forceinline__ int64_t load_slot(const PlanMaterializeParams& params, const void* slots,
                                             int64_t index, int type) {
  const int64_t slot = convert::load_index(slots, index, type);
  return slot == params.pad_slot_id || slot < 0 || slot >= params.num_slots ? -1 : slot;
}

// What a row asks for: a prefix, or the tokens behind its boundary, which end the live rows.
struct Wish {
  int64_t prefix, behind;
  bool granted;
};

__device__ __forceinline__ Wish read_wish(const PlanMaterializeParams& params, int row) {
  if (params.prefix_len != nullptr) {
    const int64_t prefix = convert::load_index(params.prefix_len, row * params.prefix_len_stride,
                                               params.prefix_len_type);
    return {prefix, 0, prefix >= 0};
  }
  const int64_t before = convert::load_index(
      params.committed_lens, row * params.committed_lens_stride, params.committed_lens_type);
  const int64_t accepted = convert::load_index(
      params.num_accepted, row * params.num_accepted_stride, params.num_accepted_type);
  const int64_t after = before + max(accepted, int64_t{0});
  if (params.boundaries != nullptr) {
    const int64_t boundary = convert::load_index(params.boundaries, row * params.boundaries_stride,
                                                 params.boundaries_type);
    return {-1, after - boundary, boundary >= 0 && boundary <= after};
  }
  const int64_t boundary = after / params.block_size * params.block_size;
  return {-1, after - boundary, boundary > before};
}

__device__ __forceinline__ Row plan_row(const PlanMaterializeParams& params, int row) {
  Row planned{-1, -1, 0, 0, -1};
  if (row >= params.batch) return planned;
  const Wish wish = read_wish(params, row);  // on its way while the slots are
  planned.src =
      load_slot(params, params.src_slots, row * params.src_slots_stride, params.src_slots_type);
  planned.dst =
      load_slot(params, params.dst_slots, row * params.dst_slots_stride, params.dst_slots_type);
  if (planned.src < 0 || planned.dst < 0) return planned;
  planned.start = params.ring_start[planned.src * params.ring_start_stride];
  planned.live =
      params.prev_num_accepted_tokens[planned.src * params.prev_num_accepted_tokens_stride];
  if (!wish.granted) return planned;
  int64_t prefix = wish.prefix >= 0 ? wish.prefix : planned.live - wish.behind;
  // Rows behind the live ones are dead. A plan that is only checked tells what was asked for.
  if (params.move_cursors) prefix = min(prefix, int64_t{max(planned.live, 0)});
  planned.prefix = static_cast<int>(min(max(prefix, int64_t{-1}), int64_t{1} << 30));
  return planned;
}

__device__ __forceinline__ void move_cursors(const PlanMaterializeParams& params, const Row& row) {
  const bool in_place = row.src == row.dst;
  const int folded = min(row.prefix, min(max(row.live, 0), params.max_window));
  params.ring_start[row.dst * params.ring_start_stride] =
      in_place ? replay::ring_row(row.start, folded, params.ring_buffer_len) : 0;
  params.prev_num_accepted_tokens[row.dst * params.prev_num_accepted_tokens_stride] =
      in_place ? row.live - folded : 0;
}

__global__ void __launch_bounds__(1024)
    plan_materialize(const __grid_constant__ PlanMaterializeParams params) {
  __shared__ int counts[32];  // of each warp's rows
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warps = static_cast<int>(blockDim.x) >> 5;
  int planned = 0;
  for (int first = 0; first < params.batch; first += static_cast<int>(blockDim.x)) {
    const int index = first + static_cast<int>(threadIdx.x);
    const Row row = plan_row(params, index);
    const bool active = row.prefix >= 0;
    const unsigned voted = __ballot_sync(replay::kAllLanes, active);
    if (lane == 0) counts[warp] = __popc(voted);
    __syncthreads();
    int place = planned + __popc(voted & ((1u << lane) - 1));
    for (int w = 0; w < warps; ++w) {
      place += w < warp ? counts[w] : 0;
      planned += counts[w];
    }
    if (index < params.batch) {
      params.planned_ring_start[index * params.planned_ring_start_stride] = row.start;
      params.replay_prefix_len[index * params.replay_prefix_len_stride] = row.prefix;
    }
    if (active) {
      params.active_request_indices[place * params.active_request_indices_stride] = index;
      if (params.move_cursors) move_cursors(params, row);
    }
    __syncthreads();
  }
  for (int i = planned + static_cast<int>(threadIdx.x); i < params.batch;
       i += static_cast<int>(blockDim.x)) {
    params.active_request_indices[i * params.active_request_indices_stride] = -1;
  }
}
