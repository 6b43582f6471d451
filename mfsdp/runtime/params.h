/* SPDX-License-Identifier: MIT */
/*
 * runtime/params.h - initial values and export of whole parameters. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_PARAMS_H
#define MFSDP_RUNTIME_PARAMS_H

#include "setup.h"

/* Elements handed to an init function at once: bounds the staging memory. */
#define MFSDP__INIT_CHUNK 65536

/* ---- initial values ---- */

/* `count` values from `host` (PINNED) to a piece from element `done` on, by way of `device`. */
MFSDP_API mfsdp_status mfsdp__init_store(mfsdp_runtime *rt, const mfsdp_piece *piece, int64_t done,
                                         int64_t count, const float *host, float *device) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const mfsdp_dtype compute = rt->units[piece->unit].compute;
  const size_t nbytes = (size_t)count * sizeof(float);
  float *master = mfsdp__piece_master(rt, piece);
  unsigned char *copy = mfsdp__piece_copy(rt, piece);
  if (master != NULL)
    MFSDP_TRY(ops->copy(self, rt->compute, master + done, rt->state_space, host, MFSDP_SPACE_PINNED,
                        nbytes));
  if (copy != NULL) {
    MFSDP_TRY(
        ops->copy(self, rt->compute, device, MFSDP_SPACE_DEVICE, host, MFSDP_SPACE_PINNED, nbytes));
    MFSDP_TRY(ops->cast(self, rt->compute, copy + (size_t)done * mfsdp_dtype_nbytes(compute),
                        compute, device, MFSDP_F32, count));
  }
  MFSDP_TRY(ops->event_record(self, rt->compute, rt->compute_done));
  return ops->event_wait(self, rt->context, rt->compute_done, rt->deadline_us);
}

MFSDP_API mfsdp_status mfsdp__init_group(mfsdp_runtime *rt, const mfsdp__group_entry *group,
                                         mfsdp_init_fn fill, void *user, float *host,
                                         float *device) {
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &count);
  for (i = 0; i < count; ++i) {
    int64_t done, length;
    if (!mfsdp__holds(group, &pieces[i])) continue;
    for (done = 0; done < pieces[i].count; done += length) {
      length =
          pieces[i].count - done < MFSDP__INIT_CHUNK ? pieces[i].count - done : MFSDP__INIT_CHUNK;
      fill(user, group->param_first + pieces[i].param, pieces[i].first + done, length, host);
      MFSDP_TRY(mfsdp__init_store(rt, &pieces[i], done, length, host, device));
    }
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__init_all(mfsdp_runtime *rt, mfsdp_init_fn fill, void *user,
                                       float *host, float *device) {
  int32_t g;
  for (g = 0; g < rt->group_count; ++g)
    MFSDP_TRY(mfsdp__init_group(rt, &rt->groups[g], fill, user, host, device));
  return rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->step_done);
}

/*
 * Sets all parameters this rank owns (REPLICATED: all there are), FROZEN ones too, from `fill`,
 * which gets the runtime's parameter numbers. Aliases are not asked for. No communication.
 * COMPLETE. E_STATE: inside a step, or a unit is acquired. E_MEMORY (a staging buffer of 256 KiB,
 * two with compute copies, given back).
 */
MFSDP_API mfsdp_status mfsdp_runtime_init(mfsdp_runtime *rt, mfsdp_init_fn fill, void *user) {
  const size_t nbytes = MFSDP__INIT_CHUNK * sizeof(float);
  mfsdp_buffer host, device;
  mfsdp_status status;
  int32_t i;
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (fill == NULL) return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "init: fill is NULL");
  if (rt->in_step) return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "init: a step is open");
  for (i = 0; i < rt->unit_count; ++i)
    if (rt->units[i].acquires > 0)
      return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "init: unit %d is acquired", (int)i);
  mfsdp__unit_drop_unacquired(rt);
  /* What was gathered ahead and is now dropped may still be on its way out of the masters. */
  MFSDP__RUNTIME_TRY(rt, mfsdp__runtime_order(rt, rt->communication, rt->reduced, rt->compute));
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, nbytes, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STAGING, &host));
  status = mfsdp_buffer_alloc(rt->context, rt->backend, rt->has_copies ? nbytes : 0,
                              MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &device);
  if (status == MFSDP_OK) {
    status = mfsdp__init_all(rt, fill, user, (float *)host.data, (float *)device.data);
    if (status != MFSDP_OK) {
      (void)mfsdp__runtime_failed(rt, status);
      mfsdp__runtime_drain(rt); /* a queue may still read the staging */
    }
    mfsdp_buffer_free(rt->context, rt->backend, &device);
  }
  mfsdp_buffer_free(rt->context, rt->backend, &host);
  return status;
}

