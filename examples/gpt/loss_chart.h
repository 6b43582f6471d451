/* SPDX-License-Identifier: MIT */
/*
 * loss_chart.h - the loss curves of one or more runs as one picture: training loss smoothed over
 * its faint raw line, validation loss dashed with a mark at each value.
 */
#ifndef GPT_LOSS_CHART_H
#define GPT_LOSS_CHART_H

#include "curve.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GPT_LOSS_CHART_MAX_RUNS = 5 };

typedef struct gpt_loss_run {
  const char *name; /* in the legend, as "name, training" */
  const gpt_curve *curve;
} gpt_loss_run;

/* Writes an SVG to `path`. A validation curve is drawn where at least two values are known. */
int gpt_loss_chart_write(const char *path, const char *title, const gpt_loss_run *runs,
                         int run_count, gpt_error *error);

typedef enum gpt_loss_x { GPT_LOSS_BY_STEP = 0, GPT_LOSS_BY_TIME } gpt_loss_x;

/* The training curves alone, against steps or against seconds: for comparisons of many runs. */
int gpt_loss_chart_compare(const char *path, const char *title, gpt_loss_x x,
                           const gpt_loss_run *runs, int run_count, gpt_error *error);

#ifdef __cplusplus
}
#endif

#endif /* GPT_LOSS_CHART_H */
