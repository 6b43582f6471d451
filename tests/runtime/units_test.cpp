/* SPDX-License-Identifier: MIT */
/* Acquire, release, gradients and reduce in the wrong order: a status, a message, nothing changed.
 */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

/* Unit 0 owns a tensor tied to unit 3; unit 2 has a frozen tensor and nothing else. */
Job tied_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::matrix("a", 1, 12, 10));
  job.model.tensors.push_back(ref::frozen("mask", 2, {10}));
  job.model.tensors.push_back(ref::matrix("b", 3, 10, 14));
  job.model.tensors.push_back(ref::tied("head", 3, job.model.tensors[0]));
  job.options.clip_norm = 2.0;
  return job;
}

TEST(Acquire, UnknownUnitsAndUses) {
  EXPECT_EQ(test::survives(
                test::small_job(), 2, 1,
                [](Rank &rank, Trainer &t) {
                  for (const int32_t unit : {-1, 3, INT32_MAX}) {
                    const std::string text =
                        "unit " + std::to_string(unit) + " does not exist, needs 0 to 2";
                    must_fail(rank, mfsdp_unit_acquire(t.runtime, unit, MFSDP_USE_FORWARD),
                              MFSDP_E_ARGUMENT, text);
                    must_fail(rank, mfsdp_unit_release(t.runtime, unit), MFSDP_E_ARGUMENT, text);
                    must_fail(rank, mfsdp_unit_grads(t.runtime, unit), MFSDP_E_ARGUMENT, text);
                    must_fail(rank, mfsdp_unit_reduce(t.runtime, unit), MFSDP_E_ARGUMENT, text);
                  }
                  must_fail(rank, mfsdp_unit_acquire(t.runtime, 0, static_cast<mfsdp_use>(0)),
                            MFSDP_E_ARGUMENT, "acquire unit 0: unknown use 0");
                  require(mfsdp_unit_param(t.runtime, 0) == nullptr, "nothing is acquired");
                  return MFSDP_OK;
                }),
            "");
}

TEST(Acquire, CountsAndKeepsTheAddress) {
  EXPECT_EQ(test::survives(test::small_job(), 2, 1,
                           [](Rank &rank, Trainer &t) {
                             const mfsdp_traffic_count *sent =
                                 &rank.context.counters.sent[MFSDP_TRAFFIC_MATERIALIZE];
                             MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_FORWARD));
                             const void *address = mfsdp_unit_param(t.runtime, 1);
                             const uint64_t payload_nbytes = sent->payload_nbytes;
                             require(address != nullptr, "acquired");
                             for (int i = 0; i < 3; ++i)
                               MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_BACKWARD));
                             require(sent->payload_nbytes == payload_nbytes,
                                     "only the first acquire gathers");
                             for (int i = 0; i < 3; ++i)
                               MFSDP_TRY(mfsdp_unit_release(t.runtime, 1));
                             require(mfsdp_unit_param(t.runtime, 1) == address,
                                     "pinned until the matching release");
                             MFSDP_TRY(mfsdp_unit_release(t.runtime, 1));
                             require(mfsdp_unit_param(t.runtime, 1) == nullptr,
                                     "no address after the last release");
                             must_fail(rank, mfsdp_unit_release(t.runtime, 1), MFSDP_E_STATE,
                                       "release unit 1: it is not acquired");
                             return MFSDP_OK;
                           }),
            "");
}

TEST(Acquire, BeyondActiveUnitsChangesNothing) {
  EXPECT_EQ(
      test::survives(
          test::small_job(), 2, 1,
          [](Rank &rank, Trainer &t) {
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_FORWARD));
            const mfsdp_counters before = rank.context.counters;
            const float *a = static_cast<const float *>(mfsdp_unit_param(t.runtime, 1));
            const std::vector<float> copy(a, a + 120);
            must_fail(
                rank, mfsdp_unit_acquire(t.runtime, 2, MFSDP_USE_FORWARD), MFSDP_E_STATE,
                "acquire unit 2: needs 1 parameter slots, 0 of 1 are free; release a unit or raise "
                "active_units");
            require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0,
                    "nothing was sent");
            require(mfsdp_unit_param(t.runtime, 4) == nullptr, "the refused unit is not acquired");
            must_fail(rank, mfsdp_unit_release(t.runtime, 2), MFSDP_E_STATE, "it is not acquired");
            require(std::memcmp(copy.data(), a, 120 * sizeof(float)) == 0,
                    "the held unit is untouched");
            return mfsdp_unit_release(t.runtime, 1);
          }),
      "");
}

