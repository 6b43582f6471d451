/* SPDX-License-Identifier: MIT */
#include "strat_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CASE_NBYTES = 160, LINE_NBYTES = 1024 };

static void die(const char *what, const char *path) {
  fprintf(stderr, "bench strategies: %s %s\n", what, path);
  exit(1);
}

/* ---- text ---- */

static void append(strat_rows *rows, const char *line) {
  const size_t length = strlen(line);
  if (rows->length + length + 1 > rows->room) {
    rows->room = 2 * (rows->length + length + 1);
    rows->text = (char *)realloc(rows->text, rows->room);
    if (rows->text == NULL) die("no memory for the rows of", rows->path ? rows->path : "this run");
  }
  memcpy(rows->text + rows->length, line, length + 1);
  rows->length += length;
}

static void case_of(const strat_key *key, char text[CASE_NBYTES]) {
  (void)snprintf(text, CASE_NBYTES, "%s, %s, %d ranks, %s, run %d", key->model, key->links,
                 (int)key->world, key->strategy, key->run);
}

/* The line of a case, and of a metric unless it is NULL; the last one if there are several. */
static const char *find(const strat_rows *rows, const strat_key *key, const char *metric) {
  char name[CASE_NBYTES], wanted[CASE_NBYTES + 96];
  const char *found = NULL, *line;
  case_of(key, name);
  if (metric != NULL)
    (void)snprintf(wanted, sizeof wanted, "\"case\":\"%s\",\"metric\":\"%s\"", name, metric);
  else
    (void)snprintf(wanted, sizeof wanted, "\"case\":\"%s\"", name);
  for (line = rows->text; line != NULL && (line = strstr(line, wanted)) != NULL; ++line)
    found = line;
  return found;
}

/* What stands behind "name": on the line at `at`; NULL if it is not there. */
static const char *member(const char *at, const char *name) {
  char wanted[48];
  const char *end, *found;
  if (at == NULL) return NULL;
  (void)snprintf(wanted, sizeof wanted, "\"%s\":", name);
  end = strchr(at, '\n');
  found = strstr(at, wanted);
  return found != NULL && (end == NULL || found < end) ? found + strlen(wanted) : NULL;
}

/* ---- the file ---- */

void strat_rows_open(strat_rows *rows, const char *path, bench_report *report) {
  const time_t now = time(NULL);
  char line[LINE_NBYTES * 2];
  FILE *file;
  struct tm utc;
  memset(rows, 0, sizeof *rows);
  if (gmtime_r(&now, &utc) != NULL) (void)strftime(rows->date, sizeof rows->date, "%Y-%m-%d", &utc);
  rows->path = path;
  rows->report = report;
  append(rows, "");
  if (path == NULL) return;
  file = fopen(path, "a+");
  if (file == NULL) die("cannot write", path);
  rewind(file);
  while (fgets(line, sizeof line, file) != NULL) {
    const size_t length = strlen(line);
    if (length > 1 && line[length - 1] == '\n' && line[length - 2] == '}') append(rows, line);
  }
  if (ferror(file) || fclose(file) != 0) die("cannot read", path);
  rows->committed = rows->length;
}

int strat_rows_have(const strat_rows *rows, const strat_key *key) {
  return find(rows, key, NULL) != NULL;
}

int strat_rows_finished(const strat_rows *rows, const strat_key *key, int alone, int whole) {
  const char *at = find(rows, key, "finished");
  const char *had_queues = member(at, "queues"), *had_whole = member(at, "whole");
  if (had_queues == NULL || had_whole == NULL) return 0;
  return (alone || *had_queues == '1') && (!whole || *had_whole == '1');
}

void strat_rows_finish(strat_rows *rows, const strat_key *key, int alone, int whole,
                       double seconds) {
  char line[LINE_NBYTES], name[CASE_NBYTES];
  case_of(key, name);
  (void)snprintf(line, sizeof line,
                 "{\"bench\":\"strategies\",\"case\":\"%s\",\"metric\":\"finished\",\"queues\":%d,"
                 "\"whole\":%d,\"seconds\":%.9g,\"date\":\"%s\"}\n",
                 name, !alone, whole, seconds, rows->date);
  append(rows, line);
}

double strat_rows_value(const strat_rows *rows, const strat_key *key, const char *metric) {
  const char *value = member(find(rows, key, metric), "value");
  return value == NULL || strncmp(value, "null", 4) == 0 ? (double)NAN : strtod(value, NULL);
}

