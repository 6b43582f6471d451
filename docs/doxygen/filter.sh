#!/bin/sh
# SPDX-License-Identifier: MIT
# What Doxygen reads of a header: comments before declarations and behind members are marked as documentation,
# the first screen as that of the file, and its indented lines are kept as they are.
# Links inside a page of Markdown name headings, which Doxygen does not know by that name.
case $1 in *.md) exec sed 's/\[\([^]]*\)\](#[^)]*)/\1/g' "$1" ;; esac
exec awk '
  NR == 1 && /SPDX/ { print ""; next }
  NR == 2 && /^\/\*$/ { print "/** @file"; first = 1; inside = 1; next }
  function plain(text) { gsub(/[@\\<>#%&]/, "\\\\&", text); return text }
  /^[ \t]*\/\* ---- .* ---- \*\/$/ { print ""; next }
  !inside && /^[ \t]*\/\*/ {
    sub(/\/\*/, "/**")
    inside = 1
    body = plain($0)
    sub(/^[ \t]*\/\*\*/, "/**", body)
    if ($0 ~ /\*\/[ \t]*$/) inside = 0
    print body
    next
  }
  inside {
    if ($0 ~ /\*\/[ \t]*$/) inside = 0
    print plain($0)
    next
  }
  /[;,{(][ \t]*\/\*[^*]/ && !/^#/ {
    at = match($0, /\/\*[^*]/)
    head = substr($0, 1, at - 1)
    tail = substr($0, at + 2)
    inside = tail !~ /\*\//
    print head "/**< " plain(tail)
    next
  }
  { print }' "$1"
