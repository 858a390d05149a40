/* Block selection: proxy scores, their maximum over each key block, and the exact top-k of every (token, proxy head).
 *
 * Scores. A row is one (token, proxy head); rows of one proxy key head are walked token by token, its proxy heads
 * within. A thread block takes a tile of 128 rows and a share of the key blocks that any of them sees, multiplies key
 * block after key block and keeps only the maximum of each row over each block: one float a (row, block) into scratch.
 *   bf16, fp16: 4 warps of 32 rows, Q held in registers, key blocks in two stages of swizzled shared memory filled by
 *     cp.async, m16n8k16 with fp32 accumulation, 64 keys at a time. Shared memory 64 KB for 128 keys of 128 dimensions.
 *   fp32: 128 threads of 8 x 8 scores with fused multiply-adds, 32 dimensions at a time: exact products, fp32 sums.
 * A score depends on its own row and key only, in the same order of operations wherever they fall in a tile, so a
 * packed document selects the same blocks as the document alone.
 *
 * Top-k. A warp, or 256 threads for more than 512 blocks, holds a row's scores as integers that order as the selection
 * does (forced blocks above all, NaN lowest, -0 as +0), finds the k-th greatest bit by bit, and writes what lies above
 * it and as many of the lowest-numbered equals as fit, in ascending order.
 *
 * Rows are processed in chunks so that the scratch stays below config.scratch_limit (256 MiB when it is 0).
 * Registers: 210 to 226 (scores, Dp 128), 128 (fp32), 38 to 123 (top-k), no spills.
 * Floor: 2 Dp flops a visible (row, key) pair on the tensor cores; 4 B written and read a (row, key block).
 * Measured on an H200, 4 proxy heads of 128 dimensions on one key head: 0.56 ms at 16,384 tokens (scores 0.47, top-k
 * 0.08); at 65,536 tokens 7.7 ms (scores 7.0: 314 TFLOP/s, top-k 0.7); fp32 4.6 ms at 16,384 (30 TFLOP/s). */
#include <math_constants.h>

#include "launch.h"
#include "ptx.cuh"
#include "scan.cuh"
#include "schedule.h"
#include "select.h"
#include "selection.cuh"

namespace {

/* What the score and top-k kernels share: a chunk of query rows and where its scores go. */
struct chunk {
    fmsa_tensor q, k;
    fmsa_cuda_geometry geometry;
    float *scores;         /* [tokens * heads][row_stride], indexed by the block's number within the document */
    int64_t row_stride;    /* at least the blocks a row can see; a multiple of 4 */
    int32_t first, tokens; /* query rows first ... first + tokens - 1 */
    int32_t heads;         /* Hp */
    int32_t group;         /* Hp / Hpk: proxy heads that share a proxy key head */
    int32_t block_size;
    float scale;
};

/* ---- Rows of a tile ------------------------------------------------------------------------------------------ */

constexpr int tile_rows = 128, score_threads = 128;

struct tile_row {
    int32_t token, head; /* token is counted from the chunk's first; -1 behind the last row */
    int32_t first_block;
    /* The row sees the first reach - id * block_size + 1 keys of block id, for id >= first_block. */
    int32_t reach;

