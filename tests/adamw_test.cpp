/* SPDX-License-Identifier: MIT */
/*
 * adamw.h against golden vectors (float64) and, bit by bit, against the float32 reference with the
 * documented order of operations; on C loops and on a worker's queue.
 *
 * One queue at a time, whose races host_queue_test looks for: not run under the thread sanitizer
 * (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/adamw.h"

#include "mfsdp/dtype.h"
#include "tests/ref/adamw_ref.h"
#include "tests/ref/golden.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

const double kRounding = 1.0 / 16777216.0; /* 2^-24, half a unit of float's last place */

std::string key(const char *stem, int64_t step) {
  return stem + std::to_string(step);
}

std::vector<float> values(std::size_t count, uint64_t seed) {
  return ref::narrow(ref::random_matrix(1, static_cast<int64_t>(count), seed));
}

/* One piece, its state, its bf16 copy. */
struct Piece {
  Piece(Rig *rig, const std::vector<float> &start)
      : master(rig, start), grad(rig, start.size()), m(rig, start.size()), v(rig, start.size()),
        param(rig, start.size()) {
    const std::vector<float> zeros(start.size(), 0.0f);
    m.write(zeros);
    v.write(zeros);
    item = mfsdp_adamw_item(master.data(), grad.data(), m.data(), v.data(),
                            static_cast<int64_t>(start.size()));
  }
  Buffer<float> master, grad, m, v;
  Buffer<uint16_t> param;
  mfsdp_fused_item item;
};

class Adamw : public ::testing::TestWithParam<test::RigKind> {
protected:
  Adamw() : rig_(GetParam()), scalars_(&rig_, 1), present_(&rig_, 3) {}

  mfsdp_status commit(const std::vector<mfsdp_fused_item> &items) {
    Buffer<mfsdp_fused_item> table(&rig_, items);
    int64_t largest = 0, total = 0;
    for (const mfsdp_fused_item &item : items) {
      largest = std::max(largest, item.count);
      total += item.count;
    }
    const mfsdp_status status =
        mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, table.data(),
                           static_cast<int32_t>(items.size()), largest, total, clipped_,
                           scalars_.data(), used_present_);
    return status == MFSDP_OK ? rig_.sync() : status;
  }

  Rig rig_;
  mfsdp_adamw_desc desc_ = mfsdp_adamw_desc_default();
  int32_t clipped_ = 0;
  Buffer<mfsdp_step_scalars> scalars_;
  Buffer<uint32_t> present_;
  const uint32_t *used_present_ = nullptr;
};

/*
 * Five steps against float64. Judged on the change of the weights; a step rounds each weight twice,
 * and its direction m / (sqrt(v) / c + eps) goes through about a dozen roundings (of m, v, the
 * constants, the root, two divisions).
 */
TEST_P(Adamw, Golden) {
  const ref::GoldenFile file = ref::golden_load("adamw.txt");
  EXPECT_EQ(file.cases.size(), 5u);
  for (const ref::GoldenCase &c : file.cases) {
    SCOPED_TRACE(c.name);
    desc_.beta1 = c.number("beta1");
    desc_.beta2 = c.number("beta2");
    desc_.eps = c.number("eps");
    const ref::GoldenArray &start = c.array("weight0");
    Piece piece(&rig_, start.floats());
    mfsdp_step_scalars s = mfsdp_step_scalars_default(c.number("lr"), c.number("weight_decay"));
    const int64_t steps = c.integer("steps");
    EXPECT_EQ(steps, 5);
    for (int64_t t = 1; t <= steps; ++t) {
      s.applied_steps = t;
      scalars_.write({s});
      piece.grad.write(c.array(key("grad", t)).floats());
      ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
      const std::vector<double> &want = c.array(key("weight", t)).values;
      const std::vector<double> got = ref::widen(piece.master.read());
      std::vector<double> error(got.size()), change(got.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        error[i] = got[i] - want[i];
        change[i] = want[i] - start.values[i];
      }
      EXPECT_LE(ref::frobenius_norm(error),
                kRounding * (12.0 * ref::frobenius_norm(change) +
                             2.0 * static_cast<double>(t) * ref::frobenius_norm(want)))
          << "step " << t;
    }
    /* Per step three roundings of m, four of v; zeros must be met exactly. */
    EXPECT_LE(ref::relative_error(piece.m.read(), c.array(key("m", steps)).values),
              3.0 * 5.0 * kRounding);
    EXPECT_LE(ref::relative_error(piece.v.read(), c.array(key("v", steps)).values),
              4.0 * 5.0 * kRounding);
  }
}

