/* SPDX-License-Identifier: MIT */
/*
 * cuda_dense.h - the CUDA backend's batched matrix product, by cuBLAS.
 *
 * cuBLAS counts by columns: a row-major d = op(a) op(b) is its d^T = op(b)^T op(a)^T, that is, the
 * same product with the operands swapped. Where the result is known to be symmetric, one batched
 * product computes the tiles of its lower triangle, and a kernel mirrors it: of P x P tiles
 * (P + 1) / 2P are computed. P comes from a fixed table, so that results do not depend on where or
 * when a matrix is computed. With beta, c goes elsewhere than d by cublasLtMatmul, without a copy.
 *
 * Internal to backend_cuda.h. Link flags: -lcublas -lcublasLt.
 */
#ifndef MFSDP_CUDA_CUDA_DENSE_H
#define MFSDP_CUDA_CUDA_DENSE_H

#include "cuda_queue.h"

#include <cublasLt.h>

/* Tiles along an edge, and the size from which there are as many; smaller products are computed
 * whole (desc.symmetric_from moves that). Chosen by counting, not measured on hardware. */
#define MFSDP__CUDA_TILES 4
#define MFSDP__CUDA_MORE_TILES_FROM 4096
#define MFSDP__CUDA_MORE_TILES 8
/* Sides of tiles are multiples of it: tensor cores want 16 bytes. */
#define MFSDP__CUDA_TILE_GRAIN 8

/* ---- checks ---- */

MFSDP_API mfsdp_status mfsdp__cuda_check_mat(mfsdp_cuda_backend *cuda, const char *what,
                                             const mfsdp_mat *mat, int64_t rows, int64_t cols,
                                             int64_t batch_count, size_t element_nbytes) {
  int64_t batch_extent, extent;
  if (mat->rows != rows || mat->cols != cols)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "gemm: %s is %lld x %lld, needs %lld x %lld",
                            what, (long long)mat->rows, (long long)mat->cols, (long long)rows,
                            (long long)cols);
  if (rows == 0 || cols == 0 || batch_count == 0) return MFSDP_OK;
  if (mat->row_stride < cols || mat->batch_stride < 0)
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_ARGUMENT,
        "gemm: %s has row_stride %lld and batch_stride %lld; needs at least its "
        "%lld columns, and 0",
        what, (long long)mat->row_stride, (long long)mat->batch_stride, (long long)cols);
  if (!mfsdp_i64_mul(batch_count - 1, mat->batch_stride, &batch_extent) ||
      !mfsdp_i64_mul(rows, mat->row_stride, &extent) ||
      !mfsdp_i64_add(extent, batch_extent, &extent) ||
      !mfsdp_i64_mul(extent, (int64_t)element_nbytes, &extent))
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_OVERFLOW, "gemm: the extent of %s overflows int64", what);
  if (mat->data == NULL || (uintptr_t)mat->data % element_nbytes != 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "gemm: %s is NULL or not aligned to its elements", what);
  return mfsdp__cuda_check_pointer(cuda, "gemm", what, mat->data, MFSDP_SPACE_DEVICE);
}

/* Depth of the sums. */
MFSDP_API int64_t mfsdp__cuda_depth(const mfsdp_gemm_args *args) {
  return args->trans_a ? args->a.rows : args->a.cols;
}

/* The second half of the scratch holds diagonals of 16-bit products. */
#define MFSDP__CUDA_POINTER_COUNT (MFSDP_CUDA_SCRATCH_COUNT / 2)
#define MFSDP__CUDA_DIAGONAL_COUNT MFSDP_CUDA_SCRATCH_COUNT

/* Whether the diagonal has to be computed apart, so that it is rounded once. */
MFSDP_API int mfsdp__cuda_wide_diagonal(const mfsdp_gemm_args *args) {
  return args->diagonal != 0.0f && args->dtype != MFSDP_F32 && mfsdp__cuda_depth(args) > 0;
}

