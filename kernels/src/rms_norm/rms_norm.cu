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

struct RowsOfWeight {
  const stored* x;
  const float* inverse_rms;
  const stored* dy;
  float (&sum)[PACK];

  template <typename Group>
  __device__ __forceinline__ void add(Group group) {
    float value[Group::count][PACK], gradient[Group::count][PACK], r[Group::count];
#pragma unroll
    for (int n = 0; n < Group::count; ++n) {
      const u64 start = static_cast<u64>(group.row(n)) * COLUMNS;
      r[n] = inverse_rms[group.row(n)];
      load(x + start, value[n]);
      load(dy + start, gradient[n]);
    }
#pragma unroll
    for (int n = 0; n < Group::count; ++n) {
      if (!group.has(n)) break;
#pragma unroll
      for (int i = 0; i < PACK; ++i) sum[i] += gradient[n][i] * (value[n][i] * r[n]);
    }
  }
};

// partial[gridDim.y, COLUMNS]: each block's sums over its rows of dy x r.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_backward_weight(const stored* __restrict__ x, const float* __restrict__ inverse_rms,
                             const stored* __restrict__ dy, float* __restrict__ partial, int rows) {
  let_next_kernel_begin();
  const int column = strip_column();
  float sum[PACK] = {};
  if (column < COLUMNS) each_row<4>(rows, RowsOfWeight{x + column, inverse_rms, dy + column, sum});
  write_strip(sum, partial + static_cast<u64>(blockIdx.y) * COLUMNS, COLUMNS);
}

// dw[COLUMNS] += sums of partial[parts, COLUMNS].
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_column_sum(const float* __restrict__ partial, float* __restrict__ dw, int parts) {
  await_kernel_before();
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const float total = column_total(partial, column, COLUMNS, COLUMNS, parts);
  if (threadIdx.x < 32 && column < COLUMNS) dw[column] += total;
}
