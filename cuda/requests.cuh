// The sequences of a batch as a block lists them, and what is done for whole sequences: the new
// rows of the rings, and the outputs of padding.
#pragma once
#include "rows.cuh"

namespace replay {

// A sequence as it waits in shared memory; a ring has at most 65536 rows.
struct alignas(16) Entry {
  int slot;
  unsigned row, token;
  int cursors;  // start | live << 16 | q << 22 | flush << 28
};

__device__ __forceinline__ Entry pack_request(const Request& request) {
  const Window& w = request.window;
  return {request.slot, request.row, request.token,
          w.start | w.live << 16 | w.q << 22 | static_cast<int>(w.flush) << 28};
}

__device__ __forceinline__ Request unpack_request(const Entry& entry) {
  const int c = entry.cursors;
  return {entry.slot,
          entry.row,
          entry.token,
          {c & 0xffff, c >> 16 & 63, c >> 22 & 63, (c >> 28 & 1) != 0}};
}

constexpr int kMostWarps = 32;

// In front of its entries: those that flush from the first on, the others from the last.
struct alignas(16) RequestList {
  int counts[kMostWarps][2];
  int taken, appended;  // items of this block, and tokens

  __device__ __forceinline__ Entry* entries() { return reinterpret_cast<Entry*>(this + 1); }

  // Sequence n in the order of work: those that flush come first.
  __device__ __forceinline__ const Entry& entry(const CheckpointingSsuParams& params, int n,
                                                int2 listed) {
    return entries()[n < listed.x ? n : params.most_listed - 1 - (n - listed.x)];
  }
};

// One after another, for the warp.
__device__ __forceinline__ int take(int& counter) {
  return __shfl_sync(kAllLanes, ptx::atomic_count_shared(ptx::to_smem(&counter)), 0);
}

// The slot of the thread's row among those from `first` on. What follows does not wait for it.
__device__ __forceinline__ GivenSlot ask_for_slot(const CheckpointingSsuParams& params, int first) {
  const GivenSlot slot(params, min(first + static_cast<int>(threadIdx.x), params.batch - 1));
  ptx::keep_order();
  return slot;
}

struct Cursors {
  int start, live;
  unsigned char forced;
};

// What follows does not wait for them.
__device__ __forceinline__ Cursors ask_for_cursors(const CheckpointingSsuParams& params,
                                                   const Request& request) {
  Cursors cursors = {*ring_start_of(params, request.slot), *live_rows_of(params, request.slot), 0};
  if (params.force_flush != nullptr) {
    cursors.forced = params.force_flush[request.row * params.force_flush_stride];
  }
  return cursors;
}

// Lists the sequences from `first` on that have something to do; `slot` is what was asked for.
// Returns how many flush and how many do not. All warps do `meanwhile(slot)`, -1 for padding, while
// the cursors come.
template <class Meanwhile>
__device__ __forceinline__ int2 list_requests(RequestList& list,
                                              const CheckpointingSsuParams& params, int first,
                                              GivenSlot slot, Meanwhile meanwhile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int end = min(first + params.most_listed, params.batch);
  int2 listed = make_int2(0, 0);
  for (int base = first; base < end; base += static_cast<int>(blockDim.x)) {
    const int row = base + static_cast<int>(threadIdx.x);
    Request request = {-1, 0, 0, {0, 0, 0, false}};
    Cursors cursors = {};
    if (row < end) {
      request = find_tokens(params, row);
      request.slot = slot.slot(params);
      if (request.slot >= 0) cursors = ask_for_cursors(params, request);
    }
    meanwhile(request.slot);
    if (request.slot >= 0) {
      set_window(params, request, cursors.start, cursors.live, cursors.forced != 0);
    }
    const bool flush = request.slot >= 0 && request.window.flush;
    const bool stay = request.slot >= 0 && !flush && request.window.q > 0;
    const unsigned flushing = __ballot_sync(kAllLanes, flush);
    const unsigned staying = __ballot_sync(kAllLanes, stay);
    if (lane == 0) {
      list.counts[warp][0] = __popc(flushing);
      list.counts[warp][1] = __popc(staying);
    }
    __syncthreads();
    int2 before = listed;
    for (int w = 0; w < warps; ++w) {
      listed.x += list.counts[w][0];
      listed.y += list.counts[w][1];
      if (w < warp) before.x += list.counts[w][0], before.y += list.counts[w][1];
    }
    const unsigned lower = (1u << lane) - 1u;
    if (flush) list.entries()[before.x + __popc(flushing & lower)] = pack_request(request);
    if (stay) {
      list.entries()[params.most_listed - 1 - before.y - __popc(staying & lower)] =
          pack_request(request);
    }
    const int next = base + static_cast<int>(blockDim.x);
    if (next < end) slot = ask_for_slot(params, next);
    __syncthreads();
  }
  return listed;
}

// ---- appends and padding ------------------------------------------------------------------------

// Rows of 16-byte pieces from one array to another: loads go out together, then stores.
template <class Act>
__device__ __forceinline__ void copy_pieces(Act* to, int64_t to_stride, const Act* from,
                                            int64_t from_stride, int rows, const Spread& spread) {
  constexpr int kAtOnce = 4;
  to += spread.row * to_stride + 8 * spread.piece;
  from += spread.row * from_stride + 8 * spread.piece;
  to_stride *= spread.rows, from_stride *= spread.rows;
  for (int row = spread.row; row < rows; row += kAtOnce * spread.rows) {
    uint4 v[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row + i * spread.rows < rows) v[i] = *reinterpret_cast<const uint4*>(from);
      from += from_stride;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (row + i * spread.rows < rows) *reinterpret_cast<uint4*>(to) = v[i];
      to += to_stride;
    }
  }
}

