// Gradients of the whitened Nystrom attention in passes over tiles of tokens, which compute the
// kernel values again: nothing of size n x m is stored. Letters as in nystrom_attention.cu, with
// g = grad_out, x_j = c_j P and r_j = 1 / sqrt(x_j Cov x_j^T + whiten_eps):
//
//   E = sum_i (c_i - mean)^T g_i / n                      of the context
//   grad_v_j = mean of g + r_j x_j E
//   a_j = -r_j^3 (x_j E v_j^T) / 2                        of the variance; 0 where it is held at 0
//   S = sum_j a_j x_j^T x_j                               of Cov
//   grad_c_j = 2 a_j c_j (P Cov P^T) + r_j v_j (P E)^T
//   grad_c_i = (2 (c_i - mean) S + (g_i - mean of g) context^T) / n
//   grad_w = -2 S (P Cov)^T - context (P E)^T
//
// The last is -P^T grad_P P^T with the sums over tokens that S and the context are: P is on one
// side of a float32 sum, not on both. All three gradients of kernel values have one form, a tile
// times a square plus a tile times a thin matrix, and go on to the tokens and the landmarks.
//
// Macros and launches as in nystrom_attention.cu. README.md has the grids.

constexpr int LOADS_AT_ONCE = 1;
#include "attention_tile.cuh"
#include "attention_keys.cuh"
#include "attention_sums.cuh"

constexpr int SQUARE_ENTRIES = LANDMARKS * LANDMARKS;
constexpr int CONTEXT_ENTRIES = LANDMARKS * VALUE_DIM, MARK_ENTRIES = LANDMARKS * HEAD_DIM;

// ---- gradient of the context -------------------------------------------------------------------

// n E and the sum of grad_out over each chunk, (groups, n_chunks, m + 1, d_v);
// nystrom_attention_merge_keys merges them. Dynamic shared memory in floats: PADDED_LANDMARKS +
// LANDMARK_TILE and the larger of the three other tiles and PIECE_SCRATCH.
extern "C" __global__ void __launch_bounds__(THREADS, PIECES_A_THREAD > 1 ? 1 : 2)
nystrom_attention_grad_context(const Scalar *__restrict__ q, const Scalar *__restrict__ grad_out,
                               const Scalar *__restrict__ landmarks,
                               const float *__restrict__ mean, float *__restrict__ chunk_context,
                               float exponent_scale, long long groups, long long heads,
                               long long n, long long rows_per_chunk, long long q_image,
                               long long q_head, long long q_token, long long grad_out_image,
                               long long grad_out_head, long long grad_out_token,
                               long long landmarks_image, long long landmarks_head,
                               long long landmarks_token) {
  DYNAMIC_SHARED(float, shared);
  float *const shift = shared, *const landmark_tile = shift + PADDED_LANDMARKS;
  float *const c_tile = landmark_tile + LANDMARK_TILE, *const v_tile = c_tile + KERNEL_TILE;
  float *const token_tile = v_tile + VALUE_TILE;
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, first = item % n_chunks * rows_per_chunk;
    const long long stop = min(n, first + rows_per_chunk);
    const Tokens queries = tokens_of(q, group, heads, q_image, q_head, q_token);
    const Tokens grads = tokens_of(grad_out, group, heads, grad_out_image, grad_out_head,
                                   grad_out_token);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    for (int i = threadIdx.x; i < LANDMARKS; i += THREADS) shift[i] = mean[group * LANDMARKS + i];
    float context[32 * PIECES_A_THREAD] = {};
    float4 grad_sum = make_float4(0.f, 0.f, 0.f, 0.f);

#pragma unroll 1
    for (long long at = first; at < stop; at += TILE) {
      const int count = at_most(stop - at, TILE);
      kernel_tile(c_tile, token_tile, landmark_tile, queries, at, count, marks, at == first,
                  shift, exponent_scale);
      load_values(v_tile, nullptr, grads, at, count, grad_sum);
      __syncthreads();
      add_pieces(context, c_tile, v_tile, count);
    }
    store_pieces(chunk_context + item * (CONTEXT_ENTRIES + VALUE_DIM), context, grad_sum, c_tile);
  }
}

// ---- factors -----------------------------------------------------------------------------------

