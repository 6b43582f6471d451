/* SPDX-License-Identifier: MIT */
/*
 * Strategies by group: dense units and experts that are SHARDED, RESIDENT or REPLICATED in any
 * combination, copies of RESIDENT groups (HSDP), on the oracle's bits; memory as predicted.
 */
#include "groups_rig.h"

namespace {

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
  out.push_back(ref::elementwise("norm", 2, {40}, 2));
  out.push_back(ref::frozen("mask", 4, {9, 50}));
  out.push_back(ref::matrix("wide", 4, 10, 30));
  out.push_back(ref::tied("head", 4, out[0]));
  return out;
}

std::vector<ref::Tensor> expert_tensors(const std::string &prefix) { /* units 1 and 3 */
  std::vector<ref::Tensor> out;
  out.push_back(ref::experts(prefix + ".up", 1, 3, 8, 24));
  out.push_back(ref::elementwise(prefix + ".bias", 1, {65}));
  out.push_back(ref::matrix(prefix + ".gate", 3, 16, 9));
  return out;
}

/* 0: SHARDED, 1: RESIDENT, 2: REPLICATED. */
GroupsJob strategies_job(int dense, int experts) {
  GroupsJob job;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  job.add_group({{0, 1, 2, 3}}, dense_tensors());
  job.add_instance(true, {{0, 2}}, expert_tensors("a"));
  job.add_instance(false, {{1, 3}}, expert_tensors("b"));
  for (const int strategy : {dense, experts}) {
    job.residencies.push_back(strategy == 0 ? MFSDP_RESIDENCY_SHARDED : MFSDP_RESIDENCY_RESIDENT);
    job.placements.push_back(strategy == 2 ? MFSDP_PLACEMENT_REPLICATED : MFSDP_PLACEMENT_OWNED);
  }
  return job;
}

std::string predicted(const GroupsJob &job) {
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    mfsdp_memory memory = mfsdp_memory_default();
    MFSDP_TRY(t.make_plans());
    const mfsdp_status status = t.with_desc(nullptr, [&](const mfsdp_runtime_desc *desc) {
      MFSDP_TRY(mfsdp_runtime_memory(&rank.context, desc, &memory));
      return mfsdp_runtime_create(&rank.context, desc, &t.runtime);
    });
    MFSDP_TRY(status);
    const std::size_t *now = rank.context.current_nbytes;
    require(now[MFSDP_MEMORY_SHARD] == memory.shard_nbytes, "shards");
    require(now[MFSDP_MEMORY_STATE] == memory.state_nbytes, "state");
    require(now[MFSDP_MEMORY_GRAD] == memory.grad_nbytes, "accumulators and sums");
    require(now[MFSDP_MEMORY_SLOT] == memory.slot_nbytes, "slots");
    require(now[MFSDP_MEMORY_STAGING] == memory.staging_nbytes, "staging");
    require(now[MFSDP_MEMORY_WORKSPACE] == memory.workspace_nbytes, "workspace");
    return t.destroy();
  });
  return result.ok() ? "" : result.text();
}

TEST(Groups, EachWithAStrategyOfItsOwn) {
  for (int dense = 0; dense < 3; ++dense)
    for (int experts = 0; experts < 3; ++experts) {
      const GroupsJob job = strategies_job(dense, experts);
      SCOPED_TRACE(std::to_string(dense) + " and " + std::to_string(experts));
      EXPECT_EQ(predicted(job), "");
      EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
      GroupsJob workers = job;
      workers.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      workers.on_queue = true;
      workers.prefetch_depth = workers.reduce_depth = 2;
      workers.debug_poison = workers.debug_check = 1;
      EXPECT_EQ(test::run_groups_job(workers, 2, 3), "");
    }
}

/* What each rank holds in units and slots decides what is gathered ahead, so with prefetch all have
 * to agree on it; without, they need not. */
TEST(Groups, InstancesOfDifferentResidency) {
  GroupsJob job = strategies_job(0, 0);
  for (const int32_t prefetch : {0, 1}) {
    const test::Expected expected = job.expected(1, 2);
    job.prefetch_depth = prefetch;
    const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsJob own = job; /* experts b stay, a do not */
      if (rank.rank % 2 == 1) own.residencies = {MFSDP_RESIDENCY_SHARDED, MFSDP_RESIDENCY_RESIDENT};
      GroupsTrainer t(&rank, &links, &own, 1);
      MFSDP_TRY(t.make_plans());
      const mfsdp_status status = t.make_runtime();
      if (prefetch > 0) {
        must_fail(rank, status, MFSDP_E_MISMATCH, "with prefetch_depth above 0 all ranks need");
        return MFSDP_OK;
      }
      MFSDP_TRY(status);
      MFSDP_TRY(t.init());
      for (int64_t s = 0; s < 2; ++s) {
        MFSDP_TRY(t.step(s));
        t.compare(expected, s);
      }
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << "prefetch " << prefetch << ": " << result.text();
  }
}

/* Slots are as large as a rank's own units need: exports of what ranks with different ones share
 * are cut alike all the same. */
TEST(Groups, ExportsBetweenDifferentSlots) {
  for (const int dense : {0, 1})
    for (const int experts : {0, 1})
      for (const bool narrow : {false, true}) {
        GroupsJob job;
        job.options = test::three_groups();
        job.add_group({{0, 1, 2, 3}},
                      {ref::matrix("dense", 0, 40, 36), ref::frozen("mask", 0, {40, 30})});
        job.add_instance(true, {{0, 2}}, {ref::matrix("large", 1, 50, 60)});
        job.add_instance(false, {{1, 3}}, {ref::matrix("small", 1, 6, 4)});
        if (narrow) test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
        for (const int strategy : {dense, experts})
          job.residencies.push_back(strategy == 0 ? MFSDP_RESIDENCY_SHARDED
                                                  : MFSDP_RESIDENCY_RESIDENT);
        SCOPED_TRACE(std::to_string(dense) + " and " + std::to_string(experts) +
                     (narrow ? ", bf16" : ""));
        EXPECT_EQ(test::run_groups_job(job, 1, 2), "");
      }
}

/* HSDP: copies that are each RESIDENT. */
TEST(Replicas, OfResidentGroups) {
  for (const bool workers : {false, true}) {
    GroupsJob job;
    job.options = test::three_groups();
    job.options.clip_norm = 1.5;
    job.add_group({{0, 1}, {2, 3}}, dense_tensors());
    job.residencies.push_back(MFSDP_RESIDENCY_RESIDENT);
    if (workers) job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    job.on_queue = workers;
    EXPECT_EQ(predicted(job), "");
    EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
  }
}

TEST(Replicas, OfReplicatedGroupsAreRefused) {
  GroupsJob job;
  job.options = test::three_groups();
  job.add_group({{0, 1}, {2, 3}}, dense_tensors());
  job.residencies.push_back(MFSDP_RESIDENCY_RESIDENT);
  job.placements.push_back(MFSDP_PLACEMENT_REPLICATED);
  const RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsTrainer t(&rank, &links, &job, 1);
    MFSDP_TRY(t.make_plans());
    must_fail(rank, t.make_runtime(), MFSDP_E_UNSUPPORTED,
              "groups[0] has replicas and its plan is replicated; make one group of all its ranks");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
