/* SPDX-License-Identifier: MIT */
/*
 * 16-bit parameters, gradients and wires beside fp32 masters: what is materialized, what is summed,
 * what is decayed, all against the oracle bit for bit, for every number of ranks.
 */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::Rank;
using test::require;
using test::Trainer;

struct Dtypes {
  mfsdp_dtype compute, grad, wire;
};

std::string name_of(const Dtypes &d) {
  return std::string("compute ") + mfsdp_dtype_name(d.compute) + ", grad " +
         mfsdp_dtype_name(d.grad) + ", wire " + mfsdp_dtype_name(d.wire);
}

/* Everything the runtime takes. */
std::vector<Dtypes> all_dtypes() {
  std::vector<Dtypes> out;
  for (const mfsdp_dtype compute : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
    for (const mfsdp_dtype grad : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
      for (const mfsdp_dtype wire : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
        if (wire == grad || grad == MFSDP_F32) out.push_back({compute, grad, wire});
  return out;
}

void set_dtypes(ref::Model *model, int32_t unit, const Dtypes &d) {
  test::set_dtypes(model, unit, d.compute, d.grad, d.wire);
}

void set_all_dtypes(ref::Model *model, const Dtypes &d) {
  set_dtypes(model, -1, d);
}

/* Another combination in every unit; the head of unit 5 is tied to a tensor with a bf16 wire. */
Job mixed_dtypes_job() {
  Job job = test::mixed_job();
  set_dtypes(&job.model, 0, {MFSDP_BF16, MFSDP_F32, MFSDP_BF16});
  set_dtypes(&job.model, 1, {MFSDP_BF16, MFSDP_BF16, MFSDP_BF16});
  set_dtypes(&job.model, 2, {MFSDP_F16, MFSDP_F16, MFSDP_F16});
  set_dtypes(&job.model, 4, {MFSDP_BF16, MFSDP_F32, MFSDP_F16});
  set_dtypes(&job.model, 5, {MFSDP_F32, MFSDP_F32, MFSDP_F32});
  return job;
}

/* A frozen tensor, a cut one, views, and one tied across units. */
Job one_dtype_job(const Dtypes &d) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {110, 80}));
  job.model.tensors.push_back(ref::experts("experts", 1, 3, 8, 12));
  job.model.tensors.push_back(ref::frozen("mask", 1, {70, 3}));
  job.model.tensors.push_back(ref::split_heads("qkv", 2, 12, 20, 3));
  job.model.tensors.push_back(ref::elementwise("bias", 2, {10}));
  job.model.tensors.push_back(ref::tied("head", 2, job.model.tensors[0]));
  job.options.clip_norm = 2.0;
  set_all_dtypes(&job.model, d);
  return job;
}

std::vector<std::vector<float>> initial_masters(const ref::Model &model) {
  std::vector<std::vector<float>> out;
  for (int32_t i = 0; i < model.count(); ++i) {
    out.emplace_back(static_cast<std::size_t>(model.at(i).numel()));
    ref::synthetic_init(model.seed, model.owner(i), 0, model.at(i).numel(), out.back().data());
  }
  return out;
}

/* Every rank's full parameters are the masters, each rounded once to its compute dtype. */
mfsdp_status check_materialized(Rank &rank, Trainer &t, const Job &job,
                                const std::vector<std::vector<float>> &masters) {
  for (int32_t unit = 0; unit < job.model.unit_count(); ++unit) {
    MFSDP_TRY(mfsdp_unit_acquire(t.runtime, unit, MFSDP_USE_EVALUATE));
    MFSDP_TRY(rank.finish());
    for (const int32_t i : job.model.unit_tensors(unit)) {
      const ref::Tensor &tensor = job.model.at(i);
      const void *full = mfsdp_unit_param(t.runtime, i);
      std::vector<float> got, want = masters[static_cast<std::size_t>(i)];
      require(full != nullptr || tensor.numel() == 0, "no address");
      for (int64_t k = 0; k < tensor.numel(); ++k)
        got.push_back(static_cast<float>(mfsdp_element_get(full, tensor.compute, k)));
      ref::round_all(tensor.compute, &want);
      const std::string wrong =
          test::difference("materialized " + tensor.name, got.data(), want.data(), tensor.numel());
      require(wrong.empty(), wrong);
    }
    MFSDP_TRY(mfsdp_unit_release(t.runtime, unit));
  }
  return MFSDP_OK;
}

