/* SPDX-License-Identifier: MIT */
/*
 * muon.h against golden vectors and its own formula; on C loops, on a worker's queue and on CBLAS.
 *
 * One queue at a time, whose races host_queue_test looks for: not run under the thread sanitizer
 * (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/muon.h"

#include "mfsdp/dtype.h"
#include "tests/ref/golden.h"
#include "tests/ref/muon_ref.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

/* Half a unit of float's last place, relative: one rounding. */
const double kRounding = 1.0 / 16777216.0;

std::vector<double> minus(std::vector<double> a, const std::vector<double> &b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] -= b[i];
  return a;
}

std::string key(const char *stem, int64_t step) {
  return stem + std::to_string(step);
}

/* One matrix with everything that a step needs, in the backend's memory. */
struct Matrix {
  Matrix(Rig *rig_in, const mfsdp_muon_desc &desc_in, int64_t rows_in, int64_t cols_in,
         const std::vector<float> &master_in)
      : rig(rig_in), desc(desc_in), rows(rows_in), cols(cols_in), master(rig_in, master_in),
        grad(rig_in, master_in.size()), momentum(rig_in, master_in.size()),
        direction(rig_in, master_in.size()), param(rig_in, master_in.size()), item(rig_in, 1),
        scalars(rig_in, 1), present(rig_in, 3) {
    std::size_t nbytes = 0;
    EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig->context, &desc.newton_schulz, rows, cols,
                                                   &nbytes),
              MFSDP_OK);
    workspace.reset(new Buffer<unsigned char>(rig, nbytes));
    workspace->fill(0xff);
    momentum.write(std::vector<float>(master_in.size(), 0.0f));
    host_item = mfsdp_muon_item(&desc, rows, cols, master.data(), grad.data(), momentum.data(),
                                direction.data());
    item.write({host_item});
    set(mfsdp_step_scalars_default(desc.default_lr, desc.default_weight_decay));
  }
  void set(const mfsdp_step_scalars &s) { scalars.write({s}); }
  /* The compute-dtype copy, bf16. */
  void use_param() {
    host_item.param = param.data();
    host_item.param_dtype = MFSDP_BF16;
    item.write({host_item});
  }
  void use_moments(float *moments) {
    host_item.state[1] = moments;
    item.write({host_item});
  }
  mfsdp_status prepare() {
    return mfsdp_muon_prepare(&rig->context, rig->backend, rig->queue, &desc, rows, cols,
                              direction.data(), item.data(), clipped, scalars.data(), used_present,
                              workspace->data(), workspace->count());
  }
  mfsdp_status commit() {
    return mfsdp_muon_commit(&rig->context, rig->backend, rig->queue, &desc, rows, cols,
                             item.data(), clipped, scalars.data(), used_present);
  }
  mfsdp_status step() {
    return mfsdp_muon_step(&rig->context, rig->backend, rig->queue, &desc, rows, cols,
                           direction.data(), item.data(), clipped, scalars.data(), used_present,
                           workspace->data(), workspace->count());
  }
  void must(mfsdp_status status) {
    EXPECT_EQ(status, MFSDP_OK) << rig->message();
    EXPECT_EQ(rig->sync(), MFSDP_OK) << rig->message();
  }

  Rig *rig;
  mfsdp_muon_desc desc;
  int64_t rows, cols;
  int32_t clipped = 0;
  Buffer<float> master, grad, momentum, direction;
  Buffer<uint16_t> param;
  Buffer<mfsdp_fused_item> item;
  Buffer<mfsdp_step_scalars> scalars;
  Buffer<uint32_t> present;
  const uint32_t *used_present = nullptr;
  std::unique_ptr<Buffer<unsigned char>> workspace;
  mfsdp_fused_item host_item;
};

class Muon : public ::testing::TestWithParam<test::RigKind> {
protected:
  Muon() : rig_(GetParam()) {}

  /* The preset, changed to what the case states. */
  static mfsdp_muon_desc desc_of(const ref::GoldenCase &c, mfsdp_muon_preset preset) {
    mfsdp_muon_desc desc = mfsdp_muon_desc_preset(preset);
    desc.momentum = c.number("momentum");
    if (preset == MFSDP_MUON_TORCH || preset == MFSDP_MUON_JORDAN)
      desc.grad_weight = desc.nesterov_weight = 1.0 - desc.momentum;
    desc.nesterov = c.integer("nesterov") != 0 ? 1 : 0;
    desc.scale = c.text("scale") == "original"             ? MFSDP_MUON_SCALE_ORIGINAL
                 : c.text("scale") == "spectral_unclamped" ? MFSDP_MUON_SCALE_SPECTRAL
                                                           : MFSDP_MUON_SCALE_MATCH_RMS_ADAMW;
    desc.normalize_rows = c.numbers.count("row_beta2") != 0;
    if (desc.normalize_rows) {
      desc.row_beta2 = c.number("row_beta2");
      desc.row_eps = c.number("row_eps");
    }
    desc.newton_schulz.eps = c.number("eps");
    desc.newton_schulz.norm_rule = c.text("eps_rule") == "scale_safe"      ? MFSDP_NORM_SCALE_SAFE
                                   : c.text("eps_rule") == "reference_max" ? MFSDP_NORM_MAX_EPS
                                                                           : MFSDP_NORM_ADD_EPS;
    return desc;
  }

