/* SPDX-License-Identifier: MIT */
/*
 * backend_check.h - the checks of arguments that every backend makes before it does anything, with their
 * messages: for whoever writes one. host/backend_host.h and cuda/backend_cuda.h are written with it.
 *
 *   MFSDP_TRY(mfsdp__check_queue(context, "cast", queue));
 *   MFSDP_TRY(mfsdp__check_cast(context, dst, dst_dtype, src, src_dtype, count));
 *   if (count == 0) return MFSDP_OK;                       // legal, and nothing to do
 *
 * E_ARGUMENT, E_UNSUPPORTED or E_OVERFLOW, recorded in the context; nothing is read behind a pointer that
 * may be DEVICE memory. `backend` is the name that a message gives the backend.
 * Does not: know what one backend cannot do, or where memory lies. Link flags: none.
 */
#ifndef MFSDP_BACKEND_CHECK_H
#define MFSDP_BACKEND_CHECK_H

#include "backend.h"

/* ---- what several entries share ---- */

MFSDP_API int mfsdp__space_ok(mfsdp_space space) {
  return space == MFSDP_SPACE_DEVICE || space == MFSDP_SPACE_PINNED || space == MFSDP_SPACE_HOST;
}

/* An empty range overlaps nothing. */
MFSDP_API int mfsdp__overlap(const void *a, size_t a_nbytes, const void *b, size_t b_nbytes) {
  return a_nbytes > 0 && b_nbytes > 0 && !mfsdp_ranges_apart(a, a_nbytes, b, b_nbytes);
}

MFSDP_API mfsdp_status mfsdp__check_queue(mfsdp_context *context, const char *entry,
                                          const mfsdp_queue *queue) {
  if (queue == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: queue is NULL", entry);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_struct(mfsdp_context *context, const char *entry,
                                           const void *args, size_t struct_nbytes) {
  size_t given;
  if (args == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: args is NULL", entry);
  memcpy(&given, args, sizeof(given)); /* the first member of every description */
  if (given != struct_nbytes)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: args.struct_nbytes is %zu, needs %zu", entry,
                      given, struct_nbytes);
  return MFSDP_OK;
}

/* An array of `count` elements: known dtype, count that fits, pointer present and aligned. */
MFSDP_API mfsdp_status mfsdp__check_array(mfsdp_context *context, const char *entry,
                                          const char *what, const void *data, mfsdp_dtype dtype,
                                          int64_t count, size_t *nbytes) {
  const size_t element_nbytes = mfsdp_dtype_nbytes(dtype);
  *nbytes = 0;
  if (element_nbytes == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: the dtype of %s is %d, which is none", entry,
                      what, (int)dtype);
  if (count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: count is %lld, needs at least 0", entry,
                      (long long)count);
  if (!mfsdp_elements_nbytes(count, dtype, nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: %lld elements of %s overflow size_t", entry,
                      (long long)count, what);
  if (count > 0 && data == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL, needs %lld elements", entry, what,
                      (long long)count);
  if ((uintptr_t)data % element_nbytes != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is not aligned to its %zu-byte elements",
                      entry, what, element_nbytes);
  return MFSDP_OK;
}

/* ---- memory, copies, fills ---- */

/* *out is NULL behind it. */
MFSDP_API mfsdp_status mfsdp__check_alloc(mfsdp_context *context, size_t nbytes, size_t alignment,
                                          mfsdp_space space, void **out) {
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mem_alloc: out is NULL");
  *out = NULL;
  if (nbytes == 0 || alignment == 0 || (alignment & (alignment - 1)) != 0)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "mem_alloc: %zu bytes aligned to %zu; needs at least 1 byte and a power of two", nbytes,
        alignment);
  if (!mfsdp__space_ok(space))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "mem_alloc: space is %d, which is none",
                      (int)space);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_copy(mfsdp_context *context, const void *dst,
                                         mfsdp_space dst_space, const void *src,
                                         mfsdp_space src_space, size_t nbytes) {
  if (!mfsdp__space_ok(dst_space) || !mfsdp__space_ok(src_space))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "copy: from space %d to space %d: not a space",
                      (int)src_space, (int)dst_space);
  if (nbytes == 0) return MFSDP_OK;
  if (dst == NULL || src == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "copy: %s is NULL, needs %zu bytes",
                      dst == NULL ? "dst" : "src", nbytes);
  if (mfsdp__overlap(dst, nbytes, src, nbytes))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "copy: dst and src overlap in their %zu bytes",
                      nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_fill(mfsdp_context *context, const void *dst, int32_t byte,
                                         size_t nbytes) {
  if (byte < 0 || byte > 255)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "fill_bytes: byte is %d, needs 0 to 255",
                      (int)byte);
  if (nbytes > 0 && dst == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "fill_bytes: dst is NULL, needs %zu bytes",
                      nbytes);
  return MFSDP_OK;
}

