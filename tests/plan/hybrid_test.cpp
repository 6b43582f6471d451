/* SPDX-License-Identifier: MIT */
/*
 * allow_banded: which matrices become BANDED, by hand and against a prediction computed from the pieces
 * of plans whose placements are described.
 */
#include "mfsdp/plan.h"

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

mfsdp_plan_desc hybrid(mfsdp_plan_desc desc, int64_t wire_cost) {
  desc.allow_banded = 1;
  desc.banded_wire_cost = wire_cost;
  return desc;
}

mfsdp_plan_summary report_of(PlanRig *rig) {
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  EXPECT_EQ(mfsdp_plan_report(&rig->context, rig->plan, &s, nullptr, 0), MFSDP_OK)
      << rig->message();
  return s;
}

/* Parameter and matrix of everything in bands. */
std::vector<std::pair<int32_t, int32_t>> banded_of(const PlanRig &rig) {
  std::vector<std::pair<int32_t, int32_t>> out;
  for (const mfsdp_piece &x : rig.pieces())
    if (x.placement == MFSDP_PLACEMENT_BANDED && x.first == x.matrix_first)
      out.push_back(std::make_pair(x.param, x.matrix));
  return out;
}

/* The prediction as plan/hybrid.h states it, from pieces alone. */
int64_t predict(const PlanRig &rig, int64_t wire_cost, int64_t gathers, int64_t reduces) {
  const int32_t world = mfsdp_plan_world(rig.plan);
  const auto ranks = static_cast<std::size_t>(world);
  std::vector<int64_t> cost(ranks), out(ranks), in(ranks);
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  int64_t wire = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const mfsdp_piece &x = pieces[i];
    cost[static_cast<std::size_t>(x.home)] +=
        mfsdp_plan_piece_cost(rig.plan, static_cast<int32_t>(i));
    if (x.owner == x.home) continue;
    out[static_cast<std::size_t>(x.owner)] += x.count;
    in[static_cast<std::size_t>(x.home)] += x.count;
  }
  for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u) {
    std::vector<int64_t> held(ranks);
    for (const mfsdp_piece &x : rig.pieces(u))
      if (x.matrix >= 0) held[static_cast<std::size_t>(x.owner)] += x.count;
    const int64_t most = *std::max_element(held.begin(), held.end());
    for (const mfsdp_layout_kind kind : {MFSDP_LAYOUT_GATHER, MFSDP_LAYOUT_REDUCE}) {
      const int64_t payload = mfsdp_plan_unit_payload(rig.plan, u, kind);
      const mfsdp_dtype dtype = kind == MFSDP_LAYOUT_GATHER
                                    ? mfsdp_plan_unit_dtype(rig.plan, u, kind)
                                    : mfsdp_plan_unit_wire(rig.plan, u);
      wire += std::max(most, (payload + world - 1) / world) * (world - 1) *
              static_cast<int64_t>(mfsdp_dtype_nbytes(dtype)) *
              (kind == MFSDP_LAYOUT_GATHER ? gathers : reduces);
    }
  }
  wire += 8 * std::max(*std::max_element(out.begin(), out.end()),
                       *std::max_element(in.begin(), in.end()));
  return *std::max_element(cost.begin(), cost.end()) + wire_cost * wire;
}

/* A matrix of 2^20 elements in unit 0 and 8 of 2^14 on 8 ranks in unit 1. The huge one makes its unit's
 * gathers 8 times as long as they need be; the others are level as they are. */
