/* SPDX-License-Identifier: MIT */
/* The fold of all ranks' messages: what it decides must not depend on how many ranks there are. */
#include "mfsdp/host/host_verdict.h"

#include "tests/support/backend_rig.h"

#include <cmath>
#include <limits>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;
using test::RigKind;

class HostVerdict : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostVerdict, ::testing::ValuesIn(test::backend_kinds()),
                         test::rig_name);

/* A model of `sums.size()` canonical blocks and `presence.size()` parameters, dealt to `world`
 * ranks. */
struct Step {
  int32_t world = 1;
  std::vector<double> sums;               /* per block, tensor order */
  std::vector<double> values;             /* per sample block */
  std::vector<std::vector<int>> presence; /* [param]: ranks (mod world) with a gradient */
  std::vector<uint32_t> stop;             /* flags per rank; missing: 0 */
  std::vector<mfsdp_group_rates> rates = {{0.1, 0.01}};
  std::vector<double> weights; /* per sample block; empty: not weighted */
  double lr_factor = 1.0, grad_scale = 1.0, loss_scale = 1.0, clip_norm = 0.0;
  int32_t missing_is_zero = 0;
};

struct Outcome {
  mfsdp_verdict_record record;
  std::vector<mfsdp_step_scalars> scalars;
  std::vector<uint32_t> present;
};

mfsdp_step_scalars old_scalars() {
  mfsdp_step_scalars s;
  std::memset(&s, 0, sizeof(s));
  s.applied_steps = 41;
  s.skip = 1;
  s.lr = 99.0;
  return s;
}

Outcome fold(Rig *rig, const Step &step) {
  const int32_t capacity =
      static_cast<int32_t>((step.values.size() + static_cast<std::size_t>(step.world) - 1) /
                           static_cast<std::size_t>(step.world));
  const std::size_t presence_words = (step.presence.size() + 63) / 64;
  const std::size_t first_presence =
      1 + static_cast<std::size_t>(capacity) * (step.weights.empty() ? 1 : 2);
  std::vector<std::vector<uint64_t>> messages;
  std::vector<int64_t> block_rank_word; /* block -> word inside its rank's message */
  for (int32_t r = 0; r < step.world; ++r)
    messages.emplace_back(first_presence + presence_words, static_cast<uint64_t>(0));
  for (std::size_t r = 0; r < step.stop.size() && r < messages.size(); ++r)
    messages[r][0] = step.stop[r];
  for (std::size_t j = 0; j < step.values.size(); ++j) {
    const std::size_t w = static_cast<std::size_t>(step.world);
    messages[j % w][1 + j / w] = mfsdp_bits_from_f64(step.values[j]);
    if (!step.weights.empty())
      messages[j % w][1 + static_cast<std::size_t>(capacity) + j / w] =
          mfsdp_bits_from_f64(step.weights[j]);
  }
  for (std::size_t p = 0; p < step.presence.size(); ++p)
    for (int rank : step.presence[p])
      messages[static_cast<std::size_t>(rank % step.world)][first_presence + p / 64] |= UINT64_C(1)
                                                                                        << (p % 64);
  /* Blocks go to ranks in an order of their own, so that rank order is not tensor order. */
  std::vector<std::size_t> owner(step.sums.size());
  for (std::size_t b = 0; b < step.sums.size(); ++b) {
    owner[b] = (b * 5 + 2) % static_cast<std::size_t>(step.world);
    block_rank_word.push_back(static_cast<int64_t>(messages[owner[b]].size()));
    messages[owner[b]].push_back(mfsdp_bits_from_f64(step.sums[b]));
  }
  std::vector<uint64_t> all(3, ~UINT64_C(0)); /* messages need not start at word 0 or be adjacent */
  std::vector<int64_t> rank_word, block_word;
  for (const std::vector<uint64_t> &message : messages) {
    rank_word.push_back(static_cast<int64_t>(all.size()));
    all.insert(all.end(), message.begin(), message.end());
    all.push_back(~UINT64_C(0));
  }
  for (std::size_t b = 0; b < step.sums.size(); ++b)
    block_word.push_back(rank_word[owner[b]] + block_rank_word[b]);

  Buffer<uint64_t> message_buffer(rig, all);
  Buffer<int64_t> rank_words(rig, rank_word), block_words(rig, block_word);
  Buffer<mfsdp_group_rates> rates(rig, step.rates);
  Buffer<mfsdp_step_scalars> scalars(
      rig, std::vector<mfsdp_step_scalars>(step.rates.size(), old_scalars()));
  Buffer<uint32_t> present(rig, std::vector<uint32_t>(step.presence.size(), 7));
  Buffer<mfsdp_verdict_record> record(rig, 1, 0, MFSDP_SPACE_PINNED);
  mfsdp_verdict_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.messages = message_buffer.data();
  args.rank_word = rank_words.data();
  args.block_word = block_words.data();
  args.block_count = static_cast<int64_t>(step.sums.size());
  args.world = step.world;
  args.value_capacity = capacity;
  args.value_count = static_cast<int32_t>(step.values.size());
  args.param_count = static_cast<int32_t>(step.presence.size());
  args.group_count = static_cast<int32_t>(step.rates.size());
  args.rates = rates.data();
  args.lr_factor = step.lr_factor;
  args.grad_scale = step.grad_scale;
  args.loss_scale = step.loss_scale;
  args.weighted = step.weights.empty() ? 0 : 1;
  args.clip_norm = step.clip_norm;
  args.missing_is_zero = step.missing_is_zero;
  args.present = present.data();
  args.scalars = scalars.data();
  args.record = record.data();
  EXPECT_EQ(rig->ops->verdict_fold(rig->self, rig->queue, &args), MFSDP_OK) << rig->message();
  Outcome out;
  out.record = record.read()[0];
  out.scalars = scalars.read();
  out.present = present.read();
  return out;
}

