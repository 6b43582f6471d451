/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz.c - Newton-Schulz beside what the Python implementations do, on one thread, in
 * alternation in one run; then AdamW and Muon's element-wise passes beside memcpy.
 *
 * The peer: the same normalization, then five jordan steps with three sgemm each (A = X X^T;
 * P = b A + c A A; X = a X + P X), the sums inside sgemm by way of a copy, tall matrices by the other
 * side: as good as three general products get. `limit` of the times is the degree floor, (11 + 3 r)
 * s^3 multiply-adds at the speed of sgemm measured in the same run: no evaluation of a polynomial of
 * this degree in X X^T is known with less. `wrong`: elements further from the peer's than 1% of the
 * root mean square; the formula is judged in the tests, against float64.
 */
#include "support/bench.h"

#include "mfsdp/adamw.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/muon.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#define MAX_REPEATS 4000

typedef struct stage {
  mfsdp_context context;
  mfsdp_host_backend *host;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  const mfsdp_host_math *math;
  double sgemm_rate, copy_rate;
} stage;

typedef struct ns_case {
  const char *name;
  int64_t rows, cols, batch;
  int quick; /* 1: also with --quick */
} ns_case;

typedef struct ns_data {
  const ns_case *shape;
  mfsdp_newton_schulz_desc desc;
  float *in, *out, *want, *other, *gram, *poly;
  void *workspace;
  size_t workspace_nbytes;
} ns_data;

static void need(stage *s, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench newton_schulz: %s\n", mfsdp_context_error(&s->context)->message);
  exit(1);
}

/* CPU seconds of this thread: what other programs take from it does not count, and the clock counts
 * nanoseconds. Nothing here waits or starts a thread. */
static double cpu_now(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *memory(size_t nbytes) {
  void *data = NULL;
  if (posix_memalign(&data, 256, nbytes) != 0) exit(1);
  memset(data, 0, nbytes);
  return data;
}

static float *numbers(int64_t count, uint64_t seed) {
  float *out = (float *)memory((size_t)count * sizeof(float));
  uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
  int64_t i;
  for (i = 0; i < count; ++i) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    out[i] = (float)((double)(x >> 40) / 16777216.0 - 0.5);
  }
  return out;
}

/* ---- Newton-Schulz ---- */

/* Three sgemm a step; the result ends in `want`. */
static void peer_one(stage *s, ns_data *d, const float *in, float *want) {
  const int64_t m = d->shape->rows, n = d->shape->cols, side = m < n ? m : n;
  const int tall = m > n;
  float *x = d->other, *next = want; /* five steps: the last one lands in `want` */
  mfsdp_normalize_args normalize;
  int step;
  memset(&normalize, 0, sizeof(normalize));
  normalize.struct_nbytes = sizeof(normalize);
  normalize.dst = x;
  normalize.src = in;
  normalize.count = normalize.dst_stride = normalize.src_stride = m * n;
  normalize.batch_count = 1;
  normalize.dst_dtype = MFSDP_F32;
  normalize.rule = MFSDP_NORM_SCALE_SAFE;
  normalize.gain = 1.0;
  normalize.scratch = (double *)d->workspace;
  need(s, s->backend->ops->normalize(s->backend->self, s->queue, &normalize));
  for (step = 0; step < 5; ++step) {
    float *swap = x;
    s->math->sgemm(tall, !tall, side, side, tall ? m : n, 1.0f, x, n, x, n, 0.0f, d->gram, side);
    memcpy(d->poly, d->gram, (size_t)(side * side) * sizeof(float));
    s->math->sgemm(0, 0, side, side, side, 2.0315f, d->gram, side, d->gram, side, -4.7750f, d->poly,
                   side);
    memcpy(next, x, (size_t)(m * n) * sizeof(float));
    if (tall)
      s->math->sgemm(0, 0, m, n, n, 1.0f, x, n, d->poly, n, 3.4445f, next, n);
    else
      s->math->sgemm(0, 0, m, n, m, 1.0f, d->poly, m, x, n, 3.4445f, next, n);
    x = next;
    next = swap;
  }
}

static void run_peer(stage *s, ns_data *d) {
  const int64_t count = d->shape->rows * d->shape->cols;
  int64_t i;
  for (i = 0; i < d->shape->batch; ++i)
    peer_one(s, d, d->in + i * count, d->want + i * count);
}

