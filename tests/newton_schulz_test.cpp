/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz.h against the float64 reference on the same rounded input, against golden vectors
 * and against itself; on C loops, on a worker's queue and on CBLAS.
 *
 * Tolerances. kWell and kGraded are the project's promises: relative Frobenius error of an fp32
 * iteration on well-conditioned input and on anything else. Five steps add some 15 products, each
 * with about sqrt(s) roundings of 2^-24; on small singular values these are amplified by at most
 * the polynomial's slope at 0 (3.4445^5 = 485), which well-conditioned input does not meet.
 *
 * One queue at a time, whose races host_queue_test looks for: not run under the thread sanitizer
 * (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/newton_schulz.h"

#include "tests/ref/golden.h"
#include "tests/ref/newton_schulz_ref.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

const double kWell = 1e-5;
const double kGraded = 1e-4;
/* One rounding to float. */
const double kOneRounding = 6.0e-8;

using test::Buffer;
using test::Rig;
using test::same_bits;

mfsdp_newton_schulz_desc desc_of(mfsdp_newton_schulz_form form) {
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  desc.form = form;
  return desc;
}

class NewtonSchulz : public ::testing::TestWithParam<test::RigKind> {
protected:
  NewtonSchulz() : rig_(GetParam()) {}

  std::size_t workspace_nbytes(const mfsdp_newton_schulz_desc &desc, int64_t rows, int64_t cols) {
    std::size_t nbytes = 0;
    EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc, rows, cols, &nbytes),
              MFSDP_OK)
        << rig_.message();
    return nbytes;
  }

  /* Runs on exactly the workspace that was asked for (the allocator watches both ends); scratch and
   * output start as NaN; the input must come out as it went in. */
  std::vector<float> run(const mfsdp_newton_schulz_desc &desc, int64_t rows, int64_t cols,
                         const std::vector<float> &input, bool in_place = false) {
    Buffer<float> in(&rig_, input), out(&rig_, input.size());
    Buffer<unsigned char> workspace(&rig_, workspace_nbytes(desc, rows, cols));
    workspace.fill(0xff);
    out.fill(0xff);
    float *target = in_place ? in.data() : out.data();
    EXPECT_EQ(mfsdp_newton_schulz(&rig_.context, rig_.backend, rig_.queue, &desc, rows, cols,
                                  in.data(), target, workspace.data(), workspace.count()),
              MFSDP_OK)
        << rig_.message();
    EXPECT_EQ(rig_.sync(), MFSDP_OK) << rig_.message();
    if (in_place) return in.read();
    EXPECT_TRUE(same_bits(in.read(), input)) << "the input was changed";
    return out.read();
  }

  Rig rig_;
};

struct Shape {
  int64_t rows, cols;
};

const Shape kShapes[] = {{1, 1},   {1, 37},   {37, 1},   {4, 33},   {33, 4},
                         {16, 16}, {63, 80},  {64, 64},  {72, 72},  {65, 90},
                         {90, 65}, {24, 160}, {66, 132}, {133, 65}, {101, 98}};

const mfsdp_newton_schulz_form kForms[] = {MFSDP_NS_PLAIN, MFSDP_NS_SYMMETRIC, MFSDP_NS_GRAM,
                                           MFSDP_NS_AUTO};

std::vector<float> matrix(Shape shape, const std::vector<double> &sigma, uint64_t seed) {
  return ref::narrow(ref::matrix_with_singular_values(shape.rows, shape.cols, sigma, seed, 8));
}

int64_t short_side(Shape shape) {
  return std::min(shape.rows, shape.cols);
}

/* Singular values from 1 to 0.1. */
std::vector<float> well_conditioned(Shape shape, uint64_t seed = 1) {
  return matrix(shape, ref::spectrum_log_uniform(short_side(shape), 0.1), seed);
}

std::vector<double> reference(const std::vector<float> &x, Shape shape, int steps = 5) {
  return ref::newton_schulz(ref::widen(x), shape.rows, shape.cols, ref::coefficients_jordan(steps));
}

/* The steps that a description asks for, as the reference takes them. */
ref::Coefficients coefficients_of(const mfsdp_newton_schulz_desc &desc) {
  ref::Coefficients out;
  for (int32_t step = 0; step < desc.step_count; ++step) {
    const double *row = desc.coefficients[std::min(step, desc.coefficient_count - 1)];
    out.push_back({{row[0], row[1], row[2]}});
  }
  return out;
}

/* ---- accuracy ---- */

TEST_P(NewtonSchulz, WellConditioned) {
  for (const Shape &shape : kShapes) {
    const std::vector<float> x = well_conditioned(shape);
    const std::vector<double> want = reference(x, shape);
    for (mfsdp_newton_schulz_form form : kForms)
      EXPECT_LE(ref::relative_error(run(desc_of(form), shape.rows, shape.cols, x), want), kWell)
          << shape.rows << "x" << shape.cols << " form " << form;
  }
}

TEST_P(NewtonSchulz, GradedSpectrum) {
  for (const Shape &shape : kShapes) {
    const std::vector<float> x =
        matrix(shape, ref::spectrum_log_uniform(short_side(shape), 1e-7), 2);
    const std::vector<double> want = reference(x, shape);
    for (mfsdp_newton_schulz_form form : kForms)
      EXPECT_LE(ref::relative_error(run(desc_of(form), shape.rows, shape.cols, x), want), kGraded)
          << shape.rows << "x" << shape.cols << " form " << form;
  }
}

/* Below the rank the reference has what rounding the input left there, the library that and its own
 * rounding noise, both amplified by up to 485: graded, not well conditioned. */
TEST_P(NewtonSchulz, RankOneAndRankDeficient) {
  for (const Shape &shape : {Shape{32, 32}, Shape{70, 90}, Shape{90, 70}, Shape{4, 50}})
    for (int64_t rank : {int64_t{1}, short_side(shape) / 2}) {
      const std::vector<float> x =
          matrix(shape, ref::spectrum_deficient(short_side(shape), rank), 3);
      const std::vector<double> want = reference(x, shape);
      for (mfsdp_newton_schulz_form form : kForms)
        EXPECT_LE(ref::relative_error(run(desc_of(form), shape.rows, shape.cols, x), want), kGraded)
            << shape.rows << "x" << shape.cols << " rank " << rank << " form " << form;
    }
}

TEST_P(NewtonSchulz, ZeroGivesExactlyZero) {
  for (const Shape &shape : {Shape{8, 8}, Shape{70, 90}, Shape{1, 5}})
    for (mfsdp_newton_schulz_form form : kForms)
      for (mfsdp_norm_rule rule : {MFSDP_NORM_SCALE_SAFE, MFSDP_NORM_MAX_EPS, MFSDP_NORM_ADD_EPS}) {
        mfsdp_newton_schulz_desc desc = desc_of(form);
        desc.norm_rule = rule;
        const std::vector<float> x(static_cast<std::size_t>(shape.rows * shape.cols), 0.0f);
        EXPECT_EQ(run(desc, shape.rows, shape.cols, x), x);
      }
}

/* Every singular value of the output is the polynomial of one of the input's, and all lie in the
 * published range for normalized inputs in [.01, 1] (three digits, hence 5e-4). */
