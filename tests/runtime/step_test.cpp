/* SPDX-License-Identifier: MIT */
/* Steps in the wrong order and with wrong descriptions: a status, a message, nothing changed. */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

struct BadStep {
  std::function<void(mfsdp_step_desc *)> spoil;
  std::string text;
};

std::vector<BadStep> bad_steps() {
  const double nan = std::nan(""), infinity = HUGE_VAL;
  std::vector<BadStep> out;
  out.push_back({[](mfsdp_step_desc *d) { d->struct_nbytes -= 1; }, "struct_nbytes is not"});
  out.push_back(
      {[](mfsdp_step_desc *d) { d->micro_batch_count = 0; }, "micro_batch_count is 0, needs 1 to"});
  out.push_back({[](mfsdp_step_desc *d) { d->micro_batch_count = 9; },
                 "micro_batch_count is 9, needs 1 to max_micro_batches (8)"});
  for (const double bad : {0.0, -1.0, nan, infinity})
    out.push_back({[bad](mfsdp_step_desc *d) { d->grad_weight = bad; }, "grad_weight is "});
  for (const double bad : {-1.0, nan, infinity})
    out.push_back({[bad](mfsdp_step_desc *d) { d->lr_factor = bad; }, "lr_factor is "});
  return out;
}

TEST(StepBegin, WrongDescriptions) {
  EXPECT_EQ(test::survives(test::small_job(), 2, 1,
                           [](Rank &rank, Trainer &t) {
                             must_fail(rank, mfsdp_step_begin(t.runtime, nullptr), MFSDP_E_ARGUMENT,
                                       "desc is NULL");
                             for (const BadStep &bad : bad_steps()) {
                               mfsdp_step_desc desc = t.step_desc(1);
                               bad.spoil(&desc);
                               must_fail(rank, mfsdp_step_begin(t.runtime, &desc), MFSDP_E_ARGUMENT,
                                         bad.text);
                             }
                             return MFSDP_OK;
                           }),
            "");
}

TEST(StepBegin, Twice) {
  EXPECT_EQ(test::survives(test::small_job(), 2, 1, nullptr,
                           [](Rank &rank, Trainer &t) {
                             must_fail(rank, t.begin(1), MFSDP_E_STATE,
                                       "step: the one before was not ended (mfsdp_step_end)");
                             return MFSDP_OK;
                           }),
            "");
}

TEST(StepValue, OutsideAndTooMany) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    MFSDP_TRY(t.create());
    must_fail(rank, mfsdp_step_value(t.runtime, 1.0), MFSDP_E_STATE, "step value: no step is open");
    MFSDP_TRY(t.begin(0));
    /* Blocks 0, 1 are the first micro-batch of ranks 0, 1; 2, 3 the second. */
    MFSDP_TRY(mfsdp_step_value(t.runtime, 1.0 + rank.rank));
    MFSDP_TRY(mfsdp_step_value(t.runtime, 10.0 + rank.rank));
    must_fail(rank, mfsdp_step_value(t.runtime, 5.0), MFSDP_E_STATE,
              "step value: more values than micro-batches");
    MFSDP_TRY(t.end());
    require(t.verdict.value_mean == (1.0 + 2.0 + 10.0 + 11.0) / 4,
            "the refused value is not in it");
    must_fail(rank, mfsdp_step_value(t.runtime, 1.0), MFSDP_E_STATE, "no step is open");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(StepEnd, WithoutAStep) {
  EXPECT_EQ(test::survives(test::small_job(), 2, 1,
                           [](Rank &rank, Trainer &t) {
                             const mfsdp_counters before = rank.context.counters;
                             must_fail(rank, mfsdp_step_end(t.runtime, 0), MFSDP_E_STATE,
                                       "step end: no step is open (mfsdp_step_begin)");
                             require(std::memcmp(&before, &rank.context.counters, sizeof(before)) ==
                                         0,
                                     "nothing was sent");
                             return MFSDP_OK;
                           }),
            "");
}

