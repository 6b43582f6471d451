/* SPDX-License-Identifier: MIT */
/*
 * params.h - a growing list of mfsdp_param that keeps the names and row lists it points to.
 *
 *   plan_params params;
 *   plan_params_init(&params);
 *   mfsdp_param *p = plan_params_add(&params, "wte.weight", &error);      // NULL: no memory
 *   p->unit = 0; p->role = MFSDP_ROLE_ELEMENTWISE; ...
 *   desc.params = params.list; desc.param_count = params.count;
 *   plan_params_free(&params);
 */
#ifndef PLAN_PARAMS_H
#define PLAN_PARAMS_H

#include "error.h"
#include "mfsdp/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* More tensors than this in one input are refused. */
#define PLAN_MOST_PARAMS (1 << 24)

typedef struct plan_params {
  mfsdp_param *list; /* count entries; names and part_rows belong to `blocks` */
  int32_t count, capacity;
  void **blocks; /* every string and row list, freed together */
  size_t block_count, block_capacity;
} plan_params;

void plan_params_init(plan_params *params);
void plan_params_free(plan_params *params);

/* Appends mfsdp_param_default() with a copy of `name`. The pointer is good until the next add. NULL
 * without memory or past PLAN_MOST_PARAMS, with the reason in *error. */
mfsdp_param *plan_params_add(plan_params *params, const char *name, plan_error *error);

/* Memory that lives as long as the list; NULL without memory. */
void *plan_params_keep(plan_params *params, size_t nbytes);

/* Elements of all tensors that are no aliases; they must pass mfsdp_param_validate's shape rules.
 */
int64_t plan_params_elements(const plan_params *params);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_PARAMS_H */
