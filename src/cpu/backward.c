/* Backward, the proxy loss, and both at once.
 *
 * A task is a chunk of query rows and a bundle of heads. It walks the key blocks in ascending order, recomputes scores
 * and probabilities of the rows of its chunk that attend to the block, and from them
 *   - dq and dq_proxy, summed in the task's own memory;
 *   - dk, dv and dk_proxy of the block, summed for the chunk in the task's own memory, and then added to the shared
 *     accumulators when it is the chunk's turn. Turns follow the chunks, so the order of additions, and with it every
 *     bit of the result, is the same for any number of threads.
 * Tasks are handed out in the order of the turns and walk blocks in the same order, hence the first unfinished task
 * never waits, and the others wait only while one before them is behind.
 *
 * The proxy loss needs the log-sum-exp of the student's scores first: one more pass over the blocks of the chunk, with
 * the proxies only. The teacher is the mean of the main probabilities, summed up while they are there. */
#include <sched.h>

#include "kernels.h"

typedef struct {
    const fmsa_cpu_call *call;
    fmsa_cpu_backward_scratch memory;
    bool wants_dq, wants_dk, wants_dv; /* of the main heads */
    bool wants_ds;                     /* dq or dk, which need dP and delta */
    bool wants_proxy;                  /* kl, dq_proxy or dk_proxy */
    bool wants_dq_proxy, wants_dk_proxy;
    fmsa_tensor dk, dv; /* where they are accumulated, as `real` */

    int64_t chunk;
    int64_t row_begin, row_end;
    int32_t bundle;
    int32_t bundle_heads, bundle_proxies;
    double kl;

    /* The tile under way. */
    key_tile tile;
    int32_t *turn;
    int32_t previous; /* last row before the chunk that attends to the tile's block */
    int32_t kv_head;  /* whose keys and values are packed, or -1 */
} task;

static int64_t key_ld(const task *t) {
    return fmsa_cpu_leading(fmsa_cpu_tile_keys(t->call->problem));
}

static int64_t main_ld(const task *t) {
    return fmsa_cpu_leading(t->call->problem->config.head_dim);
}

static int64_t proxy_ld(const task *t) {
    return fmsa_cpu_leading(t->call->problem->config.proxy_head_dim);
}

/* ---- Shared accumulators. ---- */

/* Waits until every chunk before this one has added its share to the tile. */
static void take_turn(const task *t) {
    for (int spins = 0; __atomic_load_n(t->turn, __ATOMIC_ACQUIRE) <= t->previous; spins++) {
        if (spins >= 64) sched_yield();
    }
}

static void pass_turn(const task *t) {
    take_turn(t);
    __atomic_store_n(t->turn, (int32_t)t->row_end, __ATOMIC_RELEASE);
}

static void add_panel(const real *panel, int64_t ld, int64_t rows, int64_t dim, real *to, int64_t to_ld) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t d = 0; d < dim; d++)
            to[i * to_ld + d] += panel[i * ld + d];
    }
}

/* Adds the dk and dv of the packed key/value head, if there is one, to the accumulators. */
static void unload_kv_head(task *t) {
    if (t->kv_head >= 0 && (t->wants_dk || t->wants_dv)) {
        const int64_t dim = t->call->problem->config.head_dim, ld = main_ld(t);
        take_turn(t);
        if (t->wants_dk) {
            real *to = (real *)t->dk.data + t->tile.row * t->dk.row_stride + t->kv_head * t->dk.head_stride;
            add_panel(t->memory.dk, ld, t->tile.keys, dim, to, t->dk.row_stride);
        }
        if (t->wants_dv) {
            real *to = (real *)t->dv.data + t->tile.row * t->dv.row_stride + t->kv_head * t->dv.head_stride;
            add_panel(t->memory.dv, ld, t->tile.keys, dim, to, t->dv.row_stride);
        }
    }
    t->kv_head = -1;
}

