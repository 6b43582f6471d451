/* SPDX-License-Identifier: MIT */
#include "strat_predict.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

static void need(mfsdp_context *context, mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench strategies: prediction: %s\n", mfsdp_context_error(context)->message);
  exit(1);
}

static mfsdp_sim_result ask(mfsdp_context *context, const mfsdp_sim_desc *desc) {
  mfsdp_sim_result result = mfsdp_sim_result_default();
  need(context, mfsdp_simulate(context, desc, &result, NULL, 0));
  return result;
}

/* The hybrid is its plan. The others are asked on the plan of whole matrices: simulate.h slices them
 * itself. */
static mfsdp_plan *plan_of(mfsdp_context *context, strat_load *load, int32_t asked) {
  const int32_t strategy = load->job.options.strategy;
  mfsdp_plan *plan = NULL;
  load->job.options.strategy =
      asked == GPT_STRATEGY_HYBRID ? GPT_STRATEGY_HYBRID : GPT_STRATEGY_MATRIX;
  gpt_job_set_strategy(&load->job);
  need(context, gpt_plan_create(context, &load->job, &plan));
  load->job.options.strategy = strategy;
  gpt_job_set_strategy(&load->job);
  return plan;
}

/* Of the update's arithmetic, at the rate that every rank has while all work. Ranks share this
 * machine's processors, so who is done leaves them to the others: all are done when all work is, or
 * when the longest is on a processor of its own. */
static double shared_compute_us(mfsdp_context *context, const mfsdp_sim_desc *desc) {
  const int32_t world = mfsdp_plan_world(desc->plan);
  const double processors = (double)sysconf(_SC_NPROCESSORS_ONLN);
  const double sharing = processors >= world ? 1.0 : world / processors;
  mfsdp_sim_rank *ranks = (mfsdp_sim_rank *)calloc((size_t)world, sizeof *ranks);
  mfsdp_sim_result result = mfsdp_sim_result_default();
  double sum = 0.0, longest = 0.0;
  if (ranks == NULL) exit(1);
  need(context, mfsdp_simulate(context, desc, &result, ranks, world));
  for (int32_t r = 0; r < world; ++r) {
    sum += ranks[r].optimizer_us;
    longest = ranks[r].optimizer_us > longest ? ranks[r].optimizer_us : longest;
  }
  free(ranks);
  return longest / sharing > sum / world ? longest / sharing : sum / world;
}

/* The cluster has rates of Newton-Schulz and of plain products. */
static void fill(mfsdp_context *context, const strat_load *load, const plan_calibration *machine,
                 mfsdp_sim_desc *desc, strat_prediction *out) {
  const mfsdp_hyper_group hidden = gpt_hyper_group(&load->job.options, GPT_GROUP_HIDDEN);
  mfsdp_sim_result result;
  double wire_us, compute_us;
  desc->newton_schulz_steps = hidden.muon.newton_schulz.step_count;
  desc->element_update_nbytes = 28.0; /* all in fp32: no copy beside the masters */
  desc->cluster = &machine->cluster;
  if (load->whole)
    desc->model_flops = gpt_config_flops_per_token(&load->job.config) *
                        (double)gpt_config_tokens(&load->job.config);
  result = ask(context, desc);
  compute_us = shared_compute_us(context, desc);
  result.optimizer_us += compute_us - result.optimizer_compute_us;
  wire_us = result.materialize_us + result.reduce_us;
  out->reduce_s = result.reduce_us * 1e-6;
  out->optimizer_s = (compute_us + result.optimizer_wire_us) * 1e-6;
  out->verdict_s = result.optimizer_us * 1e-6 - out->optimizer_s;
  out->step_s = (wire_us + result.model_us + result.optimizer_us) * 1e-6;
  out->overlapped_s =
      ((wire_us > result.model_us ? wire_us : result.model_us) + result.optimizer_us) * 1e-6;
  out->reduce_nbytes = (double)result.reduce_nbytes.sum;
  out->optimizer_nbytes = (double)result.optimizer_nbytes.sum;
  desc->materialize_count = 1;
  out->materialize_s = ask(context, desc).materialize_us * 1e-6;
}

void strat_predict(strat_load *load, const plan_calibration *machine, int32_t strategy,
                   strat_prediction *out) {
  static const mfsdp_sim_strategy known[GPT_STRATEGY_COUNT] = {
      MFSDP_SIM_OWNER, MFSDP_SIM_GATHER,     MFSDP_SIM_EXCHANGE,
      MFSDP_SIM_ZERO1, MFSDP_SIM_REPLICATED, MFSDP_SIM_OWNER};
  /* In the order of GPT_COLLECTIVE_*; AUTO, which is none of them for all units, is not predicted. */
  static const mfsdp_sim_algorithm algorithms[GPT_COLLECTIVE_AUTO] = {
      MFSDP_SIM_DIRECT, MFSDP_SIM_RING, MFSDP_SIM_HIERARCHICAL, MFSDP_SIM_NATIVE};
  const int32_t collective = load->job.options.collective;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_sim_desc desc = mfsdp_sim_desc_default();
  mfsdp_context context;
  mfsdp_plan *plan;
  const double none = (double)NAN;
  out->materialize_s = out->reduce_s = out->optimizer_s = out->verdict_s = none;
  out->step_s = out->overlapped_s = out->reduce_nbytes = out->optimizer_nbytes = none;
  if (collective == GPT_COLLECTIVE_AUTO) return;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) exit(1);
  plan = plan_of(&context, load, strategy);
  desc.plan = plan;
  desc.strategy = known[strategy];
  desc.algorithm = algorithms[collective];
  desc.chunk_nbytes = (size_t)load->job.options.chunk_kib << 10;
  fill(&context, load, machine, &desc, out);
  mfsdp_plan_destroy(&context, plan);
  need(&context, mfsdp_context_destroy(&context));
}
