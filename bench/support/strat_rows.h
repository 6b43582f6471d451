/* SPDX-License-Identifier: MIT */
/*
 * strat_rows.h - the rows of the strategies benchmark: one JSON object a line in a file that is
 * only appended to, so that a long run can be stopped and resumed, and rows of one strategy find
 * those of `matrix` beside them.
 *
 *   strat_rows rows;
 *   strat_rows_open(&rows, path);
 *   strat_key key = {"gpt-256", "threads", "zero1", 4, 1};
 *   if (!strat_rows_finished(&rows, &key, 0, 1)) { ... strat_rows_add(&rows, &key, &row); ...
 *     strat_rows_finish(&rows, &key, 0, 1, 5.0);
 *     strat_rows_commit(&rows); }                           // all of a key at once
 *   strat_rows_close(&rows);
 *
 * Keys of a line: those of every benchmark, and model, links, world, strategy, run; min, p99 and
 * repeats (value is the median); date; predicted and error (measured over predicted, less 1); checksum.
 */
#ifndef MFSDP_BENCH_STRAT_ROWS_H
#define MFSDP_BENCH_STRAT_ROWS_H

#include "bench.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct strat_key {
  const char *model, *links, *strategy;
  int32_t world;
  int run;
} strat_key;

typedef struct strat_row {
  const char *metric, *unit;
  bench_stats stats; /* value: the median */
  int repeats;
  double predicted; /* NAN: not */
  int64_t wrong;
  uint64_t checksum;
} strat_row;

typedef struct strat_rows {
  char date[16];    /* of this call */
  const char *path; /* NULL: nothing is kept */
  char *text;       /* of the file, and what was added */
  size_t length, room;
  size_t committed;     /* what the file has */
  bench_report *report; /* prints, and writes --json */
} strat_rows;

/* Reads what is there; a last line without its end (the run was stopped) does not count. Prints and
 * exits where a file cannot be read or written. */
void strat_rows_open(strat_rows *rows, const char *path, bench_report *report);
int strat_rows_have(const strat_rows *rows, const strat_key *key);
/* The last line of a key says what was measured: its rows count only if it is there (a file may end
 * anywhere), and if nothing is asked that was left out. alone: 1: without worker queues; whole: 1: with
 * whole steps; seconds: that repeats were given. */
void strat_rows_finish(strat_rows *rows, const strat_key *key, int alone, int whole,
                       double seconds);
int strat_rows_finished(const strat_rows *rows, const strat_key *key, int alone, int whole);
/* The value of a metric; NAN if it is not there. */
double strat_rows_value(const strat_rows *rows, const strat_key *key, const char *metric);
/* That of the optimizer step; 0 if it is not there. */
uint64_t strat_rows_checksum(const strat_rows *rows, const strat_key *key);
/* Prints the row, beside that of strategy `matrix` of the same model, links, world and run. */
void strat_rows_add(strat_rows *rows, const strat_key *key, const strat_row *row);
void strat_rows_commit(strat_rows *rows);
void strat_rows_close(strat_rows *rows);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_ROWS_H */
