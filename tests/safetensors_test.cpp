/* SPDX-License-Identifier: MIT */
/* Hostile files, each with its fault; what is valid; layouts against a restatement of their rule;
 * memory and allocation failures. Random damage: tests/fuzz. The Python package: tests/cli. */
#include "mfsdp/safetensors.h"

#include "tests/support/fault_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

#define FAULT(name) MFSDP_SAFETENSORS_FAULT_##name

std::string length_prefix(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i)
    bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

/* The bytes of a file. The last argument: bytes of data. */
std::string file_of(const std::string &header, std::size_t data_nbytes) {
  return length_prefix(header.size()) + header + std::string(data_nbytes, '\0');
}

/* A context whose allocator checks every block, and that everything came back. */
class Rig {
public:
  Rig() {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory.allocator();
    EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  }
  ~Rig() {
    EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
    EXPECT_EQ(memory.live_count(), 0u);
    EXPECT_EQ(memory.complaints(), "");
  }
  std::string message() { return mfsdp_context_error(&context)->message; }

  test::FaultAllocator memory;
  mfsdp_context context;
};

/* A file in memory of exactly its bytes, so that a sanitizer sees a read behind them. */
class Parsed : public Rig {
public:
  explicit Parsed(const std::string &bytes) : bytes_(new char[bytes.size() + 1]) {
    std::memcpy(bytes_.get() + 1, bytes.data(), bytes.size());
    const mfsdp_safetensors_source source =
        mfsdp_safetensors_source_memory("file", bytes_.get() + 1, bytes.size());
    status = mfsdp_safetensors_create(&context, &source, &file, &fault);
    EXPECT_EQ(file != nullptr, status == MFSDP_OK);
  }
  Parsed(const std::string &header, std::size_t data_nbytes)
      : Parsed(file_of(header, data_nbytes)) {}
  ~Parsed() { mfsdp_safetensors_destroy(&context, file); }

  mfsdp_safetensors *file;
  mfsdp_safetensors_fault fault;
  mfsdp_status status;

private:
  std::unique_ptr<char[]> bytes_;
};

class ParsedIndex : public Rig {
public:
  explicit ParsedIndex(const std::string &text) : text_(text.begin(), text.end()) {
    const mfsdp_safetensors_source source =
        mfsdp_safetensors_source_memory("index", text_.data(), text_.size());
    status = mfsdp_safetensors_index_create(&context, &source, &index, &fault);
    EXPECT_EQ(index != nullptr, status == MFSDP_OK);
  }
  ~ParsedIndex() { mfsdp_safetensors_index_destroy(&context, index); }

  mfsdp_safetensors_index *index;
  mfsdp_safetensors_fault fault;
  mfsdp_status status;

private:
  std::vector<char> text_;
};

std::string tensor(const std::string &name, const std::string &members) {
  return "\"" + name + "\":{" + members + "}";
}

/* Two bf16 elements under a name. */
std::string named(const std::string &name) {
  return "{" + tensor(name, "\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]") + "}";
}

std::string with(const std::string &members) {
  return "{" + tensor("a", members) + "}";
}

std::string meta(const std::string &value) {
  return "{\"__metadata__\":" + value + "}";
}

std::string bf16(const std::string &name, int begin, int end, int count) {
  return tensor(name, "\"dtype\":\"BF16\",\"shape\":[" + std::to_string(count) +
                          "],\"data_offsets\":[" + std::to_string(begin) + "," +
                          std::to_string(end) + "]");
}

struct Hostile {
  mfsdp_safetensors_fault fault;
  std::string header;
  std::size_t data_nbytes;
};