static void load_kv_head(task *t, int32_t kv_head) {
    if (t->kv_head == kv_head) return;
    unload_kv_head(t);
    t->kv_head = kv_head;
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_tensors *tensors = t->call->tensors;
    const fmsa_cpu_backward_scratch *m = &t->memory;
    const int64_t ld = main_ld(t), dim = c->head_dim;
    const size_t panel_bytes = (size_t)(t->tile.keys * ld) * sizeof(real);
    pack_transposed(c->dtype, &tensors->k, t->tile.row, t->tile.keys, kv_head, dim, m->k_transposed, key_ld(t));
    if (t->wants_ds) {
        pack_transposed(c->dtype, &tensors->v, t->tile.row, t->tile.keys, kv_head, dim, m->v_transposed, key_ld(t));
    }
    if (t->wants_dq) pack_rows(c->dtype, &tensors->k, t->tile.row, t->tile.keys, kv_head, dim, m->k, ld);
    if (t->wants_dk) memset(m->dk, 0, panel_bytes);
    if (t->wants_dv) memset(m->dv, 0, panel_bytes);
}

/* ---- Rows of scores. Lanes behind the visible keys become 0, up to `padded`. ---- */

/* s becomes exp(s - lse); 0 where lse is -inf, the log-sum-exp of a row that attends to nothing. */
static void probabilities(real *s, int64_t visible, int64_t padded, real lse) {
    if (lse == -INFINITY) visible = 0;
    int64_t j = 0;
    for (; j + LANES <= visible; j += LANES)
        vec_store(s + j, vec_exp(vec_load(s + j) - lse));
    if (j < visible) {
        const vec p = vec_exp(vec_load(s + j) - lse);
        vec_store(s + j, (vec)(lanes_below(visible - j) & (ivec)p));
        j += LANES;
    }
    for (; j < padded; j += LANES)
        vec_store(s + j, vec_all(0));
}

/* dp becomes p (dp - delta). */
static void score_gradients(const real *p, real *dp, int64_t visible, int64_t padded, real delta) {
    int64_t j = 0;
    for (; j + LANES <= visible; j += LANES)
        vec_store(dp + j, vec_load(p + j) * (vec_load(dp + j) - delta));
    if (j < visible) {
        const vec ds = vec_load(p + j) * (vec_load(dp + j) - delta);
        vec_store(dp + j, (vec)(lanes_below(visible - j) & (ivec)ds));
        j += LANES;
    }
    for (; j < padded; j += LANES)
        vec_store(dp + j, vec_all(0));
}

static void add_row(const real *from, int64_t columns, real *to) {
    for (int64_t j = 0; j < columns; j += LANES)
        vec_store(to + j, vec_load(to + j) + vec_load(from + j));
}

/* ---- Main heads. ---- */

/* (token, head) pairs begin ... begin + count of a list, in one unit, through the packed tile. Adds their probabilities
 * to the teacher's row of each token; row 0 of the teacher is the token at place first_token. */
