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

/* An array of `count` elements: known dtype, count that fits, pointer present and aligned. */
MFSDP_API mfsdp_status mfsdp__cuda_check_array(mfsdp_cuda_backend *cuda, const char *entry,
                                               const char *what, const void *data,
                                               mfsdp_dtype dtype, int64_t count, size_t *nbytes) {
  const size_t element_nbytes = mfsdp_dtype_nbytes(dtype);
  *nbytes = 0;
  if (element_nbytes == 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: the dtype of %s is %d, which is none",
                            entry, what, (int)dtype);
  if (count < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: count is %lld, needs at least 0", entry,
                            (long long)count);
  if (!mfsdp_elements_nbytes(count, dtype, nbytes))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_OVERFLOW, "%s: %lld elements of %s overflow size_t",
                            entry, (long long)count, what);
  if (count > 0 && data == NULL)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: %s is NULL, needs %lld elements", entry,
                            what, (long long)count);
  if ((uintptr_t)data % element_nbytes != 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "%s: %s is not aligned to its %zu-byte elements", entry, what,
                            element_nbytes);
  return count == 0 ? MFSDP_OK
                    : mfsdp__cuda_check_pointer(cuda, entry, what, data, MFSDP_SPACE_DEVICE);
}

/* ---- casts and sums ---- */

MFSDP_API mfsdp_status mfsdp__cuda_cast(void *self, mfsdp_queue *opaque, void *dst,
                                        mfsdp_dtype dst_dtype, const void *src,
                                        mfsdp_dtype src_dtype, int64_t count) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  size_t dst_nbytes, src_nbytes;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "cast", opaque));
  MFSDP_TRY(mfsdp__cuda_check_array(cuda, "cast", "dst", dst, dst_dtype, count, &dst_nbytes));
  MFSDP_TRY(mfsdp__cuda_check_array(cuda, "cast", "src", src, src_dtype, count, &src_nbytes));
  if (mfsdp__cuda_overlap(dst, dst_nbytes, src, src_nbytes))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "cast: dst and src overlap");
  if (count == 0) return MFSDP_OK;
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->cast(mfsdp__cuda_lane(queue), dst, dst_dtype, src, src_dtype, count),
      "cast");
}

MFSDP_API mfsdp_status mfsdp__cuda_check_terms(mfsdp_cuda_backend *cuda, const float *acc,
                                               const void *const *terms, mfsdp_dtype dtype,
                                               int32_t term_count, int64_t count) {
  size_t acc_nbytes, term_nbytes;
  int32_t t;
  MFSDP_TRY(mfsdp__cuda_check_array(cuda, "sum_terms", "acc", acc, MFSDP_F32, count, &acc_nbytes));
  if (term_count < 1)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "sum_terms: term_count is %d, needs at least 1",
                            (int)term_count);
  if (terms == NULL) return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "sum_terms: terms is NULL");
  if (dtype == MFSDP_F64)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED,
                            "sum_terms: terms of dtype f64; needs f32, bf16 or f16");
  for (t = 0; t < term_count; ++t) {
    MFSDP_TRY(
        mfsdp__cuda_check_array(cuda, "sum_terms", "a term", terms[t], dtype, count, &term_nbytes));
    if (mfsdp__cuda_overlap(acc, acc_nbytes, terms[t], term_nbytes))
      return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "sum_terms: term %d overlaps acc", (int)t);
  }
  return MFSDP_OK;
}

/* More terms than one launch takes go on where it stopped: the same chain. */
MFSDP_API mfsdp_status mfsdp__cuda_sum_terms(void *self, mfsdp_queue *opaque, float *acc,
                                             int32_t first, const void *const *terms,
                                             mfsdp_dtype dtype, int32_t term_count, int64_t count) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  int32_t t;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "sum_terms", opaque));
  MFSDP_TRY(mfsdp__cuda_check_terms(cuda, acc, terms, dtype, term_count, count));
  if (count == 0) return MFSDP_OK;
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
  if (block_count < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "sumsq: block_count is %d, needs at least 0",
                            (int)block_count);
  if (block_count == 0) return MFSDP_OK;
  if (slots == NULL || blocks == NULL)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "sumsq: %s is NULL, needs %d blocks",
                            slots == NULL ? "slots" : "blocks", (int)block_count);
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "slots", slots, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "acc", acc, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "sumsq", "blocks", blocks, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(
      cuda, cuda->kernels->sumsq(mfsdp__cuda_lane(queue), slots, acc, blocks, block_count),
      "sumsq");
}

/* ---- verdict ---- */

