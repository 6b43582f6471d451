/* SPDX-License-Identifier: MIT */
/*
 * device.c - Newton-Schulz in bf16 and the element-wise passes on a GPU, beside what the same run
 * measures of the device: the rate of cuBLAS on one large product, and of copies.
 *
 * The peer of Newton-Schulz is its own plain form: three general products a step through the same
 * library. `limit`: the measured rate of cuBLAS, for the multiply-adds that were really asked for (a
 * symmetric product by half counts its tiles). Bytes of the passes as in bench/newton_schulz.c.
 * Times are wall clock around work that is enqueued at once and waited for once. No peer in Python yet.
 *
 * Built and run by scripts/gpu_check.sh; tests/cuda/bench_device_test.cpp runs it on the host double,
 * where its figures mean nothing (--tiny).
 */
#include "../support/bench.h"

#include "mfsdp/adamw.h"
#include "mfsdp/cuda/backend_cuda.h"
#include "mfsdp/muon.h"
#include "mfsdp/newton_schulz.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SAMPLES 64

typedef struct device {
  mfsdp_context context;
  mfsdp_cuda_backend *cuda;
  mfsdp_backend counting; /* the backend with products counted */
  mfsdp_backend_ops ops;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  mfsdp_event *event;
  double gemm_rate, copy_rate; /* FLOP/s, bytes read and written per second */
  double sample_seconds;       /* of a sample, at least */
  int samples;
  int64_t large, wide; /* side of the product, elements of an array */
} device;

/* What a sample runs. */
typedef void (*work)(device *d, void *user);

/* FLOPs asked for since it was set to zero; one thread. */
static double flops;

static void need(device *d, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench device: %s\n", mfsdp_context_error(&d->context)->message);
  exit(1);
}

/* The part of a product that is computed: all of it, or the lower triangle of tiles and what they leave. */
static double computed_share(const mfsdp_cuda_backend *cuda, const mfsdp_gemm_args *args) {
  int32_t tiles = 0;
  const int64_t n = args->d.rows;
  const int64_t side = args->symmetric ? mfsdp__cuda_tile_side(cuda, n, &tiles) : 0;
  const double tile = (double)side * (double)side, left = (double)(n - side * tiles);
  if (side == 0) return 1.0;
  return (tile * tiles * (tiles + 1) / 2.0 + left * (double)n) / ((double)n * (double)n);
}

static mfsdp_status counted_gemm(void *self, mfsdp_queue *queue, const mfsdp_gemm_args *args) {
  const double k = (double)(args->trans_a ? args->a.rows : args->a.cols);
  flops += 2.0 * (double)args->d.rows * (double)args->d.cols * k * (double)args->batch_count *
           computed_share((const mfsdp_cuda_backend *)self, args);
  return mfsdp__cuda_gemm(self, queue, args);
}

static void *memory(device *d, size_t nbytes) {
  void *data = NULL;
  need(d, d->backend->ops->mem_alloc(d->backend->self, &d->context, nbytes, MFSDP_ALIGN_NBYTES,
                                     MFSDP_SPACE_DEVICE, &data));
  return data;
}

static void give(device *d, void *data, size_t nbytes) {
  d->backend->ops->mem_free(d->backend->self, &d->context, data, nbytes, MFSDP_SPACE_DEVICE);
}

static void settle(device *d) {
  need(d, d->backend->ops->event_record(d->backend->self, d->queue, d->event));
  need(d, d->backend->ops->event_wait(d->backend->self, &d->context, d->event, INT64_C(120000000)));
}

/* Uniform in [-0.5, 0.5). */
static float *numbers(device *d, int64_t count, uint64_t seed) {
  const size_t nbytes = (size_t)count * sizeof(float);
  float *host = (float *)malloc(nbytes), *out = (float *)memory(d, nbytes);
  uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
  int64_t i;
  if (host == NULL) exit(1);
  for (i = 0; i < count; ++i) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    host[i] = (float)((double)(x >> 40) / 16777216.0 - 0.5);
  }
  need(d, d->backend->ops->copy(d->backend->self, d->queue, out, MFSDP_SPACE_DEVICE, host,
                                MFSDP_SPACE_HOST, nbytes));
  settle(d);
  free(host);
  return out;
}

