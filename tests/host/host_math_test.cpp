/* SPDX-License-Identifier: MIT */
/* The dense kernels of one thread: not run under the thread sanitizer (MFSDP_TEST_ONE_QUEUE). */
#include "mfsdp/host/host_math.h"

#include "tests/ref/dense_ref.h"
#include "tests/support/backend_rig.h"

#include <climits>
#include <cmath>

namespace {

using test::Numbers;
using test::RigKind;

/* A matrix inside a larger array: a leading dimension with slack, an offset, and a frame that must
 * keep its value. */
struct Framed {
  int64_t rows, cols, stride;
  std::size_t offset;
  std::vector<float> all;
  Framed(int64_t r, int64_t c, int64_t slack, std::size_t o, float frame)
      : rows(r), cols(c), stride(c + slack), offset(o),
        all(o + static_cast<std::size_t>(r * (c + slack)) + 3, frame) {}
  float *data() { return all.data() + offset; }
  float &at(int64_t i, int64_t j) { return data()[i * stride + j]; }
  void fill(const std::vector<float> &values) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        at(i, j) = values[ref::index(i, j, cols)];
  }
  bool frame_is(float frame) {
    std::vector<float> copy = all;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j)
        copy[offset + static_cast<std::size_t>(i * stride + j)] = frame;
    for (float x : copy)
      if (x != frame) return false;
    return true;
  }
};

struct Shape {
  int64_t m, n, k;
};
/* Empty, single, around the tile (4 x 16), the panel (64) and the slice of k (128). */
const Shape kShapes[] = {{0, 5, 3},      {5, 0, 3},      {5, 3, 0},     {1, 1, 1},
                         {1, 33, 7},     {33, 1, 7},     {4, 16, 128},  {5, 17, 129},
                         {63, 15, 127},  {65, 31, 3},    {64, 64, 1},   {3, 100, 257},
                         {70, 130, 200}, {128, 16, 256}, {129, 48, 130}};

class HostMath : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostMath, ::testing::ValuesIn(test::rig_kinds()), test::rig_name);

/* Small integers: every product and sum is exact in float, whatever the order, so results are
 * equal. */
TEST_P(HostMath, SgemmIsExactOnIntegers) {
  const mfsdp_host_math *math = GetParam().math;
  Numbers numbers(1);
  for (const Shape &s : kShapes)
    for (int trans = 0; trans < 4; ++trans)
      for (float beta : {0.0f, 1.0f, -3.0f}) {
        const int ta = trans & 1, tb = trans >> 1;
        const float frame = 99.0f, alpha = trans == 3 ? 1.0f : 2.0f;
        Framed a(ta ? s.k : s.m, ta ? s.m : s.k, 2, 1, frame);
        Framed b(tb ? s.n : s.k, tb ? s.k : s.n, 1, 2, frame);
        Framed c(s.m, s.n, 3, 3, frame);
        a.fill(numbers.integers(static_cast<std::size_t>(a.rows * a.cols), 3));
        b.fill(numbers.integers(static_cast<std::size_t>(b.rows * b.cols), 3));
        c.fill(numbers.integers(static_cast<std::size_t>(s.m * s.n), 5));
        Framed want = c;
        for (int64_t i = 0; i < s.m; ++i)
          for (int64_t j = 0; j < s.n; ++j) {
            float sum = 0.0f;
            for (int64_t p = 0; p < s.k; ++p)
              sum += (ta ? a.at(p, i) : a.at(i, p)) * (tb ? b.at(j, p) : b.at(p, j));
            want.at(i, j) = alpha * sum + beta * c.at(i, j);
          }
        if (beta == 0.0f) /* not read */
          c.fill(std::vector<float>(static_cast<std::size_t>(s.m * s.n), NAN));
        math->sgemm(ta, tb, s.m, s.n, s.k, alpha, a.data(), a.stride, b.data(), b.stride, beta,
                    c.data(), c.stride);
        ASSERT_EQ(c.all, want.all)
            << s.m << " " << s.n << " " << s.k << " trans " << trans << " beta " << beta;
      }
}

TEST_P(HostMath, SsyrkWritesOneTriangleAndLeavesTheOther) {
  const mfsdp_host_math *math = GetParam().math;
  Numbers numbers(2);
  for (const Shape &s : kShapes)
    for (int variant = 0; variant < 4; ++variant)
      for (float beta : {0.0f, 2.0f}) {
        const int upper = variant & 1, trans = variant >> 1;
        const float frame = 77.0f, alpha = 3.0f;
        Framed a(trans ? s.k : s.n, trans ? s.n : s.k, 1, 1, frame);
        Framed c(s.n, s.n, 2, 1, frame);
        a.fill(numbers.integers(static_cast<std::size_t>(a.rows * a.cols), 3));
        c.fill(numbers.integers(static_cast<std::size_t>(s.n * s.n), 5));
        Framed want = c;
        for (int64_t i = 0; i < s.n; ++i)
          for (int64_t j = 0; j < s.n; ++j) {
            if (upper ? j < i : j > i) continue;
            float sum = 0.0f;
            for (int64_t p = 0; p < s.k; ++p)
              sum += trans ? a.at(p, i) * a.at(p, j) : a.at(i, p) * a.at(j, p);
            want.at(i, j) = alpha * sum + beta * c.at(i, j);
            if (beta == 0.0f) c.at(i, j) = NAN;
          }
        math->ssyrk(upper, trans, s.n, s.k, alpha, a.data(), a.stride, beta, c.data(), c.stride);
        ASSERT_EQ(c.all, want.all) << s.n << " " << s.k << " variant " << variant;
      }
}

