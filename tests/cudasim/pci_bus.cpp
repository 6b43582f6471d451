/* SPDX-License-Identifier: MIT */
/* Where devices are, for programs whose test does not say it itself (tests/cuda/pci_bus.h). */
#include "tests/cuda/pci_bus.h"

#include <cstdio>

cudaError_t cudaDeviceGetPCIBusId(char *out, int nbytes, int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return error;
  if (device < 0 || device >= count) return cudaErrorInvalidDevice;
  std::snprintf(out, static_cast<std::size_t>(nbytes), "0000:%02x:00.0", device + 16);
  return cudaSuccess;
}
