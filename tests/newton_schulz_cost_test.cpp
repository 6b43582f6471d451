/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz/cost.h against the products that mfsdp_newton_schulz_batch really asks a backend for: a
 * backend that only counts, so that shapes may be those of large models. Integers: all comparisons are
 * exact, but where a formula without terms of s^2 is compared, which says its tolerance.
 */
#include "mfsdp/newton_schulz.h"
#include "mfsdp/plan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace {

/* The multiply-adds of the calls so far. */
struct Counter {
  int64_t multiply_adds = 0;
  int gemm_count = 0;
};

/* Entry by entry of the rows that have to be computed: from the diagonal on where d is symmetric. */
mfsdp_status count_gemm(void *self, mfsdp_queue *, const mfsdp_gemm_args *args) {
  Counter *counter = static_cast<Counter *>(self);
  const int64_t depth = args->trans_a ? args->a.rows : args->a.cols;
  for (int64_t row = 0; row < args->d.rows; ++row)
    counter->multiply_adds +=
        args->batch_count * depth * (args->d.cols - (args->symmetric ? row : 0));
  ++counter->gemm_count;
  return MFSDP_OK;
}
mfsdp_status no_normalize(void *, mfsdp_queue *, const mfsdp_normalize_args *) {
  return MFSDP_OK;
}
mfsdp_status no_cast(void *, mfsdp_queue *, void *, mfsdp_dtype, const void *, mfsdp_dtype,
                     int64_t) {
  return MFSDP_OK;
}

/* An address that is checked and never read. */
template <class T> T *nowhere(uintptr_t number) {
  return reinterpret_cast<T *>(number << 48);
}

/* What one matrix takes by the calls; they are made for a batch of three. */
int64_t counted(const mfsdp_newton_schulz_desc &desc, int64_t rows, int64_t cols) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const std::size_t enough = std::size_t{1} << 46;
  mfsdp_context context;
  mfsdp_backend_ops ops;
  mfsdp_backend backend;
  Counter counter;
  std::memset(&ops, 0, sizeof ops);
  std::memset(&backend, 0, sizeof backend);
  ops.gemm = count_gemm;
  ops.normalize = no_normalize;
  ops.cast = no_cast;
  backend.ops = &ops;
  backend.self = &counter;
  EXPECT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  EXPECT_EQ(mfsdp_newton_schulz_batch(&context, &backend, nullptr, &desc, rows, cols, 3,
                                      nowhere<const float>(1), rows * cols, nowhere<float>(2),
                                      rows * cols, nowhere<void>(3), enough),
            MFSDP_OK)
      << context.error.message;
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
  EXPECT_EQ(counter.multiply_adds % 3, 0);
  EXPECT_EQ(counter.gemm_count > 0, desc.step_count > 0 && rows > 0 && cols > 0);
  return counter.multiply_adds / 3;
}

/* -1: the function failed. */
int64_t work_of(const mfsdp_newton_schulz_desc &desc, int64_t rows, int64_t cols) {
  int64_t work = -1;
  (void)mfsdp_newton_schulz_multiply_adds(&desc, rows, cols, &work);
  return work;
}

/* The same both ways round, and by the planner's callback. */
void expect_counted(mfsdp_newton_schulz_desc desc, int64_t rows, int64_t cols) {
  const int64_t want = counted(desc, rows, cols);
  const std::string where = std::to_string(rows) + " x " + std::to_string(cols) + " form " +
                            std::to_string(desc.form) + " dtype " + std::to_string(desc.dtype) +
                            " steps " + std::to_string(desc.step_count) + " restarts " +
                            std::to_string(desc.restarts);
  EXPECT_EQ(work_of(desc, rows, cols), want) << where;
  EXPECT_EQ(work_of(desc, cols, rows), want) << where;
  EXPECT_EQ(counted(desc, cols, rows), want) << where;
  EXPECT_EQ(mfsdp_newton_schulz_cost(&desc, 7, rows, cols), want) << where;
}

const mfsdp_newton_schulz_form kForms[] = {MFSDP_NS_AUTO, MFSDP_NS_PLAIN, MFSDP_NS_SYMMETRIC,
                                           MFSDP_NS_GRAM};

