/* Tiles of the portable kernels: matrices in shared memory, and the fragments of 16 x 8 x 16 products read from them.
 *
 * A tile of [rows][columns] lies in rows cut into chunks of 16 bytes whose place within the row is permuted, so that
 * the eight rows of an 8 x 8 matrix always fall on different banks.
 *
 * 16-bit elements enter m16n8k16 as they are. An fp32 element x is split into high = x rounded to TF32 and low = x -
 * high, and a product takes three of TF32: high * high, high * low and low * high. What is dropped (low * low, and
 * low's own rounding) is at most 2^-21 of the product of the magnitudes. */
#ifndef FMSA_CUDA_TILE_CUH
#define FMSA_CUDA_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ptx.cuh"

namespace fmsa {

/* One operand, in registers: 16 x 16 on the left, 16 x 8 on the right. 16 bits: as ptx.cuh says. fp32: the two halves
 * of the inner dimension one after the other, each as m16n8k8 has it but for the order of the inner dimension: lane t
 * of four has places 2t and 2t + 1 of eight instead of t and t + 4, as it has them in an accumulator. */
template <typename T>
struct left_fragment {
    uint32_t x[4];
};
template <>
struct left_fragment<float> {
    float x[8];
};
template <typename T>
struct right_fragment {
    uint32_t x[2];
};
template <>
struct right_fragment<float> {
    float x[4];
};

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const left_fragment<T> &a, const right_fragment<T> &b) {
    mma_m16n8k16(sum, a.x, b.x[0], b.x[1], T());
}

/* x in two TF32 numbers, each rounded to nearest: cut off instead, both parts would lean towards zero, and the errors
 * of large scores would add up. An infinite or NaN x has low part 0, so that it comes out of the product as it went in.
 */
__device__ __forceinline__ void split(float x, uint32_t &high, uint32_t &low) {
    high = to_tf32(x);
    const float rest = x - __uint_as_float(high);
    low = isfinite(rest) ? to_tf32(rest) : 0;
}

/* The tensor cores cut their fp32 sums instead of rounding them, and over the thousands of rows that a key gradient
 * sums that would show: each product is summed apart, and added to the rest by an ordinary addition. */
