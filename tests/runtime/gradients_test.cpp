/* SPDX-License-Identifier: MIT */
/*
 * What becomes of gradients between backward and the optimizer: loss scaling, token weights,
 * missing ones, local accumulation and clipping, against the oracle bit for bit.
 */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

const mfsdp_host_queue_kind kKinds[] = {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER};

/* A cut tensor (three canonical blocks), matrices, a tied and a frozen one, three units. */
Job medium_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {110, 80}));
  job.model.tensors.push_back(ref::experts("experts", 1, 3, 8, 12));
  job.model.tensors.push_back(ref::elementwise("norm", 1, {40}));
  job.model.tensors.push_back(ref::frozen("mask", 1, {70, 3}));
  job.model.tensors.push_back(ref::split_heads("qkv", 2, 12, 20, 3));
  job.model.tensors.push_back(ref::elementwise("bias", 2, {10}));
  job.model.tensors.push_back(ref::tied("head", 2, job.model.tensors[0]));
  job.options.clip_norm = 2.0;
  return job;
}

/* ---- loss scaling ---- */

/* A power of two changes no bit as long as nothing overflows or underflows. */
TEST(LossScale, PowersOfTwoLeaveEveryBitAlone) {
  for (const mfsdp_dtype grad : {MFSDP_F32, MFSDP_BF16}) {
    Job plain = medium_job();
    test::set_dtypes(&plain.model, -1, MFSDP_BF16, grad, grad);
    Job scaled = plain;
    scaled.options.loss_scale.initial = 65536.0;
    scaled.options.loss_scale.growth = 4.0;
    scaled.options.loss_scale.growth_interval = 1;
    const test::Expected want(plain, 4, 4), expected(scaled, 4, 4);
    for (int64_t s = 0; s < 4; ++s) {
      const test::Expected::After &a = want.after(s), &b = expected.after(s);
      EXPECT_EQ(b.verdict.loss_scale, 65536.0 * std::pow(4.0, static_cast<double>(s)));
      EXPECT_FALSE(b.verdict.skipped);
      EXPECT_TRUE(test::same_bits(a.verdict.grad_norm, b.verdict.grad_norm));
      EXPECT_TRUE(test::same_bits(a.verdict.clip_scale, b.verdict.clip_scale));
      EXPECT_EQ(a.weights, b.weights);
      EXPECT_EQ(a.state0, b.state0);
      EXPECT_EQ(a.state1, b.state1);
    }
    for (const mfsdp_host_queue_kind kind : kKinds) {
      scaled.queue_kind = plain.queue_kind = kind;
      EXPECT_EQ(test::run_job(plain, 2, 2, want), "");
      EXPECT_EQ(test::run_job(scaled, 2, 2, expected), "");
    }
  }
}

/* Growth, its cap, back-off and the count of steps in between, on every rank. The infinity is in
 * one sample block only. */
TEST(LossScale, FollowsItsRule) {
  Job job = medium_job();
  /* Growing 2048 would give 4096: it ends at `largest`. */
  const std::vector<double> scales = {1024, 1024, 2048, 2048, 2560, 640, 640, 160, 160, 320, 320};
  job.options.loss_scale.initial = 1024;
  job.options.loss_scale.growth = 2;
  job.options.loss_scale.backoff = 0.25;
  job.options.loss_scale.largest = 2560;
  job.options.loss_scale.growth_interval = 2;
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return (step == 4 || step == 6) && block == 1 && use == 4 ? ref::Sample::kInf
                                                              : ref::Sample::kPresent;
  };
  const test::Expected expected(job, 4, 11);
  for (const mfsdp_host_queue_kind kind : kKinds)
    for (const int32_t world : {1, 2, 4}) {
      job.queue_kind = kind;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
        Trainer t(&rank, &job, 4 / world);
        int64_t applied = 0;
        MFSDP_TRY(t.create());
        for (int64_t s = 0; s < 11; ++s) {
          MFSDP_TRY(t.step(s));
          t.compare(expected, s);
          const bool skips = s == 4 || s == 6;
          applied += !skips;
          require(t.verdict.loss_scale == scales[static_cast<std::size_t>(s)],
                  "step " + std::to_string(s) + " had scale " +
                      std::to_string(t.verdict.loss_scale));
          require((t.verdict.skipped != 0) == skips && t.verdict.applied_steps == applied, "skips");
        }
        require(mfsdp_runtime_skipped_steps(t.runtime) == 2, "the count of skips");
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
    }
}

