#!/bin/sh
# SPDX-License-Identifier: MIT
# Finds optional parts by compiling, linking and running a small program with each, never by guessing.
#
#   scripts/probe.sh config SET MAKEFILE   writes MAKEFILE (a few SET_NAME := value lines) and, beside
#                                          it, config.log: one line per part, with the reason when off
#   scripts/probe.sh info                  prints such lines for the tools that only checks use
#
# Environment: CC CXX CBLAS_CFLAGS CBLAS_LIBS LAPACKE_CFLAGS LAPACKE_LIBS MPI_CFLAGS MPI_LIBS GTEST_DIR NVCC CLANG CLANGXX. Leaving one unset means "look".
set -u

CC=${CC:-gcc} CXX=${CXX:-g++}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM

# try WHAT...: runs a command; on failure the last telling line of its output is left in $why.
try() {
  if "$@" >"$tmp/out" 2>&1; then return 0; fi
  status=$?
  why=$(grep -E 'error|fatal|not found|cannot|No such' "$tmp/out" | grep -v '^collect2' | tail -n 1)
  [ -n "$why" ] || why=$(tail -n 1 "$tmp/out")
  [ -n "$why" ] || why="$1 ended with status $status"
  return 1
}

# As system directories, so that the vendor's header does not meet our warning flags.
as_system() { printf '%s' "$1" | sed -E 's/(^| )-I *([^ ])/\1-isystem \2/g'; }

write_cblas_program() {
  cat >"$tmp/cblas.c" <<'END'
#include <cblas.h>
int main(void) {
  float a[1] = {2.0f}, b[1] = {3.0f}, c[1] = {0.0f};
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1.0f, a, 1, b, 1, 0.0f, c, 1);
  return c[0] == 6.0f ? 0 : 1;
}
END
}

# try_cblas CFLAGS LIBS
try_cblas() {
  # shellcheck disable=SC2086 # flags are lists of words
  try $CC -std=c11 ${CFLAGS-} $1 "$tmp/cblas.c" -o "$tmp/cblas" ${LDFLAGS-} $2 -lm -lpthread &&
    try "$tmp/cblas"
}

# Sets cblas=0|1, cblas_cflags, cblas_libs, cblas_how.
find_cblas() {
  cblas=0 cblas_cflags='' cblas_libs='' cblas_how=''
  write_cblas_program
  if [ -n "${CBLAS_LIBS-}${CBLAS_CFLAGS-}" ]; then
    cblas_cflags=$(as_system "${CBLAS_CFLAGS-}") cblas_libs=${CBLAS_LIBS-} cblas_how='as given'
    if try_cblas "$cblas_cflags" "$cblas_libs"; then cblas=1; fi
    return
  fi
  if command -v pkg-config >/dev/null 2>&1 && pkg-config --exists openblas 2>/dev/null; then
    cblas_cflags=$(as_system "$(pkg-config --cflags openblas)") cblas_how='pkg-config openblas'
    cblas_libs=$(pkg-config --libs openblas)
    if try_cblas "$cblas_cflags" "$cblas_libs"; then cblas=1; return; fi
  fi
  cblas_cflags='' cblas_how='found by linking'
  for cblas_libs in -lopenblas '-lcblas -lblas' -lblas; do
    if try_cblas '' "$cblas_libs"; then cblas=1; return; fi
    # The first failure tells most: it is about the library that we ask people to install.
    first_why=${first_why-$why}
  done
  why=$first_why cblas_libs=''
}

write_lapacke_program() {
  cat >"$tmp/lapacke.c" <<'END'
#include <lapacke.h>
int main(void) {
  float a[1] = {2.0f}, w[1], work[9], tau[1];
  lapack_int integers[8];
  if (LAPACKE_ssyevd_work(LAPACK_COL_MAJOR, 'V', 'L', 1, a, 1, w, work, 9, integers, 8) != 0) return 1;
  return w[0] == 2.0f && LAPACKE_sgeqrf_work(LAPACK_COL_MAJOR, 1, 1, a, 1, tau, work, 1) == 0 ? 0 : 1;
}
END
}

# try_lapacke CFLAGS LIBS
try_lapacke() {
  # shellcheck disable=SC2086
  try $CC -std=c11 ${CFLAGS-} $1 "$tmp/lapacke.c" -o "$tmp/lapacke" ${LDFLAGS-} $2 -lm -lpthread &&
    try "$tmp/lapacke"
}

