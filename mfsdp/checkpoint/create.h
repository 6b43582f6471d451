/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/create.h - makes a checkpoint's tables from a runtime. Part of checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_CREATE_H
#define MFSDP_CHECKPOINT_CREATE_H

#include "agree.h"

/* Gives everything back. Before the runtime is destroyed. NULL is allowed. */
MFSDP_API void mfsdp_checkpoint_destroy(mfsdp_checkpoint *ck) {
  mfsdp_context *context;
  const mfsdp_backend *backend;
  size_t tensors;
  if (ck == NULL) return;
  context = ck->context;
  backend = ck->rt->backend;
  tensors = (size_t)ck->tensor_count;
  mfsdp_buffer_free(context, backend, &ck->device);
  mfsdp_buffer_free(context, backend, &ck->values);
  mfsdp_buffer_free(context, backend, &ck->stage);
  mfsdp_table_free(context, ck->messages, (size_t)ck->world, sizeof(mfsdp__ck_message));
  mfsdp_table_free(context, ck->runs, (size_t)ck->run_count, sizeof(*ck->runs));
  mfsdp_table_free(context, ck->files, (size_t)ck->file_count, sizeof(*ck->files));
  mfsdp_table_free(context, ck->names, ck->name_nbytes, 1);
  mfsdp_table_free(context, ck->param_tensors, (size_t)ck->set_count * (size_t)ck->param_count,
                   sizeof(*ck->param_tensors));
  mfsdp_table_free(context, ck->shapes, tensors, 2 * sizeof(*ck->shapes));
  mfsdp_table_free(context, ck->tensor_files, tensors, sizeof(*ck->tensor_files));
  mfsdp_table_free(context, ck->tensor_params, tensors, sizeof(*ck->tensor_params));
  mfsdp_table_free(context, ck->tensors, tensors, sizeof(*ck->tensors));
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

MFSDP_API mfsdp_status mfsdp__ck_check_runtime(const mfsdp_runtime *rt) {
  int32_t g;
  for (g = 0; g < rt->group_count; ++g)
    if (g > 0 || rt->groups[g].replica != NULL)
      return MFSDP_FAIL(rt->context, MFSDP_E_UNSUPPORTED,
                        "checkpoint: %d groups%s; one without replicas is built so far",
                        (int)rt->group_count, rt->groups[0].replica != NULL ? ", replicas" : "");
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_alloc_tensors(mfsdp_checkpoint *ck) {
  const size_t count = (size_t)ck->tensor_count;
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, ck->name_nbytes, 1, "names of tensors", &memory));
  ck->names = (char *)memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, sizeof(*ck->tensor_params),
                              "parameters of tensors", &memory));
  ck->tensor_params = (int32_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, count, sizeof(*ck->tensor_files), "files of tensors",
                              &memory));
  ck->tensor_files = (int32_t *)memory;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, count, 2 * sizeof(*ck->shapes), "shapes of states", &memory));
  ck->shapes = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->set_count * (size_t)ck->param_count,
                              sizeof(*ck->param_tensors), "tensors of parameters", &memory));
  ck->param_tensors = (int32_t *)memory;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, count, sizeof(*ck->tensors), "tensors to save", &memory));
  ck->tensors = (mfsdp_safetensors_tensor *)memory;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ck_make_tensors(mfsdp_checkpoint *ck) {
  int32_t set, i;
  MFSDP_TRY(mfsdp__ck_make_sets(ck));
  mfsdp__ck_list_tensors(ck);
  MFSDP_TRY(mfsdp__ck_alloc_tensors(ck));
  mfsdp__ck_list_tensors(ck);
  for (i = 0; i < ck->set_count * ck->param_count; ++i)
    ck->param_tensors[i] = -1;
  for (set = 0; set < ck->set_count; ++set) {
    const mfsdp__ck_set *s = &ck->sets[set];
    MFSDP_TRY(mfsdp__ck_sort_set(ck, s));
    for (i = s->tensor_first; i < s->tensor_first + s->tensor_count; ++i)
      ck->param_tensors[set * ck->param_count + ck->tensor_params[i]] = i;
  }
  return MFSDP_OK;
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
  void *memory;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->world, sizeof(mfsdp__ck_message),
                              "messages of a checkpoint", &memory));
  ck->messages = memory;
  MFSDP_TRY(mfsdp_buffer_alloc(ck->context, backend, ck->stage_nbytes, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STAGING, &ck->stage));
  MFSDP_TRY(mfsdp_buffer_alloc(ck->context, backend, ck->stage_nbytes, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STAGING, &ck->values));
  return mfsdp_buffer_alloc(ck->context, backend, ck->rt->copy.nbytes > 0 ? ck->stage_nbytes : 0,
                            MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STAGING, &ck->device);
}

MFSDP_API mfsdp_status mfsdp__ck_make(mfsdp_checkpoint *ck, const char *folder) {
  void *memory;
  ck->folder_nbytes = strlen(folder) + 1;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, ck->folder_nbytes, 1, "name of a folder", &memory));
  ck->folder = (char *)memory;
  memcpy(ck->folder, folder, ck->folder_nbytes);
  MFSDP_TRY(mfsdp__ck_make_tensors(ck));
  MFSDP_TRY(mfsdp__ck_make_files(ck));
  MFSDP_TRY(mfsdp__ck_make_runs(ck));
  return mfsdp__ck_make_buffers(ck);
}

/*
 * Makes the tables of a runtime's checkpoints. No communication, no file is touched. COMPLETE. The
 * runtime and desc->io must outlive it. Memory: the staging of the description, three times with
 * compute copies, and tables. E_ARGUMENT; E_UNSUPPORTED: several groups, replicas; E_OVERFLOW,
 * E_MEMORY. *out is NULL then.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_create(mfsdp_runtime *rt, const mfsdp_checkpoint_desc *desc,
                                               mfsdp_checkpoint **out) {
  mfsdp_checkpoint *ck;
  mfsdp_status status;
  void *memory;
  *out = NULL;
  MFSDP_TRY(mfsdp__ck_check_desc(rt->context, desc));
  MFSDP_TRY(mfsdp__ck_check_runtime(rt));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, 1, sizeof(*ck), "checkpoint", &memory));
  ck = (mfsdp_checkpoint *)memory;
  ck->rt = rt;
  ck->context = rt->context;
  ck->plan = rt->groups[0].plan;
  ck->control = rt->groups[0].control;
  ck->rank = rt->groups[0].rank;
  ck->world = rt->groups[0].world;
  ck->param_count = mfsdp_plan_param_count(ck->plan);
  ck->io = *desc->io;
  ck->max_file_nbytes = desc->max_file_nbytes;
  ck->keep_last = desc->keep_last;
  ck->timeout_us = desc->timeout_us;
  ck->stage_nbytes = desc->stage_nbytes;
  status = mfsdp__ck_make(ck, desc->folder);
  if (status == MFSDP_OK)
    *out = ck;
  else
    mfsdp_checkpoint_destroy(ck);
  return status;
}

#endif /* MFSDP_CHECKPOINT_CREATE_H */
