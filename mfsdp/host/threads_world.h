/* SPDX-License-Identifier: MIT */
/*
 * threads_world.h - what the ranks of one process share: mailboxes, the first error, who is there.
 *
 *   mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
 *   mfsdp_threads_world *world;
 *   desc.world = 4;
 *   MFSDP_TRY(mfsdp_threads_world_create(&main_context, &desc, &world));
 *   ... start 4 threads; each makes its context, backend, transport (transport_threads.h) and
 *   ... control (threads_control.h) on `world`, works, destroys them; join the threads ...
 *   MFSDP_TRY(mfsdp_threads_world_destroy(&main_context, world));
 *
 * One world, one fate: the first error of any rank, on the transport or on the control plane,
 * poisons both on all ranks. Does not: start threads, or move a byte (transport_threads.h and
 * threads_control.h do). Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see
 * posix/clock.h.
 */
#ifndef MFSDP_HOST_THREADS_WORLD_H
#define MFSDP_HOST_THREADS_WORLD_H

#include "../posix/clock.h"
#include "../posix/thread.h"
#include "../transport.h"

typedef struct mfsdp_threads_world_desc {
  size_t struct_nbytes;
  int32_t world;               /* number of ranks, at least 1 */
  int64_t deadline_us;         /* of every wait, counted from the last progress; positive */
  const int32_t *node_of_rank; /* world entries, copied: a made-up node map; NULL: one node */
  int32_t batch_count;         /* batches of a rank that may be queued at a time; at least 1 */
  int32_t batch_xfer_count;    /* transfers of a batch until `reserve` asks for more; at least 1 */
  size_t control_nbytes;       /* largest control message of a rank; takes 2 x world x this */
  /* Artificial links, to try a program on a network that this machine does not have: every ordered
   * pair of ranks has a wire of its own that carries one message at a time. A message of n bytes
   * that its sender posts at time t leaves at s = max(t, wire free), keeps the wire until
   * s + n / bytes_per_us, and arrives latency_us after that: then it is received and its sender
   * released, not before. Control messages are not slowed. Set on the world, so equal on all ranks.
   */
  int64_t latency_us;  /* 0 to 1e9; 0: none */
  double bytes_per_us; /* = MB/s; 0: without limit */
} mfsdp_threads_world_desc;

/* World 1, 60 s, one node, 4 batches of 64 transfers, control messages up to 16 KiB, no artificial
 * links. */
MFSDP_API mfsdp_threads_world_desc mfsdp_threads_world_desc_default(void) {
  mfsdp_threads_world_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.world = 1;
  desc.deadline_us = 60000000;
  desc.batch_count = 4;
  desc.batch_xfer_count = 64;
  desc.control_nbytes = 16384;
  return desc;
}

/* A rank plays two roles in a world, each of which it may enter once and leave once. */
enum { MFSDP__THREADS_ABSENT = 0, MFSDP__THREADS_JOINED, MFSDP__THREADS_LEFT };
/* What a blocked rank waits for: others wake it for nothing else. */
enum {
  MFSDP__THREADS_NOTHING = 0,
  MFSDP__THREADS_A_POST,
  MFSDP__THREADS_ITS_SENDS,
  MFSDP__THREADS_THE_OTHERS, /* of a native collective */
  MFSDP__THREADS_ITS_READERS
};

struct mfsdp__threads_batch;

/* A transfer of a running batch. A send is a node of its pair's FIFO: no list can overflow. */
typedef struct mfsdp__threads_xfer {
  mfsdp_xfer x;
  struct mfsdp__threads_xfer
      *next; /* the pair's next send, or the batch's next receive from x.peer */
  const struct mfsdp__threads_batch *batch;
  int64_t arrives_us; /* of a send on an artificial link; 0: at once */
} mfsdp__threads_xfer;

/* From one rank to another. Guarded by the receiver's mutex (head is also peeked at without). */
typedef struct mfsdp__threads_pair {
  mfsdp__threads_xfer *head, *tail; /* sends posted and not yet taken */
  int32_t receive_count; /* receives of the receiver's running batch still to be served */
  int64_t busy_until_us; /* artificial link: when its wire is free again */
} mfsdp__threads_pair;

