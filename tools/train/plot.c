#include "plot.h"

#include <math.h>
#include <stdio.h>

#include "files.h"

/* Pixels. */
enum {
    WIDTH = 860,
    LEFT = 76,
    RIGHT = 24,
    TOP = 64,
    PANEL_HEIGHT = 210,
    PANEL_TITLE = 34,
    PANEL_GAP = 34,
    BOTTOM = 56,
    PLOT_WIDTH = WIDTH - LEFT - RIGHT,
    LEGEND_LINE = 26
};

static const char frame_color[] = "#8a8f98", grid_color[] = "#e6e8eb", text_color[] = "#22262b";

typedef struct axis {
    double least, greatest, tick;
} axis;

static double place(const axis *a, double value) {
    return (value - a->least) / (a->greatest - a->least);
}

/* 1, 2 or 5 times a power of ten, so that about the given number of steps span the range. */
static double nice_tick(double range, int ticks) {
    const double rough = range / ticks, power = pow(10, floor(log10(rough))), rest = rough / power;
    return power * (rest < 1.5 ? 1 : rest < 3.5 ? 2 : rest < 7.5 ? 5 : 10);
}

static axis axis_over(double least, double greatest, int ticks) {
    if (!(least < greatest)) {
        /* No point, or all alike. */
        const double middle = isfinite(least) ? least : 0;
        least = middle - 0.5;
        greatest = middle + 0.5;
    }
    const double tick = nice_tick(greatest - least, ticks);
    return (axis){floor(least / tick) * tick, ceil(greatest / tick) * tick, tick};
}

static bool is_point(const plot_series *s, int64_t i) {
    return isfinite(s->x[i]) && isfinite(s->y[i]);
}

/* The range of the points from a share of the horizontal axis on. */
static void find_range(const plot_panel *p, double from_x, double *least, double *greatest) {
    *least = INFINITY;
    *greatest = -INFINITY;
    for (int s = 0; s < p->series_count; s++) {
        for (int64_t i = 0; i < p->series[s].count; i++) {
            if (!is_point(&p->series[s], i) || p->series[s].x[i] < from_x) continue;
            *least = fmin(*least, p->series[s].y[i]);
            *greatest = fmax(*greatest, p->series[s].y[i]);
        }
    }
}

static axis y_axis(const plot_panel *p, double greatest_x) {
    const double start_share = 0.08;
    double least, greatest;
    find_range(p, 0, &least, &greatest);
    if (p->is_share) {
        axis a = axis_over(fmin(least, 0.9), 1, 4);
        a.greatest = 1;
        return a;
    }
    double least_later, greatest_later;
    find_range(p, start_share * greatest_x, &least_later, &greatest_later);
    if (least_later < greatest_later) {
        least = least_later;
        greatest = greatest_later;
    }
    return axis_over(least, greatest, 5);
}

static axis x_axis(const plot *p) {
    axis a = axis_over(0, p->greatest_x, 8);
    a.greatest = p->greatest_x;
    return a;
}

static void write_text(FILE *out, double x, double y, const char *anchor, int size, const char *weight,
                       const char *text) {
    fprintf(
        out,
        "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-size=\"%d\" font-weight=\"%s\" fill=\"%s\">%s</text>\n", x,
        y, anchor, size, weight, text_color, text);
}

static void write_line(FILE *out, double x1, double y1, double x2, double y2, const char *color, const char *dashes) {
    fprintf(out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-dasharray=\"%s\"/>\n", x1,
            y1, x2, y2, color, dashes);
}

static void write_y_ticks(FILE *out, const axis *y, double top, bool is_share) {
    /* Half a tick of tolerance against the rounding of repeated sums. */
    for (double v = y->least; v < y->greatest + y->tick / 2; v += y->tick) {
        const double at = top + PANEL_HEIGHT * (1 - place(y, v));
        if (at < top - 0.5) break;
        char label[32];
        const int decimals = y->tick >= 1 ? 0 : (int)ceil(-log10(y->tick) - 1e-9);
        if (is_share) snprintf(label, sizeof label, "%.*f %%", y->tick < 0.01 ? 1 : 0, 100 * v);
        if (!is_share) snprintf(label, sizeof label, "%.*f", decimals, fabs(v) < y->tick / 2 ? 0 : v);
        write_line(out, LEFT, at, WIDTH - RIGHT, at, grid_color, "none");
        write_text(out, LEFT - 8, at + 4, "end", 12, "normal", label);
    }
}

static void write_x_ticks(FILE *out, const axis *x, double bottom, bool labels) {
    for (double v = x->least; v < x->greatest + x->tick * 1e-6; v += x->tick) {
        const double at = LEFT + PLOT_WIDTH * place(x, v);
        char label[32];
        snprintf(label, sizeof label, "%.0f", v);
        write_line(out, at, bottom - PANEL_HEIGHT, at, bottom, grid_color, "none");
        if (labels) write_text(out, at, bottom + 18, "middle", 12, "normal", label);
    }
}

