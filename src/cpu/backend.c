/* The CPU backend: memory, the choice of the variant, and the table.
 *
 * Every operation walks *tasks*, a chunk of query rows and a set of heads, of which each row belongs to one task. The
 * key blocks pass by in ascending order and meet the rows of the chunk that chose them (so keys are packed once for
 * many rows, as in a KV-outer kernel), while softmax and query gradients stay in the task's memory (so nothing has to
 * be merged, as in a Q-outer kernel). Gradients of keys are the one thing tasks share: see backward.c. */
#include "backend.h"

#include <stdio.h>
#include <string.h>

#include "call.h"
#include "schedule.h"
#include "status.h"

/* ---- Variants, best last. ---- */

#define DECLARE_VARIANT(variant)                                                                                       \
    void fmsa_cpu_select_##variant(const fmsa_cpu_call *call);                                                         \
    void fmsa_cpu_forward_##variant(const fmsa_cpu_call *call);                                                        \
    void fmsa_cpu_backward_##variant(const fmsa_cpu_call *call);
#define VARIANT(variant, name)                                                                                         \
    {name, fmsa_cpu_select_##variant, fmsa_cpu_forward_##variant, fmsa_cpu_backward_##variant}

DECLARE_VARIANT(f32_baseline)
DECLARE_VARIANT(f64_baseline)
static const fmsa_cpu_variant f32_baseline = VARIANT(f32_baseline, "baseline");
static const fmsa_cpu_variant f64_baseline = VARIANT(f64_baseline, "baseline");

#ifdef FMSA_CPU_X86

DECLARE_VARIANT(f32_avx2)
DECLARE_VARIANT(f32_avx512)
DECLARE_VARIANT(f64_avx2)
static const fmsa_cpu_variant f32_avx2 = VARIANT(f32_avx2, "AVX2");
static const fmsa_cpu_variant f32_avx512 = VARIANT(f32_avx512, "AVX-512");
static const fmsa_cpu_variant f64_avx2 = VARIANT(f64_avx2, "AVX2");

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static const fmsa_cpu_variant *choose_variant(fmsa_dtype dtype) {
    if (dtype == FMSA_DTYPE_FP64) return has_avx2() ? &f64_avx2 : &f64_baseline;
    if (has_avx512()) return &f32_avx512;
    return has_avx2() ? &f32_avx2 : &f32_baseline;
}

#else

static const fmsa_cpu_variant *choose_variant(fmsa_dtype dtype) {
    return dtype == FMSA_DTYPE_FP64 ? &f64_baseline : &f32_baseline;
}

#endif

/* ---- Memory. ---- */

static fmsa_status schedule_bytes(const fmsa_problem *problem, size_t *bytes) {
    fmsa_cpu_arena arena = {NULL, 0};
    fmsa_cpu_take_schedule(problem, &arena);
    *bytes = arena.used;
    return FMSA_OK;
}

static fmsa_status workspace_bytes(const fmsa_problem *problem, fmsa_operation operation, size_t *bytes) {
    fmsa_cpu_plan plan;
    const fmsa_status status = fmsa_cpu_make_plan(problem, operation, &plan);
    if (status == FMSA_OK) *bytes = plan.total_bytes;
    return status;
}

/* Checks what only the data shows, and lays out the memory. */
static fmsa_status open_call(fmsa_cpu_call *call, fmsa_operation operation, const fmsa_problem *problem,
                             const fmsa_tensors *tensors, void *workspace) {
    fmsa_status status = fmsa_problem_check_fragments(problem);
    if (status != FMSA_OK) return status;
    memset(call, 0, sizeof *call);
    call->problem = problem;
    call->operation = operation;
    call->tensors = tensors;
    status = fmsa_cpu_make_plan(problem, operation, &call->plan);
    if (status != FMSA_OK) return status;
    fmsa_cpu_arena arena = {workspace, 0};
    call->shared = fmsa_cpu_take_shared(problem, operation, call->plan.num_tasks, &arena);
    call->thread_memory = (char *)workspace + call->plan.shared_bytes;
    if (problem->config.mode == FMSA_MODE_SPARSE && operation != FMSA_OPERATION_SELECT) {
        fmsa_cpu_arena schedule = {tensors->schedule, 0};
        call->schedule = fmsa_cpu_take_schedule(problem, &schedule);
        if (operation != FMSA_OPERATION_SCHEDULE && *call->schedule.stamp != fmsa_cpu_schedule_stamp(problem)) {
            return fmsa_fail(FMSA_ERROR_ARGUMENT,
                             "schedule was not made by fmsa_schedule for these shapes and fragments");
        }
    }
    fmsa_cpu_fill_geometry(problem, &call->shared.geometry);
    return FMSA_OK;
}

/* ---- Operations. ---- */

static fmsa_status run_select(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                              size_t workspace_bytes) {
    (void)workspace_bytes;
    fmsa_cpu_call call;
    const fmsa_status status = open_call(&call, FMSA_OPERATION_SELECT, problem, tensors, workspace);
    if (status == FMSA_OK) choose_variant(problem->config.dtype)->select(&call);
    return status;
}

static fmsa_status run_schedule(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                size_t workspace_bytes) {
    (void)workspace_bytes;
    fmsa_cpu_call call;
    const fmsa_status status = open_call(&call, FMSA_OPERATION_SCHEDULE, problem, tensors, workspace);
    return status == FMSA_OK ? fmsa_cpu_schedule_run(&call) : status;
}

static fmsa_status run_forward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                               size_t workspace_bytes) {
    (void)workspace_bytes;
    fmsa_cpu_call call;
    const fmsa_status status = open_call(&call, FMSA_OPERATION_FORWARD, problem, tensors, workspace);
    if (status == FMSA_OK) choose_variant(problem->config.dtype)->forward(&call);
    return status;
}

