// X = W^-1 of m x m matrices by the Newton-Schulz iteration X <- X + X (I - W X), float32.
// w, x (batch, m, m), dense and row-major.
//
// Macros
//   SIZE         m of newton_schulz_inverse, 1 to 128: strides are then part of the instructions
//   ROWS         outputs of a thread along the rows there, 4 to 8; chosen from m so that little is
//                padded: 7 for m = 49
//   SPD_START    1: X_0 = 2 / (||W||_inf + bound) I for symmetric positive definite matrices,
//                0: X_0 = W^T / (||W||_1 ||W||_inf) for any nonsingular ones
//   TERM         what newton_schulz_product adds: 0 nothing, 1 the identity, 2 a matrix
//   TRANSPOSE_A, TRANSPOSE_B  1 where a factor is transposed
//
// Launch: one dimension, any grid of at least one block; blocks step over matrices or tiles by the
// grid's size. README.md has the grids.
//
// Both products of a step have X once on the left and once on the right, so both factors lie
// row-major in shared memory: for four inner indices a thread reads a quad of each of its rows on
// the left (the same address for all lanes of a row) and four quads of neighbouring columns on the
// right: ROWS + 4 loads of 128 bits for 16 ROWS multiply-adds, and no matrix is kept transposed.

#ifndef SIZE
#define SIZE 49
#endif
#ifndef ROWS
#define ROWS 7
#endif
#ifndef SPD_START
#define SPD_START 1
#endif
#ifndef TERM
#define TERM 0
#endif
#ifndef TRANSPOSE_A
#define TRANSPOSE_A 0
#endif
#ifndef TRANSPOSE_B
#define TRANSPOSE_B 0
#endif
#if SIZE < 1 || SIZE > 128
#error "SIZE must be 1 to 128: with more the threads have too few registers each"
#endif
#if ROWS < 4 || ROWS > 8
#error "ROWS must be 4 to 8"
#endif
#if TERM < 0 || TERM > 2
#error "TERM must be 0 (nothing), 1 (identity) or 2 (a matrix)"
#endif

// sums[i][0..3] += sum over k < inner of left[i * left_step + k] * right[k * right_stride + 0..3]
template <int OUTPUTS>
__device__ __forceinline__ void multiply_add(float sums[OUTPUTS][4], const float *left,
                                             int left_step, const float *right, int right_stride,
                                             int inner) {
#pragma unroll 1
  for (int k = 0; k < inner; k += 4) {
    float4 a[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i)
      a[i] = *reinterpret_cast<const float4 *>(left + i * left_step + k);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const float4 b = *reinterpret_cast<const float4 *>(right + (k + step) * right_stride);
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) {
        const float factor = step == 0 ? a[i].x : step == 1 ? a[i].y : step == 2 ? a[i].z : a[i].w;
        sums[i][0] = fmaf(factor, b.x, sums[i][0]);
        sums[i][1] = fmaf(factor, b.y, sums[i][1]);
        sums[i][2] = fmaf(factor, b.z, sums[i][2]);
        sums[i][3] = fmaf(factor, b.w, sums[i][3]);
      }
    }
  }
}

// Two factors of X_0, divided once for a matrix: for SPD_START its diagonal and 1.
__device__ __forceinline__ float2 start_factors(float norm_inf, float norm_1,
                                                float spd_lower_bound) {
#if SPD_START
  return make_float2(2.f / (norm_inf + spd_lower_bound), 1.f);
#else
  return make_float2(1.f / norm_1, 1.f / norm_inf);
#endif
}

__device__ __forceinline__ float start_value(const float *w, long long row, long long column,
                                             long long stride, float2 factors) {
#if SPD_START
  return row == column ? factors.x : 0.f;
#else
  // One after the other: their product may be below the smallest float32.
  return w[column * stride + row] * factors.x * factors.y;
#endif
}

// ---- a whole matrix in one block ----------------------------------------------------------------

