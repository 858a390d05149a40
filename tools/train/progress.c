#include "progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "../clock.h"

static const double seconds_between_redraws = 0.2, seconds_between_lines = 10;

void progress_open(progress *p) {
    *p = (progress){.on_terminal = isatty(STDOUT_FILENO), .last_shown = fmsa_tool_seconds()};
}

static int terminal_columns(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

typedef struct line {
    char text[512];
    size_t length;
} line;

__attribute__((format(printf, 2, 3))) static void append(line *l, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int added = vsnprintf(l->text + l->length, sizeof l->text - l->length, format, arguments);
    va_end(arguments);
    l->length += (size_t)added;
    if (l->length >= sizeof l->text) l->length = sizeof l->text - 1;
}

static void append_value(line *l, const char *label, double value, const char *format, double unit) {
    if (isnan(value)) return;
    append(l, "  %s ", label);
    char number[32];
    snprintf(number, sizeof number, format, value * unit);
    append(l, "%s", number);
}

static void append_bar(line *l, const run *r) {
    enum { CELLS = 16 };
    const int filled = (int)(CELLS * r->step / (r->settings.steps > 0 ? r->settings.steps : 1));
    append(l, "[");
    for (int i = 0; i < CELLS; i++)
        append(l, "%c", i < filled ? '#' : '.');
    append(l, "]");
}

static void append_time_left(line *l, const progress *p, const run *r) {
    if (p->step_seconds == 0) return;
    const long left = lround(p->step_seconds * (double)(r->settings.steps - r->step));
    append(l, "  %ld:%02ld left", left / 60, left % 60);
}

static line describe(const progress *p, const run *r) {
    static const char *const phases[] = {
        [PHASE_DENSE] = "dense", [PHASE_WARMUP] = "msa warm-up", [PHASE_SPARSE] = "msa sparse"};
    const history *h = &r->history;
    const record *last = h->count > 0 ? &h->records[h->count - 1] : NULL;
    const record *evaluated = history_last_evaluation(h);
    const run_sums *sums = &r->sums;
    line l = {.length = 0};
    append(&l, "%-11s ", phases[run_phase(r)]);
    append_bar(&l, r);
    append(&l, " %lld/%lld", (long long)r->step, (long long)r->settings.steps);
    append_time_left(&l, p, r);
    const double steps = (double)sums->steps;
    const bool has_sums = sums->steps > 0;
    append_value(&l, "train",
                 has_sums       ? sums->training_loss / steps
                 : last != NULL ? last->training_loss
                                : NAN,
                 "%.3f", 1);
    if (evaluated != NULL) append_value(&l, "valid", evaluated->validation_loss, "%.3f", 1);
    if (!r->settings.dense) {
        append_value(&l, "KL", has_sums ? sums->kl / steps : last != NULL ? last->kl : NAN, "%.3f", 1);
    }
    if (evaluated != NULL) append_value(&l, "recall", evaluated->recall, "%.0f%%", 100);
    if (evaluated != NULL) append_value(&l, "mass", evaluated->mass, "%.0f%%", 100);
    if (has_sums) append(&l, "  %.1fk tok/s", steps * (double)r->model.rows / sums->seconds / 1000);
    if (!has_sums && last != NULL && last->tokens_per_second > 0)
        append(&l, "  %.1fk tok/s", last->tokens_per_second / 1000);
    return l;
}

void progress_show(progress *p, const run *r, bool done) {
    line l = describe(p, r);
    if (p->on_terminal) {
        /* A line that wraps could not be redrawn. */
        const size_t columns = (size_t)terminal_columns();
        if (l.length >= columns) l.text[columns - 1] = 0;
        printf("\r%s\033[K%s", l.text, done ? "\n" : "");
    } else {
        printf("%s\n", l.text);
    }
    fflush(stdout);
    p->line_open = p->on_terminal && !done;
    p->last_shown = fmsa_tool_seconds();
}

void progress_step(progress *p, const run *r, double seconds) {
    const attention_phase phase = run_phase(r);
    const bool afresh = p->step_seconds == 0 || p->step_phase != phase;
    p->step_seconds = afresh ? seconds : 0.9 * p->step_seconds + 0.1 * seconds;
    p->step_phase = phase;
    const double pause = p->on_terminal ? seconds_between_redraws : seconds_between_lines;
    if (fmsa_tool_seconds() - p->last_shown >= pause) progress_show(p, r, false);
}
