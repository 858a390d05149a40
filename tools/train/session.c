#include "session.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../clock.h"
#include "checkpoint.h"
#include "failure.h"
#include "files.h"
#include "gemm.h"
#include "interrupt.h"
#include "plan.h"
#include "threads.h"

enum { PATH_BYTES = 4096 };

/* Between two evaluations: often enough for a smooth curve. */
enum { RECORDS_AN_EVALUATION = 5 };

static const double most_seconds_between_checkpoints = 30;

/* What a comparison's last measurements need, and a margin, for other programs may slow this one down. */
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
    printf("\nmodel    %.2f million weights: %d layers of width %d, %d query, %d key/value and %d proxy heads of %d\n",
           (double)m->weight_count / 1e6, shape->layers, shape->dim, a->heads, a->kv_heads, a->proxy_heads,
           a->head_dim);
    printf("MSA      a byte sees %d of %d blocks of %d bytes\n",
           a->top_k < settings_blocks(&s->settings) ? a->top_k : settings_blocks(&s->settings),
           settings_blocks(&s->settings), a->block_size);
    printf("machine  %d threads, matrix products by %s\n", omp_get_max_threads(), gemm_description());
    fflush(stdout);
}

/* Fixes steps and evaluate_every where neither an option nor a checkpoint did. */
static bool plan(session *s, double begin) {
    train_settings *settings = &s->settings;
    const bool compare = s->options->compare;
    if (settings->steps == 0) {
        pace pace;
        if (!plan_measure(&pace, settings, &s->corpus, compare)) return false;
        const double summary = compare ? seconds_for_summary : 0;
        const double left = s->options->seconds - (fmsa_tool_seconds() - begin) - summary;
        settings->steps = plan_steps(&pace, settings, compare, planned_share * left);
    }
    if (settings->evaluate_every == 0) settings->evaluate_every = (settings->steps - 1) / EVALUATIONS_A_RUN + 1;
    const long long warmup = settings->dense ? 0 : (long long)ceil(settings->warmup * (double)settings->steps);
    printf("plan     %lld steps of %d sequences of %d bytes", (long long)settings->steps, settings->batch,
           settings->shape.context);
    if (compare || !settings->dense) printf(", the first %lld with dense attention as warm-up", warmup);
    printf("%s\n", compare ? "; first the dense run, then MSA" : "");
    fflush(stdout);
    return true;
}

bool session_open(session *s, const train_options *options) {
    const double begin = fmsa_tool_seconds();
    *s = (session){.options = options};
    if (!open_settings(s)) return false;
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

static bool save(const session *s, const run *r) {
    char path[PATH_BYTES];
    checkpoint_path(s->options->out, settings_run_name(&r->settings), path);
    return checkpoint_save(path, r) && write_curves(s);
}

/* ---- One run. ---- */

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

static void say_how_to_resume(const session *s, const run *r) {
    const train_options *o = s->options;
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

static bool train_one_step(session *s, run *r, double *last_save) {
    const double begin = fmsa_tool_seconds();
    if (!run_step(r)) return false;
    progress_step(&s->progress, r, fmsa_tool_seconds() - begin);
    const bool evaluated = is_evaluated(&r->settings, r->step);
    if ((evaluated || is_recorded(&r->settings, r->step)) && !run_record(r, evaluated)) return false;
    if (!evaluated && fmsa_tool_seconds() - *last_save < most_seconds_between_checkpoints) return true;
    *last_save = fmsa_tool_seconds();
    if (evaluated) progress_show(&s->progress, r, r->step == r->settings.steps);
    return save(s, r);
}

static outcome train_run(session *s, run *r) {
    progress_open(&s->progress);
    double last_save = fmsa_tool_seconds();
    bool ok = r->history.count > 0 || run_record(r, true);
    while (ok && r->step < r->settings.steps) {
        const int64_t stop_after = s->options->stop_after;
        if (interrupt_signal() != 0 || (stop_after > 0 && r->step >= stop_after)) {
            progress_show(&s->progress, r, true);
            if (!save(s, r)) return OUTCOME_FAILED;
            say_how_to_resume(s, r);
            return OUTCOME_STOPPED;
        }
        ok = train_one_step(s, r, &last_save);
    }
    if (!ok && s->progress.line_open) printf("\n");
    return ok ? OUTCOME_COMPLETE : OUTCOME_FAILED;
}

/* A fresh comparison must not leave the other run's old checkpoint for a later resume to find. */
static void remove_old_checkpoints(const session *s) {
    static const char *const names[] = {"dense", "msa"};
    for (int i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        checkpoint_path(s->options->out, names[i], path);
        unlink(path);
    }
}

outcome session_train(session *s) {
    const int count = s->options->compare ? 2 : 1;
    if (s->options->compare && s->options->resume == NULL) remove_old_checkpoints(s);
    for (int i = 0; i < count; i++) {
        const bool dense = s->options->compare ? i == 0 : s->settings.dense;
        if (!open_run(s, &s->runs[i], dense)) return OUTCOME_FAILED;
        s->run_count++;
        const outcome result = train_run(s, &s->runs[i]);
        if (result != OUTCOME_COMPLETE) return result;
    }
    return write_curves(s) ? OUTCOME_COMPLETE : OUTCOME_FAILED;
}