std::string train(const Job &job, int32_t world, int32_t micro_batches,
                  const test::Expected &expected) {
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, micro_batches);
    MFSDP_TRY(t.create());
    MFSDP_TRY(check_materialized(rank, t, job, initial_masters(job.model)));
    for (int64_t s = 0; s < expected.count(); ++s) {
      MFSDP_TRY(t.step(s));
      t.compare(expected, s);
      MFSDP_TRY(check_materialized(rank, t, job, expected.after(s).weights));
    }
    return t.destroy();
  });
  return result.ok() ? "" : "world " + std::to_string(world) + ": " + result.text();
}

/* The oracle's rounding is arithmetic of its own; it and the library's agree on what rounding is.
 */
TEST(Precision, TheOracleRoundsToNearestEven) {
  EXPECT_EQ(ref::round_to(MFSDP_BF16, 1.0f + 1.0f / 256), 1.0f);              /* a tie, to even */
  EXPECT_EQ(ref::round_to(MFSDP_BF16, 1.0f + 3.0f / 256), 1.0f + 4.0f / 256); /* a tie, to even */
  EXPECT_EQ(ref::round_to(MFSDP_F16, 65519.0f), 65504.0f);
  EXPECT_EQ(ref::round_to(MFSDP_F16, -65520.0f), -HUGE_VALF);
  EXPECT_EQ(ref::round_to(MFSDP_F16, std::ldexp(1.0f, -25)), 0.0f);
  EXPECT_EQ(ref::round_to(MFSDP_F16, std::ldexp(1.5f, -24)), std::ldexp(1.0f, -23));
  for (uint64_t i = 0; i < 20000; ++i) {
    const float x = mfsdp_f32_from_bits(static_cast<uint32_t>(ref::mix(i)));
    if (!std::isfinite(x)) continue;
    const uint16_t bf16 = mfsdp_bf16_from_f32(x), f16 = mfsdp_f16_from_f32(x);
    ASSERT_EQ(mfsdp_bits_from_f32(ref::round_to(MFSDP_BF16, x)),
              mfsdp_bits_from_f32(mfsdp_f32_from_bf16(bf16)))
        << x;
    ASSERT_EQ(mfsdp_bits_from_f32(ref::round_to(MFSDP_F16, x)),
              mfsdp_bits_from_f32(mfsdp_f32_from_f16(f16)))
        << x;
  }
}

TEST(Precision, EveryCombinationEqualsTheOracle) {
  for (const Dtypes &d : all_dtypes()) {
    Job job = one_dtype_job(d);
    const test::Expected expected(job, 8, 2);
    if (!MFSDP_TEST_TSAN) { /* the same threads for all */
      EXPECT_EQ(train(job, 4, 2, expected), "") << name_of(d);
    }
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    EXPECT_EQ(train(job, 2, 4, expected), "") << name_of(d) << ", worker queues";
  }
}

