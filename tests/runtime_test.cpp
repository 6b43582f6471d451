/* SPDX-License-Identifier: MIT */
/*
 * The runtime against the oracle, bit for bit (DESIGN, "Proof"), and the sharding, reduction and
 * optimizer faults that similar software had. Wrong calls, faults and counters are tested in
 * tests/runtime/.
 */
#include "runtime/runtime_rig.h"

namespace {

using test::Expected;
using test::Job;
using test::run_job;

#if MFSDP_TEST_SANITIZER
const int64_t kSteps = 2;
#else
const int64_t kSteps = 4;
#endif

struct Shape {
  int32_t world, micro_batches;
};

std::vector<Shape> shapes_of_eight() {
  return {{1, 8}, {2, 4}, {4, 2}, {8, 1}};
}

/* Every world and micro-batch count of one product against one oracle. */
void expect_equal(const Job &job, const std::vector<Shape> &shapes, int64_t steps = kSteps) {
  const int64_t blocks = shapes[0].world * shapes[0].micro_batches;
  const Expected expected(job, blocks, steps);
  for (const Shape &s : shapes) {
    ASSERT_EQ(s.world * s.micro_batches, blocks);
    EXPECT_EQ(run_job(job, s.world, s.micro_batches, expected), "");
  }
}

std::vector<mfsdp_planner> planners() {
#if MFSDP_TEST_SANITIZER
  return {MFSDP_PLANNER_SCOPE_GREEDY};
#else
  return {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY, MFSDP_PLANNER_SCOPE_GREEDY};
#endif
}

TEST(Oracle, EveryShapeOfEightBlocks) {
  for (const mfsdp_host_math *math : test::maths())
    for (const double clip : {0.0, 1.5})
      for (const mfsdp_planner planner : planners()) {
        Job job = test::mixed_job();
        job.math = math;
        job.planner = planner;
        job.options.clip_norm = clip;
        expect_equal(job, shapes_of_eight());
      }
}

TEST(Oracle, WorldsThatDivideNothing) {
  for (const mfsdp_planner planner : planners()) {
    Job job = test::mixed_job();
    job.planner = planner;
    expect_equal(job, {{3, 1}, {1, 3}});
    expect_equal(job, {{3, 2}, {2, 3}, {1, 6}});
    expect_equal(job, {{7, 1}, {1, 7}});
  }
}

TEST(Oracle, SeesTheOrderOfTerms) { /* otherwise its equality would prove little */
  const ref::Model model = test::mixed_model();
  std::vector<float> weight(12000), term(12000), forward(12000, 0.0f), backward(12000, 0.0f);
  ref::synthetic_init(model.seed, 0, 0, 12000, weight.data());
  for (int64_t b = 0; b < 8; ++b)
    for (std::vector<float> *sum : {&forward, &backward}) {
      term.assign(12000, 0.0f);
      ref::synthetic_backward(model.seed, 0, sum == &forward ? b : 7 - b, 0, ref::Sample::kPresent,
                              weight.data(), 12000, term.data());
      for (std::size_t i = 0; i < term.size(); ++i)
        (*sum)[i] += term[i];
    }
  int64_t differ = 0;
  for (std::size_t i = 0; i < term.size(); ++i)
    differ += forward[i] != backward[i];
  EXPECT_GT(differ, 4000);
}

TEST(Oracle, WorkerQueuesAndAComputeQueueOfTheCaller) {
  for (const bool on_queue : {false, true})
    for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
      Job job = test::mixed_job();
      job.queue_kind = kind;
      job.on_queue = on_queue;
      expect_equal(job, {{4, 2}, {2, 4}}, kSteps);
    }
}

TEST(Oracle, MoreSlotsAndAnyChunk) {
  Job job = test::mixed_job();
  job.active_units = 3;
  job.active_grads = 2;
  job.chunk_nbytes = 1024; /* the smallest */
  expect_equal(job, {{4, 2}, {2, 4}});
  job.chunk_nbytes = mfsdp_runtime_desc_default().chunk_nbytes;
  expect_equal(job, {{4, 2}, {2, 4}});
}

