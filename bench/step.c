/* SPDX-License-Identifier: MIT */
/*
 * step.c - a training step of MatrixFSDP beside plain data parallel, on the same thread ranks, model,
 * samples and kernels, in alternation in one run.
 *
 * Plain data parallel (the peer): every rank keeps full parameters and full gradients; one in-process
 * all-reduce (each rank sums its slice straight from all peers' gradients in rank order, then copies the
 * others' slices); every rank updates everything. Both sum in the same order and update with the same
 * kernels, so their parameters agree bit for bit: `wrong` counts elements that do not.
 * Barriers separate the parts, so a part's time is that of the slowest rank.
 */
#include "gpt/rank.h"
#include "support/bench.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#define RANKS 4
#define MAX_STEPS 256

typedef struct bench_case {
  const char *name;
  int64_t dim, layers, context, batch;
  int warmup, steps, quick_steps;
} bench_case;

/* Seconds of one step's parts. */
typedef struct parts {
  double gradients[MAX_STEPS], optimizer[MAX_STEPS];
} parts;

/* The peer's memory of one rank; layouts are those of a plan for one rank. */
typedef struct replica {
  mfsdp_plan *plan;
  float *params, *grads, *reduced;
  int64_t param_count, grad_count;
  int64_t *unit_first, *grad_unit_first;
  mfsdp_optimizer *optimizer;
  mfsdp_queue *queue;
  mfsdp_step_scalars scalars[GPT_GROUP_COUNT];
} replica;

typedef struct shared {
  gpt_job job;
  const bench_case *bench;
  int steps;
  pthread_barrier_t barrier;
  replica replicas[RANKS];
  parts ours, peer;
  int64_t wrong;
  double imbalance; /* largest over mean Newton-Schulz cost of the plan */
  int failed;
} shared;

typedef struct worker {
  shared *all;
  int32_t index;
  gpt_rank rank;
  double optimizer_begin, optimizer_end; /* between barriers */
  mfsdp_thread thread;
} worker;

static void meet(worker *w) { (void)pthread_barrier_wait(&w->all->barrier); }

/* Stops the program: a benchmark of a failed run has nothing to say. */
static void need(worker *w, mfsdp_status status)
{
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench step: rank %d: %s\n", (int)w->index, mfsdp_context_error(&w->rank.context)->message);
  exit(1);
}

static void trace_optimizer(void *user, int begin, const char *lane, const char *label)
{
  worker *w = (worker *)user;
  (void)lane;
  if (strcmp(label, "optimizer") != 0) return;
  meet(w);
  if (begin)
    w->optimizer_begin = bench_now();
  else
    w->optimizer_end = bench_now();
}

/* ---- the peer ---- */

static float *floats(worker *w, int64_t count)
{
  float *values = count < 0 ? NULL : (float *)calloc((size_t)count, sizeof(float));
  if (values == NULL) need(w, MFSDP_FAIL(&w->rank.context, MFSDP_E_MEMORY, "out of memory"));
  return values;
}

static void replica_layout(worker *w, replica *p)
{
  const int32_t units = mfsdp_plan_unit_count(p->plan);
  int32_t u;
  p->unit_first = (int64_t *)calloc((size_t)units, sizeof(int64_t));
  p->grad_unit_first = (int64_t *)calloc((size_t)units, sizeof(int64_t));
  if (p->unit_first == NULL || p->grad_unit_first == NULL)
    need(w, MFSDP_FAIL(&w->rank.context, MFSDP_E_MEMORY, "out of memory"));
  for (u = 0; u < units; ++u) {
    p->unit_first[u] = p->param_count;
    p->grad_unit_first[u] = p->grad_count;
    p->param_count += mfsdp_plan_unit_count_elements(p->plan, u, MFSDP_LAYOUT_GATHER);
    p->grad_count += mfsdp_plan_unit_count_elements(p->plan, u, MFSDP_LAYOUT_REDUCE);
  }
  p->params = floats(w, p->param_count);
  p->grads = floats(w, p->grad_count);
  p->reduced = floats(w, p->grad_count);
}

