#include "summary.h"

#include <math.h>
#include <stdio.h>

#include "speed.h"

static const double nats_a_bit = 0.69314718055994531;

/* The long context at which the attentions are also timed. */
enum { LONGER = 8 };

static void print_share(double share) {
    if (isnan(share)) printf("%10s", "-");
    if (!isnan(share)) printf("%8.1f %%", 100 * share);
}

static void print_run(const run *r) {
    const record *e = history_last_evaluation(&r->history);
    const record *last = &r->history.records[r->history.count - 1];
    printf("%-7s%10.4f%10.4f", settings_run_name(&r->settings), e->validation_loss, e->validation_loss / nats_a_bit);
    print_share(e->recall);
    print_share(e->mass);
    printf("%10.0f%10.1f\n", r->seconds > 0 ? (double)(r->step * r->model.rows) / r->seconds : last->tokens_per_second,
           r->seconds);
}

static void print_runs(const session *s) {
    printf("\n%-7s%10s%10s%10s%10s%10s%10s\n", "run", "nats/byte", "bits/byte", "recall", "mass", "tokens/s",
           "seconds");
    for (int i = 0; i < s->run_count; i++)
        print_run(&s->runs[i]);
}

static void print_difference(const session *s) {
    const double dense = history_last_evaluation(&s->runs[0].history)->validation_loss;
    const double msa = history_last_evaluation(&s->runs[1].history)->validation_loss;
    printf("\nThe validation loss of MSA is %.2f %% %s that of dense attention.\n", 100 * fabs(msa / dense - 1),
           msa > dense ? "above" : "below");
}

/* Recall at the first evaluation, at the end of the warm-up and at the last one. */
static void print_recall(const run *r) {
    const record *first = NULL, *warmed = NULL;
    const record *last = history_last_evaluation(&r->history);
    for (int64_t i = 0; i < r->history.count; i++) {
        const record *at = &r->history.records[i];
        if (isnan(at->recall)) continue;
        if (first == NULL) first = at;
        if (at->phase == PHASE_WARMUP) warmed = at;
    }
    if (first == NULL || warmed == NULL) return;
    printf("Block recall: %.1f %% before training, %.1f %% after the warm-up, %.1f %% at the end.\n",
           100 * first->recall, 100 * warmed->recall, 100 * last->recall);
}

static bool print_speed(const session *s) {
    const model_shape *shape = &s->settings.shape;
    printf("\nattention alone, forward and backward, one sequence:\n%-14s%12s%12s%12s\n", "length", "dense ms",
           "MSA ms", "speed-up");
    for (int factor = 1; factor <= LONGER; factor *= LONGER) {
        double dense, sparse;
        const int32_t length = factor * shape->context;
        if (!measure_attention(&shape->attention, length, PHASE_DENSE, &dense)) return false;
        if (!measure_attention(&shape->attention, length, PHASE_SPARSE, &sparse)) return false;
        printf("%-14d%12.2f%12.2f%11.2fx\n", length, dense, sparse, dense / sparse);
        fflush(stdout);
    }
    printf("MSA's time includes the selection of blocks and the training of the proxies.\n");
    return true;
}

bool summary_print(const session *s) {
    print_runs(s);
    const run *last = &s->runs[s->run_count - 1];
    if (s->options->compare) print_difference(s);
    if (!last->settings.dense) print_recall(last);
    if (s->options->compare && !print_speed(s)) return false;
    char path[4096];
    session_path(s, "train.csv", path, sizeof path);
    printf("\nfigures  %s\n", path);
    session_path(s, "train.svg", path, sizeof path);
    printf("picture  %s\n", path);
    return true;
}
