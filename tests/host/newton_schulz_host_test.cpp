/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz_host.h: bits of the iteration on a host backend, with every kind of memory and math;
 * singular values; what is refused, with the output untouched and before memory is asked for.
 * One thread, no queue of its own (MFSDP_TEST_ONE_QUEUE: not run under the thread sanitizer).
 */
#include "mfsdp/host/newton_schulz_host.h"

#include "tests/ref/newton_schulz_ref.h"
#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

struct Shape {
  int64_t rows, cols;
};

std::size_t count_of(Shape shape) {
  return static_cast<std::size_t>(shape.rows * shape.cols);
}

std::size_t workspace_of(const mfsdp_newton_schulz_desc &desc, Shape shape, int64_t batch = 1) {
  std::size_t nbytes = 0;
  EXPECT_EQ(mfsdp_newton_schulz_batch_workspace_nbytes(nullptr, &desc, shape.rows, shape.cols,
                                                       batch, &nbytes),
            MFSDP_OK);
  return nbytes;
}

class NewtonSchulzHost : public ::testing::TestWithParam<test::RigKind> {
protected:
  NewtonSchulzHost() : rig_(GetParam()) {}

  /* On the host backend, by its queue. */
  std::vector<float> by_backend(const mfsdp_newton_schulz_desc &desc, Shape shape,
                                const std::vector<float> &input) {
    Buffer<float> in(&rig_, input), out(&rig_, input.size());
    Buffer<unsigned char> workspace(&rig_, workspace_of(desc, shape));
    EXPECT_EQ(mfsdp_newton_schulz(&rig_.context, rig_.backend, rig_.queue, &desc, shape.rows,
                                  shape.cols, in.data(), out.data(), workspace.data(),
                                  workspace.count()),
              MFSDP_OK)
        << rig_.message();
    return out.read();
  }

  Rig rig_;
};

/* Each form; iterates that need a cast at the end and that do not. */
TEST_P(NewtonSchulzHost, HasTheBitsOfTheHostBackend) {
  const struct {
    Shape shape;
    mfsdp_newton_schulz_form form;
  } cases[] = {{{1, 1}, MFSDP_NS_AUTO},
               {{40, 33}, MFSDP_NS_PLAIN},
               {{33, 40}, MFSDP_NS_SYMMETRIC},
               {{6, 30}, MFSDP_NS_GRAM}};
  for (const auto &c : cases)
    for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16}) {
      const Shape shape = c.shape;
      mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
      desc.form = c.form;
      desc.dtype = dtype;
      const std::vector<float> g = test::Numbers(3).reals(count_of(shape));
      const std::vector<float> want = by_backend(desc, shape, g);
      std::vector<float> out(g.size(), -1.0f);
      const auto call = [&](mfsdp_context *context, const float *in, float *to, void *workspace,
                            std::size_t nbytes) {
        return mfsdp_host_newton_schulz(context, GetParam().math, &desc, shape.rows, shape.cols, in,
                                        to, workspace, nbytes);
      };
      ASSERT_EQ(call(nullptr, g.data(), out.data(), nullptr, 0), MFSDP_OK);
      EXPECT_TRUE(same_bits(out, want)) << shape.rows << "x" << shape.cols << " alone, " << dtype;

      std::vector<float> in_place = g;
      ASSERT_EQ(call(&rig_.context, in_place.data(), in_place.data(), nullptr, 0), MFSDP_OK);
      EXPECT_TRUE(same_bits(in_place, want)) << shape.rows << "x" << shape.cols << " in place";

      Buffer<unsigned char> workspace(&rig_, workspace_of(desc, shape));
      workspace.fill(0xff);
      std::fill(out.begin(), out.end(), -1.0f);
      ASSERT_EQ(call(nullptr, g.data(), out.data(), workspace.data(), workspace.count()), MFSDP_OK);
      EXPECT_TRUE(same_bits(out, want)) << shape.rows << "x" << shape.cols << " own workspace";
    }
}

