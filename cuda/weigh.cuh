// Weight warps of the small form: what each row of a step weighs in each output, and the new rows
// of the rings. Eight lanes have a row of the ring or a new token.
#pragma once
#include "small.cuh"
#include "step.cuh"

namespace replay {

template <class Act, int kDstate, int kTokens>
struct WeightWarp : Block<kTokens> {
  using Base = Block<kTokens>;
  using Base::first_row, Base::request, Base::token, Base::ring_offset;
  using Base::params, Base::shared, Base::warp, Base::row, Base::lane, Base::head, Base::group;
  using Pieces = RowPieces<Act, kDstate>;

  __device__ __forceinline__ explicit WeightWarp(const Base& block) : Base(block) {}

  // Rows of a ring but for the slot: the lane's own one of B and dt, and every eighth of dt.
  struct RingRows {
    const Act* B;
    const float *dt, *every_eighth[kRowsOfLane];
  };

  // A row of the step, of the ring or a token: `behind` is the sum of dt of the live ring rows
  // after it, or of all of them.
  struct Row {
    int index, token;  // negative: of the ring
    bool live;
    float dt, behind;
  };

  // What the lane asks for: `new_dt` of its token, `ring_dt` of every eighth row, `dt` of its own.
  struct Inputs {
    uint4 B[Pieces::kCount], C[kTokens][Pieces::kCount], x;
    uint32_t A, D, dt_bias, new_dt;
    float dt, ring_dt[kRowsOfLane];
    int start, live;
  };

  // If row 0 lies at place `first`. The row of a new token is the token.
  __device__ __forceinline__ RingRows find_rows(int first, const Row& mine) const {
    const float* dt = dt_ring(params, 0, head);
    RingRows rows;
    rows.B =
        B_ring<Act>(params, 0, group) + ring_offset(first, mine.index, params.B_cache_row_stride);
    if (mine.token >= 0) rows.B = B_of_token<Act>(params, request, group, token(mine.token));
    rows.B = ptx::computed_now(rows.B + Pieces::kColumns * lane);
    rows.dt = ptx::computed_now(dt + ring_offset(first, mine.index, params.dt_cache_row_stride));
#pragma unroll
    for (int n = 0; n < kRowsOfLane; ++n) {
      const int r = kLanesOfRow * n + lane;
      rows.every_eighth[n] =
          ptx::computed_now(dt + ring_offset(first, r, params.dt_cache_row_stride));
    }
    return rows;
  }

  // The lane has 16 bytes of the block's part of x.
  __device__ __forceinline__ bool has_x() const { return 8 * lane < Base::rows_of_block(); }

  __device__ __forceinline__ void ask_for_tokens(Inputs& in) const {
    in.dt_bias = in.new_dt = 0;
    if (params.dt_bias != nullptr) {
      in.dt_bias =
          convert::load_bits(params.dt_bias, head * params.dt_bias_stride, params.dt_bias_type);
    }
    if (request.window.q == 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Act* C = C_of_token<Act>(params, request, group, token(t));
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
        in.C[t][n] = Pieces::load(C + Pieces::kColumns * lane, n);
      }
    }
    in.new_dt = convert::load_bits(params.dt,
                                   dt_of_token(params, request, head, token(Base::token_of_lane())),
                                   params.dt_type);
  }