static void main_pairs(const task *t, int32_t unit, int64_t keys, const fmsa_cpu_list *list, int64_t begin,
                       int64_t count, int64_t first_token) {
    const fmsa_problem *problem = t->call->problem;
    const fmsa_config *c = &problem->config;
    const fmsa_tensors *tensors = t->call->tensors;
    const fmsa_cpu_backward_scratch *m = &t->memory;
    const int64_t heads = problem->unit_heads, dim = c->head_dim, ld = main_ld(t), ld_keys = key_ld(t);
    const int64_t padded = fmsa_cpu_padded(keys), head_of_bundle = unit * heads - t->bundle * t->bundle_heads;
    real *q = m->q, *dout = m->dout, *p = m->p, *ds = m->ds, *product = m->product;
    row_head pairs[FMSA_CPU_TILE_ROWS];
    list_pairs(list->rows, heads, begin, count, pairs);
    gather_pairs(c->dtype, &tensors->q, pairs, count, unit * heads, dim, (real)c->softmax_scale, q, ld);
    if (t->wants_ds || t->wants_dv) {
        gather_pairs(c->dtype, &tensors->dout, pairs, count, unit * heads, dim, 1, dout, ld);
    }
    gemm(count, keys, dim, q, ld, m->k_transposed, ld_keys, p, ld_keys);
    if (t->wants_ds) gemm(count, keys, dim, dout, ld, m->v_transposed, ld_keys, ds, ld_keys);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = pairs[i].row - t->row_begin;
        const int64_t slot = row * t->bundle_heads + head_of_bundle + pairs[i].head;
        const int64_t visible = keys_visible(&t->tile, m->positions[row]);
        probabilities(p + i * ld_keys, visible, padded, ((real *)m->lse)[slot]);
        if (t->wants_ds) {
            score_gradients(p + i * ld_keys, ds + i * ld_keys, visible, padded, ((real *)m->delta)[slot]);
        }
        if (t->wants_proxy) {
            add_row(p + i * ld_keys, padded, (real *)m->teacher + (pairs[i].place - first_token) * ld_keys);
        }
    }
    if (t->wants_dv) gemm_transposed_add(keys, dim, count, p, ld_keys, dout, ld, m->dv, ld);
    if (t->wants_dk) gemm_transposed_add(keys, dim, count, ds, ld_keys, q, ld, m->dk, ld);
    if (!t->wants_dq) return;
    gemm(count, dim, keys, ds, ld_keys, m->k, ld, product, ld);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = pairs[i].row - t->row_begin;
        const int64_t slot = row * t->bundle_heads + head_of_bundle + pairs[i].head;
        add_row(product + i * ld, dim, (real *)m->dq + slot * ld);
    }
}

static void main_unit(task *t, int32_t unit, int64_t keys, const fmsa_cpu_list *list, int64_t first_token,
                      int64_t tokens) {
    const fmsa_problem *problem = t->call->problem;
    const int64_t heads = problem->unit_heads;
    load_kv_head(t, unit / (problem->units / problem->config.num_kv_heads));
    const int64_t end = (first_token + tokens) * heads;
    for (int64_t begin = first_token * heads; begin < end; begin += FMSA_CPU_TILE_ROWS) {
        main_pairs(t, unit, keys, list, begin, smaller(FMSA_CPU_TILE_ROWS, end - begin), first_token);
    }
}

/* ---- Proxies. ---- */

static int64_t proxy_slot(const task *t, int32_t proxy_head, int64_t row) {
    return (row - t->row_begin) * t->bundle_proxies + proxy_head - t->bundle * t->bundle_proxies;
}

static int32_t proxy_key_head(const task *t, int32_t proxy_head) {
    const fmsa_config *c = &t->call->problem->config;
    return proxy_head / (c->num_proxy_heads / c->num_proxy_kv_heads);
}

static void load_proxy_keys(const task *t, const key_tile *tile, int32_t proxy_head, bool for_gradients) {
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_tensor *k_proxy = &t->call->tensors->k_proxy;
    const int64_t head = proxy_key_head(t, proxy_head), dim = c->proxy_head_dim, ld = proxy_ld(t);
    pack_transposed(c->dtype, k_proxy, tile->row, tile->keys, head, dim, t->memory.k_proxy_transposed, key_ld(t));
    if (!for_gradients) return;
    if (t->wants_dq_proxy) pack_rows(c->dtype, k_proxy, tile->row, tile->keys, head, dim, t->memory.k_proxy, ld);
    if (t->wants_dk_proxy) memset(t->memory.dk_proxy, 0, (size_t)(tile->keys * ld) * sizeof(real));
}

/* Unscaled scores of the student for `tokens` tokens of a list, into the student panel. */
static void student_scores(const task *t, int32_t proxy_head, int64_t keys, const int32_t *rows, int64_t tokens) {
    const fmsa_config *c = &t->call->problem->config;
    const int64_t dim = c->proxy_head_dim, ld = proxy_ld(t);
    real *q = t->memory.q_proxy;
    row_head pairs[FMSA_CPU_TILE_TOKENS];
    list_pairs(rows, 1, 0, tokens, pairs);
    gather_pairs(c->dtype, &t->call->tensors->q_proxy, pairs, tokens, proxy_head, dim, 1, q, ld);
    gemm(tokens, keys, dim, q, ld, t->memory.k_proxy_transposed, key_ld(t), t->memory.student, key_ld(t));
}