// Copies one token to row `row` of the rings; a warp of its own does it.
template <class Act, int kDstate>
__device__ __forceinline__ void append_token(const CheckpointingSsuParams& params,
                                             const Request& request, int t, int row,
                                             const Spread& spread_x, const Spread& spread_B) {
  const int lane = threadIdx.x & 31, ngroups = params.nheads / params.heads_per_group;
  copy_pieces(x_ring<Act>(params, request.slot, 0) + row_offset(row, params.x_cache_row_stride),
              params.x_cache_head_stride, x_of_token<Act>(params, request, 0, t),
              params.x_head_stride, params.nheads, spread_x);
  copy_pieces(B_ring<Act>(params, request.slot, 0) + row_offset(row, params.B_cache_row_stride),
              params.B_cache_group_stride, B_of_token<Act>(params, request, 0, t),
              params.B_group_stride, ngroups, spread_B);
  for (int head = lane; head < params.nheads; head += 32) {
    const float dt =
        convert::load_float(params.dt, dt_of_token(params, request, head, t), params.dt_type);
    dt_ring(params, request.slot, head)[row_offset(row, params.dt_cache_row_stride)] =
        processed_dt(params, dt, head);
  }
}

// Writes the new rows of all listed sequences behind their live ones. A warp takes whole tokens
// when it has no item left, so that the last warps have none to write.
template <class Act, int kDstate>
__device__ __forceinline__ void append(RequestList& list, const CheckpointingSsuParams& params,
                                       int2 listed) {
  const int lane = threadIdx.x & 31, end = (listed.x + listed.y) * params.npredicted;
  const Spread spread_x(lane, 32, params.head_dim / 8), spread_B(lane, 32, kDstate / 8);
  while (true) {
    const int i = take(list.appended) * gridDim.x + blockIdx.x;
    if (i >= end) return;
    const int n = i / params.npredicted, t = i - n * params.npredicted;
    const Request request = unpack_request(list.entry(params, n, listed));
    if (t >= request.window.q) continue;
    const Window& window = request.window;
    const int first = ring_row(window.start, window.live, params.ring_buffer_len);
    append_token<Act, kDstate>(params, request, t, ring_row(first, t, params.ring_buffer_len),
                               spread_x, spread_B);
  }
}

// Outputs of padded rows become zeros: a warp takes whole rows.
__device__ __forceinline__ void zero_padding(const CheckpointingSsuParams& params) {
  const int warps = blockDim.x >> 5, warp = blockIdx.x * warps + (threadIdx.x >> 5);
  for (int row = warp; row < params.batch; row += gridDim.x * warps) {
    const Request request = find_request(params, row);
    if (request.slot >= 0) continue;
    const int per_token = params.nheads * params.head_dim;
    for (int i = threadIdx.x & 31; i < request.window.q * per_token; i += 32) {
      const int t = i / per_token, head = (i - t * per_token) / params.head_dim;
      const int p = i - t * per_token - head * params.head_dim;
      const int64_t index = out_of_token(params, request, head, t) + p;
      convert::store_float(params.out, index, params.out_type, 0.0f);
    }
  }
}

}  // namespace replay
