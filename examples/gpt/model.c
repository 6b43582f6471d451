/* SPDX-License-Identifier: MIT */
#include "model.h"

#include "layers.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory: one block, laid out by one function that runs twice (measure, then place) ---- */

typedef struct arena {
  char *base; /* NULL while measuring */
  size_t nbytes;
} arena;

/* gpt_config_check has bounded every factor, so the sums stay far below SIZE_MAX. */
static void *take(arena *a, int64_t count, size_t element_nbytes) {
  const size_t alignment = 64;
  void *result = a->base ? a->base + a->nbytes : NULL;
  const size_t nbytes = (size_t)count * element_nbytes;
  a->nbytes += (nbytes + alignment - 1) / alignment * alignment;
  return result;
}

static float *take_floats(arena *a, int64_t count) {
  return (float *)take(a, count, sizeof(float));
}

static void place_block(const gpt_model *m, gpt_block_state *s, arena *a) {
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  s->x = take_floats(a, rows * dim);
  s->mean1 = take_floats(a, rows);
  s->rstd1 = take_floats(a, rows);
  s->norm1 = take_floats(a, rows * dim);
  s->qkv = take_floats(a, rows * 3 * dim);
  s->probs = take_floats(a, gpt_attention_probs_count(&m->attention));
  s->attended = take_floats(a, rows * dim);
  s->middle = take_floats(a, rows * dim);
  s->mean2 = take_floats(a, rows);
  s->rstd2 = take_floats(a, rows);
  s->norm2 = take_floats(a, rows * dim);
  s->slope = take_floats(a, rows * 4 * dim);
  s->active = take_floats(a, rows * 4 * dim);
}

static void place_all(gpt_model *m, arena *a) {
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  gpt_block_state unplaced;
  m->blocks = (gpt_block_state *)take(a, m->config.layers, sizeof *m->blocks);
  m->inputs = (uint8_t *)take(a, rows, 1);
  m->targets = (uint8_t *)take(a, rows, 1);
  for (int64_t i = 0; i < m->config.layers; ++i)
    place_block(m, a->base ? &m->blocks[i] : &unplaced, a);
  m->final_x = take_floats(a, rows * dim);
  m->final_mean = take_floats(a, rows);
  m->final_rstd = take_floats(a, rows);
  m->final_norm = take_floats(a, rows * dim);
  m->logits = take_floats(a, rows * m->config.vocab);
  m->dstream = take_floats(a, rows * dim);
  m->dnarrow = take_floats(a, rows * dim);
  m->dwide = take_floats(a, rows * 4 * dim);
  m->dscores = take_floats(a, gpt_attention_workspace_count(&m->attention));
}

int gpt_model_create(const gpt_config *config, gpt_sgemm_fn sgemm, gpt_model *model,
                     gpt_error *error) {
  arena a = {NULL, 0};
  memset(model, 0, sizeof *model);
  if (gpt_config_check(config, error) != GPT_OK) return GPT_USAGE_ERROR;
  model->config = *config;
  model->attention.batch = config->batch;
  model->attention.context = config->context;
  model->attention.dim = config->dim;
  model->attention.heads = config->heads;
  model->attention.sgemm = sgemm;
  model->unit_count = gpt_unit_count(config);
  place_all(model, &a);
  model->memory = aligned_alloc(64, a.nbytes);
  if (!model->memory) {
    memset(model, 0, sizeof *model);
    return gpt_fail(error, "no memory for %zu MiB of activations; lower batch, context or layers",
                    a.nbytes >> 20);
  }
  model->memory_nbytes = a.nbytes;
  a.base = (char *)model->memory;
  a.nbytes = 0;
  place_all(model, &a);
  memset(model->inputs, 0, (size_t)gpt_config_tokens(config));
  memset(model->targets, 0, (size_t)gpt_config_tokens(config));
  return GPT_OK;
}

void gpt_model_destroy(gpt_model *model) {
  free(model->memory);
  memset(model, 0, sizeof *model);
}

