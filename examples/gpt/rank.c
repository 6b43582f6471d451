/* SPDX-License-Identifier: MIT */
#include "rank.h"

#include "checkpoint.h"
#include "fault.h"
#include "mfsdp/dtype.h"

#include <stdio.h>

/* ---- what the job's options mean ---- */

static mfsdp_dtype compute_dtype(const gpt_job *job) {
  static const mfsdp_dtype dtypes[] = {MFSDP_F32, MFSDP_BF16, MFSDP_F16};
  return dtypes[job->options.dtype];
}

void gpt_job_set_dtype(gpt_job *job) {
  int32_t i;
  for (i = 0; i < job->table.count; ++i)
    job->table.params[i].compute = job->table.params[i].wire = compute_dtype(job);
}

void gpt_job_set_strategy(gpt_job *job) {
  gpt_strategy_params(gpt_strategy_at(job->options.strategy), job->table.params, job->table.count);
}

mfsdp_threads_world_desc gpt_job_world_desc(const gpt_job *job) {
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  desc.world = (int32_t)job->options.ranks;
  desc.deadline_us = job->options.deadline * 1000000;
  if (gpt_options_overlap(&job->options)) desc.batch_count = GPT_BATCH_COUNT;
  return desc;
}

/* ---- what the parameters get ---- */

/* Shampoo's and SOAP's, with AdamW's decay. */
static mfsdp_hyper_group preconditioned_group(const gpt_options *options, double decay) {
  static const mfsdp_graft grafts[] = {MFSDP_GRAFT_ADAMW, MFSDP_GRAFT_SGD, MFSDP_GRAFT_NONE};
  mfsdp_hyper_group hyper = options->optimizer == GPT_OPTIMIZER_SOAP ? mfsdp_hyper_group_soap()
                                                                     : mfsdp_hyper_group_shampoo();
  hyper.lr = options->given[GPT_OPTION_lr] ? options->lr : 0.003;
  hyper.weight_decay = decay;
  hyper.shampoo.update_every = hyper.soap.update_every = (int32_t)options->precondition_every;
  hyper.shampoo.size_limit = hyper.soap.size_limit = options->precondition_limit;
  hyper.shampoo.graft = grafts[options->graft];
  return hyper;
}

mfsdp_hyper_group gpt_hyper_group(const gpt_options *options, int32_t group) {
  static const mfsdp_muon_preset presets[] = {MFSDP_MUON_TORCH, MFSDP_MUON_JORDAN,
                                              MFSDP_MUON_MOONLIGHT, MFSDP_MUON_DION};
  const double decay = 0.01; /* torch.optim.AdamW's default */
  mfsdp_hyper_group hyper;
  if (group != GPT_GROUP_HIDDEN || options->optimizer == GPT_OPTIMIZER_ADAMW)
    return mfsdp_hyper_group_adamw(options->adamw_lr, group == GPT_GROUP_PLAIN ? 0.0 : decay);
  if (options->optimizer != GPT_OPTIMIZER_MUON) return preconditioned_group(options, decay);
  hyper = mfsdp_hyper_group_muon(presets[options->preset]);
  /* The step size's default is jordan's; another preset brings its own. */
  if (options->given[GPT_OPTION_lr] || options->preset == GPT_PRESET_JORDAN) hyper.lr = options->lr;
  if (options->coefficients != GPT_COEFFICIENTS_PRESET) {
    const mfsdp_ns_set set = (mfsdp_ns_set)options->coefficients;
    hyper.muon.newton_schulz.coefficients =
        mfsdp_ns_set_rows(set, &hyper.muon.newton_schulz.coefficient_count);
    hyper.muon.newton_schulz.step_count = mfsdp_ns_set_steps(set);
  }
  return hyper;
}

mfsdp_schedule gpt_schedule(const gpt_options *o) {
  const int64_t fifth = o->steps / 5 > 0 ? o->steps / 5 : 1;
  const int64_t twentieth = o->steps / 20 + 1 > 10 ? o->steps / 20 + 1 : 10;
  mfsdp_schedule schedule = mfsdp_schedule_default();
  schedule.kind = (mfsdp_schedule_kind)(o->schedule + 1);
  schedule.warmup_steps = o->warmup >= 0 ? o->warmup : twentieth;
  schedule.total_steps = o->steps;
  schedule.decay_steps = o->decay_steps >= 0 ? o->decay_steps : fifth;
  schedule.final_factor = o->final_lr;
  return schedule;
}

