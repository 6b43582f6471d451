/* SPDX-License-Identifier: MIT */
/*
 * plan.h - who owns what: cuts tensors into matrices and element runs, each with one owner rank.
 *
 *   mfsdp_param params[2] = {mfsdp_param_default(), mfsdp_param_default()};
 *   params[0].name = "embed"; params[0].unit = 0; params[0].role = MFSDP_ROLE_ELEMENTWISE;
 *   params[0].ndim = 2; params[0].shape[0] = 256; params[0].shape[1] = 64;
 *   params[1].name = "w"; params[1].unit = 1; params[1].role = MFSDP_ROLE_MATRIX;
 *   params[1].ndim = 2; params[1].shape[0] = 64; params[1].shape[1] = 64;
 *   mfsdp_plan_desc desc = mfsdp_plan_desc_default();
 *   desc.params = params; desc.param_count = 2; desc.world = 4;
 *   if (mfsdp_plan_create(&context, &desc, &plan) != MFSDP_OK) ...   // mfsdp_plan *plan
 *   mfsdp_plan_audit(&context, plan, NULL, print_line, NULL);
 *
 * A plan is a pure function of its description: every rank computes the same bytes, and the ranks
 * compare mfsdp_plan_hash before they trust each other.
 *
 *   plan/desc.h       mfsdp_param, mfsdp_plan_desc, mfsdp_piece, mfsdp_norm_block and their rules
 *   plan/param.h      mfsdp_param_validate, how views cut
 *   plan/create.h     mfsdp_plan_create, mfsdp_plan_destroy
 *   plan/table.h      mfsdp_plan_world, _param, _param_find, _param_owner, _param_offset, _pieces,
 *                     _param_pieces, _unit_count, _unit_params, _unit_count_elements, _unit_dtype,
 *                     _segment_count, _block_count, _blocks, _hash, ...
 *   plan/serialize.h  mfsdp_plan_serialize, mfsdp_plan_param_hash
 *   plan/audit.h      mfsdp_plan_report, mfsdp_plan_loads, mfsdp_plan_audit
 *   plan/place.h      the planners and the tails; plan/balance.h, search.h, exact.h BALANCED;
 *   plan/hybrid.h     allow_banded: which matrices become BANDED
 *   plan/caps.h       what caps allow; plan/bound.h lower bounds; plan/layout.h offsets;
 *                     plan/check.h, plan/heap.h private
 * Does not: communicate, hold tensor data, guess a role from a shape or a name, or read plans back.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_H
#define MFSDP_PLAN_H

#include "cost.h"
#include "plan/audit.h"
#include "plan/create.h"
#include "plan/desc.h"
#include "plan/param.h"
#include "plan/serialize.h"
#include "plan/table.h"

#endif /* MFSDP_PLAN_H */
