#include "call.h"

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

/* ---- Views. ---- */

static void set_strides(fmsa_call_view *view, fmsa_layout layout) {
    enum { HEAD_GAP = 8, ROW_GAP = 16 }; /* whole 16 bytes of any type, as CUDA wants strides to be */
    fmsa_tensor *t = view->tensor;
    switch (layout) {
    case FMSA_LAYOUT_HEADS:
        t->row_stride = view->dim;
        t->head_stride = view->rows * view->dim;
        return;
    case FMSA_LAYOUT_PADDED:
        t->head_stride = view->dim + HEAD_GAP;
        t->row_stride = view->heads * t->head_stride + ROW_GAP;
        return;
    case FMSA_LAYOUT_ROWS:
    case FMSA_LAYOUT_COUNT:
        break;
    }
    t->head_stride = view->dim;
    t->row_stride = view->heads * view->dim;
}

static size_t element_bytes(const fmsa_call_view *view) {
    if (view->is_index) return sizeof(int32_t);
    return (const size_t[]){2, 2, 4, 8}[view->dtype];
}

static int64_t element_of(const fmsa_call_view *view, int64_t row, int64_t head) {
    return row * view->opened.row_stride + head * view->opened.head_stride;
}

static void open_view(fmsa_call_view *view, const fmsa_tool_device *device) {
    const bool empty = view->rows == 0;
    view->opened = *view->tensor;
    const int64_t elements = empty ? 0 : element_of(view, view->rows - 1, view->heads - 1) + view->dim;
    view->bytes = (size_t)elements * element_bytes(view);
    view->memory = fmsa_tool_alloc(device, view->bytes);
    view->tensor->data = view->memory;
}

static void *read_memory(const fmsa_tool_device *device, const void *memory, size_t bytes) {
    void *host = fmsa_zeros(bytes, 1);
    fmsa_tool_read(device, host, memory, bytes);
    return host;
}

/* What lies between the rows is left as it was. */
static void write_view(const fmsa_call_view *view, const fmsa_tool_device *device, const void *dense) {
    char *host = read_memory(device, view->memory, view->bytes);
    for (int64_t row = 0; row < view->rows; row++) {
        for (int64_t head = 0; head < view->heads; head++) {
            const int64_t to = element_of(view, row, head), from = (row * view->heads + head) * view->dim;
            for (int64_t i = 0; i < view->dim; i++) {
                fmsa_encode(host, to + i, view->dtype, ((const double *)dense)[from + i]);
            }
        }
    }
    fmsa_tool_write(device, view->memory, host, view->bytes);
    free(host);
}

/* dense[row * row_stride + head * head_stride + i] */
static void read_view(const fmsa_call_view *view, const fmsa_tool_device *device, double *dense, int64_t row_stride,
                      int64_t head_stride) {
    void *host = read_memory(device, view->memory, view->bytes);
    for (int64_t row = 0; row < view->rows; row++) {
        for (int64_t head = 0; head < view->heads; head++) {
            double *to = dense + row * row_stride + head * head_stride;
            for (int64_t i = 0; i < view->dim; i++) {
                to[i] = fmsa_decode(host, element_of(view, row, head) + i, view->dtype);
            }
        }
    }
    free(host);
}

/* Whether everything in the view's memory that is not an element of it is still poison. */
static bool gaps_intact(const fmsa_call_view *view, const fmsa_tool_device *device) {
    char *host = read_memory(device, view->memory, view->bytes);
    const size_t element = element_bytes(view);
    for (int64_t row = 0; row < view->rows; row++) {
        for (int64_t head = 0; head < view->heads; head++) {
            fmsa_tool_poison_host(host + (size_t)element_of(view, row, head) * element, (size_t)view->dim * element);
        }
    }
    const bool intact = fmsa_tool_is_poison(host, view->bytes);
    free(host);
    return intact;
}

static uint64_t checksum(const fmsa_call_view *view, const fmsa_tool_device *device) {
    unsigned char *host = read_memory(device, view->memory, view->bytes);
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < view->bytes; i += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, host + i, view->bytes - i < sizeof word ? view->bytes - i : sizeof word);
        hash = (hash ^ word) * 1099511628211u;
    }
    free(host);
    return hash;
}

/* ---- Opening a call. ---- */

