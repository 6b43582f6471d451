#!/bin/sh
# SPDX-License-Identifier: MIT
# mfsdp-plan from the command line: what it prints and writes, and every bad input: exit status 2, one
# line that says what is wrong, nothing written. Prints one line per check: "ok NAME" or "not ok NAME".
set -u
cd "$(dirname "$0")/../.." || exit 1
program=build/examples/mfsdp-plan
suite=mfsdp-plan
. tests/cli/lib.sh

has() { if grep -q -e "$2" "$3"; then ok "$1"; else bad "$1" "no '$2' in: $(head -n 3 "$3" | tr '\n' '|')"; fi; }

# A safetensors file: header length in 8 little-endian bytes, the header, NBYTES zeros.
byte() { printf "\\$(printf '%03o' $(($1 & 255)))"; }
header_length() { for shift in 0 8 16 24; do byte $(($1 >> shift)); done; printf '\000\000\000\000'; }
safetensors() { # FILE JSON NBYTES
  { header_length ${#2}; printf '%s' "$2"; head -c "$3" /dev/zero; } >"$work/$1"
}

# ---- what it does ----
cat >"$work/table" <<'END'
# name           dtype  shape    unit  role         view
embed            bf16   300x64   0     elementwise  -
b.norm           bf16   64       1     elementwise  -      # a comment
b.qkv            bf16   192x64   1     matrix       heads=3
b.out            BF16   64x64    1     matrix       whole
b.experts        bf16   4x64x64  1     matrix       batch
b.gate           bf16   96x64    1     matrix       rows=64,32
head             bf16   300x64   2     elementwise  -      alias=embed
END
$program "$work/table" --world 2,4 --json "$work/json" --svg "$work/svg" >"$work/out" 2>"$work/err"
check 'a table: status' $? 0
check 'a table: nothing on standard error' "$(wc -c <"$work/err" | tr -d ' ')" 0
has 'a table: matrices' '^world 4: 2 units, 10 matrices' "$work/out"
has 'a table: elements' 'matrix *4 tensors *38912 elements' "$work/out"
check 'a table: a row per world and strategy' "$(grep -c '"strategy"' "$work/json")" 16
check 'a table: drawn' "$(grep -c 'on [24] ranks' "$work/svg")" 2
check 'matrixfsdp moves no matrix at the step' \
  "$(grep '"strategy":"matrixfsdp"' "$work/json" | grep -c '"optimizer_nbytes_sum":0[,}]')" 8
check 'the gather strategy does' \
  "$(grep '"strategy":"gather"' "$work/json" | grep -c '"optimizer_nbytes_sum":0[,}]')" 0
$program "$work/table" --world 2,4 >"$work/again" 2>&1
check 'the same again' "$(cmp "$work/out" "$work/again" && echo same)" same

good='{"__metadata__":{"format":"pt"},"model.embed_tokens.weight":{"dtype":"BF16","shape":[8,4],"data_offsets":[0,64]},"model.layers.0.self_attn.q_proj.weight":{"dtype":"BF16","shape":[4,4],"data_offsets":[64,96]},"model.layers.0.input_layernorm.weight":{"shape":[4],"data_offsets":[96,104],"dtype":"BF16"}}'
tail='{"lm_head.weight":{"dtype":"BF16","shape":[8,4],"data_offsets":[0,64]},"model.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[64,72]}}'
safetensors a.safetensors "$good" 104
safetensors b.safetensors "$tail" 72
$program "$work/a.safetensors" "$work/b.safetensors" --world 2 >"$work/out" 2>"$work/err"
check 'two safetensors files: status' $? 0
has 'two safetensors files: units' '^world 2: 3 units, 1 matrices' "$work/out"
has 'the rules are printed' '^\*layers.#.\*_proj.weight *matrix *- *block *1$' "$work/out"
echo '*layers.#.*q_proj.weight elementwise - block+3' >"$work/rules"
$program "$work/a.safetensors" --world 2 --rules "$work/rules" >"$work/out" 2>"$work/err"
has 'a rule of a file comes first' '(--rules)' "$work/out"
has 'and decides' '^world 2: 3 units, 0 matrices' "$work/out"

# Any bytes may name a file; titles hold whole characters.
odd="$work/$(printf 'a\001\377\303\244<.txt')"
cp "$work/table" "$odd"
$program "$odd" --world 2 --json "$work/json" --svg "$work/svg" >"$work/out" 2>"$work/err"
has 'an odd file name in the report' "^a??$(printf '\303\244')<.txt: " "$work/out"
has 'an odd file name in the JSON' "\"input\":\"a??$(printf '\303\244')<.txt\"" "$work/json"
has 'an odd file name in the SVG' ">a??$(printf '\303\244')&lt;.txt on 2 ranks<" "$work/svg"
$program "$work/table" --world 2 --json '' >"$work/out" 2>"$work/err"
check 'an empty name for the JSON: status' $? 2
check 'an empty name for the JSON: nothing printed' "$(wc -c <"$work/out" | tr -d ' ')" 0

printf 'ranks_per_node 2\nnet_nbytes_per_s 1e9\nnet_node_nbytes_per_s 1e9 # one port\n' >"$work/cluster"
$program gpt2-124m --world 8 --cluster "$work/cluster" >"$work/out" 2>"$work/err"
has 'a cluster file' 'cluster: 2 ranks a node, 300 GB/s in a node, 1.0 GB/s a rank' "$work/out"
# What --calibrate writes, --cluster reads: every key, once.
$program --calibrate "$work/measured" --world 2 >"$work/out" 2>"$work/err"
check '--calibrate FILE: status, and nothing printed' "$?$(wc -c <"$work/out" | tr -d ' ')" 00
check '--calibrate FILE: eleven keys' "$(grep -c '^[a-z_][a-z_]* *[0-9.e+-]*' "$work/measured")$(grep -c '^ranks_per_node  *2$' "$work/measured")" 111
has '--calibrate FILE: the rate of Newton-Schulz' '^newton_schulz_flops_per_s  *[1-9]' "$work/measured"
$program gpt2-124m --world 2 --cluster "$work/measured" >"$work/out" 2>"$work/err"
has '--cluster takes it' 'cluster: 2 ranks a node' "$work/out"
$program --calibrate --world 1 >"$work/out" 2>"$work/err"
has '--calibrate prints' '^flops_per_s  *[1-9]' "$work/out"
for model in gpt2-124m gpt2-1.5b llama3-8b llama3-70b qwen3-30b-a3b deepseek-v3 kimi-k2; do
  $program $model --world 64 >"$work/out" 2>"$work/err"
  check "$model" "$?$(grep -c '^world 64' "$work/out")" 01
done
for planner in round-robin role-greedy scope-greedy cost-aware balanced; do
  $program gpt2-124m --world 4 --planner $planner >"$work/out" 2>"$work/err"
  has "planner $planner" "planner $planner, cost newton-schulz" "$work/out"
done
$program gpt2-124m --world 4 --cost elements >"$work/out" 2>"$work/err"
has 'cost elements' 'cost elements' "$work/out"
$program gpt2-124m --world 4 --cost form >"$work/out" 2>"$work/err"
has 'cost form' 'cost form' "$work/out"
$program llama3-8b --world 64 --max-owners 3 --json "$work/json" >"$work/out" 2>"$work/err"
check 'a cap on owners' $? 0
$program --help >"$work/out" 2>"$work/err"
check '--help exits 0' $? 0
has '--help lists the models' 'deepseek-v3' "$work/out"

if [ -w /dev/full ]; then
  $program gpt2-124m --world 2 >/dev/full 2>"$work/err"
  check 'standard output full: status' $? 1
  has 'standard output full: message' '^mfsdp-plan: cannot write to standard output$' "$work/err"
  $program gpt2-124m --world 2 --json /dev/full >"$work/out" 2>"$work/err"
  check 'a full disk for the JSON: status' $? 2
  has 'a full disk for the JSON: message' '^mfsdp-plan: cannot write /dev/full' "$work/err"
fi

$program llama3-8b --world 8 --allow-banded auto --json "$work/json" >"$work/out" 2>"$work/err"
check 'row bands: status' $? 0
has 'row bands: what became of it' '--allow-banded: [1-9][0-9]* of 224 matrices in bands; predicted step' "$work/out"
has 'row bands: predicted' '^  with bands direct ' "$work/out"
has 'row bands: in JSON' '"banded":[1-9]' "$work/json"

# ---- what it refuses ----
rm -f "$work/json" "$work/svg"
refuse() { # NAME TEXT ARGUMENTS...
  name=$1 text=$2
  shift 2
  $program "$@" --json "$work/json" --svg "$work/svg" >"$work/out" 2>"$work/err"
  status=$?
  lines=$(wc -l <"$work/err" | tr -d ' ')
  if [ $status -eq 2 ] && [ "$lines" = 1 ] && grep -q -e "$text" "$work/err" && [ ! -s "$work/out" ] &&
     [ ! -e "$work/json" ] && [ ! -e "$work/svg" ]; then
    ok "refuses $name"
  else
    bad "refuses $name" "status $status, $lines lines: $(head -n 1 "$work/err")"
    rm -f "$work/json" "$work/svg"
  fi
}
hostile() { # NAME TEXT JSON [NBYTES]
  safetensors x.safetensors "$3" "${4:-0}"
  refuse "safetensors: $1" "$2" "$work/x.safetensors" --world 2
}
tensor() { printf '{"lm_head.weight":%s}' "$1"; }

refuse 'no input' 'needs an INPUT' --world 2
refuse 'no world' 'needs --world' gpt2-124m
refuse 'an unknown model' "no built-in model 'gpt5'.*kimi-k2" gpt5 --world 2
refuse 'a missing file' 'cannot read .*missing' "$work/missing" --world 2
refuse 'world 0' 'world' gpt2-124m --world 0
refuse 'a world past 2^20' 'of 1 to 1048576' gpt2-124m --world 1048577
refuse 'an empty world in a list' 'world' gpt2-124m --world 8,,16
refuse 'a negative world' 'world' gpt2-124m --world -4
refuse 'an unknown option' 'bogus' gpt2-124m --world 2 --bogus
refuse 'an option twice' 'twice' gpt2-124m --world 2 --world 4
refuse 'an unknown planner' 'needs round-robin' gpt2-124m --world 2 --planner best
refuse 'an unknown cost' 'needs newton-schulz, form or elements' gpt2-124m --world 2 --cost time
refuse 'a form of too many steps' 'form goes with at most --steps 64' gpt2-124m --world 2 --cost form --steps 65
refuse 'a cost of bytes of 0' "--allow-banded '0': needs a number of 1" gpt2-124m --world 2 --allow-banded 0
refuse 'bands beside a cap on owners' 'allow_banded does not go with caps.max_owners' gpt2-124m --world 2 --allow-banded auto --max-owners 2
refuse 'a cap on bytes that no plan keeps' 'max_resident_nbytes 1000 is [0-9]* too few' gpt2-124m --world 8 --max-resident 1000
refuse 'a cap on gamma that no plan keeps' 'max_gamma_permille 1000 is [0-9]* too low' llama3-8b --world 64 --max-gamma 1000
refuse 'a cap that the planner does not keep' 'does not keep it' gpt2-124m --world 8 --max-owners 2 --planner scope-greedy
refuse 'a gamma below 1' '^mfsdp-plan: --max-gamma .999.: needs a number of 1000' gpt2-124m --world 8 --max-gamma 999
refuse 'an empty file name' '--cluster needs the name of a file' gpt2-124m --world 2 --cluster ''
calibrate_refuses() { # NAME TEXT ARGUMENTS...: without refuse's own options
  name=$1 text=$2
  shift 2
  $program --calibrate "$@" >"$work/out" 2>"$work/err"
  check "refuses $name" "$?$(grep -c -e "$text" "$work/err")" 21
}
calibrate_refuses '--calibrate without ranks' 'needs --world N'
calibrate_refuses '--calibrate with two worlds' 'needs --world N' --world 2,4
calibrate_refuses '--calibrate with two files' 'takes one file, not 2' "$work/a" "$work/b" --world 2
calibrate_refuses '--calibrate with a plan' 'does not use --steps' --world 2 --steps 3
calibrate_refuses '--calibrate over the limit' 'at most 1024 threads' --world 1025
refuse '--transport without --calibrate' 'is for --calibrate' gpt2-124m --world 2 --transport mpi
refuse 'too many steps' '0 to 100' gpt2-124m --world 2 --steps 101
refuse 'rules for a table' 'safetensors' "$work/table" --world 2 --rules "$work/rules"
refuse 'a table among safetensors' 'all of them' "$work/a.safetensors" "$work/table" --world 2

cut_file() { head -c "$1" "$work/a.safetensors" >"$work/x.safetensors"; }
cut_file 0; refuse 'safetensors: empty' 'fewer than 8 bytes' "$work/x.safetensors" --world 2
cut_file 7; refuse 'safetensors: 7 bytes' 'fewer than 8 bytes' "$work/x.safetensors" --world 2
cut_file 100; refuse 'safetensors: cut header' 'truncated: the header' "$work/x.safetensors" --world 2
cut_file $((8 + ${#good} + 90)); refuse 'safetensors: cut data' 'truncated?' "$work/x.safetensors" --world 2
{ header_length 100000001; printf '{}'; } >"$work/x.safetensors"
refuse 'safetensors: a header past 100 MB' 'at most 100000000' "$work/x.safetensors" --world 2
printf '\377\377\377\377\377\377\377\377{}' >"$work/x.safetensors"
refuse 'safetensors: a header of 2^64 - 1' '18446744073709551615' "$work/x.safetensors" --world 2
hostile 'no object' 'JSON object' 'null'
hostile 'an empty one' 'no parameters' '{}'
hostile 'an open object' 'needs , or }' '{"lm_head.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}' 4
hostile 'unknown dtype' "'lm_head.weight': .*unknown dtype 'BF17'" "$(tensor '{"dtype":"BF17","shape":[2],"data_offsets":[0,4]}')" 4
hostile 'a negative size' 'a negative number' "$(tensor '{"dtype":"BF16","shape":[-2],"data_offsets":[0,4]}')" 4
hostile 'an overflowing shape' 'passes 63 bits' "$(tensor '{"dtype":"BF16","shape":[4294967296,4294967296],"data_offsets":[0,4]}')" 4
hostile 'an overflowing number' 'past 63 bits' "$(tensor '{"dtype":"BF16","shape":[9223372036854775808],"data_offsets":[0,4]}')" 4
hostile 'a fraction' 'whole number' "$(tensor '{"dtype":"BF16","shape":[2.5],"data_offsets":[0,4]}')" 4
hostile 'nine dimensions' 'has 9 dimensions, at most 8' "$(tensor '{"dtype":"BF16","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,2]}')" 2
hostile 'a duplicate name' "'lm_head.weight': the tensor is there twice" '{"lm_head.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"lm_head.weight":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}' 8
hostile 'a member twice' 'a member twice' "$(tensor '{"dtype":"BF16","dtype":"BF16","shape":[2],"data_offsets":[0,4]}')" 4
hostile 'an unknown member' 'other than' "$(tensor '{"dtype":"BF16","shape":[2],"offset":0}')" 4
hostile 'a missing member' 'needs dtype, shape' "$(tensor '{"dtype":"BF16","shape":[2]}')" 4
hostile 'another size' 'has 6, needs 4' "$(tensor '{"dtype":"BF16","shape":[2],"data_offsets":[0,6]}')" 6
hostile 'a hole' 'leaves a hole' "$(tensor '{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}')" 8
hostile 'an overlap' 'overlaps' '{"lm_head.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"model.norm.weight":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}}' 6
hostile 'data of nobody' 'belong to no tensor' "$(tensor '{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}')" 9
hostile 'bytes behind the object' 'bytes follow the JSON' '{} x'
hostile 'no rule' "no rule matches tensor 'blob'" '{"blob":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' 4
hostile 'integers' 'role skip' "$(tensor '{"dtype":"I64","shape":[1],"data_offsets":[0,8]}')" 8
hostile 'a vector by a rule for matrices' 'a vector is MFSDP_ROLE_ELEMENTWISE' '{"layers.0.x_proj.weight":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' 4
hostile 'a control character in a name' 'control character' '{"a\u0007b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' 4
refuse 'a tensor in two files' 'is in two of the 2 files' "$work/a.safetensors" "$work/a.safetensors" --world 2

table() { # NAME TEXT LINE
  printf '%s\n' 'w bf16 8x8 0 matrix -' "$3" >"$work/x"
  refuse "table: $1" "$2" "$work/x" --world 2
}
table 'unknown dtype' 'x:2: unknown dtype' 'v int8 8x8 0 matrix -'
table 'a negative size' 'is no shape' 'v bf16 8x-8 0 matrix -'
table 'an overflowing shape' 'elements' 'v bf16 9000000000000x9000000000000 0 matrix -'
table 'a size past 63 bits' 'is no shape' 'v bf16 99999999999999999999 0 matrix -'
table 'unknown unit' "unknown unit 'one'" 'v bf16 8x8 one matrix -'
table 'a unit past the limit' 'unknown unit' 'v bf16 8x8 1048576 matrix -'
table 'unknown role' 'unknown role' 'v bf16 8x8 0 hidden -'
table 'unknown view' 'unknown view' 'v bf16 8x8 0 matrix tiles'
table 'heads that do not divide' 'does not divide' 'v bf16 8x8 0 matrix heads=3'
table 'too few words' 'has 3 words' 'v bf16 8x8'
table 'too many words' 'a word too many' 'v bf16 8x8 0 matrix - x'
table 'a duplicate name' 'the name is taken' 'w bf16 8x8 0 matrix -'
table 'an alias of nobody' 'names no parameter' 'v bf16 8x8 0 matrix - alias=u'
: >"$work/x"; refuse 'table: empty' 'has no tensors' "$work/x" --world 2
printf 'a\000b\n' >"$work/x"; refuse 'table: not text' 'is not text' "$work/x" --world 2

cluster() { # NAME TEXT LINES
  printf '%b' "$3" >"$work/x"
  refuse "cluster: $1" "$2" gpt2-124m --world 2 --cluster "$work/x"
}
cluster 'an unknown key' "unknown key 'nodes'" 'nodes 4\n'
cluster 'a key twice' 'x:2: matrix_us is there twice' 'matrix_us 4\nmatrix_us 5\n'
cluster 'no number' 'needs a number' 'flops_per_s fast\n'
cluster 'a negative rate' 'needs 1 to' 'flops_per_s -1\n'
cluster 'not a number' 'flops_per_s is -\{0,1\}nan' 'flops_per_s nan\n'
cluster 'too many ranks' 'ranks_per_node is 1048577, needs 1 to 1048576$' 'ranks_per_node 1048577\n'
cluster 'half a rank' 'whole number' 'ranks_per_node 1.5\n'
cluster 'no value' 'a key and a value' 'flops_per_s\n'

rules() { # NAME TEXT LINE
  printf '%s\n' "$3" >"$work/x"
  refuse "rules: $1" "$2" "$work/a.safetensors" --world 2 --rules "$work/x"
}
rules 'unknown role' "x:1: unknown role 'dense'" '*.weight dense - block'
rules 'unknown unit' "unknown unit 'middle'" '*.weight matrix - middle'
rules 'block without a number' 'needs a #' '*.weight matrix - block'
rules 'unknown view' 'unknown view' '*layers.#.*q_proj.weight matrix tiles block'
rules 'too few words' 'a rule is' '*.weight matrix'

printf 'w\033[31m bf16 8x8 0 matrix -\n' >"$work/x"
refuse 'table: a terminal command' 'is not text' "$work/x" --world 2

# ---- outputs ----
# An output that is an input, by any name, or the other output: refused before anything is read or written.
overwrites() { # NAME TEXT FILE ARGUMENTS...
  name=$1 text=$2 file=$3
  shift 3
  cp "$file" "$work/before"
  $program "$@" >"$work/out" 2>"$work/err"
  status=$?
  if [ $status -eq 2 ] && grep -q -e "$text" "$work/err" && [ ! -s "$work/out" ] && cmp -s "$file" "$work/before"; then
    ok "refuses $name"
  else
    bad "refuses $name" "status $status: $(head -n 1 "$work/err")"
  fi
}
ln -sf table "$work/link"
overwrites 'to overwrite the table' 'would overwrite the input' "$work/table" "$work/table" --world 2 --json "$work/table"
overwrites 'to overwrite the table through a link' 'would overwrite the input' "$work/table" "$work/table" --world 2 --svg "$work/link"
overwrites 'to overwrite a checkpoint' 'would overwrite the input' "$work/b.safetensors" \
  "$work/a.safetensors" "$work/b.safetensors" --world 2 --json "$work/./b.safetensors"
overwrites 'to overwrite the cluster' 'would overwrite --cluster' "$work/cluster" gpt2-124m --world 2 --cluster "$work/cluster" --svg "$work/cluster"
overwrites 'to overwrite the rules' 'would overwrite --rules' "$work/rules" "$work/a.safetensors" --world 2 --rules "$work/rules" --json "$work/rules"
overwrites 'one file for two outputs' '--json and --svg are one file' "$work/table" gpt2-124m --world 2 --json "$work/new" --svg "$work/./new"
check 'and writes neither' "$(ls "$work"/new* 2>/dev/null)" ''
$program gpt2-124m --world 2 --json "$work/new" --svg "$work/none/out" >"$work/out" 2>"$work/err"
check 'one output that cannot be written: none is' "$?$(ls "$work"/new* 2>/dev/null)$(wc -c <"$work/out" | tr -d ' ')" 20
mkdir "$work/elsewhere" && echo old >"$work/elsewhere/plan" && ln -s elsewhere/plan "$work/to_plan"
$program gpt2-124m --world 2 --json "$work/to_plan" >"$work/out" 2>"$work/err"
check 'a link to an output stays, its file is written' \
  "$?$(readlink "$work/to_plan")$(head -c 1 "$work/elsewhere/plan")$(cd "$work/elsewhere" && echo ./*)" '0elsewhere/plan[./plan'
ln -s elsewhere/none "$work/to_none"
$program gpt2-124m --world 2 --json "$work/to_none" >"$work/out" 2>"$work/err"
check 'refuses a link to nothing' "$?$(grep -c 'cannot write .*to_none' "$work/err")" 21
if [ -c /dev/full ]; then
  $program gpt2-124m --world 2 --json "$work/new" >/dev/full 2>"$work/err"
  check 'a report that cannot be written: no file is' "$?$(ls "$work"/new* 2>/dev/null)$(grep -c 'cannot write to standard output' "$work/err")" 11
fi
$program gpt2-124m --world 2 --json "$work/none/out" >"$work/out" 2>"$work/err"
check 'refuses an unwritable file' "$?$(grep -c 'cannot write .*none/out' "$work/err")$(wc -c <"$work/out" | tr -d ' ')" 210
