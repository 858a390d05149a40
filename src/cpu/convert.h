/* 16-bit floating point, branch-free on integers so that compilers vectorise it on every instruction set. */
#ifndef FMSA_CPU_CONVERT_H
#define FMSA_CPU_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_bf16(uint16_t half) {
    return float_of_bits((uint32_t)half << 16);
}

/* Rounds to nearest, ties to even; NaN stays NaN. */
static inline uint16_t bf16_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

/* The exponent is moved by a product, which normalises subnormal numbers too. */
static inline float float_of_fp16(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    const uint32_t moved = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
    const uint32_t special = magnitude >= 0x0f800000 ? 0x7f800000 : 0; /* infinite or NaN */
    return float_of_bits(moved | special | (uint32_t)(half & 0x8000) << 16);
}

/* Rounds to nearest, ties to even; overflow becomes infinite, NaN stays NaN. */
static inline uint16_t fp16_of_float(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* Adding 0.5 leaves the subnormal result in the low bits of the sum, rounded by the addition. */
    const uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)((magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000));
}

#endif
