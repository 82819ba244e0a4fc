// Embedding; the contract is in mod.rs.
//
// Baked in: COLUMNS, SCALE.
// Floor of forward: reads a row of the table and writes one of the output for each token. Backward: reads a row of dout for
// each token, reads and writes each row of dtable that any token has.

// out[tokens, COLUMNS] = SCALE table[ids - first_row], 0 for ids outside the `rows` rows. One block a token.
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

// dtable[row] += SCALE times the sum of dout over the tokens of that row, in token order: the same bits every time.
// `order` lists tokens sorted by row, stably; those of distinct row number i, table row `distinct[i]`, are
// order[starts[i]..starts[i + 1]]. One block a distinct row.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const int* __restrict__ order, const int* __restrict__ starts, const int* __restrict__ distinct,
                       const stored* __restrict__ dout, float* __restrict__ dtable) {
  const int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
  float* row = dtable + static_cast<u64>(distinct[blockIdx.x]) * COLUMNS;
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    Packed<float> sum = *reinterpret_cast<const Packed<float>*>(row + column);
    for (int at = first; at < last; ++at) {
      float v[PACK];
      load(dout + static_cast<u64>(order[at]) * COLUMNS + column, v);
#pragma unroll
      for (int i = 0; i < PACK; ++i) sum.at[i] += static_cast<float>(SCALE) * v[i];
    }
    *reinterpret_cast<Packed<float>*>(row + column) = sum;
  }
}
