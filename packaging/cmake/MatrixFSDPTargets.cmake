# SPDX-License-Identifier: MIT
# The interface targets, for an installed copy and for add_subdirectory alike. Expects
# MatrixFSDP_INCLUDE_DIR. MPI's and CUDA's come when they are asked for.
#
#   MatrixFSDP::core    the headers that include C standard headers only
#   MatrixFSDP::host    processors, ranks as threads; add any CBLAS or LAPACKE
#   MatrixFSDP::mpi     MPI-3
#   MatrixFSDP::cuda    CUDA and NCCL; MatrixFSDP_CUDA_KERNELS is the source to compile with them

function(matrixfsdp_target name)
  if(NOT TARGET MatrixFSDP::${name})
    add_library(MatrixFSDP::${name} INTERFACE IMPORTED GLOBAL)
    set_property(TARGET MatrixFSDP::${name} PROPERTY INTERFACE_LINK_LIBRARIES ${ARGN})
  endif()
endfunction()

if(NOT TARGET MatrixFSDP::core)
  matrixfsdp_target(core m)
  set_property(TARGET MatrixFSDP::core PROPERTY INTERFACE_INCLUDE_DIRECTORIES
    "${MatrixFSDP_INCLUDE_DIR}")
  # What bitwise equal results need. Never -ffast-math.
  set_property(TARGET MatrixFSDP::core PROPERTY INTERFACE_COMPILE_OPTIONS
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fno-math-errno;-ffp-contract=off>")
endif()

if(NOT TARGET MatrixFSDP::host)
  find_package(Threads)
  if(Threads_FOUND)
    matrixfsdp_target(host MatrixFSDP::core Threads::Threads)
  endif()
endif()

if("mpi" IN_LIST MatrixFSDP_FIND_COMPONENTS AND NOT TARGET MatrixFSDP::mpi)
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND AND TARGET MatrixFSDP::host)
    matrixfsdp_target(mpi MatrixFSDP::host MPI::MPI_C)
  endif()
endif()

if("cuda" IN_LIST MatrixFSDP_FIND_COMPONENTS AND NOT TARGET MatrixFSDP::cuda)
  find_package(CUDAToolkit)
  find_library(MatrixFSDP_NCCL nccl)
  if(CUDAToolkit_FOUND AND MatrixFSDP_NCCL AND TARGET MatrixFSDP::host)
    matrixfsdp_target(cuda MatrixFSDP::host CUDA::cudart CUDA::cublas CUDA::cublasLt CUDA::cusolver
      ${MatrixFSDP_NCCL})
  endif()
endif()
set(MatrixFSDP_CUDA_KERNELS "${MatrixFSDP_INCLUDE_DIR}/mfsdp/cuda/kernels.cu")