TEST(PlanHybrid, OneHugeMatrixAmongSmallOnes) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {1024, 1024});
  for (int i = 0; i < 8; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 1, {128, 128});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8, MFSDP_PLANNER_ROUND_ROBIN), 3)), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}}));
  const mfsdp_plan_summary s = report_of(&rig);
  const int64_t cost = (1 << 20) + (1 << 14); /* rank 0 has the first and the ninth */
  EXPECT_EQ(s.cost.max, cost);
  /* Two gathers and a reduce of 4 bytes each over 7 peers. */
  EXPECT_EQ(s.predicted_owned, cost + 3 * 7 * 12 * ((1 << 20) + (1 << 14)));
  /* Seven bands of 2^17 elements in 4 bytes reach home, and go back. */
  EXPECT_EQ(s.predicted, cost + 3 * 7 * (12 * ((1 << 17) + (1 << 14)) + 8 * (1 << 17)));
  EXPECT_EQ(s.banded_count, 1);
  EXPECT_EQ(s.chosen_count, 1);
  EXPECT_EQ(s.matrix_count, 9);
  EXPECT_EQ(rig.pieces()[0].home, 0);
  EXPECT_EQ(mfsdp_plan_param(rig.plan, 0)->placement, MFSDP_PLACEMENT_OWNED) << "as described";

  std::vector<std::string> lines;
  ASSERT_EQ(mfsdp_plan_audit(
                &rig.context, rig.plan, nullptr,
                [](void *user, const char *line) {
                  static_cast<std::vector<std::string> *>(user)->push_back(line);
                },
                &lines),
            MFSDP_OK);
  ASSERT_EQ(lines.size(), 10u);
  EXPECT_EQ(lines[0],
            "huge  [1024,1024]  unit 0  matrix whole -> 1 matrix  group 0  banded by choice  "
            "home 0  ?");
  EXPECT_EQ(lines[1], "w0  [128,128]  unit 1  matrix whole -> 1 matrix  group 0  owner 1  ?");
  EXPECT_EQ(lines[9], "allow_banded: 1 of 9 matrices banded by choice, predicted step " +
                          std::to_string(s.predicted) + " units of cost instead of " +
                          std::to_string(s.predicted_owned));
}

/* Neither helps alone: the other one would stay the largest segment. */
TEST(PlanHybrid, TwoMatricesOnEightRanks) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {64, 64});
  p.add("b", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8), 1)), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}, {1, 0}}));
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.predicted_owned, 4096 + 7 * 12 * 4096);
  EXPECT_EQ(s.predicted, 4096 + 7 * 12 * 1024 + 8 * 7 * 512);
  EXPECT_EQ(s.chosen_count, 2);
  EXPECT_EQ(s.cost.max, 4096) << "homes are two ranks";
}

/* Heads of one tensor are matrices of their own: some become BANDED, others of the tensor do not. */
TEST(PlanHybrid, SomeMatricesOfATensor) {
  Params p;
  p.add_rows("w", 0, {64, 8, 8, 8, 8, 8, 8, 8, 8}, 64);
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8, MFSDP_PLANNER_ROUND_ROBIN), 1)), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}}));
  std::string line;
  ASSERT_EQ(mfsdp_plan_audit(
                &rig.context, rig.plan, nullptr,
                [](void *user, const char *text) {
                  if (static_cast<std::string *>(user)->empty())
                    *static_cast<std::string *>(user) = text;
                },
                &line),
            MFSDP_OK);
  EXPECT_EQ(line,
            "w  [128,64]  unit 0  matrix rows -> 9 matrices  group 0  owners 1 2 3 4 5 6 7 0  "
            "banded by choice  home 0  ?");
}

/* Where matrices are level, where one rank has them all, and where units are never moved. */
TEST(PlanHybrid, NothingChangesWhereOwnedIsBetter) {
  Params p;
  for (int i = 0; i < 8; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {64, 64});
  p.add("alone", MFSDP_ROLE_MATRIX, 1, {32, 32});
  for (int k = 0; k < 3; ++k) {
    mfsdp_plan_desc desc = p.desc(k == 1 ? 1 : 8, MFSDP_PLANNER_ROUND_ROBIN);
    if (k == 0) desc.param_count = 8;
    PlanRig owned, rig;
    ASSERT_EQ(owned.create(desc), MFSDP_OK);
    desc = hybrid(desc, 1000);
    if (k == 2) desc.materialize_count = desc.reduce_count = 0;
    ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
    const std::vector<mfsdp_piece> a = owned.pieces(), b = rig.pieces();
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(b[i].placement, MFSDP_PLACEMENT_OWNED);
      EXPECT_EQ(b[i].owner, a[i].owner);
      EXPECT_EQ(b[i].shard_offset, a[i].shard_offset);
    }
    const mfsdp_plan_summary s = report_of(&rig);
    EXPECT_EQ(s.chosen_count, 0);
    EXPECT_EQ(s.predicted, s.predicted_owned);
    EXPECT_EQ(report_of(&owned).predicted, 0);
  }
}

/* An exchange that costs more than it saves: what is on the wire in 8 bytes an element both ways against
 * one reduce of 2 bytes. On 2 ranks one matrix gives 2 * n bytes whole, n in bands and 4 * n exchanged. */
