/* SPDX-License-Identifier: MIT */
/*
 * demo_report - compares two training runs, one with Muon and one with AdamW.
 *
 *   demo_report [--svg OUT] muon.json muon.csv adamw.json adamw.csv
 *
 * The JSON files hold what train_gpt printed on standard output (the last line counts), the CSV
 * files are its --loss-csv. Prints a table on standard output, and draws both curves to OUT. Exit
 * status 2 with one line on standard error if a file is missing or damaged or cannot be written, 1
 * if standard output does not take the table.
 */
#include "gpt/curve.h"
#include "gpt/loss_chart.h"
#include "gpt/result.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct run {
  const char *name;
  gpt_result result;
  gpt_curve curve;
  double *smooth; /* trailing mean of the training loss, one value per step */
} run;

static int run_load(run *r, const char *name, const char *json, const char *csv, gpt_error *error) {
  r->name = name;
  if (gpt_result_read(json, &r->result, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (gpt_curve_read(csv, &r->curve, error) != GPT_OK) return GPT_USAGE_ERROR;
  r->smooth = (double *)malloc((size_t)r->curve.count * sizeof *r->smooth);
  if (!r->smooth) return gpt_fail(error, "no memory for %s", csv);
  gpt_curve_smooth(r->curve.count, r->curve.loss, gpt_curve_window(r->curve.count), r->smooth);
  return GPT_OK;
}

static void run_free(run *r) {
  gpt_curve_destroy(&r->curve);
  free(r->smooth);
}

/* First step at which values is at most goal; values that are NAN (unknown) never are. 0: never. */
static int64_t first_step_at(const gpt_curve *curve, const double *values, double goal) {
  for (int64_t i = 0; i < curve->count; ++i)
    if (values[i] <= goal) return (int64_t)curve->step[i];
  return 0;
}

/* ---- the table ---- */

static void print_row(const char *label, const char *muon, const char *adamw) {
  printf("  %-46s %16s %16s\n", label, muon, adamw);
}

static void print_reals(const char *label, int decimals, double muon, double adamw) {
  char a[40], b[40];
  snprintf(a, sizeof a, "%.*f", decimals, muon);
  snprintf(b, sizeof b, "%.*f", decimals, adamw);
  print_row(label, a, b);
}

static void print_counts(const char *label, int64_t muon, int64_t adamw) {
  char a[40], b[40];
  snprintf(a, sizeof a, "%" PRId64, muon);
  snprintf(b, sizeof b, "%" PRId64, adamw);
  print_row(label, a, b);
}

/* Small numbers in full: 0 must look like 0. */
static void bytes_text(int64_t bytes, char *text, size_t capacity) {
  if (bytes < 1000000)
    snprintf(text, capacity, "%" PRId64 " B", bytes);
  else if (bytes < 1000000000)
    snprintf(text, capacity, "%.1f MB", (double)bytes / 1e6);
  else
    snprintf(text, capacity, "%.2f GB", (double)bytes / 1e9);
}

static void print_bytes(const char *label, int64_t muon, int64_t adamw) {
  char a[40], b[40];
  bytes_text(muon, a, sizeof a);
  bytes_text(adamw, b, sizeof b);
  print_row(label, a, b);
}

static void print_steps(const char *label, int64_t muon, int64_t adamw) {
  char a[40], b[40];
  if (muon > 0)
    snprintf(a, sizeof a, "%" PRId64, muon);
  else
    snprintf(a, sizeof a, "not reached");
  if (adamw > 0)
    snprintf(b, sizeof b, "%" PRId64, adamw);
  else
    snprintf(b, sizeof b, "-");
  print_row(label, a, b);
}

/* "21.3" where all ranks are equal to a tenth, else "20.9 - 21.3". */
static void memory_text(const gpt_result *r, char *text, size_t capacity) {
  int64_t low = r->resident_bytes[0], high = low;
  char first[24], last[24];
  for (int64_t i = 1; i < r->ranks; ++i) {
    if (r->resident_bytes[i] < low) low = r->resident_bytes[i];
    if (r->resident_bytes[i] > high) high = r->resident_bytes[i];
  }
  snprintf(first, sizeof first, "%.1f", (double)low / 1048576.0);
  snprintf(last, sizeof last, "%.1f", (double)high / 1048576.0);
  if (strcmp(first, last) == 0)
    snprintf(text, capacity, "%s", first);
  else
    snprintf(text, capacity, "%s - %s", first, last);
}

static void print_table(const run *muon, const run *adamw) {
  const gpt_result *m = &muon->result, *a = &adamw->result;
  const double goal = adamw->smooth[adamw->curve.count - 1];
  char muon_memory[64], adamw_memory[64];
  print_row("", muon->name, adamw->name);
  print_counts("steps", m->steps, a->steps);
  print_counts("ranks", m->ranks, a->ranks);
  print_reals("training loss, mean of the last steps", 4, muon->smooth[muon->curve.count - 1],
              goal);
  print_reals("validation loss, nats per byte", 4, m->val_loss, a->val_loss);
  print_steps("steps to AdamW's last training loss",
              first_step_at(&muon->curve, muon->smooth, goal),
              first_step_at(&adamw->curve, adamw->smooth, goal));
  print_steps("steps to AdamW's validation loss",
              first_step_at(&muon->curve, muon->curve.val_loss, a->val_loss),
              first_step_at(&adamw->curve, adamw->curve.val_loss, a->val_loss));
  print_reals("tokens per second", 0, m->tokens_per_s, a->tokens_per_s);
  print_reals("optimizer step, ms", 2, m->opt_step_ms, a->opt_step_ms);
  print_counts("Newton-Schulz calls", m->ns_calls, a->ns_calls);
  print_bytes("bytes moved to gather parameters", m->bytes.materialize, a->bytes.materialize);
  print_bytes("bytes moved for gradients", m->bytes.reduce, a->bytes.reduce);
  print_bytes("matrix bytes moved for the optimizer", m->bytes.optimizer_matrix,
              a->bytes.optimizer_matrix);
  memory_text(m, muon_memory, sizeof muon_memory);
  memory_text(a, adamw_memory, sizeof adamw_memory);
  print_row("resident memory per rank, MiB", muon_memory, adamw_memory);
}

static int draw(const char *path, const run *runs, gpt_error *error) {
  const gpt_loss_run curves[2] = {{runs[0].name, &runs[0].curve}, {runs[1].name, &runs[1].curve}};
  return gpt_loss_chart_write(path, "Owner-sharded Muon and AdamW on the same text", curves, 2,
                              error);
}

static int report(const char *svg, char **files, gpt_error *error) {
  run runs[2];
  int status;
  memset(runs, 0, sizeof runs);
  status = run_load(&runs[0], "Muon", files[0], files[1], error);
  if (status == GPT_OK) status = run_load(&runs[1], "AdamW", files[2], files[3], error);
  if (status == GPT_OK) print_table(&runs[0], &runs[1]);
  if (status == GPT_OK && svg) status = draw(svg, runs, error);
  run_free(&runs[0]);
  run_free(&runs[1]);
  return status;
}

/* What was printed is out, or it is said that it is not. */
static int finish(void) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
  fprintf(stderr, "demo_report: cannot write to standard output\n");
  return 1;
}

int main(int argc, char **argv) {
  static const char usage[] = "demo_report [--svg OUT] muon.json muon.csv adamw.json adamw.csv";
  const char *svg = NULL;
  gpt_error error = {""};
  int at = 1;
  if (argc > 1 && strcmp(argv[1], "--help") == 0) {
    printf("usage: %s\n", usage);
    return finish();
  }
  if (argc > 2 && strcmp(argv[1], "--svg") == 0) {
    svg = argv[2];
    at = 3;
  }
  if (argc - at != 4) {
    fprintf(stderr, "demo_report: give two runs: %s\n", usage);
    return GPT_USAGE_ERROR;
  }
  if (report(svg, argv + at, &error) == GPT_OK) return finish();
  fprintf(stderr, "demo_report: %s\n", error.text);
  return GPT_USAGE_ERROR;
}
