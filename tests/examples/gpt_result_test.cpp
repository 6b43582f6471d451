/* SPDX-License-Identifier: MIT */
#include "examples/gpt/result.h"

#include "tests/examples/gpt_test.h"

#include <cmath>
#include <cstring>
#include <memory>

using gpt_test::TempFile;

namespace {

std::unique_ptr<gpt_result> Example() {
  std::unique_ptr<gpt_result> r(new gpt_result());
  r->steps = 200;
  r->ranks = 3;
  r->train_loss = 1.5;
  r->val_loss = 1.625;
  std::strcpy(r->params_hash, "0123456789abcdef");
  r->tokens_per_s = 12345.5;
  r->opt_step_ms = 2.25;
  r->bytes.materialize = INT64_C(5000000000);
  r->bytes.reduce = 2;
  r->bytes.optimizer_matrix = 0;
  r->bytes.scalar = 4;
  for (int i = 0; i < 3; ++i)
    r->resident_bytes[i] = 1000 + i;
  r->slot_bytes = 5;
  r->skipped_steps = 6;
  r->ns_calls = 7;
  std::strcpy(r->strategy, "zero1");
  return r;
}

/* The line of Example(), every key in its order. */
const char line[] =
    "{\"steps\":200,\"ranks\":3,\"train_loss\":1.5,\"val_loss\":1.625,"
    "\"params_hash\":\"0123456789abcdef\",\"tokens_per_s\":12345.5,\"opt_step_ms\":2.25,"
    "\"bytes\":{\"materialize\":5000000000,\"reduce\":2,\"optimizer_matrix\":0,\"scalar\":4},"
    "\"resident_bytes\":[1000,1001,1002],\"slot_bytes\":5,\"skipped_steps\":6,\"ns_calls\":7,"
    "\"strategy\":\"zero1\"}";

std::string Replace(std::string text, const std::string &from, const std::string &to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string ReadError(const std::string &text) {
  const TempFile file(text);
  std::unique_ptr<gpt_result> r(new gpt_result());
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_result_read(file.path(), r.get(), &error), GPT_USAGE_ERROR) << text;
  EXPECT_NE(std::string(error.text).find(file.path()), std::string::npos) << error.text;
  return error.text;
}

void ExpectReads(const std::string &text) {
  const TempFile file(text);
  std::unique_ptr<gpt_result> r(new gpt_result());
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_result_read(file.path(), r.get(), &error), GPT_OK) << error.text;
  EXPECT_EQ(std::memcmp(r.get(), Example().get(), sizeof *r), 0) << text;
}

TEST(GptResult, WritesTheLineOfTheIssue) {
  gpt_test::TextOutput out;
  gpt_error error;
  ASSERT_EQ(gpt_result_write(out.file(), Example().get(), &error), GPT_OK);
  EXPECT_EQ(out.text(), std::string(line) + "\n");
}

TEST(GptResult, ReadsItBackAlsoBehindOtherOutput) {
  ExpectReads(line);
  ExpectReads(std::string("audit\n{\"steps\":1}\n") + line + "\n\n");
  ExpectReads(Replace(line, "\"ranks\":3,", " \"ranks\" : 3 ,\t"));
}

TEST(GptResult, KeysOfLaterVersionsAreSkipped) {
  for (const char *more :
       {"\"x\":1,", "\"x\":-1.5e3,", "\"x\":\"text\",", "\"x\":null,", "\"x\":true,", "\"x\":[],",
        "\"x\":[1,[2,{\"steps\":9}]],", "\"x\":{},", "\"x\":{\"steps\":[1],\"y\":false},"})
    ExpectReads(Replace(line, "\"ranks\"", std::string(more) + "\"ranks\""));
  ExpectReads(Replace(line, "\"reduce\":2", "\"export\":8,\"reduce\":2"));
}

TEST(GptResult, NotANumberIsNull) {
  auto r = Example();
  r->val_loss = NAN;
  r->train_loss = INFINITY;
  gpt_test::TextOutput out;
  gpt_error error;
  ASSERT_EQ(gpt_result_write(out.file(), r.get(), &error), GPT_OK);
  const TempFile file(out.text());
  ASSERT_EQ(gpt_result_read(file.path(), r.get(), &error), GPT_OK) << error.text;
  EXPECT_TRUE(std::isnan(r->val_loss));
  EXPECT_TRUE(std::isnan(r->train_loss));
}

