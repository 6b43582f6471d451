/* SPDX-License-Identifier: MIT */
/*
 * device.c - Newton-Schulz in bf16, the optimizer step of a whole model and every operation of ops.h on
 * a GPU, beside what the same run measures of the device: the rate of cuBLAS on one large product, and
 * of copies.
 *
 * The peer of Newton-Schulz is its own plain form: three general products a step through the same
 * library. `limit`: the measured rate of cuBLAS, for the multiply-adds that were really asked for (a
 * symmetric product by half counts its tiles). Bytes of the passes: the table in ops.h. The step: Muon
 * for the hidden matrices of model.h, in batches as optimizer.h makes them, AdamW for the rest, on fp32
 * masters without a narrower copy, which is what the peer in PyTorch updates too.
 * Times are wall clock around work that is enqueued at once and waited for once. PyTorch measures
 * itself (bench/peers/torch_gpu.py), and bench/peers/join.py puts its figures beside these.
 *
 * Built and run by scripts/gpu_check.sh; tests/cuda/bench_device_test.cpp runs it on the host double,
 * where its figures mean nothing (--tiny).
 */
#include "../support/bench.h"

#include "model.h"
#include "ops.h"

#include "mfsdp/cuda/backend_cuda.h"
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

/* ---- the step of a model ---- */

typedef struct model_data {
  const model *shape;
  mfsdp_buffer masters, grads, scalars;
  mfsdp_optimizer_tensor *tensors;
  mfsdp_optimizer *optimizer;
} model_data;

static void run_step(device *d, void *user) {
  const model_data *m = (const model_data *)user;
  need(d, mfsdp_optimizer_step(&d->context, m->optimizer, d->queue,
                               (const mfsdp_step_scalars *)m->scalars.data, NULL));
}

/* The same numbers again and again: nobody waits for a host that makes billions. */
static void fill_buffer(device *d, const mfsdp_buffer *buffer) {
  const size_t some = buffer->nbytes < (size_t)64 << 20 ? buffer->nbytes : (size_t)64 << 20;
  float *values = numbers(d, (int64_t)(some / sizeof(float)), 5);
  size_t at;
  for (at = 0; at < buffer->nbytes; at += some)
    need(d, d->ops.copy(d->backend->self, d->queue, (unsigned char *)buffer->data + at,
                        MFSDP_SPACE_DEVICE, values, MFSDP_SPACE_DEVICE,
                        buffer->nbytes - at < some ? buffer->nbytes - at : some));
  settle(d);
  give(d, values, some);
}

static void make_tensors(const model *shape, model_data *m) {
  const int32_t count = model_tensor_count(shape);
  int32_t i;
  m->tensors = (mfsdp_optimizer_tensor *)calloc((size_t)count, sizeof(*m->tensors));
  if (m->tensors == NULL) exit(1);
  for (i = 0; i < count; ++i) {
    const model_tensor from = model_tensor_at(shape, i);
    const int64_t offset = model_offset(shape, i);
    mfsdp_optimizer_tensor *tensor = &m->tensors[i];
    tensor->name = from.matrix ? "matrix" : "other";
    tensor->role = from.matrix ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
    tensor->hyper_group = from.matrix ? 0 : 1;
    tensor->param = i;
    tensor->rows = from.rows;
    tensor->cols = from.cols;
    tensor->count = from.rows * from.cols;
    tensor->master = (float *)m->masters.data + offset;
    tensor->grad = (const float *)m->grads.data + offset;
    tensor->param_dtype = MFSDP_F32;
  }
}

/* Not OK: the device may not hold it. */
static mfsdp_status make_model(device *d, model_data *m) {
  const size_t nbytes =
      (size_t)model_offset(m->shape, model_tensor_count(m->shape)) * sizeof(float);
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_step_scalars scalars[2];
  mfsdp_hyper_group groups[2];
  scalars[0] = scalars[1] = mfsdp_step_scalars_default(1e-6, 0.1);
  scalars[0].applied_steps = scalars[1].applied_steps = 10;
  groups[0] = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
  groups[0].muon.newton_schulz.dtype = MFSDP_BF16;
  groups[1] = mfsdp_hyper_group_adamw(1e-6, 0.1);
  desc.groups = groups;
  desc.group_count = 2;
  MFSDP_TRY(mfsdp_buffer_alloc(&d->context, d->backend, nbytes, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_SHARD, &m->masters));
  MFSDP_TRY(mfsdp_buffer_alloc(&d->context, d->backend, nbytes, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_GRAD, &m->grads));
  MFSDP_TRY(mfsdp_buffer_alloc(&d->context, d->backend, sizeof(scalars), MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_TABLE, &m->scalars));
  fill_buffer(d, &m->masters);
  fill_buffer(d, &m->grads);
  need(d, d->ops.copy(d->backend->self, d->queue, m->scalars.data, MFSDP_SPACE_DEVICE, scalars,
                      MFSDP_SPACE_HOST, sizeof(scalars)));
  settle(d);
  make_tensors(m->shape, m);
  return mfsdp_optimizer_create(&d->context, d->backend, &desc, m->tensors,
                                model_tensor_count(m->shape), &m->optimizer);
}

