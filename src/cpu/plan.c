#include "plan.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include "panel.h"
#include "status.h"

static int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

int64_t fmsa_cpu_tile_keys(const fmsa_problem *problem) {
    const int64_t tiles = fmsa_ceil_div(problem->config.block_size, FMSA_CPU_TILE_KEYS);
    return fmsa_ceil_div(problem->config.block_size, tiles);
}

static bool has_proxy(fmsa_operation operation) {
    return operation == FMSA_OPERATION_PROXY_LOSS || operation == FMSA_OPERATION_BACKWARD_WITH_PROXY;
}

static bool has_main_gradients(fmsa_operation operation) {
    return operation == FMSA_OPERATION_BACKWARD || operation == FMSA_OPERATION_BACKWARD_WITH_PROXY;
}

/* ---- Layouts. ---- */

fmsa_cpu_shared fmsa_cpu_take_shared(const fmsa_problem *problem, fmsa_operation operation, int64_t num_tasks,
                                     fmsa_cpu_arena *arena) {
    const fmsa_config *c = &problem->config;
    const size_t real_bytes = fmsa_real_bytes(c->dtype);
    fmsa_cpu_shared shared = {0};
    shared.geometry = fmsa_cpu_take_geometry(problem, arena);
    if (!has_main_gradients(operation) && !has_proxy(operation)) return shared;
    const int64_t tiles = fmsa_ceil_div(c->block_size, fmsa_cpu_tile_keys(problem));
    shared.turns = fmsa_cpu_take(arena, problem->max_key_blocks * tiles * problem->bundles, sizeof(int32_t));
    const bool outputs_are_real = fmsa_dtype_bytes(c->dtype) == real_bytes || c->flags & FMSA_FLAG_FP32_KV_GRADS;
    if (has_main_gradients(operation) && !outputs_are_real) {
        shared.dk = fmsa_cpu_take(arena, c->total_k * c->num_kv_heads * c->head_dim, real_bytes);
        shared.dv = fmsa_cpu_take(arena, c->total_k * c->num_kv_heads * c->head_dim, real_bytes);
    }
    if (has_proxy(operation)) {
        shared.dk_proxy = fmsa_cpu_take(arena, c->total_k * c->num_proxy_heads * c->proxy_head_dim, real_bytes);
        shared.kl_of_tasks = fmsa_cpu_take(arena, num_tasks, sizeof(double));
    }
    return shared;
}

static void *take_panel(fmsa_cpu_arena *arena, int64_t rows, int64_t columns, size_t real_bytes) {
    return fmsa_cpu_take(arena, rows * fmsa_cpu_leading(columns), real_bytes);
}

fmsa_cpu_select_scratch fmsa_cpu_take_select_scratch(const fmsa_problem *problem, int64_t chunk_rows,
                                                     fmsa_cpu_arena *arena) {
    const fmsa_config *c = &problem->config;
    const size_t real_bytes = fmsa_real_bytes(c->dtype);
    const int64_t keys = fmsa_cpu_tile_keys(problem), group = c->num_proxy_heads / c->num_proxy_kv_heads;
    fmsa_cpu_select_scratch s;
    s.positions = fmsa_cpu_take(arena, chunk_rows, sizeof(int32_t));
    s.k_transposed = take_panel(arena, c->proxy_head_dim, keys, real_bytes);
    s.q = take_panel(arena, FMSA_CPU_TILE_ROWS, c->proxy_head_dim, real_bytes);
    s.scores = take_panel(arena, FMSA_CPU_TILE_ROWS, keys, real_bytes);
    s.block_scores = fmsa_cpu_take(arena, chunk_rows * group * problem->max_fragment_blocks, real_bytes);
    s.heap_scores = fmsa_cpu_take(arena, problem->slots, real_bytes);
    s.heap = fmsa_cpu_take(arena, problem->slots, sizeof(int32_t));
    s.chosen = fmsa_cpu_take(arena, problem->max_fragment_blocks, sizeof(uint8_t));
    return s;
}

fmsa_cpu_forward_scratch fmsa_cpu_take_forward_scratch(const fmsa_problem *problem, int64_t chunk_rows,
                                                       fmsa_cpu_arena *arena) {
    const int64_t keys = fmsa_cpu_tile_keys(problem), dim = problem->config.head_dim;
    const size_t real_bytes = fmsa_real_bytes(problem->config.dtype);
    fmsa_cpu_forward_scratch s;
    s.positions = fmsa_cpu_take(arena, chunk_rows, sizeof(int32_t));
    s.list = fmsa_cpu_take(arena, chunk_rows, sizeof(int32_t));
    s.k_transposed = take_panel(arena, dim, keys, real_bytes);
    s.v = take_panel(arena, keys, dim, real_bytes);
    s.q = take_panel(arena, FMSA_CPU_TILE_ROWS, dim, real_bytes);
    s.scores = take_panel(arena, FMSA_CPU_TILE_ROWS, keys, real_bytes);
    s.product = take_panel(arena, FMSA_CPU_TILE_ROWS, dim, real_bytes);
    s.rescale = fmsa_cpu_take(arena, FMSA_CPU_TILE_ROWS, real_bytes);
    s.out = take_panel(arena, chunk_rows * problem->unit_heads, dim, real_bytes);
    s.max = fmsa_cpu_take(arena, chunk_rows * problem->unit_heads, real_bytes);
    s.sum = fmsa_cpu_take(arena, chunk_rows * problem->unit_heads, real_bytes);
    return s;
}

