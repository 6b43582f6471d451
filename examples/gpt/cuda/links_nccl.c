/* SPDX-License-Identifier: MIT */
/* gpt_links_nccl: a process with a GPU for each rank. */
#include "platform_cuda.h"

#include "../rank.h"

#include "mfsdp/cuda/bootstrap.h"
#include "mfsdp/cuda/transport_nccl.h"
#include "mfsdp/posix/control_tcp.h"

#include <stdlib.h>

/* Of this process, which is one rank. */
typedef struct nccl_process {
  mfsdp_launch launch;
  ncclComm_t comm;            /* NULL: none, or aborted */
  int32_t aborted;            /* by the transport */
  mfsdp_transport *transport; /* the rank's, while there is one */
  int32_t *node_of_rank;      /* which ranks share a host */
} nccl_process;

static int64_t deadline_us(const gpt_job *job) {
  return job->options.deadline * INT64_C(1000000);
}

static int nccl_open(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  nccl_process *own = (nccl_process *)calloc(1, sizeof(*own));
  gpt_options *o = &job->options;
  job->cuda = own;
  if (own == NULL) {
    (void)gpt_fail(error, "out of memory for NCCL");
    return 1;
  }
  if (mfsdp_launch_read(context, job->launch_get, job->launch_user, &own->launch) != MFSDP_OK)
    return gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  if (o->given[GPT_OPTION_ranks] && o->ranks != own->launch.world)
    return gpt_fail(error,
                    "--ranks is %d, and of launcher %s there are %d processes; leave --ranks out, "
                    "or use torchrun, srun or mpirun (examples/launch)",
                    (int)o->ranks, own->launch.launcher, (int)own->launch.world);
  own->node_of_rank = (int32_t *)calloc((size_t)own->launch.world, sizeof(*own->node_of_rank));
  if (own->node_of_rank == NULL) {
    (void)gpt_fail(error, "out of memory for NCCL");
    return 1;
  }
  o->ranks = own->launch.world;
  job->processes = 1;
  job->process_rank = own->launch.rank;
  return GPT_OK;
}

/* All ranks come here after a run that went well; others may be gone. */
static void nccl_close(gpt_job *job, mfsdp_context *context, int status) {
  nccl_process *own = (nccl_process *)job->cuda;
  const int64_t give_up_us = mfsdp_clock_us() + deadline_us(job);
  ncclResult_t state = ncclInternalError;
  (void)context;
  if (own == NULL) return;
  if (own->comm != NULL && !own->aborted) {
    if (status == GPT_OK) state = ncclCommFinalize(own->comm);
    while (state == ncclInProgress && mfsdp_clock_us() < give_up_us) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
      if (ncclCommGetAsyncError(own->comm, &state) != ncclSuccess) state = ncclInternalError;
    }
    (void)(state == ncclSuccess ? ncclCommDestroy(own->comm) : ncclCommAbort(own->comm));
  }
  free(own->node_of_rank);
  free(own);
  job->cuda = NULL;
}

static void nccl_poison(const gpt_job *job, const mfsdp_error *why) {
  const nccl_process *own = (const nccl_process *)job->cuda;
  if (own->transport == NULL || own->transport->self == NULL) return;
  own->transport->ops->poison(own->transport->self, why);
}

static mfsdp_status nccl_meet(gpt_rank *rank) {
  const gpt_job *job = rank->job;
  nccl_process *own = (nccl_process *)job->cuda;
  mfsdp_nccl_bootstrap_desc boot = mfsdp_nccl_bootstrap_desc_default();
  mfsdp_tcp_control_desc tcp;
  MFSDP_TRY(mfsdp_tcp_control_desc_launch(&rank->context, &own->launch, job->launch_get,
                                          job->launch_user, &tcp));
  tcp.deadline_us = deadline_us(job);
  MFSDP_TRY(mfsdp_tcp_control_create(&rank->context, &tcp, &rank->control));
  boot.local_rank = own->launch.local_rank;
  boot.deadline_us = deadline_us(job);
  boot.node_of_rank = own->node_of_rank;
  return mfsdp_nccl_bootstrap(&rank->context, &rank->control, &boot, &rank->gpu, &own->comm);
}

static mfsdp_status nccl_create(gpt_rank *rank) {
  nccl_process *own = (nccl_process *)rank->job->cuda;
  mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
  desc.rank = rank->index;
  desc.world = (int32_t)rank->job->options.ranks;
  desc.nonblocking = desc.may_abort = 1;
  desc.deadline_us = deadline_us(rank->job);
  desc.aborted = &own->aborted;
  desc.control = &rank->control;
  desc.node_of_rank = own->node_of_rank;
  own->transport = &rank->transport;
  return mfsdp_nccl_transport_wrap(&rank->context, gpt_rank_cuda_backend(rank), own->comm, &desc,
                                   &rank->transport);
}

const gpt_links *gpt_links_nccl(void) {
  static const gpt_links links = {nccl_open, nccl_close, nccl_poison, nccl_meet, nccl_create};
  return &links;
}
