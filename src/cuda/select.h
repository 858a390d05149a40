/* The select operation of the portable family, and the exact top-k that all families share. */
#ifndef FMSA_CUDA_SELECT_H
#define FMSA_CUDA_SELECT_H

#include <cuda_runtime_api.h>

#include "problem.h"
#include "schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* q_proxy, k_proxy -> tensors->block_indices. Works through the query rows in chunks that config.scratch_limit bounds.
 */
fmsa_status fmsa_portable_select(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,
                                 size_t workspace_bytes, cudaStream_t stream);
fmsa_status fmsa_portable_select_workspace_bytes(const fmsa_problem *problem, size_t *bytes);

/* Scores of the query rows first ... first + tokens - 1: that of (row, proxy head, block of the row's document) is
 * data[((row - first) * Hp + head) * row_stride + block number]. row_stride is a multiple of 4. */
typedef struct fmsa_cuda_scores {
    float *data;
    int64_t row_stride;
    int32_t first, tokens;
} fmsa_cuda_scores;

/* Scores -> block_indices of these rows. Scores of blocks that a row does not see, or keeps whatever they are, are not
 * looked at. */
fmsa_status fmsa_cuda_top_k(const fmsa_problem *problem, fmsa_cuda_geometry geometry, fmsa_cuda_scores scores,
                            fmsa_tensor block_indices, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
