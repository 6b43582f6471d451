/* SPDX-License-Identifier: MIT */
/*
 * schedule.h: exact values at corner steps, worked out by hand in the comments, and each rule of the
 * description. That the runtime follows a schedule is tested in runtime_test.cpp.
 */
#include "mfsdp/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

class Schedule : public ::testing::Test {
protected:
  Schedule() {
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    EXPECT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  ~Schedule() override { EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK); }

  static mfsdp_schedule make(mfsdp_schedule_kind kind, int64_t warmup, int64_t total,
                             double final_factor = 0.0, int64_t decay = 0) {
    mfsdp_schedule s = mfsdp_schedule_default();
    s.kind = kind;
    s.warmup_steps = warmup;
    s.total_steps = total;
    s.decay_steps = decay;
    s.final_factor = final_factor;
    return s;
  }
  double at(const mfsdp_schedule &s, int64_t step) {
    double factor = -1.0;
    EXPECT_EQ(mfsdp_schedule_factor(&context_, &s, step, &factor), MFSDP_OK) << message();
    return factor;
  }
  /* Steps 0, 1, 2, ...: all exact. */
  void expect(const mfsdp_schedule &s, const std::vector<double> &want) {
    for (std::size_t step = 0; step < want.size(); ++step)
      EXPECT_EQ(at(s, static_cast<int64_t>(step)), want[step]) << "step " << step;
  }
  void refused(const mfsdp_schedule &s, const std::string &text) {
    double factor = -1.0;
    EXPECT_EQ(mfsdp_schedule_check(&context_, &s), MFSDP_E_ARGUMENT);
    EXPECT_NE(message().find(text), std::string::npos) << message();
    EXPECT_EQ(mfsdp_schedule_factor(&context_, &s, 0, &factor), MFSDP_E_ARGUMENT);
    EXPECT_EQ(factor, -1.0) << "untouched";
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }

  mfsdp_context context_;
};

TEST_F(Schedule, DefaultIsOne) {
  const mfsdp_schedule s = mfsdp_schedule_default();
  expect(s, {1.0, 1.0, 1.0});
  EXPECT_EQ(at(s, INT64_C(1) << 53), 1.0);
}

TEST_F(Schedule, WarmUp) {
  expect(make(MFSDP_SCHEDULE_CONSTANT, 4, 0), {0.25, 0.5, 0.75, 1.0, 1.0, 1.0});
  expect(make(MFSDP_SCHEDULE_CONSTANT, 1, 0), {1.0, 1.0});
  /* Every kind begins with it; a warm-up longer than the run is all of it. */
  for (int kind = MFSDP_SCHEDULE_CONSTANT; kind < MFSDP_SCHEDULE_END; ++kind) {
    expect(make(static_cast<mfsdp_schedule_kind>(kind), 4, 8, 0.5, 2), {0.25, 0.5, 0.75, 1.0});
    expect(make(static_cast<mfsdp_schedule_kind>(kind), 8, 2, 0.5, 1), {0.125, 0.25, 0.375});
  }
}

/* Full at step number 1 of 8 (0 and 1 warm-up steps), or 4 of 7; p in eighths, or in quarters. */
TEST_F(Schedule, Linear) {
  const std::vector<double> eighths = {1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0};
  expect(make(MFSDP_SCHEDULE_LINEAR, 0, 8), eighths);
  expect(make(MFSDP_SCHEDULE_LINEAR, 1, 8), eighths);
  expect(make(MFSDP_SCHEDULE_LINEAR, 4, 7), {0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0});
  expect(make(MFSDP_SCHEDULE_LINEAR, 4, 7, 0.5),
         {0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5});
  expect(make(MFSDP_SCHEDULE_LINEAR, 2, 4, 1.0), {0.5, 1.0, 1.0, 1.0, 1.0}); /* no decay at all */
  expect(make(MFSDP_SCHEDULE_LINEAR, 0, 1), {1.0, 0.0});
  EXPECT_EQ(at(make(MFSDP_SCHEDULE_LINEAR, 4, 7, 0.25), INT64_C(1) << 53), 0.25);
}

