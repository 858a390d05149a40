/* Descriptions of tensors for the TMA, made on the host and passed to kernels as __grid_constant__ parameters. */
#ifndef FMSA_CUDA_TENSOR_MAP_H
#define FMSA_CUDA_TENSOR_MAP_H

#include <cuda.h>
#include <stdint.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FMSA_TENSOR_MAP_RANK = 5 };

/* A tensor and the box of it that one copy moves. Dimension 0 is dense. */
typedef struct fmsa_tensor_map_shape {
    CUtensorMapDataType type;
    int32_t element_bytes;
    int32_t rank;                         /* 1 ... FMSA_TENSOR_MAP_RANK */
    int64_t size[FMSA_TENSOR_MAP_RANK];   /* elements; at least 1, less than 2^32 */
    int64_t stride[FMSA_TENSOR_MAP_RANK]; /* elements; stride[0] is not used; times element_bytes a multiple of 16 */
    int32_t box[FMSA_TENSOR_MAP_RANK];    /* elements, at most 256; box[0] * element_bytes a multiple of 16 */
    CUtensorMapSwizzle swizzle;           /* box[0] * element_bytes must not exceed its width */
} fmsa_tensor_map_shape;

/* Elements outside the tensor are read as 0 and not written. data is a multiple of 16 bytes. */
fmsa_status fmsa_tensor_map(CUtensorMap *map, const void *data, const fmsa_tensor_map_shape *shape);

#ifdef __cplusplus
}
#endif

#endif