# Sets lapacke=0|1, lapacke_cflags, lapacke_libs, lapacke_how.
find_lapacke() {
  lapacke=0 lapacke_cflags='' lapacke_libs='' lapacke_how=''
  write_lapacke_program
  if [ -n "${LAPACKE_LIBS-}${LAPACKE_CFLAGS-}" ]; then
    lapacke_cflags=$(as_system "${LAPACKE_CFLAGS-}") lapacke_libs=${LAPACKE_LIBS-} lapacke_how='as given'
    if try_lapacke "$lapacke_cflags" "$lapacke_libs"; then lapacke=1; fi
    return
  fi
  lapacke_how='found by linking' first_lapacke_why=''
  for lapacke_libs in -llapacke '-llapacke -llapack -lblas' -lopenblas; do
    if try_lapacke '' "$lapacke_libs"; then lapacke=1; return; fi
    first_lapacke_why=${first_lapacke_why:-$why}
  done
  why=$first_lapacke_why lapacke_libs=''
}

write_mpi_program() {
  cat >"$tmp/mpi.c" <<'END'
#include <mpi.h>
#if MPI_VERSION < 3
#error "MPI-3 is needed"
#endif
int main(void) {
  int flag = 0;
  return MPI_Initialized(&flag) == MPI_SUCCESS && !flag ? 0 : 1;
}
END
}

# try_mpi CFLAGS LIBS
try_mpi() {
  # shellcheck disable=SC2086
  try $CC -std=c11 ${CFLAGS-} $1 "$tmp/mpi.c" -o "$tmp/mpi" ${LDFLAGS-} $2 && try "$tmp/mpi"
}

# Sets mpi=0|1, mpi_cflags, mpi_libs, mpi_how. Asks pkg-config, then the compiler wrappers of Open MPI
# and of MPICH; their compiler is not used, only the flags they tell.
find_mpi() {
  mpi=0 mpi_cflags='' mpi_libs='' mpi_how=''
  write_mpi_program
  if [ -n "${MPI_LIBS-}${MPI_CFLAGS-}" ]; then
    mpi_cflags=$(as_system "${MPI_CFLAGS-}") mpi_libs=${MPI_LIBS-} mpi_how='as given'
    if try_mpi "$mpi_cflags" "$mpi_libs"; then mpi=1; fi
    return
  fi
  for package in mpi-c ompi-c mpich; do
    command -v pkg-config >/dev/null 2>&1 && pkg-config --exists $package 2>/dev/null || continue
    mpi_cflags=$(as_system "$(pkg-config --cflags $package)") mpi_libs=$(pkg-config --libs $package)
    mpi_how="pkg-config $package"
    if try_mpi "$mpi_cflags" "$mpi_libs"; then mpi=1; return; fi
  done
  if command -v mpicc >/dev/null 2>&1; then
    mpi_how=mpicc
    if mpi_cflags=$(mpicc --showme:compile 2>/dev/null); then mpi_libs=$(mpicc --showme:link)
    else mpi_cflags=$(mpicc -show | sed 's/^[^ ]* *//') mpi_libs=$mpi_cflags; fi
    mpi_cflags=$(as_system "$(words "$mpi_cflags" '-[ID]*')") mpi_libs=$(words "$mpi_libs" '-[LlW]*')
    if try_mpi "$mpi_cflags" "$mpi_libs"; then mpi=1; return; fi
  else
    why=${why:-'mpicc: command not found'}
  fi
  mpi_cflags='' mpi_libs=''
}

