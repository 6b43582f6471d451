/* SPDX-License-Identifier: MIT */
/* MFSDP_TEST_WRAP_MALLOC: running the model must not allocate. */
#include "examples/gpt/model.h"

#include "examples/gpt/attention.h"
#include "examples/gpt/ops_host.h"
#include "examples/gpt/params.h"
#include "tests/examples/gpt_test.h"
#include "tests/ref/gpt_ref.h"
#include "tests/support/malloc_count.h"

#include <algorithm>
#include <cmath>
#include <cstring>

using gpt_test::LoopSgemm;

namespace {

gpt_config Config(int64_t layers, int64_t dim, int64_t heads, int64_t context, int64_t batch,
                  int64_t vocab, int tied) {
  gpt_config c = gpt_config();
  c.layers = layers;
  c.dim = dim;
  c.heads = heads;
  c.context = context;
  c.batch = batch;
  c.vocab = vocab;
  c.tied = tied;
  return c;
}

/* The host's operations with a plain product. */
gpt_device Host() {
  static gpt_host host = {LoopSgemm};
  return gpt_host_device(&host);
}

/* A model with parameters, tokens and gradients of its own. */
class Fixture {
public:
  explicit Fixture(const gpt_config &shape) : config(shape) {
    gpt_error error;
    EXPECT_EQ(gpt_model_create(&config, Host(), &model, &error), GPT_OK) << error.text;
    count = gpt_param_count(&config);
    for (int32_t i = 0; i < count; ++i) {
      /* Far larger than training starts with, so that softmax, GELU and norms are all curved. */
      const int64_t numel = gpt_param_numel(&config, i);
      params.push_back(gpt_test::Normals(numel, unsigned(i) + 1, 0.4f, IsGain(i) ? 1.0f : 0.0f));
      grads.push_back(std::vector<float>(size_t(numel), 0.0f));
    }
    for (int32_t i = 0; i < count; ++i) {
      const size_t storage = Storage(i);
      param_pointers.push_back(params[storage].data());
      grad_pointers.push_back(grads[storage].data());
    }
    inputs = gpt_test::Tokens(gpt_config_tokens(&config), 7, int(config.vocab));
    targets = gpt_test::Tokens(gpt_config_tokens(&config), 8, int(config.vocab));
  }
  ~Fixture() { gpt_model_destroy(&model); }

  size_t Storage(int32_t i) const {
    return config.tied && i == count - 1 ? size_t(GPT_WTE) : size_t(i);
  }
  bool IsGain(int32_t i) const {
    if (i < GPT_EMBEDDING_PARAMS) return false;
    if (i >= gpt_unit_first_param(&config, int32_t(config.layers) + 1))
      return i == count - GPT_HEAD_PARAMS;
    const int32_t inside = (i - GPT_EMBEDDING_PARAMS) % GPT_BLOCK_PARAMS;
    return inside == GPT_LN1_GAIN || inside == GPT_LN2_GAIN;
  }
  void Load() {
    std::copy(inputs.begin(), inputs.end(), model.inputs);
    std::copy(targets.begin(), targets.end(), model.targets);
  }
  double Forward(bool evaluating) {
    Load();
    model.evaluating = evaluating;
    gpt_forward(&model, param_pointers.data());
    return model.loss;
  }
  void Backward() { gpt_backward(&model, param_pointers.data(), grad_pointers.data()); }
  gpt_ref::Params Reference() const {
    gpt_ref::Params p;
    for (const auto &v : params)
      p.emplace_back(v.begin(), v.end());
    return p;
  }
  std::vector<float> Logits() const {
    return std::vector<float>(model.logits,
                              model.logits + gpt_config_tokens(&config) * config.vocab);
  }