MFSDP_API mfsdp_status mfsdp__cuda_check_verdict(mfsdp_cuda_backend *cuda,
                                                 const mfsdp_verdict_args *args) {
  if (args->world < 1 || args->group_count < 1)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "verdict_fold: world is %d, group_count is %d; both need at least 1",
                            (int)args->world, (int)args->group_count);
  if (args->block_count < 0 || args->value_capacity < 0 || args->param_count < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "verdict_fold: block_count %lld, value_capacity %d, param_count %d: "
                            "none may be negative",
                            (long long)args->block_count, (int)args->value_capacity,
                            (int)args->param_count);
  if (args->value_count < 0 ||
      (int64_t)args->value_count > (int64_t)args->world * (int64_t)args->value_capacity)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "verdict_fold: value_count is %d, needs 0 to world %d times "
                            "value_capacity %d",
                            (int)args->value_count, (int)args->world, (int)args->value_capacity);
  if (!(args->loss_scale > 0.0))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "verdict_fold: loss_scale is %g, needs to be positive",
                            args->loss_scale);
  if (args->messages == NULL || args->rank_word == NULL || args->rates == NULL ||
      args->scalars == NULL || args->record == NULL ||
      (args->block_count > 0 && args->block_word == NULL) ||
      (args->param_count > 0 && args->present == NULL))
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_ARGUMENT,
        "verdict_fold: messages, rank_word, block_word, rates, present, scalars "
        "or record is NULL");
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "verdict_fold", "messages", args->messages,
                                      MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "verdict_fold", "scalars", args->scalars,
                                      MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_check_pointer(cuda, "verdict_fold", "record", args->record,
                                   MFSDP_SPACE_PINNED);
}

MFSDP_API mfsdp_status mfsdp__cuda_verdict(void *self, mfsdp_queue *opaque,
                                           const mfsdp_verdict_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "verdict_fold", opaque));
  MFSDP_TRY(mfsdp__cuda_check_struct(cuda, "verdict_fold", args, sizeof(*args)));
  MFSDP_TRY(mfsdp__cuda_check_verdict(cuda, args));
  return mfsdp__cuda_launched(cuda, cuda->kernels->verdict(mfsdp__cuda_lane(queue), args),
                              "verdict_fold");
}

/* ---- normalization ---- */

MFSDP_API mfsdp_status mfsdp__cuda_check_normalize(mfsdp_cuda_backend *cuda,
                                                   const mfsdp_normalize_args *args) {
  size_t nbytes;
  if (args->rule != MFSDP_NORM_SCALE_SAFE && args->rule != MFSDP_NORM_MAX_EPS &&
      args->rule != MFSDP_NORM_ADD_EPS)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "normalize: rule is %d, which is none",
                            (int)args->rule);
  if (!(args->eps >= 0.0))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "normalize: eps is %g, needs at least 0",
                            args->eps);
  if (args->batch_count < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "normalize: batch_count is %lld, needs at least 0",
                            (long long)args->batch_count);
  MFSDP_TRY(mfsdp__cuda_check_array(cuda, "normalize", "dst", args->dst, args->dst_dtype,
                                    args->count, &nbytes));
  MFSDP_TRY(mfsdp__cuda_check_array(cuda, "normalize", "src", args->src, MFSDP_F32, args->count,
                                    &nbytes));
  if (args->batch_count > 1 && (args->dst_stride < args->count || args->src_stride < args->count))
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_ARGUMENT, "normalize: strides %lld and %lld; need at least the count %lld",
        (long long)args->dst_stride, (long long)args->src_stride, (long long)args->count);
  if ((const void *)args->dst == (const void *)args->src && args->dst_dtype != MFSDP_F32)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "normalize: in place from f32 to %s",
                            mfsdp_dtype_name(args->dst_dtype));
  if (args->count == 0 || args->batch_count == 0) return MFSDP_OK;
  return mfsdp__cuda_check_array(cuda, "normalize", "scratch", args->scratch, MFSDP_F64, 1,
                                 &nbytes);
}

MFSDP_API mfsdp_status mfsdp__cuda_normalize(void *self, mfsdp_queue *opaque,
                                             const mfsdp_normalize_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "normalize", opaque));
  MFSDP_TRY(mfsdp__cuda_check_struct(cuda, "normalize", args, sizeof(*args)));
  MFSDP_TRY(mfsdp__cuda_check_normalize(cuda, args));
  if (args->count == 0 || args->batch_count == 0) return MFSDP_OK;
  return mfsdp__cuda_launched(cuda, cuda->kernels->normalize(mfsdp__cuda_lane(queue), args),
                              "normalize");
}

/* ---- fused optimizer passes ---- */

MFSDP_API mfsdp_status mfsdp__cuda_fused(void *self, mfsdp_queue *opaque,
                                         const mfsdp_fused_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "fused", opaque));
  MFSDP_TRY(mfsdp__cuda_check_struct(cuda, "fused", args, sizeof(*args)));
  if (args->op != MFSDP_FUSED_ADAMW && args->op != MFSDP_FUSED_MUON_PREPARE &&
      args->op != MFSDP_FUSED_MUON_COMMIT && args->op != MFSDP_FUSED_MUON_ROWS)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED,
                            "fused: op is %d; the CUDA backend has AdamW and Muon", (int)args->op);
  if (args->item_count < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "fused: item_count is %d, needs at least 0",
                            (int)args->item_count);
  if (args->item_count == 0) return MFSDP_OK;
  if (args->items == NULL || args->scalars == NULL)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "fused: %s is NULL",
                            args->items == NULL ? "items" : "scalars");
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "items", args->items, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "scalars", args->scalars, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "fused", "present", args->present, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_launched(cuda, cuda->kernels->fused(mfsdp__cuda_lane(queue), args), "fused");
}

#endif /* MFSDP_CUDA_CUDA_ENTRIES_H */
