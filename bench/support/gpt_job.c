/* SPDX-License-Identifier: MIT */
#include "gpt_job.h"

#include "bench.h"

#include <stdlib.h>

void bench_need(const gpt_rank *rank, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench: rank %d: %s\n", (int)rank->index,
          mfsdp_context_error(&rank->context)->message);
  exit(1);
}

static void *zeroed(int64_t count, size_t element_nbytes) {
  void *memory = calloc(count > 0 ? (size_t)count : 1, element_nbytes);
  if (memory != NULL) return memory;
  fprintf(stderr, "bench: out of memory\n");
  exit(1);
}

/* ---- the job ---- */

/* Text-like bytes: what they say does not matter for the time. */
static void make_data(gpt_data *data, const bench_shape *shape) {
  int64_t i;
  data->count = 1 << 20;
  data->train_count = data->count / 10 * 9;
  data->context = shape->context;
  data->batch = shape->batch;
  data->bytes = (uint8_t *)zeroed(data->count, 1);
  for (i = 0; i < data->count; ++i)
    data->bytes[i] = (uint8_t)(97 + mfsdp_random_below(1, 2, (uint64_t)i, 26));
}

void bench_job_create(gpt_job *job, const bench_shape *shape, int32_t ranks) {
  gpt_error error;
  memset(job, 0, sizeof(*job));
  job->options.ranks = ranks;
  job->options.micro_batches = 1;
  job->options.planner = GPT_PLANNER_SCOPE_GREEDY;
  job->options.lr = 0.02;
  job->options.adamw_lr = 0.003;
  job->options.threads_per_rank = 1;
  job->options.seed = 1;
  job->options.reshard_after_forward = 1;
  job->options.deadline = 60;
  job->config.layers = shape->layers;
  job->config.dim = shape->dim;
  job->config.heads = shape->dim / 32;
  job->config.context = shape->context;
  job->config.batch = shape->batch;
  job->config.vocab = GPT_VOCAB;
  job->math = bench_math();
  job->platform = gpt_platform_host();
  job->links = gpt_links_threads();
  if (gpt_config_check(&job->config, &error) != GPT_OK ||
      gpt_param_table_create(&job->config, &job->table, &error) != GPT_OK) {
    fprintf(stderr, "bench: %s\n", error.text);
    exit(1);
  }
  make_data(&job->data, shape);
}

void bench_job_destroy(gpt_job *job) {
  gpt_param_table_destroy(&job->table);
  free(job->data.bytes);
}

/* ---- the model without the runtime ---- */

static void make_layout(bench_replica *p, int in_place) {
  const int32_t units = mfsdp_plan_unit_count(p->plan);
  int32_t u;
  p->unit_first = (int64_t *)zeroed(units, sizeof(int64_t));
  p->grad_unit_first = (int64_t *)zeroed(units, sizeof(int64_t));
  for (u = 0; u < units; ++u) {
    p->unit_first[u] = p->param_count;
    p->grad_unit_first[u] = p->grad_count;
    p->param_count += mfsdp_plan_unit_count_elements(p->plan, u, MFSDP_LAYOUT_GATHER);
    p->grad_count += mfsdp_plan_unit_count_elements(p->plan, u, MFSDP_LAYOUT_REDUCE);
  }
  p->params = (float *)zeroed(p->param_count, sizeof(float));
  p->grads = (float *)zeroed(p->grad_count, sizeof(float));
  p->reduced = in_place ? p->grads : (float *)zeroed(p->grad_count, sizeof(float));
}

/* The same list of matrices and element runs that owners get, but all of it. */
static void make_optimizer(gpt_rank *rank, bench_replica *p) {
  const mfsdp_backend *backend = mfsdp_host_backend_get(rank->host);
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_hyper_group groups[GPT_GROUP_COUNT];
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(p->plan, -1, &count);
  mfsdp_optimizer_tensor *tensors = (mfsdp_optimizer_tensor *)zeroed(count, sizeof(*tensors));
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
    groups[i] = gpt_hyper_group(&rank->job->options, i);
    p->scalars[i] = mfsdp_step_scalars_default(groups[i].lr, groups[i].weight_decay);
    p->scalars[i].applied_steps = 0;
    p->scalars[i].grad_scale = 1.0 / (double)rank->job->options.ranks;
  }
  desc.groups = groups;
  desc.group_count = GPT_GROUP_COUNT;
  bench_need(rank,
             mfsdp_optimizer_create(&rank->context, backend, &desc, tensors, count, &p->optimizer));
  bench_need(rank, backend->ops->queue_create(backend->self, &rank->context, "replica", &p->queue));
  free(tensors);
}

