/* The schedule: for each (proxy head, key block) the ascending query rows that chose it, and the work list over them.
 *
 * Query rows are cut into *chunks* of a power of two of rows, and a whole number of chunks is a segment (schedule.h).
 * All is a stable counting sort, in four launches after the geometry:
 *   count_edges    a thread block a (proxy head, chunk): sorts and cleans each row's block indices, counts the edges of
 *                  each block id in shared memory (atomic, order irrelevant);
 *   place_lists    turns the counts of each list into offsets within it, chunk by chunk; the last thread block adds up
 *                  the lists;
 *   scatter_edges  a warp a (proxy head, chunk): takes its rows in order, the lanes one row's blocks at a time. Those
 *                  are distinct, so each lane advances a counter of its own and nothing is left to chance;
 *   place_items    a thread block a (segment, proxy head): cuts the edges of each block into items, long ones first,
 * and waits for how many items the groups before it have. No atomic decides an order, so the result is the same on
 * every run.
 *
 * A chunk's counters cover a window of block ids in shared memory, at most 32 KB; a chunk that sees more ids goes
 * through its rows once for each window. Floor: block_indices read once and row_block written and read, edges written
 * once: 20 B an edge, 20 us at 4 million edges and 4 TB/s; in practice the scattered 4-byte writes of edges and five
 * launches. */
#include "launch.h"
#include "scan.cuh"
#include "schedule.h"

namespace {

constexpr int32_t absent = INT32_MAX; /* an entry of a row that is not to be used: sorts behind every block */
constexpr int32_t window_ids = 8192;

struct id_range {
    int32_t begin, end;
};

/* How the query rows are cut, and what the kernels leave to each other. */
struct chunks {
    int64_t blocks;         /* NB */
    int32_t count;          /* of chunks */
    int32_t shift;          /* rows of a chunk, as a power of two */
    int32_t segment_shift;  /* likewise of a segment */
    int32_t heads;          /* Hp */
    int32_t window;         /* min(NB, window_ids) */
    int64_t groups;         /* (segment, proxy head) */
    int32_t *offsets;       /* [Hp][chunks][NB] edges of a block id; then how many of its list come before them */
    id_range *seen;         /* [chunks] block ids that rows of a chunk see */
    uint32_t *lists_placed; /* [1] thread blocks of place_lists that are done; 0 at first */
    uint32_t *groups_taken; /* [1] likewise groups that place_items has begun */
    uint32_t *group_items;  /* [groups] one more than the group's items; 0 until it is known */

    __device__ int32_t *chunk_offsets(int32_t proxy_head, int32_t chunk) const {
        return offsets + ((int64_t)proxy_head * count + chunk) * blocks;
    }
};

/* ---- Rows ---------------------------------------------------------------------------------------------------- */

constexpr int count_threads = 256;

/* The block ids that rows of the thread block's chunk see. Called by all threads. */
__device__ id_range find_seen(const fmsa_cuda_geometry &geometry, int32_t first_row, int32_t row_end,
                              int32_t block_size) {
    __shared__ int32_t begin, end;
    if (threadIdx.x == 0) {
        begin = INT32_MAX;
        end = 0;
    }
    __syncthreads();
    int32_t least = INT32_MAX, most = 0;
    for (int32_t row = first_row + (int32_t)threadIdx.x; row < row_end; row += count_threads) {
        const int32_t position = geometry.row_position[row], first_block = geometry.row_first_block[row];
        if (position < 0) continue;
        least = min(least, first_block);
        most = max(most, first_block + position / block_size + 1);
    }
    least = __reduce_min_sync(0xffffffffu, least);
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) {
        atomicMin(&begin, least);
        atomicMax(&end, most);
    }
    __syncthreads();
    return {min(begin, end), end};
}

/* The given block indices of one row, `entries` in each of `width` lanes: entry c of lane l is number c * width + l.
 * All lanes of the warp take part in everything. */
template <int width, int entries>
struct row_entries {
    int32_t block[entries], rank[entries]; /* rank among the row's usable blocks, ascending */
    int32_t count;                         /* usable blocks */