  gpt_config config;
  gpt_model model = gpt_model();
  int32_t count = 0;
  std::vector<std::vector<float>> params, grads;
  std::vector<const float *> param_pointers;
  std::vector<float *> grad_pointers;
  std::vector<uint8_t> inputs, targets;
};

double LargestOf(const std::vector<float> &v) {
  double largest = 0.0;
  for (float x : v)
    largest = std::max(largest, std::fabs(double(x)));
  return largest;
}

/* d loss / d p[tensor][element] of the float64 reference. With step 1e-4 the truncation is about
 * 1e-8 of the third derivative and the rounding 1e-12: both far below fp32. */
double ReferenceSlope(const Fixture &f, gpt_ref::Params *p, size_t tensor, size_t element) {
  const double h = 1e-4, at = (*p)[tensor][element];
  (*p)[tensor][element] = at + h;
  const double above = gpt_ref::Loss(f.config, *p, f.inputs, f.targets);
  (*p)[tensor][element] = at - h;
  const double below = gpt_ref::Loss(f.config, *p, f.inputs, f.targets);
  (*p)[tensor][element] = at;
  return (above - below) / (2.0 * h);
}

/* Every element of every tensor. fp32 has 24 bits, and a gradient passes some thirty roundings and
 * sums of up to 100 terms: 1e-5 of the tensor's largest entry (three times what was
 * measured, 3.5e-6). A missing term or factor is wrong by 1e-2 and more. */
void CheckEveryGradient(const gpt_config &config) {
  Fixture f(config);
  gpt_ref::Params reference = f.Reference();
  const double loss = gpt_ref::Loss(config, reference, f.inputs, f.targets);
  EXPECT_NEAR(f.Forward(true), loss, 2e-6 * loss);
  EXPECT_NEAR(f.Forward(false), loss, 2e-6 * loss);
  f.Backward();
  for (int32_t i = 0; i < f.count; ++i) {
    const size_t tensor = f.Storage(i);
    if (tensor != size_t(i)) continue;
    const double largest = LargestOf(f.grads[tensor]);
    double worst = 0.0;
    for (size_t e = 0; e < f.params[tensor].size(); ++e) {
      const double slope = ReferenceSlope(f, &reference, tensor, e);
      worst = std::max(worst, std::fabs(slope - double(f.grads[tensor][e])));
    }
    EXPECT_GT(largest, 1e-4) << "parameter " << i << " has no gradient to speak of";
    EXPECT_LE(worst, 1e-5 * largest) << "parameter " << i;
  }
}

TEST(GptModel, EveryGradientEqualsCentralDifferencesUntied) {
  CheckEveryGradient(Config(2, 8, 2, 5, 2, 11, 0));
}

TEST(GptModel, EveryGradientEqualsCentralDifferencesTied) {
  CheckEveryGradient(Config(2, 8, 2, 5, 2, 11, 1));
}

TEST(GptModel, EveryGradientInAnOddShape) {
  CheckEveryGradient(Config(1, 9, 3, 7, 1, 5, 0));
}

TEST(GptModel, EveryGradientWithHeadsOfWidthOne) {
  CheckEveryGradient(Config(1, 4, 4, 2, 3, 6, 0));
}

/* Contexts longer than a stretch of attention rows, dims longer than the lanes: one random
 * direction per tensor, whose slope is the dot product with the gradient. */
TEST(GptModel, DirectionalDerivativesOverSeveralStretchesOfAttention) {
  const gpt_config config = Config(1, 40, 2, 2 * GPT_ATTENTION_ROWS + 6, 1, 50, 0);
  Fixture f(config);
  gpt_ref::Params p = f.Reference();
  f.Forward(false);
  f.Backward();
  for (size_t tensor = 0; tensor < f.params.size(); ++tensor) {
    const std::vector<float> direction =
        gpt_test::Normals(int64_t(f.params[tensor].size()), 100 + unsigned(tensor), 1.0f);
    const double h = 1e-5;
    const gpt_ref::Vector start = p[tensor];
    double expected = 0.0, norm = 0.0, sides[2];
    for (int side = 0; side < 2; ++side) {
      for (size_t e = 0; e < start.size(); ++e)
        p[tensor][e] = start[e] + (side ? h : -h) * double(direction[e]);
      sides[side] = gpt_ref::Loss(config, p, f.inputs, f.targets);
    }
    p[tensor] = start;
    for (size_t e = 0; e < start.size(); ++e) {
      expected += double(direction[e]) * double(f.grads[tensor][e]);
      norm += std::pow(double(f.grads[tensor][e]), 2);
    }
    /* |direction . gradient| is about the gradient's norm; 1e-5 of it as above. */
    EXPECT_NEAR((sides[1] - sides[0]) / (2.0 * h), expected, 1e-5 * std::sqrt(norm))
        << "parameter " << tensor;
  }
}

TEST(GptModel, BackwardAddsIntoTheGradients) {
  for (int tied = 0; tied < 2; ++tied) {
    Fixture f(Config(1, 8, 2, 5, 2, 11, tied));
    f.Forward(false);
    f.Backward();
    const auto once = f.grads;
    f.Forward(false);
    f.Backward();
    for (size_t i = 0; i < once.size(); ++i)
      for (size_t e = 0; e < once[i].size(); ++e)
        /* Not exact: sums that start elsewhere round elsewhere. */
        EXPECT_NEAR(f.grads[i][e], 2.0f * once[i][e], 1e-5 * LargestOf(once[i])) << i;
  }
}

TEST(GptModel, UnitsRunOneByOneEqualTheWhole) {
  Fixture whole(Config(2, 8, 2, 5, 2, 11, 1)), steps(whole.config);
  whole.Forward(false);
  whole.Backward();
  steps.Load();
  /* A unit's parameters are gone outside its turn: the pointers it gets are to a copy made for it.
   */
  for (int pass = 0; pass < 2; ++pass)
    for (int32_t k = 0; k < steps.model.unit_count; ++k) {
      const int32_t unit = pass == 0 ? k : steps.model.unit_count - 1 - k;
      const int32_t first = gpt_unit_first_param(&steps.config, unit);
      const int32_t count = gpt_unit_param_count(&steps.config, unit);
      std::vector<std::vector<float>> copy;
      std::vector<const float *> p;
      for (int32_t i = first; i < first + count; ++i)
        copy.push_back(steps.params[steps.Storage(i)]);
      for (const auto &c : copy)
        p.push_back(c.data());
      if (pass == 0)
        gpt_forward_unit(&steps.model, unit, p.data());
      else
        gpt_backward_unit(&steps.model, unit, p.data(), steps.grad_pointers.data() + first);
    }
  EXPECT_EQ(whole.model.loss, steps.model.loss);
  EXPECT_EQ(whole.grads, steps.grads);
}

TEST(GptModel, RepeatsBitForBit) {
  Fixture a(Config(2, 24, 3, 70, 2, 200, 0)), b(a.config);
  a.Forward(false);
  a.Backward();
  b.Forward(true); /* an evaluation in between leaves nothing behind */
  b.Forward(false);
  b.Backward();
  EXPECT_EQ(a.model.loss, b.model.loss);
  EXPECT_EQ(a.grads, b.grads);
}

/* A block for the activations, and one for what the host reads and writes. */
TEST(GptModel, CreatingAllocatesTwiceAndRunningNever) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  const gpt_config config = Config(2, 24, 3, 70, 2, 200, 0);
  gpt_model model;
  gpt_error error;
  test::malloc_count_begin();
  ASSERT_EQ(gpt_model_create(&config, Host(), &model, &error), GPT_OK);
  EXPECT_EQ(test::malloc_count_end(), 2u);
  gpt_model_destroy(&model);
  Fixture f(config);
  test::malloc_count_begin();
  f.Forward(true);
  f.Forward(false);
  f.Backward();
  EXPECT_EQ(test::malloc_count_end(), 0u);
}

