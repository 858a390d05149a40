/* The CUDA backend: what it can run, on which card, and the choice of the kernel family. Every family computes the same
 * function; the portable one runs on all cards and takes what no other takes. */
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend.h"
#include "launch.h"
#include "portable.h"
#include "schedule.h"
#include "select.h"
#ifdef FMSA_WITH_SM90
#include "sm90.h"
#endif

enum { LEAST_CAPABILITY = 80, MAX_TOP_K = 128 };

/* ---- Errors -------------------------------------------------------------------------------------------------- */

fmsa_status fmsa_cuda_status(const char *what, cudaError_t error) {
    if (error == cudaSuccess) return FMSA_OK;
    if (cudaPeekAtLastError() == error) cudaGetLastError();
    return fmsa_fail(FMSA_ERROR_CUDA, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* ---- Devices ------------------------------------------------------------------------------------------------- */

static int32_t device_count(void) {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

/* Why there is no device: the driver is missing or too old, or it shows no card. */
static fmsa_status no_device(void) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0) {
        return fmsa_fail(FMSA_ERROR_DEVICE, "device is FMSA_DEVICE_CUDA; no NVIDIA driver was found on this machine");
    }
    if (driver / 1000 < CUDART_VERSION / 1000) {
        return fmsa_fail(FMSA_ERROR_DEVICE,
                         "device is FMSA_DEVICE_CUDA; the driver runs CUDA %d.%d, and this library needs one for CUDA "
                         "%d.0 or later",
                         driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000);
    }
    return fmsa_fail(FMSA_ERROR_DEVICE, "device is FMSA_DEVICE_CUDA; the driver shows no card");
}

static fmsa_status compute_capability(int device, int *capability) {
    int major, minor;
    FMSA_TRY(fmsa_cuda_status("reading the compute capability",
                              cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)));
    FMSA_TRY(fmsa_cuda_status("reading the compute capability",
                              cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)));
    *capability = major * 10 + minor;
    return FMSA_OK;
}

static fmsa_status check_device(int32_t index) {
    const int32_t count = device_count();
    if (count == 0) return no_device();
    int device = index, capability;
    if (index == -1) {
        FMSA_TRY(fmsa_cuda_status("reading the current device", cudaGetDevice(&device)));
    } else if (index >= count) {
        return fmsa_fail(FMSA_ERROR_ARGUMENT, "device_index is %d; there are %d CUDA devices, numbered from 0", index,
                         count);
    }
    FMSA_TRY(compute_capability(device, &capability));
    if (capability < LEAST_CAPABILITY) {
        return fmsa_fail(FMSA_ERROR_DEVICE,
                         "CUDA device %d has compute capability %d.%d; flashmsa needs 8.0 (Ampere) or later", device,
                         capability / 10, capability % 10);
    }
    return FMSA_OK;
}

static const char *family_name(int capability) {
    if (capability < LEAST_CAPABILITY) return "too old for flashmsa";
#ifdef FMSA_WITH_SM90
    if (capability == 90) return "Hopper kernels";
#endif
    return "portable kernels";
}

static fmsa_status device_description(int32_t index, char *text, size_t size) {
    struct cudaDeviceProp properties;
    FMSA_TRY(fmsa_cuda_status("reading the device's properties", cudaGetDeviceProperties(&properties, index)));
    const int capability = properties.major * 10 + properties.minor;
    snprintf(text, size, "%s, compute capability %d.%d, %.1f GiB, %s", properties.name, properties.major,
             properties.minor, (double)properties.totalGlobalMem / (1 << 30), family_name(capability));
    return FMSA_OK;
}

/* ---- What the kernels take ----------------------------------------------------------------------------------- */

static fmsa_status check_one_of(const char *name, int32_t value) {
    if (value == 64 || value == 128) return FMSA_OK;
    return fmsa_fail(FMSA_ERROR_UNSUPPORTED, "%s is %d; on CUDA it must be 64 or 128", name, value);
}