/* Both ranks meet every obstacle of a step's end and go on as if nothing had been. */
TEST(StepEnd, WithUnfinishedUnits) {
  Job job = test::small_job();
  job.model.tensors.push_back(ref::tied("head", 2, job.model.tensors[0]));
  const test::Expected expected(job, 2, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(mfsdp_step_value(t.runtime, ref::synthetic_value(job.model.seed, 0, rank.rank)));
    for (int32_t unit = 3; unit-- > 0;) {
      const mfsdp_counters before = rank.context.counters;
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, unit, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, unit, MFSDP_USE_BACKWARD));
      /* The lowest unit that is not finished is named: 0 from the first use of its tied tensor. */
      must_fail(rank, mfsdp_step_end(t.runtime, 1), MFSDP_E_STATE,
                unit == 1 ? "step end: unit 0 has a tied tensor's gradients"
                          : "step end: unit 0 is still acquired (2 times); release it first");
      MFSDP_TRY(mfsdp_unit_grads(t.runtime, unit));
      for (int32_t i : job.model.unit_tensors(unit))
        ref::synthetic_backward(job.model.seed, 0, rank.rank, i, ref::Sample::kPresent,
                                static_cast<const float *>(mfsdp_unit_param(t.runtime, i)),
                                job.model.at(i).numel(),
                                static_cast<float *>(mfsdp_unit_grad(t.runtime, i)));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, unit));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, unit));
      must_fail(rank, mfsdp_step_end(t.runtime, 1), MFSDP_E_STATE,
                unit > 0 ? "step end: unit 0 has a tied tensor's gradients that were not reduced"
                         : "step end: unit 0 has open gradients that were not reduced");
      require(before.sent[MFSDP_TRAFFIC_SCALAR].wire_nbytes ==
                  rank.context.counters.sent[MFSDP_TRAFFIC_SCALAR].wire_nbytes,
              "a refused end sends nothing");
      MFSDP_TRY(mfsdp_unit_reduce(t.runtime, unit));
    }
    MFSDP_TRY(t.end());
    require(t.verdict.stop == 0, "the stop of a refused end is not kept");
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(StepEnd, WithOpenGradientsOfAnUntiedUnit) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(mfsdp_unit_grads(t.runtime, 2));
    must_fail(rank, mfsdp_step_end(t.runtime, 0), MFSDP_E_STATE, "unit 2 has open gradients");
    MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 2));
    MFSDP_TRY(t.end());
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Verdict, BeforeAnyStepAndIntoWrongRecords) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    mfsdp_verdict verdict = mfsdp_verdict_default();
    MFSDP_TRY(t.create());
    must_fail(rank, mfsdp_step_verdict(t.runtime, &verdict), MFSDP_E_STATE,
              "no step has ended yet");
    MFSDP_TRY(t.step(0));
    must_fail(rank, mfsdp_step_verdict(t.runtime, nullptr), MFSDP_E_ARGUMENT, "out is NULL");
    verdict.struct_nbytes = 8;
    must_fail(rank, mfsdp_step_verdict(t.runtime, &verdict), MFSDP_E_ARGUMENT,
              "use mfsdp_verdict_default");
    verdict = mfsdp_verdict_default();
    MFSDP_TRY(mfsdp_step_verdict(t.runtime, &verdict)); /* may be asked twice */
    require(std::memcmp(&verdict, &t.verdict, sizeof(verdict)) == 0, "and says the same");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Verdict, IsTakenInByTheNextStepToo) { /* mfsdp_step_verdict is not a duty */
  Job job = test::small_job();
  job.script.sample = [](int64_t step, int64_t, int32_t) {
    return step == 1 ? ref::Sample::kInf : ref::Sample::kPresent;
  };
  const test::Expected expected(job, 2, 3);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < 2; ++s) {
      MFSDP_TRY(t.begin(s));
      MFSDP_TRY(t.micro_batch(s, 0));
      MFSDP_TRY(mfsdp_step_end(t.runtime, 0));
    }
    MFSDP_TRY(t.step(2));
    require(mfsdp_runtime_skipped_steps(t.runtime) == 1, "skips are counted without asking");
    t.compare(expected, 2);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A step that ranks began differently: every rank is told, by the verdict or by the next begin; no
 * rank has updated anything, and training goes on. */
