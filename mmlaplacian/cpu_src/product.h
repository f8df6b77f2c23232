/* Products of small matrices with tiles of tokens, and of small matrices in float64.
 *
 * Written out, since a tile is too small for a library's call to be cheap.
 */
#include "common.h"

/* ---- float32 ---- */

/* Sums in registers: at most PRODUCT_ROWS x PRODUCT_VECTORS. */
#if defined(__AVX512F__)
enum { PRODUCT_ROWS = 8, PRODUCT_VECTORS = 3 };
#else
enum { PRODUCT_ROWS = 4, PRODUCT_VECTORS = 2 };
#endif

/* A matrix of any strides. */
typedef struct {
    const float *first;
    int64_t row, column;
} Matrix;

/* Rows of vectors, one after the other at a distance. */
typedef struct {
    float *first;
    int64_t row;
} Rows;

INLINE void multiply_block(Matrix a, const float *x, int64_t x_row, int64_t inner, int rows,
                           int vectors, const float *start, int64_t start_row, Rows y) {
    Vector sum[PRODUCT_ROWS][PRODUCT_VECTORS];
    UNROLL(8) for (int r = 0; r < rows; ++r)
        UNROLL(3) for (int v = 0; v < vectors; ++v)
            sum[r][v] = splat(0);
    for (int64_t i = 0; i < inner; ++i) {
        Vector row[PRODUCT_VECTORS];
        UNROLL(3) for (int v = 0; v < vectors; ++v) row[v] = load(x + i * x_row + v * LANES);
        UNROLL(8) for (int r = 0; r < rows; ++r) {
            const Vector factor = splat(a.first[r * a.row + i * a.column]);
            UNROLL(3) for (int v = 0; v < vectors; ++v)
                sum[r][v] = fused(row[v], factor, sum[r][v]);
        }
    }
    UNROLL(8) for (int r = 0; r < rows; ++r)
        UNROLL(3) for (int v = 0; v < vectors; ++v) {
            if (start) sum[r][v] += load(start + r * start_row + v * LANES);
            store(y.first + r * y.row + v * LANES, sum[r][v]);
        }
}

/* y = start + a x, for a (rows, inner) and x (inner, vectors * LANES). start may be null for
 * zeros, or y's own memory; with start_row 0 it is one row for all. It is added last: a long sum
 * made of products of few terms rounds less. */
static inline void multiply(Matrix a, const float *x, int64_t x_row, int64_t inner, int64_t rows,
                            int64_t vectors, const float *start, int64_t start_row, Rows y) {
    const int64_t row_blocks = ceil_div(rows, PRODUCT_ROWS);
    const int64_t vector_blocks = ceil_div(vectors, PRODUCT_VECTORS);
    for (int64_t v = 0; v < vector_blocks; ++v) {
        const int64_t column = part(vectors, vector_blocks, v);
        const int64_t count = part(vectors, vector_blocks, v + 1) - column;
        for (int64_t r = 0; r < row_blocks; ++r) {
            const int64_t row = part(rows, row_blocks, r);
            const Matrix block = {a.first + row * a.row, a.row, a.column};
            const float *const from = start ? start + row * start_row + column * LANES : 0;
            const Rows to = {y.first + row * y.row + column * LANES, y.row};
#define COUNTS(r, v)                                                                       \
    case 4 * r + v:                                                                        \
        multiply_block(block, x + column * LANES, x_row, inner, r, v, from, start_row, to); \
        break;
            switch (4 * (part(rows, row_blocks, r + 1) - row) + count) {
                COUNTS(1, 1) COUNTS(2, 1) COUNTS(3, 1) COUNTS(4, 1)
                COUNTS(1, 2) COUNTS(2, 2) COUNTS(3, 2) COUNTS(4, 2)
#if defined(__AVX512F__)
                COUNTS(5, 1) COUNTS(6, 1) COUNTS(7, 1) COUNTS(8, 1)
                COUNTS(5, 2) COUNTS(6, 2) COUNTS(7, 2) COUNTS(8, 2)
                COUNTS(1, 3) COUNTS(2, 3) COUNTS(3, 3) COUNTS(4, 3)
                COUNTS(5, 3) COUNTS(6, 3) COUNTS(7, 3) COUNTS(8, 3)
#endif
            }
#undef COUNTS
        }
    }
}

/* A block of PAIRS x PAIRS entries of x y^T. */
#if defined(__AVX512F__)
enum { PAIRS = 4 };
#else
enum { PAIRS = 2 };
#endif

/* Vectors of sums that add_pairs() and add_lanes() need for rows of x and y, a multiple of PAIRS. */
INLINE int64_t pair_sums(int64_t rows) {
    const int64_t blocks = rows / PAIRS;
    return ceil_div(blocks * (blocks + 1) / 2 * PAIRS * PAIRS, LANES) * LANES;
}

/* Adds the lower half of x y^T, a block at a time, each entry as one vector of sums: they are
 * added up across lanes once, by add_lanes(). */