/* ---- products: y += x W^T and its two gradients; W is outputs x inputs ---- */

static void linear_add(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                       const float *weight, float *y) {
  m->attention.sgemm(0, 1, gpt_config_tokens(&m->config), outputs, inputs, 1.0f, x, inputs, weight,
                     inputs, 1.0f, y, outputs);
}

/* y = x W^T: `linear_add` where nothing is there to add to. */
static void linear(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                   const float *weight, float *y) {
  m->attention.sgemm(0, 1, gpt_config_tokens(&m->config), outputs, inputs, 1.0f, x, inputs, weight,
                     inputs, 0.0f, y, outputs);
}

/* dx = dy W; dW += dy^T x. */
static void linear_backward(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                            const float *weight, const float *dy, float *dx, float *dweight) {
  const int64_t rows = gpt_config_tokens(&m->config);
  m->attention.sgemm(0, 0, rows, inputs, outputs, 1.0f, dy, outputs, weight, inputs, 0.0f, dx,
                     inputs);
  m->attention.sgemm(1, 0, outputs, inputs, rows, 1.0f, dy, outputs, x, inputs, 1.0f, dweight,
                     inputs);
}

/* ---- units ---- */

/* Where a block's output goes: the next block's input, or the head's. */
static float *block_output(const gpt_model *m, int64_t block) {
  return block + 1 < m->config.layers ? m->blocks[block + 1].x : m->final_x;
}

static void block_forward(gpt_model *m, int64_t block, const float *const *p) {
  const gpt_block_state *s = &m->blocks[block];
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  float *output = block_output(m, block);

  gpt_layernorm_forward(rows, dim, s->x, p[GPT_LN1_GAIN], p[GPT_LN1_BIAS], s->norm1, s->mean1,
                        s->rstd1);
  gpt_bias_rows(rows, 3 * dim, p[GPT_QKV_BIAS], s->qkv);
  linear_add(m, dim, 3 * dim, s->norm1, p[GPT_QKV_WEIGHT], s->qkv);
  gpt_attention_forward(&m->attention, s->qkv, s->probs, s->attended);
  gpt_residual_bias_rows(rows, dim, s->x, p[GPT_PROJECTION_BIAS], s->middle);
  linear_add(m, dim, dim, s->attended, p[GPT_PROJECTION_WEIGHT], s->middle);

  gpt_layernorm_forward(rows, dim, s->middle, p[GPT_LN2_GAIN], p[GPT_LN2_BIAS], s->norm2, s->mean2,
                        s->rstd2);
  linear(m, dim, 4 * dim, s->norm2, p[GPT_UP_WEIGHT], s->slope);
  gpt_bias_gelu_forward(rows, 4 * dim, s->slope, p[GPT_UP_BIAS], s->active, s->slope);
  gpt_residual_bias_rows(rows, dim, s->middle, p[GPT_DOWN_BIAS], output);
  linear_add(m, 4 * dim, dim, s->active, p[GPT_DOWN_WEIGHT], output);
}

