/* SPDX-License-Identifier: MIT */
/*
 * io.h - files and folders as a table of callbacks, and loops that finish what a system cuts short.
 *
 *   mfsdp_io io = mfsdp_io_posix();                              // posix/io_posix.h
 *   MFSDP_TRY(mfsdp_io_open(&context, &io, path, MFSDP_IO_CREATE, &file));
 *   MFSDP_TRY(mfsdp_io_write(&context, &io, file, path, 0, nbytes, data)); // all of it
 *
 * Paths are bytes with / between folders. A program may bring its own table: an object store, or a
 * model of a disk that fails where a test wants it to.
 * Does not: buffer, or know any format.
 * Link flags: none.
 */
#ifndef MFSDP_IO_H
#define MFSDP_IO_H

#include "context.h"

typedef struct mfsdp_io_file mfsdp_io_file; /* the implementation's */

typedef enum mfsdp_io_mode {
  MFSDP_IO_READ = 1, /* an existing file */
  MFSDP_IO_WRITE,    /* an existing file, kept as it is */
  MFSDP_IO_CREATE    /* a new file, or an old one cut to nothing */
} mfsdp_io_mode;

/* Gets each name of a folder; "." and ".." are left out. */
typedef void (*mfsdp_io_name)(void *user, const char *name);

/*
 * All are required and COMPLETE on return. On failure they return a status (E_IO unless said) and
 * may say why by MFSDP_ERROR_SET(error, ...). An interrupted call is repeated by the implementation,
 * but for read_at and write_at, where it may say so.
 */
typedef struct mfsdp_io_ops {
  size_t struct_nbytes;
  const char *name;
  mfsdp_status (*open)(void *self, const char *path, mfsdp_io_mode mode, mfsdp_io_file **out,
                       mfsdp_error *error);
  /* Also after an error the file is closed. */
  mfsdp_status (*close)(void *self, mfsdp_io_file *file, mfsdp_error *error);
  mfsdp_status (*size)(void *self, mfsdp_io_file *file, int64_t *nbytes, mfsdp_error *error);
  /* *done: bytes moved, 1 to nbytes; of a read 0 at the end of the file; -1: interrupted before any.
   * The latter is asked again, but not for ever: see MFSDP_IO_INTERRUPTS. */
  mfsdp_status (*read_at)(void *self, mfsdp_io_file *file, int64_t offset, size_t nbytes, void *dst,
                          int64_t *done, mfsdp_error *error);
  mfsdp_status (*write_at)(void *self, mfsdp_io_file *file, int64_t offset, size_t nbytes,
                           const void *src, int64_t *done, mfsdp_error *error);
  /* What was written to the file, by anyone on this machine, survives a loss of power. */
  mfsdp_status (*sync_file)(void *self, mfsdp_io_file *file, mfsdp_error *error);
  /* The same for names made, changed and removed in a folder. */
  mfsdp_status (*sync_folder)(void *self, const char *path, mfsdp_error *error);
  mfsdp_status (*make_folder)(void *self, const char *path, int32_t *existed, mfsdp_error *error);
  /* Replaces a file `to`; a folder `to` that is not empty is an error. After rename and remove, list
   * no longer shows the old name: where it does, a checkpoint's save is E_IO. */
  mfsdp_status (*rename)(void *self, const char *from, const char *to, mfsdp_error *error);
  mfsdp_status (*remove)(void *self, const char *path, mfsdp_error *error); /* or an empty folder */
  mfsdp_status (*list)(void *self, const char *path, mfsdp_io_name visit, void *user,
                       mfsdp_error *error);
  /* Takes a lock file, made where there is none; the system gives it back if the process ends.
   * E_STATE: someone has it. Close gives it back. */
  mfsdp_status (*lock)(void *self, const char *path, mfsdp_io_file **out, mfsdp_error *error);
} mfsdp_io_ops;

typedef struct mfsdp_io {
  size_t struct_nbytes;
  const mfsdp_io_ops *ops;
  void *self;
} mfsdp_io;

