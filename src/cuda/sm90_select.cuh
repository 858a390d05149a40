/* Proxy scores and top-k on Hopper: the kernel, for operands of 16 or 8 bits.
 *
 * Computes, for each (token, proxy head), the maximum of its scores over each key block that it could choose, and
 * either keeps the best 16 blocks in registers and writes block_indices (fused), or writes the maxima to scratch, from
 * which fmsa_cuda_top_k chooses (for larger k).
 *
 * Tile. 256 rows of one proxy key head, walked token by token with the heads that share the key head within, against
 * one key block of 128 keys after another, the newest first. Blocks that a row keeps whatever their scores are, and
 * rows that see no more than k blocks, are not scored: with local_blocks >= 1 every scored block lies wholly before its
 * row, so nothing is masked within a block. (With local_blocks = 0 a simpler loop masks, without overlap.)
 * A thread block takes a tile, the longest tiles first. When tiles are too few for the card, their key blocks are cut
 * into parts of one length; the thread block that finishes last merges the parts' lists; the order is strict, so the
 * result does not depend on who that is.
 *
 * Roles. One producer warpgroup, one thread of which copies Q once and key blocks into a ring of stages (TMA); two
 * consumer warpgroups of 128 rows, two wgmma accumulators of 64 x 128 each. A consumer issues both products of a block,
 * takes the maxima of the block before into its lists while they run, reduces the first accumulator while the second
 * is computed, and the second while the other warpgroup multiplies. In 16 bits the two take turns at issuing, so that
 * they do not do the same thing at the same time; in 8 bits the turns cost more than they bring. The producer waits for
 * both consumers to empty a stage.
 *
 * Order. Scores become integers that order as the selection does (NaN lowest, -0 as +0). Blocks come newest first and
 * an equal score goes before those already there, so that ties go to the lower block. */
#ifndef FMSA_CUDA_SM90_SELECT_CUH
#define FMSA_CUDA_SM90_SELECT_CUH

#include <math_constants.h>

#include "launch.h"
#include "schedule.h"
#include "selection.cuh"
#include "sm90.cuh"

namespace fmsa {

constexpr int select_rows = 256, select_keys = 128, select_threads = 384, select_kept = 16;

/* What a launch computes. Tiles are those of the query rows first ... end - 1. */
struct select_work {
    fmsa_cuda_geometry geometry;
    fmsa_tensor q;             /* q_proxy */
    fmsa_tensor block_indices; /* fused: the result */
    float *scores;             /* otherwise: see fmsa_cuda_scores */
    int64_t scores_stride;
    const float *block_scale; /* 8 bits: [Hpk][blocks] factor of a key block's scores; otherwise NULL */
    int2 *lists;              /* [tiles][key heads][parts][16][256] (score as integer, block id), when parts > 1 */
    uint32_t *parts_done;     /* [tiles][key heads], 0 at first, when parts > 1 */
    int64_t blocks;           /* NB */
    int32_t first, end;
    int32_t heads, group; /* Hp; proxy heads that share a key head */
    int32_t key_heads;    /* Hpk */
    int32_t tile_tokens;  /* 256 / group */
    int32_t tiles, parts;
    int32_t top_k, local_blocks, init_blocks;
    float scale;
};

/* ---- Rows ---------------------------------------------------------------------------------------------------- */

struct id_range {
    int32_t begin, end;
};

/* One row of a tile: its token and head, and the block ids among which scores decide. */
struct select_row {
    int32_t token, head; /* token -1: behind the last row */
    int32_t position, first_block;
    selection chosen;
    id_range candidates;

