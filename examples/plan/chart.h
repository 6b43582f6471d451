/* SPDX-License-Identifier: MIT */
/* chart.h - lines over logarithmic axes (base 2 across, base 10 up) as a part of an SVG. */
#ifndef PLAN_CHART_H
#define PLAN_CHART_H

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct plan_series {
  const char *name;
  const double *x, *y; /* count each, positive; a y <= 0 is left out */
  int count;
  int color;  /* 0, 1, ...: place in the palette */
  int dashed; /* 1: dashed, marks filled with white */
} plan_series;

typedef struct plan_chart {
  const char *title, *x_label, *y_label;
  const plan_series *series;
  int series_count;
} plan_chart;

enum { PLAN_CHART_WIDTH = 620, PLAN_CHART_HEIGHT = 460 };

/* Draws the chart with its upper left corner at (left, top); the caller writes the svg element. */
void plan_chart_put(FILE *f, const plan_chart *chart, double left, double top);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_CHART_H */
