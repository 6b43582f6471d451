/* SPDX-License-Identifier: MIT */
/* reshard.c - a checkpoint goes from 8 ranks to 3: eight save what they own, three load what they
 * own. No rank ever holds the whole model, and nothing is converted in between.
 *
 *   build/examples/reshard FOLDER                    (FOLDER/step-0 stays there)
 *
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno \
 *           -ffp-contract=off -I. examples/reshard.c -lpthread -lm */
#include "mfsdp/checkpoint.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/host/transport_threads.h"
#include "mfsdp/posix/io_posix.h"

#define PARAMS 4
#define VALUE(param, i) ((float)((param)*INT64_C(1000000) + (i)))
#define MOST_RANKS 8

typedef struct rank {
  mfsdp_threads_world *world;
  const char *folder;
  int32_t index, ranks; /* 8 save, 3 load */
  int64_t read_nbytes;  /* out */
  mfsdp_status status;
  mfsdp_thread thread;
} rank;

/* Three matrices for Muon, an embedding for AdamW. */
static mfsdp_status plan_create(mfsdp_context *context, int32_t ranks, mfsdp_plan **out) {
  static const char *const names[PARAMS] = {"up.weight", "down.weight", "gate.weight", "embedding"};
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_param params[PARAMS];
  int32_t i;
  for (i = 0; i < PARAMS; ++i) {
    params[i] = mfsdp_param_default();
    params[i].name = names[i];
    params[i].ndim = 2;
    params[i].unit = params[i].hyper_group = i == PARAMS - 1;
    params[i].role = i < PARAMS - 1 ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
    params[i].shape[0] = i < PARAMS - 1 ? 128 : 5000;
    params[i].shape[1] = 96;
  }
  desc.params = params;
  desc.param_count = PARAMS;
  desc.world = ranks; /* all that is different */
  return mfsdp_plan_create(context, &desc, out);
}

/* Stands for training: a value that tells elements apart; zeros where they will be loaded. */
static void value(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  int64_t i;
  for (i = 0; i < count; ++i)
    dst[i] = ((const rank *)user)->ranks == MOST_RANKS ? VALUE(param, first + i) : 0.0f;
}

/* 1 if everything that this rank owns has the value of its place in the whole tensor. */
static int is_right(const mfsdp_runtime *runtime) {
  mfsdp_owned owned = mfsdp_owned_default();
  int64_t i;
  while (mfsdp_owned_next(runtime, &owned))
    for (i = 0; i < owned.count; ++i)
      if (((const float *)owned.data)[i] != VALUE(owned.param, owned.first + i)) return 0;
  return 1;
}

/* The part that a user writes. */
static mfsdp_status use_checkpoint(mfsdp_context *context, mfsdp_runtime *runtime, rank *self) {
  const mfsdp_checkpoint_load_desc strictly = mfsdp_checkpoint_load_desc_default();
  mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
  mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
  const mfsdp_io io = mfsdp_io_posix();
  mfsdp_checkpoint *ck = NULL;
  desc.io = &io;
  desc.folder = self->folder;
  MFSDP_TRY(mfsdp_runtime_init(runtime, value, self));
  MFSDP_TRY(mfsdp_checkpoint_create(runtime, &desc, &ck));
  if (self->ranks == MOST_RANKS)
    MFSDP_TRY(mfsdp_checkpoint_save(ck, NULL, 0));
  else
    MFSDP_TRY(mfsdp_checkpoint_load(ck, &strictly, &loaded));
  mfsdp_checkpoint_destroy(ck);
  self->read_nbytes = loaded.data_nbytes;
  return is_right(runtime) ? MFSDP_OK : MFSDP_FAIL(context, MFSDP_E_MISMATCH, "other values");
}

static mfsdp_status run(mfsdp_context *context, rank *self) {
  const mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
  mfsdp_hyper_group hyper[2] = {mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN),
                                mfsdp_hyper_group_adamw(3e-3, 0.01)};
  mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
  mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
  mfsdp_group group = mfsdp_group_default();
  mfsdp_host_backend *host = NULL;
  mfsdp_runtime *runtime = NULL;
  mfsdp_plan *plan = NULL;
  mfsdp_transport links;
  mfsdp_control control;
  MFSDP_TRY(plan_create(context, self->ranks, &plan));
  MFSDP_TRY(mfsdp_host_backend_create(context, &host_desc, &host));
  desc.backend = mfsdp_host_backend_get(host);
  MFSDP_TRY(
      mfsdp_threads_transport_create(context, self->world, self->index, desc.backend, &links));
  MFSDP_TRY(mfsdp_threads_control_create(context, self->world, self->index, &control));
  optimizer.groups = hyper;
  optimizer.group_count = 2;
  group.plan = plan;
  group.transport = &links;
  group.control = &control;
  desc.groups = &group;
  desc.group_count = 1;
  desc.optimizer = &optimizer;
  MFSDP_TRY(mfsdp_runtime_create(context, &desc, &runtime));
  MFSDP_TRY(use_checkpoint(context, runtime, self));
  return mfsdp_runtime_destroy(runtime); /* the rest goes with the process */
}

static void rank_main(void *argument) {
  rank *self = (rank *)argument;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_context context;
  self->status = mfsdp_context_init(&context, &desc);
  if (self->status == MFSDP_OK) self->status = run(&context, self);
  if (self->status != MFSDP_OK) fprintf(stderr, "%s\n", mfsdp_context_error(&context)->message);
}

int main(int argc, char **argv) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  rank ranks[MOST_RANKS];
  mfsdp_context context;
  int failed = argc != 2 || mfsdp_context_init(&context, &context_desc) != MFSDP_OK, i;
  if (argc != 2) fprintf(stderr, "usage: reshard FOLDER\n");
  for (desc.world = MOST_RANKS; !failed && desc.world >= 3; desc.world -= 5) {
    mfsdp_threads_world *world = NULL;
    if (mfsdp_threads_world_create(&context, &desc, &world) != MFSDP_OK) return 1;
    for (i = 0; i < desc.world; ++i) {
      const rank start = {.world = world, .folder = argv[1], .index = i, .ranks = desc.world};
      ranks[i] = start;
      if (mfsdp_thread_start(&ranks[i].thread, rank_main, &ranks[i]) != MFSDP_OK) return 1;
    }
    for (i = 0; i < desc.world; ++i) {
      mfsdp_thread_join(&ranks[i].thread);
      failed |= ranks[i].status != MFSDP_OK;
      printf("rank %d of %d read %lld bytes\n", i, (int)desc.world,
             (long long)ranks[i].read_nbytes);
    }
  }
  return failed;
}
