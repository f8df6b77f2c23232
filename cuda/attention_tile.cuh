// What the attention's kernels share: C = k(tokens, landmarks) for a tile of tokens, products of
// tiles, sums over slices of threads.
//
// Macros
//   SCALAR_TYPE  see common.cuh
//   KERNEL       0 Laplacian, 1 Gaussian
//   HEAD_DIM     d, 1 to 256
//   VALUE_DIM    d_v, 1 to 256
//   LANDMARKS    m, 1 to 128
//   M_THREADS, M_OUTPUTS  landmarks whose distances a block sums at once, M_OUTPUTS a thread
//
// Before this text: LOADS_AT_ONCE, loads of rows that a thread has under way, 1 where registers
// are short.
//
// Tokens are (B, h, n, channels) with any strides but dense channels; group = image * heads + head.

#include "distance.cuh"

#if VALUE_DIM < 1 || VALUE_DIM > 256
#error "VALUE_DIM must be 1 to 256"
#endif
#if LANDMARKS < 1 || LANDMARKS > 128
#error "LANDMARKS must be 1 to 128"
#endif

constexpr int TILE_ROWS = 32;  // threads along the tokens
constexpr int N_OUTPUTS = 2;   // tokens a thread
constexpr int TILE = TILE_ROWS * N_OUTPUTS;
constexpr int THREADS = TILE_ROWS * M_THREADS;
constexpr int M_TILE = M_THREADS * M_OUTPUTS;
constexpr int M_TILES = (LANDMARKS + M_TILE - 1) / M_TILE;

// Rows in shared memory are an odd number of quads: neighbouring ones start in different banks.
__device__ constexpr int odd_quads(int quads) { return 4 * (quads | 1); }

constexpr int LANDMARK_QUADS = (LANDMARKS + 3) / 4, OCTETS = (LANDMARKS + 7) / 8;
constexpr int PADDED_LANDMARKS = 8 * OCTETS;
constexpr int VALUE_QUADS = (VALUE_DIM + 3) / 4;
constexpr int CHANNEL_STRIDE = odd_quads(CHUNK_QUADS);
constexpr int KERNEL_STRIDE = odd_quads(2 * OCTETS);
constexpr int SQUARE_STRIDE = odd_quads(LANDMARK_QUADS);
constexpr int VALUE_STRIDE = odd_quads(VALUE_QUADS);

// Floats of shared memory.
constexpr int LANDMARK_TILE = M_TILE * CHANNEL_STRIDE, TOKEN_TILE = TILE * CHANNEL_STRIDE;
constexpr int KERNEL_TILE = TILE * KERNEL_STRIDE, VALUE_TILE = TILE * VALUE_STRIDE;
constexpr int SQUARE = 4 * LANDMARK_QUADS * SQUARE_STRIDE;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// Strides in elements.
struct Tokens {
  const Scalar *first;  // of a group
  long long stride;
  bool vectors;  // four channels at a time
};

__device__ __forceinline__ long long group_offset(long long group, long long heads,
                                                  long long image_stride, long long head_stride) {
  return group / heads * image_stride + group % heads * head_stride;
}

__device__ __forceinline__ Tokens tokens_of(const Scalar *x, long long group, long long heads,
                                            long long image_stride, long long head_stride,
                                            long long token_stride) {
  return Tokens{x + group_offset(group, heads, image_stride, head_stride), token_stride,
                aligned_to_quad(x) && (image_stride | head_stride | token_stride) % 4 == 0};
}

// Reads four channels of a row; zeros past the row's end, and for a row that is not there.
template <int CHANNELS>
__device__ __forceinline__ float4 load_channels(const Tokens &x, long long row, int channel,
                                                bool present) {
  float4 result = make_float4(0.f, 0.f, 0.f, 0.f);
  if (!present) return result;
  const Scalar *const from = x.first + row * x.stride;
  if (CHANNELS % 4 == 0 && x.vectors) {
    if (channel < CHANNELS) {
      const ScalarQuad quad = *reinterpret_cast<const ScalarQuad *>(from + channel);
      result = make_float4(to_float(quad.x), to_float(quad.y), to_float(quad.z), to_float(quad.w));
    }
    return result;
  }
  if (channel + 0 < CHANNELS) result.x = to_float(from[channel + 0]);
  if (channel + 1 < CHANNELS) result.y = to_float(from[channel + 1]);
  if (channel + 2 < CHANNELS) result.z = to_float(from[channel + 2]);
  if (channel + 3 < CHANNELS) result.w = to_float(from[channel + 3]);
  return result;
}

// A group's rows to be written, as Tokens are read.
struct Written {
  Scalar *first;
  long long stride;
  bool vectors;
};

__device__ __forceinline__ Written written_to(Scalar *x, long long group, long long heads,
                                              long long image_stride, long long head_stride,
                                              long long token_stride) {
  return Written{x + group_offset(group, heads, image_stride, head_stride), token_stride,
                 aligned_to_quad(x) && (image_stride | head_stride | token_stride) % 4 == 0};
}

