// Emulator of the parts of CUDA that the kernels use: runs CUDA sources as C++ on one thread, with
// fibers. Blocks run one after the other; the threads of a block take turns, each running until its
// next barrier or shuffle, in an order that differs from block to block. Shared memory holds NaNs
// when a block begins. cpu_emulator.rs builds it as a library and launches with emulator::call().
// Misaligned packs trap.
//
// With CHECKED the compiler calls a function before each access to memory (its instrumentation for
// ThreadSanitizer, whose runtime is not linked). Those functions below report what a GPU would not:
// races in shared memory, reads of shared memory that nobody wrote, and accesses beside shared
// arrays and allocations.

// Checked jumps would report a switch of stacks as an error.
#undef _FORTIFY_SOURCE

#include <csetjmp>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory"), aligned(128)))
#define CUDA_ON_CPU

struct Index {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static Index threadIdx, blockIdx, gridDim, blockDim;

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double cospi(double x) { return std::cos(std::fmod(x, 2.0) * 3.141592653589793); }
inline double sinpi(double x) { return std::sin(std::fmod(x, 2.0) * 3.141592653589793); }

namespace emulator {

enum class State { ready, at_barrier, at_shuffle, done };

// A thread, which runs the body of one block after the other. setjmp switches between fibers
// without a system call; ucontext, which needs one, only enters each fiber once.
struct Fiber {
  jmp_buf place;
  bool entered = false;
  std::vector<char> stack = std::vector<char>(1 << 16);
  State state;
};

#define UNCHECKED __attribute__((no_sanitize_thread))

// A range of addresses.
struct Range {
  std::uint64_t begin, end;
};

#ifdef CHECKED
// Shared arrays, and allocations with the guards around them: sorted.
static const Range* arrays = nullptr;
static const Range* allocations = nullptr;
static unsigned array_count = 0, allocation_count = 0;
static std::uint64_t guard = 0;

// The last accesses to a byte of shared memory in this block, by thread.
struct Shadow {
  int writer, reader;
  bool many;  // threads of several warps have read since the last barrier
  unsigned written_at, written_in_warp, read_at, read_in_warp;
};

// Barriers that this block has passed, and each warp's own.
static unsigned passed = 0;
static unsigned passed_by_warp[64];
static Shadow shadows[256 << 10];
static char said[512];

UNCHECKED inline void report(const char* what, const void* at);
#endif

// Makes the compiler take a variable for one that others may change.
inline void seen(const volatile void* at) { asm volatile("" : : "r"(at) : "memory"); }

// Shared memory: the bounds of its section, null if a source has none.
extern "C" {
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
}

#ifdef CHECKED
// Lies behind the shared arrays, for overruns of the last.
static char behind_shared_memory[4096] __attribute__((section("shared_memory_behind"), used, aligned(128)));
#endif

static std::vector<Fiber> fibers;
static std::vector<float> shuffled;
static jmp_buf scheduler;
static unsigned current;
static std::function<void()> body;

inline void wait(State state) {
  Fiber& own = fibers[current];
  own.state = state;
  if (_setjmp(own.place) == 0) _longjmp(scheduler, 1);
}

inline void enter() {
  for (;;) {
    body();
    wait(State::done);
  }
}

// Runs the current fiber until it waits.
inline void resume() {
  Fiber& fiber = fibers[current];
  if (_setjmp(scheduler) != 0) return;
  if (fiber.entered) _longjmp(fiber.place, 1);
  fiber.entered = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = fiber.stack.size();
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

// Whether all unfinished fibers first..last wait at `state`; if so, releases them.
inline bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state == State::done) {
      // A shuffle with a full mask needs all lanes.
      if (state == State::at_shuffle) return false;
      continue;
    }
    if (fibers[i].state != state) return false;
    any = true;
  }
  if (!any) return false;
  for (unsigned i = first; i < last; ++i)
    if (fibers[i].state == state) fibers[i].state = State::ready;
#ifdef CHECKED
  if (state == State::at_barrier) ++passed; else ++passed_by_warp[first / 32];
#endif
  return true;
}

