/* SPDX-License-Identifier: MIT */
#include "rig.h"

#include "mfsdp/cuda/transport_device.h"
#if !defined(MFSDP_TEST_NCCL) /* 0: hardware without NCCL */
#define MFSDP_TEST_NCCL 1
#endif
#if MFSDP_TEST_NCCL
#include "mfsdp/cuda/transport_nccl.h"
#endif

#if !defined(MFSDP_TEST_HARDWARE) /* scripts/gpu_check.sh links the real libraries */
#include "cudasim.h"
#include "detail.h"
#endif

#include <memory>
#include <vector>

namespace test {

mfsdp_status cuda_rig_create(mfsdp_context *context, void **out, const mfsdp_backend **backend) {
  return cuda_rig_create_on(context, 0, out, backend);
}

mfsdp_status cuda_rig_create_on(mfsdp_context *context, int32_t device, void **out,
                                const mfsdp_backend **backend) {
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  mfsdp_cuda_backend *cuda = nullptr;
  desc.workspace_nbytes = 4096;
  desc.symmetric_from = 64;
  desc.check_pointers = 1;
  desc.device = device;
  if (device != 0) (void)cudaSetDevice(device); /* a failure shows at once */
  const mfsdp_status status = mfsdp_cuda_backend_create(context, &desc, &cuda);
  *out = cuda;
  *backend = cuda == nullptr ? nullptr : mfsdp_cuda_backend_get(cuda);
  return status;
}

mfsdp_status cuda_rig_destroy(mfsdp_context *context, void *cuda) {
  return mfsdp_cuda_backend_destroy(context, static_cast<mfsdp_cuda_backend *>(cuda));
}

mfsdp_status cuda_rig_world_create(mfsdp_context *context, int32_t world, int64_t deadline_us,
                                   void **out) {
  mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
  mfsdp_device_world *made = nullptr;
  desc.world = world;
  desc.deadline_us = deadline_us;
  const mfsdp_status status = mfsdp_device_world_create(context, &desc, &made);
  *out = made;
  return status;
}

mfsdp_status cuda_rig_world_destroy(mfsdp_context *context, void *world) {
  return mfsdp_device_world_destroy(context, static_cast<mfsdp_device_world *>(world));
}

void cuda_rig_world_poison(void *world, const mfsdp_error *why) {
  if (world != nullptr) mfsdp_device_world_poison(static_cast<mfsdp_device_world *>(world), why);
}

mfsdp_status cuda_rig_transport_create(mfsdp_context *context, void *world, int32_t rank,
                                       void *cuda, mfsdp_transport *out) {
  return mfsdp_device_transport_create(context, static_cast<mfsdp_device_world *>(world), rank,
                                       static_cast<mfsdp_cuda_backend *>(cuda), out);
}

/* ---- NCCL ---- */

#if MFSDP_TEST_NCCL

namespace {
struct NcclWorld {
  ncclUniqueId id;
  int32_t world = 0;
  int64_t deadline_us = 0;
  NcclOptions options;
  struct Place {
    ncclComm_t comm = nullptr;
    int32_t aborted = 0;
  };
  std::vector<Place> places; /* by rank */
};
} // namespace

int32_t nccl_rig_devices() {
#if defined(MFSDP_TEST_HARDWARE)
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
#else
  return 1000;
#endif
}

mfsdp_status nccl_rig_world_create(mfsdp_context *context, int32_t world, int64_t deadline_us,
                                   const NcclOptions &options, void **out) {
  *out = nullptr;
  if (world > nccl_rig_devices())
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "%d devices are needed", (int)world);
#if !defined(MFSDP_TEST_HARDWARE)
  cudasim::set_device_count(64);
#endif
  std::unique_ptr<NcclWorld> made(new NcclWorld);
  if (ncclGetUniqueId(&made->id) != ncclSuccess)
    return MFSDP_FAIL(context, MFSDP_E_BACKEND, "ncclGetUniqueId");
  made->world = world;
  made->deadline_us = deadline_us;
  made->options = options;
  made->places.resize(static_cast<std::size_t>(world));
  *out = made.release();
  return MFSDP_OK;
}

mfsdp_status nccl_rig_world_destroy(mfsdp_context *context, void *world) {
  (void)context;
  delete static_cast<NcclWorld *>(world);
#if !defined(MFSDP_TEST_HARDWARE)
  if (world != nullptr) cudasim::set_device_count(1);
#endif
  return MFSDP_OK;
}

