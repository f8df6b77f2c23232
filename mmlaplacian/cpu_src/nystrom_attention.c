/* The whitened Nystrom attention and its gradients in passes over tiles of tokens.
 *
 * For a group (an image and a head), with c_i = k(q_i, landmarks), c_j = k(k_j, landmarks) as
 * columns, P = W^-1, mean and Sigma those of the c_i over the queries:
 *
 *     s_j = (c_j^T P Sigma P c_j + whiten_eps)^(-1/2)
 *     E = P sum_j c_j s_j v_j^T,    out_i = (c_i - mean)^T E / N + mean_j v_j.
 *
 * The forward's variance is |R^T c_j|^2 with R = P L and the Cholesky factor L L^T = Sigma: one
 * product instead of two. Matrices without N are multiplied in float64: P is large where landmarks
 * are alike, and would show float32's rounding. What is summed over tokens in float32 must not be
 * multiplied by P on both sides, for the same reason.
 *
 * Tensors of tokens have any strides but dense channels, whose number is a multiple of lanes.
 * Kernel matrices of a batch of groups are kept from one pass to the next where they fit into
 * KEPT floats, else computed again. Sums run in an order that depends on the sizes alone.
 */
#include "distance.h"
#include "newton_schulz.h"

/* Tokens of a tile: whole blocks of the kernel's and the products' registers. */
enum { TILE = 4 * TOKENS };
/* Tokens that a thread takes at once, and at most how many times a group has them. */
enum { CHUNK = 768, CHUNKS = 64 };
/* Floats of a batch of groups: what the caches of two cores hold. */
enum { KEPT = 1 << 20 };
/* Tokens (B, h, N, channels): strides in floats. */
typedef struct {
    float *first;
    int64_t image, head, token;
} Tokens;

typedef struct {
    int64_t heads, n, m, d, d_v;
    int gaussian;
    /* The kernel is 2^(distance * (high + low)). */
    float high, low, whiten_eps;
    const float *landmarks;
    int64_t tiles, chunks;
    /* Tiles of the queries' kernel matrix, if kept. */
    float *kept;
    /* Groups of the batch that is worked on. */
    int64_t first, batch;
} Passes;

/* Memory is cut from one block, or with first null only counted. */
typedef struct {
    float *first;
    int64_t used;
} Arena;

static float *take(Arena *arena, int64_t floats) {
    float *const taken = arena->first ? arena->first + arena->used : 0;
    arena->used += ceil_div(floats, 16) * 16;
    return taken;
}
static double *take_doubles(Arena *arena, int64_t doubles) {
    return (double *)take(arena, 2 * doubles);
}

static float *tokens_of(Tokens x, int64_t heads, int64_t group) {
    return x.first + group / heads * x.image + group % heads * x.head;
}
static int64_t padded_rows(int64_t m) { return ceil_div(m, PAIRS) * PAIRS; }

/* A chunk of a group of the batch, and its tiles. */
typedef struct {
    int64_t local, group, tile, stop;
} Chunk;

static Chunk chunk_of(const Passes *p, int64_t item) {
    const int64_t local = item / p->chunks, i = item % p->chunks;
    return (Chunk){local, p->first + local, part(p->tiles, p->chunks, i),
                   part(p->tiles, p->chunks, i + 1)};
}
static int64_t tile_rows(const Passes *p, int64_t tile) {
    return least(TILE, p->n - tile * TILE);
}
static int64_t vectors_of(int64_t rows) { return ceil_div(rows, LANES); }

/* c (m, TILE) = k(tokens, landmarks)^T for the tokens of a tile; columns up to a whole vector
 * repeat the last one. */
static void kernel_tile(const Passes *p, const float *x, int64_t x_row, int64_t group,
                        int64_t rows, float *c) {
    const float *const landmarks = p->landmarks + group * p->m * p->d;
    const int64_t blocks = ceil_div(p->m, LANDMARKS);
    _Alignas(64) float tile[CHANNELS][TOKENS];
    for (int64_t first = 0; first < rows; first += TOKENS) {
        const int64_t count = least(TOKENS, rows - first);
        const int vectors = (int)vectors_of(count);
        for (int64_t channel = 0; channel < p->d; channel += CHANNELS) {
            const int64_t channels = least(CHANNELS, p->d - channel);
            transpose_in(x + first * x_row + channel, x_row, count, channels, tile);
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t at = part(p->m, blocks, block);
                add_distances_to(tile, landmarks + at * p->d + channel, p->d, channels,
                                 (int)(part(p->m, blocks, block + 1) - at), vectors, p->gaussian,
                                 channel == 0, c + at * TILE + first, TILE);
            }
        }
        for (int64_t r = 0; r < p->m; ++r)
            for (int v = 0; v < vectors; ++v) {
                float *const to = c + r * TILE + first + v * LANES;
                store(to, exp2_product(load(to), p->high, p->low));
            }
    }
}

/* The queries' kernel tile: kept, computed into what is kept, or computed into c. */
static float *query_tile(const Passes *p, Tokens q, Chunk chunk, int64_t tile, int first_pass,
                         float *c) {
    if (p->kept) {
        c = p->kept + (chunk.local * p->tiles + tile) * p->m * TILE;
        if (!first_pass) return c;
    }
    const float *const x = tokens_of(q, p->heads, chunk.group) + tile * TILE * q.token;
    kernel_tile(p, x, q.token, chunk.group, tile_rows(p, tile), c);
    return c;
}

