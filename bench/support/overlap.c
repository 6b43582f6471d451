/* SPDX-License-Identifier: MIT */
#include "overlap.h"

#include "gpt_job.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

enum { MAX_RANKS = 4, MAX_UNITS = 16, MAX_STEPS = 64, MODE_COUNT = 6 };
enum { OFF = 0, IN_PLACE }; /* an even mode has no links, the odd one after it has */

/* What a mode's runtime is made with. */
typedef struct mode {
  const char *name, *exposed, *share; /* metrics */
  int links, prefetch;
} mode;

static const mode modes[MODE_COUNT] = {
    {"in place, no links", NULL, NULL, 0, 0},
    {"in place", "exposed, in place", "share hidden, none", 1, 0},
    {"prefetch 1, no links", NULL, NULL, 0, 1},
    {"prefetch 1", "exposed, prefetch 1", "share hidden, 1", 1, 1},
    {"prefetch 2, no links", NULL, NULL, 0, 2},
    {"prefetch 2", "exposed, prefetch 2", "share hidden, 2", 1, 2}};

typedef struct link_speed {
  int64_t latency_us;
  double bytes_per_us;
} link_speed;

typedef struct run run;

/* A rank's runtime in one mode, with what its trace callback notes. */
typedef struct lane {
  gpt_rank rank;
  run *all;
  int32_t mode;
  double phase_begin; /* of the host's forward and backward: its own thread */
  double step_end;    /* written by the thread of the compute queue, read after `ended` */
  int32_t ended;      /* atomic: optimizers that have ended */
} lane;

struct run {
  gpt_job jobs[MODE_COUNT]; /* share everything but the world and the prefetch */
  int mode_count, warmup, steps, units;
  int32_t ranks;
  pthread_barrier_t barrier;
  lane lanes[MAX_RANKS][MODE_COUNT];
  double step_s[MODE_COUNT][MAX_STEPS];       /* of the slowest rank */
  double rank_s[MAX_RANKS];                   /* of the step at hand */
  double compute_s[2 * MAX_UNITS][MAX_RANKS]; /* mode OFF: forward of unit u, then U + u backward */
  uint64_t hash[MODE_COUNT];
};

typedef struct worker {
  run *all;
  int32_t index;
  mfsdp_thread thread;
} worker;

/* ---- one step ---- */

static void trace(void *user, int begin, const char *lane_name, const char *label) {
  lane *l = (lane *)user;
  const int32_t backward = strncmp(label, "backward unit ", 14) == 0;
  (void)lane_name;
  if (strcmp(label, "optimizer") == 0) {
    if (begin)
      l->step_end = bench_now();
    else
      (void)__atomic_add_fetch(&l->ended, 1, __ATOMIC_RELEASE);
    return;
  }
  if (l->mode != OFF || (!backward && strncmp(label, "forward unit ", 13) != 0)) return;
  if (begin) {
    l->phase_begin = bench_now();
  } else {
    const int unit = atoi(label + (backward ? 14 : 13));
    l->all->compute_s[backward * l->all->units + unit][l->rank.index] +=
        bench_now() - l->phase_begin;
  }
}

static void take_step(run *all, int32_t index, int32_t m, int64_t step, int slot) {
  lane *l = &all->lanes[index][m];
  gpt_rank *rank = &l->rank;
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  const int32_t ended = __atomic_load_n(&l->ended, __ATOMIC_ACQUIRE);
  double start;
  int32_t u, r;
  desc.grad_weight = 1.0 / (double)all->ranks;
  gpt_data_batch(&rank->job->data, (uint64_t)rank->job->options.seed, step * all->ranks + index,
                 rank->model.inputs, rank->model.targets);
  (void)pthread_barrier_wait(&all->barrier);
  start = bench_now();
  bench_need(rank, mfsdp_step_begin(rank->runtime, &desc));
  for (u = 0; u < all->units; ++u)
    bench_need(rank, gpt_rank_forward(rank, u, MFSDP_USE_FORWARD));
  for (u = all->units; u-- > 0;)
    bench_need(rank, gpt_rank_backward(rank, u));
  bench_need(rank, mfsdp_step_end(rank->runtime, 0));
  bench_need(rank, mfsdp_step_verdict(rank->runtime, &verdict));
  while (__atomic_load_n(&l->ended, __ATOMIC_ACQUIRE) == ended)
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
  all->rank_s[index] = l->step_end - start;
  (void)pthread_barrier_wait(&all->barrier);
  if (index != 0 || slot < 0) return;
  all->step_s[m][slot] = 0.0;
  for (r = 0; r < all->ranks; ++r)
    if (all->rank_s[r] > all->step_s[m][slot]) all->step_s[m][slot] = all->rank_s[r];
}