std::vector<Hostile> hostile_headers() {
  const std::string dtype = "\"dtype\":\"BF16\"", shape = "\"shape\":[2]",
                    offsets = "\"data_offsets\":[0,4]";
  std::string ones = "1";
  for (int i = 0; i < MFSDP_SAFETENSORS_MAX_NDIM; ++i)
    ones += ",1";
  return {
      {FAULT(START), "", 0},
      {FAULT(START), "null", 0},
      {FAULT(START), " {}", 0},
      {FAULT(START), "[]", 0},
      {FAULT(START), std::string("\0", 1), 0},
      {FAULT(END), "{", 0},
      {FAULT(END), "{\"a", 0},
      {FAULT(END), "{\"a\\", 0},
      {FAULT(END), "{\"a\"", 0},
      {FAULT(END), "{\"a\":", 0},
      {FAULT(END), "{" + bf16("a", 0, 4, 2), 4},
      {FAULT(END), "{" + bf16("a", 0, 4, 2) + ",", 4},
      {FAULT(SYNTAX), "{\"a\" 1}", 0},
      {FAULT(SYNTAX), "{" + bf16("a", 0, 4, 2) + " " + bf16("b", 4, 8, 2) + "}", 8},
      {FAULT(SYNTAX), with(dtype + "," + shape + ",\"data_offsets\":[0 4]"), 4},
      {FAULT(TRAILING), "{}{}", 0},
      {FAULT(TRAILING), std::string("{}\0", 3), 0},
      {FAULT(UTF8), named("\x80"), 4},
      {FAULT(UTF8), named("\xc0\x80"), 4},
      {FAULT(UTF8), named("\xc3"), 4},
      {FAULT(UTF8), named("\xe0\x80\x80"), 4},
      {FAULT(UTF8), named("\xed\xa0\x80"), 4},
      {FAULT(UTF8), named("\xf0\x80\x80\x80"), 4},
      {FAULT(UTF8), named("\xf4\x90\x80\x80"), 4},
      {FAULT(UTF8), named("\xff"), 4},
      {FAULT(UTF8), meta("{\"a\":\"\xe2\x82\"}"), 0},
      {FAULT(UTF8), "{\"a\xe2\x82", 0}, /* cut by the end of the header */
      {FAULT(ESCAPE), named("\\x41"), 4},
      {FAULT(HEX), named("\\u12g4"), 4},
      {FAULT(HEX), "{\"\\u12", 0},
      {FAULT(HEX), named("\\ud83d\\u00zz"), 4},
      {FAULT(SURROGATE), named("\\ud83d"), 4},
      {FAULT(SURROGATE), named("\\ude00"), 4},
      {FAULT(SURROGATE), named("\\ud83dx"), 4},
      {FAULT(SURROGATE), named("\\ude00\\ude00"), 4},
      {FAULT(SURROGATE), named("\\ud83d\\u0041"), 4},
      {FAULT(SURROGATE), named("\\ud83d\\n"), 4},
      {FAULT(CONTROL), named("a\nb"), 4},
      {FAULT(CONTROL), named(std::string("a\0b", 3)), 4},
      {FAULT(ZERO), named("\\u0000"), 4},
      {FAULT(ZERO), meta("{\"a\":\"b\\u0000\"}"), 0},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[2.5]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[2.0]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[1e3]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[\"2\"]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[+2]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[2,]," + offsets), 4},
      {FAULT(NUMBER), with(dtype + ",\"shape\":[null]," + offsets), 4},
      {FAULT(NEGATIVE), with(dtype + ",\"shape\":[-2]," + offsets), 4},
      {FAULT(NEGATIVE), with(dtype + "," + shape + ",\"data_offsets\":[-4,0]"), 4},
      {FAULT(NEGATIVE), with(dtype + "," + shape + ",\"data_offsets\":[-0,4]"), 4},
      {FAULT(LEADING_ZERO), with(dtype + ",\"shape\":[02]," + offsets), 4},
      {FAULT(LEADING_ZERO), with(dtype + ",\"shape\":[00]," + offsets), 4},
      {FAULT(NUMBER_LARGE), with(dtype + ",\"shape\":[9223372036854775808]," + offsets), 4},
      {FAULT(NUMBER_LARGE), with(dtype + ",\"shape\":[18446744073709551618]," + offsets), 4},
      {FAULT(NUMBER_LARGE),
       with(dtype + "," + shape + ",\"data_offsets\":[0," + std::string(100, '9') + "]"), 4},
      {FAULT(NEEDS_OBJECT), "{\"a\":[]}", 0},
      {FAULT(NEEDS_OBJECT), "{\"a\":null}", 0},
      {FAULT(NEEDS_OBJECT), meta("null"), 0},
      {FAULT(NEEDS_LIST), with(dtype + ",\"shape\":2," + offsets), 4},
      {FAULT(NEEDS_LIST), with(dtype + ",\"shape\":{}," + offsets), 4},
      {FAULT(NEEDS_STRING), "{1:2}", 0},
      {FAULT(NEEDS_STRING), "{" + bf16("a", 0, 4, 2) + ",}", 4},
      {FAULT(NEEDS_STRING), with("\"dtype\":2," + shape + "," + offsets), 4},
      {FAULT(NEEDS_STRING), meta("{\"a\":1}"), 0},
      {FAULT(NEEDS_STRING), meta("{\"a\":null}"), 0},
      {FAULT(NESTED), meta("{\"a\":{\"b\":\"c\"}}"), 0},
      {FAULT(NESTED), meta("{\"a\":[]}"), 0},
      {FAULT(NESTED), with(dtype + ",\"shape\":[[2]]," + offsets), 4},
      {FAULT(NESTED), with("\"dtype\":{}," + shape + "," + offsets), 4},
      {FAULT(NESTED), "{" + std::string(100000, '{'), 0},
      {FAULT(NESTED), with(dtype + ",\"shape\":" + std::string(100000, '[')), 0},
      {FAULT(METADATA_TWICE), "{\"__metadata__\":{},\"__metadata__\":{}}", 0},
      {FAULT(METADATA_TWICE), "{\"__metadata__\":{},\"\\u005f_metadata__\":{}}", 0},
      {FAULT(KEY_TWICE), meta("{\"a\":\"1\",\"b\":\"2\",\"\\u0061\":\"3\"}"), 0},
      {FAULT(NAME_EMPTY), named(""), 4},
      {FAULT(NAME_CONTROL), named("\\n"), 4},
      {FAULT(NAME_CONTROL), named("\x7f"), 4},
      {FAULT(NAME_CONTROL), named("\\u009b"), 4},
      {FAULT(NAME_CONTROL), named("\xc2\x9b"), 4},
      {FAULT(NAME_TWICE), "{" + bf16("a", 0, 4, 2) + "," + bf16("a", 4, 8, 2) + "}", 8},
      {FAULT(NAME_TWICE), "{" + bf16("a", 0, 4, 2) + "," + bf16("\\u0061", 4, 8, 2) + "}", 8},
      {FAULT(MEMBER_UNKNOWN), with(dtype + "," + shape + "," + offsets + ",\"offset\":0"), 4},
      {FAULT(MEMBER_UNKNOWN), with("\"Dtype\":\"BF16\"," + shape + "," + offsets), 4},
      {FAULT(MEMBER_UNKNOWN), with("\"" + std::string(20000, 'x') + "\":1"), 4},
      {FAULT(MEMBER_TWICE), with(dtype + "," + shape + "," + offsets + "," + dtype), 4},
      {FAULT(MEMBER_TWICE), with(dtype + "," + shape + "," + offsets + "," + shape), 4},
      {FAULT(MEMBER_TWICE), with(dtype + "," + shape + "," + offsets + "," + offsets), 4},
      {FAULT(MEMBER_MISSING), with(dtype + "," + shape), 4},
      {FAULT(MEMBER_MISSING), with(dtype + "," + offsets), 4},
      {FAULT(MEMBER_MISSING), with(shape + "," + offsets), 4},
      {FAULT(MEMBER_MISSING), with(""), 4},
      {FAULT(DTYPE), with("\"dtype\":\"BF17\"," + shape + "," + offsets), 4},
      {FAULT(DTYPE), with("\"dtype\":\"bf16\"," + shape + "," + offsets), 4},
      {FAULT(DTYPE), with("\"dtype\":\"\"," + shape + "," + offsets), 4},
      {FAULT(DTYPE), with("\"dtype\":\"" + std::string(20000, 'F') + "\"," + shape), 4},
      {FAULT(NDIM), with(dtype + ",\"shape\":[" + ones + "],\"data_offsets\":[0,2]"), 2},
      {FAULT(OFFSET_COUNT), with(dtype + "," + shape + ",\"data_offsets\":[0]"), 4},
      {FAULT(OFFSET_COUNT), with(dtype + "," + shape + ",\"data_offsets\":[0,4,8]"), 4},
      {FAULT(OFFSET_COUNT), with(dtype + "," + shape + ",\"data_offsets\":[]"), 4},
      {FAULT(OFFSET_ORDER), with(dtype + "," + shape + ",\"data_offsets\":[4,0]"), 4},
      {FAULT(SHAPE_LARGE), with(dtype + ",\"shape\":[4294967296,4294967296]," + offsets), 4},
      {FAULT(SHAPE_LARGE), with(dtype + ",\"shape\":[9223372036854775807]," + offsets), 4},
      {FAULT(SHAPE_LARGE),
       with(dtype + ",\"shape\":[0,9223372036854775807,4],"
                    "\"data_offsets\":[0,0]"),
       0},
      {FAULT(MISALIGNED), with("\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]"), 1},
      {FAULT(MISALIGNED), with("\"dtype\":\"F6_E2M3\",\"shape\":[3],\"data_offsets\":[0,2]"), 2},
      {FAULT(NBYTES), bf16("a", 0, 6, 2).insert(0, "{") + "}", 6},
      {FAULT(NBYTES), bf16("a", 0, 2, 2).insert(0, "{") + "}", 2},
      {FAULT(NBYTES), with(dtype + ",\"shape\":[],\"data_offsets\":[0,0]"), 0},
      {FAULT(NBYTES), with(dtype + ",\"shape\":[0]," + offsets), 4},
      {FAULT(BEYOND), with(dtype + "," + shape + "," + offsets), 3},
      {FAULT(BEYOND),
       with(dtype + "," + shape + ",\"data_offsets\":[9223372036854775803,9223372036854775807]"),
       4},
      {FAULT(OVERLAP), "{" + bf16("a", 0, 4, 2) + "," + bf16("b", 2, 6, 2) + "}", 6},
      {FAULT(OVERLAP), "{" + bf16("a", 0, 4, 2) + "," + bf16("b", 0, 4, 2) + "}", 4},
      {FAULT(OVERLAP), "{" + bf16("a", 0, 4, 2) + "," + bf16("b", 2, 2, 0) + "}", 4},
      {FAULT(HOLE), "{" + bf16("a", 4, 8, 2) + "}", 8},
      {FAULT(HOLE), "{" + bf16("a", 0, 4, 2) + "," + bf16("b", 6, 10, 2) + "}", 10},
      {FAULT(UNUSED), "{" + bf16("a", 0, 4, 2) + "}", 5},
      {FAULT(UNUSED), "{}", 1},
  };
}

