/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/open.h - opens the files of a checkpoint, ours or another tool's, and compares what is
 * in them with what the runtime has. Private to checkpoint.h.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_OPEN_H
#define MFSDP_CHECKPOINT_OPEN_H

#include "api.h"

typedef struct mfsdp__ck_open_file {
  mfsdp_io_file *file;
  mfsdp_safetensors *header;
  int32_t set;
  char name[256];
} mfsdp__ck_open_file;

/* Where a tensor was found. */
typedef struct mfsdp__ck_place {
  const mfsdp_safetensors_tensor *tensor; /* NULL: missing */
  int32_t file;
} mfsdp__ck_place;

typedef struct mfsdp__ck_load {
  mfsdp_checkpoint *ck;
  char name[MFSDP_CHECKPOINT_NAME_NBYTES];
  int32_t weights_only, allow_missing, allow_unexpected, convert;
  void (*report)(void *user, mfsdp_checkpoint_issue issue, const char *tensor);
  void *user;
  mfsdp__ck_open_file *files;
  int32_t file_count, file_capacity;
  mfsdp__ck_place *places; /* of ck->tensors */
  mfsdp_checkpoint_loaded loaded;
  char refused[200]; /* the first issue that is not allowed */
  int32_t unread;    /* 1: values could not be read; the queues are sound */
  int32_t broken;    /* 1: a queue of the runtime failed while values were on their way */
} mfsdp__ck_load;

/* ---- files ---- */

typedef struct mfsdp__ck_source {
  mfsdp_checkpoint *ck;
  mfsdp_io_file *file;
  const char *path;
} mfsdp__ck_source;

MFSDP_API mfsdp_status mfsdp__ck_source_read(void *user, int64_t offset, size_t nbytes, void *dst,
                                             mfsdp_error *error) {
  const mfsdp__ck_source *source = (const mfsdp__ck_source *)user;
  const mfsdp_status status = mfsdp_io_read(source->ck->context, &source->ck->io, source->file,
                                            source->path, offset, nbytes, dst);
  if (status != MFSDP_OK) *error = source->ck->context->error;
  return status;
}

/* An open file as what the format's readers take. */
MFSDP_API mfsdp_status mfsdp__ck_source_of(mfsdp__ck_source *from,
                                           mfsdp_safetensors_source *source) {
  *source = mfsdp_safetensors_source_default();
  source->name = from->path;
  source->read = mfsdp__ck_source_read;
  source->user = from;
  return mfsdp_io_size(from->ck->context, &from->ck->io, from->file, from->path,
                       &source->file_nbytes);
}

/* Opens one file and reads its header; it stays open. */
MFSDP_API mfsdp_status mfsdp__ck_open_one(mfsdp__ck_load *load, int32_t set, const char *name) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, load->name, name);
  mfsdp_safetensors_source source;
  mfsdp__ck_open_file *file;
  mfsdp__ck_source from;
  if (load->file_count == load->file_capacity) { /* twice the room */
    const int32_t capacity = load->file_capacity == 0 ? 8 : 2 * load->file_capacity;
    void *memory;
    MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)capacity, sizeof(*load->files), "open files",
                                &memory));
    if (load->file_count > 0)
      memcpy(memory, load->files, (size_t)load->file_count * sizeof(*load->files));
    mfsdp_table_free(ck->context, load->files, (size_t)load->file_capacity, sizeof(*load->files));
    load->files = (mfsdp__ck_open_file *)memory;
    load->file_capacity = capacity;
  }
  file = &load->files[load->file_count];
  memset(file, 0, sizeof(*file));
  file->set = set;
  (void)snprintf(file->name, sizeof(file->name), "%.250s", name);
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_READ, &file->file));
  ++load->file_count;
  from.ck = ck;
  from.file = file->file;
  from.path = path.text;
  MFSDP_TRY(mfsdp__ck_source_of(&from, &source));
  return mfsdp_safetensors_create(ck->context, &source, &file->header, NULL);
}

/* The files that an index names. */
MFSDP_API mfsdp_status mfsdp__ck_open_indexed(mfsdp__ck_load *load, int32_t set, const char *name) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, load->name, name);
  mfsdp_safetensors_index *index = NULL;
  mfsdp_safetensors_source source;
  mfsdp__ck_source from;
  mfsdp_status status;
  int32_t i;
  from.ck = ck;
  from.path = path.text;
  MFSDP_TRY(mfsdp_io_open(ck->context, &ck->io, path.text, MFSDP_IO_READ, &from.file));
  status = mfsdp__ck_source_of(&from, &source);
  if (status == MFSDP_OK)
    status = mfsdp_safetensors_index_create(ck->context, &source, &index, NULL);
  status = mfsdp_io_close(ck->context, &ck->io, from.file, path.text, status);
  for (i = 0; status == MFSDP_OK && i < mfsdp_safetensors_index_file_count(index); ++i)
    status = mfsdp__ck_open_one(load, set, mfsdp_safetensors_index_file_at(index, i));
  mfsdp_safetensors_index_destroy(ck->context, index);
  return status;
}

