/* SPDX-License-Identifier: MIT */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int read_all(FILE *f, const char *path, size_t limit, char **text, size_t *count,
                    plan_error *error) {
  size_t used = 0, capacity = 0;
  char *data = NULL;
  for (;;) {
    size_t got;
    if (used + 1 >= capacity) {
      char *more;
      capacity = capacity ? 2 * capacity : 4096;
      more = (char *)realloc(data, capacity);
      if (!more) {
        free(data);
        return plan_fail(error, "no memory for %s", path);
      }
      data = more;
    }
    got = fread(data + used, 1, capacity - used - 1, f);
    used += got;
    if (used > limit) {
      free(data);
      return plan_fail(error, "%s has more than %zu bytes", path, limit);
    }
    if (got == 0) break;
  }
  if (ferror(f)) {
    free(data);
    return plan_fail(error, "cannot read %s: %s", path, strerror(errno));
  }
  data[used] = '\0';
  *text = data;
  *count = used;
  return PLAN_OK;
}

int plan_file_read_text(const char *path, size_t limit_nbytes, char **text, plan_error *error) {
  size_t count = 0;
  int status;
  FILE *f = fopen(path, "rb");
  *text = NULL;
  if (!f) return plan_fail(error, "cannot read %s: %s", path, strerror(errno));
  status = read_all(f, path, limit_nbytes, text, &count, error);
  fclose(f);
  if (status != PLAN_OK) return status;
  if (strlen(*text) == count) return PLAN_OK;
  free(*text);
  *text = NULL;
  return plan_fail(error, "%s is not text", path);
}

/* Writes and closes; 0, or -1 with errno. */
static int write_to(int fd, const char *text, size_t nbytes) {
  FILE *f = fdopen(fd, "wb");
  int failed;
  if (!f) {
    close(fd);
    return -1;
  }
  failed = fwrite(text, 1, nbytes, f) != nbytes;
  return fclose(f) != 0 || failed ? -1 : 0;
}

int plan_file_write(const char *path, const char *text, size_t nbytes, plan_error *error) {
  const size_t room = strlen(path) + 32;
  char *temporary = (char *)malloc(room);
  int failed = -1, fd;
  struct stat info;
  if (!temporary) return plan_fail(error, "no memory to write %s", path);
  if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
    fd = open(path, O_WRONLY); /* a pipe or a device cannot be replaced */
    if (fd >= 0) failed = write_to(fd, text, nbytes);
  } else {
    snprintf(temporary, room, "%s.%ld.tmp", path, (long)getpid());
    fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd >= 0) failed = write_to(fd, text, nbytes);
    if (fd >= 0 && failed == 0) failed = rename(temporary, path);
    if (fd >= 0 && failed != 0) {
      const int reason = errno;
      unlink(temporary);
      errno = reason;
    }
  }
  free(temporary);
  return failed ? plan_fail(error, "cannot write %s: %s", path, strerror(errno)) : PLAN_OK;
}

char *plan_file_line(char **rest, int *number) {
  while (**rest) {
    char *line = *rest;
    char *end = strchr(line, '\n');
    *rest = end ? end + 1 : line + strlen(line);
    if (end) *end = '\0';
    ++*number;
    /* A # begins a comment at the start of a line or after a blank: inside a word it is a letter.
     */
    for (char *c = line; *c; ++c)
      if (*c == '#' && (c == line || c[-1] == ' ' || c[-1] == '\t')) {
        *c = '\0';
        break;
      }
    if (line[strspn(line, " \t\r")]) return line;
  }
  return NULL;
}

char *plan_file_word(char **rest) {
  char *word = *rest + strspn(*rest, " \t\r");
  char *end = word + strcspn(word, " \t\r");
  if (!*word) return NULL;
  *rest = *end ? end + 1 : end;
  *end = '\0';
  return word;
}
