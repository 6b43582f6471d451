/* SPDX-License-Identifier: MIT */
/*
 * host_tiny.h: every element has the bits of the plain loops, whatever the shape, the transposition
 * and the strides, and nothing outside is written; which products are taken.
 */
#include "mfsdp/host/host_dense.h"

#include "mfsdp/random.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

namespace {

std::vector<float> numbers(int64_t count, uint64_t seed) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = mfsdp_random_normal(seed, 1, i);
  return out;
}

/* A product with rows apart by more than they hold. */
struct Product {
  Product(int64_t m, int64_t n, int64_t k, int trans_a, int trans_b, float beta, bool other_c)
      : args(mfsdp_gemm_args_default()) {
    const int64_t gap = 3;
    set(&args.a, trans_a ? k : m, trans_a ? m : k, gap, 1, &a);
    set(&args.b, trans_b ? n : k, trans_b ? k : n, gap + 1, 2, &b);
    set(&args.d, m, n, gap + 2, 3, &d);
    set(&args.c, m, n, gap + 4, 4, &c);
    if (!other_c) args.c = args.d;
    args.batch_count = 1;
    args.trans_a = trans_a;
    args.trans_b = trans_b;
    args.alpha = -1.75f;
    args.beta = beta;
    args.dtype = MFSDP_F32;
  }
  void set(mfsdp_mat *mat, int64_t rows, int64_t cols, int64_t gap, uint64_t seed,
           std::vector<float> *values) {
    *values = numbers(rows * (cols + gap), seed);
    mat->data = values->data();
    mat->rows = rows;
    mat->cols = cols;
    mat->row_stride = cols + gap;
    mat->batch_stride = 0;
  }
  /* What the loops make of it, gaps included. */
  std::vector<float> by_loops() const {
    std::vector<float> out = d;
    const int64_t m = args.d.rows, n = args.d.cols;
    for (int64_t i = 0; i < m && args.beta != 0.0f; ++i)
      for (int64_t j = 0; j < n; ++j)
        out[static_cast<std::size_t>(i * args.d.row_stride + j)] =
            static_cast<const float *>(args.c.data)[i * args.c.row_stride + j];
    mfsdp_host_math_loops()->sgemm(args.trans_a, args.trans_b, m, n,
                                   args.trans_a ? args.a.rows : args.a.cols, args.alpha, a.data(),
                                   args.a.row_stride, b.data(), args.b.row_stride, args.beta,
                                   out.data(), args.d.row_stride);
    return out;
  }
  mfsdp_gemm_args args;
  std::vector<float> a, b, c, d;
};

int fits(int64_t m, int64_t n, int64_t k, int trans_b = 0) {
  const Product p(1, 1, 1, 0, trans_b, 0.0f, false);
  return mfsdp__host_tiny_fits(&p.args, m, n, k);
}

/* Whole tiles of both widths, one and several, and what is left over; k of 1, odd and even. */
TEST(HostTiny, BitsOfTheLoops) {
  for (const int64_t m : {4, 7, 16, 30})
    for (const int64_t n : {8, 9, 13, 16, 20, 24, 31, 40})
      for (const int64_t k : {1, 16, 49})
        for (int transposed = 0; transposed < 4; ++transposed)
          for (const float beta : {0.0f, 1.0f, -0.3f})
            for (const bool other_c : {false, true}) {
              Product p(m, n, k, transposed & 1, transposed >> 1, beta, other_c);
              /* Where tiles overlap, c must lie elsewhere. */
              const bool tiny = ((m % 4 == 0 && n % 8 == 0) || beta == 0.0f || other_c) &&
                                m * n * k <= MFSDP__HOST_TINY_MOST;
              ASSERT_EQ(mfsdp__host_route_of(&p.args) == MFSDP__HOST_TINY, tiny);
              const std::vector<float> want = p.by_loops();
              mfsdp__host_gemm(mfsdp_host_math_loops(), &p.args);
              ASSERT_EQ(std::memcmp(p.d.data(), want.data(), want.size() * sizeof(float)), 0)
                  << m << " x " << n << " x " << k << " " << transposed << " beta " << beta;
            }
}

/* beta 0 does not read c, which may hold anything. */
TEST(HostTiny, ZeroBetaReadsNothing) {
  Product p(4, 8, 4, 0, 0, 0.0f, true);
  p.c.assign(p.c.size(), std::numeric_limits<float>::quiet_NaN());
  const std::vector<float> want = p.by_loops();
  mfsdp__host_gemm(mfsdp_host_math_loops(), &p.args);
  EXPECT_EQ(std::memcmp(p.d.data(), want.data(), want.size() * sizeof(float)), 0);
}

TEST(HostTiny, ADiagonalIsAdded) {
  Product p(8, 8, 8, 0, 0, 0.0f, false);
  std::vector<float> want = p.by_loops();
  for (std::size_t i = 0; i < 8; ++i)
    want[i * static_cast<std::size_t>(p.args.d.row_stride) + i] += 2.5f;
  p.args.diagonal = 2.5f;
  mfsdp__host_gemm(mfsdp_host_math_loops(), &p.args);
  EXPECT_EQ(std::memcmp(p.d.data(), want.data(), want.size() * sizeof(float)), 0);
}

TEST(HostTiny, WhichProducts) {
  const bool wide = MFSDP__HOST_TINY_LANES == 16; /* where a BLAS is better at them */
  EXPECT_TRUE(fits(16, 16, 16));
  EXPECT_TRUE(wide ? fits(16, 32, 32) : fits(48, 48, 48));
  EXPECT_FALSE(wide ? fits(16, 32, 33) : fits(48, 48, 49)); /* too much work */
  EXPECT_FALSE(fits(64, 64, 64));
  EXPECT_TRUE(fits(18, 17, 16));
  EXPECT_FALSE(fits(3, 16, 16)); /* less than a tile */
  EXPECT_FALSE(fits(16, 7, 16));
  EXPECT_FALSE(fits(16, 16, 0));
  EXPECT_FALSE(fits(0, 16, 16));
  EXPECT_FALSE(fits(16, 0, 16));
  EXPECT_TRUE(fits(4, 32, 128, 1)); /* 4096 elements to be transposed */
  EXPECT_FALSE(fits(4, 40, 128, 1));
  EXPECT_EQ(fits(4, 40, 128, 0), wide ? 0 : 1);
  EXPECT_FALSE(fits(4, 8, 129)); /* the loops add up slices of 128 */
  EXPECT_FALSE(fits(INT64_C(1) << 62, INT64_C(1) << 62, INT64_C(1) << 62)); /* nothing overflows */
}

} // namespace