  /*
   * Three steps against the float64 formula. The change of the weights is judged, which a relative
   * error of the weights would hide at lr 1e-3: the fp32 Newton-Schulz is allowed `tolerance`, and
   * each step rounds the weight twice (decay, step).
   */
  void check_case(const ref::GoldenCase &c, mfsdp_muon_preset preset, double tolerance) {
    SCOPED_TRACE(c.name);
    const ref::GoldenArray &start = c.array("weight0");
    Matrix m(&rig_, desc_of(c, preset), start.rows, start.cols, start.floats());
    Buffer<float> moments(&rig_, std::vector<float>(static_cast<std::size_t>(start.rows), 0.0f));
    if (m.desc.normalize_rows) m.use_moments(moments.data());
    m.set(mfsdp_step_scalars_default(c.number("lr"), c.number("weight_decay")));
    const int64_t steps = c.integer("steps");
    for (int64_t t = 1; t <= steps; ++t) {
      m.grad.write(c.array(key("grad", t)).floats());
      m.must(m.step());
      const std::vector<double> &want = c.array(key("weight", t)).values;
      const std::vector<double> got = ref::widen(m.master.read());
      EXPECT_LE(ref::frobenius_norm(minus(got, want)),
                tolerance * ref::frobenius_norm(minus(want, start.values)) +
                    2.0 * static_cast<double>(t) * kRounding * ref::frobenius_norm(want))
          << "step " << t;
    }
    /* The momentum never meets Newton-Schulz: three roundings a step. */
    EXPECT_LE(ref::relative_error(m.momentum.read(), c.array(key("momentum", steps)).values),
              3.0 * static_cast<double>(steps) * kRounding);
    /* Squares of what Newton-Schulz left: twice its relative error, and three roundings a step. */
    if (m.desc.normalize_rows) {
      EXPECT_LE(ref::relative_error(moments.read(), c.array("row_moment").values),
                2.0 * tolerance + 3.0 * static_cast<double>(steps) * kRounding);
    }
    EXPECT_EQ(rig_.context.counters.newton_schulz_count, static_cast<uint64_t>(steps));
    rig_.context.counters.newton_schulz_count = 0;
  }

  Rig rig_;
};

const int64_t kRows = 20, kCols = 28;
const std::size_t kCount = 20 * 28;

std::vector<float> values(uint64_t seed, double scale = 1.0) {
  return ref::narrow(ref::random_matrix(kRows, kCols, seed, scale));
}

/* 1e-5: the promise for fp32 Newton-Schulz on well-conditioned input, which the small random
 * gradients of the vectors are. */
TEST_P(Muon, GoldenTorch) {
  const ref::GoldenFile file = ref::golden_load("muon_torch.txt");
  EXPECT_EQ(file.cases.size(), 12u);
  for (const ref::GoldenCase &c : file.cases)
    check_case(c, MFSDP_MUON_TORCH, 1e-5);
}

TEST_P(Muon, GoldenJordan) {
  const ref::GoldenFile file = ref::golden_load("muon_jordan.txt");
  EXPECT_EQ(file.cases.size(), 11u);
  for (const ref::GoldenCase &c : file.cases)
    check_case(c, MFSDP_MUON_JORDAN, 1e-5);
}

TEST_P(Muon, GoldenMoonlightAndDion) {
  const ref::GoldenFile file = ref::golden_load("muon_other.txt");
  EXPECT_EQ(file.cases.size(), 6u);
  for (const ref::GoldenCase &c : file.cases)
    check_case(c, c.name.compare(0, 4, "dion") == 0 ? MFSDP_MUON_DION : MFSDP_MUON_MOONLIGHT, 1e-5);
}

/* Dividing by a row's root keeps relative errors; the dominant row's small companions are as exact
 * as Newton-Schulz made them, relative to the whole: with a row 50 times the others its spectrum is
 * graded, where 1e-4 is the promise. */
TEST_P(Muon, GoldenRows) {
  const ref::GoldenFile file = ref::golden_load("muon_rows.txt");
  EXPECT_EQ(file.cases.size(), 7u);
  for (const ref::GoldenCase &c : file.cases)
    check_case(c,
               c.name == "tall"           ? MFSDP_MUON_TORCH
               : c.name == "dominant_row" ? MFSDP_MUON_MOONLIGHT
               : c.name == "other_beta2"  ? MFSDP_MUON_DION
                                          : MFSDP_MUON_JORDAN,
               c.name == "dominant_row" ? 1e-4 : 1e-5);
}

