/* SPDX-License-Identifier: MIT */
/*
 * BANDED matrices: the bits of the one-process oracle whatever the world, the update and the
 * queues; exactly the bytes that the exchange needs; the memory it declares; what it refuses.
 *
 * Counts allocations: MFSDP_TEST_WRAP_MALLOC.
 */
#include "forwarding.h"
#include "groups_rig.h"

#include "mfsdp/simulate.h"
#include "tests/support/malloc_count.h"
#if MFSDP_EXAMPLE_LAPACKE
#include "mfsdp/host/math_lapacke.h"
#endif

namespace {

using test::Expected;
using test::GroupsJob;
using test::Job;
using test::Rank;
using test::require;
using test::run_job;
using test::Trainer;

#if MFSDP_TEST_SANITIZER
const int64_t kSteps = 2;
#else
const int64_t kSteps = 4;
#endif

const mfsdp_banded_update kUpdates[] = {MFSDP_BANDED_HOME, MFSDP_BANDED_EVERYWHERE};

void tune(Job *job, const std::function<void(mfsdp_runtime_desc *)> &change) {
  const std::function<void(mfsdp_runtime_desc *)> before = job->tune;
  job->tune = [before, change](mfsdp_runtime_desc *desc) {
    if (before) before(desc);
    change(desc);
  };
}

/* Every view and shape; with clipping, which is summed by bands. */
Job banded(Job job, mfsdp_banded_update update) {
  job.placement = MFSDP_PLACEMENT_BANDED;
  job.options.bands = true;
  tune(&job, [update](mfsdp_runtime_desc *desc) { desc->banded_update = update; });
  return job;
}

/* Many small matrices of few shapes, so that batches hold several, beside a large one; and one with
 * fewer rows than ranks. */
Job batched_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::experts("experts", 1, 7, 8, 12));
  job.model.tensors.push_back(ref::matrix("large", 1, 48, 40));
  job.model.tensors.push_back(ref::split_heads("heads", 2, 40, 20, 5));
  job.model.tensors.push_back(ref::matrix("few_rows", 2, 3, 50));
  job.model.tensors.push_back(ref::matrix("adam", 2, 30, 11, 1));
  job.model.tensors.push_back(ref::experts("more", 3, 4, 8, 12));
  job.options.clip_norm = 2.0;
  return job;
}

TEST(Banded, EveryShapeOfEightBlocks) {
  for (const mfsdp_host_math *math : test::maths())
    for (const mfsdp_banded_update update : kUpdates) {
      Job job = banded(test::mixed_job(), update);
      job.math = math;
      const Expected expected(job, 8, kSteps);
      for (const int32_t world : {1, 2, 4, 8})
        EXPECT_EQ(run_job(job, world, 8 / world, expected), "");
    }
}

TEST(Banded, WorldsThatDivideNothing) {
  for (const mfsdp_banded_update update : kUpdates) {
    const Job job = banded(test::mixed_job(), update);
    for (const int32_t world : {3, 7}) {
      const Expected expected(job, world, kSteps);
      EXPECT_EQ(run_job(job, world, 1, expected), "");
    }
  }
}

TEST(Banded, BatchesOfSmallMatrices) {
  for (const mfsdp_banded_update update : kUpdates) {
    const Job job = banded(batched_job(), update);
    const Expected expected(job, 8, kSteps);
    for (const int32_t world : {1, 2, 4, 8})
      EXPECT_EQ(run_job(job, world, 8 / world, expected), "");
  }
}

/* Without clipping the parameters are those of OWNED matrices, whose norm is summed otherwise. */
TEST(Banded, ParametersOfOwnedMatrices) {
  Job owned = test::mixed_job();
  owned.options.clip_norm = 0.0;
  const Expected whole(owned, 4, kSteps);
  const Expected bands(banded(owned, MFSDP_BANDED_HOME), 4, kSteps);
  for (int64_t s = 0; s < kSteps; ++s)
    EXPECT_EQ(whole.after(s).weights, bands.after(s).weights);
}

TEST(Banded, FewerMatricesThanRanks) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job;
    job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
    job.model.tensors.push_back(ref::matrix("only", 1, 70, 12));
    job = banded(job, update);
    const Expected expected(job, 8, kSteps);
    EXPECT_EQ(run_job(job, 8, 1, expected), "");
    EXPECT_EQ(run_job(job, 4, 2, expected), "");
  }
}

/* The other preset's choices: jordan has no decay; and a sum instead of an average. */
TEST(Banded, OtherMuons) {
  for (const bool sums : {false, true}) {
    Job job = banded(batched_job(), MFSDP_BANDED_HOME);
    job.options.groups[0].weight_decay = 0.0;
    job.options.groups[0].match_rms = sums;
    if (sums) job.options.groups[0].grad_weight = job.options.groups[0].nesterov_weight = 1.0;
    const Expected expected(job, 4, kSteps);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
  }
}

