/* SPDX-License-Identifier: MIT */
#include "examples/gpt/options.h"
#include "mfsdp/muon.h"
#include "mfsdp/schedule.h"

#include "tests/examples/gpt_test.h"

namespace {

struct Parsed {
  std::vector<std::string> words; /* texts in `options` point into them */
  int status;
  gpt_options options;
  std::string error;
};

/* Parses the words of a command line after the program's name. */
Parsed Parse(std::vector<std::string> words) {
  Parsed p = Parsed();
  gpt_error error = gpt_error();
  std::vector<const char *> argv = {"train_gpt"};
  p.words = std::move(words);
  for (const std::string &word : p.words)
    argv.push_back(word.c_str());
  p.status = gpt_options_parse(int(argv.size()), argv.data(), &p.options, &error);
  p.error = error.text;
  EXPECT_EQ(p.status == GPT_USAGE_ERROR, !p.error.empty());
  EXPECT_EQ(p.error.find('\n'), std::string::npos);
  return p;
}

std::string ErrorOf(std::vector<std::string> words) {
  const Parsed p = Parse(words);
  EXPECT_EQ(p.status, GPT_USAGE_ERROR) << words[0];
  return p.error;
}

#define EXPECT_ERROR(telling, ...)                                        \
  do {                                                                    \
    const std::string error_text = ErrorOf({__VA_ARGS__});                \
    EXPECT_NE(error_text.find(telling), std::string::npos) << error_text; \
  } while (0)

TEST(GptOptions, Defaults) {
  const Parsed p = Parse({"--data", "text"});
  ASSERT_EQ(p.status, GPT_OK);
  EXPECT_STREQ(p.options.data, "text");
  EXPECT_EQ(p.options.ranks, 4);
  EXPECT_EQ(p.options.micro_batches, 1);
  EXPECT_EQ(p.options.optimizer, GPT_OPTIMIZER_MUON);
  EXPECT_EQ(p.options.planner, GPT_PLANNER_BALANCED);
  EXPECT_EQ(p.options.lr, 0.02);
  EXPECT_EQ(p.options.clip, 1.0);
  EXPECT_EQ(p.options.tied, 0);
  EXPECT_EQ(p.options.threads_per_rank, 1);
  EXPECT_EQ(p.options.dtype, GPT_DTYPE_F32);
  EXPECT_EQ(p.options.prefetch, 0);
  EXPECT_EQ(p.options.reshard_after_forward, 1);
  EXPECT_EQ(p.options.trace, nullptr);
  EXPECT_EQ(p.options.loss_csv, nullptr);
  EXPECT_TRUE(p.options.given[GPT_OPTION_data]);
  EXPECT_FALSE(p.options.given[GPT_OPTION_ranks]);
}

TEST(GptOptions, EveryOptionInBothSpellings) {
  const Parsed p = Parse({"--data=a=b",
                          "--ranks",
                          "3",
                          "--micro-batches=2",
                          "--steps",
                          "1000000000",
                          "--optimizer",
                          "adamw",
                          "--planner=Round_Robin",
                          "--layers",
                          "2",
                          "--dim=96",
                          "--heads",
                          "6",
                          "--context=64",
                          "--batch",
                          "5",
                          "--adamw-lr",
                          "1e-4",
                          "--clip=0",
                          "--tied",
                          "--seed=0",
                          "--threads-per-rank",
                          "2",
                          "--dtype",
                          "BF16",
                          "--prefetch=16",
                          "--reshard-after-forward",
                          "0",
                          "--trace=t.json",
                          "--loss-csv",
                          "c.csv",
                          "--loss-svg=c.svg"});
  ASSERT_EQ(p.status, GPT_OK) << p.error;
  EXPECT_STREQ(p.options.data, "a=b");
  EXPECT_EQ(p.options.ranks, 3);
  EXPECT_EQ(p.options.micro_batches, 2);
  EXPECT_EQ(p.options.steps, 1000000000);
  EXPECT_EQ(p.options.optimizer, GPT_OPTIMIZER_ADAMW);
  EXPECT_EQ(p.options.planner, GPT_PLANNER_ROUND_ROBIN);
  EXPECT_EQ(p.options.adamw_lr, 1e-4);
  EXPECT_EQ(p.options.clip, 0.0);
  EXPECT_EQ(p.options.tied, 1);
  EXPECT_EQ(p.options.seed, 0);
  EXPECT_EQ(p.options.threads_per_rank, 2);
  EXPECT_EQ(p.options.dtype, GPT_DTYPE_BF16);
  EXPECT_EQ(p.options.prefetch, 16);
  EXPECT_EQ(p.options.reshard_after_forward, 0);
  EXPECT_STREQ(p.options.trace, "t.json");
  EXPECT_STREQ(p.options.loss_csv, "c.csv");
  EXPECT_STREQ(p.options.loss_svg, "c.svg");
  gpt_config c;
  gpt_options_config(&p.options, &c);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.dim, 96);
  EXPECT_EQ(c.heads, 6);
  EXPECT_EQ(c.context, 64);
  EXPECT_EQ(c.batch, 5);
  EXPECT_EQ(c.vocab, 256);
  EXPECT_EQ(c.tied, 1);
}

