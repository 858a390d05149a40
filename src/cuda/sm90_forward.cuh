/* What the Hopper forward's kernels share: how query rows are cut into tiles, what the plan leaves in scratch for the
 * kernels that attend, and the arithmetic of a warp's part of a tile.
 *
 * A *tile* is up to `tokens` neighbouring tokens of one document times the `heads` query heads of a unit (problem.h),
 * all within one key block of positions: so no product mixes documents, the block that holds the tokens (the *local*
 * block) is one for all, and only this block can be incomplete or in part in the future. A tile's rows lie in two
 * halves of 64, one a warpgroup: row token * heads + head of each half, the last 64 - half_tokens * heads idle. */
#ifndef FMSA_CUDA_SM90_FORWARD_CUH
#define FMSA_CUDA_SM90_FORWARD_CUH

#include <math_constants.h>

#include "portable_parts.cuh"
#include "sm90.cuh"
#include "tensor_map.h"

namespace fmsa {
namespace forward90 {

constexpr int block_keys = 128;                             /* keys of a block */
constexpr int half_rows = 64;                               /* of a tile; one warpgroup */
constexpr int most_tokens = 2 * half_rows;                  /* of a tile */
constexpr int mask_words = most_tokens / 32;                /* one bit a token */
constexpr int kernel_threads = 384, consumer_threads = 256; /* of a kernel that attends: a producer, two consumers */

/* A row of a half belongs to token row / heads and head row % heads. */
struct tile_shape {
    int32_t heads;       /* of a unit, 1 ... 64 */
    int32_t half_tokens; /* 64 / heads */
    int32_t tokens;      /* 2 * half_tokens */
    int32_t per_block;   /* tiles that 128 positions are cut into */
    uint32_t inverse;    /* 65,536 / heads, rounded up */

    /* Exact for all rows of a half. */
    __device__ __forceinline__ int32_t token_of(int32_t row) const {
        return row * inverse >> 16;
    }
};

/* One tile, as the plan places it. */
struct __align__(16) tile {
    int32_t first_row;   /* query row of the first token */
    int32_t rows;        /* tokens, 1 ... tile_shape.tokens */
    int32_t position;    /* of the first token in its document */
    int32_t key_row;     /* first key of the document */
    int32_t local_keys;  /* keys of the local block that exist; 1 ... 128 */
    int32_t first_block; /* block id of the document's first block */
    int32_t reserved[2];

    __device__ __forceinline__ int32_t local_block() const {
        return position / block_keys;
    }
};

/* What is known of all tiles of a launch. */
struct counters {
    int32_t tiles;
    int32_t partials;   /* not 0 when some edge is left to the key-outer kernel */
    int32_t next_query; /* next piece of work of each kernel */
    int32_t next_merge;
    int32_t next_key;
    int32_t remote_edges; /* that the key-outer kernel takes */
    int32_t pieces;       /* they come in */
    int32_t reserved;
};

/* A tile's list of key blocks, for one proxy head: steps of the query-outer kernels. Entry 0 is the local block, the
 * next front - 1 entries are blocks that some of the tile's tokens chose, ascending, the rest blocks that all chose,
 * descending, at the end of the list's room. */
struct __align__(16) step_list {
    int32_t steps;
    int32_t masked; /* steps at the front in which some row does not see all keys; all, where a row has not the local
                       block, or the tile not all its tokens: each row then keeps a maximum from step to step */
    int32_t front;
    int32_t partials; /* most partial results that a token of the tile has from the key-outer kernel */
};

/* Lists in scratch. A list has room for `room` entries of 1 + words numbers: the block's number within the document,
 * and a bit for each of the tile's tokens that chose it. */
struct step_lists {
    step_list *lists;  /* [proxy heads][tiles]; NULL in dense mode, where a tile takes all blocks up to the local */
    uint32_t *entries; /* [proxy heads][tiles][room][1 + words] */
    uint8_t *token_partials; /* [proxy heads][tiles][count_bytes] partial results of each token */
    int32_t most_tiles;      /* that there is room for */
    int32_t room, words;
    int32_t count_bytes; /* a multiple of 16, not less than a tile's tokens */

