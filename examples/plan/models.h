/* SPDX-License-Identifier: MIT */
/*
 * models.h - the tensors of public models, from their published configurations.
 *
 *   plan_params params;
 *   plan_params_init(&params);
 *   if (plan_model_fill("llama3-8b", PLAN_VIEWS_WHOLE, &params, &error) != PLAN_OK) ...
 *
 * Unit 0 is the embedding, unit i + 1 block i, the last unit the final norm and the head. Hidden
 * matrices (router included, as Moonlight's Muon does) are MATRIX; embeddings, head, norms and
 * biases are ELEMENTWISE. A fused query-key-value tensor is cut into its three matrices, the
 * experts of a layer are one tensor per projection with view batch. Weights are (out, in). compute,
 * grad and wire are bf16, master f32.
 */
#ifndef PLAN_MODELS_H
#define PLAN_MODELS_H

#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum plan_views {
  PLAN_VIEWS_WHOLE = 1, /* a projection is one matrix, as public Muon implementations take it */
  PLAN_VIEWS_HEADS      /* query, key and value projections are cut into heads: smaller matrices,
                         * and another optimizer than with whole projections */
} plan_views;

/* What a family of decoder-only transformers needs; 0 where a model has no such part. */
typedef struct plan_model {
  const char *name, *source; /* source: where the numbers come from */
  int64_t vocab, context;    /* context > 0: learned positions */
  int64_t dim, layers, heads, kv_heads, head_dim;
  int64_t ffn;   /* of dense layers */
  int64_t gated; /* 1: gate, up and down; 0: up and down, with biases everywhere */
  int64_t tied, qk_norm;
  int64_t experts, experts_used, expert_ffn, shared_experts, dense_layers, router_bias;
  int64_t q_rank, kv_rank, nope_dim, rope_dim, v_dim; /* latent attention; kv_rank 0: none */
  int64_t elements;                                   /* total as published, to check against */
} plan_model;

/* Query: the model at `index` of the built-in table, NULL past its end. */
const plan_model *plan_model_at(int index);
/* NULL if there is none of that name. */
const plan_model *plan_model_find(const char *name);

/* Appends the tensors of a built-in model. PLAN_USAGE_ERROR for an unknown name (the message lists
 * the known ones) or without memory. */
int plan_model_fill(const char *name, plan_views views, plan_params *params, plan_error *error);
/* The same for any description of the family. */
int plan_model_build(const plan_model *model, plan_views views, plan_params *params,
                     plan_error *error);

/* Elements that one token passes through: all but the experts it is not routed to. */
int64_t plan_model_active(const plan_model *model);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_MODELS_H */
