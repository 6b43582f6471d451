/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/create.h - makes a checkpoint's tables from a runtime. Part of checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_CREATE_H
#define MFSDP_CHECKPOINT_CREATE_H

#include "job.h"
#include "share.h"

/*
 * Gives everything back. Before the runtime is destroyed. NULL is allowed. No communication: a save in
 * the background that no mfsdp_checkpoint_wait has ended is given up once this rank's part of it is
 * written, and `latest` names what it named before (or the new one, if only the verdict was missing).
 */
MFSDP_API void mfsdp_checkpoint_destroy(mfsdp_checkpoint *ck) {
  mfsdp_context *context;
  const mfsdp_backend *backend;
  size_t tensors;
  if (ck == NULL) return;
  context = ck->context;
  backend = ck->rt->backend;
  tensors = (size_t)ck->tensor_count;
  mfsdp__ck_free_job(ck);
  mfsdp_buffer_free(context, backend, &ck->device);
  mfsdp_buffer_free(context, backend, &ck->values);
  mfsdp_buffer_free(context, backend, &ck->stage);
  mfsdp_table_free(context, ck->messages, (size_t)ck->message_count, sizeof(*ck->messages));
  mfsdp_table_free(context, ck->runs, (size_t)ck->run_count, sizeof(*ck->runs));
  mfsdp_table_free(context, ck->files, (size_t)ck->file_count, sizeof(*ck->files));
  mfsdp_table_free(context, ck->param_tensors, (size_t)ck->set_count * (size_t)ck->rt->param_count,
                   sizeof(*ck->param_tensors));
  mfsdp_table_free(context, ck->tensor_files, tensors, sizeof(*ck->tensor_files));
  mfsdp_table_free(context, ck->tensors, tensors, sizeof(*ck->tensors));
  mfsdp_table_free(context, ck->records, ck->records_capacity, 1);
  mfsdp_table_free(context, ck->folder, ck->folder_nbytes, 1);
  mfsdp_table_free(context, ck, 1, sizeof(*ck));
}

MFSDP_API mfsdp_status mfsdp__ck_check_desc(mfsdp_context *context,
                                            const mfsdp_checkpoint_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "checkpoint: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_checkpoint_desc_default)",
                      sizeof(*desc));
  MFSDP_TRY(mfsdp_io_check(context, desc->io));
  if (desc->background != NULL) MFSDP_TRY(mfsdp_background_check(context, desc->background));
  if (desc->folder == NULL || desc->folder[0] == '\0' ||
      strlen(desc->folder) > MFSDP__CK_PATH_NBYTES / 2)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "checkpoint: folder is NULL, empty or longer than %d bytes",
                      MFSDP__CK_PATH_NBYTES / 2);
  if (desc->max_file_nbytes < 1 || desc->keep_last < 0 || desc->timeout_us < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "checkpoint: max_file_nbytes is %lld, keep_last %d, timeout_us %lld; need at "
                      "least 1, 0 and 1",
                      (long long)desc->max_file_nbytes, (int)desc->keep_last,
                      (long long)desc->timeout_us);
  if (desc->stage_nbytes < 64 || desc->stage_nbytes > (size_t)1 << 30)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "checkpoint: stage_nbytes is %zu, needs 64 to 2^30", desc->stage_nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_alloc_tensors(mfsdp_checkpoint *ck) {
  const size_t count = (size_t)ck->tensor_count;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, sizeof(*ck->tensor_files), "files of tensors",
                              &memory));
  ck->tensor_files = (int32_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->set_count * (size_t)ck->rt->param_count,
                              sizeof(*ck->param_tensors), "tensors of parameters", &memory));
  ck->param_tensors = (int32_t *)memory;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, count, sizeof(*ck->tensors), "tensors to save", &memory));
  ck->tensors = (mfsdp_safetensors_tensor *)memory;
  return MFSDP_OK;
}

/* Where this rank's parameters are among the tensors of all. */
MFSDP_API mfsdp_status mfsdp__ck_find_params(mfsdp_checkpoint *ck) {
  size_t nbytes = 0;
  void *name;
  int32_t i;
  for (i = 0; i < ck->rt->param_count; ++i)
    if (strlen(mfsdp__ck_param(ck, i)->name) > nbytes)
      nbytes = strlen(mfsdp__ck_param(ck, i)->name);
  nbytes += MFSDP__CK_KIND_NBYTES + 2;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, nbytes, 1, "name of a tensor", &name));
  mfsdp__ck_map_params(ck, (char *)name, nbytes);
  mfsdp_table_free(ck->context, name, nbytes, 1);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_make_tensors(mfsdp_checkpoint *ck) {
  int32_t set;
  MFSDP_TRY(mfsdp__ck_make_sets(ck));
  MFSDP_TRY(mfsdp__ck_alloc_tensors(ck));
  mfsdp__ck_fill_tensors(ck);
  for (set = 0; set < ck->set_count; ++set)
    MFSDP_TRY(mfsdp__ck_sort_set(ck, &ck->sets[set]));
  MFSDP_TRY(mfsdp__ck_check_names(ck));
  return mfsdp__ck_find_params(ck);
}

MFSDP_API mfsdp_status mfsdp__ck_make_files(mfsdp_checkpoint *ck) {
  void *memory;
  MFSDP_TRY(mfsdp__ck_cut(ck));
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->file_count, sizeof(*ck->files),
                              "files of a checkpoint", &memory));
  ck->files = (mfsdp__ck_file *)memory;
  MFSDP_TRY(mfsdp__ck_cut(ck));
  return mfsdp__ck_lay_out(ck);
}

