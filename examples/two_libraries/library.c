/* SPDX-License-Identifier: MIT */
/* library.c - a library that vendors MatrixFSDP: how many pieces a plan for some ranks has, and by which version.
 * main.c links two of them, which vendor two versions.
 * Build: cc -std=c11 -fPIC -shared -fvisibility=hidden -DNAME=first -I. examples/two_libraries/library.c -o libfirst.so */
#include "mfsdp/plan.h"

#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)
#define EXPORT __attribute__((visibility("default")))

EXPORT int JOIN(NAME, _version)(void);
EXPORT int JOIN(NAME, _pieces)(int world);

int JOIN(NAME, _version)(void) {
  return MFSDP_VERSION;
}

/* -1 if the plan cannot be made. */
int JOIN(NAME, _pieces)(int world) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_param params[2] = {mfsdp_param_2d("up", 0, MFSDP_ROLE_MATRIX, 256, 64),
                                 mfsdp_param_2d("down", 0, MFSDP_ROLE_MATRIX, 64, 256)};
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_plan *plan = NULL;
  mfsdp_context context;
  int pieces = -1;
  desc.params = params;
  desc.param_count = 2;
  desc.world = world;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) return -1;
  if (mfsdp_plan_create(&context, &desc, &plan) == MFSDP_OK) pieces = mfsdp_plan_piece_count(plan);
  mfsdp_plan_destroy(&context, plan);
  return mfsdp_context_destroy(&context) == MFSDP_OK ? pieces : -1;
}
