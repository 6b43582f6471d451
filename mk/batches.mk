# SPDX-License-Identifier: MIT
# Several test files in one program: one by one, each would compile the library and the rigs again,
# which is most of the time that the test suites take. With TESTS=text each file is a program of its
# own: quicker to make again after a change, and quick to run.
BATCH ?= $(if $(TESTS),1,16)

# $(call batches,FILES): words FILE,FILE,... (none if a program has one file). Files are dealt out, so
# that those of one folder, which take alike long, do not meet in one program.
batches = $(if $(filter-out 1,$(BATCH)),$(shell echo $1 | awk -v most=$(BATCH) '{ n = int((NF + most - 1) / most); \
  for (i = 1; i <= NF; i++) batch[(i - 1) % n] = batch[(i - 1) % n] (i > n ? "," : "") $$i; \
  for (i = 0; i < n; i++) print batch[i] }'))
batch_files = $(subst $(comma), ,$1)
# A batch is named by its first file: tests/plan/heap_test.cpp,... is FOLDER/plan-heap_test.
batch_name = $1/$(subst /,-,$(patsubst tests/%.cpp,%,$(firstword $(call batch_files,$2))))

# $(call batch_programs,SET,FOLDER,FILES)
batch_programs = $(foreach b,$(call batches,$3),build/$1/tests/$(call batch_name,$2,$b))

# $(call batch_rules,SET,FOLDER,BATCH): its source is made again when the list changes, not only a file.
define batch_rules
build/$1/tests/$(call batch_name,$2,$3).cpp: FORCE
	@mkdir -p $$(@D)
	@scripts/test_batch.sh $(call batch_files,$3) >$$@.new && { cmp -s $$@.new $$@ && rm $$@.new || mv $$@.new $$@; }
build/$1/tests/$(call batch_name,$2,$3).o: build/$1/tests/$(call batch_name,$2,$3).cpp build/$1/flags.stamp
	$$(call say,CXX,$$@)$$($1_CXX) $($1_TEST_FLAGS) $(if $(filter batch/cuda,$2),-Itests/cudasim/include $($1_CUDA_CFLAGS)) -MMD -MP -c $$< -o $$@
endef
