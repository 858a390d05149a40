/* The public calls: check the arguments, choose the backend, run. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "build_info.h"
#include "status.h"

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)
#define VERSION STRINGIFY(FMSA_VERSION_MAJOR) "." STRINGIFY(FMSA_VERSION_MINOR) "." STRINGIFY(FMSA_VERSION_PATCH)

/* ---- Tensors: one row a field of fmsa_tensors, one bit a row, two masks an operation. ---- */

typedef enum { ROWS_Q, ROWS_K } field_rows;
typedef enum { HEADS_MAIN, HEADS_KV, HEADS_PROXY, HEADS_PROXY_KV } field_heads;
typedef enum { DIM_MAIN, DIM_PROXY, DIM_ONE, DIM_TOP_K } field_dim;
typedef enum { TYPE_DTYPE, TYPE_KV_GRAD, TYPE_REAL, TYPE_INT32 } field_type;

typedef struct {
    const char *name;
    size_t offset;
    field_rows rows;
    field_heads heads;
    field_dim dim;
    field_type type;
} field;

#define FIELD(name) #name, offsetof(fmsa_tensors, name)
enum { Q, K, V, Q_PROXY, K_PROXY, BLOCK_INDICES, OUT, LSE, DOUT, DQ, DK, DV, DQ_PROXY, DK_PROXY, FIELD_COUNT };
static const field fields[FIELD_COUNT] = {
    [Q] = {FIELD(q), ROWS_Q, HEADS_MAIN, DIM_MAIN, TYPE_DTYPE},
    [K] = {FIELD(k), ROWS_K, HEADS_KV, DIM_MAIN, TYPE_DTYPE},
    [V] = {FIELD(v), ROWS_K, HEADS_KV, DIM_MAIN, TYPE_DTYPE},
    [Q_PROXY] = {FIELD(q_proxy), ROWS_Q, HEADS_PROXY, DIM_PROXY, TYPE_DTYPE},
    [K_PROXY] = {FIELD(k_proxy), ROWS_K, HEADS_PROXY_KV, DIM_PROXY, TYPE_DTYPE},
    [BLOCK_INDICES] = {FIELD(block_indices), ROWS_Q, HEADS_PROXY, DIM_TOP_K, TYPE_INT32},
    [OUT] = {FIELD(out), ROWS_Q, HEADS_MAIN, DIM_MAIN, TYPE_DTYPE},
    [LSE] = {FIELD(lse), ROWS_Q, HEADS_MAIN, DIM_ONE, TYPE_REAL},
    [DOUT] = {FIELD(dout), ROWS_Q, HEADS_MAIN, DIM_MAIN, TYPE_DTYPE},
    [DQ] = {FIELD(dq), ROWS_Q, HEADS_MAIN, DIM_MAIN, TYPE_DTYPE},
    [DK] = {FIELD(dk), ROWS_K, HEADS_KV, DIM_MAIN, TYPE_KV_GRAD},
    [DV] = {FIELD(dv), ROWS_K, HEADS_KV, DIM_MAIN, TYPE_KV_GRAD},
    [DQ_PROXY] = {FIELD(dq_proxy), ROWS_Q, HEADS_PROXY, DIM_PROXY, TYPE_DTYPE},
    [DK_PROXY] = {FIELD(dk_proxy), ROWS_K, HEADS_PROXY_KV, DIM_PROXY, TYPE_KV_GRAD},
};

typedef struct {
    const char *name;
    uint32_t inputs;           /* required */
    uint32_t outputs;          /* required */
    uint32_t optional_outputs; /* may be NULL */
    bool reads_schedule;       /* in sparse mode */
    bool writes_kl;
} signature;

#define BIT(field) (1u << (field))
static const signature signatures[FMSA_OPERATION_COUNT] = {
    [FMSA_OPERATION_SELECT] = {"fmsa_select", BIT(Q_PROXY) | BIT(K_PROXY), BIT(BLOCK_INDICES), 0, false, false},
    [FMSA_OPERATION_SCHEDULE] = {"fmsa_schedule", BIT(BLOCK_INDICES), 0, 0, false, false},
    [FMSA_OPERATION_FORWARD] = {"fmsa_forward", BIT(Q) | BIT(K) | BIT(V), BIT(OUT) | BIT(LSE), 0, true, false},
    [FMSA_OPERATION_PROXY_LOSS] = {"fmsa_proxy_loss", BIT(Q) | BIT(K) | BIT(LSE) | BIT(Q_PROXY) | BIT(K_PROXY), 0,
                                   BIT(DQ_PROXY) | BIT(DK_PROXY), true, true},
    [FMSA_OPERATION_BACKWARD] = {"fmsa_backward", BIT(Q) | BIT(K) | BIT(V) | BIT(OUT) | BIT(LSE) | BIT(DOUT), 0,
                                 BIT(DQ) | BIT(DK) | BIT(DV), true, false},
    [FMSA_OPERATION_BACKWARD_WITH_PROXY] = {"fmsa_backward_with_proxy",
                                            BIT(Q) | BIT(K) | BIT(V) | BIT(OUT) | BIT(LSE) | BIT(DOUT) | BIT(Q_PROXY) |
                                                BIT(K_PROXY),
                                            0, BIT(DQ) | BIT(DK) | BIT(DV) | BIT(DQ_PROXY) | BIT(DK_PROXY), true, true},
};