TEST(Banded, QueuesWithThreads) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const bool on_queue : {false, true}) {
      Job job = banded(batched_job(), update);
      job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      job.on_queue = on_queue;
      tune(&job, [](mfsdp_runtime_desc *desc) { desc->prefetch_depth = desc->reduce_depth = 1; });
      const Expected expected(job, 4, kSteps);
      EXPECT_EQ(run_job(job, 4, 1, expected), "");
      EXPECT_EQ(run_job(job, 2, 2, expected), "");
    }
}

TEST(Banded, OnDevices) { /* of the double: one that ranks share, and one each */
  for (const bool nccl : {false, true})
    for (const mfsdp_banded_update update : kUpdates) {
      Job job = banded(batched_job(), update);
      job.cuda = true;
      job.nccl.on = nccl;
      const Expected expected(job, 4, 2);
      EXPECT_EQ(run_job(job, 2, 2, expected), "");
      EXPECT_EQ(run_job(job, 4, 1, expected), "");
    }
}

TEST(Banded, SixteenBits) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job = banded(test::mixed_job(), update);
    test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
    const Expected expected(job, 4, kSteps);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
    EXPECT_EQ(run_job(job, 2, 2, expected), "");
  }
}

TEST(Banded, Resident) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job = banded(test::mixed_job(), update);
    job.residency = MFSDP_RESIDENCY_RESIDENT;
    const Expected expected(job, 4, kSteps);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
  }
}

/* All gathers of bands by another algorithm: the same bits. Homes are DIRECT's alone. */
TEST(Banded, OtherGathers) {
  for (const mfsdp_algorithm algorithm : {MFSDP_RING, MFSDP_NATIVE})
    for (const mfsdp_banded_update update : kUpdates) {
      Job job = banded(batched_job(), update);
      tune(&job, [algorithm](mfsdp_runtime_desc *desc) { desc->gather_algorithm = algorithm; });
      const Expected expected(job, 4, 2);
      EXPECT_EQ(run_job(job, 4, 1, expected), "");
    }
}

TEST(Banded, MissingGradients) {
  for (const bool zeros : {false, true})
    for (const mfsdp_banded_update update : kUpdates) {
      Job job = banded(batched_job(), update);
      job.options.missing_is_zero = zeros;
      /* "heads" is missing in step 1 everywhere, "large" in some blocks of step 2; unit 3 is not
       * used in step 0. */
      job.script.sample = [](int64_t step, int64_t block, int32_t use) {
        return (step == 1 && use == 3) || (step == 2 && use == 2 && block % 2 == 0)
                   ? ref::Sample::kAbsent
                   : ref::Sample::kPresent;
      };
      job.script.unit_used = [](int64_t step, int32_t unit) { return unit != 3 || step != 0; };
      const Expected expected(job, 4, 4);
      EXPECT_EQ(run_job(job, 4, 1, expected), "");
      EXPECT_EQ(run_job(job, 2, 2, expected), "");
    }
}

/* A step that is skipped touches nothing, and the next one is what it would have been. */
TEST(Banded, SkipsAsAWhole) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job = banded(test::mixed_job(), update);
    job.script.sample = [](int64_t step, int64_t block, int32_t use) {
      return step == 1 && block == 2 && use == 14 ? ref::Sample::kNan : ref::Sample::kPresent;
    };
    const Expected expected(job, 4, 4);
    ASSERT_TRUE(expected.after(1).verdict.skipped);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
    EXPECT_EQ(run_job(job, 2, 2, expected), "");
  }
}

TEST(Banded, WeightedAndLossScaled) {
  Job job = banded(batched_job(), MFSDP_BANDED_HOME);
  job.script.weight = [](int64_t step, int64_t block) {
    return static_cast<double>(1 + (step + block) % 3);
  };
  job.options.loss_scale.initial = 1024.0;
  job.options.loss_scale.growth_interval = 2;
  const Expected expected(job, 4, 4);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
}

/* Bands are exchanged when the verdict is known, whatever was done in backward. */
TEST(Banded, BesideTheStepInBackward) {
  Job job = banded(batched_job(), MFSDP_BANDED_HOME);
  job.options.groups[0].clipped = false;
  tune(&job, [](mfsdp_runtime_desc *desc) { desc->step_in_backward = 1; });
  const Expected expected(job, 4, kSteps);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
}

/* A plan that may choose bands, but only has the one that it was told of: the other matrices stay
 * with their owners, in backward staged by unit beside the bands. All norms are summed by bands
 * then. */