    __device__ __forceinline__ int64_t list(int32_t proxy_head, int32_t tile) const {
        return int64_t(proxy_head) * most_tiles + tile;
    }
};

/* What the query-outer kernels work on: pairs of a tile and a unit. */
struct tile_work {
    tile_shape shape;
    int32_t units, units_per_key_head, units_per_proxy_head;
    int32_t side; /* units taken side by side, a divisor of units: as many as have keys and values that fit in L2 */
    const tile *tiles;
    step_lists lists;
    counters *state;
    int32_t slots, unit_cells; /* see partial_results */
};

/* A tile of one unit as the warps of a query-outer kernel see it. */
struct __align__(16) tile_header {
    tile at;
    step_list list;              /* steps 0: no tile is left */
    uint32_t chosen[mask_words]; /* of the local block */
    const uint32_t *entries;     /* of the list; NULL in dense mode */
    int64_t first_cell;          /* of the partial results */
    int32_t unit;
    int32_t reserved[3];
    uint8_t token_partials[most_tokens];
};

/* Headers in turn. The planner warp is up to two ahead of the producer, which loads at most two tiles ahead of the one
 * that the consumers are at, and these write the results of the tile before. */
struct header_ring {
    static constexpr int size = 6;
    tile_header header[size];
    uint64_t fetched[size], begun[size]; /* barriers: by the planner; by the producer */
};

__device__ __forceinline__ int32_t following(int32_t header) {
    return header + 1 == header_ring::size ? 0 : header + 1;
}

/* Called by one thread before the block starts. */
__device__ __forceinline__ void init_headers(header_ring &r) {
    for (int i = 0; i < header_ring::size; i++) {
        barrier_init(shared_address(&r.fetched[i]), 1);
        barrier_init(shared_address(&r.begun[i]), 1);
    }
}

/* The work of the planner warp: it hands out tiles and fetches their headers, so that the producer never waits for
 * memory. */
struct planner {
    const tile_work &w;
    header_ring &r;
    int32_t *counter;
    const int lane = threadIdx.x & 31;
    int32_t drawn = 0; /* lane 0: the next piece of work, drawn early since the answer takes its time */

    __device__ __forceinline__ void draw() {
        if (lane == 0) drawn = atomicAdd(counter, 1);
    }

    /* Long lists stand at a document's end, so tiles are taken from the last. Whether there is one. */
    __device__ __forceinline__ bool fetch(tile_header &h, int32_t tiles) {
        const int32_t work = uniform(drawn), group = work / max(tiles * w.side, 1);
        if (group * w.side >= w.units || tiles == 0) {
            if (lane == 0) h.list.steps = 0;
            __syncwarp();
            return false;
        }
        draw();
        const int32_t in_group = work - group * tiles * w.side, place = in_group / w.side;
        const int32_t number = tiles - 1 - place, unit = group * w.side + in_group - place * w.side;
        const bool dense = w.lists.lists == nullptr;
        const char *const from = reinterpret_cast<const char *>(w.tiles + number);
        if (lane < 2) cp_async_16(shared_address(&h.at) + 16 * lane, from + 16 * lane, true);
        if (!dense) {
            const int64_t list = w.lists.list(unit / w.units_per_proxy_head, number);
            const int32_t counts = w.lists.count_bytes;
            const uint32_t *const entries = w.lists.entries + list * w.lists.room * (1 + w.lists.words);
            if (lane == 2) cp_async_16(shared_address(&h.list), w.lists.lists + list, true);
            if (lane >= 4 && lane < 4 + w.lists.words)
                cp_async_4(shared_address(&h.chosen[lane - 4]), entries + 1 + lane - 4, true);
            if (lane >= 8 && lane - 8 < counts / 16) {
                cp_async_16(shared_address(h.token_partials) + 16 * (lane - 8),
                            w.lists.token_partials + list * counts + 16 * (lane - 8), true);
            }
            if (lane == 0) h.entries = entries;
        }
        if (lane == 0) {
            h.unit = unit;
            h.first_cell = int64_t(unit) * w.unit_cells + int64_t(number) * w.slots * w.shape.tokens;
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        if (dense) {
            const int32_t steps = h.at.local_block() + 1;
            if (lane < mask_words) h.chosen[lane] = token_bits(h.at.rows, lane);
            if (lane == 0) {
                h.list = {steps, h.at.rows == w.shape.tokens ? 1 : steps, 0, 0};
                h.entries = nullptr;
            }
            __syncwarp();
        }
        return true;
    }

    /* Calls on_begun with the header of each tile that the producer has begun, but for the last two. */
    template <typename F>
    __device__ __forceinline__ void run(F on_begun) {
        const int32_t tiles = w.state->tiles;
        draw();
        bool more = true;
        int32_t begun = -2; /* the header that the producer must have begun */
        uint32_t parity = 0;
        for (int32_t at = 0; more; at = following(at)) {
            if (begun >= 0) {
                barrier_wait(shared_address(&r.begun[begun]), parity);
                on_begun(r.header[begun]);
            }
            if (++begun == header_ring::size) {
                begun = 0;
                parity ^= 1;
            }
            more = fetch(r.header[at], tiles);
            if (lane == 0) barrier_arrive(shared_address(&r.fetched[at]));
        }
    }

    /* Word `word` of the bits of a tile's tokens. */
    static __device__ __forceinline__ uint32_t token_bits(int32_t rows, int32_t word) {
        const int32_t left = rows - 32 * word;
        return left >= 32 ? 0xffffffffu : left <= 0 ? 0 : (1u << left) - 1;
    }
};

/* The producer's way through a tile's list; each entry is read a step early. */
struct list_reader {
    const tile_header &h;
    const int32_t room, words;
    int32_t block;   /* of the step */
    uint32_t chosen; /* the lane's word of the tokens that chose it */
    int32_t step = 0;