/* torch.optim.Muon unchanged iterates in bfloat16: 2^-9 a rounding, through fifteen products with
 * slopes of up to 3.4 a step. A wrong nesterov, scale or transposition is off by far more than
 * 0.05 of the change. */
TEST_P(Muon, GoldenTorchStockWithinBfloat16) {
  const ref::GoldenFile file = ref::golden_load("muon_torch_stock.txt");
  EXPECT_EQ(file.cases.size(), 3u);
  for (const ref::GoldenCase &c : file.cases)
    check_case(c, MFSDP_MUON_TORCH, 0.05);
}

/* The presets themselves, not only the values a case states. */
TEST(MuonPreset, Defaults) {
  const struct {
    const char *file;
    mfsdp_muon_preset preset;
  } rows[] = {{"muon_torch.txt", MFSDP_MUON_TORCH}, {"muon_jordan.txt", MFSDP_MUON_JORDAN}};
  for (const auto &row : rows) {
    const ref::GoldenFile file = ref::golden_load(row.file);
    const ref::GoldenCase &c = file.find("square");
    const mfsdp_muon_desc desc = mfsdp_muon_desc_preset(row.preset);
    EXPECT_EQ(desc.default_lr, c.number("lr"));
    EXPECT_EQ(desc.default_weight_decay, c.number("weight_decay"));
    EXPECT_EQ(desc.momentum, c.number("momentum"));
    EXPECT_EQ(desc.grad_weight, 1.0 - c.number("momentum"));
    EXPECT_EQ(desc.nesterov_weight, 1.0 - c.number("momentum"));
    EXPECT_EQ(desc.nesterov, 1);
    EXPECT_EQ(desc.scale, MFSDP_MUON_SCALE_ORIGINAL);
    EXPECT_EQ(desc.newton_schulz.step_count, 5);
    EXPECT_EQ(desc.newton_schulz.eps, c.number("eps"));
    EXPECT_EQ(desc.newton_schulz.norm_rule, MFSDP_NORM_SCALE_SAFE) << "in every preset";
  }
}

/* The other two: what their golden cases state, field by field. */
TEST(MuonPreset, DefaultsOfTheSums) {
  const struct {
    const char *name;
    mfsdp_muon_preset preset;
    ref::MuonOptions want;
    mfsdp_muon_scale scale;
  } rows[] = {{"moonlight_wide", MFSDP_MUON_MOONLIGHT, ref::muon_moonlight(),
               MFSDP_MUON_SCALE_MATCH_RMS_ADAMW},
              {"dion_wide", MFSDP_MUON_DION, ref::muon_dion(), MFSDP_MUON_SCALE_SPECTRAL}};
  const ref::GoldenFile file = ref::golden_load("muon_other.txt");
  for (const auto &row : rows) {
    const ref::GoldenCase &c = file.find(row.name);
    const mfsdp_muon_desc desc = mfsdp_muon_desc_preset(row.preset);
    EXPECT_EQ(desc.default_lr, c.number("lr"));
    EXPECT_EQ(desc.default_weight_decay, c.number("weight_decay"));
    EXPECT_EQ(desc.momentum, c.number("momentum"));
    EXPECT_EQ(desc.grad_weight, 1.0);
    EXPECT_EQ(desc.nesterov_weight, 1.0);
    EXPECT_EQ(desc.nesterov, c.integer("nesterov"));
    EXPECT_EQ(desc.scale, row.scale);
    EXPECT_EQ(desc.normalize_rows, 0);
    EXPECT_EQ(desc.newton_schulz.norm_factor, c.number("norm_factor"));
    EXPECT_EQ(desc.newton_schulz.norm_rule, MFSDP_NORM_SCALE_SAFE) << "in every preset";
    ASSERT_EQ(static_cast<std::size_t>(desc.newton_schulz.step_count),
              row.want.coefficients.size());
    for (int32_t i = 0; i < desc.newton_schulz.step_count; ++i)
      for (int k = 0; k < 3; ++k)
        EXPECT_EQ(desc.newton_schulz
                      .coefficients[std::min(i, desc.newton_schulz.coefficient_count - 1)][k],
                  row.want.coefficients[static_cast<std::size_t>(i)][static_cast<std::size_t>(k)]);
  }
}

TEST(MuonPreset, Names) {
  const char *names[] = {"torch", "jordan", "moonlight", "dion"};
  for (int i = 0; i < 4; ++i) {
    const mfsdp_muon_preset preset = mfsdp_muon_preset_by_name(names[i]);
    EXPECT_EQ(static_cast<int>(preset), i + 1);
    EXPECT_STREQ(mfsdp_muon_preset_name(preset), names[i]);
  }
  EXPECT_EQ(static_cast<int>(MFSDP_MUON_END), 5) << "a preset without a test";
  EXPECT_EQ(mfsdp_muon_preset_by_name("Torch"), MFSDP_MUON_NONE);
  EXPECT_EQ(mfsdp_muon_preset_by_name(nullptr), MFSDP_MUON_NONE);
  EXPECT_STREQ(mfsdp_muon_preset_name(MFSDP_MUON_NONE), "invalid");
  EXPECT_STREQ(mfsdp_muon_preset_name(MFSDP_MUON_END), "invalid");
}

