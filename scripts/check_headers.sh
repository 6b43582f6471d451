#!/bin/sh
# SPDX-License-Identifier: MIT
# Compiles every header of the library as its first users would, with warnings as errors.
#
#   scripts/check_headers.sh          prints ok/not ok/skip lines and the counts
#
# Each header is included first in a file of its own, then again (so "alone" and "twice" are one
# compilation), as C11, C++11 and C++17, by gcc and clang, and as a .cu file by nvcc, which takes
# seconds for each: there the parts of a header come with their whole only. All headers in one file
# are also compiled as C17, C23 (its draft), C++14 and C++20, and optimized, where warnings about data flow appear.
# -ffast-math must be refused. The switches that config.h documents are set to 0 and 1 in every
# combination, and the optional parts of host/ and mpi/ come in every combination. Last, two .c, two .cpp and two .cu files with all of them are linked
# into one program.
# Headers that need what is not installed (a CBLAS, MPI, CUDA) are skipped and counted.
set -u

if [ "${1-}" = --one ]; then # a job file: its name in line 1, then commands
  IFS= read -r name <"$2" && name=${name#'# '} # a thousand jobs: each program less to start counts
  if sh -eu "$2" >"$2.out" 2>&1; then
    echo "ok $name" >"$2.result"
  else
    { head -n 40 "$2.out"; echo "not ok $name"; } >"$2.result"
  fi
  exit 0
fi

cd "${MFSDP_CHECK_ROOT:-$(dirname "$0")/..}" || exit 1
CC=${CC:-gcc} CXX=${CXX:-g++} CLANG=${CLANG:-clang} CLANGXX=${CLANGXX:-clang++}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM
job_count=0

HOST_WARN='-Wall -Wextra -Wconversion -Wsign-conversion -Wshadow'
WARN="$HOST_WARN -Wpedantic -Wundef -Werror"
MATH='-fno-math-errno -ffp-contract=off'

say() { # RESULT-LINE: keeps its place among the jobs
  job_count=$((job_count + 1))
  echo "$1" >"$tmp/$(printf %04d $job_count).result"
}
job() { # NAME COMMANDS
  job_count=$((job_count + 1))
  printf '# %s\n%s\n' "$1" "$2" >"$tmp/$(printf %04d $job_count).job"
}

. scripts/headers_lib.sh

# ---- what there is to compile with ----
families=''
if compiles '' "$CC" -std=c11; then families="$families gcc"; fi
if have "$CLANG" && compiles '' "$CLANG" -std=c11; then families="$families clang"
else say "skip headers clang: $CLANG is not there or does not compile"; fi

find_nvcc
nvcc_works=0
printf 'int main(void) { return 0; }\n' >"$tmp/probe.cu"
if have "$nvcc" && "$nvcc" -std=c++17 "$tmp/probe.cu" -o "$tmp/probe" >"$tmp/nvcc.out" 2>&1; then
  nvcc_works=1
else
  say "skip headers nvcc: $nvcc is not there or does not compile"
fi

find_vendors || exit 1

# Sets c, cxx and keep, the option that compiles functions which nobody calls (clang has none).
pick_family() {
  case $1 in
  gcc) c=$CC cxx=$CXX keep=-fkeep-inline-functions ;;
  *) c=$CLANG cxx=$CLANGXX keep='' ;;
  esac
}

# compile_jobs NAME FILE_STEM OPTIONS STANDARDS: FILE_STEM.c and .cpp by both families
compile_jobs() {
  for family in $families; do
    pick_family "$family"
    for standard in $4; do
      case $standard in
      c++*) job "$1 $family $standard" "$cxx -std=$standard $WARN $MATH $3 $2.cpp" ;;
      *) job "$1 $family $standard" "$c -std=$standard $WARN $MATH $3 $2.c" ;;
      esac
    done
  done
}

# What another header includes for its users: mfsdp/plan/heap.h, mfsdp/cuda/cuda_dense.h.
is_part() {
  case $1 in
  mfsdp/cuda/cuda_* | mfsdp/cuda/nccl_*) return 0 ;;
  mfsdp/posix/* | mfsdp/host/* | mfsdp/mpi/* | mfsdp/cuda/*) return 1 ;;
  mfsdp/*/*) return 0 ;;
  esac
  return 1
}

