/* SPDX-License-Identifier: MIT */
/*
 * optimizer.c - what a step of AdamW, Muon, Shampoo and SOAP costs on one matrix, on one thread, in
 * alternation in one run.
 *
 * Shampoo and SOAP renew roots and bases every ten steps. A sample is one such interval: its time over
 * ten is the amortized cost of a step, and the costliest step of it, the one that renews, is told
 * apart. The peer is Muon in the same run (jordan, five steps), by the same function,
 * mfsdp_optimizer_step. `wrong` is not compared here: the tests judge the formulas, against float64.
 */
#include "support/bench.h"

#include "mfsdp/host/backend_host.h"
#include "mfsdp/optimizer.h"
#if MFSDP_EXAMPLE_LAPACKE
#include "mfsdp/host/math_lapacke.h"
#endif

#include <stdlib.h>
#include <time.h>

#define EVERY 10
#define MAX_SAMPLES 200

typedef struct stage {
  mfsdp_context context;
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
} stage;

typedef struct contender {
  const char *name;
  mfsdp_hyper_group group;
  mfsdp_optimizer *optimizer;
  float *master;
  mfsdp_step_scalars scalars;
  double amortized[MAX_SAMPLES], costliest[MAX_SAMPLES];
} contender;

static void need(stage *s, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench optimizer: %s\n", mfsdp_context_error(&s->context)->message);
  exit(1);
}

/* CPU seconds of this thread: nothing here waits or starts another. */
static double cpu_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static float *numbers(int64_t count, uint64_t seed) {
  uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
  void *data = NULL;
  int64_t i;
  if (posix_memalign(&data, 256, (size_t)count * sizeof(float)) != 0) exit(1);
  for (i = 0; i < count; ++i) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    ((float *)data)[i] = (float)((double)(x >> 40) / 16777216.0 - 0.5);
  }
  return (float *)data;
}

static void open_contender(stage *s, contender *c, int64_t rows, int64_t cols, const float *grad) {
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_optimizer_tensor tensor;
  memset(&tensor, 0, sizeof(tensor));
  c->master = numbers(rows * cols, 2);
  tensor.name = c->name;
  tensor.role = MFSDP_ROLE_MATRIX;
  tensor.rows = rows;
  tensor.cols = cols;
  tensor.count = rows * cols;
  tensor.master = c->master;
  tensor.grad = grad;
  desc.groups = &c->group;
  desc.group_count = 1;
  c->scalars = mfsdp_step_scalars_default(1e-4, 0.01);
  need(s, mfsdp_optimizer_create(&s->context, s->backend, &desc, &tensor, 1, &c->optimizer));
}

/* One interval, each step with another gradient. */
static void run_interval(stage *s, contender *c, float *grad, int64_t count, int sample) {
  double sum = 0.0, most = 0.0;
  int step;
  for (step = 0; step < EVERY; ++step) {
    double start, seconds;
    grad[(step * 7919 + sample + 1) % count] += 0.25f;
    start = cpu_now();
    need(s, mfsdp_optimizer_step(&s->context, c->optimizer, s->queue, &c->scalars, NULL));
    seconds = cpu_now() - start;
    ++c->scalars.applied_steps;
    sum += seconds;
    if (seconds > most) most = seconds;
  }
  if (sample < 0) return; /* SOAP's first bases, and cold caches */
  c->amortized[sample] = sum / EVERY;
  c->costliest[sample] = most;
}

static void report_row(bench_report *report, const char *shape, const char *metric,
                       const bench_stats *stats, const bench_stats *muon) {
  bench_row row = bench_row_default();
  row.bench = report->bench;
  row.name = shape;
  row.metric = metric;
  row.unit = "ms";
  row.value = stats->min * 1e3;
  if (muon != NULL) {
    row.peer = "muon";
    row.ratio_to_peer = muon->min / stats->min;
  }
  row.wrong = -1;
  bench_add(report, &row);
  printf("    median %.4g p99 %.4g ms\n", stats->median * 1e3, stats->p99 * 1e3);
}

