// Calls the conversions of convert.cuh one value at a time, for tests/test_conversions.py.
#include "../../cuda/convert.cuh"

struct ProbeParams {
  const float* x;
  const uint32_t* field;
  uint32_t* out;
  int64_t count;
};

// out = the bits of x rounded with its random field.
template <class T>
__global__ void round_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    params.out[i] = convert::round_stochastically<T>(params.x[i], params.field[i]);
  }
}

// out = the code of x, to nearest.
template <class T>
__global__ void code_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float2 value = make_float2(params.x[i], 0.0f), zero = make_float2(0.0f, 0.0f);
    params.out[i] = convert::pack_codes<T>(value, zero) & 0xffu;
  }
}

// out = the bits of the float that the code in `field` stands for.
template <class T>
__global__ void value_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    params.out[i] = __float_as_uint(convert::unpack<T>(params.field[i]).x);
  }
}

// out = the word of the eight codes of x[8 i] and those behind it.
__global__ void e2m1_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float v[8];
    for (int k = 0; k < 8; ++k) v[k] = params.x[8 * i + k];
    params.out[i] = convert::pack_e2m1(v);
  }
}

// out = the code of a block's scale whose largest magnitude is x, or what its values are multiplied
// by.
template <bool kInverse>
__global__ void block_scale_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const convert::BlockScale scale = convert::block_scale(params.x[i]);
    params.out[i] = kInverse ? __float_as_uint(scale.inverse) : scale.code;
  }
}

// out = the bits of what a row is multiplied by whose largest magnitude is x, or of its scale.
template <class T, bool kDecode>
__global__ void row_scale_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const convert::RowScale scale = convert::row_scale<T>(params.x[i]);
    params.out[i] = __float_as_uint(kDecode ? scale.decode : scale.encode);
  }
}

// out[4 i ...] = the pairs that the eight codes in `field` stand for, times the block scale in the
// bits of x.
__global__ void e2m1_value_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t pairs[4];
    convert::unpack_e2m1(params.field[i], pairs);
    const uint32_t scale = convert::block_scale_pair(__float_as_uint(params.x[i]));
    for (int k = 0; k < 4; ++k) {
      params.out[4 * i + k] = convert::multiply_halves(pairs[k], scale);
    }
  }
}

// out[4 i ...] = the words of Philox at offset field[i] under the seed in x's bits.
template <int kRounds>
__global__ void philox_probe(const __grid_constant__ ProbeParams params) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < params.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const uint64_t offset = uint64_t{params.field[2 * i]} | uint64_t{params.field[2 * i + 1]} << 32;
    const uint64_t seed = uint64_t{__float_as_uint(params.x[2 * i])} |
                          uint64_t{__float_as_uint(params.x[2 * i + 1])} << 32;
    const uint4 words = convert::philox4x32(offset, seed, kRounds);
    params.out[4 * i] = words.x, params.out[4 * i + 1] = words.y;
    params.out[4 * i + 2] = words.z, params.out[4 * i + 3] = words.w;
  }
}
