#include "run.h"

#include <math.h>
#include <stdlib.h>

#include "../clock.h"
#include "failure.h"
#include "metrics.h"

bool run_open(run *r, const train_settings *settings, const corpus *corpus) {
    *r = (run){.settings = *settings, .corpus = corpus, .fingerprint = corpus->fingerprint};
    if (!model_open(&r->model, &settings->shape, settings->batch, (uint64_t)settings->seed)) return false;
    optimizer_open(&r->optimizer, &r->model);
    /* Not the stream that the weights were drawn from. */
    random_seed(&r->random, ~(uint64_t)settings->seed);
    r->inputs = train_allocate(r->model.rows, 1);
    r->targets = train_allocate(r->model.rows, 1);
    return true;
}

void run_close(run *r) {
    model_close(&r->model);
    optimizer_close(&r->optimizer);
    history_close(&r->history);
    free(r->inputs);
    free(r->targets);
    *r = (run){0};
}

attention_phase run_phase(const run *r) {
    return settings_phase(&r->settings, r->step > 0 ? r->step - 1 : 0);
}

bool run_step(run *r) {
    const train_settings *s = &r->settings;
    const double begin = fmsa_tool_seconds();
    const attention_phase phase = settings_phase(s, r->step);
    double loss, kl;
    corpus_training_batch(r->corpus, &r->random, s->batch, s->shape.context, r->inputs, r->targets);
    if (!model_forward(&r->model, phase, r->inputs, r->targets, &loss)) return false;
    if (!model_backward(&r->model, phase, r->inputs, r->targets, s->kl_weight, &kl)) return false;
    if (!isfinite(loss)) {
        return train_fail("the loss is no longer a number at step %lld; a smaller --lr than %g may help",
                          (long long)r->step, s->learning_rate);
    }
    optimizer_step(&r->optimizer, &r->model, optimizer_learning_rate(r->step, s->steps, s->learning_rate),
                   s->weight_decay);
    r->step++;
    const double seconds = fmsa_tool_seconds() - begin;
    r->seconds += seconds;
    r->sums.training_loss += loss;
    r->sums.kl += kl;
    r->sums.seconds += seconds;
    r->sums.steps++;
    return true;
}

bool run_record(run *r, bool evaluate) {
    const train_settings *s = &r->settings;
    const attention_phase phase = run_phase(r);
    const double steps = (double)r->sums.steps;
    /* Where records crowd (one more evaluation at the end of the warm-up), the mean of few steps would show one batch.
     */
    const bool has_mean = r->sums.steps > 0 && (r->sums.steps >= s->evaluate_every / 10 || r->step == s->steps);
    record record = {.step = r->step,
                     .phase = phase,
                     .seconds = r->seconds,
                     .learning_rate =
                         optimizer_learning_rate(r->step > 0 ? r->step - 1 : 0, s->steps, s->learning_rate),
                     .training_loss = has_mean ? r->sums.training_loss / steps : NAN,
                     .validation_loss = NAN,
                     .kl = has_mean && phase != PHASE_DENSE ? r->sums.kl / steps : NAN,
                     .recall = NAN,
                     .mass = NAN,
                     .tokens_per_second = has_mean ? steps * (double)r->model.rows / r->sums.seconds : NAN};
    if (evaluate) {
        evaluation e;
        if (!evaluate_model(&r->model, phase, r->corpus, &e)) return false;
        record.validation_loss = e.loss;
        record.recall = e.recall;
        record.mass = e.mass;
    }
    if (has_mean) r->sums = (run_sums){0};
    history_add(&r->history, &record);
    return true;
}
