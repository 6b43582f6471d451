# SPDX-License-Identifier: MIT
# MatrixFSDP. The library is headers and needs no build: this makes its examples, tests and benchmarks,
# all of it under build/. `make help` lists the targets, `make info` says what was found.
#
# Variables: CC CXX CPPFLAGS CFLAGS CXXFLAGS LDFLAGS MARCH=native WERROR=0|1 JOBS=2
#            V=1 (print whole commands)   UBSAN_MESSAGES=1 (test-asan says what it traps on)
#            CBLAS_CFLAGS CBLAS_LIBS (any CBLAS)   LAPACKE_CFLAGS LAPACKE_LIBS (any LAPACKE)
#            MPI_CFLAGS MPI_LIBS (any MPI-3)   GTEST_DIR (compile GoogleTest from there)
#            TESTS=text (only test programs with this in their path)   DATA=file (the demo's text)   BENCH_ARGS

# `make -n` makes included files for real: it must not install packages.
DRY_RUN := $(findstring n,$(firstword -$(MAKEFLAGS)))

MAKEFLAGS += --no-builtin-rules
JOBS ?= 2
MAKEFLAGS += -j$(JOBS)
.SUFFIXES:
.SECONDARY:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := examples

ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
AR ?= ar
MARCH ?= native
WERROR ?= $(if $(CI),1,0)
CBLAS_CFLAGS ?=
CBLAS_LIBS ?=
LAPACKE_CFLAGS ?=
LAPACKE_LIBS ?=
MPI_CFLAGS ?=
MPI_LIBS ?=
GTEST_DIR ?=
ifneq ($(wildcard $(GTEST_DIR)/googletest/src/gtest-all.cc),)
override GTEST_DIR := $(GTEST_DIR)/googletest
endif
TESTS ?=
DATA ?=
FUZZ_SECONDS ?= 60
export JOBS CC CXX CFLAGS LDFLAGS CBLAS_CFLAGS CBLAS_LIBS LAPACKE_CFLAGS LAPACKE_LIBS MPI_CFLAGS MPI_LIBS GTEST_DIR DATA

# $(call say,WORD,FILE): a short line instead of the command, unless V=1
say = $(if $(filter 1,$(V)),,@printf '%-5s %s\n' '$1' '$2';)

WARN := -Wall -Wextra -Wconversion -Wsign-conversion -Wshadow -Wundef
# Instrumented code gives gcc false alarms (maybe-uninitialized), so warnings are errors elsewhere only.
release_WERROR := $(if $(filter 1,$(WERROR)),-Werror)
# What bitwise equal results need, with or without a sanitizer (README, "build flags").
MATH := -fno-math-errno -ffp-contract=off
release_FLAGS := -O3 -march=$(MARCH) $(MATH)
# -g1: line numbers for the reports; the rest of -g costs a quarter of the compile time.
# Undefined behaviour traps (SIGILL, with a stack in a debugger): its messages double the time to
# compile. UBSAN_MESSAGES=1 has them.
asan_FLAGS := -Og -g1 -fno-omit-frame-pointer -fsanitize=address,undefined \
  $(if $(filter 1,$(UBSAN_MESSAGES)),-fno-sanitize-recover=all,-fsanitize-undefined-trap-on-error) $(MATH)
tsan_FLAGS := -Og -g1 -fno-omit-frame-pointer -fsanitize=thread $(MATH)
# Test programs are large and run briefly: compiling takes most of their time (one of them, measured:
# 7.3 s with -Og, 11 s with -O1, more with -O3).
# What the optimizer makes of the headers is tested through the examples (tests/cli).
release_TEST_FLAGS := -Og
release_SANITIZER := 0
asan_SANITIZER := 1
tsan_SANITIZER := 1