/* It may fall for ever, but stays a normal float: at 0 every gradient would look sound. */
TEST(LossScale, NeverFallsOutOfTheFloats) {
  Job job = test::small_job();
  job.script.sample = [](int64_t step, int64_t, int32_t) {
    return step < 8 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  job.options.loss_scale.initial = 1;
  job.options.loss_scale.backoff = std::ldexp(1.0, -25);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    for (int s = 0; s < 9; ++s) {
      MFSDP_TRY(t.step(s));
      require(t.verdict.skipped == (s < 8), "skips");
      require(t.verdict.loss_scale == std::ldexp(1.0, -25 * std::min(s, 5)), "the scale");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(LossScale, WithoutItTheScaleIsOneAlsoAfterASkip) {
  Job job = medium_job();
  job.script.sample = [](int64_t step, int64_t, int32_t) {
    return step == 0 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  EXPECT_EQ(test::run_job(job, 2, 1, test::Expected(job, 2, 2)), "");
}

/* f16 gradients that really overflow: the scale comes down until they fit, with the oracle's skips.
 */
TEST(LossScale, ComesDownFromRealOverflow) {
  for (const mfsdp_dtype grad : {MFSDP_F32, MFSDP_F16}) { /* F32: on the wire only */
    Job job = medium_job();
    test::set_dtypes(&job.model, -1, MFSDP_F16, grad, MFSDP_F16);
    job.options.loss_scale.initial = 8192;
    job.options.loss_scale.growth_interval = 2;
    const test::Expected expected(job, 4, 10);
    EXPECT_TRUE(expected.after(0).verdict.skipped);
    EXPECT_TRUE(expected.after(1).verdict.skipped);
    EXPECT_GT(expected.after(9).verdict.applied_steps, 2);
    for (const mfsdp_host_queue_kind kind : kKinds) {
      job.queue_kind = kind;
      EXPECT_EQ(test::run_job(job, 4, 1, expected), "");
      EXPECT_EQ(test::run_job(job, 2, 2, expected), "");
    }
  }
}

/* What a rank holds: states, and the bytes of every unit as it is materialized, and masters. */
struct Everything {
  std::vector<std::vector<unsigned char>> bytes;

  static std::vector<unsigned char> copy(const void *data, std::size_t nbytes) {
    const unsigned char *at = static_cast<const unsigned char *>(data);
    return nbytes > 0 ? std::vector<unsigned char>(at, at + nbytes) : std::vector<unsigned char>();
  }
  mfsdp_status take(Rank &rank, Trainer &t, const Job &job) {
    int32_t count = 0;
    bytes.clear();
    for (int32_t i = 0; i < job.model.count(); ++i) { /* first: it waits for the update */
      std::vector<float> master(static_cast<std::size_t>(job.model.at(i).numel()));
      MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, master.data()));
      bytes.push_back(copy(master.data(), master.size() * sizeof(float)));
    }
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(t.runtime), &count);
    for (int32_t i = 0; i < count; ++i)
      bytes.push_back(
          copy(states[i].data, static_cast<std::size_t>(states[i].count) * sizeof(float)));
    for (int32_t u = 0; u < job.model.unit_count(); ++u) {
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
      MFSDP_TRY(rank.finish());
      for (int32_t i : job.model.unit_tensors(u))
        bytes.push_back(
            copy(mfsdp_unit_param(t.runtime, i), static_cast<std::size_t>(job.model.at(i).numel()) *
                                                     mfsdp_dtype_nbytes(job.model.at(i).compute)));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
    }
    return MFSDP_OK;
  }
};

/* a7. Each kind of number, on the first, a middle and the last block, in owned and cut tensors. */
TEST(Skip, TouchesNothingOnAnyRank) {
  for (const mfsdp_host_queue_kind kind : kKinds)
    for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16})
      for (int64_t block = 0; block < 4; ++block) {
        Job job = medium_job();
        job.queue_kind = kind;
        test::set_dtypes(&job.model, -1, dtype, dtype, dtype);
        job.options.loss_scale.initial = 16;
        const int32_t use = block % 2 ? 0 : 4;
        job.script.sample = [=](int64_t step, int64_t b, int32_t u) {
          return step != 1 || b != block || u != use ? ref::Sample::kPresent
                 : block < 2                         ? ref::Sample::kNan
                                                     : ref::Sample::kInf;
        };
        const test::Expected expected(job, 4, 3);
        const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
          Trainer t(&rank, &job, 1);
          Everything before, after;
          MFSDP_TRY(t.create());
          MFSDP_TRY(t.step(0));
          MFSDP_TRY(before.take(rank, t, job));
          MFSDP_TRY(t.step(1));
          require(t.verdict.skipped == 1 && t.verdict.applied_steps == 1, "a skip");
          require(t.verdict.loss_scale == 16 && mfsdp_runtime_loss_scale(t.runtime) == 8,
                  "the scale comes down");
          MFSDP_TRY(after.take(rank, t, job));
          require(before.bytes == after.bytes, "a skipped step changed something");
          MFSDP_TRY(t.step(2));
          t.compare(expected, 2);
          MFSDP_TRY(after.take(rank, t, job));
          require(before.bytes != after.bytes, "an applied step changed nothing");
          return t.destroy();
        });
        EXPECT_TRUE(result.ok()) << "block " << block << ": " << result.text();
      }
}

