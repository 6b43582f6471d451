/* SPDX-License-Identifier: MIT */
/*
 * schedule.h - learning-rate schedules: a pure function from the number of attempted steps to the
 * factor that every hyperparameter group's own lr is multiplied with.
 *
 *   mfsdp_schedule schedule = mfsdp_schedule_default();          // constant, factor 1
 *   schedule.kind = MFSDP_SCHEDULE_COSINE;
 *   schedule.warmup_steps = 100;
 *   schedule.total_steps = 5000;
 *   schedule.final_factor = 0.1;
 *   MFSDP_TRY(mfsdp_schedule_factor(context, &schedule, step, &factor));   // lr = group.lr * factor
 *
 * With n = step + 1 (step: attempted steps before this one, skipped ones counted), W = max(1,
 * warmup_steps), T = total_steps, F = final_factor:
 *
 *   n < W                 n / W                            every kind: warm-up, full at step W
 *   then CONSTANT         1
 *   else, with S the last step at the full rate and p = (n - S) / (T + 1 - S), 1 from n = T + 1 on:
 *     n <= S              1
 *     LINEAR   S = W      1 - (1 - F) p
 *     COSINE   S = W      F + (1 - F) (1 + cos(pi p)) / 2
 *     WSD      S = max(W, T - decay_steps)    1 - (1 - F) p         warm-up, stable, decay
 *     WSD_SQRT the same S                     1 - (1 - F) sqrt(p)
 *
 * F is reached one step after the last, so that with F = 0 no step is spent on a rate of 0. A
 * warm-up longer than the run is legal: the run is all warm-up.
 * Sources: cosine, Loshchilov and Hutter, "SGDR", 2017; WSD, Hu et al., "MiniCPM", 2024; the root,
 * Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024.
 * runtime.h applies one (mfsdp_runtime_desc.schedule); a program without it multiplies by hand.
 * Does not: hold state. The same step gives the same bits, so that a resumed run goes on as if it
 * had not stopped; COSINE and WSD_SQRT by one libm.
 * Link flags: -lm.
 */
#ifndef MFSDP_SCHEDULE_H
#define MFSDP_SCHEDULE_H

#include "context.h"

#include <math.h>

/* X(NAME, "name") */
#define MFSDP_SCHEDULES(X) \
  X(CONSTANT, "constant")  \
  X(LINEAR, "linear")      \
  X(COSINE, "cosine")      \
  X(WSD, "wsd")            \
  X(WSD_SQRT, "wsd-sqrt")

typedef enum mfsdp_schedule_kind {
  MFSDP_SCHEDULE_NONE = 0,
#define MFSDP__SCHEDULE_ENUM(NAME, name) MFSDP_SCHEDULE_##NAME,
  MFSDP_SCHEDULES(MFSDP__SCHEDULE_ENUM)
#undef MFSDP__SCHEDULE_ENUM
      MFSDP_SCHEDULE_END
} mfsdp_schedule_kind;

/* In lower case, as "cosine"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_schedule_kind_name(mfsdp_schedule_kind kind) {
  switch (kind) {
#define MFSDP__SCHEDULE_CASE(NAME, name) \
  case MFSDP_SCHEDULE_##NAME: return name;
    MFSDP_SCHEDULES(MFSDP__SCHEDULE_CASE)
#undef MFSDP__SCHEDULE_CASE
  case MFSDP_SCHEDULE_NONE:
  case MFSDP_SCHEDULE_END: break;
  }
  return "invalid";
}

/* The kind of that name, or MFSDP_SCHEDULE_NONE. NULL is allowed. */
MFSDP_API mfsdp_schedule_kind mfsdp_schedule_kind_by_name(const char *text) {
#define MFSDP__SCHEDULE_CASE(NAME, name) \
  if (text != NULL && strcmp(text, name) == 0) return MFSDP_SCHEDULE_##NAME;
  MFSDP_SCHEDULES(MFSDP__SCHEDULE_CASE)
#undef MFSDP__SCHEDULE_CASE
  return MFSDP_SCHEDULE_NONE;
}

typedef struct mfsdp_schedule {
  size_t struct_nbytes;
  mfsdp_schedule_kind kind;
  int64_t warmup_steps; /* every kind; 0 and 1: the first step is already at the full rate */
  int64_t total_steps;  /* not read by CONSTANT */
  int64_t decay_steps;  /* WSD, WSD_SQRT: the last so many of total_steps */
  double final_factor;  /* in [0, 1]; not read by CONSTANT */
} mfsdp_schedule;