/* d4: numbers by hand, from the planned matrix. A convolution (64, 32, 3, 3) is 64 x 288; from its
 * last two dimensions the factor would be 1 for both orientations. */
TEST(MuonScale, Table) {
  const struct {
    int64_t rows, cols;
    double original, match_rms_adamw;
  } rows[] = {{4096, 1024, 2.0, 12.8},
              {1024, 4096, 1.0, 12.8},
              {512, 512, 1.0, 4.525483399593904},
              {64, 288, 1.0, 3.394112549695428},
              {288, 64, 2.1213203435596424, 3.394112549695428},
              {1, 9, 1.0, 0.6},
              {9, 1, 3.0, 0.6},
              {0, 8, 1.0, 1.0},
              {8, 0, 1.0, 1.0}};
  mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  for (const auto &row : rows) {
    desc.scale = MFSDP_MUON_SCALE_ORIGINAL;
    EXPECT_DOUBLE_EQ(mfsdp_muon_scale_of(&desc, row.rows, row.cols), row.original);
    desc.scale = MFSDP_MUON_SCALE_MATCH_RMS_ADAMW;
    EXPECT_DOUBLE_EQ(mfsdp_muon_scale_of(&desc, row.rows, row.cols), row.match_rms_adamw);
    desc.scale = MFSDP_MUON_SCALE_SPECTRAL;
    if (row.rows > 0 && row.cols > 0) {
      EXPECT_DOUBLE_EQ(mfsdp_muon_scale_of(&desc, row.rows, row.cols) *
                           mfsdp_muon_scale_of(&desc, row.cols, row.rows),
                       1.0);
      EXPECT_DOUBLE_EQ(mfsdp_muon_scale_of(&desc, 4 * row.cols, row.cols), 2.0);
    }
    desc.scale = MFSDP_MUON_SCALE_NONE;
    EXPECT_EQ(mfsdp_muon_scale_of(&desc, row.rows, row.cols), 1.0);
  }
}

/* d4, end to end: with a polynomial that really ends at 1 (eight jordan steps, then two of
 * (2, -1.5, .5): 1.000 to 1.001), the update of an m x n matrix has RMS s / sqrt(max(m, n)), which
 * is 1 / sqrt(n) for the original scale and 0.2 for the other, whatever the orientation. */
TEST_P(Muon, UpdateRms) {
  double table[10][3];
  for (int i = 0; i < 10; ++i) {
    table[i][0] = i < 8 ? 3.4445 : 2.0;
    table[i][1] = i < 8 ? -4.7750 : -1.5;
    table[i][2] = i < 8 ? 2.0315 : 0.5;
  }
  const struct {
    int64_t rows, cols;
    double rms;
  } rows[] = {{96, 24, 0.2041241452}, {24, 96, 0.1020620726}, {16, 36, 1.0 / 6.0}, {25, 25, 0.2}};
  for (const auto &row : rows)
    for (mfsdp_muon_scale scale : {MFSDP_MUON_SCALE_ORIGINAL, MFSDP_MUON_SCALE_MATCH_RMS_ADAMW}) {
      mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
      desc.scale = scale;
      desc.newton_schulz.coefficients = table;
      desc.newton_schulz.coefficient_count = desc.newton_schulz.step_count = 10;
      const int64_t s = std::min(row.rows, row.cols);
      const std::vector<float> g = ref::narrow(ref::matrix_with_singular_values(
          row.rows, row.cols, ref::spectrum_log_uniform(s, 0.1), 5));
      Matrix m(&rig_, desc, row.rows, row.cols, std::vector<float>(g.size(), 0.0f));
      m.set(mfsdp_step_scalars_default(1.0, 0.0));
      m.grad.write(g);
      m.must(m.step());
      const double rms = ref::frobenius_norm(ref::widen(m.master.read())) /
                         std::sqrt(static_cast<double>(g.size()));
      EXPECT_NEAR(rms / (scale == MFSDP_MUON_SCALE_ORIGINAL ? row.rms : 0.2), 1.0, 1.5e-3)
          << row.rows << "x" << row.cols;
    }
}

/* ---- what prepare and commit may touch ---- */

/* NUMERICS: "The momentum buffer must not be changed by the normalization (a real bug elsewhere)".
 * Prepare reads the state; commit writes exactly the documented float formula. */
