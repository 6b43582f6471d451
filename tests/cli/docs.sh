#!/bin/sh
# SPDX-License-Identifier: MIT
# What the README, CONTRIBUTING.md and docs/ say: every C block compiles, as C11 and C++11, inside a
# function that is given what the text around it names (those of docs/porting.md stand in
# examples/port/after.c: port.sh); build lines work, those of the examples too; links, make targets,
# programs, their options and tests that are named exist. Calls in the samples of headers fit.
set -u
cd "$(dirname "$0")/../.." || exit 1
suite=docs
. tests/cli/lib.sh
CC=${CC:-gcc} CXX=${CXX:-g++} POSIX=-D_POSIX_C_SOURCE=200809L

# The words of standard input are names of one kind; `exists NAME` judges each. At least AT_LEAST.
all_exist() { # KIND AT_LEAST
  count=0 missing=''
  for name in $(sort -u); do
    count=$((count + 1))
    exists "$name" || missing="$missing $name"
  done
  if [ -n "$missing" ]; then bad "$1" "there is no$missing"
  elif [ $count -lt "$2" ]; then bad "$1" "only $count found, needs $2"
  else ok "$1 ($count)"; fi
}

# ---- the C blocks ----
pages=$(ls README.md CONTRIBUTING.md docs/*.md)
for page in $pages; do
  # Of porting.md the blocks stand in a program that is compiled and run.
  [ $page != docs/porting.md ] || continue
  awk -v stem="$work/block-$(basename $page .md)-" '
    /^```c$/ { file = stem (++count) ".text"; next }
    /^```/ { if (file) close(file); file = "" }
    file { print >file }' $page
done
# No C in a block that does not say so, and no language that is not looked at here.
unknown=$(for page in $pages; do
  awk '/^```/ { inside = !inside; language = substr($0, 4); if (inside && language !~ /^(c|sh)?$/) print FILENAME ": " $0 }
    inside && language == "" && /^[^`].*;[ \t]*(\/[*\/].*)?$/ { print FILENAME ": " $0 }' $page
done)
check 'blocks are marked c, sh, or hold no statements' "$unknown" ''

# given BLOCK: the header, the parameters of the function around it, and a few lines before and after it.
given() {
  header=matrixfsdp.h more='' objects=''
  case $(cat "$1") in
  *mfsdp_checkpoint_save_begin*)
    header=mfsdp/checkpoint.h more=mfsdp/posix/background_posix.h
    parameters='mfsdp_checkpoint_desc desc, mfsdp_checkpoint *ck, const mfsdp_safetensors_pair *strings, int32_t count, int32_t running'
    ;;
  *MFSDP_BANDED_EVERYWHERE*) parameters='void' ;;
  *mfsdp_plan_create*)
    header=mfsdp/plan.h
    parameters='mfsdp_context context, mfsdp_plan *plan, const char *(*algorithm_of)(void *, int32_t), void (*print_line)(void *, const char *)'
    ;;
  *mfsdp_newton_schulz*)
    header=mfsdp/host/newton_schulz_host.h
    parameters='mfsdp_context context, int64_t rows, int64_t cols, const float *g, float *update'
    ;;
  *mfsdp_gather*)
    header=mfsdp/collective.h
    parameters='mfsdp_context context, mfsdp_transport transport, mfsdp_queue *queue, int32_t world, int64_t count, const float *shard, float *full, mfsdp_coll *gather'
    ;;
  *mfsdp_optimizer_step*)
    header=mfsdp/optimizer.h
    parameters='mfsdp_context context, const mfsdp_backend *backend, mfsdp_queue *queue, const mfsdp_optimizer_tensor *tensors, int32_t tensor_count, mfsdp_optimizer *optimizer, mfsdp_step_scalars *scalars, int32_t g'
    ;;
  *mfsdp_checkpoint_create*)
    header=mfsdp/checkpoint.h
    parameters='mfsdp_io io, mfsdp_runtime *rt, mfsdp_checkpoint *checkpoint, int32_t resumes, mfsdp_checkpoint_load_desc how, mfsdp_checkpoint_loaded loaded, const mfsdp_safetensors_pair *strings, int32_t string_count'
    ;;
  *mfsdp_step_begin*)
    header=mfsdp/runtime.h
    objects='void forward(int32_t u); void backward(int32_t u);'
    parameters='mfsdp_runtime *rt, mfsdp_step_desc step, int32_t u, int32_t units, double loss, int32_t stop_requested, mfsdp_verdict verdict'
    ;;
  *) return 1 ;;
  esac
}

blocks=0
for block in "$work"/block-*.text; do
  [ -e "$block" ] || break
  blocks=$((blocks + 1))
  name=$(basename "$block" .text)
  name=${name#block-}
  what=$(grep -o 'mfsdp_[a-z_]*(' "$block" | grep -v _default | head -n 1 | tr -d '(')
  if ! given "$block"; then
    bad "$name" "tests/cli/docs.sh has no function to put it in"
    continue
  fi
  {
    printf '#include "%s"\n' "$header" $more
    printf '%s\nmfsdp_status use(%s);\n' "$objects" "$parameters"
    printf 'mfsdp_status use(%s) {\n' "$parameters"
    cat "$block"
    printf 'return MFSDP_OK;\n}\n'
  } >"$block.c"
  cp "$block.c" "$block.cpp"
  for how in "$CC -std=c11" "$CXX -std=c++11"; do
    suffix=c
    [ "$how" = "$CC -std=c11" ] || suffix=cpp
    # shellcheck disable=SC2086 # words of a command
    if $how $POSIX -O0 -fno-math-errno -ffp-contract=off -Wall -Wextra -Werror -Wno-unused-but-set-parameter -Wno-unused-but-set-variable -I. -fsyntax-only \
      "$block.$suffix" 2>"$work/error"; then
      ok "$name, $what: $how"
    else
      bad "$name, $what: $how" "$(grep -m 1 -E 'error' "$work/error")"
    fi
  done
done
[ $blocks -ge 6 ] || bad 'README: a block for each primitive' "$blocks blocks"

# ---- the samples in the comments of headers: their calls ----
headers="matrixfsdp.h $(find mfsdp -name '*.h' | sort)"
# shellcheck disable=SC2086 # a list of files
if scripts/check_samples.sh $headers >"$work/samples"; then ok "samples of headers: $(cat "$work/samples")"
else bad 'samples of headers' "$(head -n 3 "$work/samples" | tr '\n' ' ')"; fi
check 'samples of headers: many calls' "$(awk '/calls in samples/ && $1 >= 150 { print "many" }' "$work/samples")" many
cat >"$work/planted.h" <<'END'
/*
 * planted.h - what the check must see, and what it must not.
 *
 *   int two = mfsdp_two(1,                     // (
 *                       mfsdp_two(")", '('));  // is right
 *   int one = mfsdp_two(mfsdp_none());
 *   int any = mfsdp_two(...) + mfsdp_gone() + mfsdp_none(1);
 *   mfsdp_type type;
 *   mfsdp_two(1,
 * A line of prose: mfsdp_gone().
 */
MFSDP_API int mfsdp_two(int (*a)(int, int), /* a, b, c */
                        int b);
MFSDP_API int mfsdp_none(void) { return mfsdp_two(0, 0); }
END
check 'samples of headers: planted faults are seen' "$(scripts/check_samples.sh "$work/planted.h" | sed 's/.*planted.h://')" \
  '6: mfsdp_two: called with 1 arguments, declared with 2 parameters
7: mfsdp_gone: there is no such function
7: mfsdp_none: called with 1 arguments, declared with 0 parameters
8: mfsdp_type: there is no such name
9: mfsdp_two: the call does not end
8 calls in samples, 5 faults'

# ---- the build lines at the head of the examples ----
for example in examples/*.c; do
  line=$(awk '/Build: cc / { on = 1; sub(/.*Build: cc /, "") } on { more = sub(/\\$/, ""); sub(/\*\/ *$/, ""); sub(/^ \* /, ""); printf "%s ", $0; if (!more) exit }' "$example")
  [ -n "$line" ] || continue
  line=$(echo "$line" | sed 's/-O3/-O0/') # optimizing takes most of the time, and the examples are built so anyway
  # shellcheck disable=SC2086 # the file names of the line are patterns
  if $CC $line -o "$work/program" 2>"$work/error"; then
    ok "$example: its build line"
  else
    bad "$example: its build line" "$(grep -m 1 -E 'error|undefined' "$work/error")"
  fi
done

# ---- shell blocks and code between backquotes: commands, a line each, without what follows # > | && ----
commands() { # PAGE...
  for page in "$@"; do
    awk '
      function say(text) {
        sub(/[ \t]#.*/, "", text); gsub(/[|>]|&&/, "\n", text); gsub(/\n[ \t]+/, "\n", text); print text
      }
      /^```/ { inside = !inside; shell = inside && $0 == "```sh"; next }
      shell { line = line $0; if (sub(/\\$/, "", line)) next; say(line); line = ""; next }
      inside { next }
      { n = split($0, part, "`"); for (i = 2; i < n; i += 2) say(part[i]) }' "$page"
  done
}
# shellcheck disable=SC2086 # a list of files
commands $pages CHANGELOG.md | sed 's/^\([A-Za-z_]*=[^ ]* \)*//' >"$work/commands"

