/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/save.h - the parts of a save: all ranks write their own ranges, rank 0 the rest. Private
 * to checkpoint.h.
 *
 * Three phases, each with a verdict: rank 0 makes the attempt with the headers of all files and
 * everything that is small; every rank writes what it owns, and rank 0 syncs all files; rank 0 gives
 * the attempt its name.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_SAVE_H
#define MFSDP_CHECKPOINT_SAVE_H

#include "state.h"

#define MFSDP__CK_TOKEN_FILE "token"

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

MFSDP_API mfsdp__ck_path mfsdp__ck_index_path(const mfsdp_checkpoint *ck,
                                              const mfsdp__ck_save *save, int32_t set) {
  char stem[MFSDP__CK_FILE_NBYTES], name[MFSDP__CK_FILE_NBYTES + 24];
  mfsdp__ck_set_name(ck, set, stem);
  (void)snprintf(name, sizeof(name), "%.60s.safetensors.index.json", stem);
  return mfsdp__ck_path_of(ck, save->attempt, name);
}

MFSDP_API mfsdp_status mfsdp__ck_write_index(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                             int32_t index) {
  const mfsdp__ck_set *set = &ck->sets[index];
  const size_t files_nbytes = (size_t)set->file_count * MFSDP__CK_FILE_NBYTES;
  const size_t pairs_nbytes = (size_t)set->tensor_count * sizeof(mfsdp_safetensors_pair);
  const mfsdp__ck_path path = mfsdp__ck_index_path(ck, save, index);
  mfsdp_safetensors_pair *pairs;
  mfsdp_status status;
  void *memory;
  char *files;
  int32_t i;
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
  status = mfsdp__ck_write_pairs(ck, path.text, set, pairs);
  mfsdp_table_free(ck->context, memory, files_nbytes + pairs_nbytes, 1);
  return status;
}

MFSDP_API mfsdp_status mfsdp__ck_prepare(mfsdp_checkpoint *ck, mfsdp__ck_save *save,
                                         const mfsdp_progress *progress,
                                         const mfsdp_safetensors_pair *strings,
                                         int32_t string_count) {
  const mfsdp__ck_path lock = mfsdp__ck_path_of(ck, "lock", NULL);
  mfsdp__ck_path path;
  char file[MFSDP__CK_FILE_NBYTES];
  int32_t f, s, existed = 0;
  MFSDP_TRY(mfsdp__ck_make_root(ck));
  MFSDP_TRY(mfsdp_io_lock(ck->context, &ck->io, lock.text, &save->lock));
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
  for (s = 0; s < ck->set_count; ++s)
    if (ck->sets[s].tensor_count > 0) MFSDP_TRY(mfsdp__ck_write_index(ck, save, s));
  return mfsdp__ck_write_state(ck, save, progress, strings, string_count);
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
  MFSDP_TRY(rt->backend->ops->copy(rt->backend->self, rt->compute, ck->stage.data,
                                   MFSDP_SPACE_PINNED, (const unsigned char *)run->data + offset,
                                   run->space, nbytes));
  return mfsdp__ck_settle(ck);
}

MFSDP_API mfsdp_status mfsdp__ck_write_run(mfsdp_checkpoint *ck, const mfsdp__ck_run *run,
                                           mfsdp_io_file *file, const char *path,
                                           int64_t *written) {
  const size_t element = mfsdp__ck_element_nbytes(ck, run->tensor);
  const size_t nbytes = (size_t)run->count * element;
  const int64_t at = ck->tensors[run->tensor].file_offset + run->first * (int64_t)element;
  const int reached = mfsdp__ck_reaches(ck, run->space);
  size_t done, part;
  for (done = 0; done < nbytes; done += part) {
    part = nbytes - done < ck->stage_nbytes ? nbytes - done : ck->stage_nbytes;
    if (!reached) MFSDP_TRY(mfsdp__ck_fetch(ck, run, done, part));
    MFSDP_TRY(mfsdp_io_write(ck->context, &ck->io, file, path, at + (int64_t)done, part,
                             reached ? (const unsigned char *)run->data + done : ck->stage.data));
  }
  *written += (int64_t)nbytes;
  return MFSDP_OK;
}

