/* SPDX-License-Identifier: MIT */
/*
 * host_queue.h - queues and events of the host backend: ordered work, done in the submitting call
 * (INLINE) or by one worker thread per queue (WORKER).
 *
 *   // all work goes through one function; the argument block is copied:
 *   mfsdp__host_submit(queue, mfsdp__host_run_copy, &args, sizeof(args));
 *
 * Both kinds behave alike: a submission is counted and gets the next sequence number; work that
 * fails is noted with its number and error, and what follows in the queue is skipped. An event is a
 * queue and the number of the last submission before it. It has passed when the queue is done with
 * that number, and it carries the queue's error if the failed work came before it. A queue that
 * waits for an event with an error fails with the same error, since its work would use what was
 * never computed.
 *
 * A WORKER queue owns a ring of fixed-size records made at creation: nothing is allocated later. A
 * full ring blocks the submitter until there is room, at most submit_timeout_us.
 *
 * Internal to backend_host.h. Link flags: -lpthread.
 */
#ifndef MFSDP_HOST_HOST_QUEUE_H
#define MFSDP_HOST_HOST_QUEUE_H

#include "../backend.h"
#include "../posix/thread.h"
#include "host_math.h"

typedef enum mfsdp_host_queue_kind {
  MFSDP_HOST_QUEUE_INLINE = 1, /* work is done in the call that submits it */
  MFSDP_HOST_QUEUE_WORKER      /* one thread per queue does it, in order */
} mfsdp_host_queue_kind;

typedef struct mfsdp_host_backend mfsdp_host_backend;
struct mfsdp_host_lapack;

/* Work of a queue: `arguments` is the copied block. Fills *error if it fails. */
typedef mfsdp_status (*mfsdp__host_work)(struct mfsdp_host_backend *host, const void *arguments,
                                         mfsdp_error *error);

/* Largest argument block; what is larger (long tables of pointers) is submitted in parts. */
#define MFSDP__HOST_RECORD_NBYTES 448

typedef struct mfsdp__host_record {
  mfsdp__host_work work;
  union {
    unsigned char bytes[MFSDP__HOST_RECORD_NBYTES];
    int64_t align_int;
    double align_double;
    void *align_pointer;
  } arguments;
} mfsdp__host_record;

#define MFSDP__HOST_NO_FAILURE INT64_MAX

typedef struct mfsdp__host_queue {
  struct mfsdp_host_backend *host;
  const char *label;
  int64_t submitted; /* number of the last submission; the first is 1 */
  int64_t done; /* all work up to here is done or skipped; written under the lock, atomically */
  int64_t failed_at; /* number of the work that failed; MFSDP__HOST_NO_FAILURE if none did */
  mfsdp_error error;
  /* WORKER only */
  mfsdp__host_record *ring;
  int32_t capacity, stop;
  mfsdp_mutex mutex;
  mfsdp_cond work_cond; /* the worker waits for work */
  mfsdp_cond done_cond; /* others wait for progress */
  mfsdp_thread thread;
} mfsdp__host_queue;

typedef struct mfsdp__host_event {
  mfsdp__host_queue *queue; /* NULL: never recorded, or its queue is gone */
  int64_t number;
  mfsdp_error error;                         /* of a queue that is gone */
  struct mfsdp__host_event *previous, *next; /* all events of the backend */
} mfsdp__host_event;

struct mfsdp_host_backend {
  mfsdp_backend table;
  mfsdp_backend_ops ops; /* what the table points to */
  mfsdp_context *context; /* of the rank's own thread; touched by the calls, never by a worker */
  const mfsdp_host_math *math;
  const struct mfsdp_host_lapack *lapack; /* NULL: no eigh and qr */
  mfsdp_host_queue_kind queue_kind;
  int32_t queue_capacity;
  int64_t submit_timeout_us;
  int32_t queue_count;
  mfsdp__host_event *events;
};

/* ---- execution ---- */

MFSDP_API mfsdp_status mfsdp__host_run(mfsdp__host_queue *queue, mfsdp__host_work work,
                                       const void *arguments, mfsdp_error *error) {
  mfsdp_status status;
  mfsdp_error_clear(error);
  status = work(queue->host, arguments, error);
  if (status != MFSDP_OK && error->status == MFSDP_OK)
    (void)MFSDP_ERROR_SET(error, status, -1, "queue %s: a task returned %s without a message",
                          queue->label, mfsdp_status_name(status));
  error->status = status;
  return status;
}

