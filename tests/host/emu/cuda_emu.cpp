// The scheduler: fibers, barriers, collectives, blocks.
#include "cuda_emu.hpp"

#include <sys/mman.h>
#include <xmmintrin.h>

#include <algorithm>
#include <map>

#if !defined(__x86_64__)
#error "the context switch of the host emulator is written for x86-64"
#endif
#if defined(EMU_ASAN)
#define __SANITIZE_ADDRESS__ 1  // for the macros below: this file is not instrumented
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace emu {

Block* g_block = nullptr;
Thread* g_thread = nullptr;
Options g_options;

namespace {

constexpr unsigned kWarpSize = 32, kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 * 1024, kStackBytes = 256 << 10, kPageBytes = 4096;

void (*g_body)(const void*) = nullptr;
const void* g_body_argument = nullptr;
uint32_t g_random = 1;

// ------------------------------------------------------------------------------------ schedules

uint32_t random_bits() {
  g_random ^= g_random << 13;
  g_random ^= g_random >> 17;
  return g_random ^= g_random << 5;
}

// Visits 0 .. count-1 in the order of the schedule: an affine map modulo a power of two.
template <class Visit>
void in_schedule_order(unsigned count, Visit visit) {
  unsigned size = 1, step = 1, shift = 0;
  while (size < count) size *= 2;
  if (g_options.order == kReverse) step = shift = ~0u;
  if (g_options.order == kShuffled) step = random_bits() | 1, shift = random_bits() >> 8;
  for (unsigned i = 0; i < size; ++i) {
    const unsigned pick = (i * step + shift) & (size - 1);
    if (pick < count) visit(pick);
  }
}

}  // namespace

bool lands_early() {
  return g_options.order == kReverse || (g_options.order == kShuffled && random_bits() & 256);
}

// --------------------------------------------------------------------------------------- fibers

namespace {

void* g_scheduler_sp = nullptr;
void* g_scheduler_fake = nullptr;
const void* g_scheduler_stack = nullptr;
size_t g_scheduler_stack_bytes = 0;

__attribute__((naked, noinline, noipa)) void switch_stack(void** /*save*/, void* /*load*/) {
  asm(R"(
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret)");
}

#if defined(EMU_ASAN)
void before_switch(void** fake, const void* bottom, size_t bytes) {
  __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
void after_switch(void* fake, const void** bottom, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake, bottom, bytes);
}
#else
void before_switch(void**, const void*, size_t) {}
void after_switch(void*, const void**, size_t*) {}
#endif

// One pass over a warp: its lanes in the order of the schedule, and the next to look at.
struct Pass {
  Thread* lanes[kWarpSize];
  unsigned count = 0, next = 0;
} g_pass;

Thread* next_ready_lane() {
  while (g_pass.next < g_pass.count && g_block->error.empty()) {
    Thread* thread = g_pass.lanes[g_pass.next++];
    if (thread->ready()) return thread;
  }
  return nullptr;
}

// Goes on with the next lane of the pass, or with the scheduler behind the last.
void yield(bool ended = false) {
  Thread& me = *g_thread;
  g_thread = next_ready_lane();
  void** fake = ended ? nullptr : &me.fake_stack;
  if (g_thread) {
    before_switch(fake, g_thread->stack, kStackBytes);
    switch_stack(&me.sp, g_thread->sp);
  } else {
    before_switch(fake, g_scheduler_stack, g_scheduler_stack_bytes);
    switch_stack(&me.sp, g_scheduler_sp);
  }
  after_switch(me.fake_stack, nullptr, nullptr);
}

// Runs every lane of the pass that is ready; false if none was.
bool run_pass() {
  g_thread = next_ready_lane();
  if (!g_thread) return false;
  before_switch(&g_scheduler_fake, g_thread->stack, kStackBytes);
  switch_stack(&g_scheduler_sp, g_thread->sp);
  after_switch(g_scheduler_fake, nullptr, nullptr);
  return true;
}

void release_barrier_if_full() {
  Block& block = *g_block;
  if (block.at_barrier == 0 || block.at_barrier < block.live) return;
  block.at_barrier = 0;
  block.barrier_generation = block.barrier_generation + 1;
}

std::string where() {
  const Block& b = *g_block;
  return " [block " + std::to_string(b.index.x) + "," + std::to_string(b.index.y) + "," +
         std::to_string(b.index.z) +
         (g_thread ? " thread " + std::to_string(g_thread->linear) : "") + "]";
}

void thread_main() {
  if (g_scheduler_stack)
    after_switch(nullptr, nullptr, nullptr);
  else
    after_switch(nullptr, &g_scheduler_stack, &g_scheduler_stack_bytes);
  Thread& me = *g_thread;
  try {
    g_body(g_body_argument);
    if (!me.open_copies.empty() || !me.copy_groups.empty())
      throw Error("the thread ended with an async copy that nothing waited for");
  } catch (const std::exception& error) {
    if (g_block->error.empty()) g_block->error = error.what() + where();
  }
  me.done = true;
  g_block->live--;
  release_barrier_if_full();
  yield(true);
  std::abort();
}

}  // namespace

void wait_until(const volatile uint64_t* word, uint64_t mask, uint64_t value,
                const char* waits_at) {
  Thread& me = *g_thread;
  me.word = word, me.mask = mask, me.value = value, me.waits_at = waits_at;
  while (!me.ready()) yield();
  me.word = nullptr;
}

// ---------------------------------------------------------------------------------- collectives

namespace {

// "threads 0-3,7 at __syncwarp" for the threads that `chosen` takes; empty if it takes none.
template <class Chosen>
std::string thread_names(Chosen chosen, const std::string& what) {
  std::string list;
  unsigned members = 0;
  const auto& threads = g_block->threads;
  for (size_t i = 0; i < threads.size(); ++i) {
    if (!chosen(threads[i])) continue;
    const size_t first = i;
    while (i + 1 < threads.size() && chosen(threads[i + 1])) ++i;
    list += (list.empty() ? "" : ",") + std::to_string(first);
    if (i > first) list += "-" + std::to_string(i);
    members += unsigned(i - first + 1);
  }
  return members ? (members > 1 ? "threads " : "thread ") + list + " " + what : "";
}

std::string deadlock_report() {
  std::string report = "deadlock";
  std::map<std::string, bool> points;
  for (const Thread& t : g_block->threads)
    if (!t.done) points[t.waits_at] = true;
  for (const auto& point : points)
    report += (report == "deadlock" ? ": " : "; ") +
              thread_names([&](const Thread& t) { return !t.done && point.first == t.waits_at; },
                           "waiting at " + point.first);
  const std::string ended = thread_names([](const Thread& t) { return t.done; }, "ended");
  return report + (ended.empty() ? "" : "; " + ended) + where();
}

std::string divergence_report(const Rendezvous& here, const char* collective) {
  const auto waits = [&](const Thread& t) { return t.word == &here.generation; };
  return "diverged warp: thread " + std::to_string(g_thread->linear) + " is at " + collective +
         ", " + thread_names(waits, std::string("at ") + here.collective);
}

Rendezvous* rendezvous_of(uint32_t mask) {
  auto& all = g_block->warps[g_thread->warp];
  for (auto& one : all)
    if (one->mask == mask) return one.get();
  all.push_back(std::make_unique<Rendezvous>());
  all.back()->mask = mask;
  return all.back().get();
}

}  // namespace

void block_barrier() {
  Block& block = *g_block;
  const uint64_t generation = block.barrier_generation;
  block.at_barrier++;
  release_barrier_if_full();
  wait_until(&block.barrier_generation, ~0ull, generation, "__syncthreads");
}

void named_barrier(int id, unsigned threads) {
  NamedBarrier& barrier = g_block->named[id];
  if (barrier.arrived && barrier.threads != threads)
    throw Error("barrier " + std::to_string(id) + ": a thread expects " + std::to_string(threads) +
                " threads, another " + std::to_string(barrier.threads));
  barrier.threads = threads;
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.generation = generation + 1;
  } else {
    wait_until(&barrier.generation, ~0ull, generation, "bar.sync");
  }
}

