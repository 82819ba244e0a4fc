// Random numbers by global element index; the contract is in mod.rs. One thread for each element.
//
// Compile-time constants: only the prelude's. Floor: writes the tensor.

// A uniform number in (0, 1) from one word: the middle of its interval.
__device__ __forceinline__ double unit(u32 word) {
  return (static_cast<double>(word) + 0.5) * (1.0 / 4294967296.0);
}

// out[.., middle, columns] = deviation times a normal number, for a block of a global tensor: local
// element (i, j, l) has the global index offset + i stride0 + j stride1 + l stride2. Elements 2 i
// and 2 i + 1 of the whole are the cosine and the sine of one pair, computed in f64 as on the CPU.
extern "C" __global__ void __launch_bounds__(THREADS)
    random_normal(float* __restrict__ out, u64 elements, u64 middle, u64 columns, u64 offset, u64 stride0, u64 stride1,
                  u64 stride2, u64 seed, u32 tensor, u32 step, double deviation) {
  const u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= elements) return;
  const u64 row = at / columns;
  const u64 index = offset + row / middle * stride0 + row % middle * stride1 + at % columns * stride2;
  Draws draws(seed, tensor, step);
  const u64 pair = index & ~1ull;
  const double radius = sqrt(-2.0 * log(unit(draws.word(pair))));
  const double halves = 2.0 * unit(draws.word(pair + 1));
  out[at] = static_cast<float>(deviation * radius * (index == pair ? cospi(halves) : sinpi(halves)));
}
