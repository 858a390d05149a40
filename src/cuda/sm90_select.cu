/* Block selection on Hopper: the host side, and the kernel of sm90_select.cuh for bf16 and fp16.
 *
 * Q of a tile lies in shared memory: 256 rows of 64 or 128 dimensions in panels of 64 (128-byte swizzle), 32 or 64 KB;
 * key blocks of 128 keys likewise, 16 or 32 KB in 8 or 4 stages. Products m64n128k16.
 *
 * Floor: 2 Dp flops a visible (row, key) pair, less those of the blocks that are kept anyway; one launch and that of
 * the geometry. Registers: 240 a consumer, 24 the producer, no spills. Measured on an H200, bf16, 4 proxy heads of 128
 * dimensions on one key head, k 16, by visible pairs: 0.065 ms at 8,192 tokens, 0.19 ms at 16,384, 2.93 ms at 65,536
 * (751 TFLOP/s; cuBLAS 8192^3 in the same run 686), 46.1 ms at 262,144. */
#include "select.h"
#include "sm90.h"
#include "sm90_select.cuh"
#include "sm90_select_fp8.h"
#include "tensor_map.h"

namespace {

constexpr int panel_dims = 64, panel_bytes = 128; /* a row of a panel */

template <typename T, int dim>
struct half_operands {
    static constexpr bool takes_turns = true;
    static constexpr int panels = dim / panel_dims;
    static constexpr int query_bytes = fmsa::select_rows * dim * 2;
    static constexpr int stage_bytes = fmsa::select_keys * dim * 2, stages = dim == 128 ? 4 : 8;
    static constexpr int query_panel = fmsa::select_rows * panel_bytes, key_panel = fmsa::select_keys * panel_bytes;

    uint64_t q[2]; /* descriptors of the two accumulators' 64 rows */

    __device__ half_operands(const fmsa::select_work &, uint32_t queries, int warp_row, int32_t, int32_t) {
        const int first = warp_row / 128 * 128;
        q[0] = fmsa::operand(queries + first * panel_bytes, 0, 8 * panel_bytes);
        q[1] = fmsa::operand(queries + (first + 64) * panel_bytes, 0, 8 * panel_bytes);
    }
    static __device__ void load_queries(const CUtensorMap *map, const fmsa::select_work &w, uint32_t queries,
                                        uint32_t barrier, int32_t tile, int32_t key_head) {
        fmsa::barrier_arrive_expect(barrier, w.tile_tokens * w.group * dim * 2);
#pragma unroll
        for (int i = 0; i < panels; i++) {
            fmsa::tma_load_3d(queries + i * query_panel, map, barrier, i * panel_dims, key_head * w.group,
                              w.first + tile * w.tile_tokens);
        }
    }
    static __device__ __forceinline__ void load_keys(const CUtensorMap *map, uint32_t stage, uint32_t barrier,
                                                     int32_t key, int32_t key_head) {
#pragma unroll
        for (int i = 0; i < panels; i++)
            fmsa::tma_load_3d(stage + i * key_panel, map, barrier, i * panel_dims, key, key_head);
    }
    __device__ __forceinline__ void multiply(float (&s)[64], int half, uint32_t stage) const {
        const uint64_t k = fmsa::operand(stage, 0, 8 * panel_bytes);
#pragma unroll
        for (int i = 0; i < dim / 16; i++) {
            const int panel = i / 4, column = i % 4 * 32;
            const uint64_t a = q[half] + ((panel * query_panel + column) >> 4);
            const uint64_t b = k + ((panel * key_panel + column) >> 4);
            if (i == 0) {
                fmsa::wgmma_new(s, a, b, T());
            } else {
                fmsa::wgmma(s, a, b, T());
            }
        }
    }
};

/* ---- Tensor maps --------------------------------------------------------------------------------------------- */

/* The tensor as (dim, a, b) in panels of 64 dims. A stride that only one index would use may be anything. */
fmsa_status map_panels(CUtensorMap *map, const fmsa_config *c, const void *data, int64_t sizes[2], int64_t strides[2],
                       int32_t boxes[2]) {
    fmsa_tensor_map_shape shape = {};
    shape.type = c->dtype == FMSA_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    shape.element_bytes = 2;
    shape.rank = 3;
    shape.size[0] = c->proxy_head_dim;
    shape.box[0] = panel_dims;
    for (int i = 0; i < 2; i++) {
        shape.size[1 + i] = sizes[i];
        shape.stride[1 + i] = strides[i];
        shape.box[1 + i] = boxes[i];
    }
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, data, &shape);
}

fmsa_status map_queries(CUtensorMap *map, const fmsa_config *c, const fmsa_tensor *q, const fmsa::select_work &w) {
    int64_t sizes[2] = {c->num_proxy_heads, c->total_q}, strides[2] = {q->head_stride, q->row_stride};
    int32_t boxes[2] = {w.group, w.tile_tokens};
    return map_panels(map, c, q->data, sizes, strides, boxes);
}

