/* SPDX-License-Identifier: MIT */
/*
 * optimizers_report - compares optimizers, each at the best of the learning rates that were tried.
 *
 *   optimizers_report [--by-step OUT] [--by-time OUT] NAME LR JSON CSV [NAME LR JSON CSV ...]
 *
 * A run is four arguments: the optimizer's name (runs of one optimizer stand together), the rate,
 * what train_gpt printed on standard output (the last line counts), and its --loss-csv. Prints all
 * runs as a table on standard output, the best of each optimizer (by validation loss) marked, and
 * draws the training losses of the best ones against steps and against time. Exit status 2 with one
 * line on standard error if an argument or a file is wrong, 1 if standard output does not take the
 * table.
 */
#include "gpt/curve.h"
#include "gpt/loss_chart.h"
#include "gpt/result.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct run {
  const char *name, *rate;
  gpt_result result;
  gpt_curve curve;
  double last_loss; /* mean of the training loss over the last steps */
} run;

static int run_load(run *r, char **words, gpt_error *error) {
  double *smooth;
  r->name = words[0];
  r->rate = words[1];
  if (gpt_result_read(words[2], &r->result, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (gpt_curve_read(words[3], &r->curve, error) != GPT_OK) return GPT_USAGE_ERROR;
  smooth = (double *)malloc((size_t)r->curve.count * sizeof *smooth);
  if (!smooth) return gpt_fail(error, "no memory for %s", words[3]);
  gpt_curve_smooth(r->curve.count, r->curve.loss, gpt_curve_window(r->curve.count), smooth);
  r->last_loss = smooth[r->curve.count - 1];
  free(smooth);
  return GPT_OK;
}

/* Index of the run of this optimizer with the smallest validation loss, a diverged one last. */
static int best_of(const run *runs, int count, const char *name) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (strcmp(runs[i].name, name) != 0) continue;
    if (best < 0 || runs[i].result.val_loss < runs[best].result.val_loss ||
        (isnan(runs[best].result.val_loss) && !isnan(runs[i].result.val_loss)))
      best = i;
  }
  return best;
}

/* 1 for the first run of its optimizer. */
static int opens(const run *runs, int index) {
  for (int i = 0; i < index; ++i)
    if (strcmp(runs[i].name, runs[index].name) == 0) return 0;
  return 1;
}

static void print_table(const run *runs, int count) {
  printf("  %-22s %9s   %13s %15s %8s %9s %14s\n", "optimizer", "lr", "training loss",
         "validation loss", "steps", "seconds", "optimizer, ms");
  for (int i = 0; i < count; ++i) {
    const run *r = &runs[i];
    printf("%s %-22s %9s   %13.4f %15.4f %8" PRId64 " %9.1f %14.2f\n",
           best_of(runs, count, r->name) == i ? "*" : " ", r->name, r->rate, r->last_loss,
           r->result.val_loss, r->result.steps, r->curve.elapsed_s[r->curve.count - 1],
           r->result.opt_step_ms);
  }
  printf("\n* the best of each optimizer by validation loss. Losses in nats per byte, training as "
         "the mean\n  of the last steps; seconds of the whole run with its validations; optimizer: "
         "mean of a step on\n  the slowest rank.\n");
}

static int draw(const char *path, gpt_loss_x x, const run *runs, int count, gpt_error *error) {
  gpt_loss_run best[GPT_LOSS_CHART_MAX_RUNS + 1];
  char names[GPT_LOSS_CHART_MAX_RUNS + 1][64];
  int used = 0;
  for (int i = 0; i < count && used <= GPT_LOSS_CHART_MAX_RUNS; ++i) {
    const run *r = &runs[best_of(runs, count, runs[i].name)];
    if (!opens(runs, i)) continue;
    snprintf(names[used], sizeof names[used], "%.40s, lr %.16s", r->name, r->rate);
    best[used].name = names[used];
    best[used++].curve = &r->curve;
  }
  return gpt_loss_chart_compare(path, "Optimizers on the same model and text", x, best, used,
                                error);
}

static int report(const char *by_step, const char *by_time, char **words, int count,
                  gpt_error *error) {
  run *runs = (run *)calloc((size_t)count, sizeof *runs);
  int status = runs ? GPT_OK : gpt_fail(error, "no memory for %d runs", count);
  for (int i = 0; i < count && status == GPT_OK; ++i)
    status = run_load(&runs[i], &words[4 * i], error);
  if (status == GPT_OK) print_table(runs, count);
  if (status == GPT_OK && by_step) status = draw(by_step, GPT_LOSS_BY_STEP, runs, count, error);
  if (status == GPT_OK && by_time) status = draw(by_time, GPT_LOSS_BY_TIME, runs, count, error);
  for (int i = 0; runs && i < count; ++i)
    gpt_curve_destroy(&runs[i].curve);
  free(runs);
  return status;
}

/* What was printed is out, or it is said that it is not. */
static int finish(void) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
  fprintf(stderr, "optimizers_report: cannot write to standard output\n");
  return 1;
}

int main(int argc, char **argv) {
  static const char usage[] =
      "optimizers_report [--by-step OUT] [--by-time OUT] NAME LR JSON CSV [...]";
  const char *by_step = NULL, *by_time = NULL;
  gpt_error error = {""};
  int at = 1;
  if (argc > 1 && strcmp(argv[1], "--help") == 0) {
    printf("usage: %s\n", usage);
    return finish();
  }
  for (; argc - at >= 2; at += 2)
    if (strcmp(argv[at], "--by-step") == 0)
      by_step = argv[at + 1];
    else if (strcmp(argv[at], "--by-time") == 0)
      by_time = argv[at + 1];
    else
      break;
  if (argc - at < 4 || (argc - at) % 4 != 0) {
    fprintf(stderr, "optimizers_report: give four words a run: %s\n", usage);
    return GPT_USAGE_ERROR;
  }
  if (report(by_step, by_time, argv + at, (argc - at) / 4, &error) == GPT_OK) return finish();
  fprintf(stderr, "optimizers_report: %s\n", error.text);
  return GPT_USAGE_ERROR;
}
