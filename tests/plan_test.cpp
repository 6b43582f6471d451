/* SPDX-License-Identifier: MIT */
/* Plans against simple restatements of their rules. The rules of descriptions: plan/param_test.cpp.
 */
#include "mfsdp/plan.h"

#include "tests/support/plan_cases.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

namespace {

using test::Draw;
using test::fill_gpt;
using test::fill_random;
using test::Params;
using test::PlanRig;

const mfsdp_planner kPlanners[] = {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY,
                                   MFSDP_PLANNER_SCOPE_GREEDY, MFSDP_PLANNER_COST_AWARE,
                                   MFSDP_PLANNER_BALANCED};
const int32_t kWorlds[] = {1, 2, 3, 4, 5, 7, 8, 16, 31, 64};
const uint64_t kSeeds = 40;

int64_t aligned(int64_t n) {
  return (n + 127) / 128 * 128;
}

int64_t numel_of(const mfsdp_param &p) {
  int64_t n = 1;
  for (int32_t d = 0; d < p.ndim; ++d)
    n *= p.shape[d];
  return n;
}

/* The canonical block as the rule is written: doubling from 1. */
int64_t block_of(int64_t numel) {
  int64_t power = 1;
  while (power * 1024 < numel)
    power *= 2;
  return std::max<int64_t>(4096, power);
}

int64_t weight_of(const mfsdp_param &p) {
  const auto size = [](mfsdp_dtype d) { return static_cast<int64_t>(mfsdp_dtype_nbytes(d)); };
  if (p.role == MFSDP_ROLE_FROZEN) return size(p.compute);
  return size(p.master) + (p.compute == p.master ? 0 : size(p.compute)) + 4;
}

struct Matrix {
  int32_t param, index, unit;
  int64_t first, rows, cols;
  int64_t cost;
};

/* The non-empty matrices of a tensor, each view spelled out. */
std::vector<Matrix> matrices_of(const std::vector<mfsdp_param> &list, int32_t i) {
  const mfsdp_param &p = list[static_cast<std::size_t>(i)];
  std::vector<std::pair<int64_t, int64_t>> sizes; /* rows, cols */
  if (p.alias_of == nullptr && p.role == MFSDP_ROLE_MATRIX) switch (p.view) {
    case MFSDP_VIEW_WHOLE: sizes.push_back({p.shape[0], p.shape[1]}); break;
    case MFSDP_VIEW_CONV: {
      int64_t rest = 1;
      for (int32_t d = 1; d < p.ndim; ++d)
        rest *= p.shape[d];
      sizes.push_back({p.shape[0], rest});
      break;
    }
    case MFSDP_VIEW_BATCH:
      for (int64_t e = 0; e < p.shape[0]; ++e)
        if (p.part_rows == nullptr)
          sizes.push_back({p.shape[1], p.shape[2]});
        else
          for (int32_t k = 0; k < p.part_count; ++k)
            sizes.push_back({p.part_rows[k], p.shape[2]});
      break;
    case MFSDP_VIEW_ROWS:
      for (int32_t k = 0; k < p.part_count; ++k)
        sizes.push_back({p.part_rows[k], p.shape[1]});
      break;
    case MFSDP_VIEW_HEADS:
      sizes.assign(static_cast<std::size_t>(p.head_count), {p.shape[0] / p.head_count, p.shape[1]});
      break;
    }
  std::vector<Matrix> out;
  int64_t first = 0;
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    const int64_t count = sizes[k].first * sizes[k].second;
    if (count > 0)
      out.push_back(
          {i, static_cast<int32_t>(k), p.unit, first, sizes[k].first, sizes[k].second, count});
    first += count;
  }
  return out;
}

/* Parameter indices by unit, then declared order. */
std::vector<int32_t> plan_order(const std::vector<mfsdp_param> &list) {
  std::vector<int32_t> order;
  for (std::size_t i = 0; i < list.size(); ++i)
    order.push_back(static_cast<int32_t>(i));
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return list[static_cast<std::size_t>(a)].unit < list[static_cast<std::size_t>(b)].unit;
  });
  return order;
}

std::vector<Matrix> all_matrices(const std::vector<mfsdp_param> &list) {
  std::vector<Matrix> out;
  for (int32_t i : plan_order(list))
    for (const Matrix &m : matrices_of(list, i))
      out.push_back(m);
  return out;
}

/* ---- what holds for every plan ---- */

class PlanProperties : public ::testing::TestWithParam<mfsdp_planner> {
protected:
  PlanRig rig;
  Params params;
  int32_t world = 1;

  /* Calls `check` for every random list and world. */
  template <class Check> void for_all(Check check) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      Params drawn;
      fill_random(&drawn, seed);
      params.list = drawn.list;
      for (int32_t w : kWorlds) {
        world = w;
        SCOPED_TRACE("seed " + std::to_string(seed) + " world " + std::to_string(w));
        ASSERT_EQ(rig.create(desc()), MFSDP_OK) << rig.message();
        check();
        if (HasFailure()) return;
      }
    }
  }

  /* By elements, which only BALANCED has to be told. */
  mfsdp_plan_desc desc() const {
    mfsdp_plan_desc d = params.desc(world, GetParam());
    if (GetParam() == MFSDP_PLANNER_BALANCED) d.cost = mfsdp_plan_cost_elements;
    return d;
  }

  const mfsdp_param &param(int32_t i) const { return params.list[static_cast<std::size_t>(i)]; }
  int32_t count() const { return static_cast<int32_t>(params.list.size()); }
};

