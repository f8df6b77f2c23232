// The whitened Nystrom attention in passes over tiles of tokens: nothing of size n x m is stored.
// With c = k(token, landmarks) as rows, P = (k(landmarks, landmarks) + ridge I)^-1, mean and Cov
// those of c over the queries of a group, and x_j = c_j P for the keys:
//
//   context = sum_j x_j^T v_j / sqrt(x_j Cov x_j^T + whiten_eps)
//   out_i = (c_i - mean) context / n + mean of v
//
// P is on the keys before anything is summed over them: it is large where landmarks are alike,
// and on both sides of a float32 sum it would show that sum's rounding twice.
//
// Macros: see attention_tile.cuh. Launch: one dimension, any grid of at least one block; blocks
// step over chunks of tokens, rows_per_chunk of them each, a multiple of TILE. Sums over tokens
// have two stages, chunks and then their merge, without atomics. README.md has the grids.

constexpr int LOADS_AT_ONCE = 2;
#include "attention_tile.cuh"
#include "attention_keys.cuh"
#include "attention_sums.cuh"

// ---- landmarks ---------------------------------------------------------------------------------

// w = k(landmarks, landmarks), ridged = w + ridge I, both (groups, m, m).
extern "C" __global__ void __launch_bounds__(THREADS)
nystrom_attention_landmarks(const Scalar *__restrict__ landmarks, float *__restrict__ w,
                            float *__restrict__ ridged, float exponent_scale, float ridge,
                            long long groups, long long heads, long long landmarks_image,
                            long long landmarks_head, long long landmarks_token) {
  __shared__ __align__(16) float landmark_tile[LANDMARK_TILE];
  __shared__ __align__(16) float token_tile[TOKEN_TILE];
  constexpr int TILES = (LANDMARKS + TILE - 1) / TILE;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES;
    const int first = (int)(item % TILES) * TILE;
    const int count = min(LANDMARKS - first, TILE);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
#pragma unroll 1
    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
      float c[N_OUTPUTS][M_OUTPUTS];
      kernel_values(c, token_tile, landmark_tile, marks, first, count, marks, m_tile, true,
                    exponent_scale);
#pragma unroll
      for (int i = 0; i < N_OUTPUTS; ++i) {
        const int token = tile_row() + i * TILE_ROWS;
#pragma unroll
        for (int j = 0; j < M_OUTPUTS; ++j) {
          const int landmark = landmark_of(m_tile, j);
          if (token >= count || landmark >= LANDMARKS) continue;
          const long long at = (group * LANDMARKS + first + token) * LANDMARKS + landmark;
          w[at] = c[i][j];
          ridged[at] = c[i][j] + (first + token == landmark ? ridge : 0.f);
        }
      }
    }
  }
}

// ---- statistics of the queries -----------------------------------------------------------------

// Mean and scatter of c over each chunk. About the mean of the chunk's first tile, since plain
// sums of squares cancel. Dynamic shared memory in floats: 2 * PADDED_LANDMARKS and the larger of
// the three tiles and 64 * PAIRS * (PAIR_SLICES / 2).
extern "C" __global__ void __launch_bounds__(THREADS, M_TILES * M_OUTPUTS > 7 ? 1 : 2)
nystrom_attention_statistics(const Scalar *__restrict__ q, const Scalar *__restrict__ landmarks,
                             float *__restrict__ chunk_mean, float *__restrict__ chunk_scatter,
                             float exponent_scale, long long groups, long long heads, long long n,
                             long long rows_per_chunk, long long q_image, long long q_head,
                             long long q_token, long long landmarks_image,
                             long long landmarks_head, long long landmarks_token) {
  DYNAMIC_SHARED(float, shared);
  float *const shift = shared, *const delta = shift + PADDED_LANDMARKS;
  float *const c_tile = delta + PADDED_LANDMARKS;
  float *const landmark_tile = c_tile + KERNEL_TILE;
  float *const token_tile = landmark_tile + LANDMARK_TILE;
  const int slice = threadIdx.x / PAIRS, pair = threadIdx.x % PAIRS;
  const int2 octets = octets_of(pair);
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, first = item % n_chunks * rows_per_chunk;
    const long long stop = min(n, first + rows_per_chunk);
    const Tokens queries = tokens_of(q, group, heads, q_image, q_head, q_token);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    float scatter[64] = {}, sums[M_TILES][M_OUTPUTS] = {};
#pragma unroll 1
    for (long long at = first; at < stop; at += TILE) {
      const int count = at_most(stop - at, TILE);
#pragma unroll
      for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
        float c[N_OUTPUTS][M_OUTPUTS];
        kernel_values(c, token_tile, landmark_tile, queries, at, count, marks, m_tile,
                      at == first, exponent_scale);
        if (at == first) {
          store_values(c_tile, c, nullptr, count, m_tile);
          __syncthreads();
          const int landmark = m_tile * M_TILE + threadIdx.x;
          if (threadIdx.x < M_TILE && landmark < LANDMARKS) {
            float sum = 0.f;
#pragma unroll 8
            for (int token = 0; token < TILE; ++token)
              sum += c_tile[token * KERNEL_STRIDE + landmark];
            shift[landmark] = sum / count;
          }
          __syncthreads();
        }
        store_values(c_tile, c, shift, count, m_tile);
#pragma unroll
        for (int j = 0; j < M_OUTPUTS; ++j)
#pragma unroll
          for (int i = 0; i < N_OUTPUTS; ++i) sums[m_tile][j] += c[i][j];
      }
      __syncthreads();
      if (slice < PAIR_SLICES) {
#pragma unroll 2
        for (int token = slice; token < TILE; token += PAIR_SLICES)
          add_square(scatter, c_tile + token * KERNEL_STRIDE, octets, 1.f);
      }
    }

    add_slices<64, PAIRS, PAIR_SLICES>(scatter, c_tile);
    __syncthreads();  // the slices' sums, or the last tile, have been read
    float *const rows = c_tile;