static void list_views(fmsa_call *call, const fmsa_case *c) {
    const fmsa_config *g = &c->config;
    fmsa_tensors *t = &call->tensors;
    const fmsa_dtype kv_grad = g->flags & FMSA_FLAG_FP32_KV_GRADS ? FMSA_DTYPE_FP32 : g->dtype;
    const fmsa_dtype real = g->dtype == FMSA_DTYPE_FP64 ? FMSA_DTYPE_FP64 : FMSA_DTYPE_FP32;
    const int64_t q = g->total_q, k = g->total_k;
    const bool selects = c->block_indices == NULL;
    const fmsa_call_view views[FMSA_CALL_VIEWS] = {
        {"q", &t->q, q, g->num_heads, g->head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"k", &t->k, k, g->num_kv_heads, g->head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"v", &t->v, k, g->num_kv_heads, g->head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"q_proxy", &t->q_proxy, q, g->num_proxy_heads, g->proxy_head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"k_proxy", &t->k_proxy, k, g->num_proxy_kv_heads, g->proxy_head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"dout", &t->dout, q, g->num_heads, g->head_dim, false, g->dtype, false, NULL, 0, {0}},
        {"block_indices", &t->block_indices, q, g->num_proxy_heads, g->top_k, true, real, selects, NULL, 0, {0}},
        {"out", &t->out, q, g->num_heads, g->head_dim, false, g->dtype, true, NULL, 0, {0}},
        {"lse", &t->lse, q, g->num_heads, 1, false, real, true, NULL, 0, {0}},
        {"dq", &t->dq, q, g->num_heads, g->head_dim, false, g->dtype, true, NULL, 0, {0}},
        {"dk", &t->dk, k, g->num_kv_heads, g->head_dim, false, kv_grad, true, NULL, 0, {0}},
        {"dv", &t->dv, k, g->num_kv_heads, g->head_dim, false, kv_grad, true, NULL, 0, {0}},
        {"dq_proxy", &t->dq_proxy, q, g->num_proxy_heads, g->proxy_head_dim, false, g->dtype, true, NULL, 0, {0}},
        {"dk_proxy", &t->dk_proxy, k, g->num_proxy_kv_heads, g->proxy_head_dim, false, kv_grad, true, NULL, 0, {0}},
    };
    memcpy(call->views, views, sizeof views);
}

fmsa_call_view *fmsa_call_find(fmsa_call *call, const fmsa_tensor *tensor) {
    fmsa_call_view *view = call->views;
    while (view->tensor != tensor)
        view++;
    return view;
}

static void open_fragments(fmsa_call *call, const fmsa_case *c) {
    const int32_t *host[4] = {c->q_begin, c->q_end, c->k_begin, c->k_end};
    const size_t bytes = (size_t)c->config.num_fragments * sizeof(int32_t);
    for (int i = 0; i < 4; i++) {
        call->fragments[i] = fmsa_tool_alloc(&call->device, bytes);
        fmsa_tool_write(&call->device, call->fragments[i], host[i], bytes);
    }
    call->config.q_begin = call->fragments[0];
    call->config.q_end = call->fragments[1];
    call->config.k_begin = call->fragments[2];
    call->config.k_end = call->fragments[3];
}

static void open_views(fmsa_call *call, const fmsa_case *c) {
    list_views(call, c);
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        fmsa_call_view *view = &call->views[i];
        set_strides(view, view->is_output ? c->output_layout : c->input_layout);
        if (view->tensor == &call->tensors.dout && c->broadcast_dout) {
            view->tensor->row_stride = 0;
            view->tensor->head_stride = 0;
        }
        open_view(view, &call->device);
    }
    const fmsa_tensors *t = &call->tensors;
    write_view(fmsa_call_find(call, &t->q), &call->device, c->q);
    write_view(fmsa_call_find(call, &t->k), &call->device, c->k);
    write_view(fmsa_call_find(call, &t->v), &call->device, c->v);
    write_view(fmsa_call_find(call, &t->q_proxy), &call->device, c->q_proxy);
    write_view(fmsa_call_find(call, &t->k_proxy), &call->device, c->k_proxy);
    write_view(fmsa_call_find(call, &t->dout), &call->device, c->dout);
    if (c->block_indices != NULL) fmsa_call_write_indices(call, c->block_indices);
}