/* Sums and values whose total depends on the order of addition. */
Step uneven_step() {
  Step step;
  Numbers numbers(41);
  /* Behind 2^55 each of the small sums is lost, in front of it they add up to some 300, which even
   * the square root shows. */
  step.sums.push_back(std::ldexp(1.0, 55));
  for (int i = 0; i < 202; ++i)
    step.sums.push_back(1.5 + numbers.uniform());
  for (int i = 0; i < 24; ++i)
    step.values.push_back(numbers.uniform() * std::ldexp(1.0, i % 7));
  for (int p = 0; p < 130; ++p)
    step.presence.push_back({p});
  return step;
}

TEST_P(HostVerdict, NothingDependsOnTheNumberOfRanks) {
  Rig rig(GetParam());
  Step step = uneven_step();
  step.clip_norm = 100.0;
  step.grad_scale = 0.3;
  double sum = 0.0, total = 0.0, reversed = 0.0;
  for (double x : step.sums)
    sum += x;
  for (std::size_t i = step.sums.size(); i-- > 0;)
    reversed += step.sums[i];
  ASSERT_NE(std::sqrt(sum) * 0.3, std::sqrt(reversed) * 0.3); /* the case can tell orders apart */
  for (double x : step.values)
    total += x;
  for (int32_t world : {1, 2, 3, 4, 7, 8, 24}) {
    step.world = world;
    const Outcome out = fold(&rig, step);
    EXPECT_EQ(out.record.grad_norm, std::sqrt(sum) * 0.3) << world;
    EXPECT_EQ(out.record.value_mean, total / 24.0) << world;
    EXPECT_EQ(out.record.clip_scale, 100.0 / (std::sqrt(sum) * 0.3 + 1e-6)) << world;
    EXPECT_LT(out.record.clip_scale, 1.0);
    EXPECT_EQ(out.record.skip, 0u);
    EXPECT_EQ(out.record.stop, 0u);
    EXPECT_EQ(out.record.applied_steps, 42);
    EXPECT_EQ(out.present, std::vector<uint32_t>(130, 1));
  }
}

TEST_P(HostVerdict, ClipIsOffInactiveOrTorchsFormula) {
  Rig rig(GetParam());
  Step step;
  step.sums = {9.0, 16.0};
  step.grad_scale = -2.0; /* norm 10 */
  EXPECT_EQ(fold(&rig, step).record.clip_scale, 1.0);
  EXPECT_EQ(fold(&rig, step).record.grad_norm, 10.0);
  step.clip_norm = 11.0;
  EXPECT_EQ(fold(&rig, step).record.clip_scale, 1.0);
  step.clip_norm = 1.0;
  const Outcome out = fold(&rig, step);
  EXPECT_EQ(out.record.clip_scale, 1.0 / (10.0 + 1e-6));
  EXPECT_EQ(out.scalars[0].clip_scale, out.record.clip_scale);
  step.sums = {0.0};
  EXPECT_EQ(fold(&rig, step).record.clip_scale, 1.0);
  EXPECT_EQ(fold(&rig, step).record.grad_norm, 0.0);
}