/* The files of a set: by its index, or the one that has its name, or none. */
MFSDP_API mfsdp_status mfsdp__ck_open_set(mfsdp__ck_load *load, int32_t set) {
  char stem[MFSDP__CK_FILE_NBYTES], name[MFSDP__CK_FILE_NBYTES + 24];
  int there = 0;
  mfsdp__ck_set_name(load->ck, set, stem);
  (void)snprintf(name, sizeof(name), "%.60s.safetensors.index.json", stem);
  MFSDP_TRY(mfsdp__ck_has(load->ck, load->name, name, &there));
  if (there) return mfsdp__ck_open_indexed(load, set, name);
  (void)snprintf(name, sizeof(name), "%.60s.safetensors", stem);
  MFSDP_TRY(mfsdp__ck_has(load->ck, load->name, name, &there));
  return there ? mfsdp__ck_open_one(load, set, name) : MFSDP_OK;
}

/* ---- kinds of state that the runtime does not have ---- */

enum { MFSDP__CK_STRAY = -1 }; /* the set of their files */

typedef struct mfsdp__ck_stray {
  const mfsdp_checkpoint *ck;
  char last[MFSDP__CK_FILE_NBYTES]; /* the index looked at before */
  char next[MFSDP__CK_FILE_NBYTES]; /* the first one by name after it; empty: none */
} mfsdp__ck_stray;

/* "optimizer.KIND.safetensors.index.json" of a KIND that is none of ours. */
MFSDP_API void mfsdp__ck_visit_stray(void *user, const char *name) {
  static const char head[] = "optimizer.", tail[] = ".safetensors.index.json";
  const size_t h = sizeof(head) - 1, t = sizeof(tail) - 1, nbytes = strlen(name);
  mfsdp__ck_stray *stray = (mfsdp__ck_stray *)user;
  char kind[MFSDP__CK_FILE_NBYTES];
  if (nbytes <= h + t || nbytes >= sizeof(kind) || strncmp(name, head, h) != 0 ||
      strcmp(name + nbytes - t, tail) != 0)
    return;
  (void)snprintf(kind, sizeof(kind), "%.*s", (int)(nbytes - h - t), name + h);
  if (mfsdp__ck_state_set(stray->ck, kind) >= 0 || strcmp(name, stray->last) <= 0) return;
  if (stray->next[0] != '\0' && strcmp(name, stray->next) >= 0) return;
  (void)snprintf(stray->next, sizeof(stray->next), "%s", name);
}

/* Opens them all, so that what is in them can be named. */
MFSDP_API mfsdp_status mfsdp__ck_open_strays(mfsdp__ck_load *load) {
  mfsdp_checkpoint *ck = load->ck;
  const mfsdp__ck_path path = mfsdp__ck_path_of(ck, load->name, NULL);
  mfsdp__ck_stray stray;
  memset(&stray, 0, sizeof(stray));
  stray.ck = ck;
  for (;;) {
    stray.next[0] = '\0';
    MFSDP_TRY(mfsdp_io_list(ck->context, &ck->io, path.text, mfsdp__ck_visit_stray, &stray));
    if (stray.next[0] == '\0') return MFSDP_OK;
    MFSDP_TRY(mfsdp__ck_open_indexed(load, MFSDP__CK_STRAY, stray.next));
    memcpy(stray.last, stray.next, sizeof(stray.last));
  }
}

MFSDP_API void mfsdp__ck_close_all(mfsdp__ck_load *load) {
  mfsdp_checkpoint *ck = load->ck;
  int32_t i;
  for (i = 0; i < load->file_count; ++i) {
    mfsdp_safetensors_destroy(ck->context, load->files[i].header);
    (void)mfsdp_io_close(ck->context, &ck->io, load->files[i].file, load->files[i].name, MFSDP_OK);
  }
  mfsdp_table_free(ck->context, load->files, (size_t)load->file_capacity, sizeof(*load->files));
  mfsdp_table_free(ck->context, load->places, (size_t)ck->tensor_count, sizeof(*load->places));
}

/* ---- comparing ---- */

MFSDP_API void mfsdp__ck_refuse(mfsdp__ck_load *load, const char *tensor, const char *why) {
  if (load->refused[0] == '\0')
    (void)snprintf(load->refused, sizeof(load->refused), "tensor '%.120s' %s", tensor, why);
}

/* Notes an issue; one that is not allowed fails the load once all have been reported. */
MFSDP_API void mfsdp__ck_issue(mfsdp__ck_load *load, mfsdp_checkpoint_issue issue, int allowed,
                               const char *tensor) {
  static const char *const texts[] = {"", "is missing", "is not expected", "has another dtype",
                                      "has another shape"};
  if (issue == MFSDP_CHECKPOINT_MISSING) ++load->loaded.missing_count;
  if (issue == MFSDP_CHECKPOINT_UNEXPECTED) ++load->loaded.unexpected_count;
  if (issue == MFSDP_CHECKPOINT_DTYPE) ++load->loaded.dtype_count;
  if (load->report != NULL) load->report(load->user, issue, tensor);
  if (!allowed) mfsdp__ck_refuse(load, tensor, texts[issue]);
}

