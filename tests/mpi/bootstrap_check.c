/* SPDX-License-Identifier: MIT */
/*
 * bootstrap_check.c - cuda/bootstrap.h between the processes of an mpirun: the unique id, the table
 * of places and the agreement travel over the caller's own MPI communicator.
 *
 *   mpirun -n 4 build/release/tests/mpi/bootstrap_check whole FOLDER
 *   mpirun -n 4 build/release/tests/mpi/bootstrap_check fail-HOW FOLDER VERDICTS
 *
 * CUDA and NCCL are a few functions below: devices are numbers, and a communicator is made when all
 * of its ranks have put a file under the name of their unique id into FOLDER. It carries nothing:
 * what NCCL moves between processes is for hardware to show. `whole` prints `ok` or `not ok`;
 * fail-... write VERDICTS.RANK as mpi_check.c. tests/cli/mpi_bootstrap.sh runs them.
 */
#include "mfsdp/cuda/bootstrap.h"
#include "mfsdp/runtime.h"

#include "tests/mpi/peer.h"

#include <signal.h>

#define NCCL_DEADLINE_US 300000 /* how long NCCL may take where it is to fail */
#define DEADLINE_US 500000      /* of the control plane, where a rank is to fail */

/* ---- a small CUDA and NCCL that span processes ---- */

/* What this process has, and what is to fail in it. */
static struct {
  int devices, first_bus, version;
  int set_device_fails, unique_id_fails, init_fails, never_connects, dies_in_init;
  int ids_made, open_communicators;
} machine;

static const char *folder = ".";
static char last_error[160];

struct ncclComm {
  char id[64];
  int rank, world;
};

static void plug_in(int devices) {
  memset(&machine, 0, sizeof(machine));
  machine.devices = devices;
  machine.version = NCCL_VERSION_CODE;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = machine.devices;
  return machine.devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int nbytes, int device) {
  (void)snprintf(out, (size_t)nbytes, "0000:%02x:00.0", machine.first_bus + device);
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return machine.set_device_fails || device >= machine.devices ? cudaErrorInvalidDevice
                                                               : cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
  return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoDevice ? "cudaErrorNoDevice" : "cudaErrorInvalidDevice";
}

const char *cudaGetErrorString(cudaError_t error) {
  (void)error;
  return "as planned by the test";
}

ncclResult_t ncclGetVersion(int *version) {
  *version = machine.version;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidUsage ? "invalid usage" : "unhandled system error";
}

const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (machine.unique_id_fails) return ncclSystemError;
  memset(id, 0, sizeof(*id));
  (void)snprintf(id->internal, sizeof(id->internal), "%ld-%d-", (long)getpid(), machine.ids_made++);
  memset(id->internal + 100, 0x5a, sizeof(id->internal) - 100); /* all of it has to come */
  return ncclSuccess;
}

