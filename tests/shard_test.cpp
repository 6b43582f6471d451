/* SPDX-License-Identifier: MIT */
#include "mfsdp/shard.h"

#include "tests/support/plan_cases.h"

#include <algorithm>
#include <cstring>
#include <map>

namespace {

using test::fill_random;
using test::Params;
using test::PlanRig;

const mfsdp_layout_kind kKinds[] = {MFSDP_LAYOUT_GATHER, MFSDP_LAYOUT_REDUCE};

/* ---- records ---- */

/* Ten rows on four ranks: the global shape is never local x world. */
TEST(Shard, ShapeComesFromThePlan) {
  Params p;
  p.add_rows("w", 2, {3, 7}, 6);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4)), MFSDP_OK);
  for (int32_t piece = 0; piece < 2; ++piece)
    for (int32_t rank = 0; rank < 4; ++rank) {
      mfsdp_shard s;
      memset(&s, 0xee, sizeof(s));
      ASSERT_EQ(mfsdp_shard_get(&rig.context, rig.plan, piece, rank, &s), MFSDP_OK);
      const int32_t owner = piece == 0 ? 1 : 0; /* the larger one goes first */
      EXPECT_EQ(s.piece_index, piece);
      EXPECT_EQ(s.rank, rank);
      EXPECT_EQ(s.piece.owner, owner);
      EXPECT_EQ(s.piece.unit, 2);
      EXPECT_EQ(s.piece.rows, piece == 0 ? 3 : 7);
      EXPECT_EQ(s.ndim, 2);
      EXPECT_EQ(s.global_shape[0], 10);
      EXPECT_EQ(s.global_shape[1], 6);
      for (int d = 2; d < MFSDP_MAX_NDIM; ++d)
        EXPECT_EQ(s.global_shape[d], 0);
      EXPECT_EQ(s.global_count, 60);
      EXPECT_EQ(s.local_count, rank == owner ? (piece == 0 ? 18 : 42) : 0);
      EXPECT_EQ(s.local_offset, rank == owner ? 0 : -1);
    }
}

TEST(Shard, LocalCountsOfATensorSumToIt) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Params p;
    fill_random(&p, seed);
    PlanRig rig;
    ASSERT_EQ(rig.create(p.desc(5)), MFSDP_OK);
    std::map<int32_t, int64_t> local;
    for (int32_t k = 0; k < mfsdp_plan_piece_count(rig.plan); ++k)
      for (int32_t rank = 0; rank < 5; ++rank) {
        mfsdp_shard s;
        ASSERT_EQ(mfsdp_shard_get(&rig.context, rig.plan, k, rank, &s), MFSDP_OK);
        local[s.piece.param] += s.local_count;
      }
    for (const auto &tensor : local)
      EXPECT_EQ(tensor.second, mfsdp_plan_param_numel(rig.plan, tensor.first));
  }
}

TEST(Shard, BadArguments) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {3, 7});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4)), MFSDP_OK);
  mfsdp_shard s;
  EXPECT_EQ(mfsdp_shard_get(&rig.context, nullptr, 0, 0, &s), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("plan is NULL"), std::string::npos);
  EXPECT_EQ(mfsdp_shard_get(&rig.context, rig.plan, 0, 0, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("out is NULL"), std::string::npos);
  EXPECT_EQ(mfsdp_shard_get(&rig.context, rig.plan, 1, 0, &s), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("piece is 1, needs 0 to 0"), std::string::npos);
  EXPECT_EQ(mfsdp_shard_get(&rig.context, rig.plan, -1, 0, &s), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_shard_get(&rig.context, rig.plan, 0, 4, &s), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("rank is 4, needs 0 to 3"), std::string::npos);
  EXPECT_EQ(mfsdp_shard_get(&rig.context, rig.plan, 0, -1, &s), MFSDP_E_ARGUMENT);
}

/* ---- extents ---- */

/* An element's value tells tensor and position; padding is 0. */
int64_t stamp(int32_t param, int64_t element) {
  return (param + 1) * INT64_C(100000000) + element;
}

/* Gathers by extents into a buffer full of garbage, with real segments: what must come out is every
 * tensor at its offset. Inner padding may be written, but with zeros only. */
