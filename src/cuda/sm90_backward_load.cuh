/* What the warps of the Hopper backward's main kernel share, and its producers: the finder of tokens and the loader of
 * rows and keys. sm90_backward_kernel.cuh describes the whole. */
#ifndef FMSA_CUDA_SM90_BACKWARD_LOAD_CUH
#define FMSA_CUDA_SM90_BACKWARD_LOAD_CUH

#include "sm90.cuh"
#include "sm90_backward.cuh"

namespace fmsa {
namespace backward {

constexpr int threads = 512, stages = 3, ds_buffers = 2;
constexpr int warpgroup = 128, main_warps = 8, dq_warps = 4;
constexpr int ring = 8; /* tiles whose tokens are known */

/* What comes with a stage. */
struct alignas(16) stage_rows {
    float lse[backward_rows], delta[backward_rows];
    int32_t limit[backward_rows]; /* last key of the block that the row sees; 127 and more: all */
};

struct item_state {
    int64_t edge_begin; /* dense mode: first query row */
    int64_t teacher;    /* where query row 0 would leave its first place, in pairs */
    int32_t edge_count;
    int32_t tiles; /* 0: there are no more items */
    int32_t block, block_number, unit;
    int32_t key_row, keys;
    int32_t turn_begin, turn_end; /* edges of the block's list before the item's, and with them */
    int32_t first_tile;           /* where the walk through the tiles begins: it goes on around their end */
};

struct tile_tokens {
    int32_t row[backward_rows];   /* total_q: none */
    int32_t place[backward_rows]; /* slot of the block in the row, or in dense mode its number in the group */
    int32_t limit[backward_rows]; /* last key of the block that the token sees; 127 and more: all */
    item_state item;
    int32_t number; /* of the tile in the item */
    int32_t whole;  /* whether all are neighbouring tokens */
};

template <int D, bool half_sums>
struct shared_memory_of {
    static constexpr int halves = D / 64; /* 64 columns of 16 bits are the width of the swizzle */
    static constexpr uint32_t key_half = backward_keys * 128, key_bytes = halves * key_half;
    static constexpr uint32_t row_half = 1024, row_group = halves * row_half, row_bytes = backward_rows / 8 * row_group;
    static constexpr uint32_t ds_half = backward_rows * 128, ds_bytes = 2 * ds_half;
    static constexpr uint32_t piece_bytes = half_sums ? D * 2 : 256, warp_staging = 16 * piece_bytes;

    static constexpr uint32_t k = 0, v = k + key_bytes, q = v + key_bytes, dout = q + stages * row_bytes;
    static constexpr uint32_t ds = dout + stages * row_bytes, staging = ds + ds_buffers * ds_bytes;
    static constexpr uint32_t ones = staging + dq_warps * warp_staging; /* [64 tokens][64 rows] */
    static constexpr uint32_t bytes = ones + backward_rows * 128;
};

struct shared_state {
    uint64_t tokens_full[ring], tokens_empty[ring];
    uint64_t q_full[stages], dout_full[stages], empty[stages];
    uint64_t ds_full[ds_buffers], ds_empty[ds_buffers], kv_full, kv_empty;
    item_state item, next;  /* in work; and the one whose tokens are being found */
    int32_t masked[stages]; /* whether some row of the stage does not see all keys */
    stage_rows rows[stages];
    tile_tokens tokens[ring];
};

/* How far a warp has come: the number of the tile, and in the top bit the parity of the items. One register: they are
 * short. */
struct progress {
    uint32_t bits = 0;