/* Zeros from column rows up to a whole vector. */
static void clear_tail(float *x, int64_t m, int64_t rows) {
    const int64_t stop = vectors_of(rows) * LANES;
    if (rows == stop) return;
    for (int64_t r = 0; r < m; ++r)
        memset(x + r * TILE + rows, 0, sizeof(float) * (size_t)(stop - rows));
}

/* to = c - mean for each landmark. */
static void center(const float *c, const float *mean, int64_t m, int64_t vectors, float *to) {
    for (int64_t r = 0; r < m; ++r)
        for (int64_t v = 0; v < vectors; ++v)
            store(to + r * TILE + v * LANES, load(c + r * TILE + v * LANES) - mean[r]);
}

/* Channels of tokens as rows (channels, TILE), less shift where there is one. */
static void transposed_tile(const float *x, int64_t x_row, int64_t rows, int64_t channels,
                            const float *shift, float *to) {
    _Alignas(64) float tile[CHANNELS][TOKENS];
    for (int64_t first = 0; first < rows; first += TOKENS) {
        const int64_t count = least(TOKENS, rows - first);
        for (int64_t channel = 0; channel < channels; channel += CHANNELS) {
            const int64_t some = least(CHANNELS, channels - channel);
            transpose_in(x + first * x_row + channel, x_row, count, some, tile);
            for (int64_t c = 0; c < some; ++c)
                for (int64_t v = 0; v < vectors_of(count); ++v)
                    store(to + (channel + c) * TILE + first + v * LANES,
                          load(&tile[c][v * LANES]) - (shift ? shift[channel + c] : 0));
        }
    }
}

/* Adds the sum of tokens to (channels). */
static void add_tokens(const float *x, int64_t x_row, int64_t rows, int64_t channels,
                       float *sum) {
    const float one = 1;
    multiply((Matrix){&one, 0, 0}, x, x_row, rows, 1, channels / LANES, sum, 0, (Rows){sum, 0});
}

/* Adds c^T-weighted tokens to (m, channels): sum_t c[r][t] x_t, a few of them at a time, since P
 * multiplies what the sum loses. */
static void add_weighted_tokens(const float *c, const float *x, int64_t x_row, int64_t rows,
                                int64_t m, int64_t channels, float *sum) {
    for (int64_t first = 0; first < rows; first += TOKENS)
        multiply((Matrix){c + first, TILE, 1}, x + first * x_row, x_row,
                 least(TOKENS, rows - first), m, channels / LANES, sum, channels,
                 (Rows){sum, channels});
}

/* to_t = start + c_t^T e for each token t, with e (m, channels). */
static void combine(const float *c, const float *e, int64_t rows, int64_t m, int64_t channels,
                    const float *start, float *to, int64_t to_row) {
    multiply((Matrix){c, 1, TILE}, e, channels, m, rows, channels / LANES, start, 0,
             (Rows){to, to_row});
}

/* (m, m) in float64 with padded rows and columns, which are zero, from float32. */
static void widen(const float *from, int64_t rows, int64_t columns, double *to) {
    const int64_t row = padded(columns);
    memset(to, 0, sizeof(double) * (size_t)(padded(rows) * row));
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) to[i * row + j] = from[i * columns + j];
}

/* Of a matrix that is symmetric but for rounding. */
static void make_symmetric(double *x, int64_t m) {
    const int64_t row = padded(m);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < i; ++j)
            x[i * row + j] = x[j * row + i] = (x[i * row + j] + x[j * row + i]) / 2;
}

static void narrow(const double *from, int64_t rows, int64_t columns, double scale, float *to) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
            to[i * columns + j] = (float)(from[i * padded(columns) + j] * scale);
}

/* The sums of add_pairs() as a symmetric matrix in float64, row numbers apart; sums are used up. */
static void full_matrix(float *sums, int64_t m, double *to, int64_t row) {
    add_lanes(sums, pair_sums(padded_rows(m)));
    for (int64_t i = 0; i < padded_rows(m); i += PAIRS)
        for (int64_t j = 0; j <= i; j += PAIRS)
            for (int64_t a = i; a < i + PAIRS; ++a)
                for (int64_t b = j; b < j + PAIRS; ++b, ++sums)
                    if (a < m && b <= a) to[a * row + b] = to[b * row + a] = *sums;
}

/* Sums of the rows of x over a tile, added to lanes (m rounded up to LANES, LANES). */
static void add_row_sums(const float *x, int64_t m, int64_t vectors, float *lanes_of_rows) {
    for (int64_t r = 0; r < m; ++r) {
        Vector sum = load(lanes_of_rows + r * LANES);
        for (int64_t v = 0; v < vectors; ++v) sum += load(x + r * TILE + v * LANES);
        store(lanes_of_rows + r * LANES, sum);
    }
}

/* Sums of the chunks' (rows, columns), in their order, in float64 with padded columns. */
static void sum_of_chunks(const float *from, int64_t chunks, int64_t rows, int64_t columns,
                          double *to) {
    const int64_t row = padded(columns);
    widen(from, rows, columns, to);
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                to[i * row + j] += from[(chunk * rows + i) * columns + j];
}