TEST_P(Muon, MomentumIsTheFormulaAndNothingElse) {
  for (double scale : {1e-20, 1.0, 1e20}) {
    Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
    const std::vector<float> b = values(2, scale), g = values(3, scale), w = m.master.read();
    m.momentum.write(b);
    m.grad.write(g);
    m.must(m.prepare());
    EXPECT_TRUE(same_bits(m.momentum.read(), b)) << "prepare changed the momentum";
    EXPECT_TRUE(same_bits(m.master.read(), w)) << "prepare changed the master";
    EXPECT_TRUE(same_bits(m.grad.read(), g)) << "prepare changed the gradient";
    m.must(m.commit());
    const float mu = 0.95f, weight = static_cast<float>(1.0 - 0.95);
    std::vector<float> want(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const float old_part = mu * b[i], new_part = weight * (g[i] * 1.0f);
      want[i] = old_part + new_part;
    }
    EXPECT_TRUE(same_bits(m.momentum.read(), want)) << scale;
    EXPECT_TRUE(same_bits(m.grad.read(), g)) << "commit changed the gradient";
  }
}

/* W = (1 - lr wd) W with the unscaled lr, then W = W - lr s X: in this order, bit by bit. */
TEST_P(Muon, CommitDecaysThenSteps) {
  Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kCols, kRows, values(1));
  const std::vector<float> w = m.master.read();
  m.use_param();
  m.set(mfsdp_step_scalars_default(0.25, 0.5));
  m.grad.write(values(3));
  m.must(m.prepare());
  const std::vector<float> x = m.direction.read();
  m.must(m.commit());
  const float decay = static_cast<float>(1.0 - 0.25 * 0.5);
  const float step = static_cast<float>(0.25 * std::sqrt(28.0 / 20.0));
  std::vector<float> want(kCount);
  std::vector<uint16_t> want_param(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const float decayed = w[i] * decay, change = step * x[i];
    want[i] = decayed - change;
    want_param[i] = mfsdp_bf16_from_f32(want[i]);
  }
  EXPECT_TRUE(same_bits(m.master.read(), want));
  EXPECT_EQ(m.param.read(), want_param) << "the compute copy is the rounded master";
}

TEST_P(Muon, StepIsPrepareThenCommit) {
  Matrix a(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_JORDAN), kRows, kCols, values(1));
  Matrix b(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_JORDAN), kRows, kCols, values(1));
  for (uint64_t t = 0; t < 3; ++t) {
    a.grad.write(values(10 + t));
    b.grad.write(values(10 + t));
    a.must(a.step());
    EXPECT_EQ(b.prepare(), MFSDP_OK);
    b.must(b.commit());
    EXPECT_TRUE(same_bits(a.master.read(), b.master.read()));
    EXPECT_TRUE(same_bits(a.momentum.read(), b.momentum.read()));
  }
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 6u) << "one per matrix and step";
}

/* With no Newton-Schulz step the direction is the normalized momentum update, so both rules can be
 * read off. Four roundings, then one of the normalization. */
TEST_P(Muon, NesterovOnAndOff) {
  for (int32_t nesterov : {0, 1}) {
    mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
    desc.nesterov = nesterov;
    desc.newton_schulz.step_count = 0;
    Matrix m(&rig_, desc, kRows, kCols, values(1));
    const std::vector<float> b = values(2), g = values(3);
    m.momentum.write(b);
    m.grad.write(g);
    m.must(m.prepare());
    ref::MuonOptions options = ref::muon_torch();
    options.nesterov = nesterov != 0;
    std::vector<double> momentum = ref::widen(b);
    const std::vector<double> update = ref::muon_momentum(options, ref::widen(g), &momentum);
    EXPECT_LE(ref::relative_error(m.direction.read(),
                                  ref::normalize(update, ref::EpsRule::kScaleSafe, 0.0)),
              5.0 * kRounding)
        << nesterov;
  }
}

/* The gradient is grad * grad_scale, and * clip_scale for clipped groups only: seen in the momentum
 * of a first step, which is (1 - mu) g. */
TEST_P(Muon, GradScaleAlwaysClipScaleWhenAsked) {
  for (int32_t clipped : {0, 1}) {
    Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
    mfsdp_step_scalars s = mfsdp_step_scalars_default(0.1, 0.0);
    s.grad_scale = 0.3;
    s.clip_scale = 0.7;
    m.clipped = clipped;
    m.set(s);
    const std::vector<float> g = values(3);
    m.grad.write(g);
    m.must(m.step());
    const float scale = static_cast<float>(0.3 * (clipped ? 0.7 : 1.0));
    const float weight = static_cast<float>(1.0 - 0.95);
    std::vector<float> want(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const float scaled = g[i] * scale;
      want[i] = 0.95f * 0.0f + weight * scaled;
    }
    EXPECT_TRUE(same_bits(m.momentum.read(), want)) << clipped;
  }
}

TEST_P(Muon, ZeroMomentumAndGradientOnlyDecay) {
  Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
  std::vector<float> want = m.master.read();
  m.set(mfsdp_step_scalars_default(0.25, 0.5));
  m.grad.write(std::vector<float>(kCount, 0.0f));
  m.must(m.step());
  for (float &w : want)
    w *= 0.875f;
  EXPECT_TRUE(same_bits(m.master.read(), want));
}

