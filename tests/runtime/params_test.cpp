/* SPDX-License-Identifier: MIT */
/* Initial values and export. */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

TEST(Init, WrongTimes) {
  Job job = test::small_job();
  EXPECT_EQ(test::survives(
                job, 2, 1,
                [&](Rank &rank, Trainer &t) {
                  must_fail(rank, mfsdp_runtime_init(t.runtime, nullptr, nullptr), MFSDP_E_ARGUMENT,
                            "init: fill is NULL");
                  MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_EVALUATE));
                  must_fail(rank, mfsdp_runtime_init(t.runtime, Trainer::init, &job.model),
                            MFSDP_E_STATE, "init: unit 1 is acquired");
                  return mfsdp_unit_release(t.runtime, 1);
                },
                [&](Rank &rank, Trainer &t) {
                  must_fail(rank, mfsdp_runtime_init(t.runtime, Trainer::init, &job.model),
                            MFSDP_E_STATE, "init: a step is open");
                  return MFSDP_OK;
                }),
            "");
}

/* Every owned element is asked for once, frozen ones too, aliases never. */
TEST(Init, AsksForEveryOwnedElementOnce) {
  const Job job = test::mixed_job();
  struct Asked {
    std::vector<std::vector<int>> times;
  };
  std::vector<Asked> asked(3);
  for (Asked &a : asked)
    for (const ref::Tensor &t : job.model.tensors)
      a.times.emplace_back(static_cast<std::size_t>(t.numel()), 0);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime());
    MFSDP_TRY(mfsdp_runtime_init(
        t.runtime,
        [](void *user, int32_t param, int64_t first, int64_t count, float *dst) {
          for (int64_t i = 0; i < count; ++i) {
            ++static_cast<Asked *>(user)
                  ->times.at(static_cast<std::size_t>(param))
                  .at(static_cast<std::size_t>(first + i));
            dst[i] = static_cast<float>(param) + static_cast<float>(first + i) / 16384.0f;
          }
        },
        &asked[static_cast<std::size_t>(rank.rank)]));
    for (int32_t i = 0; i < job.model.count(); ++i) {
      std::vector<float> got(static_cast<std::size_t>(job.model.at(i).numel()));
      MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, got.data()));
      for (std::size_t k = 0; k < got.size(); ++k)
        require(got[k] == static_cast<float>(job.model.owner(i)) + static_cast<float>(k) / 16384.0f,
                "an element is not where it belongs");
    }
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (int32_t i = 0; i < job.model.count(); ++i)
    for (std::size_t k = 0; k < static_cast<std::size_t>(job.model.at(i).numel()); ++k) {
      int times = 0;
      for (const Asked &a : asked)
        times += a.times[static_cast<std::size_t>(i)][k];
      ASSERT_EQ(times, job.model.owner(i) == i ? 1 : 0) << job.model.at(i).name << " " << k;
    }
}

TEST(Init, ParametersAreZerosBefore) {
  const Job job = test::mixed_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime());
    for (int32_t i = 0; i < job.model.count(); ++i) {
      std::vector<float> got(static_cast<std::size_t>(job.model.at(i).numel()), 1.0f);
      MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, got.data()));
      for (const float x : got)
        require(x == 0.0f, "not zero");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Export, WrongArgumentsAndNoSlot) {
  const Job job = test::small_job();
  EXPECT_EQ(test::survives(
                job, 2, 1,
                [](Rank &rank, Trainer &t) {
                  std::vector<float> dst(1000);
                  const mfsdp_counters before = rank.context.counters;
                  for (const int32_t param : {-1, 5})
                    must_fail(rank, mfsdp_param_export(t.runtime, param, 0, dst.data()),
                              MFSDP_E_ARGUMENT,
                              "export: parameter " + std::to_string(param) +
                                  " to root 0; needs 0 to 4, and -1 to 1");
                  for (const int32_t root : {-2, 2})
                    must_fail(rank, mfsdp_param_export(t.runtime, 0, root, dst.data()),
                              MFSDP_E_ARGUMENT, "to root " + std::to_string(root));
                  must_fail(rank, mfsdp_param_export(t.runtime, 0, -1, nullptr), MFSDP_E_ARGUMENT,
                            "export: dst is NULL on a receiving rank");
                  must_fail(rank, mfsdp_param_export(t.runtime, 0, rank.rank, nullptr),
                            MFSDP_E_ARGUMENT, "dst is NULL");
                  require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0,
                          "nothing was sent");
                  MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_EVALUATE));
                  must_fail(rank, mfsdp_param_export(t.runtime, 0, -1, dst.data()), MFSDP_E_STATE,
                            "export: all 1 parameter slots are held; release a unit first");
                  return mfsdp_unit_release(t.runtime, 1);
                }),
            "");
}

