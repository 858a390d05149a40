/* The command line of `flashmsa train`. */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "settings.h"

typedef struct train_options {
    train_settings settings; /* steps and evaluate_every are 0 unless given */
    double seconds;          /* budget from which the steps follow */
    int32_t threads;         /* 0: all */
    int64_t stop_after;      /* 0: train to the end */
    const char *out;
    const char *resume;  /* NULL: start afresh */
    const char *proxies; /* NULL: not written */
    bool compare;
    bool no_blas;
    bool help;
    char **paths; /* the input, from argv */
    int path_count;
    uint64_t given; /* one bit for each option of the table that was given */
} train_options;

/* argv[0] is the subcommand's name. Reorders argv so that the paths stand together. */
bool options_parse(train_options *options, int argc, char **argv);

/* Whether no option was given that contradicts the settings of a checkpoint. */
bool options_agree(const train_options *options, const train_settings *checkpoint);

void options_print_help(void);

#endif
