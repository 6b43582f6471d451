/* SPDX-License-Identifier: MIT */
/*
 * io_posix.h - io.h on a POSIX file system.
 *
 *   mfsdp_io io = mfsdp_io_posix();
 *
 * Locks are flock's, so they hold against other processes and against other opens of this one. Over
 * NFS they need a server that has them.
 * Does not: hold state. Link flags: none. POSIX 2008: see clock.h.
 */
#ifndef MFSDP_POSIX_IO_POSIX_H
#define MFSDP_POSIX_IO_POSIX_H

#include "../io.h"
#include "clock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* The reasons that a user can do something about; not strerror, which is not safe with threads, nor
 * strerror_r, of which there are two. */
MFSDP_API const char *mfsdp__posix_reason(int number) {
  switch (number) {
  case EACCES:
  case EPERM: return "not allowed";
  case EDQUOT: return "the quota is used up";
  case EEXIST:
  case ENOTEMPTY: return "it is there already and not empty";
  case EFBIG: return "the file would be too large";
  case EINVAL: return "the system does not do this here";
  case EIO: return "the device failed";
  case EISDIR: return "it is a folder";
  case EMFILE:
  case ENFILE: return "too many open files";
  case ENAMETOOLONG: return "the name is too long";
  case ENOENT: return "no such file or folder";
  case ENOSPC: return "no space left on the device";
  case ENOTDIR: return "it is no folder";
  case EROFS: return "the file system is read-only";
  default: return NULL;
  }
}

/* The system's reason, as E_IO. */
MFSDP_API mfsdp_status mfsdp__posix_fail(mfsdp_error *error, int number) {
  const char *reason = mfsdp__posix_reason(number);
  if (reason == NULL) return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "system error %d", number);
  return MFSDP_ERROR_SET(error, MFSDP_E_IO, -1, "%s", reason);
}

/* A descriptor as a file: 0 is a descriptor, NULL is no file. */
MFSDP_API mfsdp_io_file *mfsdp__posix_file(int fd) {
  return (mfsdp_io_file *)((intptr_t)fd + 1);
}

MFSDP_API int mfsdp__posix_fd(const mfsdp_io_file *file) {
  return (int)((intptr_t)file - 1);
}

MFSDP_API int mfsdp__posix_open_fd(const char *path, int flags) {
  int fd;
  do
    fd = open(path, flags | O_CLOEXEC, 0666);
  while (fd < 0 && errno == EINTR);
  return fd;
}

MFSDP_API mfsdp_status mfsdp__posix_open(void *self, const char *path, mfsdp_io_mode mode,
                                         mfsdp_io_file **out, mfsdp_error *error) {
  const int fd =
      mfsdp__posix_open_fd(path, mode == MFSDP_IO_READ    ? O_RDONLY
                                 : mode == MFSDP_IO_WRITE ? O_WRONLY
                                                          : O_WRONLY | O_CREAT | O_TRUNC);
  (void)self;
  if (fd < 0) return mfsdp__posix_fail(error, errno);
  *out = mfsdp__posix_file(fd);
  return MFSDP_OK;
}

