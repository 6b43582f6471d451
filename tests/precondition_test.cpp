/* SPDX-License-Identifier: MIT */
/*
 * precondition.h, shampoo.h, soap.h, and below them eigh and qr of the host backend (host_decompose.h,
 * math_lapacke.h) and of the CUDA backend (cuda_decompose.h): decompositions by what they must satisfy,
 * steps against float64, and what must not change. Without a LAPACKE in the build the host backend's
 * part is skipped but the refusals.
 *
 * Counts allocations: MFSDP_TEST_WRAP_MALLOC. One queue at a time, whose races host_queue_test looks
 * for: not run under the thread sanitizer (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/optimizer.h"

#include "mfsdp/runtime.h"
#include "tests/ref/precondition_ref.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"
#include "tests/support/malloc_count.h"

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

const double kUnit = 5.9604644775390625e-8; /* 2^-24 */

std::vector<float> floats(int64_t rows, int64_t cols, uint64_t seed, double scale = 1.0) {
  return ref::narrow(ref::random_matrix(rows, cols, seed, scale));
}

class Decompose : public ::testing::TestWithParam<test::RigKind> {
protected:
  void SetUp() override {
    if (!GetParam().cuda && test::rig_lapack() == nullptr)
      GTEST_SKIP() << "no LAPACKE in this build";
  }
};

mfsdp_mat mat(float *data, int64_t n, int64_t stride) {
  mfsdp_mat m = {data, n, n, stride, 0};
  return m;
}

/* ---- eigenvectors ---- */

struct Eigh {
  Eigh(Rig *on, const std::vector<float> &a, int64_t n, int64_t stride = 0)
      : rig(on), n_(n), stride_(stride > 0 ? stride : n), a_(on, spread(a)),
        vectors(on, std::vector<float>(static_cast<std::size_t>(n * stride_), 0.0f)),
        values(on, std::vector<float>(static_cast<std::size_t>(n), 0.0f)) {
    std::size_t nbytes = 1;
    EXPECT_EQ(rig->ops->eigh_workspace_nbytes(rig->self, &rig->context, n, &nbytes), MFSDP_OK);
    workspace.reset(new Buffer<unsigned char>(rig, nbytes));
    std::memset(&args, 0, sizeof(args));
    args.struct_nbytes = sizeof(args);
    args.a = mat(a_.data(), n, stride_);
    args.vectors = mat(vectors.data(), n, stride_);
    args.values = values.data();
    args.workspace = workspace->data();
    args.workspace_nbytes = nbytes;
  }
  std::vector<float> spread(const std::vector<float> &a) const {
    std::vector<float> out(static_cast<std::size_t>(n_ * stride_), -77.0f);
    for (int64_t i = 0; i < n_; ++i)
      std::copy(a.begin() + i * n_, a.begin() + (i + 1) * n_, out.begin() + i * stride_);
    return out;
  }
  mfsdp_status run() {
    MFSDP_TRY(rig->ops->eigh(rig->self, rig->queue, &args));
    return rig->sync();
  }
  ref::Matrix rows() {
    const std::vector<float> all = vectors.read();
    ref::Matrix out;
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = 0; j < n_; ++j)
        out.push_back(static_cast<double>(all[ref::index(i, j, stride_)]));
    return out;
  }

  Rig *rig;
  int64_t n_, stride_;
  Buffer<float> a_, vectors, values;
  std::unique_ptr<Buffer<unsigned char>> workspace;
  mfsdp_eigh_args args;
};

/* Symmetric with this spectrum. */
std::vector<float> symmetric(const std::vector<double> &values, uint64_t seed) {
  const int64_t n = static_cast<int64_t>(values.size());
  const ref::Matrix q = ref::orthonormal_rows(ref::random_matrix(n, n, seed), n);
  ref::Matrix scaled = q;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      scaled[ref::index(i, j, n)] *= values[static_cast<std::size_t>(i)];
  std::vector<float> out = ref::narrow(ref::matmul(ref::transpose(q, n, n), scaled, n, n, n));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < i; ++j)
      out[ref::index(i, j, n)] = out[ref::index(j, i, n)];
  return out;
}

std::vector<double> times(std::vector<double> values, double factor) {
  for (double &x : values)
    x *= factor;
  return values;
}

TEST_P(Decompose, EigenvectorsOfManySpectra) {
  Rig rig(GetParam());
  for (const int64_t n : {1, 2, 3, 8, 17, 40, 96}) {
    std::vector<double> mixed = ref::spectrum_log_uniform(n, 1e-2);
    for (std::size_t i = 1; i < mixed.size(); i += 2)
      mixed[i] = -mixed[i];
    const std::vector<std::vector<double>> spectra = {
        ref::spectrum_flat(n),
        ref::spectrum_log_uniform(n, 1e-7),
        ref::spectrum_deficient(n, (n + 1) / 2),
        ref::spectrum_flat(n, 0.0),
        mixed,
        times(ref::spectrum_log_uniform(n, 1e-3), 1e-30),
        times(ref::spectrum_log_uniform(n, 1e-3), 1e30)};
    for (std::size_t k = 0; k < spectra.size(); ++k) {
      SCOPED_TRACE("n " + std::to_string(n) + " spectrum " + std::to_string(k));
      const std::vector<float> a = symmetric(spectra[k], 7 + k);
      Eigh e(&rig, a, n, n + static_cast<int64_t>(k % 3));
      ASSERT_EQ(e.run(), MFSDP_OK) << rig.message();
      const ref::Matrix v = e.rows(), wide = ref::widen(a);
      const std::vector<double> values = ref::widen(e.values.read());
      const double norm = ref::frobenius_norm(wide);
      /* Backward stable: errors are a modest polynomial of n times the unit roundoff, relative to the
       * whole matrix; LAPACK's own tests allow 30 n of them. */
      const double bound = 6.0 * std::sqrt(static_cast<double>(n)) * kUnit;
      EXPECT_LE(ref::orthogonality_error(v, n, n), bound);
      ref::Matrix scaled = v;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j)
          scaled[ref::index(i, j, n)] *= values[static_cast<std::size_t>(i)];
      const ref::Matrix back = ref::matmul(ref::transpose(v, n, n), scaled, n, n, n);
      ref::Matrix difference = back;
      for (std::size_t i = 0; i < difference.size(); ++i)
        difference[i] -= wide[i];
      EXPECT_LE(ref::frobenius_norm(difference), bound * norm);
      EXPECT_TRUE(std::is_sorted(values.begin(), values.end()));
      const std::vector<double> want = ref::eigen(wide, n).values;
      EXPECT_LE(ref::max_difference(values, want), bound * norm);
      /* Nothing beside the rows. */
      const std::vector<float> all = e.vectors.read();
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = n; j < e.stride_; ++j)
          ASSERT_EQ(all[ref::index(i, j, e.stride_)], 0.0f);
    }
  }
}

TEST_P(Decompose, EigenvectorsAreTheSameBitsWhereverTheyAre) {
  Rig rig(GetParam());
  const int64_t n = 33;
  const std::vector<float> a = symmetric(ref::spectrum_log_uniform(n, 1e-4), 3);
  Eigh first(&rig, a, n);
  ASSERT_EQ(first.run(), MFSDP_OK);
  for (const std::size_t offset : {1u, 3u, 8u}) {
    Eigh again(&rig, a, n);
    Buffer<float> moved(&rig, a, offset), out(&rig, a.size(), offset + 1);
    again.args.a.data = moved.data();
    again.args.vectors.data = out.data();
    ASSERT_EQ(again.run(), MFSDP_OK) << rig.message();
    EXPECT_TRUE(same_bits(out.read(), first.vectors.read())) << offset;
    EXPECT_TRUE(same_bits(again.values.read(), first.values.read()));
  }
}

TEST_P(Decompose, WhatIsNotFiniteGivesNaNAndTheQueueGoesOn) {
  Rig rig(GetParam());
  const int64_t n = 9;
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    std::vector<float> a = symmetric(ref::spectrum_flat(n), 4);
    a[ref::index(5, 5, n)] = bad;
    Eigh e(&rig, a, n);
    ASSERT_EQ(e.run(), MFSDP_OK) << rig.message();
    for (const float x : e.vectors.read())
      EXPECT_TRUE(std::isnan(x));
    for (const float x : e.values.read())
      EXPECT_TRUE(std::isnan(x));
  }
}

TEST_P(Decompose, OnlyWhereItIsWanted) {
  Rig rig(GetParam());
  const int64_t n = 6;
  Eigh e(&rig, symmetric(ref::spectrum_log_uniform(n, 0.1), 4), n);
  Buffer<float> word(&rig, std::vector<float>(1, 0.0f));
  e.args.when.word = word.data();
  ASSERT_EQ(e.run(), MFSDP_OK);
  EXPECT_EQ(e.values.read(), std::vector<float>(static_cast<std::size_t>(n), 0.0f)) << "left out";
  e.args.when.when_zero = 1;
  ASSERT_EQ(e.run(), MFSDP_OK);
  EXPECT_GT(e.values.read().back(), 0.9f);
  word.write({3.0f});
  e.values.write(std::vector<float>(static_cast<std::size_t>(n), 0.0f));
  ASSERT_EQ(e.run(), MFSDP_OK);
  EXPECT_EQ(e.values.read().back(), 0.0f);
  e.args.when.when_zero = 0;
  ASSERT_EQ(e.run(), MFSDP_OK);
  EXPECT_GT(e.values.read().back(), 0.9f);
}