/* Seconds of one run, over samples of at least sample_seconds each. */
static bench_stats measure(device *d, work run, void *user) {
  double seconds[MAX_SAMPLES];
  int i, k, inner = 1;
  run(d, user);
  settle(d);
  for (;;) {
    const double start = bench_now();
    for (k = 0; k < inner; ++k)
      run(d, user);
    settle(d);
    if (bench_now() - start >= d->sample_seconds || inner >= 1 << 14) break;
    inner *= 2;
  }
  for (i = 0; i < d->samples; ++i) {
    const double start = bench_now();
    for (k = 0; k < inner; ++k)
      run(d, user);
    settle(d);
    seconds[i] = fmax(bench_now() - start, 1e-6) / inner;
  }
  return bench_summarize(seconds, d->samples);
}

/* ---- the device's own limits ---- */

typedef struct arrays {
  void *a, *b, *c;
  int64_t count; /* elements */
} arrays;

static void run_product(device *d, void *user) {
  const arrays *m = (const arrays *)user;
  mfsdp_gemm_args args;
  const mfsdp_mat empty = {NULL, d->large, d->large, d->large, d->large * d->large};
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.a = args.b = args.c = args.d = empty;
  args.a.data = m->a;
  args.b.data = m->b;
  args.c.data = args.d.data = m->c;
  args.batch_count = 1;
  args.alpha = 1.0f;
  args.dtype = MFSDP_BF16;
  need(d, d->backend->ops->gemm(d->backend->self, d->queue, &args));
}

static void run_copy(device *d, void *user) {
  const arrays *m = (const arrays *)user;
  need(d, d->backend->ops->copy(d->backend->self, d->queue, m->b, MFSDP_SPACE_DEVICE, m->a,
                                MFSDP_SPACE_DEVICE, (size_t)m->count * sizeof(float)));
}

static void row(bench_report *report, const char *name, const char *metric, const char *unit,
                double value, const char *peer, double to_peer, const char *limit,
                double to_limit) {
  bench_row line = bench_row_default();
  line.bench = report->bench;
  line.name = name;
  line.metric = metric;
  line.unit = unit;
  line.value = value;
  line.peer = peer;
  line.ratio_to_peer = to_peer;
  line.limit = limit;
  line.ratio_to_limit = to_limit;
  bench_add(report, &line);
}

static void run_limits(bench_report *report, device *d) {
  const size_t nbytes = (size_t)(d->large * d->large) * 2, wide = (size_t)d->wide * sizeof(float);
  float *values = numbers(d, d->large * d->large, 1);
  arrays m;
  memset(&m, 0, sizeof(m));
  m.a = memory(d, nbytes);
  m.b = memory(d, nbytes);
  m.c = memory(d, nbytes);
  need(d, d->backend->ops->cast(d->backend->self, d->queue, m.a, MFSDP_BF16, values, MFSDP_F32,
                                d->large * d->large));
  need(d, d->backend->ops->cast(d->backend->self, d->queue, m.b, MFSDP_BF16, values, MFSDP_F32,
                                d->large * d->large));
  d->gemm_rate = 2.0 * (double)d->large * (double)d->large * (double)d->large /
                 measure(d, run_product, &m).min;
  give(d, values, (size_t)(d->large * d->large) * sizeof(float));
  give(d, m.a, nbytes);
  give(d, m.b, nbytes);
  give(d, m.c, nbytes);
  m.a = numbers(d, d->wide, 2);
  m.b = memory(d, wide);
  m.count = d->wide;
  d->copy_rate = 2.0 * (double)wide / measure(d, run_copy, &m).min;
  give(d, m.a, wide);
  give(d, m.b, wide);
  row(report, "device", "bf16 product", "TFLOP/s", d->gemm_rate * 1e-12, NULL, NAN, NULL, NAN);
  row(report, "device", "copy", "GB/s", d->copy_rate * 1e-9, NULL, NAN, NULL, NAN);
}

/* ---- Newton-Schulz ---- */

typedef struct ns_case {
  const char *name;
  int64_t rows, cols, batch;
} ns_case;

typedef struct ns_data {
  const ns_case *shape;
  mfsdp_newton_schulz_desc desc;
  float *in, *out;
  void *workspace;
  size_t workspace_nbytes;
} ns_data;