TEST(GptOptions, TheLastOfTwoCounts) {
  EXPECT_EQ(Parse({"--data", "t", "--steps", "1", "--steps=2"}).options.steps, 2);
  EXPECT_EQ(Parse({"--data", "t", "--tied", "--tied=0"}).options.tied, 0);
}

TEST(GptOptions, HelpWinsOverEverything) {
  EXPECT_EQ(Parse({"--help"}).status, GPT_OPTIONS_HELP);
  EXPECT_EQ(Parse({"-h"}).status, GPT_OPTIONS_HELP);
  EXPECT_EQ(Parse({"--steps", "1", "--help"}).status, GPT_OPTIONS_HELP);
}

TEST(GptOptions, HelpNamesEveryOptionWithItsDefault) {
  gpt_test::TextOutput out;
  gpt_options_help(out.file(), "train_gpt");
  const std::string help = out.text();
#define EXPECT_NAMED(kind, field, name, initial, low, high, value, text) \
  EXPECT_NE(help.find("--" name), std::string::npos) << name;
  GPT_OPTIONS(EXPECT_NAMED)
#undef EXPECT_NAMED
  EXPECT_NE(help.find("(1 to 1024; default 4)"), std::string::npos);
  EXPECT_NE(help.find("round-robin, role-greedy, scope-greedy, cost-aware, balanced;"),
            std::string::npos);
  EXPECT_NE(help.find("default balanced"), std::string::npos);
}

/* The list is in the order of the table that says what each name means. */
TEST(GptOptions, Strategies) {
  EXPECT_EQ(Parse({"--data", "t"}).options.strategy, GPT_STRATEGY_MATRIX);
  EXPECT_EQ(Parse({"--data", "t"}).options.step_in_backward, 0);
  EXPECT_EQ(Parse({"--data", "t", "--step-in-backward"}).options.step_in_backward, 1);
  for (int32_t i = 0; i < GPT_STRATEGY_COUNT; ++i)
    EXPECT_EQ(Parse({"--data", "t", "--strategy", gpt_strategy_at(i)->name}).options.strategy, i);
  EXPECT_EQ(gpt_strategy_at(-1), nullptr);
  EXPECT_EQ(gpt_strategy_at(GPT_STRATEGY_COUNT), nullptr);
  EXPECT_ERROR("--strategy 'zero3' is unknown; choose one of: matrix, gather, alltoall, zero1, "
               "replicated, hybrid",
               "--data", "t", "--strategy", "zero3");
}