/* R = P L (m, m) for P in float64; matrices holds three of P's size. */
static void factor_of(const double *p, const float *covariance, int64_t m, double *matrices,
                      float *factor) {
    const int64_t row = padded(m);
    double *const sigma = matrices, *const lower = sigma + row * row;
    double *const product = lower + row * row;
    widen(covariance, m, m, sigma);
    pivoted_cholesky(sigma, m, product, lower);
    multiply_doubles(p, row, lower, row, m, m, m, product, row);
    narrow(product, m, m, 1, factor);
}

/* ---- Forward ---- */

typedef struct {
    Passes passes;
    Tokens q, k, v, out;
    const float *w;
    float *p, *context, *mean, *covariance;
    float ridge;
    int64_t iters;
    /* Of each chunk of the batch: mean and scatter of C over its queries, sums over its keys. */
    double *chunk_mean, *chunk_scatter;
    float *chunk_context, *chunk_values;
    /* Of each group of the batch: P, R, E / N and the mean value. */
    double *inverse;
    float *factor, *scaled_context, *mean_value;
    /* Of each worker. */
    float *c, *centered, *sums, *row_sums, *solver;
    double *matrices;
    int64_t matrix;
} Forward;

static void set_forward_memory(Forward *f, Arena *arena, int64_t batch, int keeps, int threads) {
    Passes *const p = &f->passes;
    const int64_t m = p->m, rows = padded_rows(m), chunks = batch * p->chunks;
    p->kept = keeps ? take(arena, batch * p->tiles * m * TILE) : 0;
    f->chunk_mean = take_doubles(arena, chunks * m);
    f->chunk_scatter = take_doubles(arena, chunks * m * m);
    f->chunk_context = take(arena, chunks * m * p->d_v);
    f->chunk_values = take(arena, chunks * p->d_v);
    f->inverse = take_doubles(arena, batch * padded(m) * padded(m));
    f->factor = take(arena, batch * m * m);
    f->scaled_context = take(arena, batch * m * p->d_v);
    f->mean_value = take(arena, batch * p->d_v);
    f->c = take(arena, threads * rows * TILE);
    f->centered = take(arena, threads * rows * TILE);
    f->sums = take(arena, threads * pair_sums(rows) * LANES);
    f->row_sums = take(arena, threads * padded(m) * LANES);
    f->solver = take(arena, threads * solver_floats(m));
    f->matrix = padded(m) * (m > p->d_v ? padded(m) : padded(p->d_v));
    f->matrices = take_doubles(arena, threads * 4 * f->matrix);
}

/* Mean and scatter of the kernel's rows over the queries of a chunk, about the mean of its first
 * tile: the plain sums of squares would cancel. */
static void statistics_item(const void *job, int64_t item, int worker) {
    const Forward *const f = job;
    const Passes *const p = &f->passes;
    const int64_t m = p->m, padded_m = padded_rows(m);
    const Chunk chunk = chunk_of(p, item);
    float *const own = f->c + worker * padded_m * TILE;
    float *const centered = f->centered + worker * padded_m * TILE;
    float *const sums = f->sums + worker * pair_sums(padded_m) * LANES;
    float *const row_sums = f->row_sums + worker * padded(m) * LANES;
    float shift[LARGEST];
    int64_t count = 0;
    memset(sums, 0, sizeof(float) * (size_t)(pair_sums(padded_m) * LANES));
    memset(row_sums, 0, sizeof(float) * (size_t)(padded(m) * LANES));
    memset(centered + m * TILE, 0, sizeof(float) * (size_t)((padded_m - m) * TILE));
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile), vectors = vectors_of(rows);
        const float *const c = query_tile(p, f->q, chunk, tile, 1, own);
        if (tile == chunk.tile) {
            add_row_sums(c, m, rows / LANES, row_sums);
            add_lanes(row_sums, padded(m));
            for (int64_t r = 0; r < m; ++r) {
                shift[r] = row_sums[r];
                for (int64_t t = rows / LANES * LANES; t < rows; ++t) shift[r] += c[r * TILE + t];
                shift[r] /= (float)rows;
            }
            memset(row_sums, 0, sizeof(float) * (size_t)(padded(m) * LANES));
        }
        center(c, shift, m, vectors, centered);
        clear_tail(centered, m, rows);
        add_row_sums(centered, m, vectors, row_sums);
        add_pairs(centered, centered, TILE, padded_m, vectors, sums);
        count += rows;
    }
    double *const mean = f->chunk_mean + item * m, *const scatter = f->chunk_scatter + item * m * m;
    full_matrix(sums, m, scatter, m);
    add_lanes(row_sums, padded(m));
    for (int64_t r = 0; r < m; ++r) mean[r] = row_sums[r] / (double)count;
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < m; ++j) scatter[i * m + j] -= (double)count * mean[i] * mean[j];
    for (int64_t r = 0; r < m; ++r) mean[r] += shift[r];
}

/* Mean and covariance of a group, chunks merged about their own means (Chan et al. 1979), P
 * and R. */
