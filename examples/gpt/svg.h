/* SPDX-License-Identifier: MIT */
/*
 * svg.h - a line chart of several named series as one SVG file, readable without scripts or fonts
 * of its own: title, axes with round tick values, grid, labels, legend, light background.
 */
#ifndef GPT_SVG_H
#define GPT_SVG_H

#include "error.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_svg_series {
  const char *name;
  const double *x, *y; /* count each; points that are not finite are left out */
  int64_t count;
  int color;  /* 0, 1, 2, ...: place in the palette; series that belong together share one */
  int smooth; /* 1: a moving average drawn strongly over the faint raw line */
  int points; /* 1: dashed, with a mark on each point (values known now and then) */
} gpt_svg_series;

typedef struct gpt_svg_chart {
  const char *title, *x_label, *y_label;
  const gpt_svg_series *series;
  int series_count;
} gpt_svg_chart;

/* Writes `path`. The range is that of the drawn (smoothed) lines; raw lines are clipped to it.
 * Fails if no series has a finite point or the file cannot be written. */
int gpt_svg_write(const char *path, const gpt_svg_chart *chart, gpt_error *error);

#ifdef __cplusplus
}
#endif

#endif /* GPT_SVG_H */
