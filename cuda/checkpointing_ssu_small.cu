// The step of checkpointing_ssu.cu for few heads, where time is latency. What it stores is the same
// bit for bit; its outputs are fp32 sums in another order.
//
// Grid: one block per batch row (x), head (y) and part of the head (z). Eight lanes share a row,
// and warps have one of two tasks. State warps ask for rows p of the checkpoint, and for x of the
// ring, as soon as the slot is known, and sum S C_t. Weight warps ask for rows of B meanwhile, and
// compute what each row weighs in each output. Then the state warps add the rows up, and the weight
// warps append the new ones. Ring rows go by their places in the ring, so that no load waits for
// the cursors. Dead rows come along and are never used.
// Outputs come from the checkpoint as it was and from all rows, so a flush only adds work: at the
// end all warps fold the old rows into the checkpoint, a piece of a slab of 16 rows at a time.
#include "flush.cuh"

using namespace replay;

constexpr int kLanesOfRow = 8, kRowsOfWarp = 4;
constexpr int kMostRowsOfBlock = 64;  // p

// Instead of the weight of a row that the token does not see. A NaN that was computed has other
// bits.
constexpr uint32_t kUnseen = 0xffffffffu;

// The rows of a step: those of the ring by their places, then the new tokens. A lane has every
// eighth of them, and keeps three.
constexpr int kRowsKept = 3;

template <int kTokens>
struct StepRows {
  static constexpr int kMostTokens = kTokens == 1 ? 1 : 16;
  static constexpr int kCount = kTokens == 1 ? 24 : 48;
  static constexpr int kRingRowsOfLane = kTokens == 1 ? 3 : 4;
};

template <int kTokens>
struct Shared {
  using Rows = StepRows<kTokens>;
  // kTokens tokens at a time: of each row, and of the checkpoint, which is exp(c_t).
  alignas(16) float weights[Rows::kMostTokens / kTokens][Rows::kCount][kTokens];
  float decays[Rows::kMostTokens];
  // What a flush takes: `put_fold_weights`, and the largest magnitudes in the pieces of 8-bit rows.
  float fold_weights[kRows + 4];
  float largest[kMostRowsOfBlock][8];
  int start, live, flush;
};

// How eight lanes share a row of kDstate values: in pieces of up to 16 bytes, which lie side by
// side.
template <class T, int kDstate>
struct Pieces {
  static constexpr int kBytes = kDstate * sizeof(T) < 128 ? kDstate * sizeof(T) / 8 : 16;
  static constexpr int kColumns = kBytes / sizeof(T), kCount = kDstate / kLanesOfRow / kColumns;
  __device__ __forceinline__ static uint4 load(const T* row, int n) {
    const T* piece = row + kLanesOfRow * kColumns * n;
    if constexpr (kBytes == 16) return ptx::ld_global_v4(piece);
    const uint2 half = ptx::ld_global_v2(piece);
    return make_uint4(half.x, half.y, 0, 0);
  }
};