/* What updating a matrix takes, as `desc` will ask for it: `hidden` and `cost` have to last until the plan
 * is made. With Muon the planners of the paper go by elements, as they do there. */
static void set_cost(const gpt_options *options, mfsdp_hyper_group *hidden,
                     mfsdp_precondition_cost *cost, mfsdp_plan_desc *desc) {
  cost->update_every = hidden->soap.update_every;
  cost->size_limit = hidden->soap.size_limit;
  desc->user = cost;
  if (options->optimizer == GPT_OPTIMIZER_ADAMW) desc->cost = mfsdp_plan_cost_elements;
  if (options->optimizer == GPT_OPTIMIZER_SHAMPOO) desc->cost = mfsdp_cost_shampoo;
  if (options->optimizer == GPT_OPTIMIZER_SOAP) desc->cost = mfsdp_cost_soap;
  if (options->optimizer != GPT_OPTIMIZER_MUON || desc->planner != MFSDP_PLANNER_BALANCED) return;
  desc->cost = mfsdp_newton_schulz_cost;
  desc->user = &hidden->muon.newton_schulz;
}

mfsdp_status gpt_plan_create(mfsdp_context *context, const gpt_job *job, mfsdp_plan **plan) {
  static const mfsdp_planner planners[] = {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY,
                                           MFSDP_PLANNER_SCOPE_GREEDY, MFSDP_PLANNER_COST_AWARE,
                                           MFSDP_PLANNER_BALANCED};
  mfsdp_hyper_group hidden = gpt_hyper_group(&job->options, GPT_GROUP_HIDDEN);
  mfsdp_precondition_cost cost;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  desc.params = job->table.params;
  desc.param_count = job->table.count;
  desc.world = (int32_t)job->options.ranks;
  desc.planner = planners[job->options.planner];
  gpt_strategy_plan(gpt_strategy_at(job->options.strategy), &desc);
  set_cost(&job->options, &hidden, &cost, &desc);
  return mfsdp_plan_create(context, &desc, plan);
}

static void init_value(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  const gpt_job *job = (const gpt_job *)user;
  gpt_init_value(&job->config, (uint64_t)job->options.seed, param, first, count, dst);
}

/* ---- set-up ---- */

static void add_phase(gpt_phase *phase, int begin) {
  if (begin)
    phase->started_us = mfsdp_clock_us();
  else
    phase->us += mfsdp_clock_us() - phase->started_us;
}

/* Adds up the time of the step, and hands all phases on to --trace. What a strategy sends at the step
 * counts: bands on the way and worked on, and (on the communication queue, maybe of another thread)
 * parameters that are sent after it. */
static void trace(void *user, int begin, const char *lane, const char *label) {
  gpt_rank *rank = (gpt_rank *)user;
  if (begin) gpt_fault_at(rank->index, label, &rank->context, &rank->control);
  if (rank->job->trace != NULL) gpt_trace_mark(rank->job->trace, rank->index, begin, lane, label);
  if (strcmp(label, "optimizer") == 0 || strcmp(label, "bands") == 0)
    add_phase(&rank->optimizer, begin);
  else if (strncmp(label, "refresh ", 8) == 0)
    add_phase(&rank->refresh, begin);
}

/* A description of the runtime, with what it points to. */
typedef struct runtime_parts {
  mfsdp_hyper_group hyper[GPT_GROUP_COUNT];
  mfsdp_optimizer_desc optimizer;
  mfsdp_group group;
  mfsdp_runtime_desc desc;
} runtime_parts;

