/* SPDX-License-Identifier: MIT */
#include "bench.h"

#include "mfsdp/posix/clock.h"

#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef MFSDP_BENCH_BUILD
#define MFSDP_BENCH_BUILD "unknown flags"
#endif

/* gcc's __VERSION__ is a number alone. */
#if defined(__clang__)
#define BENCH_COMPILER __VERSION__
#else
#define BENCH_COMPILER "gcc " __VERSION__
#endif

int bench_parse(int argc, char **argv, const char *about, bench_options *options) {
  int i;
  memset(options, 0, sizeof(*options));
  for (i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--quick") == 0) {
      options->quick = 1;
    } else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      options->json = argv[++i];
    } else if (strcmp(argv[i], "--help") == 0) {
      printf("%s\n\n  --quick      fewer repeats, under a minute\n"
             "  --json FILE  write the rows as JSON\n  --help       this text\n",
             about);
      return 1;
    } else {
      fprintf(stderr, "%s: unknown option or missing value: %s (see --help)\n", argv[0], argv[i]);
      return 2;
    }
  }
  return 0;
}

double bench_now(void) {
  return (double)mfsdp_clock_us() * 1e-6;
}

static int compare_doubles(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

bench_stats bench_summarize(double *values, int count) {
  bench_stats stats;
  qsort(values, (size_t)count, sizeof(*values), compare_doubles);
  stats.min = values[0];
  stats.median = count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
  stats.p99 = values[(count * 99 + 99) / 100 - 1];
  return stats;
}

bench_row bench_row_default(void) {
  bench_row row;
  memset(&row, 0, sizeof(row));
  row.ratio_to_peer = row.ratio_to_limit = (double)NAN;
  row.wrong = -1;
  return row;
}

static void print_cpu(void) {
  char line[512], *colon;
  FILE *file = fopen("/proc/cpuinfo", "r");
  while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
    if (strncmp(line, "model name", 10) != 0) continue;
    colon = strchr(line, ':');
    printf("cpu:      %ld x%s", sysconf(_SC_NPROCESSORS_ONLN), colon ? colon + 1 : " ?\n");
    break;
  }
  if (file != NULL) fclose(file);
}

int bench_open(bench_report *report, const char *bench, const bench_options *options) {
  const time_t now = time(NULL);
  struct tm utc;
  char date[32] = "?";
  memset(report, 0, sizeof(*report));
  report->bench = bench;
  if (gmtime_r(&now, &utc) != NULL) (void)strftime(date, sizeof(date), "%Y-%m-%d", &utc);
  if (options->json != NULL) {
    report->json = fopen(options->json, "w");
    if (report->json == NULL) {
      fprintf(stderr, "%s: cannot write %s; give --json a file in a folder that exists\n", bench,
              options->json);
      return 2;
    }
    fprintf(report->json, "[");
  }
  printf("bench:    %s%s\ndate:     %s\ncompiler: %s\nbuild:    %s\nmath:     %s\n", bench,
         options->quick ? " --quick" : "", date, BENCH_COMPILER, MFSDP_BENCH_BUILD,
         bench_math()->name);
  print_cpu();
  printf("\n%-34s %-20s %12s %-8s %8s %-22s %8s %-16s %6s\n", "case", "metric", "value", "unit",
         "x peer", "peer", "x limit", "limit", "wrong");
  return 0;
}

static void print_ratio(double ratio) {
  if (isnan(ratio))
    printf(" %8s", "-");
  else
    printf(" %8.3f", ratio);
}

static void json_text(FILE *file, const char *key, const char *text) {
  if (text == NULL)
    fprintf(file, "\"%s\":null,", key);
  else
    fprintf(file, "\"%s\":\"%s\",", key, text); /* our own literals: nothing to escape */
}

static void json_number(FILE *file, const char *key, double value) {
  if (isnan(value) || isinf(value))
    fprintf(file, "\"%s\":null,", key);
  else
    fprintf(file, "\"%s\":%.9g,", key, value);
}

void bench_add(bench_report *report, const bench_row *row) {
  printf("%-34s %-20s %12.5g %-8s", row->name, row->metric, row->value, row->unit);
  print_ratio(row->ratio_to_peer);
  printf(" %-22s", row->peer ? row->peer : "-");
  print_ratio(row->ratio_to_limit);
  printf(" %-16s", row->limit ? row->limit : "-");
  if (row->wrong < 0)
    printf(" %6s\n", "-");
  else
    printf(" %6lld\n", (long long)row->wrong);
  fflush(stdout);
  if (report->json == NULL) return;
  fprintf(report->json, "%s\n{", report->count++ > 0 ? "," : "");
  json_text(report->json, "bench", report->bench);
  json_text(report->json, "case", row->name);
  json_text(report->json, "metric", row->metric);
  json_number(report->json, "value", row->value);
  json_text(report->json, "unit", row->unit);
  json_text(report->json, "peer", row->peer);
  json_number(report->json, "ratio_to_peer", row->ratio_to_peer);
  json_text(report->json, "limit", row->limit);
  json_number(report->json, "ratio_to_limit", row->ratio_to_limit);
  if (row->wrong < 0)
    fprintf(report->json, "\"wrong\":null}");
  else
    fprintf(report->json, "\"wrong\":%lld}", (long long)row->wrong);
}

int bench_close(bench_report *report) {
  int failed;
  if (report->json == NULL) return 0;
  fprintf(report->json, "\n]\n");
  failed = ferror(report->json) != 0;
  failed |= fclose(report->json) != 0;
  report->json = NULL;
  if (failed) fprintf(stderr, "%s: the JSON file could not be written\n", report->bench);
  return failed;
}

double bench_copy_rate(void) {
  const size_t nbytes = (size_t)64 << 20;
  unsigned char *a = (unsigned char *)malloc(nbytes), *b = (unsigned char *)malloc(nbytes);
  double best = 0.0;
  int i;
  if (a != NULL && b != NULL) {
    memset(a, 1, nbytes);
    memset(b, 2, nbytes);
    for (i = 0; i < 9; ++i) {
      const double start = bench_now();
      double rate;
      memcpy(i % 2 ? a : b, i % 2 ? b : a, nbytes);
      rate = 2.0 * (double)nbytes / (bench_now() - start);
      if (rate > best) best = rate;
    }
  }
  free(a);
  free(b);
  return best;
}

double bench_sgemm_rate(const mfsdp_host_math *math, int64_t n) {
  const size_t count = (size_t)(n * n);
  float *a = (float *)malloc(count * sizeof(float)), *b = (float *)malloc(count * sizeof(float));
  float *c = (float *)malloc(count * sizeof(float));
  double best = 0.0;
  size_t k;
  int i;
  if (a != NULL && b != NULL && c != NULL) {
    for (k = 0; k < count; ++k) {
      a[k] = (float)(k % 17) * 0.1f;
      b[k] = (float)(k % 13) * 0.1f;
      c[k] = 0.0f;
    }
    for (i = 0; i < 5; ++i) {
      const double start = bench_now();
      double rate;
      math->sgemm(0, 0, n, n, n, 1.0f, a, n, b, n, 0.0f, c, n);
      rate = 2.0 * (double)n * (double)n * (double)n / (bench_now() - start);
      if (rate > best) best = rate;
    }
  }
  free(a);
  free(b);
  free(c);
  return best;
}

const mfsdp_host_math *bench_math(void) {
#if MFSDP_EXAMPLE_CBLAS
  return mfsdp_host_math_cblas();
#else
  return mfsdp_host_math_loops();
#endif
}