TEST(Oracle, MuonWithoutNesterovAndOtherScales) {
  Job job = test::mixed_job();
  job.options.groups[0].nesterov = false;
  job.options.groups[0].match_rms = true;
  job.options.groups[0].momentum = 0.9;
  job.options.groups[0].grad_weight = 1.0;
  job.options.groups[1].beta1 = 0.8;
  job.options.groups[1].beta2 = 0.95;
  job.options.groups[1].eps = 1e-4;
  expect_equal(job, {{4, 2}, {2, 4}});
}

/* ---- sharding and reduction: rows a of docs/faults.md ---- */

TEST(Faults, MoreRanksThanMatrices) {
  for (const int32_t count : {20, 3}) {
    Job job;
    for (int32_t i = 0; i < count; ++i)
      job.model.tensors.push_back(i % 5 == 4
                                      ? ref::elementwise("v" + std::to_string(i), i / 4, {3 + i})
                                      : ref::matrix("m" + std::to_string(i), i / 4, 4 + i, 7));
    job.options.clip_norm = 1.0;
    for (const mfsdp_planner planner : planners()) {
      job.planner = planner;
      expect_equal(job, {{8, 1}, {1, 8}}, 2);
    }
  }
}

TEST(Faults, OneTensorOnEightRanks) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("only", 0, {3}));
  expect_equal(job, {{8, 1}, {1, 8}}, 2);
}

TEST(Faults, EmptyTensors) {
  Job job;
  job.model.tensors.push_back(ref::matrix("no_rows", 0, 0, 8));
  job.model.tensors.push_back(ref::elementwise("no_columns", 0, {8, 0}));
  job.model.tensors.push_back(ref::frozen("nothing", 2, {0}));
  job.options.clip_norm = 1.0;
  expect_equal(job, {{3, 2}, {1, 6}}, 2); /* not one element anywhere */
  job.model.tensors.push_back(ref::matrix("some", 1, 3, 4));
  expect_equal(job, {{3, 2}, {1, 6}}, 2);
}

TEST(Faults, TenRowsOnFourRanks) {
  Job job;
  job.model.tensors.push_back(ref::matrix("whole", 0, 10, 6));
  job.model.tensors.push_back(
      ref::elementwise("cut", 0, {10, 1000})); /* three blocks, four ranks */
  job.model.tensors.push_back(ref::split_rows("parts", 1, {3, 3, 4}, 5));
  for (const mfsdp_planner planner : planners()) {
    job.planner = planner;
    expect_equal(job, {{4, 1}, {2, 2}, {1, 4}});
  }
}

TEST(Faults, GradientMissingOnSomeRanksIsZeros) {
  Job job = test::mixed_job();
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    if (use == 3 && block != 5) return ref::Sample::kAbsent; /* one block has it */
    if (use == 0 && block % 2 == 0) return ref::Sample::kAbsent;
    if (use == 19 && block == 1 + step) return ref::Sample::kAbsent; /* one use of a tied tensor */
    if ((use == 12 || use == 13) && block == 6) return ref::Sample::kAbsent; /* a whole unit */
    return ref::Sample::kPresent;
  };
  expect_equal(job, shapes_of_eight());
}

TEST(Faults, GradientMissingEverywhere) {
  for (const bool zeros : {false, true}) {
    Job job = test::mixed_job();
    job.options.missing_is_zero = zeros;
    job.script.sample = [](int64_t step, int64_t, int32_t use) {
      /* A matrix that Muon and one that AdamW updates, a vector, and both uses of a tied tensor. */
      const bool gone = step == 1 && (use == 2 || use == 16 || use == 4 || use == 14 || use == 17);
      return gone ? ref::Sample::kAbsent : ref::Sample::kPresent;
    };
    const Expected expected(job, 4, 3);
    EXPECT_EQ(run_job(job, 4, 1, expected), "");
    EXPECT_EQ(run_job(job, 2, 2, expected), "");
    /* What the oracle itself must say: skipped means no decay and no momentum either. */
    for (const std::size_t i : {2u, 16u, 4u, 14u})
      EXPECT_EQ(expected.after(0).weights[i] == expected.after(1).weights[i] &&
                    expected.after(0).state0[i] == expected.after(1).state0[i],
                !zeros);
  }
}

