/* SPDX-License-Identifier: MIT */
/* The element-wise entries through the backend's table: what any backend must give, bit for bit.
 *
 * One queue at a time, whose races host_queue_test looks for: not run under the thread sanitizer
 * (MFSDP_TEST_ONE_QUEUE).
 */
#include "mfsdp/host/host_ops.h"

#include "tests/ref/adamw_ref.h"
#include "tests/support/backend_rig.h"

#include <algorithm>
#include <cmath>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;
using test::RigKind;
using test::same_bits;

class HostOps : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostOps, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

/* Ragged lengths: nothing, one, around vectors, around the chunk of 1024, several chunks. */
const std::size_t kCounts[] = {0, 1, 7, 16, 31, 1023, 1024, 1025, 3000};
const mfsdp_dtype kDtypes[] = {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16};

/* Raw storage of any dtype, as bytes. `elements` doubles rounded by dtype.h, which has its own
 * test. */
std::vector<unsigned char> encode(const std::vector<double> &elements, mfsdp_dtype dtype) {
  std::vector<unsigned char> bytes(elements.size() * mfsdp_dtype_nbytes(dtype));
  for (std::size_t i = 0; i < elements.size(); ++i)
    mfsdp_element_set(bytes.data(), dtype, static_cast<int64_t>(i), elements[i]);
  return bytes;
}

/* Values of all magnitudes, signs and kinds. */
std::vector<double> assorted(std::size_t count) {
  Numbers numbers(count + 11);
  const double special[] = {0.0,    -0.0,  1.0,    INFINITY, -INFINITY, 65519.9, 65520.0,
                            3.4e38, 1e-40, 5.9e-8, -2.9e-8,  1e-310,    1e300};
  std::vector<double> out(count);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = i % 5 == 4 ? special[i / 5 % 13]
                        : std::ldexp(numbers.uniform(), static_cast<int>(numbers.bits() % 60) - 30);
  return out;
}

/* ---- copy, fill, cast ---- */

TEST_P(HostOps, CopyAndFill) {
  Rig rig(GetParam());
  for (std::size_t count : kCounts) {
    Buffer<unsigned char> x(&rig, count, 3);
    ASSERT_EQ(rig.ops->fill_bytes(rig.self, rig.queue, x.data(), 0xff, count), MFSDP_OK);
    EXPECT_EQ(x.read(), std::vector<unsigned char>(count, 0xff));
    ASSERT_EQ(rig.ops->fill_bytes(rig.self, rig.queue, x.data(), 0, count), MFSDP_OK);
    EXPECT_EQ(x.read(), std::vector<unsigned char>(count, 0));
  }
  EXPECT_EQ(
      rig.ops->copy(rig.self, rig.queue, nullptr, MFSDP_SPACE_HOST, nullptr, MFSDP_SPACE_DEVICE, 0),
      MFSDP_OK);
  EXPECT_EQ(rig.ops->fill_bytes(rig.self, rig.queue, nullptr, 1, 0), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

TEST_P(HostOps, CastBetweenAllDtypes) {
  Rig rig(GetParam());
  for (mfsdp_dtype from : kDtypes)
    for (mfsdp_dtype to : kDtypes)
      for (std::size_t count : kCounts) {
        const std::vector<unsigned char> input = encode(assorted(count), from);
        std::vector<double> values(count);
        for (std::size_t i = 0; i < count; ++i)
          values[i] = mfsdp_element_get(input.data(), from, static_cast<int64_t>(i));
        /* Offsets of one element: every alignment that the dtype allows. */
        const std::size_t a = mfsdp_dtype_nbytes(from), b = mfsdp_dtype_nbytes(to);
        Buffer<unsigned char> src(&rig, input, a), dst(&rig, count * b, b);
        ASSERT_EQ(rig.ops->cast(rig.self, rig.queue, dst.data(), to, src.data(), from,
                                static_cast<int64_t>(count)),
                  MFSDP_OK);
        ASSERT_TRUE(same_bits(dst.read(), encode(values, to)))
            << mfsdp_dtype_name(from) << " to " << mfsdp_dtype_name(to) << " " << count;
      }
  EXPECT_EQ(rig.ops->cast(rig.self, rig.queue, nullptr, MFSDP_F32, nullptr, MFSDP_F16, 0),
            MFSDP_OK);
}

TEST_P(HostOps, CastKeepsNan) {
  Rig rig(GetParam());
  for (mfsdp_dtype from : kDtypes)
    for (mfsdp_dtype to : kDtypes) {
      Buffer<unsigned char> src(&rig, encode(std::vector<double>(37, std::nan("")), from));
      Buffer<unsigned char> dst(&rig, 37 * mfsdp_dtype_nbytes(to));
      ASSERT_EQ(rig.ops->cast(rig.self, rig.queue, dst.data(), to, src.data(), from, 37), MFSDP_OK);
      const std::vector<unsigned char> got = dst.read();
      for (int64_t i = 0; i < 37; ++i)
        ASSERT_TRUE(std::isnan(mfsdp_element_get(got.data(), to, i)));
    }
}

/* ---- ordered sums ---- */

/* The chain, one addition at a time. volatile: every partial sum is a float in memory. */
std::vector<float> chain(const std::vector<float> *acc,
                         const std::vector<std::vector<unsigned char>> &terms, mfsdp_dtype dtype,
                         std::size_t count) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    volatile float sum = acc != nullptr ? (*acc)[i] : 0.0f;
    for (std::size_t t = 0; t < terms.size(); ++t) {
      const float x =
          static_cast<float>(mfsdp_element_get(terms[t].data(), dtype, static_cast<int64_t>(i)));
      if (acc == nullptr && t == 0)
        sum = x; /* not 0 + x: the sign of a zero is kept */
      else
        sum = sum + x;
    }
    out[i] = sum;
  }
  return out;
}

