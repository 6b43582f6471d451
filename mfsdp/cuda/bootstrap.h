/* SPDX-License-Identifier: MIT */
/*
 * bootstrap.h - from a control plane to an NCCL communicator: a GPU for each rank, NCCL's unique id
 * from rank 0, and a communicator that does not block.
 *
 *   mfsdp_nccl_bootstrap_desc desc = mfsdp_nccl_bootstrap_desc_default();
 *   int32_t device;
 *   ncclComm_t comm;
 *   desc.local_rank = launch.local_rank;                             // launch.h; -1: not known
 *   MFSDP_TRY(mfsdp_nccl_bootstrap(&context, &control, &desc, &device, &comm));   // collective
 *   ... backend_cuda.h on `device`, transport_nccl.h with nonblocking = 1 ...
 *   ncclCommDestroy(comm);                                           // unless it was aborted
 *
 * The control plane is the caller's, and the unique id travels over it: control_tcp.h's (torchrun,
 * SLURM), mpi/control_mpi.h's over a communicator of your MPI program, that of threads, or a table
 * around an all-gather of your own. With MPI:
 *
 *   mfsdp_mpi_world_desc mpi = mfsdp_mpi_world_desc_default();
 *   MFSDP_TRY(mfsdp_mpi_world_wrap(&context, comm, &mpi, &world));               // collective
 *   MFSDP_TRY(mfsdp_mpi_control_create(&context, world, &control));
 *
 * What the ranks do not agree about is an error on all of them, at the same call:
 *
 *   E_ARGUMENT   a device that its host does not have; several ranks on a host of several devices,
 *                one of which does not know its number there (LOCAL_RANK); two ranks on one device
 *   E_MISMATCH   different versions of NCCL
 *   E_TIMEOUT    NCCL did not connect the ranks in time: the control plane names who is missing; if
 *                all are there, NCCL's own network is at fault
 *   E_PEER       another rank failed; what its own rank says is the reason
 *   E_BACKEND    what CUDA or NCCL says
 *
 * Devices are compared by host and PCI address, so that CUDA_VISIBLE_DEVICES does not hide two
 * ranks on one of them. A rank that sees one device takes it, whatever its number on the host.
 * Version, plan and options of this library are compared by mfsdp_runtime_create, over the same
 * control plane.
 *
 * STATUS: compiled and linked against NCCL; run by the test suite on the host double, and between
 * MPI processes with a stand-in for NCCL that connects them and moves nothing; not yet run on
 * hardware.
 * Does not: keep the communicator (it is yours), choose NCCL's network (NCCL_SOCKET_IFNAME), or
 * split (transport_nccl.h).
 * Link: as backend_cuda.h, and -lnccl. NCCL 2.19.3 or later. POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_CUDA_BOOTSTRAP_H
#define MFSDP_CUDA_BOOTSTRAP_H

#include "../transport.h"
#include "cuda_state.h"

#include <fcntl.h>
#include <nccl.h>
#include <unistd.h>

#if !defined(NCCL_VERSION_CODE) || NCCL_VERSION_CODE < 21903
#error "matrixfsdp: bootstrap.h needs NCCL 2.19.3 or later"
#endif

typedef struct mfsdp_nccl_bootstrap_desc {
  size_t struct_nbytes;
  int32_t device;             /* -1: number local_rank of this host's, or the only one */
  int32_t local_rank;         /* this rank's number on its host; -1: not known */
  int64_t deadline_us;        /* of NCCL's own set-up; positive */
  const ncclConfig_t *config; /* NULL: NCCL's defaults; its `blocking` is not looked at */
  int32_t *node_of_rank;      /* world entries, out: equal for the ranks of a host, as
                               * transport_nccl.h takes them; NULL: not wanted */
} mfsdp_nccl_bootstrap_desc;

/* Device by number on the host, which is not known; two minutes; NCCL's defaults. */
MFSDP_API mfsdp_nccl_bootstrap_desc mfsdp_nccl_bootstrap_desc_default(void) {
  mfsdp_nccl_bootstrap_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.device = desc.local_rank = -1;
  desc.deadline_us = 120000000;
  return desc;
}

/* What the ranks tell each other of themselves. */
typedef struct mfsdp__boot_place {
  uint64_t host;
  int32_t status; /* of the rank's own part */
  int32_t device, device_count;
  int32_t guessed; /* nobody said which device */
  int32_t nccl_version;
  char host_name[36];
  char bus[24]; /* PCI address */
} mfsdp__boot_place;

typedef struct mfsdp__boot_ticket {
  int32_t status;
  ncclUniqueId id; /* rank 0's */
} mfsdp__boot_ticket;

/* ---- where this rank is ---- */

