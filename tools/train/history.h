/* What a run showed as it went: one record at every few steps. It becomes the CSV and the picture, and is part of the
 * checkpoint, so that both are whole again after a resume. */
#ifndef TRAIN_HISTORY_H
#define TRAIN_HISTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "settings.h"

/* NaN where a record has no such value. Plain numbers without padding, for the checkpoint. */
typedef struct record {
    int64_t step;   /* taken so far */
    int64_t phase;  /* attention_phase of the last of them */
    double seconds; /* of this run, over all its resumptions */
    double learning_rate;
    double training_loss;   /* nats a byte, mean since the last record with one */
    double validation_loss; /* nats a byte */
    double kl;              /* mean over layers, likewise */
    double recall;          /* of the main attention's own top-k blocks, the share that the proxies chose */
    double mass;            /* share of the main attention's probability within the chosen blocks */
    double tokens_per_second;
} record;

typedef struct history {
    record *records;
    int64_t count;
} history;

void history_add(history *history, const record *record);
void history_close(history *history);

/* The last record with a validation loss; NULL when there is none. */
const record *history_last_evaluation(const history *history);

/* A run as the CSV and the picture name it. */
typedef struct named_history {
    const char *name; /* "dense" or "msa" */
    const train_settings *settings;
    const history *history;
} named_history;

/* Writes all runs to one CSV, whose first line names the columns; an empty field is a value that was not measured. */
bool history_write_csv(const char *path, const named_history *runs, int count);

/* Writes the curves of all runs to one SVG. */
bool history_write_picture(const char *path, const named_history *runs, int count);

#endif