TEST_P(NewtonSchulz, SingularValuesAreThePolynomials) {
  for (const Shape &shape : {Shape{48, 48}, Shape{66, 80}, Shape{80, 66}}) {
    const std::vector<float> x =
        matrix(shape, ref::spectrum_log_uniform(short_side(shape), 0.05), 4);
    std::vector<double> sigma = ref::singular_values(ref::widen(x), shape.rows, shape.cols);
    const double norm = ref::frobenius_norm(ref::widen(x));
    for (double &value : sigma) {
      ASSERT_GE(value / norm, 0.01);
      value = ref::polynomial(value / norm, ref::coefficients_jordan());
    }
    std::sort(sigma.begin(), sigma.end(), std::greater<double>());
    const std::vector<double> got = ref::singular_values(
        ref::widen(run(mfsdp_newton_schulz_desc_default(), shape.rows, shape.cols, x)), shape.rows,
        shape.cols);
    /* Singular values move by at most the error's norm: kWell times |Y|_F <= 1.134 sqrt(66). */
    EXPECT_LE(ref::max_difference(got, sigma), kWell * 9.3);
    EXPECT_LE(got.front(), 1.134 + 5e-4);
    EXPECT_GE(got.back(), 0.682 - 5e-4);
  }
}

TEST_P(NewtonSchulz, GoldenVectors) {
  const ref::GoldenFile file = ref::golden_load("newton_schulz.txt");
  EXPECT_EQ(file.cases.size(), 26u);
  for (const ref::GoldenCase &c : file.cases) {
    const ref::GoldenArray &x = c.array("x"), &y = c.array("y"), &table = c.array("table");
    std::vector<double> rows = table.values;
    mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
    desc.coefficients = reinterpret_cast<const double(*)[3]>(rows.data());
    desc.coefficient_count = desc.step_count = static_cast<int32_t>(table.rows);
    desc.eps = c.number("eps");
    const std::string &rule = c.text("eps_rule");
    desc.norm_rule = rule == "scale_safe"      ? MFSDP_NORM_SCALE_SAFE
                     : rule == "reference_max" ? MFSDP_NORM_MAX_EPS
                                               : MFSDP_NORM_ADD_EPS;
    for (mfsdp_newton_schulz_form form : kForms) {
      desc.form = form;
      EXPECT_LE(ref::relative_error(run(desc, x.rows, x.cols, x.floats()), y.values),
                c.name == "rank_one" ? kGraded : kWell)
          << c.name << " form " << form;
    }
  }
}

/* ---- scale ---- */

/* A power of two scales every float and the fp64 norm exactly, so nothing at all changes. */
TEST_P(NewtonSchulz, PowersOfTwoChangeNoBit) {
  const Shape shape = {66, 70};
  const std::vector<float> x = well_conditioned(shape);
  const std::vector<float> want =
      run(mfsdp_newton_schulz_desc_default(), shape.rows, shape.cols, x);
  for (int power : {-80, -40, -1, 1, 40, 80, 120}) {
    std::vector<float> scaled = x;
    for (float &value : scaled)
      value = std::ldexp(value, power);
    EXPECT_TRUE(
        same_bits(run(mfsdp_newton_schulz_desc_default(), shape.rows, shape.cols, scaled), want))
        << "2^" << power;
  }
}

/* Other factors round each element of cG once more (2^-24 of it); the polynomial amplifies that by
 * at most 485, and |Y|_F is at least .682 sqrt(s): 485 * 6e-8 / 3.8 = 8e-6, plus twice kWell for
 * the two float results that are compared. */
TEST_P(NewtonSchulz, ScaleInvariance) {
  for (const Shape &shape : {Shape{32, 40}, Shape{70, 64}}) {
    const std::vector<float> x = well_conditioned(shape, 6);
    for (double c : {1e-12, 1e-6, 1e-3, 3.0, 1e3, 1e6, 1e12}) {
      std::vector<float> scaled = x;
      for (float &value : scaled)
        value = static_cast<float>(c * static_cast<double>(value));
      const std::vector<double> exact = reference(scaled, shape);
      for (mfsdp_newton_schulz_form form : kForms) {
        const std::vector<float> want = run(desc_of(form), shape.rows, shape.cols, x);
        const std::vector<float> got = run(desc_of(form), shape.rows, shape.cols, scaled);
        EXPECT_LE(ref::relative_error(got, ref::widen(want)), 8e-6 + 2 * kWell) << c;
        EXPECT_LE(ref::relative_error(got, exact), kWell) << c;
      }
    }
  }
}

TEST_P(NewtonSchulz, NormsFromTinyToHuge) {
  const Shape shape = {20, 30};
  const std::vector<float> x = well_conditioned(shape, 7);
  const double norm = ref::frobenius_norm(ref::widen(x));
  for (double target : {1e-30, 1e-20, 1e20, 1e30}) {
    std::vector<float> scaled = x;
    for (float &value : scaled)
      value = static_cast<float>(static_cast<double>(value) / norm * target);
    EXPECT_LE(
        ref::relative_error(run(mfsdp_newton_schulz_desc_default(), shape.rows, shape.cols, scaled),
                            reference(scaled, shape)),
        kWell)
        << target;
  }
}

/* The rules of the sources are floors for tiny inputs; the scale-safe rule is not. */
TEST_P(NewtonSchulz, EpsRulesPartBelowEps) {
  const Shape shape = {12, 18};
  std::vector<float> x = well_conditioned(shape, 8);
  const double norm = ref::frobenius_norm(ref::widen(x));
  for (float &value : x)
    value = static_cast<float>(static_cast<double>(value) / norm * 1e-7);
  const std::vector<double> wide = ref::widen(x);
  const struct {
    mfsdp_norm_rule rule;
    ref::EpsRule ref_rule;
  } rows[] = {{MFSDP_NORM_SCALE_SAFE, ref::EpsRule::kScaleSafe},
              {MFSDP_NORM_MAX_EPS, ref::EpsRule::kReferenceMax},
              {MFSDP_NORM_ADD_EPS, ref::EpsRule::kReferenceAdd}};
  for (const auto &row : rows) {
    mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
    desc.norm_rule = row.rule;
    desc.eps = 1e-6;
    EXPECT_LE(
        ref::relative_error(run(desc, shape.rows, shape.cols, x),
                            ref::newton_schulz(wide, shape.rows, shape.cols,
                                               ref::coefficients_jordan(), row.ref_rule, 1e-6)),
        kWell)
        << row.rule;
  }
}

/* SCALE_SAFE does not read eps: no value of it may be refused or felt. */
TEST_P(NewtonSchulz, ScaleSafeDoesNotReadEps) {
  const std::vector<float> x = well_conditioned({8, 9});
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  const std::vector<float> want = run(desc, 8, 9, x);
  for (double eps : {-1.0, 0.0, 1e30, std::numeric_limits<double>::quiet_NaN()}) {
    desc.eps = eps;
    EXPECT_TRUE(same_bits(run(desc, 8, 9, x), want)) << eps;
  }
}

/* ---- steps, forms and places ---- */

