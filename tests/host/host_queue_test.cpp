/* SPDX-License-Identifier: MIT */
/* MFSDP_TEST_WRAP_MALLOC */
#include "mfsdp/host/host_queue.h"

#include "tests/support/backend_rig.h"
#include "tests/support/malloc_count.h"

#include <atomic>

namespace {

using test::Rig;
using test::RigKind;

class HostQueue : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, HostQueue, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

RigKind worker_kind() {
  RigKind kind = {"worker", mfsdp_host_math_loops(), MFSDP_HOST_QUEUE_WORKER, false};
  return kind;
}

mfsdp_status note_call(void *argument, mfsdp_error *error) {
  (void)error;
  static_cast<std::atomic<int> *>(argument)->fetch_add(1);
  return MFSDP_OK;
}

mfsdp_status fail_call(void *argument, mfsdp_error *error) {
  return MFSDP_ERROR_SET(error, MFSDP_E_PEER, 3, "task %s gave up",
                         static_cast<const char *>(argument));
}

mfsdp_status fail_silently(void *argument, mfsdp_error *error) {
  (void)argument;
  (void)error;
  return MFSDP_E_IO;
}

/* Holds a queue until it is opened. */
struct Gate {
  mfsdp_mutex mutex;
  mfsdp_cond cond;
  bool open = false, reached = false;
  Gate() {
    EXPECT_EQ(mfsdp_mutex_init(&mutex), MFSDP_OK);
    EXPECT_EQ(mfsdp_cond_init(&cond), MFSDP_OK);
  }
  ~Gate() {
    mfsdp_cond_destroy(&cond);
    mfsdp_mutex_destroy(&mutex);
  }
  void release() {
    mfsdp_mutex_lock(&mutex);
    open = true;
    mfsdp_cond_broadcast(&cond);
    mfsdp_mutex_unlock(&mutex);
  }
  void wait_until_reached() {
    mfsdp_mutex_lock(&mutex);
    while (!reached)
      (void)mfsdp_cond_wait_until(&cond, &mutex, MFSDP_DEADLINE_NEVER_US);
    mfsdp_mutex_unlock(&mutex);
  }
  static mfsdp_status pass(void *argument, mfsdp_error *error) {
    Gate *gate = static_cast<Gate *>(argument);
    (void)error;
    mfsdp_mutex_lock(&gate->mutex);
    gate->reached = true;
    mfsdp_cond_broadcast(&gate->cond);
    while (!gate->open)
      (void)mfsdp_cond_wait_until(&gate->cond, &gate->mutex, MFSDP_DEADLINE_NEVER_US);
    mfsdp_mutex_unlock(&gate->mutex);
    return MFSDP_OK;
  }
};

struct Pair { /* a second queue and event beside the rig's */
  Rig *rig;
  mfsdp_queue *queue = nullptr;
  mfsdp_event *event = nullptr;
  explicit Pair(Rig *r) : rig(r) {
    EXPECT_EQ(rig->ops->queue_create(rig->self, &rig->context, "second", &queue), MFSDP_OK);
    EXPECT_EQ(rig->ops->event_create(rig->self, &rig->context, &event), MFSDP_OK);
  }
  ~Pair() {
    rig->ops->queue_destroy(rig->self, &rig->context, queue);
    rig->ops->event_destroy(rig->self, &rig->context, event);
  }
};

TEST_P(HostQueue, AFailedQueueSkipsWhatFollowsAndTellsItsFirstError) {
  Rig rig(GetParam());
  Pair second(&rig);
  std::atomic<int> calls{0};
  char name[] = "one", other[] = "two";
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, second.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, fail_call, name), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, fail_call, other), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_E_PEER);
  EXPECT_STREQ(rig.message(), "task one gave up");
  EXPECT_EQ(mfsdp_context_error(&rig.context)->culprit, 3);
  EXPECT_EQ(calls.load(), 1);
  EXPECT_EQ(rig.sync(), MFSDP_E_PEER); /* for ever */
  /* What was recorded before the failure is not touched by it. */
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 1000000), MFSDP_OK);
}