    __device__ __forceinline__ uint32_t count() const {
        return bits & 0x7fffffff;
    }
    __device__ __forceinline__ void end_tile() {
        bits++;
    }
    __device__ __forceinline__ void end_item() {
        bits ^= 1u << 31;
    }
    __device__ __forceinline__ uint32_t item_parity() const {
        return bits >> 31;
    }
    __device__ __forceinline__ uint32_t stage() const {
        return count() % stages;
    }
    __device__ __forceinline__ uint32_t stage_parity() const {
        return count() / stages & 1;
    }
    __device__ __forceinline__ uint32_t ds_buffer() const {
        return bits % ds_buffers;
    }
    __device__ __forceinline__ uint32_t ds_parity() const {
        return bits / ds_buffers & 1;
    }
    __device__ __forceinline__ uint32_t ring_place() const {
        return bits % ring;
    }
    __device__ __forceinline__ uint32_t ring_parity() const {
        return bits / ring & 1;
    }
};

/* The token within the tile, or beyond its tokens, that a row of the tile belongs to. */
__device__ __forceinline__ int32_t token_of(const backward_parameters &a, int32_t row) {
    return row * a.token_factor >> 16;
}

/* operand() with the high word as a constant, so that it takes no register: low is the address / 16. */
template <uint32_t leading, uint32_t stride>
__device__ __forceinline__ uint64_t describe(uint32_t low) {
    constexpr uint64_t high = uint64_t(1u << 30 | stride >> 4) << 32;
    return high | (low + (leading >> 4 << 16));
}

/* ---- Finder. One warp. ---- */

/* The first of an item's ascending rows that is not below row. */
__device__ __forceinline__ int32_t first_edge(const int32_t *rows, int32_t count, int32_t row) {
    const int lane = threadIdx.x & 31;
    int32_t begin = 0;
#pragma unroll 1
    for (int32_t step = (count + 31) / 32;; step = (step + 31) / 32) {
        const int32_t last = begin + (lane + 1) * step - 1;
        begin += __popc(__ballot_sync(0xffffffffu, last < count && rows[last] < row)) * step;
        if (step <= 1) return begin;
    }
}

/* Leaves an item the edges whose rows lie in the chunk. */
__device__ __forceinline__ void cut_to_chunk(const backward_parameters &a, item_state &item) {
    const int32_t *rows = a.edge_row + item.edge_begin;
    const int32_t count = item.edge_count;
    if (rows[0] >= a.row_begin && rows[count - 1] < a.row_end) return;
    const int32_t skipped = first_edge(rows, count, a.row_begin), end = first_edge(rows, count, a.row_end);
    if ((threadIdx.x & 31) == 0) {
        item.edge_begin += skipped;
        item.edge_count = end - skipped;
    }
    __syncwarp();
}

/* The first tile of a list's walk. Thread blocks that work at the same time begin at about the same row, if their lists
 * have it, and go on at the same pace, so that they find in L2 what the others have just read. */
__device__ __forceinline__ int32_t first_tile_of(const backward_parameters &a, const item_state &item) {
    if (item.edge_count == 0) return 0;
    const int32_t *rows = a.edge_row + item.edge_begin;
    const int32_t row = (rows[0] + FMSA_CUDA_ITEM_EDGES - 1) / FMSA_CUDA_ITEM_EDGES * FMSA_CUDA_ITEM_EDGES;
    if (row > rows[item.edge_count - 1]) return 0;
    return first_edge(rows, item.edge_count, row) / a.tile_tokens;
}

struct finder {
    const backward_parameters &a;
    shared_state &shared;
    progress at;

    __device__ __forceinline__ finder(const backward_parameters &parameters, shared_state &state)
        : a(parameters), shared(state) {
    }

    __device__ __forceinline__ static int lane() {
        return threadIdx.x & 31;
    }

