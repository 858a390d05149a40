#include "reference.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "numbers.h"

typedef struct {
    const fmsa_config *config;
    const fmsa_reference_inputs *in;
    fmsa_reference_outputs *results;
    fmsa_dtype precision;
    fmsa_dtype kv_grad_precision;
    double softmax_scale;
    double proxy_scale;
    double proxy_grad_scale;  /* g * proxy_scale / N */
    int64_t *row_fragment;    /* [Tq]; -1: in no fragment */
    int64_t longest_fragment; /* keys */
} evaluation;

void *fmsa_zeros(size_t count, size_t size) {
    void *memory = calloc(count > 0 ? count : 1, size);
    if (memory == NULL) {
        fprintf(stderr, "out of memory: %zu elements of %zu bytes\n", count, size);
        exit(1);
    }
    return memory;
}

/* ---- Arithmetic in the evaluation's precision: fp64, or fp32 for every narrower one. ---- */

static double narrow(const evaluation *e, double x) {
    return e->precision == FMSA_DTYPE_FP64 ? x : (float)x;
}

static double dot(const evaluation *e, const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum = narrow(e, sum + narrow(e, a[i] * b[i]));
    return sum;
}

/* y += factor * x */
static void add_scaled(const evaluation *e, double *y, double factor, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        y[i] = narrow(e, y[i] + narrow(e, factor * x[i]));
}

/* Multiplies by factor and rounds to the type of an output. */
static void finish(const evaluation *e, double *x, int64_t n, double factor, fmsa_dtype dtype) {
    for (int64_t i = 0; i < n; i++)
        x[i] = fmsa_round(narrow(e, x[i] * factor), dtype);
}

/* ---- Which keys a row sees, and which it attends to. ---- */

/* Keys that a row sees are k_begin ... k_begin + count - 1 of its fragment. */
static int64_t visible_keys(const fmsa_config *c, int64_t fragment, int64_t row) {
    const int64_t keys = (int64_t)c->k_end[fragment] - c->k_begin[fragment];
    const int64_t queries = (int64_t)c->q_end[fragment] - c->q_begin[fragment];
    return keys - queries + (row - c->q_begin[fragment]) + 1;
}

static int64_t find_fragment(const fmsa_config *c, int64_t row) {
    for (int64_t f = 0; f < c->num_fragments; f++) {
        if (row >= c->q_begin[f] && row < c->q_end[f]) return f;
    }
    return -1;
}

/* The rows of k that (row, proxy head) attends to: how many, and which in `keys`. */
static int64_t support(const evaluation *e, int64_t row, int64_t proxy_head, int64_t *keys) {
    const fmsa_config *c = e->config;
    const int64_t fragment = e->row_fragment[row];
    if (fragment < 0) return 0;
    const int64_t visible = visible_keys(c, fragment, row), first = c->k_begin[fragment];
    int64_t count = 0;
    if (c->mode == FMSA_MODE_DENSE) {
        for (int64_t j = 0; j < visible; j++)
            keys[count++] = first + j;
        return count;
    }
    const int32_t *blocks = e->in->block_indices + (proxy_head * c->total_q + row) * c->top_k;
    for (int64_t i = 0; i < c->top_k; i++) {
        bool repeated = false;
        for (int64_t other = 0; other < i; other++)
            repeated |= blocks[other] == blocks[i];
        if (blocks[i] < 0 || repeated) continue;
        const int64_t block_begin = (int64_t)blocks[i] * c->block_size;
        for (int64_t j = block_begin; j < block_begin + c->block_size && j < visible; j++)
            keys[count++] = first + j;
    }
    return count;
}

/* ---- Probabilities over a support set. ---- */