std::string planner_name(const ::testing::TestParamInfo<mfsdp_planner> &info) {
  std::string name = mfsdp_planner_name(info.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Planners, PlanProperties, ::testing::ValuesIn(kPlanners), planner_name);

TEST_P(PlanProperties, EveryElementIsOwnedOnce) {
  for_all([&] {
    for (int32_t i = 0; i < count(); ++i) {
      int32_t n = 0;
      const mfsdp_piece *pieces = mfsdp_plan_param_pieces(rig.plan, i, &n);
      int64_t next = 0;
      for (int32_t k = 0; k < n; ++k) {
        EXPECT_EQ(pieces[k].param, i);
        EXPECT_EQ(pieces[k].unit, param(i).unit);
        EXPECT_EQ(pieces[k].first, next) << "tensor " << i;
        EXPECT_GE(pieces[k].count, 1);
        EXPECT_EQ(pieces[k].rows * pieces[k].cols, pieces[k].count);
        EXPECT_TRUE(pieces[k].owner >= 0 && pieces[k].owner < world);
        next += pieces[k].count;
      }
      EXPECT_EQ(next, param(i).alias_of ? 0 : numel_of(param(i))) << "tensor " << i;
    }
  });
}

TEST_P(PlanProperties, MatricesAreWholeAndThoseOfTheView) {
  for_all([&] {
    for (int32_t i = 0; i < count(); ++i) {
      if (param(i).role != MFSDP_ROLE_MATRIX) continue;
      int32_t n = 0;
      const mfsdp_piece *pieces = mfsdp_plan_param_pieces(rig.plan, i, &n);
      const std::vector<Matrix> expected = matrices_of(params.list, i);
      ASSERT_EQ(static_cast<std::size_t>(n), expected.size());
      const auto index = static_cast<int32_t>(pieces - rig.first_piece());
      for (int32_t k = 0; k < n; ++k) {
        const Matrix &m = expected[static_cast<std::size_t>(k)];
        EXPECT_EQ(pieces[k].matrix, m.index);
        EXPECT_EQ(pieces[k].first, m.first);
        EXPECT_EQ(pieces[k].rows, m.rows);
        EXPECT_EQ(pieces[k].cols, m.cols);
        EXPECT_EQ(mfsdp_plan_piece_cost(rig.plan, index + k), m.cost);
      }
    }
  });
}

TEST_P(PlanProperties, RunsAreCutAtCanonicalBlocksAndFew) {
  for_all([&] {
    int64_t runs = 0, allowed = 0;
    std::map<int32_t, int64_t> tail;
    for (int32_t i = 0; i < count(); ++i) {
      if (param(i).role == MFSDP_ROLE_MATRIX || param(i).alias_of) continue;
      const int64_t block = block_of(numel_of(param(i)));
      int32_t n = 0;
      std::set<int32_t> owners;
      const mfsdp_piece *pieces = mfsdp_plan_param_pieces(rig.plan, i, &n);
      for (int32_t k = 0; k < n; ++k) {
        EXPECT_EQ(pieces[k].matrix, -1);
        EXPECT_EQ(pieces[k].first % block, 0);
        EXPECT_TRUE(owners.insert(pieces[k].owner).second) << "two runs of a tensor on a rank";
      }
      runs += n;
      if (numel_of(param(i)) > 0) ++allowed;
      tail[param(i).unit] += numel_of(param(i));
    }
    /* A cut per further rank that a unit's tail is spread over. */
    for (const auto &unit : tail)
      if (unit.second > 0) allowed += std::min<int64_t>(world, (unit.second + 4095) / 4096) - 1;
    EXPECT_LE(runs, allowed);
  });
}

TEST_P(PlanProperties, PiecesAreOrderedByUnitTensorAndFirst) {
  for_all([&] {
    const std::vector<mfsdp_piece> pieces = rig.pieces();
    EXPECT_EQ(static_cast<std::size_t>(mfsdp_plan_piece_count(rig.plan)), pieces.size());
    std::vector<mfsdp_piece> by_unit;
    for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
      for (const mfsdp_piece &p : rig.pieces(u)) {
        EXPECT_EQ(p.unit, u);
        by_unit.push_back(p);
      }
    ASSERT_EQ(by_unit.size(), pieces.size());
    for (std::size_t k = 0; k + 1 < pieces.size(); ++k) {
      const mfsdp_piece &a = pieces[k], &b = pieces[k + 1];
      EXPECT_EQ(by_unit[k].unit_offset, a.unit_offset);
      EXPECT_TRUE(std::make_pair(a.unit, std::make_pair(a.param, a.first)) <
                  std::make_pair(b.unit, std::make_pair(b.param, b.first)));
    }
  });
}

/* Lays every unit out again, tensor after tensor. */
TEST_P(PlanProperties, UnitBuffersHoldTensorsWholeAlignedAndInDeclaredOrder) {
  for_all([&] {
    std::map<int32_t, int64_t> end[2], payload[2];
    for (int32_t i : plan_order(params.list)) {
      for (int k = 0; k < 2; ++k) {
        const auto kind = static_cast<mfsdp_layout_kind>(k + 1);
        const bool absent = k == 1 && param(i).role == MFSDP_ROLE_FROZEN;
        const int64_t offset = mfsdp_plan_param_offset(rig.plan, i, kind);
        if (param(i).alias_of) {
          const int32_t owner = mfsdp_plan_param_owner(rig.plan, i);
          EXPECT_EQ(offset, mfsdp_plan_param_offset(rig.plan, owner, kind));
          continue;
        }
        EXPECT_EQ(offset, absent ? -1 : end[k][param(i).unit]);
        int32_t n = 0;
        const mfsdp_piece *pieces = mfsdp_plan_param_pieces(rig.plan, i, &n);
        for (int32_t j = 0; j < n; ++j)
          EXPECT_EQ(k ? pieces[j].grad_unit_offset : pieces[j].unit_offset,
                    absent ? -1 : offset + pieces[j].first);
        if (absent) continue;
        end[k][param(i).unit] += aligned(numel_of(param(i)));
        payload[k][param(i).unit] += numel_of(param(i));
      }
    }
    for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
      for (int k = 0; k < 2; ++k) {
        const auto kind = static_cast<mfsdp_layout_kind>(k + 1);
        EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, u, kind), end[k][u]);
        EXPECT_EQ(mfsdp_plan_unit_payload(rig.plan, u, kind), payload[k][u]);
      }
  });
}

/* Packs every segment again, piece after piece. */
TEST_P(PlanProperties, SegmentsArePackedAndAligned) {
  for_all([&] {
    for (int32_t u = 0; u < mfsdp_plan_unit_count(rig.plan); ++u)
      for (int k = 0; k < 2; ++k) {
        const auto kind = static_cast<mfsdp_layout_kind>(k + 1);
        std::vector<int64_t> end(static_cast<std::size_t>(world)), payload = end;
        for (const mfsdp_piece &p : rig.pieces(u)) {
          const auto owner = static_cast<std::size_t>(p.owner);
          if (k == 1 && param(p.param).role == MFSDP_ROLE_FROZEN) {
            EXPECT_EQ(p.grad_shard_offset, -1);
            continue;
          }
          EXPECT_EQ(k ? p.grad_shard_offset : p.shard_offset, end[owner]);
          end[owner] += aligned(p.count);
          payload[owner] += p.count;
        }
        for (int32_t r = 0; r < world; ++r) {
          EXPECT_EQ(mfsdp_plan_segment_count(rig.plan, u, r, kind),
                    end[static_cast<std::size_t>(r)]);
          EXPECT_EQ(mfsdp_plan_segment_payload(rig.plan, u, r, kind),
                    payload[static_cast<std::size_t>(r)]);
        }
      }
  });
}

TEST_P(PlanProperties, BlocksTileWhatHasGradientsAndDoNotDependOnTheWorld) {
  std::vector<mfsdp_norm_block> of_world_1;
  for_all([&] {
    const std::vector<mfsdp_norm_block> blocks = rig.blocks();
    const std::vector<mfsdp_piece> pieces = rig.pieces();
    std::size_t next = 0;
    for (int32_t i = 0; i < count(); ++i) {
      if (param(i).alias_of || param(i).role == MFSDP_ROLE_FROZEN) continue;
      const int64_t numel = numel_of(param(i));
      int64_t covered = 0;
      while (covered < numel) {
        ASSERT_LT(next, blocks.size());
        const mfsdp_norm_block &b = blocks[next++];
        const mfsdp_piece &p = pieces[static_cast<std::size_t>(b.piece)];
        ASSERT_EQ(b.param, i);
        ASSERT_EQ(b.first, covered);
        EXPECT_EQ(p.param, i);
        EXPECT_TRUE(b.first >= p.first && b.first + b.count <= p.first + p.count);
        EXPECT_EQ(b.count, param(i).role == MFSDP_ROLE_MATRIX
                               ? p.count
                               : std::min(block_of(numel), numel - covered));
        covered += b.count;
      }
      EXPECT_EQ(covered, numel);
    }
    EXPECT_EQ(next, blocks.size());
    if (world == 1) of_world_1 = blocks;
    ASSERT_EQ(blocks.size(), of_world_1.size());
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      EXPECT_EQ(blocks[k].param, of_world_1[k].param);
      EXPECT_EQ(blocks[k].first, of_world_1[k].first);
      EXPECT_EQ(blocks[k].count, of_world_1[k].count);
    }
  });
}

/* No rank ends above the level that all bytes could reach by more than one block and its rounding.
 */
TEST_P(PlanProperties, TailsLevelResidentBytes) {
  for_all([&] {
    std::vector<int64_t> base(static_cast<std::size_t>(world)), total = base;
    int64_t volume = 0, widest = 0;
    for (const mfsdp_piece &p : rig.pieces()) {
      const int64_t nbytes = aligned(p.count) * weight_of(param(p.param));
      total[static_cast<std::size_t>(p.owner)] += nbytes;
      if (p.matrix >= 0)
        base[static_cast<std::size_t>(p.owner)] += nbytes;
      else
        volume += nbytes;
      if (p.matrix < 0)
        widest = std::max(widest, block_of(numel_of(param(p.param))) * weight_of(param(p.param)));
    }
    int64_t level = *std::min_element(base.begin(), base.end());
    for (int64_t step = INT64_C(1) << 40; step > 0; step /= 2) { /* the largest level not filled */
      int64_t fits = 0;
      for (int64_t b : base)
        fits += std::max<int64_t>(0, level + step - b);
      if (fits <= volume) level += step;
    }
    const int64_t highest = *std::max_element(base.begin(), base.end());
    EXPECT_LE(*std::max_element(total.begin(), total.end()),
              std::max(highest, level + 2 * widest + 128 * 12));
  });
}