/* ---- token weights ---- */

double weight_of(int64_t step, int64_t block) {
  if (step == 2) return 0.0; /* nobody had a token */
  return block % 3 == 1 ? 0.0 : 1.0 + static_cast<double>((7 * block + 3 * step) % 11) + 0.125;
}

TEST(Weights, DivideByTheirSumOverAllBlocks) {
  for (const mfsdp_host_queue_kind kind : kKinds) {
    Job job = medium_job();
    job.queue_kind = kind;
    job.script.weight = weight_of;
    job.options.loss_scale.initial = 32;
    job.options.loss_scale.growth_interval = 2;
    const test::Expected expected(job, 8, 4);
    double sum = 0;
    for (int64_t b = 0; b < 8; ++b)
      sum += weight_of(0, b);
    EXPECT_EQ(expected.after(0).verdict.weight_sum, sum);
    EXPECT_TRUE(expected.after(2).verdict.skipped);
    EXPECT_EQ(expected.after(3).verdict.applied_steps, 3);
    /* A step without tokens says nothing about overflow: the scale stays. */
    EXPECT_EQ(expected.after(2).verdict.loss_scale, 64);
    EXPECT_EQ(expected.after(3).verdict.loss_scale, 64);
    for (const int32_t world : {1, 2, 4, 8})
      EXPECT_EQ(test::run_job(job, world, 8 / world, expected), "");
  }
}

/* Worked out by hand: one element, AdamW with beta1 0, so exp_avg is the gradient that was used. */
TEST(Weights, AreNotAMeanOfMeans) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("w", 0, {1}));
  job.options.groups[1].beta1 = 0.0;
  job.options.groups[1].clipped = false;
  job.script.weight = [](int64_t, int64_t block) { return block == 0 ? 3.0 : 1.0; };
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    mfsdp_step_desc desc = mfsdp_step_desc_default();
    int32_t count = 0;
    float master = 0;
    MFSDP_TRY(t.create());
    MFSDP_TRY(mfsdp_step_begin(t.runtime, &desc));
    MFSDP_TRY(mfsdp_step_weight(t.runtime, rank.rank == 0 ? 3.0 : 1.0));
    MFSDP_TRY(mfsdp_step_value(t.runtime, rank.rank == 0 ? 2.0 : 6.0));
    MFSDP_TRY(mfsdp_unit_grads(t.runtime, 0)); /* the sums over tokens: 3 x 5 and 1 x 9 */
    *static_cast<float *>(mfsdp_unit_grad(t.runtime, 0)) = rank.rank == 0 ? 15.0f : 9.0f;
    MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 0));
    MFSDP_TRY(t.end());
    require(t.verdict.weight_sum == 4.0 && t.verdict.grad_norm == 6.0, "24 over 4 tokens");
    require(t.verdict.value_mean == 3.0, "(3 x 2 + 1 x 6) over 4 tokens");
    MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, &master));
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(t.runtime), &count);
    require(count == 0 || *static_cast<const float *>(states[0].data) == 6.0f, "the gradient");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Weights, WrongCalls) {
  Job job = test::small_job();
  job.script.weight = [](int64_t, int64_t block) { return 1.0 + static_cast<double>(block); };
  const test::Expected expected(job, 4, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    MFSDP_TRY(t.create());
    must_fail(rank, mfsdp_step_weight(t.runtime, 1.0), MFSDP_E_STATE,
              "step weight: no step is open");
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(t.micro_batch(0, 0));
    const mfsdp_counters before = rank.context.counters;
    must_fail(rank, mfsdp_step_end(t.runtime, 0), MFSDP_E_STATE,
              "step end: 1 of 2 micro-batches have a weight (mfsdp_step_weight)");
    require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0,
            "something was sent");
    for (const double bad : {-1.0, std::nan(""), HUGE_VAL, -HUGE_VAL})
      must_fail(rank, mfsdp_step_weight(t.runtime, bad), MFSDP_E_ARGUMENT, "needs 0 or more");
    MFSDP_TRY(t.micro_batch(0, 1));
    must_fail(rank, mfsdp_step_weight(t.runtime, 1.0), MFSDP_E_STATE,
              "step weight: more weights than micro-batches");
    MFSDP_TRY(t.end());
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(test::survives(test::small_job(), 2, 1, nullptr,
                           [](Rank &rank, Trainer &t) {
                             must_fail(rank, mfsdp_step_weight(t.runtime, 1.0), MFSDP_E_STATE,
                                       "step weight: the runtime was not made with weighted");
                             return MFSDP_OK;
                           }),
            "");
}

