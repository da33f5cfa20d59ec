// The rows of a step in shared memory: x and z of one head, B and C of its group.
//
// A tile holds the old rows of the ring, then the new tokens. `first` and `ring_rows` say where old
// row j lies: a ring's own order, or 0 and the order of the rows. A row that is dead is not
// there; who wants it gets the last one that is, with weight 0.
#pragma once
#include "replay.cuh"

namespace replay {

// n / d where n * d < 2^44 and n / d < 2^20; `inverse` is 2^44 / d, rounded up.
__device__ __forceinline__ unsigned divide(unsigned n, int64_t inverse) {
  return static_cast<unsigned>(static_cast<uint64_t>(n) * static_cast<uint64_t>(inverse) >> 44);
}

// One sequence of the batch, and the rows of its step. `token` is the place of the sequence's first
// token among the batch's.
struct Request {
  int slot;
  unsigned row, token;
  Window window;
};

// Without its slot.
__device__ __forceinline__ Request find_tokens(const CheckpointingSsuParams& params, int row) {
  Request request = {-1, static_cast<unsigned>(row), 0, {0, 0, params.npredicted, false}};
  if (params.cu_seqlens != nullptr) {
    const int first = params.cu_seqlens[row];
    request.token = first;
    request.window.q = min(max(params.cu_seqlens[row + 1] - first, 0), params.npredicted);
  }
  return request;
}

__device__ __forceinline__ Request find_request(const CheckpointingSsuParams& params, int row) {
  const int slot = find_slot(params, row);
  Request request = find_tokens(params, row);
  request.slot = slot;
  return request;
}

__device__ __forceinline__ const int* ring_start_of(const CheckpointingSsuParams& params,
                                                    unsigned slot) {
  return params.ring_start + slot * params.ring_start_stride;
}

__device__ __forceinline__ const int* live_rows_of(const CheckpointingSsuParams& params,
                                                   unsigned slot) {
  return params.prev_num_accepted_tokens + slot * params.prev_num_accepted_tokens_stride;
}

// Cursors outside their range would be a caller's fault; they must not become stray addresses.
__device__ __forceinline__ void set_window(const CheckpointingSsuParams& params, Request& request,
                                           int start, int live, bool forced) {
  Window& window = request.window;
  window.start = min(max(start, 0), params.ring_buffer_len - 1);
  window.live = min(max(live, 0), params.max_window);
  window.flush = (forced && window.live > 0) || flushes(window.live, window.q, params.max_window);
}

__device__ __forceinline__ void set_window(const CheckpointingSsuParams& params, Request& request,
                                           int start, int live) {
  const bool forced = params.force_flush != nullptr &&
                      params.force_flush[request.row * params.force_flush_stride] != 0;
  set_window(params, request, start, live, forced);
}

// ---- where rows lie in memory -------------------------------------------------------------------

// Strides of ring rows fit into 32 bits.
__device__ __forceinline__ int64_t row_offset(int row, int64_t stride) {
  return ptx::mul_wide(row, static_cast<int>(stride));
}

template <class Act>
__device__ __forceinline__ Act* x_ring(const CheckpointingSsuParams& params, unsigned slot,
                                       unsigned head) {
  return static_cast<Act*>(params.x_cache) + slot * params.x_cache_slot_stride +
         head * params.x_cache_head_stride;
}

template <class Act>
__device__ __forceinline__ Act* B_ring(const CheckpointingSsuParams& params, unsigned slot,
                                       unsigned group) {
  return static_cast<Act*>(params.B_cache) + slot * params.B_cache_slot_stride +
         group * params.B_cache_group_stride;
}

__device__ __forceinline__ float* dt_ring(const CheckpointingSsuParams& params, unsigned slot,
                                          unsigned head) {
  return params.dt_cache + slot * params.dt_cache_slot_stride + head * params.dt_cache_head_stride;
}

template <class Act>
__device__ __forceinline__ const Act* x_of_token(const CheckpointingSsuParams& params,
                                                 const Request& request, unsigned head,
                                                 unsigned t) {
  return static_cast<const Act*>(params.x) + request.row * params.x_batch_stride +
         (request.token + t) * params.x_token_stride + head * params.x_head_stride;
}

template <class Act>
__device__ __forceinline__ const Act* z_of_token(const CheckpointingSsuParams& params,
                                                 const Request& request, unsigned head,
                                                 unsigned t) {
  return static_cast<const Act*>(params.z) + request.row * params.z_batch_stride +
         (request.token + t) * params.z_token_stride + head * params.z_head_stride;
}

template <class Act>
__device__ __forceinline__ const Act* B_of_token(const CheckpointingSsuParams& params,
                                                 const Request& request, unsigned group,
                                                 unsigned t) {
  return static_cast<const Act*>(params.B) + request.row * params.B_batch_stride +
         (request.token + t) * params.B_token_stride + group * params.B_group_stride;
}

template <class Act>
__device__ __forceinline__ const Act* C_of_token(const CheckpointingSsuParams& params,
                                                 const Request& request, unsigned group,
                                                 unsigned t) {
  return static_cast<const Act*>(params.C) + request.row * params.C_batch_stride +
         (request.token + t) * params.C_token_stride + group * params.C_group_stride;
}

__device__ __forceinline__ int64_t dt_of_token(const CheckpointingSsuParams& params,
                                               const Request& request, unsigned head, unsigned t) {
  return request.row * params.dt_batch_stride + (request.token + t) * params.dt_token_stride +
         head * params.dt_head_stride;
}

__device__ __forceinline__ int64_t out_of_token(const CheckpointingSsuParams& params,
                                                const Request& request, unsigned head, unsigned t) {
  return request.row * params.out_batch_stride + (request.token + t) * params.out_token_stride +
         head * params.out_head_stride;
}

// ---- tiles --------------------------------------------------------------------------------------

// How some threads share rows of 16-byte pieces: whole rows at a time, the rest of them idle.
struct Spread {
  static constexpr int kIdle = 1 << 20;  // a row behind all that there are
  int row, piece, rows;                  // the thread's first row and its piece; rows at a time
  Spread() = default;
  __device__ Spread(unsigned thread, unsigned threads, unsigned pieces)
      : row(thread / pieces), piece(thread - row * pieces), rows(threads / pieces) {
    if (row >= rows) row = kIdle;
  }
  // Of a warp, without divisions: `inverse` is 2^16 / pieces, rounded up.
  __device__ static Spread of_warp(unsigned lane, unsigned pieces, unsigned inverse) {
    Spread spread;
    spread.row = lane * inverse >> 16, spread.rows = 32 * inverse >> 16;
    spread.piece = lane - spread.row * pieces;
    if (spread.row >= spread.rows) spread.row = kIdle;
    return spread;
  }
};

// Rows of a ring that are copied: `count` of them from ring row `first` on. `ring` is the thread's
// piece of row 0, `stride` what rows are apart, in bytes.
struct RingRows {
  const unsigned char* ring;
  unsigned stride;
  int first, count, ring_rows;