void check_gather(PlanRig *rig, int32_t unit, mfsdp_layout_kind kind) {
  const bool reduce = kind == MFSDP_LAYOUT_REDUCE;
  const int32_t world = mfsdp_plan_world(rig->plan);
  const auto length =
      static_cast<std::size_t>(mfsdp_plan_unit_count_elements(rig->plan, unit, kind));
  std::vector<std::vector<int64_t>> segments;
  for (int32_t r = 0; r < world; ++r)
    segments.emplace_back(
        static_cast<std::size_t>(mfsdp_plan_segment_count(rig->plan, unit, r, kind)), 0);
  std::vector<int64_t> expected(length, 0), full(length, 0);
  int64_t payload = 0;
  for (const mfsdp_piece &p : rig->pieces(unit)) {
    if (reduce && p.grad_unit_offset < 0) continue;
    for (int64_t k = 0; k < p.count; ++k) {
      const int64_t value = stamp(p.param, p.first + k);
      const int64_t at = (reduce ? p.grad_shard_offset : p.shard_offset) + k;
      const int64_t to = (reduce ? p.grad_unit_offset : p.unit_offset) + k;
      segments[static_cast<std::size_t>(p.owner)][static_cast<std::size_t>(at)] = value;
      expected[static_cast<std::size_t>(to)] = value;
    }
    payload += p.count;
  }
  const std::vector<mfsdp_extent> extents = rig->extents(unit, kind);
  for (const mfsdp_extent &e : extents) {
    ASSERT_TRUE(e.owner >= 0 && e.owner < world);
    const std::vector<int64_t> &segment = segments[static_cast<std::size_t>(e.owner)];
    ASSERT_GE(e.count, e.payload_count);
    ASSERT_LE(static_cast<std::size_t>(e.shard_offset + e.count), segment.size());
    ASSERT_LE(static_cast<std::size_t>(e.unit_offset + e.count), length);
    for (int64_t k = 0; k < e.count; ++k) {
      int64_t &slot = full[static_cast<std::size_t>(e.unit_offset + k)];
      EXPECT_EQ(slot, 0) << "two extents overlap";
      slot = segment[static_cast<std::size_t>(e.shard_offset + k)];
    }
    payload -= e.payload_count;
  }
  EXPECT_EQ(full, expected);
  EXPECT_EQ(payload, 0) << "payload of extents and pieces differ";
}

/* Sorted, disjoint, beginning and ending in payload; what could be merged is merged. */
void check_merged(PlanRig *rig, int32_t unit, mfsdp_layout_kind kind) {
  const std::vector<mfsdp_extent> extents = rig->extents(unit, kind);
  for (std::size_t k = 0; k + 1 < extents.size(); ++k) {
    const mfsdp_extent &a = extents[k], &b = extents[k + 1];
    EXPECT_LE(a.unit_offset + a.count, b.unit_offset);
    EXPECT_FALSE(a.owner == b.owner &&
                 a.unit_offset - a.shard_offset == b.unit_offset - b.shard_offset)
        << "extents " << k << " and " << k + 1 << " of unit " << unit;
  }
}

TEST(Extents, MoveExactlyTheTensors) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Params p;
    fill_random(&p, seed);
    for (int32_t world : {1, 2, 3, 7, 16}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " world " + std::to_string(world));
      PlanRig rig;
      ASSERT_EQ(rig.create(p.desc(world)), MFSDP_OK) << rig.message();
      for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
        for (mfsdp_layout_kind kind : kKinds) {
          check_gather(&rig, u, kind);
          check_merged(&rig, u, kind);
        }
      if (HasFailure()) return;
    }
  }
}

/* The same with every matrix in row bands: of unequal height, and none for some ranks. */
TEST(Extents, MoveExactlyTheBands) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Params p;
    fill_random(&p, seed);
    for (mfsdp_param &param : p.list)
      if (param.role == MFSDP_ROLE_MATRIX) param.placement = MFSDP_PLACEMENT_BANDED;
    for (int32_t world : {1, 2, 7, 65}) {
      SCOPED_TRACE("seed " + std::to_string(seed) + " world " + std::to_string(world));
      PlanRig rig;
      ASSERT_EQ(rig.create(p.desc(world)), MFSDP_OK) << rig.message();
      for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
        for (mfsdp_layout_kind kind : kKinds) {
          check_gather(&rig, u, kind);
          check_merged(&rig, u, kind);
        }
      if (HasFailure()) return;
    }
  }
}

TEST(Extents, NeighboursWithEqualPaddingAreOne) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {10, 10}); /* 100: 28 of padding */
  p.add("b", MFSDP_ROLE_FROZEN, 0, {100});
  p.add("c", MFSDP_ROLE_MATRIX, 0, {10, 30}); /* 300 */
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  std::vector<mfsdp_extent> gather = rig.extents(0, MFSDP_LAYOUT_GATHER);
  ASSERT_EQ(gather.size(), 1u);
  EXPECT_EQ(gather[0].unit_offset, 0);
  EXPECT_EQ(gather[0].count, 128 + 128 + 300); /* padding at the end is not moved */
  EXPECT_EQ(gather[0].payload_count, 500);
  std::vector<mfsdp_extent> reduce = rig.extents(0, MFSDP_LAYOUT_REDUCE);
  ASSERT_EQ(reduce.size(), 1u); /* the frozen tensor between them is not there */
  EXPECT_EQ(reduce[0].count, 128 + 300);
  EXPECT_EQ(reduce[0].payload_count, 400);
}