static void place_name(const struct ncclComm *comm, int rank, char *name, size_t nbytes) {
  (void)snprintf(name, nbytes, "%s/%s%d", folder, comm->id, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
  char name[1024];
  size_t i;
  int file;
  *comm = NULL;
  last_error[0] = '\0';
  if (machine.dies_in_init) (void)raise(SIGKILL);
  if (machine.init_fails || config->blocking != 0) return ncclSystemError;
  for (i = 100; i < sizeof(id.internal); ++i)
    if (id.internal[i] != 0x5a) return ncclInvalidArgument;
  *comm = (ncclComm_t)calloc(1, sizeof(**comm));
  if (*comm == NULL) return ncclSystemError;
  (void)snprintf((*comm)->id, sizeof((*comm)->id), "%.60s", id.internal);
  (*comm)->rank = rank;
  (*comm)->world = nranks;
  place_name(*comm, rank, name, sizeof(name));
  file = open(name, O_WRONLY | O_CREAT | O_EXCL, 0600);
  ++machine.open_communicators;
  if (file >= 0) (void)close(file);
  if (file >= 0) return ncclInProgress;
  (void)snprintf(last_error, sizeof(last_error), "rank %d has come twice", rank);
  return ncclInvalidUsage;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
  char name[1024];
  int r;
  *result = ncclInProgress;
  for (r = 0; r < comm->world; ++r) {
    place_name(comm, r, name, sizeof(name));
    if (machine.never_connects || access(name, F_OK) != 0) return ncclSuccess;
  }
  *result = ncclSuccess;
  return ncclSuccess;
}

static ncclResult_t end_comm(ncclComm_t comm) {
  char name[1024];
  place_name(comm, comm->rank, name, sizeof(name));
  (void)unlink(name);
  free(comm);
  --machine.open_communicators;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return end_comm(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return end_comm(comm);
}

/* ---- one bootstrap ---- */

typedef struct outcome {
  mfsdp_status status;
  int32_t device, nodes[64];
  char id[64]; /* of the communicator */
} outcome;

static mfsdp_nccl_bootstrap_desc describe(const peer *p) {
  mfsdp_nccl_bootstrap_desc desc = mfsdp_nccl_bootstrap_desc_default();
  desc.local_rank = p->rank;
  desc.deadline_us = 20000000;
  return desc;
}

static outcome boot(peer *p, const mfsdp_control *control, mfsdp_nccl_bootstrap_desc desc) {
  ncclComm_t comm = NULL;
  outcome out;
  memset(&out, 0, sizeof(out));
  desc.node_of_rank = out.nodes;
  p->context.error = mfsdp_error_none();
  out.status = mfsdp_nccl_bootstrap(&p->context, control, &desc, &out.device, &comm);
  expect(p, (comm != NULL) == (out.status == MFSDP_OK), "a communicator, or none after an error");
  expect(p, machine.open_communicators == (comm != NULL), "a communicator was left open");
  if (comm == NULL) return out;
  expect(p, comm->rank == control->rank && comm->world == control->world, "rank or world");
  memcpy(out.id, comm->id, sizeof(out.id));
  (void)MPI_Barrier(MPI_COMM_WORLD); /* others may still look for this rank's file */
  (void)ncclCommDestroy(comm);
  return out;
}

static void expect_error(peer *p, const outcome *out, mfsdp_status status, const char *part) {
  expect(p, out->status == status, mfsdp_status_name(status));
  expect(p, strstr(p->context.error.message, part) != NULL, part);
}

/* One rank has an error of its own, the others hear of it. */
static void expect_one_error(peer *p, const outcome *out, int32_t culprit, mfsdp_status status,
                             const char *part, const char *others) {
  if (p->rank == culprit) {
    expect_error(p, out, status, part);
  } else {
    expect_error(p, out, MFSDP_E_PEER, others);
    expect(p, p->context.error.culprit == culprit, "the culprit");
  }
}

/* ---- control planes around the caller's ---- */

typedef struct meddler {
  const mfsdp_control *inner;
  void (*change)(const peer *p, void *message, size_t nbytes); /* what this rank says */
  const peer *p;
} meddler;

static mfsdp_status meddler_allgather(void *self, mfsdp_context *context, const void *in,
                                      size_t nbytes, void *out, int64_t timeout_us) {
  const meddler *m = (const meddler *)self;
  unsigned char message[4096];
  if (nbytes > sizeof(message)) return MFSDP_E_ARGUMENT;
  if (nbytes > 0) memcpy(message, in, nbytes);
  m->change(m->p, message, nbytes);
  return m->inner->ops->allgather(m->inner->self, context, message, nbytes, out, timeout_us);
}

static mfsdp_status meddler_probe(void *self, mfsdp_context *context, uint8_t *alive,
                                  int64_t timeout_us) {
  const meddler *m = (const meddler *)self;
  return m->inner->ops->probe(m->inner->self, context, alive, timeout_us);
}

/* The caller's own plane: a broadcast and an all-gather by MPI itself, without deadlines. */
static mfsdp_status own_allgather(void *self, mfsdp_context *context, const void *in, size_t nbytes,
                                  void *out, int64_t timeout_us) {
  static char none;
  (void)timeout_us;
  if (MPI_Allgather(nbytes > 0 ? in : &none, (int)nbytes, MPI_BYTE, nbytes > 0 ? out : &none,
                    (int)nbytes, MPI_BYTE, *(MPI_Comm *)self) == MPI_SUCCESS)
    return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_PEER, "MPI_Allgather");
}

static mfsdp_status own_probe(void *self, mfsdp_context *context, uint8_t *alive,
                              int64_t timeout_us) {
  (void)self, (void)alive, (void)timeout_us;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "no probe");
}

static int64_t now_us(void *self) {
  (void)self;
  return mfsdp_clock_us();
}

static const mfsdp_control_ops meddler_ops = {sizeof(meddler_ops), "meddler", meddler_allgather,
                                              meddler_probe,       now_us,    NULL};
