#include "session.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../clock.h"
#include "checkpoint.h"
#include "failure.h"
#include "files.h"
#include "gemm.h"
#include "interrupt.h"
#include "proxies.h"
#include "threads.h"

enum { PATH_BYTES = 4096 };

/* Between two evaluations: often enough for a smooth curve. */
enum { RECORDS_AN_EVALUATION = 5 };

static const double most_seconds_between_checkpoints = 30;

/* What a comparison's last measurements need, and a margin, since other programs may slow this one down at the end. */
static const double seconds_for_summary = 6, planned_share = 0.93;

void session_path(const session *s, const char *name, char *path, size_t path_bytes) {
    snprintf(path, path_bytes, "%s/%s", s->options->out, name);
}

static void checkpoint_path(const char *folder, const char *run_name, char path[PATH_BYTES]) {
    snprintf(path, PATH_BYTES, "%s/%s.ckpt", folder, run_name);
}

/* ---- Opening. ---- */

/* The checkpoint whose settings hold for the whole command. */
static void leading_checkpoint(const train_options *o, char path[PATH_BYTES]) {
    if (o->compare) checkpoint_path(o->resume, "dense", path);
    if (!o->compare) snprintf(path, PATH_BYTES, "%s", o->resume);
}

static bool open_settings(session *s) {
    s->settings = s->options->settings;
    if (s->options->resume == NULL) return true;
    char path[PATH_BYTES];
    leading_checkpoint(s->options, path);
    if (!checkpoint_read_settings(path, &s->settings) || !options_agree(s->options, &s->settings)) return false;
    if (!settings_check(&s->settings)) return false;
    return s->settings.steps > 0 || train_fail("the checkpoint %s is damaged: it has no number of steps", path);
}

static void describe(const session *s, const model *m) {
    const model_shape *shape = &s->settings.shape;
    const attention_shape *a = &shape->attention;
    printf("text     %d files: %lld bytes to train on, %lld for validation", s->corpus.files,
           (long long)s->corpus.training_bytes, (long long)s->corpus.validation_bytes);
    if (s->corpus.skipped > 0) printf("; %d files passed over, empty or not text", s->corpus.skipped);
    printf("\nmodel    %.2f million weights; layers %d, width %d; heads of %d: %d query, %d key/value, %d proxy\n",
           (double)m->weight_count / 1e6, shape->layers, shape->dim, a->head_dim, a->heads, a->kv_heads,
           a->proxy_heads);
    printf("MSA      a byte sees %d of %d blocks of %d bytes\n",
           a->top_k < settings_blocks(&s->settings) ? a->top_k : settings_blocks(&s->settings),
           settings_blocks(&s->settings), a->block_size);
    printf("machine  %d threads, matrix products by %s\n", omp_get_max_threads(), gemm_description());
    fflush(stdout);
}

/* Fixes the steps where neither an option nor a checkpoint did. */
static bool plan(session *s, double begin) {
    train_settings *settings = &s->settings;
    const bool compare = s->options->compare;
    if (settings->steps == 0) {
        if (!pace_measure(&s->pace, settings, &s->corpus, compare)) return false;
        const double summary = compare ? seconds_for_summary : 0;
        s->deadline = begin + planned_share * s->options->seconds - summary;
        s->last_plan = fmsa_tool_seconds();
        plan_steps(&s->pace, settings, compare, 0, s->deadline - s->last_plan);
    }
    plan_from_steps(settings);
    printf("plan     %s%lld steps of %d x %d bytes", s->deadline > 0 ? "about " : "", (long long)settings->steps,
           settings->batch, settings->shape.context);
    if (compare || !settings->dense) {
        printf(", the first %lld with dense attention as warm-up", (long long)settings->warmup_steps);
    }
    printf("%s\n", compare ? "; dense and MSA in turn" : "");
    fflush(stdout);
    return true;
}

bool session_open(session *s, const train_options *options) {
    const double begin = fmsa_tool_seconds();
    *s = (session){.options = options};
    if (!open_settings(s)) return false;
    if (options->proxies != NULL && s->settings.dense && !options->compare) {
        return train_fail("--proxies was given, but with --attention dense there are none; leave one of them out");
    }
    if (!make_folder(options->out)) return false;
    if (!corpus_open(&s->corpus, options->paths, options->path_count, s->settings.shape.context)) return false;
    model model;
    if (!model_open(&model, &s->settings.shape, s->settings.batch, 0)) return false;
    describe(s, &model);
    model_close(&model);
    return plan(s, begin);
}

