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
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<stored>((bits >> 16) | 0x40u);
  return static_cast<stored>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
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
  Packed<stored> pack;
#pragma unroll
  for (int i = 0; i < PACK; ++i) pack.at[i] = narrowed(from[i]);
  *reinterpret_cast<Packed<stored>*>(to) = pack;
}

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

// The sum of a column of partial[parts, columns] in the order of parts.
__device__ __forceinline__ float column_total(const float* __restrict__ partial, int column, u64 columns, int parts) {
  float sum = 0.0f;
  for (int part = 0; part < parts; ++part) sum += partial[part * columns + column];
  return sum;
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

  __device__ __forceinline__ u32 word(u64 at) {
    if (at / 4 != group) {
      group = at / 4;
      words[0] = static_cast<u32>(group);
      words[1] = static_cast<u32>(group >> 32);
      words[2] = tensor;
      words[3] = step;
      philox(words, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
    }
    // A select instead of an index: registers cannot be indexed at run time.
    const u32 lane = static_cast<u32>(at % 4);
    return lane == 0 ? words[0] : lane == 1 ? words[1] : lane == 2 ? words[2] : words[3];
  }
};