static void describe_runtime(gpt_rank *rank, runtime_parts *parts) {
  static const mfsdp_algorithm algorithms[] = {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL,
                                               MFSDP_NATIVE, MFSDP_ALGORITHM_AUTO};
  /* What auto reckons with: 5 us and 5 GB/s inside a node, 50 us and 1 Gbit/s between nodes. A
   * program that knows its network says so here. */
  static const mfsdp_wire_cost wire = {5000, 209715, 50000, 8388608};
  const gpt_options *o = &rank->job->options;
  mfsdp_runtime_desc *desc = &parts->desc;
  int32_t g;
  for (g = 0; g < GPT_GROUP_COUNT; ++g)
    parts->hyper[g] = gpt_hyper_group(o, g);
  parts->optimizer = mfsdp_optimizer_desc_default();
  parts->optimizer.groups = parts->hyper;
  parts->optimizer.group_count = GPT_GROUP_COUNT;
  parts->group = mfsdp_group_default();
  parts->group.plan = rank->plan;
  parts->group.transport = &rank->transport;
  parts->group.control = &rank->control;
  *desc = mfsdp_runtime_desc_default();
  desc->backend = rank->backend;
  desc->compute_queue = rank->queue;
  desc->groups = &parts->group;
  desc->group_count = 1;
  desc->optimizer = &parts->optimizer;
  desc->max_micro_batches = (int32_t)o->micro_batches;
  desc->clip_norm = o->clip;
  desc->schedule = gpt_schedule(o);
  desc->gather_algorithm = desc->reduce_algorithm = algorithms[o->collective];
  desc->chunk_nbytes = (size_t)o->chunk_kib << 10; /* 0: the library's choice */
  desc->narrow_sums = o->narrow_sums;
  if (o->collective == GPT_COLLECTIVE_AUTO) desc->wire = wire; /* a guess: chunks go by size else */
  desc->prefetch_depth = (int32_t)o->prefetch;
  desc->reduce_depth = gpt_options_overlap(o);
  desc->reshard_after_forward = (int32_t)o->reshard_after_forward;
  if (o->dtype == GPT_DTYPE_F16) desc->loss_scale.initial = 65536.0; /* as torch */
  desc->step_in_backward = o->step_in_backward;
  gpt_strategy_runtime(gpt_strategy_at(o->strategy), desc);
}

mfsdp_status gpt_rank_memory(gpt_rank *rank, mfsdp_memory *memory) {
  runtime_parts parts;
  describe_runtime(rank, &parts);
  *memory = mfsdp_memory_default();
  return mfsdp_runtime_memory(&rank->context, &parts.desc, memory);
}

mfsdp_status gpt_rank_start(gpt_rank *rank, mfsdp_init_fn init, void *user) {
  runtime_parts parts;
  describe_runtime(rank, &parts);
  MFSDP_TRY(mfsdp_runtime_create(&rank->context, &parts.desc, &rank->runtime));
  return mfsdp_runtime_init(rank->runtime, init, user);
}

static int64_t validation_rounds(const gpt_job *job) {
  return (GPT_VALIDATION_BATCHES + job->options.ranks - 1) / job->options.ranks;
}

static size_t label_count(const gpt_job *job) {
  return 2 * (size_t)gpt_unit_count(&job->config);
}

/* Of the largest unit in fp32, tied tensors included, if its parameters need widening; else 0. */
static size_t widened_nbytes(const gpt_job *job) {
  int64_t largest = 0;
  int32_t unit, i;
  if (compute_dtype(job) == MFSDP_F32) return 0;
  for (unit = 0; unit < gpt_unit_count(&job->config); ++unit) {
    const int32_t first = gpt_unit_first_param(&job->config, unit);
    int64_t sum = 0;
    for (i = 0; i < gpt_unit_param_count(&job->config, unit); ++i)
      sum += gpt_param_numel(&job->config, first + i);
    if (sum > largest) largest = sum;
  }
  return ((size_t)largest * sizeof(float) + 63) / 64 * 64;
}