static const fmsa_tensor *field_tensor(const fmsa_tensors *tensors, const field *f) {
    return (const fmsa_tensor *)((const char *)tensors + f->offset);
}

static size_t field_element_bytes(const fmsa_config *c, field_type type) {
    switch (type) {
    case TYPE_INT32:
        return sizeof(int32_t);
    case TYPE_REAL:
        return fmsa_real_bytes(c->dtype);
    case TYPE_KV_GRAD:
        return c->flags & FMSA_FLAG_FP32_KV_GRADS ? sizeof(float) : fmsa_dtype_bytes(c->dtype);
    case TYPE_DTYPE:
        break;
    }
    return fmsa_dtype_bytes(c->dtype);
}

static int64_t field_rows_of(const fmsa_config *c, const field *f) {
    return f->rows == ROWS_Q ? c->total_q : c->total_k;
}

static int64_t field_heads_of(const fmsa_config *c, const field *f) {
    const int64_t heads[] = {[HEADS_MAIN] = c->num_heads,
                             [HEADS_KV] = c->num_kv_heads,
                             [HEADS_PROXY] = c->num_proxy_heads,
                             [HEADS_PROXY_KV] = c->num_proxy_kv_heads};
    return heads[f->heads];
}

static int64_t field_dim_of(const fmsa_config *c, const field *f) {
    const int64_t dims[] = {
        [DIM_MAIN] = c->head_dim, [DIM_PROXY] = c->proxy_head_dim, [DIM_ONE] = 1, [DIM_TOP_K] = c->top_k};
    return dims[f->dim];
}

static bool is_aligned(const void *pointer, size_t alignment) {
    return ((uintptr_t)pointer & (alignment - 1)) == 0;
}

/* Whether two elements of a view can be the same memory: then it cannot be written. */
static bool overlaps_itself(const fmsa_tensor *t, int64_t rows, int64_t heads, int64_t dim) {
    if (rows == 0 || (rows == 1 && heads == 1)) return false;
    if (rows == 1) return t->head_stride < dim;
    if (heads == 1) return t->row_stride < dim;
    const bool heads_inside = t->head_stride >= dim && t->row_stride >= (heads - 1) * t->head_stride + dim;
    const bool rows_inside = t->row_stride >= dim && t->head_stride >= (rows - 1) * t->row_stride + dim;
    return !heads_inside && !rows_inside;
}

static fmsa_status check_tensor(const fmsa_problem *problem, const fmsa_backend *backend, const signature *operation,
                                const fmsa_tensors *tensors, int index) {
    const field *f = &fields[index];
    const fmsa_config *c = &problem->config;
    const fmsa_tensor *t = field_tensor(tensors, f);
    const int64_t rows = field_rows_of(c, f), heads = field_heads_of(c, f), dim = field_dim_of(c, f);
    const size_t element = field_element_bytes(c, f->type);
    const bool optional = operation->optional_outputs & BIT(index);
    if (t->data == NULL) {
        if (optional || rows == 0) return FMSA_OK;
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: %s.data is NULL; it must point to %lld rows", operation->name,
                         f->name, (long long)rows);
    }
    if (t->row_stride < 0 || t->head_stride < 0) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "%s: %s has row_stride %lld and head_stride %lld; strides must not be negative",
                         operation->name, f->name, (long long)t->row_stride, (long long)t->head_stride);
    }
    const double extent =
        ((double)(rows - 1) * (double)t->row_stride + (double)(heads - 1) * (double)t->head_stride) * (double)element;
    if (extent > 0x1p62) {
        return fmsa_fail(
            FMSA_ERROR_ARGUMENT,
            "%s: %s has row_stride %lld and head_stride %lld; %lld x %lld rows would span more than 2^62 bytes",
            operation->name, f->name, (long long)t->row_stride, (long long)t->head_stride, (long long)rows,
            (long long)heads);
    }
    const bool has_head_dim = f->dim == DIM_MAIN || f->dim == DIM_PROXY;
    const size_t alignment = has_head_dim && backend->tensor_alignment > element ? backend->tensor_alignment : element;
    if (!is_aligned(t->data, alignment)) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: %s.data is %p; it must be a multiple of %zu bytes", operation->name,
                         f->name, t->data, alignment);
    }
    if (t->row_stride * (int64_t)element % (int64_t)alignment != 0 ||
        t->head_stride * (int64_t)element % (int64_t)alignment != 0) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "%s: %s has row_stride %lld and head_stride %lld of %zu-byte elements; both must be multiples "
                         "of %zu bytes",
                         operation->name, f->name, (long long)t->row_stride, (long long)t->head_stride, element,
                         alignment);
    }
    if (!(operation->inputs & BIT(index)) && overlaps_itself(t, rows, heads, dim)) {
        return fmsa_fail(
            FMSA_ERROR_ARGUMENT,
            "%s: %s is written with row_stride %lld and head_stride %lld; %lld x %lld rows of %lld elements "
            "would overlap",
            operation->name, f->name, (long long)t->row_stride, (long long)t->head_stride, (long long)rows,
            (long long)heads, (long long)dim);
    }
    return FMSA_OK;
}

