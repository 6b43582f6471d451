/* SPDX-License-Identifier: MIT */
/* What mfsdp-plan prints, writes and draws of a plan; the text inputs behind it. */
#include "examples/plan/chart.h"
#include "examples/plan/cluster.h"
#include "examples/plan/describe.h"
#include "examples/plan/heatmap.h"
#include "examples/plan/models.h"
#include "examples/plan/options.h"
#include "examples/plan/table.h"
#include "tests/examples/gpt_test.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

using gpt_test::TempFile;
using gpt_test::TextOutput;

std::size_t count_of(const std::string &text, const std::string &part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

class Outcome : public testing::Test {
protected:
  void SetUp() override {
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    ASSERT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
    plan_params_init(&params_);
    ASSERT_EQ(plan_model_fill("gpt2-124m", PLAN_VIEWS_WHOLE, &params_, &error_), PLAN_OK);
    question_.input = "a <model> & \"more\"";
    question_.params = &params_;
    question_.planner = MFSDP_PLANNER_BALANCED;
    question_.cost = PLAN_COST_NEWTON_SCHULZ;
    question_.caps = mfsdp_plan_desc_default().caps;
    question_.cluster = mfsdp_cluster_default();
    question_.algorithm = MFSDP_SIM_RING;
    question_.newton_schulz_steps = 5;
    question_.replicas = 1;
    question_.chunk_nbytes = 1 << 20;
    question_.model_flops = 1e12;
  }
  void TearDown() override {
    plan_params_free(&params_);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK); /* nothing is held */
  }
  mfsdp_context context_;
  plan_params params_;
  plan_question question_ = {};
  plan_error error_ = {};
};

TEST_F(Outcome, PrintsAndWrites) {
  plan_outcome out;
  TextOutput table, json;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 8, &out, &error_), PLAN_OK) << error_.text;
  plan_outcome_print(&out, table.file());
  plan_outcome_json(&out, 1, json.file());
  /* Every prediction once, with the number that the simulator gives. */
  ASSERT_EQ(out.prediction_count, PLAN_PREDICTIONS);
  for (int i = 0; i < PLAN_PREDICTIONS; ++i) {
    const plan_prediction &p = out.predictions[i];
    char number[32];
    mfsdp_sim_desc desc = mfsdp_sim_desc_default();
    mfsdp_sim_result result = mfsdp_sim_result_default();
    desc.plan = out.plan;
    desc.cluster = &question_.cluster;
    desc.strategy = p.strategy;
    desc.algorithm = p.algorithm;
    desc.chunk_nbytes = question_.chunk_nbytes;
    desc.model_flops = 1e12;
    ASSERT_EQ(mfsdp_simulate(&context_, &desc, &result, nullptr, 0), MFSDP_OK);
    EXPECT_EQ(p.result.step_us, result.step_us);
    snprintf(number, sizeof number, "\"step_us\":%.6g", result.step_us);
    EXPECT_NE(json.text().find(number), std::string::npos) << number;
    snprintf(number, sizeof number, " %.2f ", result.optimizer_us * 1e-3);
    EXPECT_NE(table.text().find(number), std::string::npos) << number << table.text();
  }
  EXPECT_EQ(out.predictions[7].algorithm, MFSDP_SIM_RING);
  EXPECT_EQ(count_of(json.text(), "\"strategy\""), 8u);
  EXPECT_EQ(count_of(json.text(), "\"input\":\"a <model> & \\\"more\\\"\""), 8u);
  EXPECT_EQ(count_of(json.text(), ",\n{"), 7u);
  plan_outcome_free(&context_, &out);
}

/* With bands: the choice is told, the simulator is asked of the plan without, and of the one with them,
 * which it finds shorter. */
