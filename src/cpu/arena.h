/* Memory of the caller, handed out in order. With base NULL it only adds up, so that the code that lays memory out
 * also says how much is needed. */
#ifndef FMSA_CPU_ARENA_H
#define FMSA_CPU_ARENA_H

#include <stddef.h>
#include <stdint.h>

enum { FMSA_CPU_ALIGNMENT = 64 };

typedef struct fmsa_cpu_arena {
    char *base;
    size_t used;
} fmsa_cpu_arena;

static inline void *fmsa_cpu_take(fmsa_cpu_arena *arena, int64_t count, size_t element_bytes) {
    void *memory = arena->base == NULL ? NULL : arena->base + arena->used;
    const size_t bytes = (size_t)count * element_bytes;
    arena->used += (bytes + FMSA_CPU_ALIGNMENT - 1) / FMSA_CPU_ALIGNMENT * FMSA_CPU_ALIGNMENT;
    return memory;
}

#endif
