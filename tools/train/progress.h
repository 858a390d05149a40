/* What the user sees while a run trains: one line, redrawn on a terminal, now and then a new one elsewhere. */
#ifndef TRAIN_PROGRESS_H
#define TRAIN_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "run.h"

typedef struct progress {
    bool on_terminal;
    bool line_open;    /* the terminal's current line is ours and unfinished */
    double last_shown; /* on the clock */
} progress;

/* The run to show, and beside it the validation loss of another. */
typedef struct progress_state {
    const run *run;
    const run *dense; /* NULL unless the run is compared with it */
    double seconds_left;
    double step_seconds; /* of the run's recent steps */
} progress_state;

void progress_open(progress *progress);

/* Whether it is time to show the state again. */
bool progress_is_due(const progress *progress);

/* Shows the state; done: and leaves it on the screen. */
void progress_show(progress *progress, const progress_state *state, bool done);

#endif
