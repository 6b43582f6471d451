/* SPDX-License-Identifier: MIT */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Reads to the end by doubling: sizes reported by the system are wrong for pipes and /proc. */
static int read_all(FILE *file, const char *path, int64_t limit, uint8_t **bytes, int64_t *count,
                    gpt_error *error) {
  size_t capacity = 1 << 16, used = 0;
  uint8_t *buffer = (uint8_t *)malloc(capacity);
  while (buffer) {
    uint8_t *larger;
    used += fread(buffer + used, 1, capacity - 1 - used, file);
    if (ferror(file)) {
      gpt_fail(error, "cannot read %s: %s; name a file that can be read", path, strerror(errno));
      free(buffer);
      return GPT_USAGE_ERROR;
    }
    if (used > (uint64_t)limit) {
      free(buffer);
      return gpt_fail(error, "%s is larger than %lld bytes; use a smaller file", path,
                      (long long)limit);
    }
    if (feof(file)) {
      buffer[used] = 0;
      *bytes = buffer;
      *count = (int64_t)used;
      return GPT_OK;
    }
    capacity *= 2;
    /* One byte more than the limit tells that a file is too large: /dev/zero has no end. */
    if (capacity > (uint64_t)limit + 2) capacity = (size_t)limit + 2;
    larger = (uint8_t *)realloc(buffer, capacity);
    if (!larger) free(buffer);
    buffer = larger;
  }
  return gpt_fail(error, "no memory to read %s; use a smaller file", path);
}

int gpt_file_read(const char *path, int64_t limit_nbytes, uint8_t **bytes, int64_t *count,
                  gpt_error *error) {
  int status;
  FILE *file = fopen(path, "rb");
  if (!file)
    return gpt_fail(error, "cannot open %s: %s; name a file that can be read", path,
                    strerror(errno));
  status = read_all(file, path, limit_nbytes, bytes, count, error);
  fclose(file);
  return status;
}

/* Two names of files that are not there yet: the same name in the same folder. */
static int same_new_file(const char *a, const char *b) {
  const char *paths[2], *names[2];
  struct stat folders[2];
  paths[0] = a;
  paths[1] = b;
  for (int i = 0; i < 2; ++i) {
    const char *slash = strrchr(paths[i], '/');
    const size_t length = slash ? (size_t)(slash - paths[i]) + 1 : 0;
    char *folder = (char *)malloc(length + 2);
    int found;
    if (!folder) return 0;
    memcpy(folder, paths[i], length);
    memcpy(folder + length, ".", 2);
    found = stat(folder, &folders[i]) == 0;
    free(folder);
    if (!found) return 0;
    names[i] = paths[i] + length;
  }
  return strcmp(names[0], names[1]) == 0 && folders[0].st_dev == folders[1].st_dev &&
         folders[0].st_ino == folders[1].st_ino;
}

int gpt_file_same(const char *a, const char *b) {
  struct stat sa, sb;
  int has_a, has_b;
  if (strcmp(a, b) == 0) return 1;
  has_a = stat(a, &sa) == 0;
  has_b = stat(b, &sb) == 0;
  if (has_a != has_b) return 0;
  if (!has_a) return same_new_file(a, b);
  return S_ISREG(sa.st_mode) && sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

int gpt_file_begin(const char *path, gpt_error *error) {
  struct stat info;
  FILE *file;
  int failed;
  if (!path || (stat(path, &info) == 0 && S_ISFIFO(info.st_mode))) return GPT_OK;
  file = fopen(path, "w");
  failed = !file || fputc('\n', file) == EOF;
  if (file) failed |= fclose(file) != 0;
  return failed ? gpt_fail(error, "cannot write %s: %s", path, strerror(errno)) : GPT_OK;
}

void gpt_file_keep_standard(void) {
  int file;
  do
    file = open("/dev/null", O_RDONLY);
  while (file >= 0 && file <= STDERR_FILENO);
  if (file >= 0) close(file);
}