/* a[i] = softmax of scale * <query, key i>; returns the log of the sum of exp. */
static double probabilities(const evaluation *e, const double *query, const double *key_rows, int64_t key_stride,
                            int64_t dim, double scale, const int64_t *keys, int64_t count, double *a) {
    double greatest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; i++) {
        a[i] = narrow(e, scale * dot(e, query, key_rows + keys[i] * key_stride, dim));
        if (a[i] > greatest) greatest = a[i];
    }
    for (int64_t i = 0; i < count; i++) {
        a[i] = narrow(e, exp(narrow(e, a[i] - greatest)));
        sum = narrow(e, sum + a[i]);
    }
    for (int64_t i = 0; i < count; i++)
        a[i] = narrow(e, a[i] / sum);
    return count > 0 ? narrow(e, greatest + log(sum)) : -INFINITY;
}

static double main_probabilities(const evaluation *e, int64_t row, int64_t head, const int64_t *keys, int64_t count,
                                 double *a) {
    const fmsa_config *c = e->config;
    const int64_t dim = c->head_dim, kv_head = head / (c->num_heads / c->num_kv_heads);
    return probabilities(e, e->in->q + (row * c->num_heads + head) * dim, e->in->k + kv_head * dim,
                         c->num_kv_heads * dim, dim, e->softmax_scale, keys, count, a);
}

/* ---- The main attention of one (row, head): out, lse, and what the row adds to dq, dk, dv. ---- */

typedef struct {
    int64_t *keys;
    double *a, *student, *teacher;
} row_memory;

static void main_row(const evaluation *e, int64_t row, int64_t head, row_memory *m) {
    const fmsa_config *c = e->config;
    const int64_t dim = c->head_dim, stride = c->num_kv_heads * dim;
    const int64_t kv_offset = head / (c->num_heads / c->num_kv_heads) * dim;
    const int64_t q_offset = (row * c->num_heads + head) * dim;
    const int64_t count = support(e, row, head / (c->num_heads / c->num_proxy_heads), m->keys);
    double *out = e->results->out + q_offset, *dq = e->results->dq + q_offset;

    e->results->lse[head * c->total_q + row] = main_probabilities(e, row, head, m->keys, count, m->a);
    for (int64_t i = 0; i < count; i++) {
        add_scaled(e, out, fmsa_round(m->a[i], e->precision), e->in->v + m->keys[i] * stride + kv_offset, dim);
    }
    finish(e, out, dim, 1, e->precision);
    if (e->in->dout == NULL) return;

    const double *dout = e->in->dout + q_offset;
    const double delta = dot(e, dout, out, dim);
    for (int64_t i = 0; i < count; i++) {
        const int64_t offset = m->keys[i] * stride + kv_offset;
        const double dp = dot(e, dout, e->in->v + offset, dim);
        const double ds = fmsa_round(m->a[i] * narrow(e, dp - delta), e->precision);
        add_scaled(e, dq, ds, e->in->k + offset, dim);
        add_scaled(e, e->results->dk + offset, ds, e->in->q + q_offset, dim);
        add_scaled(e, e->results->dv + offset, fmsa_round(m->a[i], e->precision), dout, dim);
    }
    finish(e, dq, dim, e->softmax_scale, e->precision);
}

/* ---- The proxy loss of one (row, proxy head): its divergence, and what it adds to dq_proxy, dk_proxy. ---- */

