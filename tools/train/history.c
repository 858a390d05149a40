#include "history.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "failure.h"
#include "files.h"
#include "plot.h"

void history_add(history *h, const record *r) {
    h->records = realloc(h->records, (size_t)(h->count + 1) * sizeof *h->records);
    h->records[h->count++] = *r;
}

void history_close(history *h) {
    free(h->records);
    *h = (history){0};
}

const record *history_last_evaluation(const history *h) {
    for (int64_t i = h->count - 1; i >= 0; i--) {
        if (!isnan(h->records[i].validation_loss)) return &h->records[i];
    }
    return NULL;
}

/* ---- CSV. ---- */

static void write_field(FILE *out, const char *format, double value) {
    fputc(',', out);
    if (!isnan(value)) fprintf(out, format, value);
}

static void write_record(FILE *out, const char *run, const record *r) {
    static const char *const phases[] = {[PHASE_DENSE] = "dense", [PHASE_WARMUP] = "warmup", [PHASE_SPARSE] = "sparse"};
    fprintf(out, "%s,%lld,%s", run, (long long)r->step, phases[r->phase]);
    write_field(out, "%.3f", r->seconds);
    write_field(out, "%.6g", r->learning_rate);
    write_field(out, "%.6f", r->training_loss);
    write_field(out, "%.6f", r->validation_loss);
    write_field(out, "%.6f", r->kl);
    write_field(out, "%.5f", r->recall);
    write_field(out, "%.5f", r->mass);
    write_field(out, "%.0f", r->tokens_per_second);
    fputc('\n', out);
}

bool history_write_csv(const char *path, const named_history *runs, int count) {
    whole_file file;
    if (!whole_file_open(&file, path)) return false;
    fprintf(file.stream, "run,step,phase,seconds,learning_rate,training_loss,validation_loss,kl,block_recall,"
                         "attention_mass,tokens_per_second\n");
    for (int i = 0; i < count; i++) {
        for (int64_t j = 0; j < runs[i].history->count; j++) {
            write_record(file.stream, runs[i].name, &runs[i].history->records[j]);
        }
    }
    return whole_file_close(&file);
}

/* ---- Picture. ---- */

static const char dense_color[] = "#aeb6c2", msa_color[] = "#d9480f", recall_color[] = "#1c7ed6",
                  mass_color[] = "#2b8a3e";

static plot_series open_series(const history *h, const char *label, const char *color, int width, bool is_evaluated,
                               size_t field_offset) {
    plot_series s = {.label = label,
                     .color = color,
                     .width = width,
                     .dashed = !is_evaluated,
                     .dots = is_evaluated,
                     .count = h->count};
    s.x = train_allocate(h->count, sizeof *s.x);
    s.y = train_allocate(h->count, sizeof *s.y);
    for (int64_t i = 0; i < h->count; i++) {
        s.x[i] = (double)h->records[i].step;
        memcpy(&s.y[i], (const char *)&h->records[i] + field_offset, sizeof s.y[i]);
    }
    return s;
}

static void add_series(plot_panel *panel, plot_series s) {
    panel->series[panel->series_count++] = s;
}

static void close_panel(plot_panel *panel) {
    for (int i = 0; i < panel->series_count; i++) {
        free(panel->series[i].x);
        free(panel->series[i].y);
    }
}

bool history_write_picture(const char *path, const named_history *runs, int count) {
    plot_panel panels[] = {{.title = "Loss", .y_title = "nats a byte"},
                           {.title = "Proxy loss", .y_title = "KL, nats"},
                           {.title = "Proxies' choice", .y_title = "share", .is_share = true}};
    char title[160], marker_label[160];
    const model_shape *shape = &runs[count - 1].settings->shape;
    snprintf(title, sizeof title, "Training with MSA: %d of %d blocks of %d bytes", (int)shape->attention.top_k,
             (int)((shape->context + shape->attention.block_size - 1) / shape->attention.block_size),
             (int)shape->attention.block_size);
    plot p = {.title = title,
              .x_title = "steps",
              .greatest_x = (double)runs[count - 1].settings->steps,
              .marker_x = NAN,
              .panels = panels,
              .panel_count = 1};
    for (int i = 0; i < count; i++) {
        const history *h = runs[i].history;
        const bool is_dense = runs[i].settings->dense;
        const char *color = is_dense ? dense_color : msa_color;
        const int width = is_dense ? 5 : 2;
        add_series(&panels[0], open_series(h, is_dense ? "dense, training" : "MSA, training", color, width, false,
                                           offsetof(record, training_loss)));
        add_series(&panels[0], open_series(h, is_dense ? "dense, validation" : "MSA, validation", color, width, true,
                                           offsetof(record, validation_loss)));
        if (is_dense) continue;
        add_series(&panels[1], open_series(h, "training", msa_color, 2, false, offsetof(record, kl)));
        add_series(&panels[2], open_series(h, "block recall", recall_color, 2, true, offsetof(record, recall)));
        add_series(&panels[2], open_series(h, "attention mass", mass_color, 2, true, offsetof(record, mass)));
        p.panel_count = 3;
        p.marker_x = (double)runs[i].settings->warmup_steps;
        snprintf(marker_label, sizeof marker_label,
                 "Until the dotted line (step %.0f): warm-up with dense attention; from there on: sparse.", p.marker_x);
        p.marker_label = marker_label;
    }
    if (p.panel_count == 1) p.title = "Training with dense attention";
    const bool ok = plot_write(path, &p);
    for (size_t i = 0; i < sizeof panels / sizeof *panels; i++)
        close_panel(&panels[i]);
    return ok;
}