TEST_P(Decompose, ArgumentsThatMakeNoSense) {
  Rig rig(GetParam());
  const int64_t n = 5;
  Eigh e(&rig, symmetric(ref::spectrum_flat(n), 4), n);
  const mfsdp_eigh_args good = e.args;
  const auto refused = [&](const std::string &part) {
    EXPECT_EQ(rig.ops->eigh(rig.self, rig.queue, &e.args), MFSDP_E_ARGUMENT);
    EXPECT_NE(std::string(rig.message()).find(part), std::string::npos) << rig.message();
    e.args = good;
  };
  e.args.struct_nbytes = 1, refused("struct_nbytes is ");
  e.args.a.cols = 4, refused("a is 5 x 4, needs 5 x 5");
  e.args.vectors.rows = 4, refused("the result is 4 x 5, needs 5 x 5");
  e.args.a.data = nullptr, refused("a is NULL");
  e.args.vectors.row_stride = 4, refused("row_stride 4 is less than 5");
  e.args.values = nullptr, refused("values is NULL");
  e.args.vectors.data = e.args.a.data, refused("vectors is a");
  e.args.workspace_nbytes -= 1, refused("needs " + std::to_string(good.workspace_nbytes));
  e.args.workspace = nullptr, refused("workspace has 0 bytes");
  std::size_t nbytes = 3;
  EXPECT_EQ(rig.ops->eigh_workspace_nbytes(rig.self, &rig.context, -1, &nbytes), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.ops->qr_workspace_nbytes(rig.self, &rig.context, 1 << 20, &nbytes),
            MFSDP_E_OVERFLOW);
  EXPECT_EQ(nbytes, 0u);
  EXPECT_EQ(rig.ops->eigh_workspace_nbytes(rig.self, &rig.context, 0, &nbytes), MFSDP_OK);
  e.args.a = e.args.vectors = mat(nullptr, 0, 0);
  EXPECT_EQ(rig.ops->eigh(rig.self, rig.queue, &e.args), MFSDP_OK) << "nothing to do";
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

/* ---- orthonormal rows ---- */

struct Qr {
  Qr(Rig *on, const std::vector<float> &a, int64_t n) : rig(on), a_(on, a), q(on, a.size()) {
    std::size_t nbytes = 1;
    EXPECT_EQ(rig->ops->qr_workspace_nbytes(rig->self, &rig->context, n, &nbytes), MFSDP_OK);
    workspace.reset(new Buffer<unsigned char>(rig, nbytes));
    std::memset(&args, 0, sizeof(args));
    args.struct_nbytes = sizeof(args);
    args.a = mat(a_.data(), n, n);
    args.q = mat(q.data(), n, n);
    args.workspace = workspace->data();
    args.workspace_nbytes = nbytes;
  }
  mfsdp_status run() {
    MFSDP_TRY(rig->ops->qr(rig->self, rig->queue, &args));
    return rig->sync();
  }
  Rig *rig;
  Buffer<float> a_, q;
  std::unique_ptr<Buffer<unsigned char>> workspace;
  mfsdp_qr_args args;
};

TEST_P(Decompose, OrthonormalRows) {
  Rig rig(GetParam());
  for (const int64_t n : {1, 2, 7, 40, 96}) {
    const std::vector<double> spectra[] = {
        ref::spectrum_log_uniform(n, 1e-1), ref::spectrum_log_uniform(n, 1e-7),
        ref::spectrum_deficient(n, (n + 1) / 2), ref::spectrum_flat(n, 0.0)};
    for (const std::vector<double> &spectrum : spectra) {
      SCOPED_TRACE(n);
      const std::vector<float> a = ref::narrow(ref::matrix_with_singular_values(n, n, spectrum, 5));
      Qr qr(&rig, a, n), in_place(&rig, a, n);
      ASSERT_EQ(qr.run(), MFSDP_OK) << rig.message();
      in_place.args.q = in_place.args.a;
      ASSERT_EQ(in_place.run(), MFSDP_OK) << rig.message();
      EXPECT_TRUE(same_bits(in_place.a_.read(), qr.q.read()));
      const ref::Matrix q = ref::widen(qr.q.read()), wide = ref::widen(a);
      /* Householder: orthogonal to working precision whatever the rank. Seen: 1.6 sqrt(n) units. */
      const double bound = 6.0 * std::sqrt(static_cast<double>(n)) * kUnit;
      EXPECT_LE(ref::orthogonality_error(q, n, n), bound);
      /* a = L q: no part of row i lies along a later row of q. */
      const ref::Matrix l = ref::matmul(wide, ref::transpose(q, n, n), n, n, n);
      double above = 0.0;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = i + 1; j < n; ++j)
          above = std::hypot(above, l[ref::index(i, j, n)]);
      EXPECT_LE(above, bound * ref::frobenius_norm(wide));
    }
  }
}