static double proxy_row(const evaluation *e, int64_t row, int64_t proxy_head, row_memory *m) {
    const fmsa_config *c = e->config;
    const int64_t dim = c->proxy_head_dim, stride = c->num_proxy_kv_heads * dim;
    const int64_t k_offset = proxy_head / (c->num_proxy_heads / c->num_proxy_kv_heads) * dim;
    const int64_t q_offset = (row * c->num_proxy_heads + proxy_head) * dim;
    const int64_t taught = c->num_heads / c->num_proxy_heads;
    const double *q_proxy = e->in->q_proxy + q_offset, *k_proxy = e->in->k_proxy + k_offset;
    const int64_t count = support(e, row, proxy_head, m->keys);

    for (int64_t i = 0; i < count; i++)
        m->teacher[i] = 0;
    for (int64_t head = proxy_head * taught; head < (proxy_head + 1) * taught; head++) {
        main_probabilities(e, row, head, m->keys, count, m->a);
        for (int64_t i = 0; i < count; i++)
            m->teacher[i] = narrow(e, m->teacher[i] + m->a[i] / (double)taught);
    }
    const double lse = probabilities(e, q_proxy, k_proxy, stride, dim, e->proxy_scale, m->keys, count, m->student);
    e->results->proxy_lse[proxy_head * c->total_q + row] = lse;

    double divergence = 0;
    double *dq_proxy = e->results->dq_proxy + q_offset;
    for (int64_t i = 0; i < count; i++) {
        const double w = m->teacher[i];
        const double log_r =
            narrow(e, narrow(e, e->proxy_scale * dot(e, q_proxy, k_proxy + m->keys[i] * stride, dim)) - lse);
        if (w > 0) divergence = narrow(e, divergence + narrow(e, w * narrow(e, log(w) - log_r)));
        const double ds = fmsa_round(narrow(e, m->student[i] - w), e->precision);
        add_scaled(e, dq_proxy, ds, k_proxy + m->keys[i] * stride, dim);
        add_scaled(e, e->results->dk_proxy + m->keys[i] * stride + k_offset, ds, q_proxy, dim);
    }
    finish(e, dq_proxy, dim, e->proxy_grad_scale, e->precision);
    return divergence;
}

/* ---- All rows. Heads that add to one key head belong to one thread, so sums have one order. ---- */

/* Starting threads costs more than a few rows do. */
enum { LEAST_PARALLEL_ROWS = 100 };

static row_memory open_row_memory(const evaluation *e) {
    const size_t n = (size_t)e->longest_fragment;
    return (row_memory){fmsa_zeros(n, sizeof(int64_t)), fmsa_zeros(n, sizeof(double)), fmsa_zeros(n, sizeof(double)),
                        fmsa_zeros(n, sizeof(double))};
}

static void close_row_memory(row_memory *m) {
    free(m->keys);
    free(m->a);
    free(m->student);
    free(m->teacher);
}

static void evaluate_main(const evaluation *e) {
    const fmsa_config *c = e->config;
    const int32_t sharing = c->num_heads / c->num_kv_heads;
#pragma omp parallel for if (c->total_q >= LEAST_PARALLEL_ROWS)
    for (int32_t kv_head = 0; kv_head < c->num_kv_heads; kv_head++) {
        row_memory memory = open_row_memory(e);
        for (int64_t row = 0; row < c->total_q; row++) {
            for (int32_t i = 0; i < sharing; i++)
                main_row(e, row, kv_head * sharing + i, &memory);
        }
        close_row_memory(&memory);
    }
    const int64_t n = c->total_k * c->num_kv_heads * c->head_dim;
    finish(e, e->results->dk, n, e->softmax_scale, e->kv_grad_precision);
    finish(e, e->results->dv, n, 1, e->kv_grad_precision);
}

static void evaluate_proxy(const evaluation *e) {
    const fmsa_config *c = e->config;
    const int32_t sharing = c->num_proxy_heads / c->num_proxy_kv_heads;
    double *divergence = fmsa_zeros((size_t)c->num_proxy_kv_heads, sizeof *divergence);
#pragma omp parallel for if (c->total_q >= LEAST_PARALLEL_ROWS)
    for (int32_t kv_head = 0; kv_head < c->num_proxy_kv_heads; kv_head++) {
        row_memory memory = open_row_memory(e);
        for (int64_t row = 0; row < c->total_q; row++) {
            for (int32_t i = 0; i < sharing; i++) {
                divergence[kv_head] += proxy_row(e, row, kv_head * sharing + i, &memory);
            }
        }
        close_row_memory(&memory);
    }
    for (int32_t i = 0; i < c->num_proxy_kv_heads; i++)
        e->results->kl += divergence[i];
    free(divergence);
    finish(e, e->results->dk_proxy, c->total_k * c->num_proxy_kv_heads * c->proxy_head_dim, e->proxy_grad_scale,
           e->kv_grad_precision);
}

