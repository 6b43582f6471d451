/* SPDX-License-Identifier: MIT */
/*
 * clock.h - monotonic microseconds, deadlines and sleeping.
 *
 *   const int64_t deadline_us = mfsdp_clock_deadline_us(timeout_us);
 *   while (!ready(x))
 *     if (mfsdp_clock_us() >= deadline_us) return MFSDP_E_TIMEOUT;
 *
 * Needs POSIX 2008, which headers show only when asked for. gcc and clang ask by default
 * (-std=gnu11, any C++). With -std=c11 pass -D_POSIX_C_SOURCE=200809L: a #define in a source file
 * works only before its first #include.
 *
 * Does not: know the time of day. Link flags: none (glibc before 2.17: -lrt).
 */
#ifndef MFSDP_POSIX_CLOCK_H
#define MFSDP_POSIX_CLOCK_H

#include "../config.h"

#include <errno.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#if !defined(_POSIX_VERSION) || !defined(CLOCK_MONOTONIC)
#error \
    "matrixfsdp: posix/ and host/ need POSIX 2008: compile with -D_POSIX_C_SOURCE=200809L or -std=gnu11"
#elif _POSIX_VERSION < 200809L
#error \
    "matrixfsdp: posix/ and host/ need POSIX 2008: compile with -D_POSIX_C_SOURCE=200809L or -std=gnu11"
#endif

/* A deadline that never comes. */
#define MFSDP_DEADLINE_NEVER_US INT64_MAX

/* Microseconds since some fixed moment; never goes back; the same clock for all threads. */
MFSDP_API int64_t mfsdp_clock_us(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000 + (int64_t)now.tv_nsec / 1000;
}

/* The moment timeout_us from now; a timeout too long for the clock is MFSDP_DEADLINE_NEVER_US, and
 * one of 0 or less has passed already. */
MFSDP_API int64_t mfsdp_clock_deadline_us(int64_t timeout_us) {
  const int64_t now_us = mfsdp_clock_us();
  if (timeout_us <= 0) return now_us;
  return timeout_us > INT64_MAX - now_us ? MFSDP_DEADLINE_NEVER_US : now_us + timeout_us;
}

/* deadline_us >= 0 as the absolute time that POSIX waits take. */
MFSDP_API struct timespec mfsdp__clock_timespec(int64_t deadline_us) {
  struct timespec at;
  at.tv_sec = (time_t)(deadline_us / 1000000);
  at.tv_nsec = (long)(deadline_us % 1000000) * 1000;
  return at;
}

/* Sleeps until deadline_us of mfsdp_clock_us(), signals or not; returns at once if it has passed.
 */
MFSDP_API void mfsdp_clock_sleep_until(int64_t deadline_us) {
  struct timespec at;
  if (deadline_us <= 0) return;
  at = mfsdp__clock_timespec(deadline_us);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
  }
}

#endif /* MFSDP_POSIX_CLOCK_H */
