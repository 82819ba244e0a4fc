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
  u32 keeps_moments;  // not 0: m and v stay unchanged
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

// Grid: x is a block of elements within a tensor, y is the tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_update(const Tensor* __restrict__ tensors, const Factors* __restrict__ factors) {
  const Tensor t = tensors[blockIdx.y];
  const Factors f = *factors;
  const float keep = 1.0f - f.lr * t.decay;
  const u64 stride = static_cast<u64>(gridDim.x) * THREADS;
  for (u64 at = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; at < t.elements; at += stride) {
    const float g = f.gradient_scale * t.g[at];
    const float m = f.beta1 * t.m[at] + f.rest1 * g;
    const float v = f.beta2 * t.v[at] + f.rest2 * g * g;
    const float w = t.w[at] * keep - f.rate * m / (sqrtf(v) * f.inverse_root + f.eps);
    if (!t.keeps_moments) {
      t.m[at] = m;
      t.v[at] = v;
    }
    t.to[at] = w;
    if (t.copy != nullptr) t.copy[at] = narrowed(w);
  }
}
