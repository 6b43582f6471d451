/* SPDX-License-Identifier: MIT */
/*
 * model.h - a decoder-only transformer on bytes, run unit by unit on parameters that somebody else
 * holds: the model owns activations only, so a unit's weights need to exist just while it runs.
 *
 *   gpt_model_create(&config, device, &model, &error);
 *   gpt_data_batch(data, seed, block, model.inputs, model.targets);
 *   for (u = 0; u < model.unit_count; ++u) gpt_forward_unit(&model, u, params_of_unit[u]);
 *   for (u = model.unit_count; u-- > 0;) gpt_backward_unit(&model, u, params_of_unit[u],
 * grads_of_unit[u]);
 *   if (device.ops->finish(device.self) == MFSDP_OK) loss = model.loss;   // after the forward
 *
 * Pre-norm blocks: x += attention(layernorm(x)); x += down(gelu(up(layernorm(x)))); then a final
 * layernorm and the head. The loss is the mean cross-entropy over batch * context tokens.
 *
 * What it computes on is a table of operations (ops.h): activations, parameters and gradients
 * lie in the device's memory, and calls may only enqueue.
 *
 * One model belongs to one thread. All memory is allocated by gpt_model_create; running allocates
 * nothing. Bits depend on parameters, tokens and the operations only.
 */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include "config.h"
#include "ops.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What one block keeps for its backward pass; rows are batch * context. */
typedef struct gpt_block_state {
  float *x;                     /* rows x dim: the block's input */
  float *mean1, *rstd1, *norm1; /* rows, rows, rows x dim */
  float *qkv;                   /* rows x 3*dim */
  float *probs;                 /* batch x heads x context x context */
  float *attended;              /* rows x dim */
  float *middle;                /* rows x dim: after the first residual */
  float *mean2, *rstd2, *norm2;
  float *slope, *active; /* rows x 4*dim: gelu' and gelu of the up projection */
} gpt_block_state;

typedef struct gpt_model {
  gpt_config config;
  gpt_device device;
  gpt_attention attention;
  int32_t unit_count;
  int32_t evaluating;        /* 1: forward only; the caller sets it before unit 0 */
  double loss;               /* of the last forward; there after the device's `finish` */
  uint8_t *inputs, *targets; /* batch x context tokens, PINNED: written by the caller before unit 0,
                              * and again once the loss is there */
  float *logits; /* rows x vocab; after a training forward it holds their gradient instead */
  /* private */
  gpt_block_state *blocks;
  float *final_x, *final_mean, *final_rstd, *final_norm;
  float *dstream, *dnarrow, *dwide; /* gradients in flight: dim, dim and 4*dim wide */
  uint8_t *tokens, *wanted;         /* inputs and targets on the device */
  void *workspace;                  /* of the device's operations */
  void *memory, *host_memory;       /* DEVICE: the activations; PINNED: blocks, inputs, targets */
  size_t memory_nbytes, host_nbytes;
} gpt_model;

/* Checks config (see gpt_config_check) and allocates. On failure *model needs no destroy. What
 * device.self points to must outlive the model. */
int gpt_model_create(const gpt_config *config, gpt_device device, gpt_model *model,
                     gpt_error *error);
void gpt_model_destroy(gpt_model *model);

/* Units run in order 0 .. unit_count - 1. params: one pointer per parameter of the unit, in the
 * order of the enums in config.h; a tied head gets the embedding as its GPT_HEAD_WEIGHT. */
void gpt_forward_unit(gpt_model *model, int32_t unit, const float *const *params);

/* After a training forward, units in order unit_count - 1 .. 0. Gradients are ADDED to grads
 * (same order and shapes as params): start from zeros. With a tied head, GPT_HEAD_WEIGHT of the
 * head and GPT_WTE of the embedding are the same buffer, and both uses add into it. */
void gpt_backward_unit(gpt_model *model, int32_t unit, const float *const *params,
                       float *const *grads);

/* All units with all parameters at hand (gpt_param_count pointers in declared order). */
void gpt_forward(gpt_model *model, const float *const *params);
void gpt_backward(gpt_model *model, const float *const *params, float *const *grads);

#ifdef __cplusplus
}
#endif

#endif /* GPT_MODEL_H */