static mfsdp_status create_tables(gpt_rank *rank) {
  const gpt_job *job = rank->job;
  const size_t count = (size_t)job->table.count, labels = label_count(job);
  void *memory;
  size_t i;
  MFSDP_TRY(
      mfsdp_table_alloc(&rank->context, count, sizeof(float *), "parameter pointers", &memory));
  rank->params = (const float **)memory;
  MFSDP_TRY(
      mfsdp_table_alloc(&rank->context, count, sizeof(float *), "gradient pointers", &memory));
  rank->grads = (float **)memory;
  MFSDP_TRY(mfsdp_table_alloc(&rank->context, labels, sizeof(*rank->labels), "labels", &memory));
  rank->labels = (char(*)[24])memory;
  for (i = 0; i < labels; ++i)
    (void)snprintf(rank->labels[i], sizeof(*rank->labels), "%s unit %d",
                   i < labels / 2 ? "forward" : "backward", (int)(i % (labels / 2)));
  MFSDP_TRY(mfsdp_table_alloc(&rank->context, (size_t)(validation_rounds(job) * job->options.ranks),
                              sizeof(double), "validation losses", &memory));
  rank->losses = (double *)memory;
  return MFSDP_OK;
}

static mfsdp_status create_model(gpt_rank *rank) {
  const size_t nbytes = widened_nbytes(rank->job);
  gpt_error error;
  MFSDP_TRY(create_tables(rank));
  if (gpt_model_create(&rank->job->config, rank->device, &rank->model, &error) != GPT_OK)
    return MFSDP_FAIL(&rank->context, MFSDP_E_MEMORY, "model: %s", error.text);
  rank->has_model = 1;
  if (nbytes == 0) return MFSDP_OK;
  rank->widened = (float *)rank->device.ops->alloc(rank->device.self, MFSDP_SPACE_DEVICE, nbytes);
  if (rank->widened != NULL) return MFSDP_OK;
  return MFSDP_FAIL(&rank->context, MFSDP_E_MEMORY, "no memory for %zu bytes of fp32 parameters",
                    nbytes);
}

mfsdp_status gpt_rank_open(gpt_rank *rank, const gpt_job *job, int32_t index) {
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  memset(rank, 0, sizeof(*rank));
  rank->job = job;
  rank->index = index;
  desc.rank = index;
  desc.trace = trace;
  desc.user = rank;
  MFSDP_TRY(mfsdp_context_init(&rank->context, &desc));
  MFSDP_TRY(job->links->meet(rank));
  MFSDP_TRY(job->platform->create(rank));
  MFSDP_TRY(job->links->create(rank));
  return gpt_plan_create(&rank->context, job, &rank->plan);
}

mfsdp_status gpt_rank_create(gpt_rank *rank, const gpt_job *job, int32_t index) {
  MFSDP_TRY(gpt_rank_open(rank, job, index));
  MFSDP_TRY(create_model(rank));
  MFSDP_TRY(gpt_rank_start(rank, init_value, (void *)(uintptr_t)job));
  return gpt_checkpoint_open(rank);
}

mfsdp_status gpt_rank_destroy(gpt_rank *rank) {
  const size_t count = (size_t)rank->job->table.count;
  mfsdp_status status;
  gpt_checkpoint_close(rank);
  if (rank->has_model) { /* waits for what is enqueued, which reads the runtime's memory too */
    rank->device.ops->free(rank->device.self, MFSDP_SPACE_DEVICE, rank->widened,
                           widened_nbytes(rank->job));
    gpt_model_destroy(&rank->model);
  }
  status = mfsdp_runtime_destroy(rank->runtime);
  mfsdp_table_free(&rank->context, rank->losses,
                   (size_t)(validation_rounds(rank->job) * rank->job->options.ranks),
                   sizeof(double));
  mfsdp_table_free(&rank->context, rank->labels, label_count(rank->job), sizeof(*rank->labels));
  mfsdp_table_free(&rank->context, (void *)rank->grads, count, sizeof(float *));
  mfsdp_table_free(&rank->context, (void *)rank->params, count, sizeof(float *));
  mfsdp_plan_destroy(&rank->context, rank->plan);
  if (rank->transport.self != NULL) {
    const mfsdp_status last = rank->transport.ops->destroy(rank->transport.self, &rank->context);
    if (status == MFSDP_OK) status = last;
  }
  if (rank->control.self != NULL) {
    const mfsdp_status last = rank->control.ops->destroy(rank->control.self, &rank->context);
    if (status == MFSDP_OK) status = last;
  }
  {
    const mfsdp_status last = rank->job->platform->destroy(rank);
    if (status == MFSDP_OK) status = last;
  }
  if (status == MFSDP_OK) status = mfsdp_context_destroy(&rank->context);
  return status;
}

