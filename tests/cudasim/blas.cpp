/* SPDX-License-Identifier: MIT */
/* cuBLAS and cuBLASLt of the double: column-major products, float sums, checked extents. */
#include "cudasim.h"
#include "detail.h"

#include "mfsdp/dtype.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace cudasim {
namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  void *workspace = nullptr; /* of the caller; forgotten when the stream is set */
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};

/* One column-major product: d = alpha op(a) op(b) + beta c. */
struct Product {
  bool trans_a = false, trans_b = false;
  int64_t m = 0, n = 0, k = 0, lda = 0, ldb = 0, ldc = 0, ldd = 0;
  float alpha = 0.0f, beta = 0.0f;
  mfsdp_dtype dtype = MFSDP_F32;
  bool tf32 = false;
};

bool dtype_of(cudaDataType type, mfsdp_dtype *out) {
  switch (type) {
  case CUDA_R_32F: *out = MFSDP_F32; return true;
  case CUDA_R_16BF: *out = MFSDP_BF16; return true;
  case CUDA_R_16F: *out = MFSDP_F16; return true;
  default: return false;
  }
}

/* As tensor cores read a float: ten bits of mantissa, to nearest. */
float as_tf32(float x) {
  uint32_t bits = mfsdp_bits_from_f32(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  bits += 0xfffu + ((bits >> 13) & 1u);
  return mfsdp_f32_from_bits(bits & ~0x1fffu);
}

float load(const void *data, mfsdp_dtype dtype, int64_t index) {
  if (dtype == MFSDP_F32) return static_cast<const float *>(data)[index];
  const uint16_t half = static_cast<const uint16_t *>(data)[index];
  return dtype == MFSDP_BF16 ? mfsdp_f32_from_bf16(half) : mfsdp_f32_from_f16(half);
}

void store(void *data, mfsdp_dtype dtype, int64_t index, float value) {
  if (dtype == MFSDP_F32)
    static_cast<float *>(data)[index] = value;
  else
    static_cast<uint16_t *>(data)[index] =
        dtype == MFSDP_BF16 ? mfsdp_bf16_from_f32(value) : mfsdp_f16_from_f32(value);
}

/* op(x) as rows x cols floats, columns together. */
std::vector<float> widen(const void *x, mfsdp_dtype dtype, bool tf32, bool trans, int64_t ld,
                         int64_t rows, int64_t cols) {
  std::vector<float> out(static_cast<std::size_t>(rows * cols));
  float *to = out.data();
  if (dtype == MFSDP_F32 && !tf32 && !trans) {
    for (int64_t j = 0; j < cols; ++j)
      std::memcpy(to + j * rows, static_cast<const float *>(x) + j * ld,
                  static_cast<std::size_t>(rows) * sizeof(float));
    return out;
  }
  for (int64_t j = 0; j < cols; ++j)
    for (int64_t i = 0; i < rows; ++i) {
      const float value = load(x, dtype, trans ? i * ld + j : j * ld + i);
      to[j * rows + i] = tf32 ? as_tf32(value) : value;
    }
  return out;
}

/* On memory of its own, which nobody need watch; fast, since it does most of the work of a test. */
#if defined(__clang__)
__attribute__((noinline, no_sanitize("address", "thread", "undefined")))
#else
__attribute__((noinline, optimize("O3"), no_sanitize("address", "thread", "undefined")))
#endif
void multiply_column(float *sum, const float *a, const float *b, int64_t m, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    sum[i] = 0.0f;
  for (int64_t l = 0; l < k; ++l) {
    const float *from = a + l * m;
    const float factor = b[l];
    for (int64_t i = 0; i < m; ++i)
      sum[i] += from[i] * factor;
  }
}

void multiply(const Product &p, const void *a, const void *b, const void *c, void *d) {
  const std::vector<float> wide_a = widen(a, p.dtype, p.tf32, p.trans_a, p.lda, p.m, p.k);
  const std::vector<float> wide_b = widen(b, p.dtype, p.tf32, p.trans_b, p.ldb, p.k, p.n);
  std::vector<float> column(static_cast<std::size_t>(p.m));
  for (int64_t j = 0; j < p.n; ++j) {
    float *sum = column.data();
    multiply_column(sum, wide_a.data(), wide_b.data() + j * p.k, p.m, p.k);
    for (int64_t i = 0; i < p.m; ++i) {
      float value = p.alpha * sum[i];
      if (p.beta != 0.0f) value += p.beta * load(c, p.dtype, j * p.ldc + i);
      store(d, p.dtype, j * p.ldd + i, value);
    }
  }
}

std::size_t extent_nbytes(const Product &p, int64_t rows, int64_t cols, int64_t ld) {
  return rows == 0 || cols == 0
             ? 0
             : static_cast<std::size_t>((cols - 1) * ld + rows) * mfsdp_dtype_nbytes(p.dtype);
}

bool overlap(const void *x, std::size_t x_nbytes, const void *y, std::size_t y_nbytes) {
  const uintptr_t a = reinterpret_cast<uintptr_t>(x), b = reinterpret_cast<uintptr_t>(y);
  return x_nbytes > 0 && y_nbytes > 0 && a < b + y_nbytes && b < a + x_nbytes;
}

/* Whether a product's matrices lie where they may. */
bool placed(const Product &p, const void *a, const void *b, const void *c, const void *d) {
  const std::size_t a_nbytes =
      p.trans_a ? extent_nbytes(p, p.k, p.m, p.lda) : extent_nbytes(p, p.m, p.k, p.lda);
  const std::size_t b_nbytes =
      p.trans_b ? extent_nbytes(p, p.n, p.k, p.ldb) : extent_nbytes(p, p.k, p.n, p.ldb);
  const std::size_t d_nbytes = extent_nbytes(p, p.m, p.n, p.ldd);
  bool good = in_device("cuBLAS, A", a, a_nbytes);
  good = in_device("cuBLAS, B", b, b_nbytes) && good;
  good = in_device("cuBLAS, C", d, d_nbytes) && good;
  if (p.beta != 0.0f) good = in_device("cuBLAS, C", c, extent_nbytes(p, p.m, p.n, p.ldc)) && good;
  if (!good) return false;
  if (!overlap(d, d_nbytes, a, a_nbytes) && !overlap(d, d_nbytes, b, b_nbytes)) return true;
  complain("cuBLAS: the result overlaps an operand");
  return false;
}

bool leading_dimensions_fit(const Product &p) {
  const int64_t a_rows = p.trans_a ? p.k : p.m, b_rows = p.trans_b ? p.n : p.k;
  const int64_t one = 1;
  if (p.m < 0 || p.n < 0 || p.k < 0) return false;
  return p.lda >= (a_rows > one ? a_rows : one) && p.ldb >= (b_rows > one ? b_rows : one) &&
         p.ldc >= (p.m > one ? p.m : one) && p.ldd >= (p.m > one ? p.m : one);
}

const void *step(const void *data, mfsdp_dtype dtype, int64_t elements) {
  return static_cast<const char *>(data) +
         elements * static_cast<int64_t>(mfsdp_dtype_nbytes(dtype));
}

/* What the calls of cuBLAS have in common; CUBLAS_STATUS_SUCCESS, and *p, if they are right. */
cublasStatus_t check(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                     int64_t m, int64_t n, int64_t k, const void *alpha, cudaDataType a_type,
                     int64_t lda, cudaDataType b_type, int64_t ldb, const void *beta,
                     cudaDataType c_type, int64_t ldc, int64_t batch_count,
                     cublasComputeType_t compute, Product *p) {
  const Handle *h = reinterpret_cast<Handle *>(handle);
  if (h == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (delivers_fault()) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (!dtype_of(a_type, &p->dtype) || a_type != b_type || a_type != c_type ||
      (compute != CUBLAS_COMPUTE_32F &&
       (compute != CUBLAS_COMPUTE_32F_FAST_TF32 || p->dtype != MFSDP_F32)))
    return CUBLAS_STATUS_NOT_SUPPORTED; /* of TF32 cuBLAS knows floats alone */
  p->trans_a = transa == CUBLAS_OP_T;
  p->trans_b = transb == CUBLAS_OP_T;
  p->m = m;
  p->n = n;
  p->k = k;
  p->lda = lda;
  p->ldb = ldb;
  p->ldc = p->ldd = ldc;
  p->tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p->dtype == MFSDP_F32;
  if (batch_count < 0 || !leading_dimensions_fit(*p)) return CUBLAS_STATUS_INVALID_VALUE;
  if (h->pointer_mode != CUBLAS_POINTER_MODE_HOST)
    complain("cuBLAS: scalars in device memory, but host memory was given");
  if (h->workspace == nullptr) complain("cuBLAS: no workspace was set since the stream was");
  std::memcpy(&p->alpha, alpha, sizeof(float));
  std::memcpy(&p->beta, beta, sizeof(float));
  return CUBLAS_STATUS_SUCCESS;
}

struct Layout { /* kept in the opaque struct of cublasLt */
  cudaDataType type;
  uint64_t rows, cols;
  int64_t ld, batch_stride;
  int32_t batch_count;
};
struct Desc {
  cublasComputeType_t compute;
  int32_t trans_a, trans_b;
};

template <class T, class Opaque> T read_opaque(const Opaque *opaque) {
  T out;
  static_assert(sizeof(T) <= sizeof(*opaque), "it has to fit");
  std::memcpy(static_cast<void *>(&out), opaque, sizeof(T));
  return out;
}

} // namespace
} // namespace cudasim

