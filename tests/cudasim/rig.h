/* SPDX-License-Identifier: MIT */
/*
 * rig.h: the CUDA backend and its transports on the host double, for tests that know nothing of
 * CUDA. The test programs include none of the toolkit's headers, and the library's CUDA sources are
 * compiled once.
 */
#ifndef MFSDP_TESTS_CUDASIM_RIG_H
#define MFSDP_TESTS_CUDASIM_RIG_H

#include "mfsdp/transport.h"

#include <cstddef>
#include <string>

namespace test {

/* With a small workspace, and symmetric products by half from 64 rows on, so that tests see them.
 * */
mfsdp_status cuda_rig_create(mfsdp_context *context, void **out, const mfsdp_backend **backend);
mfsdp_status cuda_rig_destroy(mfsdp_context *context, void *cuda);
/* The transport of ranks that share device 0 (transport_device.h): what they have in common, and
 * each rank's own, on a backend from cuda_rig_create. */
mfsdp_status cuda_rig_world_create(mfsdp_context *context, int32_t world, int64_t deadline_us,
                                   void **out);
mfsdp_status cuda_rig_world_destroy(mfsdp_context *context, void *world);
void cuda_rig_world_poison(void *world, const mfsdp_error *why);
mfsdp_status cuda_rig_transport_create(mfsdp_context *context, void *world, int32_t rank,
                                       void *cuda, mfsdp_transport *out);
/* The transport of ranks that have a device each (transport_nccl.h). Its world is a communicator
 * that the ranks make together; on hardware there must be as many devices. */
struct NcclOptions {
  bool on = false;
  bool nonblocking = true, may_abort = true;
  int64_t watchdog_us = 2000;
  std::size_t chunk_nbytes = std::size_t(1) << 20;
  const int32_t *node_of_rank = nullptr;
};
int32_t nccl_rig_devices();
mfsdp_status nccl_rig_world_create(mfsdp_context *context, int32_t world, int64_t deadline_us,
                                   const NcclOptions &options, void **out);
mfsdp_status nccl_rig_world_destroy(mfsdp_context *context, void *world);
/* On a backend from cuda_rig_create_on(context, device, ...), whose device becomes the thread's. */
mfsdp_status cuda_rig_create_on(mfsdp_context *context, int32_t device, void **out,
                                const mfsdp_backend **backend);
mfsdp_status nccl_rig_transport_create(mfsdp_context *context, void *world, int32_t rank,
                                       void *cuda, const mfsdp_control *control,
                                       mfsdp_transport *out);
/* The transport, and the communicator unless it was aborted. Empty, or what is wrong. */
std::string nccl_rig_transport_destroy(mfsdp_context *context, void *world, int32_t rank,
                                       mfsdp_transport *transport);
/* Routine number n of cuSOLVER from now (0: the next one) fails on the device; n < 0: none. False
 * on hardware, where that cannot be had. */
bool cuda_rig_fail_solver(int64_t n);
/* What the double found wrong; "" on hardware. */
std::string cuda_rig_complaints();

} // namespace test

#endif // MFSDP_TESTS_CUDASIM_RIG_H
