/* SPDX-License-Identifier: MIT */
/* Lower bounds on the largest load against the optimum by trying everything. */
#include "mfsdp/plan.h"

#include "tests/support/plan_cases.h"

#include <algorithm>

namespace {

using test::Draw;

struct Proof {
  int64_t value;
  mfsdp_plan_bound kind;
};

Proof prove(std::vector<int64_t> costs, std::vector<int64_t> bases) {
  std::vector<mfsdp__keyed> sorted(costs.size() + 1), ranks(bases.size());
  std::vector<int64_t> prefix(costs.size() + 1);
  std::sort(costs.rbegin(), costs.rend());
  std::sort(bases.begin(), bases.end());
  for (std::size_t k = 0; k < costs.size(); ++k) {
    sorted[k].key = -costs[k];
    sorted[k].id = static_cast<int32_t>(k);
    prefix[k + 1] = prefix[k] + costs[k];
  }
  for (std::size_t r = 0; r < bases.size(); ++r) {
    ranks[r].key = bases[r];
    ranks[r].id = static_cast<int32_t>(r);
  }
  mfsdp__bound bound = {};
  bound.sorted = sorted.data();
  bound.prefix = prefix.data();
  bound.count = static_cast<int64_t>(costs.size());
  bound.world = static_cast<int64_t>(bases.size());
  mfsdp__bound_run(&bound, ranks.data());
  return {bound.value, bound.kind};
}

int64_t optimum(const std::vector<int64_t> &costs, std::vector<int64_t> &load, std::size_t k,
                int64_t best) {
  if (k == costs.size()) return std::min(best, *std::max_element(load.begin(), load.end()));
  for (std::size_t r = 0; r < load.size(); ++r) {
    load[r] += costs[k];
    if (load[r] < best) best = optimum(costs, load, k + 1, best);
    load[r] -= costs[k];
  }
  return best;
}

/* Few distinct costs, as models have them: there the four arguments nearly always meet. */
TEST(PlanBound, NeverAboveTheOptimumAndMostlyAtIt) {
  int tight = 0, cases = 0, by_divisibility = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Draw draw(seed);
    const int64_t n = draw.between(0, 9), kinds = draw.between(1, 3);
    std::vector<int64_t> sizes, costs, load(static_cast<std::size_t>(draw.between(1, 4)));
    for (int64_t k = 0; k < kinds; ++k)
      sizes.push_back(draw.between(0, draw.below(2) ? 9 : 1000));
    for (int64_t k = 0; k < n; ++k)
      costs.push_back(sizes[static_cast<std::size_t>(draw.below(kinds))]);
    if (draw.below(4) == 0)
      for (int64_t &l : load)
        l = draw.below(20);
    const Proof proof = prove(costs, load);
    const int64_t most = *std::max_element(load.begin(), load.end());
    const int64_t best = costs.empty() ? most : optimum(costs, load, 0, INT64_MAX);
    ASSERT_LE(proof.value, best) << "seed " << seed << " by " << mfsdp_plan_bound_name(proof.kind);
    ++cases;
    tight += proof.value == best;
    by_divisibility += proof.kind == MFSDP_BOUND_DIVISIBILITY && proof.value == best;
  }
  EXPECT_GT(tight * 10, cases * 9);
  EXPECT_GT(by_divisibility, cases / 50);
}

/* 240 large matrices with 160 of 3/8 of their cost on 256 ranks, as Llama-3-70B has them: 16 ranks
 * without a large one cannot hold the 160. No sum says so. */
TEST(PlanBound, LargeItemsLeaveNoRoomForOthers) {
  std::vector<int64_t> costs(240, 8);
  costs.resize(400, 3);
  const Proof proof = prove(costs, std::vector<int64_t>(256));
  EXPECT_EQ(proof.value, 11);
  EXPECT_EQ(proof.kind, MFSDP_BOUND_DIVISIBILITY);
}

/* Below 104 a rank holds two of 44, or six of 16, or one of 44 with three of 16: with weights 1/2
 * and 1/6 never more than 1, and 240/2 + 80/6 is more than 128. No sum says so. */
TEST(PlanBound, WeightsOfAShareOfARank) {
  std::vector<int64_t> costs(240, 44);
  costs.resize(320, 16);
  const Proof proof = prove(costs, std::vector<int64_t>(128));
  EXPECT_EQ(proof.kind, MFSDP_BOUND_DIVISIBILITY);
  EXPECT_EQ(proof.value, 2 * 44 + 16);
}

/* Odd sums of even costs. */
TEST(PlanBound, ACommonDivisorRoundsUp) {
  EXPECT_EQ(prove({4, 4, 2, 2, 2}, {0, 0}).value, 8);
  EXPECT_EQ(prove({4, 4, 2, 2, 2}, {0, 0}).kind, MFSDP_BOUND_DIVISIBILITY);
  EXPECT_EQ(prove({6, 6, 6, 6, 6}, {5, 5}).value, 23);
}

/* Levels near the largest number: no sum passes it (test-asan sees one that does). */
TEST(PlanBound, CostsOfAllBits) {
  const int64_t most = INT64_MAX;
  EXPECT_EQ(prove({most}, {0}).value, most);
  EXPECT_EQ(prove({most - 9, 4}, {5, 0}).value, most - 9);
  EXPECT_EQ(prove({most / 3, most / 3, most / 3}, {0, 0}).value, most / 3 * 2);
  EXPECT_EQ(prove({7}, {most - 7, 0}).value, most - 7);
}

TEST(PlanBound, NoItems) {
  EXPECT_EQ(prove({}, {3, 7}).value, 7);
  EXPECT_EQ(prove({0, 0}, {0}).value, 0);
}

/* More distinct costs than the search takes: weaker, never wrong, and quick. */
TEST(PlanBound, ManyDistinctCosts) {
  std::vector<int64_t> costs;
  int64_t sum = 0;
  for (int64_t k = 1; k <= 20000; ++k) {
    costs.push_back(1000 + 7 * k);
    sum += costs.back();
  }
  const Proof proof = prove(costs, std::vector<int64_t>(1000));
  EXPECT_GE(proof.value, sum / 1000);
  EXPECT_LE(proof.value, sum / 1000 + 1000 + 7 * 20000);
}

TEST(PlanBound, Names) {
  EXPECT_STREQ(mfsdp_plan_bound_name(MFSDP_BOUND_VOLUME), "volume");
  EXPECT_STREQ(mfsdp_plan_bound_name(MFSDP_BOUND_DIVISIBILITY), "divisibility");
  EXPECT_STREQ(mfsdp_plan_bound_name(static_cast<mfsdp_plan_bound>(0)), "invalid");
}

} // namespace