/* E_ARGUMENT unless the table is complete. */
MFSDP_API mfsdp_status mfsdp_io_check(mfsdp_context *context, const mfsdp_io *io) {
  const mfsdp_io_ops *ops = io == NULL ? NULL : io->ops;
  if (ops == NULL || io->struct_nbytes != sizeof(*io) || ops->struct_nbytes < sizeof(*ops) ||
      ops->open == NULL || ops->close == NULL || ops->size == NULL || ops->read_at == NULL ||
      ops->write_at == NULL || ops->sync_file == NULL || ops->sync_folder == NULL ||
      ops->make_folder == NULL || ops->rename == NULL || ops->remove == NULL || ops->list == NULL ||
      ops->lock == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "io: NULL, of another size, or not complete");
  return MFSDP_OK;
}

/* The status of one call, with its error, or a general one, in the context. */
MFSDP_API mfsdp_status mfsdp__io_result(mfsdp_context *context, mfsdp_status status,
                                        const mfsdp_error *error, const char *what,
                                        const char *path) {
  if (status == MFSDP_OK) return MFSDP_OK;
  return MFSDP_FAIL(context, status, "%s %.200s: %.120s", what, path,
                    error->status == MFSDP_OK ? "refused" : error->message);
}

/* E_IO and others: as the table says. *out is NULL then. */
MFSDP_API mfsdp_status mfsdp_io_open(mfsdp_context *context, const mfsdp_io *io, const char *path,
                                     mfsdp_io_mode mode, mfsdp_io_file **out) {
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status status;
  *out = NULL;
  status = io->ops->open(io->self, path, mode, out, &error);
  if (status != MFSDP_OK) *out = NULL;
  return mfsdp__io_result(context, status, &error, mode == MFSDP_IO_CREATE ? "create" : "open",
                          path);
}

/* Closes, and gives `status` back if it is an error already; NULL is allowed. Some systems report a
 * failed write only here. */
MFSDP_API mfsdp_status mfsdp_io_close(mfsdp_context *context, const mfsdp_io *io,
                                      mfsdp_io_file *file, const char *path, mfsdp_status status) {
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status closed;
  if (file == NULL) return status;
  closed = io->ops->close(io->self, file, &error);
  return status != MFSDP_OK ? status : mfsdp__io_result(context, closed, &error, "close", path);
}

/* So many answers of "interrupted" in a row, no byte between them, are an error (E_IO). Far more than
 * signals bring about: at a thousand a second, all during one transfer, it takes 100 seconds. */
#define MFSDP_IO_INTERRUPTS 100000

/* Counts *have on by what a transfer of `nbytes` moved. E_IO: a count that no transfer can have, or
 * nothing but interruptions, of which *interrupts counts those since the last byte. */
MFSDP_API mfsdp_status mfsdp__io_advance(mfsdp_context *context, const char *what, const char *path,
                                         size_t nbytes, int64_t done, size_t *have,
                                         int32_t *interrupts) {
  if (done < -1 || (done > 0 && (uint64_t)done > (uint64_t)nbytes))
    return MFSDP_FAIL(context, MFSDP_E_IO, "%s %.200s: the io table says %lld of %zu bytes", what,
                      path, (long long)done, nbytes);
  *interrupts = done < 0 ? *interrupts + 1 : 0;
  if (*interrupts >= MFSDP_IO_INTERRUPTS)
    return MFSDP_FAIL(context, MFSDP_E_IO, "%s %.200s: interrupted %d times in a row", what, path,
                      MFSDP_IO_INTERRUPTS);
  if (done > 0) *have += (size_t)done;
  return MFSDP_OK;
}

/* Reads exactly nbytes. E_FORMAT: the file ends before. E_IO: the table's, or it never gets on. */
MFSDP_API mfsdp_status mfsdp_io_read(mfsdp_context *context, const mfsdp_io *io,
                                     mfsdp_io_file *file, const char *path, int64_t offset,
                                     size_t nbytes, void *dst) {
  size_t have = 0;
  int32_t interrupts = 0;
  while (have < nbytes) {
    mfsdp_error error = mfsdp_error_none();
    int64_t done = -1;
    const mfsdp_status status =
        io->ops->read_at(io->self, file, offset + (int64_t)have, nbytes - have,
                         (unsigned char *)dst + have, &done, &error);
    if (status != MFSDP_OK) return mfsdp__io_result(context, status, &error, "read", path);
    if (done == 0)
      return MFSDP_FAIL(context, MFSDP_E_FORMAT, "read %.200s: the file ends at byte %lld", path,
                        (long long)(offset + (int64_t)have));
    MFSDP_TRY(mfsdp__io_advance(context, "read", path, nbytes - have, done, &have, &interrupts));
  }
  return MFSDP_OK;
}

