/* The kernel family of compute capability 9.0 (Hopper): TMA, wgmma. Each operation says which problems it takes; the
 * portable family has the others. Results agree within rounding, and everything portable.h says holds here too. */
#ifndef FMSA_CUDA_SM90_H
#define FMSA_CUDA_SM90_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FMSA_SM90_DECLARE(operation)                                                                                   \
    bool fmsa_sm90_takes_##operation(const fmsa_problem *problem);                                                     \
    fmsa_status fmsa_sm90_##operation##_workspace_bytes(const fmsa_problem *problem, size_t *bytes);                   \
    fmsa_status fmsa_sm90_##operation(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,       \
                                      size_t workspace_bytes, cudaStream_t stream);
FMSA_SM90_DECLARE(select)
FMSA_SM90_DECLARE(forward)
FMSA_SM90_DECLARE(proxy_loss)
FMSA_SM90_DECLARE(backward)
FMSA_SM90_DECLARE(backward_with_proxy)
#undef FMSA_SM90_DECLARE

#ifdef __cplusplus
}
#endif

#endif
