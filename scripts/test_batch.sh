#!/bin/sh
# SPDX-License-Identifier: MIT
# Several test programs as one source file on standard output: the library and the rigs are compiled
# once for all of them, which takes a third of the time that the files take one by one.
#
#   scripts/test_batch.sh FILE.cpp...     paths from the project's root; compile with -I.
#
# Each file gets a namespace of its own, so equal names in two files do no harm. What a namespace
# must not hold, the headers, comes first: the directives at the top of every file.
set -eu

echo '/* Made by scripts/test_batch.sh: edit the files that it includes. */'
for file in "$@"; do
  awk -v folder="$(dirname "$file")/" '
    in_comment { if (/\*\//) in_comment = 0; next }
    /^\/\*/ { if (!/\*\//) in_comment = 1; next }
    /^\/\// || /^[ \t]*$/ { next }
    /^#include "/ {
      name = $2; gsub(/"/, "", name)
      if ((getline line <(folder name)) >= 0) { close(folder name); $0 = "#include \"" folder name "\"" }
    }
    !/^#(include|if|ifdef|ifndef|else|elif|endif)/ { exit }
    /^#if/ { depth++ }
    { block = block $0 "\n" }
    /^#endif/ { depth-- }
    !depth { printf "%s", block; block = "" } # never half of an #if' "$file"
done
number=0
for file in "$@"; do
  number=$((number + 1))
  printf 'namespace batch_%d {\n#include "%s"\n}\n' $number "$file"
done
