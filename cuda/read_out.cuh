// State warps of the small form: the checkpoint read out, the rows added, and the outputs stored.
// Eight lanes have kQuads rows p, which follow one another.
#pragma once
#include "small.cuh"

namespace replay {

// How often a state warp may take four rows at once: what leaves it registers.
template <class State, int kDstate, int kTokens>
__device__ constexpr int most_quads() {
  constexpr int kMost = kTokens == 1 ? 4 : 2;
  constexpr int kFit = 256 * kMost / (kDstate * static_cast<int>(sizeof(State)));
  return kFit > kMost ? kMost : kFit < 1 ? 1 : kFit;
}

// Two values of 16 bits as numbers, or zeros where they are not seen: they may be NaN.
template <class Act>
struct SeenPair {
  uint32_t all;
  __device__ __forceinline__ explicit SeenPair(bool seen) : all(ptx::opaque(seen ? ~0u : 0u)) {}
  __device__ __forceinline__ float2 of(uint32_t pair) const {
    return convert::unpack<Act>(pair & all);
  }
};
template <>
struct SeenPair<bf16> {
  uint32_t low, high;
  __device__ __forceinline__ explicit SeenPair(bool seen)
      : low(ptx::opaque(seen ? 0x10000u : 0u)), high(ptx::opaque(seen ? 0xffff0000u : 0u)) {}
  // In one instruction each.
  __device__ __forceinline__ float2 of(uint32_t pair) const {
    return make_float2(__uint_as_float(pair * low), __uint_as_float(pair & high));
  }
};

template <class State, class Act, int kDstate, int kTokens, bool kPlain, int kQuads>
struct StateWarp : Block<kTokens, kPlain> {
  using Base = Block<kTokens, kPlain>;
  using Base::first_row, Base::request, Base::has;
  using Base::params, Base::shared, Base::warp, Base::head, Base::group;
  using Pieces = RowPieces<State, kDstate>;
  static constexpr int kRowBytes = kDstate * sizeof(State);
  static constexpr int kRowsOfLane = kStepRows / kLanesOfRow;
  static constexpr int kOutputs = kQuads * kTokens;  // of eight lanes, row by row
  static constexpr int kWordsOfX = (kQuads + 1) / 2;

  const int row, lane;  // the lane's row in its warp, and its place in the row

  __device__ __forceinline__ explicit StateWarp(const Base& block)
      : Base(block), row(block.lane >> 3), lane(block.lane & 7) {}

  // What the lane asks for: pieces of the checkpoint and their scales, C beside them, x of every
  // eighth row, and z of its output.
  struct Inputs {
    uint4 state[kQuads][Pieces::kCount];
    uint32_t C[kTokens][Pieces::kCount][Pieces::kColumns / 2];
    uint32_t x[kRowsOfLane][kWordsOfX], new_x[kTokens], z;
    float scale[kQuads];
  };

  // As `sum_of_row` deals them.
  __device__ __forceinline__ int token_of_lane() const { return lane & (kTokens - 1); }
  __device__ __forceinline__ int row_of_output() const { return lane / kTokens & (kQuads - 1); }