/* Odd lengths, so that vector loops have a tail; 300 steps, so that powers of beta matter. */
TEST_P(Adamw, BitForBitTheStatedOrder) {
  for (std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{1001}}) {
    ref::AdamwOptions o;
    o.lr = 0.03;
    o.weight_decay = 0.1;
    o.grad_scale = 0.25;
    std::vector<float> w = values(count, 1), m(count, 0.0f), v(count, 0.0f);
    Piece piece(&rig_, w);
    mfsdp_step_scalars s = mfsdp_step_scalars_default(o.lr, o.weight_decay);
    s.grad_scale = o.grad_scale;
    for (int64_t t = 1; t <= 300; t = t < 5 ? t + 1 : t * 2) {
      const std::vector<float> g = values(count, 100 + static_cast<uint64_t>(t));
      s.applied_steps = t;
      scalars_.write({s});
      piece.grad.write(g);
      ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
      ref::adamw_step_f32(o, t, g, &m, &v, &w);
      ASSERT_TRUE(same_bits(piece.master.read(), w)) << "step " << t;
      ASSERT_TRUE(same_bits(piece.m.read(), m));
      ASSERT_TRUE(same_bits(piece.v.read(), v));
    }
  }
}

TEST_P(Adamw, ClipScaleOnlyWhenClipped) {
  for (int32_t clipped : {0, 1}) {
    ref::AdamwOptions o;
    o.grad_scale = clipped ? 0.3 * 0.7 : 0.3;
    std::vector<float> w = values(50, 1), m(50, 0.0f), v(50, 0.0f);
    Piece piece(&rig_, w);
    mfsdp_step_scalars s = mfsdp_step_scalars_default(o.lr, o.weight_decay);
    s.grad_scale = 0.3;
    s.clip_scale = 0.7;
    scalars_.write({s});
    clipped_ = clipped;
    piece.grad.write(values(50, 2));
    ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
    ref::adamw_step_f32(o, 1, values(50, 2), &m, &v, &w);
    EXPECT_TRUE(same_bits(piece.master.read(), w)) << clipped;
    EXPECT_TRUE(same_bits(piece.v.read(), v)) << clipped;
  }
}

/* NUMERICS: with bf16 weights 1 - lr wd rounds to 1. The decay must be seen in the fp32 master, and
 * in time in the bf16 copy that is made from it. */
TEST_P(Adamw, DecayActsOnTheMaster) {
  Piece piece(&rig_, std::vector<float>(10, 1.0f));
  piece.item.param = piece.param.data();
  piece.item.param_dtype = MFSDP_BF16;
  piece.grad.write(std::vector<float>(10, 0.0f));
  scalars_.write({mfsdp_step_scalars_default(1e-3, 0.1)});
  ASSERT_EQ(mfsdp_bf16_from_f32(1.0f - 1e-4f), mfsdp_bf16_from_f32(1.0f));
  float want = 1.0f;
  const float decay = static_cast<float>(1.0 - 1e-4);
  for (int t = 0; t < 60; ++t) {
    ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
    want *= decay;
  }
  EXPECT_TRUE(same_bits(piece.master.read(), std::vector<float>(10, want)));
  EXPECT_EQ(piece.param.read(), std::vector<uint16_t>(10, mfsdp_bf16_from_f32(want)));
  EXPECT_LT(mfsdp_f32_from_bf16(piece.param.read()[0]), 1.0f);
}

TEST_P(Adamw, SeveralPiecesInOnePassEqualSinglePasses) {
  std::deque<Piece> together, alone;
  std::vector<mfsdp_fused_item> items;
  scalars_.write({mfsdp_step_scalars_default(0.01, 0.1)});
  for (std::size_t count : {5u, 0u, 300u, 64u}) {
    together.emplace_back(&rig_, values(count, count));
    together.back().grad.write(values(count, count + 1));
    items.push_back(together.back().item);
    alone.emplace_back(&rig_, values(count, count));
    alone.back().grad.write(values(count, count + 1));
    ASSERT_EQ(commit({alone.back().item}), MFSDP_OK) << rig_.message();
  }
  ASSERT_EQ(commit(items), MFSDP_OK) << rig_.message();
  for (std::size_t i = 0; i < items.size(); ++i)
    EXPECT_TRUE(same_bits(together[i].master.read(), alone[i].master.read())) << i;
}

