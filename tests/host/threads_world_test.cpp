/* SPDX-License-Identifier: MIT */
/*
 * The shared part of a world of thread ranks: its description, its memory, its end.
 */
#include "mfsdp/host/threads_world.h"

#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace {

class ThreadsWorldTest : public ::testing::Test {
protected:
  void SetUp() override {
    mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    context_desc.allocator = memory_.allocator();
    ASSERT_EQ(mfsdp_context_init(&context_, &context_desc), MFSDP_OK);
    desc_ = mfsdp_threads_world_desc_default();
  }
  void TearDown() override {
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK) << context_.error.message;
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(memory_.complaints(), "");
  }
  void expect_rejected(const char *part) {
    mfsdp_threads_world *world = reinterpret_cast<mfsdp_threads_world *>(this);
    EXPECT_EQ(mfsdp_threads_world_create(&context_, &desc_, &world), MFSDP_E_ARGUMENT) << part;
    EXPECT_EQ(world, nullptr);
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_NE(std::string(context_.error.message).find(part), std::string::npos)
        << context_.error.message;
    desc_ = mfsdp_threads_world_desc_default();
  }

  test::FaultAllocator memory_;
  mfsdp_context context_;
  mfsdp_threads_world_desc desc_;
};

TEST_F(ThreadsWorldTest, RejectsEachBadField) {
  const int32_t nodes[] = {0, -2};
  mfsdp_threads_world *world = nullptr;
  EXPECT_EQ(mfsdp_threads_world_create(&context_, nullptr, &world), MFSDP_E_ARGUMENT);
  EXPECT_STREQ(context_.error.message, "threads world: desc is NULL");
  EXPECT_EQ(mfsdp_threads_world_create(&context_, &desc_, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_STREQ(context_.error.message, "threads world: out is NULL");
  desc_.struct_nbytes = 8;
  expect_rejected("desc.struct_nbytes is 8");
  desc_.world = 0;
  expect_rejected("desc.world is 0, needs at least 1");
  desc_.deadline_us = 0;
  expect_rejected("desc.deadline_us is 0, needs to be positive");
  desc_.batch_count = 0;
  expect_rejected("desc.batch_count is 0, needs at least 1");
  desc_.batch_xfer_count = 0;
  expect_rejected("desc.batch_xfer_count is 0, needs at least 1");
  desc_.latency_us = -1;
  expect_rejected("desc.latency_us is -1, needs 0 to 1000000000");
  desc_.latency_us = 1000000001;
  expect_rejected("desc.latency_us is 1000000001");
  desc_.bytes_per_us = -2.5;
  expect_rejected("desc.bytes_per_us is -2.5, needs 0 (no limit) or 0.001 to 1e12");
  desc_.bytes_per_us = 1e-4;
  expect_rejected("desc.bytes_per_us is 0.0001");
  desc_.bytes_per_us = std::numeric_limits<double>::quiet_NaN();
  expect_rejected("desc.bytes_per_us is");
  desc_.world = 2;
  desc_.node_of_rank = nodes;
  expect_rejected("desc.node_of_rank[1] is -2, needs at least 0");
}

TEST_F(ThreadsWorldTest, SizesThatOverflowAreRejected) {
  mfsdp_threads_world *world = nullptr;
  desc_.world = 2;
  desc_.control_nbytes = SIZE_MAX / 2;
  EXPECT_EQ(mfsdp_threads_world_create(&context_, &desc_, &world), MFSDP_E_OVERFLOW);
  EXPECT_EQ(world, nullptr);
}

TEST_F(ThreadsWorldTest, EveryAllocationMayFail) {
  const int32_t nodes[] = {0, 0, 1};
  int64_t n = 0;
  desc_.world = 3;
  desc_.node_of_rank = nodes;
  for (;; ++n) {
    mfsdp_threads_world *world = nullptr;
    memory_.fail_at(n);
    const mfsdp_status status = mfsdp_threads_world_create(&context_, &desc_, &world);
    if (!memory_.failed()) {
      ASSERT_EQ(status, MFSDP_OK) << context_.error.message;
      EXPECT_EQ(mfsdp_threads_world_destroy(&context_, world), MFSDP_OK);
      break;
    }
    EXPECT_EQ(status, MFSDP_E_MEMORY);
    EXPECT_EQ(world, nullptr);
    EXPECT_EQ(memory_.live_count(), 0u) << n;
  }
  EXPECT_EQ(n, 7) << "the world and six tables";
}

TEST_F(ThreadsWorldTest, DestroyWaitsForEveryRank) {
  mfsdp_threads_world *world = nullptr;
  mfsdp_control control;
  desc_.world = 2;
  EXPECT_EQ(mfsdp_threads_world_destroy(&context_, nullptr), MFSDP_OK);
  ASSERT_EQ(mfsdp_threads_world_create(&context_, &desc_, &world), MFSDP_OK);
  ASSERT_EQ(mfsdp_threads_control_create(&context_, world, 1, &control), MFSDP_OK);
  EXPECT_EQ(mfsdp_threads_world_destroy(&context_, world), MFSDP_E_STATE);
  EXPECT_STREQ(context_.error.message,
               "threads world: the control of rank 1 is still there; destroy it first");
  EXPECT_EQ(context_.error.culprit, 1);
  mfsdp_threads_control_destroy(&control);
  EXPECT_EQ(mfsdp_threads_world_destroy(&context_, world), MFSDP_OK);
}

/* The helper itself: what it must see. */
TEST(RanksTest, ReportsWhatFailedAndWhere) {
  const test::RanksResult failed =
      test::run_ranks(test::RanksOptions(2), [](test::Rank &rank) -> mfsdp_status {
        if (rank.rank == 1) throw std::runtime_error("on purpose");
        return MFSDP_OK;
      });
  EXPECT_FALSE(failed.ok());
  EXPECT_TRUE(failed.clean()) << failed.text();
  EXPECT_EQ(failed.text(), "rank 1: MFSDP_E_STATE: the test threw: on purpose\n");

  const test::RanksResult leaked = test::run_ranks(test::RanksOptions(1), [](test::Rank &rank) {
    void *block;
    MFSDP_TRY(mfsdp_table_alloc(&rank.context, 1, 100, "leak", &block));
    static_cast<unsigned char *>(block)[100] = 1; /* beyond the end */
    return MFSDP_OK;
  });
  EXPECT_FALSE(leaked.ok());
  EXPECT_NE(leaked.text().find("100 bytes are still held"), std::string::npos) << leaked.text();
  EXPECT_NE(leaked.text().find("1 blocks leaked"), std::string::npos) << leaked.text();
}

TEST(FaultAllocatorTest, SeesWhatIsDoneWrong) {
  test::FaultAllocator memory;
  const mfsdp_allocator a = memory.allocator();
  auto take = [&a](std::size_t nbytes) {
    return static_cast<unsigned char *>(a.alloc(nbytes, 256, MFSDP_SPACE_HOST, a.user));
  };
  unsigned char *block = take(10);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % 256, 0u);
  EXPECT_EQ(memory.live_nbytes(), 10u);
  a.free(block, 10, MFSDP_SPACE_HOST, a.user);
  EXPECT_EQ(memory.complaints(), "");
  block = take(10);
  block[10] = 0;
  a.free(block, 10, MFSDP_SPACE_HOST, a.user);
  block = take(20);
  block[-1] = 0;
  a.free(block, 20, MFSDP_SPACE_HOST, a.user);
  a.free(take(30), 31, MFSDP_SPACE_HOST, a.user);
  a.free(take(40), 40, MFSDP_SPACE_DEVICE, a.user);
  a.free(block, 20, MFSDP_SPACE_HOST, a.user);
  EXPECT_EQ(memory.complaints(), "bytes after a block of 10 were written\n"
                                 "bytes before a block of 20 were written\n"
                                 "a block of 30 bytes was freed as 31\n"
                                 "a block of space 3 was freed as space 1\n"
                                 "free of a block that is not live\n");
  memory.fail_at(1);
  block = take(1);
  EXPECT_NE(block, nullptr);
  EXPECT_FALSE(memory.failed());
  EXPECT_EQ(take(1), nullptr);
  EXPECT_TRUE(memory.failed());
  EXPECT_EQ(memory.alloc_count(), 2);
  a.free(block, 1, MFSDP_SPACE_HOST, a.user);
  memory.fail_from(0);
  EXPECT_EQ(take(1), nullptr);
  EXPECT_EQ(take(1), nullptr);
  EXPECT_EQ(memory.peak_nbytes(), 40u);
}

} // namespace
