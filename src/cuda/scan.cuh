/* Prefix operations within a thread block. */
#ifndef FMSA_CUDA_SCAN_CUH
#define FMSA_CUDA_SCAN_CUH

#include <stdint.h>

namespace fmsa {

struct add {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};

struct greatest {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

/* The combination of the values of all threads before this one (identity for the first), and of all threads in total.
 * Every thread of the block calls it, threads in warps of 32; it may be called again at once. */
template <int threads, typename T, typename Combine>
__device__ __forceinline__ T block_exclusive_scan(T value, T identity, Combine combine, T &total) {
    constexpr int warps = threads / 32;
    __shared__ T warp_total[warps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T inclusive = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive = combine(before, inclusive);
    }
    if (lane == 31) warp_total[warp] = inclusive;
    __syncthreads();
    T offset = identity;
    total = identity;
#pragma unroll
    for (int w = 0; w < warps; w++) {
        if (w == warp) offset = total;
        total = combine(total, warp_total[w]);
    }
    __syncthreads();
    const T before = __shfl_up_sync(0xffffffffu, inclusive, 1);
    return lane == 0 ? offset : combine(offset, before);
}

} // namespace fmsa

#endif
