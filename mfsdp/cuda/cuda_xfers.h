/* SPDX-License-Identifier: MIT */
/*
 * cuda_xfers.h - private part of the transports of devices: what both ask of a batch before any of
 * it is enqueued. Include transport_nccl.h or transport_device.h.
 * Does not: look at peers, which mfsdp_transport_submit has done. Link: as backend_cuda.h.
 */
#ifndef MFSDP_CUDA_CUDA_XFERS_H
#define MFSDP_CUDA_CUDA_XFERS_H

#include "../transport.h"
#include "cuda_queue.h"

/* No more transfers than reserved, and device memory (with check_pointers). E_ARGUMENT. */
MFSDP_API mfsdp_status mfsdp__cuda_check_xfers(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                               const mfsdp_batch *batch, int32_t capacity,
                                               const char *label) {
  int32_t i;
  if (batch->xfer_count > capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: the batch has %d transfers, needs 0 to %d (see reserve)", label,
                      (int)batch->xfer_count, (int)capacity);
  for (i = 0; i < batch->xfer_count; ++i) {
    const mfsdp_xfer *x = &batch->xfers[i];
    if (x->nbytes > 0)
      MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, label, x->is_send ? "src" : "dst",
                                          x->is_send ? x->src : x->dst, MFSDP_SPACE_DEVICE));
  }
  return MFSDP_OK;
}

#endif /* MFSDP_CUDA_CUDA_XFERS_H */