/* Writes exactly nbytes. A table that never gets on is E_IO. */
MFSDP_API mfsdp_status mfsdp_io_write(mfsdp_context *context, const mfsdp_io *io,
                                      mfsdp_io_file *file, const char *path, int64_t offset,
                                      size_t nbytes, const void *src) {
  size_t have = 0;
  int32_t interrupts = 0;
  while (have < nbytes) {
    mfsdp_error error = mfsdp_error_none();
    int64_t done = -1;
    const mfsdp_status status =
        io->ops->write_at(io->self, file, offset + (int64_t)have, nbytes - have,
                          (const unsigned char *)src + have, &done, &error);
    if (status != MFSDP_OK) return mfsdp__io_result(context, status, &error, "write", path);
    if (done == 0)
      return MFSDP_FAIL(context, MFSDP_E_IO, "write %.200s: nothing is taken any more", path);
    MFSDP_TRY(mfsdp__io_advance(context, "write", path, nbytes - have, done, &have, &interrupts));
  }
  return MFSDP_OK;
}

/* Size of an open file. */
MFSDP_API mfsdp_status mfsdp_io_size(mfsdp_context *context, const mfsdp_io *io,
                                     mfsdp_io_file *file, const char *path, int64_t *nbytes) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->size(io->self, file, nbytes, &error);
  return mfsdp__io_result(context, status, &error, "size of", path);
}

/* Makes what was written durable. */
MFSDP_API mfsdp_status mfsdp_io_sync(mfsdp_context *context, const mfsdp_io *io,
                                     mfsdp_io_file *file, const char *path) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->sync_file(io->self, file, &error);
  return mfsdp__io_result(context, status, &error, "sync", path);
}

/* Makes a folder's names durable. */
MFSDP_API mfsdp_status mfsdp_io_sync_folder(mfsdp_context *context, const mfsdp_io *io,
                                            const char *path) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->sync_folder(io->self, path, &error);
  return mfsdp__io_result(context, status, &error, "sync the folder", path);
}

/* *existed (NULL: not wanted) is 1 if the folder was there. */
MFSDP_API mfsdp_status mfsdp_io_make_folder(mfsdp_context *context, const mfsdp_io *io,
                                            const char *path, int32_t *existed) {
  mfsdp_error error = mfsdp_error_none();
  int32_t was_there = 0;
  const mfsdp_status status = io->ops->make_folder(io->self, path, &was_there, &error);
  if (existed != NULL) *existed = was_there;
  return mfsdp__io_result(context, status, &error, "make the folder", path);
}

/* Renames a file or a folder. */
MFSDP_API mfsdp_status mfsdp_io_rename(mfsdp_context *context, const mfsdp_io *io, const char *from,
                                       const char *to) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->rename(io->self, from, to, &error);
  return mfsdp__io_result(context, status, &error, "rename", from);
}

/* Removes a file, or an empty folder. */
MFSDP_API mfsdp_status mfsdp_io_remove(mfsdp_context *context, const mfsdp_io *io,
                                       const char *path) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->remove(io->self, path, &error);
  return mfsdp__io_result(context, status, &error, "remove", path);
}

/* Visits the names in a folder. */
MFSDP_API mfsdp_status mfsdp_io_list(mfsdp_context *context, const mfsdp_io *io, const char *path,
                                     mfsdp_io_name visit, void *user) {
  mfsdp_error error = mfsdp_error_none();
  const mfsdp_status status = io->ops->list(io->self, path, visit, user, &error);
  return mfsdp__io_result(context, status, &error, "list", path);
}

/* Takes a lock file; E_STATE if someone has it. */
MFSDP_API mfsdp_status mfsdp_io_lock(mfsdp_context *context, const mfsdp_io *io, const char *path,
                                     mfsdp_io_file **out) {
  mfsdp_error error = mfsdp_error_none();
  mfsdp_status status;
  *out = NULL;
  status = io->ops->lock(io->self, path, out, &error);
  if (status != MFSDP_OK) *out = NULL;
  return mfsdp__io_result(context, status, &error, "lock", path);
}

#endif /* MFSDP_IO_H */
