// The step of checkpointing_ssu.cu for few heads, where time is latency. What it stores is the same
// bit for bit; its outputs are fp32 sums in another order.
//
// Grid: one block per head (x), batch row (y) and part of the head (z); with more rows than y
// takes, rows along x and heads along y. Warps have one of three tasks. State warps ask for rows p
// of the checkpoint, and for x of the ring, as soon as the slot is known, and sum S C_t, eight
// lanes a row. Three weight warps ask for rows of B meanwhile, and compute what each row weighs in
// each output; the last of them appends B and dt of the new rows. Then the state warps add the rows
// up. One more warp appends x and, where the sequence flushes, weighs the old rows for the fold.
// Ring rows go by their places in the ring, so that no load waits for the cursors. Dead rows come
// along and are never used.
// Outputs come from the checkpoint as it was and from all rows, so a flush only adds work: at the
// end all warps fold the old rows into the checkpoint, a piece of a slab of 16 rows at a time.
// Time is instructions here, before the loads above all. So what every step has is straight, what
// few have stands aside, and addresses are made of strides in bytes, one instruction each.
#include "flush.cuh"
#include "read_out.cuh"
#include "weigh.cuh"

using namespace replay;

// ---- before the kernel ahead has ended ----------------------------------------------------------

template <class T>
__device__ __forceinline__ void prefetch_rows(const T* first, int64_t stride, int rows,
                                              int elements) {
  constexpr int kOfLine = 128 / sizeof(T);
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    for (int k = 0; k < elements; k += kOfLine) ptx::prefetch_L2(first + i * stride + k);
  }
}

// Asks the L2 for what belongs to the slot. That is safe at any time: nothing comes of it but that
// later reads are faster, so the slot may be one of before. A call: in line, steps that do not
// start early would jump over it.
template <class State, class Act, int kDstate>
__device__ __noinline__ void prefetch(const CheckpointingSsuParams& params) {
  const int row = batch_row_of_block(params.flags), head = head_of_block(params.flags);
  const int first_row = blockIdx.z * params.rows_of_block;
  unsigned slot = row;
  if (params.slots != nullptr) {
    const int64_t place = row * params.slots_stride * (params.slots_type == kInt64 ? 8 : 4);
    slot = ptx::ld_relaxed_gpu_u32(static_cast<const char*>(params.slots) + place);
  }
  if (slot >= static_cast<unsigned>(params.num_slots)) return;
  const unsigned group = group_of(params, head);
  const int rows = params.ring_buffer_len;
  prefetch_rows(ring_start_of(params, slot), 0, 1, 1);
  prefetch_rows(live_rows_of(params, slot), 0, 1, 1);
  const State* state = static_cast<const State*>(params.state) + slot * params.state_slot_stride +
                       head * params.state_head_stride + first_row * kDstate;
  prefetch_rows(state, kDstate, min(params.rows_of_block, params.head_dim - first_row), kDstate);
  prefetch_rows(x_ring<Act>(params, slot, head), params.x_cache_row_stride, rows, params.head_dim);
  prefetch_rows(B_ring<Act>(params, slot, group), params.B_cache_row_stride, rows, kDstate);
  prefetch_rows(dt_ring(params, slot, head), params.dt_cache_row_stride, rows, 1);
}

// ---- flush: all warps ---------------------------------------------------------------------------

// It keeps nothing of what the warps had before, which would take registers from them.
template <class State, class Act, int kDstate, int kTokens>
struct FoldWarp {
  // What a warp folds at a time: 16 rows of a slab, and of them 16 bytes a lane, or 8 of an 8-bit
  // state. Lane 4 g + t has rows g and g + 8.
  struct Piece {
    static constexpr int kPairs = sizeof(State) == 4 ? 2 : 4, kColumns = 2 * kPairs;
    static constexpr int kBytes = kColumns * sizeof(State);  // of a lane in a row
    static constexpr int kCount = kDstate / (4 * kColumns);  // of a slab
    float2 v[2][kPairs];
  };
  static constexpr int kPieces = Piece::kCount;

  const CheckpointingSsuParams& params;
  Shared<kTokens>& shared;
  const Lane at;
  const int warps, warp;
  // In the first slab, where the lane's part of row g is, its scale, and the same element of four
  // old rows of x: 2 t and 2 t + 1, and those 8 behind.
  Bytes state, scale, x[4];
  // B of the old rows as operands of the piece that they were loaded for, see `prepare_B`.
  uint32_t b[2][Piece::kPairs];