fmsa_status map_keys(CUtensorMap *map, const fmsa_config *c, const fmsa_tensor *k) {
    int64_t sizes[2] = {c->total_k, c->num_proxy_kv_heads}, strides[2] = {k->row_stride, k->head_stride};
    int32_t boxes[2] = {fmsa::select_keys, 1};
    return map_panels(map, c, k->data, sizes, strides, boxes);
}

/* ---- Plan ---------------------------------------------------------------------------------------------------- */

constexpr size_t default_limit = (size_t)256 << 20;
/* Causal tiles are half as long as the longest on average: two for each multiprocessor balance. */
constexpr int64_t wanted_thread_blocks = 256, most_parts = 32, least_part_blocks = 4;

struct plan {
    bool fp8, fused;
    int32_t tile_tokens;
    int64_t tokens; /* query rows of a chunk: all of them if fused */
    int32_t parts;
    int64_t scores_stride;
    size_t bytes;
};

/* The arrays of the workspace. */
struct scratch {
    fmsa_cuda_geometry geometry;
    uint32_t *parts_done;
    int2 *lists;
    float *scores;
    fmsa_sm90_fp8_keys keys;
};

bool uses_fp8(const fmsa_config *c) {
    return (c->flags & FMSA_FLAG_SELECT_FP8) && c->proxy_head_dim == 128;
}

int64_t count_tiles(const fmsa_problem *problem, const plan &p) {
    return fmsa_ceil_div(p.tokens, p.tile_tokens) * problem->config.num_proxy_kv_heads;
}

scratch take_scratch(const fmsa_problem *problem, const plan &p, fmsa_cuda_arena *arena) {
    const fmsa_config *c = &problem->config;
    const int64_t tiles = count_tiles(problem, p);
    const int64_t listed = p.fused && p.parts > 1 ? tiles : 0;
    scratch s = {};
    void *geometry = fmsa_cuda_take(arena, (int64_t)fmsa_cuda_geometry_bytes(problem), 1);
    s.geometry = fmsa_cuda_geometry_at(problem, geometry);
    s.parts_done = (uint32_t *)fmsa_cuda_take(arena, listed, sizeof(uint32_t));
    s.lists = (int2 *)fmsa_cuda_take(arena, listed * p.parts * fmsa::select_kept * fmsa::select_rows, sizeof(int2));
    s.scores =
        (float *)fmsa_cuda_take(arena, p.fused ? 0 : p.tokens * c->num_proxy_heads * p.scores_stride, sizeof(float));
    if (p.fp8) s.keys = fmsa_sm90_fp8_take_keys(problem, arena);
    return s;
}

size_t scratch_bytes(const fmsa_problem *problem, const plan &p) {
    fmsa_cuda_arena arena = {NULL, 0};
    take_scratch(problem, p, &arena);
    return arena.used;
}

int32_t choose_parts(const fmsa_problem *problem, const plan &p) {
    int64_t parts = fmsa_ceil_div(wanted_thread_blocks, count_tiles(problem, p));
    const int64_t most = fmsa_ceil_div(problem->max_fragment_blocks, least_part_blocks);
    if (parts > most) parts = most;
    return (int32_t)(parts > most_parts ? most_parts : parts);
}

/* Lists kept in registers pass through scratch where tiles are cut into parts: if the limit is too low, they are not
 * cut. Otherwise the
 * scores of a chunk of rows are there, and the limit says how many rows that is. */
fmsa_status make_plan(const fmsa_problem *problem, plan *p) {
    const fmsa_config *c = &problem->config;
    const size_t limit = c->scratch_limit == 0 ? default_limit : c->scratch_limit;
    const int32_t forced = c->local_blocks < problem->slots ? c->local_blocks : problem->slots;
    p->fp8 = uses_fp8(c);
    p->fused = problem->slots - forced <= fmsa::select_kept;
    p->tile_tokens = fmsa::select_rows / (c->num_proxy_heads / c->num_proxy_kv_heads);
    p->tokens = c->total_q;
    p->parts = choose_parts(problem, *p);
    p->scores_stride = fmsa_ceil_div(problem->max_fragment_blocks, 4) * 4;
    p->bytes = scratch_bytes(problem, *p);
    if (p->bytes <= limit) return FMSA_OK;
    if (p->fused) {
        p->parts = 1;
    } else {
        const size_t row_bytes = (size_t)(c->num_proxy_heads * p->scores_stride) * sizeof(float);
        const size_t fixed = p->bytes - (size_t)p->tokens * row_bytes;
        const int64_t held = limit > fixed ? (int64_t)((limit - fixed) / row_bytes) / p->tile_tokens : 0;
        p->tokens = held > 1 ? held * p->tile_tokens : p->tile_tokens;
        p->parts = choose_parts(problem, *p);
    }
    p->bytes = scratch_bytes(problem, *p);
    if (c->scratch_limit != 0 && p->bytes > limit) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE, "scratch_limit is %zu; fmsa_select needs at least %zu for these shapes",
                         limit, p->bytes);
    }
    return FMSA_OK;
}