fmsa_cpu_backward_scratch fmsa_cpu_take_backward_scratch(const fmsa_problem *problem, fmsa_operation operation,
                                                         int64_t chunk_rows, fmsa_cpu_arena *arena) {
    const fmsa_config *c = &problem->config;
    const size_t real_bytes = fmsa_real_bytes(c->dtype);
    const int64_t keys = fmsa_cpu_tile_keys(problem), dim = c->head_dim, proxy_dim = c->proxy_head_dim;
    const int64_t chunk_heads = chunk_rows * (c->num_heads / problem->bundles);
    fmsa_cpu_backward_scratch s = {0};
    s.positions = fmsa_cpu_take(arena, chunk_rows, sizeof(int32_t));
    s.list = fmsa_cpu_take(arena, chunk_rows, sizeof(int32_t));
    s.k_transposed = take_panel(arena, dim, keys, real_bytes);
    s.q = take_panel(arena, FMSA_CPU_TILE_ROWS, dim, real_bytes);
    s.p = take_panel(arena, FMSA_CPU_TILE_ROWS, keys, real_bytes);
    s.product = take_panel(arena, FMSA_CPU_TILE_ROWS, max64(dim, proxy_dim), real_bytes);
    s.lse = fmsa_cpu_take(arena, chunk_heads, real_bytes);
    if (has_main_gradients(operation)) {
        s.v_transposed = take_panel(arena, dim, keys, real_bytes);
        s.k = take_panel(arena, keys, dim, real_bytes);
        s.dk = take_panel(arena, keys, dim, real_bytes);
        s.dv = take_panel(arena, keys, dim, real_bytes);
        s.dout = take_panel(arena, FMSA_CPU_TILE_ROWS, dim, real_bytes);
        s.ds = take_panel(arena, FMSA_CPU_TILE_ROWS, keys, real_bytes);
        s.dq = take_panel(arena, chunk_heads, dim, real_bytes);
        s.delta = fmsa_cpu_take(arena, chunk_heads, real_bytes);
    }
    if (has_proxy(operation)) {
        const int64_t chunk_proxies = chunk_rows * (c->num_proxy_heads / problem->bundles);
        s.k_proxy_transposed = take_panel(arena, proxy_dim, keys, real_bytes);
        s.k_proxy = take_panel(arena, keys, proxy_dim, real_bytes);
        s.dk_proxy = take_panel(arena, keys, proxy_dim, real_bytes);
        s.q_proxy = take_panel(arena, FMSA_CPU_TILE_TOKENS, proxy_dim, real_bytes);
        s.teacher = take_panel(arena, FMSA_CPU_TILE_TOKENS, keys, real_bytes);
        s.student = take_panel(arena, FMSA_CPU_TILE_TOKENS, keys, real_bytes);
        s.dq_proxy = take_panel(arena, chunk_proxies, proxy_dim, real_bytes);
        s.student_max = fmsa_cpu_take(arena, chunk_proxies, real_bytes);
        s.student_sum = fmsa_cpu_take(arena, chunk_proxies, real_bytes);
    }
    return s;
}

/* ---- Sizes. ---- */

static int32_t most_threads(const fmsa_config *c) {
#ifdef _OPENMP
    return c->num_threads > 0 ? c->num_threads : omp_get_max_threads();
#else
    (void)c;
    return 1;
#endif
}

/* Heads that share a task's rows: the rows of a chunk times these are the rows of its products. */
static int64_t heads_of_task(const fmsa_problem *problem, fmsa_operation operation) {
    const fmsa_config *c = &problem->config;
    switch (operation) {
    case FMSA_OPERATION_SELECT:
        return c->num_proxy_heads / c->num_proxy_kv_heads;
    case FMSA_OPERATION_FORWARD:
        return problem->unit_heads;
    default:
        return c->num_heads / problem->bundles;
    }
}

static int64_t tasks_of_chunk(const fmsa_problem *problem, fmsa_operation operation) {
    switch (operation) {
    case FMSA_OPERATION_SELECT:
        return problem->config.num_proxy_kv_heads;
    case FMSA_OPERATION_SCHEDULE:
        return problem->config.num_proxy_heads;
    case FMSA_OPERATION_FORWARD:
        return problem->units;
    default:
        return problem->bundles;
    }
}

