/* SPDX-License-Identifier: MIT */
/* newton_schulz.c - orthogonalizes one matrix on the host, in plain C loops. No ranks, no runtime, no backend.
 * Build: cc -std=c11 -O3 -march=native -fno-math-errno -ffp-contract=off -I. examples/newton_schulz.c -lm */
#include "mfsdp/host/newton_schulz_host.h"

#define ROWS 6
#define COLS 16

int main(void) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default(); /* jordan, five steps */
  float g[ROWS * COLS], out[ROWS * COLS];
  mfsdp_context context; /* for the message; without one, NULL */
  int i, j, k;
  for (i = 0; i < ROWS * COLS; ++i)
    g[i] = (float)(i * i % 37) - 18.0f;
  /* math NULL: C loops; workspace NULL: allocated for the call */
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_host_newton_schulz(&context, NULL, &ns, ROWS, COLS, g, out, NULL, 0) != MFSDP_OK) {
    fprintf(stderr, "newton_schulz: %s\n", mfsdp_context_error(&context)->message);
    return 1;
  }
  puts("out * out^T (jordan leaves singular values of about 0.7 to 1.1, so this is near the "
       "identity):");
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