static void run_ours(stage *s, ns_data *d) {
  const int64_t count = d->shape->rows * d->shape->cols;
  need(s, mfsdp_newton_schulz_batch(&s->context, s->backend, s->queue, &d->desc, d->shape->rows,
                                    d->shape->cols, d->shape->batch, d->in, count, d->out, count,
                                    d->workspace, d->workspace_nbytes));
}

static int64_t count_wrong(const ns_data *d) {
  const int64_t count = d->shape->rows * d->shape->cols * d->shape->batch;
  double sum = 0.0;
  int64_t i, wrong = 0;
  for (i = 0; i < count; ++i)
    sum += (double)d->want[i] * (double)d->want[i];
  for (i = 0; i < count; ++i)
    wrong += !(fabs((double)d->out[i] - (double)d->want[i]) <= 0.01 * sqrt(sum / (double)count));
  return wrong;
}

static const char *form_name(mfsdp_newton_schulz_form form) {
  return form == MFSDP_NS_PLAIN       ? "ms, plain"
         : form == MFSDP_NS_SYMMETRIC ? "ms, symmetric"
                                      : "ms, gram";
}

static void report_times(bench_report *report, const stage *s, const ns_data *d, double *ours,
                         double *peer, int repeats) {
  const bench_stats mine = bench_summarize(ours, repeats), theirs = bench_summarize(peer, repeats);
  const double side = (double)(d->shape->rows < d->shape->cols ? d->shape->rows : d->shape->cols);
  const double r = (double)d->shape->rows * (double)d->shape->cols / (side * side);
  const double unit = (double)d->shape->batch * side * side * side;
  bench_row row = bench_row_default();
  row.bench = report->bench;
  row.name = d->shape->name;
  row.metric = form_name(mfsdp_newton_schulz_form_of(&d->desc, d->shape->rows, d->shape->cols));
  row.unit = "ms";
  row.value = mine.min * 1e3;
  row.peer = "three sgemm a step";
  row.ratio_to_peer = theirs.min / mine.min;
  row.limit = "degree floor";
  row.ratio_to_limit = (11.0 + 3.0 * r) * unit * 1.0 / s->sgemm_rate / mine.min;
  row.wrong = count_wrong(d);
  bench_add(report, &row);
  printf(
      "    ours median %.4g p99 %.4g ms; peer min %.4g median %.4g p99 %.4g ms; %d alternations\n",
      mine.median * 1e3, mine.p99 * 1e3, theirs.min * 1e3, theirs.median * 1e3, theirs.p99 * 1e3,
      repeats);
  row = bench_row_default();
  row.bench = report->bench;
  row.name = d->shape->name;
  row.metric = "three-sgemm flops";
  row.unit = "GFLOP/s";
  row.value = (20.0 * r + 10.0) * unit / mine.min * 1e-9;
  row.limit = "sgemm peak";
  row.ratio_to_limit = row.value * 1e9 / s->sgemm_rate;
  bench_add(report, &row);
}

static void run_case(bench_report *report, stage *s, const ns_case *shape, int quick) {
  static double ours[MAX_REPEATS], peer[MAX_REPEATS];
  const int64_t count = shape->rows * shape->cols;
  const int64_t side = shape->rows < shape->cols ? shape->rows : shape->cols;
  double budget = quick ? 1.0 : 6.0, start;
  int i, k, inner;
  ns_data d;
  memset(&d, 0, sizeof(d));
  d.shape = shape;
  d.desc = mfsdp_newton_schulz_desc_default();
  need(s, mfsdp_newton_schulz_batch_workspace_nbytes(&s->context, &d.desc, shape->rows, shape->cols,
                                                     shape->batch, &d.workspace_nbytes));
  d.workspace = memory(d.workspace_nbytes);
  d.in = numbers(count * shape->batch, 1);
  d.out = (float *)memory((size_t)(count * shape->batch) * sizeof(float));
  d.want = (float *)memory((size_t)(count * shape->batch) * sizeof(float));
  d.other = (float *)memory((size_t)count * sizeof(float));
  d.gram = (float *)memory((size_t)(side * side) * sizeof(float));
  d.poly = (float *)memory((size_t)(side * side) * sizeof(float));
  run_ours(s, &d);
  for (inner = 0, start = cpu_now(); cpu_now() - start < 200e-6; ++inner)
    run_peer(s, &d); /* a sample is at least 200 us */
  for (i = 0; i < MAX_REPEATS && (i < 3 || budget > 0.0); ++i) {
    double middle, end;
    start = cpu_now();
    for (k = 0; k < inner; ++k)
      run_ours(s, &d);
    middle = cpu_now();
    for (k = 0; k < inner; ++k)
      run_peer(s, &d);
    end = cpu_now();
    ours[i] = (middle - start) / inner;
    peer[i] = (end - middle) / inner;
    budget -= end - start;
  }
  report_times(report, s, &d, ours, peer, i);
  free(d.workspace);
  free(d.in);
  free(d.out);
  free(d.want);
  free(d.other);
  free(d.gram);
  free(d.poly);
}