    static __device__ int lane() {
        return threadIdx.x % width;
    }
    static __device__ int number(int c) {
        return c * width + lane();
    }
    __device__ row_entries(const int32_t *given, int32_t top_k, int32_t newest) {
#pragma unroll
        for (int c = 0; c < entries; c++) {
            const int32_t x = number(c) < top_k && newest >= 0 ? given[number(c)] : -1;
            block[c] = x >= 0 && x <= newest ? x : absent;
            rank[c] = number(c);
        }
        if (!__all_sync(0xffffffffu, is_sorted())) {
            drop_duplicates();
            find_ranks();
        }
        count = 0;
#pragma unroll
        for (int c = 0; c < entries; c++) {
            const uint32_t usable = __ballot_sync(0xffffffffu, block[c] != absent);
            count += __popc(width == 32 ? usable : usable >> (threadIdx.x & 16) & 0xffffu);
        }
    }

  private:
    /* Whether the usable entries come first and ascend strictly, as fmsa_select writes them. */
    __device__ bool is_sorted() const {
        bool sorted = true;
#pragma unroll
        for (int c = 0; c < entries; c++) {
            int32_t before = __shfl_up_sync(0xffffffffu, block[c], 1, width);
            if (lane() == 0) before = -1;
            if (c > 0) {
                const int32_t last = __shfl_sync(0xffffffffu, block[c > 0 ? c - 1 : 0], width - 1, width);
                if (lane() == 0) before = last;
            }
            sorted &= block[c] == absent || before < block[c];
        }
        return sorted;
    }
    /* Of equal entries, the first stays. */
    __device__ void drop_duplicates() {
        bool duplicate[entries] = {};
        for_each_entry([&](int c, int other_number, int32_t other) {
            duplicate[c] |= other_number < number(c) && other == block[c];
        });
#pragma unroll
        for (int c = 0; c < entries; c++) {
            if (duplicate[c]) block[c] = absent;
        }
    }
    __device__ void find_ranks() {
#pragma unroll
        for (int c = 0; c < entries; c++)
            rank[c] = 0;
        for_each_entry([&](int c, int, int32_t other) { rank[c] += other < block[c]; });
    }
    /* Calls visit(c, number and block of an entry) for each of the lane's entries c and each of the row's. */
    template <typename Visit>
    __device__ void for_each_entry(Visit visit) const {
#pragma unroll
        for (int from = 0; from < entries; from++) {
            for (int l = 0; l < width; l++) {
                const int32_t other = __shfl_sync(0xffffffffu, block[from], l, width);
#pragma unroll
                for (int c = 0; c < entries; c++)
                    visit(c, from * width + l, other);
            }
        }
    }
};

template <int width, int entries>
__global__ void __launch_bounds__(count_threads)
    count_edges(fmsa_tensor block_indices, fmsa_cuda_schedule schedule, chunks chunks, int32_t total_q, int32_t top_k,
                int32_t slots, int32_t block_size) {
    extern __shared__ int32_t counts[];
    using entries_of_row = row_entries<width, entries>;
    const int32_t chunk = blockIdx.x % chunks.count, proxy_head = blockIdx.x / chunks.count;
    const int32_t first_row = chunk << chunks.shift, row_end = min(first_row + (1 << chunks.shift), total_q);
    const id_range seen = find_seen(schedule.geometry, first_row, row_end, block_size);
    if (threadIdx.x == 0 && proxy_head == 0) chunks.seen[chunk] = seen;
    if (blockIdx.x == 0) {
        for (int64_t i = threadIdx.x; i < chunks.groups; i += count_threads)
            chunks.group_items[i] = 0;
        if (threadIdx.x == 0) *chunks.lists_placed = *chunks.groups_taken = 0;
    }
    int32_t *result = chunks.chunk_offsets(proxy_head, chunk);
    for (int32_t id = threadIdx.x; id < seen.begin; id += count_threads)
        result[id] = 0;
    for (int64_t id = seen.end + (int64_t)threadIdx.x; id < chunks.blocks; id += count_threads)
        result[id] = 0;
    int32_t window = seen.begin;
    do {
        const int32_t ids = min(chunks.window, seen.end - window);
        for (int i = threadIdx.x; i < ids; i += count_threads)
            counts[i] = 0;
        __syncthreads();
        for (int32_t first = first_row; first < row_end; first += count_threads / width) {
            const int32_t row = first + (int32_t)threadIdx.x / width;
            const bool exists = row < row_end;
            const int32_t position = exists ? schedule.geometry.row_position[row] : -1;
            const int32_t first_block = exists ? schedule.geometry.row_first_block[row] : 0;
            const int32_t *given = (const int32_t *)block_indices.data + row * block_indices.row_stride +
                                   proxy_head * block_indices.head_stride;
            const entries_of_row x(given, top_k, position < 0 ? -1 : position / block_size);
            if (!exists) continue;
            const int64_t index = (int64_t)proxy_head * total_q + row;
            int32_t *row_block = schedule.row_block + index * slots;
#pragma unroll
            for (int c = 0; c < entries; c++) {
                if (x.block[c] != absent) {
                    const int32_t id = first_block + x.block[c], place = id - window;
                    row_block[x.rank[c]] = id;
                    if (place >= 0 && place < ids) atomicAdd(&counts[place], 1);
                }
                const int number = entries_of_row::number(c);
                if (number >= x.count && number < slots) row_block[number] = -1;
            }
            if (entries_of_row::lane() == 0) schedule.row_count[index] = x.count;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < ids; i += count_threads)
            result[window + i] = counts[i];
        window += ids;
    } while (window < seen.end);
}

