/* SPDX-License-Identifier: MIT */
#include "mfsdp/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace {

/* A 16-bit format, judged by what its bit patterns mean. */
struct Format {
  const char *name;
  int exponent_bits, mantissa_bits;
  float (*widen)(uint16_t);
  uint16_t (*from_f32)(float);
  uint16_t (*from_f64)(double);
  mfsdp_dtype dtype;
};

const Format kFormats[] = {
    {"bf16", 8, 7, mfsdp_f32_from_bf16, mfsdp_bf16_from_f32, mfsdp_bf16_from_f64, MFSDP_BF16},
    {"f16", 5, 10, mfsdp_f32_from_f16, mfsdp_f16_from_f32, mfsdp_f16_from_f64, MFSDP_F16},
};

/* The value by the definition of the format, without the library. */
double meaning(const Format &f, uint16_t half) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = (half >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = half & ((1 << f.mantissa_bits) - 1);
  const double sign = half & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << f.exponent_bits) - 1)
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

uint16_t infinity_of(const Format &f) {
  return static_cast<uint16_t>(((1 << f.exponent_bits) - 1) << f.mantissa_bits);
}

std::string format_name(const ::testing::TestParamInfo<Format> &info) {
  return info.param.name;
}

class Half : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Half, ::testing::ValuesIn(kFormats), format_name);

TEST_P(Half, EveryPatternWidensToItsMeaningAndComesBack) {
  const Format f = GetParam();
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t half = static_cast<uint16_t>(i);
    const float wide = f.widen(half);
    const double want = meaning(f, half);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(wide)) << i;
      EXPECT_TRUE(std::isnan(meaning(f, f.from_f32(wide)))) << i;
      EXPECT_TRUE(std::isnan(meaning(f, f.from_f64(static_cast<double>(wide))))) << i;
      EXPECT_EQ(f.from_f32(wide) & 0x8000, half & 0x8000) << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(wide), want) << i;
    ASSERT_EQ(std::signbit(wide), (half & 0x8000) != 0) << i;
    ASSERT_EQ(f.from_f32(wide), half) << i;
    ASSERT_EQ(f.from_f64(want), half) << i;
  }
}

/* Between each pair of neighbours: the midpoint goes to the even one, and whatever is the least bit
 * to either side of it, in f32 and in f64, goes to the nearer. Infinity counts as the next power of
 * two, which is where the standard lets overflow begin. */
TEST_P(Half, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format f = GetParam();
  for (int negative = 0; negative < 2; ++negative)
    for (uint16_t low = 0; low < infinity_of(f); ++low) {
      const uint16_t high = static_cast<uint16_t>(low + 1);
      const int bias = (1 << (f.exponent_bits - 1)) - 1;
      const double above = high == infinity_of(f) ? std::ldexp(1.0, bias + 1) : meaning(f, high);
      const double sign = negative ? -1.0 : 1.0;
      const double middle = (meaning(f, low) + above) / 2.0;
      const float middle32 = static_cast<float>(middle);
      const uint16_t bit = negative ? 0x8000 : 0;
      const uint16_t even = static_cast<uint16_t>(((low & 1) ? high : low) | bit);
      const uint16_t down = static_cast<uint16_t>(low | bit),
                     up = static_cast<uint16_t>(high | bit);
      ASSERT_EQ(static_cast<double>(middle32), middle); /* both formats leave f32 bits to spare */
      const float s = static_cast<float>(sign);
      ASSERT_EQ(f.from_f32(s * middle32), even) << low;
      ASSERT_EQ(f.from_f32(s * std::nextafter(middle32, 0.0f)), down) << low;
      ASSERT_EQ(f.from_f32(s * std::nextafter(middle32, INFINITY)), up) << low;
      ASSERT_EQ(f.from_f64(sign * middle), even) << low;
      ASSERT_EQ(f.from_f64(sign * std::nextafter(middle, 0.0)), down) << low;
      ASSERT_EQ(f.from_f64(sign * std::nextafter(middle, INFINITY)), up) << low;
    }
}

TEST_P(Half, OverflowAndSpecialValues) {
  const Format f = GetParam();
  const uint16_t infinity = infinity_of(f);
  EXPECT_EQ(f.from_f32(INFINITY), infinity);
  EXPECT_EQ(f.from_f32(-INFINITY), infinity | 0x8000);
  EXPECT_EQ(f.from_f32(std::numeric_limits<float>::max()), infinity);
  EXPECT_EQ(f.from_f64(1e300), infinity);
  EXPECT_EQ(f.from_f64(-1e300), infinity | 0x8000);
  EXPECT_EQ(f.from_f64(1e-300), 0);
  EXPECT_EQ(f.from_f64(-1e-300), 0x8000);
  EXPECT_EQ(f.from_f32(-0.0f), 0x8000);
  /* A NaN whose set bits are all among those cut off must not become infinity. */
  const uint32_t nans[] = {0x7f800001u, 0x7f801000u, 0xff800001u, 0x7fffffffu};
  for (uint32_t bits : nans) {
    const uint16_t half = f.from_f32(mfsdp_f32_from_bits(bits));
    EXPECT_TRUE(std::isnan(meaning(f, half))) << std::hex << bits;
    EXPECT_EQ(half >> 15, bits >> 31) << std::hex << bits;
  }
}

TEST(Dtype, FinitenessLooksAtBits) {
  EXPECT_TRUE(mfsdp_f32_is_finite(0.0f) && mfsdp_f32_is_finite(3e38f));
  EXPECT_FALSE(mfsdp_f32_is_finite(INFINITY) || mfsdp_f32_is_finite(-INFINITY));
  EXPECT_FALSE(mfsdp_f32_is_finite(NAN));
  EXPECT_TRUE(mfsdp_f64_is_finite(1e308));
  EXPECT_FALSE(mfsdp_f64_is_finite(std::numeric_limits<double>::infinity()));
  EXPECT_FALSE(mfsdp_f64_is_finite(std::nan("")));
}

TEST(Dtype, PositiveLooksAtTheFloat) {
  for (const double x : {1e-8, 1.2e-38, 3.4e38, 1.0})
    EXPECT_TRUE(mfsdp_f32_is_positive(x)) << x;
  for (const double x : {0.0, -1.0, 1.1754e-38, 1e-50, 3.5e38})
    EXPECT_FALSE(mfsdp_f32_is_positive(x)) << x;
  EXPECT_FALSE(mfsdp_f32_is_positive(std::nan("")) ||
               mfsdp_f32_is_positive(std::numeric_limits<double>::infinity()));
}

TEST(Dtype, ElementsOfEveryDtypeAtUnalignedAddresses) {
  const mfsdp_dtype dtypes[] = {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16};
  for (mfsdp_dtype dtype : dtypes) {
    std::vector<unsigned char> bytes(1 + 3 * mfsdp_dtype_nbytes(dtype), 0xee);
    for (int64_t i = 0; i < 3; ++i)
      mfsdp_element_set(&bytes[1], dtype, i, 1.5 * static_cast<double>(i) - 2.0);
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(mfsdp_element_get(&bytes[1], dtype, i), 1.5 * static_cast<double>(i) - 2.0);
    EXPECT_EQ(bytes[0], 0xee);
  }
  double untouched = 7.0;
  mfsdp_element_set(&untouched, static_cast<mfsdp_dtype>(0), 0, 1.0);
  EXPECT_EQ(untouched, 7.0);
  EXPECT_TRUE(std::isnan(mfsdp_element_get(&untouched, static_cast<mfsdp_dtype>(7), 0)));
}

} // namespace