/* ---- missing gradients ---- */

/* Step 0: norm missing on odd blocks, bias on all but one, experts on all, and one use of the tied
 * tensor everywhere. Step 1: both uses of the tied one missing, the rest there. Step 2: everything
 * is. */
ref::Sample missing_sample(int64_t step, int64_t block, int32_t use) {
  const bool absent =
      step == 0   ? (use == 2 && block % 2 == 1) || (use == 5 && block != 3) || use == 1 || use == 0
      : step == 1 ? use == 0 || use == 6
                  : step == 2;
  return absent ? ref::Sample::kAbsent : ref::Sample::kPresent;
}

TEST(Missing, OnSomeRanksAndOnAll) {
  for (const bool zeros : {false, true})
    for (const mfsdp_host_queue_kind kind : kKinds) {
      Job job = medium_job();
      job.queue_kind = kind;
      job.options.missing_is_zero = zeros;
      for (ref::OracleGroup &g : job.options.groups)
        g.weight_decay = 0.5; /* so that an update with zeros shows */
      job.script.sample = missing_sample;
      const test::Expected expected(job, 4, 4);
      /* The policy must matter, or this test sees nothing. */
      EXPECT_EQ(expected.after(1).weights[0] == expected.after(0).weights[0], !zeros);
      EXPECT_EQ(expected.after(2).weights[1] == expected.after(1).weights[1], !zeros);
      for (const int32_t world : {1, 2, 4})
        EXPECT_EQ(test::run_job(job, world, 4 / world, expected), "") << "zeros " << zeros;
    }
}

TEST(Missing, WholeUnitsNobodyUses) {
  for (const bool zeros : {false, true}) {
    Job job = medium_job();
    job.options.missing_is_zero = zeros;
    job.script.unit_used = [](int64_t step,
                              int32_t unit) { /* 2 never without 0, which it is tied to */
                                              return step == 0 ? unit == 1
                                                               : unit != static_cast<int32_t>(step);
    };
    EXPECT_EQ(test::run_job(job, 4, 2, test::Expected(job, 8, 4)), "");
  }
}

TEST(Missing, WithLocalAccumulation) {
  for (const bool zeros : {false, true})
    for (const int32_t world : {1, 2, 4}) {
      Job job = medium_job();
      job.options.missing_is_zero = zeros;
      job.options.local_world = world;
      job.script.sample = missing_sample;
      EXPECT_EQ(test::run_job(job, world, 4, test::Expected(job, 4 * world, 4)), "")
          << "zeros " << zeros;
    }
}

/* ---- local accumulation ---- */

TEST(LocalAccumulation, EqualsItsOracle) {
  for (const mfsdp_host_queue_kind kind : kKinds)
    for (const int32_t world : {1, 2, 3, 4}) {
      if (MFSDP_TEST_TSAN && world % 2 == 0) continue;
      Job job = test::mixed_job();
      job.queue_kind = kind;
      job.options.local_world = world;
      const test::Expected expected(job, 3 * world, 2);
      EXPECT_EQ(test::run_job(job, world, 3, expected), "");
      for (const bool on_queue : {false, true}) {
        job.on_queue = on_queue;
        job.debug_poison = job.debug_check = 1;
        job.script.weight = weight_of;
        EXPECT_EQ(test::run_job(job, world, 3, test::Expected(job, 3 * world, 3)), "");
      }
    }
  Job plain = test::mixed_job(), local = plain; /* another order of additions, and it shows */
  local.options.local_world = 2;
  EXPECT_NE(test::Expected(plain, 6, 1).after(0).weights,
            test::Expected(local, 6, 1).after(0).weights);
}