TEST(Acquire, TiedUnitsTakeTheirOwnerAlong) {
  EXPECT_EQ(
      test::survives(
          tied_job(), 2, 1,
          [](Rank &rank, Trainer &t) {
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 3, MFSDP_USE_FORWARD));
            require(mfsdp_unit_param(t.runtime, 4) != nullptr &&
                        mfsdp_unit_param(t.runtime, 4) == mfsdp_unit_param(t.runtime, 0),
                    "an alias is its owner's tensor");
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 0,
                                         MFSDP_USE_FORWARD)); /* held already: no new slot */
            MFSDP_TRY(mfsdp_unit_release(t.runtime, 3));
            require(mfsdp_unit_param(t.runtime, 0) != nullptr,
                    "the owner's own acquire still counts");
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_FORWARD));
            const mfsdp_counters before = rank.context.counters;
            must_fail(rank, mfsdp_unit_acquire(t.runtime, 3, MFSDP_USE_FORWARD), MFSDP_E_STATE,
                      "acquire unit 3: needs 1 parameter slots, 0 of 2 are free");
            MFSDP_TRY(mfsdp_unit_release(t.runtime, 0));
            must_fail(rank, mfsdp_unit_acquire(t.runtime, 3, MFSDP_USE_FORWARD), MFSDP_E_STATE,
                      "acquire unit 3: needs 2 parameter slots, 1 of 2 are free");
            require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0,
                    "nothing was sent");
            require(mfsdp_unit_param(t.runtime, 0) == nullptr &&
                        mfsdp_unit_param(t.runtime, 3) == nullptr,
                    "neither of the two units was acquired");
            return mfsdp_unit_release(t.runtime, 1);
          }),
      "");
}

/* What an acquire took along is given back by its own release alone. */
TEST(Release, OwnerOfATiedUnitThatWasNotAcquiredItself) {
  EXPECT_EQ(test::survives(
                tied_job(), 2, 1,
                [](Rank &rank, Trainer &t) {
                  MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 3, MFSDP_USE_FORWARD));
                  const void *shared = mfsdp_unit_param(t.runtime, 4);
                  must_fail(rank, mfsdp_unit_release(t.runtime, 0), MFSDP_E_STATE,
                            "release unit 0: it is not acquired itself, only along with a unit");
                  require(shared != nullptr && mfsdp_unit_param(t.runtime, 4) == shared,
                          "the tied tensor is still there");
                  MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_FORWARD));
                  MFSDP_TRY(mfsdp_unit_release(t.runtime, 0));
                  must_fail(rank, mfsdp_unit_release(t.runtime, 0), MFSDP_E_STATE,
                            "it is not acquired itself");
                  require(mfsdp_unit_param(t.runtime, 4) == shared,
                          "the tied tensor is still there after the owner's own release");
                  MFSDP_TRY(mfsdp_unit_release(t.runtime, 3));
                  must_fail(rank, mfsdp_unit_release(t.runtime, 0), MFSDP_E_STATE,
                            "release unit 0: it is not acquired");
                  return MFSDP_OK;
                }),
            "");
}

TEST(Gradients, OutsideAStep) {
  EXPECT_EQ(test::survives(
                tied_job(), 2, 1,
                [](Rank &rank, Trainer &t) {
                  must_fail(rank, mfsdp_unit_grads(t.runtime, 1), MFSDP_E_STATE,
                            "gradients of unit 1: no step is open (mfsdp_step_begin)");
                  must_fail(rank, mfsdp_unit_reduce(t.runtime, 1), MFSDP_E_STATE,
                            "reduce unit 1: its gradients are not open (mfsdp_unit_grads)");
                  must_fail(rank, mfsdp_grad_absent(t.runtime, 1), MFSDP_E_STATE,
                            "absent gradient: the gradients of a are not open");
                  for (const int32_t param : {-1, 0, 1, 4, 5})
                    require(mfsdp_unit_grad(t.runtime, param) == nullptr, "no gradient is open");
                  return MFSDP_OK;
                }),
            "");
}

