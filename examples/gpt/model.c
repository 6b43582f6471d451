/* SPDX-License-Identifier: MIT */
#include "model.h"

#include <string.h>

/* ---- memory: a block in each space, laid out by one function that runs twice (measure, place)
 * ---- */

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
  s->probs = take_floats(a, rows * m->config.heads * m->config.context);
  s->attended = take_floats(a, rows * dim);
  s->middle = take_floats(a, rows * dim);
  s->mean2 = take_floats(a, rows);
  s->rstd2 = take_floats(a, rows);
  s->norm2 = take_floats(a, rows * dim);
  s->slope = take_floats(a, rows * 4 * dim);
  s->active = take_floats(a, rows * 4 * dim);
}

static void place_host(gpt_model *m, arena *a) {
  const int64_t rows = gpt_config_tokens(&m->config);
  m->blocks = (gpt_block_state *)take(a, m->config.layers, sizeof *m->blocks);
  m->inputs = (uint8_t *)take(a, rows, 1);
  m->targets = (uint8_t *)take(a, rows, 1);
}

static void place_device(gpt_model *m, arena *a) {
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  gpt_block_state unplaced;
  for (int64_t i = 0; i < m->config.layers; ++i)
    place_block(m, a->base ? &m->blocks[i] : &unplaced, a);
  m->tokens = (uint8_t *)take(a, rows, 1);
  m->wanted = (uint8_t *)take(a, rows, 1);
  m->final_x = take_floats(a, rows * dim);
  m->final_mean = take_floats(a, rows);
  m->final_rstd = take_floats(a, rows);
  m->final_norm = take_floats(a, rows * dim);
  m->logits = take_floats(a, rows * m->config.vocab);
  m->dstream = take_floats(a, rows * dim);
  m->dnarrow = take_floats(a, rows * dim);
  m->dwide = take_floats(a, rows * 4 * dim);
  m->workspace =
      take(a, (int64_t)m->device.ops->workspace_nbytes(&m->attention, m->config.vocab), 1);
}

/* The block of one space; NULL, and *nbytes what was wanted, if there is no memory. */
static void *make_block(gpt_model *m, mfsdp_space space, void (*place)(gpt_model *, arena *),
                        size_t *nbytes) {
  arena a = {NULL, 0};
  place(m, &a);
  *nbytes = a.nbytes;
  a.base = (char *)m->device.ops->alloc(m->device.self, space, a.nbytes);
  a.nbytes = 0;
  if (a.base) place(m, &a);
  return a.base;
}

int gpt_model_create(const gpt_config *config, gpt_device device, gpt_model *model,
                     gpt_error *error) {
  memset(model, 0, sizeof *model);
  if (gpt_config_check(config, error) != GPT_OK) return GPT_USAGE_ERROR;
  model->config = *config;
  model->device = device;
  model->attention.batch = config->batch;
  model->attention.context = config->context;
  model->attention.dim = config->dim;
  model->attention.heads = config->heads;
  model->unit_count = gpt_unit_count(config);
  model->host_memory = make_block(model, MFSDP_SPACE_PINNED, place_host, &model->host_nbytes);
  if (model->host_memory)
    model->memory = make_block(model, MFSDP_SPACE_DEVICE, place_device, &model->memory_nbytes);
  if (!model->memory) {
    const size_t nbytes = model->host_memory ? model->memory_nbytes : model->host_nbytes;
    gpt_model_destroy(model);
    return gpt_fail(error, "no memory for %zu MiB of activations; lower batch, context or layers",
                    nbytes >> 20);
  }
  memset(model->inputs, 0, (size_t)gpt_config_tokens(config));
  memset(model->targets, 0, (size_t)gpt_config_tokens(config));
  return GPT_OK;
}

void gpt_model_destroy(gpt_model *model) {
  const gpt_device d = model->device;
  d.ops->free(d.self, MFSDP_SPACE_DEVICE, model->memory, model->memory_nbytes);
  d.ops->free(d.self, MFSDP_SPACE_PINNED, model->host_memory, model->host_nbytes);
  memset(model, 0, sizeof *model);
}

/* ---- products: y += x W^T and its two gradients; W is outputs x inputs ---- */