mfsdp_status nccl_rig_transport_create(mfsdp_context *context, void *opaque, int32_t rank,
                                       void *cuda, const mfsdp_control *control,
                                       mfsdp_transport *out) {
  NcclWorld *world = static_cast<NcclWorld *>(opaque);
  NcclWorld::Place &place = world->places[static_cast<std::size_t>(rank)];
  mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = world->options.nonblocking ? 0 : 1;
  const ncclResult_t result =
      ncclCommInitRankConfig(&place.comm, world->world, world->id, rank, &config);
  if (result != ncclSuccess && result != ncclInProgress)
    return MFSDP_FAIL(context, MFSDP_E_BACKEND, "ncclCommInitRankConfig: %s: %s",
                      ncclGetErrorString(result), ncclGetLastError(nullptr));
  desc.rank = rank;
  desc.world = world->world;
  desc.nonblocking = world->options.nonblocking;
  desc.may_abort = world->options.nonblocking && world->options.may_abort;
  desc.deadline_us = world->deadline_us;
  desc.watchdog_us = world->options.watchdog_us;
  desc.chunk_nbytes = world->options.chunk_nbytes;
  desc.node_of_rank = world->options.node_of_rank;
  desc.control = control;
  desc.aborted = &place.aborted;
  MFSDP_TRY(mfsdp_nccl_transport_wrap(context, static_cast<mfsdp_cuda_backend *>(cuda), place.comm,
                                      &desc, out));
#if !defined(MFSDP_TEST_HARDWARE) && CUDASIM_TSAN
  /* A kernel may read the note while the host writes it because of an abort: hardware does not
   * mind. */
  mfsdp_cuda_note *note = static_cast<mfsdp__nccl_transport *>(out->self)->note;
  AnnotateBenignRaceSized(__FILE__, __LINE__, note, sizeof(*note), "note");
#endif
  return MFSDP_OK;
}

std::string nccl_rig_transport_destroy(mfsdp_context *context, void *opaque, int32_t rank,
                                       mfsdp_transport *transport) {
  NcclWorld::Place &place =
      static_cast<NcclWorld *>(opaque)->places[static_cast<std::size_t>(rank)];
  std::string out;
  if (transport->self != nullptr && transport->ops->destroy(transport->self, context) != MFSDP_OK)
    return std::string(mfsdp_context_error(context)->message) + "\n";
  if (place.comm == nullptr || place.aborted) return out;
  const NcclOptions &options = static_cast<NcclWorld *>(opaque)->options;
  const ncclResult_t result = options.nonblocking && transport->self == nullptr
                                  ? ncclCommAbort(place.comm) /* it may not have come up */
                                  : ncclCommDestroy(place.comm);
  if (result != ncclSuccess) out = std::string(ncclGetErrorString(result)) + "\n";
  place.comm = nullptr;
  return out;
}
#else

int32_t nccl_rig_devices() {
  return 0;
}
mfsdp_status nccl_rig_world_create(mfsdp_context *context, int32_t world, int64_t deadline_us,
                                   const NcclOptions &options, void **out) {
  (void)world, (void)deadline_us, (void)options, (void)out;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "there is no NCCL");
}
mfsdp_status nccl_rig_world_destroy(mfsdp_context *context, void *world) {
  (void)context, (void)world;
  return MFSDP_OK;
}
mfsdp_status nccl_rig_transport_create(mfsdp_context *context, void *world, int32_t rank,
                                       void *cuda, const mfsdp_control *control,
                                       mfsdp_transport *out) {
  (void)world, (void)rank, (void)cuda, (void)control, (void)out;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "there is no NCCL");
}
std::string nccl_rig_transport_destroy(mfsdp_context *context, void *world, int32_t rank,
                                       mfsdp_transport *transport) {
  (void)context, (void)world, (void)rank, (void)transport;
  return "";
}
#endif

bool cuda_rig_fail_solver(int64_t n) {
#if defined(MFSDP_TEST_HARDWARE)
  (void)n;
  return false;
#else
  cudasim::fail_solver_at(n);
  return true;
#endif
}

std::string cuda_rig_complaints() {
#if defined(MFSDP_TEST_HARDWARE)
  return "";
#else
  return cudasim::complaints();
#endif
}

} // namespace test
