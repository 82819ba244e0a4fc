// Attention by tiles with an online softmax (Dao 2023, FlashAttention-2), on tensor cores, for bf16
// tensors with f32 sums. The contract is in mod.rs. There are no atomics: dq on the one hand, dk
// and dv on the other come from separate kernels, so the bits are always the same.
//
// Compile-time constants: Q_HEADS, KV_HEADS, QK_DIM, V_DIM (multiples of 16, at most 256), SCALE,
// CAUSAL (0 or 1), WINDOW (0: none), SOFT_CAP (0: none), DROPOUT (0 or 1; its parameters are
// arguments, ignored if it is 0). A warp handles 16 of a block's 16 * THREADS / 32 rows. For heads
// wider than 192, dk and dv come from separate blocks: a thread's registers cannot hold the sums of
// both.
//
// Floor of forward: 2 products over visible pairs, times QK_DIM and V_DIM. Backward does 7: the
// scores and their gradient are computed twice, once for dq and once for dk and dv. Bytes are those
// of the arguments.

#if !STORED_BF16
#error "attention.cu is for bf16: tensor cores round f32 to fewer bits"
#endif

#define ROWS (16 * (THREADS / 32))
// Rows in shared memory are padded by 16 bytes, so that the rows of a fragment lie in different
// banks.
#define QK_STRIDE (QK_DIM + 8)
#define V_STRIDE (V_DIM + 8)
#define WIDE (QK_DIM > 192 || V_DIM > 192 || QK_DIM + V_DIM > 320)
#define KEYS (WIDE ? 16 : 64)
#define KEYS_BACKWARD (QK_DIM > 128 || V_DIM > 128 ? 16 : 32)
#define QUERIES_BACKWARD 16

#ifndef CUDA_ON_CPU
// d[16, 8] += a[16, 16] b[16, 8]. Lane l with g = l / 4 and t = l % 4 holds: of a the pairs at
// columns 2t of rows g and g + 8, then at columns 2t + 8; of b the pairs of rows 2t and 2t + 8 in
// column g; of d columns 2t, 2t + 1 of rows g, g + 8.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices from shared memory. Lanes 8i .. 8i + 7 pass the addresses of matrix i's
// rows. Of each matrix, lane l gets elements 2t and 2t + 1 of row g.
__device__ __forceinline__ void fragments(u32 (&to)[4], const stored* row) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// The same with each matrix transposed: lane l gets rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void fragments_transposed(u32 (&to)[4], const stored* row) {
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#endif

// A left factor from a tile: 16 rows, columns from `column` on.
__device__ __forceinline__ void left(u32 (&to)[4], const stored* tile, int stride, int row, int column) {
  fragments(to, tile + (row + lane() % 16) * stride + column + lane() / 16 * 8);
}

// A right factor that is a tile's transpose: two times 8 of its rows, 16 of its columns.
__device__ __forceinline__ void right_of_rows(u32 (&to)[4], const stored* tile, int stride, int row, int column) {
  fragments(to, tile + (row + lane() % 8 + lane() / 16 * 8) * stride + column + lane() / 8 % 2 * 8);
}

// A right factor that is a tile: 16 of its rows, two times 8 of its columns.
__device__ __forceinline__ void right_of_columns(u32 (&to)[4], const stored* tile, int stride, int row, int column) {
  fragments_transposed(to, tile + (row + lane() % 16) * stride + column + lane() / 16 * 8);
}

// Copies rows first..first + count of one head of [length, heads, DIM] to a tile in shared memory;
// 0 beyond the end.
template <int DIM>
__device__ __forceinline__ void fill(stored* tile, const stored* from, int first, int count, int length, int heads) {
  const int packs = DIM / 8;
  for (int at = threadIdx.x; at < count * packs; at += THREADS) {
    const int row = at / packs, column = at % packs * 8;
    uint4 pack = {0, 0, 0, 0};
    if (first + row < length) {
      pack = *reinterpret_cast<const uint4*>(from + static_cast<u64>(first + row) * heads * DIM + column);
    }
    *reinterpret_cast<uint4*>(tile + row * (DIM + 8) + column) = pack;
  }
}

