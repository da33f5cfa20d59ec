// Weight warps of the small form: what each row of a step weighs in each output, and the new rows
// of the rings. A warp has eight rows, as columns of products of C and B on tensor cores. One more
// warp appends x and weighs the old rows of a flush.
#pragma once
#include "fold.cuh"
#include "small.cuh"

namespace replay {

constexpr int kRowsOfWeightWarp = 8;
constexpr int kWeightWarps = kStepRows / kRowsOfWeightWarp;

template <class Act, int kDstate, int kTokens, bool kPlain>
struct WeightWarp : Block<kTokens, kPlain> {
  using Base = Block<kTokens, kPlain>;
  using Base::first_row, Base::request, Base::token, Base::has;
  using Base::params, Base::shared, Base::warp, Base::lane, Base::head, Base::group;
  static constexpr int kPieces = kDstate * sizeof(Act) / 64;  // of four lanes, 16 bytes each
  static_assert(kFirstToken<kTokens> >= kStepRows - kRowsOfWeightWarp,
                "the last warp has them all");

  const int rows;  // the first of the warp's

  __device__ __forceinline__ explicit WeightWarp(const Base& block)
      : Base(block), rows(kRowsOfWeightWarp * (warp - params.state_warps)) {}

  // Lane 4 g + t brings its share of row g's B and of the C of a token, and gets the products of
  // that token with rows 2 t and 2 t + 1. It goes on with one of the two.
  __device__ __forceinline__ int g() const { return lane >> 2; }
  __device__ __forceinline__ int t() const { return lane & 3; }
  __device__ __forceinline__ int token_of_lane() const { return g() & (kTokens - 1); }
  __device__ __forceinline__ bool second_row() const { return (g() & kTokens) != 0; }
  __device__ __forceinline__ bool is_last_warp() const {
    return rows == kStepRows - kRowsOfWeightWarp;
  }

  // What the lane asks for: one of dt, dt_bias, A and D as lane t, and dt of the ring row that it
  // stands for.
  struct Inputs {
    uint4 B[kPieces], C[kPieces];
    convert::Bits scalar;
    float dt;
    int start, live;
  };
  enum Scalar : unsigned { kDt, kDtBias, kA, kD };  // in the order of the record

  __device__ __forceinline__ void ask_for_scalar(Inputs& in) const {
    const unsigned which = t(), of_type = Base::flags >> which;
    Bytes from =
        behind(bytes_of(params.dt, 8 * which), head, field_behind(params.dt_head_bytes, 4 * which));
    if (which == kDt) {
      from = behind(from, Base::sequence, params.dt_sequence_bytes);
      if (kTokens > 1) from = behind(from, token(token_of_lane()), params.dt_token_bytes);
    }
    in.scalar = convert::load_bits(from, (of_type & kWideDt) != 0, (of_type & kNarrowDt) != 0);
  }
  // As a number; it is that of all lanes with this t.
  __device__ __forceinline__ float scalar_of_lane(const Inputs& in) const {
    float v = __uint_as_float(in.scalar.wide | in.scalar.narrow << 16);
    if (has(kHalfScalars)) {
      ptx::aside(
          [&] { v = convert::bits_to_float(in.scalar, field_behind(params.dt_type, 4 * t())); });
    }
    return v;
  }

  // The row of a tile that the lane brings, from the ring or a token; padding of the tile repeats
  // the last one of the ring.
  __device__ __forceinline__ int ring_row_of(int r) const { return min(r, params.last_row); }

  __device__ __forceinline__ void ask_for_tokens(Inputs& in) const {
    const int t = token_of_lane();
    const Bytes C = behind(Base::C_of_token(t), this->t(), 16);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) in.C[n] = ptx::ld_global_v4(C + 64 * n);
    ask_for_scalar(in);
  }

  // B of the row that the lane brings, of the ring or a token, and dt of the ring row that it
  // stands for: all but the slot's part of their addresses, which waits for the slot. The record's
  // fields of B and of its ring lie alike.
  struct Places {
    Bytes B, dt;
    int B_row, B_sequence_bytes, dt_row;
    bool of_ring;
  };
  __device__ __forceinline__ Places find_places() const {
    const int own = Base::token_of_row(rows + g());
    Places at;
    at.of_ring = own < 0;
    const unsigned i = at.of_ring ? kBytesToCache : 0;
    at.B = behind(bytes_of(params.B, i), group, field_behind(params.B_group_bytes, i));
    at.B = behind(at.B, t(), 16);
    at.B_sequence_bytes = field_behind(params.B_sequence_bytes, i);
    at.B_row = at.of_ring ? ring_row_of(rows + g()) : token(own);
    at.dt = behind(bytes_of(params.dt_cache), head, params.dt_cache_head_bytes);
    at.dt_row = ring_row_of(lane);
    const bool known = has(kByPlace);
    at.B = behind(at.B, known || !at.of_ring ? at.B_row : 0, field_behind(params.B_token_bytes, i));
    at.dt = behind(at.dt, known ? at.dt_row : 0, params.dt_cache_row_bytes);
    at.B = ptx::computed_now(at.B), at.dt = ptx::computed_now(at.dt);
    return at;
  }
  static constexpr unsigned kBytesToCache = 24;  // in the record, from B to B_cache