TEST(Faults, UnitThatNoMicroBatchUsed) {
  for (const bool zeros : {false, true}) {
    Job job = test::mixed_job();
    job.options.missing_is_zero = zeros;
    job.script.unit_used = [](int64_t step, int32_t unit) {
      return !(step == 1 && (unit == 1 || unit == 2));
    };
    expect_equal(job, {{4, 1}, {2, 2}}, 3); /* step 1 must not see the sums of step 0 */
  }
}

TEST(Faults, SmallWorldsKeepEveryMicroBatch) {
  const Job job = test::mixed_job();
  expect_equal(job, {{1, 4}});
  expect_equal(job, {{2, 4}, {1, 8}});
}

TEST(Faults, NormOfOwnedAndCutTensors) {
  Job job;
  job.model.tensors.push_back(ref::matrix("owned", 0, 3, 5));
  job.model.tensors.push_back(ref::elementwise("cut", 0, {20000}));
  job.options.clip_norm = 0.5;
  const Expected expected(job, 4, 1);
  EXPECT_EQ(run_job(job, 4, 1, expected), "");
  /* And against a plain sum in double, from the same samples: 1e-12 covers its other order. */
  double sum = 0.0;
  for (int32_t i = 0; i < 2; ++i) {
    const std::size_t n = static_cast<std::size_t>(job.model.at(i).numel());
    std::vector<float> w(n), total(n, 0.0f);
    ref::synthetic_init(job.model.seed, i, 0, job.model.at(i).numel(), w.data());
    for (int64_t b = 0; b < 4; ++b) {
      std::vector<float> term(n, 0.0f);
      ref::synthetic_backward(job.model.seed, 0, b, i, ref::Sample::kPresent, w.data(),
                              job.model.at(i).numel(), term.data());
      for (std::size_t k = 0; k < n; ++k)
        total[k] = b == 0 ? term[k] : total[k] + term[k];
    }
    for (const float g : total)
      sum += static_cast<double>(g) * static_cast<double>(g);
  }
  EXPECT_NEAR(expected.after(0).verdict.grad_norm / (0.25 * std::sqrt(sum)), 1.0, 1e-12);
  EXPECT_LT(expected.after(0).verdict.clip_scale, 1.0);
}

TEST(Faults, NonFiniteGradientSkipsOnAllRanks) {
  for (const ref::Sample bad : {ref::Sample::kNan, ref::Sample::kInf})
    for (const double clip : {0.0, 1.5})
      for (const int32_t use : {0, 2, 13}) { /* a cut tensor, a matrix, a bias */
        if (MFSDP_TEST_TSAN && use != 2) continue;
        Job job = test::mixed_job();
        job.options.clip_norm = clip;
        job.script.sample = [=](int64_t step, int64_t block, int32_t u) {
          return step == 1 && block == 2 && u == use ? bad : ref::Sample::kPresent;
        };
        const Expected expected(job, 4, 3);
        ASSERT_TRUE(expected.after(1).verdict.skipped);
        ASSERT_EQ(expected.after(1).verdict.applied_steps, 1);
        ASSERT_EQ(expected.after(2).verdict.applied_steps, 2);
        EXPECT_EQ(run_job(job, 4, 1, expected), "");
        EXPECT_EQ(run_job(job, 1, 4, expected), "");
      }
}

