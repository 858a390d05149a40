/* Selection: the top-k key blocks of each (token, proxy head) by their greatest proxy score.
 *
 * A task is a chunk of query rows and a proxy key head with the proxy heads that read it. It fills a table of block
 * scores, one packed key tile at a time for all rows, and then picks each row's blocks with a heap of k. Rows that see
 * no more than k blocks need no scores. */
#include "kernels.h"

typedef struct {
    const fmsa_cpu_call *call;
    fmsa_cpu_select_scratch memory;
    int64_t row_begin;
    int64_t row_end;
    int32_t key_head;
    int32_t heads; /* proxy heads of the key head */
} task;

/* A row range within one fragment, whose positions ascend with the rows. */
typedef struct {
    int64_t row_begin, row_end;
    int64_t first_position;
    int32_t first_block;
} run_of_rows;

static real *block_scores_of(const task *t, int64_t row, int64_t head) {
    return (real *)t->memory.block_scores +
           ((row - t->row_begin) * t->heads + head) * t->call->problem->max_fragment_blocks;
}

/* The greatest of s[0 ... count], count > 0, leaving out NaN; NaN when there is nothing else. */
static real greatest_score(const real *s, int64_t count) {
    const int64_t whole = count / LANES * LANES;
    vec greatest = vec_all(-INFINITY);
    for (int64_t j = 0; j < whole; j += LANES)
        greatest = vec_max(vec_load(s + j), greatest);
    real max = vec_greatest(greatest);
    for (int64_t j = whole; j < count; j++)
        max = s[j] > max ? s[j] : max;
    if (max > -INFINITY) return max;
    for (int64_t j = 0; j < count; j++) {
        if (s[j] == s[j]) return max;
    }
    return NAN;
}

/* Whether score a of a block goes before score b of a lower block. NaN goes behind everything. */
static bool is_greater(real a, real b) {
    return a > b || (a == a && b != b);
}

/* ---- Scores. ---- */

/* (token, head) pairs begin ... begin + count, counted from row `first`, against one packed tile. */
static void score_pairs(const task *t, const run_of_rows *run, const key_tile *tile, int32_t block, int64_t first,
                        int64_t begin, int64_t count) {
    const fmsa_config *c = &t->call->problem->config;
    const int64_t dim = c->proxy_head_dim, ld = fmsa_cpu_leading(dim);
    const int64_t ld_keys = fmsa_cpu_leading(fmsa_cpu_tile_keys(t->call->problem));
    real *q = t->memory.q, *scores = t->memory.scores;
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = first + (begin + i) / t->heads, head = t->key_head * t->heads + (begin + i) % t->heads;
        load_row(c->dtype, tensor_row(c->dtype, &t->call->tensors->q_proxy, row, head), dim, 1, q + i * ld);
    }
    gemm(count, tile->keys, dim, q, ld, t->memory.k_transposed, ld_keys, scores, ld_keys);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = first + (begin + i) / t->heads;
        const int64_t visible = keys_visible(tile, run->first_position + row - run->row_begin);
        if (visible == 0) continue;
        const real score = greatest_score(scores + i * ld_keys, visible) * (real)c->proxy_scale;
        real *place = block_scores_of(t, row, (begin + i) % t->heads) + (block - run->first_block);
        if (tile->position % c->block_size == 0 || is_greater(score, *place)) *place = score;
    }
}

