// Checked mode: looks at what only the device knows before a step runs, and reports the first
// fault.
//
// One block per batch row. The checks write nothing but `report`: violation, batch row, value,
// legal bound. Folds are stamped when a step has passed its check: once a slot's live rows are in
// its state, a step with the same cursors would count them twice.
#include "replay.cuh"

template <class Params, class Kind>
__device__ __forceinline__ void report(const Params& params, Kind violation, int row, int64_t value,
                                       int64_t bound) {
  unsigned long long* found = reinterpret_cast<unsigned long long*>(params.report);
  if (atomicCAS(found, 0ull, static_cast<unsigned long long>(violation)) != 0ull) return;
  params.report[1] = row;
  params.report[2] = value;
  params.report[3] = bound;
}

__device__ __forceinline__ bool is_finite(float v) {
  return (__float_as_uint(v) & 0x7f800000u) != 0x7f800000u;
}

// The live rows of a slot's rings, spread over the block.
__device__ __forceinline__ void check_finite(const CheckStepParams& params, int row, int64_t slot,
                                             int start, int live) {
  for (int j = 0; j < live; ++j) {
    const int r = replay::ring_row(start, j, params.ring_buffer_len);
    bool finite_dt = true, finite_x = true, finite_B = true;
    for (int h = threadIdx.x; h < params.nheads; h += blockDim.x) {
      finite_dt &= is_finite(
          params.dt_cache[slot * params.dt_cache_slot_stride + h * params.dt_cache_head_stride +
                          r * params.dt_cache_row_stride]);
    }
    for (int i = threadIdx.x; i < params.nheads * params.head_dim; i += blockDim.x) {
      finite_x &= is_finite(convert::load_float(
          params.x_cache,
          slot * params.x_cache_slot_stride + i / params.head_dim * params.x_cache_head_stride +
              r * params.x_cache_row_stride + i % params.head_dim,
          params.ring_type));
    }
    for (int i = threadIdx.x; i < params.ngroups * params.dstate; i += blockDim.x) {
      finite_B &= is_finite(convert::load_float(
          params.B_cache,
          slot * params.B_cache_slot_stride + i / params.dstate * params.B_cache_group_stride +
              r * params.B_cache_row_stride + i % params.dstate,
          params.ring_type));
    }
    if (!finite_x) report(params, kXNotFinite, row, j, live);
    if (!finite_B) report(params, kBNotFinite, row, j, live);
    if (!finite_dt) report(params, kDtNotFinite, row, j, live);
  }
}

// What a step does with the cursors of a slot.
struct Step {
  int64_t stamp;      // of the cursors, never 0
  bool reads, folds;  // the live rows
};

__device__ __forceinline__ Step step_of(const CheckStepParams& params, int row, int start,
                                        int live) {
  int q = params.npredicted;
  if (params.cu_seqlens != nullptr) q = params.cu_seqlens[row + 1] - params.cu_seqlens[row];
  const bool forced = live > 0 && params.force_flush != nullptr &&
                      params.force_flush[row * params.force_flush_stride] != 0;
  const int64_t stamp = 1 + live + start * (int64_t{1} + params.max_window);
  return {stamp, q > 0 || forced, forced || replay::flushes(live, q, params.max_window)};
}

__global__ void __launch_bounds__(128, 1)
    check_step(const __grid_constant__ CheckStepParams params) {
  const int row = blockIdx.x;
  if (params.cu_seqlens != nullptr && threadIdx.x == 0) {
    const int first = params.cu_seqlens[row], last = params.cu_seqlens[row + 1];
    if (row == 0 && first != 0) {
      report(params, kCuSeqlens, row, first, params.tokens);
    } else if (first > last || last > params.tokens) {
      report(params, kCuSeqlens, row, last, params.tokens);
    } else if (last - first > params.npredicted) {
      report(params, kSequenceLength, row, last - first, params.npredicted);
    }
  }
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  const int start = params.ring_start[slot * params.ring_start_stride];
  const int live = params.prev_num_accepted_tokens[slot * params.prev_num_accepted_tokens_stride];
  const bool start_is_legal = start >= 0 && start < params.ring_buffer_len;
  const bool live_is_legal = live >= 0 && live <= params.max_window;
  if (threadIdx.x == 0 && !start_is_legal) {
    report(params, kRingStart, row, start, params.ring_buffer_len - 1);
  }
  if (threadIdx.x == 0 && !live_is_legal) {
    report(params, kPrevNumAcceptedTokens, row, live, params.max_window);
  }
  if (threadIdx.x == 0 && params.folds != nullptr) {
    const Step step = step_of(params, row, start, live);
    if (step.reads && params.folds[slot] == step.stamp) {
      report(params, kFoldedTwice, row, live, start);
    }
  }
  for (int other = threadIdx.x; other < row; other += blockDim.x) {
    if (replay::find_slot(params, other) == slot) report(params, kDuplicateSlot, row, slot, other);
  }
  if (params.check_finite && start_is_legal && live_is_legal) {
    check_finite(params, row, slot, start, live);
  }
}

