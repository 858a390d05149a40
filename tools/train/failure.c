#include "failure.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char sentence[1024];

bool train_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return false;
}

const char *train_failure(void) {
    return sentence;
}

void *train_allocate(long long count, unsigned long element_bytes) {
    const size_t alignment = 64;
    const size_t bytes = ((size_t)count * element_bytes + alignment) / alignment * alignment;
    void *memory = aligned_alloc(alignment, bytes);
    if (memory == NULL) {
        fprintf(stderr, "flashmsa train: out of memory: %.1f MiB more are needed; try a smaller --batch or --context\n",
                (double)bytes / (1 << 20));
        exit(1);
    }
    return memset(memory, 0, bytes);
}
