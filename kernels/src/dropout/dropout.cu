// Dropout; the contract is in mod.rs. One thread for each pack.
//
// Compile-time constants: only the prelude's. Floor: reads x, writes y; the mask is computed.

// y = x mask scale, for a block [.., middle, columns] of a global tensor: local element (i, j, l)
// has the global index offset + i stride0 + j stride1 + l stride2. `columns` is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(THREADS)
    dropout_apply(const stored* __restrict__ x, stored* __restrict__ y, u64 elements, u64 middle, u64 columns, u64 offset,
                  u64 stride0, u64 stride1, u64 stride2, u64 seed, u32 tensor, u32 step,
                  const StepNumbers* __restrict__ numbers, u32 threshold, float scale) {
  const u64 start = pack_start();
  if (start >= elements) return;
  const u64 row = start / columns;
  const u64 index = offset + row / middle * stride0 + row % middle * stride1 + start % columns * stride2;
  float v[PACK];
  load(x + start, v);
  Draws draws(seed, tensor, step_of(numbers, step));
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] = draws.word(index + i * stride2) >= threshold ? v[i] * scale : 0.0f;
  store(y + start, v);
}