static double kl_divisor(const fmsa_config *c) {
    return c->kl_count > 0 ? (double)c->kl_count : (double)c->total_q * c->num_proxy_heads;
}

static double scale_or_default(double scale, int32_t dim) {
    return scale > 0 ? scale : 1 / sqrt(dim);
}

static int64_t longest_fragment(const fmsa_config *c) {
    int64_t longest = 0;
    for (int64_t f = 0; f < c->num_fragments; f++) {
        if (c->k_end[f] - c->k_begin[f] > longest) longest = c->k_end[f] - c->k_begin[f];
    }
    return longest;
}

void fmsa_reference_evaluate(const fmsa_config *config, const fmsa_reference_inputs *inputs, fmsa_dtype precision,
                             fmsa_reference_outputs *outputs) {
    evaluation e = {.config = config, .in = inputs, .results = outputs, .precision = precision};
    e.kv_grad_precision = config->flags & FMSA_FLAG_FP32_KV_GRADS ? FMSA_DTYPE_FP32 : precision;
    e.softmax_scale = scale_or_default(config->softmax_scale, config->head_dim);
    e.proxy_scale = scale_or_default(config->proxy_scale, config->proxy_head_dim);
    e.longest_fragment = longest_fragment(config);
    e.row_fragment = fmsa_zeros((size_t)config->total_q, sizeof *e.row_fragment);
    for (int64_t row = 0; row < config->total_q; row++)
        e.row_fragment[row] = -1;
    for (int64_t f = 0; f < config->num_fragments; f++) {
        for (int64_t row = config->q_begin[f]; row < config->q_end[f]; row++)
            e.row_fragment[row] = f;
    }
    outputs->kl = 0;
    if (config->total_q > 0) {
        e.proxy_grad_scale = inputs->grad_kl * e.proxy_scale / kl_divisor(config);
        evaluate_main(&e);
        evaluate_proxy(&e);
        outputs->kl = narrow(&e, outputs->kl / kl_divisor(config));
    }
    free(e.row_fragment);
}

/* ---- Selection. ---- */

/* The local and the init blocks, the newest first, as far as there are slots. */
static void mark_forced(const fmsa_config *c, int64_t blocks, unsigned char *forced) {
    int64_t slots = c->top_k;
    for (int64_t b = blocks - 1; b >= 0; b--) {
        forced[b] = slots > 0 && (b >= blocks - c->local_blocks || b < c->init_blocks);
        slots -= forced[b];
    }
}

int64_t fmsa_reference_row_blocks(const fmsa_config *config, const double *q_proxy, const double *k_proxy, int64_t row,
                                  int32_t proxy_head, double *maxima, unsigned char *forced) {
    const int64_t fragment = find_fragment(config, row);
    if (fragment < 0) return 0;
    const evaluation exact = {.precision = FMSA_DTYPE_FP64};
    const double scale = scale_or_default(config->proxy_scale, config->proxy_head_dim);
    const int64_t dim = config->proxy_head_dim, visible = visible_keys(config, fragment, row);
    const int64_t kv_head = proxy_head / (config->num_proxy_heads / config->num_proxy_kv_heads);
    const double *query = q_proxy + (row * config->num_proxy_heads + proxy_head) * dim;
    int64_t blocks = 0;
    for (int64_t j = 0; j < visible; j++) {
        const int64_t key_row = config->k_begin[fragment] + j;
        const double *key = k_proxy + (key_row * config->num_proxy_kv_heads + kv_head) * dim;
        const double score = scale * dot(&exact, query, key, dim);
        const int64_t block = j / config->block_size;
        if (block == blocks) maxima[blocks++] = score;
        if (isnan(maxima[block]) || score > maxima[block]) maxima[block] = score;
    }
    mark_forced(config, blocks, forced);
    return blocks;
}