#pragma unroll
    for (int m_tile = 0; m_tile < M_TILES; ++m_tile)
#pragma unroll
      for (int j = 0; j < M_OUTPUTS; ++j) {
        const int landmark = landmark_of(m_tile, j);
        if (landmark < PADDED_LANDMARKS)
          rows[tile_row() * PADDED_LANDMARKS + landmark] = sums[m_tile][j];
      }
    __syncthreads();
    const float count = (float)(stop - first);
    for (int landmark = threadIdx.x; landmark < PADDED_LANDMARKS; landmark += THREADS) {
      float sum = 0.f;
      if (landmark < LANDMARKS) {
#pragma unroll 8
        for (int row = 0; row < TILE_ROWS; ++row) sum += rows[row * PADDED_LANDMARKS + landmark];
        chunk_mean[item * LANDMARKS + landmark] = shift[landmark] + sum / count;
      }
      delta[landmark] = sum / count;
    }
    __syncthreads();
    if (slice == 0) {
      float *const to = chunk_scatter + item * (64 * PAIRS) + pair;
#pragma unroll
      for (int e = 0; e < 64; ++e)
        to[e * PAIRS] = scatter[e] - count * delta[8 * octets.x + e / 8] *
                                         delta[8 * octets.y + e % 8];
    }
  }
}

// mean (groups, m) and covariance (groups, m, m) of all chunks about their common mean (Chan et
// al. 1979). A block has 32 entries of the chunks' scatter.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
nystrom_attention_merge_statistics(const float *__restrict__ chunk_mean,
                                   const float *__restrict__ chunk_scatter,
                                   float *__restrict__ mean, float *__restrict__ covariance,
                                   long long groups, long long n, long long rows_per_chunk) {
  __shared__ float sums[MERGE_ROWS][MERGE_COLUMNS];
  const int column = merge_column(), row = merge_row();
  const long long n_chunks = ceil_div(n, rows_per_chunk);
  constexpr int TILES = 64 * PAIRS / MERGE_COLUMNS;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES;
    const int entry = (int)(item % TILES) * MERGE_COLUMNS + column, e = entry / PAIRS;
    const int2 octets = octets_of(entry % PAIRS);
    const int a = 8 * octets.x + e / 8, b = 8 * octets.y + e % 8;
    const bool present = a < LANDMARKS && b <= a;
    const float *const means = chunk_mean + group * n_chunks * LANDMARKS;
    const float *const scatters = chunk_scatter + group * n_chunks * (64 * PAIRS) + entry;

    // About the first chunk's mean, which rounds less than the sum of the means.
    float sum_a = 0.f, sum_b = 0.f;
    if (present)
#pragma unroll 2
      for (long long chunk = row; chunk < n_chunks; chunk += MERGE_ROWS) {
        const float count = (float)min(n - chunk * rows_per_chunk, rows_per_chunk);
        sum_a += count * (means[chunk * LANDMARKS + a] - means[a]);
        sum_b += count * (means[chunk * LANDMARKS + b] - means[b]);
      }
    sum_a = sum_of_rows(sums, sum_a);
    sum_b = sum_of_rows(sums, sum_b);
    const float mean_a = present ? means[a] + sum_a / n : 0.f;
    const float mean_b = present ? means[b] + sum_b / n : 0.f;
    float sum = 0.f;
    if (present)
#pragma unroll 2
      for (long long chunk = row; chunk < n_chunks; chunk += MERGE_ROWS) {
        const float count = (float)min(n - chunk * rows_per_chunk, rows_per_chunk);
        sum += scatters[chunk * (64 * PAIRS)] + count * (means[chunk * LANDMARKS + a] - mean_a) *
                                                    (means[chunk * LANDMARKS + b] - mean_b);
      }
    sum = sum_of_rows(sums, sum) / n;
    if (present && row == 0) {
      float *const to = covariance + group * LANDMARKS * LANDMARKS;
      to[a * LANDMARKS + b] = to[b * LANDMARKS + a] = sum;
      if (a == b) mean[group * LANDMARKS + a] = mean_a;
    }
  }
}

