/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/api.h - the two ways to save: mfsdp_checkpoint_save while the ranks wait, and
 * mfsdp_checkpoint_save_begin while they train on. Part of checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_API_H
#define MFSDP_CHECKPOINT_API_H

#include "background.h"

/* What both begin with: an earlier save ends, and the counts of this one are taken. */
MFSDP_API mfsdp_status mfsdp__ck_begin(mfsdp_checkpoint *ck, const mfsdp_safetensors_pair *strings,
                                       int32_t string_count, mfsdp_progress *progress,
                                       mfsdp__ck_save *save) {
  const mfsdp_control *control = ck->rt->groups[0].control;
  if (string_count < 0 || string_count > 1 << 20 || (string_count > 0 && strings == NULL))
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT, "checkpoint: %d strings, needs 0 or a table",
                      (int)string_count);
  MFSDP_TRY(mfsdp_checkpoint_wait(ck));
  MFSDP_TRY(mfsdp_runtime_progress(ck->rt, progress));
  memset(save, 0, sizeof(*save));
  save->step = progress->step;
  save->token = mfsdp_hash_u64(mfsdp_hash_u64(ck->hash, (uint64_t)(uintptr_t)ck),
                               (uint64_t)control->ops->now_us(control->self));
  mfsdp__ck_name(save->step, ".attempt", save->attempt);
  return MFSDP_OK;
}

/* Phase 1. */
MFSDP_API mfsdp_status mfsdp__ck_agree_to_save(mfsdp_checkpoint *ck, mfsdp__ck_save *save,
                                               const mfsdp_progress *progress,
                                               const mfsdp_safetensors_pair *strings,
                                               int32_t string_count) {
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status = MFSDP_OK;
  own.hash = mfsdp_hash_u64(ck->hash, (uint64_t)save->step);
  own.token = save->token;
  if (ck->rank == 0) status = mfsdp__ck_prepare(ck, save, progress, strings, string_count);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  save->token = ck->told.token;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_phases(mfsdp_checkpoint *ck, mfsdp__ck_save *save,
                                        const mfsdp_progress *progress,
                                        const mfsdp_safetensors_pair *strings,
                                        int32_t string_count) {
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status;
  MFSDP_TRY(mfsdp__ck_agree_to_save(ck, save, progress, strings, string_count));
  status = mfsdp__ck_write_own(ck, save, &own.value);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  status = mfsdp__ck_check_written(ck);
  if (status == MFSDP_OK && ck->rank == 0) status = mfsdp__ck_finish(ck, save);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  if (ck->rank == 0) status = mfsdp__ck_keep_last(ck, save->step);
  return mfsdp__ck_agree(ck, status, &own);
}

/*
 * Saves masters, states and counts after the last step that ended, as <folder>/step-N, with
 * `strings` of the program's own (random seed, data position; the same on all ranks; NULL for
 * none). Collective, between two steps. COMPLETE: on OK the checkpoint survives a loss of power, and
 * `latest` names it. Its bytes depend neither on the number of ranks nor on the planner, the
 * transport, groups or replicas; of replicas the first one writes.
 * All ranks return the same status, with the message of the lowest rank that failed; then `latest`
 * still names what it named before. If only the removal of older checkpoints failed, it names the
 * new one, and the message says what could not be removed.
 * E_STATE: a step is open; someone else saves to this folder. E_IO: the disk; a rank does not see
 * the folder that rank 0 made. E_MISMATCH: ranks differ. E_ARGUMENT: strings that are no UTF-8, or
 * have a key twice, or one of the library's. E_MEMORY (headers and indexes, given back),
 * E_TIMEOUT, E_PEER. The failure of an earlier save in the background comes first: then this one has
 * not begun, and may be tried again.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_save(mfsdp_checkpoint *ck,
                                             const mfsdp_safetensors_pair *strings,
                                             int32_t string_count) {
  mfsdp_progress progress = mfsdp_progress_default();
  mfsdp__ck_save save;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__ck_begin(ck, strings, string_count, &progress, &save));
  status = mfsdp__ck_phases(ck, &save, &progress, strings, string_count);
  mfsdp__ck_end_save(ck, &save, status);
  return status;
}

/*
 * Begins the same save, of the state at this moment, and returns while another thread writes.
 * Collective, between two steps. The rank waits for its last update, for rank 0 to make the files,
 * and for a copy of what it owns; nothing is written or synced in that time but names and headers.
 * An earlier save that still runs is waited for: two are never under way.
 * How the save went is said by the next of mfsdp_checkpoint_wait, _poll, _save, _save_begin, _load,
 * and it gets its name by one of them: see background.h. desc.io is then used by two threads of a
 * rank. The other threads leave the control plane, the allocator and the context alone; over MPI they
 * need MPI_THREAD_FUNNELED, as any thread beside the one that calls.
 * Errors: those of mfsdp_checkpoint_save that come before its bytes; E_STATE without desc.background.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_save_begin(mfsdp_checkpoint *ck,
                                                   const mfsdp_safetensors_pair *strings,
                                                   int32_t string_count) {
  struct mfsdp__ck_job *job = ck->job;
  mfsdp_progress progress = mfsdp_progress_default();
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status;
  if (job == NULL)
    return MFSDP_FAIL(ck->context, MFSDP_E_STATE,
                      "checkpoint: save_begin needs desc.background at create");
  MFSDP_TRY(mfsdp__ck_begin(ck, strings, string_count, &progress, &job->save));
  status = mfsdp__ck_agree_to_save(ck, &job->save, &progress, strings, string_count);
  if (status == MFSDP_OK) {
    if (ck->rank != 0) status = mfsdp__ck_check_token(ck, &job->save);
    if (status == MFSDP_OK) status = mfsdp__ck_open_files(ck);
    if (status == MFSDP_OK) status = mfsdp__ck_take_snapshot(ck);
    status = mfsdp__ck_agree(ck, status, &own);
  }
  if (status != MFSDP_OK) {
    mfsdp__ck_end_job(ck, status);
    return status;
  }
  job->phase = MFSDP__CK_WRITING;
  job->abandon = mfsdp__ck_abandon;
  mfsdp__ck_start_work(ck, mfsdp__ck_work_write);
  return MFSDP_OK;
}

#endif /* MFSDP_CHECKPOINT_API_H */