__device__ __forceinline__ float load_float(const float* p) {
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

template <class State, class Act, int kDstate, int kTokens>
struct Block {
  using Rows = StepRows<kTokens>;
  using StatePieces = Pieces<State, kDstate>;
  using TokenPieces = Pieces<Act, kDstate>;
  static constexpr int kNewDtOfLane = kTokens == 1 ? 1 : 2;

  const CheckpointingSsuParams& params;
  Shared<kTokens>& shared;
  const int warp, row, lane;  // the lane's row in its warp, and the lane's place in the row
  const unsigned head, group;
  const int first_row;  // p of the block
  Request request;      // slot and window are known late
  GivenSlot given;

  __device__ __forceinline__ Block(const CheckpointingSsuParams& p, Shared<kTokens>& s)
      : params(p),
        shared(s),
        warp(threadIdx.x >> 5),
        row(threadIdx.x >> 3 & 3),
        lane(threadIdx.x & 7),
        head(blockIdx.y),
        group(divide(head, p.inverse_heads_per_group)),
        first_row(blockIdx.z * p.rows_of_block),
        given(p, blockIdx.x + ptx::zero_of_lane()) {
    ptx::keep_order();
    request = find_tokens(p, blockIdx.x);
  }

  __device__ __forceinline__ bool is_padding() {
    request.slot = given.slot(params);
    return request.slot < 0;
  }
  // What lies at the sequence is found anew in each pass: it would fill registers.
  __device__ __forceinline__ void forget_addresses() {
    if constexpr (kTokens > 1) request.row = ptx::opaque(request.row);
  }
  // In a pass that ends behind the last token that one stands in.
  __device__ __forceinline__ int token(int t) const {
    return kTokens == 1 ? 0 : min(t, request.window.q - 1);
  }
  // Of the tokens of a pass, the lane's own, as `sum_of_row` deals them.
  __device__ __forceinline__ int token_of_lane() const { return lane & (kTokens - 1); }
  __device__ __forceinline__ int rows_of_block() const {
    return min(params.rows_of_block, params.head_dim - first_row);
  }
  // Ring row r of the step, if row 0 lies at place `first`.
  __device__ __forceinline__ int64_t ring_offset(int first, int r, int64_t stride) const {
    return row_offset(ring_row(first, r, params.ring_buffer_len), stride);
  }
  // Long rings go by their live rows instead of by places, and wait for the first one's.
  __device__ __forceinline__ int first_place() const {
    return min(max(*ring_start_of(params, request.slot), 0), params.ring_buffer_len - 1);
  }

  // ---- weight warps -----------------------------------------------------------------------------

  // Rows of a ring but for the slot: the lane's own one of B and dt, and every eighth of dt.
  struct RingRows {
    const Act* B;
    const float *dt, *every_eighth[Rows::kRingRowsOfLane];
  };

  // A row of the step, of the ring or a token: `behind` is the sum of dt of the live ring rows
  // after it, or of all of them.
  struct Row {
    int index, token;  // negative: of the ring
    bool live;
    float dt, behind;
  };

  // What the lane asks for. `C` is of a pass; `ring_dt` of every eighth row, `dt` of its own one.
  struct Inputs {
    uint4 B[TokenPieces::kCount], C[kTokens][TokenPieces::kCount], x;
    uint32_t A, D, dt_bias, new_dt[kNewDtOfLane];
    float dt, ring_dt[Rows::kRingRowsOfLane];
    int start, live;
  };

  // If row 0 lies at place `first`. The row of a new token is the token.
  __device__ __forceinline__ RingRows find_rows(int first, const Row& mine) const {
    const float* dt = dt_ring(params, 0, head);
    RingRows rows;
    rows.B =
        B_ring<Act>(params, 0, group) + ring_offset(first, mine.index, params.B_cache_row_stride);
    if (mine.token >= 0) rows.B = B_of_token<Act>(params, request, group, token(mine.token));
    rows.B = ptx::computed_now(rows.B + TokenPieces::kColumns * lane);
    rows.dt = ptx::computed_now(dt + ring_offset(first, mine.index, params.dt_cache_row_stride));
#pragma unroll
    for (int n = 0; n < Rows::kRingRowsOfLane; ++n) {
      const int r = kLanesOfRow * n + lane;
      rows.every_eighth[n] =
          ptx::computed_now(dt + ring_offset(first, r, params.dt_cache_row_stride));
    }
    return rows;
  }

  __device__ __forceinline__ void load_C(Inputs& in, int first) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Act* C = C_of_token<Act>(params, request, group, token(first + t));
#pragma unroll
      for (int n = 0; n < TokenPieces::kCount; ++n) {
        in.C[t][n] = TokenPieces::load(C + TokenPieces::kColumns * lane, n);
      }
    }
  }

  // The lane has 16 bytes of the block's part of x.
  __device__ __forceinline__ bool has_x() const { return 8 * lane < rows_of_block(); }
  __device__ __forceinline__ uint4 load_x(int own) const {
    const Act* x = x_of_token<Act>(params, request, head, token(own)) + first_row;
    return reinterpret_cast<const uint4*>(x)[lane];
  }

  __device__ __forceinline__ void ask_for_tokens(Inputs& in) const {
    in.dt_bias = 0;
    if (params.dt_bias != nullptr) {
      in.dt_bias =
          convert::load_bits(params.dt_bias, head * params.dt_bias_stride, params.dt_bias_type);
    }
    if (request.window.q == 0) return;
    load_C(in, 0);
#pragma unroll
    for (int n = 0; n < kNewDtOfLane; ++n) {
      const int t = kTokens == 1 ? 0 : kLanesOfRow * n + lane;
      if (t < request.window.q) {
        in.new_dt[n] =
            convert::load_bits(params.dt, dt_of_token(params, request, head, t), params.dt_type);
      }
    }
  }

  // What is used last.
  __device__ __forceinline__ void ask_for_rest(Inputs& in, int own) const {
    in.A = convert::load_bits(params.A, head * params.A_stride, params.A_type);
    in.D = 0;
    if (params.D != nullptr) {
      in.D = convert::load_bits(params.D, head * params.D_stride, params.D_type);
    }
    if (kTokens == 1 && own >= 0 && own < request.window.q && has_x()) in.x = load_x(own);
  }

  __device__ __forceinline__ void ask_for_slot(Inputs& in, const RingRows& rows,
                                               const Row& mine) const {
    const unsigned slot = request.slot;
    in.start = ptx::ld_global_u32(ring_start_of(params, slot));
    in.live = ptx::ld_global_u32(live_rows_of(params, slot));
    const bool of_ring = mine.token < 0;
    const Act* B = rows.B + (of_ring ? slot * params.B_cache_slot_stride : 0);
    if (mine.token < request.window.q) {
#pragma unroll
      for (int n = 0; n < TokenPieces::kCount; ++n) in.B[n] = TokenPieces::load(B, n);
    }
    const int64_t of_slot = slot * params.dt_cache_slot_stride;
    in.dt = 0.0f;
    if (of_ring) in.dt = load_float(rows.dt + of_slot);
#pragma unroll
    for (int n = 0; n < Rows::kRingRowsOfLane; ++n) {
      in.ring_dt[n] = 0.0f;
      if (kLanesOfRow * n + lane < params.ring_rows) {
        in.ring_dt[n] = load_float(rows.every_eighth[n] + of_slot);
      }
    }
  }

  // dt of the new tokens as it counts: the lane's, or the only one.
  __device__ __forceinline__ void find_new_dt(float (&new_dt)[kNewDtOfLane],
                                              const Inputs& in) const {
    const float dt_bias = convert::bits_to_float(in.dt_bias, params.dt_bias_type);
#pragma unroll
    for (int n = 0; n < kNewDtOfLane; ++n) {
      if (n > 0 && request.window.q <= kLanesOfRow) break;
      new_dt[n] = convert::bits_to_float(in.new_dt[n], params.dt_type) + dt_bias;
      if (params.dt_softplus) new_dt[n] = convert::softplus(new_dt[n]);
    }
  }
  __device__ __forceinline__ float dt_of_new(const float (&new_dt)[kNewDtOfLane], int t) const {
    if constexpr (kTokens == 1) return new_dt[0];
    return __shfl_sync(kAllLanes, t < kLanesOfRow ? new_dt[0] : new_dt[kNewDtOfLane - 1],
                       t & (kLanesOfRow - 1), kLanesOfRow);
  }

  // Row j of the live ones, where it lies among the ring rows of the step.
  __device__ __forceinline__ int live_row(int r) const {
    const int j = r - (params.by_place ? request.window.start : 0);
    return j < 0 ? j + params.ring_buffer_len : j;
  }

  // The sum of dt over the live rows of the ring behind row j.
  __device__ __forceinline__ float sum_behind(int j, const Inputs& in) const {
    float sum[1] = {0.0f};
#pragma unroll
    for (int n = 0; n < Rows::kRingRowsOfLane; ++n) {
      const int i = live_row(kLanesOfRow * n + lane);
      if (i > j && i < request.window.live) sum[0] += in.ring_dt[n];
    }
    return sum_of_row(sum, lane);
  }

  // C_t . B_j for the lane's token of a pass.
  __device__ __forceinline__ float product(const Inputs& in) const {
    float sum[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float2 sums = make_float2(0.0f, 0.0f);  // two chains of products
#pragma unroll
      for (int n = 0; n < TokenPieces::kCount; ++n) {
        const uint32_t B[4] = {in.B[n].x, in.B[n].y, in.B[n].z, in.B[n].w};
        const uint32_t C[4] = {in.C[t][n].x, in.C[t][n].y, in.C[t][n].z, in.C[t][n].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 b = convert::unpack<Act>(B[i]), c = convert::unpack<Act>(C[i]);
          sums.x = fmaf(b.x, c.x, sums.x), sums.y = fmaf(b.y, c.y, sums.y);
        }
      }
      sum[t] = sums.x + sums.y;
    }
    return sum_of_row(sum, lane);
  }

  // exp(c_t - c_j) dt_j (C_t . B_j) of the row and the tokens of a pass, D with the token's own
  // row. Spans of time are sums of the dt in between, where nothing cancels.
  __device__ __forceinline__ void put_weights(const Inputs& in, int first, const Row& of_row,
                                              const float (&new_dt)[kNewDtOfLane]) {
    const int own = of_row.token, t = first + token_of_lane(), q = request.window.q;
    const float of_pass = product(in), a = convert::bits_to_float(in.A, params.A_type) * kLog2e;
    float until = new_dt[0],
          since = own < 0 ? new_dt[0] : 0.0f;  // dt up to t: of all, of later ones
    if constexpr (kTokens > 1) {
      until = since = 0.0f;
      for (int u = 0; u < min(first + kTokens, q); ++u) {
        const float of_u = dt_of_new(new_dt, u);
        if (u <= t) until += of_u;
        if (u <= t && u > own) since += of_u;
      }
    }
    if (lane < kTokens && t < q && own < q) {
      float weight = ptx::ex2(a * (own < 0 ? of_row.behind + since : since)) * of_row.dt * of_pass;
      if (t == own) {
        weight += convert::bits_to_float(in.D, params.D_type);
        shared.decays[t] = ptx::ex2(a * (of_row.behind + until));
      }
      const bool seen = of_row.live && own <= t;
      shared.weights[first / kTokens][of_row.index][token_of_lane()] =
          seen ? weight : __uint_as_float(kUnseen);
    }
  }

  // Writes the row's token behind the live rows: x of the block, and dt and B once.
  __device__ __forceinline__ void append(const Inputs& in, const Row& of_row) const {
    const unsigned slot = request.slot;
    const Window& window = request.window;
    const int end = ring_row(window.start, window.live, params.ring_buffer_len);
    const int place = ring_row(end, of_row.token, params.ring_buffer_len);
    if (has_x()) {
      Act* x = x_ring<Act>(params, slot, head) + row_offset(place, params.x_cache_row_stride);
      reinterpret_cast<uint4*>(x + first_row)[lane] = kTokens == 1 ? in.x : load_x(of_row.token);
    }
    if (first_row > 0) return;
    if (lane == 0) {
      dt_ring(params, slot, head)[row_offset(place, params.dt_cache_row_stride)] = of_row.dt;
    }
    if (head != group * params.heads_per_group) return;
    Act* B = B_ring<Act>(params, slot, group) + row_offset(place, params.B_cache_row_stride);
#pragma unroll
    for (int n = 0; n < TokenPieces::kCount; ++n) {
      reinterpret_cast<uint4*>(B)[kLanesOfRow * n + lane] = in.B[n];
    }
  }

  // By one warp, while the outputs are finished.
  __device__ __forceinline__ void prepare_flush(float A) const {
    const int j = threadIdx.x & 31;
    float dt = 0.0f;
    if (j < request.window.live) {
      dt = dt_ring(params, request.slot,
                   head)[ring_offset(request.window.start, j, params.dt_cache_row_stride)];
    }
    put_fold_weights(shared.fold_weights, Decays(dt, A));
  }

  __device__ __forceinline__ Row row_of_lane(int first) const {
    Row mine = {};
    mine.index = first + kRowsOfWarp * (warp - params.state_warps) + row;
    mine.token = mine.index - params.ring_rows;
    return mine;
  }

  // What the row weighs in all outputs.
  __device__ __forceinline__ void weigh_row(Inputs& in, Row& mine) {
    float new_dt[kNewDtOfLane] = {};
    find_new_dt(new_dt, in);
    const float dt_of_token = dt_of_new(new_dt, max(mine.token, 0));
    set_window(params, request, in.start, in.live);
    int j = live_row(mine.index);
    if (mine.token >= 0) j = -1;
    mine.live = j < request.window.live;
    mine.dt = mine.token < 0 ? in.dt : dt_of_token;
    mine.behind = sum_behind(j, in);
    int first = 0;
    do {
      forget_addresses();
      if (first > 0) load_C(in, first);
      put_weights(in, first, mine, new_dt);
      first += kTokens;
    } while (kTokens > 1 && first < request.window.q);
  }

  // Returns whether the block flushes.
  __device__ __forceinline__ bool weigh() {
    Row mine = row_of_lane(0);
    Inputs in;
    ask_for_tokens(in);
    RingRows rows = find_rows(0, mine);
    ptx::keep_order();
    if (is_padding()) return false;
    const Window& window = request.window;
    const int at_once = kRowsOfWarp * (params.threads / 32 - params.state_warps);
    bool last;
    int first = 0;
    do {
      if (!params.by_place) rows = find_rows(first_place(), mine);
      ask_for_slot(in, rows, mine);
      ask_for_rest(in, mine.token);
      ptx::keep_order();
      weigh_row(in, mine);
      first += at_once;
      last = kTokens == 1 || first >= params.ring_rows + window.q;
      if (last) {
        if (threadIdx.x == 32 * params.state_warps) {
          shared.start = window.start, shared.live = window.live, shared.flush = window.flush;
        }
        ptx::barrier_arrive<1>(params.threads);
      }
      if (mine.token >= 0 && mine.token < window.q) append(in, mine);
      if (!last) {
        mine = row_of_lane(first);
        rows = find_rows(0, mine);
        ask_for_tokens(in);
      }
    } while (!last);
    if (window.flush && warp == params.state_warps) {
      prepare_flush(convert::bits_to_float(in.A, params.A_type));
    }
    return window.flush;
  }

  // ---- state warps ------------------------------------------------------------------------------

  // What the lane asks for: pieces of the checkpoint and their scales, x of every eighth row, and
  // of a pass C beside the pieces and z of the lane's token. Of kQuads rows p, four apart.
  template <int kQuads>
  struct StateInputs {
    uint4 state[kQuads][StatePieces::kCount];
    uint32_t C[kTokens][StatePieces::kCount][StatePieces::kColumns / 2];
    uint32_t x[kQuads][kRowsKept], z[kQuads];
    float scale[kQuads];
  };

  // C and z of a pass; p is the lane's first row.
  template <int kQuads>
  __device__ __forceinline__ void load_pass(StateInputs<kQuads>& in, int first, int p) const {
    constexpr int kColumns = StatePieces::kColumns;
    if (request.window.q == 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Act* C = C_of_token<Act>(params, request, group, token(first + t)) + kColumns * lane;
#pragma unroll
      for (int n = 0; n < StatePieces::kCount; ++n) {
        load_words(in.C[t][n], C + kLanesOfRow * kColumns * n);
      }
    }
    if (params.z == nullptr) return;
    const Act* z = z_of_token<Act>(params, request, head, token(first + token_of_lane())) + p;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      in.z[i] = ptx::ld_global_u16(z + kRowsOfWarp * i);
    }
  }

  // What does not need the slot but its place: the lane's first piece, its scale, and x of every
  // eighth row, of the ring or new.
  struct StateRows {
    const State* state;
    const float* scale;
    const Act* x[kRowsKept];
  };

  // x of row r but for the slot, from p on; ring row 0 lies at place `first`.
  __device__ __forceinline__ const Act* x_of_row(int r, int first, int p) const {
    const int t = r - params.ring_rows;
    if (t >= 0) return x_of_token<Act>(params, request, head, token(t)) + p;
    return x_ring<Act>(params, 0, head) + ring_offset(first, r, params.x_cache_row_stride) + p;
  }
  __device__ __forceinline__ int64_t slot_of_row(int r) const {
    const unsigned slot = request.slot;
    return r < params.ring_rows ? slot * params.x_cache_slot_stride : 0;
  }

  __device__ __forceinline__ void find_x(StateRows& rows, int first, int p) const {
#pragma unroll
    for (int k = 0; k < kRowsKept; ++k) {
      rows.x[k] = ptx::computed_now(x_of_row(kLanesOfRow * k + lane, first, p));
    }
  }

  __device__ __forceinline__ StateRows find_state(int p) const {
    StateRows rows;
    rows.state = ptx::computed_now(static_cast<const State*>(params.state) +
                                   head * params.state_head_stride + p * kDstate +
                                   StatePieces::kColumns * lane);
    if constexpr (convert::kScaled<State>) {
      rows.scale =
          ptx::computed_now(params.state_scale + head * params.state_scale_head_stride + p);
    }
    find_x(rows, 0, p);
    return rows;
  }

  template <int kQuads>
  __device__ __forceinline__ void ask_for_state(StateInputs<kQuads>& in,
                                                const StateRows& rows) const {
    const unsigned slot = request.slot;
    const State* state = rows.state + slot * params.state_slot_stride;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int n = 0; n < StatePieces::kCount; ++n) {
        in.state[i][n] = StatePieces::load(state + kRowsOfWarp * i * kDstate, n);
      }
    }
    if constexpr (convert::kScaled<State>) {
      const float* scale = rows.scale + slot * params.state_scale_slot_stride;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) in.scale[i] = load_float(scale + kRowsOfWarp * i);
    }
  }

  template <int kQuads>
  __device__ __forceinline__ void ask_for_x(StateInputs<kQuads>& in, const StateRows& rows) const {
#pragma unroll
    for (int k = 0; k < kRowsKept; ++k) {
      const int r = kLanesOfRow * k + lane;
      const Act* x = rows.x[k] + slot_of_row(r);
      if (r < params.ring_rows + request.window.q) load_x(in.x, k, x);
    }
  }
  template <int kQuads, int kCount>
  __device__ __forceinline__ static void load_x(uint32_t (&to)[kQuads][kCount], int k,
                                                const Act* x) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) to[i][k] = ptx::ld_global_u16(x + kRowsOfWarp * i);
  }

  // Values of the state are found anew in each pass: they would fill registers.
  __device__ __forceinline__ static uint4 anew(const uint4& v) {
    return make_uint4(ptx::opaque(v.x), ptx::opaque(v.y), ptx::opaque(v.z), ptx::opaque(v.w));
  }

  // The lane's part of S C_t, as stored, for the rows and tokens.
  template <int kQuads>
  __device__ __forceinline__ void sum_state(float (&sums)[kQuads][kTokens],
                                            const StateInputs<kQuads>& in) const {
    float2 acc[kQuads][kTokens] = {};  // two chains of products each
#pragma unroll
    for (int n = 0; n < StatePieces::kCount; ++n) {
#pragma unroll
      for (int q = 0; q < StatePieces::kColumns / 2; q += 2) {
        float2 C[kTokens][2];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          C[t][0] = convert::unpack<Act>(in.C[t][n][q]);
          C[t][1] = convert::unpack<Act>(in.C[t][n][q + 1]);
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          float2 S[2];
          piece_pairs<State>(kTokens > 1 ? anew(in.state[i][n]) : in.state[i][n], q, S);
#pragma unroll
          for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              acc[i][t].x = fmaf(S[e].x, C[t][e].x, acc[i][t].x);
              acc[i][t].y = fmaf(S[e].y, C[t][e].y, acc[i][t].y);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        sums[i][t] = acc[i][t].x + acc[i][t].y;
        if constexpr (convert::kScaled<State>) sums[i][t] *= in.scale[i];
      }
    }
  }

  // Adds row r, whose x the lane has in place k.
  template <int kQuads, int kCount>
  __device__ __forceinline__ void add_row(float (&sums)[kQuads][kTokens], int pass, int r,
                                          const uint32_t (&xs)[kQuads][kCount], int k) const {
    const bool there = r < params.ring_rows + request.window.q;
    float weights[kTokens];
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      weights[u] = there ? shared.weights[pass][r][u] : __uint_as_float(kUnseen);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float x = convert::unpack<Act>(ptx::opaque(xs[i][k])).x;
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
        if (__float_as_uint(weights[u]) != kUnseen) sums[i][u] = fmaf(weights[u], x, sums[i][u]);
      }
    }
  }

  // Decays the sums over the checkpoint and adds the rows: those kept, and what there is behind.
  template <int kQuads>
  __device__ __forceinline__ void add_rows(float (&sums)[kQuads][kTokens],
                                           const StateInputs<kQuads>& in, int first, int p) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int u = 0; u < kTokens; ++u) sums[i][u] *= shared.decays[first + u];
    }
