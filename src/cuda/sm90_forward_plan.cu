/* The plan of the Hopper forward for a chunk of query rows, made on the device: its tiles (sm90_forward.cuh), and in
 * sparse mode which edges each kernel takes.
 *
 *   scan_fragments  one thread block: how many tiles each fragment has within the chunk, and their places; (sparse)
 *                   another one: the schedule's items that have rows of the chunk;
 *   place_tiles     (dense) one thread a tile;
 *   split           (sparse) one warp a (tile, proxy head): marks in a table of the document's blocks which tokens of
 *                   the tile chose each. A block that enough of them chose is *popular*: a step of the query-outer
 *                   kernel, which costs the same however many rows take part. The local block always is. The other
 *                   edges get a cell for a partial result each and go to the key-outer kernel;
 *   compact         (sparse) one thread block an item of the schedule: its edges that the key-outer kernel takes, in
 *                   order.
 * place_tiles and split also write the results of rows that are in no fragment.
 *
 * Shared memory: split 4.5 KB a warp, the others next to nothing. Floor: the selection read once, the cells written and
 * read once, 12 bytes an edge; in practice the latency of a few dependent reads a chunk. Measured on an H200, 4 proxy
 * heads, k 16, 65,536 tokens in four chunks (profiler), random selection: scan 20 us, split 162 us, compact 87 us. */
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
    int32_t slot_shift; /* of the least power of two that is not less than slots, at most 5 */
    int32_t popular; /* tokens of a tile that must choose a block: all of a short tile; more than a tile has: never */
    int64_t total_q;
    const int32_t *row_block;
    int32_t *edge_cell;
    work items;
    const int32_t *num_items;
    int32_t segment_shift;

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
    if (blockIdx.x == 1) {
        if (threadIdx.x < 64) cut_items(a.items, a.num_items, a.segment_shift);
        return;
    }
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

/* What a warp that splits a tile has in shared memory: for each block of a window of the document's blocks the tile's
 * tokens that chose it, a bit each, later whether it is popular; and partial results of each token so far. */
constexpr int table_words = 1024;

struct split_memory {
    uint32_t table[table_words];
    int32_t partials[most_tokens];
};

/* A warp reads 32 entries of the selection at once: `width` slots of each of 32 / width tokens. Blocks are taken a
 * window at a time, ascending as each token's are. */