    __device__ select_row(const select_work &w, int32_t tile, int32_t key_head, int32_t row)
        : token(-1), head(key_head * w.group + row % w.group), position(-1), first_block(0), chosen(0, 1, 0, 0) {
        const int32_t index = row / w.group;
        candidates = {0, 0};
        if (index >= w.tile_tokens || index >= w.end - w.first - tile * w.tile_tokens) return;
        token = w.first + tile * w.tile_tokens + index;
        position = w.geometry.row_position[token];
        first_block = w.geometry.row_first_block[token];
        chosen = selection(position < 0 ? 0 : position / select_keys + 1, w.top_k, w.local_blocks, w.init_blocks);
        if (chosen.open()) candidates = {first_block + chosen.init_end, first_block + chosen.local_begin};
    }
    __device__ bool is_candidate(int32_t id) const {
        return id >= candidates.begin && id < candidates.end;
    }
};

/* The block ids that this part of a tile scores, and how many parts have any. */
struct select_share {
    id_range ids;
    int32_t parts;
};

__device__ __forceinline__ select_share find_share(const select_work &w, int32_t tile, int32_t part) {
    __shared__ int32_t least, most;
    if (threadIdx.x == 0) {
        least = INT32_MAX;
        most = 0;
    }
    __syncthreads();
    if (threadIdx.x < select_rows) {
        const int32_t index = min((int32_t)threadIdx.x, w.tile_tokens - 1);
        const select_row row(w, tile, 0, index * w.group);
        const bool any = row.candidates.end > 0;
        const int32_t warp_least = __reduce_min_sync(0xffffffffu, any ? row.candidates.begin : INT32_MAX);
        const int32_t warp_most = __reduce_max_sync(0xffffffffu, any ? row.candidates.end : 0);
        if (threadIdx.x % 32 == 0) {
            atomicMin(&least, warp_least);
            atomicMax(&most, warp_most);
        }
    }
    __syncthreads();
    const int32_t blocks = most > 0 ? most - least : 0;
    const int32_t length = max((blocks + w.parts - 1) / w.parts, 1), begin = min(part * length, blocks);
    return {{least + begin, least + min(begin + length, blocks)}, (blocks + length - 1) / length};
}

/* ---- The best blocks of a row -------------------------------------------------------------------------------- */

constexpr int32_t hidden_key = INT32_MIN, empty_key = INT32_MIN + 1, nan_key = INT32_MIN + 2;

/* Greater for a score that is to be preferred; equal scores are equal. */
__device__ __forceinline__ int32_t preference(float score) {
    const int32_t bits = __float_as_int(score + 0.0f); /* -0 + 0 = +0 */
    return isnan(score) ? nan_key : bits ^ (bits >> 31 & INT32_MAX);
}

/* Whether block a is to be preferred to block b. */
__device__ __forceinline__ bool goes_before(int32_t a_key, int32_t a_id, int32_t b_key, int32_t b_id) {
    return a_key > b_key || (a_key == b_key && a_id < b_id);
}

/* The best blocks that were offered, the most preferred first. Blocks must be offered from the newest to the oldest, so
 * that one of equal score goes before those already there. */
struct best_blocks {
    int32_t key[select_kept], id[select_kept];
    int32_t waiting_key, waiting_id; /* a block that is not in the list yet; hidden_key: none */

    __device__ __forceinline__ best_blocks() : waiting_key(hidden_key), waiting_id(-1) {
#pragma unroll
        for (int i = 0; i < select_kept; i++) {
            key[i] = empty_key;
            id[i] = -1;
        }
    }
    __device__ __forceinline__ void insert(int32_t new_key, int32_t new_id) {
        bool before_last = new_key >= key[select_kept - 1];
#pragma unroll
        for (int i = select_kept - 1; i > 0; i--) {
            const bool before_next = new_key >= key[i - 1];
            id[i] = before_next ? id[i - 1] : before_last ? new_id : id[i];
            key[i] = max(key[i], min(key[i - 1], new_key));
            before_last = before_next;
        }
        id[0] = before_last ? new_id : id[0];
        key[0] = max(key[0], new_key);
    }
    /* A block that may belong in the list waits until a lane of the warp has a second one: inserting is the dear part,
     * and all lanes do it at once. */
    __device__ __forceinline__ void offer(int32_t new_key, int32_t new_id) {
        const bool wanted = new_key >= key[select_kept - 1];
        if (__any_sync(0xffffffffu, wanted && waiting_key != hidden_key)) finish();
        waiting_key = wanted ? new_key : waiting_key;
        waiting_id = wanted ? new_id : waiting_id;
    }
    __device__ __forceinline__ void finish() {
        insert(waiting_key, waiting_id);
        waiting_key = hidden_key;
    }
    /* Takes in another such list, of other blocks, entry i of which is at other[i * stride]. */
    __device__ __forceinline__ void merge(const int2 *other, int64_t stride) {
        /* The better of each pair from the two ends are the best of both, in bitonic order. */
#pragma unroll
        for (int i = 0; i < select_kept; i++) {
            const int2 entry = __ldcg(other + (select_kept - 1 - i) * stride);
            const bool replaces = goes_before(entry.x, entry.y, key[i], id[i]);
            key[i] = replaces ? entry.x : key[i];
            id[i] = replaces ? entry.y : id[i];
        }
#pragma unroll
        for (int step = select_kept / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < select_kept; i++) {
                if (i & step) continue;
                const bool swaps = goes_before(key[i + step], id[i + step], key[i], id[i]);
                const int32_t first_key = key[i], first_id = id[i];
                key[i] = swaps ? key[i + step] : first_key;
                id[i] = swaps ? id[i + step] : first_id;
                key[i + step] = swaps ? first_key : key[i + step];
                id[i + step] = swaps ? first_id : id[i + step];
            }
        }
    }
};