/* With `convert`, masters may be there or not: the model's values stand in for them. */
MFSDP_API int mfsdp__ck_is_loose(const mfsdp__ck_load *load, int32_t set) {
  return set == MFSDP__CK_MASTER && load->convert;
}

MFSDP_API void mfsdp__ck_compare(mfsdp__ck_load *load, int32_t set, int32_t tensor) {
  const mfsdp_safetensors_tensor *want = &load->ck->tensors[tensor], *got;
  mfsdp__ck_place *place = &load->places[tensor];
  mfsdp_dtype dtype;
  int32_t f, d;
  for (f = 0; f < load->file_count; ++f) {
    got = load->files[f].set == set ? mfsdp_safetensors_find(load->files[f].header, want->name)
                                    : NULL;
    if (got == NULL) continue;
    if (place->tensor != NULL) mfsdp__ck_refuse(load, want->name, "is in two files");
    place->tensor = got;
    place->file = f;
  }
  got = place->tensor;
  if (got == NULL) {
    if (!mfsdp__ck_is_loose(load, set))
      mfsdp__ck_issue(load, MFSDP_CHECKPOINT_MISSING, load->allow_missing, want->name);
    return;
  }
  for (d = 0; d < want->ndim && got->ndim == want->ndim; ++d)
    if (got->shape[d] != want->shape[d]) break;
  if (got->ndim != want->ndim || d < want->ndim)
    mfsdp__ck_issue(load, MFSDP_CHECKPOINT_SHAPE, 0, want->name);
  else if (got->dtype != want->dtype)
    mfsdp__ck_issue(load, MFSDP_CHECKPOINT_DTYPE,
                    load->convert && mfsdp_safetensors_dtype_to(got->dtype, &dtype), want->name);
}

/* 1 if the runtime has a tensor of that name in the set: one of "<parameter>.<state>" for a
 * parameter that has it. */
MFSDP_API int mfsdp__ck_expects(const mfsdp_checkpoint *ck, int32_t set, const char *name) {
  const mfsdp__ck_set *s = &ck->sets[set];
  int32_t first = s->tensor_first, last = first + s->tensor_count;
  while (first < last) { /* runs of one dtype are sorted by name, and most sets have one dtype */
    const int32_t middle = first + (last - first) / 2;
    const int order = strcmp(name, ck->tensors[middle].name);
    if (order == 0) return 1;
    if (order < 0)
      last = middle;
    else
      first = middle + 1;
  }
  for (first = s->tensor_first; first < s->tensor_first + s->tensor_count; ++first)
    if (strcmp(ck->tensors[first].name, name) == 0) return 1;
  return 0;
}

/* What is in the files of a set and not in the runtime. */
MFSDP_API void mfsdp__ck_compare_files(mfsdp__ck_load *load, int32_t set) {
  int32_t f, i;
  for (f = 0; f < load->file_count; ++f) {
    const mfsdp_safetensors *header = load->files[f].header;
    if (load->files[f].set != set) continue;
    for (i = 0; i < mfsdp_safetensors_count(header); ++i) {
      const char *name = mfsdp_safetensors_at(header, i)->name;
      if (set == MFSDP__CK_STRAY ||
          (!mfsdp__ck_expects(load->ck, set, name) && !mfsdp__ck_is_loose(load, set)))
        mfsdp__ck_issue(load, MFSDP_CHECKPOINT_UNEXPECTED, load->allow_unexpected, name);
    }
  }
}

/* The sets that are loaded, opened and compared. */
MFSDP_API mfsdp_status mfsdp__ck_open_all(mfsdp__ck_load *load) {
  mfsdp_checkpoint *ck = load->ck;
  const int32_t sets = load->weights_only ? 1 : ck->set_count;
  void *memory;
  int32_t set, i;
  MFSDP_TRY(mfsdp_table_alloc(ck->context, (size_t)ck->tensor_count, sizeof(*load->places),
                              "places of tensors", &memory));
  load->places = (mfsdp__ck_place *)memory;
  for (set = 0; set < sets; ++set)
    MFSDP_TRY(mfsdp__ck_open_set(load, set));
  if (!load->weights_only) MFSDP_TRY(mfsdp__ck_open_strays(load));
  for (set = 0; set < sets; ++set) {
    const mfsdp__ck_set *s = &ck->sets[set];
    for (i = s->tensor_first; i < s->tensor_first + s->tensor_count; ++i)
      mfsdp__ck_compare(load, set, i);
    mfsdp__ck_compare_files(load, set);
  }
  mfsdp__ck_compare_files(load, MFSDP__CK_STRAY);
  if (load->refused[0] == '\0') return MFSDP_OK;
  return MFSDP_FAIL(ck->context, MFSDP_E_FORMAT,
                    "%.40s: %s (in all %d missing, %d unexpected, %d of another dtype)", load->name,
                    load->refused, (int)load->loaded.missing_count,
                    (int)load->loaded.unexpected_count, (int)load->loaded.dtype_count);
}

#endif /* MFSDP_CHECKPOINT_OPEN_H */