/* The same list of matrices and element runs that an owner would get, but all of it on every rank. */
static void replica_optimizer(worker *w, replica *p)
{
  const mfsdp_backend *backend = mfsdp_host_backend_get(w->rank.host);
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_hyper_group groups[GPT_GROUP_COUNT];
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(p->plan, -1, &count);
  mfsdp_optimizer_tensor *tensors =
    (mfsdp_optimizer_tensor *)calloc((size_t)count, sizeof(*tensors));
  if (tensors == NULL) need(w, MFSDP_FAIL(&w->rank.context, MFSDP_E_MEMORY, "out of memory"));
  for (i = 0; i < count; ++i) {
    const mfsdp_param *param = mfsdp_plan_param(p->plan, pieces[i].param);
    tensors[i].name = param->name;
    tensors[i].role = param->role;
    tensors[i].hyper_group = param->hyper_group;
    tensors[i].param = pieces[i].param;
    tensors[i].rows = pieces[i].rows;
    tensors[i].cols = pieces[i].cols;
    tensors[i].count = pieces[i].count;
    tensors[i].master = p->params + p->unit_first[pieces[i].unit] + pieces[i].unit_offset;
    tensors[i].grad = p->reduced + p->grad_unit_first[pieces[i].unit] + pieces[i].grad_unit_offset;
    tensors[i].param_dtype = MFSDP_F32;
  }
  for (i = 0; i < GPT_GROUP_COUNT; ++i) {
    groups[i] = gpt_hyper_group(&w->all->job.options, i);
    p->scalars[i] = mfsdp_step_scalars_default(groups[i].lr, groups[i].weight_decay);
    p->scalars[i].applied_steps = 0;
    p->scalars[i].grad_scale = 1.0 / RANKS;
  }
  desc.groups = groups;
  desc.group_count = GPT_GROUP_COUNT;
  need(w, mfsdp_optimizer_create(&w->rank.context, backend, &desc, tensors, count, &p->optimizer));
  need(w, backend->ops->queue_create(backend->self, &w->rank.context, "replica", &p->queue));
  free(tensors);
}

static void replica_create(worker *w)
{
  replica *p = &w->all->replicas[w->index];
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  int32_t i;
  desc.params = w->all->job.table.params;
  desc.param_count = w->all->job.table.count;
  desc.world = 1;
  need(w, mfsdp_plan_create(&w->rank.context, &desc, &p->plan));
  replica_layout(w, p);
  replica_optimizer(w, p);
  for (i = 0; i < desc.param_count; ++i)
    if (mfsdp_plan_param_owner(p->plan, i) == i)
      gpt_init_value(&w->all->job.config, (uint64_t)w->all->job.options.seed, i, 0,
                     mfsdp_plan_param_numel(p->plan, i),
                     p->params + p->unit_first[mfsdp_plan_param(p->plan, i)->unit] +
                       mfsdp_plan_param_offset(p->plan, i, MFSDP_LAYOUT_GATHER));
}

static void replica_destroy(worker *w)
{
  replica *p = &w->all->replicas[w->index];
  const mfsdp_backend *backend = mfsdp_host_backend_get(w->rank.host);
  backend->ops->queue_destroy(backend->self, &w->rank.context, p->queue);
  mfsdp_optimizer_destroy(&w->rank.context, p->optimizer);
  mfsdp_plan_destroy(&w->rank.context, p->plan);
  free(p->unit_first);
  free(p->grad_unit_first);
  free(p->params);
  free(p->grads);
  free(p->reduced);
}

