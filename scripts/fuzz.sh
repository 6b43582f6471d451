#!/bin/sh
# SPDX-License-Identifier: MIT
# Fuzzes the readers of safetensors headers and indexes (tests/fuzz) with libFuzzer and the address and
# undefined sanitizers. One line a program: ok, not ok or skip.
#
#   scripts/fuzz.sh [SECONDS]      for all programs together (60)
#
# Needs clang with libFuzzer (Debian: clang libclang-rt-14-dev). What is found on the way stays in
# build/fuzz/ and is the start of the next run; an input that breaks a promise is build/fuzz/NAME-crash-...
set -u
cd "$(dirname "$0")/.." || exit 1
case ${1-60} in '' | *[!0-9]*) sed -n '3,9p' "$0" >&2; exit 2 ;; esac
out=build/fuzz
mkdir -p "$out"
clang=${CLANG:-clang}
programs=$(cd tests/fuzz && ls ./*_fuzz.c | sed 's|^\./||; s|_fuzz\.c$||')
seconds=$((${1-60} / $(echo "$programs" | wc -w)))
flags='-std=c11 -g1 -O1 -I. -Wall -Wextra -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all'

echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n); int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n == 0 && 0; }' >"$out/probe.c"
if ! why=$("$clang" $flags "$out/probe.c" -o "$out/probe" 2>&1); then
  echo "skip fuzz: $clang cannot build with libFuzzer: install clang and libclang-rt-14-dev ($(echo "$why" | tail -n 1))"
  exit 0
fi
failed=0
for name in $programs; do
  mkdir -p "$out/$name"
  # shellcheck disable=SC2086 # a list of flags
  if ! "$clang" $flags "tests/fuzz/${name}_fuzz.c" -o "$out/${name}_fuzz"; then
    echo "not ok fuzz $name: does not compile"
    failed=1
    continue
  fi
  "$out/${name}_fuzz" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 \
    -dict=tests/fuzz/json.dict -print_final_stats=1 -artifact_prefix="$out/$name-" \
    "$out/$name" "tests/fuzz/corpus/$name" >"$out/$name.log" 2>&1
  status=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$out/$name.log")
  if [ $status = 0 ] && [ "${runs:-0}" -gt 0 ]; then
    echo "ok fuzz $name: $runs runs in $seconds s"
  else
    tail -n 30 "$out/$name.log" | sed 's/^/  /'
    echo "not ok fuzz $name: status $status after ${runs:-?} runs (all of it: $out/$name.log)"
    failed=1
  fi
done
[ $failed = 0 ]
