/* SPDX-License-Identifier: MIT */
/*
 * Replicas (HSDP): sharded inside a group, the same pieces on the ranks of its copies. Bit for bit
 * the chain of each copy, copy after copy; the copies stay equal.
 */
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

std::vector<ref::Tensor> model_tensors() {
  std::vector<ref::Tensor> out;
  out.push_back(ref::elementwise("embed", 0, {120, 75}));
  out.push_back(ref::split_heads("qkv", 1, 12, 20, 3));
  out.push_back(ref::matrix("out", 1, 20, 12));
  out.push_back(ref::elementwise("norm", 1, {40}, 2));
  /* Unit 2 has nothing. */
  out.push_back(ref::frozen("mask", 3, {9, 50}));
  out.push_back(ref::conv("conv", 3, 6, 2, 2));
  out.push_back(ref::matrix("no_rows", 3, 0, 8));
  out.push_back(ref::tied("head", 3, out[0]));
  return out;
}

/* `count` copies of `world` ranks; ranks of a copy are neighbours, or, spread, copies are. */
Copies copies_of(int32_t count, int32_t world, bool spread = false) {
  Copies out(static_cast<std::size_t>(count));
  for (int32_t p = 0; p < count; ++p)
    for (int32_t r = 0; r < world; ++r)
      out[static_cast<std::size_t>(p)].push_back(spread ? r * count + p : p * world + r);
  return out;
}

GroupsJob replica_job(const Copies &copies, const std::vector<ref::Tensor> &tensors) {
  GroupsJob job;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  job.add_group(copies, tensors);
  job.groups[0][0].replicated = true; /* also with one copy: a replica transport of world 1 */
  return job;
}

/* ---- equality ---- */

struct Shape {
  int32_t copies, world;
};
const Shape shapes[] = {{2, 4}, {2, 2}, {3, 1}, {1, 4}, {3, 2}, {4, 2}, {1, 1}, {2, 3}};

TEST(Replica, EqualsTheOracle) {
  for (const Shape &shape : shapes)
    for (const int32_t micro_batches : {1, 2, 3}) {
      const GroupsJob job = replica_job(copies_of(shape.copies, shape.world), model_tensors());
      EXPECT_EQ(test::run_groups_job(job, micro_batches, 3), "")
          << shape.copies << " copies of " << shape.world;
    }
}

/* Copies are summed one after the other: not what one chain of all blocks gives. */
TEST(Replica, TheOrderOfCopiesShows) {
  const GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  const test::Expected expected = job.expected(2, 1), chain(job, 8, 1);
  EXPECT_NE(expected.after(0).weights, chain.after(0).weights);
  /* Two copies commute in bits, three do not. */
  const GroupsJob three = replica_job(copies_of(3, 2), model_tensors());
  GroupsJob other = three;
  EXPECT_EQ(three.chains(0, 12),
            (std::vector<std::vector<int64_t>>{{0, 1, 6, 7}, {2, 3, 8, 9}, {4, 5, 10, 11}}));
  other.options.chains = [&](int32_t tensor, int64_t blocks) {
    std::vector<std::vector<int64_t>> chains = three.chains(tensor, blocks);
    std::swap(chains[0], chains[2]);
    return chains;
  };
  EXPECT_NE(three.expected(2, 1).after(0).weights, test::Expected(other, 12, 1).after(0).weights);
}

/* Threads of a copy are not neighbours: numbers come from replica and group, not from threads. */
TEST(Replica, RanksInAnyOrder) {
  for (const Shape &shape : {Shape{2, 4}, Shape{3, 2}}) {
    GroupsJob job = replica_job(copies_of(shape.copies, shape.world, true), model_tensors());
    EXPECT_EQ(test::run_groups_job(job, 2, 2), "");
  }
  EXPECT_EQ(test::run_groups_job(replica_job({{4, 1}, {0, 5}, {3, 2}}, model_tensors()), 2, 2), "");
}

