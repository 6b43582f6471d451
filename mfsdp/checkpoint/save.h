/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/save.h - writes a checkpoint: all ranks their own ranges, rank 0 the rest. Part of
 * checkpoint.h.
 *
 * Three phases, each with a verdict: rank 0 makes the attempt with the headers of all files; every
 * rank writes what it owns; rank 0 gives the attempt its name.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_SAVE_H
#define MFSDP_CHECKPOINT_SAVE_H

#include "state.h"

#define MFSDP__CK_TOKEN_FILE "token"

typedef struct mfsdp__ck_save {
  int64_t step;
  uint64_t token;
  mfsdp_io_file *lock; /* rank 0 */
  mfsdp__ck_path lock_path;
  char attempt[MFSDP_CHECKPOINT_NAME_NBYTES];
} mfsdp__ck_save;

/* ---- phase 1: rank 0 prepares ---- */

/* Writes a header of `layout` at the start of a new file. */
MFSDP_API mfsdp_status mfsdp__ck_write_header(mfsdp_checkpoint *ck, const char *path,
                                              const mfsdp_safetensors_layout *layout) {
  mfsdp_status status;
  void *header;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, layout->header_nbytes, 1, "header of a file", &header));
  status = mfsdp_safetensors_header_write(ck->context, layout, header, layout->header_nbytes);
  if (status == MFSDP_OK) status = mfsdp__ck_write_file(ck, path, header, layout->header_nbytes);
  mfsdp_table_free(ck->context, header, layout->header_nbytes, 1);
  return status;
}

MFSDP_API mfsdp_status mfsdp__ck_prepare(mfsdp_checkpoint *ck, mfsdp__ck_save *save) {
  mfsdp__ck_path path;
  char file[MFSDP__CK_FILE_NBYTES];
  int32_t f, existed = 0;
  MFSDP_TRY(mfsdp__ck_make_root(ck));
  MFSDP_TRY(mfsdp_io_lock(ck->context, &ck->io, save->lock_path.text, &save->lock));
  MFSDP_TRY(mfsdp__ck_clean(ck));
  path = mfsdp__ck_path_of(ck, save->attempt, NULL);
  MFSDP_TRY(mfsdp_io_make_folder(ck->context, &ck->io, path.text, &existed));
  path = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_TOKEN_FILE);
  MFSDP_TRY(mfsdp__ck_write_file(ck, path.text, &save->token, sizeof(save->token)));
  for (f = 0; f < ck->file_count; ++f) {
    mfsdp__ck_file_name(ck, f, file);
    path = mfsdp__ck_path_of(ck, save->attempt, file);
    MFSDP_TRY(mfsdp__ck_write_header(ck, path.text, &ck->files[f].layout));
  }
  return MFSDP_OK;
}

/* ---- phase 2: everyone writes ---- */

/* Whether this rank sees the folder that rank 0 made. */
MFSDP_API mfsdp_status mfsdp__ck_check_token(mfsdp_checkpoint *ck, const mfsdp__ck_save *save) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_TOKEN_FILE);
  mfsdp_io_file *file = NULL;
  char why[96]; /* the context's own message cannot go into itself */
  uint64_t token = 0;
  mfsdp_status status = mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_READ, &file);
  if (status == MFSDP_OK)
    status = mfsdp_io_read(ck->context, &ck->io, file, path.text, 0, sizeof(token), &token);
  status = mfsdp_io_close(ck->context, &ck->io, file, path.text, status);
  if (status == MFSDP_OK && token == save->token) return MFSDP_OK;
  (void)snprintf(why, sizeof(why), "%.90s",
                 status == MFSDP_OK ? "another token" : ck->context->error.message);
  return MFSDP_FAIL(ck->context, MFSDP_E_IO,
                    "not the folder that rank 0 made; all ranks need one file system (%s)", why);
}