/* ---- rows (NorMuon) ---- */

/* Three steps against the formula in double. The direction has one rounding per element more than
 * what Newton-Schulz left, and the moments three per step. */
TEST_P(Muon, RowsAgainstTheFormula) {
  mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  desc.normalize_rows = 1;
  Matrix m(&rig_, desc, kRows, kCols, values(1));
  Buffer<float> moments(&rig_, std::vector<float>(kRows, 0.0f));
  m.use_moments(moments.data());
  std::vector<double> second(kRows, 0.0);
  for (uint64_t t = 0; t < 3; ++t) {
    std::vector<float> g = values(10 + t);
    for (std::size_t j = 0; j < kCols; ++j)
      g[3 * kCols + j] *= 50.0f; /* a row that dominates */
    m.grad.write(g);
    m.must(m.prepare());
    const std::vector<double> x = ref::widen(m.direction.read());
    m.must(m.commit());
    std::vector<double> want = x;
    double before = 0.0, after = 0.0;
    for (std::size_t i = 0; i < kRows; ++i) {
      double square = 0.0;
      for (std::size_t j = 0; j < kCols; ++j)
        square += x[i * kCols + j] * x[i * kCols + j];
      second[i] = 0.95 * second[i] + (1.0 - 0.95) * square / static_cast<double>(kCols);
      for (std::size_t j = 0; j < kCols; ++j)
        want[i * kCols + j] /= std::sqrt(second[i]) + 1e-10;
      before += square;
    }
    for (double value : want)
      after += value * value;
    for (double &value : want)
      value *= std::sqrt(before / after);
    EXPECT_LE(ref::relative_error(m.direction.read(), want), 8.0 * kRounding) << t;
    EXPECT_LE(ref::relative_error(moments.read(), second),
              4.0 * static_cast<double>(t + 1) * kRounding);
    /* After one step all rows have one size; the norm stays what Newton-Schulz made it. */
    if (t == 0) {
      const std::vector<float> y = m.direction.read();
      for (std::size_t i = 0; i < kRows; ++i) {
        double square = 0.0;
        for (std::size_t j = 0; j < kCols; ++j)
          square += static_cast<double>(y[i * kCols + j]) * static_cast<double>(y[i * kCols + j]);
        EXPECT_NEAR(square, before / kRows, 1e-5 * before / kRows);
      }
    }
  }
}

TEST_P(Muon, RowsOfZerosStayZeroAndSkipTouchesNoMoment) {
  mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  desc.normalize_rows = 1;
  Matrix m(&rig_, desc, kRows, kCols, values(1));
  Buffer<float> moments(&rig_, std::vector<float>(kRows, 0.0f));
  m.use_moments(moments.data());
  m.set(mfsdp_step_scalars_default(0.25, 0.0));
  m.grad.write(std::vector<float>(kCount, 0.0f));
  m.must(m.step());
  EXPECT_TRUE(same_bits(m.master.read(), values(1)));
  m.grad.write(values(3));
  m.must(m.step());
  const std::vector<float> kept = moments.read(), master = m.master.read();
  mfsdp_step_scalars s = mfsdp_step_scalars_default(0.1, 0.1);
  s.skip = 1;
  m.set(s);
  m.must(m.step());
  EXPECT_TRUE(same_bits(moments.read(), kept));
  EXPECT_TRUE(same_bits(m.master.read(), master));
}

/* ---- predicates ---- */

TEST_P(Muon, SkipTouchesNothing) {
  Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
  m.use_param();
  m.param.write(std::vector<uint16_t>(kCount, 0x1234));
  mfsdp_step_scalars s = mfsdp_step_scalars_default(0.1, 0.1);
  s.skip = 1;
  m.set(s);
  m.momentum.write(values(2));
  std::vector<float> bad = values(3);
  bad[5] = std::numeric_limits<float>::quiet_NaN(); /* what a skip is for */
  m.grad.write(bad);
  m.must(m.step());
  EXPECT_TRUE(same_bits(m.momentum.read(), values(2)));
  EXPECT_TRUE(same_bits(m.master.read(), values(1)));
  EXPECT_EQ(m.param.read(), std::vector<uint16_t>(kCount, 0x1234));
}

TEST_P(Muon, FactorsThatAreNoNumbersTouchNothing) {
  Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
  m.momentum.write(values(2));
  m.grad.write(values(3));
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    m.set(mfsdp_step_scalars_default(bad, 0.1));
    m.must(m.step());
    m.set(mfsdp_step_scalars_default(0.1, bad));
    m.must(m.step());
    EXPECT_TRUE(same_bits(m.momentum.read(), values(2)));
    EXPECT_TRUE(same_bits(m.master.read(), values(1)));
  }
}

