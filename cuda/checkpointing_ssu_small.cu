// The step of checkpointing_ssu.cu for few heads, where time is latency. What it stores is the same
// bit for bit; its outputs are fp32 sums in another order.
//
// Grid: one block per batch row (x), head (y) and part of the head (z). Warps have one of two
// tasks. State warps ask for rows p of the checkpoint, and for x of the ring, as soon as the slot
// is known, and sum S C_t, eight lanes a row. Three weight warps ask for rows of B meanwhile, and
// compute what each row weighs in each output. Then the state warps add the rows up, and the last
// weight warp appends the new ones. Ring rows go by their places in the ring, so that no load waits
// for the cursors. Dead rows come along and are never used.
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
// later reads are faster, so the slot may be one of before.
template <class State, class Act, int kDstate>
__device__ __forceinline__ void prefetch(const CheckpointingSsuParams& params) {
  const int row = blockIdx.x, head = blockIdx.y, first_row = blockIdx.z * params.rows_of_block;
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

template <class State, class Act, int kDstate, int kTokens>
struct FoldWarp : Block<kTokens> {
  using Base = Block<kTokens>;
  using Base::first_row, Base::request;
  using Base::params, Base::shared, Base::head, Base::group;

  __device__ __forceinline__ explicit FoldWarp(const Base& block) : Base(block) {}

  // What a warp folds at a time: 16 rows of a slab, and of them 16 bytes a lane, or 8 of an 8-bit
  // state. Lane 4 g + t has rows g and g + 8.
  struct Piece {
    static constexpr int kPairs = sizeof(State) == 4 ? 2 : 4, kColumns = 2 * kPairs;
    static constexpr int kCount = kDstate / (4 * kColumns);  // of a slab
    float2 v[2][kPairs];
  };
  // Row g of piece n of the slab whose first row is p.
  __device__ __forceinline__ State* place_of(int p, int n, const Lane& at) const {
    return static_cast<State*>(params.state) +
           static_cast<unsigned>(request.slot) * params.state_slot_stride +
           head * params.state_head_stride + (p + at.g) * kDstate +
           (4 * n + at.t) * Piece::kColumns;
  }

  // x of the old rows of a slab as an A operand.
  __device__ __forceinline__ void load_x(uint32_t (&x)[4], int p, const RowMap& map,
                                         const Lane& at) const {
    const Act* ring = x_ring<Act>(params, request.slot, head) + p + at.g;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t halves[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int j = map.old_row(request.window, 2 * at.t + 8 * (i >> 1) + e);
        const Act* from = ring + row_offset(j, params.x_cache_row_stride) + 8 * (i & 1);
        halves[e] = *reinterpret_cast<const unsigned short*>(from);
      }
      x[i] = halves[0] | halves[1] << 16;
    }
  }

  // B of the old rows as operands of a piece, see `prepare_B`. `column` is the lane's first.
  template <int kPairs>
  __device__ __forceinline__ void load_B(uint32_t (&b)[2][kPairs], int column, const RowMap& map,
                                         const Lane& at) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = map.old_row(request.window, 8 * i + at.g);
      load_words(b[i], B_ring<Act>(params, request.slot, group) +
                           row_offset(j, params.B_cache_row_stride) + column);
#pragma unroll
      for (int r = 0; r < kPairs; ++r) b[i][r] = ptx::movmatrix(b[i][r]);
    }
  }

  __device__ __forceinline__ float* scale_of(int p) const {
    return params.state_scale +
           static_cast<unsigned>(request.slot) * params.state_scale_slot_stride +
           head * params.state_scale_head_stride + p;
  }

  // Folds the old rows into piece n of the slab whose first row is p.
  __device__ __forceinline__ void fold(Piece& piece, int p, int n, const Lane& at) const {
    constexpr int kPairs = Piece::kPairs;
    const RowMap map = {request.window.start, params.ring_buffer_len};
    const State* from = place_of(p, n, at);
    uint32_t x[4], b[2][kPairs], stored[2][4] = {};
    constexpr int kWords = Piece::kColumns * sizeof(State) / 4;
    load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(stored[0]), from);
    load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(stored[1]), from + 8 * kDstate);
    load_x(x, p, map, at);
    load_B(b, (4 * n + at.t) * Piece::kColumns, map, at);
    const Fold<State> rows = prepare_fold<State, Act>(FoldWeights(shared.fold_weights, at), x);
    ptx::keep_order();  // what is unpacked early fills registers
    float decay[2] = {rows.decay, rows.decay};
    if constexpr (convert::kScaled<State>) {
      const float* scale = scale_of(p + at.g);
      decay[0] *= scale[0], decay[1] *= scale[8];
    }
    fold_piece<State, Act>(
        piece.v[0], piece.v[1], make_uint4(stored[0][0], stored[0][1], stored[0][2], stored[0][3]),
        make_uint4(stored[1][0], stored[1][1], stored[1][2], stored[1][3]),
        [&](int q) { return make_uint4(b[0][q], b[1][q], b[0][q + 1], b[1][q + 1]); }, decay, rows);
  }

  __device__ __forceinline__ void run() {
    constexpr int kPieces = Piece::kCount;
    const Lane at;
    const int warps = params.threads / 32, pieces = Base::rows_of_block() / kRows * kPieces;
    const int warp = threadIdx.x >> 5;
    __syncthreads();  // the weights are there, and all have read the checkpoint
    request.slot = Base::low;
    request.window.start = shared.start, request.window.live = shared.live;
    if constexpr (convert::kScaled<State>) {
      const int at_once = warps & ~(kPieces - 1);  // whole slabs
      for (int first = 0; first < pieces; first += at_once) {
        flush_scaled(first + warp, warp < at_once && first + warp < pieces, at);
      }
    } else {
      for (int n = warp; n < pieces; n += warps) {
        const int p = first_row + n / kPieces * kRows;
        Piece piece;
        fold(piece, p, n % kPieces, at);
        Target<State, kDstate>{params, place_of(p, n % kPieces, at), nullptr}.put(piece.v, 0);
      }
    }
  }

  // Piece n of the block's slabs: a row is encoded when all of its pieces are known.
  __device__ __forceinline__ void flush_scaled(int n, bool any, const Lane& at) const {
    constexpr int kPieces = Piece::kCount;
    Piece piece;
    if (any) {
      const int p = n / kPieces * kRows;  // of the block
      fold(piece, first_row + p, n % kPieces, at);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float amax = of_row(largest(piece.v[h]));
        if (at.t == 0) shared.largest[p + at.g + 8 * h][n % kPieces] = amax;
      }
    }
    __syncthreads();
    if (any) put(piece, ptx::opaque(static_cast<unsigned>(n)), at);
  }

  __device__ __forceinline__ void put(const Piece& piece, unsigned n, const Lane& at) const {
    constexpr int kPieces = Piece::kCount;
    const int p = n / kPieces * kRows, J = n % kPieces;
    const Target<State, kDstate> target = {params, nullptr, nullptr};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        amax = ptx::max_magnitude(amax, shared.largest[p + at.g + 8 * h][i]);
      }
      const convert::RowScale scale = convert::row_scale<State>(amax);
      target.put_half(place_of(first_row + p + 8 * h, J, at), piece.v[h], scale);
      if (J == 0 && at.t == 0) *scale_of(first_row + p + at.g + 8 * h) = scale.decode;
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