/* Puts the first `count` ids into ascending order: a bitonic network, with the rest as large as can be. */
__device__ __forceinline__ void sort_ids(int32_t (&id)[select_kept], int32_t count) {
#pragma unroll
    for (int i = 0; i < select_kept; i++)
        id[i] = i < count ? id[i] : INT32_MAX;
#pragma unroll
    for (int size = 2; size <= select_kept; size *= 2) {
#pragma unroll
        for (int step = size / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < select_kept; i++) {
                if (i & step) continue;
                const int32_t low = min(id[i], id[i + step]), high = max(id[i], id[i + step]);
                id[i] = i & size ? high : low;
                id[i + step] = i & size ? low : high;
            }
        }
    }
}

__device__ __forceinline__ void write_indices(const select_work &w, const select_row &row, best_blocks &best) {
    if (row.token < 0) return;
    int32_t *indices = (int32_t *)w.block_indices.data + row.token * w.block_indices.row_stride +
                       row.head * w.block_indices.head_stride;
    const selection &s = row.chosen;
    int32_t at = 0;
    for (int32_t block = s.init_begin; block < s.init_end; block++)
        indices[at++] = block;
    const int32_t chosen = s.chosen();
    if (s.open()) {
        sort_ids(best.id, chosen);
#pragma unroll
        for (int i = 0; i < select_kept; i++) {
            if (i < chosen) indices[at + i] = best.id[i] - row.first_block;
        }
    } else {
        for (int i = 0; i < chosen; i++)
            indices[at + i] = s.init_end + i;
    }
    at += chosen;
    for (int32_t block = s.local_begin; block < s.visible; block++)
        indices[at++] = block;
    for (; at < w.top_k; at++)
        indices[at] = -1;
}

/* Leaves the list of one part for the others. Returns whether this was the tile's last part: `best` then holds the best
 * of all parts. Called by the 256 consumer threads. */
__device__ __forceinline__ bool merge_parts(const select_work &w, int64_t tile, int32_t part, int32_t parts,
                                            int32_t row, best_blocks &best) {
    __shared__ bool last;
    int2 *lists = w.lists + tile * w.parts * (select_kept * select_rows) + row;
#pragma unroll
    for (int i = 0; i < select_kept; i++) {
        __stcg(&lists[(part * select_kept + i) * select_rows], make_int2(best.key[i], best.id[i]));
    }
    __threadfence();
    named_barrier_sync(1, 256);
    if (threadIdx.x == 0) last = atomicAdd(&w.parts_done[tile], 1u) == (uint32_t)parts - 1;
    named_barrier_sync(1, 256);
    if (!last) return false;
    __threadfence();
    for (int32_t other = 0; other < parts; other++) {
        if (other != part) best.merge(lists + (int64_t)other * (select_kept * select_rows), select_rows);
    }
    return true;
}

