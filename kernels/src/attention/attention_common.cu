// Shared by attention's kernels: positions, the mask, scores, dropout of probabilities.

#define GROUP (Q_HEADS / KV_HEADS)

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Lengths {
  int queries, keys, query_offset, key_offset;

  __device__ __forceinline__ bool visible(int query, int key) const {
    const int at = query_offset + query, to = key_offset + key;
    const bool seen = !(CAUSAL || WINDOW) || to <= at;
    return query < queries && key < keys && seen && (!WINDOW || to + WINDOW > at);
  }
  // The keys that any of the queries first..last sees lie in begin..end.
  __device__ __forceinline__ int begin(int first) const {
    return WINDOW ? max_of(0, query_offset + first + 1 - WINDOW - key_offset) : 0;
  }
  __device__ __forceinline__ int end(int last) const {
    return CAUSAL || WINDOW ? min_of(keys, query_offset + last + 1 - key_offset) : keys;
  }
  // The queries that see any of the keys first..last.
  __device__ __forceinline__ int viewers_begin(int first) const {
    return CAUSAL || WINDOW ? max_of(0, key_offset + first - query_offset) : 0;
  }
  __device__ __forceinline__ int viewers_end(int last) const {
    return WINDOW ? min_of(queries, key_offset + last + WINDOW - query_offset) : queries;
  }
  static __device__ __forceinline__ int max_of(int a, int b) { return a > b ? a : b; }
  static __device__ __forceinline__ int min_of(int a, int b) { return a < b ? a : b; }
};

// The score of a product, with the slope of the cap.
__device__ __forceinline__ float score(float product, float& slope) {
  product *= static_cast<float>(SCALE);
  slope = 1.0f;
  if (SOFT_CAP > 0) {
    const float t = tanhf(product / static_cast<float>(SOFT_CAP));
    slope = 1.0f - t * t;
    product = static_cast<float>(SOFT_CAP) * t;
  }
  return product;
}

// Dropout of probabilities: element (sequence, head, query position, key position) of the global
// tensor [.., total_heads, total_len, total_len] has draw number index.
struct Dropped {
  u32 threshold;
  float factor;
  u64 first;  // number of the head's probability at query position 0 and key position 0
  u64 total_len;
  Draws draws;

  __device__ __forceinline__ u64 index(const Lengths& lengths, int query, int key) const {
    return first + static_cast<u64>(lengths.query_offset + query) * total_len + lengths.key_offset + key;
  }
  // Whether four keys from a multiple of four on, of any query, have the words of one group.
  __device__ __forceinline__ bool in_groups(const Lengths& lengths) const {
    return total_len % 4 == 0 && lengths.key_offset % 4 == 0;
  }
  // Whether the probability is kept.
  __device__ __forceinline__ bool keeps(const Lengths& lengths, int query, int key) {
    return draws.word(index(lengths, query, key)) >= threshold;
  }
  // The same of four keys of one group, as bits.
  __device__ __forceinline__ u32 keeps_four(const Lengths& lengths, int query, int key) {
    draws.draw(index(lengths, query, key) / 4);
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= static_cast<u32>(draws.words[i] >= threshold) << i;
    return bits;
  }
  // The factor of the probability.
  __device__ __forceinline__ float at(const Lengths& lengths, int query, int key) {
    return keeps(lengths, query, key) ? factor : 0.0f;
  }
  __device__ __forceinline__ float factor_of(u32 bits, int bit) const { return bits >> bit & 1 ? factor : 0.0f; }
};

#define DROPPED(head)                                                                                              \
  {threshold, factor, ((batch_offset + batch) * total_heads + head_offset + (head)) * total_len * total_len, total_len, \
   Draws(seed, tensor, step_of(numbers, step))}
#define DROPOUT_PARAMETERS                                                                                       \
  u32 threshold, float factor, u64 seed, u32 tensor, u32 step, const StepNumbers *__restrict__ numbers, u64 batch_offset, \
      u64 head_offset, u64 total_heads, u64 total_len