  // Of a ring of `Act`, whose rows are at most 2^31 elements apart.
  template <class Act>
  __device__ __forceinline__ static unsigned bytes(int64_t stride) {
    return static_cast<unsigned>(stride) * static_cast<unsigned>(sizeof(Act));
  }

  static constexpr int kAtOnce = 4;

  // Starts the copies of the thread's next four rows, the first of them `from` rows behind its own;
  // `place` is that of a row behind `to`.
  template <class Place>
  __device__ __forceinline__ void copy_pass(ptx::smem_t to, int from, const Spread& spread,
                                            Place place) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = spread.row + from + i * spread.rows;
      ptx::cp_async16_if_less(row, count, to + place(row),
                              ptx::mad_wide(ring_row(first, row, ring_rows), stride, ring));
    }
  }

  template <class Place>
  __device__ __forceinline__ void copy(ptx::smem_t to, const Spread& spread, Place place,
                                       int from = 0) const {
#pragma unroll 1
    for (; from < count; from += kAtOnce * spread.rows) copy_pass(to, from, spread, place);
  }
};

// Sizes in bytes. With padding, the reads of a fragment of x are apart in the banks: eight rows at
// once, 16 bytes each.
template <class Act, int kDstate>
struct TileShape {
  int x_pitch, old_rows, tokens;
  int gated;  // 0 or 1

  __device__ TileShape(const CheckpointingSsuParams& params, int most_old_rows, int padding = 16)
      : x_pitch(params.head_dim * static_cast<int>(sizeof(Act)) + padding),
        old_rows(most_old_rows),
        tokens(params.npredicted),
        gated(ptx::opaque(params.z != nullptr ? 1u : 0u)) {}
  __device__ int head_bytes() const { return (old_rows + (1 + gated) * tokens) * x_pitch; }
};