    /* The tokens of a tile, and the padding behind them. Whether all are there and neighbours (of the first 32). */
    __device__ __forceinline__ bool find_tokens(tile_tokens &tokens, const item_state &item, int32_t first) {
#pragma unroll 1
        for (int32_t i = lane(); i <= a.tile_tokens && i < backward_rows; i += 32) {
            int32_t row = a.total_q, limit = backward_keys, place = item.block_number - a.first_place;
            if (i < a.tile_tokens && first + i < item.edge_count) {
                const int64_t edge = item.edge_begin + first + i;
                row = a.edge_row == nullptr ? static_cast<int32_t>(edge) : a.edge_row[edge];
                if (a.edge_slot != nullptr) place = a.edge_slot[edge];
                limit = a.row_position[row] - item.block_number * backward_keys;
                if (limit < 0) row = a.total_q;
            }
            tokens.row[i] = row;
            tokens.place[i] = place;
            tokens.limit[i] = limit;
        }
        __syncwarp();
        const int32_t token = min(lane(), a.tile_tokens - 1), row = tokens.row[token];
        return __all_sync(0xffffffffu, row < a.total_q && row == tokens.row[0] + token);
    }

    /* Tile t of shared.next into the ring, as number `number` of the item. */
    __device__ __forceinline__ void leave_tile(int32_t number, int32_t t) {
        tile_tokens &tokens = shared.tokens[at.ring_place()];
        barrier_wait(shared_address(&shared.tokens_empty[at.ring_place()]), at.ring_parity() ^ 1);
        const bool whole = find_tokens(tokens, shared.next, t * a.tile_tokens);
        if (lane() == 0) {
            tokens.item = shared.next;
            tokens.number = number;
            tokens.whole = whole;
        }
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared_address(&shared.tokens_full[at.ring_place()]));
        at.end_tile();
    }

    __device__ __forceinline__ int32_t claim() {
        int32_t number = 0;
        if (lane() == 0) number = atomicAdd(a.ticket, 1);
        return a.item_range[0] + uniform(number);
    }

    /* Makes an item shared.next. */
    __device__ __forceinline__ void take(int32_t number) {
        item_state &next = shared.next;
        const fmsa_cuda_item *item = a.items + number;
        if (lane() == 0) {
            next.edge_begin = item->edge_begin;
            next.edge_count = item->edge_count;
            next.block = item->block;
            next.first_tile = 0;
            next.unit = item->proxy_head * a.units_per_proxy_head;
            const int64_t first_row = int64_t(item->proxy_head) * (a.row_end - a.row_begin) - a.row_begin;
            next.teacher = first_row * a.places * (backward_keys / 2);
        }
        __syncwarp();
        if (a.edge_row != nullptr) {
            cut_to_chunk(a, next);
            const int32_t first_tile = first_tile_of(a, next);
            if (lane() == 0) next.first_tile = first_tile;
        }
        if (lane() == 0) {
            const int64_t list = a.edge_row == nullptr ? a.block_q_begin[next.block]
                                                       : a.list_begin[item->proxy_head * a.max_blocks + next.block];
            /* In dense mode the first tile may begin before the block's rows. */
            next.turn_begin = max(static_cast<int32_t>(next.edge_begin - list), 0);
            next.turn_end = static_cast<int32_t>(next.edge_begin - list) + next.edge_count;
            next.tiles = (next.edge_count + a.tile_tokens - 1) / a.tile_tokens;
            next.block_number = a.block_number[next.block];
            next.key_row = a.block_k_begin[next.block];
            next.keys = a.block_k_end[next.block] - next.key_row;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        for (int32_t number = claim(); number < a.item_range[1];) {
            take(number);
            number = claim();
#pragma unroll 1
            for (int32_t i = 0; i < a.units_per_proxy_head; i++) {
#pragma unroll 1
                for (int32_t t = 0; t < shared.next.tiles; t++) {
                    const int32_t tile = shared.next.first_tile + t;
                    leave_tile(t, tile < shared.next.tiles ? tile : tile - shared.next.tiles);
                }
                if (lane() == 0) {
                    shared.next.unit++;
                    shared.next.teacher += a.teacher_plane;
                }
                __syncwarp();
            }
        }
        if (lane() == 0) {
            shared.next.tiles = 0;
            shared.next.edge_count = 0;
        }
        __syncwarp();
        leave_tile(0, 0);
    }
};

/* ---- Loader. One warp; three where Q and dO come in small pieces. ---- */

template <typename T, int D, bool half_sums>
struct loader {
    using layout = shared_memory_of<D, half_sums>;
    const backward_parameters &a;
    shared_state &shared;
    uint32_t base;
    progress at;

