#include "attention.h"

#include <stdlib.h>

#include "failure.h"

static fmsa_config config_of_phase(const attention *a, attention_phase phase) {
    fmsa_config config = a->config;
    config.mode = phase == PHASE_SPARSE ? FMSA_MODE_SPARSE : FMSA_MODE_DENSE;
    return config;
}

static bool fail_with_library_sentence(void) {
    return train_fail("%s", fmsa_last_error());
}

static bool grow_workspace_bytes(attention *a, attention_phase phase, fmsa_operation operation) {
    const fmsa_config config = config_of_phase(a, phase);
    size_t bytes;
    if (fmsa_workspace_bytes(&config, operation, &bytes) != FMSA_OK) return fail_with_library_sentence();
    if (bytes > a->workspace_bytes) a->workspace_bytes = bytes;
    return true;
}

bool attention_open(attention *a, const attention_shape *shape, int32_t batch, int32_t context) {
    *a = (attention){0};
    fmsa_config *c = &a->config;
    fmsa_config_init(c, sizeof *c);
    c->dtype = REAL_DTYPE;
    c->num_heads = shape->heads;
    c->num_kv_heads = shape->kv_heads;
    c->num_proxy_heads = shape->proxy_heads;
    c->num_proxy_kv_heads = shape->proxy_kv_heads;
    c->head_dim = shape->head_dim;
    c->proxy_head_dim = shape->proxy_head_dim;
    c->block_size = shape->block_size;
    c->top_k = shape->top_k;
    c->total_q = c->total_k = (int64_t)batch * context;
    c->num_fragments = batch;
    c->max_seqlen_k = context;

    a->boundaries = train_allocate(batch + 1, sizeof *a->boundaries);
    for (int32_t i = 0; i <= batch; i++)
        a->boundaries[i] = i * context;
    c->q_begin = c->k_begin = a->boundaries;
    c->q_end = c->k_end = a->boundaries + 1;

    bool ok = fmsa_schedule_bytes(c, &a->schedule_bytes) == FMSA_OK || fail_with_library_sentence();
    for (int op = 0; ok && op < FMSA_OPERATION_COUNT; op++) {
        ok = grow_workspace_bytes(a, PHASE_SPARSE, (fmsa_operation)op);
        const bool selects = op == FMSA_OPERATION_SELECT || op == FMSA_OPERATION_SCHEDULE;
        if (ok && !selects) ok = grow_workspace_bytes(a, PHASE_DENSE, (fmsa_operation)op);
    }
    if (ok) a->workspace = train_allocate((long long)a->workspace_bytes, 1);
    if (!ok) attention_close(a);
    return ok;
}

void attention_close(attention *a) {
    free(a->boundaries);
    free(a->workspace);
    *a = (attention){0};
}

bool attention_run(const attention *a, attention_phase phase, fmsa_operation operation, const fmsa_tensors *tensors) {
    typedef fmsa_status operation_function(const fmsa_config *, const fmsa_tensors *, void *, size_t);
    static operation_function *const functions[FMSA_OPERATION_COUNT] = {
        [FMSA_OPERATION_SELECT] = fmsa_select,     [FMSA_OPERATION_SCHEDULE] = fmsa_schedule,
        [FMSA_OPERATION_FORWARD] = fmsa_forward,   [FMSA_OPERATION_PROXY_LOSS] = fmsa_proxy_loss,
        [FMSA_OPERATION_BACKWARD] = fmsa_backward, [FMSA_OPERATION_BACKWARD_WITH_PROXY] = fmsa_backward_with_proxy,
    };
    const fmsa_config config = config_of_phase(a, phase);
    const fmsa_status status = functions[operation](&config, tensors, a->workspace, a->workspace_bytes);
    return status == FMSA_OK || fail_with_library_sentence();
}
