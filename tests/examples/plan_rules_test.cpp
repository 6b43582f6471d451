/* SPDX-License-Identifier: MIT */
/* Rules: patterns, the built-in names, units. What a bad rule says is in the command line's test.
 */
#include "examples/plan/rules.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

int64_t match(const char *pattern, const char *name) {
  int64_t number = -7;
  return plan_rule_matches(pattern, name, &number) ? number : -9;
}

TEST(PlanRules, Patterns) {
  EXPECT_EQ(match("a.b", "a.b"), -1);
  EXPECT_EQ(match("a.b", "a.bc"), -9);
  EXPECT_EQ(match("a.b", "a."), -9);
  EXPECT_EQ(match("*", ""), -1);
  EXPECT_EQ(match("", ""), -1);
  EXPECT_EQ(match("", "a"), -9);
  EXPECT_EQ(match("a*c*e", "abcde"), -1);
  EXPECT_EQ(match("a*c*e", "abcdef"), -9);
  EXPECT_EQ(match("*ab", "aab"), -1);
  EXPECT_EQ(match("#", "17"), 17);
  EXPECT_EQ(match("#", "17x"), -9);
  EXPECT_EQ(match("#", ""), -9);
  EXPECT_EQ(match("#7", "17"), -9); /* # takes all digits */
  EXPECT_EQ(match("*#", "a17"), 17);
  EXPECT_EQ(match("*layers.#.*norm.weight", "model.layers.12.self_attn.q_a_layernorm.weight"), 12);
  EXPECT_EQ(match("*layers.#.mlp.experts.#.*", "model.layers.3.mlp.experts.255.up_proj.weight"), 3);
  EXPECT_EQ(match("*layers.#.w", "layers.x.layers.5.w"), 5);
  EXPECT_EQ(match("*h.#.ln_#.weight", "transformer.h.11.ln_2.weight"), 11);
  EXPECT_EQ(match("*.#.w", "layers.99999999999999999999.w"), -9); /* past 63 bits */
}

/* Time must not grow out of hand with stars and near misses. */
TEST(PlanRules, HostileNames) {
  const std::string name(20000, 'a');
  EXPECT_EQ(match("*a*a*a*a*a*a*a*a*a*a*b", name.c_str()), -9);
  const std::string digits(20000, '1');
  EXPECT_EQ(match("*#*#*#*x", digits.c_str()), -9);
}

class Applied {
public:
  explicit Applied(const std::vector<const char *> &names) {
    const int64_t shape[2] = {4, 4};
    std::vector<mfsdp_safetensors_tensor> list;
    plan_params_init(&params);
    for (const char *name : names) {
      mfsdp_safetensors_tensor t;
      std::memset(&t, 0, sizeof t);
      t.name = name;
      t.dtype = MFSDP_SAFETENSORS_BF16;
      t.ndim = 2;
      t.shape = shape;
      list.push_back(t);
    }
    status = plan_rules_read(nullptr, &rules, &error);
    if (status == PLAN_OK)
      status = plan_rules_apply(&rules, "file", list.data(), static_cast<int32_t>(list.size()),
                                &params, &error);
    if (status == PLAN_OK) status = plan_rules_finish(&params, &error);
  }
  ~Applied() {
    plan_params_free(&params);
    plan_rules_free(&rules);
  }
  Applied(const Applied &) = delete;
  Applied &operator=(const Applied &) = delete;
  plan_params params;
  plan_rules rules;
  plan_error error = {};
  int status;
};

TEST(PlanRules, BuiltInNames) {
  const struct {
    const char *name;
    mfsdp_role role;
    int32_t unit;
  } cases[] = {
      {"model.embed_tokens.weight", MFSDP_ROLE_ELEMENTWISE, 0},
      {"model.layers.0.input_layernorm.weight", MFSDP_ROLE_ELEMENTWISE, 1},
      {"model.layers.0.self_attn.q_proj.weight", MFSDP_ROLE_MATRIX, 1},
      {"model.layers.0.self_attn.q_proj.bias", MFSDP_ROLE_ELEMENTWISE, 1},
      {"model.layers.0.self_attn.k_norm.weight", MFSDP_ROLE_ELEMENTWISE, 1},
      {"model.layers.10.self_attn.kv_a_proj_with_mqa.weight", MFSDP_ROLE_MATRIX, 11},
      {"model.layers.10.mlp.gate.weight", MFSDP_ROLE_MATRIX, 11},
      {"model.layers.10.mlp.gate.e_score_correction_bias", MFSDP_ROLE_ELEMENTWISE, 11},
      {"model.layers.10.mlp.experts.255.down_proj.weight", MFSDP_ROLE_MATRIX, 11},
      {"model.layers.10.mlp.shared_experts.up_proj.weight", MFSDP_ROLE_MATRIX, 11},
      {"transformer.h.3.attn.c_attn.weight", MFSDP_ROLE_MATRIX, 4},
      {"transformer.h.3.attn.c_attn.bias", MFSDP_ROLE_ELEMENTWISE, 4},
      {"transformer.h.3.ln_1.weight", MFSDP_ROLE_ELEMENTWISE, 4},
      {"model.norm.weight", MFSDP_ROLE_ELEMENTWISE, 12},
      {"lm_head.weight", MFSDP_ROLE_ELEMENTWISE, 12},
  };
  std::vector<const char *> names;
  for (const auto &c : cases)
    names.push_back(c.name);
  names.push_back("transformer.h.3.attn.bias"); /* a mask, not a parameter */
  const Applied a(names);
  ASSERT_EQ(a.status, PLAN_OK) << a.error.text;
  ASSERT_EQ(a.params.count, static_cast<int32_t>(names.size()) - 1);
  for (int32_t i = 0; i < a.params.count; ++i) {
    EXPECT_STREQ(a.params.list[i].name, cases[i].name);
    EXPECT_EQ(a.params.list[i].role, cases[i].role) << cases[i].name;
    EXPECT_EQ(a.params.list[i].unit, cases[i].unit) << cases[i].name;
  }
}

TEST(PlanRules, NothingIsGuessed) {
  const Applied a({"model.embed_tokens.weight", "model.layers.0.mystery"});
  EXPECT_EQ(a.status, PLAN_USAGE_ERROR);
  EXPECT_NE(std::string(a.error.text).find("no rule matches tensor 'model.layers.0.mystery'"),
            std::string::npos)
      << a.error.text;
}

TEST(PlanRules, ABlockNumberPastTheLimit) {
  for (const char *number : {"1048575", "9223372036854775807"}) {
    const std::string name = std::string("model.layers.") + number + ".self_attn.q_proj.weight";
    const Applied a({name.c_str()});
    EXPECT_EQ(a.status, PLAN_USAGE_ERROR);
    EXPECT_NE(std::string(a.error.text).find(std::string("block ") + number), std::string::npos)
        << a.error.text;
    EXPECT_NE(std::string(a.error.text).find("past 1048575"), std::string::npos) << a.error.text;
  }
}

TEST(PlanRules, TheLargestUnitLeavesNoneForLast) {
  const char *const block = "model.layers.1048574.self_attn.q_proj.weight";
  const Applied alone({block});
  ASSERT_EQ(alone.status, PLAN_OK) << alone.error.text;
  EXPECT_EQ(alone.params.list[0].unit, MFSDP_PLAN_MAX_UNIT);
  const Applied both({block, "lm_head.weight"});
  EXPECT_EQ(both.status, PLAN_USAGE_ERROR);
  EXPECT_STREQ(both.error.text, "no unit number is left for `last`");
}

} // namespace