template <int words>
__device__ __forceinline__ void split_tile(const plan_parameters &a, const tile &t, int32_t number, int32_t proxy_head,
                                           split_memory &m) {
    constexpr int32_t window = table_words / words, reads = 4; /* reads: under way at once */
    const int lane = threadIdx.x & 31, width = 1 << a.slot_shift, tokens_at_once = 32 >> a.slot_shift;
    const int first_token = lane >> a.slot_shift, first_slot = lane & (width - 1);
    const uint32_t own_row = 0xffffffffu >> (32 - width) << (lane - first_slot), lanes_before = (1u << lane) - 1;
    const int64_t list_number = a.lists.list(proxy_head, number);
    uint32_t *const entries = a.lists.entries + list_number * a.lists.room * (1 + words);
    const int32_t *const blocks = a.row_block + (proxy_head * a.total_q + t.first_row) * a.slots;
    int32_t *const cells =
        a.edge_cell + (int64_t(proxy_head) * (a.row_end - a.row_begin) + t.first_row - a.row_begin) * a.slots;
    const int32_t local = t.local_block(), needed = a.popular > a.shape.tokens ? a.popular : min(a.popular, t.rows);
    const auto block_of = [&](int32_t token, int32_t slot) {
        return token < t.rows && slot < a.slots ? __ldg(blocks + token * a.slots + slot) - t.first_block : -1;
    };
    const auto write_entry = [&](int32_t place, int32_t block, const uint32_t (&chosen)[words]) {
        uint32_t *const entry = entries + int64_t(place) * (1 + words);
        entry[0] = block;
#pragma unroll
        for (int i = 0; i < words; i++)
            entry[1 + i] = chosen[i];
    };
    int32_t front = 1, back = 0, local_count = 0;
    for (int32_t begin = 0; begin <= local; begin += window) {
        const int32_t end = min(begin + window, local + 1);
        for (int32_t i = lane; i < (end - begin) * words; i += 32)
            m.table[i] = 0;
        __syncwarp();
        for (int32_t token = first_token; token - first_token < t.rows; token += reads * tokens_at_once) {
            for (int32_t slot = first_slot; slot - first_slot < a.slots; slot += width) {
                int32_t block[reads];
#pragma unroll
                for (int i = 0; i < reads; i++)
                    block[i] = block_of(token + i * tokens_at_once, slot);
#pragma unroll
                for (int i = 0; i < reads; i++) {
                    const int32_t of = token + i * tokens_at_once;
                    if (block[i] >= begin && block[i] < end)
                        atomicOr(&m.table[(block[i] - begin) * words + of / 32], 1u << (of & 31));
                }
            }
        }
        __syncwarp();
        for (int32_t first = begin; first < end; first += 32) {
            const int32_t block = first + lane;
            uint32_t chosen[words];
            int32_t count = 0;
#pragma unroll
            for (int i = 0; i < words; i++) {
                chosen[i] = block < end ? m.table[(block - begin) * words + i] : 0;
                count += __popc(chosen[i]);
            }
            const bool is_local = block == local, popular = is_local || (count >= needed && block < end);
            const uint32_t at_front = __ballot_sync(0xffffffffu, popular && !is_local && count < t.rows);
            const uint32_t at_back = __ballot_sync(0xffffffffu, popular && !is_local && count == t.rows);
            if (popular) {
                const int32_t place = is_local         ? 0
                                      : count < t.rows ? front + __popc(at_front & lanes_before)
                                                       : a.lists.room - 1 - back - __popc(at_back & lanes_before);
                write_entry(place, block, chosen);
            }
            if (is_local) local_count = count;
            if (block < end) m.table[(block - begin) * words] = popular;
            front += __popc(at_front);
            back += __popc(at_back);
        }
        __syncwarp();
        for (int32_t token = first_token; token - first_token < t.rows; token += reads * tokens_at_once) {
            int32_t before[reads];
#pragma unroll
            for (int i = 0; i < reads; i++) {
                const int32_t of = token + i * tokens_at_once;
                before[i] = begin == 0 || of >= t.rows ? 0 : m.partials[of];
            }
            for (int32_t slot = first_slot; slot - first_slot < a.slots; slot += width) {
                int32_t block[reads];
#pragma unroll
                for (int i = 0; i < reads; i++)
                    block[i] = block_of(token + i * tokens_at_once, slot);
#pragma unroll
                for (int i = 0; i < reads; i++) {
                    const int32_t of = token + i * tokens_at_once;
                    const bool inside = block[i] >= begin && block[i] < end;
                    const bool remote = inside && m.table[(block[i] - begin) * words] == 0;
                    const uint32_t remotes = __ballot_sync(0xffffffffu, remote) & own_row;
                    /* What is no block of the document has been chosen for other fragments than these. */
                    const bool unknown = begin == 0 && uint32_t(block[i]) > uint32_t(local);
                    if (of < t.rows && slot < a.slots && (inside || unknown)) {
                        const int32_t partial = before[i] + __popc(remotes & lanes_before);
                        cells[of * a.slots + slot] = remote ? (number * a.slots + partial) * a.shape.tokens + of : -1;
                    }
                    before[i] += __popc(remotes);
                }
            }
#pragma unroll
            for (int i = 0; i < reads; i++) {
                const int32_t of = token + i * tokens_at_once;
                if (first_slot == 0 && of < t.rows) m.partials[of] = before[i];
            }
        }
        __syncwarp();
    }
    local_count = __shfl_sync(0xffffffffu, local_count, local & 31);
    int32_t most = 0;
    for (int32_t token = lane; token < a.lists.count_bytes; token += 32) {
        const int32_t partials = token < t.rows ? m.partials[token] : 0;
        a.lists.token_partials[list_number * a.lists.count_bytes + token] = partials;
        most = max(most, partials);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane != 0) return;
    const bool masked = t.rows < a.shape.tokens || local_count < t.rows;
    a.lists.lists[list_number] = {front + back, masked ? front + back : front, front, most};
    if (most > 0) a.state->partials = 1;
}