// Where row j of a step lies in its tiles.
struct RowMap {
  int first, ring_rows;
  __device__ __forceinline__ int old_row(const Window& window, int j) const {
    return ring_row(first, max(min(j, window.live - 1), 0), ring_rows);
  }
  // Of the rows read out: the old ones unless they are folded, then the new ones.
  __device__ __forceinline__ int row(const Window& window, int j) const {
    const int t = max(min(j, window.rows() - 1), 0) - window.old_rows();
    return t < 0 ? ring_row(first, t + window.live, ring_rows) : ring_rows + t;
  }
};

// The same where the old rows lie in their order, and the new ones from `ring_rows` on.
struct OrderedRows {
  int ring_rows;
  __device__ __forceinline__ int old_row(const Window& window, int j) const {
    return max(min(j, window.live - 1), 0);
  }
  __device__ __forceinline__ int row(const Window& window, int j) const {
    const int old_rows = window.old_rows(), last = max(min(j, window.rows() - 1), 0);
    return last < old_rows ? last : last + ring_rows - old_rows;
  }
};

// x and z of a head.
template <class Act, int kDstate>
struct HeadTile {
  unsigned char* x;
  const TileShape<Act, kDstate>& shape;

  // Starts the copies of `count` rows of the ring from ring row `first` on.
  __device__ __forceinline__ void copy_ring(const CheckpointingSsuParams& params,
                                            const Request& request, int head, int first, int count,
                                            const Spread& spread) const {
    const Act* ring = x_ring<Act>(params, request.slot, head) + 8 * spread.piece;
    const RingRows rows =
        ring_rows(params, reinterpret_cast<const unsigned char*>(ring), first, count);
    rows.copy(ring_place(spread), spread, [&](int row) { return row * shape.x_pitch; });
  }

  __device__ __forceinline__ void copy_tokens(const CheckpointingSsuParams& params,
                                              const Request& request, int head,
                                              const Spread& spread) const {
    const Act* x = x_of_token<Act>(params, request, head, spread.row) + 8 * spread.piece;
    copy_first_token(reinterpret_cast<const unsigned char*>(x), request.window.q, spread);
    copy_later_tokens(params, reinterpret_cast<const unsigned char*>(x), request.window.q, spread);
    if (shape.gated) copy_z(params, request, head, spread);
  }

  // Parts of these. The pieces that a thread begins with are those of its first row of `spread`.
  __device__ __forceinline__ static RingRows ring_rows(const CheckpointingSsuParams& params,
                                                       const unsigned char* ring, int first,
                                                       int count) {
    return {ring, RingRows::bytes<Act>(params.x_cache_row_stride), first, count,
            params.ring_buffer_len};
  }
  __device__ __forceinline__ ptx::smem_t ring_place(const Spread& spread) const {
    return ptx::to_smem(x) + 16 * spread.piece;
  }
  __device__ __forceinline__ ptx::smem_t token_place(const Spread& spread) const {
    return ring_place(spread) + (shape.old_rows + spread.row) * shape.x_pitch;
  }
  __device__ __forceinline__ void copy_first_token(const unsigned char* x, int q,
                                                   const Spread& spread) const {
    ptx::cp_async16_if_less(spread.row, q, token_place(spread), x);
  }
  __device__ __forceinline__ void copy_later_tokens(const CheckpointingSsuParams& params,
                                                    const unsigned char* x, int q,
                                                    const Spread& spread) const {
    copy_later_rows(token_place(spread), x, params.x_token_stride, q, spread);
  }
  __device__ __forceinline__ void copy_z(const CheckpointingSsuParams& params,
                                         const Request& request, int head,
                                         const Spread& spread) const {
    const Act* z = z_of_token<Act>(params, request, head, spread.row) + 8 * spread.piece;
    const ptx::smem_t to = token_place(spread) + shape.tokens * shape.x_pitch;
    ptx::cp_async16_if_less(spread.row, request.window.q, to, z);
    copy_later_rows(to, reinterpret_cast<const unsigned char*>(z), params.z_token_stride,
                    request.window.q, spread);
  }