/* Brings `nbytes` from where the runtime has them to the stage. */
MFSDP_API mfsdp_status mfsdp__ck_fetch(mfsdp_checkpoint *ck, const mfsdp__ck_run *run,
                                       size_t offset, size_t nbytes) {
  mfsdp_runtime *rt = ck->rt;
  const mfsdp_backend_ops *ops = rt->backend->ops;
  void *self = rt->backend->self;
  MFSDP_TRY(ops->copy(self, rt->compute, ck->stage.data, MFSDP_SPACE_PINNED,
                      (const unsigned char *)run->data + offset, run->space, nbytes));
  MFSDP_TRY(ops->event_record(self, rt->compute, rt->compute_done));
  return ops->event_wait(self, ck->context, rt->compute_done, rt->deadline_us);
}

MFSDP_API mfsdp_status mfsdp__ck_write_run(mfsdp_checkpoint *ck, const mfsdp__ck_run *run,
                                           mfsdp_io_file *file, const char *path,
                                           int64_t *written) {
  const size_t element = mfsdp__ck_element_nbytes(ck, run->tensor);
  const size_t nbytes = (size_t)run->count * element;
  const int64_t at = ck->tensors[run->tensor].file_offset + run->first * (int64_t)element;
  size_t done, part;
  for (done = 0; done < nbytes; done += part) {
    part = nbytes - done < ck->stage_nbytes ? nbytes - done : ck->stage_nbytes;
    MFSDP_TRY(mfsdp__ck_fetch(ck, run, done, part));
    MFSDP_TRY(
        mfsdp_io_write(ck->context, &ck->io, file, path, at + (int64_t)done, part, ck->stage.data));
  }
  *written += (int64_t)nbytes;
  return MFSDP_OK;
}

/* The runs first .. last - 1, which are of one file. */
MFSDP_API mfsdp_status mfsdp__ck_write_runs(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                            int32_t first, int32_t last, int64_t *written) {
  mfsdp_io_file *file;
  mfsdp_status status = MFSDP_OK;
  mfsdp__ck_path path;
  char name[MFSDP__CK_FILE_NBYTES];
  mfsdp__ck_file_name(ck, ck->tensor_files[ck->runs[first].tensor], name);
  path = mfsdp__ck_path_of(ck, save->attempt, name);
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_WRITE, &file));
  for (; first < last && status == MFSDP_OK; ++first)
    status = mfsdp__ck_write_run(ck, &ck->runs[first], file, path.text, written);
  if (status == MFSDP_OK) status = mfsdp_io_sync(ck->context, &ck->io, file, path.text);
  return mfsdp_io_close(ck->context, &ck->io, file, path.text, status);
}

MFSDP_API mfsdp_status mfsdp__ck_write_own(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                           int64_t *written) {
  int32_t first = 0, last;
  if (ck->rank != 0) MFSDP_TRY(mfsdp__ck_check_token(ck, save));
  for (; first < ck->write_count; first = last) {
    const int32_t file = ck->tensor_files[ck->runs[first].tensor];
    for (last = first + 1; last < ck->write_count; ++last)
      if (ck->tensor_files[ck->runs[last].tensor] != file) break;
    MFSDP_TRY(mfsdp__ck_write_runs(ck, save, first, last, written));
  }
  return MFSDP_OK;
}

/* ---- phase 3: rank 0 finishes ---- */

MFSDP_API mfsdp_status mfsdp__ck_write_state(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                             const mfsdp_progress *progress,
                                             const mfsdp_safetensors_pair *strings,
                                             int32_t string_count) {
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_STATE_FILE);
  mfsdp_safetensors_layout layout;
  mfsdp__ck_state state;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__ck_state_make(ck, progress, strings, string_count, &state));
  memset(&layout, 0, sizeof(layout));
  layout.metadata = state.pairs;
  layout.pair_count = state.count;
  status = mfsdp_safetensors_layout_make(ck->context, &layout);
  if (status == MFSDP_OK) status = mfsdp__ck_write_header(ck, path.text, &layout);
  mfsdp__ck_state_free(ck, &state);
  return status;
}

