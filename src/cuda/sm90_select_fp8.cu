/* The kernel of sm90_select.cuh in FP8 E4M3, and the keys for it.
 *
 * Keys are quantised once, by one scale for each key block and head. Queries are quantised where they are used: a
 * consumer reads its rows of the tile in 16 bits, scales each by its own maximum and keeps them in registers as A
 * operands for the whole tile; the row's scale does not change the order of its scores and is dropped. Products
 * m64n128k32, key blocks of 16 KB in 8 stages. A scale maps the greatest finite magnitude to 448; infinities become
 * 448, NaN stays.
 *
 * Floor: that of 16 bits in half the time; keys read once in 16 bits, written and read in 8. Registers: 240 a consumer,
 * 24 the producer, 88 to quantise, no spills. Measured on an H200 at 65,536 tokens, 4 proxy heads on one key head, k
 * 16: 1.75 ms (1,256 TFLOP/s by visible pairs, 1.67 times the rate in bf16), of which quantise_keys 11 us. */
#include "sm90_select_fp8.h"

#include <cuda_fp8.h>

#include "tensor_map.h"

namespace {

constexpr int dim = 128;
constexpr float greatest_e4m3 = 448.0f, least_magnitude = 1e-30f;

/* The greatest magnitude in x, infinities and NaN aside. */
__device__ __forceinline__ float finite_magnitude(float x) {
    return isfinite(x) ? fabsf(x) : 0.0f;
}

/* Four values as e4m3, the first in the lowest byte. */
__device__ __forceinline__ uint32_t quantise(float2 a, float2 b, float factor) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a.x * factor, a.y * factor), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(b.x * factor, b.y * factor), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

/* ---- Keys ---------------------------------------------------------------------------------------------------- */

constexpr int quantise_threads = 256, chunk_elements = 8;
constexpr int chunks = fmsa::select_keys * dim / chunk_elements / quantise_threads; /* 16-byte pieces of a thread */

/* One thread block a (key block, proxy key head). */
template <typename T>
__global__ void __launch_bounds__(quantise_threads)
    quantise_keys(fmsa_tensor k, fmsa_cuda_geometry geometry, fmsa_sm90_fp8_keys keys, int64_t total_k,
                  int64_t blocks) {
    __shared__ uint32_t greatest;
    const int32_t id = blockIdx.x, head = blockIdx.y;
    if (id >= *geometry.num_blocks) return;
    if (threadIdx.x == 0) greatest = 0;
    const int32_t first = geometry.block_k_begin[id], count = geometry.block_k_end[id] - first;
    const int column = threadIdx.x % (dim / chunk_elements) * chunk_elements;
    const int first_key = threadIdx.x / (dim / chunk_elements);
    constexpr int keys_at_once = quantise_threads / (dim / chunk_elements);
    uint4 raw[chunks];
    float magnitude = 0;
#pragma unroll
    for (int i = 0; i < chunks; i++) {
        const int key = first_key + i * keys_at_once;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (key < count) {
            const T *source = (const T *)k.data + (first + key) * k.row_stride + head * k.head_stride + column;
            raw[i] = *(const uint4 *)source;
        }
        const uint32_t pairs[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = fmsa::unpack_pair(pairs[j], T());
            magnitude = fmaxf(magnitude, fmaxf(finite_magnitude(x.x), finite_magnitude(x.y)));
        }
    }
    __syncthreads();
    /* Magnitudes order as their bits do. */
    const uint32_t warp_greatest = __reduce_max_sync(0xffffffffu, __float_as_uint(magnitude));
    if (threadIdx.x % 32 == 0) atomicMax(&greatest, warp_greatest);
    __syncthreads();
    const float block_magnitude = fmaxf(__uint_as_float(greatest), least_magnitude);
    const float factor = greatest_e4m3 / block_magnitude;
    if (threadIdx.x == 0) keys.block_scale[head * blocks + id] = block_magnitude / greatest_e4m3;
#pragma unroll
    for (int i = 0; i < chunks; i++) {
        const int key = first_key + i * keys_at_once;
        if (key >= count) continue;
        uint2 bytes;
        bytes.x = quantise(fmsa::unpack_pair(raw[i].x, T()), fmsa::unpack_pair(raw[i].y, T()), factor);
        bytes.y = quantise(fmsa::unpack_pair(raw[i].z, T()), fmsa::unpack_pair(raw[i].w, T()), factor);
        *(uint2 *)(keys.data + ((head * total_k + first + key) * dim + column)) = bytes;
    }
}

/* ---- Operands ------------------------------------------------------------------------------------------------ */

template <typename T>
struct fp8_operands {
    static constexpr bool takes_turns = false;
    static constexpr int query_bytes = 0, stage_bytes = fmsa::select_keys * dim, stages = 8;

    uint32_t q[2][dim / 32][4];