static void factor_item(const void *job, int64_t item, int worker) {
    const Forward *const f = job;
    const Passes *const p = &f->passes;
    const int64_t m = p->m, group = p->first + item;
    double *const mean = f->chunk_mean + item * p->chunks * m;
    double *const scatter = f->chunk_scatter + item * p->chunks * m * m;
    double count = 0;
    for (int64_t i = 0; i < p->chunks; ++i) {
        const int64_t begin = part(p->tiles, p->chunks, i) * TILE;
        const int64_t end = least(p->n, part(p->tiles, p->chunks, i + 1) * TILE);
        const double length = (double)(end - begin), share = length / (count + length);
        if (i > 0) {
            const double *const other = mean + i * m;
            for (int64_t a = 0; a < m; ++a)
                for (int64_t b = 0; b < m; ++b)
                    scatter[a * m + b] += scatter[i * m * m + a * m + b]
                        + count * share * (other[a] - mean[a]) * (other[b] - mean[b]);
            for (int64_t a = 0; a < m; ++a) mean[a] += (other[a] - mean[a]) * share;
        }
        count += length;
    }
    float *const covariance = f->covariance + group * m * m;
    for (int64_t i = 0; i < m; ++i) f->mean[group * m + i] = (float)mean[i];
    for (int64_t i = 0; i < m * m; ++i) covariance[i] = (float)(scatter[i] / count);

    double *const inverse = f->inverse + item * padded(m) * padded(m);
    double *const matrices = f->matrices + worker * 4 * f->matrix;
    solve(f->w + group * m * m, f->ridge, m, f->iters,
          solver_memory(f->solver + worker * solver_floats(m), matrices, m), inverse);
    make_symmetric(inverse, m);
    narrow(inverse, m, m, 1, f->p + group * m * m);
    factor_of(inverse, covariance, m, matrices, f->factor + item * m * m);
}

/* Adds the squares of a tile's rows to (TILE). */
static void add_squares(const float *y, int64_t rows, int64_t vectors, float *sums) {
    for (int64_t v = 0; v < vectors; ++v) {
        Vector sum = load(sums + v * LANES);
        for (int64_t r = 0; r < rows; ++r) {
            const Vector x = load(y + r * TILE + v * LANES);
            sum = fused(x, x, sum);
        }
        store(sums + v * LANES, sum);
    }
}

/* Context C_k^T sqrt(D) V and the sum of V over the keys of a chunk. */
static void context_item(const void *job, int64_t item, int worker) {
    const Forward *const f = job;
    const Passes *const p = &f->passes;
    const int64_t m = p->m;
    const Chunk chunk = chunk_of(p, item);
    const float *const factor = f->factor + chunk.local * m * m;
    float *const c = f->c + worker * padded_rows(m) * TILE;
    float *const context = f->chunk_context + item * m * p->d_v;
    float *const values = f->chunk_values + item * p->d_v;
    _Alignas(64) float y[PRODUCT_ROWS * TILE], scale[TILE];
    memset(context, 0, sizeof(float) * (size_t)(m * p->d_v));
    memset(values, 0, sizeof(float) * (size_t)p->d_v);
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile), vectors = vectors_of(rows), at = tile * TILE;
        kernel_tile(p, tokens_of(f->k, p->heads, chunk.group) + at * f->k.token, f->k.token,
                    chunk.group, rows, c);
        memset(scale, 0, sizeof scale);
        for (int64_t r = 0; r < m; r += PRODUCT_ROWS) {
            const int64_t count = least(PRODUCT_ROWS, m - r);
            multiply((Matrix){factor + r, 1, m}, c, TILE, m, count, vectors, 0, 0,
                     (Rows){y, TILE});
            add_squares(y, count, vectors, scale);
        }
        for (int64_t t = 0; t < rows; ++t)
            scale[t] = 1 / __builtin_sqrtf(scale[t] + p->whiten_eps);
        for (int64_t r = 0; r < m; ++r)
            for (int64_t v = 0; v < vectors; ++v) {
                float *const to = c + r * TILE + v * LANES;
                store(to, load(to) * load(scale + v * LANES));
            }
        const float *const x = tokens_of(f->v, p->heads, chunk.group) + at * f->v.token;
        add_weighted_tokens(c, x, f->v.token, rows, m, p->d_v, context);
        add_tokens(x, f->v.token, rows, p->d_v, values);
    }
}

/* E of a group, and the mean value. */
static void mix_item(const void *job, int64_t item, int worker) {
    const Forward *const f = job;
    const Passes *const p = &f->passes;
    const int64_t m = p->m, d_v = p->d_v, group = p->first + item, row = padded(d_v);
    const double n = (double)p->n;
    const double *const inverse = f->inverse + item * padded(m) * padded(m);
    double *const sum = f->matrices + worker * 4 * f->matrix, *const product = sum + f->matrix;
    sum_of_chunks(f->chunk_context + item * p->chunks * m * d_v, p->chunks, m, d_v, sum);
    multiply_doubles(inverse, padded(m), sum, row, m, m, d_v, product, row);
    narrow(product, m, d_v, 1, f->context + group * m * d_v);
    narrow(product, m, d_v, 1 / n, f->scaled_context + item * m * d_v);
    sum_of_chunks(f->chunk_values + item * p->chunks * d_v, p->chunks, 1, d_v, sum);
    narrow(sum, 1, d_v, 1 / n, f->mean_value + item * d_v);
}

