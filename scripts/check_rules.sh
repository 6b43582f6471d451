#!/bin/sh
# SPDX-License-Identifier: MIT
# The rules of the library that a compiler does not check. One line a rule: ok, not ok or skip.
#
#   scripts/check_rules.sh                 all rules
#   scripts/check_rules.sh --only RULE     one of them
#   scripts/check_rules.sh --self-test     plants violations in a copy and expects each to be seen
#
# Rules: table layers acyclic apart calls links state symbols macros options sizes lines spdx
set -u

cd "$(dirname "$0")/.." || exit 1
self=scripts/check_rules.sh
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM
. scripts/headers_lib.sh

# ---- the include DAG ----
# HEADER: what it may include directly (core headers of mfsdp/, without .h). BASE stands for
# "config status types memory context". A header may be cut into parts in a folder of its name
# (runtime.h, runtime/step.h): its row holds for them too, they may include each other (`acyclic`
# keeps order among them), and others include only the whole. Whoever needs one more edge adds it
# here, in sight of whoever reviews it.
table() {
  cat <<'END'
config:
status: config
types: config status
memory: config status types
context: config status types memory
random: config types
dtype: config types
backend: BASE
backend_check: BASE backend
transport: BASE backend
cost: config status types
plan: BASE cost
shard: BASE cost plan
simulate: BASE cost plan shard
collective: BASE dtype cost plan shard backend transport
newton_schulz: BASE cost backend
muon: BASE dtype cost backend newton_schulz
adamw: BASE dtype cost backend newton_schulz
precondition: BASE backend
shampoo: BASE dtype cost backend precondition
soap: BASE dtype cost backend precondition
optimizer: BASE dtype cost plan shard backend newton_schulz muon adamw shampoo soap
runtime: BASE random dtype cost plan shard backend transport collective optimizer schedule
safetensors: BASE dtype
io: BASE
schedule: BASE
background: BASE
checkpoint: BASE dtype io background plan shard backend transport optimizer runtime safetensors
launch: BASE
END
}
# The headers that must work without any transport, even through what they include.
APART='newton_schulz muon adamw precondition shampoo soap optimizer'
# All that core may include from outside.
C_HEADERS='ctype.h errno.h float.h inttypes.h limits.h math.h stdarg.h stddef.h stdint.h stdio.h
  stdlib.h string.h'
# Calls that are the program's decision, or that go around the caller's allocator and log.
CALLS='exit _exit _Exit quick_exit at_quick_exit atexit abort raise signal printf fprintf vprintf
  vfprintf dprintf puts fputs putchar putc fputc fwrite perror assert __assert_fail err errx warn warnx
  malloc calloc realloc free aligned_alloc posix_memalign memalign strdup strndup asprintf vasprintf'
# The one place that may call malloc and free: the default allocator.
ALLOCATOR=mfsdp/memory.h
MAX_LINES=900
# Set-up, where descriptions may be read: these files, and functions named _create, _setup_... elsewhere.
# simulate.h answers one description in one call: nothing runs later.
SETUP_FILES='mfsdp/plan/.* mfsdp/simulate/.* mfsdp/runtime/check.h mfsdp/runtime/measure.h mfsdp/runtime/setup.*'
# Not an option but the input of one step.
STEP_INPUTS='mfsdp_step_desc'

