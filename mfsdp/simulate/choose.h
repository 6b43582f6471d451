/* SPDX-License-Identifier: MIT */
/*
 * simulate/choose.h - a plan with allow_banded whose bands make the simulated step shorter, or none.
 *
 *   mfsdp_plan_desc desc = ...;                       // as for mfsdp_plan_create
 *   desc.allow_banded = 1; desc.banded_wire_cost = 1;
 *   ask.cluster = &cluster; ask.strategy = MFSDP_SIM_OWNER;
 *   MFSDP_TRY(mfsdp_simulate_plan(&context, &desc, &ask, &plan));
 *
 * The planner chooses before tails have their places, in integers, for DIRECT on one level of links
 * (plan/hybrid.h). The simulator sees the finished plan: tails, padding, nodes, passes over memory,
 * any algorithm. Where it finds that the bands do not pay after all, the plan is one without them.
 *
 * Does not: try other choices than the planner's.
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_CHOOSE_H
#define MFSDP_SIMULATE_CHOOSE_H

#include "step.h"

/* *us = the simulated step of a plan. */
MFSDP_API mfsdp_status mfsdp__sim_step_of(mfsdp_context *context, const mfsdp_sim_desc *ask,
                                          const mfsdp_plan *plan, double *us) {
  mfsdp_sim_desc desc = *ask;
  mfsdp_sim_result result = mfsdp_sim_result_default();
  desc.plan = plan;
  MFSDP_TRY(mfsdp_simulate(context, &desc, &result, NULL, 0));
  *us = result.step_us;
  return MFSDP_OK;
}

/* Puts a plan without chosen bands into *plan where that is not longer. desc: a copy. */
MFSDP_API mfsdp_status mfsdp__sim_reconsider(mfsdp_context *context, mfsdp_plan_desc *desc,
                                             const mfsdp_sim_desc *ask, mfsdp_plan **plan) {
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  mfsdp_plan *whole = NULL, *left;
  double with_bands, without;
  mfsdp_status status;
  MFSDP_TRY(mfsdp_plan_report(context, *plan, &summary, NULL, 0));
  if (summary.chosen_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__sim_step_of(context, ask, *plan, &with_bands));
  desc->materialize_count = desc->reduce_count = 0; /* so bands save nothing */
  MFSDP_TRY(mfsdp_plan_create(context, desc, &whole));
  status = mfsdp__sim_step_of(context, ask, whole, &without);
  left = status == MFSDP_OK && without <= with_bands ? *plan : whole;
  if (left == *plan) *plan = whole;
  mfsdp_plan_destroy(context, left);
  return status;
}

/*
 * mfsdp_plan_create, but *plan keeps what allow_banded chose only where the simulated step (ask, as for
 * mfsdp_simulate; its plan is not read, strategy OWNER) is shorter than without. materialize_count and
 * reduce_count are those of `ask` and banded_message_nbytes is its cluster's, whatever desc says. Bands
 * that are described, or that the cap on bytes needs, stay. A plan without chosen bands that was put in
 * place of one with them was made with both counts 0, as its settings and hash say, and its reported
 * predictions are those. Without allow_banded this is mfsdp_plan_create.
 * Ranks of equal programs get equal plans; the runtime compares hashes. NULL in *plan on failure:
 * what either call says; E_ARGUMENT for a NULL or another strategy.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_simulate_plan(mfsdp_context *context,
                                                         const mfsdp_plan_desc *desc,
                                                         const mfsdp_sim_desc *ask,
                                                         mfsdp_plan **plan) {
  mfsdp_plan_desc copy;
  mfsdp_status status;
  if (desc == NULL || ask == NULL || plan == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "simulate plan: %s is NULL",
                      desc == NULL  ? "desc"
                      : ask == NULL ? "ask"
                                    : "plan");
  *plan = NULL;
  MFSDP_TRY(mfsdp_cluster_validate(context, ask->cluster));
  if (ask->strategy != MFSDP_SIM_OWNER)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "simulate plan: strategy is %s, needs %s",
                      mfsdp_sim_strategy_name(ask->strategy),
                      mfsdp_sim_strategy_name(MFSDP_SIM_OWNER));
  if (desc->struct_nbytes != sizeof(*desc) || !desc->allow_banded)
    return mfsdp_plan_create(context, desc, plan);
  copy = *desc;
  copy.materialize_count = ask->materialize_count;
  copy.reduce_count = ask->reduce_count;
  copy.banded_message_nbytes = mfsdp_cluster_message_nbytes(ask->cluster, desc->world);
  MFSDP_TRY(mfsdp_plan_create(context, &copy, plan));
  status = mfsdp__sim_reconsider(context, &copy, ask, plan);
  if (status == MFSDP_OK) return MFSDP_OK;
  mfsdp_plan_destroy(context, *plan);
  *plan = NULL;
  return status;
}

#endif /* MFSDP_SIMULATE_CHOOSE_H */
