/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz.h against the float64 reference on the same rounded input, against golden vectors
 * and against itself; on C loops, on a worker's queue and on CBLAS.
 *
 * Tolerances. kWell and kGraded are the project's promises: relative Frobenius error of an fp32
 * iteration on well-conditioned input and on anything else. Five steps add some 15 products, each
 * with about sqrt(s) roundings of 2^-24; on small singular values these are amplified by at most
 * the polynomial's slope at 0 (3.4445^5 = 485), which well-conditioned input does not meet.
 */
#include "mfsdp/newton_schulz.h"

#include "tests/ref/golden.h"
#include "tests/ref/newton_schulz_ref.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

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
    std::memset(workspace.data(), 0xff, workspace.count());
    std::memset(out.data(), 0xff, out.count() * sizeof(float));
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

const Shape kShapes[] = {{1, 1},   {1, 37},  {37, 1},  {4, 33},  {33, 4},  {16, 16},
                         {63, 80}, {64, 64}, {72, 72}, {65, 90}, {90, 65}, {24, 160}};

const mfsdp_newton_schulz_form kForms[] = {MFSDP_NS_PLAIN, MFSDP_NS_SYMMETRIC, MFSDP_NS_AUTO};

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

/* The form is a function of the shape alone, and AUTO is nothing but that choice. */
TEST_P(NewtonSchulz, AutoIsOneOfTheForms) {
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  EXPECT_EQ(desc.form, MFSDP_NS_AUTO);
  EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, 63, 5000), MFSDP_NS_PLAIN);
  EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, 5000, 63), MFSDP_NS_PLAIN);
  EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, 64, 64), MFSDP_NS_SYMMETRIC);
  EXPECT_EQ(mfsdp_newton_schulz_form_of(&desc, 5000, 64), MFSDP_NS_SYMMETRIC);
  for (const Shape &shape : kShapes) {
    const std::vector<float> x = well_conditioned(shape, 13);
    const mfsdp_newton_schulz_form form =
        mfsdp_newton_schulz_form_of(&desc, shape.rows, shape.cols);
    EXPECT_TRUE(same_bits(run(desc, shape.rows, shape.cols, x),
                          run(desc_of(form), shape.rows, shape.cols, x)));
    for (mfsdp_newton_schulz_form stated : {MFSDP_NS_PLAIN, MFSDP_NS_SYMMETRIC}) {
      const mfsdp_newton_schulz_desc d = desc_of(stated);
      EXPECT_EQ(mfsdp_newton_schulz_form_of(&d, shape.rows, shape.cols), stated);
    }
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

INSTANTIATE_TEST_SUITE_P(Kinds, NewtonSchulz, ::testing::ValuesIn(test::rig_kinds()),
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
  refused(&desc_, "form is 0, needs 1 to 3");
}
/* These two enums use all numbers of their bits but one, so a number above them exists for C
 * callers only; in C++ already reading it is undefined, as the sanitizer says. */
TEST_F(NewtonSchulzRules, FormAbove) {
  if (MFSDP_TEST_SANITIZER) GTEST_SKIP() << "no such value in C++";
  put(&desc_.form, 4);
  refused(&desc_, "form is 4");
}
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

/* Every part of the workspace is used and none overlaps another: scratch, a second iterate and two
 * s x s products, each on a multiple of the alignment. */
TEST_F(NewtonSchulzRules, WorkspaceIsWhatTheIterationHolds) {
  std::size_t nbytes = 0;
  ASSERT_EQ(mfsdp_newton_schulz_workspace_nbytes(&rig_.context, &desc_, 100, 64, &nbytes),
            MFSDP_OK);
  EXPECT_EQ(nbytes, 512u * 8u + 100u * 64u * 4u + 2u * 64u * 64u * 4u);
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