TEST(PlanHybrid, AnExchangeHasToPay) {
  Params p;
  mfsdp_param &w = p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  w.compute = w.wire = MFSDP_BF16;
  PlanRig rig;
  mfsdp_plan_desc desc = hybrid(p.desc(2), 1);
  desc.materialize_count = 0;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 0);
  EXPECT_EQ(report_of(&rig).predicted, 4096 + 2 * 4096);
  desc.materialize_count = 4; /* 5 * 4096 bytes saved, 4 * 4096 exchanged */
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 1);
  EXPECT_EQ(report_of(&rig).predicted, 4096 + 5 * 4096 + 4 * 4096);
  desc.materialize_count = 3; /* equal: stays whole */
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 0);
}

/* ELEMENTWISE tensors of the unit fill the ranks: while the matrix is below an even share it is no
 * burden. */
TEST(PlanHybrid, TailsCountAsLevel) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  p.add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {3 * 4096});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(4), 1)), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 0);
  p.list[1].role = MFSDP_ROLE_FROZEN; /* level in gathers alone */
  mfsdp_plan_desc desc = hybrid(p.desc(4), 1);
  desc.reduce_count = 4;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 1);
}

/* Off: today's plan, whatever the fields behind it say. */
TEST(PlanHybrid, OffIsThePlanWithout) {
  Params p;
  test::fill_gpt(&p, 2, 32, 100);
  PlanRig plain, rig;
  ASSERT_EQ(plain.create(p.desc(8, MFSDP_PLANNER_BALANCED)), MFSDP_OK);
  mfsdp_plan_desc desc = hybrid(p.desc(8, MFSDP_PLANNER_BALANCED), -7);
  desc.allow_banded = 0;
  desc.materialize_count = -1;
  desc.reduce_count = 9;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(rig.bytes(), plain.bytes());
}

TEST(PlanHybrid, EverySettingIsHashed) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig plain;
  ASSERT_EQ(plain.create(hybrid(p.desc(1), 5)), MFSDP_OK) << plain.message();
  for (int change = 6; change < 10; ++change) {
    mfsdp_plan_desc desc = hybrid(p.desc(1), change == 9 ? 6 : 5);
    if (change == 6) desc.allow_banded = 0;
    if (change == 7) desc.materialize_count = 1;
    if (change == 8) desc.reduce_count = 3;
    PlanRig rig;
    ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
    EXPECT_NE(mfsdp_plan_hash(rig.plan), mfsdp_plan_hash(plain.plan)) << change;
    for (int32_t k = 0; mfsdp_plan_setting_name(k) != nullptr; ++k)
      EXPECT_EQ(mfsdp_plan_setting_hash(rig.plan, k) != mfsdp_plan_setting_hash(plain.plan, k),
                change == 6 ? k >= 6 : k == change)
          << mfsdp_plan_setting_name(k) << " after change " << change;
  }
}

/* ---- the cap on bytes ---- */

/* No rank could hold it: in bands before the planner starts, though nothing is sent at all. */
TEST(PlanHybrid, AMatrixTooLargeForAnyRank) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {128, 128});
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  desc.caps.max_resident_nbytes = 8192 * 8;
  PlanRig rig;
  EXPECT_EQ(rig.create(desc), MFSDP_E_ARGUMENT);
  desc = hybrid(desc, 1);
  desc.materialize_count = desc.reduce_count = 0;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}}));
  EXPECT_EQ(report_of(&rig).resident_nbytes.max, 8192 * 8);
  EXPECT_EQ(report_of(&rig).predicted, report_of(&rig).predicted_owned);
}

/* The planner knows of it: others take the room on its home, and none of them has to be cut. */
TEST(PlanHybrid, OthersGoAroundItsBands) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {128, 128});
  for (int i = 0; i < 4; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 1, {64, 64});
  mfsdp_plan_desc desc = hybrid(p.desc(4, MFSDP_PLANNER_BALANCED), 1);
  desc.caps.max_resident_nbytes = 8192 * 8;
  desc.materialize_count = desc.reduce_count = 0;
  PlanRig rig;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}}));
}

/* Tails level the ranks around bands that were chosen: 3 rows leave rank 0 free. */
TEST(PlanHybrid, TailsGoAroundChosenBands) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {3, 4 * 4096});
  p.add("embed", MFSDP_ROLE_ELEMENTWISE, 1, {4 * 4096});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(4), 1)), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 1);
  EXPECT_EQ(report_of(&rig).resident.max, 4 * 4096);
}