/* Adds scores scale * s[0 ... visible] to the running maximum and sum of a row. */
static void add_to_log_sum_exp(const real *s, int64_t visible, real scale, real *row_max, real *row_sum) {
    real max = *row_max;
    for (int64_t j = 0; j < visible; j++)
        max = s[j] * scale > max ? s[j] * scale : max;
    const real shift = max == -INFINITY ? 0 : max;
    vec sum = vec_all(0);
    int64_t j = 0;
    for (; j + LANES <= visible; j += LANES)
        sum += vec_exp(vec_load(s + j) * scale - shift);
    if (j < visible) {
        const vec p = vec_exp(vec_load(s + j) * scale - shift);
        sum += (vec)(lanes_below(visible - j) & (ivec)p);
    }
    if (*row_max != max) *row_sum *= real_exp(*row_max - shift);
    *row_sum += vec_sum(sum);
    *row_max = max;
}

static void student_pass_of_block(const task *t, const fmsa_cpu_segment *segment, int32_t proxy_head, int32_t block) {
    const fmsa_cpu_list list =
        fmsa_cpu_rows_of_block(t->call, segment, t->chunk, proxy_head, block, t->memory.positions, t->memory.list);
    if (list.count == 0) return;
    real *max = t->memory.student_max, *sum = t->memory.student_sum;
    for (int64_t i = 0; i < tiles_of_block(t->call, block); i++) {
        key_tile tile = tile_of_block(t->call, segment->first_block, block, i);
        tile.keys = keys_seen(&tile, &list, t->row_begin, t->memory.positions);
        if (tile.keys <= 0) continue;
        load_proxy_keys(t, &tile, proxy_head, false);
        for (int64_t first = 0; first < list.count; first += FMSA_CPU_TILE_TOKENS) {
            const int64_t tokens = smaller(FMSA_CPU_TILE_TOKENS, list.count - first);
            student_scores(t, proxy_head, tile.keys, list.rows + first, tokens);
            for (int64_t j = 0; j < tokens; j++) {
                const int32_t row = list.rows[first + j];
                const int64_t slot = proxy_slot(t, proxy_head, row);
                add_to_log_sum_exp((const real *)t->memory.student + j * key_ld(t),
                                   keys_visible(&tile, t->memory.positions[row - t->row_begin]),
                                   (real)t->call->problem->config.proxy_scale, max + slot, sum + slot);
            }
        }
    }
}

/* Turns the sum of the main probabilities w of a row and its student scores s into the row's share of the loss, which
 * is returned, and dS_proxy, in s. */
static double proxy_row(const real *w_sum, real *s, int64_t visible, int64_t padded, real mean_factor, real scale,
                        real lse) {
    vec loss = vec_all(0);
    for (int64_t j = 0; j < padded; j += LANES) {
        const ivec mask = lanes_below(visible - j);
        const vec w = vec_load(w_sum + j) * mean_factor;
        const vec log_r = vec_load(s + j) * scale - lse;
        const vec term = w * (vec_log(w) - log_r);
        loss += (vec)(mask & (w > 0) & (ivec)term);
        vec_store(s + j, (vec)(mask & (ivec)(vec_exp(log_r) - w)));
    }
    return vec_sum(loss);
}

