/* SPDX-License-Identifier: MIT */
#include "strategy.h"

static const gpt_strategy strategies[GPT_STRATEGY_COUNT] = {
    {"matrix", MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_OWNED, MFSDP_RESIDENCY_SHARDED, 0, 0},
    {"gather", MFSDP_PLACEMENT_BANDED, MFSDP_PLACEMENT_OWNED, MFSDP_RESIDENCY_SHARDED, 1, 0},
    {"alltoall", MFSDP_PLACEMENT_BANDED, MFSDP_PLACEMENT_OWNED, MFSDP_RESIDENCY_SHARDED, 0, 0},
    {"zero1", MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_OWNED, MFSDP_RESIDENCY_RESIDENT, 0, 0},
    {"replicated", MFSDP_PLACEMENT_REPLICATED, MFSDP_PLACEMENT_REPLICATED, MFSDP_RESIDENCY_RESIDENT,
     0, 0},
    {"hybrid", MFSDP_PLACEMENT_OWNED, MFSDP_PLACEMENT_OWNED, MFSDP_RESIDENCY_SHARDED, 0, 1},
};

const gpt_strategy *gpt_strategy_at(int32_t index) {
  return index >= 0 && index < GPT_STRATEGY_COUNT ? &strategies[index] : NULL;
}

void gpt_strategy_params(const gpt_strategy *strategy, mfsdp_param *params, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    params[i].placement =
        params[i].role == MFSDP_ROLE_MATRIX ? strategy->matrices : strategy->elements;
}

/* FLOP/s over byte/s of the link, over the two FLOPs of a multiply-add, the unit of gpt_plan_create's
 * costs of Muon by BALANCED: what a byte costs at the 12,480 of an A100 on 25 GB/s. It scales what is
 * predicted, not what is chosen. */
#define GPT_WIRE_COST 6240

void gpt_strategy_plan(const gpt_strategy *strategy, mfsdp_plan_desc *desc) {
  desc->residency = strategy->residency;
  if (!strategy->allow_banded) return;
  desc->allow_banded = 1;
  desc->banded_wire_cost = GPT_WIRE_COST;
}

void gpt_strategy_runtime(const gpt_strategy *strategy, mfsdp_runtime_desc *desc) {
  if (strategy->everywhere) desc->banded_update = MFSDP_BANDED_EVERYWHERE;
}