/* The same sample blocks on 1 to 8 ranks: the same bits, with another dtype in every unit. */
TEST(Precision, MixedUnitsDoNotDependOnTheWorld) {
  Job job = mixed_dtypes_job();
  const test::Expected expected(job, 8, 2);
  for (const int32_t world : {1, 2, 4, 8})
    EXPECT_EQ(train(job, world, 8 / world, expected), "");
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  job.tune = [](mfsdp_runtime_desc *d) {
    d->prefetch_depth = 2;
    d->reduce_depth = 1;
  };
  for (const bool on_queue : {false, true}) {
    job.on_queue = on_queue;
    EXPECT_EQ(train(job, 4, 2, expected), "") << "worker queues, on a queue " << on_queue;
  }
  job.planner = MFSDP_PLANNER_ROUND_ROBIN;
  job.debug_poison = job.debug_check = 1;
  EXPECT_EQ(train(job, 3, 1, test::Expected(job, 3, 2)), "");
}

/* ---- what adds up in a gradient buffer ---- */

/* Two uses of a tied tensor in one buffer: its f32 sum is rounded once, to the wire. In 16 bits it
 * would be rounded twice, and that shows; so it is refused, whichever name is the alias. */
TEST(Precision, TiedGradientsAddUpInF32) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {110, 80}));
  job.model.tensors.push_back(ref::matrix("a", 1, 12, 10));
  job.model.tensors.push_back(ref::tied("head", 1, job.model.tensors[0]));
  job.model.tensors.push_back(ref::tied("again", 0, job.model.tensors[0])); /* in its own unit */
  for (const mfsdp_dtype narrow : {MFSDP_BF16, MFSDP_F16}) {
    set_all_dtypes(&job.model, {narrow, MFSDP_F32, narrow});
    const test::Expected expected(job, 4, 2);
    EXPECT_EQ(train(job, 2, 2, expected), "");
    EXPECT_EQ(train(job, 4, 1, expected), "");
    Job refused = job;
    for (ref::Tensor &t : refused.model.tensors)
      t.grad = narrow;
    EXPECT_NE(test::Expected(refused, 4, 1).after(0).weights[0], expected.after(0).weights[0]);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Trainer t(&rank, &refused, 2);
      MFSDP_TRY(t.make_plan());
      test::must_fail(rank, t.make_runtime(), MFSDP_E_UNSUPPORTED,
                      std::string("head is tied to embed and has gradients of ") +
                          mfsdp_dtype_name(narrow) + "; its uses add up in that buffer");
      require(t.runtime == nullptr, "*out");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* ---- decay ---- */

/* 1 - lr * weight_decay is 1 in bf16, so a decay of the bf16 parameter would never happen. */
TEST(Precision, DecayActsOnTheMaster) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("w", 0, {500}));
  job.model.tensors.push_back(ref::matrix("m", 0, 20, 10, 1));
  set_all_dtypes(&job.model, {MFSDP_BF16, MFSDP_BF16, MFSDP_BF16});
  job.options.groups[1].lr = 1e-3;
  job.options.groups[1].weight_decay = 0.1;
  job.options.missing_is_zero = true;
  job.script.sample = [](int64_t, int64_t, int32_t) { return ref::Sample::kAbsent; };
  ASSERT_EQ(ref::round_to(MFSDP_BF16, 1.0f - 1e-3f * 0.1f), 1.0f);
  const float decay = static_cast<float>(1.0 - 1e-3 * 0.1);
  const std::vector<std::vector<float>> before = initial_masters(job.model);
  std::vector<std::vector<float>> after = before;
  int64_t changed = 0, count = 0;
  for (std::vector<float> &w : after)
    for (int step = 0; step < 100; ++step)
      for (float &x : w)
        x *= decay;
  for (std::size_t i = 0; i < after.size(); ++i)
    for (std::size_t k = 0; k < after[i].size(); ++k, ++count)
      changed += ref::round_to(MFSDP_BF16, after[i][k]) != ref::round_to(MFSDP_BF16, before[i][k]);
  EXPECT_GT(changed, count / 2); /* 1% is more than a bf16 step everywhere */
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    for (int step = 0; step < 100; ++step)
      MFSDP_TRY(t.step(0)); /* the script's step 0: lr_factor 1 */
    MFSDP_TRY(check_materialized(rank, t, job, after));
    for (int32_t i = 0; i < 2; ++i) {
      const std::vector<float> &want = after[static_cast<std::size_t>(i)];
      std::vector<float> got(want.size());
      MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, got.data()));
      require(got == want, "the master");
    }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- frozen ---- */

