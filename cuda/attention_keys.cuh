// What forward and backward do with a tile of keys: x = c P and its variance x Cov x^T. After
// attention_tile.cuh.

// U with x U x^T = x Cov x^T in half the products: the upper triangle, doubled off the diagonal.
__device__ __forceinline__ void load_upper(float *tile, const float *covariance) {
#pragma unroll 2 * LOADS_AT_ONCE
  for (int i = threadIdx.x; i < 16 * LANDMARK_QUADS * LANDMARK_QUADS; i += THREADS) {
    const int row = i / (4 * LANDMARK_QUADS), column = i % (4 * LANDMARK_QUADS);
    tile[row * SQUARE_STRIDE + column] =
        column < LANDMARKS && row <= column
            ? covariance[row * LANDMARKS + column] * (row < column ? 2.f : 1.f)
            : 0.f;
  }
}

// x_tile = c_tile P, as wide.
__device__ __forceinline__ void project_keys(float *x_tile, const float *c_tile,
                                             const float *p_tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKEN_STEP * LANDMARK_QUADS; i += THREADS) {
    const int token = i / LANDMARK_QUADS, column = i % LANDMARK_QUADS * 4;
    float x[4][4] = {};
    multiply_add(x, c_tile, token, p_tile + column, SQUARE_STRIDE, 4 * LANDMARK_QUADS);
#pragma unroll
    for (int r = 0; r < 4; ++r)
      *reinterpret_cast<float4 *>(x_tile + (token + r * TOKEN_STEP) * KERNEL_STRIDE + column) =
          make_float4(x[r][0], x[r][1], x[r][2], x[r][3]);
  }
  // The quads of the last octet that no landmark is in.
  if (2 * OCTETS > LANDMARK_QUADS)
    for (int token = threadIdx.x; token < TILE; token += THREADS)
      *reinterpret_cast<float4 *>(x_tile + token * KERNEL_STRIDE + 4 * LANDMARK_QUADS) =
          make_float4(0.f, 0.f, 0.f, 0.f);
}

constexpr int VARIANCE_STRIDE = LANDMARK_QUADS | 1;

// Parts of each token's variance, a quad of landmarks each, (TILE, VARIANCE_STRIDE).
__device__ __forceinline__ void variance_parts(float *parts, const float *x_tile,
                                               const float *upper_tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKEN_STEP * LANDMARK_QUADS; i += THREADS) {
    // Quad by quad, so that the threads of a warp go equally far down their columns.
    const int token = i % TOKEN_STEP, quad = i / TOKEN_STEP;
    float y[4][4] = {};
    multiply_add(y, x_tile, token, upper_tile + 4 * quad, SQUARE_STRIDE, 4 * quad + 4);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float4 x = *reinterpret_cast<const float4 *>(
          x_tile + (token + r * TOKEN_STEP) * KERNEL_STRIDE + 4 * quad);
      parts[(token + r * TOKEN_STEP) * VARIANCE_STRIDE + quad] =
          fmaf(x.x, y[r][0], x.y * y[r][1]) + fmaf(x.z, y[r][2], x.w * y[r][3]);
    }
  }
}

// Sum of a token's first `count` parts.
__device__ __forceinline__ float sum_of_parts(const float *parts, int count) {
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < count; ++i) sum += parts[i];
  return sum;
}

// 1 / sqrt(variance + eps), with a variance below 0 by rounding held there. Not fmaxf, which would
// hide what is not a number.
__device__ __forceinline__ float scale_of(float variance, float whiten_eps) {
  return rsqrtf((variance < 0.f ? 0.f : variance) + whiten_eps);
}