TEST_P(Muon, OnlyPresentParametersAreUpdated) {
  Matrix m(&rig_, mfsdp_muon_desc_preset(MFSDP_MUON_TORCH), kRows, kCols, values(1));
  m.host_item.present_index = 1;
  m.item.write({m.host_item});
  m.momentum.write(values(2));
  m.grad.write(values(3));
  m.used_present = m.present.data();
  m.present.write({1, 0, 1});
  m.must(m.step());
  EXPECT_TRUE(same_bits(m.momentum.read(), values(2)));
  EXPECT_TRUE(same_bits(m.master.read(), values(1)));
  m.present.write({0, 1, 0});
  m.must(m.step());
  EXPECT_FALSE(same_bits(m.momentum.read(), values(2)));
  EXPECT_FALSE(same_bits(m.master.read(), values(1)));
}

TEST_P(Muon, NoElements) {
  const mfsdp_muon_desc desc = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  const mfsdp_fused_item item = mfsdp_muon_item(&desc, 0, 8, nullptr, nullptr, nullptr, nullptr);
  const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  EXPECT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, &desc, 0, 8, nullptr, &item, 0,
                            &scalars, nullptr, nullptr, 0),
            MFSDP_OK)
      << rig_.message();
  EXPECT_EQ(rig_.sync(), MFSDP_OK);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Muon, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

/* ---- the rules, one negative test each ---- */

/* A number that C++ would not let an enum hold, as a C caller could. */
template <class Enum> void put(Enum *where, unsigned value) {
  static_assert(sizeof(*where) == sizeof(value), "enums are ints here");
  std::memcpy(where, &value, sizeof(value));
}

class MuonRules : public ::testing::Test {
protected:
  MuonRules() : rig_(test::rig_kinds()[0]) {}

  void refused(const mfsdp_muon_desc *desc, const std::string &part) {
    EXPECT_EQ(mfsdp_muon_check(&rig_.context, desc), MFSDP_E_ARGUMENT);
    expect_message(part);
    float data[64] = {3.0f};
    mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
    mfsdp_muon_desc good = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
    mfsdp_fused_item item = mfsdp_muon_item(&good, 4, 4, data, data + 16, data + 32, data + 48);
    EXPECT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, desc, 4, 4, data + 48, &item,
                              0, &scalars, nullptr, data, sizeof(data)),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_muon_commit(&rig_.context, rig_.backend, rig_.queue, desc, 4, 4, &item, 0,
                                &scalars, nullptr),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(data[0], 3.0f);
  }
  void expect_message(const std::string &part) {
    EXPECT_NE(std::string(rig_.message()).find(part), std::string::npos) << rig_.message();
  }

  Rig rig_;
  mfsdp_muon_desc desc_ = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
};

