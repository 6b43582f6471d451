/* SPDX-License-Identifier: MIT */
#include "ops_cuda.h"

#include "layers_cuda.h"

#include "mfsdp/cuda/backend_cuda.h"

#include <math.h>

struct gpt_cuda {
  mfsdp_context *context;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  cudaStream_t stream;
  int64_t timeout_us;
  mfsdp_status failure;    /* the first one; the context has its message */
  mfsdp_event *loss_there; /* recorded behind the copy of the last loss */
  mfsdp_event *idle;       /* recorded where memory is given back */
  mfsdp_buffer landing;    /* PINNED: one double */
  double *loss;            /* where the last one goes; NULL: nobody waits */
};

/* ---- failures: the first one stays, and what follows it is not tried ---- */

static void keep(gpt_cuda *cuda, mfsdp_status status) {
  if (cuda->failure == MFSDP_OK) cuda->failure = status;
}

/* What a launch returned. */
static void launched(gpt_cuda *cuda, int error, const char *operation) {
  if (error == 0) return;
  (void)cudaGetLastError();
  keep(cuda,
       MFSDP_FAIL(cuda->context, MFSDP_E_BACKEND, "%s: %s (%s)", operation,
                  cudaGetErrorName((cudaError_t)error), cudaGetErrorString((cudaError_t)error)));
}

/* The operation is tried: nothing has failed before it. */
static int usable(const gpt_cuda *cuda) {
  return cuda->failure == MFSDP_OK;
}

static mfsdp_status cuda_status(void *self) {
  return ((const gpt_cuda *)self)->failure;
}

static mfsdp_status wait_for(gpt_cuda *cuda, mfsdp_event *event) {
  return cuda->backend->ops->event_wait(cuda->backend->self, cuda->context, event,
                                        cuda->timeout_us);
}

static mfsdp_status cuda_finish(void *self) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda)) keep(cuda, wait_for(cuda, cuda->loss_there));
  if (usable(cuda) && cuda->loss != NULL) *cuda->loss = *(const double *)cuda->landing.data;
  cuda->loss = NULL;
  return cuda->failure;
}

/* ---- memory ---- */

static void *cuda_alloc(void *self, mfsdp_space space, size_t nbytes) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  void *memory = NULL;
  (void)cuda->backend->ops->mem_alloc(cuda->backend->self, cuda->context, nbytes,
                                      MFSDP_ALIGN_NBYTES, space, &memory);
  return memory;
}

/* Memory that a stuck device may still use is left to the end of the process. The wait itself also
 * returns the error of a queue that has failed, which may be a time-out of its own. */
static void cuda_free(void *self, mfsdp_space space, void *memory, size_t nbytes) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  const mfsdp_backend_ops *ops = cuda->backend->ops;
  int32_t done = 0;
  if (memory == NULL) return;
  if (ops->event_record(cuda->backend->self, cuda->queue, cuda->idle) != MFSDP_OK) return;
  (void)wait_for(cuda, cuda->idle);
  (void)ops->event_query(cuda->backend->self, cuda->idle, &done);
  if (!done) return;
  ops->mem_free(cuda->backend->self, cuda->context, memory, nbytes, space);
}

/* The scores of one window, or a loss for each row and their mean. */
static size_t cuda_workspace_nbytes(const gpt_attention *a, int64_t classes) {
  const size_t scores = (size_t)(a->heads * a->context * a->context) * sizeof(float);
  const size_t losses = (size_t)(a->batch * a->context + 1) * sizeof(double);
  (void)classes;
  return scores > losses ? scores : losses;
}

static void cuda_upload(void *self, void *device, const void *pinned, size_t nbytes) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    keep(cuda, cuda->backend->ops->copy(cuda->backend->self, cuda->queue, device,
                                        MFSDP_SPACE_DEVICE, pinned, MFSDP_SPACE_PINNED, nbytes));
}

/* ---- element by element ---- */

static void cuda_zero(void *self, int64_t count, float *x) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    keep(cuda, cuda->backend->ops->fill_bytes(cuda->backend->self, cuda->queue, x, 0,
                                              (size_t)count * sizeof *x));
}