TEST_P(NewtonSchulz, EveryStepCount) {
  for (const Shape &shape : {Shape{12, 20}, Shape{20, 12}, Shape{66, 66}}) {
    const std::vector<float> x = well_conditioned(shape, 9);
    for (int steps = 0; steps <= 7; ++steps) {
      mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
      desc.step_count = steps;
      EXPECT_LE(
          ref::relative_error(run(desc, shape.rows, shape.cols, x), reference(x, shape, steps)),
          steps == 0 ? kOneRounding : kWell)
          << steps << " steps";
      EXPECT_TRUE(same_bits(run(desc, shape.rows, shape.cols, x, true),
                            run(desc, shape.rows, shape.cols, x)))
          << steps << " steps in place";
    }
  }
}

TEST_P(NewtonSchulz, TheLastRowOfCoefficientsRepeats) {
  const Shape shape = {10, 14};
  const std::vector<float> x = well_conditioned(shape, 10);
  const double table[2][3] = {{3.0, -3.5, 1.4}, {2.0, -1.5, 0.5}};
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  desc.coefficients = table;
  desc.coefficient_count = 2;
  desc.step_count = 4;
  const ref::Coefficients rows = {
      {{3.0, -3.5, 1.4}}, {{2.0, -1.5, 0.5}}, {{2.0, -1.5, 0.5}}, {{2.0, -1.5, 0.5}}};
  EXPECT_LE(ref::relative_error(run(desc, shape.rows, shape.cols, x),
                                ref::newton_schulz(ref::widen(x), shape.rows, shape.cols, rows)),
            kWell);
}

TEST_P(NewtonSchulz, InPlaceEqualsOutOfPlace) {
  for (const Shape &shape : kShapes)
    for (mfsdp_newton_schulz_form form : kForms) {
      const std::vector<float> x = well_conditioned(shape, 11);
      EXPECT_TRUE(same_bits(run(desc_of(form), shape.rows, shape.cols, x, true),
                            run(desc_of(form), shape.rows, shape.cols, x)))
          << shape.rows << "x" << shape.cols << " form " << form;
    }
}

/* Both are within kWell of the same exact matrix. */
TEST_P(NewtonSchulz, TallIsTheTransposeOfWide) {
  for (const Shape &shape : {Shape{80, 30}, Shape{90, 70}, Shape{37, 1}}) {
    const std::vector<float> tall = well_conditioned(shape, 12);
    const std::vector<float> wide =
        ref::narrow(ref::transpose(ref::widen(tall), shape.rows, shape.cols));
    for (mfsdp_newton_schulz_form form : kForms) {
      const std::vector<float> a = run(desc_of(form), shape.rows, shape.cols, tall);
      const std::vector<float> b = run(desc_of(form), shape.cols, shape.rows, wide);
      EXPECT_LE(ref::relative_error(a, ref::transpose(ref::widen(b), shape.cols, shape.rows)),
                2 * kWell)
          << shape.rows << "x" << shape.cols << " form " << form;
    }
  }
}

/* The table of AUTO, by hand, both orientations; a stated form is never changed. */
TEST(NewtonSchulzForm, Table) {
  const struct {
    int64_t s, l;
    mfsdp_newton_schulz_form form;
  } rows[] = {{1, 3, MFSDP_NS_PLAIN},           {1, 4, MFSDP_NS_GRAM},
              {63, 63, MFSDP_NS_PLAIN},         {63, 251, MFSDP_NS_PLAIN},
              {63, 252, MFSDP_NS_GRAM},         {64, 64, MFSDP_NS_SYMMETRIC},
              {64, 127, MFSDP_NS_SYMMETRIC},    {64, 128, MFSDP_NS_GRAM},
              {255, 509, MFSDP_NS_SYMMETRIC},   {255, 510, MFSDP_NS_GRAM},
              {256, 383, MFSDP_NS_SYMMETRIC},   {256, 384, MFSDP_NS_GRAM},
              {257, 385, MFSDP_NS_SYMMETRIC},   {257, 386, MFSDP_NS_GRAM},
              {8192, 8192, MFSDP_NS_SYMMETRIC}, {8192, 28672, MFSDP_NS_GRAM}};
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  EXPECT_EQ(desc.form, MFSDP_NS_AUTO);
  for (const auto &row : rows) {
    desc.form = MFSDP_NS_AUTO;
    EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, row.s, row.l), row.form) << row.s << " " << row.l;
    EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, row.l, row.s), row.form) << row.s << " " << row.l;
    for (mfsdp_newton_schulz_form stated : {MFSDP_NS_PLAIN, MFSDP_NS_SYMMETRIC, MFSDP_NS_GRAM}) {
      desc.form = stated;
      EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, row.s, row.l), stated);
    }
  }
}

/* AUTO is nothing but that choice, bit by bit. */
TEST_P(NewtonSchulz, AutoIsOneOfTheForms) {
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  for (const Shape &shape : kShapes) {
    const std::vector<float> x = well_conditioned(shape, 13);
    const mfsdp_newton_schulz_form form =
        mfsdp_newton_schulz_form_of(&desc, shape.rows, shape.cols);
    EXPECT_TRUE(same_bits(run(desc, shape.rows, shape.cols, x),
                          run(desc_of(form), shape.rows, shape.cols, x)));
  }
}

/* By hand: products of a since the last restart stay at most 500, or 50 below s = 256; in 16 bits
 * restarts are counted, unless the polynomials are steep at 1. */
