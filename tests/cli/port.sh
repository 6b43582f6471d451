#!/bin/sh
# SPDX-License-Identifier: MIT
# The port of docs/porting.md: both trainers run; with AdamW for all tensors the port trains as the trainer
# before it, with Muon better; the port is short.
cd "$(dirname "$0")/../.." || exit 1
suite=port
. tests/cli/lib.sh
CC=${CC:-gcc}
flags='-std=c11 -O2 -fno-math-errno -ffp-contract=off -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wpedantic -Werror'

# The port as it is while no tensor is a matrix yet.
role='role = k == UP_W || k == MID_W ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;'
sed "s/$role/role = MFSDP_ROLE_ELEMENTWISE;/" examples/port/after.c >"$work/adamw.c"
check 'after.c with AdamW: one line differs' "$(diff examples/port/after.c "$work/adamw.c" | grep -c '^>')" 1
# shellcheck disable=SC2086 # lists of words
if $CC $flags examples/port/before.c -o "$work/before" -lm &&
  $CC $flags -D_POSIX_C_SOURCE=200809L -I. "$work/adamw.c" -o "$work/adamw" -lpthread -lm &&
  $CC $flags -D_POSIX_C_SOURCE=200809L -I. examples/port/after.c -o "$work/after" -lpthread -lm; then
  ok 'both compile'
else
  bad 'both compile'
  exit 1
fi

write_text "$work/text"
"$work/before" "$work/text" 100 >"$work/before.out" || bad 'before.c runs'
"$work/adamw" "$work/text" 100 >"$work/adamw.out" || bad 'after.c runs with AdamW'
"$work/after" "$work/text" 100 >"$work/muon.out" || bad 'after.c runs with Muon'
"$work/after" "$work/text" 100 >"$work/again.out" || bad 'after.c runs again'
check 'five losses each' "$(cat "$work/before.out" "$work/adamw.out" "$work/muon.out" | grep -c '^step [0-9]* loss [0-9.]*$')" 15
# Sums over a batch in another order: rounding, amplified by 100 steps; an error would be tenths.
check 'with AdamW the same losses within 0.005' "$(paste "$work/before.out" "$work/adamw.out" | awk '
  $2 != $6 || ($4 - $8) ^ 2 > 0.005 ^ 2 { print $0 }')" ''
last() { tail -n 1 "$1" | cut -d' ' -f4; }
check 'with Muon a lower loss' "$(awk -v a="$(last "$work/before.out")" -v m="$(last "$work/muon.out")" 'BEGIN { print m < a }')" 1
check 'every run the same' "$(cmp "$work/muon.out" "$work/again.out" 2>&1)" ''

# ---- docs/porting.md ----
awk -v file=examples/port/after.c '
  BEGIN { while ((getline line < file) > 0) there[line] = 1 }
  /^```c$/ { inside = 1; next }
  /^```/ { inside = 0 }
  inside { count++; if (!($0 in there)) print "not in " file ": " $0 }
  END { if (count < 30) print "only " count + 0 " lines of code" }' docs/porting.md >"$work/unknown"
check 'all code of docs/porting.md stands in after.c' "$(cat "$work/unknown")" ''

diff examples/port/before.c examples/port/after.c >"$work/diff"
added=$(grep -c '^>' "$work/diff") removed=$(grep -c '^<' "$work/diff")
check "the port changes less than 120 lines (adds $added, removes $removed)" \
  "$([ $((added + removed)) -lt 120 ] && echo yes)" yes
check 'docs/porting.md says how many' \
  "$(grep -c ": $added lines added and $removed removed, of $(grep -c '' examples/port/before.c)\." docs/porting.md)" 1

printf 'short' >"$work/short"
for program in before after; do
  "$work/$program" "$work/short" >"$work/out" 2>"$work/err"
  check "$program refuses a short file" "$? $(wc -l <"$work/err")" '2 1'
done
