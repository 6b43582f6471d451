/* SPDX-License-Identifier: MIT */
/*
 * Groups: dense units on all ranks, experts on some of them. Every parameter, state and verdict bit
 * for bit against the oracle; what one instance does must not show in another.
 */
#include "failing.h"
#include "groups_rig.h"

namespace {

using test::Copies;
using test::GroupsJob;
using test::GroupsTrainer;
using test::Links;
using test::must_fail;
using test::Rank;
using test::RanksResult;
using test::require;

std::vector<ref::Tensor> dense_tensors() { /* units 0, 2 and 4 */
  std::vector<ref::Tensor> out;
  out.push_back(ref::elementwise("embed", 0, {120, 75})); /* three canonical blocks */
  out.push_back(ref::matrix("qkv", 2, 12, 20));
  out.push_back(ref::matrix("out", 2, 20, 12));
  out.push_back(ref::elementwise("norm", 2, {40}, 2));
  out.push_back(ref::matrix("no_rows", 2, 0, 8));
  out.push_back(ref::frozen("mask", 4, {9, 50}));
  out.push_back(ref::matrix("wide", 4, 10, 30));
  out.push_back(ref::tied("head", 4, out[0]));
  return out;
}

/* Units 1 and 3. */
std::vector<ref::Tensor> expert_tensors(const std::string &prefix) {
  std::vector<ref::Tensor> out;
  out.push_back(ref::experts(prefix + ".up", 1, 3, 8, 24));
  out.push_back(ref::elementwise(prefix + ".bias", 1, {65}));
  out.push_back(ref::matrix(prefix + ".gate", 3, 16, 9));
  out.push_back(ref::elementwise(prefix + ".scale", 3, {33}, 2));
  return out;
}

/* Other shapes, another number of tensors. */
std::vector<ref::Tensor> other_tensors(const std::string &prefix) {
  std::vector<ref::Tensor> out;
  out.push_back(ref::matrix(prefix + ".only", 1, 7, 50));
  out.push_back(ref::elementwise(prefix + ".table", 3, {100, 90}));
  out.push_back(ref::frozen(prefix + ".code", 3, {3, 70}));
  out.push_back(ref::conv(prefix + ".conv", 3, 6, 2, 2));
  out.push_back(ref::elementwise(prefix + ".empty", 3, {0, 4}));
  return out;
}

GroupsJob base_job() {
  GroupsJob job;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  return job;
}

GroupsJob experts_job() {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, expert_tensors("a"));
  job.add_instance(false, {{1, 3}}, expert_tensors("b"));
  return job;
}

/* Instances of other shapes and counts, in the same units. */
GroupsJob uneven_job() {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, expert_tensors("a"));
  job.add_instance(false, {{1, 3}}, other_tensors("b"));
  return job;
}

/* ---- equality ---- */

TEST(Groups, EqualTheOracle) {
  const GroupsJob job = experts_job();
  EXPECT_EQ(test::run_groups_job(job, 1, 3), "");
  EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
}

/* Each rank adds up its micro-batches; the sums then meet in rank order, in each group. */
TEST(Groups, LocalAccumulationEqualsItsOracle) {
  for (const bool workers : {false, true})
    for (const bool uneven : {false, true}) {
      GroupsJob job = uneven ? uneven_job() : experts_job();
      job.options.local_world = job.ranks();
      if (workers) job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      if (workers) job.prefetch_depth = job.reduce_depth = 2;
      job.on_queue = workers && uneven;
      for (const int32_t micro_batches : {1, 3})
        EXPECT_EQ(test::run_groups_job(job, micro_batches, 3), "");
      job.script.weight = [](int64_t step, int64_t block) {
        return static_cast<double>(1 + (step + 3 * block) % 5);
      };
      job.script.sample = [](int64_t step, int64_t block, int32_t use) {
        return (step + block + use) % 3 == 0 ? ref::Sample::kAbsent : ref::Sample::kPresent;
      };
      EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
    }
  GroupsJob plain = experts_job(), local = plain; /* another order of additions, and it shows */
  local.options.local_world = local.ranks();
  EXPECT_NE(plain.expected(3, 1).after(0).weights, local.expected(3, 1).after(0).weights);
}

TEST(Groups, InstancesOfOtherNamesShapesAndCounts) {
  for (const mfsdp_planner planner :
       {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY, MFSDP_PLANNER_SCOPE_GREEDY}) {
    GroupsJob job = uneven_job();
    job.planner = planner;
    EXPECT_EQ(test::run_groups_job(job, 2, 2), "") << mfsdp_planner_name(planner);
  }
}

/* Units that only one instance has: fine without prefetch. */
GroupsJob other_units_job() {
  GroupsJob job = uneven_job();
  job.groups[1].clear();
  job.model.tensors.resize(dense_tensors().size());
  job.add_instance(false, {{0, 2}}, expert_tensors("a"));
  job.add_instance(false, {{1, 3}}, {ref::matrix("b", 5, 7, 50), ref::elementwise("c", 6, {9})});
  return job;
}

TEST(Groups, InstancesOfOtherUnits) {
  for (const bool reshard : {true, false}) {
    GroupsJob job = other_units_job();
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    job.tune = [reshard](mfsdp_runtime_desc *desc) { desc->reshard_after_forward = reshard; };
    EXPECT_EQ(test::run_groups_job(job, 2, 2), "") << reshard;
  }
}

/* What is gathered ahead, and when, follows from a rank's units: unequal units would gather in
 * unequal orders. */
