// K = exp(-||q - k||_1 / lambda), or the Gaussian exp(-||q - k||_2^2 / (2 lambda)); gradients.
// q (groups, n, d), k (groups, m, d), K (groups, n, m), all dense and row-major; groups = B*h.
//
// Macros
//   SCALAR_TYPE  see common.cuh
//   KERNEL       0 Laplacian, 1 Gaussian
//   HEAD_DIM     d, 1 to 256
//   M_THREADS, M_OUTPUTS  a block covers M_THREADS * M_OUTPUTS landmarks, M_OUTPUTS a thread.
//                Chosen from m so that little is padded: 7 x 7 for 49 landmarks, 8 x 8 for 64.
//
// Launch: one dimension, any grid of at least one block; blocks step over the tiles by the grid's
// size, so a grid capped at 2^31 - 1 still covers everything. README.md has the grids.
//
// There is no tensor-core form of the L1 distance: two float32 additions for each (query,
// landmark, channel) are the work, and everything else is arranged around them. Tiles lie in
// shared memory as float32, each thread keeps a block of results in registers, and four channels
// are read at a time. Two blocks to a multiprocessor are what the registers allow without a spill:
// one computes while the other loads.

#include "distance.cuh"

constexpr int M_TILE = M_THREADS * M_OUTPUTS;

// Reads four channels of a row; zeros past the row's end, and for a row that is not there.
__device__ __forceinline__ float4 load_channels(const Scalar *row, int channel, bool present,
                                                bool vectors) {
  float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
  if (!present) return result;
  if (HEAD_DIM % 4 == 0 && vectors) {
    if (channel < HEAD_DIM) {
      const ScalarQuad quad = *reinterpret_cast<const ScalarQuad *>(row + channel);
      result = make_float4(to_float(quad.x), to_float(quad.y), to_float(quad.z), to_float(quad.w));
    }
    return result;
  }
  if (channel + 0 < HEAD_DIM) result.x = to_float(row[channel + 0]);
  if (channel + 1 < HEAD_DIM) result.y = to_float(row[channel + 1]);
  if (channel + 2 < HEAD_DIM) result.z = to_float(row[channel + 2]);
  if (channel + 3 < HEAD_DIM) result.w = to_float(row[channel + 3]);
  return result;
}

// Fills ROWS x CHUNK of shared memory; `stride` is the length of a row there.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(float *tile, int stride, const Scalar *rows,
                                          int row_count, int first_channel, bool vectors) {
#pragma unroll 2
  for (int i = threadIdx.x; i < ROWS * CHUNK_QUADS; i += THREADS) {
    const int row = i / CHUNK_QUADS, channel = i % CHUNK_QUADS * 4;
    *reinterpret_cast<float4 *>(tile + row * stride + channel) =
        load_channels(rows + (long long)row * HEAD_DIM, first_channel + channel, row < row_count,
                      vectors);
  }
}

// ---- forward -----------------------------------------------------------------------------------

constexpr int FORWARD_ROWS = 32;  // threads along n
constexpr int N_OUTPUTS = 4;      // queries a thread
constexpr int FORWARD_N_TILE = FORWARD_ROWS * N_OUTPUTS;
constexpr int FORWARD_THREADS = FORWARD_ROWS * M_THREADS;
// An odd number of quads: eight neighbouring rows then start in different banks.
constexpr int FORWARD_STRIDE = 4 * (CHUNK_QUADS | 1);