static void replica_point(worker *w, int32_t unit)
{
  replica *p = &w->all->replicas[w->index];
  const int32_t first = gpt_unit_first_param(&w->all->job.config, unit);
  const int32_t count = gpt_unit_param_count(&w->all->job.config, unit);
  int32_t i;
  for (i = 0; i < count; ++i) {
    const int32_t owner = mfsdp_plan_param_owner(p->plan, first + i);
    const int32_t owner_unit = mfsdp_plan_param(p->plan, owner)->unit;
    w->rank.params[i] = p->params + p->unit_first[owner_unit] +
                        mfsdp_plan_param_offset(p->plan, owner, MFSDP_LAYOUT_GATHER);
    w->rank.grads[i] = p->grads + p->grad_unit_first[owner_unit] +
                       mfsdp_plan_param_offset(p->plan, owner, MFSDP_LAYOUT_REDUCE);
  }
}

/* Sums this rank's slice from all ranks in rank order, then copies the other slices. */
static void all_reduce(worker *w)
{
  const mfsdp_backend *backend = mfsdp_host_backend_get(w->rank.host);
  replica *own = &w->all->replicas[w->index];
  const int64_t count = own->grad_count, slice = (count / RANKS + 127) / 128 * 128;
  const void *terms[RANKS];
  int32_t r;
  meet(w);
  for (r = 0; r < RANKS; ++r) terms[r] = w->all->replicas[r].grads + w->index * slice;
  need(w, backend->ops->sum_terms(backend->self, own->queue, own->reduced + w->index * slice, 1, terms,
                                  MFSDP_F32, RANKS,
                                  count - w->index * slice < slice ? count - w->index * slice : slice));
  meet(w);
  for (r = 0; r < RANKS; ++r) {
    const int64_t first = r * slice, length = count - first < slice ? count - first : slice;
    if (r != w->index)
      memcpy(own->reduced + first, w->all->replicas[r].reduced + first, (size_t)length * sizeof(float));
  }
  meet(w);
}

static void peer_step(worker *w, int64_t step, parts *out, int slot)
{
  shared *all = w->all;
  replica *p = &all->replicas[w->index];
  gpt_model *model = &w->rank.model;
  double start, middle;
  int32_t u;
  meet(w);
  start = bench_now();
  gpt_data_batch(&all->job.data, (uint64_t)all->job.options.seed, step * RANKS + w->index, model->inputs,
                 model->targets);
  for (u = 0; u < model->unit_count; ++u) {
    replica_point(w, u);
    gpt_forward_unit(model, u, w->rank.params);
  }
  memset(p->grads, 0, (size_t)p->grad_count * sizeof(float));
  for (u = model->unit_count; u-- > 0;) {
    replica_point(w, u);
    gpt_backward_unit(model, u, w->rank.params, w->rank.grads);
  }
  all_reduce(w);
  middle = bench_now();
  for (u = 0; u < GPT_GROUP_COUNT; ++u) ++p->scalars[u].applied_steps;
  need(w, mfsdp_optimizer_step(&w->rank.context, p->optimizer, p->queue, p->scalars, NULL));
  meet(w);
  if (w->index != 0 || slot < 0) return;
  out->gradients[slot] = middle - start;
  out->optimizer[slot] = bench_now() - middle;
}

/* ---- ours ---- */

static void our_step(worker *w, int64_t step, parts *out, int slot)
{
  shared *all = w->all;
  gpt_rank *rank = &w->rank;
  mfsdp_verdict verdict = mfsdp_verdict_default();
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  double start;
  int32_t u;
  desc.grad_weight = 1.0 / RANKS;
  meet(w);
  start = bench_now();
  gpt_data_batch(&all->job.data, (uint64_t)all->job.options.seed, step * RANKS + w->index,
                 rank->model.inputs, rank->model.targets);
  need(w, mfsdp_step_begin(rank->runtime, &desc));
  for (u = 0; u < rank->model.unit_count; ++u) need(w, gpt_rank_forward(rank, u, MFSDP_USE_FORWARD));
  for (u = rank->model.unit_count; u-- > 0;) need(w, gpt_rank_backward(rank, u));
  need(w, mfsdp_step_end(rank->runtime, 0)); /* the trace callback holds barriers around the update */
  need(w, mfsdp_step_verdict(rank->runtime, &verdict));
  if (w->index != 0 || slot < 0) return;
  out->gradients[slot] = w->optimizer_begin - start;
  out->optimizer[slot] = w->optimizer_end - w->optimizer_begin;
}

