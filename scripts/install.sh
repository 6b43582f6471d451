#!/bin/sh
# SPDX-License-Identifier: MIT
# Installs the headers, pkg-config files and the CMake package, or takes them away again.
#
#   PREFIX=/usr/local DESTDIR= scripts/install.sh install|uninstall
#
#   $PREFIX/include/matrixfsdp.h, $PREFIX/include/mfsdp/     headers, and kernels.cu
#   $PREFIX/share/pkgconfig/matrixfsdp*.pc
#   $PREFIX/share/cmake/MatrixFSDP/
#
# DESTDIR stands before every path that is written, in no path that is read later (for packagers). Files
# of an older version that this one does not have are removed: mfsdp/ belongs to the library.
set -eu
PREFIX=${PREFIX:-/usr/local} DESTDIR=${DESTDIR-}
case $DESTDIR in '' | /*) ;; *) DESTDIR=$PWD/$DESTDIR ;; esac
cd "$(dirname "$0")/.."
action=${1-}

fail() { echo "install: $1" >&2; exit 2; }
case $action in install | uninstall) ;; *) sed -n '3,12p' "$0" >&2; exit 2 ;; esac
case $PREFIX in
/*) ;;
*) fail "PREFIX is '$PREFIX', needs an absolute path" ;;
esac
# What would end a line or a word of the files that name it.
case $PREFIX in *[!A-Za-z0-9_./+~@:,=-]*)
  fail "PREFIX is '$PREFIX'; pkg-config files take letters, digits and _./+~@:,=- only" ;;
esac

version=$(sed -nE 's/^#define MFSDP_VERSION_(MAJOR|MINOR|PATCH) //p' mfsdp/config.h | paste -sd. -)
include=$DESTDIR$PREFIX/include
pkgconfig=$DESTDIR$PREFIX/share/pkgconfig
cmake=$DESTDIR$PREFIX/share/cmake/MatrixFSDP

# What is removed first must not be what is to be installed.
if [ "$(CDPATH='' cd -P -- "$include" 2>/dev/null && pwd)" = "$(pwd -P)" ]; then
  fail "$include is this tree itself"
fi

remove() {
  rm -rf "$include/mfsdp" "$cmake"
  rm -f "$include/matrixfsdp.h" "$pkgconfig"/matrixfsdp.pc "$pkgconfig"/matrixfsdp-*.pc
}

put() { # FILE FOLDER
  install -m 644 "$1" "$2/$(basename "$1")"
}

fill() { # TEMPLATE FOLDER: the file without .in
  target=$2/$(basename "$1" .in)
  sed -e "s|@VERSION@|$version|g" -e "s|@SERIES@|${version%.*}|g" -e "s|@PREFIX@|$PREFIX|g" "$1" >"$target"
  chmod 644 "$target"
}

remove
[ "$action" = install ] || exit 0
install -d "$include" "$pkgconfig" "$cmake"
put matrixfsdp.h "$include"
find mfsdp -type f \( -name '*.h' -o -name '*.cu' \) | while read -r file; do
  install -d "$include/$(dirname "$file")"
  put "$file" "$include/$(dirname "$file")"
done
for file in packaging/pkgconfig/*.in; do fill "$file" "$pkgconfig"; done
for file in packaging/cmake/*.in; do fill "$file" "$cmake"; done
put packaging/cmake/MatrixFSDPTargets.cmake "$cmake"
echo "installed MatrixFSDP $version in $DESTDIR$PREFIX"