TEST_P(NewtonSchulzHost, ABatchHasTheBitsOfItsMatrices) {
  const Shape shape = {24, 18};
  const int64_t batch = 3, in_stride = 440, out_stride = 450;
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  const std::vector<float> in = test::Numbers(4).reals(batch * in_stride);
  const std::vector<float> before(batch * out_stride, -1.0f);
  std::vector<float> want = before, out = before;
  for (int64_t i = 0; i < batch; ++i) {
    const auto first = in.begin() + i * in_stride;
    const std::vector<float> one =
        by_backend(desc, shape, std::vector<float>(first, first + shape.rows * shape.cols));
    std::copy(one.begin(), one.end(), want.begin() + i * out_stride);
  }
  ASSERT_EQ(mfsdp_host_newton_schulz_batch(&rig_.context, GetParam().math, &desc, shape.rows,
                                           shape.cols, batch, in.data(), in_stride, out.data(),
                                           out_stride, nullptr, 0),
            MFSDP_OK)
      << rig_.message();
  EXPECT_TRUE(same_bits(out, want)) << "gaps between the matrices included";
  EXPECT_EQ(rig_.context.counters.newton_schulz_count, 6u); /* three of them by the backend */
}

std::vector<test::RigKind> maths() {
  std::vector<test::RigKind> kinds = test::rig_kinds();
  kinds.erase(std::remove_if(
                  kinds.begin(), kinds.end(),
                  [](const test::RigKind &k) { return k.queue_kind != MFSDP_HOST_QUEUE_INLINE; }),
              kinds.end());
  return kinds;
}
INSTANTIATE_TEST_SUITE_P(Maths, NewtonSchulzHost, ::testing::ValuesIn(maths()), test::rig_name);

/* Each is the polynomial of one of the input's. They move by at most the error's norm: 1e-5 (the
 * promise of newton_schulz_test for such input) times |Y|_F <= 1.134 sqrt(24). */
TEST(NewtonSchulzHostValues, SingularValuesAreThePolynomials) {
  const Shape shape = {24, 31};
  const std::vector<float> g = ref::narrow(ref::matrix_with_singular_values(
      shape.rows, shape.cols, ref::spectrum_log_uniform(24, 0.1), 5, 8));
  std::vector<double> sigma = ref::singular_values(ref::widen(g), shape.rows, shape.cols);
  const double norm = ref::frobenius_norm(ref::widen(g));
  for (double &value : sigma)
    value = ref::polynomial(value / norm, ref::coefficients_jordan());
  std::sort(sigma.begin(), sigma.end(), std::greater<double>());
  const mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_default();
  std::vector<float> out(g.size());
  ASSERT_EQ(mfsdp_host_newton_schulz(nullptr, nullptr, &desc, shape.rows, shape.cols, g.data(),
                                     out.data(), nullptr, 0),
            MFSDP_OK);
  EXPECT_LE(
      ref::max_difference(ref::singular_values(ref::widen(out), shape.rows, shape.cols), sigma),
      1e-5 * 5.6);
}

/* Constant rows in bf16: lengths at which cans5, as published, was not finite (7), and cubic5 turned the
 * sign (1686). At most 1.3, the higher of what the two promise, and 4 u of bf16 (tests/newton_schulz). */
TEST(NewtonSchulzHostValues, ConstantRowsInSixteenBits) {
  for (mfsdp_ns_set set : {MFSDP_NS_SET_CANS5, MFSDP_NS_SET_CUBIC5})
    for (int64_t length : {7, 1686}) {
      mfsdp_newton_schulz_desc desc = mfsdp_newton_schulz_desc_of(set);
      desc.dtype = MFSDP_BF16;
      desc.form = MFSDP_NS_PLAIN;
      const std::vector<float> g(static_cast<std::size_t>(length), 1.0f);
      std::vector<float> out(g.size());
      ASSERT_EQ(mfsdp_host_newton_schulz(nullptr, nullptr, &desc, 1, length, g.data(), out.data(),
                                         nullptr, 0),
                MFSDP_OK);
      double sum = 0.0;
      for (float value : out)
        sum += static_cast<double>(value);
      EXPECT_GT(sum, 0.0) << mfsdp_ns_set_name(set) << " " << length;
      EXPECT_LE(ref::frobenius_norm(ref::widen(out)), 1.3 * (1.0 + 4.0 / 256))
          << mfsdp_ns_set_name(set) << " " << length;
    }
}

