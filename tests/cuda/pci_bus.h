/* SPDX-License-Identifier: MIT */
/*
 * pci_bus.h: the one call of CUDA that bootstrap.h makes and the double's small headers do not
 * have. cudasim/pci_bus.cpp defines it, unless a test does.
 */
#ifndef MFSDP_TESTS_CUDA_PCI_BUS_H
#define MFSDP_TESTS_CUDA_PCI_BUS_H

#include <cuda_runtime_api.h>

extern "C" cudaError_t cudaDeviceGetPCIBusId(char *out, int nbytes, int device);

#endif // MFSDP_TESTS_CUDA_PCI_BUS_H