static void multiply(const gpt_model *m, int trans_a, int trans_b, int64_t rows, int64_t columns,
                     int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                     float beta, float *c) {
  gpt_product p;
  p.trans_a = trans_a;
  p.trans_b = trans_b;
  p.m = rows;
  p.n = columns;
  p.k = depth;
  p.alpha = 1.0f;
  p.a = a;
  p.lda = lda;
  p.b = b;
  p.ldb = ldb;
  p.beta = beta;
  p.c = c;
  p.ldc = columns;
  m->device.ops->product(m->device.self, &p);
}

static void linear_add(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                       const float *weight, float *y) {
  multiply(m, 0, 1, gpt_config_tokens(&m->config), outputs, inputs, x, inputs, weight, inputs, 1.0f,
           y);
}

/* y = x W^T: `linear_add` where nothing is there to add to. */
static void linear(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                   const float *weight, float *y) {
  multiply(m, 0, 1, gpt_config_tokens(&m->config), outputs, inputs, x, inputs, weight, inputs, 0.0f,
           y);
}

/* dx = dy W; dW += dy^T x. */
static void linear_backward(const gpt_model *m, int64_t inputs, int64_t outputs, const float *x,
                            const float *weight, const float *dy, float *dx, float *dweight) {
  const int64_t rows = gpt_config_tokens(&m->config);
  multiply(m, 0, 0, rows, inputs, outputs, dy, outputs, weight, inputs, 0.0f, dx);
  multiply(m, 1, 0, outputs, inputs, rows, dy, outputs, x, inputs, 1.0f, dweight);
}

/* ---- units ---- */

static void embedding_forward(gpt_model *m, const float *const *p) {
  const gpt_config *c = &m->config;
  m->device.ops->upload(m->device.self, m->tokens, m->inputs, (size_t)gpt_config_tokens(c));
  m->device.ops->embedding_forward(m->device.self, c->batch, c->context, c->dim, m->tokens,
                                   p[GPT_WTE], p[GPT_WPE], m->blocks[0].x);
}

/* Where a block's output goes: the next block's input, or the head's. */
static float *block_output(const gpt_model *m, int64_t block) {
  return block + 1 < m->config.layers ? m->blocks[block + 1].x : m->final_x;
}

static void block_forward(gpt_model *m, int64_t block, const float *const *p) {
  const gpt_ops *ops = m->device.ops;
  const gpt_block_state *s = &m->blocks[block];
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  float *output = block_output(m, block);
  void *self = m->device.self;

  ops->layernorm_forward(self, rows, dim, s->x, p[GPT_LN1_GAIN], p[GPT_LN1_BIAS], s->norm1,
                         s->mean1, s->rstd1);
  ops->bias_rows(self, rows, 3 * dim, p[GPT_QKV_BIAS], s->qkv);
  linear_add(m, dim, 3 * dim, s->norm1, p[GPT_QKV_WEIGHT], s->qkv);
  ops->attention_forward(self, &m->attention, s->qkv, s->probs, s->attended);
  ops->residual_bias_rows(self, rows, dim, s->x, p[GPT_PROJECTION_BIAS], s->middle);
  linear_add(m, dim, dim, s->attended, p[GPT_PROJECTION_WEIGHT], s->middle);

  ops->layernorm_forward(self, rows, dim, s->middle, p[GPT_LN2_GAIN], p[GPT_LN2_BIAS], s->norm2,
                         s->mean2, s->rstd2);
  linear(m, dim, 4 * dim, s->norm2, p[GPT_UP_WEIGHT], s->slope);
  ops->bias_gelu_forward(self, rows, 4 * dim, s->slope, p[GPT_UP_BIAS], s->active, s->slope);
  ops->residual_bias_rows(self, rows, dim, s->middle, p[GPT_DOWN_BIAS], output);
  linear_add(m, 4 * dim, dim, s->active, p[GPT_DOWN_WEIGHT], output);
}

