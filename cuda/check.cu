// Checked mode: looks at what only the device knows before a step runs, and reports the first
// fault.
//
// One block per batch row. Writes nothing but `report`: violation, batch row, value, legal bound.
#include "replay.cuh"

__device__ __forceinline__ void report(const CheckStepParams& params, Violation violation, int row,
                                       int64_t value, int64_t bound) {
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
  for (int other = threadIdx.x; other < row; other += blockDim.x) {
    if (replay::find_slot(params, other) == slot) report(params, kDuplicateSlot, row, slot, other);
  }
  if (params.check_finite && start_is_legal && live_is_legal) {
    check_finite(params, row, slot, start, live);
  }
}