TEST(NewtonSchulzForm, AutomaticRestarts) {
  const struct {
    mfsdp_ns_set set;
    int64_t s;
    mfsdp_dtype dtype;
    uint64_t restarts; /* bit k: after step k + 1 */
  } rows[] = {{MFSDP_NS_SET_JORDAN5, 256, MFSDP_F32, 0},
              {MFSDP_NS_SET_YOU5, 256, MFSDP_F32, 0},
              {MFSDP_NS_SET_CUBIC5, 256, MFSDP_F32, 0},
              {MFSDP_NS_SET_POLAR_EXPRESS, 256, MFSDP_F32, 8}, /* 430, 979 */
              {MFSDP_NS_SET_CANS5, 256, MFSDP_F32, 8},         /* 439, 986 */
              {MFSDP_NS_SET_DEEPSEEK_V4, 256, MFSDP_F32, 16},  /* 485, then 41 x 4 */
              {MFSDP_NS_SET_JORDAN5, 255, MFSDP_F32, 4},       /* 40.9, 141 */
              {MFSDP_NS_SET_YOU5, 255, MFSDP_F32, 2},          /* 16.1, 60.4; then 30.5 */
              {MFSDP_NS_SET_POLAR_EXPRESS, 255, MFSDP_F32, 2}, /* 33, 130; then 29.3 */
              {MFSDP_NS_SET_DEEPSEEK_V4, 255, MFSDP_F32, 4 | 32},
              {MFSDP_NS_SET_JORDAN5, 4096, MFSDP_BF16, 2},
              {MFSDP_NS_SET_JORDAN5, 8, MFSDP_F16, 2},
              {MFSDP_NS_SET_YOU5, 256, MFSDP_BF16, 2},
              /* every two steps, the last two or three without */
              {MFSDP_NS_SET_DEEPSEEK_V4, 256, MFSDP_F16, 2 | 8 | 32 | 128},
              {MFSDP_NS_SET_DEEPSEEK_V4, 256, MFSDP_BF16, 2 | 8 | 32 | 128},
              /* steep: at most 12, or 24: 33.0; 15.9, 52; 12.7; 7.4 */
              {MFSDP_NS_SET_POLAR_EXPRESS, 256, MFSDP_BF16, 1 | 2 | 4},
              {MFSDP_NS_SET_POLAR_EXPRESS, 256, MFSDP_F16, 1 | 4},
              {MFSDP_NS_SET_CANS5, 8, MFSDP_BF16, 1 | 2 | 4}, /* 34.6; 16.2, 52; 12.7; 7.3 */
              {MFSDP_NS_SET_CANS5, 4096, MFSDP_F16, 1 | 4},
              {MFSDP_NS_SET_CUBIC5, 256, MFSDP_BF16, 2 | 8}, /* 8.5, 21; 6.0, 13 */
              {MFSDP_NS_SET_CUBIC5, 256, MFSDP_F16, 4},      /* 8.5, 21, 51; 5.3 */
              /* 30.9; 14.7; 11.9, 26 */
              {MFSDP_NS_SET_POLAR_EXPRESS_16, 256, MFSDP_BF16, 1 | 2 | 8},
              {MFSDP_NS_SET_POLAR_EXPRESS_16, 256, MFSDP_F16, 1 | 4}};
  for (const auto &row : rows) {
    mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_of(row.set);
    desc.dtype = row.dtype;
    EXPECT_EQ(mfsdp_newton_schulz_restarts_of(&desc, row.s, 4 * row.s), row.restarts)
        << mfsdp_ns_set_name(row.set) << " " << row.s;
    EXPECT_EQ(mfsdp_newton_schulz_restarts_of(&desc, 4 * row.s, row.s), row.restarts);
    desc.restarts = MFSDP_NS_RESTARTS_NONE;
    EXPECT_EQ(mfsdp_newton_schulz_restarts_of(&desc, row.s, row.s), 0u);
    desc.restarts = 1 | 4 | 16; /* the last one stands after the last step of five */
    desc.step_count = 5;
    EXPECT_EQ(mfsdp_newton_schulz_restarts_of(&desc, row.s, row.s), 5u);
    desc.step_count = 0;
    EXPECT_EQ(mfsdp_newton_schulz_restarts_of(&desc, row.s, row.s), 0u);
  }
}

/* Stated restarts, as few and as many as can be, in and out of place: the same polynomial. */
TEST_P(NewtonSchulz, StatedRestarts) {
  for (const Shape &shape : {Shape{20, 44}, Shape{70, 66}}) {
    const std::vector<float> x = well_conditioned(shape, 21);
    const std::vector<double> want = reference(x, shape);
    for (uint64_t restarts = 0; restarts < 16; ++restarts) {
      mfsdp_newton_schulz_desc desc = desc_of(MFSDP_NS_GRAM);
      desc.restarts = restarts;
      const std::vector<float> y = run(desc, shape.rows, shape.cols, x);
      EXPECT_LE(ref::relative_error(y, want), kWell) << restarts;
      EXPECT_TRUE(same_bits(run(desc, shape.rows, shape.cols, x, true), y)) << restarts;
    }
  }
}

/* ---- coefficient sets ---- */

/* p(x / f) in every step. */
ref::Coefficients divided(ref::Coefficients table, double f) {
  for (std::array<double, 3> &row : table)
    row = {{row[0] / f, row[1] / (f * f * f), row[2] / (f * f * f * f * f)}};
  return table;
}

/* The tables against the reference's own copies, which have been checked against golden vectors; the
 * two that are not used as published, divided by their safety factor. */
TEST(NewtonSchulzSets, TablesAreTheReferences) {
  const struct {
    const char *name;
    ref::Coefficients want;
  } rows[] = {{"jordan5", ref::coefficients_jordan()},
              {"you5", ref::coefficients_you5()},
              {"polar_express", ref::coefficients_polar_express(5)},
              {"polar_express_16", ref::coefficients_polar_express(5, 1.05, true)},
              {"cans5", divided(ref::coefficients_cans5(), 1.0125)},
              {"cubic5", divided(ref::coefficients_cubic5(), 1.0125)},
              {"deepseek_v4", ref::coefficients_deepseek_v4()}};
  int known = 0;
  for (const auto &row : rows) {
    const mfsdp_ns_set set = mfsdp_ns_set_by_name(row.name);
    ASSERT_NE(set, MFSDP_NS_SET_NONE) << row.name;
    EXPECT_STREQ(mfsdp_ns_set_name(set), row.name);
    const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_of(set);
    EXPECT_EQ(coefficients_of(desc), row.want) << row.name;
    ++known;
  }
  EXPECT_EQ(known, static_cast<int>(MFSDP_NS_SET_END) - 1) << "a set without a test";
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_POLAR_EXPRESS);
  for (int steps : {6, 7, 8, 12}) {
    desc.step_count = steps;
    EXPECT_EQ(coefficients_of(desc), ref::coefficients_polar_express(steps));
  }
}

TEST(NewtonSchulzSets, UnknownNames) {
  EXPECT_EQ(mfsdp_ns_set_by_name("jordan"), MFSDP_NS_SET_NONE);
  EXPECT_EQ(mfsdp_ns_set_by_name(""), MFSDP_NS_SET_NONE);
  EXPECT_EQ(mfsdp_ns_set_by_name(nullptr), MFSDP_NS_SET_NONE);
  EXPECT_STREQ(mfsdp_ns_set_name(MFSDP_NS_SET_NONE), "invalid");
  EXPECT_STREQ(mfsdp_ns_set_name(MFSDP_NS_SET_END), "invalid");
  EXPECT_EQ(mfsdp_ns_set_steps(MFSDP_NS_SET_NONE), 0);
}

/* The ranges that exact arithmetic gives for singular values in [.01, 1] (coefficients.h; three digits),
 * on matrices whose normalized values lie there, whatever the form. */
TEST_P(NewtonSchulz, OutputRangesOfTheSets) {
  const struct {
    mfsdp_ns_set set;
    int32_t steps;
    double low, high;
  } rows[] = {{MFSDP_NS_SET_JORDAN5, 5, .682, 1.134},
              {MFSDP_NS_SET_YOU5, 5, .978, 1.032},
              {MFSDP_NS_SET_POLAR_EXPRESS, 5, .870, 1.124},
              {MFSDP_NS_SET_POLAR_EXPRESS, 6, .997, 1.001},
              {MFSDP_NS_SET_POLAR_EXPRESS_16, 5, .846, 1.124},
              {MFSDP_NS_SET_CANS5, 5, .855, 1.113},
              {MFSDP_NS_SET_CUBIC5, 5, .816, 1.300},
              {MFSDP_NS_SET_DEEPSEEK_V4, 10, 1.000, 1.001}};
  const Shape shape = {24, 40};
  const std::vector<float> x = matrix(shape, ref::spectrum_log_uniform(24, 0.03), 17);
  const std::vector<double> sigma = ref::singular_values(ref::widen(x), shape.rows, shape.cols);
  ASSERT_GE(sigma.back() / ref::frobenius_norm(ref::widen(x)), 0.01);
  for (const auto &row : rows) {
    mfsdp_newton_schulz_desc stated = mfsdp_newton_schulz_desc_of(row.set);
    stated.step_count = row.steps;
    const ref::Range range = ref::polynomial_range(coefficients_of(stated), 0.01, 1.0);
    EXPECT_NEAR(range.low, row.low, 5e-4) << mfsdp_ns_set_name(row.set);
    EXPECT_NEAR(range.high, row.high, 5e-4) << mfsdp_ns_set_name(row.set);
    for (mfsdp_newton_schulz_form form : kForms) {
      mfsdp_newton_schulz_desc desc = stated;
      desc.form = form;
      const std::vector<double> got = ref::singular_values(
          ref::widen(run(desc, shape.rows, shape.cols, x)), shape.rows, shape.cols);
      EXPECT_LE(got.front(), row.high + 1e-3) << mfsdp_ns_set_name(row.set) << " form " << form;
      EXPECT_GE(got.back(), row.low - 1e-3) << mfsdp_ns_set_name(row.set) << " form " << form;
    }
  }
}