# Sets cuda_cflags, cuda_how: the toolkit's headers for the CUDA sources that tests run on the host double,
# or the small ones of the double.
find_cuda() {
  cat >"$tmp/cuda.c" <<'END'
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>
#if CUDART_VERSION < 12080
#error "the CUDA toolkit is older than 12.8"
#endif
int main(void) { return 0; }
END
  cuda_nvcc=${NVCC:-nvcc}
  if ! command -v "$cuda_nvcc" >/dev/null 2>&1; then cuda_nvcc=/usr/local/cuda/bin/nvcc; fi
  cuda_root=$(dirname "$(dirname "$(command -v "$cuda_nvcc" || echo "$cuda_nvcc")")")
  cuda_cflags="-isystem $cuda_root/include" cuda_how="the toolkit's ($cuda_root/include)"
  # shellcheck disable=SC2086
  if try $CC -std=c11 $cuda_cflags -fsyntax-only "$tmp/cuda.c"; then
    # The toolkit does not always bring NCCL: then the double's header of it comes after the toolkit's.
    printf '#include <nccl.h>\nint main(void) { return 0; }\n' >"$tmp/nccl.c"
    # shellcheck disable=SC2086
    try $CC -std=c11 $cuda_cflags -fsyntax-only "$tmp/nccl.c" && return
    cuda_cflags="$cuda_cflags -isystem tests/cudasim/small" cuda_how="$cuda_how, NCCL's of the host double"
    return
  fi
  cuda_cflags='-isystem tests/cudasim/small' cuda_how="the host double's ($why)"
}

# words TEXT PATTERN: those that match
words() {
  for word in $1; do
    # shellcheck disable=SC2254 # a pattern is wanted
    case $word in $2) printf '%s ' "$word" ;; esac
  done
}

# Sets gtest=0|1, gtest_how.
find_gtest() {
  gtest=0
  printf '#include <gtest/gtest.h>\nTEST(Probe, Runs) { EXPECT_EQ(1, 1); }\n' >"$tmp/gtest.cpp"
  if [ -n "${GTEST_DIR-}" ]; then
    gtest_how="compiled from $GTEST_DIR"
    if [ -f "$GTEST_DIR/src/gtest-all.cc" ]; then gtest=1; return; fi
    why="$GTEST_DIR has no src/gtest-all.cc"
    return
  fi
  gtest_how='-lgtest -lgtest_main'
  # shellcheck disable=SC2086
  if try $CXX -std=c++14 "$tmp/gtest.cpp" -o "$tmp/gtest" ${LDFLAGS-} -lgtest -lgtest_main -lpthread &&
    try "$tmp/gtest"; then gtest=1; fi
}

# The thread sanitizer of older compilers cannot map its shadow where the kernel randomizes more bits
# than it knows; without randomization it can. Sets runner.
find_runner() {
  runner=''
  printf '#include <pthread.h>\nint main(void) { return 0; }\n' >"$tmp/tsan.c"
  # shellcheck disable=SC2086
  try $CC -fsanitize=thread "$tmp/tsan.c" -o "$tmp/tsan" -lpthread || return 1
  try "$tmp/tsan" && return 0
  first_tsan_why=$why
  runner="setarch $(uname -m) -R"
  # shellcheck disable=SC2086
  if try $runner "$tmp/tsan"; then return 0; fi
  why=$first_tsan_why runner=''
  return 1
}

line() { # NAME ON TEXT WHY
  if [ "$2" = 1 ]; then printf '%-14s on   %s\n' "$1" "$3"; else printf '%-14s off  %s\n' "$1" "$4"; fi
}