TEST_P(HostOps, SumTermsIsThePlainChainInItsOrder) {
  Rig rig(GetParam());
  Numbers numbers(7);
  const mfsdp_dtype dtypes[] = {MFSDP_F32, MFSDP_BF16, MFSDP_F16};
  const int term_counts[] = {1, 2, 3, 4, 5, 8, 47, 48, 49, 64, 97};
  for (mfsdp_dtype dtype : dtypes)
    for (int term_count : term_counts)
      for (std::size_t count : {std::size_t(1), std::size_t(31), std::size_t(1025)})
        for (int first = 0; first < 2; ++first) {
          std::vector<std::vector<unsigned char>> inputs;
          std::vector<std::unique_ptr<Buffer<unsigned char>>> buffers;
          std::vector<const void *> terms;
          for (int t = 0; t < term_count; ++t) {
            std::vector<double> values(count);
            for (double &x : values)
              x = numbers.uniform() * std::ldexp(1.0, t % 9 - 4);
            values[0] = -0.0;
            inputs.push_back(encode(values, dtype));
            buffers.emplace_back(new Buffer<unsigned char>(
                &rig, inputs.back(), static_cast<std::size_t>(t % 3) * mfsdp_dtype_nbytes(dtype)));
            terms.push_back(buffers.back()->data());
          }
          const std::vector<float> start = numbers.reals(count);
          Buffer<float> acc(&rig, start, static_cast<std::size_t>(term_count % 4));
          ASSERT_EQ(rig.ops->sum_terms(rig.self, rig.queue, acc.data(), first, terms.data(), dtype,
                                       term_count, static_cast<int64_t>(count)),
                    MFSDP_OK);
          /* The table of pointers was copied. */
          std::fill(terms.begin(), terms.end(), nullptr);
          const std::vector<float> want = chain(first ? nullptr : &start, inputs, dtype, count);
          ASSERT_TRUE(same_bits(acc.read(), want)) << mfsdp_dtype_name(dtype) << " " << term_count
                                                   << " x " << count << " first " << first;
        }
}

TEST_P(HostOps, SumTermsInAnotherOrderGivesOtherBits) {
  /* 2^24 + 1 rounds to 2^24, but 1 + 1 + 2^24 does not lose the two. */
  Rig rig(GetParam());
  const float big = 16777216.0f;
  Buffer<float> x(&rig, std::vector<float>(1, big)), y(&rig, std::vector<float>(1, 1.0f)),
      z(&rig, std::vector<float>(1, 1.0f)), acc(&rig, 1);
  const void *rank_order[] = {x.data(), y.data(), z.data()};
  const void *other_order[] = {y.data(), z.data(), x.data()};
  ASSERT_EQ(rig.ops->sum_terms(rig.self, rig.queue, acc.data(), 1, rank_order, MFSDP_F32, 3, 1),
            MFSDP_OK);
  EXPECT_EQ(acc.read()[0], big);
  ASSERT_EQ(rig.ops->sum_terms(rig.self, rig.queue, acc.data(), 1, other_order, MFSDP_F32, 3, 1),
            MFSDP_OK);
  EXPECT_EQ(acc.read()[0], big + 2.0f);
}

