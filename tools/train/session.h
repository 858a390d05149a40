/* One call of `flashmsa train`: the options, the text, and the runs that it trains. The two runs of a comparison take
 * their steps in turn, so that whatever else the machine does slows both alike. */
#ifndef TRAIN_SESSION_H
#define TRAIN_SESSION_H

#include "options.h"
#include "plan.h"
#include "progress.h"
#include "run.h"

enum { MOST_RUNS = 2 };

typedef enum outcome { OUTCOME_COMPLETE, OUTCOME_STOPPED, OUTCOME_FAILED } outcome;

typedef struct session {
    const train_options *options;
    train_settings settings; /* with the number of steps */
    corpus corpus;
    run runs[MOST_RUNS]; /* the first run_count are open */
    int run_count;
    pace pace;
    double deadline;  /* on the clock; the steps are fitted to it as the speed changes. 0: the steps are fixed */
    double last_plan; /* on the clock, as the next */
    double last_save;
    progress progress;
} session;

/* Reads the text, fixes the settings and says what is about to be done. */
bool session_open(session *session, const train_options *options);
void session_close(session *session);

/* Trains the run (or the two runs of a comparison) to the end, or until it is asked to stop: then everything is in a
 * checkpoint, and how to go on has been said. */
outcome session_train(session *session);

/* Of the files the session writes: "train.csv", "train.svg", "msa.ckpt", "dense.ckpt". */
void session_path(const session *session, const char *name, char *path, size_t path_bytes);

#endif