TEST_P(Adamw, SkipTouchesNothing) {
  Piece piece(&rig_, values(20, 1));
  piece.item.param = piece.param.data();
  piece.item.param_dtype = MFSDP_BF16;
  piece.param.write(std::vector<uint16_t>(20, 0x1234));
  piece.m.write(values(20, 2));
  std::vector<float> bad = values(20, 3);
  bad[3] = std::numeric_limits<float>::infinity();
  piece.grad.write(bad);
  mfsdp_step_scalars s = mfsdp_step_scalars_default(0.1, 0.1);
  s.skip = 1;
  scalars_.write({s});
  ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
  EXPECT_TRUE(same_bits(piece.master.read(), values(20, 1)));
  EXPECT_TRUE(same_bits(piece.m.read(), values(20, 2)));
  EXPECT_TRUE(same_bits(piece.v.read(), std::vector<float>(20, 0.0f)));
  EXPECT_EQ(piece.param.read(), std::vector<uint16_t>(20, 0x1234));
}

TEST_P(Adamw, FactorsThatAreNoNumbersTouchNothing) {
  Piece piece(&rig_, values(20, 1));
  piece.m.write(values(20, 2));
  piece.grad.write(values(20, 3));
  double mfsdp_step_scalars::*const factors[] = {
      &mfsdp_step_scalars::lr, &mfsdp_step_scalars::weight_decay, &mfsdp_step_scalars::grad_scale,
      &mfsdp_step_scalars::clip_scale};
  for (double mfsdp_step_scalars::*factor : factors)
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
          -std::numeric_limits<double>::infinity()}) {
      mfsdp_step_scalars s = mfsdp_step_scalars_default(0.1, 0.1);
      s.*factor = bad;
      scalars_.write({s});
      ASSERT_EQ(commit({piece.item}), MFSDP_OK) << rig_.message();
      EXPECT_TRUE(same_bits(piece.master.read(), values(20, 1)));
      EXPECT_TRUE(same_bits(piece.m.read(), values(20, 2)));
      EXPECT_TRUE(same_bits(piece.v.read(), std::vector<float>(20, 0.0f)));
    }
}

TEST_P(Adamw, OnlyPresentParametersAreUpdated) {
  Piece a(&rig_, values(20, 1)), b(&rig_, values(20, 1));
  a.item.present_index = 0;
  b.item.present_index = 2;
  a.grad.write(values(20, 2));
  b.grad.write(values(20, 2));
  scalars_.write({mfsdp_step_scalars_default(0.1, 0.1)});
  present_.write({0, 0, 1});
  used_present_ = present_.data();
  ASSERT_EQ(commit({a.item, b.item}), MFSDP_OK) << rig_.message();
  EXPECT_TRUE(same_bits(a.master.read(), values(20, 1)));
  EXPECT_TRUE(same_bits(a.v.read(), std::vector<float>(20, 0.0f)));
  EXPECT_FALSE(same_bits(b.master.read(), values(20, 1)));
}

TEST_P(Adamw, NoItems) {
  EXPECT_EQ(mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, nullptr, 0, 0, 0, 0,
                               nullptr, nullptr),
            MFSDP_OK);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Adamw, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

TEST(AdamwDesc, TorchDefaults) {
  const mfsdp_adamw_desc desc = mfsdp_adamw_desc_default();
  EXPECT_EQ(desc.struct_nbytes, sizeof(desc));
  EXPECT_EQ(desc.beta1, 0.9);
  EXPECT_EQ(desc.beta2, 0.999);
  EXPECT_EQ(desc.eps, 1e-8);
}

/* ---- the rules, one negative test each ---- */

class AdamwRules : public ::testing::Test {
protected:
  AdamwRules() : rig_(test::rig_kinds()[0]) {}