// exponent_scale: -log2(e) / lambda, for the Gaussian -log2(e) / (2 lambda).
extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 2)
laplacian_kernel_forward(const Scalar *__restrict__ q, const Scalar *__restrict__ k,
                         Scalar *__restrict__ kernel, float exponent_scale, long long groups,
                         long long n, long long m) {
  __shared__ __align__(16) float q_tile[FORWARD_N_TILE * FORWARD_STRIDE];
  __shared__ __align__(16) float k_tile[M_TILE * FORWARD_STRIDE];

  const long long n_tiles = ceil_div(n, FORWARD_N_TILE), m_tiles = ceil_div(m, M_TILE);
  const bool vectors = aligned_to_quad(q) && aligned_to_quad(k);
  const int column = threadIdx.x % M_THREADS, row = threadIdx.x / M_THREADS;

  for (long long tile = blockIdx.x; tile < groups * n_tiles * m_tiles; tile += gridDim.x) {
    const long long m_first = tile % m_tiles * M_TILE;
    const long long n_first = tile / m_tiles % n_tiles * FORWARD_N_TILE;
    const long long group = tile / m_tiles / n_tiles;
    const int queries = at_most(n - n_first, FORWARD_N_TILE);
    const int landmarks = at_most(m - m_first, M_TILE);

    float distance[N_OUTPUTS][M_OUTPUTS] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      __syncthreads();  // the tiles of the previous chunk have been read
      load_tile<FORWARD_N_TILE, FORWARD_THREADS>(q_tile, FORWARD_STRIDE,
                                                 q + (group * n + n_first) * HEAD_DIM,
                                                 queries, chunk * CHUNK, vectors);
      load_tile<M_TILE, FORWARD_THREADS>(k_tile, FORWARD_STRIDE,
                                         k + (group * m + m_first) * HEAD_DIM, landmarks,
                                         chunk * CHUNK, vectors);
      __syncthreads();

#pragma unroll 2
      for (int channel = 0; channel < CHUNK; channel += 4) {
        float4 a[N_OUTPUTS], b[M_OUTPUTS];
#pragma unroll
        for (int i = 0; i < N_OUTPUTS; ++i)
          a[i] = *reinterpret_cast<const float4 *>(
              q_tile + (row + i * FORWARD_ROWS) * FORWARD_STRIDE + channel);
#pragma unroll
        for (int j = 0; j < M_OUTPUTS; ++j)
          b[j] = *reinterpret_cast<const float4 *>(
              k_tile + (column + j * M_THREADS) * FORWARD_STRIDE + channel);
#pragma unroll
        for (int i = 0; i < N_OUTPUTS; ++i)
#pragma unroll
          for (int j = 0; j < M_OUTPUTS; ++j)
            distance[i][j] = add_distance(distance[i][j], a[i], b[j]);
      }
    }

    // Neighbouring threads hold neighbouring landmarks, so their stores share a sector.
#pragma unroll
    for (int i = 0; i < N_OUTPUTS; ++i) {
      const int query = row + i * FORWARD_ROWS;
      Scalar *const out = kernel + (group * n + n_first + query) * m + m_first;
#pragma unroll
      for (int j = 0; j < M_OUTPUTS; ++j) {
        const int landmark = column + j * M_THREADS;
        if (query < queries && landmark < landmarks)
          out[landmark] = to_scalar(exp2f(exponent_scale * distance[i][j]));
      }
    }
  }
}

// ---- backward ----------------------------------------------------------------------------------
// weights[landmark][query] = WEIGHT_FACTOR * w, transposed so that four queries are one load.
// A warp covers 8 landmarks x 4 queries: whole sectors in global memory, and with rows of
// 4 (mod 32) floats all 32 banks in shared memory.
template <int M_ROWS, int N_COLUMNS, int THREADS>
__device__ __forceinline__ void load_weights(float *weights, const Scalar *kernel,
                                             const Scalar *grad_kernel, float scale, long long m,
                                             int query_count, int landmark_count) {
  constexpr int M_PATCHES = (M_ROWS + 7) / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < M_PATCHES * 8 * N_COLUMNS; i += THREADS) {
    const int patch = i / 32;
    const int landmark = patch % M_PATCHES * 8 + i % 8;
    const int query = patch / M_PATCHES * 4 + i % 32 / 8;
    if (landmark >= M_ROWS) continue;
    float weight = 0.f;
    if (landmark < landmark_count && query < query_count) {
      const long long at = query * m + landmark;
      weight = to_float(grad_kernel[at]) * to_float(kernel[at]) * scale;
    }
    weights[landmark * (N_COLUMNS + 4) + query] = weight;
  }
}

