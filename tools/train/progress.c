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

/* Takes the room that the rest of the line leaves, up to a pleasant width; none when there is hardly any. */
static void append_bar(line *l, const run *r, int room) {
    const int most_cells = 24, fewest_cells = 5, brackets = 3;
    const int cells = room - brackets < most_cells ? room - brackets : most_cells;
    if (cells < fewest_cells) return;
    const int filled = (int)(cells * r->step / (r->settings.steps > 0 ? r->settings.steps : 1));
    append(l, " [");
    for (int i = 0; i < cells; i++)
        append(l, "%c", i < filled ? '#' : '.');
    append(l, "]");
}

static void append_value(line *l, const char *label, double value, const char *format, double unit) {
    if (isnan(value)) return;
    char number[32];
    snprintf(number, sizeof number, format, value * unit);
    append(l, " %s %s", label, number);
}

/* The figures behind the bar. */
static line describe(const progress_state *state) {
    const run *r = state->run;
    const history *h = &r->history;
    const record *last = h->count > 0 ? &h->records[h->count - 1] : NULL;
    const record *evaluated = history_last_evaluation(h);
    const record *dense = state->dense != NULL ? history_last_evaluation(&state->dense->history) : NULL;
    const bool has_sums = r->sums.steps > 0;
    const double steps = (double)r->sums.steps;
    const long left = lround(state->seconds_left);
    line l = {.length = 0};
    append(&l, " %lld/%lld %ld:%02ld left", (long long)r->step, (long long)r->settings.steps, left / 60, left % 60);
    if (last != NULL)
        append_value(&l, "train", has_sums ? r->sums.training_loss / steps : last->training_loss, "%.3f", 1);
    if (evaluated != NULL) append_value(&l, "valid", evaluated->validation_loss, "%.3f", 1);
    if (dense != NULL) append_value(&l, "dense", dense->validation_loss, "%.3f", 1);
    if (last != NULL && !r->settings.dense) append_value(&l, "KL", has_sums ? r->sums.kl / steps : last->kl, "%.3f", 1);
    if (evaluated != NULL) append_value(&l, "recall", evaluated->recall, "%.0f%%", 100);
    if (evaluated != NULL) append_value(&l, "mass", evaluated->mass, "%.0f%%", 100);
    if (state->step_seconds > 0) append(&l, " %.1fk tok/s", (double)r->model.rows / state->step_seconds / 1000);
    return l;
}

bool progress_is_due(const progress *p) {
    const double pause = p->on_terminal ? seconds_between_redraws : seconds_between_lines;
    return fmsa_tool_seconds() - p->last_shown >= pause;
}

void progress_show(progress *p, const progress_state *state, bool done) {
    static const char *const phases[] = {
        [PHASE_DENSE] = "dense", [PHASE_WARMUP] = "warm-up", [PHASE_SPARSE] = "sparse"};
    const int columns = p->on_terminal ? terminal_columns() : 132;
    const line figures = describe(state);
    line l = {.length = 0};
    append(&l, "%-7s", phases[run_phase(state->run)]);
    append_bar(&l, state->run, columns - 1 - (int)(l.length + figures.length));
    append(&l, "%s", figures.text);
    if (p->on_terminal) {
        /* A line that wraps could not be redrawn. */
        if (l.length >= (size_t)columns) l.text[columns - 1] = 0;
        printf("\r%s\033[K%s", l.text, done ? "\n" : "");
    } else {
        printf("%s\n", l.text);
    }
    fflush(stdout);
    p->line_open = p->on_terminal && !done;
    p->last_shown = fmsa_tool_seconds();
}
