#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs the Debian or Ubuntu packages that `make demo` or `make test` need, and only those missing.
#
#   scripts/setup.sh demo|demo-mpi|test
#
# Needs root, or sudo. Touches nothing when all is there, so it works offline then. If it cannot
# install, it says once what is missing and what to run, and ends with status 1.
# What only some tests need (MPI, LAPACKE) is installed too if that is possible, and otherwise done
# without; so is LAPACKE for the demo. DATA=file: the demo needs no text package. GTEST_DIR=, CBLAS_LIBS=,
# LAPACKE_LIBS=: yours are used, none is installed.
set -u
cd "$(dirname "$0")/.." || exit 1

kind=${1-}
case $kind in demo | demo-mpi | test) ;; *) sed -n '3,10p' "$0" >&2; exit 2 ;; esac

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM
log=build/setup.log

installed() { # PACKAGE...: asks dpkg, which is quick
  [ "$(dpkg-query -W -f='${Status}\n' "$@" 2>/dev/null | grep -c '^install ok installed$')" = $# ]
}

# The same part may have come without a Debian package: what compiles and links is there.
links() { # COMPILER SUFFIX PROGRAM LIBRARY...
  compiler=$1 file=$tmp/probe.$2
  printf '%b' "$3" >"$file"
  shift 3
  $compiler "$file" -o "$tmp/probe" "$@" >/dev/null 2>&1
}
has_cc() { links "${CC:-gcc}" c '#include <stdio.h>\nint main(void) { return 0; }\n'; }
has_cxx() { links "${CXX:-g++}" cpp '#include <vector>\nint main() { return 0; }\n'; }
has_blas() {
  [ -n "${CBLAS_LIBS-}${CBLAS_CFLAGS-}" ] || installed libopenblas-dev ||
    links "${CC:-gcc}" c '#include <cblas.h>\nint main(void) { return cblas_sdot(0, 0, 1, 0, 1) != 0; }\n' -lopenblas
}
has_gtest() {
  [ -n "${GTEST_DIR-}" ] || installed libgtest-dev ||
    links "${CXX:-g++}" cpp '#include <gtest/gtest.h>\nTEST(A, B) {}\n' -std=c++14 -lgtest -lgtest_main -lpthread
}

# Shampoo and SOAP want one.
has_lapacke() {
  [ -n "${LAPACKE_LIBS-}${LAPACKE_CFLAGS-}" ] || installed liblapacke-dev ||
    links "${CC:-gcc}" c '#include <lapacke.h>\nint main(void) { float a = 0; return LAPACKE_sgeqrf_work(102, 0, 0, &a, 1, &a, &a, 1) != 0; }\n' -llapacke
}

# Only the tests want one: any MPI-3 with its launcher.
has_mpi() { command -v mpirun >/dev/null 2>&1 && command -v mpicc >/dev/null 2>&1; }

missing_packages() {
  has_cc || printf 'gcc libc6-dev '
  has_cxx || printf 'g++ '
  command -v make >/dev/null 2>&1 || printf 'make '
  if ! has_blas; then
    printf 'libopenblas-dev '
    command -v pkg-config >/dev/null 2>&1 || printf 'pkg-config '
  fi
  case $kind in
  demo*) [ -n "${DATA-}" ] || command -v bible >/dev/null 2>&1 || printf 'bible-kjv ' ;;
  test) has_gtest || printf 'libgtest-dev ' ;;
  esac
  [ "$kind" != demo-mpi ] || has_mpi || printf 'openmpi-bin libopenmpi-dev '
}
# What is used if it can be had; without it some tests are skipped, and say so.
optional_packages() {
  [ "$kind" != test ] || has_mpi || printf 'openmpi-bin libopenmpi-dev '
  [ "$kind" = demo-mpi ] || has_lapacke || printf 'liblapacke-dev '
}

required=$(missing_packages | sed 's/ $//')
missing=$({ missing_packages; optional_packages; } | sed 's/ $//')
[ -n "$missing" ] || exit 0

give_up() { # REASON
  if [ -z "$required" ]; then
    echo "setup: without $missing ($1): what needs them is skipped" >&2
    exit 0
  fi
  echo "make $kind needs these packages: $missing. They could not be installed: $1." \
    "Run this as root, then \`make $kind\` again: apt-get update && apt-get install $missing" >&2
  exit 1
}

command -v apt-get >/dev/null 2>&1 || {
  [ -n "$required" ] || give_up 'there is no apt-get'
  echo "make $kind needs these packages (Debian's names): $missing. There is no apt-get here to install" \
    "them: install them with your system's package manager, then run \`make $kind\` again" >&2
  exit 1
}
if [ "$(id -u)" = 0 ]; then
  as_root=''
elif ! command -v sudo >/dev/null 2>&1; then
  give_up 'this is not root and there is no sudo'
elif sudo -n true 2>/dev/null; then
  as_root='sudo -n'
elif [ -t 0 ] && [ -z "${CI-}" ]; then
  as_root=sudo # may ask for a password
else
  give_up 'this is not root and sudo wants a password'
fi

{ mkdir -p build && : >"$log"; } 2>/dev/null || give_up "$log cannot be written"
apt() {
  # shellcheck disable=SC2086 # as_root is empty or a list of words
  $as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 apt-get -q -y \
    -o DPkg::Lock::Timeout=120 -o Acquire::Retries=1 \
    -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@" </dev/null >>"$log" 2>&1
}
known() { # every missing package has a candidate in the lists
  for package in $missing; do
    apt-cache policy "$package" 2>/dev/null | grep -q '^  Candidate: [^(]' || { unknown=$package; return 1; }
  done
}

echo "setup: installing $missing"
updated=0
known || { updated=1; apt update; }
known || {
  hint=''
  ! grep -q '^ID=ubuntu' /etc/os-release 2>/dev/null ||
    hint=" (on Ubuntu it is in \`universe\`: add-apt-repository universe)"
  why=$(grep '^[EW]: ' "$log" | tail -n 1)
  give_up "apt knows no $unknown$hint${why:+, \"$why\"}"
}
# shellcheck disable=SC2086 # a list of packages
install() { apt install --no-install-recommends $missing; }
# Old lists name files that the mirror no longer has: one update, one more try.
install || { [ $updated = 0 ] && apt update && install; } || {
  why=$(grep '^E: ' "$log" | head -n 1) # the first names the cause
  give_up "apt-get failed${why:+, \"$why\"} (all of it: $log)"
}
touch build/packages.stamp # make looks again for what there is

wanted=$missing
required=$(missing_packages | sed 's/ $//')
missing=$({ missing_packages; optional_packages; } | sed 's/ $//')
[ -z "$missing" ] || give_up "apt-get installed $wanted and they are still not usable (see $log)"
