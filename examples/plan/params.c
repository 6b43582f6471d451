/* SPDX-License-Identifier: MIT */
#include "params.h"

#include <stdlib.h>
#include <string.h>

void plan_params_init(plan_params *params) {
  memset(params, 0, sizeof *params);
}

void plan_params_free(plan_params *params) {
  for (size_t i = 0; i < params->block_count; ++i)
    free(params->blocks[i]);
  free(params->blocks);
  free(params->list);
  plan_params_init(params);
}

void *plan_params_keep(plan_params *params, size_t nbytes) {
  void *block;
  if (params->block_count == params->block_capacity) {
    const size_t capacity = params->block_capacity ? 2 * params->block_capacity : 64;
    void **blocks = (void **)realloc(params->blocks, capacity * sizeof *blocks);
    if (!blocks) return NULL;
    params->blocks = blocks;
    params->block_capacity = capacity;
  }
  block = malloc(nbytes ? nbytes : 1);
  if (block) params->blocks[params->block_count++] = block;
  return block;
}

mfsdp_param *plan_params_add(plan_params *params, const char *name, plan_error *error) {
  const size_t nbytes = strlen(name) + 1;
  mfsdp_param *param;
  char *copy;
  if (params->count == PLAN_MOST_PARAMS) {
    plan_fail(error, "more than %d tensors", PLAN_MOST_PARAMS);
    return NULL;
  }
  if (params->count == params->capacity) {
    const int32_t capacity = params->capacity ? 2 * params->capacity : 64;
    mfsdp_param *list =
        (mfsdp_param *)realloc(params->list, (size_t)capacity * sizeof *params->list);
    if (!list) {
      plan_fail(error, "no memory for %d tensors", (int)capacity);
      return NULL;
    }
    params->list = list;
    params->capacity = capacity;
  }
  copy = (char *)plan_params_keep(params, nbytes);
  if (!copy) {
    plan_fail(error, "no memory for the name of tensor %d", (int)params->count);
    return NULL;
  }
  memcpy(copy, name, nbytes);
  param = &params->list[params->count++];
  *param = mfsdp_param_default();
  param->name = copy;
  return param;
}

int64_t plan_params_elements(const plan_params *params) {
  int64_t sum = 0;
  for (int32_t i = 0; i < params->count; ++i) {
    int64_t numel = 1;
    if (params->list[i].alias_of) continue;
    for (int32_t d = 0; d < params->list[i].ndim; ++d)
      numel *= params->list[i].shape[d];
    sum += numel;
  }
  return sum;
}
