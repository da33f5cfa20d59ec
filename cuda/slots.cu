// The life of a slot: emptied for a new request, or loaded with the state that a prefill left.
#include "read_copy.cuh"

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

// Eight columns of a row from `column` on, as fp16, to nearest or stochastically.
__device__ __forceinline__ void store_rounded(const LoadStateParams& params, fp16* to,
                                              const float2 (&v)[4]) {
  replay::Rounding rounding;
  rounding.seed = convert::mix_seed(static_cast<uint64_t>(params.seed), 0);
  rounding.rounds = params.philox_rounds;
  const int64_t offset = to - static_cast<const fp16*>(params.state);
  *reinterpret_cast<uint4*>(to) = rounding.rounds > 0
                                      ? replay::encode_piece<fp16, true>(v, rounding, offset)
                                      : replay::encode_piece<fp16, false>(v, rounding, offset);
}

// A head of an fp16 state and its copy, both from what is given. A warp takes eight rows at a time;
// lane t of the four of a row has the columns 32 J + 8 t to 32 J + 8 t + 7.
template <class Copy, class Source>
__device__ __forceinline__ void load_both(const LoadStateParams& params, fp16* state,
                                          unsigned char* copy, float* scales,
                                          const Source* source) {
  const replay::Lane lane;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  for (int first = 8 * warp; first < params.head_dim; first += 8 * warps) {
    const int p = first + lane.g;
    float2 v[8][4];
    float amax = 0.0f;
#pragma unroll
    for (int J = 0; J < 8; ++J) {
      const int column = 32 * J + 8 * lane.t;
      if (32 * J >= params.dstate) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Source* from = source + p * params.dstate + column + 2 * i;
        v[J][i] = make_float2(convert::to_float(from[0]), convert::to_float(from[1]));
      }
      amax = ptx::max_magnitude(amax, replay::largest(v[J]));
      store_rounded(params, state + p * params.dstate + column, v[J]);
    }
    const convert::RowScale of_row = convert::row_scale<Copy>(replay::of_row(amax));
    unsigned char* slab = copy + p / replay::kRows * replay::copy_bytes<Copy>(params.dstate);
#pragma unroll
    for (int J = 0; J < 8; ++J) {
      if (32 * J >= params.dstate) break;
      float2 scaled[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = of_row.scaled(v[J][i]);
      replay::store_copied<Copy>(slab, params.dstate, p % replay::kRows, 32 * J + 8 * lane.t,
                                 of_row, scaled);
    }
    if (lane.t == 0) scales[p] = of_row.decode;
  }
}

// Rounds a prefill's final states to the state type, nearest even; with a copy, as asked for.
// Grid: one block per (batch row, head), head fastest.
template <class State, class Source, class Copy = State>
__global__ void __launch_bounds__(256) load_state(const __grid_constant__ LoadStateParams params) {
  const int row = blockIdx.x / params.nheads, head = blockIdx.x - row * params.nheads;
  const int64_t slot = replay::find_slot(params, row);
  if (slot < 0) return;
  State* state = static_cast<State*>(params.state) + slot * params.state_slot_stride +
                 head * params.state_head_stride;
  const Source* source = static_cast<const Source*>(params.source) +
                         row * params.source_batch_stride + head * params.source_head_stride;
  float* scales = params.state_scale + slot * params.state_scale_slot_stride +
                  head * params.state_scale_head_stride;
  if constexpr (!convert::same<State, Copy>) {
    unsigned char* copy = static_cast<unsigned char*>(params.state_copy) +
                          slot * params.state_copy_slot_stride +
                          head * params.state_copy_head_stride;
    load_both<Copy>(params, state, copy, scales, source);
  } else if constexpr (convert::kScaled<State>) {
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