/* On both sides of every line of the table that AUTO reads, and large ones. */
const int64_t kShapes[][2] = {{1, 1},     {1, 9},      {3, 12},      {7, 5},       {63, 63},
                              {63, 252},  {63, 251},   {64, 64},     {64, 128},    {64, 127},
                              {255, 510}, {255, 509},  {256, 384},   {256, 383},   {257, 386},
                              {768, 768}, {768, 3072}, {1024, 4096}, {4096, 14336}};

TEST(NewtonSchulzCost, IsWhatTheBackendIsAskedFor) {
  for (int set = MFSDP_NS_SET_NONE + 1; set < MFSDP_NS_SET_END; ++set)
    for (mfsdp_newton_schulz_form form : kForms)
      for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
        for (const auto &shape : kShapes) {
          mfsdp_newton_schulz_desc desc =
              mfsdp_newton_schulz_desc_of(static_cast<mfsdp_ns_set>(set));
          desc.form = form;
          desc.dtype = dtype;
          expect_counted(desc, shape[0], shape[1]);
        }
}

TEST(NewtonSchulzCost, EveryStepCountAndStatedRestarts) {
  const uint64_t restarts[] = {MFSDP_NS_RESTARTS_NONE, MFSDP_NS_RESTARTS_AUTO, 1, 2, 1 | 4 | 16,
                               UINT64_MAX >> 1};
  for (int32_t steps = 0; steps <= MFSDP_NS_MAX_STEPS; steps += steps < 9 ? 1 : 11)
    for (mfsdp_newton_schulz_form form : kForms)
      for (uint64_t after : restarts) {
        mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
        desc.form = form;
        desc.step_count = steps;
        desc.restarts = after;
        expect_counted(desc, 96, 300);
      }
}

/* Steps without c have no product A A, also where they stand between others. */
TEST(NewtonSchulzCost, CubicStepsAmongOthers) {
  static const double table[4][3] = {
      {1.5, -0.5, 0.0}, {3.0, -4.0, 2.0}, {1.5, -0.5, 0.0}, {1.5, -0.5, 0.0}};
  for (mfsdp_newton_schulz_form form : kForms)
    for (uint64_t restarts = 0; restarts < 16; ++restarts) {
      mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
      desc.coefficients = table;
      desc.coefficient_count = 4;
      desc.step_count = 5;
      desc.form = form;
      desc.restarts = restarts;
      expect_counted(desc, 70, 200);
    }
}

/* By hand, for s = 4 and l = 8: a triangle has 10 entries. */
TEST(NewtonSchulzCost, ByHand) {
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  desc.step_count = 2;
  desc.form = MFSDP_NS_PLAIN;
  EXPECT_EQ(work_of(desc, 4, 8), 2 * (16 * 8 + 16 * 4 + 32 * 4));
  desc.form = MFSDP_NS_SYMMETRIC;
  EXPECT_EQ(work_of(desc, 8, 4), 2 * (10 * 8 + 10 * 4 + 32 * 4));
  desc.form = MFSDP_NS_GRAM; /* R, Z, T, R; Z, Q, and X */
  desc.restarts = MFSDP_NS_RESTARTS_NONE;
  EXPECT_EQ(work_of(desc, 4, 8), 10 * 8 + 3 * 10 * 4 + 10 * 4 + 16 * 4 + 32 * 4);
  desc.restarts = 1; /* R, Z and X, twice */
  EXPECT_EQ(work_of(desc, 4, 8), 2 * (10 * 8 + 10 * 4 + 32 * 4));
}

/* The formulas of the header. The triangle's diagonal adds s / 2 entries to its s^2 / 2, so a fraction
 * of 1 / s to at most all of the work. */
TEST(NewtonSchulzCost, FormulasOfTheHeader) {
  const int64_t s = 4096;
  for (int r : {1, 2, 4}) {
    const double cube = static_cast<double>(s * s * s), tolerance = 1.0 / static_cast<double>(s);
    mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
    const auto in_cubes = [&] { return static_cast<double>(work_of(desc, s, r * s)) / cube; };
    int64_t units = 0;
    ASSERT_EQ(mfsdp_cost_newton_schulz_units(s, r * s, &units), 1);
    desc.form = MFSDP_NS_PLAIN;
    EXPECT_EQ(work_of(desc, s, r * s), 5 * units);
    EXPECT_EQ(in_cubes(), 10.0 * r + 5);
    desc.form = MFSDP_NS_SYMMETRIC;
    EXPECT_NEAR(in_cubes(), 7.5 * r + 2.5, tolerance * in_cubes());
    desc.form = MFSDP_NS_GRAM;
    desc.restarts = MFSDP_NS_RESTARTS_NONE;
    EXPECT_NEAR(in_cubes(), 1.5 * r + 10.5, tolerance * in_cubes());
    desc.restarts = 2;
    EXPECT_NEAR(in_cubes(), 3.0 * r + 8.5, tolerance * in_cubes());
  }
}