void bench_replica_create(gpt_rank *rank, bench_replica *p, int in_place) {
  const gpt_job *job = rank->job;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  int32_t i;
  memset(p, 0, sizeof(*p));
  desc.params = job->table.params;
  desc.param_count = job->table.count;
  desc.world = 1;
  bench_need(rank, mfsdp_plan_create(&rank->context, &desc, &p->plan));
  make_layout(p, in_place);
  make_optimizer(rank, p);
  for (i = 0; i < desc.param_count; ++i)
    if (mfsdp_plan_param_owner(p->plan, i) == i)
      gpt_init_value(&job->config, (uint64_t)job->options.seed, i, 0,
                     mfsdp_plan_param_numel(p->plan, i),
                     p->params + p->unit_first[mfsdp_plan_param(p->plan, i)->unit] +
                         mfsdp_plan_param_offset(p->plan, i, MFSDP_LAYOUT_GATHER));
}

void bench_replica_destroy(gpt_rank *rank, bench_replica *p) {
  const mfsdp_backend *backend = mfsdp_host_backend_get(rank->host);
  backend->ops->queue_destroy(backend->self, &rank->context, p->queue);
  mfsdp_optimizer_destroy(&rank->context, p->optimizer);
  mfsdp_plan_destroy(&rank->context, p->plan);
  free(p->unit_first);
  free(p->grad_unit_first);
  free(p->params);
  if (p->reduced != p->grads) free(p->reduced);
  free(p->grads);
}

void bench_replica_point(gpt_rank *rank, const bench_replica *p, int32_t unit) {
  const int32_t first = gpt_unit_first_param(&rank->job->config, unit);
  const int32_t count = gpt_unit_param_count(&rank->job->config, unit);
  int32_t i;
  for (i = 0; i < count; ++i) {
    const int32_t owner = mfsdp_plan_param_owner(p->plan, first + i);
    const int32_t owner_unit = mfsdp_plan_param(p->plan, owner)->unit;
    rank->params[i] = p->params + p->unit_first[owner_unit] +
                      mfsdp_plan_param_offset(p->plan, owner, MFSDP_LAYOUT_GATHER);
    rank->grads[i] = p->grads + p->grad_unit_first[owner_unit] +
                     mfsdp_plan_param_offset(p->plan, owner, MFSDP_LAYOUT_REDUCE);
  }
}

void bench_replica_gradients(gpt_rank *rank, bench_replica *p) {
  gpt_model *model = &rank->model;
  int32_t u;
  for (u = 0; u < model->unit_count; ++u) {
    bench_replica_point(rank, p, u);
    gpt_forward_unit(model, u, rank->params);
  }
  memset(p->grads, 0, (size_t)p->grad_count * sizeof(float));
  for (u = model->unit_count; u-- > 0;) {
    bench_replica_point(rank, p, u);
    gpt_backward_unit(model, u, rank->params, rank->grads);
  }
}

void bench_replica_update(gpt_rank *rank, bench_replica *p) {
  int32_t i;
  for (i = 0; i < GPT_GROUP_COUNT; ++i)
    ++p->scalars[i].applied_steps;
  bench_need(rank, mfsdp_optimizer_step(&rank->context, p->optimizer, p->queue, p->scalars, NULL));
}

int64_t bench_replica_wrong(gpt_rank *rank, const bench_replica *p) {
  const int32_t count = mfsdp_plan_param_count(p->plan);
  int64_t wrong = 0, k;
  int32_t i;
  for (i = 0; i < count; ++i) {
    const int64_t numel = mfsdp_plan_param_numel(p->plan, i);
    const float *theirs;
    float *ours;
    if (mfsdp_plan_param_owner(p->plan, i) != i) continue;
    ours = (float *)zeroed(numel, sizeof(float));
    bench_need(rank, mfsdp_param_export(rank->runtime, i, 0, rank->index == 0 ? ours : NULL));
    theirs = p->params + p->unit_first[mfsdp_plan_param(p->plan, i)->unit] +
             mfsdp_plan_param_offset(p->plan, i, MFSDP_LAYOUT_GATHER);
    for (k = 0; k < numel && rank->index == 0; ++k)
      wrong += memcmp(&ours[k], &theirs[k], sizeof(float)) != 0;
    free(ours);
  }
  return wrong;
}
