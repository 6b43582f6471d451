/* SPDX-License-Identifier: MIT */
/*
 * error.h - how the files of this example report what went wrong: 0, or GPT_USAGE_ERROR and one
 * line of text that says what to do. The program prints the line and exits with that status.
 */
#ifndef GPT_ERROR_H
#define GPT_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

enum { GPT_OK = 0, GPT_USAGE_ERROR = 2 };

typedef struct gpt_error {
  char text[512]; /* one line without a newline, always terminated */
} gpt_error;

/* Formats the line (cut where it does not fit, control characters replaced) and returns
 * GPT_USAGE_ERROR, so that a check reads `return gpt_fail(error, ...)`. `error` may be NULL. */
int gpt_fail(gpt_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#endif /* GPT_ERROR_H */