/* Matrices of one tensor follow each other without padding in the buffer, but are aligned in the
 * segment: one extent each, unless their size is a multiple of the alignment. */
TEST(Extents, MatricesOfATensorMergeOnlyWhereTheSegmentHasNoGap) {
  Params p;
  p.add_heads("odd", 0, 3, 30, 10);  /* 100 each */
  p.add_heads("even", 1, 3, 48, 16); /* 256 each */
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  std::vector<mfsdp_extent> odd = rig.extents(0, MFSDP_LAYOUT_GATHER);
  ASSERT_EQ(odd.size(), 3u);
  EXPECT_EQ(odd[2].unit_offset, 200);
  EXPECT_EQ(odd[2].shard_offset, 256);
  EXPECT_EQ(odd[2].count, 100);
  std::vector<mfsdp_extent> even = rig.extents(1, MFSDP_LAYOUT_GATHER);
  ASSERT_EQ(even.size(), 1u);
  EXPECT_EQ(even[0].count, 768);
  EXPECT_EQ(even[0].payload_count, 768);
}

/* A neighbour in the segment that is none in the buffer stays apart. */
TEST(Extents, AnotherOwnerBetweenKeepsThemApart) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {16, 16});
  p.add("b", MFSDP_ROLE_MATRIX, 0, {16, 16});
  p.add("c", MFSDP_ROLE_MATRIX, 0, {16, 16});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_ROUND_ROBIN)), MFSDP_OK);
  std::vector<mfsdp_extent> extents = rig.extents(0, MFSDP_LAYOUT_GATHER);
  ASSERT_EQ(extents.size(), 3u);
  const int32_t owner[3] = {0, 1, 0};
  const int64_t shard[3] = {0, 0, 256};
  for (std::size_t k = 0; k < 3; ++k) {
    EXPECT_EQ(extents[k].owner, owner[k]);
    EXPECT_EQ(extents[k].shard_offset, shard[k]);
    EXPECT_EQ(extents[k].unit_offset, static_cast<int64_t>(k) * 256);
  }
}

TEST(Extents, PartsOfTheListAndEmptyUnits) {
  Params p;
  p.add_heads("odd", 0, 3, 30, 10);
  p.add("frozen", MFSDP_ROLE_FROZEN, 2, {50});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  mfsdp_extent two[3] = {};
  two[2].owner = -77;
  int32_t count = -1;
  ASSERT_EQ(mfsdp_plan_extents(&rig.context, rig.plan, 0, MFSDP_LAYOUT_GATHER, two, 2, &count),
            MFSDP_OK);
  EXPECT_EQ(count, 3);
  EXPECT_EQ(two[1].unit_offset, 100);
  EXPECT_EQ(two[2].owner, -77) << "written past the capacity";
  EXPECT_TRUE(rig.extents(1, MFSDP_LAYOUT_GATHER).empty()); /* a gap in the numbers */
  EXPECT_EQ(rig.extents(2, MFSDP_LAYOUT_GATHER).size(), 1u);
  EXPECT_TRUE(rig.extents(2, MFSDP_LAYOUT_REDUCE).empty());
}

TEST(Extents, BadArguments) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {16, 16});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  mfsdp_context *c = &rig.context;
  mfsdp_extent e;
  int32_t n = 0;
  const mfsdp_layout_kind g = MFSDP_LAYOUT_GATHER;
  EXPECT_EQ(mfsdp_plan_extents(c, nullptr, 0, g, &e, 1, &n), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, 0, g, &e, 1, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, 0, g, nullptr, 1, &n), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, 0, g, &e, -1, &n), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, -1, g, &e, 1, &n), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, 1, g, &e, 1, &n), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("unit is 1, needs 0 to 0"), std::string::npos);
  EXPECT_EQ(mfsdp_plan_extents(c, rig.plan, 0, static_cast<mfsdp_layout_kind>(0), &e, 1, &n),
            MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("kind is 0"), std::string::npos);
}

TEST(Extents, NothingIsAllocated) {
  Params p;
  fill_random(&p, 3);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(3)), MFSDP_OK);
  const int64_t before = rig.memory.alloc_count();
  for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
    (void)rig.extents(u, MFSDP_LAYOUT_GATHER);
  EXPECT_EQ(rig.memory.alloc_count(), before);
}

} // namespace
