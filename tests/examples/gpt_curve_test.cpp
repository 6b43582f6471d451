/* SPDX-License-Identifier: MIT */
#include "examples/gpt/curve.h"

#include "tests/examples/gpt_test.h"

#include <cmath>
#include <fcntl.h>

using gpt_test::TempFile;

namespace {

std::string ReadError(const std::string &text) {
  const TempFile file(text);
  gpt_curve curve;
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_curve_read(file.path(), &curve, &error), GPT_USAGE_ERROR) << text;
  EXPECT_EQ(curve.step, nullptr);
  EXPECT_NE(std::string(error.text).find(file.path()), std::string::npos) << error.text;
  return error.text;
}

const char header[] = "step,loss,elapsed_s,val_loss\n";

TEST(GptCurve, WhatIsWrittenIsReadBack) {
  const TempFile file;
  gpt_curve_writer writer;
  gpt_error error;
  ASSERT_EQ(gpt_curve_open(file.path(), &writer, &error), GPT_OK);
  gpt_curve_row(&writer, 1, 5.5, 0.25, NAN);
  gpt_curve_row(&writer, 2, 4.25, 0.5, 4.125);
  gpt_curve_row(&writer, 10, NAN, 1.0, INFINITY);
  EXPECT_EQ(file.text(), std::string(header) + "1,5.5,0.25,\n2,4.25,0.5,4.125\n10,nan,1,inf\n");
  ASSERT_EQ(gpt_curve_close(&writer, &error), GPT_OK);
  ASSERT_EQ(gpt_curve_close(&writer, &error), GPT_OK);

  gpt_curve curve;
  ASSERT_EQ(gpt_curve_read(file.path(), &curve, &error), GPT_OK) << error.text;
  ASSERT_EQ(curve.count, 3);
  EXPECT_EQ(curve.step[2], 10.0);
  EXPECT_EQ(curve.loss[1], 4.25);
  EXPECT_EQ(curve.elapsed_s[0], 0.25);
  EXPECT_TRUE(std::isnan(curve.val_loss[0]));
  EXPECT_EQ(curve.val_loss[1], 4.125);
  EXPECT_TRUE(std::isnan(curve.loss[2]));
  EXPECT_TRUE(std::isinf(curve.val_loss[2]));
  gpt_curve_destroy(&curve);
}

TEST(GptCurve, WithoutAPathRowsAreDropped) {
  gpt_curve_writer writer;
  gpt_error error;
  ASSERT_EQ(gpt_curve_open(nullptr, &writer, &error), GPT_OK);
  gpt_curve_row(&writer, 1, 5.5, 0.25, NAN);
  EXPECT_EQ(gpt_curve_close(&writer, &error), GPT_OK);
}

TEST(GptCurve, WritingWhereItCannot) {
  gpt_curve_writer writer;
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_curve_open("/nonexistent/c.csv", &writer, &error), GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error.text).find("cannot write /nonexistent/c.csv"), std::string::npos);
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  EXPECT_EQ(gpt_curve_open("/dev/full", &writer, &error), GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error.text).find("cannot write /dev/full"), std::string::npos);
  EXPECT_EQ(gpt_curve_close(&writer, &error), GPT_OK); /* nothing is open */
}

/* The disk fills up after the header. */
TEST(GptCurve, AFullDiskIsNoticed) {
  const TempFile file;
  const int full = open("/dev/full", O_WRONLY);
  gpt_curve_writer writer;
  gpt_error error = gpt_error();
  if (full < 0) GTEST_SKIP() << "no /dev/full";
  ASSERT_EQ(gpt_curve_open(file.path(), &writer, &error), GPT_OK);
  ASSERT_GE(dup2(full, fileno(writer.file)), 0);
  close(full);
  gpt_curve_row(&writer, 1, 5.5, 0.25, NAN);
  EXPECT_EQ(gpt_curve_close(&writer, &error), GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error.text).find(std::string(file.path()) + " is incomplete"),
            std::string::npos);
}