// ---- context of the keys -----------------------------------------------------------------------
// Keys and then x; c, then parts of the variances, then values, at last sums of values.
constexpr int X_FLOATS = larger(TOKEN_TILE, KERNEL_TILE);
constexpr int C_FLOATS = larger(KERNEL_TILE, larger(VALUE_TILE, 4 * VALUE_ROWS * VALUE_QUADS));

// The context and the sum of v over each chunk, (groups, n_chunks, m + 1, d_v). Dynamic shared
// memory in floats: TILE + 2 * SQUARE + LANDMARK_TILE and the larger of X_FLOATS + C_FLOATS and
// 32 * PIECE_THREADS * (PIECE_SLICES / 2).
extern "C" __global__ void __launch_bounds__(THREADS, PIECES_A_THREAD > 1 ? 1 : 2)
nystrom_attention_keys(const Scalar *__restrict__ k, const Scalar *__restrict__ v,
                       const Scalar *__restrict__ landmarks, const float *__restrict__ p,
                       const float *__restrict__ covariance, float *__restrict__ chunk_context,
                       float exponent_scale, float whiten_eps, long long groups, long long heads,
                       long long n, long long rows_per_chunk, long long k_image, long long k_head,
                       long long k_token, long long v_image, long long v_head, long long v_token,
                       long long landmarks_image, long long landmarks_head,
                       long long landmarks_token) {
  DYNAMIC_SHARED(float, shared);
  float *const scale = shared;
  float *const p_tile = scale + TILE, *const upper_tile = p_tile + SQUARE;
  float *const landmark_tile = upper_tile + SQUARE;
  float *const scratch = landmark_tile + LANDMARK_TILE;
  float *const token_tile = scratch, *const x_tile = scratch;
  float *const c_tile = scratch + X_FLOATS, *const variances = c_tile, *const v_tile = c_tile;
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, first = item % n_chunks * rows_per_chunk;
    const long long stop = min(n, first + rows_per_chunk);
    const Tokens keys = tokens_of(k, group, heads, k_image, k_head, k_token);
    const Tokens values = tokens_of(v, group, heads, v_image, v_head, v_token);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    const long long square = group * LANDMARKS * LANDMARKS;
    // The last chunk's tiles have been read: its end has barriers behind the last product.
    load_matrix<4 * LANDMARK_QUADS, LANDMARK_QUADS, SQUARE_STRIDE>(p_tile, p + square, LANDMARKS,
                                                                   LANDMARKS, 1.f);
    load_upper(upper_tile, covariance + square);
    float context[32 * PIECES_A_THREAD] = {};
    float4 value_sum = make_float4(0.f, 0.f, 0.f, 0.f);

#pragma unroll 1
    for (long long at = first; at < stop; at += TILE) {
      const int count = at_most(stop - at, TILE);
      kernel_tile(c_tile, token_tile, landmark_tile, keys, at, count, marks, at == first, nullptr,
                  exponent_scale);
      __syncthreads();
      project_keys(x_tile, c_tile, p_tile);
      __syncthreads();
      variance_parts(variances, x_tile, upper_tile);
      __syncthreads();
      for (int token = threadIdx.x; token < TILE; token += THREADS)
        scale[token] = scale_of(
            sum_of_parts(variances + token * VARIANCE_STRIDE, LANDMARK_QUADS), whiten_eps);
      __syncthreads();
      load_values(v_tile, scale, values, at, count, value_sum);
      __syncthreads();
      add_pieces(context, x_tile, v_tile, count);
    }

    store_pieces(chunk_context + item * ((LANDMARKS + 1) * VALUE_DIM), context, value_sum,
                 scratch);
  }
}