MFSDP_API mfsdp_status mfsdp__cuda_check_result(mfsdp_cuda_backend *cuda,
                                                const mfsdp_gemm_args *args, int64_t m, int64_t n,
                                                size_t nbytes) {
  const mfsdp_mat *c = &args->c, *d = &args->d;
  if (args->beta != 0.0f) {
    MFSDP_TRY(mfsdp__cuda_check_mat(cuda, "c", c, m, n, args->batch_count, nbytes));
    if (c->data == d->data &&
        (c->row_stride != d->row_stride || c->batch_stride != d->batch_stride))
      return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "gemm: c is d, but with other strides");
  }
  if (d->data == args->a.data || d->data == args->b.data)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "gemm: d is %s; the result cannot be in place",
                            d->data == args->a.data ? "a" : "b");
  if (args->batch_count > 1 && d->batch_stride == 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "gemm: d has batch_stride 0: %lld results in one place",
                            (long long)args->batch_count);
  if ((args->symmetric || args->diagonal != 0.0f) && m != n)
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_ARGUMENT, "gemm: %s, but d is %lld x %lld; needs a square",
        args->symmetric ? "symmetric" : "a diagonal", (long long)m, (long long)n);
  if (mfsdp__cuda_wide_diagonal(args) &&
      args->batch_count > MFSDP__CUDA_DIAGONAL_COUNT / (m > 0 ? m : 1))
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_UNSUPPORTED,
        "gemm: a diagonal on %lld products of %lld rows in %s; at most %d rows in "
        "all",
        (long long)args->batch_count, (long long)m, mfsdp_dtype_name(args->dtype),
        MFSDP__CUDA_DIAGONAL_COUNT);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_check_gemm(mfsdp_cuda_backend *cuda,
                                              const mfsdp_gemm_args *args) {
  const int64_t m = args->trans_a ? args->a.cols : args->a.rows, k = mfsdp__cuda_depth(args);
  const int64_t n = args->trans_b ? args->b.rows : args->b.cols;
  const size_t nbytes = mfsdp_dtype_nbytes(args->dtype);
  if (args->dtype != MFSDP_F32 && args->dtype != MFSDP_BF16 && args->dtype != MFSDP_F16)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED,
                            "gemm: dtype %s; the CUDA backend has f32, bf16 and f16",
                            mfsdp_dtype_name(args->dtype));
  if (args->batch_count < 0 || m < 0 || n < 0 || k < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "gemm: %lld products of %lld x %lld x %lld: none may be negative",
                            (long long)args->batch_count, (long long)m, (long long)n, (long long)k);
  MFSDP_TRY(mfsdp__cuda_check_mat(cuda, "a", &args->a, args->a.rows, args->a.cols,
                                  args->batch_count, nbytes));
  MFSDP_TRY(mfsdp__cuda_check_mat(cuda, args->trans_b ? "b (transposed)" : "b", &args->b,
                                  args->trans_b ? n : k, args->trans_b ? k : n, args->batch_count,
                                  nbytes));
  MFSDP_TRY(mfsdp__cuda_check_mat(cuda, "d", &args->d, m, n, args->batch_count, nbytes));
  return m == 0 || n == 0 ? MFSDP_OK : mfsdp__cuda_check_result(cuda, args, m, n, nbytes);
}

/* ---- cuBLAS ---- */

