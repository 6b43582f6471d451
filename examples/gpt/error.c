/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int gpt_fail(gpt_error *error, const char *format, ...) {
  va_list arguments;
  if (!error) return GPT_USAGE_ERROR;
  va_start(arguments, format);
  if (vsnprintf(error->text, sizeof error->text, format, arguments) < 0) error->text[0] = '\0';
  va_end(arguments);
  /* Names and paths come from outside: a newline in one must not break "one line". */
  for (char *c = error->text; *c; ++c)
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
  return GPT_USAGE_ERROR;
}