TEST(Safetensors, EveryHostileHeaderHasItsFault) {
  std::set<mfsdp_safetensors_fault> seen;
  for (const Hostile &hostile : hostile_headers()) {
    Parsed p(hostile.header, hostile.data_nbytes);
    const std::string shown = hostile.header.substr(0, 200);
    EXPECT_EQ(p.status, MFSDP_E_FORMAT) << shown;
    EXPECT_STREQ(mfsdp_safetensors_fault_name(p.fault), mfsdp_safetensors_fault_name(hostile.fault))
        << shown << "\n"
        << p.message();
    EXPECT_NE(p.message().find(mfsdp_safetensors_fault_text(p.fault)), std::string::npos);
    EXPECT_NE(p.message().find("file: "), std::string::npos);
    seen.insert(p.fault);
  }
  /* All but those of the length and of the index, which other tests have. */
  for (int fault = FAULT(START); fault <= FAULT(UNUSED); ++fault)
    EXPECT_EQ(seen.count(static_cast<mfsdp_safetensors_fault>(fault)), 1u)
        << mfsdp_safetensors_fault_name(static_cast<mfsdp_safetensors_fault>(fault));
}

TEST(Safetensors, HostileLengths) {
  for (std::size_t n = 0; n < 8; ++n) {
    Parsed p(std::string(n, '\0'));
    EXPECT_EQ(p.fault, FAULT(FILE_SHORT)) << n;
    EXPECT_EQ(p.status, MFSDP_E_FORMAT);
  }
  for (uint64_t below = 1; below <= 9; ++below) {
    Parsed p(length_prefix(0 - below) + "{}");
    EXPECT_EQ(p.fault, FAULT(HEADER_LARGE)) << below;
    EXPECT_EQ(p.memory.peak_nbytes(), sizeof(mfsdp_safetensors)); /* none for the header */
  }
  for (const uint64_t length : {UINT64_C(1) << 63, UINT64_C(1) << 32, UINT64_C(100000001)}) {
    Parsed p(length_prefix(length) + "{}");
    EXPECT_EQ(p.fault, FAULT(HEADER_LARGE)) << length;
  }
  for (const uint64_t length : {UINT64_C(3), UINT64_C(10), UINT64_C(100000000)}) {
    Parsed p(length_prefix(length) + "{}");
    EXPECT_EQ(p.fault, FAULT(HEADER_SHORT)) << length;
    EXPECT_EQ(p.memory.peak_nbytes(), sizeof(mfsdp_safetensors));
  }
}

TEST(Safetensors, MessagesNameThePlaceAndTheTensor) {
  EXPECT_EQ(Parsed("{\"a\" 1", 0).message(),
            "file: header byte 5: a character is out of place: needs : behind a name");
  EXPECT_EQ(
      Parsed("{" + bf16("w\\u0065", 0, 6, 2) + "}", 6).message(),
      "file: tensor 'w\\u0065': the tensor's bytes of data are not those of its shape: has 6, "
      "needs 4");
  EXPECT_EQ(Parsed(with("\"dtype\":\"BF17\""), 0).message(),
            "file: tensor 'a': the tensor has an unknown dtype 'BF17'");
  EXPECT_EQ(
      Parsed("{" + bf16("a", 4, 8, 2) + "}", 8).message(),
      "file: tensor 'a': the tensor leaves a hole before it (begins at data byte 4, needs 0)");
  /* A long name is cut between characters, not in one. */
  std::string name = "x";
  for (int i = 0; i < 100; ++i)
    name += "\xc3\xa9";
  const std::string message = Parsed("{" + bf16(name, 0, 6, 2) + "}", 6).message();
  EXPECT_NE(message.find(name.substr(0, 99) + "'"), std::string::npos) << message;
}

TEST(Safetensors, TakesWhatIsValid) {
  Parsed p("{ \"__metadata__\" : { \"text\" : \"line\\nline\" , \"\" : \"\" } ,\n"
           "\t\"b\" : { \"shape\" : [ 2 , 3 ] , \"data_offsets\" : [ 8 , 32 ] , \"dtype\" : "
           "\"F32\" } ,\"a\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
           "\"odd\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[33,37]},"
           "\"byte\":{\"dtype\":\"BOOL\",\"shape\":[1,1],\"data_offsets\":[32,33]},"
           "\"empty\":{\"dtype\":\"F8_E4M3\",\"shape\":[0,7],\"data_offsets\":[8,8]},"
           "\"none\":{\"dtype\":\"F4\",\"shape\":[3,0],\"data_offsets\":[37,37]}} \n ",
           37);
  ASSERT_EQ(p.status, MFSDP_OK) << p.message();
  EXPECT_EQ(p.fault, FAULT(NONE));
  ASSERT_EQ(mfsdp_safetensors_count(p.file), 6);
  const mfsdp_safetensors_tensor *b = mfsdp_safetensors_at(p.file, 0); /* order of the header */
  EXPECT_STREQ(b->name, "b");
  EXPECT_EQ(b->dtype, MFSDP_SAFETENSORS_F32);
  ASSERT_EQ(b->ndim, 2);
  EXPECT_EQ(b->shape[0], 2);
  EXPECT_EQ(b->shape[1], 3);
  EXPECT_EQ(b->nbytes, 24);
  const mfsdp_safetensors_tensor *a = mfsdp_safetensors_find(p.file, "a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a, mfsdp_safetensors_at(p.file, 1));
  EXPECT_EQ(a->ndim, 0);
  EXPECT_EQ(b->file_offset - a->file_offset, 8);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, "odd")->file_offset, a->file_offset + 33);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, "empty")->nbytes, 0);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, "none")->shape[0], 3);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, ""), nullptr);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, "z"), nullptr);
  EXPECT_EQ(mfsdp_safetensors_find(p.file, "__metadata__"), nullptr);
  EXPECT_EQ(mfsdp_safetensors_at(p.file, 6), nullptr);
  EXPECT_EQ(mfsdp_safetensors_at(p.file, -1), nullptr);
  ASSERT_EQ(mfsdp_safetensors_metadata_count(p.file), 2);
  EXPECT_STREQ(mfsdp_safetensors_metadata_at(p.file, 0)->key, "text");
  EXPECT_STREQ(mfsdp_safetensors_metadata_find(p.file, "text"), "line\nline");
  EXPECT_STREQ(mfsdp_safetensors_metadata_find(p.file, ""), "");
  EXPECT_EQ(mfsdp_safetensors_metadata_find(p.file, "other"), nullptr);
  EXPECT_EQ(mfsdp_safetensors_metadata_at(p.file, 2), nullptr);
}