/* The index of a set whose pairs are ready, in a buffer of its own. */
MFSDP_API mfsdp_status mfsdp__ck_write_pairs(mfsdp_checkpoint *ck, const char *path,
                                             const mfsdp__ck_set *set,
                                             const mfsdp_safetensors_pair *pairs) {
  mfsdp_status status;
  size_t nbytes = 0;
  void *text;
  MFSDP_TRY(mfsdp_safetensors_index_write(ck->context, pairs, set->tensor_count, set->data_nbytes,
                                          NULL, 0, &nbytes));
  MFSDP_TRY(mfsdp_table_alloc(ck->context, nbytes, 1, "text of an index", &text));
  status = mfsdp_safetensors_index_write(ck->context, pairs, set->tensor_count, set->data_nbytes,
                                         text, nbytes, &nbytes);
  if (status == MFSDP_OK) status = mfsdp__ck_write_file(ck, path, text, nbytes);
  mfsdp_table_free(ck->context, text, nbytes, 1);
  return status;
}

MFSDP_API mfsdp_status mfsdp__ck_write_index(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                             int32_t index) {
  const mfsdp__ck_set *set = &ck->sets[index];
  const size_t files_nbytes = (size_t)set->file_count * MFSDP__CK_FILE_NBYTES;
  const size_t pairs_nbytes = (size_t)set->tensor_count * sizeof(mfsdp_safetensors_pair);
  char stem[MFSDP__CK_FILE_NBYTES], name[MFSDP__CK_FILE_NBYTES + 24];
  mfsdp_safetensors_pair *pairs;
  mfsdp__ck_path path;
  mfsdp_status status;
  void *memory;
  char *files;
  int32_t i;
  if (set->tensor_count == 0) return MFSDP_OK;
  MFSDP_TRY(
      mfsdp_table_alloc(ck->context, files_nbytes + pairs_nbytes, 1, "pairs of an index", &memory));
  pairs = (mfsdp_safetensors_pair *)memory;
  files = (char *)memory + pairs_nbytes;
  for (i = 0; i < set->file_count; ++i)
    mfsdp__ck_file_name(ck, set->file_first + i, files + (size_t)i * MFSDP__CK_FILE_NBYTES);
  for (i = 0; i < set->tensor_count; ++i) {
    const int32_t file = ck->tensor_files[set->tensor_first + i] - set->file_first;
    pairs[i].key = ck->tensors[set->tensor_first + i].name;
    pairs[i].value = files + (size_t)file * MFSDP__CK_FILE_NBYTES;
  }
  mfsdp__ck_set_name(ck, index, stem);
  (void)snprintf(name, sizeof(name), "%.60s.safetensors.index.json", stem);
  path = mfsdp__ck_path_of(ck, save->attempt, name);
  status = mfsdp__ck_write_pairs(ck, path.text, set, pairs);
  mfsdp_table_free(ck->context, memory, files_nbytes + pairs_nbytes, 1);
  return status;
}

/* Every byte of every file was written by someone: a hole would be zeros under the right name. */
MFSDP_API mfsdp_status mfsdp__ck_check_written(mfsdp_checkpoint *ck) {
  const int64_t written = ck->told.value;
  int64_t needed = 0;
  int32_t s;
  for (s = 0; s < ck->set_count; ++s)
    needed += ck->sets[s].data_nbytes;
  if (written == needed) return MFSDP_OK;
  return MFSDP_FAIL(ck->context, MFSDP_E_MISMATCH,
                    "%lld bytes of tensors were written, the checkpoint has %lld",
                    (long long)written, (long long)needed);
}

