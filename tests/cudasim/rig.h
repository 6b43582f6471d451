/* SPDX-License-Identifier: MIT */
/*
 * rig.h: the CUDA backend on the host double, for tests that know nothing of CUDA. The test programs
 * include none of the toolkit's headers, and the library's CUDA sources are compiled once.
 */
#ifndef MFSDP_TESTS_CUDASIM_RIG_H
#define MFSDP_TESTS_CUDASIM_RIG_H

#include "mfsdp/backend.h"

#include <string>

namespace test {

/* With a small workspace, and symmetric products by half from 64 rows on, so that tests see them. */
mfsdp_status cuda_rig_create(mfsdp_context *context, void **out, const mfsdp_backend **backend);
mfsdp_status cuda_rig_destroy(mfsdp_context *context, void *cuda);
/* What the double found wrong; "" on hardware. */
std::string cuda_rig_complaints();

} // namespace test

#endif // MFSDP_TESTS_CUDASIM_RIG_H
