/* SPDX-License-Identifier: MIT */
/*
 * golden.h: strict reader of the vectors in tests/golden/ (written by scripts/golden/generate.py).
 *
 *   ref::GoldenFile file = ref::golden_load("muon_torch.txt");
 *   for (const ref::GoldenCase &c : file.cases) {
 *     const ref::GoldenArray &grad = c.array("grad1");       // rows, cols, values (double, exact)
 *     double lr = c.number("lr");  int64_t steps = c.integer("steps");
 *   }
 *
 * The folder is $MFSDP_GOLDEN_DIR, else the macro MFSDP_GOLDEN_DIR, else "tests/golden" from the
 * working directory. Any deviation from the format, a missing key or a truncated file throws
 * std::runtime_error with file and line; nothing is skipped silently.
 *
 * Format, line by line, tokens separated by single blanks:
 *   # free text                      comment; only before the first case; kept in `header`
 *   golden 1                         version
 *   case NAME
 *   text KEY VALUE                   VALUE is one token
 *   integer KEY DECIMAL
 *   number KEY HEXFLOAT              C99 %a, exact
 *   array KEY DTYPE ROWS COLS        f64 or f32 (f32: every value is exact in float); then ROWS
 *                                    lines of COLS hex floats each
 *   endcase
 *   endfile CASES                    number of cases; the last line
 */
