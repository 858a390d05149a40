/* How the key-outer kernels (sparse forward, backward, proxy) share out their work: a *share* is a run of keys of one
 * block, and rows that attend to them through one proxy head.
 *
 * In sparse mode shares are the items of the schedule. In dense mode every later row of the document attends to a
 * block: its rows are cut into pieces. Either way a launch takes only the query rows of one *chunk*, so that scratch
 * for query rows is bounded; the chunks follow one another on the stream. */
#ifndef FMSA_CUDA_WORK_CUH
#define FMSA_CUDA_WORK_CUH

#include "portable.h"
#include "schedule.h"
#include "tile.cuh"

namespace fmsa {

constexpr float log2_e = 1.44269504088896340736f;
constexpr float log2_e_rest = 1.925963033500e-8f; /* what the rounding of log2_e leaves */

/* exp(scale * score - lse), scale_log2 = scale * log2(e). With an fp32 score the rounding of lse * log2(e) would count:
 * it grows with lse. */
template <typename T>
__device__ __forceinline__ float probability(float score, float scale_log2, float lse) {
    const float lse_log2 = lse * log2_e;
    if constexpr (sizeof(T) == 2) return exp2_approx(fmaf(score, scale_log2, -lse_log2));
    const float rest = fmaf(lse, log2_e, -lse_log2) + lse * log2_e_rest;
    return exp2_approx(fmaf(score, scale_log2, -lse_log2) - rest);
}

/* fmsa_tensor with its element type. */
template <typename T>
struct view {
    T *data;
    int64_t row_stride, head_stride;

    view() = default;
    __host__ explicit view(const fmsa_tensor &t)
        : data(static_cast<T *>(t.data)), row_stride(t.row_stride), head_stride(t.head_stride) {
    }
    __host__ __device__ view(T *start, int64_t row, int64_t head) : data(start), row_stride(row), head_stride(head) {
    }

    __device__ __forceinline__ T *at(int64_t row, int64_t head) const {
        return data + row * row_stride + head * head_stride;
    }
};

/* Which heads share keys and a selection; see problem.h. A unit's query heads are unit * unit_heads and the next
 * unit_heads - 1; it reads key head unit / units_per_key_head. */
struct head_map {
    int32_t units_per_proxy_head;
    int32_t unit_heads;
    int32_t units_per_key_head;
};

struct work {
    fmsa_cuda_geometry geometry;
    const fmsa_cuda_item *items; /* NULL in dense mode, as the next three */
    const int64_t *list_begin;
    const int32_t *edge_row;
    const int32_t *edge_slot;
    int64_t max_blocks;
    int32_t block_size;
    int32_t share_keys;         /* block_size is a multiple of it */
    int32_t row_begin, row_end; /* the chunk */
    int32_t piece_rows;         /* dense mode: rows of a share, at most */
    int32_t *cuts;              /* sparse mode: [2] the chunk's first item, and one past its last; dense mode:
                                   [max_blocks + 1] number of each block's first share */
    int32_t only_block;         /* dense mode: take the blocks of this number alone, or all of them if -1 */
    int32_t first_part;         /* of a block, where a launch does not take all of them */
    uint32_t *ticket; /* NULL, or a counter at 0: shares are then started in the order of their numbers, whatever the
                         order of thread blocks, so that one may wait for those before it */
};

/* Finds a chunk's first item and one past its last, called by the first two warps of a block. Items are ordered by
 * segment: a warp finds the first whose segment is at least that of the chunk's first row, and another warp the first
 * beyond that of its last. Each round cuts what is left to a 32nd. */
__device__ __forceinline__ void cut_items(const work &w, const int32_t *num_items, int shift) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int32_t segment = warp == 0 ? w.row_begin >> shift : ((w.row_end - 1) >> shift) + 1;
    int32_t low = 0, high = *num_items; /* the item sought lies in low ... high */
    while (low < high) {
        const int32_t stride = (high - low + 31) / 32, probe = low + lane * stride;
        const bool before = probe < high && w.edge_row[w.items[probe].edge_begin] >> shift < segment;
        const int32_t passed = __popc(__ballot_sync(0xffffffffu, before));
        if (passed == 0) break;
        high = min(high, low + passed * stride);
        low += (passed - 1) * stride + 1;
    }
    if (lane == 0) w.cuts[warp] = low;
}

/* The number of a thread block's share, the unit (within the proxy head in sparse mode) and the part of the key block
 * it takes: blockIdx, unless there are tickets. */
struct place {
    int32_t number, unit, part;
};