static void run_worker(void *argument) {
  worker *w = (worker *)argument;
  run *all = w->all;
  int32_t m, i;
  for (m = 0; m < all->mode_count; ++m) {
    lane *l = &all->lanes[w->index][m];
    bench_need(&l->rank, gpt_rank_create(&l->rank, &all->jobs[m], w->index));
    l->all = all;
    l->mode = m;
    l->rank.context.desc.trace = trace;
    l->rank.context.desc.user = l;
  }
  for (i = 0; i < all->warmup + all->steps; ++i) {
    if (i == all->warmup)
      for (m = 0; m < 2 * MAX_UNITS; ++m)
        all->compute_s[m][w->index] = 0.0;
    for (m = 0; m < all->mode_count; ++m)
      take_step(all, w->index, m, i, i - all->warmup);
  }
  for (m = 0; m < all->mode_count; ++m) {
    lane *l = &all->lanes[w->index][m];
    uint64_t hash = 0;
    bench_need(&l->rank, gpt_rank_params_hash(&l->rank, &hash));
    if (w->index == 0) all->hash[m] = hash;
    bench_need(&l->rank, gpt_rank_destroy(&l->rank));
  }
}

static void fail(const char *what) {
  fprintf(stderr, "bench overlap: %s\n", what);
  exit(1);
}

/* Runs the first mode_count modes. */
static void run_modes(run *all, const gpt_job *job, link_speed link, int mode_count, int warmup,
                      int steps) {
  worker workers[MAX_RANKS];
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  int32_t m, r;
  memset(all, 0, sizeof(*all));
  all->mode_count = mode_count;
  all->warmup = warmup;
  all->steps = steps;
  all->ranks = (int32_t)job->options.ranks;
  all->units = gpt_unit_count(&job->config);
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      pthread_barrier_init(&all->barrier, NULL, (unsigned)all->ranks) != 0)
    fail("set-up failed");
  for (m = 0; m < mode_count; ++m) {
    mfsdp_threads_world_desc desc;
    all->jobs[m] = *job;
    all->jobs[m].options.prefetch = modes[m].prefetch;
    desc = gpt_job_world_desc(&all->jobs[m]);
    if (modes[m].links) desc.latency_us = link.latency_us;
    if (modes[m].links) desc.bytes_per_us = link.bytes_per_us;
    if (mfsdp_threads_world_create(&context, &desc, &all->jobs[m].world) != MFSDP_OK)
      fail(mfsdp_context_error(&context)->message);
  }
  for (r = 0; r < all->ranks; ++r) {
    workers[r].all = all;
    workers[r].index = r;
    if (mfsdp_thread_start(&workers[r].thread, run_worker, &workers[r]) != MFSDP_OK)
      fail("no thread");
  }
  for (r = 0; r < all->ranks; ++r)
    mfsdp_thread_join(&workers[r].thread);
  for (m = 0; m < mode_count; ++m)
    (void)mfsdp_threads_world_destroy(&context, all->jobs[m].world);
  (void)pthread_barrier_destroy(&all->barrier);
}

/* Mean over ranks and steps. */
static double compute_of(const run *all, int index) {
  double sum = 0.0;
  int32_t r;
  for (r = 0; r < all->ranks; ++r)
    sum += all->compute_s[index][r];
  return sum / (double)(all->ranks * all->steps);
}

/* ---- what the links take ---- */

typedef struct wire {
  double gather[MAX_UNITS], reduce[MAX_UNITS], latency; /* seconds */
} wire;

static double longest_nbytes(const mfsdp_plan *plan, int32_t unit, mfsdp_layout_kind layout) {
  int64_t longest = 0;
  int32_t r;
  for (r = 0; r < mfsdp_plan_world(plan); ++r) {
    const int64_t count = mfsdp_plan_segment_count(plan, unit, r, layout);
    if (count > longest) longest = count;
  }
  return (double)longest * sizeof(float);
}

static void make_wire(const mfsdp_plan *plan, link_speed link, wire *out) {
  const double chunk = MFSDP_CHUNK_NBYTES, rate = link.bytes_per_us * 1e6; /* by DIRECT */
  int32_t u;
  out->latency = (double)link.latency_us * 1e-6;
  for (u = 0; u < mfsdp_plan_unit_count(plan); ++u) {
    const double gathered = longest_nbytes(plan, u, MFSDP_LAYOUT_GATHER);
    const double reduced = longest_nbytes(plan, u, MFSDP_LAYOUT_REDUCE);
    out->gather[u] = out->latency + gathered / rate;
    out->reduce[u] = out->latency * ceil(reduced / chunk) + reduced / rate;
  }
}

static double smaller(double a, double b) {
  return a < b ? a : b;
}