TEST(Faults, SkippedStepsAreCounted) {
  Job job = test::small_job();
  job.script.sample = [](int64_t step, int64_t block, int32_t) {
    return step % 2 == 1 && block == 0 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](test::Rank &rank) {
    test::Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < 5; ++s) {
      MFSDP_TRY(trainer.step(s));
      test::require(trainer.verdict.skipped == s % 2, "skipped");
      test::require(mfsdp_runtime_skipped_steps(trainer.runtime) == (s + 1) / 2, "the count");
    }
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Faults, StopOfOneRankIsSeenByAllAfterTheSameStep) {
  const Job job = test::small_job();
  for (int32_t asking = 0; asking < 4; ++asking) {
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](test::Rank &rank) {
      test::Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      for (int64_t s = 0; s < 3; ++s) {
        MFSDP_TRY(trainer.step(s, s == 1 && rank.rank == asking));
        test::require(trainer.verdict.stop == (s == 1), "stop in the verdict of another step");
        test::require(trainer.verdict.applied_steps == s + 1, "a stop must not skip the update");
      }
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(Faults, TiedWeightsStayOne) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {50, 100}));
  job.model.tensors.push_back(ref::matrix("shared", 1, 12, 16));
  job.model.tensors.push_back(ref::tied("shared_too", 1, job.model.tensors[1]));
  job.model.tensors.push_back(ref::tied("shared_later", 2, job.model.tensors[1]));
  job.model.tensors.push_back(ref::matrix("own", 2, 5, 6));
  job.model.tensors.push_back(ref::tied("head", 3, job.model.tensors[0]));
  job.model.tensors.push_back(ref::tied("shared_last", 3, job.model.tensors[1]));
  job.options.clip_norm = 1.0;
  for (const mfsdp_planner planner : planners()) {
    job.planner = planner;
    expect_equal(job, shapes_of_eight());
  }
}

TEST(Faults, HalfIsFrozen) {
  Job job;
  for (int32_t i = 0; i < 12; ++i) {
    const std::string name = "t" + std::to_string(i);
    if (i % 2 == 0)
      job.model.tensors.push_back(ref::frozen(name, i / 3, {7 + i, 900}));
    else
      job.model.tensors.push_back(ref::matrix(name, i / 3, 6 + i, 9, i % 4 == 1 ? 0 : 1));
  }
  job.model.tensors.push_back(ref::frozen("all_frozen", 4, {5000}));
  job.model.tensors.push_back(ref::tied("frozen_again", 5, job.model.tensors[0]));
  job.options.groups[0].weight_decay = job.options.groups[1].weight_decay = 0.5;
  job.options.missing_is_zero = true; /* not even then */
  const Expected expected(job, 8, 3);
  for (const std::size_t i : {0u, 2u, 10u, 12u}) {
    std::vector<float> start(expected.after(2).weights[i].size());
    ref::synthetic_init(job.model.seed, static_cast<int32_t>(i), 0,
                        static_cast<int64_t>(start.size()), start.data());
    EXPECT_EQ(expected.after(2).weights[i], start);
  }
  for (const Shape &s : shapes_of_eight())
    EXPECT_EQ(run_job(job, s.world, s.micro_batches, expected), "");
}

/* ---- optimizers: rows d of docs/faults.md ---- */

/* Newton-Schulz calls of all ranks together. */
uint64_t newton_schulz_calls(const Job &job, int32_t world, int32_t micro_batches, int64_t steps) {
  std::vector<uint64_t> calls(static_cast<std::size_t>(world));
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](test::Rank &r) {
    test::Trainer trainer(&r, &job, micro_batches);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < steps; ++s)
      MFSDP_TRY(trainer.step(s));
    calls[static_cast<std::size_t>(r.rank)] = r.context.counters.newton_schulz_count;
    return trainer.destroy();
  });
  uint64_t sum = 0;
  EXPECT_TRUE(result.ok()) << result.text();
  for (const uint64_t n : calls)
    sum += n;
  return sum;
}

TEST(Faults, OneNewtonSchulzPerMatrixAndStep) {
  const Job job = test::mixed_job();
  uint64_t matrices = 0;
  for (const ref::Tensor &t : job.model.tensors)
    if (t.tied_to.empty() && t.role == ref::Role::kMatrix && t.group == 0)
      matrices += t.matrices.size();
  ASSERT_EQ(matrices, 3u + 1 + 1 + 3 + 2 + 1 + 1 + 1); /* in the order of mixed_model */
  EXPECT_EQ(newton_schulz_calls(job, 4, 1, 3), 3 * matrices);
  EXPECT_EQ(newton_schulz_calls(job, 4, 2, 3), 3 * matrices); /* not one per micro-batch */
  EXPECT_EQ(newton_schulz_calls(job, 1, 8, 1), matrices);
  EXPECT_EQ(newton_schulz_calls(job, 8, 1, 1), matrices); /* no rank repeats another's */
}