void session_close(session *s) {
    for (int i = 0; i < s->run_count; i++)
        run_close(&s->runs[i]);
    corpus_close(&s->corpus);
}

/* ---- Files. ---- */

static bool write_curves(const session *s) {
    named_history histories[MOST_RUNS];
    char path[PATH_BYTES];
    for (int i = 0; i < s->run_count; i++) {
        const run *r = &s->runs[i];
        histories[i] = (named_history){settings_run_name(&r->settings), &r->settings, &r->history};
    }
    session_path(s, "train.csv", path, sizeof path);
    if (!history_write_csv(path, histories, s->run_count)) return false;
    session_path(s, "train.svg", path, sizeof path);
    return history_write_picture(path, histories, s->run_count);
}

static bool save(session *s) {
    for (int i = 0; i < s->run_count; i++) {
        char path[PATH_BYTES];
        checkpoint_path(s->options->out, settings_run_name(&s->runs[i].settings), path);
        if (!checkpoint_save(path, &s->runs[i])) return false;
    }
    s->last_save = fmsa_tool_seconds();
    return write_curves(s);
}

/* ---- Runs. ---- */

static bool same_settings_but_attention(const train_settings *a, const train_settings *b) {
    train_settings other = *b;
    other.dense = a->dense;
    return memcmp(a, &other, sizeof other) == 0;
}

static bool resume_run(session *s, run *r, const char *path) {
    if (!checkpoint_load(path, r, &s->corpus)) return false;
    if (!same_settings_but_attention(&r->settings, &s->settings)) {
        run_close(r);
        return train_fail("%s and dense.ckpt beside it are of different comparisons; remove the one that does not "
                          "belong there",
                          path);
    }
    if (r->fingerprint != s->corpus.fingerprint) {
        printf(
            "note     the text is not the one that the checkpoint was trained on; training goes on with the new one\n");
    }
    printf("resume   %s at step %lld of %lld\n", path, (long long)r->step, (long long)r->settings.steps);
    return true;
}

static bool open_run(session *s, run *r, bool dense) {
    train_settings settings = s->settings;
    settings.dense = dense;
    char path[PATH_BYTES];
    if (s->options->resume != NULL && !s->options->compare) return resume_run(s, r, s->options->resume);
    if (s->options->resume != NULL) {
        checkpoint_path(s->options->resume, settings_run_name(&settings), path);
        if (access(path, F_OK) == 0) return resume_run(s, r, path);
    }
    return run_open(r, &settings, &s->corpus);
}

/* Quoted for a shell when it needs to be. */
static void print_argument(const char *argument) {
    const char *plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=+,:@%";
    if (argument[0] != 0 && argument[strspn(argument, plain)] == 0) {
        printf(" %s", argument);
        return;
    }
    printf(" '");
    for (; *argument != 0; argument++)
        printf(*argument == '\'' ? "'\\''" : "%c", *argument);
    printf("'");
}

static void say_how_to_resume(const session *s) {
    const train_options *o = s->options;
    const run *r = &s->runs[s->run_count - 1];
    char path[PATH_BYTES];
    checkpoint_path(o->out, settings_run_name(&r->settings), path);
    printf("Stopped after step %lld of %lld; nothing is lost. To go on:\n\n    flashmsa train", (long long)r->step,
           (long long)r->settings.steps);
    if (o->compare) printf(" --compare");
    printf(" --resume");
    print_argument(o->compare ? o->out : path);
    printf(" --out");
    print_argument(o->out);
    if (o->threads > 0) printf(" --threads %d", o->threads);
    if (o->no_blas) printf(" --no-blas");
    for (int i = 0; i < o->path_count; i++)
        print_argument(o->paths[i]);
    printf("\n\n");
}

/* Evaluated: at regular steps, at the end, and where the attention becomes sparse. */
static bool is_evaluated(const train_settings *t, int64_t step) {
    if (step == t->steps || step % t->evaluate_every == 0) return true;
    return step > 0 && settings_phase(t, step - 1) != settings_phase(t, step);
}

static bool is_recorded(const train_settings *t, int64_t step) {
    const int64_t every = t->evaluate_every / RECORDS_AN_EVALUATION;
    return every > 0 && step % every == 0;
}

static bool record_run(session *s, run *r, bool evaluate) {
    const double begin = fmsa_tool_seconds();
    if (!run_record(r, evaluate)) return false;
    if (evaluate) pace_observe_evaluation(&s->pace, fmsa_tool_seconds() - begin);
    return true;
}

