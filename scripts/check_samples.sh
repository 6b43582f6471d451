#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: check_samples.sh HEADER...
# The samples in the comments of headers: lines that stand three columns or more behind the star. Each
# mfsdp_ name in one must be a name of the HEADERs' code, and each mfsdp_ function must be called with as
# many arguments as its declaration has parameters; `...` as an argument stands for any number.
# Prints FILE:LINE and the fault for each, then how many calls were seen; fails if there is a fault.
# Does not look at types and fields. (What README and docs/ show is compiled: tests/cli/docs.sh.)
set -u
[ $# -gt 0 ] || { echo "usage: $0 HEADER..." >&2; exit 2; }

awk '
  # How many arguments, or parameters, the parenthesis at `at` of text holds; -1: it never closes; -2: one
  # of them is "...".
  function count_in(text, at, depth, commas, any, word, elided, c) {
    depth = commas = any = elided = 0
    word = ""
    for (; at <= length(text); at++) {
      c = substr(text, at, 1)
      if (c ~ /[ \t\n]/) continue
      if (c ~ /[])}]/) depth--
      if (depth == 0 && any || c == "," && depth == 1) { # one has ended
        if (word == "...") elided = 1
        if (depth == 0) return elided ? -2 : word == "" || word == "void" ? commas : commas + 1
        commas++
        word = ""
      } else if (any) word = word c
      if (c ~ /[[({]/) { depth++; any = 1 }
    }
    return -1
  }
  function plain(line) { # strings and characters as 0, no comment at its end
    gsub(/\\./, "", line)
    gsub(/"[^"]*"/, "0", line)
    gsub(/\047[^\047]*\047/, "0", line)
    sub(/\/\/.*/, "", line)
    return line
  }
  # What code declares, and every name in it. `before` is the statement that a name stands in, up to it.
  function learn(text, before, name) {
    before = ""
    while (match(text, /mfsdp_[a-z0-9_]+/)) {
      name = substr(text, RSTART, RLENGTH)
      before = before substr(text, 1, RSTART - 1)
      text = substr(text, RSTART + RLENGTH)
      known[name] = 1
      sub(/.*[;{}]/, "", before)
      if (before ~ /^[ \t\n]*(MFSDP_[A-Z_]*API|__attribute__)[^=]*$/ && match(text, /^[ \n]*\(/)) {
        if (!(name in parameters)) parameters[name] = count_in(text, RLENGTH)
        before = "=" # names of parameters follow
      }
    }
  }
  function fault(text) { print where ": " text; faults++ }
  function judge(file, text, numbers, number, line, head, name, has) {
    split(numbers, number, " ")
    line = 1
    while (match(text, /mfsdp_[a-z0-9_]+/)) {
      head = substr(text, 1, RSTART)
      line += gsub(/\n/, "", head)
      name = substr(text, RSTART, RLENGTH)
      text = substr(text, RSTART + RLENGTH)
      where = file ":" number[line] ": " name
      if (text ~ /^\(/) {
        calls++
        has = count_in(text, 1)
        if (!(name in parameters)) fault("there is no such function")
        else if (has == -1) fault("the call does not end")
        else if (has >= 0 && has != parameters[name])
          fault("called with " has " arguments, declared with " parameters[name] " parameters")
      } else if (!(name in known)) fault("there is no such name")
    }
  }
  function end_file() {
    learn(code)
    file_of[++files] = file
    samples_of[files] = samples
    numbers_of[files] = numbers
    code = samples = numbers = ""
    inside = 0
  }
  FNR == 1 { if (file != "") end_file(); file = FILENAME }
  {
    line = $0
    gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
    if (inside) {
      # The star and three columns; another line of a comment ends a sample, so that a call cannot go on.
      if (line ~ /^[ \t]*\*   / && line !~ /\*\//) {
        sub(/^[ \t]*\*/, "", line)
        samples = samples plain(line) "\n"
      } else samples = samples ";\n"
      numbers = numbers FNR " "
      if (line ~ /\*\//) inside = 0
      next
    }
    inside = sub(/\/\*.*/, "", line)
    directive = more || line ~ /^[ \t]*#/
    more = directive && line ~ /\\$/
    if (!directive) code = code plain(line) "\n"
  }
  END {
    end_file()
    for (i = 1; i <= files; i++) judge(file_of[i], samples_of[i], numbers_of[i])
    print calls + 0 " calls in samples, " faults + 0 " faults"
    exit faults > 0
  }' "$@"
