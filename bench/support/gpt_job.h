/* SPDX-License-Identifier: MIT */
/*
 * gpt_job.h - the example's GPT as a load for benchmarks: a job with made-up text, and the same
 * model trained without the runtime.
 *
 * A benchmark of a failed run has nothing to say: functions here print and exit.
 */
#ifndef MFSDP_BENCH_GPT_JOB_H
#define MFSDP_BENCH_GPT_JOB_H

#include "gpt/rank.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bench_shape {
  const char *name;
  int64_t dim, layers, context, batch;
} bench_shape;

void bench_need(const gpt_rank *rank, mfsdp_status status);

/* Muon, scope-greedy, one BLAS thread, no clipping; everything but the world. */
void bench_job_create(gpt_job *job, const bench_shape *shape, int32_t ranks);
void bench_job_destroy(gpt_job *job);

/* Full parameters, gradients and optimizer state of one rank: what plain data parallel keeps.
 * Layouts are those of a plan for one rank. */
typedef struct bench_replica {
  mfsdp_plan *plan;
  float *params, *grads, *reduced; /* `reduced` is what the optimizer reads */
  int64_t param_count, grad_count;
  int64_t *unit_first, *grad_unit_first;
  mfsdp_optimizer *optimizer;
  mfsdp_queue *queue;
  mfsdp_step_scalars scalars[GPT_GROUP_COUNT];
} bench_replica;

/* With the rank's initial parameters. in_place: `reduced` is `grads`, for a world of one. */
void bench_replica_create(gpt_rank *rank, bench_replica *replica, int in_place);
void bench_replica_destroy(gpt_rank *rank, bench_replica *replica);
/* rank->params and rank->grads of a unit. */
void bench_replica_point(gpt_rank *rank, const bench_replica *replica, int32_t unit);
/* Forward and backward of what is in rank->model.inputs; gradients are cleared in between. */
void bench_replica_gradients(gpt_rank *rank, bench_replica *replica);
/* The update from `reduced`, scaled by 1 / ranks. */
void bench_replica_update(gpt_rank *rank, bench_replica *replica);
/* Elements in which the runtime's parameters differ; counted on rank 0. Collective. */
int64_t bench_replica_wrong(gpt_rank *rank, const bench_replica *replica);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_GPT_JOB_H */
