/* SPDX-License-Identifier: MIT */
/*
 * safetensors/json.h - a bounded reader of JSON text (RFC 8259), token by token.
 *
 *   mfsdp__json json;                              // text, nbytes, at = 0, names for messages
 *   MFSDP_TRY(mfsdp__json_key(&json, &key));       // "key":
 *   if (mfsdp__json_is(&json, key, "shape")) MFSDP_TRY(mfsdp__json_whole(&json, &size));
 *   else MFSDP_TRY(mfsdp__json_skip(&json));
 *
 * Private to safetensors.h. Tokens are ranges of the text; mfsdp__json_decode writes a string over
 * its own range, so that it must come after the last look at that range. Nothing recurses.
 * Does not: allocate, or keep what it has read.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_JSON_H
#define MFSDP_SAFETENSORS_JSON_H

#include "fault.h"
#include "utf8.h"

/* How deep values that are skipped may be nested; at most 32, the bits of a mask. */
#define MFSDP__JSON_MAX_DEPTH 32

typedef struct mfsdp__json {
  mfsdp_context *context;
  const char *name; /* the file, for messages */
  const char *unit; /* "header byte" or "byte" */
  char *text;       /* nbytes, no 0 byte behind them */
  size_t nbytes, at;
  mfsdp_safetensors_fault fault; /* the one that a call failed with */
} mfsdp__json;

/* A string without its quotes, as it stands in the text. */
typedef struct mfsdp__json_token {
  size_t first, nbytes;
  int is_escaped;  /* 1: it has a backslash */
  int has_control; /* 1: it holds U+0000 to U+001F or U+007F to U+009F, once decoded */
} mfsdp__json_token;

/* E_FORMAT with the place and the fault's text; `needs` goes behind it ("": nothing). */
MFSDP_API mfsdp_status mfsdp__json_fail(mfsdp__json *json, mfsdp_safetensors_fault fault,
                                        const char *needs) {
  json->fault = fault;
  return MFSDP_FAIL(json->context, MFSDP_E_FORMAT, "%.120s: %s %zu: %s%s%s", json->name, json->unit,
                    json->at, mfsdp_safetensors_fault_text(fault),
                    needs[0] == '\0' ? "" : ": needs ", needs);
}

/* The next byte, or -1 at the end. */
MFSDP_API int mfsdp__json_peek(const mfsdp__json *json) {
  return json->at < json->nbytes ? (unsigned char)json->text[json->at] : -1;
}

MFSDP_API void mfsdp__json_blanks(mfsdp__json *json) {
  for (;;) {
    const int c = mfsdp__json_peek(json);
    if (c != ' ' && c != '\t' && c != '\n' && c != '\r') return;
    ++json->at;
  }
}

/* Takes one character of punctuation with the blanks around it: 1 if it is there. */
MFSDP_API int mfsdp__json_take(mfsdp__json *json, char c) {
  mfsdp__json_blanks(json);
  if (mfsdp__json_peek(json) != c) return 0;
  ++json->at;
  mfsdp__json_blanks(json);
  return 1;
}

/* What stands here is not what is needed: the text ends, or goes a level deeper, or `fault`. */
MFSDP_API mfsdp_status mfsdp__json_refuse(mfsdp__json *json, mfsdp_safetensors_fault fault,
                                          const char *needs) {
  const int c = mfsdp__json_peek(json);
  const int is_flat =
      fault == MFSDP_SAFETENSORS_FAULT_NUMBER || fault == MFSDP_SAFETENSORS_FAULT_NEEDS_STRING;
  if (c < 0) return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_END, needs);
  if (is_flat && (c == '{' || c == '['))
    return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_NESTED, "");
  return mfsdp__json_fail(json, fault, needs);
}

MFSDP_API mfsdp_status mfsdp__json_expect(mfsdp__json *json, char c, const char *needs) {
  if (mfsdp__json_take(json, c)) return MFSDP_OK;
  return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_SYNTAX, needs);
}

/* ---- strings ---- */