    __device__ __forceinline__ list_reader(const tile_header &h, const step_lists &lists)
        : h(h), room(lists.room), words(lists.words), block(h.at.local_block()),
          chosen((threadIdx.x & 31) < mask_words ? h.chosen[threadIdx.x & 31] : 0) {
    }
    /* The next step's block and tokens; the caller assigns them once it is done with this step's. */
    __device__ __forceinline__ int32_t next(uint32_t &next_chosen) {
        const int lane = threadIdx.x & 31;
        step++;
        next_chosen = planner::token_bits(h.at.rows, lane);
        if (h.entries == nullptr) return block - 1;
        if (step >= h.list.steps) return 0;
        const int32_t place = step < h.list.front ? step : room - h.list.steps + step;
        const uint32_t *const entry = h.entries + place * (1 + words);
        if (step < h.list.front && lane < words) next_chosen = entry[1 + lane];
        return entry[0];
    }
};

/* Zeros behind the `keys` first rows of a block of values in shared memory: what a copy brings there belongs to another
 * document or to nobody, and 0 times it need not be 0. All lanes of a warp call it, and a __syncwarp() must follow. */
template <int D>
__device__ __forceinline__ void clear_values(uint32_t values, int32_t keys) {
    for (int i = keys * 8 + (threadIdx.x & 31); i < block_keys * 8; i += 32) {
#pragma unroll
        for (int columns = 0; columns < D / 64; columns++)
            store_shared_16(values + columns * (block_keys * 128) + i * 16, {0, 0, 0, 0});
    }
    fence_async_proxy();
}

/* An edge that the key-outer kernel takes: the query row, and the cell its result goes to, counted within a unit's. */
struct remote_edge {
    int32_t row, cell;
};

/* Work of the key-outer kernel: edges of one key block and proxy head, at most piece_tiles tiles of them, so that the
 * last ones to finish do not keep the card waiting. */
struct __align__(16) edge_piece {
    int32_t begin, edges; /* in the array of remote edges */
    int32_t block;        /* block id */
    int32_t proxy_head;
};

constexpr int32_t piece_tiles = 16;

/* Partial results: a cell is one (unit, tile, slot, token), numbered in 32 bits, and holds `heads` rows of head_dim
 * values, each divided by its own sum, and their LSE in base 2. Within a row, the eight values that a lane of an
 * accumulator has of 32 columns stand together, in the order partial_place gives. */
template <typename T>
struct partial_results {
    T *values;
    float *lse;
    int32_t slots;
    int32_t unit_cells; /* most tiles * slots * tokens */
};

/* The place (16 bytes each) of columns 32 * piece ... + 31 of lane % 4 in a row of partial results. The exclusive or
 * spreads neighbouring rows over the banks of shared memory. */
template <int D>
__device__ __forceinline__ int partial_place(int piece, int head) {
    return (piece ^ (head & (D / 32 - 1))) * 4 + (threadIdx.x & 3);
}

/* A ring's next stage, and the parity to wait for there. */
template <int stages>
struct ring {
    int32_t stage = 0;
    uint32_t parity;