    __device__ fp8_operands(const fmsa::select_work &w, uint32_t, int warp_row, int32_t tile, int32_t key_head) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const fmsa::select_row row(w, tile, key_head, warp_row + i / 2 * 64 + i % 2 * 8 + lane / 4);
            const T *source = (const T *)w.q.data + lane % 4 * 4;
            if (row.position >= 0) source += row.token * w.q.row_stride + row.head * w.q.head_stride;
            uint2 raw[dim / 16];
            float magnitude = 0;
#pragma unroll
            for (int j = 0; j < dim / 16; j++) {
                raw[j] = row.position >= 0 ? *(const uint2 *)(source + j * 16) : make_uint2(0, 0);
                const float2 a = fmsa::unpack_pair(raw[j].x, T()), b = fmsa::unpack_pair(raw[j].y, T());
                magnitude = fmaxf(magnitude, fmaxf(fmaxf(finite_magnitude(a.x), finite_magnitude(a.y)),
                                                   fmaxf(finite_magnitude(b.x), finite_magnitude(b.y))));
            }
            const float factor = greatest_e4m3 / fmaxf(fmsa::quad_max(magnitude), least_magnitude);
#pragma unroll
            for (int j = 0; j < dim / 16; j++) {
                q[i / 2][j / 2][j % 2 * 2 + i % 2] =
                    quantise(fmsa::unpack_pair(raw[j].x, T()), fmsa::unpack_pair(raw[j].y, T()), factor);
            }
        }
    }
    static __device__ void load_queries(const CUtensorMap *, const fmsa::select_work &, uint32_t, uint32_t, int32_t,
                                        int32_t) {
    }
    static __device__ __forceinline__ void load_keys(const CUtensorMap *map, uint32_t stage, uint32_t barrier,
                                                     int32_t key, int32_t key_head) {
        fmsa::tma_load_3d(stage, map, barrier, 0, key, key_head);
    }
    __device__ __forceinline__ void multiply(float (&s)[64], int half, uint32_t stage) const {
        const uint64_t k = fmsa::operand(stage, 0, 8 * dim);
#pragma unroll
        for (int i = 0; i < dim / 32; i++) {
            if (i == 0) {
                fmsa::wgmma_e4m3_new(s, q[half][i], k);
            } else {
                fmsa::wgmma_e4m3(s, q[half][i], k + i * 2);
            }
        }
    }
};

template <typename T>
fmsa_status launch_fp8(const CUtensorMap &k, const fmsa::select_work &w, bool fused, cudaStream_t stream) {
    return fused ? fmsa::launch_scores<fp8_operands<T>, true>(k, k, w, stream)
                 : fmsa::launch_scores<fp8_operands<T>, false>(k, k, w, stream);
}

} // namespace

fmsa_sm90_fp8_keys fmsa_sm90_fp8_take_keys(const fmsa_problem *problem, fmsa_cuda_arena *arena) {
    const fmsa_config *c = &problem->config;
    fmsa_sm90_fp8_keys keys;
    keys.data = (uint8_t *)fmsa_cuda_take(arena, c->num_proxy_kv_heads * c->total_k, dim);
    keys.block_scale = (float *)fmsa_cuda_take(arena, c->num_proxy_kv_heads * problem->max_key_blocks, sizeof(float));
    return keys;
}

fmsa_status fmsa_sm90_fp8_quantise(const fmsa_problem *problem, const fmsa_tensor *k_proxy, fmsa_cuda_geometry geometry,
                                   fmsa_sm90_fp8_keys keys, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const dim3 grid((unsigned)problem->max_key_blocks, (unsigned)c->num_proxy_kv_heads);
    const auto kernel = c->dtype == FMSA_DTYPE_BF16 ? quantise_keys<__nv_bfloat16> : quantise_keys<__half>;
    return fmsa::launch("quantise_keys", kernel, grid, quantise_threads, 0, stream, *k_proxy, geometry, keys,
                        c->total_k, problem->max_key_blocks);
}

fmsa_status fmsa_sm90_fp8_score(const fmsa_problem *problem, fmsa_sm90_fp8_keys keys, const fmsa::select_work &w,
                                bool fused, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    fmsa_tensor_map_shape shape = {};
    shape.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    shape.element_bytes = 1;
    shape.rank = 3;
    shape.size[0] = shape.box[0] = dim;
    shape.size[1] = c->total_k;
    shape.stride[1] = dim;
    shape.box[1] = fmsa::select_keys;
    shape.size[2] = c->num_proxy_kv_heads;
    shape.stride[2] = dim * c->total_k;
    shape.box[2] = 1;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    CUtensorMap k;
    FMSA_TRY(fmsa_tensor_map(&k, keys.data, &shape));
    return c->dtype == FMSA_DTYPE_BF16 ? launch_fp8<__nv_bfloat16>(k, w, fused, stream)
                                       : launch_fp8<__half>(k, w, fused, stream);
}
