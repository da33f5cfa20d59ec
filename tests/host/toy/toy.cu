// Small kernels for the tests of the emulator itself, with faults that can be planted.
#include "ptx_host.hpp"

enum class Fault {
  kNone,
  kNoBarrier,
  kNoWait,
  kRefilledTooSoon,
  kNoSyncwarp,
  kUnwaitedCopy,
  kMisaligned,
  kDiverged,
  kDeadlock,
  kEndedLanes,
  kOutsideMask,
  kSharedOverrun,
  kReadPastEnd,
  kIntOverflow,
};

struct ReverseParams {
  const float* x;  // (blocks, kStages, kTile)
  float* out;      // (blocks, kStages, kTile): every tile in reverse
  int stages;
};

constexpr int kThreads = 64, kTile = 4 * kThreads;

// Two tiles of shared memory: while one is read, the next is on its way.
template <Fault kFault>
__global__ void __launch_bounds__(kThreads) reverse(const __grid_constant__ ReverseParams params) {
  float* tiles = reinterpret_cast<float*>(ptx::dynamic_smem());
  const int tid = threadIdx.x;
  const int64_t first = int64_t(blockIdx.x) * params.stages * kTile;
  const auto issue = [&](int stage) {
    const float* from = params.x + first + stage * kTile + 4 * tid;
    if (kFault == Fault::kMisaligned) from += 1;
    ptx::cp_async16(ptx::to_smem(tiles + stage % 2 * kTile + 4 * tid), from);
    ptx::cp_async_commit();
  };
  issue(0);
  for (int stage = 0; stage < params.stages; ++stage) {
    if (stage + 1 < params.stages) issue(stage + 1);
    if (kFault == Fault::kUnwaitedCopy && stage > 0) break;
    if (kFault != Fault::kNoWait) {
      if (stage + 1 < params.stages)
        ptx::cp_async_wait<1>();
      else
        ptx::cp_async_wait<0>();
    }
    if (kFault == Fault::kDeadlock && tid == 40) __syncwarp();
    if (kFault != Fault::kNoBarrier) __syncthreads();
    for (int i = 4 * tid; i < 4 * tid + 4; ++i) {
      params.out[first + stage * kTile + i] = tiles[stage % 2 * kTile + kTile - 1 - i];
    }
    if (kFault != Fault::kRefilledTooSoon) __syncthreads();
  }
  if (kFault == Fault::kNoWait) ptx::cp_async_wait<0>();
  if (kFault == Fault::kSharedOverrun && tid == 0) tiles[2 * kTile] = 0.0f;
  if (kFault == Fault::kReadPastEnd && tid == 0) params.out[0] = params.x[first + 2 * kTile];
  if (kFault == Fault::kIntOverflow) params.out[0] = float(params.stages + 0x7fffffff);
}

// out[lane] = x[31 - lane] through shared memory of one warp.
template <Fault kFault>
__global__ void mirror(const __grid_constant__ ReverseParams params) {
  float* line = reinterpret_cast<float*>(ptx::dynamic_smem());
  const int lane = threadIdx.x & 31;
  line[lane] = params.x[lane];
  if (kFault == Fault::kDiverged && lane < 3) params.out[lane] = __shfl_sync(~0u, line[lane], 0);
  if (kFault == Fault::kEndedLanes && lane >= 30) return;
  if (kFault == Fault::kOutsideMask) __syncwarp(0xffff);
  if (kFault != Fault::kNoSyncwarp) __syncwarp();
  params.out[lane] = line[31 - lane];
}

struct CollectiveParams {
  const uint32_t* a;  // (32, 4) and (32, 2): fragments of an m16n8k16 product
  const uint32_t* b;
  float* d;          // (32, 4): in and out
  uint32_t* matrix;  // (32,): one register of an 8x8 matrix, transposed in place
  int* shuffled;     // (6, 32)
};

// The product of all columns of A, or of the first eight.
template <bool kBfloat16, int kColumns>
__global__ void collectives(const __grid_constant__ CollectiveParams params) {
  const int lane = threadIdx.x;
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = params.a[4 * lane + i], d[i] = params.d[4 * lane + i];
  const uint32_t b0 = params.b[2 * lane], b1 = params.b[2 * lane + 1];
  if (kColumns == 8) {
    kBfloat16 ? ptx::mma_m16n8k8_bf16(d, a[0], a[1], b0) : ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
  } else {
    kBfloat16 ? ptx::mma_m16n8k16_bf16(d, a, b0, b1) : ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
  for (int i = 0; i < 4; ++i) params.d[4 * lane + i] = d[i];
  params.matrix[lane] = ptx::movmatrix(params.matrix[lane]);
  int* out = params.shuffled + lane;
  out[0] = __shfl_sync(~0u, lane, 35);
  out[32] = __shfl_sync(~0u, lane, 17, 16);
  out[64] = __shfl_xor_sync(~0u, lane, 3, 16);
  out[96] = __shfl_up_sync(~0u, lane, 2, 16);
  out[128] = __shfl_down_sync(~0u, lane, 2, 16);
  out[160] = int(__ballot_sync(~0u, lane % 3 == 0));
}

// The tile of `ldmatrix` through one bulk copy and an mbarrier: rows of 64 bytes.
template <Fault kFault>
__global__ void fragments(const __grid_constant__ CollectiveParams params) {
  unsigned char* tile = ptx::dynamic_smem();
  const ptx::smem_t bar = ptx::to_smem(tile + 1024);
  const int lane = threadIdx.x;
  if (lane == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::mbarrier_fence_init();
    ptx::mbarrier_arrive_expect_tx(bar, 1024);
    ptx::cp_async_bulk(ptx::to_smem(tile), params.a, 1024, bar);
  }
  __syncwarp();
  if (kFault != Fault::kNoWait) ptx::mbarrier_wait_parity(bar, 0);
  uint32_t rows[4], columns[4];
  const int offset = (lane & 15) * 64 + (lane >> 4) * 16;
  ptx::ldmatrix_x4(rows, ptx::to_smem(tile + offset));
  ptx::ldmatrix_x4_trans(columns, ptx::to_smem(tile + offset));
  for (int i = 0; i < 4; ++i) {
    params.shuffled[4 * lane + i] = int(rows[i]);
    params.matrix[4 * lane + i] = columns[i];
  }
  if (kFault == Fault::kNoWait) ptx::mbarrier_wait_parity(bar, 0);
}

// Order of blocks and of threads, by an atomic counter.
__global__ void count(const __grid_constant__ CollectiveParams params) {
  params.shuffled[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(&params.shuffled[192], 1);
}