    __device__ explicit ring(uint32_t first) : parity(first) {
    }
    __device__ __forceinline__ void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* ---- A warp's part of a tile: 16 rows by 128 keys of scores, by D columns of output. A thread holds rows lane / 4
 * ("low") and lane / 4 + 8 ("high"). ---- */

struct row_pair {
    float low, high;
};

/* s = q k^T; q is a half's rows, [D / 64][64 rows][128 bytes], or else columns_apart tells how far (in 16 bytes) 64
 * columns are from the next; k a block's, [D / 64][128 keys][128 bytes]. */
template <typename T, int D>
__device__ __forceinline__ void issue_scores(float (&s)[64], uint64_t q, uint64_t k,
                                             uint32_t columns_apart = half_rows * 128 >> 4) {
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint32_t column = (i & 3) * 32;
        wgmma_if(s, q + i / 4 * columns_apart + (column >> 4), k + ((i / 4 * (block_keys * 128) + column) >> 4), i > 0,
                 T());
    }
}

/* Columns number * 16 ... + 15 of s (+)= q k^T, with q in registers. */
template <typename T, int D>
__device__ __forceinline__ void issue_scores(float (&s)[64], const uint32_t (&q)[D / 4], uint64_t k, int number) {
    wgmma_if(s, q[4 * number], q[4 * number + 1], q[4 * number + 2], q[4 * number + 3],
             k + ((number / 4 * (block_keys * 128) + (number & 3) * 32) >> 4), number > 0, T());
}

/* Keys number * 16 ... + 15 of o (+)= p v. */
template <typename T, int D>
__device__ __forceinline__ void issue_values(float (&o)[D / 2], const uint32_t (&p)[32], uint64_t v, int number,
                                             int accumulate) {
    wgmma_if<true>(o, p[4 * number], p[4 * number + 1], p[4 * number + 2], p[4 * number + 3], v + (number * 2048 >> 4),
                   accumulate, T());
}

/* Scores of keys beyond a row's limit become -inf. */
__device__ __forceinline__ void mask_scores(float (&s)[64], int32_t limit_low, int32_t limit_high) {
    const int32_t lane_key = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int j = 0; j < 16; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (lane_key + 8 * j + i > limit_low) s[4 * j + i] = -CUDART_INF_F;
            if (lane_key + 8 * j + i > limit_high) s[4 * j + 2 + i] = -CUDART_INF_F;
        }
    }
}

/* Maxima of the thread's own scores. */
__device__ __forceinline__ row_pair lane_max(const float (&s)[64]) {
    float a0 = fmaxf(s[0], s[1]), a1 = fmaxf(s[2], s[3]), b0 = fmaxf(s[4], s[5]), b1 = fmaxf(s[6], s[7]);
#pragma unroll
    for (int j = 2; j < 16; j += 2) {
        a0 = fmaxf(a0, fmaxf(s[4 * j], s[4 * j + 1]));
        a1 = fmaxf(a1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
        b0 = fmaxf(b0, fmaxf(s[4 * j + 4], s[4 * j + 5]));
        b1 = fmaxf(b1, fmaxf(s[4 * j + 6], s[4 * j + 7]));
    }
    return {fmaxf(a0, b0), fmaxf(a1, b1)};
}

/* x = 2^(s * scale - reference) of the 16 groups of four scores from `first` to `last` - 1; s stays as it is. Returns
 * the sums of the thread's own values. */
template <int first, int last>
__device__ __forceinline__ row_pair exponentiate(const float (&s)[64], float (&x)[4 * (last - first)], float scale,
                                                 const row_pair &reference) {
    float a0 = 0, a1 = 0, b0 = 0, b1 = 0;
#pragma unroll
    for (int j = 0; j < last - first; j++) {
        const float *const from = s + 4 * (first + j);
        float *const to = x + 4 * j;
        to[0] = exp2_approx(fmaf(from[0], scale, -reference.low));
        to[1] = exp2_approx(fmaf(from[1], scale, -reference.low));
        to[2] = exp2_approx(fmaf(from[2], scale, -reference.high));
        to[3] = exp2_approx(fmaf(from[3], scale, -reference.high));
        a0 += to[0];
        b0 += to[1];
        a1 += to[2];
        b1 += to[3];
    }
    return {a0 + b0, a1 + b1};
}

/* p = x, rounded to pairs. */
template <typename T, int n>
__device__ __forceinline__ void pack(const float (&x)[n], uint32_t *p) {
#pragma unroll
    for (int i = 0; i < n / 2; i++)
        p[i] = pack_pair(x[2 * i], x[2 * i + 1], T());
}

/* The whole block, rounded to p. */
template <typename T>
__device__ __forceinline__ row_pair exponentiate(const float (&s)[64], uint32_t (&p)[32], float scale,
                                                 const row_pair &reference) {
    float x[64];
    const row_pair own = exponentiate<0, 16>(s, x, scale, reference);
    pack<T>(x, p);
    return own;
}

template <int n>
__device__ __forceinline__ void rescale(float (&o)[n], const row_pair &factor) {
#pragma unroll
    for (int j = 0; j < n / 4; j++) {
        o[4 * j] *= factor.low;
        o[4 * j + 1] *= factor.low;
        o[4 * j + 2] *= factor.high;
        o[4 * j + 3] *= factor.high;
    }
}

/* Online softmax with a reference that need not be the maximum: any number that keeps sums within range gives the same
 * result. It is finite, in base 2, and `unseen` while a row has seen no key, which lies far from all that a row may see
 * first: a block or a partial result, either sets a reference near its own. sum is the thread's own share. */
struct softmax_state {
    static constexpr float unseen = 1e30f;
    row_pair reference, sum;

    /* The first block of a tile. */
    template <typename T>
    __device__ __forceinline__ void begin(const float (&s)[64], uint32_t (&p)[32], float scale) {
        reference = top(s, scale);
        reference.low = reference.low == -CUDART_INF_F ? unseen : reference.low;
        reference.high = reference.high == -CUDART_INF_F ? unseen : reference.high;
        sum = exponentiate<T>(s, p, scale, reference);
    }

    /* Before the exponentials of a block in which a row may see its first key. Whether o must be rescaled by factor:
     * a row's reference is raised where it lies more than 8 below its maximum. empty: the row's sum is 0, and with it
     * all of o. */
    __device__ __forceinline__ bool raise(const float (&s)[64], float scale, row_pair &factor) {
        constexpr float slack = 8;
        row_pair own = lane_max(s);
        own.low *= scale;
        own.high *= scale;
        const bool low = own.low > reference.low + slack, high = own.high > reference.high + slack;
        const bool fresh = sum.low == 0 || sum.high == 0;
        if (!__any_sync(0xffffffffu, low || high || fresh)) return false;
        const row_pair greatest = {quad_max(own.low), quad_max(own.high)};
        const bool none_low = quad_max(sum.low) == 0, none_high = quad_max(sum.high) == 0;
        row_pair next = reference;
        if (greatest.low > reference.low + slack || (none_low && greatest.low != -CUDART_INF_F))
            next.low = greatest.low;
        if (greatest.high > reference.high + slack || (none_high && greatest.high != -CUDART_INF_F))
            next.high = greatest.high;
        factor.low = none_low ? 1 : exp2_approx(reference.low - next.low);
        factor.high = none_high ? 1 : exp2_approx(reference.high - next.high);
        reference = next;
        sum.low *= factor.low;
        sum.high *= factor.high;
        return true;
    }

    /* A block of which every row sees all keys, and no row its first. It is exponentiated with the old reference; where
     * a sum leaves the range (infinite and NaN included), the warp's rows again with their maxima. The bound keeps p
     * below the greatest number of every 16-bit type.
     *
     * finish_pv() waits for P V of the block before, which reads p and adds to o; some exponentials run meanwhile. The
     * branch on their sums keeps ptxas from moving them behind the wait. They are rounded behind it: rounded before,
     * they take the place of what P V still reads, and wait for it. */
    template <typename T, int n, typename F>
    __device__ __forceinline__ void add_full(const float (&s)[64], uint32_t (&p)[32], float (&o)[n], float scale,
                                             F finish_pv) {
        constexpr int early = 6;
        float x[4 * early], y[64 - 4 * early];
        row_pair factor, own = exponentiate<0, early>(s, x, scale, reference);
        bool far = is_far(own);
        if (far) {
            factor = raise_to_maximum(s, scale);
            own = exponentiate<0, early>(s, x, scale, reference);
        }
        finish_pv();
        pack<T>(x, p);
        const row_pair rest = exponentiate<early, 16>(s, y, scale, reference);
        pack<T>(y, p + 2 * early);
        own.low += rest.low;
        own.high += rest.high;
        if (!far && is_far(own)) {
            far = true;
            factor = raise_to_maximum(s, scale);
            own = exponentiate<T>(s, p, scale, reference);
        }
        if (far) rescale(o, factor);
        sum.low += own.low;
        sum.high += own.high;
    }

    /* Whether one of the warp's sums is out of range. */
    static __device__ __forceinline__ bool is_far(const row_pair &own) {
        constexpr float most = 4096;
        return __any_sync(0xffffffffu, !(own.low < most) || !(own.high < most));
    }

    /* Returns what the rows' output is to be multiplied by. */
    __device__ __forceinline__ row_pair raise_to_maximum(const float (&s)[64], float scale) {
        const row_pair greatest = top(s, scale);
        const row_pair next = {fmaxf(greatest.low, reference.low), fmaxf(greatest.high, reference.high)};
        const row_pair factor = {exp2_approx(reference.low - next.low), exp2_approx(reference.high - next.high)};
        reference = next;
        sum.low *= factor.low;
        sum.high *= factor.high;
        return factor;
    }

    template <typename T>
    __device__ __forceinline__ void add(const float (&s)[64], uint32_t (&p)[32], float scale) {
        const row_pair own = exponentiate<T>(s, p, scale, reference);
        sum.low += own.low;
        sum.high += own.high;
    }

    static __device__ __forceinline__ row_pair top(const float (&s)[64], float scale) {
        const row_pair own = lane_max(s);
        return {quad_max(own.low) * scale, quad_max(own.high) * scale};
    }
};

/* A softmax_state as 16 bytes. */
__device__ __forceinline__ uint4 pack(const softmax_state &s) {
    return {__float_as_uint(s.reference.low), __float_as_uint(s.reference.high), __float_as_uint(s.sum.low),
            __float_as_uint(s.sum.high)};
}

__device__ __forceinline__ softmax_state unpack(uint4 x) {
    return {{__uint_as_float(x.x), __uint_as_float(x.y)}, {__uint_as_float(x.z), __uint_as_float(x.w)}};
}

/* x, of which the compiler knows nothing: what follows from it is computed here and now, and does not occupy registers
 * from the start of the kernel on. */
__device__ __forceinline__ int32_t fresh(int32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* LSE in base 2 of a row, and in inverse what its output is multiplied by. total is the whole row's sum. */
__device__ __forceinline__ float finish_row(float reference, float total, float &inverse) {
    inverse = total > 0 ? __fdividef(1, total) : total; /* NaN stays NaN */
    return total > 0 ? reference + log2_approx(total) : total == 0 ? -CUDART_INF_F : total;
}

/* ---- The way of a tile's results to memory: a warp stages its 16 rows in 32 * D bytes of shared memory of its own,
 * [D / 64][16 rows][128 bytes], swizzled as the TMA does it. ---- */

template <typename T>
struct result_views {
    view<T> out;
    view<float> lse;
    bool boxes; /* a warp's rows are a box of out */
};

/* Returns the LSE (base 2) of the thread's rows. */
template <typename T, int D>
__device__ __forceinline__ row_pair stage_results(uint32_t staging, const softmax_state &state,
                                                  const float (&o)[D / 2]) {
    const int lane = fresh(threadIdx.x & 31);
    const row_pair total = {quad_sum(state.sum.low), quad_sum(state.sum.high)};
    row_pair inverse, lse;
    lse.low = finish_row(state.reference.low, total.low, inverse.low);
    lse.high = finish_row(state.reference.high, total.high, inverse.high);
    if (lane == 0) bulk_wait_read<0>(); /* the last tile's results have left */
    __syncwarp();
    const uint32_t row = staging + ((lane >> 3 & 1) * 8 + (lane & 7)) * 128;
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        stmatrix_x4(row + j / 8 * 2048 + (((j & 7) + (lane >> 4)) ^ (lane & 7)) * 16,
                    pack_pair(o[4 * j] * inverse.low, o[4 * j + 1] * inverse.low, T()),
                    pack_pair(o[4 * j + 2] * inverse.high, o[4 * j + 3] * inverse.high, T()),
                    pack_pair(o[4 * j + 4] * inverse.low, o[4 * j + 5] * inverse.low, T()),
                    pack_pair(o[4 * j + 6] * inverse.high, o[4 * j + 7] * inverse.high, T()));
    }
    return lse;
}

/* Writes what the warp has staged: `warp` of the half that `half` says. One copy by the TMA where all rows are used and
 * form a box, else 16 bytes a lane. */
template <typename T, int D>
__device__ __forceinline__ void write_results(const result_views<T> &results, const CUtensorMap &out_map,
                                              const tile_shape &shape, uint32_t staging, int half, int warp,
                                              const tile_header &h, const row_pair &lse) {
    const int lane = fresh(threadIdx.x & 31);
    const int32_t token = h.at.first_row + half * shape.half_tokens, head = h.unit * shape.heads;
    const int32_t rows = min(max(h.at.rows - half * shape.half_tokens, 0), shape.half_tokens) * shape.heads;
    if (results.boxes && warp * 16 + 16 <= rows) {
        const int32_t tokens = shape.token_of(warp * 16);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            tma_store_4d(&out_map, staging, 0, head + warp * 16 - tokens * shape.heads, token + tokens, 0,
                         l2_leave_first);
            bulk_commit();
        }
    } else {
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < 16 * (D / 8); i += 32) {
            const int row = i / (D / 8), chunk = i % (D / 8), at = warp * 16 + row, tokens = shape.token_of(at);
            if (at >= rows) break;
            const uint32_t from = staging + chunk / 8 * 2048 + row * 128 + ((chunk ^ row) & 7) * 16;
            T *const to = results.out.at(token + tokens, head + at - tokens * shape.heads);
            *reinterpret_cast<uint4 *>(to + chunk * 8) = load_shared_16(from);
        }
        __syncwarp();
    }
    if ((lane & 3) == 0) {
        const int low = warp * 16 + lane / 4, high = low + 8;
        const int32_t token_low = shape.token_of(low), token_high = shape.token_of(high);
        if (low < rows)
            *results.lse.at(token + token_low, head + low - token_low * shape.heads) = lse.low * (1 / log2_e);
        if (high < rows)
            *results.lse.at(token + token_high, head + high - token_high * shape.heads) = lse.high * (1 / log2_e);
    }
}

