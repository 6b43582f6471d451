#!/bin/sh
# SPDX-License-Identifier: MIT
# Installed copies, found by pkg-config, CMake and a bare compiler line; releases and the single header.
cd "$(dirname "$0")/../.." || exit 1
suite=install
. tests/cli/lib.sh
CC=${CC:-gcc} CXX=${CXX:-g++}
math='-O0 -fno-math-errno -ffp-contract=off'
prefix=$work/prefix
run() { # NAME COMMAND...: ok if it ends with 0
  name=$1
  shift
  if "$@" >"$work/log" 2>&1; then ok "$name"; else bad "$name" "$(tail -n 5 "$work/log" | tr '\n' ' ')"; fi
}

# A user's program in C and in C++: two files of each language, linked together.
mkdir "$work/user"
cat >"$work/user/main.c" <<'END'
#include <stdio.h>
#include USER_HEADER
int other(void);
int main(void) {
  mfsdp_param params[2] = {mfsdp_param_default(), mfsdp_param_default()};
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  mfsdp_plan *plan = NULL;
  int pieces = 0;
  params[0].name = "a";
  params[1].name = "b";
  params[0].unit = params[1].unit = 0;
  params[0].role = params[1].role = MFSDP_ROLE_MATRIX;
  params[0].ndim = params[1].ndim = 2;
  params[0].shape[0] = params[0].shape[1] = params[1].shape[0] = params[1].shape[1] = 64;
  desc.params = params;
  desc.param_count = 2;
  desc.world = 2;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) return 1;
  if (mfsdp_plan_create(&context, &desc, &plan) != MFSDP_OK) return 1;
  mfsdp_plan_pieces(plan, -1, &pieces);
  mfsdp_plan_destroy(&context, plan);
  printf("%d %d\n", pieces, other());
  return mfsdp_context_destroy(&context) != MFSDP_OK;
}
END
cat >"$work/user/other.c" <<'END'
#include USER_HEADER
#ifdef __cplusplus
extern "C"
#endif
int other(void);
int other(void) { return MFSDP_VERSION; }
END
sed 's/^int other(void);$/extern "C" int other(void);/' "$work/user/main.c" >"$work/user/main.cpp"
cp "$work/user/other.c" "$work/user/other.cpp"
version=$(sed -n 's/^#define MFSDP_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' mfsdp/config.h | paste -sd.)
wanted="2 $(echo "$version" | awk -F. '{ print $1 * 1000000 + $2 * 1000 + $3 }')"

# NAME HEADER FLAGS LIBRARIES: as C and as C++; what it prints, and that nothing but main and other is exported
build() {
  for language in c cpp; do
    case $language in c) compiler="$CC -std=c11" ;; cpp) compiler="$CXX -std=c++11" ;; esac
    # shellcheck disable=SC2086 # lists of words
    if $compiler -DUSER_HEADER="\"$2\"" $3 "$work/user/main.$language" "$work/user/other.$language" -o "$work/a.out" $4 \
      >"$work/log" 2>&1; then
      check "$1 ($language)" "$("$work/a.out")" "$wanted"
    else
      bad "$1 ($language)" "$(head -n 3 "$work/log" | tr '\n' ' ')"
    fi
  done
}

# ---- install ----
run 'make install' make -s install PREFIX="$prefix"
check 'every header is installed' "$(cd "$prefix/include" && find . -type f | LC_ALL=C sort)" \
  "$(find ./matrixfsdp.h ./mfsdp -name '*.h' -o -name '*.cu' | LC_ALL=C sort)"
check 'nothing is left to fill in' "$(grep -rl '@[A-Z]*@' "$prefix/share")" ''
check 'files are for all to read' "$(find "$prefix" -type f ! -perm 644)" ''
build 'a bare compiler line' matrixfsdp.h "-I$prefix/include $math" '-lm'

