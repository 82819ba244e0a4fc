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

// The gradient sums the tokens of a row without atomics on floats, so the bits are always the same.
// Tokens are first sorted by row, stably: one pass of two kernels for each digit of a row number.
// Then each block sums the runs of equal rows among RUN tokens, and another kernel adds up runs
// that go on over several blocks.

#define DIGIT_BITS 9
#define DIGITS (1 << DIGIT_BITS)
#define ROUNDS 4
#define TILE (ROUNDS * THREADS)
#define RUN 32

// The row of a token; `rows` for ids outside, so that they come last.
__device__ __forceinline__ int row_of(const long long* __restrict__ ids, u32 token, long long first_row, int rows) {
  const long long row = ids[token] - first_row;
  return row >= 0 && row < rows ? static_cast<int>(row) : rows;
}

// What a sort pass reads: `order` is that of the pass before, null for the first pass.
struct Keys {
  const long long* ids;
  const u32* order;
  long long first_row;
  int rows, tokens, shift;

  __device__ __forceinline__ u32 token(int at) const { return order == nullptr ? at : order[at]; }
  __device__ __forceinline__ int digit(u32 token) const {
    return (row_of(ids, token, first_row, rows) >> shift) % DIGITS;
  }
};

struct Rank {
  int before;  // lanes before this one that have its digit
  bool last;   // no lane after it has
};

__device__ __forceinline__ Rank rank_in_warp(int digit) {
  const float own = static_cast<float>(digit);  // exact, and what the emulator shuffles
  const int lane = threadIdx.x % 32;
  int before = 0, after = 0;
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    const bool same = __shfl_sync(0xffffffffu, own, other) == own;
    before += same && other < lane;
    after += same && other > lane;
  }
  return {before, after == 0};
}

// Counts the tokens of a block's tile up in next[digit], in their order: warps take turns. Calls
// place(token, count before it).
template <typename Place>
__device__ __forceinline__ void each_of_tile(const Keys& keys, int (&next)[DIGITS], Place place) {
  u32 tokens[ROUNDS];
  int digits[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int at = blockIdx.x * TILE + round * THREADS + threadIdx.x;
    tokens[round] = at < keys.tokens ? keys.token(at) : 0;
    digits[round] = at < keys.tokens ? keys.digit(tokens[round]) : -1;
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int digit = digits[round];
    const Rank rank = rank_in_warp(digit);
    for (int turn = 0; turn < WARPS; ++turn) {
      __syncthreads();  // the warp before has counted
      if (turn != threadIdx.x / 32) continue;
      const int at = digit < 0 ? 0 : next[digit] + rank.before;
      __syncwarp();  // all lanes have read
      if (digit < 0) continue;
      if (rank.last) next[digit] = at + 1;
      place(tokens[round], at);
    }
  }
}

// counts[tiles, DIGITS]: tokens of each tile by digit. One block for each tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_count(const long long* __restrict__ ids, const u32* __restrict__ order, int* __restrict__ counts,
                    long long first_row, int rows, int tokens, int shift) {
  __shared__ int counted[DIGITS];
  for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) counted[digit] = 0;
  each_of_tile(Keys{ids, order, first_row, rows, tokens, shift}, counted, [](u32, int) {});
  __syncthreads();
  for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) counts[blockIdx.x * DIGITS + digit] = counted[digit];
}

// sorted[tokens]: the order of the pass before, by digit. One block for each tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_sort(const long long* __restrict__ ids, const u32* __restrict__ order, const int* __restrict__ counts,
                   u32* __restrict__ sorted, long long first_row, int rows, int tokens, int shift) {
  __shared__ int next[DIGITS], sums[2][DIGITS];
  for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
    int before = 0, all = 0;
#pragma unroll 8
    for (int tile = 0; tile < static_cast<int>(gridDim.x); ++tile) {
      const int count = counts[tile * DIGITS + digit];
      before += tile < static_cast<int>(blockIdx.x) ? count : 0;
      all += count;
    }
    next[digit] = before - all;  // and the sum up to this digit, below
    sums[0][digit] = all;
  }
  int from = 0;
  for (int away = 1; away < DIGITS; away *= 2) {
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS)
      sums[1 - from][digit] = sums[from][digit] + (digit >= away ? sums[from][digit - away] : 0);
    from = 1 - from;
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) next[digit] += sums[from][digit];
  each_of_tile(Keys{ids, order, first_row, rows, tokens, shift}, next, [&](u32 token, int at) { sorted[at] = token; });
}