template <typename T, int words>
__global__ void __launch_bounds__(plan_threads)
    split(const __grid_constant__ plan_parameters a, result_views<T> results, int32_t heads, int32_t dim) {
    __shared__ split_memory memory[plan_warps];
    wait_for_grid_before();
    const int64_t warp = int64_t(blockIdx.x) * plan_warps + threadIdx.x / 32;
    const int64_t number = warp / a.proxy_heads;
    const int32_t proxy_head = static_cast<int32_t>(warp - number * a.proxy_heads);
    if (number < a.state->tiles) {
        const tile t = find_tile(a, static_cast<int32_t>(number));
        if (proxy_head == 0 && (threadIdx.x & 31) == 0) a.tiles[number] = t;
        split_tile<words>(a, t, static_cast<int32_t>(number), proxy_head, memory[threadIdx.x / 32]);
    }
    clear_lone_rows(a, results, heads, dim, warp);
}

struct compact_parameters {
    const fmsa_cuda_item *items;
    const int32_t *edge_row, *edge_slot;
    const int32_t *cuts;
    const int32_t *edge_cell;
    int32_t row_begin, row_end, slots;
    uint32_t cells; /* a unit's */
    int32_t piece_edges;
    edge_piece *pieces;
    remote_edge *remote;
    counters *state;
};

constexpr int compact_threads = 256, compact_warps = compact_threads / 32;
constexpr int warp_edges = FMSA_CUDA_ITEM_EDGES / compact_warps, lane_edges = warp_edges / 32;

__global__ void __launch_bounds__(compact_threads) compact(const __grid_constant__ compact_parameters a) {
    __shared__ int32_t warp_count[compact_warps], begin, first_piece;
    wait_for_grid_before();
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
            const int32_t cell = inside ? cells[int64_t(edge[i].row - a.row_begin) * a.slots + edge[i].cell] : -1;
            /* Of a row that no tile has, since fragments changed after the schedule, anything stands there. */
            edge[i].cell = uint32_t(cell) < a.cells ? cell : -1;
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
    while (a.slot_shift < 5 && 1 << a.slot_shift < l.slots)
        a.slot_shift++;
    a.popular = l.popular;
    a.total_q = c.total_q;
    if (l.schedule != nullptr) {
        a.row_block = l.schedule->row_block;
        a.items = make_work(l.problem, l.geometry, l.schedule, l.cuts, block_keys, l.shape.heads);
        a.items.row_begin = l.row_begin;
        a.items.row_end = l.row_end;
        a.num_items = l.schedule->num_items;
        a.segment_shift = fmsa_cuda_segment_shift(l.problem);
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
    FMSA_TRY(launch_close("split", split<T, words>, fmsa_cuda_grid(warps, plan_warps), plan_threads, 0, l.stream, a,
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
    c.cells = l.most_tiles * l.slots * l.shape.tokens;
    c.piece_edges = piece_tiles * l.shape.tokens;
    c.pieces = l.pieces;
    c.remote = l.remote;
    c.state = l.state;
    constexpr int blocks_each = 8; /* a multiprocessor */
    return launch_close("compact", compact, dim3(l.processors * blocks_each), compact_threads, 0, l.stream, c);
}

template <typename T>
fmsa_status plan_rows(const launch_parameters &l) {
    FMSA_TRY(launch("scan_fragments", scan_fragments, dim3(l.schedule == nullptr ? 1 : 2), scan_threads, 0, l.stream,
                    plan_of(l)));
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
