/* SPDX-License-Identifier: MIT */
/*
 * after.c - a byte-level language model: four ranks, Muon for the hidden matrices, else AdamW.
 *
 *   PROGRAM FILE [STEPS]
 *
 * docs/porting.md goes from before.c, a plain trainer, to after.c, the same with MatrixFSDP. The
 * last CONTEXT bytes are embedded, and two hidden layers and a head predict the next one.
 */
#include "matrixfsdp.h"
#include "mfsdp/host/threads_run.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONTEXT 16
#define EMBED 16
#define HIDDEN 128
#define VOCAB 256
#define RANKS 4
#define BATCH (32 / RANKS)

enum { EMBEDDING, UP_W, UP_B, MID_W, MID_B, HEAD_W, HEAD_B, TENSORS };
enum { EMBED_LAYER, UP_LAYER, MID_LAYER, HEAD_LAYER, LAYERS }; /* of tensor k: (k + 1) / 2 */
static const struct {
  const char *name;
  int rows, cols;
} tensors[TENSORS] = {{"embedding", VOCAB, EMBED}, {"up.weight", HIDDEN, CONTEXT *EMBED},
                      {"up.bias", 1, HIDDEN},      {"mid.weight", HIDDEN, HIDDEN},
                      {"mid.bias", 1, HIDDEN},     {"head.weight", VOCAB, HIDDEN},
                      {"head.bias", 1, VOCAB}};

typedef struct trainer {
  const uint8_t *text;
  long text_nbytes, steps;
  mfsdp_threads_rank *rank;
  mfsdp_plan *plan;
  mfsdp_runtime *runtime;
  uint8_t tokens[BATCH][CONTEXT + 1];
  float x[BATCH * CONTEXT * EMBED], up[BATCH * HIDDEN], mid[BATCH * HIDDEN], logits[BATCH * VOCAB];
  float dx[BATCH * CONTEXT * EMBED], dup[BATCH * HIDDEN], dmid[BATCH * HIDDEN];
  double loss;
} trainer;

static float *param(const trainer *t, int tensor) {
  return (float *)mfsdp_unit_param(t->runtime, tensor);
}

static float *grad(const trainer *t, int tensor) {
  return (float *)mfsdp_unit_grad(t->runtime, tensor);
}

/* ---- layers ---- */

