/* SPDX-License-Identifier: MIT */
/* threads_run.h: every rank has all it needs; one that fails ends the others' waits and is named. */
#include "mfsdp/host/threads_run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include <unistd.h>

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

/* A body's own status, without a word or after an error that it got over. */
mfsdp_status only_says_no(mfsdp_threads_rank *rank, void *user) {
  int64_t own = 0, all[4];
  if (rank->rank == 2) {
    if (user != nullptr) (void)MFSDP_FAIL(&rank->context, MFSDP_E_FORMAT, "got over it");
    return MFSDP_E_IO;
  }
  return rank->control.ops->allgather(rank->control.self, &rank->context, &own, sizeof(own), all,
                                      rank->control.deadline_us);
}

TEST_F(ThreadsRun, AFailureWithoutAMessageIsTheOneToTell) {
  int after = 1;
  desc.threads.world = 4;
  desc.threads.deadline_us = 600000000;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, only_says_no, nullptr), MFSDP_E_IO);
  EXPECT_EQ(message(), "rank 2: ended with MFSDP_E_IO and no message");
  EXPECT_EQ(mfsdp_context_error(&context)->culprit, 2);
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, only_says_no, &after), MFSDP_E_IO);
  EXPECT_EQ(message(),
            "rank 2: ended with MFSDP_E_IO; its last error was MFSDP_E_FORMAT: got over it");
}

/* Rank 1 leaves; whoever waits for it blames it. */
mfsdp_status second_leaves(mfsdp_threads_rank *rank, void *user) {
  return rank->rank == 1 ? MFSDP_OK : only_says_no(rank, user);
}

TEST_F(ThreadsRun, TheCulpritIsKept) {
  desc.threads.world = 2;
  desc.threads.deadline_us = 600000000;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, second_leaves, nullptr), MFSDP_E_PEER);
  EXPECT_EQ(mfsdp_context_error(&context)->culprit, 1) << message();
}

/* Rank 1 fails and leaves a queue that goes on reading what its rank was given. */
mfsdp_status keep_reading(void *user, mfsdp_error *) {
  for (int i = 0; i < 300; ++i) {
    const volatile int32_t *world = &static_cast<mfsdp_threads_rank *>(user)->world;
    if (*world != 2) return MFSDP_E_STATE;
    usleep(1);
  }
  return MFSDP_OK;
}

struct Left {
  mfsdp_queue *queue = nullptr;
  const mfsdp_backend *backend = nullptr;
  mfsdp_threads_rank *rank = nullptr;
};

mfsdp_status leaves_a_queue(mfsdp_threads_rank *rank, void *user) {
  Left *left = static_cast<Left *>(user);
  const mfsdp_backend_ops *ops = rank->backend->ops;
  if (rank->rank == 0) return only_says_no(rank, nullptr);
  MFSDP_TRY(ops->queue_create(rank->backend->self, &rank->context, "left", &left->queue));
  MFSDP_TRY(ops->queue_call(rank->backend->self, left->queue, keep_reading, rank));
  left->backend = rank->backend;
  left->rank = rank;
  return MFSDP_FAIL(&rank->context, MFSDP_E_IO, "no more data");
}

TEST(ThreadsRunLeft, WhatTheQueuesOfAFailedBodyUseStays) {
  static Left left; /* so that what is kept is no leak */
  static mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  desc.threads.world = 2;
  desc.threads.deadline_us = 600000000;
  desc.host.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  EXPECT_EQ(mfsdp_threads_run(&context, &desc, leaves_a_queue, &left), MFSDP_E_IO);
  EXPECT_STREQ(mfsdp_context_error(&context)->message, "rank 1: no more data");
  ASSERT_NE(left.queue, nullptr);
  const mfsdp_backend_ops *ops = left.backend->ops;
  mfsdp_event *event = nullptr;
  ASSERT_EQ(ops->event_create(left.backend->self, &left.rank->context, &event), MFSDP_OK);
  ASSERT_EQ(ops->event_record(left.backend->self, left.queue, event), MFSDP_OK);
  EXPECT_EQ(ops->event_wait(left.backend->self, &left.rank->context, event, 60000000), MFSDP_OK);
  ops->event_destroy(left.backend->self, &left.rank->context, event);
  ops->queue_destroy(left.backend->self, &left.rank->context, left.queue);
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
