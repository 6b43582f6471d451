/* SPDX-License-Identifier: MIT */
/* context.h: set-up rules, errors and their log, traces, accounted memory, what is left over. */
#include "mfsdp/context.h"

#include "tests/support/fault_allocator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

struct Sink {
  std::vector<std::string> lines;
  static void log(void *user, mfsdp_log_level level, const char *message) {
    static_cast<Sink *>(user)->lines.push_back(std::to_string(static_cast<int>(level)) + " " +
                                               message);
  }
  static void trace(void *user, int begin, const char *lane, const char *label) {
    static_cast<Sink *>(user)->lines.push_back(std::string(begin ? "+" : "-") + lane + ":" + label);
  }
};

class ContextTest : public ::testing::Test {
protected:
  void SetUp() override {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    desc.rank = 5;
    desc.log = &Sink::log;
    desc.trace = &Sink::trace;
    desc.user = &sink_;
    ASSERT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  void TearDown() override {
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(memory_.complaints(), "");
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }
  void expect_message(const std::string &part) const {
    EXPECT_NE(message().find(part), std::string::npos) << message();
  }

  test::FaultAllocator memory_;
  Sink sink_;
  mfsdp_context context_;
};

TEST(ContextDesc, Defaults) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  EXPECT_EQ(desc.struct_nbytes, sizeof(desc));
  EXPECT_EQ(desc.rank, -1);
  EXPECT_NE(desc.allocator.alloc, nullptr);
  EXPECT_NE(desc.allocator.free, nullptr);
  EXPECT_EQ(desc.log, nullptr);
  EXPECT_EQ(desc.trace, nullptr);
  EXPECT_EQ(desc.debug_poison, 0);
  EXPECT_EQ(desc.debug_check, 0);
}

/* ---- one negative test per rule of init ---- */

