/* What the operations of one variant share: key blocks, cut into tiles. */
#ifndef FMSA_CPU_KERNELS_H
#define FMSA_CPU_KERNELS_H

#include "call.h"
#include "matrix.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* A piece of a key block. */
typedef struct key_tile {
    int64_t row;      /* first key row */
    int64_t position; /* of that key in its document */
    int64_t keys;
} key_tile;

static inline int64_t tiles_of_block(const fmsa_cpu_call *call, int32_t block) {
    return fmsa_ceil_div(call->shared.geometry.block_keys[block], fmsa_cpu_tile_keys(call->problem));
}

static inline key_tile tile_of_block(const fmsa_cpu_call *call, int32_t first_block, int32_t block, int64_t tile) {
    const int64_t step = fmsa_cpu_tile_keys(call->problem), offset = tile * step;
    return (key_tile){call->shared.geometry.block_k_begin[block] + offset,
                      (int64_t)(block - first_block) * call->problem->config.block_size + offset,
                      smaller(step, call->shared.geometry.block_keys[block] - offset)};
}

/* Keys of a tile that some row of a list sees; 0 or less when none. */
static inline int64_t keys_seen(const key_tile *tile, const fmsa_cpu_list *list, int64_t chunk_begin,
                                const int32_t *positions) {
    int64_t last = -1;
    for (int64_t i = 0; i < list->count; i++) {
        const int64_t position = positions[list->rows[i] - chunk_begin];
        if (position > last) last = position;
    }
    return smaller(tile->keys, last + 1 - tile->position);
}

/* Keys of a tile that a row at a position sees. */
static inline int64_t keys_visible(const key_tile *tile, int64_t position) {
    const int64_t keys = smaller(tile->keys, position + 1 - tile->position);
    return keys > 0 ? keys : 0;
}

#endif
