/* The plan of the Hopper forward for a chunk of query rows, made on the device: its tiles (sm90_forward.cuh), and in
 * sparse mode which edges each kernel takes.
 *
 *   scan_fragments  one thread block: how many tiles each fragment has within the chunk, and their places;
 *   place_tiles     (dense) one thread a tile;
 *   split           (sparse) one warp a (tile, proxy head): merges the ascending lists of the tile's tokens. A block
 *                   that enough of them chose is *popular*: a step of the query-outer kernel, which costs the same
 *                   however many rows take part. The local block always is. The other edges get a cell for a partial
 *                   result each and go to the key-outer kernel;
 *   compact         (sparse) one thread block an item of the schedule: its edges that the key-outer kernel takes, in
 *                   order.
 * place_tiles and split also write the results of rows that are in no fragment.
 *
 * Shared memory: next to nothing. Floor: the selection read once, the cells written and read once, 12 bytes an edge; in
 * practice the steps of one warp's merge, some 16 a tile where neighbours agree and 8 x 15 where they do not. Measured
 * on an H200, 4 proxy heads, k 16, 65,536 tokens in eight chunks (profiler), random selection: scan 19 us, split 276
 * us, compact 73 us. */
#include "scan.cuh"
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

struct plan_parameters {
    tile_shape shape;
    fmsa_cuda_geometry geometry;
    const int32_t *q_begin, *q_end;
    int32_t fragments;
    int32_t row_begin, row_end;
    counters *state;
    int32_t *fragment_tile;
    tile *tiles;
    int32_t most_tiles; /* that there is room for */
    step_lists lists;

    /* Sparse mode. */
    int32_t proxy_heads, slots;
    int32_t popular; /* tokens of a tile that must choose a block */
    int64_t total_q;
    const int32_t *row_count, *row_block;
    int32_t *edge_cell;

    /* Number of the tile that a position falls in, counted from position 0. */
    __device__ __forceinline__ int32_t tile_number(int32_t position) const {
        return position / block_keys * shape.per_block + position % block_keys / shape.tokens;
    }
    /* The part of fragment f's rows that lies in the chunk. */
    __device__ __forceinline__ int2 rows_of(int32_t f) const {
        const int32_t begin = max(q_begin[f], row_begin), end = min(q_end[f], row_end);
        return make_int2(begin, max(begin, end));
    }
};

constexpr int scan_threads = 1024;

__global__ void __launch_bounds__(scan_threads) scan_fragments(const __grid_constant__ plan_parameters a) {
    int32_t before = 0;
    for (int64_t first = 0; first < a.fragments; first += scan_threads) {
        const int64_t f = first + threadIdx.x;
        int32_t tiles = 0, total;
        if (f < a.fragments) {
            const int2 rows = a.rows_of(f);
            /* Fragments that break the rules leave all rows without a position. */
            const int32_t position = rows.x < rows.y ? a.geometry.row_position[rows.x] : -1;
            if (position >= 0) {
                tiles = a.tile_number(position + rows.y - rows.x - 1) - a.tile_number(position) + 1;
            }
        }
        const int32_t offset = block_exclusive_scan<scan_threads>(tiles, 0, add(), total);
        if (f < a.fragments) a.fragment_tile[f] = before + offset;
        /* Fragments that have changed since the schedule was made may give more tiles than there is room for. */
        before = min(before + total, a.most_tiles);
    }
    if (threadIdx.x == 0) *a.state = {before, 0, 0, 0, 0, 0, 0, 0};
}

__device__ __forceinline__ tile find_tile(const plan_parameters &a, int32_t number) {
    int32_t low = 0, high = a.fragments; /* the last fragment whose first tile is not behind the number */
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        (a.fragment_tile[middle] <= number ? low : high) = middle;
    }
    const int2 rows = a.rows_of(low);
    const int32_t first = a.geometry.row_position[rows.x];
    const int32_t in_document = a.tile_number(first) + number - a.fragment_tile[low];
    const int32_t block = in_document / a.shape.per_block, token = in_document % a.shape.per_block * a.shape.tokens;
    const int32_t begin = max(first, block * block_keys + token);
    const int32_t end =
        min(first + rows.y - rows.x, block * block_keys + min(token + a.shape.tokens, int32_t(block_keys)));
    tile t = {};
    t.first_row = rows.x + begin - first;
    t.rows = end - begin;
    t.position = begin;
    t.first_block = a.geometry.row_first_block[rows.x];
    t.key_row = a.geometry.block_k_begin[t.first_block];
    t.local_keys = min(a.geometry.block_k_end[t.first_block + block] - t.key_row - block * block_keys, block_keys);
    return t;
}

