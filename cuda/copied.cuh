// Steps on a state in two forms: fp16 carries the recurrence, and a copy of fewer bits is what
// outputs are read from. A flush folds the old rows into the one and makes the other anew from what
// was folded, before it is rounded, so that the copy's error is never folded again.
#pragma once
#include "flush.cuh"
#include "read_copy.cuh"

namespace replay {

// A slab of e2m1 codes and block scales lies in shared memory as it does in the copy.
template <int kDstate>
struct SlabTile<e2m1, kDstate> {
  static constexpr int kBytes = kCopyBytes<e2m1, kDstate>, kPieces = kBytes / 16;
  static constexpr int kPiece = kPieceOf<e2m1, kDstate>;  // columns of a lane that lie together
  unsigned char* bytes;

  struct Offsets {
    unsigned thread;
  };
  __device__ __forceinline__ static Offsets copied_by(unsigned thread) { return {thread}; }
  __device__ __forceinline__ static Offsets read_by(const Lane&) { return {0}; }
  __device__ __forceinline__ const SlabTile& pieces(const Offsets&) const { return *this; }

  template <int kThreads>
  __device__ __forceinline__ void copy(const unsigned char* slab, const Offsets& of_thread) const {
    const unsigned thread = of_thread.thread;
    const ptx::smem_t tile = ptx::opaque(ptx::to_smem(bytes) + 16 * thread);
#pragma unroll
    for (int i = 0; i < (kPieces + kThreads - 1) / kThreads; ++i) {
      ptx::cp_async16_if_less(thread + i * kThreads, kPieces, tile + 16 * kThreads * i,
                              slab + 16 * kThreads * i);
    }
  }

  // The codes of the lane's piece J of a row, eight a word.
  __device__ __forceinline__ void load(uint32_t (&words)[kPiece / 8], int row, int J,
                                       const Lane& lane) const {
    const unsigned char* from = bytes + row * (kDstate / 2) + kPiece / 2 * (4 * J + lane.t);
    if constexpr (kPiece == 32) {
      const uint4 v = ptx::load_shared16(ptx::to_smem(from));
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    }
  }