TEST_P(Decompose, OrthonormalRowsOfWhatIsNotFinite) {
  Rig rig(GetParam());
  std::vector<float> a = floats(6, 6, 3);
  a[7] = HUGE_VALF;
  Qr qr(&rig, a, 6);
  ASSERT_EQ(qr.run(), MFSDP_OK) << rig.message();
  for (const float x : qr.q.read())
    EXPECT_TRUE(std::isnan(x));
  qr.args.workspace_nbytes = 4;
  EXPECT_EQ(rig.ops->qr(rig.self, rig.queue, &qr.args), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig.message()).find("qr: workspace has 4 bytes"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Decompose, ::testing::ValuesIn(test::backend_kinds()),
                         test::rig_name);

/* ---- one matrix and all it needs ---- */

/* Either optimizer, by its description. */
struct Algorithm {
  Algorithm(const mfsdp_shampoo_desc &d) : soap(false), shampoo_desc(d) {}
  Algorithm(const mfsdp_soap_desc &d) : soap(true), soap_desc(d) {}
  bool soap;
  mfsdp_shampoo_desc shampoo_desc = mfsdp_shampoo_desc_default();
  mfsdp_soap_desc soap_desc = mfsdp_soap_desc_default();

  int state(int64_t rows, int64_t cols, int32_t i, mfsdp_precondition_array *out) const {
    return soap ? mfsdp_soap_state(&soap_desc, rows, cols, i, out)
                : mfsdp_shampoo_state(&shampoo_desc, rows, cols, i, out);
  }
  mfsdp_status nbytes(Rig *rig, int64_t rows, int64_t cols, std::size_t *out) const {
    return soap ? mfsdp_soap_workspace_nbytes(&rig->context, rig->backend, &soap_desc, rows, cols,
                                              out)
                : mfsdp_shampoo_workspace_nbytes(&rig->context, rig->backend, &shampoo_desc, rows,
                                                 cols, out);
  }
  mfsdp_status step(Rig *rig, const mfsdp_precondition_job *job) const {
    return soap ? mfsdp_soap_step(&rig->context, rig->backend, rig->queue, &soap_desc, job)
                : mfsdp_shampoo_step(&rig->context, rig->backend, rig->queue, &shampoo_desc, job);
  }
  mfsdp_hyper_group group() const {
    mfsdp_hyper_group g = soap ? mfsdp_hyper_group_soap() : mfsdp_hyper_group_shampoo();
    g.shampoo = shampoo_desc;
    g.soap = soap_desc;
    return g;
  }
};

class One {
public:
  One(Rig *on, const Algorithm &how, int64_t rows, int64_t cols, uint64_t seed = 1)
      : rig(on), algorithm(how), master(on, floats(rows, cols, seed)),
        grad(on, static_cast<std::size_t>(rows * cols)), scalars(on, 1) {
    mfsdp_precondition_array array;
    std::size_t nbytes = 0;
    job = mfsdp_precondition_job_default();
    job.rows = rows;
    job.cols = cols;
    job.item = mfsdp_precondition_item(rows, cols, master.data(), grad.data());
    for (int32_t i = 0; algorithm.state(rows, cols, i, &array); ++i) {
      states.emplace_back(rig,
                          std::vector<float>(static_cast<std::size_t>(array.rows * array.cols)));
      names.push_back(array.name);
      job.item.state[i] = states.back().data();
    }
    EXPECT_EQ(algorithm.nbytes(rig, rows, cols, &nbytes), MFSDP_OK) << rig->message();
    /* Scratch may hold anything. */
    workspace.reset(new Buffer<unsigned char>(rig, std::vector<unsigned char>(nbytes, 0xff)));
    job.workspace = workspace->data();
    job.workspace_nbytes = nbytes;
    job.scalars = scalars.data();
    now = mfsdp_step_scalars_default(0.02, 0.1);
    now.applied_steps = 0;
  }
  /* An attempted step. */
  void step(const std::vector<float> &g, bool skip = false) {
    grad.write(g);
    now.skip = skip;
    if (!skip) ++now.applied_steps;
    scalars.write({now});
    ASSERT_EQ(algorithm.step(rig, &job), MFSDP_OK) << rig->message();
    ASSERT_EQ(rig->sync(), MFSDP_OK) << rig->message();
    ++job.attempted_step;
  }
  /* Parameters and state. */
  std::vector<float> all() {
    std::vector<float> out = master.read();
    for (Buffer<float> &s : states) {
      const std::vector<float> x = s.read();
      out.insert(out.end(), x.begin(), x.end());
    }
    return out;
  }
  std::vector<double> state(std::size_t i) { return ref::widen(states.at(i).read()); }

  Rig *rig;
  Algorithm algorithm;
  Buffer<float> master, grad;
  Buffer<mfsdp_step_scalars> scalars;
  std::deque<Buffer<float>> states;
  std::vector<std::string> names;
  std::unique_ptr<Buffer<unsigned char>> workspace;
  mfsdp_precondition_job job;
  mfsdp_step_scalars now;
};

bool all_finite(const std::vector<float> &x) {
  for (const float v : x)
    if (!std::isfinite(v)) return false;
  return true;
}

class Precondition : public ::testing::TestWithParam<test::RigKind> {
protected:
  /* Kernels on the host double under a sanitizer: where cases differ in numbers only, some are enough. */
  static bool slow() { return MFSDP_TEST_SANITIZER && GetParam().cuda; }
  Precondition() : rig_(GetParam()) {}
  void SetUp() override {
    if (!GetParam().cuda && test::rig_lapack() == nullptr)
      GTEST_SKIP() << "no LAPACKE in this build";
  }
  static std::vector<Algorithm> both(int32_t every) {
    mfsdp_shampoo_desc shampoo = mfsdp_shampoo_desc_default();
    mfsdp_soap_desc soap = mfsdp_soap_desc_default();
    shampoo.update_every = soap.update_every = every;
    return {Algorithm(shampoo), Algorithm(soap)};
  }
  Rig rig_;
};

/* ---- against float64 ---- */

struct Shape {
  int64_t rows, cols;
};

ref::Graft graft_of(mfsdp_graft graft) {
  return graft == MFSDP_GRAFT_ADAMW ? ref::Graft::kAdamw
         : graft == MFSDP_GRAFT_SGD ? ref::Graft::kSgd
                                    : ref::Graft::kNone;
}

TEST_P(Precondition, ShampooAgainstFloat64) {
  struct Case {
    mfsdp_graft graft;
    double beta1, beta2, eps;
    int32_t every;
    int64_t limit;
    double tolerance;
  };
  /* The root of an eigenvalue x is off by its relative error / 4; x carries one of 2^-24 of the largest
   * eigenvalue, which eps bounds from below: with gradients of about 1, eps 1e-3 leaves 1e-5, and 1e-12
   * three digits. Seen: nothing beside the rounding of the weights, and 4e-4. */
  const Case cases[] = {{MFSDP_GRAFT_ADAMW, 0.9, 0.99, 1e-3, 2, 10000, 1e-5},
                        {MFSDP_GRAFT_SGD, 0.5, 0.9, 1e-3, 3, 10000, 1e-5},
                        {MFSDP_GRAFT_NONE, 0.0, 1.0, 1e-3, 1, 10000, 1e-5},
                        {MFSDP_GRAFT_NONE, 0.9, 0.9, 1e-3, 1, 10, 1e-5},
                        {MFSDP_GRAFT_ADAMW, 0.9, 0.999, 1e-12, 1, 10000, 2e-3}};
  for (const Shape shape : {Shape{1, 1}, Shape{1, 7}, Shape{7, 1}, Shape{8, 8}, Shape{12, 5},
                            Shape{5, 12}, Shape{33, 20}})
    for (const Case &c : cases) {
      if (slow() && shape.rows * shape.cols > 100) continue;
      SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.cols) + " graft " +
                   std::to_string(c.graft) + " every " + std::to_string(c.every));
      mfsdp_shampoo_desc desc = mfsdp_shampoo_desc_default();
      desc.graft = c.graft;
      desc.beta1 = c.beta1;
      desc.beta2 = c.beta2;
      desc.eps = c.eps;
      desc.update_every = c.every;
      desc.size_limit = c.limit;
      ref::ShampooOptions o;
      o.lr = 0.02, o.weight_decay = 0.1, o.beta1 = c.beta1, o.beta2 = c.beta2, o.eps = c.eps;
      o.every = c.every, o.graft = graft_of(c.graft);
      One one(&rig_, desc, shape.rows, shape.cols);
      one.now.grad_scale = 0.5;
      one.now.clip_scale = 0.25;
      one.job.clipped = 1;
      ref::ShampooState s(shape.rows, shape.cols, c.limit);
      const std::vector<double> start = ref::widen(one.master.read());
      std::vector<double> w = start;
      for (int64_t t = 1; t <= 7; ++t) {
        const std::vector<float> g = floats(shape.rows, shape.cols, 100 + static_cast<uint64_t>(t));
        one.step(g);
        ref::shampoo_step(o, t, t, times(ref::widen(g), 0.125), shape.rows, shape.cols, &s, &w);
        std::vector<double> got = ref::widen(one.master.read()), want = w;
        for (std::size_t i = 0; i < got.size(); ++i)
          got[i] -= start[i], want[i] -= start[i];
        /* A step rounds each weight, of size about 1, twice: that much comes on top of any error. */
        const double rounding = 2.0 * static_cast<double>(t) * kUnit * ref::frobenius_norm(start) /
                                ref::frobenius_norm(want);
        ASSERT_LE(ref::relative_error(got, want), c.tolerance + rounding) << "step " << t;
      }
      EXPECT_LE(ref::relative_error(one.state(MFSDP_STATE_GRAM_LEFT), s.left), 2e-6);
      EXPECT_LE(ref::relative_error(one.state(MFSDP_STATE_EXP_AVG), s.exp_avg), 1e-6);
    }
}

/* Each step from the library's own state, and with the bases it chose: those are judged by what they must
 * satisfy, and everything else by the formulas. */
TEST_P(Precondition, SoapStepByStepAgainstFloat64) {
  struct Case {
    Shape shape;
    int32_t every; /* by then the Gram matrices have full rank, and their order is defined */
    int64_t limit;
  };
  for (const Case &c : {Case{{1, 1}, 1, 10000}, Case{{8, 8}, 1, 10000}, Case{{8, 8}, 3, 10000},
                        Case{{12, 5}, 3, 10000}, Case{{5, 12}, 3, 10000}, Case{{4, 1}, 5, 10000},
                        Case{{1, 4}, 5, 10000}, Case{{20, 33}, 2, 10000}, Case{{12, 5}, 2, 8},
                        Case{{5, 12}, 2, 8}, Case{{9, 9}, 2, 0}}) {
    const int64_t rows = c.shape.rows, cols = c.shape.cols;
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + " every " +
                 std::to_string(c.every) + " limit " + std::to_string(c.limit));
    mfsdp_soap_desc desc = mfsdp_soap_desc_default();
    desc.beta1 = 0.9;
    desc.shampoo_beta = 0.8;
    desc.update_every = c.every;
    desc.size_limit = c.limit;
    ref::SoapOptions o;
    o.lr = 0.02, o.weight_decay = 0.1, o.beta1 = 0.9, o.shampoo_beta = 0.8, o.every = c.every;
    One one(&rig_, desc, rows, cols);
    one.now.grad_scale = 0.5;
    for (int64_t t = 1; t <= 2 * c.every + 3; ++t) {
      ref::SoapState s(rows, cols, c.limit);
      ref::SoapBases given;
      const auto take = [&](ref::SoapState *to) {
        to->exp_avg = one.state(MFSDP_STATE_EXP_AVG);
        to->exp_avg_sq = one.state(MFSDP_STATE_EXP_AVG_SQ);
        to->left = one.state(MFSDP_STATE_GRAM_LEFT);
        to->right = one.state(MFSDP_STATE_GRAM_RIGHT);
        to->basis_left = one.state(MFSDP_STATE_SIDE_LEFT);
        to->basis_right = one.state(MFSDP_STATE_SIDE_RIGHT);
        to->updates = static_cast<int64_t>(one.state(MFSDP_STATE_UPDATES)[0]);
      };
      take(&s);
      const ref::SoapState before = s;
      const std::vector<double> start = ref::widen(one.master.read());
      std::vector<double> w = start;
      const std::vector<float> g = floats(rows, cols, 100 + static_cast<uint64_t>(t));
      one.step(g);
      ref::SoapState got(rows, cols, c.limit);
      take(&got);
      given.left = got.basis_left;
      given.right = got.basis_right;
      ref::soap_step(o, t, times(ref::widen(g), 0.5), rows, cols, &s, &w, &given);
      ASSERT_EQ(got.updates, s.updates);
      ASSERT_EQ(got.updates, t);
      /* One step: rounding of each product and quotient, no amplification. Seen: 3e-7. */
      const double tolerance = 4e-6;
      ASSERT_LE(ref::relative_error(got.exp_avg, s.exp_avg), tolerance) << t;
      ASSERT_LE(ref::relative_error(got.exp_avg_sq, s.exp_avg_sq), tolerance) << t;
      ASSERT_LE(ref::relative_error(got.left, s.left), tolerance) << t;
      ASSERT_LE(ref::relative_error(got.right, s.right), tolerance) << t;
      std::vector<double> moved = ref::widen(one.master.read()), want = w;
      for (std::size_t i = 0; i < moved.size(); ++i)
        moved[i] -= start[i], want[i] -= start[i];
      if (t == 1) {
        ASSERT_EQ(moved, std::vector<double>(moved.size(), 0.0)) << "the first updates no weights";
      } else {
        /* N is of order 1 and the step 0.02 of it, on weights of order 1 that round twice; where V is
         * all but zero a quotient amplifies what its product rounded. Seen: 3e-5. */
        ASSERT_LE(ref::relative_error(moved, want), 2e-4) << t;
      }
      const bool renews = t == 1 || (t - 1) % c.every == 0;
      for (int side = 0; side < 2; ++side) {
        const int64_t n = side == 0 ? rows : cols;
        const ref::Matrix &basis = side == 0 ? got.basis_left : got.basis_right;
        const ref::Matrix &old = side == 0 ? before.basis_left : before.basis_right;
        const ref::Matrix &gram = side == 0 ? got.left : got.right;
        if (n > c.limit) {
          ASSERT_TRUE(basis.empty());
          continue;
        }
        ASSERT_LE(ref::orthogonality_error(basis, n, n), 1e-5);
        if (!renews) {
          ASSERT_EQ(basis, old) << "kept between renewals";
          continue;
        }
        ref::Matrix off; /* what must vanish */
        if (t == 1) {
          /* Eigenvectors, descending: B L B^T is diagonal and falls. */
          off =
              ref::matmul(ref::matmul(basis, gram, n, n, n), ref::transpose(basis, n, n), n, n, n);
          for (int64_t i = 0; i < n; ++i) {
            const double above = i > 0 ? off[ref::index(i - 1, i - 1, n)] : HUGE_VAL;
            ASSERT_LE(off[ref::index(i, i, n)], above + 1e-6 * ref::frobenius_norm(gram));
          }
          for (int64_t i = 0; i < n; ++i)
            off[ref::index(i, i, n)] = 0.0;
        } else {
          /* Orthonormalized rows of the sorted old basis times L: lower triangular in the new one. */
          const std::vector<int64_t> order = ref::basis_order(old, gram, n);
          off = ref::matmul(ref::matmul(ref::permuted(old, order, n, n, true), gram, n, n, n),
                            ref::transpose(basis, n, n), n, n, n);
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j <= i; ++j)
              off[ref::index(i, j, n)] = 0.0;
        }
        ASSERT_LE(ref::frobenius_norm(off), 1e-5 * ref::frobenius_norm(gram)) << "side " << side;
      }
    }
  }
}