TEST(Replica, WithPrefetchAndWorkers) {
  for (const bool on_queue : {false, true})
    for (const int32_t depth : {0, 2}) {
      GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
      job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      job.on_queue = on_queue;
      job.prefetch_depth = job.reduce_depth = depth;
      job.debug_poison = job.debug_check = 1;
      EXPECT_EQ(test::run_groups_job(job, 2, 3), "") << "depth " << depth << " queue " << on_queue;
      job.tune = [](mfsdp_runtime_desc *desc) { desc->reshard_after_forward = 0; };
      EXPECT_EQ(test::run_groups_job(job, 2, 2), "") << "kept, depth " << depth;
    }
}

/* Each rank adds up its micro-batches; the sums meet rank by rank in each copy, then copy by copy. */
TEST(Replica, LocalAccumulationEqualsItsOracle) {
  for (const Shape &shape : {Shape{2, 2}, Shape{3, 1}, Shape{3, 2}})
    for (const bool workers : {false, true}) {
      GroupsJob job = replica_job(copies_of(shape.copies, shape.world, workers), model_tensors());
      job.options.local_world = job.ranks();
      if (workers) job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      if (workers) job.prefetch_depth = job.reduce_depth = 1;
      job.on_queue = workers;
      for (const int32_t micro_batches : {1, 3})
        EXPECT_EQ(test::run_groups_job(job, micro_batches, 3), "") << shape.copies << " copies";
      /* A unit without use: the sums of the step before must not come again. */
      job.script.unit_used = [](int64_t step, int32_t unit) { return !(step == 1 && unit == 1); };
      EXPECT_EQ(test::run_groups_job(job, 2, 3), "") << shape.copies << " copies";
    }
  GroupsJob plain = replica_job(copies_of(2, 2), model_tensors()), local = plain;
  local.options.local_world = local.ranks();
  EXPECT_NE(plain.expected(3, 1).after(0).weights, local.expected(3, 1).after(0).weights);
}

/* Accumulators that the copies cannot share evenly: less than one alignment unit (128 elements),
 * one, two for three copies; empty on ranks that own nothing; none at all. */
TEST(Replica, SmallAndEmptyAccumulators) {
  const std::vector<std::vector<ref::Tensor>> models = {
      {ref::elementwise("one", 0, {1})},
      {ref::elementwise("unit", 0, {128})},
      {ref::elementwise("more", 0, {129})},
      {ref::matrix("a", 0, 3, 5), ref::matrix("b", 0, 20, 20)},
      {ref::matrix("a", 0, 16, 24)},
      {ref::matrix("a", 0, 16, 24), ref::elementwise("b", 1, {7})},
      {ref::frozen("only", 0, {300})},
      {ref::matrix("none", 0, 0, 5)},
      {}};
  for (const Shape &shape : {Shape{2, 2}, Shape{3, 1}, Shape{4, 2}, Shape{5, 1}})
    for (std::size_t m = 0; m < models.size(); ++m) {
      const GroupsJob job = replica_job(copies_of(shape.copies, shape.world), models[m]);
      EXPECT_EQ(test::run_groups_job(job, 2, 2), "")
          << "model " << m << ", " << shape.copies << " copies of " << shape.world;
    }
}

/* A unit that a step does not use: the sums of the step before must not come again, nor be
 * multiplied. */
TEST(Replica, UnusedUnitsAndMissingGradients) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.script.unit_used = [](int64_t step, int32_t unit) { return !(step == 1 && unit == 1); };
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    const bool other_copy = step == 2 && use == 2 && block % 4 < 2; /* only copy 1 has one */
    const bool nobody = step == 2 && use == 5;
    return other_copy || nobody ? ref::Sample::kAbsent : ref::Sample::kPresent;
  };
  EXPECT_EQ(test::run_groups_job(job, 1, 4), "");
  EXPECT_EQ(test::run_groups_job(job, 2, 4), "");
}

TEST(Replica, ANonFiniteGradientOfOneCopySkipsAll) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return step == 1 && block == 3 && use == 2 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  EXPECT_TRUE(job.expected(1, 2).after(1).verdict.skipped);
  EXPECT_EQ(test::run_groups_job(job, 1, 3), "");
}

