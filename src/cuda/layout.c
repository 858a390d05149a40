/* Where the arrays of the geometry and of the schedule lie. */
#include "launch.h"
#include "schedule.h"

static fmsa_cuda_geometry take_geometry(const fmsa_problem *problem, fmsa_cuda_arena *arena) {
    const int64_t blocks = problem->max_key_blocks, rows = problem->config.total_q;
    const int64_t fragments = problem->config.num_fragments;
    fmsa_cuda_geometry g;
    g.num_blocks = fmsa_cuda_take(arena, 1, sizeof(int32_t));
    g.block_k_begin = fmsa_cuda_take(arena, blocks, sizeof(int32_t));
    g.block_k_end = fmsa_cuda_take(arena, blocks, sizeof(int32_t));
    g.block_number = fmsa_cuda_take(arena, blocks, sizeof(int32_t));
    g.block_q_begin = fmsa_cuda_take(arena, blocks, sizeof(int32_t));
    g.block_q_end = fmsa_cuda_take(arena, blocks, sizeof(int32_t));
    g.row_position = fmsa_cuda_take(arena, rows, sizeof(int32_t));
    g.row_first_block = fmsa_cuda_take(arena, rows, sizeof(int32_t));
    g.fragment_first_new = fmsa_cuda_take(arena, fragments, sizeof(int32_t));
    g.fragment_key_end = fmsa_cuda_take(arena, fragments, sizeof(int32_t));
    return g;
}

static fmsa_cuda_schedule take_schedule(const fmsa_problem *problem, fmsa_cuda_arena *arena) {
    const int64_t heads = problem->config.num_proxy_heads;
    const int64_t rows = heads * problem->config.total_q, edges = rows * problem->slots;
    fmsa_cuda_schedule s;
    s.geometry = take_geometry(problem, arena);
    s.list_begin = fmsa_cuda_take(arena, heads * problem->max_key_blocks + 1, sizeof(int64_t));
    s.edge_row = fmsa_cuda_take(arena, edges, sizeof(int32_t));
    s.edge_slot = fmsa_cuda_take(arena, edges, sizeof(int32_t));
    s.row_count = fmsa_cuda_take(arena, rows, sizeof(int32_t));
    s.row_block = fmsa_cuda_take(arena, edges, sizeof(int32_t));
    s.num_items = fmsa_cuda_take(arena, 1, sizeof(int32_t));
    s.items = fmsa_cuda_take(arena, fmsa_cuda_max_items(problem), sizeof(fmsa_cuda_item));
    return s;
}

size_t fmsa_cuda_geometry_bytes(const fmsa_problem *problem) {
    fmsa_cuda_arena arena = {NULL, 0};
    take_geometry(problem, &arena);
    return arena.used;
}

fmsa_cuda_geometry fmsa_cuda_geometry_at(const fmsa_problem *problem, void *memory) {
    fmsa_cuda_arena arena = {memory, 0};
    return take_geometry(problem, &arena);
}

size_t fmsa_cuda_schedule_bytes(const fmsa_problem *problem) {
    fmsa_cuda_arena arena = {NULL, 0};
    take_schedule(problem, &arena);
    return arena.used;
}

fmsa_cuda_schedule fmsa_cuda_schedule_at(const fmsa_problem *problem, void *memory) {
    fmsa_cuda_arena arena = {memory, 0};
    return take_schedule(problem, &arena);
}

int32_t fmsa_cuda_segment_shift(const fmsa_problem *problem) {
    enum { LEAST = 12, MOST = 17, MEAN_ITEM = 128, FEW_SEGMENTS = 32 };
    const int64_t slots = problem->slots > 0 ? problem->slots : 1;
    int32_t shift = LEAST;
    while (shift < MOST && ((int64_t)1 << shift) * slots < MEAN_ITEM * problem->max_fragment_blocks)
        shift++;
    /* Counts are kept for each (proxy head, block, segment): few segments keep them linear in the tokens. */
    while (shift < MOST && ((int64_t)FEW_SEGMENTS << shift) < problem->config.total_q)
        shift++;
    return shift;
}

int64_t fmsa_cuda_segments(const fmsa_problem *problem) {
    return fmsa_ceil_div(problem->config.total_q, (int64_t)1 << fmsa_cuda_segment_shift(problem));
}

/* Each (proxy head, block, segment) that has edges leaves at most one item that is not full. */
int64_t fmsa_cuda_max_items(const fmsa_problem *problem) {
    const int64_t heads = problem->config.num_proxy_heads;
    const int64_t edges = heads * problem->config.total_q * problem->slots;
    const int64_t runs = heads * problem->max_key_blocks * fmsa_cuda_segments(problem);
    return edges / FMSA_CUDA_ITEM_EDGES + (runs < edges ? runs : edges);
}
