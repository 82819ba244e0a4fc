// AdamW over many tensors in one launch; the formulas are in mod.rs. Weights, gradients and moments
// are f32; the next step computes with the copy in the storage type, if there is one.
//
// Floor for each parameter: reads w, g, m and v, writes w, m and v (28 bytes), and the copy.

struct Tensor {
  float* to;  // w, or the destination of a proposal
  const float* w;
  const float* g;
  float* m;
  float* v;
  stored* copy;  // or null
  u64 elements;
  float decay;
  unsigned short keeps_moments;  // not 0: m and v stay unchanged
  unsigned short by_four;        // not 0: addresses are multiples of four elements
};

// In device memory, so that a captured graph can be replayed with the next step's values.
struct Factors {
  float lr;              // learning rate
  float rate;            // lr / (1 - beta1^t)
  float inverse_root;    // 1 / sqrt(1 - beta2^t)
  float gradient_scale;  // clipping
  float beta1, beta2, eps;
  float rest1, rest2;    // 1 - beta1, 1 - beta2, which would lose digits if computed in f32
};

// Compile-time constant: CHUNK, the elements that a block updates.

__device__ __forceinline__ float updated(const Factors& f, float keep, float w, float g, float& m, float& v) {
  g *= f.gradient_scale;
  m = f.beta1 * m + f.rest1 * g;
  v = f.beta2 * v + f.rest2 * g * g;
  return w * keep - f.rate * m / (sqrtf(v) * f.inverse_root + f.eps);
}

// Four elements at `at`, if all addresses allow it.
__device__ __forceinline__ void update_four(const Tensor& t, const Factors& f, float keep, u64 at) {
  struct alignas(16) Four { float at[4]; };
  struct alignas(4 * sizeof(stored)) Copies { stored at[4]; };
  const Four g = *reinterpret_cast<const Four*>(t.g + at), w = *reinterpret_cast<const Four*>(t.w + at);
  Four m = *reinterpret_cast<const Four*>(t.m + at), v = *reinterpret_cast<const Four*>(t.v + at), to;
  Copies copies;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to.at[i] = updated(f, keep, w.at[i], g.at[i], m.at[i], v.at[i]);
    copies.at[i] = narrowed(to.at[i]);
  }
  if (!t.keeps_moments) {
    *reinterpret_cast<Four*>(t.m + at) = m;
    *reinterpret_cast<Four*>(t.v + at) = v;
  }
  *reinterpret_cast<Four*>(t.to + at) = to;
  if (t.copy != nullptr) *reinterpret_cast<Copies*>(t.copy + at) = copies;
}

// Tells the compiler that an address from the table is of device memory.
template <typename T>
__device__ __forceinline__ void in_device_memory(const T* at) {
#ifndef CUDA_ON_CPU
  __builtin_assume(__isGlobal(at));
#endif
}

// A block for each chunk: chunk c is of the last tensor whose first chunk is at most c.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_update(const Tensor* __restrict__ tensors, const u32* __restrict__ first_chunks, int count,
                 const Factors* __restrict__ factors) {
  int here = 0;
  for (int above = count; above - here > 1;) {
    const int middle = (here + above) / 2;
    if (first_chunks[middle] <= blockIdx.x) here = middle; else above = middle;
  }
  const Tensor t = tensors[here];
  in_device_memory(t.to);
  in_device_memory(t.w);
  in_device_memory(t.g);
  in_device_memory(t.m);
  in_device_memory(t.v);
  if (t.copy != nullptr) in_device_memory(t.copy);
  const Factors f = *factors;
  const float keep = 1.0f - f.lr * t.decay;
  const u64 begin = static_cast<u64>(blockIdx.x - first_chunks[here]) * CHUNK;
  const u64 end = begin + CHUNK < t.elements ? begin + CHUNK : t.elements;
  if (t.by_four) {
#pragma unroll 4
    for (u64 at = begin + 4 * threadIdx.x; at + 4 <= end; at += 4 * THREADS) update_four(t, f, keep, at);
  }
  const u64 rest = t.by_four ? end - (end - begin) % 4 : begin;
  for (u64 at = rest + threadIdx.x; at < end; at += THREADS) {
    float m = t.m[at], v = t.v[at];
    const float w = updated(f, keep, t.w[at], t.g[at], m, v);
    if (!t.keeps_moments) {
      t.m[at] = m;
      t.v[at] = v;
    }
    t.to[at] = w;
    if (t.copy != nullptr) t.copy[at] = narrowed(w);
  }
}