/* Masters and state of ranks with the same pieces, after many steps. */
TEST(Replica, CopiesStayEqual) {
  const GroupsJob job = replica_job(copies_of(3, 2), model_tensors());
  uint64_t hash[6];
  mfsdp_verdict verdict[6];
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 2);
    std::vector<float> norm(40);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < 8; ++s)
      MFSDP_TRY(t.step(s, s == 7 && rank.rank == 5));
    MFSDP_TRY(
        mfsdp_param_export(t.runtime, t.param("norm"), -1, norm.data())); /* the update is done */
    hash[t.number()] = t.own_hash();
    verdict[t.number()] = t.verdict;
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  EXPECT_NE(hash[0], hash[1]);
  for (int32_t k = 2; k < 6; ++k)
    EXPECT_EQ(hash[k], hash[k % 2]) << k;
  for (int32_t k = 1; k < 6; ++k)
    EXPECT_EQ(std::memcmp(&verdict[0], &verdict[k], sizeof(mfsdp_verdict)), 0) << k;
  EXPECT_EQ(verdict[0].stop, 1);
}

/* ---- groups and replicas together ---- */

std::vector<ref::Tensor> experts(const std::string &prefix) {
  return {ref::experts(prefix + ".up", 4, 3, 8, 24), ref::elementwise(prefix + ".bias", 4, {65}),
          ref::matrix(prefix + ".gate", 5, 16, 9)};
}

std::vector<ref::Tensor> other_experts(const std::string &prefix) {
  return {ref::matrix(prefix + ".one", 4, 7, 9), ref::experts(prefix + ".many", 5, 37, 3, 2)};
}

/* Both at once, dense units and experts replicated along different ranks. */
TEST(GroupsAndReplicas, LocalAccumulationEqualsItsOracle) {
  for (const bool inside : {false, true}) {
    GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
    job.add_instance(true, inside ? Copies{{0, 1}} : Copies{{0}, {2}}, experts("a"));
    job.add_instance(false, inside ? Copies{{2, 3}} : Copies{{1}, {3}}, other_experts("b"));
    job.options.local_world = job.ranks();
    EXPECT_EQ(test::run_groups_job(job, 3, 3), "") << inside;
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    job.prefetch_depth = job.reduce_depth = 1;
    EXPECT_EQ(test::run_groups_job(job, 2, 2), "") << inside;
  }
}

/* Dense: two copies of two. Experts: inside a copy each rank has its own, the same in both copies.
 */
TEST(GroupsAndReplicas, ExpertsOfOneRankWithReplicas) {
  for (const bool spread : {false, true}) {
    GroupsJob job = replica_job(copies_of(2, 2, spread), model_tensors());
    const Copies dense = job.groups[0][0].copies;
    job.add_instance(true, {{dense[0][0]}, {dense[1][0]}}, experts("a"));
    job.add_instance(false, {{dense[0][1]}, {dense[1][1]}}, other_experts("b"));
    EXPECT_EQ(test::run_groups_job(job, 1, 3), "") << spread;
    EXPECT_EQ(test::run_groups_job(job, 2, 3), "") << spread;
  }
}

/* Experts are shared across copies, without replicas of their own. */
TEST(GroupsAndReplicas, ExpertsAcrossCopies) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.add_instance(true, {{0, 2}}, experts("a"));
  job.add_instance(false, {{1, 3}}, other_experts("b"));
  EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
}

/* An instance in each copy, both of the same experts; then of different ones. */
TEST(GroupsAndReplicas, ExpertsInsideCopies) {
  GroupsJob same = replica_job(copies_of(2, 4), model_tensors());
  same.add_instance(true, {{0, 2}, {4, 6}}, experts("a"));
  same.add_instance(false, {{1, 3}, {5, 7}}, other_experts("b"));
  EXPECT_EQ(test::run_groups_job(same, 2, 3), "");
  same.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  same.prefetch_depth = same.reduce_depth = 2;
  same.debug_check = 1;
  EXPECT_EQ(test::run_groups_job(same, 1, 3), "");
  GroupsJob different = replica_job(copies_of(2, 2), model_tensors());
  different.add_instance(true, {{0, 1}}, experts("a"));
  different.add_instance(false, {{2, 3}}, other_experts("b"));
  EXPECT_EQ(test::run_groups_job(different, 2, 3), "");
}

