// The life of a slot: emptied for a new request, or loaded with the state that a prefill left.
#include "replay.cuh"

// Zeroes the states of the slots in every layer, scale 1 beside 8-bit ones, and their cursors.
// Grid: (batch row, layer); a block walks the heads of one state in 16-byte vectors.
__global__ void __launch_bounds__(256)
    reset_slots(const __grid_constant__ ResetSlotsParams params) {
  const int row = blockIdx.x, layer = blockIdx.y;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  if (layer == 0 && threadIdx.x == 0 && params.ring_start != nullptr) {
    params.ring_start[slot * params.ring_start_stride] = 0;
    params.prev_num_accepted_tokens[slot * params.prev_num_accepted_tokens_stride] = 0;
  }
  if (params.states[layer] == nullptr) return;
  float* scales = params.state_scales[layer];
  for (int i = threadIdx.x; scales != nullptr && i < params.nheads * params.head_dim;
       i += blockDim.x) {
    scales[slot * params.state_scale_slot_strides[layer] +
           i / params.head_dim * params.state_scale_head_strides[layer] + i % params.head_dim] =
        1.0f;
  }
  uint4* state =
      static_cast<uint4*>(params.states[layer]) + slot * params.state_slot_strides[layer];
  for (int head = 0; head < params.nheads; ++head) {
    uint4* of_head = state + head * params.state_head_strides[layer];
    for (int i = threadIdx.x; i < params.vectors_per_head; i += blockDim.x) {
      of_head[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// One row of an 8-bit state from a warp: lane i has the columns i, i + 32, ...
template <class State, class Source>
__device__ __forceinline__ void load_scaled_row(State* to, float* scale, const Source* from,
                                                int dstate) {
  const int lane = threadIdx.x & 31;
  float v[8];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int n = lane + 32 * i;
    v[i] = n < dstate ? convert::to_float(from[n]) : 0.0f;
    amax = ptx::max_magnitude(amax, v[i]);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    amax = ptx::max_magnitude(amax, __shfl_xor_sync(replay::kAllLanes, amax, step));
  }
  const convert::RowScale row = convert::row_scale<State>(amax);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 scaled = row.scaled(make_float2(v[i], 0.0f));
    const uint32_t code = row.stored(convert::pack_codes<State>(scaled, scaled));
    if (lane + 32 * i < dstate) reinterpret_cast<unsigned char*>(to)[lane + 32 * i] = code & 0xffu;
  }
  if (lane == 0) *scale = row.decode;
}

// Rounds a prefill's final states to the state type, nearest even.
// Grid: one block per (batch row, head), head fastest.
template <class State, class Source>
__global__ void __launch_bounds__(256) load_state(const __grid_constant__ LoadStateParams params) {
  const int row = blockIdx.x / params.nheads, head = blockIdx.x - row * params.nheads;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  State* state = static_cast<State*>(params.state) + slot * params.state_slot_stride +
                 head * params.state_head_stride;
  const Source* source = static_cast<const Source*>(params.source) +
                         row * params.source_batch_stride + head * params.source_head_stride;
  if constexpr (convert::kScaled<State>) {
    float* scales = params.state_scale + slot * params.state_scale_slot_stride +
                    head * params.state_scale_head_stride;
    for (int p = threadIdx.x >> 5; p < params.head_dim; p += blockDim.x >> 5) {
      load_scaled_row(state + p * params.dstate, scales + p, source + p * params.dstate,
                      params.dstate);
    }
  } else {
    for (int i = threadIdx.x; i < params.head_dim * params.dstate; i += blockDim.x) {
      state[i] = convert::from_float<State>(convert::to_float(source[i]));
    }
  }
}
