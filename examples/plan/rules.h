/* SPDX-License-Identifier: MIT */
/*
 * rules.h - from the names of a checkpoint to unit, role and view: stated, printed, overridable.
 *
 * A rule is a line `pattern role view unit`; the first one that matches a name decides, and a name
 * that none matches is an error, never a guess. In a pattern # stands for a decimal number, * for
 * any text; everything else for itself. role: matrix, elementwise, frozen, or skip (not a
 * parameter: leave it out). view as in describe.h. unit: a number; first (0); block or block+N (1,
 * or 1 + N, plus the number that the first # stood for); last (1 + the largest unit of all blocks).
 *
 *   *layers.#.self_attn.q_proj.weight   matrix       heads=32  block
 *   *embed_tokens.weight                elementwise  -         first
 */
#ifndef PLAN_RULES_H
#define PLAN_RULES_H

#include "params.h"
#include "safetensors.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum plan_unit_kind { PLAN_UNIT_NUMBER, PLAN_UNIT_BLOCK, PLAN_UNIT_LAST } plan_unit_kind;

typedef struct plan_rule {
  const char *pattern, *role_word, *view, *unit_word; /* as written */
  mfsdp_role role;                                    /* not read if skip */
  int skip;
  plan_unit_kind unit_kind;
  int32_t unit;  /* the number, or N of block+N */
  int32_t used;  /* tensors it decided */
  int from_file; /* 0: built in */
} plan_rule;

typedef struct plan_rules {
  plan_rule *list;
  int32_t count, capacity;
  char **texts; /* what the words point into */
  int32_t text_count;
} plan_rules;

/* The built-in rules: Llama, Qwen, Mistral, DeepSeek and Kimi names as transformers writes them,
 * and GPT-2's. If `path` is not NULL, the rules of that file come before them. */
int plan_rules_read(const char *path, plan_rules *rules, plan_error *error);
void plan_rules_free(plan_rules *rules);

/* 1 if the pattern matches the whole name; *number is what its first # stood for, else -1. */
int plan_rule_matches(const char *pattern, const char *name, int64_t *number);

/* Appends the tensors of one file as parameters, each by its rule. Units that say `last` are set by
 * plan_rules_finish, after all files. */
int plan_rules_apply(plan_rules *rules, const char *path, const mfsdp_safetensors_tensor *tensors,
                     int32_t count, plan_params *params, plan_error *error);
int plan_rules_finish(plan_params *params, plan_error *error);

/* Prints the rules that decided something, and for how many tensors. */
void plan_rules_print(const plan_rules *rules, FILE *f);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_RULES_H */
