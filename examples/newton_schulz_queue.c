/* SPDX-License-Identifier: MIT */
/* newton_schulz_queue.c - orthogonalizes one matrix on the queue of a host backend: a thread works while the program
 * goes on. The same calls run on a GPU with another backend (cuda/newton_schulz.c).
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O3 -march=native -fno-math-errno -ffp-contract=off \
 *           -I. examples/newton_schulz_queue.c -lpthread -lm */
#include "mfsdp/host/backend_host.h"
#include "mfsdp/newton_schulz.h"

#define ROWS 24
#define COLS 96

static float g[ROWS * COLS], out[ROWS * COLS]; /* DEVICE memory, which here is any memory */

/* What the program does meanwhile: anything that leaves g, out and the workspace alone. */
static void report(void) {
  printf("enqueued, and the program goes on\n");
}

static mfsdp_status orthogonalize(mfsdp_context *context, const mfsdp_backend *b) {
  const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_POLAR_EXPRESS);
  mfsdp_buffer workspace;
  mfsdp_queue *queue = NULL;
  mfsdp_event *event = NULL;
  size_t nbytes = 0;
  MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &ns, ROWS, COLS, &nbytes));
  MFSDP_TRY(mfsdp_buffer_alloc(context, b, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_WORKSPACE,
                               &workspace));
  MFSDP_TRY(b->ops->queue_create(b->self, context, "main", &queue));
  MFSDP_TRY(b->ops->event_create(b->self, context, &event));
  MFSDP_TRY(
      mfsdp_newton_schulz(context, b, queue, &ns, ROWS, COLS, g, out, workspace.data, nbytes));
  MFSDP_TRY(b->ops->event_record(b->self, queue, event));
  report();
  MFSDP_TRY(b->ops->event_wait(b->self, context, event, 10000000)); /* `out` is there now */
  b->ops->event_destroy(b->self, context, event);
  b->ops->queue_destroy(b->self, context, queue);
  mfsdp_buffer_free(context, b, &workspace);
  return MFSDP_OK;
}

static mfsdp_status run(mfsdp_context *context) {
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default(); /* C loops */
  mfsdp_host_backend *host = NULL;
  desc.queue_kind = MFSDP_HOST_QUEUE_WORKER; /* a thread; the default runs within each call */
  MFSDP_TRY(mfsdp_host_backend_create(context, &desc, &host));
  MFSDP_TRY(orthogonalize(context, mfsdp_host_backend_get(host)));
  return mfsdp_host_backend_destroy(context, host);
}

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  double smallest = 2.0, largest = 0.0;
  mfsdp_context context;
  int i, k;
  for (i = 0; i < ROWS * COLS; ++i)
    g[i] = (float)(i * i % 1009) - 504.0f;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK || run(&context) != MFSDP_OK) {
    fprintf(stderr, "newton_schulz_queue: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  for (i = 0; i < ROWS; ++i) {
    double norm = 0.0;
    for (k = 0; k < COLS; ++k)
      norm += (double)out[i * COLS + k] * (double)out[i * COLS + k];
    if (norm < smallest) smallest = norm;
    if (norm > largest) largest = norm;
  }
  printf("squared norms of the rows: %.2f to %.2f (1 if they were orthonormal)\n", smallest,
         largest);
  return 0;
}