TEST(Banded, BesideOwnedMatrices) {
  for (const bool in_backward : {false, true})
    for (const mfsdp_banded_update update : kUpdates) {
      Job job;
      job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
      job.model.tensors.push_back(ref::matrix("huge", 1, 128, 96));
      job.model.tensors.push_back(ref::experts("small", 2, 8, 8, 12));
      job.options.bands = true;
      job.options.clip_norm = 2.0;
      job.options.groups[0].clipped = false;
      tune(&job, [=](mfsdp_runtime_desc *desc) {
        desc->banded_update = update;
        desc->step_in_backward = in_backward;
      });
      const Expected expected(job, 4, kSteps);
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
        std::vector<mfsdp_param> params;
        mfsdp_plan_desc desc = mfsdp_plan_desc_default();
        mfsdp_plan_summary summary = mfsdp_plan_summary_default();
        Trainer trainer(&rank, &job, 1);
        for (const ref::Tensor &t : job.model.tensors)
          params.push_back(test::param_of(t));
        desc.params = params.data();
        desc.param_count = static_cast<int32_t>(params.size());
        desc.world = rank.world;
        desc.allow_banded = 1;
        desc.banded_wire_cost = 1000;
        desc.materialize_count = desc.reduce_count = 0; /* bands would gain nothing */
        params[1].placement = MFSDP_PLACEMENT_BANDED;
        MFSDP_TRY(mfsdp_plan_create(&rank.context, &desc, &trainer.plan));
        MFSDP_TRY(mfsdp_plan_report(&rank.context, trainer.plan, &summary, nullptr, 0));
        require(summary.banded_count == 1 && summary.matrix_count == 9,
                std::to_string(summary.banded_count) + " matrices are banded");
        MFSDP_TRY(trainer.make_runtime());
        MFSDP_TRY(mfsdp_runtime_init(trainer.runtime, Trainer::init, &job.model));
        for (int64_t s = 0; s < expected.count(); ++s) {
          MFSDP_TRY(trainer.step(s));
          trainer.compare(expected, s);
        }
        return trainer.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
    }
}

/* ---- what travels ---- */

bool is_exchanged(const Job &job, const mfsdp_piece &piece) {
  return piece.placement == MFSDP_PLACEMENT_BANDED &&
         job.options.groups[static_cast<std::size_t>(job.model.at(piece.param).group)].muon;
}

/* Bytes that a rank sends in one step: its bands to homes, and the bands of others back; or its
 * bands to all others. */
uint64_t sent_nbytes(const Job &job, const mfsdp_plan *plan, int32_t rank,
                     mfsdp_banded_update update) {
  uint64_t elements = 0;
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  for (int32_t i = 0; i < count; ++i) {
    if (!is_exchanged(job, pieces[i])) continue;
    const auto n = static_cast<uint64_t>(pieces[i].count);
    if (update == MFSDP_BANDED_EVERYWHERE)
      elements +=
          pieces[i].owner == rank ? n * static_cast<uint64_t>(mfsdp_plan_world(plan) - 1) : 0;
    else if (pieces[i].owner != pieces[i].home)
      elements += n * static_cast<uint64_t>((pieces[i].owner == rank) + (pieces[i].home == rank));
  }
  return elements * sizeof(float);
}

TEST(BandedTraffic, ExactlyTheBands) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const int32_t world : {1, 2, 3, 4, 7, 8}) {
      const Job job = banded(test::mixed_job(), update);
      std::mutex mutex;
      uint64_t all = 0, matrices = 0;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
        Trainer trainer(&rank, &job, 1);
        MFSDP_TRY(trainer.create());
        const uint64_t want = sent_nbytes(job, trainer.plan, rank.rank, update);
        for (int64_t s = 0; s < 2; ++s) {
          MFSDP_TRY(trainer.step(s));
          const mfsdp_traffic_count &sent =
              rank.context.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX];
          const auto steps = static_cast<uint64_t>(s + 1);
          require(sent.payload_nbytes == steps * want && sent.wire_nbytes == steps * want,
                  "sent " + std::to_string(sent.payload_nbytes) + " bytes, " +
                      std::to_string(sent.wire_nbytes) + " on the wire, in " +
                      std::to_string(steps) + " steps of " + std::to_string(want));
        }
        const std::lock_guard<std::mutex> lock(mutex);
        all += want;
        int32_t count = 0;
        const mfsdp_piece *pieces = mfsdp_plan_pieces(trainer.plan, -1, &count);
        for (int32_t i = 0; i < count && rank.rank == 0; ++i)
          if (is_exchanged(job, pieces[i]) &&
              (update == MFSDP_BANDED_EVERYWHERE || pieces[i].owner != pieces[i].home))
            matrices += static_cast<uint64_t>(pieces[i].count) * sizeof(float);
        return trainer.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_EQ(all,
                matrices *
                    (update == MFSDP_BANDED_EVERYWHERE ? static_cast<uint64_t>(world - 1) : 2));
      EXPECT_EQ(all == 0, world == 1);
    }
}

/* All matrices in bands, or those that the planner chooses. */
mfsdp_status make_bands(Rank &rank, const Job &job, bool chosen, mfsdp_plan **plan) {
  std::vector<mfsdp_param> params;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  for (const ref::Tensor &t : job.model.tensors) {
    params.push_back(test::param_of(t));
    if (!chosen && params.back().role == MFSDP_ROLE_MATRIX)
      params.back().placement = MFSDP_PLACEMENT_BANDED;
  }
  desc.params = params.data();
  desc.param_count = static_cast<int32_t>(params.size());
  desc.world = rank.world;
  desc.allow_banded = chosen;
  desc.banded_wire_cost = 1;
  desc.banded_message_nbytes = 512; /* so that not all of them pay */
  MFSDP_TRY(mfsdp_plan_create(&rank.context, &desc, plan));
  MFSDP_TRY(mfsdp_plan_report(&rank.context, *plan, &summary, nullptr, 0));
  const int32_t banded_count = summary.banded_count;
  require(chosen && rank.world > 1 ? banded_count > 0 && banded_count < 10
                                   : banded_count == (chosen ? 0 : 10),
          std::to_string(banded_count) + " matrices are banded");
  return MFSDP_OK;
}