/* The formulas of overlap.h. */
static void sum_up(const run *all, const wire *w, double *transfer, double *hideable) {
  const int units = all->units;
  int u;
  *transfer = w->latency;
  *hideable = 0.0;
  for (u = 0; u < units; ++u) {
    const double ahead = u > 0 ? w->gather[u - 1] : 0.0,
                 behind = u + 1 < units ? w->reduce[u + 1] : 0.0;
    *transfer += w->gather[u] + w->reduce[u] + ahead;
    *hideable += smaller(ahead + behind, compute_of(all, units + u));
    if (u + 1 < units) *hideable += smaller(w->gather[u + 1], compute_of(all, u));
  }
}

/* ---- a case ---- */

static mfsdp_plan *make_plan(mfsdp_context *context, const gpt_job *job) {
  mfsdp_plan *plan = NULL;
  if (gpt_plan_create(context, job, &plan) != MFSDP_OK) fail(mfsdp_context_error(context)->message);
  return plan;
}

/* A gather of a block takes 0.7 of its forward, so transfers take about 0.7 of the computation. */
static link_speed choose_link(const mfsdp_plan *plan, double forward_s) {
  link_speed link;
  double wire_s;
  link.latency_us = 100;
  wire_s = 0.7 * forward_s - (double)link.latency_us * 1e-6;
  if (wire_s < 1e-4) wire_s = 1e-4;
  link.bytes_per_us = longest_nbytes(plan, 1, MFSDP_LAYOUT_GATHER) / (wire_s * 1e6);
  return link;
}

static void report_mode(bench_report *report, const char *name, const run *all, int m,
                        double medians[], double transfer, double hideable) {
  const double added = medians[m] - medians[m - 1], exposed = added - (transfer - hideable);
  bench_row row = bench_row_default();
  row.name = name;
  row.wrong = all->hash[m] != all->hash[OFF];
  row.metric = modes[m].exposed;
  row.unit = "ms";
  row.value = exposed * 1e3;
  row.peer = "in place, no prefetch";
  row.ratio_to_peer = medians[IN_PLACE] / medians[m];
  bench_add(report, &row);
  row.metric = modes[m].share;
  row.unit = "of 1";
  row.value = 1.0 - exposed / hideable;
  row.limit = "all hideable";
  row.ratio_to_limit = row.value;
  bench_add(report, &row);
}

static void run_case(bench_report *report, const bench_shape *shape, int32_t ranks, int quick) {
  static run all; /* large */
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  double medians[MODE_COUNT], transfer, hideable, compute = 0.0;
  char name[64];
  link_speed link = {0, 0.0};
  mfsdp_plan *plan;
  gpt_job job;
  wire w;
  int m, u;
  bench_job_create(&job, shape, ranks);
  job.options.optimizer =
      GPT_OPTIMIZER_ADAMW; /* after the step that is measured: short is enough */
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) fail("set-up failed");
  plan = make_plan(&context, &job);
  run_modes(&all, &job, link, 1, 1, quick ? 3 : 10);
  link = choose_link(plan, compute_of(&all, 1));
  make_wire(plan, link, &w);
  run_modes(&all, &job, link, MODE_COUNT, 1, quick ? 5 : 40);
  sum_up(&all, &w, &transfer, &hideable);
  for (u = 0; u < 2 * all.units; ++u)
    compute += compute_of(&all, u);
  (void)snprintf(name, sizeof(name), "%s, %d ranks", shape->name, (int)ranks);
  for (m = 0; m < MODE_COUNT; ++m) {
    const bench_stats stats = bench_summarize(all.step_s[m], all.steps);
    medians[m] = stats.median;
    printf("    %-20s min %.2f median %.2f p99 %.2f ms to the optimizer\n", modes[m].name,
           stats.min * 1e3, stats.median * 1e3, stats.p99 * 1e3);
  }
  printf("    links: latency %lld us, %.1f MB/s on each ordered pair of ranks: a block's gather of "
         "%.2f ms "
         "is 0.7 of its forward, measured before\n"
         "    a step computes %.2f ms, transfers %.2f ms, of which %.2f ms could be hidden "
         "(overlap.h)\n",
         (long long)link.latency_us, link.bytes_per_us, w.gather[1] * 1e3, compute * 1e3,
         transfer * 1e3, hideable * 1e3);
  for (m = IN_PLACE; m < MODE_COUNT; m += 2)
    report_mode(report, name, &all, m, medians, transfer, hideable);
  mfsdp_plan_destroy(&context, plan);
  bench_job_destroy(&job);
}

void bench_overlap(bench_report *report, int quick) {
  static const bench_shape shape = {"gpt d=256 L=4 T=128 B=2", 256, 4, 128, 2};
  printf("\n  transfer hidden behind computation, over artificial links, AdamW:\n");
  run_case(report, &shape, 4, quick);
  /* Ranks that share a core compute while others wait: with one for each core nothing but prefetch
   * hides. */
  run_case(report, &shape, 2, quick);
}