static void score_block(const task *t, const run_of_rows *run, int32_t block, int64_t first_row) {
    const fmsa_config *c = &t->call->problem->config;
    const int64_t position = (int64_t)(block - run->first_block) * c->block_size;
    const int64_t first_seeing = run->row_begin + position - run->first_position;
    const int64_t first = first_seeing > first_row ? first_seeing : first_row;
    const int64_t pairs = (run->row_end - first) * t->heads;
    const int64_t last_position = run->first_position + run->row_end - 1 - run->row_begin;
    for (int64_t i = 0; i < tiles_of_block(t->call, block); i++) {
        key_tile tile = tile_of_block(t->call, run->first_block, block, i);
        tile.keys = keys_visible(&tile, last_position);
        if (tile.keys == 0) break;
        pack_transposed(c->dtype, &t->call->tensors->k_proxy, tile.row, tile.keys, t->key_head, c->proxy_head_dim,
                        t->memory.k_transposed, fmsa_cpu_leading(fmsa_cpu_tile_keys(t->call->problem)));
        for (int64_t begin = 0; begin < pairs; begin += FMSA_CPU_TILE_ROWS) {
            score_pairs(t, run, &tile, block, first, begin, smaller(FMSA_CPU_TILE_ROWS, pairs - begin));
        }
    }
}

/* ---- Choice. The heap holds the best blocks so far, the worst of them on top. ---- */

static bool is_worse(const task *t, int64_t a, int64_t b) {
    const real *scores = t->memory.heap_scores;
    const int32_t *blocks = t->memory.heap;
    if (is_greater(scores[b], scores[a])) return true;
    return !is_greater(scores[a], scores[b]) && blocks[a] > blocks[b];
}

static void swap_in_heap(const task *t, int64_t a, int64_t b) {
    real *scores = t->memory.heap_scores;
    int32_t *blocks = t->memory.heap;
    const real score = scores[a];
    const int32_t block = blocks[a];
    scores[a] = scores[b];
    blocks[a] = blocks[b];
    scores[b] = score;
    blocks[b] = block;
}

static void sift_up(const task *t, int64_t i) {
    for (; i > 0 && is_worse(t, i, (i - 1) / 2); i = (i - 1) / 2)
        swap_in_heap(t, i, (i - 1) / 2);
}

static void sift_down(const task *t, int64_t size) {
    for (int64_t i = 0;;) {
        int64_t worst = i;
        for (int64_t child = 2 * i + 1; child <= 2 * i + 2 && child < size; child++) {
            if (is_worse(t, child, worst)) worst = child;
        }
        if (worst == i) return;
        swap_in_heap(t, i, worst);
        i = worst;
    }
}

/* Marks the forced blocks of a row that sees `visible` blocks, the newest first; returns how many of k slots are left.
 */
static int64_t choose_forced(const task *t, int64_t visible) {
    const fmsa_config *c = &t->call->problem->config;
    uint8_t *chosen = t->memory.chosen;
    int64_t left = c->top_k;
    for (int64_t i = 0; i < c->local_blocks && i < visible && left > 0; i++, left--)
        chosen[visible - 1 - i] = 1;
    const int64_t init_blocks = c->init_blocks < visible ? c->init_blocks : visible;
    for (int64_t b = init_blocks - 1; b >= 0 && left > 0; b--) {
        if (!chosen[b]) left--;
        chosen[b] = 1;
    }
    return left;
}

/* Marks the `left` best blocks of those not yet marked. Blocks come in ascending order, so that an equal score that
 * comes later never displaces one. */
static void choose_best(const task *t, const real *scores, int64_t visible, int64_t left) {
    uint8_t *chosen = t->memory.chosen;
    real *heap_scores = t->memory.heap_scores;
    int64_t size = 0;
    for (int64_t b = 0; b < visible && left > 0; b++) {
        if (chosen[b]) continue;
        if (size < left) {
            heap_scores[size] = scores[b];
            t->memory.heap[size] = (int32_t)b;
            sift_up(t, size++);
        } else if (is_greater(scores[b], heap_scores[0])) {
            heap_scores[0] = scores[b];
            t->memory.heap[0] = (int32_t)b;
            sift_down(t, size);
        }
    }
    for (int64_t i = 0; i < size; i++)
        chosen[t->memory.heap[i]] = 1;
}