/* Every second tensor is frozen, in units of every dtype, with much decay: not a byte of them
 * changes, and the rest equals the oracle. (compare also counts the states: none for a frozen
 * tensor.) */
TEST(Precision, AFrozenHalfKeepsItsBytes) {
  for (const Dtypes &d :
       {Dtypes{MFSDP_F32, MFSDP_F32, MFSDP_F32}, Dtypes{MFSDP_BF16, MFSDP_BF16, MFSDP_BF16},
        Dtypes{MFSDP_F16, MFSDP_F32, MFSDP_BF16}}) {
    Job job = one_dtype_job(d);
    for (ref::OracleGroup &g : job.options.groups)
      g.weight_decay = 5.0;
    for (const std::size_t i : {std::size_t{1}, std::size_t{3}}) {
      job.model.tensors[i] = ref::frozen(job.model.tensors[i].name, job.model.tensors[i].unit,
                                         job.model.tensors[i].shape);
    }
    set_all_dtypes(&job.model, d);
    const test::Expected expected(job, 4, 3);
    std::vector<float> frozen(240);
    ref::synthetic_init(job.model.seed, 3, 0, 240, frozen.data());
    ref::round_all(d.compute, &frozen);
    EXPECT_EQ(expected.after(2).weights[3],
              frozen); /* what is compared with is the initial value */
    EXPECT_EQ(train(job, 4, 1, expected), "") << name_of(d);
    job.tune = [](mfsdp_runtime_desc *desc) { desc->state_space = MFSDP_SPACE_HOST; };
    EXPECT_EQ(train(job, 2, 2, expected), "") << name_of(d) << ", offloaded";
  }
}

TEST(Precision, AUnitOfFrozenTensorsAlone) {
  Job job = test::small_job();
  job.model.tensors.push_back(ref::frozen("table", 3, {100, 50}));
  set_dtypes(&job.model, 3, {MFSDP_F16, MFSDP_F32, MFSDP_F32});
  EXPECT_EQ(train(job, 3, 1, test::Expected(job, 3, 2)), "");
}

/* ---- a9: many ranks ---- */

struct Sums {
  std::vector<double> exact, magnitude; /* of the unrounded terms, in float64 */
  std::vector<float> bf16_chain;        /* what adding in bf16 would give */
};

Job many_ranks_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("w", 0, {5000}));
  set_all_dtypes(&job.model, {MFSDP_F32, MFSDP_BF16, MFSDP_BF16});
  job.options.groups[1].beta1 = 0.0; /* so that exp_avg is the summed gradient itself */
  job.options.groups[1].clipped = false;
  job.max_micro_batches = 64;
  return job;
}

Sums sums_of(const Job &job, int64_t blocks) {
  const int64_t numel = job.model.at(0).numel();
  const std::size_t count = static_cast<std::size_t>(numel);
  Sums out;
  std::vector<float> weight(count), grad(count);
  ref::synthetic_init(job.model.seed, 0, 0, numel, weight.data());
  out.exact.resize(count);
  out.magnitude.resize(count);
  out.bf16_chain.resize(count);
  for (int64_t b = 0; b < blocks; ++b) {
    std::fill(grad.begin(), grad.end(), 0.0f);
    ref::synthetic_backward(job.model.seed, 0, b, 0, ref::Sample::kPresent, weight.data(), numel,
                            grad.data());
    for (std::size_t i = 0; i < count; ++i) {
      out.exact[i] += static_cast<double>(grad[i]);
      out.magnitude[i] += std::fabs(static_cast<double>(grad[i]));
      out.bf16_chain[i] =
          ref::round_to(MFSDP_BF16, out.bf16_chain[i] + ref::round_to(MFSDP_BF16, grad[i]));
    }
  }
  return out;
}

