/* SPDX-License-Identifier: MIT */
/* The Chrome trace of the example: what is collected, what the file holds, a real run's phases. */
#include "examples/gpt/rank.h"
#include "examples/gpt/trace.h"

#include "tests/examples/gpt_test.h"
#include "tests/support/json.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

namespace {

using test::Json;

struct Phase {
  double begin, end;
  std::string label;
};

/* What a file holds, after the checks that every trace must pass. */
struct Read {
  std::map<int, std::string> ranks;                                /* pid: process name */
  std::map<std::pair<int, std::string>, std::vector<Phase>> lanes; /* by pid and thread name */
  double left_out = -1;
  std::set<std::string> labels(int rank, const std::string &lane) const {
    std::set<std::string> out;
    const auto found = lanes.find({rank, lane});
    if (found != lanes.end())
      for (const Phase &phase : found->second)
        out.insert(phase.label);
    return out;
  }
};

/* Phases of a lane: sorted by begin, each inside the one that is open or after it. */
void expect_nested(std::vector<Phase> phases) {
  std::vector<Phase> open;
  std::stable_sort(phases.begin(), phases.end(), [](const Phase &a, const Phase &b) {
    return a.begin < b.begin || (a.begin == b.begin && a.end > b.end);
  });
  for (const Phase &phase : phases) {
    EXPECT_GE(phase.begin, 0.0);
    EXPECT_GE(phase.end, phase.begin);
    while (!open.empty() && open.back().end <= phase.begin)
      open.pop_back();
    const double end = open.empty() ? phase.end : open.back().end;
    EXPECT_LE(phase.end, end) << phase.label << " reaches out of what it began in";
    open.push_back(phase);
  }
}

Read ReadTrace(const std::string &text) {
  Read out;
  Json root;
  std::map<std::pair<int, int>, std::string> names;
  EXPECT_EQ(test::parse_json(text, &root), "") << text.substr(0, 400);
  EXPECT_EQ(root.at("traceEvents").kind, Json::Array);
  out.left_out = root.at("otherData").at("phases_left_out").number;
  for (const Json &event : root.at("traceEvents").items) {
    const int pid = int(event.at("pid").number), tid = int(event.at("tid").number);
    EXPECT_EQ(event.at("pid").kind, Json::Number);
    EXPECT_EQ(event.at("tid").kind, Json::Number);
    EXPECT_EQ(event.at("name").kind, Json::Text);
    if (event.at("ph").text == "M") {
      const std::string name = event.at("args").at("name").text;
      EXPECT_NE(name, "");
      if (event.at("name").text == "process_name")
        out.ranks[pid] = name;
      else
        names[{pid, tid}] = name;
      continue;
    }
    EXPECT_EQ(event.at("ph").text, "X");
    EXPECT_EQ(names.count({pid, tid}), 1u) << "a lane without a name";
    const double begin = event.at("ts").number;
    out.lanes[{pid, names[{pid, tid}]}].push_back(
        {begin, begin + event.at("dur").number, event.at("name").text});
  }
  for (const auto &lane : out.lanes)
    expect_nested(lane.second);
  return out;
}

class GptTrace : public testing::Test {
protected:
  gpt_test::TempFile file_;
  gpt_trace trace_;
  gpt_error error_ = gpt_error();