constexpr int THREAD_ROWS = (SIZE + ROWS - 1) / ROWS, THREAD_COLUMNS = (SIZE + 3) / 4;
constexpr int WORKERS = THREAD_ROWS * THREAD_COLUMNS;
constexpr int INVERSE_THREADS = (WORKERS + 31) / 32 * 32;
constexpr int INNER_SIZE = 4 * THREAD_COLUMNS;
constexpr int PADDED_ROWS = THREAD_ROWS * ROWS > INNER_SIZE ? THREAD_ROWS * ROWS : INNER_SIZE;
// An odd number of quads: neighbouring rows start in different banks.
constexpr int STRIDE = 4 * (THREAD_COLUMNS | 1);
constexpr int PADDED = PADDED_ROWS * STRIDE;

// W, X and I - W X stay in shared memory for all the steps, 3 * PADDED floats. Rows and columns
// of W and X past SIZE hold zeros and stay zero, so nothing inside the steps needs a bound. The 1,
// here and below, keeps the compiler from spilling registers in order to fit more blocks.
extern "C" __global__ void __launch_bounds__(INVERSE_THREADS, 1)
newton_schulz_inverse(const float *__restrict__ w, float *__restrict__ x, float spd_lower_bound,
                      long long batch, long long iters) {
  DYNAMIC_SHARED(float, shared);
  float *const w_tile = shared, *const x_tile = w_tile + PADDED, *const residual = x_tile + PADDED;
  const int row = threadIdx.x / THREAD_COLUMNS, column = threadIdx.x % THREAD_COLUMNS * 4;
  const bool works = threadIdx.x < WORKERS;

  for (long long matrix = blockIdx.x; matrix < batch; matrix += gridDim.x) {
    const float *const w_in = w + matrix * (SIZE * SIZE);
#pragma unroll 2
    for (int i = threadIdx.x; i < PADDED; i += INVERSE_THREADS) {
      const int r = i / STRIDE, c = i % STRIDE;
      w_tile[i] = r < SIZE && c < SIZE ? w_in[r * SIZE + c] : 0.f;
    }
    __syncthreads();

    // The norms, by way of the other two matrices' memory.
#pragma unroll 1
    for (int i = threadIdx.x; i < SIZE; i += INVERSE_THREADS) {
      float row_sum = 0.f, column_sum = 0.f;
#pragma unroll 1
      for (int j = 0; j < SIZE; ++j) {
        row_sum += fabsf(w_tile[i * STRIDE + j]);
        if (!SPD_START) column_sum += fabsf(w_tile[j * STRIDE + i]);
      }
      residual[i] = row_sum;
      if (!SPD_START) x_tile[i] = column_sum;
    }
    __syncthreads();
    float norm_inf = 0.f, norm_1 = 0.f;
#pragma unroll 1
    for (int i = 0; i < SIZE; ++i) {
      norm_inf = fmaxf(norm_inf, residual[i]);
      if (!SPD_START) norm_1 = fmaxf(norm_1, x_tile[i]);
    }
    const float2 factors = start_factors(norm_inf, norm_1, spd_lower_bound);
    __syncthreads();  // the norms have been read
#pragma unroll 1
    for (int i = threadIdx.x; i < PADDED; i += INVERSE_THREADS) {
      const int r = i / STRIDE, c = i % STRIDE;
      x_tile[i] = r < SIZE && c < SIZE ? start_value(w_tile, r, c, STRIDE, factors) : 0.f;
      residual[i] = 0.f;
    }
    __syncthreads();

#pragma unroll 1
    for (long long iteration = 0; iteration < iters; ++iteration) {
      if (works) {
        float sums[ROWS][4] = {};
        multiply_add<ROWS>(sums, w_tile + row * STRIDE, THREAD_ROWS * STRIDE, x_tile + column,
                           STRIDE, INNER_SIZE);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const int r = row + i * THREAD_ROWS, diagonal = r - column;
          *reinterpret_cast<float4 *>(residual + r * STRIDE + column) = make_float4(
              (diagonal == 0 ? 1.f : 0.f) - sums[i][0], (diagonal == 1 ? 1.f : 0.f) - sums[i][1],
              (diagonal == 2 ? 1.f : 0.f) - sums[i][2], (diagonal == 3 ? 1.f : 0.f) - sums[i][3]);
        }
      }
      __syncthreads();
      float sums[ROWS][4] = {};
      if (works)
        multiply_add<ROWS>(sums, x_tile + row * STRIDE, THREAD_ROWS * STRIDE, residual + column,
                           STRIDE, INNER_SIZE);
      __syncthreads();  // X has been read
      if (works) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          float4 *const out = reinterpret_cast<float4 *>(
              x_tile + (row + i * THREAD_ROWS) * STRIDE + column);
          const float4 old = *out;
          *out = make_float4(old.x + sums[i][0], old.y + sums[i][1], old.z + sums[i][2],
                             old.w + sums[i][3]);
        }
      }
      __syncthreads();
    }

    float *const x_out = x + matrix * (SIZE * SIZE);