/* The gradient as the owners have it after one step with grad_weight 1, over all ranks. */
std::vector<float> summed_gradient(const Job &job, int32_t world, int32_t micro_batches) {
  std::vector<float> out(static_cast<std::size_t>(job.model.at(0).numel()), NAN);
  test::RanksOptions options = test::ranks_of(job, world);
  options.world.deadline_us = 100 * 1000000; /* many threads on few cores */
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    Trainer t(&rank, &job, micro_batches);
    MFSDP_TRY(t.create());
    mfsdp_step_desc desc = mfsdp_step_desc_default();
    desc.micro_batch_count = micro_batches;
    MFSDP_TRY(mfsdp_step_begin(t.runtime, &desc));
    for (int32_t m = 0; m < micro_batches; ++m)
      MFSDP_TRY(t.micro_batch(0, m));
    MFSDP_TRY(t.end());
    std::vector<float> full(out.size());
    MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, full.data())); /* comes after the update */
    int32_t state_count = 0, piece_count = 0;
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(t.runtime), &state_count);
    const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, -1, &piece_count);
    for (int32_t p = 0; p < piece_count; ++p)
      for (int32_t s = 0; s < state_count && pieces[p].owner == rank.rank; ++s)
        if (states[s].count == pieces[p].count && std::string(states[s].name) == "exp_avg")
          std::memcpy(out.data() + pieces[p].first, states[s].data,
                      static_cast<std::size_t>(pieces[p].count) * sizeof(float));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  return out;
}

/*
 * Each bf16 term is off by at most half a unit in its 8 digits, 2^-8 of its size (2^-9 above the
 * middle of a binade; 2^-8 is the bound), the fp32 chain by at most 2^-24 of the running sum in
 * each of the 63 additions: |error| <= (2^-8 + 63 * 2^-24 * (1 + 2^-8)) * sum of |terms|. W is not
 * in it: the terms are rounded once, wherever they come from, and never again on their way.
 */
TEST(Precision, ErrorOfBf16GradientsDoesNotGrowWithRanks) {
  const Job inline_job = many_ranks_job();
  Job worker_job = inline_job;
  worker_job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  const int64_t blocks = 64;
  const Sums sums = sums_of(inline_job, blocks);
  const double bound = std::ldexp(1.0, -8) + 63 * std::ldexp(1.0, -24) * (1 + std::ldexp(1.0, -8));
  std::vector<float> first;
  double worst_chain = 0;
  for (std::size_t i = 0; i < sums.exact.size(); ++i)
    worst_chain =
        std::max(worst_chain, std::fabs(static_cast<double>(sums.bf16_chain[i]) - sums.exact[i]) /
                                  sums.magnitude[i]);
  EXPECT_GT(worst_chain, 2 * bound); /* a sum in bf16 would not pass */
  for (const int32_t world : {8, 16, 32, 64}) {
    const std::vector<float> got =
        summed_gradient(inline_job, world, static_cast<int32_t>(blocks) / world);
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i)
      worst = std::max(worst,
                       std::fabs(static_cast<double>(got[i]) - sums.exact[i]) / sums.magnitude[i]);
    EXPECT_LE(worst, bound) << "world " << world;
    EXPECT_GT(worst, 0) << "nothing was rounded";
    if (first.empty()) first = got;
    EXPECT_EQ(test::difference("the sum", got.data(), first.data(), 5000), "") << "world " << world;
  }
#if MFSDP_TEST_SANITIZER
  const int32_t world = 16;
#else
  const int32_t world = 64;
#endif
  const std::vector<float> got =
      summed_gradient(worker_job, world, static_cast<int32_t>(blocks) / world);
  EXPECT_EQ(test::difference("the sum", got.data(), first.data(), 5000), "") << "worker queues";
}

/* ---- d9: state keeps its type ---- */

