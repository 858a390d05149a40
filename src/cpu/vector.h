/* One number type and one instruction set: `real`, vectors of it, and names that carry the variant. Included by the
 * files that are compiled once for each variant. FMSA_CPU_VARIANT (f32_avx2, ...) comes from the build. */
#ifndef FMSA_CPU_VECTOR_H
#define FMSA_CPU_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FMSA_CPU_PASTE_(a, b) fmsa_cpu_##a##_##b
#define FMSA_CPU_PASTE(a, b) FMSA_CPU_PASTE_(a, b)
/* FMSA_CPU_NAME(gemm) is fmsa_cpu_gemm_f32_avx2. */
#define FMSA_CPU_NAME(name) FMSA_CPU_PASTE(name, FMSA_CPU_VARIANT)

#ifdef FMSA_CPU_REAL_IS_DOUBLE
typedef double real;
typedef int64_t real_bits;
#else
typedef float real;
typedef int32_t real_bits;
#endif

/* Rows and vectors of the register tile of a matrix product: the accumulators, one row of B and one broadcast element
 * of A fill the registers. */
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, TILE_ROWS = 12, TILE_VECTORS = 2 };
#elif defined(__AVX2__)
enum { VECTOR_BYTES = 32, TILE_ROWS = 6, TILE_VECTORS = 2 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, TILE_ROWS = 6, TILE_VECTORS = 4 };
#else
enum { VECTOR_BYTES = 16, TILE_ROWS = 6, TILE_VECTORS = 2 };
#endif

enum { LANES = VECTOR_BYTES / sizeof(real) };

typedef real vec __attribute__((vector_size(VECTOR_BYTES)));
typedef real_bits ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef real vec_unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

/* Loops over registers must be unrolled to be fast; with a sanitizer's checks in them that would take minutes. */
#if defined(FMSA_CPU_NO_UNROLL)
#define UNROLL
#elif defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE vec vec_load(const real *p) {
    return *(const vec_unaligned *)p;
}

ALWAYS_INLINE void vec_store(real *p, vec v) {
    *(vec_unaligned *)p = v;
}

/* x in every lane. Subtracting zero, which changes no number, is what compilers turn into a broadcast. */
ALWAYS_INLINE vec vec_all(real x) {
    return x - (vec){0};
}

ALWAYS_INLINE ivec ivec_all(real_bits x) {
    return x - (ivec){0};
}

/* a where the mask is all ones, b where it is zero. */
ALWAYS_INLINE vec vec_select(ivec mask, vec a, vec b) {
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

/* The greater one; b where a is NaN. */
ALWAYS_INLINE vec vec_max(vec a, vec b) {
    return vec_select(a > b, a, b);
}

/* All ones in the lanes below count. */
ALWAYS_INLINE ivec lanes_below(int64_t count) {
    ivec lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    return lane < ivec_all((real_bits)count);
}

ALWAYS_INLINE real vec_sum(vec v) {
    real lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

ALWAYS_INLINE real vec_greatest(vec v) {
    real lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
    return lanes[0];
}

#ifdef FMSA_CPU_REAL_IS_DOUBLE

ALWAYS_INLINE vec vec_exp(vec x) {
    for (int i = 0; i < LANES; i++)
        x[i] = exp(x[i]);
    return x;
}

/* For x >= 0; the logarithm of the smallest normal number where x is less. */
ALWAYS_INLINE vec vec_log(vec x) {
    for (int i = 0; i < LANES; i++)
        x[i] = log(x[i] > 0x1p-1022 ? x[i] : 0x1p-1022);
    return x;
}

ALWAYS_INLINE real real_exp(real x) {
    return exp(x);
}

ALWAYS_INLINE real real_log(real x) {
    return log(x);
}

#else

/* exp(x) = 2^n exp(r) with n the integer nearest to x / ln 2 and |r| <= ln 2 / 2. 2^n is applied in two halves, so that
 * results below the normal range are rounded rightly and those above it become infinite. */
ALWAYS_INLINE vec vec_exp(vec x) {
    const float rounder = 0x1.8p23f; /* adding it rounds to an integer, which then stands in the low bits */
    x = vec_select(x < -104.0f, vec_all(-104.0f), x);
    x = vec_select(x > 89.0f, vec_all(89.0f), x);
    const vec shifted = x * 0x1.715476p0f + rounder;
    const ivec n = (ivec)shifted - (ivec)vec_all(rounder);
    const vec n_real = shifted - rounder;
    const vec r = (x - n_real * 0x1.62e4p-1f) - n_real * 0x1.7f7d1cp-20f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const ivec half = n >> 1;
    const vec low = (vec)((half + 127) << 23), high = (vec)((n - half + 127) << 23);
    return p * low * high;
}

/* For x >= 0; the logarithm of the smallest normal number where x is less. x = 2^n m with m in [sqrt(1/2), sqrt(2)). */
ALWAYS_INLINE vec vec_log(vec x) {
    x = vec_select(x > 0x1p-126f, x, vec_all(0x1p-126f));
    const ivec bits = (ivec)x - 0x3f3504f3;
    const ivec n = bits >> 23;
    const vec m = (vec)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    const vec n_real = __builtin_convertvector(n, vec);
    const vec square = m * m;
    vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const vec tail = p * m * square - 0.5f * square - n_real * 2.12194440e-4f;
    return (m + tail) + n_real * 0.693359375f;
}

ALWAYS_INLINE real real_exp(real x) {
    return expf(x);
}

ALWAYS_INLINE real real_log(real x) {
    return logf(x);
}

#endif

#endif