TEST(Faults, EveryRankHasTheSameParameters) {
  const Job job = test::mixed_job();
  std::vector<uint64_t> hashes(4);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](test::Rank &rank) {
    test::Trainer trainer(&rank, &job, 2);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < 3; ++s)
      MFSDP_TRY(trainer.step(s));
    MFSDP_TRY(trainer.hash(&hashes[static_cast<std::size_t>(rank.rank)]));
    return trainer.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (const uint64_t hash : hashes)
    EXPECT_EQ(hash, hashes[0]);
}

/* The size of a step is that of the planned matrix: never of the tensor's own shape. Without decay
 * and momentum a step's RMS is lr * scale * RMS of an orthogonal matrix, whose singular values lie
 * between 0.68 and 1.14 after five jordan steps (exact arithmetic gives 0.682 to 1.134). */
TEST(Faults, ScaleOfTheStepFollowsThePlannedMatrix) {
  struct Case {
    ref::Tensor tensor;
    double scale, rows, cols;
  };
  const std::vector<Case> cases = {
      {ref::matrix("tall", 0, 64, 16), 2.0, 64, 16},
      {ref::matrix("wide", 0, 16, 64), 1.0, 16, 64},
      {ref::conv("conv_tall", 0, 64, 4, 2), 2.0, 64, 16}, /* (64, 4, 2, 2) is 64 x 16 */
      {ref::conv("conv_wide", 0, 8, 8, 2), 1.0, 8, 32},
      {ref::experts("experts", 0, 4, 64, 16), 2.0, 64, 16},
      {ref::split_heads("heads", 0, 256, 64, 4), 1.0, 64, 64}, /* not sqrt(256 / 64) */
      {ref::split_rows("parts", 0, {64, 16}, 16), 0.0, 0, 0}}; /* each part its own */
  for (const bool rms : {false, true}) {
    Job job;
    job.options.groups[0].weight_decay = 0.0;
    job.options.groups[0].match_rms = rms;
    for (const Case &c : cases)
      job.model.tensors.push_back(c.tensor);
    const Expected expected(job, 2, 1);
    EXPECT_EQ(run_job(job, 2, 1, expected), "");
    for (std::size_t i = 0; i + 1 < cases.size(); ++i) {
      const Case &c = cases[i];
      std::vector<float> start(expected.after(0).weights[i].size());
      double sum = 0.0;
      ref::synthetic_init(job.model.seed, static_cast<int32_t>(i), 0,
                          static_cast<int64_t>(start.size()), start.data());
      for (std::size_t k = 0; k < start.size(); ++k)
        sum += std::pow(static_cast<double>(start[k]) -
                            static_cast<double>(expected.after(0).weights[i][k]),
                        2);
      const double scale = rms ? 0.2 * std::sqrt(std::max(c.rows, c.cols)) : c.scale;
      const double orthogonal = std::sqrt(std::min(c.rows, c.cols) / (c.rows * c.cols));
      const double ratio =
          std::sqrt(sum / static_cast<double>(start.size())) / (0.02 * scale * orthogonal);
      EXPECT_GT(ratio, 0.68) << c.tensor.name;
      EXPECT_LT(ratio, 1.14) << c.tensor.name;
    }
  }
}

TEST(Faults, GroupsKeepTheirOwnRatesAndDecay) {
  Job job;
  job.options.groups.resize(4);
  job.options.groups[1].weight_decay = 0.1;
  job.options.groups[2] = job.options.groups[1];
  job.options.groups[2].weight_decay = 0.0;
  job.options.groups[2].lr = 0.04;
  job.options.groups[3] = job.options.groups[0];
  job.options.groups[3].weight_decay = 0.0;
  job.options.groups[3].lr = 0.001;
  job.options.groups[2].beta1 = 0.5;
  job.options.groups[3].momentum = 0.5;
  for (int32_t g = 0; g < 4; ++g)
    job.model.tensors.push_back(ref::matrix("m" + std::to_string(g), 0, 8, 8, g));
  expect_equal(job, {{4, 1}, {1, 4}});
  /* Without a gradient only decay is left, and with weight_decay 0 nothing. */
  job.options.missing_is_zero = true;
  job.script.sample = [](int64_t, int64_t, int32_t) { return ref::Sample::kAbsent; };
  const Expected expected(job, 2, 1);
  EXPECT_EQ(run_job(job, 2, 1, expected), "");
  for (int32_t g = 0; g < 4; ++g) {
    std::vector<float> start(64);
    ref::synthetic_init(job.model.seed, g, 0, 64, start.data());
    const bool unchanged = expected.after(0).weights[static_cast<std::size_t>(g)] == start;
    EXPECT_EQ(unchanged, g >= 2);
  }
}

