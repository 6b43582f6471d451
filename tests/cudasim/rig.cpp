/* SPDX-License-Identifier: MIT */
#include "rig.h"

#include "mfsdp/cuda/transport_device.h"

#if !defined(MFSDP_TEST_HARDWARE) /* scripts/gpu_check.sh links the real libraries */
#include "cudasim.h"
#endif

namespace test {

mfsdp_status cuda_rig_create(mfsdp_context *context, void **out, const mfsdp_backend **backend) {
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  mfsdp_cuda_backend *cuda = nullptr;
  desc.workspace_nbytes = 4096;
  desc.symmetric_from = 64;
  desc.check_pointers = 1;
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