// A tile times a matrix in shared memory: `count` rows to `to` (rows, COLUMNS), and all to `kept`,
// another tile or null.
template <int COLUMNS>
__device__ __forceinline__ void store_product(float *to, float *kept, const float *tile,
                                              const float *matrix, int stride, int count) {
  constexpr int QUADS = (COLUMNS + 3) / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKEN_STEP * QUADS; i += THREADS) {
    const int first = i / QUADS, column = i % QUADS * 4;
    float sums[4][4] = {};
    multiply_add(sums, tile, first, matrix + column, stride, 4 * LANDMARK_QUADS);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = first + r * TOKEN_STEP;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (kept) kept[row * KERNEL_STRIDE + column + c] = sums[r][c];
        if (row < count && column + c < COLUMNS) to[row * COLUMNS + column + c] = sums[r][c];
      }
    }
  }
}

constexpr int CONTEXT_TILE = 4 * LANDMARK_QUADS * VALUE_STRIDE;

// P Cov and P Cov P^T (groups, m, m), P E (groups, m, d_v) from grad_context = n E. Dynamic shared
// memory in floats: 2 * KERNEL_TILE and the larger of SQUARE and CONTEXT_TILE.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
nystrom_attention_grad_factors(const float *__restrict__ p, const float *__restrict__ covariance,
                               const float *__restrict__ grad_context,
                               float *__restrict__ p_covariance, float *__restrict__ key_square,
                               float *__restrict__ p_grad_context, long long groups,
                               long long n) {
  DYNAMIC_SHARED(float, shared);
  float *const p_rows = shared, *const product_rows = p_rows + KERNEL_TILE;
  float *const matrix = product_rows + KERNEL_TILE;
  constexpr int TILES = (LANDMARKS + TILE - 1) / TILE;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES, square = group * SQUARE_ENTRIES;
    const int first = (int)(item % TILES) * TILE, count = min(LANDMARKS - first, TILE);
    const long long rows = square + first * LANDMARKS;
    __syncthreads();  // the last product's factors have been read
    load_matrix<TILE, LANDMARK_QUADS, KERNEL_STRIDE>(p_rows, p + rows, count, LANDMARKS, 1.f);
    load_matrix<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        matrix, covariance + square, LANDMARKS, LANDMARKS, 1.f);
    __syncthreads();
    store_product<LANDMARKS>(p_covariance + rows, product_rows, p_rows, matrix, SQUARE_STRIDE,
                             count);
    __syncthreads();
    load_transposed<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        matrix, p + square, LANDMARKS, LANDMARKS, 1.f);
    __syncthreads();
    store_product<LANDMARKS>(key_square + rows, nullptr, product_rows, matrix, SQUARE_STRIDE,
                             count);
    __syncthreads();
    load_matrix<4 * LANDMARK_QUADS, VALUE_QUADS, VALUE_STRIDE>(
        matrix, grad_context + group * CONTEXT_ENTRIES, LANDMARKS, VALUE_DIM, 1.f / n);
    __syncthreads();
    store_product<VALUE_DIM>(p_grad_context + group * CONTEXT_ENTRIES + first * VALUE_DIM,
                             nullptr, p_rows, matrix, VALUE_STRIDE, count);
  }
}

