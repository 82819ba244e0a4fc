// Keys and values of latent attention; the contract is in mod.rs.
//
// Compile-time constants: HEADS, CONTENT, ROTARY, VALUE. PACK divides the last three. Floor of
// join: reads up and rotary, writes k and v; of split: reads dk and dv, writes dup and drotary.

#define KEY (CONTENT + ROTARY)
#define UP (CONTENT + VALUE)
#define BOTH (KEY + VALUE)

// k[tokens, HEADS, KEY] and v[tokens, HEADS, VALUE] from up[tokens, HEADS, UP] and rotary[tokens,
// ROTARY], one thread for each pack of both.
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_heads_join(const stored* __restrict__ up, const stored* __restrict__ rotary, stored* __restrict__ k,
                      stored* __restrict__ v, u64 tokens) {
  const u64 at = pack_start();
  const u64 head = at / BOTH;
  const int i = static_cast<int>(at % BOTH);
  if (head >= tokens * HEADS) return;
  const stored* from = i < CONTENT ? up + head * UP + i
                       : i < KEY   ? rotary + head / HEADS * ROTARY + (i - CONTENT)
                                   : up + head * UP + (i - ROTARY);
  float values[PACK];
  load(from, values);
  store(i < KEY ? k + head * KEY + i : v + head * VALUE + (i - KEY), values);
}

// dup[tokens, HEADS, UP] from dk and dv, one thread for each pack.
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_heads_split(const stored* __restrict__ dk, const stored* __restrict__ dv, stored* __restrict__ dup,
                       u64 tokens) {
  const u64 at = pack_start();
  const u64 head = at / UP;
  const int i = static_cast<int>(at % UP);
  if (head >= tokens * HEADS) return;
  float values[PACK];
  load(i < CONTENT ? dk + head * KEY + i : dv + head * VALUE + (i - CONTENT), values);
  store(dup + at, values);
}

// drotary[tokens, ROTARY] = sums of dk over heads, one thread for each pack.
extern "C" __global__ void __launch_bounds__(THREADS)
    latent_heads_sum(const stored* __restrict__ dk, stored* __restrict__ drotary, u64 tokens) {
  const u64 at = pack_start();
  if (at >= tokens * ROTARY) return;
  const u64 token = at / ROTARY;
  const stored* from = dk + token * HEADS * KEY + CONTENT + at % ROTARY;
  float sums[PACK] = {};
  for (int head = 0; head < HEADS; ++head) {
    float values[PACK];
    load(from + head * KEY, values);
#pragma unroll
    for (int i = 0; i < PACK; ++i) sums[i] += values[i];
  }
  store(drotary + at, sums);
}