/* ---- views: the loop over the parts, bit for bit ---- */

/* A projection as models have them, and the parts that its optimizer must see. */
struct ViewCase {
  ref::Tensor tensor;
  std::vector<std::pair<int64_t, int64_t>> parts; /* rows, cols, in the order of the elements */
};

std::vector<ViewCase> view_cases() {
  const int64_t head = 6;
  return {
      /* Four query heads over two key and value heads: 24, 12 and 12 rows; as one matrix each, as
       * a matrix of each head, as one of each group's queries. */
      {ref::split_rows("qkv", 0, {4 * head, 2 * head, 2 * head}, 20),
       {{24, 20}, {12, 20}, {12, 20}}},
      {ref::split_heads("qkv.heads", 0, 8 * head, 20, 8),
       {{6, 20}, {6, 20}, {6, 20}, {6, 20}, {6, 20}, {6, 20}, {6, 20}, {6, 20}}},
      {ref::split_rows("qkv.groups", 1, {2 * head, 2 * head, head, head, head, head}, 20),
       {{12, 20}, {12, 20}, {6, 20}, {6, 20}, {6, 20}, {6, 20}}},
      /* Stored group by group: its queries, its key, its value, and the next group. */
      {ref::split_rows("qkv.interleaved", 1, {12, 6, 6, 12, 6, 6}, 20),
       {{12, 20}, {6, 20}, {6, 20}, {12, 20}, {6, 20}, {6, 20}}},
      /* Blocks of several sizes inside each of three heads (a part with positions, one without, a
       * value), one of them empty in the last. */
      {ref::split_rows("kv.blocks", 1, {5, 3, 8, 5, 3, 8, 5, 0, 8}, 14),
       {{5, 14}, {3, 14}, {8, 14}, {5, 14}, {3, 14}, {8, 14}, {5, 14}, {8, 14}}},
      {ref::split_rows("gate_up", 2, {40, 40}, 16), {{40, 16}, {40, 16}}},
      {ref::split_rows("gate_up.unequal", 2, {40, 24, 1}, 16), {{40, 16}, {24, 16}, {1, 16}}},
      {ref::conv("conv", 2, 8, 3, 3), {{8, 27}}}, /* (8, 3, 3, 3) */
      {ref::experts("experts", 3, 3, 10, 30), {{10, 30}, {10, 30}, {10, 30}}},
      {ref::split_experts("experts.gate_up", 3, 2, {12, 0, 8}, 18),
       {{12, 18}, {8, 18}, {12, 18}, {8, 18}}},
  };
}

/* Every part as a tensor of its own. Its values are the same if it has the same elements, so the
 * parts take theirs from the whole. */
TEST(Views, EqualTheLoopOverParts) {
  Job job;
  uint64_t matrices = 0;
  for (const ViewCase &c : view_cases()) {
    int64_t first = 0;
    std::size_t k = 0;
    ASSERT_EQ(c.tensor.matrices.size(), c.parts.size()) << c.tensor.name;
    for (const ref::MatrixOf &m : c.tensor.matrices) {
      EXPECT_EQ(m.first, first) << c.tensor.name;
      EXPECT_EQ(m.rows, c.parts[k].first) << c.tensor.name;
      EXPECT_EQ(m.cols, c.parts[k].second) << c.tensor.name;
      first += m.rows * m.cols;
      ++k;
    }
    EXPECT_EQ(first, c.tensor.numel()) << c.tensor.name;
    job.model.tensors.push_back(c.tensor);
    matrices += c.parts.size();
  }
  expect_equal(job, {{1, 3}, {3, 1}}); /* the oracle's update is that loop */
  EXPECT_EQ(newton_schulz_calls(job, 3, 1, 2), 2 * matrices);
}

