/* The schedule: for each (proxy head, key block) the ascending query rows that chose it, and the work list over them.
 *
 * Query rows are cut into segments of a power of two of rows; a *run* is the edges of one (proxy head, block id,
 * segment). Then
 *   rows       sort and clean each row's block indices, and count the edges of each run (atomic, order irrelevant;
 *              neighbouring rows use different copies of the counts, since most of them count the same few runs);
 *   scans      turn the counts into the place of each run, in the order (proxy head, block id, segment);
 *   scatter    write each edge somewhere within its run (atomic: this order is not repeatable);
 *   order      put each run in the order of its rows through a bitmap of the segment's rows: a row occurs at most once
 *              in a run, so its rank is the number of bits before it, and the result is the same on every run;
 *   items      cut runs into items, per (segment, proxy head) long ones first.
 *
 * Thread blocks of 128 to 1,024 threads, one role each. Shared memory: up to 32 KB (the bitmap and its prefix counts
 * for 131,072 rows). Floor: block_indices read once, the edge arrays written twice: 20 B an edge, 20 us at 4 million
 * edges and 4 TB/s; in practice the dozen launches and the scattered 4-byte writes. Measured on an H200, 4 proxy heads,
 * k 16: 0.18 ms at 16,384 tokens (1 million edges), 0.40 ms at 65,536 (4.2 million). */
#include "launch.h"
#include "scan.cuh"
#include "schedule.h"

namespace {

constexpr int32_t absent = INT32_MAX; /* an entry of a row that is not to be used: sorts behind every block */

/* A run's number: runs of one list are neighbours. */
struct runs {
    int64_t blocks;   /* NB */
    int64_t segments; /* per list */
    int64_t total;
    int32_t shift;  /* rows per segment, as a power of two */
    int32_t copies; /* of the counts: [copies][total] */