# ---- what there is: nothing below is a list of files ----
EXAMPLES := $(patsubst examples/%.c,%,$(wildcard examples/*.c))
# What is compiled into a library for the programs; some folders are compiled by their tests.
EXAMPLE_SRCS := $(filter-out examples/cuda/% examples/port/% examples/two_libraries/%,$(wildcard examples/*/*.c))
BENCHES := $(patsubst bench/%.c,%,$(wildcard bench/*.c)) $(patsubst bench/%.cpp,%,$(wildcard bench/*.cpp))
BENCH_SUPPORT_SRCS := $(wildcard bench/support/*.c bench/support/*.cpp)
find_tests = $(sort $(patsubst ./%,%,$(shell [ ! -d tests ] || find tests -name '$1' -type f)))
TEST_SRCS := $(call find_tests,*_test.cpp)
PICKED_TEST_SRCS := $(if $(TESTS),$(foreach t,$(TEST_SRCS),$(if $(findstring $(TESTS),$t),$t)),$(TEST_SRCS))
TEST_SUPPORT_SRCS := $(filter-out %_test.cpp,$(wildcard tests/support/*.cpp tests/ref/*.cpp tests/cudasim/*.cpp))
# Code that starts no thread has nothing to show to the thread sanitizer.
THREADED := $(if $(TEST_SRCS),$(shell grep -lE 'include .*(/host/|posix/thread|control_tcp|matrixfsdp.h|ranks.h|_rig.h|fake_queue.h|gpt/trace.h|cudasim.h)' \
  $$(grep -L MFSDP_TEST_ONE_QUEUE $(TEST_SRCS))))
release_TEST_SRCS := $(PICKED_TEST_SRCS)
asan_TEST_SRCS := $(PICKED_TEST_SRCS)
tsan_TEST_SRCS := $(filter $(THREADED),$(PICKED_TEST_SRCS))
# These include CUDA's headers; the others see the double through tests/cudasim/rig.h.
CUDA_TEST_SRCS := $(if $(TEST_SRCS),$(shell grep -lE 'include "(mfsdp/cuda|bench/cuda/device|tests/cudasim/cudasim.h|cudasim.h)' $(filter tests/cuda%,$(TEST_SRCS))))
TEST_WRAP_SRCS := $(if $(TEST_SRCS),$(shell grep -l MFSDP_TEST_WRAP_MALLOC $(TEST_SRCS)))
MPI_TEST_SRCS := $(wildcard tests/mpi/*.c)
# The one that mostly waits comes first.
CLI_TESTS := $(filter-out %/lib.sh,$(sort $(wildcard tests/cli/*.sh)))
CLI_TESTS := $(filter %/mpi.sh,$(CLI_TESTS)) $(filter-out %/mpi.sh,$(CLI_TESTS))

# ---- which sets this run needs: only these are probed ----
GOALS := $(or $(MAKECMDGOALS),$(.DEFAULT_GOAL))
PLAIN_GOALS := help clean format headers test-headers test-dag test-symbols test-rules test-fuzz install uninstall dist docs tidy analyze
asan_GOALS := $(filter test-asan build/asan/%,$(GOALS))
tsan_GOALS := $(filter test-tsan build/tsan/%,$(GOALS))
release_GOALS := $(filter-out $(PLAIN_GOALS) $(asan_GOALS) $(tsan_GOALS),$(GOALS))
SETS := $(foreach s,release asan tsan,$(if $($s_GOALS),$s))

# ---- packages: asked for only by the goals that promise to install them, before anything is probed ----
SETUP := $(if $(DRY_RUN),,$(sort $(filter demo demo-mpi,$(GOALS:demo-optimizers=demo))) $(if $(filter test test-unit test-cli test-asan test-tsan,$(GOALS)),test))

FORCE:
build/packages.stamp: $(if $(strip $(SETUP)),$(if $(MAKE_RESTARTS),,FORCE))
	@mkdir -p build
	@for kind in $(SETUP); do scripts/setup.sh $$kind || exit 1; done
	@[ -e $@ ] || touch $@

PROBE_INPUTS = $(CC) | $(CXX) | $(CFLAGS) | $(LDFLAGS) | $(CBLAS_CFLAGS) | $(CBLAS_LIBS) | $(LAPACKE_CFLAGS) | $(LAPACKE_LIBS) | $(MPI_CFLAGS) | $(MPI_LIBS) | $(GTEST_DIR)
build/inputs.stamp: FORCE
	@mkdir -p build
	@echo '$(PROBE_INPUTS)' | cmp -s - $@ || echo '$(PROBE_INPUTS)' >$@

# Packages come and go: probe again when the system's list of them changes, and whenever `make info` asks.
build/%/config.mk: build/packages.stamp build/inputs.stamp scripts/probe.sh $(wildcard /var/lib/dpkg/status) \
                   $(if $(filter info,$(GOALS)),$(if $(MAKE_RESTARTS),,FORCE))
	@scripts/probe.sh config $* $@

include mk/sets.mk
include mk/batches.mk
include mk/cuda.mk
include mk/install.mk
ifneq ($(strip $(SETS)),)
include $(SETS:%=build/%/config.mk)
endif
$(foreach s,$(SETS),$(eval $(call set_rules,$s)))

# ---- targets ----
.PHONY: FORCE examples examples-cuda demo demo-mpi demo-optimizers test test-unit test-cli test-asan test-tsan test-headers headers test-dag test-symbols \
        test-rules test-fuzz info help format docs tidy analyze clean $(BENCHES:%=bench-%)

# What an MPI is needed for ends in _mpi.
examples: $(patsubst %,build/examples/%,$(filter-out $(if $(filter 1,$(release_MPI)),,%_mpi),$(EXAMPLES))) ## builds examples/*.c as build/examples/<name>

examples-cuda: build/examples/train_gpt_cuda ## train_gpt with --device cuda; needs nvcc and CUDA's libraries

demo: examples ## installs what it needs, trains a GPT with Muon and AdamW, draws build/demo/loss.svg
	@scripts/demo.sh

demo-mpi: build/examples/train_gpt ## trains with threads and under mpirun, and compares the parameters
	@scripts/demo_mpi.sh

demo-optimizers: examples ## AdamW, Muon, Shampoo and SOAP at three rates each: a table, curves by step and by time
	@scripts/demo_optimizers.sh

test: $(release_TESTS) $(release_MPI_TESTS) examples ## installs what tests need, builds and runs them: unit, cli and dag
	@$(call run_tests,release,$(CLI_TESTS) scripts/check_rules.sh $(release_TESTS))

test-unit: $(release_TESTS) ## test programs, release flags (TESTS=text picks some)
	@$(call run_tests,release,$(release_TESTS))

test-asan: $(asan_TESTS) ## test programs under the address and undefined sanitizers, C loops
	@$(call run_tests,asan,$(asan_TESTS))

test-tsan: $(tsan_TESTS) ## test programs under the thread sanitizer, C loops
	@$(call run_tests,tsan,$(tsan_TESTS))

test-cli: $(release_MPI_TESTS) examples ## tests/cli/*.sh: the programs from the command line
	@$(call run_tests,release,$(CLI_TESTS))

headers: test-headers ## the same as test-headers
test-headers: ## each header alone and twice: C11, C++11, C++17; gcc, clang, nvcc
	@$(call run_tests,headers,scripts/check_headers.sh)

test-dag: ## include rules, forbidden calls, leaked names, SPDX lines
	@$(call run_tests,rules,scripts/check_rules.sh)

test-symbols: ## of the above: no name outside the prefixes, no exported symbol, no macro
	@scripts/check_rules.sh --only symbols
	@scripts/check_rules.sh --only macros

test-rules: ## plants one violation of each rule and expects test-dag to see it
	@$(call run_tests,rules-self-test,scripts/check_rules.sh --self-test)

test-fuzz: ## libFuzzer on the readers of files, FUZZ_SECONDS=60 in all; needs clang with libFuzzer
	@scripts/fuzz.sh $(FUZZ_SECONDS)

$(patsubst %,bench-%,$(filter-out collective strategies,$(BENCHES))): bench-%: build/bench/%
	build/bench/$* $(BENCH_ARGS)
# Under several launchers, and on hosts whose links the check program measures.
bench-collective: build/bench/collective $(release_MPI_TESTS)
	@scripts/bench_collective.sh $(BENCH_ARGS)
# The same, for hours; goes on where it was stopped.
bench-strategies: build/bench/strategies $(release_MPI_TESTS)
	@scripts/bench_strategies.sh $(BENCH_ARGS)

# The file is named as its header.
.PHONY: bench-newton-schulz
bench-newton-schulz: bench-newton_schulz

info: $(SETS:%=build/%/config.mk) ## what was detected, and why something is off
	@printf '%-14s %s\n' 'C compiler' "$(CC): $$($(CC) --version 2>&1 | head -n 1)" \
	  'C++ compiler' "$(CXX): $$($(CXX) --version 2>&1 | head -n 1)" \
	  make '$(MAKE_VERSION)' flags '$(release_FLAGS)' warnings '$(strip $(WARN))' \
	  'your flags' '$(strip $(CPPFLAGS) $(CFLAGS) $(CXXFLAGS) $(LDFLAGS))' \
	  'asan flags' '$(asan_FLAGS)' 'tsan flags' '$(tsan_FLAGS)'
	@cat build/release/config.log
	@scripts/probe.sh info
	@printf '%-14s %s\n' examples '$(EXAMPLES)' benchmarks '$(BENCHES)' 'test programs' '$(words $(TEST_SRCS))'

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST)) mk/install.mk
	@for b in $(BENCHES); do printf '  %-14s runs build/bench/%s (BENCH_ARGS=--quick)\n' "bench-$$b" $$b; done
	@printf '  %-14s %s\n' 'test-<suite>' 'suites: unit cli asan tsan headers dag symbols rules'

format: ## clang-format (14) over every source file
	git ls-files -co --exclude-standard -- '*.h' '*.c' '*.cpp' '*.cu' | xargs -r clang-format -i

docs: ## reference pages of the headers in build/docs/html; needs doxygen
	@command -v doxygen >/dev/null 2>&1 || { echo 'make docs: there is no doxygen (apt-get install doxygen)' >&2; exit 2; }
	@mkdir -p build/docs
	@MFSDP_VERSION=$$(sed -n 's/^#define MFSDP_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' mfsdp/config.h | paste -sd.) doxygen docs/doxygen/Doxyfile
	@echo 'build/docs/html/index.html'

tidy: ## clang-tidy and cppcheck over the headers and the small examples
	@scripts/tidy.sh

analyze: ## clang's static analyzer over headers, examples and benchmarks; minutes
	@scripts/analyze.sh

clean: ## removes build/
	rm -rf build
