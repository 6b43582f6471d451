/* SPDX-License-Identifier: MIT */
#include "examples/gpt/params.h"

#include "tests/examples/gpt_test.h"

#include <cmath>
#include <set>
#include <string>

namespace {

gpt_config Config(int tied) {
  gpt_config c = gpt_config();
  c.layers = 3;
  c.dim = 16;
  c.heads = 2;
  c.context = 8;
  c.batch = 2;
  c.vocab = 256;
  c.tied = tied;
  return c;
}

class Table {
public:
  explicit Table(const gpt_config &c) {
    gpt_error error;
    EXPECT_EQ(gpt_param_table_create(&c, &table, &error), GPT_OK);
  }
  ~Table() { gpt_param_table_destroy(&table); }
  const mfsdp_param &operator[](int32_t i) const { return table.params[i]; }
  gpt_param_table table;
};

TEST(GptParams, NamesShapesAndUnits) {
  const gpt_config c = Config(0);
  const Table t(c);
  ASSERT_EQ(t.table.count, 2 + 3 * 12 + 3);
  EXPECT_STREQ(t[GPT_WTE].name, "wte.weight");
  EXPECT_EQ(t[GPT_WTE].shape[0], 256);
  EXPECT_EQ(t[GPT_WPE].shape[0], 8);
  const int32_t block = gpt_unit_first_param(&c, 3);
  EXPECT_STREQ(t[block + GPT_QKV_WEIGHT].name, "blocks.2.attn.qkv.weight");
  EXPECT_STREQ(t[block + GPT_DOWN_WEIGHT].name, "blocks.2.mlp.down.weight");
  EXPECT_EQ(t[block + GPT_DOWN_WEIGHT].shape[0], 16);
  EXPECT_EQ(t[block + GPT_DOWN_WEIGHT].shape[1], 64);
  EXPECT_EQ(t[block + GPT_UP_BIAS].ndim, 1);
  EXPECT_EQ(t[block + GPT_UP_BIAS].shape[0], 64);
  EXPECT_STREQ(t[40].name, "head.weight");
  std::set<std::string> names;
  for (int32_t i = 0; i < t.table.count; ++i) {
    int64_t numel = 1;
    for (int32_t d = 0; d < t[i].ndim; ++d)
      numel *= t[i].shape[d];
    EXPECT_EQ(numel, gpt_param_numel(&c, i)) << t[i].name;
    EXPECT_TRUE(names.insert(t[i].name).second) << t[i].name;
    EXPECT_GE(i, gpt_unit_first_param(&c, t[i].unit));
    EXPECT_LT(i, gpt_unit_first_param(&c, t[i].unit) + gpt_unit_param_count(&c, t[i].unit));
    EXPECT_EQ(t[i].struct_nbytes, sizeof(mfsdp_param));
  }
}

TEST(GptParams, RolesViewsAndGroups) {
  const gpt_config c = Config(0);
  const Table t(c);
  int matrices = 0;
  for (int32_t i = 0; i < t.table.count; ++i) {
    const std::string name = t[i].name;
    const bool block_weight = name.compare(0, 7, "blocks.") == 0 && t[i].ndim == 2;
    EXPECT_EQ(t[i].role, block_weight ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE) << name;
    const bool is_qkv = name.find("qkv.weight") != std::string::npos;
    EXPECT_EQ(t[i].view, is_qkv ? MFSDP_VIEW_ROWS : MFSDP_VIEW_WHOLE) << name;
    if (is_qkv) {
      ASSERT_EQ(t[i].part_count, 3);
      for (int part = 0; part < 3; ++part)
        EXPECT_EQ(t[i].part_rows[part], 16);
    }
    const int32_t group = block_weight     ? GPT_GROUP_HIDDEN
                          : t[i].ndim == 2 ? GPT_GROUP_DECAY
                                           : GPT_GROUP_PLAIN;
    EXPECT_EQ(t[i].hyper_group, group) << name;
    EXPECT_EQ(t[i].alias_of, nullptr);
    matrices += block_weight;
  }
  EXPECT_EQ(matrices, 3 * 4);
}

TEST(GptParams, ATiedHeadIsAnAliasThatRepeatsTheEmbedding) {
  const gpt_config c = Config(1), untied = Config(0);
  const Table t(c);
  const mfsdp_param &head = t[t.table.count - 1], &wte = t[GPT_WTE];
  ASSERT_NE(head.alias_of, nullptr);
  EXPECT_STREQ(head.alias_of, wte.name);
  EXPECT_EQ(head.role, wte.role);
  EXPECT_EQ(head.hyper_group, wte.hyper_group);
  EXPECT_EQ(head.shape[0], wte.shape[0]);
  EXPECT_EQ(head.shape[1], wte.shape[1]);
  EXPECT_EQ(gpt_config_param_numel(&untied) - gpt_config_param_numel(&c), 256 * 16);
}

std::vector<float> Initial(const gpt_config &c, uint64_t seed, int32_t param, int64_t first,
                           int64_t count) {
  std::vector<float> values(static_cast<size_t>(count), -7.0f);
  gpt_init_value(&c, seed, param, first, count, values.data());
  return values;
}

TEST(GptParams, InitialValuesDoNotDependOnTheCut) {
  const gpt_config c = Config(0);
  for (int32_t i = 0; i < gpt_param_count(&c); ++i) {
    const int64_t numel = gpt_param_numel(&c, i);
    const std::vector<float> whole = Initial(c, 3, i, 0, numel);
    for (int64_t cut : {int64_t(1), int64_t(5), numel / 2, numel - 1}) {
      std::vector<float> parts = Initial(c, 3, i, 0, cut);
      const std::vector<float> rest = Initial(c, 3, i, cut, numel - cut);
      parts.insert(parts.end(), rest.begin(), rest.end());
      EXPECT_EQ(whole, parts) << i;
    }
  }
}

TEST(GptParams, InitialValuesDependOnSeedAndTensor) {
  const gpt_config c = Config(0);
  const int32_t first = gpt_unit_first_param(&c, 1), second = gpt_unit_first_param(&c, 2);
  EXPECT_NE(Initial(c, 1, GPT_WTE, 0, 64), Initial(c, 2, GPT_WTE, 0, 64));
  EXPECT_NE(Initial(c, 1, GPT_WTE, 0, 64), Initial(c, 1, GPT_WPE, 0, 64));
  EXPECT_NE(Initial(c, 1, first + GPT_UP_WEIGHT, 0, 64),
            Initial(c, 1, second + GPT_UP_WEIGHT, 0, 64));
}

TEST(GptParams, InitialDistributions) {
  const gpt_config c = Config(0);
  const int32_t block = gpt_unit_first_param(&c, 1);
  struct {
    int32_t param;
    double mean, deviation;
  } cases[] = {
      {GPT_WTE, 0.0, 0.02},
      {block + GPT_UP_WEIGHT, 0.0, 0.02},
      {block + GPT_DOWN_WEIGHT, 0.0, 0.02 / std::sqrt(6.0)},
      {block + GPT_PROJECTION_WEIGHT, 0.0, 0.02 / std::sqrt(6.0)},
      {block + GPT_LN1_GAIN, 1.0, 0.0},
      {block + GPT_DOWN_BIAS, 0.0, 0.0},
  };
  for (const auto &expected : cases) {
    const int64_t numel = gpt_param_numel(&c, expected.param);
    double sum = 0.0, squares = 0.0;
    for (float v : Initial(c, 1, expected.param, 0, numel)) {
      sum += double(v);
      squares += double(v) * double(v);
    }
    const double mean = sum / double(numel);
    const double deviation = std::sqrt(std::max(0.0, squares / double(numel) - mean * mean));
    /* At least 256 samples: four standard errors of a deviation are 4/sqrt(512), 18 percent. */
    EXPECT_NEAR(mean, expected.mean, 4.0 * expected.deviation / std::sqrt(double(numel)));
    EXPECT_NEAR(deviation, expected.deviation, 0.18 * expected.deviation);
  }
}

TEST(GptParams, ATiedHeadStartsAsTheEmbedding) {
  const gpt_config tied = Config(1), untied = Config(0);
  const int32_t head = gpt_param_count(&tied) - 1;
  EXPECT_EQ(Initial(tied, 1, head, 0, 256), Initial(tied, 1, GPT_WTE, 0, 256));
  EXPECT_NE(Initial(untied, 1, head, 0, 256), Initial(untied, 1, GPT_WTE, 0, 256));
}

} // namespace
