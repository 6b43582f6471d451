/* SPDX-License-Identifier: MIT */
#include "models.h"

#include <stdio.h>
#include <string.h>

/*
 * The shapes are those of the models' public configurations (config.json of the named repositories,
 * hparams.json for GPT-2). `elements` is what the publishers or their checkpoints state: GPT-2's
 * 124,439,808 and 1,557,611,200 and Llama 3's 8,030,261,248 and 70,553,706,496 are the tensor
 * totals of the released checkpoints, Qwen3's 30.5 billion and DeepSeek's 671 billion are their
 * model cards'. DeepSeek-V3 is the main model without its multi-token-prediction layer, Kimi-K2
 * (1.026 trillion, "1 T" on its card) without quantization scales; router correction biases are
 * counted.
 */
static const plan_model table[] = {
    {"gpt2-124m",
     "openai/gpt-2 124M hparams.json",
     50257,
     1024,
     768,
     12,
     12,
     12,
     64,
     3072,
     0,
     1,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     INT64_C(124439808)},
    {"gpt2-1.5b",
     "openai/gpt-2 1558M hparams.json",
     50257,
     1024,
     1600,
     48,
     25,
     25,
     64,
     6400,
     0,
     1,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     INT64_C(1557611200)},
    {"llama3-8b",
     "meta-llama/Meta-Llama-3-8B config.json",
     128256,
     0,
     4096,
     32,
     32,
     8,
     128,
     14336,
     1,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     INT64_C(8030261248)},
    {"llama3-70b",
     "meta-llama/Meta-Llama-3-70B config.json",
     128256,
     0,
     8192,
     80,
     64,
     8,
     128,
     28672,
     1,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     INT64_C(70553706496)},
    {"qwen3-30b-a3b",
     "Qwen/Qwen3-30B-A3B config.json",
     151936,
     0,
     2048,
     48,
     32,
     4,
     128,
     6144,
     1,
     0,
     1,
     128,
     8,
     768,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     0,
     INT64_C(30532122624)},
    {"deepseek-v3",
     "deepseek-ai/DeepSeek-V3 config.json",
     129280,
     0,
     7168,
     61,
     128,
     128,
     0,
     18432,
     1,
     0,
     0,
     256,
     8,
     2048,
     1,
     3,
     1,
     1536,
     512,
     128,
     64,
     128,
     INT64_C(671026419200)},
    {"kimi-k2",
     "moonshotai/Kimi-K2-Base config.json",
     163840,
     0,
     7168,
     61,
     64,
     64,
     0,
     18432,
     1,
     0,
     0,
     384,
     8,
     2048,
     1,
     1,
     1,
     1536,
     512,
     128,
     64,
     128,
     INT64_C(1026408232448)},
};
enum { MODEL_COUNT = sizeof table / sizeof table[0] };

const plan_model *plan_model_at(int index) {
  return index >= 0 && index < MODEL_COUNT ? &table[index] : NULL;
}

const plan_model *plan_model_find(const char *name) {
  for (int i = 0; i < MODEL_COUNT; ++i)
    if (strcmp(table[i].name, name) == 0) return &table[i];
  return NULL;
}

/* ---- tensors ---- */

typedef struct builder {
  const plan_model *m;
  plan_views views;
  plan_params *params;
  plan_error *error;
  int32_t unit;
  char prefix[32]; /* "" or "layers.N." */
  int failed;
  mfsdp_param sink; /* what is written to after a failure, so that callers need no check */
} builder;

static mfsdp_param *add(builder *b, const char *name, mfsdp_role role, int32_t ndim, int64_t d0,
                        int64_t d1, int64_t d2) {
  mfsdp_param *p = NULL;
  char full[96];
  snprintf(full, sizeof full, "%s%s", b->prefix, name);
  if (!b->failed) p = plan_params_add(b->params, full, b->error);
  if (!p) {
    b->failed = 1;
    return &b->sink;
  }
  p->unit = b->unit;
  p->role = role;
  p->ndim = ndim;
  p->shape[0] = d0;
  p->shape[1] = d1;
  p->shape[2] = d2;
  p->compute = p->grad = p->wire = MFSDP_BF16;
  return p;
}

