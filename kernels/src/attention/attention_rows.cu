// The parts of attention that work row by row: the backward pass's correction, and the merge of
// results over ranges of keys. The contract is in mod.rs. One warp for each row of a head.
//
// Compile-time constants: Q_HEADS, V_DIM. Floor of the correction: reads out and dout; of the
// merge: reads both parts, writes one, in f32.

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

// delta[b, Q_HEADS, q] = sum over V_DIM of dout out. One warp for each row of a head.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_delta(const stored* __restrict__ out, const stored* __restrict__ dout, float* __restrict__ delta,
                    int batches, int queries) {
  const u64 number = static_cast<u64>(blockIdx.x) * (THREADS / 32) + warp();
  const bool here = number < static_cast<u64>(batches) * queries * Q_HEADS;
  float sum = 0.0f;
  if (here) {
    for (int column = lane(); column < V_DIM; column += 32) {
      sum += widened(out[number * V_DIM + column]) * widened(dout[number * V_DIM + column]);
    }
  }
#pragma unroll
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  if (here && lane() == 0) {
    const u64 token = number / Q_HEADS, head = number % Q_HEADS;
    delta[(token / queries * Q_HEADS + head) * queries + token % queries] = sum;
  }
}

// lse <- ln(e^lse + e^part_lse), out <- e^(lse_old - lse) out + e^(part_lse - lse) part_out. Grid
// as above.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_merge(float* __restrict__ out, float* __restrict__ lse, const stored* __restrict__ part_out,
                    const float* __restrict__ part_lse, int batches, int queries) {
  const u64 number = static_cast<u64>(blockIdx.x) * (THREADS / 32) + warp();
  if (number >= static_cast<u64>(batches) * queries * Q_HEADS) return;
  const u64 token = number / Q_HEADS, head = number % Q_HEADS;
  const u64 at = (token / queries * Q_HEADS + head) * queries + token % queries;
  const float mine = lse[at], other = part_lse[at];
  const float most = fmaxf(mine, other);
  if (most == Max::none()) return;  // neither part sees a key
  const float both = most + logf(expf(mine - most) + expf(other - most));
  const float keep = expf(mine - both), add = expf(other - both);
  for (int column = lane(); column < V_DIM; column += 32) {
    const u64 place = number * V_DIM + column;
    out[place] = keep * out[place] + add * widened(part_out[place]);
  }
  // The shuffle is also the barrier after which lse may be overwritten: every lane has read it.
  const float last = __shfl_sync(0xffffffffu, both, 0);
  if (lane() == 0) lse[at] = last;
}