static void output_item(const void *job, int64_t item, int worker) {
    const Forward *const f = job;
    const Passes *const p = &f->passes;
    const int64_t m = p->m;
    const Chunk chunk = chunk_of(p, item);
    float *const own = f->c + worker * padded_rows(m) * TILE;
    float *const centered = f->centered + worker * padded_rows(m) * TILE;
    float *const out = tokens_of(f->out, p->heads, chunk.group);
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile);
        const float *const c = query_tile(p, f->q, chunk, tile, 0, own);
        center(c, f->mean + chunk.group * m, m, vectors_of(rows), centered);
        combine(centered, f->scaled_context + chunk.local * m * p->d_v, rows, m, p->d_v,
                f->mean_value + chunk.local * p->d_v, out + tile * TILE * f->out.token,
                f->out.token);
    }
}

static Passes passes_of(const float *landmarks, int gaussian, float high, float low,
                        float whiten_eps, int64_t heads, int64_t n, int64_t m, int64_t d,
                        int64_t d_v) {
    return (Passes){.heads = heads, .n = n, .m = m, .d = d, .d_v = d_v, .gaussian = gaussian,
                    .high = high, .low = low, .whiten_eps = whiten_eps, .landmarks = landmarks,
                    .tiles = ceil_div(n, TILE), .chunks = least(CHUNKS, ceil_div(n, CHUNK))};
}
static Tokens tokens(const float *first, const int64_t *strides) {
    return (Tokens){(float *)first, strides[0], strides[1], strides[2]};
}

/* p = W^-1 (groups, m, m) for W = w + ridge I, context (groups, m, d_v) = E, mean (groups, m) and
 * covariance (groups, m, m) of C_q, and out.
 *
 * groups = B * heads. q, k, v and out have the strides (image, head, token) in floats, one after
 * the other in strides; landmarks (groups, m, d) and w = k(landmarks, landmarks) (groups, m, m)
 * are dense. d and d_v are multiples of lanes, m is at most largest, groups and n are at least 1.
 * With scratch null it only says how many floats that needs. */
void nystrom_attention_forward(const float *q, const float *k, const float *v,
                               const float *landmarks, const float *w, float *out,
                               const int64_t *strides, float *p, float *context, float *mean,
                               float *covariance, float *scratch, int64_t *floats, float ridge,
                               int64_t iters, int gaussian, float high, float low,
                               float whiten_eps, int64_t groups, int64_t heads, int64_t n,
                               int64_t m, int64_t d, int64_t d_v, int threads) {
    Forward f = {.passes = passes_of(landmarks, gaussian, high, low, whiten_eps, heads, n, m, d,
                                     d_v),
                 .q = tokens(q, strides), .k = tokens(k, strides + 3),
                 .v = tokens(v, strides + 6), .out = tokens(out, strides + 9), .w = w, .p = p,
                 .context = context, .mean = mean, .covariance = covariance, .ridge = ridge,
                 .iters = iters};
    Arena one = {0, 0}, arena = {scratch, 0};
    set_forward_memory(&f, &one, 1, 1, 0);
    const int keeps = one.used <= KEPT;
    const int64_t batch = keeps ? least(groups, KEPT / one.used) : 1;
    set_forward_memory(&f, &arena, batch, keeps, threads);
    *floats = arena.used;
    if (!scratch) return;
    for (f.passes.first = 0; f.passes.first < groups; f.passes.first += batch) {
        const int64_t some = least(batch, groups - f.passes.first);
        const int64_t chunks = some * f.passes.chunks;
        for_items(chunks, threads, statistics_item, &f);
        for_items(some, threads, factor_item, &f);
        for_items(chunks, threads, context_item, &f);
        for_items(some, threads, mix_item, &f);
        for_items(chunks, threads, output_item, &f);
    }
}

/* ---- Backward ---- */

typedef struct {
    Passes passes;
    Tokens q, k, v, grad_out, grad_q, grad_k, grad_v;
    const float *p, *context, *mean, *covariance;
    float *grad_landmarks, *grad_w;
    /* Gradient of the kernel's exponent for its distance. */
    float slope;
    /* Of each chunk of the batch: the gradients of E * N, Sigma and the landmarks, and the sum of
     * grad_out. */
    float *chunk_context, *chunk_landmarks, *chunk_values;
    double *chunk_covariance;
    /* Of each group of the batch: E / N, the gradients of E, of P^-1 E and (doubled, by N) of
     * Sigma, the mean of grad_out. */
    float *scaled_context, *grad_context, *grad_sum, *grad_covariance, *mean_grad;
    /* Of each worker. */
    float *c, *changed, *projected, *weights, *transposed, *sums;
    double *matrices;
    int64_t matrix;
} Backward;

static void set_backward_memory(Backward *b, Arena *arena, int64_t batch, int keeps,
                                int threads) {
    Passes *const p = &b->passes;
    const int64_t m = p->m, rows = padded_rows(m), chunks = batch * p->chunks;
    p->kept = keeps ? take(arena, batch * p->tiles * m * TILE) : 0;
    b->chunk_context = take(arena, chunks * m * p->d_v);
    b->chunk_landmarks = take(arena, chunks * m * p->d);
    b->chunk_values = take(arena, chunks * p->d_v);
    b->chunk_covariance = take_doubles(arena, chunks * m * m);
    b->scaled_context = take(arena, batch * m * p->d_v);
    b->grad_context = take(arena, batch * m * p->d_v);
    b->grad_sum = take(arena, batch * m * p->d_v);
    b->grad_covariance = take(arena, batch * m * m);
    b->mean_grad = take(arena, batch * p->d_v);
    b->c = take(arena, threads * rows * TILE);
    b->changed = take(arena, threads * rows * TILE);
    b->projected = take(arena, threads * rows * TILE);
    b->weights = take(arena, threads * m * TILE);
    b->transposed = take(arena, threads * p->d_v * TILE);
    b->sums = take(arena, threads * pair_sums(rows) * LANES);
    b->matrix = padded(m) * (m > p->d_v ? padded(m) : padded(p->d_v));
    b->matrices = take_doubles(arena, threads * 4 * b->matrix);
}

