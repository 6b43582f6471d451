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

int gpt_loss_chart_write(const char *path, const char *title, const gpt_loss_run *runs,
                         int run_count, gpt_error *error) {
  gpt_svg_series series[2 * GPT_LOSS_CHART_MAX_RUNS];
  char names[2 * GPT_LOSS_CHART_MAX_RUNS][64];
  gpt_svg_chart chart;
  if (run_count > GPT_LOSS_CHART_MAX_RUNS)
    return gpt_fail(error, "%s: a chart shows at most %d runs", path, GPT_LOSS_CHART_MAX_RUNS);
  memset(series, 0, sizeof series);
  memset(&chart, 0, sizeof chart);
  chart.title = title;
  chart.x_label = "optimizer step";
  chart.y_label = "loss (nats per byte)";
  chart.series = series;
  for (int validation = 0; validation < 2; ++validation)
    for (int i = 0; i < run_count; ++i) {
      gpt_svg_series *s = &series[chart.series_count];
      char *name = names[chart.series_count];
      if (validation && !has_validation(runs[i].curve)) continue;
      snprintf(name, sizeof names[0], "%.45s, %s", runs[i].name,
               validation ? "validation" : "training");
      s->name = name;
      s->x = runs[i].curve->step;
      s->y = validation ? runs[i].curve->val_loss : runs[i].curve->loss;
      s->count = runs[i].curve->count;
      s->color = i;
      s->smooth = !validation;
      s->points = validation;
      ++chart.series_count;
    }
  return gpt_svg_write(path, &chart, error);
}
