/* SPDX-License-Identifier: MIT */
#include "mfsdp/posix/clock.h"

#include <gtest/gtest.h>

namespace {

TEST(Clock, NeverGoesBack) {
  int64_t before = mfsdp_clock_us();
  EXPECT_GT(before, 0);
  for (int i = 0; i < 10000; ++i) {
    const int64_t now = mfsdp_clock_us();
    ASSERT_GE(now, before);
    before = now;
  }
}

TEST(Clock, SleepsAtLeastUntilTheDeadline) {
  const int64_t deadline_us = mfsdp_clock_us() + 3000;
  mfsdp_clock_sleep_until(deadline_us);
  EXPECT_GE(mfsdp_clock_us(), deadline_us);
  mfsdp_clock_sleep_until(deadline_us); /* has passed */
  mfsdp_clock_sleep_until(0);
  mfsdp_clock_sleep_until(-1);
}

TEST(Clock, DeadlinesSaturate) {
  EXPECT_EQ(mfsdp_clock_deadline_us(INT64_MAX), MFSDP_DEADLINE_NEVER_US);
  /* In this order: the compiler may evaluate two arguments in any. */
  const int64_t deadline_us = mfsdp_clock_deadline_us(0);
  const int64_t past_us = mfsdp_clock_deadline_us(INT64_MIN);
  EXPECT_LE(deadline_us, mfsdp_clock_us());
  EXPECT_LE(past_us, mfsdp_clock_us());
  EXPECT_GT(mfsdp_clock_deadline_us(60000000), mfsdp_clock_us());
}

} // namespace