/* What E and the mean of V get from the queries of a chunk. */
static void grad_context_item(const void *job, int64_t item, int worker) {
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t m = p->m, d_v = p->d_v, row = b->grad_out.token;
    const Chunk chunk = chunk_of(p, item);
    float *const own = b->c + worker * padded_rows(m) * TILE;
    float *const centered = b->changed + worker * padded_rows(m) * TILE;
    float *const context = b->chunk_context + item * m * d_v;
    float *const values = b->chunk_values + item * d_v;
    memset(context, 0, sizeof(float) * (size_t)(m * d_v));
    memset(values, 0, sizeof(float) * (size_t)d_v);
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile);
        const float *const c = query_tile(p, b->q, chunk, tile, 1, own);
        const float *const grad =
            tokens_of(b->grad_out, p->heads, chunk.group) + tile * TILE * row;
        center(c, b->mean + chunk.group * m, m, vectors_of(rows), centered);
        add_weighted_tokens(centered, grad, row, rows, m, d_v, context);
        add_tokens(grad, row, rows, d_v, values);
    }
}

/* The gradients of E and of P^-1 E, the mean of grad_out, and E / N. */
static void grad_sum_item(const void *job, int64_t item, int worker) {
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t m = p->m, d_v = p->d_v, group = p->first + item, row = padded(d_v);
    const double n = (double)p->n;
    double *const inverse = b->matrices + worker * 4 * b->matrix;
    double *const sum = inverse + b->matrix, *const product = sum + b->matrix;
    widen(b->p + group * m * m, m, m, inverse);
    sum_of_chunks(b->chunk_context + item * p->chunks * m * d_v, p->chunks, m, d_v, sum);
    multiply_doubles(inverse, padded(m), sum, row, m, m, d_v, product, row);
    narrow(sum, m, d_v, 1 / n, b->grad_context + item * m * d_v);
    narrow(product, m, d_v, 1 / n, b->grad_sum + item * m * d_v);
    sum_of_chunks(b->chunk_values + item * p->chunks * d_v, p->chunks, 1, d_v, sum);
    narrow(sum, 1, d_v, 1 / n, b->mean_grad + item * d_v);
    for (int64_t i = 0; i < m * d_v; ++i)
        b->scaled_context[item * m * d_v + i] = (float)(b->context[group * m * d_v + i] / n);
}

/* Takes the gradient of a tile's distances to its tokens and the landmarks. */
static void add_kernel_gradients(const Passes *p, int64_t group, int64_t rows, const float *x,
                                 int64_t x_row, const float *weights, float *grad,
                                 int64_t grad_row, float *grad_landmarks) {
    const float *const landmarks = p->landmarks + group * p->m * p->d;
    for (int64_t t = 0; t < rows; t += QUERIES)
        for (int64_t c = 0; c < p->d; c += CHANNEL_VECTORS * LANES)
            add_gradients_to(x + t * x_row + c, x_row, landmarks + c, p->d,
                             (Weights){weights + t, 1, TILE}, least(QUERIES, rows - t), p->m,
                             (int)least(CHANNEL_VECTORS, (p->d - c) / LANES), p->gaussian, 1,
                             grad + t * grad_row + c, grad_row, grad_landmarks + c);
}

/* weights = gradient of the distances from that of the kernel, zero past the last token. */
static void weigh_kernel(const float *c, float slope, int64_t m, int64_t rows, float *weights) {
    for (int64_t r = 0; r < m; ++r)
        for (int64_t v = 0; v < vectors_of(rows); ++v) {
            float *const to = weights + r * TILE + v * LANES;
            store(to, load(to) * load(c + r * TILE + v * LANES) * slope);
        }
    clear_tail(weights, m, rows);
}

/* to = a x for a symmetric or plain (m, m) and x (m, TILE). */
static void multiply_square(const float *a, const float *x, int64_t m, int64_t vectors,
                            float *to) {
    multiply((Matrix){a, m, 1}, x, TILE, m, m, vectors, 0, 0, (Rows){to, TILE});
}

/* Sum over the rows of x * y for each token, (TILE). */
static void column_products(const float *x, const float *y, int64_t m, int64_t vectors,
                            float *sums) {
    for (int64_t v = 0; v < vectors; ++v) {
        Vector sum = splat(0);
        for (int64_t i = v * LANES; i < m * TILE; i += TILE)
            sum = fused(load(x + i), load(y + i), sum);
        store(sums + v * LANES, sum);
    }
}

/* to = x, each token times its own factor. */
static void scale_tokens(const float *x, const float *factors, int64_t m, int64_t vectors,
                         float *to) {
    for (int64_t r = 0; r < m; ++r)
        for (int64_t v = 0; v < vectors; ++v)
            store(to + r * TILE + v * LANES,
                  load(x + r * TILE + v * LANES) * load(factors + v * LANES));
}