    __device__ __forceinline__ loader(const backward_parameters &parameters, shared_state &state, uint32_t base)
        : a(parameters), shared(state), base(base) {
    }

    __device__ __forceinline__ static int lane() {
        return threadIdx.x & 31;
    }
    __device__ __forceinline__ static int warp() {
        return threadIdx.x / 32;
    }

    /* lse, delta and limit of the tile's rows. Whether some row does not see all keys. */
    __device__ __forceinline__ bool load_row_values(const tile_tokens &tokens) {
        stage_rows &rows = shared.rows[at.stage()];
        bool masked = false;
#pragma unroll 1
        for (int32_t r = lane(); r < backward_rows; r += 32) {
            const int32_t token = token_of(a, r), limit = tokens.limit[token];
            const int32_t head = tokens.item.unit * a.unit_heads + r - token * a.unit_heads;
            const int64_t from = int64_t(tokens.row[token]) * a.heads + head;
            cp_async_4(shared_address(&rows.lse[r]), a.rows.lse + from, true);
            cp_async_4(shared_address(&rows.delta[r]), a.rows.delta + from, true);
            rows.limit[r] = limit;
            masked |= limit < backward_keys - 1;
        }
        __syncwarp(); /* the limits are written before lane 0 arrives for them */
        return __any_sync(0xffffffffu, masked);
    }

    /* Q and dO by the TMA: boxes of a token, or of the tile. */
    __device__ __forceinline__ void load_boxes(const tile_tokens &tokens, uint32_t to) {
        const uint32_t q_full = shared_address(&shared.q_full[at.stage()]);
        const uint32_t dout_full = shared_address(&shared.dout_full[at.stage()]);
        const bool whole = tokens.whole;
        const int32_t groups = a.unit_heads / 8, group = tokens.item.unit * groups;
        for (int32_t i = lane(); i < (whole ? 1 : a.tile_tokens); i += 32) {
            const uint32_t q = to + i * groups * layout::row_group, dout = q + layout::dout - layout::q;
            const int32_t row = tokens.row[i];
            tma_load_5d(q, whole ? &a.q_tile : &a.q_token, q_full, 0, 0, 0, group, row);
            tma_load_5d(dout, whole ? &a.dout_tile : &a.dout_token, dout_full, 0, 0, 0, group, row);
        }
    }

    /* This warp's share of Q and dO in boxes of four heads and 64 columns: half a group of rows. */
    __device__ __forceinline__ void load_fours(const tile_tokens &tokens, uint32_t to) {
        const int32_t fours = a.unit_heads / 4, boxes = a.tile_tokens * fours * layout::halves;
#pragma unroll 1
        for (int32_t i = 3 * lane() + warp() - 1; i < 2 * boxes; i += 96) {
            const bool of_dout = i >= boxes;
            const int32_t box = of_dout ? i - boxes : i, half = box % layout::halves, four = box / layout::halves;
            const int32_t token = token_of(a, 4 * four), group = tokens.item.unit * fours + four - token * fours;
            const uint32_t place = four / 2 * layout::row_group + half * layout::row_half + four % 2 * 512;
            const uint32_t full = shared_address(of_dout ? &shared.dout_full[at.stage()] : &shared.q_full[at.stage()]);
            tma_load_5d(to + place + (of_dout ? layout::dout - layout::q : 0), of_dout ? &a.dout_token : &a.q_token,
                        full, 0, 0, half, group, tokens.row[token]);
        }
    }

