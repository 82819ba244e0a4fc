// Attention in f32, where tensor cores would round; the contract is in mod.rs. Each warp has rows
// of its own, and each lane one row of the opposite tile. Correct for any head dimension, but far
// from a GPU's peak speed.
//
// Compile-time constants: as in attention.cu, with any QK_DIM and V_DIM. Floor: as in attention.cu,
// on the units other than tensor cores.

#if STORED_BF16
#error "attention_f32.cu is for f32"
#endif

#define TILE (QK_DIM + V_DIM > 256 ? 16 : 32)
#define ROWS_A_WARP (QK_DIM + V_DIM > 256 ? 1 : 2)
#define ROWS (ROWS_A_WARP * THREADS / 32)
// An odd stride, so that lanes that read the same column of different rows use different banks.
#define ODD(n) ((n) | 1)
#define QK_COLUMNS ((QK_DIM + 31) / 32)
#define V_COLUMNS ((V_DIM + 31) / 32)

// Copies rows first..first + count of one head of [length, heads, dim]; 0 beyond the end.
__device__ __forceinline__ void fill(float* tile, const float* from, int first, int count, int length, int heads, int dim) {
  for (int at = threadIdx.x; at < count * dim; at += THREADS) {
    const int row = at / dim, column = at % dim;
    const bool there = first + row < length;
    tile[row * ODD(dim) + column] = there ? from[static_cast<u64>(first + row) * heads * dim + column] : 0.0f;
  }
}

__device__ __forceinline__ float dot(const float* a, const float* b, int dim) {
  float sum = 0.0f;
#pragma unroll 8  // full unrolling takes seconds to compile
  for (int column = 0; column < dim; ++column) sum += a[column] * b[column];
  return sum;
}

// sums += factor_j times row j of the tile, over the j of all lanes; each lane has every 32nd
// column.
template <int COLUMNS>
__device__ __forceinline__ void add_rows(float (&sums)[COLUMNS], float factor, const float* tile, int dim) {
  __shared__ float factors[THREADS / 32][32];
  __syncwarp();  // an earlier call's factors may still be read
  factors[warp()][lane()] = factor;
  __syncwarp();
#pragma unroll 4
  for (int j = 0; j < TILE; ++j) {
    const float of_j = factors[warp()][j];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = i * 32 + lane();
      if (column < dim) sums[i] += of_j * tile[j * ODD(dim) + column];
    }
  }
}

template <typename Op>
__device__ __forceinline__ float warp_reduce(float value) {
#pragma unroll
  for (int away = 16; away > 0; away /= 2) value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, away));
  return value;
}

template <int COLUMNS>
__device__ __forceinline__ void put_row(float* to, const float (&sums)[COLUMNS], float factor, int dim, int accumulate) {
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = i * 32 + lane();
    if (column < dim) to[column] = (accumulate ? to[column] : 0.0f) + factor * sums[i];
  }
}