constexpr int kMostWarps = 14;  // of a block; twice as many are resident, in blocks of any size

template <class State, class Act, int kDstate, int kTokens>
__global__ void __launch_bounds__(32 * kMostWarps, kDstate <= 128 ? 2 : 1)
    checkpointing_ssu_small(const __grid_constant__ CheckpointingSsuParams params) {
  if (ptx::kHasDependentLaunch && __builtin_expect((params.flags & kStartsEarly) != 0, 0)) {
    prefetch<State, Act, kDstate>(params);
  }
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  constexpr int kQuads = most_quads<State, kDstate, kTokens>();
  Block<kTokens> block(params, *reinterpret_cast<Shared<kTokens>*>(ptx::dynamic_smem()));
  if (block.has(kPacked)) ptx::aside([&] { block.find_tokens(); });
  int flush;
  if (block.warp >= params.state_warps) {
    flush = WeightWarp<Act, kDstate, kTokens>(block).run();
  } else if (!block.has(kSeveralQuads)) {
    flush = StateWarp<State, Act, kDstate, kTokens, 1>(block).run();
  } else {
    flush = StateWarp<State, Act, kDstate, kTokens, kQuads>(block).run();
  }
  if (flush != 0) FoldWarp<State, Act, kDstate, kTokens>(block).run();
}