    __device__ tile_row(const chunk &c, int64_t row, int32_t key_head) {
        const int64_t index = row / c.group;
        token = index < c.tokens ? (int32_t)index : -1;
        head = key_head * c.group + (int32_t)(row % c.group);
        first_block = 0;
        reach = -1;
        if (token < 0) return;
        const int32_t position = c.geometry.row_position[c.first + token];
        first_block = c.geometry.row_first_block[c.first + token];
        if (position >= 0) reach = first_block * c.block_size + position;
    }
    __device__ int64_t q_offset(const chunk &c) const {
        return (int64_t)(c.first + token) * c.q.row_stride + head * c.q.head_stride;
    }
    __device__ void store(const chunk &c, int32_t id, float maximum) const {
        if (id < first_block || id * c.block_size > reach) return;
        c.scores[((int64_t)token * c.heads + head) * c.row_stride + (id - first_block)] = maximum * c.scale;
    }
};

struct id_range {
    int32_t begin, end;
};

/* This thread block's share of the block ids that rows of its tile see: thread i looks at row i. */
__device__ id_range tile_blocks(const chunk &c, int64_t first_row, int32_t key_head) {
    __shared__ int32_t least, most;
    if (threadIdx.x == 0) {
        least = INT32_MAX;
        most = -1;
    }
    __syncthreads();
    const tile_row row(c, first_row + threadIdx.x, key_head);
    const bool sees = row.reach >= 0;
    const int32_t warp_least = __reduce_min_sync(0xffffffffu, sees ? row.first_block : INT32_MAX);
    const int32_t warp_most = __reduce_max_sync(0xffffffffu, sees ? row.reach / c.block_size : -1);
    if (threadIdx.x % 32 == 0) {
        atomicMin(&least, warp_least);
        atomicMax(&most, warp_most);
    }
    __syncthreads();
    if (most < 0) return {0, 0};
    const int32_t blocks = most - least + 1;
    const int32_t share = (blocks + (int32_t)gridDim.y - 1) / (int32_t)gridDim.y;
    const int32_t begin = least + min((int32_t)blockIdx.y * share, blocks);
    return {begin, min(begin + share, most + 1)};
}

/* Tiles of late rows see the most blocks: they start first. */
__device__ int64_t tile_first_row() {
    return (int64_t)(gridDim.x - 1 - blockIdx.x) * tile_rows;
}

/* ---- Scores on the tensor cores ------------------------------------------------------------------------------ */

constexpr int keys_at_once = 64;

/* Byte offset of 16-byte column `column` of a row of `dim` 16-bit elements: eight neighbouring rows put one column into
 * eight different groups of banks. */
template <int dim>
__device__ uint32_t swizzled(int row, int column) {
    return (uint32_t)(row * dim * 2 + ((column ^ (row & 7)) << 4));
}

template <typename T, int dim>
__device__ void load_keys(const chunk &c, uint32_t stage, int32_t id, int32_t key_head) {
    constexpr int columns = dim / 8;
    const int32_t k_begin = c.geometry.block_k_begin[id], keys = c.geometry.block_k_end[id] - k_begin;
    const T *base = (const T *)c.k.data + k_begin * c.k.row_stride + key_head * c.k.head_stride;
    for (int i = threadIdx.x; i < c.block_size * columns; i += score_threads) {
        const int key = i / columns, column = i % columns;
        const bool valid = key < keys;
        fmsa::cp_async_16(stage + swizzled<dim>(key, column), base + (valid ? key * c.k.row_stride + column * 8 : 0),
                          valid);
    }
    fmsa::cp_async_commit();
}

template <typename T, int dim>
__device__ void load_queries(const chunk &c, uint32_t shared, int64_t first_row, int32_t key_head,
                             uint32_t (&q)[2][dim / 16][4]) {
    constexpr int columns = dim / 8;
    for (int i = threadIdx.x; i < tile_rows * columns; i += score_threads) {
        const tile_row row(c, first_row + i / columns, key_head);
        const bool valid = row.reach >= 0;
        const T *source = (const T *)c.q.data + (valid ? row.q_offset(c) + i % columns * 8 : 0);
        fmsa::cp_async_16(shared + swizzled<dim>(i / columns, i % columns), source, valid);
    }
    fmsa::cp_async_commit();
    fmsa::cp_async_wait<0>();
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int step = 0; step < dim / 16; step++) {
            fmsa::ldmatrix_x4(q[m][step], shared + swizzled<dim>(warp * 32 + m * 16 + lane % 16, step * 2 + lane / 16));
        }
    }
    __syncthreads();
}

