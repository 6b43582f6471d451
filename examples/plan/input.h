/* SPDX-License-Identifier: MIT */
/* input.h - from the words of a command line to tensors. */
#ifndef PLAN_INPUT_H
#define PLAN_INPUT_H

#include "options.h"
#include "rules.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct plan_input {
  plan_params params;
  plan_rules rules;        /* empty unless the input is safetensors */
  const plan_model *model; /* NULL unless built in */
  int64_t active; /* elements a token passes: those of a file all, without FROZEN ones too */
  char title[160];
} plan_input;

/* Reads what the options name; *input is to be freed, also after a failure. */
int plan_input_read(const plan_options *options, plan_input *input, plan_error *error);
void plan_input_free(plan_input *input);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_INPUT_H */