nvcc_command() { # FILE OPTIONS OUTPUT
  host=$(printf '%s -Werror %s' "$HOST_WARN" "$MATH" | tr -s ' ' ',')
  echo "$nvcc -std=c++17 -Werror all-warnings -Xcompiler $host $2 -c $1 -o $3"
}

# ---- each header, alone and twice ----
headers=$(library_headers)
all=$tmp/all.h all_flags='-I.'
: >"$all"
for header in $headers; do
  include_flags "$header"
  if [ -n "$absent" ]; then
    say "skip $header: there is no $absent"
    continue
  fi
  stem=$tmp/$(printf '%s' "$header" | tr '/.' '__')
  for suffix in c cpp cu; do
    # The declaration: C wants one in every file, and a header may have none.
    printf '#include "%s"\n#include "%s"\ntypedef int check_unit;\n' "$header" "$header" >"$stem.$suffix"
  done
  compile_jobs "$header" "$stem" "$flags -fsyntax-only" 'c11 c++11 c++17'
  if [ $nvcc_works = 1 ] && ! is_part "$header"; then
    job "$header nvcc c++17" "$(nvcc_command "$stem.cu" "$flags" "$stem.cu.o")"
  fi
  echo "#include \"$header\"" >>"$all"
  add_flags
done
if [ -z "$headers" ]; then say 'not ok headers: there are none'; fi

# ---- the kernels ----
# For two devices and for those to come, with the same warnings as the headers; then in programs of two
# files that use the backend, with and without relocatable device code. Nothing may stay undefined.
kernels=mfsdp/cuda/kernels.cu
hidden='-Xcompiler -fvisibility=hidden'
if [ -f $kernels ] && [ $nvcc_works = 1 ]; then
  for unit in a b; do
    {
      echo '#include "mfsdp/cuda/backend_cuda.h"'
      echo "mfsdp_status make_$unit(mfsdp_context *c, const mfsdp_cuda_backend_desc *d, mfsdp_cuda_backend **out) {"
      echo '  return mfsdp_cuda_backend_create(c, d, out); }'
      [ $unit = a ] || echo 'mfsdp_status make_a(mfsdp_context *, const mfsdp_cuda_backend_desc *, mfsdp_cuda_backend **);
int main() { return make_a(0, 0, 0) == make_b(0, 0, 0) ? 0 : 1; }'
    } >"$tmp/cuda_$unit.cu"
  done
  for rdc in false true; do
    stem=$tmp/rdc_$rdc
    case $rdc in
    false) what='sm_80, sm_90, PTX, linked'
      targets='-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=[sm_90,compute_90]' ;;
    *) what='linked as relocatable device code' targets='-arch=sm_90' ;;
    esac
    job "$kernels $what" "$(nvcc_command $kernels "-O3 -rdc=$rdc $hidden $targets" $stem.k.o)
$nvcc -std=c++17 -arch=sm_90 -rdc=$rdc -I. -c $tmp/cuda_a.cu -o $stem.a.o
$nvcc -std=c++17 -arch=sm_90 -rdc=$rdc -I. -c $tmp/cuda_b.cu -o $stem.b.o
$nvcc -arch=sm_90 -rdc=$rdc $stem.a.o $stem.b.o $stem.k.o -Xlinker --no-undefined,-rpath,$cuda_root/lib64 -lcusolver -lcublas -lcublasLt -o $stem.program
$stem.program"
  done
else
  say "skip $kernels: there is no nvcc"
fi

# ---- switches ----
# -ffast-math is refused with a reason, unless the caller insists; then all headers still compile.
fast_math() { # FAMILY COMPILER STANDARD SUFFIX
  job "fast math refused $1 $3" "! $2 -std=$3 -ffast-math $all_flags -fsyntax-only $tmp/everything.$4 2>$tmp/fast.$1.$4
grep -q 'ffast-math breaks non-finite checks' $tmp/fast.$1.$4"
  job "fast math insisted on $1 $3" \
    "$2 -std=$3 $WARN -ffast-math -DMFSDP_ALLOW_FAST_MATH=1 $all_flags -fsyntax-only $tmp/everything.$4"
}

