/* SPDX-License-Identifier: MIT */
/*
 * config.h - the shape of the model, and the order of its units and parameters.
 *
 * Units, in forward order: 0 the embeddings, 1 .. layers the blocks, layers + 1 the head.
 * Parameters are numbered over all units in that order; inside a unit the order is that of the
 * enums below. Every weight is rows = outputs, row-major: y = x W^T + b.
 */
#ifndef GPT_CONFIG_H
#define GPT_CONFIG_H

#include "error.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPT_VOCAB 256 /* tokens are bytes */

typedef struct gpt_config {
  int64_t layers, dim, heads; /* dim is a multiple of heads */
  int64_t context, batch;     /* tokens per window, windows per micro-batch */
  int64_t vocab;              /* at most GPT_VOCAB */
  int32_t tied;               /* 1: the head's weight is the token embedding */
} gpt_config;

enum { GPT_WTE = 0, GPT_WPE, GPT_EMBEDDING_PARAMS };
enum {
  GPT_LN1_GAIN = 0,
  GPT_LN1_BIAS,
  GPT_QKV_WEIGHT, /* 3*dim x dim: rows of q, then k, then v; in each, head after head */
  GPT_QKV_BIAS,
  GPT_PROJECTION_WEIGHT, /* dim x dim */
  GPT_PROJECTION_BIAS,
  GPT_LN2_GAIN,
  GPT_LN2_BIAS,
  GPT_UP_WEIGHT, /* 4*dim x dim */
  GPT_UP_BIAS,
  GPT_DOWN_WEIGHT, /* dim x 4*dim */
  GPT_DOWN_BIAS,
  GPT_BLOCK_PARAMS
};
enum { GPT_FINAL_GAIN = 0, GPT_FINAL_BIAS, GPT_HEAD_WEIGHT, GPT_HEAD_PARAMS };

/* Checks ranges, divisibility, and that the sizes of all tensors and activations fit. */
int gpt_config_check(const gpt_config *config, gpt_error *error);

/* The functions below take a checked configuration. */
int32_t gpt_unit_count(const gpt_config *config);
int32_t gpt_param_count(const gpt_config *config);
/* Number of the unit's first parameter, and how many it has. */
int32_t gpt_unit_first_param(const gpt_config *config, int32_t unit);
int32_t gpt_unit_param_count(const gpt_config *config, int32_t unit);

/* Tokens in one micro-batch. */
int64_t gpt_config_tokens(const gpt_config *config);
/* Floating-point operations of the matrix products for one token, forward plus backward (three
 * times the forward; attention counted as its causal half). Element-wise work is not counted. */
double gpt_config_flops_per_token(const gpt_config *config);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CONFIG_H */