/* ---- Maxima of a 64 x 128 accumulator: low for row lane / 4 of the warp's 16, high for the row eight further. Each
 * lane looks at its own 32 columns of either. ---- */

/* NaN counts only where a lane has nothing else. */
__device__ __forceinline__ void row_maxima(const float (&s)[64], float &low, float &high) {
    low = high = CUDART_NAN_F;
#pragma unroll
    for (int i = 0; i < 64; i += 4) {
        low = fmaxf(low, fmaxf(s[i], s[i + 1]));
        high = fmaxf(high, fmaxf(s[i + 2], s[i + 3]));
    }
}

/* The greatest or least of each row's numbers as integers; Hopper takes three at once. */
template <bool greatest>
__device__ __forceinline__ void row_extremes(const float (&s)[64], int32_t &low, int32_t &high) {
    const auto bits = [&](int i) { return __float_as_int(s[i]); };
    int32_t best[4]; /* two chains for each row */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = 4 * (i % 2) + 2 * (i / 2);
        best[i] = greatest ? max(bits(at), bits(at + 1)) : min(bits(at), bits(at + 1));
#pragma unroll
        for (int j = at + 8; j < 64; j += 8) {
            best[i] =
                greatest ? __vimax3_s32(best[i], bits(j), bits(j + 1)) : __vimin3_s32(best[i], bits(j), bits(j + 1));
        }
    }
    low = greatest ? max(best[0], best[1]) : min(best[0], best[1]);
    high = greatest ? max(best[2], best[3]) : min(best[2], best[3]);
}

/* The same as row_maxima, faster. Numbers of which one is not negative order as their bits do, negative ones the other
 * way round. A NaN shows as more than infinity. */
__device__ __forceinline__ void row_maxima_by_bits(const float (&s)[64], float &low, float &high) {
    constexpr int32_t infinity = 0x7f800000;
    int32_t low_bits, high_bits;
    row_extremes<true>(s, low_bits, high_bits);
    low = __int_as_float(low_bits);
    high = __int_as_float(high_bits);
    if (max((uint32_t)low_bits, (uint32_t)high_bits) <= (uint32_t)infinity) return;
    if (max(low_bits, high_bits) > infinity) {
        row_maxima(s, low, high);
    } else {
        int32_t low_least, high_least;
        row_extremes<false>(s, low_least, high_least);
        if (low_bits < 0) low = __int_as_float(low_least);
        if (high_bits < 0) high = __int_as_float(high_least);
    }
}

/* The same over the columns up to a limit. */
__device__ __forceinline__ void row_maxima_up_to(const float (&s)[64], int32_t low_limit, int32_t high_limit,
                                                 float &low, float &high) {
    const int column = threadIdx.x % 4 * 2;
    low = high = CUDART_NAN_F;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        const int at = i / 4 * 8 + column + i % 2;
        if (i % 4 < 2) {
            low = fmaxf(low, at <= low_limit ? s[i] : CUDART_NAN_F);
        } else {
            high = fmaxf(high, at <= high_limit ? s[i] : CUDART_NAN_F);
        }
    }
}

/* Lane t of a quad gets the maximum over the quad of x[t]. */
__device__ __forceinline__ float quad_transposed_max(const float (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    const float low = fmaxf(odd ? x[1] : x[0], __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1));
    const float high = fmaxf(odd ? x[3] : x[2], __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1));
    return fmaxf(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 2));
}

/* ---- The kernel ---------------------------------------------------------------------------------------------- */

/* What goes through the ring of key blocks. */
template <typename Operands>
struct select_ring {
    uint32_t queries, stages, barriers; /* full, empty of each stage; then that of the queries */

