/* SPDX-License-Identifier: MIT */
#include "safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Bytes of an element of each dtype that the format knows. */
static const struct {
  const char *name;
  int64_t nbytes;
} dtypes[] = {{"F32", 4},     {"BF16", 2}, {"F16", 2}, {"F64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
              {"F8_E8M0", 1}, {"I64", 8},  {"I32", 4}, {"I16", 2}, {"I8", 1},      {"U64", 8},
              {"U32", 4},     {"U16", 2},  {"U8", 1},  {"BOOL", 1}};

typedef struct parser {
  const char *path, *at, *end, *start;
  char *names; /* room for every decoded string: never more than the header itself */
  size_t names_used;
  plan_tensors *out;
  plan_error *error;
} parser;

static int bad(const parser *p, const char *what) {
  return plan_fail(p->error, "%s: header byte %zu: %s", p->path, (size_t)(p->at - p->start), what);
}

static void blanks(parser *p) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r'))
    ++p->at;
}

/* Takes one character of punctuation with blanks around it: 1 if it is there. */
static int take(parser *p, char c) {
  blanks(p);
  if (p->at >= p->end || *p->at != c) return 0;
  ++p->at;
  blanks(p);
  return 1;
}

/* ---- strings ---- */

static int hex4(parser *p, uint32_t *out) {
  *out = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = p->at < p->end ? *p->at : '\0';
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return bad(p, "\\u needs four hexadecimal digits");
    *out = *out * 16 + (uint32_t)digit;
    ++p->at;
  }
  return PLAN_OK;
}

static void put(parser *p, uint32_t byte) {
  p->names[p->names_used++] = (char)(unsigned char)byte;
}

static void put_utf8(parser *p, uint32_t code) {
  if (code < 0x80) {
    put(p, code);
  } else if (code < 0x800) {
    put(p, 0xc0 | code >> 6);
    put(p, 0x80 | (code & 63));
  } else if (code < 0x10000) {
    put(p, 0xe0 | code >> 12);
    put(p, 0x80 | (code >> 6 & 63));
    put(p, 0x80 | (code & 63));
  } else {
    put(p, 0xf0 | code >> 18);
    put(p, 0x80 | (code >> 12 & 63));
    put(p, 0x80 | (code >> 6 & 63));
    put(p, 0x80 | (code & 63));
  }
}

