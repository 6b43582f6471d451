/* SPDX-License-Identifier: MIT */
#include "params.h"

#include "mfsdp/random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_NBYTES = 40 };

/* One kind of parameter. Sizes are stated in units, so that one table fits every configuration. */
typedef enum size_unit { NONE, DIM, DIM3, DIM4, VOCAB, CONTEXT } size_unit;
typedef enum start { ZERO, ONE, NORMAL, NORMAL_RESIDUAL } start;

typedef struct kind {
  const char *name; /* inside its unit */
  size_unit rows, cols;
  int32_t group;
  start start;
} kind;

static const kind embedding_kinds[GPT_EMBEDDING_PARAMS] = {
    {"wte.weight", VOCAB, DIM, GPT_GROUP_DECAY, NORMAL},
    {"wpe.weight", CONTEXT, DIM, GPT_GROUP_DECAY, NORMAL},
};

/* The order is that of the enum in config.h. */
static const kind block_kinds[GPT_BLOCK_PARAMS] = {
    {"ln1.weight", DIM, NONE, GPT_GROUP_PLAIN, ONE},
    {"ln1.bias", DIM, NONE, GPT_GROUP_PLAIN, ZERO},
    {"attn.qkv.weight", DIM3, DIM, GPT_GROUP_HIDDEN, NORMAL},
    {"attn.qkv.bias", DIM3, NONE, GPT_GROUP_PLAIN, ZERO},
    {"attn.proj.weight", DIM, DIM, GPT_GROUP_HIDDEN, NORMAL_RESIDUAL},
    {"attn.proj.bias", DIM, NONE, GPT_GROUP_PLAIN, ZERO},
    {"ln2.weight", DIM, NONE, GPT_GROUP_PLAIN, ONE},
    {"ln2.bias", DIM, NONE, GPT_GROUP_PLAIN, ZERO},
    {"mlp.up.weight", DIM4, DIM, GPT_GROUP_HIDDEN, NORMAL},
    {"mlp.up.bias", DIM4, NONE, GPT_GROUP_PLAIN, ZERO},
    {"mlp.down.weight", DIM, DIM4, GPT_GROUP_HIDDEN, NORMAL_RESIDUAL},
    {"mlp.down.bias", DIM, NONE, GPT_GROUP_PLAIN, ZERO},
};

static const kind head_kinds[GPT_HEAD_PARAMS] = {
    {"ln_f.weight", DIM, NONE, GPT_GROUP_PLAIN, ONE},
    {"ln_f.bias", DIM, NONE, GPT_GROUP_PLAIN, ZERO},
    {"head.weight", VOCAB, DIM, GPT_GROUP_DECAY, NORMAL},
};

/* Kind, unit and full name of a parameter. */
typedef struct place {
  const kind *kind;
  int32_t unit;
  char name[NAME_NBYTES];
} place;

static void find(const gpt_config *c, int32_t param, place *p) {
  const int32_t head = gpt_unit_first_param(c, (int32_t)c->layers + 1);
  if (param < GPT_EMBEDDING_PARAMS) {
    p->kind = &embedding_kinds[param];
    p->unit = 0;
  } else if (param >= head) {
    p->kind = &head_kinds[param - head];
    p->unit = (int32_t)c->layers + 1;
  } else {
    const int32_t block = (param - GPT_EMBEDDING_PARAMS) / GPT_BLOCK_PARAMS;
    p->kind = &block_kinds[(param - GPT_EMBEDDING_PARAMS) % GPT_BLOCK_PARAMS];
    p->unit = block + 1;
    snprintf(p->name, sizeof p->name, "blocks.%d.%s", block, p->kind->name);
    return;
  }
  snprintf(p->name, sizeof p->name, "%s", p->kind->name);
}

static int64_t size_of(const gpt_config *c, size_unit unit) {
  switch (unit) {
  case NONE: return 1;
  case DIM: return c->dim;
  case DIM3: return 3 * c->dim;
  case DIM4: return 4 * c->dim;
  case VOCAB: return c->vocab;
  case CONTEXT: return c->context;
  }
  return 0;
}

