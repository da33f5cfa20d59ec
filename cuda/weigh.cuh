// What each row of a step weighs in each output, in the small form. Product warps multiply C with
// eight rows of B each, as columns of products on tensor cores. The decay warp, one lane a row, has
// the rest of a weight, exp(c_t - c_r) dt_r, which waits for less; it appends x and dt, too, and
// weighs the old rows of a flush.
#pragma once
#include "fold.cuh"
#include "small.cuh"

namespace replay {

constexpr int kRowsOfProductWarp = 8;
constexpr int kProductWarps = kStepRows / kRowsOfProductWarp;

template <class Act, int kDstate, int kTokens, bool kPlain>
struct ProductWarp : Block<kTokens, kPlain> {
  using Base = Block<kTokens, kPlain>;
  using Base::first_row, Base::request, Base::token, Base::has;
  using Base::params, Base::shared, Base::warp, Base::lane, Base::head, Base::group;
  static constexpr int kPieces = kDstate * sizeof(Act) / 64;  // of four lanes, 16 bytes each
  static_assert(kFirstToken<kTokens> >= kStepRows - kRowsOfProductWarp,
                "the last warp has them all");

  const int rows;  // the first of the warp's

  __device__ __forceinline__ explicit ProductWarp(const Base& block)
      : Base(block), rows(kRowsOfProductWarp * (warp - params.state_warps)) {}

  // Lane 4 g + t brings its share of row g's B and of the C of a token, and gets the products of
  // that token with rows 2 t and 2 t + 1. It goes on with one of the two.
  __device__ __forceinline__ int g() const { return lane >> 2; }
  __device__ __forceinline__ int t() const { return lane & 3; }
  __device__ __forceinline__ int token_of_lane() const { return g() & (kTokens - 1); }
  __device__ __forceinline__ bool second_row() const { return (g() & kTokens) != 0; }
  __device__ __forceinline__ bool is_last_warp() const {
    return rows == kStepRows - kRowsOfProductWarp;
  }

  struct Inputs {
    uint4 B[kPieces], C[kPieces];
    int start, live;
  };

  __device__ __forceinline__ void ask_for_C(Inputs& in) const {
    const Bytes C = behind(Base::C_of_token(token_of_lane()), t(), 16);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) in.C[n] = ptx::ld_global_v4(C + 64 * n);
  }

  // B of the row that the lane brings, of the ring or a token: all but the slot's part of its
  // address, which waits for the slot. Padding of the rows repeats the last one of the ring.
  struct Place {
    Bytes B;
    int row, sequence_bytes;
    bool of_ring;
  };
  __device__ __forceinline__ Place find_place() const {
    const int own = Base::token_of_row(rows + g());
    Place at;
    at.of_ring = own < 0;
    at.B = behind(bytes_of(params.B, at.of_ring ? 8 : 0), group,
                  of_B(params.B_group_bytes, params.B_cache_group_bytes, at.of_ring));
    at.B = behind(at.B, t(), 16);
    at.sequence_bytes = field_behind(params.B_sequence_bytes, at.of_ring ? 4 : 0);
    at.row = at.of_ring ? min(rows + g(), params.last_row) : token(own);
    at.B = behind(at.B, has(kByPlace) || !at.of_ring ? at.row : 0,
                  kTokens == 1 ? params.B_cache_row_bytes  // the only token is at row 0
                               : of_B(params.B_token_bytes, params.B_cache_row_bytes, at.of_ring));
    return at;
  }
  // One of two fields, which are side by side in the record unless they are known.
  __device__ __forceinline__ static int of_B(const int& of_tokens, const int& of_ring,
                                             bool is_of_ring) {
    if constexpr (CheckpointingSsuParams::kKnown) return is_of_ring ? of_ring : of_tokens;
    return field_behind(of_tokens, is_of_ring ? 4 : 0);
  }