// Each block sums the runs of equal rows among RUN tokens in their order. A run that began in an
// earlier block goes to partial[blocks, COLUMNS], all others to dtable[rows, COLUMNS]. Grid: blocks
// of tokens, blocks of columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const long long* __restrict__ ids, const u32* __restrict__ order,
                       const stored* __restrict__ dout, float* __restrict__ dtable, float* __restrict__ partial,
                       long long first_row, int rows, int tokens) {
  __shared__ int row[RUN + 2];  // with a neighbour on both sides; -1 where there is none
  __shared__ u32 token[RUN];
  for (int i = threadIdx.x; i < RUN + 2; i += THREADS) {
    const int at = blockIdx.x * RUN + i - 1;
    const bool there = at >= 0 && at < tokens;
    const u32 own = there ? order[at] : 0;
    row[i] = there ? row_of(ids, own, first_row, rows) : -1;
    if (i > 0 && i <= RUN) token[i - 1] = own;
  }
  __syncthreads();
  const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  if (column >= COLUMNS) return;
  const bool began_before = row[0] == row[1];
  // Whether the sum up to a token goes to dtable: no later token of the block has its row, nor did
  // an earlier block.
  const auto ends_in_table = [&](int i) {
    return (i + 1 == RUN || row[i + 1] != row[i + 2]) && !(began_before && row[i + 1] == row[0]);
  };
  constexpr int GROUP = 4;
  Packed<float> sum = {};
  for (int begin = 0; begin < RUN; begin += GROUP) {
    float v[GROUP][PACK];
    Packed<float> total[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int own = row[begin + i + 1];
      if (own < 0 || own >= rows) continue;
      load(dout + static_cast<u64>(token[begin + i]) * COLUMNS + column, v[i]);
      // Before any sum is stored, so that all loads of a group are in flight together.
      if (ends_in_table(begin + i))
        total[i] = *reinterpret_cast<const Packed<float>*>(dtable + static_cast<u64>(own) * COLUMNS + column);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int own = row[begin + i + 1];
      if (own < 0 || own >= rows) return;
#pragma unroll
      for (int e = 0; e < PACK; ++e) sum.at[e] += static_cast<float>(SCALE) * v[i][e];
      if (begin + i + 1 < RUN && own == row[begin + i + 2]) continue;
      float* to = partial + static_cast<u64>(blockIdx.x) * COLUMNS;
      if (ends_in_table(begin + i)) {
        to = dtable + static_cast<u64>(own) * COLUMNS;
#pragma unroll
        for (int e = 0; e < PACK; ++e) sum.at[e] += total[i].at[e];
      }
      *reinterpret_cast<Packed<float>*>(to + column) = sum;
      sum = {};
    }
  }
}

// Adds what later blocks summed to the row in which they continue a run. The first such block of a
// run does it. Grid as before.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_join(const long long* __restrict__ ids, const u32* __restrict__ order, float* __restrict__ dtable,
                   const float* __restrict__ partial, long long first_row, int rows, int tokens) {
  const int begin = blockIdx.x * RUN, column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  if (begin == 0 || column >= COLUMNS) return;
  const auto row_at = [&](int at) { return row_of(ids, order[at], first_row, rows); };
  const int own = row_at(begin);
  if (own == rows || row_at(begin - 1) != own) return;
  if (begin > RUN && row_at(begin - RUN - 1) == own) return;
  // Blocks here..end begin with this row; rows are sorted.
  int end = blockIdx.x + 1;
  for (int above = (tokens + RUN - 1) / RUN; end < above;) {
    const int middle = (end + above) / 2;
    if (row_at(middle * RUN) == own) end = middle + 1; else above = middle;
  }
  Packed<float> sum = {};
#pragma unroll 4
  for (int block = blockIdx.x; block < end; ++block) {
    const Packed<float> more = *reinterpret_cast<const Packed<float>*>(partial + static_cast<u64>(block) * COLUMNS + column);
#pragma unroll
    for (int e = 0; e < PACK; ++e) sum.at[e] += more.at[e];
  }
  Packed<float>* to = reinterpret_cast<Packed<float>*>(dtable + static_cast<u64>(own) * COLUMNS + column);
  Packed<float> total = *to;
#pragma unroll
  for (int e = 0; e < PACK; ++e) total.at[e] += sum.at[e];
  *to = total;
}