/* dstream holds the gradient of the block's output on entry, of its input on return. */
static void block_backward(gpt_model *m, int64_t block, const float *const *p, float *const *g) {
  const gpt_ops *ops = m->device.ops;
  const gpt_block_state *s = &m->blocks[block];
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  void *self = m->device.self;

  ops->bias_backward(self, rows, dim, m->dstream, g[GPT_DOWN_BIAS]);
  linear_backward(m, 4 * dim, dim, s->active, p[GPT_DOWN_WEIGHT], m->dstream, m->dwide,
                  g[GPT_DOWN_WEIGHT]);
  ops->gelu_backward(self, rows * 4 * dim, s->slope, m->dwide);
  ops->bias_backward(self, rows, 4 * dim, m->dwide, g[GPT_UP_BIAS]);
  linear_backward(m, dim, 4 * dim, s->norm2, p[GPT_UP_WEIGHT], m->dwide, m->dnarrow,
                  g[GPT_UP_WEIGHT]);
  ops->layernorm_backward(self, rows, dim, s->middle, p[GPT_LN2_GAIN], s->mean2, s->rstd2,
                          m->dnarrow, m->dstream, g[GPT_LN2_GAIN], g[GPT_LN2_BIAS]);

  ops->bias_backward(self, rows, dim, m->dstream, g[GPT_PROJECTION_BIAS]);
  linear_backward(m, dim, dim, s->attended, p[GPT_PROJECTION_WEIGHT], m->dstream, m->dnarrow,
                  g[GPT_PROJECTION_WEIGHT]);
  ops->attention_backward(self, &m->attention, s->qkv, s->probs, m->dnarrow, m->dwide,
                          m->workspace);
  ops->bias_backward(self, rows, 3 * dim, m->dwide, g[GPT_QKV_BIAS]);
  linear_backward(m, dim, 3 * dim, s->norm1, p[GPT_QKV_WEIGHT], m->dwide, m->dnarrow,
                  g[GPT_QKV_WEIGHT]);
  ops->layernorm_backward(self, rows, dim, s->x, p[GPT_LN1_GAIN], s->mean1, s->rstd1, m->dnarrow,
                          m->dstream, g[GPT_LN1_GAIN], g[GPT_LN1_BIAS]);
}

static void head_forward(gpt_model *m, const float *const *p) {
  const gpt_ops *ops = m->device.ops;
  void *self = m->device.self;
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  const int64_t vocab = m->config.vocab;
  ops->layernorm_forward(self, rows, dim, m->final_x, p[GPT_FINAL_GAIN], p[GPT_FINAL_BIAS],
                         m->final_norm, m->final_mean, m->final_rstd);
  linear(m, dim, vocab, m->final_norm, p[GPT_HEAD_WEIGHT], m->logits);
  ops->upload(self, m->wanted, m->targets, (size_t)rows);
  if (m->evaluating)
    ops->cross_entropy(self, rows, vocab, m->logits, m->wanted, m->workspace, &m->loss);
  else
    ops->cross_entropy_backward(self, rows, vocab, m->logits, m->wanted, m->workspace, &m->loss);
}

static void head_backward(gpt_model *m, const float *const *p, float *const *g) {
  const gpt_ops *ops = m->device.ops;
  void *self = m->device.self;
  const int64_t rows = gpt_config_tokens(&m->config), dim = m->config.dim;
  linear_backward(m, dim, m->config.vocab, m->final_norm, p[GPT_HEAD_WEIGHT], m->logits, m->dnarrow,
                  g[GPT_HEAD_WEIGHT]);
  ops->zero(self, rows * dim, m->dstream);
  ops->layernorm_backward(self, rows, dim, m->final_x, p[GPT_FINAL_GAIN], m->final_mean,
                          m->final_rstd, m->dnarrow, m->dstream, g[GPT_FINAL_GAIN],
                          g[GPT_FINAL_BIAS]);
}

void gpt_forward_unit(gpt_model *m, int32_t unit, const float *const *params) {
  const gpt_config *c = &m->config;
  if (unit == 0)
    embedding_forward(m, params);
  else if (unit <= c->layers)
    block_forward(m, unit - 1, params);
  else
    head_forward(m, params);
}

void gpt_backward_unit(gpt_model *m, int32_t unit, const float *const *params,
                       float *const *grads) {
  const gpt_config *c = &m->config;
  if (unit == 0)
    m->device.ops->embedding_backward(m->device.self, c->batch, c->context, c->dim, c->vocab,
                                      m->tokens, m->dstream, grads[GPT_WTE], grads[GPT_WPE]);
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
