/* SPDX-License-Identifier: MIT */
#include "config.h"

#include <inttypes.h>
#include <stddef.h>

static int check_range(gpt_error *error, const char *name, int64_t value, int64_t low,
                       int64_t high) {
  if (value >= low && value <= high) return GPT_OK;
  return gpt_fail(error, "%s is %" PRId64 "; it must be %" PRId64 " to %" PRId64, name, value, low,
                  high);
}

/* A generous bound on the floats of one layer's activations and of the whole model; the products
 * below stay under 2^62 because each factor is in range. */
static int check_sizes(const gpt_config *c, gpt_error *error) {
  const int64_t limit = INT64_C(1) << 36; /* 256 GiB of floats: a typing error, not a model */
  const int64_t tokens = c->batch * c->context;
  const int64_t wide = tokens > limit / (32 * c->dim + GPT_VOCAB) ? limit : 32 * tokens * c->dim;
  const int64_t scores =
      tokens > limit / (c->heads * c->context) ? limit : tokens * c->heads * c->context;
  if (wide >= limit / c->layers || scores >= limit / c->layers)
    return gpt_fail(error,
                    "batch %" PRId64 " x context %" PRId64 " x dim %" PRId64 " x layers %" PRId64
                    " needs more than 256 GiB of activations; lower one of them",
                    c->batch, c->context, c->dim, c->layers);
  if (12 * c->dim * c->dim >= limit / c->layers)
    return gpt_fail(error,
                    "dim %" PRId64 " x layers %" PRId64
                    " needs more than 256 GiB of parameters; lower one of them",
                    c->dim, c->layers);
  return GPT_OK;
}

int gpt_config_check(const gpt_config *c, gpt_error *error) {
  int status;
  if ((status = check_range(error, "layers", c->layers, 1, 1000)) != GPT_OK) return status;
  if ((status = check_range(error, "dim", c->dim, 1, 65536)) != GPT_OK) return status;
  if ((status = check_range(error, "heads", c->heads, 1, 4096)) != GPT_OK) return status;
  if ((status = check_range(error, "context", c->context, 1, 65536)) != GPT_OK) return status;
  if ((status = check_range(error, "batch", c->batch, 1, 65536)) != GPT_OK) return status;
  if ((status = check_range(error, "vocab", c->vocab, 2, GPT_VOCAB)) != GPT_OK) return status;
  if (c->dim % c->heads != 0)
    return gpt_fail(error,
                    "dim %" PRId64 " is not a multiple of heads %" PRId64
                    "; choose heads that divide dim",
                    c->dim, c->heads);
  return check_sizes(c, error);
}

int32_t gpt_unit_count(const gpt_config *c) {
  return (int32_t)c->layers + 2;
}

int32_t gpt_param_count(const gpt_config *c) {
  return GPT_EMBEDDING_PARAMS + (int32_t)c->layers * GPT_BLOCK_PARAMS + GPT_HEAD_PARAMS;
}

int32_t gpt_unit_first_param(const gpt_config *c, int32_t unit) {
  (void)c;
  return unit == 0 ? 0 : GPT_EMBEDDING_PARAMS + (unit - 1) * GPT_BLOCK_PARAMS;
}

int32_t gpt_unit_param_count(const gpt_config *c, int32_t unit) {
  if (unit == 0) return GPT_EMBEDDING_PARAMS;
  return unit <= c->layers ? GPT_BLOCK_PARAMS : GPT_HEAD_PARAMS;
}

int64_t gpt_config_tokens(const gpt_config *c) {
  return c->batch * c->context;
}

double gpt_config_flops_per_token(const gpt_config *c) {
  const double dim = (double)c->dim, layers = (double)c->layers;
  const double weights = 12.0 * dim * dim * layers + dim * (double)c->vocab;
  const double attention =
      layers * dim * (double)(c->context + 1); /* q k^T and p v, half of each */
  return 3.0 * 2.0 * (weights + attention);
}
