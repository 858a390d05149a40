#include "device.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FMSA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define HAS_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAS_ADDRESS_SANITIZER 1
#endif
#endif
#ifdef HAS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

/* An allocation is [header and leading guard | memory | trailing guard]; the header is the first bytes. The leading
 * guard and the alignment are equal, so memory is aligned as the whole is. */
enum { GUARD_BYTES = 4096, ALIGNMENT = 256 };

typedef struct {
    size_t bytes;
} header;

static void refuse(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static const unsigned char poison[2] = {0xff, 0x7f};

void fmsa_tool_poison_host(void *memory, size_t bytes) {
    unsigned char *byte = memory;
    for (size_t i = 0; i + 1 < bytes; i += 2)
        memcpy(byte + i, poison, 2);
    if (bytes % 2) byte[bytes - 1] = poison[0];
}

/* All is poison when it begins with poison, and every byte equals the one two before. */
bool fmsa_tool_is_poison(const void *memory, size_t bytes) {
    const unsigned char *byte = memory;
    if (bytes <= 2) return memcmp(byte, poison, bytes) == 0;
    return memcmp(byte, poison, 2) == 0 && memcmp(byte, byte + 2, bytes - 2) == 0;
}

/* ---- The raw device. ---- */

#ifdef FMSA_WITH_CUDA
static void check_cuda(cudaError_t error, const char *what) {
    if (error != cudaSuccess) refuse(what, cudaGetErrorString(error));
}
#endif

static void *raw_alloc(const fmsa_tool_device *device, size_t bytes) {
    void *memory = NULL;
#ifdef FMSA_WITH_CUDA
    if (device->kind == FMSA_DEVICE_CUDA) {
        check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
        return memory;
    }
#endif
    (void)device;
    memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (memory == NULL) refuse("allocation", "out of memory");
    return memory;
}

static void raw_free(const fmsa_tool_device *device, void *memory) {
#ifdef FMSA_WITH_CUDA
    if (device->kind == FMSA_DEVICE_CUDA) {
        check_cuda(cudaFree(memory), "cudaFree");
        return;
    }
#endif
    (void)device;
    free(memory);
}

void fmsa_tool_write(const fmsa_tool_device *device, void *destination, const void *host, size_t bytes) {
    if (bytes == 0) return;
#ifdef FMSA_WITH_CUDA
    if (device->kind == FMSA_DEVICE_CUDA) {
        check_cuda(cudaMemcpy(destination, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
        check_cuda(cudaDeviceSynchronize(), "cudaMemcpy to the device");
        return;
    }
#endif
    (void)device;
    memcpy(destination, host, bytes);
}

void fmsa_tool_read(const fmsa_tool_device *device, void *host, const void *source, size_t bytes) {
    if (bytes == 0) return;
#ifdef FMSA_WITH_CUDA
    if (device->kind == FMSA_DEVICE_CUDA) {
        check_cuda(cudaDeviceSynchronize(), "work before cudaMemcpy from the device");
        check_cuda(cudaMemcpy(host, source, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
        return;
    }
#endif
    (void)device;
    memcpy(host, source, bytes);
}

bool fmsa_tool_synchronise(const fmsa_tool_device *device, const char **error) {
    *error = "";
#ifdef FMSA_WITH_CUDA
    if (device->kind == FMSA_DEVICE_CUDA) {
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) *error = cudaGetErrorString(status);
        return status == cudaSuccess;
    }
#endif
    (void)device;
    return true;
}

bool fmsa_tool_device_open(fmsa_tool_device *device, fmsa_device kind) {
    device->kind = kind;
    return fmsa_device_count(kind) > 0;
}

/* ---- Guarded allocations. ---- */

/* AddressSanitizer stops at any access to a guard zone, even one that changes nothing; we alone may open them. */
static void close_guards(const fmsa_tool_device *device, const void *memory, size_t bytes) {
#ifdef HAS_ADDRESS_SANITIZER
    if (device->kind != FMSA_DEVICE_CPU) return;
    ASAN_POISON_MEMORY_REGION((const char *)memory - GUARD_BYTES, GUARD_BYTES);
    ASAN_POISON_MEMORY_REGION((const char *)memory + bytes, GUARD_BYTES);
#else
    (void)device;
    (void)memory;
    (void)bytes;
#endif
}

/* Opens both guards and returns what the header says of the memory. */
static header open_guards(const fmsa_tool_device *device, const void *memory) {
    header h;
#ifdef HAS_ADDRESS_SANITIZER
    if (device->kind == FMSA_DEVICE_CPU) ASAN_UNPOISON_MEMORY_REGION((const char *)memory - GUARD_BYTES, GUARD_BYTES);
#endif
    fmsa_tool_read(device, &h, (const char *)memory - GUARD_BYTES, sizeof h);
#ifdef HAS_ADDRESS_SANITIZER
    if (device->kind == FMSA_DEVICE_CPU) ASAN_UNPOISON_MEMORY_REGION((const char *)memory + h.bytes, GUARD_BYTES);
#endif
    return h;
}

void *fmsa_tool_alloc(const fmsa_tool_device *device, size_t bytes) {
    char *base = raw_alloc(device, bytes + 2 * GUARD_BYTES);
    char *memory = base + GUARD_BYTES;
    const header h = {bytes};
    char guard[GUARD_BYTES];
    fmsa_tool_poison_host(guard, sizeof guard);
    fmsa_tool_write(device, base, guard, sizeof guard);
    fmsa_tool_write(device, base, &h, sizeof h);
    fmsa_tool_write(device, memory + bytes, guard, sizeof guard);
    close_guards(device, memory, bytes);
    fmsa_tool_poison(device, memory);
    return memory;
}

void fmsa_tool_free(const fmsa_tool_device *device, void *memory) {
    if (memory == NULL) return;
    open_guards(device, memory);
    raw_free(device, (char *)memory - GUARD_BYTES);
}

void fmsa_tool_poison(const fmsa_tool_device *device, void *memory) {
    const size_t bytes = open_guards(device, memory).bytes;
    close_guards(device, memory, bytes);
    if (device->kind == FMSA_DEVICE_CPU) {
        fmsa_tool_poison_host(memory, bytes);
        return;
    }
    void *host = malloc(bytes > 0 ? bytes : 1);
    if (host == NULL) refuse("poison", "out of memory");
    fmsa_tool_poison_host(host, bytes);
    fmsa_tool_write(device, memory, host, bytes);
    free(host);
}

bool fmsa_tool_guards_intact(const fmsa_tool_device *device, const void *memory) {
    const size_t bytes = open_guards(device, memory).bytes;
    char before[GUARD_BYTES], behind[GUARD_BYTES];
    fmsa_tool_read(device, before, (const char *)memory - GUARD_BYTES, sizeof before);
    fmsa_tool_read(device, behind, (const char *)memory + bytes, sizeof behind);
    close_guards(device, memory, bytes);
    return fmsa_tool_is_poison(before + sizeof(header), sizeof before - sizeof(header)) &&
           fmsa_tool_is_poison(behind, sizeof behind);
}