static void show(session *s, bool done) {
    const run *r = &s->runs[s->run_count - 1];
    const progress_state state = {.run = r,
                                  .dense = s->options->compare ? &s->runs[0] : NULL,
                                  .seconds_left =
                                      plan_seconds_left(&s->pace, &r->settings, s->options->compare, r->step),
                                  .step_seconds = s->pace.recent[run_phase(r)]};
    progress_show(&s->progress, &state, done);
}

/* Fits the steps to the time left, while there is still enough training ahead for the learning rate to follow. */
static void plan_again(session *s) {
    const double now = fmsa_tool_seconds(), settled_share = 0.75, seconds_between_plans = 2;
    const int64_t step = s->runs[0].step;
    if (s->deadline == 0 || now - s->last_plan < seconds_between_plans) return;
    if ((double)step > settled_share * (double)s->settings.steps) return;
    s->last_plan = now;
    plan_steps(&s->pace, &s->settings, s->options->compare, step, s->deadline - now);
    for (int i = 0; i < s->run_count; i++) {
        const int32_t dense = s->runs[i].settings.dense;
        s->runs[i].settings = s->settings;
        s->runs[i].settings.dense = dense;
    }
}

static bool is_last_run(const session *s, const run *r) {
    return r == &s->runs[s->run_count - 1];
}

static bool train_one_step(session *s, run *r) {
    const attention_phase phase = settings_phase(&r->settings, r->step);
    const double begin = fmsa_tool_seconds();
    if (!run_step(r)) return false;
    pace_observe_step(&s->pace, phase, fmsa_tool_seconds() - begin);
    const bool evaluated = is_evaluated(&r->settings, r->step);
    if ((evaluated || is_recorded(&r->settings, r->step)) && !record_run(s, r, evaluated)) return false;
    if (!is_last_run(s, r)) return true;
    if (evaluated || progress_is_due(&s->progress)) show(s, r->step == r->settings.steps);
    if (!evaluated && fmsa_tool_seconds() - s->last_save < most_seconds_between_checkpoints) return true;
    return save(s);
}

/* The run that has taken the fewest steps; the dense one when both have taken as many. */
static run *next_run(session *s) {
    run *next = &s->runs[0];
    for (int i = 1; i < s->run_count; i++) {
        if (s->runs[i].step < next->step) next = &s->runs[i];
    }
    return next;
}

static bool must_stop(const session *s, const run *next) {
    const int64_t stop_after = s->options->stop_after;
    return interrupt_signal() != 0 || (stop_after > 0 && next->step >= stop_after);
}

static outcome train_to_end(session *s) {
    for (run *r = next_run(s); r->step < r->settings.steps; r = next_run(s)) {
        if (must_stop(s, r)) {
            show(s, true);
            if (!save(s)) return OUTCOME_FAILED;
            say_how_to_resume(s);
            return OUTCOME_STOPPED;
        }
        if (!train_one_step(s, r)) return OUTCOME_FAILED;
        if (is_last_run(s, r)) plan_again(s);
    }
    if (!save(s)) return OUTCOME_FAILED;
    const char *proxies = s->options->proxies;
    return proxies == NULL || proxies_write(proxies, &s->runs[s->run_count - 1]) ? OUTCOME_COMPLETE : OUTCOME_FAILED;
}

/* A fresh comparison must not leave the other run's old checkpoint for a later resume to find. */
static void remove_old_checkpoints(const session *s) {
    static const char *const names[] = {"dense", "msa"};
    for (int i = 0; i < MOST_RUNS; i++) {
        char path[PATH_BYTES];
        checkpoint_path(s->options->out, names[i], path);
        unlink(path);
    }
}

static bool open_runs(session *s) {
    const int count = s->options->compare ? MOST_RUNS : 1;
    if (s->options->compare && s->options->resume == NULL) remove_old_checkpoints(s);
    for (int i = 0; i < count; i++) {
        run *r = &s->runs[i];
        if (!open_run(s, r, s->options->compare ? i == 0 : s->settings.dense)) return false;
        s->run_count++;
        if (r->history.count == 0 && !record_run(s, r, true)) return false;
    }
    return true;
}

outcome session_train(session *s) {
    progress_open(&s->progress);
    s->last_save = fmsa_tool_seconds();
    const outcome result = open_runs(s) ? train_to_end(s) : OUTCOME_FAILED;
    if (s->progress.line_open) printf("\n");
    return result;
}