/* The three backward operations are one function, which skips what is not wanted. */
static fmsa_status run_backward_of(fmsa_operation operation, const fmsa_problem *problem, const fmsa_tensors *tensors,
                                   void *workspace) {
    fmsa_cpu_call call;
    const fmsa_status status = open_call(&call, operation, problem, tensors, workspace);
    const bool wanted = tensors->dq.data != NULL || tensors->dk.data != NULL || tensors->dv.data != NULL ||
                        tensors->dq_proxy.data != NULL || tensors->dk_proxy.data != NULL || tensors->kl != NULL;
    if (status == FMSA_OK && wanted) choose_variant(problem->config.dtype)->backward(&call);
    return status;
}

static fmsa_status run_proxy_loss(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                  size_t workspace_bytes) {
    (void)workspace_bytes;
    fmsa_tensors of_proxies = *tensors;
    of_proxies.dq.data = of_proxies.dk.data = of_proxies.dv.data = NULL;
    return run_backward_of(FMSA_OPERATION_PROXY_LOSS, problem, &of_proxies, workspace);
}

static fmsa_status run_backward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                size_t workspace_bytes) {
    (void)workspace_bytes;
    fmsa_tensors of_main = *tensors;
    of_main.dq_proxy.data = of_main.dk_proxy.data = of_main.kl = NULL;
    return run_backward_of(FMSA_OPERATION_BACKWARD, problem, &of_main, workspace);
}

static fmsa_status run_backward_with_proxy(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                           size_t workspace_bytes) {
    (void)workspace_bytes;
    return run_backward_of(FMSA_OPERATION_BACKWARD_WITH_PROXY, problem, tensors, workspace);
}

/* ---- The device. ---- */

static int32_t device_count(void) {
    return 1;
}

static void read_cpu_name(char *name, size_t size) {
    snprintf(name, size, "CPU");
#ifdef FMSA_CPU_X86
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL) return;
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        snprintf(name, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    fclose(file);
#endif
}

static fmsa_status device_description(int32_t index, char *text, size_t size) {
    (void)index;
    char name[128];
    read_cpu_name(name, sizeof name);
    snprintf(text, size, "%s, kernels: %s (fp64: %s)", name, choose_variant(FMSA_DTYPE_FP32)->name,
             choose_variant(FMSA_DTYPE_FP64)->name);
    return FMSA_OK;
}

const fmsa_backend fmsa_cpu_backend = {
    .name = "cpu",
    .schedule_bytes = schedule_bytes,
    .workspace_bytes = workspace_bytes,
    .run = {[FMSA_OPERATION_SELECT] = run_select,
            [FMSA_OPERATION_SCHEDULE] = run_schedule,
            [FMSA_OPERATION_FORWARD] = run_forward,
            [FMSA_OPERATION_PROXY_LOSS] = run_proxy_loss,
            [FMSA_OPERATION_BACKWARD] = run_backward,
            [FMSA_OPERATION_BACKWARD_WITH_PROXY] = run_backward_with_proxy},
    .device_count = device_count,
    .device_description = device_description,
    .memory_alignment = FMSA_CPU_ALIGNMENT,
    .tensor_alignment = 1,
};