/* The loss and the proxy gradients of `tokens` tokens of a list, whose teacher rows are complete. */
static void proxy_tokens(task *t, int32_t proxy_head, int64_t keys, const int32_t *rows, int64_t tokens) {
    const fmsa_problem *problem = t->call->problem;
    const fmsa_cpu_backward_scratch *m = &t->memory;
    const int64_t dim = problem->config.proxy_head_dim, ld = proxy_ld(t), ld_keys = key_ld(t);
    const real mean_factor = (real)1 / (real)problem->heads_per_proxy_head;
    student_scores(t, proxy_head, keys, rows, tokens);
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t slot = proxy_slot(t, proxy_head, rows[i]);
        const int64_t visible = keys_visible(&t->tile, m->positions[rows[i] - t->row_begin]);
        const real lse = ((real *)m->student_max)[slot] + real_log(((real *)m->student_sum)[slot]);
        t->kl += proxy_row((real *)m->teacher + i * ld_keys, (real *)m->student + i * ld_keys, visible,
                           fmsa_cpu_padded(keys), mean_factor, (real)problem->config.proxy_scale, lse);
    }
    if (t->wants_dk_proxy) gemm_transposed_add(keys, dim, tokens, m->student, ld_keys, m->q_proxy, ld, m->dk_proxy, ld);
    if (!t->wants_dq_proxy) return;
    gemm(tokens, dim, keys, m->student, ld_keys, m->k_proxy, ld, m->product, ld);
    for (int64_t i = 0; i < tokens; i++) {
        add_row((real *)m->product + i * ld, dim, (real *)m->dq_proxy + proxy_slot(t, proxy_head, rows[i]) * ld);
    }
}

static void unload_proxy(const task *t, int32_t proxy_head) {
    const fmsa_config *c = &t->call->problem->config;
    const int64_t dim = c->proxy_head_dim, stride = c->num_proxy_heads * dim;
    if (!t->wants_dk_proxy) return;
    take_turn(t);
    add_panel(t->memory.dk_proxy, proxy_ld(t), t->tile.keys, dim,
              (real *)t->call->shared.dk_proxy + t->tile.row * stride + proxy_head * dim, stride);
}

/* ---- Tiles, blocks, tasks. ---- */

/* Everything that one proxy head selects of the tile: its main heads, and the proxy itself. */
static void walk_list(task *t, int32_t proxy_head, const fmsa_cpu_list *list) {
    const fmsa_problem *problem = t->call->problem;
    const int32_t units = problem->units / problem->config.num_proxy_heads;
    const int64_t keys = keys_seen(&t->tile, list, t->row_begin, t->memory.positions);
    if (keys <= 0) return;
    if (t->wants_proxy) load_proxy_keys(t, &t->tile, proxy_head, true);
    for (int64_t first = 0; first < list->count; first += FMSA_CPU_TILE_TOKENS) {
        const int64_t tokens = smaller(FMSA_CPU_TILE_TOKENS, list->count - first);
        if (t->wants_proxy) memset(t->memory.teacher, 0, (size_t)(tokens * key_ld(t)) * sizeof(real));
        for (int32_t u = 0; u < units; u++)
            main_unit(t, proxy_head * units + u, keys, list, first, tokens);
        if (t->wants_proxy) proxy_tokens(t, proxy_head, keys, list->rows + first, tokens);
    }
    if (t->wants_proxy) unload_proxy(t, proxy_head);
}

static fmsa_cpu_list list_of_proxy(const task *t, const fmsa_cpu_segment *segment, int32_t proxy_of_bundle,
                                   int32_t block) {
    return fmsa_cpu_rows_of_block(t->call, segment, t->chunk, t->bundle * t->bundle_proxies + proxy_of_bundle, block,
                                  t->memory.positions, t->memory.list);
}

/* Every tile of a block to which some row of the chunk attends takes its turn, even one with nothing to add: chunks
 * behind this one count on it. */
static void walk_block(task *t, const fmsa_cpu_segment *segment, int32_t block) {
    const int64_t tiles = fmsa_ceil_div(t->call->problem->config.block_size, fmsa_cpu_tile_keys(t->call->problem));
    int64_t rows = 0;
    t->previous = -1;
    for (int32_t p = 0; p < t->bundle_proxies; p++) {
        const fmsa_cpu_list list = list_of_proxy(t, segment, p, block);
        rows += list.count;
        if (list.previous > t->previous) t->previous = list.previous;
    }
    if (rows == 0) return;
    for (int64_t i = 0; i < tiles_of_block(t->call, block); i++) {
        t->tile = tile_of_block(t->call, segment->first_block, block, i);
        t->turn = t->call->shared.turns + (block * tiles + i) * t->call->problem->bundles + t->bundle;
        for (int32_t p = 0; p < t->bundle_proxies; p++) {
            const fmsa_cpu_list list = list_of_proxy(t, segment, p, block);
            walk_list(t, t->bundle * t->bundle_proxies + p, &list);
        }
        unload_kv_head(t);
        pass_turn(t);
    }
}