TEST_P(HostVerdict, ScalarsOfEveryGroup) {
  Rig rig(GetParam());
  Step step;
  step.sums = {4.0};
  step.rates = {{0.1, 0.01}, {0.02, 0.0}, {0.0, 0.5}};
  step.lr_factor = 0.25;
  step.grad_scale = 0.125;
  step.clip_norm = 0.1;
  step.world = 2;
  step.stop = {0, 1};
  const Outcome out = fold(&rig, step);
  ASSERT_EQ(out.scalars.size(), 3u);
  for (std::size_t g = 0; g < 3; ++g) {
    EXPECT_EQ(out.scalars[g].lr, step.rates[g].lr * 0.25);
    EXPECT_EQ(out.scalars[g].weight_decay, step.rates[g].weight_decay);
    EXPECT_EQ(out.scalars[g].grad_scale, 0.125);
    EXPECT_EQ(out.scalars[g].clip_scale, 0.1 / (0.25 + 1e-6));
    EXPECT_EQ(out.scalars[g].applied_steps, 42);
    EXPECT_EQ(out.scalars[g].skip, 0u);
    EXPECT_EQ(out.scalars[g].stop, 1u);
  }
  EXPECT_EQ(out.record.stop, 1u);
}

/* The other flags: what the rank was told of the step. The first that differs is named, and nobody
 * updates; a stop request is none. */
TEST_P(HostVerdict, RanksThatWereToldOfOtherStepsUpdateNothing) {
  Rig rig(GetParam());
  Step step;
  step.sums = {4.0};
  step.world = 4;
  struct Case {
    std::vector<uint32_t> flags;
    int64_t differs;
  };
  for (const Case &c : {Case{{6, 6, 6, 6}, -1}, Case{{6, 7, 6, 7}, -1}, Case{{6, 6, 4, 0}, 2},
                        Case{{1, 0, 1, 2}, 3}, Case{{2, 0, 0, 0}, 1}}) {
    step.stop = c.flags;
    const Outcome out = fold(&rig, step);
    EXPECT_EQ(out.record.differs, c.differs);
    EXPECT_EQ(out.record.skip, c.differs < 0 ? 0u : 1u);
    EXPECT_EQ(out.scalars[0].skip, c.differs < 0 ? 0u : 1u);
    EXPECT_EQ(out.scalars[0].applied_steps, c.differs < 0 ? 42 : 41);
  }
}

TEST_P(HostVerdict, NonFiniteGradientSkipsAndCountsNoStep) {
  Rig rig(GetParam());
  for (double bad : {std::nan(""), std::numeric_limits<double>::infinity()})
    for (int32_t world : {1, 3}) {
      Step step = uneven_step();
      step.world = world;
      step.clip_norm = 1.0;
      step.sums[100] = bad;
      step.rates.push_back({0.3, 0.0});
      const Outcome out = fold(&rig, step);
      EXPECT_EQ(out.record.skip, 1u);
      EXPECT_EQ(out.record.applied_steps, 41);
      EXPECT_FALSE(std::isfinite(out.record.grad_norm));
      for (const mfsdp_step_scalars &s : out.scalars) {
        EXPECT_EQ(s.skip, 1u);
        EXPECT_EQ(s.applied_steps, 41);
        EXPECT_EQ(s.clip_scale, out.record.clip_scale);
      }
      /* 1 where the norm is not a number, 0 where it is infinite: what the formula gives. */
      EXPECT_EQ(out.record.clip_scale, std::isnan(bad) ? 1.0 : 0.0);
    }
}

/* Sums that are finite with a scale that takes the gradient, or itself, out of fp32: the update
 * would write infinities, and 0 x infinity = NaN where the gradient is zero. */