TEST(Safetensors, EmptyFilesAreValid) {
  for (const char *header : {"{}", "{}      ", "{ \n}", "{\"__metadata__\":{}}"}) {
    Parsed p(header, 0);
    ASSERT_EQ(p.status, MFSDP_OK) << p.message();
    EXPECT_EQ(mfsdp_safetensors_count(p.file), 0);
    EXPECT_EQ(mfsdp_safetensors_metadata_count(p.file), 0);
    EXPECT_EQ(mfsdp_safetensors_find(p.file, "a"), nullptr);
  }
}

TEST(Safetensors, StringsAreDecoded) {
  const std::pair<const char *, const char *> cases[] = {
      {"\\u00e9\\ud83d\\ude00\\/\\\"\\\\", "\xc3\xa9\xf0\x9f\x98\x80/\"\\"},
      {"\xc3\xa9\xf0\x9f\x98\x80", "\xc3\xa9\xf0\x9f\x98\x80"},
      {"\\u0041\\u07FF\\u0800\\uFFFF\\uDBFF\\uDFFF",
       "A\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf4\x8f\xbf\xbf"},
      {"a.b-c d", "a.b-c d"},
      {"\xed\x9f\xbf\xee\x80\x80", "\xed\x9f\xbf\xee\x80\x80"}, /* around the surrogates */
  };
  for (const auto &c : cases) {
    Parsed p(named(c.first), 4);
    ASSERT_EQ(p.status, MFSDP_OK) << p.message();
    EXPECT_STREQ(mfsdp_safetensors_at(p.file, 0)->name, c.second);
    EXPECT_NE(mfsdp_safetensors_find(p.file, c.second), nullptr);
  }
  Parsed p("{\"a\":{\"\\u0064type\":\"\\u0042F16\",\"shap\\u0065\":[2],\"data_offsets\":[0,4]},"
           "\"__metadata__\":{\"k\\t\":\"\\b\\f\\n\\r\\t\\u001f\"}}",
           4);
  ASSERT_EQ(p.status, MFSDP_OK) << p.message();
  EXPECT_EQ(mfsdp_safetensors_at(p.file, 0)->dtype, MFSDP_SAFETENSORS_BF16);
  EXPECT_STREQ(mfsdp_safetensors_metadata_find(p.file, "k\t"), "\b\f\n\r\t\x1f");
}

TEST(Safetensors, EveryCutOfAHeaderIsRefused) {
  const std::string good = "{\"__metadata__\":{\"f\\u00e9\":\"pt\"}," + bf16("x\xc3\xa9", 0, 4, 2) +
                           "," + bf16("\\ud83d\\ude00", 4, 8, 2) + "}";
  ASSERT_EQ(Parsed(good, 8).status, MFSDP_OK);
  for (std::size_t cut = 0; cut < good.size(); ++cut) {
    Parsed p(good.substr(0, cut), 8);
    EXPECT_EQ(p.status, MFSDP_E_FORMAT) << cut;
    EXPECT_TRUE(p.fault == FAULT(END) || p.fault == FAULT(START) || p.fault == FAULT(HEX) ||
                p.fault == FAULT(UTF8) || p.fault == FAULT(SURROGATE))
        << cut << " " << p.message();
  }
}

/* Changed at one to three places: never a crash (the sanitizers look), and a refusal has a fault and
 * says something. tests/fuzz does the same for longer. */
TEST(Safetensors, AnyDamage) {
  const std::string good = "{\"__metadata__\":{\"format\":\"pt\"},\"layers.0.w\\u00e9\":{\"dtype\":"
                           "\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,8]},\"b\":{\"shape\":[],"
                           "\"data_offsets\":[8,12],\"dtype\":\"F32\"}}";
  const char letters[] = "{}[]:,\"\\ u0123456789-.eE\x01\x7f\xc3\xff";
  std::mt19937 random(1);
  ASSERT_EQ(Parsed(good, 12).status, MFSDP_OK);
  int taken = 0;
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
    Parsed p(text, 12);
    ASSERT_EQ(p.status == MFSDP_OK, p.fault == FAULT(NONE));
    if (p.status == MFSDP_OK) {
      ++taken;
      EXPECT_EQ(mfsdp_safetensors_count(p.file), 2);
    } else {
      ASSERT_EQ(p.status, MFSDP_E_FORMAT);
      EXPECT_GT(p.message().size(), 10u);
    }
  }
  EXPECT_GT(taken, 0); /* damage inside a name or a text */
  EXPECT_LT(taken, 15000);
}

/* ---- I/O ---- */

struct BrokenDisk {
  int64_t good_count;
  int says_why;
};

mfsdp_status broken_read(void *user, int64_t, std::size_t nbytes, void *dst, mfsdp_error *error) {
  BrokenDisk *disk = static_cast<BrokenDisk *>(user);
  if (disk->good_count-- > 0) {
    std::memset(dst, 0, nbytes);
    static_cast<char *>(dst)[0] = 2; /* a header of two bytes */
    return MFSDP_OK;
  }
  if (disk->says_why) return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "disk on fire");
  return MFSDP_E_IO;
}

TEST(Safetensors, ReadErrorsArriveWithTheirMessage) {
  for (int64_t good = 0; good < 2; ++good)
    for (int says_why = 0; says_why < 2; ++says_why) {
      Rig rig;
      BrokenDisk disk = {good, says_why};
      mfsdp_safetensors_source source = mfsdp_safetensors_source_default();
      mfsdp_safetensors *file;
      mfsdp_safetensors_fault fault;
      source.name = "disk";
      source.file_nbytes = 10;
      source.read = broken_read;
      source.user = &disk;
      EXPECT_EQ(mfsdp_safetensors_create(&rig.context, &source, &file, &fault), MFSDP_E_IO);
      EXPECT_EQ(file, nullptr);
      EXPECT_EQ(fault, FAULT(NONE));
      EXPECT_EQ(rig.message(), says_why ? "disk on fire"
                               : good   ? "disk: reading 2 bytes at byte 8 failed"
                                        : "disk: reading 8 bytes at byte 0 failed");
      if (good == 0) {
        mfsdp_safetensors_index *index;
        EXPECT_EQ(mfsdp_safetensors_index_create(&rig.context, &source, &index, nullptr),
                  MFSDP_E_IO);
      }
    }
}