/* ---- element-wise passes ---- */

static void report_pass(bench_report *report, const stage *s, const char *name, double nbytes,
                        double *seconds, int repeats) {
  const bench_stats stats = bench_summarize(seconds, repeats);
  bench_row row = bench_row_default();
  row.bench = report->bench;
  row.name = name;
  row.metric = "bandwidth";
  row.unit = "GB/s";
  row.value = nbytes / stats.min * 1e-9;
  row.limit = "memcpy";
  row.ratio_to_limit = nbytes / stats.min / s->copy_rate;
  bench_add(report, &row);
}

/* 16 Mi elements, far beyond the caches. Bytes: AdamW reads 4 and writes 3 floats per element,
 * Muon's prepare reads 2 and writes 1, its commit reads 4 and writes 2. */
static void run_passes(bench_report *report, stage *s, int quick) {
  const int64_t count = INT64_C(1) << 24;
  const int repeats = quick ? 5 : 15;
  float *master = numbers(count, 2), *grad = numbers(count, 3);
  float *first = numbers(count, 4), *second = (float *)memory((size_t)count * sizeof(float));
  const mfsdp_muon_desc muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  const mfsdp_adamw_desc adamw = mfsdp_adamw_desc_default();
  const mfsdp_fused_item adamw_item = mfsdp_adamw_item(master, grad, first, second, count);
  const mfsdp_fused_item muon_item =
      mfsdp_muon_item(&muon, 4096, count / 4096, master, grad, first, second);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(1e-6, 0.1);
  mfsdp_fused_args args;
  double seconds[3][16];
  int i;
  memset(&args, 0, sizeof(args)); /* prepare without its Newton-Schulz */
  args.struct_nbytes = sizeof(args);
  args.op = MFSDP_FUSED_MUON_PREPARE;
  args.items = &muon_item;
  args.item_count = 1;
  args.max_count = args.total_count = count;
  args.scalars = &scalars;
  args.nesterov = muon.nesterov;
  args.momentum = muon.momentum;
  args.grad_weight = muon.grad_weight;
  args.nesterov_weight = muon.nesterov_weight;
  scalars.applied_steps = 10;
  for (i = -1; i < repeats; ++i) {
    double t[4];
    t[0] = cpu_now();
    need(s, mfsdp_adamw_commit(&s->context, s->backend, s->queue, &adamw, &adamw_item, 1, count,
                               count, 0, &scalars, NULL));
    t[1] = cpu_now();
    need(s, s->backend->ops->fused(s->backend->self, s->queue, &args));
    t[2] = cpu_now();
    need(s, mfsdp_muon_commit(&s->context, s->backend, s->queue, &muon, 4096, count / 4096,
                              &muon_item, 0, &scalars, NULL));
    t[3] = cpu_now();
    if (i < 0) continue; /* warm-up */
    seconds[0][i] = t[1] - t[0];
    seconds[1][i] = t[2] - t[1];
    seconds[2][i] = t[3] - t[2];
    memcpy(first, grad, (size_t)count * sizeof(float));
    s->copy_rate = fmax(s->copy_rate, 8.0 * (double)count / (cpu_now() - t[3]));
  }
  report_pass(report, s, "adamw, 28 B/element", 28.0 * (double)count, seconds[0], repeats);
  report_pass(report, s, "muon prepare, 12 B/element", 12.0 * (double)count, seconds[1], repeats);
  report_pass(report, s, "muon commit, 24 B/element", 24.0 * (double)count, seconds[2], repeats);
  free(master);
  free(grad);
  free(first);
  free(second);
}