/* State, masters and counts are copied out, everything is made anew, and training goes on with the
 * same bits, whatever the parameters' and gradients' dtypes and wherever the state is: the verdict,
 * AdamW's bias correction and the loss scale included. */
TEST(Precision, StateIsF32AndTrainingResumesFromIt) {
  std::vector<mfsdp_space> spaces = {MFSDP_SPACE_DEVICE, MFSDP_SPACE_PINNED};
  for (const Dtypes &d : all_dtypes()) {
    std::swap(spaces[0], spaces[1]);
    Job job = one_dtype_job(d);
    job.tune = [&](mfsdp_runtime_desc *desc) { desc->state_space = spaces[0]; };
    job.options.loss_scale.initial = 4.0;
    job.options.loss_scale.growth_interval = 2; /* grows before the last step */
    job.script.sample = [](int64_t step, int64_t block, int32_t use) {
      return step == 1 && block == 1 && use == 0 ? ref::Sample::kNan : ref::Sample::kPresent;
    };
    const test::Expected expected(job, 2, 6);
    require(expected.after(1).verdict.skipped, "nothing was skipped");
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      std::vector<std::vector<float>> masters, saved;
      mfsdp_progress progress = mfsdp_progress_default();
      int32_t count = 0;
      Trainer before(&rank, &job, 1);
      MFSDP_TRY(before.create());
      for (int64_t s = 0; s < 3; ++s)
        MFSDP_TRY(before.step(s));
      before.compare(expected, 2);
      MFSDP_TRY(mfsdp_runtime_progress(before.runtime, &progress));
      require(progress.step == 3 && progress.applied_steps == 2 && progress.skipped_steps == 1 &&
                  progress.steps_since_skip == 1,
              "the counts");
      for (int32_t i = 0; i < job.model.count(); ++i) {
        masters.emplace_back(static_cast<std::size_t>(job.model.at(i).numel()));
        MFSDP_TRY(mfsdp_param_export(before.runtime, i, -1, masters.back().data()));
      }
      const mfsdp_optimizer_state *states =
          mfsdp_optimizer_states(mfsdp_runtime_optimizer(before.runtime), &count);
      for (int32_t i = 0; i < count; ++i) {
        const float *data = static_cast<const float *>(states[i].data);
        require(states[i].dtype == MFSDP_F32, "a state is not f32");
        saved.emplace_back(data, data + states[i].count);
      }
      MFSDP_TRY(before.destroy());
      Trainer after(&rank, &job, 1);
      MFSDP_TRY(after.make_plan());
      MFSDP_TRY(after.make_runtime());
      MFSDP_TRY(mfsdp_runtime_init(
          after.runtime,
          [](void *user, int32_t param, int64_t first, int64_t n, float *dst) {
            const auto *all = static_cast<const std::vector<std::vector<float>> *>(user);
            std::memcpy(dst, (*all)[static_cast<std::size_t>(param)].data() + first,
                        static_cast<std::size_t>(n) * sizeof(float));
          },
          &masters));
      states = mfsdp_optimizer_states(mfsdp_runtime_optimizer(after.runtime), &count);
      require(count == static_cast<int32_t>(saved.size()), "another number of states");
      for (int32_t i = 0; i < count; ++i)
        std::memcpy(states[i].data, saved[static_cast<std::size_t>(i)].data(),
                    saved[static_cast<std::size_t>(i)].size() * sizeof(float));
      MFSDP_TRY(mfsdp_runtime_resume(after.runtime, &progress));
      require(mfsdp_runtime_skipped_steps(after.runtime) == 1, "skipped steps");
      for (int64_t s = 3; s < 6; ++s) {
        MFSDP_TRY(after.step(s));
        after.compare(expected, s);
      }
      return after.destroy();
    });
    EXPECT_TRUE(result.ok()) << name_of(d) << ": " << result.text();
  }
}

} // namespace
