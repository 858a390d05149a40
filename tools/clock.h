/* Wall-clock time. */
#ifndef FMSA_TOOL_CLOCK_H
#define FMSA_TOOL_CLOCK_H

#include <time.h>

static inline double fmsa_tool_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