TEST(Safetensors, SourcesAreCheckedBeforeTheyAreRead) {
  Rig rig;
  mfsdp_safetensors *file;
  char bytes[10] = {2, 0, 0, 0, 0, 0, 0, 0, '{', '}'}, dst[10];
  const mfsdp_safetensors_source good = mfsdp_safetensors_source_memory("m", bytes, sizeof bytes);
  for (int i = 0; i < 5; ++i) {
    mfsdp_safetensors_source bad = good;
    if (i == 0) bad.struct_nbytes = 0;
    if (i == 1) bad.name = nullptr;
    if (i == 2) bad.read = nullptr;
    if (i == 3) bad.file_nbytes = -1;
    EXPECT_EQ(mfsdp_safetensors_create(&rig.context, i == 4 ? nullptr : &bad, &file, nullptr),
              MFSDP_E_ARGUMENT)
        << i;
    EXPECT_EQ(file, nullptr);
  }
  EXPECT_EQ(mfsdp_safetensors_create(nullptr, &good, &file, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_create(&rig.context, &good, nullptr, nullptr), MFSDP_E_ARGUMENT);
  mfsdp_safetensors_destroy(&rig.context, nullptr);
  mfsdp_safetensors_index_destroy(&rig.context, nullptr);
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, 8, 2, dst), MFSDP_OK);
  EXPECT_EQ(dst[1], '}');
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, 10, 0, dst), MFSDP_OK);
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, 8, 3, dst), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, 8, SIZE_MAX, dst), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, 11, 0, dst), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_source_read(&rig.context, &good, -1, 1, dst), MFSDP_E_ARGUMENT);
}

/* ---- memory ---- */

TEST(Safetensors, AFailedAllocationLeavesNothing) {
  const std::string bytes =
      file_of("{\"__metadata__\":{\"a\":\"b\"}," + bf16("a", 0, 4, 2) + "}", 4);
  const std::string text = "{\"weight_map\":{\"a\":\"f\"}}";
  for (int what = 0; what < 2; ++what)
    for (int64_t n = 0;; ++n) {
      Rig rig;
      const std::string &from = what ? text : bytes;
      const mfsdp_safetensors_source source =
          mfsdp_safetensors_source_memory("f", from.data(), from.size());
      mfsdp_safetensors *file = nullptr;
      mfsdp_safetensors_index *index = nullptr;
      rig.memory.fail_at(n);
      const mfsdp_status status =
          what ? mfsdp_safetensors_index_create(&rig.context, &source, &index, nullptr)
               : mfsdp_safetensors_create(&rig.context, &source, &file, nullptr);
      if (!rig.memory.failed()) {
        EXPECT_EQ(status, MFSDP_OK);
        EXPECT_GE(n, 5);
        mfsdp_safetensors_destroy(&rig.context, file);
        mfsdp_safetensors_index_destroy(&rig.context, index);
        break;
      }
      EXPECT_EQ(status, MFSDP_E_MEMORY);
      EXPECT_EQ(rig.memory.live_count(), 0u);
    }
}

/* The densest texts of each kind, valid and hostile: the promise of read.h and index.h. Were the
 * check for duplicates quadratic, this test would take minutes. */
TEST(Safetensors, MemoryIsBoundedByTheText) {
  std::string tensors = "{", dims = "{", pairs = "{\"__metadata__\":{", same = pairs;
  std::string ones = "1", entries = "{\"weight_map\":{";
  for (int i = 1; i < MFSDP_SAFETENSORS_MAX_NDIM; ++i)
    ones += ",1";
  for (int i = 0; i < 100000; ++i) {
    const std::string comma = i ? "," : "", name = std::to_string(99999 - i);
    tensors += comma + tensor(name, "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]");
    if (i < 20000)
      dims += comma + tensor(name, "\"dtype\":\"U8\",\"shape\":[" + ones + "],\"data_offsets\":[" +
                                       std::to_string(i) + "," + std::to_string(i + 1) + "]");
    pairs += comma + "\"" + name + "\":\"\"";
    same += comma + "\"\":\"\"";
    entries += comma + "\"" + name + "\":\"f\"";
  }
  const auto bound = [](std::size_t nbytes) { return 6 * nbytes + 4096; };
  const auto check = [&](const std::string &header, std::size_t data_nbytes, mfsdp_status status) {
    Parsed p(header, data_nbytes);
    EXPECT_EQ(p.status, status) << p.message();
    EXPECT_LE(p.memory.peak_nbytes(), bound(header.size()));
    if (status == MFSDP_OK && mfsdp_safetensors_count(p.file) > 0) {
      EXPECT_NE(mfsdp_safetensors_find(p.file, "99998"), nullptr);
    }
  };
  check(tensors + "}", 0, MFSDP_OK);
  check(dims + "}", 20000, MFSDP_OK);
  check(pairs + "}}", 0, MFSDP_OK);
  check(same + "}}", 0, MFSDP_E_FORMAT);
  check(std::string(1000000, '['), 0, MFSDP_E_FORMAT);
  check("{\"" + std::string(1000000, 'a'), 0, MFSDP_E_FORMAT);
  ParsedIndex index(entries + "}}");
  EXPECT_EQ(index.status, MFSDP_OK);
  EXPECT_LE(index.memory.peak_nbytes(), bound(entries.size()));
  EXPECT_STREQ(mfsdp_safetensors_index_find(index.index, "77777"), "f");
}

/* ---- writing ---- */

/* Owns what a layout points to. */
class Layout : public Rig {
public:
  void add(const std::string &name, mfsdp_safetensors_dtype dtype, std::vector<int64_t> shape) {
    names_.emplace_back(new std::string(name));
    shapes_.emplace_back(new std::vector<int64_t>(std::move(shape)));
    mfsdp_safetensors_tensor t;
    std::memset(&t, 0, sizeof t);
    t.name = names_.back()->c_str();
    t.dtype = dtype;
    t.ndim = static_cast<int32_t>(shapes_.back()->size());
    t.shape = shapes_.back()->data();
    tensors.push_back(t);
  }
  mfsdp_status make() {
    std::memset(&layout, 0, sizeof layout);
    layout.tensors = tensors.data();
    layout.tensor_count = static_cast<int32_t>(tensors.size());
    layout.metadata = pairs.data();
    layout.pair_count = static_cast<int32_t>(pairs.size());
    return mfsdp_safetensors_layout_make(&context, &layout);
  }
  /* The header as text, with its 8 bytes. */
  std::string header() {
    EXPECT_EQ(make(), MFSDP_OK) << message();
    std::string bytes(layout.header_nbytes, 'x');
    EXPECT_EQ(mfsdp_safetensors_header_write(&context, &layout, &bytes[0], bytes.size()), MFSDP_OK)
        << message();
    return bytes;
  }

  std::vector<mfsdp_safetensors_tensor> tensors;
  std::vector<mfsdp_safetensors_pair> pairs;
  mfsdp_safetensors_layout layout;

private:
  std::vector<std::unique_ptr<std::string>> names_;
  std::vector<std::unique_ptr<std::vector<int64_t>>> shapes_;
};

TEST(SafetensorsWriter, BytesAreThoseOfTheReference) {
  Layout l;
  l.add("b", MFSDP_SAFETENSORS_BF16, {2, 3});
  l.add("z", MFSDP_SAFETENSORS_F32, {});
  l.add("a\"\\\xc3\xa9", MFSDP_SAFETENSORS_BF16, {0});
  l.pairs.push_back({"format", "p\tt\x01"});
  const std::string json =
      "{\"__metadata__\":{\"format\":\"p\\tt\\u0001\"},"
      "\"z\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
      "\"a\\\"\\\\\xc3\xa9\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[4,4]},"
      "\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[4,16]}}";
  const std::string padded = json + std::string((8 - json.size() % 8) % 8, ' ');
  EXPECT_EQ(l.header(), length_prefix(padded.size()) + padded);
  EXPECT_EQ(l.layout.header_nbytes, 8 + padded.size());
  EXPECT_EQ(l.layout.file_nbytes, static_cast<int64_t>(8 + padded.size() + 16));
  EXPECT_EQ(l.tensors[0].file_offset, static_cast<int64_t>(8 + padded.size() + 4));
  EXPECT_EQ(l.tensors[0].nbytes, 12);
  Layout empty;
  EXPECT_EQ(empty.header(), length_prefix(8) + "{}      ");
  EXPECT_EQ(empty.layout.file_nbytes, 16);
}

