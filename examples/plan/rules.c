/* SPDX-License-Identifier: MIT */
#include "rules.h"

#include "describe.h"
#include "file.h"

#include <stdlib.h>
#include <string.h>

#define MOST_NBYTES ((size_t)1 << 20)
#define UNIT_LAST (-2) /* stands in mfsdp_param.unit until plan_rules_finish */

/*
 * Names as the transformers library writes them. A 1-D weight that a rule calls a matrix is refused
 * by the planner. GPT-2's fused c_attn is stored (in, out), so its three parts are column ranges,
 * which no view cuts: it stays whole here. DeepSeek's fp8 checkpoints carry scales, which training
 * in bf16 does not have, and a prediction layer, which these rules take as one more block.
 */
static const char built_in[] =
    "*rotary_emb.inv_freq                          skip         -  first\n"
    "*_scale_inv                                   skip         -  first\n"
    "*h.#.attn.masked_bias                         skip         -  first\n"
    "*h.#.attn.bias                                skip         -  first\n"
    "*embed_tokens.weight                          elementwise  -  first\n"
    "*wte.weight                                   elementwise  -  first\n"
    "*wpe.weight                                   elementwise  -  first\n"
    "*lm_head.weight                               elementwise  -  last\n"
    "model.norm.weight                             elementwise  -  last\n"
    "*ln_f.weight                                  elementwise  -  last\n"
    "*ln_f.bias                                    elementwise  -  last\n"
    "*layers.#.*norm.weight                        elementwise  -  block\n"
    "*layers.#.*bias                               elementwise  -  block\n"
    "*layers.#.shared_head.head.weight             elementwise  -  block\n"
    "*layers.#.*_proj.weight                       matrix       -  block\n"
    "*layers.#.self_attn.kv_a_proj_with_mqa.weight matrix       -  block\n"
    "*layers.#.mlp.gate.weight                     matrix       -  block\n"
    "*layers.#.block_sparse_moe.gate.weight        matrix       -  block\n"
    "*layers.#.block_sparse_moe.experts.#.w#.weight matrix      -  block\n"
    "*h.#.ln_#.weight                              elementwise  -  block\n"
    "*h.#.*bias                                    elementwise  -  block\n"
    "*h.#.attn.c_attn.weight                       matrix       -  block\n"
    "*h.#.attn.c_proj.weight                       matrix       -  block\n"
    "*h.#.mlp.c_fc.weight                          matrix       -  block\n"
    "*h.#.mlp.c_proj.weight                        matrix       -  block\n";

/* ---- patterns ---- */

/* Where a # that starts at `name` may end: all its digits. A number past 63 bits matches nothing.
 */
static const char *digits(const char *name, int64_t *number) {
  const char *end = name;
  *number = 0;
  for (; *end >= '0' && *end <= '9'; ++end)
    if (!mfsdp_i64_mul(*number, 10, number) || !mfsdp_i64_add(*number, *end - '0', number))
      return name;
  return end;
}

/*
 * One * at a time is remembered: when what follows it fails, it takes one character more. That is
 * enough without recursion, since a later * makes an earlier one's choice final, and # always takes
 * all digits there are. The first number is found again on the way back.
 */
int plan_rule_matches(const char *pattern, const char *name, int64_t *number) {
  const char *star = NULL, *from = name;
  int64_t first = -1, before = -1;
  while (*name || *pattern) {
    int64_t value;
    const char *end;
    if (*pattern == '*') {
      star = ++pattern;
      from = name;
      before = first;
      continue;
    }
    if (*pattern == '#' && (end = digits(name, &value)) != name) {
      if (first < 0) first = value;
      name = end;
      ++pattern;
      continue;
    }
    if (*pattern && *pattern != '#' && *pattern == *name) {
      ++pattern;
      ++name;
      continue;
    }
    if (!star || !*from) return 0;
    /* Not into the middle of a number that # is to take whole. */
    name = ++from;
    while (*star == '#' && from[-1] >= '0' && from[-1] <= '9' && *from >= '0' && *from <= '9')
      name = ++from;
    pattern = star;
    first = before;
  }
  *number = first;
  return 1;
}

/* ---- reading ---- */