static inline void add_pairs(const float *x, const float *y, int64_t row, int64_t rows,
                             int64_t vectors, float *sums) {
    for (int64_t i = 0; i < rows; i += PAIRS)
        for (int64_t j = 0; j <= i; j += PAIRS, sums += PAIRS * PAIRS * LANES) {
            Vector sum[PAIRS][PAIRS];
            UNROLL(4) for (int a = 0; a < PAIRS; ++a)
                UNROLL(4) for (int b = 0; b < PAIRS; ++b)
                    sum[a][b] = load(sums + (a * PAIRS + b) * LANES);
            for (int64_t v = 0; v < vectors; ++v) {
                Vector left[PAIRS];
                UNROLL(4) for (int a = 0; a < PAIRS; ++a)
                    left[a] = load(x + (i + a) * row + v * LANES);
                UNROLL(4) for (int b = 0; b < PAIRS; ++b) {
                    const Vector right = load(y + (j + b) * row + v * LANES);
                    UNROLL(4) for (int a = 0; a < PAIRS; ++a)
                        sum[a][b] = fused(left[a], right, sum[a][b]);
                }
            }
            UNROLL(4) for (int a = 0; a < PAIRS; ++a)
                UNROLL(4) for (int b = 0; b < PAIRS; ++b)
                    store(sums + (a * PAIRS + b) * LANES, sum[a][b]);
        }
}

/* Adds up the lanes of each of count vectors, a multiple of LANES: count numbers in their place. */
static inline void add_lanes(float *sums, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Vector x[LANES];
        UNROLL(16) for (int a = 0; a < LANES; ++a) x[a] = load(sums + (i + a) * LANES);
        transpose(x);
        for (int step = LANES / 2; step > 0; step /= 2)
            for (int a = 0; a < step; ++a) x[a] += x[a + step];
        store(sums + i, x[0]);
    }
}

/* ---- float64 ---- */

/* Numbers of a vector, and rows that are worked on at once: dense matrices have their columns
 * padded to DOUBLES and their rows to DOUBLE_ROWS. */
enum { DOUBLES = LANES / 2, DOUBLE_ROWS = 4, DOUBLE_VECTORS = 4 };

typedef double Double __attribute__((vector_size(4 * LANES)));
typedef double UnalignedDouble
    __attribute__((vector_size(4 * LANES), aligned(8), may_alias));

INLINE int64_t padded(int64_t m) { return ceil_div(m, LANES) * LANES; }

INLINE void multiply_doubles_block(const double *a, int64_t a_row, const double *b, int64_t b_row,
                                   int64_t inner, int vectors, double *c, int64_t c_row) {
    Double sum[DOUBLE_ROWS][DOUBLE_VECTORS];
    UNROLL(4) for (int r = 0; r < DOUBLE_ROWS; ++r)
        UNROLL(4) for (int v = 0; v < vectors; ++v) sum[r][v] = (Double){0};
    for (int64_t i = 0; i < inner; ++i)
        UNROLL(4) for (int v = 0; v < vectors; ++v) {
            const Double row = (Double) * (const UnalignedDouble *)(b + i * b_row + v * DOUBLES);
            UNROLL(4) for (int r = 0; r < DOUBLE_ROWS; ++r)
                sum[r][v] += row * a[r * a_row + i];
        }
    UNROLL(4) for (int r = 0; r < DOUBLE_ROWS; ++r)
        UNROLL(4) for (int v = 0; v < vectors; ++v)
            *(UnalignedDouble *)(c + r * c_row + v * DOUBLES) = sum[r][v];
}

/* c = a b for a (rows, inner) and b (inner, columns); rows and columns are padded, what lies
 * there is computed with the rest. */
static inline void multiply_doubles(const double *a, int64_t a_row, const double *b,
                                    int64_t b_row, int64_t rows, int64_t inner, int64_t columns,
                                    double *c, int64_t c_row) {
    const int64_t vectors = ceil_div(columns, DOUBLES);
    const int64_t blocks = ceil_div(vectors, DOUBLE_VECTORS);
    for (int64_t r = 0; r < rows; r += DOUBLE_ROWS)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = part(vectors, blocks, block);
            const double *const left = a + r * a_row, *const right = b + first * DOUBLES;
            double *const to = c + r * c_row + first * DOUBLES;
#define VECTORS(v)                                                              \
    case v:                                                                     \
        multiply_doubles_block(left, a_row, right, b_row, inner, v, to, c_row); \
        break;
            switch (part(vectors, blocks, block + 1) - first) {
                VECTORS(1) VECTORS(2) VECTORS(3) VECTORS(4)
            }
#undef VECTORS
        }
}

/* A factor L (m, m), S = L L^T but for rounding, of a symmetric positive semidefinite S (m, m) that
 * is known to float32: Cholesky's with the largest pivot first, until what is left is below the
 * rounding of S. Further columns are zero. Rows and columns are padded, with zeros in S; S is
 * used up. column holds padded(m) numbers. */
static inline void pivoted_cholesky(double *restrict s, int64_t m, double *restrict column,
                                    double *restrict factor) {
    const int64_t row = padded(m);
    double least_pivot = 0;
    memset(factor, 0, sizeof(double) * (size_t)(row * row));
    for (int64_t j = 0; j < m; ++j) {
        int64_t at = 0;
        for (int64_t i = 1; i < m; ++i)
            if (s[i * row + i] > s[at * row + at]) at = i;
        const double pivot = s[at * row + at];
        if (j == 0) least_pivot = pivot * 0x1p-23;
        if (!(pivot > least_pivot)) break;
        const double scale = 1 / __builtin_sqrt(pivot);
        for (int64_t i = 0; i < row; ++i) column[i] = s[at * row + i] * scale;
        for (int64_t i = 0; i < m; ++i) {
            factor[i * row + j] = column[i];
            for (int64_t c = 0; c < row; c += DOUBLES) {
                UnalignedDouble *const to = (UnalignedDouble *)(s + i * row + c);
                *to -= *(const UnalignedDouble *)(column + c) * column[i];
            }
        }
    }
}