/* What a rank sends in a step that gathers each unit once. */
mfsdp_status predict_bands(Rank &rank, const mfsdp_plan *plan, mfsdp_banded_update update,
                           mfsdp_sim_rank *mine) {
  const mfsdp_cluster cluster = mfsdp_cluster_default();
  mfsdp_sim_desc desc = mfsdp_sim_desc_default();
  mfsdp_sim_result result = mfsdp_sim_result_default();
  std::vector<mfsdp_sim_rank> ranks(static_cast<std::size_t>(rank.world));
  desc.plan = plan;
  desc.cluster = &cluster;
  desc.materialize_count = 1;
  desc.banded_everywhere = update == MFSDP_BANDED_EVERYWHERE;
  MFSDP_TRY(mfsdp_simulate(&rank.context, &desc, &result, ranks.data(), rank.world));
  require((result.optimizer_nbytes.sum > 0) == (rank.world > 1), "nothing is exchanged");
  *mine = ranks[static_cast<std::size_t>(rank.rank)];
  return MFSDP_OK;
}

/* What a step has sent of every class is what simulate.h says of the plan as it is, rank by rank: all
 * in bands, and a mix that the planner has chosen. */
TEST(BandedTraffic, AsSimulatePredicts) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::matrix("huge", 1, 128, 96));
  job.model.tensors.push_back(ref::matrix("few_rows", 1, 3, 50));
  job.model.tensors.push_back(ref::experts("small", 2, 8, 8, 12));
  const auto run = [&](Rank &rank, mfsdp_banded_update update, bool chosen) {
    Job mine = job;
    mfsdp_sim_rank predicted;
    tune(&mine, [update](mfsdp_runtime_desc *desc) { desc->banded_update = update; });
    Trainer trainer(&rank, &mine, 1);
    trainer.forward = false; /* units are gathered for backward alone */
    MFSDP_TRY(make_bands(rank, mine, chosen, &trainer.plan));
    MFSDP_TRY(predict_bands(rank, trainer.plan, update, &predicted));
    MFSDP_TRY(trainer.make_runtime());
    MFSDP_TRY(mfsdp_runtime_init(trainer.runtime, Trainer::init, &mine.model));
    for (int64_t s = 0; s < 2; ++s) {
      const auto before = rank.context.counters;
      MFSDP_TRY(trainer.step(s));
      const auto check = [&](mfsdp_traffic traffic, int64_t want) {
        const uint64_t sent =
            rank.context.counters.sent[traffic].wire_nbytes - before.sent[traffic].wire_nbytes;
        require(sent == static_cast<uint64_t>(want),
                std::string(mfsdp_traffic_name(traffic)) + ": sent " + std::to_string(sent) +
                    " bytes, predicted " + std::to_string(want));
      };
      check(MFSDP_TRAFFIC_OPTIMIZER_MATRIX, predicted.optimizer_nbytes);
      check(MFSDP_TRAFFIC_MATERIALIZE, predicted.materialize_nbytes);
      check(MFSDP_TRAFFIC_REDUCE, predicted.reduce_nbytes);
    }
    return trainer.destroy();
  };
  for (const mfsdp_banded_update update : kUpdates)
    for (const bool chosen : {false, true})
      for (const int32_t world : {1, 3, 4, 8}) {
        const test::RanksResult result = test::run_ranks(
            test::ranks_of(job, world), [&](Rank &rank) { return run(rank, update, chosen); });
        EXPECT_TRUE(result.ok()) << result.text();
      }
}

/* Four equal matrices for two homes, and all fit beside the large one: one message there and one
 * back for them all, and one each for the large one. */
