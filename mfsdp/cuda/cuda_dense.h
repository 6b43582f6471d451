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
 * Both need memory that is aligned, as all that the library allocates is: batched products by pointers
 * want 16 bytes, and cublasLt, if nobody tells it otherwise, takes 256 for granted. What is not is
 * computed whole, or from a copy of c.
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

/* What is this backend's own. */
MFSDP_API mfsdp_status mfsdp__cuda_check_gemm(mfsdp_cuda_backend *cuda,
                                              const mfsdp_gemm_args *args) {
  const int64_t rows = args->d.rows;
  if (mfsdp__cuda_wide_diagonal(args) &&
      args->batch_count > MFSDP__CUDA_DIAGONAL_COUNT / (rows > 0 ? rows : 1))
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_UNSUPPORTED,
        "gemm: a diagonal on %lld products of %lld rows in %s; at most %d rows in "
        "all",
        (long long)args->batch_count, (long long)rows, mfsdp_dtype_name(args->dtype),
        MFSDP__CUDA_DIAGONAL_COUNT);
  if (mfsdp__cuda_depth(args) > 0) {
    MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "gemm", "a", args->a.data, MFSDP_SPACE_DEVICE));
    MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "gemm", args->trans_b ? "b (transposed)" : "b",
                                        args->b.data, MFSDP_SPACE_DEVICE));
  }
  if (args->beta != 0.0f)
    MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "gemm", "c", args->c.data, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_check_pointer(cuda, "gemm", "d", args->d.data, MFSDP_SPACE_DEVICE);
}

/* ---- cuBLAS ---- */

MFSDP_API cudaDataType mfsdp__cuda_data_type(mfsdp_dtype dtype) {
  return dtype == MFSDP_F32 ? CUDA_R_32F : dtype == MFSDP_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* cuBLAS knows TF32 for floats alone. */
MFSDP_API cublasComputeType_t mfsdp__cuda_compute_type(const mfsdp_cuda_backend *cuda,
                                                       mfsdp_dtype dtype) {
  return cuda->allow_tf32 && dtype == MFSDP_F32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
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
          d->row_stride, d->batch_stride, args->batch_count,
          mfsdp__cuda_compute_type(cuda, args->dtype), CUBLAS_GEMM_DEFAULT),
      "cublasGemmStridedBatchedEx");
}

/* Whether the matrices of a product start on multiples of nbytes; c: with beta. packed: and those of a
 * batch in which they lie one behind the other, whether there is one or not, so that a matrix in a batch
 * goes the same way as alone. */
MFSDP_API int mfsdp__cuda_mats_aligned(const mfsdp_gemm_args *args, uintptr_t nbytes, int packed) {
  const uintptr_t element_nbytes = mfsdp_dtype_nbytes(args->dtype);
  const mfsdp_mat *mats[4];
  int i;
  mats[0] = &args->a;
  mats[1] = &args->b;
  mats[2] = &args->d;
  mats[3] = args->beta != 0.0f ? &args->c : &args->d;
  for (i = 0; i < 4; ++i) {
    const mfsdp_mat *mat = mats[i];
    if ((uintptr_t)mat->data % nbytes != 0) return 0;
    if (packed &&
        ((uintptr_t)mat->rows * (uintptr_t)mat->row_stride * element_nbytes % nbytes != 0 ||
         (args->batch_count > 1 && (uintptr_t)mat->batch_stride * element_nbytes % nbytes != 0)))
      return 0;
  }
  return 1;
}

/* ---- c elsewhere than d ---- */

/* d = c, by the kernel that scales and adds: times 1, and nothing. */
MFSDP_API mfsdp_status mfsdp__cuda_gemm_copied(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                               const mfsdp_gemm_args *args) {
  mfsdp_gemm_args copy = *args;
  copy.beta = 1.0f;
  copy.diagonal = 0.0f;
  MFSDP_TRY(mfsdp__cuda_launched(cuda, cuda->kernels->scale(&queue->lane, &copy), "gemm"));
  return mfsdp__cuda_gemm_rows(cuda, args, 0, args->d.rows);
}

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
  if (!mfsdp__cuda_mats_aligned(args, 256, 0)) return mfsdp__cuda_gemm_copied(cuda, queue, args);
  if (args->batch_count > INT32_MAX)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_UNSUPPORTED, "gemm: %lld products at once",
                            (long long)args->batch_count);
  status = cublasLtMatmulDescInit(&desc, mfsdp__cuda_compute_type(cuda, args->dtype), CUDA_R_32F);
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
          mfsdp__cuda_compute_type(cuda, args->dtype), CUBLAS_GEMM_DEFAULT),
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
  int32_t tiles = 0;
  const int64_t side = args->symmetric && mfsdp__cuda_mats_aligned(args, 16, 1)
                           ? mfsdp__cuda_tile_side(cuda, args->d.rows, &tiles)
                           : 0;
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
  MFSDP_TRY(mfsdp__check_gemm(cuda->context, "CUDA", args));
  if (args->d.rows == 0 || args->d.cols == 0 || args->batch_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_gemm(cuda, args));
  (void)mfsdp__cuda_lane(queue);
  if (mfsdp__cuda_depth(args) == 0) /* cuBLAS says nothing of empty sums */
    return mfsdp__cuda_launched(cuda, cuda->kernels->scale(&queue->lane, args), "gemm");
  return mfsdp__cuda_gemm_run(cuda, queue, args);
}

#endif /* MFSDP_CUDA_CUDA_DENSE_H */
