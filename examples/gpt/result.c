/* SPDX-License-Identifier: MIT */
#include "result.h"

#include "file.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* X(kind, path, place in gpt_result): the keys in the order they are written in. */
#define RESULT_KEYS(X)                                         \
  X(INTEGER, "steps", steps)                                   \
  X(INTEGER, "ranks", ranks)                                   \
  X(REAL, "train_loss", train_loss)                            \
  X(REAL, "val_loss", val_loss)                                \
  X(TEXT, "params_hash", params_hash)                          \
  X(REAL, "tokens_per_s", tokens_per_s)                        \
  X(REAL, "opt_step_ms", opt_step_ms)                          \
  X(INTEGER, "bytes.materialize", bytes.materialize)           \
  X(INTEGER, "bytes.reduce", bytes.reduce)                     \
  X(INTEGER, "bytes.optimizer_matrix", bytes.optimizer_matrix) \
  X(INTEGER, "bytes.scalar", bytes.scalar)                     \
  X(RANKS, "resident_bytes", resident_bytes)                   \
  X(INTEGER, "slot_bytes", slot_bytes)                         \
  X(INTEGER, "skipped_steps", skipped_steps)                   \
  X(INTEGER, "ns_calls", ns_calls)                             \
  X(TEXT, "strategy", strategy)

typedef enum key_kind { INTEGER, REAL, TEXT, RANKS } key_kind;

typedef struct key {
  key_kind kind;
  const char *path; /* "a" or "a.b" for {"a": {"b": ...}}; the parts of one object are adjacent */
  size_t offset;
} key;

static const key keys[] = {
#define ROW(kind, path, place) {kind, path, offsetof(gpt_result, place)},
    RESULT_KEYS(ROW)
#undef ROW
};
enum { KEY_COUNT = sizeof keys / sizeof keys[0] };

/* ---- writing ---- */

static void write_real(FILE *out, double value) {
  if (isfinite(value))
    fprintf(out, "%.9g", value);
  else
    fputs("null", out); /* JSON has no nan */
}

static void write_value(FILE *out, const key *k, const gpt_result *result) {
  const void *place = (const char *)result + k->offset;
  switch (k->kind) {
  case INTEGER: fprintf(out, "%" PRId64, *(const int64_t *)place); break;
  case REAL: write_real(out, *(const double *)place); break;
  case TEXT: fprintf(out, "\"%s\"", (const char *)place); break;
  case RANKS:
    for (int64_t i = 0; i < result->ranks; ++i)
      fprintf(out, "%s%" PRId64, i == 0 ? "[" : ",", ((const int64_t *)place)[i]);
    fputc(']', out);
    break;
  }
}

/* Length of the "a" of "a.b"; 0 for a plain key. */
static size_t object_length(const char *path) {
  const char *dot = strchr(path, '.');
  return dot ? (size_t)(dot - path) : 0;
}

static int same_object(const char *a, const char *b) {
  const size_t length = object_length(a);
  return length == object_length(b) && strncmp(a, b, length) == 0;
}

int gpt_result_write(FILE *out, const gpt_result *result, gpt_error *error) {
  const char *before = ""; /* path of the key written last */
  fputc('{', out);
  for (int i = 0; i < KEY_COUNT; ++i) {
    const char *path = keys[i].path;
    const size_t length = object_length(path);
    const int opens = length > 0 && !same_object(path, before);
    if (object_length(before) > 0 && !same_object(path, before)) fputc('}', out);
    if (i > 0) fputc(',', out);
    if (opens) fprintf(out, "\"%.*s\":{", (int)length, path);
    fprintf(out, "\"%s\":", length > 0 ? path + length + 1 : path);
    write_value(out, &keys[i], result);
    before = path;
  }
  fputs(object_length(before) > 0 ? "}}\n" : "}\n", out);
  if (fflush(out) != 0 || ferror(out)) return gpt_fail(error, "cannot write the result line");
  return GPT_OK;
}

/* ---- reading: a strict scanner for one line ---- */

typedef struct scanner {
  const char *at;
  const char *file;
  gpt_result *result;
  uint8_t seen[KEY_COUNT];
  int64_t resident_count;
  gpt_error *error;
} scanner;

static int scan_value(scanner *s, const char *path, int depth);

static int bad(scanner *s, const char *path, const char *what) {
  return gpt_fail(s->error, "%s: \"%s\" %s; give the output of a finished training run", s->file,
                  path, what);
}

static void skip_blanks(scanner *s) {
  while (*s->at == ' ' || *s->at == '\t' || *s->at == '\r')
    ++s->at;
}

static int accept(scanner *s, char c) {
  skip_blanks(s);
  if (*s->at != c) return 0;
  ++s->at;
  return 1;
}

/* A string without escapes, which no key or value of ours needs. */
static int scan_string(scanner *s, char *text, size_t capacity) {
  size_t length;
  if (!accept(s, '"')) return 0;
  length = strcspn(s->at, "\"\\");
  if (s->at[length] != '"' || length >= capacity) return 0;
  memcpy(text, s->at, length);
  text[length] = '\0';
  s->at += length + 1;
  return 1;
}

