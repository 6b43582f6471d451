/* SPDX-License-Identifier: MIT */
/*
 * Placements but OWNED: how BANDED matrices are cut, where they are at home and what their blocks are,
 * by tables worked out by hand and by properties over random lists; RESIDENT and REPLICATED plans.
 */
#include "mfsdp/simulate.h"

#include "tests/support/plan_cases.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

namespace {

using test::Params;
using test::PlanRig;

const mfsdp_planner kPlanners[] = {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY,
                                   MFSDP_PLANNER_SCOPE_GREEDY, MFSDP_PLANNER_COST_AWARE,
                                   MFSDP_PLANNER_BALANCED};

/* Every matrix of a list BANDED. */
void band_all(Params *p) {
  for (mfsdp_param &param : p->list)
    if (param.role == MFSDP_ROLE_MATRIX) param.placement = MFSDP_PLACEMENT_BANDED;
}

mfsdp_plan_summary report_of(PlanRig *rig) {
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  EXPECT_EQ(mfsdp_plan_report(&rig->context, rig->plan, &s, nullptr, 0), MFSDP_OK)
      << rig->message();
  return s;
}

std::vector<std::string> audit_of(PlanRig *rig) {
  std::vector<std::string> lines;
  EXPECT_EQ(mfsdp_plan_audit(
                &rig->context, rig->plan, nullptr,
                [](void *user, const char *line) {
                  static_cast<std::vector<std::string> *>(user)->push_back(line);
                },
                &lines),
            MFSDP_OK);
  return lines;
}

/* ---- the cut ---- */

TEST(PlanBand, RowsOfABlock) {
  EXPECT_EQ(mfsdp_plan_band_rows(0), 0);
  EXPECT_EQ(mfsdp_plan_band_rows(1), 1);
  EXPECT_EQ(mfsdp_plan_band_rows(64), 1);
  EXPECT_EQ(mfsdp_plan_band_rows(65), 2);
  EXPECT_EQ(mfsdp_plan_band_rows(128), 2);
  EXPECT_EQ(mfsdp_plan_band_rows(129), 3);
  EXPECT_EQ(mfsdp_plan_band_rows(INT64_MAX), INT64_MAX / 64 + 1);
}

/* 130 rows: blocks of 3, so 44 of them, the last of 1 row. Over 8 ranks 5 or 6 blocks each: they start
 * at 0 5 11 16 22 27 33 38. */
TEST(PlanBand, RowsOfARank) {
  const int64_t starts[9] = {0, 15, 33, 48, 66, 81, 99, 114, 130};
  for (int32_t r = 0; r < 8; ++r) {
    int64_t first, count;
    mfsdp_plan_band(130, 8, r, &first, &count);
    EXPECT_EQ(first, starts[r]) << r;
    EXPECT_EQ(count, starts[r + 1] - starts[r]) << r;
  }
}

/* 3 rows on 8 ranks: block j is where 3 * (r + 1) / 8 first passes it. */
TEST(PlanBand, FewerRowsThanRanks) {
  const int64_t counts[8] = {0, 0, 1, 0, 0, 1, 0, 1};
  for (int32_t r = 0; r < 8; ++r) {
    int64_t first, count;
    mfsdp_plan_band(3, 8, r, &first, &count);
    EXPECT_EQ(count, counts[r]) << r;
  }
  int64_t first, count;
  mfsdp_plan_band(0, 8, 3, &first, &count);
  EXPECT_EQ(count, 0);
}

/* The cursor gives what the function gives, rank by rank, and no more steps than bands. */
TEST(PlanBand, CursorAgrees) {
  for (const int64_t rows : {0, 1, 2, 63, 64, 65, 127, 128, 130, 1000, 4097})
    for (const int32_t world : {1, 2, 3, 7, 8, 63, 64, 65, 200, 1 << 20}) {
      mfsdp__band_cursor cursor = mfsdp__band_begin(rows, world);
      int64_t done = 0, bands = 0;
      int32_t before = -1;
      for (; mfsdp__band_next(&cursor); ++bands) {
        int64_t first, count;
        ASSERT_LT(cursor.rank, world);
        ASSERT_GT(cursor.rank, before);
        before = cursor.rank;
        mfsdp_plan_band(rows, world, cursor.rank, &first, &count);
        EXPECT_EQ(cursor.first, done);
        EXPECT_EQ(cursor.first, first);
        EXPECT_EQ(cursor.count, count);
        ASSERT_GT(count, 0);
        done += count;
      }
      EXPECT_EQ(done, rows) << rows << " rows, world " << world;
      EXPECT_EQ(bands, mfsdp__band_count(rows, world));
    }
}

/* A 6 x 100 matrix on 4 ranks, its home chosen by cost. Blocks of 1 row: ranks hold 1, 2, 1, 2 rows. */
TEST(PlanBand, PiecesByHand) {
  Params p;
  p.add("v", MFSDP_ROLE_ELEMENTWISE, 0, {100});
  p.add("w", MFSDP_ROLE_MATRIX, 0, {6, 100}).placement = MFSDP_PLACEMENT_BANDED;
  p.add("x", MFSDP_ROLE_MATRIX, 0, {30, 30});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4)), MFSDP_OK) << rig.message();
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  ASSERT_EQ(pieces.size(), 6u);
  const int64_t rows[4] = {1, 2, 1, 2}, first[4] = {0, 100, 300, 400};
  for (int32_t r = 0; r < 4; ++r) {
    const mfsdp_piece &band = pieces[static_cast<std::size_t>(1 + r)];
    EXPECT_EQ(band.param, 1);
    EXPECT_EQ(band.matrix, 0);
    EXPECT_EQ(band.owner, r);
    EXPECT_EQ(band.home, 1); /* x, the larger one, has taken rank 0 */
    EXPECT_EQ(band.placement, MFSDP_PLACEMENT_BANDED);
    EXPECT_EQ(band.first, first[r]);
    EXPECT_EQ(band.rows, rows[r]);
    EXPECT_EQ(band.cols, 100);
    EXPECT_EQ(band.count, rows[r] * 100);
    EXPECT_EQ(band.matrix_first, 0);
    EXPECT_EQ(band.matrix_rows, 6);
    EXPECT_EQ(band.unit_offset, 128 + first[r]);
    EXPECT_EQ(band.grad_unit_offset, 128 + first[r]);
    EXPECT_EQ(mfsdp_plan_piece_cost(rig.plan, 1 + r), r == 0 ? 600 : 0);
  }
  EXPECT_EQ(pieces[0].placement, MFSDP_PLACEMENT_OWNED);
  EXPECT_EQ(pieces[0].home, pieces[0].owner);
  EXPECT_EQ(pieces[0].matrix_rows, 1);
  EXPECT_EQ(pieces[5].placement, MFSDP_PLACEMENT_OWNED);
  EXPECT_EQ(pieces[5].home, 0);
  EXPECT_EQ(pieces[5].owner, 0);
  EXPECT_EQ(pieces[5].matrix_rows, 30);
  /* Segments: bands of 100 take 128, of 200 take 256; rank 0 has x behind its band. */
  EXPECT_EQ(pieces[5].shard_offset, 128 + (pieces[0].owner == 0 ? 128 : 0));
  EXPECT_EQ(mfsdp_plan_segment_payload(rig.plan, 0, 3, MFSDP_LAYOUT_REDUCE),
            200 + (pieces[0].owner == 3 ? 100 : 0));
  /* In the full buffer the tensor is contiguous: one extent per band, or more joined. */
  int64_t payload = 0;
  for (const mfsdp_extent &extent : rig.extents(0, MFSDP_LAYOUT_GATHER))
    payload += extent.payload_count;
  EXPECT_EQ(payload, 100 + 600 + 900);

  std::vector<int64_t> loads(4);
  ASSERT_EQ(mfsdp_plan_loads(&rig.context, rig.plan, loads.data(), 4), MFSDP_OK);
  EXPECT_EQ(loads, (std::vector<int64_t>{900, 600, 0, 0}));
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.matrix_count, 2);
  EXPECT_EQ(s.banded_count, 1);
  EXPECT_EQ(s.piece_count, 6);
  EXPECT_EQ(s.cost.max, 900);
  EXPECT_EQ(s.cost.sum, 1500);
  EXPECT_EQ(s.resident.sum, 128 + 128 + 256 + 128 + 256 + 1024);
  /* Ranks 0, 2 and 3 send their bands home; rank 1 sends these back. */
  EXPECT_EQ(s.exchanged.sum, 2 * (100 + 100 + 200));
  EXPECT_EQ(s.exchanged.max, 400);
  EXPECT_EQ(s.exchanged.max_rank, 1);
  /* Each gathered element goes to 3 peers, each sum comes from 3. */
  EXPECT_EQ(s.sent.sum, 3 * 1600 + 3 * 1600);

  const std::vector<std::string> lines = audit_of(&rig);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[1], "w  [6,100]  unit 0  matrix whole -> 1 matrix  group 0  banded  home 1  ?");
  EXPECT_EQ(lines[2], "x  [30,30]  unit 0  matrix whole -> 1 matrix  group 0  owner 0  ?");
}