__device__ __forceinline__ void store_channels(Scalar *row, int channel, float4 value,
                                               bool vectors) {
  if (HEAD_DIM % 4 == 0 && vectors) {
    if (channel < HEAD_DIM)
      *reinterpret_cast<ScalarQuad *>(row + channel) = ScalarQuad{
          to_scalar(value.x), to_scalar(value.y), to_scalar(value.z), to_scalar(value.w)};
    return;
  }
  if (channel + 0 < HEAD_DIM) row[channel + 0] = to_scalar(value.x);
  if (channel + 1 < HEAD_DIM) row[channel + 1] = to_scalar(value.y);
  if (channel + 2 < HEAD_DIM) row[channel + 2] = to_scalar(value.z);
  if (channel + 3 < HEAD_DIM) row[channel + 3] = to_scalar(value.w);
}

constexpr int QUERY_ROWS = 32;  // threads along n, four queries each
constexpr int QUERY_N_TILE = 4 * QUERY_ROWS;
constexpr int QUERY_M_CHUNK = 32;
constexpr int QUERY_STRIDE = QUERY_N_TILE + 4;
constexpr int QUERY_THREADS = QUERY_ROWS * CHUNK_QUADS;

// A tile is 128 queries x one chunk of channels; a thread has four queries x four channels and
// passes over all landmarks. gradient_scale: -1 / lambda.
extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 2)
laplacian_kernel_backward_q(const Scalar *__restrict__ q, const Scalar *__restrict__ k,
                            const Scalar *__restrict__ kernel,
                            const Scalar *__restrict__ grad_kernel, Scalar *__restrict__ grad_q,
                            float gradient_scale, long long groups, long long n, long long m) {
  __shared__ __align__(16) float weights[QUERY_M_CHUNK * QUERY_STRIDE];
  __shared__ __align__(16) float k_tile[QUERY_M_CHUNK * CHUNK];

  const long long n_tiles = ceil_div(n, QUERY_N_TILE);
  const bool vectors = aligned_to_quad(q) && aligned_to_quad(k) && aligned_to_quad(grad_q);
  const int channel = threadIdx.x % CHUNK_QUADS * 4, row = threadIdx.x / CHUNK_QUADS * 4;

  for (long long tile = blockIdx.x; tile < groups * n_tiles * CHUNKS; tile += gridDim.x) {
    const int first_channel = (int)(tile % CHUNKS) * CHUNK;
    const long long n_first = tile / CHUNKS % n_tiles * QUERY_N_TILE;
    const long long group = tile / CHUNKS / n_tiles;
    const long long first_row = group * n + n_first;
    const int queries = at_most(n - n_first, QUERY_N_TILE);

    float4 a[4];
    float gradient[4][4] = {}, weight_sum[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = load_channels(q + (first_row + row + i) * HEAD_DIM, first_channel + channel,
                           row + i < queries, vectors);

#pragma unroll 1
    for (long long m_first = 0; m_first < m; m_first += QUERY_M_CHUNK) {
      const int landmarks = at_most(m - m_first, QUERY_M_CHUNK);
      __syncthreads();  // the tiles of the previous landmarks have been read
      load_weights<QUERY_M_CHUNK, QUERY_N_TILE, QUERY_THREADS>(
          weights, kernel + first_row * m + m_first, grad_kernel + first_row * m + m_first,
          WEIGHT_FACTOR * gradient_scale, m, queries, landmarks);
      load_tile<QUERY_M_CHUNK, QUERY_THREADS>(k_tile, CHUNK, k + (group * m + m_first) * HEAD_DIM,
                                              landmarks, first_channel, vectors);
      __syncthreads();

#pragma unroll 4
      for (int j = 0; j < landmarks; ++j) {
        const float4 w = *reinterpret_cast<const float4 *>(weights + j * QUERY_STRIDE + row);
        const float4 b = *reinterpret_cast<const float4 *>(k_tile + j * CHUNK + channel);
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          gradient[i][0] = add_gradient(gradient[i][0], weight[i], a[i].x - b.x);
          gradient[i][1] = add_gradient(gradient[i][1], weight[i], a[i].y - b.y);
          gradient[i][2] = add_gradient(gradient[i][2], weight[i], a[i].z - b.z);
          gradient[i][3] = add_gradient(gradient[i][3], weight[i], a[i].w - b.w);
          weight_sum[i] = add_weight(weight_sum[i], weight[i]);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i < queries)
        store_channels(grad_q + (first_row + row + i) * HEAD_DIM, first_channel + channel,
                       make_float4(gradient[i][0] - weight_sum[i], gradient[i][1] - weight_sum[i],
                                   gradient[i][2] - weight_sum[i], gradient[i][3] - weight_sum[i]),
                       vectors);
  }
}

constexpr int LANDMARK_N_TILE = 64;
constexpr int LANDMARK_STRIDE = LANDMARK_N_TILE + 4;
constexpr int LANDMARK_OUTPUTS = 4;  // landmarks a thread
constexpr int LANDMARK_COLUMNS = (M_TILE + LANDMARK_OUTPUTS - 1) / LANDMARK_OUTPUTS;
constexpr int LANDMARK_ROWS = LANDMARK_COLUMNS * LANDMARK_OUTPUTS;
constexpr int SLICE_THREADS = LANDMARK_COLUMNS * CHUNK_QUADS;
constexpr int SLICES = 256 / SLICE_THREADS;  // groups of threads that share a tile's queries
constexpr int LANDMARK_THREADS = SLICES * SLICE_THREADS;

// First stage of grad_k: each block sums the queries of one chunk of n (rows_per_chunk, a multiple
// of 64) into partial (groups, ceil(n / rows_per_chunk), m, d), float32. Many chunks fill the GPU
// where there are few landmarks; fixed orders everywhere give the same bits in every run.
extern "C" __global__ void __launch_bounds__(LANDMARK_THREADS, 2)
laplacian_kernel_backward_k(const Scalar *__restrict__ q, const Scalar *__restrict__ k,
                            const Scalar *__restrict__ kernel,
                            const Scalar *__restrict__ grad_kernel, float *__restrict__ partial,
                            float gradient_scale, long long groups, long long n, long long m,
                            long long rows_per_chunk) {
  __shared__ __align__(16) float weights[LANDMARK_ROWS * LANDMARK_STRIDE];
  __shared__ __align__(16) float q_tile[LANDMARK_N_TILE * CHUNK];

  const long long n_chunks = ceil_div(n, rows_per_chunk), m_tiles = ceil_div(m, M_TILE);
  const bool vectors = aligned_to_quad(q) && aligned_to_quad(k);
  const int channel = threadIdx.x % CHUNK_QUADS * 4;
  const int column = threadIdx.x / CHUNK_QUADS % LANDMARK_COLUMNS;
  const int slice = threadIdx.x / SLICE_THREADS;

  for (long long tile = blockIdx.x; tile < groups * n_chunks * m_tiles * CHUNKS;
       tile += gridDim.x) {
    const int first_channel = (int)(tile % CHUNKS) * CHUNK;
    const long long m_first = tile / CHUNKS % m_tiles * M_TILE;
    const long long n_chunk = tile / CHUNKS / m_tiles % n_chunks;
    const long long group = tile / CHUNKS / m_tiles / n_chunks;
    const long long n_end = min(n, (n_chunk + 1) * rows_per_chunk);
    const int landmarks = at_most(m - m_first, M_TILE);

    float4 b[LANDMARK_OUTPUTS];
    float gradient[LANDMARK_OUTPUTS][4] = {}, weight_sum[LANDMARK_OUTPUTS] = {};
#pragma unroll
    for (int j = 0; j < LANDMARK_OUTPUTS; ++j) {
      const int landmark = column + j * LANDMARK_COLUMNS;
      b[j] = load_channels(k + (group * m + m_first + landmark) * HEAD_DIM,
                           first_channel + channel, landmark < landmarks, vectors);
    }

#pragma unroll 1
    for (long long n_first = n_chunk * rows_per_chunk; n_first < n_end;
         n_first += LANDMARK_N_TILE) {
      const long long first_row = group * n + n_first;
      const int queries = at_most(n_end - n_first, LANDMARK_N_TILE);
      __syncthreads();  // the tiles of the previous queries have been read
      load_weights<LANDMARK_ROWS, LANDMARK_N_TILE, LANDMARK_THREADS>(
          weights, kernel + first_row * m + m_first, grad_kernel + first_row * m + m_first,
          -WEIGHT_FACTOR * gradient_scale, m, queries, landmarks);
      load_tile<LANDMARK_N_TILE, LANDMARK_THREADS>(q_tile, CHUNK, q + first_row * HEAD_DIM,
                                                   queries, first_channel, vectors);
      __syncthreads();

#pragma unroll 1
      for (int query = slice * 4; query < LANDMARK_N_TILE; query += SLICES * 4) {
        float4 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i] = *reinterpret_cast<const float4 *>(q_tile + (query + i) * CHUNK + channel);
#pragma unroll
        for (int j = 0; j < LANDMARK_OUTPUTS; ++j) {
          const float4 w = *reinterpret_cast<const float4 *>(
              weights + (column + j * LANDMARK_COLUMNS) * LANDMARK_STRIDE + query);
          const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            gradient[j][0] = add_gradient(gradient[j][0], weight[i], a[i].x - b[j].x);
            gradient[j][1] = add_gradient(gradient[j][1], weight[i], a[i].y - b[j].y);
            gradient[j][2] = add_gradient(gradient[j][2], weight[i], a[i].z - b[j].z);
            gradient[j][3] = add_gradient(gradient[j][3], weight[i], a[i].w - b[j].w);
            weight_sum[j] = add_weight(weight_sum[j], weight[i]);
          }
        }
      }
    }

    // Slice 0 adds the other slices one after the other.
#pragma unroll
    for (int j = 0; j < LANDMARK_OUTPUTS; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) gradient[j][c] -= weight_sum[j];
#pragma unroll 1
    for (int source = 1; source < SLICES; ++source) {
      __syncthreads();  // weights, or the previous slice, have been read
      if (slice == source)
#pragma unroll
        for (int j = 0; j < LANDMARK_OUTPUTS; ++j)
          *reinterpret_cast<float4 *>(
              weights + (column + j * LANDMARK_COLUMNS) * CHUNK + channel) =
              make_float4(gradient[j][0], gradient[j][1], gradient[j][2], gradient[j][3]);
      __syncthreads();
      if (slice == 0)
#pragma unroll
        for (int j = 0; j < LANDMARK_OUTPUTS; ++j) {
          const float4 other = *reinterpret_cast<const float4 *>(
              weights + (column + j * LANDMARK_COLUMNS) * CHUNK + channel);
          gradient[j][0] += other.x;
          gradient[j][1] += other.y;
          gradient[j][2] += other.z;
          gradient[j][3] += other.w;
        }
    }
    if (slice == 0)
#pragma unroll
      for (int j = 0; j < LANDMARK_OUTPUTS; ++j) {
        const int landmark = column + j * LANDMARK_COLUMNS;
        if (landmark >= landmarks) continue;
        float *const out =
            partial + ((group * n_chunks + n_chunk) * m + m_first + landmark) * HEAD_DIM;
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (first_channel + channel + c < HEAD_DIM)
            out[first_channel + channel + c] = gradient[j][c];
      }
  }
}

