# SPDX-License-Identifier: MIT
# What check_headers.sh and check_rules.sh share: the headers of the library, what they include, and
# the flags each needs. Sourced in the project's root with $tmp (a folder), CC and NVCC set or not.
# shellcheck shell=sh disable=SC2034,SC2154 # its variables belong to those scripts

POSIX=-D_POSIX_C_SOURCE=200809L

have() { command -v "$1" >/dev/null 2>&1; }
compiles() { # SOURCE COMMAND...
  printf '%s\n' "$1" >"$tmp/probe.c"
  shift
  "$@" -fsyntax-only "$tmp/probe.c" >/dev/null 2>&1
}

library_headers() { find matrixfsdp.h mfsdp -name '*.h' 2>/dev/null | LC_ALL=C sort; }

find_nvcc() {
  nvcc=${NVCC:-nvcc}
  if ! have "$nvcc" && [ -x /usr/local/cuda/bin/nvcc ]; then nvcc=/usr/local/cuda/bin/nvcc; fi
}

# Sets where the vendors' headers are, as far as they are installed. MFSDP_CHECK_CONFIG: a file that
# an earlier probe wrote.
find_vendors() {
  if [ -n "${MFSDP_CHECK_CONFIG-}" ]; then cp "$MFSDP_CHECK_CONFIG" "$tmp/config.mk" || return 1
  else scripts/probe.sh config release "$tmp/config.mk" || return 1; fi
  CBLAS_INC=$(sed -n 's/^release_CBLAS_CFLAGS := //p' "$tmp/config.mk")
  LAPACKE_INC=$(sed -n 's/^release_LAPACKE_CFLAGS := //p' "$tmp/config.mk")
  VENDOR_LD=$(sed -n 's/^release_LAPACKE_LIBS := //p; s/^release_CBLAS_LIBS := //p; s/^release_MPI_LIBS := //p' "$tmp/config.mk" | tr '\n' ' ')
  MPI_INC=$(sed -n "s/^release_MPI_CFLAGS := //p" "$tmp/config.mk")
  CUDA_INC="" CUDA_LD=""
  find_nvcc
  if have "$nvcc"; then
    cuda_root=$(dirname "$(dirname "$(command -v "$nvcc")")")
    if [ -d "$cuda_root/include" ]; then CUDA_INC="-isystem $cuda_root/include"; fi
    CUDA_LD="-L$cuda_root/lib64 -Xlinker -rpath -Xlinker $cuda_root/lib64 -lcusolver -lcublas -lcublasLt -lcudart"
    printf 'int main(void) { return 0; }\n' >"$tmp/nccl.c"
    if "${CC:-gcc}" "$tmp/nccl.c" -L"$cuda_root/lib64" -lnccl -o "$tmp/nccl" 2>/dev/null; then CUDA_LD="$CUDA_LD -lnccl"; fi
  fi
}

# For awk programs: the path, from the root, that `#include "NAME"` in FILE means.
AWK_RESOLVE='
  function resolve(file, name, parts, n, i, m, out) {
    if (name ~ /^mfsdp\//) file = ""   # written from the root
    sub(/[^\/]*$/, "", file)
    n = split(file name, parts, "/")
    m = 0
    for (i = 1; i <= n; i++) {
      if (parts[i] == "." || parts[i] == "") continue
      if (parts[i] == "..") { if (m > 0) m--; continue }
      out[++m] = parts[i]
    }
    name = out[1]
    for (i = 2; i <= m; i++) name = name "/" out[i]
    return name
  }'

# Headers that a header includes, itself among them, one path a line.
closure() {
  awk -v start="$1" "$AWK_RESOLVE"'
    function visit(file, line, list, n, i, status) {
      if (file in seen) return
      seen[file] = 1
      n = 0
      while ((status = getline line <file) > 0)
        if (line ~ /^[ \t]*#[ \t]*include[ \t]*"/) { split(line, part, "\""); list[++n] = resolve(file, part[2]) }
      close(file)
      if (status == 0) print file   # -1: there is no such file
      for (i = 1; i <= n; i++) visit(list[i])
    }
    BEGIN { visit(start) }'
}

# include_flags HEADER: sets flags and absent, the first vendor header that is not to be found.
include_flags() {
  flags='-I.' absent=''
  files=$(closure "$1")
  if printf '%s\n' "$files" | grep -qE '^mfsdp/(posix|host|mpi|cuda)/'; then flags="$flags $POSIX"; fi
  # shellcheck disable=SC2086,SC2013 # a list of files
  for vendor in $(sed -n 's/^[ \t]*#[ \t]*include[ \t]*<\([^>]*\)>.*/\1/p' $files | sort -u); do
    case $vendor in
    cblas.h) more=$CBLAS_INC ;;
    lapacke.h) more=$LAPACKE_INC ;;
    # Without its old C++ classes, which would want a library of their own.
    mpi.h) more="$MPI_INC -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX" ;;
    cuda*.h | cublas*.h | cusolver*.h | nccl*.h) more=$CUDA_INC ;;
    *) continue ;;
    esac
    # shellcheck disable=SC2086
    if compiles "#include <$vendor>" "${CC:-gcc}" -std=c11 $more; then
      case " $flags " in *" $more "*) ;; *) flags="$flags $more" ;; esac
    else
      absent=$vendor
    fi
  done
}

# Adds $flags to $all_flags, each once.
add_flags() {
  for flag in $flags; do
    case $flag in -isystem) continue ;; -*) ;; *) flag="-isystem $flag" ;; esac
    case " $all_flags " in *" $flag "*) ;; *) all_flags="$all_flags $flag" ;; esac
  done
}

# FILE HEADER...: appends an include of each header whose vendors are there, and adds their flags to
# $all_flags; says which are left out.
include_all() {
  into=$1
  shift
  for header in "$@"; do
    include_flags "$header"
    if [ -n "$absent" ]; then
      echo "skip $header: there is no $absent"
      continue
    fi
    echo "#include \"$header\"" >>"$into"
    add_flags
  done
}
