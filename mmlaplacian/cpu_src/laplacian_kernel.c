/* exp(-|q - k|_1 / lambda), exp(-|q - k|_2^2 / (2 lambda)) and their gradients for q and k.
 *
 * groups = B * h, n queries, m landmarks, d channels. Tensors are dense and row-major. Sums run in
 * an order that depends on n, m and d alone: the number of threads changes no bit.
 */
#include "distance.h"

/* ---- Forward ---- */

/* In the first cache: STRIP x TOKENS distances. */
enum { STRIP = 64 };
/* Tiles that a thread takes at once. */
enum { TILES = 8 };

typedef struct {
    const float *q, *k;
    float *output;
    int64_t n, m, d, items;
    float high, low;
    int gaussian;
} Forward;

/* Columns of a tile as rows of the output. */
static void transpose_out(const float tile[][TOKENS], int64_t m, int64_t rows, int64_t landmarks,
                          float *output) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const int64_t count = least(LANES, rows - first);
        float *const row = output + first * m;
        if (landmarks < LANES) {
            for (int64_t i = 0; i < count; ++i)
                for (int64_t r = 0; r < landmarks; ++r) row[i * m + r] = tile[r][first + i];
            continue;
        }
        for (int64_t next = 0; next < landmarks; next += LANES) {
            const int64_t r = least(next, landmarks - LANES);
            Vector x[LANES];
            for (int i = 0; i < LANES; ++i) x[i] = load(&tile[r + i][first]);
            transpose(x);
            for (int i = 0; i < LANES; ++i)
                if (i < count) store(row + i * m + r, x[i]);
        }
    }
}

/* At most TOKENS queries with all landmarks of their group; more of them follow the tile. */
static void forward_tile(const Forward *f, const float *q, const float *k, int64_t rows,
                         int64_t following, float *output) {
    const int vectors = (int)ceil_div(rows, LANES);
    const int64_t strips = ceil_div(f->m, STRIP);
    _Alignas(64) float tile[CHANNELS][TOKENS], sums[STRIP][TOKENS];
    for (int64_t strip = 0; strip < strips; ++strip) {
        const int64_t begin = part(f->m, strips, strip);
        const int64_t landmarks = part(f->m, strips, strip + 1) - begin;
        const int64_t blocks = ceil_div(landmarks, LANDMARKS);
        for (int64_t c = 0; c < f->d; c += CHANNELS) {
            const int64_t channels = least(CHANNELS, f->d - c);
            if (strip == 0 || f->d > CHANNELS)
                transpose_in(q + c, f->d, rows, channels, tile);
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t at = part(landmarks, blocks, block);
                const int64_t count = part(landmarks, blocks, block + 1) - at;
                if (strip == 0 && c == 0) {
                    /* A little at a time: memory works while the sums are formed. */
                    prefetch(q + rows * f->d, following * f->d, blocks, block);
                    prefetch_to_write(output, rows * f->m, blocks, block);
                }
                add_distances_to(tile, k + (begin + at) * f->d + c, f->d, channels, (int)count,
                                 vectors, f->gaussian, c == 0, sums[at], TOKENS);
            }
        }
        for (int64_t r = 0; r < landmarks; ++r)
            for (int v = 0; v < vectors; ++v) {
                float *const x = &sums[r][v * LANES];
                store(x, exp2_product(load(x), f->high, f->low));
            }
        transpose_out(sums, f->m, rows, landmarks, output + begin);
    }
}

static void forward_item(const void *job, int64_t item, int worker) {
    (void)worker;
    const Forward *const f = job;
    const int64_t group = item / f->items, first = item % f->items * (TILES * TOKENS);
    const int64_t rows = least(TILES * TOKENS, f->n - first);
    const int64_t tiles = ceil_div(rows, TOKENS), vectors = ceil_div(rows, LANES);
    const float *const q = f->q + (group * f->n + first) * f->d;
    const float *const k = f->k + group * f->m * f->d;
    float *const output = f->output + (group * f->n + first) * f->m;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = part(vectors, tiles, tile) * LANES;
        const int64_t end = least(rows, part(vectors, tiles, tile + 1) * LANES);
        forward_tile(f, q + begin * f->d, k, end - begin, least(TOKENS, rows - end),
                     output + begin * f->m);
    }
}

/* output (groups, n, m) = 2^(distance * (high + low)), of the squared distance if gaussian. */
void laplacian_kernel_forward(const float *q, const float *k, float *output, int gaussian,
                              float high, float low, int64_t groups, int64_t n, int64_t m,
                              int64_t d, int threads) {
    const int64_t items = ceil_div(n, TILES * TOKENS);
    const Forward job = {q, k, output, n, m, d, items, high, low, gaussian};
    for_items(groups * items, threads, forward_item, &job);
}

