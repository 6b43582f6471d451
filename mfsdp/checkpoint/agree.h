/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/agree.h - after each phase all ranks learn how it went on all of them, so that they
 * return the same. Private to checkpoint.h.
 *
 * All ranks are those of group 0 and of its replicas: what the ranks of a copy said is folded into
 * one message, and those of the copies into one again.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_AGREE_H
#define MFSDP_CHECKPOINT_AGREE_H

#include "tables.h"

/* Tells `own` to the ranks of one control plane. It becomes what they said together. */
MFSDP_API mfsdp_status mfsdp__ck_fold(mfsdp_checkpoint *ck, const mfsdp_control *control,
                                      mfsdp__ck_message *own, int64_t timeout_us) {
  const mfsdp__ck_message *all = ck->messages;
  int32_t r;
  MFSDP_TRY(control->ops->allgather(control->self, ck->context, own, sizeof(*own), ck->messages,
                                    timeout_us));
  *own = all[0];
  for (r = 1; r < control->world; ++r) {
    own->value += all[r].value;
    if (own->other == 0) own->other = all[r].hash != all[0].hash ? all[r].first : all[r].other;
    if (own->status != (int32_t)MFSDP_OK || all[r].status == (int32_t)MFSDP_OK) continue;
    own->status = all[r].status;
    own->culprit = all[r].culprit;
    memcpy(own->text, all[r].text, sizeof(own->text));
  }
  return MFSDP_OK;
}

/*
 * Exchanges `own` (its status is set here) and gives the verdict: the status of the lowest rank that
 * failed, with its message; E_MISMATCH where hashes differ. ck->told says afterwards what all ranks
 * said: the sum of values, and the token and the name of rank 0.
 */
MFSDP_API mfsdp_status mfsdp__ck_agree_within(mfsdp_checkpoint *ck, mfsdp_status status,
                                              mfsdp__ck_message *own, int64_t timeout_us) {
  const mfsdp__group_entry *group = &ck->rt->groups[0];
  mfsdp__ck_message *told = &ck->told;
  own->status = (int32_t)status;
  own->first = own->culprit = ck->rank;
  own->other = 0;
  if (status != MFSDP_OK)
    (void)snprintf(own->text, sizeof(own->text), "%.230s", ck->context->error.message);
  *told = *own;
  MFSDP_TRY(mfsdp__ck_fold(ck, group->control, told, timeout_us));
  if (group->replica != NULL)
    MFSDP_TRY(mfsdp__ck_fold(ck, group->replica_control, told, timeout_us));
  if (told->status != (int32_t)MFSDP_OK)
    return MFSDP_FAIL_PEER(ck->context, (mfsdp_status)told->status, told->culprit,
                           "checkpoint: rank %d: %s", (int)told->culprit, told->text);
  if (told->other != 0)
    return MFSDP_FAIL_PEER(ck->context, MFSDP_E_MISMATCH, told->other,
                           "checkpoint: ranks 0 and %d differ in tensors, options or steps",
                           (int)told->other);
  return MFSDP_OK;
}

/* The same, waiting as long as a slow disk may need. */
MFSDP_API mfsdp_status mfsdp__ck_agree(mfsdp_checkpoint *ck, mfsdp_status status,
                                       mfsdp__ck_message *own) {
  return mfsdp__ck_agree_within(ck, status, own, ck->timeout_us);
}

MFSDP_API mfsdp__ck_message mfsdp__ck_message_default(void) {
  mfsdp__ck_message message;
  memset(&message, 0, sizeof(message));
  return message;
}

#endif /* MFSDP_CHECKPOINT_AGREE_H */