// The thread that runs as number `turn` of a block: in order, in reverse, or from another warp on.
inline unsigned turn_of(unsigned turn, unsigned threads, unsigned block) {
  const unsigned warps = threads / 32;
  switch (block % 3) {
    case 0: return turn;
    case 1: return threads - 1 - turn;
    default: return (turn / 32 + block / 3 + 1) % warps * 32 + turn % 32;
  }
}

// False if threads wait for something that never comes.
inline bool run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) fibers[i].state = State::ready;
  std::memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
#ifdef CHECKED
  passed = 0;
  std::memset(passed_by_warp, 0, sizeof(passed_by_warp));
  std::size_t shared = 0;
  for (unsigned number = 0; number < array_count; ++number) shared += arrays[number].end - arrays[number].begin;
  if (shared * sizeof(Shadow) > sizeof(shadows)) {
    std::fprintf(stderr, "%zu bytes of shared memory: more than a block has\n", shared);
    return false;
  }
  for (std::size_t at = 0; at < shared; ++at) shadows[at] = {-1, -1, false, 0, 0, 0, 0};
#endif
  for (;;) {
    bool ran = false;
    for (unsigned turn = 0; turn < threads; ++turn) {
      const unsigned i = turn_of(turn, threads, blockIdx.x + blockIdx.y);
      if (fibers[i].state != State::ready) continue;
      current = i;
      threadIdx = {i, 0};
      resume();
#ifdef CHECKED
      if (said[0] != 0) return false;
#endif
      ran = true;
    }
    for (unsigned warp = 0; warp < threads; warp += 32) ran |= release(warp, warp + 32, State::at_shuffle);
    ran |= release(0, threads, State::at_barrier);
    if (ran) continue;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != State::done) {
        std::fprintf(stderr, "block %u: thread %u waits for ever\n", blockIdx.x, i);
        return false;
      }
    }
    return true;
  }
}

inline bool launch(Index grid, unsigned threads, std::function<void()> kernel) {
  body = kernel;
  if (fibers.size() < threads) fibers.resize(threads);
  shuffled.resize(threads);
  gridDim = grid;
  blockDim = {threads, 1};
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y};
      if (run_block(threads)) continue;
      // The fibers are in the middle of the kernel.
      fibers.clear();
      return false;
    }
  }
  return true;
}

// The letter of a parameter type, as in launch.rs.
template <typename T>
struct Letter {
  static_assert(std::is_pointer<T>::value, "a parameter of a type that launches do not pass");
  static const char of = 'p';
};
template <> struct Letter<int> { static const char of = 'i'; };
template <> struct Letter<unsigned> { static const char of = 'u'; };
template <> struct Letter<long long> { static const char of = 'l'; };
template <> struct Letter<unsigned long long> { static const char of = 'U'; };
template <> struct Letter<float> { static const char of = 'f'; };
template <> struct Letter<double> { static const char of = 'd'; };

