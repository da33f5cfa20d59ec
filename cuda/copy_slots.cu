// Whole sequences moved: states, scales, live ring rows and cursors of all layers, from slot to
// slot, from slots to images of them, or back.
//
// In a slot the rows of a ring lie from its cursor on; in an image from row 0 on, and the cursor of
// a slot that is read from one is 0. Dead rows are neither read nor written. Grid: (destination,
// layer and array, part of its bytes).
#include "replay.cuh"

// Where a sequence's rows of one array begin, and how they follow one another.
struct Place {
  unsigned char* base;
  int64_t block_stride, row_stride;
  int start;
};

__device__ __forceinline__ int64_t load_slot(const CopySlotsParams& params, const void* slots,
                                             int64_t index, int type) {
  const int64_t slot = convert::load_index(slots, index, type);
  return slot == params.pad_slot_id || slot < 0 || slot >= params.num_slots ? -1 : slot;
}

__device__ __forceinline__ Place place_of_slot(const CopySlotsParams& params, int array, int layer,
                                               int64_t slot, int start) {
  unsigned char* base = reinterpret_cast<unsigned char*>(params.ptrs[array][layer]);
  return {base + slot * params.slot_strides[array][layer] * params.itemsizes[array],
          params.block_strides[array], params.row_strides[array], start};
}

__device__ __forceinline__ Place place_in_image(const CopySlotsParams& params, int array, int layer,
                                                int row) {
  const int64_t bytes = params.row_bytes[array];
  const int rows = params.is_ring[array] ? params.image_rows : 1;
  return {params.image + row * params.image_stride + layer * params.image_layer_stride +
              params.image_offsets[array],
          bytes * rows, bytes, 0};
}

// `rows` rows of every block in vectors of T, several loads at once.
template <class T>
__device__ __forceinline__ void copy_rows(const CopySlotsParams& params, int array,
                                          const Place& from, const Place& to, int rows) {
  constexpr int kAtOnce = 4;
  const int vectors = params.row_bytes[array] / static_cast<int>(sizeof(T));
  const int of_block = rows * vectors, total = of_block * params.blocks[array];
  const int step = static_cast<int>(gridDim.z * blockDim.x);
  const bool ring = params.is_ring[array];
  for (int64_t first = blockIdx.z * blockDim.x + threadIdx.x; first < total;
       first += kAtOnce * step) {
    T v[kAtOnce];
    T* targets[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      targets[i] = nullptr;
      if (first + i * step >= total) continue;
      const int index = static_cast<int>(first) + i * step;
      const int block = index / of_block, rest = index - block * of_block;
      const int j = rest / vectors, vector = rest - j * vectors;
      const int read = ring ? replay::ring_row(from.start, j, params.ring_buffer_len) : j;
      const int written = ring ? replay::ring_row(to.start, j, params.ring_buffer_len) : j;
      v[i] = reinterpret_cast<const T*>(from.base + block * from.block_stride +
                                        read * from.row_stride)[vector];
      targets[i] =
          reinterpret_cast<T*>(to.base + block * to.block_stride + written * to.row_stride) +
          vector;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (targets[i] != nullptr) *targets[i] = v[i];
    }
  }
}

__global__ void __launch_bounds__(256) copy_slots(const __grid_constant__ CopySlotsParams params) {
  const int row = blockIdx.x / params.copies, copy = blockIdx.x - row * params.copies;
  const int layer = blockIdx.y / kSlotArrays, array = blockIdx.y - layer * kSlotArrays;
  const bool from_image = params.src_slots == nullptr, to_image = params.dst_slots == nullptr;
  int64_t src = -1, dst = -1;
  int start = 0, live;
  if (from_image) {
    live = params.image_live[row];
  } else {
    src = load_slot(params, params.src_slots, row * params.src_slots_stride, params.src_slots_type);
    if (src < 0) return;
    start =
        min(max(params.ring_start[src * params.ring_start_stride], 0), params.ring_buffer_len - 1);
    live = params.prev_num_accepted_tokens[src * params.prev_num_accepted_tokens_stride];
  }
  live = min(max(live, 0), params.max_window);
  if (!to_image) {
    dst = load_slot(params, params.dst_slots,
                    row * params.dst_slots_batch_stride + copy * params.dst_slots_copy_stride,
                    params.dst_slots_type);
    if (dst < 0 || dst == src) return;
  }
  if (blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    if (to_image) {
      params.image_live[row] = live;
    } else {
      params.ring_start[dst * params.ring_start_stride] = start;
      params.prev_num_accepted_tokens[dst * params.prev_num_accepted_tokens_stride] = live;
    }
  }
  if (params.ptrs[array][layer] == 0) return;
  const Place from = from_image ? place_in_image(params, array, layer, row)
                                : place_of_slot(params, array, layer, src, start);
  const Place to = to_image ? place_in_image(params, array, layer, row)
                            : place_of_slot(params, array, layer, dst, start);
  const int rows = params.is_ring[array] ? live : 1;
  if (rows == 0) return;
  if (params.wide[array]) {
    copy_rows<uint4>(params, array, from, to, rows);
  } else {
    copy_rows<uint32_t>(params, array, from, to, rows);
  }
}
