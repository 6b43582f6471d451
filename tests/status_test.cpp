/* SPDX-License-Identifier: MIT */
/* status.h: names and texts of every status, error records, MFSDP_TRY. */
#include "mfsdp/status.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace {

/* Written out, not generated from the table: programs store these numbers and print these names. */
TEST(Status, NumbersAndNames) {
  const struct {
    mfsdp_status status;
    int number;
    const char *name;
  } rows[] = {{MFSDP_OK, 0, "MFSDP_OK"},
              {MFSDP_E_ARGUMENT, 1, "MFSDP_E_ARGUMENT"},
              {MFSDP_E_STATE, 2, "MFSDP_E_STATE"},
              {MFSDP_E_UNSUPPORTED, 3, "MFSDP_E_UNSUPPORTED"},
              {MFSDP_E_MEMORY, 4, "MFSDP_E_MEMORY"},
              {MFSDP_E_OVERFLOW, 5, "MFSDP_E_OVERFLOW"},
              {MFSDP_E_BACKEND, 6, "MFSDP_E_BACKEND"},
              {MFSDP_E_TIMEOUT, 7, "MFSDP_E_TIMEOUT"},
              {MFSDP_E_PEER, 8, "MFSDP_E_PEER"},
              {MFSDP_E_MISMATCH, 9, "MFSDP_E_MISMATCH"},
              {MFSDP_E_POISONED, 10, "MFSDP_E_POISONED"},
              {MFSDP_E_IO, 11, "MFSDP_E_IO"},
              {MFSDP_E_FORMAT, 12, "MFSDP_E_FORMAT"}};
  EXPECT_EQ(sizeof(rows) / sizeof(rows[0]), static_cast<std::size_t>(MFSDP_STATUS_COUNT));
  for (const auto &row : rows) {
    EXPECT_EQ(static_cast<int>(row.status), row.number);
    EXPECT_STREQ(mfsdp_status_name(row.status), row.name);
  }
}

TEST(Status, EveryTextIsItsOwn) {
  std::set<std::string> texts;
  for (int i = 0; i < MFSDP_STATUS_COUNT; ++i)
    texts.insert(mfsdp_status_text(static_cast<mfsdp_status>(i)));
  EXPECT_EQ(texts.size(), static_cast<std::size_t>(MFSDP_STATUS_COUNT));
  EXPECT_EQ(texts.count(""), 0u);
  EXPECT_STREQ(mfsdp_status_text(MFSDP_OK), "success");
  EXPECT_NE(std::string(mfsdp_status_text(MFSDP_E_TIMEOUT)).find("deadline"), std::string::npos);
}

TEST(Status, UnknownOnesHaveAName) {
  /* The one value past the table that the enum can hold in C++ without undefined behaviour. */
  EXPECT_STREQ(mfsdp_status_name(MFSDP_STATUS_COUNT), "MFSDP_E_UNKNOWN");
  EXPECT_STREQ(mfsdp_status_text(MFSDP_STATUS_COUNT), "unknown status");
}

TEST(Error, NoneIsEmpty) {
  const mfsdp_error none = mfsdp_error_none();
  EXPECT_EQ(none.status, MFSDP_OK);
  EXPECT_EQ(none.rank, -1);
  EXPECT_EQ(none.culprit, -1);
  EXPECT_STREQ(none.file, "");
  EXPECT_STREQ(none.message, "");
}

TEST(Error, SetRecordsWhereAndWhat) {
  mfsdp_error error = mfsdp_error_none();
  const int line = __LINE__ + 1;
  const mfsdp_status status = MFSDP_ERROR_SET(&error, MFSDP_E_PEER, 3, "rank %d left", 3);
  EXPECT_EQ(status, MFSDP_E_PEER);
  EXPECT_EQ(error.status, MFSDP_E_PEER);
  EXPECT_EQ(error.culprit, 3);
  EXPECT_EQ(error.line, line);
  EXPECT_STREQ(error.message, "rank 3 left");
  EXPECT_NE(std::string(error.file).find("status_test.cpp"), std::string::npos);
}

TEST(Error, SetWithoutARecordReturnsTheStatus) {
  EXPECT_EQ(MFSDP_ERROR_SET(NULL, MFSDP_E_IO, -1, "nobody reads this"), MFSDP_E_IO);
}

TEST(Error, LongMessagesAreCutAndTerminated) {
  mfsdp_error error = mfsdp_error_none();
  const std::string text(2 * sizeof(error.message), 'x');
  (void)MFSDP_ERROR_SET(&error, MFSDP_E_IO, -1, "%s", text.c_str());
  EXPECT_EQ(std::string(error.message), text.substr(0, sizeof(error.message) - 1));
}

mfsdp_status try_twice(mfsdp_status first, int *reached) {
  MFSDP_TRY(first);
  ++*reached;
  return MFSDP_E_FORMAT;
}

TEST(Try, LeavesOnTheFirstError) {
  int reached = 0;
  EXPECT_EQ(try_twice(MFSDP_E_STATE, &reached), MFSDP_E_STATE);
  EXPECT_EQ(reached, 0);
  EXPECT_EQ(try_twice(MFSDP_OK, &reached), MFSDP_E_FORMAT);
  EXPECT_EQ(reached, 1);
}

} // namespace
