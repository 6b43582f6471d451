/* SPDX-License-Identifier: MIT */
/* Batched products through the backend's table, on integers, where every order of summation is
 * exact. */
#include "mfsdp/host/host_dense.h"

#include "tests/support/backend_rig.h"

#include <cmath>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;
using test::RigKind;

class HostDense : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostDense, ::testing::ValuesIn(test::rig_kinds()), test::rig_name);

/* A stack of matrices with slack after each row and each matrix. */
struct Stack {
  std::vector<float> all;
  mfsdp_mat mat;
  int64_t batch;
  Stack(int64_t rows, int64_t cols, int64_t slack, int64_t batch_count) : batch(batch_count) {
    mat.data = nullptr;
    mat.rows = rows;
    mat.cols = cols;
    mat.row_stride = cols + slack;
    mat.batch_stride = rows * mat.row_stride + slack;
    all.assign(static_cast<std::size_t>(mat.batch_stride * batch_count), 55.0f);
  }
  float &at(int64_t b, int64_t i, int64_t j) {
    return all[static_cast<std::size_t>(b * mat.batch_stride + i * mat.row_stride + j)];
  }
  void fill(Numbers *numbers, int limit) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < mat.rows; ++i)
        for (int64_t j = 0; j < mat.cols; ++j)
          at(b, i, j) = numbers->integer(limit);
  }
  void make_symmetric() {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < mat.rows; ++i)
        for (int64_t j = 0; j < i; ++j)
          at(b, i, j) = at(b, j, i);
  }
};

float product(Stack *a, int trans_a, Stack *b, int trans_b, int64_t batch, int64_t i, int64_t j) {
  const int64_t k = trans_a ? a->mat.rows : a->mat.cols;
  float sum = 0.0f;
  for (int64_t p = 0; p < k; ++p)
    sum += (trans_a ? a->at(batch, p, i) : a->at(batch, i, p)) *
           (trans_b ? b->at(batch, j, p) : b->at(batch, p, j));
  return sum;
}

struct Case {
  int64_t m, n, k, batch;
};
const Case kCases[] = {{3, 5, 7, 1}, {17, 9, 33, 3}, {1, 1, 1, 2}, {64, 40, 130, 2},
                       {5, 4, 0, 2}, {0, 4, 3, 2},   {4, 0, 3, 2}, {4, 4, 4, 0}};

TEST_P(HostDense, GemmOfEveryShapeAndTransposition) {
  Rig rig(GetParam());
  Numbers numbers(31);
  for (const Case &s : kCases)
    for (int trans = 0; trans < 4; ++trans)
      for (float beta : {0.0f, 1.0f, 2.0f})
        for (int in_place = 0; in_place < 2; ++in_place) {
          const int ta = trans & 1, tb = trans >> 1;
          Stack a(ta ? s.k : s.m, ta ? s.m : s.k, 1, s.batch);
          Stack b(tb ? s.n : s.k, tb ? s.k : s.n, 2, s.batch);
          Stack c(s.m, s.n, in_place ? 3 : 1, s.batch), d(s.m, s.n, 3, s.batch);
          a.fill(&numbers, 3);
          b.fill(&numbers, 3);
          c.fill(&numbers, 4);
          if (in_place) d = c;
          Stack want = d;
          for (int64_t x = 0; x < s.batch; ++x)
            for (int64_t i = 0; i < s.m; ++i)
              for (int64_t j = 0; j < s.n; ++j)
                want.at(x, i, j) = 3.0f * product(&a, ta, &b, tb, x, i, j) + beta * c.at(x, i, j);
          if (beta == 0.0f && !in_place)
            for (float &v : c.all)
              v = NAN;
          Buffer<float> ab(&rig, a.all, 1), bb(&rig, b.all), cb(&rig, c.all), db(&rig, d.all, 2);
          mfsdp_gemm_args args = mfsdp_gemm_args_default();
          a.mat.data = ab.data();
          b.mat.data = bb.data();
          c.mat.data = in_place ? db.data() : cb.data();
          d.mat.data = db.data();
          args.a = a.mat;
          args.b = b.mat;
          args.c = c.mat;
          args.d = d.mat;
          args.batch_count = s.batch;
          args.alpha = 3.0f;
          args.beta = beta;
          args.trans_a = ta;
          args.trans_b = tb;
          ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
          ASSERT_EQ(db.read(), want.all) << s.m << " " << s.n << " " << s.k << " trans " << trans
                                         << " beta " << beta << " in place " << in_place;
          if (!in_place && beta != 0.0f) {
            ASSERT_EQ(cb.read(), c.all);
          }
        }
}