TEST(BandedTraffic, OneMessageForAPairAndRound) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {60, 9}));
  job.model.tensors.push_back(ref::experts("experts", 1, 5, 8, 16));
  job.model.tensors.push_back(ref::matrix("large", 1, 64, 48));
  job = banded(job, MFSDP_BANDED_HOME);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    uint64_t messages = 0;
    std::vector<bool> large(2, false), small(2, false);
    int32_t count = 0;
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.create());
    const mfsdp_piece *pieces = mfsdp_plan_pieces(trainer.plan, -1, &count);
    for (int32_t i = 0; i < count; ++i)
      if (is_exchanged(job, pieces[i]))
        (pieces[i].matrix_rows == 64 ? large : small)[static_cast<std::size_t>(pieces[i].home)] =
            true;
    for (std::size_t home = 0; home < 2; ++home) /* this rank sends to the other, or back to it */
      messages += (large[home] ? 1u : 0u) + (small[home] ? 1u : 0u);
    MFSDP_TRY(trainer.step(0));
    require(
        rank.context.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].transfer_count == messages,
        std::to_string(rank.context.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].transfer_count) +
            " messages, not " + std::to_string(messages));
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* AdamW's bands are elements like any others. */
TEST(BandedTraffic, NothingForAdamW) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job = test::small_job();
    for (ref::Tensor &t : job.model.tensors)
      t.group = 1;
    job = banded(job, update);
    const Expected expected(job, 4, 2);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
      Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      for (int64_t s = 0; s < 2; ++s) {
        MFSDP_TRY(trainer.step(s));
        trainer.compare(expected, s);
      }
      require(rank.context.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].transfer_count == 0,
              "bands were exchanged");
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Every matrix is orthogonalized once in all at home, once on each rank everywhere. */
TEST(BandedTraffic, WhoWorks) {
  for (const mfsdp_banded_update update : kUpdates) {
    const Job job = banded(batched_job(), update);
    std::mutex mutex;
    uint64_t worked = 0;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
      Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      MFSDP_TRY(trainer.step(0));
      const std::lock_guard<std::mutex> lock(mutex);
      worked += rank.context.counters.newton_schulz_count;
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(worked, 18u * (update == MFSDP_BANDED_EVERYWHERE ? 4u : 1u)); /* 7 + 1 + 5 + 1 + 4 */
  }
}

/* ---- memory ---- */

std::size_t padded(int64_t count) {
  return static_cast<std::size_t>((count + 127) / 128 * 128) * sizeof(float);
}

TEST(BandedMemory, WhatIsPredictedIsHeld) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const int32_t world : {1, 3, 4})
      for (const Job &job : {banded(test::mixed_job(), update), banded(batched_job(), update)}) {
        const test::RanksResult result =
            test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
              mfsdp_memory memory = mfsdp_memory_default();
              Trainer trainer(&rank, &job, 1);
              MFSDP_TRY(trainer.make_plan());
              MFSDP_TRY(trainer.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *,
                                                 mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
                require(mfsdp_runtime_memory(&rank.context, desc, &memory) == MFSDP_OK, "memory");
              }));
              const std::size_t *held = rank.context.current_nbytes;
              require(held[MFSDP_MEMORY_SHARD] == memory.shard_nbytes, "shards");
              require(held[MFSDP_MEMORY_STATE] == memory.state_nbytes, "states");
              require(held[MFSDP_MEMORY_GRAD] == memory.grad_nbytes, "gradients");
              require(held[MFSDP_MEMORY_SLOT] == memory.slot_nbytes, "slots");
              require(held[MFSDP_MEMORY_STAGING] == memory.staging_nbytes, "staging");
              require(held[MFSDP_MEMORY_WORKSPACE] == memory.workspace_nbytes, "workspace");
              return trainer.destroy();
            });
        EXPECT_TRUE(result.ok()) << result.text();
      }
}

/* Staging and workspace of the exchanges of a rank, and how many matrices it works on. */
mfsdp_status exchange_memory(Rank &rank, const Job &job, std::size_t *staging,
                             std::size_t *workspace, int32_t *works) {
  mfsdp_memory with = mfsdp_memory_default(), without = mfsdp_memory_default();
  int32_t count = 0;
  bool everywhere = false;
  Trainer trainer(&rank, &job, 1);
  MFSDP_TRY(trainer.make_plan());
  MFSDP_TRY(trainer.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *,
                                     mfsdp_optimizer_desc *, mfsdp_hyper_group *groups) {
    everywhere = desc->banded_update == MFSDP_BANDED_EVERYWHERE;
    require(mfsdp_runtime_memory(&rank.context, desc, &with) == MFSDP_OK, "memory");
    groups[0].algorithm = MFSDP_ALGORITHM_ADAMW; /* nothing is exchanged then */
    require(mfsdp_runtime_memory(&rank.context, desc, &without) == MFSDP_OK, "memory");
    groups[0].algorithm = MFSDP_ALGORITHM_MUON;
  }));
  const mfsdp_piece *pieces = mfsdp_plan_pieces(trainer.plan, -1, &count);
  for (int32_t i = 0; i < count; ++i)
    *works += is_exchanged(job, pieces[i]) && pieces[i].first == pieces[i].matrix_first &&
              (pieces[i].home == rank.rank || everywhere);
  *staging = with.staging_nbytes - without.staging_nbytes;
  *workspace = with.workspace_nbytes - without.workspace_nbytes;
  return trainer.destroy();
}

/* By hand: a 40 x 30 matrix alone, or with four of 8 x 8, on two ranks. A slot holds the large
 * one, and the small ones are worked on apart from it. */
