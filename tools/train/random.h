/* Random numbers that are the same on every machine: xoshiro256** seeded by splitmix64. The state is plain numbers, so
 * that a checkpoint can hold it. */
#ifndef TRAIN_RANDOM_H
#define TRAIN_RANDOM_H

#include <stdint.h>

typedef struct random_state {
    uint64_t word[4];
} random_state;

void random_seed(random_state *state, uint64_t seed);
uint64_t random_next(random_state *state);

/* Uniform in 0 ... bound - 1; bound is positive and far below 2^64. */
int64_t random_below(random_state *state, int64_t bound);

/* Standard normal. */
double random_normal(random_state *state);

#endif
