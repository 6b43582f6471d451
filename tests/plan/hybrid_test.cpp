/* SPDX-License-Identifier: MIT */
/*
 * allow_banded: which matrices become BANDED, by hand and against a prediction computed from the pieces
 * of plans whose placements are described.
 */
#include "mfsdp/simulate.h"

#include "tests/support/plan_cases.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace {

using test::Params;
using test::PlanRig;

const mfsdp_planner kPlanners[] = {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY,
                                   MFSDP_PLANNER_SCOPE_GREEDY, MFSDP_PLANNER_COST_AWARE,
                                   MFSDP_PLANNER_BALANCED};

mfsdp_plan_desc hybrid(mfsdp_plan_desc desc, int64_t wire_cost, int64_t message_nbytes = 0) {
  desc.allow_banded = 1;
  desc.banded_wire_cost = wire_cost;
  desc.banded_message_nbytes = message_nbytes;
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

/* Extents of the matrices of a unit by rank: pieces that lie in the unit as they lie in a segment are one. */
std::vector<int64_t> extents_of(const PlanRig &rig, int32_t unit) {
  std::vector<int64_t> out(static_cast<std::size_t>(mfsdp_plan_world(rig.plan)));
  int32_t owner = -1;
  int64_t end = -1; /* of the piece before, padded */
  for (const mfsdp_piece &x : rig.pieces(unit)) {
    if (x.matrix < 0) continue;
    if (x.owner != owner || x.unit_offset != end) ++out[static_cast<std::size_t>(x.owner)];
    owner = x.owner;
    end = x.unit_offset + (x.count + 127) / 128 * 128;
  }
  return out;
}

/* One collective of a unit: the slowest rank, in bytes. */
int64_t predict_unit(const PlanRig &rig, int32_t unit, mfsdp_layout_kind kind,
                     int64_t message_nbytes) {
  const int32_t world = mfsdp_plan_world(rig.plan);
  const int64_t payload = mfsdp_plan_unit_payload(rig.plan, unit, kind), peers = world - 1;
  const int64_t level = (payload + world - 1) / world;
  const mfsdp_dtype dtype = kind == MFSDP_LAYOUT_GATHER
                                ? mfsdp_plan_unit_dtype(rig.plan, unit, kind)
                                : mfsdp_plan_unit_wire(rig.plan, unit);
  std::vector<int64_t> held(static_cast<std::size_t>(world));
  int64_t tail = payload, extents = 0, slowest = 0;
  for (const mfsdp_piece &x : rig.pieces(unit)) {
    if (x.matrix < 0) continue;
    held[static_cast<std::size_t>(x.owner)] += x.count;
    tail -= x.count;
  }
  const std::vector<int64_t> own = extents_of(rig, unit);
  for (const int64_t n : own)
    extents += n;
  for (std::size_t r = 0; r < held.size(); ++r) {
    const int64_t filled = std::max(held[r], std::min(level, held[r] + tail));
    slowest = std::max(slowest, message_nbytes * std::max(peers * own[r], extents - own[r]) +
                                    static_cast<int64_t>(mfsdp_dtype_nbytes(dtype)) *
                                        std::max(peers * filled, payload - filled));
  }
  return slowest;
}

/* Bands on their way home. */
int64_t predict_exchange(const PlanRig &rig, int64_t message_nbytes) {
  const auto ranks = static_cast<std::size_t>(mfsdp_plan_world(rig.plan));
  std::vector<int64_t> out(ranks), in(ranks), out_count(ranks), in_count(ranks);
  std::set<std::pair<int32_t, int32_t>> pairs;
  int64_t slowest = 0;
  for (const mfsdp_piece &x : rig.pieces()) {
    const auto from = static_cast<std::size_t>(x.owner), to = static_cast<std::size_t>(x.home);
    if (from == to) continue;
    out[from] += x.count;
    in[to] += x.count;
    if (!pairs.insert(std::make_pair(x.owner, x.home)).second) continue;
    ++out_count[from];
    ++in_count[to];
  }
  for (std::size_t r = 0; r < ranks; ++r)
    slowest = std::max(slowest, message_nbytes * std::max(out_count[r], in_count[r]) +
                                    4 * std::max(out[r], in[r]));
  return slowest;
}

/* The prediction as plan/hybrid.h states it, from pieces alone. */
int64_t predict(const PlanRig &rig, int64_t wire_cost, int64_t gathers, int64_t reduces,
                int64_t message_nbytes = 0) {
  std::vector<int64_t> cost(static_cast<std::size_t>(mfsdp_plan_world(rig.plan)));
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  int64_t wire = 2 * predict_exchange(rig, message_nbytes);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    cost[static_cast<std::size_t>(pieces[i].home)] +=
        mfsdp_plan_piece_cost(rig.plan, static_cast<int32_t>(i));
  for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
    wire += gathers * predict_unit(rig, u, MFSDP_LAYOUT_GATHER, message_nbytes) +
            reduces * predict_unit(rig, u, MFSDP_LAYOUT_REDUCE, message_nbytes);
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
  ASSERT_EQ(plain.create(hybrid(p.desc(1), 5, 7)), MFSDP_OK) << plain.message();
  for (int change = 6; change < 11; ++change) {
    mfsdp_plan_desc desc = hybrid(p.desc(1), change == 9 ? 6 : 5, change == 10 ? 8 : 7);
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
      const int64_t message = seed % 8 < 3 ? 0 : INT64_C(1) << seed % 8; /* bytes */
      PlanRig owned, rig, again;
      ASSERT_EQ(owned.create(p.desc(world, planner)), MFSDP_OK) << owned.message();
      mfsdp_plan_desc desc = hybrid(p.desc(world, planner), wire_cost, message);
      desc.materialize_count = static_cast<int32_t>(seed % 4);
      desc.reduce_count = static_cast<int32_t>(seed % 3);
      ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
      ASSERT_EQ(again.create(desc), MFSDP_OK) << again.message();
      EXPECT_EQ(rig.bytes(), again.bytes());
      const mfsdp_plan_summary s = report_of(&rig);
      EXPECT_EQ(s.predicted_owned,
                predict(owned, wire_cost, desc.materialize_count, desc.reduce_count, message))
          << "seed " << seed << ", world " << world;
      EXPECT_EQ(s.predicted,
                predict(rig, wire_cost, desc.materialize_count, desc.reduce_count, message))
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
    const int64_t message = seed % 3 == 0 ? 0 : draw.between(1, 600);
    ASSERT_EQ(rig.create(hybrid(p.desc(world), 1, message)), MFSDP_OK) << rig.message();
    int64_t best = INT64_MAX;
    std::size_t best_k = 0;
    for (std::size_t k = 0; k <= shapes.size(); ++k) {
      PlanRig described;
      for (std::size_t i = 0; i < k; ++i)
        p.list[i].placement = MFSDP_PLACEMENT_BANDED;
      ASSERT_EQ(described.create(p.desc(world)), MFSDP_OK) << described.message();
      const int64_t predicted = predict(described, 1, 2, 1, message);
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

/* ---- messages ---- */

/* As in TwoMatricesOnEightRanks. Whole, a gather is 7 messages of the two owners; in bands each rank
 * sends two extents to 7 others, and a home gets 7 messages, twice: 3 * 14 + 2 * 7 instead of 3 * 7. */
TEST(PlanHybrid, MessagesHaveToPayToo) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {64, 64});
  p.add("b", MFSDP_ROLE_MATRIX, 0, {64, 64});
  const int64_t saved = 7 * 12 * 4096 - 7 * 12 * 1024 - 8 * 7 * 512;
  for (const int64_t message : {INT64_C(0), INT64_C(1), saved / 35, saved / 35 + 1, saved}) {
    PlanRig rig;
    ASSERT_EQ(rig.create(hybrid(p.desc(8), 3, message)), MFSDP_OK) << rig.message();
    const mfsdp_plan_summary s = report_of(&rig);
    const bool pays = 35 * message < saved;
    EXPECT_EQ(s.chosen_count, pays ? 2 : 0) << message;
    EXPECT_EQ(s.predicted_owned, 4096 + 3 * (7 * 12 * 4096 + 21 * message));
    EXPECT_EQ(s.predicted_owned - s.predicted, pays ? 3 * (saved - 35 * message) : 0);
  }
}

/* Lists without tails whose pieces need no padding: all that the plan leaves to estimate. On up to 33
 * ranks with rows >= 64 every rank has a band of each; otherwise few rows as well. */
void fill_padded(Params *p, test::Draw *draw, bool few_rows) {
  const int64_t units = draw->between(1, 4);
  for (int64_t u = 0; u < units; ++u) {
    const int64_t tensors = draw->between(1, 5);
    const bool narrow = draw->below(2) != 0;
    for (int64_t t = 0; t < tensors; ++t) {
      const std::string name = std::to_string(u) + "." + std::to_string(t);
      const int64_t rows =
          few_rows && draw->below(2) ? draw->between(1, 20) : draw->between(64, 300);
      const int64_t cols = 128 * draw->between(1, 3), heads = draw->between(1, 4);
      const auto unit = static_cast<int32_t>(u);
      if (draw->below(3) == 0)
        p->add_heads(name, unit, static_cast<int32_t>(heads), heads * rows, cols);
      else
        p->add(name, MFSDP_ROLE_MATRIX, unit, {rows, cols});
      if (draw->below(8) == 0) p->list.back().placement = MFSDP_PLACEMENT_BANDED;
      if (narrow) p->list.back().compute = p->list.back().wire = MFSDP_BF16;
    }
  }
}

mfsdp_sim_result simulated(PlanRig *rig, const mfsdp_cluster &cluster,
                           const mfsdp_plan_desc &desc) {
  mfsdp_sim_desc ask = mfsdp_sim_desc_default();
  mfsdp_sim_result result = mfsdp_sim_result_default();
  ask.plan = rig->plan;
  ask.cluster = &cluster;
  ask.materialize_count = desc.materialize_count;
  ask.reduce_count = desc.reduce_count;
  ask.chunk_nbytes = std::numeric_limits<std::size_t>::max(); /* the planner knows no chunks */
  EXPECT_EQ(mfsdp_simulate(&rig->context, &ask, &result, nullptr, 0), MFSDP_OK) << rig->message();
  return result;
}

/* One node, a byte in a microsecond, and memory that takes nothing: the simulator's microseconds are the
 * planner's bytes, before and after the choice; and what was chosen is shorter by its own saying. */
TEST(PlanHybrid, PredictsWhatSimulatePredicts) {
  /* Passes over memory at 10^12 bytes a microsecond and rounded sums of up to 2^40 stay below this; bytes
   * differ by 1 or more. */
  const double kLess = 1e-3;
  int32_t chosen = 0, kept = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    test::Draw draw(seed);
    Params p;
    fill_padded(&p, &draw, seed % 2 == 0);
    for (const int32_t world : {1, 2, 3, 8, 33}) {
      std::vector<int64_t> load(static_cast<std::size_t>(world));
      for (int64_t &one : load)
        one = draw.below(3) ? 0 : draw.between(0, 200000);
      mfsdp_cluster cluster = mfsdp_cluster_default();
      cluster.ranks_per_node = 64;
      cluster.node_nbytes_per_s = 1e6;
      cluster.memory_nbytes_per_s = 1e18;
      cluster.node_latency_us =
          draw.below(4) ? static_cast<double>(INT64_C(1) << draw.below(20)) : 0.0;
      const int64_t message = mfsdp_cluster_message_nbytes(&cluster, world);
      ASSERT_EQ(static_cast<double>(message), cluster.node_latency_us);
      mfsdp_plan_desc desc = p.desc(world, kPlanners[seed % 5]);
      desc.base_load = load.data();
      desc.materialize_count = static_cast<int32_t>(draw.below(4));
      desc.reduce_count = static_cast<int32_t>(draw.below(3));
      PlanRig owned, rig;
      ASSERT_EQ(owned.create(desc), MFSDP_OK) << owned.message();
      desc = hybrid(desc, 1, message);
      ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
      const mfsdp_plan_summary s = report_of(&rig);
      const mfsdp_sim_result before = simulated(&owned, cluster, desc);
      const mfsdp_sim_result after = simulated(&rig, cluster, desc);
      const auto wire = [](const mfsdp_sim_result &r) {
        return r.materialize_us + r.reduce_us + r.optimizer_wire_us;
      };
      EXPECT_NEAR(wire(before), static_cast<double>(s.predicted_owned - s.cost.max), kLess)
          << "seed " << seed << ", world " << world;
      EXPECT_NEAR(wire(after), static_cast<double>(s.predicted - s.cost.max), kLess)
          << "seed " << seed << ", world " << world;
      EXPECT_LE(after.step_us, before.step_us - (s.chosen_count > 0 ? 1 : 0) + kLess)
          << "seed " << seed << ", world " << world;
      chosen += s.chosen_count;
      kept += s.matrix_count - s.banded_count;
    }
  }
  EXPECT_GT(chosen, 200);
  EXPECT_GT(kept, 200);
}

/* Where messages take longer than all bytes together nothing is cut: a matrix in bands has an extent on
 * every rank. */
TEST(PlanHybrid, NothingIsCutWhereMessagesAreDear) {
  int32_t chosen = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    test::Draw draw(seed);
    Params p;
    fill_padded(&p, &draw, false);
    for (mfsdp_param &param : p.list)
      param.placement = MFSDP_PLACEMENT_OWNED;
    mfsdp_param &tail = p.add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {draw.below(50000)});
    tail.compute = p.list[0].compute; /* of the same unit */
    tail.wire = p.list[0].wire;
    for (const int32_t world : {2, 3, 8, 33}) {
      PlanRig rig, cheap;
      const mfsdp_plan_desc desc = p.desc(world, kPlanners[seed % 5]);
      ASSERT_EQ(rig.create(hybrid(desc, 1, INT64_C(1) << 30)), MFSDP_OK) << rig.message();
      EXPECT_EQ(report_of(&rig).banded_count, 0) << "seed " << seed << ", world " << world;
      ASSERT_EQ(cheap.create(hybrid(desc, 1, 0)), MFSDP_OK) << cheap.message();
      chosen += report_of(&cheap).chosen_count;
    }
  }
  EXPECT_GT(chosen, 200) << "by bytes alone";
}