/* From s = 256 on GRAM iterates without restarts; the promises hold there too. On low rank rounding
 * noise is amplified by 485 with all forms: once per form's number of large factors, and GRAM's Q is
 * one more (measured 2e-4; plain 5e-5), so 1e-3 keeps a factor of five. C loops would take seconds
 * here and show nothing new. */
TEST_P(NewtonSchulz, GramOnLargeMatrices) {
  if (std::string(GetParam().name) != "cblas") GTEST_SKIP() << "large products";
  const Shape shape = {256, 400};
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  ASSERT_EQ(mfsdp_newton_schulz_form_of(&desc, shape.rows, shape.cols), MFSDP_NS_GRAM);
  const struct {
    std::vector<double> sigma;
    double tolerance;
  } rows[] = {{ref::spectrum_log_uniform(256, 0.1), kWell},
              {ref::spectrum_log_uniform(256, 1e-7), kGraded},
              {ref::spectrum_deficient(256, 1), 1e-3}};
  for (const auto &row : rows) {
    const std::vector<float> x =
        ref::narrow(ref::matrix_with_singular_values(shape.rows, shape.cols, row.sigma, 31, 24));
    EXPECT_LE(ref::relative_error(run(desc, shape.rows, shape.cols, x), reference(x, shape)),
              row.tolerance)
        << row.tolerance;
  }
}

TEST_P(NewtonSchulz, NormFactorDividesTheInput) {
  const Shape shape = {12, 18};
  const std::vector<float> x = well_conditioned(shape, 19);
  for (double factor : {1.01, 1.05, 0.9})
    for (mfsdp_norm_rule rule : {MFSDP_NORM_SCALE_SAFE, MFSDP_NORM_MAX_EPS, MFSDP_NORM_ADD_EPS}) {
      mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
      desc.norm_factor = factor;
      desc.norm_rule = rule;
      desc.eps = 0.5; /* large enough to be felt where it is added */
      const ref::EpsRule rules[] = {ref::EpsRule::kScaleSafe, ref::EpsRule::kReferenceMax,
                                    ref::EpsRule::kReferenceAdd};
      EXPECT_LE(ref::relative_error(run(desc, shape.rows, shape.cols, x),
                                    ref::newton_schulz(ref::widen(x), shape.rows, shape.cols,
                                                       ref::coefficients_jordan(), rules[rule - 1],
                                                       0.5, factor)),
                kWell)
          << factor << " rule " << rule;
    }
}

/* ---- batches ---- */

/* Strides with gaps on both sides, more matrices than one: each has the bits it has alone, the gaps
 * stay as they were. */
TEST_P(NewtonSchulz, ABatchEqualsItsParts) {
  for (const Shape &shape :
       {Shape{1, 7}, Shape{16, 16}, Shape{64, 64}, Shape{66, 140}, Shape{140, 66}})
    for (mfsdp_newton_schulz_form form : kForms)
      for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_F16}) {
        if (dtype != MFSDP_F32 && shape.rows * shape.cols > 1000) continue;
        const int64_t batch = 3, count = shape.rows * shape.cols;
        const int64_t in_stride = count + 5, out_stride = count + 2;
        mfsdp_newton_schulz_desc desc = desc_of(form);
        desc.dtype = dtype;
        std::vector<float> all(static_cast<std::size_t>(batch * in_stride), 7.0f);
        std::vector<float> want(static_cast<std::size_t>(batch * out_stride), 9.0f);
        for (int64_t i = 0; i < batch; ++i) {
          const std::vector<float> x = well_conditioned(shape, 40 + static_cast<uint64_t>(i));
          const std::vector<float> y = run(desc, shape.rows, shape.cols, x);
          std::copy(x.begin(), x.end(), all.begin() + i * in_stride);
          std::copy(y.begin(), y.end(), want.begin() + i * out_stride);
        }
        std::size_t nbytes = 0;
        ASSERT_EQ(mfsdp_newton_schulz_batch_workspace_nbytes(&rig_.context, &desc, shape.rows,
                                                             shape.cols, batch, &nbytes),
                  MFSDP_OK);
        Buffer<float> in(&rig_, all);
        Buffer<float> out(&rig_, std::vector<float>(want.size(), 9.0f));
        Buffer<unsigned char> workspace(&rig_, nbytes);
        workspace.fill(0xff);
        const uint64_t before = rig_.context.counters.newton_schulz_count;
        ASSERT_EQ(mfsdp_newton_schulz_batch(&rig_.context, rig_.backend, rig_.queue, &desc,
                                            shape.rows, shape.cols, batch, in.data(), in_stride,
                                            out.data(), out_stride, workspace.data(), nbytes),
                  MFSDP_OK)
            << rig_.message();
        EXPECT_TRUE(same_bits(out.read(), want))
            << shape.rows << "x" << shape.cols << " form " << form;
        EXPECT_EQ(rig_.context.counters.newton_schulz_count - before, 3u);
        /* In place. */
        for (int64_t i = 0; i < batch; ++i)
          std::copy(want.begin() + i * out_stride, want.begin() + i * out_stride + count,
                    all.begin() + i * in_stride);
        ASSERT_EQ(mfsdp_newton_schulz_batch(&rig_.context, rig_.backend, rig_.queue, &desc,
                                            shape.rows, shape.cols, batch, in.data(), in_stride,
                                            in.data(), in_stride, workspace.data(), nbytes),
                  MFSDP_OK);
        EXPECT_TRUE(same_bits(in.read(), all));
      }
}

