# SPDX-License-Identifier: MIT
# The rules of one flag set (release, asan, tsan): everything it builds lies in build/<set>/.

comma := ,
POSIX := -D_POSIX_C_SOURCE=200809L
# Benchmarks include the examples' model and print how they were built.
BENCH_DEFS = -Iexamples -Ibench -DMFSDP_BENCH_BUILD='"$(CC) -std=c11 $(release_FLAGS) $(CFLAGS)"'
WRAP := -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=aligned_alloc,--wrap=posix_memalign

# $(call run_tests,LOGS,PROGRAMS): one more at a time where tests/cli/mpi.sh is among them, which mostly waits
run_tests = scripts/run_tests.sh -j $(if $(filter %/mpi.sh,$2),$(shell expr $(JOBS) + 1),$(JOBS)) -l build/$1/logs $(if $($1_RUNNER),-r '$($1_RUNNER)') -- $2

ifneq ($(GTEST_DIR),)
GTEST_CFLAGS := -isystem $(GTEST_DIR)/include
endif

# $1: the set
define set_rules
$1_DEFS := -I. $(POSIX) -DMFSDP_EXAMPLE_CBLAS=$($1_CBLAS) -DMFSDP_EXAMPLE_LAPACKE=$($1_LAPACKE) -DMFSDP_EXAMPLE_MPI=$($1_MPI) \
  $($1_CBLAS_CFLAGS) $($1_LAPACKE_CFLAGS) $($1_MPI_CFLAGS) $(CPPFLAGS)
$1_CC := $(CC) -std=c11 -Wpedantic $(WARN) $($1_WERROR) $($1_FLAGS) $$($1_DEFS) $(CFLAGS)
$1_CXX := $(CXX) -std=c++14 $(WARN) $($1_WERROR) $($1_FLAGS) $$($1_DEFS) -DMFSDP_TEST_SANITIZER=$($1_SANITIZER) -DMFSDP_TEST_TSAN=$(if $(filter tsan,$1),1,0) $(GTEST_CFLAGS) $(CXXFLAGS)
$1_LINK := $($1_FLAGS) $(LDFLAGS)
# MPI is linked to what calls it alone.
$1_LIBS := $(if $($1_MPI_LIBS),-Wl$(comma)--as-needed $($1_MPI_LIBS) -Wl$(comma)--no-as-needed) $($1_LAPACKE_LIBS) $($1_CBLAS_LIBS) -lpthread -lm
$1_GTEST_LIBS := $(if $(GTEST_DIR),build/$1/libgtest.a,-lgtest_main -lgtest)
# What runs under mpirun: made where there is an MPI, and linked to it alone.
$1_MPI_TESTS := $(if $(filter 1,$($1_MPI)),$(MPI_TEST_SRCS:%.c=build/$1/%))
# Tests that count allocations carry a marker comment; the sanitizers have an allocator of their own.
$1_WRAP_SRCS := $(if $(filter 0,$($1_SANITIZER)),$(filter $(TEST_WRAP_SRCS),$($1_TEST_SRCS)))
$1_CUDA_SRCS := $(filter $(CUDA_TEST_SRCS),$($1_TEST_SRCS))
# One defines main, the other starts itself again.
$1_CUDA_ALONE := $$(filter tests/cuda/bench% tests/cudasim/%,$$($1_CUDA_SRCS))
$1_CUDA_BATCHED := $$(filter-out $$($1_CUDA_ALONE),$$($1_CUDA_SRCS))
$1_PLAIN_SRCS := $$(filter-out $$($1_WRAP_SRCS) $$($1_CUDA_SRCS),$($1_TEST_SRCS))
# What includes CUDA's headers is compiled with flags of its own.
$1_TESTS := $$(or $$(strip $$(call batch_programs,$1,batch,$$($1_PLAIN_SRCS)) $$(call batch_programs,$1,batch/wrap,$$($1_WRAP_SRCS)) \
  $$(call batch_programs,$1,batch/cuda,$$($1_CUDA_BATCHED)) $$(if $$(call batches,x),$$($1_CUDA_ALONE:%.cpp=build/$1/%))),\
  $(patsubst %.cpp,build/$1/%,$($1_TEST_SRCS)))
$$(foreach b,$$(call batches,$$($1_PLAIN_SRCS)),$$(eval $$(call batch_rules,$1,batch,$$b)))
$$(foreach b,$$(call batches,$$($1_WRAP_SRCS)),$$(eval $$(call batch_rules,$1,batch/wrap,$$b)))
$$(foreach b,$$(call batches,$$($1_CUDA_BATCHED)),$$(eval $$(call batch_rules,$1,batch/cuda,$$b)))