/* y = x w^T + b */
static void linear_forward(int in, int out, const float *x, const float *w, const float *b,
                           float *y) {
  int r, o, i;
  for (r = 0; r < BATCH; ++r)
    for (o = 0; o < out; ++o) {
      float sum = b[o];
      for (i = 0; i < in; ++i)
        sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
}

/* dx = dy w; adds to dw and db */
static void linear_backward(int in, int out, const float *x, const float *w, const float *dy,
                            float *dx, float *dw, float *db) {
  int r, o, i;
  memset(dx, 0, sizeof(float) * (size_t)(BATCH * in));
  for (r = 0; r < BATCH; ++r)
    for (o = 0; o < out; ++o) {
      const float d = dy[r * out + o];
      db[o] += d;
      for (i = 0; i < in; ++i) {
        dx[r * in + i] += d * w[o * in + i];
        dw[o * in + i] += d * x[r * in + i];
      }
    }
}

static void tanh_forward(int count, float *y) {
  int i;
  for (i = 0; i < count; ++i)
    y[i] = tanhf(y[i]);
}

static void tanh_backward(int count, const float *y, float *dy) {
  int i;
  for (i = 0; i < count; ++i)
    dy[i] *= 1.0f - y[i] * y[i];
}

/* The mean loss; logits become its gradient. */
static void cross_entropy(trainer *t) {
  int r, c;
  t->loss = 0.0;
  for (r = 0; r < BATCH; ++r) {
    float *row = t->logits + r * VOCAB, most = row[0], sum = 0.0f;
    const int target = t->tokens[r][CONTEXT];
    for (c = 1; c < VOCAB; ++c)
      if (row[c] > most) most = row[c];
    for (c = 0; c < VOCAB; ++c)
      sum += expf(row[c] - most);
    t->loss += (logf(sum) + most - row[target]) / BATCH;
    for (c = 0; c < VOCAB; ++c)
      row[c] = (expf(row[c] - most) / sum - (c == target ? 1.0f : 0.0f)) / BATCH;
  }
}

static void embed_forward(trainer *t, const float *w) {
  int r, c;
  for (r = 0; r < BATCH; ++r)
    for (c = 0; c < CONTEXT; ++c)
      memcpy(t->x + (r * CONTEXT + c) * EMBED, w + t->tokens[r][c] * EMBED, EMBED * sizeof(float));
}

static void embed_backward(const trainer *t, float *dw) {
  int r, c, i;
  for (r = 0; r < BATCH; ++r)
    for (c = 0; c < CONTEXT; ++c)
      for (i = 0; i < EMBED; ++i)
        dw[t->tokens[r][c] * EMBED + i] += t->dx[(r * CONTEXT + c) * EMBED + i];
}

static void layer_forward(trainer *t, int layer) {
  switch (layer) {
  case EMBED_LAYER: embed_forward(t, param(t, EMBEDDING)); break;
  case UP_LAYER:
    linear_forward(CONTEXT * EMBED, HIDDEN, t->x, param(t, UP_W), param(t, UP_B), t->up);
    tanh_forward(BATCH * HIDDEN, t->up);
    break;
  case MID_LAYER:
    linear_forward(HIDDEN, HIDDEN, t->up, param(t, MID_W), param(t, MID_B), t->mid);
    tanh_forward(BATCH * HIDDEN, t->mid);
    break;
  default:
    linear_forward(HIDDEN, VOCAB, t->mid, param(t, HEAD_W), param(t, HEAD_B), t->logits);
    cross_entropy(t);
  }
}

static void layer_backward(trainer *t, int layer) {
  switch (layer) {
  case HEAD_LAYER:
    linear_backward(HIDDEN, VOCAB, t->mid, param(t, HEAD_W), t->logits, t->dmid, grad(t, HEAD_W),
                    grad(t, HEAD_B));
    break;
  case MID_LAYER:
    tanh_backward(BATCH * HIDDEN, t->mid, t->dmid);
    linear_backward(HIDDEN, HIDDEN, t->up, param(t, MID_W), t->dmid, t->dup, grad(t, MID_W),
                    grad(t, MID_B));
    break;
  case UP_LAYER:
    tanh_backward(BATCH * HIDDEN, t->up, t->dup);
    linear_backward(CONTEXT * EMBED, HIDDEN, t->x, param(t, UP_W), t->dup, t->dx, grad(t, UP_W),
                    grad(t, UP_B));
    break;
  default: embed_backward(t, grad(t, EMBEDDING));
  }
}

/* ---- data and parameters ---- */

static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static void load_batch(trainer *t, long step) {
  int r;
  for (r = 0; r < BATCH; ++r) {
    const uint64_t sample = (uint64_t)(step * RANKS + t->rank->rank) * BATCH + (uint64_t)r;
    memcpy(t->tokens[r], t->text + mix(sample + 1) % (uint64_t)(t->text_nbytes - CONTEXT),
           CONTEXT + 1);
  }
}

/* Uniform, of variance 1 / columns; biases begin at 0. */
static void init_values(void *user, int32_t tensor, int64_t first, int64_t count, float *dst) {
  const float scale = tensors[tensor].rows > 1 ? sqrtf(3.0f / (float)tensors[tensor].cols) : 0.0f;
  int64_t i;
  (void)user;
  for (i = first; i < first + count; ++i) {
    const uint64_t bits = mix(((uint64_t)(tensor + 1) << 40) + (uint64_t)i);
    *dst++ = ((float)(bits >> 40) / 8388608.0f - 1.0f) * scale;
  }
}

static mfsdp_status trainer_create(trainer *t) {
  const mfsdp_hyper_group hyper[2] = {mfsdp_hyper_group_adamw(0.003, 0.0),
                                      mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN)};
  mfsdp_plan_desc plan = mfsdp_plan_desc_default();
  mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
  mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
  mfsdp_group group = mfsdp_group_default();
  mfsdp_param params[TENSORS];
  int k;
  for (k = 0; k < TENSORS; ++k) {
    const mfsdp_role role = k == UP_W || k == MID_W ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
    params[k] =
        mfsdp_param_2d(tensors[k].name, (k + 1) / 2, role, tensors[k].rows, tensors[k].cols);
    params[k].hyper_group = role == MFSDP_ROLE_MATRIX;
  }
  plan.params = params;
  plan.param_count = TENSORS;
  plan.world = RANKS;
  MFSDP_TRY(mfsdp_plan_create(&t->rank->context, &plan, &t->plan));
  optimizer.groups = hyper;
  optimizer.group_count = 2;
  group.plan = t->plan;
  group.transport = &t->rank->transport;
  group.control = &t->rank->control;
  desc.backend = t->rank->backend;
  desc.groups = &group;
  desc.group_count = 1;
  desc.optimizer = &optimizer;
  MFSDP_TRY(mfsdp_runtime_create(&t->rank->context, &desc, &t->runtime));
  return mfsdp_runtime_init(t->runtime, init_values, NULL);
}