/* cos(0) and cos(pi) are exact; cos(pi / 2) is below 1e-16 and vanishes beside 1; cos(pi / 3) is
 * within an ulp of a half, so 1e-15 for it. */
TEST_F(Schedule, Cosine) {
  const mfsdp_schedule s = make(MFSDP_SCHEDULE_COSINE, 2, 7, 0.25); /* p in sixths */
  EXPECT_EQ(at(s, 0), 0.5);
  EXPECT_EQ(at(s, 1), 1.0);
  EXPECT_NEAR(at(s, 3), 0.25 + 0.75 * 0.75, 1e-15);
  EXPECT_EQ(at(s, 4), 0.625); /* half way */
  EXPECT_NEAR(at(s, 5), 0.25 + 0.75 * 0.25, 1e-15);
  EXPECT_GT(at(s, 6), 0.25); /* the last step */
  EXPECT_EQ(at(s, 7), 0.25);
  EXPECT_EQ(at(s, 1000), 0.25);
  for (int64_t step = 2; step <= 7; ++step)
    EXPECT_LT(at(s, step), at(s, step - 1));
}

TEST_F(Schedule, WarmupStableDecay) {
  expect(make(MFSDP_SCHEDULE_WSD, 2, 9, 0.0, 3),
         {0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0});
  expect(make(MFSDP_SCHEDULE_WSD, 2, 9, 0.5, 3),
         {0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5});
  /* Decay over all steps, or over more than the warm-up leaves: LINEAR. */
  for (int64_t step = 0; step < 12; ++step)
    for (const int64_t decay : {7, 8, 9})
      EXPECT_EQ(at(make(MFSDP_SCHEDULE_WSD, 2, 9, 0.1, decay), step),
                at(make(MFSDP_SCHEDULE_LINEAR, 2, 9, 0.1), step));
}

/* The root of 1/4 and 9/16; of 1/16 at p = 1/16. */
TEST_F(Schedule, WarmupStableDecayByTheRoot) {
  const mfsdp_schedule s = make(MFSDP_SCHEDULE_WSD_SQRT, 2, 20, 0.0, 15);
  EXPECT_EQ(at(s, 4), 1.0);
  EXPECT_EQ(at(s, 5), 0.75);
  EXPECT_EQ(at(s, 8), 0.5);
  EXPECT_EQ(at(s, 13), 0.25);
  EXPECT_EQ(at(s, 20), 0.0);
  EXPECT_EQ(at(make(MFSDP_SCHEDULE_WSD_SQRT, 2, 20, 0.5, 15), 8), 0.75);
}

/* Close to the largest counts nothing overflows, and steps stay exact. */
TEST_F(Schedule, LargestCounts) {
  const int64_t most = INT64_C(1) << 53;
  mfsdp_schedule s = make(MFSDP_SCHEDULE_LINEAR, most, most);
  EXPECT_EQ(at(s, most / 2 - 1), 0.5);
  EXPECT_EQ(at(s, most), 0.0);
  s = make(MFSDP_SCHEDULE_WSD, 0, most, 0.0, most);
  EXPECT_EQ(at(s, most / 2), 0.5);
}

TEST_F(Schedule, Names) {
  for (int kind = MFSDP_SCHEDULE_CONSTANT; kind < MFSDP_SCHEDULE_END; ++kind)
    EXPECT_EQ(mfsdp_schedule_kind_by_name(
                  mfsdp_schedule_kind_name(static_cast<mfsdp_schedule_kind>(kind))),
              kind);
  EXPECT_STREQ(mfsdp_schedule_kind_name(MFSDP_SCHEDULE_WSD_SQRT), "wsd-sqrt");
  EXPECT_STREQ(mfsdp_schedule_kind_name(MFSDP_SCHEDULE_NONE), "invalid");
  EXPECT_STREQ(mfsdp_schedule_kind_name(MFSDP_SCHEDULE_END), "invalid");
  EXPECT_EQ(mfsdp_schedule_kind_by_name("Cosine"), MFSDP_SCHEDULE_NONE);
  EXPECT_EQ(mfsdp_schedule_kind_by_name(nullptr), MFSDP_SCHEDULE_NONE);
}

