/* SPDX-License-Identifier: MIT */
#include "strat_load.h"

#include <stdlib.h>

/* Larger models without their embeddings (a vocabulary of 256), which every strategy shards and
 * updates alike, and with as many blocks as this kind of machine updates in a minute. */
static const strat_model models[] = {
    {"gpt-64", "GPT of 2 blocks, width 64", NULL, 2, 64, 1},
    {"gpt-256", "GPT of 4 blocks, width 256", NULL, 4, 256, 1},
    {"gpt-512", "GPT of 4 blocks, width 512", NULL, 4, 512, 1},
    {"gpt-1024", "GPT of 2 blocks, width 1024", NULL, 2, 1024, 1},
    {"gpt2-124m", "shapes of GPT-2 124M's 12 blocks", "gpt2-124m", 12, 0, 0},
    {"gpt2-1.5b", "shapes of 2 blocks of GPT-2 1.5B", "gpt2-1.5b", 2, 0, 0},
    {"llama3-8b", "shapes of 1 block of Llama 3 8B", "llama3-8b", 1, 0, 0},
};
enum { MODELS = sizeof models / sizeof models[0] };

const strat_model *strat_model_at(int index) {
  return index >= 0 && index < MODELS ? &models[index] : NULL;
}

const strat_model *strat_model_find(const char *name) {
  for (int i = 0; i < MODELS; ++i)
    if (strcmp(models[i].name, name) == 0) return &models[i];
  return NULL;
}

static void fill_built_in(strat_load *load) {
  plan_model model = *plan_model_find(load->model->built_in);
  plan_error error;
  model.layers = load->model->layers;
  model.vocab = 256;
  if (model.context > 0) model.context = 128;
  plan_params_init(&load->params);
  if (plan_model_build(&model, PLAN_VIEWS_WHOLE, &load->params, &error) != PLAN_OK) {
    fprintf(stderr, "bench strategies: %s\n", error.text);
    exit(1);
  }
  for (int32_t i = 0; i < load->params.count; ++i) {
    mfsdp_param *p = &load->params.list[i];
    p->compute = p->grad = p->wire = p->master = MFSDP_F32;
    p->hyper_group = p->role == MFSDP_ROLE_MATRIX ? GPT_GROUP_HIDDEN : GPT_GROUP_DECAY;
  }
  load->job.table.params = load->params.list;
  load->job.table.count = load->params.count;
}

void strat_load_create(strat_load *load, const strat_model *model, int32_t world) {
  bench_shape shape = {model->name, 64, 1, 128, 2};
  memset(load, 0, sizeof *load);
  load->model = model;
  load->whole = model->trains;
  if (model->built_in == NULL) {
    shape.dim = model->dim;
    shape.layers = model->layers;
  }
  bench_job_create(&load->job, &shape, world);
  load->job.options.planner = GPT_PLANNER_BALANCED;
  if (model->built_in != NULL) {
    gpt_param_table_destroy(&load->job.table);
    fill_built_in(load);
  }
  for (int32_t i = 0; i < load->job.table.count; ++i) {
    const mfsdp_param *p = &load->job.table.params[i];
    int64_t numel = 1;
    for (int32_t d = 0; d < p->ndim; ++d)
      numel *= p->shape[d];
    if (p->alias_of == NULL) load->elements += numel;
  }
}

void strat_load_destroy(strat_load *load) {
  if (load->model->built_in != NULL) {
    plan_params_free(&load->params);
    memset(&load->job.table, 0, sizeof load->job.table);
  }
  bench_job_destroy(&load->job);
}

/* ---- made-up values ---- */

/* Uniform in [-1, 1), a function of the seed and the element; simple enough for vector code. */
static float value_of(uint32_t seed, uint32_t element) {
  uint32_t x = element * UINT32_C(2654435761) + seed;
  x ^= x >> 15;
  x *= UINT32_C(0x85ebca6b);
  x ^= x >> 13;
  return (float)(int32_t)x * 0x1p-31f;
}

void strat_load_init(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  const uint32_t seed = (uint32_t)mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)param);
  (void)user;
  for (int64_t i = 0; i < count; ++i)
    dst[i] = 0.05f * value_of(seed, (uint32_t)(first + i));
}

void strat_load_gradient(int32_t param, int64_t block, int64_t count, float *dst) {
  const uint64_t hash = mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)param);
  const uint32_t seed = (uint32_t)mfsdp_hash_u64(hash, (uint64_t)block + 1);
  for (int64_t i = 0; i < count; ++i)
    dst[i] = 0.01f * value_of(seed, (uint32_t)i);
}