/* ---- sums of squares ---- */

TEST_P(HostOps, SumsqIsExactWhereTheSumIs) {
  Rig rig(GetParam());
  Numbers numbers(9);
  for (std::size_t count : kCounts) {
    const std::vector<float> x = numbers.integers(count, 1000);
    double want = 0.0; /* integers below 2^53: every order gives the same */
    for (float v : x)
      want += static_cast<double>(v) * static_cast<double>(v);
    Buffer<float> acc(&rig, x, 1);
    Buffer<double> slots(&rig, std::vector<double>(3, -1.0));
    const mfsdp_block whole = {0, static_cast<int64_t>(count), 1, 0};
    const mfsdp_block nothing = {0, 0, 2, 0};
    Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{whole, nothing});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 2),
              MFSDP_OK);
    EXPECT_EQ(slots.read(), (std::vector<double>{-1.0, want, 0.0})) << count;
  }
}

TEST_P(HostOps, SumsqOfABlockDependsOnItsValuesOnly) {
  Rig rig(GetParam());
  Numbers numbers(10);
  const std::vector<float> x = numbers.reals(777);
  double first = 0.0, reference = 0.0;
  for (float v : x)
    reference += static_cast<double>(v) * static_cast<double>(v);
  for (std::size_t offset = 0; offset < 9; ++offset) {
    std::vector<float> all(offset, 5.0f);
    all.insert(all.end(), x.begin(), x.end());
    all.resize(900, 7.0f);
    Buffer<float> acc(&rig, all, offset % 4);
    Buffer<double> slots(&rig, 1);
    const mfsdp_block block = {static_cast<int64_t>(offset), 777, 0, 0};
    Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{block});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 1),
              MFSDP_OK);
    const double got = slots.read()[0];
    if (offset == 0) first = got;
    EXPECT_EQ(got, first) << offset;
    /* Two orders of 777 additions of positive numbers: 2 * 777 * 2^-53 is 1.8e-13. */
    EXPECT_NEAR(got, reference, 2e-13 * reference);
  }
}

TEST_P(HostOps, SumsqOfExtremeValues) {
  Rig rig(GetParam());
  for (float v : {1e-38f, 1e-45f, 3e38f}) {
    Buffer<float> acc(&rig, std::vector<float>(64, v));
    Buffer<double> slots(&rig, 1);
    const mfsdp_block block = {0, 64, 0, 0};
    Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{block});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 1),
              MFSDP_OK);
    const double square = static_cast<double>(v) * static_cast<double>(v);
    EXPECT_EQ(slots.read()[0], 64.0 * square); /* a power of two times: no rounding */
    EXPECT_GT(slots.read()[0], 0.0);
  }
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    std::vector<float> x(100, 1.0f);
    x[61] = bad;
    Buffer<float> acc(&rig, x);
    Buffer<double> slots(&rig, 1);
    const mfsdp_block block = {0, 100, 0, 0};
    Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{block});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 1),
              MFSDP_OK);
    EXPECT_FALSE(std::isfinite(slots.read()[0]));
  }
}

TEST_P(HostOps, ABlockThatMakesNoSenseFailsTheQueue) {
  Rig rig(GetParam());
  const mfsdp_block bad[] = {{-1, 1, 0, 0}, {0, -4, 0, 0}, {0, 1, -1, 0}};
  for (const mfsdp_block &block : bad) {
    Buffer<float> acc(&rig, std::vector<float>(4, 1.0f));
    Buffer<double> slots(&rig, 1);
    Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{block});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 1),
              MFSDP_OK);
    EXPECT_EQ(rig.sync(), MFSDP_E_ARGUMENT);
    EXPECT_NE(std::string(rig.message()).find("sumsq: block 0 has first"), std::string::npos);
    rig.renew_queue();
  }
}

/* ---- normalization ---- */

mfsdp_normalize_args normalize_args(Buffer<float> *src, void *dst, mfsdp_dtype dtype,
                                    Buffer<double> *scratch, mfsdp_norm_rule rule, double eps) {
  mfsdp_normalize_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.dst = dst;
  args.src = src->data();
  args.scratch = scratch->data();
  args.count = static_cast<int64_t>(src->count());
  args.batch_count = 1;
  args.dst_dtype = dtype;
  args.rule = rule;
  args.eps = eps;
  args.gain = 1.0;
  return args;
}

