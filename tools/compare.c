#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "numbers.h"

const char *fmsa_quantity_name(fmsa_quantity quantity) {
    static const char *const names[] = {"out", "lse", "dq", "dk", "dv", "dq_proxy", "dk_proxy", "kl"};
    return names[quantity];
}

/* ---- The error rule. ---- */

typedef struct {
    const double *result, *same_type, *exact;
    int64_t rows, dim;
} operands;

static double squared_error(const double *values, const double *exact, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        if (values[i] == exact[i]) continue; /* equal infinities among them */
        const double difference = values[i] - exact[i];
        sum += difference * difference;
    }
    return isnan(sum) ? INFINITY : sum;
}

static double squared_length(const double *values, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += isfinite(values[i]) ? values[i] * values[i] : 0;
    return sum;
}

static double excess_of(double error, double allowed) {
    if (error == 0) return 0;
    return isfinite(error) ? error / allowed : INFINITY;
}

/* floor is in units of the lengths; least is a length that every row may be off by, beside that. */
static fmsa_comparison compare_rows(const operands *o, double floor, double least) {
    const int64_t n = o->rows * o->dim;
    const double length = sqrt(squared_length(o->exact, n));
    const double error = sqrt(squared_error(o->result, o->exact, n));
    const double same_error = sqrt(squared_error(o->same_type, o->exact, n));
    const double mean_row = o->rows > 0 ? length / sqrt((double)o->rows) : 0;
    const double mean_same_error = o->rows > 0 ? same_error / sqrt((double)o->rows) : 0;
    double excess = excess_of(error, 2 * same_error + floor * length + least * sqrt((double)o->rows));
    for (int64_t row = 0; row < o->rows; row++) {
        const double *exact = o->exact + row * o->dim;
        const double row_error = sqrt(squared_error(o->result + row * o->dim, exact, o->dim));
        const double same_row_error = sqrt(squared_error(o->same_type + row * o->dim, exact, o->dim));
        const double row_length = sqrt(squared_length(exact, o->dim));
        const double allowed = 2 * same_row_error + 8 * mean_same_error + floor * (row_length + mean_row) + least;
        excess = fmax(excess, excess_of(row_error, allowed));
    }
    const double unit = length > 0 ? length : 1;
    return (fmsa_comparison){error / unit, same_error / unit, excess};
}

static operands operands_of(const fmsa_config *c, const fmsa_reference_outputs *r, const fmsa_reference_outputs *s,
                            const fmsa_reference_outputs *x, fmsa_quantity quantity) {
    const int64_t queries = c->total_q * c->num_heads, keys = c->total_k * c->num_kv_heads;
    switch (quantity) {
    case FMSA_QUANTITY_OUT:
        return (operands){r->out, s->out, x->out, queries, c->head_dim};
    case FMSA_QUANTITY_LSE:
        return (operands){r->lse, s->lse, x->lse, queries, 1};
    case FMSA_QUANTITY_DQ:
        return (operands){r->dq, s->dq, x->dq, queries, c->head_dim};
    case FMSA_QUANTITY_DK:
        return (operands){r->dk, s->dk, x->dk, keys, c->head_dim};
    case FMSA_QUANTITY_DV:
        return (operands){r->dv, s->dv, x->dv, keys, c->head_dim};
    case FMSA_QUANTITY_DQ_PROXY:
        return (operands){r->dq_proxy, s->dq_proxy, x->dq_proxy, c->total_q * c->num_proxy_heads, c->proxy_head_dim};
    case FMSA_QUANTITY_DK_PROXY:
        return (operands){r->dk_proxy, s->dk_proxy, x->dk_proxy, c->total_k * c->num_proxy_kv_heads, c->proxy_head_dim};
    case FMSA_QUANTITY_KL:
    case FMSA_QUANTITY_COUNT:
        break;
    }
    return (operands){&r->kl, &s->kl, &x->kl, 1, 1};
}

static double greatest_finite(const double *values, int64_t count) {
    double greatest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(values[i])) greatest = fmax(greatest, fabs(values[i]));
    }
    return greatest;
}

static double mean_row_length(const double *values, int64_t rows, int64_t dim) {
    return rows > 0 ? sqrt(squared_length(values, rows * dim) / (double)rows) : 0;
}

