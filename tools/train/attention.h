/* The model's attention through the public flashmsa API: one configuration for a batch of sequences of equal length,
 * with the memory that its operations need. */
#ifndef TRAIN_ATTENTION_H
#define TRAIN_ATTENTION_H

#include <stdbool.h>

#include "real.h"

/* How the model attends and what it learns from it. */
typedef enum attention_phase {
    PHASE_DENSE = 0,  /* dense attention, no proxies: the model that MSA is compared with */
    PHASE_WARMUP = 1, /* dense attention; the proxies learn from all of it */
    PHASE_SPARSE = 2  /* attention over the blocks the proxies choose; they learn from those */
} attention_phase;

typedef struct attention_shape {
    int32_t heads, kv_heads, head_dim;
    int32_t proxy_heads, proxy_kv_heads, proxy_head_dim;
    int32_t block_size, top_k;
} attention_shape;

typedef struct attention {
    fmsa_config config; /* of sparse mode */
    int32_t *boundaries;
    void *workspace; /* enough for every operation in both modes */
    size_t workspace_bytes;
    size_t schedule_bytes;
} attention;

/* For batch sequences of context tokens; fails with the library's sentence when it cannot run the shape. */
bool attention_open(attention *attention, const attention_shape *shape, int32_t batch, int32_t context);
void attention_close(attention *attention);

/* Runs one operation, dense in every phase but the sparse one. */
bool attention_run(const attention *attention, attention_phase phase, fmsa_operation operation,
                   const fmsa_tensors *tensors);

#endif
