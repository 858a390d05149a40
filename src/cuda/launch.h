/* How kernels are started and CUDA's errors reported. The launchers are C functions; the kernels behind them are C++.
 */
#ifndef FMSA_CUDA_LAUNCH_H
#define FMSA_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "problem.h"
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* FMSA_OK, or FMSA_ERROR_CUDA with a sentence about `what` (a kernel's name, or "copying ..."). A failure is then also
 * the runtime's last error: it is taken from there, because it was ours. An error that another caller left there is
 * not touched, since only the code that our own call returned is looked at. */
fmsa_status fmsa_cuda_status(const char *what, cudaError_t error);

#ifdef __cplusplus
}

namespace fmsa {

/* Dynamic shared memory of a launch, and the most that any launch of the same kernel takes. The runtime keeps one limit
 * a kernel, which each launch sets anew: always to the same value, so that launches on other threads find theirs. */
struct shared_memory {
    size_t bytes, most;

    shared_memory(size_t always) : bytes(always), most(always) {
    }
    shared_memory(size_t bytes, size_t most) : bytes(bytes), most(most) {
    }
};

/* Starts a kernel. An empty grid starts nothing. close: see launch_close(). */
template <typename... Parameters, typename... Arguments>
fmsa_status launch_as(bool close, const char *name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                      shared_memory shared, cudaStream_t stream, Arguments... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return FMSA_OK;
    /* Without asking, a block gets 48 KB, its static shared memory included. */
    if (shared.most > 32 * 1024) {
        const fmsa_status status =
            fmsa_cuda_status(name, cudaFuncSetAttribute((const void *)kernel,
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared.most));
        if (status != FMSA_OK) return status;
    }
    cudaLaunchAttribute programmatic = {};
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared.bytes;
    config.stream = stream;
    config.attrs = &programmatic;
    config.numAttrs = close ? 1 : 0;
    return fmsa_cuda_status(name, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

/* After all that is before it in the stream. */
template <typename... Parameters, typename... Arguments>
fmsa_status launch(const char *name, void (*kernel)(Parameters...), dim3 grid, unsigned threads, shared_memory shared,
                   cudaStream_t stream, Arguments... arguments) {
    return launch_as(false, name, kernel, grid, threads, shared, stream, arguments...);
}

/* Of a kernel that calls wait_for_grid_before() (sm90.cuh) before it needs what the one before it leaves, and in any
 * case before it ends: it may start while that one ends. What comes after both finds both complete. */
template <typename... Parameters, typename... Arguments>
fmsa_status launch_close(const char *name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                         shared_memory shared, cudaStream_t stream, Arguments... arguments) {
    return launch_as(true, name, kernel, grid, threads, shared, stream, arguments...);
}

} // namespace fmsa
#endif

/* Leaves the launcher with the status of a call that failed. */
#define FMSA_TRY(call)                                                                                                 \
    do {                                                                                                               \
        const fmsa_status try_status = (call);                                                                         \
        if (try_status != FMSA_OK) return try_status;                                                                  \
    } while (0)

/* Blocks of `threads` threads that cover count elements, for grid.x: at most 2^31 - 1, so a kernel that may meet more
 * elements strides over them. */
static inline unsigned fmsa_cuda_grid(int64_t count, int64_t threads) {
    const int64_t blocks = fmsa_ceil_div(count, threads);
    return (unsigned)(blocks < INT32_MAX ? blocks : INT32_MAX);
}

/* Memory handed out piece by piece: each piece is 256-byte aligned. Start with base NULL to learn the size alone. */
typedef struct fmsa_cuda_arena {
    char *base;
    size_t used;
} fmsa_cuda_arena;

static inline void *fmsa_cuda_take(fmsa_cuda_arena *arena, int64_t count, size_t element_bytes) {
    void *piece = arena->base == NULL ? NULL : arena->base + arena->used;
    arena->used += ((size_t)count * element_bytes + 255) & ~(size_t)255;
    return piece;
}

#endif
