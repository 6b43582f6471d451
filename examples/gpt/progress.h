/* SPDX-License-Identifier: MIT */
/*
 * progress.h - what a person sees while training: one line that is rewritten in place on a terminal
 * (at most ten times a second), or plain lines elsewhere (about ten per run, one more every five
 * seconds, and always the first and the last step).
 *
 *   step  120/300  loss 2.4312  15.2k tokens/s  1:05 left
 *
 * Writes to `out` only, reads time from `clock` only, allocates nothing.
 */
#ifndef GPT_PROGRESS_H
#define GPT_PROGRESS_H

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_progress {
  FILE *out;
  double (*clock)(void *user); /* seconds from any start, never backwards */
  void *user;
  int64_t steps;
  double tokens_per_step;
  int is_terminal;
  int64_t start;       /* steps done before begin; 0 unless the caller sets it */
  int64_t done;        /* steps reported so far, those before begin included */
  double started, now; /* of begin, and of the last step */
  double step_seconds; /* recent average */
  double printed;      /* when the last line was written */
  double loss;
  int open_line, shown; /* a line without its newline stands on the terminal; `done` is on it */
} gpt_progress;

/* Call right before the first step: its clock starts here. is_terminal: isatty of out. */
void gpt_progress_begin(gpt_progress *progress, FILE *out, int is_terminal, int64_t steps,
                        double tokens_per_step, double (*clock)(void *user), void *user);
/* Step `step` (from 0) is complete with this mean loss. */
void gpt_progress_step(gpt_progress *progress, int64_t step, double loss);
/* A line of its own, which does not tear the progress line. */
void gpt_progress_note(gpt_progress *progress, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Shows the last step if it was not shown (training may stop early), and ends the line. */
void gpt_progress_end(gpt_progress *progress);

/* Seconds and tokens per second from begin to the last reported step; 0 before the first. */
double gpt_progress_seconds(const gpt_progress *progress);
double gpt_progress_tokens_per_s(const gpt_progress *progress);

#ifdef __cplusplus
}
#endif

#endif /* GPT_PROGRESS_H */
