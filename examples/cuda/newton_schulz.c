/* SPDX-License-Identifier: MIT */
/* newton_schulz.c - orthogonalizes one matrix on a GPU, on the program's own stream, in bf16.
 * NOT YET RUN ON HARDWARE; the test suite runs it on its double of CUDA (tests/cli/examples.sh).
 * Build: nvcc -O3 -arch=native -Xcompiler -fvisibility=hidden -I. -c mfsdp/cuda/kernels.cu -o kernels.o
 *        cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -fno-math-errno -ffp-contract=off -I. -I/usr/local/cuda/include \
 *          examples/cuda/newton_schulz.c kernels.o -L/usr/local/cuda/lib64 -lcusolver -lcublas -lcublasLt -lcudart \
 *          -lstdc++ -lpthread -lm */
#include "mfsdp/newton_schulz.h"
#include "mfsdp/cuda/backend_cuda.h"
#include "mfsdp/random.h"

#include <cuda_runtime_api.h>

#define ROWS 48
#define COLS 128
#define NBYTES (ROWS * COLS * sizeof(float))

/* g and out: host memory, ROWS x COLS. */
static mfsdp_status orthogonalize(mfsdp_context *context, mfsdp_cuda_backend *cuda,
                                  cudaStream_t stream, const float *g, float *out) {
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  mfsdp_buffer matrix, workspace;
  mfsdp_queue *queue = NULL;
  mfsdp_event *event = NULL;
  size_t nbytes = 0;
  ns.dtype = MFSDP_BF16; /* products on tensor cores, sums in fp32 */
  MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &ns, ROWS, COLS, &nbytes));
  MFSDP_TRY(
      mfsdp_buffer_alloc(context, b, NBYTES, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &matrix));
  MFSDP_TRY(mfsdp_buffer_alloc(context, b, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_WORKSPACE,
                               &workspace));
  MFSDP_TRY(mfsdp_cuda_queue_wrap(context, cuda, stream, "main", &queue));
  MFSDP_TRY(b->ops->event_create(b->self, context, &event));
  MFSDP_TRY(
      b->ops->copy(b->self, queue, matrix.data, MFSDP_SPACE_DEVICE, g, MFSDP_SPACE_HOST, NBYTES));
  MFSDP_TRY(mfsdp_newton_schulz(context, b, queue, &ns, ROWS, COLS, (const float *)matrix.data,
                                (float *)matrix.data, workspace.data, nbytes));
  MFSDP_TRY(
      b->ops->copy(b->self, queue, out, MFSDP_SPACE_HOST, matrix.data, MFSDP_SPACE_DEVICE, NBYTES));
  MFSDP_TRY(b->ops->event_record(b->self, queue, event));
  MFSDP_TRY(b->ops->event_wait(b->self, context, event, 10000000));
  b->ops->event_destroy(b->self, context, event);
  b->ops->queue_destroy(b->self, context, queue);
  mfsdp_buffer_free(context, b, &workspace);
  mfsdp_buffer_free(context, b, &matrix);
  return MFSDP_OK;
}

static mfsdp_status run(mfsdp_context *context, cudaStream_t stream, const float *g, float *out) {
  const mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default(); /* device 0 */
  mfsdp_cuda_backend *cuda = NULL;
  MFSDP_TRY(mfsdp_cuda_backend_create(context, &desc, &cuda));
  MFSDP_TRY(orthogonalize(context, cuda, stream, g, out));
  return mfsdp_cuda_backend_destroy(context, cuda);
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  static float g[ROWS * COLS], out[ROWS * COLS];
  double smallest = 2.0, largest = 0.0;
  mfsdp_context context;
  cudaStream_t stream;
  int i, k;
  for (i = 0; i < ROWS * COLS; ++i)
    g[i] = mfsdp_random_normal(1, 0, (uint64_t)i);
  if (cudaSetDevice(0) != cudaSuccess ||
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
    fprintf(stderr, "newton_schulz: there is no device\n");
    return 1;
  }
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      run(&context, stream, g, out) != MFSDP_OK) {
    fprintf(stderr, "newton_schulz: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  for (i = 0; i < ROWS; ++i) {
    double norm = 0.0;
    for (k = 0; k < COLS; ++k)
      norm += (double)out[i * COLS + k] * (double)out[i * COLS + k];
    if (norm < smallest) smallest = norm;
    if (norm > largest) largest = norm;
  }
  printf("squared norms of the rows: %.2f to %.2f (jordan: singular values of about 0.7 to 1.1)\n",
         smallest, largest);
  return cudaStreamDestroy(stream) != cudaSuccess;
}