/* Changing token t changes no logit before t by a single bit, and does change those from t on. */
TEST(GptModel, LaterTokensDoNotReachEarlierOnes) {
  for (int64_t context : {6, 70}) {
    Fixture f(Config(2, 8, 2, context, 2, 11, 0));
    f.Forward(true);
    const std::vector<float> before = f.Logits();
    for (int64_t t : {int64_t(0), int64_t(1), context / 2, context - 1}) {
      const size_t place = size_t(context + t); /* in the second window */
      const uint8_t kept = f.inputs[place];
      f.inputs[place] = uint8_t((kept + 1) % 11);
      f.Forward(true);
      f.inputs[place] = kept;
      const std::vector<float> after = f.Logits();
      const auto edge = std::ptrdiff_t(place * 11);
      EXPECT_TRUE(std::equal(before.begin(), before.begin() + edge, after.begin())) << t;
      EXPECT_FALSE(
          std::equal(before.begin() + edge, before.begin() + edge + 11, after.begin() + edge))
          << t;
    }
  }
}

TEST(GptModel, EvaluationKeepsTheLogits) {
  Fixture f(Config(1, 8, 2, 5, 2, 11, 0));
  f.Forward(true);
  const gpt_ref::Vector expected = gpt_ref::Logits(f.config, f.Reference(), f.inputs);
  const std::vector<float> logits = f.Logits();
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(logits[i], expected[i], 1e-5); /* values of size 1, fp32 */
}

