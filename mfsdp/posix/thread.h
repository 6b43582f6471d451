/* SPDX-License-Identifier: MIT */
/*
 * thread.h - pthread mutexes, condition variables with monotonic deadlines, threads.
 *
 *   mfsdp_mutex_lock(&mutex);
 *   while (!ready)
 *     if (!mfsdp_cond_wait_until(&cond, &mutex, deadline_us)) { timed_out = 1; break; }
 *   mfsdp_mutex_unlock(&mutex);
 *
 * Objects are the caller's, must not move while they live, and need no memory but their own.
 * Does not: report errors that only a broken program meets (locking twice, destroying what is
 * held). Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_THREAD_H
#define MFSDP_POSIX_THREAD_H

#include "../status.h"
#include "clock.h"

#include <pthread.h>
#include <signal.h>

typedef struct mfsdp_mutex {
  pthread_mutex_t handle;
} mfsdp_mutex;

typedef struct mfsdp_cond {
  pthread_cond_t handle;
} mfsdp_cond;

typedef struct mfsdp_thread {
  pthread_t handle;
  void (*function)(void *argument);
  void *argument;
} mfsdp_thread;

MFSDP_API mfsdp_status mfsdp__posix_status(int error) {
  if (error == 0) return MFSDP_OK;
  return error == ENOMEM || error == EAGAIN ? MFSDP_E_MEMORY : MFSDP_E_IO;
}

/* E_MEMORY or E_IO when the system refuses. */
MFSDP_API mfsdp_status mfsdp_mutex_init(mfsdp_mutex *mutex) {
  return mfsdp__posix_status(pthread_mutex_init(&mutex->handle, NULL));
}

/* Ends a mutex that nobody holds. */
MFSDP_API void mfsdp_mutex_destroy(mfsdp_mutex *mutex) {
  (void)pthread_mutex_destroy(&mutex->handle);
}

/* Waits for the mutex; not recursive. */
MFSDP_API void mfsdp_mutex_lock(mfsdp_mutex *mutex) {
  (void)pthread_mutex_lock(&mutex->handle);
}

/* Gives it back, on the thread that locked it. */
MFSDP_API void mfsdp_mutex_unlock(mfsdp_mutex *mutex) {
  (void)pthread_mutex_unlock(&mutex->handle);
}

/* A condition variable whose deadlines are those of mfsdp_clock_us(). E_MEMORY or E_IO. */
MFSDP_API mfsdp_status mfsdp_cond_init(mfsdp_cond *cond) {
  pthread_condattr_t attributes;
  int error = pthread_condattr_init(&attributes);
  if (error != 0) return mfsdp__posix_status(error);
  error = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  if (error == 0) error = pthread_cond_init(&cond->handle, &attributes);
  (void)pthread_condattr_destroy(&attributes);
  return mfsdp__posix_status(error);
}

/* Ends a condition variable that nobody waits for. */
MFSDP_API void mfsdp_cond_destroy(mfsdp_cond *cond) {
  (void)pthread_cond_destroy(&cond->handle);
}

/* Wakes one waiter. The mutex may be held or not. */
MFSDP_API void mfsdp_cond_signal(mfsdp_cond *cond) {
  (void)pthread_cond_signal(&cond->handle);
}

/* Wakes all waiters. */
MFSDP_API void mfsdp_cond_broadcast(mfsdp_cond *cond) {
  (void)pthread_cond_broadcast(&cond->handle);
}

/* Waits, with `mutex` held, for a wake-up, which may be spurious: call it in a loop that tests the
 * condition. MFSDP_DEADLINE_NEVER_US waits for ever. Returns 0 if the deadline has passed, else 1.
 */
MFSDP_API int mfsdp_cond_wait_until(mfsdp_cond *cond, mfsdp_mutex *mutex, int64_t deadline_us) {
  struct timespec at;
  if (deadline_us == MFSDP_DEADLINE_NEVER_US) {
    (void)pthread_cond_wait(&cond->handle, &mutex->handle);
    return 1;
  }
  if (deadline_us <= 0) return 0;
  at = mfsdp__clock_timespec(deadline_us);
  return pthread_cond_timedwait(&cond->handle, &mutex->handle, &at) != ETIMEDOUT;
}

MFSDP_API void *mfsdp__thread_main(void *argument) {
  mfsdp_thread *thread = (mfsdp_thread *)argument;
  thread->function(thread->argument);
  return NULL;
}

/*
 * Runs function(argument) in a new thread. *thread must stay in place until mfsdp_thread_join.
 * Signals from outside (Ctrl-C, timers) stay with the threads that the program already had; those
 * that a thread causes itself (SIGSEGV, SIGFPE, ...) it still gets. E_MEMORY or E_IO.
 */
MFSDP_API mfsdp_status mfsdp_thread_start(mfsdp_thread *thread, void (*function)(void *argument),
                                          void *argument) {
  sigset_t blocked, before;
  int error;
  thread->function = function;
  thread->argument = argument;
  (void)sigfillset(&blocked);
  (void)sigdelset(&blocked, SIGSEGV);
  (void)sigdelset(&blocked, SIGBUS);
  (void)sigdelset(&blocked, SIGFPE);
  (void)sigdelset(&blocked, SIGILL);
  (void)sigdelset(&blocked, SIGABRT);
  (void)sigdelset(&blocked, SIGTRAP);
  (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
  error = pthread_create(&thread->handle, NULL, mfsdp__thread_main, thread);
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
  return mfsdp__posix_status(error);
}

/* Waits until the thread has ended. Once per started thread. */
MFSDP_API void mfsdp_thread_join(mfsdp_thread *thread) {
  (void)pthread_join(thread->handle, NULL);
}

#endif /* MFSDP_POSIX_THREAD_H */