TEST(Export, ToOneRootMovesBytesToThatRootOnly) {
  const Job job = test::mixed_job();
  const int32_t world = 4;
  std::vector<uint64_t> sent(static_cast<std::size_t>(world) * 4);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    std::vector<float> want(12000), got(12000);
    MFSDP_TRY(t.create());
    ref::synthetic_init(job.model.seed, 0, 0, 12000, want.data());
    for (int32_t root = 0; root < world; ++root) {
      const uint64_t before = rank.context.counters.sent[MFSDP_TRAFFIC_EXPORT].payload_nbytes;
      std::fill(got.begin(), got.end(), 0.0f);
      MFSDP_TRY(mfsdp_param_export(t.runtime, 0, root, rank.rank == root ? got.data() : nullptr));
      require(rank.rank != root || got == want, "the root's copy");
      sent[static_cast<std::size_t>(root * world + rank.rank)] =
          rank.context.counters.sent[MFSDP_TRAFFIC_EXPORT].payload_nbytes - before;
    }
    /* An alias gives its owner's tensor, also while a step is open. */
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(mfsdp_param_export(t.runtime, 19, -1, got.data()));
    require(got == want, "an alias");
    MFSDP_TRY(t.end());
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (int32_t root = 0; root < world; ++root) {
    uint64_t sum = 0;
    for (int32_t r = 0; r < world; ++r)
      sum += sent[static_cast<std::size_t>(root * world + r)];
    EXPECT_EQ(sent[static_cast<std::size_t>(root * world + root)], 0u);
    /* All of the tensor but what the root owns: canonical blocks of 4096 on some of the ranks. */
    EXPECT_LE(sum, 12000u * 4);
    EXPECT_GE(sum, (12000u - 8192) * 4);
  }
}

/* ---- progress ---- */

TEST(Progress, WrongCallsAndCounts) {
  const Job job = test::small_job();
  const auto calls = [](Rank &rank, Trainer &t) {
    mfsdp_progress now = mfsdp_progress_default(), bad;
    MFSDP_TRY(mfsdp_runtime_progress(t.runtime, &now));
    require(now.step == 1 && now.applied_steps == 1 && now.skipped_steps == 0 &&
                test::same_bits(now.loss_scale, 1.0),
            "the counts after a step");
    bad = now;
    bad.struct_nbytes = 4;
    must_fail(rank, mfsdp_runtime_progress(t.runtime, &bad), MFSDP_E_ARGUMENT,
              "use mfsdp_progress_default");
    must_fail(rank, mfsdp_runtime_progress(t.runtime, nullptr), MFSDP_E_ARGUMENT, "out is NULL");
    must_fail(rank, mfsdp_runtime_resume(t.runtime, &bad), MFSDP_E_ARGUMENT,
              "use mfsdp_progress_default");
    must_fail(rank, mfsdp_runtime_resume(t.runtime, nullptr), MFSDP_E_ARGUMENT, "progress is NULL");
    for (int64_t mfsdp_progress::*field :
         {&mfsdp_progress::step, &mfsdp_progress::applied_steps, &mfsdp_progress::skipped_steps,
          &mfsdp_progress::steps_since_skip})
      for (const int64_t value : {INT64_MIN, INT64_C(-1), INT64_C(7), INT64_MAX}) {
        bad = now;
        bad.*field = value;
        must_fail(rank, mfsdp_runtime_resume(t.runtime, &bad), MFSDP_E_ARGUMENT,
                  std::to_string(value));
      }
    for (const int64_t all : {(INT64_C(1) << 53) + 1, INT64_MAX}) { /* a later step overflows */
      bad = now;
      bad.step = bad.applied_steps = bad.steps_since_skip = all;
      must_fail(rank, mfsdp_runtime_resume(t.runtime, &bad), MFSDP_E_ARGUMENT, "at most 2^53");
      bad.applied_steps = bad.steps_since_skip = 1;
      bad.skipped_steps = all - 1;
      must_fail(rank, mfsdp_runtime_resume(t.runtime, &bad), MFSDP_E_ARGUMENT, "at most 2^53");
    }
    for (const double scale : {0.0, -1.0, 2.0, std::nan(""), HUGE_VAL}) {
      bad = now;
      bad.loss_scale = scale;
      must_fail(rank, mfsdp_runtime_resume(t.runtime, &bad), MFSDP_E_ARGUMENT,
                "needs 1 to 1 (loss scaling is off)");
    }
    return MFSDP_OK;
  };
  const auto in_step = [](Rank &rank, Trainer &t) {
    mfsdp_progress progress = mfsdp_progress_default();
    must_fail(rank, mfsdp_runtime_progress(t.runtime, &progress), MFSDP_E_STATE, "a step is open");
    must_fail(rank, mfsdp_runtime_resume(t.runtime, &progress), MFSDP_E_STATE, "a step is open");
    return MFSDP_OK;
  };
  EXPECT_EQ(test::survives(job, 2, 1, calls, in_step), "");
}