/* Whole runs, where the formulas leave nothing open: full rank from the first gradient on, or but one
 * direction missing, whose sign does not matter. */
TEST_P(Precondition, SoapRunsAgainstFloat64) {
  for (const Shape shape : {Shape{1, 1}, Shape{6, 6}, Shape{6, 5}, Shape{5, 6}, Shape{2, 1}}) {
    SCOPED_TRACE(shape.rows * 100 + shape.cols);
    const int64_t rows = shape.rows, cols = shape.cols, side = std::min(rows, cols);
    mfsdp_soap_desc desc = mfsdp_soap_desc_default();
    desc.update_every = 2;
    ref::SoapOptions o;
    o.lr = 0.02, o.weight_decay = 0.1, o.every = 2;
    One one(&rig_, desc, rows, cols);
    ref::SoapState s(rows, cols);
    const std::vector<double> start = ref::widen(one.master.read());
    std::vector<double> w = start, spectrum;
    for (int64_t i = 0; i < side; ++i)
      spectrum.push_back(1.0 + static_cast<double>(side - i)); /* well apart */
    for (int64_t t = 1; t <= 9; ++t) {
      std::vector<float> g = floats(rows, cols, 300 + static_cast<uint64_t>(t), 0.3);
      if (t == 1) g = ref::narrow(ref::matrix_with_singular_values(rows, cols, spectrum, 3));
      one.step(g);
      ref::soap_step(o, t, ref::widen(g), rows, cols, &s, &w);
    }
    std::vector<double> got = ref::widen(one.master.read());
    for (std::size_t i = 0; i < got.size(); ++i)
      got[i] -= start[i], w[i] -= start[i];
    /* Nine steps; bases off by 2^-24 over the gaps, moments small in some direction. Seen: 7e-5. */
    EXPECT_LE(ref::relative_error(got, w), 3e-4);
  }
}

/* Jacobi and the root of the references themselves. */
TEST(PreconditionReference, RootTimesItselfFourTimesIsTheInverse) {
  const int64_t n = 12;
  const ref::Matrix x = ref::random_matrix(n, n, 3);
  ref::Matrix a(static_cast<std::size_t>(n * n), 0.0);
  ref::update_gram(&a, 0.0, 1.0, x, n, n, true);
  const ref::Matrix root = ref::inverse_fourth_root(a, n, 1.0, 0.1);
  ref::Matrix product = root;
  for (int i = 0; i < 3; ++i)
    product = ref::matmul(product, root, n, n, n);
  for (int64_t i = 0; i < n; ++i)
    a[ref::index(i, i, n)] += 0.1;
  EXPECT_LE(ref::max_difference(ref::matmul(product, a, n, n, n), ref::identity(n)), 1e-12);
}

/* ---- what must not change ---- */

/* A skipped step (a gradient of NaN, as the verdict found) touches no bit of state or parameter, on
 * refresh steps too, and the phase of the interval goes on: it counts attempted steps. */
TEST_P(Precondition, SkippedStepsTouchNothingAndCount) {
  for (const Algorithm &algorithm : both(3)) {
    One one(&rig_, algorithm, 6, 4), twin(&rig_, algorithm, 6, 4);
    const std::vector<float> nan(24, std::nanf(""));
    for (uint64_t t = 1; t <= 12; ++t) {
      const bool skip = t == 1 || t == 3 || t == 4 || t == 8;
      const std::vector<float> before = one.all();
      one.step(skip ? nan : floats(6, 4, t), skip);
      EXPECT_EQ(same_bits(one.all(), before), skip) << t;
      /* The same run with other garbage in the skipped steps. */
      twin.step(floats(6, 4, t), skip);
      EXPECT_TRUE(same_bits(one.all(), twin.all())) << t;
      EXPECT_TRUE(all_finite(one.all())) << t;
    }
  }
}

/* Shampoo's roots change in attempted steps 3, 6, 9, SOAP's bases in 4, 7, 10, whatever was skipped. */
TEST_P(Precondition, IntervalsCountAttemptedSteps) {
  for (const Algorithm &algorithm : both(3)) {
    One one(&rig_, algorithm, 5, 5);
    for (uint64_t t = 1; t <= 10; ++t) {
      const bool skip = t == 2 || t == 5 || t == 6;
      const std::vector<double> before = one.state(MFSDP_STATE_SIDE_LEFT);
      one.step(floats(5, 5, t), skip);
      const bool due = algorithm.soap ? t == 1 || t % 3 == 1 : t % 3 == 0;
      EXPECT_EQ(one.state(MFSDP_STATE_SIDE_LEFT) != before, due && !skip) << t;
    }
  }
}

TEST_P(Precondition, AnAbsentGradientTouchesNothing) {
  for (const Algorithm &algorithm : both(2)) {
    One one(&rig_, algorithm, 5, 3);
    Buffer<uint32_t> present(&rig_, std::vector<uint32_t>{1, 1, 0});
    one.job.present = present.data();
    for (uint64_t t = 1; t <= 5; ++t) {
      one.job.item.present_index = t == 3 ? 2 : 1;
      const std::vector<float> before = one.all();
      one.step(floats(5, 3, t));
      EXPECT_EQ(same_bits(one.all(), before), t == 3) << t;
    }
  }
}

/* SOAP: a matrix whose first gradient comes after the first interval gathers, and waits for the next
 * renewal; one whose first step is skipped does not wait. */
TEST_P(Precondition, SoapStartsWithTheFirstGradientOrTheNextRenewal) {
  mfsdp_soap_desc desc = mfsdp_soap_desc_default();
  desc.update_every = 4;
  One late(&rig_, desc, 4, 4), second(&rig_, desc, 4, 4);
  for (uint64_t t = 1; t <= 10; ++t) {
    late.step(floats(4, 4, t), t < 6);
    second.step(floats(4, 4, t), t < 2);
    const double expected = t < 9 ? 0.0 : static_cast<double>(t - 8);
    EXPECT_EQ(late.state(MFSDP_STATE_UPDATES)[0], expected) << t;
    EXPECT_EQ(second.state(MFSDP_STATE_UPDATES)[0], static_cast<double>(t - 1)) << t;
    EXPECT_EQ(ref::frobenius_norm(late.state(MFSDP_STATE_GRAM_LEFT)) > 0.0, t >= 6) << t;
    EXPECT_EQ(ref::orthogonality_error(late.state(MFSDP_STATE_SIDE_LEFT), 4, 4) < 1e-5, t >= 9)
        << t;
  }
}

/* ---- inputs at the edge ---- */