using namespace cudasim;

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  if (delivers_fault()) return CUBLAS_STATUS_ALLOC_FAILED;
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete reinterpret_cast<Handle *>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  if (delivers_fault()) return CUBLAS_STATUS_NOT_INITIALIZED;
  reinterpret_cast<Handle *>(handle)->stream = stream;
  reinterpret_cast<Handle *>(handle)->workspace = nullptr;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t nbytes) {
  if (delivers_fault()) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!in_device("cublasSetWorkspace", workspace, nbytes) ||
      reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  reinterpret_cast<Handle *>(handle)->workspace = workspace;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  if (delivers_fault()) return CUBLAS_STATUS_NOT_INITIALIZED;
  reinterpret_cast<Handle *>(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  (void)handle;
  if (delivers_fault()) return CUBLAS_STATUS_NOT_INITIALIZED;
  if ((mode & CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) == 0)
    complain("cuBLAS may round partial sums to 16 bits");
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
  case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
  case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
  case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
  case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
  case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
  case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  default: return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int64_t m, int64_t n,
    int64_t k, const void *alpha, const void *a, cudaDataType a_type, int64_t lda,
    long long int a_stride, const void *b, cudaDataType b_type, int64_t ldb, long long int b_stride,
    const void *beta, void *c, cudaDataType c_type, int64_t ldc, long long int c_stride,
    int64_t batch_count, cublasComputeType_t compute, cublasGemmAlgo_t algo) {
  Product p;
  (void)algo;
  const cublasStatus_t status = check(handle, transa, transb, m, n, k, alpha, a_type, lda, b_type,
                                      ldb, beta, c_type, ldc, batch_count, compute, &p);
  if (status != CUBLAS_STATUS_SUCCESS || batch_count == 0 || m == 0 || n == 0) return status;
  for (int64_t i = 0; i < batch_count; ++i) {
    const void *ci = step(c, p.dtype, i * c_stride);
    if (!placed(p, step(a, p.dtype, i * a_stride), step(b, p.dtype, i * b_stride), ci, ci))
      return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const cudaError_t error = enqueue(reinterpret_cast<Handle *>(handle)->stream, [=] {
    for (int64_t i = 0; i < batch_count; ++i) {
      void *ci = const_cast<void *>(step(c, p.dtype, i * c_stride));
      multiply(p, step(a, p.dtype, i * a_stride), step(b, p.dtype, i * b_stride), ci, ci);
    }
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasGemmBatchedEx_64(cublasHandle_t handle, cublasOperation_t transa,
                                      cublasOperation_t transb, int64_t m, int64_t n, int64_t k,
                                      const void *alpha, const void *const a[], cudaDataType a_type,
                                      int64_t lda, const void *const b[], cudaDataType b_type,
                                      int64_t ldb, const void *beta, void *const c[],
                                      cudaDataType c_type, int64_t ldc, int64_t batch_count,
                                      cublasComputeType_t compute, cublasGemmAlgo_t algo) {
  Product p;
  (void)algo;
  const std::size_t nbytes = static_cast<std::size_t>(batch_count) * sizeof(void *);
  const cublasStatus_t status = check(handle, transa, transb, m, n, k, alpha, a_type, lda, b_type,
                                      ldb, beta, c_type, ldc, batch_count, compute, &p);
  if (status != CUBLAS_STATUS_SUCCESS || batch_count == 0 || m == 0 || n == 0) return status;
  if (!in_device("cuBLAS, table of A", a, nbytes) || !in_device("cuBLAS, table of B", b, nbytes) ||
      !in_device("cuBLAS, table of C", c, nbytes))
    return CUBLAS_STATUS_EXECUTION_FAILED;
  const cudaError_t error = enqueue(reinterpret_cast<Handle *>(handle)->stream, [=] {
    for (int64_t i = 0; i < batch_count; ++i)
      if (placed(p, a[i], b[i], c[i], c[i])) {
        if ((reinterpret_cast<uintptr_t>(a[i]) | reinterpret_cast<uintptr_t>(b[i]) |
             reinterpret_cast<uintptr_t>(c[i])) %
                16 !=
            0)
          complain("cublasGemmBatchedEx: a matrix is not aligned to 16 bytes");
        multiply(p, a[i], b[i], c[i], c[i]);
      }
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

/* ---- cublasLt ---- */

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  const Layout made = {type, rows, cols, ld, 0, 1};
  if (delivers_fault() || size < sizeof(made)) return CUBLAS_STATUS_ALLOC_FAILED;
  std::memset(layout, 0, size);
  std::memcpy(static_cast<void *>(layout), &made, sizeof(made));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t nbytes) {
  Layout made = read_opaque<Layout>(layout);
  if (delivers_fault()) return CUBLAS_STATUS_INVALID_VALUE;
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && nbytes == sizeof(int32_t))
    std::memcpy(&made.batch_count, value, nbytes);
  else if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET && nbytes == sizeof(int64_t))
    std::memcpy(&made.batch_stride, value, nbytes);
  else
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(static_cast<void *>(layout), &made, sizeof(made));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                               cublasComputeType_t compute,
                                               cudaDataType_t scale_type) {
  const Desc made = {compute, CUBLAS_OP_N, CUBLAS_OP_N};
  if (delivers_fault() || size < sizeof(made)) return CUBLAS_STATUS_ALLOC_FAILED;
  if (scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  std::memset(desc, 0, size);
  std::memcpy(static_cast<void *>(desc), &made, sizeof(made));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t nbytes) {
  Desc made = read_opaque<Desc>(desc);
  if (delivers_fault() || nbytes != sizeof(int32_t)) return CUBLAS_STATUS_INVALID_VALUE;
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
    std::memcpy(&made.trans_a, value, nbytes);
  else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB)
    std::memcpy(&made.trans_b, value, nbytes);
  else
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(static_cast<void *>(desc), &made, sizeof(made));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                              cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                              cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_nbytes, cudaStream_t stream) {
  const Desc operation = read_opaque<Desc>(desc);
  const Layout la = read_opaque<Layout>(a_layout), lb = read_opaque<Layout>(b_layout);
  const Layout lc = read_opaque<Layout>(c_layout), ld = read_opaque<Layout>(d_layout);
  Product p;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (delivers_fault()) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (!dtype_of(la.type, &p.dtype) || lb.type != la.type || lc.type != la.type ||
      ld.type != la.type ||
      (operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p.dtype != MFSDP_F32))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  /* The search that algo NULL stands for takes as much for granted. */
  for (const void *x : {a, b, c, static_cast<const void *>(d)})
    if (reinterpret_cast<uintptr_t>(x) % 256 != 0 && algo == nullptr)
      complain("cublasLtMatmul: a matrix is not aligned to 256 bytes");
  p.trans_a = operation.trans_a == CUBLAS_OP_T;
  p.trans_b = operation.trans_b == CUBLAS_OP_T;
  p.m = static_cast<int64_t>(ld.rows);
  p.n = static_cast<int64_t>(ld.cols);
  p.k = static_cast<int64_t>(p.trans_a ? la.rows : la.cols);
  p.lda = la.ld;
  p.ldb = lb.ld;
  p.ldc = lc.ld;
  p.ldd = ld.ld;
  p.tf32 = operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32 && p.dtype == MFSDP_F32;
  if (static_cast<int64_t>(p.trans_a ? la.cols : la.rows) != p.m ||
      static_cast<int64_t>(p.trans_b ? lb.rows : lb.cols) != p.n ||
      static_cast<int64_t>(p.trans_b ? lb.cols : lb.rows) != p.k || lc.rows != ld.rows ||
      lc.cols != ld.cols || la.batch_count != ld.batch_count || lb.batch_count != ld.batch_count ||
      lc.batch_count != ld.batch_count || !leading_dimensions_fit(p) ||
      !in_device("cublasLtMatmul, workspace", workspace, workspace_nbytes))
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&p.alpha, alpha, sizeof(float));
  std::memcpy(&p.beta, beta, sizeof(float));
  for (int64_t i = 0; i < ld.batch_count; ++i)
    if (!placed(p, step(a, p.dtype, i * la.batch_stride), step(b, p.dtype, i * lb.batch_stride),
                step(c, p.dtype, i * lc.batch_stride), step(d, p.dtype, i * ld.batch_stride)))
      return CUBLAS_STATUS_EXECUTION_FAILED;
  const cudaError_t error = enqueue(stream, [=] {
    for (int64_t i = 0; i < ld.batch_count; ++i)
      multiply(p, step(a, p.dtype, i * la.batch_stride), step(b, p.dtype, i * lb.batch_stride),
               step(c, p.dtype, i * lc.batch_stride),
               const_cast<void *>(step(d, p.dtype, i * ld.batch_stride)));
  });
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // extern "C"
