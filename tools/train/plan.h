/* How long a step takes, what time is left, and how many steps fit into the time there is. */
#ifndef TRAIN_PLAN_H
#define TRAIN_PLAN_H

#include "corpus.h"
#include "settings.h"

enum { PHASES = 3, EVALUATIONS_A_RUN = 10 };

/* Seconds of a step of each attention_phase; 0: not known yet. */
typedef struct pace {
    double first[PHASES];  /* as measured before training, for the relation between phases */
    double recent[PHASES]; /* smoothed over recent steps of the phase */
    double evaluation;     /* seconds of an evaluation, likewise */
} pace;

/* Times a few steps of models that are thrown away; compare: of both kinds of run. */
bool pace_measure(pace *pace, const train_settings *settings, const corpus *corpus, bool compare);

void pace_observe_step(pace *pace, attention_phase phase, double seconds);
void pace_observe_evaluation(pace *pace, double seconds);

/* Until the end of the run that has taken step steps, or of the comparison's two runs that both have. */
double plan_seconds_left(const pace *pace, const train_settings *settings, bool compare, int64_t step);

/* Fixes steps and all that follows from them, so that the rest takes the given seconds. warmup_steps is not changed
 * once the warm-up is over. */
void plan_steps(const pace *pace, train_settings *settings, bool compare, int64_t step, double seconds);

/* What follows from settings->steps where it has not been given: warmup_steps and evaluate_every. */
void plan_from_steps(train_settings *settings);

#endif