/* maximum[2 * m + h] takes in the scores of row 16 * m + 8 * h + lane / 4 of the warp against 64 keys. Columns beyond
 * limit are hidden from the row: they count as NaN, which fmaxf ignores. */
template <typename T, int dim>
__device__ void fold_keys(const uint32_t (&q)[2][dim / 16][4], uint32_t stage, int first_key, bool masked,
                          const int32_t (&limit)[4], float (&maximum)[4]) {
    const int lane = threadIdx.x % 32;
    const int key = first_key + lane % 8 + lane / 16 * 8, column = lane / 8 % 2;
    float scores[2][8][4] = {};
#pragma unroll
    for (int step = 0; step < dim / 16; step++) {
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            uint32_t keys[4];
            fmsa::ldmatrix_x4(keys, stage + swizzled<dim>(key + pair * 16, step * 2 + column));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                fmsa::mma_m16n8k16(scores[m][2 * pair], q[m][step], keys[0], keys[1], T());
                fmsa::mma_m16n8k16(scores[m][2 * pair + 1], q[m][step], keys[2], keys[3], T());
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int row = i / 2, m = row / 2;
            float score = scores[m][n][row % 2 * 2 + i % 2];
            if (masked && first_key + n * 8 + lane % 4 * 2 + i % 2 > limit[row]) score = CUDART_NAN_F;
            maximum[row] = fmaxf(maximum[row], score);
        }
    }
}

