/* SPDX-License-Identifier: MIT */
/* describe.h - words of tables and rules: dtypes, roles, views. */
#ifndef PLAN_DESCRIBE_H
#define PLAN_DESCRIBE_H

#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 1 if the word is one ("bf16"; upper case too). */
int plan_dtype_of(const char *word, mfsdp_dtype *dtype);
/* "matrix", "elementwise", "frozen". */
int plan_role_of(const char *word, mfsdp_role *role);

/* A whole decimal number of 0 to `most`. */
int plan_number_of(const char *word, int64_t most, int64_t *number);

/* "-" (whole), "whole", "conv", "batch", "batch=A,B", "heads=N", "rows=A,B,C". `where` begins messages. */
int plan_view_set(const char *word, plan_params *params, mfsdp_param *param, const char *where,
                  plan_error *error);

/* bf16 compute, gradients and wire keep `compute`, masters are f32 (f64 for f64). */
void plan_dtype_set(mfsdp_param *param, mfsdp_dtype compute);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_DESCRIBE_H */
