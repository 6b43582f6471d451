/* SPDX-License-Identifier: MIT */
/*
 * device_world.h - what ranks that are threads of one process and share one GPU have in common:
 * who sends what to whom, who is there, the first error.
 *
 *   mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
 *   mfsdp_device_world *world;
 *   desc.world = 4;
 *   desc.device = 0;
 *   MFSDP_TRY(mfsdp_device_world_create(&main_context, &desc, &world));
 *   ... start 4 threads; each makes its context, backend (backend_cuda.h) and transport
 *   ... (transport_device.h) on `world`, works, destroys them; join the threads ...
 *   MFSDP_TRY(mfsdp_device_world_destroy(&main_context, world));
 *
 * One world, one fate: the first error of any rank poisons the transports of all ranks. One mutex
 * guards everything here; nobody holds it while it calls CUDA.
 * Does not: start threads, call CUDA, or be a control plane (host/threads_control.h is one for
 * ranks that are threads).
 * Link flags: -lpthread (part of libc since glibc 2.34). POSIX 2008: see posix/clock.h.
 */
#ifndef MFSDP_CUDA_DEVICE_WORLD_H
#define MFSDP_CUDA_DEVICE_WORLD_H

#include "../posix/clock.h"
#include "../posix/thread.h"
#include "../transport.h"

typedef struct mfsdp_device_world_desc {
  size_t struct_nbytes;
  int32_t world;            /* number of ranks, at least 1 */
  int32_t device;           /* CUDA's number of the one device that all ranks use */
  int64_t deadline_us;      /* of every wait, counted from the last progress; positive */
  int32_t batch_xfer_count; /* transfers of a batch until `reserve` asks for more; at least 1 */
} mfsdp_device_world_desc;

/* World 1, device 0, 60 s, batches of 64 transfers. */
MFSDP_API mfsdp_device_world_desc mfsdp_device_world_desc_default(void) {
  mfsdp_device_world_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.world = 1;
  desc.deadline_us = 60000000;
  desc.batch_xfer_count = 64;
  return desc;
}

enum { MFSDP__DEVICE_ABSENT = 0, MFSDP__DEVICE_JOINED, MFSDP__DEVICE_LEFT };

/* A transfer of the batch that its rank is in. A send is a node of its pair's list. */
typedef struct mfsdp__device_xfer {
  const mfsdp_xfer *x;             /* of the caller's table, which stays until submit returns */
  struct mfsdp__device_xfer *next; /* the pair's next send, or the next receive from x->peer */
} mfsdp__device_xfer;

/* From one rank to another. */
typedef struct mfsdp__device_pair {
  mfsdp__device_xfer *head, *tail; /* sends posted and not yet taken by the receiver */
  int32_t receive_count; /* receives of the receiver's batch that are still to be served */
} mfsdp__device_pair;

struct mfsdp__device_transport;

typedef struct mfsdp__device_slot {
  mfsdp_cond cond;
  int32_t role, in_batch;
  int32_t send_count; /* sends of the batch that their receivers have not enqueued yet */
  struct mfsdp__device_transport *transport;
  const char *label; /* of the batch */
  uint64_t check;
} mfsdp__device_slot;

typedef struct mfsdp_device_world {
  mfsdp_device_world_desc desc;
  mfsdp_mutex mutex; /* of everything below */
  int32_t mutex_ready, cond_ready_count;
  mfsdp__device_slot *slots;
  mfsdp__device_pair *pairs; /* [receiver * world + sender] */
  int32_t poisoned;          /* `error` is set and will not change */
  mfsdp_error error;
} mfsdp_device_world;

MFSDP_API mfsdp__device_pair *mfsdp__device_pair_of(const mfsdp_device_world *world, int32_t sender,
                                                    int32_t receiver) {
  return &world->pairs[(size_t)receiver * (size_t)world->desc.world + (size_t)sender];
}

/* ---- the first error ---- */

/* With the mutex held: every rank looks again at what it waits for. */
MFSDP_API void mfsdp__device_wake_all(mfsdp_device_world *world) {
  int32_t r;
  for (r = 0; r < world->desc.world; ++r)
    mfsdp_cond_broadcast(&world->slots[r].cond);
}

/* With the mutex held. */
MFSDP_API void mfsdp__device_poison_locked(mfsdp_device_world *world, const mfsdp_error *why) {
  if (world->poisoned) return;
  if (why != NULL && why->status != MFSDP_OK)
    world->error = *why;
  else
    (void)MFSDP_ERROR_SET(&world->error, MFSDP_E_POISONED, -1,
                          "device transport: poisoned from outside, no reason given");
  world->poisoned = 1;
  mfsdp__device_wake_all(world);
}

/*
 * Ends the world: `why` becomes its error unless there is one, and every rank that waits in a
 * transfer returns with the first error. Any thread; idempotent; calls nothing of CUDA. NULL:
 * E_POISONED without a reason.
 */