/* Micro-batches add up in f32; then each rank's sum is rounded, once, to the wire's dtype. */
TEST(LocalAccumulation, WithANarrowWire) {
  for (const mfsdp_dtype wire : {MFSDP_F32, MFSDP_BF16, MFSDP_F16}) {
    Job job = medium_job();
    test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, wire);
    job.options.local_world = 2;
    EXPECT_EQ(test::run_job(job, 2, 3, test::Expected(job, 6, 2)), "") << mfsdp_dtype_name(wire);
  }
}

/* In 16 bits each micro-batch would be rounded. */
TEST(LocalAccumulation, RefusesNarrowSums) {
  for (const mfsdp_dtype grad : {MFSDP_BF16, MFSDP_F16}) {
    Job job = test::small_job(); /* nothing tied */
    test::set_dtypes(&job.model, -1, MFSDP_BF16, grad, grad);
    const test::Expected expected(job, 4, 1);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Trainer t(&rank, &job, 2);
      MFSDP_TRY(t.make_plan());
      const mfsdp_status status =
          t.make_runtime([](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *,
                            mfsdp_hyper_group *) { desc->local_accumulation = 1; });
      must_fail(rank, status, MFSDP_E_UNSUPPORTED,
                std::string("embed has gradients of ") + mfsdp_dtype_name(grad));
      mfsdp_plan_destroy(&rank.context, t.plan);
      t.plan = nullptr;
      MFSDP_TRY(t.create()); /* without it, it is fine */
      MFSDP_TRY(t.step(0));
      t.compare(expected, 0);
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Gradient traffic of one step of one rank, and the runtime's slots. */
struct Use {
  uint64_t payload_nbytes = 0, wire_nbytes = 0, transfer_count = 0;
  std::size_t slot_nbytes = 0;
};

std::vector<Use> use_of(const Job &job, int32_t world, int32_t micro_batches) {
  std::vector<Use> out(static_cast<std::size_t>(world));
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, micro_batches);
    Use *use = &out[static_cast<std::size_t>(rank.rank)];
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    use->payload_nbytes = rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].payload_nbytes;
    use->wire_nbytes = rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].wire_nbytes;
    use->transfer_count = rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].transfer_count;
    use->slot_nbytes = rank.context.current_nbytes[MFSDP_MEMORY_SLOT];
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  return out;
}

int64_t aligned(int64_t count) {
  return (count + 127) / 128 * 128;
}

TEST(LocalAccumulation, MovesOneMicroBatchWorthAndHoldsASlotForEveryUnit) {
  Job plain = medium_job();
  Job local = plain;
  const int32_t world = 4, micro_batches = 5;
  local.options.local_world = world;
  const std::vector<Use> often = use_of(plain, world, micro_batches);
  const std::vector<Use> once = use_of(local, world, micro_batches);
  int64_t longest = 0, longest_full = 0;
  for (int32_t u = 0; u < 3; ++u) {
    int64_t count = 0, full = 0;
    for (int32_t i : plain.model.unit_tensors(u)) {
      if (plain.model.owner(i) != i) continue;
      full += aligned(plain.model.at(i).numel());
      if (plain.model.at(i).role != ref::Role::kFrozen) count += aligned(plain.model.at(i).numel());
    }
    longest = std::max(longest, count);
    longest_full = std::max(longest_full, full);
  }
  uint64_t sum = 0;
  for (std::size_t r = 0; r < once.size(); ++r) {
    EXPECT_EQ(often[r].payload_nbytes, once[r].payload_nbytes * micro_batches);
    EXPECT_EQ(often[r].wire_nbytes, once[r].wire_nbytes * micro_batches);
    EXPECT_EQ(often[r].transfer_count, once[r].transfer_count * micro_batches);
    sum += once[r].payload_nbytes;
    /* One active unit and the owner of its tied tensor; gradients of all three. */
    EXPECT_EQ(often[r].slot_nbytes, static_cast<std::size_t>(2 * longest_full + 2 * longest) * 4);
    EXPECT_EQ(once[r].slot_nbytes, static_cast<std::size_t>(2 * longest_full + 3 * longest) * 4);
  }
  int64_t trainable = 0;
  for (int32_t i = 0; i < plain.model.count(); ++i)
    if (plain.model.owner(i) == i && plain.model.at(i).role != ref::Role::kFrozen)
      trainable += plain.model.at(i).numel();
  EXPECT_EQ(sum, static_cast<uint64_t>(trainable) * 4 * (world - 1));
}

