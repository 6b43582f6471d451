/* SPDX-License-Identifier: MIT */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int plan_fail(plan_error *error, const char *format, ...) {
  va_list arguments;
  if (!error) return PLAN_USAGE_ERROR;
  va_start(arguments, format);
  vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  /* Names come from files: nothing in them may move the cursor or break the line. */
  for (char *c = error->text; *c; ++c)
    if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
  return PLAN_USAGE_ERROR;
}