__device__ __forceinline__ float4 times(float4 x, float factor) {
  return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

// Four entries of a row of a dense matrix, zeros past the row's end.
template <int COLUMNS>
__device__ __forceinline__ float4 load_quad(const float *row, int column) {
  if (COLUMNS % 4 == 0) return *reinterpret_cast<const float4 *>(row + column);
  return make_float4(column + 0 < COLUMNS ? row[column + 0] : 0.f,
                     column + 1 < COLUMNS ? row[column + 1] : 0.f,
                     column + 2 < COLUMNS ? row[column + 2] : 0.f,
                     column + 3 < COLUMNS ? row[column + 3] : 0.f);
}

// ---- gradients of the values and the covariance ------------------------------------------------

// Keys and then x; c, then E and parts of a token's sums; scratch of the slices at last.
constexpr int X_FLOATS = larger(TOKEN_TILE, KERNEL_TILE);
constexpr int VALUE_PARTS = VALUE_QUADS | 1;
constexpr int C_FLOATS =
    larger(KERNEL_TILE, CONTEXT_TILE + TILE * larger(VARIANCE_STRIDE, VALUE_PARTS));

// E from n E, for every tile of tokens.
__device__ __forceinline__ void load_context(float *tile, const float *grad_context,
                                             float factor) {
#pragma unroll 1
  for (int i = threadIdx.x; i < 4 * LANDMARK_QUADS * VALUE_QUADS; i += THREADS) {
    const int row = i / VALUE_QUADS, channel = i % VALUE_QUADS * 4;
    *reinterpret_cast<float4 *>(tile + row * VALUE_STRIDE + channel) =
        row < LANDMARKS
            ? times(load_quad<VALUE_DIM>(grad_context + row * VALUE_DIM, channel), factor)
            : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

// grad_v; 2 a_j and r_j as token_factors (groups, n, 2); S of each chunk, chunk_square (groups,
// n_chunks, 64 * PAIRS) in the order of the forward's scatter. Dynamic shared memory in floats:
// 2 * TILE + 4 * VALUE_QUADS + 2 * SQUARE + LANDMARK_TILE and the larger of X_FLOATS + C_FLOATS
// and 64 * PAIRS * (PAIR_SLICES / 2).
extern "C" __global__ void __launch_bounds__(THREADS, M_TILES * M_OUTPUTS > 7 ? 1 : 2)
nystrom_attention_grad_values(const Scalar *__restrict__ k, const Scalar *__restrict__ v,
                              const Scalar *__restrict__ landmarks, const float *__restrict__ p,
                              const float *__restrict__ covariance,
                              const float *__restrict__ grad_context,
                              const float *__restrict__ mean_grad, Scalar *__restrict__ grad_v,
                              float2 *__restrict__ token_factors,
                              float *__restrict__ chunk_square, float exponent_scale,
                              float whiten_eps, long long groups, long long heads, long long n,
                              long long rows_per_chunk, long long k_image, long long k_head,
                              long long k_token, long long v_image, long long v_head,
                              long long v_token, long long landmarks_image,
                              long long landmarks_head, long long landmarks_token,
                              long long grad_v_image, long long grad_v_head,
                              long long grad_v_token) {
  DYNAMIC_SHARED(float, shared);
  float *const scale = shared, *const weight = scale + TILE, *const start = weight + TILE;
  float *const p_tile = start + 4 * VALUE_QUADS, *const upper_tile = p_tile + SQUARE;
  float *const landmark_tile = upper_tile + SQUARE;
  float *const scratch = landmark_tile + LANDMARK_TILE;
  float *const token_tile = scratch, *const x_tile = scratch;
  float *const c_tile = scratch + X_FLOATS, *const context_tile = c_tile;
  float *const parts = context_tile + CONTEXT_TILE;
  const int slice = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
  const int2 octets = octets_of(pair);
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, first = item % n_chunks * rows_per_chunk;
    const long long stop = min(n, first + rows_per_chunk);
    const Tokens keys = tokens_of(k, group, heads, k_image, k_head, k_token);
    const Tokens values = tokens_of(v, group, heads, v_image, v_head, v_token);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    const Written grads = written_to(grad_v, group, heads, grad_v_image, grad_v_head,
                                     grad_v_token);
    load_matrix<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        p_tile, p + group * SQUARE_ENTRIES, LANDMARKS, LANDMARKS, 1.f);
    load_upper(upper_tile, covariance + group * SQUARE_ENTRIES);
    for (int i = threadIdx.x; i < 4 * VALUE_QUADS; i += THREADS)
      start[i] = i < VALUE_DIM ? mean_grad[group * VALUE_DIM + i] : 0.f;
    float square[64] = {};

#pragma unroll 1
    for (long long at = first; at < stop; at += TILE) {
      const int count = at_most(stop - at, TILE);
      kernel_tile(c_tile, token_tile, landmark_tile, keys, at, count, marks, at == first, nullptr,
                  exponent_scale);
      __syncthreads();
      project_keys(x_tile, c_tile, p_tile);
      __syncthreads();
      load_context(context_tile, grad_context + group * CONTEXT_ENTRIES, 1.f / n);
      variance_parts(parts, x_tile, upper_tile);
      __syncthreads();
      for (int token = threadIdx.x; token < TILE; token += THREADS) {
        const float variance = sum_of_parts(parts + token * VARIANCE_STRIDE, LANDMARK_QUADS);
        const float r = scale_of(variance, whiten_eps);
        scale[token] = r;
        weight[token] = variance < 0.f ? 0.f : -0.5f * r * r * r;
      }
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < TOKEN_STEP * VALUE_QUADS; i += THREADS) {
        const int token = i / VALUE_QUADS, quad = i % VALUE_QUADS;
        float s[4][4] = {};
        multiply_add(s, x_tile, token, context_tile + 4 * quad, VALUE_STRIDE,
                     4 * LANDMARK_QUADS);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = token + i * TOKEN_STEP;
          const float4 value = load_channels<VALUE_DIM>(values, at + row, 4 * quad, row < count);
          parts[row * VALUE_PARTS + quad] = fmaf(s[i][0], value.x, s[i][1] * value.y) +
                                            fmaf(s[i][2], value.z, s[i][3] * value.w);
          const float r = scale[row], *const from = start + 4 * quad;
          if (row < count)
            store_channels<VALUE_DIM>(
                grads, at + row, 4 * quad,
                make_float4(fmaf(r, s[i][0], from[0]), fmaf(r, s[i][1], from[1]),
                            fmaf(r, s[i][2], from[2]), fmaf(r, s[i][3], from[3])));
        }
      }
      __syncthreads();
      for (int token = threadIdx.x; token < count; token += THREADS) {
        const float a = weight[token] * sum_of_parts(parts + token * VALUE_PARTS, VALUE_QUADS);
        weight[token] = a;
        token_factors[group * n + at + token] = make_float2(2.f * a, scale[token]);
      }
      __syncthreads();
      if (slice < PAIR_SLICES) {
#pragma unroll 2
        for (int token = slice; token < count; token += PAIR_SLICES)
          add_square(square, x_tile + token * KERNEL_STRIDE, octets, weight[token]);
      }
    }

    add_slices<64, PAIRS, PAIR_SLICES>(square, scratch);
    if (slice == 0) {
      float *const to = chunk_square + item * (64 * PAIRS) + pair;
#pragma unroll
      for (int e = 0; e < 64; ++e) to[e * PAIRS] = square[e];
    }
  }
}