// Loads 16 rows of a head from device memory as left factors; 0 beyond the end.
template <int DIM>
__device__ __forceinline__ void rows_of(u32 (&to)[DIM / 16][4], const stored* from, int first, int length, int heads) {
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + lane() / 4 + i % 2 * 8, column = step * 16 + lane() % 4 * 2 + i / 2 * 8;
      to[step][i] = 0;
      if (row < length) {
        to[step][i] = *reinterpret_cast<const u32*>(from + static_cast<u64>(row) * heads * DIM + column);
      }
    }
  }
}

// Reduces over the four lanes that share a row.
template <typename Op>
__device__ __forceinline__ float row_reduce(float value) {
  value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return Op::of(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// 16 rows of a warp as left factors: in registers or, if heads are wide, in shared memory.
template <int DIM>
struct Factors {
#if WIDE
  const stored* tile;

  __device__ __forceinline__ Factors(stored* rows, const stored* from, int first, int length, int heads) : tile(rows) {
    fill<DIM>(rows, from, first, ROWS, length, heads);
  }
  __device__ __forceinline__ void get(u32 (&to)[4], int step) const { left(to, tile, DIM + 8, warp() * 16, step * 16); }
#else
  u32 held[DIM / 16][4];

  __device__ __forceinline__ Factors(stored*, const stored* from, int first, int length, int heads) {
    rows_of<DIM>(held, from, first + warp() * 16, length, heads);
  }
  __device__ __forceinline__ void get(u32 (&to)[4], int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = held[step][i];
  }
#endif
};

// Elements of shared memory for the rows of a block.
#define HELD(stride) (WIDE ? ROWS * (stride) : 8)
// Full unrolling, except with factors in shared memory: there the assembler would load more of them
// ahead than registers can hold.
#define STEPS(dim) (WIDE ? 1 : (dim) / 16)

// Which of a lane's probabilities are kept: bit 4 tile + i of element i of a tile, for TILES tiles
// of the warp's 16 rows from `row` on and 8 keys each from `key` on. A group of random words is for
// four keys, which two lanes hold: the even one draws for its upper row, the odd one for its lower.
template <int TILES>
__device__ __forceinline__ u32 kept_by_row(Dropped& dropped, const Lengths& lengths, int row, int key) {
  u32 bits = 0;
  if (!dropped.in_groups(lengths)) {
#pragma unroll 1  // rarely runs, and would be long
    for (int at = 0; at < 4 * TILES; ++at) {
      const int i = at % 4, query = row + lane() / 4 + i / 2 * 8, to = key + at / 4 * 8 + lane() % 4 * 2 + i % 2;
      bits |= static_cast<u32>(dropped.keeps(lengths, query, to)) << at;
    }
    return bits;
  }
  const bool odd = lane() % 2 == 1;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int query = row + lane() / 4 + (odd ? 8 : 0), to = key + tile * 8 + lane() % 4 / 2 * 4;
    bits |= dropped.keeps_four(lengths, query, to) << 4 * tile;
  }
  const u32 other = __shfl_xor_sync(0xffffffffu, bits, 1);
  const u32 upper = (odd ? other >> 2 : bits) & 0x33333333u, lower = (odd ? bits >> 2 : other) & 0x33333333u;
  return upper | lower << 2;
}

// The same where rows are 16 keys from `key` on and columns 16 queries from `query` on. Four lanes
// hold the keys of a group: each draws for two queries.
__device__ __forceinline__ u32 kept_by_column(Dropped& dropped, const Lengths& lengths, int query, int key) {
  u32 bits = 0;
  if (!dropped.in_groups(lengths)) {
#pragma unroll 1  // as above
    for (int at = 0; at < 8; ++at) {
      const int i = at % 4, of = query + at / 4 * 8 + lane() % 4 * 2 + i % 2, to = key + lane() / 4 + i / 2 * 8;
      bits |= static_cast<u32>(dropped.keeps(lengths, of, to)) << at;
    }
    return bits;
  }
  const int number = lane() / 4 % 4, half = number / 2, tile = number % 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int of = query + tile * 8 + lane() % 4 * 2 + j, to = key + lane() / 16 * 4 + half * 8;
    bits |= dropped.keeps_four(lengths, of, to) << (8 * number + 4 * j);
  }
  bits |= __shfl_xor_sync(0xffffffffu, bits, 4);
  bits |= __shfl_xor_sync(0xffffffffu, bits, 8);
  u32 own = 0;
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const int i = at % 4;
    own |= (bits >> (8 * (i / 2 * 2 + at / 4) + 4 * (i % 2) + number) & 1) << at;
  }
  return own;
}