/* ---- Backward ---- */

/* Landmarks whose weights lie in the first cache, queries from a prefetch to its use, and floats
 * of grad_k that a thread sums at once. */
enum { WEIGHTS = 256, AHEAD = 8, SUMMED = 1024 };

typedef struct {
    const float *grad_output, *q, *k, *output;
    float *grad_q, *partial, *grad_k;
    int64_t n, m, d, chunks, chunk;
    float scale;
    int gaussian;
} Backward;

/* to[i] = a[i] * b[i] * scale */
static void weigh(const float *a, const float *b, float scale, int64_t count, float *to) {
    if (count < LANES) {
        for (int64_t i = 0; i < count; ++i) to[i] = a[i] * b[i] * scale;
        return;
    }
    for (int64_t next = 0; next < count; next += LANES) {
        const int64_t i = least(next, count - LANES);
        store(to + i, load(a + i) * load(b + i) * scale);
    }
}

/* grad_q of a chunk of queries, and their part of grad_k. */
static void backward_item(const void *job, int64_t item, int worker) {
    (void)worker;
    const Backward *const b = job;
    const int64_t m = b->m, d = b->d, group = item / b->chunks;
    const int64_t end = (group + 1) * b->n;
    const int64_t begin = group * b->n + item % b->chunks * b->chunk;
    const int64_t stop = least(end, begin + b->chunk);
    float *const grad_k = b->partial ? b->partial + item * m * d : 0;
    float weights[QUERIES][WEIGHTS];
    const Weights given = {weights[0], WEIGHTS, 1};
    if (grad_k) memset(grad_k, 0, sizeof(float) * (size_t)(m * d));
    for (int64_t row = begin; row < stop; row += QUERIES) {
        const int64_t rows = least(QUERIES, stop - row), ahead = row + AHEAD;
        if (ahead + QUERIES <= stop) {
            prefetch(b->q + ahead * d, QUERIES * d, 1, 0);
            prefetch(b->output + ahead * m, QUERIES * m, 1, 0);
            prefetch(b->grad_output + ahead * m, QUERIES * m, 1, 0);
            if (b->grad_q) prefetch_to_write(b->grad_q + ahead * d, QUERIES * d, 1, 0);
        }
        for (int64_t r = 0; r < m; r += WEIGHTS) {
            const int64_t landmarks = least(WEIGHTS, m - r);
            for (int t = 0; t < QUERIES; ++t) {
                const int64_t at = (row + t) * m + r;
                if (t < rows)
                    weigh(b->grad_output + at, b->output + at, b->scale, landmarks, weights[t]);
                else
                    memset(weights[t], 0, sizeof weights[t]);
            }
            for (int64_t c = 0; c < d; c += CHANNEL_VECTORS * LANES)
                add_gradients_to(b->q + row * d + c, d, b->k + (group * m + r) * d + c, d, given,
                                 rows, landmarks, (int)least(CHANNEL_VECTORS, (d - c) / LANES),
                                 b->gaussian, r == 0, b->grad_q ? b->grad_q + row * d + c : 0, d,
                                 grad_k ? grad_k + r * d + c : 0);
        }
    }
}

/* A part of grad_k: the chunks' parts, added in their order. */
static void sum_item(const void *job, int64_t item, int worker) {
    (void)worker;
    const Backward *const b = job;
    const int64_t size = b->m * b->d, items = ceil_div(size, SUMMED), group = item / items;
    const int64_t begin = item % items * SUMMED, stop = least(size, begin + SUMMED);
    for (int64_t i = begin; i < stop; i += LANES) {
        Vector sum = splat(0);
        for (int64_t chunk = 0; chunk < b->chunks; ++chunk)
            sum += load(b->partial + (group * b->chunks + chunk) * size + i);
        store(b->grad_k + group * size + i, sum);
    }
}

/* Gradients from output and grad_output (groups, n, m); scale = -1 / lambda.
 *
 * d is a multiple of lanes. grad_q may be null; so may grad_k, and then partial (groups,
 * ceil(n / chunk), m, d) too. What lies in these three before is not read. */
void laplacian_kernel_backward(const float *grad_output, const float *q, const float *k,
                               const float *output, float *grad_q, float *partial, float *grad_k,
                               int gaussian, float scale, int64_t groups, int64_t n, int64_t m,
                               int64_t d, int64_t chunk, int threads) {
    const int64_t chunks = ceil_div(n, chunk);
    const Backward job = {grad_output, q, k, output, grad_q, partial, grad_k,
                          n, m, d, chunks, chunk, scale, gaussian};
    for_items(groups * chunks, threads, backward_item, &job);
    if (grad_k) for_items(groups * ceil_div(m * d, SUMMED), threads, sum_item, &job);
}