/* The keys of a chunk: their gradients, those of their values, what Sigma and the landmarks get
 * from them. Here k = P c, with variance k^T Sigma k. */
static void grad_key_item(const void *job, int64_t item, int worker) {
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t m = p->m, d_v = p->d_v, padded_m = padded_rows(m);
    const Chunk chunk = chunk_of(p, item);
    const float *const inverse = b->p + chunk.group * m * m;
    float *const c = b->c + worker * padded_m * TILE;
    float *const changed = b->changed + worker * padded_m * TILE;
    float *const projected = b->projected + worker * padded_m * TILE;
    float *const weights = b->weights + worker * m * TILE;
    float *const values = b->transposed + worker * d_v * TILE;
    float *const sums = b->sums + worker * pair_sums(padded_m) * LANES;
    float *const landmarks = b->chunk_landmarks + item * m * p->d;
    const size_t missing = sizeof(float) * (size_t)((padded_m - m) * TILE);
    _Alignas(64) float scale[TILE], grad_variance[TILE], twice[TILE];
    memset(sums, 0, sizeof(float) * (size_t)(pair_sums(padded_m) * LANES));
    memset(landmarks, 0, sizeof(float) * (size_t)(m * p->d));
    memset(projected + m * TILE, 0, missing);
    memset(changed + m * TILE, 0, missing);
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile), vectors = vectors_of(rows), at = tile * TILE;
        const float *const key = tokens_of(b->k, p->heads, chunk.group) + at * b->k.token;
        const float *const value = tokens_of(b->v, p->heads, chunk.group) + at * b->v.token;
        kernel_tile(p, key, b->k.token, chunk.group, rows, c);
        multiply_square(inverse, c, m, vectors, projected);
        multiply_square(b->covariance + chunk.group * m * m, projected, m, vectors, changed);
        transposed_tile(value, b->v.token, rows, d_v, 0, values);
        multiply((Matrix){b->grad_context + chunk.local * m * d_v, d_v, 1}, values, TILE, d_v, m,
                 vectors, 0, 0, (Rows){weights, TILE});

        column_products(projected, changed, m, vectors, scale);
        column_products(projected, weights, m, vectors, grad_variance);
        for (int64_t t = 0; t < vectors * LANES; ++t) {
            const float variance = scale[t] < 0 ? 0 : scale[t];
            /* Below 0 by rounding the variance is held there. */
            const float used = scale[t] < 0 ? 0 : 1;
            scale[t] = 1 / __builtin_sqrtf(variance + p->whiten_eps);
            grad_variance[t] *= scale[t] * scale[t] * scale[t] * used * -0.5f;
            twice[t] = 2 * grad_variance[t];
        }
        for (int64_t r = 0; r < m; ++r)
            for (int64_t v = 0; v < vectors; ++v) {
                const int64_t i = r * TILE + v * LANES;
                store(weights + i, fused(load(changed + i), load(twice + v * LANES),
                                         load(weights + i) * load(scale + v * LANES)));
            }
        multiply_square(inverse, weights, m, vectors, changed);
        weigh_kernel(c, b->slope, m, rows, changed);
        add_kernel_gradients(p, chunk.group, rows, key, b->k.token, changed,
                             tokens_of(b->grad_k, p->heads, chunk.group) + at * b->grad_k.token,
                             b->grad_k.token, landmarks);

        scale_tokens(projected, grad_variance, m, vectors, changed);
        clear_tail(changed, m, rows);
        add_pairs(changed, projected, TILE, padded_m, vectors, sums);
        scale_tokens(c, scale, m, vectors, changed);
        combine(changed, b->grad_sum + chunk.local * m * d_v, rows, m, d_v,
                b->mean_grad + chunk.local * d_v,
                tokens_of(b->grad_v, p->heads, chunk.group) + at * b->grad_v.token,
                b->grad_v.token);
    }
    full_matrix(sums, m, b->chunk_covariance + item * m * m, m);
}

/* From the gradient S of Sigma that of W: with dP = -P dW P it is -S Sigma P - P Sigma S, and
 * -grad_sum E^T since E = P (P^-1 E). */
static void grad_w_item(const void *job, int64_t item, int worker) {
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t m = p->m, d_v = p->d_v, group = p->first + item, row = padded(m);
    double *const first = b->matrices + worker * 4 * b->matrix;
    double *const second = first + b->matrix, *const third = second + b->matrix;
    double *const fourth = third + b->matrix;
    float *const grad_w = b->grad_w + group * m * m;
    double *const sum = b->chunk_covariance + item * p->chunks * m * m;
    for (int64_t chunk = 1; chunk < p->chunks; ++chunk)
        for (int64_t i = 0; i < m * m; ++i) sum[i] += sum[chunk * m * m + i];
    memset(first, 0, sizeof(double) * (size_t)(row * row));
    for (int64_t i = 0; i < m; ++i)
        memcpy(first + i * row, sum + i * m, sizeof(double) * (size_t)m);
    narrow(first, m, m, 2 / (double)p->n, b->grad_covariance + item * m * m);
    widen(b->covariance + group * m * m, m, m, second);
    multiply_doubles(first, row, second, row, m, m, m, third, row);
    widen(b->p + group * m * m, m, m, first);
    multiply_doubles(third, row, first, row, m, m, m, second, row);

    widen(b->grad_sum + item * m * d_v, m, d_v, first);
    memset(third, 0, sizeof(double) * (size_t)(padded(d_v) * row));
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < d_v; ++j)
            third[j * row + i] = b->context[(group * m + i) * d_v + j];
    multiply_doubles(first, padded(d_v), third, row, m, d_v, m, fourth, row);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < m; ++j)
            grad_w[i * m + j] =
                (float)(-second[i * row + j] - second[j * row + i] - fourth[i * row + j]);
}