    /* This warp's share of the rows of Q and dO by cp.async. */
    __device__ __forceinline__ void copy_rows(const tile_tokens &tokens, uint32_t to) {
        constexpr int chunks = D / 8, rows = 32 / chunks; /* 16 bytes a lane */
#pragma unroll 1
        for (int32_t r = (warp() - 1) * rows + lane() / chunks; r < backward_rows; r += 3 * rows) {
            const int32_t token = token_of(a, r), row = tokens.row[token], chunk = lane() % chunks;
            const bool there = row < a.total_q;
            const int64_t from = there ? row : 0;
            const int64_t head = there ? tokens.item.unit * a.unit_heads + r - token * a.unit_heads : 0;
            const uint32_t place =
                r / 8 * layout::row_group + chunk / 8 * layout::row_half + r % 8 * 128 + (chunk % 8 ^ r % 8) * 16;
            const T *q = static_cast<const T *>(a.q.data) + 8 * chunk;
            const T *dout = static_cast<const T *>(a.dout.data) + 8 * chunk;
            cp_async_16(to + place, q + from * a.q.row_stride + head * a.q.head_stride, there);
            cp_async_16(to + layout::dout - layout::q + place,
                        dout + from * a.dout.row_stride + head * a.dout.head_stride, there);
        }
    }

    __device__ __forceinline__ void load_keys(const item_state &item) {
        barrier_wait(shared_address(&shared.kv_empty), at.item_parity() ^ 1);
        at.end_item();
        if (lane() == 0) {
            shared.item = item;
            const uint32_t full = shared_address(&shared.kv_full);
            const int32_t head = item.unit / a.units_per_key_head;
            barrier_arrive_expect(full, 2 * layout::key_bytes);
#pragma unroll
            for (int half = 0; half < layout::halves; half++) {
                const uint32_t to = base + half * layout::key_half;
                tma_load_3d(to + layout::k, &a.k, full, 64 * half, head, item.key_row);
                tma_load_3d(to + layout::v, &a.v, full, 64 * half, head, item.key_row);
            }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load_tile(const tile_tokens &tokens) {
        const uint32_t q_full = shared_address(&shared.q_full[at.stage()]);
        const uint32_t dout_full = shared_address(&shared.dout_full[at.stage()]);
        const uint32_t to = base + layout::q + at.stage() * layout::row_bytes;
        /* Asked before this warp's copies arrive: the ring's place may be filled anew after that, except in the tiles
         * that wait for these keys. */
        const bool loads_keys = warp() == 1 && tokens.number == min(stages, tokens.item.tiles) - 1;
        barrier_wait(shared_address(&shared.empty[at.stage()]), at.stage_parity() ^ 1);
        if (warp() == 1) {
            const bool masked = load_row_values(tokens);
            if (lane() == 0) {
                const uint32_t bytes = a.gathered ? 0 : a.tile_tokens * a.unit_heads * D * 2;
                shared.masked[at.stage()] = masked;
                barrier_arrive_expect(q_full, bytes);
                barrier_arrive_expect(dout_full, bytes);
            }
            __syncwarp();
        }
        if (a.gathered) {
            copy_rows(tokens, to);
            barrier_arrive_after_copies(q_full);
            barrier_arrive_after_copies(dout_full);
        } else {
            if (warp() == 1) barrier_arrive_after_copies(q_full);
            if (a.in_fours) {
                __syncwarp(); /* a lane without a box is not left behind at a barrier */
                load_fours(tokens, to);
            } else {
                load_boxes(tokens, to);
            }
            __syncwarp();
        }
        /* Q and dO of the first tiles are under way before the wait for the last item's K and V. */
        if (loads_keys) load_keys(tokens.item);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            const tile_tokens &tokens = shared.tokens[at.ring_place()];
            barrier_wait(shared_address(&shared.tokens_full[at.ring_place()]), at.ring_parity());
            if (tokens.item.tiles == 0) break;
            load_tile(tokens);
            at.end_tile();
        }
        if (warp() != 1) return;
        barrier_wait(shared_address(&shared.kv_empty), at.item_parity() ^ 1);
        if (lane() == 0) {
            shared.item.tiles = 0;
            barrier_arrive(shared_address(&shared.kv_full));
        }
    }
};

} // namespace backward
} // namespace fmsa

#endif