/* <a, b> summed as gemm sums, so that dP - delta is exactly 0 where one key has all the probability. */
static real row_product(const task *t, const void *a, const void *b) {
    const fmsa_config *c = &t->call->problem->config;
    real *left = t->memory.q, *right = t->memory.dout;
    load_row(c->dtype, a, c->head_dim, 1, left);
    load_row(c->dtype, b, c->head_dim, 1, right);
    real sum = 0;
    for (int64_t d = 0; d < c->head_dim; d++)
        sum += left[d] * right[d];
    return sum;
}

static void begin_rows(const task *t) {
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_tensors *tensors = t->call->tensors;
    const fmsa_cpu_backward_scratch *m = &t->memory;
    const int64_t rows = t->row_end - t->row_begin, first_head = t->bundle * t->bundle_heads;
    const real *lse = tensors->lse.data;
    for (int64_t i = 0; i < rows * t->bundle_heads; i++) {
        const int64_t row = t->row_begin + i / t->bundle_heads, head = first_head + i % t->bundle_heads;
        if (m->positions[row - t->row_begin] < 0) continue;
        ((real *)m->lse)[i] = lse[row * tensors->lse.row_stride + head * tensors->lse.head_stride];
        if (!t->wants_ds) continue;
        ((real *)m->delta)[i] = row_product(t, tensor_row(c->dtype, &tensors->out, row, head),
                                            tensor_row(c->dtype, &tensors->dout, row, head));
    }
    if (t->wants_dq) memset(m->dq, 0, (size_t)(rows * t->bundle_heads * main_ld(t)) * sizeof(real));
    if (!t->wants_proxy) return;
    const int64_t slots = rows * t->bundle_proxies;
    for (int64_t i = 0; i < slots; i++)
        ((real *)m->student_max)[i] = -INFINITY;
    memset(m->student_sum, 0, (size_t)slots * sizeof(real));
    if (t->wants_dq_proxy) memset(m->dq_proxy, 0, (size_t)(slots * proxy_ld(t)) * sizeof(real));
}

/* g * proxy_scale / N: applied after accumulation and before rounding, since a 16-bit type could not hold the small
 * numbers that it makes. */
static real proxy_gradient_factor(const fmsa_cpu_call *call) {
    const fmsa_config *c = &call->problem->config;
    const double grad_kl = call->tensors->grad_kl == NULL ? 1 : *(const real *)call->tensors->grad_kl;
    return (real)(grad_kl * c->proxy_scale / (double)c->kl_count);
}

static void write_rows(const task *t) {
    const fmsa_config *c = &t->call->problem->config;
    const fmsa_tensors *tensors = t->call->tensors;
    for (int64_t row = t->row_begin; row < t->row_end; row++) {
        for (int32_t h = 0; t->wants_dq && h < t->bundle_heads; h++) {
            const int64_t slot = (row - t->row_begin) * t->bundle_heads + h;
            store_row(c->dtype, (real *)t->memory.dq + slot * main_ld(t), c->head_dim, (real)c->softmax_scale,
                      tensor_row_out(c->dtype, &tensors->dq, row, t->bundle * t->bundle_heads + h));
        }
        for (int32_t p = 0; t->wants_dq_proxy && p < t->bundle_proxies; p++) {
            const int32_t head = t->bundle * t->bundle_proxies + p;
            store_row(c->dtype, (real *)t->memory.dq_proxy + proxy_slot(t, head, row) * proxy_ld(t), c->proxy_head_dim,
                      proxy_gradient_factor(t->call), tensor_row_out(c->dtype, &tensors->dq_proxy, row, head));
        }
    }
}