/* NaN ranks below every number; equal numbers, -0 and +0 among them, rank alike. */
static bool ranks_above(double a, double b) {
    if (isnan(a)) return false;
    return isnan(b) || a > b;
}

/* Marks the min(k, blocks) chosen blocks. */
static void choose(int64_t top_k, int64_t blocks, const double *maxima, const unsigned char *forced, bool *chosen) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; b++) {
        chosen[b] = forced[b];
        count += chosen[b];
    }
    for (; count < top_k && count < blocks; count++) {
        int64_t best = -1;
        for (int64_t b = 0; b < blocks; b++) {
            if (!chosen[b] && (best < 0 || ranks_above(maxima[b], maxima[best]))) best = b;
        }
        chosen[best] = true;
    }
}

void fmsa_reference_select(const fmsa_config *config, const double *q_proxy, const double *k_proxy,
                           int32_t *block_indices) {
    const size_t room = (size_t)longest_fragment(config);
    double *maxima = fmsa_zeros(room, sizeof *maxima);
    unsigned char *forced = fmsa_zeros(room, sizeof *forced);
    bool *chosen = fmsa_zeros(room, sizeof *chosen);
    for (int32_t p = 0; p < config->num_proxy_heads; p++) {
        for (int64_t row = 0; row < config->total_q; row++) {
            int32_t *indices = block_indices + (p * config->total_q + row) * config->top_k;
            const int64_t blocks = fmsa_reference_row_blocks(config, q_proxy, k_proxy, row, p, maxima, forced);
            choose(config->top_k, blocks, maxima, forced, chosen);
            int64_t count = 0;
            for (int64_t b = 0; b < blocks; b++) {
                if (chosen[b]) indices[count++] = (int32_t)b;
            }
            while (count < config->top_k)
                indices[count++] = -1;
        }
    }
    free(maxima);
    free(forced);
    free(chosen);
}

/* ---- Memory of the outputs. ---- */

void fmsa_reference_outputs_open(fmsa_reference_outputs *outputs, const fmsa_config *config) {
    const size_t rows = (size_t)config->total_q, keys = (size_t)config->total_k;
    const size_t q = rows * (size_t)config->num_heads * (size_t)config->head_dim;
    const size_t kv = keys * (size_t)config->num_kv_heads * (size_t)config->head_dim;
    const size_t q_proxy = rows * (size_t)config->num_proxy_heads * (size_t)config->proxy_head_dim;
    const size_t k_proxy = keys * (size_t)config->num_proxy_kv_heads * (size_t)config->proxy_head_dim;
    *outputs = (fmsa_reference_outputs){.out = fmsa_zeros(q, sizeof(double)),
                                        .lse = fmsa_zeros(rows * (size_t)config->num_heads, sizeof(double)),
                                        .proxy_lse = fmsa_zeros(rows * (size_t)config->num_proxy_heads, sizeof(double)),
                                        .dq = fmsa_zeros(q, sizeof(double)),
                                        .dk = fmsa_zeros(kv, sizeof(double)),
                                        .dv = fmsa_zeros(kv, sizeof(double)),
                                        .dq_proxy = fmsa_zeros(q_proxy, sizeof(double)),
                                        .dk_proxy = fmsa_zeros(k_proxy, sizeof(double))};
}

void fmsa_reference_outputs_close(fmsa_reference_outputs *outputs) {
    free(outputs->out);
    free(outputs->lse);
    free(outputs->proxy_lse);
    free(outputs->dq);
    free(outputs->dk);
    free(outputs->dv);
    free(outputs->dq_proxy);
    free(outputs->dk_proxy);
    *outputs = (fmsa_reference_outputs){0};
}