// context (groups, m, d_v) and mean_value (groups, d_v) of all chunks. A block has 32 entries.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
nystrom_attention_merge_keys(const float *__restrict__ chunk_context, float *__restrict__ context,
                             float *__restrict__ mean_value, long long groups, long long n,
                             long long rows_per_chunk) {
  __shared__ float sums[MERGE_ROWS][MERGE_COLUMNS];
  const long long n_chunks = ceil_div(n, rows_per_chunk);
  constexpr int ENTRIES = (LANDMARKS + 1) * VALUE_DIM;
  constexpr int TILES = (ENTRIES + MERGE_COLUMNS - 1) / MERGE_COLUMNS;

  for (long long item = blockIdx.x; item < groups * TILES; item += gridDim.x) {
    const long long group = item / TILES;
    const int entry = (int)(item % TILES) * MERGE_COLUMNS + merge_column();
    const float sum = sum_of_chunks(sums, chunk_context + group * n_chunks * ENTRIES + entry,
                                    n_chunks, ENTRIES, entry < ENTRIES);
    if (merge_row() == 0 && entry < LANDMARKS * VALUE_DIM)
      context[group * (LANDMARKS * VALUE_DIM) + entry] = sum;
    else if (merge_row() == 0 && entry < ENTRIES)
      mean_value[group * VALUE_DIM + entry - LANDMARKS * VALUE_DIM] = sum / n;
  }
}

// ---- output of the queries ---------------------------------------------------------------------

// Dynamic shared memory: PADDED_LANDMARKS + 4 * VALUE_QUADS + LANDMARK_TILE + TOKEN_TILE +
// KERNEL_TILE + 4 * LANDMARK_QUADS * VALUE_STRIDE floats.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
nystrom_attention_output(const Scalar *__restrict__ q, const Scalar *__restrict__ landmarks,
                         const float *__restrict__ mean, const float *__restrict__ context,
                         const float *__restrict__ mean_value, Scalar *__restrict__ out,
                         float exponent_scale, long long groups, long long heads, long long n,
                         long long rows_per_chunk, long long q_image, long long q_head,
                         long long q_token, long long landmarks_image, long long landmarks_head,
                         long long landmarks_token, long long out_image, long long out_head,
                         long long out_token) {
  DYNAMIC_SHARED(float, shared);
  float *const shift = shared, *const start = shift + PADDED_LANDMARKS;
  float *const context_tile = start + 4 * VALUE_QUADS;
  float *const c_tile = context_tile + 4 * LANDMARK_QUADS * VALUE_STRIDE;
  float *const landmark_tile = c_tile + KERNEL_TILE;
  float *const token_tile = landmark_tile + LANDMARK_TILE;
  const long long n_chunks = ceil_div(n, rows_per_chunk);

  for (long long item = blockIdx.x; item < groups * n_chunks; item += gridDim.x) {
    const long long group = item / n_chunks, first = item % n_chunks * rows_per_chunk;
    const long long stop = min(n, first + rows_per_chunk);
    const Tokens queries = tokens_of(q, group, heads, q_image, q_head, q_token);
    const Tokens marks = tokens_of(landmarks, group, heads, landmarks_image, landmarks_head,
                                   landmarks_token);
    const Written rows = written_to(out, group, heads, out_image, out_head, out_token);
    __syncthreads();  // the last chunk's context has been read
    load_matrix<4 * LANDMARK_QUADS, VALUE_QUADS, VALUE_STRIDE>(
        context_tile, context + group * (LANDMARKS * VALUE_DIM), LANDMARKS, VALUE_DIM, 1.f / n);
    for (int i = threadIdx.x; i < LANDMARKS; i += THREADS) shift[i] = mean[group * LANDMARKS + i];
    for (int i = threadIdx.x; i < 4 * VALUE_QUADS; i += THREADS)
      start[i] = i < VALUE_DIM ? mean_value[group * VALUE_DIM + i] : 0.f;

#pragma unroll 1
    for (long long at = first; at < stop; at += TILE) {
      const int count = at_most(stop - at, TILE);
      kernel_tile(c_tile, token_tile, landmark_tile, queries, at, count, marks, at == first,
                  shift, exponent_scale);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < TOKEN_STEP * VALUE_QUADS; i += THREADS) {
        const int token = i / VALUE_QUADS, channel = i % VALUE_QUADS * 4;
        float sums[4][4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[r][c] = start[channel + c];
        multiply_add(sums, c_tile, token, context_tile + channel, VALUE_STRIDE,
                     4 * LANDMARK_QUADS);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = token + r * TOKEN_STEP;
          if (row < count)
            store_channels<VALUE_DIM>(
                rows, at + row, channel,
                make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
        }
      }
    }
  }
}
