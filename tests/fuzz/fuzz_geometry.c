/* Any bytes become a small configuration, fragments and block indices, mostly sound and sometimes not; then selection,
 * schedule, forward and backward run on the CPU between guard zones. Errors are fine. Writing where a call has no
 * business, writing on an error, or leaving an output unwritten, is not. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "call.h"
#include "cases.h"
#include "device.h"
#include "flashmsa.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The bytes still to be used; behind the last they are 0. */
typedef struct {
    const uint8_t *next, *end;
} bytes_left;

static int32_t take(bytes_left *bytes, int32_t least, int32_t most) {
    const int32_t byte = bytes->next < bytes->end ? *bytes->next++ : 0;
    return least + byte % (most - least + 1);
}

/* One byte in eight that asks for it gives a value that need not be sound. */
static int32_t take_mostly(bytes_left *bytes, int32_t least, int32_t most, int32_t unsound) {
    return take(bytes, 0, 31) == 31 ? unsound : take(bytes, least, most);
}

static void take_config(bytes_left *bytes, fmsa_config *config) {
    static const int32_t relations[][4] = {{1, 1, 1, 1}, {4, 2, 2, 1}, {4, 1, 4, 2}, {6, 6, 2, 2},
                                           {8, 2, 4, 1}, {3, 3, 3, 3}, {6, 4, 2, 1}, {4, 2, 3, 1}};
    const int32_t *heads = relations[take(bytes, 0, 7)];
    fmsa_config_init(config, sizeof *config);
    config->num_threads = 1;
    config->dtype = (fmsa_dtype)take(bytes, 0, 3);
    config->mode = (fmsa_mode)take(bytes, 0, 1);
    config->flags = (uint32_t)take(bytes, 0, 15);
    config->num_heads = heads[0];
    config->num_kv_heads = heads[1];
    config->num_proxy_heads = heads[2];
    config->num_proxy_kv_heads = heads[3];
    config->head_dim = take_mostly(bytes, 1, 20, 0);
    config->proxy_head_dim = take_mostly(bytes, 1, 20, 257);
    config->block_size = take_mostly(bytes, 16, 40, 15);
    config->top_k = take_mostly(bytes, 1, 6, 0);
    config->local_blocks = take_mostly(bytes, 0, 3, -1);
    config->init_blocks = take_mostly(bytes, 0, 3, INT32_MAX);
    config->kl_count = take(bytes, 0, 2);
    config->total_q = take(bytes, 0, 90);
    config->total_k = config->total_q + take(bytes, 0, 40);
    config->max_seqlen_k = take_mostly(bytes, 0, 0, 50);
    config->scratch_limit = (size_t)take_mostly(bytes, 0, 0, take(bytes, 1, 255) * 256);
}

/* Documents one after another, gaps and empty ones among them; or any numbers. */
static void take_fragments(bytes_left *bytes, fmsa_case *c) {
    const bool sound = take(bytes, 0, 7) > 0;
    int32_t q = 0, k = 0, document = 0;
    for (int32_t left = take(bytes, 0, 6); left > 0; left--) {
        if (!sound) {
            const int32_t q_begin = take(bytes, -1, 100), q_end = take(bytes, -1, 100);
            fmsa_case_add_fragment(c, q_begin, q_end, take(bytes, -1, 140), take(bytes, -1, 140));
            continue;
        }
        const int32_t queries = take(bytes, 0, 40), unseen = take(bytes, 0, 20);
        const bool same_document = take(bytes, 0, 3) == 0 && k - document >= queries;
        if (!same_document) {
            document = k + take(bytes, 0, 3);
            k = document + queries + unseen;
        }
        q += take(bytes, 0, 3);
        fmsa_case_add_fragment(c, q, q + queries, document, k);
        q += queries;
    }
}