/* ---- the rules ---- */

TEST_F(Schedule, Rules) {
  const double nan = std::nan("");
  mfsdp_schedule s = make(MFSDP_SCHEDULE_CONSTANT, 0, 0);
  EXPECT_EQ(mfsdp_schedule_check(&context_, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("it is NULL"), std::string::npos);
  s.struct_nbytes -= 8;
  refused(s, "struct_nbytes is not");
  refused(make(MFSDP_SCHEDULE_NONE, 0, 5), "kind is 0, needs 1 to 5");
  refused(make(MFSDP_SCHEDULE_END, 0, 5), "kind is 6, needs 1 to 5");
  refused(make(MFSDP_SCHEDULE_CONSTANT, -1, 0), "warmup_steps is -1, needs 0 to 2^53");
  refused(make(MFSDP_SCHEDULE_LINEAR, (INT64_C(1) << 53) + 1, 5),
          "warmup_steps is 9007199254740993");
  refused(make(MFSDP_SCHEDULE_LINEAR, 0, 0), "linear: total_steps is 0, needs 1 to 2^53");
  refused(make(MFSDP_SCHEDULE_COSINE, 0, -4), "cosine: total_steps is -4");
  refused(make(MFSDP_SCHEDULE_COSINE, 0, INT64_MAX), "cosine: total_steps is 9223372036854775807");
  refused(make(MFSDP_SCHEDULE_COSINE, 0, 5, -0.1), "cosine: final_factor is -0.1, needs 0 to 1");
  refused(make(MFSDP_SCHEDULE_LINEAR, 0, 5, 1.5), "linear: final_factor is 1.5");
  refused(make(MFSDP_SCHEDULE_LINEAR, 0, 5, nan), "linear: final_factor is ");
  refused(make(MFSDP_SCHEDULE_WSD, 0, 5, 0.0, 0),
          "wsd: decay_steps is 0, needs 1 to total_steps (5)");
  refused(make(MFSDP_SCHEDULE_WSD, 0, 5, 0.0, -1), "wsd: decay_steps is -1");
  refused(make(MFSDP_SCHEDULE_WSD_SQRT, 0, 5, 0.0, 6), "wsd-sqrt: decay_steps is 6");
}

/* A kind reads its own fields only. */
TEST_F(Schedule, FieldsOfOtherKindsAreNotRead) {
  mfsdp_schedule s = make(MFSDP_SCHEDULE_CONSTANT, 0, -3, 7.0, -9);
  EXPECT_EQ(at(s, 100), 1.0);
  s = make(MFSDP_SCHEDULE_LINEAR, 0, 4, 0.0, -9);
  EXPECT_EQ(at(s, 2), 0.5);
}

TEST_F(Schedule, WrongSteps) {
  const mfsdp_schedule s = mfsdp_schedule_default();
  double factor = -1.0;
  EXPECT_EQ(mfsdp_schedule_factor(&context_, &s, -1, &factor), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("step is -1, needs 0 to 2^53"), std::string::npos) << message();
  EXPECT_EQ(mfsdp_schedule_factor(&context_, &s, INT64_MAX, &factor), MFSDP_E_ARGUMENT);
  EXPECT_EQ(factor, -1.0);
  EXPECT_EQ(mfsdp_schedule_factor(&context_, &s, 0, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("factor is NULL"), std::string::npos) << message();
}

} // namespace