class ContextInit : public ::testing::Test {
protected:
  void refused(const mfsdp_context_desc *given, const char *part) {
    EXPECT_EQ(mfsdp_context_init(&context, given), MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_context_error(&context)->status, MFSDP_E_ARGUMENT);
    const std::string message = mfsdp_context_error(&context)->message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  mfsdp_context context;
  mfsdp_context_desc desc = mfsdp_context_desc_default();
};

TEST_F(ContextInit, NullContext) {
  EXPECT_EQ(mfsdp_context_init(nullptr, &desc), MFSDP_E_ARGUMENT);
}
TEST_F(ContextInit, NullDesc) {
  refused(nullptr, "desc is NULL");
}
TEST_F(ContextInit, OtherSize) {
  desc.struct_nbytes = 24;
  refused(&desc, "struct_nbytes is 24");
}
TEST_F(ContextInit, NoAlloc) {
  desc.allocator.alloc = nullptr;
  refused(&desc, "needs alloc and free");
}
TEST_F(ContextInit, NoFree) {
  desc.allocator.free = nullptr;
  refused(&desc, "needs alloc and free");
}
TEST_F(ContextInit, StartsWithoutErrorAndEmpty) {
  std::memset(&context, 0xa5, sizeof(context));
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_error(&context)->status, MFSDP_OK);
  EXPECT_EQ(context.total_nbytes, 0u);
  EXPECT_EQ(context.total_peak_nbytes, 0u);
  EXPECT_EQ(context.counters.newton_schulz_count, 0u);
  for (int c = 0; c < MFSDP_TRAFFIC_CLASS_COUNT; ++c)
    EXPECT_EQ(context.counters.sent[c].wire_nbytes, 0u);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

/* ---- errors ---- */

TEST_F(ContextTest, FailRecordsLogsAndReturns) {
  const int line = __LINE__ + 1;
  EXPECT_EQ(MFSDP_FAIL(&context_, MFSDP_E_STATE, "unit %d is closed", 7), MFSDP_E_STATE);
  const mfsdp_error *error = mfsdp_context_error(&context_);
  EXPECT_EQ(error->status, MFSDP_E_STATE);
  EXPECT_EQ(error->rank, 5);
  EXPECT_EQ(error->culprit, -1);
  EXPECT_EQ(error->line, line);
  EXPECT_NE(std::string(error->file).find("context_test.cpp"), std::string::npos);
  EXPECT_EQ(message(), "unit 7 is closed");
  EXPECT_EQ(sink_.lines, (std::vector<std::string>{"1 unit 7 is closed"}));
}

TEST_F(ContextTest, FailPeerNamesTheCulprit) {
  EXPECT_EQ(MFSDP_FAIL_PEER(&context_, MFSDP_E_PEER, 2, "gone"), MFSDP_E_PEER);
  EXPECT_EQ(mfsdp_context_error(&context_)->culprit, 2);
}

TEST(ContextFail, WithoutAContextReturnsTheStatus) {
  EXPECT_EQ(MFSDP_FAIL(NULL, MFSDP_E_IO, "nobody reads this"), MFSDP_E_IO);
}

TEST_F(ContextTest, TakesTheErrorOfAnotherThread) {
  mfsdp_error other = mfsdp_error_none();
  (void)MFSDP_ERROR_SET(&other, MFSDP_E_TIMEOUT, 3, "waited for rank 3");
  EXPECT_EQ(mfsdp_context_take_error(&context_, &other), MFSDP_E_TIMEOUT);
  EXPECT_EQ(message(), "waited for rank 3");
  EXPECT_EQ(mfsdp_context_error(&context_)->culprit, 3);
  EXPECT_EQ(mfsdp_context_error(&context_)->rank, 5) << "the record had no rank: ours noticed";
  EXPECT_EQ(mfsdp_context_error(&context_)->line, other.line);
  EXPECT_EQ(sink_.lines, (std::vector<std::string>{"1 waited for rank 3"}));
  other.rank = 1;
  EXPECT_EQ(mfsdp_context_take_error(&context_, &other), MFSDP_E_TIMEOUT);
  EXPECT_EQ(mfsdp_context_error(&context_)->rank, 1) << "a rank in the record is kept";
}

TEST_F(ContextTest, TakingNoErrorKeepsTheLastOne) {
  const mfsdp_error none = mfsdp_error_none();
  (void)MFSDP_FAIL(&context_, MFSDP_E_STATE, "first");
  EXPECT_EQ(mfsdp_context_take_error(&context_, &none), MFSDP_OK);
  EXPECT_EQ(message(), "first");
}

TEST(ContextTakeError, WithoutAContextReturnsTheStatus) {
  mfsdp_error other = mfsdp_error_none();
  (void)MFSDP_ERROR_SET(&other, MFSDP_E_IO, -1, "x");
  EXPECT_EQ(mfsdp_context_take_error(nullptr, &other), MFSDP_E_IO);
}

TEST_F(ContextTest, TracesNest) {
  mfsdp_trace_begin(&context_, "compute", "step");
  mfsdp_trace_begin(&context_, "compute", "muon");
  mfsdp_trace_end(&context_, "compute", "muon");
  mfsdp_trace_end(&context_, "compute", "step");
  EXPECT_EQ(sink_.lines, (std::vector<std::string>{"+compute:step", "+compute:muon",
                                                   "-compute:muon", "-compute:step"}));
}

TEST(ContextCallbacks, MayBeAbsent) {
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  mfsdp_trace_begin(&context, "a", "b");
  mfsdp_trace_end(&context, "a", "b");
  EXPECT_EQ(MFSDP_FAIL(&context, MFSDP_E_STATE, "x"), MFSDP_E_STATE);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

/* ---- accounted memory ---- */

TEST_F(ContextTest, TablesAreZeroedAlignedAndBooked) {
  void *table = nullptr;
  ASSERT_EQ(mfsdp_table_alloc(&context_, 10, 12, "numbers", &table), MFSDP_OK);
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(table) % MFSDP_ALIGN_NBYTES, 0u);
  for (int i = 0; i < 120; ++i)
    EXPECT_EQ(static_cast<unsigned char *>(table)[i], 0); /* the allocator filled it with 0xa5 */
  EXPECT_EQ(context_.current_nbytes[MFSDP_MEMORY_TABLE], 120u);
  EXPECT_EQ(context_.total_nbytes, 120u);
  mfsdp_table_free(&context_, table, 10, 12);
  EXPECT_EQ(context_.current_nbytes[MFSDP_MEMORY_TABLE], 0u);
  EXPECT_EQ(context_.peak_nbytes[MFSDP_MEMORY_TABLE], 120u);
  EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
}

TEST_F(ContextTest, EmptyTablesAreNull) {
  void *table = &context_;
  EXPECT_EQ(mfsdp_table_alloc(&context_, 0, 12, "none", &table), MFSDP_OK);
  EXPECT_EQ(table, nullptr);
  EXPECT_EQ(memory_.alloc_count(), 0);
  mfsdp_table_free(&context_, table, 0, 12);
}

TEST_F(ContextTest, TableOverflow) {
  void *table = &context_;
  EXPECT_EQ(mfsdp_table_alloc(&context_, SIZE_MAX / 4, 8, "too many", &table), MFSDP_E_OVERFLOW);
  EXPECT_EQ(table, nullptr);
  EXPECT_EQ(memory_.alloc_count(), 0);
  expect_message("too many");
}

TEST_F(ContextTest, TableWithoutMemory) {
  void *table = &context_;
  memory_.fail_at(0);
  EXPECT_EQ(mfsdp_table_alloc(&context_, 5, 8, "five", &table), MFSDP_E_MEMORY);
  EXPECT_EQ(table, nullptr);
  EXPECT_EQ(context_.total_nbytes, 0u);
  expect_message("five: the allocator refused 40 bytes");
}

TEST_F(ContextTest, PeaksAreKeptByClassAndInTotal) {
  mfsdp_memory_book(&context_, MFSDP_MEMORY_SLOT, 100);
  mfsdp_memory_book(&context_, MFSDP_MEMORY_STATE, 30);
  mfsdp_memory_unbook(&context_, MFSDP_MEMORY_SLOT, 100);
  mfsdp_memory_book(&context_, MFSDP_MEMORY_STATE, 50);
  EXPECT_EQ(context_.peak_nbytes[MFSDP_MEMORY_SLOT], 100u);
  EXPECT_EQ(context_.peak_nbytes[MFSDP_MEMORY_STATE], 80u);
  EXPECT_EQ(context_.total_peak_nbytes, 130u) << "not the sum of the peaks, which is 180";
  EXPECT_EQ(context_.total_nbytes, 80u);
  mfsdp_memory_unbook(&context_, MFSDP_MEMORY_STATE, 80);
  EXPECT_EQ(context_.total_nbytes, 0u);
}

TEST_F(ContextTest, DestroyWithLeftoversSaysHowMuchAndStaysUsable) {
  void *table = nullptr;
  ASSERT_EQ(mfsdp_table_alloc(&context_, 3, 8, "left over", &table), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_E_STATE);
  expect_message("24 bytes");
  mfsdp_table_free(&context_, table, 3, 8);
  EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
}

TEST(ContextDestroy, Null) {
  EXPECT_EQ(mfsdp_context_destroy(nullptr), MFSDP_OK);
}

} // namespace