/* What every strategy asks of the library. */
TEST(GptOptions, StrategiesPlaceParameters) {
  mfsdp_param params[3] = {mfsdp_param_default(), mfsdp_param_default(), mfsdp_param_default()};
  params[0].role = MFSDP_ROLE_MATRIX;
  params[1].role = MFSDP_ROLE_ELEMENTWISE;
  params[2].role = MFSDP_ROLE_FROZEN;
  for (int32_t i = 0; i < GPT_STRATEGY_COUNT; ++i) {
    const bool banded = i == GPT_STRATEGY_GATHER || i == GPT_STRATEGY_ALLTOALL;
    const bool replicated = i == GPT_STRATEGY_REPLICATED;
    mfsdp_plan_desc plan = mfsdp_plan_desc_default();
    gpt_strategy_params(gpt_strategy_at(i), params, 3);
    gpt_strategy_plan(gpt_strategy_at(i), &plan);
    EXPECT_EQ(params[0].placement, replicated ? MFSDP_PLACEMENT_REPLICATED
                                   : banded   ? MFSDP_PLACEMENT_BANDED
                                              : MFSDP_PLACEMENT_OWNED);
    for (int k = 1; k < 3; ++k)
      EXPECT_EQ(params[k].placement,
                replicated ? MFSDP_PLACEMENT_REPLICATED : MFSDP_PLACEMENT_OWNED);
    EXPECT_EQ(plan.residency, replicated || i == GPT_STRATEGY_ZERO1 ? MFSDP_RESIDENCY_RESIDENT
                                                                    : MFSDP_RESIDENCY_SHARDED);
  }
}

/* GPUs are in build/examples/train_gpt_cuda alone. */
TEST(GptOptions, Devices) {
  EXPECT_EQ(Parse({"--data", "t"}).options.device, GPT_DEVICE_CPU);
  EXPECT_EQ(Parse({"--data", "t", "--device", "cpu"}).options.device, GPT_DEVICE_CPU);
  EXPECT_ERROR("--device cuda: not in this build", "--data", "t", "--device", "cuda");
  EXPECT_ERROR("--device 'gpu' is unknown; choose one of: cpu", "--data", "t", "--device", "gpu");
  EXPECT_ERROR("--transport nccl: not in this build", "--data", "t", "--transport", "nccl");
}

/* The lists are in the library's order, whose numbers rank.c takes them for. */
TEST(GptOptions, MuonsNames) {
  for (int preset = MFSDP_MUON_NONE + 1; preset < MFSDP_MUON_END; ++preset)
    EXPECT_EQ(Parse({"--data", "t", "--preset",
                     mfsdp_muon_preset_name(static_cast<mfsdp_muon_preset>(preset))})
                  .options.preset,
              preset - 1);
  for (int set = MFSDP_NS_SET_NONE + 1; set < MFSDP_NS_SET_END; ++set)
    EXPECT_EQ(
        Parse({"--data", "t", "--coefficients", mfsdp_ns_set_name(static_cast<mfsdp_ns_set>(set))})
            .options.coefficients,
        set);
  EXPECT_EQ(Parse({"--data", "t"}).options.preset, GPT_PRESET_JORDAN);
  EXPECT_EQ(Parse({"--data", "t"}).options.coefficients, GPT_COEFFICIENTS_PRESET);
  EXPECT_ERROR("--preset is Muon's", "--data", "t", "--optimizer", "adamw", "--preset", "dion");
  EXPECT_ERROR("--coefficients is Muon's", "--data", "t", "--optimizer", "adamw", "--coefficients",
               "you5");
  EXPECT_ERROR("--preset 'adam' is unknown; choose one of: torch, jordan, moonlight, dion",
               "--data", "t", "--preset", "adam");
}