Slots meet(uint32_t mask, const char* collective, const void* in, size_t bytes,
           void (*finish)(Slots)) {
  Thread& me = *g_thread;
  if (!(mask >> me.lane & 1))
    throw Error(std::string(collective) + ": the calling lane is not in its mask");
  Rendezvous* here = rendezvous_of(mask);
  if (here->arrived == 0) here->collective = collective;
  if (here->collective != collective && std::strcmp(here->collective, collective) != 0)
    throw Error(divergence_report(*here, collective));
  const uint64_t generation = here->generation;
  const Slots slots = here->slots[generation & 1];
  if (bytes) std::memcpy(slots[me.lane], in, bytes);
  here->arrived |= 1u << me.lane;
  if (here->arrived == mask) {
    if (finish) finish(slots);
    here->arrived = 0;
    here->generation = generation + 1;
  } else {
    wait_until(&here->generation, ~0ull, generation, collective);
  }
  return slots;
}

// ------------------------------------------------------------------------- the kernel ahead

namespace {

volatile uint64_t g_ended;  // 1: the kernel ahead has, for this block

void start_early() {
  g_ended = 0;
  for (size_t i = 0; i < g_options.late_count; ++i) {
    const Late& late = g_options.late[i];
    std::memcpy(late.kept, late.data, late.bytes);
    std::memset(late.data, 0xff, late.bytes);
  }
}

// When nothing else can go on, so that whoever does not wait comes too soon.
bool kernel_ahead_ends() {
  if (g_ended || !g_options.late_count) return false;
  for (size_t i = 0; i < g_options.late_count; ++i) {
    const Late& late = g_options.late[i];
    std::memcpy(late.data, late.kept, late.bytes);
  }
  g_ended = 1;
  return true;
}

}  // namespace