static fmsa_status check_shapes(const fmsa_problem *problem) {
    const fmsa_config *c = &problem->config;
    if (c->dtype == FMSA_DTYPE_FP64) {
        return fmsa_fail(FMSA_ERROR_UNSUPPORTED,
                         "dtype is FMSA_DTYPE_FP64; on CUDA it must be FMSA_DTYPE_BF16, FMSA_DTYPE_FP16 or "
                         "FMSA_DTYPE_FP32");
    }
    FMSA_TRY(check_one_of("head_dim", c->head_dim));
    FMSA_TRY(check_one_of("proxy_head_dim", c->proxy_head_dim));
    FMSA_TRY(check_one_of("block_size", c->block_size));
    if (c->mode == FMSA_MODE_SPARSE && c->top_k > MAX_TOP_K) {
        return fmsa_fail(FMSA_ERROR_UNSUPPORTED, "top_k is %d; on CUDA it must be at most %d", c->top_k, MAX_TOP_K);
    }
    /* Positions counted from block id 0 are 32-bit numbers in the kernels. */
    if ((problem->max_key_blocks + 1) * c->block_size > INT32_MAX) {
        return fmsa_fail(FMSA_ERROR_UNSUPPORTED,
                         "total_k is %lld and num_fragments is %lld; on CUDA total_k + num_fragments * block_size must "
                         "be less than %d",
                         (long long)c->total_k, (long long)c->num_fragments, INT32_MAX - c->block_size);
    }
    return FMSA_OK;
}

static fmsa_status check(const fmsa_problem *problem, fmsa_operation operation) {
    (void)operation;
    FMSA_TRY(check_shapes(problem));
    return check_device(problem->config.device_index);
}

/* ---- Kernel families ----------------------------------------------------------------------------------------- */

/* An operation as one family has it. */
typedef struct implementation {
    bool (*takes)(const fmsa_problem *); /* NULL: every problem */
    fmsa_status (*workspace_bytes)(const fmsa_problem *, size_t *);
    fmsa_status (*run)(const fmsa_problem *, const fmsa_tensors *, void *, size_t, cudaStream_t);
} implementation;

#define PORTABLE(name) {NULL, fmsa_portable_##name##_workspace_bytes, fmsa_portable_##name}
static const implementation portable[FMSA_OPERATION_COUNT] = {
    [FMSA_OPERATION_SELECT] = PORTABLE(select),
    [FMSA_OPERATION_SCHEDULE] = PORTABLE(schedule),
    [FMSA_OPERATION_FORWARD] = PORTABLE(forward),
    [FMSA_OPERATION_PROXY_LOSS] = PORTABLE(proxy_loss),
    [FMSA_OPERATION_BACKWARD] = PORTABLE(backward),
    [FMSA_OPERATION_BACKWARD_WITH_PROXY] = PORTABLE(backward_with_proxy),
};
#undef PORTABLE

#ifdef FMSA_WITH_SM90
#define SM90(name) {fmsa_sm90_takes_##name, fmsa_sm90_##name##_workspace_bytes, fmsa_sm90_##name}
/* The schedule is one for all families. */
static const implementation sm90[FMSA_OPERATION_COUNT] = {
    [FMSA_OPERATION_SELECT] = SM90(select),
    [FMSA_OPERATION_FORWARD] = SM90(forward),
    [FMSA_OPERATION_PROXY_LOSS] = SM90(proxy_loss),
    [FMSA_OPERATION_BACKWARD] = SM90(backward),
    [FMSA_OPERATION_BACKWARD_WITH_PROXY] = SM90(backward_with_proxy),
};
#undef SM90
#endif

/* The fastest implementation that takes the problem on its device. */
static fmsa_status choose(const fmsa_problem *problem, fmsa_operation operation, const implementation **chosen) {
    *chosen = &portable[operation];
#ifdef FMSA_WITH_SM90
    const fmsa_config *c = &problem->config;
    const implementation *hopper = &sm90[operation];
    if (hopper->run == NULL || (c->flags & FMSA_FLAG_PORTABLE) || !hopper->takes(problem)) return FMSA_OK;
    int device = c->device_index, capability;
    if (device == -1) FMSA_TRY(fmsa_cuda_status("reading the current device", cudaGetDevice(&device)));
    FMSA_TRY(compute_capability(device, &capability));
    if (capability == 90) *chosen = hopper;
#else
    (void)problem;
#endif
    return FMSA_OK;
}

/* ---- Operations ---------------------------------------------------------------------------------------------- */