template <typename T, int dim>
__global__ void __launch_bounds__(score_threads, 2) score_blocks(chunk c) {
    extern __shared__ uint4 stages[];
    const int64_t first_row = tile_first_row();
    const int32_t key_head = blockIdx.z;
    const id_range range = tile_blocks(c, first_row, key_head);
    if (range.begin >= range.end) return;
    const uint32_t shared = fmsa::shared_address(stages), stage_bytes = c.block_size * dim * 2;
    uint32_t q[2][dim / 16][4];
    load_queries<T, dim>(c, shared, first_row, key_head, q);
    load_keys<T, dim>(c, shared, range.begin, key_head);

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
    int32_t reach[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        reach[i] = tile_row(c, first_row + warp_row + i * 8 + lane / 4, key_head).reach;
    /* All four lanes of a quad learn the maxima of its four rows; each stores one of them. */
    const tile_row stored(c, first_row + warp_row + lane % 4 * 8 + lane / 4, key_head);

    for (int32_t id = range.begin; id < range.end; id++) {
        const uint32_t stage = shared + ((id - range.begin) & 1) * stage_bytes;
        fmsa::cp_async_wait<0>();
        __syncthreads();
        if (id + 1 < range.end)
            load_keys<T, dim>(c, shared + ((id - range.begin + 1) & 1) * stage_bytes, id + 1, key_head);
        int32_t limit[4];
        bool hides = false;
        float maximum[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            limit[i] = reach[i] - id * c.block_size;
            hides |= limit[i] < c.block_size - 1;
            maximum[i] = CUDART_NAN_F;
        }
        const bool masked = __any_sync(0xffffffffu, hides);
        for (int key = 0; key < c.block_size; key += keys_at_once) {
            fold_keys<T, dim>(q, stage, key, masked, limit, maximum);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            maximum[i] = fmsa::quad_max(maximum[i]);
        const float low = lane & 1 ? maximum[1] : maximum[0], high = lane & 1 ? maximum[3] : maximum[2];
        stored.store(c, id, lane & 2 ? high : low);
    }
}

/* ---- Scores of fp32 inputs ----------------------------------------------------------------------------------- */

constexpr int dims_at_once = 32;

__device__ void store_transposed(float *row, int stride, const float *source, int dims, bool valid) {
    for (int d = 0; d < dims; d += 4) {
        const float4 x = valid ? *(const float4 *)(source + d) : make_float4(0, 0, 0, 0);
        row[d * stride] = x.x;
        row[(d + 1) * stride] = x.y;
        row[(d + 2) * stride] = x.z;
        row[(d + 3) * stride] = x.w;
    }
}

/* Thread (y, x) of 16 x 8 has rows 4 y + {0 ... 3} and 64 + those, keys 4 x + {0 ... 3} and 32 + those. */
__device__ int own(int thread, int i, int half) {
    return thread * 4 + i % 4 + i / 4 * half;
}

__global__ void __launch_bounds__(score_threads) score_blocks_fp32(chunk c, int32_t dim) {
    __shared__ float4 q_columns[dims_at_once][tile_rows / 4], k_columns[dims_at_once][keys_at_once / 4];
    const int64_t first_row = tile_first_row();
    const int32_t key_head = blockIdx.z;
    const id_range range = tile_blocks(c, first_row, key_head);
    const int y = threadIdx.x / 8, x = threadIdx.x % 8;
    const tile_row loaded(c, first_row + threadIdx.x, key_head);
    const bool has_query = loaded.reach >= 0;
    const float *query = (const float *)c.q.data + (has_query ? loaded.q_offset(c) : 0);
    const tile_row stored(c, first_row + own(y, x, tile_rows / 2), key_head);
    int32_t reach[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        reach[i] = tile_row(c, first_row + own(y, i, tile_rows / 2), key_head).reach;

    const int load_key = threadIdx.x % keys_at_once, load_half = threadIdx.x / keys_at_once;
    for (int32_t id = range.begin; id < range.end; id++) {
        const int32_t k_begin = c.geometry.block_k_begin[id], keys = c.geometry.block_k_end[id] - k_begin;
        float maximum[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            maximum[i] = CUDART_NAN_F;
        for (int first_key = 0; first_key < c.block_size; first_key += keys_at_once) {
            const bool has_key = first_key + load_key < keys;
            const float *key = (const float *)c.k.data + key_head * c.k.head_stride +
                               (has_key ? (int64_t)(k_begin + first_key + load_key) * c.k.row_stride : 0);
            float scores[8][8] = {};
            for (int32_t d = 0; d < dim; d += dims_at_once) {
                __syncthreads();
                store_transposed((float *)q_columns + threadIdx.x, tile_rows, query + d, dims_at_once, has_query);
                const int half = load_half * (dims_at_once / 2);
                store_transposed((float *)k_columns[half] + load_key, keys_at_once, key + d + half, dims_at_once / 2,
                                 has_key);
                __syncthreads();
#pragma unroll 4
                for (int e = 0; e < dims_at_once; e++) {
                    const float4 a[2] = {q_columns[e][y], q_columns[e][tile_rows / 8 + y]};
                    const float4 b[2] = {k_columns[e][x], k_columns[e][keys_at_once / 8 + x]};
#pragma unroll
                    for (int i = 0; i < 8; i++) {
#pragma unroll
                        for (int j = 0; j < 8; j++) {
                            scores[i][j] = fmaf(((const float *)a)[i], ((const float *)b)[j], scores[i][j]);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int32_t limit = reach[i] - id * c.block_size - first_key;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const bool hidden = own(x, j, keys_at_once / 2) > limit;
                    maximum[i] = fmaxf(maximum[i], hidden ? CUDART_NAN_F : scores[i][j]);
                }
            }
        }
        float mine = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float row_maximum = fmsa::quad_max(fmaxf(maximum[i], __shfl_xor_sync(0xffffffffu, maximum[i], 4)));
            if (i == x) mine = row_maximum;
        }
        stored.store(c, id, mine);
    }
}

/* ---- Top-k --------------------------------------------------------------------------------------------------- */

constexpr int select_threads = 256;

/* Larger for a block that is to be preferred; equal scores are equal. 0 is free for "no block". */
__device__ uint32_t preference(float score) {
    if (isnan(score)) return 1;
    const uint32_t bits = __float_as_uint(score + 0.0f); /* -0 + 0 = +0 */
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr uint32_t forced = 0xffffffffu;

template <int team>
__device__ int32_t team_sum(int32_t value) {
    value = __reduce_add_sync(0xffffffffu, value);
    if constexpr (team > 32) {
        int32_t total;
        fmsa::block_exclusive_scan<team>(threadIdx.x % 32 == 0 ? value : 0, 0, fmsa::add(), total);
        return total;
    }
    return value;
}

template <int team>
__device__ uint32_t team_exclusive_scan(uint32_t value, uint32_t &total) {
    if constexpr (team > 32) {
        return fmsa::block_exclusive_scan<team>(value, 0u, fmsa::add(), total);
    } else {
        const int lane = threadIdx.x % 32;
        uint32_t inclusive = value;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (lane >= step) inclusive += before;
        }
        total = __shfl_sync(0xffffffffu, inclusive, 31);
        return inclusive - value;
    }
}

template <int count>
__device__ void load_preferences(uint32_t (&keys)[count], const float *scores, const fmsa::selection &s,
                                 int32_t first) {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
        float part[4] = {};
        if (first + i + 4 <= s.visible) {
            const float4 four = *(const float4 *)(scores + first + i);
            part[0] = four.x, part[1] = four.y, part[2] = four.z, part[3] = four.w;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (first + i + j < s.visible) part[j] = scores[first + i + j];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int32_t block = first + i + j;
            const bool must = (block >= s.init_begin && block < s.init_end) || block >= s.local_begin;
            keys[i + j] = block >= s.visible ? 0 : must ? forced : preference(part[j]);
        }
    }
}

/* A team of `team` threads a row, each with `count` neighbouring blocks in registers; rows with more blocks than a team
 * holds are read again in each step. */
template <int team, int count>
__global__ void __launch_bounds__(select_threads)
    select_blocks(chunk c, fmsa_tensor block_indices, int32_t top_k, int32_t local_blocks, int32_t init_blocks) {
    const int64_t row = (int64_t)blockIdx.x * (select_threads / team) + threadIdx.x / team;
    if (row >= (int64_t)c.tokens * c.heads) return;
    const int32_t token = c.first + (int32_t)(row / c.heads), head = (int32_t)(row % c.heads);
    const int32_t member = threadIdx.x % team, position = c.geometry.row_position[token];
    const fmsa::selection s(position < 0 ? 0 : position / c.block_size + 1, top_k, local_blocks, init_blocks);
    int32_t *indices =
        (int32_t *)block_indices.data + token * block_indices.row_stride + head * block_indices.head_stride;
    for (int32_t i = s.take + member; i < top_k; i += team)
        indices[i] = -1;
    if (s.take == 0) return;

    const float *scores = c.scores + row * c.row_stride;
    const bool fits = s.visible <= team * count;
    uint32_t keys[count];
    load_preferences(keys, scores, s, member * count);

    /* Everything above bound is kept, and the first equals of the blocks that equal it. */
    uint32_t bound = 0;
    int32_t equals = 0;
    if (s.visible > s.take) {
        bool exact = false;
        for (uint32_t bit = 1u << 31; bit != 0 && !exact; bit >>= 1) {
            const uint32_t candidate = bound | bit;
            int32_t at_least = 0;
            for (int32_t first = 0; first < s.visible; first += team * count) {
                if (!fits) load_preferences(keys, scores, s, first + member * count);
#pragma unroll
                for (int i = 0; i < count; i++)
                    at_least += keys[i] >= candidate;
            }
            at_least = team_sum<team>(at_least);
            if (at_least < s.take) continue;
            bound = candidate;
            exact = at_least == s.take;
        }
        if (exact) {
            bound--;
        } else {
            int32_t above = 0;
            for (int32_t first = 0; first < s.visible; first += team * count) {
                if (!fits) load_preferences(keys, scores, s, first + member * count);
#pragma unroll
                for (int i = 0; i < count; i++)
                    above += keys[i] > bound;
            }
            equals = s.take - team_sum<team>(above);
        }
    }

    int32_t above_before = 0, equal_before = 0;
    for (int32_t first = 0; first < s.visible; first += team * count) {
        if (!fits) load_preferences(keys, scores, s, first + member * count);
        uint32_t counts = 0, total; /* above in the low half, equal in the high half */
#pragma unroll
        for (int i = 0; i < count; i++)
            counts += (keys[i] > bound) + ((uint32_t)(keys[i] == bound) << 16);
        const uint32_t before = team_exclusive_scan<team>(counts, total);
        int32_t above = above_before + (int32_t)(before & 0xffff), equal = equal_before + (int32_t)(before >> 16);
#pragma unroll
        for (int i = 0; i < count; i++) {
            const bool is_above = keys[i] > bound, is_equal = keys[i] == bound;
            if (is_above || (is_equal && equal < equals)) {
                indices[above + min(equal, equals)] = first + member * count + i;
            }
            above += is_above;
            equal += is_equal;
        }
        above_before += (int32_t)(total & 0xffff);
        equal_before += (int32_t)(total >> 16);
    }
}

/* ---- Host ---------------------------------------------------------------------------------------------------- */

constexpr size_t default_limit = (size_t)256 << 20;
constexpr int64_t least_tokens = 32, wanted_blocks = 1024;

struct plan {
    size_t geometry_bytes, bytes;
    int64_t row_stride, tokens; /* of a chunk */
};

/* The least chunk is 32 tokens, or all of fewer; otherwise as many as the limit holds. */
fmsa_status make_plan(const fmsa_problem *problem, plan *plan) {
    const fmsa_config *c = &problem->config;
    const size_t limit = c->scratch_limit == 0 ? default_limit : c->scratch_limit;
    plan->geometry_bytes = fmsa_cuda_geometry_bytes(problem);
    plan->row_stride = fmsa_ceil_div(problem->max_fragment_blocks, 4) * 4;
    const size_t token_bytes = (size_t)(c->num_proxy_heads * plan->row_stride) * sizeof(float);
    const int64_t least = c->total_q < least_tokens ? c->total_q : least_tokens;
    const size_t needed = plan->geometry_bytes + (size_t)least * token_bytes;
    if (c->scratch_limit != 0 && needed > limit) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE, "scratch_limit is %zu; fmsa_select needs at least %zu for these shapes",
                         limit, needed);
    }
    plan->tokens = c->total_q;
    const size_t room = limit > plan->geometry_bytes ? limit - plan->geometry_bytes : 0;
    if ((size_t)c->total_q * token_bytes > room) {
        const int64_t held = (int64_t)(room / token_bytes) / least_tokens * least_tokens;
        plan->tokens = held > least ? held : least;
    }
    plan->bytes = plan->geometry_bytes + (size_t)plan->tokens * token_bytes;
    return FMSA_OK;
}

template <typename T, int dim>
fmsa_status launch_scores(const chunk &c, dim3 grid, cudaStream_t stream) {
    constexpr size_t key_bytes = dim * sizeof(T) * 2, most_block_size = 128;
    const fmsa::shared_memory shared(c.block_size * key_bytes, most_block_size * key_bytes);
    return fmsa::launch("score_blocks", score_blocks<T, dim>, grid, score_threads, shared, stream, c);
}

fmsa_status score(const fmsa_problem *problem, const chunk &c, cudaStream_t stream) {
    const int64_t tiles = fmsa_ceil_div((int64_t)c.tokens * c.group, tile_rows);
    const int64_t key_heads = problem->config.num_proxy_kv_heads, most = fmsa_ceil_div(problem->max_fragment_blocks, 4);
    int64_t shares = fmsa_ceil_div(wanted_blocks, tiles * key_heads);
    if (shares > most) shares = most;
    const dim3 grid((unsigned)tiles, (unsigned)shares, (unsigned)key_heads);
    const bool wide = problem->config.proxy_head_dim == 128;
    switch (problem->config.dtype) {
    case FMSA_DTYPE_BF16:
        return wide ? launch_scores<__nv_bfloat16, 128>(c, grid, stream)
                    : launch_scores<__nv_bfloat16, 64>(c, grid, stream);
    case FMSA_DTYPE_FP16:
        return wide ? launch_scores<__half, 128>(c, grid, stream) : launch_scores<__half, 64>(c, grid, stream);
    default:
        return fmsa::launch("score_blocks_fp32", score_blocks_fp32, grid, score_threads, 0, stream, c,
                            problem->config.proxy_head_dim);
    }
}

template <int team, int count>
fmsa_status launch_select(const fmsa_problem *problem, const chunk &c, fmsa_tensor block_indices, cudaStream_t stream) {
    const fmsa_config *config = &problem->config;
    const unsigned grid = fmsa_cuda_grid((int64_t)c.tokens * c.heads, select_threads / team);
    return fmsa::launch("select_blocks", select_blocks<team, count>, dim3(grid), select_threads, 0, stream, c,
                        block_indices, config->top_k, config->local_blocks, config->init_blocks);
}

fmsa_status select_chunk(const fmsa_problem *problem, const chunk &c, fmsa_tensor block_indices, cudaStream_t stream) {
    const int64_t blocks = problem->max_fragment_blocks;
    if (blocks <= 32 * 4) return launch_select<32, 4>(problem, c, block_indices, stream);
    if (blocks <= 32 * 16) return launch_select<32, 16>(problem, c, block_indices, stream);
    if (blocks <= 256 * 8) return launch_select<256, 8>(problem, c, block_indices, stream);
    return launch_select<256, 32>(problem, c, block_indices, stream);
}

} // namespace

extern "C" fmsa_status fmsa_cuda_top_k(const fmsa_problem *problem, fmsa_cuda_geometry geometry,
                                       fmsa_cuda_scores scores, fmsa_tensor block_indices, cudaStream_t stream) {
    chunk c = {};
    c.geometry = geometry;
    c.scores = scores.data;
    c.row_stride = scores.row_stride;
    c.first = scores.first;
    c.tokens = scores.tokens;
    c.heads = problem->config.num_proxy_heads;
    c.block_size = problem->config.block_size;
    return select_chunk(problem, c, block_indices, stream);
}

extern "C" fmsa_status fmsa_portable_select_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    plan chosen = {};
    FMSA_TRY(make_plan(problem, &chosen));
    *bytes = chosen.bytes;
    return FMSA_OK;
}

