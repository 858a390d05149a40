#include "cases.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "numbers.h"

/* ---- Random numbers. ---- */

uint64_t fmsa_random_bits(fmsa_random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t fmsa_random_int(fmsa_random *random, int64_t least, int64_t most) {
    return least + (int64_t)(fmsa_random_bits(random) % (uint64_t)(most - least + 1));
}

double fmsa_random_uniform(fmsa_random *random) {
    return ((double)(fmsa_random_bits(random) >> 12) + 0.5) * 0x1p-52;
}

double fmsa_random_normal(fmsa_random *random) {
    const double radius = sqrt(-2 * log(fmsa_random_uniform(random)));
    return radius * cos(2 * acos(-1) * fmsa_random_uniform(random));
}

/* ---- Memory. ---- */

static int64_t query_count(const fmsa_config *c) {
    return c->total_q * c->num_heads * c->head_dim;
}

static int64_t key_count(const fmsa_config *c) {
    return c->total_k * c->num_kv_heads * c->head_dim;
}

static int64_t query_proxy_count(const fmsa_config *c) {
    return c->total_q * c->num_proxy_heads * c->proxy_head_dim;
}

static int64_t key_proxy_count(const fmsa_config *c) {
    return c->total_k * c->num_proxy_kv_heads * c->proxy_head_dim;
}

int64_t fmsa_case_index_count(const fmsa_case *c) {
    return c->config.total_q * c->config.num_proxy_heads * c->config.top_k;
}

static double *zero_values(int64_t count) {
    return fmsa_zeros((size_t)count, sizeof(double));
}

void fmsa_case_open(fmsa_case *c, const fmsa_config *config) {
    *c = (fmsa_case){.config = *config, .grad_kl = 1};
    c->config.num_fragments = 0;
    c->config.q_begin = c->config.q_end = c->config.k_begin = c->config.k_end = NULL;
    c->q = zero_values(query_count(config));
    c->dout = zero_values(query_count(config));
    c->k = zero_values(key_count(config));
    c->v = zero_values(key_count(config));
    c->q_proxy = zero_values(query_proxy_count(config));
    c->k_proxy = zero_values(key_proxy_count(config));
}

void fmsa_case_close(fmsa_case *c) {
    free(c->q_begin);
    free(c->q_end);
    free(c->k_begin);
    free(c->k_end);
    free(c->q);
    free(c->k);
    free(c->v);
    free(c->q_proxy);
    free(c->k_proxy);
    free(c->dout);
    free(c->block_indices);
    *c = (fmsa_case){0};
}

static void append(int32_t **array, int64_t count, int64_t value) {
    int32_t *longer = realloc(*array, (size_t)(count + 1) * sizeof *longer);
    if (longer == NULL) {
        fprintf(stderr, "out of memory: %lld fragments\n", (long long)count);
        exit(1);
    }
    longer[count] = (int32_t)value;
    *array = longer;
}

void fmsa_case_add_fragment(fmsa_case *c, int64_t q_begin, int64_t q_end, int64_t k_begin, int64_t k_end) {
    const int64_t count = c->config.num_fragments++;
    append(&c->q_begin, count, q_begin);
    append(&c->q_end, count, q_end);
    append(&c->k_begin, count, k_begin);
    append(&c->k_end, count, k_end);
    c->config.q_begin = c->q_begin;
    c->config.q_end = c->q_end;
    c->config.k_begin = c->k_begin;
    c->config.k_end = c->k_end;
}

/* ---- Values. ---- */

static void fill(double *values, int64_t count, double deviation, fmsa_dtype dtype, fmsa_random *random) {
    for (int64_t i = 0; i < count; i++)
        values[i] = fmsa_round(deviation * fmsa_random_normal(random), dtype);
}

static double score_deviation(double scale, int32_t dim) {
    return scale > 0 ? scale * sqrt(dim) : 1;
}

void fmsa_case_fill(fmsa_case *c, uint64_t seed, double main_deviation, double proxy_deviation) {
    const fmsa_config *config = &c->config;
    const fmsa_dtype dtype = config->dtype;
    const double main_unit = score_deviation(config->softmax_scale, config->head_dim);
    const double proxy_unit = score_deviation(config->proxy_scale, config->proxy_head_dim);
    fmsa_random random = {seed};
    fill(c->q, query_count(config), main_deviation / main_unit, dtype, &random);
    fill(c->k, key_count(config), 1, dtype, &random);
    fill(c->v, key_count(config), 1, dtype, &random);
    fill(c->q_proxy, query_proxy_count(config), proxy_deviation / proxy_unit, dtype, &random);
    fill(c->k_proxy, key_proxy_count(config), 1, dtype, &random);
    fill(c->dout, query_count(config), 1, dtype, &random);
}

fmsa_reference_inputs fmsa_case_inputs(const fmsa_case *c, const int32_t *block_indices) {
    return (fmsa_reference_inputs){.q = c->q,
                                   .k = c->k,
                                   .v = c->v,
                                   .q_proxy = c->q_proxy,
                                   .k_proxy = c->k_proxy,
                                   .dout = c->dout,
                                   .grad_kl = c->grad_kl,
                                   .block_indices = block_indices};
}

/* ---- Random cases. ---- */

static void choose_heads(fmsa_config *config, fmsa_random *random) {
    static const int32_t relations[][4] = {{8, 4, 4, 1}, {8, 2, 4, 1},  {8, 2, 2, 2}, {8, 8, 8, 1}, {6, 1, 1, 1},
                                           {4, 4, 2, 1}, {12, 4, 4, 2}, {1, 1, 1, 1}, {7, 1, 1, 1}, {6, 6, 2, 2},
                                           {8, 1, 2, 1}, {8, 1, 8, 4},  {3, 3, 1, 1}, {16, 1, 1, 1}};
    const int64_t i = fmsa_random_int(random, 0, sizeof relations / sizeof *relations - 1);
    config->num_heads = relations[i][0];
    config->num_kv_heads = relations[i][1];
    config->num_proxy_heads = relations[i][2];
    config->num_proxy_kv_heads = relations[i][3];
}

static int32_t choose(fmsa_random *random, const int32_t *choices, int64_t count) {
    return choices[fmsa_random_int(random, 0, count - 1)];
}

#define CHOOSE(random, ...)                                                                                            \
    choose(random, (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void choose_shape(fmsa_config *config, fmsa_device device, fmsa_random *random) {
    if (device == FMSA_DEVICE_CUDA) {
        config->head_dim = CHOOSE(random, 64, 128);
        config->proxy_head_dim = CHOOSE(random, 64, 128);
        config->block_size = CHOOSE(random, 64, 128);
        config->top_k = CHOOSE(random, 1, 2, 3, 4, 5, 8, 12, 16, 64, 128);
    } else {
        config->head_dim = CHOOSE(random, 1, 3, 8, 16, 17, 32, 48, 64, 80, 100, 128, 256);
        config->proxy_head_dim = CHOOSE(random, 1, 5, 8, 16, 24, 32, 33, 64, 128, 256);
        config->block_size = CHOOSE(random, 16, 17, 24, 32, 64, 100, 128, 200);
        config->top_k = CHOOSE(random, 1, 2, 3, 4, 5, 8, 12, 16, 64, 200);
    }
    config->mode = fmsa_random_int(random, 0, 3) == 0 ? FMSA_MODE_DENSE : FMSA_MODE_SPARSE;
    config->local_blocks = CHOOSE(random, 1, 1, 1, 0, 2, 3);
    config->init_blocks = CHOOSE(random, 0, 0, 0, 1, 2);
    config->flags |= fmsa_random_int(random, 0, 1) ? FMSA_FLAG_DETERMINISTIC : 0;
    if (config->dtype != FMSA_DTYPE_FP64 && fmsa_random_int(random, 0, 3) == 0) {
        config->flags |= FMSA_FLAG_FP32_KV_GRADS;
    }
    if (fmsa_random_int(random, 0, 3) == 0) config->softmax_scale = 0.25 + fmsa_random_uniform(random) / 8;
    if (fmsa_random_int(random, 0, 3) == 0) config->proxy_scale = 0.25 + fmsa_random_uniform(random) / 8;
}

/* Lengths that end just before, at and just after a block are the likely ones. */
static int64_t choose_length(fmsa_random *random, int32_t block_size, int64_t most) {
    const int64_t kind = fmsa_random_int(random, 0, 4);
    int64_t length = fmsa_random_int(random, 0, most);
    if (kind == 0) length = block_size * fmsa_random_int(random, 1, 3) + fmsa_random_int(random, -1, 1);
    if (kind == 1) length = fmsa_random_int(random, 0, 3);
    return length < most ? length : most;
}

/* Chunks of one document of `length` keys from k on: they own some of its rows and skip others. */
static int64_t add_chunks(fmsa_case *c, int64_t q, int64_t k, int64_t length, fmsa_random *random) {
    int64_t position = 0;
    while (position < length) {
        const int64_t end = position + fmsa_random_int(random, 1, length - position);
        if (fmsa_random_int(random, 0, 3) > 0) {
            fmsa_case_add_fragment(c, q, q + end - position, k, k + end);
            q += end - position;
        }
        position = end;
    }
    return q;
}

/* Lays documents, chunks of documents, queries that see a longer prefix, unused keys and rows in no fragment one after
 * another, and sets the totals. The tensors are allocated afterwards. */
static void choose_fragments(fmsa_case *c, int64_t tokens, fmsa_random *random) {
    const int32_t block_size = c->config.block_size;
    int64_t q = 0, k = 0;
    for (int64_t documents = fmsa_random_int(random, 1, 5); documents > 0; documents--) {
        const int64_t left = k < tokens ? tokens - k : 0;
        const int64_t length = choose_length(random, block_size, left < tokens / 2 ? left : tokens / 2);
        const int64_t kind = fmsa_random_int(random, 0, 7);
        if (kind == 0) {
            q = add_chunks(c, q, k, length, random);
        } else {
            const int64_t queries = kind == 1 ? fmsa_random_int(random, 0, length) : length;
            fmsa_case_add_fragment(c, q, q + queries, k, k + length);
            q += queries;
        }
        k += length;
        if (fmsa_random_int(random, 0, 5) == 0) q += fmsa_random_int(random, 0, 20);
        if (fmsa_random_int(random, 0, 5) == 0) k += fmsa_random_int(random, 0, 20);
    }
    c->config.total_q = q;
    c->config.total_k = k;
}

void fmsa_case_random(fmsa_case *c, uint64_t seed, const fmsa_case_limits *limits) {
    fmsa_random random = {seed};
    fmsa_case plan = {0};
    fmsa_config_init(&plan.config, sizeof plan.config);
    plan.config.device = limits->device;
    plan.config.dtype = limits->dtype;
    choose_heads(&plan.config, &random);
    choose_shape(&plan.config, limits->device, &random);
    choose_fragments(&plan, limits->tokens, &random);
    if (fmsa_random_int(&random, 0, 3) == 0) plan.config.kl_count = fmsa_random_int(&random, 1, 1000);
    if (fmsa_random_int(&random, 0, 1) == 0) {
        for (int64_t f = 0; f < plan.config.num_fragments; f++) {
            const int64_t keys = plan.k_end[f] - plan.k_begin[f];
            if (keys > plan.config.max_seqlen_k) plan.config.max_seqlen_k = keys;
        }
    }

    fmsa_case_open(c, &plan.config);
    for (int64_t f = 0; f < plan.config.num_fragments; f++) {
        fmsa_case_add_fragment(c, plan.q_begin[f], plan.q_end[f], plan.k_begin[f], plan.k_end[f]);
    }
    fmsa_case_close(&plan);
    const double main_deviation = 1 + 7 * fmsa_random_uniform(&random);
    const double proxy_deviation = 0.5 + 4 * fmsa_random_uniform(&random);
    fmsa_case_fill(c, fmsa_random_bits(&random), main_deviation, proxy_deviation);
    c->grad_kl = fmsa_round(2 * fmsa_random_normal(&random), FMSA_DTYPE_FP32);
    c->input_layout = (fmsa_layout)fmsa_random_int(&random, 0, FMSA_LAYOUT_COUNT - 1);
    c->output_layout = (fmsa_layout)fmsa_random_int(&random, 0, FMSA_LAYOUT_COUNT - 1);
    c->broadcast_dout = fmsa_random_int(&random, 0, 7) == 0;
    if (c->broadcast_dout) {
        for (int64_t i = c->config.head_dim; i < query_count(&c->config); i++)
            c->dout[i] = c->dout[i % c->config.head_dim];
    }
}

void fmsa_case_describe(const fmsa_case *c, char *text, size_t size) {
    static const char *const dtypes[] = {"bf16", "fp16", "fp32", "fp64"};
    const fmsa_config *g = &c->config;
    snprintf(text, size, "%s %s heads %d/%d/%d/%d D %d Dp %d B %d k %d local %d init %d Tq %lld Tk %lld fragments %lld",
             dtypes[g->dtype], g->mode == FMSA_MODE_DENSE ? "dense" : "sparse", g->num_heads, g->num_kv_heads,
             g->num_proxy_heads, g->num_proxy_kv_heads, g->head_dim, g->proxy_head_dim, g->block_size, g->top_k,
             g->local_blocks, g->init_blocks, (long long)g->total_q, (long long)g->total_k,
             (long long)g->num_fragments);
}