/* Selection keeps the scores of all blocks for the rows of a chunk: as many rows as a table of some MiB holds. */
static int64_t preferred_select_rows(const fmsa_problem *problem) {
    enum { PAIRS = 512, LEAST_ROWS = 16, TABLE_BYTES = 1 << 24 };
    const int64_t heads = heads_of_task(problem, FMSA_OPERATION_SELECT);
    const int64_t pair_bytes = problem->max_fragment_blocks * (int64_t)fmsa_real_bytes(problem->config.dtype);
    return max64(LEAST_ROWS, min64(PAIRS, TABLE_BYTES / max64(pair_bytes, 1)) / heads);
}

/* Rows of a chunk when nothing limits the scratch: so many that a key block, packed once for a chunk, meets enough of
 * them to pay for the packing, even where each row chooses few of many blocks; and so few that threads have enough
 * tasks and a chunk's accumulators stay near the caches. */
static int64_t preferred_chunk_rows(const fmsa_problem *problem, fmsa_operation operation) {
    enum { PAIRS_MEETING_A_BLOCK = 256, LEAST_PAIRS = 1024, MOST_PAIRS = 8192, LEAST_ROWS = 16 };
    if (operation == FMSA_OPERATION_SCHEDULE) return max64(problem->config.total_q, 1);
    if (operation == FMSA_OPERATION_SELECT) return preferred_select_rows(problem);
    const bool sparse = problem->config.mode == FMSA_MODE_SPARSE;
    const int64_t blocks = max64(problem->max_fragment_blocks, 1);
    const int64_t chosen = sparse ? max64(problem->slots, 1) : blocks;
    const int64_t pairs = max64(LEAST_PAIRS, min64(MOST_PAIRS, PAIRS_MEETING_A_BLOCK * blocks / chosen));
    return max64(LEAST_ROWS, fmsa_cpu_padded(pairs / heads_of_task(problem, operation)));
}

static size_t shared_bytes(const fmsa_problem *problem, fmsa_operation operation, int64_t num_tasks) {
    fmsa_cpu_arena arena = {NULL, 0};
    fmsa_cpu_take_shared(problem, operation, num_tasks, &arena);
    return arena.used;
}

static size_t thread_bytes(const fmsa_problem *problem, fmsa_operation operation, int64_t chunk_rows) {
    fmsa_cpu_arena arena = {NULL, 0};
    switch (operation) {
    case FMSA_OPERATION_SELECT:
        fmsa_cpu_take_select_scratch(problem, chunk_rows, &arena);
        break;
    case FMSA_OPERATION_SCHEDULE:
        fmsa_cpu_take(&arena, problem->max_fragment_blocks, sizeof(int32_t));
        break;
    case FMSA_OPERATION_FORWARD:
        fmsa_cpu_take_forward_scratch(problem, chunk_rows, &arena);
        break;
    default:
        fmsa_cpu_take_backward_scratch(problem, operation, chunk_rows, &arena);
    }
    return arena.used;
}

static void cut_into_chunks(const fmsa_problem *problem, fmsa_operation operation, int64_t chunk_rows,
                            fmsa_cpu_plan *plan) {
    plan->chunk_rows = chunk_rows;
    plan->num_chunks = fmsa_ceil_div(problem->config.total_q, chunk_rows);
    plan->num_tasks = plan->num_chunks * tasks_of_chunk(problem, operation);
    plan->shared_bytes = shared_bytes(problem, operation, plan->num_tasks);
    plan->thread_bytes = thread_bytes(problem, operation, chunk_rows);
}

fmsa_status fmsa_cpu_make_plan(const fmsa_problem *problem, fmsa_operation operation, fmsa_cpu_plan *plan) {
    const size_t limit = problem->config.scratch_limit;
    int64_t chunk_rows = min64(preferred_chunk_rows(problem, operation), max64(problem->config.total_q, 1));
    cut_into_chunks(problem, operation, chunk_rows, plan);
    while (limit > 0 && plan->shared_bytes + plan->thread_bytes > limit && chunk_rows > 1) {
        chunk_rows = chunk_rows / 2;
        cut_into_chunks(problem, operation, chunk_rows, plan);
    }
    if (limit > 0 && plan->shared_bytes + plan->thread_bytes > limit) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE, "scratch_limit is %zu bytes; this operation needs at least %zu", limit,
                         plan->shared_bytes + plan->thread_bytes);
    }
    int64_t threads = max64(1, min64(most_threads(&problem->config), plan->num_tasks));
    if (limit > 0 && plan->thread_bytes > 0) {
        threads = min64(threads, (int64_t)((limit - plan->shared_bytes) / plan->thread_bytes));
    }
    plan->threads = (int32_t)threads;
    plan->total_bytes = plan->shared_bytes + (size_t)threads * plan->thread_bytes;
    return FMSA_OK;
}