/* Dense without replicas, experts with: the copies of an expert are any ranks. */
TEST(GroupsAndReplicas, OnlyExpertsHaveReplicas) {
  GroupsJob job;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  job.add_group({{0, 1, 2, 3, 4, 5}}, model_tensors());
  job.add_instance(true, {{5, 0}, {1, 4}}, experts("a")); /* instances of different copy counts */
  job.add_instance(false, {{3}, {2}}, other_experts("b"));
  EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
}

TEST(GroupsAndReplicas, PresenceIsSharedByCopiesAndNotByInstances) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.add_instance(true, {{0}, {2}}, experts("a"));
  job.add_instance(false, {{1}, {3}}, experts("b"));
  const int32_t first = static_cast<int32_t>(model_tensors().size());
  job.script.sample = [first](int64_t step, int64_t block, int32_t use) {
    const bool a_missing = use == first && step == 1;              /* everywhere */
    const bool b_in_one_copy = use == first + 4 && block % 4 == 1; /* copy 1 has it */
    return a_missing || b_in_one_copy ? ref::Sample::kAbsent : ref::Sample::kPresent;
  };
  EXPECT_EQ(test::run_groups_job(job, 1, 3), "");
}

/* ---- memory and bytes ---- */

TEST(Memory, IsPredicted) {
  std::vector<GroupsJob> jobs;
  for (const Shape &shape : shapes)
    jobs.push_back(replica_job(copies_of(shape.copies, shape.world), model_tensors()));
  jobs.push_back(replica_job(copies_of(5, 1), {ref::elementwise("one", 0, {1})}));
  GroupsJob both = replica_job(copies_of(2, 4), model_tensors());
  both.add_instance(true, {{0, 2}, {4, 6}}, experts("a"));
  both.add_instance(false, {{1, 3}, {5, 7}}, other_experts("b"));
  jobs.push_back(both);
  for (GroupsJob &job : jobs) {
    job.chunk_nbytes = 1024;
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
      MFSDP_TRY(t.init());
      MFSDP_TRY(t.step(0));
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

/* One all-reduce of the accumulators over the copies: each sends all but its own part of the sums,
 * then its part to the others. */
TEST(Traffic, OfReplicas) {
  const GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  std::vector<uint64_t> sent(4), inside(4), accumulators(4);
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    const std::size_t me = static_cast<std::size_t>(t.number());
    int32_t count = 0;
    MFSDP_TRY(t.create());
    const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plans[0], -1, &count);
    for (int32_t i = 0; i < count; ++i) {
      if (pieces[i].grad_shard_offset < 0) continue;
      if (pieces[i].owner != t.places[0].rank)
        inside[me] += static_cast<uint64_t>(pieces[i].count) * 4;
      else
        accumulators[me] += static_cast<uint64_t>((pieces[i].count + 127) / 128 * 128) * 4;
    }
    MFSDP_TRY(t.step(0));
    sent[me] = rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].payload_nbytes;
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (std::size_t k = 0; k < 2; ++k) {
    EXPECT_EQ(accumulators[k], accumulators[k + 2]);
    /* Of two copies each sends the other's part and then its own: everything once. */
    EXPECT_EQ(sent[k], inside[k] + accumulators[k]);
    EXPECT_EQ(sent[k + 2], inside[k + 2] + accumulators[k]);
  }
}

/* ---- what does not fit together ---- */

TEST(Mismatch, PlansOfCopies) {
  for (const int32_t culprit :
       {0, 3, -1}) { /* -1: all of copy 1, so that each copy agrees inside */
    GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
    job.spoil_params = [culprit](int32_t thread, std::size_t, std::vector<mfsdp_param> *params) {
      if (thread == culprit || (culprit < 0 && thread >= 2)) params->at(2).shape[0] += 1;
    };
    test::must_mismatch(job, nullptr, "first at parameter 2 (here: out)");
  }
}

TEST(Mismatch, OptionsOfCopies) {
  for (const bool whole_copy : {false, true}) {
    const GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
    test::must_mismatch(
        job,
        [whole_copy](mfsdp_runtime_desc *desc, std::vector<mfsdp_group> *groups,
                     std::vector<mfsdp_hyper_group> *) {
          const mfsdp_group &group = (*groups)[0];
          if (group.replica->rank == 1 && (whole_copy || group.transport->rank == 0))
            desc->missing = MFSDP_MISSING_ZEROS;
        },
        "the option hash of rank 1");
  }
}