  // Rows of x of a slab for `ldmatrix`, the slab's first column not counted: those read out with
  // the new ones, and the old ones.
  template <class Map>
  __device__ __forceinline__ ptx::smem_t new_x(const Map& map, const Window& window,
                                               const Lane& lane) const {
    return ptx::to_smem(x) + map.row(window, lane.transposed_row()) * shape.x_pitch +
           lane.transposed_column();
  }
  template <class Map>
  __device__ __forceinline__ ptx::smem_t old_x(const Map& map, const Window& window,
                                               const Lane& lane) const {
    return ptx::to_smem(x) + map.old_row(window, lane.transposed_row()) * shape.x_pitch +
           lane.transposed_column();
  }
  __device__ __forceinline__ const unsigned char* z() const {  // of token 0, if gated
    return x + (shape.old_rows + shape.tokens) * shape.x_pitch;
  }

  __device__ __forceinline__ void copy_later_rows(ptx::smem_t to, const unsigned char* from,
                                                  int64_t stride, int q,
                                                  const Spread& spread) const {
    stride *= spread.rows * static_cast<int>(sizeof(Act));
#pragma unroll 1
    for (int t = spread.row + spread.rows; t < q; t += spread.rows) {
      to += spread.rows * shape.x_pitch, from += stride;
      ptx::cp_async16(to, from);
    }
  }
};

// A row of B or C. Odd rows swap the halves of 128 bytes, so that two rows, 64 bytes each, are read
// without a bank conflict.
struct SwappedRow {
  const unsigned char* bytes;
  int swap;  // 0, or 64 in an odd row

  // Pieces of `kBytes` bytes that lie four apart, from piece t on.
  template <int kBytes>
  struct Pieces {
    const unsigned char *plus, *minus;
    template <class T>
    __device__ __forceinline__ T load(int J) const {
      return *reinterpret_cast<const T*>(piece(J));
    }
    __device__ __forceinline__ const unsigned char* piece(int J) const {
      const int offset = 4 * kBytes * J;
      return (offset & 64 ? minus : plus) + offset;
    }
  };
  template <int kBytes>
  __device__ __forceinline__ Pieces<kBytes> pieces(int t) const {
    if constexpr (kBytes < 32) return {bytes + kBytes * t + swap, bytes + kBytes * t - swap};
    const unsigned char* first = bytes + (kBytes * t ^ swap);
    return {first, first};
  }
};

// One row of B or C in the lanes' order of columns.
template <int kPiece, int kPairs>
__device__ __forceinline__ void load_row(uint32_t (&pairs)[kPairs], const SwappedRow& row, int t) {
  const auto pieces = row.pieces<2 * kPiece>(t);
#pragma unroll
  for (int J = 0; J < 2 * kPairs / kPiece; ++J) {
    uint32_t* to = pairs + J * kPiece / 2;
    if constexpr (kPiece == 4) {
      const uint2 v = pieces.template load<uint2>(J);
      to[0] = v.x, to[1] = v.y;
    } else {
      struct alignas(16) Piece {
        uint4 v[kPiece / 8];
      };
      const Piece piece = pieces.template load<Piece>(J);
#pragma unroll
      for (int i = 0; i < kPiece / 8; ++i) {
        const uint4 v = piece.v[i];
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
      }
    }
  }
}

// C and B of a group.
template <class Act, int kDstate>
struct GroupTile {
  unsigned char* C;
  const TileShape<Act, kDstate>& shape;
  static constexpr int kPitch = kDstate * sizeof(Act);  // of a row
  static_assert(kPitch % 128 == 0, "halves of 128 bytes are swapped");

  __device__ __forceinline__ void copy_ring(const CheckpointingSsuParams& params,
                                            const Request& request, int group, int first, int count,
                                            const Spread& spread) const {
    const Act* ring = B_ring<Act>(params, request.slot, group) + 8 * spread.piece;
    const RingRows rows = {reinterpret_cast<const unsigned char*>(ring),
                           RingRows::bytes<Act>(params.B_cache_row_stride), first, count,
                           params.ring_buffer_len};
    // Rows that lie an even number apart are swapped alike.
    const bool alike = spread.rows % 2 == 0;
    rows.copy(ptx::to_smem(B()), spread, [&](int row) {
      return row * kPitch + (16 * spread.piece ^ swap(alike ? spread.row : row));
    });
  }

