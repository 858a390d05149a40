/* The select operation of the portable family. */
#ifndef FMSA_CUDA_SELECT_H
#define FMSA_CUDA_SELECT_H

#include <cuda_runtime_api.h>

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* q_proxy, k_proxy -> tensors->block_indices. Works through the query rows in chunks that config.scratch_limit bounds.
 */
fmsa_status fmsa_portable_select(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                 size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_select_workspace_bytes(const fmsa_problem *problem, size_t *bytes);

#ifdef __cplusplus
}
#endif

#endif