static void student_pass(const task *t) {
    const fmsa_problem *problem = t->call->problem;
    fmsa_cpu_segment segment = {.fragment_end = fmsa_cpu_find_fragment(problem, t->row_begin)};
    while (fmsa_cpu_next_segment(problem, &t->call->shared.geometry, t->row_begin, t->row_end, &segment)) {
        for (int32_t b = 0; b < segment.num_blocks; b++) {
            for (int32_t p = 0; p < t->bundle_proxies; p++) {
                student_pass_of_block(t, &segment, t->bundle * t->bundle_proxies + p, segment.first_block + b);
            }
        }
    }
}

static void run_task(task *t) {
    const fmsa_problem *problem = t->call->problem;
    fmsa_cpu_positions(problem, t->row_begin, t->row_end, t->memory.positions);
    begin_rows(t);
    if (t->wants_proxy) student_pass(t);
    fmsa_cpu_segment segment = {.fragment_end = fmsa_cpu_find_fragment(problem, t->row_begin)};
    while (fmsa_cpu_next_segment(problem, &t->call->shared.geometry, t->row_begin, t->row_end, &segment)) {
        for (int32_t b = 0; b < segment.num_blocks; b++)
            walk_block(t, &segment, segment.first_block + b);
    }
    write_rows(t);
}

/* ---- Before and after the tasks. ---- */

/* Where dk or dv is accumulated: in the output when it is `real`, otherwise in shared memory. */
static fmsa_tensor accumulator(const fmsa_cpu_call *call, const fmsa_tensor *output, void *shared) {
    const fmsa_config *c = &call->problem->config;
    if (shared == NULL) return *output;
    return (fmsa_tensor){shared, (int64_t)c->num_kv_heads * c->head_dim, c->head_dim};
}

static void clear_row(const fmsa_tensor *t, int64_t row, int64_t heads, int64_t dim) {
    real *data = (real *)t->data + row * t->row_stride;
    for (int64_t h = 0; h < heads; h++)
        memset(data + h * t->head_stride, 0, (size_t)dim * sizeof(real));
}

static void clear_accumulators(const task *t) {
    const fmsa_problem *problem = t->call->problem;
    const fmsa_config *c = &problem->config;
    const int64_t tiles = fmsa_ceil_div(c->block_size, fmsa_cpu_tile_keys(problem));
    const int64_t proxy_columns = (int64_t)c->num_proxy_heads * c->proxy_head_dim;
    memset(t->call->shared.turns, 0, (size_t)(problem->max_key_blocks * tiles * problem->bundles) * sizeof(int32_t));
#pragma omp parallel for num_threads(t->call->plan.threads) schedule(static)
    for (int64_t row = 0; row < c->total_k; row++) {
        if (t->wants_dk) clear_row(&t->dk, row, c->num_kv_heads, c->head_dim);
        if (t->wants_dv) clear_row(&t->dv, row, c->num_kv_heads, c->head_dim);
        if (t->wants_dk_proxy) {
            memset((real *)t->call->shared.dk_proxy + row * proxy_columns, 0, (size_t)proxy_columns * sizeof(real));
        }
    }
}

static fmsa_dtype type_of_kv_gradients(const fmsa_config *c) {
    return c->flags & FMSA_FLAG_FP32_KV_GRADS ? FMSA_DTYPE_FP32 : c->dtype;
}

static void write_kv_row(const fmsa_config *c, const fmsa_tensor *sums, const fmsa_tensor *output, int64_t row) {
    const fmsa_dtype dtype = type_of_kv_gradients(c);
    for (int64_t h = 0; h < c->num_kv_heads; h++) {
        store_row(dtype, (const real *)sums->data + row * sums->row_stride + h * sums->head_stride, c->head_dim, 1,
                  tensor_row_out(dtype, output, row, h));
    }
}

