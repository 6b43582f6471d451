/* SPDX-License-Identifier: MIT */
/*
 * reference.c - what bench/peers/torch_fsdp2.py is compared with: our runtime on thread ranks, with
 * the same tensors, initial values, gradients and hyperparameters. It writes the final parameters.
 *
 *   reference --model gpt:d=64,layers=2 --world 3 --steps 4 --out FILE       (or --table FILE)
 *
 * Not a benchmark. FILE gets all tensors in declared order, fp32 in this machine's byte order.
 * Options are those of torch_fsdp2.py, which explains them; --steps counts its warm-up too. Values
 * of gradients are multiples of 2^-15 in [-1, 1): their sums over ranks are exact in any order.
 */
#include "gpt/params.h"
#include "matrixfsdp.h"
#include "mfsdp/host/threads_run.h"
#include "mfsdp/random.h"
#include "plan/describe.h"
#include "plan/table.h"
#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif

#include <stdio.h>
#include <stdlib.h>

enum { HIDDEN = 0, DECAY, PLAIN, GROUPS }; /* hyperparameter groups */

typedef struct reference {
  const char *model, *table, *out;
  int64_t world, steps, sets, seed;
  gpt_config config; /* with `model` */
  gpt_param_table gpt;
  plan_params tensors; /* with `table` */
  const mfsdp_param *params;
  int32_t count;
} reference;

static int refuse(const char *text, const char *word) {
  fprintf(stderr, "reference: %s%s\n", text, word);
  return 2;
}

/* ---- the command line ---- */

static int read_number(const char *text, int64_t least, int64_t *number) {
  return text != NULL && plan_number_of(text, INT32_MAX, number) && *number >= least;
}

/* "gpt:d=64,layers=2,context=128,vocab=256"; what is not named keeps its value. */
static int read_model(reference *r) {
  static const char *const keys[] = {"d", "layers", "context", "vocab"};
  int64_t *values[4];
  char text[128], *word, *rest = text;
  values[0] = &r->config.dim;
  values[1] = &r->config.layers;
  values[2] = &r->config.context;
  values[3] = &r->config.vocab;
  if (strncmp(r->model, "gpt:", 4) != 0 || strlen(r->model) >= sizeof text) return 0;
  memcpy(text, r->model + 4, strlen(r->model) - 3);
  while ((word = strtok_r(rest, ",", &rest)) != NULL) {
    char *value = strchr(word, '=');
    int k = 0;
    if (value == NULL) return 0;
    *value++ = '\0';
    while (k < 4 && strcmp(word, keys[k]) != 0)
      ++k;
    if (k == 4 || !read_number(value, 1, values[k])) return 0;
  }
  return 1;
}

static int read_options(int argc, char **argv, reference *r) {
  int i;
  for (i = 1; i < argc; i += 2) {
    const char *value = i + 1 < argc ? argv[i + 1] : NULL;
    int good = value != NULL;
    if (strcmp(argv[i], "--model") == 0)
      r->model = value;
    else if (strcmp(argv[i], "--table") == 0)
      r->table = value;
    else if (strcmp(argv[i], "--out") == 0)
      r->out = value;
    else if (strcmp(argv[i], "--world") == 0)
      good = read_number(value, 1, &r->world);
    else if (strcmp(argv[i], "--steps") == 0)
      good = read_number(value, 0, &r->steps);
    else if (strcmp(argv[i], "--sets") == 0)
      good = read_number(value, 1, &r->sets);
    else if (strcmp(argv[i], "--seed") == 0)
      good = read_number(value, 0, &r->seed);
    else
      return refuse("unknown option ", argv[i]);
    if (!good) return refuse("needs a value, a whole number where it is one, after ", argv[i]);
  }
  if ((r->model == NULL) == (r->table == NULL) || r->out == NULL)
    return refuse("needs --out, and either --model or --table", "");
  if (r->model != NULL && !read_model(r))
    return refuse("no such model, needs gpt:d=N,layers=N[,context=N,vocab=N]: ", r->model);
  return 0;
}