/* Random sets in random order: the same bytes, what is read back is what was written, the order is
 * the rule's, every header length modulo 8 is met. */
TEST(SafetensorsWriter, RoundTrip) {
  std::mt19937 random(1);
  std::set<std::size_t> paddings;
  for (int round = 0; round < 300; ++round) {
    Layout l, shuffled;
    const int count = static_cast<int>(random() % 12);
    std::vector<std::pair<std::pair<int, std::string>, int64_t>> rule;
    std::vector<int> order;
    for (int i = 0; i < count; ++i) {
      const auto dtype =
          static_cast<mfsdp_safetensors_dtype>(1 + random() % (MFSDP_SAFETENSORS_DTYPE_END - 1));
      std::vector<int64_t> shape(random() % 4);
      for (auto &n : shape)
        n = static_cast<int64_t>(random() % 5);
      shape.push_back(8); /* whole bytes for every dtype */
      const char *const stems[] = {"n", "layers.0.w", "\xc3\xa9", "\"\\/", "Z"};
      l.add(stems[random() % 5] + std::to_string(i), dtype, shape);
      order.push_back(i);
    }
    if (round % 3 == 0) l.pairs.push_back({"k", "v\n"});
    if (round % 3 == 0) l.pairs.push_back({"", "\xc3\xa9"});
    const std::string header = l.header();
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      const mfsdp_safetensors_tensor &t = l.tensors[static_cast<std::size_t>(i)];
      shuffled.add(t.name, t.dtype, std::vector<int64_t>(t.shape, t.shape + t.ndim));
    }
    shuffled.pairs.assign(l.pairs.rbegin(), l.pairs.rend());
    ASSERT_EQ(shuffled.header(), header);
    ASSERT_EQ(header.size() % 8, 0u);
    paddings.insert(header.size() - header.find_last_of('}') - 1);

    Parsed p(header +
             std::string(static_cast<std::size_t>(l.layout.file_nbytes) - header.size(), '\0'));
    ASSERT_EQ(p.status, MFSDP_OK) << p.message() << header;
    ASSERT_EQ(mfsdp_safetensors_count(p.file), count);
    for (const mfsdp_safetensors_tensor &t : l.tensors) {
      const mfsdp_safetensors_tensor *read = mfsdp_safetensors_find(p.file, t.name);
      ASSERT_NE(read, nullptr);
      EXPECT_EQ(read->dtype, t.dtype);
      EXPECT_EQ(read->file_offset, t.file_offset);
      EXPECT_EQ(read->nbytes, t.nbytes);
      ASSERT_EQ(read->ndim, t.ndim);
      EXPECT_TRUE(std::equal(t.shape, t.shape + t.ndim, read->shape));
      rule.push_back({{-static_cast<int>(t.dtype), t.name}, t.file_offset});
    }
    std::sort(rule.begin(), rule.end()); /* std::string compares bytes, as the rule does */
    for (std::size_t i = 1; i < rule.size(); ++i)
      EXPECT_LE(rule[i - 1].second, rule[i].second);
    ASSERT_EQ(mfsdp_safetensors_metadata_count(p.file), static_cast<int32_t>(l.pairs.size()));
    for (const mfsdp_safetensors_pair &pair : l.pairs)
      EXPECT_STREQ(mfsdp_safetensors_metadata_find(p.file, pair.key), pair.value);
  }
  EXPECT_EQ(paddings.size(), 8u);
}

TEST(SafetensorsWriter, RefusesWhatTheReaderWould) {
  const auto refuses = [](mfsdp_status status, const char *name, mfsdp_safetensors_dtype dtype,
                          std::vector<int64_t> shape, const char *text) {
    Layout l;
    l.add("other", MFSDP_SAFETENSORS_F32, {1});
    l.add(name ? name : "", dtype, std::move(shape));
    if (!name) l.tensors[1].name = nullptr;
    EXPECT_EQ(l.make(), status) << text;
    EXPECT_NE(l.message().find(text), std::string::npos) << l.message();
  };
  const auto f32 = MFSDP_SAFETENSORS_F32;
  refuses(MFSDP_E_ARGUMENT, nullptr, f32, {}, "tensor 1 has no name");
  refuses(MFSDP_E_ARGUMENT, "", f32, {}, "tensor 1 has no name");
  refuses(MFSDP_E_ARGUMENT, "\xff", f32, {}, "not UTF-8");
  refuses(MFSDP_E_ARGUMENT, "a\n", f32, {}, "control character");
  refuses(MFSDP_E_ARGUMENT, "__metadata__", f32, {}, "reserved");
  refuses(MFSDP_E_ARGUMENT, "other", MFSDP_SAFETENSORS_U8, {}, "'other' is there twice");
  refuses(MFSDP_E_ARGUMENT, "a", MFSDP_SAFETENSORS_NO_DTYPE, {}, "unknown dtype");
  refuses(MFSDP_E_ARGUMENT, "a", MFSDP_SAFETENSORS_DTYPE_END, {}, "unknown dtype");
  refuses(MFSDP_E_ARGUMENT, "a", f32, {-1}, "negative");
  refuses(MFSDP_E_ARGUMENT, "a", f32, std::vector<int64_t>(65, 1), "too many dimensions");
  refuses(MFSDP_E_ARGUMENT, "a", MFSDP_SAFETENSORS_F4, {3}, "whole bytes");
  refuses(MFSDP_E_OVERFLOW, "a", f32, {INT64_MAX}, "passes 63 bits");
  refuses(MFSDP_E_OVERFLOW, "a", f32, {0, INT64_MAX, INT64_MAX}, "passes 63 bits");
  Layout two;
  for (int i = 0; i < 9; ++i)
    two.add("big" + std::to_string(i), MFSDP_SAFETENSORS_U8, {INT64_MAX / 8});
  EXPECT_EQ(two.make(), MFSDP_E_OVERFLOW);
  Layout shapeless;
  shapeless.add("a", f32, {1});
  shapeless.tensors[0].shape = nullptr;
  EXPECT_EQ(shapeless.make(), MFSDP_E_ARGUMENT);
  for (const mfsdp_safetensors_pair pair :
       {mfsdp_safetensors_pair{nullptr, ""}, mfsdp_safetensors_pair{"", nullptr},
        mfsdp_safetensors_pair{"\xff", ""}, mfsdp_safetensors_pair{"", "\xff"}}) {
    Layout l;
    l.pairs.push_back(pair);
    EXPECT_EQ(l.make(), MFSDP_E_ARGUMENT);
  }
  Layout twice;
  twice.pairs = {{"k", "1"}, {"j", "2"}, {"k", "3"}};
  EXPECT_EQ(twice.make(), MFSDP_E_ARGUMENT);
  Layout long_one;
  const std::string huge(100000000, 'x');
  long_one.pairs.push_back({"k", huge.c_str()});
  EXPECT_EQ(long_one.make(), MFSDP_E_OVERFLOW);
}