// out[b, q, Q_HEADS, V_DIM] and lse[b, Q_HEADS, q]. Grid: blocks of ROWS queries, batch times query
// heads.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_f32_forward(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                          float* __restrict__ out, float* __restrict__ lse, int queries, int keys, int query_offset,
                          int key_offset, DROPOUT_PARAMETERS) {
  __shared__ float key_tile[TILE * ODD(QK_DIM)], value_tile[TILE * ODD(V_DIM)], query_rows[ROWS * ODD(QK_DIM)];
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const u64 batch = blockIdx.y / Q_HEADS;
  const int head = blockIdx.y % Q_HEADS;
  const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;
  fill(query_rows, q + (batch * queries * Q_HEADS + head) * QK_DIM, first, ROWS, queries, Q_HEADS, QK_DIM);
  const float* of_keys = k + (batch * keys * KV_HEADS + head / GROUP) * QK_DIM;
  const float* of_values = v + (batch * keys * KV_HEADS + head / GROUP) * V_DIM;
  float sums[ROWS_A_WARP][V_COLUMNS] = {};
  float most[ROWS_A_WARP], total[ROWS_A_WARP];
#pragma unroll
  for (int i = 0; i < ROWS_A_WARP; ++i) {
    most[i] = minus_infinity();
    total[i] = 0.0f;
  }
  Dropped dropped = DROPPED(head);
  const int end = lengths.end(Lengths::min_of(first + ROWS, queries) - 1);
  for (int start = lengths.begin(first) / TILE * TILE; start < end; start += TILE) {
    __syncthreads();
    fill(key_tile, of_keys, start, TILE, keys, KV_HEADS, QK_DIM);
    fill(value_tile, of_values, start, TILE, keys, KV_HEADS, V_DIM);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS_A_WARP; ++i) {
      const int local = warp() * ROWS_A_WARP + i, row = first + local, key = start + lane();
      const bool seen = lane() < TILE && lengths.visible(row, key);
      float slope, value = minus_infinity();
      if (seen) value = score(dot(query_rows + local * ODD(QK_DIM), key_tile + lane() * ODD(QK_DIM), QK_DIM), slope);
      const float larger = fmaxf(most[i], warp_reduce<Max>(value));
      const float around = larger == minus_infinity() ? 0.0f : larger;
      const float shrink = expf(most[i] - around);
      float p = expf(value - around);
      most[i] = larger;
      total[i] = total[i] * shrink + p;
      if (DROPOUT && seen) p *= dropped.at(lengths, row, key);
#pragma unroll
      for (int column = 0; column < V_COLUMNS; ++column) sums[i][column] *= shrink;
      add_rows<V_COLUMNS>(sums[i], p, value_tile, V_DIM);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS_A_WARP; ++i) {
    const int row = first + warp() * ROWS_A_WARP + i;
    const float sum = warp_reduce<Sum>(total[i]);
    if (row >= queries) continue;
    put_row<V_COLUMNS>(out + ((batch * queries + row) * Q_HEADS + head) * V_DIM, sums[i], sum == 0.0f ? 0.0f : 1.0f / sum,
                       V_DIM, 0);
    if (lane() == 0) {
      lse[(batch * Q_HEADS + head) * queries + row] = sum == 0.0f ? minus_infinity() : most[i] + logf(sum);
    }
  }
}

// dq[b, q, Q_HEADS, QK_DIM]. Grid as forward.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_f32_backward_query(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                                 const float* __restrict__ dout, const float* __restrict__ lse,
                                 const float* __restrict__ delta, float* __restrict__ dq, int accumulate, int queries,
                                 int keys, int query_offset, int key_offset, DROPOUT_PARAMETERS) {
  __shared__ float key_tile[TILE * ODD(QK_DIM)], value_tile[TILE * ODD(V_DIM)];
  __shared__ float query_rows[ROWS * ODD(QK_DIM)], gradient_rows[ROWS * ODD(V_DIM)];
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const u64 batch = blockIdx.y / Q_HEADS;
  const int head = blockIdx.y % Q_HEADS;
  const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;
  fill(query_rows, q + (batch * queries * Q_HEADS + head) * QK_DIM, first, ROWS, queries, Q_HEADS, QK_DIM);
  fill(gradient_rows, dout + (batch * queries * Q_HEADS + head) * V_DIM, first, ROWS, queries, Q_HEADS, V_DIM);
  const float* of_keys = k + (batch * keys * KV_HEADS + head / GROUP) * QK_DIM;
  const float* of_values = v + (batch * keys * KV_HEADS + head / GROUP) * V_DIM;
  float sums[ROWS_A_WARP][QK_COLUMNS] = {};
  Dropped dropped = DROPPED(head);
  const int end = lengths.end(Lengths::min_of(first + ROWS, queries) - 1);
  for (int start = lengths.begin(first) / TILE * TILE; start < end; start += TILE) {
    __syncthreads();
    fill(key_tile, of_keys, start, TILE, keys, KV_HEADS, QK_DIM);
    fill(value_tile, of_values, start, TILE, keys, KV_HEADS, V_DIM);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS_A_WARP; ++i) {
      const int local = warp() * ROWS_A_WARP + i, row = first + local, key = start + lane();
      float ds = 0.0f;
      if (lane() < TILE && lengths.visible(row, key)) {
        const u64 at = (batch * Q_HEADS + head) * queries + row;
        float slope;
        const float s = score(dot(query_rows + local * ODD(QK_DIM), key_tile + lane() * ODD(QK_DIM), QK_DIM), slope);
        float change = dot(gradient_rows + local * ODD(V_DIM), value_tile + lane() * ODD(V_DIM), V_DIM);
        if (DROPOUT) change *= dropped.at(lengths, row, key);
        ds = expf(s - lse[at]) * (change - delta[at]) * slope * static_cast<float>(SCALE);
      }
      add_rows<QK_COLUMNS>(sums[i], ds, key_tile, QK_DIM);
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS_A_WARP; ++i) {
    const int row = first + warp() * ROWS_A_WARP + i;
    if (row >= queries) continue;
    put_row<QK_COLUMNS>(dq + ((batch * queries + row) * Q_HEADS + head) * QK_DIM, sums[i], 1.0f, QK_DIM, accumulate);
  }
}

