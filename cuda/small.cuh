// What the warps of the small form share: its rows, its shared memory, and how lanes lie in both.
#pragma once
#include "step.cuh"

namespace replay {

constexpr int kLanesOfRow = 8, kRowsOfWarp = 4;
constexpr int kMostRowsOfBlock = 64;  // p

// Instead of exp(c_t - c_r) dt_r of a row that is not there: a zero of the sign that no other has.
constexpr float kUnseen = -0.0f;
__device__ __forceinline__ bool is_seen(float decayed_dt) {
  return __float_as_uint(decayed_dt) != __float_as_uint(kUnseen);
}

// The rows of a step: those of the ring by their places, and the new tokens last. What lies between
// is not there.
constexpr int kStepRows = 24;
template <int kTokens>
constexpr int kFirstToken = kStepRows - kTokens;

template <int kTokens>
struct Shared {
  // What a row weighs in an output is a product: C_t . B_r, and exp(c_t - c_r) dt_r of a ring row.
  struct alignas(8) Weight {
    float decayed_dt, product;
  };
  alignas(16) Weight weights[kStepRows][kTokens];
  alignas(16) float decays[kTokens];       // of the checkpoint: exp(c_t)
  float decayed_new_dt[kTokens][kTokens];  // of the new rows, by row and token
  float D;
  int flush;
  // What a flush takes: the step's row of the first old one, what they weigh (see
  // `put_fold_weights`), and the largest magnitudes in the pieces of 8-bit rows.
  int slot, head, start, live;
  float fold_weights[kRows + 4];
  alignas(16) float largest[kMostRowsOfBlock][8];
};

// The ring rows that a flush folds, by their rows of the step, behind `Shared`. The padding keeps
// eight rows apart in the banks.
template <int kDstate>
struct OldRows {
  static constexpr int kPitchOfB = 2 * kDstate + 16, kPitchOfX = 2 * kMostRowsOfBlock + 16;
  alignas(16) unsigned char B[kStepRows][kPitchOfB];
  unsigned char x[kStepRows][kPitchOfX];  // from the block's first row p on

  template <int kTokens>
  __device__ __forceinline__ static OldRows& behind(Shared<kTokens>& shared) {
    return *reinterpret_cast<OldRows*>(&shared + 1);
  }
};

// A field of the record and those behind it, of which each lane takes its own.
template <class T>
__device__ __forceinline__ T field_behind(const T& field, unsigned offset_in_bytes) {
  const auto* first = reinterpret_cast<const unsigned char*>(&field);
  return *reinterpret_cast<const T*>(first + offset_in_bytes);
}

// An address in an array of any type, and another `n` times `stride` bytes behind it: one
// instruction. Addresses come from the record as if each lane had its own: those of the whole warp
// are added to in two.
using Bytes = const unsigned char*;
template <class T>
__device__ __forceinline__ Bytes bytes_of(T* const& array, unsigned offset_in_bytes = 0) {
  return reinterpret_cast<Bytes>(field_behind(array, ptx::zero_of_lane() + offset_in_bytes));
}
__device__ __forceinline__ Bytes behind(Bytes p, unsigned n, unsigned stride) {
  return ptx::mad_wide(n, stride, p);
}

// What tells that an address is known, see `zero_behind`.
__device__ __forceinline__ unsigned low_bits(Bytes p) {
  return static_cast<unsigned>(reinterpret_cast<uint64_t>(p));
}

__device__ __forceinline__ unsigned group_of(const CheckpointingSsuParams& params, unsigned head) {
  if constexpr (CheckpointingSsuParams::kKnown) {
    return head / static_cast<unsigned>(params.heads_per_group);
  }
  return __umulhi(2 * head, static_cast<unsigned>(params.inverse_heads_per_group));
}

// How eight lanes share a row of kDstate values: in pieces of up to 16 bytes, which lie side by
// side.
template <class T, int kDstate>
struct RowPieces {
  static constexpr int kBytes = kDstate * sizeof(T) < 128 ? kDstate * sizeof(T) / 8 : 16;
  static constexpr int kColumns = kBytes / sizeof(T), kCount = kDstate / kLanesOfRow / kColumns;
  __device__ __forceinline__ static uint4 load(Bytes piece) {
    if constexpr (kBytes == 16) return ptx::ld_global_v4(piece);
    const uint2 half = ptx::ld_global_v2(piece);
    return make_uint4(half.x, half.y, 0, 0);
  }
};

__device__ __forceinline__ float load_float(Bytes p) {
  return __uint_as_float(ptx::ld_global_u32(p));
}

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const void* from) {
  if constexpr (kWords == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = static_cast<const uint4*>(from)[i / 4];
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  }
}