/* ---- a case ---- */

static void compare(worker *w)
{
  replica *p = &w->all->replicas[w->index];
  const int32_t count = mfsdp_plan_param_count(p->plan);
  int32_t i;
  for (i = 0; i < count; ++i) {
    const int64_t numel = mfsdp_plan_param_numel(p->plan, i);
    const float *theirs;
    float *ours;
    int64_t k;
    if (mfsdp_plan_param_owner(p->plan, i) != i) continue;
    ours = floats(w, numel);
    need(w, mfsdp_param_export(w->rank.runtime, i, 0, w->index == 0 ? ours : NULL));
    theirs = p->params + p->unit_first[mfsdp_plan_param(p->plan, i)->unit] +
             mfsdp_plan_param_offset(p->plan, i, MFSDP_LAYOUT_GATHER);
    for (k = 0; k < numel && w->index == 0; ++k)
      w->all->wrong += memcmp(&ours[k], &theirs[k], sizeof(float)) != 0;
    free(ours);
  }
}

static int64_t newton_schulz_cost(const mfsdp_piece *piece)
{
  return piece->matrix < 0 ? 0 : mfsdp_cost_newton_schulz(NULL, piece->param, piece->rows, piece->cols);
}

static void find_imbalance(worker *w)
{
  int64_t load[RANKS] = {0, 0, 0, 0}, sum = 0, most = 0;
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(w->rank.plan, -1, &count);
  for (i = 0; i < count; ++i) load[pieces[i].owner] += newton_schulz_cost(&pieces[i]);
  for (i = 0; i < RANKS; ++i) {
    sum += load[i];
    if (load[i] > most) most = load[i];
  }
  w->all->imbalance = (double)most * RANKS / (double)sum;
}

static void run_worker(void *argument)
{
  worker *w = (worker *)argument;
  shared *all = w->all;
  int i;
  need(w, gpt_rank_create(&w->rank, &all->job, w->index));
  replica_create(w);
  if (w->index == 0) find_imbalance(w);
  w->rank.context.desc.trace = trace_optimizer;
  w->rank.context.desc.user = w;
  for (i = -all->bench->warmup; i < all->steps; ++i) {
    our_step(w, i + all->bench->warmup, &all->ours, i);
    peer_step(w, i + all->bench->warmup, &all->peer, i);
  }
  compare(w);
  replica_destroy(w);
  need(w, gpt_rank_destroy(&w->rank));
}

/* Text-like bytes: what they say does not matter for the time. */
static int make_data(gpt_data *data, int64_t context, int64_t batch)
{
  int64_t i;
  data->count = 1 << 20;
  data->train_count = data->count / 10 * 9;
  data->context = context;
  data->batch = batch;
  data->bytes = (uint8_t *)malloc((size_t)data->count);
  for (i = 0; data->bytes != NULL && i < data->count; ++i)
    data->bytes[i] = (uint8_t)(97 + mfsdp_random_below(1, 2, (uint64_t)i, 26));
  return data->bytes != NULL;
}

static void report_part(bench_report *report, const shared *all, const char *metric, double *ours,
                        double *peer, const char *limit, double limit_seconds)
{
  const bench_stats o = bench_summarize(ours, all->steps), p = bench_summarize(peer, all->steps);
  bench_row row = bench_row_default();
  row.name = all->bench->name;
  row.unit = "ms";
  row.metric = metric;
  row.value = o.median * 1e3;
  row.peer = "plain data parallel";
  row.ratio_to_peer = p.median / o.median;
  row.limit = limit;
  if (limit != NULL) row.ratio_to_limit = limit_seconds / o.median;
  row.wrong = all->wrong;
  bench_add(report, &row);
  printf("    ours min %.2f median %.2f p99 %.2f ms, peer min %.2f median %.2f p99 %.2f ms: %.3f of the "
         "peer's time\n",
         o.min * 1e3, o.median * 1e3, o.p99 * 1e3, p.min * 1e3, p.median * 1e3, p.p99 * 1e3,
         o.median / p.median);
}

