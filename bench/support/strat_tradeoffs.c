/* SPDX-License-Identifier: MIT */
#include "strat_tradeoffs.h"

#include "strat_links.h"

#include <math.h>
#include <stdlib.h>

enum { MOST = 3 * 2 * 3 * 2 };

typedef struct choice {
  char name[64];
  int32_t prefetch, keep, collective, in_backward;
  double ms, nbytes;
} choice;

static void make(choice *c, int index) {
  static const int32_t collectives[] = {GPT_COLLECTIVE_DIRECT, GPT_COLLECTIVE_RING,
                                        GPT_COLLECTIVE_NATIVE};
  static const char *const names[] = {"direct", "ring", "native"};
  c->in_backward = index % 2;
  c->collective = collectives[index / 2 % 3];
  c->keep = index / 6 % 2;
  c->prefetch = index / 12;
  (void)snprintf(c->name, sizeof c->name, "prefetch %d%s %s%s", (int)c->prefetch,
                 c->keep ? " keep" : "", names[index / 2 % 3],
                 c->in_backward ? " step-in-backward" : "");
}

static void add(strat_rows *rows, const strat_key *key, const char *metric, const char *unit,
                bench_stats stats, int repeats) {
  strat_row row;
  memset(&row, 0, sizeof row);
  row.metric = metric;
  row.unit = unit;
  row.stats = stats;
  row.repeats = repeats;
  row.predicted = (double)NAN;
  row.wrong = -1;
  strat_rows_add(rows, key, &row);
}

/* 0 if the library refuses. */
static int measure(const strat_model *model, const strat_key *key, const choice *c,
                   int32_t process_rank, double seconds, strat_rows *rows) {
  strat_load load;
  strat_result r;
  gpt_options *o = &load.job.options;
  strat_load_create(&load, model, key->world);
  load.job.processes = process_rank >= 0;
  load.job.process_rank = process_rank;
  o->prefetch = c->prefetch;
  o->reshard_after_forward = !c->keep;
  o->collective = c->collective;
  o->step_in_backward = c->in_backward;
  strat_measure(&load, STRAT_AS_GIVEN, seconds, &r);
  strat_load_destroy(&load);
  if (process_rank > 0) return !r.refused;
  if (r.refused) {
    printf("SKIP %s: %s\n", c->name, r.why);
    return 0;
  }
  for (int i = 0; i < r.count[STRAT_STEP]; ++i)
    r.seconds[STRAT_STEP][i] *= 1e3;
  {
    const bench_stats held = {r.predicted_held, r.predicted_held, r.predicted_held};
    add(rows, key, "whole step", "ms", bench_summarize(r.seconds[STRAT_STEP], r.count[STRAT_STEP]),
        r.count[STRAT_STEP]);
    add(rows, key, "held", "B", held, 1);
  }
  strat_rows_commit(rows);
  return 1;
}

static int by_time(const void *a, const void *b) {
  const double x = ((const choice *)a)->ms, y = ((const choice *)b)->ms;
  return (x > y) - (x < y);
}

static int is_beaten(const choice *choices, int count, const choice *c) {
  for (int i = 0; i < count; ++i)
    if (choices[i].ms <= c->ms && choices[i].nbytes <= c->nbytes &&
        (choices[i].ms < c->ms || choices[i].nbytes < c->nbytes))
      return 1;
  return 0;
}

static void print_table(choice *choices, int count) {
  qsort(choices, (size_t)count, sizeof *choices, by_time);
  printf("\n| options | step, ms | held by a rank, MB | |\n|---|---|---|---|\n");
  for (int i = 0; i < count; ++i)
    printf("| %s | %.1f | %.2f | %s |\n", choices[i].name, choices[i].ms, choices[i].nbytes * 1e-6,
           is_beaten(choices, count, &choices[i]) ? "" : "*");
}

void strat_tradeoffs(const strat_model *model, const char *links, int32_t world,
                     int32_t process_rank, double seconds, strat_rows *rows) {
  static choice choices[MOST];
  int count = 0;
  for (int i = 0; i < MOST; ++i) {
    choice *c = &choices[count];
    strat_key key = {model->name, links, c->name, world, 1};
    make(c, i);
    /* Threads' own collectives copy past artificial links. */
    if (c->collective == GPT_COLLECTIVE_NATIVE && process_rank < 0 && strat_threads_linked())
      continue;
    if (!strat_rows_have(rows, &key) && !measure(model, &key, c, process_rank, seconds, rows))
      continue;
    c->ms = strat_rows_value(rows, &key, "whole step");
    c->nbytes = strat_rows_value(rows, &key, "held");
    ++count;
  }
  if (process_rank <= 0) print_table(choices, count);
}
