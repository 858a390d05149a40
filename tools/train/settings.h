/* Everything that decides the numbers of a run. A checkpoint holds it, so that a resumed run needs no other option. */
#ifndef TRAIN_SETTINGS_H
#define TRAIN_SETTINGS_H

#include "model.h"

/* Plain numbers without padding, for the checkpoint. */
typedef struct train_settings {
    model_shape shape;
    int32_t batch;
    int32_t dense; /* 1: dense attention without proxies throughout */
    int64_t steps;
    int64_t warmup_steps;   /* the first of them, unless dense */
    int64_t evaluate_every; /* steps */
    int64_t seed;
    double warmup; /* share of the steps, from which warmup_steps follows */
    double learning_rate, kl_weight, weight_decay;
} train_settings;

/* The model of the demonstration: small enough to learn something in a minute on two cores. */
train_settings settings_default(void);

/* Whether a model can be built from them; the sentence of the failure names the option. */
bool settings_check(const train_settings *settings);

/* The phase of a step counted from 0. */
attention_phase settings_phase(const train_settings *settings, int64_t step);

/* "dense" or "msa". */
const char *settings_run_name(const train_settings *settings);

/* Key blocks of a whole sequence. */
int32_t settings_blocks(const train_settings *settings);

#endif