TEST(BandedMemory, TheLargestMatrixDecides) {
  for (const int64_t small : {0, 4})
    for (const mfsdp_banded_update update : kUpdates) {
      Job job;
      job.model.tensors.push_back(ref::matrix("large", 0, 40, 30));
      if (small > 0) job.model.tensors.push_back(ref::experts("small", 0, small, 8, 8));
      job = banded(job, update);
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
        const std::size_t directions = static_cast<std::size_t>(600 + small * 32) * sizeof(float);
        const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
        std::size_t staging = 0, workspace = 0, largest = 0;
        int32_t works = 0;
        MFSDP_TRY(exchange_memory(rank, job, &staging, &workspace, &works));
        MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(&rank.context, &ns, 40, 30, &largest));
        if (update == MFSDP_BANDED_EVERYWHERE) require(works == 1 + small, "who works");
        if (small > 0) require(works > 0, "a rank without work shows nothing");
        if (small == 0 && update == MFSDP_BANDED_HOME) require(works <= 1, "one matrix, one home");
        const auto slots = static_cast<std::size_t>(std::min(works, 2));
        const bool batches = works > 1 || (works == 1 && small > 0 && rank.rank == 1);
        require(staging == directions + (slots + batches) * padded(1200),
                "staging of " + std::to_string(staging) + ", " + std::to_string(works));
        require(workspace == (works > 0 ? largest : 0), "workspace");
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << result.text();
    }
}

TEST(BandedMemory, StepsAllocateNothing) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  for (const mfsdp_banded_update update : kUpdates) {
    uint64_t counted = 1;
    const Job job = banded(batched_job(), update);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
      Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      for (int64_t s = 0; s < 4; ++s) {
        if (s == 1) {
          MFSDP_TRY(rank.barrier());
          if (rank.rank == 0) test::malloc_count_begin();
          MFSDP_TRY(rank.barrier());
        }
        MFSDP_TRY(trainer.begin(s));
        MFSDP_TRY(mfsdp_step_value(trainer.runtime, 1.0));
        for (int32_t u = 4; u-- > 0;) {
          MFSDP_TRY(mfsdp_unit_acquire(trainer.runtime, u, MFSDP_USE_BACKWARD));
          MFSDP_TRY(mfsdp_unit_grads(trainer.runtime, u));
          MFSDP_TRY(mfsdp_unit_reduce(trainer.runtime, u));
          MFSDP_TRY(mfsdp_unit_release(trainer.runtime, u));
        }
        MFSDP_TRY(trainer.end());
      }
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 0) counted = test::malloc_count_end();
      MFSDP_TRY(rank.barrier());
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(counted, 0u);
  }
}

/* Fail the Nth allocation of create on one rank: every rank is told, and nothing is left. False:
 * there were fewer. */
bool fail_allocation(const Job &job, int32_t culprit, int64_t n) {
  bool failed = false, told[2] = {false, false};
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.make_plan());
    const std::size_t planned = rank.memory->live_count();
    if (rank.rank == culprit) rank.memory->fail_at(n);
    mfsdp_status status = trainer.make_runtime();
    if (rank.rank == culprit) failed = rank.memory->failed();
    rank.memory->fail_at(-1);
    if (status == MFSDP_OK) status = trainer.step(0);
    const bool done = status == MFSDP_OK;
    (void)rank.barrier(); /* nobody is woken by another one's leaving; refused after a failure */
    if (trainer.runtime != nullptr) MFSDP_TRY(trainer.destroy());
    require(rank.rank != culprit || done != failed,
            std::string("the cause: ") + mfsdp_context_error(&rank.context)->message);
    told[rank.rank] = !done;
    require(rank.memory->live_count() == planned, "blocks are left");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << "allocation " << n << ": " << result.text();
  EXPECT_TRUE(told[0] == failed && told[1] == failed) << "allocation " << n;
  return failed;
}

TEST(BandedMemory, EveryAllocationFails) {
  for (const mfsdp_banded_update update : kUpdates) {
    const Job job = banded(batched_job(), update);
    const int64_t stride = MFSDP_TEST_SANITIZER ? 7 : 1;
    int64_t n = 0;
    while (fail_allocation(job, static_cast<int32_t>(n % 2), n) && !HasFailure())
      n += stride;
    EXPECT_GT(n, 60);
    EXPECT_LT(n, 1000);
  }
}

/* ---- order ---- */

/* What the communication queue is given in a step, in the order of calls. */
class WatchedTransport : public test::ForwardingTransport {
public:
  explicit WatchedTransport(const mfsdp_transport &inner, int64_t fail_at = -1)
      : ForwardingTransport(inner), left_(fail_at) {}
  std::string order; /* g: gather, s: scatter, of bands */

private:
  mfsdp_status submit(mfsdp_context *context, mfsdp_queue *queue,
                      const mfsdp_batch *batch) override {
    if (batch->traffic == MFSDP_TRAFFIC_OPTIMIZER_MATRIX) {
      order += std::string(batch->label) == "bands to matrices" ? 'g' : 's';
      if (left_-- == 0)
        return MFSDP_FAIL(context, MFSDP_E_BACKEND, "the wire of %s is cut", batch->label);
    }
    return forward(context, queue, batch);
  }
  int64_t left_;
};