TEST(GptResult, EveryKeyIsNeededOnce) {
  for (const char *key :
       {"steps", "ranks", "train_loss", "val_loss", "params_hash", "tokens_per_s", "opt_step_ms",
        "materialize", "reduce", "optimizer_matrix", "scalar", "resident_bytes", "slot_bytes",
        "skipped_steps", "ns_calls", "strategy"}) {
    const std::string quoted = std::string("\"") + key + "\"";
    const std::string error = ReadError(Replace(line, quoted, "\"other\""));
    EXPECT_NE(error.find("is missing"), std::string::npos) << error;
    EXPECT_NE(error.find(key), std::string::npos) << error;
  }
  EXPECT_NE(ReadError(Replace(line, "\"ranks\":3", "\"steps\":3")).find("\"steps\" comes twice"),
            std::string::npos);
}

TEST(GptResult, DamagedLines) {
  const std::string l = line;
  EXPECT_NE(ReadError("").find("is not a JSON object"), std::string::npos);
  EXPECT_NE(ReadError("done").find("is not a JSON object"), std::string::npos);
  EXPECT_NE(ReadError(l + "}").find("goes on after"), std::string::npos);
  EXPECT_NE(ReadError(Replace(l, "[1000,1001,", "[1000,")).find("one entry per rank"),
            std::string::npos);
  struct {
    const char *from, *to;
  } wrong_types[] = {
      {"\"steps\":200", "\"steps\":\"200\""},
      {"\"steps\":200", "\"steps\":-200"},
      {"\"steps\":200", "\"steps\":200.5"},
      {"\"steps\":200", "\"steps\":99999999999999999999"},
      {"\"steps\":200", "\"steps\":"},
      {"\"val_loss\":1.625", "\"val_loss\":nan"},
      {"\"0123456789abcdef\"", "17"},
      {"\"0123456789abcdef\"", "\"0123456789abcdef0123456789abcdef0123\""},
      {"[1000,1001,1002]", "[1000,1001,]"},
      {"[1000,1001,1002]", "7"},
  };
  for (const auto &w : wrong_types)
    EXPECT_NE(ReadError(Replace(l, w.from, w.to)).find("has a value of the wrong type"),
              std::string::npos)
        << w.to;
  /* Cut anywhere, it is an error and nothing worse. */
  for (size_t length = 0; length < l.size(); ++length)
    ReadError(l.substr(0, length));
}

TEST(GptResult, DeepNestingIsRefused) {
  const std::string deep = "\"x\":" + std::string(100000, '[') + ",";
  EXPECT_NE(ReadError(Replace(line, "\"ranks\"", deep + "\"ranks\"")).find("nested too deeply"),
            std::string::npos);
  std::string objects = "\"x\":";
  for (int i = 0; i < 1000; ++i)
    objects += "{\"x\":";
  EXPECT_NE(ReadError(Replace(line, "\"ranks\"", objects + "\"ranks\"")).find("nested too deeply"),
            std::string::npos);
}

TEST(GptResult, AsManyRanksAsThereMayBeAndOneMore) {
  auto r = Example();
  r->ranks = GPT_RESULT_MAX_RANKS;
  gpt_test::TextOutput out;
  gpt_error error;
  ASSERT_EQ(gpt_result_write(out.file(), r.get(), &error), GPT_OK);
  const std::string text = out.text();
  const TempFile file(text);
  EXPECT_EQ(gpt_result_read(file.path(), r.get(), &error), GPT_OK) << error.text;
  EXPECT_NE(ReadError(Replace(text, "[1000,", "[0,1000,")).find("wrong type"), std::string::npos);
}

TEST(GptResult, AFullDiskIsNoticed) {
  FILE *full = fopen("/dev/full", "w");
  if (!full) GTEST_SKIP() << "no /dev/full";
  gpt_error error = gpt_error();
  EXPECT_EQ(gpt_result_write(full, Example().get(), &error), GPT_USAGE_ERROR);
  fclose(full);
}

} // namespace
