/* SPDX-License-Identifier: MIT */
#include "curve.h"

#include "file.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HEADER "step,loss,elapsed_s,val_loss"

int gpt_curve_open(const char *path, gpt_curve_writer *writer, gpt_error *error) {
  writer->path = path;
  writer->file = NULL;
  if (!path) return GPT_OK;
  writer->file = fopen(path, "w");
  if (!writer->file) return gpt_fail(error, "cannot write %s: %s", path, strerror(errno));
  fputs(HEADER "\n", writer->file);
  if (fflush(writer->file) == 0) return GPT_OK;
  gpt_fail(error, "cannot write %s: %s", path, strerror(errno));
  fclose(writer->file);
  writer->file = NULL;
  return GPT_USAGE_ERROR;
}

void gpt_curve_row(gpt_curve_writer *writer, int64_t step, double loss, double elapsed_s,
                   double val_loss) {
  if (!writer->file) return;
  fprintf(writer->file, "%" PRId64 ",%.9g,%.6g,", step, loss, elapsed_s);
  if (!isnan(val_loss)) fprintf(writer->file, "%.9g", val_loss);
  fputc('\n', writer->file);
  fflush(writer->file);
}

int gpt_curve_close(gpt_curve_writer *writer, gpt_error *error) {
  int failed, reason;
  if (!writer->file) return GPT_OK;
  failed = ferror(writer->file);
  errno = 0;
  failed |= fclose(writer->file) != 0;
  reason = errno;
  writer->file = NULL;
  if (!failed) return GPT_OK;
  return gpt_fail(error, "%s is incomplete: %s", writer->path,
                  reason ? strerror(reason) : "a row could not be written");
}

/* ---- reading ---- */

/* One number, then `end`; strtod also takes nan and inf, which a diverged run writes. */
static int read_number(const char **text, char end, double *out) {
  char *stop = NULL;
  if (**text == ' ' || **text == '\t' || **text == '\n') return 0;
  *out = strtod(*text, &stop);
  if (stop == *text || *stop != end) return 0;
  *text = stop + 1;
  return 1;
}

static int read_row(const char **text, gpt_curve *curve, int64_t row) {
  if (!read_number(text, ',', &curve->step[row]) || !read_number(text, ',', &curve->loss[row]) ||
      !read_number(text, ',', &curve->elapsed_s[row]))
    return 0;
  curve->val_loss[row] = NAN;
  if (**text == '\n')
    ++*text;
  else if (!read_number(text, '\n', &curve->val_loss[row]))
    return 0;
  return curve->step[row] > (row > 0 ? curve->step[row - 1] : 0.0);
}

static int allocate(gpt_curve *curve, int64_t capacity) {
  double *block = (double *)malloc((size_t)capacity * 4 * sizeof *block);
  if (!block) return 0;
  curve->step = block;
  curve->loss = block + capacity;
  curve->elapsed_s = block + 2 * capacity;
  curve->val_loss = block + 3 * capacity;
  return 1;
}

static int parse(const char *path, const char *text, int64_t nbytes, gpt_curve *curve,
                 gpt_error *error) {
  const char *end = text + nbytes;
  int64_t lines = 0;
  if (strncmp(text, HEADER "\n", sizeof HEADER) != 0)
    return gpt_fail(error, "%s does not start with '%s'; give a file written by --loss-csv", path,
                    HEADER);
  text += sizeof HEADER;
  for (const char *c = text; c < end; ++c)
    lines += *c == '\n';
  if (lines == 0) return gpt_fail(error, "%s has no rows; train for at least one step", path);
  if (!allocate(curve, lines)) return gpt_fail(error, "no memory to read %s", path);
  while (text < end) {
    /* A last line without its newline has no row of its own in the block. */
    if (curve->count == lines || !read_row(&text, curve, curve->count))
      return gpt_fail(error, "%s, line %" PRId64 ": not a row of %s", path, curve->count + 2,
                      HEADER);
    ++curve->count;
  }
  return GPT_OK;
}

