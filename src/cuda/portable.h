/* The kernel family that runs on every card from compute capability 8.0 on. Work for a bounded number of query rows at
 * a time (a chunk) is kept in the workspace, which scratch_limit bounds. In sparse mode the geometry and the lists come
 * from tensors->schedule; in dense mode the geometry is built in the workspace. */
#ifndef FMSA_CUDA_PORTABLE_H
#define FMSA_CUDA_PORTABLE_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From shapes, flags and scratch_limit alone; FMSA_ERROR_WORKSPACE when scratch_limit is below the least possible. */
fmsa_status fmsa_portable_forward_workspace_bytes(const fmsa_problem *problem, size_t *bytes);
fmsa_status fmsa_portable_proxy_loss_workspace_bytes(const fmsa_problem *problem, size_t *bytes);
fmsa_status fmsa_portable_backward_workspace_bytes(const fmsa_problem *problem, size_t *bytes);
fmsa_status fmsa_portable_backward_with_proxy_workspace_bytes(const fmsa_problem *problem, size_t *bytes);

fmsa_status fmsa_portable_forward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                  size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_proxy_loss(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                     size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_backward(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                   size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_backward_with_proxy(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                              size_t workspace_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
