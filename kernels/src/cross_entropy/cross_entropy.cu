// Softmax cross-entropy of a shard of the vocabulary; the contract is in mod.rs. One block for each
// row.
//
// Compile-time constants: COLUMNS, SOFT_CAP (0: none). Floor of the statistics: reads the logits
// once (maximum and sum together). Floor of the gradient: reads and writes them once. The softmax
// is stored only if a vocabulary is split over a pipeline by algorithm 2: there it replaces the
// logits, and the elementwise work besides the products reads and writes each operand once.

// The capped logit and the slope of the cap.
__device__ __forceinline__ float capped(float z, float& slope) {
  slope = 1.0f;
  if (SOFT_CAP > 0) {
    const float t = tanh_of(z / static_cast<float>(SOFT_CAP));
    slope = 1.0f - t * t;
    z = static_cast<float>(SOFT_CAP) * t;
  }
  return z;
}

// max[rows] over the real columns, minus infinity if there are none; sum_exp[rows] relative to that
// maximum; target_logit[rows], 0 if the target is not in first_column..first_column + real_columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_statistics(const stored* __restrict__ logits, const long long* __restrict__ targets,
                             float* __restrict__ max, float* __restrict__ sum_exp, float* __restrict__ target_logit,
                             long long first_column, int real_columns) {
  const stored* row = logits + static_cast<u64>(blockIdx.x) * COLUMNS;
  float most = Max::none(), sum = 0.0f, slope;
  for (int column = threadIdx.x * PACK; column < real_columns; column += THREADS * PACK) {
    float z[PACK];
    load(row + column, z);
    float here = most;
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
      z[i] = column + i < real_columns ? capped(z[i], slope) : Max::none();
      here = fmaxf(here, z[i]);
    }
    if (here == Max::none()) continue;
    // Rescale the sum to the larger maximum.
    sum *= exp_of(most - here);
    most = here;
#pragma unroll
    for (int i = 0; i < PACK; ++i) sum += exp_of(z[i] - most);
  }
  const float whole = block_reduce<Max>(most);
  // A thread without columns has a maximum of minus infinity and adds nothing.
  sum = block_reduce<Sum>(sum == 0.0f ? 0.0f : sum * expf(most - whole));
  if (threadIdx.x == 0) {
    max[blockIdx.x] = whole;
    sum_exp[blockIdx.x] = sum;
    const long long column = targets[blockIdx.x] - first_column;
    const bool here = targets[blockIdx.x] >= 0 && column >= 0 && column < real_columns;
    target_logit[blockIdx.x] = here ? capped(widened(row[column]), slope) : 0.0f;
  }
}

// max[rows] over the real columns, minus infinity if there are none.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_max(const stored* __restrict__ logits, float* __restrict__ max, int real_columns) {
  const stored* row = logits + static_cast<u64>(blockIdx.x) * COLUMNS;
  float most = Max::none(), slope;
  for (int column = threadIdx.x * PACK; column < real_columns; column += THREADS * PACK) {
    float z[PACK];
    load(row + column, z);
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
      if (column + i < real_columns) most = fmaxf(most, capped(z[i], slope));
    }
  }
  most = block_reduce<Max>(most);
  if (threadIdx.x == 0) max[blockIdx.x] = most;
}

// sum_exp[rows] and target_logit[rows] relative to a given max[rows].
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_sum_exp(const stored* __restrict__ logits, const long long* __restrict__ targets,
                          const float* __restrict__ max, float* __restrict__ sum_exp, float* __restrict__ target_logit,
                          long long first_column, int real_columns) {
  const stored* row = logits + static_cast<u64>(blockIdx.x) * COLUMNS;
  const float most = max[blockIdx.x];
  float sum = 0.0f, slope;
  for (int column = threadIdx.x * PACK; column < real_columns; column += THREADS * PACK) {
    float z[PACK];
    load(row + column, z);
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
      if (column + i < real_columns) sum += exp_of(capped(z[i], slope) - most);
    }
  }
  sum = block_reduce<Sum>(sum);
  if (threadIdx.x == 0) {
    sum_exp[blockIdx.x] = sum;
    const long long column = targets[blockIdx.x] - first_column;
    const bool here = targets[blockIdx.x] >= 0 && column >= 0 && column < real_columns;
    target_logit[blockIdx.x] = here ? capped(widened(row[column]), slope) : 0.0f;
  }
}

// sum_exp *= exp(local_max - max): from sums relative to a shard's own maximum to sums relative to
// the global one.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_rescale(const float* __restrict__ local_max, const float* __restrict__ max,
                          float* __restrict__ sum_exp, int rows) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  sum_exp[row] = local_max[row] == Max::none() ? 0.0f : sum_exp[row] * expf(local_max[row] - max[row]);
}