MFSDP_API mfsdp_status mfsdp__ck_finish(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                        const mfsdp_progress *progress,
                                        const mfsdp_safetensors_pair *strings,
                                        int32_t string_count) {
  const mfsdp__ck_path folder = mfsdp__ck_path_of(ck, save->attempt, NULL);
  const mfsdp__ck_path token = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_TOKEN_FILE);
  int32_t s;
  for (s = 0; s < ck->set_count; ++s)
    MFSDP_TRY(mfsdp__ck_write_index(ck, save, s));
  MFSDP_TRY(mfsdp__ck_write_state(ck, save, progress, strings, string_count));
  MFSDP_TRY(mfsdp_io_remove(ck->context, &ck->io, token.text));
  MFSDP_TRY(mfsdp_io_sync_folder(ck->context, &ck->io, folder.text));
  return mfsdp__ck_publish(ck, save->step);
}

/* ---- api ---- */

MFSDP_API mfsdp_status mfsdp__ck_phases(mfsdp_checkpoint *ck, mfsdp__ck_save *save,
                                        const mfsdp_progress *progress,
                                        const mfsdp_safetensors_pair *strings,
                                        int32_t string_count) {
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp_status status = MFSDP_OK;
  own.hash = mfsdp_hash_u64(ck->hash, (uint64_t)save->step);
  own.token = save->token;
  if (ck->rank == 0) status = mfsdp__ck_prepare(ck, save);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  save->token = ck->told.token;
  status = mfsdp__ck_write_own(ck, save, &own.value);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  status = mfsdp__ck_check_written(ck);
  if (status == MFSDP_OK && ck->rank == 0)
    status = mfsdp__ck_finish(ck, save, progress, strings, string_count);
  MFSDP_TRY(mfsdp__ck_agree(ck, status, &own));
  if (ck->rank == 0) status = mfsdp__ck_keep_last(ck, save->step);
  return mfsdp__ck_agree(ck, status, &own);
}

/* Whatever happened: no attempt stays if it can be helped, and the lock goes. The context keeps the
 * first error. */
MFSDP_API void mfsdp__ck_end_save(mfsdp_checkpoint *ck, mfsdp__ck_save *save, mfsdp_status status) {
  const mfsdp_error first = ck->context->error;
  if (save->lock == NULL) return;
  if (status != MFSDP_OK) (void)mfsdp__ck_clean(ck);
  (void)mfsdp_io_close(ck->context, &ck->io, save->lock, save->lock_path.text, MFSDP_OK);
  ck->context->error = first;
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
 * E_TIMEOUT, E_PEER.
 */
MFSDP_API mfsdp_status mfsdp_checkpoint_save(mfsdp_checkpoint *ck,
                                             const mfsdp_safetensors_pair *strings,
                                             int32_t string_count) {
  const mfsdp_control *control = ck->rt->groups[0].control;
  mfsdp_progress progress = mfsdp_progress_default();
  mfsdp__ck_save save;
  mfsdp_status status;
  if (string_count < 0 || string_count > 1 << 20 || (string_count > 0 && strings == NULL))
    return MFSDP_FAIL(ck->context, MFSDP_E_ARGUMENT, "checkpoint: %d strings, needs 0 or a table",
                      (int)string_count);
  MFSDP_TRY(mfsdp_runtime_progress(ck->rt, &progress));
  memset(&save, 0, sizeof(save));
  save.step = progress.step;
  save.token = mfsdp_hash_u64(mfsdp_hash_u64(ck->hash, (uint64_t)(uintptr_t)ck),
                              (uint64_t)control->ops->now_us(control->self));
  save.lock_path = mfsdp__ck_path_of(ck, "lock", NULL);
  mfsdp__ck_name(save.step, ".attempt", save.attempt);
  status = mfsdp__ck_phases(ck, &save, &progress, strings, string_count);
  mfsdp__ck_end_save(ck, &save, status);
  return status;
}

#endif /* MFSDP_CHECKPOINT_SAVE_H */
