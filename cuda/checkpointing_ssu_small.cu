// The step of checkpointing_ssu.cu for few heads, where time is latency. What it stores is the same
// bit for bit; its outputs are fp32 sums in another order.
//
// Grid: one block per head (x), batch row (y) and part of the head (z); with more rows than y
// takes, rows along x and heads along y. Warps have one of three tasks. State warps ask for rows p
// of the checkpoint, and for x of the ring, as soon as the slot is known, and sum S C_t, eight
// lanes a row. Three product warps ask for rows of B and multiply them with C; the last one appends
// B of the new rows. The decay warp finds what else the rows weigh, and appends x and dt. Then the
// state warps add the rows up.
// Ring rows go by their places in the ring, so that no load waits for the cursors. Dead rows come
// along and are never used.
// Outputs come from the checkpoint as it was and from all rows, so a flush only adds work: at the
// end all warps fold the old rows into the checkpoint, a piece of a slab of 16 rows at a time. The
// warps that have these rows hand them over in shared memory.
// Time is latency: of the first look at the record, of the slot, of memory. So what the slot leads
// to is asked for before all else, what every step has is straight, what few have stands aside, and
// addresses are made of strides in bytes, one instruction each.
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
__device__ __noinline__ void prefetch(const CheckpointingSsuParams& params, unsigned slot) {
  const int head = head_of_block(params.flags);
  const int first_row = blockIdx.z * params.rows_of_block;
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
  // In the first slab, where the lane's part of row g is, and its scale.
  Bytes state, scale;
  // Rows of x for `ldmatrix`, and the lane's parts of rows g and g + 8 of B.
  ptx::smem_t x;
  const unsigned char* B[2];

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
    const auto& rows = OldRows<kDstate>::behind(shared);
    const Window window = {shared.start, shared.live, 0, true};
    const RowMap map = {window.start, params.ring_buffer_len};
    x = ptx::to_smem(rows.x[map.old_row(window, at.transposed_row())]) + at.transposed_column();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      B[i] = rows.B[map.old_row(window, 8 * i + at.g)] + at.t * Piece::kColumns * sizeof(Act);
    }
  }

  // B of the old rows as operands of piece n, see `prepare_B`.
  __device__ __forceinline__ void load_B(uint32_t (&b)[2][Piece::kPairs], unsigned n) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words(b[i], B[i] + n * static_cast<unsigned>(4 * Piece::kColumns * sizeof(Act)));
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

  // What a piece takes from memory, of rows g and g + 8.
  struct Asked {
    uint32_t stored[2][4];
    float scale[2];
  };
  __device__ __forceinline__ void ask(Asked& in, unsigned slab, unsigned n) const {
    constexpr int kWords = Piece::kBytes / 4;
    const State* from = place_of(slab, n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(in.stored[h]),
                         from + 8 * h * kDstate);
    }
    if constexpr (convert::kScaled<State>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) in.scale[h] = scale_of(slab)[8 * h];
    }
  }

  // Folds the old rows into piece n of a slab.
  __device__ __forceinline__ void fold(Piece& piece, const Asked& in, unsigned slab,
                                       unsigned n) const {
    uint32_t b[2][Piece::kPairs], rows_of_x[4];
    load_B(b, n);
    ptx::ldmatrix_x4_trans(rows_of_x, x + slab * static_cast<unsigned>(kRows * sizeof(Act)));
    const Fold<State> rows =
        prepare_fold<State, Act>(FoldWeights(shared.fold_weights, at), rows_of_x);
    ptx::keep_order();  // what is unpacked early fills registers
    float decay[2] = {rows.decay, rows.decay};
    if constexpr (convert::kScaled<State>) decay[0] *= in.scale[0], decay[1] *= in.scale[1];
    const auto words = [&](int h) {
      return make_uint4(in.stored[h][0], in.stored[h][1], in.stored[h][2], in.stored[h][3]);
    };
    // Operands of pairs q and q + 1, out of the way of the conversions.
    const auto operands = [&](int q) {
      return make_uint4(ptx::opaque(b[0][q]), ptx::opaque(b[1][q]), ptx::opaque(b[0][q + 1]),
                        ptx::opaque(b[1][q + 1]));
    };
    fold_piece<State, Act>(piece.v[0], piece.v[1], words(0), words(1), operands, decay, rows);
  }

  // A warp asks for several pieces before it folds the first one.
  static constexpr int kAtOnce = 2;

  __device__ __forceinline__ void run() const {
    const int left = params.head_dim - static_cast<int>(blockIdx.z * params.rows_of_block);
    const int pieces = min(params.rows_of_block, left) / kRows * kPieces;
    if constexpr (convert::kScaled<State>) {
      // Whole slabs, so that all pieces of a row are known at once.
      const int at_once = warps & ~(kPieces - 1);
      for (int first = 0; first < pieces; first += at_once) {
        flush_scaled(first + warp, warp < at_once ? pieces : 0);
      }
    } else {
      for (int first = warp; first < pieces; first += kAtOnce * warps) {
        Asked in[kAtOnce] = {};
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = first + k * warps;
          if (i < pieces) ask(in[k], i / kPieces, i % kPieces);
        }
        ptx::keep_order();
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int i = first + k * warps;
          if (i >= pieces) break;
          Piece piece;
          fold(piece, in[k], i / kPieces, i % kPieces);
          Target<State, kDstate>{params, place_of(i / kPieces, i % kPieces), nullptr}.put(piece.v,
                                                                                          0);
        }
      }
    }
  }

  // Piece i of the block's slabs, if there is one: a row is encoded when all of its pieces are
  // known.
  __device__ __forceinline__ void flush_scaled(int i, int pieces) const {
    const unsigned slab = static_cast<unsigned>(i) / kPieces, n = i % kPieces;
    const unsigned of_block = kRows * slab + at.g;
    Piece piece;
    if (i < pieces) {
      Asked in = {};
      ask(in, slab, n);
      fold(piece, in, slab, n);
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
  constexpr int kQuads = most_quads<State, kDstate, kTokens>();
  Shared<kTokens>& shared = *reinterpret_cast<Shared<kTokens>*>(ptx::dynamic_smem());
  Block<kTokens, kPlain> block(params, shared);
  // A step that starts early has looked at the slot for the prefetch only.
  if (ptx::kHasDependentLaunch && __builtin_expect((params.flags & kStartsEarly) != 0, 0)) {
    prefetch<State, Act, kDstate>(params, block.low);
    ptx::grid_dependency_wait();
    block.ask_for_slot_again();
  }
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
  } else if (task < kProductWarps) {
    flush = ProductWarp<Act, kDstate, kTokens, kPlain>(block).run();
  } else {
    flush = DecayWarp<Act, kTokens, kPlain>(block).run();
  }
  if (flush == 0) return;
  if (block.has(kPacked) && block.request.window.q == 0) {
    ptx::aside([&] { block.template copy_old_rows<kDstate>(); });
  }
  __syncthreads();  // the weights are there, and all have read the checkpoint
  FoldWarp<State, Act, kDstate, kTokens>(params, block.shared).run();
}
