// The distance of the Laplacian and the Gaussian kernel a quad of channels at a time, and its
// gradients.
//
// Macros
//   KERNEL    0 Laplacian, 1 Gaussian
//   HEAD_DIM  d, 1 to 256

#ifndef KERNEL
#define KERNEL 0
#endif
#if HEAD_DIM < 1 || HEAD_DIM > 256
#error "HEAD_DIM must be 1 to 256"
#endif

// Channels come in chunks of at most 32, evenly cut and padded to fours: 33 is 2 x 20, not 2 x 32.
constexpr int CHUNKS = (HEAD_DIM + 31) / 32;
constexpr int CHUNK_QUADS = ((HEAD_DIM + CHUNKS - 1) / CHUNKS + 3) / 4;
constexpr int CHUNK = 4 * CHUNK_QUADS;

// Pairs first: as many additions as a chain, a quarter of its rounding steps.
__device__ __forceinline__ float add_distance(float distance, float4 a, float4 b) {
  const float x = a.x - b.x, y = a.y - b.y, z = a.z - b.z, w = a.w - b.w;
#if KERNEL == 0
  return distance + ((fabsf(x) + fabsf(y)) + (fabsf(z) + fabsf(w)));
#else
  return distance + fmaf(x, x, y * y) + fmaf(z, z, w * w);
#endif
}

// With w = grad_kernel * K * (-1/lambda):
//   Laplacian  grad_q = sum_m w sign(q - k),  grad_k = -sum_n w sign(q - k),  sign(0) = 0
//   Gaussian   grad_q = sum_m w (q - k),      grad_k = -sum_n w (q - k)
//
// sign in two instructions: step(x) = saturate(x * 2^127 + 1/2) is 1, 1/2 or 0, and
// sum w sign = sum 2w step - sum w. Both sums run in the same order, so where every difference
// is zero their terms are equal and the result is exactly 0. Here weight = WEIGHT_FACTOR * w.

constexpr float STEEP = 1.7014118346046923e38f;  // 2^127 lifts every normal difference past 1

#if KERNEL == 0
constexpr float WEIGHT_FACTOR = 2.f;
#else
constexpr float WEIGHT_FACTOR = 1.f;
#endif

__device__ __forceinline__ float add_gradient(float gradient, float weight, float difference) {
#if KERNEL == 0
  return fmaf(weight, fma_saturate(difference, STEEP, 0.5f), gradient);
#else
  return fmaf(weight, difference, gradient);
#endif
}

__device__ __forceinline__ float add_weight(float weight_sum, float weight) {
#if KERNEL == 0
  return fmaf(weight, 0.5f, weight_sum);
#else
  return 0.f;
#endif
}