static void run_case(bench_report *report, const bench_case *bench, int quick)
{
  static shared all; /* parts are large */
  static worker workers[RANKS];
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  gpt_error error;
  double total_ours[MAX_STEPS], total_peer[MAX_STEPS];
  int i;
  memset(&all, 0, sizeof(all));
  memset(workers, 0, sizeof(workers));
  all.bench = bench;
  all.steps = quick ? bench->quick_steps : bench->steps;
  all.job.options.ranks = RANKS;
  all.job.options.micro_batches = 1;
  all.job.options.planner = GPT_PLANNER_SCOPE_GREEDY;
  all.job.options.lr = 0.02;
  all.job.options.adamw_lr = 0.003;
  all.job.options.threads_per_rank = 1;
  all.job.options.seed = 1;
  all.job.config.layers = bench->layers;
  all.job.config.dim = bench->dim;
  all.job.config.heads = bench->dim / 32;
  all.job.config.context = bench->context;
  all.job.config.batch = bench->batch;
  all.job.config.vocab = GPT_VOCAB;
  all.job.math = bench_math();
  desc.world = RANKS;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      gpt_config_check(&all.job.config, &error) != GPT_OK ||
      gpt_param_table_create(&all.job.config, &all.job.table, &error) != GPT_OK ||
      !make_data(&all.job.data, bench->context, bench->batch) ||
      mfsdp_threads_world_create(&context, &desc, &all.job.world) != MFSDP_OK ||
      pthread_barrier_init(&all.barrier, NULL, RANKS) != 0) {
    fprintf(stderr, "bench step: set-up failed\n");
    exit(1);
  }
  for (i = 0; i < RANKS; ++i) {
    workers[i].all = &all;
    workers[i].index = i;
    if (mfsdp_thread_start(&workers[i].thread, run_worker, &workers[i]) != MFSDP_OK) exit(1);
  }
  for (i = 0; i < RANKS; ++i) mfsdp_thread_join(&workers[i].thread);
  for (i = 0; i < all.steps; ++i) {
    total_ours[i] = all.ours.gradients[i] + all.ours.optimizer[i];
    total_peer[i] = all.peer.gradients[i] + all.peer.optimizer[i];
  }
  /* The update cannot take less than the peer's, spread evenly, stretched by the plan's imbalance. */
  {
    double sorted[MAX_STEPS];
    memcpy(sorted, all.peer.optimizer, sizeof(sorted));
    report_part(report, &all, "step without optimizer", all.ours.gradients, all.peer.gradients, NULL, 0);
    report_part(report, &all, "optimizer step", all.ours.optimizer, all.peer.optimizer, "peer / ranks",
                bench_summarize(sorted, all.steps).median / RANKS);
  }
  report_part(report, &all, "whole step", total_ours, total_peer, NULL, 0);
  printf("    plan: largest Newton-Schulz cost %.3f of the mean; bound of the optimizer ratio %.3f\n",
         all.imbalance, all.imbalance / RANKS);
  (void)pthread_barrier_destroy(&all.barrier);
  (void)mfsdp_threads_world_destroy(&context, all.job.world);
  gpt_param_table_destroy(&all.job.table);
  free(all.job.data.bytes);
}

int main(int argc, char **argv)
{
  static const bench_case cases[] = {
    {"gpt d=128 L=4 T=128 B=4", 128, 4, 128, 4, 3, 40, 12},
    {"gpt d=256 L=4 T=128 B=4", 256, 4, 128, 4, 2, 20, 6},
    {"gpt d=512 L=4 T=128 B=4", 512, 4, 128, 4, 1, 8, 2},
  };
  bench_options options;
  bench_report report;
  size_t i;
  int status = bench_parse(argc, argv,
                           "step: MatrixFSDP against plain data parallel, 4 thread ranks, Muon", &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "step", &options);
  if (status != 0) return status;
  for (i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) run_case(&report, &cases[i], options.quick);
  return bench_close(&report);
}