/* ---- Lists --------------------------------------------------------------------------------------------------- */

constexpr int lists_threads = 1024, lanes = 32, lists_at_once = 4;

/* Replaces each of count values by the sum of those before it; their total goes behind them. By one thread block, from
 * values that others have written. */
__device__ void scan_lengths(int64_t *values, int64_t count) {
    int64_t before = 0, total;
    for (int64_t tile = 0; tile < count; tile += lists_threads * lists_at_once) {
        const int64_t first = tile + threadIdx.x * lists_at_once;
        int64_t value[lists_at_once], sum = 0;
#pragma unroll
        for (int i = 0; i < lists_at_once; i++) {
            value[i] = first + i < count ? __ldcg(&values[first + i]) : 0;
            sum += value[i];
        }
        int64_t offset = before + fmsa::block_exclusive_scan<lists_threads>(sum, (int64_t)0, fmsa::add(), total);
#pragma unroll
        for (int i = 0; i < lists_at_once; i++) {
            if (first + i < count) values[first + i] = offset;
            offset += value[i];
        }
        before += total;
    }
    if (threadIdx.x == 0) values[count] = before;
}

/* A thread block takes 32 lists: lane l list l, warp w a 32nd of the chunks. */
__global__ void __launch_bounds__(lists_threads) place_lists(int64_t *list_begin, chunks chunks) {
    __shared__ int32_t sums[lanes][lanes + 1];
    __shared__ bool last;
    const int lane = threadIdx.x % lanes, warp = threadIdx.x / lanes;
    const int64_t id = (int64_t)blockIdx.x * lanes + lane;
    const int32_t proxy_head = blockIdx.y, share = (chunks.count + lanes - 1) / lanes;
    const int32_t first = min(warp * share, chunks.count), end = min(first + share, chunks.count);
    const bool exists = id < chunks.blocks;
    int32_t sum = 0;
#pragma unroll 8
    for (int32_t chunk = first; chunk < end; chunk++)
        sum += exists ? chunks.chunk_offsets(proxy_head, chunk)[id] : 0;
    sums[warp][lane] = sum;
    __syncthreads();
    int32_t inclusive = sums[lane][warp];
    const int32_t own = inclusive;
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
        const int32_t before = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += before;
    }
    sums[lane][warp] = inclusive - own;
    if (lane == lanes - 1) {
        const int64_t list = (int64_t)blockIdx.x * lanes + warp;
        if (list < chunks.blocks) list_begin[proxy_head * chunks.blocks + list] = inclusive;
    }
    __syncthreads();
    int32_t offset = sums[warp][lane];
    for (int32_t chunk = first; exists && chunk < end; chunk++) {
        int32_t *place = &chunks.chunk_offsets(proxy_head, chunk)[id];
        const int32_t edges = *place;
        *place = offset;
        offset += edges;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(chunks.lists_placed, 1u) == gridDim.x * gridDim.y - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    scan_lengths(list_begin, chunks.heads * chunks.blocks);
}

/* ---- Edges --------------------------------------------------------------------------------------------------- */

constexpr int loads_at_once = 8;

