#include "train.h"

#include <stdio.h>

#include "failure.h"
#include "gemm.h"
#include "interrupt.h"
#include "session.h"
#include "summary.h"
#include "threads.h"

static int fail_with(int code) {
    fprintf(stderr, "flashmsa train: %s\n", train_failure());
    return code;
}

static int train(const train_options *options) {
    session s;
    int code = 1;
    if (session_open(&s, options)) {
        const outcome result = session_train(&s);
        const bool complete = result == OUTCOME_COMPLETE && summary_print(&s);
        if (complete) code = 0;
        if (result == OUTCOME_STOPPED) code = interrupt_signal() != 0 ? 128 + interrupt_signal() : 0;
    }
    session_close(&s);
    return code == 1 ? fail_with(1) : code;
}

int fmsa_tool_train(int argc, char **argv) {
    train_options options;
    if (!options_parse(&options, argc, argv)) {
        fail_with(2);
        fprintf(stderr, "`flashmsa train --help` explains all of them.\n");
        return 2;
    }
    if (options.help) {
        options_print_help();
        return 0;
    }
    if (options.threads > 0) omp_set_num_threads(options.threads);
    if (!options.no_blas) gemm_use_blas();
    interrupt_install();
    return train(&options);
}