    __device__ select_ring() {
        extern __shared__ uint8_t memory[];
        queries = (shared_address(memory) + 1023) & ~1023u;
        stages = queries + Operands::query_bytes;
        barriers = stages + Operands::stages * Operands::stage_bytes;
    }
    static constexpr size_t bytes() {
        return 1024 + Operands::query_bytes + Operands::stages * (Operands::stage_bytes + 16) + 8;
    }
    __device__ uint32_t stage(int i) const {
        return stages + i * Operands::stage_bytes;
    }
    __device__ uint32_t full(int i) const {
        return barriers + i * 8;
    }
    __device__ uint32_t empty(int i) const {
        return barriers + (Operands::stages + i) * 8;
    }
    __device__ uint32_t queries_full() const {
        return barriers + 2 * Operands::stages * 8;
    }
    __device__ void init() const {
        for (int i = 0; i < Operands::stages; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), 2);
        }
        barrier_init(queries_full(), 1);
        barrier_init_fence();
    }
};

/* Which stage comes next, and the parity of the phase in which it is full. */
template <int stages>
struct ring_place {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

template <typename Operands>
__device__ void produce(const CUtensorMap *q_map, const CUtensorMap *k_map, const select_work &w,
                        const select_ring<Operands> &ring, id_range ids, int32_t tile, int32_t key_head) {
    Operands::load_queries(q_map, w, ring.queries, ring.queries_full(), tile, key_head);
    ring_place<Operands::stages> place;
    int32_t k_begin = w.geometry.block_k_begin[ids.end - 1];
#pragma unroll 1
    for (int32_t id = ids.end - 1; id >= ids.begin; id--) {
        const int32_t next_begin = w.geometry.block_k_begin[max(id - 1, 0)];
        barrier_wait(ring.empty(place.stage), place.parity ^ 1);
        barrier_arrive_expect(ring.full(place.stage), Operands::stage_bytes);
        Operands::load_keys(k_map, ring.stage(place.stage), ring.full(place.stage), k_begin, key_head);
        place.advance();
        k_begin = next_begin;
    }
}

/* What becomes of a row's maximum over a block. */
template <bool fused>
struct select_sink;

template <>
struct select_sink<true> {
    best_blocks best;
    id_range candidates;

    __device__ __forceinline__ select_sink(const select_work &, const select_row &row) : candidates(row.candidates) {
    }
    __device__ __forceinline__ void take(int32_t id, float score) {
        const bool candidate = id >= candidates.begin && id < candidates.end;
        best.offer(candidate ? preference(score) : hidden_key, id);
    }
};

template <>
struct select_sink<false> {
    float *scores; /* of block id 0 */
    id_range candidates;

    __device__ __forceinline__ select_sink(const select_work &w, const select_row &row)
        : scores(w.scores), candidates(row.candidates) {
        scores += ((int64_t)(row.token - w.first) * w.heads + row.head) * w.scores_stride - row.first_block;
    }
    __device__ __forceinline__ void take(int32_t id, float score) {
        if (id >= candidates.begin && id < candidates.end) scores[id] = score;
    }
};

template <typename Operands, bool fused>
__device__ void consume(const select_work &w, const select_ring<Operands> &ring, const select_share &share,
                        int32_t tile, int32_t key_head, int32_t part) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 128 * 128 + threadIdx.x % 128 / 32 * 16;
    /* Rows of the accumulators: 0, 1 of the first, 2, 3 of the second. A lane owns one of its quad's four. */
    const auto row_of = [&](int i) { return warp_row + i / 2 * 64 + i % 2 * 8 + lane / 4; };
    int32_t own = row_of(lane % 4);
    select_sink<fused> sink(w, select_row(w, tile, key_head, own));
    const float *block_scale = w.block_scale == nullptr ? nullptr : w.block_scale + key_head * w.blocks;

