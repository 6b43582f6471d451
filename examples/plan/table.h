/* SPDX-License-Identifier: MIT */
/*
 * table.h - reads tensors from a text table, one a line:
 *
 *   # name            dtype  shape       unit  role         view
 *   wte.weight        bf16   50257x768   0     elementwise  -
 *   h.0.qkv.weight    bf16   2304x768    1     matrix       heads=3
 *   lm_head.weight    bf16   50257x768   2     elementwise  -     alias=wte.weight
 */
#ifndef PLAN_TABLE_H
#define PLAN_TABLE_H

#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Appends the tensors of the file. Errors name the file and the line; the planner's own rules
 * (views, aliases, dtypes of a unit) are left to it. */
int plan_table_read(const char *path, plan_params *params, plan_error *error);

/* "4096x128" into ndim and shape; 0 if it is none. */
int plan_shape_of(char *word, mfsdp_param *param);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_TABLE_H */