TEST_F(Outcome, AllowsBands) {
  plan_outcome plain, out;
  TextOutput table, json, none;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 64, &plain, &error_), PLAN_OK) << error_.text;
  plan_outcome_print(&plain, none.file());
  EXPECT_EQ(none.text().find("banded"), std::string::npos);
  question_.banded_wire_cost = -1;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 64, &out, &error_), PLAN_OK) << error_.text;
  const mfsdp_cluster &c = question_.cluster;
  EXPECT_EQ(out.banded_wire_cost, static_cast<int64_t>(c.flops_per_s / 10 / c.net_nbytes_per_s));
  EXPECT_GT(out.summary.banded_count, 0) << "12 layers of 4 or 6 matrices on 64 ranks";
  EXPECT_LT(out.summary.predicted, out.summary.predicted_owned);
  ASSERT_EQ(plain.prediction_count, PLAN_PREDICTIONS);
  ASSERT_EQ(out.prediction_count, PLAN_PREDICTIONS + PLAN_BANDED);
  for (int i = 0; i < PLAN_PREDICTIONS; ++i) {
    EXPECT_EQ(out.predictions[i].result.step_us, plain.predictions[i].result.step_us) << i;
    EXPECT_EQ(out.predictions[i].bands, 0) << i;
  }
  for (int i = 0; i < PLAN_BANDED; ++i) {
    const plan_prediction &p = out.predictions[PLAN_PREDICTIONS + i];
    mfsdp_sim_desc desc = mfsdp_sim_desc_default();
    mfsdp_sim_result result = mfsdp_sim_result_default();
    desc.plan = out.plan;
    desc.cluster = &question_.cluster;
    desc.algorithm = plain.predictions[i].algorithm;
    desc.chunk_nbytes = question_.chunk_nbytes;
    desc.model_flops = question_.model_flops;
    ASSERT_EQ(mfsdp_simulate(&context_, &desc, &result, nullptr, 0), MFSDP_OK);
    EXPECT_EQ(p.result.step_us, result.step_us) << i;
    EXPECT_EQ(p.algorithm, desc.algorithm) << i;
    EXPECT_EQ(p.bands, 1) << i;
    EXPECT_GT(p.result.optimizer_nbytes.sum, 0) << i;
  }
  EXPECT_LT(out.predictions[PLAN_PREDICTIONS].result.step_us, plain.predictions[0].result.step_us);
  plan_outcome_print(&out, table.file());
  plan_outcome_json(&out, 1, json.file());
  EXPECT_NE(
      table.text().find("--allow-banded: " + std::to_string(out.summary.banded_count) + " of "),
      std::string::npos)
      << table.text();
  EXPECT_NE(table.text().find("plan without bands"), std::string::npos);
  EXPECT_EQ(count_of(table.text(), "  with bands "), static_cast<std::size_t>(PLAN_BANDED));
  EXPECT_EQ(count_of(json.text(), "\"strategy\":\"with bands\""),
            static_cast<std::size_t>(PLAN_BANDED));
  EXPECT_EQ(count_of(json.text(), "\"predicted_cost\":" + std::to_string(out.summary.predicted)),
            static_cast<std::size_t>(PLAN_PREDICTIONS + PLAN_BANDED));
  plan_outcome_free(&context_, &out);
  question_.banded_wire_cost = 77;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 64, &out, &error_), PLAN_OK) << error_.text;
  EXPECT_EQ(out.banded_wire_cost, 77);
  plan_outcome_free(&context_, &out);
  plan_outcome_free(&context_, &plain);
}

/* By what runs: all of the steps that were asked for, and bytes in units of it, two operations each. */
TEST_F(Outcome, PlansByTheFormThatRuns) {
  plan_outcome out;
  TextOutput table, json;
  question_.cost = PLAN_COST_FORM;
  question_.newton_schulz_steps = 3;
  question_.banded_wire_cost = -1;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 64, &out, &error_), PLAN_OK) << error_.text;
  mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  ns.step_count = 3;
  int64_t sum = 0;
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(out.plan, -1, &count);
  for (int32_t i = 0; i < count; ++i) /* of a matrix in bands, the first */
    if (pieces[i].matrix >= 0 && pieces[i].first == pieces[i].matrix_first)
      sum += mfsdp_newton_schulz_cost(&ns, 0, pieces[i].matrix_rows, pieces[i].cols);
  EXPECT_EQ(out.summary.cost.sum, sum);
  EXPECT_EQ(out.banded_wire_cost, static_cast<int64_t>(question_.cluster.flops_per_s / 2 /
                                                       question_.cluster.net_nbytes_per_s));
  plan_outcome_print(&out, table.file());
  plan_outcome_json(&out, 1, json.file());
  EXPECT_NE(table.text().find("cost form,"), std::string::npos);
  EXPECT_NE(json.text().find("\"cost\":\"form\""), std::string::npos);
  plan_outcome_free(&context_, &out);
}

