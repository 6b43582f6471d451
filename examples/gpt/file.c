/* SPDX-License-Identifier: MIT */
#include "file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