void wait_for_kernel_ahead() {
  if (g_options.late_count) wait_until(&g_ended, ~uint64_t{0}, 0, "griddepcontrol.wait");
}

// -------------------------------------------------------------------------------------- launches

namespace {

void give_stack(Thread& thread) {
  void*& stack = g_options.stacks[thread.linear];
  if (!stack) {  // its lowest page is never mapped in: an overflow is a fault
    void* pages = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw Error("no memory for the stacks of the emulated threads");
    mprotect(pages, kPageBytes, PROT_NONE);
    stack = static_cast<unsigned char*>(pages) + kPageBytes;
  }
  thread.stack = static_cast<unsigned char*>(stack);
  ASAN_UNPOISON_MEMORY_REGION(thread.stack, kStackBytes);
  // Staggered tops: stacks of one size would share their cache sets.
  auto** sp = reinterpret_cast<void**>(thread.stack + kStackBytes - thread.lane * 320);
  *--sp = nullptr;  // the ABI's alignment at a function's entry
  *--sp = reinterpret_cast<void*>(&thread_main);
  thread.sp = sp - 6;  // the six saved registers hold anything
}

void start_threads(Block& block) {
  const unsigned count = block.dim.x * block.dim.y * block.dim.z;
  if (block.threads.size() < count) block.threads.resize(count);
  block.warps.resize((count + kWarpSize - 1) / kWarpSize);
  block.live = count, block.at_barrier = 0;
  for (NamedBarrier& barrier : block.named) barrier.arrived = 0;
  block.bulk_copies.clear();
  for (auto& warp : block.warps)
    for (auto& rendezvous : warp) rendezvous->arrived = 0;
  for (unsigned i = 0; i < count; ++i) {
    Thread& t = block.threads[i];
    t.linear = i, t.lane = i % kWarpSize, t.warp = i / kWarpSize;
    t.index =
        make_uint3(i % block.dim.x, i / block.dim.x % block.dim.y, i / (block.dim.x * block.dim.y));
    t.done = false, t.word = nullptr;
    t.open_copies.clear(), t.copy_groups.clear();
    give_stack(t);
  }
}

bool run_warp(Block& block, unsigned warp) {
  const unsigned first = warp * kWarpSize;
  const unsigned lanes = std::min<unsigned>(kWarpSize, unsigned(block.threads.size()) - first);
  g_pass.count = g_pass.next = 0;
  in_schedule_order(lanes,
                    [&](unsigned i) { g_pass.lanes[g_pass.count++] = &block.threads[first + i]; });
  return run_pass();
}

void run_block(Block& block) {
  start_threads(block);
  while (block.live && block.error.empty()) {
    bool moved = false;
    in_schedule_order(unsigned(block.warps.size()), [&](unsigned warp) {
      // Stay on a warp while it moves; the shuffled schedule leaves it now and then.
      while (block.error.empty() && run_warp(block, warp)) {
        moved = true;
        if (g_options.order == kShuffled && random_bits() % 4 == 0) break;
      }
    });
    if (!moved && block.error.empty() && !kernel_ahead_ends()) block.error = deadlock_report();
  }
  for (const NamedBarrier& barrier : block.named)
    if (block.error.empty() && barrier.arrived)
      block.error = "the block ended while a named barrier waited for threads" + where();
  if (block.error.empty() && !block.bulk_copies.empty())
    block.error = "the block ended with a bulk copy that nothing waited for" + where();
}

// Dynamic shared memory of one block: NaN bits, exactly sized for AddressSanitizer, and a band
// behind it that shows a write past its end without it.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes), padded_((bytes + 127) / 128 * 128 + 128) {
    memory_ = static_cast<unsigned char*>(std::aligned_alloc(128, padded_));
    std::memset(memory_, 0xff, padded_);
    ASAN_POISON_MEMORY_REGION(memory_ + bytes_, padded_ - bytes_);
  }
  SharedMemory(const SharedMemory&) = delete;
  ~SharedMemory() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, padded_);
    std::free(memory_);
  }
  unsigned char* data() const { return memory_; }
  bool band_is_whole() const {
    ASAN_UNPOISON_MEMORY_REGION(memory_, padded_);
    return std::all_of(memory_ + bytes_, memory_ + padded_, [](int v) { return v == 0xff; });
  }

 private:
  size_t bytes_, padded_;
  unsigned char* memory_;
};