# ---- a piece of it, from a copy of mfsdp/: one include and at most one link flag, no POSIX, no threads ----
mkdir "$work/bare"
cp -R mfsdp "$work/bare"
build 'the planner alone' mfsdp/plan.h "-I$work/bare $math" ''
cat >"$work/user/alone.c" <<'END'
#include USER_HEADER
int main(void) {
  const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  const float g[6] = {3, 0, 0, 0, -2, 0};
  float out[6];
  mfsdp_status status = mfsdp_host_newton_schulz(NULL, NULL, &ns, 2, 3, g, out, NULL, 0);
  int near = out[0] > 0.68f && out[0] < 1.14f && out[4] < -0.68f && out[4] > -1.14f;
  printf("%s %d\n", mfsdp_status_name(status), near);
  return 0;
}
END
cp "$work/user/alone.c" "$work/user/alone.cpp"
alone='-DUSER_HEADER="mfsdp/host/newton_schulz_host.h"'
for compiler in "$CC -std=c11" "$CXX -std=c++11"; do
  suffix=c
  [ "$compiler" = "$CC -std=c11" ] || suffix=cpp
  # shellcheck disable=SC2086 # words of a command
  run "Newton-Schulz alone, $compiler" $compiler $math "$alone" -I"$work/bare" "$work/user/alone.$suffix" -lm -o "$work/a.out"
  check "its result, $compiler" "$("$work/a.out") $(nm -u "$work/a.out" | grep -c pthread)" 'MFSDP_OK 1 0'
done

run 'DESTDIR stands before the prefix' make -s install PREFIX=/opt/mfsdp DESTDIR="$work/stage"
check 'and in no file' "$(grep -rl "$work" "$work/stage")" ''
touch "$work/stage/opt/mfsdp/include/mfsdp/gone.h"
run 'a second installation' make -s install PREFIX=/opt/mfsdp DESTDIR="$work/stage"
check 'leaves nothing of the first' "$(find "$work/stage" -name gone.h)" ''
run 'make uninstall' make -s uninstall PREFIX=/opt/mfsdp DESTDIR="$work/stage"
check 'leaves no file' "$(find "$work/stage" -type f)" ''
for bad_prefix in relative '/with space' '/with$dollar' '/with|bar'; do
  PREFIX=$bad_prefix DESTDIR=$work/bad scripts/install.sh install >"$work/log" 2>&1
  check "PREFIX=$bad_prefix is refused" "$?" 2
done
check 'and nothing was written' "$(find "$work/bad" 2>/dev/null)" ''
scripts=$PWD/scripts
(cd "$work" && DESTDIR="sub/it's \$x" PREFIX=/opt/@VERSION@ sh "$scripts/install.sh" install) >"$work/log" 2>&1
check 'a relative DESTDIR is below the folder one is in' "$(head -n 2 "$work/sub/it's \$x/opt/@VERSION@/share/pkgconfig/matrixfsdp.pc" | tail -n 1)" \
  'prefix=/opt/@VERSION@'
# A copy whose headers are what a link in the prefix leads to: they must be there afterwards.
mkdir "$work/linked"
cp -R scripts packaging mfsdp matrixfsdp.h "$work/linked"
ln -s . "$work/linked/include"
for action in install uninstall; do
  PREFIX=$work/linked sh "$work/linked/scripts/install.sh" $action >"$work/log" 2>&1
  check "$action to the tree itself is refused" "$? $([ -e "$work/linked/mfsdp/config.h" ] && echo there)" '2 there'
done

# ---- pkg-config ----
if command -v pkg-config >/dev/null 2>&1; then
  PKG_CONFIG_PATH=$prefix/share/pkgconfig
  export PKG_CONFIG_PATH
  for package in matrixfsdp matrixfsdp-host matrixfsdp-mpi matrixfsdp-cuda; do
    check "$package has the version" "$(pkg-config --modversion $package 2>&1)" "$version"
  done
  build 'pkg-config: the core' matrixfsdp.h "$(pkg-config --cflags matrixfsdp)" "$(pkg-config --libs matrixfsdp)"
  rm -f "$work/a.out"
  # shellcheck disable=SC2046,SC2086 # words of a command
  run 'pkg-config: Newton-Schulz alone, by the core' $CC -std=c11 -O0 "$alone" $(pkg-config --cflags matrixfsdp) "$work/user/alone.c" \
    -o "$work/a.out" $(pkg-config --libs matrixfsdp)
  check 'pkg-config: its result' "$("$work/a.out") $(nm -u "$work/a.out" | grep -c pthread)" 'MFSDP_OK 1 0'
  strict=$(pkg-config --variable=strict_cflags matrixfsdp-host)
  build 'pkg-config: the host, with its strict flags' mfsdp/host/transport_threads.h \
    "$strict $(pkg-config --cflags matrixfsdp-host) -include matrixfsdp.h" "$(pkg-config --libs matrixfsdp-host)"
  check 'pkg-config: where the kernels are' "$([ -s "$(pkg-config --variable=kernels matrixfsdp-cuda)" ] && echo there)" there