TEST_P(Precondition, ZeroGradientsOnlyDecay) {
  for (const Algorithm &algorithm : both(2)) {
    One one(&rig_, algorithm, 6, 4);
    const std::vector<float> zero(24, 0.0f), start = one.master.read();
    for (int t = 1; t <= 5; ++t)
      one.step(zero);
    EXPECT_TRUE(all_finite(one.all()));
    const double steps = algorithm.soap ? 4 : 5; /* SOAP's first updates no weights */
    const std::vector<float> end = one.master.read();
    for (std::size_t i = 0; i < end.size(); ++i)
      EXPECT_NEAR(end[i], static_cast<double>(start[i]) * std::pow(1.0 - 0.02 * 0.1, steps), 1e-5);
    /* And it learns afterwards. */
    one.step(floats(6, 4, 9));
    one.step(floats(6, 4, 10));
    EXPECT_TRUE(all_finite(one.all()));
    EXPECT_FALSE(same_bits(one.master.read(), end));
  }
}

TEST_P(Precondition, SizesFromTinyToHugeStayFinite) {
  for (const Algorithm &algorithm : both(2))
    for (const double scale : {1e-30, 1e-20, 1e-6, 1e6, 1e15}) {
      SCOPED_TRACE(scale);
      One one(&rig_, algorithm, 5, 7);
      for (uint64_t t = 1; t <= 5; ++t)
        one.step(floats(5, 7, t, scale));
      EXPECT_TRUE(all_finite(one.all()));
    }
}

/* The square of such a gradient is no float: that matrix stays as it is, and goes on afterwards. */
TEST_P(Precondition, WhatWouldOverflowTouchesNothing) {
  for (const Algorithm &algorithm : both(2)) {
    One one(&rig_, algorithm, 5, 7);
    for (uint64_t t = 1; t <= 7; ++t) {
      const bool huge = t == 1 || t == 3 || t == 4;
      const std::vector<float> before = one.all();
      one.step(floats(5, 7, t, huge ? 1e25 : 1.0));
      EXPECT_EQ(same_bits(one.all(), before), huge) << t;
    }
    EXPECT_TRUE(all_finite(one.all()));
  }
}

/* No verdict stands before a single call: a gradient that is not finite touches nothing either, and
 * a matrix without sides has no Gram matrix that shows it. */
TEST_P(Precondition, WhatIsNotFiniteTouchesNothing) {
  for (Algorithm algorithm : both(2))
    for (const int64_t limit : {100, 4, 0}) {
      SCOPED_TRACE(limit);
      algorithm.soap_desc.size_limit = algorithm.shampoo_desc.size_limit = limit;
      One one(&rig_, algorithm, 5, 3);
      for (uint64_t t = 1; t <= 7; ++t) {
        const bool bad = t == 1 || t == 3 || t == 4;
        const std::vector<float> before = one.all();
        std::vector<float> g = floats(5, 3, t);
        if (bad) g[t] = t == 3 ? INFINITY : std::nanf("");
        one.step(g);
        EXPECT_EQ(same_bits(one.all(), before), bad) << t;
      }
      EXPECT_TRUE(all_finite(one.all()));
    }
}

/* A count of updates that no run has (a file that was tampered with): no update is better than NaN. */
TEST_P(Precondition, AStepThatIsNoNumberTouchesNothing) {
  for (const double updates : {-3.0, std::nan("")}) {
    One one(&rig_, mfsdp_soap_desc_default(), 5, 3);
    one.step(floats(5, 3, 1));
    one.states[MFSDP_STATE_UPDATES].write({static_cast<float>(updates)});
    const std::vector<float> before = one.master.read();
    one.step(floats(5, 3, 2));
    EXPECT_TRUE(same_bits(one.master.read(), before)) << updates;
  }
}

TEST_P(Precondition, RankDeficientGradients) {
  for (const Algorithm &algorithm : both(2))
    for (const Shape shape : {Shape{9, 6}, Shape{1, 9}, Shape{9, 1}, Shape{1, 1}}) {
      One one(&rig_, algorithm, shape.rows, shape.cols);
      std::vector<float> g = ref::narrow(ref::matrix_with_singular_values(
          shape.rows, shape.cols, ref::spectrum_deficient(std::min(shape.rows, shape.cols), 1), 2));
      for (uint64_t t = 1; t <= 6; ++t)
        one.step(g); /* always the same one direction */
      const std::vector<float> all = one.all();
      EXPECT_TRUE(all_finite(all));
      for (const float x : all)
        EXPECT_LT(std::fabs(x), 1e5f); /* (1e-12)^(-1/4) = 1e3 is the largest root */
    }
}

TEST_P(Precondition, NoElements) {
  for (const Algorithm &algorithm : both(1)) {
    mfsdp_precondition_job job = mfsdp_precondition_job_default();
    for (const Shape shape : {Shape{0, 4}, Shape{4, 0}, Shape{0, 0}}) {
      std::size_t nbytes = 1;
      job.rows = shape.rows;
      job.cols = shape.cols;
      EXPECT_EQ(algorithm.nbytes(&rig_, shape.rows, shape.cols, &nbytes), MFSDP_OK);
      EXPECT_EQ(nbytes, 0u);
      EXPECT_EQ(algorithm.step(&rig_, &job), MFSDP_OK);
    }
    EXPECT_EQ(rig_.sync(), MFSDP_OK);
  }
}

/* 16-bit copies are written with the master. */
TEST_P(Precondition, WritesTheCopy) {
  for (const Algorithm &algorithm : both(2)) {
    One one(&rig_, algorithm, 5, 3);
    Buffer<uint16_t> copy(&rig_, 15);
    one.job.item.param = copy.data();
    one.job.item.param_dtype = MFSDP_BF16;
    for (uint64_t t = 1; t <= 3; ++t)
      one.step(floats(5, 3, t));
    const std::vector<float> master = one.master.read();
    const std::vector<uint16_t> got = copy.read();
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i], mfsdp_bf16_from_f32(master[i]));
  }
}

/* ---- refusals, one for each rule; nothing is touched ---- */

TEST_P(Precondition, JobsThatMakeNoSense) {
  for (const Algorithm &algorithm : both(1)) {
    const std::string name = algorithm.soap ? "soap: " : "shampoo: ";
    One one(&rig_, algorithm, 4, 3);
    one.scalars.write({mfsdp_step_scalars_default(0.1, 0.1)});
    const mfsdp_precondition_job good = one.job;
    const std::vector<float> before = one.all();
    const auto refused = [&](const std::string &part) {
      EXPECT_EQ(algorithm.step(&rig_, &one.job), MFSDP_E_ARGUMENT) << part;
      EXPECT_NE(std::string(rig_.message()).find(name + part), std::string::npos) << rig_.message();
      EXPECT_EQ(rig_.sync(), MFSDP_OK);
      EXPECT_TRUE(same_bits(one.all(), before));
      one.job = good;
    };
    one.job.struct_nbytes = 0, refused("job is NULL or its struct_nbytes");
    one.job.attempted_step = 0, refused("attempted_step is 0, counts from 1");
    one.job.clipped = 2, refused("clipped is 2, needs 0 or 1");
    one.job.clipped = -1, refused("clipped is -1, needs 0 or 1");
    one.job.rows = -1, refused("rows x cols is -1 x 3");
    one.job.scalars = nullptr, refused("scalars is NULL");
    one.job.workspace_nbytes -= 1;
    refused("workspace has " + std::to_string(good.workspace_nbytes - 1) + " bytes, needs " +
            std::to_string(good.workspace_nbytes));
    one.job.workspace = nullptr, refused("workspace has 0 bytes");
    const auto bytes = [](void *p) { return static_cast<unsigned char *>(p); };
    one.job.workspace = bytes(good.workspace) + 8;
    one.job.workspace_nbytes += 8;
    refused("workspace is not aligned to 256 bytes");
    one.job.item.master = nullptr, refused("master is NULL");
    one.job.item.grad = nullptr, refused("grad is NULL");
    one.job.item.state[3] = nullptr, refused(one.names[3] + " is NULL");
    one.job.item.grad = one.job.item.master, refused("master and grad overlap");
    one.job.item.grad = one.job.item.master + 11, refused("master and grad overlap");
    one.job.item.state[0] = one.job.item.state[5], refused("exp_avg and exp_avg_sq overlap");
    one.job.item.state[1] = one.job.item.state[0] + 1, refused("exp_avg and gram_left overlap");
    one.job.item.grad = static_cast<const float *>(good.workspace), refused("workspace and grad");
    one.job.item.param = one.job.item.state[5], refused("exp_avg_sq and param overlap");
    one.job.item.param = one.grad.data();
    one.job.item.param_dtype = 7, refused("param_dtype is 7, which is none");
  }
}

TEST(PreconditionChecks, WorkspaceQueriesNeedAPlace) {
  Rig rig(test::rig_kinds()[0]);
  const mfsdp_shampoo_desc shampoo = mfsdp_shampoo_desc_default();
  const mfsdp_soap_desc soap = mfsdp_soap_desc_default();
  EXPECT_EQ(mfsdp_shampoo_workspace_nbytes(&rig.context, rig.backend, &shampoo, 3, 3, nullptr),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_soap_workspace_nbytes(&rig.context, rig.backend, &soap, 3, 3, nullptr),
            MFSDP_E_ARGUMENT);
}