/* Rank-k updates (a is b), and products of commuting symmetric matrices, small and by panels. */
TEST_P(HostDense, SymmetricProductsWriteBothTriangles) {
  Rig rig(GetParam());
  Numbers numbers(32);
  for (int64_t n : {1, 5, 40, 263}) /* panels begin at 256 */
    for (int kind = 0; kind < 6; ++kind)
      for (float beta : {0.0f, 2.0f})
        for (int in_place = 0; in_place < 2; ++in_place) {
          if (n > 100 && (kind == 0 || kind == 4 || (in_place == 1 && beta == 0.0f))) continue;
          const bool rank_k = kind < 2;
          const int ta = rank_k ? kind == 1 : kind >> 1 & 1, tb = rank_k ? !ta : kind & 1;
          const int64_t k = rank_k ? n / 3 + 2 : n, batch = n > 100 ? 1 : 2;
          Stack a(ta ? k : n, ta ? n : k, 1, batch), c(n, n, in_place ? 2 : 1, batch);
          Stack d(n, n, 2, batch);
          a.fill(&numbers, 2);
          if (!rank_k) a.make_symmetric();
          Stack b = a; /* a power of a commutes with a: b = a + 2 I */
          if (!rank_k)
            for (int64_t x = 0; x < batch; ++x)
              for (int64_t i = 0; i < n; ++i)
                b.at(x, i, i) += 2.0f;
          c.fill(&numbers, 4);
          c.make_symmetric();
          if (in_place) d = c;
          Stack want = d;
          for (int64_t x = 0; x < batch; ++x)
            for (int64_t i = 0; i < n; ++i)
              for (int64_t j = 0; j <= i; ++j)
                want.at(x, i, j) = want.at(x, j, i) =
                    product(&a, ta, &b, tb, x, i, j) + beta * c.at(x, i, j);
          if (!in_place && beta == 0.0f)
            for (float &v : c.all)
              v = NAN;
          Buffer<float> ab(&rig, a.all), bb(&rig, b.all), cb(&rig, c.all), db(&rig, d.all);
          mfsdp_gemm_args args = mfsdp_gemm_args_default();
          a.mat.data = ab.data();
          b.mat.data = rank_k ? ab.data() : bb.data();
          c.mat.data = in_place ? db.data() : cb.data();
          d.mat.data = db.data();
          args.a = a.mat;
          args.b = b.mat;
          args.c = c.mat;
          args.d = d.mat;
          args.batch_count = batch;
          args.beta = beta;
          args.trans_a = ta;
          args.trans_b = tb;
          args.symmetric = 1;
          ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
          ASSERT_EQ(db.read(), want.all) << n << " kind " << kind << " beta " << beta;
        }
}

TEST_P(HostDense, SymmetricRealResultsAreExactlySymmetric) {
  Rig rig(GetParam());
  Numbers numbers(33);
  const int64_t n = 70, k = 90;
  Buffer<float> a(&rig, numbers.reals(static_cast<std::size_t>(n * k)));
  Buffer<float> d(&rig, static_cast<std::size_t>(n * n));
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.a = args.b = mfsdp_mat{a.data(), n, k, k, n * k};
  args.d = mfsdp_mat{d.data(), n, n, n, n * n};
  args.trans_b = 1;
  args.symmetric = 1;
  ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK);
  const std::vector<float> got = d.read();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < i; ++j)
      ASSERT_EQ(got[static_cast<std::size_t>(i * n + j)], got[static_cast<std::size_t>(j * n + i)]);
}