MFSDP_API mfsdp_status mfsdp__ck_make_runs(mfsdp_checkpoint *ck) {
  void *memory;
  mfsdp__ck_list_runs(ck);
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->run_count, sizeof(*ck->runs),
                              "what a rank saves", &memory));
  ck->runs = (mfsdp__ck_run *)memory;
  mfsdp__ck_list_runs(ck);
  return mfsdp__ck_sort_runs(ck);
}

MFSDP_API mfsdp_status mfsdp__ck_make_buffers(mfsdp_checkpoint *ck) {
  const mfsdp_backend *backend = ck->rt->backend;
  MFSDP_TRY(mfsdp_buffer_alloc(ck->context, backend, ck->stage_nbytes, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STAGING, &ck->stage));
  MFSDP_TRY(mfsdp_buffer_alloc(ck->context, backend, ck->stage_nbytes, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STAGING, &ck->values));
  return mfsdp_buffer_alloc(ck->context, backend, ck->rt->has_copies ? ck->stage_nbytes : 0,
                            MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &ck->device);
}

MFSDP_API mfsdp_status mfsdp__ck_make_messages(mfsdp_checkpoint *ck) {
  const mfsdp__group_entry *group = &ck->rt->groups[0];
  const int32_t count = group->world > group->replica_world ? group->world : group->replica_world;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)count, sizeof(*ck->messages),
                              "messages of a checkpoint", &memory));
  ck->messages = (mfsdp__ck_message *)memory;
  ck->message_count = count;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_use_desc(mfsdp_checkpoint *ck, const mfsdp_checkpoint_desc *desc) {
  void *memory;
  MFSDP_TRY(mfsdp__ck_check_desc(ck->context, desc));
  ck->io = *desc->io;
  ck->max_file_nbytes = desc->max_file_nbytes;
  ck->keep_last = desc->keep_last;
  ck->timeout_us = desc->timeout_us;
  ck->stage_nbytes = desc->stage_nbytes;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, strlen(desc->folder) + 1, 1, "name of a folder", &memory));
  ck->folder = (char *)memory;
  ck->folder_nbytes = strlen(desc->folder) + 1;
  memcpy(ck->folder, desc->folder, ck->folder_nbytes);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_make_tables(mfsdp_checkpoint *ck) {
  MFSDP_TRY(mfsdp__ck_make_tensors(ck));
  MFSDP_TRY(mfsdp__ck_make_files(ck));
  MFSDP_TRY(mfsdp__ck_make_runs(ck));
  return mfsdp__ck_make_buffers(ck);
}

/* With several groups all ranks return the same. */
MFSDP_API mfsdp_status mfsdp__ck_make(mfsdp_checkpoint *ck, const mfsdp_checkpoint_desc *desc) {
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status;
  MFSDP_TRY(mfsdp__ck_share(ck, mfsdp__ck_use_desc(ck, desc)));
  status = mfsdp__ck_make_tables(ck);
  if (status == MFSDP_OK) status = mfsdp__ck_make_job(ck, desc->background);
  own.hash = ck->hash;
  if (ck->rt->group_count == 1) return status;
  return mfsdp__ck_agree_within(ck, status, &own, ck->rt->groups[0].control->deadline_us);
}

/* The object with what ranks need to tell each other anything. */
MFSDP_API mfsdp_status mfsdp__ck_alloc(mfsdp_runtime *rt, mfsdp_checkpoint **out) {
  mfsdp_checkpoint *ck;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, 1, sizeof(*ck), "checkpoint", &memory));
  *out = ck = (mfsdp_checkpoint *)memory;
  ck->rt = rt;
  ck->context = rt->context;
  ck->rank = rt->groups[0].replica_rank * rt->groups[0].world + rt->groups[0].rank;
  return mfsdp__ck_make_messages(ck);
}

/*
 * Makes the tables of a runtime's checkpoints; no file is touched. COMPLETE. The runtime, desc->io
 * and desc->background must outlive it. Memory: the staging of the description, three times with
 * compute copies; tables: a name and about 250 bytes for each tensor of all groups; and with a
 * background mfsdp_checkpoint_snapshot_nbytes().
 * With one group there is no communication. With several it is collective, between two steps, since
 * a rank learns here of groups that it is not part of; all ranks return the same then, and a rank
 * that cannot even say that it failed poisons the runtime.
 * E_ARGUMENT: the description; two groups have a parameter of one name. E_UNSUPPORTED: more kinds
 * of optimizer state than MFSDP__CK_MAX_SETS - 2; E_OVERFLOW, E_MEMORY; with several groups E_MISMATCH, E_TIMEOUT,
 * E_PEER. *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_create(mfsdp_runtime *rt, const mfsdp_checkpoint_desc *desc,
                                               mfsdp_checkpoint **out) {
  mfsdp_checkpoint *ck = NULL;
  mfsdp_status status;
  *out = NULL;
  if (rt->group_count > 1) MFSDP_TRY(mfsdp__runtime_usable(rt));
  status = mfsdp__ck_alloc(rt, &ck);
  if (status != MFSDP_OK && rt->group_count > 1) (void)mfsdp__runtime_failed(rt, status);
  if (status == MFSDP_OK) status = mfsdp__ck_make(ck, desc);
  if (status == MFSDP_OK)
    *out = ck;
  else
    mfsdp_checkpoint_destroy(ck);
  return status;
}

#endif /* MFSDP_CHECKPOINT_CREATE_H */