static void vector(builder *b, const char *name, int64_t count) {
  (void)add(b, name, MFSDP_ROLE_ELEMENTWISE, 1, count, 0, 0);
}

static mfsdp_param *matrix(builder *b, const char *name, int64_t rows, int64_t cols) {
  return add(b, name, MFSDP_ROLE_MATRIX, 2, rows, cols, 0);
}

/* A projection whose rows belong to heads. */
static void headed(builder *b, const char *name, int64_t heads, int64_t head_rows, int64_t cols) {
  mfsdp_param *p = matrix(b, name, heads * head_rows, cols);
  if (b->views != PLAN_VIEWS_HEADS) return;
  p->view = MFSDP_VIEW_HEADS;
  p->head_count = (int32_t)heads;
}

/* GPT-2's fused query, key and value: three matrices, or three times the heads. */
static void fused_qkv(builder *b) {
  const plan_model *m = b->m;
  mfsdp_param *p = matrix(b, "attn.c_attn.weight", 3 * m->dim, m->dim);
  p->view = MFSDP_VIEW_HEADS;
  p->head_count = (int32_t)(b->views == PLAN_VIEWS_HEADS ? 3 * m->heads : 3);
}

static void norm(builder *b, const char *name) {
  char full[64];
  snprintf(full, sizeof full, "%s.weight", name);
  vector(b, full, b->m->dim);
  if (b->m->gated) return;
  snprintf(full, sizeof full, "%s.bias", name);
  vector(b, full, b->m->dim);
}

static void attention_gpt2(builder *b) {
  const int64_t d = b->m->dim;
  fused_qkv(b);
  vector(b, "attn.c_attn.bias", 3 * d);
  (void)matrix(b, "attn.c_proj.weight", d, d);
  vector(b, "attn.c_proj.bias", d);
}

static void attention_grouped(builder *b) {
  const plan_model *m = b->m;
  headed(b, "self_attn.q_proj.weight", m->heads, m->head_dim, m->dim);
  headed(b, "self_attn.k_proj.weight", m->kv_heads, m->head_dim, m->dim);
  headed(b, "self_attn.v_proj.weight", m->kv_heads, m->head_dim, m->dim);
  (void)matrix(b, "self_attn.o_proj.weight", m->dim, m->heads * m->head_dim);
  if (!m->qk_norm) return;
  vector(b, "self_attn.q_norm.weight", m->head_dim);
  vector(b, "self_attn.k_norm.weight", m->head_dim);
}

static void attention_latent(builder *b) {
  const plan_model *m = b->m;
  (void)matrix(b, "self_attn.q_a_proj.weight", m->q_rank, m->dim);
  vector(b, "self_attn.q_a_layernorm.weight", m->q_rank);
  headed(b, "self_attn.q_b_proj.weight", m->heads, m->nope_dim + m->rope_dim, m->q_rank);
  (void)matrix(b, "self_attn.kv_a_proj_with_mqa.weight", m->kv_rank + m->rope_dim, m->dim);
  vector(b, "self_attn.kv_a_layernorm.weight", m->kv_rank);
  headed(b, "self_attn.kv_b_proj.weight", m->heads, m->nope_dim + m->v_dim, m->kv_rank);
  (void)matrix(b, "self_attn.o_proj.weight", m->dim, m->heads * m->v_dim);
}

static void mlp_gpt2(builder *b) {
  const plan_model *m = b->m;
  (void)matrix(b, "mlp.c_fc.weight", m->ffn, m->dim);
  vector(b, "mlp.c_fc.bias", m->ffn);
  (void)matrix(b, "mlp.c_proj.weight", m->dim, m->ffn);
  vector(b, "mlp.c_proj.bias", m->dim);
}

