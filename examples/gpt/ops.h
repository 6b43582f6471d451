/* SPDX-License-Identifier: MIT */
/*
 * ops.h - all that the model asks of what it computes on, in one table: memory, copies and the
 * operations of a transformer. The host's is ops_host.h, a GPU's cuda/ops_cuda.h.
 *
 * Arrays are fp32, row-major, in the device's memory and do not overlap unless a comment allows it.
 * Operations run in the order of their calls and may be enqueued only: the host reads a loss after
 * `finish`, and may write to what it uploads from again then. None fails by itself: the first
 * failure stays with the device, what follows it has undefined results, and `status` and `finish`
 * tell. Deterministic: bits depend on the inputs only. Nothing allocates but `alloc`.
 */
#ifndef GPT_OPS_H
#define GPT_OPS_H

#include "mfsdp/context.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPT_LAYERNORM_EPS 1e-5f

/* The shape of the attention: qkv is (batch, context, 3*dim), see attention.h. */
typedef struct gpt_attention {
  int64_t batch, context, dim, heads;
} gpt_attention;

/* C = alpha op(A) op(B) + beta C, row-major; op(A) is m x k, op(B) is k x n, C is m x n. lda,
 * ldb, ldc: elements from one stored row to the next. beta 0 writes C without reading it. */
typedef struct gpt_product {
  int trans_a, trans_b; /* 1: the operand is the transpose of what is stored */
  int64_t m, n, k;
  float alpha;
  const float *a;
  int64_t lda;
  const float *b;
  int64_t ldb;
  float beta;
  float *c;
  int64_t ldc;
} gpt_product;

typedef struct gpt_ops {
  const char *name;

  /* ---- memory ---- */

  /* COMPLETE. DEVICE is the operations' memory; PINNED is the host's, which `upload` reads. At
   * least 64-byte aligned, contents undefined; NULL: there is none left. nbytes: a multiple of
   * 64. */
  void *(*alloc)(void *self, mfsdp_space space, size_t nbytes);
  /* Waits for the operations before it. NULL is allowed. */
  void (*free)(void *self, mfsdp_space space, void *memory, size_t nbytes);
  /* Of the scratch that attention_backward and the cross entropies get. */
  size_t (*workspace_nbytes)(const gpt_attention *shape, int64_t classes);

  /* ---- the course of things ---- */

  void (*upload)(void *self, void *device, const void *pinned, size_t nbytes);
  /* The first failure so far, of what the host can see at once; the context has its message. */
  mfsdp_status (*status)(void *self);
  /* Waits until the loss is there, and with it all that was called before it. */
  mfsdp_status (*finish)(void *self);

  /* ---- element by element ---- */

  void (*zero)(void *self, int64_t count, float *x);
  void (*scale)(void *self, int64_t count, float factor, float *x);
  /* bf16 or f16 to fp32: exact. */
  void (*widen)(void *self, mfsdp_dtype dtype, int64_t count, const void *src, float *dst);

  /* ---- the layers: see layers.h and attention.h for what each one computes ---- */

  void (*product)(void *self, const gpt_product *product);
  void (*layernorm_forward)(void *self, int64_t rows, int64_t dim, const float *x,
                            const float *gain, const float *bias, float *y, float *mean,
                            float *rstd);
  void (*layernorm_backward)(void *self, int64_t rows, int64_t dim, const float *x,
                             const float *gain, const float *mean, const float *rstd,
                             const float *dy, float *dx, float *dgain, float *dbias);
  void (*bias_rows)(void *self, int64_t rows, int64_t dim, const float *bias, float *y);
  void (*residual_bias_rows)(void *self, int64_t rows, int64_t dim, const float *x,
                             const float *bias, float *y);
  void (*bias_backward)(void *self, int64_t rows, int64_t dim, const float *dy, float *dbias);
  void (*bias_gelu_forward)(void *self, int64_t rows, int64_t dim, const float *x,
                            const float *bias, float *y, float *slope);
  void (*gelu_backward)(void *self, int64_t count, const float *slope, float *dy);
  /* Tokens lie in the device's memory, each below `classes`, the rows of wte. */
  void (*embedding_forward)(void *self, int64_t batch, int64_t context, int64_t dim,
                            const uint8_t *token, const float *wte, const float *wpe, float *x);
  void (*embedding_backward)(void *self, int64_t batch, int64_t context, int64_t dim,
                             int64_t classes, const uint8_t *token, const float *dx, float *dwte,
                             float *dwpe);
  void (*attention_forward)(void *self, const gpt_attention *shape, const float *qkv, float *probs,
                            float *out);
  void (*attention_backward)(void *self, const gpt_attention *shape, const float *qkv,
                             const float *probs, const float *dout, float *dqkv, void *workspace);
  /* *loss (HOST) is there after `finish`. */
  void (*cross_entropy)(void *self, int64_t rows, int64_t classes, const float *logits,
                        const uint8_t *target, void *workspace, double *loss);
  void (*cross_entropy_backward)(void *self, int64_t rows, int64_t classes, float *logits,
                                 const uint8_t *target, void *workspace, double *loss);
} gpt_ops;

/* What a model computes on; belongs to one rank's thread. */
typedef struct gpt_device {
  const gpt_ops *ops;
  void *self;
} gpt_device;

#ifdef __cplusplus
}
#endif

#endif /* GPT_OPS_H */
