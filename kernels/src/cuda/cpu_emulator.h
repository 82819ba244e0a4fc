// Emulator of the parts of CUDA that the kernels use: runs CUDA sources as C++ on one thread, with
// fibers. Blocks run one after the other; the threads of a block take turns, each running until its
// next barrier or shuffle. cpu_emulator.rs builds it as a library and launches with
// emulator::call(). Misaligned packs trap.

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
#define __shared__ static
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
  return true;
}

// False if threads wait for something that never comes.
inline bool run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) fibers[i].state = State::ready;
  for (;;) {
    bool ran = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != State::ready) continue;
      current = i;
      threadIdx = {i, 0};
      resume();
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
  return launch(grid, threads, [&] { kernel(argument<P>(bits[I])...); }) ? 0 : 2;
}

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
  unsigned old = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
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