static void mlp_gated(builder *b, const char *name, int64_t ffn) {
  char full[64];
  snprintf(full, sizeof full, "%s.gate_proj.weight", name);
  (void)matrix(b, full, ffn, b->m->dim);
  snprintf(full, sizeof full, "%s.up_proj.weight", name);
  (void)matrix(b, full, ffn, b->m->dim);
  snprintf(full, sizeof full, "%s.down_proj.weight", name);
  (void)matrix(b, full, b->m->dim, ffn);
}

static void experts(builder *b) {
  static const char *const names[2] = {"mlp.experts.gate_proj.weight",
                                       "mlp.experts.up_proj.weight"};
  const plan_model *m = b->m;
  mfsdp_param *p;
  (void)matrix(b, "mlp.gate.weight", m->experts, m->dim);
  if (m->router_bias) vector(b, "mlp.gate.e_score_correction_bias", m->experts);
  if (m->shared_experts) mlp_gated(b, "mlp.shared_experts", m->shared_experts * m->expert_ffn);
  for (int i = 0; i < 2; ++i) {
    p = add(b, names[i], MFSDP_ROLE_MATRIX, 3, m->experts, m->expert_ffn, m->dim);
    p->view = MFSDP_VIEW_BATCH;
  }
  p = add(b, "mlp.experts.down_proj.weight", MFSDP_ROLE_MATRIX, 3, m->experts, m->dim,
          m->expert_ffn);
  p->view = MFSDP_VIEW_BATCH;
}

static void block(builder *b, int64_t index) {
  const plan_model *m = b->m;
  norm(b, m->gated ? "input_layernorm" : "ln_1");
  if (!m->gated)
    attention_gpt2(b);
  else if (m->kv_rank)
    attention_latent(b);
  else
    attention_grouped(b);
  norm(b, m->gated ? "post_attention_layernorm" : "ln_2");
  if (!m->gated)
    mlp_gpt2(b);
  else if (m->experts && index >= m->dense_layers)
    experts(b);
  else
    mlp_gated(b, "mlp", m->ffn);
}

int plan_model_build(const plan_model *model, plan_views views, plan_params *params,
                     plan_error *error) {
  const char *embed = model->gated ? "embed_tokens.weight" : "wte.weight";
  builder b;
  memset(&b, 0, sizeof b);
  b.m = model;
  b.views = views;
  b.params = params;
  b.error = error;
  (void)add(&b, embed, MFSDP_ROLE_ELEMENTWISE, 2, model->vocab, model->dim, 0);
  if (model->context)
    (void)add(&b, "wpe.weight", MFSDP_ROLE_ELEMENTWISE, 2, model->context, model->dim, 0);
  for (int64_t i = 0; i < model->layers; ++i) {
    b.unit = (int32_t)(i + 1);
    snprintf(b.prefix, sizeof b.prefix, model->gated ? "layers.%lld." : "h.%lld.", (long long)i);
    block(&b, i);
  }
  b.unit = (int32_t)(model->layers + 1);
  b.prefix[0] = '\0';
  norm(&b, model->gated ? "norm" : "ln_f");
  {
    mfsdp_param *head =
        add(&b, "lm_head.weight", MFSDP_ROLE_ELEMENTWISE, 2, model->vocab, model->dim, 0);
    if (model->tied) head->alias_of = embed;
  }
  return b.failed ? PLAN_USAGE_ERROR : PLAN_OK;
}

int plan_model_fill(const char *name, plan_views views, plan_params *params, plan_error *error) {
  const plan_model *model = plan_model_find(name);
  if (!model) {
    char known[256] = "";
    for (int i = 0; i < MODEL_COUNT; ++i) {
      const size_t used = strlen(known);
      snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", table[i].name);
    }
    return plan_fail(error, "no built-in model '%.60s': there are %s", name, known);
  }
  return plan_model_build(model, views, params, error);
}

int64_t plan_model_active(const plan_model *model) {
  const int64_t moe_layers = model->experts ? model->layers - model->dense_layers : 0;
  return model->elements -
         moe_layers * (model->experts - model->experts_used) * 3 * model->expert_ffn * model->dim;
}
