/* SPDX-License-Identifier: MIT */
/* What gpt_plan_create balances: the work of the optimizer that will run. Integers, compared exactly. */
#include "examples/gpt/rank.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace {

struct JobFree {
  void operator()(gpt_job *job) const {
    gpt_param_table_destroy(&job->table);
    delete job;
  }
};
using Job = std::unique_ptr<gpt_job, JobFree>;

Job job_of(int32_t optimizer, int32_t planner) {
  gpt_error error;
  Job job(new gpt_job());
  job->config.layers = 3;
  job->config.dim = 32;
  job->config.heads = 2;
  job->config.context = 8;
  job->config.batch = 2;
  job->config.vocab = GPT_VOCAB;
  job->options.ranks = 4;
  job->options.lr = 0.02;
  job->options.adamw_lr = 0.003;
  job->options.precondition_every = 10;
  job->options.precondition_limit = 64; /* below the long sides of the MLP */
  job->options.optimizer = optimizer;
  job->options.planner = planner;
  EXPECT_EQ(gpt_param_table_create(&job->config, &job->table, &error), GPT_OK);
  return job;
}

/* The sum of what a plan takes its matrices to cost, and of `cost` over them. */
struct Sums {
  int64_t planned = -1, want = 0;
};

template <class Cost> Sums sums_of(const gpt_job &job, Cost cost) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  mfsdp_context context;
  mfsdp_plan *plan = nullptr;
  Sums sums;
  int32_t count = 0;
  EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  EXPECT_EQ(gpt_plan_create(&context, &job, &plan), MFSDP_OK) << context.error.message;
  if (plan == nullptr) return sums;
  EXPECT_EQ(mfsdp_plan_report(&context, plan, &summary, nullptr, 0), MFSDP_OK);
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  for (int32_t i = 0; i < count; ++i)
    if (pieces[i].matrix >= 0) sums.want += cost(pieces[i].rows, pieces[i].cols);
  sums.planned = summary.cost.sum;
  mfsdp_plan_destroy(&context, plan);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
  return sums;
}

/* With the coefficients that were asked for: six steps of one set cost more than five of another. */
TEST(GptPlan, MuonByTheFormThatRuns) {
  std::vector<int64_t> sums;
  for (mfsdp_ns_set set : {MFSDP_NS_SET_JORDAN5, MFSDP_NS_SET_DEEPSEEK_V4}) {
    const Job job = job_of(GPT_OPTIMIZER_MUON, GPT_PLANNER_BALANCED);
    job->options.coefficients = set;
    mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_of(set);
    const Sums s = sums_of(*job, [&](int64_t rows, int64_t cols) {
      return mfsdp_newton_schulz_cost(&ns, 0, rows, cols);
    });
    EXPECT_EQ(s.planned, s.want) << mfsdp_ns_set_name(set);
    sums.push_back(s.planned);
  }
  EXPECT_GT(sums[1], sums[0]);
}

/* The paper's planners, and AdamW. */
TEST(GptPlan, ElementsOtherwise) {
  const auto elements = [](int64_t rows, int64_t cols) { return rows * cols; };
  for (int32_t planner = GPT_PLANNER_ROUND_ROBIN; planner < GPT_PLANNER_BALANCED; ++planner) {
    const Job muon = job_of(GPT_OPTIMIZER_MUON, planner);
    const Sums s = sums_of(*muon, elements);
    EXPECT_EQ(s.planned, s.want) << planner;
  }
  const Job adamw = job_of(GPT_OPTIMIZER_ADAMW, GPT_PLANNER_BALANCED);
  const Sums s = sums_of(*adamw, elements);
  EXPECT_EQ(s.planned, s.want);
}

TEST(GptPlan, ShampooAndSoapByTheirs) {
  for (int32_t optimizer : {GPT_OPTIMIZER_SHAMPOO, GPT_OPTIMIZER_SOAP}) {
    const Job job = job_of(optimizer, GPT_PLANNER_BALANCED);
    const mfsdp_hyper_group hidden = gpt_hyper_group(&job->options, GPT_GROUP_HIDDEN);
    mfsdp_precondition_cost cost = {hidden.soap.update_every, hidden.soap.size_limit};
    const Sums s = sums_of(*job, [&](int64_t rows, int64_t cols) {
      return optimizer == GPT_OPTIMIZER_SOAP ? mfsdp_cost_soap(&cost, 0, rows, cols)
                                             : mfsdp_cost_shampoo(&cost, 0, rows, cols);
    });
    EXPECT_EQ(s.planned, s.want) << optimizer;
  }
}

} // namespace
