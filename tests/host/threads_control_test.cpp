/* SPDX-License-Identifier: MIT */
/*
 * The control plane of thread ranks.
 */
#include "mfsdp/host/threads_control.h"

#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <atomic>

#include <vector>

namespace {

using test::Rank;
using test::RanksOptions;
using test::RanksResult;
using test::run_ranks;

const int64_t kShortUs = 300000;
const int64_t kSlackUs = 2000000;

void expect_part(const std::string &text, const std::string &part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

mfsdp_status gather(Rank &rank, const void *in, std::size_t nbytes, void *out,
                    int64_t timeout_us = 20 * 1000000) {
  return rank.control.ops->allgather(rank.control.self, &rank.context, in, nbytes, out, timeout_us);
}

TEST(ThreadsControlTest, AllgatherInRankOrderManyTimes) {
  for (int32_t world : {1, 2, 3, 8, 64}) {
    const RanksResult result = run_ranks(RanksOptions(world), [](Rank &rank) {
      for (int round = 0; round < 200; ++round) {
        /* sizes change from round to round: 0, 8, 16, ... bytes */
        std::vector<int64_t> in(static_cast<std::size_t>(round % 5), rank.rank * 1000 + round);
        std::vector<int64_t> out(in.size() * static_cast<std::size_t>(rank.world), -1);
        MFSDP_TRY(gather(rank, in.data(), in.size() * 8, out.data()));
        for (std::size_t i = 0; i < out.size(); ++i)
          if (out[i] != static_cast<int64_t>(i / in.size()) * 1000 + round)
            return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "round %d: wrong message", round);
      }
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << "world " << world << "\n" << result.text();
  }
}

TEST(ThreadsControlTest, Rejects) {
  RanksOptions options(2);
  options.world.control_nbytes = 100;
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    char in[101] = {0}, out[202];
    mfsdp_control other;
    EXPECT_EQ(gather(rank, in, 101, out), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "nbytes is 101, this world was made for at most 100");
    EXPECT_EQ(gather(rank, nullptr, 1, out), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "in is NULL and nbytes is 1");
    EXPECT_EQ(gather(rank, in, 1, nullptr), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "out is NULL");
    EXPECT_EQ(gather(rank, in, 1, out, 0), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "timeout_us is 0");
    EXPECT_EQ(rank.control.ops->probe(rank.control.self, &rank.context, nullptr, 1),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_threads_control_create(&rank.context, rank.shared, rank.rank, &other),
              MFSDP_E_STATE);
    expect_part(rank.context.error.message,
                "threads control: rank " + std::to_string(rank.rank) + " has joined already");
    EXPECT_EQ(mfsdp_threads_control_create(&rank.context, rank.shared, 2, &other),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_threads_control_create(&rank.context, nullptr, 0, &other), MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_threads_control_create(&rank.context, rank.shared, 0, nullptr),
              MFSDP_E_ARGUMENT);
    return gather(rank, in, 100, out); /* none of this has hurt the world */
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(ThreadsControlTest, DifferentSizesAreAnErrorOnAllRanks) {
  const RanksResult result = run_ranks(RanksOptions(3), [](Rank &rank) {
    char in[16] = {0}, out[48];
    return gather(rank, in, rank.rank == 2 ? 16 : 8, out);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
    expect_part(result[r].error.message, "rank 0 brings 8 bytes, rank 2 brings 16");
  }
}

TEST(ThreadsControlTest, TimeOutNamesAllWhoDidNotCome) {
  std::atomic<int64_t> first_us(INT64_MAX); /* who began to wait first ends the wait of both */
  const RanksResult result = run_ranks(RanksOptions(4), [&](Rank &rank) {
    const int64_t start_us = mfsdp_clock_us();
    if (rank.rank % 2 == 1) {
      mfsdp_clock_sleep_until(start_us + 3 * kShortUs);
      return rank.barrier();
    }
    for (int64_t first = first_us; start_us < first;)
      if (first_us.compare_exchange_weak(first, start_us)) break;
    const mfsdp_status status = gather(rank, nullptr, 0, nullptr, kShortUs);
    EXPECT_GE(mfsdp_clock_us() - first_us, kShortUs);
    EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
    return status;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r : {std::size_t(0), std::size_t(2)}) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[r].error.culprit, 1);
    EXPECT_GE(test::waited_ms(result[r].error.message), kShortUs / 1000);
    expect_part(result[r].error.message, "; rank 1 has not come and does not answer");
    expect_part(result[r].error.message, "; rank 3 has not come and does not answer");
    EXPECT_STREQ(result[r].error.message, result[0].error.message);
  }
  for (std::size_t r : {std::size_t(1), std::size_t(3)})
    EXPECT_EQ(result[r].status, MFSDP_E_POISONED) << result.text();
}

TEST(ThreadsControlTest, ALeavingRankIsNoticedAtOnce) {
  for (int before = 0; before < 2; ++before) {
    const RanksResult result = run_ranks(RanksOptions(3), [before](Rank &rank) {
      const int64_t start_us = mfsdp_clock_us();
      if (rank.rank == 1) {
        if (!before) mfsdp_clock_sleep_until(start_us + 50000);
        mfsdp_threads_control_destroy(&rank.control);
        EXPECT_NE(mfsdp_threads_control_create(&rank.context, rank.shared, 1, &rank.control),
                  MFSDP_OK)
            << "a rank that has left does not come back";
        return MFSDP_OK;
      }
      if (before) mfsdp_clock_sleep_until(start_us + 50000);
      const mfsdp_status status = rank.barrier();
      EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs) << "the deadline is 20 s";
      if (status != MFSDP_E_POISONED) return status;
      return rank.transport.ops->poll(rank.transport.self, &rank.context);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_EQ(result[1].status, MFSDP_OK);
    for (std::size_t r = 0; r < 3; r += 2) {
      EXPECT_EQ(result[r].status, MFSDP_E_PEER) << result.text();
      EXPECT_EQ(result[r].error.culprit, 1);
      expect_part(result[r].error.message, "waits for rank 1, which has left");
    }
  }
}

/* Leaving after a meeting is not leaving during it. */
TEST(ThreadsControlTest, LeavingAfterTheLastMeetingHurtsNobody) {
  for (int attempt = 0; attempt < 50; ++attempt) {
    const RanksResult result =
        run_ranks(RanksOptions(4), [](Rank &rank) { return rank.barrier(); });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(ThreadsControlTest, ProbeKnowsWhoIsThere) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_threads_world *world = nullptr;
  mfsdp_control controls[2];
  uint8_t alive[3] = {9, 9, 9};
  desc.world = 3;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  ASSERT_EQ(mfsdp_threads_world_create(&context, &desc, &world), MFSDP_OK);
  for (int32_t r = 0; r < 2; ++r)
    ASSERT_EQ(mfsdp_threads_control_create(&context, world, r, &controls[r]), MFSDP_OK);
  const mfsdp_control_ops *ops = controls[0].ops;
  EXPECT_EQ(ops->probe(controls[0].self, &context, alive, 1000), MFSDP_OK);
  EXPECT_EQ(alive[0], 1);
  EXPECT_EQ(alive[1], 1);
  EXPECT_EQ(alive[2], 0) << "never joined";
  mfsdp_threads_control_destroy(&controls[1]);
  EXPECT_EQ(controls[1].self, nullptr);
  mfsdp_threads_control_destroy(&controls[1]); /* a cleared one is allowed */
  EXPECT_EQ(ops->probe(controls[0].self, &context, alive, 1000), MFSDP_OK);
  EXPECT_EQ(alive[1], 0) << "left";
  mfsdp_threads_world_poison(world, nullptr); /* a probe works when nothing else does */
  EXPECT_EQ(ops->probe(controls[0].self, &context, alive, 1000), MFSDP_OK);
  EXPECT_EQ(alive[0], 1);
  const int64_t now_us = ops->now_us(controls[0].self);
  EXPECT_GT(now_us, 0);
  EXPECT_GE(ops->now_us(controls[0].self), now_us);
  mfsdp_threads_control_destroy(&controls[0]);
  EXPECT_EQ(mfsdp_threads_world_destroy(&context, world), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

} // namespace
