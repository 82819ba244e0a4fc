// A machine of one thread that runs CUDA sources as C++: what a kernel's source uses of CUDA, by fibers. Blocks run one
// after the other; the threads of a block in turns, from one barrier or shuffle to the next.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
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
struct uint4 {
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

namespace machine {

enum class State { ready, at_barrier, at_shuffle, done };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  State state;
};

static std::vector<Fiber> fibers;
static std::vector<float> shuffled;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;

inline void wait(State state) {
  Fiber& own = fibers[current];
  own.state = state;
  swapcontext(&own.context, &scheduler);
}

inline void enter() {
  body();
  fibers[current].state = State::done;
  swapcontext(&fibers[current].context, &scheduler);
}

// Whether fibers first..last that have not ended all wait at `state`; if so they go on.
inline bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state == State::done) {
      // A shuffle of a full mask needs all lanes.
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

inline void run_block(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    fiber.state = State::ready;
    makecontext(&fiber.context, enter, 0);
  }
  for (;;) {
    bool ran = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != State::ready) continue;
      current = i;
      threadIdx = {i, 0};
      swapcontext(&scheduler, &fibers[i].context);
      ran = true;
    }
    for (unsigned warp = 0; warp < threads; warp += 32) ran |= release(warp, warp + 32, State::at_shuffle);
    ran |= release(0, threads, State::at_barrier);
    if (ran) continue;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != State::done) {
        std::fprintf(stderr, "block %u: thread %u waits for ever\n", blockIdx.x, i);
        std::exit(3);
      }
    }
    return;
  }
}

inline void launch(Index grid, unsigned threads, std::function<void()> kernel) {
  body = kernel;
  fibers.resize(threads);
  shuffled.resize(threads);
  gridDim = grid;
  blockDim = {threads, 1};
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y};
      run_block(threads);
    }
  }
}

// Buffers come as a 64-bit length and the bytes, and go back likewise.
inline std::vector<std::vector<char>> buffers() {
  std::vector<std::vector<char>> all;
  std::uint64_t bytes;
  while (std::fread(&bytes, 8, 1, stdin) == 1) {
    all.emplace_back(bytes);
    if (bytes != 0 && std::fread(all.back().data(), bytes, 1, stdin) != 1) std::exit(4);
  }
  return all;
}

inline void give_back(const std::vector<std::vector<char>>& all) {
  for (const auto& buffer : all) std::fwrite(buffer.data(), 1, buffer.size(), stdout);
}

}  // namespace machine

inline void __syncthreads() { machine::wait(machine::State::at_barrier); }

inline float __shfl_xor_sync(unsigned, float value, int away) {
  const unsigned own = machine::current;
  machine::shuffled[own] = value;
  machine::wait(machine::State::at_shuffle);
  const float other = machine::shuffled[own ^ static_cast<unsigned>(away)];
  // Nobody writes before all have read.
  machine::wait(machine::State::at_shuffle);
  return other;
}

// What attention.cu does by instructions of its own: products of 16 x 16 by 16 x 8 in fragments, matrices of shared memory
// as fragments, pairs of bf16. A lane's elements lie as the PTX manual has them (mma.m16n8k16, ldmatrix).

namespace machine {

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

}  // namespace machine

inline void fragments(unsigned (&to)[4], const unsigned short* row) { machine::gather(to, row, false); }
inline void fragments_transposed(unsigned (&to)[4], const unsigned short* row) { machine::gather(to, row, true); }

inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  using machine::posted;
  const unsigned own = machine::current, base = own / 32 * 32, lane = own % 32;
  posted[own] = {{a[0], a[1], a[2], a[3]}, {b0, b1}, nullptr};
  machine::wait(machine::State::at_shuffle);
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned left = posted[base + row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const unsigned right = posted[base + column * 4 + k % 8 / 2].b[k / 8];
      d[i] += machine::half_of(left, k % 2) * machine::half_of(right, k % 2);
    }
  }
  machine::wait(machine::State::at_shuffle);
}

inline unsigned pair(float low, float high) {
  const auto narrow = [](float x) {
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return narrow(low) | narrow(high) << 16;
}