  // What is used last.
  __device__ __forceinline__ void ask_for_rest(Inputs& in, int own) const {
    in.A = convert::load_bits(params.A, head * params.A_stride, params.A_type);
    in.D = 0;
    if (params.D != nullptr) {
      in.D = convert::load_bits(params.D, head * params.D_stride, params.D_type);
    }
    if (own >= 0 && own < request.window.q && has_x()) {
      const Act* x = x_of_token<Act>(params, request, head, token(own)) + first_row;
      in.x = reinterpret_cast<const uint4*>(x)[lane];
    }
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
      for (int n = 0; n < Pieces::kCount; ++n) in.B[n] = Pieces::load(B, n);
    }
    const int64_t of_slot = slot * params.dt_cache_slot_stride;
    in.dt = 0.0f;
    if (of_ring) in.dt = load_float(rows.dt + of_slot);
#pragma unroll
    for (int n = 0; n < kRowsOfLane; ++n) {
      in.ring_dt[n] = 0.0f;
      if (kLanesOfRow * n + lane < params.ring_rows) {
        in.ring_dt[n] = load_float(rows.every_eighth[n] + of_slot);
      }
    }
  }

  // dt of the new tokens as it counts.
  __device__ __forceinline__ void find_new_dt(float (&new_dt)[kTokens], const Inputs& in) const {
    float dt = convert::bits_to_float(in.new_dt, params.dt_type) +
               convert::bits_to_float(in.dt_bias, params.dt_bias_type);
    if (params.dt_softplus) dt = convert::softplus(dt);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      new_dt[t] = kTokens == 1 ? dt : __shfl_sync(kAllLanes, dt, t, kLanesOfRow);
    }
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
    for (int n = 0; n < kRowsOfLane; ++n) {
      const int i = live_row(kLanesOfRow * n + lane);
      if (i > j && i < request.window.live) sum[0] += in.ring_dt[n];
    }
    return sum_of_row(sum, lane);
  }

  // C_t . B_j for the lane's token.
  __device__ __forceinline__ float product(const Inputs& in) const {
    float sum[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float2 sums = make_float2(0.0f, 0.0f);  // two chains of products
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
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

  // exp(c_t - c_j) dt_j (C_t . B_j) of the row and the tokens, D with the token's own row. Spans of
  // time are sums of the dt in between, where nothing cancels.
  __device__ __forceinline__ void put_weights(const Inputs& in, const Row& mine,
                                              const float (&new_dt)[kTokens]) {
    const int own = mine.token, t = Base::token_of_lane(), q = request.window.q;
    const float of_token = product(in), a = convert::bits_to_float(in.A, params.A_type) * kLog2e;
    float until = 0.0f, since = 0.0f;  // dt up to t: of all new tokens, of those behind the row
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      if (u <= t) until += new_dt[u];
      if (u <= t && u > own) since += new_dt[u];
    }
    if (lane >= kTokens || t >= q || own >= q) return;
    float weight = ptx::ex2(a * (own < 0 ? mine.behind + since : since)) * mine.dt * of_token;
    if (t == own) {
      weight += convert::bits_to_float(in.D, params.D_type);
      shared.decays[t] = ptx::ex2(a * (mine.behind + until));
    }
    const bool seen = mine.live && own <= t;
    shared.weights[mine.index][t] = seen ? weight : __uint_as_float(kUnseen);
  }

  // Writes the row's token behind the live rows: x of the block, and dt and B once.
  __device__ __forceinline__ void append(const Inputs& in, const Row& of_row) const {
    const unsigned slot = request.slot;
    const Window& window = request.window;
    const int end = ring_row(window.start, window.live, params.ring_buffer_len);
    const int place = ring_row(end, of_row.token, params.ring_buffer_len);
    if (has_x()) {
      Act* x = x_ring<Act>(params, slot, head) + row_offset(place, params.x_cache_row_stride);
      reinterpret_cast<uint4*>(x + first_row)[lane] = in.x;
    }
    if (first_row > 0) return;
    if (lane == 0) {
      dt_ring(params, slot, head)[row_offset(place, params.dt_cache_row_stride)] = of_row.dt;
    }
    if (head != group * params.heads_per_group) return;
    Act* B = B_ring<Act>(params, slot, group) + row_offset(place, params.B_cache_row_stride);
#pragma unroll
    for (int n = 0; n < Pieces::kCount; ++n) {
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

  // What the row weighs in all outputs.
  __device__ __forceinline__ void weigh_row(const Inputs& in, Row& mine) {
    float new_dt[kTokens];
    find_new_dt(new_dt, in);
    set_window(params, request, in.start, in.live);
    int j = live_row(mine.index);
    if (mine.token >= 0) j = -1;
    mine.live = j < request.window.live;
    mine.dt = mine.token < 0 ? in.dt : mine.token == 0 ? new_dt[0] : new_dt[kTokens - 1];
    mine.behind = sum_behind(j, in);
    put_weights(in, mine, new_dt);
  }

  // Returns the request with its window.
  __device__ __forceinline__ Request run() {
    Row mine = {};
    mine.index = kRowsOfWarp * (warp - params.state_warps) + row;
    mine.token = mine.index - params.ring_rows;
    Inputs in;
    ask_for_tokens(in);
    RingRows rows = find_rows(0, mine);
    ptx::keep_order();
    if (Base::is_padding()) return request;
    if (!params.by_place) rows = find_rows(Base::first_place(), mine);
    ask_for_slot(in, rows, mine);
    ask_for_rest(in, mine.token);
    ptx::keep_order();
    weigh_row(in, mine);
    const Window& window = request.window;
    if (threadIdx.x == 32 * params.state_warps) {
      shared.start = window.start, shared.live = window.live, shared.flush = window.flush;
    }
    ptx::barrier_arrive<1>(params.threads);
    if (mine.token >= 0 && mine.token < window.q) append(in, mine);
    if (window.flush && warp == params.state_warps) {
      prepare_flush(convert::bits_to_float(in.A, params.A_type));
    }
    return request;
  }
};

}  // namespace replay
