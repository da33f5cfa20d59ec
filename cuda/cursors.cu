// The cursors of the rings, moved on the device after the accepted tokens are known.
//
//   flush step:  ring_start += prev_num_accepted_tokens;  prev_num_accepted_tokens = accepted
//   else:        prev_num_accepted_tokens += accepted
//
// Equals reference.advance_cursors. One thread per batch row. Reads every value on the device, so a
// captured launch follows the arrays. Padding rows are left alone.
#include "replay.cuh"

__global__ void advance_ring(const __grid_constant__ AdvanceRingParams params) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  // A new seed for the next step: no two flush events of a slot share their random bits.
  if (row == 0 && params.rand_seed != nullptr) *params.rand_seed += 1;
  if (row >= params.batch) return;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  int& ring_start = params.ring_start[slot * params.ring_start_stride];
  int& prev = params.prev_num_accepted_tokens[slot * params.prev_num_accepted_tokens_stride];
  if (params.reset != nullptr && params.reset[row * params.reset_stride]) {
    ring_start = 0;
    prev = 0;
    return;
  }
  int q = params.npredicted;
  if (params.query_lens != nullptr) {
    // Held inside what a step of these rings may have, as the step itself does.
    const int64_t given = convert::load_index(params.query_lens, row * params.query_lens_stride,
                                              params.query_lens_type);
    const int64_t longest = min(params.max_window, params.ring_buffer_len - params.max_window);
    q = static_cast<int>(min(max(given, int64_t{0}), longest));
  }
  // More accepted tokens than the step had would make unwritten ring rows live.
  const int64_t accepted = convert::load_index(
      params.num_accepted, row * params.num_accepted_stride, params.num_accepted_type);
  const int kept = static_cast<int>(min(max(accepted, int64_t{0}), int64_t{q}));
  const bool forced =
      params.force_flush != nullptr && params.force_flush[row * params.force_flush_stride];
  if (forced || replay::flushes(prev, q, params.max_window)) {
    ring_start = replay::ring_row(ring_start, prev, params.ring_buffer_len);
    prev = kept;
  } else {
    prev += kept;
  }
}
