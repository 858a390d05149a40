/* Memory on a device, for tools and tests that run on the CPU and on CUDA alike. Every allocation lies between guard
 * zones and starts out poisoned: its 16-bit words are 0x7fff, which is NaN in every floating-point type and a block
 * index that no call accepts, so that what is read before it is written, or beyond its end, is noticed. */
#ifndef FMSA_TOOL_DEVICE_H
#define FMSA_TOOL_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "flashmsa.h"

typedef struct fmsa_tool_device {
    fmsa_device kind;
} fmsa_tool_device;

/* The device of a kind; false when this build or this machine has none. CUDA: the current one. */
bool fmsa_tool_device_open(fmsa_tool_device *device, fmsa_device kind);

/* Aligned to 256 bytes. The calls below exit the program with a message when the device refuses. */
void *fmsa_tool_alloc(const fmsa_tool_device *device, size_t bytes);
void fmsa_tool_free(const fmsa_tool_device *device, void *memory);

/* Copies; they wait until the bytes are there. */
void fmsa_tool_write(const fmsa_tool_device *device, void *destination, const void *host, size_t bytes);
void fmsa_tool_read(const fmsa_tool_device *device, void *host, const void *source, size_t bytes);

/* Poisons an allocation again. */
void fmsa_tool_poison(const fmsa_tool_device *device, void *memory);

/* Whether the guard zones around an allocation are as they were. */
bool fmsa_tool_guards_intact(const fmsa_tool_device *device, const void *memory);

/* Waits for all work; false, with the device's words for it, when some of it failed. */
bool fmsa_tool_synchronise(const fmsa_tool_device *device, const char **error);

/* Poison for host arrays, and whether bytes still are. */
void fmsa_tool_poison_host(void *memory, size_t bytes);
bool fmsa_tool_is_poison(const void *memory, size_t bytes);

#endif
