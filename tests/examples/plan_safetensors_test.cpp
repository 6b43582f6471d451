/* SPDX-License-Identifier: MIT */
/* The header parser: what it takes, what it refuses and how it says so, and any damage at all. The
 * command line's test has one file for each refusal; here are the cases that a shell cannot write.
 */
#include "examples/plan/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

namespace {

class Parsed {
public:
  explicit Parsed(const std::string &header, int64_t data_nbytes = 4) {
    status =
        plan_safetensors_parse("file", header.data(), header.size(), data_nbytes, &tensors, &error);
  }
  ~Parsed() { plan_tensors_free(&tensors); }
  Parsed(const Parsed &) = delete;
  Parsed &operator=(const Parsed &) = delete;
  bool says(const std::string &text) const {
    return status == PLAN_USAGE_ERROR && std::string(error.text).find(text) != std::string::npos;
  }
  plan_tensors tensors;
  plan_error error = {};
  int status;
};

std::string named(const std::string &name) {
  return "{\"" + name + "\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]}}";
}

TEST(PlanSafetensors, Takes) {
  const Parsed p(" { \"__metadata__\" : { \"a\" : \"line\\nline\" } ,\n"
                 "\t\"b\" : { \"shape\" : [ 2 , 3 ] , \"data_offsets\" : [ 8 , 32 ] , \"dtype\" : "
                 "\"F32\" } ,\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                 "\"empty\":{\"dtype\":\"F8_E4M3\",\"shape\":[0,9223372036854775807,"
                 "9223372036854775807],\"data_offsets\":[8,8]}} \n",
                 32);
  ASSERT_EQ(p.status, PLAN_OK) << p.error.text;
  ASSERT_EQ(p.tensors.count, 3);
  EXPECT_STREQ(p.tensors.list[0].name, "b");
  EXPECT_STREQ(p.tensors.list[0].dtype, "F32");
  EXPECT_EQ(p.tensors.list[0].ndim, 2);
  EXPECT_EQ(p.tensors.list[0].shape[1], 3);
  EXPECT_EQ(p.tensors.list[0].begin, 8);
  EXPECT_EQ(p.tensors.list[1].ndim, 0);
  EXPECT_EQ(p.tensors.list[2].end, 8);
}

TEST(PlanSafetensors, NamesAreUtf8) {
  const Parsed escaped(named("\\u00e9\\ud83d\\ude00\\/\\\"\\\\"));
  ASSERT_EQ(escaped.status, PLAN_OK) << escaped.error.text;
  EXPECT_STREQ(escaped.tensors.list[0].name, "\xc3\xa9\xf0\x9f\x98\x80/\"\\");
  const Parsed plain(named("\xc3\xa9\xf0\x9f\x98\x80"));
  ASSERT_EQ(plain.status, PLAN_OK) << plain.error.text;
  EXPECT_STREQ(plain.tensors.list[0].name, "\xc3\xa9\xf0\x9f\x98\x80");
  for (const char *bad : {"\x80", "\xc0\x80", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80",
                          "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xff"})
    EXPECT_TRUE(Parsed(named(bad)).says("not UTF-8")) << Parsed(named(bad)).error.text;
  for (const char *bad : {"\\ud83d", "\\ude00", "\\ud83dx", "\\ud83d\\u0041"})
    EXPECT_TRUE(Parsed(named(bad)).says("surrogate")) << bad;
  EXPECT_TRUE(Parsed(named("\\u12g4")).says("hexadecimal"));
  EXPECT_TRUE(Parsed(named("\\x41")).says("escape"));
  EXPECT_TRUE(Parsed(named("\\u0000")).says("0 character"));
  EXPECT_TRUE(Parsed(named("\\n")).says("control character in a name"));
  EXPECT_TRUE(Parsed(named("a\nb")).says("control character"));
  EXPECT_TRUE(Parsed(named("")).says("without a name"));
}

TEST(PlanSafetensors, MessagesNameThePlace) {
  EXPECT_TRUE(Parsed("{\"a\" 1").says("file: header byte 5: needs : after a name"));
  EXPECT_TRUE(Parsed(std::string("{}\0", 3)).says("header byte 2"));
  EXPECT_TRUE(Parsed("{\"a\":{\"dtype\":\"F32\",\"shape\":[01]}}").says("leading 0"));
  EXPECT_TRUE(Parsed("{\"a\":{\"dtype\":\"F32\",\"shape\":[1e3]}}").says("whole number"));
  EXPECT_TRUE(Parsed("{\"a\":[]}").says("'a' needs an object"));
  EXPECT_TRUE(Parsed("{\"__metadata__\":{\"a\":1}}").says("needs a string"));
  EXPECT_TRUE(Parsed("{\"__metadata__\":{},\"__metadata__\":{}}").says("twice"));
  EXPECT_TRUE(Parsed("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}")
                  .says("ends before it begins"));
  EXPECT_TRUE(Parsed("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}")
                  .says("two data_offsets"));
}

/* A name that is cut or changed anywhere: never a crash (the sanitizers look), and a failure leaves
 * nothing behind and says something. */
TEST(PlanSafetensors, AnyDamage) {
  const std::string good =
      "{\"__metadata__\":{\"format\":\"pt\"},\"layers.0.w\\u00e9\":{\"dtype\":\"BF16\",\"shape\":["
      "2,"
      "2],\"data_offsets\":[0,8]},\"b\":{\"shape\":[],\"data_offsets\":[8,12],\"dtype\":\"F32\"}}";
  const char letters[] = "{}[]:,\"\\ u0123456789-.eE\x01\x7f\xc3\xff";
  std::mt19937 random(1);
  ASSERT_EQ(Parsed(good, 12).status, PLAN_OK);
  int taken = 0;
  for (std::size_t cut = 0; cut < good.size(); ++cut)
    EXPECT_EQ(Parsed(good.substr(0, cut), 12).status, PLAN_USAGE_ERROR) << cut;
  for (int round = 0; round < 20000; ++round) {
    std::string text = good;
    for (unsigned i = 0; i <= random() % 3; ++i) {
      const std::size_t at = random() % text.size();
      const char letter = letters[random() % (sizeof letters - 1)];
      switch (random() % 3) {
      case 0: text[at] = letter; break;
      case 1: text.insert(at, 1, letter); break;
      default: text.erase(at, 1); break;
      }
    }
    const Parsed p(text, 12);
    if (p.status == PLAN_OK) {
      ++taken;
      EXPECT_LE(p.tensors.count, 2);
      continue;
    }
    EXPECT_EQ(p.status, PLAN_USAGE_ERROR);
    EXPECT_EQ(p.tensors.count, 0);
    EXPECT_GT(std::strlen(p.error.text), 10u);
  }
  EXPECT_GT(taken, 0); /* damage inside a name or a text */
  EXPECT_LT(taken, 15000);
}

} // namespace