static void run_model(bench_report *report, device *d, const model *shape) {
  model_data m;
  mfsdp_status status;
  memset(&m, 0, sizeof(m));
  m.shape = shape;
  status = make_model(d, &m);
  if (status == MFSDP_E_MEMORY) {
    printf("skip %s, optimizer step: %s\n", shape->name, mfsdp_context_error(&d->context)->message);
  } else {
    bench_stats stats;
    double asked;
    need(d, status);
    flops = 0.0;
    run_step(d, &m);
    asked = flops;
    stats = measure(d, run_step, &m);
    row(report, shape->name, "optimizer step", "ms", stats.min * 1e3, NULL, NAN, "cuBLAS rate",
        asked / stats.min / d->gemm_rate);
    printf("    median %.4g p99 %.4g ms; %d tensors in %d batches\n", stats.median * 1e3,
           stats.p99 * 1e3, (int)m.optimizer->item_count, (int)m.optimizer->job_count);
  }
  mfsdp_optimizer_destroy(&d->context, m.optimizer);
  free(m.tensors);
  mfsdp_buffer_free(&d->context, d->backend, &m.scalars);
  mfsdp_buffer_free(&d->context, d->backend, &m.grads);
  mfsdp_buffer_free(&d->context, d->backend, &m.masters);
}

/* ---- the table of operations ---- */

typedef struct ops_data {
  ops_case shape;
  ops_memory memory;
} ops_data;

static void run_operation(device *d, void *user) {
  const ops_data *o = (const ops_data *)user;
  need(d, ops_run(d->backend, d->queue, &o->shape, &o->memory));
}

static void send(device *d, void *to, const void *from, size_t nbytes) {
  need(d, d->backend->ops->copy(d->backend->self, d->queue, to, MFSDP_SPACE_DEVICE, from,
                                MFSDP_SPACE_HOST, nbytes));
  settle(d);
}

/* One block for each row of the stack. */
static void make_blocks(device *d, ops_data *o) {
  const int64_t count = o->shape.rows * o->shape.batch;
  const size_t nbytes = (size_t)count * sizeof(mfsdp_block);
  mfsdp_block *blocks = (mfsdp_block *)calloc((size_t)count, sizeof(*blocks));
  int64_t r;
  if (blocks == NULL) exit(1);
  for (r = 0; r < count; ++r) {
    blocks[r].first = r * o->shape.cols;
    blocks[r].count = o->shape.cols;
    blocks[r].slot = (int32_t)r;
  }
  o->memory.blocks = (mfsdp_block *)memory(d, nbytes);
  send(d, o->memory.blocks, blocks, nbytes);
  free(blocks);
}

static void make_operation(device *d, ops_data *o) {
  const int64_t count = ops_count(&o->shape);
  const size_t scratch_nbytes =
      (size_t)o->shape.batch * MFSDP_NORMALIZE_SCRATCH_COUNT * sizeof(double);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(1e-6, 0.1);
  mfsdp_fused_item item;
  int i;
  scalars.applied_steps = 10;
  for (i = 0; i < OPS_ARRAYS; ++i) {
    /* One array from the host; the others need other addresses, not other numbers. */
    o->memory.x[i] =
        i == 0 ? numbers(d, count, 4) : (float *)memory(d, (size_t)count * sizeof(float));
    if (i > 0)
      need(d, d->backend->ops->copy(d->backend->self, d->queue, o->memory.x[i], MFSDP_SPACE_DEVICE,
                                    o->memory.x[0], MFSDP_SPACE_DEVICE,
                                    (size_t)count * sizeof(float)));
    o->memory.narrow[i] = memory(d, (size_t)count * mfsdp_dtype_nbytes(o->shape.dtype));
    need(d, d->backend->ops->cast(d->backend->self, d->queue, o->memory.narrow[i], o->shape.dtype,
                                  o->memory.x[i], MFSDP_F32, count));
  }
  if (o->shape.kind == OPS_ADAMW || o->shape.kind == OPS_MUON_ROWS) /* second moments */
    need(d, d->backend->ops->fill_bytes(d->backend->self, d->queue,
                                        o->memory.x[o->shape.kind == OPS_ADAMW ? 3 : 2], 0,
                                        (size_t)count * sizeof(float)));
  o->memory.out = memory(d, ops_out_nbytes(&o->shape));
  o->memory.scratch = (double *)memory(d, scratch_nbytes);
  o->memory.scalars = (mfsdp_step_scalars *)memory(d, sizeof(scalars));
  send(d, o->memory.scalars, &scalars, sizeof(scalars));
  make_blocks(d, o);
  item = ops_item(&o->shape, &o->memory);
  o->memory.items = (mfsdp_fused_item *)memory(d, sizeof(item));
  send(d, o->memory.items, &item, sizeof(item));
}