/* What a rank brings to a native collective (native_threads.h). With the rank's mutex. */
typedef struct mfsdp__threads_native {
  uint64_t begun, done;      /* how many it has come to, and has all of */
  const unsigned char *full; /* of the one begun last: others read it while they are counted */
  uint64_t check;
  const char *label;
  int32_t form, readers, withdrawn;
} mfsdp__threads_native;

/* A rank's mailbox. Aligned so that neighbours do not share a cache line (pairs of 64 bytes). */
typedef struct mfsdp__threads_slot {
  mfsdp_mutex mutex;
  mfsdp_cond cond;
  struct mfsdp_threads_world *world;
  int32_t rank;
  int32_t transport_role, control_role; /* atomic */
  uint32_t event_count; /* written with the mutex, read without: something this rank may await */
  int32_t waits_for;    /* the rest: with the mutex */
  int32_t send_count;   /* sends of the running batch not yet copied by their receivers */
  int32_t in_batch, in_control;
  mfsdp__threads_native native;
  uint64_t control_generation; /* how many control calls this rank has entered; its own thread */
} __attribute__((aligned(128))) mfsdp__threads_slot;

/* The meeting point of control messages (threads_control.h). */
typedef struct mfsdp__threads_meeting {
  mfsdp_mutex mutex;
  mfsdp_cond cond;
  uint64_t generation; /* written with the mutex, read without: meetings that were complete */
  int32_t arrived_count;
  unsigned char *messages; /* 2 x world x control_nbytes: odd and even meetings */
  size_t *message_nbytes;  /* 2 x world */
  uint64_t *arrived;       /* world: how many meetings each rank has come to; with the mutex */
} mfsdp__threads_meeting;

typedef struct mfsdp_threads_world {
  mfsdp_threads_world_desc desc;
  int32_t *node_of_rank; /* NULL: one node */
  int32_t has_links;     /* artificial ones */
  mfsdp__threads_slot *slots;
  mfsdp__threads_pair *pairs; /* [receiver * world + sender] */
  int32_t slot_ready_count;   /* mutexes and conditions that exist */
  int32_t meeting_mutex_ready, meeting_cond_ready, error_mutex_ready;
  int32_t left_count; /* atomic: roles that were left */
  mfsdp__threads_meeting meeting;
  int32_t poisoned; /* atomic: `error` is set and will not change */
  mfsdp_mutex error_mutex;
  mfsdp_error error;
} mfsdp_threads_world;

MFSDP_API mfsdp__threads_pair *mfsdp__threads_pair_of(mfsdp_threads_world *world, int32_t sender,
                                                      int32_t receiver) {
  return &world->pairs[(size_t)receiver * (size_t)world->desc.world + (size_t)sender];
}

/* ---- waking and waiting ---- */

MFSDP_API uint32_t mfsdp__threads_events(const mfsdp__threads_slot *slot) {
  return __atomic_load_n(&slot->event_count, __ATOMIC_ACQUIRE);
}

/* With the slot's mutex held. */
MFSDP_API void mfsdp__threads_notify_locked(mfsdp__threads_slot *slot, int wake) {
  (void)__atomic_add_fetch(&slot->event_count, 1u, __ATOMIC_RELEASE);
  if (wake) mfsdp_cond_broadcast(&slot->cond);
}

/* Every rank looks again at what it waits for. */
MFSDP_API void mfsdp__threads_wake_all(mfsdp_threads_world *world) {
  int32_t r;
  for (r = 0; r < world->desc.world; ++r) {
    mfsdp__threads_slot *slot = &world->slots[r];
    mfsdp_mutex_lock(&slot->mutex);
    mfsdp__threads_notify_locked(slot, 1);
    mfsdp_mutex_unlock(&slot->mutex);
  }
  mfsdp_mutex_lock(&world->meeting.mutex);
  mfsdp_cond_broadcast(&world->meeting.cond);
  mfsdp_mutex_unlock(&world->meeting.mutex);
}

/*
 * Returns 1 as soon as the event count is no longer `seen`, 0 when the deadline passed before.
 * Blocks at once. Yielding a few times first looks cheaper, but a yield gives up the thread's share
 * of the core (since Linux 6.18 its virtual run time moves on by a slice each time): a communication
 * thread that yields beside computing threads then waits until they block, and hides nothing.
 */