#ifndef MFSDP_TESTS_REF_GOLDEN_H
#define MFSDP_TESTS_REF_GOLDEN_H

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ref {

struct GoldenArray {
  int64_t rows, cols;
  bool is_f32;
  std::vector<double> values;
  std::vector<float> floats() const {
    std::vector<float> out;
    for (double value : values)
      out.push_back(static_cast<float>(value));
    return out;
  }
};

struct GoldenCase {
  std::string name;
  std::map<std::string, std::string> texts;
  std::map<std::string, int64_t> integers;
  std::map<std::string, double> numbers;
  std::map<std::string, GoldenArray> arrays;

  const std::string &text(const std::string &key) const { return get(texts, key); }
  int64_t integer(const std::string &key) const { return get(integers, key); }
  double number(const std::string &key) const { return get(numbers, key); }
  const GoldenArray &array(const std::string &key) const { return get(arrays, key); }

private:
  template <class T>
  const T &get(const std::map<std::string, T> &from, const std::string &k) const {
    const auto found = from.find(k);
    if (found == from.end()) {
      throw std::runtime_error("golden: case " + name + " has no such key of this type: " + k);
    }
    return found->second;
  }
};

struct GoldenFile {
  std::vector<std::string> header; /* comment lines without "# " */
  std::vector<GoldenCase> cases;
  const GoldenCase &find(const std::string &name) const {
    for (const GoldenCase &c : cases) {
      if (c.name == name) return c;
    }
    throw std::runtime_error("golden: no case " + name);
  }
};

/* Reads one stream; `origin` names it in messages. Separate from golden_load so that the reader's
 * own errors can be tested without files. */
class GoldenReader {
public:
  GoldenReader(std::istream *in, const std::string &origin) : in_(in), origin_(origin), line_(0) {}

  GoldenFile read() {
    GoldenFile file;
    std::vector<std::string> tokens;
    bool versioned = false;
    while (next(&tokens, versioned ? nullptr : &file.header)) {
      if (!versioned) {
        expect(tokens.size() == 2 && tokens[0] == "golden" && tokens[1] == "1",
               "expected 'golden 1'");
        versioned = true;
      } else if (tokens[0] == "case") {
        expect(tokens.size() == 2, "expected 'case NAME'");
        for (const GoldenCase &c : file.cases)
          expect(c.name != tokens[1], "case name repeated");
        file.cases.push_back(read_case(tokens[1]));
      } else {
        expect(tokens[0] == "endfile" && tokens.size() == 2, "expected 'case' or 'endfile'");
        expect(to_integer(tokens[1]) == static_cast<int64_t>(file.cases.size()),
               "endfile counts other cases than the file has");
        expect(!next(&tokens, nullptr), "text after endfile");
        return file;
      }
    }
    fail("the file ends before endfile");
    return file;
  }

private:
  GoldenCase read_case(const std::string &name) {
    GoldenCase c;
    c.name = name;
    std::vector<std::string> tokens;
    while (next(&tokens, nullptr)) {
      if (tokens[0] == "endcase") {
        expect(tokens.size() == 1, "text after endcase");
        return c;
      }
      expect(tokens.size() >= 3, "expected TYPE KEY VALUE");
      const std::string &type = tokens[0], &key = tokens[1];
      expect(!c.texts.count(key) && !c.integers.count(key) && !c.numbers.count(key) &&
                 !c.arrays.count(key),
             "key repeated");
      if (type == "array") {
        c.arrays[key] = read_array(tokens);
        continue;
      }
      expect(tokens.size() == 3, "expected TYPE KEY VALUE");
      if (type == "text") {
        c.texts[key] = tokens[2];
      } else if (type == "integer") {
        c.integers[key] = to_integer(tokens[2]);
      } else if (type == "number") {
        c.numbers[key] = to_number(tokens[2]);
      } else {
        fail("unknown type '" + type + "'");
      }
    }
    fail("the file ends inside case " + name);
    return c;
  }

  GoldenArray read_array(const std::vector<std::string> &head) {
    expect(head.size() == 5 && (head[2] == "f64" || head[2] == "f32"),
           "expected 'array KEY f64|f32 ROWS COLS'");
    GoldenArray array;
    array.is_f32 = head[2] == "f32";
    array.rows = to_integer(head[3]);
    array.cols = to_integer(head[4]);
    expect(array.rows > 0 && array.cols > 0, "dimensions must be positive");
    std::vector<std::string> tokens;
    for (int64_t row = 0; row < array.rows; ++row) {
      if (!next(&tokens, nullptr)) fail("the file ends inside an array");
      expect(static_cast<int64_t>(tokens.size()) == array.cols, "row has other than COLS values");
      for (const std::string &token : tokens) {
        const double value = to_number(token);
        expect(!array.is_f32 || !(static_cast<double>(static_cast<float>(value)) < value ||
                                  static_cast<double>(static_cast<float>(value)) > value),
               "value of an f32 array is not exact in float");
        array.values.push_back(value);
      }
    }
    return array;
  }

  /* False at the end of the file. Comments are allowed only where `comments` takes them. */
  bool next(std::vector<std::string> *tokens, std::vector<std::string> *comments) {
    std::string line;
    while (std::getline(*in_, line)) {
      ++line_;
      if (!line.empty() && line[0] == '#') {
        expect(comments != nullptr, "comment after the header");
        comments->push_back(line.substr(line.size() > 1 ? 2 : 1));
        continue;
      }
      tokens->clear();
      std::istringstream words(line);
      std::string word;
      while (words >> word)
        tokens->push_back(word);
      expect(!tokens->empty(), "empty line");
      return true;
    }
    return false;
  }

  int64_t to_integer(const std::string &token) {
    char *end = nullptr;
    const long long value = std::strtoll(token.c_str(), &end, 10);
    expect(end != token.c_str() && *end == '\0', "not an integer: " + token);
    return static_cast<int64_t>(value);
  }

  /* Hex floats only: a decimal would be rounded, and a NaN or infinity is never stored. */
  double to_number(const std::string &token) {
    const std::string digits = token.substr(token[0] == '-' ? 1 : 0);
    char *end = nullptr;
    const double value = std::strtod(token.c_str(), &end);
    expect(digits.compare(0, 2, "0x") == 0 && *end == '\0', "not a hex float: " + token);
    return value;
  }

  void expect(bool condition, const std::string &message) {
    if (!condition) fail(message);
  }
  void fail(const std::string &message) {
    throw std::runtime_error(origin_ + ":" + std::to_string(line_) + ": " + message);
  }

  std::istream *in_;
  std::string origin_;
  int line_;
};

inline std::string golden_path(const std::string &file) {
  const char *folder = std::getenv("MFSDP_GOLDEN_DIR");
#ifdef MFSDP_GOLDEN_DIR
  if (folder == nullptr || *folder == '\0') folder = MFSDP_GOLDEN_DIR;
#endif
  if (folder == nullptr || *folder == '\0') folder = "tests/golden";
  return std::string(folder) + "/" + file;
}

inline GoldenFile golden_load(const std::string &file) {
  const std::string path = golden_path(file);
  std::ifstream in(path.c_str());
  if (!in) throw std::runtime_error("golden: cannot open " + path + " (set MFSDP_GOLDEN_DIR)");
  return GoldenReader(&in, path).read();
}

} // namespace ref

#endif