// S (groups, m, m) of all chunks. A block has 32 entries of chunk_square.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
nystrom_attention_merge_grad_covariance(const float *__restrict__ chunk_square,
                                        float *__restrict__ grad_covariance, long long groups,
                                        long long n, long long rows_per_chunk) {
  __shared__ float sums[MERGE_ROWS][MERGE_COLUMNS];
  const long long n_chunks = ceil_div(n, rows_per_chunk);
  constexpr int ENTRIES = 64 * PAIRS, TILES = ENTRIES / MERGE_COLUMNS;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES;
    const int entry = (int)(item % TILES) * MERGE_COLUMNS + merge_column(), e = entry / PAIRS;
    const int2 octets = octets_of(entry % PAIRS);
    const int a = 8 * octets.x + e / 8, b = 8 * octets.y + e % 8;
    const bool present = a < LANDMARKS && b <= a;
    const float sum = sum_of_chunks(sums, chunk_square + group * n_chunks * ENTRIES + entry,
                                    n_chunks, ENTRIES, present);
    float *const to = grad_covariance + group * SQUARE_ENTRIES;
    if (present && merge_row() == 0) to[a * LANDMARKS + b] = to[b * LANDMARKS + a] = sum;
  }
}

// ---- gradients of the tokens and the landmarks -------------------------------------------------
// grad_c = x S' + u T' for a tile, where x, u, S' (m, m) and T' (d_v, m) are a pass's own. With it
// the weights of the distances, and with those, channel chunk by channel chunk, the gradients: a
// thread has four tokens x four channels for all landmarks, and four landmarks x four channels for
// a slice of the tokens of each tile.

constexpr int MARK_ROWS = 4 * LANDMARK_QUADS;
constexpr int MARK_TILE = larger(M_TILE, MARK_ROWS) * CHANNEL_STRIDE;
constexpr int THIN = 4 * VALUE_QUADS * SQUARE_STRIDE;
constexpr int GRADIENT_THREADS = LANDMARK_QUADS * CHUNK_QUADS;
constexpr int GRADIENT_SLICES = slices_of(GRADIENT_THREADS);
static_assert(GRADIENT_THREADS <= THREADS && TOKEN_STEP * CHUNK_QUADS <= THREADS,
              "a thread has at most one square of a channel chunk");
static_assert(16 * GRADIENT_THREADS * (GRADIENT_SLICES / 2) <= KERNEL_TILE + VALUE_TILE + X_FLOATS,
              "the slices' sums take the place of the tiles");

// In dynamic shared memory, beside each other: GRADIENT_FLOATS.
struct GradientTiles {
  float *square, *thin, *landmarks, *c, *v, *x;
};
constexpr int GRADIENT_FLOATS =
    SQUARE + THIN + MARK_TILE + KERNEL_TILE + VALUE_TILE + X_FLOATS;