TEST_F(MuonRules, NullDesc) {
  refused(nullptr, "desc is NULL");
}
TEST_F(MuonRules, OtherSize) {
  desc_.struct_nbytes += 8;
  refused(&desc_, "struct_nbytes is not");
}
TEST_F(MuonRules, UnknownPreset) {
  for (unsigned preset : {0u, 5u}) {
    mfsdp_muon_preset unknown = MFSDP_MUON_TORCH;
    put(&unknown, preset);
    desc_ = mfsdp_muon_desc_preset(unknown);
    refused(&desc_, "of an unknown preset");
  }
}
TEST_F(MuonRules, MomentumNegative) {
  desc_.momentum = -0.1;
  refused(&desc_, "momentum is -0.1");
}
TEST_F(MuonRules, MomentumOne) {
  desc_.momentum = 1.0;
  refused(&desc_, "momentum is 1, needs to be in [0, 1)");
}
TEST_F(MuonRules, MomentumNan) {
  desc_.momentum = std::numeric_limits<double>::quiet_NaN();
  refused(&desc_, "momentum is");
}
TEST_F(MuonRules, MomentumZeroIsLegal) {
  desc_.momentum = 0.0;
  EXPECT_EQ(mfsdp_muon_check(&rig_.context, &desc_), MFSDP_OK);
}
TEST_F(MuonRules, GradWeightZero) {
  desc_.grad_weight = 0.0;
  refused(&desc_, "grad_weight is 0");
  desc_.grad_weight = std::numeric_limits<double>::infinity(); /* NaN where a gradient is 0 */
  refused(&desc_, "grad_weight is inf");
}
TEST_F(MuonRules, NesterovWeightZero) {
  desc_.nesterov_weight = 0.0;
  refused(&desc_, "nesterov_weight is 0");
  desc_.nesterov_weight = 1e39;
  refused(&desc_, "nesterov_weight is 1e+39");
  desc_.nesterov = 0; /* then it is not read */
  EXPECT_EQ(mfsdp_muon_check(&rig_.context, &desc_), MFSDP_OK);
}
TEST_F(MuonRules, ScaleUnknown) {
  put(&desc_.scale, 0);
  refused(&desc_, "scale is 0, needs 1 to 4");
  put(&desc_.scale, 5);
  refused(&desc_, "scale is 5");
}
TEST_F(MuonRules, RowOptions) {
  desc_.row_beta2 = 1.0; /* not read unless asked for */
  desc_.row_eps = 0.0;
  EXPECT_EQ(mfsdp_muon_check(&rig_.context, &desc_), MFSDP_OK);
  desc_.normalize_rows = 1;
  refused(&desc_, "row_beta2 is 1, needs to be in [0, 1)");
  desc_.row_beta2 = 0.9;
  refused(&desc_, "row_eps is 0, needs to be positive");
  desc_.row_eps = 1e-50; /* its inverse, the factor of an empty row, is no float */
  refused(&desc_, "row_eps is 1e-50, needs to be positive, and 1.2e-38 to 3.4e38");
}
TEST_F(MuonRules, FlagsAreZeroOrOne) {
  for (int32_t mfsdp_muon_desc::*field :
       {&mfsdp_muon_desc::nesterov, &mfsdp_muon_desc::normalize_rows}) {
    const std::string name = field == &mfsdp_muon_desc::nesterov ? "nesterov" : "normalize_rows";
    const mfsdp_muon_desc good = desc_;
    for (const int32_t value : {2, -1}) {
      desc_.*field = value;
      refused(&desc_, "muon: " + name + " is " + std::to_string(value) + ", needs 0 or 1");
    }
    desc_ = good;
  }
}
/* The argument of every pass; nothing is enqueued, so that nothing changes. */
TEST_F(MuonRules, ClippedIsZeroOrOne) {
  std::vector<float> data(64, 3.0f);
  const std::vector<float> before = data;
  const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  const mfsdp_fused_item item =
      mfsdp_muon_item(&desc_, 4, 4, &data[0], &data[16], &data[32], &data[48]);
  std::size_t nbytes = 0;
  ASSERT_EQ(
      mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_.newton_schulz, 4, 4, &nbytes),
      MFSDP_OK);
  Buffer<unsigned char> workspace(&rig_, nbytes);
  for (const int32_t clipped : {2, -1}) {
    const std::string message = "muon: clipped is " + std::to_string(clipped) + ", needs 0 or 1";
    EXPECT_EQ(mfsdp_muon_prepare(&rig_.context, rig_.backend, rig_.queue, &desc_, 4, 4, &data[48],
                                 &item, clipped, &scalars, nullptr, workspace.data(), nbytes),
              MFSDP_E_ARGUMENT);
    expect_message(message);
    EXPECT_EQ(mfsdp_muon_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, 4, 4, &item,
                                clipped, &scalars, nullptr),
              MFSDP_E_ARGUMENT);
    expect_message(message);
    EXPECT_EQ(rig_.sync(), MFSDP_OK);
    EXPECT_TRUE(same_bits(data, before));
  }
}
TEST_F(MuonRules, NewtonSchulzRulesCount) {
  desc_.newton_schulz.step_count = -2;
  refused(&desc_, "step_count is -2");
}

/* Nothing is enqueued before everything is checked: the direction stays as it was. */
TEST_F(MuonRules, WorkspaceTooSmallDoesNothing) {
  std::size_t nbytes = 0;
  ASSERT_EQ(
      mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_.newton_schulz, 4, 4, &nbytes),
      MFSDP_OK);
  std::vector<float> data(64, 1.0f);
  std::fill(data.begin() + 48, data.end(), 7.0f); /* the direction */
  const std::vector<float> before = data;
  Buffer<unsigned char> workspace(&rig_, nbytes);
  const mfsdp_fused_item item = mfsdp_muon_item(&desc_, 4, 4, data.data(), data.data() + 16,
                                                data.data() + 32, data.data() + 48);
  const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  EXPECT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, &desc_, 4, 4, data.data() + 48,
                            &item, 0, &scalars, nullptr, workspace.data(), nbytes - 1),
            MFSDP_E_ARGUMENT);
  expect_message("needs " + std::to_string(nbytes));
  EXPECT_EQ(rig_.sync(), MFSDP_OK);
  EXPECT_EQ(data, before);
}

TEST_F(MuonRules, ShapesThatMakeNoSense) {
  const mfsdp_fused_item item = mfsdp_muon_item(&desc_, 0, 0, nullptr, nullptr, nullptr, nullptr);
  const mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.1, 0.1);
  EXPECT_EQ(mfsdp_muon_commit(&rig_.context, rig_.backend, rig_.queue, &desc_, -1, 4, &item, 0,
                              &scalars, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("-1 x 4");
  EXPECT_EQ(mfsdp_muon_step(&rig_.context, rig_.backend, rig_.queue, &desc_, INT64_C(1) << 40,
                            INT64_C(1) << 40, nullptr, &item, 0, &scalars, nullptr, nullptr, 0),
            MFSDP_E_OVERFLOW);
}

} // namespace