/* Copies the fragments to the host and checks them there. */
static fmsa_status check_fragments(const fmsa_problem *problem, cudaStream_t stream) {
    const fmsa_config *c = &problem->config;
    const size_t count = (size_t)c->num_fragments, bytes = count * sizeof(int32_t);
    int32_t *copy = malloc(4 * bytes + 1);
    if (copy == NULL) return fmsa_fail(FMSA_ERROR_ARGUMENT, "num_fragments is %zu; no memory to check them", count);
    const int32_t *arrays[4] = {c->q_begin, c->q_end, c->k_begin, c->k_end};
    fmsa_status status = FMSA_OK;
    for (int i = 0; i < 4 && status == FMSA_OK; i++) {
        status = fmsa_cuda_status("copying the fragments to the host",
                                  cudaMemcpyAsync(copy + i * count, arrays[i], bytes, cudaMemcpyDeviceToHost, stream));
    }
    if (status == FMSA_OK) {
        status = fmsa_cuda_status("copying the fragments to the host", cudaStreamSynchronize(stream));
    }
    if (status == FMSA_OK) {
        fmsa_problem on_host = *problem;
        on_host.config.q_begin = copy;
        on_host.config.q_end = copy + count;
        on_host.config.k_begin = copy + 2 * count;
        on_host.config.k_end = copy + 3 * count;
        status = fmsa_problem_check_fragments(&on_host);
    }
    free(copy);
    return status;
}

/* Runs an operation on the caller's device and stream, and leaves the thread's current device as it was. */
static fmsa_status run(fmsa_operation operation, const fmsa_problem *problem, const fmsa_tensors *tensors,
                       void *workspace, size_t workspace_bytes) {
    const fmsa_config *c = &problem->config;
    const cudaStream_t stream = c->stream;
    const implementation *chosen;
    FMSA_TRY(choose(problem, operation, &chosen));
    int previous = 0;
    FMSA_TRY(fmsa_cuda_status("reading the current device", cudaGetDevice(&previous)));
    const bool moves = c->device_index != -1 && c->device_index != previous;
    if (moves) FMSA_TRY(fmsa_cuda_status("choosing the device", cudaSetDevice(c->device_index)));
    fmsa_status status = FMSA_OK;
    if (c->flags & FMSA_FLAG_CHECK_FRAGMENTS) status = check_fragments(problem, stream);
    if (status == FMSA_OK) status = chosen->run(problem, tensors, workspace, workspace_bytes, stream);
    if (moves) {
        const fmsa_status restored = fmsa_cuda_status("restoring the current device", cudaSetDevice(previous));
        if (status == FMSA_OK) status = restored;
    }
    return status;
}

#define OPERATION(name, operation)                                                                                     \
    static fmsa_status run_##name(const fmsa_problem *problem, const fmsa_tensors *tensors, void *workspace,           \
                                  size_t workspace_bytes) {                                                            \
        return run(operation, problem, tensors, workspace, workspace_bytes);                                           \
    }
OPERATION(select, FMSA_OPERATION_SELECT)
OPERATION(schedule, FMSA_OPERATION_SCHEDULE)
OPERATION(forward, FMSA_OPERATION_FORWARD)
OPERATION(proxy_loss, FMSA_OPERATION_PROXY_LOSS)
OPERATION(backward, FMSA_OPERATION_BACKWARD)
OPERATION(backward_with_proxy, FMSA_OPERATION_BACKWARD_WITH_PROXY)
#undef OPERATION

static fmsa_status schedule_bytes(const fmsa_problem *problem, size_t *bytes) {
    *bytes = fmsa_cuda_schedule_bytes(problem);
    return FMSA_OK;
}

static fmsa_status workspace_bytes(const fmsa_problem *problem, fmsa_operation operation, size_t *bytes) {
    const implementation *chosen;
    FMSA_TRY(choose(problem, operation, &chosen));
    return chosen->workspace_bytes(problem, bytes);
}

const fmsa_backend fmsa_cuda_backend = {
    .name = "cuda",
    .check = check,
    .schedule_bytes = schedule_bytes,
    .workspace_bytes = workspace_bytes,
    .run =
        {
            [FMSA_OPERATION_SELECT] = run_select,
            [FMSA_OPERATION_SCHEDULE] = run_schedule,
            [FMSA_OPERATION_FORWARD] = run_forward,
            [FMSA_OPERATION_PROXY_LOSS] = run_proxy_loss,
            [FMSA_OPERATION_BACKWARD] = run_backward,
            [FMSA_OPERATION_BACKWARD_WITH_PROXY] = run_backward_with_proxy,
        },
    .device_count = device_count,
    .device_description = device_description,
    .memory_alignment = 256,
    .tensor_alignment = 16,
};