/* One warp. rows_at_once rows are read together where they have at most 16 slots, and then written one by one. */
template <int rows_at_once>
__global__ void __launch_bounds__(lanes)
    scatter_edges(fmsa_cuda_schedule schedule, chunks chunks, int32_t total_q, int32_t slots) {
    extern __shared__ int32_t next[]; /* place within the list of the next edge of each block id of the window */
    constexpr int width = lanes / rows_at_once;
    const int lane = threadIdx.x, row_of_lane = lane / width, slot_of_lane = lane % width;
    const int32_t chunk = blockIdx.x % chunks.count, proxy_head = blockIdx.x / chunks.count;
    const int32_t first_row = chunk << chunks.shift, row_end = min(first_row + (1 << chunks.shift), total_q);
    const int32_t *offsets = chunks.chunk_offsets(proxy_head, chunk);
    const int64_t *list_begin = schedule.list_begin + proxy_head * chunks.blocks;
    const id_range seen = chunks.seen[chunk];
    const int32_t passes = (slots + width - 1) / width; /* reads for the slots of a row */
    const int32_t reads = (row_end - first_row + rows_at_once - 1) / rows_at_once * passes;
    for (int32_t window = seen.begin; window < seen.end; window += chunks.window) {
        const int32_t ids = min(chunks.window, seen.end - window);
        for (int i = lane; i < ids; i += lanes)
            next[i] = offsets[window + i];
        __syncwarp();
        for (int32_t first = 0; first < reads; first += loads_at_once) {
            int32_t block[loads_at_once];
#pragma unroll
            for (int i = 0; i < loads_at_once; i++) {
                const int32_t read = first + i, row = first_row + read / passes * rows_at_once + row_of_lane;
                const int32_t slot = read % passes * width + slot_of_lane;
                const bool exists = read < reads && row < row_end && slot < slots;
                block[i] = exists ? schedule.row_block[((int64_t)proxy_head * total_q + row) * slots + slot] : -1;
            }
#pragma unroll
            for (int i = 0; i < loads_at_once; i++) {
                const int32_t read = first + i, row = first_row + read / passes * rows_at_once + row_of_lane;
                const int32_t slot = read % passes * width + slot_of_lane, in_window = block[i] - window;
#pragma unroll
                for (int r = 0; r < rows_at_once; r++) {
                    if (r == row_of_lane && block[i] >= 0 && in_window >= 0 && in_window < ids) {
                        const int64_t place = list_begin[block[i]] + next[in_window]++;
                        schedule.edge_row[place] = row;
                        schedule.edge_slot[place] = slot;
                    }
                    __syncwarp();
                }
            }
        }
    }
}

/* ---- Items --------------------------------------------------------------------------------------------------- */

constexpr int item_threads = 256, classes = 5;

/* The items of one block in a segment: full ones, and at most one shorter, each of a class of length: 0 the longest. */
struct block_items {
    int32_t full, rest;

    __device__ explicit block_items(int32_t edges)
        : full(edges / FMSA_CUDA_ITEM_EDGES), rest(edges % FMSA_CUDA_ITEM_EDGES) {
    }
    __device__ int rest_class() const {
        return rest > 512 ? 0 : rest > 256 ? 1 : rest > 128 ? 2 : rest > 64 ? 3 : 4;
    }
    __device__ int32_t of_class(int c) const {
        return (c == 0 ? full : 0) + (rest > 0 && c == rest_class() ? 1 : 0);
    }
};

/* The edges of a list that lie in a segment: from `begin` within the list. */
struct segment_edges {
    int32_t begin, count;

    __device__ segment_edges(const fmsa_cuda_schedule &schedule, const chunks &chunks, int32_t proxy_head, int32_t id,
                             int64_t segment) {
        const int32_t per_segment = 1 << (chunks.segment_shift - chunks.shift);
        const int64_t first = segment * per_segment, next = first + per_segment;
        const int64_t *list = schedule.list_begin + proxy_head * chunks.blocks + id;
        begin = chunks.chunk_offsets(proxy_head, (int32_t)first)[id];
        count =
            (next < chunks.count ? chunks.chunk_offsets(proxy_head, (int32_t)next)[id] : (int32_t)(list[1] - list[0])) -
            begin;
    }
};