/* The length of the terms whose difference is the quantity, for a typical row: dS is made of dP and delta, dS_proxy of
 * two probabilities, a divergence of two logarithms. The terms can cancel to nothing, their roundings do not. */
static double cancelling_length(const fmsa_case *c, fmsa_quantity quantity) {
    const fmsa_config *g = &c->config;
    const double q_rows = (double)g->total_q * g->num_proxy_heads;
    const double divisor = g->kl_count > 0 ? (double)g->kl_count : fmax(q_rows, 1);
    const double main_scale = g->softmax_scale > 0 ? g->softmax_scale : 1 / sqrt((double)g->head_dim);
    const double proxy_scale = g->proxy_scale > 0 ? g->proxy_scale : 1 / sqrt((double)g->proxy_head_dim);
    const double dp = mean_row_length(c->dout, g->total_q * g->num_heads, g->head_dim) *
                      mean_row_length(c->v, g->total_k * g->num_kv_heads, g->head_dim);
    const double factor = fabs(c->grad_kl) * proxy_scale / divisor;
    switch (quantity) {
    case FMSA_QUANTITY_DQ:
        return main_scale * dp * mean_row_length(c->k, g->total_k * g->num_kv_heads, g->head_dim);
    case FMSA_QUANTITY_DK:
        return main_scale * dp * mean_row_length(c->q, g->total_q * g->num_heads, g->head_dim);
    case FMSA_QUANTITY_DQ_PROXY:
        return factor * mean_row_length(c->k_proxy, g->total_k * g->num_proxy_kv_heads, g->proxy_head_dim);
    case FMSA_QUANTITY_DK_PROXY:
        return factor * mean_row_length(c->q_proxy, g->total_q * g->num_proxy_heads, g->proxy_head_dim);
    case FMSA_QUANTITY_KL:
        return q_rows / divisor;
    case FMSA_QUANTITY_OUT:
    case FMSA_QUANTITY_LSE:
    case FMSA_QUANTITY_DV:
    case FMSA_QUANTITY_COUNT:
        break;
    }
    return 0;
}

/* A backend may make the teacher of probabilities that are rounded to 16 bits, as they enter its products, and keep it
 * in 16 bits. Each rounding shifts a row's divergence by up to u (1 + its value), and each row's by itself. */
static double teacher_rounding(const fmsa_case *c, double kl) {
    const fmsa_config *g = &c->config;
    if (g->dtype != FMSA_DTYPE_BF16 && g->dtype != FMSA_DTYPE_FP16) return 0;
    const double q_rows = fmax((double)g->total_q * g->num_proxy_heads, 1);
    const double divisor = g->kl_count > 0 ? (double)g->kl_count : q_rows;
    return 2 * fmsa_unit_roundoff(g->dtype) * (sqrt(q_rows) / divisor + fabs(kl) / sqrt(q_rows));
}

void fmsa_compare(const fmsa_case *c, const fmsa_reference_outputs *result, const fmsa_reference_outputs *same_type,
                  const fmsa_reference_outputs *exact, fmsa_comparison comparisons[FMSA_QUANTITY_COUNT]) {
    const fmsa_config *g = &c->config;
    const double u = fmsa_unit_roundoff(g->dtype);
    const double w = g->dtype == FMSA_DTYPE_FP64 ? u : fmsa_unit_roundoff(FMSA_DTYPE_FP32);
    const double greatest_lse = fmax(greatest_finite(exact->lse, g->total_q * g->num_heads),
                                     greatest_finite(exact->proxy_lse, g->total_q * g->num_proxy_heads));
    const double softmax_floor = 8 * (1 + greatest_lse) * w;
    for (int i = 0; i < FMSA_QUANTITY_COUNT; i++) {
        const fmsa_quantity quantity = (fmsa_quantity)i;
        const operands o = operands_of(g, result, same_type, exact, quantity);
        const bool narrow = quantity != FMSA_QUANTITY_LSE && quantity != FMSA_QUANTITY_KL;
        double least = softmax_floor * cancelling_length(c, quantity);
        if (quantity == FMSA_QUANTITY_KL) least += teacher_rounding(c, exact->kl);
        comparisons[i] = compare_rows(&o, 4 * (narrow ? u : w) + softmax_floor, least);
    }
}

/* ---- Selections. ---- */