  __device__ __forceinline__ void ask_for_C(Inputs& in) const {
    constexpr int kBytes = Pieces::kColumns * sizeof(Act);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Bytes C = behind(Base::C_of_token(t), lane, kBytes);
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
        const Bytes piece = C + kLanesOfRow * kBytes * n;
        if constexpr (kBytes == 8) {
          const uint2 v = ptx::ld_global_v2(piece);
          in.C[t][n][0] = v.x, in.C[t][n][1] = v.y;
        } else {
#pragma unroll
          for (int i = 0; i < kBytes / 16; ++i) {
            const uint4 v = ptx::ld_global_v4(piece + 16 * i);
            uint32_t* to = in.C[t][n] + 4 * i;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
          }
        }
      }
    }
  }

  // z of the output at row p.
  __device__ __forceinline__ uint32_t load_z(int p) const {
    const Bytes z = Base::token_in(bytes_of(params.z), params.z_sequence_bytes, head,
                                   params.z_head_bytes, token_of_lane(), params.z_token_bytes);
    return ptx::ld_global_u16(behind(z, p, sizeof(Act)));
  }

  __device__ __forceinline__ void ask_for_state(Inputs& in, Bytes state, Bytes scale) const {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int n = 0; n < Pieces::kCount; ++n) {
        constexpr int kNext = kLanesOfRow * Pieces::kBytes;
        in.state[i][n] = Pieces::load(state + kRowBytes * i + kNext * n);
      }
    }
    if constexpr (convert::kScaled<State>) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i) in.scale[i] = load_float(scale + 4 * i);
    }
  }

  // x of every eighth row of the ring. Of rows that are not there its last one is.
  __device__ __forceinline__ void ask_for_x(Inputs& in, Bytes ring) const {
    if (has(kByPlace)) {
      ask_for_x(in, ring, [](int r) { return r; });
    } else {
      ask_for_x(in, ring, [&](int r) { return Base::place_of(r); });
    }
  }
  template <class Place>
  __device__ __forceinline__ void ask_for_x(Inputs& in, Bytes ring, Place place) const {
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
      const int r = min(kLanesOfRow * k + lane, params.last_row);
      const Bytes x = behind(ring, place(r), params.x_cache_row_bytes);
      if constexpr (kQuads == 4) {
        const uint2 words = ptx::ld_global_v2(x);
        in.x[k][0] = words.x, in.x[k][1] = words.y;
      } else {
        in.x[k][0] = kQuads == 2 ? ptx::ld_global_u32(x) : ptx::ld_global_u16(x);
      }
    }
  }

  // The lane's part of S C_t for the rows and tokens.
  __device__ __forceinline__ void sum_state(float (&sums)[kOutputs], const Inputs& in) const {
    float2 acc[kQuads][kTokens] = {};  // two chains of products each
#pragma unroll
    for (int n = 0; n < Pieces::kCount; ++n) {
#pragma unroll
      for (int q = 0; q < Pieces::kColumns / 2; q += 2) {
        float2 C[kTokens][2];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          C[t][0] = convert::unpack<Act>(in.C[t][n][q]);
          C[t][1] = convert::unpack<Act>(in.C[t][n][q + 1]);
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
          float2 S[2];
          piece_pairs<State>(in.state[i][n], q, S);
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
        float& sum = sums[kTokens * i + t];
        sum = acc[i][t].x + acc[i][t].y;
        if constexpr (convert::kScaled<State>) sum *= in.scale[i];
      }
    }
  }

  // Decays the sums over the checkpoint and adds the rows.
  __device__ __forceinline__ void add_rows(float (&sums)[kOutputs], const Inputs& in) const {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) sums[i] *= shared.decays[i % kTokens];
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const auto parts = shared.weights[kLanesOfRow * k + lane][t];
        const bool is_there = is_seen(parts.decayed_dt);  // else its numbers may be NaN
        const SeenPair<Act> seen(is_there);
        const float weight = is_there ? parts.decayed_dt * parts.product : 0.0f;