/* And the oracle's loop does differ from one matrix of the whole tensor: the test could fail. */
TEST(Views, PartsAreNotTheWhole) {
  for (const ViewCase &c : view_cases()) {
    Job parts, whole;
    ref::Tensor one = c.tensor;
    if (c.parts.size() == 1) continue;
    one.matrices = {{0, c.tensor.numel() / c.parts[0].second, c.parts[0].second}};
    parts.model.tensors.push_back(c.tensor);
    whole.model.tensors.push_back(one);
    EXPECT_NE(Expected(parts, 1, 1).after(0).weights, Expected(whole, 1, 1).after(0).weights)
        << c.tensor.name;
  }
}

/* ---- step options ---- */

TEST(Step, LrFactorZeroKeepsTheParameters) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
    test::Trainer trainer(&rank, &job, 1);
    uint64_t before = 0, after = 0;
    MFSDP_TRY(trainer.create());
    MFSDP_TRY(trainer.hash(&before));
    mfsdp_step_desc desc = trainer.step_desc(0);
    desc.lr_factor = 0.0;
    MFSDP_TRY(mfsdp_step_begin(trainer.runtime, &desc));
    MFSDP_TRY(trainer.micro_batch(0, 0));
    MFSDP_TRY(trainer.end());
    MFSDP_TRY(trainer.hash(&after));
    test::require(before == after, "a step of length 0 moved something");
    test::require(trainer.verdict.applied_steps == 1, "but it counts");
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Two steps of warm-up, one more at the full rate, three of decay, and one after the end. */
Job scheduled(Job job) {
  job.tune = [](mfsdp_runtime_desc *d) {
    d->schedule.kind = MFSDP_SCHEDULE_WSD;
    d->schedule.warmup_steps = 2;
    d->schedule.total_steps = 6;
    d->schedule.decay_steps = 3;
    d->schedule.final_factor = 0.5;
  };
  job.schedule = [](int64_t step) {
    return std::vector<double>{0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5}.at(
        static_cast<std::size_t>(step));
  };
  return job;
}

/* Of the groups' own rates, which all differ; decay is scaled with the rate, momentum is not. */
TEST(Step, ScheduleScalesEveryGroup) {
  const Job job = scheduled(test::mixed_job());
  expect_equal(job, {{1, 4}, {4, 1}});
  EXPECT_NE(Expected(job, 4, 1).after(0).weights,
            Expected(test::mixed_job(), 4, 1).after(0).weights);
}

/* A skipped step is an attempted one: the schedule goes on, and at a resume from it. */
TEST(Step, ScheduleCountsAttemptedSteps) {
  Job job = scheduled(test::small_job());
  job.script.sample = [](int64_t step, int64_t block, int32_t use) {
    return step == 1 && block == 0 && use == 1 ? ref::Sample::kNan : ref::Sample::kPresent;
  };
  expect_equal(job, {{2, 1}}, 7);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
    for (int64_t first = 0; first < 7; ++first) {
      test::Trainer trainer(&rank, &job, 1);
      mfsdp_progress progress = mfsdp_progress_default();
      MFSDP_TRY(trainer.create());
      progress.step = progress.applied_steps = first;
      MFSDP_TRY(mfsdp_runtime_resume(trainer.runtime, &progress));
      MFSDP_TRY(trainer.step(first));
      test::require(trainer.verdict.lr_factor ==
                        job.schedule(first) * trainer.step_desc(first).lr_factor,
                    "the factor of a resumed step is another one");
      MFSDP_TRY(trainer.destroy());
    }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Step, GradWeightScalesTheNorm) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
    double norm[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
      test::Trainer trainer(&rank, &job, 2);
      MFSDP_TRY(trainer.create());
      mfsdp_step_desc desc = trainer.step_desc(0);
      desc.grad_weight = i == 0 ? 1.0 : 0.125; /* a power of two: exact */
      MFSDP_TRY(mfsdp_step_begin(trainer.runtime, &desc));
      for (int32_t m = 0; m < 2; ++m)
        MFSDP_TRY(trainer.micro_batch(0, m));
      MFSDP_TRY(trainer.end());
      norm[i] = trainer.verdict.grad_norm;
      MFSDP_TRY(trainer.destroy());
    }
    test::require(norm[1] > 0 && norm[0] == 8.0 * norm[1], "the norm is of the scaled gradient");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Step, FewerMicroBatchesThanTheUpperBound) {
  Job job = test::mixed_job();
  job.max_micro_batches = 64;
  expect_equal(job, {{2, 2}, {4, 1}}, 2); /* the mean must not see unused places */
}

