# SPDX-License-Identifier: MIT
# Releases and installed copies. Nothing is built for them: the library is headers.
PREFIX ?= /usr/local
DESTDIR ?=

# By the environment: whatever stands in them, they are no words of a shell.
install uninstall: export PREFIX := $(PREFIX)
install uninstall: export DESTDIR := $(DESTDIR)
.PHONY: install uninstall dist
install: ## headers, pkg-config files and a CMake package to PREFIX=/usr/local, below DESTDIR
	@scripts/install.sh install

uninstall: ## takes them away again
	@scripts/install.sh uninstall

dist: ## a release in build/dist: an archive, the single header, checksums
	@scripts/dist.sh build/dist
