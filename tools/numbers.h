/* Rounding to the library's number formats, and their encoding in memory: nearest, ties to even. */
#ifndef FMSA_TOOL_NUMBERS_H
#define FMSA_TOOL_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "flashmsa.h"

static inline uint32_t fmsa_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float fmsa_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Keeps the sign, the exponent and all but the low `dropped` bits of the significand. */
static inline float fmsa_drop_bits(float x, int dropped) {
    uint32_t bits = fmsa_float_bits(x);
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return fmsa_float_from_bits(bits >> dropped << dropped);
}

static inline float fmsa_round_bf16(float x) {
    return isfinite(x) ? fmsa_drop_bits(x, 16) : x;
}

static inline float fmsa_round_fp16(float x) {
    if (!isfinite(x)) return x;
    if (fabsf(x) < 0x1p-14f) return rintf(x * 0x1p24f) * 0x1p-24f;
    const float rounded = fmsa_drop_bits(x, 13);
    return fabsf(rounded) >= 0x1p16f ? copysignf(INFINITY, x) : rounded;
}

static inline double fmsa_round(double x, fmsa_dtype dtype) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        return fmsa_round_bf16((float)x);
    case FMSA_DTYPE_FP16:
        return fmsa_round_fp16((float)x);
    case FMSA_DTYPE_FP32:
        return (float)x;
    case FMSA_DTYPE_FP64:
        break;
    }
    return x;
}

/* Half the distance between 1 and the next number: the relative error of one rounding. */
static inline double fmsa_unit_roundoff(fmsa_dtype dtype) {
    const double roundoff[] = {[FMSA_DTYPE_BF16] = 0x1p-9,
                               [FMSA_DTYPE_FP16] = 0x1p-12,
                               [FMSA_DTYPE_FP32] = 0x1p-24,
                               [FMSA_DTYPE_FP64] = 0x1p-53};
    return roundoff[dtype];
}

static inline uint16_t fmsa_encode_fp16(float x) {
    const float rounded = fmsa_round_fp16(x);
    const uint16_t sign = fmsa_float_bits(x) >> 31 << 15;
    if (isnan(x)) return sign | 0x7e00;
    if (isinf(rounded)) return sign | 0x7c00;
    if (fabsf(rounded) < 0x1p-14f) return sign | (uint16_t)(fabsf(rounded) * 0x1p24f);
    const uint32_t bits = fmsa_float_bits(fabsf(rounded));
    return sign | (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

static inline float fmsa_decode_fp16(uint16_t half) {
    const int exponent = half >> 10 & 31, significand = half & 1023;
    float magnitude = ldexpf((float)(1024 + significand), exponent - 25);
    if (exponent == 0) magnitude = ldexpf((float)significand, -24);
    if (exponent == 31) magnitude = significand ? NAN : INFINITY;
    return half >> 15 ? -magnitude : magnitude;
}

/* Element `index` of an array of dtype. */
static inline void fmsa_encode(void *array, int64_t index, fmsa_dtype dtype, double x) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        ((uint16_t *)array)[index] = isnan(x) ? 0x7fc0 : (uint16_t)(fmsa_float_bits(fmsa_round_bf16((float)x)) >> 16);
        break;
    case FMSA_DTYPE_FP16:
        ((uint16_t *)array)[index] = fmsa_encode_fp16((float)x);
        break;
    case FMSA_DTYPE_FP32:
        ((float *)array)[index] = (float)x;
        break;
    case FMSA_DTYPE_FP64:
        ((double *)array)[index] = x;
        break;
    }
}

static inline double fmsa_decode(const void *array, int64_t index, fmsa_dtype dtype) {
    switch (dtype) {
    case FMSA_DTYPE_BF16:
        return fmsa_float_from_bits((uint32_t)((const uint16_t *)array)[index] << 16);
    case FMSA_DTYPE_FP16:
        return fmsa_decode_fp16(((const uint16_t *)array)[index]);
    case FMSA_DTYPE_FP32:
        return ((const float *)array)[index];
    case FMSA_DTYPE_FP64:
        break;
    }
    return ((const double *)array)[index];
}

#endif