TEST(PlanBand, WorldOfOneHoldsWholeMatrices) {
  Params p;
  p.add_heads("w", 0, 2, 260, 10).placement = MFSDP_PLACEMENT_BANDED;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK) << rig.message();
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[1].first, 1300);
  EXPECT_EQ(pieces[1].rows, 130);
  EXPECT_EQ(pieces[1].matrix_first, 1300);
  EXPECT_EQ(pieces[1].matrix_rows, 130);
  EXPECT_EQ(pieces[1].placement, MFSDP_PLACEMENT_BANDED);
  const std::vector<mfsdp_norm_block> blocks = rig.blocks();
  ASSERT_EQ(blocks.size(), 2u * 44);
  EXPECT_EQ(blocks[0].count, 30);
  EXPECT_EQ(blocks[43].first, 1290);
  EXPECT_EQ(blocks[43].count, 10);
  EXPECT_EQ(blocks[44].first, 1300);
  EXPECT_EQ(blocks[44].piece, 1);
  EXPECT_EQ(report_of(&rig).exchanged.sum, 0);
}

/* Every view cuts matrices first: no band crosses from one into the next. */
TEST(PlanBand, ViewsAreBandedPerMatrix) {
  Params p;
  p.add("conv", MFSDP_ROLE_MATRIX, 0, {4, 3, 5, 5}).view = MFSDP_VIEW_CONV;
  p.add("batch", MFSDP_ROLE_MATRIX, 0, {3, 4, 6}).view = MFSDP_VIEW_BATCH;
  p.add_rows("rows", 1, {5, 0, 2}, 8);
  p.add_heads("heads", 1, 2, 8, 8);
  p.add_batch_rows("fused", 1, 2, {2, 4}, 3);
  band_all(&p);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  typedef std::tuple<int32_t, int32_t, int64_t, int64_t, int64_t, int64_t> Row;
  std::vector<Row> rows;
  for (const mfsdp_piece &x : rig.pieces())
    rows.push_back(Row(x.param, x.matrix, x.first, x.rows, x.matrix_first, x.matrix_rows));
  const std::vector<Row> expected = {
      Row(0, 0, 0, 2, 0, 4),   Row(0, 0, 150, 2, 0, 4), Row(1, 0, 0, 2, 0, 4),
      Row(1, 0, 12, 2, 0, 4),  Row(1, 1, 24, 2, 24, 4), Row(1, 1, 36, 2, 24, 4),
      Row(1, 2, 48, 2, 48, 4), Row(1, 2, 60, 2, 48, 4), Row(2, 0, 0, 2, 0, 5),
      Row(2, 0, 16, 3, 0, 5),  Row(2, 2, 40, 1, 40, 2), Row(2, 2, 48, 1, 40, 2),
      Row(3, 0, 0, 2, 0, 4),   Row(3, 0, 16, 2, 0, 4),  Row(3, 1, 32, 2, 32, 4),
      Row(3, 1, 48, 2, 32, 4), Row(4, 0, 0, 1, 0, 2),   Row(4, 0, 3, 1, 0, 2),
      Row(4, 1, 6, 2, 6, 4),   Row(4, 1, 12, 2, 6, 4),  Row(4, 2, 18, 1, 18, 2),
      Row(4, 2, 21, 1, 18, 2), Row(4, 3, 24, 2, 24, 4), Row(4, 3, 30, 2, 24, 4)};
  EXPECT_EQ(rows, expected);
  EXPECT_EQ(report_of(&rig).matrix_count, 12);
}