  // Old row j of a ring of the sequence, behind its first byte of `index`.
  __device__ __forceinline__ Bytes old_row(int j, Bytes ring, int slot_bytes, unsigned index,
                                           int index_bytes, int row_bytes) const {
    const Window window = {shared.start, shared.live, 0, true};
    const RowMap map = {window.start, params.ring_buffer_len};
    const Bytes first = behind(behind(ring, index, index_bytes), shared.slot, slot_bytes);
    return behind(first, map.old_row(window, j), row_bytes);
  }

  __device__ __forceinline__ FoldWarp(const CheckpointingSsuParams& p, Shared<kTokens>& s)
      : params(p), shared(s), warps(p.threads / 32), warp(threadIdx.x >> 5) {
    const unsigned head = shared.head, row = blockIdx.z * p.rows_of_block + at.g;
    state = behind(behind(bytes_of(params.state), shared.slot, params.state_slot_bytes), head,
                   params.state_head_bytes);
    state += static_cast<unsigned>(row * kDstate * sizeof(State) + at.t * Piece::kBytes);
    if constexpr (convert::kScaled<State>) {
      scale = behind(bytes_of(params.state_scale), shared.slot, params.state_scale_slot_bytes);
      scale = behind(scale, head, params.state_scale_head_bytes) + 4u * row;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 2 * at.t + 8 * (i >> 1) + (i & 1);
      x[i] = old_row(j, bytes_of(params.x_cache), params.x_cache_slot_bytes, head,
                     params.x_cache_head_bytes, params.x_cache_row_bytes);
      x[i] += static_cast<unsigned>(row * sizeof(Act));
    }
  }

  __device__ __forceinline__ void load_B(unsigned n) {
    const unsigned bytes = (4 * n + at.t) * static_cast<unsigned>(Piece::kColumns * sizeof(Act));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Bytes B = old_row(8 * i + at.g, bytes_of(params.B_cache), params.B_cache_slot_bytes,
                              group_of(params, shared.head), params.B_cache_group_bytes,
                              params.B_cache_row_bytes);
      load_words(b[i], B + bytes);
#pragma unroll
      for (int r = 0; r < Piece::kPairs; ++r) b[i][r] = ptx::movmatrix(b[i][r]);
    }
  }

  // Row g of the slab at piece n.
  __device__ __forceinline__ State* place_of(unsigned slab, unsigned n) const {
    const unsigned offset = slab * kRows * kDstate * sizeof(State) + n * 4 * Piece::kBytes;
    return reinterpret_cast<State*>(const_cast<unsigned char*>(state + offset));
  }
  __device__ __forceinline__ float* scale_of(unsigned slab) const {
    return reinterpret_cast<float*>(const_cast<unsigned char*>(scale + 4 * kRows * slab));
  }

  // What a piece takes from memory: of rows g and g + 8, and of each old row the x of both.
  struct Asked {
    uint32_t stored[2][4];
    uint32_t x[4][2];
    float scale[2];
  };
  __device__ __forceinline__ void ask(Asked& in, unsigned slab, unsigned n) const {
    constexpr int kWords = Piece::kBytes / 4;
    constexpr unsigned kBytesOfHalf = 8 * sizeof(Act);
    const State* from = place_of(slab, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(in.stored[h]),
                         from + 8 * h * kDstate);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Bytes of_slab = x[i] + 2 * kBytesOfHalf * slab;
#pragma unroll
      for (int h = 0; h < 2; ++h) in.x[i][h] = ptx::ld_global_u16(of_slab + kBytesOfHalf * h);
    }
    if constexpr (convert::kScaled<State>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) in.scale[h] = scale_of(slab)[8 * h];
    }
  }

  // Of pairs q and q + 1. What an fp16 pair is unpacked to would fill registers from slab to slab.
  __device__ __forceinline__ uint4 operands(int q) const {
    return make_uint4(ptx::opaque(b[0][q]), ptx::opaque(b[1][q]), ptx::opaque(b[0][q + 1]),
                      ptx::opaque(b[1][q + 1]));
  }

  // Folds the old rows into a piece; B is there as its operands.
  __device__ __forceinline__ void fold(Piece& piece, const Asked& in) const {
    uint32_t rows_of_x[4];  // as an A operand
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows_of_x[i] = in.x[i & 2][i & 1] | in.x[(i & 2) + 1][i & 1] << 16;
    }
    const Fold<State> rows =
        prepare_fold<State, Act>(FoldWeights(shared.fold_weights, at), rows_of_x);
    ptx::keep_order();  // what is unpacked early fills registers
    float decay[2] = {rows.decay, rows.decay};
    if constexpr (convert::kScaled<State>) decay[0] *= in.scale[0], decay[1] *= in.scale[1];
    const auto words = [&](int h) {
      return make_uint4(in.stored[h][0], in.stored[h][1], in.stored[h][2], in.stored[h][3]);
    };
    fold_piece<State, Act>(
        piece.v[0], piece.v[1], words(0), words(1), [&](int q) { return operands(q); }, decay,
        rows);
  }

  __device__ __forceinline__ void run() {
    const int left = params.head_dim - static_cast<int>(blockIdx.z * params.rows_of_block);
    const int pieces = min(params.rows_of_block, left) / kRows * kPieces;
    if constexpr (convert::kScaled<State>) {
      // Whole slabs, so that a warp has the same piece each time.
      const int at_once = warps & ~(kPieces - 1), n = warp % kPieces;
      for (int first = 0; first < pieces; first += at_once) {
        flush_scaled(first + warp, n, warp < at_once ? pieces : 0);
      }
    } else {
      for (int i = warp; i < pieces; i += warps) {
        const int slab = i / kPieces, n = i % kPieces;
        Asked in = {};
        ask(in, slab, n);
        if (i == warp || warps % kPieces != 0) load_B(n);
        Piece piece;
        fold(piece, in);
        Target<State, kDstate>{params, place_of(slab, n), nullptr}.put(piece.v, 0);
      }
    }
  }

  // Piece i of the block's slabs, if there is one, which is piece n of its slab: a row is encoded
  // when all of its pieces are known.
  __device__ __forceinline__ void flush_scaled(int i, int n, int pieces) {
    const unsigned slab = static_cast<unsigned>(i) / kPieces, of_block = kRows * slab + at.g;
    Piece piece;
    if (i < pieces) {
      Asked in = {};
      ask(in, slab, n);
      if (i == warp) load_B(n);
      fold(piece, in);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float amax = of_row(largest(piece.v[h]));
        if (at.t == 0) shared.largest[of_block + 8 * h][n] = amax;
      }
    }
    __syncthreads();
    if (i >= pieces) return;
    convert::RowScale scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* of_pieces = shared.largest[of_block + 8 * h];
      float amax = of_pieces[0];