/* ---- Launches ------------------------------------------------------------------------------------------------ */

template <typename T, int dim>
fmsa_status launch_halves(const CUtensorMap &q, const CUtensorMap &k, const fmsa::select_work &w, bool fused,
                          cudaStream_t stream) {
    return fused ? fmsa::launch_scores<half_operands<T, dim>, true>(q, k, w, stream)
                 : fmsa::launch_scores<half_operands<T, dim>, false>(q, k, w, stream);
}

fmsa_status score(const fmsa_problem *problem, const fmsa_tensors *tensors, const plan &p, const scratch &s,
                  const fmsa::select_work &w, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    if (p.fp8) return fmsa_sm90_fp8_score(problem, s.keys, w, p.fused, stream);
    CUtensorMap q, k;
    FMSA_TRY(map_queries(&q, c, &tensors->q_proxy, w));
    FMSA_TRY(map_keys(&k, c, &tensors->k_proxy));
    const bool wide = c->proxy_head_dim == 128;
    if (c->dtype == FMSA_DTYPE_BF16) {
        return wide ? launch_halves<__nv_bfloat16, 128>(q, k, w, p.fused, stream)
                    : launch_halves<__nv_bfloat16, 64>(q, k, w, p.fused, stream);
    }
    return wide ? launch_halves<__half, 128>(q, k, w, p.fused, stream)
                : launch_halves<__half, 64>(q, k, w, p.fused, stream);
}

} // namespace

extern "C" bool fmsa_sm90_takes_select(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    const bool halves = c->dtype == FMSA_DTYPE_BF16 || c->dtype == FMSA_DTYPE_FP16;
    return halves && c->block_size == fmsa::select_keys && c->total_q > 0 && c->total_k > 0 &&
           c->num_proxy_heads / c->num_proxy_kv_heads <= fmsa::select_rows;
}

extern "C" fmsa_status fmsa_sm90_select_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    plan p = {};
    FMSA_TRY(make_plan(problem, &p));
    *bytes = p.bytes;
    return FMSA_OK;
}

extern "C" fmsa_status fmsa_sm90_select(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                        size_t workspace_bytes, cudaStream_t stream) {
    (void)workspace_bytes;
    const fmsa_config *c = &problem->config;
    plan p = {};
    FMSA_TRY(make_plan(problem, &p));
    fmsa_cuda_arena arena = {(char *)workspace, 0};
    const scratch s = take_scratch(problem, p, &arena);
    fmsa::select_work w = {};
    w.geometry = s.geometry;
    w.q = tensors->q_proxy;
    w.block_indices = tensors->block_indices;
    w.scores = s.scores;
    w.scores_stride = p.scores_stride;
    w.block_scale = s.keys.block_scale;
    w.lists = s.lists;
    w.parts_done = s.parts_done;
    w.blocks = problem->max_key_blocks;
    w.heads = c->num_proxy_heads;
    w.group = c->num_proxy_heads / c->num_proxy_kv_heads;
    w.key_heads = c->num_proxy_kv_heads;
    w.tile_tokens = p.tile_tokens;
    w.parts = p.parts;
    w.top_k = c->top_k;
    w.local_blocks = c->local_blocks;
    w.init_blocks = c->init_blocks;
    w.scale = (float)c->proxy_scale;
    FMSA_TRY(fmsa_cuda_build_geometry(problem, s.geometry, stream));
    if (p.fp8) FMSA_TRY(fmsa_sm90_fp8_quantise(problem, &tensors->k_proxy, s.geometry, s.keys, stream));
    if (p.fused && p.parts > 1) {
        const size_t bytes = (size_t)count_tiles(problem, p) * sizeof(uint32_t);
        FMSA_TRY(fmsa_cuda_status("clearing counters", cudaMemsetAsync(s.parts_done, 0, bytes, stream)));
    }
    for (int64_t first = 0; first < c->total_q; first += p.tokens) {
        w.first = (int32_t)first;
        w.end = (int32_t)(c->total_q - first < p.tokens ? c->total_q : first + p.tokens);
        w.tiles = (int32_t)fmsa_ceil_div(w.end - w.first, p.tile_tokens);
        FMSA_TRY(score(problem, tensors, p, s, w, stream));
        if (p.fused) continue;
        const fmsa_cuda_scores scores = {s.scores, p.scores_stride, w.first, w.end - w.first};
        FMSA_TRY(fmsa_cuda_top_k(problem, s.geometry, scores, tensors->block_indices, stream));
    }
    return FMSA_OK;
}