TEST(Groups, PrefetchNeedsTheSameUnits) {
  GroupsJob tied = uneven_job(); /* the same units, but one of them needs another one's slot */
  tied.groups[1].clear();
  tied.model.tensors.resize(dense_tensors().size());
  tied.add_instance(false, {{0, 2}}, {ref::matrix("a", 1, 4, 9), ref::matrix("a2", 3, 4, 9)});
  tied.add_instance(false, {{1, 3}},
                    {ref::matrix("b", 1, 4, 9), ref::tied("b2", 3, ref::matrix("b", 1, 4, 9))});
  for (GroupsJob job : {other_units_job(), tied}) {
    EXPECT_EQ(test::run_groups_job(job, 1, 1), "");
    job.prefetch_depth = 1;
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      MFSDP_TRY(t.make_plans());
      must_fail(rank, t.make_runtime(), MFSDP_E_MISMATCH, "need the same unit numbers");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Threads, ranks of group 0, ranks of the expert groups and the order of instances all differ. */
GroupsJob shuffled_job(bool wrong) {
  /* A few large terms, and many small ones: their sum is another one in another order. */
  const std::vector<ref::Tensor> a = {ref::elementwise("a", 1, {15, 4096}),
                                      ref::matrix("am", 1, 4, 9)};
  const std::vector<ref::Tensor> b = {ref::experts("b", 1, 201, 1, 1),
                                      ref::elementwise("bb", 1, {3})};
  GroupsJob job = base_job();
  /* Numbers: thread 2 is 0, 0 is 1, 3 is 2, 1 is 3. */
  job.add_group({{2, 0, 3, 1}}, {ref::matrix("dense", 0, 6, 7), ref::elementwise("bias", 0, {11})});
  if (wrong) job.add_instance(true, {{1, 0}}, a);
  job.add_instance(!wrong, {{3, 2}}, b); /* has the lowest number, 0: folded first */
  if (!wrong) job.add_instance(false, {{1, 0}}, a);
  return job;
}

TEST(Groups, RanksInAnyOrder) {
  EXPECT_EQ(test::run_groups_job(shuffled_job(false), 2, 3), "");
  /* Or the test could not tell one order of instances from the other. */
  EXPECT_NE(test::run_groups_job(shuffled_job(true), 2, 3), "");
}

TEST(Groups, WithWorkerQueuesAndPrefetch) {
  for (const bool on_queue : {false, true})
    for (const int32_t depth : {0, 1, 3}) {
      GroupsJob job = uneven_job();
      job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      job.on_queue = on_queue;
      job.prefetch_depth = depth;
      job.reduce_depth = depth;
      job.debug_poison = job.debug_check = 1;
      if (depth == 3) job.active_units = 2;
      EXPECT_EQ(test::run_groups_job(job, 2, 2), "") << "depth " << depth << " queue " << on_queue;
    }
}

/* An expert group of all ranks one by one, one of pairs, one that is group 0 again. */
TEST(Groups, FourGroups) {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  for (int32_t k = 0; k < 4; ++k)
    job.add_instance(k == 0, {{k}},
                     {ref::matrix("own" + std::to_string(k), 6, 5 + k, 11),
                      ref::elementwise("bias" + std::to_string(k), 6, {30})});
  job.add_instance(true, {{0, 2}}, expert_tensors("a"));
  job.add_instance(false, {{1, 3}}, other_tensors("b"));
  job.add_group({{3, 2, 1, 0}},
                {ref::matrix("last", 7, 21, 6), ref::elementwise("tail", 7, {5000})});
  EXPECT_EQ(test::run_groups_job(job, 2, 2), "");
}

/* The exchange of block numbers goes in rounds of 16 numbers of each rank. */
TEST(Groups, ManyBlocks) {
  for (const int64_t count : {15, 16, 17, 31, 33, 50, 70}) {
    GroupsJob job = base_job();
    job.add_group({{0, 1, 2, 3}}, {ref::matrix("dense", 0, 6, 7)});
    job.add_instance(true, {{0, 2}}, {ref::experts("a", 1, count, 2, 3)});
    job.add_instance(false, {{1, 3}},
                     {ref::experts("b", 1, 3, 4, 2), ref::elementwise("c", 1, {9})});
    EXPECT_EQ(test::run_groups_job(job, 1, 2), "") << count;
  }
}

/* One matrix: a rank of each instance owns nothing; one instance has nothing to train at all. */
TEST(Groups, RanksWithoutBlocks) {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, {ref::matrix("dense", 0, 6, 7)}); /* three ranks own nothing here */
  job.add_instance(true, {{0, 2}}, {ref::matrix("a", 1, 4, 9)});
  job.add_instance(false, {{1, 3}}, {ref::frozen("b", 1, {50}), ref::matrix("none", 1, 0, 3)});
  EXPECT_EQ(test::run_groups_job(job, 2, 2), "");
}

TEST(Groups, WithoutParameters) {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, {});
  job.add_instance(false, {{1, 3}}, other_tensors("b"));
  EXPECT_EQ(test::run_groups_job(job, 2, 2), "");
  GroupsJob empty_dense = base_job(); /* also legal: everything is experts */
  empty_dense.add_group({{0, 1, 2, 3}}, {});
  empty_dense.add_instance(true, {{0, 2}}, expert_tensors("a"));
  empty_dense.add_instance(false, {{1, 3}}, other_tensors("b"));
  EXPECT_EQ(test::run_groups_job(empty_dense, 2, 2), "");
}