/* ---- a unit ---- */

/* The model computes in fp32: parameters of 16 bits are widened, which is exact. */
static int32_t point_at_params(gpt_rank *rank, int32_t unit) {
  const gpt_job *job = rank->job;
  const int32_t first = gpt_unit_first_param(&job->config, unit);
  const int32_t count = gpt_unit_param_count(&job->config, unit);
  float *next = rank->widened;
  int32_t i;
  for (i = 0; i < count; ++i) {
    const void *param = mfsdp_unit_param(rank->runtime, first + i);
    const int64_t numel = gpt_param_numel(&job->config, first + i);
    rank->params[i] = (const float *)param;
    if (next == NULL) continue;
    rank->device.ops->widen(rank->device.self, compute_dtype(job), numel, param, next);
    rank->params[i] = next;
    next += numel;
  }
  return count;
}

mfsdp_status gpt_rank_forward(gpt_rank *rank, int32_t unit, mfsdp_use use) {
  MFSDP_TRY(mfsdp_unit_acquire(rank->runtime, unit, use));
  mfsdp_trace_begin(&rank->context, "host", rank->labels[unit]);
  (void)point_at_params(rank, unit);
  gpt_forward_unit(&rank->model, unit, rank->params);
  mfsdp_trace_end(&rank->context, "host", rank->labels[unit]);
  MFSDP_TRY(rank->device.ops->status(rank->device.self));
  return mfsdp_unit_release(rank->runtime, unit);
}

mfsdp_status gpt_rank_backward(gpt_rank *rank, int32_t unit) {
  const int32_t first = gpt_unit_first_param(&rank->job->config, unit);
  const char *label = rank->labels[rank->model.unit_count + unit];
  int32_t i, count;
  MFSDP_TRY(mfsdp_unit_acquire(rank->runtime, unit, MFSDP_USE_BACKWARD));
  MFSDP_TRY(mfsdp_unit_grads(rank->runtime, unit));
  mfsdp_trace_begin(&rank->context, "host", label);
  count = point_at_params(rank, unit);
  for (i = 0; i < count; ++i)
    rank->grads[i] = (float *)mfsdp_unit_grad(rank->runtime, first + i);
  gpt_backward_unit(&rank->model, unit, rank->params, rank->grads);
  mfsdp_trace_end(&rank->context, "host", label);
  MFSDP_TRY(rank->device.ops->status(rank->device.self));
  MFSDP_TRY(mfsdp_unit_reduce(rank->runtime, unit));
  return mfsdp_unit_release(rank->runtime, unit);
}

void gpt_rank_scale_loss(gpt_rank *rank) {
  const float scale = (float)mfsdp_runtime_loss_scale(rank->runtime);
  const int64_t count = gpt_config_tokens(&rank->job->config) * rank->job->config.vocab;
  if (scale == 1.0f) return;
  /* After a training forward: their gradient. */
  rank->device.ops->scale(rank->device.self, count, scale, rank->model.logits);
}

mfsdp_status gpt_rank_loss(gpt_rank *rank, double *loss) {
  MFSDP_TRY(rank->device.ops->finish(rank->device.self));
  *loss = rank->model.loss;
  return MFSDP_OK;
}

/* ---- a step ---- */

mfsdp_status gpt_rank_step(gpt_rank *rank, int64_t step, const int *stop, mfsdp_verdict *verdict) {
  const gpt_job *job = rank->job;
  const gpt_options *o = &job->options;
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  double loss;
  int64_t i;
  int32_t unit;
  desc.micro_batch_count = (int32_t)o->micro_batches;
  desc.grad_weight = 1.0 / ((double)o->ranks * (double)o->micro_batches);
  MFSDP_TRY(mfsdp_step_begin(rank->runtime, &desc));
  for (i = 0; i < o->micro_batches; ++i) {
    const int64_t block = gpt_checkpoint_block(rank, step, i);
    gpt_data_batch(&job->data, (uint64_t)o->seed, block, rank->model.inputs, rank->model.targets);
    for (unit = 0; unit < rank->model.unit_count; ++unit)
      MFSDP_TRY(gpt_rank_forward(rank, unit, MFSDP_USE_FORWARD));
    gpt_rank_scale_loss(rank);
    for (unit = rank->model.unit_count; unit-- > 0;)
      MFSDP_TRY(gpt_rank_backward(rank, unit));
    MFSDP_TRY(gpt_rank_loss(rank, &loss)); /* last: it waits, where the rest is only enqueued */
    MFSDP_TRY(mfsdp_step_value(rank->runtime, loss));
  }
  MFSDP_TRY(mfsdp_step_end(rank->runtime, __atomic_load_n(stop, __ATOMIC_RELAXED) != 0));
  return mfsdp_step_verdict(rank->runtime, verdict);
}