/* ---- the loop ---- */

static void report(const trainer *t, long step, double loss) {
  if (step % 20 == 19 || step + 1 == t->steps) printf("step %ld loss %.4f\n", step + 1, loss);
}

static mfsdp_status train(trainer *t) {
  mfsdp_step_desc step_desc = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  long step;
  int layer;
  MFSDP_TRY(trainer_create(t));
  step_desc.grad_weight = 1.0 / RANKS;
  for (step = 0; step < t->steps; ++step) {
    load_batch(t, step);
    MFSDP_TRY(mfsdp_step_begin(t->runtime, &step_desc));
    for (layer = 0; layer < LAYERS; ++layer) {
      MFSDP_TRY(mfsdp_unit_acquire(t->runtime, layer, MFSDP_USE_FORWARD));
      layer_forward(t, layer);
      MFSDP_TRY(mfsdp_unit_release(t->runtime, layer));
    }
    MFSDP_TRY(mfsdp_step_value(t->runtime, t->loss));
    for (layer = LAYERS; layer-- > 0;) {
      MFSDP_TRY(mfsdp_unit_acquire(t->runtime, layer, MFSDP_USE_BACKWARD));
      MFSDP_TRY(mfsdp_unit_grads(t->runtime, layer));
      layer_backward(t, layer);
      MFSDP_TRY(mfsdp_unit_reduce(t->runtime, layer));
      MFSDP_TRY(mfsdp_unit_release(t->runtime, layer));
    }
    MFSDP_TRY(mfsdp_step_end(t->runtime, 0));
    MFSDP_TRY(mfsdp_step_verdict(t->runtime, &verdict));
    if (t->rank->rank == 0) report(t, step, verdict.value_mean);
  }
  return MFSDP_OK;
}

static mfsdp_status run_rank(mfsdp_threads_rank *rank, void *user) {
  static trainer ranks[RANKS];
  trainer *t = &ranks[rank->rank];
  mfsdp_status status, last;
  *t = *(const trainer *)user;
  t->rank = rank;
  status = train(t);
  last = mfsdp_runtime_destroy(t->runtime); /* also after a failure; NULL is allowed */
  mfsdp_plan_destroy(&rank->context, t->plan);
  return status != MFSDP_OK ? status : last;
}

static uint8_t *read_file(const char *name, long *nbytes) {
  FILE *file = fopen(name, "rb");
  uint8_t *text = NULL;
  if (file == NULL) return NULL;
  if (fseek(file, 0, SEEK_END) == 0 && (*nbytes = ftell(file)) > CONTEXT &&
      fseek(file, 0, SEEK_SET) == 0 && (text = (uint8_t *)malloc((size_t)*nbytes)) != NULL &&
      fread(text, 1, (size_t)*nbytes, file) != (size_t)*nbytes) {
    free(text);
    text = NULL;
  }
  (void)fclose(file);
  return text;
}

int main(int argc, char **argv) {
  static trainer t;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  mfsdp_context context;
  uint8_t *text;
  int ok;
  if (argc < 2 || (text = read_file(argv[1], &t.text_nbytes)) == NULL) {
    fprintf(stderr, "usage: FILE [STEPS], a file of more than %d bytes\n", CONTEXT);
    return 2;
  }
  t.text = text;
  t.steps = argc > 2 ? atol(argv[2]) : 200;
  desc.threads.world = RANKS;
  ok = mfsdp_context_init(&context, &context_desc) == MFSDP_OK &&
       mfsdp_threads_run(&context, &desc, run_rank, &t) == MFSDP_OK;
  if (!ok) fprintf(stderr, "%s\n", mfsdp_context_error(&context)->message);
  free(text);
  return !ok;
}