void fmsa_call_open(fmsa_call *call, const fmsa_case *c, const fmsa_tool_device *device) {
    *call = (fmsa_call){.device = *device, .config = c->config, .tensors.struct_size = sizeof(fmsa_tensors)};
    open_fragments(call, c);
    open_views(call, c);

    const fmsa_dtype real = c->config.dtype == FMSA_DTYPE_FP64 ? FMSA_DTYPE_FP64 : FMSA_DTYPE_FP32;
    double grad_kl;
    fmsa_encode(&grad_kl, 0, real, c->grad_kl);
    call->kl = fmsa_tool_alloc(device, sizeof(double));
    call->grad_kl = fmsa_tool_alloc(device, sizeof(double));
    fmsa_tool_write(device, call->grad_kl, &grad_kl, sizeof grad_kl);
    call->tensors.kl = call->kl;
    call->tensors.grad_kl = call->grad_kl;

    size_t bytes = 0;
    if (fmsa_schedule_bytes(&call->config, &bytes) == FMSA_OK && bytes > 0) {
        call->schedule = fmsa_tool_alloc(device, bytes);
        call->tensors.schedule = call->schedule;
        call->tensors.schedule_bytes = bytes;
    }
}

void fmsa_call_close(fmsa_call *call) {
    for (int i = 0; i < 4; i++)
        fmsa_tool_free(&call->device, call->fragments[i]);
    for (int i = 0; i < FMSA_CALL_VIEWS; i++)
        fmsa_tool_free(&call->device, call->views[i].memory);
    fmsa_tool_free(&call->device, call->schedule);
    fmsa_tool_free(&call->device, call->kl);
    fmsa_tool_free(&call->device, call->grad_kl);
    *call = (fmsa_call){0};
}

/* ---- Running. ---- */

typedef fmsa_status (*operation_function)(const fmsa_config *, const fmsa_tensors *, void *, size_t);

static const operation_function functions[FMSA_OPERATION_COUNT] = {
    [FMSA_OPERATION_SELECT] = fmsa_select,     [FMSA_OPERATION_SCHEDULE] = fmsa_schedule,
    [FMSA_OPERATION_FORWARD] = fmsa_forward,   [FMSA_OPERATION_PROXY_LOSS] = fmsa_proxy_loss,
    [FMSA_OPERATION_BACKWARD] = fmsa_backward, [FMSA_OPERATION_BACKWARD_WITH_PROXY] = fmsa_backward_with_proxy,
};

static void check_memory(fmsa_call *call, const void *workspace) {
    const void *others[] = {workspace,          call->schedule,     call->kl,           call->grad_kl,
                            call->fragments[0], call->fragments[1], call->fragments[2], call->fragments[3]};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (others[i] != NULL && !fmsa_tool_guards_intact(&call->device, others[i])) {
            call->complaint = i == 0 ? "wrote outside the workspace" : "wrote outside the schedule, kl or an input";
        }
    }
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        const fmsa_call_view *view = &call->views[i];
        if (!fmsa_tool_guards_intact(&call->device, view->memory)) call->complaint = "wrote outside a tensor";
        if (!gaps_intact(view, &call->device)) call->complaint = "wrote between the rows of a tensor";
    }
}

fmsa_status fmsa_call_invoke(const fmsa_call *call, fmsa_operation operation, void *workspace, size_t bytes) {
    return functions[operation](&call->config, &call->tensors, workspace, bytes);
}

fmsa_status fmsa_call_run(fmsa_call *call, fmsa_operation operation) {
    size_t bytes = 0;
    fmsa_status status = fmsa_workspace_bytes(&call->config, operation, &bytes);
    if (status != FMSA_OK) return status;
    uint64_t before[FMSA_CALL_VIEWS] = {0};
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        if (!call->views[i].is_output) before[i] = checksum(&call->views[i], &call->device);
    }
    void *workspace = fmsa_tool_alloc(&call->device, bytes);
    status = fmsa_call_invoke(call, operation, workspace, bytes);

    call->complaint = NULL;
    const char *fault;
    if (!fmsa_tool_synchronise(&call->device, &fault)) {
        call->complaint = fault;
        return status;
    }
    check_memory(call, workspace);
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        if (!call->views[i].is_output && checksum(&call->views[i], &call->device) != before[i]) {
            call->complaint = "changed an input";
        }
    }
    fmsa_tool_free(&call->device, workspace);
    return status;
}