/* A callback may not say less than it takes: what does not fit is an error, on either side of the line. */
TEST(NewtonSchulzCost, WhatDoesNotFitIsRefusedAndLeavesTheResult) {
  const int64_t big = INT64_C(1) << 20;
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  int64_t out = 42;
  desc.form = MFSDP_NS_PLAIN; /* 3 * 2^60 a step */
  desc.step_count = 2;
  EXPECT_EQ(work_of(desc, big, big), 6 * (INT64_C(1) << 60));
  desc.step_count = 3;
  EXPECT_EQ(mfsdp_newton_schulz_multiply_adds(&desc, big, big, &out), 0);
  EXPECT_EQ(mfsdp_newton_schulz_cost(&desc, 0, big, big), -1);
  for (int64_t huge : {INT64_C(1) << 31, INT64_C(3037000499), INT64_C(1) << 40, INT64_MAX})
    EXPECT_EQ(mfsdp_newton_schulz_multiply_adds(&desc, huge, huge, &out), 0) << huge;
  EXPECT_EQ(mfsdp_newton_schulz_multiply_adds(&desc, -1, 4, &out), 0);
  EXPECT_EQ(mfsdp_newton_schulz_multiply_adds(&desc, 4, -1, &out), 0);
  EXPECT_EQ(out, 42);
  EXPECT_EQ(work_of(desc, 0, INT64_MAX), 0);
}

TEST(NewtonSchulzCost, BadDescriptionsAreRefused) {
  mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  EXPECT_EQ(mfsdp_newton_schulz_cost(nullptr, 0, 4, 4), -1);
  desc.step_count = MFSDP_NS_MAX_STEPS + 1;
  EXPECT_EQ(mfsdp_newton_schulz_cost(&desc, 0, 4, 4), -1);
  desc = mfsdp_newton_schulz_desc_default();
  desc.coefficients = nullptr;
  EXPECT_EQ(mfsdp_newton_schulz_cost(&desc, 0, 4, 4), -1);
}

/* As mfsdp_plan_desc.cost: the plan's costs are the work, and a matrix that does not fit is an error. By
 * the paper's count a 1:4 matrix weighs three squares of its short side, so it would stand alone against
 * three of them; it takes as long as 1.65. */
TEST(NewtonSchulzCost, PlansByIt) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  std::vector<mfsdp_param> params;
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  mfsdp_context context;
  mfsdp_plan *plan = nullptr;
  const int64_t square = work_of(ns, 256, 256), wide = work_of(ns, 256, 1024);
  params.push_back(mfsdp_param_2d("wide", 0, MFSDP_ROLE_MATRIX, 256, 1024));
  for (const char *name : {"a", "b", "c"})
    params.push_back(mfsdp_param_2d(name, 0, MFSDP_ROLE_MATRIX, 256, 256));
  desc.params = params.data();
  desc.param_count = static_cast<int32_t>(params.size());
  desc.world = 2;
  desc.cost = mfsdp_newton_schulz_cost;
  desc.user = &ns;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  ASSERT_EQ(mfsdp_plan_create(&context, &desc, &plan), MFSDP_OK) << context.error.message;
  ASSERT_EQ(mfsdp_plan_report(&context, plan, &summary, nullptr, 0), MFSDP_OK);
  EXPECT_EQ(summary.cost.sum, 3 * square + wide);
  EXPECT_EQ(summary.cost.max, wide + square); /* not 3 * square, which is more */
  EXPECT_LT(wide + square, 3 * square);
  mfsdp_plan_destroy(&context, plan);
  ns.step_count = -1;
  EXPECT_EQ(mfsdp_plan_create(&context, &desc, &plan), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

} // namespace
