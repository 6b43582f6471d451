/* SPDX-License-Identifier: MIT */
/*
 * blas_threads.h - how many threads the BLAS that a program is linked with may use.
 *
 *   mfsdp__blas_set_threads(1);
 *
 * CBLAS and LAPACKE have no call for it. This uses that of OpenBLAS, MKL or BLIS if the program is
 * linked with one, through weak references, and otherwise does nothing.
 *
 * Internal to math_cblas.h and math_lapacke.h. Link flags: none.
 */
#ifndef MFSDP_HOST_BLAS_THREADS_H
#define MFSDP_HOST_BLAS_THREADS_H

#include "../types.h"

#if defined(__cplusplus)
extern "C" {
#endif
/* Names of our own for the vendors' symbols, so that no declaration of theirs can contradict. */
extern void mfsdp__openblas_threads(int count) __asm__("openblas_set_num_threads")
    __attribute__((weak));
extern void mfsdp__mkl_threads(int count) __asm__("MKL_Set_Num_Threads") __attribute__((weak));
extern void mfsdp__blis_threads(int64_t count) __asm__("bli_thread_set_num_threads")
    __attribute__((weak));
#if defined(__cplusplus)
}
#endif

MFSDP_API void mfsdp__blas_set_threads(int count) {
  if (mfsdp__openblas_threads) mfsdp__openblas_threads(count);
  if (mfsdp__mkl_threads) mfsdp__mkl_threads(count);
  if (mfsdp__blis_threads) mfsdp__blis_threads(count);
}

#endif /* MFSDP_HOST_BLAS_THREADS_H */