/* Zeroed address space of which only what is touched takes memory. */
struct Sparse {
  explicit Sparse(std::size_t nbytes_in)
      : nbytes(nbytes_in), data(mmap(nullptr, nbytes_in, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (data != MAP_FAILED) munmap(data, nbytes);
  }
  Sparse(const Sparse &) = delete;
  Sparse &operator=(const Sparse &) = delete;
  std::size_t nbytes;
  void *data;
};

/* The last matrix of each starts more than 2^31 elements behind the first, which no int holds; apart
 * and in place, fp32 and a form that casts one matrix at a time. */
TEST_P(NewtonSchulz, OffsetsThatPassTwoToThe31) {
  if (GetParam().cuda) GTEST_SKIP() << "the double's memory is all there";
  const int64_t stride = (INT64_C(1) << 30) + 64, batch = 3, count = 4 * 9;
  const std::size_t all = static_cast<std::size_t>((batch - 1) * stride + count) * sizeof(float);
  Sparse in(all), out(all);
  if (in.data == MAP_FAILED || out.data == MAP_FAILED) GTEST_SKIP() << "no 16 GiB of addresses";
  float *x = static_cast<float *>(in.data), *y = static_cast<float *>(out.data);
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16}) {
    mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
    std::vector<std::vector<float>> want;
    std::size_t nbytes = 0;
    desc.dtype = dtype;
    for (int64_t i = 0; i < batch; ++i) {
      const std::vector<float> one = well_conditioned({4, 9}, static_cast<uint64_t>(50 + i));
      std::copy(one.begin(), one.end(), x + i * stride);
      want.push_back(run(desc, 4, 9, one));
    }
    ASSERT_EQ(
        mfsdp_newton_schulz_batch_workspace_nbytes(&rig_.context, &desc, 4, 9, batch, &nbytes),
        MFSDP_OK);
    Buffer<unsigned char> workspace(&rig_, nbytes);
    for (float *to : {y, x}) {
      ASSERT_EQ(mfsdp_newton_schulz_batch(&rig_.context, rig_.backend, rig_.queue, &desc, 4, 9,
                                          batch, x, stride, to, stride, workspace.data(), nbytes),
                MFSDP_OK)
          << rig_.message();
      ASSERT_EQ(rig_.sync(), MFSDP_OK) << rig_.message();
      for (int64_t i = 0; i < batch; ++i)
        EXPECT_TRUE(same_bits(std::vector<float>(to + i * stride, to + i * stride + count),
                              want[static_cast<std::size_t>(i)]))
            << i;
    }
  }
}

TEST_P(NewtonSchulz, NoMatrices) {
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  EXPECT_EQ(mfsdp_newton_schulz_batch(&rig_.context, rig_.backend, rig_.queue, &desc, 4, 4, 0,
                                      nullptr, 0, nullptr, 0, nullptr, 0),
            MFSDP_OK);
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 0u);
}

/* ---- 16-bit storage ---- */

/*
 * Every stored matrix is rounded to 8 (bf16) or 11 (fp16) bits: u = 2^-9 or 2^-12 relative. At a
 * singular value near 1 a jordan step adds up to |b| + 2 |c| = 8.8 u from A, |b + c| = 2.7 u from P
 * and 1 u from X: 12.6 u. The slope between .68 and 1.13 is about 1 at most, so five steps add up like
 * independent errors: 12.6 sqrt(5) = 28 u. The norm is taken before any rounding.
 */
TEST_P(NewtonSchulz, SixteenBitStorage) {
  const struct {
    mfsdp_dtype dtype;
    double unit;
  } rows[] = {{MFSDP_BF16, 1.0 / 512}, {MFSDP_F16, 1.0 / 4096}};
  for (const Shape &shape :
       {Shape{16, 16}, Shape{12, 70}, Shape{70, 12}, Shape{1, 9}, Shape{66, 67}})
    for (const auto &row : rows)
      for (mfsdp_newton_schulz_form form : kForms) {
        mfsdp_newton_schulz_desc desc = desc_of(form);
        desc.dtype = row.dtype;
        std::vector<float> x = well_conditioned(shape, 23);
        const double error =
            ref::relative_error(run(desc, shape.rows, shape.cols, x), reference(x, shape));
        EXPECT_LE(error, 28 * row.unit)
            << shape.rows << "x" << shape.cols << " form " << form << " " << row.unit;
        /* fp16 ends at 65504: norms far beyond it must not be felt, bit for bit. */
        const std::vector<float> want = run(desc, shape.rows, shape.cols, x);
        for (int power : {-90, 90}) {
          std::vector<float> scaled = x;
          for (float &value : scaled)
            value = std::ldexp(value, power);
          EXPECT_TRUE(same_bits(run(desc, shape.rows, shape.cols, scaled), want)) << power;
        }
      }
}

/* NUMERICS: in 16 bits GRAM without a restart lets rounding noise grow without bound (5.6e8 on rank
 * one in bf16), with one restart it stays near the polynomial's own largest value. */
TEST_P(NewtonSchulz, SixteenBitGramNeedsItsRestart) {
  const Shape shape = {48, 96};
  const std::vector<double> spectra[] = {ref::spectrum_deficient(48, 1),
                                         ref::spectrum_log_uniform(48, 1e-3)};
  for (const std::vector<double> &sigma : spectra)
    for (mfsdp_dtype dtype : {MFSDP_BF16, MFSDP_F16}) {
      const std::vector<float> x = matrix(shape, sigma, 29);
      mfsdp_newton_schulz_desc desc = desc_of(MFSDP_NS_GRAM);
      desc.dtype = dtype;
      const std::vector<double> got = ref::singular_values(
          ref::widen(run(desc, shape.rows, shape.cols, x)), shape.rows, shape.cols);
      EXPECT_LE(got.front(), dtype == MFSDP_BF16 ? 2.0 : 1.3);
    }
}

TEST_P(NewtonSchulz, NonFiniteInputShowsInTheOutput) {
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = well_conditioned({10, 12}, 14);
    x[17] = bad;
    const std::vector<float> y = run(mfsdp_newton_schulz_desc_default(), 10, 12, x);
    int finite = 0;
    for (float value : y)
      finite += std::isfinite(value) ? 1 : 0;
    EXPECT_LT(finite, 120);
  }
}

TEST_P(NewtonSchulz, CountsMatrices) {
  const std::vector<float> x = well_conditioned({6, 6});
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 0u);
  (void)run(mfsdp_newton_schulz_desc_default(), 6, 6, x);
  (void)run(mfsdp_newton_schulz_desc_default(), 6, 6, x);
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 2u);
}

TEST_P(NewtonSchulz, NoElements) {
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  for (const Shape &shape : {Shape{0, 8}, Shape{8, 0}, Shape{0, 0}}) {
    EXPECT_GT(workspace_nbytes(desc, shape.rows, shape.cols), 0u);
    EXPECT_EQ(mfsdp_newton_schulz(&rig_.context, rig_.backend, rig_.queue, &desc, shape.rows,
                                  shape.cols, nullptr, nullptr, nullptr, 0),
              MFSDP_OK)
        << rig_.message();
  }
  EXPECT_EQ(rig_.sync(), MFSDP_OK);
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, NewtonSchulz, ::testing::ValuesIn(test::backend_kinds()),
                         test::rig_name);

/* ---- the rules, one negative test each ---- */

/* A number that C++ would not let an enum hold, as a C caller could. */
template <class Enum> void put(Enum *where, unsigned value) {
  static_assert(sizeof(*where) == sizeof(value), "enums are ints here");
  std::memcpy(where, &value, sizeof(value));
}

class NewtonSchulzRules : public ::testing::Test {
protected:
  NewtonSchulzRules() : rig_(test::rig_kinds()[0]) {}

