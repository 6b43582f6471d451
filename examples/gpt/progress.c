/* SPDX-License-Identifier: MIT */
#include "progress.h"

#include <inttypes.h>
#include <stdarg.h>
#include <string.h>

#define TERMINAL_SECONDS 0.1
#define PLAIN_SECONDS 5.0
/* A step's weight in the average falls by half about every 3.5 s. */
#define AVERAGE_SECONDS 5.0

void gpt_progress_begin(gpt_progress *p, FILE *out, int is_terminal, int64_t steps,
                        double tokens_per_step, double (*clock)(void *user), void *user) {
  memset(p, 0, sizeof *p);
  p->out = out;
  p->is_terminal = is_terminal;
  p->steps = steps;
  p->tokens_per_step = tokens_per_step;
  p->clock = clock;
  p->user = user;
  p->started = p->now = p->printed = clock(user);
}

static void format_rate(double tokens_per_s, char *text, size_t capacity) {
  if (tokens_per_s >= 1e6)
    snprintf(text, capacity, "%.2fM", tokens_per_s / 1e6);
  else if (tokens_per_s >= 1e4)
    snprintf(text, capacity, "%.1fk", tokens_per_s / 1e3);
  else
    snprintf(text, capacity, "%.0f", tokens_per_s);
}

static void format_time(double seconds, char *text, size_t capacity) {
  /* Bounded before the conversion: a very slow first step must not overflow the integer. */
  const int64_t total = seconds < 1e15 ? (int64_t)(seconds + 0.5) : INT64_C(1000000000000000);
  const int64_t minutes = total / 60;
  if (minutes >= 60)
    snprintf(text, capacity, "%" PRId64 ":%02d:%02d", minutes / 60, (int)(minutes % 60),
             (int)(total % 60));
  else
    snprintf(text, capacity, "%d:%02d", (int)minutes, (int)(total % 60));
}

static void show(gpt_progress *p) {
  char rate[32] = "-", left[40] = "-";
  if (p->step_seconds > 0) {
    format_rate(p->tokens_per_step / p->step_seconds, rate, sizeof rate);
    format_time(p->step_seconds * (double)(p->steps - p->done), left, sizeof left);
  }
  /* "\r" goes to the start of the line, "\033[K" clears what a longer line left behind. */
  fprintf(p->out, "%sstep %*" PRId64 "/%" PRId64 "  loss %.4f  %s tokens/s  %s left%s",
          p->is_terminal ? "\r" : "", (int)snprintf(NULL, 0, "%" PRId64, p->steps), p->done,
          p->steps, p->loss, rate, left, p->is_terminal ? "\033[K" : "\n");
  fflush(p->out);
  p->open_line = p->is_terminal;
  p->shown = 1;
  p->printed = p->now;
}

static void update_average(gpt_progress *p, double seconds) {
  const double weight = seconds / (seconds + AVERAGE_SECONDS);
  /* Until about AVERAGE_SECONDS have passed, the plain mean since the start says more. */
  if (p->now - p->started <= AVERAGE_SECONDS || p->step_seconds <= 0)
    p->step_seconds = (p->now - p->started) / (double)(p->done - p->start);
  else
    p->step_seconds += weight * (seconds - p->step_seconds);
}

void gpt_progress_step(gpt_progress *p, int64_t step, double loss) {
  const double before = p->now, due = p->is_terminal ? TERMINAL_SECONDS : PLAIN_SECONDS;
  const int64_t tenth = p->steps / 10 > 0 ? p->steps / 10 : 1;
  p->now = p->clock(p->user);
  p->done = step + 1;
  p->loss = loss;
  p->shown = 0;
  update_average(p, p->now - before);
  if (p->done == 1 || p->done == p->steps || p->now - p->printed >= due ||
      (!p->is_terminal && p->done % tenth == 0))
    show(p);
}

static void close_line(gpt_progress *p) {
  if (!p->open_line) return;
  fputc('\n', p->out);
  p->open_line = 0;
}

void gpt_progress_note(gpt_progress *p, const char *format, ...) {
  va_list arguments;
  /* On a terminal the note takes the progress line's place, which comes back below it. */
  if (p->open_line) fputs("\r\033[K", p->out);
  va_start(arguments, format);
  vfprintf(p->out, format, arguments);
  va_end(arguments);
  fputc('\n', p->out);
  if (p->open_line) show(p);
  fflush(p->out);
}

void gpt_progress_end(gpt_progress *p) {
  if (p->done > 0 && !p->shown) show(p);
  close_line(p);
  fflush(p->out);
}

double gpt_progress_seconds(const gpt_progress *p) {
  return p->now - p->started;
}

double gpt_progress_tokens_per_s(const gpt_progress *p) {
  const double seconds = gpt_progress_seconds(p);
  return seconds > 0 ? p->tokens_per_step * (double)(p->done - p->start) / seconds : 0.0;
}
