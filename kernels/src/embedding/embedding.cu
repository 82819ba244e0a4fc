// Embedding; the contract is in mod.rs.
//
// Compile-time constants: COLUMNS, SCALE, RUN (lookups that a block of the backward pass sums),
// GROUP (those whose loads are in flight together) and JOINED (sums of blocks, likewise). Floor of
// forward: reads a row of the table and writes one of the output for each token. Backward: reads a
// row of dout for each token, reads and writes each row of dtable that occurs.

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

// The gradient sums the tokens of a row without atomics, so the bits are always the same. It gets
// the lookups in the order of their rows: each block sums the runs of equal rows among RUN of them,
// and another kernel adds up runs that go on over several blocks.

struct alignas(16) Lookup {
  long long id, token;
};

#define OUTSIDE (-1)

// The local row of a lookup, OUTSIDE for ids that are not in the range.
__device__ __forceinline__ int row_of(const Lookup& lookup, long long first_row, int rows) {
  const long long row = lookup.id - first_row;
  return row >= 0 && row < rows ? static_cast<int>(row) : OUTSIDE;
}

// Each block sums the runs of equal rows among RUN lookups in their order. A run that began in an
// earlier block goes to partial[blocks, COLUMNS], all others to dtable[rows, COLUMNS]. Grid: blocks
// of lookups, blocks of columns.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const Lookup* __restrict__ by_row, const stored* __restrict__ dout, float* __restrict__ dtable,
                       float* __restrict__ partial, long long first_row, int rows, int tokens) {
  let_next_kernel_begin();
  await_kernel_before();
  __shared__ int row[RUN + 1];  // after that of the lookup before
  __shared__ u32 token[RUN + 1];
  for (int i = threadIdx.x; i < RUN + 1; i += THREADS) {
    const int at = blockIdx.x * RUN + i - 1;
    const bool there = at >= 0 && at < tokens;
    const Lookup lookup = by_row[there ? at : 0];
    token[i] = static_cast<u32>(lookup.token);
    row[i] = there ? row_of(lookup, first_row, rows) : OUTSIDE;
  }
  __syncthreads();
  const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  if (column >= COLUMNS) return;
  const bool began_before = row[0] == row[1];
  // Whether the sum up to a lookup goes to dtable: no later one of the block has its row, nor did
  // an earlier block.
  const auto ends_in_table = [&](int i) {
    return row[i + 1] != OUTSIDE && (i + 1 == RUN || row[i + 1] != row[i + 2]) &&
           !(began_before && row[i + 1] == row[0]);
  };
  // What a group of lookups loads. None is widened in a branch (`each_row`), so that all loads are
  // in flight together, and with those of the next group.
  struct Group {
    Packed<stored> v[GROUP];
    Packed<float> total[GROUP];
  };
  const auto loaded = [&](int begin) {
    Group group;
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const u64 own = static_cast<u64>(token[begin + i + 1]) * COLUMNS + column;
      group.v[i] = *reinterpret_cast<const Packed<stored>*>(dout + own);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      if (!ends_in_table(begin + i)) continue;
      const u64 own = static_cast<u64>(row[begin + i + 1]) * COLUMNS + column;
      group.total[i] = *reinterpret_cast<const Packed<float>*>(dtable + own);
    }
    return group;
  };
  Group next = loaded(0);
  Packed<float> sum = {};
#pragma unroll 1
  for (int begin = 0; begin < RUN; begin += GROUP) {
    const Group group = next;
    if (begin + GROUP < RUN) next = loaded(begin + GROUP);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      const int own = row[begin + i + 1];
      if (own == OUTSIDE) continue;
#pragma unroll
      for (int e = 0; e < PACK; ++e) sum.at[e] += static_cast<float>(SCALE) * widened(group.v[i].at[e]);
      if (begin + i + 1 < RUN && own == row[begin + i + 2]) continue;
      float* to = partial + static_cast<u64>(blockIdx.x) * COLUMNS;
      if (ends_in_table(begin + i)) {
        to = dtable + static_cast<u64>(own) * COLUMNS;
#pragma unroll
        for (int e = 0; e < PACK; ++e) sum.at[e] += group.total[i].at[e];
      }
      *reinterpret_cast<Packed<float>*>(to + column) = sum;
      sum = {};
    }
  }
}

// Adds what later blocks summed to the row in which they continue a run. The first such block of a
// run does it. Grid as before.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_join(const Lookup* __restrict__ by_row, float* __restrict__ dtable, const float* __restrict__ partial,
                   long long first_row, int rows, int tokens) {
  const int begin = blockIdx.x * RUN, column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
  // Before the wait: no kernel writes by_row.
  const auto row_at = [&](int at) { return at < 0 ? OUTSIDE : row_of(by_row[at], first_row, rows); };
  const int own = row_at(begin), before = row_at(begin - 1), block_before = row_at(begin - RUN - 1);
  const bool joins = column < COLUMNS && own != OUTSIDE && before == own && block_before != own;
  // Blocks blockIdx.x..end begin with this row; rows are sorted.
  int end = blockIdx.x + 1;
  for (int above = (tokens + RUN - 1) / RUN; joins && end < above;) {
    const int middle = (end + above) / 2;
    if (row_at(middle * RUN) == own) end = middle + 1; else above = middle;
  }
  await_kernel_before();
  if (!joins) return;
  Packed<float> sum = {};
  for (int block = blockIdx.x; block < end; block += JOINED) {
    Packed<float> more[JOINED];
#pragma unroll
    for (int i = 0; i < JOINED; ++i) {
      if (block + i < end)
        more[i] = *reinterpret_cast<const Packed<float>*>(partial + static_cast<u64>(block + i) * COLUMNS + column);
    }
#pragma unroll
    for (int i = 0; i < JOINED; ++i) {
      if (block + i >= end) break;
#pragma unroll
      for (int e = 0; e < PACK; ++e) sum.at[e] += more[i].at[e];
    }
  }
  Packed<float>* to = reinterpret_cast<Packed<float>*>(dtable + static_cast<u64>(own) * COLUMNS + column);
  Packed<float> total = *to;
#pragma unroll
  for (int e = 0; e < PACK; ++e) total.at[e] += sum.at[e];
  *to = total;
}