  __device__ __forceinline__ void copy_tokens(const CheckpointingSsuParams& params,
                                              const Request& request, int group,
                                              const Spread& spread) const {
    const ptx::smem_t to_C = ptx::to_smem(C), to_B = ptx::to_smem(B());
    const Act* from_C = C_of_token<Act>(params, request, group, spread.row) + 8 * spread.piece;
    const Act* from_B = B_of_token<Act>(params, request, group, spread.row) + 8 * spread.piece;
    const auto copy = [&](int t) {
      ptx::cp_async16_if_less(t, request.window.q, to_C + place(t, spread), from_C);
      ptx::cp_async16_if_less(t, request.window.q, to_B + place(shape.old_rows + t, spread),
                              from_B);
    };
    copy(spread.row);
#pragma unroll 1
    for (int first = spread.rows; first < request.window.q; first += spread.rows) {
      from_C += spread.rows * params.C_token_stride, from_B += spread.rows * params.B_token_stride;
      copy(first + spread.row);
    }
  }

  // Of the thread's piece of a row.
  __device__ __forceinline__ int place(int row, const Spread& spread) const {
    return row * kPitch + (16 * spread.piece ^ swap(row));
  }
  __device__ __forceinline__ static int swap(int row) { return (row & 1) * 64; }

  __device__ __forceinline__ void copy_C(const CheckpointingSsuParams& params,
                                         const Request& request, int group,
                                         const Spread& spread) const {
    const ptx::smem_t to = ptx::to_smem(C);
    for (int t = spread.row; t < request.window.q; t += spread.rows) {
      const Act* from = C_of_token<Act>(params, request, group, t) + 8 * spread.piece;
      ptx::cp_async16(to + place(t, spread), from);
    }
  }

  __device__ __forceinline__ unsigned char* B() const { return C + shape.tokens * kPitch; }
  __device__ __forceinline__ SwappedRow B_row(int row) const {
    return {B() + row * kPitch, swap(row)};
  }
  __device__ __forceinline__ SwappedRow C_row(int t) const { return {C + t * kPitch, swap(t)}; }
};

// ---- a slab of state ----------------------------------------------------------------------------

// A slab of 16 rows as 16-byte pieces; odd rows swap the halves of 128 bytes, so that two rows, 64
// bytes each, are read without a bank conflict.
template <class State, int kDstate>
struct SlabTile {
  static constexpr int kPiecesOfRow = kDstate * static_cast<int>(sizeof(State)) / 16;
  static constexpr int kPieces = kRows * kPiecesOfRow, kBytes = 16 * kPieces;
  static constexpr bool kSwapped = kPiecesOfRow >= 8;
  unsigned char* bytes;

  // Where a thread's pieces begin in a tile: those of even and those of odd number. Whoever works
  // on many slabs keeps them; what the compiler would compute from their parts fills registers.
  struct Offsets {
    unsigned even, odd;
  };
  // Of the pieces that one thread of `kThreads`, a power of two, copies, and of those it reads.
  __device__ __forceinline__ static Offsets copied_by(unsigned thread) {
    const unsigned swap = kSwapped ? thread / kPiecesOfRow % 2 * 4 : 0, other = kSwapped ? 4 : 0;
    return {ptx::opaque(16 * (thread ^ swap)), ptx::opaque(16 * (thread ^ swap ^ other))};
  }
  __device__ __forceinline__ static Offsets read_by(const Lane& lane) {
    const unsigned swap = kSwapped ? lane.g & 1 : 0;
    const unsigned row = 16 * (lane.g * kPiecesOfRow + lane.t);
    return {ptx::opaque(row + 64 * swap), ptx::opaque(row + 64 * (1 - swap))};
  }

  // Starts the copies of one thread of `kThreads`; `slab` is the thread's first byte.
  template <int kThreads>
  __device__ __forceinline__ void copy(const unsigned char* slab, const Offsets& of_thread) const {
    const ptx::smem_t tile = ptx::to_smem(bytes);
    const ptx::smem_t to[2] = {tile + of_thread.even, tile + of_thread.odd};
#pragma unroll
    for (int i = 0; i < kPieces / kThreads; ++i) {
      ptx::cp_async16(to[i * kThreads / kPiecesOfRow % 2] + 16 * kThreads * i,
                      slab + 16 * kThreads * i);
    }
  }

  // The lane's pieces of row g (half 0) and g + 8 (half 1).
  struct Pieces {
    ptx::smem_t even, odd;
    __device__ __forceinline__ uint4 load(int half, int J) const {
      return ptx::load_shared16((J % 2 ? odd : even) + 128 * (half * kPiecesOfRow + J / 2));
    }
  };
  __device__ __forceinline__ Pieces pieces(const Offsets& of_lane) const {
    return {ptx::to_smem(bytes) + of_lane.even, ptx::to_smem(bytes) + of_lane.odd};
  }
};

}  // namespace replay
