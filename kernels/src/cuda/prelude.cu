// In front of every kernel source: element types, packs of 16 bytes, reductions over a block.
//
// Defined by the host: STORED_BF16 (0 or 1), PACK (elements that one thread loads at once: a power
// of two that divides every row and takes at most 16 bytes), THREADS (threads of a block, a
// multiple of 32). bf16 is held as 16 bits, so that no header is needed.

typedef unsigned int u32;
typedef unsigned long long u64;

#if STORED_BF16
typedef unsigned short stored;
__device__ __forceinline__ float widened(stored x) { return __uint_as_float(static_cast<u32>(x) << 16); }
// Rounds to nearest, ties to even; a NaN stays a NaN.
__device__ __forceinline__ stored narrowed(float x) {
#ifdef CUDA_ON_CPU
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<stored>((bits >> 16) | 0x40u);
  return static_cast<stored>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
  stored rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
  return rounded;
#endif
}
// Two at a time: the first in the lower half.
__device__ __forceinline__ u32 narrowed_pair(float first, float second) {
#ifdef CUDA_ON_CPU
  return narrowed(first) | static_cast<u32>(narrowed(second)) << 16;
#else
  u32 rounded;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(rounded) : "f"(second), "f"(first));
  return rounded;
#endif
}
#else
typedef float stored;
__device__ __forceinline__ float widened(stored x) { return x; }
__device__ __forceinline__ stored narrowed(float x) { return x; }
#endif

// Adjacent elements, moved by one instruction.
template <typename T>
struct alignas(sizeof(T) * PACK) Packed {
  T at[PACK];
};

__device__ __forceinline__ void load(const stored* from, float (&to)[PACK]) {
  const Packed<stored> pack = *reinterpret_cast<const Packed<stored>*>(from);
#pragma unroll
  for (int i = 0; i < PACK; ++i) to[i] = widened(pack.at[i]);
}

__device__ __forceinline__ void store(stored* to, const float (&from)[PACK]) {
#if STORED_BF16 && PACK > 1
  struct alignas(2 * PACK) Pairs {
    u32 at[PACK / 2];
  } pairs;
#pragma unroll
  for (int i = 0; i < PACK / 2; ++i) pairs.at[i] = narrowed_pair(from[2 * i], from[2 * i + 1]);
  *reinterpret_cast<Pairs*>(to) = pairs;
#else
  Packed<stored> pack;
#pragma unroll
  for (int i = 0; i < PACK; ++i) pack.at[i] = narrowed(from[i]);
  *reinterpret_cast<Packed<stored>*>(to) = pack;
#endif
}

// Where results are rounded to bf16, functions may be off by a few units in the last place of f32.
#if STORED_BF16 && !defined(CUDA_ON_CPU)
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ float tanh_of(float x) { return 1.0f - quotient(2.0f, 1.0f + exp_of(2.0f * x)); }
#else
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ float quotient(float a, float b) { return a / b; }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
#endif

__device__ __forceinline__ void put(stored* to, const float (&from)[PACK], int accumulate) {
  if (accumulate) {
    float old[PACK];
    load(to, old);
#pragma unroll
    for (int i = 0; i < PACK; ++i) old[i] += from[i];
    store(to, old);
  } else {
    store(to, from);
  }
}

struct Sum {
  static __device__ __forceinline__ float none() { return 0.0f; }
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

struct Max {
  static __device__ __forceinline__ float none() { return __int_as_float(0xff800000); }
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// Reduces the values of all threads of a block in a fixed order; every thread gets the result.
template <typename Op>
__device__ __forceinline__ float block_reduce(float value) {
  __shared__ float warps[THREADS / 32];
#pragma unroll
  for (int away = 16; away > 0; away /= 2) value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, away));
  if (THREADS == 32) return value;
  __syncthreads();  // an earlier reduction's results may still be read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) value = Op::of(value, warps[warp]);
  return value;
}

// Sums over rows take two kernels. In the first each block has a strip of 32 PACK columns
// (blockIdx.x) and every gridDim.y-th row, warp by warp; partial[gridDim.y, ...] gets the sums of
// blocks. In the second a block adds up 32 columns of those. All orders are fixed.
#define WARPS (THREADS / 32)
#define STRIP (32 * PACK)

__device__ __forceinline__ int strip_column() { return blockIdx.x * STRIP + threadIdx.x % 32 * PACK; }

// Rows first, first + step, ..: all are there, or those below `rows`.
template <int ROWS, bool ALL>
struct RowGroup {
  int first, step, rows;

  static constexpr int count = ROWS;
  __device__ __forceinline__ bool has(int i) const { return ALL || first + i * step < rows; }
  // The number of a row to load: of one that is there.
  __device__ __forceinline__ int row(int i) const { return has(i) ? first + i * step : first; }
};