/* Behind a backslash. */
static int escape(parser *p, int *has_control) {
  static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
  const char c = p->at < p->end ? *p->at++ : '\0';
  const char *found = c ? strchr(from, c) : NULL;
  uint32_t code, low;
  if (found) {
    if ((unsigned char)to[found - from] < 0x20) *has_control = 1;
    put(p, (unsigned char)to[found - from]);
    return PLAN_OK;
  }
  if (c != 'u') return bad(p, "unknown escape in a string");
  if (hex4(p, &code) != PLAN_OK) return PLAN_USAGE_ERROR;
  if (code >= 0xd800 && code < 0xdc00) {
    if (p->end - p->at < 2 || p->at[0] != '\\' || p->at[1] != 'u')
      return bad(p, "half of a surrogate pair");
    p->at += 2;
    if (hex4(p, &low) != PLAN_OK) return PLAN_USAGE_ERROR;
    if (low < 0xdc00 || low > 0xdfff) return bad(p, "half of a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  } else if (code >= 0xdc00 && code < 0xe000) {
    return bad(p, "half of a surrogate pair");
  }
  if (code < 0x20 || code == 0x7f) *has_control = 1;
  if (code == 0) return bad(p, "a 0 character in a string");
  put_utf8(p, code);
  return PLAN_OK;
}

/* One UTF-8 character of more than a byte: its length, or 0 if it is none. */
static int utf8_length(const char *at, const char *end) {
  const unsigned char *u = (const unsigned char *)at;
  const int length = u[0] >= 0xf0 ? 4 : u[0] >= 0xe0 ? 3 : 2;
  if (u[0] < 0xc2 || u[0] > 0xf4 || end - at < length) return 0;
  for (int i = 1; i < length; ++i)
    if ((u[i] & 0xc0) != 0x80) return 0;
  if ((u[0] == 0xe0 && u[1] < 0xa0) || (u[0] == 0xed && u[1] > 0x9f) ||
      (u[0] == 0xf0 && u[1] < 0x90) || (u[0] == 0xf4 && u[1] > 0x8f))
    return 0;
  return length;
}

/* A decoded string with a 0 byte behind it, in p->names. */
static int string(parser *p, const char **out, int allow_control) {
  const size_t start = p->names_used;
  int has_control = 0;
  blanks(p);
  if (p->at >= p->end || *p->at != '"') return bad(p, "needs a string");
  ++p->at;
  while (p->at < p->end && *p->at != '"') {
    const unsigned char c = (unsigned char)*p->at;
    if (c < 0x20) return bad(p, "a control character in a string");
    if (c == '\\') {
      ++p->at;
      if (escape(p, &has_control) != PLAN_OK) return PLAN_USAGE_ERROR;
      continue;
    }
    const int length = c < 0x80 ? 1 : utf8_length(p->at, p->end);
    if (length == 0) return bad(p, "a string that is not UTF-8");
    for (int i = 0; i < length; ++i)
      put(p, (unsigned char)*p->at++);
  }
  if (p->at >= p->end) return bad(p, "a string without an end");
  ++p->at;
  blanks(p);
  if (has_control && !allow_control) return bad(p, "a control character in a name");
  put(p, 0);
  *out = p->names + start;
  return PLAN_OK;
}

/* ---- values ---- */

static int number(parser *p, int64_t *out) {
  int64_t value = 0;
  blanks(p);
  if (p->at < p->end && *p->at == '-') return bad(p, "a negative size");
  if (p->at >= p->end || *p->at < '0' || *p->at > '9') return bad(p, "needs a whole number");
  if (*p->at == '0' && p->at + 1 < p->end && p->at[1] >= '0' && p->at[1] <= '9')
    return bad(p, "a number with a leading 0");
  for (; p->at < p->end && *p->at >= '0' && *p->at <= '9'; ++p->at)
    if (!mfsdp_i64_mul(value, 10, &value) || !mfsdp_i64_add(value, *p->at - '0', &value))
      return bad(p, "a number past 63 bits");
  if (p->at < p->end && (*p->at == '.' || *p->at == 'e' || *p->at == 'E'))
    return bad(p, "needs a whole number");
  blanks(p);
  *out = value;
  return PLAN_OK;
}

/* [a, b, ...] of at most `room` numbers. */
static int numbers(parser *p, int64_t *out, int32_t room, int32_t *count) {
  *count = 0;
  if (!take(p, '[')) return bad(p, "needs a list of numbers");
  if (take(p, ']')) return PLAN_OK;
  do {
    if (*count == room) return bad(p, "a list with too many numbers");
    if (number(p, &out[(*count)++]) != PLAN_OK) return PLAN_USAGE_ERROR;
  } while (take(p, ','));
  return take(p, ']') ? PLAN_OK : bad(p, "needs , or ] in a list");
}

static int metadata(parser *p) {
  const char *text;
  if (!take(p, '{')) return bad(p, "__metadata__ needs an object");
  if (take(p, '}')) return PLAN_OK;
  do {
    if (string(p, &text, 1) != PLAN_OK) return PLAN_USAGE_ERROR;
    if (!take(p, ':')) return bad(p, "needs : after a key");
    if (string(p, &text, 1) != PLAN_OK) return PLAN_USAGE_ERROR;
  } while (take(p, ','));
  return take(p, '}') ? PLAN_OK : bad(p, "needs , or } in __metadata__");
}

/* ---- tensors ---- */

static int fail_tensor(const parser *p, const plan_tensor *t, const char *what) {
  return plan_fail(p->error, "%s: tensor '%.200s' %s", p->path, t->name, what);
}

static int dtype(parser *p, plan_tensor *t, int64_t *element_nbytes) {
  const char *name;
  if (string(p, &name, 0) != PLAN_OK) return PLAN_USAGE_ERROR;
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; ++i)
    if (strcmp(dtypes[i].name, name) == 0) {
      t->dtype = dtypes[i].name;
      *element_nbytes = dtypes[i].nbytes;
      return PLAN_OK;
    }
  return plan_fail(p->error, "%s: tensor '%.200s' has unknown dtype '%.40s'", p->path, t->name,
                   name);
}