else
  echo "skip $suite: pkg-config needs pkg-config"
fi

# ---- CMake ----
cmake_project() { # NAME LINES...: a project that builds the user's programs
  mkdir -p "$work/$1"
  cat >"$work/$1/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES C CXX)
$2
add_executable(in_c ../user/main.c ../user/other.c)
add_executable(in_cpp ../user/main.cpp ../user/other.cpp)
foreach(program in_c in_cpp)
  target_compile_definitions(\${program} PRIVATE "USER_HEADER=\"matrixfsdp.h\"")
  target_link_libraries(\${program} PRIVATE MatrixFSDP::host)
endforeach()
END
  cmake -S "$work/$1" -B "$work/$1/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX"
}
cmake_builds() { # NAME LINES
  if cmake_project "$1" "$2" >"$work/log" 2>&1 && cmake --build "$work/$1/build" >>"$work/log" 2>&1; then
    check "CMake: $1" "$("$work/$1/build/in_c") $("$work/$1/build/in_cpp")" "$wanted $wanted"
  else
    bad "CMake: $1" "$(tail -n 5 "$work/log" | tr '\n' ' ')"
  fi
}
if command -v cmake >/dev/null 2>&1; then
  series=${version%.*}
  cmake_builds installed "find_package(MatrixFSDP $series REQUIRED COMPONENTS host)