/* CONSTANT without warm-up: a factor of 1. The other kinds need total_steps, WSD decay_steps too. */
MFSDP_API mfsdp_schedule mfsdp_schedule_default(void) {
  mfsdp_schedule schedule;
  memset(&schedule, 0, sizeof(schedule));
  schedule.struct_nbytes = sizeof(schedule);
  schedule.kind = MFSDP_SCHEDULE_CONSTANT;
  return schedule;
}

/* Steps are counted in doubles: exact up to here. */
#define MFSDP__SCHEDULE_MOST_STEPS (INT64_C(1) << 53)

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_schedule_check(mfsdp_context *context, const mfsdp_schedule *s) {
  if (s == NULL || s->struct_nbytes != sizeof(*s))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "schedule: it is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_schedule_default)",
                      sizeof(*s));
  if (s->kind <= MFSDP_SCHEDULE_NONE || s->kind >= MFSDP_SCHEDULE_END)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "schedule: kind is %d, needs %d to %d",
                      (int)s->kind, (int)MFSDP_SCHEDULE_NONE + 1, (int)MFSDP_SCHEDULE_END - 1);
  if (s->warmup_steps < 0 || s->warmup_steps > MFSDP__SCHEDULE_MOST_STEPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "schedule: warmup_steps is %lld, needs 0 to 2^53",
                      (long long)s->warmup_steps);
  if (s->kind == MFSDP_SCHEDULE_CONSTANT) return MFSDP_OK;
  if (s->total_steps < 1 || s->total_steps > MFSDP__SCHEDULE_MOST_STEPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "schedule: %s: total_steps is %lld, needs 1 to 2^53",
                      mfsdp_schedule_kind_name(s->kind), (long long)s->total_steps);
  if (!(s->final_factor >= 0.0) || !(s->final_factor <= 1.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "schedule: %s: final_factor is %g, needs 0 to 1",
                      mfsdp_schedule_kind_name(s->kind), s->final_factor);
  if ((s->kind == MFSDP_SCHEDULE_WSD || s->kind == MFSDP_SCHEDULE_WSD_SQRT) &&
      (s->decay_steps < 1 || s->decay_steps > s->total_steps))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "schedule: %s: decay_steps is %lld, needs 1 to total_steps (%lld)",
                      mfsdp_schedule_kind_name(s->kind), (long long)s->decay_steps,
                      (long long)s->total_steps);
  return MFSDP_OK;
}

/* The last step, counted from 1, at the full rate. */
MFSDP_API int64_t mfsdp__schedule_full_until(const mfsdp_schedule *s) {
  const int64_t warm = s->warmup_steps > 1 ? s->warmup_steps : 1;
  const int64_t decays = s->total_steps - s->decay_steps;
  const int late = s->kind == MFSDP_SCHEDULE_WSD || s->kind == MFSDP_SCHEDULE_WSD_SQRT;
  return late && decays > warm ? decays : warm;
}

/* The factor in step number n, from 1; of a schedule that has been checked. */
MFSDP_API double mfsdp__schedule_at(const mfsdp_schedule *s, int64_t n) {
  const int64_t full = mfsdp__schedule_full_until(s);
  const double drop = 1.0 - s->final_factor;
  double at;
  if (n < s->warmup_steps) return (double)n / (double)s->warmup_steps;
  if (s->kind == MFSDP_SCHEDULE_CONSTANT || n <= full) return 1.0;
  if (n > s->total_steps) return s->final_factor;
  at = (double)(n - full);
  if (s->kind == MFSDP_SCHEDULE_COSINE)
    return s->final_factor +
           drop * 0.5 *
               (1.0 + cos(3.14159265358979323846 * (at / (double)(s->total_steps + 1 - full))));
  if (s->kind == MFSDP_SCHEDULE_WSD_SQRT)
    return 1.0 - drop * sqrt(at / (double)(s->total_steps + 1 - full));
  return 1.0 - drop * at / (double)(s->total_steps + 1 - full);
}

/*
 * *factor = what every group's own lr is multiplied with in the step that comes after `step`
 * attempted ones, in [0, 1]. E_ARGUMENT as mfsdp_schedule_check, or step is negative or beyond
 * 2^53; *factor is untouched then. Allocates nothing.
 */
MFSDP_API mfsdp_status mfsdp_schedule_factor(mfsdp_context *context, const mfsdp_schedule *schedule,
                                             int64_t step, double *factor) {
  MFSDP_TRY(mfsdp_schedule_check(context, schedule));
  if (factor == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "schedule: factor is NULL");
  if (step < 0 || step > MFSDP__SCHEDULE_MOST_STEPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "schedule: step is %lld, needs 0 to 2^53",
                      (long long)step);
  *factor = mfsdp__schedule_at(schedule, step + 1);
  return MFSDP_OK;
}

#endif /* MFSDP_SCHEDULE_H */