TEST_P(HostQueue, ATaskWithoutMessageGetsOne) {
  Rig rig(GetParam());
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, fail_silently, nullptr), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_E_IO);
  EXPECT_NE(std::string(rig.message()).find("MFSDP_E_IO without a message"), std::string::npos);
}

TEST_P(HostQueue, AQueueThatWaitsForAFailedEventFails) {
  Rig rig(GetParam());
  Pair second(&rig);
  std::atomic<int> calls{0};
  char name[] = "three";
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, fail_call, name), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, second.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, second.queue, note_call, &calls), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, second.queue, second.event), MFSDP_OK);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 1000000), MFSDP_E_PEER);
  EXPECT_STREQ(rig.message(), "task three gave up");
  EXPECT_EQ(calls.load(), 0);
}

TEST_P(HostQueue, EventsOutliveTheirQueueWithWhatItTold) {
  Rig rig(GetParam());
  Pair second(&rig);
  char name[] = "four";
  std::atomic<int> calls{0};
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, fail_call, name), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, second.event), MFSDP_OK);
  rig.renew_queue();
  int32_t done = 0;
  EXPECT_EQ(rig.ops->event_query(rig.self, second.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 1);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 0), MFSDP_OK);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 0), MFSDP_E_PEER);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, rig.queue, second.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_E_PEER);
  EXPECT_STREQ(rig.message(), "task four gave up");
  EXPECT_EQ(calls.load(), 1);
  /* Recorded again, an event forgets. */
  ASSERT_EQ(rig.ops->event_record(rig.self, second.queue, second.event), MFSDP_OK);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 1000000), MFSDP_OK);
}

TEST_P(HostQueue, AnEventNeverRecordedHasPassed) {
  Rig rig(GetParam());
  int32_t done = 0;
  EXPECT_EQ(rig.ops->event_query(rig.self, rig.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 1);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 0), MFSDP_OK);
  EXPECT_EQ(rig.ops->queue_wait(rig.self, rig.queue, rig.event), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

TEST_P(HostQueue, NullQueuesEventsAndTasksAreNamed) {
  Rig rig(GetParam());
  const struct {
    mfsdp_status status;
    const char *message;
  } cases[] = {
      {rig.ops->queue_create(rig.self, &rig.context, "x", nullptr), "queue_create: out"},
      {rig.ops->event_create(rig.self, &rig.context, nullptr), "event_create: out"},
  };
  for (const auto &c : cases)
    EXPECT_EQ(c.status, MFSDP_E_ARGUMENT) << c.message;
  int32_t done;
  auto expect = [&rig](mfsdp_status status, const char *message) {
    EXPECT_EQ(status, MFSDP_E_ARGUMENT) << message;
    EXPECT_NE(std::string(rig.message()).find(message), std::string::npos) << rig.message();
  };
  expect(rig.ops->event_record(rig.self, nullptr, rig.event), "event_record: queue is NULL");
  expect(rig.ops->event_record(rig.self, rig.queue, nullptr), "event_record: event is NULL");
  expect(rig.ops->queue_wait(rig.self, nullptr, rig.event), "queue_wait: queue is NULL");
  expect(rig.ops->queue_wait(rig.self, rig.queue, nullptr), "queue_wait: event is NULL");
  expect(rig.ops->event_query(rig.self, nullptr, &done), "event_query: event is NULL");
  expect(rig.ops->event_query(rig.self, rig.event, nullptr), "event_query: done is NULL");
  expect(rig.ops->event_wait(rig.self, &rig.context, nullptr, 0), "event_wait: event is NULL");
  expect(rig.ops->queue_call(rig.self, nullptr, note_call, nullptr), "queue_call: queue is NULL");
  expect(rig.ops->queue_call(rig.self, rig.queue, nullptr, nullptr), "queue_call: task is NULL");
  rig.ops->queue_destroy(rig.self, &rig.context, nullptr);
  rig.ops->event_destroy(rig.self, &rig.context, nullptr);
  EXPECT_EQ(rig.sync(), MFSDP_OK); /* a refused call leaves the queue as it was */
}

TEST_P(HostQueue, WorkInSteadyStateAllocatesNothing) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  Rig rig(GetParam());
  test::Buffer<float> x(&rig, std::vector<float>(100, 1.0f)), y(&rig, 100);
  std::vector<const void *> terms(100, x.data());
  std::atomic<int> calls{0};
  ASSERT_EQ(rig.sync(), MFSDP_OK);
  test::malloc_count_begin();
  const int64_t before = rig.memory.alloc_count();
  for (int i = 0; i < 50; ++i) {
    (void)rig.ops->queue_call(rig.self, rig.queue, note_call, &calls);
    (void)rig.ops->sum_terms(rig.self, rig.queue, y.data(), 1, terms.data(), MFSDP_F32, 100, 100);
    (void)rig.ops->event_record(rig.self, rig.queue, rig.event);
    (void)rig.ops->queue_wait(rig.self, rig.queue, rig.event);
    (void)rig.ops->event_wait(rig.self, &rig.context, rig.event, 1000000);
  }
  EXPECT_EQ(test::malloc_count_end(), 0u);
  EXPECT_EQ(rig.memory.alloc_count(), before);
  EXPECT_EQ(calls.load(), 50);
  EXPECT_EQ(y.read(), std::vector<float>(100, 100.0f));
}

