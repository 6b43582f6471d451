/* SPDX-License-Identifier: MIT */
/*
 * attention.h - causal multi-head attention over the fused q, k, v activation.
 *
 * qkv is (batch, context, 3*dim): q in columns [0, dim), k in [dim, 2*dim), v in [2*dim, 3*dim);
 * in each, head h is columns [h*dim/heads, (h+1)*dim/heads). out is (batch, context, dim).
 *   out = softmax(q k^T / sqrt(dim/heads), over earlier and equal positions) v
 * All fp32, row-major, host memory, no overlap. Deterministic; nothing allocates.
 */
#ifndef GPT_ATTENTION_H
#define GPT_ATTENTION_H

#include "gemm.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Query rows handled in one product. Only columns up to the end of the stretch are computed, so
 * a long context costs little more than the lower triangle. */
#define GPT_ATTENTION_ROWS 64

/* Floats of `probs` (batch, heads, context, context), kept for the backward pass. */
int64_t gpt_attention_probs_count(const gpt_attention *attention);
/* Floats of `workspace` of the backward pass. */
int64_t gpt_attention_workspace_count(const gpt_attention *attention);

/* Writes probs and out. In probs only the columns up to the end of each stretch are written. */
void gpt_attention_forward(const gpt_attention *attention, gpt_sgemm_fn sgemm, const float *qkv,
                           float *probs, float *out);
/* Overwrites dqkv (shape of qkv) with the gradient. */
void gpt_attention_backward(const gpt_attention *attention, gpt_sgemm_fn sgemm, const float *qkv,
                            const float *probs, const float *dout, float *dqkv, float *workspace);

#ifdef __cplusplus
}
#endif

#endif /* GPT_ATTENTION_H */