/* How far a score of this row can be off in the type the backend computes it in: a bound for any order of summation. */
static double score_tolerance(const fmsa_case *c, int64_t row, int32_t proxy_head) {
    const fmsa_config *g = &c->config;
    const int64_t dim = g->proxy_head_dim;
    const double scale = g->proxy_scale > 0 ? g->proxy_scale : 1 / sqrt((double)dim);
    const double u = fmsa_unit_roundoff(g->dtype == FMSA_DTYPE_FP64 ? FMSA_DTYPE_FP64 : FMSA_DTYPE_FP32);
    const int32_t kv_head = proxy_head / (g->num_proxy_heads / g->num_proxy_kv_heads);
    double longest = 0;
    for (int64_t j = 0; j < g->total_k; j++) {
        longest = fmax(longest, squared_length(c->k_proxy + (j * g->num_proxy_kv_heads + kv_head) * dim, dim));
    }
    const double query = squared_length(c->q_proxy + (row * g->num_proxy_heads + proxy_head) * dim, dim);
    return 2 * (double)(dim + 2) * u * scale * sqrt(query * longest);
}

typedef struct {
    double *maxima;
    unsigned char *forced, *chosen;
} block_memory;

static const char *check_order(const int32_t *indices, int64_t top_k, int64_t expected, int64_t blocks,
                               unsigned char *chosen) {
    for (int64_t b = 0; b < blocks; b++)
        chosen[b] = 0;
    for (int64_t i = 0; i < top_k; i++) {
        if (i >= expected) {
            if (indices[i] != -1) return "an entry behind the last block is not -1";
            continue;
        }
        if (indices[i] < 0 || indices[i] >= blocks) return "a block is missing or out of range";
        if (i > 0 && indices[i] <= indices[i - 1]) return "the blocks do not ascend";
        chosen[indices[i]] = 1;
    }
    return NULL;
}

static const char *check_forced(const block_memory *m, int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++) {
        if (m->forced[b] && !m->chosen[b]) return "a forced block is missing";
    }
    return NULL;
}

/* How much greater a block left out is than one chosen; not above 0 when the choice is right. */
static double score_gap(const block_memory *m, int64_t blocks) {
    double least_chosen = INFINITY, greatest_left = -INFINITY;
    for (int64_t b = 0; b < blocks; b++) {
        if (m->chosen[b] && !m->forced[b]) least_chosen = fmin(least_chosen, m->maxima[b]);
        if (!m->chosen[b] && !m->forced[b]) greatest_left = fmax(greatest_left, m->maxima[b]);
    }
    return greatest_left > least_chosen ? greatest_left - least_chosen : 0;
}

static const char *check_row(const fmsa_case *c, const int32_t *block_indices, int64_t row, int32_t proxy_head,
                             const block_memory *m) {
    const fmsa_config *g = &c->config;
    const int32_t *indices = block_indices + (proxy_head * g->total_q + row) * g->top_k;
    const int64_t blocks = fmsa_reference_row_blocks(g, c->q_proxy, c->k_proxy, row, proxy_head, m->maxima, m->forced);
    const int64_t expected = blocks < g->top_k ? blocks : g->top_k;
    const char *wrong = check_order(indices, g->top_k, expected, blocks, m->chosen);
    if (wrong == NULL) wrong = check_forced(m, blocks);
    if (wrong != NULL) return wrong;
    const double gap = score_gap(m, blocks);
    return gap > 0 && gap > score_tolerance(c, row, proxy_head) ? "a block with a greater score was left out" : NULL;
}

bool fmsa_compare_selection(const fmsa_case *c, const int32_t *block_indices, char *complaint, size_t size) {
    const size_t room = (size_t)c->config.total_k + 1;
    const block_memory m = {fmsa_zeros(room, sizeof(double)), fmsa_zeros(room, 1), fmsa_zeros(room, 1)};
    const char *wrong = NULL;
    for (int32_t p = 0; p < c->config.num_proxy_heads && wrong == NULL; p++) {
        for (int64_t row = 0; row < c->config.total_q && wrong == NULL; row++) {
            wrong = check_row(c, block_indices, row, p, &m);
            if (wrong != NULL) {
                snprintf(complaint, size, "block_indices, row %lld, proxy head %d: %s", (long long)row, p, wrong);
            }
        }
    }
    free(m.maxima);
    free(m.forced);
    free(m.chosen);
    return wrong == NULL;
}