#pragma unroll 1
    for (int i = threadIdx.x; i < SIZE * SIZE; i += INVERSE_THREADS)
      x_out[i] = x_tile[i / SIZE * STRIDE + i % SIZE];
  }
}

// ---- larger matrices: the start, and products tile by tile --------------------------------------

constexpr int START_THREADS = 256;

__device__ __forceinline__ float block_max(float value, float *shared) {
  __syncthreads();  // the previous use has been read
  shared[threadIdx.x] = value;
  __syncthreads();
  float result = 0.f;
  for (int i = 0; i < START_THREADS; ++i) result = fmaxf(result, shared[i]);
  return result;
}

// X_0 of each matrix, by one block.
extern "C" __global__ void __launch_bounds__(START_THREADS, 1)
newton_schulz_start(const float *__restrict__ w, float *__restrict__ x, float spd_lower_bound,
                    long long batch, long long m) {
  __shared__ float maxima[START_THREADS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  for (long long matrix = blockIdx.x; matrix < batch; matrix += gridDim.x) {
    const float *const w_in = w + matrix * m * m;
    float largest = 0.f;
    for (long long r = warp; r < m; r += START_THREADS / 32) {
      float sum = 0.f;
      for (long long c = lane; c < m; c += 32) sum += fabsf(w_in[r * m + c]);
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
      largest = fmaxf(largest, sum);
    }
    const float norm_inf = block_max(largest, maxima);
    float norm_1 = 0.f;
#if !SPD_START
    largest = 0.f;
    for (long long c = threadIdx.x; c < m; c += START_THREADS) {
      float sum = 0.f;
      for (long long r = 0; r < m; ++r) sum += fabsf(w_in[r * m + c]);
      largest = fmaxf(largest, sum);
    }
    norm_1 = block_max(largest, maxima);
#endif
    const float2 factors = start_factors(norm_inf, norm_1, spd_lower_bound);
    float *const x_out = x + matrix * m * m;
    for (long long r = warp; r < m; r += START_THREADS / 32)
      for (long long c = lane; c < m; c += 32)
        x_out[r * m + c] = start_value(w_in, r, c, m, factors);
  }
}

constexpr int TILE = 64, INNER = 32;
constexpr int PRODUCT_ROWS = 8, ROW_THREADS = TILE / PRODUCT_ROWS, COLUMN_THREADS = TILE / 4;
constexpr int PRODUCT_THREADS = ROW_THREADS * COLUMN_THREADS;
constexpr int A_STRIDE = INNER + 4, B_STRIDE = TILE + 4;

// Four neighbours of a line of which `left` elements are there; zeros for the rest.
__device__ __forceinline__ float4 load_quad(const float *line, long long left, bool vectors) {
  if (vectors && left >= 4) return *reinterpret_cast<const float4 *>(line);
  float4 quad = make_float4(0.f, 0.f, 0.f, 0.f);
  if (left > 0) quad.x = line[0];
  if (left > 1) quad.y = line[1];
  if (left > 2) quad.z = line[2];
  if (left > 3) quad.w = line[3];
  return quad;
}

// tile[r][c] = element (first_row + r, first_column + c) of the factor, zero past its edge. Threads
// run along the factor's lines in memory, whichever way it is used.
template <bool TRANSPOSED, int TILE_ROWS, int TILE_COLUMNS, int STRIDE>
__device__ __forceinline__ void load_factor(float *tile, const float *factor, long long m,
                                            long long first_row, long long first_column,
                                            bool vectors) {
  constexpr int QUADS = (TRANSPOSED ? TILE_ROWS : TILE_COLUMNS) / 4;
#pragma unroll 2
  for (int i = threadIdx.x; i < TILE_ROWS * TILE_COLUMNS / 4; i += PRODUCT_THREADS) {
    const int line = i / QUADS, along = i % QUADS * 4;
    if (TRANSPOSED) {
      const long long left = first_column + line < m ? m - first_row - along : 0;
      const float4 quad =
          load_quad(factor + (first_column + line) * m + first_row + along, left, vectors);
      tile[(along + 0) * STRIDE + line] = quad.x;
      tile[(along + 1) * STRIDE + line] = quad.y;
      tile[(along + 2) * STRIDE + line] = quad.z;
      tile[(along + 3) * STRIDE + line] = quad.w;
    } else {
      const long long left = first_row + line < m ? m - first_column - along : 0;
      *reinterpret_cast<float4 *>(tile + line * STRIDE + along) =
          load_quad(factor + (first_row + line) * m + first_column + along, left, vectors);
    }
  }
}

// D = scale A B + the term; A, B, C, D (batch, m, m). D is none of the others.
extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS)
newton_schulz_product(const float *__restrict__ a, const float *__restrict__ b,
                      const float *__restrict__ c, float *__restrict__ d, float scale,
                      long long batch, long long m) {
  __shared__ __align__(16) float a_tile[TILE * A_STRIDE];
  __shared__ __align__(16) float b_tile[INNER * B_STRIDE];
  const long long tiles = ceil_div(m, TILE);
  const bool vectors = m % 4 == 0 && (unsigned long long)a % 16 == 0 &&
                       (unsigned long long)b % 16 == 0;
  const int row = threadIdx.x / COLUMN_THREADS, column = threadIdx.x % COLUMN_THREADS * 4;

  for (long long tile = blockIdx.x; tile < batch * tiles * tiles; tile += gridDim.x) {
    const long long first_column = tile % tiles * TILE;
    const long long first_row = tile / tiles % tiles * TILE;
    const long long offset = tile / tiles / tiles * m * m;

    float sums[PRODUCT_ROWS][4] = {};
#pragma unroll 1
    for (long long inner = 0; inner < m; inner += INNER) {
      __syncthreads();  // the previous tiles have been read
      load_factor<TRANSPOSE_A, TILE, INNER, A_STRIDE>(a_tile, a + offset, m, first_row, inner,
                                                      vectors);
      load_factor<TRANSPOSE_B, INNER, TILE, B_STRIDE>(b_tile, b + offset, m, inner, first_column,
                                                      vectors);
      __syncthreads();
      multiply_add<PRODUCT_ROWS>(sums, a_tile + row * A_STRIDE, ROW_THREADS * A_STRIDE,
                                 b_tile + column, B_STRIDE, INNER);
    }

#pragma unroll
    for (int i = 0; i < PRODUCT_ROWS; ++i) {
      const long long r = first_row + row + i * ROW_THREADS;
      if (r >= m) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const long long s = first_column + column + j;
        if (s >= m) continue;
        const long long at = offset + r * m + s;
        float value = scale * sums[i][j];
#if TERM == 1
        if (r == s) value += 1.f;
#elif TERM == 2
        value += c[at];
#endif
        d[at] = value;
      }
    }
  }
}