TEST(PlanBand, EmptyMatricesAndAliasesHaveNoBands) {
  Params p;
  p.add("empty", MFSDP_ROLE_MATRIX, 0, {0, 8}).placement = MFSDP_PLACEMENT_BANDED;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {2, 8}).placement = MFSDP_PLACEMENT_BANDED;
  p.add_alias("tied", 1, 3);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK) << rig.message();
  ASSERT_EQ(rig.pieces().size(), 2u); /* 2 rows on 8 ranks */
  EXPECT_EQ(rig.pieces()[0].owner, 3);
  EXPECT_EQ(rig.pieces()[1].owner, 7);
  EXPECT_EQ(rig.pieces()[0].home, 0); /* which holds no band */
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 3, MFSDP_LAYOUT_GATHER), 0);
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.exchanged.sum, 2 * 16);
  EXPECT_EQ(s.exchanged.max, 16);
  EXPECT_EQ(s.exchanged.max_rank, 0);
  EXPECT_EQ(audit_of(&rig)[0],
            "empty  [0,8]  unit 0  matrix whole -> 1 matrix  group 0  owner none (empty)  ?");
}

/* ---- properties ---- */

/* Pieces tile every tensor, bands of a matrix agree, segments are packed, blocks lie in pieces and are
 * the same at every world; homes are what owners are in the OWNED plan. */