/* The block ids that rows of a segment see; an empty range when none sees any. */
__device__ id_range segment_seen(const chunks &chunks, int64_t segment) {
    const int32_t per_segment = 1 << (chunks.segment_shift - chunks.shift);
    const int32_t first = (int32_t)(segment * per_segment), end = min(first + per_segment, chunks.count);
    id_range all = {INT32_MAX, 0};
    for (int32_t chunk = first + (int32_t)threadIdx.x % lanes; chunk < end; chunk += lanes) {
        const id_range seen = chunks.seen[chunk];
        if (seen.begin < seen.end) all = {min(all.begin, seen.begin), max(all.end, seen.end)};
    }
    all.begin = __reduce_min_sync(0xffffffffu, all.begin);
    all.end = __reduce_max_sync(0xffffffffu, all.end);
    return {min(all.begin, all.end), all.end};
}

/* The items of all groups before this one. Groups are numbered in the order in which their thread blocks began, so the
 * ones waited for are under way. Called by all threads. */
__device__ int32_t items_before(const chunks &chunks, int64_t group, int32_t own) {
    if (threadIdx.x == 0) atomicExch(&chunks.group_items[group], (uint32_t)own + 1);
    int32_t before = 0, total;
    for (int64_t g = threadIdx.x; g < group; g += item_threads) {
        uint32_t items;
        while ((items = *(volatile uint32_t *)&chunks.group_items[g]) == 0)
            __nanosleep(32);
        before += (int32_t)(items - 1);
    }
    fmsa::block_exclusive_scan<item_threads>(before, 0, fmsa::add(), total);
    return total;
}

__global__ void __launch_bounds__(item_threads) place_items(fmsa_cuda_schedule schedule, chunks chunks) {
    __shared__ uint32_t taken;
    if (threadIdx.x == 0) taken = atomicAdd(chunks.groups_taken, 1u);
    __syncthreads();
    const int64_t group = taken, segment = group / chunks.heads;
    const int32_t proxy_head = (int32_t)(group % chunks.heads);
    const id_range seen = segment_seen(chunks, segment);
    int32_t items[classes] = {};
    for (int32_t id = seen.begin + (int32_t)threadIdx.x; id < seen.end; id += item_threads) {
        const block_items block(segment_edges(schedule, chunks, proxy_head, id, segment).count);
#pragma unroll
        for (int c = 0; c < classes; c++)
            items[c] += block.of_class(c);
    }
    int32_t base[classes], own = 0;
#pragma unroll
    for (int c = 0; c < classes; c++) {
        int32_t total;
        fmsa::block_exclusive_scan<item_threads>(items[c], 0, fmsa::add(), total);
        base[c] = own;
        own += total;
    }
    const int32_t before = items_before(chunks, group, own);
#pragma unroll
    for (int c = 0; c < classes; c++)
        base[c] += before;
    if (group == chunks.groups - 1 && threadIdx.x == 0) *schedule.num_items = before + own;

    for (int32_t tile = seen.begin; tile < seen.end; tile += item_threads) {
        const int32_t id = tile + (int32_t)threadIdx.x;
        int64_t begin = 0;
        int32_t edges = 0;
        if (id < seen.end) {
            const segment_edges in_segment(schedule, chunks, proxy_head, id, segment);
            edges = in_segment.count;
            begin = schedule.list_begin[proxy_head * chunks.blocks + id] + in_segment.begin;
        }
        const block_items block(edges);
#pragma unroll
        for (int c = 0; c < classes; c++) {
            int32_t total;
            const int32_t mine = block.of_class(c);
            int32_t place = base[c] + fmsa::block_exclusive_scan<item_threads>(mine, 0, fmsa::add(), total);
            base[c] += total;
            for (int i = 0; i < mine; i++) {
                const int32_t length = c == 0 && i < block.full ? FMSA_CUDA_ITEM_EDGES : block.rest;
                schedule.items[place++] = {begin, length, id, proxy_head, 0};
                begin += length;
            }
        }
    }
}

/* ---- Host ---------------------------------------------------------------------------------------------------- */

/* Chunks of 128 rows or more: at most 256 of them, and few enough that their counters stay linear in the edges, but no
 * longer than a segment. */