// CuPy compiles with -ftz=true: results and operands below the normal range are zero.
struct FlushToZero {
  const unsigned saved = _mm_getcsr();
  FlushToZero() { _mm_setcsr(saved | 0x8040); }
  ~FlushToZero() { _mm_setcsr(saved); }
};

}  // namespace

void run_grid(dim3 grid, dim3 dim, size_t shared_bytes, void (*body)(const void*),
              const void* argument) {
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z,
                 threads = uint64_t(dim.x) * dim.y * dim.z;
  if (!blocks || grid.y > 65535 || grid.z > 65535 || !threads || threads > kMaxThreads ||
      shared_bytes > kMaxSharedBytes)
    throw Error("invalid launch configuration");
  static std::map<uint64_t, Block> pool;  // keeps what the threads have allocated
  Block& block = pool[threads];
  block.dim = dim, block.grid = grid;
  block.error.clear();
  g_block = &block;
  g_scheduler_stack = nullptr;  // another OS thread than last time may have called
  g_body = body, g_body_argument = argument;
  g_random = g_options.seed * 2654435761u | 1;
  const FlushToZero flush;
  in_schedule_order(unsigned(blocks), [&](unsigned i) {
    const SharedMemory shared(shared_bytes);
    block.index = make_uint3(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
    block.shared = shared.data();
    start_early();
    run_block(block);
    if (block.error.empty() && !shared.band_is_whole())
      block.error = "a write past the end of dynamic shared memory" + where();
    if (!block.error.empty()) throw Error(block.error);
  });
}

}  // namespace emu