TEST(SafetensorsWriter, HeadersNeedTheirRoomAndAnUnchangedLayout) {
  Layout l;
  l.add("a", MFSDP_SAFETENSORS_F32, {5});
  ASSERT_EQ(l.make(), MFSDP_OK);
  std::vector<char> bytes(l.layout.header_nbytes);
  const auto write = [&](std::size_t n) {
    return mfsdp_safetensors_header_write(&l.context, &l.layout, bytes.data(), n);
  };
  EXPECT_EQ(write(bytes.size()), MFSDP_OK);
  EXPECT_EQ(write(bytes.size() - 1), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_header_write(&l.context, &l.layout, nullptr, 1000), MFSDP_E_ARGUMENT);
  l.tensors[0].name = "a name that is longer than the padding";
  EXPECT_EQ(write(bytes.size()), MFSDP_E_ARGUMENT);
  for (int64_t n = 0; n < 2; ++n) {
    Layout failing;
    failing.add("a", MFSDP_SAFETENSORS_F32, {5});
    failing.memory.fail_at(n);
    const mfsdp_status made = failing.make();
    EXPECT_EQ(made, n == 0 ? MFSDP_E_MEMORY : MFSDP_OK);
    if (made == MFSDP_OK) {
      EXPECT_EQ(mfsdp_safetensors_header_write(&failing.context, &failing.layout, bytes.data(),
                                               bytes.size()),
                MFSDP_E_MEMORY);
    }
  }
}

TEST(SafetensorsDtype, NamesBitsAndTheLibrarysOwn) {
  std::set<std::string> names;
  for (int d = 1; d < MFSDP_SAFETENSORS_DTYPE_END; ++d) {
    const auto dtype = static_cast<mfsdp_safetensors_dtype>(d);
    const std::string name = mfsdp_safetensors_dtype_name(dtype);
    const int32_t bits = mfsdp_safetensors_dtype_bits(dtype);
    names.insert(name);
    /* The digits in a name are its bits; BOOL has a byte. */
    const std::size_t at = name.find_first_of("0123456789");
    EXPECT_EQ(bits, at == std::string::npos ? 8 : std::atoi(name.c_str() + at)) << name;
    if (d > 2) {
      EXPECT_GE(bits, mfsdp_safetensors_dtype_bits(static_cast<mfsdp_safetensors_dtype>(d - 1)));
    }
    mfsdp_dtype own = MFSDP_F32;
    if (mfsdp_safetensors_dtype_to(dtype, &own)) {
      EXPECT_EQ(mfsdp_safetensors_dtype_of(own), dtype);
      EXPECT_EQ(mfsdp_dtype_nbytes(own) * 8, static_cast<std::size_t>(bits));
    }
  }
  EXPECT_EQ(names.size(), 22u);
  EXPECT_EQ(names.count("F8_E4M3FNUZ"), 1u);
  for (const mfsdp_dtype own : {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16}) {
    mfsdp_dtype back;
    ASSERT_TRUE(mfsdp_safetensors_dtype_to(mfsdp_safetensors_dtype_of(own), &back));
    EXPECT_EQ(back, own);
  }
  EXPECT_EQ(mfsdp_safetensors_dtype_of(static_cast<mfsdp_dtype>(0)), MFSDP_SAFETENSORS_NO_DTYPE);
}

/* ---- the index ---- */

TEST(SafetensorsIndex, EveryHostileIndexHasItsFault) {
  const std::string map = "\"weight_map\":{\"a\":\"f\"}";
  const std::pair<mfsdp_safetensors_fault, std::string> cases[] = {
      {FAULT(START), ""},
      {FAULT(START), "[]"},
      {FAULT(END), "{" + map},
      {FAULT(TRAILING), "{" + map + "}x"},
      {FAULT(SYNTAX), "{" + map + ";"},
      {FAULT(SYNTAX), "{\"x\":tru," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":01," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":1.,\"y\":2," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":-," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":1e+," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":[1,]," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":[1}," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":{\"y\":1]," + map + "}"},
      {FAULT(SYNTAX), "{\"x\":{\"y\",1}," + map + "}"},
      {FAULT(NEEDS_STRING), "{\"x\":{\"y\":1,}," + map + "}"},
      {FAULT(NEEDS_STRING), "{\"x\":{1:1}," + map + "}"},
      {FAULT(END), "{\"x\":[[[["},
      {FAULT(END), "{\"x\":"},
      {FAULT(NESTED), "{\"x\":" + std::string(33, '[') + std::string(33, ']') + "," + map + "}"},
      {FAULT(NESTED), "{\"x\":" + std::string(1000000, '[')},
      {FAULT(NESTED), "{\"weight_map\":{\"a\":{}}}"},
      {FAULT(NEEDS_STRING), "{\"weight_map\":{\"a\":1}}"},
      {FAULT(NEEDS_OBJECT), "{\"weight_map\":[]}"},
      {FAULT(NEEDS_OBJECT), "{\"metadata\":null," + map + "}"},
      {FAULT(NEGATIVE), "{\"metadata\":{\"total_size\":-1}," + map + "}"},
      {FAULT(NUMBER), "{\"metadata\":{\"total_size\":1.5}," + map + "}"},
      {FAULT(NUMBER), "{\"metadata\":{\"total_size\":1e9}," + map + "}"},
      {FAULT(NUMBER), "{\"metadata\":{\"total_size\":1.0e9}," + map + "}"},
      {FAULT(NUMBER), "{\"metadata\":{\"total_size\":\"1\"}," + map + "}"},
      {FAULT(NUMBER_LARGE), "{\"metadata\":{\"total_size\":9223372036854775808}," + map + "}"},
      {FAULT(NO_WEIGHT_MAP), "{}"},
      {FAULT(NO_WEIGHT_MAP), "{\"metadata\":{\"total_size\":1}}"},
      {FAULT(SECTION_TWICE), "{" + map + "," + map + "}"},
      {FAULT(SECTION_TWICE), "{\"metadata\":{},\"metadata\":{}," + map + "}"},
      {FAULT(SECTION_TWICE), "{\"metadata\":{\"total_size\":1,\"total_size\":1}," + map + "}"},
      {FAULT(NAME_EMPTY), "{\"weight_map\":{\"\":\"f\"}}"},
      {FAULT(NAME_CONTROL), "{\"weight_map\":{\"\\n\":\"f\"}}"},
      {FAULT(NAME_TWICE), "{\"weight_map\":{\"a\":\"f\",\"b\":\"f\",\"\\u0061\":\"g\"}}"},
      {FAULT(UTF8), "{\"weight_map\":{\"a\":\"\xff\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"../f\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"..\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"\\u002e.\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\".\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"/etc/passwd\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"x\\u002fy\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"x\\/y\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"x\\\\y\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"c:y\"}}"},
      {FAULT(FILE_NAME), "{\"weight_map\":{\"a\":\"x\\ny\"}}"},
  };
  for (const auto &c : cases) {
    ParsedIndex p(c.second);
    EXPECT_EQ(p.status, MFSDP_E_FORMAT) << c.second.substr(0, 200);
    EXPECT_STREQ(mfsdp_safetensors_fault_name(p.fault), mfsdp_safetensors_fault_name(c.first))
        << c.second.substr(0, 200) << "\n"
        << p.message();
  }
}

