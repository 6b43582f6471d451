/* SPDX-License-Identifier: MIT */
/* file.h - reads a file into memory, with an error that names the file and the reason. */
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

#ifdef __cplusplus
}
#endif

#endif /* GPT_FILE_H */