/* Presence bits on both sides of a word's end, and in different words for the instances. */
TEST(Groups, ManyParameters) {
  GroupsJob job = base_job();
  std::vector<ref::Tensor> dense, a, b;
  for (int32_t i = 0; i < 60; ++i)
    dense.push_back(ref::elementwise("d" + std::to_string(i), 0, {2}));
  for (int32_t i = 0; i < 70; ++i)
    a.push_back(ref::elementwise("a" + std::to_string(i), 1, {3}));
  for (int32_t i = 0; i < 9; ++i)
    b.push_back(ref::elementwise("b" + std::to_string(i), 1, {2}));
  job.add_group({{0, 1, 2, 3}}, dense);
  job.add_instance(true, {{0, 2}}, a);
  job.add_instance(false, {{1, 3}}, b);
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    const bool never = (use + step) % 7 == 3; /* on no rank */
    const bool rare = (use + block) % 3 == 1; /* on some */
    return never || rare ? ref::Sample::kAbsent : ref::Sample::kPresent;
  };
  EXPECT_EQ(test::run_groups_job(job, 1, 3), "");
  EXPECT_EQ(test::run_groups_job(job, 2, 2), "");
}

/* ---- presence, skips, stop ---- */

TEST(Presence, IsOfOneInstance) {
  for (const bool zeros : {false, true}) {
    GroupsJob job = experts_job();
    job.options.missing_is_zero = zeros;
    const int32_t first = static_cast<int32_t>(dense_tensors().size());
    job.script.sample = [first](int64_t step, int64_t, int32_t use) {
      /* a.up and a.scale have none in steps 1 and 2; b's parameters of the same index do */
      const bool missing = (use == first && step >= 1) || (use == first + 3 && step == 2);
      return missing ? ref::Sample::kAbsent : ref::Sample::kPresent;
    };
    EXPECT_EQ(test::run_groups_job(job, 2, 3), "") << zeros;
    if (zeros) continue;
    const test::Expected expected = job.expected(1, 2);
    require(expected.after(0).weights[static_cast<std::size_t>(first)] ==
                expected.after(1).weights[static_cast<std::size_t>(first)],
            "the oracle leaves it alone");
  }
}

/* An instance that does not use its unit in a step. */
TEST(Presence, UnitsThatAStepDoesNotUse) {
  GroupsJob job = uneven_job();
  job.script.unit_used = [](int64_t step, int32_t unit) {
    return !(step == 1 && (unit == 3 || unit == 5)) && !(step == 2 && unit == 1);
  };
  EXPECT_EQ(test::run_groups_job(job, 2, 4), "");
}

TEST(Verdict, ANonFiniteExpertSkipsTheStepEverywhere) {
  for (const ref::Sample bad : {ref::Sample::kNan, ref::Sample::kInf}) {
    GroupsJob job = experts_job();
    const int32_t tensor = static_cast<int32_t>(dense_tensors().size()) + 6; /* b.gate */
    job.script.sample = [tensor, bad](int64_t step, int64_t block, int32_t use) {
      return step == 1 && block == 3 && use == tensor ? bad : ref::Sample::kPresent;
    };
    require(job.model.at(tensor).name == "b.gate", "the tensor that is meant");
    const test::Expected expected = job.expected(1, 3);
    require(expected.after(1).verdict.skipped && !expected.after(2).verdict.skipped,
            "one is skipped");
    EXPECT_EQ(test::run_groups_job(job, 1, 3), "");
  }
}

TEST(Verdict, IsTheSameOnAllRanks) {
  GroupsJob job = uneven_job();
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return step == 2 && block == 2 && use == 8 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  const int64_t steps = 4;
  std::vector<std::vector<mfsdp_verdict>> seen(4);
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 2);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < steps; ++s) {
      MFSDP_TRY(t.step(s, s == 1 && rank.rank == 3));
      seen[static_cast<std::size_t>(rank.rank)].push_back(t.verdict);
    }
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (std::size_t s = 0; s < 4; ++s) {
    for (std::size_t r = 1; r < 4; ++r)
      EXPECT_EQ(std::memcmp(&seen[0][s], &seen[r][s], sizeof(mfsdp_verdict)), 0)
          << "rank " << r << " step " << s;
    EXPECT_EQ(seen[0][s].stop, s == 1);
    EXPECT_EQ(seen[0][s].skipped, s == 2);
  }
  EXPECT_LT(seen[0][0].clip_scale, 1.0);
}

/* ---- plans, bytes, memory, export ---- */

TEST(Plans, LoadsOfTheDensePlanSteerTheExperts) {
  /* Dense: one matrix, on one rank. The instance that this rank is in gives its matrix to the
   * other. */
  GroupsJob job = base_job();
  job.base_load = true;
  job.add_group({{0, 1, 2, 3}}, {ref::matrix("dense", 0, 30, 20)});
  job.add_instance(true, {{0, 2}}, {ref::matrix("a", 1, 10, 20)});
  job.add_instance(false, {{1, 3}}, {ref::matrix("b", 1, 10, 20)});
  EXPECT_EQ(test::run_groups_job(job, 1, 2), "");
  std::vector<std::string> lines[4];
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    for (mfsdp_plan *plan : t.plans)
      MFSDP_TRY(mfsdp_plan_audit(
          &rank.context, plan, [](void *, int32_t) { return "muon"; },
          [](void *user, const char *line) {
            static_cast<std::vector<std::string> *>(user)->push_back(line);
          },
          &lines[rank.rank]));
    return MFSDP_OK;
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (std::size_t r = 0; r < 4; ++r) {
    ASSERT_EQ(lines[r].size(), 2u);
    EXPECT_NE(lines[r][0].find(
                  "dense  [30,20]  unit 0  matrix whole -> 1 matrix  group 0  owner 0  muon"),
              std::string::npos)
        << lines[r][0];
    EXPECT_NE(lines[r][1].find(r % 2 == 0 ? "owner 1" : "owner 0"), std::string::npos)
        << lines[r][1]; /* rank 0 of {0, 2} is loaded already */
  }
}