  // Asks for it, and for the cursors.
  __device__ __forceinline__ void ask_for_rows(Inputs& in, const Place& at) const {
    Bytes B = behind(at.B, at.of_ring ? request.slot : Base::sequence, at.sequence_bytes);
    if (!has(kByPlace)) {
      ptx::aside([&] {
        if (at.of_ring) B = behind(B, Base::place_of(at.row), params.B_cache_row_bytes);
      });
    }
#pragma unroll
    for (int n = 0; n < kPieces; ++n) in.B[n] = ptx::ld_global_v4(B + 64 * n);
    in.start = ptx::ld_global_u32(Base::ring_start_of_slot());
    in.live = ptx::ld_global_u32(Base::live_rows_of_slot());
  }

  // C_t . B_r of the lane's token and row. An operand of C is two words, of which the first counts
  // beside B's first and third word, the second beside the others. Four chains of products: one
  // would be waited for.
  __device__ __forceinline__ float multiply(const Inputs& in) const {
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint4 c = in.C[n], b = in.B[n];
      mma_of_half(even[0], c.x, c.y, b.x);
      mma_of_half(odd[0], c.x, c.y, b.y);
      mma_of_half(even[1], c.z, c.w, b.z);
      mma_of_half(odd[1], c.z, c.w, b.w);
    }
    const auto of_column = [&](int e) {
      return (even[0][e] + even[1][e]) + (odd[0][2 + e] + odd[1][2 + e]);
    };
    return second_row() ? of_column(1) : of_column(0);
  }
  __device__ __forceinline__ static void mma_of_half(float (&d)[4], uint32_t a0, uint32_t a1,
                                                     uint32_t b) {
    if constexpr (convert::same<Act, bf16>)
      ptx::mma_m16n8k8_bf16(d, a0, a1, b);
    else
      ptx::mma_m16n8k8_f16(d, a0, a1, b);
  }

  // Writes B of the tokens behind the live rows, once.
  __device__ __forceinline__ void append(const Inputs& in) const {
    const int own = Base::token_of_row(rows + g());
    if (first_row > 0 || own < 0 || own >= request.window.q) return;
    if (head != group * params.heads_per_group) return;
    unsigned char* B = Base::new_row(bytes_of(params.B_cache), params.B_cache_slot_bytes, group,
                                     params.B_cache_group_bytes, own, params.B_cache_row_bytes);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) reinterpret_cast<uint4*>(B)[4 * n + t()] = in.B[n];
  }

  // Hands the rows to a flush.
  __device__ __forceinline__ void put_rows(const Inputs& in) const {
    unsigned char* B = OldRows<kDstate>::behind(shared).B[rows + g()] + 16 * t();
#pragma unroll
    for (int n = 0; n < kPieces; ++n) *reinterpret_cast<uint4*>(B + 64 * n) = in.B[n];
  }

  // Whether the sequence flushes.
  __device__ __forceinline__ int run() {
    Inputs in;
    const Place at = find_place();
    ptx::keep_order();
    if (Base::is_padding(low_bits(at.B) | at.sequence_bytes)) return 0;
    ask_for_rows(in, at);
    ptx::keep_order();
    ask_for_C(in);
    ptx::keep_order();
    const float product = multiply(in);
    if (g() < 2 * kTokens) {
      shared.weights[rows + 2 * t() + second_row()][token_of_lane()].product = product;
    }
    ptx::barrier_sync<1>(params.threads);
    Base::find_window(in.start, in.live);
    if (is_last_warp()) append(in);
    if (request.window.flush) put_rows(in);
    return request.window.flush;
  }
};

// The last warp of a block.
template <class Act, int kTokens, bool kPlain>
struct DecayWarp : Block<kTokens, kPlain> {
  using Base = Block<kTokens, kPlain>;
  using Base::first_row, Base::request, Base::token, Base::has;
  using Base::params, Base::shared, Base::lane, Base::head;