/* Experts of one copy only, in a group of their own replicas. */
TEST(Mismatch, PlansOfExpertCopies) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.add_instance(true, {{0}, {2}}, experts("a"));
  job.add_instance(false, {{1}, {3}}, other_experts("b"));
  job.spoil_params = [](int32_t thread, std::size_t group, std::vector<mfsdp_param> *params) {
    if (thread == 3 && group == 1) params->at(0).role = MFSDP_ROLE_FROZEN;
  };
  test::must_mismatch(job, nullptr, "first at parameter 0 (here: b.one)");
}

/* A group that only copy 1 has: copy 0 hears of it from there. */
TEST(Mismatch, PlansOfAGroupInsideOneCopy) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.add_instance(true, {{0, 1}}, experts("a"));
  job.add_instance(false, {{2, 3}}, other_experts("b"));
  job.spoil_params = [](int32_t thread, std::size_t group, std::vector<mfsdp_param> *params) {
    if (thread == 3 && group == 1) params->at(1).unit = 4;
  };
  test::must_mismatch(job, nullptr, "first at parameter 1 (here: b.many)");
}

/* Replicas that are connected crosswise: rank 0 of copy 0 with rank 1 of copy 1. */
TEST(Mismatch, ReplicasOfOtherRanks) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.spoil_replica = [](int32_t thread, std::size_t, test::Place *place) {
    if (thread >= 2) place->rank = 1 - place->rank;
  };
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    must_fail(rank, t.make_runtime(), MFSDP_E_MISMATCH,
              "ranks 0 and 1 of the replicas: one is rank ");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A description that one rank of one copy cannot use: the other copy is told, too, and all may try
 * again. */
TEST(Mismatch, ADescriptionOfOneRankAlone) {
  for (const int32_t culprit : {0, 3}) {
    const GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
    const test::Expected expected = job.expected(1, 1);
    const int64_t start_us = mfsdp_clock_us();
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      MFSDP_TRY(t.make_plans());
      const mfsdp_status status = t.make_runtime(
          [&](mfsdp_runtime_desc *desc, std::vector<mfsdp_group> *,
              std::vector<mfsdp_hyper_group> *) { desc->active_units -= rank.rank == culprit; });
      must_fail(rank, status, MFSDP_E_ARGUMENT, "active_units is 0");
      if (rank.rank != culprit)
        must_fail(rank, status, MFSDP_E_ARGUMENT,
                  "rank " + std::to_string(culprit) + " cannot use its description: ");
      MFSDP_TRY(t.make_runtime());
      MFSDP_TRY(t.init());
      MFSDP_TRY(t.step(0));
      t.compare(expected, 0);
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, job.deadline_us / 2);
  }
}

/* Ranks of a copy that are not the same copy: replica 0 and 1 in one group. */
TEST(Mismatch, CopiesMixedInAGroup) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.spoil_replica = [](int32_t thread, std::size_t, test::Place *place) {
    if (thread % 2 == 1) place->copy = 1 - place->copy;
  };
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    must_fail(rank, t.make_runtime(), MFSDP_E_MISMATCH, "ranks 0 and 1 of a copy: one is replica ");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* One rank knows no replicas: all are told at once but its own replica, which no other rank can
 * reach; it waits, but not longer than the deadline. */
TEST(Mismatch, OneRankWithoutReplicas) {
  GroupsJob job = replica_job(copies_of(2, 2), model_tensors());
  job.deadline_us = 300 * 1000;
  const int64_t start_us = mfsdp_clock_us();
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    const mfsdp_status status =
        t.make_runtime([&](mfsdp_runtime_desc *, std::vector<mfsdp_group> *groups,
                           std::vector<mfsdp_hyper_group> *) {
          if (rank.rank != 1) return;
          (*groups)[0].replica = nullptr;
          (*groups)[0].replica_control = nullptr;
        });
    const std::string message = mfsdp_context_error(&rank.context)->message;
    MFSDP_TRY(rank.barrier());
    require(status != MFSDP_OK && !message.empty(), "every rank is told");
    if (rank.rank != 3)
      require(
          status == MFSDP_E_MISMATCH &&
              message.find("ranks 0 and 1 of a copy: one is replica 0 of 2, the other 0 of 1") !=
                  std::string::npos,
          message);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, 5 * 1000000);
}

