/* One training run: a model, its optimiser and all that changes from step to step. */
#ifndef TRAIN_RUN_H
#define TRAIN_RUN_H

#include "corpus.h"
#include "history.h"
#include "optimizer.h"
#include "random.h"

/* Sums since the last record. */
typedef struct run_sums {
    double training_loss, kl, seconds;
    int64_t steps;
} run_sums;

typedef struct run {
    train_settings settings;
    const corpus *corpus;
    uint64_t fingerprint; /* of the text it was started on */
    model model;
    optimizer optimizer;
    random_state random; /* draws the batches */
    int64_t step;        /* taken so far */
    double seconds;      /* spent in steps, over all resumptions */
    run_sums sums;
    history history;
    uint8_t *inputs, *targets; /* [batch, context] */
} run;

bool run_open(run *run, const train_settings *settings, const corpus *corpus);
void run_close(run *run);

/* The phase of the last step taken, or of the first one when there is none yet. */
attention_phase run_phase(const run *run);

/* One optimiser step on a random batch. */
bool run_step(run *run);

/* Adds a record of the steps since the last one; with evaluate, also of the validation text. */
bool run_record(run *run, bool evaluate);

#endif