TEST_P(PlanProperties, SameDescriptionSameBytesWhateverTheMemory) {
  for_all([&] {
    const std::vector<unsigned char> first = rig.bytes();
    const uint64_t hash = mfsdp_plan_hash(rig.plan);
    PlanRig other;
    ASSERT_EQ(other.create(desc()), MFSDP_OK);
    EXPECT_EQ(other.bytes(), first);
    EXPECT_EQ(mfsdp_plan_hash(other.plan), hash);
    /* The hash is that of the bytes before it, and stands after them. */
    EXPECT_EQ(mfsdp_hash_bytes(MFSDP_HASH_SEED, first.data(), first.size() - 8), hash);
    uint64_t stored = 0;
    for (std::size_t k = 0; k < 8; ++k)
      stored |= static_cast<uint64_t>(first[first.size() - 8 + k]) << (8 * k);
    EXPECT_EQ(stored, hash);
  });
}

/* ---- owners of matrices ---- */

int64_t odd_cost(void *user, int32_t param, int64_t rows, int64_t cols) {
  ++*static_cast<int64_t *>(user);
  return (rows * 7 + cols * 13 + param) % 11; /* many ties and zeros */
}

/* The rule in its plainest form: scan all ranks for the least loaded. */
std::vector<int32_t> greedy(const std::vector<Matrix> &matrices, std::vector<int64_t> load,
                            bool by_unit) {
  std::vector<std::size_t> order;
  for (std::size_t k = 0; k < matrices.size(); ++k)
    order.push_back(k);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (by_unit && matrices[a].unit != matrices[b].unit) return matrices[a].unit < matrices[b].unit;
    return matrices[a].cost > matrices[b].cost;
  });
  std::vector<int32_t> owner(matrices.size());
  for (std::size_t k : order) {
    std::size_t best = 0;
    for (std::size_t r = 1; r < load.size(); ++r)
      if (load[r] < load[best]) best = r;
    owner[k] = static_cast<int32_t>(best);
    load[best] += matrices[k].cost;
  }
  return owner;
}

std::vector<int32_t> matrix_owners(const PlanRig &rig) {
  std::vector<int32_t> owners;
  for (const mfsdp_piece &p : rig.pieces())
    if (p.matrix >= 0) owners.push_back(p.owner);
  return owners;
}

int64_t largest_load(const std::vector<Matrix> &matrices, std::vector<int64_t> load,
                     const std::vector<int32_t> &owners) {
  for (std::size_t k = 0; k < matrices.size(); ++k)
    load[static_cast<std::size_t>(owners[k])] += matrices[k].cost;
  return *std::max_element(load.begin(), load.end());
}

/* What the planner's rule says of these matrices; BALANCED promises only to be no worse. */
void expect_rule(mfsdp_planner planner, const std::vector<Matrix> &matrices,
                 const std::vector<int64_t> &base, const std::vector<int32_t> &owners) {
  const std::vector<int32_t> role = greedy(matrices, base, true);
  const std::vector<int32_t> scope = greedy(matrices, base, false);
  const int64_t of_role = largest_load(matrices, base, role);
  const int64_t of_scope = largest_load(matrices, base, scope);
  std::vector<int32_t> in_turn;
  for (std::size_t k = 0; k < matrices.size(); ++k)
    in_turn.push_back(static_cast<int32_t>(k % base.size()));
  switch (planner) {
  case MFSDP_PLANNER_ROUND_ROBIN: EXPECT_EQ(owners, in_turn); break;
  case MFSDP_PLANNER_ROLE_GREEDY: EXPECT_EQ(owners, role); break;
  case MFSDP_PLANNER_SCOPE_GREEDY: EXPECT_EQ(owners, scope); break;
  case MFSDP_PLANNER_COST_AWARE: EXPECT_EQ(owners, of_scope < of_role ? scope : role); break;
  case MFSDP_PLANNER_BALANCED:
    /* Level bytes may cost 1/128 above a proven bound. */
    EXPECT_LE(largest_load(matrices, base, owners), of_scope + of_scope / 128);
    break;
  }
}

TEST_P(PlanProperties, MatricesGoWhereThePlainRuleSays) {
  for_all([&] {
    const std::vector<Matrix> by_elements = all_matrices(params.list);
    std::vector<Matrix> by_cost = by_elements;
    int64_t calls = 0;
    for (Matrix &m : by_cost)
      m.cost = odd_cost(&calls, m.param, m.rows, m.cols);
    calls = 0;
    std::vector<int64_t> base(static_cast<std::size_t>(world)), none = base;
    Draw draw(static_cast<uint64_t>(world));
    for (int64_t &b : base)
      b = draw.below(5000);
    expect_rule(GetParam(), by_elements, none, matrix_owners(rig));

    mfsdp_plan_desc d = desc();
    d.base_load = base.data();
    d.cost = odd_cost;
    d.user = &calls;
    ASSERT_EQ(rig.create(d), MFSDP_OK);
    EXPECT_EQ(calls, static_cast<int64_t>(by_cost.size())) << "once per matrix";
    expect_rule(GetParam(), by_cost, base, matrix_owners(rig));

    std::vector<int64_t> loads(base.size()), expected = base;
    for (const mfsdp_piece &p : rig.pieces())
      if (p.matrix >= 0)
        expected[static_cast<std::size_t>(p.owner)] += odd_cost(&calls, p.param, p.rows, p.cols);
    ASSERT_EQ(mfsdp_plan_loads(&rig.context, rig.plan, loads.data(), world), MFSDP_OK);
    EXPECT_EQ(loads, expected);
  });
}

TEST(PlanPlanners, RoleKeepsUnitsApartAndScopePoolsThem) {
  Params p; /* the small unit comes first: only pooling sees the large matrix in time */
  p.add("a", MFSDP_ROLE_MATRIX, 0, {10, 10});
  p.add("b", MFSDP_ROLE_MATRIX, 0, {10, 9});
  p.add("c", MFSDP_ROLE_MATRIX, 1, {10, 19});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_ROLE_GREEDY)), MFSDP_OK);
  EXPECT_EQ(matrix_owners(rig), (std::vector<int32_t>{0, 1, 1}));
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_SCOPE_GREEDY)), MFSDP_OK);
  EXPECT_EQ(matrix_owners(rig), (std::vector<int32_t>{1, 1, 0}));
}

TEST(PlanPlanners, NewtonSchulzCostFits) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 9});
  PlanRig rig;
  mfsdp_plan_desc desc = p.desc(2);
  desc.cost = mfsdp_cost_newton_schulz;
  ASSERT_EQ(rig.create(desc), MFSDP_OK);
  EXPECT_EQ(mfsdp_plan_piece_cost(rig.plan, 0), 16 * (2 * 9 + 4));
  EXPECT_EQ(mfsdp_plan_piece_cost(rig.plan, 1), 0);
  EXPECT_EQ(mfsdp_plan_piece_cost(rig.plan, -1), 0);
}

/* ---- views that were wrong elsewhere ---- */

/* Sizes of fused tensors are listed, never taken as equal thirds. */
TEST(PlanViews, GroupedQueryAndGatedSizes) {
  Params p;
  p.add_rows("qkv", 0, {64, 16, 16}, 32);
  p.add_rows("gate_up", 0, {88, 88}, 32);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(3)), MFSDP_OK);
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  ASSERT_EQ(pieces.size(), 5u);
  const int64_t rows[5] = {64, 16, 16, 88, 88}, first[5] = {0, 2048, 2560, 0, 2816};
  for (std::size_t k = 0; k < 5; ++k) {
    EXPECT_EQ(pieces[k].rows, rows[k]);
    EXPECT_EQ(pieces[k].cols, 32);
    EXPECT_EQ(pieces[k].first, first[k]);
  }
}

TEST(PlanViews, ExpertsAreMatricesOfTheirOwnAndMayLieApart) {
  Params p;
  p.add("experts", MFSDP_ROLE_MATRIX, 0, {4, 20, 30}).view = MFSDP_VIEW_BATCH;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4)), MFSDP_OK);
  EXPECT_EQ(mfsdp_plan_param_matrices(rig.plan, 0), 4);
  EXPECT_EQ(matrix_owners(rig), (std::vector<int32_t>{0, 1, 2, 3}));
  for (const mfsdp_piece &piece : rig.pieces()) {
    EXPECT_EQ(piece.rows, 20);
    EXPECT_EQ(piece.cols, 30);
    EXPECT_EQ(piece.first, 600 * piece.matrix);
    EXPECT_EQ(piece.shard_offset, 0);
  }
}