/* The runs first .. last - 1, which are those of one file. */
MFSDP_API mfsdp_status mfsdp__ck_write_runs(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                            int32_t number, int32_t first, int32_t last,
                                            int64_t *written) {
  mfsdp_io_file *file;
  mfsdp_status status = MFSDP_OK;
  mfsdp__ck_path path;
  char name[MFSDP__CK_FILE_NBYTES];
  mfsdp__ck_file_name(ck, number, name);
  path = mfsdp__ck_path_of(ck, save->attempt, name);
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_WRITE, &file));
  for (; first < last && status == MFSDP_OK; ++first)
    status = mfsdp__ck_write_run(ck, &ck->runs[first], file, path.text, written);
  if (status == MFSDP_OK) status = mfsdp_io_sync(ck->context, &ck->io, file, path.text);
  return mfsdp_io_close(ck->context, &ck->io, file, path.text, status);
}

/* One past the runs of a file that begin at `first`. */
MFSDP_API int32_t mfsdp__ck_last_run(const mfsdp_checkpoint *ck, int32_t file, int32_t first) {
  while (first < ck->write_count && ck->tensor_files[ck->runs[first].tensor] == file)
    ++first;
  return first;
}

/* Whether this rank syncs a file: if it wrote a part of it, and rank 0 wrote all headers. */
MFSDP_API int mfsdp__ck_touches(const mfsdp_checkpoint *ck, int32_t first, int32_t last) {
  return first < last || ck->rank == 0;
}

MFSDP_API mfsdp_status mfsdp__ck_write_own(mfsdp_checkpoint *ck, const mfsdp__ck_save *save,
                                           int64_t *written) {
  int32_t file, first = 0, last;
  if (ck->rank != 0) MFSDP_TRY(mfsdp__ck_check_token(ck, save));
  MFSDP_TRY(mfsdp__ck_settle(ck));
  for (file = 0; file < ck->file_count; ++file, first = last) {
    last = mfsdp__ck_last_run(ck, file, first);
    if (mfsdp__ck_touches(ck, first, last))
      MFSDP_TRY(mfsdp__ck_write_runs(ck, save, file, first, last, written));
  }
  return MFSDP_OK;
}

/* ---- phase 3: rank 0 finishes ---- */

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

/* Allocates nothing: it may run on another thread. */
MFSDP_API mfsdp_status mfsdp__ck_finish(mfsdp_checkpoint *ck, const mfsdp__ck_save *save) {
  const mfsdp__ck_path folder = mfsdp__ck_path_of(ck, save->attempt, NULL);
  const mfsdp__ck_path token = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_TOKEN_FILE);
  const mfsdp__ck_path state = mfsdp__ck_path_of(ck, save->attempt, MFSDP__CK_STATE_FILE);
  int32_t s;
  for (s = 0; s < ck->set_count; ++s) {
    const mfsdp__ck_path index = mfsdp__ck_index_path(ck, save, s);
    if (ck->sets[s].tensor_count > 0) MFSDP_TRY(mfsdp__ck_sync_path(ck, index.text));
  }
  MFSDP_TRY(mfsdp__ck_sync_path(ck, state.text));
  MFSDP_TRY(mfsdp_io_remove(ck->context, &ck->io, token.text));
  MFSDP_TRY(mfsdp_io_sync_folder(ck->context, &ck->io, folder.text));
  return mfsdp__ck_publish(ck, save->step);
}

/* Whatever happened: no attempt stays if it can be helped, and the lock goes. The context keeps the
 * first error. */
MFSDP_API void mfsdp__ck_end_save(mfsdp_checkpoint *ck, mfsdp__ck_save *save, mfsdp_status status) {
  const mfsdp__ck_path lock = mfsdp__ck_path_of(ck, "lock", NULL);
  const mfsdp_error first = ck->context->error;
  if (save->lock == NULL) return;
  if (status != MFSDP_OK) (void)mfsdp__ck_clean(ck);
  (void)mfsdp_io_close(ck->context, &ck->io, save->lock, lock.text, MFSDP_OK);
  save->lock = NULL;
  ck->context->error = first;
}

#endif /* MFSDP_CHECKPOINT_SAVE_H */
