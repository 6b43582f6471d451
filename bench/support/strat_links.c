/* SPDX-License-Identifier: MIT */
#include "strat_links.h"

#include "gpt_job.h"

#if MFSDP_EXAMPLE_MPI
#include "mfsdp/mpi/transport_mpi.h"
#endif

#include <stdlib.h>

enum { MOST_RANKS = 1024, DEADLINE_S = 600 };

/* Of the worlds; made by the first call, on the main thread. */
static mfsdp_context *world_context(void) {
  static mfsdp_context context;
  static int ready;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  if (!ready && mfsdp_context_init(&context, &desc) != MFSDP_OK) exit(1);
  ready = 1;
  return &context;
}

static void need_world(mfsdp_status status) {
  if (status == MFSDP_OK) return;
  fprintf(stderr, "bench strategies: %s\n", mfsdp_context_error(world_context())->message);
  exit(1);
}

/* ---- MPI ---- */

#if MFSDP_EXAMPLE_MPI

static mfsdp_mpi_world *mpi_world; /* of the runtime at hand: there is one at a time */
static int mpi_level;

int strat_mpi_start(int32_t *rank, int32_t *world) {
  int own = 0, count = 1;
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &mpi_level) != MPI_SUCCESS) {
    fprintf(stderr, "bench strategies: MPI did not start; run the program with mpirun\n");
    exit(1);
  }
  (void)MPI_Comm_rank(MPI_COMM_WORLD, &own);
  (void)MPI_Comm_size(MPI_COMM_WORLD, &count);
  *rank = own;
  *world = count;
  return 0;
}

const char *strat_mpi_no_threads(void) {
  return mpi_level == MPI_THREAD_MULTIPLE ? NULL : "MPI gives less than MPI_THREAD_MULTIPLE";
}

void strat_mpi_stop(void) {
  (void)MPI_Finalize();
}

static mfsdp_status mpi_meet(gpt_rank *rank) {
  return mfsdp_mpi_control_create(&rank->context, mpi_world, &rank->control);
}

static mfsdp_status mpi_create(gpt_rank *rank) {
  return mfsdp_mpi_transport_create(&rank->context, mpi_world, rank->backend, &rank->transport);
}

static void mpi_poison(const gpt_job *job, const mfsdp_error *why) {
  (void)job;
  mfsdp_mpi_world_poison(mpi_world, why);
}

static void mpi_open(const gpt_job *job) {
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  desc.deadline_us = job->options.deadline * 1000000;
  desc.batch_count = GPT_BATCH_COUNT;
  need_world(mfsdp_mpi_world_wrap(world_context(), MPI_COMM_WORLD, &desc, &mpi_world));
}

static void mpi_close(void) {
  need_world(mfsdp_mpi_world_destroy(world_context(), mpi_world));
  mpi_world = NULL;
}

#else

int strat_mpi_start(int32_t *rank, int32_t *world) {
  *rank = 0;
  *world = 1;
  fprintf(stderr, "bench strategies: --transport mpi is not in this build (see make info)\n");
  return 2;
}

const char *strat_mpi_no_threads(void) {
  return NULL;
}

void strat_mpi_stop(void) {}

static mfsdp_status mpi_meet(gpt_rank *rank) {
  return MFSDP_FAIL(&rank->context, MFSDP_E_UNSUPPORTED, "MPI: not in this build");
}

static mfsdp_status mpi_create(gpt_rank *rank) {
  return MFSDP_FAIL(&rank->context, MFSDP_E_UNSUPPORTED, "MPI: not in this build");
}

static void mpi_poison(const gpt_job *job, const mfsdp_error *why) {
  (void)job;
  (void)why;
}

static void mpi_open(const gpt_job *job) {
  (void)job;
}

static void mpi_close(void) {}

#endif

/* ---- either ---- */

static double threads_bytes_per_us;
static int64_t threads_latency_us;

void strat_threads_links(double mbytes_per_s, int64_t latency_us) {
  threads_bytes_per_us = mbytes_per_s; /* the same number */
  threads_latency_us = latency_us;
}

int strat_threads_linked(void) {
  return threads_bytes_per_us > 0.0 || threads_latency_us > 0;
}

void strat_world_open(gpt_job *job) {
  static const gpt_links mpi_links = {NULL, NULL, mpi_poison, mpi_meet, mpi_create};
  mfsdp_threads_world_desc desc;
  job->options.deadline = DEADLINE_S;
  if (job->processes) {
    job->links = &mpi_links;
    mpi_open(job);
    return;
  }
  job->links = gpt_links_threads();
  desc = gpt_job_world_desc(job);
  desc.batch_count = GPT_BATCH_COUNT;
  desc.bytes_per_us = threads_bytes_per_us;
  desc.latency_us = threads_latency_us;
  need_world(mfsdp_threads_world_create(world_context(), &desc, &job->world));
}

void strat_world_close(gpt_job *job) {
  if (job->processes)
    mpi_close();
  else
    need_world(mfsdp_threads_world_destroy(world_context(), job->world));
  job->world = NULL;
}

static double fold(gpt_rank *rank, double own, int largest) {
  const mfsdp_control *control = &rank->control;
  double all[MOST_RANKS], result;
  bench_need(rank, control->ops->allgather(control->self, &rank->context, &own, sizeof(own), all,
                                           control->deadline_us));
  result = all[0];
  for (int32_t r = 1; r < control->world; ++r)
    result = !largest ? result + all[r] : all[r] > result ? all[r] : result;
  return result;
}

double strat_largest(gpt_rank *rank, double own) {
  return fold(rank, own, 1);
}

double strat_sum(gpt_rank *rank, double own) {
  return fold(rank, own, 0);
}
