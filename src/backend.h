/* The table of operations that each backend fills, and the list of backends in this build. */
#ifndef FMSA_BACKEND_H
#define FMSA_BACKEND_H

#include "problem.h"

typedef struct fmsa_backend {
    const char *name;

    /* NULL, or refuses with a sentence what this backend, or the device of problem->config, cannot run. */
    fmsa_status (*check)(const fmsa_problem *problem, fmsa_operation operation);

    /* From shapes, flags and scratch_limit alone. May refuse a scratch_limit below the least possible. */
    fmsa_status (*schedule_bytes)(const fmsa_problem *problem, size_t *bytes);
    fmsa_status (*workspace_bytes)(const fmsa_problem *problem, fmsa_operation operation, size_t *bytes);

    /* One function for each fmsa_operation, called with tensors, schedule and workspace already checked. What only the
     * data shows (fragments, block indices) is the backend's to check, before it writes any output. */
    fmsa_status (*run[FMSA_OPERATION_COUNT])(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                             size_t workspace_bytes);

    int32_t (*device_count)(void);
    fmsa_status (*device_description)(int32_t index, char *text, size_t size);

    size_t memory_alignment; /* bytes, of workspace and schedule; a power of 2 */
    size_t tensor_alignment; /* bytes, of data and strides of tensors with a head dimension; a power of 2 */
} fmsa_backend;

extern const fmsa_backend fmsa_cpu_backend;
#ifdef FMSA_WITH_CUDA
extern const fmsa_backend fmsa_cuda_backend;
#endif

#endif