TEST(Gradients, OfAUnitWithoutAny) {
  const Job job = tied_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    for (const int32_t param : {-1, 5})
      must_fail(rank, mfsdp_grad_absent(t.runtime, param), MFSDP_E_ARGUMENT,
                "parameter " + std::to_string(param) + " does not exist");
    must_fail(rank, mfsdp_grad_absent(t.runtime, 2), MFSDP_E_ARGUMENT, "mask is frozen");
    for (int m = 0; m < 2; ++m) {
      must_fail(rank, mfsdp_unit_reduce(t.runtime, 2), MFSDP_E_STATE,
                "reduce unit 2: its gradients");
      MFSDP_TRY(mfsdp_unit_grads(t.runtime, 2));
      require(mfsdp_unit_grad(t.runtime, 2) == nullptr, "frozen");
      must_fail(rank, mfsdp_unit_grads(t.runtime, 2), MFSDP_E_STATE,
                "gradients of unit 2: already open");
      MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 2));
    }
    must_fail(rank, mfsdp_unit_grads(t.runtime, 2), MFSDP_E_STATE,
              "all 2 micro-batches announced in mfsdp_step_begin are reduced");
    MFSDP_TRY(t.end());
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* One whole step by hand, with the oracle behind it. */
TEST(Gradients, WrongCallsAroundEveryCorrectOne) {
  const Job job = tied_job();
  const test::Expected expected(job, 2, 2);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    MFSDP_TRY(t.begin(1));
    for (int32_t unit = 4; unit-- > 0;) {
      must_fail(rank, mfsdp_unit_reduce(t.runtime, unit), MFSDP_E_STATE, "are not open");
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, unit, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_unit_grads(t.runtime, unit));
      must_fail(rank, mfsdp_unit_grads(t.runtime, unit), MFSDP_E_STATE, "already open");
      if (unit == 1) /* 2 slots, one of them still borrowed by the tied tensor */
        must_fail(rank, mfsdp_unit_grads(t.runtime, 3), MFSDP_E_STATE, "micro-batches announced");
      if (unit == 3) {
        must_fail(rank, mfsdp_unit_grads(t.runtime, 1), MFSDP_E_STATE,
                  "gradients of unit 1: need 1 gradient slots, 0 of 2 are free; reduce a unit or "
                  "raise active_grads");
        require(mfsdp_unit_grad(t.runtime, 0) == nullptr, "borrowed, not open");
        require(mfsdp_unit_grad(t.runtime, 4) != nullptr, "open by its alias");
      }
      for (int32_t i : job.model.unit_tensors(unit))
        if (job.model.at(i).role != ref::Role::kFrozen)
          ref::synthetic_backward(job.model.seed, 1, rank.rank, i, ref::Sample::kPresent,
                                  static_cast<const float *>(mfsdp_unit_param(t.runtime, i)),
                                  job.model.at(i).numel(),
                                  static_cast<float *>(mfsdp_unit_grad(t.runtime, i)));
      MFSDP_TRY(mfsdp_unit_reduce(t.runtime, unit));
      must_fail(rank, mfsdp_unit_reduce(t.runtime, unit), MFSDP_E_STATE, "are not open");
      must_fail(rank, mfsdp_unit_grads(t.runtime, unit), MFSDP_E_STATE, "all 1 micro-batches");
      MFSDP_TRY(mfsdp_unit_release(t.runtime, unit));
      must_fail(rank, mfsdp_unit_release(t.runtime, unit), MFSDP_E_STATE, "it is not acquired");
    }
    MFSDP_TRY(mfsdp_step_value(t.runtime, ref::synthetic_value(job.model.seed, 1, rank.rank)));
    MFSDP_TRY(t.end());
    t.compare(expected, 1);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Gradients, OwnersOfTiedTensorsAreReducedLast) {
  const Job job = tied_job();
  const test::Expected expected(job, 2, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(mfsdp_unit_grads(t.runtime, 0));
    MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 0));
    must_fail(rank, mfsdp_unit_grads(t.runtime, 3), MFSDP_E_STATE,
              "unit 0, which owns a tensor tied to it, is reduced already");
    MFSDP_TRY(t.end()); /* nothing is left open: the step can end */
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Gradients, StartAsZerosInEveryMicroBatch) {
  Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    for (int m = 0; m < 2; ++m)
      for (int32_t unit = 3; unit-- > 0;) {
        MFSDP_TRY(mfsdp_unit_grads(t.runtime, unit));
        for (int32_t i : job.model.unit_tensors(unit)) {
          float *grad = static_cast<float *>(mfsdp_unit_grad(t.runtime, i));
          for (int64_t k = 0; k < job.model.at(i).numel(); ++k) {
            require(grad[k] == 0.0f, "a fresh gradient is not zero");
            grad[k] = 7.0f;
          }
        }
        MFSDP_TRY(mfsdp_unit_reduce(t.runtime, unit));
      }
    MFSDP_TRY(t.end());
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