TEST(SafetensorsIndex, AnIndexPast100MegabytesIsNotRead) {
  Rig rig;
  mfsdp_safetensors_index *index;
  mfsdp_safetensors_fault fault;
  mfsdp_safetensors_source source = mfsdp_safetensors_source_memory("i", "", 0);
  source.file_nbytes = 100000001;
  EXPECT_EQ(mfsdp_safetensors_index_create(&rig.context, &source, &index, &fault), MFSDP_E_FORMAT);
  EXPECT_EQ(fault, FAULT(HEADER_LARGE));
}

TEST(SafetensorsIndex, TakesWhatIsValid) {
  ParsedIndex p(
      " {\"other\": [1, -2.5e-3, {\"x\": [], \"y\": {}}, true, false, null, \"s\\n\"],\n"
      "  \"metadata\": {\"format\": \"pt\", \"total_size\": 24.00, \"extra\": {\"a\": 1}},\n"
      "  \"weight_map\": {\"z\": \"two.safetensors\", \"b\\u00e9\": \"o\\u006ee.st\",\n"
      "    \"a\": \"two.safetensors\"}, \"deep\":" +
      std::string(32, '[') + std::string(32, ']') + "}\n");
  ASSERT_EQ(p.status, MFSDP_OK) << p.message();
  EXPECT_EQ(mfsdp_safetensors_index_total_nbytes(p.index), 24);
  ASSERT_EQ(mfsdp_safetensors_index_count(p.index), 3);
  EXPECT_STREQ(mfsdp_safetensors_index_at(p.index, 0)->key, "z");
  EXPECT_EQ(mfsdp_safetensors_index_at(p.index, 3), nullptr);
  EXPECT_STREQ(mfsdp_safetensors_index_find(p.index, "a"), "two.safetensors");
  EXPECT_STREQ(mfsdp_safetensors_index_find(p.index, "b\xc3\xa9"), "one.st");
  EXPECT_EQ(mfsdp_safetensors_index_find(p.index, "c"), nullptr);
  ASSERT_EQ(mfsdp_safetensors_index_file_count(p.index), 2);
  EXPECT_STREQ(mfsdp_safetensors_index_file_at(p.index, 0), "one.st");
  EXPECT_EQ(mfsdp_safetensors_index_file_at(p.index, 1),
            mfsdp_safetensors_index_find(p.index, "z"));
  EXPECT_EQ(mfsdp_safetensors_index_file_at(p.index, 1),
            mfsdp_safetensors_index_find(p.index, "a"));
  EXPECT_EQ(mfsdp_safetensors_index_file_at(p.index, 2), nullptr);
  ParsedIndex bare("{\"weight_map\":{}}");
  ASSERT_EQ(bare.status, MFSDP_OK) << bare.message();
  EXPECT_EQ(mfsdp_safetensors_index_total_nbytes(bare.index), -1);
  EXPECT_EQ(mfsdp_safetensors_index_file_count(bare.index), 0);
}

std::string written_index(Rig &rig, const std::vector<mfsdp_safetensors_pair> &pairs,
                          int64_t total) {
  std::size_t needed = 0, again = 0;
  const auto count = static_cast<int32_t>(pairs.size());
  EXPECT_EQ(
      mfsdp_safetensors_index_write(&rig.context, pairs.data(), count, total, nullptr, 0, &needed),
      MFSDP_OK)
      << rig.message();
  std::string text(needed, 'x');
  EXPECT_EQ(mfsdp_safetensors_index_write(&rig.context, pairs.data(), count, total, &text[0],
                                          needed - 1, &again),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_safetensors_index_write(&rig.context, pairs.data(), count, total, &text[0],
                                          needed, &again),
            MFSDP_OK);
  EXPECT_EQ(again, needed);
  return text;
}

TEST(SafetensorsIndex, WritesSortedAndReadsItBack) {
  Rig rig;
  const std::string text =
      written_index(rig, {{"b", "model-2.safetensors"}, {"a\"", "model-1.safetensors"}}, 1234);
  EXPECT_EQ(text, "{\n  \"metadata\": {\n    \"total_size\": 1234\n  },\n  \"weight_map\": {\n"
                  "    \"a\\\"\": \"model-1.safetensors\",\n    \"b\": \"model-2.safetensors\"\n"
                  "  }\n}\n");
  EXPECT_EQ(text, written_index(rig, {{"a\"", "model-1.safetensors"}, {"b", "model-2.safetensors"}},
                                1234));
  ParsedIndex p(text);
  ASSERT_EQ(p.status, MFSDP_OK) << p.message();
  EXPECT_EQ(mfsdp_safetensors_index_total_nbytes(p.index), 1234);
  EXPECT_STREQ(mfsdp_safetensors_index_find(p.index, "a\""), "model-1.safetensors");
  EXPECT_EQ(ParsedIndex(written_index(rig, {}, 0)).status, MFSDP_OK);
}

TEST(SafetensorsIndex, RefusesWhatTheReaderWould) {
  Rig rig;
  std::size_t needed;
  const auto refuses = [&](std::vector<mfsdp_safetensors_pair> pairs, int64_t total) {
    EXPECT_EQ(mfsdp_safetensors_index_write(&rig.context, pairs.data(),
                                            static_cast<int32_t>(pairs.size()), total, nullptr, 0,
                                            &needed),
              MFSDP_E_ARGUMENT);
  };
  refuses({{nullptr, "f"}}, 0);
  refuses({{"", "f"}}, 0);
  refuses({{"\xff", "f"}}, 0);
  refuses({{"a", nullptr}}, 0);
  refuses({{"a", "d/f"}}, 0);
  refuses({{"a", ".."}}, 0);
  refuses({{"a", "f\n"}}, 0);
  refuses({{"a", "\xff"}}, 0);
  refuses({{"a", "f"}, {"a", "g"}}, 0);
  refuses({{"a", "f"}}, -1);
}

TEST(SafetensorsFault, EachHasANameAndAText) {
  std::set<std::string> names, texts;
  for (int i = 0; i < MFSDP_SAFETENSORS_FAULT_COUNT; ++i) {
    names.insert(mfsdp_safetensors_fault_name(static_cast<mfsdp_safetensors_fault>(i)));
    texts.insert(mfsdp_safetensors_fault_text(static_cast<mfsdp_safetensors_fault>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(MFSDP_SAFETENSORS_FAULT_COUNT));
  EXPECT_EQ(texts.size(), static_cast<std::size_t>(MFSDP_SAFETENSORS_FAULT_COUNT));
}

} // namespace
