#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs test programs and closes with one line: N passed, N failed, N skipped (single tests, not programs).
#
#   scripts/run_tests.sh [-j JOBS] [-t SECONDS] [-l LOG_FOLDER] [-r RUNNER] -- PROGRAM [ARGUMENT...]
#
# PROGRAM: GoogleTest programs, or scripts (*.sh) whose lines `ok NAME`, `not ok NAME` and
# `skip NAME reason` are counted. An ARGUMENT (a word that starts with `--`) goes to all scripts.
# A program that crashes, stops early or takes longer than SECONDS counts as a failure of its own.
# Failures are printed in full after the last program; everything else stays in LOG_FOLDER.
set -u

# --one finds them in the environment.
[ "${1-}" = --one ] || jobs=2 seconds=900 logs=build/logs runner='' arguments=''

# One program: its output to LOG, its counts "passed failed skipped" to LOG.count. Run through xargs.
if [ "${1-}" = --one ]; then
  program=$2
  log=$logs/$(printf '%s' "$program" | tr '/ ' '__').log
  start=$(date +%s)
  case $program in
  *.sh) style=script ;;
  *) style=gtest arguments=--gtest_color=no ;;
  esac
  # shellcheck disable=SC2086 # runner and arguments are lists of words
  timeout -k 10 "$seconds" $runner "$program" $arguments >"$log" 2>&1 </dev/null
  status=$?
  awk -v style=$style -v status=$status -v seconds="$seconds" -v show="$log.failures" -v count="$log.count" '
    # Passing tests are dropped from what is shown: their lines are held back until their verdict.
    function flush(i) { for (i = 0; i < held; i++) kept[kept_count++] = hold[i]; held = 0 }
    function fail(text) { failed++; hold[held++] = "## " text }
    style == "script" {
      if ($0 ~ /^ok( |$)/) { passed++; held = 0; next }
      if ($0 ~ /^skip( |$)/) { skipped++; held = 0; next }
      hold[held++] = $0
      if ($0 ~ /^not ok( |$)/) { failed++; flush() }
      next
    }
    /^\[ RUN      \]/ { flush() }
    /^\[-+\] / || /^$/ { next } # a suite begins or ends
    { hold[held++] = $0 }
    /\[       OK \] .* \([0-9]+ ms\)$/ { passed++; held = 0 }
    /\[  SKIPPED \] .* \([0-9]+ ms\)$/ { skipped++; held = 0 }
    /\[  FAILED  \] .* \([0-9]+ ms\)$/ { failed++; flush() }
    /^\[==========\] Running [0-9]+ tests?/ { expected = $3; announced = 1 }
    END {
      done = passed + failed + skipped
      before = failed + 0
      if (status == 124) fail("timed out after " seconds " s")
      else if (status == 137) fail("was killed: out of memory, or deaf to the time-out of " seconds " s")
      else if (status > 128) fail("ended by signal " status - 128)
      else if (status != 0 && !before) fail("ended with status " status)
      else if (style == "gtest" && !announced) fail("printed no test results")
      else if (style == "gtest" && done != expected) fail("ran " done " of " expected " tests")
      else if (done == 0) fail("has no tests")
      else if (status == 0 && before) fail("reported failures and ended with status 0")
      flush()
      if (failed) for (i = 0; i < kept_count; i++) print kept[i] >show
      print passed + 0, failed + 0, skipped + 0 >count
    }' "$log"
  read -r passed failed skipped <"$log.count"
  word=ok
  [ "$failed" = 0 ] || word=FAILED
  printf '%-6s %s: %s passed, %s failed, %s skipped (%s s)\n' \
    "$word" "$program" "$passed" "$failed" "$skipped" $(($(date +%s) - start))
  exit 0
fi

while getopts j:t:l:r: option; do
  case $option in
  j) jobs=$OPTARG ;;
  t) seconds=$OPTARG ;;
  l) logs=$OPTARG ;;
  r) runner=$OPTARG ;;
  *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))

mkdir -p "$logs" || exit 2
# The list is private: two runs in one tree may share a log folder, not a count.
list=$(mktemp) && notes=$(mktemp) || exit 2
trap 'rm -f "$list" "$notes"' EXIT
trap 'exit 130' INT TERM
for word in "$@"; do
  case $word in
  --*) arguments="$arguments $word" ;;
  *) printf '%s\n' "$word" >>"$list" ;;
  esac
done
log_of() { printf '%s/%s.log' "$logs" "$(printf '%s' "$1" | tr '/ ' '__')"; }
while read -r program; do
  log=$(log_of "$program")
  rm -f "$log" "$log.count" "$log.failures"
done <"$list"

export jobs seconds logs runner arguments
tr '\n' '\0' <"$list" | xargs -0 -r -n 1 -P "$jobs" "$0" --one

counts=''
while read -r program; do
  log=$(log_of "$program")
  [ -s "$log.count" ] || echo "0 1 0" >"$log.count" # the runner itself was stopped
  counts="$counts$(cat "$log.count")
"
  if [ -s "$log.failures" ]; then
    printf '\n======== %s (all of its output: %s)\n' "$program" "$log"
    cat "$log.failures"
  fi
  # Last, where the end of a long log shows it: the names of what failed. And what a skipped test
  # wants is worth a line: it is work that was not done.
  grep -E '^not ok |^## |^\[  FAILED  \] .* ms\)$' "$log.failures" 2>/dev/null | sed "s|^|FAIL $program: |" >>"$notes"
  grep -E '^skip |^\[  SKIPPED \] .* ms\)$' "$log" 2>/dev/null | sed "s|^|SKIP $program: |" >>"$notes"
done <"$list"
[ ! -s "$notes" ] || { echo; cat "$notes"; }
echo
printf '%s' "$counts" | awk '
  { passed += $1; failed += $2; skipped += $3 }
  END {
    if (NR == 0) { print "no test programs found"; failed = 1 }
    printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
    exit failed > 0
  }'