/* A unit that was closed less often than announced is not forgotten: the step cannot end before. */
TEST(LocalAccumulation, AnUnfinishedUnitIsNamed) {
  Job job = test::small_job();
  job.options.local_world = 2;
  const test::Expected expected(job, 4, 1);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.begin(0));
    MFSDP_TRY(t.micro_batch(0, 0));
    require(rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].wire_nbytes == 0, "reduced too early");
    require(mfsdp_unit_grad(t.runtime, 0) == nullptr, "an address after the unit was closed");
    must_fail(rank, mfsdp_step_end(t.runtime, 0), MFSDP_E_STATE,
              "step end: unit 0 has accumulated gradients that were not reduced");
    MFSDP_TRY(t.micro_batch(0, 1));
    must_fail(rank, mfsdp_unit_grads(t.runtime, 0), MFSDP_E_STATE,
              "all 2 micro-batches announced in mfsdp_step_begin are reduced");
    MFSDP_TRY(t.end());
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- clipping ---- */

/* a6: cut and owned tensors count once in the norm. All tensors clipped, or the element-wise ones
 * only: the norm is over all of them either way, and the same on every rank for every world. */
TEST(Clip, ScopeAndNormDoNotDependOnTheWorld) {
  std::vector<std::vector<std::vector<float>>> weights;
  std::vector<double> norms;
  for (const int scope : {0, 1, 2}) { /* none, element-wise only, all */
    Job job = test::mixed_job();
    job.options.clip_norm = 0.5;
    for (ref::OracleGroup &g : job.options.groups)
      g.clipped = scope == 2 || (scope == 1 && !g.muon);
    const test::Expected expected(job, 8, 2);
    EXPECT_LT(expected.after(0).verdict.clip_scale, 0.5);
    weights.push_back(expected.after(1).weights);
    norms.push_back(expected.after(0).verdict.grad_norm);
    for (const mfsdp_planner planner : {MFSDP_PLANNER_SCOPE_GREEDY, MFSDP_PLANNER_ROUND_ROBIN})
      for (const int32_t world : {1, 2, 4, 8}) {
        if (MFSDP_TEST_TSAN && world != 4) continue; /* norms are compared, not threads */
        job.planner = planner;
        EXPECT_EQ(test::run_job(job, world, 8 / world, expected), "") << "scope " << scope;
      }
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    EXPECT_EQ(test::run_job(job, 4, 2, expected), "") << "scope " << scope;
  }
  EXPECT_TRUE(test::same_bits(norms[0], norms[1]) && test::same_bits(norms[0], norms[2]));
  EXPECT_NE(weights[0], weights[1]);
  EXPECT_NE(weights[1], weights[2]);
}

TEST(Clip, ByDefaultOnlyElementWiseGroups) {
  EXPECT_EQ(mfsdp_hyper_group_muon(MFSDP_MUON_TORCH).clipped, 0);
  EXPECT_EQ(mfsdp_hyper_group_adamw(1e-3, 0.1).clipped, 1);
}

/* a5: every micro-batch counts also where nothing is sharded. */
TEST(Accumulation, FourMicroBatchesOnOneAndTwoRanks) {
  const Job job = medium_job();
  EXPECT_EQ(test::run_job(job, 1, 4, test::Expected(job, 4, 2)), "");
  EXPECT_EQ(test::run_job(job, 2, 4, test::Expected(job, 8, 2)), "");
  EXPECT_NE(test::Expected(job, 1, 1).after(0).weights, test::Expected(job, 4, 1).after(0).weights);
}

/* a8: one tensor under two names gets one update from both uses. */
TEST(Tied, OneUpdateFromBothUses) {
  Job job = medium_job();
  Job without = job;
  without.model.tensors.pop_back();
  const test::Expected expected(job, 4, 2);
  EXPECT_NE(expected.after(0).weights[0], test::Expected(without, 4, 1).after(0).weights[0]);
  for (const mfsdp_host_queue_kind kind : kKinds) {
    job.queue_kind = kind;
    EXPECT_EQ(test::run_job(job, 4, 1, expected), "");
  }
}

} // namespace
