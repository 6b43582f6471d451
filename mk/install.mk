# SPDX-License-Identifier: MIT
# Releases and installed copies. Nothing is built for them: the library is headers.
PREFIX ?= /usr/local
DESTDIR ?=

.PHONY: install uninstall dist
install uninstall:
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' scripts/install.sh $@

dist:
	@scripts/dist.sh build/dist
