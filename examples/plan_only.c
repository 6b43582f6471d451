/* SPDX-License-Identifier: MIT */
/* plan_only.c - the planner alone: who owns what of three tensors on four ranks. No runtime, no
 * threads.
 * Build: cc -std=c11 -O2 -I. examples/plan_only.c */
#include "mfsdp/plan.h"

static void print(void *user, const char *line) {
  (void)user;
  puts(line);
}

static mfsdp_param tensor(const char *name, int32_t unit, mfsdp_role role, int64_t rows,
                          int64_t cols) {
  mfsdp_param p = mfsdp_param_default();
  p.name = name;
  p.unit = unit;
  p.role = role;
  p.ndim = 2;
  p.shape[0] = rows;
  p.shape[1] = cols;
  return p;
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_param params[3];
  mfsdp_context context;
  mfsdp_plan *plan = NULL;
  params[0] = tensor("embed", 0, MFSDP_ROLE_ELEMENTWISE, 256, 64);
  params[1] = tensor("up", 1, MFSDP_ROLE_MATRIX, 256, 64);
  params[2] = tensor("down", 1, MFSDP_ROLE_MATRIX, 64, 256);
  desc.params = params;
  desc.param_count = 3;
  desc.world = 4;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_plan_create(&context, &desc, &plan) != MFSDP_OK ||
      mfsdp_plan_audit(&context, plan, NULL, print, NULL) != MFSDP_OK) {
    fprintf(stderr, "plan_only: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  mfsdp_plan_destroy(&context, plan);
  return mfsdp_context_destroy(&context) == MFSDP_OK ? 0 : 1;
}