#pragma unroll
      for (int k = 1; k < kPieces; ++k) amax = ptx::max_magnitude(amax, of_pieces[k]);
      scales[h] = convert::row_scale<State>(amax);
      if (n == 0 && at.t == 0) scale_of(slab)[8 * h] = scales[h].decode;
    }
    Target<State, kDstate>{params, place_of(slab, n), nullptr}.put_half(piece.v, scales);
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

constexpr int kMostWarps = 16;  // of a block; twice as many are resident, in blocks of any size

// A plain step, see `kPlainFlags`, has an instance of its own.
template <class State, class Act, int kDstate, int kTokens, bool kPlain = false>
__global__ void __launch_bounds__(32 * kMostWarps, kDstate <= 128 ? 2 : 1)
    checkpointing_ssu_small(const __grid_constant__ CheckpointingSsuParams params) {
  if (ptx::kHasDependentLaunch && __builtin_expect((params.flags & kStartsEarly) != 0, 0)) {
    prefetch<State, Act, kDstate>(params);
  }
  ptx::grid_dependency_wait();
  constexpr int kQuads = most_quads<State, kDstate, kTokens>();
  Block<kTokens, kPlain> block(params, *reinterpret_cast<Shared<kTokens>*>(ptx::dynamic_smem()));
  ptx::grid_dependency_launch();
  if (block.has(kPacked)) ptx::aside([&] { block.find_tokens(); });
  const int task = block.warp - params.state_warps;
  int flush;
  if (__builtin_expect(task < 0, 1)) {
    if (!block.has(kSeveralQuads)) {
      flush = StateWarp<State, Act, kDstate, kTokens, kPlain, 1>(block).run();
    } else {
      flush = StateWarp<State, Act, kDstate, kTokens, kPlain, kQuads>(block).run();
    }
  } else if (task < kWeightWarps) {
    flush = WeightWarp<Act, kDstate, kTokens, kPlain>(block).run();
  } else {
    flush = RingWarp<Act, kTokens, kPlain>(block).run();
  }
  if (flush == 0) return;
  __syncthreads();  // the weights are there, and all have read the checkpoint
  FoldWarp<State, Act, kDstate, kTokens>(params, block.shared).run();
}