static int unit_of(const char *word, plan_rule *rule) {
  int64_t number;
  rule->unit_kind = PLAN_UNIT_NUMBER;
  rule->unit = 0;
  if (strcmp(word, "first") == 0) return 1;
  if (strcmp(word, "last") == 0) {
    rule->unit_kind = PLAN_UNIT_LAST;
    return 1;
  }
  if (strcmp(word, "block") == 0 || strncmp(word, "block+", 6) == 0) {
    rule->unit_kind = PLAN_UNIT_BLOCK;
    if (word[5] == '\0') return 1;
    if (!plan_number_of(word + 6, MFSDP_PLAN_MAX_UNIT, &number)) return 0;
    rule->unit = (int32_t)number;
    return 1;
  }
  if (!plan_number_of(word, MFSDP_PLAN_MAX_UNIT, &number)) return 0;
  rule->unit = (int32_t)number;
  return 1;
}

static int read_line(const char *path, int line_number, char *line, plan_rules *rules,
                     plan_error *error) {
  const char *words[5];
  int count = 0;
  plan_rule *rule;
  while (count < 5 && (words[count] = plan_file_word(&line)) != NULL)
    ++count;
  if (count != 4)
    return plan_fail(error, "%s:%d: a rule is a pattern, a role, a view and a unit", path,
                     line_number);
  if (rules->count == rules->capacity) {
    const int32_t capacity = rules->capacity ? 2 * rules->capacity : 32;
    plan_rule *list = (plan_rule *)realloc(rules->list, (size_t)capacity * sizeof *list);
    if (!list) return plan_fail(error, "%s: no memory", path);
    rules->list = list;
    rules->capacity = capacity;
  }
  rule = &rules->list[rules->count++];
  memset(rule, 0, sizeof *rule);
  rule->pattern = words[0];
  rule->role_word = words[1];
  rule->view = words[2];
  rule->unit_word = words[3];
  rule->skip = strcmp(words[1], "skip") == 0;
  if (!rule->skip && !plan_role_of(words[1], &rule->role))
    return plan_fail(error,
                     "%s:%d: unknown role '%.40s', needs matrix, elementwise, frozen or skip", path,
                     line_number, words[1]);
  if (!unit_of(words[3], rule))
    return plan_fail(error,
                     "%s:%d: unknown unit '%.40s', needs first, block, block+N, last or a "
                     "number of 0 to %d",
                     path, line_number, words[3], MFSDP_PLAN_MAX_UNIT);
  if (rule->unit_kind == PLAN_UNIT_BLOCK && !strchr(words[0], '#'))
    return plan_fail(error, "%s:%d: unit block needs a # in the pattern", path, line_number);
  return PLAN_OK;
}

/* Takes over `text`. */
static int read_text(const char *path, char *text, plan_rules *rules, plan_error *error) {
  char **texts =
      (char **)realloc(rules->texts, ((size_t)rules->text_count + 1) * sizeof *rules->texts);
  char *line;
  int number = 0, status = PLAN_OK;
  if (!texts || !text) {
    if (texts) rules->texts = texts;
    free(text);
    return plan_fail(error, "%s: no memory for rules", path);
  }
  rules->texts = texts;
  rules->texts[rules->text_count++] = text;
  while (status == PLAN_OK && (line = plan_file_line(&text, &number)) != NULL)
    status = read_line(path, number, line, rules, error);
  return status;
}

int plan_rules_read(const char *path, plan_rules *rules, plan_error *error) {
  char *text = NULL;
  memset(rules, 0, sizeof *rules);
  if (path) {
    if (plan_file_read_text(path, MOST_NBYTES, &text, error) != PLAN_OK) return PLAN_USAGE_ERROR;
    if (read_text(path, text, rules, error) != PLAN_OK) return PLAN_USAGE_ERROR;
    for (int32_t i = 0; i < rules->count; ++i)
      rules->list[i].from_file = 1;
  }
  text = (char *)malloc(sizeof built_in);
  if (text) memcpy(text, built_in, sizeof built_in);
  return read_text("built-in rules", text, rules, error);
}

void plan_rules_free(plan_rules *rules) {
  for (int32_t i = 0; i < rules->text_count; ++i)
    free(rules->texts[i]);
  free((void *)rules->texts);
  free(rules->list);
  memset(rules, 0, sizeof *rules);
}

/* ---- applying ---- */

/* What training would compute in: the file's dtype, or bf16 for the 8-bit floats of quantized
 * checkpoints. Integers are no parameters. */