// One thread per batch row, behind a check that found nothing.
__global__ void __launch_bounds__(128, 1)
    stamp_folds(const __grid_constant__ CheckStepParams params) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= params.batch) return;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  const Step step =
      step_of(params, row, params.ring_start[slot * params.ring_start_stride],
              params.prev_num_accepted_tokens[slot * params.prev_num_accepted_tokens_stride]);
  if (step.folds) params.folds[slot] = step.stamp;
}

// One thread per batch row: cursors that have moved may come back to a stamp.
__global__ void __launch_bounds__(128, 1)
    forget_folds(const __grid_constant__ ForgetFoldsParams params) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= params.batch) return;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  for (int layer = 0; layer < params.layers; ++layer) {
    params.folds[int64_t{layer} * params.num_slots + slot] = 0;
  }
}

// The request at a place of the active list; negative behind its end.
__device__ __forceinline__ int request_at(const CheckMaterializeParams& params, int place) {
  return params.active_request_indices == nullptr
             ? place
             : params.active_request_indices[place * params.active_request_indices_stride];
}

struct Slots {
  int64_t src, dst;  // -1 both where one is padding
};

__device__ __forceinline__ Slots slots_of(const CheckMaterializeParams& params, int layer,
                                          int request) {
  const int64_t src = convert::load_index(
      params.src_slots,
      layer * params.src_slots_layer_stride + request * params.src_slots_batch_stride,
      params.src_slots_type);
  const int64_t dst = convert::load_index(
      params.dst_slots,
      layer * params.dst_slots_layer_stride + request * params.dst_slots_batch_stride,
      params.dst_slots_type);
  if (src == params.pad_slot_id || dst == params.pad_slot_id || src < 0 || dst < 0 ||
      src >= params.num_slots || dst >= params.num_slots) {
    return {-1, -1};
  }
  return {src, dst};
}

// Addresses of layer `layer`: there, and aligned as the kernel reads them.
__device__ __forceinline__ void check_tables(const CheckMaterializeParams& params, int layer) {
  const int64_t addresses[7] = {params.state_ptrs[layer],
                                params.x_cache_ptrs[layer],
                                params.B_cache_ptrs[layer],
                                params.dt_cache_ptrs[layer],
                                params.A_ptrs[layer],
                                params.scaled ? params.state_scale_ptrs[layer] : 16,
                                params.copied ? params.state_copy_ptrs[layer] : 16};
  const int alignments[7] = {16, 16, 16, 4, params.bytes_of_A, 4, 16};
  for (int table = 0; table < 7; ++table) {
    if (addresses[table] == 0 || addresses[table] % alignments[table] != 0) {
      report(params, kTableAddress, table, addresses[table], layer);
    }
  }
}

// One block per place of the active list; block 0 looks at the tables too.
__global__ void __launch_bounds__(128, 1)
    check_materialize(const __grid_constant__ CheckMaterializeParams params) {
  const int place = blockIdx.x, first = threadIdx.x, step = blockDim.x;
  for (int layer = first; place == 0 && layer < params.layers; layer += step) {
    check_tables(params, layer);
  }
  const int request = request_at(params, place);
  if (request < 0) return;
  if (request >= params.batch) {
    if (first == 0) report(params, kActiveRange, place, request, params.batch - 1);
    return;
  }
  for (int other = first; other < place; other += step) {
    const int before = request_at(params, other);
    if (before < 0) report(params, kActiveAfterEnd, place, request, other);
    if (before == request) report(params, kActiveTwice, place, request, other);
  }
  const int rows = params.replay_prefix_len[request * params.replay_prefix_len_stride];
  if (rows < 0) return;
  const int start = params.ring_start[request * params.ring_start_stride];
  if (first == 0 && (start < 0 || start >= params.ring_buffer_len)) {
    report(params, kMaterializeRingStart, request, start, params.ring_buffer_len - 1);
  }
  if (first == 0 && rows > params.max_window) {
    report(params, kPrefixBeyondWindow, request, rows, params.max_window);
  }
  for (int layer = 0; layer < params.layers; ++layer) {
    const Slots mine = slots_of(params, layer, request);
    if (mine.src < 0) continue;
    if (first == 0 && params.prev_num_accepted_tokens != nullptr) {
      const int live =
          params.prev_num_accepted_tokens[mine.src * params.prev_num_accepted_tokens_stride];
      if (rows > live) report(params, kPrefixBeyondLive, request, rows, live);
    }
    for (int other = first; other < params.batch; other += step) {
      const int theirs_request = request_at(params, other);
      if (theirs_request < 0 || theirs_request >= params.batch || theirs_request == request)
        continue;
      if (params.replay_prefix_len[theirs_request * params.replay_prefix_len_stride] < 0) continue;
      const Slots theirs = slots_of(params, layer, theirs_request);
      if (theirs.dst == mine.dst && theirs_request < request) {
        report(params, kDestinationTwice, request, mine.dst, theirs_request);
      }
      if (theirs.src == mine.dst) {
        report(params, kDestinationIsSource, request, mine.dst, theirs_request);
      }
    }
  }
}