int64_t blocks_of_rank(const mfsdp_plan *plan, int32_t rank) {
  std::vector<mfsdp_norm_block> blocks(static_cast<std::size_t>(mfsdp_plan_block_count(plan)));
  int32_t count = 0;
  int64_t own = 0;
  require(mfsdp_plan_blocks(nullptr, plan, blocks.data(), static_cast<int32_t>(blocks.size()),
                            &count) == MFSDP_OK,
          "blocks");
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  for (const mfsdp_norm_block &block : blocks)
    own += pieces[block.piece].owner == rank;
  return own;
}

/* Payload: twice its own parameters to each other rank of the unit's group, once the gradients that
 * others own; the message to the others of group 0. */
TEST(Traffic, ByClassAndRank) {
  const GroupsJob job = uneven_job();
  const int32_t micro_batches = 2;
  const int64_t steps = 2;
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, micro_batches);
    uint64_t gather = 0, reduce = 0, words = 0, params = 0;
    MFSDP_TRY(t.create());
    for (std::size_t g = 0; g < t.plans.size(); ++g) {
      int32_t count = 0;
      const uint64_t others = static_cast<uint64_t>(mfsdp_plan_world(t.plans[g]) - 1);
      const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plans[g], -1, &count);
      for (int32_t i = 0; i < count; ++i) {
        const uint64_t nbytes = static_cast<uint64_t>(pieces[i].count) * 4;
        const mfsdp_param *param = mfsdp_plan_param(t.plans[g], pieces[i].param);
        const bool own = pieces[i].owner == t.places[g].rank;
        /* Unit 4 ties to the embedding: it gathers unit 0 once more. */
        const uint64_t gathers = param->unit == 0 ? 4 : 2;
        if (own) gather += gathers * nbytes * others;
        if (!own && param->role != MFSDP_ROLE_FROZEN) reduce += nbytes;
      }
      words += static_cast<uint64_t>(blocks_of_rank(t.plans[g], t.places[g].rank));
    }
    for (const std::vector<test::Instance> &group : job.groups)
      for (const test::Instance &instance : group)
        params += instance.tensors.size();
    words += 1 + static_cast<uint64_t>(job.max_micro_batches) + (params + 63) / 64;
    for (int64_t s = 0; s < steps; ++s)
      MFSDP_TRY(t.step(s));
    const mfsdp_traffic_count *sent = rank.context.counters.sent;
    const uint64_t rounds = static_cast<uint64_t>(steps * micro_batches);
    require(sent[MFSDP_TRAFFIC_MATERIALIZE].payload_nbytes == gather * rounds, "materialize");
    require(sent[MFSDP_TRAFFIC_REDUCE].payload_nbytes == reduce * rounds, "reduce");
    require(sent[MFSDP_TRAFFIC_SCALAR].payload_nbytes ==
                words * 8 * 3 * static_cast<uint64_t>(steps),
            "scalar");
    require(sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].wire_nbytes == 0, "optimizer matrix");
    require(sent[MFSDP_TRAFFIC_EXPORT].wire_nbytes == 0, "export");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The root is a rank of the parameter's group; the other instance takes no part. */
