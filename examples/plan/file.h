/* SPDX-License-Identifier: MIT */
/* file.h - reads a small file into memory; writes a finished text, whole or not at all. */
#ifndef PLAN_FILE_H
#define PLAN_FILE_H

#include "error.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads all of `path`, at most limit_nbytes. *text is malloc'd, has a 0 byte behind its last one,
 * and belongs to the caller. A file with a control character is refused as "not text". */
int plan_file_read_text(const char *path, size_t limit_nbytes, char **text, plan_error *error);

/* Replaces `path` by the text; on failure it is left as it was. */
int plan_file_write(const char *path, const char *text, size_t nbytes, plan_error *error);

/* The same for several files, all or none: begin each, then end each. What is begun lies beside
 * `path` under another name (a pipe or a device is opened). A link stays and its file is replaced; one
 * to nothing is an error. Zeros, or an empty path: nothing. */
typedef struct plan_output {
  const char *path, *text;
  size_t nbytes;
  char *temporary, *target; /* target: of a link, else NULL */
  int fd;                   /* of a pipe or a device, else -1 */
} plan_output;
int plan_output_begin(const char *path, const char *text, size_t nbytes, plan_output *output,
                      plan_error *error);
int plan_output_end(plan_output *output, plan_error *error);
/* Takes back what was begun and not ended. */
void plan_output_drop(plan_output *output);

/* The next line that is not empty after its comment (from #) is cut, without its newline, or NULL.
 * *rest moves on and *number counts lines. Changes the text. */
char *plan_file_line(char **rest, int *number);

/* The next word of a line, cut off by a 0 byte, or NULL. */
char *plan_file_word(char **rest);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_FILE_H */