/* Four hexadecimal digits at `at`, or -1. */
MFSDP_API int32_t mfsdp__json_hex4(const char *at, size_t nbytes) {
  int32_t value = 0;
  int i;
  if (nbytes < 4) return -1;
  for (i = 0; i < 4; ++i) {
    const char c = at[i];
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

/* The character that a backslash and `c` stand for, or 0. */
MFSDP_API char mfsdp__json_short_escape(char c) {
  switch (c) {
  case '"':
  case '\\':
  case '/': return c;
  case 'b': return '\b';
  case 'f': return '\f';
  case 'n': return '\n';
  case 'r': return '\r';
  case 't': return '\t';
  default: return 0;
  }
}

/* The escape at `at`, whose first byte is a backslash: its code, and its length in *length.
 * On a fault the length is up to the place. */
MFSDP_API mfsdp_safetensors_fault mfsdp__json_escape(const char *at, size_t nbytes, uint32_t *code,
                                                     size_t *length) {
  int32_t high, low;
  *length = 1;
  if (nbytes < 2) return MFSDP_SAFETENSORS_FAULT_END;
  *code = (unsigned char)mfsdp__json_short_escape(at[1]);
  if (*code != 0) {
    *length = 2;
    return MFSDP_SAFETENSORS_FAULT_NONE;
  }
  if (at[1] != 'u') return MFSDP_SAFETENSORS_FAULT_ESCAPE;
  *length = 2;
  high = mfsdp__json_hex4(at + 2, nbytes - 2);
  if (high < 0) return MFSDP_SAFETENSORS_FAULT_HEX;
  if (high == 0) return MFSDP_SAFETENSORS_FAULT_ZERO;
  *code = (uint32_t)high;
  *length = 6;
  if (high < 0xd800 || high > 0xdfff) return MFSDP_SAFETENSORS_FAULT_NONE;
  if (high > 0xdbff || nbytes < 8 || at[6] != '\\' || at[7] != 'u')
    return MFSDP_SAFETENSORS_FAULT_SURROGATE;
  *length = 8;
  low = mfsdp__json_hex4(at + 8, nbytes - 8);
  if (low < 0) return MFSDP_SAFETENSORS_FAULT_HEX;
  if (low < 0xdc00 || low > 0xdfff) return MFSDP_SAFETENSORS_FAULT_SURROGATE;
  *code = 0x10000u + (((uint32_t)high - 0xd800u) << 10) + ((uint32_t)low - 0xdc00u);
  *length = 12;
  return MFSDP_SAFETENSORS_FAULT_NONE;
}

/* One character of a string, escaped or not: moves behind it. */
MFSDP_API mfsdp_status mfsdp__json_character(mfsdp__json *json, mfsdp__json_token *token) {
  const char *at = json->text + json->at;
  const size_t left = json->nbytes - json->at;
  mfsdp_safetensors_fault fault = MFSDP_SAFETENSORS_FAULT_NONE;
  uint32_t code = (unsigned char)*at;
  size_t length = 1;
  if (code < 0x20) return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_CONTROL, "");
  if (code == '\\') {
    token->is_escaped = 1;
    fault = mfsdp__json_escape(at, left, &code, &length);
  } else if (code >= 0x80) {
    length = mfsdp__utf8_read(at, left, &code);
    if (length == 0) return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_UTF8, "");
  }
  json->at += length;
  if (fault != MFSDP_SAFETENSORS_FAULT_NONE) return mfsdp__json_fail(json, fault, "");
  if (mfsdp__utf8_is_control(code)) token->has_control = 1;
  return MFSDP_OK;
}

/* A string with the blanks around it. */
MFSDP_API mfsdp_status mfsdp__json_string(mfsdp__json *json, mfsdp__json_token *token) {
  memset(token, 0, sizeof(*token));
  mfsdp__json_blanks(json);
  if (mfsdp__json_peek(json) != '"')
    return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_NEEDS_STRING, "");
  token->first = ++json->at;
  while (mfsdp__json_peek(json) != '"') {
    if (json->at >= json->nbytes)
      return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_END, "\" behind a string");
    MFSDP_TRY(mfsdp__json_character(json, token));
  }
  token->nbytes = json->at - token->first;
  ++json->at;
  mfsdp__json_blanks(json);
  return MFSDP_OK;
}

