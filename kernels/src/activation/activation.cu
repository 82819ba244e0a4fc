// Activations; the contract is in mod.rs. One thread for each pack; `elements` is a multiple of
// PACK.
//
// Compile-time constants: KIND (0 ReLU, 1 squared ReLU, 2 GELU by tanh, 3 GELU by erf, 4 SiLU, 5
// clamped GELU).
// Floor: plain reads x (backward dy too) and writes one tensor; gated reads gate and up (backward
// dy too) and writes one (backward two).

__device__ __forceinline__ float sigmoid(float x) { return quotient(1.0f, 1.0f + exp_of(-x)); }

// (1 + tanh u) / 2 for the argument u of GELU's approximation: a sigmoid of 2 u, which keeps its
// digits where tanh u is almost -1.
__device__ __forceinline__ float gelu_gate(float x) {
  return sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

__device__ __forceinline__ float value(float x) {
#if KIND == 0
  return fmaxf(x, 0.0f);
#elif KIND == 1
  return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
#elif KIND == 2
  return x * gelu_gate(x);
#elif KIND == 3
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
#elif KIND == 4
  return x * sigmoid(x);
#else
  const float m = fminf(x, 7.0f);
  return m * sigmoid(1.702f * m);
#endif
}

__device__ __forceinline__ float factor(float up) {
#if KIND == 5
  return 1.0f + fmaxf(-7.0f, fminf(up, 7.0f));
#else
  return up;
#endif
}

__device__ __forceinline__ bool passes(float up) {
#if KIND == 5
  return up >= -7.0f && up <= 7.0f;
#else
  return true;
#endif
}

__device__ __forceinline__ float derivative(float x) {
#if KIND == 0
  return x > 0.0f ? 1.0f : 0.0f;
#elif KIND == 1
  return 2.0f * fmaxf(x, 0.0f);
#elif KIND == 2
  const float s = gelu_gate(x);
  return s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * x * x);
#elif KIND == 3
  return 0.5f * (1.0f + erff(x * 0.7071067811865476f)) + x * 0.3989422804014327f * exp_of(-0.5f * x * x);
#elif KIND == 4
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
#else
  const float s = sigmoid(1.702f * x);
  return x > 7.0f ? 0.0f : s * (1.0f + 1.702f * x * (1.0f - s));
#endif
}

// y = f(x).
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_forward(const stored* __restrict__ x, stored* __restrict__ y, u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float v[PACK];
  load(x + start, v);
#pragma unroll
  for (int i = 0; i < PACK; ++i) v[i] = value(v[i]);
  store(y + start, v);
}

// dx = dy f'(x).
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_backward(const stored* __restrict__ x, const stored* __restrict__ dy, stored* __restrict__ dx,
                        u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float v[PACK], g[PACK];
  load(x + start, v);
  load(dy + start, g);
#pragma unroll
  for (int i = 0; i < PACK; ++i) g[i] *= derivative(v[i]);
  store(dx + start, g);
}

// y = f(gate) g(up).
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_gated_forward(const stored* __restrict__ gate, const stored* __restrict__ up, stored* __restrict__ y,
                             u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float a[PACK], b[PACK];
  load(gate + start, a);
  load(up + start, b);
#pragma unroll
  for (int i = 0; i < PACK; ++i) a[i] = value(a[i]) * factor(b[i]);
  store(y + start, a);
}

// dgate = dy g(up) f'(gate), dup = dy f(gate) g'(up).
extern "C" __global__ void __launch_bounds__(THREADS)
    activation_gated_backward(const stored* __restrict__ gate, const stored* __restrict__ up,
                              const stored* __restrict__ dy, stored* __restrict__ dgate, stored* __restrict__ dup,
                              u64 elements) {
  const u64 start = pack_start();
  if (start >= elements) return;
  float a[PACK], b[PACK], g[PACK];
  load(gate + start, a);
  load(up + start, b);
  load(dy + start, g);
#pragma unroll
  for (int i = 0; i < PACK; ++i) {
    const float through = passes(b[i]) ? g[i] * value(a[i]) : 0.0f;
    b[i] = factor(b[i]) * (g[i] * derivative(a[i]));
    a[i] = through;
  }
  store(dgate + start, b);
  store(dup + start, a);
}