static void cuda_scale(void *self, int64_t count, float factor, float *x) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda)) launched(cuda, gpt_cuda_scale(cuda->stream, count, factor, x), "scale");
}

static void cuda_widen(void *self, mfsdp_dtype dtype, int64_t count, const void *src, float *dst) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    keep(cuda, cuda->backend->ops->cast(cuda->backend->self, cuda->queue, dst, MFSDP_F32, src,
                                        dtype, count));
}

/* ---- products ---- */

/* A view of `count` matrices, `apart` elements from one to the next. */
static mfsdp_mat matrix(const float *data, int64_t rows, int64_t cols, int64_t row_stride,
                        int64_t apart) {
  mfsdp_mat mat;
  mat.data = (void *)(uintptr_t)data;
  mat.rows = rows;
  mat.cols = cols;
  mat.row_stride = row_stride;
  mat.batch_stride = apart;
  return mat;
}

static void multiply(gpt_cuda *cuda, const mfsdp_gemm_args *args) {
  if (usable(cuda)) keep(cuda, cuda->backend->ops->gemm(cuda->backend->self, cuda->queue, args));
}

static void cuda_product(void *self, const gpt_product *p) {
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.trans_a = p->trans_a;
  args.trans_b = p->trans_b;
  args.alpha = p->alpha;
  args.beta = p->beta;
  args.a = matrix(p->a, p->trans_a ? p->k : p->m, p->trans_a ? p->m : p->k, p->lda, 0);
  args.b = matrix(p->b, p->trans_b ? p->n : p->k, p->trans_b ? p->k : p->n, p->ldb, 0);
  args.c = args.d = matrix(p->c, p->m, p->n, p->ldc, 0);
  multiply((gpt_cuda *)self, &args);
}

/* ---- layers ---- */

static void cuda_layernorm_forward(void *self, int64_t rows, int64_t dim, const float *x,
                                   const float *gain, const float *bias, float *y, float *mean,
                                   float *rstd) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda,
             gpt_cuda_layernorm_forward(cuda->stream, rows, dim, x, gain, bias, y, mean, rstd),
             "layernorm");
}

static void cuda_layernorm_backward(void *self, int64_t rows, int64_t dim, const float *x,
                                    const float *gain, const float *mean, const float *rstd,
                                    const float *dy, float *dx, float *dgain, float *dbias) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda,
             gpt_cuda_layernorm_backward(cuda->stream, rows, dim, x, gain, mean, rstd, dy, dx,
                                         dgain, dbias),
             "layernorm's gradient");
}

static void cuda_residual_bias_rows(void *self, int64_t rows, int64_t dim, const float *x,
                                    const float *bias, float *y) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda)) launched(cuda, gpt_cuda_bias_rows(cuda->stream, rows, dim, x, bias, y), "bias");
}

static void cuda_bias_rows(void *self, int64_t rows, int64_t dim, const float *bias, float *y) {
  cuda_residual_bias_rows(self, rows, dim, NULL, bias, y);
}

static void cuda_bias_backward(void *self, int64_t rows, int64_t dim, const float *dy,
                               float *dbias) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda, gpt_cuda_bias_backward(cuda->stream, rows, dim, dy, dbias),
             "the bias's gradient");
}

static void cuda_bias_gelu_forward(void *self, int64_t rows, int64_t dim, const float *x,
                                   const float *bias, float *y, float *slope) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda, gpt_cuda_bias_gelu_forward(cuda->stream, rows, dim, x, bias, y, slope), "gelu");
}

static void cuda_gelu_backward(void *self, int64_t count, const float *slope, float *dy) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda, gpt_cuda_gelu_backward(cuda->stream, count, slope, dy), "gelu's gradient");
}

static void cuda_embedding_forward(void *self, int64_t batch, int64_t context, int64_t dim,
                                   const uint8_t *token, const float *wte, const float *wpe,
                                   float *x) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda,
             gpt_cuda_embedding_forward(cuda->stream, batch, context, dim, token, wte, wpe, x),
             "embedding");
}

static void cuda_embedding_backward(void *self, int64_t batch, int64_t context, int64_t dim,
                                    int64_t classes, const uint8_t *token, const float *dx,
                                    float *dwte, float *dwpe) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  if (usable(cuda))
    launched(cuda,
             gpt_cuda_embedding_backward(cuda->stream, batch, context, dim, classes, token, dx,
                                         dwte, dwpe),
             "the embedding's gradient");
}