config() {
  set_name=$1 out=$2
  mkdir -p "$(dirname "$out")" || exit 1
  log=$(dirname "$out")/config.log
  runner=''
  if [ "$set_name" = release ]; then
    find_cblas
    line CBLAS $cblas "$cblas_libs ($cblas_how)" "${why-}" >"$log.tmp"
    why=''
    find_lapacke
    line LAPACKE $lapacke "$lapacke_libs ($lapacke_how)" "${why-}" >>"$log.tmp"
    why=''
    find_mpi
    line MPI $mpi "$mpi_libs ($mpi_how)" "${why-}" >>"$log.tmp"
  else
    cblas=0 cblas_cflags='' cblas_libs='' mpi=0 mpi_cflags='' mpi_libs=''
    line CBLAS 0 '' 'sanitizers cannot see into it: this set uses the C loops' >"$log.tmp"
    # There are no loops of ours instead of this one.
    find_lapacke
    line LAPACKE $lapacke "$lapacke_libs ($lapacke_how)" "${why-}" >>"$log.tmp"
    why=''
  fi
  find_cuda
  line 'CUDA headers' 1 "$cuda_how" '' >>"$log.tmp"
  find_gtest
  line GoogleTest $gtest "$gtest_how" "${why-}" >>"$log.tmp"
  if [ "$set_name" = tsan ]; then
    if find_runner; then ok=1; else ok=0; fi
    line 'thread san.' $ok "${runner:-as it is}" "${why-}" >>"$log.tmp"
  fi
  mv "$log.tmp" "$log"
  {
    echo "# Written by scripts/probe.sh; the reasons are in config.log."
    echo "${set_name}_CBLAS := $cblas"
    echo "${set_name}_CBLAS_CFLAGS := $cblas_cflags"
    echo "${set_name}_CBLAS_LIBS := $cblas_libs"
    echo "${set_name}_LAPACKE := $lapacke"
    echo "${set_name}_LAPACKE_CFLAGS := $lapacke_cflags"
    echo "${set_name}_LAPACKE_LIBS := $lapacke_libs"
    echo "${set_name}_MPI := $mpi"
    echo "${set_name}_MPI_CFLAGS := $mpi_cflags"
    echo "${set_name}_MPI_LIBS := $mpi_libs"
    echo "${set_name}_CUDA_CFLAGS := $cuda_cflags"
    echo "${set_name}_GTEST := $gtest"
    # What was asked for by name and does not work is an error, and not a quiet SKIP.
    broken=''
    if [ $cblas = 0 ] && [ "$set_name" = release ] && [ -n "${CBLAS_LIBS-}${CBLAS_CFLAGS-}" ]; then
      broken="CBLAS_LIBS=${CBLAS_LIBS-}${CBLAS_CFLAGS:+ CBLAS_CFLAGS=$CBLAS_CFLAGS}"
    fi
    if [ $lapacke = 0 ] && [ -n "${LAPACKE_LIBS-}${LAPACKE_CFLAGS-}" ]; then
      broken="$broken LAPACKE_LIBS=${LAPACKE_LIBS-}${LAPACKE_CFLAGS:+ LAPACKE_CFLAGS=$LAPACKE_CFLAGS}"
    fi
    if [ $mpi = 0 ] && [ "$set_name" = release ] && [ -n "${MPI_LIBS-}${MPI_CFLAGS-}" ]; then
      broken="$broken MPI_LIBS=${MPI_LIBS-}${MPI_CFLAGS:+ MPI_CFLAGS=$MPI_CFLAGS}"
    fi
    if [ $gtest = 0 ] && [ -n "${GTEST_DIR-}" ]; then broken="$broken GTEST_DIR=$GTEST_DIR"; fi
    echo "${set_name}_BROKEN := $broken"
    echo "${set_name}_RUNNER := $runner"
  } >"$out.tmp"
  mv "$out.tmp" "$out"
}

info_tool() { # NAME COMMAND SOURCE ARGS...: compiles SOURCE with COMMAND ARGS
  name=$1 command=$2 source=$3
  shift 3
  if ! command -v "$command" >/dev/null 2>&1; then
    line "$name" 0 '' "$command: command not found"
  elif try "$command" "$@" "$source" -o "$tmp/a.out"; then
    line "$name" 1 "$("$command" --version | grep -v '^$' | sed -n "${version_line:-1}p")" ''
  else
    line "$name" 0 '' "$why"
  fi
}

info() {
  printf 'int main(void) { return 0; }\n' >"$tmp/p.c"
  cp "$tmp/p.c" "$tmp/p.cpp"
  printf '__global__ void k(void) {}\nint main(void) { return 0; }\n' >"$tmp/p.cu"
  info_tool clang "${CLANG:-clang}" "$tmp/p.c" -std=c11
  info_tool clang++ "${CLANGXX:-clang++}" "$tmp/p.cpp" -std=c++11
  nvcc=${NVCC:-nvcc}
  if [ -z "${NVCC-}" ] && ! command -v nvcc >/dev/null 2>&1 && [ -x /usr/local/cuda/bin/nvcc ]; then
    nvcc=/usr/local/cuda/bin/nvcc
  fi
  version_line=4
  info_tool nvcc "$nvcc" "$tmp/p.cu" -std=c++17
  version_line=1
  for tool in clang-format bible nm; do
    if command -v $tool >/dev/null 2>&1; then line $tool 1 "$(command -v $tool)" ''
    else line $tool 0 '' "$tool: command not found"; fi
  done
}

case ${1-} in
config) config "$2" "$3" ;;
info) info ;;
*) sed -n '3,10p' "$0"; exit 2 ;;
esac