MFSDP_API int mfsdp__threads_wait(mfsdp__threads_slot *slot, int32_t waits_for, uint32_t seen,
                                  int64_t deadline_us) {
  int in_time = 1;
  if (mfsdp__threads_events(slot) != seen) return 1;
  mfsdp_mutex_lock(&slot->mutex);
  slot->waits_for = waits_for;
  while (in_time && mfsdp__threads_events(slot) == seen)
    in_time = mfsdp_cond_wait_until(&slot->cond, &slot->mutex, deadline_us);
  slot->waits_for = MFSDP__THREADS_NOTHING;
  in_time = mfsdp__threads_events(slot) != seen;
  mfsdp_mutex_unlock(&slot->mutex);
  return in_time;
}

/* ---- the first error ---- */

MFSDP_API int mfsdp__threads_poisoned(const mfsdp_threads_world *world) {
  return __atomic_load_n(&world->poisoned, __ATOMIC_ACQUIRE);
}

/*
 * Ends the world: `why` becomes its error unless there is one, and every wait of every rank, on the
 * transport and on the control plane, returns with the first error. Any thread; idempotent; takes
 * no lock that a rank holds while it waits or copies. NULL: E_POISONED without a reason.
 */
MFSDP_API void mfsdp_threads_world_poison(mfsdp_threads_world *world, const mfsdp_error *why) {
  mfsdp_mutex_lock(&world->error_mutex);
  if (!mfsdp__threads_poisoned(world)) {
    if (why != NULL && why->status != MFSDP_OK)
      world->error = *why;
    else
      (void)MFSDP_ERROR_SET(&world->error, MFSDP_E_POISONED, -1,
                            "threads: poisoned from outside, no reason given");
    __atomic_store_n(&world->poisoned, 1, __ATOMIC_RELEASE);
  }
  mfsdp_mutex_unlock(&world->error_mutex);
  mfsdp__threads_wake_all(world);
}

/* Of a poisoned world: copies the first error; returns its status. */
MFSDP_API mfsdp_status mfsdp__threads_first_error(const mfsdp_threads_world *world,
                                                  mfsdp_error *error) {
  *error = world->error;
  return error->status;
}

/* What every call on a poisoned world returns: E_POISONED and the first message. */
MFSDP_API mfsdp_status mfsdp__threads_refuse(const mfsdp_threads_world *world,
                                             mfsdp_context *context, const char *label) {
  return MFSDP_FAIL_PEER(context, MFSDP_E_POISONED, world->error.culprit,
                         "%s: refused after the first error (%s, noticed by rank %d): %s", label,
                         mfsdp_status_name(world->error.status), (int)world->error.rank,
                         world->error.message);
}

/* ---- roles ---- */

MFSDP_API int32_t mfsdp__threads_role(const int32_t *role) {
  return __atomic_load_n(role, __ATOMIC_ACQUIRE);
}

MFSDP_API mfsdp_status mfsdp__threads_join(mfsdp_threads_world *world, mfsdp_context *context,
                                           int32_t rank, int32_t *role, const char *what) {
  int32_t expected = MFSDP__THREADS_ABSENT;
  if (mfsdp__threads_poisoned(world)) return mfsdp__threads_refuse(world, context, what);
  if (__atomic_compare_exchange_n(role, &expected, (int32_t)MFSDP__THREADS_JOINED, 0,
                                  __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
    return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_STATE, "%s: rank %d %s; each rank joins a world once", what,
                    (int)rank,
                    expected == MFSDP__THREADS_JOINED ? "has joined already" : "has left already");
}

/* Peers that wait for this rank see that it is gone. */
MFSDP_API void mfsdp__threads_leave(mfsdp_threads_world *world, int32_t *role) {
  __atomic_store_n(role, (int32_t)MFSDP__THREADS_LEFT, __ATOMIC_RELEASE);
  (void)__atomic_add_fetch(&world->left_count, 1, __ATOMIC_RELEASE);
  mfsdp__threads_wake_all(world);
}

/* For messages: what is known of a rank that does not do its part. Takes the rank's mutex. */
MFSDP_API const char *mfsdp__threads_whereabouts(mfsdp_threads_world *world, int32_t rank) {
  mfsdp__threads_slot *slot = &world->slots[rank];
  const int32_t transport_role = mfsdp__threads_role(&slot->transport_role);
  const int32_t control_role = mfsdp__threads_role(&slot->control_role);
  int32_t in_batch, in_control;
  mfsdp_mutex_lock(&slot->mutex);
  in_batch = slot->in_batch;
  in_control = slot->in_control;
  mfsdp_mutex_unlock(&slot->mutex);
  if (in_batch) return "is in a transfer";
  if (in_control) return "is in a control call";
  if (transport_role == MFSDP__THREADS_LEFT || control_role == MFSDP__THREADS_LEFT)
    return "has left";
  if (transport_role == MFSDP__THREADS_ABSENT && control_role == MFSDP__THREADS_ABSENT)
    return "never joined";
  return "does not answer: it is in no transfer and in no control call";
}

/* Appends to a message under construction; what does not fit is cut. */
MFSDP_API MFSDP_FORMAT(3, 4) void mfsdp__threads_append(char *text, size_t text_nbytes,
                                                        const char *format, ...) {
  const size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text + used, text_nbytes - used, format, arguments);
  va_end(arguments);
}

