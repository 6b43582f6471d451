/* SPDX-License-Identifier: MIT */
/*
 * cuda_entries.h - the element-wise entries of the CUDA backend: they check what the host can check
 * and launch kernels. What only the device can see (tables in DEVICE memory) the kernels check.
 *
 * Internal to backend_cuda.h. Link flags: -lcudart.
 */
#ifndef MFSDP_CUDA_CUDA_ENTRIES_H
#define MFSDP_CUDA_CUDA_ENTRIES_H

#include "cuda_queue.h"

/* ---- casts and sums ---- */

MFSDP_API mfsdp_status mfsdp__cuda_cast(void *self, mfsdp_queue *opaque, void *dst,
                                        mfsdp_dtype dst_dtype, const void *src,
                                        mfsdp_dtype src_dtype, int64_t count) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "cast", opaque));
  MFSDP_TRY(mfsdp__check_cast(cuda->context, dst, dst_dtype, src, src_dtype, count));
  if (count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "cast", "dst", dst, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "cast", "src", src, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->cast(mfsdp__cuda_lane(queue), dst, dst_dtype, src, src_dtype, count),
      "cast");
}

/* More terms than one launch takes go on where it stopped: the same chain. */
MFSDP_API mfsdp_status mfsdp__cuda_sum_terms(void *self, mfsdp_queue *opaque, float *acc,
                                             int32_t first, const void *const *terms,
                                             mfsdp_dtype dtype, int32_t term_count, int64_t count) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  int32_t t;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "sum_terms", opaque));
  MFSDP_TRY(mfsdp__check_terms(cuda->context, acc, terms, dtype, term_count, count));
  if (count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sum_terms", "acc", acc, MFSDP_SPACE_DEVICE));
  for (t = 0; t < term_count; ++t)
    MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sum_terms", "a term", terms[t], MFSDP_SPACE_DEVICE));
  (void)mfsdp__cuda_lane(queue);
  for (t = 0; t < term_count; t += MFSDP_CUDA_TERMS)
    MFSDP_TRY(mfsdp__cuda_launched(
        cuda,
        cuda->kernels->sum_terms(
            &queue->lane, acc, first && t == 0, terms + t, dtype,
            term_count - t < MFSDP_CUDA_TERMS ? term_count - t : MFSDP_CUDA_TERMS, count),
        "sum_terms"));
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_sumsq(void *self, mfsdp_queue *opaque, double *slots,
                                         const float *acc, const mfsdp_block *blocks,
                                         int32_t block_count) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "sumsq", opaque));
  MFSDP_TRY(mfsdp__check_sumsq(cuda->context, slots, blocks, block_count));
  if (block_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "slots", slots, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "acc", acc, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "blocks", blocks, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->sumsq(mfsdp__cuda_lane(queue), slots, acc, blocks, block_count),
      "sumsq");
}

/* ---- verdict ---- */

MFSDP_API mfsdp_status mfsdp__cuda_verdict(void *self, mfsdp_queue *opaque,
                                           const mfsdp_verdict_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "verdict_fold", opaque));
  MFSDP_TRY(mfsdp__check_verdict(cuda->context, args));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "verdict_fold", "messages", args->messages,
                                      MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "verdict_fold", "scalars", args->scalars,
                                      MFSDP_SPACE_DEVICE));
  MFSDP_TRY(
      mfsdp__cuda_check_pointer(cuda, "verdict_fold", "record", args->record, MFSDP_SPACE_PINNED));
  return mfsdp__cuda_launched(cuda, cuda->kernels->verdict(mfsdp__cuda_lane(queue), args),
                              "verdict_fold");
}

/* ---- normalization ---- */

MFSDP_API mfsdp_status mfsdp__cuda_normalize(void *self, mfsdp_queue *opaque,
                                             const mfsdp_normalize_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  size_t nbytes;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "normalize", opaque));
  MFSDP_TRY(mfsdp__check_normalize(cuda->context, args));
  if (args->count == 0 || args->batch_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__check_array(cuda->context, "normalize", "scratch", args->scratch, MFSDP_F64, 1,
                               &nbytes));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "normalize", "dst", args->dst, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "normalize", "src", args->src, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(
      mfsdp__cuda_check_pointer(cuda, "normalize", "scratch", args->scratch, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(cuda, cuda->kernels->normalize(mfsdp__cuda_lane(queue), args),
                              "normalize");
}

/* ---- fused optimizer passes ---- */

MFSDP_API mfsdp_status mfsdp__cuda_fused(void *self, mfsdp_queue *opaque,
                                         const mfsdp_fused_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "fused", opaque));
  MFSDP_TRY(mfsdp__check_fused(cuda->context, "CUDA", args));
  if (args->item_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "items", args->items, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "scalars", args->scalars, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "present", args->present, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(cuda, cuda->kernels->fused(mfsdp__cuda_lane(queue), args), "fused");
}

#endif /* MFSDP_CUDA_CUDA_ENTRIES_H */
