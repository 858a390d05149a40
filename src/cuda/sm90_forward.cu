/* The Hopper forward: which problems it takes, how scratch is laid out, and the order of its launches.
 *
 * Dense: geometry, plan (sm90_forward_plan.cu), query-outer kernel (sm90_forward_query.cu). Sparse, for each chunk of
 * query rows: plan; then, where the plan has left no edges to the key-outer kernel, the query-outer kernel; else the
 * key-outer kernel (sm90_forward_key.cu) for the edges that few neighbours share, and a query-outer kernel for the rest
 * that merges its partial results (sm90_forward_merge.cu). All three are launched, and the device's choice leaves at
 * once what has nothing to do. The kernels of a chunk follow one another closely (launch_close()); each waits for the
 * one before it, so also for those before that. */
#include "sm90.h"
#include "sm90_forward.cuh"

namespace fmsa {
namespace forward90 {

namespace {

/* How a problem is cut. In dense mode all heads of a key head are a unit. */
struct layout {
    tile_shape shape;
    int32_t units, units_per_key_head, units_per_proxy_head;
    int32_t popular, room, words;
};

layout make_layout(const fmsa_problem *problem) {
    const fmsa_config &c = problem->config;
    layout l = {};
    l.units = is_dense(problem) ? c.num_kv_heads : problem->units;
    l.units_per_key_head = l.units / c.num_kv_heads;
    l.units_per_proxy_head = is_dense(problem) ? 1 : l.units / c.num_proxy_heads;
    l.shape.heads = c.num_heads / l.units;
    l.shape.half_tokens = half_rows / l.shape.heads;
    l.shape.tokens = 2 * l.shape.half_tokens;
    l.shape.inverse = static_cast<uint32_t>((65536 + l.shape.heads - 1) / l.shape.heads);
    if (l.shape.tokens == 0) return l; /* more heads than a half has rows */
    l.shape.per_block = (block_keys + l.shape.tokens - 1) / l.shape.tokens;
    /* A step of the query-outer kernel costs the same for few tokens and for many, an edge of the key-outer kernel its
     * share of a step and the way of a partial result to memory and back: about as much where 5 of 8 take part. */
    l.popular = (5 * l.shape.tokens + 7) / 8;
    if (c.flags & FMSA_FLAG_QUERY_OUTER) l.popular = 1;
    if (c.flags & FMSA_FLAG_KEY_OUTER) l.popular = l.shape.tokens + 1;
    /* Blocks that so many chose, or in a short tile blocks that all chose, and the local one. */
    const int32_t shared = l.shape.tokens * problem->slots / l.popular;
    l.room = (shared > problem->slots ? shared : problem->slots) + 1;
    l.words = l.shape.tokens <= 32 ? 1 : l.shape.tokens <= 64 ? 2 : mask_words;
    return l;
}

/* Tiles of `rows` query rows, at most: those that a document of all rows would have, and for each fragment one at
 * either end that is not full, and where tiles do not divide a block one more short one. */
int64_t most_tiles(const fmsa_problem *problem, const tile_shape &shape, int64_t rows) {
    const int64_t fragments = problem->config.num_fragments < rows ? problem->config.num_fragments : rows;
    const int64_t short_tiles = shape.per_block * shape.tokens == block_keys ? 2 : 3;
    const int64_t tiles = rows * shape.per_block / block_keys + short_tiles * fragments + 1;
    return tiles < rows ? tiles : rows;
}

int64_t most_items(const fmsa_problem *problem, int64_t rows) {
    work w = {};
    w.items = reinterpret_cast<const fmsa_cuda_item *>(problem); /* any but NULL: sparse */
    w.row_end = static_cast<int32_t>(rows);
    return max_shares(problem, w);
}

/* Takes the scratch of a chunk of `rows` rows into l. */
void take_scratch(const fmsa_problem *problem, const layout &how, int64_t rows, fmsa_cuda_arena *arena,
                  launch_parameters *l) {
    const fmsa_config &c = problem->config;
    l->problem = problem;
    l->shape = how.shape;
    l->units = how.units;
    l->units_per_key_head = how.units_per_key_head;
    l->units_per_proxy_head = how.units_per_proxy_head;
    l->popular = how.popular;
    l->slots = problem->slots;
    l->most_tiles = static_cast<int32_t>(most_tiles(problem, how.shape, rows));
    if (is_dense(problem)) l->geometry = fmsa_cuda_geometry_at(problem, arena->base);
    if (is_dense(problem)) arena->used += (fmsa_cuda_geometry_bytes(problem) + 255) & ~size_t(255);
    const auto take = [&](auto *&pointer, int64_t count) {
        pointer =
            static_cast<std::remove_reference_t<decltype(pointer)>>(fmsa_cuda_take(arena, count, sizeof(*pointer)));
    };
    take(l->state, 1);
    take(l->fragment_tile, c.num_fragments + 1);
    take(l->tiles, l->most_tiles);
    if (is_dense(problem)) return;
    const int64_t lists = int64_t(l->most_tiles) * c.num_proxy_heads, edges = c.num_proxy_heads * rows * l->slots;
    const int64_t cells = int64_t(l->most_tiles) * l->units * l->slots * how.shape.tokens;
    l->lists.most_tiles = l->most_tiles;
    l->lists.room = how.room;
    l->lists.words = how.words;
    l->lists.count_bytes = (how.shape.tokens + 15) / 16 * 16;
    take(l->lists.lists, lists);
    take(l->lists.entries, lists * how.room * (1 + how.words));
    take(l->lists.token_partials, lists * l->lists.count_bytes);
    take(l->edge_cell, edges);
    take(l->cuts, 2);
    take(l->pieces, most_items(problem, rows) + edges / (piece_tiles * how.shape.tokens));
    take(l->remote, edges);
    take(l->partial_lse, cells * how.shape.heads);
    l->partial_values = fmsa_cuda_take(arena, cells * how.shape.heads, 2 * c.head_dim);
}

size_t scratch_bytes(const fmsa_problem *problem, const layout &how, int64_t rows) {
    fmsa_cuda_arena arena = {nullptr, 0};
    launch_parameters l = {};
    take_scratch(problem, how, rows, &arena, &l);
    return arena.used;
}

/* Bytes that scratch may take: scratch_limit, or without one what a launch needs to fill the card. */
size_t most_bytes(const fmsa_problem *problem) {
    constexpr size_t usual_bytes = size_t(9) << 29;
    constexpr size_t numbered = size_t(INT32_MAX) * 128; /* cells are numbered in 32 bits and take 128 bytes or more */
    const size_t limit = problem->config.scratch_limit != 0 ? problem->config.scratch_limit : usual_bytes;
    return limit < numbered ? limit : numbered;
}

/* Rows of a chunk, so that its scratch fits in most_bytes(): all rows, or whole segments of the schedule, or a power of
 * two of rows, at the least 128, which may not fit. */
int64_t plan_chunks(const fmsa_problem *problem, const layout &how) {
    constexpr int64_t least_rows = 128;
    const size_t limit = most_bytes(problem);
    const int64_t all = problem->config.total_q;
    if (is_dense(problem) || all <= least_rows || scratch_bytes(problem, how, all) <= limit) return all;
    const int64_t segment = int64_t(1) << fmsa_cuda_segment_shift(problem);
    int64_t rows = (all - 1) / segment * segment;
    while (rows > segment && scratch_bytes(problem, how, rows) > limit)
        rows = (rows / 2 + segment - 1) / segment * segment;
    if (rows == 0) rows = segment;
    while (rows > least_rows && scratch_bytes(problem, how, rows) > limit)
        rows /= 2;
    return rows;
}

size_t planned_bytes(const fmsa_problem *problem, const layout &how) {
    return scratch_bytes(problem, how, plan_chunks(problem, how));
}

fmsa_status attend_chunk(const launch_parameters &l) {
    FMSA_TRY(make_plan(l));
    if (l.problem->config.total_k == 0) return FMSA_OK; /* no row has a key: the plan has cleared them */
    FMSA_TRY(attend_queries(l));
    if (l.schedule == nullptr) return FMSA_OK;
    FMSA_TRY(attend_keys(l));
    return attend_and_merge(l);
}

} // namespace

} // namespace forward90
} // namespace fmsa