/* The bytes of a checked string, decoded, at dst, which may be where they come from: a decoded
 * string is never longer. Returns their count. */
MFSDP_API size_t mfsdp__json_unescape(const char *from, size_t nbytes, char *dst) {
  size_t at = 0, used = 0, length;
  uint32_t code = 0;
  while (at < nbytes) {
    if (from[at] != '\\') {
      dst[used++] = from[at++];
      continue;
    }
    (void)mfsdp__json_escape(from + at, nbytes - at, &code, &length);
    at += length;
    used += mfsdp__utf8_write(code, dst + used);
  }
  return used;
}

/* Decodes a string in place; its 0 byte lands on the closing quote or before it. */
MFSDP_API char *mfsdp__json_decode(mfsdp__json *json, mfsdp__json_token token) {
  char *const text = json->text + token.first;
  text[token.is_escaped ? mfsdp__json_unescape(text, token.nbytes, text) : token.nbytes] = '\0';
  return text;
}

/* 1 if the string, decoded, is `word`, which has at most 16 bytes. */
MFSDP_API int mfsdp__json_is(const mfsdp__json *json, mfsdp__json_token token, const char *word) {
  char decoded[6 * 16]; /* no escape has more than 6 bytes for each that it stands for */
  const char *text = json->text + token.first;
  size_t nbytes = token.nbytes;
  const size_t length = strlen(word);
  if (token.is_escaped) {
    if (nbytes > sizeof(decoded)) return 0;
    nbytes = mfsdp__json_unescape(text, nbytes, decoded);
    text = decoded;
  }
  return nbytes == length && memcmp(text, word, length) == 0;
}

/* A string and a colon. */
MFSDP_API mfsdp_status mfsdp__json_key(mfsdp__json *json, mfsdp__json_token *token) {
  MFSDP_TRY(mfsdp__json_string(json, token));
  return mfsdp__json_expect(json, ':', ": behind a name");
}

/* ---- numbers ---- */

/* Digits, at least one, the first no 0 if there are more; 0 to 2^63 - 1. */
MFSDP_API mfsdp_status mfsdp__json_digits(mfsdp__json *json, int64_t *out) {
  int c = mfsdp__json_peek(json);
  const int first = c;
  const size_t start = json->at;
  int64_t value = 0;
  if (c == '-') return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_NEGATIVE, "");
  if (c < '0' || c > '9') return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_NUMBER, "");
  for (; c >= '0' && c <= '9'; c = mfsdp__json_peek(json)) {
    if (first == '0' && json->at > start)
      return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_LEADING_ZERO, "");
    if (!mfsdp_i64_mul(value, 10, &value) || !mfsdp_i64_add(value, c - '0', &value))
      return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_NUMBER_LARGE, "");
    ++json->at;
  }
  *out = value;
  return MFSDP_OK;
}

/* A whole number without fraction or exponent, with the blanks around it. */
MFSDP_API mfsdp_status mfsdp__json_whole(mfsdp__json *json, int64_t *out) {
  int c;
  mfsdp__json_blanks(json);
  MFSDP_TRY(mfsdp__json_digits(json, out));
  c = mfsdp__json_peek(json);
  if (c == '.' || c == 'e' || c == 'E')
    return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_NUMBER, "");
  mfsdp__json_blanks(json);
  return MFSDP_OK;
}

/* [a, b, ...] of at most `room` whole numbers; one more is `too_many`. */
MFSDP_API mfsdp_status mfsdp__json_list(mfsdp__json *json, int64_t *out, int32_t room,
                                        mfsdp_safetensors_fault too_many, int32_t *count) {
  *count = 0;
  if (!mfsdp__json_take(json, '['))
    return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_NEEDS_LIST, "");
  if (mfsdp__json_take(json, ']')) return MFSDP_OK;
  do {
    if (*count == room) return mfsdp__json_fail(json, too_many, "");
    MFSDP_TRY(mfsdp__json_whole(json, &out[*count]));
    ++*count;
  } while (mfsdp__json_take(json, ','));
  return mfsdp__json_expect(json, ']', ", or ] in a list");
}