__device__ __forceinline__ GradientTiles gradient_tiles(float *shared) {
  GradientTiles tiles;
  tiles.square = shared;
  tiles.thin = tiles.square + SQUARE;
  tiles.landmarks = tiles.thin + THIN;
  tiles.c = tiles.landmarks + MARK_TILE;
  tiles.v = tiles.c + KERNEL_TILE;
  tiles.x = tiles.v + VALUE_TILE;
  return tiles;
}

// c = factor * grad_c * c.
__device__ __forceinline__ void weigh(const GradientTiles &tiles, float factor) {
#pragma unroll 1
  for (int i = threadIdx.x; i < TOKEN_STEP * LANDMARK_QUADS; i += THREADS) {
    const int token = i / LANDMARK_QUADS, column = i % LANDMARK_QUADS * 4;
    float grad_c[4][4] = {};
    multiply_add(grad_c, tiles.x, token, tiles.square + column, SQUARE_STRIDE,
                 4 * LANDMARK_QUADS);
    multiply_add<VALUE_STRIDE>(grad_c, tiles.v, token, tiles.thin + column, SQUARE_STRIDE,
                               4 * VALUE_QUADS);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float4 *const c = reinterpret_cast<float4 *>(
          tiles.c + (token + r * TOKEN_STEP) * KERNEL_STRIDE + column);
      *c = make_float4(grad_c[r][0] * c->x * factor, grad_c[r][1] * c->y * factor,
                       grad_c[r][2] * c->z * factor, grad_c[r][3] * c->w * factor);
    }
  }
}

// Adds weight * step, or weight * difference, of `to - from` to four channels.
__device__ __forceinline__ void add_gradients(float gradient[4], float weight, float4 to,
                                              float4 from) {
  gradient[0] = add_gradient(gradient[0], weight, to.x - from.x);
  gradient[1] = add_gradient(gradient[1], weight, to.y - from.y);
  gradient[2] = add_gradient(gradient[2], weight, to.z - from.z);
  gradient[3] = add_gradient(gradient[3], weight, to.w - from.w);
}