  // The scale of block `block` of that piece, as `block_scale_pair` has it.
  __device__ __forceinline__ uint32_t scale(int row, int J, int block, const Lane& lane) const {
    const int of_row = kPiece / 16 * (4 * J + lane.t) + block;
    return convert::block_scale_pair(bytes[8 * kDstate + row * (kDstate / 16) + of_row]);
  }
};

// acc += S C^T of a slab, without the scales of its rows.
template <class Act, int kDstate, int kTokenTiles>
__device__ __forceinline__ void read_out_slab(
    float (&acc)[kTokenTiles][4], const SlabTile<e2m1, kDstate>& slab,
    const Readers<e2m1, Act, kDstate, kTokenTiles>& readers, const Lane& lane) {
  constexpr int kWords = SlabTile<e2m1, kDstate>::kPiece / 8;  // of a piece
  float sums[2][kTokenTiles][4] = {};  // two short chains of products instead of a long one
#pragma unroll
  for (int J = 0; J < kDstate / (32 * kWords); ++J) {
    uint32_t words[2][kWords], scale[2];
    slab.load(words[0], lane.g, J, lane);
    slab.load(words[1], lane.g + 8, J, lane);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t pairs[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (w % 2 == 0) scale[h] = slab.scale(lane.g + 8 * h, J, w / 2, lane);
        convert::unpack_e2m1(words[h][w], pairs[h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[h][i] = convert::multiply_halves(pairs[h][i], scale[h]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a[4] = {pairs[0][2 * i], pairs[1][2 * i], pairs[0][2 * i + 1],
                               pairs[1][2 * i + 1]};
        const int r = 4 * (J * kWords + w) + 2 * i;
#pragma unroll
        for (int tile = 0; tile < kTokenTiles; ++tile) {
          ptx::mma_m16n8k16_f16(sums[i][tile], a, readers.C[tile][r], readers.C[tile][r + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[tile][i] += (sums[0][tile][i] + sums[1][tile][i]) * convert::kE2m1Unit;
    }
  }
}

// Where a slab that was folded goes, in both forms.
template <class Copy, int kDstate>
struct BothTargets {
  const CheckpointingSsuParams& params;
  fp16* checkpoint;  // the lane's first piece in row g
  unsigned char* copy;
  float* scale;  // of row g; that of row g + 8 lies 8 behind
  unsigned slot;

  // Flushes of a slot that are numbered differ in their bits, whatever the seed.
  __device__ __forceinline__ Rounding rounding() const {
    Rounding found(params);
    if (params.events != nullptr) {
      found.seed = convert::mix_seed(found.seed, params.events[slot * params.events_stride]);
    }
    return found;
  }

  // Row g + 8 h.
  __device__ __forceinline__ void put_row(const float2 (&folded)[kDstate / 8], int h,
                                          const Rounding& rounding, const Lane& lane) const {
    fp16* to = checkpoint + 8 * h * kDstate;
#pragma unroll
    for (int J = 0; J < kDstate / 32; ++J) {
      const float2 piece[4] = {folded[4 * J], folded[4 * J + 1], folded[4 * J + 2],
                               folded[4 * J + 3]};
      const int64_t offset = to + 32 * J - static_cast<const fp16*>(params.state);
      ptx::store_keep16(to + 32 * J,
                        rounding.rounds > 0
                            ? encode_piece_of_row<fp16, true>(piece, rounding, offset)
                            : encode_piece_of_row<fp16, false>(piece, rounding, offset));
    }
    store_copied_row<Copy, kDstate>(copy, lane.g + 8 * h, scale + 8 * h, folded, lane);
  }
};

// Asks the L2 for the checkpoint of a head that is going to be folded.
__device__ __forceinline__ void prefetch_checkpoint(const fp16* checkpoint, int bytes,
                                                    const Lane& lane) {
  constexpr int kLine = 128;
  for (int i = kLine * lane.index; i < bytes; i += 32 * kLine) {
    ptx::prefetch_L2(reinterpret_cast<const unsigned char*>(checkpoint) + i);
  }
}

// Rows g and g + 8 of a slab of the checkpoint with the old rows folded in.
template <class Act, int kDstate>
__device__ __forceinline__ void fold_checkpoint(float2 (&rows)[2][kDstate / 8],
                                                const fp16* checkpoint, const unsigned char* B,
                                                const Fold<fp16>& fold, const Lane& lane) {
  constexpr int kMost = kExactTerms<Act> == 1 ? 4 : 2;  // two terms of B need the registers
  constexpr int kPieces = kDstate / 32, kAtOnce = kPieces < kMost ? kPieces : kMost;
  const uint4* operands = reinterpret_cast<const uint4*>(B) + lane.index;
  const float decay[2] = {fold.decay, fold.decay};
#pragma unroll
  for (int first = 0; first < kPieces; first += kAtOnce) {
    uint4 pieces[2][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        pieces[h][i] = ptx::ld_global_v4(checkpoint + 32 * (first + i) + 8 * h * kDstate);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float2 folded[2][4];
      fold_piece<fp16, Act>(
          folded[0], folded[1], pieces[0][i], pieces[1][i],
          [&](int q) { return operands[64 * (first + i) + 16 * q]; }, decay, fold);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int q = 0; q < 4; ++q) rows[h][4 * (first + i) + q] = folded[h][q];
      }
    }
  }
}

// Folds the old rows into one slab of the checkpoint and stores it and its copy. `B` is as
// `prepare_B<fp16>` left it.
template <class Copy, class Act, int kDstate>
__device__ __forceinline__ void fold_copied_slab(const BothTargets<Copy, kDstate>& target,
                                                 const unsigned char* B, const Fold<fp16>& fold,
                                                 const Lane& lane) {
  float2 rows[2][kDstate / 8];
  fold_checkpoint<Act, kDstate>(rows, target.checkpoint, B, fold, lane);
  const Rounding rounding = target.rounding();
  // One row after the other through the same code: registers hold no more.
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    target.put_row(rows[0], h, rounding, lane);
#pragma unroll
    for (int i = 0; i < kDstate / 8; ++i) rows[0][i] = rows[1][i];
  }
}

}  // namespace replay