  __device__ __forceinline__ explicit DecayWarp(const Base& block) : Base(block) {}

  // The lane's piece of the block's part of x of a token, 16 bytes.
  __device__ __forceinline__ int token_of_x() const { return lane >> 3; }
  __device__ __forceinline__ bool has_x() const {
    return (token_of_x() < request.window.q) & (8 * (lane & 7) < Base::rows_of_block());
  }
  __device__ __forceinline__ int bytes_of_x() const {
    return first_row * static_cast<int>(sizeof(Act)) + 16 * (lane & 7);
  }

  // One of dt, dt_bias, A and D as lane 4 g + t, in the order of the record; dt of token g.
  enum Scalar : unsigned { kDt, kDtBias, kA, kD };
  __device__ __forceinline__ int token_of_scalar() const { return lane >> 2 & (kTokens - 1); }
  __device__ __forceinline__ convert::Bits ask_for_scalar() const {
    const unsigned which = lane & 3, of_type = Base::flags >> which;
    bool wide = (of_type & kWideDt) != 0, narrow = (of_type & kNarrowDt) != 0;
    const int bytes =
        params.kKnown ? (wide ? 4 : 2) : field_behind(params.dt_head_bytes, 4 * which);
    if (has(kPacked) && which == kDt && request.window.q == 0) wide = narrow = false;
    Bytes from = behind(bytes_of(params.dt, 8 * which), head, bytes);
    if (which == kDt) {
      from = behind(from, Base::sequence, params.dt_sequence_bytes);
      if (kTokens > 1) from = behind(from, token(token_of_scalar()), params.dt_token_bytes);
    }
    return convert::load_bits(from, wide, narrow);
  }
  __device__ __forceinline__ float number(const convert::Bits& scalar) const {
    float v = __uint_as_float(scalar.wide | scalar.narrow << 16);
    if (has(kHalfScalars)) {
      ptx::aside([&] {
        v = convert::bits_to_float(scalar, field_behind(params.dt_type, 4 * (lane & 3)));
      });
    }
    return v;
  }

  // dt of old row j from the lane that has it: the one of its place in the ring, or lane j where
  // rows do not go by their places.
  __device__ __forceinline__ float dt_of_row(float dt, int j) const {
    const int place = has(kByPlace) ? ring_row(request.window.start, j, params.ring_buffer_len) : j;
    return __shfl_sync(kAllLanes, dt, place);
  }

  // The sum of dt of the live rows behind row j, the lane's: 15 at most, in two rounds.
  __device__ __forceinline__ float sum_behind(float dt) const {
    const int j = lane, live = request.window.live;
    float next[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_row = dt_of_row(dt, j + 1 + i);
      next[i] = j + 1 + i < live ? of_row : 0.0f;
    }
    const float of_four = (next[0] + next[1]) + (next[2] + next[3]);
    float of_fours[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) of_fours[i] = __shfl_down_sync(kAllLanes, of_four, 4 * (i + 1));
    return (of_four + of_fours[0]) + (of_fours[1] + of_fours[2]);
  }