TEST(PlanViews, ConvolutionIsOutByTheRest) {
  Params p;
  p.add("conv", MFSDP_ROLE_MATRIX, 0, {8, 3, 5, 7}).view = MFSDP_VIEW_CONV;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  EXPECT_EQ(rig.pieces()[0].rows, 8);
  EXPECT_EQ(rig.pieces()[0].cols, 3 * 5 * 7);
}

/* ---- edges ---- */

TEST(PlanEdges, NoParameters) {
  Params p;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(5)), MFSDP_OK) << rig.message();
  EXPECT_EQ(mfsdp_plan_unit_count(rig.plan), 0);
  EXPECT_EQ(mfsdp_plan_param_count(rig.plan), 0);
  EXPECT_EQ(mfsdp_plan_block_count(rig.plan), 0);
  EXPECT_TRUE(rig.pieces().empty());
  EXPECT_EQ(mfsdp_plan_param_find(rig.plan, "x"), -1);
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
  EXPECT_EQ(s.cost.max, 0);
  EXPECT_EQ(s.cost_ratio, 1.0);
  EXPECT_EQ(mfsdp_plan_spread_ratio(s.resident, 5), 1.0);
}

TEST(PlanEdges, MoreRanksThanMatricesAndUnitsWithout) {
  Params p;
  p.add("norm", MFSDP_ROLE_ELEMENTWISE, 0, {5});
  p.add("a", MFSDP_ROLE_MATRIX, 1, {20, 20});
  p.add("b", MFSDP_ROLE_MATRIX, 1, {1, 700}); /* one row */
  p.add("c", MFSDP_ROLE_MATRIX, 1, {700, 1});
  p.add("f", MFSDP_ROLE_FROZEN, 3, {9});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK);
  EXPECT_EQ(mfsdp_plan_unit_count(rig.plan), 4);
  EXPECT_EQ(matrix_owners(rig), (std::vector<int32_t>{2, 0, 1}));
  EXPECT_TRUE(rig.pieces(2).empty()); /* a gap in the numbers */
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 2, MFSDP_LAYOUT_GATHER), 0);
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 3, MFSDP_LAYOUT_GATHER), 128);
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 3, MFSDP_LAYOUT_REDUCE), 0);
  int32_t count = -1;
  EXPECT_EQ(mfsdp_plan_unit_params(rig.plan, 2, &count), nullptr);
  EXPECT_EQ(count, 0);
  EXPECT_EQ(rig.pieces(0)[0].owner, 3); /* the emptiest of lowest rank */
  EXPECT_EQ(rig.pieces(3)[0].owner, 4);
}

TEST(PlanEdges, EmptyTensorsKeepTheirPlaceButHaveNoPieces) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {0, 8});
  p.add("b", MFSDP_ROLE_MATRIX, 0, {8, 0});
  p.add("c", MFSDP_ROLE_ELEMENTWISE, 0, {0, 8});
  p.add("d", MFSDP_ROLE_MATRIX, 0, {3, 0, 4}).view = MFSDP_VIEW_BATCH;
  p.add_rows("e", 0, {0, 2, 0}, 3);
  p.add_heads("f", 0, 2, 0, 4);
  p.add_alias("g", 0, 1);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].param, 4);
  EXPECT_EQ(pieces[0].matrix, 1);
  EXPECT_EQ(pieces[0].first, 0);
  EXPECT_EQ(mfsdp_plan_block_count(rig.plan), 1);
  EXPECT_EQ(mfsdp_plan_param_matrices(rig.plan, 3), 3);
  EXPECT_EQ(mfsdp_plan_param_numel(rig.plan, 0), 0);
  EXPECT_EQ(mfsdp_plan_param_offset(rig.plan, 5, MFSDP_LAYOUT_GATHER), 128);
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 0, MFSDP_LAYOUT_REDUCE), 128);
  EXPECT_EQ(mfsdp_plan_unit_count(rig.plan), 2);
}

TEST(PlanEdges, AnAliasHasNoRoomOfItsOwn) {
  Params p;
  p.add("head", MFSDP_ROLE_ELEMENTWISE, 4, {10, 50}); /* declared first, owned by unit 0 */
  p.add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {10, 50});
  p.list[0].alias_of = "embed";
  p.add("twin", MFSDP_ROLE_ELEMENTWISE, 0, {10, 50}).alias_of = "embed"; /* in the same unit */
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  EXPECT_EQ(mfsdp_plan_param_owner(rig.plan, 0), 1);
  EXPECT_EQ(mfsdp_plan_param_owner(rig.plan, 1), 1);
  EXPECT_EQ(mfsdp_plan_param_owner(rig.plan, 2), 1);
  EXPECT_EQ(rig.pieces().size(), 1u);
  EXPECT_EQ(mfsdp_plan_block_count(rig.plan), 1);
  EXPECT_EQ(mfsdp_plan_param_numel(rig.plan, 0), 500);
  EXPECT_EQ(mfsdp_plan_unit_count(rig.plan), 5);
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 4, MFSDP_LAYOUT_GATHER), 0);
  EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, 0, MFSDP_LAYOUT_GATHER), 512);
  int32_t count = 0;
  const int32_t *of_unit = mfsdp_plan_unit_params(rig.plan, 4, &count);
  ASSERT_EQ(count, 1);
  EXPECT_EQ(of_unit[0], 0);
  EXPECT_STREQ(mfsdp_plan_param(rig.plan, 0)->alias_of, "embed");
}

/* The plan keeps nothing of the caller's memory. */
TEST(PlanEdges, DescriptionsAreCopied) {
  PlanRig rig;
  std::vector<unsigned char> before;
  {
    Params p;
    p.add_rows("qkv", 0, {4, 2, 2}, 8).hyper_group = 3;
    p.add_alias("tied", 0, 1);
    std::vector<int64_t> base(2, 5);
    mfsdp_plan_desc desc = p.desc(2);
    desc.base_load = base.data();
    ASSERT_EQ(rig.create(desc), MFSDP_OK);
    before = rig.bytes();
    base.assign(2, 99);
  }
  EXPECT_EQ(rig.bytes(), before);
  const mfsdp_param *copy = mfsdp_plan_param(rig.plan, 0);
  EXPECT_STREQ(copy->name, "qkv");
  EXPECT_EQ(copy->hyper_group, 3);
  ASSERT_EQ(copy->part_count, 3);
  EXPECT_EQ(copy->part_rows[0], 4);
  EXPECT_EQ(mfsdp_plan_param_find(rig.plan, "tied"), 1);
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
  EXPECT_EQ(s.cost.sum, 5 + 5 + 64);
}

TEST(PlanEdges, IndicesOutOfRange) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 4});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  for (int32_t bad : {-1, 1, INT32_MAX, INT32_MIN}) {
    int32_t count = 7;
    EXPECT_EQ(mfsdp_plan_param(rig.plan, bad), nullptr);
    EXPECT_EQ(mfsdp_plan_param_owner(rig.plan, bad), -1);
    EXPECT_EQ(mfsdp_plan_param_numel(rig.plan, bad), -1);
    EXPECT_EQ(mfsdp_plan_param_matrices(rig.plan, bad), 0);
    EXPECT_EQ(mfsdp_plan_param_offset(rig.plan, bad, MFSDP_LAYOUT_GATHER), -1);
    EXPECT_EQ(mfsdp_plan_param_hash(rig.plan, bad), 0u);
    EXPECT_EQ(mfsdp_plan_param_pieces(rig.plan, bad, &count), nullptr);
    EXPECT_EQ(count, 0);
    EXPECT_EQ(mfsdp_plan_unit_params(rig.plan, bad, &count), nullptr);
    EXPECT_EQ(mfsdp_plan_unit_count_elements(rig.plan, bad, MFSDP_LAYOUT_GATHER), 0);
    EXPECT_EQ(mfsdp_plan_unit_payload(rig.plan, bad, MFSDP_LAYOUT_GATHER), 0);
    EXPECT_EQ(mfsdp_plan_segment_count(rig.plan, bad, 0, MFSDP_LAYOUT_GATHER), 0);
    EXPECT_EQ(mfsdp_plan_segment_count(rig.plan, 0, bad, MFSDP_LAYOUT_GATHER), 0);
    if (bad >= 0) {
      EXPECT_EQ(mfsdp_plan_pieces(rig.plan, bad, &count), nullptr);
      EXPECT_EQ(count, 0);
    }
  }
  EXPECT_EQ(mfsdp_plan_param_offset(rig.plan, 0, static_cast<mfsdp_layout_kind>(0)), -1);
  EXPECT_EQ(mfsdp_plan_segment_count(rig.plan, 0, 0, static_cast<mfsdp_layout_kind>(3)), 0);
  EXPECT_EQ(mfsdp_plan_param_find(rig.plan, nullptr), -1);
}

