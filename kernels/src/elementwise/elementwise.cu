// Sums and scalings; the contract is in mod.rs. `elements` is a multiple of PACK.
//
// Compile-time constants: COLUMNS (of tensors with a bias). Floor: each argument read or written
// once.

// y = a + b.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_add(const stored* __restrict__ a, const stored* __restrict__ b, stored* __restrict__ y, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float left[PACK], right[PACK];
  load(a + start, left);
  load(b + start, right);
#pragma unroll
  for (int i = 0; i < PACK; ++i) left[i] += right[i];
  store(y + start, left);
}

// y += factor x.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_axpy(float factor, const stored* __restrict__ x, stored* __restrict__ y, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float more[PACK], old[PACK];
  load(x + start, more);
  load(y + start, old);
#pragma unroll
  for (int i = 0; i < PACK; ++i) old[i] += factor * more[i];
  store(y + start, old);
}

// y = max(x, y), y if either is NaN: the same as reductions over ranks on the host.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_maximum(const stored* __restrict__ x, stored* __restrict__ y, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float more[PACK], old[PACK];
  load(x + start, more);
  load(y + start, old);
#pragma unroll
  for (int i = 0; i < PACK; ++i) old[i] = more[i] > old[i] ? more[i] : old[i];
  store(y + start, old);
}

// x /= by.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_divide(const stored* __restrict__ by, stored* __restrict__ x, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float below[PACK], v[PACK];
  load(by + start, below);
  load(x + start, v);
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] /= below[i];
  store(x + start, v);
}

// x *= factor.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_scale(float factor, stored* __restrict__ x, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float v[PACK];
  load(x + start, v);
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] *= factor;
  store(x + start, v);
}

// to = x, rounded.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_narrow(const float* __restrict__ x, stored* __restrict__ to, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  const Packed<float> from = *reinterpret_cast<const Packed<float>*>(x + start);
  store(to + start, from.at);
}

// to = x.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_widen(const stored* __restrict__ x, float* __restrict__ to, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  Packed<float> v;
  load(x + start, v.at);
  *reinterpret_cast<Packed<float>*>(to + start) = v;
}

// x[rows, COLUMNS] += bias[COLUMNS].
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_add_bias(const stored* __restrict__ bias, stored* __restrict__ x, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float v[PACK], b[PACK];
  load(x + start, v);
  load(bias + start % COLUMNS, b);
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] += b[i];
  store(x + start, v);
}

// sum[elements] += x: adds a micro-batch's gradient to the f32 sum.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_accumulate(const stored* __restrict__ x, float* __restrict__ sum, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float v[PACK];
  load(x + start, v);
  Packed<float> total = *reinterpret_cast<const Packed<float>*>(sum + start);
#pragma unroll
  for (int i = 0; i < PACK; ++i) total.at[i] += v[i];
  *reinterpret_cast<Packed<float>*>(sum + start) = total;
}

struct RowsOfGradient {
  const stored* dy;
  float (&sum)[PACK];

  template <typename Group>
  __device__ __forceinline__ void add(Group group) {
    float v[Group::count][PACK];
#pragma unroll
    for (int r = 0; r < Group::count; ++r) load(dy + static_cast<u64>(group.row(r)) * COLUMNS, v[r]);
#pragma unroll
    for (int r = 0; r < Group::count; ++r) {
      if (!group.has(r)) break;
#pragma unroll
      for (int i = 0; i < PACK; ++i) sum[i] += v[r][i];
    }
  }
};

// partial[gridDim.y, COLUMNS]: each block's column sums over its rows of dy.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_column_partials(const stored* __restrict__ dy, float* __restrict__ partial, int rows) {
  let_next_kernel_begin();
  await_kernel_before();
  float sum[PACK] = {};
  if (strip_column() < COLUMNS) each_row<8>(rows, RowsOfGradient{dy + strip_column(), sum});
  write_strip(sum, partial + static_cast<u64>(blockIdx.y) * COLUMNS, COLUMNS);
}

// dbias[COLUMNS] += sums of partial[parts, COLUMNS].
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_column_sum(const float* __restrict__ partial, float* __restrict__ dbias, int parts) {
  await_kernel_before();
  const int column = blockIdx.x * 32 + threadIdx.x % 32;
  const float total = column_total(partial, column, COLUMNS, COLUMNS, parts);
  if (threadIdx.x < 32 && column < COLUMNS) dbias[column] += total;
}

// Sums the values of all threads of a block in f64, in a fixed order; thread 0 gets the result.
__device__ __forceinline__ double block_total(double sum) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int away = THREADS / 2; away > 0; away /= 2) {
    if (threadIdx.x < away) sums[threadIdx.x] += sums[threadIdx.x + away];
    __syncthreads();
  }
  return sums[0];
}

// The elements that a block adds up: consecutive ones. On an H200 that gives 1.05 of a copy's
// bandwidth at 2^30 elements and 0.98 at 2^27; blocks that take turns gave 1.01 at 2^27.
struct Segment {
  u64 begin, end;
};

__device__ __forceinline__ Segment segment_of(u64 elements) {
  const u64 row = THREADS * PACK, rows = (elements + row - 1) / row;
  const u64 each = (rows + gridDim.x - 1) / gridDim.x * row, begin = blockIdx.x * each;
  return {begin < elements ? begin : elements, begin + each < elements ? begin + each : elements};
}

// partial[gridDim.x]: each block's sum of squares of a tensor, in f64, because norms of billions of
// elements add few large to many small ones.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_squares(const stored* __restrict__ x, double* __restrict__ partial, u64 elements) {
  double sum = 0.0;
  const Segment own = segment_of(elements);
#pragma unroll 4
  for (u64 at = own.begin + threadIdx.x * PACK; at < own.end; at += THREADS * PACK) {
    float v[PACK];
    load(x + at, v);
#pragma unroll
    for (int i = 0; i < PACK; ++i) sum += static_cast<double>(v[i]) * static_cast<double>(v[i]);
  }
  sum = block_total(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// partial[gridDim.x]: each block's sum of the elements themselves, in f64.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_sum(const stored* __restrict__ x, double* __restrict__ partial, u64 elements) {
  double sum = 0.0;
  const Segment own = segment_of(elements);
#pragma unroll 4
  for (u64 at = own.begin + threadIdx.x * PACK; at < own.end; at += THREADS * PACK) {
    float v[PACK];
    load(x + at, v);
#pragma unroll
    for (int i = 0; i < PACK; ++i) sum += static_cast<double>(v[i]);
  }
  sum = block_total(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// total = the sum of partial[parts], or total += it. One block.
extern "C" __global__ void __launch_bounds__(THREADS)
    elementwise_total(const double* __restrict__ partial, double* __restrict__ total, int parts, int accumulate) {
  double sum = 0.0;
  for (int at = threadIdx.x; at < parts; at += THREADS) sum += partial[at];
  sum = block_total(sum);
  if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}