/* Rows in no fragment attend to nothing. Warp `warp` has a look at 32 rows. */
template <typename T>
__device__ __forceinline__ void clear_lone_rows(const plan_parameters &a, const result_views<T> &results, int32_t heads,
                                                int32_t dim, int64_t warp) {
    const int lane = threadIdx.x & 31;
    const int64_t row = a.row_begin + warp * 32 + lane;
    uint32_t lone = __ballot_sync(0xffffffffu, row < a.row_end && a.geometry.row_position[row] < 0);
    for (; lone != 0; lone &= lone - 1) {
        const int64_t target = a.row_begin + warp * 32 + __ffs(lone) - 1;
        for (int32_t head = 0; head < heads; head++) {
            if (lane < dim / 8) *reinterpret_cast<uint4 *>(results.out.at(target, head) + 8 * lane) = {0, 0, 0, 0};
            if (lane == 0) *results.lse.at(target, head) = -CUDART_INF_F;
        }
    }
}

constexpr int plan_threads = 128, plan_warps = plan_threads / 32;

template <typename T>
__global__ void __launch_bounds__(plan_threads)
    place_tiles(const __grid_constant__ plan_parameters a, result_views<T> results, int32_t heads, int32_t dim) {
    const int64_t number = int64_t(blockIdx.x) * plan_threads + threadIdx.x;
    if (number < a.state->tiles) a.tiles[number] = find_tile(a, static_cast<int32_t>(number));
    clear_lone_rows(a, results, heads, dim, number / 32);
}

/* The tokens of a tile, up to four a lane: token lane + 32 * i. */
template <int words>
__device__ __forceinline__ void split_tile(const plan_parameters &a, const tile &t, int32_t number,
                                           int32_t proxy_head) {
    const int lane = threadIdx.x & 31;
    const int64_t list_number = a.lists.list(proxy_head, number);
    uint32_t *const entries = a.lists.entries + list_number * a.lists.room * (1 + words);
    const int32_t local = t.local_block(), needed = min(a.popular, t.rows);

    const int32_t *blocks[words]; /* the rest of each token's list */
    int32_t *cells[words];
    int32_t left[words], next[words], after[words], partials[words]; /* after: read a step early */
#pragma unroll
    for (int i = 0; i < words; i++) {
        const int32_t token = lane + 32 * i;
        const bool exists = token < t.rows;
        const int64_t row = proxy_head * a.total_q + t.first_row + token;
        const int64_t chunk_row = int64_t(proxy_head) * (a.row_end - a.row_begin) + t.first_row - a.row_begin + token;
        blocks[i] = a.row_block + row * a.slots;
        cells[i] = a.edge_cell + chunk_row * a.slots;
        left[i] = exists ? a.row_count[row] : 0;
        next[i] = left[i] > 0 ? blocks[i][0] : INT32_MAX;
        after[i] = left[i] > 1 ? blocks[i][1] : INT32_MAX;
        partials[i] = 0;
    }
    int32_t front = 1, back = 0;
    bool masked = t.rows < a.shape.tokens, has_local = false;
    const auto write_entry = [&](int32_t place, int32_t block, const uint32_t (&chosen)[words]) {
        uint32_t *entry = entries + int64_t(place) * (1 + words);
        if (lane == 0) entry[0] = block;
#pragma unroll
        for (int i = 0; i < words; i++) {
            if (lane == i) entry[1 + i] = chosen[i];
        }
    };
    uint32_t chosen[words];
    while (true) {
        int32_t least = next[0];
#pragma unroll
        for (int i = 1; i < words; i++)
            least = min(least, next[i]);
        least = __reduce_min_sync(0xffffffffu, least);
        if (least == INT32_MAX) break;
        int32_t count = 0;
#pragma unroll
        for (int i = 0; i < words; i++) {
            chosen[i] = __ballot_sync(0xffffffffu, next[i] == least);
            count += __popc(chosen[i]);
        }
        const int32_t block = least - t.first_block;
        const bool is_local = block == local, is_popular = is_local || count >= needed;
        if (is_local) {
            has_local = true;
            masked |= count < t.rows;
            write_entry(0, block, chosen);
        } else if (is_popular && count < t.rows) {
            write_entry(front++, block, chosen);
        } else if (is_popular) {
            write_entry(a.lists.room - ++back, block, chosen);
        }
#pragma unroll
        for (int i = 0; i < words; i++) {
            if (next[i] != least) continue;
            const int32_t token = lane + 32 * i;
            *cells[i]++ = is_popular ? -1 : (number * a.slots + partials[i]++) * a.shape.tokens + token;
            next[i] = after[i];
            blocks[i]++;
            after[i] = --left[i] > 1 ? blocks[i][1] : INT32_MAX;
        }
    }
    if (!has_local) {
#pragma unroll
        for (int i = 0; i < words; i++)
            chosen[i] = 0;
        write_entry(0, local, chosen);
        masked = true;
    }
    int32_t most = 0;
#pragma unroll
    for (int i = 0; i < words; i++) {
        const int32_t token = lane + 32 * i;
        if (token < a.lists.count_bytes)
            a.lists.token_partials[list_number * a.lists.count_bytes + token] = partials[i];
        most = max(most, partials[i]);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane != 0) return;
    a.lists.lists[list_number] = {front + back, masked ? front + back : front, front, most};
    if (most > 0) a.state->partials = 1;
}