/* Tells hosts apart: by when the kernel started, which containers of one host share, or by name. */
MFSDP_API uint64_t mfsdp__boot_host(const char *host_name) {
  char text[64];
  const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  const ssize_t count = fd < 0 ? 0 : read(fd, text, sizeof(text));
  if (fd >= 0) (void)close(fd);
  if (count > 0) return mfsdp_hash_bytes(MFSDP_HASH_SEED, text, (size_t)count);
  return mfsdp_hash_bytes(MFSDP_HASH_SEED, host_name, strlen(host_name));
}

/* The device, or an error that the other ranks then hear of. */
MFSDP_API mfsdp_status mfsdp__boot_find_device(mfsdp_context *context,
                                               const mfsdp_nccl_bootstrap_desc *desc, int32_t rank,
                                               mfsdp__boot_place *place) {
  int count = 0;
  MFSDP_TRY(mfsdp__cuda_check(context, cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  place->device_count = (int32_t)count;
  if (desc->device >= 0)
    place->device = desc->device;
  else if (count == 1 || desc->local_rank < 0)
    place->device = 0;
  else
    place->device = desc->local_rank;
  place->guessed = desc->device < 0 && desc->local_rank < 0;
  if (place->device >= place->device_count)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "nccl bootstrap: rank %d wants device %d (%s %d), its host %s has %d device%s; "
        "start fewer ranks there, or name the device",
        (int)rank, (int)place->device, desc->device >= 0 ? "device" : "local_rank",
        (int)place->device, place->host_name, count, count == 1 ? "" : "s");
  return mfsdp__cuda_check(
      context, cudaDeviceGetPCIBusId(place->bus, (int)sizeof(place->bus), (int)place->device),
      "cudaDeviceGetPCIBusId");
}

MFSDP_API mfsdp_status mfsdp__boot_describe(mfsdp_context *context,
                                            const mfsdp_nccl_bootstrap_desc *desc, int32_t rank,
                                            mfsdp__boot_place *place) {
  int version = 0;
  memset(place, 0, sizeof(*place));
  if (gethostname(place->host_name, sizeof(place->host_name) - 1) != 0)
    memcpy(place->host_name, "(unnamed)", sizeof("(unnamed)"));
  place->host = mfsdp__boot_host(place->host_name);
  (void)ncclGetVersion(&version);
  place->nccl_version = (int32_t)version;
  place->status = (int32_t)mfsdp__boot_find_device(context, desc, rank, place);
  return (mfsdp_status)place->status;
}

/* ---- what all ranks conclude from the same table ---- */

/* `statuses`: one for each rank, `stride` bytes apart. This rank's own error is in the context. */
MFSDP_API mfsdp_status mfsdp__boot_all_well(mfsdp_context *context, const mfsdp_control *control,
                                            const void *statuses, size_t stride, const char *what) {
  int32_t r, status;
  memcpy(&status, (const char *)statuses + (size_t)control->rank * stride, sizeof(status));
  if (status != (int32_t)MFSDP_OK) return (mfsdp_status)status;
  for (r = 0; r < control->world; ++r) {
    memcpy(&status, (const char *)statuses + (size_t)r * stride, sizeof(status));
    if (status != (int32_t)MFSDP_OK)
      return MFSDP_FAIL_PEER(context, MFSDP_E_PEER, r,
                             "nccl bootstrap: rank %d could not %s (%s); see its own message",
                             (int)r, what, mfsdp_status_name((mfsdp_status)status));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__boot_compare_pair(mfsdp_context *context,
                                                const mfsdp__boot_place *places, int32_t a,
                                                int32_t b) {
  const mfsdp__boot_place *p = &places[a], *q = &places[b];
  if (p->host != q->host) return MFSDP_OK;
  if ((p->guessed && p->device_count > 1) || (q->guessed && q->device_count > 1))
    return MFSDP_FAIL_PEER(
        context, MFSDP_E_ARGUMENT, b,
        "nccl bootstrap: ranks %d and %d are on host %s, and rank %d does not know "
        "its number there: both could take one device; set LOCAL_RANK, or name the "
        "device",
        (int)a, (int)b, p->host_name, p->guessed ? (int)a : (int)b);
  if (strcmp(p->bus, q->bus) != 0) return MFSDP_OK;
  return MFSDP_FAIL_PEER(
      context, MFSDP_E_ARGUMENT, b,
      "nccl bootstrap: ranks %d and %d are both on the device at %s of host %s "
      "(number %d for one, %d for the other), and NCCL takes one rank for each; set "
      "LOCAL_RANK or CUDA_VISIBLE_DEVICES, or start fewer ranks there",
      (int)a, (int)b, p->bus, p->host_name, (int)p->device, (int)q->device);
}

MFSDP_API mfsdp_status mfsdp__boot_compare(mfsdp_context *context, const mfsdp_control *control,
                                           const mfsdp__boot_place *places) {
  int32_t a, b;
  MFSDP_TRY(mfsdp__boot_all_well(context, control, &places[0].status, sizeof(*places),
                                 "choose a device"));
  for (b = 1; b < control->world; ++b)
    if (places[b].nccl_version != places[0].nccl_version)
      return MFSDP_FAIL_PEER(
          context, MFSDP_E_MISMATCH, b,
          "nccl bootstrap: rank %d has NCCL %d, rank 0 has %d; one version on all "
          "ranks is needed",
          (int)b, (int)places[b].nccl_version, (int)places[0].nccl_version);
  for (b = 1; b < control->world; ++b)
    for (a = 0; a < b; ++a)
      MFSDP_TRY(mfsdp__boot_compare_pair(context, places, a, b));
  return MFSDP_OK;
}

/* A host's number is that of its first rank. */
MFSDP_API void mfsdp__boot_nodes(const mfsdp__boot_place *places, int32_t world, int32_t *nodes) {
  int32_t a, b;
  for (b = 0; b < world; ++b) {
    for (a = 0; places[a].host != places[b].host;)
      ++a;
    nodes[b] = a;
  }
}

/* ---- the communicator ---- */

MFSDP_API mfsdp_status mfsdp__boot_fail(mfsdp_context *context, ncclResult_t result,
                                        const char *call) {
  const char *last = ncclGetLastError(NULL);
  return MFSDP_FAIL(context, MFSDP_E_BACKEND, "nccl bootstrap: %s: %s%s%.160s", call,
                    ncclGetErrorString(result), last != NULL && last[0] != '\0' ? ": " : "",
                    last != NULL ? last : "");
}

/* Begins to make it, and looks until it stands. *comm is not NULL if there is something to
 * abort. */
MFSDP_API mfsdp_status mfsdp__boot_connect(mfsdp_context *context, const mfsdp_control *control,
                                           const mfsdp_nccl_bootstrap_desc *desc,
                                           const ncclUniqueId *id, ncclComm_t *comm) {
  const int64_t start_us = mfsdp_clock_us();
  const int64_t deadline_us = mfsdp_clock_deadline_us(desc->deadline_us);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t state, result;
  int64_t pause_us = 50;
  if (desc->config != NULL) config = *desc->config;
  config.blocking = 0;
  state = ncclCommInitRankConfig(comm, control->world, *id, control->rank, &config);
  if (state != ncclSuccess && state != ncclInProgress)
    return mfsdp__boot_fail(context, state, "ncclCommInitRankConfig");
  for (;;) {
    result = ncclCommGetAsyncError(*comm, &state);
    if (result != ncclSuccess) return mfsdp__boot_fail(context, result, "ncclCommGetAsyncError");
    if (state == ncclSuccess) return MFSDP_OK;
    if (state != ncclInProgress)
      return mfsdp__boot_fail(context, state, "ncclCommInitRankConfig, later");
    if (mfsdp_clock_us() >= deadline_us)
      return MFSDP_FAIL(
          context, MFSDP_E_TIMEOUT,
          "nccl bootstrap: rank %d waited %lld ms for NCCL to connect %d ranks; if all "
          "of them are there, look at its network (NCCL_DEBUG=INFO, "
          "NCCL_SOCKET_IFNAME)",
          (int)control->rank, (long long)((mfsdp_clock_us() - start_us) / 1000),
          (int)control->world);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + pause_us);
    if (pause_us < 2000) pause_us *= 2;
  }
}

/* `status`: whether this rank can go on; one that cannot says so here. */
MFSDP_API mfsdp_status mfsdp__boot_share_id(mfsdp_context *context, const mfsdp_control *control,
                                            mfsdp_status status, mfsdp__boot_ticket *tickets,
                                            ncclUniqueId *id) {
  mfsdp__boot_ticket own;
  ncclResult_t result = ncclSuccess;
  memset(&own, 0, sizeof(own));
  own.status = (int32_t)status;
  if (control->rank == 0 && status == MFSDP_OK) result = ncclGetUniqueId(&own.id);
  if (result != ncclSuccess)
    own.status = (int32_t)mfsdp__boot_fail(context, result, "ncclGetUniqueId");
  MFSDP_TRY(control->ops->allgather(control->self, context, &own, sizeof(own), tickets,
                                    control->deadline_us));
  MFSDP_TRY(mfsdp__boot_all_well(context, control, &tickets[0].status, sizeof(*tickets),
                                 "use its device, or make NCCL's unique id"));
  *id = tickets[0].id;
  return MFSDP_OK;
}

/*
 * All or nobody: a rank that has failed tells the others, who may need all of their own deadline
 * first. What the control plane says of a rank that does not come is worth more than a time-out.
 */
MFSDP_API mfsdp_status mfsdp__boot_agree(mfsdp_context *context, const mfsdp_control *control,
                                         int64_t deadline_us, mfsdp_status status,
                                         int32_t *statuses) {
  const int32_t own = (int32_t)status;
  const mfsdp_error first = *mfsdp_context_error(context);
  const int64_t more_us = control->deadline_us;
  MFSDP_TRY(control->ops->allgather(control->self, context, &own, sizeof(own), statuses,
                                    deadline_us > INT64_MAX - more_us ? INT64_MAX
                                                                      : deadline_us + more_us));
  if (status != MFSDP_OK) context->error = first;
  return mfsdp__boot_all_well(context, control, statuses, sizeof(*statuses),
                              "make the communicator");
}

MFSDP_API mfsdp_status mfsdp__boot_run(mfsdp_context *context, const mfsdp_control *control,
                                       const mfsdp_nccl_bootstrap_desc *desc, unsigned char *table,
                                       int32_t *device, ncclComm_t *comm) {
  mfsdp__boot_place *places = (mfsdp__boot_place *)(void *)table;
  mfsdp__boot_place own;
  ncclUniqueId id;
  mfsdp_status status;
  (void)mfsdp__boot_describe(context, desc, control->rank, &own); /* its status travels */
  MFSDP_TRY(control->ops->allgather(control->self, context, &own, sizeof(own), places,
                                    control->deadline_us));
  MFSDP_TRY(mfsdp__boot_compare(context, control, places));
  if (desc->node_of_rank != NULL) mfsdp__boot_nodes(places, control->world, desc->node_of_rank);
  *device = own.device;
  status = mfsdp__cuda_check(context, cudaSetDevice((int)own.device), "cudaSetDevice");
  MFSDP_TRY(
      mfsdp__boot_share_id(context, control, status, (mfsdp__boot_ticket *)(void *)table, &id));
  status = mfsdp__boot_connect(context, control, desc, &id, comm);
  return mfsdp__boot_agree(context, control, desc->deadline_us, status, (int32_t *)(void *)table);
}

MFSDP_API mfsdp_status mfsdp__boot_check(mfsdp_context *context, const mfsdp_control *control,
                                         const mfsdp_nccl_bootstrap_desc *desc,
                                         const int32_t *device, const ncclComm_t *comm) {
  if (device == NULL || comm == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "nccl bootstrap: %s is NULL",
                      device == NULL ? "device" : "comm");
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl bootstrap: desc is NULL, or its struct_nbytes is not %zu (use "
                      "mfsdp_nccl_bootstrap_desc_default)",
                      sizeof(*desc));
  if (desc->device < -1 || desc->local_rank < -1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl bootstrap: device is %d and local_rank %d, need -1 or a number",
                      (int)desc->device, (int)desc->local_rank);
  if (desc->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "nccl bootstrap: deadline_us is %lld, needs to be positive",
                      (long long)desc->deadline_us);
  return mfsdp_control_check(context, control);
}

/*
 * Chooses this rank's device and makes it the thread's (cudaSetDevice), then makes a communicator
 * of all ranks of the control plane, with their numbers. COMPLETE, collective: every rank calls it,
 * with a device or a number of its own. On success *comm stands, does not block (config.blocking 0)
 * and is the caller's to destroy; on an error it is NULL and nothing is left. Errors: see above;
 * those of arguments are found before anything is said, so the other ranks wait out the control
 * plane's deadline.
 */
MFSDP_API mfsdp_status mfsdp_nccl_bootstrap(mfsdp_context *context, const mfsdp_control *control,
                                            const mfsdp_nccl_bootstrap_desc *desc, int32_t *device,
                                            ncclComm_t *comm) {
  const size_t one = sizeof(mfsdp__boot_place) > sizeof(mfsdp__boot_ticket)
                         ? sizeof(mfsdp__boot_place)
                         : sizeof(mfsdp__boot_ticket);
  mfsdp_status status;
  void *table;
  MFSDP_TRY(mfsdp__boot_check(context, control, desc, device, comm));
  *comm = NULL;
  *device = -1;
  MFSDP_TRY(mfsdp_table_alloc(context, (size_t)control->world, one, "nccl bootstrap", &table));
  status = mfsdp__boot_run(context, control, desc, (unsigned char *)table, device, comm);
  mfsdp_table_free(context, table, (size_t)control->world, one);
  if (status != MFSDP_OK && *comm != NULL) {
    (void)ncclCommAbort(*comm);
    *comm = NULL;
  }
  return status;
}

#endif /* MFSDP_CUDA_BOOTSTRAP_H */