/* ---- Host: the kernels' launchers, each in a file of its own. ---- */

/* Everything a launch needs, for the rows of one chunk. */
struct launch_parameters {
    const fmsa_problem *problem;
    const fmsa_tensors *tensors;
    tile_shape shape;
    int32_t units, units_per_key_head, units_per_proxy_head;
    int32_t row_begin, row_end;
    int32_t most_tiles;
    int32_t processors;
    int32_t popular; /* tokens of a tile that must choose a block */
    fmsa_cuda_geometry geometry;
    const fmsa_cuda_schedule *schedule; /* NULL in dense mode */
    counters *state;
    int32_t *fragment_tile; /* [fragments + 1] */
    tile *tiles;            /* [most_tiles] */
    step_lists lists;
    int32_t *edge_cell; /* [proxy heads][rows][slots]: where an edge's partial result goes; -1: nowhere */
    int32_t *cuts;      /* [2] the chunk's first item, and one past its last */
    edge_piece *pieces;
    remote_edge *remote;
    int32_t slots;
    void *partial_values;
    float *partial_lse;
    cudaStream_t stream;
};

template <typename F>
fmsa_status with_half_type_and_dim(const fmsa_problem *problem, F f) {
    const bool narrow = problem->config.head_dim == 64;
    if (problem->config.dtype == FMSA_DTYPE_BF16) {
        return narrow ? f(__nv_bfloat16(), constant<64>()) : f(__nv_bfloat16(), constant<128>());
    }
    return narrow ? f(__half(), constant<64>()) : f(__half(), constant<128>());
}

