/* SPDX-License-Identifier: MIT */
/* types.h: names, checked arithmetic at its edges, the canonical hash, step scalars. */
#include "mfsdp/types.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

TEST(Types, DtypeSizesAndNames) {
  EXPECT_EQ(mfsdp_dtype_nbytes(MFSDP_F32), 4u);
  EXPECT_EQ(mfsdp_dtype_nbytes(MFSDP_F64), 8u);
  EXPECT_EQ(mfsdp_dtype_nbytes(MFSDP_BF16), 2u);
  EXPECT_EQ(mfsdp_dtype_nbytes(MFSDP_F16), 2u);
  EXPECT_EQ(mfsdp_dtype_nbytes(static_cast<mfsdp_dtype>(0)), 0u);
  EXPECT_EQ(mfsdp_dtype_nbytes(static_cast<mfsdp_dtype>(5)), 0u);
  EXPECT_STREQ(mfsdp_dtype_name(MFSDP_F32), "f32");
  EXPECT_STREQ(mfsdp_dtype_name(MFSDP_F64), "f64");
  EXPECT_STREQ(mfsdp_dtype_name(MFSDP_BF16), "bf16");
  EXPECT_STREQ(mfsdp_dtype_name(MFSDP_F16), "f16");
  EXPECT_STREQ(mfsdp_dtype_name(static_cast<mfsdp_dtype>(0)), "invalid");
}

/* A description that was only zeroed must not name a dtype, role, space or class. */
TEST(Types, ZeroIsNeverValid) {
  EXPECT_STREQ(mfsdp_role_name(static_cast<mfsdp_role>(0)), "invalid");
  EXPECT_STREQ(mfsdp_traffic_name(static_cast<mfsdp_traffic>(0)), "invalid");
  EXPECT_EQ(static_cast<int>(MFSDP_SPACE_DEVICE), 1);
}

TEST(Types, RolesAndTrafficClasses) {
  EXPECT_STREQ(mfsdp_role_name(MFSDP_ROLE_MATRIX), "matrix");
  EXPECT_STREQ(mfsdp_role_name(MFSDP_ROLE_ELEMENTWISE), "elementwise");
  EXPECT_STREQ(mfsdp_role_name(MFSDP_ROLE_FROZEN), "frozen");
  const char *names[] = {"materialize", "reduce", "optimizer_matrix", "scalar", "export"};
  for (int i = 1; i < MFSDP_TRAFFIC_CLASS_COUNT; ++i)
    EXPECT_STREQ(mfsdp_traffic_name(static_cast<mfsdp_traffic>(i)), names[i - 1]);
  EXPECT_EQ(static_cast<int>(MFSDP_TRAFFIC_EXPORT), MFSDP_TRAFFIC_CLASS_COUNT - 1);
}

TEST(Arithmetic, SizeEdges) {
  std::size_t out = 0;
  EXPECT_TRUE(mfsdp_size_add(SIZE_MAX - 5, 5, &out));
  EXPECT_EQ(out, SIZE_MAX);
  EXPECT_FALSE(mfsdp_size_add(SIZE_MAX - 5, 6, &out));
  EXPECT_TRUE(mfsdp_size_mul(SIZE_MAX / 2, 2, &out));
  EXPECT_EQ(out, SIZE_MAX - 1);
  EXPECT_FALSE(mfsdp_size_mul(SIZE_MAX / 2 + 1, 2, &out));
  EXPECT_TRUE(mfsdp_size_mul(SIZE_MAX, 0, &out));
  EXPECT_EQ(out, 0u);
}

TEST(Arithmetic, Int64Edges) {
  int64_t out = 0;
  EXPECT_TRUE(mfsdp_i64_add(INT64_MAX, INT64_MIN, &out));
  EXPECT_EQ(out, -1);
  EXPECT_FALSE(mfsdp_i64_add(INT64_MAX, 1, &out));
  EXPECT_FALSE(mfsdp_i64_add(INT64_MIN, -1, &out));
  EXPECT_TRUE(mfsdp_i64_mul(INT64_MIN / 2, 2, &out));
  EXPECT_EQ(out, INT64_MIN);
  EXPECT_FALSE(mfsdp_i64_mul(INT64_MIN, -1, &out));
  EXPECT_FALSE(mfsdp_i64_mul(INT64_C(1) << 32, INT64_C(1) << 31, &out));
  EXPECT_TRUE(mfsdp_i64_mul((INT64_C(1) << 32) - 1, INT64_C(1) << 31, &out));
}