TEST_P(HostQueue, EveryAllocationOfSetUpMayFail) {
  for (int64_t n = 0;; ++n) {
    test::FaultAllocator memory;
    mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    context_desc.allocator = memory.allocator();
    mfsdp_context context;
    ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
    mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
    desc.queue_kind = GetParam().queue_kind;
    desc.queue_capacity = 4;
    mfsdp_host_backend *host;
    mfsdp_queue *queue = nullptr;
    mfsdp_event *event = nullptr;
    memory.fail_at(n);
    mfsdp_status status = mfsdp_host_backend_create(&context, &desc, &host);
    if (status == MFSDP_OK) {
      const mfsdp_backend *backend = mfsdp_host_backend_get(host);
      status = backend->ops->queue_create(backend->self, &context, "q", &queue);
      if (status == MFSDP_OK) status = backend->ops->event_create(backend->self, &context, &event);
      backend->ops->queue_destroy(backend->self, &context, queue);
      backend->ops->event_destroy(backend->self, &context, event);
      EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK);
    } else {
      EXPECT_EQ(host, nullptr);
    }
    EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
    EXPECT_EQ(memory.live_count(), 0u);
    EXPECT_EQ(memory.complaints(), "");
    if (!memory.failed()) {
      EXPECT_EQ(status, MFSDP_OK);
      EXPECT_GE(n, 3); /* backend, queue, event at least */
      break;
    }
    EXPECT_EQ(status, MFSDP_E_MEMORY);
  }
}

/* ---- workers ---- */

TEST(HostWorker, TheHostGoesOnAndWaitsWithADeadline) {
  Rig rig(worker_kind());
  Gate gate;
  std::atomic<int> calls{0};
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, Gate::pass, &gate), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  int32_t done = 1;
  ASSERT_EQ(rig.ops->event_query(rig.self, rig.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 0);
  EXPECT_EQ(calls.load(), 0);
  const int64_t start_us = mfsdp_clock_us();
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 20000), MFSDP_E_TIMEOUT);
  EXPECT_GE(mfsdp_clock_us() - start_us, 20000);
  EXPECT_NE(
      std::string(rig.message()).find("queue test did not reach the event in 20000 us: 0 of 2"),
      std::string::npos)
      << rig.message();
  gate.release();
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 10000000), MFSDP_OK);
  EXPECT_EQ(calls.load(), 1);
}