/* Small whole numbers; few enough for the selection to meet ties. */
static void take_values(bytes_left *bytes, double *values, int64_t count) {
    fmsa_random random = {(uint64_t)take(bytes, 0, 255)};
    for (int64_t i = 0; i < count; i++)
        values[i] = (double)fmsa_random_int(&random, -2, 2);
}

static void take_inputs(bytes_left *bytes, fmsa_case *c) {
    const fmsa_config *g = &c->config;
    const int64_t q = g->total_q * g->num_heads * g->head_dim, k = g->total_k * g->num_kv_heads * g->head_dim;
    take_values(bytes, c->q, q);
    take_values(bytes, c->dout, q);
    take_values(bytes, c->k, k);
    take_values(bytes, c->v, k);
    take_values(bytes, c->q_proxy, g->total_q * g->num_proxy_heads * g->proxy_head_dim);
    take_values(bytes, c->k_proxy, g->total_k * g->num_proxy_kv_heads * g->proxy_head_dim);
    if (take(bytes, 0, 1) == 0) return;
    c->block_indices = fmsa_zeros((size_t)fmsa_case_index_count(c), sizeof(int32_t));
    for (int64_t i = 0; i < fmsa_case_index_count(c); i++)
        c->block_indices[i] = take(bytes, -2, 8);
}

static void fault(const char *what) {
    fprintf(stderr, "fuzz_geometry: %s\n", what);
    abort();
}

static void check_finite(const double *values, int64_t count, const char *what) {
    for (int64_t i = 0; i < count; i++) {
        if (isnan(values[i])) fault(what);
    }
}

static void check_written(const fmsa_call *call, const fmsa_case *c) {
    const fmsa_config *g = &c->config;
    fmsa_reference_outputs o;
    fmsa_reference_outputs_open(&o, g);
    fmsa_call_read(call, &o);
    const int64_t q = g->total_q * g->num_heads * g->head_dim, k = g->total_k * g->num_kv_heads * g->head_dim;
    check_finite(o.out, q, "out is NaN");
    check_finite(o.lse, g->total_q * g->num_heads, "lse is NaN");
    check_finite(o.dq, q, "dq is NaN");
    check_finite(o.dk, k, "dk is NaN");
    check_finite(o.dv, k, "dv is NaN");
    check_finite(o.dq_proxy, g->total_q * g->num_proxy_heads * g->proxy_head_dim, "dq_proxy is NaN");
    check_finite(o.dk_proxy, g->total_k * g->num_proxy_kv_heads * g->proxy_head_dim, "dk_proxy is NaN");
    check_finite(&o.kl, 1, "kl is NaN");
    fmsa_reference_outputs_close(&o);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const fmsa_tool_device cpu = {FMSA_DEVICE_CPU};
    bytes_left bytes = {data, data + size};
    fmsa_config config;
    fmsa_case c;
    fmsa_call call;
    take_config(&bytes, &config);
    fmsa_case_open(&c, &config);
    take_fragments(&bytes, &c);
    take_inputs(&bytes, &c);
    c.input_layout = (fmsa_layout)(size % FMSA_LAYOUT_COUNT);
    fmsa_call_open(&call, &c, &cpu);

    const fmsa_status status = fmsa_call_run_all(&call);
    if (call.complaint != NULL) fault(call.complaint);
    if (status == FMSA_OK) check_written(&call, &c);
    if (status != FMSA_OK && *fmsa_last_error() == '\0') fault("an error without a sentence");

    /* The first operation: on an error it has written nothing. */
    fmsa_call_poison(&call);
    const fmsa_operation first = config.mode == FMSA_MODE_DENSE ? FMSA_OPERATION_FORWARD
                                 : c.block_indices != NULL      ? FMSA_OPERATION_SCHEDULE
                                                                : FMSA_OPERATION_SELECT;
    if (fmsa_call_run(&call, first) != FMSA_OK && !fmsa_call_untouched(&call)) fault("written on an error");

    fmsa_call_close(&call);
    fmsa_case_close(&c);
    return 0;
}