MFSDP_API void mfsdp_device_world_poison(mfsdp_device_world *world, const mfsdp_error *why) {
  mfsdp_mutex_lock(&world->mutex);
  mfsdp__device_poison_locked(world, why);
  mfsdp_mutex_unlock(&world->mutex);
}

/* Copies the first error; its status, MFSDP_OK if there is none. */
MFSDP_API mfsdp_status mfsdp__device_first_error(mfsdp_device_world *world, mfsdp_error *error) {
  mfsdp_error_clear(error);
  mfsdp_mutex_lock(&world->mutex);
  if (world->poisoned) *error = world->error;
  mfsdp_mutex_unlock(&world->mutex);
  return error->status;
}

/* What every call on a poisoned world returns: E_POISONED and the first message. */
MFSDP_API mfsdp_status mfsdp__device_refuse(mfsdp_context *context, const mfsdp_error *first,
                                            const char *label) {
  return MFSDP_FAIL_PEER(context, MFSDP_E_POISONED, first->culprit,
                         "%s: refused after the first error (%s, noticed by rank %d): %.250s",
                         label, mfsdp_status_name(first->status), (int)first->rank, first->message);
}

/* ---- who waits for whom: all with the mutex held ---- */

/* Does rank a, in its batch, wait for rank b to send (1) or to receive (2), 3: for both? */
MFSDP_API int mfsdp__device_waits_for(const mfsdp_device_world *world, int32_t a, int32_t b) {
  const mfsdp__device_pair *incoming = mfsdp__device_pair_of(world, b, a);
  const mfsdp__device_pair *outgoing = mfsdp__device_pair_of(world, a, b);
  return (incoming->receive_count > 0 && incoming->head == NULL ? 1 : 0) |
         (outgoing->head != NULL ? 2 : 0);
}

MFSDP_API const char *mfsdp__device_waits_text(int waits) {
  return waits == 3 ? "send and to receive" : waits == 1 ? "send" : "receive";
}

/* Appends to a message under construction; what does not fit is cut. */
MFSDP_API MFSDP_FORMAT(2, 3) void mfsdp__device_append(mfsdp_error *error, const char *format,
                                                       ...) {
  const size_t used = strlen(error->message);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(error->message + used, sizeof(error->message) - used, format, arguments);
  va_end(arguments);
}

/* The lowest rank that `rank` waits for and that has left; -1: none. */
MFSDP_API int32_t mfsdp__device_lost(const mfsdp_device_world *world, int32_t rank) {
  int32_t r;
  for (r = 0; r < world->desc.world; ++r)
    if (r != rank && world->slots[r].role == MFSDP__DEVICE_LEFT &&
        mfsdp__device_waits_for(world, rank, r) != 0)
      return r;
  return -1;
}

/* Follows who waits for whom from `rank` to the ranks that are in no transfer: the silent neighbour
 * is often not the culprit. `suspects` and `visited`: scratch, one entry for each rank. */
MFSDP_API void mfsdp__device_find_culprits(const mfsdp_device_world *world, int32_t rank,
                                           int32_t *suspects, uint8_t *visited, mfsdp_error *why) {
  int32_t suspect_count = 1, r;
  suspects[0] = rank;
  memset(visited, 0, (size_t)world->desc.world);
  visited[rank] = 1;
  while (suspect_count > 0) {
    const int32_t suspect = suspects[--suspect_count];
    for (r = 0; r < world->desc.world; ++r) {
      const mfsdp__device_slot *slot = &world->slots[r];
      if (visited[r] || mfsdp__device_waits_for(world, suspect, r) == 0) continue;
      visited[r] = 1;
      if (slot->in_batch) {
        suspects[suspect_count++] = r;
        continue;
      }
      mfsdp__device_append(why, "; rank %d %s", (int)r,
                           slot->role == MFSDP__DEVICE_ABSENT ? "never joined"
                           : slot->role == MFSDP__DEVICE_LEFT
                               ? "has left"
                               : "does not answer: it is in no transfer");
      if (why->culprit < 0) why->culprit = r;
    }
  }
  if (why->culprit < 0)
    mfsdp__device_append(why, "; they are in transfers themselves: the ranks disagree about the "
                              "order of transfers");
}

/* What a rank says whose deadline has passed. */
MFSDP_API mfsdp_status mfsdp__device_explain(const mfsdp_device_world *world, int32_t rank,
                                             int64_t waited_us, int32_t *suspects, uint8_t *visited,
                                             mfsdp_error *why) {
  const char *separator = " for ";
  int32_t r;
  (void)MFSDP_ERROR_SET(why, MFSDP_E_TIMEOUT, -1, "%s: rank %d waited %lld ms",
                        world->slots[rank].label, (int)rank, (long long)(waited_us / 1000));
  for (r = 0; r < world->desc.world; ++r) {
    const int waits = r == rank ? 0 : mfsdp__device_waits_for(world, rank, r);
    if (waits == 0) continue;
    mfsdp__device_append(why, "%srank %d to %s", separator, (int)r,
                         mfsdp__device_waits_text(waits));
    separator = ", ";
  }
  mfsdp__device_find_culprits(world, rank, suspects, visited, why);
  return why->status;
}

