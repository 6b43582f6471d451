#!/bin/sh
# SPDX-License-Identifier: MIT
# Any CBLAS links: a small one of our own, whose header says nothing of C++ (ATLAS's is like that),
# from C and C++; and scripts/probe.sh, given a library that works and one that is not there.
set -u
cd "$(dirname "$0")/../.." || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
CC=${CC:-gcc} CXX=${CXX:-g++}
unset CBLAS_CFLAGS CBLAS_LIBS LDFLAGS CFLAGS GTEST_DIR

check() { # NAME COMMAND...
  name=$1
  shift
  if "$@" >"$work/out" 2>&1; then echo "ok cblas: $name"
  else echo "not ok cblas: $name ($(grep -m 1 -E 'error|undefined' "$work/out" || tail -n 1 "$work/out"))"; fi
}

mkdir "$work/include"
cat >"$work/include/cblas.h" <<'END'
#ifndef CBLAS_H
#define CBLAS_H
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor = 102 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };
enum CBLAS_UPLO { CblasUpper = 121, CblasLower = 122 };
void cblas_sgemm(const enum CBLAS_ORDER order, const enum CBLAS_TRANSPOSE ta, const enum CBLAS_TRANSPOSE tb,
                 const int m, const int n, const int k, const float alpha, const float *a, const int lda,
                 const float *b, const int ldb, const float beta, float *c, const int ldc);
void cblas_ssyrk(const enum CBLAS_ORDER order, const enum CBLAS_UPLO uplo, const enum CBLAS_TRANSPOSE trans,
                 const int n, const int k, const float alpha, const float *a, const int lda, const float beta,
                 float *c, const int ldc);
#endif
END
cat >"$work/blas.c" <<'END'
#include <cblas.h>
void cblas_sgemm(const enum CBLAS_ORDER order, const enum CBLAS_TRANSPOSE ta, const enum CBLAS_TRANSPOSE tb,
                 const int m, const int n, const int k, const float alpha, const float *a, const int lda,
                 const float *b, const int ldb, const float beta, float *c, const int ldc) {
  int i, j, l;
  for (i = 0; i < m; ++i)
    for (j = 0; j < n; ++j) {
      float sum = 0;
      for (l = 0; l < k; ++l)
        sum += a[ta == CblasTrans ? l * lda + i : i * lda + l] * b[tb == CblasTrans ? j * ldb + l : l * ldb + j];
      c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);
    }
  (void)order;
}
void cblas_ssyrk(const enum CBLAS_ORDER order, const enum CBLAS_UPLO uplo, const enum CBLAS_TRANSPOSE trans,
                 const int n, const int k, const float alpha, const float *a, const int lda, const float beta,
                 float *c, const int ldc) {
  int i, j, l;
  for (i = 0; i < n; ++i)
    for (j = uplo == CblasUpper ? i : 0; j < (uplo == CblasUpper ? n : i + 1); ++j) {
      float sum = 0;
      for (l = 0; l < k; ++l)
        sum += a[trans == CblasTrans ? l * lda + i : i * lda + l] * a[trans == CblasTrans ? l * lda + j : j * lda + l];
      c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);
    }
  (void)order;
}
END
cat >"$work/use.c" <<'END'
#include "mfsdp/host/math_cblas.h"
int main(void) {
  const float a[6] = {1, 2, 3, 4, 5, 6}, b[3] = {1, 10, 100};
  float c[2], s[4] = {0, 0, 0, 0};
  mfsdp_host_math_cblas()->set_threads(1); /* a library without such a call */
  mfsdp_host_math_cblas()->sgemm(0, 0, 2, 1, 3, 1.0f, a, 3, b, 1, 0.0f, c, 1);
  mfsdp_host_math_cblas()->ssyrk(1, 0, 2, 3, 1.0f, a, 3, 0.0f, s, 2);
  return c[0] == 321.0f && c[1] == 654.0f && s[0] == 14.0f && s[1] == 32.0f && s[2] == 0.0f && s[3] == 77.0f ? 0 : 1;
}
END
cp "$work/use.c" "$work/use.cpp"
check 'the library' "$CC" -c -I"$work/include" "$work/blas.c" -o "$work/blas.o"
check 'the archive' ar qcs "$work/libsmall.a" "$work/blas.o"
options="-D_POSIX_C_SOURCE=200809L -ffp-contract=off -I. -I$work/include"
# shellcheck disable=SC2086 # options are words
check 'C links' "$CC" -std=c11 $options "$work/use.c" "$work/libsmall.a" -lm -o "$work/use_c"
check 'C computes' "$work/use_c"
# shellcheck disable=SC2086
check 'C++ links' "$CXX" -std=c++11 $options "$work/use.cpp" "$work/libsmall.a" -lm -o "$work/use_cpp"
check 'C++ computes' "$work/use_cpp"

export CC CXX
check 'probe: a library as given' env CBLAS_CFLAGS="-I$work/include" CBLAS_LIBS="-L$work -lsmall" \
  scripts/probe.sh config release "$work/given/config.mk"
check 'probe: it is taken' grep -q '^release_CBLAS := 1$' "$work/given/config.mk"
check 'probe: nothing is broken' grep -q '^release_BROKEN := *$' "$work/given/config.mk"
check 'probe: a library that is not there' env CBLAS_LIBS=-lnone scripts/probe.sh config release "$work/none/config.mk"
check 'probe: it is off' grep -q '^release_CBLAS := 0$' "$work/none/config.mk"
check 'probe: what was asked for is an error' grep -q '^release_BROKEN := CBLAS_LIBS=-lnone$' "$work/none/config.mk"
check 'probe: the reason' grep -q 'CBLAS *off .*none' "$work/none/config.log"