/* ---- canonical blocks ---- */

TEST(PlanBlocks, SizeRule) {
  const int64_t mega = INT64_C(1) << 22; /* 1024 blocks of 4096 */
  const int64_t numel[] = {
      0, 1, 4096, 4097, mega, mega + 1, 2 * mega, 2 * mega + 1, INT64_C(1) << 40};
  const int64_t block[] = {4096, 4096, 4096, 4096, 4096, 8192, 8192, 16384, INT64_C(1) << 30};
  for (std::size_t k = 0; k < 9; ++k) {
    EXPECT_EQ(mfsdp_plan_block_elements(numel[k]), block[k]) << numel[k];
    EXPECT_EQ(mfsdp_plan_block_elements(numel[k]), block_of(numel[k])) << numel[k];
  }
}

TEST(PlanBlocks, QueryThenFillAndPartsOfTheList) {
  Params p;
  p.add("e", MFSDP_ROLE_ELEMENTWISE, 0, {3 * 4096 + 5});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  int32_t count = 0;
  ASSERT_EQ(mfsdp_plan_blocks(&rig.context, rig.plan, nullptr, 0, &count), MFSDP_OK);
  EXPECT_EQ(count, 4);
  mfsdp_norm_block two[3] = {};
  two[2].count = -77;
  ASSERT_EQ(mfsdp_plan_blocks(&rig.context, rig.plan, two, 2, &count), MFSDP_OK);
  EXPECT_EQ(count, 4);
  EXPECT_EQ(two[1].first, 4096);
  EXPECT_EQ(two[2].count, -77) << "written past the capacity";
  EXPECT_EQ(rig.blocks()[3].count, 5);
  EXPECT_EQ(mfsdp_plan_blocks(&rig.context, rig.plan, nullptr, 1, &count), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_blocks(&rig.context, rig.plan, two, -1, &count), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_blocks(&rig.context, rig.plan, two, 2, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_blocks(&rig.context, nullptr, two, 2, &count), MFSDP_E_ARGUMENT);
}

/* ---- hash and bytes ---- */

TEST(PlanHash, EveryFieldOfADescriptionCounts) {
  struct Change {
    const char *name;
    void (*apply)(std::vector<mfsdp_param> &);
  };
  static const int64_t other_parts[3] = {2, 4, 2};
  const Change changes[] = {
      {"name", [](std::vector<mfsdp_param> &l) { l[0].name = "other"; }},
      {"unit", [](std::vector<mfsdp_param> &l) { l[0].unit = 3; }},
      {"hyper_group", [](std::vector<mfsdp_param> &l) { l[0].hyper_group = 1; }},
      {"shape", [](std::vector<mfsdp_param> &l) { std::swap(l[0].shape[0], l[0].shape[1]); }},
      {"role", [](std::vector<mfsdp_param> &l) { l[0].role = MFSDP_ROLE_FROZEN; }},
      {"compute", [](std::vector<mfsdp_param> &l) { l[0].compute = MFSDP_BF16; }},
      {"master", [](std::vector<mfsdp_param> &l) { l[0].master = MFSDP_F64; }},
      {"grad", [](std::vector<mfsdp_param> &l) { l[0].grad = MFSDP_BF16; }},
      {"wire", [](std::vector<mfsdp_param> &l) { l[0].wire = MFSDP_BF16; }},
      {"slice", [](std::vector<mfsdp_param> &l) { l[0].is_slice = l[0].local_matrix_ok = 1; }},
      {"local", [](std::vector<mfsdp_param> &l) { l[0].local_matrix_ok = 1; }},
      {"part_rows", [](std::vector<mfsdp_param> &l) { l[1].part_rows = other_parts; }},
      {"head_count", [](std::vector<mfsdp_param> &l) { l[2].head_count = 4; }},
      {"view", [](std::vector<mfsdp_param> &l) { l[2].view = MFSDP_VIEW_WHOLE; }},
      {"alias", [](std::vector<mfsdp_param> &l) { l[3].alias_of = nullptr; }},
  };
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
  p.add_rows("b", 1, {4, 2, 2}, 8);
  p.add_heads("c", 1, 2, 8, 8);
  p.add_alias("d", 0, 4);
  PlanRig plain;
  ASSERT_EQ(plain.create(p.desc(2)), MFSDP_OK) << plain.message();
  for (const Change &change : changes) {
    SCOPED_TRACE(change.name);
    std::vector<mfsdp_param> saved = p.list;
    change.apply(p.list);
    p.list[3].compute = p.list[0].compute; /* the alias repeats its owner */
    p.list[3].master = p.list[0].master;
    p.list[3].grad = p.list[0].grad;
    p.list[3].wire = p.list[0].wire;
    p.list[3].role = p.list[0].role;
    p.list[3].hyper_group = p.list[0].hyper_group;
    p.list[3].is_slice = p.list[0].is_slice;
    p.list[3].local_matrix_ok = p.list[0].local_matrix_ok;
    memcpy(p.list[3].shape, p.list[0].shape, sizeof(p.list[0].shape));
    if (p.list[3].alias_of) p.list[3].alias_of = p.list[0].name;
    PlanRig rig;
    EXPECT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
    if (rig.plan != nullptr) {
      EXPECT_NE(mfsdp_plan_hash(rig.plan), mfsdp_plan_hash(plain.plan));
      int32_t first = 0;
      while (first < 4 &&
             mfsdp_plan_param_hash(rig.plan, first) == mfsdp_plan_param_hash(plain.plan, first))
        ++first;
      EXPECT_LT(first, 4) << "no parameter differs";
    }
    p.list = saved;
  }
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(3)), MFSDP_OK);
  EXPECT_NE(mfsdp_plan_hash(rig.plan), mfsdp_plan_hash(plain.plan)) << "world";
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_ROUND_ROBIN)), MFSDP_OK);
  EXPECT_NE(mfsdp_plan_hash(rig.plan), mfsdp_plan_hash(plain.plan)) << "planner";
}

/* Caps and nodes count even where they change no owner. */
TEST(PlanHash, CapsAndNodesCount) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
  const int32_t nodes[2] = {0, 0}, others[2] = {0, 1};
  std::set<uint64_t> hashes;
  for (int change = 0; change < 6; ++change) {
    mfsdp_plan_desc desc = p.desc(2, MFSDP_PLANNER_BALANCED);
    if (change == 1) desc.caps.max_resident_nbytes = 1 << 20;
    if (change == 2) desc.caps.max_gamma_permille = 2000;
    if (change == 3) desc.caps.max_owners = 2;
    if (change == 4) desc.node_of_rank = nodes;
    if (change == 5) desc.node_of_rank = others;
    PlanRig rig;
    ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
    EXPECT_EQ(rig.pieces()[0].owner, 0);
    hashes.insert(mfsdp_plan_hash(rig.plan));
    PlanRig plain;
    ASSERT_EQ(plain.create(p.desc(2, MFSDP_PLANNER_BALANCED)), MFSDP_OK);
    for (int32_t k = 0; mfsdp_plan_setting_name(k) != nullptr; ++k)
      EXPECT_EQ(mfsdp_plan_setting_hash(rig.plan, k) != mfsdp_plan_setting_hash(plain.plan, k),
                change > 0 && k == (change < 4 ? change + 1 : 5))
          << mfsdp_plan_setting_name(k) << " after change " << change;
  }
  EXPECT_EQ(hashes.size(), 6u);
  EXPECT_STREQ(mfsdp_plan_setting_name(4), "caps.max_owners");
  EXPECT_STREQ(mfsdp_plan_setting_name(5), "node_of_rank");
  EXPECT_STREQ(mfsdp_plan_setting_name(6), "allow_banded");
  EXPECT_STREQ(mfsdp_plan_setting_name(9), "banded_wire_cost");
  EXPECT_STREQ(mfsdp_plan_setting_name(10), "banded_message_nbytes");
  EXPECT_EQ(mfsdp_plan_setting_name(11), nullptr);
  EXPECT_EQ(mfsdp_plan_setting_name(-1), nullptr);
}