double norm_of(const std::vector<float> &x) {
  double sum = 0.0;
  for (float v : x)
    sum += static_cast<double>(v) * static_cast<double>(v);
  return std::sqrt(sum);
}

TEST_P(HostOps, NormalizeByEachRuleAtEverySize) {
  Rig rig(GetParam());
  Numbers numbers(12);
  Buffer<double> scratch(&rig, MFSDP_NORMALIZE_SCRATCH_COUNT);
  const std::vector<float> base = numbers.reals(1500);
  for (double size : {1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e38})
    for (int rule = 1; rule <= 3; ++rule) {
      std::vector<float> x(base.size());
      for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<float>(static_cast<double>(base[i]) * size);
      const double eps = 1e-7, norm = norm_of(x);
      const double divisor = rule == MFSDP_NORM_SCALE_SAFE ? norm
                             : rule == MFSDP_NORM_MAX_EPS  ? std::max(norm, eps)
                                                           : norm + eps;
      Buffer<float> src(&rig, x, 1), dst(&rig, x.size(), 2);
      mfsdp_normalize_args args = normalize_args(&src, dst.data(), MFSDP_F32, &scratch,
                                                 static_cast<mfsdp_norm_rule>(rule), eps);
      args.gain = 0.5;
      ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
      const std::vector<float> got = dst.read();
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double want = 0.5 * static_cast<double>(x[i]) / divisor;
        /* One rounding to float, half a unit, and a few in double. */
        ASSERT_NEAR(got[i], want, std::fabs(want) * 6.0e-8 + 1e-45) << size << " rule " << rule;
      }
      if (rule == MFSDP_NORM_SCALE_SAFE) {
        /* 1500 errors of 2^-24 each, of random sign, and as many in the sum. */
        EXPECT_NEAR(norm_of(got), 0.5, 1e-7) << size;
      }
    }
}

TEST_P(HostOps, NormalizeIsScaleFreeUpToRounding) {
  Rig rig(GetParam());
  Numbers numbers(13);
  Buffer<double> scratch(&rig, MFSDP_NORMALIZE_SCRATCH_COUNT);
  const std::vector<float> base = numbers.reals(400);
  std::vector<float> first;
  for (int power :
       {0, -90, -40, 40, 90}) { /* powers of two: the input is scaled without rounding */
    std::vector<float> x(base.size());
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = std::ldexp(base[i], power);
    Buffer<float> src(&rig, x), dst(&rig, x.size());
    mfsdp_normalize_args args =
        normalize_args(&src, dst.data(), MFSDP_F32, &scratch, MFSDP_NORM_SCALE_SAFE, 0.0);
    ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK);
    if (power == 0) first = dst.read();
    EXPECT_TRUE(same_bits(dst.read(), first)) << power;
  }
}

TEST_P(HostOps, NormalizeOfZeroIsZeroAndOfNanIsNan) {
  Rig rig(GetParam());
  Buffer<double> scratch(&rig, MFSDP_NORMALIZE_SCRATCH_COUNT);
  for (int rule = 1; rule <= 3; ++rule)
    for (double eps : {0.0, 1e-7}) {
      Buffer<float> src(&rig, std::vector<float>(50, 0.0f)), dst(&rig, 50);
      mfsdp_normalize_args args = normalize_args(&src, dst.data(), MFSDP_F32, &scratch,
                                                 static_cast<mfsdp_norm_rule>(rule), eps);
      ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK);
      EXPECT_EQ(dst.read(), std::vector<float>(50, 0.0f));
      for (float bad : {INFINITY, -INFINITY, NAN}) {
        std::vector<float> x(50, 2.0f);
        x[33] = bad;
        src.write(x);
        ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK);
        for (float v : dst.read())
          ASSERT_TRUE(std::isnan(v));
      }
    }
  /* Nothing at all is legal, with NULL. */
  mfsdp_normalize_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.dst_dtype = MFSDP_F32;
  args.rule = MFSDP_NORM_SCALE_SAFE;
  args.batch_count = 3;
  EXPECT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