TEST(PreconditionChecks, Descriptions) {
  Rig rig(test::rig_kinds()[0]);
  const auto shampoo = [&](void (*edit)(mfsdp_shampoo_desc *), const std::string &part) {
    mfsdp_shampoo_desc desc = mfsdp_shampoo_desc_default();
    edit(&desc);
    EXPECT_EQ(mfsdp_shampoo_check(&rig.context, &desc), MFSDP_E_ARGUMENT) << part;
    EXPECT_NE(std::string(rig.message()).find("shampoo: " + part), std::string::npos)
        << rig.message();
  };
  shampoo([](mfsdp_shampoo_desc *d) { d->struct_nbytes = 1; }, "desc is NULL or its struct_nbytes");
  shampoo([](mfsdp_shampoo_desc *d) { d->beta1 = 1.0; }, "beta1 is 1, needs to be in [0, 1)");
  shampoo([](mfsdp_shampoo_desc *d) { d->beta1 = -0.1; }, "beta1 is -0.1");
  shampoo([](mfsdp_shampoo_desc *d) { d->beta1 = std::nan(""); }, "beta1 is ");
  shampoo([](mfsdp_shampoo_desc *d) { d->beta2 = 1.1; }, "beta2 is 1.1, needs to be in [0, 1]");
  shampoo([](mfsdp_shampoo_desc *d) { d->beta2 = 1.0; }, "beta2 is 1, and AdamW's average");
  shampoo([](mfsdp_shampoo_desc *d) { d->eps = 0.0; }, "eps is 0, needs to be positive");
  shampoo([](mfsdp_shampoo_desc *d) { d->eps = 1e-160; },
          "eps is 1e-160, needs to be positive, and");
  shampoo([](mfsdp_shampoo_desc *d) { d->update_every = 0; },
          "update_every is 0, needs at least 1");
  shampoo([](mfsdp_shampoo_desc *d) { d->update_every = -3; }, "update_every is -3");
  shampoo([](mfsdp_shampoo_desc *d) { d->size_limit = -1; },
          "size_limit is -1, needs 0 to 1048576");
  shampoo([](mfsdp_shampoo_desc *d) { d->size_limit = INT64_MAX; }, "size_limit is");
  shampoo([](mfsdp_shampoo_desc *d) { d->graft = static_cast<mfsdp_graft>(0); },
          "graft is 0, needs 1");
  shampoo([](mfsdp_shampoo_desc *d) { d->graft_eps = 0.0; }, "graft_eps is 0");
  shampoo([](mfsdp_shampoo_desc *d) { d->graft_eps = 1e-300; }, "graft_eps is 1e-300, needs");
  const auto soap = [&](void (*edit)(mfsdp_soap_desc *), const std::string &part) {
    mfsdp_soap_desc desc = mfsdp_soap_desc_default();
    edit(&desc);
    EXPECT_EQ(mfsdp_soap_check(&rig.context, &desc), MFSDP_E_ARGUMENT) << part;
    EXPECT_NE(std::string(rig.message()).find("soap: " + part), std::string::npos) << rig.message();
  };
  soap([](mfsdp_soap_desc *d) { d->struct_nbytes = 1; }, "desc is NULL or its struct_nbytes");
  soap([](mfsdp_soap_desc *d) { d->beta1 = 1.0; }, "betas are 1 and 0.95");
  soap([](mfsdp_soap_desc *d) { d->beta2 = -1.0; }, "betas are 0.95 and -1");
  soap([](mfsdp_soap_desc *d) { d->shampoo_beta = 1.0; },
       "betas are 0.95 and 0.95, shampoo_beta is 1");
  soap([](mfsdp_soap_desc *d) { d->eps = std::nan(""); }, "eps is ");
  soap([](mfsdp_soap_desc *d) { d->eps = 1e-50; }, "eps is 1e-50, needs to be positive, and 1e-30");
  soap([](mfsdp_soap_desc *d) { d->update_every = 0; }, "update_every is 0, needs at least 1");
  soap([](mfsdp_soap_desc *d) { d->size_limit = -1; }, "size_limit is -1");
  EXPECT_EQ(mfsdp_shampoo_check(&rig.context, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_soap_check(&rig.context, nullptr), MFSDP_E_ARGUMENT);
  const mfsdp_shampoo_desc gupta = mfsdp_shampoo_desc_gupta(1e-4);
  EXPECT_EQ(mfsdp_shampoo_check(&rig.context, &gupta), MFSDP_OK) << rig.message();
}

/* ---- single passes ---- */

/* What SOAP_SORT makes of these estimates along one side: the order, read from the second moments, after
 * the rows of `square` have been compared. */
std::vector<float> sorted(Rig *rig, const std::vector<float> &estimates, int32_t side) {
  const std::size_t n = estimates.size(), other = 2;
  std::vector<float> diagonal(n * n, 0.0f), basis(n * n, 0.0f), moments(n * other);
  for (std::size_t i = 0; i < n; ++i) {
    diagonal[i * n + i] = estimates[i];
    basis[i * n + i] = 1.0f;
    for (std::size_t k = 0; k < other; ++k)
      moments[side == 0 ? i * other + k : k * n + i] = static_cast<float>(i);
  }
  Buffer<float> square(rig, diagonal), identity(rig, basis), second(rig, moments);
  Buffer<float> out(rig, n * other), next(rig, n * n), updates(rig, std::vector<float>(1, 1.0f));
  Buffer<double> values(rig, 3 * n);
  Buffer<mfsdp_step_scalars> scalars(rig, {mfsdp_step_scalars_default(0.1, 0.1)});
  mfsdp_precondition_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = MFSDP_SOAP_SORT;
  args.side = side;
  args.rows = static_cast<int64_t>(side == 0 ? n : other);
  args.cols = static_cast<int64_t>(side == 0 ? other : n);
  args.item.count = args.rows * args.cols;
  args.item.state[MFSDP_STATE_SIDE_LEFT + side] = identity.data();
  args.item.state[MFSDP_STATE_UPDATES] = updates.data();
  args.next_side[side] = next.data();
  args.next_exp_avg_sq = second.data();
  args.other = out.data();
  args.square = square.data();
  args.values = reinterpret_cast<float *>(values.data());
  args.scalars = scalars.data();
  EXPECT_EQ(rig->ops->precondition(rig->self, rig->queue, &args), MFSDP_OK) << rig->message();
  const std::vector<float> moved = out.read(), rows = next.read();
  std::vector<float> order;
  for (std::size_t i = 0; i < n; ++i) {
    const auto from = static_cast<std::size_t>(moved[side == 0 ? i * other : i]);
    EXPECT_LT(from, n);
    order.push_back(static_cast<float>(from));
    EXPECT_EQ(moved[side == 0 ? i * other + 1 : n + i], order.back());
    for (std::size_t j = 0; j < n && from < n; ++j)
      EXPECT_TRUE(same_bits(std::vector<float>{rows[i * n + j]}, {diagonal[from * n + j]})) << i;
  }
  return order;
}

TEST_P(Precondition, BasesAreSortedDescendingAndEqualOnesKeepTheirOrder) {
  for (const int32_t side : {0, 1}) {
    EXPECT_EQ(sorted(&rig_, {2, 5, 2, 7, 5, 2}, side), (std::vector<float>{3, 1, 4, 0, 2, 5}));
    EXPECT_EQ(sorted(&rig_, {-1, 0, 1e30f, -1e30f}, side), (std::vector<float>{2, 1, 0, 3}));
    EXPECT_EQ(sorted(&rig_, {0, 0, 0}, side), (std::vector<float>{0, 1, 2}));
    /* No order is promised, but each row comes once. */
    std::vector<float> order = sorted(&rig_, {1, NAN, 2, NAN, HUGE_VALF, -HUGE_VALF}, side);
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, (std::vector<float>{0, 1, 2, 3, 4, 5}));
  }
}

TEST_P(Precondition, ShampooCountsItsStepsFromOne) {
  One one(&rig_, mfsdp_shampoo_desc_default(), 4, 3);
  const std::vector<float> before = one.all();
  one.now.skip = 1;
  one.scalars.write({one.now});
  EXPECT_EQ(one.algorithm.step(&rig_, &one.job), MFSDP_OK);
  EXPECT_EQ(rig_.sync(), MFSDP_OK) << "a skipped step counts nothing";
  one.now.skip = 0;
  one.scalars.write({one.now});
  EXPECT_EQ(one.algorithm.step(&rig_, &one.job), MFSDP_OK);
  EXPECT_EQ(rig_.sync(), MFSDP_E_ARGUMENT);
  EXPECT_STREQ(rig_.message(),
               "precondition: applied_steps is 0; Shampoo's corrections count from 1");
  rig_.renew_queue();
  EXPECT_TRUE(same_bits(one.all(), before));
}