// Gradients of a tile's tokens for one chunk of channels, to the pass.
template <class Pass>
__device__ __forceinline__ void token_gradients(const Pass &pass, const float *weights,
                                                const float *token_tile,
                                                const float *landmark_tile, long long first,
                                                int count, int first_channel) {
  if (threadIdx.x >= TOKEN_STEP * CHUNK_QUADS) return;
  const int token = threadIdx.x / CHUNK_QUADS, channel = threadIdx.x % CHUNK_QUADS * 4;
  float4 a[4];
  float gradient[4][4] = {}, weight_sum[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = *reinterpret_cast<const float4 *>(
        token_tile + (token + i * TOKEN_STEP) * CHANNEL_STRIDE + channel);
#pragma unroll 1
  for (int landmark = 0; landmark < MARK_ROWS; landmark += 4) {
    float4 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = *reinterpret_cast<const float4 *>(
          weights + (token + i * TOKEN_STEP) * KERNEL_STRIDE + landmark);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 b = *reinterpret_cast<const float4 *>(
          landmark_tile + (landmark + j) * CHANNEL_STRIDE + channel);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = j == 0 ? w[i].x : j == 1 ? w[i].y : j == 2 ? w[i].z : w[i].w;
        add_gradients(gradient[i], weight, a[i], b);
        weight_sum[i] = add_weight(weight_sum[i], weight);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (token + i * TOKEN_STEP < count)
      pass.store(first + token + i * TOKEN_STEP, first_channel + channel,
                 make_float4(gradient[i][0] - weight_sum[i], gradient[i][1] - weight_sum[i],
                             gradient[i][2] - weight_sum[i], gradient[i][3] - weight_sum[i]));
}

// Adds those of a thread's landmarks; weight_sum may be null where it has been summed before.
__device__ __forceinline__ void landmark_gradients(float gradient[16], float *weight_sum,
                                                   const float *weights, const float *token_tile,
                                                   const float *landmark_tile, int count) {
  const int slice = threadIdx.x / GRADIENT_THREADS, own = threadIdx.x % GRADIENT_THREADS;
  if (slice >= GRADIENT_SLICES) return;
  const int landmark = own / CHUNK_QUADS * 4, channel = own % CHUNK_QUADS * 4;
  float4 b[4];
#pragma unroll
  for (int j = 0; j < 4; ++j)
    b[j] = *reinterpret_cast<const float4 *>(
        landmark_tile + (landmark + j) * CHANNEL_STRIDE + channel);
#pragma unroll 2
  for (int token = slice; token < count; token += GRADIENT_SLICES) {
    const float4 w = *reinterpret_cast<const float4 *>(weights + token * KERNEL_STRIDE + landmark);
    const float4 a = *reinterpret_cast<const float4 *>(
        token_tile + token * CHANNEL_STRIDE + channel);
    const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      add_gradients(gradient + 4 * j, weight[j], b[j], a);
      if (weight_sum) weight_sum[j] = add_weight(weight_sum[j], weight[j]);
    }
  }
}

// Gradients of the tokens from `first` on, and what the landmarks get from them, to `partial`
// (m, d). square and thin are loaded. gradient_scale: -1 / lambda.
template <class Pass>
__device__ __forceinline__ void pass_over_tokens(const GradientTiles &tiles, const Pass &pass,
                                                 const Tokens &tokens, const Tokens &marks,
                                                 long long first, long long stop,
                                                 float exponent_scale, float gradient_scale,
                                                 float *partial) {
  float gradient[CHUNKS][16] = {}, weight_sum[4] = {};
#pragma unroll 1
  for (long long at = first; at < stop; at += TILE) {
    const int count = at_most(stop - at, TILE);
    kernel_tile(tiles.c, tiles.x, tiles.landmarks, tokens, at, count, marks, at == first, nullptr,
                exponent_scale);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * LANDMARK_QUADS; i += THREADS) {
      const int token = i / LANDMARK_QUADS, column = i % LANDMARK_QUADS * 4;
      const int entry = token * KERNEL_STRIDE + column;
      *reinterpret_cast<float4 *>(tiles.x + entry) =
          pass.left(at + token, column, *reinterpret_cast<const float4 *>(tiles.c + entry),
                    token < count);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE * VALUE_QUADS; i += THREADS) {
      const int token = i / VALUE_QUADS, channel = i % VALUE_QUADS * 4;
      *reinterpret_cast<float4 *>(tiles.v + token * VALUE_STRIDE + channel) =
          pass.values(at + token, channel, token < count);
    }
    __syncthreads();
    weigh(tiles, WEIGHT_FACTOR * gradient_scale);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      __syncthreads();
      load_rows<TILE>(tiles.x, tokens, at, count, chunk * CHUNK);
      if (CHUNKS * M_TILES > 1 || at == first)
        load_rows<MARK_ROWS>(tiles.landmarks, marks, 0, LANDMARKS, chunk * CHUNK);
      __syncthreads();
      token_gradients(pass, tiles.c, tiles.x, tiles.landmarks, at, count, chunk * CHUNK);
      landmark_gradients(gradient[chunk], chunk == 0 ? weight_sum : nullptr, tiles.c, tiles.x,
                         tiles.landmarks, count);
    }
  }

  const int landmark = threadIdx.x / CHUNK_QUADS * 4, channel = threadIdx.x % CHUNK_QUADS * 4;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
    for (int e = 0; e < 16; ++e) gradient[chunk][e] -= weight_sum[e / 4];
    add_slices<16, GRADIENT_THREADS, GRADIENT_SLICES>(gradient[chunk], tiles.c);
    if (threadIdx.x < GRADIENT_THREADS)
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int own = chunk * CHUNK + channel + e % 4;
        if (landmark + e / 4 < LANDMARKS && own < HEAD_DIM)
          partial[(landmark + e / 4) * HEAD_DIM + own] = gradient[chunk][e];
      }
  }
}

__device__ __forceinline__ float4 minus(float4 x, const float *y) {
  return make_float4(x.x - y[0], x.y - y[1], x.z - y[2], x.w - y[3]);
}

// Partial sums of the landmarks' gradient, (groups, 2 * n_chunks + 2, m, d): keys, queries, and
// the two sides of w.
__device__ __forceinline__ long long partial_at(long long group, long long n_chunks,
                                                long long index) {
  return (group * (2 * n_chunks + 2) + index) * MARK_ENTRIES;
}

// x = 2 a c, u = r v.
struct KeyPass {
  const float2 *factors;
  Tokens v;
  Written grad;

  __device__ __forceinline__ float4 left(long long row, int, float4 c, bool present) const {
    return times(c, present ? factors[row].x : 0.f);
  }
  __device__ __forceinline__ float4 values(long long row, int channel, bool present) const {
    return times(load_channels<VALUE_DIM>(v, row, channel, present),
                 present ? factors[row].y : 0.f);
  }
  __device__ __forceinline__ void store(long long row, int channel, float4 value) const {
    store_channels<HEAD_DIM>(grad, row, channel, value);
  }
};

