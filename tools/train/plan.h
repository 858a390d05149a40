/* How many steps fit into the time there is. */
#ifndef TRAIN_PLAN_H
#define TRAIN_PLAN_H

#include "corpus.h"
#include "settings.h"

enum { EVALUATIONS_A_RUN = 12 };

/* Measured seconds of a step of each phase that will occur, and of an evaluation. */
typedef struct pace {
    double step[3]; /* by attention_phase */
    double evaluation[3];
} pace;

/* Runs a few steps of models that are thrown away. compare: both kinds of run will occur. */
bool plan_measure(pace *pace, const train_settings *settings, const corpus *corpus, bool compare);

/* The steps of a run, so that it takes at most the given seconds, or both runs of a comparison do; at least 1. */
int64_t plan_steps(const pace *pace, const train_settings *settings, bool compare, double seconds);

#endif
