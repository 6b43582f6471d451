#!/bin/sh
# SPDX-License-Identifier: MIT
# Writes the library as one header: the core, the host backend, threads as ranks and files.
#
#   scripts/single_header.sh >matrixfsdp_single.h
#
# Every #include "..." is replaced by the file, where it is met first. What needs a BLAS or a LAPACK comes
# behind a switch of this header alone: MFSDP_SINGLE_CBLAS, MFSDP_SINGLE_LAPACKE (0 unless set to 1 before
# it is included).
set -eu
cd "$(dirname "$0")/.."

version=$(sed -nE 's/^#define MFSDP_VERSION_(MAJOR|MINOR|PATCH) //p' mfsdp/config.h | paste -sd. -)

cat <<END
/* SPDX-License-Identifier: MIT */
/*
 * matrixfsdp_single.h - MatrixFSDP $version as one header: the core, mfsdp/host and mfsdp/posix. Made by
 * scripts/single_header.sh from the headers named before each part; change those, not this.
 *
 *   MFSDP_SINGLE_CBLAS    0   1: mfsdp_host_math_cblas too; needs a CBLAS
 *   MFSDP_SINGLE_LAPACKE  0   1: mfsdp_host_lapacke too, for Shampoo and SOAP; needs a LAPACKE
 *
 * Do not mix with the single headers in one file: their guards are the same, so the first one counts.
 * Flags: -O3 -march=native -fno-math-errno -ffp-contract=off, with -std=c11 also
 * -D_POSIX_C_SOURCE=200809L. Link: -lpthread -lm.
 */
END

{
  cat <<'END'
#include "matrixfsdp.h"
#include "mfsdp/host/backend_host.h"
#include "mfsdp/host/newton_schulz_host.h"
#include "mfsdp/host/threads_run.h"
#include "mfsdp/host/transport_threads.h"
#include "mfsdp/posix/background_posix.h"
#include "mfsdp/posix/io_posix.h"
#include "mfsdp/posix/launch.h"
#include "mfsdp/host/blas_threads.h"
#ifndef MFSDP_SINGLE_CBLAS
#define MFSDP_SINGLE_CBLAS 0
#endif
#if MFSDP_SINGLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif
#ifndef MFSDP_SINGLE_LAPACKE
#define MFSDP_SINGLE_LAPACKE 0
#endif
#if MFSDP_SINGLE_LAPACKE
#include "mfsdp/host/math_lapacke.h"
#endif
END
} | awk '
  # dir/../x -> x
  function tidy(path) {
    sub(/^\.\//, "", path)
    while (sub(/[^\/.]+\/\.\.\//, "", path)) ;
    return path
  }
  function emit(text, folder,    name, line, path) {
    if (text !~ /^#include "/) { print text; return }
    name = text
    sub(/^#include "/, "", name)
    sub(/".*/, "", name)
    path = tidy(folder name)
    if (path in seen) return
    seen[path] = 1
    folder = path
    if (!sub(/[^\/]*$/, "", folder)) folder = ""
    print "\n/* ---- " path " ---- */"
    while ((got = (getline line < path)) > 0) emit(line, folder)
    if (got < 0) { print "single_header: cannot read " path >"/dev/stderr"; bad = 1; exit 1 }
    close(path)
  }
  { emit($0, "") }
  END { exit bad }'