/* Writes a row's blocks, ascending, then -1. */
static void write_chosen(const task *t, int64_t row, int64_t head, int64_t visible) {
    const fmsa_tensor *tensor = &t->call->tensors->block_indices;
    const int64_t top_k = t->call->problem->config.top_k;
    int32_t *indices =
        (int32_t *)tensor->data + row * tensor->row_stride + (t->key_head * t->heads + head) * tensor->head_stride;
    const uint8_t *chosen = t->memory.chosen;
    int64_t count = 0;
    for (int64_t b = 0; b < visible; b++) {
        if (visible <= top_k || chosen[b]) indices[count++] = (int32_t)b;
    }
    for (; count < top_k; count++)
        indices[count] = -1;
}

static void choose(const task *t, int64_t row, int64_t head, int64_t visible) {
    if (visible > t->call->problem->config.top_k) {
        memset(t->memory.chosen, 0, (size_t)visible);
        const int64_t left = choose_forced(t, visible);
        choose_best(t, block_scores_of(t, row, head), visible, left);
    }
    write_chosen(t, row, head, visible);
}

/* ---- Tasks. ---- */

static int64_t blocks_visible(const task *t, const run_of_rows *run, int64_t row) {
    return (run->first_position + row - run->row_begin) / t->call->problem->config.block_size + 1;
}

static void select_run(const task *t, const run_of_rows *run) {
    const fmsa_config *c = &t->call->problem->config;
    const int64_t first_scored = run->row_begin + (int64_t)c->top_k * c->block_size - run->first_position;
    const int64_t first = first_scored > run->row_begin ? first_scored : run->row_begin;
    const int64_t blocks = first < run->row_end ? blocks_visible(t, run, run->row_end - 1) : 0;
    for (int64_t b = 0; b < blocks; b++)
        score_block(t, run, (int32_t)(run->first_block + b), first);
    for (int64_t row = run->row_begin; row < run->row_end; row++) {
        for (int64_t h = 0; h < t->heads; h++)
            choose(t, row, h, blocks_visible(t, run, row));
    }
}

static void run_task(const task *t) {
    const fmsa_problem *problem = t->call->problem;
    const fmsa_config *c = &problem->config;
    int64_t row = t->row_begin;
    for (int64_t f = fmsa_cpu_find_fragment(problem, t->row_begin); row < t->row_end; f++) {
        const bool behind_last = f >= c->num_fragments;
        const int64_t begin = behind_last ? t->row_end : smaller(c->q_begin[f], t->row_end);
        for (; row < begin; row++) {
            for (int64_t h = 0; h < t->heads; h++)
                write_chosen(t, row, h, 0);
        }
        if (behind_last) return;
        const int64_t end = smaller(c->q_end[f], t->row_end);
        if (row >= end) continue;
        const int64_t position = (int64_t)(c->k_end[f] - c->k_begin[f]) - (c->q_end[f] - row);
        const run_of_rows run = {row, end, position, t->call->shared.geometry.fragment_first_block[f]};
        select_run(t, &run);
        row = end;
    }
}

void FMSA_CPU_NAME(select)(const fmsa_cpu_call *call) {
    const fmsa_config *c = &call->problem->config;
#pragma omp parallel num_threads(call->plan.threads)
    {
        task t = {.call = call, .heads = c->num_proxy_heads / c->num_proxy_kv_heads};
        fmsa_cpu_arena arena = fmsa_cpu_thread_arena(call, fmsa_cpu_this_thread());
        t.memory = fmsa_cpu_take_select_scratch(call->problem, call->plan.chunk_rows, &arena);
        /* Later rows see more keys: the longest tasks go first. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = call->plan.num_tasks - 1; i >= 0; i--) {
            t.key_head = (int32_t)(i % c->num_proxy_kv_heads);
            t.row_begin = fmsa_cpu_chunk_begin(call, i / c->num_proxy_kv_heads);
            t.row_end = fmsa_cpu_chunk_end(call, i / c->num_proxy_kv_heads);
            run_task(&t);
        }
    }
}