int gpt_curve_read(const char *path, gpt_curve *curve, gpt_error *error) {
  uint8_t *bytes;
  int64_t nbytes;
  int status;
  memset(curve, 0, sizeof *curve);
  if (gpt_file_read(path, INT64_C(1) << 30, &bytes, &nbytes, error) != GPT_OK)
    return GPT_USAGE_ERROR;
  status = parse(path, (const char *)bytes, nbytes, curve, error);
  free(bytes);
  if (status != GPT_OK) gpt_curve_destroy(curve);
  return status;
}

void gpt_curve_destroy(gpt_curve *curve) {
  free(curve->step); /* the start of the one block */
  memset(curve, 0, sizeof *curve);
}

/* ---- recording ---- */

int gpt_curve_log_create(gpt_curve_log *log, gpt_error *error) {
  memset(log, 0, sizeof *log);
  log->stride = 1;
  /* One more row for the unfinished one. */
  if (allocate(&log->curve, GPT_CURVE_LOG_ROWS + 1)) return GPT_OK;
  return gpt_fail(error, "no memory for a loss curve");
}

void gpt_curve_log_destroy(gpt_curve_log *log) {
  gpt_curve_destroy(&log->curve);
}

/* Row `to` becomes the mean of itself, which stands for `weight` steps, and one of `more` steps. */
static void join_row(gpt_curve *c, int64_t to, double weight, double step, double loss,
                     double elapsed_s, double val_loss, double more) {
  c->loss[to] += (loss - c->loss[to]) * (more / (weight + more));
  c->step[to] = step;
  c->elapsed_s[to] = elapsed_s;
  if (!isnan(val_loss)) c->val_loss[to] = val_loss;
}

static void put_row(gpt_curve *c, int64_t to, double step, double loss, double elapsed_s,
                    double val_loss) {
  c->step[to] = step;
  c->loss[to] = loss;
  c->elapsed_s[to] = elapsed_s;
  c->val_loss[to] = val_loss;
}

static void join_neighbours(gpt_curve_log *log) {
  gpt_curve *c = &log->curve;
  for (int64_t i = 0; i < c->count / 2; ++i) {
    const int64_t a = 2 * i, b = a + 1;
    put_row(c, i, c->step[a], c->loss[a], c->elapsed_s[a], c->val_loss[a]);
    join_row(c, i, 1.0, c->step[b], c->loss[b], c->elapsed_s[b], c->val_loss[b], 1.0);
  }
  c->count /= 2;
  log->stride *= 2;
}

void gpt_curve_log_add(gpt_curve_log *log, int64_t step, double loss, double elapsed_s,
                       double val_loss) {
  gpt_curve *c = &log->curve;
  if (c->count == GPT_CURVE_LOG_ROWS) join_neighbours(log);
  if (log->pending == 0)
    put_row(c, c->count, (double)step, loss, elapsed_s, val_loss);
  else
    join_row(c, c->count, (double)log->pending, (double)step, loss, elapsed_s, val_loss, 1.0);
  if (++log->pending < log->stride) return;
  log->pending = 0;
  ++c->count;
}

void gpt_curve_log_finish(gpt_curve_log *log) {
  if (log->pending > 0) ++log->curve.count;
  log->pending = 0;
}

/* ---- smoothing ---- */

void gpt_curve_smooth(int64_t count, const double *values, int64_t window, double *out) {
  /* Summed afresh each time: a running sum would carry one infinite loss to the end. */
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i + 1 > window ? i + 1 - window : 0;
    double sum = 0.0;
    for (int64_t j = first; j <= i; ++j)
      sum += values[j];
    out[i] = sum / (double)(i + 1 - first);
  }
}

int64_t gpt_curve_window(int64_t count) {
  const int64_t window = count / 40;
  return window < 1 ? 1 : window > 1000 ? 1000 : window;
}