TEST(Export, FromOneInstance) {
  const GroupsJob job = uneven_job();
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.create());
    const bool in_a = rank.rank % 2 == 0;
    const int32_t param = t.param(in_a ? "a.up" : "b.table");
    const ref::Tensor &tensor = job.model.at(t.tensors[static_cast<std::size_t>(param)]);
    std::vector<float> want(static_cast<std::size_t>(tensor.numel()));
    ref::synthetic_init(job.model.seed, t.tensors[static_cast<std::size_t>(param)], 0,
                        tensor.numel(), want.data());
    require(t.param(in_a ? "b.table" : "a.up") == -1, "the other instance's parameter is not ours");
    must_fail(rank, mfsdp_param_export(t.runtime, param, 2, want.data()), MFSDP_E_ARGUMENT,
              "to root 2; needs 0 to");
    for (int32_t root = -1; root < 2; ++root) {
      std::vector<float> got(want.size(), 0.0f);
      const bool receives = root < 0 || root == t.places[1].rank;
      const uint64_t before = rank.context.counters.sent[MFSDP_TRAFFIC_EXPORT].payload_nbytes;
      if (in_a)
        MFSDP_TRY(mfsdp_param_export(t.runtime, param, root, receives ? got.data() : nullptr));
      if (!in_a && root == 1) /* b exports when it likes to */
        MFSDP_TRY(mfsdp_param_export(t.runtime, param, root, receives ? got.data() : nullptr));
      if (receives && (in_a || root == 1))
        require(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0,
                "the values");
      const uint64_t sent =
          rank.context.counters.sent[MFSDP_TRAFFIC_EXPORT].payload_nbytes - before;
      require(sent <= want.size() * sizeof(float), "at most one copy to the one other rank");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Memory, IsPredicted) {
  for (const GroupsJob &job : {experts_job(), uneven_job()}) {
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      mfsdp_memory memory = mfsdp_memory_default();
      MFSDP_TRY(t.make_plans());
      const mfsdp_status status = t.with_desc(nullptr, [&](const mfsdp_runtime_desc *desc) {
        rank.memory->fail_at(-1);
        MFSDP_TRY(mfsdp_runtime_memory(&rank.context, desc, &memory));
        require(rank.memory->alloc_count() == 0, "the prediction allocates");
        return mfsdp_runtime_create(&rank.context, desc, &t.runtime);
      });
      if (status != MFSDP_OK) return status;
      const std::size_t *now = rank.context.current_nbytes;
      require(now[MFSDP_MEMORY_SHARD] == memory.shard_nbytes, "shards");
      require(now[MFSDP_MEMORY_STATE] == memory.state_nbytes, "state");
      require(now[MFSDP_MEMORY_GRAD] == memory.grad_nbytes, "accumulators");
      require(now[MFSDP_MEMORY_SLOT] == memory.slot_nbytes, "slots");
      require(now[MFSDP_MEMORY_STAGING] == memory.staging_nbytes, "staging");
      require(now[MFSDP_MEMORY_WORKSPACE] == memory.workspace_nbytes, "workspace");
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* ---- what does not fit together: every rank gets a status and a message, and may try again ----
 */

TEST(Mismatch, PlansInsideAGroup) {
  struct Case {
    int32_t thread;
    std::size_t group;
    std::string text;
  };
  /* The message of those who compare says "here: NAME"; the others hear it from them. */
  for (const Case &c : {Case{3, 0, "first at parameter 1 (here: qkv)"},
                        Case{0, 0, "first at parameter 1 (here: qkv)"},
                        Case{2, 1, "first at parameter 1 (here: a.bias)"},
                        Case{1, 1, "first at parameter 1 (here: b.bias)"}})
    for (const int what : {0, 1, 2}) {
      GroupsJob job = experts_job();
      job.spoil_params = [c, what](int32_t thread, std::size_t group,
                                   std::vector<mfsdp_param> *params) {
        if (thread != c.thread || group != c.group) return;
        if (what == 0) params->at(1).shape[0] += 12;
        if (what == 1) params->at(1).hyper_group = c.group == 0 ? 1 : 2;
        if (what == 2) params->at(1).unit = c.group == 0 ? 4 : 3;
      };
      if (what == 2 && c.group == 0) continue; /* an order that plans refuse */
      test::must_mismatch(job, nullptr, c.text);
    }
}

TEST(Mismatch, OneTensorMoreOrLess) {
  GroupsJob job = experts_job();
  job.spoil_params = [](int32_t thread, std::size_t group, std::vector<mfsdp_param> *params) {
    if (thread == 2 && group == 1) params->pop_back();
  };
  test::must_mismatch(job, nullptr, "the first 3 agree");
}

TEST(Mismatch, BothInstancesAtOnce) {
  GroupsJob job = experts_job();
  job.spoil_params = [](int32_t thread, std::size_t group, std::vector<mfsdp_param> *params) {
    if (thread >= 2 && group == 1) params->at(0).shape[1] += 1;
  };
  test::must_mismatch(job, nullptr, "first at parameter 0 (here: ");
}

TEST(Mismatch, Options) {
  for (int32_t culprit = 0; culprit < 4; ++culprit) {
    GroupsJob job = experts_job();
    int32_t seen = 0;
    std::mutex mutex;
    job.tune = [&](mfsdp_runtime_desc *desc) {
      std::lock_guard<std::mutex> lock(mutex);
      if (seen++ == culprit) desc->clip_norm = 2.5;
    };
    test::must_mismatch(job, nullptr, "the option hash of rank");
  }
}

TEST(Mismatch, NumberOfGroups) {
  int32_t seen = 0;
  std::mutex mutex;
  test::must_mismatch(
      experts_job(),
      [&](mfsdp_runtime_desc *, std::vector<mfsdp_group> *groups,
          std::vector<mfsdp_hyper_group> *) {
        std::lock_guard<std::mutex> lock(mutex);
        if (seen++ == 2) groups->resize(1); /* some rank */
      },
      "the option hash of rank");
}

/* Errors that a rank sees alone: on all ranks here, so nobody waits. */
TEST(BadGroups, SeenByEachRank) {
  struct Case {
    std::string text;
    GroupsTrainer::Change change;
  };
  GroupsJob job = experts_job();
  const std::vector<Case> cases = {
      {"groups[1]: the plan is for world 4, the transport has 2",
       [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].plan = (*g)[0].plan;
       }},
      {"the transport rank",
       [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].control = (*g)[0].control;
       }},
      {"groups[1] has 4 ranks with its replicas, groups[0], which spans all, has 2",
       [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
         std::swap((*g)[0], (*g)[1]);
       }},
      {"groups[1].plan is NULL", [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g,
                                    std::vector<mfsdp_hyper_group> *) { (*g)[1].plan = nullptr; }},
      {"control: needs allgather",
       [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].replica = (*g)[1].transport;
       }},
      {"groups[1] has a replica_control but no replica",
       [](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].replica_control = (*g)[1].control;
       }},
  };
  for (const Case &c : cases) {
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      MFSDP_TRY(t.make_plans());
      must_fail(rank, t.make_runtime(c.change), MFSDP_E_ARGUMENT, c.text);
      require(t.runtime == nullptr, "a runtime all the same");
      MFSDP_TRY(t.make_runtime());
      MFSDP_TRY(t.init());
      MFSDP_TRY(t.step(0));
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << c.text << "\n" << result.text();
  }
}

TEST(BadGroups, AUnitInTwoGroups) {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, {ref::matrix("a", 2, 4, 9)});
  job.add_instance(false, {{1, 3}}, {ref::matrix("b", 2, 4, 9)});
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    must_fail(rank, t.make_runtime(), MFSDP_E_ARGUMENT, "unit 2 is in groups 0 and 1");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* What one rank gets wrong alone, all are told at once: the same status, the culprit's number and its
 * message. Then all may try again. */
