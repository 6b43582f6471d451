#!/bin/sh
# SPDX-License-Identifier: MIT
# Two shared libraries that vendor two versions, in one process; and the one name that a linker may see.
cd "$(dirname "$0")/../.." || exit 1
suite=two_libraries
. tests/cli/lib.sh
CC=${CC:-gcc}

# Another version: a struct of the plan is larger and a value differs, so that mixing them would be seen.
mkdir "$work/second"
cp -r mfsdp "$work/second/mfsdp"
sed -i 's/^#define MFSDP_VERSION_MINOR .*/#define MFSDP_VERSION_MINOR 99/' "$work/second/mfsdp/config.h"
sed -i 's/^typedef struct mfsdp_param {$/&\n  double room[7];/' "$work/second/mfsdp/plan/desc.h"
check 'the other version is another one' "$(diff -rq mfsdp "$work/second/mfsdp" | wc -l)" 2

for name in first second; do
  case $name in first) root=. ;; second) root=$work/second ;; esac
  $CC -std=c11 -O0 -fPIC -shared -fvisibility=hidden -DNAME=$name -I"$root" examples/two_libraries/library.c \
    -o "$work/lib$name.so" || bad "$name is built"
  check "$name exports its own names alone" "$(nm -D --defined-only "$work/lib$name.so" | sed 's/.* //' | sort | tr '\n' ' ')" \
    "${name}_pieces ${name}_version "
done
$CC -std=c11 examples/two_libraries/main.c -L"$work" -lfirst -lsecond -Wl,-rpath,"$work" -o "$work/main" || bad 'main is built'
check 'each works by its own version' "$("$work/main")" "first: version 1000, 2 pieces
second: version 99000, 2 pieces"

# Not in two shared libraries but in one program: MFSDP_PREFIX renames what must be external.
names() { echo '#include "mfsdp/cuda/kernels.h"' | $CC "$@" -I. -E -x c - | grep -o '[a-z_]*cuda_kernels_v1' | sort -u | tr '\n' ' '; }
check 'the name of the kernels' "$(names)" 'mfsdp_cuda_kernels_v1 '
check 'with MFSDP_PREFIX' "$(names -DMFSDP_PREFIX=acme)" 'acme_cuda_kernels_v1 '