template <typename T, int words>
__global__ void __launch_bounds__(plan_threads)
    split(const __grid_constant__ plan_parameters a, result_views<T> results, int32_t heads, int32_t dim) {
    const int64_t warp = int64_t(blockIdx.x) * plan_warps + threadIdx.x / 32;
    const int64_t number = warp / a.proxy_heads;
    const int32_t proxy_head = static_cast<int32_t>(warp - number * a.proxy_heads);
    if (number < a.state->tiles) {
        const tile t = find_tile(a, static_cast<int32_t>(number));
        if (proxy_head == 0 && (threadIdx.x & 31) == 0) a.tiles[number] = t;
        split_tile<words>(a, t, static_cast<int32_t>(number), proxy_head);
    }
    clear_lone_rows(a, results, heads, dim, warp);
}

struct compact_parameters {
    const fmsa_cuda_item *items;
    const int32_t *edge_row, *edge_slot;
    const int32_t *cuts;
    const int32_t *edge_cell;
    int32_t row_begin, row_end, slots;
    int32_t piece_edges;
    edge_piece *pieces;
    remote_edge *remote;
    counters *state;
};

constexpr int compact_threads = 256, compact_warps = compact_threads / 32;
constexpr int warp_edges = FMSA_CUDA_ITEM_EDGES / compact_warps, lane_edges = warp_edges / 32;

__global__ void __launch_bounds__(compact_threads) compact(const __grid_constant__ compact_parameters a) {
    __shared__ int32_t warp_count[compact_warps], begin, first_piece;
    if (a.state->partials == 0) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const int32_t items = a.cuts[1] - a.cuts[0], rows = a.row_end - a.row_begin;
    for (int32_t number = blockIdx.x; number < items; number += gridDim.x) {
        const fmsa_cuda_item item = a.items[a.cuts[0] + number];
        const int32_t *cells = a.edge_cell + int64_t(item.proxy_head) * rows * a.slots;
        remote_edge edge[lane_edges];
#pragma unroll
        for (int i = 0; i < lane_edges; i++) {
            const int32_t at = warp * warp_edges + i * 32 + lane;
            edge[i] = {-1, -1};
            if (at < item.edge_count) edge[i] = {a.edge_row[item.edge_begin + at], a.edge_slot[item.edge_begin + at]};
        }
        int32_t place[lane_edges], count = 0; /* place: within the warp's */
#pragma unroll
        for (int i = 0; i < lane_edges; i++) {
            const bool inside = edge[i].row >= a.row_begin && edge[i].row < a.row_end;
            edge[i].cell = inside ? cells[int64_t(edge[i].row - a.row_begin) * a.slots + edge[i].cell] : -1;
        }
#pragma unroll
        for (int i = 0; i < lane_edges; i++) {
            const uint32_t found = __ballot_sync(0xffffffffu, edge[i].cell >= 0);
            place[i] = count + __popc(found & ((1u << lane) - 1));
            count += __popc(found);
        }
        if (lane == 0) warp_count[warp] = count;
        __syncthreads();
        int32_t before = 0, total = 0;
#pragma unroll
        for (int w = 0; w < compact_warps; w++) {
            before += w < warp ? warp_count[w] : 0;
            total += warp_count[w];
        }
        if (threadIdx.x == 0) {
            /* Where edges and pieces lie differs from run to run, not what becomes of them; pieces stay about in the
             * order of items. */
            begin = atomicAdd(&a.state->remote_edges, total);
            first_piece = atomicAdd(&a.state->pieces, (total + a.piece_edges - 1) / a.piece_edges);
        }
        __syncthreads();
        before += begin;
        for (int32_t at = threadIdx.x * a.piece_edges; at < total; at += compact_threads * a.piece_edges) {
            a.pieces[first_piece + at / a.piece_edges] = {begin + at, min(total - at, a.piece_edges), item.block,
                                                          item.proxy_head};
        }
#pragma unroll
        for (int i = 0; i < lane_edges; i++) {
            if (edge[i].cell >= 0) a.remote[before + place[i]] = edge[i];
        }
    }
}