static void free_operation(device *d, ops_data *o) {
  const size_t count = (size_t)ops_count(&o->shape);
  const size_t block_count = (size_t)(o->shape.rows * o->shape.batch);
  int i;
  for (i = 0; i < OPS_ARRAYS; ++i) {
    give(d, o->memory.x[i], count * sizeof(float));
    give(d, o->memory.narrow[i], count * mfsdp_dtype_nbytes(o->shape.dtype));
  }
  give(d, o->memory.out, ops_out_nbytes(&o->shape));
  give(d, o->memory.scratch,
       (size_t)o->shape.batch * MFSDP_NORMALIZE_SCRATCH_COUNT * sizeof(double));
  give(d, o->memory.scalars, sizeof(*o->memory.scalars));
  give(d, o->memory.blocks, block_count * sizeof(*o->memory.blocks));
  give(d, o->memory.items, sizeof(*o->memory.items));
}

/* Passes against the copy, products against the rate of cuBLAS on one large one. */
static void run_row(bench_report *report, device *d, const ops_case *shape) {
  char name[64];
  ops_data o;
  bench_stats stats;
  memset(&o, 0, sizeof(o));
  o.shape = *shape;
  make_operation(d, &o);
  flops = 0.0;
  run_operation(d, &o);
  {
    const double asked = flops, nbytes = ops_bytes(shape);
    stats = measure(d, run_operation, &o);
    (void)snprintf(name, sizeof(name), "%s, %s", ops_of(shape->kind)->name,
                   mfsdp_dtype_name(shape->dtype));
    if (ops_is_product(shape->kind))
      row(report, name, "rate", "TFLOP/s", asked / stats.min * 1e-12, NULL, NAN, "bf16 product",
          asked / stats.min / d->gemm_rate);
    else
      row(report, name, "bandwidth", "GB/s", nbytes / stats.min * 1e-9, NULL, NAN, "copy",
          nbytes / stats.min / d->copy_rate);
  }
  free_operation(d, &o);
}

static void run_table(bench_report *report, device *d) {
  static const mfsdp_dtype dtypes[] = {MFSDP_F32, MFSDP_BF16, MFSDP_F16};
  int kind, i;
  for (kind = 0; kind < OPS_COUNT; ++kind)
    for (i = 0; i < 3; ++i) {
      ops_case shape;
      shape.kind = (ops_kind)kind;
      shape.dtype = dtypes[i];
      shape.rows = shape.cols = d->large;
      shape.batch = 1;
      if (ops_fits(&shape)) run_row(report, d, &shape);
    }
}

/* ---- the program ---- */

static const ns_case cases[] = {{"2048 x 2048", 2048, 2048, 1},
                                {"4096 x 4096", 4096, 4096, 1},
                                {"8192 x 8192", 8192, 8192, 1},
                                {"4096 x 16384", 4096, 16384, 1},
                                {"6 of 1024 x 8192", 1024, 8192, 6}};
static const ns_case tiny_cases[] = {{"64 x 64", 64, 64, 1}, {"2 of 16 x 64", 16, 64, 2}};
#define CASE_COUNT (int)(sizeof(cases) / sizeof(cases[0]))
#define TINY_CASE_COUNT (int)(sizeof(tiny_cases) / sizeof(tiny_cases[0]))

static void open_device(device *d, int tiny, int quick) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  memset(d, 0, sizeof(*d));
  d->large = tiny ? 64 : 8192;
  d->wide = tiny ? 1 << 12 : 1 << 26;
  d->samples = tiny ? 2 : quick ? 5 : 20;
  d->sample_seconds = tiny ? 0.0 : 5e-3;
  if (tiny) desc.symmetric_from = 64;
  desc.check_pointers = tiny;
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
  static const model models[] = {MODEL_GPT2, MODEL_TINY};
  const int tiny = argc > 1 && strcmp(argv[1], "--tiny") == 0;
  const int count = tiny ? TINY_CASE_COUNT : CASE_COUNT;
  bench_options options;
  bench_report report;
  device d;
  int i, status = bench_parse(argc - tiny, argv + tiny,
                              "Muon on a GPU: Newton-Schulz, a step, operations.", &options);
  if (status != 0) return status - 1 ? 2 : 0;
  if (bench_open(&report, options.quick ? "device --quick" : "device", &options) != 0) return 2;
  open_device(&d, tiny, options.quick);
  run_limits(&report, &d);
  for (i = 0; i < count; ++i)
    run_case(&report, &d, tiny ? &tiny_cases[i] : &cases[i]);
  run_model(&report, &d, &models[tiny]);
  run_table(&report, &d);
  status = close_device(&d);
  return bench_close(&report) != 0 ? 1 : status;
}