TEST(BadGroups, OnOneRank) {
  using Groups = std::vector<mfsdp_group>;
  struct Case {
    std::string text;
    GroupsTrainer::Change change;
    mfsdp_status status;
  };
  const std::vector<Case> cases = {
      {"groups[0], which spans all, has 2",
       [](mfsdp_runtime_desc *, Groups *g, std::vector<mfsdp_hyper_group> *) {
         std::swap((*g)[0], (*g)[1]);
       },
       MFSDP_E_ARGUMENT},
      {"groups[1].plan is NULL",
       [](mfsdp_runtime_desc *, Groups *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].plan = nullptr;
       },
       MFSDP_E_ARGUMENT},
      {"groups[0].plan is NULL",
       [](mfsdp_runtime_desc *, Groups *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[0].plan = nullptr;
       },
       MFSDP_E_ARGUMENT},
      {"transport: NULL",
       [](mfsdp_runtime_desc *, Groups *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].transport = nullptr;
       },
       MFSDP_E_ARGUMENT},
      {"groups[1] has a replica_control but no replica",
       [](mfsdp_runtime_desc *, Groups *g, std::vector<mfsdp_hyper_group> *) {
         (*g)[1].replica_control = (*g)[1].control;
       },
       MFSDP_E_ARGUMENT},
      {"verdict_lag above 0 is not in this version",
       [](mfsdp_runtime_desc *desc, Groups *, std::vector<mfsdp_hyper_group> *) {
         desc->verdict_lag = 1;
       },
       MFSDP_E_UNSUPPORTED},
  };
  for (const Case &c : cases)
    for (const int32_t culprit : {3, 0}) {
      GroupsJob job = experts_job();
      const test::Expected expected = job.expected(1, 1);
      const int64_t start_us = mfsdp_clock_us();
      const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
        GroupsTrainer t(&rank, &links, &job, 1);
        MFSDP_TRY(t.make_plans());
        const std::size_t before = rank.memory->live_nbytes();
        const mfsdp_status status =
            t.make_runtime(rank.rank == culprit ? c.change : GroupsTrainer::Change());
        must_fail(rank, status, c.status, c.text);
        if (rank.rank != culprit) {
          must_fail(rank, status, c.status,
                    "rank " + std::to_string(culprit) + " cannot use its description: ");
          require(mfsdp_context_error(&rank.context)->culprit == culprit, "the culprit");
        }
        require(t.runtime == nullptr && rank.memory->live_nbytes() == before, "something is held");
        MFSDP_TRY(t.make_runtime());
        MFSDP_TRY(t.init());
        MFSDP_TRY(t.step(0));
        t.compare(expected, 0);
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << c.text << "\n" << result.text();
      EXPECT_LT(mfsdp_clock_us() - start_us, job.deadline_us / 2) << c.text;
    }
}

/* Several at once, each with an error of its own: each says its own, the others the first one's. */
TEST(BadGroups, OnTwoRanks) {
  const GroupsJob job = experts_job();
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    const mfsdp_status status =
        t.make_runtime([&](mfsdp_runtime_desc *desc, std::vector<mfsdp_group> *g,
                           std::vector<mfsdp_hyper_group> *) {
          if (rank.rank == 1) (*g)[1].plan = nullptr;
          if (rank.rank == 2) desc->verdict_lag = 1;
        });
    if (rank.rank == 2)
      must_fail(rank, status, MFSDP_E_UNSUPPORTED, "runtime: verdict_lag above 0");
    else
      must_fail(rank, status, MFSDP_E_ARGUMENT,
                rank.rank == 1 ? "runtime: groups[1].plan is NULL"
                               : "rank 1 cannot use its description: runtime: groups[1].plan");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Where the rank's own links are what is wrong, it cannot tell; it poisons what it has, and all know
 * why. */
TEST(BadGroups, LinksOfOneRank) {
  const std::vector<std::function<void(mfsdp_group *)>> changes = {
      [](mfsdp_group *g) { g->control = nullptr; },
      [](mfsdp_group *g) { g->control = g->replica_control; },
      [](mfsdp_group *g) { g->replica_control = g->control; },
  };
  for (std::size_t what = 0; what < changes.size(); ++what) {
    const GroupsJob job = experts_job();
    const int64_t start_us = mfsdp_clock_us();
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      MFSDP_TRY(t.make_plans());
      const mfsdp_status status = t.make_runtime(
          [&](mfsdp_runtime_desc *, std::vector<mfsdp_group> *g, std::vector<mfsdp_hyper_group> *) {
            if (rank.rank == 3) changes[what](&(*g)[0]);
          });
      const std::string message = mfsdp_context_error(&rank.context)->message;
      MFSDP_TRY(rank.barrier()); /* nobody's leaving ends the others' wait */
      if (rank.rank == 3)
        require(status == MFSDP_E_ARGUMENT, "the rank that is wrong");
      else
        require((status == MFSDP_E_POISONED || status == MFSDP_E_ARGUMENT) &&
                    message.find("rank 3 cannot use its description") != std::string::npos,
                mfsdp_status_name(status) + (": " + message));
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << what << ": " << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, job.deadline_us / 2) << what;
  }
}

TEST(BadGroups, ANameInTwoGroups) {
  GroupsJob job = base_job();
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, {ref::matrix("a", 1, 4, 9), ref::elementwise("norm", 1, {9})});
  job.add_instance(false, {{1, 3}}, {ref::matrix("b", 1, 4, 9)});
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    const mfsdp_status status = t.make_runtime();
    must_fail(
        rank, status, MFSDP_E_ARGUMENT,
        "the name 'norm' is that of parameter 3 of groups[0] and of parameter 1 of groups[1]");
    if (rank.rank % 2 == 1) must_fail(rank, status, MFSDP_E_ARGUMENT, "rank 0 cannot use ");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- failures while running: an error in one world must reach ranks that wait in another ---- */

struct Failure {
  mfsdp_status status = MFSDP_OK;
  std::string message;
  int64_t after_us = 0;
};

