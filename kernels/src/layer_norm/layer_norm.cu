// LayerNorm; the contract is in mod.rs. One block for each row, whose elements stay in registers.
//
// Compile-time constants: COLUMNS, EPS. Floor of forward: reads x, w and bias, writes y; with a
// residual reads that too and writes the sum. Backward to the input: reads x, dy and w, writes dx.
// Backward to weight and bias: reads x and dy.

#define PACKS ((COLUMNS + THREADS * PACK - 1) / (THREADS * PACK))

__device__ __forceinline__ int column_of(int pack) { return (pack * THREADS + threadIdx.x) * PACK; }

// y[rows, COLUMNS], mean[rows] and inverse_std[rows] of x or, with a residual, of x + residual,
// which is written to `sum`. The variance is computed from differences from the mean, to avoid
// cancellation.
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_forward(const stored* __restrict__ x, const stored* __restrict__ residual,
                       const stored* __restrict__ w, const stored* __restrict__ bias, stored* __restrict__ sum,
                       stored* __restrict__ y, float* __restrict__ mean, float* __restrict__ inverse_std) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  float held[PACKS][PACK];
  float total = 0.0f;
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
      for (int i = 0; i < PACK; ++i) total += held[pack][i];
    }
  }
  const float m = block_reduce<Sum>(total) / COLUMNS;
  float squares = 0.0f;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    if (column_of(pack) < COLUMNS) {
#pragma unroll
      for (int i = 0; i < PACK; ++i) {
        held[pack][i] -= m;
        squares += held[pack][i] * held[pack][i];
      }
    }
  }
  const float r = rsqrtf(block_reduce<Sum>(squares) / COLUMNS + static_cast<float>(EPS));
  if (threadIdx.x == 0) {
    mean[blockIdx.x] = m;
    inverse_std[blockIdx.x] = r;
  }
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
      float weight[PACK], shift[PACK];
      load(w + column, weight);
      load(bias + column, shift);
#pragma unroll
      for (int i = 0; i < PACK; ++i) held[pack][i] = held[pack][i] * r * weight[i] + shift[i];
      store(y + start + column, held[pack]);
    }
  }
}

// dx = r (g - mean(g) - n mean(g n)), g = dy w; accumulated if `accumulate` is not 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward_input(const stored* __restrict__ x, const stored* __restrict__ w,
                              const float* __restrict__ mean, const float* __restrict__ inverse_std,
                              const stored* __restrict__ dy, stored* __restrict__ dx, int accumulate) {
  const u64 start = static_cast<u64>(blockIdx.x) * COLUMNS;
  const float m = mean[blockIdx.x], r = inverse_std[blockIdx.x];
  float n[PACKS][PACK], g[PACKS][PACK];
  float sum_g = 0.0f, sum_gn = 0.0f;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
      float weight[PACK];
      load(x + start + column, n[pack]);
      load(dy + start + column, g[pack]);
      load(w + column, weight);
#pragma unroll
      for (int i = 0; i < PACK; ++i) {
        n[pack][i] = (n[pack][i] - m) * r;
        g[pack][i] *= weight[i];
        sum_g += g[pack][i];
        sum_gn += g[pack][i] * n[pack][i];
      }
    }
  }
  const float mean_g = block_reduce<Sum>(sum_g) / COLUMNS;
  const float mean_gn = block_reduce<Sum>(sum_gn) / COLUMNS;
#pragma unroll
  for (int pack = 0; pack < PACKS; ++pack) {
    const int column = column_of(pack);
    if (column < COLUMNS) {
#pragma unroll
      for (int i = 0; i < PACK; ++i) g[pack][i] = r * (g[pack][i] - mean_g - n[pack][i] * mean_gn);
      put(dx + start + column, g[pack], accumulate);
    }
  }
}

struct RowsOfWeights {
  const stored* x;
  const float* mean;
  const float* inverse_std;
  const stored* dy;
  float (&of_w)[PACK];
  float (&of_bias)[PACK];

  template <typename Group>
  __device__ __forceinline__ void add(Group group) {
    float value[Group::count][PACK], gradient[Group::count][PACK], m[Group::count], r[Group::count];
#pragma unroll
    for (int n = 0; n < Group::count; ++n) {
      const u64 start = static_cast<u64>(group.row(n)) * COLUMNS;
      m[n] = mean[group.row(n)];
      r[n] = inverse_std[group.row(n)];
      load(x + start, value[n]);
      load(dy + start, gradient[n]);
    }
#pragma unroll
    for (int n = 0; n < Group::count; ++n) {
      if (!group.has(n)) break;
#pragma unroll
      for (int i = 0; i < PACK; ++i) {
        of_w[i] += gradient[n][i] * ((value[n][i] - m[n]) * r[n]);
        of_bias[i] += gradient[n][i];
      }
    }
  }
};

// partial[gridDim.y, 2, COLUMNS]: each block's sums over its rows of dy n and of dy.
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward_weight(const stored* __restrict__ x, const float* __restrict__ mean,
                               const float* __restrict__ inverse_std, const stored* __restrict__ dy,
                               float* __restrict__ partial, int rows) {
  let_next_kernel_begin();
  const int column = strip_column();
  float of_w[PACK] = {}, of_bias[PACK] = {};
  if (column < COLUMNS) {
    each_row<4>(rows, RowsOfWeights{x + column, mean, inverse_std, dy + column, of_w, of_bias});
  }
  float* own = partial + static_cast<u64>(blockIdx.y) * 2 * COLUMNS;
  write_strip(of_w, own, COLUMNS);
  write_strip(of_bias, own + COLUMNS, COLUMNS);
}

// dw[COLUMNS] and dbias[COLUMNS] += sums of partial[parts, 2, COLUMNS].
extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_column_sum(const float* __restrict__ partial, float* __restrict__ dw, float* __restrict__ dbias,
                          int parts) {
  await_kernel_before();
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const float of_w = column_total(partial, column, COLUMNS, 2 * COLUMNS, parts);
  const float of_bias = column_total(partial + COLUMNS, column, COLUMNS, 2 * COLUMNS, parts);
  if (threadIdx.x < 32 && column < COLUMNS) {
    dw[column] += of_w;
    dbias[column] += of_bias;
  }
}
