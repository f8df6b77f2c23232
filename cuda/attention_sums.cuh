// Sums over the tokens of a chunk, which threads keep in registers, and their merge over chunks:
// squares of C^T C, pieces of C^T V. After attention_tile.cuh.

// ---- C^T C -------------------------------------------------------------------------------------
// The lower triangle in squares of 8 x 8; a thread has one of them for a slice of the tokens of
// each tile. Chunks keep square entry by square entry, so that neighbouring threads write beside
// each other.

constexpr int PAIRS = OCTETS * (OCTETS + 1) / 2;
constexpr int PAIR_SLICES = slices_of(PAIRS);

// Square (a, b), b <= a, of a pair's index.
__device__ __forceinline__ int2 octets_of(int pair) {
  int a = 0;
  while ((a + 1) * (a + 2) / 2 <= pair) ++a;
  return make_int2(a, pair - a * (a + 1) / 2);
}

// square[8 i + j] += factor times entry i of one octet and j of the other of a row in shared
// memory.
__device__ __forceinline__ void add_square(float square[64], const float *row, int2 octets,
                                           float factor) {
  const float4 *const quads = reinterpret_cast<const float4 *>(row);
  const float4 a0 = quads[2 * octets.x], a1 = quads[2 * octets.x + 1];
  const float4 b0 = quads[2 * octets.y], b1 = quads[2 * octets.y + 1];
  const float a[8] = {factor * a0.x, factor * a0.y, factor * a0.z, factor * a0.w,
                      factor * a1.x, factor * a1.y, factor * a1.z, factor * a1.w};
  const float b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) square[8 * i + j] = fmaf(a[i], b[j], square[8 * i + j]);
}

// ---- C^T V -------------------------------------------------------------------------------------
// A thread has eight landmarks x four value channels for a slice of the tokens of each tile, or
// more than one such piece where there are more than threads.

constexpr int PIECES = OCTETS * VALUE_QUADS;
constexpr int PIECES_A_THREAD = (PIECES + THREADS - 1) / THREADS;
constexpr int PIECE_THREADS = PIECES_A_THREAD > 1 ? THREADS : PIECES;
constexpr int PIECE_SLICES = slices_of(PIECE_THREADS);
constexpr int VALUE_ROWS = THREADS / VALUE_QUADS < TILE ? THREADS / VALUE_QUADS : TILE;
#if (LANDMARKS + 7) / 8 * ((VALUE_DIM + 3) / 4) > 64 * M_THREADS
#error "LANDMARKS x VALUE_DIM is more than a block's registers hold"
#endif

// Fills v_tile with a tile's values, each token times its factor (factors may be null), and adds
// the values themselves to `sum`, of every VALUE_ROWS-th token and the thread's channels.
__device__ __forceinline__ void load_values(float *v_tile, const float *factors,
                                            const Tokens &values, long long first, int count,
                                            float4 &sum) {
  const int row = threadIdx.x / VALUE_QUADS, channel = threadIdx.x % VALUE_QUADS * 4;
  if (row >= VALUE_ROWS) return;
  for (int token = row; token < TILE; token += VALUE_ROWS) {
    const float4 value = load_channels<VALUE_DIM>(values, first + token, channel, token < count);
    sum = make_float4(sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w);
    const float factor = factors ? factors[token] : 1.f;
    *reinterpret_cast<float4 *>(v_tile + token * VALUE_STRIDE + channel) =
        make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
  }
}

