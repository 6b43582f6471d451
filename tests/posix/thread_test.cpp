/* SPDX-License-Identifier: MIT */
#include "mfsdp/posix/background_posix.h"
#include "mfsdp/posix/thread.h"

#include <gtest/gtest.h>

#include <csignal>

namespace {

struct Shared {
  mfsdp_mutex mutex;
  mfsdp_cond cond;
  int count = 0;
  Shared() {
    EXPECT_EQ(mfsdp_mutex_init(&mutex), MFSDP_OK);
    EXPECT_EQ(mfsdp_cond_init(&cond), MFSDP_OK);
  }
  ~Shared() {
    mfsdp_cond_destroy(&cond);
    mfsdp_mutex_destroy(&mutex);
  }
};

void add_thousand(void *argument) {
  Shared *shared = static_cast<Shared *>(argument);
  for (int i = 0; i < 1000; ++i) {
    mfsdp_mutex_lock(&shared->mutex);
    ++shared->count;
    mfsdp_cond_broadcast(&shared->cond);
    mfsdp_mutex_unlock(&shared->mutex);
  }
}

TEST(Thread, MutexAndConditionVariable) {
  Shared shared;
  mfsdp_thread threads[3];
  for (mfsdp_thread &thread : threads)
    ASSERT_EQ(mfsdp_thread_start(&thread, add_thousand, &shared), MFSDP_OK);
  mfsdp_mutex_lock(&shared.mutex);
  while (shared.count < 3000)
    EXPECT_EQ(mfsdp_cond_wait_until(&shared.cond, &shared.mutex, MFSDP_DEADLINE_NEVER_US), 1);
  mfsdp_mutex_unlock(&shared.mutex);
  for (mfsdp_thread &thread : threads)
    mfsdp_thread_join(&thread);
  EXPECT_EQ(shared.count, 3000);
}

TEST(Thread, WaitEndsAtTheDeadlineOfTheMonotonicClock) {
  Shared shared;
  const int64_t deadline_us = mfsdp_clock_us() + 20000;
  mfsdp_mutex_lock(&shared.mutex);
  while (mfsdp_cond_wait_until(&shared.cond, &shared.mutex, deadline_us)) {
  }
  EXPECT_GE(mfsdp_clock_us(), deadline_us);
  /* A deadline in the past, on this clock (a wall-clock wait would sleep for decades or not at
   * all). */
  EXPECT_EQ(mfsdp_cond_wait_until(&shared.cond, &shared.mutex, deadline_us), 0);
  EXPECT_EQ(mfsdp_cond_wait_until(&shared.cond, &shared.mutex, 0), 0);
  EXPECT_EQ(mfsdp_cond_wait_until(&shared.cond, &shared.mutex, -5), 0);
  mfsdp_mutex_unlock(&shared.mutex);
}

void look_at_mask(void *argument) {
  sigset_t mask;
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &mask), 0);
  int *blocked = static_cast<int *>(argument);
  blocked[0] = sigismember(&mask, SIGINT);
  blocked[1] = sigismember(&mask, SIGTERM);
  blocked[2] = sigismember(&mask, SIGSEGV);
}

TEST(Thread, LeavesSignalsFromOutsideToTheProgramsOwnThreads) {
  int blocked[3] = {-1, -1, -1};
  mfsdp_thread thread;
  ASSERT_EQ(mfsdp_thread_start(&thread, look_at_mask, blocked), MFSDP_OK);
  mfsdp_thread_join(&thread);
  EXPECT_EQ(blocked[0], 1);
  EXPECT_EQ(blocked[1], 1);
  EXPECT_EQ(blocked[2], 0);
  sigset_t mask;
  ASSERT_EQ(pthread_sigmask(SIG_SETMASK, nullptr, &mask), 0);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0);
}

TEST(Thread, SystemErrorsBecomeStatuses) {
  EXPECT_EQ(mfsdp__posix_status(0), MFSDP_OK);
  EXPECT_EQ(mfsdp__posix_status(EAGAIN), MFSDP_E_MEMORY);
  EXPECT_EQ(mfsdp__posix_status(ENOMEM), MFSDP_E_MEMORY);
  EXPECT_EQ(mfsdp__posix_status(EPERM), MFSDP_E_IO);
}

/* background_posix.h: what the work wrote is there once it is idle, however that was found out. */
TEST(Thread, BackgroundRunsOneFunctionAfterAnother) {
  Shared shared;
  mfsdp_posix_background thread;
  const mfsdp_background background = mfsdp_background_posix(&thread);
  mfsdp_error error = mfsdp_error_none();
  EXPECT_EQ(background.ops->idle(background.self), 1);
  background.ops->wait(background.self);
  for (int i = 1; i <= 4; ++i) {
    mfsdp_mutex_lock(&shared.mutex); /* it cannot get on */
    ASSERT_EQ(background.ops->start(background.self, add_thousand, &shared, &error), MFSDP_OK);
    EXPECT_EQ(background.ops->idle(background.self), 0);
    mfsdp_mutex_unlock(&shared.mutex);
    if (i % 2 == 0) background.ops->wait(background.self);
    while (background.ops->idle(background.self) == 0) {
    }
    EXPECT_EQ(shared.count, 1000 * i);
  }
}

} // namespace