/* The queries of a chunk: their gradients, and what the landmarks get from them. */
static void grad_query_item(const void *job, int64_t item, int worker) {
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t m = p->m, d_v = p->d_v;
    const Chunk chunk = chunk_of(p, item);
    float *const own = b->c + worker * padded_rows(m) * TILE;
    float *const centered = b->changed + worker * padded_rows(m) * TILE;
    float *const weights = b->weights + worker * m * TILE;
    float *const grads = b->transposed + worker * d_v * TILE;
    for (int64_t tile = chunk.tile; tile < chunk.stop; ++tile) {
        const int64_t rows = tile_rows(p, tile), vectors = vectors_of(rows), at = tile * TILE;
        const float *const c = query_tile(p, b->q, chunk, tile, 0, own);
        center(c, b->mean + chunk.group * m, m, vectors, centered);
        transposed_tile(tokens_of(b->grad_out, p->heads, chunk.group) + at * b->grad_out.token,
                        b->grad_out.token, rows, d_v, b->mean_grad + chunk.local * d_v, grads);
        multiply((Matrix){b->scaled_context + chunk.local * m * d_v, d_v, 1}, grads, TILE, d_v, m,
                 vectors, 0, 0, (Rows){weights, TILE});
        multiply((Matrix){b->grad_covariance + chunk.local * m * m, m, 1}, centered, TILE, m, m,
                 vectors, weights, TILE, (Rows){weights, TILE});
        weigh_kernel(c, b->slope, m, rows, weights);
        add_kernel_gradients(p, chunk.group, rows,
                             tokens_of(b->q, p->heads, chunk.group) + at * b->q.token, b->q.token,
                             weights,
                             tokens_of(b->grad_q, p->heads, chunk.group) + at * b->grad_q.token,
                             b->grad_q.token, b->chunk_landmarks + item * m * p->d);
    }
}

static void grad_landmarks_item(const void *job, int64_t item, int worker) {
    (void)worker;
    const Backward *const b = job;
    const Passes *const p = &b->passes;
    const int64_t size = p->m * p->d;
    const float *const chunks = b->chunk_landmarks + item * p->chunks * size;
    for (int64_t i = 0; i < size; i += LANES) {
        Vector sum = load(chunks + i);
        for (int64_t chunk = 1; chunk < p->chunks; ++chunk) sum += load(chunks + chunk * size + i);
        store(b->grad_landmarks + (p->first + item) * size + i, sum);
    }
}

/* Gradients of q, k and v, of the landmarks (groups, m, d) as far as C_q and C_k depend on them,
 * and of W (groups, m, m), from grad_out and what the forward kept.
 *
 * Sizes as in the forward; strides of q, k, v, grad_out, grad_q, grad_k, grad_v. slope = -1 /
 * lambda. */
void nystrom_attention_backward(const float *q, const float *k, const float *v,
                                const float *landmarks, const float *p, const float *context,
                                const float *mean, const float *covariance,
                                const float *grad_out, float *grad_q, float *grad_k,
                                float *grad_v, const int64_t *strides, float *grad_landmarks,
                                float *grad_w, float *scratch, int64_t *floats, int gaussian,
                                float high, float low, float slope, float whiten_eps,
                                int64_t groups, int64_t heads, int64_t n, int64_t m, int64_t d,
                                int64_t d_v, int threads) {
    Backward b = {.passes = passes_of(landmarks, gaussian, high, low, whiten_eps, heads, n, m, d,
                                      d_v),
                  .q = tokens(q, strides), .k = tokens(k, strides + 3),
                  .v = tokens(v, strides + 6), .grad_out = tokens(grad_out, strides + 9),
                  .grad_q = tokens(grad_q, strides + 12), .grad_k = tokens(grad_k, strides + 15),
                  .grad_v = tokens(grad_v, strides + 18), .p = p, .context = context,
                  .mean = mean, .covariance = covariance, .grad_landmarks = grad_landmarks,
                  .grad_w = grad_w, .slope = slope};
    Arena one = {0, 0}, arena = {scratch, 0};
    set_backward_memory(&b, &one, 1, 1, 0);
    const int keeps = one.used <= KEPT;
    const int64_t batch = keeps ? least(groups, KEPT / one.used) : 1;
    set_backward_memory(&b, &arena, batch, keeps, threads);
    *floats = arena.used;
    if (!scratch) return;
    for (b.passes.first = 0; b.passes.first < groups; b.passes.first += batch) {
        const int64_t some = least(batch, groups - b.passes.first);
        const int64_t chunks = some * b.passes.chunks;
        for_items(chunks, threads, grad_context_item, &b);
        for_items(some, threads, grad_sum_item, &b);
        for_items(chunks, threads, grad_key_item, &b);
        for_items(some, threads, grad_w_item, &b);
        for_items(chunks, threads, grad_query_item, &b);
        for_items(some, threads, grad_landmarks_item, &b);
    }
}
