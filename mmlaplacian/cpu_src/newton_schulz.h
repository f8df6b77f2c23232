/* The Newton-Schulz iteration for one matrix, X <- X + X (I - W X). */
#include "product.h"

/* At most so many rows: what the caches of a core hold. */
enum { LARGEST = 256 };
const int largest = LARGEST;

/* Memory for one matrix: float32 for the steps, float64 for the last one. */
typedef struct {
    float *x, *next, *residual, *negative;
    double *w, *product;
} SolverMemory;

INLINE int64_t solver_floats(int64_t m) { return 4 * m * padded(m); }
INLINE int64_t solver_doubles(int64_t m) { return 2 * padded(m) * padded(m); }

static inline SolverMemory solver_memory(float *floats, double *doubles, int64_t m) {
    const int64_t size = m * padded(m);
    return (SolverMemory){floats, floats + size, floats + 2 * size, floats + 3 * size,
                          doubles, doubles + padded(m) * padded(m)};
}

/* Largest sum of absolute entries of a row. */
static inline float norm_inf(const float *w, int64_t row, int64_t m) {
    float largest_sum = 0;
    for (int64_t i = 0; i < m; ++i) {
        float sum = 0;
        for (int64_t j = 0; j < m; ++j) sum += __builtin_fabsf(w[i * row + j]);
        /* A NaN takes part. */
        if (!(sum <= largest_sum)) largest_sum = sum;
    }
    return largest_sum;
}

/* x64 = W^-1 in float64, with padded rows and columns, for W = w + ridge I with w (m, m) dense,
 * symmetric and positive semidefinite: X_0 = 2 / (|W|_inf + ridge) I. The last of iters steps is
 * taken in float64: it squares what rounding in float32 left. */
static inline void solve(const float *w, float ridge, int64_t m, int64_t iters,
                         SolverMemory memory, double *x64) {
    const int64_t row = padded(m), vectors = row / LANES;
    float *x = memory.x, *next = memory.next;
    float *const residual = memory.residual, *const negative = memory.negative;
    memset(negative, 0, sizeof(float) * (size_t)(m * row));
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < m; ++j) negative[i * row + j] = -w[i * m + j];
        negative[i * row + i] -= ridge;
    }
    const float start = 2 / (norm_inf(negative, row, m) + ridge);
    memset(x, 0, sizeof(float) * (size_t)(m * row));
    for (int64_t i = 0; i < m; ++i) x[i * row + i] = start;
    for (int64_t iter = 1; iter < iters; ++iter) {
        multiply((Matrix){negative, row, 1}, x, row, m, m, vectors, 0, 0, (Rows){residual, row});
        for (int64_t i = 0; i < m; ++i) residual[i * row + i] += 1;
        multiply((Matrix){x, row, 1}, residual, row, m, m, vectors, x, row, (Rows){next, row});
        float *const last = x;
        x = next;
        next = last;
    }
    double *const w64 = memory.w, *const product = memory.product;
    for (int64_t i = 0; i < row; ++i)
        for (int64_t j = 0; j < row; ++j) {
            w64[i * row + j] = i < m ? -(double)negative[i * row + j] : 0;
            x64[i * row + j] = i < m ? x[i * row + j] : 0;
        }
    multiply_doubles(w64, row, x64, row, m, m, m, product, row);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < m; ++j) product[i * row + j] = (i == j) - product[i * row + j];
    multiply_doubles(x64, row, product, row, m, m, m, w64, row);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < m; ++j) x64[i * row + j] += w64[i * row + j];
}
