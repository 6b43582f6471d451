/* SPDX-License-Identifier: MIT */
#define _XOPEN_SOURCE 700 /* realpath */
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

/* No control characters but those of lines: they would reach a terminal in a report or a message. */
static int is_text(const char *text, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const unsigned char c = (unsigned char)text[i];
    if (c == 0x7f || (c < 0x20 && c != '\t' && c != '\n' && c != '\r')) return 0;
  }
  return 1;
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
  if (is_text(*text, count)) return PLAN_OK;
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

static int output_fail(plan_output *output, int reason, plan_error *error) {
  plan_fail(error, "cannot write %s: %s", output->path, strerror(reason));
  plan_output_drop(output);
  return PLAN_USAGE_ERROR;
}

int plan_output_begin(const char *path, const char *text, size_t nbytes, plan_output *output,
                      plan_error *error) {
  struct stat info;
  int fd;
  memset(output, 0, sizeof *output);
  if (!path) return PLAN_OK;
  output->path = path;
  output->text = text;
  output->nbytes = nbytes;
  output->fd = -1;
  if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {
    output->fd = open(path, O_WRONLY); /* a pipe or a device cannot be replaced */
    return output->fd >= 0 ? PLAN_OK : output_fail(output, errno, error);
  }
  if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode)) { /* the link stays, its file is replaced */
    output->target = realpath(path, NULL);
    if (!output->target) return output_fail(output, errno, error);
    path = output->target;
  }
  output->temporary = (char *)malloc(strlen(path) + 32);
  if (!output->temporary) return output_fail(output, ENOMEM, error);
  snprintf(output->temporary, strlen(path) + 32, "%s.%ld.tmp", path, (long)getpid());
  fd = open(output->temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
  if (fd < 0) { /* whose it is, if it is there, is not known: it stays */
    const int reason = errno;
    free(output->temporary);
    output->temporary = NULL;
    return output_fail(output, reason, error);
  }
  return write_to(fd, text, nbytes) == 0 ? PLAN_OK : output_fail(output, errno, error);
}

int plan_output_end(plan_output *output, plan_error *error) {
  if (!output->path) return PLAN_OK;
  if (output->fd >= 0) {
    const int fd = output->fd;
    output->fd = -1; /* closed in any case */
    if (write_to(fd, output->text, output->nbytes) != 0) return output_fail(output, errno, error);
  } else if (rename(output->temporary, output->target ? output->target : output->path) != 0) {
    return output_fail(output, errno, error);
  }
  free(output->temporary);
  free(output->target);
  memset(output, 0, sizeof *output);
  return PLAN_OK;
}

void plan_output_drop(plan_output *output) {
  if (!output->path) return;
  if (output->fd >= 0) close(output->fd);
  if (output->temporary) unlink(output->temporary);
  free(output->temporary);
  free(output->target);
  memset(output, 0, sizeof *output);
}

int plan_file_write(const char *path, const char *text, size_t nbytes, plan_error *error) {
  plan_output output;
  if (plan_output_begin(path, text, nbytes, &output, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  return plan_output_end(&output, error);
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