// grad_k and the keys' partial sums. Dynamic shared memory in floats: GRADIENT_FLOATS.
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS > 1 ? 1 : 2)
nystrom_attention_grad_keys(const Scalar *__restrict__ k, const Scalar *__restrict__ v,
                            const Scalar *__restrict__ landmarks,
                            const float2 *__restrict__ token_factors,
                            const float *__restrict__ key_square,
                            const float *__restrict__ p_grad_context, Scalar *__restrict__ grad_k,
                            float *__restrict__ partials, float exponent_scale,
                            float gradient_scale, long long groups, long long heads, long long n,
                            long long rows_per_chunk, long long k_image, long long k_head,
                            long long k_token, long long v_image, long long v_head,
                            long long v_token, long long landmarks_image,
                            long long landmarks_head, long long landmarks_token,
                            long long grad_k_image, long long grad_k_head,
                            long long grad_k_token) {
  DYNAMIC_SHARED(float, shared);
  const GradientTiles tiles = gradient_tiles(shared);
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, chunk = item % n_chunks;
    const long long first = chunk * rows_per_chunk;
    // As P (Cov P^T): where keys are alike, P's columns and rows round differently.
    load_transposed<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.square, key_square + group * SQUARE_ENTRIES, LANDMARKS, LANDMARKS, 1.f);
    load_transposed<4 * VALUE_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.thin, p_grad_context + group * CONTEXT_ENTRIES, LANDMARKS, VALUE_DIM, 1.f);
    const KeyPass pass = {
        token_factors + group * n, tokens_of(v, group, heads, v_image, v_head, v_token),
        written_to(grad_k, group, heads, grad_k_image, grad_k_head, grad_k_token)};
    pass_over_tokens(tiles, pass, tokens_of(k, group, heads, k_image, k_head, k_token),
                     tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                               landmarks_token),
                     first, min(n, first + rows_per_chunk), exponent_scale, gradient_scale,
                     partials + partial_at(group, n_chunks, chunk));
  }
}

// x = c - mean, u = g - mean of g.
struct QueryPass {
  const float *mean, *mean_grad;
  Tokens grad_out;
  Written grad;

  __device__ __forceinline__ float4 left(long long, int landmark, float4 c, bool) const {
    return minus(c, mean + landmark);
  }
  __device__ __forceinline__ float4 values(long long row, int channel, bool present) const {
    return minus(load_channels<VALUE_DIM>(grad_out, row, channel, present), mean_grad + channel);
  }
  __device__ __forceinline__ void store(long long row, int channel, float4 value) const {
    store_channels<HEAD_DIM>(grad, row, channel, value);
  }
};

// grad_q and the queries' partial sums. Dynamic shared memory in floats: GRADIENT_FLOATS +
// 4 * LANDMARK_QUADS + 4 * VALUE_QUADS.
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS > 1 ? 1 : 2)
nystrom_attention_grad_queries(const Scalar *__restrict__ q, const Scalar *__restrict__ grad_out,
                               const Scalar *__restrict__ landmarks,
                               const float *__restrict__ mean,
                               const float *__restrict__ mean_grad,
                               const float *__restrict__ grad_covariance,
                               const float *__restrict__ context, Scalar *__restrict__ grad_q,
                               float *__restrict__ partials, float exponent_scale,
                               float gradient_scale, long long groups, long long heads,
                               long long n, long long rows_per_chunk, long long q_image,
                               long long q_head, long long q_token, long long grad_out_image,
                               long long grad_out_head, long long grad_out_token,
                               long long landmarks_image, long long landmarks_head,
                               long long landmarks_token, long long grad_q_image,
                               long long grad_q_head, long long grad_q_token) {
  DYNAMIC_SHARED(float, shared);
  const GradientTiles tiles = gradient_tiles(shared);
  float *const shift = shared + GRADIENT_FLOATS, *const grad_shift = shift + 4 * LANDMARK_QUADS;
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, chunk = item % n_chunks;
    const long long first = chunk * rows_per_chunk;
    load_matrix<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.square, grad_covariance + group * SQUARE_ENTRIES, LANDMARKS, LANDMARKS, 2.f / n);
    load_transposed<4 * VALUE_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.thin, context + group * CONTEXT_ENTRIES, LANDMARKS, VALUE_DIM, 1.f / n);
    for (int i = threadIdx.x; i < 4 * LANDMARK_QUADS; i += THREADS)
      shift[i] = i < LANDMARKS ? mean[group * LANDMARKS + i] : 0.f;
    for (int i = threadIdx.x; i < 4 * VALUE_QUADS; i += THREADS)
      grad_shift[i] = i < VALUE_DIM ? mean_grad[group * VALUE_DIM + i] : 0.f;
    const QueryPass pass = {
        shift, grad_shift,
        tokens_of(grad_out, group, heads, grad_out_image, grad_out_head, grad_out_token),
        written_to(grad_q, group, heads, grad_q_image, grad_q_head, grad_q_token)};
    pass_over_tokens(tiles, pass, tokens_of(q, group, heads, q_image, q_head, q_token),
                     tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                               landmarks_token),
                     first, min(n, first + rows_per_chunk), exponent_scale, gradient_scale,
                     partials + partial_at(group, n_chunks, n_chunks + chunk));
  }
}

