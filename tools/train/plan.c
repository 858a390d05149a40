#include "plan.h"

#include <math.h>

#include "../clock.h"
#include "run.h"

static const double measured_seconds = 0.7;

static bool time_steps(run *r, double *seconds) {
    if (!run_step(r)) return false; /* the first step also brings the memory in */
    int steps = 0;
    const double begin = fmsa_tool_seconds();
    do {
        if (!run_step(r)) return false;
        steps++;
    } while (fmsa_tool_seconds() - begin < measured_seconds);
    *seconds = (fmsa_tool_seconds() - begin) / steps;
    return true;
}

static bool time_phase(pace *pace, const train_settings *settings, const corpus *corpus, attention_phase phase) {
    train_settings s = *settings;
    s.dense = phase == PHASE_DENSE;
    s.warmup = phase == PHASE_WARMUP ? 1 : 0;
    s.steps = 1 << 20; /* far more than are taken: the learning rate stays on its rise */
    run r;
    if (!run_open(&r, &s, corpus)) return false;
    bool ok = time_steps(&r, &pace->step[phase]);
    if (ok) {
        const double begin = fmsa_tool_seconds();
        ok = run_record(&r, true);
        pace->evaluation[phase] = fmsa_tool_seconds() - begin;
    }
    run_close(&r);
    return ok;
}

static bool occurs(const train_settings *s, bool compare, attention_phase phase) {
    const bool has_dense_run = compare || s->dense, has_msa_run = compare || !s->dense;
    if (phase == PHASE_DENSE) return has_dense_run;
    return has_msa_run && (phase == PHASE_WARMUP ? s->warmup > 0 : s->warmup < 1);
}

bool plan_measure(pace *pace, const train_settings *settings, const corpus *corpus, bool compare) {
    for (int phase = PHASE_DENSE; phase <= PHASE_SPARSE; phase++) {
        pace->step[phase] = pace->evaluation[phase] = 0;
        if (!occurs(settings, compare, (attention_phase)phase)) continue;
        if (!time_phase(pace, settings, corpus, (attention_phase)phase)) return false;
    }
    return true;
}

int64_t plan_steps(const pace *pace, const train_settings *s, bool compare, double seconds) {
    /* Phases that do not occur have been left at 0. */
    const double share[] = {
        [PHASE_DENSE] = compare || s->dense ? 1 : 0, [PHASE_WARMUP] = s->warmup, [PHASE_SPARSE] = 1 - s->warmup};
    double step = 0, evaluations = 0;
    for (int phase = PHASE_DENSE; phase <= PHASE_SPARSE; phase++) {
        step += share[phase] * pace->step[phase];
        evaluations += (EVALUATIONS_A_RUN * share[phase] + 1) * pace->evaluation[phase];
    }
    return (int64_t)fmax(1, floor((seconds - evaluations) / step));
}