/* ---- life cycle ---- */

MFSDP_API mfsdp_status mfsdp__device_world_check(mfsdp_context *context,
                                                 const mfsdp_device_world_desc *desc) {
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device world: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device world: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_device_world_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->world < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device world: desc.world is %d, needs at least 1",
                      (int)desc->world);
  if (desc->device < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device world: desc.device is %d, needs at least 0", (int)desc->device);
  if (desc->deadline_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device world: desc.deadline_us is %lld, needs to be positive",
                      (long long)desc->deadline_us);
  if (desc->batch_xfer_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "device world: desc.batch_xfer_count is %d, needs at least 1",
                      (int)desc->batch_xfer_count);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__device_world_free(mfsdp_context *context, mfsdp_device_world *world) {
  const size_t count = (size_t)world->desc.world;
  int32_t r;
  for (r = 0; r < world->cond_ready_count; ++r)
    mfsdp_cond_destroy(&world->slots[r].cond);
  if (world->mutex_ready) mfsdp_mutex_destroy(&world->mutex);
  mfsdp_table_free(context, world->pairs, count * count, sizeof(*world->pairs));
  mfsdp_table_free(context, world->slots, count, sizeof(*world->slots));
  mfsdp_table_free(context, world, 1, sizeof(*world));
}

MFSDP_API mfsdp_status mfsdp__device_world_fill(mfsdp_context *context, mfsdp_device_world *world) {
  const size_t count = (size_t)world->desc.world;
  size_t pair_count;
  mfsdp_status status;
  void *table;
  if (!mfsdp_size_mul(count, count, &pair_count))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "device world: %zu ranks overflow size_t", count);
  MFSDP_TRY(
      mfsdp_table_alloc(context, count, sizeof(*world->slots), "device world: ranks", &table));
  world->slots = (mfsdp__device_slot *)table;
  MFSDP_TRY(
      mfsdp_table_alloc(context, pair_count, sizeof(*world->pairs), "device world: pairs", &table));
  world->pairs = (mfsdp__device_pair *)table;
  status = mfsdp_mutex_init(&world->mutex);
  world->mutex_ready = status == MFSDP_OK;
  while (status == MFSDP_OK && world->cond_ready_count < world->desc.world) {
    status = mfsdp_cond_init(&world->slots[world->cond_ready_count].cond);
    if (status == MFSDP_OK) ++world->cond_ready_count;
  }
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL(context, status, "device world: the system refused a mutex or a condition");
}

/*
 * Makes the shared part of a world. All of its memory (about world^2 x 24 bytes) comes from
 * `context`, which belongs to the calling thread and must be handed to mfsdp_device_world_destroy
 * again. Calls nothing of CUDA. COMPLETE. *out is NULL after an error: E_ARGUMENT, E_OVERFLOW,
 * E_MEMORY, E_IO.
 */
MFSDP_API mfsdp_status mfsdp_device_world_create(mfsdp_context *context,
                                                 const mfsdp_device_world_desc *desc,
                                                 mfsdp_device_world **out) {
  mfsdp_device_world *world;
  mfsdp_status status;
  void *table;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "device world: out is NULL");
  *out = NULL;
  MFSDP_TRY(mfsdp__device_world_check(context, desc));
  MFSDP_TRY(mfsdp_table_alloc(context, 1, sizeof(*world), "device world", &table));
  world = (mfsdp_device_world *)table;
  world->desc = *desc;
  world->error = mfsdp_error_none();
  status = mfsdp__device_world_fill(context, world);
  if (status == MFSDP_OK)
    *out = world;
  else
    mfsdp__device_world_free(context, world);
  return status;
}

/*
 * Ends a world that all ranks have left, with the context that made it. NULL is allowed. COMPLETE.
 * E_STATE while a rank is joined: the message names it, nothing is freed.
 */
MFSDP_API mfsdp_status mfsdp_device_world_destroy(mfsdp_context *context,
                                                  mfsdp_device_world *world) {
  int32_t r, joined = -1;
  if (world == NULL) return MFSDP_OK;
  mfsdp_mutex_lock(&world->mutex);
  for (r = 0; r < world->desc.world && joined < 0; ++r)
    if (world->slots[r].role == MFSDP__DEVICE_JOINED) joined = r;
  mfsdp_mutex_unlock(&world->mutex);
  if (joined >= 0)
    return MFSDP_FAIL_PEER(
        context, MFSDP_E_STATE, joined,
        "device world: the transport of rank %d is still there; destroy it first", (int)joined);
  mfsdp__device_world_free(context, world);
  return MFSDP_OK;
}

#endif /* MFSDP_CUDA_DEVICE_WORLD_H */