    if (share.ids.begin < share.ids.end) {
        Operands operands(w, ring.queries, warp_row, tile, key_head);
        if constexpr (Operands::query_bytes > 0) barrier_wait(ring.queries_full(), 0);
        ring_place<Operands::stages> place;
        float s[2][64], maxima[4];
        const auto take = [&](int32_t id, float factor) { sink.take(id, quad_transposed_max(maxima) * factor); };
        const auto factor_of = [&](int32_t id) {
            return block_scale == nullptr ? w.scale : w.scale * __ldg(block_scale + id);
        };
        const auto release = [&] {
            if (threadIdx.x % 128 == 0) barrier_arrive(ring.empty(place.stage));
            place.advance();
        };
        if (w.local_blocks > 0) {
            const uint32_t consumer = threadIdx.x / 128, own_turn = 2 + consumer, other_turn = 3 - consumer;
            if (Operands::takes_turns && consumer == 1) named_barrier_arrive(other_turn, 256);
            int32_t previous = -1;
            float factor = 0;
#pragma unroll
            for (int i = 0; i < 4; i++)
                maxima[i] = 0;
#pragma unroll 1
            for (int32_t id = share.ids.end - 1; id >= share.ids.begin; id--) {
                barrier_wait(ring.full(place.stage), place.parity);
                if constexpr (Operands::takes_turns) named_barrier_sync(own_turn, 256);
                wgmma_fence();
                operands.multiply(s[0], 0, ring.stage(place.stage));
                wgmma_commit();
                operands.multiply(s[1], 1, ring.stage(place.stage));
                wgmma_commit();
                if constexpr (Operands::takes_turns) named_barrier_arrive(other_turn, 256);
                take(previous, factor);
                factor = factor_of(id);
                previous = id;
                wgmma_wait<1>();
                pin(s[0]);
                row_maxima_by_bits(s[0], maxima[0], maxima[1]);
                pin(maxima);
                wgmma_wait<0>();
                pin(s[1]);
                release();
                row_maxima_by_bits(s[1], maxima[2], maxima[3]);
                pin(maxima);
            }
            take(previous, factor);
        } else {
            int32_t reach[4]; /* row i sees the first reach - id * 128 + 1 keys of block id */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const select_row row(w, tile, key_head, row_of(i));
                reach[i] = row.first_block * select_keys + row.position;
            }
#pragma unroll 1
            for (int32_t id = share.ids.end - 1; id >= share.ids.begin; id--) {
                barrier_wait(ring.full(place.stage), place.parity);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    wgmma_fence();
                    operands.multiply(s[0], i, ring.stage(place.stage));
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(s[0]);
                    row_maxima_up_to(s[0], reach[2 * i] - id * select_keys, reach[2 * i + 1] - id * select_keys,
                                     maxima[2 * i], maxima[2 * i + 1]);
                    pin(maxima);
                }
                release();
                take(id, factor_of(id));
            }
        }
    }
    if constexpr (fused) {
        sink.best.finish();
        asm volatile("" : "+r"(own)); /* what follows from it is computed again, not held through the loops */
        if (share.parts > 1 &&
            !merge_parts(w, (int64_t)tile * w.key_heads + key_head, part, share.parts, own, sink.best)) {
            return;
        }
        write_indices(w, select_row(w, tile, key_head, own), sink.best);
    }
}

template <typename Operands, bool fused>
__global__ void __launch_bounds__(select_threads, 1)
    score_tiles(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ select_work w) {
    const int32_t part = blockIdx.x % w.parts, rest = blockIdx.x / w.parts;
    const int32_t key_head = rest % w.key_heads, tile = w.tiles - 1 - rest / w.key_heads;
    const select_ring<Operands> ring;
    if (threadIdx.x == 0) ring.init();
    const select_share share = find_share(w, tile, part); /* synchronises */
    /* A tile without candidates has one part, which writes the rows. */
    if (part >= max(share.parts, 1)) return;
    if (threadIdx.x >= 256) {
        warpgroup_give_registers<24>();
        if (threadIdx.x == 256 && share.ids.begin < share.ids.end)
            produce<Operands>(&q_map, &k_map, w, ring, share.ids, tile, key_head);
    } else {
        warpgroup_take_registers<240>();
        consume<Operands, fused>(w, ring, share, tile, key_head, part);
    }
}

template <typename Operands, bool fused>
fmsa_status launch_scores(const CUtensorMap &q_map, const CUtensorMap &k_map, const select_work &w,
                          cudaStream_t stream) {
    const int64_t blocks = (int64_t)w.tiles * w.key_heads * w.parts;
    return launch("score_tiles", score_tiles<Operands, fused>, dim3((unsigned)blocks), select_threads,
                  select_ring<Operands>::bytes(), stream, q_map, k_map, w);
}

} // namespace fmsa

#endif