static const mfsdp_control_ops own_ops = {sizeof(own_ops), "caller's own", own_allgather,
                                          own_probe,       now_us,         NULL};

static mfsdp_control meddle(meddler *m, const peer *p,
                            void (*change)(const peer *, void *, size_t)) {
  mfsdp_control control = p->control;
  m->inner = &p->control;
  m->change = change;
  m->p = p;
  control.ops = &meddler_ops;
  control.self = m;
  return control;
}

/* ---- cases that end well ---- */

static void check_ids(peer *p, const outcome *out, int first) {
  char ids[64][sizeof(out->id)];
  int32_t r;
  expect(p, allgather(p, out->id, sizeof(out->id), ids) == MFSDP_OK, "ids");
  for (r = 0; r < p->size; ++r)
    expect(p, ids[r][0] != '\0' && strcmp(ids[r], ids[0]) == 0, "ranks have different ids");
  expect(p, machine.ids_made == first, "an id is made by rank 0 alone");
}

static void one_host(peer *p) {
  outcome out;
  int32_t r;
  plug_in(64);
  out = boot(p, &p->control, describe(p));
  expect(p, out.status == MFSDP_OK, "one host");
  expect(p, out.device == p->rank, "the device");
  for (r = 0; r < p->size; ++r)
    expect(p, out.nodes[r] == 0, "one host is one node");
  check_ids(p, &out, p->rank == 0);
}

/* The caller's communicator is a part of the world: two jobs that know nothing of each other. */
static void split_communicator(peer *all) {
  const mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  mfsdp_nccl_bootstrap_desc how = describe(all);
  MPI_Comm comm;
  outcome out;
  peer p;
  (void)MPI_Comm_split(MPI_COMM_WORLD, all->rank % 2, -all->rank, &comm); /* ranks in reverse */
  plug_in(64);
  if (open_peer(&p, comm, &desc, 0) == MFSDP_OK) {
    out = boot(&p, &p.control, how);
    expect(&p, out.status == MFSDP_OK, "half of the ranks");
    expect(&p, out.device == all->rank, "the device is by the number on the host");
    check_ids(&p, &out, p.rank == 0);
    expect(&p, close_peer(&p) == MFSDP_OK, "close");
  } else {
    expect(&p, 0, "open");
  }
  all->failures += p.failures;
  (void)MPI_Comm_free(&comm);
}

static int32_t hosts_first(const peer *p) { /* the second host's first rank */
  return (p->size + 1) / 2;
}

static void say_two_hosts(const peer *p, void *message, size_t nbytes) {
  if (nbytes == sizeof(mfsdp__boot_place) && p->rank >= hosts_first(p))
    ((mfsdp__boot_place *)message)->host ^= 1;
}

static void two_hosts(peer *p) {
  mfsdp_nccl_bootstrap_desc desc = describe(p);
  const int32_t second = hosts_first(p);
  meddler m;
  const mfsdp_control control = meddle(&m, p, say_two_hosts);
  outcome out;
  int32_t r;
  plug_in((int)second);
  desc.local_rank = p->rank < second ? p->rank : p->rank - second;
  out = boot(p, &control, desc);
  expect(p, out.status == MFSDP_OK, "two hosts");
  for (r = 0; r < p->size; ++r)
    expect(p, out.nodes[r] == (r < second ? 0 : second), "which ranks share a host");
}

/* CUDA_VISIBLE_DEVICES shows each rank its own device, as number 0. */
static void one_visible_device(peer *p) {
  mfsdp_nccl_bootstrap_desc desc = describe(p);
  outcome out;
  plug_in(1);
  machine.first_bus = p->rank;
  out = boot(p, &p->control, desc);
  expect(p, out.status == MFSDP_OK && out.device == 0, "one visible device each");
}

static void callers_own_plane(peer *p) {
  MPI_Comm comm = MPI_COMM_WORLD;
  mfsdp_control control = p->control;
  outcome out;
  control.ops = &own_ops;
  control.self = &comm;
  plug_in(64);
  out = boot(p, &control, describe(p));
  expect(p, out.status == MFSDP_OK, "over the caller's own all-gather");
  check_ids(p, &out, p->rank == 0);
}

/* ---- cases in which ranks differ, and all of them hear it ---- */