/* Parameters in another order on one rank: the first that differs can be named. */
TEST(PlanHash, AShuffledListShowsItsFirstDifference) {
  Params p;
  for (int i = 0; i < 6; ++i)
    p.add("t" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {8, 8});
  PlanRig here, there;
  ASSERT_EQ(here.create(p.desc(2)), MFSDP_OK);
  std::swap(p.list[2], p.list[4]);
  ASSERT_EQ(there.create(p.desc(2)), MFSDP_OK);
  EXPECT_NE(mfsdp_plan_hash(here.plan), mfsdp_plan_hash(there.plan));
  for (int32_t i = 0; i < 6; ++i)
    EXPECT_EQ(mfsdp_plan_param_hash(here.plan, i) != mfsdp_plan_param_hash(there.plan, i),
              i == 2 || i == 4);
}

/* What a description leaves unused is not part of the plan. */
TEST(PlanHash, UnusedFieldsDoNotCount) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  const uint64_t hash = mfsdp_plan_hash(rig.plan);
  p.list[0].shape[2] = 77;
  p.list[0].head_count = 5;
  p.list[0].part_count = 9;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  EXPECT_EQ(mfsdp_plan_hash(rig.plan), hash);
  EXPECT_EQ(mfsdp_plan_param(rig.plan, 0)->shape[2], 0);
  EXPECT_EQ(mfsdp_plan_param(rig.plan, 0)->head_count, 0);
  EXPECT_EQ(mfsdp_plan_param(rig.plan, 0)->part_count, 0);
}

/* The format, byte by byte where it starts, and one known hash: it must not change by accident. */
TEST(PlanHash, FormatIsLittleEndianAndFixed) {
  Params p;
  p.add("ab", MFSDP_ROLE_ELEMENTWISE, 0, {3});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1)), MFSDP_OK);
  const std::vector<unsigned char> bytes = rig.bytes();
  const unsigned char start[] =
      {'M', 'F', 'S', 'D', 'P', 'P', 'L', 'N', 4,   0,   0,   0, /* version */
       1,   0,   0,   0,   3,   0,   0,   0,                     /* world, planner */
       1,   0,   0,   0,   1,   0,   0,   0,                     /* residency, params */
       1,   0,   0,   0,                                         /* units */
       255, 255, 255, 255, 255, 255, 255, 127,                   /* no caps: 2^63 - 1 */
       255, 255, 255, 255, 255, 255, 255, 127, 255, 255, 255, 255, 255, 255,
       255, 127, 0,   0,   0,   0, /* no matrix becomes banded */
       0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,
       0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0, /* no node map */
       2,   0,   0,   0,                                                   /* name */
       'a', 'b', 0,   0,   0,   0,   1,   0,   0,   0};                    /* alias, ndim */
  ASSERT_GT(bytes.size(), sizeof(start));
  EXPECT_EQ(memcmp(bytes.data(), start, sizeof(start)), 0);
  /* header 32, caps 24, bands 28, nodes 4, name 6, alias 4, ndim unit group 12, shape 8, 10 fields,
   * 2 counts, piece 96, hash 8 */
  EXPECT_EQ(bytes.size(), 32u + 24 + 28 + 4 + 6 + 4 + 12 + 8 + 40 + 8 + 96 + 8);
  Params q; /* one dimension, two parts and one piece more */
  q.add_rows("ab", 0, {2, 1}, 4);
  ASSERT_EQ(rig.create(q.desc(1)), MFSDP_OK);
  EXPECT_EQ(rig.bytes().size(), bytes.size() + 8 + 2 * 8 + 96);
}

TEST(PlanHash, SerializeRefusesTooLittleRoom) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  std::size_t needed = 0, all = rig.bytes().size();
  std::vector<unsigned char> room(all, 0xee);
  EXPECT_EQ(mfsdp_plan_serialize(&rig.context, rig.plan, room.data(), all - 1, &needed),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(needed, all);
  EXPECT_EQ(room, std::vector<unsigned char>(all, 0xee));
  EXPECT_NE(rig.message().find("needs " + std::to_string(all)), std::string::npos);
  EXPECT_EQ(mfsdp_plan_serialize(&rig.context, rig.plan, nullptr, 8, &needed), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_serialize(&rig.context, rig.plan, nullptr, 0, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_serialize(&rig.context, nullptr, nullptr, 0, &needed), MFSDP_E_ARGUMENT);
}

/* ---- report ---- */

TEST_P(PlanProperties, ReportIsWhatCountingGives) {
  for_all([&] {
    const auto w = static_cast<std::size_t>(world);
    const int32_t units = mfsdp_plan_unit_count(rig.plan);
    std::vector<mfsdp_unit_report> reports(static_cast<std::size_t>(units));
    mfsdp_plan_summary s = mfsdp_plan_summary_default();
    ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, reports.data(), units), MFSDP_OK);
    std::vector<int64_t> cost(w), resident(w), nbytes(w), sent(w);
    int32_t nonempty = 0;
    for (int32_t u = 0; u < units; ++u) {
      std::vector<int64_t> own(w);
      int64_t payload = 0, owners = 0;
      for (const mfsdp_piece &p : rig.pieces(u)) {
        const auto r = static_cast<std::size_t>(p.owner);
        own[r] += p.count;
        payload += p.count;
        resident[r] += aligned(p.count);
        nbytes[r] += aligned(p.count) * weight_of(param(p.param));
        if (p.matrix >= 0) cost[r] += p.count;
        for (std::size_t peer = 0; peer < w; ++peer) {
          if (peer == r) continue;
          sent[r] += p.count; /* gather: the owner to each peer */
          if (param(p.param).role != MFSDP_ROLE_FROZEN) sent[peer] += p.count; /* reduce */
        }
      }
      const int64_t most = *std::max_element(own.begin(), own.end());
      for (int64_t o : own)
        owners += o > 0;
      const mfsdp_unit_report &got = reports[static_cast<std::size_t>(u)];
      EXPECT_EQ(got.unit, u);
      EXPECT_EQ(got.payload, payload);
      EXPECT_EQ(got.max_segment, most);
      EXPECT_EQ(got.owner_count, owners);
      nonempty += payload > 0;
      EXPECT_DOUBLE_EQ(got.gamma, payload > 0 ? static_cast<double>(most) * world /
                                                    static_cast<double>(payload)
                                              : 0.0);
    }
    const auto check = [&](const std::vector<int64_t> &values, const mfsdp_plan_spread &got) {
      const auto top = std::max_element(values.begin(), values.end()); /* the first of equals */
      int64_t sum = 0;
      for (int64_t v : values)
        sum += v;
      EXPECT_EQ(got.max, *top);
      EXPECT_EQ(got.max_rank, top - values.begin());
      EXPECT_EQ(got.sum, sum);
    };
    check(cost, s.cost);
    check(resident, s.resident);
    check(nbytes, s.resident_nbytes);
    check(sent, s.sent);
    EXPECT_EQ(s.unit_count, nonempty);
    EXPECT_EQ(s.piece_count, mfsdp_plan_piece_count(rig.plan));
    EXPECT_EQ(static_cast<std::size_t>(s.matrix_count), all_matrices(params.list).size());
    EXPECT_GE(s.cost.max, s.cost_bound);
    EXPECT_GE(s.resident_nbytes.max, s.resident_nbytes_bound);
    EXPECT_GE(s.resident_nbytes_bound * world, s.resident_nbytes.sum);
  });
}

/* The smallest possible largest load, by trying every assignment. */
int64_t best_of_all(const std::vector<int64_t> &costs, std::vector<int64_t> load,
                    std::size_t k = 0) {
  if (k == costs.size()) return *std::max_element(load.begin(), load.end());
  int64_t best = INT64_MAX;
  for (std::size_t r = 0; r < load.size(); ++r) {
    load[r] += costs[k];
    best = std::min(best, best_of_all(costs, load, k + 1));
    load[r] -= costs[k];
  }
  return best;
}