TEST_P(HostOps, NormalizeBatchesInPlaceAndToOtherDtypes) {
  Rig rig(GetParam());
  Numbers numbers(14);
  const int64_t count = 1100, stride = 1203, batch = 3;
  const std::vector<float> x = numbers.reals(static_cast<std::size_t>(stride * batch));
  Buffer<double> scratch(&rig, MFSDP_NORMALIZE_SCRATCH_COUNT * static_cast<std::size_t>(batch));
  std::vector<float> want = x; /* gaps between the matrices stay as they were */
  for (int64_t b = 0; b < batch; ++b) {
    Buffer<float> src(&rig,
                      std::vector<float>(x.begin() + b * stride, x.begin() + b * stride + count));
    Buffer<float> dst(&rig, static_cast<std::size_t>(count));
    mfsdp_normalize_args one =
        normalize_args(&src, dst.data(), MFSDP_F32, &scratch, MFSDP_NORM_SCALE_SAFE, 0.0);
    ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &one), MFSDP_OK);
    const std::vector<float> got = dst.read();
    std::copy(got.begin(), got.end(), want.begin() + b * stride);
  }
  Buffer<float> in_place(&rig, x, 1);
  mfsdp_normalize_args args =
      normalize_args(&in_place, in_place.data(), MFSDP_F32, &scratch, MFSDP_NORM_SCALE_SAFE, 0.0);
  args.count = count;
  args.batch_count = batch;
  args.src_stride = args.dst_stride = stride;
  ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK);
  EXPECT_TRUE(same_bits(in_place.read(), want));
  for (mfsdp_dtype dtype : kDtypes) {
    Buffer<float> src(&rig, x);
    Buffer<unsigned char> dst(&rig,
                              static_cast<std::size_t>(stride * batch) * mfsdp_dtype_nbytes(dtype));
    args.src = src.data();
    args.dst = dst.data();
    args.dst_dtype = dtype;
    ASSERT_EQ(rig.ops->normalize(rig.self, rig.queue, &args), MFSDP_OK);
    const std::vector<unsigned char> got = dst.read();
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < count; ++i) {
        double value = static_cast<double>(want[static_cast<std::size_t>(b * stride + i)]);
        unsigned char narrow[8];
        mfsdp_element_set(narrow, dtype, 0, value);
        ASSERT_EQ(mfsdp_element_get(got.data(), dtype, b * stride + i),
                  mfsdp_element_get(narrow, dtype, 0));
      }
  }
}

/* ---- fused optimizer passes ---- */

/* A group's scalars, two tensors, and everything that a pass may touch. */
struct FusedCase {
  Rig *rig;
  std::vector<std::size_t> counts;
  std::size_t offset;
  std::vector<std::unique_ptr<Buffer<float>>> master, grad, state0, state1, direction;
  std::vector<std::unique_ptr<Buffer<unsigned char>>> param;
  std::vector<mfsdp_dtype> param_dtype;
  Buffer<mfsdp_step_scalars> scalars;
  Buffer<uint32_t> present;
  std::unique_ptr<Buffer<mfsdp_fused_item>> items;
  mfsdp_fused_args args;

