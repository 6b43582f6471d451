/* SPDX-License-Identifier: MIT */
/*
 * runtime/params.h - initial values and export of whole parameters. Part of runtime.h.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_PARAMS_H
#define MFSDP_RUNTIME_PARAMS_H

#include "setup.h"

/* Elements handed to an init function at once: bounds the host staging memory. */
#define MFSDP__INIT_CHUNK 65536

MFSDP_API mfsdp_status mfsdp__init_piece(mfsdp_runtime *rt, const mfsdp_piece *piece, mfsdp_init_fn fill,
                                         void *user, float *staging)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  float *master = (float *)rt->master.data + rt->units[piece->unit].shard_first + piece->shard_offset;
  int64_t done, count;
  for (done = 0; done < piece->count; done += count) {
    count = piece->count - done < MFSDP__INIT_CHUNK ? piece->count - done : MFSDP__INIT_CHUNK;
    fill(user, piece->param, piece->first + done, count, staging);
    MFSDP_TRY(ops->copy(self, rt->compute, master + done, MFSDP_SPACE_DEVICE, staging,
                        MFSDP_SPACE_PINNED, (size_t)count * sizeof(float)));
    MFSDP_TRY(ops->event_record(self, rt->compute, rt->compute_done));
    MFSDP_TRY(ops->event_wait(self, rt->context, rt->compute_done, rt->transport->deadline_us));
  }
  return MFSDP_OK;
}

/*
 * Sets the masters of all parameters this rank owns, FROZEN ones too, from `fill`. Aliases are not asked
 * for. No communication. COMPLETE. E_STATE: inside a step, or a unit is acquired. E_MEMORY (a staging
 * buffer of 256 KiB, given back).
 */
MFSDP_API mfsdp_status mfsdp_runtime_init(mfsdp_runtime *rt, mfsdp_init_fn fill, void *user)
{
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(rt->plan, -1, &count);
  mfsdp_status status = MFSDP_OK;
  mfsdp_buffer staging;
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (fill == NULL) return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "init: fill is NULL");
  if (rt->in_step) return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "init: a step is open");
  for (i = 0; i < rt->unit_count; ++i)
    if (rt->units[i].acquires > 0)
      return MFSDP_FAIL(rt->context, MFSDP_E_STATE, "init: unit %d is acquired", (int)i);
  MFSDP_TRY(mfsdp_buffer_alloc(rt->context, rt->backend, MFSDP__INIT_CHUNK * sizeof(float),
                               MFSDP_SPACE_PINNED, MFSDP_MEMORY_STAGING, &staging));
  for (i = 0; i < count && status == MFSDP_OK; ++i)
    if (pieces[i].owner == rt->rank)
      status = mfsdp__init_piece(rt, &pieces[i], fill, user, (float *)staging.data);
  if (status != MFSDP_OK) {
    (void)mfsdp__runtime_failed(rt, status);
    mfsdp__runtime_drain(rt);
  }
  mfsdp_buffer_free(rt->context, rt->backend, &staging);
  if (status != MFSDP_OK) return status;
  MFSDP__RUNTIME_TRY(rt, rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->step_done));
  return MFSDP_OK;
}

/* One piece from its owner to the receivers, into `full` at its place; a batch of its own. */
MFSDP_API mfsdp_status mfsdp__export_piece(mfsdp_runtime *rt, const mfsdp_piece *piece, int32_t root,
                                           float *full)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  const float *master =
    (const float *)rt->master.data + rt->units[piece->unit].shard_first + piece->shard_offset;
  const size_t nbytes = (size_t)piece->count * sizeof(float);
  const int receives = root < 0 || root == rt->rank;
  mfsdp_traffic_count *sent = &rt->context->counters.sent[MFSDP_TRAFFIC_EXPORT];
  mfsdp_batch batch = mfsdp_batch_default();
  int32_t r, count = 0;
  if (piece->owner == rt->rank) {
    for (r = 0; r < rt->world; ++r) {
      mfsdp_xfer *x = &rt->export_xfers[count];
      if (r == rt->rank || (root >= 0 && r != root)) continue;
      memset(x, 0, sizeof(*x));
      x->src = master;
      x->nbytes = nbytes;
      x->peer = r;
      x->is_send = 1;
      ++count;
      sent->payload_nbytes += nbytes;
      sent->wire_nbytes += nbytes;
      ++sent->transfer_count;
    }
    if (receives)
      MFSDP_TRY(ops->copy(rt->backend->self, rt->communication, full + piece->first, MFSDP_SPACE_DEVICE,
                          master, MFSDP_SPACE_DEVICE, nbytes));
  } else if (receives) {
    mfsdp_xfer *x = &rt->export_xfers[count++];
    memset(x, 0, sizeof(*x));
    x->dst = full + piece->first;
    x->nbytes = nbytes;
    x->peer = piece->owner;
  }
  if (count == 0) return MFSDP_OK;
  batch.xfers = rt->export_xfers;
  batch.xfer_count = count;
  batch.traffic = MFSDP_TRAFFIC_EXPORT;
  batch.label = "export";
  return mfsdp_transport_submit(rt->context, rt->transport, rt->communication, &batch);
}