/* ---- life cycle ---- */

MFSDP_API mfsdp_status mfsdp__threads_world_desc_check(mfsdp_context *context,
                                                       const mfsdp_threads_world_desc *desc) {
  int32_t r;
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads world: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_threads_world_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->world < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.world is %d, needs at least 1", (int)desc->world);
  if (desc->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.deadline_us is %lld, needs to be positive",
                      (long long)desc->deadline_us);
  if (desc->batch_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.batch_count is %d, needs at least 1",
                      (int)desc->batch_count);
  if (desc->batch_xfer_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.batch_xfer_count is %d, needs at least 1",
                      (int)desc->batch_xfer_count);
  if (desc->latency_us < 0 || desc->latency_us > 1000000000)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.latency_us is %lld, needs 0 to 1000000000",
                      (long long)desc->latency_us);
  if (!(desc->bytes_per_us == 0.0 || (desc->bytes_per_us >= 1e-3 && desc->bytes_per_us <= 1e12)))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "threads world: desc.bytes_per_us is %g, needs 0 (no limit) or 0.001 to 1e12",
                      desc->bytes_per_us);
  for (r = 0; desc->node_of_rank != NULL && r < desc->world; ++r)
    if (desc->node_of_rank[r] < 0)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                        "threads world: desc.node_of_rank[%d] is %d, needs at least 0", (int)r,
                        (int)desc->node_of_rank[r]);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__threads_world_free(mfsdp_context *context, mfsdp_threads_world *world) {
  const size_t count = (size_t)world->desc.world;
  int32_t r;
  for (r = 0; r < world->slot_ready_count; ++r) {
    mfsdp_cond_destroy(&world->slots[r].cond);
    mfsdp_mutex_destroy(&world->slots[r].mutex);
  }
  if (world->meeting_cond_ready) mfsdp_cond_destroy(&world->meeting.cond);
  if (world->meeting_mutex_ready) mfsdp_mutex_destroy(&world->meeting.mutex);
  if (world->error_mutex_ready) mfsdp_mutex_destroy(&world->error_mutex);
  mfsdp_table_free(context, world->meeting.arrived, count, sizeof(uint64_t));
  mfsdp_table_free(context, world->meeting.message_nbytes, 2 * count, sizeof(size_t));
  mfsdp_table_free(context, world->meeting.messages, 2 * count, world->desc.control_nbytes);
  mfsdp_table_free(context, world->pairs, count * count, sizeof(mfsdp__threads_pair));
  mfsdp_table_free(context, world->slots, count, sizeof(mfsdp__threads_slot));
  mfsdp_table_free(context, world->node_of_rank, count, sizeof(int32_t));
  mfsdp_table_free(context, world, 1, sizeof(*world));
}