static void run_newton_schulz(device *d, void *user) {
  const ns_data *n = (const ns_data *)user;
  const int64_t stride = n->shape->rows * n->shape->cols;
  need(d, mfsdp_newton_schulz_batch(&d->context, d->backend, d->queue, &n->desc, n->shape->rows,
                                    n->shape->cols, n->shape->batch, n->in, stride, n->out, stride,
                                    n->workspace, n->workspace_nbytes));
}

/* One form: seconds of a run, and the FLOPs that it asks for. */
static bench_stats measure_form(device *d, ns_data *n, mfsdp_newton_schulz_form form,
                                double *asked) {
  bench_stats stats;
  n->desc.form = form;
  need(d, mfsdp_newton_schulz_batch_workspace_nbytes(&d->context, &n->desc, n->shape->rows,
                                                     n->shape->cols, n->shape->batch,
                                                     &n->workspace_nbytes));
  n->workspace = memory(d, n->workspace_nbytes);
  flops = 0.0;
  run_newton_schulz(d, n);
  *asked = flops;
  stats = measure(d, run_newton_schulz, n);
  give(d, n->workspace, n->workspace_nbytes);
  return stats;
}

static void run_case(bench_report *report, device *d, const ns_case *shape) {
  const int64_t count = shape->rows * shape->cols * shape->batch;
  const size_t nbytes = (size_t)count * sizeof(float);
  bench_stats ours, plain;
  double asked, plain_asked;
  ns_data n;
  memset(&n, 0, sizeof(n));
  n.shape = shape;
  n.desc = mfsdp_newton_schulz_desc_default();
  n.desc.dtype = MFSDP_BF16;
  n.in = numbers(d, count, 3);
  n.out = (float *)memory(d, nbytes);
  ours = measure_form(d, &n, MFSDP_NS_AUTO, &asked);
  plain = measure_form(d, &n, MFSDP_NS_PLAIN, &plain_asked);
  row(report, shape->name, "newton-schulz", "ms", ours.min * 1e3, "plain form",
      plain.min / ours.min, "cuBLAS rate", asked / ours.min / d->gemm_rate);
  printf("    median %.4g p99 %.4g ms; plain: min %.4g median %.4g ms, at %.3f of the cuBLAS rate; "
         "%.3f of its FLOPs\n",
         ours.median * 1e3, ours.p99 * 1e3, plain.min * 1e3, plain.median * 1e3,
         plain_asked / plain.min / d->gemm_rate, asked / plain_asked);
  give(d, n.in, nbytes);
  give(d, n.out, nbytes);
}

/* ---- element-wise passes ---- */

typedef struct passes {
  mfsdp_muon_desc muon;
  mfsdp_adamw_desc adamw;
  mfsdp_fused_item adamw_item, muon_item;
  mfsdp_step_scalars *scalars; /* DEVICE */
  int64_t rows, cols;
} passes;

static void run_adamw(device *d, void *user) {
  const passes *p = (const passes *)user;
  need(d, mfsdp_adamw_commit(&d->context, d->backend, d->queue, &p->adamw, &p->adamw_item, 1,
                             p->rows * p->cols, p->rows * p->cols, 0, p->scalars, NULL));
}

static void run_prepare(device *d, void *user) {
  const passes *p = (const passes *)user;
  mfsdp_fused_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = MFSDP_FUSED_MUON_PREPARE;
  args.items = &p->muon_item;
  args.item_count = 1;
  args.max_count = args.total_count = p->rows * p->cols;
  args.scalars = p->scalars;
  args.nesterov = p->muon.nesterov;
  args.momentum = p->muon.momentum;
  args.grad_weight = p->muon.grad_weight;
  args.nesterov_weight = p->muon.nesterov_weight;
  need(d, d->backend->ops->fused(d->backend->self, d->queue, &args));
}

static void run_commit(device *d, void *user) {
  const passes *p = (const passes *)user;
  need(d, mfsdp_muon_commit(&d->context, d->backend, d->queue, &p->muon, p->rows, p->cols,
                            &p->muon_item, 0, p->scalars, NULL));
}

static void run_pass(bench_report *report, device *d, const char *name, work run, passes *p,
                     double bytes) {
  const double nbytes = bytes * (double)(p->rows * p->cols);
  const double rate = nbytes / measure(d, run, p).min;
  row(report, name, "bandwidth", "GB/s", rate * 1e-9, NULL, NAN, "copy", rate / d->copy_rate);
}