/* Steps until an error; then waits, still holding everything, until all ranks have one. */
void fail_in_step(const GroupsJob &job,
                  const std::function<void(Rank &, GroupsTrainer &, Links &)> &act,
                  int64_t within_us, const std::string &text) {
  std::vector<Failure> failures(static_cast<std::size_t>(job.ranks()));
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    Failure *failure = &failures[static_cast<std::size_t>(rank.rank)];
    GroupsTrainer t(&rank, &links, &job, 2);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    MFSDP_TRY(rank.barrier());
    const int64_t start_us = mfsdp_clock_us();
    act(rank, t, links);
    for (int64_t s = 1; s < 20 && failure->status == MFSDP_OK; ++s)
      failure->status = t.step(s);
    failure->message = mfsdp_context_error(&rank.context)->message;
    failure->after_us = mfsdp_clock_us() - start_us;
    must_fail(rank, t.begin(30), MFSDP_E_POISONED, "refused after the first error");
    MFSDP_TRY(rank.barrier());
    require(t.destroy() == MFSDP_OK, "destroy after a failure");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
  for (std::size_t r = 0; r < failures.size(); ++r) {
    EXPECT_NE(failures[r].status, MFSDP_OK) << r;
    EXPECT_LT(failures[r].after_us, within_us) << "rank " << r << ": " << failures[r].message;
    EXPECT_NE(failures[r].message.find(text), std::string::npos)
        << r << ": " << failures[r].message;
  }
}

TEST(Failure, OfOneWorldReachesAllRanks) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER})
    for (const std::size_t group : {0u, 1u})
      for (const int32_t culprit : {0, 3}) {
        GroupsJob job = experts_job();
        job.queue_kind = kind;
        if (kind == MFSDP_HOST_QUEUE_WORKER) job.prefetch_depth = job.reduce_depth = 2;
        fail_in_step(
            job,
            [&](Rank &rank, GroupsTrainer &, Links &links) {
              mfsdp_error why = mfsdp_error_none();
              (void)MFSDP_ERROR_SET(&why, MFSDP_E_IO, rank.rank, "a cable fell out");
              if (rank.rank == culprit) links.pairs[group]->group.poison(&why);
            },
            5 * 1000000, "a cable fell out");
      }
}

/* A rank that stops calling: the others leave by the deadline, those of the other instance too. */
TEST(Failure, ARankThatStopsIsNoticedByTheDeadline) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    GroupsJob job = uneven_job();
    job.queue_kind = kind;
    job.deadline_us = 400 * 1000;
    std::vector<mfsdp_status> status(4);
    std::vector<int64_t> after_us(4);
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      const std::size_t me = static_cast<std::size_t>(rank.rank);
      GroupsTrainer t(&rank, &links, &job, 1);
      MFSDP_TRY(t.create());
      MFSDP_TRY(t.step(0));
      MFSDP_TRY(t.begin(1));
      const int64_t start_us = mfsdp_clock_us();
      if (rank.rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1200));
      status[me] = t.micro_batch(1, 0);
      if (status[me] == MFSDP_OK) status[me] = t.end();
      after_us[me] = mfsdp_clock_us() - start_us;
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_NE(status[r], MFSDP_OK) << r;
      EXPECT_LT(after_us[r], 3 * 1000000) << r;
    }
  }
}

/* ---- every submit of one world, every operation of one rank's backend ---- */

/* Dense and expert units, or both with copies; the second one sends in four worlds. In the third one
 * matrices lie in bands and are exchanged. */
std::vector<GroupsJob> failing_jobs() {
  std::vector<GroupsJob> out(3, base_job());
  out[0].add_group({{0, 1}}, dense_tensors());
  out[0].add_instance(true, {{0}}, expert_tensors("a"));
  out[0].add_instance(false, {{1}}, other_tensors("b"));
  out[1].add_group({{0, 1}, {2, 3}}, dense_tensors());
  out[1].add_instance(true, {{0}, {2}}, {ref::matrix("a", 1, 7, 9)});
  out[1].add_instance(false, {{1}, {3}}, {ref::matrix("b", 1, 5, 9)});
  out[2].add_group({{0, 1}},
                   {ref::elementwise("embed", 0, {30, 7}), ref::experts("w", 1, 5, 6, 8)});
  out[2].options.bands = true;
  out[2].spoil_params = [](int32_t, std::size_t, std::vector<mfsdp_param> *params) {
    (*params)[1].placement = MFSDP_PLACEMENT_BANDED;
  };
  for (GroupsJob &job : out) {
    test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
    job.chunk_nbytes = 1024;
  }
  return out;
}

enum class What { kGroupSubmit, kReplicaSubmit, kCall, kQueuedWork };

/* Two steps with the nth failure on `culprit`: everybody ends early, knowing why, or has ended, and
 * nothing is left. False: there were fewer than n. */