/* Each fits, but some rank has two of three: one is cut. */
TEST(PlanHybrid, TooManyForTheirRanks) {
  Params p;
  for (int i = 0; i < 3; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {64, 64});
  mfsdp_plan_desc desc = p.desc(2, MFSDP_PLANNER_BALANCED);
  desc.caps.max_resident_nbytes = (4096 + 2048) * 8;
  PlanRig rig;
  EXPECT_EQ(rig.create(desc), MFSDP_E_ARGUMENT);
  desc = hybrid(desc, 1);
  desc.materialize_count = desc.reduce_count = 0;
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 1);
  EXPECT_EQ(report_of(&rig).resident_nbytes.max, 6144 * 8);
  desc.caps.max_resident_nbytes -= 1;
  EXPECT_EQ(rig.create(desc), MFSDP_E_ARGUMENT) << "half of all is more";
  EXPECT_NE(rig.message().find("is 1 too few"), std::string::npos) << rig.message();
}

/* ---- properties ---- */

typedef std::tuple<int32_t, int64_t, int64_t> Block;
std::vector<Block> blocks_of(PlanRig *rig) {
  std::vector<Block> out;
  for (const mfsdp_norm_block &block : rig->blocks())
    out.push_back(Block(block.param, block.first, block.count));
  return out;
}

/* Predictions are those of the pieces, before and after; the same bytes again; blocks that ignore the
 * world, and what was chosen. */
TEST(PlanHybrid, PredictsWhatItMakes) {
  int32_t chosen = 0, kept = 0;
  for (uint64_t seed = 0; seed < 80; ++seed) {
    Params p;
    test::fill_random(&p, seed);
    std::vector<Block> blocks;
    for (const int32_t world : {1, 2, 3, 7, 70}) {
      const mfsdp_planner planner = kPlanners[seed % 5];
      const auto wire_cost = static_cast<int64_t>(1 + seed % 3);
      PlanRig owned, rig, again;
      ASSERT_EQ(owned.create(p.desc(world, planner)), MFSDP_OK) << owned.message();
      mfsdp_plan_desc desc = hybrid(p.desc(world, planner), wire_cost);
      desc.materialize_count = static_cast<int32_t>(seed % 4);
      desc.reduce_count = static_cast<int32_t>(seed % 3);
      ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
      ASSERT_EQ(again.create(desc), MFSDP_OK) << again.message();
      EXPECT_EQ(rig.bytes(), again.bytes());
      const mfsdp_plan_summary s = report_of(&rig);
      EXPECT_EQ(s.predicted_owned,
                predict(owned, wire_cost, desc.materialize_count, desc.reduce_count))
          << "seed " << seed << ", world " << world;
      EXPECT_EQ(s.predicted, predict(rig, wire_cost, desc.materialize_count, desc.reduce_count))
          << "seed " << seed << ", world " << world;
      EXPECT_LE(s.predicted, s.predicted_owned);
      EXPECT_EQ(s.predicted<s.predicted_owned, s.chosen_count> 0);
      EXPECT_EQ(s.chosen_count, s.banded_count);
      EXPECT_EQ(s.cost.max, report_of(&owned).cost.max);
      chosen += s.chosen_count;
      kept += s.matrix_count - s.chosen_count;
      if (world == 1) blocks = blocks_of(&rig);
      EXPECT_EQ(blocks_of(&rig), blocks) << "seed " << seed << ", world " << world;
    }
  }
  EXPECT_GT(chosen, 100);
  EXPECT_GT(kept, 100);
}

/* One unit: no number of its largest matrices in bands is predicted better than what is chosen, and of
 * equal ones the smallest number is. */