TEST(HostWorker, AQueueWaitsForAnotherQueuesEventAsItWasRecorded) {
  Rig rig(worker_kind());
  Pair second(&rig);
  Gate gate, later;
  std::atomic<int> calls{0};
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, Gate::pass, &gate), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, second.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_call(rig.self, second.queue, note_call, &calls), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, second.queue, second.event), MFSDP_OK);
  /* Recorded again behind more work: the wait above is for the first record. */
  ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, Gate::pass, &later), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 10000), MFSDP_E_TIMEOUT);
  EXPECT_EQ(calls.load(), 0);
  gate.release();
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, second.event, 10000000), MFSDP_OK);
  EXPECT_EQ(calls.load(), 1);
  int32_t done = 1;
  ASSERT_EQ(rig.ops->event_query(rig.self, rig.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 0);
  later.release();
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

TEST(HostWorker, AFullRingBlocksAndThenTimesOut) {
  test::FaultAllocator memory;
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  context_desc.allocator = memory.allocator();
  mfsdp_context context;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  desc.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  desc.queue_capacity = 2;
  desc.submit_timeout_us = 15000;
  mfsdp_host_backend *host;
  ASSERT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_OK);
  const mfsdp_backend *backend = mfsdp_host_backend_get(host);
  mfsdp_queue *queue;
  mfsdp_event *event;
  ASSERT_EQ(backend->ops->queue_create(backend->self, &context, "small", &queue), MFSDP_OK);
  ASSERT_EQ(backend->ops->event_create(backend->self, &context, &event), MFSDP_OK);
  Gate gate;
  std::atomic<int> calls{0};
  ASSERT_EQ(backend->ops->queue_call(backend->self, queue, Gate::pass, &gate), MFSDP_OK);
  gate.wait_until_reached();
  ASSERT_EQ(backend->ops->queue_call(backend->self, queue, note_call, &calls), MFSDP_OK);
  EXPECT_EQ(backend->ops->queue_call(backend->self, queue, note_call, &calls), MFSDP_E_TIMEOUT);
  EXPECT_NE(std::string(mfsdp_context_error(&context)->message).find("queue small: its 2 records"),
            std::string::npos);
  gate.release();
  /* Room again: many more than the ring holds go through it. */
  for (int i = 0; i < 100; ++i)
    ASSERT_EQ(backend->ops->queue_call(backend->self, queue, note_call, &calls), MFSDP_OK);
  ASSERT_EQ(backend->ops->event_record(backend->self, queue, event), MFSDP_OK);
  EXPECT_EQ(backend->ops->event_wait(backend->self, &context, event, 10000000), MFSDP_OK);
  EXPECT_EQ(calls.load(), 101);
  backend->ops->queue_destroy(backend->self, &context, queue);
  backend->ops->event_destroy(backend->self, &context, event);
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK);
  EXPECT_EQ(memory.live_count(), 0u);
}

/* Two queues hand a buffer to and fro; only events order them. */
TEST(HostWorker, PingPongBetweenQueues) {
  Rig rig(worker_kind());
  Pair second(&rig);
  test::Buffer<float> x(&rig, std::vector<float>(1000, 1.0f)), y(&rig, 1000);
  const int rounds = 200;
  for (int i = 0; i < rounds; ++i) {
    const void *from_x[] = {x.data(), x.data()}, *from_y[] = {y.data()};
    ASSERT_EQ(
        rig.ops->sum_terms(rig.self, rig.queue, y.data(), 1, from_x, MFSDP_F32, i % 2 + 1, 1000),
        MFSDP_OK);
    ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
    ASSERT_EQ(rig.ops->queue_wait(rig.self, second.queue, rig.event), MFSDP_OK);
    ASSERT_EQ(rig.ops->sum_terms(rig.self, second.queue, x.data(), 1, from_y, MFSDP_F32, 1, 1000),
              MFSDP_OK);
    ASSERT_EQ(rig.ops->event_record(rig.self, second.queue, second.event), MFSDP_OK);
    ASSERT_EQ(rig.ops->queue_wait(rig.self, rig.queue, second.event), MFSDP_OK);
  }
  EXPECT_EQ(x.read(), std::vector<float>(1000, std::ldexp(1.0f, rounds / 2)));
}

TEST(HostWorker, WorkLeftInAQueueIsDoneBeforeItIsDestroyed) {
  Rig rig(worker_kind());
  std::atomic<int> calls{0};
  for (int i = 0; i < 300; ++i)
    ASSERT_EQ(rig.ops->queue_call(rig.self, rig.queue, note_call, &calls), MFSDP_OK);
  rig.renew_queue();
  EXPECT_EQ(calls.load(), 300);
}

} // namespace