/* ---- attention: the heads of one window are one batch of products ---- */

/* `offset` columns into qkv or its gradient: q 0, k dim, v 2 * dim. */
static mfsdp_mat heads_of_qkv(const gpt_attention *a, const float *qkv, int64_t window,
                              int64_t offset) {
  const int64_t width = a->dim / a->heads, ld = 3 * a->dim;
  return matrix(qkv + window * a->context * ld + offset, a->context, width, ld, width);
}

static mfsdp_mat heads_of_out(const gpt_attention *a, const float *out, int64_t window) {
  const int64_t width = a->dim / a->heads;
  return matrix(out + window * a->context * a->dim, a->context, width, a->dim, width);
}

static mfsdp_mat scores_of(const gpt_attention *a, const float *scores, int64_t window) {
  const int64_t square = a->context * a->context;
  return matrix(scores + window * a->heads * square, a->context, a->context, a->context, square);
}

/* d = alpha op(a) op(b) for each head. */
static void multiply_heads(gpt_cuda *cuda, const gpt_attention *shape, float alpha, int trans_a,
                           mfsdp_mat a, int trans_b, mfsdp_mat b, mfsdp_mat d) {
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.batch_count = shape->heads;
  args.alpha = alpha;
  args.trans_a = trans_a;
  args.trans_b = trans_b;
  args.a = a;
  args.b = b;
  args.c = args.d = d;
  multiply(cuda, &args);
}

static float score_scale(const gpt_attention *a) {
  return 1.0f / sqrtf((float)(a->dim / a->heads));
}

static void cuda_attention_forward(void *self, const gpt_attention *a, const float *qkv,
                                   float *probs, float *out) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  int64_t w;
  for (w = 0; w < a->batch; ++w)
    multiply_heads(cuda, a, score_scale(a), 0, heads_of_qkv(a, qkv, w, 0), 1,
                   heads_of_qkv(a, qkv, w, a->dim), scores_of(a, probs, w));
  if (usable(cuda))
    launched(
        cuda,
        gpt_cuda_causal_softmax(cuda->stream, a->batch * a->heads * a->context, a->context, probs),
        "softmax");
  for (w = 0; w < a->batch; ++w)
    multiply_heads(cuda, a, 1.0f, 0, scores_of(a, probs, w), 0, heads_of_qkv(a, qkv, w, 2 * a->dim),
                   heads_of_out(a, out, w));
}

static void cuda_attention_backward(void *self, const gpt_attention *a, const float *qkv,
                                    const float *probs, const float *dout, float *dqkv,
                                    void *workspace) {
  gpt_cuda *cuda = (gpt_cuda *)self;
  float *scores = (float *)workspace; /* their gradient, of one window */
  const mfsdp_mat ds = scores_of(a, scores, 0);
  int64_t w;
  for (w = 0; w < a->batch; ++w) {
    const mfsdp_mat p = scores_of(a, probs, w), dy = heads_of_out(a, dout, w);
    multiply_heads(cuda, a, 1.0f, 0, dy, 1, heads_of_qkv(a, qkv, w, 2 * a->dim), ds);
    if (usable(cuda))
      launched(cuda,
               gpt_cuda_causal_softmax_backward(cuda->stream, a->heads * a->context, a->context,
                                                (const float *)p.data, scores),
               "softmax's gradient");
    multiply_heads(cuda, a, score_scale(a), 0, ds, 0, heads_of_qkv(a, qkv, w, a->dim),
                   heads_of_qkv(a, dqkv, w, 0));
    multiply_heads(cuda, a, score_scale(a), 1, ds, 0, heads_of_qkv(a, qkv, w, 0),
                   heads_of_qkv(a, dqkv, w, a->dim));
    multiply_heads(cuda, a, 1.0f, 1, p, 0, dy, heads_of_qkv(a, dqkv, w, 2 * a->dim));
  }
}

/* ---- the loss ---- */

