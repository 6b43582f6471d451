/* SPDX-License-Identifier: MIT */
#include "platform.h"

#include "rank.h"

#include "mfsdp/posix/launch.h"

#include <stdio.h>

/* ---- the host ---- */

static const char *host_math_name(const gpt_job *job) {
  return job->math->name;
}

static mfsdp_status host_create(gpt_rank *rank) {
  const gpt_job *job = rank->job;
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  desc.math = job->math;
  desc.lapack = job->lapack;
  desc.math_threads = (int32_t)job->options.threads_per_rank;
  if (gpt_options_overlap(&job->options)) desc.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  MFSDP_TRY(mfsdp_host_backend_create(&rank->context, &desc, &rank->host));
  rank->backend = mfsdp_host_backend_get(rank->host);
  rank->host_ops.sgemm = job->math->sgemm;
  rank->device = gpt_host_device(&rank->host_ops);
  return MFSDP_OK;
}

static mfsdp_status host_destroy(gpt_rank *rank) {
  return mfsdp_host_backend_destroy(&rank->context, rank->host);
}

const gpt_platform *gpt_platform_host(void) {
  static const gpt_platform platform = {host_math_name, host_create, host_destroy};
  return &platform;
}

/* ---- ranks that are threads ---- */

/* Processes that a launcher started, but that do not know of each other, would each train alone. */
static int check_alone(const gpt_job *job, mfsdp_context *context, const char *instead,
                       gpt_error *error) {
  mfsdp_launch launch;
  if (mfsdp_launch_read(context, job->launch_get, job->launch_user, &launch) != MFSDP_OK)
    return gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  if (launch.world <= 1) return GPT_OK;
  return gpt_fail(error,
                  "%s started %d processes, and with --transport threads each would train alone; "
                  "use --transport %s",
                  launch.launcher, (int)launch.world, instead);
}

int gpt_links_threads_open(gpt_job *job, mfsdp_context *context, const char *instead,
                           gpt_error *error) {
  const mfsdp_threads_world_desc desc = gpt_job_world_desc(job);
  if (check_alone(job, context, instead, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (mfsdp_threads_world_create(context, &desc, &job->world) == MFSDP_OK) return GPT_OK;
  (void)gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  return 1;
}

static int threads_open(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  return gpt_links_threads_open(job, context, "mpi", error);
}

static void threads_close(gpt_job *job, mfsdp_context *context, int status) {
  (void)status;
  if (job->world != NULL) (void)mfsdp_threads_world_destroy(context, job->world);
}

static void threads_poison(const gpt_job *job, const mfsdp_error *why) {
  mfsdp_threads_world_poison(job->world, why);
}

mfsdp_status gpt_links_threads_meet(gpt_rank *rank) {
  return mfsdp_threads_control_create(&rank->context, rank->job->world, rank->index,
                                      &rank->control);
}

static mfsdp_status threads_create(gpt_rank *rank) {
  return mfsdp_threads_transport_create(&rank->context, rank->job->world, rank->index,
                                        rank->backend, &rank->transport);
}

const gpt_links *gpt_links_threads(void) {
  static const gpt_links links = {threads_open, threads_close, threads_poison,
                                  gpt_links_threads_meet, threads_create};
  return &links;
}

/* ---- ranks that are the processes of an mpirun ---- */

/* That MPI is this launcher's. */
static int check_launch(const gpt_job *job, mfsdp_context *context, gpt_error *error) {
  mfsdp_launch launch;
  if (mfsdp_launch_read(context, job->launch_get, job->launch_user, &launch) != MFSDP_OK)
    return gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  if (strcmp(launch.launcher, "none") == 0) return GPT_OK;
  if (launch.world == gpt_mpi_size(job->mpi) && launch.rank == gpt_mpi_rank(job->mpi))
    return GPT_OK;
  return gpt_fail(error,
                  "the variables of %s say rank %d of %d, MPI says rank %d of %d: was MPI made for "
                  "this launcher?",
                  launch.launcher, (int)launch.rank, (int)launch.world, (int)gpt_mpi_rank(job->mpi),
                  (int)gpt_mpi_size(job->mpi));
}

static int mpi_open(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  gpt_options *o = &job->options;
  const char *reason;
  if (gpt_mpi_start(o->deadline * 1000000, gpt_options_overlap(o) ? GPT_BATCH_COUNT : 4, &job->mpi,
                    error) != GPT_OK)
    return GPT_USAGE_ERROR;
  if (check_launch(job, context, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (o->given[GPT_OPTION_ranks] && o->ranks != gpt_mpi_size(job->mpi))
    return gpt_fail(error, "--ranks is %d and MPI started %d processes; leave --ranks out",
                    (int)o->ranks, (int)gpt_mpi_size(job->mpi));
  o->ranks = gpt_mpi_size(job->mpi);
  job->processes = 1;
  job->process_rank = gpt_mpi_rank(job->mpi);
  reason = gpt_mpi_no_threads(job->mpi);
  if (reason == NULL || !gpt_options_overlap(o)) return GPT_OK;
  if (job->process_rank == 0)
    fprintf(stderr, "train_gpt: %s off: %s\n",
            o->prefetch == 0           ? "step-in-backward is"
            : o->step_in_backward == 0 ? "prefetch is"
                                       : "prefetch and step-in-backward are",
            reason);
  o->prefetch = 0;
  o->step_in_backward = 0;
  return GPT_OK;
}

static void mpi_close(gpt_job *job, mfsdp_context *context, int status) {
  (void)context;
  gpt_mpi_stop(job->mpi, status);
}

static void mpi_poison(const gpt_job *job, const mfsdp_error *why) {
  gpt_mpi_poison(job->mpi, why);
}

static mfsdp_status mpi_meet(gpt_rank *rank) {
  return gpt_mpi_control(rank->job->mpi, &rank->context, &rank->control);
}

static mfsdp_status mpi_create(gpt_rank *rank) {
  return gpt_mpi_transport(rank->job->mpi, &rank->context, rank->backend, &rank->transport);
}

const gpt_links *gpt_links_mpi(void) {
  static const gpt_links links = {mpi_open, mpi_close, mpi_poison, mpi_meet, mpi_create};
  return &links;
}
