// Rows with one weight each; the contract is in mod.rs. One block for each row.
//
// Compile-time constants: COLUMNS. Floor of scale: reads x and writes y; of dot: reads x and y.

// y[rows, COLUMNS] = w[rows] x.
extern "C" __global__ void __launch_bounds__(THREADS)
    weighted_rows_scale(const float* __restrict__ w, const stored* __restrict__ x, stored* __restrict__ y) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  const float weight = w[blockIdx.x];
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float v[PACK];
    load(x + start + column, v);
#pragma unroll
    for (int i = 0; i < PACK; ++i) v[i] *= weight;
    store(y + start + column, v);
  }
}

// w[rows] = sums of rows of x y.
extern "C" __global__ void __launch_bounds__(THREADS)
    weighted_rows_dot(const stored* __restrict__ x, const stored* __restrict__ y, float* __restrict__ w) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  float sum = 0.0f;
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float a[PACK], b[PACK];
    load(x + start + column, a);
    load(y + start + column, b);
#pragma unroll
    for (int i = 0; i < PACK; ++i) sum += a[i] * b[i];
  }
  sum = block_reduce<Sum>(sum);
  if (threadIdx.x == 0) w[blockIdx.x] = sum;
}