chunks cut_rows(const fmsa_problem *problem) {
    constexpr int32_t least_shift = 7;
    constexpr int64_t most_chunks = 256, counters_per_edge = 4;
    const int64_t rows = problem->config.total_q, edges = rows * problem->slots;
    chunks c = {};
    c.blocks = problem->max_key_blocks;
    c.segment_shift = fmsa_cuda_segment_shift(problem);
    c.heads = problem->config.num_proxy_heads;
    c.window = (int32_t)(c.blocks < window_ids ? c.blocks : window_ids);
    c.groups = c.heads * fmsa_cuda_segments(problem);
    for (c.shift = least_shift; c.shift < c.segment_shift; c.shift++) {
        const int64_t count = fmsa_ceil_div(rows, (int64_t)1 << c.shift);
        if (count <= most_chunks && count * c.blocks <= counters_per_edge * edges) break;
    }
    c.count = (int32_t)fmsa_ceil_div(rows, (int64_t)1 << c.shift);
    return c;
}

void take_scratch(chunks *c, fmsa_cuda_arena *arena) {
    c->offsets = (int32_t *)fmsa_cuda_take(arena, c->heads * c->count * c->blocks, sizeof(int32_t));
    c->seen = (id_range *)fmsa_cuda_take(arena, c->count, sizeof(id_range));
    c->lists_placed = (uint32_t *)fmsa_cuda_take(arena, 1, sizeof(uint32_t));
    c->groups_taken = (uint32_t *)fmsa_cuda_take(arena, 1, sizeof(uint32_t));
    c->group_items = (uint32_t *)fmsa_cuda_take(arena, c->groups, sizeof(uint32_t));
}

fmsa_status launch_count(const fmsa_problem *problem, const fmsa_tensors *tensors, const fmsa_cuda_schedule &schedule,
                         const chunks &chunks, const fmsa::shared_memory &window, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const auto kernel = c->top_k <= 16 ? count_edges<16, 1> : c->top_k <= 32 ? count_edges<32, 1> : count_edges<32, 4>;
    return fmsa::launch("count_edges", kernel, dim3((unsigned)(chunks.heads * chunks.count)), count_threads, window,
                        stream, tensors->block_indices, schedule, chunks, (int32_t)c->total_q, c->top_k, problem->slots,
                        c->block_size);
}

} // namespace

extern "C" fmsa_status fmsa_portable_schedule_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    fmsa_cuda_arena arena = {NULL, 0};
    chunks chunks = cut_rows(problem);
    take_scratch(&chunks, &arena);
    *bytes = arena.used;
    return FMSA_OK;
}

extern "C" fmsa_status fmsa_portable_schedule(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                              size_t workspace_bytes, cudaStream_t stream) {
    (void)workspace_bytes;
    const fmsa_config *c = &problem->config;
    const fmsa_cuda_schedule schedule = fmsa_cuda_schedule_at(problem, tensors->schedule);
    chunks chunks = cut_rows(problem);
    fmsa_cuda_arena arena = {(char *)workspace, 0};
    take_scratch(&chunks, &arena);
    const fmsa::shared_memory window((size_t)chunks.window * sizeof(int32_t), window_ids * sizeof(int32_t));
    FMSA_TRY(fmsa_cuda_build_geometry(problem, schedule.geometry, stream));
    FMSA_TRY(launch_count(problem, tensors, schedule, chunks, window, stream));
    if (chunks.blocks == 0 || chunks.count == 0) {
        const size_t list_bytes = (size_t)(chunks.heads * chunks.blocks + 1) * sizeof(int64_t);
        FMSA_TRY(
            fmsa_cuda_status("clearing the schedule", cudaMemsetAsync(schedule.list_begin, 0, list_bytes, stream)));
        return fmsa_cuda_status("clearing the schedule",
                                cudaMemsetAsync(schedule.num_items, 0, sizeof(int32_t), stream));
    }
    const dim3 lists((unsigned)fmsa_ceil_div(chunks.blocks, lanes), (unsigned)chunks.heads);
    FMSA_TRY(fmsa::launch("place_lists", place_lists, lists, lists_threads, 0, stream, schedule.list_begin, chunks));
    const auto scatter = problem->slots <= 16 ? scatter_edges<2> : scatter_edges<1>;
    FMSA_TRY(fmsa::launch("scatter_edges", scatter, dim3((unsigned)(chunks.heads * chunks.count)), lanes, window,
                          stream, schedule, chunks, (int32_t)c->total_q, problem->slots));
    return fmsa::launch("place_items", place_items, dim3((unsigned)chunks.groups), item_threads, 0, stream, schedule,
                        chunks);
}