  // Of each row what its weight takes besides the product, and so of the checkpoint. Spans of time
  // are sums of the dt in between, where nothing cancels.
  __device__ __forceinline__ void put_decays(float of_row, float behind,
                                             const float (&new_dt)[kTokens], float a) const {
    const int j = lane, rows = params.ring_buffer_len;
    const bool live = j < request.window.live;
    const int place = has(kByPlace) && j < rows ? ring_row(request.window.start, j, rows) : j;
    float span = behind;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      span += new_dt[t];
      const float decay = ptx::ex2(a * span);
      if (j < kStepRows) {
        shared.weights[place][t].decayed_dt = live ? 0.0f + decay * of_row : kUnseen;
      }
    }
  }

  __device__ __forceinline__ void put_decays_of_new(float sum, const float (&new_dt)[kTokens],
                                                    float a, float D) const {
    if (lane > 0) return;
    shared.D = D, shared.flush = request.window.flush;
    float span = sum;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      span += new_dt[t];
      shared.decays[t] = ptx::ex2(a * span);
      float since = 0.0f;
#pragma unroll
      for (int own = t; own >= 0; --own) {
        shared.decayed_new_dt[own][t] = own == t ? new_dt[t] : ptx::ex2(a * since) * new_dt[own];
        since += new_dt[own];
      }
    }
  }

  // Writes x, and once dt, of the tokens behind the live rows.
  __device__ __forceinline__ void append(const uint4& x, const float (&new_dt)[kTokens]) const {
    if (has_x()) {
      unsigned char* row =
          Base::new_row(bytes_of(params.x_cache), params.x_cache_slot_bytes, head,
                        params.x_cache_head_bytes, token_of_x(), params.x_cache_row_bytes);
      *reinterpret_cast<uint4*>(row + bytes_of_x()) = x;
    }
    if (first_row > 0 || lane >= request.window.q) return;
    unsigned char* dt = Base::new_row(bytes_of(params.dt_cache), params.dt_cache_slot_bytes, head,
                                      params.dt_cache_head_bytes, lane, params.dt_cache_row_bytes);
    *reinterpret_cast<float*>(dt) = kTokens > 1 && lane > 0 ? new_dt[kTokens - 1] : new_dt[0];
  }

  // Whether the sequence flushes.
  __device__ __forceinline__ int run() {
    const int row = min(lane, params.last_row);
    Bytes ring = behind(bytes_of(params.dt_cache), head, params.dt_cache_head_bytes);
    if (has(kByPlace)) ring = behind(ring, row, params.dt_cache_row_bytes);
    const unsigned slot_bytes = field_behind(params.dt_cache_slot_bytes, ptx::zero_of_lane());
    ptx::keep_order();
    if (Base::is_padding(low_bits(ring) | slot_bytes)) return 0;
    ring = behind(ring, request.slot, slot_bytes);
    if (!has(kByPlace)) {
      ptx::aside([&] { ring = behind(ring, Base::place_of(row), params.dt_cache_row_bytes); });
    }
    const float dt = load_float(ring);
    const int start = ptx::ld_global_u32(Base::ring_start_of_slot());
    const int live = ptx::ld_global_u32(Base::live_rows_of_slot());
    ptx::keep_order();
    const convert::Bits scalar = ask_for_scalar();
    uint4 x;
    if (has_x()) x = ptx::ld_global_v4(Base::x_of_token(token_of_x()) + bytes_of_x());
    ptx::keep_order();
    const float scalar_of_lane = number(scalar);
    const auto take = [&](int which, int t) {
      return __shfl_sync(kAllLanes, scalar_of_lane, 4 * t + which);
    };
    const float bias = take(kDtBias, 0), A = take(kA, 0), D = take(kD, 0);
    float new_dt[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      new_dt[t] = take(kDt, t) + bias;
      if (has(kSoftplus)) new_dt[t] = convert::softplus(new_dt[t]);
    }
    Base::find_window(start, live);
    const float of_row = dt_of_row(dt, lane), behind = sum_behind(dt);
    const float sum = behind + (0 < request.window.live ? of_row : 0.0f);  // of all, as lane 0
    put_decays(of_row, behind, new_dt, A * kLog2e);
    put_decays_of_new(sum, new_dt, A * kLog2e, D);
    if (request.window.q > 0) ptx::barrier_sync<1>(params.threads);
    append(x, new_dt);
    if (!request.window.flush) return 0;
    put_fold_weights(shared.fold_weights, Decays(lane < request.window.live ? of_row : 0.0f, A));
    if (lane == 0) {
      shared.slot = request.slot, shared.head = head, shared.live = request.window.live;
      shared.start = has(kByPlace) ? request.window.start : 0;
    }
    return 1;
  }
};

}  // namespace replay
