/* SPDX-License-Identifier: MIT */
/*
 * fuzz.h: what the fuzz programs share. A broken promise is a trap, which libFuzzer reports with the
 * input that led to it.
 *
 *   fuzz_begin(&rig, text_nbytes);  ... calls with rig.context ...  fuzz_end(&rig);
 *
 * The allocator refuses nothing below 6 times the text and 4 KiB, the promise of read.h and index.h,
 * and traps above it; fuzz_end traps if anything was kept.
 */
#ifndef MFSDP_TESTS_FUZZ_FUZZ_H
#define MFSDP_TESTS_FUZZ_FUZZ_H

#include "mfsdp/safetensors.h"

#define FUZZ_NEED(condition)            \
  do {                                  \
    if (!(condition)) __builtin_trap(); \
  } while (0)

typedef struct fuzz_rig {
  mfsdp_context context;
  size_t live_nbytes, most_nbytes;
} fuzz_rig;

static void *fuzz_alloc(size_t nbytes, size_t alignment, mfsdp_space space, void *user) {
  fuzz_rig *rig = (fuzz_rig *)user;
  (void)alignment;
  (void)space;
  rig->live_nbytes += nbytes;
  FUZZ_NEED(rig->live_nbytes <= rig->most_nbytes);
  return malloc(nbytes);
}

static void fuzz_free(void *ptr, size_t nbytes, mfsdp_space space, void *user) {
  fuzz_rig *rig = (fuzz_rig *)user;
  (void)space;
  FUZZ_NEED(rig->live_nbytes >= nbytes);
  rig->live_nbytes -= nbytes;
  free(ptr);
}

static void fuzz_begin(fuzz_rig *rig, size_t text_nbytes) {
  mfsdp_context_desc desc = mfsdp_context_desc_default();
  rig->live_nbytes = 0;
  rig->most_nbytes = 6 * text_nbytes + 4096;
  desc.allocator.alloc = fuzz_alloc;
  desc.allocator.free = fuzz_free;
  desc.allocator.user = rig;
  FUZZ_NEED(mfsdp_context_init(&rig->context, &desc) == MFSDP_OK);
}

static void fuzz_end(fuzz_rig *rig) {
  FUZZ_NEED(mfsdp_context_destroy(&rig->context) == MFSDP_OK);
  FUZZ_NEED(rig->live_nbytes == 0);
}

/* A refusal says why; success has no fault. */
static void fuzz_check_status(const fuzz_rig *rig, mfsdp_status status,
                              mfsdp_safetensors_fault fault) {
  FUZZ_NEED(status == MFSDP_OK || status == MFSDP_E_FORMAT);
  FUZZ_NEED((status == MFSDP_OK) == (fault == MFSDP_SAFETENSORS_FAULT_NONE));
  if (status != MFSDP_OK)
    FUZZ_NEED(strstr(mfsdp_context_error(&rig->context)->message,
                     fault == MFSDP_SAFETENSORS_FAULT_HEADER_LARGE
                         ? "100000000"
                         : mfsdp_safetensors_fault_text(fault)) != NULL);
}

#endif /* MFSDP_TESTS_FUZZ_FUZZ_H */
