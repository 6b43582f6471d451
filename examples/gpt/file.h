/* SPDX-License-Identifier: MIT */
/* file.h - reads a file into memory, with an error that names the file and the reason; tells whether
 * two names are one file. */
#ifndef GPT_FILE_H
#define GPT_FILE_H

#include "error.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads all of `path`, at most limit_nbytes. *bytes is malloc'd, has a 0 byte after the last one,
 * and belongs to the caller; *count does not include that 0. An empty file is not an error here. */
int gpt_file_read(const char *path, int64_t limit_nbytes, uint8_t **bytes, int64_t *count,
                  gpt_error *error);

/* 1 if both names lead to one file, through links or other folders too, whether it is there yet or
 * not. Devices and pipes are the same only by the same name: they are not overwritten. */
int gpt_file_same(const char *a, const char *b);

/* Makes `path` a file of one empty line, so that a name that cannot be written is known before a
 * long run and not at its end. Leaves pipes alone: their reader would take that line for the
 * output. NULL: nothing to do. */
int gpt_file_begin(const char *path, gpt_error *error);

/* Fills standard descriptors that the caller closed, read-only: otherwise the next file opened would
 * get their number, and messages would be written into it. Writing to them still fails. */
void gpt_file_keep_standard(void);

#ifdef __cplusplus
}
#endif

#endif /* GPT_FILE_H */