extern "C" fmsa_status fmsa_portable_select(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                            size_t workspace_bytes, cudaStream_t stream) {
    (void)workspace_bytes;
    const fmsa_config *config = &problem->config;
    plan chosen = {};
    FMSA_TRY(make_plan(problem, &chosen));
    if (config->total_q == 0) return FMSA_OK;
    chunk c;
    c.q = tensors->q_proxy;
    c.k = tensors->k_proxy;
    c.geometry = fmsa_cuda_geometry_at(problem, workspace);
    c.scores = (float *)((char *)workspace + chosen.geometry_bytes);
    c.row_stride = chosen.row_stride;
    c.heads = config->num_proxy_heads;
    c.group = config->num_proxy_heads / config->num_proxy_kv_heads;
    c.block_size = config->block_size;
    c.scale = (float)config->proxy_scale;
    FMSA_TRY(fmsa_cuda_build_geometry(problem, c.geometry, stream));
    for (int64_t first = 0; first < config->total_q; first += chosen.tokens) {
        c.first = (int32_t)first;
        c.tokens = (int32_t)(config->total_q - first < chosen.tokens ? config->total_q - first : chosen.tokens);
        FMSA_TRY(score(problem, c, stream));
        FMSA_TRY(select_chunk(problem, c, tensors->block_indices, stream));
    }
    return FMSA_OK;
}
