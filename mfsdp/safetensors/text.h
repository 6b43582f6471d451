/* SPDX-License-Identifier: MIT */
/*
 * safetensors/text.h - writes text to a buffer, or counts what it would be.
 *
 *   mfsdp__st_text out = {NULL, 0, 0, 0};
 *   mfsdp__st_text_put(&out, "{");  mfsdp__st_text_string(&out, name);         // out.nbytes
 *
 * Private to safetensors.h. The functions write nothing past the capacity and go on counting.
 * Does not: allocate.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_TEXT_H
#define MFSDP_SAFETENSORS_TEXT_H

#include "fault.h"

typedef struct mfsdp__st_text {
  char *dst;
  size_t capacity, nbytes;
  int overflow; /* 1: nbytes passed size_t */
} mfsdp__st_text;

MFSDP_API void mfsdp__st_text_bytes(mfsdp__st_text *out, const char *data, size_t nbytes) {
  size_t end;
  if (!mfsdp_size_add(out->nbytes, nbytes, &end)) {
    out->overflow = 1;
    return;
  }
  if (end <= out->capacity) memcpy(out->dst + out->nbytes, data, nbytes);
  out->nbytes = end;
}

MFSDP_API void mfsdp__st_text_put(mfsdp__st_text *out, const char *text) {
  mfsdp__st_text_bytes(out, text, strlen(text));
}

MFSDP_API void mfsdp__st_text_number(mfsdp__st_text *out, int64_t value) {
  char digits[24];
  (void)snprintf(digits, sizeof(digits), "%lld", (long long)value);
  mfsdp__st_text_put(out, digits);
}

/* A JSON string: what must be escaped is, in the shortest way; all else stays as it is. */
MFSDP_API void mfsdp__st_text_string(mfsdp__st_text *out, const char *text) {
  mfsdp__st_text_put(out, "\"");
  for (; *text != '\0'; ++text) {
    const unsigned char c = (unsigned char)*text;
    char escape[8];
    switch (c) {
    case '"': mfsdp__st_text_put(out, "\\\""); break;
    case '\\': mfsdp__st_text_put(out, "\\\\"); break;
    case '\b': mfsdp__st_text_put(out, "\\b"); break;
    case '\f': mfsdp__st_text_put(out, "\\f"); break;
    case '\n': mfsdp__st_text_put(out, "\\n"); break;
    case '\r': mfsdp__st_text_put(out, "\\r"); break;
    case '\t': mfsdp__st_text_put(out, "\\t"); break;
    default:
      if (c >= 0x20) {
        mfsdp__st_text_bytes(out, text, 1);
      } else {
        (void)snprintf(escape, sizeof(escape), "\\u%04x", (unsigned)c);
        mfsdp__st_text_put(out, escape);
      }
    }
  }
  mfsdp__st_text_put(out, "\"");
}

#endif /* MFSDP_SAFETENSORS_TEXT_H */