/* ---- export ---- */

/* The part of a piece in elements [first, first + count) of its tensor. */
typedef struct mfsdp__export_run {
  int64_t first, count; /* of the tensor */
  int32_t root, group;
  float *chunk; /* DEVICE: holds the tensor's elements from chunk_first on */
  int64_t chunk_first;
} mfsdp__export_run;

/* The owner's values in fp32, at their place in its own chunk: from the master, or from a FROZEN
 * copy. */
MFSDP_API mfsdp_status mfsdp__export_load(mfsdp_runtime *rt, const mfsdp_piece *piece,
                                          const mfsdp__export_run *run, float *place) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  const int64_t skipped = run->first - piece->first;
  const float *master = mfsdp__piece_master(rt, piece);
  const mfsdp_dtype compute = rt->units[piece->unit].compute;
  if (master != NULL)
    return ops->copy(rt->backend->self, rt->communication, place, MFSDP_SPACE_DEVICE,
                     master + skipped, rt->state_space, (size_t)run->count * sizeof(float));
  return ops->cast(rt->backend->self, rt->communication, place, MFSDP_F32,
                   mfsdp__piece_copy(rt, piece) + (size_t)skipped * mfsdp_dtype_nbytes(compute),
                   compute, run->count);
}

/* One run from its owner to the receivers, at its place in their chunks; a batch of its own. */
MFSDP_API mfsdp_status mfsdp__export_send(mfsdp_runtime *rt, const mfsdp_piece *piece,
                                          const mfsdp__export_run *run) {
  const mfsdp__group_entry *group = &rt->groups[run->group];
  float *place = run->chunk + (run->first - run->chunk_first);
  const size_t nbytes = (size_t)run->count * sizeof(float);
  const int owns = piece->owner == group->rank;
  mfsdp_traffic_count *sent = &rt->context->counters.sent[MFSDP_TRAFFIC_EXPORT];
  mfsdp_batch batch = mfsdp_batch_default();
  int32_t r, count = 0;
  if (group->replicated) /* nobody has to be sent anything */
    return run->root < 0 || run->root == group->rank ? mfsdp__export_load(rt, piece, run, place)
                                                     : MFSDP_OK;
  if (owns) MFSDP_TRY(mfsdp__export_load(rt, piece, run, place));
  for (r = 0; r < group->world; ++r) {
    mfsdp_xfer *x = &rt->export_xfers[count];
    const int sends = owns && r != group->rank && (run->root < 0 || r == run->root);
    const int receives = r == piece->owner && !owns && (run->root < 0 || run->root == group->rank);
    if (!sends && !receives) continue;
    memset(x, 0, sizeof(*x));
    x->nbytes = nbytes;
    x->peer = r;
    x->is_send = sends;
    if (sends)
      x->src = place;
    else
      x->dst = place;
    sent->payload_nbytes += sends ? nbytes : 0;
    sent->wire_nbytes += sends ? nbytes : 0;
    sent->transfer_count += (uint64_t)sends;
    ++count;
  }
  if (count == 0) return MFSDP_OK;
  batch.xfers = rt->export_xfers;
  batch.xfer_count = count;
  batch.traffic = MFSDP_TRAFFIC_EXPORT;
  batch.label = "export";
  return mfsdp_transport_submit(rt->context, group->transport, rt->communication, &batch);
}

/* Elements [first, first + count) of a parameter, through one slot. */
MFSDP_API mfsdp_status mfsdp__export_chunk(mfsdp_runtime *rt, int32_t param, int32_t root,
                                           const mfsdp__slot *slot, int64_t first, int64_t count,
                                           float *dst) {
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const mfsdp__param_entry *owner = &rt->params[rt->params[param].owner];
  const mfsdp__group_entry *group = &rt->groups[owner->group];
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_param_pieces(group->plan, owner->index, &piece_count);
  mfsdp__export_run run;
  run.root = root;
  run.group = owner->group;
  run.chunk = (float *)(void *)slot->data;
  run.chunk_first = first;
  for (i = 0; i < piece_count; ++i) {
    const int64_t end = pieces[i].first + pieces[i].count;
    const int64_t last = end < first + count ? end : first + count;
    run.first = pieces[i].first > first ? pieces[i].first : first;
    run.count = last - run.first;
    if (run.count > 0) MFSDP_TRY(mfsdp__export_send(rt, &pieces[i], &run));
  }
  if (root < 0 || root == group->rank)
    MFSDP_TRY(ops->copy(self, rt->communication, dst + first, MFSDP_SPACE_HOST, slot->data,
                        MFSDP_SPACE_DEVICE, (size_t)count * sizeof(float)));
  MFSDP_TRY(ops->event_record(self, rt->communication, slot->idle));
  return ops->event_wait(self, rt->context, slot->idle, rt->deadline_us);
}

