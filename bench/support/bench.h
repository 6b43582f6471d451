/* SPDX-License-Identifier: MIT */
/*
 * bench.h - what all benchmarks share: options, a clock, order statistics, rows, the limits of this
 * machine measured in the same run.
 *
 * A row is one figure. Both ratios are ours over theirs as rates (more is better), so "at most
 * 1.10x the time" is a ratio of at least 0.91.
 */
#ifndef MFSDP_BENCH_H
#define MFSDP_BENCH_H

#include "mfsdp/host/host_math.h"

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bench_options {
  int quick;        /* under a minute */
  const char *json; /* file for the rows, or NULL */
} bench_options;

/* Understands --quick, --json FILE and --help. Returns 0 to go on, 1 after --help (exit 0), 2 after
 * a bad call (message printed; exit 2). */
int bench_parse(int argc, char **argv, const char *about, bench_options *options);

double bench_now(void); /* seconds, monotonic */

/* Order statistics; sort the values in place. */
typedef struct bench_stats {
  double min, median, p99;
} bench_stats;
bench_stats bench_summarize(double *values, int count);

/* NULL or NAN: not applicable, printed as "-" and null. */
typedef struct bench_row {
  const char *bench, *name, *metric, *unit, *peer, *limit;
  double value, ratio_to_peer, ratio_to_limit;
  int64_t wrong; /* elements that differ from the reference; -1: not compared */
} bench_row;
bench_row bench_row_default(void);

typedef struct bench_report {
  const char *bench;
  FILE *json; /* NULL: print only */
  int count;
} bench_report;

/* Prints compiler, flags, machine and date. Returns 0, or 2 if the JSON file cannot be opened. */
int bench_open(bench_report *report, const char *bench, const bench_options *options);
void bench_add(bench_report *report, const bench_row *row);
/* Returns 0, or 1 if the JSON file could not be written. */
int bench_close(bench_report *report);

/* Bytes read plus written per second by memcpy of 64 MiB on this thread. */
double bench_copy_rate(void);
/* FLOP/s of math->sgemm on n x n matrices on this thread, the best of a few calls. */
double bench_sgemm_rate(const mfsdp_host_math *math, int64_t n);

/* The math that the build found: a CBLAS, or the C loops. */
const mfsdp_host_math *bench_math(void);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_H */