// loss[rows] = ln(sum_exp) + max - target_logit, 0 where the target is negative (ignored).
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_loss(const long long* __restrict__ targets, const float* __restrict__ max,
                       const float* __restrict__ sum_exp, const float* __restrict__ target_logit,
                       float* __restrict__ loss, int rows) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  loss[row] = targets[row] < 0 ? 0.0f : logf(sum_exp[row]) + (max[row] - target_logit[row]);
}

// Replaces the logits by `scale` (times the step's) times the gradient of each row's loss.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_gradient(stored* __restrict__ logits, const long long* __restrict__ targets,
                           const float* __restrict__ max, const float* __restrict__ sum_exp, float scale,
                           const StepNumbers* __restrict__ numbers, long long first_column, int real_columns) {
  stored* row = logits + static_cast<u64>(blockIdx.x) * COLUMNS;
  const long long target = targets[blockIdx.x];
  const bool here = target >= first_column && target < first_column + real_columns;
  const int hit = here ? static_cast<int>(target - first_column) : -1;
  const float most = max[blockIdx.x];
  // In an ignored row everything is 0.
  const float each = target < 0 ? 0.0f : scale_of(numbers, scale);
  const float inverse = 1.0f / sum_exp[blockIdx.x];
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float z[PACK];
    load(row + column, z);
#pragma unroll
    for (int i = 0; i < PACK; ++i) {
      float slope;
      const float p = exp_of(capped(z[i], slope) - most) * inverse;
      const float gradient = each * (p - (column + i == hit ? 1.0f : 0.0f)) * slope;
      z[i] = column + i < real_columns && target >= 0 ? gradient : 0.0f;
    }
    store(row + column, z);
  }
}

// The slope of the cap where its value is z.
__device__ __forceinline__ float slope_at(float z) {
  if (SOFT_CAP <= 0) return 1.0f;
  const float t = z / static_cast<float>(SOFT_CAP);
  return 1.0f - t * t;
}

// Multiplies rows[rows, COLUMNS] by the slope of the cap at the row's target.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_scale_by_slope(const float* __restrict__ target_logit, stored* __restrict__ rows) {
  stored* row = rows + static_cast<u64>(blockIdx.x) * COLUMNS;
  const float slope = slope_at(target_logit[blockIdx.x]);
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float x[PACK];
    load(row + column, x);
#pragma unroll
    for (int i = 0; i < PACK; ++i) x[i] *= slope;
    store(row + column, x);
  }
}

// From the softmax relative to the shard's own maximum to the gradient of its logits: each row
// times scale factor, minus scale times the slope at the target if it is on this shard.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_softmax_to_gradient(stored* __restrict__ softmax, const long long* __restrict__ targets,
                                      const float* __restrict__ factor, const float* __restrict__ target_logit,
                                      float scale, const StepNumbers* __restrict__ numbers, long long first_column,
                                      int real_columns) {
  stored* row = softmax + static_cast<u64>(blockIdx.x) * COLUMNS;
  const long long target = targets[blockIdx.x], column_of_target = target - first_column;
  const bool here = target >= 0 && column_of_target >= 0 && column_of_target < real_columns;
  const int hit = here ? static_cast<int>(column_of_target) : -1;
  const float each = scale_of(numbers, scale);
  const float by = each * factor[blockIdx.x];
  const float own = each * slope_at(target_logit[blockIdx.x]);
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float p[PACK];
    load(row + column, p);
#pragma unroll
    for (int i = 0; i < PACK; ++i) p[i] = p[i] * by - (column + i == hit ? own : 0.0f);
    store(row + column, p);
  }
}

// weighted[rows, COLUMNS] = scale (factor weighted - hits), row by row.
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_join_gradient(stored* __restrict__ weighted, const stored* __restrict__ hits,
                                const float* __restrict__ factor, float scale,
                                const StepNumbers* __restrict__ numbers) {
  const u64 row = static_cast<u64>(blockIdx.x) * COLUMNS;
  const float by = factor[blockIdx.x], each = scale_of(numbers, scale);
  for (int column = threadIdx.x * PACK; column < COLUMNS; column += THREADS * PACK) {
    float own[PACK], hit[PACK];
    load(weighted + row + column, own);
    load(hits + row + column, hit);
#pragma unroll
    for (int i = 0; i < PACK; ++i) own[i] = each * (by * own[i] - hit[i]);
    store(weighted + row + column, own);
  }
}
