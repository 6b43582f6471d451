/* SPDX-License-Identifier: MIT */
#include "rig.h"

#include "mfsdp/cuda/backend_cuda.h"

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

std::string cuda_rig_complaints() {
#if defined(MFSDP_TEST_HARDWARE)
  return "";
#else
  return cudasim::complaints();
#endif
}

} // namespace test