template <typename T>
T argument(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename... P, std::size_t... I>
int call_with(void (*kernel)(P...), const std::uint64_t* bits, Index grid, unsigned threads, std::index_sequence<I...>) {
  const bool done = launch(grid, threads, [&] { kernel(argument<P>(bits[I])...); });
#ifdef CHECKED
  if (said[0] != 0) return 3;
#endif
  return done ? 0 : 2;
}

#ifdef CHECKED
UNCHECKED inline void report(const char* what, const void* at) {
  if (said[0] != 0) return;
  std::snprintf(said, sizeof(said), "%s at %p, by thread %u of block %u, %u", what, at, threadIdx.x, blockIdx.x, blockIdx.y);
  wait(State::done);  // the access must not happen
}

UNCHECKED inline const Range* range_of(const Range* ranges, unsigned count, std::uint64_t at) {
  unsigned low = 0;
  while (count > low) {
    const unsigned middle = (low + count) / 2;
    if (ranges[middle].begin <= at) low = middle + 1; else count = middle;
  }
  return low == 0 || ranges[low - 1].end <= at ? nullptr : ranges + (low - 1);
}

// Whether an access by `thread`, when so many barriers had been passed, came before this one.
UNCHECKED inline bool ordered(int thread, unsigned at, unsigned in_warp) {
  const int own = static_cast<int>(current);
  return thread < 0 || thread == own || at < passed || (thread / 32 == own / 32 && in_warp < passed_by_warp[own / 32]);
}

UNCHECKED inline void shared_access(const Range& array, char* at, std::size_t bytes, bool writes) {
  const std::uint64_t number = reinterpret_cast<std::uint64_t>(at);
  if (number + bytes > array.end) return report("an access beside a shared array", at);
  std::size_t first = number - array.begin;
  for (const Range* before = arrays; before != &array; ++before) first += before->end - before->begin;
  const int own = static_cast<int>(current);
  const unsigned in_warp = passed_by_warp[own / 32];
  for (std::size_t i = 0; i < bytes; ++i) {
    Shadow& shadow = shadows[first + i];
    if (!ordered(shadow.writer, shadow.written_at, shadow.written_in_warp)) {
      return report(writes ? "two writes without a barrier between them" : "a read of what another thread may not have written yet", at);
    }
    if (!writes) {
      if (shadow.writer < 0) return report("a read of shared memory that nobody wrote", at);
      const bool before = shadow.reader >= 0 && shadow.read_at == passed;
      shadow.many = before && (shadow.many || shadow.reader / 32 != own / 32);
      shadow.reader = own;
      shadow.read_at = passed;
      shadow.read_in_warp = in_warp;
      continue;
    }
    const bool others = shadow.many && shadow.read_at == passed;
    if (others || !ordered(shadow.reader, shadow.read_at, shadow.read_in_warp)) {
      return report("a write of what another thread may still read", at);
    }
    shadow.writer = own;
    shadow.written_at = passed;
    shadow.written_in_warp = in_warp;
    shadow.reader = -1;
    shadow.many = false;
  }
}

UNCHECKED inline void access(void* address, std::size_t bytes, bool writes) {
  char* at = static_cast<char*>(address);
  const std::uint64_t number = reinterpret_cast<std::uint64_t>(at);
  if (array_count > 0 && number >= arrays[0].begin && number < arrays[array_count - 1].end) {
    const Range* array = range_of(arrays, array_count, number);
    if (array != nullptr) return shared_access(*array, at, bytes, writes);
  }
  // GCC leaves the shared arrays of templates out of the section.
  const bool inside = at >= __start_shared_memory && at < __stop_shared_memory + sizeof(behind_shared_memory);
  if (inside && __start_shared_memory != __stop_shared_memory) return report("an access beside a shared array", at);
  if (allocation_count == 0) return;
  if (number < allocations[0].begin || number >= allocations[allocation_count - 1].end) return;
  const Range* allocation = range_of(allocations, allocation_count, number);
  if (allocation == nullptr) return;
  if (number < allocation->begin + guard || number + bytes > allocation->end - guard) report("an access beside its memory", at);
}
#endif

// Launches a kernel on arguments given as bits. Returns 0 if done, 1 if the arguments do not have
// the kernel's types, 2 if threads would wait for ever.
template <typename... P>
int call(void (*kernel)(P...), const char* letters, const std::uint64_t* bits, unsigned x, unsigned y, unsigned threads) {
  const char own[] = {Letter<P>::of..., 0};
  if (std::strcmp(own, letters) != 0) {
    std::fprintf(stderr, "launched with arguments %s, takes %s\n", letters, own);
    return 1;
  }
  return call_with(kernel, bits, {x, y}, threads, std::index_sequence_for<P...>());
}

}  // namespace emulator

#ifdef CHECKED
#define ACCESSES(size)                                                                                       \
  UNCHECKED void __tsan_read##size(void* at) { emulator::access(at, size, false); }                          \
  UNCHECKED void __tsan_write##size(void* at) { emulator::access(at, size, true); }                          \
  UNCHECKED void __tsan_unaligned_read##size(void* at) { emulator::access(at, size, false); }                \
  UNCHECKED void __tsan_unaligned_write##size(void* at) { emulator::access(at, size, true); }
