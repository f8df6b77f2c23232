/* exp(-|q - k|_1 / lambda), exp(-|q - k|_2^2 / (2 lambda)) and their gradients for q and k.
 *
 * groups = B * h, n queries, m landmarks, d channels. Tensors are dense and row-major. Sums run in
 * an order that depends on n, m and d alone: the number of threads changes no bit.
 */

/* ---- Forward: the lanes of a vector are queries ---- */

/* Sums in registers: at most LANDMARKS x TOKEN_VECTORS. */
#if defined(__AVX512F__)
enum { LANDMARKS = 8, TOKEN_VECTORS = 3 };
#else
enum { LANDMARKS = 4, TOKEN_VECTORS = 2 };
#endif
/* In the first cache: STRIP x TOKENS distances and CHANNELS x TOKENS of q. */
enum { TOKENS = TOKEN_VECTORS * LANES, STRIP = 64, CHANNELS = 64 };
/* Tiles that a thread takes at once. */
enum { TILES = 8 };

typedef struct {
    const float *q, *k;
    float *output;
    int64_t n, m, d, items;
    float high, low;
    int gaussian;
} Forward;

/* Rows of q as columns of a tile; the last row is repeated up to whole vectors. */
static void transpose_in(const float *q, int64_t d, int64_t rows, int64_t channels,
                         float tile[][TOKENS]) {
    for (int64_t first = 0; first < rows; first += LANES) {
        const float *row[LANES];
        for (int i = 0; i < LANES; ++i) row[i] = q + least(first + i, rows - 1) * d;
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

/* Distances of vectors * LANES queries to a few landmarks over some channels, added to those over
 * the channels before. */
INLINE void add_distances(const float tile[][TOKENS], const float *k, int64_t d, int64_t channels,
                          int landmarks, int vectors, int gaussian, int first,
                          float sums[][TOKENS]) {
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
            float *const to = &sums[r][v * LANES];
            store(to, first ? sum[r][v] : load(to) + sum[r][v]);
        }
}

/* The sums stay in registers where their number is a constant. */
static void add_distances_to(const float tile[][TOKENS], const float *k, int64_t d,
                             int64_t channels, int landmarks, int vectors, int gaussian,
                             int first, float sums[][TOKENS]) {
#define COUNTS(r, v)                                                                \
    case 4 * r + v:                                                                 \
        if (gaussian)                                                               \
            add_distances(tile, k, d, channels, r, v, 1, first, sums);              \
        else                                                                        \
            add_distances(tile, k, d, channels, r, v, 0, first, sums);              \
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
                                 vectors, f->gaussian, c == 0, sums + at);
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

static void forward_item(const void *job, int64_t item) {
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

/* ---- Backward: the lanes of a vector are channels ---- */

/* In registers: QUERIES x CHANNEL_VECTORS of q and of its gradient. */
#if defined(__AVX512F__)
enum { QUERIES = 4, CHANNEL_VECTORS = 2 };
#else
enum { QUERIES = 4, CHANNEL_VECTORS = 1 };
#endif
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

/* Over vectors * LANES channels: the gradients of some queries, and for some landmarks what the
 * queries add to theirs. grad_q and grad_k may be null. */
INLINE void add_gradients(const float *q, const float *k, const float weights[][WEIGHTS],
                          int64_t d, int64_t rows, int64_t landmarks, int vectors, int gaussian,
                          int needs_q, int needs_k, int first, float *grad_q, float *grad_k) {
    Vector x[QUERIES][CHANNEL_VECTORS], sum_q[QUERIES][CHANNEL_VECTORS];
    UNROLL(4) for (int t = 0; t < QUERIES; ++t)
        UNROLL(2) for (int v = 0; v < vectors; ++v) {
            x[t][v] = t < rows ? load(q + t * d + v * LANES) : splat(0);
            sum_q[t][v] = splat(0);
        }
    for (int64_t r = 0; r < landmarks; ++r)
        UNROLL(2) for (int v = 0; v < vectors; ++v) {
            const Vector y = load(k + r * d + v * LANES);
            Vector sum_k = needs_k ? load(grad_k + r * d + v * LANES) : splat(0);
            UNROLL(4) for (int t = 0; t < QUERIES; ++t) {
                const Vector difference = x[t][v] - y;
                const Vector slope = gaussian ? difference : sign(difference);
                const Vector weight = splat(weights[t][r]);
                if (needs_q) sum_q[t][v] = fused(slope, weight, sum_q[t][v]);
                if (needs_k) sum_k = fused(-slope, weight, sum_k);
            }
            if (needs_k) store(grad_k + r * d + v * LANES, sum_k);
        }
    UNROLL(4) for (int t = 0; t < QUERIES; ++t)
        UNROLL(2) for (int v = 0; v < vectors; ++v)
            if (needs_q && t < rows) {
                float *const to = grad_q + t * d + v * LANES;
                store(to, first ? sum_q[t][v] : load(to) + sum_q[t][v]);
            }
}

/* What is constant in add_gradients() costs nothing in its loops. */
static void add_gradients_to(const float *q, const float *k, const float weights[][WEIGHTS],
                             int64_t d, int64_t rows, int64_t landmarks, int vectors,
                             int gaussian, int first, float *grad_q, float *grad_k) {
#define NEEDS(v, g, needs_q, needs_k)                                                        \
    case 8 * v + 4 * g + 2 * needs_q + needs_k:                                              \
        add_gradients(q, k, weights, d, rows, landmarks, v, g, needs_q, needs_k, first,      \
                      grad_q, grad_k);                                                       \
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

/* grad_q of a chunk of queries, and their part of grad_k. */
static void backward_item(const void *job, int64_t item) {
    const Backward *const b = job;
    const int64_t m = b->m, d = b->d, group = item / b->chunks;
    const int64_t end = (group + 1) * b->n;
    const int64_t begin = group * b->n + item % b->chunks * b->chunk;
    const int64_t stop = least(end, begin + b->chunk);
    float *const grad_k = b->partial ? b->partial + item * m * d : 0;
    float weights[QUERIES][WEIGHTS];
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
                add_gradients_to(b->q + row * d + c, b->k + (group * m + r) * d + c, weights, d,
                                 rows, landmarks, (int)least(CHANNEL_VECTORS, (d - c) / LANES),
                                 b->gaussian, r == 0, b->grad_q ? b->grad_q + row * d + c : 0,
                                 grad_k ? grad_k + r * d + c : 0);
        }
    }
}

/* A part of grad_k: the chunks' parts, added in their order. */
static void sum_item(const void *job, int64_t item) {
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
