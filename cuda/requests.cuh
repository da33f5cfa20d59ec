// The sequences of a batch as a block lists them, and what is done behind all items: late rows of
// x, and the outputs of padding.
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

// In front of its entries: early sequences and those that flush from the first on, the others from
// the last. An early one that has nothing to do has slot -1.
struct alignas(16) RequestList {
  unsigned counts[kMostWarps];  // sequences of a warp: those in front, others << 16
  int taken, appended;          // items of this block, and parts of what is appended late

  __device__ __forceinline__ Entry* entries() { return reinterpret_cast<Entry*>(this + 1); }

  // Sequence n in the order of work.
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

// A sequence whose cursors were asked for.
struct AskedRow {
  Request request;
  int start, live;
  unsigned char forced;

  __device__ __forceinline__ Request with_window(const CheckpointingSsuParams& params) const {
    Request of_row = request;
    if (of_row.slot >= 0) set_window(params, of_row, start, live, forced != 0);
    return of_row;
  }
};

// Waits for the slot; what follows does not wait for the cursors. There are no rows from `end` on.
__device__ __forceinline__ AskedRow ask_for_row(const CheckpointingSsuParams& params, int row,
                                                int end, const GivenSlot& slot) {
  AskedRow asked = {{-1, 0, 0, {0, 0, 0, false}}, 0, 0, 0};
  if (row < end) {
    asked.request = find_tokens(params, row);
    asked.request.slot = slot.slot(params);
  }
  if (asked.request.slot >= 0) {
    asked.start = *ring_start_of(params, asked.request.slot);
    asked.live = *live_rows_of(params, asked.request.slot);
    if (params.force_flush != nullptr) {
      asked.forced = params.force_flush[row * params.force_flush_stride];
    }
  }
  ptx::keep_order();
  return asked;
}

// Lists the sequences from `first` on: early ones, then those that flush, and the others that have
// something to do. `asked` is the thread's first one. Returns how many are in front, and how
// many are not.
__device__ __forceinline__ int2 list_requests(RequestList& list,
                                              const CheckpointingSsuParams& params, int first,
                                              AskedRow asked) {
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const unsigned lower = (1u << lane) - 1u;
  const int end = min(first + params.most_listed, params.batch);
  int2 listed = make_int2(0, 0);
  for (int base = first; base < end; base += static_cast<int>(blockDim.x)) {
    const int row = base + static_cast<int>(threadIdx.x);
    Request request = asked.with_window(params);
    const bool flush = request.slot >= 0 && request.window.flush;
    const bool works = flush || (request.slot >= 0 && request.window.q > 0);
    const bool front = flush || row < min(first + params.early_sequences, end);
    const bool stay = works && !front;
    if (!works) request.slot = -1, request.window.q = 0;
    const unsigned in_front = __ballot_sync(kAllLanes, front);
    const unsigned staying = __ballot_sync(kAllLanes, stay);
    if (lane == 0) list.counts[warp] = __popc(in_front) | __popc(staying) << 16;
    __syncthreads();
    const unsigned count = lane < warps ? list.counts[lane] : 0;
    const unsigned before = __reduce_add_sync(kAllLanes, lane < warp ? count : 0);
    const unsigned all = __reduce_add_sync(kAllLanes, count);
    if (front | stay) {
      const int first_stay = params.most_listed - 1 - listed.y - (before >> 16);
      const int place = front ? listed.x + (before & 0xffff) + __popc(in_front & lower)
                              : first_stay - __popc(staying & lower);
      list.entries()[place] = pack_request(request);
    }
    listed.x += all & 0xffff, listed.y += all >> 16;
    const int next = base + static_cast<int>(blockDim.x);
    if (next < end) {
      asked = ask_for_row(params, next + threadIdx.x, end, ask_for_slot(params, next));
    }
    __syncthreads();
  }
  return listed;
}

// Writes x of the one new row of all listed sequences behind their live ones. A warp without an
// item takes some heads of a sequence at a time.
template <class Act>
__device__ __forceinline__ void append_x_of_all(RequestList& list,
                                                const CheckpointingSsuParams& params, int2 listed) {
  constexpr int kHeads = 8, kAtOnce = 2;
  const Spread spread(threadIdx.x & 31, 32, params.head_dim / 8);
  const unsigned parts = (params.nheads + kHeads - 1) / kHeads;
  while (true) {
    const unsigned part = take(list.appended) * gridDim.x + blockIdx.x, n = part / parts;
    if (n >= listed.x + listed.y) return;
    const Request request = unpack_request(list.entry(params, n, listed));
    if (request.window.q == 0) continue;
    const int first = (part - n * parts) * kHeads, end = min(first + kHeads, params.nheads);
    const Act* from = x_of_token<Act>(params, request, 0, 0) + 8 * spread.piece;
    Act* to =
        x_ring<Act>(params, request.slot, 0) + 8 * spread.piece +
        row_offset(request.window.new_row(0, params.ring_buffer_len), params.x_cache_row_stride);
    for (int head = first + spread.row; head < end; head += kAtOnce * spread.rows) {
      uint4 x[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int of_piece = head + i * spread.rows;
        if (of_piece < end) {
          x[i] = *reinterpret_cast<const uint4*>(from + of_piece * params.x_head_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int of_piece = head + i * spread.rows;
        if (of_piece < end) {
          *reinterpret_cast<uint4*>(to + of_piece * params.x_cache_head_stride) = x[i];
        }
      }
    }
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
