/* SPDX-License-Identifier: MIT */
/* The built-in models: totals as published, tensors that the planner takes as they are. */
#include "examples/plan/models.h"

#include <gtest/gtest.h>

#include <string>

namespace {

class Filled {
public:
  explicit Filled(const std::string &name, plan_views views = PLAN_VIEWS_WHOLE) {
    plan_params_init(&params);
    status = plan_model_fill(name.c_str(), views, &params, &error);
  }
  ~Filled() { plan_params_free(&params); }
  Filled(const Filled &) = delete;
  Filled &operator=(const Filled &) = delete;
  const mfsdp_param *find(const std::string &name) const {
    for (int32_t i = 0; i < params.count; ++i)
      if (name == params.list[i].name) return &params.list[i];
    return nullptr;
  }
  plan_params params;
  plan_error error = {};
  int status;
};

/* Written out a second time, so that a slip in the table of models.c shows. */
const struct {
  const char *name;
  int64_t elements;
} kTotals[] = {
    {"gpt2-124m", 124439808LL},       {"gpt2-1.5b", 1557611200LL},
    {"llama3-8b", 8030261248LL},      {"llama3-70b", 70553706496LL},
    {"qwen3-30b-a3b", 30532122624LL}, {"deepseek-v3", 671026419200LL},
    {"kimi-k2", 1026408232448LL},
};

TEST(PlanModels, TotalsAreThePublishedOnes) {
  int index = 0;
  for (const auto &total : kTotals) {
    Filled model(total.name);
    ASSERT_EQ(model.status, PLAN_OK) << model.error.text;
    EXPECT_EQ(plan_params_elements(&model.params), total.elements) << total.name;
    ASSERT_NE(plan_model_at(index), nullptr);
    EXPECT_STREQ(plan_model_at(index)->name, total.name);
    EXPECT_EQ(plan_model_at(index++)->elements, total.elements);
  }
  EXPECT_EQ(plan_model_at(index), nullptr);
  EXPECT_EQ(plan_model_at(-1), nullptr);
}

TEST(PlanModels, HeadViewsHoldTheSameElements) {
  for (const auto &total : kTotals) {
    Filled model(total.name, PLAN_VIEWS_HEADS);
    ASSERT_EQ(model.status, PLAN_OK) << model.error.text;
    EXPECT_EQ(plan_params_elements(&model.params), total.elements) << total.name;
  }
}

TEST(PlanModels, EveryModelPlansOnEightRanks) {
  for (const auto &total : kTotals)
    for (const plan_views views : {PLAN_VIEWS_WHOLE, PLAN_VIEWS_HEADS}) {
      Filled model(total.name, views);
      const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
      mfsdp_plan_desc desc = mfsdp_plan_desc_default();
      mfsdp_context context;
      mfsdp_plan *plan = nullptr;
      ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
      desc.params = model.params.list;
      desc.param_count = model.params.count;
      desc.world = 8;
      ASSERT_EQ(mfsdp_plan_create(&context, &desc, &plan), MFSDP_OK)
          << total.name << ": " << mfsdp_context_error(&context)->message;
      EXPECT_EQ(mfsdp_plan_unit_count(plan), plan_model_find(total.name)->layers + 2);
      mfsdp_plan_destroy(&context, plan);
      EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
    }
}

TEST(PlanModels, ShapesAndRoles) {
  Filled llama("llama3-8b");
  const mfsdp_param *k = llama.find("layers.31.self_attn.k_proj.weight");
  ASSERT_NE(k, nullptr);
  EXPECT_EQ(k->shape[0], 1024);
  EXPECT_EQ(k->shape[1], 4096);
  EXPECT_EQ(k->unit, 32);
  EXPECT_EQ(k->role, MFSDP_ROLE_MATRIX);
  EXPECT_EQ(llama.find("layers.32.self_attn.k_proj.weight"), nullptr);
  EXPECT_EQ(llama.find("lm_head.weight")->role, MFSDP_ROLE_ELEMENTWISE);
  EXPECT_EQ(llama.find("lm_head.weight")->alias_of, nullptr);
  Filled heads("llama3-8b", PLAN_VIEWS_HEADS);
  EXPECT_EQ(heads.find("layers.0.self_attn.k_proj.weight")->view, MFSDP_VIEW_HEADS);
  EXPECT_EQ(heads.find("layers.0.self_attn.k_proj.weight")->head_count, 8);
  EXPECT_EQ(heads.find("layers.0.self_attn.o_proj.weight")->view, MFSDP_VIEW_WHOLE);

  Filled deepseek("deepseek-v3");
  const mfsdp_param *up = deepseek.find("layers.3.mlp.experts.up_proj.weight");
  ASSERT_NE(up, nullptr);
  EXPECT_EQ(up->view, MFSDP_VIEW_BATCH);
  EXPECT_EQ(up->shape[0], 256);
  EXPECT_EQ(up->shape[1], 2048);
  EXPECT_EQ(up->shape[2], 7168);
  EXPECT_EQ(deepseek.find("layers.2.mlp.experts.up_proj.weight"), nullptr);
  EXPECT_EQ(deepseek.find("layers.2.mlp.up_proj.weight")->shape[0], 18432);

  Filled gpt2("gpt2-124m");
  EXPECT_EQ(gpt2.find("h.0.attn.c_attn.weight")->head_count, 3);
  EXPECT_STREQ(gpt2.find("lm_head.weight")->alias_of, "wte.weight");
}

/* Activated parameters of the model cards: 37 billion of DeepSeek-V3, 3.3 of Qwen3-30B-A3B, 32 of
 * Kimi-K2, each rounded there. */
TEST(PlanModels, ActiveElements) {
  EXPECT_NEAR(static_cast<double>(plan_model_active(plan_model_find("deepseek-v3"))), 37e9, 0.6e9);
  EXPECT_NEAR(static_cast<double>(plan_model_active(plan_model_find("qwen3-30b-a3b"))), 3.3e9,
              0.1e9);
  EXPECT_NEAR(static_cast<double>(plan_model_active(plan_model_find("kimi-k2"))), 32e9, 1.0e9);
  EXPECT_EQ(plan_model_active(plan_model_find("llama3-8b")), 8030261248LL);
}

TEST(PlanModels, AnUnknownNameListsTheKnownOnes) {
  Filled model("llama3-9b\n");
  EXPECT_EQ(model.status, PLAN_USAGE_ERROR);
  EXPECT_NE(std::string(model.error.text).find("'llama3-9b?'"), std::string::npos)
      << model.error.text;
  EXPECT_NE(std::string(model.error.text).find("deepseek-v3"), std::string::npos);
  EXPECT_EQ(model.params.count, 0);
}

} // namespace