add_executable(alone ../user/alone.c)
target_compile_definitions(alone PRIVATE \"USER_HEADER=\\\"mfsdp/host/newton_schulz_host.h\\\"\")
target_link_libraries(alone PRIVATE MatrixFSDP::core)"
  check 'CMake: Newton-Schulz alone, by the core' "$("$work/installed/build/alone")" 'MFSDP_OK 1'
  cmake_builds subdirectory "add_subdirectory(\"$PWD\" matrixfsdp)"
  cmake_builds 'one number of the version' "find_package(MatrixFSDP ${version%%.*} REQUIRED COMPONENTS host)"
  # Stand-ins: a CUDA toolkit that is there, and no MPI.
  mkdir "$work/modules"
  echo 'add_library(CUDA::cudart INTERFACE IMPORTED)
set(CUDAToolkit_FOUND TRUE)' >"$work/modules/FindCUDAToolkit.cmake"
  echo 'set(MPI_FOUND FALSE)' >"$work/modules/FindMPI.cmake"
  : >"$work/libnccl.so"
  stand_ins="set(CMAKE_MODULE_PATH \"$work/modules\")
set(MatrixFSDP_NCCL \"$work/libnccl.so\" CACHE FILEPATH \"\")"
  cmake_project kernels "$stand_ins
set(MatrixFSDP_FIND_COMPONENTS cuda)
add_subdirectory(\"$PWD\" matrixfsdp)
message(STATUS \"kernels: \${MatrixFSDP_CUDA_KERNELS}\")" >"$work/log" 2>&1
  check 'CMake: a subdirectory says where the kernels are' "$(sed -n 's/^-- kernels: //p' "$work/log")" "$PWD/mfsdp/cuda/kernels.cu"
  cmake_builds optional "$stand_ins
find_package(MatrixFSDP REQUIRED COMPONENTS host OPTIONAL_COMPONENTS mpi)
if(MatrixFSDP_mpi_FOUND OR NOT MatrixFSDP_host_FOUND)
  message(FATAL_ERROR \"components\")
endif()"
  cmake_project required "$stand_ins
find_package(MatrixFSDP REQUIRED COMPONENTS mpi)" >"$work/log" 2>&1
  check 'CMake: a required component that cannot be is named' "$? $(grep -c 'MatrixFSDP::mpi needs' "$work/log")" '1 1'
  cmake_project newer 'find_package(MatrixFSDP 99.0 REQUIRED)' >"$work/log" 2>&1
  check 'CMake: a newer version is not found' "$?" 1
  cmake_project component 'find_package(MatrixFSDP REQUIRED COMPONENTS hots)' >"$work/log" 2>&1
  check 'CMake: an unknown component is named' "$(grep -c 'no component hots: it has' "$work/log")" 1
else
  echo "skip $suite: CMake needs cmake"
fi

# ---- a release ----
run 'dist' scripts/dist.sh "$work/dist"
check 'its checksums' "$(cd "$work/dist" && sha256sum -c --quiet SHA256SUMS 2>&1)" ''
mkdir "$work/unpacked"
tar -xzf "$work/dist/matrixfsdp-$version.tar.gz" -C "$work/unpacked"
run 'dist of the unpacked release' "$work/unpacked/matrixfsdp-$version/scripts/dist.sh" "$work/again"
# Without git there is no list of files; a umask and other files in the way change nothing.
mkdir "$work/bin" "$work/tree"
for command in sh sed paste find sort tar gzip awk sha256sum mkdir rm cat dirname mktemp chmod; do
  ln -s "$(command -v $command)" "$work/bin"
done
cp -R "$work/unpacked/matrixfsdp-$version/." "$work/tree"
chmod -R go= "$work/tree"
run 'dist of a private copy, into itself' "$work/tree/scripts/dist.sh" "$work/tree/out"
run 'dist of a private copy, again' "$work/tree/scripts/dist.sh" "$work/tree/out"
check 'and those give the same bytes' "$(cat "$work/tree/out/SHA256SUMS")" "$(cat "$work/dist/SHA256SUMS")"
mkdir "$work/tree/.git"
PATH=$work/bin "$work/tree/scripts/dist.sh" "$work/none" >"$work/log" 2>&1
check 'no release without the list of files' "$? $(ls "$work/none")" '127 '
check 'gives the same bytes' "$(cat "$work/again/SHA256SUMS")" "$(cat "$work/dist/SHA256SUMS")"
run 'the unpacked release can be installed' make -s -C "$work/unpacked/matrixfsdp-$version" install PREFIX="$work/other"

mkdir "$work/single"
cp "$work/dist/matrixfsdp_single.h" "$work/single"
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror'
build 'the single header' matrixfsdp_single.h \
  "-I$work/single $math $warnings -D_POSIX_C_SOURCE=200809L" '-lpthread -lm'
check 'exports nothing of its own' "$(nm -g --defined-only "$work/a.out" | grep -ci mfsdp)" 0
rm -f "$work/a.out"
# shellcheck disable=SC2086 # words of a command
run 'the single header: Newton-Schulz alone' $CC -std=c11 -D_POSIX_C_SOURCE=200809L $math -DUSER_HEADER='"matrixfsdp_single.h"' \
  -I"$work/single" "$work/user/alone.c" -lpthread -lm -o "$work/a.out"
check 'the single header: its result' "$("$work/a.out")" 'MFSDP_OK 1'
# Behind its switches the headers of BLAS and LAPACK are the system's: no warnings as errors.
for part in CBLAS LAPACKE; do
  header=$(echo $part | tr '[:upper:]' '[:lower:]')
  case $part in CBLAS) function=mfsdp_host_math_cblas ;; LAPACKE) function=mfsdp_host_lapacke ;; esac
  if echo "#include <$header.h>" | $CC -E - >/dev/null 2>&1; then
    echo "#define MFSDP_SINGLE_$part 1
#include \"matrixfsdp_single.h\"
const void *table(void);
const void *table(void) { return $function(); }" >"$work/single/part.c"
    run "the single header with $part" $CC -std=c11 -D_POSIX_C_SOURCE=200809L -I"$work/single" -c "$work/single/part.c" -o "$work/part.o"
  else
    echo "skip $suite: the single header with $part needs $header.h"
  fi
done
