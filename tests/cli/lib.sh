# SPDX-License-Identifier: MIT
# What the scripts of this folder share. Sourced, in the project's root, after `suite=NAME`: sets $work,
# a folder that goes when the script ends.
# shellcheck shell=sh disable=SC2154 # suite is the script's

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

ok() { echo "ok $suite: $1"; }
bad() { echo "not ok $suite: $1${2:+ ($2)}"; }
# NAME GOT WANTED
check() { if [ "$2" = "$3" ]; then ok "$1"; else bad "$1" "got '$2', needs '$3'"; fi; }
# FILE KEY: the value of the last "KEY": in a line of JSON
field() { sed -n 's/.*"'"$2"'":"\{0,1\}\([^",}]*\).*/\1/p' "$1"; }

# Bytes that can be learned: a fixed sentence, numbered.
write_text() { # FILE
  i=0
  while [ $i -lt 400 ]; do echo "$i the quick brown fox jumps over the lazy dog"; i=$((i + 1)); done >"$1"
}
