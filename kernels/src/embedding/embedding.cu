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

// The gradient adds up the tokens of a row in their order, without atomics on floats or sorting, so
// the bits are always the same. First each token finds the next with its id, and whether there is
// an earlier one; then the first token of each id follows the chain.

#define NONE 0xffffffffu

// next[tokens] and first[tokens] are filled with NONE before; first is 0 where an earlier token has
// the id. Grid: tokens, parts of the tokens they are compared with.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_chain(const long long* __restrict__ ids, u32* __restrict__ next, u32* __restrict__ first, int tokens) {
  alignas(16) __shared__ int tile[THREADS];
  const u32 own = blockIdx.x * THREADS + threadIdx.x, all = tokens;
  const int id = own < all ? static_cast<int>(ids[own]) : -1;
  u32 after = NONE;
  bool before = false;
  for (u32 start = blockIdx.y * THREADS; start < all; start += gridDim.y * THREADS) {
    const u32 token = start + threadIdx.x;
    __syncthreads();  // the last tile may still be read
    tile[threadIdx.x] = token < all ? static_cast<int>(ids[token]) : -2;
    __syncthreads();
    // Few tokens share an id: eight at a time, and one by one only where one of them does.
    for (u32 group = 0; group < THREADS; group += 8) {
      bool any = false;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) any |= tile[group + i] == id;
      if (!any) continue;
      for (u32 i = group; i < group + 8; ++i) {
        if (tile[i] != id) continue;
        if (start + i < own) before = true;
        if (start + i > own && start + i < after) after = start + i;
      }
    }
  }
  if (own >= all) return;
  if (before) first[own] = 0;
  if (after != NONE) atomicMin(next + own, after);
}

// dtable[ids - first_row] += SCALE dout. Grid: tokens, blocks of columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const long long* __restrict__ ids, const u32* __restrict__ next,
                       const u32* __restrict__ first, const stored* __restrict__ dout, float* __restrict__ dtable,
                       long long first_row, long long rows) {
  const long long row = ids[blockIdx.x] - first_row;
  const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  if (!first[blockIdx.x] || row < 0 || row >= rows || column >= COLUMNS) return;
  float* to = dtable + static_cast<u64>(row) * COLUMNS + column;
  Packed<float> sum = *reinterpret_cast<const Packed<float>*>(to);
  for (u32 at = blockIdx.x; at != NONE;) {
    const u32 following = next[at];
    float v[PACK];
    load(dout + static_cast<u64>(at) * COLUMNS + column, v);
#pragma unroll
    for (int i = 0; i < PACK; ++i) sum.at[i] += static_cast<float>(SCALE) * v[i];
    at = following;
  }
  *reinterpret_cast<Packed<float>*>(to) = sum;
}
