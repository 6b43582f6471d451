/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/agree.h - after each phase all ranks learn how it went on all of them, so that they
 * return the same. Private to checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_AGREE_H
#define MFSDP_CHECKPOINT_AGREE_H

#include "tables.h"

typedef struct mfsdp__ck_message {
  int32_t status, pad;
  int64_t value; /* what the phase is about: bytes written, a step */
  uint64_t hash; /* must be equal on all ranks */
  uint64_t token;
  char name[MFSDP_CHECKPOINT_NAME_NBYTES];
  char text[240];
} mfsdp__ck_message;

/*
 * Exchanges `own` (its status is set here) and gives the verdict: the status of the lowest rank that
 * failed, with its message; E_MISMATCH where hashes differ. All ranks' messages are in
 * ck->messages afterwards.
 */
MFSDP_API mfsdp_status mfsdp__ck_agree(mfsdp_checkpoint *ck, mfsdp_status status,
                                       mfsdp__ck_message *own) {
  const mfsdp__ck_message *all = (const mfsdp__ck_message *)ck->messages;
  const mfsdp_control *control = ck->control;
  int32_t r;
  own->status = (int32_t)status;
  if (status != MFSDP_OK)
    (void)snprintf(own->text, sizeof(own->text), "%.230s", ck->context->error.message);
  MFSDP_TRY(control->ops->allgather(control->self, ck->context, own, sizeof(*own), ck->messages,
                                    ck->timeout_us));
  for (r = 0; r < ck->world; ++r)
    if (all[r].status != (int32_t)MFSDP_OK)
      return MFSDP_FAIL_PEER(ck->context, (mfsdp_status)all[r].status, r, "checkpoint: rank %d: %s",
                             (int)r, all[r].text);
  for (r = 1; r < ck->world; ++r)
    if (all[r].hash != all[0].hash)
      return MFSDP_FAIL_PEER(ck->context, MFSDP_E_MISMATCH, r,
                             "checkpoint: ranks 0 and %d differ in tensors, options or steps",
                             (int)r);
  return MFSDP_OK;
}

MFSDP_API mfsdp__ck_message mfsdp__ck_message_default(void) {
  mfsdp__ck_message message;
  memset(&message, 0, sizeof(message));
  return message;
}

#endif /* MFSDP_CHECKPOINT_AGREE_H */