  void Create(int32_t ranks) {
    ASSERT_EQ(gpt_trace_create(file_.path(), ranks, &trace_, &error_), GPT_OK) << error_.text;
  }
  Read Finish() {
    EXPECT_EQ(gpt_trace_finish(&trace_, &error_), GPT_OK) << error_.text;
    return ReadTrace(file_.text());
  }
  void Mark(int32_t rank, int begin, const char *lane, const char *label) {
    gpt_trace_mark(&trace_, rank, begin, lane, label);
  }
};

TEST_F(GptTrace, WithoutAPathNothingHappens) {
  ASSERT_EQ(gpt_trace_create(nullptr, 2, &trace_, &error_), GPT_OK);
  Mark(0, 1, "host", "a");
  EXPECT_EQ(gpt_trace_left_out(&trace_), 0);
  EXPECT_EQ(gpt_trace_finish(&trace_, &error_), GPT_OK);
}

TEST_F(GptTrace, AFileThatCannotBeWrittenIsSaidAtOnce) {
  EXPECT_EQ(gpt_trace_create("/nowhere/trace", 1, &trace_, &error_), GPT_USAGE_ERROR);
  EXPECT_NE(std::string(error_.text).find("cannot write /nowhere/trace"), std::string::npos);
}

/* A program that is killed leaves a trace that opens. */
TEST_F(GptTrace, TheFileIsValidFromTheStart) {
  Create(2);
  Mark(0, 1, "host", "a");
  EXPECT_TRUE(ReadTrace(file_.text()).lanes.empty());
  Finish();
}

TEST_F(GptTrace, RanksLanesAndNesting) {
  Create(2);
  std::string passing = "wait unit 0";
  Mark(1, 1, "host", "step");
  Mark(1, 1, "host", passing.c_str());
  Mark(1, 1, "communication", "gather unit 0");
  passing = "overwritten"; /* texts are copied */
  mfsdp_clock_sleep_until(mfsdp_clock_us() + 3000);
  Mark(1, 0, "communication", "gather unit 0");
  Mark(1, 0, "host", "wait unit 0");
  Mark(1, 0, "host", "step");
  const Read read = Finish();
  EXPECT_EQ(read.ranks, (std::map<int, std::string>{{0, "rank 0"}, {1, "rank 1"}}));
  EXPECT_EQ(read.left_out, 0);
  ASSERT_EQ(read.lanes.size(), 2u);
  EXPECT_EQ(read.labels(1, "host"), (std::set<std::string>{"step", "wait unit 0"}));
  const auto &gather = read.lanes.at({1, "communication"});
  ASSERT_EQ(gather.size(), 1u);
  EXPECT_GE(gather[0].end - gather[0].begin, 3000) << "microseconds";
}

TEST_F(GptTrace, OpenPhasesEndWithTheFileAndStrayEndsAreIgnored) {
  Create(1);
  Mark(0, 0, "host", "never begun");
  Mark(0, 1, "host", "outer");
  Mark(0, 1, "host", "inner");
  Mark(7, 1, "host", "no such rank");
  const Read read = Finish();
  EXPECT_EQ(read.labels(0, "host"), (std::set<std::string>{"outer", "inner"}));
}

TEST_F(GptTrace, WhatDoesNotFitIsLeftOutWholeAndCounted) {
  Create(1);
  for (int i = 0; i < GPT_TRACE_DEPTH + 3; ++i)
    Mark(0, 1, "deep", "nested");
  for (int i = 0; i < GPT_TRACE_DEPTH + 3; ++i)
    Mark(0, 0, "deep", "nested");
  EXPECT_EQ(gpt_trace_left_out(&trace_), 3);
  for (int i = 0; i < GPT_TRACE_PHASES; ++i) {
    Mark(0, 1, "host", "short");
    Mark(0, 0, "host", "short");
  }
  EXPECT_EQ(gpt_trace_left_out(&trace_), 3 + GPT_TRACE_DEPTH);
  for (int i = 0; i < GPT_TRACE_LANES; ++i)
    Mark(0, 1, std::to_string(i).c_str(), "lane"); /* two lanes are taken: two more than fit */
  EXPECT_EQ(gpt_trace_left_out(&trace_), 3 + GPT_TRACE_DEPTH + 2);
  const Read read = Finish();
  EXPECT_EQ(read.left_out, 3 + GPT_TRACE_DEPTH + 2 + GPT_TRACE_LANES - 2);
  EXPECT_EQ(read.lanes.at({0, "deep"}).size(), size_t(GPT_TRACE_DEPTH));
  EXPECT_EQ(read.lanes.at({0, "host"}).size(), size_t(GPT_TRACE_PHASES - GPT_TRACE_DEPTH));
}

TEST_F(GptTrace, TextsAreEscapedAndCut) {
  Create(1);
  const std::string strange = "a\"b\\c\n\x01", longer(100, 'x');
  for (const std::string &label : {strange, longer}) {
    Mark(0, 1, strange.c_str(), label.c_str());
    Mark(0, 0, strange.c_str(), label.c_str());
  }
  EXPECT_EQ(Finish().labels(0, strange),
            (std::set<std::string>{strange, std::string(GPT_TRACE_TEXT - 1, 'x')}));
}

/* Threads of one rank on lanes of their own; under the thread sanitizer also a check of the lock.
 */
TEST_F(GptTrace, AnyThreadMayMark) {
  Create(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i)
    threads.emplace_back([this, i] {
      const std::string lane = "lane " + std::to_string(i / 2);
      for (int k = 0; k < 500; ++k) {
        Mark(i % 2, 1, lane.c_str(), "outer");
        Mark(i % 2, 1, lane.c_str(), "inner");
        Mark(i % 2, 0, lane.c_str(), "inner");
        Mark(i % 2, 0, lane.c_str(), "outer");
      }
    });
  for (std::thread &thread : threads)
    thread.join();
  const Read read = Finish();
  EXPECT_EQ(read.lanes.size(), 6u);
  for (const auto &lane : read.lanes)
    EXPECT_EQ(lane.second.size(), 1000u);
}

/* ---- a real run ---- */

void train_one_step(const gpt_job *job, int32_t index) {
  gpt_rank rank;
  mfsdp_step_desc step = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  EXPECT_EQ(gpt_rank_create(&rank, job, index), MFSDP_OK) << rank.context.error.message;
  EXPECT_EQ(mfsdp_step_begin(rank.runtime, &step), MFSDP_OK);
  for (int32_t u = 0; u < rank.model.unit_count; ++u)
    EXPECT_EQ(gpt_rank_forward(&rank, u, MFSDP_USE_FORWARD), MFSDP_OK);
  for (int32_t u = rank.model.unit_count; u-- > 0;)
    EXPECT_EQ(gpt_rank_backward(&rank, u), MFSDP_OK);
  EXPECT_EQ(mfsdp_step_end(rank.runtime, 0), MFSDP_OK);
  EXPECT_EQ(mfsdp_step_verdict(rank.runtime, &verdict), MFSDP_OK);
  EXPECT_EQ(gpt_rank_destroy(&rank), MFSDP_OK) << rank.context.error.message;
}

/* The phases of a step on two ranks: every kind of every unit, on its lane. */
void expect_phases_of_a_step(gpt_trace *trace, int prefetch) {
  gpt_job job = gpt_job();
  gpt_error error;
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  job.options.ranks = 2;
  job.options.micro_batches = 1;
  job.options.threads_per_rank = 1;
  job.options.deadline = 60;
  job.options.prefetch = prefetch;
  job.options.reshard_after_forward = 1;
  job.options.lr = job.options.adamw_lr = 0.01;
  job.config = {/* layers */ 2,
                /* dim */ 16,
                /* heads */ 2,
                /* context */ 8,
                /* batch */ 1,   256, 0};
  job.math = mfsdp_host_math_loops();
  job.platform = gpt_platform_host();
  job.links = gpt_links_threads();
  job.trace = trace;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  ASSERT_EQ(gpt_param_table_create(&job.config, &job.table, &error), GPT_OK);
  const mfsdp_threads_world_desc desc = gpt_job_world_desc(&job);
  ASSERT_EQ(mfsdp_threads_world_create(&context, &desc, &job.world), MFSDP_OK);
  std::thread other(train_one_step, &job, 1);
  train_one_step(&job, 0);
  other.join();
  EXPECT_EQ(mfsdp_threads_world_destroy(&context, job.world), MFSDP_OK);
  gpt_param_table_destroy(&job.table);
}

TEST_F(GptTrace, AStepShowsEveryKindOfPhase) {
  for (int prefetch = 0; prefetch <= 2; ++prefetch) {
    Create(2);
    expect_phases_of_a_step(&trace_, prefetch);
    const Read read = Finish();
    for (int rank = 0; rank < 2; ++rank) {
      const std::set<std::string> host = read.labels(rank, "host");
      const std::set<std::string> communication = read.labels(rank, "communication");
      for (int unit = 0; unit < 4; ++unit) {
        const std::string name = " unit " + std::to_string(unit);
        EXPECT_EQ(host.count("forward" + name), 1u);
        EXPECT_EQ(host.count("backward" + name), 1u);
        EXPECT_EQ(host.count("wait" + name), 1u);
        EXPECT_EQ(communication.count("gather" + name), 1u);
        EXPECT_EQ(communication.count("reduce" + name), 1u);
      }
      EXPECT_EQ(read.labels(rank, "compute"), (std::set<std::string>{"optimizer"}));
    }
  }
}

} // namespace
