/* SPDX-License-Identifier: MIT */
#include "input.h"

#include "describe.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

static int is_safetensors(const char *path) {
  static const char ending[] = ".safetensors";
  const size_t length = strlen(path), end = sizeof ending - 1;
  return length >= end && strcmp(path + length - end, ending) == 0;
}

static const char *last_part(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

static int by_name(const void *a, const void *b) {
  const mfsdp_param *const *x = (const mfsdp_param *const *)a, *const *y =
                                                                   (const mfsdp_param *const *)b;
  return strcmp((*x)->name, (*y)->name);
}

/* Bytes of the UTF-8 character at `text`; 0 for a control character or what is no UTF-8. */
static size_t character(const char *text) {
  const unsigned char *u = (const unsigned char *)text;
  const size_t length = u[0] < 0x80 ? 1 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : 4;
  if (u[0] < 0x20 || u[0] == 0x7f || (u[0] >= 0x80 && u[0] < 0xc2) || u[0] > 0xf4) return 0;
  for (size_t i = 1; i < length; ++i) /* the 0 at the end is no such byte */
    if ((u[i] & 0xc0) != 0x80) return 0;
  if ((u[0] == 0xc2 && u[1] < 0xa0) || (u[0] == 0xe0 && u[1] < 0xa0) ||
      (u[0] == 0xed && u[1] >= 0xa0) || (u[0] == 0xef && u[1] == 0xbf && u[2] >= 0xbe) ||
      (u[0] == 0xf0 && u[1] < 0x90) || (u[0] == 0xf4 && u[1] >= 0x90))
    return 0;
  return length;
}

/* A file may have any name, a title stands in terminals, JSON and SVG: whole characters of at most
 * `room` - 1 bytes, ? for what is none. */
static void title_of(const char *name, char *title, size_t room) {
  size_t used = 0;
  while (*name) {
    const size_t length = character(name), step = length ? length : 1;
    if (used + step >= room) break;
    if (length)
      memcpy(title + used, name, length);
    else
      title[used] = '?';
    used += step;
    name += step;
  }
  title[used] = '\0';
}

/* A name in two files, before the planner says it without the files. */
static int check_names(const plan_options *o, const plan_params *params, plan_error *error) {
  const size_t count = (size_t)params->count;
  int status = PLAN_OK;
  const mfsdp_param **order = (const mfsdp_param **)malloc((count + 1) * sizeof *order);
  if (!order) return plan_fail(error, "no memory for %zu tensors", count);
  for (size_t i = 0; i < count; ++i)
    order[i] = &params->list[i];
  qsort((void *)order, count, sizeof *order, by_name);
  for (size_t i = 1; i < count && status == PLAN_OK; ++i)
    if (strcmp(order[i]->name, order[i - 1]->name) == 0)
      status = plan_fail(error, "tensor '%.200s' is in two of the %d files", order[i]->name,
                         o->input_count);
  free((void *)order);
  return status;
}

static int read_safetensors(const plan_options *o, plan_input *input, plan_error *error) {
  if (plan_rules_read(o->rules, &input->rules, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  for (int i = 0; i < o->input_count; ++i) {
    plan_safetensors st;
    int status;
    if (!is_safetensors(o->inputs[i]))
      return plan_fail(error, "%s: several inputs need to be .safetensors files, all of them",
                       o->inputs[i]);
    if (plan_safetensors_read(o->inputs[i], &st, error) != PLAN_OK) return PLAN_USAGE_ERROR;
    status = plan_rules_apply(&input->rules, o->inputs[i], mfsdp_safetensors_at(st.file, 0),
                              mfsdp_safetensors_count(st.file), &input->params, error);
    plan_safetensors_free(&st);
    if (status != PLAN_OK) return PLAN_USAGE_ERROR;
  }
  if (check_names(o, &input->params, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  if (input->params.count == 0) return plan_fail(error, "%s has no parameters", o->inputs[0]);
  if (o->input_count > 1) {
    char first[100];
    title_of(last_part(o->inputs[0]), first, sizeof first);
    snprintf(input->title, sizeof input->title, "%s and %d more", first, o->input_count - 1);
  }
  return plan_rules_finish(&input->params, error);
}

static int read_any(const plan_options *o, plan_input *input, plan_error *error) {
  const char *name = o->inputs[0];
  FILE *f;
  input->model = o->input_count == 1 ? plan_model_find(name) : NULL;
  if (o->input_count > 1 || is_safetensors(name)) return read_safetensors(o, input, error);
  if (o->rules)
    return plan_fail(error,
                     "--rules is for safetensors files; tables and models say what they are");
  if (input->model) return plan_model_fill(name, o->views, &input->params, error);
  f = fopen(name, "rb");
  if (!f) {
    if (strpbrk(name, "./")) return plan_table_read(name, &input->params, error);
    return plan_model_fill(name, o->views, &input->params, error); /* lists the names there are */
  }
  fclose(f);
  return plan_table_read(name, &input->params, error);
}

/* The planner's rules by tensor first: after it, sizes may be multiplied without a check. */
static int validate(plan_input *input, plan_error *error) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_context context;
  int status = PLAN_OK;
  if (mfsdp_context_init(&context, &desc) != MFSDP_OK) return plan_fail(error, "no context");
  for (int32_t i = 0; i < input->params.count && status == PLAN_OK; ++i) {
    int64_t numel = 0;
    if (mfsdp_param_validate(&context, &input->params.list[i], i, &numel) != MFSDP_OK) {
      status = plan_fail(error, "%s", mfsdp_context_error(&context)->message);
    } else if (!input->params.list[i].alias_of &&
               (!mfsdp_i64_add(input->active, numel, &input->active) ||
                input->active > MFSDP_PLAN_MAX_ELEMENTS)) {
      status = plan_fail(error, "with tensor '%.200s' there are more than %lld elements",
                         input->params.list[i].name, (long long)MFSDP_PLAN_MAX_ELEMENTS);
    }
  }
  if (input->model) input->active = plan_model_active(input->model);
  (void)mfsdp_context_destroy(&context);
  return status;
}

int plan_input_read(const plan_options *options, plan_input *input, plan_error *error) {
  memset(input, 0, sizeof *input);
  plan_params_init(&input->params);
  title_of(last_part(options->inputs[0]), input->title, sizeof input->title);
  if (read_any(options, input, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  for (int32_t i = 0; options->dtype && i < input->params.count; ++i)
    plan_dtype_set(&input->params.list[i], options->dtype);
  return validate(input, error);
}

void plan_input_free(plan_input *input) {
  plan_params_free(&input->params);
  plan_rules_free(&input->rules);
}