  FusedCase(Rig *r, std::size_t shift, const std::vector<mfsdp_dtype> &dtypes, uint64_t seed = 21)
      : rig(r), counts({1500, 33, 0}), offset(shift), param_dtype(dtypes), scalars(r, 1),
        present(r, std::vector<uint32_t>{1, 1, 1}) {
    Numbers numbers(seed);
    std::vector<mfsdp_fused_item> table;
    for (std::size_t t = 0; t < counts.size(); ++t) {
      const std::size_t n = counts[t];
      master.push_back(make(numbers.reals(n)));
      grad.push_back(make(numbers.reals(n)));
      state0.push_back(make(numbers.reals(n)));
      std::vector<float> squares = numbers.reals(n);
      for (float &x : squares)
        x = x * x;
      if (n > 1) squares[1] = 0.0f;
      state1.push_back(make(squares));
      direction.push_back(make(numbers.reals(n)));
      mfsdp_fused_item item;
      std::memset(&item, 0, sizeof(item));
      item.master = master[t]->data();
      item.grad = grad[t]->data();
      item.state[0] = state0[t]->data();
      item.state[1] = state1[t]->data();
      item.direction = direction[t]->data();
      item.count = static_cast<int64_t>(n);
      item.rows = 1;
      item.scale = t == 0 ? 1.25 : 0.2;
      item.present_index = static_cast<int32_t>(t);
      if (t < dtypes.size()) {
        const std::size_t nbytes = mfsdp_dtype_nbytes(dtypes[t]);
        param.emplace_back(new Buffer<unsigned char>(
            r, std::vector<unsigned char>(n * nbytes, 0x11), shift * nbytes));
        item.param = param[t]->data();
        item.param_dtype = dtypes[t];
      }
      table.push_back(item);
    }
    items.reset(new Buffer<mfsdp_fused_item>(r, table));
    mfsdp_step_scalars s;
    std::memset(&s, 0, sizeof(s));
    s.lr = 3e-3;
    s.weight_decay = 0.1;
    s.grad_scale = 1.0 / 3.0;
    s.clip_scale = 0.7;
    s.applied_steps = 5;
    scalars.write({s});
    std::memset(&args, 0, sizeof(args));
    args.struct_nbytes = sizeof(args);
    args.item_count = static_cast<int32_t>(table.size());
    args.items = items->data();
    args.max_count = 1500;
    args.total_count = 1533;
    args.scalars = scalars.data();
    args.present = present.data();
    args.beta1 = 0.9;
    args.beta2 = 0.999;
    args.eps = 1e-8;
    args.momentum = 0.95;
    args.grad_weight = 0.05;
    args.nesterov_weight = 0.05;
  }
  std::unique_ptr<Buffer<float>> make(const std::vector<float> &values) {
    return std::unique_ptr<Buffer<float>>(new Buffer<float>(rig, values, offset));
  }
  mfsdp_status run(mfsdp_fused_op op) {
    args.op = op;
    EXPECT_EQ(rig->ops->fused(rig->self, rig->queue, &args), MFSDP_OK) << rig->message();
    return rig->sync();
  }
  void edit_scalars(void (*edit)(mfsdp_step_scalars *)) {
    std::vector<mfsdp_step_scalars> s = scalars.read();
    edit(&s[0]);
    scalars.write(s);
  }
  /* Every byte that a pass could write. */
  std::vector<std::vector<unsigned char>> everything() {
    std::vector<std::vector<unsigned char>> all;
    for (std::size_t t = 0; t < counts.size(); ++t) {
      for (auto *set : {&master, &state0, &state1, &direction, &grad}) {
        const std::vector<float> x = (*set)[t]->read();
        const unsigned char *bytes = reinterpret_cast<const unsigned char *>(x.data());
        all.emplace_back(bytes, bytes + x.size() * sizeof(float));
      }
      if (t < param.size()) all.push_back(param[t]->read());
    }
    return all;
  }
  void expect_params(std::size_t t) {
    if (t >= param.size()) return;
    const std::vector<float> w = master[t]->read();
    EXPECT_TRUE(same_bits(param[t]->read(),
                          encode(std::vector<double>(w.begin(), w.end()), param_dtype[t])))
        << mfsdp_dtype_name(param_dtype[t]);
  }
};

TEST_P(HostOps, AdamwMatchesTheReferenceBitForBit) {
  Rig rig(GetParam());
  const std::vector<mfsdp_dtype> choices[] = {
      {}, {MFSDP_F32, MFSDP_BF16}, {MFSDP_BF16, MFSDP_F16}, {MFSDP_F16, MFSDP_F64}};
  for (int clipped = 0; clipped < 2; ++clipped)
    for (std::size_t shift = 0; shift < 4; ++shift) {
      FusedCase c(&rig, shift, choices[shift]);
      ref::AdamwOptions options;
      options.lr = 3e-3;
      options.weight_decay = 0.1;
      options.grad_scale = clipped ? 1.0 / 3.0 * 0.7 : 1.0 / 3.0;
      std::vector<std::vector<float>> w, m, v, g;
      for (std::size_t t = 0; t < c.counts.size(); ++t) {
        w.push_back(c.master[t]->read());
        m.push_back(c.state0[t]->read());
        v.push_back(c.state1[t]->read());
        g.push_back(c.grad[t]->read());
      }
      c.args.clipped = clipped;
      for (int64_t step = 5; step < 8; ++step) {
        ASSERT_EQ(c.run(MFSDP_FUSED_ADAMW), MFSDP_OK) << rig.message();
        for (std::size_t t = 0; t < c.counts.size(); ++t) {
          ref::adamw_step_f32(options, step, g[t], &m[t], &v[t], &w[t]);
          ASSERT_TRUE(same_bits(c.master[t]->read(), w[t])) << t << " step " << step;
          ASSERT_TRUE(same_bits(c.state0[t]->read(), m[t]));
          ASSERT_TRUE(same_bits(c.state1[t]->read(), v[t]));
          c.expect_params(t);
        }
        c.edit_scalars([](mfsdp_step_scalars *s) { ++s->applied_steps; });
      }
    }
}

