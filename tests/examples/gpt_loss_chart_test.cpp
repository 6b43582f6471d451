/* SPDX-License-Identifier: MIT */
#include "examples/gpt/loss_chart.h"

#include "tests/examples/gpt_test.h"

#include <cmath>

namespace {

gpt_curve Curve(std::vector<double> *values, std::vector<double> *validation) {
  gpt_curve c = gpt_curve();
  c.count = int64_t(values->size());
  c.step = c.loss = c.elapsed_s = values->data();
  c.val_loss = validation->data();
  return c;
}

TEST(GptLossChart, TrainingAlwaysAndValidationWhereItIsKnown) {
  std::vector<double> values = {1, 2, 3}, two = {NAN, 2, 1}, one = {NAN, NAN, 1};
  const gpt_curve known = Curve(&values, &two), unknown = Curve(&values, &one);
  const gpt_loss_run runs[] = {{"first", &known}, {"second", &unknown}};
  const gpt_test::TempFile file;
  gpt_error error;
  ASSERT_EQ(gpt_loss_chart_write(file.path(), "Title", runs, 2, &error), GPT_OK) << error.text;
  const std::string svg = file.text();
  for (const char *text : {">Title<", ">first, training<", ">second, training<",
                           ">first, validation<", ">optimizer step<"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  EXPECT_EQ(svg.find("second, validation"), std::string::npos);
}

TEST(GptLossChart, MoreRunsThanColours) {
  const gpt_loss_run runs[GPT_LOSS_CHART_MAX_RUNS + 1] = {};
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_loss_chart_write("x.svg", "Title", runs, GPT_LOSS_CHART_MAX_RUNS + 1, &error),
            GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error.text).find("at most 5 runs"), std::string::npos);
}

} // namespace