/* A batch of three equals three single products, bit for bit: results do not depend on batching. */
TEST_P(HostDense, ABatchEqualsItsParts) {
  Rig rig(GetParam());
  Numbers numbers(34);
  const int64_t n = 50, k = 77, batch = 3;
  Buffer<float> a(&rig, numbers.reals(static_cast<std::size_t>(batch * n * k)));
  Buffer<float> b(&rig, numbers.reals(static_cast<std::size_t>(batch * n * k)));
  Buffer<float> together(&rig, static_cast<std::size_t>(batch * n * n));
  Buffer<float> apart(&rig, static_cast<std::size_t>(batch * n * n));
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.a = mfsdp_mat{a.data(), n, k, k, n * k};
  args.b = mfsdp_mat{b.data(), k, n, n, n * k};
  args.d = mfsdp_mat{together.data(), n, n, n, n * n};
  args.batch_count = batch;
  ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK);
  args.batch_count = 1;
  for (int64_t x = 0; x < batch; ++x) {
    args.a.data = a.data() + x * n * k;
    args.b.data = b.data() + x * n * k;
    args.d.data = apart.data() + x * n * n;
    ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK);
  }
  EXPECT_TRUE(test::same_bits(together.read(), apart.read()));
}

TEST_P(HostDense, GemmSaysWhatIsWrong) {
  Rig rig(GetParam());
  Buffer<float> a(&rig, std::vector<float>(12, 1.0f)), b(&rig, std::vector<float>(20, 1.0f));
  Buffer<float> c(&rig, std::vector<float>(60, 1.0f)), d(&rig, std::vector<float>(60, 9.0f));
  mfsdp_gemm_args good = mfsdp_gemm_args_default();
  good.a = mfsdp_mat{a.data(), 3, 4, 4, 12};
  good.b = mfsdp_mat{b.data(), 4, 5, 5, 20};
  good.c = mfsdp_mat{c.data(), 3, 5, 5, 15};
  good.d = mfsdp_mat{d.data(), 3, 5, 5, 15};
  good.beta = 1.0f;
  struct Fault {
    mfsdp_status status;
    void (*edit)(mfsdp_gemm_args *);
    const char *message;
  };
  const Fault faults[] = {
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->struct_nbytes = 8; }, "struct_nbytes is 8"},
      {MFSDP_E_UNSUPPORTED, [](mfsdp_gemm_args *x) { x->dtype = MFSDP_BF16; }, "dtype bf16"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->batch_count = -1; }, "-1 products"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->a.rows = -3; }, "-3 x 5 x 4"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->b.rows = 3; }, "b is 3 x 5, needs 4 x 5"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->trans_b = 1; },
       "b (transposed) is 4 x 5, needs 4 x 4"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->d.cols = 4; }, "d is 3 x 4, needs 3 x 5"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->c.rows = 4; }, "c is 4 x 5, needs 3 x 5"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->a.row_stride = 3; }, "a has row_stride 3"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->a.batch_stride = -1; }, "batch_stride -1"},
      {MFSDP_E_OVERFLOW, [](mfsdp_gemm_args *x) { x->b.row_stride = INT64_MAX / 3; },
       "extent of b"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->a.data = nullptr; }, "a is NULL"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->d.data = x->a.data; }, "d is a"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->d.data = x->b.data; }, "d is b"},
      {MFSDP_E_ARGUMENT,
       [](mfsdp_gemm_args *x) {
         x->c = x->d;
         x->c.row_stride = 6;
       },
       "c is d, but with other strides"},
      {MFSDP_E_ARGUMENT,
       [](mfsdp_gemm_args *x) {
         x->batch_count = 2;
         x->a.batch_stride = x->b.batch_stride = x->d.batch_stride = 0;
       },
       "d has batch_stride 0"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->symmetric = 1; }, "symmetric, but d is 3 x 5"},
  };
  for (const Fault &fault : faults) {
    mfsdp_gemm_args args = good;
    fault.edit(&args);
    EXPECT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), fault.status) << fault.message;
    EXPECT_NE(std::string(rig.message()).find(fault.message), std::string::npos) << rig.message();
  }
  EXPECT_EQ(rig.ops->gemm(rig.self, nullptr, &good), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.ops->gemm(rig.self, rig.queue, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(d.read(), std::vector<float>(60, 9.0f));
  EXPECT_EQ(rig.ops->gemm(rig.self, rig.queue, &good), MFSDP_OK);
  EXPECT_EQ(d.read()[14], 5.0f);
}

} // namespace