// Sums over the lanes of a row, of which each gets that of v[lane % kCount].
template <int kCount>
__device__ __forceinline__ float sum_of_row(float (&v)[kCount], int lane) {
  int step = 1;
#pragma unroll
  for (int count = kCount; count > 1; count /= 2, step *= 2) {
    const bool odd = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float kept = odd ? v[2 * i + 1] : v[2 * i], given = odd ? v[2 * i] : v[2 * i + 1];
      v[i] = kept + __shfl_xor_sync(kAllLanes, given, step);
    }
  }
#pragma unroll
  for (; step < kLanesOfRow; step *= 2) v[0] += __shfl_xor_sync(kAllLanes, v[0], step);
  return v[0];
}

// What a plain step has of the flags that make code of their own, and all of them: to skip code
// takes time, as jumps and looks at the record do.
constexpr int kPlainFlags = kHasSlots | kByPlace;
constexpr int kSettledFlags = kPlainFlags | kSlotsInt64 | kPacked | kGated | kWideOut |
                              kHalfScalars | kForcedFlushes | kRowsFirst;

// A block of the small form as each of its warps sees it.
template <int kTokens, bool kPlain>
struct Block {
  const CheckpointingSsuParams& params;
  Shared<kTokens>& shared;
  // The flag that tells how heads and sequences lie in the grid, unless that is known.
  static constexpr int kOrder = kPlain ? 0 : kRowsFirst;
  const int flags;
  int low, high;  // the slot as it is given
  int warp, lane;
  unsigned head, group;
  int first_row;      // p of the block
  unsigned sequence;  // whose tokens these are, or their first one in a packed batch
  Request request;    // slot and window are known late

  // The slot may be one of before, of a step that starts early.
  __device__ __forceinline__ Block(const CheckpointingSsuParams& p, Shared<kTokens>& s)
      : params(p),
        shared(s),
        flags(p.flags),
        low(batch_row_of_block(flags & kOrder) + ptx::zero_of_lane()),
        high(0) {
    sequence = low;
    if (has(kHasSlots)) {
      const Bytes slot = place_of_slot();
      low = ptx::ld_global_u32(slot);
      if (has(kSlotsInt64)) ptx::aside([&] { high = ptx::ld_global_u32(slot + 4); });
    }
    ptx::keep_order();
    warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    head = head_of_block(flags & kOrder) + ptx::zero_of_lane(), group = group_of(p, head);
    first_row = blockIdx.z * p.rows_of_block;
    request = {-1, batch_row_of_block(flags & kOrder), 0, {0, 0, kTokens, false}};
  }

  // An address of the whole warp: the shortest way to the first load.
  __device__ __forceinline__ Bytes place_of_slot() const {
    const unsigned bytes = params.kKnown ? has(kSlotsInt64) ? 8 : 4 : params.slots_bytes;
    return static_cast<Bytes>(params.slots) +
           static_cast<uint64_t>(batch_row_of_block(flags & kOrder)) * bytes;
  }
  __device__ __forceinline__ void ask_for_slot_again() {
    if (!has(kHasSlots)) return;
    const Bytes slot = place_of_slot();
    low = ptx::ld_relaxed_gpu_u32(slot);
    if (has(kSlotsInt64)) high = ptx::ld_relaxed_gpu_u32(slot + 4);
  }

  __device__ __forceinline__ bool has(SmallFlag flag) const {
    if (kPlain && (flag & kSettledFlags) != 0) return (flag & kPlainFlags) != 0;
    return (flags & flag) != 0;
  }

  // Where the sequence's tokens lie in a packed batch. Without any, all warps but the last have
  // nothing to do but a flush that is forced: they become ones without rows.
  __device__ __forceinline__ void find_tokens() {
    const int first = params.cu_seqlens[request.row], end = params.cu_seqlens[request.row + 1];
    sequence = first;
    request.window.q = min(max(end - first, 0), params.npredicted);
    if (request.window.q == 0 && threadIdx.x < params.threads - 32) warp = kNoWarp;
  }
  static constexpr int kNoWarp = -65536;  // no row of it is one of the head

  // Waits for the slot. What `known` is made of is there before that: the compiler would read it
  // from the record behind the wait.
  __device__ __forceinline__ bool is_padding(unsigned known = 0) {
    request.slot = low;
    const unsigned slots = field_behind(params.num_slots, ptx::zero_behind(known));
    const int pad = field_behind(params.pad_slot, ptx::zero_behind(known));
    return (static_cast<unsigned>(low) >= slots) | (high != 0) | (low == pad);
  }
  // Of two tokens of which the second is not there, the first stands in for it.
  __device__ __forceinline__ int token(int t) const {
    return kTokens == 1 ? 0 : min(t, request.window.q - 1);
  }
  // The row's token, if it has one, is its distance from kFirstToken.
  __device__ __forceinline__ static int token_of_row(int r) { return r - kFirstToken<kTokens>; }
  __device__ __forceinline__ int rows_of_block() const {
    return min(params.rows_of_block, params.head_dim - first_row);
  }

