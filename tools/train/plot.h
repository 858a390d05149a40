/* Line charts as SVG: panels below each other with a common horizontal axis. */
#ifndef TRAIN_PLOT_H
#define TRAIN_PLOT_H

#include <stdbool.h>
#include <stdint.h>

enum { PLOT_MOST_SERIES = 4 };

/* Points whose y is NaN are left out. Where a curve starts far above the rest of it, its start is cut off at the top of
 * the panel, so that the rest can be told apart. */
typedef struct plot_series {
    const char *label;
    const char *color; /* as SVG spells it */
    int width;         /* of the line; wide ones drawn first stay visible under narrow ones */
    bool dashed;
    bool dots; /* mark each point */
    int64_t count;
    double *x, *y;
} plot_series;

typedef struct plot_panel {
    const char *title;
    const char *y_title;
    bool is_share; /* y is a share: the axis runs to 100 % */
    plot_series series[PLOT_MOST_SERIES];
    int series_count;
} plot_panel;

typedef struct plot {
    const char *title;
    const char *x_title;
    double greatest_x;
    double marker_x; /* a vertical line through all panels; NaN: none */
    const char *marker_label;
    const plot_panel *panels;
    int panel_count;
} plot;

bool plot_write(const char *path, const plot *plot);

#endif