  void refused(const mfsdp_newton_schulz_desc *desc, const std::string &part) {
    std::size_t nbytes = 1;
    EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, desc, 4, 4, &nbytes),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(nbytes, 0u);
    expect_message(part);
    /* The call itself refuses the same, before it touches anything. */
    float x[16] = {1.0f}, y[16] = {2.0f};
    EXPECT_EQ(mfsdp_newton_schulz(&rig_.context, rig_.backend, rig_.queue, desc, 4, 4, x, y, y, 1),
              MFSDP_E_ARGUMENT);
    expect_message(part);
    EXPECT_EQ(y[0], 2.0f);
    EXPECT_EQ(rig_.context.counters.newton_schulz_count, 0u);
  }
  void expect_message(const std::string &part) {
    EXPECT_NE(std::string(rig_.message()).find(part), std::string::npos) << rig_.message();
  }
  mfsdp_status call(int64_t rows, int64_t cols, const float *in, float *out, void *workspace,
                    std::size_t nbytes) {
    return mfsdp_newton_schulz(&rig_.context, rig_.backend, rig_.queue, &desc_, rows, cols, in, out,
                               workspace, nbytes);
  }

  Rig rig_;
  mfsdp_newton_schulz_desc desc_ = mfsdp_newton_schulz_desc_default();
};

TEST_F(NewtonSchulzRules, NullDesc) {
  refused(nullptr, "desc is NULL");
}
TEST_F(NewtonSchulzRules, OtherSize) {
  desc_.struct_nbytes = 8;
  refused(&desc_, "struct_nbytes is not");
}
TEST_F(NewtonSchulzRules, NoCoefficients) {
  desc_.coefficients = nullptr;
  refused(&desc_, "at least one row of coefficients");
}
TEST_F(NewtonSchulzRules, NoRows) {
  desc_.coefficient_count = 0;
  refused(&desc_, "at least one row of coefficients, has 0");
}
TEST_F(NewtonSchulzRules, NegativeSteps) {
  desc_.step_count = -1;
  refused(&desc_, "step_count is -1");
}
TEST_F(NewtonSchulzRules, TooManySteps) {
  desc_.step_count = MFSDP_NS_MAX_STEPS + 1;
  refused(&desc_, "step_count is 65, needs 0 to 64");
}
TEST_F(NewtonSchulzRules, FormBelow) {
  desc_.form = static_cast<mfsdp_newton_schulz_form>(0);
  refused(&desc_, "form is 0, needs 1 to 4");
}
TEST_F(NewtonSchulzRules, FormAbove) {
  put(&desc_.form, 5);
  refused(&desc_, "form is 5");
}
TEST_F(NewtonSchulzRules, DtypeWithoutProducts) {
  desc_.dtype = MFSDP_F64;
  refused(&desc_, "dtype is f64, needs f32, bf16 or f16");
}
TEST_F(NewtonSchulzRules, NormFactor) {
  /* 1e-300: its inverse is no float, and the result would be none */
  for (double bad : {0.0, -1.0, 1e-300, 1e7, std::numeric_limits<double>::quiet_NaN()}) {
    desc_.norm_factor = bad;
    refused(&desc_, "norm_factor is");
  }
}
TEST_F(NewtonSchulzRules, CoefficientsNotFinite) {
  const double table[2][3] = {{1.0, 2.0, 3.0}, {1.0, std::numeric_limits<double>::infinity(), 0.0}};
  desc_.coefficients = table;
  desc_.coefficient_count = 2;
  refused(&desc_, "coefficients[1][1] is inf");
}
TEST_F(NewtonSchulzRules, UnknownSet) {
  desc_ = mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_NONE);
  refused(&desc_, "at least one row of coefficients, has 0 (an unknown set has none)");
}
TEST_F(NewtonSchulzRules, BatchStrides) {
  std::vector<float> x(64, 1.0f), y(64, 2.0f);
  Buffer<unsigned char> workspace(&rig_, 1 << 16);
  const auto batch = [&](int64_t count, int64_t in_stride, int64_t out_stride, float *in,
                         float *out) {
    return mfsdp_newton_schulz_batch(&rig_.context, rig_.backend, rig_.queue, &desc_, 4, 4, count,
                                     in, in_stride, out, out_stride, workspace.data(),
                                     workspace.count());
  };
  EXPECT_EQ(batch(-1, 16, 16, x.data(), y.data()), MFSDP_E_ARGUMENT);
  expect_message("batch_count is -1");
  EXPECT_EQ(batch(2, 15, 16, x.data(), y.data()), MFSDP_E_ARGUMENT);
  expect_message("the strides are 15 and 16");
  EXPECT_EQ(batch(2, 16, 15, x.data(), y.data()), MFSDP_E_ARGUMENT);
  EXPECT_EQ(batch(2, INT64_MAX, 16, x.data(), y.data()), MFSDP_E_OVERFLOW);
  EXPECT_EQ(batch(3, 16, INT64_MAX / 4, x.data(), y.data()), MFSDP_E_OVERFLOW); /* as bytes */
  expect_message("3 matrices with strides of 16 and 2305843009213693951 overflow size_t");
  EXPECT_EQ(batch(2, 16, 20, x.data(), x.data()), MFSDP_E_ARGUMENT);
  expect_message("overlap");
  EXPECT_EQ(batch(2, 16, 16, x.data(), x.data() + 16), MFSDP_E_ARGUMENT);
  EXPECT_EQ(batch(2, 16, 16, x.data(), x.data() + 32), MFSDP_OK) << rig_.message();
  EXPECT_EQ(y, std::vector<float>(64, 2.0f));
}
/* This enum uses all numbers of its bits but one, so a number above them exists for C callers only;
 * in C++ already reading it is undefined, as the sanitizer says. */
TEST_F(NewtonSchulzRules, RuleBelow) {
  desc_.norm_rule = static_cast<mfsdp_norm_rule>(0);
  refused(&desc_, "norm_rule is 0, needs 1 to 3");
}
TEST_F(NewtonSchulzRules, RuleAbove) {
  if (MFSDP_TEST_SANITIZER) GTEST_SKIP() << "no such value in C++";
  put(&desc_.norm_rule, 4);
  refused(&desc_, "norm_rule is 4");
}
TEST_F(NewtonSchulzRules, EpsZero) {
  desc_.norm_rule = MFSDP_NORM_MAX_EPS;
  desc_.eps = 0.0;
  refused(&desc_, "eps is 0, needs to be positive");
}
TEST_F(NewtonSchulzRules, EpsNan) {
  desc_.norm_rule = MFSDP_NORM_ADD_EPS;
  desc_.eps = std::numeric_limits<double>::quiet_NaN();
  refused(&desc_, "needs to be positive");
  desc_.eps = std::numeric_limits<double>::infinity(); /* every matrix would be 0 */
  refused(&desc_, "eps is inf, needs to be positive and at most 1e30");
}
TEST_F(NewtonSchulzRules, NegativeShape) {
  std::size_t nbytes = 1;
  EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, -1, 4, &nbytes),
            MFSDP_E_ARGUMENT);
  expect_message("-1 x 4");
}
TEST_F(NewtonSchulzRules, ShapesThatOverflow) {
  std::size_t nbytes = 1;
  const Shape shapes[] = {{INT64_C(1) << 40, INT64_C(1) << 40},    /* rows * cols */
                          {INT64_C(1) << 31, INT64_C(1) << 31},    /* bytes of the matrix */
                          {INT64_C(1) << 30, (INT64_C(1) << 31)}}; /* the sum of the parts */
  for (const Shape &shape : shapes) {
    EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, shape.rows, shape.cols,
                                                   &nbytes),
              MFSDP_E_OVERFLOW);
    EXPECT_EQ(nbytes, 0u);
    expect_message("overflows size_t");
  }
}

