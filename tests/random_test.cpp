/* SPDX-License-Identifier: MIT */
/*
 * random.h: fixed vectors, independence of order, and moments within derived bounds.
 *
 * The vectors were computed once by a separate Python program with unbounded integers, written from
 * the description in the header (the SplitMix64 finalizer applied to seed, stream and index in
 * turn) and checked against SplitMix64's published first output for seed 1234567,
 * 6457827717110365317.
 */
#include "mfsdp/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace {

struct Vector {
  uint64_t seed, stream, index, bits;
  double normal;
};

const Vector kVectors[] = {
    {0, 0, 0, UINT64_C(0x238275bc38fcbe91), 0.340423461},
    {1, 0, 0, UINT64_C(0xb18a02f46d8d86c3), -0.769350758},
    {0, 1, 0, UINT64_C(0x2f101fe21496ea20), 1.61043942},
    {0, 0, 1, UINT64_C(0xf89a2566b5822c54), -0.0616725834},
    {42, 7, 123456789, UINT64_C(0x85a5e2e8e28686d9), 0.854598318},
    {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_C(0x179f01f0d2fba97a), 0.980750485},
    {UINT64_C(0xdeadbeef), 3, UINT64_C(1) << 40, UINT64_C(0x010300ddf90e6efb), 3.27852104},
    {1234567, 89, 10, UINT64_C(0x16cb04bf4482bea7), -0.243000065}};

TEST(Random, FixedVectors) {
  for (const Vector &v : kVectors) {
    SCOPED_TRACE(v.index);
    EXPECT_EQ(mfsdp_random_u64(v.seed, v.stream, v.index), v.bits);
    EXPECT_EQ(mfsdp_random_uniform(v.seed, v.stream, v.index),
              std::ldexp(static_cast<double>(v.bits >> 11), -53));
    /* The value was printed with 9 digits, and C libraries may differ in the last bit of log and
     * cos: two units of the ninth digit. */
    EXPECT_NEAR(static_cast<double>(mfsdp_random_normal(v.seed, v.stream, v.index)), v.normal,
                2e-9 + 1.2e-7 * std::fabs(v.normal));
  }
}

TEST(Random, FinalizerIsSplitMix64) {
  EXPECT_EQ(mfsdp__random_mix(UINT64_C(1234567) + UINT64_C(0x9e3779b97f4a7c15)),
            UINT64_C(6457827717110365317));
}

TEST(Random, DoesNotDependOnTheOrderOfCalls) {
  double forward[64], backward[64];
  for (int i = 0; i < 64; ++i)
    forward[i] = static_cast<double>(mfsdp_random_normal(5, 3, static_cast<uint64_t>(i)));
  for (int i = 63; i >= 0; --i)
    backward[i] = static_cast<double>(mfsdp_random_normal(5, 3, static_cast<uint64_t>(i)));
  for (int i = 0; i < 64; ++i)
    EXPECT_EQ(forward[i], backward[i]);
}

/* 3 x 64 x 64 draws of 64 bits: two equal ones have probability 12288^2 / 2^65 = 4e-12. */
TEST(Random, EachWordMatters) {
  std::set<uint64_t> seen;
  for (uint64_t a = 0; a < 64; ++a)
    for (uint64_t b = 0; b < 64; ++b) {
      seen.insert(mfsdp_random_u64(a, b, 1000));
      seen.insert(mfsdp_random_u64(a, 1000, b));
      seen.insert(mfsdp_random_u64(1000, a, b));
    }
  EXPECT_EQ(seen.size(), 3u * 64u * 64u);
}

/* Mean of n uniforms: 1/2 with deviation sqrt(1/12n); mean of squares: 1/3 with sqrt(4/45n). Five
 * deviations; the draw is fixed, so the test never flickers. */
TEST(Random, UniformMoments) {
  const int n = 100000;
  double sum = 0.0, square = 0.0;
  for (int i = 0; i < n; ++i) {
    const double x = mfsdp_random_uniform(11, 2, static_cast<uint64_t>(i));
    ASSERT_GE(x, 0.0);
    ASSERT_LT(x, 1.0);
    sum += x;
    square += x * x;
  }
  EXPECT_NEAR(sum / n, 0.5, 5.0 * std::sqrt(1.0 / 12.0 / n));
  EXPECT_NEAR(square / n, 1.0 / 3.0, 5.0 * std::sqrt(4.0 / 45.0 / n));
}

/* Mean 0 with deviation sqrt(1/n), mean square 1 with sqrt(2/n), mean of neighbours' products 0
 * with sqrt(1/n). */
TEST(Random, NormalMoments) {
  const int n = 100000;
  double sum = 0.0, square = 0.0, product = 0.0, last = 0.0;
  for (int i = 0; i < n; ++i) {
    const double x = static_cast<double>(mfsdp_random_normal(11, 2, static_cast<uint64_t>(i)));
    ASSERT_LT(std::fabs(x), 6.8);
    sum += x;
    square += x * x;
    product += x * last;
    last = x;
  }
  EXPECT_NEAR(sum / n, 0.0, 5.0 * std::sqrt(1.0 / n));
  EXPECT_NEAR(square / n, 1.0, 5.0 * std::sqrt(2.0 / n));
  EXPECT_NEAR(product / n, 0.0, 5.0 * std::sqrt(1.0 / n));
}

/* The count in each of 7 bins: mean n/7, deviation sqrt(n 6/49). */
TEST(Random, BelowStaysBelowAndIsLevel) {
  const int n = 70000;
  int count[7] = {0};
  for (int i = 0; i < n; ++i) {
    const uint64_t x = mfsdp_random_below(3, 1, static_cast<uint64_t>(i), 7);
    ASSERT_LT(x, 7u);
    ++count[x];
  }
  for (int c : count)
    EXPECT_NEAR(c, n / 7.0, 5.0 * std::sqrt(n * 6.0 / 49.0));
  EXPECT_EQ(mfsdp_random_below(3, 1, 5, 0), 0u);
  EXPECT_EQ(mfsdp_random_below(3, 1, 5, 1), 0u);
}

} // namespace
