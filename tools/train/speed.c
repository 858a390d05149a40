#include "speed.h"

#include <stdlib.h>

#include "../clock.h"
#include "failure.h"
#include "random.h"

enum { TENSORS = 13, FEWEST_REPEATS = 3, MOST_REPEATS = 51 };
static const double most_seconds = 0.8;

/* The memory of one measurement. */
typedef struct bench {
    attention attention;
    fmsa_tensors tensors;
    void *memory[TENSORS + 2];
    int memory_count;
    random_state random;
    real kl;
} bench;

static void *allocate(bench *b, int64_t count, size_t element_bytes) {
    return b->memory[b->memory_count++] = train_allocate(count, element_bytes);
}

/* A packed tensor of standard normal numbers. */
static fmsa_tensor random_tensor(bench *b, int64_t rows, int64_t heads, int64_t dim) {
    real *data = allocate(b, rows * heads * dim, sizeof *data);
    for (int64_t i = 0; i < rows * heads * dim; i++)
        data[i] = (real)random_normal(&b->random);
    return (fmsa_tensor){data, heads * dim, dim};
}

static void open_tensors(bench *b, const attention_shape *a, int64_t rows) {
    fmsa_tensors *t = &b->tensors;
    t->struct_size = sizeof *t;
    t->q = random_tensor(b, rows, a->heads, a->head_dim);
    t->k = random_tensor(b, rows, a->kv_heads, a->head_dim);
    t->v = random_tensor(b, rows, a->kv_heads, a->head_dim);
    t->q_proxy = random_tensor(b, rows, a->proxy_heads, a->proxy_head_dim);
    t->k_proxy = random_tensor(b, rows, a->proxy_kv_heads, a->proxy_head_dim);
    t->out = random_tensor(b, rows, a->heads, a->head_dim);
    t->dout = random_tensor(b, rows, a->heads, a->head_dim);
    t->dq = random_tensor(b, rows, a->heads, a->head_dim);
    t->dk = random_tensor(b, rows, a->kv_heads, a->head_dim);
    t->dv = random_tensor(b, rows, a->kv_heads, a->head_dim);
    t->dq_proxy = random_tensor(b, rows, a->proxy_heads, a->proxy_head_dim);
    t->dk_proxy = random_tensor(b, rows, a->proxy_kv_heads, a->proxy_head_dim);
    t->lse = random_tensor(b, rows, a->heads, 1);
    t->kl = &b->kl;
    t->block_indices =
        (fmsa_tensor){allocate(b, rows * a->proxy_heads * a->top_k, sizeof(int32_t)), a->top_k, rows * a->top_k};
    t->schedule_bytes = b->attention.schedule_bytes;
    t->schedule = allocate(b, (int64_t)t->schedule_bytes, 1);
}

static bool run_once(const bench *b, attention_phase phase, double *milliseconds) {
    const fmsa_operation sparse[] = {FMSA_OPERATION_SELECT, FMSA_OPERATION_SCHEDULE, FMSA_OPERATION_FORWARD,
                                     FMSA_OPERATION_BACKWARD_WITH_PROXY};
    const fmsa_operation dense[] = {FMSA_OPERATION_FORWARD, FMSA_OPERATION_BACKWARD};
    const fmsa_operation *operations = phase == PHASE_SPARSE ? sparse : dense;
    const int count = phase == PHASE_SPARSE ? 4 : 2;
    const double begin = fmsa_tool_seconds();
    for (int i = 0; i < count; i++) {
        if (!attention_run(&b->attention, phase, operations[i], &b->tensors)) return false;
    }
    *milliseconds = 1000 * (fmsa_tool_seconds() - begin);
    return true;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bool measure_attention(const attention_shape *shape, int32_t context, attention_phase phase, double *milliseconds) {
    bench b = {.memory_count = 0};
    random_seed(&b.random, 1);
    if (!attention_open(&b.attention, shape, 1, context)) return false;
    open_tensors(&b, shape, context);
    double times[MOST_REPEATS], unused;
    int repeats = 0;
    bool ok = run_once(&b, phase, &unused);
    const double begin = fmsa_tool_seconds();
    while (ok && repeats < MOST_REPEATS && (repeats < FEWEST_REPEATS || fmsa_tool_seconds() - begin < most_seconds)) {
        ok = run_once(&b, phase, &times[repeats++]);
    }
    if (ok) {
        qsort(times, (size_t)repeats, sizeof *times, compare_doubles);
        *milliseconds = times[repeats / 2];
    }
    for (int i = 0; i < b.memory_count; i++)
        free(b.memory[i]);
    attention_close(&b.attention);
    return ok;
}
