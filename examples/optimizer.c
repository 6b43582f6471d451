/* SPDX-License-Identifier: MIT */
/* optimizer.c - Muon on one matrix and AdamW on one vector that the program holds itself: no ranks, no
 * runtime. They are pulled towards a target, so the gradient is the distance to it.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno -ffp-contract=off -I. \
 *           examples/optimizer.c -lpthread -lm */
#include "mfsdp/optimizer.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/random.h"

#define ROWS 24
#define COLS 16
#define STEPS 200

typedef struct params {
  float weight[ROWS * COLS], bias[ROWS]; /* fp32 masters: what the optimizer updates */
  float weight_grad[ROWS * COLS], bias_grad[ROWS];
} params;

/* Half the squared distance to the target, and its gradient. */
static double loss_and_gradient(params *p) {
  double loss = 0.0;
  int i;
  for (i = 0; i < ROWS * COLS; ++i) {
    p->weight_grad[i] = p->weight[i] - mfsdp_random_normal(1, 0, (uint64_t)i);
    loss += 0.5 * (double)p->weight_grad[i] * (double)p->weight_grad[i];
  }
  for (i = 0; i < ROWS; ++i) {
    p->bias_grad[i] = p->bias[i] - mfsdp_random_normal(2, 0, (uint64_t)i);
    loss += 0.5 * (double)p->bias_grad[i] * (double)p->bias_grad[i];
  }
  return loss;
}

static mfsdp_optimizer_tensor tensor(const char *name, mfsdp_role role, int32_t param,
                                     int32_t hyper_group, int64_t rows, int64_t cols, float *master,
                                     const float *grad) {
  mfsdp_optimizer_tensor t;
  memset(&t, 0, sizeof(t));
  t.name = name;
  t.role = role;
  t.param = param;
  t.hyper_group = hyper_group;
  t.rows = rows;
  t.cols = cols;
  t.count = rows * cols;
  t.master = master;
  t.grad = grad;
  return t;
}

static mfsdp_status train(mfsdp_context *context, const mfsdp_backend *backend, params *p) {
  mfsdp_hyper_group groups[2];
  mfsdp_optimizer_tensor tensors[2];
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_step_scalars scalars[2];
  mfsdp_optimizer *optimizer = NULL;
  mfsdp_queue *queue = NULL;
  int g, step;
  groups[0] = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  groups[1] = mfsdp_hyper_group_adamw(0.03, 0.0);
  groups[0].lr = 0.2;
  tensors[0] = tensor("weight", MFSDP_ROLE_MATRIX, 0, 0, ROWS, COLS, p->weight, p->weight_grad);
  tensors[1] = tensor("bias", MFSDP_ROLE_ELEMENTWISE, 1, 1, 1, ROWS, p->bias, p->bias_grad);
  desc.groups = groups;
  desc.group_count = 2;
  MFSDP_TRY(mfsdp_optimizer_create(context, backend, &desc, tensors, 2, &optimizer));
  MFSDP_TRY(backend->ops->queue_create(backend->self, context, "main", &queue));
  for (g = 0; g < 2; ++g)
    scalars[g] = mfsdp_step_scalars_default(groups[g].lr, groups[g].weight_decay);
  printf("loss before: %.1f\n", loss_and_gradient(p));
  for (step = 0; step < STEPS; ++step) {
    (void)loss_and_gradient(p);
    MFSDP_TRY(mfsdp_optimizer_step(context, optimizer, queue, scalars, NULL)); /* inline queue */
    for (g = 0; g < 2; ++g) {
      ++scalars[g].applied_steps;
      scalars[g].lr = groups[g].lr * (STEPS - 1 - step) / STEPS; /* the schedule is yours */
    }
  }
  printf("loss after %d steps: %.1f\n", STEPS, loss_and_gradient(p));
  backend->ops->queue_destroy(backend->self, context, queue);
  mfsdp_optimizer_destroy(context, optimizer);
  return MFSDP_OK;
}

int main(void) {
  static params p; /* starts from zeros */
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default(); /* math NULL: C loops */
  mfsdp_host_backend *host = NULL;
  mfsdp_context context;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_host_backend_create(&context, &desc, &host) != MFSDP_OK ||
      train(&context, mfsdp_host_backend_get(host), &p) != MFSDP_OK ||
      mfsdp_host_backend_destroy(&context, host) != MFSDP_OK) {
    fprintf(stderr, "optimizer: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  return mfsdp_context_destroy(&context) != MFSDP_OK;
}