static int scan_real(scanner *s, double *out) {
  char *end = NULL;
  skip_blanks(s);
  if (strncmp(s->at, "null", 4) == 0) {
    s->at += 4;
    *out = NAN;
    return 1;
  }
  if (*s->at != '-' && (*s->at < '0' || *s->at > '9')) return 0;
  *out = strtod(s->at, &end);
  s->at = end;
  return 1;
}

static int scan_integer(scanner *s, int64_t *out) {
  char *end = NULL;
  skip_blanks(s);
  if (*s->at < '0' || *s->at > '9') return 0; /* nothing here is negative */
  errno = 0;
  *out = strtoll(s->at, &end, 10);
  s->at = end;
  return errno == 0 && *end != '.' && *end != 'e' && *end != 'E';
}

static int scan_ranks(scanner *s, int64_t *out) {
  if (!accept(s, '[')) return 0;
  s->resident_count = 0;
  if (accept(s, ']')) return 1;
  do {
    if (s->resident_count == GPT_RESULT_MAX_RANKS || !scan_integer(s, &out[s->resident_count]))
      return 0;
    ++s->resident_count;
  } while (accept(s, ','));
  return accept(s, ']');
}

static int scan_known(scanner *s, const key *k) {
  void *place = (char *)s->result + k->offset;
  switch (k->kind) {
  case INTEGER: return scan_integer(s, (int64_t *)place);
  case REAL: return scan_real(s, (double *)place);
  case TEXT: return scan_string(s, (char *)place, GPT_RESULT_TEXT_NBYTES);
  case RANKS: return scan_ranks(s, (int64_t *)place);
  }
  return 0;
}

/* Members up to the closing brace; prefix is "" or "a." */
static int scan_members(scanner *s, const char *prefix, int depth) {
  char name[64], path[136];
  if (accept(s, '}')) return GPT_OK;
  do {
    int status;
    if (!scan_string(s, name, sizeof name) || !accept(s, ':'))
      return bad(s, *prefix ? prefix : "line", "is not a JSON object");
    snprintf(path, sizeof path, "%s%s", prefix, name);
    if ((status = scan_value(s, path, depth)) != GPT_OK) return status;
  } while (accept(s, ','));
  return accept(s, '}') ? GPT_OK : bad(s, path, "is not followed by , or }");
}

static int scan_unknown_array(scanner *s, const char *path, int depth) {
  int status;
  if (accept(s, ']')) return GPT_OK;
  do {
    if ((status = scan_value(s, path, depth)) != GPT_OK) return status;
  } while (accept(s, ','));
  return accept(s, ']') ? GPT_OK : bad(s, path, "is an unfinished list");
}

static int scan_unknown(scanner *s, const char *path, int depth) {
  char text[512], prefix[66];
  double number;
  if (depth > 8) return bad(s, path, "is nested too deeply");
  if (accept(s, '{')) {
    snprintf(prefix, sizeof prefix, "%.64s.", path);
    return scan_members(s, prefix, depth + 1);
  }
  /* "?" is no key of ours, so what stands inside a list is never taken for one. */
  if (accept(s, '[')) return scan_unknown_array(s, "?", depth + 1);
  if (*s->at == '"') return scan_string(s, text, sizeof text) ? GPT_OK : bad(s, path, "is no text");
  for (int i = 0; i < 2; ++i) {
    const char *word = i == 0 ? "true" : "false";
    if (strncmp(s->at, word, strlen(word)) != 0) continue;
    s->at += strlen(word);
    return GPT_OK;
  }
  return scan_real(s, &number) ? GPT_OK : bad(s, path, "has no value");
}

static int scan_value(scanner *s, const char *path, int depth) {
  for (int i = 0; i < KEY_COUNT; ++i) {
    if (strcmp(keys[i].path, path) != 0) continue;
    if (s->seen[i]) return bad(s, path, "comes twice");
    s->seen[i] = 1;
    return scan_known(s, &keys[i]) ? GPT_OK : bad(s, path, "has a value of the wrong type");
  }
  return scan_unknown(s, path, depth);
}

static int scan_line(scanner *s) {
  int status;
  if (!accept(s, '{')) return bad(s, "last line", "is not a JSON object");
  if ((status = scan_members(s, "", 0)) != GPT_OK) return status;
  skip_blanks(s);
  if (*s->at != '\0') return bad(s, "last line", "goes on after the JSON object");
  for (int i = 0; i < KEY_COUNT; ++i)
    if (!s->seen[i]) return bad(s, keys[i].path, "is missing");
  if (s->resident_count != s->result->ranks)
    return bad(s, "resident_bytes", "does not have one entry per rank");
  return GPT_OK;
}

int gpt_result_read(const char *path, gpt_result *result, gpt_error *error) {
  scanner s;
  uint8_t *bytes;
  char *text, *line;
  int64_t end;
  int status;
  memset(result, 0, sizeof *result);
  memset(&s, 0, sizeof s);
  if (gpt_file_read(path, INT64_C(1) << 30, &bytes, &end, error) != GPT_OK) return GPT_USAGE_ERROR;
  text = (char *)bytes;
  while (end > 0 && (text[end - 1] == '\n' || text[end - 1] == '\r' || text[end - 1] == ' '))
    --end;
  text[end] = '\0';
  line = strrchr(text, '\n');
  s.at = line ? line + 1 : text;
  s.file = path;
  s.result = result;
  s.error = error;
  status = scan_line(&s);
  free(bytes);
  return status;
}