/* What create gives, resume takes: the run goes on as if nothing had been said. */
TEST(Progress, OfThisRunChangesNothing) {
  const Job job = test::small_job();
  EXPECT_EQ(test::survives(job, 2, 2,
                           [](Rank &rank, Trainer &t) {
                             mfsdp_progress progress = mfsdp_progress_default();
                             mfsdp_verdict verdict = mfsdp_verdict_default();
                             MFSDP_TRY(mfsdp_runtime_progress(t.runtime, &progress));
                             MFSDP_TRY(mfsdp_runtime_resume(t.runtime, &progress));
                             must_fail(rank, mfsdp_step_verdict(t.runtime, &verdict), MFSDP_E_STATE,
                                       "no step has ended yet");
                             return MFSDP_OK;
                           }),
            "");
}

TEST(Progress, WithoutMemoryNothingChanges) {
  const Job job = test::small_job();
  EXPECT_EQ(test::survives(job, 2, 1,
                           [](Rank &rank, Trainer &t) {
                             mfsdp_progress progress = mfsdp_progress_default();
                             rank.memory->fail_at(0);
                             must_fail(rank, mfsdp_runtime_resume(t.runtime, &progress),
                                       MFSDP_E_MEMORY, "step scalars");
                             rank.memory->fail_at(-1);
                             MFSDP_TRY(mfsdp_runtime_progress(t.runtime, &progress));
                             require(progress.step == 1, "the counts were changed");
                             return MFSDP_OK;
                           }),
            "");
}

/* ---- what a rank owns ---- */

/* Every element of every tensor once, over all ranks, with the values of an export; and the numbers
 * that lead to the states. */
TEST(Owned, IsEverythingOnce) {
  for (const mfsdp_space space : {MFSDP_SPACE_DEVICE, MFSDP_SPACE_HOST})
    for (const bool narrow : {false, true}) {
      Job job = test::mixed_job();
      for (ref::Tensor &t : job.model.tensors)
        if (narrow) t.compute = MFSDP_BF16;
      job.tune = [space](mfsdp_runtime_desc *desc) { desc->state_space = space; };
      std::vector<std::vector<int>> seen;
      std::mutex mutex;
      for (int32_t i = 0; i < job.model.count(); ++i)
        seen.emplace_back(static_cast<std::size_t>(job.model.at(i).numel()), 0);
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        mfsdp_progress progress = mfsdp_progress_default();
        mfsdp_owned owned = mfsdp_owned_default();
        std::vector<std::vector<float>> full;
        int32_t count = 0, tensors = 0;
        MFSDP_TRY(t.create());
        MFSDP_TRY(t.step(0));
        for (int32_t i = 0; i < job.model.count(); ++i) {
          full.emplace_back(static_cast<std::size_t>(job.model.at(i).numel()));
          MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, full.back().data()));
        }
        MFSDP_TRY(mfsdp_runtime_progress(t.runtime, &progress));
        const mfsdp_optimizer_state *states =
            mfsdp_optimizer_states(mfsdp_runtime_optimizer(t.runtime), &count);
        while (mfsdp_owned_next(t.runtime, &owned)) {
          const std::size_t param = static_cast<std::size_t>(owned.param);
          const ref::Tensor &tensor = job.model.at(owned.param);
          const bool frozen = tensor.role == ref::Role::kFrozen;
          require(tensor.name == owned.name && tensor.tied_to.empty(), "the name");
          require((owned.tensor < 0) == frozen, "the number of its states");
          tensors += !frozen;
          for (int32_t i = 0; i < count; ++i)
            require(states[i].tensor != owned.tensor || states[i].count == owned.count, "states");
          require(owned.dtype ==
                      (frozen && owned.space == MFSDP_SPACE_DEVICE ? tensor.compute : MFSDP_F32),
                  "the dtype");
          bool right = true;
          for (int64_t k = 0; k < owned.count; ++k)
            right = right && test::same_bits(mfsdp_element_get(owned.data, owned.dtype, k),
                                             static_cast<double>(full[param].at(
                                                 static_cast<std::size_t>(owned.first + k))));
          require(right, "a value of " + tensor.name);
          std::lock_guard<std::mutex> lock(mutex);
          for (int64_t k = 0; k < owned.count; ++k)
            ++seen[param][static_cast<std::size_t>(owned.first + k)];
        }
        require(tensors == owned.tensor_count, "the count");
        require(!mfsdp_owned_next(t.runtime, &owned), "past the end");
        for (int32_t i = 0; i < count; ++i)
          require(states[i].tensor < tensors, "a state of nothing");
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
      for (int32_t i = 0; i < job.model.count(); ++i)
        EXPECT_EQ(seen[static_cast<std::size_t>(i)],
                  std::vector<int>(static_cast<std::size_t>(job.model.at(i).numel()),
                                   job.model.owner(i) == i ? 1 : 0))
            << job.model.at(i).name;
    }
}

} // namespace