# strip FILE...: the files without comments and with empty strings, as FILE:LINE:TEXT lines.
# Names in #include lines stay. Lines keep their numbers.
strip() {
  awk '
    FNR == 1 { comment = 0 }
    {
      line = $0; out = ""; text = 0
      if (!comment && line ~ /^[ \t]*#[ \t]*include/) { sub(/\/[*\/].*/, "", line); print FILENAME ":" FNR ":" line; next }
      if (!comment && line !~ /["\047\/]/) { print FILENAME ":" FNR ":" line; next }
      n = length(line)
      for (i = 1; i <= n; i++) {
        c = substr(line, i, 1); two = substr(line, i, 2)
        if (comment) { if (two == "*/") { comment = 0; i++; out = out " " } }
        else if (text) { if (c == "\\") i++; else if (c == quote) { text = 0; out = out c } }
        else if (two == "/*") { comment = 1; i++ }
        else if (two == "//") break
        else if (c == "\"" || c == "\047") { text = 1; quote = c; out = out c }
        else out = out c
      }
      print FILENAME ":" FNR ":" out
    }' "$@" /dev/null
}

# Sets up $tmp/code (stripped library) and $tmp/edges (FILE LINE KIND TARGET, KIND quote or angle).
read_library() {
  headers=$(library_headers)
  sources="$headers $(find mfsdp -name '*.cu' 2>/dev/null | LC_ALL=C sort)"
  # shellcheck disable=SC2086 # a list of files
  strip $sources >"$tmp/code"
  awk "$AWK_RESOLVE"'
    {
      file = $0; sub(/:.*/, "", file)
      rest = substr($0, length(file) + 2)
      number = rest; sub(/:.*/, "", number)
      text = substr(rest, length(number) + 2)
      if (text !~ /^[ \t]*#[ \t]*include/) next
      sub(/^[ \t]*#[ \t]*include[ \t]*/, "", text)
      name = substr(text, 2); sub(/[">].*/, "", name)
      if (text ~ /^"/) print file, number, "quote", resolve(file, name)
      else if (text ~ /^</) print file, number, "angle", name
      else print file, number, "macro", text
    }' "$tmp/code" >"$tmp/edges"
}

passed=0 failed=0 skipped=0
verdict() { # RULE WHAT: $tmp/found holds the violations
  if [ -s "$tmp/found" ]; then
    sed 's/^/  /' "$tmp/found" | head -n 40
    echo "not ok $1: $2"
    failed=$((failed + 1))
  else
    echo "ok $1: $2"
    passed=$((passed + 1))
  fi
}
skip() { echo "skip $1: $2"; skipped=$((skipped + 1)); }

# ---- include rules ----

rule_table() {
  table | awk '
    function key(path) { # the name that the table uses, or "" outside of core
      if (path !~ /^mfsdp\//) return ""
      sub(/^mfsdp\//, "", path); sub(/\.h$/, "", path)
      if (path ~ /^(posix|host|mpi|cuda)\//) return ""
      sub(/\/.*/, "/", path)   # a part: the name of its folder
      return path
    }
    function allow(from, to) { may[from, to] = 1; may[from "/", to] = 1 }
    NR == FNR {
      name = $1; sub(/:$/, "", name); known[name] = 1
      for (i = 2; i <= NF; i++) {
        if ($i == "BASE") { n = split("config status types memory context", base); for (k = 1; k <= n; k++) allow(name, base[k]) }
        else allow(name, $i)
      }
      known[name "/"] = may[name, name "/"] = may[name "/", name "/"] = 1
      next
    }
    FILENAME ~ /headers$/ { from = key($1); if (from != "" && !(from in known)) print $1 ": not in the table of scripts/check_rules.sh"; next }
    $3 == "macro" { print $1 ":" $2 ": an include through a macro"; next }
    $3 == "quote" {
      from = key($1); to = key($4)
      if (from == "" || to == "") next   # the rule `layers` sees to those
      if (!((from, to) in may)) print $1 ":" $2 ": may not include " $4
    }' - "$tmp/headers" "$tmp/edges" >"$tmp/found"
  while read -r file line kind target; do
    if [ "$kind" = quote ] && [ ! -f "$target" ]; then echo "$file:$line: there is no $target"; fi
  done <"$tmp/edges" >>"$tmp/found"
  verdict table "every include inside the library is one that the table names"
}

rule_layers() {
  awk -v c_headers="$C_HEADERS" '
    function layer(path) {
      if (path == "matrixfsdp.h") return "core"
      if (path !~ /^mfsdp\//) return "outside"
      if (path ~ /^mfsdp\/(posix|host|mpi|cuda)\//) { split(path, part, "/"); return part[2] }
      return "core"
    }
    BEGIN { n = split(c_headers, list); for (i = 1; i <= n; i++) standard[list[i]] = 1 }
    {
      from = layer($1); to = layer($4); bad = 0
      if ($3 == "angle") {
        mpi = $4 ~ /^mpi/; cuda = $4 ~ /^(cuda|cublas|cusolver|nccl|cooperative_groups|nvtx)/
        blas = $4 ~ /^(cblas|lapack|mkl|openblas)/
        if (from == "core") bad = !($4 in standard)
        else bad = (mpi && from != "mpi") || (cuda && from != "cuda") || (blas && from != "host")
      } else if ($3 == "quote") {
        if ($1 == "matrixfsdp.h") bad = to != "core"
        else bad = to != "core" && to != "posix" && to != from
        if (from == "core" && to != "core") bad = 1
        if ($4 == "matrixfsdp.h") bad = 1   # the umbrella stands above all
      }
      if (bad) print $1 ":" $2 ": " from " may not include " $4
    }' "$tmp/edges" >"$tmp/found"
  verdict layers "core includes C headers only; posix/ serves host/, mpi/ and cuda/, which are apart"
}

rule_acyclic() {
  awk '$3 == "quote" { print $1, $4 }' "$tmp/edges" | tsort 2>&1 >/dev/null | sed 's/^tsort: -: //; s/^tsort: //' >"$tmp/found"
  verdict acyclic "no header includes itself, even through others"
}

rule_apart() {
  for name in $APART; do
    [ -f "mfsdp/$name.h" ] || continue
    closure "mfsdp/$name.h" | grep -E '^mfsdp/(transport|collective|runtime)' | sed "s|^|mfsdp/$name.h reaches |"
  done >"$tmp/found"
  verdict apart "optimizers know nothing of transports"
}

# ---- calls, in the text and in what the compiler made of it ----

rule_calls() {
  awk -v calls="$CALLS" -v allocator="$ALLOCATOR" '
    BEGIN { n = split(calls, list); for (i = 1; i <= n; i++) forbidden[list[i]] = 1 }
    {
      file = $0; sub(/:.*/, "", file)
      rest = substr($0, length(file) + 2)
      number = rest; sub(/:.*/, "", number)
      text = substr(rest, length(number) + 2)
      # Every NAME( that is not a member (x.free(, x->free() or an attribute (format(printf, ...).
      before = ""
      while (match(text, /[A-Za-z_][A-Za-z_0-9]*/)) {
        name = substr(text, RSTART, RLENGTH)
        before = substr(text, 1, RSTART - 1); after = substr(text, RSTART + RLENGTH)
        if ((name in forbidden) && after ~ /^[ \t]*\(/ && before !~ /(\.|->)[ \t]*$/ &&
            !(file == allocator && (name == "malloc" || name == "free")))
          print file ":" number ": " name "()"
        if (name ~ /^(stdout|stderr)$/) print file ":" number ": " name
        text = after
        if (before ~ /(\.|->)[ \t]*$/ ) before = ""
      }
    }' "$tmp/code" >"$tmp/found"
  verdict calls "no call that ends the program, prints, asserts or goes around the allocator"
}

# everything: $tmp/all.c includes all headers that can be compiled here, $tmp/all.o is its object.
everything() {
  [ ! -e "$tmp/all.state" ] || { [ "$(cat "$tmp/all.state")" = made ]; return; }
  echo failed >"$tmp/all.state"
  find_vendors || return 1
  if [ -n "${MFSDP_CHECK_ALL-}" ]; then # an earlier run asked for each header
    cp "$MFSDP_CHECK_ALL/all.c" "$tmp/all.c" && all_flags=$(cat "$MFSDP_CHECK_ALL/all.flags") &&
      left_out=$(cat "$MFSDP_CHECK_ALL/all.left_out") || return 1
  else include_everything; fi
  # Without -fkeep-inline-functions nothing of a header of static inline functions would be compiled;
  # without -fno-toplevel-reorder variables that nobody uses would vanish.
  # shellcheck disable=SC2086
  ${CC:-gcc} -std=c11 -O0 -w -fno-pic -fkeep-inline-functions -fno-toplevel-reorder -U_FORTIFY_SOURCE \
    $all_flags -c "$tmp/all.c" -o "$tmp/all.o" >"$tmp/all.out" 2>&1 || return 1
  nm "$tmp/all.o" >"$tmp/all.nm" 2>>"$tmp/all.out" || return 1
  echo made >"$tmp/all.state"
}

# Sets all_flags and left_out, and writes $tmp/all.c.
include_everything() {
  all_flags='-I.' left_out=''
  : >"$tmp/all.c"
  for header in $headers; do
    include_flags "$header"
    if [ -n "$absent" ]; then left_out="$left_out $header"; continue; fi
    echo "#include \"$header\"" >>"$tmp/all.c"
    add_flags
  done
  echo 'typedef int check_unit;' >>"$tmp/all.c"
}

# compiled RULE: true if the object is there; says otherwise why it is not
compiled() {
  if ! have nm; then
    skip "$1" 'there is no nm'
  elif ! everything; then
    if grep -q 'fkeep-inline-functions\|fno-toplevel-reorder' "$tmp/all.out"; then
      skip "$1" "${CC:-gcc} cannot keep inline functions"
    else
      head -n 20 "$tmp/all.out" | sed 's/^/  /'
      echo "not ok $1: all headers together do not compile"
      failed=$((failed + 1))
    fi
  else
    return 0
  fi
  return 1
}

rule_links() {
  compiled links || return 0
  awk -v calls="$CALLS" '
    BEGIN { n = split(calls, list); for (i = 1; i <= n; i++) forbidden[list[i]] = 1; delete forbidden["malloc"]; delete forbidden["free"] }
    $1 == "U" && ($2 in forbidden || $2 == "stdout" || $2 == "stderr") { print "the compiled headers call " $2 }
  ' "$tmp/all.nm" >"$tmp/found"
  verdict links "nor does the compiled code, whatever macros hide"
}

rule_state() {
  compiled state || return 0
  awk 'NF == 3 && $2 ~ /^[dDbBcCsSgG]$/ { print $3 " is mutable static data" }' "$tmp/all.nm" >"$tmp/found"
  verdict state "no mutable data at file scope or in functions"
}

rule_symbols() {
  compiled symbols || return 0
  # The toolkit's and the system's headers define functions too: those that are there without ours are
  # theirs. Of them those that this machine has.
  grep -hE '^[ \t]*#[ \t]*include[ \t]*<(cu|nccl|netinet)' $headers | LC_ALL=C sort -u >"$tmp/vendors"
  : >"$tmp/vendor.c"
  while IFS= read -r line; do
    # shellcheck disable=SC2086
    if printf '%s\n' "$line" | ${CC:-gcc} $all_flags -E -x c - >/dev/null 2>&1; then printf '%s\n' "$line" >>"$tmp/vendor.c"; fi
  done <"$tmp/vendors"
  # shellcheck disable=SC2086
  if [ -s "$tmp/vendor.c" ] && ${CC:-gcc} -std=c11 -O0 -w -fkeep-inline-functions $all_flags -c "$tmp/vendor.c" \
    -o "$tmp/vendor.o" 2>/dev/null; then nm "$tmp/vendor.o" >"$tmp/vendor.nm"; else : >"$tmp/vendor.nm"; fi
  awk '
    FILENAME ~ /vendor.nm$/ { theirs[$NF] = 1; next }
    NF == 3 && $2 ~ /^[A-Zvwu]$/ { print $3 " is visible outside of its object" }
    NF == 3 && $2 == "t" && $3 !~ /^mfsdp_/ && !($3 in theirs) { print $3 "() does not begin with mfsdp_" }
  ' "$tmp/vendor.nm" "$tmp/all.nm" >"$tmp/found"
  verdict symbols "nothing is exported, every function is named mfsdp_"
}

rule_macros() {
  everything || : # only all.c and its flags matter here
  for language in c c++; do
    case $language in c) compiler="${CC:-gcc} -std=c11" ;; *) compiler="${CXX:-g++} -std=c++11" ;; esac
    # -dD keeps the definitions in their places, below lines that say which file follows.
    # shellcheck disable=SC2086
    $compiler -x $language $all_flags -dD -E "$tmp/all.c" 2>"$tmp/macros.out" | awk '
      /^# [0-9]+ "/ { file = $3; gsub(/"|^"\.\//, "", file); ours = file ~ /^(mfsdp\/|matrixfsdp\.h)/ }
      ours && /^#(define|undef) / { name = $2; sub(/\(.*/, "", name); if (name !~ /^MFSDP_/) print file ": " $1 " " name }'
    head -n 5 "$tmp/macros.out"
  done | LC_ALL=C sort -u >"$tmp/found"
  verdict macros "every macro begins with MFSDP_"
}

# ---- what set-up decides ----

# An executor can reach an option only through an object that kept its description: so every mention of
# such a member outside of set-up is a violation, whatever is done with it. The context's options are
# run-time switches, and the folders below core implement vtables: both are left out.
rule_options() {
  awk -v setup_files="$SETUP_FILES" -v inputs="$STEP_INPUTS" '
    BEGIN {
      n = split(setup_files, list); for (i = 1; i <= n; i++) setup[i] = "^" list[i] "$"
      setup_count = n
      n = split(inputs, list); for (i = 1; i <= n; i++) input[list[i]] = 1
    }
    {
      file = $0; sub(/:.*/, "", file)
      rest = substr($0, length(file) + 2)
      number = rest; sub(/:.*/, "", number)
      text = substr(rest, length(number) + 2)
      if (file !~ /^mfsdp\// || file ~ /^mfsdp\/(posix|host|mpi|cuda)\//) next
    }
    NR == FNR {   # first: members of a description type in structs that are no description
      if (text ~ /^(typedef )?struct [a-z0-9_]+ *\{/) { holder = text; sub(/^(typedef )?struct /, "", holder); sub(/ *\{.*/, "", holder) }
      if (text ~ /^}/) holder = ""
      if (holder == "" || holder ~ /_desc$/ || holder == "mfsdp_context" || holder == "mfsdp_hyper_group") next
      if (match(text, /mfsdp_[a-z0-9_]+_desc[ *]+[a-z0-9_]+ *[;,[]/)) {
        type = member = substr(text, RSTART, RLENGTH)
        sub(/[ *].*/, "", type)
        sub(/ *[;,[]$/, "", member); sub(/^.*[ *]/, "", member)
        if (!(type in input)) kept[member] = 1
      }
      next
    }
    FNR == 1 || file != last { name = ""; last = file }
    text ~ /^MFSDP_API/ { name = ""; heading = 1 }
    heading && match(text, /mfsdp_[a-z0-9_]+\(/) { name = substr(text, RSTART, RLENGTH - 1); heading = 0 }
    {
      allowed = name ~ /_create$|__setup(_|$)/
      for (i = 1; i <= setup_count; i++) if (file ~ setup[i]) allowed = 1
      for (member in kept) {
        tail = text
        while (match(tail, "(->|\\.)" member "[^a-z0-9_]") || match(tail, "(->|\\.)" member "$")) {
          before = substr(tail, 1, RSTART - 1)
          tail = substr(tail, RSTART + RLENGTH - 1)
          if (before ~ /(^|[^a-z0-9_])context$/ || allowed) continue
          print file ":" number ": " (name == "" ? "a macro" : name "()") " reads a kept description, ." member
          if (tail !~ /[^ ]/) break
        }
      }
    }
    text ~ /^}/ { name = "" }
  ' "$tmp/code" "$tmp/code" >"$tmp/found"
  verdict options "options are read by set-up, never by what runs later"
}

# Every struct has one size, whatever the language, the optimizer and the switches of config.h.
rule_sizes() {
  compiled sizes || return 0
  awk -v left_out="$left_out" '
    BEGIN { n = split(left_out, list, " "); for (i = 1; i <= n; i++) absent[list[i]] = 1 }
    /^[^:]*\.cu:/ { next }   # its own, compiled by nvcc
    { file = $0; sub(/:.*/, "", file); if (file in absent) next }
    {
      text = $0; sub(/^[^:]*:[0-9]*:/, "", text)
      if (text ~ /^(typedef )?struct mfsdp_[a-z0-9_]+ *(\{|$)/) {
        sub(/^(typedef )?struct /, "", text); sub(/[ {].*/, "", text); print text
      }
    }' "$tmp/code" | LC_ALL=C sort -u >"$tmp/structs"
  {
    cat "$tmp/all.c"
    echo '#include <stdio.h>'
    echo 'int main(void) {'
    sed 's/.*/printf("%s %zu\\n", "&", sizeof(struct &));/' "$tmp/structs"
    echo 'return 0; }'
  } >"$tmp/sizes.c"
  switches=$(sed -n 's/^#ifndef \(MFSDP_[A-Z0-9][A-Z0-9_]*\)$/\1/p' $headers | grep -v '_H$' | LC_ALL=C sort -u)
  sizes_of "$tmp/sizes.first" "${CC:-gcc} -std=c11" &&
    [ -s "$tmp/sizes.first" ] || echo 'the sizes cannot be printed' >"$tmp/sizes.failed"
  {
    compare_sizes 'C++' "${CXX:-g++} -std=c++11 -x c++"
    compare_sizes 'NDEBUG, optimized' "${CC:-gcc} -std=c11 -O2 -DNDEBUG"
    for switch in $switches; do
      for value in 0 1; do compare_sizes "$switch=$value" "${CC:-gcc} -std=c11 -D$switch=$value"; done
    done
    cat "$tmp/sizes.failed" 2>/dev/null
  } >"$tmp/found"
  verdict sizes "every struct has one size, in C and C++ and under every switch ($(wc -l <"$tmp/structs") structs)"
}
sizes_of() { # OUTPUT COMPILER
  # shellcheck disable=SC2086
  $2 -w $all_flags "$tmp/sizes.c" -o "$tmp/sizes" $VENDOR_LD -lpthread -lm >"$tmp/sizes.out" 2>&1 && "$tmp/sizes" >"$1"
}
compare_sizes() { # WHAT COMPILER
  if sizes_of "$tmp/sizes.now" "$2"; then
    LC_ALL=C join "$tmp/sizes.first" "$tmp/sizes.now" | awk -v what="$1" '$2 != $3 { print $1 ": " $2 " bytes, " $3 " with " what }'
  else
    echo "with $1: $(head -n 1 "$tmp/sizes.out")"
  fi
}

# ---- files ----

rule_lines() {
  for header in $headers; do
    count=$(wc -l <"$header")
    [ "$count" -le $MAX_LINES ] || echo "$header: $count lines"
  done >"$tmp/found"
  verdict lines "no header has more than $MAX_LINES lines"
}

rule_spdx() {
  find . \( -path ./build -o -path ./.git \) -prune -o -type f \( -name '*.h' -o -name '*.c' -o -name '*.cpp' \
    -o -name '*.cu' -o -name '*.cuh' -o -name '*.sh' -o -name '*.py' -o -name '*.mk' -o -name Makefile \
    -o -path './.ci/*' \) -print | LC_ALL=C sort | while read -r file; do
    head -n 3 "$file" | grep -q 'SPDX-License-Identifier: MIT' || echo "$file"
  done >"$tmp/found"
  verdict spdx "every source file names its licence in its first three lines"
}

RULES=$(sed -n 's/^# Rules: //p' "$self")

check() { # RULE...
  read_library
  printf '%s\n' "$headers" >"$tmp/headers"
  if [ -z "$headers" ]; then echo 'not ok rules: there are no headers'; failed=1; return; fi
  for rule in "$@"; do "rule_$rule"; done
  # What could not be compiled was not checked: it is said, and counted.
  for header in ${left_out-}; do skip "compiled rules" "$header needs what is not installed"; done
}

# ---- self-test ----

# The plants are dealt out to JOBS parts, each with a copy of its own.
self_test() {
  headers=$(library_headers)
  find_vendors || return 1
  include_everything
  echo "$all_flags" >"$tmp/all.flags"
  echo "$left_out" >"$tmp/all.left_out"
  # Probed once, not once a plant.
  export MFSDP_CHECK_CONFIG="$tmp/config.mk" MFSDP_CHECK_ALL="$tmp"
  jobs=${JOBS:-2} part=0
  while [ $part -lt "$jobs" ]; do
    "$self" --self-test-part $part "$jobs" >"$tmp/part.$part" 2>&1 &
    part=$((part + 1))
  done
  wait
  grep -hvE '^[0-9]+ passed, ' "$tmp"/part.*
  passed=$(cat "$tmp"/part.* | grep -c '^ok ')
  failed=$(cat "$tmp"/part.* | grep -c '^not ok ')
  skipped=$(cat "$tmp"/part.* | grep -c '^skip ')
  if [ "$(cat "$tmp"/part.* | grep -cE '^[0-9]+ passed, ')" != "$jobs" ]; then
    echo 'not ok self-test: a part of it ended early'
    failed=$((failed + 1))
  fi
}

turn=0
mine() { # whether the next plant is this part's
  turn=$((turn + 1))
  [ $((turn % parts)) = "$part" ]
}

# plant RULE SAYS NAME FILE TEXT: appends TEXT to FILE in the copy and expects RULE to turn red for
# that reason, with SAYS in what it prints.
plant() {
  mine || return 0
  [ -f "$4" ] || { skip "plant $3" "there is no $4"; return; }
  cp "$4" "$tmp/keep"
  printf '#ifndef MFSDP__PLANTED\n#define MFSDP__PLANTED 1\n%b\n#endif\n' "$5" >>"$copy/$4"
  expect_red "$1" "$2" "$3"
  cp "$tmp/keep" "$copy/$4"
}
add() { # RULE SAYS NAME FILE TEXT: the same with a new file
  mine || return 0
  mkdir -p "$copy/$(dirname "$4")"
  printf '%b\n' "$5" >"$copy/$4"
  expect_red "$1" "$2" "$3"
  rm "$copy/$4"
}
expect_red() { # RULE SAYS NAME
  "$copy/$self" --only "$1" >"$tmp/self.out" 2>&1
  grep -q "^not ok $1" "$tmp/self.out" && grep -qF "$2" "$tmp/self.out"
  told $? "plant $3" "to see \`not ok $1\` and \`$2\`"
}
expect_green() { # RULE NAME
  mine || return 0
  "$copy/$self" --only "$1" >"$tmp/self.out" 2>&1
  grep -qE "^(ok|skip) $1" "$tmp/self.out"
  told $? "plant $2, $1" "to see \`ok $1\`"
}
told() { # STATUS NAME EXPECTED
  if [ "$1" = 0 ]; then
    echo "ok $2"
    passed=$((passed + 1))
  else
    sed 's/^/  /' "$tmp/self.out"
    echo "not ok $2: expected $3"
    failed=$((failed + 1))
  fi
}

self_test_part() { # PART PARTS
  part=$1 parts=$2
  copy=$tmp/copy
  mkdir "$copy"
  tar -cf - --exclude=./build --exclude=./.git . | tar -xf - -C "$copy"
  types=mfsdp/types.h
  # Where a rule is broken already, the plant proves nothing.
  for rule in $RULES; do expect_green "$rule" 'nothing'; done

  plant table 'may not include mfsdp/plan.h' 'an edge that the table lacks' mfsdp/backend.h '#include "plan.h"'
  plant table 'may not include mfsdp/muon.h' 'an optimizer in the runtime' mfsdp/runtime.h '#include "muon.h"'
  add table 'not in the table' 'a header that the table lacks' mfsdp/unheard.h ''
  add table 'not in the table' 'a folder that the table lacks' mfsdp/unheard/part.h ''
  add table 'may not include mfsdp/plan.h' 'a part that reaches further than its whole' mfsdp/cost/part.h '#include "../plan.h"'
  plant table 'may not include mfsdp/plan/' "another header's part" mfsdp/shard.h '#include "plan/desc.h"'
  plant table 'no mfsdp/no_such.h' 'an include of no file' $types '#include "no_such.h"'
  plant layers 'core may not include pthread.h' 'an OS header in core' $types '#include <pthread.h>'
  plant layers 'core may not include mpi.h' 'a vendor header in core' $types '#  include <mpi.h>'
  plant layers 'core may not include mfsdp/posix' 'posix in core' $types '#include "posix/clock.h"'
  add layers 'mpi may not include mfsdp/host' 'host in mpi' mfsdp/mpi/planted.h '#include "../host/backend_host.h"'
  add layers 'posix may not include mfsdp/host' 'host in posix' mfsdp/posix/planted.h '#include "../host/backend_host.h"'
  add layers 'host may not include mpi.h' 'MPI in host' mfsdp/host/planted.h '#include <mpi.h>'
  add layers 'posix may not include cuda' 'CUDA in posix' mfsdp/posix/planted.h '#include <cuda_runtime.h>'
  plant layers 'core may not include mfsdp/host' 'host in the umbrella' matrixfsdp.h '#include "mfsdp/host/backend_host.h"'
  plant acyclic 'mfsdp/status.h' 'a cycle of two' mfsdp/config.h '#include "status.h"'
  plant apart 'newton_schulz.h reaches mfsdp/transport.h' 'a transport behind an optimizer' mfsdp/newton_schulz.h '#include "transport.h"'
  for call in 'exit(1)' 'abort ()' 'printf("x")' 'fprintf(stderr, "x")' 'assert(0)' 'free(malloc(1))' '(void)stderr'; do
    says=${call%%(*}
    case $call in '(void)'*) says=stderr ;; abort*) says='abort()' ;; esac
    plant calls "$says" "$call" $types "static inline void mfsdp__planted(void) { $call; }"
  done
  plant calls 'abort()' 'a call behind a comment' $types '/* fine */ static inline void mfsdp__planted(void) { abort(); }'
  plant calls 'abort()' 'a call behind a member of that name' $types 'static inline void mfsdp__planted(void) { x->free(1), abort(); }'
  plant links 'call abort' 'abort by token pasting' $types \
    '#include <stdlib.h>\n#define MFSDP__P(a, b) a##b\nstatic inline void mfsdp__planted(void) { MFSDP__P(ab, ort)(); }'
  plant state mfsdp__planted 'a counter at file scope' $types 'static int mfsdp__planted;'
  plant state mfsdp__planted 'an initialized table at file scope' $types 'static int mfsdp__planted[2] = {1, 2};'
  plant state planted_count 'a counter in a function' $types \
    'static inline int mfsdp__planted(void) { static int planted_count; return ++planted_count; }'
  plant symbols 'mfsdp_planted is visible' 'an exported function' $types 'int mfsdp_planted(void) { return 1; }'
  plant symbols 'mfsdp_planted is visible' 'an exported constant' $types 'const int mfsdp_planted = 1;'
  plant symbols 'planted() does not begin' 'a function of another name' $types 'static inline int planted(void) { return 1; }'
  plant macros '#define PLANTED' 'a macro of another name' $types '#define PLANTED 1'
  plant macros '#define PLANTED' 'a macro of another name, in C++ only' $types '#ifdef __cplusplus\n#define PLANTED(x) x\n#endif'
  plant macros '#define _XOPEN_SOURCE' 'a feature-test macro' $types '#define _XOPEN_SOURCE 700'
  planted='typedef struct mfsdp_planted_desc { int x; } mfsdp_planted_desc;\ntypedef struct mfsdp_planted {\n'
  plant options 'mfsdp_planted_run() reads a kept description, .desc' 'an option read by an executor' mfsdp/collective.h \
    "$planted"'  mfsdp_planted_desc desc;\n} mfsdp_planted;\nMFSDP_API int mfsdp_planted_run(const mfsdp_planted *p)\n{\n  return p->desc.x;\n}'
  plant options 'mfsdp_planted_run() reads a kept description, .how' 'a description behind a pointer' mfsdp/optimizer.h \
    "$planted"'  const mfsdp_planted_desc *how;\n} mfsdp_planted;\nMFSDP_API int\n  mfsdp_planted_run(const mfsdp_planted *p)\n{\n  const mfsdp_planted_desc *d = p->how;\n  return d->x;\n}'
  plant sizes 'mfsdp_planted:' 'a struct that a switch changes' $types \
    'struct mfsdp_planted {\n  int a;\n#if MFSDP_ALLOW_FAST_MATH\n  int b;\n#endif\n};'
  plant sizes 'mfsdp_planted:' 'a struct that C++ changes' $types \
    'struct mfsdp_planted {\n  int a;\n#ifdef __cplusplus\n  int b;\n#endif\n};'
  plant lines 'mfsdp/types.h' 'a long header' $types "$(awk 'BEGIN { for (i = 0; i < 901; i++) printf "\\n" }')"
  add spdx scripts/planted.sh 'a script without a licence line' scripts/planted.sh '#!/bin/sh'
  add spdx tests/planted_test.cpp 'a test without a licence line' tests/planted_test.cpp 'int planted;'

  # And what only looks like a violation stays green.
  cat >>"$copy/$types" <<'END'
#ifndef MFSDP__PLANTED
#define MFSDP__PLANTED 1
/* abort(); "printf(" */ // exit(1)
static const int mfsdp__table[2] = {1, 2};
struct mfsdp__ops { void (*free)(void *); void (*abort)(void); };
typedef struct mfsdp_planted_desc { int x; } mfsdp_planted_desc;
typedef struct mfsdp_planted {
  mfsdp_planted_desc desc; /* p->desc.x */
} mfsdp_planted;
MFSDP_API int mfsdp_planted_create(const mfsdp_planted *p) {
  return p->desc.x;
}
MFSDP_API int mfsdp_planted_run(const mfsdp_planted_desc *desc) {
  return desc->x;
}
static inline const char *mfsdp__planted(struct mfsdp__ops *ops, struct mfsdp__ops by_value) {
  static const char *const texts[2] = {"exit(1) /* \" free(", "it's // not"};
  ops->abort(), by_value.free(0);
  return texts[mfsdp__table[0] - 1]; /* don't
  assert(0); */
}
#endif
END
  for rule in $RULES; do expect_green "$rule" 'look-alikes'; done
}

case ${1-} in
'') # shellcheck disable=SC2086
  check $RULES ;;
--only)
  case " $RULES " in *" ${2-} "*) check "$2" ;; *) echo "rules: $RULES" >&2; exit 2 ;; esac ;;
--self-test) self_test ;;
--self-test-part) self_test_part "$2" "$3" ;;
*) sed -n '3,9p' "$0" >&2; exit 2 ;;
esac
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