# "NAME ..." of config.h's comment: ` *   MFSDP_NAME   0   what it does`.
switches=$(sed -n 's/^ \*   \(MFSDP_[A-Z0-9_]*\)  *[01] .*/\1/p' mfsdp/config.h 2>/dev/null | LC_ALL=C sort -u | tr '\n' ' ')
# What the headers ask for. The guards of headers end in _H, private macros begin with MFSDP__.
asked=$(echo "$headers" | xargs -r sed -n 's/^[ \t]*#[ \t]*\(if\|ifdef\|ifndef\|elif\) \(.*\)/\2/p' |
  grep -oE 'MFSDP_[A-Z0-9][A-Z0-9_]*' | grep -v -e '_H$' -e '^MFSDP_PREFIX$' | LC_ALL=C sort -u | tr '\n' ' ')
if [ "$switches" = "$asked" ]; then say "ok switches: those that config.h documents: $switches"
else say "not ok switches: config.h documents '$switches', the headers ask for '$asked'"; fi

# combinations NAME...: a line for each way to give all of them 0 or 1
combinations() {
  if [ $# = 0 ]; then echo ''; return; fi
  first=$1
  shift
  combinations "$@" | sed "s/.*/-D$first=0 &\n-D$first=1 &/"
}

# include_files FILE_STEM HEADERS: the umbrella first, as trainers do
include_files() {
  for suffix in c cpp; do
    # shellcheck disable=SC2086 # a list of headers
    printf '#include "%s"\n' matrixfsdp.h $2 >"$1.$suffix"
    echo 'typedef int check_unit;' >>"$1.$suffix"
  done
}

if printf '%s\n' "$headers" | grep -q '^mfsdp/host/backend_host.h$'; then
  host='mfsdp/host/backend_host.h mfsdp/host/transport_threads.h mfsdp/cuda/kernels.h'
  include_files "$tmp/switches" "$host"
  # shellcheck disable=SC2086 # a list of names
  combinations $switches >"$tmp/combinations"
  while read -r options; do
    for prefix in '' ' -DMFSDP_PREFIX=acme'; do
      compile_jobs "switches: $options$prefix" "$tmp/switches" "-I. $POSIX $options$prefix -fsyntax-only" 'c11 c++17'
    done
  done <"$tmp/combinations"

  # The headers of the parts, beside the host backend alone. One family: all of them take each alone, above.
  every_family=$families
  families=${families%" ${families##* }"}
  : "${families:=$every_family}"
  for parts in 'cblas' 'lapacke' 'cblas lapacke' 'mpi' 'cblas mpi' 'lapacke mpi' 'cblas lapacke mpi'; do
    use=$host what="-I. $POSIX" missing=''
    for part in $parts; do
      case $part in mpi) header=mfsdp/mpi/transport_mpi.h ;; *) header=mfsdp/host/math_$part.h ;; esac
      include_flags "$header"
      use="$use $header" what="$what $flags" missing="$missing$absent"
    done
    if [ -n "$missing" ]; then
      say "skip parts: host $parts: there is no $missing"
      continue
    fi
    stem=$tmp/parts_$(echo "$parts" | tr ' ' _)
    include_files "$stem" "$use"
    compile_jobs "parts: host $parts" "$stem" "$what -fsyntax-only" 'c11 c++17'
  done
  families=$every_family
  # MPI's old C++ classes are there unless the program says that it does without (mpi_world.h).
  include_flags mfsdp/mpi/transport_mpi.h
  if [ -z "$absent" ]; then
    job 'mpi with its C++ classes gcc c++17' \
      "$CXX -std=c++17 $WARN $MATH $(echo "$flags" | sed 's/-D[A-Z]*_SKIP_MPICXX//g') -fsyntax-only $tmp/parts_mpi.cpp"
  fi
  # Two forms of small products: with wide registers, and without.
  if compiles '' "$CC" -mavx512f; then
    job 'host with AVX-512 gcc c11' "$CC -std=c11 -mavx512f $WARN $MATH -I. $POSIX -fsyntax-only $tmp/switches.c"
    job 'host without AVX-512 gcc c11' "$CC -std=c11 -mno-avx512f $WARN $MATH -I. $POSIX -fsyntax-only $tmp/switches.c"
  fi
fi

