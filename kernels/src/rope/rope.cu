// Rotary embedding in place; the contract is in mod.rs. Each thread rotates PACK adjacent pairs.
//
// Compile-time constants: HEADS, HEAD_DIM, ROTARY_START, ROTARY_DIM, INTERLEAVED (0: pairs j and j
// + ROTARY_DIM / 2; 1: 2j and 2j + 1), TOKEN_STRIDE (elements from one token's first head to the
// next's: HEADS * HEAD_DIM, or more within a fused QKV tensor). PACK divides ROTARY_DIM / 2, and
// with interleaved pairs 2 PACK elements are moved as two packs. Floor: reads and writes the
// rotated part of x; reads the table once for each head, from cache after the first.

#define HALF (ROTARY_DIM / 2)
#define PACKS_A_HEAD (HALF / PACK)

__device__ __forceinline__ void table_row(const float* __restrict__ from, float (&to)[PACK]) {
  const Packed<float> pack = *reinterpret_cast<const Packed<float>*>(from);
#pragma unroll
  for (int i = 0; i < PACK; ++i) to[i] = pack.at[i];
}

// table[tokens, 2, HALF] of the angles position times frequency, in f64, because high frequencies
// multiply large positions.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_table(const double* __restrict__ frequencies, const u32* __restrict__ positions, float* __restrict__ table,
               u64 tokens) {
  const u64 number = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
  const u64 token = number / HALF, j = number % HALF;
  if (token >= tokens) return;
  // In units of pi: cospi and sinpi have no slow path that needs a stack.
  const double halves = static_cast<double>(positions[token]) * frequencies[j] * 0.31830988618379067;
  table[token * ROTARY_DIM + j] = static_cast<float>(cospi(halves));
  table[token * ROTARY_DIM + HALF + j] = static_cast<float>(sinpi(halves));
}

// Rotates x[tokens, HEADS, HEAD_DIM] by table[tokens, 2, HALF] of cosines and sines; `sign` is 1
// forward and -1 backward.
extern "C" __global__ void __launch_bounds__(THREADS)
    rope_rotate(const float* __restrict__ table, stored* __restrict__ x, float sign, u64 tokens) {
  const u64 number = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
  const int j = static_cast<int>(number % PACKS_A_HEAD) * PACK;
  const u64 head = number / PACKS_A_HEAD;
  const u64 token = head / HEADS;
  if (token >= tokens) return;
  float cosine[PACK], sine[PACK];
  table_row(table + token * ROTARY_DIM + j, cosine);
  table_row(table + token * ROTARY_DIM + HALF + j, sine);
  stored* at = x + token * TOKEN_STRIDE + (head % HEADS) * HEAD_DIM + ROTARY_START;
#if INTERLEAVED
  float v[2][PACK];
  load(at + 2 * j, v[0]);
  load(at + 2 * j + PACK, v[1]);
#pragma unroll
  for (int i = 0; i < PACK; ++i) {
    // With PACK 1 a pair is one element of each pack.
    float& first = PACK == 1 ? v[0][0] : v[2 * i / PACK][2 * i % PACK];
    float& second = PACK == 1 ? v[1][0] : v[2 * i / PACK][2 * i % PACK + 1];
    const float a = first, b = second, s = sign * sine[i];
    first = a * cosine[i] - b * s;
    second = a * s + b * cosine[i];
  }
  store(at + 2 * j, v[0]);
  store(at + 2 * j + PACK, v[1]);
#else
  float first[PACK], second[PACK];
  load(at + j, first);
  load(at + HALF + j, second);
#pragma unroll
  for (int i = 0; i < PACK; ++i) {
    const float a = first[i], b = second[i], s = sign * sine[i];
    first[i] = a * cosine[i] - b * s;
    second[i] = a * s + b * cosine[i];
  }
  store(at + j, first);
  store(at + HALF + j, second);
#endif
}