TEST(PlanReport, TheBoundHoldsForEveryAssignment) {
  int tight[5] = {0, 0, 0, 0, 0};
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Draw draw(seed);
    const int64_t n = draw.between(0, 7), world = draw.between(1, 4);
    const int64_t range = draw.below(2) ? 5 : 60;
    std::vector<int64_t> costs, base(static_cast<std::size_t>(world));
    Params p;
    for (int64_t k = 0; k < n; ++k) {
      costs.push_back(draw.between(1, range));
      p.add("m" + std::to_string(k), MFSDP_ROLE_MATRIX, static_cast<int32_t>(k % 3),
            {1, costs.back()});
    }
    if (draw.below(2))
      for (int64_t &b : base)
        b = draw.below(2 * range);
    PlanRig rig;
    mfsdp_plan_desc desc = p.desc(static_cast<int32_t>(world));
    desc.base_load = base.data();
    ASSERT_EQ(rig.create(desc), MFSDP_OK);
    mfsdp_plan_summary s = mfsdp_plan_summary_default();
    ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
    const int64_t best = best_of_all(costs, base);
    EXPECT_LE(s.cost_bound, best) << "seed " << seed;
    EXPECT_GE(s.cost.max, best) << "seed " << seed;
    ASSERT_TRUE(s.bound >= 1 && s.bound <= 4);
    if (s.cost_bound == best) ++tight[s.bound];
    const double ratio = s.cost_bound > 0
                             ? static_cast<double>(s.cost.max) / static_cast<double>(s.cost_bound)
                             : 1.0;
    EXPECT_DOUBLE_EQ(s.cost_ratio, ratio);
  }
  for (int kind = 1; kind <= 4; ++kind)
    EXPECT_GT(tight[kind], 0) << "bound " << kind << " was never the optimum";
}

TEST(PlanReport, WhichArgumentBinds) {
  const auto bound_of = [](const std::vector<int64_t> &costs, int32_t world, int64_t load = 0) {
    const std::vector<int64_t> base(static_cast<std::size_t>(world), load);
    Params p;
    for (std::size_t k = 0; k < costs.size(); ++k)
      p.add("m" + std::to_string(k), MFSDP_ROLE_MATRIX, 0, {1, costs[k]});
    PlanRig rig;
    mfsdp_plan_summary s = mfsdp_plan_summary_default();
    mfsdp_plan_desc desc = p.desc(world);
    desc.base_load = base.data();
    EXPECT_EQ(rig.create(desc), MFSDP_OK);
    EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
    return std::make_pair(s.bound, s.cost_bound);
  };
  EXPECT_EQ(bound_of({4, 2, 2, 1}, 2), std::make_pair(MFSDP_BOUND_VOLUME, int64_t{5}));
  EXPECT_EQ(bound_of({9}, 2, 5), std::make_pair(MFSDP_BOUND_LARGEST, int64_t{14}));
  EXPECT_EQ(bound_of({3, 3, 2}, 2, 7), std::make_pair(MFSDP_BOUND_PIGEONHOLE, int64_t{12}));
  EXPECT_EQ(bound_of({3, 3, 2}, 2), std::make_pair(MFSDP_BOUND_PIGEONHOLE, int64_t{5}));
  EXPECT_EQ(bound_of({9, 1, 1}, 2), std::make_pair(MFSDP_BOUND_LARGEST, int64_t{9}));
  EXPECT_EQ(bound_of({2, 2, 2, 2}, 2), std::make_pair(MFSDP_BOUND_VOLUME, int64_t{4}));
  EXPECT_EQ(bound_of({4, 4, 4, 4, 4, 4, 4}, 3),
            std::make_pair(MFSDP_BOUND_PIGEONHOLE, int64_t{12}));
}

/* Elements sent by all ranks of a large world pass 64 bits: said, not wrapped. */
TEST(PlanReport, TrafficThatDoesNotFit) {
  Params p;
  p.add("e", MFSDP_ROLE_MATRIX, 0, {INT64_C(1) << 23, INT64_C(1) << 22});
  p.add("f", MFSDP_ROLE_MATRIX, 0, {INT64_C(1) << 22, INT64_C(1) << 23});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1 << 19)), MFSDP_OK) << rig.message();
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_E_OVERFLOW);
}

TEST(PlanReport, BadArguments) {
  Params p;
  p.add("a", MFSDP_ROLE_MATRIX, 0, {4, 8});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK);
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  EXPECT_EQ(mfsdp_plan_report(&rig.context, nullptr, &s, nullptr, 0), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, nullptr, nullptr, 0), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 1), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, -1), MFSDP_E_ARGUMENT);
  s.struct_nbytes = 4;
  EXPECT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("summary.struct_nbytes is 4"), std::string::npos);
  int64_t loads[3];
  EXPECT_EQ(mfsdp_plan_loads(&rig.context, rig.plan, loads, 3), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_loads(&rig.context, rig.plan, nullptr, 2), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_loads(&rig.context, nullptr, loads, 2), MFSDP_E_ARGUMENT);
}

/* ---- tails ---- */

TEST(PlanTails, ALargeTailIsSpreadEvenlyOverItsUnit) {
  Params p;
  fill_gpt(&p, 12, 768, 50257);
  PlanRig rig;
  for (int32_t world : {2, 4, 8, 16}) {
    std::vector<mfsdp_unit_report> units(14);
    mfsdp_plan_summary s = mfsdp_plan_summary_default();
    ASSERT_EQ(rig.create(p.desc(world)), MFSDP_OK);
    ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, units.data(), 14), MFSDP_OK);
    /* 589 blocks of 65536 elements: at 16 ranks a share is 36.8 of them, and a rank may have up to
     * one more, half at each end: 1.028, and a little for what the first tail left uneven. */
    EXPECT_LT(units[0].gamma, 1.04) << world;
    EXPECT_LT(units[13].gamma, 1.04) << world;
    EXPECT_LT(mfsdp_plan_spread_ratio(s.resident_nbytes, world), 1.03) << world;
  }
}

/* Four matrices of equal size on eight ranks: the tail goes where no matrix is. */
TEST(PlanTails, FillsTheRanksWithoutMatrices) {
  Params p;
  for (int i = 0; i < 4; ++i)
    p.add("m" + std::to_string(i), MFSDP_ROLE_MATRIX, 0, {512, 512});
  p.add("tail", MFSDP_ROLE_ELEMENTWISE, 0, {4 * 512, 512});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK);
  for (int32_t r = 0; r < 8; ++r)
    EXPECT_EQ(mfsdp_plan_segment_count(rig.plan, 0, r, MFSDP_LAYOUT_GATHER), 512 * 512) << r;
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
  EXPECT_EQ(s.gamma_max, 1.0);
}

/* 4 blocks on 3 equal ranks: cuts at 1.33 and 2.67 go to the nearest block. */
TEST(PlanTails, CutsGoToTheNearestBlock) {
  Params p;
  p.add("e", MFSDP_ROLE_ELEMENTWISE, 0, {4 * 4096});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(3)), MFSDP_OK);
  const std::vector<mfsdp_piece> pieces = rig.pieces();
  ASSERT_EQ(pieces.size(), 3u);
  const int64_t blocks[3] = {1, 2, 1};
  for (std::size_t k = 0; k < 3; ++k) {
    EXPECT_EQ(pieces[k].owner, static_cast<int32_t>(k));
    EXPECT_EQ(pieces[k].count, blocks[k] * 4096);
  }
}

/* A rank with much room takes a small tail whole; it is not scattered in 4096s. */
TEST(PlanTails, IsNotCutFinerThanTheMatricesOfItsUnit) {
  Params p;
  for (int32_t u = 0; u < 8; ++u) {
    p.add("m" + std::to_string(u), MFSDP_ROLE_MATRIX, u, {256, 256});
    p.add("e" + std::to_string(u), MFSDP_ROLE_ELEMENTWISE, u, {128, 256});
  }
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK);
  EXPECT_EQ(rig.pieces().size(), 16u);
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
  EXPECT_EQ(mfsdp_plan_spread_ratio(s.resident, 8), 1.0);
}