  void refused(const mfsdp_adamw_desc *desc, const std::string &part) {
    EXPECT_EQ(mfsdp_adamw_check(&rig_.context, desc), MFSDP_E_ARGUMENT);
    EXPECT_NE(std::string(rig_.message()).find(part), std::string::npos) << rig_.message();
    float data[4] = {3.0f, 1.0f, 0.0f, 0.0f};
    const mfsdp_fused_item item = mfsdp_adamw_item(data, data + 1, data + 2, data + 3, 1);
    const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
    EXPECT_EQ(mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, desc, &item, 1, 1, 1, 0,
                                 &scalars, nullptr),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(rig_.sync(), MFSDP_OK);
    EXPECT_EQ(data[0], 3.0f);
  }

  Rig rig_;
  mfsdp_adamw_desc desc_ = mfsdp_adamw_desc_default();
};

TEST_F(AdamwRules, NullDesc) {
  refused(nullptr, "desc is NULL");
}
TEST_F(AdamwRules, OtherSize) {
  desc_.struct_nbytes = 4;
  refused(&desc_, "struct_nbytes is not");
}
TEST_F(AdamwRules, Beta1Negative) {
  desc_.beta1 = -0.5;
  refused(&desc_, "betas are -0.5 and 0.999");
}
TEST_F(AdamwRules, Beta1One) {
  desc_.beta1 = 1.0;
  refused(&desc_, "betas are 1 and 0.999, need to be in [0, 1)");
}
TEST_F(AdamwRules, Beta2One) {
  desc_.beta2 = 1.0;
  refused(&desc_, "betas are 0.9 and 1");
}
TEST_F(AdamwRules, Beta2Nan) {
  desc_.beta2 = std::numeric_limits<double>::quiet_NaN();
  refused(&desc_, "betas are 0.9 and");
}
TEST_F(AdamwRules, BetasOfZeroAreLegal) {
  desc_.beta1 = desc_.beta2 = 0.0;
  EXPECT_EQ(mfsdp_adamw_check(&rig_.context, &desc_), MFSDP_OK);
}
TEST_F(AdamwRules, EpsZero) {
  desc_.eps = 0.0;
  refused(&desc_, "eps is 0, needs to be positive");
}
/* Updates divide by it in float: as 0 or infinity it would make NaN of a parameter, or no update. */
TEST_F(AdamwRules, EpsThatIsNoFloat) {
  desc_.eps = 1e-50;
  refused(&desc_, "eps is 1e-50, needs to be positive, and 1.2e-38 to 3.4e38");
  desc_.eps = 1e39;
  refused(&desc_, "eps is 1e+39");
  desc_.eps = 1.2e-38;
  EXPECT_EQ(mfsdp_adamw_check(&rig_.context, &desc_), MFSDP_OK);
}
TEST_F(AdamwRules, EpsNan) {
  desc_.eps = std::numeric_limits<double>::quiet_NaN();
  refused(&desc_, "needs to be positive");
}
TEST_F(AdamwRules, ClippedIsZeroOrOne) {
  float data[4] = {3.0f, 1.0f, 0.0f, 0.0f};
  const mfsdp_fused_item item = mfsdp_adamw_item(data, data + 1, data + 2, data + 3, 1);
  const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  for (const int32_t clipped : {2, -1}) {
    EXPECT_EQ(mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, &item, 1, 1, 1,
                                 clipped, &scalars, nullptr),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(rig_.message(), "adamw: clipped is " + std::to_string(clipped) + ", needs 0 or 1");
    EXPECT_EQ(rig_.sync(), MFSDP_OK);
    EXPECT_EQ(data[0], 3.0f);
  }
}

/* Found while the pass runs, since scalars lie in device memory: it comes with the wait. */
TEST_F(AdamwRules, StepsCountFromOne) {
  float data[4] = {3.0f, 1.0f, 0.0f, 0.0f};
  const mfsdp_fused_item item = mfsdp_adamw_item(data, data + 1, data + 2, data + 3, 1);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  scalars.applied_steps = 0;
  (void)mfsdp_adamw_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, &item, 1, 1, 1, 0,
                           &scalars, nullptr);
  EXPECT_EQ(rig_.sync(), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig_.message()).find("applied_steps is 0"), std::string::npos)
      << rig_.message();
  EXPECT_EQ(data[0], 3.0f);
  rig_.renew_queue();
}

} // namespace