/* kl and grad_kl: one optional value each. */
static fmsa_status check_real(const signature *operation, fmsa_dtype dtype, const char *name, const void *value) {
    if (is_aligned(value, fmsa_real_bytes(dtype))) return FMSA_OK;
    return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: %s is %p; it must be a multiple of %zu bytes", operation->name, name,
                     value, fmsa_real_bytes(dtype));
}

/* ---- Memory that the caller brings. ---- */

static fmsa_status check_memory(const signature *operation, const char *name, const void *memory, size_t given,
                                size_t needed, size_t alignment) {
    if (given < needed) {
        return fmsa_fail(FMSA_ERROR_WORKSPACE, "%s: %s has %zu bytes; it needs %zu", operation->name, name, given,
                         needed);
    }
    if (needed > 0 && (memory == NULL || !is_aligned(memory, alignment))) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: %s is %p; it must be a multiple of %zu bytes and not NULL",
                         operation->name, name, memory, alignment);
    }
    return FMSA_OK;
}

/* ---- Choice of the backend. ---- */

static fmsa_status choose_backend(fmsa_device device, const fmsa_backend **backend) {
    if (device == FMSA_DEVICE_CPU) {
        *backend = &fmsa_cpu_backend;
        return FMSA_OK;
    }
#ifdef FMSA_WITH_CUDA
    if (device == FMSA_DEVICE_CUDA) {
        *backend = &fmsa_cuda_backend;
        return FMSA_OK;
    }
#else
    if (device == FMSA_DEVICE_CUDA) {
        return fmsa_fail(FMSA_ERROR_UNSUPPORTED,
                         "device is FMSA_DEVICE_CUDA; this library was built without CUDA and runs on "
                         "FMSA_DEVICE_CPU only: build it where nvcc is found");
    }
#endif
    return fmsa_fail(FMSA_ERROR_ARGUMENT, "device is %d; it must be FMSA_DEVICE_CPU (0) or FMSA_DEVICE_CUDA (1)",
                     (int)device);
}

static fmsa_status open_problem(fmsa_problem *problem, const fmsa_backend **backend, const fmsa_config *config,
                                fmsa_operation operation) {
    fmsa_status status = fmsa_problem_init(problem, config);
    if (status != FMSA_OK) return status;
    if ((unsigned)operation >= FMSA_OPERATION_COUNT) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "operation is %d; it must lie in 0 ... %d", (int)operation,
                         FMSA_OPERATION_COUNT - 1);
    }
    status = choose_backend(problem->config.device, backend);
    if (status != FMSA_OK) return status;
    return (*backend)->check != NULL ? (*backend)->check(problem, operation) : FMSA_OK;
}