/* An interrupted close has closed on Linux: the number may be another file's by now. */
MFSDP_API mfsdp_status mfsdp__posix_close(void *self, mfsdp_io_file *file, mfsdp_error *error) {
  (void)self;
  if (close(mfsdp__posix_fd(file)) != 0 && errno != EINTR) return mfsdp__posix_fail(error, errno);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__posix_size(void *self, mfsdp_io_file *file, int64_t *nbytes,
                                         mfsdp_error *error) {
  struct stat info;
  (void)self;
  if (fstat(mfsdp__posix_fd(file), &info) != 0) return mfsdp__posix_fail(error, errno);
  *nbytes = (int64_t)info.st_size;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__posix_moved(ssize_t count, int64_t *done, mfsdp_error *error) {
  if (count < 0 && errno != EINTR) return mfsdp__posix_fail(error, errno);
  *done = count < 0 ? -1 : (int64_t)count;
  return MFSDP_OK;
}

/* Bytes read at once; the caller comes back for the rest. The kernel reads ahead while a piece is
 * copied, which no larger piece lets it do: of cold files 128 KiB are a fifth faster than 2 MiB
 * (docs/checkpoint.md). */
#define MFSDP__POSIX_READ_NBYTES ((size_t)128 << 10)

MFSDP_API mfsdp_status mfsdp__posix_read_at(void *self, mfsdp_io_file *file, int64_t offset,
                                            size_t nbytes, void *dst, int64_t *done,
                                            mfsdp_error *error) {
  (void)self;
  if (nbytes > MFSDP__POSIX_READ_NBYTES) nbytes = MFSDP__POSIX_READ_NBYTES;
  return mfsdp__posix_moved(pread(mfsdp__posix_fd(file), dst, nbytes, (off_t)offset), done, error);
}

MFSDP_API mfsdp_status mfsdp__posix_write_at(void *self, mfsdp_io_file *file, int64_t offset,
                                             size_t nbytes, const void *src, int64_t *done,
                                             mfsdp_error *error) {
  (void)self;
  return mfsdp__posix_moved(pwrite(mfsdp__posix_fd(file), src, nbytes, (off_t)offset), done, error);
}

MFSDP_API mfsdp_status mfsdp__posix_sync_fd(int fd, mfsdp_error *error) {
  int result;
  do
    result = fsync(fd);
  while (result != 0 && errno == EINTR);
  return result == 0 ? MFSDP_OK : mfsdp__posix_fail(error, errno);
}

MFSDP_API mfsdp_status mfsdp__posix_sync_file(void *self, mfsdp_io_file *file, mfsdp_error *error) {
  (void)self;
  return mfsdp__posix_sync_fd(mfsdp__posix_fd(file), error);
}

MFSDP_API mfsdp_status mfsdp__posix_sync_folder(void *self, const char *path, mfsdp_error *error) {
  const int fd = mfsdp__posix_open_fd(path, O_RDONLY);
  mfsdp_status status;
  (void)self;
  if (fd < 0) return mfsdp__posix_fail(error, errno);
  status = mfsdp__posix_sync_fd(fd, error);
  (void)close(fd);
  return status;
}

MFSDP_API mfsdp_status mfsdp__posix_make_folder(void *self, const char *path, int32_t *existed,
                                                mfsdp_error *error) {
  struct stat info;
  int result;
  (void)self;
  do
    result = mkdir(path, 0777);
  while (result != 0 && errno == EINTR);
  if (result == 0) return MFSDP_OK;
  if (errno != EEXIST) return mfsdp__posix_fail(error, errno);
  if (stat(path, &info) != 0) return mfsdp__posix_fail(error, errno);
  if (!S_ISDIR(info.st_mode)) return mfsdp__posix_fail(error, ENOTDIR);
  *existed = 1;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__posix_rename(void *self, const char *from, const char *to,
                                           mfsdp_error *error) {
  int result;
  (void)self;
  do
    result = rename(from, to);
  while (result != 0 && errno == EINTR);
  return result == 0 ? MFSDP_OK : mfsdp__posix_fail(error, errno);
}

MFSDP_API mfsdp_status mfsdp__posix_remove(void *self, const char *path, mfsdp_error *error) {
  int result;
  (void)self;
  do
    result = remove(path);
  while (result != 0 && errno == EINTR);
  return result == 0 ? MFSDP_OK : mfsdp__posix_fail(error, errno);
}

MFSDP_API mfsdp_status mfsdp__posix_list(void *self, const char *path, mfsdp_io_name visit,
                                         void *user, mfsdp_error *error) {
  DIR *folder = opendir(path);
  const struct dirent *entry;
  int number;
  (void)self;
  if (folder == NULL) return mfsdp__posix_fail(error, errno);
  for (;;) {
    errno = 0;
    entry = readdir(folder);
    if (entry == NULL) break;
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
      visit(user, entry->d_name);
  }
  number = errno;
  (void)closedir(folder);
  return number == 0 ? MFSDP_OK : mfsdp__posix_fail(error, number);
}

MFSDP_API mfsdp_status mfsdp__posix_lock(void *self, const char *path, mfsdp_io_file **out,
                                         mfsdp_error *error) {
  const int fd = mfsdp__posix_open_fd(path, O_RDWR | O_CREAT);
  int result, number;
  (void)self;
  if (fd < 0) return mfsdp__posix_fail(error, errno);
  do
    result = flock(fd, LOCK_EX | LOCK_NB);
  while (result != 0 && errno == EINTR);
  number = errno;
  if (result == 0) {
    *out = mfsdp__posix_file(fd);
    return MFSDP_OK;
  }
  (void)close(fd);
  if (number == EWOULDBLOCK)
    return MFSDP_ERROR_SET(error, MFSDP_E_STATE, -1, "someone else has it");
  return mfsdp__posix_fail(error, number);
}

/* The file system of this machine. */
MFSDP_API mfsdp_io mfsdp_io_posix(void) {
  static const mfsdp_io_ops ops = {sizeof(mfsdp_io_ops),     "posix",
                                   mfsdp__posix_open,        mfsdp__posix_close,
                                   mfsdp__posix_size,        mfsdp__posix_read_at,
                                   mfsdp__posix_write_at,    mfsdp__posix_sync_file,
                                   mfsdp__posix_sync_folder, mfsdp__posix_make_folder,
                                   mfsdp__posix_rename,      mfsdp__posix_remove,
                                   mfsdp__posix_list,        mfsdp__posix_lock};
  mfsdp_io io;
  memset(&io, 0, sizeof(io));
  io.struct_nbytes = sizeof(io);
  io.ops = &ops;
  return io;
}

#endif /* MFSDP_POSIX_IO_POSIX_H */
