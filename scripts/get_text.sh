#!/bin/sh
# SPDX-License-Identifier: MIT
# Writes the King James Bible (public domain outside the United Kingdom) to OUT: 4.4 MB of ASCII, one
# verse a line ("Ge1:1 In the beginning ..."), by the program of Debian's package bible-kjv.
#
#   scripts/get_text.sh OUT
set -u

[ $# = 1 ] || { sed -n '6p' "$0" >&2; exit 2; }
out=$1
fail() { echo "get_text: $*" >&2; exit 1; }

command -v bible >/dev/null 2>&1 ||
  fail "there is no program \`bible\`: install the package bible-kjv (scripts/setup.sh demo does)," \
    "or train on a text of yours with DATA=file make demo"
mkdir -p "$(dirname "$out")" || exit 1
part=$out.part.$$
trap 'rm -f "$part"' EXIT
trap 'exit 130' INT TERM
bible -f gen1:1-rev22:21 >"$part" </dev/null || fail "\`bible -f gen1:1-rev22:21\` failed"
# The first and the last verse: a cut text would train, and nobody would notice.
{ head -n 1 "$part" | grep -q '^Ge1:1 ' && tail -n 1 "$part" | grep -q '^Rev22:21 '; } ||
  fail "\`bible\` wrote $(wc -c <"$part") bytes that are not the whole text"
mv "$part" "$out"