bool fail_nth(const GroupsJob &job, What what, int32_t culprit, int64_t n) {
  bool failed = false;
  std::vector<mfsdp_status> status(static_cast<std::size_t>(job.ranks()), MFSDP_OK);
  std::vector<std::string> message(status.size());
  const int64_t start_us = mfsdp_clock_us();
  const bool backend_fails = what == What::kCall || what == What::kQueuedWork;
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    const bool mine = rank.rank == culprit;
    test::FailingBackend backend(&rank, mine && backend_fails ? n : -1, what == What::kQueuedWork);
    std::vector<std::unique_ptr<test::FailingTransport>> wrapped;
    const auto wrap = [&](const mfsdp_transport **transport, bool fails) {
      if (*transport == nullptr) return;
      wrapped.emplace_back(new test::FailingTransport(
          **transport, mine && fails && !backend_fails ? n : INT64_MAX - 1));
      wrapped.back()->table.backend = &backend.table;
      *transport = &wrapped.back()->table;
    };
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    status[me] = t.make_runtime([&](mfsdp_runtime_desc *desc, std::vector<mfsdp_group> *groups,
                                    std::vector<mfsdp_hyper_group> *) {
      desc->backend = &backend.table;
      for (mfsdp_group &group : *groups) { /* the first of its kind fails */
        wrap(&group.transport, what == What::kGroupSubmit && wrapped.empty());
        wrap(&group.replica, what == What::kReplicaSubmit && wrapped.size() == 1);
      }
    });
    if (status[me] == MFSDP_OK) status[me] = t.init();
    for (int64_t s = 0; s < 2 && status[me] == MFSDP_OK; ++s)
      status[me] = t.step(s);
    message[me] = mfsdp_context_error(&rank.context)->message;
    if (status[me] != MFSDP_OK && t.runtime != nullptr)
      must_fail(rank, t.begin(9), MFSDP_E_POISONED, "refused after the first error");
    /* Nobody's leaving ends the others' wait; but bands travel behind the last verdict, and what fails
     * there is for the next wait to say, which is that of destroy. */
    const bool waits = job.options.bands && status[me] == MFSDP_OK;
    mfsdp_status last = waits ? t.destroy() : MFSDP_OK;
    MFSDP_TRY(rank.barrier());
    if (!waits) last = t.destroy();
    if (mine) /* asked last: the queues may come to it after the steps, while it ends other ranks' */
      failed = backend_fails ? test::FailingBackend::failed()
                             : wrapped[what == What::kReplicaSubmit ? 1 : 0]->failed();
    require(last == MFSDP_OK || (status[me] == MFSDP_OK && (mine || waits)),
            "destroy after a failure");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << "number " << n << ": " << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, job.deadline_us / 2) << "number " << n;
  for (std::size_t r = 0; r < status.size(); ++r) { /* the last step may be through elsewhere */
    const bool told = message[r].find("injected: ") != std::string::npos;
    EXPECT_TRUE(status[r] == MFSDP_OK || (failed && told))
        << "number " << n << " rank " << r << ": " << message[r];
  }
  return failed;
}

TEST(Failure, OfEverySubmitAndOperation) {
  for (const GroupsJob &base : failing_jobs())
    for (const What what :
         {What::kGroupSubmit, What::kReplicaSubmit, What::kCall, What::kQueuedWork})
      for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
        const bool operations = what == What::kCall || what == What::kQueuedWork;
        GroupsJob job = base;
        if (what == What::kReplicaSubmit && !job.groups[0][0].replicated) continue;
        job.queue_kind = kind;
        if (kind == MFSDP_HOST_QUEUE_WORKER) job.prefetch_depth = job.reduce_depth = 1;
        const int64_t stride = (MFSDP_TEST_TSAN        ? 17
                                : MFSDP_TEST_SANITIZER ? 7
                                                       : 1) *
                               (operations ? 5 : 1);
        int64_t n = 0;
        while (fail_nth(job, what, static_cast<int32_t>(n) % job.ranks(), n) && !HasFailure())
          n += stride;
        EXPECT_GT(n, operations ? 100 : 5);
        EXPECT_LT(n, 5000);
      }
}

/* ---- set-up under failing allocations ---- */

enum class Who { kOneRank, kOneRankForGood };

/* Fails allocation n of create on `culprit`. False when n was beyond the last one. */
bool fail_allocation(const GroupsJob &job, Who who, int32_t culprit, int64_t n) {
  bool failed = false;
  std::vector<mfsdp_status> status(static_cast<std::size_t>(job.ranks()), MFSDP_OK);
  std::vector<std::string> message(status.size());
  const int64_t start_us = mfsdp_clock_us();
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    if (rank.rank == culprit && who == Who::kOneRank) rank.memory->fail_at(n);
    if (rank.rank == culprit && who == Who::kOneRankForGood) rank.memory->fail_from(n);
    status[me] = t.make_runtime();
    if (rank.rank == culprit) failed = rank.memory->failed();
    rank.memory->fail_at(-1);
    if (status[me] != MFSDP_OK) require(t.runtime == nullptr, "half a runtime");
    if (status[me] == MFSDP_OK) status[me] = t.init();
    for (int64_t s = 0; s < 2 && status[me] == MFSDP_OK; ++s)
      status[me] = t.step(s);
    message[me] = mfsdp_context_error(&rank.context)->message;
    MFSDP_TRY(rank.barrier()); /* nobody is woken by another one's leaving */
    return t.runtime != nullptr ? t.destroy() : MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << "allocation " << n << ": " << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, job.deadline_us / 2) << "allocation " << n;
  for (std::size_t r = 0; r < status.size(); ++r) {
    EXPECT_EQ(status[r] != MFSDP_OK, failed) << "allocation " << n << " rank " << r;
    if (!failed) continue;
    EXPECT_NE(message[r].find("the allocator refused"), std::string::npos)
        << "allocation " << n << " rank " << r << ": " << message[r];
  }
  return failed;
}

TEST(SetUp, EveryAllocationOfOneRankFails) {
#if MFSDP_TEST_SANITIZER
  const int64_t stride = 7;
#else
  const int64_t stride = 1;
#endif
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER})
    for (const bool replicas : {false, true}) {
      GroupsJob job = uneven_job();
      if (replicas) {
        job = base_job();
        job.add_group({{0, 1}, {2, 3}}, dense_tensors());
        job.add_instance(true, {{0}, {2}}, expert_tensors("a"));
        job.add_instance(false, {{1}, {3}}, other_tensors("b"));
      }
      job.queue_kind = kind;
      if (kind == MFSDP_HOST_QUEUE_WORKER) { /* tables and buffers of their own */
        job.prefetch_depth = job.reduce_depth = 1;
        test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
      }
      int64_t n = 0;
      while (fail_allocation(job, n % 2 ? Who::kOneRank : Who::kOneRankForGood,
                             static_cast<int32_t>(n % 4), n) &&
             !HasFailure())
        n += stride;
      EXPECT_GT(n, 60);
      EXPECT_LT(n, 1000);
    }
}

} // namespace