  // Asks for them, and for the cursors.
  __device__ __forceinline__ void ask_for_rows(Inputs& in, const Places& at) const {
    const unsigned slot = request.slot;
    Bytes B = behind(at.B, at.of_ring ? slot : Base::sequence, at.B_sequence_bytes);
    Bytes dt = behind(at.dt, slot, params.dt_cache_slot_bytes);
    if (!has(kByPlace)) {
      ptx::aside([&] {
        if (at.of_ring) B = behind(B, Base::place_of(at.B_row), params.B_cache_row_bytes);
        dt = behind(dt, Base::place_of(at.dt_row), params.dt_cache_row_bytes);
      });
    }
    in.start = ptx::ld_global_u32(Base::ring_start_of_slot());
    in.live = ptx::ld_global_u32(Base::live_rows_of_slot());
    in.dt = load_float(dt);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) in.B[n] = ptx::ld_global_v4(B + 64 * n);
  }

  // Row j of the live ones, where ring row r of the step is.
  __device__ __forceinline__ int live_row(int r) const {
    const unsigned j = r - (has(kByPlace) ? request.window.start : 0);
    return min(j, j + params.ring_buffer_len);
  }

  // The sum of dt of the live rows behind row j. Four lanes with the same row add every fourth.
  __device__ __forceinline__ float sum_behind(const Inputs& in, int j) const {
    constexpr int kLanes = 4, kStep = kTokens == 1 ? 8 : 4, kNextStep = 16;
    const int first = ((lane & kStep) != 0) + 2 * ((lane & kNextStep) != 0);
    float sum = 0.0f;
#pragma unroll
    for (int i = first, k = 0; k < kRows / kLanes; i += kLanes, ++k) {
      const unsigned place = i + (has(kByPlace) ? request.window.start : 0);
      const float dt = __shfl_sync(kAllLanes, in.dt, min(place, place - params.ring_buffer_len));
      if (i > j && i < request.window.live) sum += dt;
    }
    sum += __shfl_xor_sync(kAllLanes, sum, kStep);
    return sum + __shfl_xor_sync(kAllLanes, sum, kNextStep);
  }

  // C_t . B_r of the lane's token and row, in four parts. An operand of C is two words, of which
  // the first counts beside B's first and third word, the second beside the others. Four chains of
  // products: one would be waited for.
  struct Product {
    float even[2][4], odd[2][4];
  };
  __device__ __forceinline__ static void multiply(Product& d, const Inputs& in) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint4 c = in.C[n], b = in.B[n];
      mma_of_half(d.even[0], c.x, c.y, b.x);
      mma_of_half(d.odd[0], c.x, c.y, b.y);
      mma_of_half(d.even[1], c.z, c.w, b.z);
      mma_of_half(d.odd[1], c.z, c.w, b.w);
    }
  }
  __device__ __forceinline__ float sum(const Product& d) const {
    const auto of_column = [&](int e) {
      return (d.even[0][e] + d.even[1][e]) + (d.odd[0][2 + e] + d.odd[1][2 + e]);
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

  // exp(c_t - c_r) dt_r (C_t . B_r) of the lane's row and token, D with the token's own row. Spans
  // of time are sums of the dt in between, where nothing cancels.
  __device__ __forceinline__ void put_weight(const Inputs& in, const Product& product,
                                             const float (&new_dt)[kTokens], float A, float D) {
    const int t = token_of_lane(), r = rows + 2 * this->t() + second_row();
    const int own = Base::token_of_row(r), j = own < 0 ? live_row(r) : -1;
    const float behind = sum_behind(in, j);
    const float of_row = __shfl_sync(kAllLanes, in.dt, r);
    const float a = A * kLog2e;
    const float decay =
        ptx::ex2(a * (behind + (kTokens == 1 || t == 0 ? new_dt[0] : new_dt[0] + new_dt[1])));
    const float of_token = sum(product);  // the products were on their way
    float weight = decay * of_row * of_token;
    const bool seen = own < 0 && j < request.window.live && r <= params.last_row;
    if (g() >= 2 * kTokens) return;
    shared.weights[r][t] = seen ? 0.0f + weight : kUnseen;
    if (own < 0) return;
    weight = (own == 0 ? new_dt[0] : new_dt[kTokens - 1]) * of_token;
    if (t > own) weight *= ptx::ex2(a * new_dt[kTokens - 1]);
    if (t == own) {
      weight += D;
      shared.decays[t] = decay, shared.flush = request.window.flush;
    }
    shared.new_weights[own][t] = weight;
  }

  // Writes dt and B of the tokens behind the live rows, once.
  __device__ __forceinline__ void append(const Inputs& in, const float (&new_dt)[kTokens]) const {
    if (first_row > 0) return;
    const Window& window = request.window;
    if (lane < (kTokens == 1 ? 1 : window.q)) {
      unsigned char* dt =
          Base::new_row(bytes_of(params.dt_cache), params.dt_cache_slot_bytes, head,
                        params.dt_cache_head_bytes, lane, params.dt_cache_row_bytes);
      *reinterpret_cast<float*>(dt) = kTokens > 1 && lane > 0 ? new_dt[kTokens - 1] : new_dt[0];
    }
    const int own = Base::token_of_row(rows + g());
    if (own < 0 || own >= window.q || head != group * params.heads_per_group) return;
    unsigned char* B = Base::new_row(bytes_of(params.B_cache), params.B_cache_slot_bytes, group,
                                     params.B_cache_group_bytes, own, params.B_cache_row_bytes);
#pragma unroll
    for (int n = 0; n < kPieces; ++n) reinterpret_cast<uint4*>(B)[4 * n + t()] = in.B[n];
  }

  // Whether the sequence flushes.
  __device__ __forceinline__ int run() {
    Inputs in;
    ask_for_tokens(in);
    const Places at = find_places();
    ptx::keep_order();
    if (Base::is_padding()) return 0;
    ask_for_rows(in, at);
    ptx::keep_order();
    const float scalar = scalar_of_lane(in);
    const auto take = [&](int which, int t) {
      return __shfl_sync(kAllLanes, scalar, 4 * t + which);
    };
    const float bias = take(kDtBias, 0), A = take(kA, 0);
    float new_dt[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      new_dt[t] = take(kDt, t) + bias;
      if (has(kSoftplus)) new_dt[t] = convert::softplus(new_dt[t]);
    }
    Product product = {};
    multiply(product, in);
    Base::find_window(in.start, in.live);
    put_weight(in, product, new_dt, A, take(kD, 0));
    ptx::barrier_arrive<1>(params.threads);
    if (is_last_warp()) append(in, new_dt);
    return request.window.flush;
  }
};

// The last warp of a block: x of the new rows of the ring, and what the old ones weigh in a fold,
// if there is one.
template <class Act, int kTokens, bool kPlain>
struct RingWarp : Block<kTokens, kPlain> {
  using Base = Block<kTokens, kPlain>;
  using Base::first_row, Base::request;
  using Base::params, Base::shared, Base::lane, Base::head;

  __device__ __forceinline__ explicit RingWarp(const Base& block) : Base(block) {}

  // The lane's piece of the block's part of x of a token, 16 bytes.
  __device__ __forceinline__ int token_of_x() const { return lane >> 3; }
  __device__ __forceinline__ bool has_x() const {
    return (token_of_x() < request.window.q) & (8 * (lane & 7) < Base::rows_of_block());
  }
  __device__ __forceinline__ int bytes_of_x() const {
    return first_row * static_cast<int>(sizeof(Act)) + 16 * (lane & 7);
  }

  // dt of a ring row.
  __device__ __forceinline__ float dt_of(Bytes dt, int row) const {
    return load_float(behind(dt, row, params.dt_cache_row_bytes));
  }

  // Whether the sequence flushes.
  __device__ __forceinline__ int run() {
    uint4 tokens;
    if (has_x()) tokens = ptx::ld_global_v4(Base::x_of_token(token_of_x()) + bytes_of_x());
    Bytes dt = behind(bytes_of(params.dt_cache), head, params.dt_cache_head_bytes);
    const float A = convert::load_float(params.A, head * params.A_stride, params.A_type);
    if (Base::is_padding()) return 0;
    if (request.window.q > 0) ptx::barrier_arrive<1>(params.threads);
    dt = behind(dt, request.slot, params.dt_cache_slot_bytes);
    const int rows = params.ring_buffer_len;
    float of_row = dt_of(dt, min(lane, rows - 1));
    Base::find_window();
    const Window& window = request.window;
    if (has_x()) {
      unsigned char* x =
          Base::new_row(bytes_of(params.x_cache), params.x_cache_slot_bytes, head,
                        params.x_cache_head_bytes, token_of_x(), params.x_cache_row_bytes);
      *reinterpret_cast<uint4*>(x + bytes_of_x()) = tokens;
    }
    if (!window.flush) return 0;
    const int place = ring_row(window.start, lane, rows);
    of_row = __shfl_sync(kAllLanes, of_row, place & 31);
    if (lane >= window.live) {
      of_row = 0.0f;
    } else if (place > 31) {
      of_row = dt_of(dt, place);
    }
    put_fold_weights(shared.fold_weights, Decays(of_row, A));
    if (lane == 0) {
      shared.slot = request.slot, shared.head = head, shared.start = window.start,
      shared.live = window.live;
    }
    return 1;
  }
};

}  // namespace replay
