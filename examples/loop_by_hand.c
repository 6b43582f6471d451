/* SPDX-License-Identifier: MIT */
/* loop_by_hand.c - the training loop of loop.c from the primitives: a plan, a gather and a reduce for each
 * unit, and the optimizer over what this rank owns. No runtime.h: no norm, verdict, prefetch or counters.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno -ffp-contract=off -I. \
 *           examples/loop_by_hand.c -lpthread -lm */
#include "mfsdp/collective.h"
#include "mfsdp/host/threads_run.h"
#include "mfsdp/optimizer.h"
#include "mfsdp/shard.h"

#include "two_layers.h"

#define RANKS 3
#define STEPS 300
#define FULL (((int64_t)WIDTH * WIDTH + 127) / 128 * 128) /* a unit's buffer: its one tensor, padded */

/* What a rank keeps: the matrices it owns and the sums of their gradients; and one unit at a time. */
typedef struct state {
  mfsdp_plan *plan;
  mfsdp_coll *gather[LAYERS], *reduce[LAYERS];
  float shard[LAYERS][FULL], sum[LAYERS][FULL], full[FULL], grad[FULL];
  mfsdp_buffer workspace;
  mfsdp_optimizer *optimizer;
  mfsdp_queue *queue; /* inline: what is enqueued has run when the call returns */
} state;

static mfsdp_status create_unit(mfsdp_threads_rank *rank, state *s, int u) {
  mfsdp_extent extents[RANKS];
  mfsdp_layout layout = {sizeof(layout), extents, 0, RANKS, MFSDP_F32, FULL, NULL};
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  desc.layout = &layout;
  desc.transport = &rank->transport;
  MFSDP_TRY(mfsdp_plan_extents(&rank->context, s->plan, u, MFSDP_LAYOUT_GATHER, extents, RANKS,
                               &layout.extent_count));
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
  MFSDP_TRY(mfsdp_coll_create(&rank->context, &desc, &s->gather[u]));
  desc.kind = MFSDP_COLL_REDUCE; /* of f32 gradients: the same layout */
  desc.traffic = MFSDP_TRAFFIC_REDUCE;
  return mfsdp_coll_create(&rank->context, &desc, &s->reduce[u]);
}

static mfsdp_status create_optimizer(mfsdp_threads_rank *rank, state *s,
                                     const mfsdp_hyper_group *muon) {
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  mfsdp_optimizer_tensor own[LAYERS];
  const mfsdp_piece *pieces;
  int32_t count = 0, own_count = 0, i;
  int64_t k;
  pieces = mfsdp_plan_pieces(s->plan, -1, &count);
  memset(own, 0, sizeof(own));
  for (i = 0; i < count; ++i) {
    const mfsdp_piece *piece = pieces + i;
    mfsdp_optimizer_tensor *t = &own[own_count];
    if (piece->owner != rank->rank) continue;
    for (k = 0; k < piece->count; ++k)
      s->shard[piece->unit][piece->shard_offset + k] = net_init(piece->param, piece->first + k);
    t->name = mfsdp_plan_param(s->plan, piece->param)->name;
    t->role = MFSDP_ROLE_MATRIX;
    t->param = own_count++;
    t->rows = piece->rows;
    t->cols = piece->cols;
    t->count = piece->count;
    t->master = &s->shard[piece->unit][piece->shard_offset];
    t->grad = &s->sum[piece->unit][piece->grad_shard_offset];
  }
  desc.groups = muon;
  desc.group_count = 1;
  return mfsdp_optimizer_create(&rank->context, rank->backend, &desc, own, own_count,
                                &s->optimizer);
}

static mfsdp_status create(mfsdp_threads_rank *rank, state *s, const mfsdp_hyper_group *muon) {
  const mfsdp_param params[LAYERS] = {
      mfsdp_param_2d("layer.0", 0, MFSDP_ROLE_MATRIX, WIDTH, WIDTH),
      mfsdp_param_2d("layer.1", 1, MFSDP_ROLE_MATRIX, WIDTH, WIDTH)};
  const mfsdp_backend *b = rank->backend;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  size_t nbytes = 0;
  int u;
  desc.params = params;
  desc.param_count = LAYERS;
  desc.world = RANKS;
  MFSDP_TRY(mfsdp_plan_create(&rank->context, &desc, &s->plan));
  MFSDP_TRY(b->ops->queue_create(b->self, &rank->context, "main", &s->queue));
  for (u = 0; u < LAYERS; ++u) {
    MFSDP_TRY(create_unit(rank, s, u));
    nbytes += mfsdp_coll_workspace_nbytes(s->reduce[u]); /* the largest would do */
  }
  MFSDP_TRY(mfsdp_buffer_alloc(&rank->context, b, nbytes, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_WORKSPACE, &s->workspace));
  return create_optimizer(rank, s, muon);
}

static void destroy(mfsdp_threads_rank *rank, state *s) {
  int u;
  mfsdp_optimizer_destroy(&rank->context, s->optimizer);
  mfsdp_buffer_free(&rank->context, rank->backend, &s->workspace);
  for (u = 0; u < LAYERS; ++u) {
    mfsdp_coll_destroy(&rank->context, s->reduce[u]);
    mfsdp_coll_destroy(&rank->context, s->gather[u]);
  }
  rank->backend->ops->queue_destroy(rank->backend->self, &rank->context, s->queue);
  mfsdp_plan_destroy(&rank->context, s->plan);
}

static mfsdp_status body(mfsdp_threads_rank *rank, void *user) {
  static state states[RANKS];
  const mfsdp_hyper_group muon = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  mfsdp_step_scalars scalars = mfsdp_step_scalars_default(muon.lr, muon.weight_decay);
  state *s = &states[rank->rank];
  int step, u;
  net n;
  (void)user;
  MFSDP_TRY(create(rank, s, &muon));
  scalars.grad_scale = 1.0 / RANKS;
  for (step = 0; step < STEPS; ++step, ++scalars.applied_steps) {
    net_load(&n, rank->rank, RANKS, step);
    for (u = 0; u < LAYERS; ++u) {
      MFSDP_TRY(mfsdp_gather(&rank->context, s->gather[u], s->queue, s->shard[u], s->full));
      net_forward(&n, u, s->full);
    }
    if (rank->rank == 0 && (step == 0 || step + 1 == STEPS))
      printf("loss of step %d on rank 0: %.4f\n", step + 1, n.loss);
    for (u = LAYERS; u-- > 0;) {
      MFSDP_TRY(mfsdp_gather(&rank->context, s->gather[u], s->queue, s->shard[u], s->full));
      memset(s->grad, 0, sizeof(s->grad));
      net_backward(&n, u, s->full, s->grad);
      MFSDP_TRY(mfsdp_reduce(&rank->context, s->reduce[u], s->queue, s->grad, s->sum[u], 1,
                             s->workspace.data));
    }
    scalars.lr = muon.lr * (STEPS - step) / STEPS; /* linear, as in loop.c */
    MFSDP_TRY(mfsdp_optimizer_step(&rank->context, s->optimizer, s->queue, &scalars, NULL));
  }
  destroy(rank, s);
  return MFSDP_OK;
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_run_desc desc = mfsdp_threads_run_desc_default();
  mfsdp_context context;
  desc.threads.world = RANKS;
  if (mfsdp_context_init(&context, &context_desc) == MFSDP_OK &&
      mfsdp_threads_run(&context, &desc, body, NULL) == MFSDP_OK)
    return 0;
  fprintf(stderr, "loop_by_hand: %s\n", mfsdp_context_error(&context)->message);
  return 1;
}