/* While a round computes, the next one's bands come and those of the one before go back. */
TEST(BandedOrder, RoundsOverlap) {
  for (const mfsdp_banded_update update : kUpdates) {
    Job job;
    job.model.tensors.push_back(ref::experts("experts", 0, 8, 16, 12)); /* one at a time */
    job = banded(job, update);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      WatchedTransport watched(rank.transport);
      Trainer trainer(&rank, &job, 1);
      trainer.transport = watched.table;
      MFSDP_TRY(trainer.create());
      MFSDP_TRY(trainer.step(0));
      const std::string want = update == MFSDP_BANDED_HOME ? "ggsgsgss" : "gggggggg";
      require(watched.order == want, "the order is " + watched.order);
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* ---- groups and replicas ---- */

GroupsJob banded_groups(GroupsJob job, mfsdp_banded_update update) {
  job.spoil_params = [](int32_t, std::size_t, std::vector<mfsdp_param> *params) {
    for (mfsdp_param &p : *params)
      if (p.role == MFSDP_ROLE_MATRIX) p.placement = MFSDP_PLACEMENT_BANDED;
  };
  job.options.bands = true;
  job.options.clip_norm = 1.5;
  tune(&job, [update](mfsdp_runtime_desc *desc) { desc->banded_update = update; });
  return job;
}

/* Ranks 0 and 1 share groups 1 and 3, but in group 2 they are in different instances, of which one
 * has no matrices: were the last round of one group left open while the next begins, 0 and 1 would
 * wait for each other. */
GroupsJob circle_job() {
  GroupsJob job;
  job.add_group({{0, 1, 2, 3}},
                {ref::experts("dense", 0, 5, 8, 12), ref::elementwise("e", 0, {99})});
  job.add_instance(true, {{0, 1}}, {ref::experts("a", 1, 3, 8, 10)});
  job.add_instance(false, {{2, 3}}, {ref::experts("b", 1, 4, 6, 10)});
  job.add_instance(true, {{0, 2}}, {ref::experts("c", 2, 3, 8, 10)});
  job.add_instance(false, {{1, 3}}, {ref::elementwise("d", 2, {50})});
  job.add_instance(true, {{0, 1}}, {ref::matrix("f", 3, 20, 10)});
  job.add_instance(false, {{2, 3}}, {ref::experts("g", 3, 6, 5, 10)});
  return job;
}

TEST(BandedGroups, EachItsOwnRounds) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      GroupsJob job = banded_groups(circle_job(), update);
      job.queue_kind = kind;
      job.deadline_us = 5 * 1000000;
      EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
    }
}

/* HSDP: sums over replicas come before, and each copy exchanges for itself. */
TEST(BandedGroups, Replicas) {
  for (const mfsdp_banded_update update : kUpdates) {
    GroupsJob job;
    job.add_group({{0, 1}, {2, 3}}, batched_job().model.tensors);
    job.groups[0][0].replicated = true;
    job = banded_groups(job, update);
    EXPECT_EQ(test::run_groups_job(job, 2, 3), "");
  }
}

/* ---- failure ---- */

/* Rank 2 leaves instead of ending the step: the others are told within the deadline. */
TEST(BandedFailure, APeerThatDoesNotCome) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      Job job = banded(batched_job(), update);
      job.queue_kind = kind;
      test::RanksOptions options = test::ranks_of(job, 3);
      options.world.deadline_us = 1000000;
      const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
        Trainer trainer(&rank, &job, 1);
        MFSDP_TRY(trainer.create());
        MFSDP_TRY(trainer.step(0));
        MFSDP_TRY(trainer.begin(1));
        MFSDP_TRY(trainer.micro_batch(1, 0));
        if (rank.rank == 2)
          return MFSDP_FAIL(&rank.context, MFSDP_E_PEER, "rank 2 has left in the middle");
        const mfsdp_status ended = trainer.end();
        return ended == MFSDP_OK ? trainer.destroy() : ended;
      });
      EXPECT_TRUE(result.clean()) << result.text();
      for (const test::RankOutcome &r : result.ranks)
        EXPECT_NE(r.status, MFSDP_OK) << result.text();
    }
}

/* An exchange of the first steps fails on one rank: nobody hangs, all are told why, and nothing
 * works afterwards. */
TEST(BandedFailure, AnExchangeThatFails) {
  for (const mfsdp_banded_update update : kUpdates)
    for (int64_t batch = 0; batch < 4; ++batch) {
      Job job = banded(batched_job(), update);
      job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
      test::RanksOptions options = test::ranks_of(job, 3);
      options.world.deadline_us = 2000000;
      const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
        WatchedTransport failing(rank.transport, rank.rank == 1 ? batch : -1);
        Trainer trainer(&rank, &job, 1);
        trainer.transport = failing.table;
        MFSDP_TRY(trainer.create());
        mfsdp_status status = MFSDP_OK;
        for (int64_t s = 0; s < 3 && status == MFSDP_OK; ++s)
          status = trainer.step(s);
        if (status == MFSDP_OK) return trainer.destroy();
        const mfsdp_error first = *mfsdp_context_error(&rank.context);
        require(trainer.begin(5) == MFSDP_E_POISONED, "the runtime goes on");
        require(mfsdp_runtime_destroy(trainer.runtime) == MFSDP_OK, "destroy after a failure");
        trainer.runtime = nullptr;
        rank.context.error = first;
        return first.status;
      });
      EXPECT_TRUE(result.clean()) << result.text();
      for (const test::RankOutcome &r : result.ranks) {
        EXPECT_NE(r.status, MFSDP_OK) << result.text();
        EXPECT_NE(std::string(r.error.message).find("is cut"), std::string::npos) << result.text();
      }
    }
}