/* ---- casts and sums ---- */

MFSDP_API mfsdp_status mfsdp__check_cast(mfsdp_context *context, const void *dst,
                                         mfsdp_dtype dst_dtype, const void *src,
                                         mfsdp_dtype src_dtype, int64_t count) {
  size_t dst_nbytes, src_nbytes;
  MFSDP_TRY(mfsdp__check_array(context, "cast", "dst", dst, dst_dtype, count, &dst_nbytes));
  MFSDP_TRY(mfsdp__check_array(context, "cast", "src", src, src_dtype, count, &src_nbytes));
  if (mfsdp__overlap(dst, dst_nbytes, src, src_nbytes))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cast: dst and src overlap");
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_terms(mfsdp_context *context, const float *acc,
                                          const void *const *terms, mfsdp_dtype dtype,
                                          int32_t term_count, int64_t count) {
  size_t acc_nbytes, term_nbytes;
  int32_t t;
  MFSDP_TRY(mfsdp__check_array(context, "sum_terms", "acc", acc, MFSDP_F32, count, &acc_nbytes));
  if (term_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "sum_terms: term_count is %d, needs at least 1",
                      (int)term_count);
  if (terms == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "sum_terms: terms is NULL");
  if (dtype == MFSDP_F64)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "sum_terms: terms of dtype f64; needs f32, bf16 or f16");
  for (t = 0; t < term_count; ++t) {
    MFSDP_TRY(
        mfsdp__check_array(context, "sum_terms", "a term", terms[t], dtype, count, &term_nbytes));
    if (mfsdp__overlap(acc, acc_nbytes, terms[t], term_nbytes))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "sum_terms: term %d overlaps acc", (int)t);
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_sumsq(mfsdp_context *context, const double *slots,
                                          const mfsdp_block *blocks, int32_t block_count) {
  if (block_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "sumsq: block_count is %d, needs at least 0",
                      (int)block_count);
  if (block_count > 0 && (slots == NULL || blocks == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "sumsq: %s is NULL, needs %d blocks",
                      slots == NULL ? "slots" : "blocks", (int)block_count);
  return MFSDP_OK;
}

/* ---- verdict ---- */

MFSDP_API mfsdp_status mfsdp__check_verdict(mfsdp_context *context,
                                            const mfsdp_verdict_args *args) {
  MFSDP_TRY(mfsdp__check_struct(context, "verdict_fold", args, sizeof(*args)));
  if (args->world < 1 || args->group_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "verdict_fold: world is %d, group_count is %d; both need at least 1",
                      (int)args->world, (int)args->group_count);
  if (args->block_count < 0 || args->value_capacity < 0 || args->param_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "verdict_fold: block_count %lld, value_capacity %d, param_count %d: "
                      "none may be negative",
                      (long long)args->block_count, (int)args->value_capacity,
                      (int)args->param_count);
  if (args->value_count < 0 ||
      (int64_t)args->value_count > (int64_t)args->world * (int64_t)args->value_capacity)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "verdict_fold: value_count is %d, needs 0 to world %d times "
                      "value_capacity %d",
                      (int)args->value_count, (int)args->world, (int)args->value_capacity);
  if (!(args->loss_scale > 0.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "verdict_fold: loss_scale is %g, needs to be positive", args->loss_scale);
  if (args->messages == NULL || args->rank_word == NULL || args->rates == NULL ||
      args->scalars == NULL || args->record == NULL ||
      (args->block_count > 0 && args->block_word == NULL) ||
      (args->param_count > 0 && args->present == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "verdict_fold: messages, rank_word, block_word, rates, present, scalars "
                      "or record is NULL");
  return MFSDP_OK;
}

/* ---- dense ---- */

MFSDP_API mfsdp_status mfsdp__check_mat(mfsdp_context *context, const char *what,
                                        const mfsdp_mat *mat, int64_t rows, int64_t cols,
                                        int64_t batch_count, size_t element_nbytes) {
  const int64_t small = INT64_C(1) << 28;
  int64_t batch_extent, extent;
  if (mat->rows != rows || mat->cols != cols)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "gemm: %s is %lld x %lld, needs %lld x %lld", what,
                      (long long)mat->rows, (long long)mat->cols, (long long)rows, (long long)cols);
  if (rows == 0 || cols == 0 || batch_count == 0) return MFSDP_OK;
  if (mat->row_stride < cols || mat->batch_stride < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "gemm: %s has row_stride %lld and batch_stride %lld; needs at least its "
                      "%lld columns, and 0",
                      what, (long long)mat->row_stride, (long long)mat->batch_stride,
                      (long long)cols);
  if ((rows > small || mat->row_stride > small || batch_count > small ||
       mat->batch_stride > small) && /* no product of two of them overflows otherwise */
      (!mfsdp_i64_mul(batch_count - 1, mat->batch_stride, &batch_extent) ||
       !mfsdp_i64_mul(rows, mat->row_stride, &extent) ||
       !mfsdp_i64_add(extent, batch_extent, &extent) ||
       !mfsdp_i64_mul(extent, (int64_t)element_nbytes, &extent)))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "gemm: the extent of %s overflows int64", what);
  if (mat->data == NULL || (uintptr_t)mat->data % element_nbytes != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "gemm: %s is NULL or not aligned to its elements",
                      what);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_result(mfsdp_context *context, const mfsdp_gemm_args *args,
                                           int64_t m, int64_t n, size_t element_nbytes) {
  const mfsdp_mat *c = &args->c, *d = &args->d;
  if (args->beta != 0.0f) {
    MFSDP_TRY(mfsdp__check_mat(context, "c", c, m, n, args->batch_count, element_nbytes));
    if (c->data == d->data &&
        (c->row_stride != d->row_stride || c->batch_stride != d->batch_stride))
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "gemm: c is d, but with other strides");
  }
  if (d->data == args->a.data || d->data == args->b.data)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "gemm: d is %s; the result cannot be in place",
                      d->data == args->a.data ? "a" : "b");
  if (args->batch_count > 1 && d->batch_stride == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "gemm: d has batch_stride 0: %lld results in one place",
                      (long long)args->batch_count);
  if ((args->symmetric || args->diagonal != 0.0f) && m != n)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "gemm: %s, but d is %lld x %lld; needs a square",
                      args->symmetric ? "symmetric" : "a diagonal", (long long)m, (long long)n);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__check_gemm(mfsdp_context *context, const char *backend,
                                         const mfsdp_gemm_args *args) {
  const mfsdp_mat *a, *b;
  int64_t m, n, k, count;
  size_t nbytes;
  MFSDP_TRY(mfsdp__check_struct(context, "gemm", args, sizeof(*args)));
  a = &args->a;
  b = &args->b;
  m = args->trans_a ? a->cols : a->rows;
  k = args->trans_a ? a->rows : a->cols;
  n = args->trans_b ? b->rows : b->cols;
  count = args->batch_count;
  nbytes = mfsdp_dtype_nbytes(args->dtype);
  if (args->dtype != MFSDP_F32 && args->dtype != MFSDP_BF16 && args->dtype != MFSDP_F16)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "gemm: dtype %s; the %s backend has f32, bf16 and f16",
                      mfsdp_dtype_name(args->dtype), backend);
  if (count < 0 || m < 0 || n < 0 || k < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "gemm: %lld products of %lld x %lld x %lld: none may be negative",
                      (long long)count, (long long)m, (long long)n, (long long)k);
  MFSDP_TRY(mfsdp__check_mat(context, "a", a, a->rows, a->cols, count, nbytes));
  MFSDP_TRY(mfsdp__check_mat(context, args->trans_b ? "b (transposed)" : "b", b,
                             args->trans_b ? n : k, args->trans_b ? k : n, count, nbytes));
  MFSDP_TRY(mfsdp__check_mat(context, "d", &args->d, m, n, count, nbytes));
  return m == 0 || n == 0 ? MFSDP_OK : mfsdp__check_result(context, args, m, n, nbytes);
}