/* ---- tensors ---- */

/* Matrices get Muon; of the rest, what has two or more dimensions decays. Everything is fp32. */
static int assign(mfsdp_param *params, int32_t count) {
  int32_t i;
  for (i = 0; i < count; ++i) {
    plan_dtype_set(&params[i], MFSDP_F32);
    params[i].hyper_group = params[i].role == MFSDP_ROLE_MATRIX ? HIDDEN
                            : params[i].ndim > 1                ? DECAY
                                                                : PLAIN;
    if (params[i].alias_of != NULL || params[i].role == MFSDP_ROLE_FROZEN)
      return refuse("neither frozen tensors nor aliases are supported: ", params[i].name);
  }
  return 0;
}

static int make_tensors(reference *r) {
  gpt_error gpt;
  plan_error plan;
  plan_params_init(&r->tensors);
  if (r->model != NULL) {
    if (gpt_config_check(&r->config, &gpt) != GPT_OK ||
        gpt_param_table_create(&r->config, &r->gpt, &gpt) != GPT_OK)
      return refuse(gpt.text, "");
    r->params = r->gpt.params;
    r->count = r->gpt.count;
    return assign(r->gpt.params, r->count);
  }
  if (plan_table_read(r->table, &r->tensors, &plan) != PLAN_OK) return refuse(plan.text, "");
  r->params = r->tensors.list;
  r->count = r->tensors.count;
  return assign(r->tensors.list, r->count);
}

static void init_value(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  const reference *r = (const reference *)user;
  const char *name = r->params[param].name;
  const uint64_t stream = mfsdp_hash_bytes(MFSDP_HASH_SEED, name, strlen(name));
  int64_t i;
  if (r->model != NULL) {
    gpt_init_value(&r->config, (uint64_t)r->seed, param, first, count, dst);
    return;
  }
  for (i = 0; i < count; ++i)
    dst[i] = 0.02f * mfsdp_random_normal((uint64_t)r->seed, stream, (uint64_t)(first + i));
}

/* Of sample block `block`: 16 random bits as a number of [-1, 1). */
static void fill_gradient(const reference *r, int32_t param, int64_t block, int64_t count,
                          float *dst) {
  const char *name = r->params[param].name;
  const uint64_t hash = mfsdp_hash_bytes(MFSDP_HASH_SEED, name, strlen(name));
  const uint64_t stream = mfsdp_hash_u64(hash, (uint64_t)block);
  int64_t i;
  for (i = 0; i < count; ++i) {
    const uint64_t bits = mfsdp_random_u64((uint64_t)r->seed, stream, (uint64_t)i);
    dst[i] = (float)((int32_t)(bits >> 48) - 32768) / 32768.0f;
  }
}

/* ---- a rank ---- */

static mfsdp_status create(mfsdp_threads_rank *rank, const reference *r, mfsdp_plan **plan,
                           mfsdp_runtime **runtime) {
  mfsdp_hyper_group hyper[GROUPS];
  mfsdp_plan_desc plan_desc = mfsdp_plan_desc_default();
  mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
  mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
  mfsdp_group group = mfsdp_group_default();
  plan_desc.params = r->params;
  plan_desc.param_count = r->count;
  plan_desc.world = rank->world;
  MFSDP_TRY(mfsdp_plan_create(&rank->context, &plan_desc, plan));
  hyper[HIDDEN] = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
  hyper[HIDDEN].lr = 0.02;
  hyper[DECAY] = mfsdp_hyper_group_adamw(0.003, 0.01);
  hyper[PLAIN] = mfsdp_hyper_group_adamw(0.003, 0.0);
  optimizer.groups = hyper;
  optimizer.group_count = GROUPS;
  group.plan = *plan;
  group.transport = &rank->transport;
  group.control = &rank->control;
  desc.backend = rank->backend;
  desc.groups = &group;
  desc.group_count = 1;
  desc.optimizer = &optimizer;
  MFSDP_TRY(mfsdp_runtime_create(&rank->context, &desc, runtime));
  return mfsdp_runtime_init(*runtime, init_value, (void *)(uintptr_t)r);
}