static void write_series(FILE *out, const plot_series *s, const axis *x, const axis *y, double top) {
    fprintf(out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%d\" stroke-dasharray=\"%s\" points=\"",
            s->color, s->width, s->dashed ? "6 4" : "none");
    for (int64_t i = 0; i < s->count; i++) {
        if (!is_point(s, i)) continue;
        fprintf(out, "%.1f,%.1f ", LEFT + PLOT_WIDTH * place(x, s->x[i]), top + PANEL_HEIGHT * (1 - place(y, s->y[i])));
    }
    fprintf(out, "\"/>\n");
    for (int64_t i = 0; s->dots && i < s->count; i++) {
        if (!is_point(s, i)) continue;
        fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\" fill=\"%s\"/>\n",
                LEFT + PLOT_WIDTH * place(x, s->x[i]), top + PANEL_HEIGHT * (1 - place(y, s->y[i])), 2 + s->width / 2.0,
                s->color);
    }
}

/* A dot at the edge of the panel is shown whole, except at the top, where curves are cut off. */
static void write_curves(FILE *out, const plot_panel *panel, const axis *x, const axis *y, double top) {
    const int margin = 6;
    fprintf(out,
            "<clipPath id=\"panel%.0f\"><rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\"/></clipPath>\n"
            "<g clip-path=\"url(#panel%.0f)\">\n",
            top, LEFT - margin, top, PLOT_WIDTH + 2 * margin, PANEL_HEIGHT + margin, top);
    for (int s = 0; s < panel->series_count; s++)
        write_series(out, &panel->series[s], x, y, top);
    fprintf(out, "</g>\n");
}

/* The legend stands to the right of the panel's title, above its frame, so that it can never cover a curve. */
static void write_legend(FILE *out, const plot_panel *p, double top) {
    const double letter = 6.6, gap = 22;
    double x = WIDTH - RIGHT;
    for (int s = p->series_count - 1; s >= 0; s--) {
        const plot_series *series = &p->series[s];
        int letters = 0;
        while (series->label[letters] != 0)
            letters++;
        x -= letters * letter;
        write_text(out, x, top - 10, "start", 12, "normal", series->label);
        fprintf(out,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"%d\" "
                "stroke-dasharray=\"%s\"/>\n",
                x - LEGEND_LINE - 5, top - 14, x - 5, top - 14, series->color, series->width,
                series->dashed ? "6 4" : "none");
        x -= LEGEND_LINE + 5 + gap;
    }
}

static void write_panel(FILE *out, const plot *p, const plot_panel *panel, const axis *x, double top, bool is_last) {
    const axis y = y_axis(panel, p->greatest_x);
    const double bottom = top + PANEL_HEIGHT;
    write_y_ticks(out, &y, top, panel->is_share);
    write_x_ticks(out, x, bottom, is_last);
    fprintf(out, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"%s\"/>\n", LEFT, top,
            PLOT_WIDTH, PANEL_HEIGHT, frame_color);
    if (isfinite(p->marker_x)) {
        const double at = LEFT + PLOT_WIDTH * place(x, p->marker_x);
        write_line(out, at, top, at, bottom, frame_color, "3 3");
    }
    write_curves(out, panel, x, &y, top);
    write_text(out, LEFT, top - 10, "start", 14, "bold", panel->title);
    write_legend(out, panel, top);
    fprintf(out,
            "<text transform=\"translate(18 %.1f) rotate(-90)\" text-anchor=\"middle\" font-size=\"12\" "
            "fill=\"%s\">%s</text>\n",
            top + PANEL_HEIGHT / 2.0, text_color, panel->y_title);
}

bool plot_write(const char *path, const plot *p) {
    whole_file file;
    if (!whole_file_open(&file, path)) return false;
    FILE *out = file.stream;
    const int height = TOP + p->panel_count * (PANEL_TITLE + PANEL_HEIGHT) + (p->panel_count - 1) * PANEL_GAP + BOTTOM;
    const axis x = x_axis(p);
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n"
            "<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n",
            WIDTH, height, WIDTH, height, WIDTH, height);
    write_text(out, LEFT, 32, "start", 18, "bold", p->title);
    if (isfinite(p->marker_x)) write_text(out, LEFT, 54, "start", 12, "normal", p->marker_label);
    for (int i = 0; i < p->panel_count; i++) {
        const double top = TOP + PANEL_TITLE + i * (PANEL_HEIGHT + PANEL_TITLE + PANEL_GAP);
        write_panel(out, p, &p->panels[i], &x, top, i == p->panel_count - 1);
    }
    write_text(out, LEFT + PLOT_WIDTH / 2.0, height - 14, "middle", 13, "normal", p->x_title);
    fprintf(out, "</svg>\n");
    return whole_file_close(&file);
}