grep '^cc ' "$work/commands" | sort -u >"$work/builds"
while read -r line; do
  # shellcheck disable=SC2086 # words of a command
  case $line in *' -o '*) # others have gaps to fill in
    if $CC $(echo "$line" | sed "s|^cc ||; s|-O[23]|-O0|; s|-o |-o $work/|") 2>"$work/error"; then
      ok "$line"
    else
      bad "$line" "$(grep -m 1 -E 'error|undefined' "$work/error")"
    fi
  esac
done <"$work/builds"

for program in train_gpt mfsdp-plan; do
  [ -x build/examples/$program ] || continue # `make examples` makes them
  build/examples/$program --help >"$work/help"
  exists() { grep -qE "(^|[ ,])$1([ =,]|\$)" "$work/help"; }
  grep -E "^(.*/)?$program(_cuda)? " "$work/commands" | grep -oE '[ ]--[a-z][a-z0-9-]*' | tr -d ' ' |
    all_exist "options of $program" 4
done

# ---- names ----
for page in README.md CONTRIBUTING.md CHANGELOG.md docs/*.md; do
  exists() { [ -e "$(dirname "$page")/$1" ]; }
  grep -o '](\([^)#]*\)' "$page" | sed 's/^](//' | grep -v '^https\{0,1\}:' | all_exist "$page: links" 0
done
exists() { grep -q "^$1:" Makefile mk/*.mk || [ -e "bench/${1#bench-}.c" ]; }
grep '^make ' "$work/commands" | tr ' ' '\n' | grep -xE '[a-z][a-z_-]*' | grep -vx make | all_exist 'make targets' 20
exists() { [ -e "examples/${1%_cuda}.c" ]; } # train_gpt_cuda is train_gpt with more
cat README.md docs/*.md | grep -oE 'build/examples/[a-z_-]+' | sed 's|.*/||' | all_exist 'programs' 2
# Suite.Name; a Name without its suite is in the suite of the name before it.
exists() { grep -rqE "^TEST(_F|_P)?\(${1%.*}, ${1#*.}\)" tests; }
awk -F'|' '/^\| [a-z][0-9]/ {
  gsub(/\([^)]*\)/, "", $4); suite = ""
  n = split($4, words, /[ ,]+/)
  for (i = 1; i <= n; i++) {
    if (words[i] ~ /^[A-Z][A-Za-z]+\.[A-Z][A-Za-z]+$/) { suite = words[i]; sub(/\..*/, "", suite); print words[i] }
    else if (suite && words[i] ~ /^[A-Z][a-z]+[A-Z][A-Za-z]+$/) print suite "." words[i]
  }
}' docs/faults.md | all_exist 'tests of docs/faults.md' 15

# ---- the reference pages ----
if command -v doxygen >/dev/null 2>&1; then
  if make -s docs >"$work/doxygen" 2>&1; then ok 'make docs without warnings'; else
    bad 'make docs without warnings' "$(grep -v '^$' "$work/doxygen" | head -n 3 | tr '\n' ' ')"
  fi
else
  echo "skip $suite: make docs needs doxygen"
fi
