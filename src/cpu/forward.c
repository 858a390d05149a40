/* Forward: out and lse.
 *
 * A task is a chunk of query rows and a unit of heads. It walks the key blocks in ascending order; for each, it packs
 * the keys and values once and takes the rows of its chunk that attend to the block, 128 (token, head) pairs at a time,
 * through scores, softmax and values. Every row keeps a running maximum, sum and output in the task's own memory, so
 * that nothing is merged between threads: a row's result depends on its own blocks in ascending order and on nothing
 * else. Dense mode differs only in where the list of rows of a block comes from. */
#include "kernels.h"

typedef struct {
    const fmsa_cpu_call *call;
    fmsa_cpu_forward_scratch memory;
    int64_t chunk;
    int64_t row_begin, row_end;
    int32_t unit;
} task;

/* Adds scores s[0 ... visible] to a row's softmax: s becomes exp(s - max), zero behind the visible ones up to `padded`.
 * Returns the factor that brings what was summed before to the new maximum. */
static real softmax_row(real *s, int64_t visible, int64_t padded, real *row_max, real *row_sum) {
    const int64_t whole = visible / LANES * LANES;
    const ivec tail = lanes_below(visible - whole);
    vec greatest = vec_all(*row_max);
    for (int64_t j = 0; j < whole; j += LANES)
        greatest = vec_max(vec_load(s + j), greatest);
    if (whole < visible) greatest = vec_max(vec_select(tail, vec_load(s + whole), greatest), greatest);
    const real max = vec_greatest(greatest);
    const real shift = max == -INFINITY ? 0 : max;
    vec sum = vec_all(0);
    int64_t j = 0;
    for (; j < whole; j += LANES) {
        const vec p = vec_exp(vec_load(s + j) - shift);
        vec_store(s + j, p);
        sum += p;
    }
    if (whole < visible) {
        const vec p = (vec)(tail & (ivec)vec_exp(vec_load(s + j) - shift));
        vec_store(s + j, p);
        sum += p;
        j += LANES;
    }
    for (; j < padded; j += LANES)
        vec_store(s + j, vec_all(0));
    const real rescale = *row_max == max ? 1 : real_exp(*row_max - shift);
    *row_max = max;
    *row_sum = *row_sum * rescale + vec_sum(sum);
    return rescale;
}

/* (token, head) pairs begin ... begin + count of a list, through one tile of keys. */
static void attend(const task *t, const key_tile *tile, int64_t keys, const fmsa_cpu_list *list, int64_t begin,
                   int64_t count) {
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_cpu_forward_scratch *m = &t->memory;
    const int64_t heads = t->call->problem->unit_heads, dim = c->head_dim;
    const int64_t ld = fmsa_cpu_leading(dim), ld_keys = fmsa_cpu_leading(fmsa_cpu_tile_keys(t->call->problem));
    real *q = m->q, *scores = m->scores, *product = m->product, *rescale = m->rescale, *out = m->out;
    row_head pairs[FMSA_CPU_TILE_ROWS];
    list_pairs(list->rows, heads, begin, count, pairs);
    gather_pairs(c->dtype, &t->call->tensors->q, pairs, count, t->unit * heads, dim, (real)c->softmax_scale, q, ld);
    gemm(count, keys, dim, q, ld, m->k_transposed, ld_keys, scores, ld_keys);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = pairs[i].row - t->row_begin, slot = row * heads + pairs[i].head;
        rescale[i] = softmax_row(scores + i * ld_keys, keys_visible(tile, m->positions[row]), fmsa_cpu_padded(keys),
                                 (real *)m->max + slot, (real *)m->sum + slot);
    }
    gemm(count, dim, keys, scores, ld_keys, m->v, ld, product, ld);
    for (int64_t i = 0; i < count; i++) {
        real *to = out + ((pairs[i].row - t->row_begin) * heads + pairs[i].head) * ld;
        for (int64_t d = 0; d < dim; d += LANES) {
            vec_store(to + d, vec_load(to + d) * rescale[i] + vec_load(product + i * ld + d));
        }
    }
}