MFSDP_API mfsdp_status mfsdp__export(mfsdp_runtime *rt, int32_t param, int32_t root,
                                     const mfsdp__ring *ring, int32_t index, float *dst) {
  const mfsdp__slot *slot = &ring->slots[index];
  const mfsdp_backend_ops *ops = rt->backend->ops;
  const mfsdp__param_entry *entry = &rt->params[param];
  const int64_t numel = mfsdp_plan_param_numel(rt->groups[entry->group].plan, entry->index);
  const int64_t most = rt->groups[entry->group].export_count;
  int64_t capacity = (int64_t)(ring->slot_nbytes / sizeof(float)), first;
  if (capacity > most) capacity = most;
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, slot->idle));
  MFSDP_TRY(ops->queue_wait(rt->backend->self, rt->communication, rt->step_done));
  for (first = 0; first < numel; first += capacity)
    MFSDP_TRY(mfsdp__export_chunk(rt, param, root, slot, first,
                                  numel - first < capacity ? numel - first : capacity, dst));
  return MFSDP_OK;
}

/* Where an export finds its slot: among the parameters', after giving up what was gathered ahead if
 * it must, or, where all of them are kept or the unit takes none (RESIDENT), among the
 * gradients'. */
MFSDP_API mfsdp__ring *mfsdp__export_ring(mfsdp_runtime *rt, const mfsdp__unit *unit) {
  if (unit->resident) return &rt->grad_ring;
  if (mfsdp__ring_free_count(&rt->param_ring) == 0) mfsdp__unit_drop_ahead(rt);
  if (mfsdp__ring_free_count(&rt->param_ring) > 0) return &rt->param_ring;
  return mfsdp__unit_slots_available(rt) > 0 ? &rt->grad_ring : &rt->param_ring;
}

/*
 * Copies a parameter's whole fp32 master (of a FROZEN one its value) to `dst` (HOST, numel floats,
 * row-major) on rank `root` of its group, or on every rank of it for root -1; other ranks pass
 * NULL. An alias gives its owner's. Collective over the group, COMPLETE; with several groups every
 * rank of the job calls it equally often, since it may give up what was gathered ahead. Streams
 * through one free parameter slot (a gradient slot of RESIDENT ones) and uses no other
 * memory. Of a REPLICATED parameter nothing is sent.
 * E_ARGUMENT: unknown parameter or root, dst NULL where it is needed. E_STATE: no such slot is
 * free.
 */
MFSDP_API mfsdp_status mfsdp_param_export(mfsdp_runtime *rt, int32_t param, int32_t root,
                                          float *dst) {
  const mfsdp__group_entry *group;
  mfsdp__ring *ring;
  mfsdp_status status;
  int32_t slot;
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  group =
      param < 0 || param >= rt->param_count ? &rt->groups[0] : &rt->groups[rt->params[param].group];
  if (param < 0 || param >= rt->param_count || root < -1 || root >= group->world)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "export: parameter %d to root %d; needs 0 to %d, and -1 to %d", (int)param,
                      (int)root, (int)rt->param_count - 1, (int)group->world - 1);
  if ((root < 0 || root == group->rank) && dst == NULL &&
      mfsdp_plan_param_numel(group->plan, rt->params[param].index) > 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "export: dst is NULL on a receiving rank");
  ring = mfsdp__export_ring(rt, &rt->units[rt->params[param].unit]);
  slot = mfsdp__ring_claim(ring, rt->params[param].unit);
  if (slot < 0 && ring == &rt->grad_ring)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "export: all %d gradient slots are open; reduce a unit first",
                      (int)rt->grad_ring.count);
  if (slot < 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "export: all %d parameter slots are held; release a unit first",
                      (int)rt->param_ring.count);
  status = mfsdp__export(rt, param, root, ring, slot, dst);
  ring->slots[slot].unit = -1;
  if (status == MFSDP_OK) return MFSDP_OK;
  (void)mfsdp__runtime_failed(rt, status);
  mfsdp__runtime_drain(rt); /* dst is the caller's */
  return status;
}

/* The optimizer and its state table, for checkpoints and tests; lives as long as the runtime. */
MFSDP_API const mfsdp_optimizer *mfsdp_runtime_optimizer(const mfsdp_runtime *rt) {
  return rt->optimizer;
}

#endif /* MFSDP_RUNTIME_PARAMS_H */