/* All eight of unit 0 are tried and stay whole: no message of theirs may be left in what the other unit
 * is predicted by, whose one matrix has three bands, so that its home gets fewer messages. */
TEST(PlanHybrid, WhatWasTriedIsForgotten) {
  Params p;
  for (int i = 0; i < 8; ++i)
    p.add("w" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {64, 1024});
  p.add("rows", MFSDP_ROLE_MATRIX, 1, {3, 128 * 128});
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8, MFSDP_PLANNER_ROUND_ROBIN), 1, 100)), MFSDP_OK)
      << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{8, 0}}));
  EXPECT_EQ(report_of(&rig).predicted, predict(rig, 1, 2, 1, 100));
}

/* Many small matrices against one large one: their bands are shorter than a message. */
TEST(PlanHybrid, SmallMatricesStayWhole) {
  Params p;
  p.add("huge", MFSDP_ROLE_MATRIX, 0, {1024, 1024});
  p.add_heads("small", 1, 5, 5 * 64, 64);
  PlanRig rig;
  ASSERT_EQ(rig.create(hybrid(p.desc(8), 1, 0)), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 6);
  ASSERT_EQ(rig.create(hybrid(p.desc(8), 1, 4096)), MFSDP_OK) << rig.message();
  EXPECT_EQ(banded_of(rig), (std::vector<std::pair<int32_t, int32_t>>{{0, 0}}));
}

TEST(PlanHybrid, MessagesThatDoNotFit) {
  Params p;
  p.add("w", MFSDP_ROLE_MATRIX, 0, {64, 64});
  PlanRig rig;
  mfsdp_plan_desc desc = hybrid(p.desc(1 << 20), 1, MFSDP_PLAN_MAX_MESSAGE_NBYTES);
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_EQ(report_of(&rig).chosen_count, 0);
  desc.materialize_count = 1 << 4;
  EXPECT_EQ(rig.create(desc), MFSDP_E_OVERFLOW);
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
