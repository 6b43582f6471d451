/* SPDX-License-Identifier: MIT */
/*
 * layers.h - the element-wise and row-wise layers of the transformer on the host, forward and
 * backward.
 *
 * All arrays are fp32, row-major, in host memory and do not overlap unless a comment allows it.
 * Parameter gradients (dgain, dbias, dwte, dwpe) are ADDED to what the buffers hold. Results are
 * deterministic: their bits depend on the inputs only. Nothing allocates.
 */
#ifndef GPT_LAYERS_H
#define GPT_LAYERS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = (x - mean) * rstd * gain + bias for each row; x, y are rows x dim; gain, bias are dim;
 * mean, rstd (rows each) are kept for the backward pass. y may be x only if no backward follows. */
void gpt_layernorm_forward(int64_t rows, int64_t dim, const float *x, const float *gain,
                           const float *bias, float *y, float *mean, float *rstd);

/* ADDS the gradient to dx (the residual stream carries its own part already). */
void gpt_layernorm_backward(int64_t rows, int64_t dim, const float *x, const float *gain,
                            const float *mean, const float *rstd, const float *dy, float *dx,
                            float *dgain, float *dbias);

/* y[row] = bias: the start value of a product that accumulates (beta 1). */
void gpt_bias_rows(int64_t rows, int64_t dim, const float *bias, float *y);
/* y[row] = x[row] + bias: the residual and the bias, before a product accumulates into y. */
void gpt_residual_bias_rows(int64_t rows, int64_t dim, const float *x, const float *bias, float *y);
/* dbias += sum of the rows of dy. */
void gpt_bias_backward(int64_t rows, int64_t dim, const float *dy, float *dbias);

/*
 * y = gelu(u), slope = gelu'(u) at u = x + bias. slope may be x. Tanh form of GPT-2, written as
 * u * sigmoid(2 sqrt(2/pi) (u + 0.044715 u^3)), which equals 0.5 u (1 + tanh(...)) exactly.
 * Error against float64 (measured over [-12, 12]): y below 2e-7 * max(1, |u|), slope below 3e-7.
 */
void gpt_bias_gelu_forward(int64_t rows, int64_t dim, const float *x, const float *bias, float *y,
                           float *slope);
/* dy *= slope, in place: the gradient with respect to u. */
void gpt_gelu_backward(int64_t count, const float *slope, float *dy);

/* x[b,t] = wte[token[b,t]] + wpe[t]; token is batch x context, each below the rows of wte. */
void gpt_embedding_forward(int64_t batch, int64_t context, int64_t dim, const uint8_t *token,
                           const float *wte, const float *wpe, float *x);
void gpt_embedding_backward(int64_t batch, int64_t context, int64_t dim, const uint8_t *token,
                            const float *dx, float *dwte, float *dwpe);

/* Mean over rows of -log softmax(logits)[target], summed in fp64. logits: rows x classes, kept. */
double gpt_cross_entropy(int64_t rows, int64_t classes, const float *logits, const uint8_t *target);
/* The same, and overwrites logits with the gradient of that mean. */
double gpt_cross_entropy_backward(int64_t rows, int64_t classes, float *logits,
                                  const uint8_t *target);

#ifdef __cplusplus
}
#endif

#endif /* GPT_LAYERS_H */