  // Token t in an array of (sequence, token, head or group, columns).
  __device__ __forceinline__ Bytes token_in(Bytes array, int sequence_bytes, unsigned index,
                                            int index_bytes, int t, int token_bytes) const {
    const Bytes first = behind(behind(array, sequence, sequence_bytes), index, index_bytes);
    return kTokens == 1 ? first : behind(first, token(t), token_bytes);
  }
  __device__ __forceinline__ Bytes C_of_token(int t) const {
    return token_in(bytes_of(params.C), params.C_sequence_bytes, group, params.C_group_bytes, t,
                    params.C_token_bytes);
  }
  __device__ __forceinline__ Bytes x_of_token(int t) const {
    return token_in(bytes_of(params.x), params.x_sequence_bytes, head, params.x_head_bytes, t,
                    params.x_token_bytes);
  }

  // Long rings go by their live rows instead of by places, and wait for the first one's: where row
  // r lies.
  __device__ __forceinline__ int place_of(int r) const {
    const int first = ptx::ld_global_u32(ring_start_of_slot());
    return ring_row(min(max(first, 0), params.ring_buffer_len - 1), r, params.ring_buffer_len);
  }
  __device__ __forceinline__ Bytes ring_start_of_slot() const {
    return behind(bytes_of(params.ring_start), request.slot, params.ring_start_bytes);
  }
  __device__ __forceinline__ Bytes live_rows_of_slot() const {
    return behind(bytes_of(params.prev_num_accepted_tokens), request.slot,
                  params.prev_num_accepted_tokens_bytes);
  }
  // As `set_window` does.
  __device__ __forceinline__ void find_window() {
    find_window(ptx::ld_global_u32(ring_start_of_slot()), ptx::ld_global_u32(live_rows_of_slot()));
  }
  __device__ __forceinline__ void find_window(int start, int live) {
    bool forced = false;
    if (has(kForcedFlushes)) {
      ptx::aside(
          [&] { forced = params.force_flush[request.row * params.force_flush_stride] != 0; });
    }
    set_window(params, request, start, live, forced);
  }

  // Where token t goes in a ring of the sequence, behind the live rows.
  __device__ __forceinline__ unsigned char* new_row(Bytes ring, int slot_bytes, unsigned index,
                                                    int index_bytes, int t, int row_bytes) const {
    const Window& window = request.window;
    int row = ring_row(window.start, window.live, params.ring_buffer_len);
    if (kTokens > 1) row = ring_row(row, t, params.ring_buffer_len);
    const Bytes first = behind(behind(ring, index, index_bytes), request.slot, slot_bytes);
    return const_cast<unsigned char*>(behind(first, row, row_bytes));
  }

  // Of a sequence without tokens, whose rows nobody has asked for.
  template <int kDstate>
  __device__ __forceinline__ void copy_old_rows() {
    request.slot = low;
    auto& rows = OldRows<kDstate>::behind(shared);
    const Bytes B = behind(behind(bytes_of(params.B_cache), group, params.B_cache_group_bytes),
                           request.slot, params.B_cache_slot_bytes);
    const Bytes x = behind(behind(bytes_of(params.x_cache), head, params.x_cache_head_bytes),
                           request.slot, params.x_cache_slot_bytes);
    const int first = 2 * first_row, bytes_of_x = 2 * rows_of_block();
    for (int r = threadIdx.x >> 5; r <= params.last_row; r += params.threads / 32) {
      const int place = has(kByPlace) ? r : place_of(r);
      for (int i = 16 * lane; i < 2 * kDstate; i += 16 * 32) {
        *reinterpret_cast<uint4*>(rows.B[r] + i) =
            ptx::ld_global_v4(behind(B, place, params.B_cache_row_bytes) + i);
      }
      if (16 * lane < bytes_of_x) {
        *reinterpret_cast<uint4*>(rows.x[r] + 16 * lane) =
            ptx::ld_global_v4(behind(x, place, params.x_cache_row_bytes) + first + 16 * lane);
      }
    }
  }
  // Whether it flushes.
  __device__ __forceinline__ int run_without_tokens() {
    find_window();
    return request.window.flush;
  }
};

}  // namespace replay