void check_plan(PlanRig *rig, const Params &p) {
  const int32_t world = mfsdp_plan_world(rig->plan);
  for (int32_t i = 0; i < mfsdp_plan_param_count(rig->plan); ++i) {
    int32_t count = 0;
    const mfsdp_piece *x = mfsdp_plan_param_pieces(rig->plan, i, &count);
    int64_t at = 0;
    for (int32_t k = 0; k < count; ++k) {
      const bool banded = x[k].matrix >= 0 &&
                          p.list[static_cast<std::size_t>(i)].placement == MFSDP_PLACEMENT_BANDED;
      ASSERT_EQ(x[k].first, at);
      ASSERT_GT(x[k].count, 0);
      ASSERT_EQ(x[k].count, x[k].rows * x[k].cols);
      ASSERT_TRUE(x[k].owner >= 0 && x[k].owner < world && x[k].home >= 0 && x[k].home < world);
      ASSERT_EQ(x[k].placement, banded ? MFSDP_PLACEMENT_BANDED : MFSDP_PLACEMENT_OWNED);
      at += x[k].count;
      if (!banded) {
        ASSERT_EQ(x[k].home, x[k].owner);
        ASSERT_EQ(x[k].matrix_first, x[k].first);
        ASSERT_EQ(x[k].matrix_rows, x[k].rows);
        continue;
      }
      int64_t first, rows;
      mfsdp_plan_band(x[k].matrix_rows, world, x[k].owner, &first, &rows);
      ASSERT_EQ(x[k].first, x[k].matrix_first + first * x[k].cols);
      ASSERT_EQ(x[k].rows, rows);
      if (k > 0 && x[k - 1].matrix == x[k].matrix) {
        ASSERT_EQ(x[k - 1].home, x[k].home);
        ASSERT_EQ(x[k - 1].matrix_first, x[k].matrix_first);
        ASSERT_LT(x[k - 1].owner, x[k].owner);
      }
    }
    ASSERT_EQ(at, count > 0 ? mfsdp_plan_param_numel(rig->plan, i) : 0);
  }
  const std::vector<mfsdp_piece> pieces = rig->pieces();
  for (const mfsdp_norm_block &block : rig->blocks()) {
    const mfsdp_piece &piece = pieces[static_cast<std::size_t>(block.piece)];
    ASSERT_GE(block.first, piece.first);
    ASSERT_LE(block.first + block.count, piece.first + piece.count);
  }
}

