/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_register.h - tells transports that want to know which memory the runtime sends from
 * and receives into. Part of runtime.h.
 *
 * Every DEVICE buffer that lives as long as the runtime and takes part in a collective is registered
 * once, whole, with each transport of several ranks; all registrations are given back before the
 * first buffer is freed. Transports without the pair of operations cost nothing.
 * Does not: register the caller's memory (exports), which may be gone at any time.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_REGISTER_H
#define MFSDP_RUNTIME_SETUP_REGISTER_H

#include "tables.h"

/* Buffers of the runtime that one transport may be told of. */
#define MFSDP__REGISTERED_MOST 13

MFSDP_API int mfsdp__wants_buffers(const mfsdp_transport *transport) {
  return transport != NULL && transport->world > 1 && MFSDP_HAS(transport->ops, buffer_register) &&
         MFSDP_HAS(transport->ops, buffer_deregister);
}

MFSDP_API mfsdp_status mfsdp__register_buffers(mfsdp_runtime *rt, const mfsdp_transport *transport,
                                               const mfsdp_buffer *replica_sum) {
  const mfsdp_buffer *buffers[MFSDP__REGISTERED_MOST];
  int i;
  if (!mfsdp__wants_buffers(transport)) return MFSDP_OK;
  buffers[0] = &rt->master;
  buffers[1] = &rt->copy;
  buffers[2] = &rt->accumulator;
  buffers[3] = &rt->staging;
  buffers[4] = &rt->wire;
  buffers[5] = &rt->param_ring.buffer;
  buffers[6] = &rt->grad_ring.buffer;
  buffers[7] = &rt->verdict.messages;
  buffers[8] = replica_sum;
  buffers[9] = &rt->resident;
  buffers[10] = &rt->sums;
  buffers[11] = &rt->banded.directions;
  buffers[12] = &rt->banded.slots;
  for (i = 0; i < MFSDP__REGISTERED_MOST; ++i) {
    mfsdp__registration *r = &rt->registrations[rt->registration_count];
    if (buffers[i]->data == NULL || buffers[i]->space != MFSDP_SPACE_DEVICE) continue;
    MFSDP_TRY(transport->ops->buffer_register(transport->self, rt->context, buffers[i]->data,
                                              buffers[i]->nbytes, &r->handle));
    r->transport = transport;
    ++rt->registration_count;
  }
  return MFSDP_OK;
}

/* After all buffers are there. */
MFSDP_API mfsdp_status mfsdp__setup_registrations(mfsdp_runtime *rt) {
  int32_t g, count = 0;
  void *memory;
  for (g = 0; g < rt->group_count; ++g)
    count += MFSDP__REGISTERED_MOST * (mfsdp__wants_buffers(rt->groups[g].transport) +
                                       mfsdp__wants_buffers(rt->groups[g].replica));
  if (count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)count, sizeof(*rt->registrations),
                              "runtime registrations", &memory));
  rt->registrations = (mfsdp__registration *)memory;
  rt->registration_capacity = count;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    MFSDP_TRY(mfsdp__register_buffers(rt, group->transport, &group->replica_sum));
    MFSDP_TRY(mfsdp__register_buffers(rt, group->replica, &group->replica_sum));
  }
  return MFSDP_OK;
}

/* Before any buffer is freed, the last first. A transport that refuses has failed: nothing more can
 * be done about it. */
MFSDP_API void mfsdp__teardown_registrations(mfsdp_runtime *rt) {
  while (rt->registration_count > 0) {
    const mfsdp__registration *r = &rt->registrations[--rt->registration_count];
    (void)r->transport->ops->buffer_deregister(r->transport->self, rt->context, r->handle);
  }
  mfsdp_table_free(rt->context, rt->registrations, (size_t)rt->registration_capacity,
                   sizeof(*rt->registrations));
}

#endif /* MFSDP_RUNTIME_SETUP_REGISTER_H */