/* Of a tied head, the embedding; of anything else, itself. */
static int32_t storage_of(const gpt_config *c, int32_t param) {
  return c->tied && param == gpt_param_count(c) - 1 ? GPT_WTE : param;
}

int64_t gpt_param_numel(const gpt_config *c, int32_t param) {
  place p;
  find(c, param, &p);
  return size_of(c, p.kind->rows) * size_of(c, p.kind->cols);
}

int64_t gpt_config_param_numel(const gpt_config *c) {
  int64_t total = 0;
  for (int32_t i = 0; i < gpt_param_count(c); ++i)
    if (storage_of(c, i) == i) total += gpt_param_numel(c, i);
  return total;
}

/* What one table allocates, after its params: the row split of qkv, then all names. */
typedef struct table_tail {
  int64_t qkv_rows[3];
  char names[][NAME_NBYTES];
} table_tail;

static void fill(const gpt_config *c, int32_t index, const table_tail *tail, const place *p,
                 mfsdp_param *param) {
  *param = mfsdp_param_default();
  param->name = tail->names[index];
  param->unit = p->unit;
  param->hyper_group = p->kind->group;
  param->ndim = p->kind->cols == NONE ? 1 : 2;
  param->shape[0] = size_of(c, p->kind->rows);
  param->shape[1] = size_of(c, p->kind->cols);
  param->role = p->kind->group == GPT_GROUP_HIDDEN ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
  if (p->kind == &block_kinds[GPT_QKV_WEIGHT]) {
    param->view = MFSDP_VIEW_ROWS;
    param->part_rows = tail->qkv_rows;
    param->part_count = 3;
  }
  if (storage_of(c, index) != index) param->alias_of = tail->names[storage_of(c, index)];
}

int gpt_param_table_create(const gpt_config *config, gpt_param_table *table, gpt_error *error) {
  const int32_t count = gpt_param_count(config);
  const size_t params_nbytes = (size_t)count * sizeof(mfsdp_param);
  table_tail *tail;
  memset(table, 0, sizeof *table);
  table->params =
      (mfsdp_param *)calloc(1, params_nbytes + sizeof *tail + (size_t)count * NAME_NBYTES);
  if (!table->params) return gpt_fail(error, "no memory for a table of %d parameters", count);
  table->count = count;
  /* sizeof(mfsdp_param) is a multiple of its alignment, which that of int64_t does not exceed. */
  tail = (table_tail *)(void *)(table->params + count);
  for (int i = 0; i < 3; ++i)
    tail->qkv_rows[i] = config->dim;
  for (int32_t i = 0; i < count; ++i) {
    place p;
    find(config, i, &p);
    memcpy(tail->names[i], p.name, sizeof p.name);
    fill(config, i, tail, &p, &table->params[i]);
  }
  return GPT_OK;
}

void gpt_param_table_destroy(gpt_param_table *table) {
  free(table->params);
  memset(table, 0, sizeof *table);
}

static void fill_normal(const gpt_config *c, const place *p, uint64_t seed, int64_t first,
                        int64_t count, float *out) {
  const uint64_t stream = mfsdp_hash_bytes(MFSDP_HASH_SEED, p->name, strlen(p->name));
  const float residual = 1.0f / sqrtf(2.0f * (float)c->layers);
  const float deviation = 0.02f * (p->kind->start == NORMAL_RESIDUAL ? residual : 1.0f);
  for (int64_t i = 0; i < count; ++i)
    out[i] = deviation * mfsdp_random_normal(seed, stream, (uint64_t)(first + i));
}

void gpt_init_value(const gpt_config *c, uint64_t seed, int32_t param, int64_t first, int64_t count,
                    float *out) {
  place p;
  find(c, storage_of(c, param), &p);
  switch (p.kind->start) {
  case ZERO:
  case ONE:
    for (int64_t i = 0; i < count; ++i)
      out[i] = p.kind->start == ONE ? 1.0f : 0.0f;
    break;
  case NORMAL:
  case NORMAL_RESIDUAL: fill_normal(c, &p, seed, first, count, out); break;
  }
}