/* A dimension of one element has a stride that nobody uses; the TMA checks it all the same. */
inline int64_t used_stride(int64_t size, int64_t stride, int64_t otherwise) {
    return size > 1 ? stride : otherwise;
}

template <typename T>
constexpr CUtensorMapDataType map_type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType map_type<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

/* Boxes of 64 columns of a unit's heads of `tokens` neighbouring tokens: [columns][heads][tokens]. */
template <typename T>
fmsa_status make_query_map(const launch_parameters &l, int32_t tokens, CUtensorMap *map) {
    const fmsa_config &c = l.problem->config;
    const fmsa_tensor &q = l.tensors->q;
    fmsa_tensor_map_shape shape = {};
    shape.type = map_type<T>;
    shape.element_bytes = sizeof(T);
    shape.rank = 3;
    shape.size[0] = c.head_dim;
    shape.size[1] = c.num_heads;
    shape.size[2] = c.total_q;
    shape.stride[1] = used_stride(c.num_heads, q.head_stride, c.head_dim);
    shape.stride[2] = used_stride(c.total_q, q.row_stride, c.head_dim);
    shape.box[0] = 64;
    shape.box[1] = l.shape.heads;
    shape.box[2] = tokens;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, q.data, &shape);
}

/* A box of one token's heads in a unit, which come in groups of eight: [64 columns][8 heads][halves of
 * columns][groups]. So one copy brings eight rows of 128 bytes after another, as the swizzle wants them. */