constexpr int REDUCE_COLUMNS = 32, REDUCE_ROWS = 8;

// Second stage: grad_k (groups, m, d) = sum over chunks of partial, in a fixed order.
// elements = m * d.
extern "C" __global__ void __launch_bounds__(REDUCE_COLUMNS * REDUCE_ROWS)
laplacian_kernel_reduce_k(const float *__restrict__ partial, Scalar *__restrict__ grad_k,
                          long long groups, long long n_chunks, long long elements) {
  __shared__ float sums[REDUCE_ROWS][REDUCE_COLUMNS];
  const int column = threadIdx.x % REDUCE_COLUMNS, row = threadIdx.x / REDUCE_COLUMNS;
  const long long tiles = ceil_div(elements, REDUCE_COLUMNS);

  for (long long tile = blockIdx.x; tile < groups * tiles; tile += gridDim.x) {
    const long long group = tile / tiles, element = tile % tiles * REDUCE_COLUMNS + column;
    const float *const first = partial + group * n_chunks * elements + element;
    float sum = 0.f;
    if (element < elements)
#pragma unroll 2
      for (long long chunk = row; chunk < n_chunks; chunk += REDUCE_ROWS)
        sum += first[chunk * elements];
    __syncthreads();  // the sums of the previous tile have been read
    sums[row][column] = sum;
    __syncthreads();
    if (row == 0 && element < elements) {
#pragma unroll
      for (int i = 1; i < REDUCE_ROWS; ++i) sum += sums[i][column];
      grad_k[group * elements + element] = to_scalar(sum);
    }
  }
}
