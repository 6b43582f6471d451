/* SPDX-License-Identifier: MIT */
/*
 * error.h - how the files of this example report what went wrong: 0, or PLAN_USAGE_ERROR and one
 * line of text that says what to do. The program prints the line and exits with that status.
 */
#ifndef PLAN_ERROR_H
#define PLAN_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

enum { PLAN_OK = 0, PLAN_USAGE_ERROR = 2 };

typedef struct plan_error {
  char text[640]; /* one line without a newline, always terminated */
} plan_error;

/* Formats the line (cut where it does not fit, control characters replaced) and returns
 * PLAN_USAGE_ERROR, so that a check reads `return plan_fail(error, ...)`. `error` may be NULL. */
int plan_fail(plan_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#endif /* PLAN_ERROR_H */
