/* SPDX-License-Identifier: MIT */
#include "ops_host.h"

#include "attention.h"
#include "layers.h"

#include "mfsdp/dtype.h"

#include <stdlib.h>
#include <string.h>

static void *host_alloc(void *self, mfsdp_space space, size_t nbytes) {
  (void)self, (void)space;
  return aligned_alloc(64, nbytes);
}

static void host_free(void *self, mfsdp_space space, void *memory, size_t nbytes) {
  (void)self, (void)space, (void)nbytes;
  free(memory);
}

static size_t host_workspace_nbytes(const gpt_attention *shape, int64_t classes) {
  (void)classes;
  return (size_t)gpt_attention_workspace_count(shape) * sizeof(float);
}

static void host_upload(void *self, void *device, const void *pinned, size_t nbytes) {
  (void)self;
  memcpy(device, pinned, nbytes);
}

static mfsdp_status host_status(void *self) {
  (void)self;
  return MFSDP_OK;
}

static void host_zero(void *self, int64_t count, float *x) {
  (void)self;
  memset(x, 0, (size_t)count * sizeof *x);
}

static void host_scale(void *self, int64_t count, float factor, float *x) {
  (void)self;
  for (int64_t i = 0; i < count; ++i)
    x[i] *= factor;
}

static void host_widen(void *self, mfsdp_dtype dtype, int64_t count, const void *src, float *dst) {
  const uint16_t *narrow = (const uint16_t *)src;
  (void)self;
  if (dtype == MFSDP_BF16)
    for (int64_t i = 0; i < count; ++i)
      dst[i] = mfsdp_f32_from_bf16(narrow[i]);
  else
    for (int64_t i = 0; i < count; ++i)
      dst[i] = mfsdp_f32_from_f16(narrow[i]);
}

static void host_product(void *self, const gpt_product *p) {
  ((const gpt_host *)self)
      ->sgemm(p->trans_a, p->trans_b, p->m, p->n, p->k, p->alpha, p->a, p->lda, p->b, p->ldb,
              p->beta, p->c, p->ldc);
}

static void host_layernorm_forward(void *self, int64_t rows, int64_t dim, const float *x,
                                   const float *gain, const float *bias, float *y, float *mean,
                                   float *rstd) {
  (void)self;
  gpt_layernorm_forward(rows, dim, x, gain, bias, y, mean, rstd);
}

static void host_layernorm_backward(void *self, int64_t rows, int64_t dim, const float *x,
                                    const float *gain, const float *mean, const float *rstd,
                                    const float *dy, float *dx, float *dgain, float *dbias) {
  (void)self;
  gpt_layernorm_backward(rows, dim, x, gain, mean, rstd, dy, dx, dgain, dbias);
}

static void host_bias_rows(void *self, int64_t rows, int64_t dim, const float *bias, float *y) {
  (void)self;
  gpt_bias_rows(rows, dim, bias, y);
}

static void host_residual_bias_rows(void *self, int64_t rows, int64_t dim, const float *x,
                                    const float *bias, float *y) {
  (void)self;
  gpt_residual_bias_rows(rows, dim, x, bias, y);
}

static void host_bias_backward(void *self, int64_t rows, int64_t dim, const float *dy,
                               float *dbias) {
  (void)self;
  gpt_bias_backward(rows, dim, dy, dbias);
}

static void host_bias_gelu_forward(void *self, int64_t rows, int64_t dim, const float *x,
                                   const float *bias, float *y, float *slope) {
  (void)self;
  gpt_bias_gelu_forward(rows, dim, x, bias, y, slope);
}

static void host_gelu_backward(void *self, int64_t count, const float *slope, float *dy) {
  (void)self;
  gpt_gelu_backward(count, slope, dy);
}

static void host_embedding_forward(void *self, int64_t batch, int64_t context, int64_t dim,
                                   const uint8_t *token, const float *wte, const float *wpe,
                                   float *x) {
  (void)self;
  gpt_embedding_forward(batch, context, dim, token, wte, wpe, x);
}

static void host_embedding_backward(void *self, int64_t batch, int64_t context, int64_t dim,
                                    int64_t classes, const uint8_t *token, const float *dx,
                                    float *dwte, float *dwpe) {
  (void)self, (void)classes;
  gpt_embedding_backward(batch, context, dim, token, dx, dwte, dwpe);
}

static void host_attention_forward(void *self, const gpt_attention *shape, const float *qkv,
                                   float *probs, float *out) {
  gpt_attention_forward(shape, ((const gpt_host *)self)->sgemm, qkv, probs, out);
}

static void host_attention_backward(void *self, const gpt_attention *shape, const float *qkv,
                                    const float *probs, const float *dout, float *dqkv,
                                    void *workspace) {
  gpt_attention_backward(shape, ((const gpt_host *)self)->sgemm, qkv, probs, dout, dqkv,
                         (float *)workspace);
}

static void host_cross_entropy(void *self, int64_t rows, int64_t classes, const float *logits,
                               const uint8_t *target, void *workspace, double *loss) {
  (void)self, (void)workspace;
  *loss = gpt_cross_entropy(rows, classes, logits, target);
}

static void host_cross_entropy_backward(void *self, int64_t rows, int64_t classes, float *logits,
                                        const uint8_t *target, void *workspace, double *loss) {
  (void)self, (void)workspace;
  *loss = gpt_cross_entropy_backward(rows, classes, logits, target);
}

/* In the order of gpt_ops. */
static const gpt_ops host_ops = {"cpu",
                                 host_alloc,
                                 host_free,
                                 host_workspace_nbytes,
                                 host_upload,
                                 host_status,
                                 host_status,
                                 host_zero,
                                 host_scale,
                                 host_widen,
                                 host_product,
                                 host_layernorm_forward,
                                 host_layernorm_backward,
                                 host_bias_rows,
                                 host_residual_bias_rows,
                                 host_bias_backward,
                                 host_bias_gelu_forward,
                                 host_gelu_backward,
                                 host_embedding_forward,
                                 host_embedding_backward,
                                 host_attention_forward,
                                 host_attention_backward,
                                 host_cross_entropy,
                                 host_cross_entropy_backward};

gpt_device gpt_host_device(gpt_host *host) {
  gpt_device device;
  device.ops = &host_ops;
  device.self = host;
  return device;
}
