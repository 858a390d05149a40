#include "plan.h"

#include <math.h>

#include "../clock.h"
#include "metrics.h"
#include "run.h"

/* ---- Pace. ---- */

static bool time_steps(run *r, double *seconds) {
    enum { STEPS = 2 };
    /* The first step also brings the memory in. */
    if (!run_step(r)) return false;
    const double begin = fmsa_tool_seconds();
    for (int i = 0; i < STEPS; i++) {
        if (!run_step(r)) return false;
    }
    *seconds = (fmsa_tool_seconds() - begin) / STEPS;
    return true;
}

static bool time_phase(pace *pace, const train_settings *settings, const corpus *corpus, attention_phase phase) {
    train_settings s = *settings;
    s.dense = phase == PHASE_DENSE;
    s.steps = 100;
    s.warmup_steps = phase == PHASE_WARMUP ? s.steps : 0;
    run r;
    if (!run_open(&r, &s, corpus)) return false;
    const bool ok = time_steps(&r, &pace->first[phase]);
    run_close(&r);
    return ok;
}

static bool occurs(const train_settings *s, bool compare, int phase) {
    const bool has_dense_run = compare || s->dense, has_msa_run = compare || !s->dense;
    if (phase == PHASE_DENSE) return has_dense_run;
    return has_msa_run && (phase == PHASE_WARMUP ? s->warmup > 0 : s->warmup < 1);
}

bool pace_measure(pace *p, const train_settings *settings, const corpus *corpus, bool compare) {
    for (int phase = 0; phase < PHASES; phase++) {
        if (!occurs(settings, compare, phase)) continue;
        if (!time_phase(p, settings, corpus, (attention_phase)phase)) return false;
    }
    return true;
}

static void smooth(double *recent, double seconds) {
    *recent = *recent == 0 ? seconds : 0.9 * *recent + 0.1 * seconds;
}

void pace_observe_step(pace *p, attention_phase phase, double seconds) {
    smooth(&p->recent[phase], seconds);
}

void pace_observe_evaluation(pace *p, double seconds) {
    smooth(&p->evaluation, seconds);
}

/* What a step of a phase will take now: as lately; before its first one, as measured at first, scaled by how the speed
 * of the other phases has changed; without any measurement, as the others. */
static double step_seconds(const pace *p, int phase) {
    double first = 0, recent = 0, slowest = 0;
    if (p->recent[phase] > 0) return p->recent[phase];
    for (int other = 0; other < PHASES; other++) {
        if (p->recent[other] == 0) continue;
        first += p->first[other];
        recent += p->recent[other];
        slowest = fmax(slowest, p->recent[other]);
    }
    if (p->first[phase] == 0) return slowest;
    return first > 0 && recent > 0 ? p->first[phase] * recent / first : p->first[phase];
}

/* ---- Plan. ---- */

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

double plan_seconds_left(const pace *p, const train_settings *s, bool compare, int64_t step) {
    const double warmup_left = (double)larger(0, s->warmup_steps - step);
    const double steps_left = (double)(s->steps - step);
    double seconds = 0;
    if (compare || s->dense) seconds += steps_left * step_seconds(p, PHASE_DENSE);
    if (compare || !s->dense) {
        seconds += warmup_left * step_seconds(p, PHASE_WARMUP);
        seconds += (steps_left - warmup_left) * step_seconds(p, PHASE_SPARSE);
    }
    /* A forward pass alone is about a third of a step. */
    const double steps_an_evaluation = ceil((double)VALIDATION_SEQUENCES / s->batch) / 3;
    const double average = seconds / fmax(1, steps_left);
    const double evaluation = p->evaluation > 0 ? (compare ? 2 : 1) * p->evaluation : steps_an_evaluation * average;
    return seconds + evaluation * EVALUATIONS_A_RUN * steps_left / (double)larger(1, s->steps);
}

static void set_steps(train_settings *s, int64_t steps, int64_t step) {
    const bool warmup_is_over = step > 0 && step >= s->warmup_steps;
    s->steps = steps;
    if (!warmup_is_over) s->warmup_steps = larger(step, (int64_t)ceil(s->warmup * (double)steps));
}

void plan_steps(const pace *p, train_settings *s, bool compare, int64_t step, double seconds) {
    /* The greatest number that fits, by halving the interval between one that does (or is the least) and one that
     * does not. The least leaves time to see a slow machine become faster. */
    const int64_t fewest = 24;
    int64_t fits = larger(fewest, step + 1), too_many = 1 << 24;
    while (too_many - fits > 1) {
        train_settings candidate = *s;
        const int64_t middle = fits + (too_many - fits) / 2;
        set_steps(&candidate, middle, step);
        if (plan_seconds_left(p, &candidate, compare, step) <= seconds) {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    set_steps(s, fits, step);
    s->evaluate_every = 0;
    plan_from_steps(s);
}

void plan_from_steps(train_settings *s) {
    if (s->warmup_steps == 0) s->warmup_steps = (int64_t)ceil(s->warmup * (double)s->steps);
    /* In a short run evaluations must not take more time than the steps. */
    const int64_t fewest = 5;
    if (s->evaluate_every == 0) s->evaluate_every = larger(fewest, (s->steps - 1) / EVALUATIONS_A_RUN + 1);
}