MFSDP_API void mfsdp__host_worker_main(void *argument) {
  mfsdp__host_queue *queue = (mfsdp__host_queue *)argument;
  mfsdp_error error;
  mfsdp_mutex_lock(&queue->mutex);
  for (;;) {
    mfsdp_status status = MFSDP_OK;
    while (queue->done == queue->submitted && !queue->stop)
      (void)mfsdp_cond_wait_until(&queue->work_cond, &queue->mutex, MFSDP_DEADLINE_NEVER_US);
    if (queue->done == queue->submitted) break;
    if (queue->failed_at == MFSDP__HOST_NO_FAILURE) {
      const mfsdp__host_record *record = &queue->ring[queue->done % queue->capacity];
      mfsdp_mutex_unlock(&queue->mutex);
      status = mfsdp__host_run(queue, record->work, record->arguments.bytes, &error);
      mfsdp_mutex_lock(&queue->mutex);
    }
    if (status != MFSDP_OK) {
      queue->error = error;
      queue->failed_at = queue->done + 1;
    }
    __atomic_store_n(&queue->done, queue->done + 1, __ATOMIC_RELEASE);
    mfsdp_cond_broadcast(&queue->done_cond);
  }
  mfsdp_mutex_unlock(&queue->mutex);
}

/* Puts a record into the ring, or waits for room in it. */
MFSDP_API mfsdp_status mfsdp__host_push(mfsdp__host_queue *queue, mfsdp__host_work work,
                                        const void *arguments, size_t nbytes) {
  mfsdp_status status = MFSDP_OK;
  mfsdp_mutex_lock(&queue->mutex);
  if (queue->submitted - queue->done == queue->capacity) {
    const int64_t deadline_us = mfsdp_clock_deadline_us(queue->host->submit_timeout_us);
    int in_time = 1;
    while (in_time && queue->submitted - queue->done == queue->capacity)
      in_time = mfsdp_cond_wait_until(&queue->done_cond, &queue->mutex, deadline_us);
    if (queue->submitted - queue->done == queue->capacity) status = MFSDP_E_TIMEOUT;
  }
  if (status == MFSDP_OK) {
    mfsdp__host_record *record = &queue->ring[queue->submitted % queue->capacity];
    record->work = work;
    memcpy(record->arguments.bytes, arguments, nbytes);
    ++queue->submitted;
    mfsdp_cond_signal(&queue->work_cond);
  }
  mfsdp_mutex_unlock(&queue->mutex);
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL(queue->host->context, status,
                    "queue %s: its %d records stayed full for %lld us (queue_capacity, "
                    "submit_timeout_us)",
                    queue->label, (int)queue->capacity, (long long)queue->host->submit_timeout_us);
}

/*
 * The one way into a queue. `arguments` is copied: nbytes at most MFSDP__HOST_RECORD_NBYTES. What
 * the work finds wrong is kept by the queue; the status is about the submission alone.
 */
MFSDP_API mfsdp_status mfsdp__host_submit(mfsdp__host_queue *queue, mfsdp__host_work work,
                                          const void *arguments, size_t nbytes) {
  mfsdp_error error;
  if (queue->ring != NULL) return mfsdp__host_push(queue, work, arguments, nbytes);
  ++queue->submitted;
  if (queue->failed_at == MFSDP__HOST_NO_FAILURE &&
      mfsdp__host_run(queue, work, arguments, &error) != MFSDP_OK) {
    queue->error = error;
    queue->failed_at = queue->submitted;
  }
  queue->done = queue->submitted;
  return MFSDP_OK;
}

/* ---- queues ---- */

MFSDP_API mfsdp_status mfsdp__host_worker_start(mfsdp_context *context, mfsdp__host_queue *queue) {
  mfsdp_status status = mfsdp_mutex_init(&queue->mutex);
  if (status == MFSDP_OK) {
    status = mfsdp_cond_init(&queue->work_cond);
    if (status == MFSDP_OK) {
      status = mfsdp_cond_init(&queue->done_cond);
      if (status == MFSDP_OK) {
        status = mfsdp_thread_start(&queue->thread, mfsdp__host_worker_main, queue);
        if (status == MFSDP_OK) return MFSDP_OK;
        mfsdp_cond_destroy(&queue->done_cond);
      }
      mfsdp_cond_destroy(&queue->work_cond);
    }
    mfsdp_mutex_destroy(&queue->mutex);
  }
  return MFSDP_FAIL(context, status, "queue %s: the system refused a thread or its lock",
                    queue->label);
}

