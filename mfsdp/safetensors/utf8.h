/* SPDX-License-Identifier: MIT */
/*
 * safetensors/utf8.h - UTF-8 (RFC 3629), one character at a time.
 *
 *   uint32_t code;
 *   size_t length = mfsdp__utf8_read(text, nbytes, &code);       // 0: not UTF-8
 *
 * Private to safetensors.h.
 * Does not: normalize.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_UTF8_H
#define MFSDP_SAFETENSORS_UTF8_H

#include "../types.h"

/* The character at `at`: its length and code; 0 if it is cut, overlong, a surrogate or too large.
 * nbytes > 0. */
MFSDP_API size_t mfsdp__utf8_read(const char *at, size_t nbytes, uint32_t *code) {
  const unsigned char *u = (const unsigned char *)at;
  const size_t length = u[0] < 0x80 ? 1 : u[0] < 0xe0 ? 2 : u[0] < 0xf0 ? 3 : 4;
  uint32_t value = u[0];
  size_t i;
  if ((u[0] >= 0x80 && u[0] < 0xc2) || u[0] > 0xf4 || nbytes < length) return 0;
  if (length > 1) value &= 0x7fu >> length;
  for (i = 1; i < length; ++i) {
    if ((u[i] & 0xc0u) != 0x80u) return 0;
    value = value << 6 | (u[i] & 0x3fu);
  }
  if ((length == 3 && value < 0x800) || (length == 4 && (value < 0x10000 || value > 0x10ffff)) ||
      (value >= 0xd800 && value <= 0xdfff))
    return 0;
  *code = value;
  return length;
}

/* Writes a character of at most 0x10ffff: its length, 1 to 4. */
MFSDP_API size_t mfsdp__utf8_write(uint32_t code, char *dst) {
  const size_t length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  size_t i;
  if (length == 1) {
    dst[0] = (char)code;
    return 1;
  }
  for (i = length - 1; i > 0; --i, code >>= 6)
    dst[i] = (char)(unsigned char)(0x80u | (code & 0x3fu));
  dst[0] = (char)(unsigned char)((0xf00u >> length & 0xffu) | code);
  return length;
}

/* 1 for what moves a cursor or rings a bell: U+0000 to U+001F and U+007F to U+009F. */
MFSDP_API int mfsdp__utf8_is_control(uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code <= 0x9f);
}

/* 1 if a string is UTF-8 to its 0 byte; *has_control says whether it holds a control character. */
MFSDP_API int mfsdp__utf8_check(const char *text, int *has_control) {
  size_t nbytes = strlen(text), length;
  uint32_t code = 0;
  *has_control = 0;
  for (; nbytes > 0; text += length, nbytes -= length) {
    length = mfsdp__utf8_read(text, nbytes, &code);
    if (length == 0) return 0;
    if (mfsdp__utf8_is_control(code)) *has_control = 1;
  }
  return 1;
}

#endif /* MFSDP_SAFETENSORS_UTF8_H */