/* Muon's passes, written down a second time: one operation a line, every value stored. */
struct MuonTwin {
  float grad, decay, step, momentum, grad_weight, nesterov_weight;
  float scaled(float g) const {
    volatile float x = g * grad;
    return x;
  }
  float buffer(float b, float g) const {
    volatile float kept = momentum * b;
    volatile float added = grad_weight * scaled(g);
    volatile float sum = kept + added;
    return sum;
  }
  float direction(float b, float g, bool nesterov) const {
    if (!nesterov) return buffer(b, g);
    volatile float ahead = nesterov_weight * scaled(g);
    volatile float behind = momentum * buffer(b, g);
    volatile float sum = ahead + behind;
    return sum;
  }
  float weight(float w, float d) const {
    volatile float decayed = w * decay;
    volatile float change = step * d;
    volatile float result = decayed - change;
    return result;
  }
};

TEST_P(HostOps, MuonPrepareAndCommitMatchTheFormulaBitForBit) {
  Rig rig(GetParam());
  for (int nesterov = 0; nesterov < 2; ++nesterov)
    for (int clipped = 0; clipped < 2; ++clipped)
      for (std::size_t shift = 0; shift < 3; ++shift) {
        FusedCase c(&rig, shift, {MFSDP_BF16, MFSDP_F32});
        c.args.nesterov = nesterov;
        c.args.clipped = clipped;
        MuonTwin twin;
        twin.grad = static_cast<float>(1.0 / 3.0 * (clipped ? 0.7 : 1.0));
        twin.decay = static_cast<float>(1.0 - 3e-3 * 0.1);
        twin.momentum = static_cast<float>(0.95);
        twin.grad_weight = static_cast<float>(0.05);
        twin.nesterov_weight = static_cast<float>(0.05);
        std::vector<std::vector<float>> b, g, w;
        for (std::size_t t = 0; t < c.counts.size(); ++t) {
          b.push_back(c.state0[t]->read());
          g.push_back(c.grad[t]->read());
          w.push_back(c.master[t]->read());
        }
        ASSERT_EQ(c.run(MFSDP_FUSED_MUON_PREPARE), MFSDP_OK) << rig.message();
        std::vector<std::vector<float>> d;
        for (std::size_t t = 0; t < c.counts.size(); ++t) {
          std::vector<float> want(c.counts[t]);
          for (std::size_t i = 0; i < want.size(); ++i)
            want[i] = twin.direction(b[t][i], g[t][i], nesterov != 0);
          d.push_back(c.direction[t]->read());
          ASSERT_TRUE(same_bits(d[t], want)) << t;
          /* Nothing but the direction was written. */
          ASSERT_TRUE(same_bits(c.state0[t]->read(), b[t]));
          ASSERT_TRUE(same_bits(c.master[t]->read(), w[t]));
        }
        for (std::size_t t = 0; t < 2; ++t) { /* Newton-Schulz would write here */
          std::reverse(d[t].begin(), d[t].end());
          c.direction[t]->write(d[t]);
        }
        ASSERT_EQ(c.run(MFSDP_FUSED_MUON_COMMIT), MFSDP_OK) << rig.message();
        for (std::size_t t = 0; t < c.counts.size(); ++t) {
          twin.step = static_cast<float>(3e-3 * (t == 0 ? 1.25 : 0.2));
          std::vector<float> want_w(c.counts[t]), want_b(c.counts[t]);
          for (std::size_t i = 0; i < want_w.size(); ++i) {
            want_b[i] = twin.buffer(b[t][i], g[t][i]);
            want_w[i] = twin.weight(w[t][i], d[t][i]);
          }
          ASSERT_TRUE(same_bits(c.state0[t]->read(), want_b)) << t;
          ASSERT_TRUE(same_bits(c.master[t]->read(), want_w)) << t;
          ASSERT_TRUE(same_bits(c.direction[t]->read(), d[t]));
          c.expect_params(t);
        }
      }
}

