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