TEST(Step, MeanOfValuesIsNanWhenSomeAreMissing) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
    test::Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.create());
    MFSDP_TRY(trainer.begin(0));
    if (rank.rank == 0) MFSDP_TRY(mfsdp_step_value(trainer.runtime, 1.0));
    MFSDP_TRY(trainer.end());
    test::require(std::isnan(trainer.verdict.value_mean), "one of two values was reported");
    MFSDP_TRY(trainer.step(1));
    test::require(std::isfinite(trainer.verdict.value_mean), "both were reported");
    return trainer.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- debug aids ---- */

TEST(Debug, PoisonedSlotsOverManySteps) {
  Job job = test::mixed_job();
  job.debug_poison = job.debug_check = 1;
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER; /* slots are reused while other queues run */
  job.active_units = 2;
#if MFSDP_TEST_SANITIZER
  const int64_t steps = 6;
#else
  const int64_t steps = 50;
#endif
  const Expected expected(job, 4, steps);
  std::vector<uint64_t> hashes(4);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](test::Rank &rank) {
    test::Trainer trainer(&rank, &job, 1);
    MFSDP_TRY(trainer.create());
    for (int64_t s = 0; s < steps; ++s)
      MFSDP_TRY(trainer.step(s));
    trainer.compare(expected, steps - 1);
    MFSDP_TRY(trainer.hash(&hashes[static_cast<std::size_t>(rank.rank)]));
    return trainer.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  for (const uint64_t hash : hashes)
    EXPECT_EQ(hash, hashes[0]);
}

TEST(Debug, ReleasedParametersAreNan) {
  Job job = test::small_job();
  for (const int32_t poison : {0, 1}) {
    job.debug_poison = poison;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
      test::Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      MFSDP_TRY(mfsdp_unit_acquire(trainer.runtime, 1, MFSDP_USE_FORWARD));
      const float *a = static_cast<const float *>(mfsdp_unit_param(trainer.runtime, 1));
      test::require(std::isfinite(a[0]), "acquired");
      MFSDP_TRY(mfsdp_unit_release(trainer.runtime, 1));
      test::require(mfsdp_unit_param(trainer.runtime, 1) == nullptr, "no address after release");
      /* Inline queues: the poison is there already. The memory is still the runtime's. */
      test::require(std::isnan(a[0]) == (poison != 0), "a late reader must see NaN");
      return trainer.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(Debug, ChecksSeeRanksInDifferentOrder) {
  Job job; /* two units of one size: without checks the bytes would be taken for the other's */
  job.model.tensors.push_back(ref::matrix("a", 0, 8, 8));
  job.model.tensors.push_back(ref::matrix("b", 0, 8, 8));
  job.model.tensors.push_back(ref::matrix("c", 1, 8, 8));
  job.model.tensors.push_back(ref::matrix("d", 1, 8, 8));
  job.planner = MFSDP_PLANNER_ROUND_ROBIN;
  for (const int32_t check : {0, 1}) {
    job.debug_check = check;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](test::Rank &rank) {
      test::Trainer trainer(&rank, &job, 1);
      MFSDP_TRY(trainer.create());
      MFSDP_TRY(mfsdp_unit_acquire(trainer.runtime, rank.rank, MFSDP_USE_FORWARD));
      MFSDP_TRY(mfsdp_unit_release(trainer.runtime, rank.rank));
      return trainer.destroy();
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_EQ(result.ok(), check == 0);
    if (check == 0) continue;
    EXPECT_NE(result.text().find("gather unit 0"), std::string::npos) << result.text();
    EXPECT_NE(result.text().find("gather unit 1"), std::string::npos) << result.text();
    EXPECT_NE(result.text().find("not the same operation"), std::string::npos) << result.text();
  }
}

} // namespace
