/* SPDX-License-Identifier: MIT */
/* threads_run.h: every rank has all it needs; one that fails ends the others' waits and is named. */
#include "mfsdp/host/threads_run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

namespace {

class ThreadsRun : public ::testing::Test {
protected:
  void SetUp() override {
    const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  }
  void TearDown() override { EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK); }
  std::string message() { return mfsdp_context_error(&context)->message; }
  mfsdp_context context;
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
};

/* All ranks give their number; each adds up what it got. */
mfsdp_status add_up(mfsdp_threads_rank *rank, void *user) {
  int64_t own = rank->rank + 1, all[8], sum = 0;
  MFSDP_TRY(rank->control.ops->allgather(rank->control.self, &rank->context, &own, sizeof(own), all,
                                         rank->control.deadline_us));
  for (int32_t r = 0; r < rank->world; ++r)
    sum += all[r];
  *static_cast<std::atomic<int64_t> *>(user) += sum;
  return rank->backend == rank->transport.backend && rank->context.desc.rank == rank->rank
             ? MFSDP_OK
             : MFSDP_FAIL(&rank->context, MFSDP_E_STATE, "the parts do not fit");
}

TEST_F(ThreadsRun, EveryRankMeetsTheOthers) {
  for (int32_t world : {1, 2, 8}) {
    std::atomic<int64_t> sum(0);
    desc.threads.world = world;
    ASSERT_EQ(mfsdp_threads_run(&context, &desc, add_up, &sum), MFSDP_OK) << message();
    EXPECT_EQ(sum, world * world * (world + 1) / 2);
  }
}

/* Rank 2 fails while the others wait for it. */
mfsdp_status third_fails(mfsdp_threads_rank *rank, void *user) {
  int64_t own = 0, all[4];
  mfsdp_status status;
  MFSDP_TRY(rank->control.ops->allgather(rank->control.self, &rank->context, &own, sizeof(own), all,
                                         rank->control.deadline_us)); /* all are there */
  if (rank->rank == 2) return MFSDP_FAIL(&rank->context, MFSDP_E_FORMAT, "no such thing as %d", 7);
  status = rank->control.ops->allgather(rank->control.self, &rank->context, &own, sizeof(own), all,
                                        rank->control.deadline_us);
  if (status != MFSDP_OK) ++*static_cast<std::atomic<int> *>(user);
  return status;
}

TEST_F(ThreadsRun, AFailureIsNamedAndTheOthersLeave) {
  std::atomic<int> left(0);
  desc.threads.world = 4;
  desc.threads.deadline_us = 600000000; /* a wait that is not ended would be seen */
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, third_fails, &left), MFSDP_E_FORMAT);
  EXPECT_EQ(message(), "rank 2: no such thing as 7");
  EXPECT_EQ(left, 3);
}

mfsdp_status forgets(mfsdp_threads_rank *rank, void *user) {
  void **memory = static_cast<void **>(user);
  if (rank->rank == 1) return mfsdp_table_alloc(&rank->context, 1, 16, "something", memory);
  return MFSDP_OK;
}

TEST_F(ThreadsRun, WhatABodyForgetsIsSaid) {
  void *memory = nullptr;
  desc.threads.world = 2;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, forgets, &memory), MFSDP_E_STATE);
  EXPECT_EQ(message().find("rank 1: "), 0u) << message();
  context.desc.allocator.free(memory, 16, MFSDP_SPACE_HOST, context.desc.allocator.user);
}

TEST_F(ThreadsRun, BadCalls) {
  EXPECT_EQ(mfsdp_threads_run(&context, nullptr, add_up, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, nullptr, nullptr), MFSDP_E_ARGUMENT);
  desc.threads.world = 0;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, add_up, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("world is 0"), std::string::npos) << message();
  desc.threads.world = 2;
  desc.host.math_threads = -1;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, add_up, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("rank "), std::string::npos) << message();
}

} // namespace
