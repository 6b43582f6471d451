/* SPDX-License-Identifier: MIT */
#include "loss_chart.h"

#include "svg.h"

#include <math.h>
#include <string.h>

static int has_validation(const gpt_curve *curve) {
  int known = 0;
  for (int64_t i = 0; i < curve->count; ++i)
    known += isfinite(curve->val_loss[i]) != 0;
  return known >= 2;
}

/* Adds one run's line; `name` must live until the chart is written. */
static void add_series(gpt_svg_chart *chart, gpt_svg_series *series, const gpt_loss_run *run,
                       const char *name, int color, gpt_loss_x x, int validation) {
  gpt_svg_series *s = &series[chart->series_count++];
  s->name = name;
  s->x = x == GPT_LOSS_BY_TIME ? run->curve->elapsed_s : run->curve->step;
  s->y = validation ? run->curve->val_loss : run->curve->loss;
  s->count = run->curve->count;
  s->color = color;
  s->smooth = !validation;
  s->points = validation;
}

static int check_count(const char *path, int run_count, gpt_error *error) {
  if (run_count <= GPT_LOSS_CHART_MAX_RUNS) return GPT_OK;
  return gpt_fail(error, "%s: a chart shows at most %d runs", path, GPT_LOSS_CHART_MAX_RUNS);
}

static void start_chart(gpt_svg_chart *chart, const char *title, gpt_loss_x x,
                        const gpt_svg_series *series) {
  memset(chart, 0, sizeof *chart);
  chart->title = title;
  chart->x_label = x == GPT_LOSS_BY_TIME ? "time (seconds)" : "optimizer step";
  chart->y_label = "loss (nats per byte)";
  chart->series = series;
}

int gpt_loss_chart_write(const char *path, const char *title, const gpt_loss_run *runs,
                         int run_count, gpt_error *error) {
  gpt_svg_series series[2 * GPT_LOSS_CHART_MAX_RUNS];
  char names[2 * GPT_LOSS_CHART_MAX_RUNS][64];
  gpt_svg_chart chart;
  if (check_count(path, run_count, error) != GPT_OK) return GPT_USAGE_ERROR;
  memset(series, 0, sizeof series);
  start_chart(&chart, title, GPT_LOSS_BY_STEP, series);
  for (int validation = 0; validation < 2; ++validation)
    for (int i = 0; i < run_count; ++i) {
      char *name = names[chart.series_count];
      if (validation && !has_validation(runs[i].curve)) continue;
      snprintf(name, sizeof names[0], "%.45s, %s", runs[i].name,
               validation ? "validation" : "training");
      add_series(&chart, series, &runs[i], name, i, GPT_LOSS_BY_STEP, validation);
    }
  return gpt_svg_write(path, &chart, error);
}

int gpt_loss_chart_compare(const char *path, const char *title, gpt_loss_x x,
                           const gpt_loss_run *runs, int run_count, gpt_error *error) {
  gpt_svg_series series[GPT_LOSS_CHART_MAX_RUNS];
  gpt_svg_chart chart;
  if (check_count(path, run_count, error) != GPT_OK) return GPT_USAGE_ERROR;
  memset(series, 0, sizeof series);
  start_chart(&chart, title, x, series);
  for (int i = 0; i < run_count; ++i)
    add_series(&chart, series, &runs[i], runs[i].name, i, x, 0);
  return gpt_svg_write(path, &chart, error);
}
