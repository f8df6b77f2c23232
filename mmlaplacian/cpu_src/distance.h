/* Distances of tokens to landmarks and the kernels' gradients, a tile of tokens at a time.
 *
 * A row of q, of its gradient or of a tile's sums lies at any distance from the one before it;
 * landmarks are dense.
 */
#include "common.h"

/* ---- Distances: the lanes of a vector are tokens ---- */

/* Sums in registers: at most LANDMARKS x TOKEN_VECTORS. */
#if defined(__AVX512F__)
enum { LANDMARKS = 8, TOKEN_VECTORS = 3 };
#else
enum { LANDMARKS = 4, TOKEN_VECTORS = 2 };
#endif
/* In the first cache: CHANNELS x TOKENS of q. */
enum { TOKENS = TOKEN_VECTORS * LANES, CHANNELS = 64 };

/* Rows of q as columns of a tile; the last row is repeated up to whole vectors. */
static inline void transpose_in(const float *q, int64_t q_row, int64_t rows, int64_t channels,
                                float tile[][TOKENS]) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const float *row[LANES];
        for (int i = 0; i < LANES; ++i) row[i] = q + least(first + i, rows - 1) * q_row;
        if (channels < LANES) {
            for (int64_t c = 0; c < channels; ++c)
                for (int i = 0; i < LANES; ++i) tile[c][first + i] = row[i][c];
            continue;
        }
        for (int64_t next = 0; next < channels; next += LANES) {
            /* The last block overlaps the one before it. */
            const int64_t c = least(next, channels - LANES);
            Vector x[LANES];
            for (int i = 0; i < LANES; ++i) x[i] = load(row[i] + c);
            transpose(x);
            for (int i = 0; i < LANES; ++i) store(&tile[c + i][first], x[i]);
        }
    }
}

/* Distances of vectors * LANES queries to a few landmarks over some channels, added to those over
 * the channels before. */
INLINE void add_distances(const float tile[][TOKENS], const float *k, int64_t d, int64_t channels,
                          int landmarks, int vectors, int gaussian, int first,
                          float *sums, int64_t sums_row) {
    Vector sum[LANDMARKS][TOKEN_VECTORS];
    UNROLL(8) for (int r = 0; r < landmarks; ++r)
        UNROLL(3) for (int v = 0; v < vectors; ++v) sum[r][v] = splat(0);
    for (int64_t c = 0; c < channels; ++c)
        UNROLL(8) for (int r = 0; r < landmarks; ++r)
            UNROLL(3) for (int v = 0; v < vectors; ++v) {
                const Vector difference = load(&tile[c][v * LANES]) - k[r * d + c];
                sum[r][v] += gaussian ? difference * difference : absolute(difference);
            }
    UNROLL(8) for (int r = 0; r < landmarks; ++r)
        UNROLL(3) for (int v = 0; v < vectors; ++v) {
            float *const to = sums + r * sums_row + v * LANES;
            store(to, first ? sum[r][v] : load(to) + sum[r][v]);
        }
}

/* The sums stay in registers where their number is a constant. */
static inline void add_distances_to(const float tile[][TOKENS], const float *k, int64_t d,
                                    int64_t channels, int landmarks, int vectors, int gaussian,
                                    int first, float *sums, int64_t sums_row) {
#define COUNTS(r, v)                                                                \
    case 4 * r + v:                                                                 \
        if (gaussian)                                                               \
            add_distances(tile, k, d, channels, r, v, 1, first, sums, sums_row);    \
        else                                                                        \
            add_distances(tile, k, d, channels, r, v, 0, first, sums, sums_row);    \
        break;
    switch (4 * landmarks + vectors) {
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

/* ---- Gradients: the lanes of a vector are channels ---- */

/* In registers: QUERIES x CHANNEL_VECTORS of q and of its gradient. */
#if defined(__AVX512F__)
enum { QUERIES = 4, CHANNEL_VECTORS = 2 };
#else
enum { QUERIES = 4, CHANNEL_VECTORS = 1 };
#endif

/* Gradient of each distance, with zeros for the tokens that are missing to QUERIES. */
typedef struct {
    const float *first;
    int64_t token, landmark;
} Weights;

/* Over vectors * LANES channels: the gradients of some queries, and for some landmarks what the
 * queries add to theirs. grad_q and grad_k may be null. */
INLINE void add_gradients(const float *q, int64_t q_row, const float *k, int64_t d, Weights w,
                          int64_t rows, int64_t landmarks, int vectors, int gaussian,
                          int needs_q, int needs_k, int first, float *grad_q, int64_t grad_q_row,
                          float *grad_k) {
    Vector x[QUERIES][CHANNEL_VECTORS], sum_q[QUERIES][CHANNEL_VECTORS];
    UNROLL(4) for (int t = 0; t < QUERIES; ++t)
        UNROLL(2) for (int v = 0; v < vectors; ++v) {
            x[t][v] = t < rows ? load(q + t * q_row + v * LANES) : splat(0);
            sum_q[t][v] = splat(0);
        }
    for (int64_t r = 0; r < landmarks; ++r)
        UNROLL(2) for (int v = 0; v < vectors; ++v) {
            const Vector y = load(k + r * d + v * LANES);
            Vector sum_k = needs_k ? load(grad_k + r * d + v * LANES) : splat(0);
            UNROLL(4) for (int t = 0; t < QUERIES; ++t) {
                const Vector difference = x[t][v] - y;
                const Vector slope = gaussian ? difference : sign(difference);
                const Vector weight = splat(w.first[t * w.token + r * w.landmark]);
                if (needs_q) sum_q[t][v] = fused(slope, weight, sum_q[t][v]);
                if (needs_k) sum_k = fused(-slope, weight, sum_k);
            }
            if (needs_k) store(grad_k + r * d + v * LANES, sum_k);
        }
    UNROLL(4) for (int t = 0; t < QUERIES; ++t)
        UNROLL(2) for (int v = 0; v < vectors; ++v)
            if (needs_q && t < rows) {
                float *const to = grad_q + t * grad_q_row + v * LANES;
                store(to, first ? sum_q[t][v] : load(to) + sum_q[t][v]);
            }
}

/* What is constant in add_gradients() costs nothing in its loops. */
static inline void add_gradients_to(const float *q, int64_t q_row, const float *k, int64_t d,
                                    Weights w, int64_t rows, int64_t landmarks, int vectors,
                                    int gaussian, int first, float *grad_q, int64_t grad_q_row,
                                    float *grad_k) {
#define NEEDS(v, g, needs_q, needs_k)                                                        \
    case 8 * v + 4 * g + 2 * needs_q + needs_k:                                              \
        add_gradients(q, q_row, k, d, w, rows, landmarks, v, g, needs_q, needs_k, first,     \
                      grad_q, grad_q_row, grad_k);                                           \
        break;
    switch (8 * vectors + 4 * !!gaussian + 2 * !!grad_q + !!grad_k) {
        NEEDS(1, 0, 0, 1) NEEDS(1, 0, 1, 0) NEEDS(1, 0, 1, 1)
        NEEDS(1, 1, 0, 1) NEEDS(1, 1, 1, 0) NEEDS(1, 1, 1, 1)
#if defined(__AVX512F__)
        NEEDS(2, 0, 0, 1) NEEDS(2, 0, 1, 0) NEEDS(2, 0, 1, 1)
        NEEDS(2, 1, 0, 1) NEEDS(2, 1, 1, 0) NEEDS(2, 1, 1, 1)
#endif
    }
#undef NEEDS
}
