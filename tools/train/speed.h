/* The time that the attention itself takes, apart from the model. */
#ifndef TRAIN_SPEED_H
#define TRAIN_SPEED_H

#include "attention.h"

/* Median milliseconds of forward and backward over one sequence of random queries, keys and values: in the sparse phase
 * with the selection, the schedule and the proxies' gradients, in the dense phase with none of these. */
bool measure_attention(const attention_shape *shape, int32_t context, attention_phase phase, double *milliseconds);

#endif
