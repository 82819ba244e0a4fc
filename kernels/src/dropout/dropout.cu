// Dropout; the contract is in mod.rs, Philox4x32-10 in random/philox.rs. One pack a thread.
//
// Baked in: nothing but the prelude's. Floor: reads x, writes y; the mask is computed.

__device__ __forceinline__ void philox(u32 (&counter)[4], u32 low, u32 high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = static_cast<u64>(0xD2511F53u) * counter[0], second = static_cast<u64>(0xCD9E8D57u) * counter[2];
    const u32 mixed0 = static_cast<u32>(second >> 32) ^ counter[1] ^ low;
    const u32 mixed2 = static_cast<u32>(first >> 32) ^ counter[3] ^ high;
    counter[1] = static_cast<u32>(second);
    counter[3] = static_cast<u32>(first);
    counter[0] = mixed0;
    counter[2] = mixed2;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// y[rows, columns] = x mask scale, for a block of a matrix: local element (i, j) has the global index
// offset + i stride + j. `columns` is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(THREADS)
    dropout_apply(const stored* __restrict__ x, stored* __restrict__ y, u64 elements, u64 columns, u64 offset,
                  u64 stride, u64 seed, u32 tensor, u32 step, u32 threshold, float scale) {
  const u64 start = pack_start();
  if (start >= elements) return;
  const u64 index = offset + start / columns * stride + start % columns;
  float v[PACK];
  load(x + start, v);
  u64 group = ~0ull;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < PACK; ++i) {
    const u64 at = index + i;
    if (at / 4 != group) {
      group = at / 4;
      words[0] = static_cast<u32>(group);
      words[1] = static_cast<u32>(group >> 32);
      words[2] = tensor;
      words[3] = step;
      philox(words, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
    }
    // Selected without an index that varies: registers have none.
    const u32 lane = static_cast<u32>(at % 4);
    const u32 word = lane == 0 ? words[0] : lane == 1 ? words[1] : lane == 2 ? words[2] : words[3];
    v[i] = word >= threshold ? v[i] * scale : 0.0f;
  }
  store(y + start, v);
}