static void attend_to_block(const task *t, const fmsa_cpu_segment *segment, int32_t block) {
    const fmsa_problem *problem = t->call->problem;
    const fmsa_config *c = &problem->config;
    const int32_t proxy_head = t->unit / (problem->units / c->num_proxy_heads);
    const int32_t kv_head = t->unit / (problem->units / c->num_kv_heads);
    const fmsa_cpu_list list =
        fmsa_cpu_rows_of_block(t->call, segment, t->chunk, proxy_head, block, t->memory.positions, t->memory.list);
    if (list.count == 0) return;
    const int64_t pairs = list.count * problem->unit_heads;
    for (int64_t i = 0; i < tiles_of_block(t->call, block); i++) {
        const key_tile tile = tile_of_block(t->call, segment->first_block, block, i);
        const int64_t keys = keys_seen(&tile, &list, t->row_begin, t->memory.positions);
        if (keys <= 0) continue;
        pack_transposed(c->dtype, &t->call->tensors->k, tile.row, keys, kv_head, c->head_dim, t->memory.k_transposed,
                        fmsa_cpu_leading(fmsa_cpu_tile_keys(problem)));
        pack_rows(c->dtype, &t->call->tensors->v, tile.row, keys, kv_head, c->head_dim, t->memory.v,
                  fmsa_cpu_leading(c->head_dim));
        for (int64_t begin = 0; begin < pairs; begin += FMSA_CPU_TILE_ROWS) {
            attend(t, &tile, keys, &list, begin, smaller(FMSA_CPU_TILE_ROWS, pairs - begin));
        }
    }
}

static void begin_rows(const task *t) {
    const int64_t rows = (t->row_end - t->row_begin) * t->call->problem->unit_heads;
    const int64_t ld = fmsa_cpu_leading(t->call->problem->config.head_dim);
    real *max = t->memory.max;
    for (int64_t i = 0; i < rows; i++)
        max[i] = -INFINITY;
    memset(t->memory.sum, 0, (size_t)rows * sizeof(real));
    memset(t->memory.out, 0, (size_t)(rows * ld) * sizeof(real));
}

static void write_rows(const task *t) {
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_tensors *tensors = t->call->tensors;
    const int64_t heads = t->call->problem->unit_heads, ld = fmsa_cpu_leading(c->head_dim);
    const real *out = t->memory.out, *max = t->memory.max, *sum = t->memory.sum;
    real *lse = tensors->lse.data;
    for (int64_t row = t->row_begin; row < t->row_end; row++) {
        for (int64_t h = 0; h < heads; h++) {
            const int64_t slot = (row - t->row_begin) * heads + h, head = t->unit * heads + h;
            const bool empty = sum[slot] == 0;
            store_row(c->dtype, out + slot * ld, c->head_dim, empty ? 0 : 1 / sum[slot],
                      tensor_row_out(c->dtype, &tensors->out, row, head));
            lse[row * tensors->lse.row_stride + head * tensors->lse.head_stride] =
                empty ? (real)-INFINITY : max[slot] + real_log(sum[slot]);
        }
    }
}

static void run_task(const task *t) {
    const fmsa_problem *problem = t->call->problem;
    fmsa_cpu_positions(problem, t->row_begin, t->row_end, t->memory.positions);
    begin_rows(t);
    fmsa_cpu_segment segment = {.fragment_end = fmsa_cpu_find_fragment(problem, t->row_begin)};
    while (fmsa_cpu_next_segment(problem, &t->call->shared.geometry, t->row_begin, t->row_end, &segment)) {
        for (int32_t b = 0; b < segment.num_blocks; b++)
            attend_to_block(t, &segment, segment.first_block + b);
    }
    write_rows(t);
}

void FMSA_CPU_NAME(forward)(const fmsa_cpu_call *call) {
    const int32_t units = call->problem->units;
#pragma omp parallel num_threads(call->plan.threads)
    {
        task t = {.call = call};
        fmsa_cpu_arena arena = fmsa_cpu_thread_arena(call, fmsa_cpu_this_thread());
        t.memory = fmsa_cpu_take_forward_scratch(call->problem, call->plan.chunk_rows, &arena);
        /* Later chunks see more keys: the longest tasks go first. */
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = call->plan.num_tasks - 1; i >= 0; i--) {
            t.chunk = i / units;
            t.unit = (int32_t)(i % units);
            t.row_begin = fmsa_cpu_chunk_begin(call, t.chunk);
            t.row_end = fmsa_cpu_chunk_end(call, t.chunk);
            run_task(&t);
        }
    }
}
