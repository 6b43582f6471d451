/* SPDX-License-Identifier: MIT */
/*
 * background_posix.h - background.h as a thread for each piece of work.
 *
 *   mfsdp_posix_background thread;                       // stays in place while it is used
 *   mfsdp_background background = mfsdp_background_posix(&thread);
 *
 * Does not: hold memory of its own; the thread's stack is the system's.
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_BACKGROUND_POSIX_H
#define MFSDP_POSIX_BACKGROUND_POSIX_H

#include "../background.h"
#include "thread.h"

typedef struct mfsdp_posix_background {
  mfsdp_thread thread;
  void (*function)(void *argument);
  void *argument;
  int32_t started;  /* and not joined: the user's side alone looks at it */
  int32_t returned; /* atomic */
} mfsdp_posix_background;

MFSDP_API void mfsdp__posix_background_main(void *argument) {
  mfsdp_posix_background *self = (mfsdp_posix_background *)argument;
  self->function(self->argument);
  __atomic_store_n(&self->returned, 1, __ATOMIC_RELEASE);
}

MFSDP_API mfsdp_status mfsdp__posix_background_start(void *user, void (*function)(void *argument),
                                                     void *argument, mfsdp_error *error) {
  mfsdp_posix_background *self = (mfsdp_posix_background *)user;
  mfsdp_status status;
  self->function = function;
  self->argument = argument;
  __atomic_store_n(&self->returned, 0, __ATOMIC_RELAXED);
  status = mfsdp_thread_start(&self->thread, mfsdp__posix_background_main, self);
  self->started = status == MFSDP_OK;
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_ERROR_SET(error, status, -1, "the system refused a thread");
}

MFSDP_API void mfsdp__posix_background_wait(void *user) {
  mfsdp_posix_background *self = (mfsdp_posix_background *)user;
  if (self->started) mfsdp_thread_join(&self->thread);
  self->started = 0;
}

MFSDP_API int32_t mfsdp__posix_background_idle(void *user) {
  mfsdp_posix_background *self = (mfsdp_posix_background *)user;
  if (!self->started) return 1;
  if (!__atomic_load_n(&self->returned, __ATOMIC_ACQUIRE)) return 0;
  mfsdp__posix_background_wait(self); /* it is at its very end */
  return 1;
}

/* *thread is set up, and belongs to what is returned: one user. */
MFSDP_API mfsdp_background mfsdp_background_posix(mfsdp_posix_background *thread) {
  static const mfsdp_background_ops ops = {
      sizeof(mfsdp_background_ops), "posix", mfsdp__posix_background_start,
      mfsdp__posix_background_idle, mfsdp__posix_background_wait};
  mfsdp_background background;
  memset(thread, 0, sizeof(*thread));
  memset(&background, 0, sizeof(background));
  background.struct_nbytes = sizeof(background);
  background.ops = &ops;
  background.self = thread;
  return background;
}

#endif /* MFSDP_POSIX_BACKGROUND_POSIX_H */
