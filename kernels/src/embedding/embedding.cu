// Embedding; the contract is in mod.rs.
//
// Compile-time constants: COLUMNS, SCALE. Floor of forward: reads a row of the table and writes one
// of the output for each token. Backward: reads a row of dout for each token, reads and writes each
// row of dtable that occurs.

// out[tokens, COLUMNS] = SCALE table[ids - first_row], 0 for ids outside the `rows` rows. One block
// for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_forward(const long long* __restrict__ ids, const stored* __restrict__ table, stored* __restrict__ out,
                      long long first_row, long long rows) {
  const long long row = ids[blockIdx.x] - first_row;
  const bool here = row >= 0 && row < rows;
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float v[PACK] = {};
    if (here) {
      load(table + static_cast<u64>(row) * COLUMNS + column, v);
#pragma unroll
      for (int i = 0; i < PACK; ++i) v[i] *= static_cast<float>(SCALE);
    }
    store(out + static_cast<u64>(blockIdx.x) * COLUMNS + column, v);
  }
}

// dtable[ids - first_row] += SCALE dout. The tokens of a row are added in their order, without
// atomics or sorting, so the bits are always the same: the block of an id's first token adds up all
// tokens with that id, and the others stop. Grid: tokens, blocks of columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const long long* __restrict__ ids, const stored* __restrict__ dout, float* __restrict__ dtable,
                       long long first_row, long long rows, int tokens) {
  __shared__ u32 found[THREADS / 32];
  const int own = blockIdx.x;
  const long long id = ids[own], row = id - first_row;
  if (row < 0 || row >= rows) return;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  Packed<float> sum = {};
  float* to = dtable + static_cast<u64>(row) * COLUMNS + column;
  if (column < COLUMNS) sum = *reinterpret_cast<const Packed<float>*>(to);
  for (int start = 0; start < tokens; start += THREADS) {
    const int token = start + threadIdx.x;
    const u32 here = __ballot_sync(0xffffffffu, token < tokens && ids[token] == id);
    __syncthreads();  // the last chunk's matches may still be read
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = here;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; ++warp) {
      for (u32 left = found[warp]; left != 0; left &= left - 1) {
        const int at = start + warp * 32 + __ffs(static_cast<int>(left)) - 1;
        if (at < own) return;  // all threads of the block agree
        if (column >= COLUMNS) continue;
        float v[PACK];
        load(dout + static_cast<u64>(at) * COLUMNS + column, v);
#pragma unroll
        for (int i = 0; i < PACK; ++i) sum.at[i] += static_cast<float>(SCALE) * v[i];
      }
    }
  }
  if (column < COLUMNS) *reinterpret_cast<Packed<float>*>(to) = sum;
}