/* ---- values that nobody asked for ---- */

MFSDP_API mfsdp_status mfsdp__json_skip_digits(mfsdp__json *json) {
  const size_t start = json->at;
  while (mfsdp__json_peek(json) >= '0' && mfsdp__json_peek(json) <= '9')
    ++json->at;
  if (json->at > start) return MFSDP_OK;
  return mfsdp__json_refuse(json, MFSDP_SAFETENSORS_FAULT_SYNTAX, "a digit");
}

MFSDP_API mfsdp_status mfsdp__json_skip_number(mfsdp__json *json) {
  if (mfsdp__json_peek(json) == '-') ++json->at;
  if (mfsdp__json_peek(json) == '0')
    ++json->at; /* a digit behind it is out of place, as the caller will say */
  else
    MFSDP_TRY(mfsdp__json_skip_digits(json));
  if (mfsdp__json_peek(json) == '.') {
    ++json->at;
    MFSDP_TRY(mfsdp__json_skip_digits(json));
  }
  if (mfsdp__json_peek(json) == 'e' || mfsdp__json_peek(json) == 'E') {
    ++json->at;
    if (mfsdp__json_peek(json) == '+' || mfsdp__json_peek(json) == '-') ++json->at;
    MFSDP_TRY(mfsdp__json_skip_digits(json));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__json_skip_word(mfsdp__json *json, const char *word) {
  const size_t length = strlen(word);
  if (json->nbytes - json->at < length || memcmp(json->text + json->at, word, length) != 0)
    return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_SYNTAX, "a value");
  json->at += length;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__json_skip_scalar(mfsdp__json *json) {
  mfsdp__json_token token;
  switch (mfsdp__json_peek(json)) {
  case '"': return mfsdp__json_string(json, &token);
  case 't': return mfsdp__json_skip_word(json, "true");
  case 'f': return mfsdp__json_skip_word(json, "false");
  case 'n': return mfsdp__json_skip_word(json, "null");
  default: return mfsdp__json_skip_number(json);
  }
}

/* Any value with the blanks around it, at most MFSDP__JSON_MAX_DEPTH deep. */
MFSDP_API mfsdp_status mfsdp__json_skip(mfsdp__json *json) {
  uint32_t objects = 0; /* bit d: level d is an object, not a list */
  int depth = 0;
  mfsdp__json_token key;
  mfsdp__json_blanks(json);
  do { /* in front of a value */
    const int is_object = mfsdp__json_peek(json) == '{';
    int is_open = 0;
    if (is_object || mfsdp__json_peek(json) == '[') {
      if (depth == MFSDP__JSON_MAX_DEPTH)
        return mfsdp__json_fail(json, MFSDP_SAFETENSORS_FAULT_NESTED, "");
      (void)mfsdp__json_take(json, is_object ? '{' : '[');
      objects = is_object ? objects | 1u << depth : objects & ~(1u << depth);
      ++depth;
      is_open = mfsdp__json_peek(json) != (is_object ? '}' : ']');
      if (is_open && is_object) MFSDP_TRY(mfsdp__json_key(json, &key));
    } else {
      MFSDP_TRY(mfsdp__json_skip_scalar(json));
    }
    while (!is_open && depth > 0) { /* behind a value */
      const int in_object = (int)(objects >> (depth - 1) & 1u);
      if (mfsdp__json_take(json, ',')) {
        is_open = 1;
        if (in_object) MFSDP_TRY(mfsdp__json_key(json, &key));
      } else {
        MFSDP_TRY(mfsdp__json_expect(json, in_object ? '}' : ']', in_object ? ", or }" : ", or ]"));
        --depth;
      }
    }
  } while (depth > 0);
  mfsdp__json_blanks(json);
  return MFSDP_OK;
}

#endif /* MFSDP_SAFETENSORS_JSON_H */