TEST(GptCurve, DamagedFiles) {
  const std::string h = header;
  EXPECT_NE(ReadError("").find("does not start with"), std::string::npos);
  EXPECT_NE(ReadError("step,loss\n1,2\n").find("does not start with"), std::string::npos);
  EXPECT_NE(ReadError(h).find("has no rows"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3,4").find("has no rows"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3,\n1,2,3").find("line 3"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3,4,5\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,x,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1, 2,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3,\n1,2,3,\n").find("line 3"), std::string::npos);
  EXPECT_NE(ReadError(h + "0,2,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "nan,2,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2,3,\n\n").find("line 3"), std::string::npos);
  EXPECT_NE(ReadError(h + "1,2\n,3,\n").find("line 2"), std::string::npos);
  EXPECT_NE(ReadError(h + std::string("1,2,3,\n\0\n", 9)).find("line 3"), std::string::npos);
}

TEST(GptCurve, ALogKeepsEveryStepWhileThereIsRoom) {
  gpt_curve_log log;
  gpt_error error;
  ASSERT_EQ(gpt_curve_log_create(&log, &error), GPT_OK);
  for (int64_t step = 1; step <= GPT_CURVE_LOG_ROWS; ++step)
    gpt_curve_log_add(&log, step, double(step % 7), double(step) / 8, step % 5 ? NAN : 2.0);
  ASSERT_EQ(log.curve.count, GPT_CURVE_LOG_ROWS);
  for (int64_t i = 0; i < log.curve.count; ++i) {
    EXPECT_EQ(log.curve.step[i], double(i + 1));
    EXPECT_EQ(log.curve.loss[i], double((i + 1) % 7));
    EXPECT_EQ(log.curve.elapsed_s[i], double(i + 1) / 8);
    EXPECT_EQ(std::isnan(log.curve.val_loss[i]), (i + 1) % 5 != 0);
  }
  gpt_curve_log_destroy(&log);
}

TEST(GptCurve, AFullLogJoinsNeighbours) {
  gpt_curve_log log;
  gpt_error error;
  ASSERT_EQ(gpt_curve_log_create(&log, &error), GPT_OK);
  /* Five times the room: rows of eight steps in the end. Loss = step: a row's mean is known. */
  const int64_t steps = 5 * GPT_CURVE_LOG_ROWS;
  for (int64_t step = 1; step <= steps; ++step)
    gpt_curve_log_add(&log, step, double(step), double(step), step == 1000 ? 3.0 : NAN);
  ASSERT_EQ(log.stride, 8);
  ASSERT_EQ(log.curve.count, steps / 8);
  for (int64_t i = 0; i < log.curve.count; ++i) {
    ASSERT_EQ(log.curve.step[i], double(8 * (i + 1)));
    ASSERT_NEAR(log.curve.loss[i], double(8 * i) + 4.5, 1e-9);
    ASSERT_EQ(std::isnan(log.curve.val_loss[i]), i != 124); /* steps 993 to 1000 */
  }
  gpt_curve_log_destroy(&log);
}

TEST(GptCurve, FinishingALogKeepsItsLastSteps) {
  gpt_curve_log log;
  gpt_error error;
  ASSERT_EQ(gpt_curve_log_create(&log, &error), GPT_OK);
  for (int64_t step = 1; step <= GPT_CURVE_LOG_ROWS + 1; ++step)
    gpt_curve_log_add(&log, step, 1.0, 1.0, NAN);
  EXPECT_EQ(log.curve.count, GPT_CURVE_LOG_ROWS / 2);
  gpt_curve_log_finish(&log);
  gpt_curve_log_finish(&log);
  ASSERT_EQ(log.curve.count, GPT_CURVE_LOG_ROWS / 2 + 1);
  EXPECT_EQ(log.curve.step[log.curve.count - 1], double(GPT_CURVE_LOG_ROWS + 1));
  gpt_curve_log_destroy(&log);
}

TEST(GptCurve, SmoothingIsATrailingMean) {
  const std::vector<double> y = {4.0, 2.0, 0.0, INFINITY, 1.0, 1.0, 1.0};
  std::vector<double> out(y.size());
  gpt_curve_smooth(7, y.data(), 2, out.data());
  EXPECT_EQ(out[0], 4.0);
  EXPECT_EQ(out[1], 3.0);
  EXPECT_EQ(out[2], 1.0);
  EXPECT_TRUE(std::isinf(out[4]));
  EXPECT_EQ(out[5], 1.0); /* one infinite loss does not poison the rest */
  gpt_curve_smooth(7, y.data(), 1, out.data());
  EXPECT_EQ(out, y);
  EXPECT_EQ(gpt_curve_window(1), 1);
  EXPECT_EQ(gpt_curve_window(400), 10);
}

} // namespace
