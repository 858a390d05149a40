/* What the user sees while a run trains: one line, redrawn on a terminal, now and then a new one elsewhere. */
#ifndef TRAIN_PROGRESS_H
#define TRAIN_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "run.h"

typedef struct progress {
    bool on_terminal;
    bool line_open;      /* the terminal's current line is ours and unfinished */
    double last_shown;   /* on the clock */
    double step_seconds; /* of a recent step, smoothed; 0 before the first */
    attention_phase step_phase;
} progress;

void progress_open(progress *progress);

/* To be called after each step: takes its time, and shows the state when it is time to. */
void progress_step(progress *progress, const run *run, double seconds);

/* Shows the state at once; done: and leaves it on the screen. */
void progress_show(progress *progress, const run *run, bool done);

#endif
