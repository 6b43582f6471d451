/* SPDX-License-Identifier: MIT */
#include "examples/gpt/data.h"

#include "tests/examples/gpt_test.h"

#include <algorithm>
#include <cstring>
#include <set>

using gpt_test::TempFile;

namespace {

/* Bytes that count, so that a stretch of less than 251 of them holds each window once. */
std::string Counting(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i)
    text += static_cast<char>(i * 7 % 251);
  return text;
}

std::string OpenError(const char *path, int64_t context, int64_t batch) {
  gpt_data data;
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_data_open(path, context, batch, &data, &error), GPT_USAGE_ERROR);
  EXPECT_EQ(data.bytes, nullptr);
  EXPECT_EQ(std::string(error.text).find('\n'), std::string::npos);
  return error.text;
}

class Data {
public:
  Data(const std::string &text, int64_t context, int64_t batch) : file(text) {
    gpt_error error;
    EXPECT_EQ(gpt_data_open(file.path(), context, batch, &data, &error), GPT_OK) << error.text;
  }
  ~Data() { gpt_data_destroy(&data); }
  TempFile file;
  gpt_data data;
};

TEST(GptData, MissingFile) {
  const std::string error = OpenError("/nonexistent/text", 8, 2);
  EXPECT_NE(error.find("cannot open /nonexistent/text: No such file"), std::string::npos) << error;
}

TEST(GptData, Directory) {
  const std::string error = OpenError(testing::TempDir().c_str(), 8, 2);
  EXPECT_NE(error.find("cannot read"), std::string::npos) << error;
}

TEST(GptData, EmptyFile) {
  const TempFile file("");
  EXPECT_NE(OpenError(file.path(), 8, 2).find("is empty"), std::string::npos);
}

TEST(GptData, ShorterThanOneBatch) {
  const TempFile file(Counting(3 * 9 - 1));
  const std::string error = OpenError(file.path(), 8, 3);
  EXPECT_NE(error.find("has 26 bytes, shorter than one batch (3 windows of 9 bytes); use a longer "
                       "file, or lower --batch or --context"),
            std::string::npos)
      << error;
}

TEST(GptData, ExactlyOneBatchIsEnough) {
  Data d(Counting(3 * 9), 8, 3);
  EXPECT_GE(d.data.train_count, 9);
  EXPECT_GE(d.data.count - d.data.train_count, 9);
  std::vector<uint8_t> inputs(24), targets(24);
  for (int64_t block = 0; block < 50; ++block)
    gpt_data_batch(&d.data, 1, block, inputs.data(), targets.data());
  gpt_data_validation_batch(&d.data, 0, 1, inputs.data(), targets.data());
}

TEST(GptData, OneWindowPerBatchNeedsTwo) {
  const TempFile file(Counting(17));
  EXPECT_NE(OpenError(file.path(), 8, 1).find("shorter than one batch (2 windows"),
            std::string::npos);
  Data d(Counting(18), 8, 1);
  EXPECT_EQ(d.data.train_count, 9);
}

TEST(GptData, HoldsOutTheLastTenth) {
  Data d(Counting(10000), 8, 2);
  EXPECT_EQ(d.data.count, 10000);
  EXPECT_EQ(d.data.train_count, 9000);
  Data small(Counting(100), 8, 4); /* a tenth is less than one batch of 36 */
  EXPECT_EQ(small.data.train_count, 64);
}

TEST(GptData, TargetsAreInputsShiftedByOne) {
  Data d(Counting(5000), 16, 3);
  std::vector<uint8_t> inputs(48), targets(48);
  gpt_data_batch(&d.data, 1, 12, inputs.data(), targets.data());
  for (size_t row = 0; row < 3; ++row)
    for (size_t t = 0; t + 1 < 16; ++t)
      EXPECT_EQ(inputs[row * 16 + t + 1], targets[row * 16 + t]);
}

TEST(GptData, BatchesDependOnSeedAndBlockOnly) {
  Data d(Counting(5000), 16, 3), other(Counting(5000), 16, 3);
  std::vector<uint8_t> a(48), b(48), targets(48);
  gpt_data_batch(&d.data, 1, 12, a.data(), targets.data());
  gpt_data_batch(&other.data, 1, 3, b.data(), targets.data());
  EXPECT_NE(a, b);
  gpt_data_batch(&other.data, 2, 12, b.data(), targets.data());
  EXPECT_NE(a, b);
  gpt_data_batch(&other.data, 1, 12, b.data(), targets.data());
  EXPECT_EQ(a, b);
}

TEST(GptData, TrainingNeverTouchesTheHeldOutPart) {
  /* All zero, then all one: a target of one would come from the held-out part. */
  Data d(std::string(82, '\0') + std::string(18, '\1'), 8, 1);
  ASSERT_EQ(d.data.train_count, 82);
  std::vector<uint8_t> inputs(8), targets(8);
  std::set<uint8_t> seen;
  for (int64_t block = 0; block < 2000; ++block) {
    gpt_data_batch(&d.data, 1, block, inputs.data(), targets.data());
    seen.insert(targets.begin(), targets.end());
  }
  EXPECT_EQ(seen, std::set<uint8_t>({0}));
}

TEST(GptData, TrainingReachesBothEndsOfItsPart) {
  std::string text(100, 'x');
  text[0] = 'a';
  text[81] = 'z';
  Data d(text, 8, 1);
  std::vector<uint8_t> inputs(8), targets(8);
  bool first = false, last = false;
  for (int64_t block = 0; block < 2000; ++block) {
    gpt_data_batch(&d.data, 1, block, inputs.data(), targets.data());
    first |= inputs[0] == 'a';
    last |= targets[7] == 'z';
  }
  EXPECT_TRUE(first);
  EXPECT_TRUE(last);
}

TEST(GptData, ValidationWindowsAreEvenAndFixed) {
  /* Few enough held-out bytes for the counting text to be unique in each window. */
  Data d(Counting(1200), 8, 4);
  EXPECT_EQ(gpt_data_validation_count(&d.data), 120 / 36);
  std::vector<int64_t> starts;
  for (int64_t index = 0; index < 3; ++index) {
    std::vector<uint8_t> inputs(32), targets(32), again(32);
    gpt_data_validation_batch(&d.data, index, 3, inputs.data(), targets.data());
    gpt_data_validation_batch(&d.data, index, 3, again.data(), targets.data());
    EXPECT_EQ(inputs, again);
    for (size_t row = 0; row < 4; ++row) {
      uint8_t *part = d.data.bytes + d.data.train_count;
      const uint8_t *found =
          std::search(part, d.data.bytes + d.data.count, &inputs[row * 8], &inputs[row * 8] + 8);
      starts.push_back(found - part);
    }
  }
  EXPECT_EQ(starts.front(), 0);
  EXPECT_EQ(starts.back(), 120 - 9);
  for (size_t i = 1; i < starts.size(); ++i) {
    EXPECT_GE(starts[i] - starts[i - 1], 111 / 11);
    EXPECT_LE(starts[i] - starts[i - 1], 111 / 11 + 1);
  }
}

TEST(GptData, MoreValidationBatchesThanTextAreAllowed) {
  Data d(Counting(40), 8, 2);
  std::vector<uint8_t> inputs(16), targets(16);
  for (int64_t index = 0; index < 100; ++index)
    gpt_data_validation_batch(&d.data, index, 100, inputs.data(), targets.data());
}

} // namespace