TEST_P(Precondition, PassesThatMakeNoSense) {
  One one(&rig_, mfsdp_soap_desc_default(), 4, 3);
  mfsdp_precondition_args good, args;
  std::memset(&good, 0, sizeof(good));
  good.struct_nbytes = sizeof(good);
  good.op = MFSDP_SOAP_PREPARE;
  good.rows = 4;
  good.cols = 3;
  good.item = one.job.item;
  good.scalars = one.scalars.data();
  const auto refused = [&](mfsdp_status status, const std::string &part) {
    EXPECT_EQ(rig_.ops->precondition(rig_.self, rig_.queue, &args), status);
    EXPECT_NE(std::string(rig_.message()).find(part), std::string::npos) << rig_.message();
    args = good;
  };
  args = good;
  args.struct_nbytes = 1, refused(MFSDP_E_ARGUMENT, "struct_nbytes is ");
  args.op = static_cast<mfsdp_precondition_op>(0), refused(MFSDP_E_UNSUPPORTED, "op is 0");
  args.op = static_cast<mfsdp_precondition_op>(15), refused(MFSDP_E_UNSUPPORTED, "op is 15");
  args.side = 2, refused(MFSDP_E_ARGUMENT, "side 2 of 4 x 3");
  args.rows = 0, refused(MFSDP_E_ARGUMENT, "side 0 of 0 x 3");
  args.item.count = 13, refused(MFSDP_E_ARGUMENT, "with 13 elements");
  args.scalars = nullptr, refused(MFSDP_E_ARGUMENT, "or scalars");
}

/* ---- in an optimizer ---- */

/* Tensors of one group, and AdamW's beside them. */
class Owned {
public:
  Owned(Rig *on, const Algorithm &algorithm, mfsdp_space space = MFSDP_SPACE_DEVICE) : rig_(on) {
    groups_[0] = algorithm.group();
    groups_[1] = mfsdp_hyper_group_adamw(0.01, 0.1);
    desc_ = mfsdp_optimizer_desc_default();
    desc_.groups = groups_;
    desc_.group_count = 2;
    desc_.state_space = space;
  }
  ~Owned() { mfsdp_optimizer_destroy(&rig_->context, optimizer); }
  void add(int64_t rows, int64_t cols, int32_t group = 0) {
    mfsdp_optimizer_tensor t;
    std::memset(&t, 0, sizeof(t));
    masters.emplace_back(rig_, static_cast<std::size_t>(rows * cols), std::size_t(0),
                         desc_.state_space);
    masters.back().write(floats(rows, cols, 1 + list.size()));
    grads.emplace_back(rig_, static_cast<std::size_t>(rows * cols));
    params.emplace_back(rig_, static_cast<std::size_t>(rows * cols));
    t.name = "w";
    t.role = group == 0 ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
    t.hyper_group = group;
    t.param = static_cast<int32_t>(list.size());
    t.rows = rows;
    t.cols = cols;
    t.count = rows * cols;
    t.master = masters.back().data();
    t.grad = grads.back().data();
    if (desc_.state_space != MFSDP_SPACE_DEVICE) {
      t.param_data = params.back().data();
      t.param_dtype = MFSDP_F32;
    }
    list.push_back(t);
  }
  mfsdp_status create() {
    return mfsdp_optimizer_create(&rig_->context, rig_->backend, &desc_, list.data(),
                                  static_cast<int32_t>(list.size()), &optimizer);
  }
  void fill(uint64_t t) {
    for (std::size_t i = 0; i < list.size(); ++i)
      grads[i].write(floats(list[i].rows, list[i].cols, 1000 * t + i));
  }
  void step(mfsdp_step_scalars *scalars) {
    ASSERT_EQ(mfsdp_optimizer_step(&rig_->context, optimizer, rig_->queue, scalars, nullptr),
              MFSDP_OK)
        << rig_->message();
    ASSERT_EQ(rig_->sync(), MFSDP_OK) << rig_->message();
  }
  std::vector<mfsdp_optimizer_tensor> list;
  std::deque<Buffer<float>> masters, grads, params;
  mfsdp_optimizer *optimizer = nullptr;
  mfsdp_optimizer_desc desc_;

private:
  Rig *rig_;
  mfsdp_hyper_group groups_[2];
};

/* Several matrices, some of one shape, share one workspace: each gets the bits it gets alone; with offload
 * too. No allocation after set-up. */
TEST_P(Precondition, ManyMatricesEqualEachAlone) {
  const Shape shapes[] = {{6, 4}, {4, 6}, {6, 4}, {1, 5}, {6, 4}, {8, 8}};
  for (Algorithm algorithm : both(3))
    for (const mfsdp_space space : {MFSDP_SPACE_DEVICE, MFSDP_SPACE_HOST}) {
      algorithm.soap_desc.size_limit = algorithm.shampoo_desc.size_limit =
          7; /* 8 x 8 has no sides */
      Owned many(&rig_, algorithm, space);
      std::deque<One> alone;
      for (std::size_t i = 0; i < 6; ++i) {
        many.add(shapes[i].rows, shapes[i].cols);
        alone.emplace_back(&rig_, algorithm, shapes[i].rows, shapes[i].cols, i + 1);
        alone.back().job.clipped = 1;
        alone.back().now.clip_scale = 0.5;
      }
      many.add(5, 3, 1);
      many.add(0, 4);
      ASSERT_EQ(many.create(), MFSDP_OK) << rig_.message();
      Buffer<mfsdp_step_scalars> scalars(&rig_, 2);
      mfsdp_step_scalars now = mfsdp_step_scalars_default(0.02, 0.1);
      now.clip_scale = 0.5;
      for (uint64_t t = 1; t <= 8; ++t) {
        many.fill(t);
        now.applied_steps = static_cast<int64_t>(t);
        scalars.write({now, now});
        if (t == 1 || !test::malloc_count_supported()) {
          many.step(scalars.data());
        } else {
          test::malloc_count_begin();
          many.step(scalars.data());
          ASSERT_EQ(test::malloc_count_end(), 0u) << t;
        }
        for (std::size_t i = 0; i < 6; ++i) {
          alone[i].step(floats(shapes[i].rows, shapes[i].cols, 1000 * t + i));
          ASSERT_TRUE(same_bits(many.masters[i].read(), alone[i].master.read())) << t << " " << i;
        }
      }
      /* The state table: names and shapes as the single function says, in its order. */
      int32_t count = 0, k = 0;
      const mfsdp_optimizer_state *states = mfsdp_optimizer_states(many.optimizer, &count);
      for (std::size_t i = 0; i < 6; ++i)
        for (std::size_t s = 0; s < alone[i].states.size(); ++s, ++k) {
          ASSERT_LT(k, count);
          EXPECT_EQ(states[k].name, alone[i].names[s]);
          EXPECT_EQ(states[k].tensor, static_cast<int32_t>(i));
          const auto *data = static_cast<const float *>(states[k].data);
          EXPECT_TRUE(
              same_bits(rig_.read(data, static_cast<std::size_t>(states[k].count), states[k].space),
                        alone[i].states[s].read()))
              << states[k].name;
        }
      EXPECT_EQ(count, k + 2) << "and AdamW's two";
    }
}

