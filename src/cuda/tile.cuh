/* Tiles of the portable kernels: 16-bit matrices in shared memory, and the fragments of m16n8k16 products read from
 * them.
 *
 * A tile of [rows][columns] lies in rows of `columns` 16-bit elements, cut into chunks of 16 bytes whose place within
 * the row is permuted, so that the eight rows of an 8 x 8 matrix always fall on different banks. fp32 elements are
 * split in two bf16 tiles, high and low part (the two *planes*), and a product of them takes three: high * high,
 * high * low and low * high. What is dropped (low * low and the rounding of the low part) is at most 2^-16 of the
 * product of the magnitudes. */
#ifndef FMSA_CUDA_TILE_CUH
#define FMSA_CUDA_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "ptx.cuh"

namespace fmsa {

/* How an element type enters a product: as one 16-bit plane, or as two. */
template <typename T>
struct product_of {
    typedef T type;
    static constexpr int planes = 1;
};
template <>
struct product_of<float> {
    typedef __nv_bfloat16 type;
    static constexpr int planes = 2;
};

/* One operand of m16n8k16, in registers: 16 x 16 on the left, 16 x 8 on the right. */
template <typename T>
struct left_fragment {
    uint32_t plane[product_of<T>::planes][4];
};
template <typename T>
struct right_fragment {
    uint32_t plane[product_of<T>::planes][2];
};

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const left_fragment<T> &a, const right_fragment<T> &b) {
    const typename product_of<T>::type type = {};
    if constexpr (product_of<T>::planes == 2) {
        mma_m16n8k16(sum, a.plane[1], b.plane[0][0], b.plane[0][1], type);
        mma_m16n8k16(sum, a.plane[0], b.plane[1][0], b.plane[1][1], type);
    }
    mma_m16n8k16(sum, a.plane[0], b.plane[0][0], b.plane[0][1], type);
}

/* Two neighbouring elements, rounded to each plane: plane[0] and, for fp32, plane[stride]. An infinite high part would
 * make the low part NaN: then the high part alone stands for the element. */
