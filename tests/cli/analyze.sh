#!/bin/sh
# SPDX-License-Identifier: MIT
# scripts/analyze.sh with a stand-in for clang-tidy: what is known is silent, what is new is said, and so is what is
# known and no longer found.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite=analyze
. tests/cli/lib.sh
mkdir "$work/bin"
cat >"$work/bin/clang-tidy" <<'END'
#!/bin/sh
case $* in */all.c*) cat "$FINDINGS" ;; esac
END
chmod +x "$work/bin/clang-tidy"
export FINDINGS="$work/findings"
[ ! -e build/release/config.mk ] || export MFSDP_CHECK_CONFIG="$PWD/build/release/config.mk" # spares a probe
analyze() { # sets $said and $skipped
  PATH=$work/bin:$PATH scripts/analyze.sh "$@" >"$work/log" 2>&1
  skipped=$(grep '^skip ' "$work/log")
  said=$(sed '/^skip /d' "$work/log"; echo end)
  said=${said%end}
}
# Each known finding, as clang-tidy says it: place, kind and message, then the line of source.
sed '1,/^# ---- known/d; s/^# //' scripts/analyze.sh |
  awk -F ' [|] ' 'NF >= 4 {
    text = $3
    for (i = 4; $i !~ /^because /; i++) text = text " | " $i
    print root $1 ":7:1: warning: " $2 " [clang-analyzer-core.Test]\n    " text "\n    ^" }' root="$PWD/" >"$work/known"
first=$(sed '1,/^# ---- known/d; s/^# //; s/ | because .*//' scripts/analyze.sh | head -n 1)
new="$PWD/mfsdp/io.h:9:1: warning: new [clang-analyzer-core.Test]
    line"
{ sed '1,3d' "$work/known"; echo "$new"; } >"$FINDINGS"
analyze
gone="scripts/analyze.sh: known, but no longer found: $first
"
[ -z "$skipped" ] || gone='' # not judged then
check 'a new finding is said, and a known one that is not found; no other' "$said" "$new
$gone"
analyze examples/newton_schulz.c # nothing is found there
check 'of named files only what is new' "$said" 'analyze: nothing found
'