__device__ __forceinline__ place take_place(const work &w) {
    uint32_t number = blockIdx.x, unit = blockIdx.y, part = blockIdx.z;
    if (w.ticket != nullptr) {
        __shared__ uint32_t taken;
        if (threadIdx.x == 0) taken = atomicAdd(w.ticket, 1u);
        __syncthreads();
        number = taken % gridDim.x;
        unit = taken / gridDim.x % gridDim.y;
        part = taken / gridDim.x / gridDim.y;
    }
    return {static_cast<int32_t>(number), static_cast<int32_t>(unit), static_cast<int32_t>(part) + w.first_part};
}

struct share {
    const int32_t *edge_row;  /* of its edges; NULL in dense mode */
    const int32_t *edge_slot; /* likewise */
    int32_t first_row;        /* dense mode */
    int32_t count;            /* rows */
    int64_t before;           /* rows of the block's list that come before the first */
    int32_t block;
    int32_t proxy_head; /* sparse mode */
    int32_t key_row;    /* first key */
    int32_t keys;       /* how many there are, at most share_keys; not positive if the block ends before */
    int32_t position;   /* of the first key within its document */

    __device__ __forceinline__ int32_t row(int32_t i) const {
        return edge_row == nullptr ? first_row + i : edge_row[i];
    }
    __device__ __forceinline__ int32_t slot(int32_t i) const {
        return edge_slot == nullptr ? 0 : edge_slot[i];
    }
};

/* Called by all threads of the block. Whether there is anything to do. */
__device__ __forceinline__ bool take_share(const work &w, const place &at, share &s) {
    const fmsa_cuda_geometry &g = w.geometry;
    if (w.items != nullptr) {
        if (at.number >= w.cuts[1] - w.cuts[0]) return false;
        const fmsa_cuda_item item = w.items[w.cuts[0] + at.number];
        s.block = item.block;
        s.proxy_head = item.proxy_head;
        s.count = item.edge_count;
        int64_t edge = item.edge_begin;
        const int32_t *rows = w.edge_row + edge;
        const int32_t first = rows[0], last = rows[s.count - 1];
        if (first >= w.row_end || last < w.row_begin) return false;
        if (first < w.row_begin || last >= w.row_end) {
            int32_t skipped = 0, taken = 0;
            for (int32_t start = 0; start < item.edge_count; start += blockDim.x) {
                const int32_t i = start + threadIdx.x;
                const int32_t row = i < item.edge_count ? rows[i] : INT32_MAX;
                skipped += __syncthreads_count(row < w.row_begin);
                taken += __syncthreads_count(row >= w.row_begin && row < w.row_end);
            }
            edge += skipped;
            s.count = taken;
        }
        s.edge_row = w.edge_row + edge;
        s.edge_slot = w.edge_slot + edge;
        s.first_row = 0;
        s.before = edge - w.list_begin[s.proxy_head * w.max_blocks + s.block];
    } else {
        if (at.number >= w.cuts[w.max_blocks]) return false;
        int64_t low = 0, high = w.max_blocks;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (w.cuts[middle] <= at.number ? low : high) = middle;
        }
        s.block = low;
        const int32_t list = g.block_q_begin[s.block];
        const int64_t piece = at.number - w.cuts[s.block];
        const int64_t begin = max(list, w.row_begin) + piece * w.piece_rows;
        const int64_t end = min(int64_t(min(g.block_q_end[s.block], w.row_end)), begin + w.piece_rows);
        s.edge_row = s.edge_slot = nullptr;
        s.first_row = begin;
        s.count = end - begin;
        s.before = begin - list;
        s.proxy_head = 0;
    }
    const int32_t skipped_keys = at.part * w.share_keys;
    s.key_row = g.block_k_begin[s.block] + skipped_keys;
    s.keys = min(g.block_k_end[s.block] - s.key_row, w.share_keys);
    s.position = g.block_number[s.block] * w.block_size + skipped_keys;
    return s.count > 0;
}

/* ---- fp32 sums in global memory. Rows of `columns` values; within each 16 columns they stand in the order in which
 * the four lanes of a result's row hold them: lane t has columns 2t, 2t + 1, 2t + 8, 2t + 9. ---- */

/* The first two of the four columns that a lane holds; the others are eight further. */
__device__ __forceinline__ int sum_column(int place) {
    return place / 16 * 16 + place % 16 / 4 * 2;
}

enum add_kind { ADD_IN_ANY_ORDER, ADD_ALONE, WRITE };