template <>
__device__ __forceinline__ void multiply_add<float>(float (&sum)[4], const left_fragment<float> &a,
                                                    const right_fragment<float> &b) {
    float product[4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x = a.x[4 * half + i];
            asm volatile(""
                         : "+f"(x)); /* Split here: a fragment kept split through a loop costs twice the registers. */
            split(x, a_high[i], a_low[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            split(b.x[2 * half + i], b_high[i], b_low[i]);
        mma_m16n8k8_tf32(product, a_low, b_high[0], b_high[1]);
        mma_m16n8k8_tf32(product, a_high, b_low[0], b_low[1]);
        mma_m16n8k8_tf32(product, a_high, b_high[0], b_high[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[i] += product[i];
}

/* Two neighbouring elements of a tensor. */
template <typename T>
__device__ __forceinline__ void store_pair(T *place, float x, float y) {
    *reinterpret_cast<uint32_t *>(place) = pack_pair(x, y, T());
}
template <>
__device__ __forceinline__ void store_pair<float>(float *place, float x, float y) {
    *reinterpret_cast<float2 *>(place) = make_float2(x, y);
}

/* Two neighbouring 16 x 8 results, as the left operand of the next product. */
template <typename T>
__device__ __forceinline__ left_fragment<T> to_left_fragment(const float (&first)[4], const float (&second)[4]) {
    return {pack_pair(first[0], first[1], T()), pack_pair(first[2], first[3], T()),
            pack_pair(second[0], second[1], T()), pack_pair(second[2], second[3], T())};
}
template <>
__device__ __forceinline__ left_fragment<float> to_left_fragment<float>(const float (&first)[4],
                                                                        const float (&second)[4]) {
    return {first[0], first[2], first[1], first[3], second[0], second[2], second[1], second[3]};
}

/* Where the chunks of a tile lie. */
template <typename T, int columns>
struct tile_layout {
    static constexpr int row_bytes = columns * sizeof(T);
    static constexpr int chunks = row_bytes / 16;

    uint32_t address;

    __device__ __forceinline__ explicit tile_layout(uint32_t start) : address(start) {
    }

    /* Bytes that a tile takes. */
    static constexpr __host__ __device__ int bytes(int rows) {
        return rows * row_bytes;
    }

    __device__ __forceinline__ uint32_t at(int row, int chunk) const {
        constexpr int rows_a_line = chunks < 8 ? 8 / chunks : 1;
        constexpr int mask = (chunks < 8 ? chunks : 8) - 1;
        return address + row * row_bytes + ((chunk ^ ((row / rows_a_line) & mask)) << 4);
    }

    /* Starts the copy of eight elements from global memory, or of zeros. */
    __device__ __forceinline__ void load(int row, int eighth, const T *source, bool valid) const {
        constexpr int pieces = 8 * sizeof(T) / 16;
#pragma unroll
        for (int i = 0; i < pieces; i++)
            cp_async_16(at(row, pieces * eighth + i), source + i * 16 / sizeof(T), valid);
    }
};

/* A tile in shared memory. */
template <typename T, int columns>
struct tile : tile_layout<T, columns> {
    using tile_layout<T, columns>::tile_layout;
    using tile_layout<T, columns>::at;

    /* Rows row ... row + 15, columns 16 * step ... + 15, as the left operand. */
    __device__ __forceinline__ left_fragment<T> left(int row, int step) const {
        const int lane = threadIdx.x & 31;
        left_fragment<T> a;
        ldmatrix_x4(a.x, at(row + (lane & 15), 2 * step + (lane >> 4)));
        return a;
    }

    /* The transpose of rows row ... row + 15, columns column ... column + 15, as the left operand. */
    __device__ __forceinline__ left_fragment<T> left_transposed(int row, int column) const {
        const int lane = threadIdx.x & 31;
        left_fragment<T> a;
        ldmatrix_x4_trans(a.x, at(row + (lane & 7) + ((lane >> 4) << 3), column / 8 + ((lane >> 3) & 1)));
        return a;
    }

    /* The transpose of rows row ... row + 15, columns 16 * step ... + 15: two right operands, one for the first eight
     * rows and one for the others. */
    __device__ __forceinline__ void right_transposed(right_fragment<T> (&b)[2], int row, int step) const {
        const int lane = threadIdx.x & 31;
        uint32_t matrix[4];
        ldmatrix_x4(matrix, at(row + (lane & 7) + ((lane >> 4) << 3), 2 * step + ((lane >> 3) & 1)));
        b[0] = {matrix[0], matrix[1]};
        b[1] = {matrix[2], matrix[3]};
    }

    /* Rows row ... row + 15, columns column ... column + 15: two right operands, one for the first eight columns and
     * one for the others. */
    __device__ __forceinline__ void right(right_fragment<T> (&b)[2], int row, int column) const {
        const int lane = threadIdx.x & 31;
        uint32_t matrix[4];
        ldmatrix_x4_trans(matrix, at(row + (lane & 15), column / 8 + (lane >> 4)));
        b[0] = {matrix[0], matrix[1]};
        b[1] = {matrix[2], matrix[3]};
    }

    /* Writes the 16 x 8 result whose top left corner is (row, column). */
    __device__ __forceinline__ void store(int row, int column, const float (&result)[4]) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            store_shared_4(at(row + lane / 4 + 8 * half, column / 8) + (lane & 3) * 4,
                           pack_pair(result[2 * half], result[2 * half + 1], T()));
        }
    }
};

/* The same for fp32, which ldmatrix does not know. */
template <int columns>
struct tile<float, columns> : tile_layout<float, columns> {
    using tile_layout<float, columns>::tile_layout;
    using tile_layout<float, columns>::at;

    __device__ __forceinline__ float element(int row, int column) const {
        return load_shared_4(at(row, column / 4) + column % 4 * 4);
    }
    __device__ __forceinline__ float2 pair(int row, int column) const {
        return load_shared_8(at(row, column / 4) + column % 4 * 4);
    }

    __device__ __forceinline__ left_fragment<float> left(int row, int step) const {
        const int lane = threadIdx.x & 31, own_row = row + lane / 4, column = 16 * step + 2 * (lane & 3);
        left_fragment<float> a;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 upper = pair(own_row, column + 8 * half), lower = pair(own_row + 8, column + 8 * half);
            a.x[4 * half] = upper.x;
            a.x[4 * half + 1] = lower.x;
            a.x[4 * half + 2] = upper.y;
            a.x[4 * half + 3] = lower.y;
        }
        return a;
    }

    __device__ __forceinline__ left_fragment<float> left_transposed(int row, int column) const {
        const int lane = threadIdx.x & 31, own_row = row + 2 * (lane & 3), own_column = column + lane / 4;
        left_fragment<float> a;
#pragma unroll
        for (int i = 0; i < 8; i++)
            a.x[i] = element(own_row + 8 * (i / 4) + i / 2 % 2, own_column + 8 * (i % 2));
        return a;
    }

    __device__ __forceinline__ void right_transposed(right_fragment<float> (&b)[2], int row, int step) const {
        const int lane = threadIdx.x & 31, own_row = row + lane / 4, column = 16 * step + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 two = pair(own_row + 8 * n, column + 8 * half);
                b[n].x[2 * half] = two.x;
                b[n].x[2 * half + 1] = two.y;
            }
        }
    }

    __device__ __forceinline__ void right(right_fragment<float> (&b)[2], int row, int column) const {
        const int lane = threadIdx.x & 31, own_row = row + 2 * (lane & 3), own_column = column + lane / 4;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                b[n].x[i] = element(own_row + 8 * (i / 2) + i % 2, own_column + 8 * n);
        }
    }

    __device__ __forceinline__ void store(int row, int column, const float (&result)[4]) const {
        const int lane = threadIdx.x & 31, own_column = column + 2 * (lane & 3);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            store_shared_8(at(row + lane / 4 + 8 * half, own_column / 4) + own_column % 4 * 4,
                           make_float2(result[2 * half], result[2 * half + 1]));
        }
    }
};

} // namespace fmsa

#endif
