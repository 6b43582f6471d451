/* SPDX-License-Identifier: MIT */
/*
 * json.h: reads JSON strictly (RFC 8259: no trailing commas, no comments, one value, no text after
 * it), to check what programs write.
 *
 *   test::Json root;
 *   std::string error = test::parse_json(text, &root);      // empty: fine
 *   root.at("traceEvents").items[0].at("name").text
 */
#ifndef MFSDP_TESTS_SUPPORT_JSON_H
#define MFSDP_TESTS_SUPPORT_JSON_H

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace test {

struct Json {
  enum Kind { Null, Boolean, Number, Text, Array, Object };
  Kind kind = Null;
  bool boolean = false;
  double number = 0.0;
  std::string text;
  std::vector<Json> items;                           /* Array */
  std::vector<std::pair<std::string, Json>> members; /* Object, in order; no name twice */

  const Json *find(const std::string &name) const {
    for (const auto &member : members)
      if (member.first == name) return &member.second;
    return nullptr;
  }
  /* A Null where there is no such member. */
  const Json &at(const std::string &name) const {
    static const Json none = Json();
    const Json *found = find(name);
    return found ? *found : none;
  }
};

namespace detail {

class JsonParser {
public:
  explicit JsonParser(const std::string &text) : text_(text) {}
  std::string parse(Json *out) {
    if (value(out, 0)) {
      blanks();
      if (at_ == text_.size()) return "";
      fail("text after the value");
    }
    return error_ + " at byte " + std::to_string(at_);
  }

private:
  bool fail(const char *why) {
    if (error_.empty()) error_ = why;
    return false;
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void blanks() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]))
      ++at_;
  }
  bool take(char c) {
    blanks();
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  bool word(const char *name) {
    const std::size_t length = std::strlen(name);
    if (text_.compare(at_, length, name) != 0) return fail("not a value");
    at_ += length;
    return true;
  }
  bool digits() {
    const std::size_t first = at_;
    while (peek() >= '0' && peek() <= '9')
      ++at_;
    return at_ > first || fail("a digit is missing");
  }
  bool number(Json *out) {
    const std::size_t first = at_;
    if (peek() == '-') ++at_;
    if (peek() == '0')
      ++at_;
    else if (!digits())
      return false;
    if (peek() == '.' && (++at_, !digits())) return false;
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (!digits()) return false;
    }
    out->kind = Json::Number;
    out->number = std::strtod(text_.substr(first, at_ - first).c_str(), nullptr);
    return true;
  }
  bool escape(std::string *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char c = peek();
    ++at_;
    if (c == 'u') {
      unsigned code = 0;
      for (int i = 0; i < 4; ++i, ++at_) {
        const char *hex = "0123456789abcdef", *found = std::strchr(hex, peek() | 0x20);
        if (peek() == '\0' || !found) return fail("bad \\u");
        code = code * 16 + static_cast<unsigned>(found - hex);
      }
      *out += static_cast<char>(code < 0x80 ? code : '?');
      return true;
    }
    const char *found = c ? std::strchr(from, c) : nullptr;
    if (!found) return fail("bad escape");
    *out += to[found - from];
    return true;
  }
  bool string(std::string *out) {
    ++at_;
    while (peek() != '"') {
      if (at_ >= text_.size() || static_cast<unsigned char>(peek()) < 0x20)
        return fail("unterminated string");
      if (peek() != '\\')
        *out += text_[at_++];
      else if (++at_, !escape(out))
        return false;
    }
    ++at_;
    return true;
  }
  bool array(Json *out, int depth) {
    out->kind = Json::Array;
    ++at_;
    if (take(']')) return true;
    do {
      out->items.emplace_back();
      if (!value(&out->items.back(), depth + 1)) return false;
    } while (take(','));
    return take(']') || fail("] is missing");
  }
  bool object(Json *out, int depth) {
    out->kind = Json::Object;
    ++at_;
    if (take('}')) return true;
    do {
      std::string name;
      Json member;
      blanks();
      if (peek() != '"') return fail("a name is missing");
      if (!string(&name)) return false;
      if (out->find(name)) return fail("a name comes twice");
      if (!take(':')) return fail(": is missing");
      if (!value(&member, depth + 1)) return false;
      out->members.emplace_back(std::move(name), std::move(member));
    } while (take(','));
    return take('}') || fail("} is missing");
  }
  bool value(Json *out, int depth) {
    if (depth > 64) return fail("too deep");
    blanks();
    switch (peek()) {
    case '{': return object(out, depth);
    case '[': return array(out, depth);
    case '"': out->kind = Json::Text; return string(&out->text);
    case 't': out->kind = Json::Boolean; return out->boolean = true, word("true");
    case 'f': out->kind = Json::Boolean; return word("false");
    case 'n': return word("null");
    default: return number(out);
    }
  }

  const std::string &text_;
  std::size_t at_ = 0;
  std::string error_;
};

} // namespace detail

/* Empty, or what is wrong and where. */
inline std::string parse_json(const std::string &text, Json *out) {
  *out = Json();
  return detail::JsonParser(text).parse(out);
}

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_JSON_H