static void devices_that_cannot_be(peer *p) {
  mfsdp_nccl_bootstrap_desc desc = describe(p);
  outcome out;
  plug_in(64);
  if (p->rank == 1) desc.local_rank = 0;
  out = boot(p, &p->control, desc);
  expect_error(p, &out, MFSDP_E_ARGUMENT, "ranks 0 and 1 are both on the device at 0000:00:00.0");
  if (p->rank == 1) desc.local_rank = -1;
  out = boot(p, &p->control, desc);
  expect_error(p, &out, MFSDP_E_ARGUMENT, "rank 1 does not know its number there");
  if (p->rank == 1) desc.local_rank = 1;
  if (p->rank == p->size - 1) desc.local_rank = 64;
  out = boot(p, &p->control, desc);
  expect_one_error(p, &out, p->size - 1, MFSDP_E_ARGUMENT, "wants device 64 (local_rank 64)",
                   "could not choose a device");
  desc.local_rank = p->rank;
  machine.devices = p->rank == 0 ? 0 : 64;
  out = boot(p, &p->control, desc);
  expect_one_error(p, &out, 0, MFSDP_E_UNSUPPORTED, "no GPU is visible",
                   "could not choose a device");
}

static void versions(peer *p) {
  outcome out;
  plug_in(64);
  if (p->rank == 1) machine.version = 23000;
  out = boot(p, &p->control, describe(p));
  expect_error(p, &out, MFSDP_E_MISMATCH, "rank 1 has NCCL 23000, rank 0 has");
  expect(p, p->context.error.culprit == 1, "the culprit");
}

static void calls_that_fail(peer *p) {
  mfsdp_nccl_bootstrap_desc desc = describe(p);
  outcome out;
  plug_in(64);
  machine.set_device_fails = p->rank == 1;
  out = boot(p, &p->control, desc);
  expect_one_error(p, &out, 1, MFSDP_E_BACKEND, "cudaSetDevice", "could not use its device");
  plug_in(64);
  machine.unique_id_fails = 1;
  out = boot(p, &p->control, desc);
  expect_one_error(p, &out, 0, MFSDP_E_BACKEND, "ncclGetUniqueId", "make NCCL's unique id");
  plug_in(64);
  desc.deadline_us = NCCL_DEADLINE_US;
  machine.init_fails = p->rank == 1;
  out = boot(p, &p->control, desc); /* the others wait for rank 1 inside NCCL */
  if (p->rank == 1)
    expect_error(p, &out, MFSDP_E_BACKEND, "ncclCommInitRankConfig");
  else
    expect_error(p, &out, MFSDP_E_TIMEOUT, "for NCCL to connect");
  plug_in(64);
  machine.never_connects = p->rank == 1; /* which the others do not notice */
  out = boot(p, &p->control, desc);
  expect_one_error(p, &out, 1, MFSDP_E_TIMEOUT, "for NCCL to connect",
                   "rank 1 could not make the communicator (MFSDP_E_TIMEOUT)");
}

/* ---- version, plan and options of the library, over the same control plane ---- */

enum { SAME, OTHER_PLAN, OTHER_OPTIONS, OTHER_VERSION };

static void say_other_version(const peer *p, void *message, size_t nbytes) {
  const uint64_t other = MFSDP_VERSION + 1;
  uint64_t word = 0;
  if (nbytes >= sizeof(word)) memcpy(&word, message, sizeof(word));
  if (p->rank == 1 && nbytes == MFSDP__AGREE_WORDS * sizeof(word) && word == MFSDP_VERSION)
    memcpy(message, &other, sizeof(other));
}

static mfsdp_status make_runtime(peer *p, int what) {
  const mfsdp_hyper_group muon = mfsdp_hyper_group_muon(MFSDP_MUON_JORDAN);
  const int odd = p->rank == 1;
  const mfsdp_param param =
      mfsdp_param_2d("w", 0, MFSDP_ROLE_MATRIX, what == OTHER_PLAN && odd ? 24 : 16, 16);
  mfsdp_plan_desc plan_desc = mfsdp_plan_desc_default();
  mfsdp_optimizer_desc optimizer = mfsdp_optimizer_desc_default();
  mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
  mfsdp_group group = mfsdp_group_default();
  meddler m;
  const mfsdp_control control = meddle(&m, p, say_other_version);
  mfsdp_runtime *runtime = NULL;
  mfsdp_plan *plan = NULL;
  mfsdp_status status;
  plan_desc.params = &param;
  plan_desc.param_count = 1;
  plan_desc.world = p->size;
  MFSDP_TRY(mfsdp_plan_create(&p->context, &plan_desc, &plan));
  optimizer.groups = &muon;
  optimizer.group_count = 1;
  group.plan = plan;
  group.transport = &p->transport;
  group.control = what == OTHER_VERSION ? &control : &p->control;
  desc.backend = p->backend;
  desc.groups = &group;
  desc.group_count = 1;
  desc.optimizer = &optimizer;
  desc.clip_norm = what == OTHER_OPTIONS && odd ? 1.0 : 0.5;
  status = mfsdp_runtime_create(&p->context, &desc, &runtime);
  if (status == MFSDP_OK) status = mfsdp_runtime_destroy(runtime);
  mfsdp_plan_destroy(&p->context, plan);
  return status;
}