TEST(GptOptions, ShampooAndSoap) {
  EXPECT_ERROR("--graft is Shampoo's; --optimizer muon does not use it", "--data", "t", "--graft",
               "sgd");
  EXPECT_ERROR("--precondition-every is Shampoo's and SOAP's; --optimizer adamw", "--data", "t",
               "--optimizer", "adamw", "--precondition-every", "3");
  EXPECT_ERROR("--precondition-limit is Shampoo's and SOAP's; --optimizer muon", "--data", "t",
               "--precondition-limit", "3");
  EXPECT_ERROR("--precondition-every is '0'; give a whole number from 1", "--data", "t",
               "--precondition-every", "0");
#if MFSDP_EXAMPLE_LAPACKE
  const Parsed p = Parse({"--data", "t", "--optimizer", "shampoo", "--precondition-every", "20",
                          "--precondition-limit", "512", "--graft", "none"});
  EXPECT_EQ(p.options.optimizer, GPT_OPTIMIZER_SHAMPOO);
  EXPECT_EQ(p.options.precondition_every, 20);
  EXPECT_EQ(p.options.precondition_limit, 512);
  EXPECT_EQ(p.options.graft, GPT_GRAFT_NONE);
  EXPECT_EQ(Parse({"--data", "t", "--optimizer", "soap", "--lr", "1"}).options.optimizer,
            GPT_OPTIMIZER_SOAP);
  EXPECT_ERROR("--preset is Muon's; --optimizer soap", "--data", "t", "--optimizer", "soap",
               "--preset", "dion");
  EXPECT_ERROR("--graft is Shampoo's; --optimizer soap", "--data", "t", "--optimizer", "soap",
               "--graft", "sgd");
#else
  EXPECT_ERROR("--optimizer soap: not in this build", "--data", "t", "--optimizer", "soap");
  EXPECT_ERROR("--optimizer shampoo: not in this build", "--data", "t", "--optimizer", "shampoo");
#endif
}

TEST(GptOptions, Schedules) {
  for (int kind = MFSDP_SCHEDULE_NONE + 1; kind < MFSDP_SCHEDULE_END; ++kind)
    EXPECT_EQ(Parse({"--data", "t", "--schedule",
                     mfsdp_schedule_kind_name(static_cast<mfsdp_schedule_kind>(kind))})
                  .options.schedule,
              kind - 1);
  const Parsed p = Parse({"--data", "t"});
  EXPECT_EQ(p.options.schedule, GPT_SCHEDULE_LINEAR);
  EXPECT_EQ(p.options.warmup, -1);
  EXPECT_EQ(p.options.decay_steps, -1);
  EXPECT_EQ(p.options.final_lr, 0.1);
  EXPECT_EQ(Parse({"--data", "t", "--schedule", "wsd", "--decay-steps", "300"}).status, GPT_OK);
  EXPECT_ERROR("--decay-steps is read by --schedule wsd", "--data", "t", "--decay-steps", "3");
  EXPECT_ERROR("--final-lr: --schedule constant does not decay", "--data", "t", "--schedule",
               "constant", "--final-lr", "0.5");
  EXPECT_ERROR("--decay-steps is 301, needs 1 to --steps (300)", "--data", "t", "--schedule", "wsd",
               "--decay-steps", "301");
  EXPECT_ERROR("--decay-steps is 0, needs", "--data", "t", "--schedule", "wsd", "--decay-steps=0");
  EXPECT_ERROR("--warmup is '-2'", "--data", "t", "--warmup", "-2");
  EXPECT_ERROR("--final-lr is '1.5'", "--data", "t", "--final-lr", "1.5");
}

TEST(GptOptions, TransportIsWhatTheBuildHas) {
#if MFSDP_EXAMPLE_MPI
  EXPECT_EQ(Parse({"--data", "t", "--transport", "mpi"}).options.transport, GPT_TRANSPORT_MPI);
#else
  EXPECT_ERROR("--transport mpi: not in this build", "--data", "t", "--transport", "mpi");
#endif
  EXPECT_ERROR("--transport 'tcp' is unknown; choose one of: threads", "--data", "t",
               "--transport=tcp");
}