plan_parameters plan_of(const launch_parameters &l) {
    const fmsa_config &c = l.problem->config;
    plan_parameters a = {};
    a.shape = l.shape;
    a.geometry = l.geometry;
    a.q_begin = c.q_begin;
    a.q_end = c.q_end;
    a.fragments = static_cast<int32_t>(c.num_fragments);
    a.row_begin = l.row_begin;
    a.row_end = l.row_end;
    a.state = l.state;
    a.fragment_tile = l.fragment_tile;
    a.tiles = l.tiles;
    a.most_tiles = l.most_tiles;
    a.lists = l.lists;
    a.proxy_heads = c.num_proxy_heads;
    a.slots = l.slots;
    a.popular = l.popular;
    a.total_q = c.total_q;
    if (l.schedule != nullptr) {
        a.row_count = l.schedule->row_count;
        a.row_block = l.schedule->row_block;
    }
    a.edge_cell = l.edge_cell;
    return a;
}

template <typename T>
fmsa_status place(const launch_parameters &l) {
    const plan_parameters a = plan_of(l);
    const int64_t rows = l.row_end - l.row_begin;
    const int64_t threads = l.most_tiles > rows ? l.most_tiles : rows;
    return launch("place_tiles", place_tiles<T>, fmsa_cuda_grid(threads, plan_threads), plan_threads, 0, l.stream, a,
                  make_results<T>(l), l.problem->config.num_heads, l.problem->config.head_dim);
}

template <typename T, int words>
fmsa_status split_edges(const launch_parameters &l) {
    const plan_parameters a = plan_of(l);
    const int64_t rows = l.row_end - l.row_begin, lists = int64_t(l.most_tiles) * a.proxy_heads;
    const int64_t warps = lists > rows / 32 + 1 ? lists : rows / 32 + 1;
    FMSA_TRY(launch("split", split<T, words>, fmsa_cuda_grid(warps, plan_warps), plan_threads, 0, l.stream, a,
                    make_results<T>(l), l.problem->config.num_heads, l.problem->config.head_dim));
    compact_parameters c = {};
    c.items = l.schedule->items;
    c.edge_row = l.schedule->edge_row;
    c.edge_slot = l.schedule->edge_slot;
    c.cuts = l.cuts;
    c.edge_cell = l.edge_cell;
    c.row_begin = l.row_begin;
    c.row_end = l.row_end;
    c.slots = l.slots;
    c.piece_edges = piece_tiles * l.shape.tokens;
    c.pieces = l.pieces;
    c.remote = l.remote;
    c.state = l.state;
    constexpr int blocks_each = 8; /* a multiprocessor */
    return launch("compact", compact, dim3(l.processors * blocks_each), compact_threads, 0, l.stream, c);
}

template <typename T>
fmsa_status plan_rows(const launch_parameters &l) {
    FMSA_TRY(launch("scan_fragments", scan_fragments, dim3(1), scan_threads, 0, l.stream, plan_of(l)));
    if (l.schedule == nullptr) return place<T>(l);
    switch (l.lists.words) {
    case 1:
        return split_edges<T, 1>(l);
    case 2:
        return split_edges<T, 2>(l);
    default:
        return split_edges<T, 4>(l);
    }
}

} // namespace

fmsa_status make_plan(const launch_parameters &l) {
    return l.problem->config.dtype == FMSA_DTYPE_BF16 ? plan_rows<__nv_bfloat16>(l) : plan_rows<__half>(l);
}

} // namespace forward90
} // namespace fmsa
