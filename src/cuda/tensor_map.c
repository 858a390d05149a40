/* The driver's function is asked for at run time, because nothing of the driver is linked: the library must load on
 * machines without one. */
#include "tensor_map.h"

#include <stdatomic.h>

#include "launch.h"

typedef CUresult encode_function(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static fmsa_status find_encode(encode_function **encode) {
    static _Atomic(encode_function *) found;
    *encode = atomic_load_explicit(&found, memory_order_relaxed);
    if (*encode != NULL) return FMSA_OK;
    enum cudaDriverEntryPointQueryResult result;
    void *entry = NULL;
    FMSA_TRY(fmsa_cuda_status(
        "finding cuTensorMapEncodeTiled",
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result)));
    if (result != cudaDriverEntryPointSuccess || entry == NULL) {
        return fmsa_fail(FMSA_ERROR_DEVICE, "the driver has no cuTensorMapEncodeTiled; it needs CUDA 12.0 or later");
    }
    *encode = (encode_function *)entry;
    atomic_store_explicit(&found, *encode, memory_order_relaxed);
    return FMSA_OK;
}

fmsa_status fmsa_tensor_map(CUtensorMap *map, const void *data, const fmsa_tensor_map_shape *shape) {
    encode_function *encode;
    FMSA_TRY(find_encode(&encode));
    cuuint64_t size[FMSA_TENSOR_MAP_RANK], stride[FMSA_TENSOR_MAP_RANK];
    cuuint32_t box[FMSA_TENSOR_MAP_RANK], step[FMSA_TENSOR_MAP_RANK];
    for (int i = 0; i < shape->rank; i++) {
        size[i] = (cuuint64_t)shape->size[i];
        box[i] = (cuuint32_t)shape->box[i];
        step[i] = 1;
        if (i > 0) stride[i - 1] = (cuuint64_t)(shape->stride[i] * shape->element_bytes);
    }
    const CUresult result = encode(map, shape->type, (cuuint32_t)shape->rank, (void *)(uintptr_t)data, size, stride,
                                   box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, shape->swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FMSA_OK;
    return fmsa_fail(FMSA_ERROR_CUDA, "cuTensorMapEncodeTiled refused a tensor (error %d)", (int)result);
}
