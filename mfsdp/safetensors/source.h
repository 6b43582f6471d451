/* SPDX-License-Identifier: MIT */
/*
 * safetensors/source.h - where bytes of a file come from: a callback, or a buffer.
 *
 *   mfsdp_safetensors_source source = mfsdp_safetensors_source_default();
 *   source.name = path;  source.file_nbytes = size;  source.read = my_pread;  source.user = &file;
 *
 * Does not: open files.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_SOURCE_H
#define MFSDP_SAFETENSORS_SOURCE_H

#include "fault.h"

typedef struct mfsdp_safetensors_source {
  size_t struct_nbytes;
  const char *name;    /* for messages: the path, say */
  int64_t file_nbytes; /* the size of the whole file */
  /*
   * Reads exactly `nbytes` (> 0) at `offset`, which lie inside file_nbytes, to dst. On failure
   * returns a status (E_IO) and may say why by MFSDP_ERROR_SET(error, ...).
   */
  mfsdp_status (*read)(void *user, int64_t offset, size_t nbytes, void *dst, mfsdp_error *error);
  void *user; /* handed to read */
} mfsdp_safetensors_source;

/* Everything 0 but the struct's size: the caller fills in the rest. */
MFSDP_API mfsdp_safetensors_source mfsdp_safetensors_source_default(void) {
  mfsdp_safetensors_source source;
  memset(&source, 0, sizeof(source));
  source.struct_nbytes = sizeof(source);
  return source;
}

MFSDP_API mfsdp_status mfsdp__st_source_copy(void *user, int64_t offset, size_t nbytes, void *dst,
                                             mfsdp_error *error) {
  (void)error;
  memcpy(dst, (const unsigned char *)user + (size_t)offset, nbytes);
  return MFSDP_OK;
}

/* A file that lies in memory; `data` (nbytes, which fit 63 bits) must stay while it is read. */
MFSDP_API mfsdp_safetensors_source mfsdp_safetensors_source_memory(const char *name,
                                                                   const void *data,
                                                                   size_t nbytes) {
  mfsdp_safetensors_source source = mfsdp_safetensors_source_default();
  source.name = name;
  source.file_nbytes = (int64_t)nbytes;
  source.read = mfsdp__st_source_copy;
  source.user = (void *)(uintptr_t)data;
  return source;
}

MFSDP_API mfsdp_status mfsdp__st_source_check(mfsdp_context *context,
                                              const mfsdp_safetensors_source *source) {
  if (source == NULL || source->struct_nbytes != sizeof(*source))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: source.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_safetensors_source_default)",
                      source == NULL ? (size_t)0 : source->struct_nbytes, sizeof(*source));
  if (source->name == NULL || source->read == NULL || source->file_nbytes < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "safetensors: source needs a name, read and file_nbytes >= 0, has %lld",
                      (long long)source->file_nbytes);
  return MFSDP_OK;
}

/*
 * Reads nbytes at `offset` of the file to dst. E_ARGUMENT if they are not inside the file; the
 * callback's status, with its message if it gave one.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status
mfsdp_safetensors_source_read(mfsdp_context *context, const mfsdp_safetensors_source *source,
                              int64_t offset, size_t nbytes, void *dst) {
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status status;
  if (offset < 0 || offset > source->file_nbytes ||
      nbytes > (uint64_t)(source->file_nbytes - offset))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%.120s: %zu bytes at byte %lld are not inside the file's %lld", source->name,
                      nbytes, (long long)offset, (long long)source->file_nbytes);
  if (nbytes == 0) return MFSDP_OK;
  status = source->read(source->user, offset, nbytes, dst, &error);
  if (status == MFSDP_OK) return MFSDP_OK;
  if (error.status != MFSDP_OK) return mfsdp_context_take_error(context, &error);
  return MFSDP_FAIL(context, status, "%.120s: reading %zu bytes at byte %lld failed", source->name,
                    nbytes, (long long)offset);
}

#endif /* MFSDP_SAFETENSORS_SOURCE_H */
