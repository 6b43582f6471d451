/* SPDX-License-Identifier: MIT */
/* newton_schulz.c - orthogonalizes one matrix on the host, in plain C loops. No ranks, no runtime.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno -ffp-contract=off -I. \
 *           examples/newton_schulz.c -lpthread -lm */
#include "mfsdp/newton_schulz.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/random.h"

#define ROWS 6
#define COLS 16

static mfsdp_status orthogonalize(mfsdp_context *context, const mfsdp_backend *b, const float *g,
                                  float *out) {
  const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  mfsdp_queue *queue = NULL;
  mfsdp_event *event = NULL;
  mfsdp_buffer workspace;
  size_t nbytes = 0;
  MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &ns, ROWS, COLS, &nbytes));
  MFSDP_TRY(mfsdp_buffer_alloc(context, b, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_WORKSPACE,
                               &workspace));
  MFSDP_TRY(b->ops->queue_create(b->self, context, "main", &queue));
  MFSDP_TRY(b->ops->event_create(b->self, context, &event));
  MFSDP_TRY(
      mfsdp_newton_schulz(context, b, queue, &ns, ROWS, COLS, g, out, workspace.data, nbytes));
  MFSDP_TRY(b->ops->event_record(b->self, queue, event));
  MFSDP_TRY(b->ops->event_wait(b->self, context, event, 1000000));
  b->ops->event_destroy(b->self, context, event);
  b->ops->queue_destroy(b->self, context, queue);
  mfsdp_buffer_free(context, b, &workspace);
  return MFSDP_OK;
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default(); /* math NULL: C loops */
  float g[ROWS * COLS], out[ROWS * COLS];
  mfsdp_host_backend *host = NULL;
  mfsdp_context context;
  int i, j, k;
  for (i = 0; i < ROWS * COLS; ++i)
    g[i] = mfsdp_random_normal(1, 0, (uint64_t)i);
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_host_backend_create(&context, &desc, &host) != MFSDP_OK ||
      orthogonalize(&context, mfsdp_host_backend_get(host), g, out) != MFSDP_OK ||
      mfsdp_host_backend_destroy(&context, host) != MFSDP_OK) {
    fprintf(stderr, "newton_schulz: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  puts("out * out^T (jordan leaves singular values of about 0.7 to 1.1, so this is near the identity):");
  for (i = 0; i < ROWS; ++i) {
    for (j = 0; j < ROWS; ++j) {
      double dot = 0.0;
      for (k = 0; k < COLS; ++k)
        dot += (double)out[i * COLS + k] * (double)out[j * COLS + k];
      printf(" %7.3f", dot);
    }
    puts("");
  }
  return 0;
}