typedef std::tuple<int32_t, int64_t, int64_t> Block;
std::vector<Block> block_list(PlanRig *rig) {
  std::vector<Block> out;
  for (const mfsdp_norm_block &block : rig->blocks())
    out.push_back(Block(block.param, block.first, block.count));
  return out;
}

TEST(PlanBand, PiecesTileAndBlocksIgnoreTheWorld) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Params p;
    test::fill_random(&p, seed);
    test::Draw draw(seed + 1000);
    for (mfsdp_param &param : p.list)
      if (param.role == MFSDP_ROLE_MATRIX && param.alias_of == nullptr && draw.below(2) == 0)
        param.placement = MFSDP_PLACEMENT_BANDED;
    for (mfsdp_param &param : p.list)
      for (const mfsdp_param &owner : p.list)
        if (param.alias_of != nullptr && std::string(param.alias_of) == owner.name)
          param.placement = owner.placement;
    std::vector<Block> blocks;
    for (const int32_t world : {1, 2, 3, 7, 8, 65}) {
      PlanRig rig;
      ASSERT_EQ(rig.create(p.desc(world, kPlanners[seed % 5])), MFSDP_OK) << rig.message();
      check_plan(&rig, p);
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", world " << world;
      if (world == 1) blocks = block_list(&rig);
      EXPECT_EQ(block_list(&rig), blocks) << "seed " << seed << ", world " << world;
      const mfsdp_plan_summary s = report_of(&rig);
      EXPECT_GE(s.cost.max, s.cost_bound);
      EXPECT_GE(s.resident_nbytes.max, s.resident_nbytes_bound);
      const std::vector<unsigned char> bytes = rig.bytes();
      ASSERT_EQ(rig.create(p.desc(world, kPlanners[seed % 5])), MFSDP_OK);
      EXPECT_EQ(rig.bytes(), bytes);
    }
  }
}

/* Cost is all that most planners look at: the home of a matrix is the owner it would have. */
TEST(PlanBand, HomesAreTheOwnersOfTheOwnedPlan) {
  Params owned, banded;
  test::fill_gpt(&owned, 5, 32, 100);
  test::fill_gpt(&banded, 5, 32, 100);
  band_all(&banded);
  for (int k = 0; k < 4; ++k) {
    PlanRig a, b;
    ASSERT_EQ(a.create(owned.desc(4, kPlanners[k])), MFSDP_OK);
    ASSERT_EQ(b.create(banded.desc(4, kPlanners[k])), MFSDP_OK);
    std::vector<int32_t> owners, homes;
    for (const mfsdp_piece &x : a.pieces())
      if (x.matrix >= 0) owners.push_back(x.owner);
    for (const mfsdp_piece &x : b.pieces())
      if (x.matrix >= 0 && x.first == x.matrix_first) homes.push_back(x.home);
    EXPECT_EQ(homes, owners) << mfsdp_planner_name(kPlanners[k]);
    EXPECT_EQ(report_of(&a).cost.max, report_of(&b).cost.max);
    EXPECT_EQ(report_of(&a).cost_bound, report_of(&b).cost_bound);
  }
}

/* BALANCED: homes by cost, bytes level because bands are, with tails on top. */
TEST(PlanBand, BalancedLevelsAroundBands) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {256, 1024}).placement = MFSDP_PLACEMENT_BANDED;
  for (int i = 0; i < 8; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 1, {128, 128});
  p.add("embed", MFSDP_ROLE_ELEMENTWISE, 2, {4096 * 32});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4, MFSDP_PLANNER_BALANCED)), MFSDP_OK) << rig.message();
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.banded_count, 1);
  EXPECT_EQ(s.cost.max, s.cost_bound) << "the home of the huge one does nothing else";
  EXPECT_EQ(s.bound, MFSDP_BOUND_LARGEST);
  EXPECT_LE(s.resident_nbytes.max - s.resident_nbytes_bound, 4096 * 8) << "a block";
}