static mfsdp_status take_step(mfsdp_runtime *rt, const mfsdp_plan *plan, const reference *r,
                              int64_t block) {
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  int32_t unit, p;
  desc.grad_weight = 1.0 / (double)r->world;
  MFSDP_TRY(mfsdp_step_begin(rt, &desc));
  for (unit = mfsdp_plan_unit_count(plan); unit-- > 0;) {
    MFSDP_TRY(mfsdp_unit_grads(rt, unit));
    for (p = 0; p < r->count; ++p)
      if (r->params[p].unit == unit)
        fill_gradient(r, p, block, mfsdp_plan_param_numel(plan, p),
                      (float *)mfsdp_unit_grad(rt, p));
    MFSDP_TRY(mfsdp_unit_reduce(rt, unit));
  }
  MFSDP_TRY(mfsdp_step_end(rt, 0));
  return mfsdp_step_verdict(rt, &verdict);
}

static mfsdp_status write_params(mfsdp_threads_rank *rank, mfsdp_runtime *rt,
                                 const mfsdp_plan *plan, const reference *r) {
  FILE *file = rank->rank == 0 ? fopen(r->out, "wb") : NULL;
  int failed = rank->rank == 0 && file == NULL;
  mfsdp_status status = MFSDP_OK;
  int32_t p;
  for (p = 0; p < r->count && status == MFSDP_OK; ++p) {
    const size_t count = (size_t)mfsdp_plan_param_numel(plan, p);
    float *values = rank->rank == 0 ? (float *)calloc(count + 1, sizeof(float)) : NULL;
    if (rank->rank == 0 && values == NULL)
      return MFSDP_FAIL(&rank->context, MFSDP_E_MEMORY, "no memory for %s", r->params[p].name);
    status = mfsdp_param_export(rt, p, 0, values);
    if (file != NULL && status == MFSDP_OK)
      failed |= fwrite(values, sizeof(float), count, file) != count;
    free(values);
  }
  if (file != NULL) failed |= fclose(file) != 0;
  if (failed && status == MFSDP_OK)
    return MFSDP_FAIL(&rank->context, MFSDP_E_IO, "%s cannot be written", r->out);
  return status;
}

static mfsdp_status body(mfsdp_threads_rank *rank, void *user) {
  const reference *r = (const reference *)user;
  mfsdp_plan *plan = NULL;
  mfsdp_runtime *runtime = NULL;
  int64_t step;
  MFSDP_TRY(create(rank, r, &plan, &runtime));
  for (step = 0; step < r->steps; ++step)
    MFSDP_TRY(take_step(runtime, plan, r, step % r->sets * r->world + rank->rank));
  MFSDP_TRY(write_params(rank, runtime, plan, r));
  MFSDP_TRY(mfsdp_runtime_destroy(runtime));
  mfsdp_plan_destroy(&rank->context, plan);
  return MFSDP_OK;
}

int main(int argc, char **argv) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  mfsdp_context context;
  reference r;
  int status;
  memset(&r, 0, sizeof r);
  r.world = 4;
  r.sets = 2;
  r.seed = 1;
  r.config.dim = 256;
  r.config.layers = 4;
  r.config.context = 128;
  r.config.vocab = GPT_VOCAB;
  r.config.heads = r.config.batch = 1;
  status = read_options(argc, argv, &r);
  if (status == 0) status = make_tensors(&r);
  if (status != 0) return status;
  desc.threads.world = (int32_t)r.world;
#if MFSDP_EXAMPLE_CBLAS
  desc.host.math = mfsdp_host_math_cblas();
#endif
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) return 1;
  if (mfsdp_threads_run(&context, &desc, body, &r) != MFSDP_OK) {
    fprintf(stderr, "reference: %s\n", mfsdp_context_error(&context)->message);
    status = 1;
  }
  gpt_param_table_destroy(&r.gpt);
  plan_params_free(&r.tensors);
  return status;
}
