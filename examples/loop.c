/* SPDX-License-Identifier: MIT */
/* loop.c - the smallest sharded training loop with runtime.h: two matrices, Muon, three thread ranks.
 * loop_by_hand.c is the same without the runtime.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno -ffp-contract=off -I. \
 *           examples/loop.c -lpthread -lm */
#include "matrixfsdp.h"
#include "mfsdp/host/threads_run.h"

#include "two_layers.h"

#define RANKS 3
#define STEPS 300

static void init(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  int64_t i;
  (void)user;
  for (i = 0; i < count; ++i)
    dst[i] = net_init(param, first + i);
}

static mfsdp_status create(mfsdp_threads_rank *rank, mfsdp_plan **plan, mfsdp_runtime **runtime) {
  const mfsdp_hyper_group muon = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  const mfsdp_param params[LAYERS] = {
      mfsdp_param_2d("layer.0", 0, MFSDP_ROLE_MATRIX, WIDTH, WIDTH),
      mfsdp_param_2d("layer.1", 1, MFSDP_ROLE_MATRIX, WIDTH, WIDTH)};
  mfsdp_plan_desc plan_desc = mfsdp_plan_desc_default();
  mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
  mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
  mfsdp_group group = mfsdp_group_default();
  plan_desc.params = params;
  plan_desc.param_count = LAYERS;
  plan_desc.world = rank->world;
  MFSDP_TRY(mfsdp_plan_create(&rank->context, &plan_desc, plan));
  optimizer.groups = &muon;
  optimizer.group_count = 1;
  group.plan = *plan;
  group.transport = &rank->transport;
  group.control = &rank->control;
  desc.backend = rank->backend;
  desc.groups = &group;
  desc.group_count = 1;
  desc.optimizer = &optimizer;
  desc.schedule.kind = MFSDP_SCHEDULE_LINEAR; /* to 0 */
  desc.schedule.total_steps = STEPS;
  desc.schedule.final_factor = 0.0;
  MFSDP_TRY(mfsdp_runtime_create(&rank->context, &desc, runtime));
  return mfsdp_runtime_init(*runtime, init, NULL);
}

static mfsdp_status train_step(mfsdp_runtime *rt, net *n, double *loss) {
  mfsdp_step_desc step = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  int u;
  step.grad_weight = 1.0 / RANKS;
  MFSDP_TRY(mfsdp_step_begin(rt, &step));
  for (u = 0; u < LAYERS; ++u) {
    MFSDP_TRY(mfsdp_unit_acquire(rt, u, MFSDP_USE_FORWARD));
    net_forward(n, u, (const float *)mfsdp_unit_param(rt, u));
    MFSDP_TRY(mfsdp_unit_release(rt, u));
  }
  MFSDP_TRY(mfsdp_step_value(rt, n->loss));
  for (u = LAYERS; u-- > 0;) {
    MFSDP_TRY(mfsdp_unit_acquire(rt, u, MFSDP_USE_BACKWARD));
    MFSDP_TRY(mfsdp_unit_grads(rt, u));
    net_backward(n, u, (const float *)mfsdp_unit_param(rt, u), (float *)mfsdp_unit_grad(rt, u));
    MFSDP_TRY(mfsdp_unit_reduce(rt, u));
    MFSDP_TRY(mfsdp_unit_release(rt, u));
  }
  MFSDP_TRY(mfsdp_step_end(rt, 0));
  MFSDP_TRY(mfsdp_step_verdict(rt, &verdict));
  *loss = verdict.value_mean;
  return MFSDP_OK;
}

static mfsdp_status train(const mfsdp_threads_rank *rank, mfsdp_runtime *runtime) {
  static net nets[RANKS]; /* gcc 12.2, -O3 -march=x86-64-v4: misaligned on the stack */
  net *n = &nets[rank->rank];
  double loss = 0.0;
  int step;
  for (step = 0; step < STEPS; ++step) {
    net_load(n, rank->rank, rank->world, step);
    MFSDP_TRY(train_step(runtime, n, &loss));
    if (rank->rank == 0 && (step == 0 || step + 1 == STEPS))
      printf("loss of step %d: %.4f\n", step + 1, loss);
  }
  return MFSDP_OK;
}

static mfsdp_status body(mfsdp_threads_rank *rank, void *user) {
  mfsdp_plan *plan = NULL;
  mfsdp_runtime *runtime = NULL;
  mfsdp_status status = create(rank, &plan, &runtime), last;
  (void)user;
  if (status == MFSDP_OK) status = train(rank, runtime);
  last = mfsdp_runtime_destroy(runtime); /* also after a failure; NULL is allowed */
  mfsdp_plan_destroy(&rank->context, plan);
  return status != MFSDP_OK ? status : last;
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  mfsdp_context context;
  desc.threads.world = RANKS;
  if (mfsdp_context_init(&context, &context_desc) == MFSDP_OK &&
      mfsdp_threads_run(&context, &desc, body, NULL) == MFSDP_OK)
    return 0;
  fprintf(stderr, "loop: %s\n", mfsdp_context_error(&context)->message);
  return 1;
}