TEST_P(HostOps, SkipAndAbsenceLeaveEveryByteAlone) {
  Rig rig(GetParam());
  const mfsdp_fused_op all[] = {MFSDP_FUSED_ADAMW, MFSDP_FUSED_MUON_PREPARE,
                                MFSDP_FUSED_MUON_COMMIT, MFSDP_FUSED_MUON_ROWS};
  for (mfsdp_fused_op op : all) {
    FusedCase c(&rig, 1, {MFSDP_BF16, MFSDP_F32});
    const std::vector<std::vector<unsigned char>> before = c.everything();
    c.edit_scalars([](mfsdp_step_scalars *s) {
      s->skip = 1;
      s->clip_scale = NAN;
      s->applied_steps = 0; /* as in a first step that is skipped */
    });
    ASSERT_EQ(c.run(op), MFSDP_OK) << rig.message();
    EXPECT_EQ(c.everything(), before) << op;
    c.edit_scalars([](mfsdp_step_scalars *s) {
      s->skip = 0;
      s->clip_scale = 1.0;
      s->applied_steps = 1;
    });
    c.present.write({0, 0, 0});
    ASSERT_EQ(c.run(op), MFSDP_OK);
    EXPECT_EQ(c.everything(), before) << op;
    c.present.write({0, 1, 1}); /* tensor 1 alone */
    ASSERT_EQ(c.run(op), MFSDP_OK);
    const std::vector<std::vector<unsigned char>> after = c.everything();
    const std::size_t per_tensor = 6; /* arrays in everything() of a tensor with a param */
    for (std::size_t i = 0; i < per_tensor; ++i)
      EXPECT_EQ(after[i], before[i]) << op << " " << i;
    EXPECT_NE(after, before) << op;
    FusedCase with_table(&rig, 1, {MFSDP_BF16, MFSDP_F32}),
        without(&rig, 1, {MFSDP_BF16, MFSDP_F32});
    without.args.present = nullptr; /* all are present */
    ASSERT_EQ(with_table.run(op), MFSDP_OK);
    ASSERT_EQ(without.run(op), MFSDP_OK);
    EXPECT_EQ(with_table.everything(), without.everything()) << op;
  }
}

TEST_P(HostOps, AnItemThatMakesNoSenseFailsTheQueueBeforeAnythingIsWritten) {
  Rig rig(GetParam());
  struct Fault {
    mfsdp_fused_op op;
    void (*edit)(mfsdp_fused_item *);
    const char *message;
  };
  const Fault faults[] = {
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->count = -1; }, "a negative count"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->present_index = -1; },
       "a negative present_index"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->grad = nullptr; }, "no grad"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->state[0] = nullptr; }, "no state 0"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->state[1] = nullptr; }, "no state 1"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->master = nullptr; }, "no master"},
      {MFSDP_FUSED_ADAMW, [](mfsdp_fused_item *i) { i->param_dtype = 0; },
       "an invalid param_dtype"},
      {MFSDP_FUSED_MUON_PREPARE, [](mfsdp_fused_item *i) { i->direction = nullptr; },
       "no direction"},
      {MFSDP_FUSED_MUON_COMMIT, [](mfsdp_fused_item *i) { i->direction = nullptr; },
       "no direction"},
      {MFSDP_FUSED_MUON_ROWS, [](mfsdp_fused_item *i) { i->direction = nullptr; }, "no direction"},
      {MFSDP_FUSED_MUON_ROWS, [](mfsdp_fused_item *i) { i->state[1] = nullptr; }, "no state 1"},
      {MFSDP_FUSED_MUON_ROWS, [](mfsdp_fused_item *i) { i->rows = 0; },
       "rows that do not divide count"},
      {MFSDP_FUSED_MUON_ROWS, [](mfsdp_fused_item *i) { i->rows = i->count + 1; },
       "rows that do not divide count"},
  };
  for (const Fault &fault : faults) {
    FusedCase c(&rig, 0, {MFSDP_BF16, MFSDP_F32});
    const std::vector<std::vector<unsigned char>> before = c.everything();
    std::vector<mfsdp_fused_item> items = c.items->read();
    fault.edit(&items[1]);
    c.items->write(items);
    EXPECT_EQ(c.run(fault.op), MFSDP_E_ARGUMENT) << fault.message;
    const std::string want = std::string("fused: item 1 has ") + fault.message;
    EXPECT_EQ(rig.message(), want);
    rig.renew_queue();
    EXPECT_EQ(c.everything(), before) << fault.message;
  }
  FusedCase c(&rig, 0, {});
  c.edit_scalars([](mfsdp_step_scalars *s) { s->applied_steps = 0; });
  EXPECT_EQ(c.run(MFSDP_FUSED_ADAMW), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig.message()).find("applied_steps is 0"), std::string::npos);
  rig.renew_queue();
}

} // namespace