#pragma unroll
        for (int i = 0; i < kQuads; i += 2) {
          const float2 x = seen.of(in.x[k][i / 2]);
          float& sum = sums[kTokens * i + t];
          sum = fmaf(weight, x.x, sum);
          if constexpr (kQuads > 1) {
            float& next = sums[kTokens * (i + 1) + t];
            next = fmaf(weight, x.y, next);
          }
        }
      }
    }
  }

  // x of the new rows, at the output's row p.
  __device__ __forceinline__ void ask_for_new_x(Inputs& in, int p) const {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      in.new_x[t] = ptx::ld_global_u16(behind(Base::x_of_token(t), p, sizeof(Act)));
    }
  }
  __device__ __forceinline__ void add_new_rows(float& y, const Inputs& in) const {
    const int t = token_of_lane();
#pragma unroll
    for (int own = 0; own < kTokens; ++own) {
      const float x = convert::unpack<Act>(ptx::opaque(in.new_x[own])).x;
      const float product = shared.weights[kFirstToken<kTokens> + own][t].product;
      float weight = shared.decayed_new_dt[own][t] * product;
      if (own == t) weight += shared.D;
      if (own <= t) y = fmaf(weight, x, y);
    }
  }

  // Hands the rows to a flush.
  __device__ __forceinline__ void put_rows(const Inputs& in) const {
    auto& rows = OldRows<kDstate>::behind(shared);
#pragma unroll
    for (int k = 0; k < kRowsOfLane; ++k) {
      unsigned char* x = rows.x[kLanesOfRow * k + lane] + 2 * kQuads * (kRowsOfWarp * warp + row);
      if constexpr (kQuads == 4) {
        *reinterpret_cast<uint2*>(x) = make_uint2(in.x[k][0], in.x[k][1]);
      } else if constexpr (kQuads == 2) {
        *reinterpret_cast<uint32_t*>(x) = in.x[k][0];
      } else {
        *reinterpret_cast<unsigned short*>(x) = static_cast<unsigned short>(in.x[k][0]);
      }
    }
  }

  // Where the output at row p goes.
  __device__ __forceinline__ Bytes place_of_output(int p) const {
    const Bytes out =
        Base::token_in(bytes_of(params.out), params.out_sequence_bytes, head, params.out_head_bytes,
                       token_of_lane(), params.out_token_bytes);
    return behind(out, p, params.out_item_bytes);
  }

  __device__ __forceinline__ void store(float y, Bytes to) const {
    if (lane >= kOutputs || (kTokens > 1 && token_of_lane() >= request.window.q)) return;
    unsigned char* out = const_cast<unsigned char*>(to);
    if (has(kWideOut)) {
      ptx::st_global_u32(out, __float_as_uint(y));
    } else {
      ptx::st_global_u16(out, convert::pack<Act>(make_float2(y, 0.0f)));
    }
  }

  // The compiler would put the sums off until after the barrier.
  __device__ __forceinline__ void wait_for_weights(const float (&sums)[kOutputs]) const {
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) all ^= __float_as_uint(sums[i]);
    ptx::barrier_sync<1>(params.threads + ptx::zero_behind(all));
  }

  // A warp behind the head's last row only takes part in the fold.
  __device__ __forceinline__ int run_without_rows() {
    if (Base::is_padding()) return 0;
    if (warp == Base::kNoWarp) return Base::run_without_tokens();
    ptx::barrier_sync<1>(params.threads);
    return shared.flush;
  }

  // Whether the sequence flushes.
  __device__ __forceinline__ int run() {
    const unsigned of_warp = kRowsOfWarp * kQuads * warp, first = first_row + of_warp;
    if (first >= static_cast<unsigned>(params.head_dim)) return run_without_rows();
    const int p = first + kQuads * row;
    Bytes state = behind(bytes_of(params.state), head, params.state_head_bytes);
    state += static_cast<unsigned>(p * kRowBytes + Pieces::kBytes * lane);
    Bytes ring = behind(bytes_of(params.x_cache), head, params.x_cache_head_bytes);
    ring += static_cast<unsigned>(p * sizeof(Act));
    Bytes scale = nullptr;
    if constexpr (convert::kScaled<State>) {
      scale = behind(bytes_of(params.state_scale), head, params.state_scale_head_bytes) + 4u * p;
    }
    const unsigned state_bytes = field_behind(params.state_slot_bytes, ptx::zero_of_lane());
    const unsigned ring_bytes = field_behind(params.x_cache_slot_bytes, ptx::zero_of_lane());
    ptx::keep_order();
    const int of_output = p + row_of_output();
    if (Base::is_padding(low_bits(state) | low_bits(ring) | state_bytes | ring_bytes)) {
      if (params.zero_padding) store(0.0f, place_of_output(of_output));
      return 0;
    }
    const unsigned slot = request.slot;
    Inputs in;
    state = behind(state, slot, state_bytes);
    if constexpr (convert::kScaled<State>) {
      scale = behind(scale, slot, params.state_scale_slot_bytes);
    }
    ask_for_state(in, state, scale);
    ask_for_x(in, behind(ring, slot, ring_bytes));
    ptx::keep_order();
    // Many blocks ask for these: they are in the L2 soon.
    ask_for_C(in);
    ask_for_new_x(in, of_output);
    if (has(kGated)) ptx::aside([&] { in.z = load_z(of_output); });
    ptx::keep_order();
    float sums[kOutputs];
    sum_state(sums, in);
    wait_for_weights(sums);
    const int flush = shared.flush;
    const Bytes out = place_of_output(of_output);
    add_rows(sums, in);
    float y = sum_of_row(sums, lane);
    add_new_rows(y, in);
    float gate = 1.0f;
    if (has(kGated)) {
      ptx::aside([&] { gate = convert::silu(convert::unpack<Act>(ptx::opaque(in.z)).x); });
      y *= gate;
    }
    store(y, out);
    if (flush != 0) put_rows(in);
    return flush;
  }
};

}  // namespace replay