template <typename T>
__device__ __forceinline__ void to_planes(float x, float y, uint32_t *plane, int stride) {
    const typename product_of<T>::type type = {};
    plane[0] = pack_pair(x, y, type);
    if constexpr (product_of<T>::planes == 2) {
        const float2 high = unpack_pair(plane[0], type);
        const float low_x = x - high.x, low_y = y - high.y;
        plane[stride] = pack_pair(isfinite(low_x) ? low_x : 0.0f, isfinite(low_y) ? low_y : 0.0f, type);
    }
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

/* Sums of two neighbouring 16 x 8 results, as the left operand of the next product. */
template <typename T>
__device__ __forceinline__ left_fragment<T> to_left_fragment(const float (&first)[4], const float (&second)[4]) {
    left_fragment<T> a;
    to_planes<T>(first[0], first[1], &a.plane[0][0], 4);
    to_planes<T>(first[2], first[3], &a.plane[0][1], 4);
    to_planes<T>(second[0], second[1], &a.plane[0][2], 4);
    to_planes<T>(second[2], second[3], &a.plane[0][3], 4);
    return a;
}

/* A tile in shared memory. rows only sets the distance of the planes. */
template <typename T, int columns>
struct tile {
    static constexpr int chunks = columns / 8;
    static constexpr int row_bytes = columns * 2;

    uint32_t address;
    uint32_t plane_bytes;

    __device__ __forceinline__ tile(uint32_t start, int rows) : address(start), plane_bytes(rows * row_bytes) {
    }

    /* Bytes that a tile takes. */
    static constexpr __host__ __device__ int bytes(int rows) {
        return rows * row_bytes * product_of<T>::planes;
    }

    __device__ __forceinline__ uint32_t at(int row, int chunk) const {
        constexpr int rows_a_line = chunks < 8 ? 8 / chunks : 1;
        constexpr int mask = (chunks < 8 ? chunks : 8) - 1;
        return address + row * row_bytes + ((chunk ^ ((row / rows_a_line) & mask)) << 4);
    }

    /* Rows row ... row + 15, columns 16 * step ... + 15, as the left operand. */
    __device__ __forceinline__ left_fragment<T> left(int row, int step) const {
        const int lane = threadIdx.x & 31;
        const uint32_t place = at(row + (lane & 15), 2 * step + (lane >> 4));
        left_fragment<T> a;
#pragma unroll
        for (int p = 0; p < product_of<T>::planes; p++)
            ldmatrix_x4(a.plane[p], place + p * plane_bytes);
        return a;
    }

    /* The transpose of rows row ... row + 15, columns column ... column + 15, as the left operand. */
    __device__ __forceinline__ left_fragment<T> left_transposed(int row, int column) const {
        const int lane = threadIdx.x & 31;
        const uint32_t place = at(row + (lane & 7) + ((lane >> 4) << 3), column / 8 + ((lane >> 3) & 1));
        left_fragment<T> a;
#pragma unroll
        for (int p = 0; p < product_of<T>::planes; p++)
            ldmatrix_x4_trans(a.plane[p], place + p * plane_bytes);
        return a;
    }

    /* The transpose of rows row ... row + 15, columns 16 * step ... + 15: two right operands, one for the first eight
     * rows and one for the others. */
    __device__ __forceinline__ void right_transposed(right_fragment<T> (&b)[2], int row, int step) const {
        const int lane = threadIdx.x & 31;
        const uint32_t place = at(row + (lane & 7) + ((lane >> 4) << 3), 2 * step + ((lane >> 3) & 1));
#pragma unroll
        for (int p = 0; p < product_of<T>::planes; p++) {
            uint32_t matrix[4];
            ldmatrix_x4(matrix, place + p * plane_bytes);
            b[0].plane[p][0] = matrix[0];
            b[0].plane[p][1] = matrix[1];
            b[1].plane[p][0] = matrix[2];
            b[1].plane[p][1] = matrix[3];
        }
    }

    /* Rows row ... row + 15, columns column ... column + 15: two right operands, one for the first eight columns and
     * one for the others. */
    __device__ __forceinline__ void right(right_fragment<T> (&b)[2], int row, int column) const {
        const int lane = threadIdx.x & 31;
        const uint32_t place = at(row + (lane & 15), column / 8 + (lane >> 4));
#pragma unroll
        for (int p = 0; p < product_of<T>::planes; p++) {
            uint32_t matrix[4];
            ldmatrix_x4_trans(matrix, place + p * plane_bytes);
            b[0].plane[p][0] = matrix[0];
            b[0].plane[p][1] = matrix[1];
            b[1].plane[p][0] = matrix[2];
            b[1].plane[p][1] = matrix[3];
        }
    }

    /* Copies eight elements from global memory, or zeros. 16-bit elements arrive with the thread's next cp_async_wait,
     * fp32 at once. */
    __device__ __forceinline__ void load(int row, int chunk, const T *source, bool valid) const {
        const uint32_t place = at(row, chunk);
        if constexpr (product_of<T>::planes == 1) {
            cp_async_16(place, source, valid);
        } else {
            float4 first = {0, 0, 0, 0}, second = {0, 0, 0, 0};
            if (valid) {
                first = reinterpret_cast<const float4 *>(source)[0];
                second = reinterpret_cast<const float4 *>(source)[1];
            }
            uint32_t plane[2][4];
            to_planes<T>(first.x, first.y, &plane[0][0], 4);
            to_planes<T>(first.z, first.w, &plane[0][1], 4);
            to_planes<T>(second.x, second.y, &plane[0][2], 4);
            to_planes<T>(second.z, second.w, &plane[0][3], 4);
            store_shared_16(place, plane[0]);
            store_shared_16(place + plane_bytes, plane[1]);
        }
    }

    /* Writes the 16 x 8 result whose top left corner is (row, column). */
    __device__ __forceinline__ void store(int row, int column, const float (&result)[4]) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t place = at(row + lane / 4 + 8 * half, column / 8) + (lane & 3) * 4;
            uint32_t plane[product_of<T>::planes];
            to_planes<T>(result[2 * half], result[2 * half + 1], plane, 1);
#pragma unroll
            for (int p = 0; p < product_of<T>::planes; p++)
                store_shared_4(place + p * plane_bytes, plane[p]);
        }
    }
};

} // namespace fmsa

#endif
