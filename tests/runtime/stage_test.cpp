/* SPDX-License-Identifier: MIT */
/*
 * The step in backward: the bits of the ordinary step whatever the queues, a step that is skipped
 * touches nothing, what it refuses, and the memory it declares.
 */
#include "runtime_rig.h"

namespace {

using test::Expected;
using test::Job;
using test::Rank;
using test::run_job;
using test::Trainer;

#if MFSDP_TEST_SANITIZER
const int64_t kSteps = 2;
#else
const int64_t kSteps = 4;
#endif

/* AdamW's groups are clipped, Muon's is not: its directions cannot wait for the norm. */
Job staged_job() {
  Job job = test::mixed_job();
  job.options.groups[0].clipped = false;
  job.tune = [](mfsdp_runtime_desc *desc) { desc->step_in_backward = 1; };
  return job;
}

TEST(Stage, EveryShapeOfEightBlocks) {
  for (const mfsdp_host_math *math : test::maths()) {
    Job job = staged_job();
    job.math = math;
    const Expected expected(job, 8, kSteps);
    for (const int32_t world : {1, 2, 4, 8})
      EXPECT_EQ(run_job(job, world, 8 / world, expected), "");
  }
}

TEST(Stage, WorldsThatDivideNothing) {
  Job job = staged_job();
  for (const int32_t world : {3, 7}) {
    const Expected expected(job, world, kSteps);
    EXPECT_EQ(run_job(job, world, 1, expected), "");
  }
}

TEST(Stage, QueuesWithThreads) {
  for (const bool on_queue : {false, true}) {
    Job job = staged_job();
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    job.on_queue = on_queue;
    job.tune = [](mfsdp_runtime_desc *desc) {
      desc->step_in_backward = 1;
      desc->prefetch_depth = desc->reduce_depth = 1;
    };
    const Expected expected(job, 4, kSteps);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
    EXPECT_EQ(run_job(job, 2, 2, expected), "");
  }
}

TEST(Stage, OnADevice) {
  Job job = staged_job();
  job.cuda = true;
  const Expected expected(job, 4, 2);
  EXPECT_EQ(run_job(job, 2, 2, expected), "");
}

TEST(Stage, SixteenBits) {
  Job job = staged_job();
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
  const Expected expected(job, 4, kSteps);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
  EXPECT_EQ(run_job(job, 2, 2, expected), "");
}

TEST(Stage, UnitsThatNotEveryMicroBatchUses) { /* staged at the step's end */
  for (const mfsdp_missing missing : {MFSDP_MISSING_SKIP, MFSDP_MISSING_ZEROS}) {
    Job job = staged_job();
    job.options.missing_is_zero = missing == MFSDP_MISSING_ZEROS;
    job.script.unit_used = [](int64_t step, int32_t unit) { return unit != 4 || step % 2 == 0; };
    const Expected expected(job, 4, kSteps);
    EXPECT_EQ(run_job(job, 2, 2, expected), "");
  }
}

/* In step 1 one sample block of one tensor of an early unit is not finite: it is reduced after the
 * directions of the later units have been made. */
TEST(Stage, SkipsAsAWhole) {
  Job job = staged_job();
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return step == 1 && block == 2 && use == 0 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  const Expected expected(job, 4, 4);
  ASSERT_TRUE(expected.after(1).verdict.skipped);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
  EXPECT_EQ(run_job(job, 2, 2, expected), "");
}

TEST(Stage, LossScaleIsKnownBefore) {
  Job job = staged_job();
  job.options.loss_scale.initial = 1024.0;
  job.options.loss_scale.growth_interval = 2;
  const Expected expected(job, 4, 4);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
}

/* ---- when it happens ---- */

/* What a rank's queues, which work in place, come to in a step: "r3 " the reduction of unit 3, "s " the
 * directions of a unit, "v " the verdict. */
void trace_order(void *user, int begin, const char *lane, const char *label) {
  std::string *order = static_cast<std::string *>(user);
  const std::string name = label;
  (void)lane;
  if (!begin) return;
  if (name.compare(0, 12, "reduce unit ") == 0) *order += "r" + name.substr(12) + " ";
  if (name == "stage") *order += "s ";
  if (name == "gather verdict") *order += "v ";
}

/* Behind each unit's reduction, before the next one's: whether a rank owns matrices of Muon in it. */
std::string staged_order(const Job &job, const Rank &rank, const Trainer &trainer) {
  std::string want;
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(trainer.plan, -1, &count);
  for (int32_t u = job.model.unit_count(); u-- > 0;) {
    bool owns = false, exists = false;
    for (int32_t i = 0; i < count; ++i) {
      exists = exists || pieces[i].unit == u;
      owns = owns || (pieces[i].unit == u && pieces[i].owner == rank.rank &&
                      pieces[i].matrix >= 0 && job.model.at(pieces[i].param).group == 0);
    }
    if (!exists) continue; /* numbers of units may have gaps */
    want += "r" + std::to_string(u) + (owns ? " s " : " ");
  }
  return want + "v ";
}

TEST(Stage, WorksOnAUnitBeforeTheNextIsReduced) {
  const Job job = staged_job();
  std::string orders[3];
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    std::string &order = orders[rank.rank];
    Trainer trainer(&rank, &job, 1);
    rank.context.desc.trace = trace_order;
    rank.context.desc.user = &order;
    MFSDP_TRY(trainer.create());
    order.clear();
    MFSDP_TRY(trainer.begin(0));
    for (int32_t u = job.model.unit_count(); u-- > 0;) {
      MFSDP_TRY(mfsdp_unit_acquire(trainer.runtime, u, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_unit_grads(trainer.runtime, u));
      MFSDP_TRY(mfsdp_unit_reduce(trainer.runtime, u));
      MFSDP_TRY(mfsdp_unit_release(trainer.runtime, u));
    }
    MFSDP_TRY(trainer.end());
    test::require(order == staged_order(job, rank, trainer),
                  "the order is " + order + ", not " + staged_order(job, rank, trainer));
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_NE(orders[0].find('s'), std::string::npos); /* somebody had something to do early */
}

/* ---- what it refuses ---- */

void refuses(Job job, mfsdp_status status, const std::string &text,
             const std::function<void(mfsdp_runtime_desc *)> &change) {
  job.tune = [change](mfsdp_runtime_desc *desc) {
    desc->step_in_backward = 1;
    if (change) change(desc);
  };
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.make_plan());
    test::must_fail(rank, trainer.make_runtime(), status, text);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(StageRules, WhatIsKnownAfterBackwardOnly) {
  refuses(test::mixed_job(), MFSDP_E_UNSUPPORTED, "optimizer group 0 (muon) is clipped", nullptr);
  refuses(staged_job(), MFSDP_E_UNSUPPORTED, "step_in_backward and weighted",
          [](mfsdp_runtime_desc *desc) { desc->weighted = 1; });
  refuses(staged_job(), MFSDP_E_UNSUPPORTED, "on the device",
          [](mfsdp_runtime_desc *desc) { desc->state_space = MFSDP_SPACE_HOST; });
}

/* ---- memory ---- */

TEST(Stage, DeclaresItsMemory) {
  const Job job = staged_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    mfsdp_memory with = mfsdp_memory_default(), without = mfsdp_memory_default();
    std::size_t want = 0, largest = 0;
    int32_t count = 0;
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.make_plan());
    const mfsdp_piece *pieces = mfsdp_plan_pieces(trainer.plan, -1, &count);
    for (int32_t i = 0; i < count; ++i) {
      std::size_t nbytes = 0;
      if (pieces[i].owner != rank.rank || pieces[i].matrix < 0 ||
          job.model.at(pieces[i].param).group != 0)
        continue;
      want += static_cast<std::size_t>((pieces[i].count + 127) / 128 * 128) * sizeof(float);
      const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
      MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(&rank.context, &ns, pieces[i].rows,
                                                     pieces[i].cols, &nbytes));
      largest = std::max(largest, nbytes);
    }
    MFSDP_TRY(trainer.make_runtime(
        [&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          test::require(mfsdp_runtime_memory(&rank.context, desc, &with) == MFSDP_OK, "memory");
          desc->step_in_backward = 0;
          test::require(mfsdp_runtime_memory(&rank.context, desc, &without) == MFSDP_OK, "memory");
          desc->step_in_backward = 1;
        }));
    test::require(with.staging_nbytes - without.staging_nbytes == want, "directions");
    test::require(with.workspace_nbytes == largest, "the workspace of the largest matrix");
    test::require(rank.context.current_nbytes[MFSDP_MEMORY_STAGING] == with.staging_nbytes,
                  "staging held");
    test::require(rank.context.current_nbytes[MFSDP_MEMORY_WORKSPACE] == with.workspace_nbytes,
                  "workspace held");
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