#pragma unroll
    for (int k = 0; k < kRowsKept; ++k) {
      add_row(sums, first / kTokens, kLanesOfRow * k + lane, in.x, k);
    }
    if constexpr (kTokens > 1) {
      const int first_place = params.by_place ? 0 : shared.start;
      for (int r = kLanesOfRow * kRowsKept + lane; r < params.ring_rows + request.window.q;
           r += kLanesOfRow) {
        uint32_t x[kQuads][1];
        load_x(x, 0, x_of_row(r, first_place, p) + slot_of_row(r));
        add_row(sums, first / kTokens, r, x, 0);
      }
    }
  }

  // Stores the outputs of a pass from the lanes' parts of them.
  template <int kQuads>
  __device__ __forceinline__ void store(float (&sums)[kQuads][kTokens], const uint32_t (&z)[kQuads],
                                        int first, unsigned char* out) const {
    const bool any = lane < kTokens && first + token_of_lane() < request.window.q;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      float y = sum_of_row(sums[i], lane);
      if (params.z != nullptr) y *= convert::silu(convert::unpack<Act>(ptx::opaque(z[i])).x);
      if (any) store_output<Act>(params, out, kRowsOfWarp * i, y);
    }
  }

  // Where the lane stores the outputs of a pass.
  __device__ __forceinline__ unsigned char* out_of_lane(int first, int p) const {
    const int64_t index = out_of_token(params, request, head, first + token_of_lane()) + p;
    return static_cast<unsigned char*>(params.out) +
           index * (params.out_type == kFloat32 ? 4 : static_cast<int>(sizeof(Act)));
  }

  // The outputs of all passes; the weights are waited for in the first.
  template <int kQuads>
  __device__ __forceinline__ void finish_all(StateInputs<kQuads>& in, int p) {
    bool last;
    int first = 0;
    do {
      forget_addresses();
      unsigned char* out = ptx::computed_now(out_of_lane(first, p));
      float sums[kQuads][kTokens];
      sum_state(sums, in);
      uint32_t z[kQuads];
#pragma unroll
      for (int i = 0; i < kQuads; ++i) z[i] = in.z[i];
      last = kTokens == 1 || first + kTokens >= request.window.q;
      if (!last) load_pass(in, first + kTokens, p);
      if (first == 0) ptx::barrier_sync<1>(params.threads);
      add_rows(sums, in, first, p);
      store(sums, z, first, out);
      first += kTokens;
    } while (!last);
  }

  // Outputs of padding become zeros.
  __device__ __forceinline__ void zero_rows(int first, int rows) const {
    if (!params.zero_padding) return;
    for (int t = 0; t < request.window.q; ++t) {
      const int64_t index = out_of_token(params, request, head, t) + first;
      for (int i = threadIdx.x & 31; i < rows; i += 32) {
        convert::store_float(params.out, index + i, params.out_type, 0.0f);
      }
    }
  }

  // Returns whether the block flushes.
  template <int kQuads>
  __device__ __forceinline__ bool read_out() {
    const int of_warp = first_row + kRowsOfWarp * kQuads * warp, p = of_warp + row;
    const bool has_rows = of_warp < params.head_dim;
    StateInputs<kQuads> in;
    if (has_rows) load_pass(in, 0, p);
    ptx::keep_order();
    StateRows rows = find_state(p);
    if (is_padding()) {
      if (has_rows) zero_rows(of_warp, kRowsOfWarp * kQuads);
      return false;
    }
    if (has_rows) {
      ask_for_state(in, rows);
      ptx::keep_order();
      if (!params.by_place) find_x(rows, first_place(), p);
      ask_for_x(in, rows);
      ptx::keep_order();
      finish_all(in, p);
    } else {
      ptx::barrier_sync<1>(params.threads);
    }
    request.window.start = shared.start, request.window.live = shared.live;
    return shared.flush != 0;
  }

  // ---- flush: all warps -------------------------------------------------------------------------

  // What a warp folds at a time: 16 rows of a slab, and of them 16 bytes a lane, or 8 of an 8-bit
  // state. Lane 4 g + t has rows g and g + 8.
  struct FoldedPiece {
    static constexpr int kPairs = sizeof(State) == 4 ? 2 : 4, kColumns = 2 * kPairs;
    static constexpr int kCount = kDstate / (4 * kColumns);  // of a slab
    float2 v[2][kPairs];
    State* to;
  };

  // x of the old rows of a slab as an A operand.
  __device__ __forceinline__ void load_fold_x(uint32_t (&x)[4], int p, const RowMap& map,
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
  __device__ __forceinline__ void load_fold_B(uint32_t (&b)[2][kPairs], int column,
                                              const RowMap& map, const Lane& at) const {
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
  __device__ __forceinline__ void fold(FoldedPiece& piece, int p, int n, const Lane& at) const {
    constexpr int kPairs = FoldedPiece::kPairs;
    const RowMap map = {request.window.start, params.ring_buffer_len};
    const int column = (4 * n + at.t) * FoldedPiece::kColumns;
    piece.to = static_cast<State*>(params.state) +
               static_cast<unsigned>(request.slot) * params.state_slot_stride +
               head * params.state_head_stride + (p + at.g) * kDstate + column;
    uint32_t x[4], b[2][kPairs], stored[2][4] = {};
    constexpr int kWords = FoldedPiece::kColumns * sizeof(State) / 4;
    load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(stored[0]), piece.to);
    load_words<kWords>(reinterpret_cast<uint32_t (&)[kWords]>(stored[1]), piece.to + 8 * kDstate);
    load_fold_x(x, p, map, at);
    load_fold_B(b, column, map, at);
    const Fold<State> rows = prepare_fold<State, Act>(FoldWeights(shared.fold_weights, at), x);
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

  __device__ __forceinline__ void flush() const {
    constexpr int kPieces = FoldedPiece::kCount;
    const Lane at;
    const int warps = params.threads / 32, pieces = rows_of_block() / kRows * kPieces;
    __syncthreads();  // the fold's weights are there, and nobody reads the checkpoint any more
    if constexpr (convert::kScaled<State>) {
      const int at_once = warps & ~(kPieces - 1);  // whole slabs
      for (int first = 0; first < pieces; first += at_once) {
        flush_scaled(first + warp, warp < at_once && first + warp < pieces, at);
      }
    } else {
      for (int n = warp; n < pieces; n += warps) {
        FoldedPiece piece;
        fold(piece, first_row + n / kPieces * kRows, n % kPieces, at);
        Target<State, kDstate>{params, piece.to, nullptr}.put(piece.v, 0);
      }
    }
  }

  // Piece n of the block's slabs: a row is encoded when all of its pieces are known.
  __device__ __forceinline__ void flush_scaled(int n, bool any, const Lane& at) const {
    constexpr int kPieces = FoldedPiece::kCount;
    const int p = n / kPieces * kRows;  // of the block
    FoldedPiece piece;
    if (any) {
      fold(piece, first_row + p, n % kPieces, at);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float amax = of_row(largest(piece.v[h]));
        if (at.t == 0) shared.largest[p + at.g + 8 * h][n % kPieces] = amax;
      }
    }
    __syncthreads();
    if (!any) return;
    const Target<State, kDstate> target = {params, nullptr, nullptr};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        amax = ptx::max_magnitude(amax, shared.largest[p + at.g + 8 * h][i]);
      }
      const convert::RowScale scale = convert::row_scale<State>(amax);
      target.put_half(piece.to + 8 * h * kDstate, piece.v[h], scale);
      if (n % kPieces == 0 && at.t == 0) *scale_of(first_row + p + at.g + 8 * h) = scale.decode;
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------

// How often a state warp may take four rows at once: what leaves it registers.
template <class State, int kDstate, int kTokens>
__device__ constexpr int most_quads() {
  constexpr int kMost = kTokens == 1 ? 4 : 2;
  constexpr int kFit = 256 * kMost / (kDstate * static_cast<int>(sizeof(State)));
  return kFit > kMost ? kMost : kFit < 1 ? 1 : kFit;
}

// Warps of a block.
template <int kTokens>
constexpr int kMostWarps = kTokens == 1 ? 14 : 10;

template <class State, class Act, int kDstate, int kTokens>
__global__ void __launch_bounds__(32 * kMostWarps<kTokens>, kDstate <= 128 ? 2 : 1)
    checkpointing_ssu_small(const __grid_constant__ CheckpointingSsuParams params) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  auto& shared = *reinterpret_cast<Shared<kTokens>*>(ptx::dynamic_smem());
  Block<State, Act, kDstate, kTokens> block(params, shared);
  bool flushes;
  if (block.warp >= params.state_warps) {
    flushes = block.weigh();
  } else if (params.quads == 1) {
    flushes = block.template read_out<1>();
  } else {
    flushes = block.template read_out<most_quads<State, kDstate, kTokens>()>();
  }
  if (flushes) block.flush();
}
