# SPDX-License-Identifier: MIT
# build/examples/train_gpt_cuda: train_gpt with --device cuda, for sm_80, sm_90 and, by PTX, later
# devices, and with --transport nccl where there is an NCCL. Made when asked for alone: it needs nvcc
# and CUDA's libraries, which Debian has not.
#   make examples-cuda [NVCC=nvcc] [CUDA_ARCH=-arch=native] [NCCL_CFLAGS=-I...] [NCCL_LIBS='-L... -lnccl']

ifneq ($(filter examples-cuda %/train_gpt_cuda build/release/cuda/%,$(GOALS)),)

CUDA_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode 'arch=compute_90,code=[sm_90,compute_90]'
nvcc_found := $(firstword $(shell command -v $(or $(NVCC),nvcc) /usr/local/cuda/bin/nvcc))
cuda_root := $(patsubst %/bin/,%,$(dir $(nvcc_found)))
cuda_libs := -L$(cuda_root)/lib64 -Wl,-rpath,$(cuda_root)/lib64 -lcusolver -lcublas -lcublasLt -lcudart
NCCL_CFLAGS ?=
NCCL_LIBS ?= -L$(cuda_root)/lib -Wl,-rpath,$(cuda_root)/lib -lnccl
# bootstrap.h needs 2.19.3. (\043 is the character that make takes for a comment.)
nccl_found := $(if $(nvcc_found),$(shell printf '\043include <nccl.h>\nint v[NCCL_VERSION_CODE < 21903 ? -1 : 1];\nint main(void) { return ncclGetVersion(v) != 0; }\n' | \
  $(CC) -x c - -isystem $(cuda_root)/include $(NCCL_CFLAGS) $(NCCL_LIBS) $(cuda_libs) -o build/nccl.probe 2>/dev/null && echo 1; rm -f build/nccl.probe))
cuda_defs := -DMFSDP_EXAMPLE_CUDA=1 -DMFSDP_EXAMPLE_NCCL=$(or $(nccl_found),0) -isystem $(cuda_root)/include $(NCCL_CFLAGS)

CUDA_SRCS := examples/train_gpt.c $(wildcard examples/gpt/*.c examples/gpt/cuda/*.c) mfsdp/cuda/kernels.cu $(wildcard examples/gpt/cuda/*.cu)
CUDA_OBJS := $(patsubst %,build/release/cuda/%.o,$(basename $(if $(nccl_found),$(CUDA_SRCS),$(filter-out %_nccl.c,$(CUDA_SRCS)))))

build/release/cuda/flags.stamp: FORCE
	$(if $(nvcc_found),,@echo 'train_gpt_cuda: there is no nvcc (NVCC=...)' >&2; exit 2)
	@mkdir -p $(@D)
	@printf '%s\n' "$(cuda_defs) $(CUDA_ARCH)" | cmp -s - $@ || printf '%s\n' "$(cuda_defs) $(CUDA_ARCH)" >$@

build/release/cuda/%.o: %.c build/release/flags.stamp build/release/cuda/flags.stamp
	@mkdir -p $(@D)
	$(call say,CC,$@)$(release_CC) $(cuda_defs) -MMD -MP -c $< -o $@

build/release/cuda/%.o: %.cu build/release/flags.stamp build/release/cuda/flags.stamp
	@mkdir -p $(@D)
	$(call say,NVCC,$@)$(nvcc_found) -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wconversion,-Wshadow,-fvisibility=hidden \
	  $(CUDA_ARCH) -I. -MMD -MP -MF $(@:.o=.d) -c $< -o $@

build/release/examples/train_gpt_cuda: $(CUDA_OBJS)
	@mkdir -p $(@D)
	$(call say,LINK,$@)$(CXX) $(release_LINK) $(filter %.o,$^) $(if $(nccl_found),$(NCCL_LIBS)) $(cuda_libs) $(release_LIBS) -o $@

endif