static fmsa_status run(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace, size_t workspace_bytes,
                       fmsa_operation operation) {
    fmsa_problem problem;
    const fmsa_backend *backend = NULL;
    fmsa_status status = open_problem(&problem, &backend, config, operation);
    if (status != FMSA_OK) return status;
    const signature *s = &signatures[operation];
    const fmsa_config *c = &problem.config;
    if (tensors == NULL) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: tensors is NULL; it must point to a fmsa_tensors", s->name);
    }
    if (tensors->struct_size != sizeof *tensors) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "%s: tensors->struct_size is %zu; this library (" VERSION ") knows a fmsa_tensors of %zu "
                         "bytes: set struct_size to sizeof(fmsa_tensors), and compile against this library's header",
                         s->name, tensors->struct_size, sizeof *tensors);
    }
    const bool selects = operation == FMSA_OPERATION_SELECT || operation == FMSA_OPERATION_SCHEDULE;
    if (selects && c->mode == FMSA_MODE_DENSE) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "%s: mode is FMSA_MODE_DENSE; blocks are selected in FMSA_MODE_SPARSE",
                         s->name);
    }
    if (c->num_fragments > 0 && (c->q_begin == NULL || c->q_end == NULL || c->k_begin == NULL || c->k_end == NULL)) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT,
                         "%s: one of q_begin, q_end, k_begin, k_end is NULL; each must point to num_fragments = %lld "
                         "int32 values",
                         s->name, (long long)c->num_fragments);
    }
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (!((s->inputs | s->outputs | s->optional_outputs) & BIT(i))) continue;
        status = check_tensor(&problem, backend, s, tensors, i);
        if (status != FMSA_OK) return status;
    }
    if (s->writes_kl) {
        status = check_real(s, c->dtype, "kl", tensors->kl);
        if (status != FMSA_OK) return status;
        status = check_real(s, c->dtype, "grad_kl", tensors->grad_kl);
        if (status != FMSA_OK) return status;
    }
    size_t needed = 0;
    if (c->mode == FMSA_MODE_SPARSE && (s->reads_schedule || operation == FMSA_OPERATION_SCHEDULE)) {
        status = backend->schedule_bytes(&problem, &needed);
        if (status != FMSA_OK) return status;
        status =
            check_memory(s, "schedule", tensors->schedule, tensors->schedule_bytes, needed, backend->memory_alignment);
        if (status != FMSA_OK) return status;
    }
    status = backend->workspace_bytes(&problem, operation, &needed);
    if (status != FMSA_OK) return status;
    status = check_memory(s, "workspace", workspace, workspace_bytes, needed, backend->memory_alignment);
    if (status != FMSA_OK) return status;
    return backend->run[operation](&problem, tensors, workspace, workspace_bytes);
}

/* ---- The public calls. ---- */

fmsa_status fmsa_workspace_bytes(const fmsa_config *config, fmsa_operation operation, size_t *bytes) {
    fmsa_problem problem;
    const fmsa_backend *backend = NULL;
    fmsa_status status = open_problem(&problem, &backend, config, operation);
    if (status != FMSA_OK) return status;
    if (bytes == NULL) return fmsa_fail(FMSA_ERROR_ARGUMENT, "bytes is NULL; it must point to a size_t");
    return backend->workspace_bytes(&problem, operation, bytes);
}

fmsa_status fmsa_schedule_bytes(const fmsa_config *config, size_t *bytes) {
    fmsa_problem problem;
    const fmsa_backend *backend = NULL;
    fmsa_status status = open_problem(&problem, &backend, config, FMSA_OPERATION_SCHEDULE);
    if (status != FMSA_OK) return status;
    if (bytes == NULL) return fmsa_fail(FMSA_ERROR_ARGUMENT, "bytes is NULL; it must point to a size_t");
    *bytes = 0;
    return problem.config.mode == FMSA_MODE_DENSE ? FMSA_OK : backend->schedule_bytes(&problem, bytes);
}

fmsa_status fmsa_select(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                        size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_SELECT);
}

fmsa_status fmsa_schedule(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                          size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_SCHEDULE);
}

fmsa_status fmsa_forward(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                         size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_FORWARD);
}

fmsa_status fmsa_proxy_loss(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                            size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_PROXY_LOSS);
}

fmsa_status fmsa_backward(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                          size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_BACKWARD);
}

fmsa_status fmsa_backward_with_proxy(const fmsa_config *config, const fmsa_tensors *tensors, void *workspace,
                                     size_t workspace_bytes) {
    return run(config, tensors, workspace, workspace_bytes, FMSA_OPERATION_BACKWARD_WITH_PROXY);
}

const char *fmsa_version(void) {
    return VERSION;
}

const char *fmsa_build_info(void) {
    return "version=" VERSION "\n" FMSA_BUILD_INFO;
}

int32_t fmsa_device_count(fmsa_device device) {
    const fmsa_backend *backend = NULL;
    return choose_backend(device, &backend) == FMSA_OK ? backend->device_count() : 0;
}

fmsa_status fmsa_device_description(fmsa_device device, int32_t index, char *text, size_t size) {
    const fmsa_backend *backend = NULL;
    fmsa_status status = choose_backend(device, &backend);
    if (status != FMSA_OK) return status;
    if (text == NULL || size == 0) return fmsa_fail(FMSA_ERROR_ARGUMENT, "text is NULL or size 0; both must be given");
    const int32_t count = backend->device_count();
    if (index < 0 || index >= count) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "index is %d; there are %d devices of this kind", index, count);
    }
    return backend->device_description(index, text, size);
}