MFSDP_API mfsdp_status mfsdp__check_normalize(mfsdp_context *context,
                                              const mfsdp_normalize_args *args) {
  size_t nbytes;
  MFSDP_TRY(mfsdp__check_struct(context, "normalize", args, sizeof(*args)));
  if (args->rule != MFSDP_NORM_SCALE_SAFE && args->rule != MFSDP_NORM_MAX_EPS &&
      args->rule != MFSDP_NORM_ADD_EPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "normalize: rule is %d, which is none",
                      (int)args->rule);
  if (!(args->eps >= 0.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "normalize: eps is %g, needs at least 0",
                      args->eps);
  if (args->batch_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "normalize: batch_count is %lld, needs at least 0",
                      (long long)args->batch_count);
  MFSDP_TRY(mfsdp__check_array(context, "normalize", "dst", args->dst, args->dst_dtype, args->count,
                               &nbytes));
  MFSDP_TRY(
      mfsdp__check_array(context, "normalize", "src", args->src, MFSDP_F32, args->count, &nbytes));
  if (args->batch_count > 1 && (args->dst_stride < args->count || args->src_stride < args->count))
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT, "normalize: strides %lld and %lld; need at least the count %lld",
        (long long)args->dst_stride, (long long)args->src_stride, (long long)args->count);
  if ((const void *)args->dst == (const void *)args->src && args->dst_dtype != MFSDP_F32)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "normalize: in place from f32 to %s",
                      mfsdp_dtype_name(args->dst_dtype));
  return MFSDP_OK;
}

/* ---- fused optimizer passes ---- */

MFSDP_API mfsdp_status mfsdp__check_fused(mfsdp_context *context, const char *backend,
                                          const mfsdp_fused_args *args) {
  MFSDP_TRY(mfsdp__check_struct(context, "fused", args, sizeof(*args)));
  if (args->op != MFSDP_FUSED_ADAMW && args->op != MFSDP_FUSED_MUON_PREPARE &&
      args->op != MFSDP_FUSED_MUON_COMMIT && args->op != MFSDP_FUSED_MUON_ROWS)
    return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED,
                      "fused: op is %d; the %s backend has AdamW and Muon", (int)args->op, backend);
  if (args->item_count < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "fused: item_count is %d, needs at least 0",
                      (int)args->item_count);
  if (args->item_count > 0 && (args->items == NULL || args->scalars == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "fused: %s is NULL",
                      args->items == NULL ? "items" : "scalars");
  return MFSDP_OK;
}

#endif /* MFSDP_BACKEND_CHECK_H */
