/* SPDX-License-Identifier: MIT */
/*
 * layers_cuda.h - the element-wise and row-wise layers of the transformer as CUDA kernels: what
 * layers.h and the softmax of attention.c compute on the host. Products are cuBLAS's (ops_cuda.c).
 *
 * Each function enqueues on `stream` and returns a cudaError_t as an int. Arrays are fp32,
 * row-major, in device memory; the comments of layers.h and ops.h hold, also for what may
 * overlap. Deterministic: every sum has an order that depends on the shape alone, and there are
 * no atomics. The kernels are simple rather than fast.
 * STATUS: compiled for real devices, run on the host double of the test suite, not yet run on
 * hardware.
 */
#ifndef GPT_CUDA_LAYERS_CUDA_H
#define GPT_CUDA_LAYERS_CUDA_H

#include <stdint.h>

struct CUstream_st;

#ifdef __cplusplus
extern "C" {
#endif

int gpt_cuda_scale(struct CUstream_st *stream, int64_t count, float factor, float *x);

int gpt_cuda_layernorm_forward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                               const float *x, const float *gain, const float *bias, float *y,
                               float *mean, float *rstd);
int gpt_cuda_layernorm_backward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                                const float *x, const float *gain, const float *mean,
                                const float *rstd, const float *dy, float *dx, float *dgain,
                                float *dbias);

/* x NULL: y[row] = bias. */
int gpt_cuda_bias_rows(struct CUstream_st *stream, int64_t rows, int64_t dim, const float *x,
                       const float *bias, float *y);
int gpt_cuda_bias_backward(struct CUstream_st *stream, int64_t rows, int64_t dim, const float *dy,
                           float *dbias);
int gpt_cuda_bias_gelu_forward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                               const float *x, const float *bias, float *y, float *slope);
int gpt_cuda_gelu_backward(struct CUstream_st *stream, int64_t count, const float *slope,
                           float *dy);

int gpt_cuda_embedding_forward(struct CUstream_st *stream, int64_t batch, int64_t context,
                               int64_t dim, const uint8_t *token, const float *wte,
                               const float *wpe, float *x);
/* classes: rows of dwte, at most 256. The additions are the host's, one by one: the same bits. */
int gpt_cuda_embedding_backward(struct CUstream_st *stream, int64_t batch, int64_t context,
                                int64_t dim, int64_t classes, const uint8_t *token, const float *dx,
                                float *dwte, float *dwpe);

/* In place in `scores`, rows x context with row r at position r % context: columns after it
 * become 0. */
int gpt_cuda_causal_softmax(struct CUstream_st *stream, int64_t rows, int64_t context,
                            float *scores);
/* dscores = probs * (dscores - sum over the row of probs * dscores); columns after the position
 * become 0. */
int gpt_cuda_causal_softmax_backward(struct CUstream_st *stream, int64_t rows, int64_t context,
                                     const float *probs, float *dscores);

/* losses[row], and losses[rows] = their mean, in fp64: rows + 1 doubles. gradient 1: logits
 * become the gradient of that mean. */
int gpt_cuda_cross_entropy(struct CUstream_st *stream, int64_t rows, int64_t classes, float *logits,
                           const uint8_t *target, int gradient, double *losses);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CUDA_LAYERS_CUDA_H */