static void handshake(peer *p) {
  outcome out;
  plug_in(64);
  out = boot(p, &p->control, describe(p));
  expect(p, out.status == MFSDP_OK, "before the handshake");
  out.status = make_runtime(p, OTHER_VERSION);
  expect_error(p, &out, MFSDP_E_MISMATCH, "the library version of rank 1 is");
  out.status = make_runtime(p, OTHER_PLAN);
  expect_error(p, &out, MFSDP_E_MISMATCH, "first at parameter 0");
  out.status = make_runtime(p, OTHER_OPTIONS);
  expect_error(p, &out, MFSDP_E_MISMATCH, "the option hash of rank 1 is");
  expect(p, make_runtime(p, SAME) == MFSDP_OK, "after three refusals");
}

static void run_whole(void) {
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  peer p;
  expect(&p, open_peer(&p, MPI_COMM_WORLD, &desc, 0) == MFSDP_OK, "open");
  one_host(&p);
  split_communicator(&p);
  one_visible_device(&p);
  callers_own_plane(&p);
  if (p.size > 1) {
    two_hosts(&p);
    devices_that_cannot_be(&p);
    versions(&p);
    calls_that_fail(&p);
    handshake(&p);
  }
  one_host(&p); /* none of it has hurt the control plane */
  expect(&p, close_peer(&p) == MFSDP_OK, "close");
  say_result(p.failures, p.rank, p.size);
}

/* ---- a rank that does not come ---- */

static mfsdp_status fail_as(peer *p, const char *how) {
  const int culprit = p->rank == 1;
  mfsdp_nccl_bootstrap_desc desc = describe(p);
  plug_in(64);
  desc.deadline_us = NCCL_DEADLINE_US;
  machine.dies_in_init = culprit && strcmp(how, "fail-kill-in-nccl") == 0;
  if (culprit && strcmp(how, "fail-kill") == 0) (void)raise(SIGKILL);
  if (culprit && strcmp(how, "fail-absent") == 0) { /* computes, for longer than anyone waits */
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 4 * DEADLINE_US);
    return p->transport.ops->poll(p->transport.self, &p->context);
  }
  if (culprit && strcmp(how, "fail-leave") == 0)
    return p->control.ops->destroy(p->control.self, &p->context);
  return boot(p, &p->control, desc).status;
}

static void run_failure(const char *how, const char *verdicts) {
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  int64_t start_us;
  mfsdp_status status;
  peer p;
  desc.deadline_us = DEADLINE_US;
  if (open_peer(&p, MPI_COMM_WORLD, &desc, 0) != MFSDP_OK) return;
  if (allgather(&p, NULL, 0, NULL) != MFSDP_OK) return;
  start_us = mfsdp_clock_us();
  status = fail_as(&p, how);
  if (p.failures > 0) status = MFSDP_OK; /* which no survivor may have */
  write_verdict(&p, verdicts, status, start_us);
  mfsdp_clock_sleep_until(mfsdp_clock_us() + DEADLINE_US); /* so that notices are out */
  _exit(0); /* a poisoned process does not finalize: with a dead peer that may hang */
}

int main(int argc, char **argv) {
  if (argc < 3) return 2;
  scenario_name = argv[1];
  folder = argv[2];
  if (MPI_Init(&argc, &argv) != MPI_SUCCESS) return 1;
  if (strncmp(argv[1], "fail-", 5) == 0)
    run_failure(argv[1], argc > 3 ? argv[3] : "verdict");
  else
    run_whole();
  (void)MPI_Finalize();
  return 0;
}