/* One table per line of mfsdp__threads_world_free. */
MFSDP_API mfsdp_status mfsdp__threads_world_alloc(mfsdp_context *context,
                                                  mfsdp_threads_world *world) {
  const size_t count = (size_t)world->desc.world;
  size_t pair_count;
  void *table;
  if (!mfsdp_size_mul(count, count, &pair_count))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "threads world: %zu ranks overflow size_t", count);
  if (world->desc.node_of_rank != NULL) {
    MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int32_t), "threads world: nodes", &table));
    world->node_of_rank = (int32_t *)table;
    memcpy(world->node_of_rank, world->desc.node_of_rank, count * sizeof(int32_t));
  }
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(mfsdp__threads_slot),
                              "threads world: mailboxes", &table));
  world->slots = (mfsdp__threads_slot *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, pair_count, sizeof(mfsdp__threads_pair),
                              "threads world: pairs", &table));
  world->pairs = (mfsdp__threads_pair *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, 2 * count, world->desc.control_nbytes,
                              "threads world: control messages", &table));
  world->meeting.messages = (unsigned char *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, 2 * count, sizeof(size_t),
                              "threads world: control message sizes", &table));
  world->meeting.message_nbytes = (size_t *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(uint64_t), "threads world: arrivals", &table));
  world->meeting.arrived = (uint64_t *)table;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__threads_world_start(mfsdp_context *context,
                                                  mfsdp_threads_world *world) {
  int32_t r;
  mfsdp_status status = mfsdp_mutex_init(&world->error_mutex);
  world->error_mutex_ready = status == MFSDP_OK;
  if (status == MFSDP_OK) status = mfsdp_mutex_init(&world->meeting.mutex);
  world->meeting_mutex_ready = status == MFSDP_OK;
  if (status == MFSDP_OK) status = mfsdp_cond_init(&world->meeting.cond);
  world->meeting_cond_ready = status == MFSDP_OK;
  for (r = 0; r < world->desc.world && status == MFSDP_OK; ++r) {
    mfsdp__threads_slot *slot = &world->slots[r];
    slot->world = world;
    slot->rank = r;
    status = mfsdp_mutex_init(&slot->mutex);
    if (status != MFSDP_OK) break;
    status = mfsdp_cond_init(&slot->cond);
    if (status != MFSDP_OK)
      mfsdp_mutex_destroy(&slot->mutex);
    else
      world->slot_ready_count = r + 1;
  }
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL(context, status, "threads world: the system refused a mutex or a condition");
}

/*
 * Makes the shared part of a world of thread ranks. All of its memory (about world^2 x 32 bytes and
 * the control messages) comes from `context`, which belongs to the calling thread and must be
 * handed to mfsdp_threads_world_destroy again. COMPLETE. *out is NULL after an error: E_ARGUMENT,
 * E_OVERFLOW, E_MEMORY, E_IO.
 */
MFSDP_API mfsdp_status mfsdp_threads_world_create(mfsdp_context *context,
                                                  const mfsdp_threads_world_desc *desc,
                                                  mfsdp_threads_world **out) {
  mfsdp_threads_world *world;
  mfsdp_status status;
  void *table;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "threads world: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__threads_world_desc_check(context, desc));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*world), "threads world", &table));
  world = (mfsdp_threads_world *)table;
  world->desc = *desc;
  world->has_links = desc->latency_us > 0 || desc->bytes_per_us > 0.0;
  world->error = mfsdp_error_none();
  status = mfsdp__threads_world_alloc(context, world);
  world->desc.node_of_rank = NULL; /* the caller's array is not ours to read later */
  if (status == MFSDP_OK) status = mfsdp__threads_world_start(context, world);
  if (status == MFSDP_OK)
    *out = world;
  else
    mfsdp__threads_world_free(context, world);
  return status;
}

/*
 * Ends a world that all ranks have left, with the context that made it. NULL is allowed.
 * E_STATE while a rank is joined: the message names it, nothing is freed.
 */
MFSDP_API mfsdp_status mfsdp_threads_world_destroy(mfsdp_context *context,
                                                   mfsdp_threads_world *world) {
  int32_t r;
  if (world == NULL) return MFSDP_OK;
  for (r = 0; r < world->desc.world; ++r) {
    const mfsdp__threads_slot *slot = &world->slots[r];
    const int transport = mfsdp__threads_role(&slot->transport_role) == MFSDP__THREADS_JOINED;
    const int control = mfsdp__threads_role(&slot->control_role) == MFSDP__THREADS_JOINED;
    if (transport || control)
      return MFSDP_FAIL_PEER(context, MFSDP_E_STATE, r,
                             "threads world: the %s of rank %d is still there; destroy it first",
                             transport ? "transport" : "control", (int)r);
  }
  mfsdp__threads_world_free(context, world);
  return MFSDP_OK;
}

#endif /* MFSDP_HOST_THREADS_WORLD_H */
