/* SPDX-License-Identifier: MIT */
/*
 * params.h - the model's parameters as the library wants to know them, and their initial values.
 *
 *   gpt_param_table_create(&config, &table, &error);
 *   plan_desc.params = table.params; plan_desc.param_count = table.count;
 *   gpt_init_value(&config, seed, param, piece->first, piece->count, shard + piece->shard_offset);
 */
#ifndef GPT_PARAMS_H
#define GPT_PARAMS_H

#include "config.h"
#include "mfsdp/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Hyperparameter groups of the parameters. */
enum {
  GPT_GROUP_HIDDEN = 0, /* weights of the blocks: role MATRIX; Muon, or AdamW for comparison */
  GPT_GROUP_DECAY,      /* embeddings and head: AdamW with weight decay */
  GPT_GROUP_PLAIN,      /* norms and biases: AdamW without */
  GPT_GROUP_COUNT
};

typedef struct gpt_param_table {
  mfsdp_param *params; /* count, in declared order; names and part_rows live in the same block */
  int32_t count;
} gpt_param_table;

/*
 * Weights of the blocks have role MATRIX, q, k and v as three matrices (view ROWS); everything else
 * is ELEMENTWISE. A tied head is an alias of the token embedding. fp32 throughout. On failure
 * *table needs no destroy. Names look like wte.weight, blocks.3.attn.qkv.weight, ln_f.bias.
 */
int gpt_param_table_create(const gpt_config *config, gpt_param_table *table, gpt_error *error);
void gpt_param_table_destroy(gpt_param_table *table);

/* Elements of parameter `param`. */
int64_t gpt_param_numel(const gpt_config *config, int32_t param);
/* Elements of all parameters together; a tied head counts once. */
int64_t gpt_config_param_numel(const gpt_config *config);

/*
 * Initial values of elements first .. first + count - 1 of parameter `param`, to out. A value is a
 * pure function of (seed, name, element), so it does not depend on who asks for which part. Weights
 * are normal with deviation 0.02 (those that feed the residual stream divided by sqrt(2 layers), as
 * GPT-2), gains 1, biases 0. A tied head has the embedding's values.
 */
void gpt_init_value(const gpt_config *config, uint64_t seed, int32_t param, int64_t first,
                    int64_t count, float *out);

#ifdef __cplusplus
}
#endif

#endif /* GPT_PARAMS_H */
