/* SPDX-License-Identifier: MIT */
/*
 * Every row of bench/cuda/ops.h on the CUDA backend and on the C loops of the host backend, from the
 * same numbers, at ragged shapes and at starts of every alignment: the same bits, or as near as sums in
 * another order allow.
 */
#include "bench/cuda/ops.h"

#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;

/* The inputs of a case, and after the run all that an operation may have written. */
struct Data {
  std::vector<float> x[OPS_ARRAYS];
  std::vector<uint8_t> out;
};

std::string name_of(const ops_case &c) {
  return std::string(ops_of(c.kind)->name) + ", " + mfsdp_dtype_name(c.dtype) + ", " +
         std::to_string(c.rows) + " x " + std::to_string(c.cols) + " x " + std::to_string(c.batch);
}

/* Runs the case on one backend; arrays begin `offset` elements behind an aligned address. */
Data run(const test::RigKind &kind, const ops_case &c, const Data &start, std::size_t offset) {
  Rig rig(kind);
  const std::size_t count = static_cast<std::size_t>(ops_count(&c));
  const std::size_t narrow_count = (count * mfsdp_dtype_nbytes(c.dtype) + 1) / 2;
  std::vector<std::unique_ptr<Buffer<float>>> x;
  std::vector<std::unique_ptr<Buffer<uint16_t>>> narrow;
  std::vector<mfsdp_block> blocks(static_cast<std::size_t>(c.rows * c.batch));
  ops_memory m;
  std::memset(&m, 0, sizeof(m));
  for (int i = 0; i < OPS_ARRAYS; ++i) {
    x.emplace_back(new Buffer<float>(&rig, start.x[i], offset));
    narrow.emplace_back(
        new Buffer<uint16_t>(&rig, narrow_count, c.dtype == MFSDP_F32 ? 2 * offset : offset));
    m.x[i] = x.back()->data();
    m.narrow[i] = narrow.back()->data();
    EXPECT_EQ(
        rig.ops->cast(rig.self, rig.queue, m.narrow[i], c.dtype, m.x[i], MFSDP_F32, ops_count(&c)),
        MFSDP_OK)
        << rig.message();
  }
  for (std::size_t r = 0; r < blocks.size(); ++r)
    blocks[r] = {static_cast<int64_t>(r) * c.cols, c.cols, static_cast<int32_t>(r), 0};
  Buffer<double> out(&rig, (start.out.size() + 7) / 8);
  Buffer<mfsdp_block> table(&rig, blocks);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.01, 0.1);
  scalars.applied_steps = 3;
  Buffer<mfsdp_step_scalars> in_memory(&rig, std::vector<mfsdp_step_scalars>{scalars});
  Buffer<double> scratch(&rig, static_cast<std::size_t>(c.batch) * MFSDP_NORMALIZE_SCRATCH_COUNT);
  out.fill(0);
  m.out = out.data();
  m.blocks = table.data();
  m.scalars = in_memory.data();
  m.scratch = scratch.data();
  Buffer<mfsdp_fused_item> items(&rig, std::vector<mfsdp_fused_item>{ops_item(&c, &m)});
  m.items = items.data();
  EXPECT_EQ(ops_run(rig.backend, rig.queue, &c, &m), MFSDP_OK)
      << name_of(c) << ": " << rig.message();
  EXPECT_EQ(rig.sync(), MFSDP_OK) << name_of(c) << ": " << rig.message();
  Data after;
  for (int i = 0; i < OPS_ARRAYS; ++i)
    after.x[i] = x[static_cast<std::size_t>(i)]->read();
  const std::vector<double> bytes = out.read();
  after.out.resize(start.out.size());
  std::memcpy(after.out.data(), bytes.data(), after.out.size());
  return after;
}

/* Unit roundoff of a dtype. */
double unit_of(mfsdp_dtype dtype) {
  return std::ldexp(1.0, dtype == MFSDP_F32 ? -24 : dtype == MFSDP_BF16 ? -8 : -11);
}

double value_at(const ops_case &c, const Data &data, std::size_t i) {
  double value;
  if (c.kind != OPS_SUMSQ)
    return mfsdp_element_get(data.out.data(), c.dtype, static_cast<int64_t>(i));
  std::memcpy(&value, data.out.data() + i * sizeof(value), sizeof(value));
  return value;
}