// Writes four channels of a row, none past the row's end.
template <int CHANNELS>
__device__ __forceinline__ void store_channels(const Written &x, long long row, int channel,
                                               float4 value) {
  Scalar *const to = x.first + row * x.stride;
  if (CHANNELS % 4 == 0 && x.vectors) {
    if (channel < CHANNELS)
      *reinterpret_cast<ScalarQuad *>(to + channel) = ScalarQuad{
          to_scalar(value.x), to_scalar(value.y), to_scalar(value.z), to_scalar(value.w)};
    return;
  }
  if (channel + 0 < CHANNELS) to[channel + 0] = to_scalar(value.x);
  if (channel + 1 < CHANNELS) to[channel + 1] = to_scalar(value.y);
  if (channel + 2 < CHANNELS) to[channel + 2] = to_scalar(value.z);
  if (channel + 3 < CHANNELS) to[channel + 3] = to_scalar(value.w);
}

// Fills ROWS x CHUNK of shared memory from row `first` on.
template <int ROWS>
__device__ __forceinline__ void load_rows(float *tile, const Tokens &x, long long first,
                                          int row_count, int first_channel) {
#pragma unroll LOADS_AT_ONCE
  for (int i = threadIdx.x; i < ROWS * CHUNK_QUADS; i += THREADS) {
    const int row = i / CHUNK_QUADS, channel = i % CHUNK_QUADS * 4;
    *reinterpret_cast<float4 *>(tile + row * CHANNEL_STRIDE + channel) =
        load_channels<HEAD_DIM>(x, first + row, first_channel + channel, row < row_count);
  }
}

__device__ __forceinline__ int tile_row() { return threadIdx.x / M_THREADS; }
__device__ __forceinline__ int tile_column() { return threadIdx.x % M_THREADS; }