/* Norms and biases of a unit stay together: few small messages. */
TEST(PlanTails, ASmallTailHasOneOwner) {
  Params p;
  for (int i = 0; i < 6; ++i)
    p.add("b" + std::to_string(i), MFSDP_ROLE_ELEMENTWISE, 0, {600});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(8)), MFSDP_OK);
  for (const mfsdp_piece &piece : rig.pieces())
    EXPECT_EQ(piece.owner, 0);
}

/* ---- audit ---- */

void keep_line(void *user, const char *line) {
  static_cast<std::vector<std::string> *>(user)->push_back(line);
}
const char *by_index(void *, int32_t param) {
  return param == 1 ? "muon" : nullptr;
}

TEST(PlanAudit, OneLinePerParameter) {
  Params p;
  p.add("embed", MFSDP_ROLE_ELEMENTWISE, 0, {10, 50});
  p.add_rows("qkv", 1, {64, 32, 32}, 64).hyper_group = 2;
  p.add("conv", MFSDP_ROLE_MATRIX, 1, {2, 3, 3}).view = MFSDP_VIEW_CONV;
  p.add("frozen", MFSDP_ROLE_FROZEN, 1, {7});
  p.add("none", MFSDP_ROLE_MATRIX, 1, {0, 8});
  p.add_alias("head", 0, 2);
  p.add("experts", MFSDP_ROLE_MATRIX, 2, {20, 4, 4}).view = MFSDP_VIEW_BATCH;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2, MFSDP_PLANNER_ROUND_ROBIN)), MFSDP_OK);
  std::vector<std::string> lines;
  ASSERT_EQ(mfsdp_plan_audit(&rig.context, rig.plan, by_index, keep_line, &lines), MFSDP_OK);
  const std::vector<std::string> expected = {
      "embed  [10,50]  unit 0  elementwise  group 0  owner 1  ?",
      "qkv  [128,64]  unit 1  matrix rows -> 3 matrices  group 2  owners 0 1 0  muon",
      "conv  [2,3,3]  unit 1  matrix conv -> 1 matrix  group 0  owner 1  ?",
      "frozen  [7]  unit 1  frozen  group 0  owner 1  none",
      "none  [0,8]  unit 1  matrix whole -> 1 matrix  group 0  owner none (empty)  ?",
      "head  [10,50]  unit 2  elementwise  alias of embed",
      "experts  [20,4,4]  unit 2  matrix batch -> 20 matrices  group 0  owners 0 1 0 1 0 1 0 1 0 1 "
      "0 "
      "1 0 1 0 1 ... (20 pieces)  ?",
  };
  EXPECT_EQ(lines, expected);
  lines.clear();
  ASSERT_EQ(mfsdp_plan_audit(&rig.context, rig.plan, nullptr, keep_line, &lines), MFSDP_OK);
  EXPECT_EQ(lines[1].substr(lines[1].size() - 3), "  ?");
  EXPECT_EQ(mfsdp_plan_audit(&rig.context, rig.plan, nullptr, nullptr, &lines), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_audit(&rig.context, nullptr, nullptr, keep_line, &lines), MFSDP_E_ARGUMENT);
}

TEST(PlanAudit, LongNamesAreNotCut) {
  Params p;
  const std::string name(5000, 'x');
  p.add(name, MFSDP_ROLE_ELEMENTWISE, 0, {1, 1, 1, 1, 1, 1, 1, INT64_C(1) << 45});
  p.add_alias(std::string(4000, 'y'), 0, 3);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(1 << 10)), MFSDP_OK) << rig.message();
  std::vector<std::string> lines;
  ASSERT_EQ(mfsdp_plan_audit(&rig.context, rig.plan, nullptr, keep_line, &lines), MFSDP_OK);
  EXPECT_EQ(lines[0].substr(0, 5000), name);
  EXPECT_NE(lines[0].find("... (1024 pieces)  ?"), std::string::npos);
  EXPECT_EQ(lines[1].substr(lines[1].size() - 5000), name);
}

/* ---- memory ---- */

TEST(PlanMemory, EachAllocationMayFail) {
  Params p;
  fill_gpt(&p, 2, 64, 300);
  p.add_heads("heads", 1, 4, 64, 64);
  p.add_alias("tied", 0, 5);
  p.add("frozen", MFSDP_ROLE_FROZEN, 2, {5000});
  const std::vector<int64_t> base(4, 1);
  mfsdp_plan_desc desc = p.desc(4, MFSDP_PLANNER_BALANCED);
  desc.base_load = base.data();
  const std::vector<int32_t> nodes = {0, 0, 1, 1};
  desc.node_of_rank = nodes.data();
  desc.caps.max_owners = 4;
  PlanRig rig;
  int64_t n = 0;
  for (;; ++n) {
    rig.memory.fail_at(n);
    mfsdp_plan *plan = reinterpret_cast<mfsdp_plan *>(&desc); /* must become NULL */
    const mfsdp_status status = mfsdp_plan_create(&rig.context, &desc, &plan);
    const bool failed = rig.memory.failed();
    EXPECT_EQ(status, failed ? MFSDP_E_MEMORY : MFSDP_OK);
    if (failed) {
      EXPECT_EQ(plan, nullptr);
      EXPECT_NE(rig.message().find("the allocator refused"), std::string::npos);
    } else
      mfsdp_plan_destroy(&rig.context, plan);
    EXPECT_EQ(rig.context.total_nbytes, 0u);
    EXPECT_EQ(rig.memory.live_count(), 0u);
    if (!failed) break;
  }
  EXPECT_GT(n, 30);
}

TEST(PlanMemory, EachAllocationOfReportAndAuditMayFail) {
  Params p;
  fill_gpt(&p, 2, 64, 300);
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(4)), MFSDP_OK);
  const std::size_t held = rig.context.total_nbytes;
  std::vector<std::string> lines;
  for (int audit = 0; audit < 2; ++audit)
    for (int64_t n = 0;; ++n) {
      rig.memory.fail_at(n);
      mfsdp_plan_summary s = mfsdp_plan_summary_default();
      const mfsdp_status status =
          audit ? mfsdp_plan_audit(&rig.context, rig.plan, nullptr, keep_line, &lines)
                : mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0);
      EXPECT_EQ(status, rig.memory.failed() ? MFSDP_E_MEMORY : MFSDP_OK);
      EXPECT_EQ(rig.context.total_nbytes, held);
      if (!rig.memory.failed()) break;
    }
  rig.memory.fail_at(-1);
}

/* No table of parameters x world: 100,000 tensors on 16,384 ranks stay far below a gigabyte. */
TEST(PlanMemory, ManyTensorsOnManyRanks) {
  Params p;
  for (int32_t i = 0; i < 100000; ++i)
    p.add("layer." + std::to_string(i), i % 8 ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE, i / 100,
          {1 + i % 640, 1024});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(16384)), MFSDP_OK) << rig.message();
  EXPECT_LT(rig.memory.peak_nbytes(), std::size_t{100} << 20);
  /* All of one cost: the start meets the bound, and there is little to search. */
  mfsdp_plan_desc desc = p.desc(16384, MFSDP_PLANNER_BALANCED);
  desc.cost = [](void *, int32_t, int64_t, int64_t) -> int64_t { return 1; };
  rig.drop();
  ASSERT_EQ(rig.create(desc), MFSDP_OK) << rig.message();
  EXPECT_LT(rig.memory.peak_nbytes(), std::size_t{100} << 20);
}

/* Very many tails on very many ranks: each alone would be cut into 1,024 parts. Now all together are
 * about 2^19 parts, and the ranks are level. */
TEST(PlanMemory, ManyTailsOnManyRanks) {
  Params p;
  for (int32_t i = 0; i < 2000; ++i)
    p.add("layer." + std::to_string(i), MFSDP_ROLE_ELEMENTWISE, i, {1024, 4096});
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(16384)), MFSDP_OK) << rig.message();
  EXPECT_LE(mfsdp_plan_piece_count(rig.plan), (1 << 19) + 2000);
  EXPECT_LT(rig.memory.peak_nbytes(), std::size_t{128} << 20);
  mfsdp_plan_summary s = mfsdp_plan_summary_default();
  ASSERT_EQ(mfsdp_plan_report(&rig.context, rig.plan, &s, nullptr, 0), MFSDP_OK);
  EXPECT_LT(mfsdp_plan_spread_ratio(s.resident_nbytes, 16384), 1.05);
}

} // namespace