/* Bands count against the cap on bytes; matrices that pass it whole do not as bands. */
TEST(PlanBand, CapOnBytes) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {128, 128}).placement = MFSDP_PLACEMENT_BANDED;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig rig;
  mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  desc.caps.max_resident_nbytes = (4096 + 4096) * 8; /* a band and w: 8 bytes an element */
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).resident_nbytes.max, 8192 * 8);
  EXPECT_EQ(report_of(&rig).resident_nbytes_bound, 8192 * 8) << "w on top of any band";
  desc.caps.max_resident_nbytes -= 1;
  EXPECT_EQ(rig.create(desc), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("is 1 too few"), std::string::npos) << rig.message();
  p.list[0].placement = MFSDP_PLACEMENT_OWNED;
  desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  desc.caps.max_resident_nbytes = (4096 + 4096) * 8;
  EXPECT_EQ(rig.create(desc), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("'huge': its 128 x 128 matrix alone"), std::string::npos);
}

/* Matrices beside bands of unequal bytes go where there is room, though that rank is the last choice by
 * cost: one matrix (all placements are tried) and many (local search). */
TEST(PlanBand, CapOnBytesDecidesWhereOthersGo) {
  for (const int32_t many : {1, 64}) {
    Params p; /* 3 rows on 4 ranks: none on rank 0 */
    p.add("rows", MFSDP_ROLE_MATRIX, 0, {3, 128 * 64}).placement = MFSDP_PLACEMENT_BANDED;
    p.add_heads("w", 0, many, 64, 128);
    PlanRig rig;
    mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
    desc.caps.max_resident_nbytes = 128 * 64 * 8;
    const int64_t load[4] = {1 << 20, 0, 0, 0};
    desc.base_load = load;
    ASSERT_EQ(rig.create(desc), MFSDP_OK) << many << ": " << rig.message();
    for (const mfsdp_piece &x : rig.pieces()) {
      if (x.placement == MFSDP_PLACEMENT_OWNED) {
        EXPECT_EQ(x.owner, 0);
      }
    }
  }
}

/* A tail is held in parts as large as the largest band of its unit, not the largest matrix. */
TEST(PlanBand, TailsGoByBands) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {256, 1024}).placement = MFSDP_PLACEMENT_BANDED;
  p.add("tail", MFSDP_ROLE_ELEMENTWISE, 0, {4 * 32 * 1024});
  for (int i = 0; i < 4; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 1, {1024, 1024});
  p.add("other tail", MFSDP_ROLE_ELEMENTWISE, 2,
        {29 * 4096}); /* so three ranks would do for all of it */
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK) << rig.message();
  int32_t count = 0;
  (void)mfsdp_plan_param_pieces(rig.plan, 1, &count);
  EXPECT_EQ(count, 4) << "32 rows of 1024 are the largest band";
}

TEST(PlanBand, SomeMatricesOfManyAudit) {
  Params p;
  p.add_heads("w", 0, 20, 40, 8).placement = MFSDP_PLACEMENT_BANDED;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_ROUND_ROBIN)), MFSDP_OK) << rig.message();
  EXPECT_EQ(audit_of(&rig)[0], "w  [40,8]  unit 0  matrix heads -> 20 matrices  group 0  banded  "
                               "homes 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 ... (20 matrices)  ?");
}

/* ---- hash ---- */

TEST(PlanBand, PlacementAndResidencyAreHashed) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {4, 8});
  PlanRig owned, banded, resident;
  ASSERT_EQ(owned.create(p.desc(1)), MFSDP_OK);
  mfsdp_plan_desc desc = p.desc(1);
  desc.residency = MFSDP_RESIDENCY_RESIDENT;
  ASSERT_EQ(resident.create(desc), MFSDP_OK) << resident.message();
  p.list[0].placement = MFSDP_PLACEMENT_BANDED;
  ASSERT_EQ(banded.create(p.desc(1)), MFSDP_OK) << banded.message();
  EXPECT_NE(mfsdp_plan_hash(owned.plan), mfsdp_plan_hash(banded.plan));
  EXPECT_NE(mfsdp_plan_hash(owned.plan), mfsdp_plan_hash(resident.plan));
  EXPECT_NE(mfsdp_plan_param_hash(owned.plan, 0), mfsdp_plan_param_hash(banded.plan, 0));
  EXPECT_NE(mfsdp_plan_description_hash(owned.plan, 0),
            mfsdp_plan_description_hash(banded.plan, 0));
  EXPECT_EQ(mfsdp_plan_residency(resident.plan), MFSDP_RESIDENCY_RESIDENT);
  EXPECT_STREQ(mfsdp_plan_setting_name(1), "residency");
  EXPECT_NE(mfsdp_plan_setting_hash(owned.plan, 1), mfsdp_plan_setting_hash(resident.plan, 1));
}

