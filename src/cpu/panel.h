/* Sizes of the panels in scratch memory; the same for every variant, so that a workspace's size does not depend on the
 * machine's instruction set. */
#ifndef FMSA_CPU_PANEL_H
#define FMSA_CPU_PANEL_H

#include <stdint.h>

enum {
    FMSA_CPU_PANEL = 16,      /* columns are padded to a multiple of this */
    FMSA_CPU_TILE_KEYS = 128, /* keys handled at once, at most: a larger block is cut */
    FMSA_CPU_TILE_ROWS = 128, /* rows (of a token and a head) handled at once */
    FMSA_CPU_TILE_TOKENS = 128
};

static inline int64_t fmsa_cpu_padded(int64_t columns) {
    return (columns + FMSA_CPU_PANEL - 1) / FMSA_CPU_PANEL * FMSA_CPU_PANEL;
}

/* Distance between rows of a panel: an odd number of 16-element pieces, so that rows do not fall into one cache set. */
static inline int64_t fmsa_cpu_leading(int64_t columns) {
    const int64_t padded = fmsa_cpu_padded(columns);
    return padded / FMSA_CPU_PANEL % 2 == 1 ? padded : padded + FMSA_CPU_PANEL;
}

#endif