/* ---- memory and refusals, in C loops ---- */

class NewtonSchulzHostRules : public ::testing::Test {
protected:
  NewtonSchulzHostRules() {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    EXPECT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  ~NewtonSchulzHostRules() override {
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(memory_.complaints(), "");
  }

  /* Nothing was allocated or written; the same without a context, where there is no message. */
  void refused(mfsdp_status want, const std::string &part) {
    const auto same = [this](mfsdp_context *context) {
      return mfsdp_host_newton_schulz_batch(context, math_, desc_given_, rows_, cols_, batch_, in_,
                                            in_stride_, out_, out_stride_, workspace_,
                                            workspace_nbytes_);
    };
    memory_.fail_at(-1);
    EXPECT_EQ(same(&context_), want);
    EXPECT_NE(message().find(part), std::string::npos) << message();
    EXPECT_EQ(memory_.alloc_count(), 0) << part;
    EXPECT_EQ(same(nullptr), want);
    EXPECT_EQ(x_, before_);
    EXPECT_EQ(y_, before_);
    EXPECT_EQ(context_.counters.newton_schulz_count, 0u);
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }

  test::FaultAllocator memory_;
  mfsdp_context context_;
  mfsdp_newton_schulz_desc desc_ = mfsdp_newton_schulz_desc_default();
  const std::vector<float> before_ = std::vector<float>(64, 2.0f);
  std::vector<float> x_ = before_, y_ = before_;
  const mfsdp_host_math *math_ = nullptr;
  const mfsdp_newton_schulz_desc *desc_given_ = &desc_;
  int64_t rows_ = 4, cols_ = 4, batch_ = 1, in_stride_ = 16, out_stride_ = 16;
  const float *in_ = x_.data();
  float *out_ = y_.data();
  void *workspace_ = nullptr;
  std::size_t workspace_nbytes_ = 0;
};

TEST_F(NewtonSchulzHostRules, NullPointers) {
  desc_given_ = nullptr;
  refused(MFSDP_E_ARGUMENT, "desc is NULL");
  desc_given_ = &desc_;
  in_ = nullptr;
  refused(MFSDP_E_ARGUMENT, "in is NULL");
  in_ = x_.data();
  out_ = nullptr;
  refused(MFSDP_E_ARGUMENT, "out is NULL");
  out_ = y_.data();
  workspace_nbytes_ = 4096; /* as after a malloc that failed */
  refused(MFSDP_E_ARGUMENT, "workspace is NULL");
}

TEST_F(NewtonSchulzHostRules, MathWithoutARoutine) {
  mfsdp_host_math math = *mfsdp_host_math_loops();
  math_ = &math;
  math.ssyrk = nullptr;
  refused(MFSDP_E_ARGUMENT, "math needs sgemm and ssyrk");
  math = *mfsdp_host_math_loops();
  math.struct_nbytes = 0;
  refused(MFSDP_E_ARGUMENT, "math needs sgemm and ssyrk");
}

TEST_F(NewtonSchulzHostRules, Shapes) {
  cols_ = -1;
  refused(MFSDP_E_ARGUMENT, "4 x -1");
  cols_ = rows_ = INT64_C(1) << 31; /* 2^62 elements: their bytes */
  refused(MFSDP_E_OVERFLOW, "overflows size_t");
  cols_ = rows_ = 4;
  batch_ = -1;
  refused(MFSDP_E_ARGUMENT, "batch_count is -1");
  batch_ = 2;
  in_stride_ = 15;
  refused(MFSDP_E_ARGUMENT, "the strides are 15 and 16");
  in_stride_ = INT64_MAX;
  refused(MFSDP_E_OVERFLOW, "overflow size_t");
}

TEST_F(NewtonSchulzHostRules, Overlap) {
  out_ = x_.data() + 15;
  refused(MFSDP_E_ARGUMENT, "in and out overlap");
  out_ = reinterpret_cast<float *>(reinterpret_cast<unsigned char *>(y_.data()) + 2);
  refused(MFSDP_E_ARGUMENT, "out is not aligned to its floats");
}

TEST_F(NewtonSchulzHostRules, SettingsThatAreNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  double table[1][3] = {{1.0, nan, 0.0}};
  desc_.coefficients = table;
  desc_.coefficient_count = 1;
  refused(MFSDP_E_ARGUMENT, "coefficients[0][1] is");
  table[0][1] = infinity;
  refused(MFSDP_E_ARGUMENT, "coefficients[0][1] is inf");
  desc_ = mfsdp_newton_schulz_desc_default();
  desc_.norm_factor = nan;
  refused(MFSDP_E_ARGUMENT, "norm_factor is");
  desc_ = mfsdp_newton_schulz_desc_default();
  desc_.norm_rule = MFSDP_NORM_ADD_EPS;
  desc_.eps = infinity;
  refused(MFSDP_E_ARGUMENT, "eps is inf");
}

TEST_F(NewtonSchulzHostRules, TheCallersWorkspace) {
  const std::size_t nbytes = workspace_of(desc_, {4, 4});
  std::vector<unsigned char> bytes(nbytes + 2 * MFSDP_ALIGN_NBYTES);
  const std::size_t over = reinterpret_cast<std::uintptr_t>(bytes.data()) % MFSDP_ALIGN_NBYTES;
  unsigned char *aligned = bytes.data() + MFSDP_ALIGN_NBYTES - over;
  workspace_ = aligned;
  workspace_nbytes_ = nbytes - 1;
  refused(MFSDP_E_ARGUMENT,
          "has " + std::to_string(nbytes - 1) + " bytes, needs " + std::to_string(nbytes));
  workspace_nbytes_ = 0;
  refused(MFSDP_E_ARGUMENT, "the workspace has 0 bytes");
  workspace_ = aligned + 8;
  workspace_nbytes_ = nbytes;
  refused(MFSDP_E_ARGUMENT, "not aligned to 256 bytes");

  memory_.fail_at(0); /* it would be refused: nothing is asked for */
  EXPECT_EQ(mfsdp_host_newton_schulz(&context_, nullptr, &desc_, 4, 4, in_, out_, aligned, nbytes),
            MFSDP_OK)
      << message();
  EXPECT_EQ(memory_.alloc_count(), 0);
  EXPECT_NE(y_, before_);
}

/* One allocation of what the query says, booked and given back. */
TEST_F(NewtonSchulzHostRules, TheContextsAllocator) {
  memory_.fail_at(0);
  EXPECT_EQ(mfsdp_host_newton_schulz(&context_, nullptr, &desc_, 4, 4, in_, out_, nullptr, 0),
            MFSDP_E_MEMORY);
  EXPECT_EQ(message(), "newton_schulz: the allocator refused " +
                           std::to_string(workspace_of(desc_, {4, 4})) + " bytes of workspace");
  EXPECT_EQ(y_, before_);
  memory_.fail_at(-1);
  EXPECT_EQ(mfsdp_host_newton_schulz(&context_, nullptr, &desc_, 4, 4, in_, out_, nullptr, 0),
            MFSDP_OK)
      << message();
  EXPECT_EQ(memory_.alloc_count(), 1);
  EXPECT_EQ(context_.peak_nbytes[MFSDP_MEMORY_WORKSPACE], workspace_of(desc_, {4, 4}));
  EXPECT_EQ(context_.total_nbytes, 0u);
  EXPECT_EQ(memory_.live_count(), 0u);
  EXPECT_EQ(context_.counters.newton_schulz_count, 1u);
}

TEST_F(NewtonSchulzHostRules, NothingToDo) {
  for (const Shape &shape : {Shape{0, 4}, Shape{4, 0}, Shape{0, 0}})
    EXPECT_EQ(mfsdp_host_newton_schulz(&context_, nullptr, &desc_, shape.rows, shape.cols, nullptr,
                                       nullptr, nullptr, 0),
              MFSDP_OK)
        << message();
  EXPECT_EQ(mfsdp_host_newton_schulz_batch(&context_, nullptr, &desc_, 4, 4, 0, nullptr, 0, nullptr,
                                           0, nullptr, 0),
            MFSDP_OK)
      << message();
  EXPECT_EQ(memory_.alloc_count(), 0);
  EXPECT_EQ(context_.counters.newton_schulz_count, 0u);
}

} // namespace