MFSDP_API cudaDataType mfsdp__cuda_data_type(mfsdp_dtype dtype) {
  return dtype == MFSDP_F32 ? CUDA_R_32F : dtype == MFSDP_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

MFSDP_API cublasComputeType_t mfsdp__cuda_compute_type(const mfsdp_cuda_backend *cuda) {
  return cuda->allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

MFSDP_API cublasOperation_t mfsdp__cuda_operation(int32_t trans) {
  return trans ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/* The handle works for this queue. A caller's handle may have been turned elsewhere since. */
MFSDP_API mfsdp_status mfsdp__cuda_turn_blas(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue) {
  if (cuda->owns_blas && cuda->blas_queue == queue) return MFSDP_OK;
  cuda->blas_queue = NULL;
  MFSDP_TRY(mfsdp__cublas_check(cuda->context, cublasSetStream(cuda->blas, queue->stream),
                                "cublasSetStream"));
  /* After the stream, which takes the workspace away. */
  MFSDP_TRY(mfsdp__cublas_check(
      cuda->context, cublasSetWorkspace(cuda->blas, queue->workspace, cuda->workspace_nbytes),
      "cublasSetWorkspace"));
  MFSDP_TRY(mfsdp__cublas_check(cuda->context,
                                cublasSetPointerMode(cuda->blas, CUBLAS_POINTER_MODE_HOST),
                                "cublasSetPointerMode"));
  MFSDP_TRY(mfsdp__cublas_check(
      cuda->context,
      cublasSetMathMode(cuda->blas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
      "cublasSetMathMode"));
  cuda->blas_queue = queue;
  return MFSDP_OK;
}

/* d = alpha op(a) op(b) + beta d, d in place; rows [row, row + rows) of d alone. */
MFSDP_API mfsdp_status mfsdp__cuda_gemm_rows(mfsdp_cuda_backend *cuda, const mfsdp_gemm_args *args,
                                             int64_t row, int64_t rows) {
  const mfsdp_mat *a = &args->a, *b = &args->b, *d = &args->d;
  const size_t nbytes = mfsdp_dtype_nbytes(args->dtype);
  const cudaDataType type = mfsdp__cuda_data_type(args->dtype);
  const char *first =
      (const char *)a->data + (size_t)(row * (args->trans_a ? 1 : a->row_stride)) * nbytes;
  char *result = (char *)d->data + (size_t)(row * d->row_stride) * nbytes;
  return mfsdp__cublas_check(
      cuda->context,
      cublasGemmStridedBatchedEx_64(
          cuda->blas, mfsdp__cuda_operation(args->trans_b), mfsdp__cuda_operation(args->trans_a),
          d->cols, rows, mfsdp__cuda_depth(args), &args->alpha, b->data, type, b->row_stride,
          b->batch_stride, first, type, a->row_stride, a->batch_stride, &args->beta, result, type,
          d->row_stride, d->batch_stride, args->batch_count, mfsdp__cuda_compute_type(cuda),
          CUBLAS_GEMM_DEFAULT),
      "cublasGemmStridedBatchedEx");
}

/* ---- c elsewhere than d ---- */

MFSDP_API cublasStatus_t mfsdp__cuda_layout(cublasLtMatrixLayoutOpaque_t *layout,
                                            const mfsdp_mat *mat, mfsdp_dtype dtype,
                                            int64_t batch_count) {
  const int32_t count = (int32_t)batch_count;
  cublasStatus_t status =
      cublasLtMatrixLayoutInit(layout, mfsdp__cuda_data_type(dtype), (uint64_t)mat->cols,
                               (uint64_t)mat->rows, mat->row_stride);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                              sizeof(count));
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                              &mat->batch_stride, sizeof(mat->batch_stride));
  return status;
}

MFSDP_API mfsdp_status mfsdp__cuda_gemm_apart(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                              const mfsdp_gemm_args *args) {
  cublasLtMatrixLayoutOpaque_t a, b, c, d;
  cublasLtMatmulDescOpaque_t desc;
  const int32_t left = (int32_t)mfsdp__cuda_operation(args->trans_b);
  const int32_t right = (int32_t)mfsdp__cuda_operation(args->trans_a);
  cublasStatus_t status;
  if (args->batch_count > INT32_MAX)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED, "gemm: %lld products at once",
                            (long long)args->batch_count);
  status = cublasLtMatmulDescInit(&desc, mfsdp__cuda_compute_type(cuda), CUDA_R_32F);
  if (status == CUBLAS_STATUS_SUCCESS)
    status =
        cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSA, &left, sizeof(left));
  if (status == CUBLAS_STATUS_SUCCESS)
    status =
        cublasLtMatmulDescSetAttribute(&desc, CUBLASLT_MATMUL_DESC_TRANSB, &right, sizeof(right));
  if (status == CUBLAS_STATUS_SUCCESS)
    status = mfsdp__cuda_layout(&a, &args->a, args->dtype, args->batch_count);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = mfsdp__cuda_layout(&b, &args->b, args->dtype, args->batch_count);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = mfsdp__cuda_layout(&c, &args->c, args->dtype, args->batch_count);
  if (status == CUBLAS_STATUS_SUCCESS)
    status = mfsdp__cuda_layout(&d, &args->d, args->dtype, args->batch_count);
  MFSDP_TRY(mfsdp__cublas_check(cuda->context, status, "cublasLt descriptions"));
  /* A handle of cuBLAS is one of cublasLt. */
  return mfsdp__cublas_check(
      cuda->context,
      cublasLtMatmul((cublasLtHandle_t)cuda->blas, &desc, &args->alpha, args->b.data, &b,
                     args->a.data, &a, &args->beta, args->c.data, &c, args->d.data, &d, NULL,
                     queue->workspace, cuda->workspace_nbytes, queue->stream),
      "cublasLtMatmul");
}

/* ---- symmetric results ---- */

/* Side of the tiles of an n x n result, 0: computed whole. */
MFSDP_API int64_t mfsdp__cuda_tile_side(const mfsdp_cuda_backend *cuda, int64_t n, int32_t *tiles) {
  *tiles = n >= MFSDP__CUDA_MORE_TILES_FROM ? MFSDP__CUDA_MORE_TILES : MFSDP__CUDA_TILES;
  return n < cuda->symmetric_from ? 0
                                  : n / *tiles / MFSDP__CUDA_TILE_GRAIN * MFSDP__CUDA_TILE_GRAIN;
}

