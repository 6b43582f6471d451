/* SPDX-License-Identifier: MIT */
/*
 * matrixfsdp.h - MatrixFSDP in C: sharded training in which one rank owns each matrix whole.
 *
 * Muon needs a whole 2-D matrix to compute an update; ZeRO-3 gives every rank a slice. Here each
 * matrix has one owner that holds it whole and the others hold empty shards: forward and backward
 * gather a unit's parameters as usual, the backward reduction goes to the owner, and the optimizer
 * step moves no matrix bytes at any world size (arXiv 2607.05895).
 *
 * This header holds no code: it includes the core. Each header is useful alone:
 *
 *   plan.h, shard.h     who owns what; pure integers, no communication
 *   simulate.h          time and bytes of a step on a cluster that need not be at hand
 *   newton_schulz.h     orthogonalize one matrix
 *   muon.h, adamw.h     update one tensor
 *   shampoo.h, soap.h   update one matrix, by a backend with eigenvectors
 *   optimizer.h         route many local tensors
 *   schedule.h          learning-rate schedules, as a function of the step
 *   collective.h        owner-segment gather and reduce over your transport
 *   runtime.h           units, steps, verdicts: all of the above in a training loop
 *   safetensors.h       headers of safetensors files and their index, read and written
 *   checkpoint.h        saves and loads a runtime as such files; io.h: the table of file calls below it
 *   backend.h, transport.h   the two tables to implement for another device or network
 *   context.h           the per-rank context: allocator, log, trace, last error
 *
 * and one from each of the folders that touch the outside:
 *
 *   mfsdp/host/backend_host.h       C loops, or any CBLAS through mfsdp/host/math_cblas.h; any LAPACKE
 *                                   through math_lapacke.h, for Shampoo and SOAP
 *   mfsdp/host/newton_schulz_host.h newton_schulz.h in one call, without a backend; needs -lm alone
 *   mfsdp/host/transport_threads.h  ranks are threads of this process; threads_run.h starts them
 *   mfsdp/posix/io_posix.h          files, for checkpoints; background_posix.h: a thread for their saves
 *
 * Flags: -O3 -march=native -fno-math-errno -ffp-contract=off   (never -ffast-math)
 * Link:  -lm; host: -lpthread; math_cblas.h: -lopenblas or another CBLAS; math_lapacke.h: -llapacke.
 *        POSIX 2008 for host/.
 *
 * MPI is in mfsdp/mpi/transport_mpi.h; CUDA and NCCL, not yet run on hardware, in mfsdp/cuda/ (README.md).
 *
 * Does not: compute your model, choose a role for a tensor, start processes, or exit.
 */
#ifndef MFSDP_MATRIXFSDP_H
#define MFSDP_MATRIXFSDP_H

#include "mfsdp/adamw.h"
#include "mfsdp/backend.h"
#include "mfsdp/backend_check.h"
#include "mfsdp/background.h"
#include "mfsdp/checkpoint.h"
#include "mfsdp/collective.h"
#include "mfsdp/config.h"
#include "mfsdp/context.h"
#include "mfsdp/cost.h"
#include "mfsdp/dtype.h"
#include "mfsdp/io.h"
#include "mfsdp/memory.h"
#include "mfsdp/muon.h"
#include "mfsdp/newton_schulz.h"
#include "mfsdp/optimizer.h"
#include "mfsdp/plan.h"
#include "mfsdp/precondition.h"
#include "mfsdp/random.h"
#include "mfsdp/runtime.h"
#include "mfsdp/safetensors.h"
#include "mfsdp/schedule.h"
#include "mfsdp/shampoo.h"
#include "mfsdp/shard.h"
#include "mfsdp/simulate.h"
#include "mfsdp/soap.h"
#include "mfsdp/status.h"
#include "mfsdp/transport.h"
#include "mfsdp/types.h"

#endif /* MFSDP_MATRIXFSDP_H */