// c[i][j] = kernel of the token tile_row() + i * TILE_ROWS and the landmark tile_column() +
// j * M_THREADS of a landmark tile, without regard to edges. exponent_scale: -log2(e) / lambda,
// for the Gaussian -log2(e) / (2 lambda). Landmarks that all fit stay for the next tokens.
__device__ __forceinline__ void kernel_values(float c[N_OUTPUTS][M_OUTPUTS], float *token_tile,
                                              float *landmark_tile, const Tokens &tokens,
                                              long long first, int count, const Tokens &landmarks,
                                              int m_tile, bool new_landmarks,
                                              float exponent_scale) {
#pragma unroll
  for (int i = 0; i < N_OUTPUTS; ++i)
#pragma unroll
    for (int j = 0; j < M_OUTPUTS; ++j) c[i][j] = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    __syncthreads();  // what was in the tiles has been read
    if (CHUNKS > 1 || m_tile == 0)
      load_rows<TILE>(token_tile, tokens, first, count, chunk * CHUNK);
    if (CHUNKS * M_TILES > 1 || new_landmarks)
      load_rows<M_TILE>(landmark_tile, landmarks, m_tile * M_TILE,
                        min(LANDMARKS - m_tile * M_TILE, M_TILE), chunk * CHUNK);
    __syncthreads();

#pragma unroll 2
    for (int channel = 0; channel < CHUNK; channel += 4) {
      float4 a[N_OUTPUTS], b[M_OUTPUTS];
#pragma unroll
      for (int i = 0; i < N_OUTPUTS; ++i)
        a[i] = *reinterpret_cast<const float4 *>(
            token_tile + (tile_row() + i * TILE_ROWS) * CHANNEL_STRIDE + channel);
#pragma unroll
      for (int j = 0; j < M_OUTPUTS; ++j)
        b[j] = *reinterpret_cast<const float4 *>(
            landmark_tile + (tile_column() + j * M_THREADS) * CHANNEL_STRIDE + channel);
#pragma unroll
      for (int i = 0; i < N_OUTPUTS; ++i)
#pragma unroll
        for (int j = 0; j < M_OUTPUTS; ++j) c[i][j] = add_distance(c[i][j], a[i], b[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < N_OUTPUTS; ++i)
#pragma unroll
    for (int j = 0; j < M_OUTPUTS; ++j) c[i][j] = exp2f(exponent_scale * c[i][j]);
}

// Landmark of c[.][j] among the padded ones.
__device__ __forceinline__ int landmark_of(int m_tile, int j) {
  return m_tile * M_TILE + tile_column() + j * M_THREADS;
}

// c_tile[token][landmark] = c - shift[landmark] (shift may be null); zeros past both edges.
__device__ __forceinline__ void store_values(float *c_tile, float c[N_OUTPUTS][M_OUTPUTS],
                                             const float *shift, int count, int m_tile) {
#pragma unroll
  for (int j = 0; j < M_OUTPUTS; ++j) {
    const int landmark = landmark_of(m_tile, j);
    if (landmark >= PADDED_LANDMARKS) continue;
    const bool present = landmark < LANDMARKS;
    const float less = shift && present ? shift[landmark] : 0.f;
#pragma unroll
    for (int i = 0; i < N_OUTPUTS; ++i) {
      const int token = tile_row() + i * TILE_ROWS;
      c[i][j] = present && token < count ? c[i][j] - less : 0.f;
      c_tile[token * KERNEL_STRIDE + landmark] = c[i][j];
    }
  }
  // Landmarks of the last octet that no landmark tile covers.
  constexpr int COVERED = M_TILES * M_TILE, MISSING = PADDED_LANDMARKS - COVERED;
  if (MISSING > 0 && m_tile == 0)
    for (int i = threadIdx.x; i < TILE * MISSING; i += THREADS)
      c_tile[i / larger(MISSING, 1) * KERNEL_STRIDE + COVERED + i % larger(MISSING, 1)] = 0.f;
}

// c_tile (TILE, PADDED_LANDMARKS) of tokens `first` to `first + count`. A barrier must follow.
__device__ __forceinline__ void kernel_tile(float *c_tile, float *token_tile,
                                            float *landmark_tile, const Tokens &tokens,
                                            long long first, int count, const Tokens &landmarks,
                                            bool new_landmarks, const float *shift,
                                            float exponent_scale) {
#pragma unroll 1
  for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
    float c[N_OUTPUTS][M_OUTPUTS];
    kernel_values(c, token_tile, landmark_tile, tokens, first, count, landmarks, m_tile,
                  new_landmarks, exponent_scale);
    store_values(c_tile, c, shift, count, m_tile);
  }
}

// A dense (rows, columns) matrix times a factor, with zeros up to ROWS x 4 * QUADS floats.
template <int ROWS, int QUADS, int STRIDE>
__device__ __forceinline__ void load_matrix(float *tile, const float *from, int rows, int columns,
                                            float factor) {
#pragma unroll 2 * LOADS_AT_ONCE
  for (int i = threadIdx.x; i < ROWS * 4 * QUADS; i += THREADS) {
    const int row = i / (4 * QUADS), column = i % (4 * QUADS);
    tile[row * STRIDE + column] =
        row < rows && column < columns ? from[row * columns + column] * factor : 0.f;
  }
}

// The transpose of a dense (rows, columns) matrix times a factor, with zeros up to
// COLUMNS x 4 * QUADS floats.
template <int COLUMNS, int QUADS, int STRIDE>
__device__ __forceinline__ void load_transposed(float *tile, const float *from, int rows,
                                                int columns, float factor) {
#pragma unroll 2 * LOADS_AT_ONCE
  for (int i = threadIdx.x; i < COLUMNS * 4 * QUADS; i += THREADS) {
    const int row = i / COLUMNS, column = i % COLUMNS;
    tile[column * STRIDE + row] =
        row < rows && column < columns ? from[row * columns + column] * factor : 0.f;
  }
}

// Four tokens a thread, so many apart.
constexpr int TOKEN_STEP = TILE / 4;

// sums[i][0..3] += the first `inner` entries of row `token + i * TOKEN_STEP` of a tile, whose rows
// are LEFT_STRIDE floats, times four columns of a matrix in shared memory.
template <int LEFT_STRIDE = KERNEL_STRIDE>
__device__ __forceinline__ void multiply_add(float sums[4][4], const float *tile, int token,
                                             const float *columns, int stride, int inner) {
  const float *left = tile + token * LEFT_STRIDE;
#pragma unroll 1
  for (; inner > 0; inner -= 4, left += 4, columns += 4 * stride) {
    float4 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = *reinterpret_cast<const float4 *>(left + i * TOKEN_STEP * LEFT_STRIDE);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const float4 b = *reinterpret_cast<const float4 *>(columns + step * stride);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = step == 0 ? a[i].x : step == 1 ? a[i].y : step == 2 ? a[i].z : a[i].w;
        sums[i][0] = fmaf(factor, b.x, sums[i][0]);
        sums[i][1] = fmaf(factor, b.y, sums[i][1]);
        sums[i][2] = fmaf(factor, b.z, sums[i][2]);
        sums[i][3] = fmaf(factor, b.w, sums[i][3]);
      }
    }
  }
}

// Adds the sums of all slices to those of slice 0, in an order that the sizes fix. Threads
// `slice * WIDTH + local` hold COUNT sums each; scratch holds COUNT * WIDTH * (SLICES / 2).
template <int COUNT, int WIDTH, int SLICES>
__device__ __forceinline__ void add_slices(float *sums, float *scratch) {
  const int slice = threadIdx.x / WIDTH, local = threadIdx.x % WIDTH;
#pragma unroll 1
  for (int left = SLICES; left > 1;) {
    const int kept = (left + 1) / 2;
    __syncthreads();  // what was in scratch has been read
    if (slice >= kept && slice < left)
#pragma unroll
      for (int e = 0; e < COUNT; ++e)
        scratch[((slice - kept) * COUNT + e) * WIDTH + local] = sums[e];
    __syncthreads();
    if (slice < left - kept)
#pragma unroll
      for (int e = 0; e < COUNT; ++e) sums[e] += scratch[(slice * COUNT + e) * WIDTH + local];
    left = kept;
  }
}

// Slices of a block that sum over different tokens what `width` threads hold.
__device__ constexpr int slices_of(int width) {
  return width >= THREADS ? 1 : THREADS / width < 16 ? THREADS / width : 16;
}