/* ---- resident, replicated ---- */

/* RESIDENT changes what stays in memory, not what is owned. */
TEST(PlanResident, OwnersAndReportStay) {
  Params p;
  test::fill_gpt(&p, 3, 32, 100);
  PlanRig sharded, resident;
  mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  ASSERT_EQ(sharded.create(desc), MFSDP_OK);
  desc.residency = MFSDP_RESIDENCY_RESIDENT;
  ASSERT_EQ(resident.create(desc), MFSDP_OK) << resident.message();
  const std::vector<mfsdp_piece> a = sharded.pieces(), b = resident.pieces();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].owner, b[i].owner);
    EXPECT_EQ(a[i].shard_offset, b[i].shard_offset);
  }
  EXPECT_EQ(report_of(&sharded).resident_nbytes.max, report_of(&resident).resident_nbytes.max);
}

/* REPLICATED: sums go where an OWNED plan has them, every rank carries everything. */
TEST(PlanReplicated, EveryRankCarriesAll) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {16, 16});
  p.add("x", MFSDP_ROLE_MATRIX, 1, {16, 8});
  p.add("v", MFSDP_ROLE_ELEMENTWISE, 1, {128});
  p.add("f", MFSDP_ROLE_FROZEN, 1, {256});
  p.add_alias("tied", 0, 2);
  PlanRig owned, rig;
  ASSERT_EQ(owned.create(p.desc(2)), MFSDP_OK);
  for (mfsdp_param &param : p.list)
    param.placement = MFSDP_PLACEMENT_REPLICATED;
  mfsdp_plan_desc desc = p.desc(2);
  const int64_t loads[2] = {7, 9};
  desc.base_load = loads;
  desc.residency = MFSDP_RESIDENCY_RESIDENT;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  const std::vector<mfsdp_piece> a = owned.pieces(), b = rig.pieces();
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < b.size(); ++i) {
    EXPECT_EQ(b[i].owner, a[i].owner) << i;
    EXPECT_EQ(b[i].home, b[i].owner);
    EXPECT_EQ(b[i].placement, MFSDP_PLACEMENT_REPLICATED);
  }
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.cost.max, 9 + 256 + 128);
  EXPECT_EQ(s.cost.sum, 7 + 9 + 2 * (256 + 128));
  EXPECT_EQ(s.cost_bound, s.cost.max);
  EXPECT_EQ(s.resident.max, 256 + 128 + 128 + 256);
  EXPECT_EQ(s.resident.sum, 2 * s.resident.max);
  EXPECT_EQ(s.resident_nbytes.max, (256 + 128 + 128) * 8 + 256 * 4);
  EXPECT_EQ(s.resident_nbytes_bound, s.resident_nbytes.max);
  EXPECT_EQ(s.sent.sum, 2 * (256 + 128 + 128)) << "sums to owners, and to all; nothing frozen";
  std::vector<int64_t> out(2);
  ASSERT_EQ(mfsdp_plan_loads(&rig.context, rig.plan, out.data(), 2), MFSDP_OK);
  EXPECT_EQ(out, (std::vector<int64_t>{7 + 384, 9 + 384}));
  EXPECT_EQ(audit_of(&rig)[0],
            "w  [16,16]  unit 0  matrix whole -> 1 matrix  group 0  replicated, sums at 0  ?");
  EXPECT_EQ(audit_of(&rig)[4], "tied  [16,16]  unit 2  matrix  alias of w");
  EXPECT_EQ(rig.blocks().size(), 3u);
}

