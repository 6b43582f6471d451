/* SPDX-License-Identifier: MIT */
#include "describe.h"

#include <string.h>
#include <strings.h>

int plan_dtype_of(const char *word, mfsdp_dtype *dtype) {
  static const mfsdp_dtype all[] = {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i)
    if (strcasecmp(word, mfsdp_dtype_name(all[i])) == 0) {
      *dtype = all[i];
      return 1;
    }
  return 0;
}

int plan_role_of(const char *word, mfsdp_role *role) {
  static const mfsdp_role all[] = {MFSDP_ROLE_MATRIX, MFSDP_ROLE_ELEMENTWISE, MFSDP_ROLE_FROZEN};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i)
    if (strcmp(word, mfsdp_role_name(all[i])) == 0) {
      *role = all[i];
      return 1;
    }
  return 0;
}

int plan_number_of(const char *word, int64_t most, int64_t *number) {
  int64_t value = 0;
  if (!*word) return 0;
  for (; *word; ++word) {
    if (*word < '0' || *word > '9') return 0;
    if (!mfsdp_i64_mul(value, 10, &value) || !mfsdp_i64_add(value, *word - '0', &value)) return 0;
  }
  *number = value;
  return value <= most;
}

/* The view is set by the caller. */
static int parts_set(const char *list, plan_params *params, mfsdp_param *param, const char *where,
                     plan_error *error) {
  int32_t count = 1;
  int64_t *rows;
  for (const char *c = list; *c; ++c)
    count += *c == ',';
  rows = (int64_t *)plan_params_keep(params, (size_t)count * sizeof *rows);
  if (!rows) return plan_fail(error, "%s: no memory", where);
  for (int32_t i = 0; i < count; ++i) {
    const size_t length = strcspn(list, ",");
    char word[24] = "";
    if (length < sizeof word) memcpy(word, list, length);
    if (!plan_number_of(word, INT64_MAX, &rows[i]))
      return plan_fail(error, "%s: view %s needs numbers like %s=128,64, has '%.40s'", where,
                       mfsdp_view_name(param->view), mfsdp_view_name(param->view), list);
    list += length + (list[length] == ',');
  }
  param->part_rows = rows;
  param->part_count = count;
  return PLAN_OK;
}

int plan_view_set(const char *word, plan_params *params, mfsdp_param *param, const char *where,
                  plan_error *error) {
  int64_t heads;
  if (strcmp(word, "-") == 0 || strcmp(word, "whole") == 0) {
    param->view = MFSDP_VIEW_WHOLE;
  } else if (strcmp(word, "conv") == 0) {
    param->view = MFSDP_VIEW_CONV;
  } else if (strcmp(word, "batch") == 0) {
    param->view = MFSDP_VIEW_BATCH;
  } else if (strncmp(word, "heads=", 6) == 0) {
    if (!plan_number_of(word + 6, INT32_MAX, &heads))
      return plan_fail(error, "%s: view heads needs a number like heads=32, has '%.40s'", where,
                       word);
    param->view = MFSDP_VIEW_HEADS;
    param->head_count = (int32_t)heads;
  } else if (strncmp(word, "rows=", 5) == 0) {
    param->view = MFSDP_VIEW_ROWS;
    return parts_set(word + 5, params, param, where, error);
  } else if (strncmp(word, "batch=", 6) == 0) {
    param->view = MFSDP_VIEW_BATCH;
    return parts_set(word + 6, params, param, where, error);
  } else {
    return plan_fail(
        error,
        "%s: unknown view '%.40s', needs -, whole, conv, batch, batch=A,B,..., heads=N or "
        "rows=A,B,...",
        where, word);
  }
  return PLAN_OK;
}

void plan_dtype_set(mfsdp_param *param, mfsdp_dtype compute) {
  param->compute = param->grad = param->wire = compute;
  param->master = compute == MFSDP_F64 ? MFSDP_F64 : MFSDP_F32;
  if (compute == MFSDP_F64) param->wire = MFSDP_F32; /* sums are kept in f32 */
}