/* One byte less than asked for is refused with both numbers. */
TEST_F(NewtonSchulzRules, WorkspaceTooSmall) {
  std::size_t nbytes = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 5, 7, &nbytes), MFSDP_OK);
  std::vector<float> x(35, 1.0f), y(35, 2.0f);
  Buffer<unsigned char> workspace(&rig_, nbytes);
  EXPECT_EQ(call(5, 7, x.data(), y.data(), workspace.data(), nbytes - 1), MFSDP_E_ARGUMENT);
  expect_message("has " + std::to_string(nbytes - 1) + " bytes, needs " + std::to_string(nbytes));
  EXPECT_EQ(y, std::vector<float>(35, 2.0f));
}

/* What its layout promises to the kernels must be so from its start. */
TEST_F(NewtonSchulzRules, MemoryThatIsNotAligned) {
  std::size_t nbytes = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 4, 4, &nbytes), MFSDP_OK);
  Buffer<unsigned char> workspace(&rig_, nbytes + 8), bytes(&rig_, 2 * 68);
  workspace.fill(7);
  bytes.fill(7);
  const auto in = reinterpret_cast<float *>(bytes.data());
  const auto odd = reinterpret_cast<float *>(bytes.data() + 66); /* never read */
  std::vector<float> y(16, 2.0f);
  EXPECT_EQ(call(4, 4, in, y.data(), workspace.data() + 8, nbytes), MFSDP_E_ARGUMENT);
  expect_message("the workspace is not aligned to 256 bytes");
  EXPECT_EQ(call(4, 4, odd, y.data(), workspace.data(), nbytes), MFSDP_E_ARGUMENT);
  expect_message("in is not aligned to its floats");
  EXPECT_EQ(call(4, 4, in, odd, workspace.data(), nbytes), MFSDP_E_ARGUMENT);
  expect_message("out is not aligned to its floats");
  EXPECT_EQ(y, std::vector<float>(16, 2.0f));
  EXPECT_EQ(workspace.read(), std::vector<unsigned char>(nbytes + 8, 7));
  EXPECT_EQ(bytes.read(), std::vector<unsigned char>(2 * 68, 7));
}

TEST_F(NewtonSchulzRules, WorkspaceOverlaps) {
  std::size_t nbytes = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 4, 4, &nbytes), MFSDP_OK);
  Buffer<unsigned char> memory(&rig_, nbytes + 64);
  memory.fill(7);
  std::vector<float> x(16, 1.0f);
  const auto last = reinterpret_cast<float *>(memory.data() + nbytes - 4);
  const auto behind = reinterpret_cast<float *>(memory.data() + nbytes);
  EXPECT_EQ(call(4, 4, last, x.data(), memory.data(), nbytes), MFSDP_E_ARGUMENT);
  expect_message("the workspace overlaps in or out");
  EXPECT_EQ(call(4, 4, x.data(), last, memory.data(), nbytes), MFSDP_E_ARGUMENT);
  EXPECT_EQ(call(4, 4, last, last, memory.data(), nbytes), MFSDP_E_ARGUMENT);
  EXPECT_EQ(x, std::vector<float>(16, 1.0f));
  EXPECT_EQ(memory.read(), std::vector<unsigned char>(nbytes + 64, 7));
  EXPECT_EQ(call(4, 4, x.data(), behind, memory.data(), nbytes), MFSDP_OK) << rig_.message();
  EXPECT_EQ(rig_.sync(), MFSDP_OK);
}

/* Every part of the workspace is used and none overlaps another: scratch, a second iterate and two
 * (GRAM: four) s x s products, each on a multiple of the alignment and as often as there are
 * matrices; 16-bit iterates cannot use the output, so there are two of them. */
TEST_F(NewtonSchulzRules, WorkspaceIsWhatTheIterationHolds) {
  std::size_t nbytes = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 100, 64, &nbytes),
            MFSDP_OK);
  EXPECT_EQ(nbytes, 512u * 8u + 100u * 64u * 4u + 2u * 64u * 64u * 4u);
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 64, 128, &nbytes),
            MFSDP_OK);
  EXPECT_EQ(nbytes, 512u * 8u + 128u * 64u * 4u + 4u * 64u * 64u * 4u);
  desc_.dtype = MFSDP_BF16;
  ASSERT_EQ(mfsdp_newton_schulz_batch_workspace_nbytes(&rig_.context, &desc_, 128, 64, 5, &nbytes),
            MFSDP_OK);
  EXPECT_EQ(nbytes, 5u * (512u * 8u + 2u * 128u * 64u * 2u + 4u * 64u * 64u * 2u));
}

TEST_F(NewtonSchulzRules, NullPointers) {
  std::vector<float> x(16, 1.0f);
  std::vector<float> y(16, 1.0f);
  Buffer<unsigned char> workspace(&rig_, 1 << 16);
  EXPECT_EQ(call(4, 4, nullptr, y.data(), workspace.data(), workspace.count()), MFSDP_E_ARGUMENT);
  expect_message("in is NULL");
  EXPECT_EQ(call(4, 4, x.data(), nullptr, workspace.data(), workspace.count()), MFSDP_E_ARGUMENT);
  expect_message("out is NULL");
  EXPECT_EQ(call(4, 4, x.data(), y.data(), nullptr, workspace.count()), MFSDP_E_ARGUMENT);
  expect_message("workspace is NULL");
  EXPECT_EQ(mfsdp_newton_schulz(&rig_.context, nullptr, rig_.queue, &desc_, 4, 4, x.data(),
                                y.data(), workspace.data(), workspace.count()),
            MFSDP_E_ARGUMENT);
  expect_message("backend is NULL");
  EXPECT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 4, 4, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("out is NULL");
}

TEST_F(NewtonSchulzRules, PartialOverlap) {
  std::vector<float> x(32, 1.0f);
  Buffer<unsigned char> workspace(&rig_, 1 << 16);
  for (int shift : {1, 8, 15}) {
    EXPECT_EQ(call(4, 4, x.data(), x.data() + shift, workspace.data(), workspace.count()),
              MFSDP_E_ARGUMENT);
    expect_message("overlap");
    EXPECT_EQ(call(4, 4, x.data() + shift, x.data(), workspace.data(), workspace.count()),
              MFSDP_E_ARGUMENT);
  }
  /* Neighbours are apart. */
  EXPECT_EQ(call(4, 4, x.data(), x.data() + 16, workspace.data(), workspace.count()), MFSDP_OK);
  EXPECT_EQ(call(4, 4, x.data() + 16, x.data(), workspace.data(), workspace.count()), MFSDP_OK);
  EXPECT_EQ(rig_.sync(), MFSDP_OK);
}

} // namespace