TEST(PlanHybrid, TheBestPrefixOfAUnit) {
  std::vector<int> seen(8);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    test::Draw draw(seed);
    std::vector<std::vector<int64_t>> shapes(static_cast<std::size_t>(draw.between(1, 6)));
    for (std::vector<int64_t> &shape : shapes)
      shape = {8 * draw.between(1, 12), 8 * draw.between(1, 3)};
    std::sort(shapes.begin(), shapes.end(),
              [](const auto &a, const auto &b) { return a[0] * a[1] > b[0] * b[1]; });
    const auto world = static_cast<int32_t>(draw.between(2, 9));
    Params p;
    for (std::size_t i = 0; i < shapes.size(); ++i)
      p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, shapes[i]);
    p.add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {draw.below(2000)});
    PlanRig rig;
    ASSERT_EQ(rig.create(hybrid(p.desc(world), 1)), MFSDP_OK) << rig.message();
    int64_t best = INT64_MAX;
    std::size_t best_k = 0;
    for (std::size_t k = 0; k <= shapes.size(); ++k) {
      PlanRig described;
      for (std::size_t i = 0; i < k; ++i)
        p.list[i].placement = MFSDP_PLACEMENT_BANDED;
      ASSERT_EQ(described.create(p.desc(world)), MFSDP_OK) << described.message();
      const int64_t predicted = predict(described, 1, 2, 1);
      if (predicted < best) {
        best = predicted;
        best_k = k;
      }
    }
    EXPECT_EQ(report_of(&rig).predicted, best) << "seed " << seed;
    EXPECT_EQ(banded_of(rig).size(), best_k) << "seed " << seed;
    ++seen[best_k];
  }
  EXPECT_GT(seen[0], 0);
  EXPECT_GT(seen[1], 0);
  EXPECT_GT(seen[3], 0);
}

/* What is described as BANDED stays so, and its exchange counts for what is chosen beside it. */
TEST(PlanHybrid, BesideDescribedBands) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {64, 64}).placement = MFSDP_PLACEMENT_BANDED;
  p.add("b", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8), 1)), MFSDP_OK) << rig.message();
  const mfsdp_plan_summary s = report_of(&rig);
  EXPECT_EQ(s.banded_count, 2);
  EXPECT_EQ(s.chosen_count, 1);
  EXPECT_EQ(s.predicted_owned, 4096 + 7 * 12 * (4096 + 512) + 8 * 7 * 512);
  EXPECT_EQ(s.predicted, 4096 + 7 * 12 * 1024 + 8 * 7 * 512);
}

/* ---- rules and limits ---- */

TEST(PlanHybrid, PredictionsThatDoNotFit) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig rig;
  EXPECT_EQ(rig.create(hybrid(p.desc(8), INT64_MAX / 2)), MFSDP_E_OVERFLOW);
  EXPECT_NE(rig.message().find("banded_wire_cost 4611686018427387903"), std::string::npos)
      << rig.message();
  EXPECT_NE(rig.message().find("coarser unit of cost"), std::string::npos) << rig.message();
  p.list[0].shape[0] = INT64_C(1) << 30; /* bytes of a unit alone */
  p.list[0].shape[1] = 1 << 14;
  EXPECT_EQ(rig.create(hybrid(p.desc(1 << 18), 1)), MFSDP_E_OVERFLOW);
}

TEST(PlanHybrid, FailingAllocations) {
  Params p;
  test::fill_gpt(&p, 1, 16, 10);
  PlanRig rig;
  mfsdp_status status = MFSDP_E_MEMORY;
  for (int failing = 0; status != MFSDP_OK; ++failing) {
    rig.memory.fail_at(failing);
    status = rig.create(hybrid(p.desc(4, MFSDP_PLANNER_BALANCED), 1));
    rig.memory.fail_at(-1);
    ASSERT_TRUE(status == MFSDP_OK || status == MFSDP_E_MEMORY) << rig.message();
    ASSERT_LT(failing, 200);
  }
}

/* All large matrices of a unit on one rank: each that becomes BANDED helps, until the work is spent on
 * looking at the ranks that have a small one. */
TEST(PlanHybrid, TheWorkIsLimited) {
  const int32_t world = 1 << 16, many = 2000;
  std::vector<int64_t> load(world, many * 256);
  load[5] = 0;
  for (const int32_t small : {100, world}) {
    Params p;
    p.add_heads("large", 0, many, 64 * many, 4);
    p.add_heads("small", 0, small, small, 1);
    PlanRig rig;
    mfsdp_plan_desc desc = hybrid(p.desc(world), 1);
    desc.base_load = load.data();
    ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
    const mfsdp_plan_summary s = report_of(&rig);
    EXPECT_EQ(s.matrix_count, many + small);
    if (small == world) {
      EXPECT_GT(s.chosen_count, many / 4);
      EXPECT_LT(s.chosen_count, many * 9 / 10);
    } else {
      EXPECT_GT(s.chosen_count, many * 9 / 10) << "where there is time for it";
    }
  }
}

} // namespace