MFSDP_API mfsdp_status mfsdp__export(mfsdp_runtime *rt, int32_t param, int32_t root,
                                     mfsdp__slot *slot, float *dst)
{
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  const size_t nbytes = (size_t)mfsdp_plan_param_numel(rt->plan, param) * sizeof(float);
  int32_t count = 0, i;
  const mfsdp_piece *pieces =
    mfsdp_plan_param_pieces(rt->plan, mfsdp_plan_param_owner(rt->plan, param), &count);
  MFSDP_TRY(ops->queue_wait(self, rt->communication, slot->idle));
  MFSDP_TRY(ops->queue_wait(self, rt->communication, rt->step_done));
  for (i = 0; i < count; ++i)
    MFSDP_TRY(mfsdp__export_piece(rt, &pieces[i], root, (float *)(void *)slot->data));
  if (root < 0 || root == rt->rank)
    MFSDP_TRY(ops->copy(self, rt->communication, dst, MFSDP_SPACE_HOST, slot->data,
                        MFSDP_SPACE_DEVICE, nbytes));
  MFSDP_TRY(ops->event_record(self, rt->communication, slot->idle));
  return ops->event_wait(self, rt->context, slot->idle, rt->transport->deadline_us);
}

/*
 * Copies a parameter's whole fp32 master to `dst` (HOST, numel floats, row-major) on rank `root`, or on
 * every rank for root -1; other ranks pass NULL. An alias gives its owner's. Collective, COMPLETE. Uses
 * one free parameter slot and no other memory.
 * E_ARGUMENT: unknown parameter or root, dst NULL where it is needed. E_STATE: no parameter slot is free.
 */
MFSDP_API mfsdp_status mfsdp_param_export(mfsdp_runtime *rt, int32_t param, int32_t root, float *dst)
{
  mfsdp_status status;
  int32_t slot;
  MFSDP_TRY(mfsdp__runtime_usable(rt));
  if (param < 0 || param >= rt->param_count || root < -1 || root >= rt->world)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT,
                      "export: parameter %d to root %d; needs 0 to %d, and -1 to %d", (int)param,
                      (int)root, (int)rt->param_count - 1, (int)rt->world - 1);
  if ((root < 0 || root == rt->rank) && dst == NULL && mfsdp_plan_param_numel(rt->plan, param) > 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_ARGUMENT, "export: dst is NULL on a receiving rank");
  slot = mfsdp__ring_claim(&rt->param_ring, rt->params[param].unit);
  if (slot < 0)
    return MFSDP_FAIL(rt->context, MFSDP_E_STATE,
                      "export: all %d parameter slots are held; release a unit first",
                      (int)rt->param_ring.count);
  status = mfsdp__export(rt, param, root, &rt->param_ring.slots[slot], dst);
  rt->param_ring.slots[slot].unit = -1;
  if (status == MFSDP_OK) return MFSDP_OK;
  (void)mfsdp__runtime_failed(rt, status);
  mfsdp__runtime_drain(rt); /* dst is the caller's */
  return status;
}

/* The optimizer and its state table, for checkpoints and tests; lives as long as the runtime. */
MFSDP_API const mfsdp_optimizer *mfsdp_runtime_optimizer(const mfsdp_runtime *rt)
{
  return rt->optimizer;
}

#endif /* MFSDP_RUNTIME_PARAMS_H */