TEST(Arithmetic, Align) {
  int64_t out = -1;
  const struct {
    int64_t count, want;
  } rows[] = {{0, 0},     {1, 128},   {127, 128},
              {128, 128}, {129, 256}, {INT64_MAX - 127, INT64_MAX - 127}};
  for (const auto &row : rows) {
    EXPECT_TRUE(mfsdp_i64_align(row.count, &out));
    EXPECT_EQ(out, row.want);
  }
  EXPECT_FALSE(mfsdp_i64_align(INT64_MAX - 126, &out));
  EXPECT_FALSE(mfsdp_i64_align(INT64_MAX, &out));
}

TEST(Arithmetic, RangesApart) {
  const char bytes[8] = {0};
  EXPECT_TRUE(mfsdp_ranges_apart(bytes, 4, bytes + 4, 4));
  EXPECT_TRUE(mfsdp_ranges_apart(bytes + 4, 4, bytes, 4));
  EXPECT_FALSE(mfsdp_ranges_apart(bytes, 5, bytes + 4, 4));
  EXPECT_FALSE(mfsdp_ranges_apart(bytes + 4, 4, bytes, 5));
  EXPECT_FALSE(mfsdp_ranges_apart(bytes, 8, bytes + 3, 1));
  EXPECT_FALSE(mfsdp_ranges_apart(bytes, 1, bytes, 1));
  EXPECT_TRUE(mfsdp_ranges_apart(bytes, 0, bytes, 0));
  EXPECT_TRUE(mfsdp_ranges_apart(bytes + 8, SIZE_MAX, bytes, 8)); /* no sum that wraps */
}

TEST(Arithmetic, ElementsInBytes) {
  std::size_t out = 7;
  EXPECT_TRUE(mfsdp_elements_nbytes(0, MFSDP_F32, &out));
  EXPECT_EQ(out, 0u);
  EXPECT_TRUE(mfsdp_elements_nbytes(INT64_MAX, MFSDP_BF16, &out));
  EXPECT_EQ(out, static_cast<std::size_t>(INT64_MAX) * 2u);
  EXPECT_FALSE(mfsdp_elements_nbytes(INT64_MAX, MFSDP_F32, &out));
  EXPECT_TRUE(mfsdp_elements_nbytes(INT64_MAX / 4, MFSDP_F64, &out));
  EXPECT_FALSE(mfsdp_elements_nbytes(INT64_MAX / 4 + 1, MFSDP_F64, &out));
  EXPECT_FALSE(mfsdp_elements_nbytes(-1, MFSDP_F32, &out));
  EXPECT_FALSE(mfsdp_elements_nbytes(1, static_cast<mfsdp_dtype>(0), &out));
}

uint64_t fnv(const std::string &text) {
  return mfsdp_hash_bytes(MFSDP_HASH_SEED, text.data(), text.size());
}

/* Vectors of the FNV authors (Fowler, Noll, Vo; the 64-bit FNV-1a table of their test suite). */
TEST(Hash, PublishedFnv1aVectors) {
  EXPECT_EQ(fnv(""), UINT64_C(0xcbf29ce484222325));
  EXPECT_EQ(fnv("a"), UINT64_C(0xaf63dc4c8601ec8c));
  EXPECT_EQ(fnv("b"), UINT64_C(0xaf63df4c8601f1a5));
  EXPECT_EQ(fnv("foobar"), UINT64_C(0x85944171f73967e8));
}

TEST(Hash, NothingOfNothing) {
  EXPECT_EQ(mfsdp_hash_bytes(5, nullptr, 0), 5u);
}

TEST(Hash, IntegersAreLittleEndianBytes) {
  const unsigned char bytes[8] = {8, 7, 6, 5, 4, 3, 2, 0xff};
  EXPECT_EQ(mfsdp_hash_u64(MFSDP_HASH_SEED, UINT64_C(0xff02030405060708)),
            mfsdp_hash_bytes(MFSDP_HASH_SEED, bytes, sizeof(bytes)));
  EXPECT_NE(mfsdp_hash_u64(MFSDP_HASH_SEED, 1), mfsdp_hash_u64(MFSDP_HASH_SEED, 0));
}

TEST(Hash, ChainsOverParts) {
  EXPECT_EQ(mfsdp_hash_bytes(fnv("foo"), "bar", 3), fnv("foobar"));
}

TEST(StepScalars, Defaults) {
  const mfsdp_step_scalars s = mfsdp_step_scalars_default(0.25, 0.5);
  EXPECT_EQ(s.lr, 0.25);
  EXPECT_EQ(s.weight_decay, 0.5);
  EXPECT_EQ(s.grad_scale, 1.0);
  EXPECT_EQ(s.clip_scale, 1.0);
  EXPECT_EQ(s.applied_steps, 1);
  EXPECT_EQ(s.skip, 0u);
  EXPECT_EQ(s.stop, 0u);
}

} // namespace