/* An error between replicas must reach ranks that wait inside their copies. */
TEST(Failure, BetweenReplicasReachesAllRanks) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    GroupsJob job = replica_job(copies_of(3, 2), model_tensors());
    job.queue_kind = kind;
    std::vector<int64_t> after_us(6);
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsTrainer t(&rank, &links, &job, 1);
      mfsdp_status status = MFSDP_OK;
      MFSDP_TRY(t.create());
      MFSDP_TRY(t.step(0));
      MFSDP_TRY(rank.barrier());
      const int64_t start_us = mfsdp_clock_us();
      mfsdp_error why = mfsdp_error_none();
      (void)MFSDP_ERROR_SET(&why, MFSDP_E_IO, rank.rank, "a cable fell out");
      if (rank.rank == 4) links.pairs[0]->replica.poison(&why); /* its peers are 0 and 2 */
      for (int64_t s = 1; s < 10 && status == MFSDP_OK; ++s)
        status = t.step(s);
      after_us[static_cast<std::size_t>(rank.rank)] = mfsdp_clock_us() - start_us;
      const std::string message = mfsdp_context_error(&rank.context)->message;
      require(message.find("a cable fell out") != std::string::npos, message);
      MFSDP_TRY(rank.barrier());
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    for (std::size_t r = 0; r < 6; ++r)
      EXPECT_LT(after_us[r], 5 * 1000000) << r;
  }
}

/* Words of many ranks travel in several messages: as many ranks a time as fit. */
TEST(Verdict, WordsOfAllRanks) {
  const GroupsJob job = replica_job(copies_of(2, 3), model_tensors());
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.create());
    for (const std::size_t nbytes :
         {8u, 1366u, 1500u, 2048u, 2049u, 4096u, 5000u}) { /* 3, 2 or 1 */
      std::vector<unsigned char> own(nbytes, static_cast<unsigned char>(t.number() + 1));
      std::vector<unsigned char> all(6 * nbytes + 1, 0);
      MFSDP_TRY(mfsdp__all_ranks_gather(t.runtime, own.data(), nbytes, all.data()));
      for (std::size_t k = 0; k < 6; ++k)
        for (std::size_t i = 0; i < nbytes; ++i)
          require(all[k * nbytes + i] == k + 1, "a word of another rank");
      require(all.back() == 0, "a write past the end");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Where counts of blocks pass 32 bits, orders and places must not wrap. */
TEST(Verdict, BlockOrderIn64Bits) {
  mfsdp__verdict_build build;
  mfsdp_runtime rt;
  const int64_t many = INT64_C(3) << 31;
  /* Two groups on four ranks; group 1: instances {0, 2} and {1, 3}, no replicas. */
  mfsdp__rank_group members[8] = {{0, 1, many, 0}, {0, 1, many, 0}, {0, 1, 5, 0}, {0, 1, 7, 0},
                                  {0, 1, many, 0}, {1, 1, 11, 0},   {0, 1, 2, 0}, {1, 1, many, 0}};
  int64_t words[5] = {0, 2 * many, 4 * many, 6 * many, 8 * many};
  std::memset(&build, 0, sizeof(build));
  std::memset(&rt, 0, sizeof(rt));
  build.ranks = 4;
  build.members = members;
  build.rank_word = words;
  rt.verdict.header_words = 3;
  EXPECT_EQ(mfsdp__verdict_blocks_before(&build, 1, 0), 0);
  EXPECT_EQ(mfsdp__verdict_blocks_before(&build, 1, 1), many + 2);
  EXPECT_EQ(mfsdp__verdict_blocks_before(&build, 1, INT64_MAX), 2 * many + 13);
  EXPECT_EQ(mfsdp__verdict_first_word(&rt, &build, 0, 1), 2 * many + 3);
  EXPECT_EQ(mfsdp__verdict_first_word(&rt, &build, 1, 1), 3 * many + 3);
  EXPECT_EQ(mfsdp__verdict_first_word(&rt, &build, 1, 3), 6 * many + 10);
}

} // namespace
