/* SPDX-License-Identifier: MIT */
/* Batched products through the backend's table, on integers, where every order of summation is
 * exact.
 *
 * One queue at a time, whose races host_queue_test looks for: not run under the thread sanitizer
 * (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/host/host_dense.h"

#include "tests/support/backend_rig.h"

#include <cmath>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;
using test::RigKind;

class HostDense : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostDense, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

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
  for (int64_t n : {1, 5, 40, 67, 263}) /* routes change at 64, 96 and 192 */
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

/* Long rank-k updates are added in slices, squares of a symmetric matrix (a is b, not transposed)
 * take their own routes, and small ones are transposed first: exact on integers, all of them. */
TEST_P(HostDense, RankKOfEveryRoute) {
  Rig rig(GetParam());
  Numbers numbers(36);
  const struct {
    int64_t n, k;
    int symmetric;
  } rows[] = {{3, 300, 0},  {3, 300, 1},   {20, 204, 0},  {20, 205, 1},
              {70, 300, 1}, {100, 149, 1}, {100, 150, 1}, {100, 300, 1}};
  for (const auto &row : rows)
    for (int trans_a = 0; trans_a < 2; ++trans_a) {
      Stack a(trans_a ? row.k : row.n, trans_a ? row.n : row.k, 2, 2), d(row.n, row.n, 1, 2);
      a.fill(&numbers, 2);
      d.fill(&numbers, 3);
      d.make_symmetric();
      Stack want = d;
      for (int64_t x = 0; x < 2; ++x)
        for (int64_t i = 0; i < row.n; ++i)
          for (int64_t j = 0; j < row.n; ++j)
            want.at(x, i, j) =
                2.0f * product(&a, trans_a, &a, !trans_a, x, i, j) + 3.0f * d.at(x, i, j);
      Buffer<float> ab(&rig, a.all), db(&rig, d.all);
      mfsdp_gemm_args args = mfsdp_gemm_args_default();
      a.mat.data = ab.data();
      d.mat.data = db.data();
      args.a = args.b = a.mat;
      args.c = args.d = d.mat;
      args.batch_count = 2;
      args.alpha = 2.0f;
      args.beta = 3.0f;
      args.trans_a = trans_a;
      args.trans_b = !trans_a;
      args.symmetric = row.symmetric;
      ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
      ASSERT_EQ(db.read(), want.all) << row.n << " " << row.k << " trans " << trans_a;
    }
  for (int64_t n : {7, 66, 200})
    for (int trans = 0; trans < 2; ++trans) {
      Stack a(n, n, 1, 1), d(n, n, 0, 1);
      a.fill(&numbers, 2);
      a.make_symmetric();
      Stack want = d;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < n; ++j)
          want.at(0, i, j) = product(&a, 0, &a, 0, 0, i, j) + 2.0f * a.at(0, i, j);
      Buffer<float> ab(&rig, a.all), db(&rig, d.all);
      mfsdp_gemm_args args = mfsdp_gemm_args_default();
      a.mat.data = ab.data();
      d.mat.data = db.data();
      args.a = args.b = args.c = a.mat;
      args.d = d.mat;
      args.beta = 2.0f;
      args.trans_a = args.trans_b = trans;
      args.symmetric = 1;
      ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
      ASSERT_EQ(db.read(), want.all) << n << " trans " << trans;
    }
}