/* Messages so long that no band pays: the plan without, and no figures of a choice. */
TEST_F(Outcome, AllowsBandsThatDoNotPay) {
  plan_outcome out;
  TextOutput table;
  question_.banded_wire_cost = -1;
  question_.cluster.net_latency_us = 1e6;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 64, &out, &error_), PLAN_OK) << error_.text;
  EXPECT_EQ(out.summary.banded_count, 0);
  EXPECT_EQ(out.prediction_count, PLAN_PREDICTIONS);
  plan_outcome_print(&out, table.file());
  EXPECT_NE(table.text().find("--allow-banded: no matrix in bands, none makes"), std::string::npos)
      << table.text();
  plan_outcome_free(&context_, &out);
}

TEST_F(Outcome, AFailureSaysWhyAndHoldsNothing) {
  plan_outcome out;
  question_.caps.max_owners = 1;
  question_.caps.max_gamma_permille = 1000;
  EXPECT_EQ(plan_outcome_make(&context_, &question_, 8, &out, &error_), PLAN_USAGE_ERROR);
  EXPECT_NE(std::string(error_.text).find("caps"), std::string::npos) << error_.text;
  EXPECT_EQ(out.plan, nullptr);
}

TEST_F(Outcome, HeatMaps) {
  plan_outcome out[2];
  TextOutput svg;
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 8, &out[0], &error_), PLAN_OK);
  ASSERT_EQ(plan_outcome_make(&context_, &question_, 1000, &out[1], &error_), PLAN_OK);
  ASSERT_EQ(plan_heatmap(out, 2, svg.file(), &error_), PLAN_OK) << error_.text;
  const std::string text = svg.text();
  EXPECT_EQ(count_of(text, "<svg "), 1u);
  EXPECT_EQ(count_of(text, "</svg>"), 1u);
  EXPECT_EQ(count_of(text, "Resident bytes"), 2u);
  EXPECT_EQ(count_of(text, "Optimizer cost"), 2u);
  EXPECT_EQ(count_of(text, "a &lt;model&gt; &amp; \"more\" on 8 ranks"), 1u);
  EXPECT_EQ(count_of(text, "rows of 8: the largest"), 2u); /* 1000 ranks in 125 rows */
  EXPECT_EQ(count_of(text, "<g"), count_of(text, "</g>"));
  EXPECT_EQ(text.find("nan"), std::string::npos);
  char total[24], line[64];
  snprintf(line, sizeof line, "total %s,",
           plan_bytes_text(static_cast<double>(out[0].summary.resident_nbytes.sum), total));
  EXPECT_EQ(count_of(text, line), 2u) << line; /* padding does not show in three digits */
  for (plan_outcome &o : out)
    plan_outcome_free(&context_, &o);
}

TEST(PlanChart, SkipsWhatHasNoLogarithm) {
  const double x[] = {1, 2, 4}, y[] = {10, 0, 1000};
  const plan_series series = {"a<b", x, y, 3, 0, 0};
  const plan_chart chart = {"t", "x", "y", &series, 1};
  TextOutput svg;
  plan_chart_put(svg.file(), &chart, 0, 0);
  EXPECT_EQ(count_of(svg.text(), "<circle"), 2u);
  EXPECT_EQ(count_of(svg.text(), "a&lt;b"), 1u);
  EXPECT_EQ(svg.text().find("inf"), std::string::npos);
  EXPECT_EQ(svg.text().find("nan"), std::string::npos);
}

TEST(PlanText, ScaledNumbers) {
  char text[24];
  EXPECT_STREQ(plan_bytes_text(0, text), "0 B");
  EXPECT_STREQ(plan_bytes_text(999, text), "999 B");
  EXPECT_STREQ(plan_bytes_text(999.6, text), "1.00 kB");
  EXPECT_STREQ(plan_bytes_text(12345678, text), "12.3 MB");
  EXPECT_STREQ(plan_bytes_text(123456789012.0, text), "123 GB");
}

