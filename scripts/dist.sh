#!/bin/sh
# SPDX-License-Identifier: MIT
# Makes what a release consists of, with checksums; the same tree gives the same bytes.
#
#   scripts/dist.sh FOLDER
#
#   FOLDER/matrixfsdp-VERSION.tar.gz    everything
#   FOLDER/matrixfsdp_single.h          the core and the host as one header
#   FOLDER/SHA256SUMS
#
# SOURCE_DATE_EPOCH: the time of all files, in seconds (0).
set -eu
[ $# = 1 ] || { sed -n '3,11p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(CDPATH='' cd -- "$1" && pwd -P)
cd "$(dirname "$0")/.."
[ "$out" != "$(pwd -P)" ] || { echo "dist: a release cannot hold itself: give another folder" >&2; exit 2; }
version=$(sed -nE 's/^#define MFSDP_VERSION_(MAJOR|MINOR|PATCH) //p' mfsdp/config.h | paste -sd. -)
name=matrixfsdp-$version

# What git tracks, or, in an unpacked release, all but what was built. To a file: a git that fails must be seen.
files() {
  if [ -e .git ]; then
    git ls-files -z
  else
    find . \( -path ./build -o -path "./${out#"$(pwd -P)"/}" \) -prune -o \( -type f -o -type l \) -print0
  fi
}

rm -f "$out/SHA256SUMS"
list=$(mktemp)
trap 'rm -f "$list"' EXIT
files >"$list"
sed -z 's|^\./||' "$list" | LC_ALL=C sort -z |
  tar -c --no-recursion --transform "s|^|$name/|S" --mtime "@${SOURCE_DATE_EPOCH:-0}" --owner 0 --group 0 \
    --numeric-owner --mode 'u+rw,go=u,go-w' --format ustar --null --verbatim-files-from -T - >"$out/$name.tar"
gzip -n -9 -f "$out/$name.tar"
scripts/single_header.sh >"$out/matrixfsdp_single.h"
cd "$out"
sha256sum "$name.tar.gz" matrixfsdp_single.h >SHA256SUMS
cat SHA256SUMS