template <typename T>
fmsa_status make_grouped_query_map(const launch_parameters &l, CUtensorMap *map) {
    const fmsa_config &c = l.problem->config;
    const fmsa_tensor &q = l.tensors->q;
    fmsa_tensor_map_shape shape = {};
    shape.type = map_type<T>;
    shape.element_bytes = sizeof(T);
    shape.rank = 5;
    shape.size[0] = 64;
    shape.size[1] = 8;
    shape.size[2] = c.head_dim / 64;
    shape.size[3] = c.num_heads / 8;
    shape.size[4] = c.total_q;
    shape.stride[1] = q.head_stride;
    shape.stride[2] = 64;
    shape.stride[3] = 8 * q.head_stride;
    shape.stride[4] = used_stride(c.total_q, q.row_stride, c.head_dim);
    shape.box[0] = 64;
    shape.box[1] = 8;
    shape.box[2] = c.head_dim / 64;
    shape.box[3] = l.shape.heads / 8;
    shape.box[4] = 1;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, q.data, &shape);
}

/* Boxes of a block of keys of one head: [64 columns][keys][halves of columns]. */
template <typename T>
fmsa_status make_key_map(const launch_parameters &l, const fmsa_tensor &keys, CUtensorMap *map) {
    const fmsa_config &c = l.problem->config;
    fmsa_tensor_map_shape shape = {};
    shape.type = map_type<T>;
    shape.element_bytes = sizeof(T);
    shape.rank = 4;
    shape.size[0] = 64;
    shape.size[1] = c.total_k;
    shape.size[2] = c.head_dim / 64;
    shape.size[3] = c.num_kv_heads;
    shape.stride[1] = used_stride(c.total_k, keys.row_stride, c.head_dim);
    shape.stride[2] = 64;
    shape.stride[3] = used_stride(c.num_kv_heads, keys.head_stride, c.head_dim);
    shape.box[0] = 64;
    shape.box[1] = block_keys;
    shape.box[2] = c.head_dim / 64;
    shape.box[3] = 1;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, keys.data, &shape);
}