using namespace fmsa;
using namespace fmsa::forward90;

/* A tile has cells for all its tokens, however few it has: many short documents with few heads a unit would take
 * gigabytes for next to no work, and are left to the portable kernels. */
extern "C" bool fmsa_sm90_takes_forward(const fmsa_problem *problem) {
    const fmsa_config &c = problem->config;
    const bool narrow = c.dtype == FMSA_DTYPE_BF16 || c.dtype == FMSA_DTYPE_FP16;
    const layout how = make_layout(problem);
    return narrow && c.block_size == block_keys && (c.head_dim == 64 || c.head_dim == 128) &&
           how.shape.half_tokens > 0 && planned_bytes(problem, how) <= most_bytes(problem);
}

extern "C" fmsa_status fmsa_sm90_forward_workspace_bytes(const fmsa_problem *problem, size_t *bytes) {
    *bytes = planned_bytes(problem, make_layout(problem));
    return FMSA_OK;
}

extern "C" fmsa_status fmsa_sm90_forward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                         size_t, cudaStream_t stream) {
    const fmsa_config &c = problem->config;
    const layout how = make_layout(problem);
    const int64_t rows = plan_chunks(problem, how);
    fmsa_cuda_arena arena = {static_cast<char *>(workspace), 0};
    launch_parameters l = {};
    take_scratch(problem, how, rows, &arena, &l);
    l.tensors = tensors;
    l.stream = stream;
    int device;
    FMSA_TRY(fmsa_cuda_status("reading the current device", cudaGetDevice(&device)));
    FMSA_TRY(fmsa_cuda_status("counting multiprocessors",
                              cudaDeviceGetAttribute(&l.processors, cudaDevAttrMultiProcessorCount, device)));
    fmsa_cuda_schedule schedule = {};
    if (is_dense(problem)) {
        FMSA_TRY(fmsa_cuda_build_geometry(problem, l.geometry, stream));
    } else {
        schedule = fmsa_cuda_schedule_at(problem, tensors->schedule);
        l.schedule = &schedule;
        l.geometry = schedule.geometry;
    }
    for (int64_t begin = 0; begin < c.total_q; begin += rows) {
        l.row_begin = static_cast<int32_t>(begin);
        l.row_end = static_cast<int32_t>(begin + rows < c.total_q ? begin + rows : c.total_q);
        FMSA_TRY(attend_chunk(l));
    }
    return FMSA_OK;
}