TEST_P(HostMath, RealNumbersStayWithinTheSumOfRoundings) {
  const mfsdp_host_math *math = GetParam().math;
  Numbers numbers(3);
  const int64_t m = 37, n = 53, k = 411;
  const std::vector<float> a = numbers.reals(static_cast<std::size_t>(m * k));
  const std::vector<float> b = numbers.reals(static_cast<std::size_t>(k * n));
  std::vector<float> c(static_cast<std::size_t>(m * n));
  math->sgemm(0, 0, m, n, k, 1.0f, a.data(), k, b.data(), n, 0.0f, c.data(), n);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0.0, size = 0.0;
      for (int64_t p = 0; p < k; ++p) {
        const double product = static_cast<double>(a[ref::index(i, p, k)]) *
                               static_cast<double>(b[ref::index(p, j, n)]);
        sum += product;
        size += std::fabs(product);
      }
      /* k products and k additions, each with a relative error of at most 2^-24 of the partial sum:
       * the standard bound, without its factor k / 2 that random signs do not reach. */
      ASSERT_NEAR(c[ref::index(i, j, n)], sum, size * std::ldexp(8.0, -24)) << i << " " << j;
    }
}

TEST_P(HostMath, AlignmentAndStridesDoNotChangeABit) {
  const mfsdp_host_math *math = GetParam().math;
  Numbers numbers(4);
  const int64_t m = 45, n = 71, k = 150;
  const std::vector<float> a = numbers.reals(static_cast<std::size_t>(m * k));
  const std::vector<float> b = numbers.reals(static_cast<std::size_t>(k * n));
  std::vector<float> first;
  for (std::size_t offset = 0; offset < 5; ++offset) {
    Framed fa(m, k, static_cast<int64_t>(offset), offset, 0.0f), fb(k, n, 2, offset, 0.0f);
    Framed fc(m, n, static_cast<int64_t>(offset), offset, 0.0f);
    fa.fill(a);
    fb.fill(b);
    math->sgemm(0, 0, m, n, k, 1.5f, fa.data(), fa.stride, fb.data(), fb.stride, 0.0f, fc.data(),
                fc.stride);
    std::vector<float> got;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j)
        got.push_back(fc.at(i, j));
    if (offset == 0) first = got;
    ASSERT_TRUE(test::same_bits(got, first)) << offset;
  }
}

TEST_P(HostMath, AlphaZeroReadsNothing) {
  const mfsdp_host_math *math = GetParam().math;
  const std::vector<float> nan(9, NAN);
  std::vector<float> c(9, 4.0f);
  math->sgemm(0, 0, 3, 3, 3, 0.0f, nan.data(), 3, nan.data(), 3, 0.5f, c.data(), 3);
  EXPECT_EQ(c, std::vector<float>(9, 2.0f));
  math->ssyrk(1, 0, 3, 3, 0.0f, nan.data(), 3, 0.0f, c.data(), 3);
  EXPECT_EQ(c, (std::vector<float>{0, 0, 0, 2, 0, 0, 2, 2, 0}));
}

TEST_P(HostMath, LeadingDimensionsBeyondIntWork) {
  const mfsdp_host_math *math = GetParam().math;
  /* One row only, so that the huge distance to the next row is never walked. */
  const int64_t huge = static_cast<int64_t>(INT_MAX) + 10;
  const std::vector<float> a = {1, 2, 3}, b = {1, 0, 2, 1, 3, 1};
  std::vector<float> c(2, NAN);
  math->sgemm(0, 0, 1, 2, 3, 1.0f, a.data(), huge, b.data(), 2, 0.0f, c.data(), 2);
  EXPECT_EQ(c, (std::vector<float>{14, 5}));
  math->sgemm(0, 0, 1, 2, 3, 1.0f, a.data(), 3, b.data(), 2, 1.0f, c.data(), huge);
  EXPECT_EQ(c, (std::vector<float>{28, 10}));
  math->sgemm(0, 0, 1, 2, 1, 2.0f, a.data(), 1, b.data(), huge, 0.0f, c.data(), 2);
  EXPECT_EQ(c, (std::vector<float>{2, 0}));
  math->ssyrk(0, 0, 1, 3, 1.0f, a.data(), huge, 0.0f, c.data(), 1);
  EXPECT_EQ(c[0], 14.0f);
  math->ssyrk(0, 0, 1, 3, 2.0f, a.data(), 3, 0.0f, c.data(), huge);
  EXPECT_EQ(c[0], 28.0f);
}

/* What host_math.h promises of the loops only: an element depends on its row and column alone. */
TEST(HostMathLoops, AnElementDependsOnlyOnItsRowAndColumn) {
  const mfsdp_host_math *math = mfsdp_host_math_loops();
  Numbers numbers(5);
  const int64_t n = 90, k = 300;
  const std::vector<float> a = numbers.reals(static_cast<std::size_t>(n * k));
  std::vector<float> full(static_cast<std::size_t>(n * n)), half(full.size(), -1.0f);
  math->sgemm(0, 1, n, n, k, 1.0f, a.data(), k, a.data(), k, 0.0f, full.data(), n);
  math->ssyrk(1, 0, n, k, 1.0f, a.data(), k, 0.0f, half.data(), n);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = i; j < n; ++j) {
      ASSERT_EQ(full[ref::index(i, j, n)], full[ref::index(j, i, n)]);
      ASSERT_EQ(full[ref::index(i, j, n)], half[ref::index(i, j, n)]);
      float single = 0.0f;
      if ((i + j) % 7 != 0) continue;
      math->sgemm(0, 1, 1, 1, k, 1.0f, &a[ref::index(i, 0, k)], k, &a[ref::index(j, 0, k)], k, 0.0f,
                  &single, 1);
      ASSERT_EQ(full[ref::index(i, j, n)], single);
    }
}

} // namespace