// Stores a pair of a gradient, or adds it to the old values.
__device__ __forceinline__ void put_pair(stored* to, float low, float high, int accumulate) {
  u32* at = reinterpret_cast<u32*>(to);
  if (accumulate) {
    const u32 old = *at;
    low += __uint_as_float(old << 16);
    high += __uint_as_float(old & 0xffff0000u);
  }
  *at = pair(low, high);
}

// out[b, q, Q_HEADS, V_DIM] and lse[b, Q_HEADS, q] of q, k, v. Grid: blocks of ROWS queries, batch
// times query heads.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_forward(const stored* __restrict__ q, const stored* __restrict__ k, const stored* __restrict__ v,
                      stored* __restrict__ out, float* __restrict__ lse, int queries, int keys, int query_offset,
                      int key_offset, DROPOUT_PARAMETERS) {
  alignas(16) __shared__ stored key_tile[KEYS * QK_STRIDE];
  alignas(16) __shared__ stored value_tile[KEYS * V_STRIDE];
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const u64 batch = blockIdx.y / Q_HEADS;
  const int head = blockIdx.y % Q_HEADS;
  // Blocks with the most keys run first.
  const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;
  const int own = first + warp() * 16;
  alignas(16) __shared__ stored query_rows[HELD(QK_STRIDE)];
  const Factors<QK_DIM> query(query_rows, q + (batch * queries * Q_HEADS + head) * QK_DIM, first, queries, Q_HEADS);
  const stored* of_keys = k + (batch * keys * KV_HEADS + head / GROUP) * QK_DIM;
  const stored* of_values = v + (batch * keys * KV_HEADS + head / GROUP) * V_DIM;

  float sums[V_DIM / 8][4] = {};
  float most[2] = {minus_infinity(), minus_infinity()}, total[2] = {0.0f, 0.0f};
  const int end = lengths.end(Lengths::min_of(first + ROWS, queries) - 1);
  for (int start = lengths.begin(first) / KEYS * KEYS; start < end; start += KEYS) {
    __syncthreads();
    fill<QK_DIM>(key_tile, of_keys, start, KEYS, keys, KV_HEADS);
    fill<V_DIM>(value_tile, of_values, start, KEYS, keys, KV_HEADS);
    __syncthreads();
    float scores[KEYS / 8][4] = {};
#pragma unroll(STEPS(QK_DIM))
    for (int step = 0; step < QK_DIM / 16; ++step) {
      u32 a[4];
      query.get(a, step);
#pragma unroll
      for (int tile = 0; tile < KEYS / 16; ++tile) {
        u32 b[4];
        right_of_rows(b, key_tile, QK_STRIDE, tile * 16, step * 16);
        multiply(scores[2 * tile], a, b[0], b[1]);
        multiply(scores[2 * tile + 1], a, b[2], b[3]);
      }
    }
    float larger[2] = {most[0], most[1]};
#pragma unroll
    for (int tile = 0; tile < KEYS / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = own + lane() / 4 + i / 2 * 8, key = start + tile * 8 + lane() % 4 * 2 + i % 2;
        float slope;
        scores[tile][i] = lengths.visible(row, key) ? score(scores[tile][i], slope) : minus_infinity();
        larger[i / 2] = fmaxf(larger[i / 2], scores[tile][i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      larger[half] = row_reduce<Max>(larger[half]);
      // For a row without a visible key so far everything is 0, whatever the maximum.
      const float around = larger[half] == minus_infinity() ? 0.0f : larger[half];
      const float shrink = expf(most[half] - around);
      most[half] = larger[half];
      total[half] *= shrink;
#pragma unroll
      for (int tile = 0; tile < V_DIM / 8; ++tile) {
        sums[tile][2 * half] *= shrink;
        sums[tile][2 * half + 1] *= shrink;
      }
#pragma unroll
      for (int tile = 0; tile < KEYS / 8; ++tile) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[tile][i] = expf(scores[tile][i] - around);
          total[half] += scores[tile][i];
        }
      }
    }
    if (DROPOUT) {
      Dropped dropped = DROPPED(head);
      const u32 kept = kept_by_row<KEYS / 8>(dropped, lengths, own, start);
#pragma unroll
      for (int tile = 0; tile < KEYS / 8; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[tile][i] *= dropped.factor_of(kept, 4 * tile + i);
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      const u32 a[4] = {pair(scores[2 * step][0], scores[2 * step][1]), pair(scores[2 * step][2], scores[2 * step][3]),
                        pair(scores[2 * step + 1][0], scores[2 * step + 1][1]),
                        pair(scores[2 * step + 1][2], scores[2 * step + 1][3])};
#pragma unroll
      for (int tile = 0; tile < V_DIM / 16; ++tile) {
        u32 b[4];
        right_of_columns(b, value_tile, V_STRIDE, step * 16, tile * 16);
        multiply(sums[2 * tile], a, b[0], b[1]);
        multiply(sums[2 * tile + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = row_reduce<Sum>(total[half]);
    const int row = own + lane() / 4 + half * 8;
    if (row >= queries) continue;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    stored* to = out + ((batch * queries + row) * Q_HEADS + head) * V_DIM + lane() % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < V_DIM / 8; ++tile) {
      *reinterpret_cast<u32*>(to + tile * 8) = pair(sums[tile][2 * half] * inverse, sums[tile][2 * half + 1] * inverse);
    }
    if (lane() % 4 == 0) {
      lse[(batch * Q_HEADS + head) * queries + row] = sum == 0.0f ? minus_infinity() : most[half] + logf(sum);
    }
  }
}

// dq[b, q, Q_HEADS, QK_DIM]. Grid as forward.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_backward_query(const stored* __restrict__ q, const stored* __restrict__ k, const stored* __restrict__ v,
                             const stored* __restrict__ dout, const float* __restrict__ lse,
                             const float* __restrict__ delta, stored* __restrict__ dq, int accumulate, int queries,
                             int keys, int query_offset, int key_offset, DROPOUT_PARAMETERS) {
  alignas(16) __shared__ stored key_tile[KEYS_BACKWARD * QK_STRIDE];
  alignas(16) __shared__ stored value_tile[KEYS_BACKWARD * V_STRIDE];
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const u64 batch = blockIdx.y / Q_HEADS;
  const int head = blockIdx.y % Q_HEADS;
  const int first = (gridDim.x - 1 - blockIdx.x) * ROWS;
  const int own = first + warp() * 16;
  alignas(16) __shared__ stored query_rows[HELD(QK_STRIDE)], gradient_rows[HELD(V_STRIDE)];
  const Factors<QK_DIM> query(query_rows, q + (batch * queries * Q_HEADS + head) * QK_DIM, first, queries, Q_HEADS);
  const Factors<V_DIM> gradient(gradient_rows, dout + (batch * queries * Q_HEADS + head) * V_DIM, first, queries, Q_HEADS);
  const stored* of_keys = k + (batch * keys * KV_HEADS + head / GROUP) * QK_DIM;
  const stored* of_values = v + (batch * keys * KV_HEADS + head / GROUP) * V_DIM;
  float log_sum[2], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own + lane() / 4 + half * 8;
    const u64 at = (batch * Q_HEADS + head) * queries + row;
    log_sum[half] = row < queries ? lse[at] : 0.0f;
    shift[half] = row < queries ? delta[at] : 0.0f;
  }
  float sums[QK_DIM / 8][4] = {};
  const int end = lengths.end(Lengths::min_of(first + ROWS, queries) - 1);
  for (int start = lengths.begin(first) / KEYS_BACKWARD * KEYS_BACKWARD; start < end; start += KEYS_BACKWARD) {
    __syncthreads();
    fill<QK_DIM>(key_tile, of_keys, start, KEYS_BACKWARD, keys, KV_HEADS);
    fill<V_DIM>(value_tile, of_values, start, KEYS_BACKWARD, keys, KV_HEADS);
    __syncthreads();
    float scores[KEYS_BACKWARD / 8][4] = {}, changes[KEYS_BACKWARD / 8][4] = {};
#pragma unroll
    for (int tile = 0; tile < KEYS_BACKWARD / 16; ++tile) {
#pragma unroll(STEPS(QK_DIM))
      for (int step = 0; step < QK_DIM / 16; ++step) {
        u32 a[4], b[4];
        query.get(a, step);
        right_of_rows(b, key_tile, QK_STRIDE, tile * 16, step * 16);
        multiply(scores[2 * tile], a, b[0], b[1]);
        multiply(scores[2 * tile + 1], a, b[2], b[3]);
      }
#pragma unroll(STEPS(V_DIM))
      for (int step = 0; step < V_DIM / 16; ++step) {
        u32 a[4], b[4];
        gradient.get(a, step);
        right_of_rows(b, value_tile, V_STRIDE, tile * 16, step * 16);
        multiply(changes[2 * tile], a, b[0], b[1]);
        multiply(changes[2 * tile + 1], a, b[2], b[3]);
      }
    }
    Dropped dropped = DROPPED(head);
    const u32 kept = DROPOUT ? kept_by_row<KEYS_BACKWARD / 8>(dropped, lengths, own, start) : 0;
#pragma unroll
    for (int tile = 0; tile < KEYS_BACKWARD / 8; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = own + lane() / 4 + i / 2 * 8, key = start + tile * 8 + lane() % 4 * 2 + i % 2;
        float slope;
        if (DROPOUT) changes[tile][i] *= dropped.factor_of(kept, 4 * tile + i);
        const float p = expf(score(scores[tile][i], slope) - log_sum[i / 2]);
        const float ds = p * (changes[tile][i] - shift[i / 2]) * slope * static_cast<float>(SCALE);
        scores[tile][i] = lengths.visible(row, key) ? ds : 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < KEYS_BACKWARD / 16; ++step) {
      const u32 a[4] = {pair(scores[2 * step][0], scores[2 * step][1]), pair(scores[2 * step][2], scores[2 * step][3]),
                        pair(scores[2 * step + 1][0], scores[2 * step + 1][1]),
                        pair(scores[2 * step + 1][2], scores[2 * step + 1][3])};
#pragma unroll
      for (int tile = 0; tile < QK_DIM / 16; ++tile) {
        u32 b[4];
        right_of_columns(b, key_tile, QK_STRIDE, step * 16, tile * 16);
        multiply(sums[2 * tile], a, b[0], b[1]);
        multiply(sums[2 * tile + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own + lane() / 4 + half * 8;
    if (row >= queries) continue;
    stored* to = dq + ((batch * queries + row) * Q_HEADS + head) * QK_DIM + lane() % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < QK_DIM / 8; ++tile) {
      put_pair(to + tile * 8, sums[tile][2 * half], sums[tile][2 * half + 1], accumulate);
    }
  }
}

// Shared memory of a block that computes dk and dv.
struct KeyValueTiles {
  alignas(16) stored keys[ROWS * QK_STRIDE];
  alignas(16) stored values[ROWS * V_STRIDE];
  alignas(16) stored queries[QUERIES_BACKWARD * QK_STRIDE];
  alignas(16) stored gradients[QUERIES_BACKWARD * V_STRIDE];
};

struct KeyValueArguments {
  const stored *q, *k, *v, *dout;
  const float *lse, *delta;
  stored *dk, *dv;
  int accumulate;
};

// Sums for ROWS keys: of dk, of dv, or of both. Here rows are keys and columns are queries.
template <bool OF_KEYS, bool OF_VALUES>
__device__ __forceinline__ void key_value_block(KeyValueTiles& tiles, const KeyValueArguments& of, const Lengths& lengths,
                                                u64 batch, int kv_head, DROPOUT_PARAMETERS) {
  const int queries = lengths.queries, keys = lengths.keys;
  const int first = blockIdx.x * ROWS;
  const int own = first + warp() * 16;
  fill<QK_DIM>(tiles.keys, of.k + (batch * keys * KV_HEADS + kv_head) * QK_DIM, first, ROWS, keys, KV_HEADS);
  if (OF_KEYS) fill<V_DIM>(tiles.values, of.v + (batch * keys * KV_HEADS + kv_head) * V_DIM, first, ROWS, keys, KV_HEADS);
  float sums_k[OF_KEYS ? QK_DIM / 8 : 1][4] = {}, sums_v[OF_VALUES ? V_DIM / 8 : 1][4] = {};
  const int end = lengths.viewers_end(Lengths::min_of(first + ROWS, keys) - 1);
  const int begin = lengths.viewers_begin(first) / QUERIES_BACKWARD * QUERIES_BACKWARD;
  for (int head = kv_head * GROUP; head < (kv_head + 1) * GROUP; ++head) {
    const stored* of_queries = of.q + (batch * queries * Q_HEADS + head) * QK_DIM;
    const stored* of_gradients = of.dout + (batch * queries * Q_HEADS + head) * V_DIM;
    for (int start = begin; start < end; start += QUERIES_BACKWARD) {
      __syncthreads();
      fill<QK_DIM>(tiles.queries, of_queries, start, QUERIES_BACKWARD, queries, Q_HEADS);
      fill<V_DIM>(tiles.gradients, of_gradients, start, QUERIES_BACKWARD, queries, Q_HEADS);
      __syncthreads();
      float scores[2][4] = {}, changes[2][4] = {};
#pragma unroll 2  // fully unrolled, the assembler would load ahead more than fits in registers
      for (int step = 0; step < QK_DIM / 16; ++step) {
        u32 a[4], b[4];
        left(a, tiles.keys, QK_STRIDE, warp() * 16, step * 16);
        right_of_rows(b, tiles.queries, QK_STRIDE, 0, step * 16);
        multiply(scores[0], a, b[0], b[1]);
        multiply(scores[1], a, b[2], b[3]);
      }
#pragma unroll 2  // as above
      for (int step = 0; step < (OF_KEYS ? V_DIM / 16 : 0); ++step) {
        u32 a[4], b[4];
        left(a, tiles.values, V_STRIDE, warp() * 16, step * 16);
        right_of_rows(b, tiles.gradients, V_STRIDE, 0, step * 16);
        multiply(changes[0], a, b[0], b[1]);
        multiply(changes[1], a, b[2], b[3]);
      }
      Dropped dropped = DROPPED(head);
      const u32 bits = DROPOUT ? kept_by_column(dropped, lengths, start, own) : 0;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = own + lane() / 4 + i / 2 * 8, query = start + tile * 8 + lane() % 4 * 2 + i % 2;
          const bool seen = lengths.visible(query, key);
          const u64 at = (batch * Q_HEADS + head) * queries + query;
          float slope;
          const float p = seen ? expf(score(scores[tile][i], slope) - of.lse[at]) : 0.0f;
          const float kept = DROPOUT ? dropped.factor_of(bits, 4 * tile + i) : 1.0f;
          const float change = kept * changes[tile][i] - (seen ? of.delta[at] : 0.0f);
          changes[tile][i] = seen ? p * change * slope * static_cast<float>(SCALE) : 0.0f;
          scores[tile][i] = p * kept;
        }
      }
      const u32 p[4] = {pair(scores[0][0], scores[0][1]), pair(scores[0][2], scores[0][3]),
                        pair(scores[1][0], scores[1][1]), pair(scores[1][2], scores[1][3])};
      const u32 ds[4] = {pair(changes[0][0], changes[0][1]), pair(changes[0][2], changes[0][3]),
                         pair(changes[1][0], changes[1][1]), pair(changes[1][2], changes[1][3])};
#pragma unroll
      for (int tile = 0; tile < (OF_VALUES ? V_DIM / 16 : 0); ++tile) {
        u32 b[4];
        right_of_columns(b, tiles.gradients, V_STRIDE, 0, tile * 16);
        multiply(sums_v[2 * tile], p, b[0], b[1]);
        multiply(sums_v[2 * tile + 1], p, b[2], b[3]);
      }
#pragma unroll
      for (int tile = 0; tile < (OF_KEYS ? QK_DIM / 16 : 0); ++tile) {
        u32 b[4];
        right_of_columns(b, tiles.queries, QK_STRIDE, 0, tile * 16);
        multiply(sums_k[2 * tile], ds, b[0], b[1]);
        multiply(sums_k[2 * tile + 1], ds, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own + lane() / 4 + half * 8;
    if (row >= keys) continue;
    const u64 at = (batch * keys + row) * KV_HEADS + kv_head;
#pragma unroll
    for (int tile = 0; tile < (OF_KEYS ? QK_DIM / 8 : 0); ++tile) {
      stored* to = of.dk + at * QK_DIM + tile * 8 + lane() % 4 * 2;
      put_pair(to, sums_k[tile][2 * half], sums_k[tile][2 * half + 1], of.accumulate);
    }
#pragma unroll
    for (int tile = 0; tile < (OF_VALUES ? V_DIM / 8 : 0); ++tile) {
      stored* to = of.dv + at * V_DIM + tile * 8 + lane() % 4 * 2;
      put_pair(to, sums_v[tile][2 * half], sums_v[tile][2 * half + 1], of.accumulate);
    }
  }
}

// dk[b, k, KV_HEADS, QK_DIM] and dv[b, k, KV_HEADS, V_DIM], summed over the query heads that share
// them, in their order. Grid: blocks of ROWS keys, batch times key-value heads; twice as many if
// heads are wide, first for dk and then for dv.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_backward_key_value(const stored* __restrict__ q, const stored* __restrict__ k,
                                 const stored* __restrict__ v, const stored* __restrict__ dout,
                                 const float* __restrict__ lse, const float* __restrict__ delta,
                                 stored* __restrict__ dk, stored* __restrict__ dv, int accumulate, int queries, int keys,
                                 int query_offset, int key_offset, DROPOUT_PARAMETERS) {
  __shared__ KeyValueTiles tiles;
  const Lengths lengths = {queries, keys, query_offset, key_offset};
  const KeyValueArguments of = {q, k, v, dout, lse, delta, dk, dv, accumulate};
#define REST threshold, factor, seed, tensor, step, numbers, batch_offset, head_offset, total_heads, total_len
#if WIDE
  const u64 batch = blockIdx.y / 2 / KV_HEADS;
  const int kv_head = blockIdx.y / 2 % KV_HEADS;
  if (blockIdx.y % 2 == 0) {
    key_value_block<true, false>(tiles, of, lengths, batch, kv_head, REST);
  } else {
    key_value_block<false, true>(tiles, of, lengths, batch, kv_head, REST);
  }
#else
  key_value_block<true, true>(tiles, of, lengths, blockIdx.y / KV_HEADS, blockIdx.y % KV_HEADS, REST);
#endif
}