static void run_passes(bench_report *report, device *d) {
  const size_t nbytes = (size_t)d->wide * sizeof(float);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(1e-6, 0.1);
  float *array[4];
  passes p;
  int i;
  memset(&p, 0, sizeof(p));
  p.muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  p.adamw = mfsdp_adamw_desc_default();
  p.cols = 64;
  p.rows = d->wide / p.cols;
  for (i = 0; i < 4; ++i)
    array[i] = numbers(d, d->wide, (uint64_t)(4 + i));
  need(d, d->backend->ops->fill_bytes(d->backend->self, d->queue, array[3], 0, nbytes));
  p.adamw_item = mfsdp_adamw_item(array[0], array[1], array[2], array[3], d->wide);
  p.muon_item = mfsdp_muon_item(&p.muon, p.rows, p.cols, array[0], array[1], array[2], array[3]);
  p.scalars = (mfsdp_step_scalars *)memory(d, sizeof(scalars));
  scalars.applied_steps = 10;
  need(d, d->backend->ops->copy(d->backend->self, d->queue, p.scalars, MFSDP_SPACE_DEVICE, &scalars,
                                MFSDP_SPACE_HOST, sizeof(scalars)));
  run_pass(report, d, "adamw, 28 B/element", run_adamw, &p, 28.0);
  run_pass(report, d, "muon prepare, 12 B/element", run_prepare, &p, 12.0);
  run_pass(report, d, "muon commit, 24 B/element", run_commit, &p, 24.0);
  for (i = 0; i < 4; ++i)
    give(d, array[i], nbytes);
  give(d, p.scalars, sizeof(scalars));
}

/* ---- the program ---- */

static void open_device(device *d, int tiny, int quick) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  memset(d, 0, sizeof(*d));
  d->large = tiny ? 64 : 8192;
  d->wide = tiny ? 1 << 12 : 1 << 26;
  d->samples = tiny ? 2 : quick ? 5 : 20;
  d->sample_seconds = tiny ? 0.0 : 5e-3;
  if (tiny) desc.symmetric_from = 64;
  if (mfsdp_context_init(&d->context, &context_desc) != MFSDP_OK) exit(1);
  need(d, mfsdp_cuda_backend_create(&d->context, &desc, &d->cuda));
  d->counting = *mfsdp_cuda_backend_get(d->cuda);
  d->ops = *d->counting.ops;
  d->ops.gemm = counted_gemm;
  d->counting.ops = &d->ops;
  d->backend = &d->counting;
  need(d, d->ops.queue_create(d->backend->self, &d->context, "bench", &d->queue));
  need(d, d->ops.event_create(d->backend->self, &d->context, &d->event));
}

static int close_device(device *d) {
  settle(d);
  d->ops.event_destroy(d->backend->self, &d->context, d->event);
  d->ops.queue_destroy(d->backend->self, &d->context, d->queue);
  need(d, mfsdp_cuda_backend_destroy(&d->context, d->cuda));
  return mfsdp_context_destroy(&d->context) == MFSDP_OK ? 0 : 1;
}

int main(int argc, char **argv) {
  static const ns_case cases[] = {{"2048 x 2048", 2048, 2048, 1},
                                  {"4096 x 4096", 4096, 4096, 1},
                                  {"8192 x 8192", 8192, 8192, 1},
                                  {"4096 x 16384", 4096, 16384, 1},
                                  {"6 of 1024 x 8192", 1024, 8192, 6}};
  static const ns_case tiny_cases[] = {{"64 x 64", 64, 64, 1}, {"2 of 16 x 64", 16, 64, 2}};
  const int tiny = argc > 1 && strcmp(argv[1], "--tiny") == 0;
  const int count = tiny ? 2 : 5;
  bench_options options;
  bench_report report;
  device d;
  int i, status = bench_parse(argc - tiny, argv + tiny, "Newton-Schulz on a GPU.", &options);
  if (status != 0) return status - 1 ? 2 : 0;
  if (bench_open(&report, options.quick ? "device --quick" : "device", &options) != 0) return 2;
  open_device(&d, tiny, options.quick);
  run_limits(&report, &d);
  for (i = 0; i < count; ++i)
    run_case(&report, &d, tiny ? &tiny_cases[i] : &cases[i]);
  run_passes(&report, &d);
  status = close_device(&d);
  return bench_close(&report) != 0 ? 1 : status;
}