MFSDP_API mfsdp_status mfsdp__host_queue_create(void *self, mfsdp_context *context,
                                                const char *label, mfsdp_queue **out) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  const size_t ring_count =
      host->queue_kind == MFSDP_HOST_QUEUE_WORKER ? (size_t)host->queue_capacity : 0;
  mfsdp__host_queue *queue;
  mfsdp_status status;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "queue_create: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*queue), "queue", &memory));
  queue = (mfsdp__host_queue *)memory;
  queue->host = host;
  queue->label = label != NULL ? label : "queue";
  queue->failed_at = MFSDP__HOST_NO_FAILURE;
  queue->error = mfsdp_error_none();
  queue->capacity = (int32_t)ring_count;
  status =
      mfsdp_table_alloc(context, ring_count, sizeof(*queue->ring), "records of a queue", &memory);
  queue->ring = (mfsdp__host_record *)memory;
  if (status == MFSDP_OK && queue->ring != NULL) status = mfsdp__host_worker_start(context, queue);
  if (status != MFSDP_OK) {
    mfsdp_table_free(context, queue->ring, ring_count, sizeof(*queue->ring));
    mfsdp_table_free(context, queue, 1, sizeof(*queue));
    return status;
  }
  ++host->queue_count;
  *out = (mfsdp_queue *)(void *)queue;
  return MFSDP_OK;
}

/* Work that is still there is done (or skipped, in a failed queue) before the thread ends. Nothing
 * may be waiting for the queue's events; events stay valid and keep what the queue told. */
MFSDP_API void mfsdp__host_queue_destroy(void *self, mfsdp_context *context, mfsdp_queue *opaque) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_queue *queue = (mfsdp__host_queue *)(void *)opaque;
  mfsdp__host_event *event;
  if (queue == NULL) return;
  if (queue->ring != NULL) {
    mfsdp_mutex_lock(&queue->mutex);
    queue->stop = 1;
    mfsdp_cond_signal(&queue->work_cond);
    mfsdp_mutex_unlock(&queue->mutex);
    mfsdp_thread_join(&queue->thread);
    mfsdp_cond_destroy(&queue->done_cond);
    mfsdp_cond_destroy(&queue->work_cond);
    mfsdp_mutex_destroy(&queue->mutex);
  }
  for (event = host->events; event != NULL; event = event->next) {
    if (event->queue != queue) continue;
    if (queue->failed_at <= event->number) event->error = queue->error;
    event->queue = NULL;
  }
  mfsdp_table_free(context, queue->ring, (size_t)queue->capacity, sizeof(*queue->ring));
  mfsdp_table_free(context, queue, 1, sizeof(*queue));
  --host->queue_count;
}

/* ---- events ---- */

MFSDP_API mfsdp_status mfsdp__host_event_create(void *self, mfsdp_context *context,
                                                mfsdp_event **out) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_event *event;
  void *memory;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "event_create: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*event), "event", &memory));
  event = (mfsdp__host_event *)memory;
  event->error = mfsdp_error_none();
  event->next = host->events;
  if (host->events != NULL) host->events->previous = event;
  host->events = event;
  *out = (mfsdp_event *)(void *)event;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__host_event_destroy(void *self, mfsdp_context *context, mfsdp_event *opaque) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_event *event = (mfsdp__host_event *)(void *)opaque;
  if (event == NULL) return;
  if (event->previous != NULL) event->previous->next = event->next;
  if (event->next != NULL) event->next->previous = event->previous;
  if (host->events == event) host->events = event->next;
  mfsdp_table_free(context, event, 1, sizeof(*event));
}

MFSDP_API mfsdp_status mfsdp__host_event_record(void *self, mfsdp_queue *opaque_queue,
                                                mfsdp_event *opaque) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_queue *queue = (mfsdp__host_queue *)(void *)opaque_queue;
  mfsdp__host_event *event = (mfsdp__host_event *)(void *)opaque;
  if (queue == NULL || event == NULL)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "event_record: %s is NULL",
                      queue == NULL ? "queue" : "event");
  event->error = mfsdp_error_none();
  event->queue = queue;
  event->number = queue->submitted; /* written by this thread alone */
  return MFSDP_OK;
}

/* Waits until the queue is done with `number`; 0 if the deadline passed first. Blocks and never
 * yields: see mfsdp__threads_wait. */