/* Tiles of matrices [first, first + count), whose pointers fit into the scratch. */
MFSDP_API mfsdp_status mfsdp__cuda_gemm_some_tiles(mfsdp_cuda_backend *cuda,
                                                   mfsdp__cuda_queue *queue,
                                                   const mfsdp_gemm_args *args, int64_t first,
                                                   int64_t count, int64_t side, int32_t tiles) {
  const int64_t products = count * tiles * (tiles + 1) / 2;
  const cudaDataType type = mfsdp__cuda_data_type(args->dtype);
  void **pointers = (void **)(void *)queue->lane.scratch;
  MFSDP_TRY(mfsdp__cuda_launched(
      cuda, cuda->kernels->tile_pointers(&queue->lane, args, pointers, first, count, side, tiles),
      "gemm"));
  return mfsdp__cublas_check(
      cuda->context,
      cublasGemmBatchedEx_64(
          cuda->blas, mfsdp__cuda_operation(args->trans_b), mfsdp__cuda_operation(args->trans_a),
          side, side, mfsdp__cuda_depth(args), &args->alpha,
          (const void *const *)(const void *)pointers, type, args->b.row_stride,
          (const void *const *)(const void *)(pointers + products), type, args->a.row_stride,
          &args->beta, pointers + 2 * products, type, args->d.row_stride, products,
          mfsdp__cuda_compute_type(cuda), CUBLAS_GEMM_DEFAULT),
      "cublasGemmBatchedEx");
}

/* The lower triangle by tiles, the rows that are left over whole, then the mirror. */
MFSDP_API mfsdp_status mfsdp__cuda_gemm_tiles(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                              const mfsdp_gemm_args *args, int64_t side,
                                              int32_t tiles) {
  const int64_t most = MFSDP__CUDA_POINTER_COUNT / 3 / (tiles * (tiles + 1) / 2);
  const int64_t n = args->d.rows, whole = side * tiles;
  int64_t first;
  if (args->beta != 0.0f && args->c.data != args->d.data)
    MFSDP_TRY(mfsdp__cuda_launched(cuda, cuda->kernels->copy_lower(&queue->lane, args), "gemm"));
  for (first = 0; first < args->batch_count; first += most) {
    const int64_t rest = args->batch_count - first;
    MFSDP_TRY(mfsdp__cuda_gemm_some_tiles(cuda, queue, args, first, rest < most ? rest : most, side,
                                          tiles));
  }
  if (whole < n) MFSDP_TRY(mfsdp__cuda_gemm_rows(cuda, args, whole, n - whole));
  return mfsdp__cuda_launched(cuda, cuda->kernels->mirror(&queue->lane, args), "gemm");
}

/* ---- the entry ---- */

MFSDP_API mfsdp_status mfsdp__cuda_gemm_run(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                            const mfsdp_gemm_args *args) {
  int32_t tiles;
  const int64_t side = args->symmetric ? mfsdp__cuda_tile_side(cuda, args->d.rows, &tiles) : 0;
  float *diagonal = (float *)(void *)(queue->lane.scratch + MFSDP__CUDA_POINTER_COUNT);
  const int wide = mfsdp__cuda_wide_diagonal(args);
  if (wide)
    MFSDP_TRY(mfsdp__cuda_launched(
        cuda, cuda->kernels->diagonal_values(&queue->lane, args, diagonal), "gemm"));
  MFSDP_TRY(mfsdp__cuda_turn_blas(cuda, queue));
  if (side > 0)
    MFSDP_TRY(mfsdp__cuda_gemm_tiles(cuda, queue, args, side, tiles));
  else if (args->beta != 0.0f && args->c.data != args->d.data)
    MFSDP_TRY(mfsdp__cuda_gemm_apart(cuda, queue, args));
  else
    MFSDP_TRY(mfsdp__cuda_gemm_rows(cuda, args, 0, args->d.rows));
  if (args->diagonal == 0.0f) return MFSDP_OK;
  return mfsdp__cuda_launched(cuda,
                              wide ? cuda->kernels->diagonal_store(&queue->lane, args, diagonal)
                                   : cuda->kernels->add_diagonal(&queue->lane, args),
                              "gemm");
}

MFSDP_API mfsdp_status mfsdp__cuda_gemm(void *self, mfsdp_queue *opaque,
                                        const mfsdp_gemm_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "gemm", opaque));
  MFSDP_TRY(mfsdp__cuda_check_struct(cuda, "gemm", args, sizeof(*args)));
  MFSDP_TRY(mfsdp__cuda_check_gemm(cuda, args));
  if (args->d.rows == 0 || args->d.cols == 0 || args->batch_count == 0) return MFSDP_OK;
  (void)mfsdp__cuda_lane(queue);
  if (mfsdp__cuda_depth(args) == 0) /* cuBLAS says nothing of empty sums */
    return mfsdp__cuda_launched(cuda, cuda->kernels->scale(&queue->lane, args), "gemm");
  return mfsdp__cuda_gemm_run(cuda, queue, args);
}

#endif /* MFSDP_CUDA_CUDA_DENSE_H */