__device__ __forceinline__ void add_to_sums(float *sums, float a, float b, float c, float d, add_kind kind) {
    if (kind == ADD_IN_ANY_ORDER) {
        reduce_add_4(sums, a, b, c, d);
        return;
    }
    float4 value = {a, b, c, d};
    if (kind == ADD_ALONE) {
        const float4 old = __ldcg(reinterpret_cast<const float4 *>(sums));
        value = {old.x + a, old.y + b, old.z + c, old.w + d};
    }
    __stcg(reinterpret_cast<float4 *>(sums), value);
}

/* Adds ds k to rows of sums, where ds^T is a tile of [keys][rows] that all warps have left in shared memory: the warps
 * share out the columns. result: number of each row of sums; negative: nothing to add. row_tiles: 16 rows each, taken
 * by a warp at once. */
template <int row_tiles, typename T, int rows, int columns>
__device__ __forceinline__ void add_row_sums(float *sums, add_kind kind, const tile<T, rows> &ds,
                                             const tile<T, columns> &k, const int32_t *result, int keys) {
    constexpr int column_tiles = columns / 16, pieces = column_tiles * (rows / 16) / row_tiles;
    const int lane = threadIdx.x & 31;
    for (int piece = threadIdx.x / 32; piece < pieces; piece += blockDim.x / 32) {
        const int column = piece % column_tiles * 16, first_row = piece / column_tiles * (16 * row_tiles);
        float sum[row_tiles][2][4] = {};
#pragma unroll 4
        for (int key = 0; key < keys; key += 16) {
            right_fragment<T> b[2];
            k.right(b, key, column);
#pragma unroll
            for (int m = 0; m < row_tiles; m++) {
                const left_fragment<T> left = ds.left_transposed(key, first_row + 16 * m);
                multiply_add(sum[m][0], left, b[0]);
                multiply_add(sum[m][1], left, b[1]);
            }
        }
#pragma unroll
        for (int m = 0; m < row_tiles; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int32_t target = result[first_row + 16 * m + 8 * half + lane / 4];
                if (target < 0) continue;
                add_to_sums(sums + int64_t(target) * columns + column + 4 * (lane & 3), sum[m][0][2 * half],
                            sum[m][0][2 * half + 1], sum[m][1][2 * half], sum[m][1][2 * half + 1], kind);
            }
        }
    }
}

/* fp32 sums of key gradients. Without turns, shares add to one row of sums for each key head in any order. With turns
 * there is a row of sums for each unit, and the shares of a block's list add to it one after another. */
struct key_sums {
    int64_t heads;  /* rows of sums for a key: key heads, or units */
    int32_t *turns; /* NULL, or [units][max_blocks][parts], zero at first: rows of the list that have been added */
};

/* Called by all threads; between the two, the share has its turn. */
__device__ __forceinline__ int32_t *wait_for_turn(const key_sums &sums, const work &w, const share &s, int64_t unit,
                                                  int32_t part) {
    if (sums.turns == nullptr) return nullptr;
    int32_t *turn = sums.turns + (unit * w.max_blocks + s.block) * (w.block_size / w.share_keys) + part;
    if (threadIdx.x == 0) {
        while (atomicAdd(turn, 0) != s.before)
            __nanosleep(64);
        __threadfence();
    }
    __syncthreads();
    return turn;
}

__device__ __forceinline__ void end_turn(int32_t *turn, const share &s) {
    if (turn == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence(); /* what the barrier gathered, not only this thread's own sums */
    atomicExch(turn, static_cast<int32_t>(s.before + s.count));
}

/* Adds a warp's sums of 16 keys, the first of which is `key` of the share. */
template <int columns>
__device__ __forceinline__ void add_key_sums(float *sums, const float (&sum)[columns / 8][4], const key_sums &layout,
                                             const share &s, int64_t head, int key) {
    const int lane = threadIdx.x & 31;
    const add_kind kind = layout.turns == nullptr ? ADD_IN_ANY_ORDER : ADD_ALONE;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int k = key + lane / 4 + 8 * half;
        if (k >= s.keys) continue;
        float *row = sums + ((s.key_row + int64_t(k)) * layout.heads + head) * columns + 4 * (lane & 3);
#pragma unroll
        for (int n = 0; n < columns / 8; n += 2) {
            add_to_sums(row + 8 * n, sum[n][2 * half], sum[n][2 * half + 1], sum[n + 1][2 * half],
                        sum[n + 1][2 * half + 1], kind);
        }
    }
}

} // namespace fmsa

#endif
