/* SPDX-License-Identifier: MIT */
#include "examples/gpt/layers.h"

#include "examples/gpt/vector_math.h"
#include "tests/examples/gpt_test.h"
#include "tests/ref/gpt_ref.h"

#include <cmath>

namespace {

/* ---- the accuracies that the headers promise ---- */

TEST(GptVectorMath, ExpIsWithinItsPromise) {
  double worst = 0.0;
  for (float x = -87.0f; x <= 87.0f; x += 1.0f / 4096.0f) {
    const double exact = std::exp(double(x));
    worst = std::max(worst, std::fabs(double(gpt_expf(x)) - exact) / exact);
  }
  EXPECT_LT(worst, 1e-7);
}

TEST(GptVectorMath, ExpAtItsEnds) {
  EXPECT_EQ(gpt_expf(0.0f), 1.0f);
  EXPECT_EQ(gpt_expf(-INFINITY), gpt_expf(-87.0f));
  EXPECT_EQ(gpt_expf(INFINITY), gpt_expf(87.0f));
  EXPECT_GE(gpt_expf(-1000.0f), 1.17549435e-38f); /* no denormals: they are slow */
  EXPECT_TRUE(std::isfinite(gpt_expf(1000.0f)));
  EXPECT_TRUE(std::isnan(gpt_expf(NAN)));
}

TEST(GptVectorMath, SumDotAndMaxOfEveryLength) {
  for (int64_t count = 1; count < 70; ++count) {
    std::vector<float> x(static_cast<size_t>(count)), y(x.size());
    float sum = 0.0f, dot = 0.0f;
    for (size_t i = 0; i < x.size(); ++i) {
      /* Small integers: every order of summation gives the same, exact, result. */
      x[i] = float(int(i * 7 % 23) - 11);
      y[i] = float(int(i * 5 % 17) - 8);
      sum += x[i];
      dot += x[i] * y[i];
    }
    EXPECT_EQ(gpt_sum(x.data(), count), sum);
    EXPECT_EQ(gpt_dot(x.data(), y.data(), count), dot);
    x[static_cast<size_t>(count * 3 / 4)] = 100.0f;
    EXPECT_EQ(gpt_max(x.data(), count), 100.0f);
  }
}

TEST(GptLayers, GeluAndItsSlopeAreWithinTheirPromise) {
  const double h = 1e-5; /* truncation h^2, about 1e-10 */
  const float bias = 0.0f;
  for (float u = -12.0f; u <= 12.0f; u += 1.0f / 512.0f) {
    float y, slope;
    gpt_bias_gelu_forward(1, 1, &u, &bias, &y, &slope);
    const double exact = gpt_ref::Gelu(double(u));
    const double exact_slope =
        (gpt_ref::Gelu(double(u) + h) - gpt_ref::Gelu(double(u) - h)) / (2.0 * h);
    ASSERT_NEAR(y, exact, 2e-7 * std::max(1.0, std::fabs(double(u)))) << u;
    ASSERT_NEAR(slope, exact_slope, 3e-7) << u;
  }
}

TEST(GptLayers, GeluFarFromZeroStaysFinite) {
  const std::vector<float> x = {-1e30f, -50.0f, 50.0f, 1e30f}, bias(4, 0.0f);
  std::vector<float> y(4), slope(4);
  gpt_bias_gelu_forward(1, 4, x.data(), bias.data(), y.data(), slope.data());
  EXPECT_NEAR(y[0], 0.0f, 1e-6f); /* -1e30 times the smallest sigmoid */
  EXPECT_NEAR(y[1], 0.0f, 1e-30f);
  EXPECT_EQ(y[2], 50.0f);
  EXPECT_EQ(y[3], 1e30f);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(slope[i], i < 2 ? 0.0f : 1.0f, 1e-30f);
}

TEST(GptLayers, GeluSlopeMayOverwriteItsInputAndNanPasses) {
  const std::vector<float> x = gpt_test::Normals(40, 1, 2.0f),
                           bias = gpt_test::Normals(20, 2, 1.0f);
  std::vector<float> y(40), slope(40), y2(40), in_place = x;
  gpt_bias_gelu_forward(2, 20, x.data(), bias.data(), y.data(), slope.data());
  gpt_bias_gelu_forward(2, 20, in_place.data(), bias.data(), y2.data(), in_place.data());
  EXPECT_EQ(slope, in_place);
  EXPECT_EQ(y, y2);
  in_place[3] = NAN;
  gpt_bias_gelu_forward(2, 20, in_place.data(), bias.data(), y2.data(), in_place.data());
  EXPECT_TRUE(std::isnan(y2[3]));
  EXPECT_TRUE(std::isnan(in_place[3]));
}

TEST(GptLayers, LayerNormEqualsTheReferenceForManyWidths) {
  for (int64_t dim : {1, 2, 7, 16, 17, 48, 100}) {
    const int64_t rows = 3;
    const auto n = static_cast<size_t>(rows * dim);
    /* A mean far above the deviation: one-pass variances fail here. */
    const std::vector<float> x = gpt_test::Normals(rows * dim, unsigned(dim), 1.0f, 100.0f);
    const std::vector<float> gain = gpt_test::Normals(dim, 5, 1.0f);
    const std::vector<float> bias = gpt_test::Normals(dim, 6, 1.0f);
    std::vector<float> y(n), mean(3), rstd(3);
    gpt_layernorm_forward(rows, dim, x.data(), gain.data(), bias.data(), y.data(), mean.data(),
                          rstd.data());
    const gpt_ref::Vector expected = gpt_ref::LayerNorm(
        {x.begin(), x.end()}, size_t(dim), {gain.begin(), gain.end()}, {bias.begin(), bias.end()});
    /* x itself is rounded to 2^-18 at 100, its mean likewise: 1e-5 of the deviation, times the
     * gain. */
    for (size_t i = 0; i < n; ++i)
      EXPECT_NEAR(y[i], expected[i], 1e-4) << dim;
  }
}

TEST(GptLayers, BiasGradientSumsRowsExactlyForIntegers) {
  for (int64_t rows : {1, 3, 4, 9}) {
    std::vector<float> dy(static_cast<size_t>(rows * 5)), dbias(5, 100.0f);
    for (size_t i = 0; i < dy.size(); ++i)
      dy[i] = float(i);
    gpt_bias_backward(rows, 5, dy.data(), dbias.data());
    for (int64_t i = 0; i < 5; ++i)
      EXPECT_EQ(dbias[size_t(i)], float(100 + rows * i + 5 * (rows * (rows - 1) / 2)));
  }
}

TEST(GptLayers, CrossEntropyOfEqualLogitsIsTheLogOfTheClasses) {
  for (int64_t classes : {2, 11, 256, 300}) {
    std::vector<float> logits(static_cast<size_t>(3 * classes), 50.0f);
    const std::vector<uint8_t> target = {0, 1, 1};
    const double expected = std::log(double(classes));
    EXPECT_NEAR(gpt_cross_entropy(3, classes, logits.data(), target.data()), expected, 1e-7);
    EXPECT_NEAR(gpt_cross_entropy_backward(3, classes, logits.data(), target.data()), expected,
                1e-7);
    /* Gradient: (1/classes - [target]) / rows. */
    EXPECT_NEAR(logits[0], (1.0 / double(classes) - 1.0) / 3.0, 1e-7);
    EXPECT_NEAR(logits[1], 1.0 / double(classes) / 3.0, 1e-7);
  }
}

TEST(GptLayers, CrossEntropyOfHugeLogitsIsFinite) {
  std::vector<float> logits = {1e30f, -1e30f, 0.0f};
  const uint8_t best = 0;
  EXPECT_NEAR(gpt_cross_entropy(1, 3, logits.data(), &best), 0.0, 1e-6);
  logits[1] = NAN;
  EXPECT_TRUE(std::isnan(gpt_cross_entropy(1, 3, logits.data(), &best)));
  logits[1] = INFINITY;
  EXPECT_FALSE(std::isfinite(gpt_cross_entropy_backward(1, 3, logits.data(), &best)));
}

} // namespace