TEST_P(HostVerdict, AGradientThatScalingOverflowsSkips) {
  Rig rig(GetParam());
  const double largest = std::ldexp(1.0, 127);
  const struct {
    double sum, grad_scale, loss_scale;
    uint32_t skip;
  } cases[] = {{1.0, largest, 1.0, 0},
               {1.0, largest * 1.01, 1.0, 1},
               {1.0, -largest * 1.01, 1.0, 1},
               {0.0, largest * 1.01, 1.0, 1},
               {1e40, 1e19, 1.0, 1},
               {1e76, 1.0, 1.0, 0},
               {1e76, 4.0, 1.0, 1},
               {1e76, 4.0, 4.0, 0},
               {1e-40, 4.0, std::ldexp(1.0, -126), 1}};
  for (const double clip_norm : {0.0, 1.0}) /* the norm is an infinity in fp32 either way */
    for (const auto &c : cases) {
      Step step;
      step.sums = {c.sum};
      step.grad_scale = c.grad_scale;
      step.loss_scale = c.loss_scale;
      step.clip_norm = clip_norm;
      const Outcome out = fold(&rig, step);
      EXPECT_EQ(out.record.skip, c.skip) << c.sum << " " << c.grad_scale << " " << c.loss_scale;
      EXPECT_EQ(out.scalars[0].skip, c.skip);
      EXPECT_EQ(out.record.applied_steps, c.skip ? 41 : 42);
    }
}

TEST_P(HostVerdict, PresenceIsTheUnionOfTheRanks) {
  Rig rig(GetParam());
  Step step;
  step.world = 3;
  step.sums = {1.0};
  for (int p = 0; p < 200; ++p) {
    if (p % 4 == 0)
      step.presence.push_back({}); /* nowhere */
    else if (p % 4 == 1)
      step.presence.push_back({p % 3});
    else
      step.presence.push_back({0, 1, 2});
  }
  const Outcome out = fold(&rig, step);
  for (std::size_t p = 0; p < 200; ++p)
    EXPECT_EQ(out.present[p], p % 4 == 0 ? 0u : 1u) << p;
  step.missing_is_zero = 1;
  EXPECT_EQ(fold(&rig, step).present, std::vector<uint32_t>(200, 1));
}

TEST_P(HostVerdict, ValuesAreTakenInSampleOrderAndMayBeMissing) {
  Rig rig(GetParam());
  Step step;
  step.sums = {1.0};
  EXPECT_TRUE(std::isnan(fold(&rig, step).record.value_mean));
  step.world = 3; /* seven values: ranks 1 and 2 report one less than rank 0 */
  step.values = {1e16, 1.0, -1e16, 3.0, 5.0, 7.0, 2.0};
  double total = 0.0;
  for (double x : step.values)
    total += x;
  EXPECT_EQ(fold(&rig, step).record.value_mean, total / 7.0);
}

TEST_P(HostVerdict, WeightsDivideTheGradientAndWeighTheMean) {
  Rig rig(GetParam());
  Step step;
  step.sums = {16.0};
  step.grad_scale = 3.0;
  step.values = {1.0, 2.0, std::nan(""), 8.0, 16.0, 32.0}; /* a block without tokens has no mean */
  step.weights = {8.0, 1.0, 0.0, 5.0, 1.0, 1.0};           /* sum 16 */
  for (int32_t world : {1, 2, 3, 6}) {
    step.world = world;
    const Outcome out = fold(&rig, step);
    EXPECT_EQ(out.record.weight_sum, 16.0);
    EXPECT_EQ(out.record.value_mean, (8.0 + 2.0 + 0.0 + 40.0 + 16.0 + 32.0) / 16.0);
    EXPECT_EQ(out.scalars[0].grad_scale, 3.0 / 16.0);
    EXPECT_EQ(out.record.grad_norm, 4.0 * 3.0 / 16.0);
    EXPECT_EQ(out.record.skip, 0u);
  }
  EXPECT_EQ(fold(&rig,
                 [&] {
                   Step plain = step;
                   plain.weights.clear();
                   return plain;
                 }())
                .record.weight_sum,
            0.0);
}

TEST_P(HostVerdict, WithoutWeightThereIsNoMeanAndTheStepIsSkipped) {
  Rig rig(GetParam());
  Step step;
  step.sums = {16.0};
  step.values = {1.0, 2.0};
  step.weights = {0.0, 0.0};
  const Outcome out = fold(&rig, step);
  EXPECT_EQ(out.record.skip, 1u);
  EXPECT_EQ(out.record.applied_steps, 41);
}