# ---- all of them together ----
if [ -s "$all" ]; then
  # The order of the folders in a listing is nobody's include order: the umbrella first, as users do.
  stem=$tmp/everything
  for suffix in c cpp cu; do
    { grep matrixfsdp.h "$all"; grep -v matrixfsdp.h "$all"; } >"$stem.$suffix"
  done
  compile_jobs 'all headers' "$stem" "$all_flags -fsyntax-only" 'c17 c2x c++14 c++20'
  for family in $families; do
    pick_family "$family"
    fast_math "$family" "$c" c11 c
    fast_math "$family" "$cxx" c++17 cpp
    job "all headers optimized $family c11" \
      "$c -std=c11 -O3 $WARN $MATH $keep $all_flags -c $stem.c -o $stem.$family.c.o"
    job "all headers optimized $family c++17" \
      "$cxx -std=c++17 -O1 $WARN $MATH $keep $all_flags -c $stem.cpp -o $stem.$family.cpp.o"
  done

  # The door to the kernels, which are linked for real above.
  kernels_stub='' cuda_ld=''
  if grep -q mfsdp/cuda/kernels.h "$all"; then
    printf 'const void *mfsdp_cuda_kernels_v1(void);\nconst void *mfsdp_cuda_kernels_v1(void) { return 0; }\n' >"$tmp/stub.c"
    kernels_stub=$tmp/stub.o
    $CC -c "$tmp/stub.c" -o "$tmp/stub.o" || exit 1
    if [ -n "$CUDA_INC" ]; then cuda_ld=$CUDA_LD; fi
  fi

  # Two files of each language in one program: a second definition of anything is a link error.
  for unit in c1.c c2.c p1.cpp p2.cpp u1.cu u2.cu; do
    {
      cat "$stem.c"
      printf '#if defined(__cplusplus)\nextern "C"\n#endif\nint unit_%s(void);\n' "${unit%.*}"
      printf 'int unit_%s(void) { return 1; }\n' "${unit%.*}"
    } >"$tmp/$unit"
  done
  for family in $families; do
    pick_family "$family"
    units='c1.c c2.c p1.cpp p2.cpp' what='two .c and two .cpp' linker=$cxx
    # nvcc's host compiler is gcc: with clang its files would only be compiled the same way again.
    if [ "$family" = gcc ] && [ $nvcc_works = 1 ]; then
      units="$units u1.cu u2.cu" what='two .c, two .cpp and two .cu' linker=$nvcc
    fi
    main=$tmp/$family.main commands='' objects=''
    {
      for unit in $units; do printf 'int unit_%s(void);\n' "${unit%.*}"; done
      printf 'int main(void) { return %s' "$(echo "$units" | wc -w)"
      for unit in $units; do printf ' - unit_%s()' "${unit%.*}"; done
      printf '; }\n'
    } >"$main.c"
    for unit in $units; do
      object=$main.$unit.o objects="$objects $main.$unit.o"
      case $unit in
      *.c) line="$c -std=c11 $MATH $keep $all_flags -c $tmp/$unit -o $object" ;;
      *.cpp) line="$cxx -std=c++11 $MATH $keep $all_flags -c $tmp/$unit -o $object" ;;
      *.cu) line=$(nvcc_command "$tmp/$unit" "$all_flags" "$object") ;;
      esac
      commands="$commands
$line"
    done
    job "linked together: $what files, $family" "$commands
$c -std=c11 -c $main.c -o $main.o
$linker $main.o $objects $kernels_stub $VENDOR_LD $cuda_ld -lpthread -lm -o $main
$main"
  done
fi

# The long ones were written last: they start first.
find "$tmp" -name '*.job' | LC_ALL=C sort -r | tr '\n' '\0' | xargs -0 -r -n 1 -P "${JOBS:-2}" "$0" --one
find "$tmp" -name '*.result' | LC_ALL=C sort | tr '\n' '\0' | xargs -0 -r cat | tee "$tmp/report"
awk -v jobs="$(find "$tmp" -name '*.job' | wc -l)" -v results="$(find "$tmp" -name '*.job.result' | wc -l)" '
  /^ok /     { passed++ }
  /^not ok / { failed++ }
  /^skip /   { skipped++ }
  END {
    if (jobs != results) { print "not ok headers: " jobs - results " compilations were stopped"; failed++ }
    printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
    exit failed > 0
  }' "$tmp/report"