/* The three members, each once, in any order. */
static int members(parser *p, plan_tensor *t, int64_t *element_nbytes) {
  int64_t offsets[2] = {0, 0};
  int seen[3] = {0, 0, 0};
  int32_t count;
  if (!take(p, '{')) return fail_tensor(p, t, "needs an object");
  do {
    const char *key;
    int which;
    if (string(p, &key, 0) != PLAN_OK) return PLAN_USAGE_ERROR;
    if (!take(p, ':')) return bad(p, "needs : after a key");
    which = strcmp(key, "dtype") == 0 ? 0 : strcmp(key, "shape") == 0 ? 1 : 2;
    if (which == 2 && strcmp(key, "data_offsets") != 0)
      return fail_tensor(p, t, "has a member other than dtype, shape and data_offsets");
    if (seen[which]++) return fail_tensor(p, t, "has a member twice");
    if (which == 0 && dtype(p, t, element_nbytes) != PLAN_OK) return PLAN_USAGE_ERROR;
    if (which == 1 && numbers(p, t->shape, MFSDP_MAX_NDIM, &t->ndim) != PLAN_OK)
      return PLAN_USAGE_ERROR;
    if (which == 2) {
      if (numbers(p, offsets, 2, &count) != PLAN_OK) return PLAN_USAGE_ERROR;
      if (count != 2) return fail_tensor(p, t, "needs two data_offsets");
    }
  } while (take(p, ','));
  if (!take(p, '}')) return bad(p, "needs , or } in a tensor");
  if (!seen[0] || !seen[1] || !seen[2])
    return fail_tensor(p, t, "needs dtype, shape and data_offsets");
  t->begin = offsets[0];
  t->end = offsets[1];
  return PLAN_OK;
}

static int check_sizes(const parser *p, const plan_tensor *t, int64_t element_nbytes,
                       int64_t data_nbytes) {
  int64_t nbytes = element_nbytes;
  int empty = 0, overflow = 0;
  for (int32_t d = 0; d < t->ndim; ++d) {
    empty |= t->shape[d] == 0;
    if (!overflow && !mfsdp_i64_mul(nbytes, t->shape[d], &nbytes)) overflow = 1;
  }
  if (empty)
    nbytes = 0;
  else if (overflow)
    return fail_tensor(p, t, "has a shape whose size passes 63 bits");
  if (t->begin > t->end) return fail_tensor(p, t, "ends before it begins");
  if (t->end - t->begin != nbytes)
    return plan_fail(p->error, "%s: tensor '%.200s' has %lld bytes of data, its shape needs %lld",
                     p->path, t->name, (long long)(t->end - t->begin), (long long)nbytes);
  if (t->end > data_nbytes)
    return plan_fail(p->error,
                     "%s: tensor '%.200s' ends at data byte %lld, the file has %lld: truncated?",
                     p->path, t->name, (long long)t->end, (long long)data_nbytes);
  return PLAN_OK;
}

static int add(parser *p, const plan_tensor *t) {
  plan_tensors *out = p->out;
  if (out->count == PLAN_MOST_PARAMS)
    return plan_fail(p->error, "%s: more than %d tensors", p->path, PLAN_MOST_PARAMS);
  if (out->count == out->capacity) {
    const int32_t capacity = out->capacity ? 2 * out->capacity : 256;
    plan_tensor *list = (plan_tensor *)realloc(out->list, (size_t)capacity * sizeof *list);
    if (!list) return plan_fail(p->error, "%s: no memory for %d tensors", p->path, (int)capacity);
    out->list = list;
    out->capacity = capacity;
  }
  out->list[out->count++] = *t;
  return PLAN_OK;
}

static int by_name(const void *a, const void *b) {
  return strcmp((*(const plan_tensor *const *)a)->name, (*(const plan_tensor *const *)b)->name);
}

static int by_place(const void *a, const void *b) {
  const plan_tensor *x = *(const plan_tensor *const *)a, *y = *(const plan_tensor *const *)b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}

/* Names are distinct; the data is covered without holes and overlaps. */
static int check_together(parser *p, int64_t data_nbytes) {
  const size_t count = (size_t)p->out->count;
  int64_t covered = 0;
  int status = PLAN_OK;
  const plan_tensor **order = (const plan_tensor **)malloc((count + 1) * sizeof *order);
  if (!order) return plan_fail(p->error, "%s: no memory", p->path);
  for (size_t i = 0; i < count; ++i)
    order[i] = &p->out->list[i];
  qsort((void *)order, count, sizeof *order, by_name);
  for (size_t i = 1; i < count && status == PLAN_OK; ++i)
    if (strcmp(order[i]->name, order[i - 1]->name) == 0)
      status = fail_tensor(p, order[i], "is there twice");
  qsort((void *)order, count, sizeof *order, by_place);
  for (size_t i = 0; i < count && status == PLAN_OK; ++i) {
    if (order[i]->begin != covered)
      status = fail_tensor(
          p, order[i], order[i]->begin < covered ? "overlaps another" : "leaves a hole before it");
    covered = order[i]->end;
  }
  if (status == PLAN_OK && covered != data_nbytes)
    status = plan_fail(p->error, "%s: %lld bytes of data belong to no tensor", p->path,
                       (long long)(data_nbytes - covered));
  free((void *)order);
  return status;
}