TEST_P(HostVerdict, LossScaleIsTakenOutAgain) {
  Rig rig(GetParam());
  Step step;
  step.sums = {1024.0 * 1024.0};
  step.loss_scale = 1024.0;
  step.grad_scale = 0.5;
  step.clip_norm = 0.25;
  const Outcome out = fold(&rig, step);
  EXPECT_EQ(out.record.grad_norm, 0.5);
  EXPECT_EQ(out.scalars[0].grad_scale, 0.5 / 1024.0);
  EXPECT_EQ(out.record.clip_scale, 0.25 / (0.5 + 1e-6));
}

TEST_P(HostVerdict, SaysWhatIsWrong) {
  Rig rig(GetParam());
  Buffer<uint64_t> words(&rig, std::vector<uint64_t>(8, 0));
  Buffer<int64_t> rank_word(&rig, std::vector<int64_t>(1, 0));
  Buffer<mfsdp_group_rates> rates(&rig, 1);
  Buffer<mfsdp_step_scalars> scalars(&rig, 1);
  Buffer<uint32_t> present(&rig, 1);
  Buffer<mfsdp_verdict_record> record(&rig, 1, 0, MFSDP_SPACE_PINNED);
  mfsdp_verdict_args good;
  std::memset(&good, 0, sizeof(good));
  good.struct_nbytes = sizeof(good);
  good.messages = words.data();
  good.rank_word = rank_word.data();
  good.world = good.group_count = 1;
  good.value_capacity = 2;
  good.loss_scale = 1.0;
  good.rates = rates.data();
  good.present = present.data();
  good.scalars = scalars.data();
  good.record = record.data();
  struct Fault {
    void (*edit)(mfsdp_verdict_args *);
    const char *message;
  };
  const Fault faults[] = {
      {[](mfsdp_verdict_args *x) { x->struct_nbytes = 1; }, "struct_nbytes is 1"},
      {[](mfsdp_verdict_args *x) { x->world = 0; }, "world is 0"},
      {[](mfsdp_verdict_args *x) { x->group_count = 0; }, "group_count is 0"},
      {[](mfsdp_verdict_args *x) { x->block_count = -1; }, "block_count -1"},
      {[](mfsdp_verdict_args *x) { x->value_capacity = -2; }, "value_capacity -2"},
      {[](mfsdp_verdict_args *x) { x->param_count = -3; }, "param_count -3"},
      {[](mfsdp_verdict_args *x) { x->value_count = -1; }, "value_count is -1"},
      {[](mfsdp_verdict_args *x) { x->value_count = 3; }, "value_count is 3"},
      {[](mfsdp_verdict_args *x) { x->loss_scale = 0.0; }, "loss_scale is 0"},
      {[](mfsdp_verdict_args *x) { x->messages = nullptr; }, "is NULL"},
      {[](mfsdp_verdict_args *x) { x->rank_word = nullptr; }, "is NULL"},
      {[](mfsdp_verdict_args *x) { x->block_count = 1; }, "is NULL"}, /* block_word is */
      {[](mfsdp_verdict_args *x) { x->rates = nullptr; }, "is NULL"},
      {[](mfsdp_verdict_args *x) { x->scalars = nullptr; }, "is NULL"},
      {[](mfsdp_verdict_args *x) { x->record = nullptr; }, "is NULL"},
      {[](mfsdp_verdict_args *x) {
         x->param_count = 1;
         x->present = nullptr;
       },
       "is NULL"},
  };
  for (const Fault &fault : faults) {
    mfsdp_verdict_args args = good;
    fault.edit(&args);
    EXPECT_EQ(rig.ops->verdict_fold(rig.self, rig.queue, &args), MFSDP_E_ARGUMENT) << fault.message;
    EXPECT_NE(std::string(rig.message()).find(fault.message), std::string::npos) << rig.message();
  }
  EXPECT_EQ(rig.ops->verdict_fold(rig.self, rig.queue, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.ops->verdict_fold(rig.self, nullptr, &good), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.ops->verdict_fold(rig.self, rig.queue, &good), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

} // namespace