static void run_shape(bench_report *report, stage *s, int64_t rows, int64_t cols, int quick) {
  static contender all[4];
  const int count = MFSDP_HAS(s->backend->ops, eigh) ? 4 : 2;
  float *grad = numbers(rows * cols, 1);
  double budget = quick ? 2.0 : 20.0;
  bench_stats muon;
  char shape[40], metric[40];
  int i, sample;
  memset(all, 0, sizeof(all));
  all[0].name = "muon";
  all[0].group = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  all[1].name = "adamw";
  all[1].group = mfsdp_hyper_group_adamw(1e-4, 0.01);
  all[2].name = "shampoo";
  all[2].group = mfsdp_hyper_group_shampoo();
  all[3].name = "soap";
  all[3].group = mfsdp_hyper_group_soap();
  all[2].group.shampoo.update_every = all[3].group.soap.update_every = EVERY;
  (void)snprintf(shape, sizeof(shape), "%d x %d", (int)rows, (int)cols);
  for (i = 0; i < count; ++i) {
    open_contender(s, &all[i], rows, cols, grad);
    run_interval(s, &all[i], grad, rows * cols, -1);
  }
  for (sample = 0; sample < MAX_SAMPLES && (sample < 3 || budget > 0.0); ++sample)
    for (i = 0; i < count; ++i) {
      run_interval(s, &all[i], grad, rows * cols, sample);
      budget -= EVERY * all[i].amortized[sample];
    }
  muon = bench_summarize(all[0].amortized, sample);
  for (i = 0; i < count; ++i) {
    const bench_stats amortized = i == 0 ? muon : bench_summarize(all[i].amortized, sample);
    const bench_stats costliest = bench_summarize(all[i].costliest, sample);
    (void)snprintf(metric, sizeof(metric), "%s, a step", all[i].name);
    report_row(report, shape, metric, &amortized, i == 0 ? NULL : &muon);
    (void)snprintf(metric, sizeof(metric), "%s, renewing", all[i].name);
    if (i >= 2) report_row(report, shape, metric, &costliest, &muon);
    mfsdp_optimizer_destroy(&s->context, all[i].optimizer);
    free(all[i].master);
  }
  printf("    %d intervals of %d steps\n", sample, EVERY);
  free(grad);
}

static void open_stage(stage *s) {
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  memset(s, 0, sizeof(*s));
  if (mfsdp_context_init(&s->context, &context_desc) != MFSDP_OK) exit(1);
  desc.math = bench_math();
#if MFSDP_EXAMPLE_LAPACKE
  desc.lapack = mfsdp_host_lapacke();
#else
  printf("    SKIP Shampoo and SOAP: no LAPACKE in this build\n");
#endif
  need(s, mfsdp_host_backend_create(&s->context, &desc, &s->host));
  s->backend = mfsdp_host_backend_get(s->host);
  need(s, s->backend->ops->queue_create(s->backend->self, &s->context, "bench", &s->queue));
}

int main(int argc, char **argv) {
  static const int64_t shapes[][2] = {{64, 64},    {128, 128}, {192, 768},  {256, 256},
                                      {128, 1024}, {512, 512}, {512, 2048}, {1024, 1024}};
  bench_options options;
  bench_report report;
  stage s;
  size_t i;
  int status = bench_parse(argc, argv,
                           "optimizer: a step of AdamW, Shampoo and SOAP beside Muon's, one thread",
                           &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "optimizer", &options);
  if (status != 0) return status;
  open_stage(&s);
  printf("    sgemm %.4g GFLOP/s; all times are CPU time of one thread\n",
         bench_sgemm_rate(bench_math(), 512) * 1e-9);
  for (i = 0; i < sizeof(shapes) / sizeof(shapes[0]) - (options.quick ? 2 : 0); ++i)
    run_shape(&report, &s, shapes[i][0], shapes[i][1], options.quick);
  s.backend->ops->queue_destroy(s.backend->self, &s.context, s.queue);
  need(&s, mfsdp_host_backend_destroy(&s.context, s.host));
  return bench_close(&report);
}
