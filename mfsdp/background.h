/* SPDX-License-Identifier: MIT */
/*
 * background.h - one piece of host code beside the program, as a table of callbacks.
 *
 *   mfsdp_posix_background thread;
 *   mfsdp_background background = mfsdp_background_posix(&thread);   // posix/background_posix.h
 *   desc.background = &background;                                   // of a checkpoint, say
 *
 * A program may bring its own table: a pool of threads, or a test that holds the work up.
 * Does not: queue (one function at a time), or carry results (the function's argument does).
 * Link flags: none.
 */
#ifndef MFSDP_BACKGROUND_H
#define MFSDP_BACKGROUND_H

#include "context.h"

/* All are required, and called from one thread. */
typedef struct mfsdp_background_ops {
  size_t struct_nbytes;
  const char *name;
  /* Begins function(argument) and returns. Only called when none runs. After a failure none does; it
   * may say why by MFSDP_ERROR_SET(error, ...). */
  mfsdp_status (*start)(void *self, void (*function)(void *argument), void *argument,
                        mfsdp_error *error);
  /* 1 if no function runs: what the last one wrote can be read. Never waits. */
  int32_t (*idle)(void *self);
  /* Waits until no function runs. */
  void (*wait)(void *self);
} mfsdp_background_ops;

typedef struct mfsdp_background {
  size_t struct_nbytes;
  const mfsdp_background_ops *ops;
  void *self;
} mfsdp_background;

/* E_ARGUMENT unless the table is complete. */
MFSDP_API mfsdp_status mfsdp_background_check(mfsdp_context *context,
                                              const mfsdp_background *background) {
  const mfsdp_background_ops *ops = background == NULL ? NULL : background->ops;
  if (ops == NULL || background->struct_nbytes != sizeof(*background) ||
      ops->struct_nbytes < sizeof(*ops) || ops->start == NULL || ops->idle == NULL ||
      ops->wait == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "background: NULL, of another size, or not complete");
  return MFSDP_OK;
}

#endif /* MFSDP_BACKGROUND_H */