fmsa_status fmsa_call_run_all(fmsa_call *call) {
    const bool sparse = call->config.mode == FMSA_MODE_SPARSE;
    const bool selects = sparse && fmsa_call_find(call, &call->tensors.block_indices)->is_output;
    const struct {
        fmsa_operation operation;
        bool wanted;
    } steps[] = {{FMSA_OPERATION_SELECT, selects},
                 {FMSA_OPERATION_SCHEDULE, sparse},
                 {FMSA_OPERATION_FORWARD, true},
                 {FMSA_OPERATION_BACKWARD_WITH_PROXY, true}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (!steps[i].wanted) continue;
        const fmsa_status status = fmsa_call_run(call, steps[i].operation);
        if (status != FMSA_OK || call->complaint != NULL) return status;
    }
    return FMSA_OK;
}

/* ---- Results. ---- */

void fmsa_call_read(const fmsa_call *call, fmsa_reference_outputs *outputs) {
    const fmsa_tensors *t = &call->tensors;
    const struct {
        const fmsa_tensor *tensor;
        double *dense;
    } fields[] = {{&t->out, outputs->out},
                  {&t->dq, outputs->dq},
                  {&t->dk, outputs->dk},
                  {&t->dv, outputs->dv},
                  {&t->dq_proxy, outputs->dq_proxy},
                  {&t->dk_proxy, outputs->dk_proxy}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const fmsa_call_view *view = fmsa_call_find((fmsa_call *)call, fields[i].tensor);
        read_view(view, &call->device, fields[i].dense, view->heads * view->dim, view->dim);
    }
    const fmsa_call_view *lse = fmsa_call_find((fmsa_call *)call, &t->lse);
    read_view(lse, &call->device, outputs->lse, 1, lse->rows);
    double kl;
    fmsa_tool_read(&call->device, &kl, call->kl, sizeof kl);
    outputs->kl = fmsa_decode(&kl, 0, lse->dtype);
}

void fmsa_call_read_indices(const fmsa_call *call, int32_t *block_indices) {
    const fmsa_call_view *view = fmsa_call_find((fmsa_call *)call, &call->tensors.block_indices);
    int32_t *host = read_memory(&call->device, view->memory, view->bytes);
    for (int64_t head = 0; head < view->heads; head++) {
        for (int64_t row = 0; row < view->rows; row++) {
            memcpy(block_indices + (head * view->rows + row) * view->dim, host + element_of(view, row, head),
                   (size_t)view->dim * sizeof *host);
        }
    }
    free(host);
}

void fmsa_call_write_indices(fmsa_call *call, const int32_t *block_indices) {
    const fmsa_call_view *view = fmsa_call_find(call, &call->tensors.block_indices);
    int32_t *host = read_memory(&call->device, view->memory, view->bytes);
    for (int64_t head = 0; head < view->heads; head++) {
        for (int64_t row = 0; row < view->rows; row++) {
            memcpy(host + element_of(view, row, head), block_indices + (head * view->rows + row) * view->dim,
                   (size_t)view->dim * sizeof *host);
        }
    }
    fmsa_tool_write(&call->device, view->memory, host, view->bytes);
    free(host);
}

void fmsa_call_poison(fmsa_call *call) {
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        if (call->views[i].is_output) fmsa_tool_poison(&call->device, call->views[i].memory);
    }
    fmsa_tool_poison(&call->device, call->kl);
    if (call->schedule != NULL) fmsa_tool_poison(&call->device, call->schedule);
}

static bool is_poison(const fmsa_tool_device *device, const void *memory, size_t bytes) {
    void *host = read_memory(device, memory, bytes);
    const bool poison = fmsa_tool_is_poison(host, bytes);
    free(host);
    return poison;
}

bool fmsa_call_untouched(fmsa_call *call) {
    for (int i = 0; i < FMSA_CALL_VIEWS; i++) {
        const fmsa_call_view *view = &call->views[i];
        if (view->is_output && !is_poison(&call->device, view->memory, view->bytes)) return false;
    }
    if (call->schedule != NULL && !is_poison(&call->device, call->schedule, call->tensors.schedule_bytes)) return false;
    return is_poison(&call->device, call->kl, sizeof(double));
}