// dk[b, k, KV_HEADS, QK_DIM] and dv[b, k, KV_HEADS, V_DIM], summed over the query heads that share
// them, in their order. Grid: blocks of ROWS keys, batch times key-value heads. Each lane has a
// query of the tile.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_f32_backward_key_value(const float* __restrict__ q, const float* __restrict__ k,
                                     const float* __restrict__ v, const float* __restrict__ dout,
                                     const float* __restrict__ lse, const float* __restrict__ delta,
                                     float* __restrict__ dk, float* __restrict__ dv, int accumulate, int queries,
                                     int keys, int query_offset, int key_offset, DROPOUT_PARAMETERS) {
  __shared__ float query_tile[TILE * ODD(QK_DIM)], gradient_tile[TILE * ODD(V_DIM)];
  __shared__ float key_rows[ROWS * ODD(QK_DIM)], value_rows[ROWS * ODD(V_DIM)];
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const u64 batch = blockIdx.y / KV_HEADS;
  const int kv_head = blockIdx.y % KV_HEADS;
  const int first = blockIdx.x * ROWS;
  fill(key_rows, k + (batch * keys * KV_HEADS + kv_head) * QK_DIM, first, ROWS, keys, KV_HEADS, QK_DIM);
  fill(value_rows, v + (batch * keys * KV_HEADS + kv_head) * V_DIM, first, ROWS, keys, KV_HEADS, V_DIM);
  float sums_k[ROWS_A_WARP][QK_COLUMNS] = {}, sums_v[ROWS_A_WARP][V_COLUMNS] = {};
  const int end = lengths.viewers_end(Lengths::min_of(first + ROWS, keys) - 1);
  const int begin = lengths.viewers_begin(first) / TILE * TILE;
  for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; ++head) {
    Dropped dropped = DROPPED(head);
    for (int start = begin; start < end; start += TILE) {
      __syncthreads();
      fill(query_tile, q + (batch * queries * Q_HEADS + head) * QK_DIM, start, TILE, queries, Q_HEADS, QK_DIM);
      fill(gradient_tile, dout + (batch * queries * Q_HEADS + head) * V_DIM, start, TILE, queries, Q_HEADS, V_DIM);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < ROWS_A_WARP; ++i) {
        const int local = warp() * ROWS_A_WARP + i, key = first + local, query = start + lane();
        float p = 0.0f, ds = 0.0f;
        if (lane() < TILE && lengths.visible(query, key)) {
          const u64 at = (batch * Q_HEADS + head) * queries + query;
          float slope;
          const float s = score(dot(query_tile + lane() * ODD(QK_DIM), key_rows + local * ODD(QK_DIM), QK_DIM), slope);
          float change = dot(gradient_tile + lane() * ODD(V_DIM), value_rows + local * ODD(V_DIM), V_DIM);
          const float kept = DROPOUT ? dropped.at(lengths, query, key) : 1.0f;
          p = expf(s - lse[at]);
          ds = p * (kept * change - delta[at]) * slope * static_cast<float>(SCALE);
          p *= kept;
        }
        add_rows<V_COLUMNS>(sums_v[i], p, gradient_tile, V_DIM);
        add_rows<QK_COLUMNS>(sums_k[i], ds, query_tile, QK_DIM);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS_A_WARP; ++i) {
    const int row = first + warp() * ROWS_A_WARP + i;
    if (row >= keys) continue;
    const u64 at = (batch * keys + row) * KV_HEADS + kv_head;
    put_row<QK_COLUMNS>(dk + at * QK_DIM, sums_k[i], 1.0f, QK_DIM, accumulate);
    put_row<V_COLUMNS>(dv + at * V_DIM, sums_v[i], 1.0f, V_DIM, accumulate);
  }
}
