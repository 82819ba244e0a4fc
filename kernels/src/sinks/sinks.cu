// Attention sinks; the contract is in mod.rs.
//
// Compile-time constants: HEADS, QUERIES, WIDTH, which PACK divides in `sinks_apply`. Floor of
// apply: reads and writes out, reads lse, writes fresh; of gradient: reads fresh and by_row, writes
// by_row.

// Where the log-sum-exp of a row of an output head lies.
__device__ __forceinline__ u64 statistic(u64 row) {
  const u64 query = row / HEADS;
  return (query / QUERIES * HEADS + row % HEADS) * QUERIES + query % QUERIES;
}

// out[batch, QUERIES, HEADS, WIDTH] in place and fresh[batch, HEADS, QUERIES], one thread for each
// pack of out.
extern "C" __global__ void __launch_bounds__(THREADS)
    sinks_apply(const stored* __restrict__ sinks, const float* __restrict__ lse, float* __restrict__ fresh,
                stored* __restrict__ out, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  const u64 row = start / WIDTH;
  const u64 at = statistic(row);
  const float sink = widened(sinks[row % HEADS]);
  const float before = lse[at];
  if (start % WIDTH == 0) {
    const float most = fmaxf(sink, before);
    fresh[at] = most + logf(1.0f + exp_of(fminf(sink, before) - most));
  }
  const float share = quotient(1.0f, 1.0f + exp_of(sink - before));
  float v[PACK];
  load(out + start, v);
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] *= share;
  store(out + start, v);
}

// by_row[batch, QUERIES, HEADS] in place, one thread for each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    sinks_gradient(const stored* __restrict__ sinks, const float* __restrict__ fresh, float* __restrict__ by_row,
                   u64 rows) {
  const u64 row = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= rows) return;
  by_row[row] *= -exp_of(widened(sinks[row % HEADS]) - fresh[statistic(row)]);
}
