/* SPDX-License-Identifier: MIT */
/*
 * trace.h - collects the phases that ranks report and writes them as a Chrome trace, which Perfetto
 * (ui.perfetto.dev) and chrome://tracing open: a process for each rank, a track for each lane.
 *
 *   gpt_trace_create(path, ranks, &trace, &error);       // before the ranks start
 *   gpt_trace_mark(&trace, rank, begin, lane, label);    // any thread, from the context's callback
 *   gpt_trace_finish(&trace, &error);                    // after the ranks: writes the file
 *
 * Memory is taken once: GPT_TRACE_PHASES phases for each rank, the first ones; what comes after is
 * counted and left out whole. The file is a valid, empty trace from gpt_trace_create on, and gets
 * its content at the end.
 */
#ifndef GPT_TRACE_H
#define GPT_TRACE_H

#include "error.h"
#include "mfsdp/posix/thread.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  GPT_TRACE_PHASES = 32768, /* of a rank, 2 MiB */
  GPT_TRACE_LANES = 8,      /* of a rank */
  GPT_TRACE_DEPTH = 16,     /* open phases of a lane */
  GPT_TRACE_TEXT = 40       /* bytes of a label or a lane's name; the rest is cut */
};

/* A phase is made when it ends, so that each one is there with both ends or not at all. */
typedef struct gpt_trace_phase {
  int64_t begin_us, end_us;
  int32_t lane;
  char label[GPT_TRACE_TEXT];
} gpt_trace_phase;

typedef struct gpt_trace_lane {
  char name[GPT_TRACE_TEXT];
  int32_t depth; /* open phases; those beyond GPT_TRACE_DEPTH are counted, not kept */
  gpt_trace_phase open[GPT_TRACE_DEPTH];
} gpt_trace_lane;

typedef struct gpt_trace_rank {
  mfsdp_mutex mutex;
  gpt_trace_phase *phases;
  int64_t count, left_out;
  int32_t lane_count;
  gpt_trace_lane lanes[GPT_TRACE_LANES];
} gpt_trace_rank;

typedef struct gpt_trace {
  const char *path;
  int32_t rank_count; /* with memory and mutex */
  int64_t start_us;
  gpt_trace_rank *ranks; /* NULL: nothing is collected */
} gpt_trace;

/* path NULL: a trace that collects nothing, so that a caller without --trace needs no branch. On
 * failure *trace needs no finish. */
int gpt_trace_create(const char *path, int32_t rank_count, gpt_trace *trace, gpt_error *error);

/* begin != 0 opens a phase on the rank's lane, 0 closes its innermost one. Copies the texts. A lane
 * belongs to one thread at a time. */
void gpt_trace_mark(gpt_trace *trace, int32_t rank, int begin, const char *lane, const char *label);

/* Phases that did not fit. */
int64_t gpt_trace_left_out(const gpt_trace *trace);

/* Writes the file, phases that are still open up to now, and frees everything. Once, after the last
 * mark. */
int gpt_trace_finish(gpt_trace *trace, gpt_error *error);

#ifdef __cplusplus
}
#endif

#endif /* GPT_TRACE_H */