# Objects are made again when a command line changes, not only when a file does.
build/$1/flags.stamp: FORCE | build/$1/config.mk
	$(if $(strip $($1_BROKEN)),@echo '$(strip $($1_BROKEN)): does not work (see build/$1/config.log)' >&2; exit 1)
	@printf '%s\n' '$$($1_CC)' '$$($1_CXX)' '$($1_TEST_FLAGS)' '$$($1_LIBS)' | cmp -s - $$@ || \
	  printf '%s\n' '$$($1_CC)' '$$($1_CXX)' '$($1_TEST_FLAGS)' '$$($1_LIBS)' >$$@

build/$1/%.o: %.c build/$1/flags.stamp
	@mkdir -p $$(@D)
	$$(call say,CC,$$@)$$($1_CC) $$(if $$(filter bench/%,$$<),$$(BENCH_DEFS)) $$(if $$(filter tests/mpi/bootstrap%,$$<),$($1_CUDA_CFLAGS)) -MMD -MP -c $$< -o $$@

build/$1/%.o: %.cpp build/$1/flags.stamp
	@mkdir -p $$(@D)
	$$(call say,CXX,$$@)$$($1_CXX) $$(if $$(filter tests/%,$$<),$($1_TEST_FLAGS)) \
	  $$(if $$(filter tests/cuda%,$$<),-Itests/cudasim/include $($1_CUDA_CFLAGS)) -MMD -MP -c $$< -o $$@

# Archives are made again when a file goes, too (q, not r: two folders may hold files of one name).
build/$1/files.stamp: FORCE
	@mkdir -p $$(@D)
	@echo '$(EXAMPLE_SRCS) $(BENCH_SUPPORT_SRCS) $(TEST_SUPPORT_SRCS)' | cmp -s - $$@ || \
	  echo '$(EXAMPLE_SRCS) $(BENCH_SUPPORT_SRCS) $(TEST_SUPPORT_SRCS)' >$$@

build/$1/libexamples.a: $(EXAMPLE_SRCS:%.c=build/$1/%.o)
build/$1/libbench.a: $(patsubst %,build/$1/%.o,$(basename $(BENCH_SUPPORT_SRCS)))
build/$1/libsupport.a: $(TEST_SUPPORT_SRCS:%.cpp=build/$1/%.o)
build/$1/%.a: build/$1/files.stamp
	@mkdir -p $$(@D) && rm -f $$@
	@$(AR) qcs $$@ $$(filter %.o,$$^)

build/$1/gtest/%.o: $(GTEST_DIR)/src/%.cc build/$1/flags.stamp
	@mkdir -p $$(@D)
	$$(call say,CXX,$$@)$(CXX) -std=c++14 $($1_FLAGS) $(GTEST_CFLAGS) -I$(GTEST_DIR) -c $$< -o $$@
build/$1/libgtest.a: build/$1/gtest/gtest-all.o build/$1/gtest/gtest_main.o

build/$1/examples/%: build/$1/examples/%.o build/$1/libexamples.a
	$$(call say,LINK,$$@)$(CC) $$($1_LINK) $$(filter %.o,$$^) build/$1/libexamples.a $$($1_LIBS) -o $$@

build/$1/tests/mpi/%: build/$1/tests/mpi/%.o
	$$(call say,LINK,$$@)$(CC) $$($1_LINK) $$(filter %.o,$$^) $$($1_LIBS) -o $$@

build/$1/bench/%: build/$1/bench/%.o build/$1/libbench.a build/$1/libexamples.a
	$$(call say,LINK,$$@)$(CXX) $$($1_LINK) $$(filter %.o,$$^) build/$1/libbench.a build/$1/libexamples.a $$($1_LIBS) -o $$@

build/$1/tests/%_test: build/$1/tests/%_test.o build/$1/libsupport.a build/$1/libexamples.a \
                       $(if $(GTEST_DIR),build/$1/libgtest.a)
	$$(call say,LINK,$$@)$(CXX) $$($1_LINK) $$(if $$(filter batch/wrap/% $$($1_WRAP_SRCS:tests/%_test.cpp=%),$$*),$$(WRAP)) \
	  $$(filter %.o,$$^) build/$1/libsupport.a build/$1/libexamples.a $$($1_GTEST_LIBS) $$($1_LIBS) -o $$@

-include $$(shell [ ! -d build/$1 ] || find build/$1 -name '*.d')
endef

# The short names in build/ are links into the release set.
build/examples/%: build/release/examples/%
	@mkdir -p $(@D)
	@ln -sfn ../release/examples/$* $@
build/bench/%: build/release/bench/%
	@mkdir -p $(@D)
	@ln -sfn ../release/bench/$* $@