static void cross_entropy(gpt_cuda *cuda, int64_t rows, int64_t classes, float *logits,
                          const uint8_t *target, int gradient, void *workspace, double *loss) {
  const mfsdp_backend *backend = cuda->backend;
  double *losses = (double *)workspace;
  if (!usable(cuda)) return;
  launched(cuda,
           gpt_cuda_cross_entropy(cuda->stream, rows, classes, logits, target, gradient, losses),
           "cross entropy");
  if (usable(cuda))
    keep(cuda,
         backend->ops->copy(backend->self, cuda->queue, cuda->landing.data, MFSDP_SPACE_PINNED,
                            losses + rows, MFSDP_SPACE_DEVICE, sizeof *losses));
  if (usable(cuda))
    keep(cuda, backend->ops->event_record(backend->self, cuda->queue, cuda->loss_there));
  cuda->loss = loss;
}

static void cuda_cross_entropy(void *self, int64_t rows, int64_t classes, const float *logits,
                               const uint8_t *target, void *workspace, double *loss) {
  cross_entropy((gpt_cuda *)self, rows, classes, (float *)(uintptr_t)logits, target, 0, workspace,
                loss);
}

static void cuda_cross_entropy_backward(void *self, int64_t rows, int64_t classes, float *logits,
                                        const uint8_t *target, void *workspace, double *loss) {
  cross_entropy((gpt_cuda *)self, rows, classes, logits, target, 1, workspace, loss);
}

/* ---- life ---- */

/* In the order of gpt_ops. */
static const gpt_ops cuda_ops = {"cuda",
                                 cuda_alloc,
                                 cuda_free,
                                 cuda_workspace_nbytes,
                                 cuda_upload,
                                 cuda_status,
                                 cuda_finish,
                                 cuda_zero,
                                 cuda_scale,
                                 cuda_widen,
                                 cuda_product,
                                 cuda_layernorm_forward,
                                 cuda_layernorm_backward,
                                 cuda_bias_rows,
                                 cuda_residual_bias_rows,
                                 cuda_bias_backward,
                                 cuda_bias_gelu_forward,
                                 cuda_gelu_backward,
                                 cuda_embedding_forward,
                                 cuda_embedding_backward,
                                 cuda_attention_forward,
                                 cuda_attention_backward,
                                 cuda_cross_entropy,
                                 cuda_cross_entropy_backward};

static mfsdp_status fill(gpt_cuda *cuda) {
  const mfsdp_backend *backend = cuda->backend;
  MFSDP_TRY(backend->ops->event_create(backend->self, cuda->context, &cuda->loss_there));
  MFSDP_TRY(backend->ops->event_create(backend->self, cuda->context, &cuda->idle));
  return mfsdp_buffer_alloc(cuda->context, backend, sizeof(double), MFSDP_SPACE_PINNED,
                            MFSDP_MEMORY_TABLE, &cuda->landing);
}

mfsdp_status gpt_cuda_create(mfsdp_context *context, const mfsdp_backend *backend,
                             mfsdp_queue *queue, int64_t timeout_us, gpt_cuda **out) {
  gpt_cuda *cuda;
  mfsdp_status status;
  void *memory;
  *out = NULL;
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof *cuda, "operations on a GPU", &memory));
  cuda = (gpt_cuda *)memory;
  cuda->context = context;
  cuda->backend = backend;
  cuda->queue = queue;
  cuda->stream = mfsdp_cuda_queue_stream(queue);
  cuda->timeout_us = timeout_us;
  cuda->failure = MFSDP_OK;
  status = fill(cuda);
  if (status == MFSDP_OK)
    *out = cuda;
  else
    gpt_cuda_destroy(cuda);
  return status;
}

void gpt_cuda_destroy(gpt_cuda *cuda) {
  const mfsdp_backend *backend;
  if (cuda == NULL) return;
  backend = cuda->backend;
  mfsdp_buffer_free(cuda->context, backend, &cuda->landing);
  backend->ops->event_destroy(backend->self, cuda->context, cuda->idle);
  backend->ops->event_destroy(backend->self, cuda->context, cuda->loss_there);
  mfsdp_table_free(cuda->context, cuda, 1, sizeof *cuda);
}

gpt_device gpt_cuda_device(gpt_cuda *cuda) {
  gpt_device device;
  device.ops = &cuda_ops;
  device.self = cuda;
  return device;
}