static int compute_of(mfsdp_safetensors_dtype dtype, mfsdp_dtype *compute) {
  if (mfsdp_safetensors_dtype_to(dtype, compute)) return 1;
  *compute = MFSDP_BF16;
  return strncmp(mfsdp_safetensors_dtype_name(dtype), "F8_", 3) == 0;
}

static int apply_one(const plan_rule *rule, int64_t number, const char *path,
                     const mfsdp_safetensors_tensor *t, plan_params *params, plan_error *error) {
  mfsdp_param *p;
  mfsdp_dtype compute;
  char where[300];
  int64_t unit = rule->unit;
  snprintf(where, sizeof where, "%.90s: tensor '%.190s'", path, t->name);
  if (!compute_of(t->dtype, &compute))
    return plan_fail(error, "%s is %s, which no optimizer updates: give it a rule with role skip",
                     where, mfsdp_safetensors_dtype_name(t->dtype));
  if (t->ndim > MFSDP_MAX_NDIM)
    return plan_fail(error, "%s has %d dimensions, at most %d are planned", where, (int)t->ndim,
                     MFSDP_MAX_NDIM);
  /* A number of up to 63 bits stands in the name; rule->unit alone is in range. */
  if (rule->unit_kind == PLAN_UNIT_BLOCK && number <= MFSDP_PLAN_MAX_UNIT) unit += number + 1;
  if (rule->unit_kind == PLAN_UNIT_BLOCK &&
      (number > MFSDP_PLAN_MAX_UNIT || unit > MFSDP_PLAN_MAX_UNIT))
    return plan_fail(error, "%s: block %lld of rule '%s' has a unit past %d", where,
                     (long long)number, rule->pattern, MFSDP_PLAN_MAX_UNIT);
  p = plan_params_add(params, t->name, error);
  if (!p) return PLAN_USAGE_ERROR;
  plan_dtype_set(p, compute);
  p->role = rule->role;
  p->unit = rule->unit_kind == PLAN_UNIT_LAST ? UNIT_LAST : (int32_t)unit;
  p->ndim = t->ndim ? t->ndim : 1; /* a scalar is a vector of one */
  p->shape[0] = 1;
  if (t->ndim > 0) memcpy(p->shape, t->shape, (size_t)t->ndim * sizeof t->shape[0]);
  return plan_view_set(rule->view, params, p, where, error);
}

int plan_rules_apply(plan_rules *rules, const char *path, const mfsdp_safetensors_tensor *tensors,
                     int32_t count, plan_params *params, plan_error *error) {
  for (int32_t i = 0; i < count; ++i) {
    const mfsdp_safetensors_tensor *t = &tensors[i];
    int64_t number = -1;
    int32_t r = 0;
    while (r < rules->count && !plan_rule_matches(rules->list[r].pattern, t->name, &number))
      ++r;
    if (r == rules->count)
      return plan_fail(error,
                       "%s: no rule matches tensor '%.200s': say its role, view and unit in a file "
                       "for --rules",
                       path, t->name);
    ++rules->list[r].used;
    if (rules->list[r].skip) continue;
    if (apply_one(&rules->list[r], number, path, t, params, error) != PLAN_OK)
      return PLAN_USAGE_ERROR;
  }
  return PLAN_OK;
}

int plan_rules_finish(plan_params *params, plan_error *error) {
  int32_t largest = 0;
  int any_last = 0;
  for (int32_t i = 0; i < params->count; ++i) {
    any_last |= params->list[i].unit == UNIT_LAST;
    if (params->list[i].unit > largest) largest = params->list[i].unit;
  }
  if (any_last && largest == MFSDP_PLAN_MAX_UNIT)
    return plan_fail(error, "no unit number is left for `last`");
  for (int32_t i = 0; i < params->count; ++i)
    if (params->list[i].unit == UNIT_LAST) params->list[i].unit = largest + 1;
  return PLAN_OK;
}

void plan_rules_print(const plan_rules *rules, FILE *f) {
  fprintf(f, "%-48s %-12s %-8s %-8s %s\n", "rule (first match decides)", "role", "view", "unit",
          "tensors");
  for (int32_t i = 0; i < rules->count; ++i) {
    const plan_rule *r = &rules->list[i];
    if (r->used == 0) continue;
    fprintf(f, "%-48s %-12s %-8s %-8s %d%s\n", r->pattern, r->role_word, r->view, r->unit_word,
            (int)r->used, r->from_file ? "  (--rules)" : "");
  }
}
