/* SPDX-License-Identifier: MIT */
/*
 * runtime.h - the training runtime over the primitives: units are acquired, used and released,
 * their gradients reduced to the owners, and a step updates what each rank owns.
 *
 *   mfsdp_step_begin(rt, &step);                               // on every rank:
 *   for (u = 0; u < units; ++u) {
 *     mfsdp_unit_acquire(rt, u, MFSDP_USE_FORWARD);  forward(u);  mfsdp_unit_release(rt, u);
 *   }
 *   mfsdp_step_value(rt, loss);
 *   for (u = units; u-- > 0;) {
 *     mfsdp_unit_acquire(rt, u, MFSDP_USE_BACKWARD);  mfsdp_unit_grads(rt, u);  backward(u);
 *     mfsdp_unit_reduce(rt, u);  mfsdp_unit_release(rt, u);
 *   }
 *   mfsdp_step_end(rt, stop_requested);  mfsdp_step_verdict(rt, &verdict);
 *
 * (each call returns a status that must be checked). The full tensors are at mfsdp_unit_param and
 * mfsdp_unit_grad between these calls.
 *
 * Made so; what is marked (*) may be left out (all options and defaults: runtime/api.h):
 *
 *   param[i].compute = param[i].wire = MFSDP_BF16;   // (*) for mfsdp_plan_create: masters and sums
 *                                                    // stay f32, and so does what backward adds to
 *   plan_desc.residency = MFSDP_RESIDENCY_RESIDENT;  // (*) ZeRO-1: full parameters stay, and are
 *                                                    // gathered behind each update (resident.h)
 *   mfsdp_group group = mfsdp_group_default();
 *   group.plan = plan;                               // for the ranks of this transport
 *   group.transport = &inside;  group.control = &inside_control;
 *   group.replica = &across;    group.replica_control = &across_control;  // (*) HSDP: copies of it
 *   mfsdp_runtime_desc desc = mfsdp_runtime_desc_default();
 *   desc.backend = backend;  desc.groups = &group;  desc.group_count = 1;
 *   desc.optimizer = &optimizer;
 *   desc.prefetch_depth = desc.reduce_depth = 1;     // (*) with MFSDP_HOST_QUEUE_WORKER
 *   desc.state_space = MFSDP_SPACE_HOST;             // (*) offload of masters and optimizer state
 *   desc.banded_update = MFSDP_BANDED_EVERYWHERE;    // (*) where BANDED matrices are worked on
 *   mfsdp_runtime_memory(context, &desc, &memory);   // (*) bytes by class, before anything is held
 *   mfsdp_runtime_create(context, &desc, &rt);
 *   mfsdp_runtime_init(rt, fill, user);
 *
 * Order and equality: every rank makes the same calls in the same order. Micro-batch i of rank r is
 * sample block i * world + r; gradients are added in that order, so with DIRECT all (world,
 * micro-batches) of the same product give the same bits, for one binary, machine and BLAS thread
 * count.
 * Failure: a status of the communication or the backend poisons the transport and the runtime;
 * later calls return E_POISONED with the first message. Calls in the wrong order are E_STATE and
 * change nothing.
 * Does not: compute a model, own the transport, or exit.
 * Link flags: -lm.
 */
#ifndef MFSDP_RUNTIME_H
#define MFSDP_RUNTIME_H

#include "runtime/api.h"
#include "runtime/banded.h"
#include "runtime/check.h"
#include "runtime/grads.h"
#include "runtime/measure.h"
#include "runtime/measure_banded.h"
#include "runtime/params.h"
#include "runtime/progress.h"
#include "runtime/resident.h"
#include "runtime/setup.h"
#include "runtime/setup_agree.h"
#include "runtime/setup_banded.h"
#include "runtime/setup_register.h"
#include "runtime/setup_stage.h"
#include "runtime/setup_units.h"
#include "runtime/setup_verdict.h"
#include "runtime/stage.h"
#include "runtime/step.h"
#include "runtime/tables.h"
#include "runtime/units.h"

#endif /* MFSDP_RUNTIME_H */