/* Added last, to every matrix of the batch; with an empty product it is beta c + diagonal I. */
TEST_P(HostDense, Diagonal) {
  Rig rig(GetParam());
  Numbers numbers(37);
  for (int64_t n : {1, 9, 70})
    for (int64_t k : {int64_t{0}, n})
      for (int symmetric = 0; symmetric < 2; ++symmetric)
        for (float beta : {0.0f, 1.0f, 2.0f}) {
          Stack a(n, k, 0, 2), c(n, n, 1, 2), d(n, n, 2, 2);
          a.fill(&numbers, 2);
          c.fill(&numbers, 3);
          c.make_symmetric();
          Stack want = d;
          for (int64_t x = 0; x < 2; ++x)
            for (int64_t i = 0; i < n; ++i)
              for (int64_t j = 0; j < n; ++j)
                want.at(x, i, j) = (k > 0 ? product(&a, 0, &a, 1, x, i, j) : 0.0f) +
                                   beta * c.at(x, i, j) + (i == j ? 5.0f : 0.0f);
          Buffer<float> ab(&rig, a.all), cb(&rig, c.all), db(&rig, d.all);
          mfsdp_gemm_args args = mfsdp_gemm_args_default();
          a.mat.data = ab.data();
          c.mat.data = cb.data();
          d.mat.data = db.data();
          args.a = args.b = a.mat;
          args.trans_b = 1;
          args.c = c.mat;
          args.d = d.mat;
          args.batch_count = 2;
          args.beta = beta;
          args.diagonal = 5.0f;
          args.symmetric = symmetric;
          ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
          ASSERT_EQ(db.read(), want.all) << n << " " << k << " beta " << beta;
        }
}

/* bf16 and fp16: integers that fit 8 bits and whose sums fit a float are exact up to the one rounding
 * of the result, which is that of mfsdp_..._from_f32. */
TEST_P(HostDense, SixteenBitProductsRoundOnce) {
  Rig rig(GetParam());
  Numbers numbers(38);
  for (mfsdp_dtype dtype : {MFSDP_BF16, MFSDP_F16})
    for (int trans = 0; trans < 4; ++trans)
      for (int symmetric = 0; symmetric < 2; ++symmetric) {
        if (symmetric && trans != 1 && trans != 2) continue;
        const int ta = trans & 1, tb = trans >> 1;
        const int64_t m = 67, n = symmetric ? m : 35, k = 150;
        Stack a(ta ? k : m, ta ? m : k, 1, 2), b(tb ? n : k, tb ? k : n, 1, 2);
        Stack c(m, n, 1, 2), d(m, n, 2, 2);
        a.fill(&numbers, 3);
        b.fill(&numbers, 3);
        c.fill(&numbers, 4);
        if (symmetric) {
          b = a;
          c.make_symmetric();
        }
        const auto store = [&](float value) {
          return dtype == MFSDP_BF16 ? mfsdp_bf16_from_f32(value) : mfsdp_f16_from_f32(value);
        };
        const auto narrow = [&](const std::vector<float> &x) {
          std::vector<uint16_t> out;
          for (float value : x)
            out.push_back(store(value));
          return out;
        };
        std::vector<uint16_t> want = narrow(d.all);
        for (int64_t x = 0; x < 2; ++x)
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j)
              want[static_cast<std::size_t>(&d.at(x, i, j) - d.all.data())] =
                  store(0.5f * product(&a, ta, &b, tb, x, i, j) + 2.0f * c.at(x, i, j) +
                        (symmetric && i == j ? 3.0f : 0.0f));
        Buffer<uint16_t> ab(&rig, narrow(a.all)), bb(&rig, narrow(b.all)), cb(&rig, narrow(c.all));
        Buffer<uint16_t> db(&rig, narrow(d.all));
        mfsdp_gemm_args args = mfsdp_gemm_args_default();
        a.mat.data = ab.data();
        b.mat.data = symmetric ? ab.data() : bb.data();
        c.mat.data = cb.data();
        d.mat.data = db.data();
        args.a = a.mat;
        args.b = b.mat;
        args.c = c.mat;
        args.d = d.mat;
        args.batch_count = 2;
        args.alpha = 0.5f;
        args.beta = 2.0f;
        args.diagonal = symmetric ? 3.0f : 0.0f;
        args.dtype = dtype;
        args.trans_a = ta;
        args.trans_b = tb;
        args.symmetric = symmetric;
        ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
        ASSERT_EQ(db.read(), want) << mfsdp_dtype_name(dtype) << " trans " << trans;
      }
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
      {MFSDP_E_UNSUPPORTED, [](mfsdp_gemm_args *x) { x->dtype = MFSDP_F64; }, "dtype f64"},
      {MFSDP_E_ARGUMENT, [](mfsdp_gemm_args *x) { x->diagonal = 1.0f; },
       "a diagonal, but d is 3 x 5"},
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