/* ---- evaluation ---- */

mfsdp_status gpt_rank_validate(gpt_rank *rank, double *loss) {
  const gpt_job *job = rank->job;
  const int64_t rounds = validation_rounds(job), ranks = job->options.ranks;
  double *own = rank->losses + rank->index * rounds;
  double sum = 0.0;
  int64_t round, batch;
  int32_t unit;
  rank->model.evaluating = 1;
  for (round = 0; round < rounds; ++round) {
    /* Ranks without a batch in the last round repeat one, so that all gather in the same order. */
    batch = (round * ranks + rank->index) % GPT_VALIDATION_BATCHES;
    gpt_data_validation_batch(&job->data, batch, GPT_VALIDATION_BATCHES, rank->model.inputs,
                              rank->model.targets);
    for (unit = 0; unit < rank->model.unit_count; ++unit)
      MFSDP_TRY(gpt_rank_forward(rank, unit, MFSDP_USE_EVALUATE));
    MFSDP_TRY(gpt_rank_loss(rank, &own[round]));
  }
  rank->model.evaluating = 0;
  mfsdp_trace_begin(&rank->context, "host", "validation losses");
  MFSDP_TRY(rank->control.ops->allgather(rank->control.self, &rank->context, own,
                                         (size_t)rounds * sizeof(double), rank->losses,
                                         rank->control.deadline_us));
  mfsdp_trace_end(&rank->context, "host", "validation losses");
  for (batch = 0; batch < GPT_VALIDATION_BATCHES; ++batch)
    sum += rank->losses[(batch % ranks) * rounds + batch / ranks];
  *loss = sum / GPT_VALIDATION_BATCHES;
  return MFSDP_OK;
}

static uint64_t hash_param(uint64_t hash, const mfsdp_param *param, const float *values,
                           int64_t count) {
  int32_t d;
  hash = mfsdp_hash_bytes(hash, param->name, strlen(param->name));
  for (d = 0; d < param->ndim; ++d)
    hash = mfsdp_hash_u64(hash, (uint64_t)param->shape[d]);
  return mfsdp_hash_bytes(hash, values, (size_t)count * sizeof(float));
}

mfsdp_status gpt_rank_params_hash(gpt_rank *rank, uint64_t *hash) {
  const int32_t count = mfsdp_plan_param_count(rank->plan);
  mfsdp_status status = MFSDP_OK;
  int64_t largest = 1;
  void *values;
  int32_t p;
  for (p = 0; p < count; ++p)
    if (mfsdp_plan_param_numel(rank->plan, p) > largest)
      largest = mfsdp_plan_param_numel(rank->plan, p);
  MFSDP_TRY(mfsdp_table_alloc(&rank->context, (size_t)largest, sizeof(float), "exported parameter",
                              &values));
  *hash = MFSDP_HASH_SEED;
  for (p = 0; p < count && status == MFSDP_OK; ++p) {
    if (mfsdp_plan_param_owner(rank->plan, p) != p) continue; /* tied: hashed where it is owned */
    status = mfsdp_param_export(rank->runtime, p, 0, rank->index == 0 ? (float *)values : NULL);
    if (status == MFSDP_OK && rank->index == 0)
      *hash = hash_param(*hash, mfsdp_plan_param(rank->plan, p), (const float *)values,
                         mfsdp_plan_param_numel(rank->plan, p));
  }
  mfsdp_table_free(&rank->context, values, (size_t)largest, sizeof(float));
  return status;
}
