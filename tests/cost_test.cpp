/* SPDX-License-Identifier: MIT */
#include "mfsdp/cost.h"

#include <gtest/gtest.h>

namespace {

/* Counts the multiply-adds of A = X X^T, B = A A, P X one GEMM at a time. */
int64_t count_multiply_adds(int64_t rows, int64_t cols) {
  const int64_t s = rows < cols ? rows : cols, l = rows < cols ? cols : rows;
  int64_t count = 0;
  for (int64_t i = 0; i < s; ++i)
    for (int64_t j = 0; j < s; ++j)
      count += l + s;
  for (int64_t i = 0; i < s; ++i)
    for (int64_t j = 0; j < l; ++j)
      count += s;
  return count;
}

TEST(Cost, UnitsCountTheMultiplyAddsOfThreeGemms) {
  for (int64_t rows = 0; rows <= 9; ++rows)
    for (int64_t cols = 0; cols <= 9; ++cols) {
      int64_t units = -1;
      ASSERT_EQ(mfsdp_cost_newton_schulz_units(rows, cols, &units), 1);
      EXPECT_EQ(units, count_multiply_adds(rows, cols)) << rows << " x " << cols;
      EXPECT_EQ(mfsdp_cost_newton_schulz(nullptr, 0, rows, cols), units);
    }
}

TEST(Cost, FlopsAreTwoPerMultiplyAddAndStep) {
  int64_t flops = -1;
  /* s = 4096, l = 11008: s^2 (2 l + s) = 438086664192 */
  ASSERT_EQ(mfsdp_cost_newton_schulz_flops(11008, 4096, 5, &flops), 1);
  EXPECT_EQ(flops, INT64_C(10) * INT64_C(438086664192));
  ASSERT_EQ(mfsdp_cost_newton_schulz_flops(3, 5, 0, &flops), 1);
  EXPECT_EQ(flops, 0);
}

TEST(Cost, WhatDoesNotFitIsRefusedAndLeavesTheResult) {
  const int64_t big = INT64_C(1) << 31;
  int64_t out = 42;
  EXPECT_EQ(mfsdp_cost_newton_schulz_units(big, big, &out), 0);
  EXPECT_EQ(mfsdp_cost_newton_schulz_units(INT64_MAX, 1, &out), 0); /* 2 l overflows */
  EXPECT_EQ(mfsdp_cost_newton_schulz_units(-1, 4, &out), 0);
  EXPECT_EQ(mfsdp_cost_newton_schulz_units(4, -1, &out), 0);
  EXPECT_EQ(mfsdp_cost_newton_schulz_flops(4, 4, -1, &out), 0);
  EXPECT_EQ(mfsdp_cost_newton_schulz_flops(1 << 20, 1 << 20, 2, &out), 0); /* units fit */
  EXPECT_EQ(mfsdp_cost_newton_schulz_units(1 << 20, 1 << 20, &out), 1);
  EXPECT_EQ(out, INT64_C(3) << 60);
  EXPECT_EQ(mfsdp_cost_newton_schulz(nullptr, 0, big, big), -1);
}

/* Counted by hand for 2 x 3: products 2*2*3 + 3*3*2 = 30, cubes 8 + 27 = 35. */
TEST(Cost, PreconditionersCountWhatAStepTakesOnAverage) {
  mfsdp_precondition_cost cost = {1, 100};
  int64_t units = -1;
  ASSERT_EQ(mfsdp_cost_shampoo_units(&cost, 2, 3, &units), 1);
  EXPECT_EQ(units, (3 * 30 + 7 * 35) / 2);
  ASSERT_EQ(mfsdp_cost_soap_units(&cost, 2, 3, &units), 1);
  EXPECT_EQ(units, (15 * 30 + 12 * 30 + 14 * 35) / 6);
  cost.update_every = 5;
  ASSERT_EQ(mfsdp_cost_soap_units(&cost, 2, 3, &units), 1);
  EXPECT_EQ(units, (15 * 30 + (12 * 30 + 14 * 35) / 5) / 6);
  EXPECT_EQ(mfsdp_cost_soap(&cost, 7, 2, 3), units);
  cost.size_limit = 2; /* the longer side is left alone: 12 and 8 */
  ASSERT_EQ(mfsdp_cost_shampoo_units(&cost, 3, 2, &units), 1);
  EXPECT_EQ(units, (3 * 12 + 7 * 8 / 5) / 2);
  EXPECT_EQ(mfsdp_cost_shampoo(&cost, 7, 3, 2), units);
  cost.size_limit = INT64_MAX;
  EXPECT_EQ(mfsdp_cost_shampoo(&cost, 0, INT64_C(1) << 31, 2), -1);
  EXPECT_EQ(mfsdp_cost_soap(&cost, 0, -1, 2), -1);
  cost.update_every = 0;
  EXPECT_EQ(mfsdp_cost_soap(&cost, 0, 2, 2), -1);
}

/* Every rank sends its own segment to every other rank. */
TEST(Cost, GatherBytesAreThoseOfEverySegmentToEveryPeer) {
  const int64_t segments[4] = {7, 0, 100, 1};
  size_t expected = 0, nbytes = 0;
  int64_t total = 0;
  for (int owner = 0; owner < 4; ++owner) {
    total += segments[owner];
    for (int peer = 0; peer < 4; ++peer)
      if (peer != owner) expected += static_cast<size_t>(segments[owner]) * 2;
  }
  ASSERT_EQ(mfsdp_cost_gather_nbytes(total, 4, MFSDP_BF16, &nbytes), 1);
  EXPECT_EQ(nbytes, expected);
  ASSERT_EQ(mfsdp_cost_reduce_nbytes(total, 4, MFSDP_F32, &nbytes), 1);
  EXPECT_EQ(nbytes, 2 * expected);
  ASSERT_EQ(mfsdp_cost_gather_nbytes(total, 1, MFSDP_F32, &nbytes), 1);
  EXPECT_EQ(nbytes, 0u);
}

TEST(Cost, BadByteCountsAreRefused) {
  size_t nbytes = 42;
  EXPECT_EQ(mfsdp_cost_gather_nbytes(-1, 2, MFSDP_F32, &nbytes), 0);
  EXPECT_EQ(mfsdp_cost_gather_nbytes(1, 0, MFSDP_F32, &nbytes), 0);
  EXPECT_EQ(mfsdp_cost_gather_nbytes(1, 2, static_cast<mfsdp_dtype>(0), &nbytes), 0);
  EXPECT_EQ(mfsdp_cost_gather_nbytes(INT64_MAX, 2, MFSDP_F32, &nbytes), 0);
  EXPECT_EQ(mfsdp_cost_reduce_nbytes(INT64_MAX / 4, 1 << 20, MFSDP_F32, &nbytes), 0);
  EXPECT_EQ(nbytes, 42u);
}

} // namespace
