// RMSNorm; the contract is in mod.rs. One block for each row, whose elements stay in registers
// between the two passes over them, so that each is read once.
//
// Compile-time constants: COLUMNS, EPS, OFFSET (1 if weights are stored minus 1, else 0). Floor of
// forward: reads x and w, writes y; with a residual reads that too and writes the sum. Backward to
// the input: reads x, dy and w, writes dx. Backward to the weight: reads x and dy.

#define PACKS ((COLUMNS + THREADS * PACK - 1) / (THREADS * PACK))

__device__ __forceinline__ int column_of(int pack) { return (pack * THREADS + threadIdx.x) * PACK; }

// y[rows, COLUMNS] and inverse_rms[rows] of x or, with a residual, of x + residual, which is
// written to `sum`.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_forward(const stored* __restrict__ x, const stored* __restrict__ residual, const stored* __restrict__ w,
                     stored* __restrict__ sum, stored* __restrict__ y, float* __restrict__ inverse_rms) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  float held[PACKS][PACK];
  float squares = 0.0f;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
      load(x + start + column, held[pack]);
      if (residual != nullptr) {
        float more[PACK];
        load(residual + start + column, more);
        // Normalise the stored, rounded values.
#pragma unroll
        for (int i = 0; i < PACK; ++i) held[pack][i] = widened(narrowed(held[pack][i] + more[i]));
        store(sum + start + column, held[pack]);
      }
#pragma unroll
      for (int i = 0; i < PACK; ++i) squares += held[pack][i] * held[pack][i];
    }
  }
  const float r = rsqrtf(block_reduce<Sum>(squares) / COLUMNS + static_cast<float>(EPS));
  if (threadIdx.x == 0) inverse_rms[blockIdx.x] = r;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
      float weight[PACK];
      load(w + column, weight);
#pragma unroll
      for (int i = 0; i < PACK; ++i) held[pack][i] *= r * (weight[i] + OFFSET);
      store(y + start + column, held[pack]);
    }
  }
}

// dx = r (g - x r^2 mean(g x)), g = dy w; accumulated if `accumulate` is not 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward_input(const stored* __restrict__ x, const stored* __restrict__ w,
                            const float* __restrict__ inverse_rms, const stored* __restrict__ dy,
                            stored* __restrict__ dx, int accumulate) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  float held[PACKS][PACK], g[PACKS][PACK];
  float product = 0.0f;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
      float weight[PACK];
      load(x + start + column, held[pack]);
      load(dy + start + column, g[pack]);
      load(w + column, weight);
#pragma unroll
      for (int i = 0; i < PACK; ++i) {
        g[pack][i] *= weight[i] + OFFSET;
        product += g[pack][i] * held[pack][i];
      }
    }
  }
  const float r = inverse_rms[blockIdx.x];
  const float along = r * r * (block_reduce<Sum>(product) / COLUMNS);
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
#pragma unroll
      for (int i = 0; i < PACK; ++i) g[pack][i] = r * (g[pack][i] - held[pack][i] * along);
      put(dx + start + column, g[pack], accumulate);
    }
  }
}

// partial[gridDim.x, COLUMNS]: each block's sum over its rows of dy x r, in row order; column_sum()
// adds them up.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward_weight(const stored* __restrict__ x, const float* __restrict__ inverse_rms,
                             const stored* __restrict__ dy, float* __restrict__ partial, int rows) {
  float sums[PACKS][PACK] = {};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const u64 start = static_cast<u64>(row) * COLUMNS;
    const float r = inverse_rms[row];
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      const int column = column_of(pack);
      if (column < COLUMNS) {
        float value[PACK], gradient[PACK];
        load(x + start + column, value);
        load(dy + start + column, gradient);
#pragma unroll
        for (int i = 0; i < PACK; ++i) sums[pack][i] += gradient[i] * (value[i] * r);
      }
    }
  }
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
#pragma unroll
      for (int i = 0; i < PACK; ++i) partial[static_cast<u64>(blockIdx.x) * COLUMNS + column + i] = sums[pack][i];
    }
  }
}

// dw[COLUMNS] += sum of partial[parts, COLUMNS] in the order of parts.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_column_sum(const float* __restrict__ partial, float* __restrict__ dw, int parts) {
  const int column = blockIdx.x * THREADS + threadIdx.x;
  if (column < COLUMNS) dw[column] += column_total(partial, column, COLUMNS, parts);
}