// context += c_tile^T v_tile over `count` tokens.
__device__ __forceinline__ void add_pieces(float context[32 * PIECES_A_THREAD],
                                           const float *c_tile, const float *v_tile, int count) {
  const int slice = threadIdx.x / PIECE_THREADS, piece = threadIdx.x % PIECE_THREADS;
  if (slice >= PIECE_SLICES) return;
#pragma unroll 2
  for (int token = slice; token < count; token += PIECE_SLICES)
#pragma unroll
    for (int i = 0; i < PIECES_A_THREAD; ++i) {
      const int own = piece + i * PIECE_THREADS;
      if (own >= PIECES) continue;
      const float4 *const row = reinterpret_cast<const float4 *>(
          c_tile + token * KERNEL_STRIDE + own / VALUE_QUADS * 8);
      const float4 a0 = row[0], a1 = row[1];
      const float4 b = *reinterpret_cast<const float4 *>(
          v_tile + token * VALUE_STRIDE + own % VALUE_QUADS * 4);
      const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        float *const sums = context + 32 * i + 4 * r;
        sums[0] = fmaf(a[r], b.x, sums[0]);
        sums[1] = fmaf(a[r], b.y, sums[1]);
        sums[2] = fmaf(a[r], b.z, sums[2]);
        sums[3] = fmaf(a[r], b.w, sums[3]);
      }
    }
}

constexpr int PIECE_SCRATCH =
    larger(32 * PIECE_THREADS * (PIECE_SLICES / 2), 4 * VALUE_ROWS * VALUE_QUADS);

// Writes a chunk's context (m, d_v) and, behind it, its sum of values (d_v). scratch has
// PIECE_SCRATCH floats.
__device__ __forceinline__ void store_pieces(float *to, float context[32 * PIECES_A_THREAD],
                                             float4 value_sum, float *scratch) {
  add_slices<32 * PIECES_A_THREAD, PIECE_THREADS, PIECE_SLICES>(context, scratch);
  if (threadIdx.x < PIECE_THREADS) {
#pragma unroll
    for (int i = 0; i < PIECES_A_THREAD; ++i) {
      const int own = threadIdx.x + i * PIECE_THREADS;
      if (own >= PIECES) continue;
      const int landmark = own / VALUE_QUADS * 8, channel = own % VALUE_QUADS * 4;
#pragma unroll
      for (int e = 0; e < 32; ++e)
        if (landmark + e / 4 < LANDMARKS && channel + e % 4 < VALUE_DIM)
          to[(landmark + e / 4) * VALUE_DIM + channel + e % 4] = context[32 * i + e];
    }
  }
  __syncthreads();  // the slices' sums, or the last tile, have been read
  const int row = threadIdx.x / VALUE_QUADS;
  if (row < VALUE_ROWS) reinterpret_cast<float4 *>(scratch)[threadIdx.x] = value_sum;
  __syncthreads();
  for (int channel = threadIdx.x; channel < VALUE_DIM; channel += THREADS) {
    float sum = 0.f;
    for (int i = 0; i < VALUE_ROWS; ++i) sum += scratch[i * VALUE_QUADS * 4 + channel];
    to[LANDMARKS * VALUE_DIM + channel] = sum;
  }
}

// ---- merge -------------------------------------------------------------------------------------

constexpr int MERGE_COLUMNS = 32, MERGE_ROWS = 8, MERGE_THREADS = MERGE_COLUMNS * MERGE_ROWS;

__device__ __forceinline__ int merge_row() { return threadIdx.x / MERGE_COLUMNS; }
__device__ __forceinline__ int merge_column() { return threadIdx.x % MERGE_COLUMNS; }

// Sum over the rows of a merging block, for all of them.
__device__ __forceinline__ float sum_of_rows(float (*sums)[MERGE_COLUMNS], float value) {
  __syncthreads();  // the previous sums have been read
  sums[merge_row()][merge_column()] = value;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int row = 0; row < MERGE_ROWS; ++row) sum += sums[row][merge_column()];
  return sum;
}

// Sum over chunks, `stride` floats apart, of an entry that may be absent.
__device__ __forceinline__ float sum_of_chunks(float (*sums)[MERGE_COLUMNS], const float *first,
                                               long long n_chunks, int stride, bool present) {
  float sum = 0.f;
  if (present)
#pragma unroll 2
    for (long long chunk = merge_row(); chunk < n_chunks; chunk += MERGE_ROWS)
      sum += first[chunk * stride];
  return sum_of_rows(sums, sum);
}