/* How far two results may lie apart; 0: the same bits. */
double tolerance_of(const ops_case &c) {
  /* cols squares below 1, added up in double in another order. */
  if (c.kind == OPS_SUMSQ)
    return static_cast<double>(c.cols) * static_cast<double>(c.cols) * std::ldexp(1.0, -53);
  /* One rounding of values below 1, of a norm in double: next to it at most. */
  if (c.kind == OPS_NORMALIZE) return 2.0 * unit_of(c.dtype);
  /* cols products below 1 and a term, each sum below cols + 1, in another order or with fused steps; then
   * one rounding to the dtype on both sides. */
  const double most = static_cast<double>(c.cols) + 1.0;
  if (ops_is_product(c.kind))
    return 2.0 * most * most * unit_of(MFSDP_F32) +
           (c.dtype == MFSDP_F32 ? 0.0 : 2.0 * most * unit_of(c.dtype));
  return 0.0;
}

/* Moments of rows and what they scale: sums of squares in double, in another order, may round to the
 * next float, as then may the moment, its root and the element: four neighbours. */
void expect_neighbours(const ops_case &c, const std::vector<float> &cuda,
                       const std::vector<float> &host) {
  ASSERT_EQ(cuda.size(), host.size());
  for (std::size_t i = 0; i < cuda.size(); ++i)
    ASSERT_LE(std::fabs(cuda[i] - host[i]), std::ldexp(std::fabs(host[i]), -21))
        << name_of(c) << ": element " << i;
}

void expect_equal(const ops_case &c, const Data &cuda, const Data &host) {
  const double tolerance = tolerance_of(c);
  for (int i = 0; i < OPS_ARRAYS; ++i) {
    if (c.kind == OPS_MUON_ROWS && i >= 2)
      expect_neighbours(c, cuda.x[i], host.x[i]);
    else
      EXPECT_TRUE(test::same_bits(cuda.x[i], host.x[i])) << name_of(c) << ": array " << i;
  }
  if (tolerance == 0.0) {
    EXPECT_EQ(cuda.out, host.out) << name_of(c);
    return;
  }
  const std::size_t count =
      static_cast<std::size_t>(c.kind == OPS_SUMSQ ? c.rows * c.batch : ops_out_count(&c));
  for (std::size_t i = 0; i < count; ++i)
    ASSERT_LE(std::fabs(value_at(c, cuda, i) - value_at(c, host, i)), tolerance)
        << name_of(c) << ": element " << i;
}

const int64_t kShapes[][3] = {{1, 1, 1},   {1, 7, 1},    {5, 3, 1},     {16, 16, 2},  {33, 65, 2},
                              {64, 64, 1}, {65, 130, 3}, {130, 131, 1}, {96, 1000, 1}};

class Ops : public ::testing::TestWithParam<int> {};

TEST_P(Ops, TheSameAsTheHostBackend) {
  const test::RigKind host = test::rig_kinds()[0], cuda = test::backend_kinds().back();
  int ran = 0;
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
    for (const auto &shape : kShapes) {
      const ops_case c = {static_cast<ops_kind>(GetParam()), dtype, shape[0], shape[1], shape[2]};
      if (!ops_fits(&c)) continue;
      Data start;
      test::Numbers numbers(static_cast<uint64_t>(shape[1]));
      for (std::vector<float> &x : start.x)
        x = numbers.reals(static_cast<std::size_t>(ops_count(&c)));
      if (c.kind == OPS_ADAMW || c.kind == OPS_MUON_ROWS) /* second moments */
        for (float &value : start.x[c.kind == OPS_ADAMW ? 3 : 2])
          value = std::fabs(value);
      start.out.resize(ops_out_nbytes(&c));
      const std::size_t offset = static_cast<std::size_t>(shape[0] % 4);
      const Data on_host = run(host, c, start, offset);
      expect_equal(c, run(cuda, c, start, offset), on_host);
      /* The row did something: it is no comparison of two copies of the start. */
      bool changed = on_host.out != start.out;
      for (int i = 0; i < OPS_ARRAYS; ++i)
        changed = changed || on_host.x[i] != start.x[i];
      EXPECT_TRUE(changed) << name_of(c);
      ++ran;
    }
  EXPECT_GE(ran, 6);
}

std::string row_name(const ::testing::TestParamInfo<int> &row) {
  std::string name;
  for (const char *at = ops_of(static_cast<ops_kind>(row.param))->name; *at != '\0'; ++at)
    if (std::isalnum(static_cast<unsigned char>(*at)) != 0) name += *at;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Table, Ops, ::testing::Range(0, static_cast<int>(OPS_COUNT)), row_name);

} // namespace