// x = -2 S, u = -context, of the landmarks as tokens: c is w.
struct LandmarkPass {
  const float *grad_covariance, *context;
  float *partial;

  __device__ __forceinline__ float4 left(long long row, int column, float4, bool present) const {
    return present ? times(load_quad<LANDMARKS>(grad_covariance + row * LANDMARKS, column), -2.f)
                   : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __device__ __forceinline__ float4 values(long long row, int channel, bool present) const {
    return present ? times(load_quad<VALUE_DIM>(context + row * VALUE_DIM, channel), -1.f)
                   : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __device__ __forceinline__ void store(long long row, int channel, float4 value) const {
    const float own[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (channel + c < HEAD_DIM) partial[row * HEAD_DIM + channel + c] = own[c];
  }
};

// The partial sums of w, by a block a group. Dynamic shared memory in floats: GRADIENT_FLOATS.
extern "C" __global__ void __launch_bounds__(THREADS, CHUNKS > 1 ? 1 : 2)
nystrom_attention_grad_landmarks(const Scalar *__restrict__ landmarks,
                                 const float *__restrict__ grad_covariance,
                                 const float *__restrict__ context,
                                 const float *__restrict__ p_covariance,
                                 const float *__restrict__ p_grad_context,
                                 float *__restrict__ partials, float exponent_scale,
                                 float gradient_scale, long long groups, long long heads,
                                 long long n, long long rows_per_chunk, long long landmarks_image,
                                 long long landmarks_head, long long landmarks_token) {
  DYNAMIC_SHARED(float, shared);
  const GradientTiles tiles = gradient_tiles(shared);
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long group = blockIdx.x; group < groups; group += gridDim.x) {
    load_transposed<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.square, p_covariance + group * SQUARE_ENTRIES, LANDMARKS, LANDMARKS, 1.f);
    load_transposed<4 * VALUE_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(
        tiles.thin, p_grad_context + group * CONTEXT_ENTRIES, LANDMARKS, VALUE_DIM, 1.f);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    const LandmarkPass pass = {grad_covariance + group * SQUARE_ENTRIES,
                               context + group * CONTEXT_ENTRIES,
                               partials + partial_at(group, n_chunks, 2 * n_chunks)};
    pass_over_tokens(tiles, pass, marks, marks, 0, LANDMARKS, exponent_scale, gradient_scale,
                     partials + partial_at(group, n_chunks, 2 * n_chunks + 1));
  }
}

// grad_landmarks (groups, m, d), dense. A block has 32 entries.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
nystrom_attention_merge_landmarks(const float *__restrict__ partials,
                                  Scalar *__restrict__ grad_landmarks, long long groups,
                                  long long n, long long rows_per_chunk) {
  __shared__ float sums[MERGE_ROWS][MERGE_COLUMNS];
  const long long n_chunks = ceil_div(n, rows_per_chunk);
  constexpr int TILES = (MARK_ENTRIES + MERGE_COLUMNS - 1) / MERGE_COLUMNS;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES;
    const int entry = (int)(item % TILES) * MERGE_COLUMNS + merge_column();
    const float sum = sum_of_chunks(sums, partials + partial_at(group, n_chunks, 0) + entry,
                                    2 * n_chunks + 2, MARK_ENTRIES, entry < MARK_ENTRIES);
    if (merge_row() == 0 && entry < MARK_ENTRIES)
      grad_landmarks[group * MARK_ENTRIES + entry] = to_scalar(sum);
  }
}