/* Sums the proxy heads that share a proxy key head, in ascending order, and writes the row. */
static void write_proxy_row(const fmsa_cpu_call *call, int64_t row) {
    const fmsa_config *c = &call->problem->config;
    const fmsa_dtype dtype = type_of_kv_gradients(c);
    const int64_t group = c->num_proxy_heads / c->num_proxy_kv_heads, dim = c->proxy_head_dim;
    for (int64_t head = 0; head < c->num_proxy_kv_heads; head++) {
        real *sum = (real *)call->shared.dk_proxy + (row * c->num_proxy_heads + head * group) * dim;
        for (int64_t p = 1; p < group; p++) {
            for (int64_t d = 0; d < dim; d++)
                sum[d] += sum[p * dim + d];
        }
        store_row(dtype, sum, dim, proxy_gradient_factor(call),
                  tensor_row_out(dtype, &call->tensors->dk_proxy, row, head));
    }
}

static void write_key_gradients(const task *t) {
    const fmsa_cpu_call *call = t->call;
    const fmsa_config *c = &call->problem->config;
#pragma omp parallel for num_threads(call->plan.threads) schedule(static)
    for (int64_t row = 0; row < c->total_k; row++) {
        if (t->wants_dk && call->shared.dk != NULL) write_kv_row(c, &t->dk, &call->tensors->dk, row);
        if (t->wants_dv && call->shared.dv != NULL) write_kv_row(c, &t->dv, &call->tensors->dv, row);
        if (t->wants_dk_proxy) write_proxy_row(call, row);
    }
}

static void write_kl(const fmsa_cpu_call *call) {
    double sum = 0;
    for (int64_t i = 0; i < call->plan.num_tasks; i++)
        sum += call->shared.kl_of_tasks[i];
    const int64_t count = call->problem->config.kl_count;
    *(real *)call->tensors->kl = (real)(count > 0 ? sum / (double)count : 0);
}

static task make_task(const fmsa_cpu_call *call) {
    const fmsa_problem *problem = call->problem;
    const fmsa_tensors *tensors = call->tensors;
    task t = {.call = call, .kv_head = -1};
    t.wants_dq = tensors->dq.data != NULL;
    t.wants_dk = tensors->dk.data != NULL;
    t.wants_dv = tensors->dv.data != NULL;
    t.wants_ds = t.wants_dq || t.wants_dk;
    t.wants_dq_proxy = tensors->dq_proxy.data != NULL;
    t.wants_dk_proxy = tensors->dk_proxy.data != NULL;
    t.wants_proxy = t.wants_dq_proxy || t.wants_dk_proxy || tensors->kl != NULL;
    t.dk = accumulator(call, &tensors->dk, call->shared.dk);
    t.dv = accumulator(call, &tensors->dv, call->shared.dv);
    t.bundle_heads = problem->config.num_heads / problem->bundles;
    t.bundle_proxies = problem->config.num_proxy_heads / problem->bundles;
    return t;
}

void FMSA_CPU_NAME(backward)(const fmsa_cpu_call *call) {
    const task prototype = make_task(call);
    const int32_t bundles = call->problem->bundles;
    int64_t next_task = 0;
    clear_accumulators(&prototype);
#pragma omp parallel num_threads(call->plan.threads)
    {
        task t = prototype;
        fmsa_cpu_arena arena = fmsa_cpu_thread_arena(call, fmsa_cpu_this_thread());
        t.memory = fmsa_cpu_take_backward_scratch(call->problem, call->operation, call->plan.chunk_rows, &arena);
        for (;;) {
            const int64_t i = __atomic_fetch_add(&next_task, 1, __ATOMIC_RELAXED);
            if (i >= call->plan.num_tasks) break;
            t.chunk = i / bundles;
            t.bundle = (int32_t)(i % bundles);
            t.row_begin = fmsa_cpu_chunk_begin(call, t.chunk);
            t.row_end = fmsa_cpu_chunk_end(call, t.chunk);
            t.kl = 0;
            run_task(&t);
            if (t.wants_proxy) call->shared.kl_of_tasks[i] = t.kl;
        }
    }
    write_key_gradients(&prototype);
    if (call->tensors->kl != NULL) write_kl(call);
}
