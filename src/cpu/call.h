/* A call under way, and the functions that a variant (a number type and an instruction set) provides. */
#ifndef FMSA_CPU_CALL_H
#define FMSA_CPU_CALL_H

#ifdef _OPENMP
#include <omp.h>
#endif

#include "plan.h"

typedef struct fmsa_cpu_call {
    const fmsa_problem *problem;
    fmsa_operation operation;
    const fmsa_tensors *tensors; /* outputs that are not wanted are NULL here */
    fmsa_cpu_plan plan;
    fmsa_cpu_shared shared;
    fmsa_cpu_schedule schedule; /* in sparse mode, of the operations that read it */
    char *thread_memory;
} fmsa_cpu_call;

/* Each function does what it is named for, completely; nothing can fail in it. */
typedef struct fmsa_cpu_variant {
    const char *name;
    void (*select)(const fmsa_cpu_call *call);
    void (*forward)(const fmsa_cpu_call *call);
    void (*backward)(const fmsa_cpu_call *call);
} fmsa_cpu_variant;

/* Number of the calling thread in its parallel region. */
static inline int fmsa_cpu_this_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Memory of one thread of the parallel region. */
static inline fmsa_cpu_arena fmsa_cpu_thread_arena(const fmsa_cpu_call *call, int thread) {
    return (fmsa_cpu_arena){call->thread_memory + (size_t)thread * call->plan.thread_bytes, 0};
}

/* Rows of chunk number `chunk`, and one past them. */
static inline int64_t fmsa_cpu_chunk_begin(const fmsa_cpu_call *call, int64_t chunk) {
    return chunk * call->plan.chunk_rows;
}

static inline int64_t fmsa_cpu_chunk_end(const fmsa_cpu_call *call, int64_t chunk) {
    const int64_t end = (chunk + 1) * call->plan.chunk_rows;
    return end < call->problem->config.total_q ? end : call->problem->config.total_q;
}

/* The rows of a segment that attend to a block through a proxy head. positions and memory belong to the chunk. */
static inline fmsa_cpu_list fmsa_cpu_rows_of_block(const fmsa_cpu_call *call, const fmsa_cpu_segment *segment,
                                                   int64_t chunk, int32_t proxy_head, int32_t block,
                                                   const int32_t *positions, int32_t *memory) {
    const int64_t begin = fmsa_cpu_chunk_begin(call, chunk), end = fmsa_cpu_chunk_end(call, chunk);
    if (call->problem->config.mode == FMSA_MODE_SPARSE) {
        return fmsa_cpu_sparse_list(call->problem, &call->schedule, proxy_head, block, begin, end);
    }
    return fmsa_cpu_dense_list(call->problem, segment, block, begin, positions, memory);
}

#endif