/* FLOP/s of sgemm on n x n matrices, the best of seven. */
static double sgemm_rate(stage *s, int64_t n) {
  float *a = numbers(n * n, 5), *b = numbers(n * n, 6), *c = numbers(n * n, 7);
  double best = 0.0;
  int i;
  for (i = 0; i < 7; ++i) {
    const double start = cpu_now();
    s->math->sgemm(0, 0, n, n, n, 1.0f, a, n, b, n, 0.0f, c, n);
    best = fmax(best, 2.0 * (double)(n * n) * (double)n / (cpu_now() - start));
  }
  free(a);
  free(b);
  free(c);
  return best;
}

static void open_stage(stage *s) {
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  memset(s, 0, sizeof(*s));
  if (mfsdp_context_init(&s->context, &context_desc) != MFSDP_OK) exit(1);
  desc.math = s->math = bench_math();
  need(s, mfsdp_host_backend_create(&s->context, &desc, &s->host));
  s->backend = mfsdp_host_backend_get(s->host);
  need(s, s->backend->ops->queue_create(s->backend->self, &s->context, "bench", &s->queue));
  s->sgemm_rate = fmax(sgemm_rate(s, 256), fmax(sgemm_rate(s, 512), sgemm_rate(s, 1024)));
}

int main(int argc, char **argv) {
  static const ns_case cases[] = {
      {"16 x 16", 16, 16, 1, 1},         {"32 x 32", 32, 32, 1, 1},
      {"20 x 20", 20, 20, 1, 0},         {"24 x 24", 24, 24, 1, 0},
      {"40 x 40", 40, 40, 1, 0},         {"56 x 56", 56, 56, 1, 0},
      {"48 x 48", 48, 48, 1, 0},         {"64 x 64", 64, 64, 1, 1},
      {"96 x 96", 96, 96, 1, 0},         {"128 x 128", 128, 128, 1, 1},
      {"256 x 256", 256, 256, 1, 1},     {"512 x 512", 512, 512, 1, 1},
      {"1024 x 1024", 1024, 1024, 1, 1}, {"2048 x 2048", 2048, 2048, 1, 0},
      {"16 x 64", 16, 64, 1, 0},         {"32 x 48", 32, 48, 1, 0},
      {"64 x 96", 64, 96, 1, 0},         {"64 x 128", 64, 128, 1, 1},
      {"64 x 256", 64, 256, 1, 1},       {"128 x 192", 128, 192, 1, 0},
      {"128 x 256", 128, 256, 1, 1},     {"128 x 512", 128, 512, 1, 1},
      {"512 x 128", 512, 128, 1, 1},     {"128 x 1024", 128, 1024, 1, 0},
      {"256 x 384", 256, 384, 1, 0},     {"256 x 512", 256, 512, 1, 1},
      {"256 x 1024", 256, 1024, 1, 1},   {"1024 x 256", 1024, 256, 1, 1},
      {"256 x 2048", 256, 2048, 1, 1},   {"512 x 1024", 512, 1024, 1, 1},
      {"512 x 2048", 512, 2048, 1, 1},   {"512 x 4096", 512, 4096, 1, 0},
      {"1024 x 2048", 1024, 2048, 1, 0}, {"1024 x 4096", 1024, 4096, 1, 0},
      {"1024 x 8192", 1024, 8192, 1, 0}, {"64 of 64 x 64", 64, 64, 64, 1},
      {"64 of 32 x 32", 32, 32, 64, 0},  {"16 of 128 x 512", 128, 512, 16, 0},
  };
  bench_options options;
  bench_report report;
  stage s;
  size_t i;
  int status = bench_parse(argc, argv,
                           "newton_schulz: against three sgemm a step, one thread; AdamW and Muon "
                           "against memcpy",
                           &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "newton_schulz", &options);
  if (status != 0) return status;
  open_stage(&s);
  printf("    sgemm %.4g GFLOP/s; all times are CPU time of one thread\n", s.sgemm_rate * 1e-9);
  for (i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i)
    if (!options.quick || cases[i].quick) run_case(&report, &s, &cases[i], options.quick);
  run_passes(&report, &s, options.quick);
  s.backend->ops->queue_destroy(s.backend->self, &s.context, s.queue);
  need(&s, mfsdp_host_backend_destroy(&s.context, s.host));
  return bench_close(&report);
}
