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

} // namespace
