/* SPDX-License-Identifier: MIT */
/*
 * rank.h - everything one data-parallel rank holds: its context, backend, transport, plan, runtime
 * and model. Set up once, used by the training loop, taken down in reverse order.
 */
#ifndef GPT_RANK_H
#define GPT_RANK_H

#include "matrixfsdp.h"
#include "mfsdp/checkpoint.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/host/transport_threads.h"
#include "mfsdp/posix/background_posix.h"
#include "mfsdp/posix/launch.h"

#include "data.h"
#include "model.h"
#include "mpi.h"
#include "ops_host.h"
#include "options.h"
#include "params.h"
#include "platform.h"
#include "strategy.h"
#include "trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What all ranks share; nobody writes to it while they run. */
typedef struct gpt_job {
  gpt_options options;
  gpt_config config;
  gpt_data data;
  gpt_param_table table;
  const gpt_platform *platform;
  const gpt_links *links;
  const mfsdp_host_math *math;     /* of the host platform: of the model and of the backend */
  const mfsdp_host_lapack *lapack; /* of the backend; NULL: none in this build */
  mfsdp_threads_world *world;      /* the links': of ranks that are threads */
  gpt_mpi *mpi;                    /* the links': of the processes of an mpirun */
  void *cuda;                      /* the links': of ranks on GPUs */
  mfsdp_launch_getter launch_get;  /* of the launcher's variables; NULL: the environment */
  void *launch_user;
  int32_t processes, process_rank; /* 1: ranks are processes, and this is one of them; 0: threads */
  gpt_trace *trace;                /* NULL: none */
} gpt_job;

/* What --dtype means for the table: the compute and the wire dtype of every parameter. */
void gpt_job_set_dtype(gpt_job *job);
/* What --strategy means for the table: the placement of every parameter. */
void gpt_job_set_strategy(gpt_job *job);
/* A world for the job: with --prefetch, transfers of several units are queued at a time. */
mfsdp_threads_world_desc gpt_job_world_desc(const gpt_job *job);

/* Batches that may be queued at a time beside the computation; a full ring of them would hold the caller
 * up. A reduction by DIRECT or RING is one for each chunk, and W - 2 more: the library's own chunks, 32
 * to 256 KiB, cut a block's gradients of the models here into up to 250. */
#define GPT_BATCH_COUNT 256

/* Validation batches: a fixed number, so that the loss does not depend on the number of ranks. */
#define GPT_VALIDATION_BATCHES 16

/* Time spent in a phase so far. */
typedef struct gpt_phase {
  int64_t started_us, us;
} gpt_phase;

typedef struct gpt_rank {
  const gpt_job *job;
  int32_t index;
  mfsdp_context context;
  const mfsdp_backend *backend;
  mfsdp_queue *queue;       /* that the model computes on; NULL: on the rank's thread */
  gpt_device device;        /* of the model */
  int32_t gpu;              /* number of the rank's GPU on its host, where it computes on one */
  mfsdp_host_backend *host; /* the platform's */
  gpt_host host_ops;
  void *cuda;
  mfsdp_transport transport;
  mfsdp_control control;
  mfsdp_plan *plan;
  mfsdp_runtime *runtime;
  gpt_model model;
  const float **params; /* of the unit at hand */
  float **grads;
  float *widened; /* on the device, with a 16-bit dtype: parameters of the unit at hand in fp32 */
  char (*labels)[24]; /* of traces: "forward unit 3" of all units, then "backward unit 3" */
  double *losses;     /* ranks x validation rounds: every rank's validation losses */
  gpt_phase optimizer, refresh; /* from the trace callback */
  mfsdp_io io;
  mfsdp_posix_background save_thread; /* with --async-save */
  mfsdp_background background;
  mfsdp_checkpoint *checkpoint;    /* NULL: no --checkpoint */
  int64_t start_step, start_block; /* 0 unless resumed */
  int32_t has_model;
} gpt_rank;

/* Makes everything of rank `index`, with initial parameters. Collective. On failure the context
 * holds the message; call gpt_rank_destroy in any case, from the same thread. */
mfsdp_status gpt_rank_create(gpt_rank *rank, const gpt_job *job, int32_t index);
mfsdp_status gpt_rank_destroy(gpt_rank *rank);
/* The same in parts and without the model, for loads that are no GPT (gradients made up): context,
 * links and plan; what the runtime will hold, before anything is; the runtime with initial
 * values. */
mfsdp_status gpt_rank_open(gpt_rank *rank, const gpt_job *job, int32_t index);
mfsdp_status gpt_rank_memory(gpt_rank *rank, mfsdp_memory *memory);
mfsdp_status gpt_rank_start(gpt_rank *rank, mfsdp_init_fn init, void *user);

/* Forward of one unit with gathered parameters; `use` is MFSDP_USE_FORWARD or MFSDP_USE_EVALUATE.
 * Where the rank has a queue, this and the backward are ENQUEUED. */
mfsdp_status gpt_rank_forward(gpt_rank *rank, int32_t unit, mfsdp_use use);
/* Backward of one unit, its gradients reduced to their owners. */
mfsdp_status gpt_rank_backward(gpt_rank *rank, int32_t unit);

/* Between forward and backward: multiplies the gradient of the loss with the loss scale. */
void gpt_rank_scale_loss(gpt_rank *rank);

/* The loss of the last forward of all units; waits for it. */
mfsdp_status gpt_rank_loss(gpt_rank *rank, double *loss);

/* One step: micro-batches forward and backward, then the update. *stop, read atomically behind the
 * gradients, is not 0: this is to be the last step, on all ranks. Collective. */
mfsdp_status gpt_rank_step(gpt_rank *rank, int64_t step, const int *stop, mfsdp_verdict *verdict);

/* Mean loss over the validation batches, shared out over the ranks; the same value on all.
 * Collective. */
mfsdp_status gpt_rank_validate(gpt_rank *rank, double *loss);
/* Hash over the masters in declared order: name, shape, fp32 bytes. Collective; the value is rank
 * 0's. */
mfsdp_status gpt_rank_params_hash(gpt_rank *rank, uint64_t *hash);

/* Optimizer of a hyperparameter group (GPT_GROUP_*) under these options. */
mfsdp_hyper_group gpt_hyper_group(const gpt_options *options, int32_t group);
/* The schedule of these options: by default warm-up over a twentieth of the steps, at least ten,
 * then linear decay to a tenth. */
mfsdp_schedule gpt_schedule(const gpt_options *options);
/* A plan of the model for `ranks`, by the planner that the options name. */
mfsdp_status gpt_plan_create(mfsdp_context *context, const gpt_job *job, mfsdp_plan **plan);

#ifdef __cplusplus
}
#endif

#endif /* GPT_RANK_H */