static int object(parser *p, int64_t data_nbytes) {
  int has_metadata = 0;
  if (!take(p, '{')) return bad(p, "needs a JSON object");
  if (!take(p, '}')) {
    do {
      int64_t element_nbytes = 0;
      plan_tensor t;
      memset(&t, 0, sizeof t);
      if (string(p, &t.name, 0) != PLAN_OK) return PLAN_USAGE_ERROR;
      if (!take(p, ':')) return bad(p, "needs : after a name");
      if (strcmp(t.name, "__metadata__") == 0) {
        if (has_metadata++) return bad(p, "__metadata__ is there twice");
        if (metadata(p) != PLAN_OK) return PLAN_USAGE_ERROR;
        continue;
      }
      if (!*t.name) return bad(p, "a tensor without a name");
      if (members(p, &t, &element_nbytes) != PLAN_OK ||
          check_sizes(p, &t, element_nbytes, data_nbytes) != PLAN_OK || add(p, &t) != PLAN_OK)
        return PLAN_USAGE_ERROR;
    } while (take(p, ','));
    if (!take(p, '}')) return bad(p, "needs , or } after a tensor");
  }
  if (p->at != p->end) return bad(p, "bytes behind the JSON object");
  return check_together(p, data_nbytes);
}

int plan_safetensors_parse(const char *path, const char *header, size_t nbytes, int64_t data_nbytes,
                           plan_tensors *out, plan_error *error) {
  parser p;
  memset(out, 0, sizeof *out);
  memset(&p, 0, sizeof p);
  p.path = path;
  p.at = p.start = header;
  p.end = header + nbytes;
  p.out = out;
  p.error = error;
  /* A decoded string and its 0 byte are never longer than the string with its quotes. */
  p.names = out->names = (char *)malloc(nbytes + 1);
  if (!p.names) return plan_fail(error, "%s: no memory for %zu bytes of names", path, nbytes);
  if (object(&p, data_nbytes) == PLAN_OK) return PLAN_OK;
  plan_tensors_free(out);
  return PLAN_USAGE_ERROR;
}

/* ---- files ---- */

static int read_header(FILE *f, const char *path, plan_tensors *out, plan_error *error) {
  struct stat info;
  unsigned char prefix[8];
  uint64_t length = 0;
  char *header;
  int status;
  if (fstat(fileno(f), &info) != 0 || !S_ISREG(info.st_mode))
    return plan_fail(error, "%s is not a regular file", path);
  if (fread(prefix, 1, sizeof prefix, f) != sizeof prefix)
    return plan_fail(error, "%s is truncated: it has fewer than 8 bytes", path);
  for (int i = 7; i >= 0; --i)
    length = length << 8 | prefix[i];
  if (length > PLAN_SAFETENSORS_MOST_NBYTES)
    return plan_fail(error, "%s: the header says it has %llu bytes, at most %d are allowed", path,
                     (unsigned long long)length, PLAN_SAFETENSORS_MOST_NBYTES);
  if ((int64_t)length > (int64_t)info.st_size - 8)
    return plan_fail(error, "%s is truncated: the header has %llu bytes, the file %lld", path,
                     (unsigned long long)length, (long long)info.st_size - 8);
  header = (char *)malloc((size_t)length + 1);
  if (!header) return plan_fail(error, "%s: no memory for the header", path);
  if (fread(header, 1, (size_t)length, f) != length)
    status = plan_fail(error, "cannot read the header of %s", path);
  else
    status = plan_safetensors_parse(path, header, (size_t)length,
                                    (int64_t)info.st_size - 8 - (int64_t)length, out, error);
  free(header);
  return status;
}

int plan_safetensors_read(const char *path, plan_tensors *out, plan_error *error) {
  int status;
  FILE *f = fopen(path, "rb");
  memset(out, 0, sizeof *out);
  if (!f) return plan_fail(error, "cannot read %s: %s", path, strerror(errno));
  status = read_header(f, path, out, error);
  fclose(f);
  return status;
}

void plan_tensors_free(plan_tensors *tensors) {
  free(tensors->list);
  free(tensors->names);
  memset(tensors, 0, sizeof *tensors);
}