// Calls `add(group)` for each group of rows of this warp, so that the loads of a group are in
// flight together. No load may be inside a branch: the compiler widens what a branch loads before
// it leaves the branch, so it waits for each load in turn.
template <int ROWS, typename Rows>
__device__ __forceinline__ void each_row(int rows, Rows of) {
  const int step = gridDim.y * WARPS;
  int row = blockIdx.y * WARPS + threadIdx.x / 32;
  for (; row + (ROWS - 1) * step < rows; row += ROWS * step) of.add(RowGroup<ROWS, true>{row, step, rows});
  if (row < rows) of.add(RowGroup<ROWS, false>{row, step, rows});
}

// to[columns]: the sums of a strip, added up over the warps of the block in their order.
__device__ __forceinline__ void write_strip(const float (&sum)[PACK], float* __restrict__ to, int columns) {
  __shared__ float sums[WARPS][STRIP];
  __syncthreads();  // an earlier strip may still be read
#pragma unroll
  for (int i = 0; i < PACK; ++i) sums[threadIdx.x / 32][threadIdx.x % 32 * PACK + i] = sum[i];
  __syncthreads();
  for (int at = threadIdx.x; at < STRIP; at += THREADS) {
    const int column = blockIdx.x * STRIP + at;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][at];
    if (column < columns) to[column] = total;
  }
}

// The sum of a column of partial[parts, stride] of which `columns` are summed, for a block's 32
// columns from blockIdx.x 32 on: each warp adds up every WARPS-th part, then the first warp the
// sums of all, which it gets.
__device__ __forceinline__ float column_total(const float* __restrict__ partial, int column, int columns, u64 stride,
                                              int parts) {
  __shared__ float sums[WARPS][32];
  float sum = 0.0f;
  if (column < columns) {
    constexpr int TOGETHER = 32;  // loads in flight
    for (int part = threadIdx.x / 32; part < parts; part += TOGETHER * WARPS) {
      float more[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int own = part + i * WARPS;
        more[i] = own < parts ? partial[own * stride + column] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) sum += more[i];
    }
  }
  __syncthreads();  // an earlier total may still be read
  sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp][threadIdx.x % 32];
  return sum;
}

// A kernel that adds up what another left may be launched as its follower (`Launch::following`):
// its blocks then begin while the last ones of the other run, and wait before they read what it
// wrote. GPUs before Hopper begin it after the other.
__device__ __forceinline__ void let_next_kernel_begin() {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_kernel_before() {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Index of a thread's first element in a grid that covers a tensor once.
__device__ __forceinline__ u64 pack_start() {
  return (static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x) * PACK;
}

// What changes from step to step, in device memory, so that a recorded step can be replayed as the
// next one. The pointer is null if there is none.
struct StepNumbers {
  u32 step;          // added to the draws' step
  float loss_scale;  // scale of the loss gradient, if the argument is OF_STEP
};

__device__ __forceinline__ u32 step_of(const StepNumbers* __restrict__ numbers, u32 step) {
  return numbers == nullptr ? step : step + numbers->step;
}

__device__ __forceinline__ float scale_of(const StepNumbers* __restrict__ numbers, float scale) {
  return numbers == nullptr ? scale : scale * numbers->loss_scale;
}

// Philox4x32-10 (random/philox.rs), in place on the counter.
__device__ __forceinline__ void philox(u32 (&counter)[4], u32 low, u32 high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = static_cast<u64>(0xD2511F53u) * counter[0], second = static_cast<u64>(0xCD9E8D57u) * counter[2];
    const u32 mixed0 = static_cast<u32>(second >> 32) ^ counter[1] ^ low;
    const u32 mixed2 = static_cast<u32>(first >> 32) ^ counter[3] ^ high;
    counter[1] = static_cast<u32>(second);
    counter[3] = static_cast<u32>(first);
    counter[0] = mixed0;
    counter[2] = mixed2;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// The draws of a stream, generated in groups of four.
struct Draws {
  u64 seed;
  u32 tensor, step;
  u64 group;
  u32 words[4];

  __device__ __forceinline__ Draws(u64 seed, u32 tensor, u32 step)
      : seed(seed), tensor(tensor), step(step), group(~0ull) {}

  // Sets the words of draws 4 number to 4 number + 3.
  __device__ __forceinline__ void draw(u64 number) {
    group = number;
    words[0] = static_cast<u32>(group);
    words[1] = static_cast<u32>(group >> 32);
    words[2] = tensor;
    words[3] = step;
    philox(words, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
  }

  __device__ __forceinline__ u32 word(u64 at) {
    if (at / 4 != group) draw(at / 4);
    // A select instead of an index: registers cannot be indexed at run time.
    const u32 lane = static_cast<u32>(at % 4);
    return lane == 0 ? words[0] : lane == 1 ? words[1] : lane == 2 ? words[2] : words[3];
  }
};