/* What a checkpoint brings back: states, and the count of attempted steps. */
TEST_P(Precondition, AResumedOptimizerGoesOnWithTheSameBits) {
  for (const Algorithm &algorithm : both(3))
    for (const uint64_t stop : {1u, 2u, 3u, 4u, 5u}) {
      if (slow() && stop % 2 == 0) continue;
      Owned whole(&rig_, algorithm), first(&rig_, algorithm), second(&rig_, algorithm);
      for (Owned *o : {&whole, &first, &second}) {
        o->add(5, 4);
        o->add(3, 3);
        ASSERT_EQ(o->create(), MFSDP_OK) << rig_.message();
      }
      Buffer<mfsdp_step_scalars> scalars(&rig_, 2);
      for (uint64_t t = 1; t <= 8; ++t) {
        mfsdp_step_scalars now = mfsdp_step_scalars_default(0.02, 0.1);
        now.applied_steps = static_cast<int64_t>(t);
        scalars.write({now, now});
        Owned *part = t <= stop ? &first : &second;
        if (t == stop + 1) {
          int32_t count = 0;
          const mfsdp_optimizer_state *from = mfsdp_optimizer_states(first.optimizer, &count);
          const mfsdp_optimizer_state *to = mfsdp_optimizer_states(second.optimizer, &count);
          for (int32_t i = 0; i < count; ++i)
            ASSERT_EQ(rig_.ops->copy(rig_.self, rig_.queue, to[i].data, to[i].space, from[i].data,
                                     from[i].space,
                                     static_cast<std::size_t>(to[i].count) * sizeof(float)),
                      MFSDP_OK);
          for (std::size_t i = 0; i < 2; ++i)
            second.masters[i].write(first.masters[i].read());
          ASSERT_EQ(
              mfsdp_optimizer_resume(&rig_.context, second.optimizer, static_cast<int64_t>(stop)),
              MFSDP_OK);
        }
        whole.fill(t);
        part->fill(t);
        whole.step(scalars.data());
        part->step(scalars.data());
      }
      for (std::size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(same_bits(whole.masters[i].read(), second.masters[i].read())) << stop;
      EXPECT_EQ(mfsdp_optimizer_resume(&rig_.context, second.optimizer, -1), MFSDP_E_ARGUMENT);
    }
}

TEST_P(Precondition, VectorsAreRefused) {
  for (const Algorithm &algorithm : both(3)) {
    Owned owned(&rig_, algorithm);
    owned.add(1, 9, 1);
    owned.list[0].hyper_group = 0;
    EXPECT_EQ(owned.create(), MFSDP_E_ARGUMENT);
    EXPECT_NE(
        std::string(rig_.message()).find("which needs role matrix, but the role is elementwise"),
        std::string::npos)
        << rig_.message();
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Precondition, ::testing::ValuesIn(test::backend_kinds()),
                         test::rig_name);

/* A backend without eigh says what to install, before anything is allocated. */
TEST(PreconditionChecks, ABackendWithoutEigh) {
  Rig rig(test::rig_kinds()[0]);
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  mfsdp_host_backend *host = nullptr;
  ASSERT_EQ(mfsdp_host_backend_create(&rig.context, &desc, &host), MFSDP_OK);
  const mfsdp_backend *backend = mfsdp_host_backend_get(host);
  mfsdp_hyper_group groups[2] = {mfsdp_hyper_group_adamw(0.01, 0.1), mfsdp_hyper_group_soap()};
  mfsdp_optimizer_desc optimizer_desc = mfsdp_optimizer_desc_default();
  optimizer_desc.groups = groups;
  optimizer_desc.group_count = 2;
  for (const bool soap : {true, false}) {
    groups[1] = soap ? mfsdp_hyper_group_soap() : mfsdp_hyper_group_shampoo();
    const int64_t allocations = rig.memory.alloc_count();
    mfsdp_optimizer *optimizer = nullptr;
    EXPECT_EQ(
        mfsdp_optimizer_create(&rig.context, backend, &optimizer_desc, nullptr, 0, &optimizer),
        MFSDP_E_UNSUPPORTED);
    EXPECT_EQ(optimizer, nullptr);
    EXPECT_EQ(rig.memory.alloc_count(), allocations);
    const std::string message = rig.message();
    EXPECT_NE(message.find(soap ? "soap: the backend host has no eigh and qr"
                                : "shampoo: the backend host has no eigh."),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("liblapacke-dev"), std::string::npos) << message;
    EXPECT_NE(message.find("math_lapacke.h"), std::string::npos) << message;
    std::size_t nbytes = 7;
    EXPECT_EQ(mfsdp_soap_workspace_nbytes(&rig.context, backend, &groups[1].soap, 3, 3, &nbytes),
              MFSDP_E_UNSUPPORTED);
    EXPECT_EQ(nbytes, 0u);
  }
  EXPECT_EQ(mfsdp_host_backend_destroy(&rig.context, host), MFSDP_OK);
}

/* ---- a LAPACK that fails ---- */

int g_calls_left = 0; /* the call that fails is the one that makes it 0 */

int64_t failing_syevd(int64_t n, float *a, int64_t lda, float *values, void *work, size_t nbytes) {
  const int64_t code = test::rig_lapack()->syevd(n, a, lda, values, work, nbytes);
  return --g_calls_left == 0 ? 3 : code;
}

int64_t failing_orthonormalize(int64_t n, float *a, int64_t lda, void *work, size_t nbytes) {
  const int64_t code = test::rig_lapack()->orthonormalize(n, a, lda, work, nbytes);
  return --g_calls_left == 0 ? -4 : code;
}

/* On inline and worker queues, whichever decomposition of whichever step it is: the wait says so with
 * the library's code, and that step has touched nothing. */
TEST(PreconditionChecks, ADecompositionThatFailsTouchesNothing) {
  if (test::rig_lapack() == nullptr) GTEST_SKIP() << "no LAPACKE in this build";
  mfsdp_host_lapack failing = *test::rig_lapack();
  failing.syevd = failing_syevd;
  failing.orthonormalize = failing_orthonormalize;
  mfsdp_shampoo_desc shampoo = mfsdp_shampoo_desc_default();
  mfsdp_soap_desc soap = mfsdp_soap_desc_default();
  shampoo.update_every = soap.update_every = 1;
  for (const test::RigKind &kind : test::rig_kinds())
    for (const Algorithm &algorithm : {Algorithm(shampoo), Algorithm(soap)})
      for (int fail = 1; fail <= 4; ++fail) { /* two in each step */
        Rig rig(kind);
        const mfsdp_host_lapack *const good = rig.host->lapack;
        rig.host->lapack = &failing;
        One one(&rig, algorithm, 5, 3);
        g_calls_left = fail;
        if (fail > 2) one.step(floats(5, 3, 1));
        const std::vector<float> before = one.all();
        one.grad.write(floats(5, 3, 2));
        ++one.now.applied_steps;
        one.scalars.write({one.now});
        (void)algorithm.step(&rig, &one.job);
        EXPECT_EQ(rig.sync(), MFSDP_E_BACKEND) << fail;
        const char *const said =
            algorithm.soap && fail > 2 ? "returned -4 for " : "returned 3 for a matrix of ";
        EXPECT_NE(std::string(rig.message()).find(said), std::string::npos) << rig.message();
        rig.renew_queue();
        EXPECT_TRUE(same_bits(one.all(), before)) << fail;
        rig.host->lapack = good;
      }
}

/* The same of cuSOLVER, whose failures the device alone sees: Shampoo's step calls it twice, SOAP's
 * first twice too, and then four times. */
TEST(PreconditionChecks, ADecompositionThatFailsOnTheDeviceTouchesNothing) {
  if (!test::cuda_rig_fail_solver(-1)) GTEST_SKIP() << "on hardware nothing fails on demand";
  mfsdp_shampoo_desc shampoo = mfsdp_shampoo_desc_default();
  mfsdp_soap_desc soap = mfsdp_soap_desc_default();
  shampoo.update_every = soap.update_every = 1;
  for (const Algorithm &algorithm : {Algorithm(shampoo), Algorithm(soap)})
    for (const bool later : {false, true})
      for (int fail = 0; fail < (later && algorithm.soap ? 4 : 2); ++fail) {
        SCOPED_TRACE(std::to_string(algorithm.soap) + " later " + std::to_string(later) +
                     " routine " + std::to_string(fail));
        Rig rig(test::backend_kinds().back());
        One one(&rig, algorithm, 5, 3);
        if (later) one.step(floats(5, 3, 1));
        const std::vector<float> before = one.all();
        one.grad.write(floats(5, 3, 2));
        ++one.now.applied_steps;
        one.scalars.write({one.now});
        (void)test::cuda_rig_fail_solver(fail);
        EXPECT_EQ(algorithm.step(&rig, &one.job), MFSDP_OK) << rig.message();
        EXPECT_EQ(rig.sync(), MFSDP_E_BACKEND);
        const char *const said = algorithm.soap && later ? "returned -" : "returned 3 for ";
        EXPECT_NE(std::string(rig.message()).find(said), std::string::npos) << rig.message();
        rig.renew_queue();
        EXPECT_TRUE(same_bits(one.all(), before));
      }
}

/* Ranks compare, and checkpoints keep, every hyperparameter. */
TEST(PreconditionChecks, EveryHyperparameterIsAField) {
  const mfsdp_hyper_group shampoo = mfsdp_hyper_group_shampoo(), soap = mfsdp_hyper_group_soap();
  const auto hash = [](const mfsdp_hyper_group &g) {
    return mfsdp__hash_hyper_group(MFSDP_HASH_SEED, &g);
  };
  void (*const shampoo_edits[])(mfsdp_shampoo_desc *) = {
      [](mfsdp_shampoo_desc *d) { d->beta1 = 0.5; },
      [](mfsdp_shampoo_desc *d) { d->beta2 = 0.5; },
      [](mfsdp_shampoo_desc *d) { d->eps = 0.5; },
      [](mfsdp_shampoo_desc *d) { d->update_every = 5; },
      [](mfsdp_shampoo_desc *d) { d->size_limit = 5; },
      [](mfsdp_shampoo_desc *d) { d->graft = MFSDP_GRAFT_SGD; },
      [](mfsdp_shampoo_desc *d) { d->graft_eps = 0.5; }};
  for (const auto edit : shampoo_edits) {
    mfsdp_hyper_group changed = shampoo;
    edit(&changed.shampoo);
    EXPECT_NE(hash(changed), hash(shampoo));
  }
  void (*const soap_edits[])(mfsdp_soap_desc *) = {[](mfsdp_soap_desc *d) { d->beta1 = 0.5; },
                                                   [](mfsdp_soap_desc *d) { d->beta2 = 0.5; },
                                                   [](mfsdp_soap_desc *d) { d->shampoo_beta = 0.5; },
                                                   [](mfsdp_soap_desc *d) { d->eps = 0.5; },
                                                   [](mfsdp_soap_desc *d) { d->update_every = 5; },
                                                   [](mfsdp_soap_desc *d) { d->size_limit = 5; }};
  for (const auto edit : soap_edits) {
    mfsdp_hyper_group changed = soap;
    edit(&changed.soap);
    EXPECT_NE(hash(changed), hash(soap));
  }
  EXPECT_NE(hash(shampoo), hash(soap));
  EXPECT_STREQ(mfsdp_algorithm_kind_name(MFSDP_ALGORITHM_SHAMPOO), "shampoo");
  EXPECT_STREQ(mfsdp_algorithm_kind_name(MFSDP_ALGORITHM_SOAP), "soap");
}

} // namespace