TEST(PlanCluster, ReadsWhatAFileSays) {
  const TempFile file("# two ports\nranks_per_node 4\n\n  flops_per_s\t9e14   # sustained\r\n");
  mfsdp_cluster c, d = mfsdp_cluster_default();
  plan_error error;
  ASSERT_EQ(plan_cluster_read(file.path(), &c, &error), PLAN_OK) << error.text;
  EXPECT_EQ(c.ranks_per_node, 4);
  EXPECT_EQ(c.flops_per_s, 9e14);
  EXPECT_EQ(c.net_latency_us, d.net_latency_us);
#define FIELD(field, unit, value, low, high)                                                 \
  {                                                                                          \
    const TempFile one(#field " 77\n");                                                      \
    ASSERT_EQ(plan_cluster_read(one.path(), &c, &error), PLAN_OK) << error.text;             \
    EXPECT_EQ(c.field, 77.0);                                                                \
    const TempFile bad(#field " -2\n");                                                      \
    EXPECT_EQ(plan_cluster_read(bad.path(), &c, &error), PLAN_USAGE_ERROR);                  \
    EXPECT_NE(std::string(error.text).find(":1: " #field), std::string::npos) << error.text; \
  }
  MFSDP_CLUSTER_TABLE(FIELD)
#undef FIELD
}

TEST(PlanTable, ReadsEveryColumn) {
  const TempFile file("a F32 10x20x30 3 matrix batch\n"
                      "b f16 8 0 frozen -\n"
                      "c bf16 6x4 1 matrix rows=1,2,3\n"
                      "d bf16 6x4 2 matrix rows=1,2,3 alias=c\n"
                      "e bf16 5x6x4 4 matrix batch=2,4\n");
  plan_params params;
  plan_error error;
  plan_params_init(&params);
  ASSERT_EQ(plan_table_read(file.path(), &params, &error), PLAN_OK) << error.text;
  ASSERT_EQ(params.count, 5);
  EXPECT_EQ(params.list[0].compute, MFSDP_F32);
  EXPECT_EQ(params.list[0].ndim, 3);
  EXPECT_EQ(params.list[0].shape[2], 30);
  EXPECT_EQ(params.list[0].unit, 3);
  EXPECT_EQ(params.list[0].view, MFSDP_VIEW_BATCH);
  EXPECT_EQ(params.list[1].role, MFSDP_ROLE_FROZEN);
  EXPECT_EQ(params.list[1].compute, MFSDP_F16);
  EXPECT_EQ(params.list[1].master, MFSDP_F32);
  EXPECT_EQ(params.list[2].part_count, 3);
  EXPECT_EQ(params.list[2].part_rows[2], 3);
  EXPECT_STREQ(params.list[3].alias_of, "c");
  EXPECT_EQ(params.list[4].view, MFSDP_VIEW_BATCH);
  EXPECT_EQ(params.list[4].part_count, 2);
  EXPECT_EQ(params.list[4].part_rows[1], 4);
  plan_params_free(&params);
}

TEST(PlanTable, Shapes) {
  mfsdp_param p = mfsdp_param_default();
  const auto shape = [&](std::string text) { return plan_shape_of(&text[0], &p); };
  EXPECT_TRUE(shape("1x2x3x4x5x6x7x8"));
  EXPECT_EQ(p.ndim, 8);
  for (const char *bad :
       {"", "x", "1x", "x1", "1xx2", "1x2x3x4x5x6x7x8x9", "-1", "1.5", " 1", "0x1g"})
    EXPECT_FALSE(shape(bad)) << bad;
}

TEST(PlanOptions, ReadsAll) {
  std::vector<std::string> words = {"mfsdp-plan",  "--world",  "8,16",           "in",
                                    "--max-gamma", "1500",     "--dtype",        "f16",
                                    "--views",     "heads",    "--steps",        "0",
                                    "--cost",      "elements", "--allow-banded", "auto"};
  std::vector<char *> argv;
  for (std::string &w : words)
    argv.push_back(&w[0]);
  plan_options o;
  plan_error error;
  ASSERT_EQ(plan_options_parse(static_cast<int>(argv.size()), argv.data(), &o, &error), PLAN_OK)
      << error.text;
  EXPECT_EQ(o.world_count, 2);
  EXPECT_EQ(o.worlds[1], 16);
  ASSERT_EQ(o.input_count, 1);
  EXPECT_STREQ(o.inputs[0], "in");
  EXPECT_EQ(o.caps.max_gamma_permille, 1500);
  EXPECT_EQ(o.caps.max_owners, MFSDP_PLAN_NO_CAP);
  EXPECT_EQ(o.dtype, MFSDP_F16);
  EXPECT_EQ(o.views, PLAN_VIEWS_HEADS);
  EXPECT_EQ(o.steps, 0);
  EXPECT_EQ(o.banded_wire_cost, -1);
  EXPECT_EQ(o.cost, PLAN_COST_ELEMENTS);
  EXPECT_EQ(o.planner, mfsdp_plan_desc_default().planner);
}

} // namespace
