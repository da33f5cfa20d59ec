// Runs CUDA C++ kernels on the CPU: one fiber per CUDA thread, one block at a time, one OS thread.
//
// A fiber runs until it needs other threads (block barrier, warp collective, mbarrier) and then
// returns to the scheduler. So a schedule is deterministic, and can be permuted on purpose to show
// a missing barrier. cuda_names.hpp gives kernels the CUDA names, ptx_host.hpp the PTX wrappers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace emu {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum Order : int { kForward = 0, kReverse = 1, kShuffled = 2 };

// Memory that the kernel ahead writes only when it is waited for; `kept` has as many bytes.
struct Late {
  unsigned char *data, *kept;
  size_t bytes;
};

struct Options {
  int order = kForward;     // of lanes, warps and blocks; async copies land late, early or either
  unsigned seed = 0;        // of kShuffled
  void** stacks = nullptr;  // of kMaxThreads fibers; all modules share them
  const Late* late = nullptr;
  size_t late_count = 0;
};

struct AsyncCopy {  // the source is read at the issue, `dst` is written when the copy lands
  unsigned char* dst;
  std::vector<unsigned char> data;
  void* barrier;  // the mbarrier of a bulk copy
};

struct Thread {
  void* sp = nullptr;  // saved stack pointer while the fiber does not run
  unsigned char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  uint3 index{};
  unsigned linear = 0, lane = 0, warp = 0;
  bool done = false;
  // The fiber may go on once (*word & mask) != value.
  const volatile uint64_t* word = nullptr;
  uint64_t mask = 0, value = 0;
  const char* waits_at = nullptr;
  std::vector<AsyncCopy> open_copies;               // not committed
  std::vector<std::vector<AsyncCopy>> copy_groups;  // committed, oldest first
  bool ready() const { return !done && (!word || (*word & mask) != value); }
};

using Slots = unsigned char (*)[64];  // what every lane brings to a collective

struct Rendezvous {  // of the lanes of one mask in one warp
  uint32_t mask = 0, arrived = 0;
  volatile uint64_t generation = 0;
  const char* collective = nullptr;
  alignas(16) unsigned char slots[2][32][64];  // two: a fast lane may meet again at once
};

struct NamedBarrier {
  unsigned arrived = 0, threads = 0;
  volatile uint64_t generation = 0;
};

struct Block {
  uint3 index{};
  dim3 dim, grid;
  std::vector<Thread> threads;
  std::vector<std::vector<std::unique_ptr<Rendezvous>>> warps;
  unsigned live = 0, at_barrier = 0;
  volatile uint64_t barrier_generation = 0;
  NamedBarrier named[16];
  unsigned char* shared = nullptr;
  std::vector<AsyncCopy> bulk_copies;
  std::string error;
};

extern Block* g_block;
extern Thread* g_thread;
extern Options g_options;

inline int lane() { return int(g_thread->lane); }

// Stops the calling fiber until (*word & mask) != value.
void wait_until(const volatile uint64_t* word, uint64_t mask, uint64_t value, const char* waits_at);

void block_barrier();

// The caller waits at barrier `id`, which opens for `threads` of them.
void named_barrier(int id, unsigned threads);

// Behind it a thread sees what the kernel ahead writes; before, all bits there are set.
void wait_for_kernel_ahead();

// Every lane of `mask` brings `bytes` bytes. The last to arrive passes all of them through
// `finish`, then every lane gets all of them back.
Slots meet(uint32_t mask, const char* collective, const void* in, size_t bytes,
           void (*finish)(Slots) = nullptr);

// Late landing shows a missing wait; early landing shows a buffer that is refilled too soon.
bool lands_early();

void run_grid(dim3 grid, dim3 dim, size_t shared_bytes, void (*body)(const void*),
              const void* argument);

// `record` holds the kernel's only parameter, the bytes that cuLaunchKernel would copy.
template <class Params>
void launch(void (*kernel)(Params), dim3 grid, dim3 dim, size_t shared_bytes, const void* record,
            size_t record_bytes) {
  static_assert(std::is_trivially_copyable_v<Params>, "a kernel takes one plain struct by value");
  if (record_bytes != sizeof(Params))
    throw Error("the parameter record has " + std::to_string(record_bytes) +
                " bytes, the kernel's " + std::to_string(sizeof(Params)));
  struct Call {
    void (*kernel)(Params);
    std::remove_cv_t<Params> params;
  } call{kernel, {}};
  std::memcpy(static_cast<void*>(&call.params), record, record_bytes);
  const auto body = [](const void* c) {
    static_cast<const Call*>(c)->kernel(static_cast<const Call*>(c)->params);
  };
  run_grid(grid, dim, shared_bytes, body, &call);
}

}  // namespace emu