/* dstream holds the gradient of the block's output on entry, of its input on return. */
static void block_backward(gpt_model *m, int64_t block, const float *const *p, float *const *g) {
  const gpt_block_state *s = &m->blocks[block];
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;

  gpt_bias_backward(rows, dim, m->dstream, g[GPT_DOWN_BIAS]);
  linear_backward(m, 4 * dim, dim, s->active, p[GPT_DOWN_WEIGHT], m->dstream, m->dwide,
                  g[GPT_DOWN_WEIGHT]);
  gpt_gelu_backward(rows * 4 * dim, s->slope, m->dwide);
  gpt_bias_backward(rows, 4 * dim, m->dwide, g[GPT_UP_BIAS]);
  linear_backward(m, dim, 4 * dim, s->norm2, p[GPT_UP_WEIGHT], m->dwide, m->dnarrow,
                  g[GPT_UP_WEIGHT]);
  gpt_layernorm_backward(rows, dim, s->middle, p[GPT_LN2_GAIN], s->mean2, s->rstd2, m->dnarrow,
                         m->dstream, g[GPT_LN2_GAIN], g[GPT_LN2_BIAS]);

  gpt_bias_backward(rows, dim, m->dstream, g[GPT_PROJECTION_BIAS]);
  linear_backward(m, dim, dim, s->attended, p[GPT_PROJECTION_WEIGHT], m->dstream, m->dnarrow,
                  g[GPT_PROJECTION_WEIGHT]);
  gpt_attention_backward(&m->attention, s->qkv, s->probs, m->dnarrow, m->dwide, m->dscores);
  gpt_bias_backward(rows, 3 * dim, m->dwide, g[GPT_QKV_BIAS]);
  linear_backward(m, dim, 3 * dim, s->norm1, p[GPT_QKV_WEIGHT], m->dwide, m->dnarrow,
                  g[GPT_QKV_WEIGHT]);
  gpt_layernorm_backward(rows, dim, s->x, p[GPT_LN1_GAIN], s->mean1, s->rstd1, m->dnarrow,
                         m->dstream, g[GPT_LN1_GAIN], g[GPT_LN1_BIAS]);
}

static void head_forward(gpt_model *m, const float *const *p) {
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  const int64_t vocab = m->config.vocab;
  gpt_layernorm_forward(rows, dim, m->final_x, p[GPT_FINAL_GAIN], p[GPT_FINAL_BIAS], m->final_norm,
                        m->final_mean, m->final_rstd);
  linear(m, dim, vocab, m->final_norm, p[GPT_HEAD_WEIGHT], m->logits);
  m->loss = m->evaluating ? gpt_cross_entropy(rows, vocab, m->logits, m->targets)
                          : gpt_cross_entropy_backward(rows, vocab, m->logits, m->targets);
}

static void head_backward(gpt_model *m, const float *const *p, float *const *g) {
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  linear_backward(m, dim, m->config.vocab, m->final_norm, p[GPT_HEAD_WEIGHT], m->logits, m->dnarrow,
                  g[GPT_HEAD_WEIGHT]);
  memset(m->dstream, 0, (size_t)(rows * dim) * sizeof *m->dstream);
  gpt_layernorm_backward(rows, dim, m->final_x, p[GPT_FINAL_GAIN], m->final_mean, m->final_rstd,
                         m->dnarrow, m->dstream, g[GPT_FINAL_GAIN], g[GPT_FINAL_BIAS]);
}

void gpt_forward_unit(gpt_model *m, int32_t unit, const float *const *params) {
  const gpt_config *c = &m->config;
  if (unit == 0)
    gpt_embedding_forward(c->batch, c->context, c->dim, m->inputs, params[GPT_WTE], params[GPT_WPE],
                          m->blocks[0].x);
  else if (unit <= c->layers)
    block_forward(m, unit - 1, params);
  else
    head_forward(m, params);
}

void gpt_backward_unit(gpt_model *m, int32_t unit, const float *const *params,
                       float *const *grads) {
  const gpt_config *c = &m->config;
  if (unit == 0)
    gpt_embedding_backward(c->batch, c->context, c->dim, m->inputs, m->dstream, grads[GPT_WTE],
                           grads[GPT_WPE]);
  else if (unit <= c->layers)
    block_backward(m, unit - 1, params, grads);
  else
    head_backward(m, params, grads);
}

void gpt_forward(gpt_model *m, const float *const *params) {
  for (int32_t unit = 0; unit < m->unit_count; ++unit)
    gpt_forward_unit(m, unit, params + gpt_unit_first_param(&m->config, unit));
}

void gpt_backward(gpt_model *m, const float *const *params, float *const *grads) {
  for (int32_t unit = m->unit_count; unit-- > 0;) {
    const int32_t first = gpt_unit_first_param(&m->config, unit);
    gpt_backward_unit(m, unit, params + first, grads + first);
  }
}
