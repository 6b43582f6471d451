/* SPDX-License-Identifier: MIT */
/*
 * curve.h - a loss curve as a CSV file: writing it row by row, and reading it back.
 *
 *   step,loss,elapsed_s,val_loss
 *   1,5.54512,0.21,
 *   2,5.41077,0.43,5.40513
 *
 * step counts completed steps from 1; val_loss is empty where it was not computed; a diverged loss
 * is `nan` or `inf`.
 */
#ifndef GPT_CURVE_H
#define GPT_CURVE_H

#include "error.h"

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_curve_writer {
  FILE *file; /* NULL: rows are dropped, so that a caller without --loss-csv needs no branch */
  const char *path;
} gpt_curve_writer;

/* path NULL: a writer that drops rows. Each row is flushed, so an interrupted run keeps its curve.
 */
int gpt_curve_open(const char *path, gpt_curve_writer *writer, gpt_error *error);
/* val_loss NAN: not computed. */
void gpt_curve_row(gpt_curve_writer *writer, int64_t step, double loss, double elapsed_s,
                   double val_loss);
/* Fails if any row could not be written (disk full). Safe to call twice. */
int gpt_curve_close(gpt_curve_writer *writer, gpt_error *error);

typedef struct gpt_curve {
  int64_t count;
  double *step, *loss, *elapsed_s, *val_loss; /* count each; val_loss is NAN where it is unknown */
} gpt_curve;

/* Strict: the header above, four fields a row, increasing steps, at least one row. Errors name file
 * and line. On failure *curve needs no destroy. */
int gpt_curve_read(const char *path, gpt_curve *curve, gpt_error *error);
void gpt_curve_destroy(gpt_curve *curve);

/*
 * A curve that is recorded while training, in a fixed amount of memory: when its rows are full,
 * neighbours are joined (mean loss, the later step and time, the last known val_loss) and from then
 * on a row stands for twice as many steps.
 */
typedef struct gpt_curve_log {
  gpt_curve curve; /* what is recorded so far */
  int64_t stride;  /* steps that one row stands for */
  int64_t pending; /* steps in the unfinished row, which stands behind the last one */
} gpt_curve_log;

enum { GPT_CURVE_LOG_ROWS = 16384 };

int gpt_curve_log_create(gpt_curve_log *log, gpt_error *error);
/* Allocates nothing. */
void gpt_curve_log_add(gpt_curve_log *log, int64_t step, double loss, double elapsed_s,
                       double val_loss);
/* After the last step: the unfinished row, if any, counts too. */
void gpt_curve_log_finish(gpt_curve_log *log);
void gpt_curve_log_destroy(gpt_curve_log *log);

/* out[i] = mean of values[max(0, i - window + 1) .. i]; out must not be values; window >= 1. */
void gpt_curve_smooth(int64_t count, const double *values, int64_t window, double *out);
/* The window that the chart and the report use for a curve of `count` steps: a fortieth of it. */
int64_t gpt_curve_window(int64_t count);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CURVE_H */
