/* Vectors of float32, their transposition and exponential, and work shared among threads.
 *
 * Compiled with -march=native and without fast mathematics. A vector is as wide as the processor
 * has registers: LANES is 16 with AVX-512, 8 with AVX2, else 4.
 */
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define UNROLL(count) PRAGMA(clang loop unroll(full))
#else
#define UNROLL(count) PRAGMA(GCC unroll count)
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* The caller pads channels to a multiple of this. */
const int lanes = LANES;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
/* Where part i begins, when total is cut into equal parts. */
INLINE int64_t part(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

INLINE Vector load(const float *from) { return (Vector) * (const Unaligned *)from; }
INLINE void store(float *to, Vector x) { *(Unaligned *)to = x; }
INLINE Vector splat(float x) { return x - (Vector){0}; }
INLINE Vector absolute(Vector x) { return (Vector)((Integers)x & 0x7fffffff); }

/* a * b + c, rounded once where the processor can: compilers keep a product that has two uses. */
INLINE Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Asks memory for part i of count floats. */
INLINE void prefetch(const float *from, int64_t count, int64_t parts, int64_t i) {
    for (int64_t at = part(count, parts, i); at < part(count, parts, i + 1); at += 16)
        __builtin_prefetch(from + at, 0);
}
INLINE void prefetch_to_write(const float *to, int64_t count, int64_t parts, int64_t i) {
    for (int64_t at = part(count, parts, i); at < part(count, parts, i + 1); at += 16)
        __builtin_prefetch(to + at, 1);
}

/* -1, 0 or 1; exactly 0 at 0. A NaN gives 0 or NaN. */
INLINE Vector sign(Vector x) {
#if defined(__AVX512F__)
    /* One instruction: for each class of x (NaN, NaN, 0, 1, -inf, inf, negative, positive), from
     * the lowest four bits up, the code of the result: 2 NaN, 8 zero, 9 minus one, 10 one. */
    const __m512i results = _mm512_set1_epi32((int)0xa9a9a822);
    return (Vector)_mm512_fixupimm_ps((__m512)x, (__m512)x, results, 0);
#else
    return __builtin_convertvector((x < 0.0f) - (x > 0.0f), Vector);
#endif
}

/* Alternates the lanes of the lower halves of a and b, or of the upper ones. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Integers){__VA_ARGS__})
#endif

INLINE Vector alternate_lower(Vector a, Vector b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}

INLINE Vector alternate_upper(Vector a, Vector b) {
#if defined(__AVX512F__)
    return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

/* Each round moves one bit of the row's number into the column's. */
INLINE void transpose(Vector x[LANES]) {
#pragma GCC unroll 4
    for (int round = LANES; round > 1; round /= 2) {
        Vector y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            y[2 * i] = alternate_lower(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = alternate_upper(x[i], x[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) x[i] = y[i];
    }
}

/* 2^(x * (high + low)) for high <= 0 <= x, to 2 ulp where the processor has fused multiply-add;
 * 0 below 2^-126.5; NaN stays NaN.
 *
 * The power of two is split at the nearest integer. 2^f = 1 + f P(f) for |f| <= 1/2, with P of
 * degree 5 fitted to the smallest largest relative error (2e-9): 1 is met exactly at x = 0.
 */
INLINE Vector exp2_product(Vector x, float high, float low) {
    /* Adding it rounds to an integer, and leaves that plus the bias of an exponent below. */
    const float rounder = 0x1.8p23f + 127;
    const Vector rounded = fused(x, splat(high), splat(rounder));
    const Vector whole = rounded - rounder;
    const Vector power = (Vector)((Integers)rounded << 23);
    const Vector f = fused(x, splat(low), fused(x, splat(high), -whole));
    Vector p = f * 0x1.41fbap-13f + 0x1.5f3e8p-10f;
    p = p * f + 0x1.3b2d4ep-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e43p-1f;
    p = p * f + 1.0f;
    return (Vector)((Integers)(p * power) & ~(whole < -126.0f));
}

/* Calls work for every item, on that many threads. Which thread takes an item is left to chance,
 * so an item's result must not depend on it; worker, below threads, tells apart those that work at
 * the same time. One thread does without OpenMP: after a fork its other threads are gone. */
static void for_items(int64_t items, int threads,
                      void (*work)(const void *job, int64_t item, int worker), const void *job) {
    if (threads <= 1) {
        for (int64_t item = 0; item < items; ++item) work(job, item, 0);
        return;
    }
    int64_t next = 0;
    int entered = 0;
#pragma omp parallel num_threads(threads)
    {
        const int worker = __atomic_fetch_add(&entered, 1, __ATOMIC_RELAXED);
        for (;;) {
            const int64_t item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (item >= items) break;
            work(job, item, worker);
        }
    }
}
