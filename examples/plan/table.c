/* SPDX-License-Identifier: MIT */
#include "table.h"

#include "describe.h"
#include "file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NBYTES ((size_t)1 << 30)

int plan_shape_of(char *word, mfsdp_param *param) {
  param->ndim = 0;
  for (;;) {
    const size_t length = strcspn(word, "x");
    const char end = word[length];
    if (param->ndim == MFSDP_MAX_NDIM) return 0;
    word[length] = '\0';
    if (!plan_number_of(word, INT64_MAX, &param->shape[param->ndim++])) {
      word[length] = end; /* whole again for a message */
      return 0;
    }
    word[length] = end;
    if (!end) return 1;
    word += length + 1;
  }
}

static int alias_set(const char *word, plan_params *params, mfsdp_param *param, const char *where,
                     plan_error *error) {
  const size_t nbytes = strlen(word) + 1;
  char *copy;
  if (strncmp(word, "alias=", 6) != 0)
    return plan_fail(error, "%s: '%.60s' is a word too many (alias=NAME may stand here)", where,
                     word);
  copy = (char *)plan_params_keep(params, nbytes);
  if (!copy) return plan_fail(error, "%s: no memory", where);
  memcpy(copy, word + 6, nbytes - 6);
  param->alias_of = copy;
  return PLAN_OK;
}

static int read_line(const char *where, char *line, plan_params *params, plan_error *error) {
  char *words[8];
  int count = 0;
  int64_t unit;
  mfsdp_dtype dtype;
  mfsdp_param *param;
  while (count < 8 && (words[count] = plan_file_word(&line)) != NULL)
    ++count;
  if (count < 6 || count > 7)
    return plan_fail(error, "%s: has %s%d words, needs name dtype shape unit role view", where,
                     count == 8 ? "at least " : "", count);
  param = plan_params_add(params, words[0], error);
  if (!param) return PLAN_USAGE_ERROR;
  if (!plan_dtype_of(words[1], &dtype))
    return plan_fail(error, "%s: unknown dtype '%.40s', needs f32, f64, bf16 or f16", where,
                     words[1]);
  plan_dtype_set(param, dtype);
  if (!plan_shape_of(words[2], param))
    return plan_fail(error, "%s: '%.60s' is no shape: needs 1 to %d sizes like 4096x128", where,
                     words[2], MFSDP_MAX_NDIM);
  if (!plan_number_of(words[3], MFSDP_PLAN_MAX_UNIT, &unit))
    return plan_fail(error, "%s: unknown unit '%.40s', needs a number of 0 to %d", where, words[3],
                     MFSDP_PLAN_MAX_UNIT);
  param->unit = (int32_t)unit;
  if (!plan_role_of(words[4], &param->role))
    return plan_fail(error, "%s: unknown role '%.40s', needs matrix, elementwise or frozen", where,
                     words[4]);
  if (plan_view_set(words[5], params, param, where, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  return count == 7 ? alias_set(words[6], params, param, where, error) : PLAN_OK;
}

int plan_table_read(const char *path, plan_params *params, plan_error *error) {
  int number = 0, status = PLAN_OK;
  char *text, *rest, *line;
  if (plan_file_read_text(path, MOST_NBYTES, &text, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  rest = text;
  while (status == PLAN_OK && (line = plan_file_line(&rest, &number)) != NULL) {
    char where[300];
    snprintf(where, sizeof where, "%.270s:%d", path, number);
    status = read_line(where, line, params, error);
  }
  free(text);
  if (status == PLAN_OK && params->count == 0)
    return plan_fail(error, "%s has no tensors: needs lines of name dtype shape unit role view",
                     path);
  return status;
}