TEST(PlanReplicated, CapsOnUnitsHoldForSums) {
  Params p;
  for (int i = 0; i < 4; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {16, 16}).placement =
        MFSDP_PLACEMENT_REPLICATED;
  mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  desc.residency = MFSDP_RESIDENCY_RESIDENT;
  desc.caps.max_owners = 2;
  PlanRig rig;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  mfsdp_unit_report unit;
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, &unit, 1), MFSDP_OK);
  EXPECT_EQ(unit.owner_count, 2);
}

/* What every rank carries is added up over the world: past 64 bits it is said, not wrapped. */
TEST(PlanReplicated, SumsThatDoNotFit) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {INT64_C(1) << 20, INT64_C(1) << 16}).placement =
      MFSDP_PLACEMENT_REPLICATED;
  mfsdp_plan_desc desc = p.desc(4096, MFSDP_PLANNER_BALANCED);
  desc.residency = MFSDP_RESIDENCY_RESIDENT;
  desc.cost = mfsdp_cost_newton_schulz; /* about 2^53 */
  PlanRig rig;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_E_OVERFLOW);
  EXPECT_NE(rig.message().find("costs of all ranks pass 64 bits"), std::string::npos)
      << rig.message();
  desc.cost = mfsdp_plan_cost_elements;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
}

/* ---- elsewhere ---- */

/* By OWNER alone, which is the plan as it is. */
TEST(PlanBand, SimulateRefusesByName) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {16, 16});
  p.add("x", MFSDP_ROLE_MATRIX, 0, {16, 16}).placement = MFSDP_PLACEMENT_BANDED;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  const mfsdp_cluster cluster = mfsdp_cluster_default();
  mfsdp_sim_desc desc = mfsdp_sim_desc_default();
  mfsdp_sim_result result = mfsdp_sim_result_default();
  desc.plan = rig.plan;
  desc.cluster = &cluster;
  EXPECT_EQ(mfsdp_simulate(&rig.context, &desc, &result, nullptr, 0), MFSDP_OK) << rig.message();
  for (int strategy = MFSDP_SIM_GATHER; strategy < MFSDP_SIM_STRATEGY_COUNT; ++strategy) {
    desc.strategy = static_cast<mfsdp_sim_strategy>(strategy);
    EXPECT_EQ(mfsdp_simulate(&rig.context, &desc, &result, nullptr, 0), MFSDP_E_UNSUPPORTED);
    EXPECT_NE(rig.message().find(std::string("params[1] 'x' is banded in the plan, strategy ") +
                                 mfsdp_sim_strategy_name(desc.strategy) + " needs owned"),
              std::string::npos)
        << rig.message();
  }
  for (mfsdp_param &param : p.list)
    param.placement = MFSDP_PLACEMENT_REPLICATED;
  mfsdp_plan_desc replicated = p.desc(2);
  replicated.residency = MFSDP_RESIDENCY_RESIDENT;
  ASSERT_EQ(rig.create(replicated), MFSDP_OK) << rig.message();
  desc.plan = rig.plan;
  desc.strategy = MFSDP_SIM_OWNER;
  EXPECT_EQ(mfsdp_simulate(&rig.context, &desc, &result, nullptr, 0), MFSDP_E_UNSUPPORTED);
  EXPECT_NE(rig.message().find("params[0] 'w' is replicated in the plan, strategy matrixfsdp needs "
                               "owned or banded"),
            std::string::npos)
      << rig.message();
}

/* Every allocation of a plan with bands fails once: a status, no leak, the next call works. */
TEST(PlanBand, FailingAllocations) {
  Params p;
  test::fill_gpt(&p, 1, 16, 10);
  band_all(&p);
  PlanRig rig;
  mfsdp_status status = MFSDP_E_MEMORY;
  for (int failing = 0; status != MFSDP_OK; ++failing) {
    rig.memory.fail_at(failing);
    status = rig.create(p.desc(4, MFSDP_PLANNER_BALANCED));
    if (status == MFSDP_OK) {
      mfsdp_plan_summary s = mfsdp_plan_summary_default();
      status = mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0);
    }
    rig.memory.fail_at(-1);
    ASSERT_TRUE(status == MFSDP_OK || status == MFSDP_E_MEMORY) << rig.message();
    ASSERT_LT(failing, 200);
  }
}

} // namespace