TEST(GptOptions, OneErrorPerRule) {
  EXPECT_ERROR("--data is missing; name a text file", "--steps", "3");
  EXPECT_ERROR("--step is unknown; see --help", "--step", "3");
  EXPECT_ERROR("--steps-x is unknown; see --help", "--steps-x=3");
  EXPECT_ERROR("-- is unknown", "--");
  EXPECT_ERROR("'text' is not an option", "text");
  EXPECT_ERROR("'-s' is not an option", "-s");
  EXPECT_ERROR("--steps needs a value: --steps N", "--steps");
  EXPECT_ERROR("--steps needs a value: --steps N", "--steps", "--ranks");
  EXPECT_ERROR("--data is empty", "--data=");
  EXPECT_ERROR("--optimizer 'sgd' is unknown; choose one of: muon, adamw", "--optimizer", "sgd");
  EXPECT_ERROR("--optimizer 'muo' is unknown", "--optimizer", "muo");
  EXPECT_ERROR("--optimizer '' is unknown", "--optimizer=");
  EXPECT_ERROR("--dtype 'fp8' is unknown; choose one of: f32, bf16, f16", "--dtype", "fp8");
  EXPECT_ERROR("choose one of: round-robin, role-greedy, scope-greedy, cost-aware, balanced",
               "--planner", "best");
  EXPECT_ERROR("--tied is 'yes'; write --tied alone", "--tied=yes");
}

TEST(GptOptions, WholeNumbers) {
  for (const char *bad : {"0", "1025", "-1", "", " 4", "4 ", "4x", "0x4", "4.0", "1e2", "nan",
                          "9223372036854775808", "99999999999999999999999999"})
    EXPECT_ERROR(std::string("--ranks is '") + bad + "'; give a whole number from 1 to 1024",
                 std::string("--ranks=") + bad);
  EXPECT_ERROR("--seed is '-1'", "--seed", "-1");
  EXPECT_ERROR("--prefetch is '17'; give a whole number from 0 to 16", "--prefetch", "17");
  EXPECT_ERROR("--prefetch is '-1'", "--prefetch", "-1");
  EXPECT_ERROR("--reshard-after-forward is '2'", "--reshard-after-forward", "2");
}

TEST(GptOptions, RangesOfEveryNumber) {
  for (const char *name : {"ranks", "micro-batches", "steps", "layers", "dim", "heads", "context",
                           "batch", "threads-per-rank"}) {
    const std::string option = std::string("--") + name;
    EXPECT_ERROR(option + " is '0'", option, "0");
    EXPECT_ERROR(option + " is '1000000001'", option, "1000000001");
  }
}

TEST(GptOptions, RealNumbers) {
  for (const char *bad :
       {"0", "-0.1", "nan", "inf", "1e999", "", " 1", "1 ", "0.1.2", "one", "1001"})
    EXPECT_ERROR(std::string("--lr is '") + bad + "'; give a number from 1e-12 to 1000",
                 std::string("--lr=") + bad);
  EXPECT_ERROR("--clip is '-1'", "--clip", "-1");
  EXPECT_ERROR("--adamw-lr is '0'", "--adamw-lr", "0");
}

TEST(GptOptions, RulesAboutSeveralOptions) {
  EXPECT_ERROR("dim 100 is not a multiple of heads 3", "--data", "t", "--dim", "100", "--heads",
               "3");
  EXPECT_ERROR("more than 256 GiB of activations", "--data", "t", "--batch", "65536", "--context",
               "65536");
  EXPECT_ERROR("--data and an output file", "--data", "t", "--loss-csv", "t");
  EXPECT_ERROR("--data and an output file", "--data", "t", "--loss-svg", "t");
  EXPECT_ERROR("--data and an output file", "--data", "t", "--trace", "t");
  EXPECT_ERROR("choose two names", "--data", "t", "--loss-svg", "x", "--loss-csv", "x");
  EXPECT_ERROR("--loss-csv and --trace are both x", "--data", "t", "--trace=x", "--loss-csv=x");
  EXPECT_ERROR("--lr is Muon's step size", "--data", "t", "--optimizer", "adamw", "--lr", "1");
}

TEST(GptOptions, AMessageStaysOnOneLine) {
  EXPECT_ERROR("'a?b' is not an option", "a\nb");
  const std::string error = ErrorOf({"--data", "t", "--steps", std::string(2000, '9')});
  EXPECT_LT(error.size(), sizeof(gpt_error));
}

} // namespace