template <typename T>
result_views<T> make_results(const launch_parameters &l) {
    const fmsa_tensors &t = *l.tensors;
    const view<float> lse(static_cast<float *>(t.lse.data), t.lse.row_stride, t.lse.head_stride);
    return {view<T>(t.out), lse, 16 % l.shape.heads == 0 || l.shape.heads % 16 == 0};
}

/* Boxes of the 16 rows of a warp: [halves of columns][tokens][heads][64 columns]. */
template <typename T>
fmsa_status make_result_map(const launch_parameters &l, CUtensorMap *map) {
    const fmsa_config &c = l.problem->config;
    const fmsa_tensor &out = l.tensors->out;
    fmsa_tensor_map_shape shape = {};
    shape.type = map_type<T>;
    shape.element_bytes = sizeof(T);
    shape.rank = 4;
    shape.size[0] = 64;
    shape.size[1] = c.num_heads;
    shape.size[2] = c.total_q;
    shape.size[3] = c.head_dim / 64;
    shape.stride[1] = used_stride(c.num_heads, out.head_stride, c.head_dim);
    shape.stride[2] = used_stride(c.total_q, out.row_stride, c.head_dim);
    shape.stride[3] = 64;
    shape.box[0] = 64;
    shape.box[1] = l.shape.heads < 16 ? l.shape.heads : 16;
    shape.box[2] = 16 / shape.box[1];
    shape.box[3] = c.head_dim / 64;
    shape.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    return fmsa_tensor_map(map, out.data, &shape);
}

template <typename T>
partial_results<T> make_partials(const launch_parameters &l) {
    return {static_cast<T *>(l.partial_values), l.partial_lse, l.slots, l.most_tiles * l.slots * l.shape.tokens};
}

inline tile_work make_tile_work(const launch_parameters &l) {
    constexpr int64_t l2_bytes = 34 << 20; /* for keys and values; the card has 50 MiB or more */
    const fmsa_config &c = l.problem->config;
    const int64_t document = c.max_seqlen_k > 0 && c.max_seqlen_k < c.total_k ? c.max_seqlen_k : c.total_k;
    const int64_t head_bytes = document * c.head_dim * 4;
    int32_t side = l.units;
    while (side > 1 && (l.units % side != 0 || side * head_bytes > l2_bytes * l.units_per_key_head))
        side--;
    const int32_t unit_cells = l.most_tiles * l.slots * l.shape.tokens;
    return {l.shape, l.units,   l.units_per_key_head, l.units_per_proxy_head, side, l.tiles, l.lists, l.state,
            l.slots, unit_cells};
}

fmsa_status make_plan(const launch_parameters &p);
fmsa_status attend_queries(const launch_parameters &p);
fmsa_status attend_keys(const launch_parameters &p);
fmsa_status attend_and_merge(const launch_parameters &p);

} // namespace forward90
} // namespace fmsa

#endif
