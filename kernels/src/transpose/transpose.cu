// Swaps the two leading dimensions; the contract is in mod.rs. Compile-time constants: only the
// prelude's. Floor: reads x, writes y.

// y[j, i, l] = x[i, j, l], one thread for each pack, in the order of y.
extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_rows(const stored* __restrict__ x, stored* __restrict__ y, u64 a, u64 b, u64 inner) {
  const u64 at = pack_start();
  if (at >= a * b * inner) return;
  const u64 row = at / inner, l = at % inner;
  const u64 i = row % a, j = row / a;
  float v[PACK];
  load(x + (i * b + j) * inner + l, v);
  store(y + at, v);
}

// y[b, a] = x[a, b], a block for each tile of 32 x 32, so that both tensors are accessed along
// rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_matrix(const stored* __restrict__ x, stored* __restrict__ y, u64 a, u64 b) {
  __shared__ stored tile[32][33];
  const u64 across = (b + 31) / 32;
  const u64 i = blockIdx.x / across * 32, j = blockIdx.x % across * 32;
  const int column = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < 32; row += THREADS / 32) {
    if (i + row < a && j + column < b) tile[row][column] = x[(i + row) * b + j + column];
  }
  __syncthreads();
  for (int row = threadIdx.x / 32; row < 32; row += THREADS / 32) {
    if (j + row < b && i + column < a) y[(j + row) * a + i + column] = tile[column][row];
  }
}