TEST(StepBegin, DifferentOnOneRank) {
  const Job job = test::small_job();
  const test::Expected expected(job, 6, 1);
  using Change = std::function<void(mfsdp_step_desc *)>;
  const std::vector<Change> changes = {
      [](mfsdp_step_desc *d) { d->lr_factor *= 1.0000001; },
      [](mfsdp_step_desc *d) { d->grad_weight *= 2.0; },
  };
  for (const Change &change : changes)
    for (const bool by_begin : {false, true})
      for (const int32_t culprit : {0, 2}) {
        const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
          Trainer t(&rank, &job, 2);
          mfsdp_verdict verdict = mfsdp_verdict_default();
          mfsdp_progress progress = mfsdp_progress_default();
          MFSDP_TRY(t.create());
          mfsdp_step_desc desc = t.step_desc(0);
          if (rank.rank == culprit) change(&desc);
          MFSDP_TRY(mfsdp_step_begin(t.runtime, &desc));
          for (int32_t m = 0; m < 2; ++m)
            MFSDP_TRY(t.micro_batch(0, m));
          MFSDP_TRY(mfsdp_step_end(t.runtime, 0));
          const mfsdp_status status =
              by_begin ? t.begin(0) : mfsdp_step_verdict(t.runtime, &verdict);
          must_fail(rank, status, MFSDP_E_MISMATCH,
                    "step 0: rank " + std::to_string(culprit == 0 ? 1 : 2) +
                        " began it with another mfsdp_step_desc than rank 0");
          require(mfsdp_context_error(&rank.context)->culprit == (culprit == 0 ? 1 : 2),
                  "the culprit");
          MFSDP_TRY(mfsdp_step_verdict(t.runtime, &verdict));
          require(verdict.skipped == 1 && verdict.applied_steps == 0, "the step was not skipped");
          MFSDP_TRY(mfsdp_runtime_progress(t.runtime, &progress));
          require(progress.step == 1 && progress.skipped_steps == 1, "the counts");
          progress = mfsdp_progress_default(); /* as the oracle counts */
          MFSDP_TRY(mfsdp_runtime_resume(t.runtime, &progress));
          MFSDP_TRY(t.step(0));
          t.compare(expected, 0);
          return t.destroy();
        });
        EXPECT_TRUE(result.ok()) << result.text();
      }
}

/* More micro-batches on one rank: nobody finds a partner for the last of them. */
TEST(StepBegin, MicroBatchesOfOneRank) {
  for (const int32_t debug_check : {0, 1}) {
    Job job = test::small_job();
    job.debug_check = debug_check;
    test::RanksOptions options = test::ranks_of(job, 3);
    options.world.deadline_us = 2 * 1000000;
    const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
      Trainer t(&rank, &job, rank.rank == 1 ? 2 : 1);
      MFSDP_TRY(t.create());
      const mfsdp_status status = t.step(0);
      const std::string message = mfsdp_context_error(&rank.context)->message;
      require(status != MFSDP_OK && !message.empty(), "a step of unequal length");
      must_fail(rank, t.begin(1), MFSDP_E_POISONED, "refused after the first error");
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Counts that were resumed differently show in the next verdict. */
TEST(StepBegin, ResumedDifferently) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    mfsdp_progress progress = mfsdp_progress_default();
    MFSDP_TRY(t.create());
    progress.step = progress.applied_steps = 5 + rank.rank;
    MFSDP_TRY(mfsdp_runtime_resume(t.runtime, &progress));
    must_fail(rank, t.step(0), MFSDP_E_MISMATCH, "rank 1 began it with another mfsdp_step_desc");
    must_fail(rank, t.step(0), MFSDP_E_MISMATCH, "or after other steps");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
