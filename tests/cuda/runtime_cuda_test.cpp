/* SPDX-License-Identifier: MIT */
/*
 * The runtime over the CUDA backend on the host double: thread ranks that share one device through
 * device copies, against the oracle bit for bit (DESIGN, "Proof"). The oracle takes its products
 * and sums of squares from a CUDA backend of its own. On hardware its AdamW is no judge, since
 * pow() may differ there in the last bit of a double: worlds are compared with each other.
 */
#include "tests/runtime/groups_rig.h"

#include <atomic>

namespace {

using test::Expected;
using test::Job;
using test::Rank;
using test::RanksResult;
using test::run_job;
using test::Trainer;

const int64_t kSteps = MFSDP_TEST_SANITIZER ? 2 : 3;

struct Shape {
  int32_t world, micro_batches;
};

Job cuda_job(Job job) {
  job.cuda = true;
  return job;
}

/* Of all parameters after `steps` steps; 0 and a failure if ranks differ or fail. */
uint64_t trained_hash(const Job &job, const Shape &shape, int64_t steps) {
  std::vector<uint64_t> hashes(static_cast<std::size_t>(shape.world));
  const RanksResult result = test::run_ranks(test::ranks_of(job, shape.world), [&](Rank &rank) {
    Trainer t(&rank, &job, shape.micro_batches);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < steps; ++s)
      MFSDP_TRY(t.step(s));
    MFSDP_TRY(t.hash(&hashes[static_cast<std::size_t>(rank.rank)]));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  for (const uint64_t hash : hashes)
    EXPECT_EQ(hash, hashes[0]);
  return result.ok() ? hashes[0] : 0;
}

void expect_equal(const Job &job, const std::vector<Shape> &shapes, int64_t steps = kSteps) {
#if defined(MFSDP_TEST_HARDWARE)
  for (const Shape &s : shapes) /* against the first of them */
    EXPECT_EQ(trained_hash(job, s, steps), trained_hash(job, shapes[0], steps));
#else
  const int64_t blocks = shapes[0].world * shapes[0].micro_batches;
  const Expected expected(job, blocks, steps);
  for (const Shape &s : shapes) {
    ASSERT_EQ(s.world * s.micro_batches, blocks);
    EXPECT_EQ(run_job(job, s.world, s.micro_batches, expected), "");
  }
#endif
}

TEST(RuntimeCuda, TheSameBitsInEveryWorld) {
  Job job = cuda_job(test::mixed_job());
  job.on_queue = true;
  job.active_units = 3;
  job.tune = [](mfsdp_runtime_desc *desc) { desc->prefetch_depth = 1; };
  const uint64_t alone = trained_hash(job, {1, 8}, kSteps);
  for (const Shape &shape : std::vector<Shape>{{2, 4}, {4, 2}, {8, 1}})
    EXPECT_EQ(trained_hash(job, shape, kSteps), alone) << shape.world << " ranks";
  EXPECT_NE(trained_hash(job, {1, 8}, kSteps - 1), alone) << "the hash sees the values";
}

TEST(RuntimeCuda, EveryShapeOfEightBlocks) {
  for (const double clip : {0.0, 1.5}) {
    Job job = cuda_job(test::mixed_job());
    job.options.clip_norm = clip;
    if (MFSDP_TEST_SANITIZER && clip == 0.0) continue;
    expect_equal(job, {{1, 8}, {2, 4}, {4, 2}, {8, 1}});
  }
}

TEST(RuntimeCuda, WorldsThatDivideNothing) {
  const Job job = cuda_job(test::mixed_job());
  expect_equal(job, {{3, 1}, {1, 3}});
  if (!MFSDP_TEST_SANITIZER) expect_equal(job, {{7, 1}, {1, 7}});
}

/* The caller's queue: nothing but events between gathers, backward, reductions and updates. */
TEST(RuntimeCuda, AComputeQueueOfTheCaller) {
  Job job = cuda_job(test::mixed_job());
  job.on_queue = true;
  expect_equal(job, {{4, 2}, {2, 4}});
}

/* Gathers run ahead, slots are reused, parameters are kept through backward. */
TEST(RuntimeCuda, Prefetch) {
  for (const int32_t depth : {1, 2})
    for (const bool keep : {false, true}) {
      Job job = cuda_job(test::mixed_job());
      job.on_queue = true;
      job.active_units = keep ? 6 : 4;
      job.active_grads = 2;
      job.debug_poison = 1;
      job.debug_check = 1;
      job.tune = [depth, keep](mfsdp_runtime_desc *desc) {
        desc->prefetch_depth = depth;
        desc->reshard_after_forward = keep ? 0 : 1;
      };
      if (MFSDP_TEST_SANITIZER && depth == 1) continue;
      expect_equal(job, {{4, 2}, {2, 4}}, 2);
    }
}

/* Full parameters that stay, and everything on every rank; the same with offload. */
TEST(RuntimeCuda, ResidentAndReplicated) {
  for (const bool narrow : {false, true}) {
    Job job = cuda_job(test::mixed_job());
    if (MFSDP_TEST_SANITIZER && !narrow) continue;
    job.on_queue = narrow;
    if (narrow) test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
    const uint64_t owned = trained_hash(job, {4, 1}, 2);
    job.residency = MFSDP_RESIDENCY_RESIDENT;
    for (const mfsdp_placement placement : {MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_REPLICATED}) {
      Job offload = job;
      job.placement = offload.placement = placement;
      offload.tune = [](mfsdp_runtime_desc *desc) { desc->state_space = MFSDP_SPACE_HOST; };
      expect_equal(job, {{4, 1}, {2, 2}, {1, 4}}, 2);
      EXPECT_EQ(trained_hash(offload, {4, 1}, 2), owned);
    }
  }
}

TEST(RuntimeCuda, NarrowDtypes) {
  Job job = cuda_job(test::mixed_job());
  job.on_queue = true;
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
  expect_equal(job, {{4, 1}, {2, 2}, {1, 4}}, 2);
}

#if !defined(MFSDP_TEST_HARDWARE)
/* Equality of results that never depend on the ranks' arithmetic would prove little: another order
 * of terms shows. */
TEST(RuntimeCuda, SeesTheOrderOfTerms) {
  Job job = cuda_job(test::mixed_job()), other = job;
  const Expected expected(job, 4, 1);
  other.options.chains = [](int32_t, int64_t blocks) {
    std::vector<std::vector<int64_t>> chains(1);
    for (int64_t b = blocks; b-- > 0;)
      chains[0].push_back(b);
    return chains;
  };
  const Expected backwards(other, 4, 1);
  EXPECT_NE(run_job(job, 4, 1, backwards), "");
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
}
#endif

/* Experts on groups of their own, and copies of everything. */
test::GroupsJob groups_job() {
  test::GroupsJob job;
  job.cuda = true;
  job.on_queue = true;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  job.active_units = 3;
  job.prefetch_depth = 1;
  job.add_group({{0, 1}, {2, 3}},
                {ref::elementwise("embed", 0, {120, 75}), ref::matrix("qkv", 2, 12, 20),
                 ref::elementwise("norm", 2, {40}, 2), ref::frozen("mask", 3, {9, 50})});
  job.add_instance(true, {{0}, {2}}, {ref::experts("a.up", 1, 3, 8, 24)});
  job.add_instance(false, {{1}, {3}}, {ref::matrix("b.only", 1, 7, 50)});
  return job;
}

/* One device transport for each, on one communication queue. */
TEST(RuntimeCuda, GroupsAndReplicas) {
  const test::GroupsJob job = groups_job();
#if defined(MFSDP_TEST_HARDWARE)
  GTEST_SKIP() << "the oracle's AdamW is no judge here";
#else
  EXPECT_EQ(test::run_groups_job(job, 2, kSteps), "");
#endif
}

TEST(RuntimeCuda, ASkippedStepTouchesNothing) {
  Job job = cuda_job(test::mixed_job());
  job.on_queue = true;
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return step == 1 && block == 2 && use == 3 ? ref::Sample::kInf : ref::Sample::kPresent;
  };
  expect_equal(job, {{4, 1}, {2, 2}}, 3);
}

/* ---- over NCCL: ranks with a device each ---- */

Job nccl_job(Job job, bool nonblocking = true) {
  job.cuda = true;
  job.nccl.on = true;
  job.nccl.nonblocking = nonblocking;
  job.nccl.chunk_nbytes = 1024; /* several rounds */
  job.on_queue = true;
  return job;
}

#define MFSDP_TEST_NEEDS_DEVICES(count) \
  if (test::nccl_rig_devices() < (count)) GTEST_SKIP() << "needs devices: " << (count)

TEST(RuntimeNccl, EveryShapeOfEightBlocks) {
  MFSDP_TEST_NEEDS_DEVICES(8);
  for (const bool nonblocking : {true, false}) {
    Job job = nccl_job(test::mixed_job(), nonblocking);
    job.options.clip_norm = 1.5;
    if (MFSDP_TEST_SANITIZER && !nonblocking) continue;
    if (MFSDP_TEST_TSAN)
      expect_equal(job, {{4, 1}}, 1);
    else
      expect_equal(job, {{1, 8}, {2, 4}, {4, 2}, {8, 1}}, MFSDP_TEST_SANITIZER ? 1 : kSteps);
  }
}

TEST(RuntimeNccl, WorldsThatDivideNothing) {
  MFSDP_TEST_NEEDS_DEVICES(7);
  const Job job = nccl_job(test::mixed_job());
  expect_equal(job, {{3, 1}}, MFSDP_TEST_TSAN ? 1 : 2);
  if (!MFSDP_TEST_SANITIZER) expect_equal(job, {{7, 1}}, 2);
}

/* Gathers run ahead; check words and poison are on in half of the cases. */
TEST(RuntimeNccl, Prefetch) {
  MFSDP_TEST_NEEDS_DEVICES(4);
  for (const int32_t debug : {0, 1}) {
    Job job = nccl_job(test::mixed_job());
    job.active_units = 4;
    job.active_grads = 2;
    job.debug_poison = job.debug_check = debug;
    job.tune = [](mfsdp_runtime_desc *desc) { desc->prefetch_depth = 2; };
    if (MFSDP_TEST_TSAN && debug) continue;
    expect_equal(job, {{MFSDP_TEST_TSAN ? 2 : 4, 2}}, 2);
  }
}

/* Other orders of sums than DIRECT's: all ranks agree, and with sums of whole numbers nothing would
 * differ. Gathers carry the same bits whatever moves them. */
TEST(RuntimeNccl, EveryAlgorithm) {
  MFSDP_TEST_NEEDS_DEVICES(4);
  for (const mfsdp_algorithm algorithm :
       {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE, MFSDP_ALGORITHM_AUTO}) {
    Job job = nccl_job(test::mixed_job());
    const auto costs = [](mfsdp_runtime_desc *desc) {
      desc->wire.latency_ns = desc->wire.between_latency_ns = 10000;
      desc->wire.ns_per_mib = desc->wire.between_ns_per_mib = 1000;
    };
    job.tune = [algorithm, costs](mfsdp_runtime_desc *desc) {
      costs(desc);
      desc->gather_algorithm = algorithm;
    };
    expect_equal(job, {{MFSDP_TEST_TSAN ? 2 : 4, 1}}, 1);
    job.tune = [algorithm, costs](mfsdp_runtime_desc *desc) {
      costs(desc);
      desc->reduce_algorithm = desc->gather_algorithm = algorithm;
    };
    if (MFSDP_TEST_SANITIZER && algorithm != MFSDP_NATIVE) continue;
    EXPECT_NE(trained_hash(job, {MFSDP_TEST_TSAN ? 2 : 4, 1}, MFSDP_TEST_TSAN ? 1 : 2), 0u)
        << mfsdp_algorithm_name(algorithm);
  }
}

/* A communicator for each group and for the copies: one order on the device. */
TEST(RuntimeNccl, GroupsAndReplicas) {
  MFSDP_TEST_NEEDS_DEVICES(4);
  test::GroupsJob job = groups_job();
  job.nccl.on = true;
#if defined(MFSDP_TEST_HARDWARE)
  GTEST_SKIP() << "the oracle's AdamW is no judge here";
#else
  EXPECT_EQ(test::run_groups_job(job, 2, MFSDP_TEST_TSAN ? 1 : 2), "");
#endif
}

/* A rank stalls, or leaves, in the middle of a step: the others' groups end at the deadline, by an
 * abort, and name it; what stood behind them has touched nothing, and nothing is left behind. */
TEST(RuntimeNccl, ARankThatStallsOrLeavesIsNamed) {
  MFSDP_TEST_NEEDS_DEVICES(3);
  for (const bool leaves : {false, true}) {
    if (MFSDP_TEST_TSAN && leaves) continue;
    const Job job = nccl_job(test::small_job());
    test::RanksOptions options = test::ranks_of(job, 3);
    options.world.deadline_us = 500000;
    const int64_t start_us = mfsdp_clock_us();
    const RanksResult result = test::run_ranks(options, [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.create());
      MFSDP_TRY(t.step(0));
      MFSDP_TRY(t.begin(1));
      if (rank.rank == 1) {
        if (!leaves) mfsdp_clock_sleep_until(mfsdp_clock_us() + 2000000);
        return t.destroy();
      }
      mfsdp_status status = t.micro_batch(1, 0);
      if (status == MFSDP_OK) status = t.end(); /* the host waits for the verdict */
      const mfsdp_error first = *mfsdp_context_error(&rank.context);
      (void)t.destroy();
      return status == MFSDP_OK ? status : mfsdp_context_take_error(&rank.context, &first);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, 15 * 1000000) << "at the deadline";
    for (std::size_t r = 0; r < 3; r += 2) {
      EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
      EXPECT_NE(result[r].error.message[0], 0);
    }
  }
}

/* A rank stalls, or leaves, in the middle of a step: all others say so, and nothing is left behind.
 * */
TEST(RuntimeCuda, ARankThatStallsOrLeavesIsNamed) {
  for (const bool leaves : {false, true}) {
    const Job job = cuda_job(test::small_job());
    test::RanksOptions options = test::ranks_of(job, 3);
    options.world.deadline_us = leaves ? 20 * 1000000 : 500000;
    const int64_t start_us = mfsdp_clock_us();
    const RanksResult result = test::run_ranks(options, [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.create());
      MFSDP_TRY(t.step(0));
      MFSDP_TRY(t.begin(1));
      if (rank.rank == 1) {
        if (!leaves) mfsdp_clock_sleep_until(mfsdp_clock_us() + 1500000);
        return leaves ? t.destroy() : mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_FORWARD);
      }
      const mfsdp_status status = t.micro_batch(1, 0);
      const mfsdp_error first = *mfsdp_context_error(&rank.context);
      (void)t.destroy();
      return status == MFSDP_OK ? status : mfsdp_context_take_error(&rank.context, &first);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, 15 * 1000000) << "at once, or at the deadline";
    for (std::size_t r = 0; r < 3; r += 2) {
      EXPECT_EQ(result[r].status, leaves ? MFSDP_E_PEER : MFSDP_E_TIMEOUT) << result.text();
      EXPECT_EQ(result[r].error.culprit, 1) << result.text();
    }
  }
}

} // namespace