/* Exchanges of bands that a rank takes part in, in one step of three ranks. */
int64_t exchanges_of(const Job &job) {
  std::atomic<int64_t> count{0};
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    WatchedTransport watched(rank.transport);
    Trainer trainer(&rank, &job, 1);
    trainer.transport = watched.table;
    MFSDP_TRY(trainer.create());
    MFSDP_TRY(trainer.step(0));
    if (rank.rank == 1) count = static_cast<int64_t>(watched.order.size());
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  return count;
}

/* The last exchange comes after the verdict, so that others may have a good one of the step in which a
 * rank fails. None of them ends another step, and none saves this one, which ranks may or may not have. */
TEST(BandedFailure, OfTheLastExchangeIsToldByTheNextWait) {
  for (const mfsdp_banded_update update : kUpdates)
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      Job job = banded(batched_job(), update);
      job.queue_kind = kind;
      const int64_t last = exchanges_of(job) - 1;
      ASSERT_GT(last, 0);
      test::RanksOptions options = test::ranks_of(job, 3);
      options.world.deadline_us = 2000000;
      const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
        WatchedTransport failing(rank.transport, rank.rank == 1 ? last : -1);
        Trainer trainer(&rank, &job, 1);
        trainer.transport = failing.table;
        MFSDP_TRY(trainer.create());
        mfsdp_status status = trainer.step(0);
        require(rank.rank != 1 || status == MFSDP_E_BACKEND, "rank 1 knows at once");
        if (status == MFSDP_OK) status = trainer.step(1);
        require(status != MFSDP_OK, "a step after one that not all have");
        const mfsdp_error first = *mfsdp_context_error(&rank.context);
        mfsdp_progress progress = mfsdp_progress_default();
        require(mfsdp_runtime_progress(trainer.runtime, &progress) == MFSDP_E_POISONED,
                "what a checkpoint begins with");
        require(trainer.destroy() == MFSDP_OK, "destroy after a failure");
        return mfsdp_context_take_error(&rank.context, &first);
      });
      EXPECT_TRUE(result.clean()) << result.text();
      for (const test::RankOutcome &r : result.ranks) {
        EXPECT_EQ(r.status, MFSDP_E_BACKEND) << result.text();
        EXPECT_NE(std::string(r.error.message).find("is cut"), std::string::npos) << result.text();
      }
    }
}

/* ---- what it refuses ---- */

void refuses(Job job, mfsdp_status status, const std::string &text,
             const std::function<void(mfsdp_runtime_desc *, mfsdp_hyper_group *)> &change) {
  job = banded(job, MFSDP_BANDED_HOME);
  test::RanksOptions options = test::ranks_of(job, 1);
#if MFSDP_EXAMPLE_LAPACKE
  options.host.lapack = mfsdp_host_lapacke();
#endif
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.make_plan());
    test::must_fail(
        rank,
        trainer.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *,
                                 mfsdp_hyper_group *groups) { change(desc, groups); }),
        status, text);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(BandedRules, WhatNeedsWholeMatrices) {
#if MFSDP_EXAMPLE_LAPACKE
  refuses(test::small_job(), MFSDP_E_UNSUPPORTED,
          "a is banded, and shampoo needs whole matrices from beginning to end; plan it owned "
          "(without allow_banded)",
          [](mfsdp_runtime_desc *, mfsdp_hyper_group *groups) {
            groups[0] = mfsdp_hyper_group_shampoo();
          });
#endif
  refuses(
      test::small_job(), MFSDP_E_UNSUPPORTED, "keep it owned (without allow_banded)",
      [](mfsdp_runtime_desc *, mfsdp_hyper_group *groups) { groups[0].muon.normalize_rows = 1; });
  refuses(
      test::small_job(), MFSDP_E_UNSUPPORTED,
      "a is banded, which needs masters and states on the device (state_space is 3)",
      [](mfsdp_runtime_desc *desc, mfsdp_hyper_group *) { desc->state_space = MFSDP_SPACE_HOST; });
  refuses(test::small_job(), MFSDP_E_ARGUMENT, "unknown banded_update 0",
          [](mfsdp_runtime_desc *desc, mfsdp_hyper_group *) {
            const int none = 0;
            std::memcpy(&desc->banded_update, &none, sizeof(none));
          });
}

TEST(BandedRules, RanksMustAgreeOnTheUpdate) {
  const Job job = banded(test::small_job(), MFSDP_BANDED_HOME);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.make_plan());
    const mfsdp_status status = trainer.make_runtime(
        [&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          if (rank.rank == 1) desc->banded_update = MFSDP_BANDED_EVERYWHERE;
        });
    require(status == MFSDP_E_MISMATCH, "ranks with different updates agree");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

} // namespace