    __device__ int64_t index(int32_t proxy_head, int32_t block, int32_t row) const {
        return (proxy_head * blocks + block) * segments + (row >> shift);
    }
    __device__ int64_t copy_offset(int32_t row) const {
        return row % copies * total;
    }
};

/* ---- Rows ---------------------------------------------------------------------------------------------------- */

constexpr int rows_threads = 256, rows_per_block = rows_threads / 32, max_top_k = 128, chunks = max_top_k / 32;

/* Whether the usable entries come first and ascend strictly, as fmsa_select writes them. */
__device__ bool is_sorted(const int32_t *entries, int32_t top_k, int lane) {
    bool sorted = true;
    for (int i = lane; i < top_k; i += 32) {
        sorted &= i == 0 || entries[i] == absent || entries[i - 1] < entries[i];
    }
    return __all_sync(0xffffffffu, sorted);
}

/* Marks every entry that equals an earlier one as absent. */
__device__ void drop_duplicates(int32_t *entries, int32_t top_k, int lane) {
    bool duplicate[chunks] = {};
#pragma unroll
    for (int c = 0; c < chunks; c++) {
        const int i = c * 32 + lane;
        for (int j = 0; j < min(i, top_k); j++)
            duplicate[c] |= i < top_k && entries[j] == entries[i];
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < chunks; c++) {
        if (duplicate[c]) entries[c * 32 + lane] = absent;
    }
    __syncwarp();
}

/* One warp a (proxy head, row): block ids ascending into row_block, their number into row_count. */
__global__ void __launch_bounds__(rows_threads)
    clean_rows(fmsa_tensor block_indices, fmsa_cuda_schedule schedule, int32_t *counts, runs runs, int32_t heads,
               int32_t total_q, int32_t top_k, int32_t slots, int32_t block_size) {
    __shared__ int32_t shared_entries[rows_per_block][max_top_k];
    const int lane = threadIdx.x % 32;
    int32_t *entries = shared_entries[threadIdx.x / 32];
    const int64_t index = (int64_t)blockIdx.x * rows_per_block + threadIdx.x / 32;
    if (index >= (int64_t)heads * total_q) return;
    const int32_t proxy_head = (int32_t)(index / total_q), row = (int32_t)(index % total_q);
    const int32_t position = schedule.geometry.row_position[row];
    const int32_t first_block = schedule.geometry.row_first_block[row];
    const int32_t newest = position < 0 ? -1 : position / block_size;
    const int32_t *given =
        (const int32_t *)block_indices.data + row * block_indices.row_stride + proxy_head * block_indices.head_stride;
    int32_t count = 0;
    if (newest >= 0) {
        for (int i = lane; i < top_k; i += 32) {
            const int32_t block = given[i];
            entries[i] = block >= 0 && block <= newest ? block : absent;
        }
        __syncwarp();
        const bool sorted = is_sorted(entries, top_k, lane);
        if (!sorted) drop_duplicates(entries, top_k, lane);
        for (int i = lane; i < top_k; i += 32) {
            const int32_t block = entries[i];
            if (block == absent) continue;
            int32_t rank = i;
            if (!sorted) {
                rank = 0;
                for (int j = 0; j < top_k; j++)
                    rank += entries[j] < block;
            }
            schedule.row_block[index * slots + rank] = first_block + block;
            atomicAdd(&counts[runs.copy_offset(row) + runs.index(proxy_head, first_block + block, row)], 1);
            count++;
        }
    }
    count = __reduce_add_sync(0xffffffffu, count);
    for (int i = count + lane; i < slots; i += 32)
        schedule.row_block[index * slots + i] = -1;
    if (lane == 0) schedule.row_count[index] = count;
}

/* ---- Scans --------------------------------------------------------------------------------------------------- */

constexpr int tile_threads = 256, tile_runs = 4096, sums_threads = 1024;

__global__ void __launch_bounds__(tile_threads) sum_tiles(const int32_t *counts, int64_t *tile_sum, runs runs) {
    const int64_t tile = (int64_t)blockIdx.x * tile_runs;
    int64_t sum = 0, total;
    for (int32_t copy = 0; copy < runs.copies; copy++) {
        for (int64_t i = tile + threadIdx.x; i < min(tile + tile_runs, runs.total); i += tile_threads) {
            sum += counts[copy * runs.total + i];
        }
    }
    fmsa::block_exclusive_scan<tile_threads>(sum, (int64_t)0, fmsa::add(), total);
    if (threadIdx.x == 0) tile_sum[blockIdx.x] = total;
}

/* Replaces each of count values by the sum of those before it; their total goes behind them. */
__global__ void __launch_bounds__(sums_threads) scan_sums(int64_t *sums, int64_t count) {
    int64_t before = 0, total;
    for (int64_t tile = 0; tile < count; tile += sums_threads) {
        const int64_t i = tile + threadIdx.x;
        const int64_t value = i < count ? sums[i] : 0;
        const int64_t offset = fmsa::block_exclusive_scan<sums_threads>(value, (int64_t)0, fmsa::add(), total);
        if (i < count) sums[i] = before + offset;
        before += total;
    }
    if (threadIdx.x == 0) sums[count] = before;
}

/* The place of each run, and each copy's part within it: counts become the offset of the copy's first edge. */
__global__ void __launch_bounds__(tile_threads) place_runs(int32_t *counts, const int64_t *tile_sum, int64_t *run_begin,
                                                           int32_t *run_edges, int64_t *list_begin, runs runs) {
    const int64_t tile = (int64_t)blockIdx.x * tile_runs;
    int64_t tile_begin = tile_sum[blockIdx.x];
    for (int64_t first = tile; first < min(tile + tile_runs, runs.total); first += tile_threads) {
        const int64_t run = first + threadIdx.x;
        int32_t edges = 0, total;
        for (int32_t copy = 0; copy < runs.copies && run < runs.total; copy++) {
            int32_t *count = &counts[copy * runs.total + run];
            const int32_t before = edges;
            edges += *count;
            *count = before;
        }
        const int64_t begin = tile_begin + fmsa::block_exclusive_scan<tile_threads>(edges, 0, fmsa::add(), total);
        tile_begin += total;
        if (run >= runs.total) continue;
        run_begin[run] = begin;
        run_edges[run] = edges;
        if (run % runs.segments == 0) list_begin[run / runs.segments] = begin;
        if (run == runs.total - 1) list_begin[runs.total / runs.segments] = begin + edges;
    }
}

/* ---- Edges --------------------------------------------------------------------------------------------------- */

constexpr int scatter_threads = 256, slot_bits = 7;
static_assert(1 << slot_bits >= max_top_k, "a slot fits its bits of a packed edge");

/* Until order_runs has been there, edge_row holds (row within the segment, slot) packed together. */
__global__ void __launch_bounds__(scatter_threads)
    scatter_edges(fmsa_cuda_schedule schedule, const int64_t *run_begin, int32_t *copy_offset, runs runs, int32_t heads,
                  int32_t total_q, int32_t slots) {
    const int64_t edge = (int64_t)blockIdx.x * scatter_threads + threadIdx.x;
    if (edge >= (int64_t)heads * total_q * slots) return;
    const int32_t block = schedule.row_block[edge];
    if (block < 0) return;
    const int64_t index = edge / slots;
    const int32_t slot = (int32_t)(edge % slots);
    const int32_t proxy_head = (int32_t)(index / total_q), row = (int32_t)(index % total_q);
    const int32_t row_in_segment = row & ((1 << runs.shift) - 1);
    const int64_t run = runs.index(proxy_head, block, row);
    const int64_t place = run_begin[run] + atomicAdd(&copy_offset[runs.copy_offset(row) + run], 1);
    schedule.edge_row[place] = row_in_segment << slot_bits | slot;
}

constexpr int order_threads = 128, most_order_blocks = 32768;

/* words[i]: 32 rows of the segment. rank[i]: bits set before word i. */
__device__ void order_run(const fmsa_cuda_schedule &schedule, int64_t begin, int32_t count, int32_t first_row,
                          uint32_t *words, int32_t *rank, int32_t word_count) {
    for (int i = threadIdx.x; i < word_count; i += order_threads)
        words[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += order_threads) {
        const int32_t row = schedule.edge_row[begin + i] >> slot_bits;
        atomicOr(&words[row / 32], 1u << row % 32);
    }
    __syncthreads();
    const int per_thread = word_count / order_threads, first = threadIdx.x * per_thread;
    int32_t bits = 0, total;
    for (int i = first; i < first + per_thread; i++)
        bits += __popc(words[i]);
    int32_t before = fmsa::block_exclusive_scan<order_threads>(bits, 0, fmsa::add(), total);
    for (int i = first; i < first + per_thread; i++) {
        rank[i] = before;
        before += __popc(words[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += order_threads) {
        const int32_t packed = schedule.edge_row[begin + i], row = packed >> slot_bits;
        const int32_t place = rank[row / 32] + __popc(words[row / 32] & ((1u << row % 32) - 1));
        schedule.edge_slot[begin + place] = packed & ((1 << slot_bits) - 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < word_count; i += order_threads) {
        int64_t place = begin + rank[i];
        for (uint32_t left = words[i]; left != 0; left &= left - 1) {
            schedule.edge_row[place++] = first_row + i * 32 + __ffs(left) - 1;
        }
    }
    __syncthreads();
}

__global__ void __launch_bounds__(order_threads)
    order_runs(fmsa_cuda_schedule schedule, const int32_t *run_edges, const int64_t *run_begin, runs runs) {
    extern __shared__ uint32_t words[];
    const int32_t word_count = 1 << (runs.shift - 5);
    int32_t *rank = (int32_t *)words + word_count;
    for (int64_t run = blockIdx.x; run < runs.total; run += gridDim.x) {
        const int32_t edges = run_edges[run];
        if (edges == 0) continue;
        const int32_t first_row = (int32_t)(run % runs.segments) << runs.shift;
        order_run(schedule, run_begin[run], edges, first_row, words, rank, word_count);
    }
}

/* ---- Items --------------------------------------------------------------------------------------------------- */

constexpr int item_threads = 256, classes = 5;

/* The items of one run: full ones, and at most one shorter, each of a class of length: 0 the longest. */
struct run_items {
    int32_t full, rest;

    __device__ explicit run_items(int32_t edges)
        : full(edges / FMSA_CUDA_ITEM_EDGES), rest(edges % FMSA_CUDA_ITEM_EDGES) {
    }
    __device__ int rest_class() const {
        return rest > 512 ? 0 : rest > 256 ? 1 : rest > 128 ? 2 : rest > 64 ? 3 : 4;
    }
    __device__ int32_t of_class(int c) const {
        return (c == 0 ? full : 0) + (rest > 0 && c == rest_class() ? 1 : 0);
    }
};

struct id_range {
    int32_t begin, end;
};

/* The first id in use whose value is greater than bound. */
__device__ int32_t first_above(const int32_t *ascending, int32_t count, int32_t bound) {
    int32_t low = 0, high = count;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (ascending[middle] > bound) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The block ids that rows of a segment can see: query ranges of blocks begin and end in ascending order. */
__device__ id_range segment_blocks(const fmsa_cuda_geometry &geometry, const runs &runs, int64_t segment,
                                   int32_t total_q) {
    const int64_t first = segment << runs.shift;
    const int32_t last = (int32_t)min(first + (1 << runs.shift), (int64_t)total_q) - 1;
    return {first_above(geometry.block_q_end, *geometry.num_blocks, (int32_t)first),
            first_above(geometry.block_q_begin, *geometry.num_blocks, last)};
}

/* One thread block a (segment, proxy head): how many items of each class it has. */
__global__ void __launch_bounds__(item_threads)
    count_items(fmsa_cuda_geometry geometry, const int32_t *run_edges, int64_t *group_items, runs runs, int32_t heads,
                int32_t total_q) {
    const int64_t segment = blockIdx.x / heads, proxy_head = blockIdx.x % heads;
    const id_range range = segment_blocks(geometry, runs, segment, total_q);
    int32_t items[classes] = {};
    for (int32_t id = range.begin + threadIdx.x; id < range.end; id += item_threads) {
        const run_items run(run_edges[(proxy_head * runs.blocks + id) * runs.segments + segment]);
#pragma unroll
        for (int c = 0; c < classes; c++)
            items[c] += run.of_class(c);
    }
#pragma unroll
    for (int c = 0; c < classes; c++) {
        int32_t total;
        fmsa::block_exclusive_scan<item_threads>(items[c], 0, fmsa::add(), total);
        if (threadIdx.x == 0) group_items[(int64_t)blockIdx.x * classes + c] = total;
    }
}

/* Writes the items of each (segment, proxy head) from the places that the scan of group_items gives. */
__global__ void __launch_bounds__(item_threads)
    place_items(fmsa_cuda_schedule schedule, const int32_t *run_edges, const int64_t *run_begin,
                const int64_t *group_items, runs runs, int32_t heads, int32_t total_q, int64_t groups) {
    const int64_t segment = blockIdx.x / heads, proxy_head = blockIdx.x % heads;
    const id_range range = segment_blocks(schedule.geometry, runs, segment, total_q);
    if (blockIdx.x == 0 && threadIdx.x == 0) *schedule.num_items = (int32_t)group_items[groups * classes];
    int64_t base[classes];
#pragma unroll
    for (int c = 0; c < classes; c++)
        base[c] = group_items[(int64_t)blockIdx.x * classes + c];
    for (int32_t tile = range.begin; tile < range.end; tile += item_threads) {
        const int32_t id = tile + (int32_t)threadIdx.x;
        const int64_t index = (proxy_head * runs.blocks + id) * runs.segments + segment;
        const int32_t edges = id < range.end ? run_edges[index] : 0;
        const run_items run(edges);
        int64_t begin = edges > 0 ? run_begin[index] : 0;
#pragma unroll
        for (int c = 0; c < classes; c++) {
            int32_t total;
            const int32_t mine = run.of_class(c);
            int64_t place = base[c] + fmsa::block_exclusive_scan<item_threads>(mine, 0, fmsa::add(), total);
            base[c] += total;
            for (int i = 0; i < mine; i++) {
                const int32_t length = c == 0 && i < run.full ? FMSA_CUDA_ITEM_EDGES : run.rest;
                schedule.items[place++] = {begin, length, id, (int32_t)proxy_head, 0};
                begin += length;
            }
        }
    }
}

/* ---- Host ---------------------------------------------------------------------------------------------------- */

/* Scratch of the schedule operation. */
struct scratch {
    int32_t *counts; /* [copies][total], then offsets */
    int32_t *run_edges;
    int64_t *run_begin;
    int64_t *tile_sum;
    int64_t *group_items;
    int64_t tiles, groups;
};

/* Copies of the counts: many while the runs are few, so that their atomics do not meet in a few lines of L2. */
runs count_runs(const fmsa_problem *problem) {
    constexpr int64_t wanted_counts = 1 << 18, most_copies = 32;
    runs r;
    r.blocks = problem->max_key_blocks;
    r.segments = fmsa_cuda_segments(problem);
    r.total = problem->config.num_proxy_heads * r.blocks * r.segments;
    r.shift = fmsa_cuda_segment_shift(problem);
    r.copies = 1;
    while (r.copies < most_copies && r.copies * 2 * r.total <= wanted_counts)
        r.copies *= 2;
    return r;
}

scratch take_scratch(const fmsa_problem *problem, const runs &runs, fmsa_cuda_arena *arena) {
    scratch s;
    s.tiles = fmsa_ceil_div(runs.total, tile_runs);
    s.groups = problem->config.num_proxy_heads * runs.segments;
    s.counts = (int32_t *)fmsa_cuda_take(arena, runs.copies * runs.total, sizeof(int32_t));
    s.run_edges = (int32_t *)fmsa_cuda_take(arena, runs.total, sizeof(int32_t));
    s.run_begin = (int64_t *)fmsa_cuda_take(arena, runs.total, sizeof(int64_t));
    s.tile_sum = (int64_t *)fmsa_cuda_take(arena, s.tiles + 1, sizeof(int64_t));
    s.group_items = (int64_t *)fmsa_cuda_take(arena, s.groups * classes + 1, sizeof(int64_t));
    return s;
}

} // namespace

extern "C" fmsa_status fmsa_portable_schedule_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    fmsa_cuda_arena arena = {NULL, 0};
    take_scratch(problem, count_runs(problem), &arena);
    *bytes = arena.used;
    return FMSA_OK;
}

extern "C" fmsa_status fmsa_portable_schedule(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                              size_t workspace_bytes, cudaStream_t stream) {
    (void)workspace_bytes;
    const fmsa_config *c = &problem->config;
    const fmsa_cuda_schedule schedule = fmsa_cuda_schedule_at(problem, tensors->schedule);
    const runs runs = count_runs(problem);
    fmsa_cuda_arena arena = {(char *)workspace, 0};
    const scratch s = take_scratch(problem, runs, &arena);
    const int32_t heads = c->num_proxy_heads, total_q = (int32_t)c->total_q, slots = problem->slots;
    const int64_t rows = (int64_t)heads * total_q;
    const dim3 tiles((unsigned)s.tiles), groups((unsigned)s.groups);

    FMSA_TRY(fmsa_cuda_build_geometry(problem, schedule.geometry, stream));
    const size_t count_bytes = (size_t)(runs.copies * runs.total) * sizeof(int32_t);
    FMSA_TRY(fmsa_cuda_status("clearing the schedule", cudaMemsetAsync(s.counts, 0, count_bytes, stream)));
    FMSA_TRY(fmsa::launch("clean_rows", clean_rows, dim3(fmsa_cuda_grid(rows, rows_per_block)), rows_threads, 0, stream,
                          tensors->block_indices, schedule, s.counts, runs, heads, total_q, c->top_k, slots,
                          c->block_size));
    if (runs.total == 0) {
        const size_t list_bytes = (size_t)(heads * problem->max_key_blocks + 1) * sizeof(int64_t);
        FMSA_TRY(
            fmsa_cuda_status("clearing the schedule", cudaMemsetAsync(schedule.list_begin, 0, list_bytes, stream)));
        return fmsa_cuda_status("clearing the schedule",
                                cudaMemsetAsync(schedule.num_items, 0, sizeof(int32_t), stream));
    }
    FMSA_TRY(fmsa::launch("sum_tiles", sum_tiles, tiles, tile_threads, 0, stream, s.counts, s.tile_sum, runs));
    FMSA_TRY(fmsa::launch("scan_sums", scan_sums, dim3(1), sums_threads, 0, stream, s.tile_sum, s.tiles));
    FMSA_TRY(fmsa::launch("place_runs", place_runs, tiles, tile_threads, 0, stream, s.counts, s.tile_sum, s.run_begin,
                          s.run_edges, schedule.list_begin, runs));
    FMSA_TRY(fmsa::launch("scatter_edges", scatter_edges, dim3(fmsa_cuda_grid(rows * slots, scatter_threads)),
                          scatter_threads, 0, stream, schedule, s.run_begin, s.counts, runs, heads, total_q, slots));
    const size_t bitmap_bytes = ((size_t)1 << (runs.shift - 5)) * (sizeof(uint32_t) + sizeof(int32_t));
    const unsigned order_blocks = (unsigned)(runs.total < most_order_blocks ? runs.total : most_order_blocks);
    FMSA_TRY(fmsa::launch("order_runs", order_runs, dim3(order_blocks), order_threads, bitmap_bytes, stream, schedule,
                          s.run_edges, s.run_begin, runs));
    FMSA_TRY(fmsa::launch("count_items", count_items, groups, item_threads, 0, stream, schedule.geometry, s.run_edges,
                          s.group_items, runs, heads, total_q));
    FMSA_TRY(fmsa::launch("scan_sums", scan_sums, dim3(1), sums_threads, 0, stream, s.group_items, s.groups * classes));
    return fmsa::launch("place_items", place_items, groups, item_threads, 0, stream, schedule, s.run_edges, s.run_begin,
                        s.group_items, runs, heads, total_q, s.groups);
}
