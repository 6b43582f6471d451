/* SPDX-License-Identifier: MIT */
#include "attention.h"

#include "vector_math.h"

#include <math.h>

int64_t gpt_attention_probs_count(const gpt_attention *a) {
  return a->batch * a->heads * a->context * a->context;
}

int64_t gpt_attention_workspace_count(const gpt_attention *a) {
  return GPT_ATTENTION_ROWS * a->context;
}

/* Where one head of one window lies in the activations. */
typedef struct head_view {
  int64_t qkv, out, probs; /* offsets of its first element */
} head_view;

static head_view view_of(const gpt_attention *a, int64_t window, int64_t head) {
  const int64_t width = a->dim / a->heads;
  head_view v;
  v.qkv = window * a->context * 3 * a->dim + head * width;
  v.out = window * a->context * a->dim + head * width;
  v.probs = (window * a->heads + head) * a->context * a->context;
  return v;
}

/* Rows [first, first + rows) of the scores, in place; columns after a row's own become 0. */
static void causal_softmax(int64_t first, int64_t rows, int64_t stride, float *scores) {
  for (int64_t row = 0; row < rows; ++row) {
    float *restrict p = scores + row * stride;
    const int64_t visible = first + row + 1;
    const float inverse = 1.0f / gpt_exp_sum(p, gpt_max(p, visible), visible, p);
    for (int64_t i = 0; i < visible; ++i)
      p[i] *= inverse;
    memset(p + visible, 0, (size_t)(first + rows - visible) * sizeof *p);
  }
}

/* dscore = p * (dp - sum(p * dp)), in place in dp; columns after a row's own become 0. */
static void causal_softmax_backward(int64_t first, int64_t rows, int64_t stride, const float *probs,
                                    float *dprobs) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *restrict p = probs + row * stride;
    float *restrict d = dprobs + row * stride;
    const int64_t visible = first + row + 1;
    const float total = gpt_dot(p, d, visible);
    for (int64_t i = 0; i < visible; ++i)
      d[i] = p[i] * (d[i] - total);
    memset(d + visible, 0, (size_t)(first + rows - visible) * sizeof *d);
  }
}

static void head_forward(const gpt_attention *a, gpt_sgemm_fn sgemm, const float *q, float *probs,
                         float *out) {
  const int64_t dim = a->dim, ld = 3 * dim, width = dim / a->heads, context = a->context;
  const float *k = q + dim, *v = q + 2 * dim;
  const float scale = 1.0f / sqrtf((float)width);
  for (int64_t first = 0; first < context; first += GPT_ATTENTION_ROWS) {
    const int64_t left = context - first;
    const int64_t rows = left < GPT_ATTENTION_ROWS ? left : GPT_ATTENTION_ROWS;
    const int64_t columns = first + rows;
    float *p = probs + first * context;
    sgemm(0, 1, rows, columns, width, scale, q + first * ld, ld, k, ld, 0.0f, p, context);
    causal_softmax(first, rows, context, p);
    sgemm(0, 0, rows, width, columns, 1.0f, p, context, v, ld, 0.0f, out + first * dim, dim);
  }
}

static void head_backward(const gpt_attention *a, gpt_sgemm_fn sgemm, const float *q,
                          const float *probs, const float *dout, float *dq, float *dscores) {
  const int64_t dim = a->dim, ld = 3 * dim, width = dim / a->heads, context = a->context;
  const float *k = q + dim, *v = q + 2 * dim;
  float *dk = dq + dim, *dv = dq + 2 * dim;
  const float scale = 1.0f / sqrtf((float)width);
  const int64_t last = (context - 1) / GPT_ATTENTION_ROWS * GPT_ATTENTION_ROWS;
  /* From the last stretch down: it reaches every key, so it overwrites dk and dv, others add. */
  for (int64_t first = last; first >= 0; first -= GPT_ATTENTION_ROWS) {
    const int64_t left = context - first;
    const int64_t rows = left < GPT_ATTENTION_ROWS ? left : GPT_ATTENTION_ROWS;
    const int64_t columns = first + rows;
    const float beta = first == last ? 0.0f : 1.0f;
    const float *p = probs + first * context, *dy = dout + first * dim;
    sgemm(0, 1, rows, columns, width, 1.0f, dy, dim, v, ld, 0.0f, dscores, context);
    causal_softmax_backward(first, rows, context, p, dscores);
    sgemm(0, 0, rows, width, columns, scale, dscores, context, k, ld, 0.0f, dq + first * ld, ld);
    sgemm(1, 0, columns, width, rows, scale, dscores, context, q + first * ld, ld, beta, dk, ld);
    sgemm(1, 0, columns, width, rows, 1.0f, p, context, dy, dim, beta, dv, ld);
  }
}

void gpt_attention_forward(const gpt_attention *a, gpt_sgemm_fn sgemm, const float *qkv,
                           float *probs, float *out) {
  for (int64_t window = 0; window < a->batch; ++window)
    for (int64_t head = 0; head < a->heads; ++head) {
      const head_view view = view_of(a, window, head);
      head_forward(a, sgemm, qkv + view.qkv, probs + view.probs, out + view.out);
    }
}

void gpt_attention_backward(const gpt_attention *a, gpt_sgemm_fn sgemm, const float *qkv,
                            const float *probs, const float *dout, float *dqkv, float *workspace) {
  for (int64_t window = 0; window < a->batch; ++window)
    for (int64_t head = 0; head < a->heads; ++head) {
      const head_view view = view_of(a, window, head);
      head_backward(a, sgemm, qkv + view.qkv, probs + view.probs, dout + view.out, dqkv + view.qkv,
                    workspace);
    }
}
