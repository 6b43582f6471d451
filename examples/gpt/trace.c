/* SPDX-License-Identifier: MIT */
#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void free_ranks(gpt_trace *trace) {
  for (int32_t r = 0; r < trace->rank_count; ++r) {
    free(trace->ranks[r].phases);
    mfsdp_mutex_destroy(&trace->ranks[r].mutex);
  }
  free(trace->ranks);
  trace->ranks = NULL;
  trace->rank_count = 0;
}

static int create_ranks(int32_t rank_count, gpt_trace *trace, gpt_error *error) {
  trace->ranks = (gpt_trace_rank *)calloc((size_t)rank_count, sizeof *trace->ranks);
  for (int32_t r = 0; trace->ranks && r < rank_count; ++r) {
    gpt_trace_rank *rank = &trace->ranks[r];
    rank->phases = (gpt_trace_phase *)calloc(GPT_TRACE_PHASES, sizeof *rank->phases);
    if (!rank->phases || mfsdp_mutex_init(&rank->mutex) != MFSDP_OK) {
      free(rank->phases);
      break;
    }
    trace->rank_count = r + 1;
  }
  if (trace->ranks && trace->rank_count == rank_count) return GPT_OK;
  free_ranks(trace);
  return gpt_fail(error, "no memory to trace %d ranks; leave out --trace", (int)rank_count);
}

/* ---- the file ---- */

static void write_text(FILE *out, const char *text) {
  fputc('"', out);
  for (; *text; ++text) {
    const unsigned char c = (unsigned char)*text;
    if (c == '"' || c == '\\')
      fprintf(out, "\\%c", c);
    else
      fprintf(out, c < 0x20 || c > 0x7e ? "\\u%04x" : "%c", c);
  }
  fputc('"', out);
}

static void write_name(FILE *out, const char *kind, int32_t rank, int32_t lane, const char *name) {
  fprintf(out,
          "{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%" PRId32 ",\"tid\":%" PRId32
          ",\"args\":{\"name\":",
          kind, rank, lane);
  write_text(out, name);
  fputs("}}", out);
}

static void write_rank(FILE *out, const gpt_trace *trace, int32_t r) {
  const gpt_trace_rank *rank = &trace->ranks[r];
  char name[32];
  snprintf(name, sizeof name, "rank %" PRId32, r);
  if (r > 0) fputs(",\n", out);
  write_name(out, "process_name", r, 0, name);
  for (int32_t i = 0; i < rank->lane_count; ++i) {
    fputs(",\n", out);
    write_name(out, "thread_name", r, i, rank->lanes[i].name);
  }
  for (int64_t i = 0; i < rank->count; ++i) {
    const gpt_trace_phase *p = &rank->phases[i];
    fprintf(out,
            ",\n{\"ph\":\"X\",\"pid\":%" PRId32 ",\"tid\":%" PRId32 ",\"ts\":%" PRId64
            ",\"dur\":%" PRId64 ",\"name\":",
            r, p->lane, p->begin_us - trace->start_us, p->end_us - p->begin_us);
    write_text(out, p->label);
    fputc('}', out);
  }
}

static int write_file(const gpt_trace *trace, gpt_error *error) {
  FILE *out = fopen(trace->path, "w");
  int failed;
  if (!out) return gpt_fail(error, "cannot write %s: %s", trace->path, strerror(errno));
  fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
  for (int32_t r = 0; r < trace->rank_count; ++r)
    write_rank(out, trace, r);
  fprintf(out, "\n],\"otherData\":{\"phases_left_out\":%" PRId64 "}}\n", gpt_trace_left_out(trace));
  failed = ferror(out);
  failed |= fclose(out) != 0;
  if (failed) return gpt_fail(error, "%s is incomplete: %s", trace->path, strerror(errno));
  return GPT_OK;
}

/* ---- collecting ---- */

int gpt_trace_create(const char *path, int32_t rank_count, gpt_trace *trace, gpt_error *error) {
  int status;
  memset(trace, 0, sizeof *trace);
  trace->path = path;
  if (!path) return GPT_OK;
  trace->start_us = mfsdp_clock_us();
  status = write_file(trace, error);
  return status == GPT_OK ? create_ranks(rank_count, trace, error) : status;
}

/* With the rank's mutex. */
static void keep(gpt_trace_rank *rank, const gpt_trace_phase *phase, int64_t end_us) {
  if (rank->count == GPT_TRACE_PHASES) {
    ++rank->left_out;
    return;
  }
  rank->phases[rank->count] = *phase;
  rank->phases[rank->count++].end_us = end_us;
}

static gpt_trace_lane *find_lane(gpt_trace_rank *rank, const char *name) {
  int32_t i;
  for (i = 0; i < rank->lane_count; ++i)
    if (strncmp(rank->lanes[i].name, name, GPT_TRACE_TEXT - 1) == 0) return &rank->lanes[i];
  if (i == GPT_TRACE_LANES) return NULL;
  ++rank->lane_count;
  snprintf(rank->lanes[i].name, GPT_TRACE_TEXT, "%s", name);
  return &rank->lanes[i];
}

static void open_phase(gpt_trace_rank *rank, gpt_trace_lane *lane, const char *label) {
  gpt_trace_phase *phase;
  if (lane->depth++ >= GPT_TRACE_DEPTH) return;
  phase = &lane->open[lane->depth - 1];
  phase->begin_us = mfsdp_clock_us();
  phase->lane = (int32_t)(lane - rank->lanes);
  snprintf(phase->label, sizeof phase->label, "%s", label);
}

/* An end without a begin is ignored: there is nothing it could close. */
static void close_phase(gpt_trace_rank *rank, gpt_trace_lane *lane) {
  if (lane->depth == 0) return;
  if (--lane->depth >= GPT_TRACE_DEPTH)
    ++rank->left_out;
  else
    keep(rank, &lane->open[lane->depth], mfsdp_clock_us());
}

void gpt_trace_mark(gpt_trace *trace, int32_t rank_index, int begin, const char *lane_name,
                    const char *label) {
  gpt_trace_rank *rank;
  gpt_trace_lane *lane;
  if (!trace->ranks || rank_index < 0 || rank_index >= trace->rank_count) return;
  rank = &trace->ranks[rank_index];
  mfsdp_mutex_lock(&rank->mutex);
  lane = find_lane(rank, lane_name);
  if (!lane)
    rank->left_out += begin != 0;
  else if (begin)
    open_phase(rank, lane, label);
  else
    close_phase(rank, lane);
  mfsdp_mutex_unlock(&rank->mutex);
}

int64_t gpt_trace_left_out(const gpt_trace *trace) {
  int64_t sum = 0;
  for (int32_t r = 0; r < trace->rank_count; ++r)
    sum += trace->ranks[r].left_out;
  return sum;
}

int gpt_trace_finish(gpt_trace *trace, gpt_error *error) {
  int status;
  if (!trace->ranks) return GPT_OK;
  for (int32_t r = 0; r < trace->rank_count; ++r)
    for (int32_t i = 0; i < trace->ranks[r].lane_count; ++i)
      while (trace->ranks[r].lanes[i].depth > 0)
        close_phase(&trace->ranks[r], &trace->ranks[r].lanes[i]);
  status = write_file(trace, error);
  free_ranks(trace);
  return status;
}