extern "C" {
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
UNCHECKED void __tsan_read_range(void* at, unsigned long bytes) { emulator::access(at, bytes, false); }
UNCHECKED void __tsan_write_range(void* at, unsigned long bytes) { emulator::access(at, bytes, true); }
UNCHECKED void __tsan_init() {}
UNCHECKED void __tsan_func_entry(void*) {}
UNCHECKED void __tsan_func_exit() {}
UNCHECKED void __tsan_vptr_update(void**, void*) {}

// What the emulator is told before a launch, and what it says after one that returned 3.
__attribute__((visibility("default"))) UNCHECKED void emulator_memory(const emulator::Range* arrays, unsigned array_count,
                                                                      const emulator::Range* allocations,
                                                                      unsigned allocation_count, std::uint64_t guard) {
  emulator::arrays = arrays;
  emulator::array_count = array_count;
  emulator::allocations = allocations;
  emulator::allocation_count = allocation_count;
  emulator::guard = guard;
  emulator::said[0] = 0;
}
__attribute__((visibility("default"))) UNCHECKED const char* emulator_said() { return emulator::said; }
// Tells where the library lies: its place among the symbols is known, too.
__attribute__((visibility("default"))) char emulator_base = 0;
}
#endif

inline void __syncthreads() { emulator::wait(emulator::State::at_barrier); }

inline void __syncwarp() { emulator::wait(emulator::State::at_shuffle); }

inline float __shfl_xor_sync(unsigned, float value, int away) {
  const unsigned own = emulator::current;
  emulator::shuffled[own] = value;
  emulator::wait(emulator::State::at_shuffle);
  const float other = emulator::shuffled[own ^ static_cast<unsigned>(away)];
  // Nobody writes before all have read.
  emulator::wait(emulator::State::at_shuffle);
  return other;
}

inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int away) {
  return __float_as_uint(__shfl_xor_sync(mask, __uint_as_float(value), away));
}

inline float __shfl_sync(unsigned, float value, int lane) {
  const unsigned own = emulator::current;
  emulator::shuffled[own] = value;
  emulator::wait(emulator::State::at_shuffle);
  const float other = emulator::shuffled[own / 32 * 32 + static_cast<unsigned>(lane)];
  emulator::wait(emulator::State::at_shuffle);
  return other;
}

inline unsigned __ballot_sync(unsigned, int predicate) {
  const unsigned own = emulator::current;
  emulator::shuffled[own] = predicate ? 1.0f : 0.0f;
  emulator::wait(emulator::State::at_shuffle);
  unsigned all = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (emulator::shuffled[own / 32 * 32 + lane] != 0.0f) all |= 1u << lane;
  }
  emulator::wait(emulator::State::at_shuffle);
  return all;
}

inline unsigned atomicMin(unsigned* at, unsigned value) {
  const unsigned old = *at;
  if (value < old) *at = value;
  return old;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

// The instructions that attention.cu writes in inline assembly: products of 16 x 16 by 16 x 8
// fragments, fragments loaded from shared memory, pairs of bf16. The elements of each lane are
// those of the PTX manual (mma.m16n8k16, ldmatrix).

namespace emulator {

struct Posted {
  unsigned a[4], b[2];
  const unsigned short* row;
};
static std::vector<Posted> posted(1024);

inline float half_of(unsigned both, int upper) { return __uint_as_float(upper ? both & 0xffff0000u : both << 16); }

inline void gather(unsigned (&to)[4], const unsigned short* row, bool transposed) {
  const unsigned own = current, base = own / 32 * 32, lane = own % 32;
  posted[own].row = row;
  wait(State::at_shuffle);
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    unsigned halves[2];
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned r = transposed ? lane % 4 * 2 + i : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + i;
      halves[i] = posted[base + matrix * 8 + r].row[c];
    }
    to[matrix] = halves[0] | halves[1] << 16;
  }
  wait(State::at_shuffle);
}

}  // namespace emulator

inline void fragments(unsigned (&to)[4], const unsigned short* row) { emulator::gather(to, row, false); }
inline void fragments_transposed(unsigned (&to)[4], const unsigned short* row) { emulator::gather(to, row, true); }

inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  using emulator::posted;
  const unsigned own = emulator::current, base = own / 32 * 32, lane = own % 32;
  posted[own] = {{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr};
  emulator::wait(emulator::State::at_shuffle);
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned left = posted[base + row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const unsigned right = posted[base + column * 4 + k % 8 / 2].b[k / 8];
      d[i] += emulator::half_of(left, k % 2) * emulator::half_of(right, k % 2);
    }
  }
  emulator::wait(emulator::State::at_shuffle);
}

inline unsigned pair(float low, float high) {
  const auto narrow = [](float x) {
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return narrow(low) | narrow(high) << 16;
}