MFSDP_API int mfsdp__host_wait_number(mfsdp__host_queue *queue, int64_t number,
                                      int64_t deadline_us) {
  int in_time = 1;
  if (__atomic_load_n(&queue->done, __ATOMIC_ACQUIRE) >= number) return 1;
  if (queue->ring == NULL) return 0;
  mfsdp_mutex_lock(&queue->mutex);
  while (in_time && queue->done < number)
    in_time = mfsdp_cond_wait_until(&queue->done_cond, &queue->mutex, deadline_us);
  in_time = queue->done >= number;
  mfsdp_mutex_unlock(&queue->mutex);
  return in_time;
}

/* The error of work up to `number`, which must be done: *error then, else MFSDP_OK. */
MFSDP_API mfsdp_status mfsdp__host_error_before(mfsdp__host_queue *queue, int64_t number,
                                                mfsdp_error *error) {
  if (queue->ring != NULL) mfsdp_mutex_lock(&queue->mutex);
  *error = queue->failed_at <= number ? queue->error : mfsdp_error_none();
  if (queue->ring != NULL) mfsdp_mutex_unlock(&queue->mutex);
  return error->status;
}

typedef struct mfsdp__host_wait_args {
  mfsdp__host_queue *queue;
  int64_t number;
} mfsdp__host_wait_args;

MFSDP_API mfsdp_status mfsdp__host_run_wait(struct mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  const mfsdp__host_wait_args *args = (const mfsdp__host_wait_args *)arguments;
  (void)host;
  /* No deadline of its own: what was submitted before it ends, or its own deadline ends it. */
  (void)mfsdp__host_wait_number(args->queue, args->number, MFSDP_DEADLINE_NEVER_US);
  return mfsdp__host_error_before(args->queue, args->number, error);
}

MFSDP_API mfsdp_status mfsdp__host_run_failed(struct mfsdp_host_backend *host,
                                              const void *arguments, mfsdp_error *error) {
  (void)host;
  memcpy(error, arguments, sizeof(*error));
  return error->status;
}

MFSDP_API mfsdp_status mfsdp__host_queue_wait(void *self, mfsdp_queue *opaque_queue,
                                              mfsdp_event *opaque) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_queue *queue = (mfsdp__host_queue *)(void *)opaque_queue;
  mfsdp__host_event *event = (mfsdp__host_event *)(void *)opaque;
  mfsdp__host_wait_args args;
  if (queue == NULL || event == NULL)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "queue_wait: %s is NULL",
                      queue == NULL ? "queue" : "event");
  if (event->queue == queue) return MFSDP_OK; /* a queue is in order by itself */
  if (event->queue == NULL)
    return event->error.status == MFSDP_OK
               ? MFSDP_OK
               : mfsdp__host_submit(queue, mfsdp__host_run_failed, &event->error,
                                    sizeof(event->error));
  args.queue = event->queue;
  args.number = event->number;
  return mfsdp__host_submit(queue, mfsdp__host_run_wait, &args, sizeof(args));
}

MFSDP_API mfsdp_status mfsdp__host_event_query(void *self, mfsdp_event *opaque, int32_t *done) {
  struct mfsdp_host_backend *host = (struct mfsdp_host_backend *)self;
  mfsdp__host_event *event = (mfsdp__host_event *)(void *)opaque;
  if (event == NULL || done == NULL)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "event_query: %s is NULL",
                      event == NULL ? "event" : "done");
  *done = event->queue == NULL ||
          __atomic_load_n(&event->queue->done, __ATOMIC_ACQUIRE) >= event->number;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_event_wait(void *self, mfsdp_context *context,
                                              mfsdp_event *opaque, int64_t timeout_us) {
  mfsdp__host_event *event = (mfsdp__host_event *)(void *)opaque;
  mfsdp_error error;
  (void)self;
  if (event == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "event_wait: event is NULL");
  if (event->queue == NULL) return mfsdp_context_take_error(context, &event->error);
  if (!mfsdp__host_wait_number(event->queue, event->number, mfsdp_clock_deadline_us(timeout_us)))
    return MFSDP_FAIL(
        context, MFSDP_E_TIMEOUT,
        "event_wait: queue %s did not reach the event in %lld us: %lld of %lld pieces "
        "of work are done",
        event->queue->label, (long long)timeout_us,
        (long long)__atomic_load_n(&event->queue->done, __ATOMIC_ACQUIRE),
        (long long)event->number);
  if (mfsdp__host_error_before(event->queue, event->number, &error) == MFSDP_OK) return MFSDP_OK;
  return mfsdp_context_take_error(context, &error);
}

#endif /* MFSDP_HOST_HOST_QUEUE_H */