TEST(GptModel, NotANumberReachesLossAndGradients) {
  Fixture f(Config(2, 8, 2, 5, 2, 11, 0));
  f.params[GPT_EMBEDDING_PARAMS + GPT_UP_WEIGHT][3] = NAN;
  f.Forward(false);
  f.Backward();
  EXPECT_TRUE(std::isnan(f.model.loss));
  EXPECT_TRUE(std::isnan(f.grads[GPT_WPE][0]));
}

TEST(GptModel, FlopsPerTokenByHand) {
  /* dim 2, one layer, context 3, vocab 4: weights 12*4 + 8; attention 2*(3+1); times 2 for multiply
   * and add, times 3 for forward and both gradients. */
  const gpt_config c = Config(1, 2, 1, 3, 1, 4, 0);
  EXPECT_EQ(gpt_config_flops_per_token(&c), 3.0 * 2.0 * (56.0 + 8.0));
}

struct BadConfig {
  gpt_config config;
  const char *message;
};

TEST(GptModel, RefusesShapesOutOfRange) {
  const BadConfig cases[] = {
      {Config(0, 8, 2, 5, 2, 11, 0), "layers is 0; it must be 1 to 1000"},
      {Config(1, 0, 2, 5, 2, 11, 0), "dim is 0"},
      {Config(1, 65537, 1, 5, 2, 11, 0), "dim is 65537"},
      {Config(1, 8, 0, 5, 2, 11, 0), "heads is 0"},
      {Config(1, 8, 2, 0, 2, 11, 0), "context is 0"},
      {Config(1, 8, 2, 5, -1, 11, 0), "batch is -1"},
      {Config(1, 8, 2, 5, 2, 257, 0), "vocab is 257"},
      {Config(1, 8, 3, 5, 2, 11, 0),
       "dim 8 is not a multiple of heads 3; choose heads that divide"},
      {Config(1000, 64, 1, 65536, 65536, 11, 0), "activations; lower one of them"},
      {Config(1, 65536, 1, 65536, 65536, 256, 0), "activations; lower one of them"},
      {Config(1000, 65536, 1, 1, 1, 256, 0), "parameters; lower one of them"},
  };
  for (const BadConfig &bad : cases) {
    gpt_model model;
    gpt_error error = gpt_error();
    EXPECT_EQ(gpt_model_create(&bad.config, Host(), &model, &error), GPT_USAGE_ERROR);
    EXPECT_NE(std::strstr(error.text, bad.message), nullptr) << error.text;
    EXPECT_EQ(model.memory, nullptr);
  }
}

} // namespace
