// Slots whose place in their ring is kept as a number of tokens: what a step needs to know of them
// before it runs, and how they start.
#include "replay.cuh"

// Before a step: each row's cursors from its slot's position, which moves on by the step's tokens.
//
// A position of one word counts the tokens so far, all of them accepted. One of two words counts
// the tokens that were committed, and holds in the bytes of the second those of the window before,
// which are not, and the rows that lie in the ring before them. The step's own rule folds whatever
// is live, so that both follow from the count. Equals vllm_cache.begin_slot. One thread per
// batch row. Rows of padding are left alone.
__global__ void begin_step(const __grid_constant__ BeginStepParams params) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row == 0) *params.rand_seed = params.seed;
  if (row >= params.batch) return;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  int* position = params.positions + slot * params.positions_slot_stride;
  const int W = params.max_window, L = params.ring_buffer_len, tokens = position[0];
  int committed = max(tokens, 0), live;
  if (params.words == 1) {
    live = committed == 0 ? 0 : (committed - 1) % W + 1;
    position[0] = committed + 1;
  } else {
    int* window = position + params.positions_word_stride;
    const int pending = *window & 0xff;
    int accepted = pending;
    if (params.num_accepted != nullptr) {
      accepted = static_cast<int>(convert::load_index(
          params.num_accepted, row * params.num_accepted_stride, params.num_accepted_type));
      accepted = min(max(accepted, 0), pending);
    }
    int q = params.npredicted;
    if (params.cu_seqlens != nullptr) {
      q = min(max(params.cu_seqlens[row + 1] - params.cu_seqlens[row], 0), q);
    }
    committed += accepted;
    live = min((*window >> 8 & 0xff) + accepted, min(W, committed));
    position[0] = committed;
    *window = q | (replay::flushes(live, q, W) ? 0 : live) << 8;
  }
  // Long before a count overflows it starts again at the same place.
  constexpr int kMost = 1 << 30;
  if (position[0] >= kMost) position[0] -= (kMost / (W * L) - 1) * (W * L);
  params.ring_start[slot] = (committed - live) % L;
  params.prev_num_accepted_tokens[slot] = live;
  params.events[slot] = committed;
}

// Zeroes the rings of slots and their positions. Grid: (batch row, array); a block walks the words
// of one slot.
__global__ void __launch_bounds__(256)
    clear_rings(const __grid_constant__ ClearRingsParams params) {
  const int row = blockIdx.x, array = blockIdx.y;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  if (array == 0 && threadIdx.x < params.words) {
    params.positions[slot * params.positions_slot_stride +
                     threadIdx.x * params.positions_word_stride] = 0;
  }
  int* ring = static_cast<int*>(params.rings[array]) + slot * params.ring_slot_strides[array];
  const int words = params.words_of_head[array];
  for (int i = threadIdx.x; i < params.heads[array] * words; i += blockDim.x) {
    ring[i / words * params.ring_head_strides[array] + i % words] = 0;
  }
}