uint64_t strat_rows_checksum(const strat_rows *rows, const strat_key *key) {
  const char *value = member(find(rows, key, "optimizer step"), "checksum");
  return value == NULL ? 0 : (uint64_t)strtoull(value + 1, NULL, 16);
}

void strat_rows_commit(strat_rows *rows) {
  const char *text = rows->text + rows->committed;
  const size_t nbytes = rows->length - rows->committed;
  FILE *file;
  int failed;
  if (rows->path == NULL || nbytes == 0) return;
  file = fopen(rows->path, "a");
  if (file == NULL) die("cannot write", rows->path);
  /* Behind a line that was cut off, a new one begins. */
  failed = fputc('\n', file) == EOF || fwrite(text, 1, nbytes, file) != nbytes;
  failed |= fflush(file) != 0 || fsync(fileno(file)) != 0;
  failed |= fclose(file) != 0;
  if (failed) die("cannot write", rows->path);
  rows->committed = rows->length;
}

void strat_rows_close(strat_rows *rows) {
  strat_rows_commit(rows);
  free(rows->text);
  memset(rows, 0, sizeof *rows);
}

/* ---- a row ---- */

static void number(char *line, size_t *used, const char *name, double value) {
  if (isnan(value) || isinf(value))
    *used += (size_t)snprintf(line + *used, LINE_NBYTES - *used, ",\"%s\":null", name);
  else
    *used += (size_t)snprintf(line + *used, LINE_NBYTES - *used, ",\"%s\":%.9g", name, value);
}

static void write_line(strat_rows *rows, const strat_key *key, const strat_row *row,
                       const bench_row *shown) {
  char line[LINE_NBYTES];
  size_t used = (size_t)snprintf(line, sizeof line,
                                 "{\"bench\":\"strategies\",\"case\":\"%s\",\"metric\":\"%s\"",
                                 shown->name, row->metric);
  number(line, &used, "value", row->stats.median);
  used += (size_t)snprintf(line + used, sizeof line - used, ",\"unit\":\"%s\",\"peer\":%s",
                           row->unit, shown->peer != NULL ? "\"matrix\"" : "null");
  number(line, &used, "ratio_to_peer", shown->ratio_to_peer);
  used +=
      (size_t)snprintf(line + used, sizeof line - used, ",\"limit\":null,\"ratio_to_limit\":null");
  number(line, &used, "wrong", row->wrong < 0 ? (double)NAN : (double)row->wrong);
  used += (size_t)snprintf(line + used, sizeof line - used,
                           ",\"model\":\"%s\",\"links\":\"%s\",\"world\":%d,\"strategy\":\"%s\","
                           "\"run\":%d,\"repeats\":%d,\"date\":\"%s\"",
                           key->model, key->links, (int)key->world, key->strategy, key->run,
                           row->repeats, rows->date);
  number(line, &used, "min", row->stats.min);
  number(line, &used, "p99", row->stats.p99);
  number(line, &used, "predicted", row->predicted);
  number(line, &used, "error", row->stats.median / row->predicted - 1.0);
  (void)snprintf(line + used, sizeof line - used, ",\"checksum\":\"%016llx\"}\n",
                 (unsigned long long)row->checksum);
  append(rows, line);
}

void strat_rows_add(strat_rows *rows, const strat_key *key, const strat_row *row) {
  const strat_key matrix = {key->model, key->links, "matrix", key->world, key->run};
  const double theirs = strat_rows_value(rows, &matrix, row->metric);
  char name[CASE_NBYTES];
  bench_row shown = bench_row_default();
  case_of(key, name);
  shown.bench = "strategies";
  shown.name = name;
  shown.metric = row->metric;
  shown.unit = row->unit;
  shown.value = row->stats.median;
  shown.wrong = row->wrong;
  if (theirs > 0.0 && strcmp(key->strategy, "matrix") != 0 && row->stats.median > 0.0) {
    shown.peer = "matrix";
    shown.ratio_to_peer = theirs / row->stats.median;
  }
  if (row->predicted > 0.0) {
    shown.limit = "predicted";
    shown.ratio_to_limit = row->predicted / row->stats.median;
  }
  bench_add(rows->report, &shown);
  write_line(rows, key, row, &shown);
}
