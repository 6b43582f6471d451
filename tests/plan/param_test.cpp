/* SPDX-License-Identifier: MIT */
/* One row per rule of descriptions: what breaks it, the status, and a part of the message. */
#include "mfsdp/plan/param.h"

#include "tests/support/plan_cases.h"

#include <cstring>
#include <functional>

namespace {

using test::Params;
using test::PlanRig;

/* Indices into the valid list of make_valid. */
enum { kWhole, kConv, kBatch, kRows, kHeads, kVector, kFrozen, kAlias, kCount };

void make_valid(Params *p) {
  p->add("whole", MFSDP_ROLE_MATRIX, 0, {16, 8});
  p->add("conv", MFSDP_ROLE_MATRIX, 0, {6, 3, 5, 5}).view = MFSDP_VIEW_CONV;
  p->add("batch", MFSDP_ROLE_MATRIX, 1, {4, 8, 6}).view = MFSDP_VIEW_BATCH;
  p->add_rows("rows", 1, {8, 4, 4}, 8);
  p->add_heads("heads", 1, 4, 16, 8);
  p->add("vector", MFSDP_ROLE_ELEMENTWISE, 2, {300});
  p->add("frozen", MFSDP_ROLE_FROZEN, 2, {10, 10});
  p->add_alias("alias", kWhole, 2);
}

struct Rule {
  const char *name;
  std::function<void(std::vector<mfsdp_param> &, mfsdp_plan_desc &)> breaks;
  mfsdp_status status;
  std::vector<std::string> says;
};

typedef std::vector<mfsdp_param> List;
typedef mfsdp_plan_desc Desc;

#define BREAK [](List & p, Desc & d)
#define UNUSED (void)p, (void)d

const int64_t kHuge[2] = {INT64_MAX, 1};
const int64_t kNegative[3] = {20, -4, 0};
const int64_t kSeven[2] = {5, 2}, kEight[2] = {6, 2};
const int64_t kLoads[3] = {1, -7, 0};
const int32_t kNodesOver[3] = {0, 2, 3}, kNodesUnder[3] = {0, -1, 0};
const int64_t kLoadsOver[3] = {INT64_MAX, 1, 0};

int64_t negative_cost(void *, int32_t, int64_t, int64_t) {
  return -5;
}
int64_t huge_cost(void *, int32_t, int64_t, int64_t) {
  return INT64_MAX / 2;
}

const Rule kRules[] = {{"DescSize", BREAK{UNUSED;
d.struct_nbytes = 8;
} // namespace
, MFSDP_E_ARGUMENT, {
  "desc.struct_nbytes is 8", "mfsdp_plan_desc_default"
}
}
, {"WorldZero", BREAK{UNUSED;
d.world = 0;
}
, MFSDP_E_ARGUMENT, {
  "world is 0", "needs 1 to 1048576"
}
}
, {"WorldNegative", BREAK{UNUSED;
d.world = -3;
}
, MFSDP_E_ARGUMENT, {
  "world is -3"
}
}
, {"WorldTooLarge", BREAK{UNUSED;
d.world = (1 << 20) + 1;
}
, MFSDP_E_ARGUMENT, {
  "world is 1048577"
}
}
, {"CountNegative", BREAK{UNUSED;
d.param_count = -1;
}
, MFSDP_E_ARGUMENT, {
  "param_count is -1"
}
}
, {"ParamsNull", BREAK{UNUSED;
d.params = nullptr;
}
, MFSDP_E_ARGUMENT, {
  "params is NULL", "8 descriptions"
}
}
, {"PlannerInvalid", BREAK{UNUSED;
d.planner = static_cast<mfsdp_planner>(0);
}
, MFSDP_E_ARGUMENT, {
  "planner is 0"
}
}
, {"CapNbytesNegative", BREAK{UNUSED;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_resident_nbytes = -1;
}
, MFSDP_E_ARGUMENT, {
  "caps.max_resident_nbytes is -1", "at least 0"
}
}
, {"CapGammaBelowOne", BREAK{UNUSED;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_gamma_permille = 999;
}
, MFSDP_E_ARGUMENT, {
  "caps.max_gamma_permille is 999", "at least 1000"
}
}
, {"CapOwnersZero", BREAK{UNUSED;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_owners = 0;
}
, MFSDP_E_ARGUMENT, {
  "caps.max_owners is 0", "at least 1"
}
}
, {"CapOfAPlannerThatKeepsNone", BREAK{UNUSED;
d.caps.max_owners = 2;
}
, MFSDP_E_ARGUMENT, {
  "caps.max_owners is 2", "scope-greedy does not keep it", "needs balanced"
}
}
, {"CapGammaOfRoleGreedy", BREAK{UNUSED;
d.planner = MFSDP_PLANNER_ROLE_GREEDY;
d.caps.max_gamma_permille = 2000;
}
, MFSDP_E_ARGUMENT, {
  "role-greedy does not keep it"
}
}
, {"CapNbytesOfCostAware", BREAK{UNUSED;
d.planner = MFSDP_PLANNER_COST_AWARE;
d.caps.max_resident_nbytes = 1 << 30;
}
, MFSDP_E_ARGUMENT, {
  "cost-aware does not keep it"
}
}
, {"NodeTooLarge", BREAK{UNUSED;
d.node_of_rank = kNodesOver;
}
, MFSDP_E_ARGUMENT, {
  "node_of_rank[2] is 3", "0 to world - 1 = 2"
}
}
, {"NodeNegative", BREAK{UNUSED;
d.node_of_rank = kNodesUnder;
}
, MFSDP_E_ARGUMENT, {
  "node_of_rank[1] is -1"
}
}
, {"ResidencyInvalid", BREAK{UNUSED;
d.residency = static_cast<mfsdp_residency>(0);
}
, MFSDP_E_ARGUMENT, {
  "residency is 0"
}
}
, {"ResidencyTooLarge", BREAK{UNUSED;
d.residency = static_cast<mfsdp_residency>(3);
}
, MFSDP_E_ARGUMENT, {
  "residency is 3", "mfsdp_residency"
}
}
, {"BaseLoadNegative", BREAK{UNUSED;
d.base_load = kLoads;
}
, MFSDP_E_ARGUMENT, {
  "base_load[1] is -7"
}
}
, {"BaseLoadOverflow", BREAK{UNUSED;
d.base_load = kLoadsOver;
}
, MFSDP_E_OVERFLOW, {
  "base_load", "rank 1"
}
}
, {"CostNegative", BREAK{UNUSED;
d.cost = negative_cost;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "cost callback gave -5", "16 x 8"
}
}
, {"CostOverflow", BREAK{UNUSED;
d.cost = huge_cost;
}
, MFSDP_E_OVERFLOW, {
  "costs sum past 64 bits"
}
}
,

    {"ParamSize", BREAK{UNUSED;
p[kRows].struct_nbytes += 8;
}
, MFSDP_E_ARGUMENT, {
  "params[3].struct_nbytes", "mfsdp_param_default"
}
}
, {"ParamSizeOfTheFirst", BREAK{UNUSED;
p[0].struct_nbytes = 0;
}
, MFSDP_E_ARGUMENT, {
  "params[0].struct_nbytes is 0"
}
}
, {"NameNull", BREAK{UNUSED;
p[kConv].name = nullptr;
}
, MFSDP_E_ARGUMENT, {
  "params[1].name is NULL"
}
}
, {"NameEmpty", BREAK{UNUSED;
p[kConv].name = "";
}
, MFSDP_E_ARGUMENT, {
  "params[1].name is empty"
}
}
, {"NameTwice", BREAK{UNUSED;
p[kVector].name = "batch";
}
, MFSDP_E_ARGUMENT, {
  "params[5] 'batch'", "taken by params[2]"
}
}
, {"UnitNegative", BREAK{UNUSED;
p[kConv].unit = -1;
}
, MFSDP_E_ARGUMENT, {
  "'conv'", "unit is -1"
}
}
, {"UnitTooLarge", BREAK{UNUSED;
p[kConv].unit = 1 << 20;
}
, MFSDP_E_ARGUMENT, {
  "'conv'", "unit is 1048576", "needs 0 to 1048575"
}
}
, {"HyperGroupNegative", BREAK{UNUSED;
p[kConv].hyper_group = -2;
}
, MFSDP_E_ARGUMENT, {
  "'conv'", "hyper_group is -2"
}
}
, {"NdimZero", BREAK{UNUSED;
p[kVector].ndim = 0;
}
, MFSDP_E_ARGUMENT, {
  "'vector'", "ndim is 0", "needs 1 to 8"
}
}
, {"NdimNine", BREAK{UNUSED;
p[kVector].ndim = 9;
}
, MFSDP_E_ARGUMENT, {
  "ndim is 9"
}
}
, {"DimensionNegative", BREAK{UNUSED;
p[kWhole].shape[1] = -8;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "shape[1] is -8"
}
}
, {"ShapeOverflows64Bits", BREAK{UNUSED;
p[kFrozen].shape[0] = p[kFrozen].shape[1] = INT64_C(1) << 33;
}
, MFSDP_E_OVERFLOW, {
  "'frozen'", "elements"
}
}
, {"ShapeBeyondTheLimit", BREAK{UNUSED;
p[kVector].shape[0] = (INT64_C(1) << 46) + 1;
}
, MFSDP_E_OVERFLOW, {
  "'vector'", "70368744177664 elements"
}
}
, {"SumBeyondTheLimit", BREAK{UNUSED;
p[kVector].shape[0] = INT64_C(1) << 46;
}
, MFSDP_E_OVERFLOW, {
  "'vector'", "with it the tensors have"
}
}
, {"RoleForgotten", BREAK{UNUSED;
p[kConv].role = static_cast<mfsdp_role>(0);
}
, MFSDP_E_ARGUMENT, {
  "'conv'", "role is 0"
}
}
, {"ViewInvalid", BREAK{UNUSED;
p[kVector].view = static_cast<mfsdp_view>(7);
}
, MFSDP_E_ARGUMENT, {
  "'vector'", "view is 7"
}
}
, {"ComputeInvalid", BREAK{UNUSED;
p[kConv].compute = static_cast<mfsdp_dtype>(0);
}
, MFSDP_E_ARGUMENT, {
  "'conv'", "dtype compute is 0"
}
}
, {"MasterInvalid", BREAK{UNUSED;
p[kConv].master = static_cast<mfsdp_dtype>(7);
}
, MFSDP_E_ARGUMENT, {
  "dtype master is 7"
}
}
, {"GradInvalid", BREAK{UNUSED;
p[kConv].grad = static_cast<mfsdp_dtype>(7);
}
, MFSDP_E_ARGUMENT, {
  "dtype grad is 7"
}
}
, {"WireInvalid", BREAK{UNUSED;
p[kConv].wire = static_cast<mfsdp_dtype>(7);
}
, MFSDP_E_ARGUMENT, {
  "dtype wire is 7"
}
}
, {"PlacementInvalid", BREAK{UNUSED;
p[kConv].placement = static_cast<mfsdp_placement>(0);
}
, MFSDP_E_ARGUMENT, {
  "placement is 0"
}
}
, {"PlacementBandedVector", BREAK{UNUSED;
p[kVector].placement = MFSDP_PLACEMENT_BANDED;
}
, MFSDP_E_ARGUMENT, {
  "'vector'", "placement banded is for matrices", "role elementwise needs owned"
}
}
, {"PlacementBandedMaxGamma", BREAK{UNUSED;
p[kConv].placement = MFSDP_PLACEMENT_BANDED;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_gamma_permille = 2000;
}
, MFSDP_E_UNSUPPORTED, {
  "'conv'", "placement is banded", "caps.max_gamma_permille", "MFSDP_PLAN_NO_CAP"
}
}
, {"PlacementBandedMaxOwners", BREAK{UNUSED;
p[kConv].placement = MFSDP_PLACEMENT_BANDED;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_owners = 2;
}
, MFSDP_E_UNSUPPORTED, {
  "'conv'", "placement is banded", "caps.max_owners"
}
}
, {"PlacementReplicatedAlone", BREAK{UNUSED;
p[kConv].placement = MFSDP_PLACEMENT_REPLICATED;
d.residency = MFSDP_RESIDENCY_RESIDENT;
}
, MFSDP_E_UNSUPPORTED, {
  "'conv'", "placement is replicated but owned for 'whole'", "all of its tensors"
}
}
, {"PlacementReplicatedSharded", BREAK{UNUSED;
for (mfsdp_param &param : p)
  param.placement = MFSDP_PLACEMENT_REPLICATED;
}
, MFSDP_E_UNSUPPORTED, {
  "'whole'", "residency sharded", "MFSDP_RESIDENCY_RESIDENT"
}
}
, {"PlacementReplicatedAllowBanded", BREAK{
for (mfsdp_param &param : p)
  param.placement = MFSDP_PLACEMENT_REPLICATED;
d.residency = MFSDP_RESIDENCY_RESIDENT;
d.allow_banded = 1;
d.banded_wire_cost = 1;
}
, MFSDP_E_UNSUPPORTED, {
  "'whole'", "placement is replicated", "allow_banded is 1"
}
}
, {"AllowBandedFlag", BREAK{UNUSED;
d.allow_banded = 2;
d.banded_wire_cost = 1;
}
, MFSDP_E_ARGUMENT, {
  "allow_banded is 2, needs 0 or 1"
}
}
, {"AllowBandedFlagBelow", BREAK{UNUSED;
d.allow_banded = -1;
d.banded_wire_cost = 1;
}
, MFSDP_E_ARGUMENT, {
  "allow_banded is -1, needs 0 or 1"
}
}
, {"AllowBandedWireCost", BREAK{UNUSED;
d.allow_banded = 1;
}
, MFSDP_E_ARGUMENT, {
  "banded_wire_cost of at least 1", "has 0"
}
}
, {"AllowBandedMessageBelow", BREAK{UNUSED;
d.allow_banded = 1;
d.banded_wire_cost = 1;
d.banded_message_nbytes = -1;
}
, MFSDP_E_ARGUMENT, {
  "banded_message_nbytes is -1", "needs 0 to 1099511627776"
}
}
, {"AllowBandedMessageAbove", BREAK{UNUSED;
d.allow_banded = 1;
d.banded_wire_cost = 1;
d.banded_message_nbytes = MFSDP_PLAN_MAX_MESSAGE_NBYTES + 1;
}
, MFSDP_E_ARGUMENT, {
  "banded_message_nbytes is 1099511627777"
}
}
, {"AllowBandedMaterialize", BREAK{UNUSED;
d.allow_banded = 1;
d.banded_wire_cost = 1;
d.materialize_count = -1;
}
, MFSDP_E_ARGUMENT, {
  "materialize_count is -1"
}
}
, {"AllowBandedReduce", BREAK{UNUSED;
d.allow_banded = 1;
d.banded_wire_cost = 1;
d.reduce_count = -3;
}
, MFSDP_E_ARGUMENT, {
  "reduce_count is -3", "at least 0"
}
}
, {"AllowBandedMaxOwners", BREAK{UNUSED;
d.allow_banded = 1;
d.banded_wire_cost = 1;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_owners = 2;
}
, MFSDP_E_UNSUPPORTED, {
  "allow_banded does not go with caps.max_owners"
}
}
, {"PlacementReplicatedMaxResident", BREAK{
for (mfsdp_param &param : p)
  param.placement = MFSDP_PLACEMENT_REPLICATED;
d.residency = MFSDP_RESIDENCY_RESIDENT;
d.planner = MFSDP_PLANNER_BALANCED;
d.caps.max_resident_nbytes = 1 << 30;
}
, MFSDP_E_UNSUPPORTED, {
  "'whole'", "placement is replicated", "caps.max_resident_nbytes"
}
}
,

    {"MatrixOfOneDimension", BREAK{UNUSED;
p[kWhole].ndim = 1;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "1 dimension", "ELEMENTWISE"
}
}
, {"WholeOfThreeDimensions", BREAK{UNUSED;
p[kWhole].ndim = 3;
p[kWhole].shape[2] = 2;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "view whole has 3 dimensions", "needs 2 to 2"
}
}
, {"ConvOfTwoDimensions", BREAK{UNUSED;
p[kConv].ndim = 2;
}
, MFSDP_E_ARGUMENT, {
  "view conv has 2 dimensions", "needs 3 to 5"
}
}
, {"ConvOfSixDimensions", BREAK{UNUSED;
p[kConv].ndim = 6;
}
, MFSDP_E_ARGUMENT, {
  "view conv has 6 dimensions"
}
}
, {"BatchOfTwoDimensions", BREAK{UNUSED;
p[kBatch].ndim = 2;
}
, MFSDP_E_ARGUMENT, {
  "view batch has 2 dimensions", "needs 3 to 3"
}
}
, {"BatchOfFourDimensions", BREAK{UNUSED;
p[kBatch].ndim = 4;
p[kBatch].shape[3] = 3;
}
, MFSDP_E_ARGUMENT, {
  "view batch has 4 dimensions"
}
}
, {"RowsOfThreeDimensions", BREAK{UNUSED;
p[kRows].ndim = 3;
p[kRows].shape[2] = 1;
}
, MFSDP_E_ARGUMENT, {
  "view rows has 3 dimensions"
}
}
, {"HeadsOfThreeDimensions", BREAK{UNUSED;
p[kHeads].ndim = 3;
p[kHeads].shape[2] = 1;
}
, MFSDP_E_ARGUMENT, {
  "view heads has 3 dimensions"
}
}
, {"RowsWithoutList", BREAK{UNUSED;
p[kRows].part_rows = nullptr;
}
, MFSDP_E_ARGUMENT, {
  "'rows'", "part_rows"
}
}
, {"RowsWithoutParts", BREAK{UNUSED;
p[kRows].part_count = 0;
}
, MFSDP_E_ARGUMENT, {
  "part_count of at least 1, has 0"
}
}
, {"RowsSumTooSmall", BREAK{UNUSED;
p[kRows].part_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "'rows'", "sum to 12", "needs the 16 rows"
}
}
, {"RowsSumTooLarge", BREAK{UNUSED;
p[kRows].shape[0] = 15;
}
, MFSDP_E_ARGUMENT, {
  "sum to 16", "needs the 15 rows"
}
}
, {"RowsSumOverflows", BREAK{UNUSED;
p[kRows].part_rows = kHuge;
p[kRows].part_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "more than 63 bits", "needs the 16 rows"
}
}
, {"RowsNegative", BREAK{UNUSED;
p[kRows].part_rows = kNegative;
}
, MFSDP_E_ARGUMENT, {
  "part_rows[1] is -4"
}
}
, {"BatchPartsSum", BREAK{UNUSED;
p[kBatch].part_rows = kSeven;
p[kBatch].part_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "'batch'", "part_rows sum to 7", "needs the 8 rows of each matrix of the batch"
}
}
, {"BatchPartsWithoutCount", BREAK{UNUSED;
p[kBatch].part_rows = kEight;
}
, MFSDP_E_ARGUMENT, {
  "view batch needs part_rows and a part_count of at least 1, has 0"
}
}
, {"BatchPartsTooMany", BREAK{UNUSED;
p[kBatch].part_rows = kEight;
p[kBatch].part_count = 2;
p[kBatch].shape[0] = INT64_C(1) << 30;
p[kBatch].shape[2] = 0;
}
, MFSDP_E_OVERFLOW, {
  "'batch'", "2147483648 matrices"
}
}
, {"AliasOfABatchInParts", BREAK{UNUSED;
p[kAlias] = p[kBatch];
p[kAlias].name = "alias";
p[kAlias].alias_of = "batch";
p[kAlias].part_rows = kEight;
p[kAlias].part_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "part_rows differs", "'batch'"
}
}
, {"HeadsZero", BREAK{UNUSED;
p[kHeads].head_count = 0;
}
, MFSDP_E_ARGUMENT, {
  "'heads'", "head_count 0", "at least 1"
}
}
, {"HeadsThatDoNotDivide", BREAK{UNUSED;
p[kHeads].head_count = 3;
}
, MFSDP_E_ARGUMENT, {
  "'heads'", "head_count 3", "16 rows"
}
}
, {"SliceAsMatrix", BREAK{UNUSED;
p[kWhole].is_slice = 1;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "is_slice", "local_matrix_ok"
}
}
, {"SliceFlag", BREAK{UNUSED;
p[kVector].is_slice = 2;
}
, MFSDP_E_ARGUMENT, {
  "'vector'", "is_slice is 2", "needs 0 or 1"
}
}
, {"LocalMatrixFlag", BREAK{UNUSED;
p[kWhole].local_matrix_ok = -1;
}
, MFSDP_E_ARGUMENT, {
  "'whole'", "local_matrix_ok is -1", "needs 0 or 1"
}
}
, {"TooManyMatrices", BREAK{UNUSED;
p[kBatch].shape[0] = (INT64_C(1) << 30) + 1;
p[kBatch].shape[1] = 0;
}
, MFSDP_E_OVERFLOW, {
  "'batch'", "1073741825 matrices"
}
}
,

    {"AliasOfNothing", BREAK{UNUSED;
p[kAlias].alias_of = "nobody";
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "'nobody' names no parameter"
}
}
, {"AliasOfItself", BREAK{UNUSED;
p[kAlias].alias_of = "alias";
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "its own name"
}
}
, {"AliasOfAlias", BREAK{UNUSED;
p[kVector] = p[kAlias];
p[kVector].name = "v";
p[kVector].alias_of = "alias";
}
, MFSDP_E_ARGUMENT, {
  "'v'", "'alias' is an alias itself", "'whole'"
}
}
, {"AliasOfALaterUnit", BREAK{UNUSED;
p[kWhole].unit = 3;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "comes later (unit 3)", "(unit 2)"
}
}
, {"AliasBeforeItsOwner", BREAK{UNUSED;
std::swap(p[kWhole], p[kAlias]);
p[kWhole].unit = p[kAlias].unit = 0;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "comes later"
}
}
, {"AliasNdim", BREAK{UNUSED;
p[kAlias].ndim = 3;
p[kAlias].view = MFSDP_VIEW_CONV;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "ndim differs", "'whole'"
}
}
, {"AliasShape", BREAK{UNUSED;
p[kAlias].shape[1] = 9;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "shape differs"
}
}
, {"AliasDtype", BREAK{UNUSED;
p[kAlias].compute = MFSDP_BF16;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "dtype differs"
}
}
, {"AliasRole", BREAK{UNUSED;
p[kAlias].role = MFSDP_ROLE_ELEMENTWISE;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "role differs"
}
}
, {"AliasView", BREAK{UNUSED;
p[kAlias].view = MFSDP_VIEW_HEADS;
p[kAlias].head_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "view differs"
}
}
, {"AliasHeads", BREAK{UNUSED;
p[kAlias] = p[kHeads];
p[kAlias].name = "alias";
p[kAlias].alias_of = "heads";
p[kAlias].head_count = 2;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "head_count differs", "'heads'"
}
}
, {"AliasPartCount", BREAK{UNUSED;
p[kAlias] = p[kRows];
p[kAlias].name = "alias";
p[kAlias].alias_of = "rows";
p[kAlias].part_rows = &p[kAlias].shape[0];
p[kAlias].part_count = 1;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "part_count differs", "'rows'"
}
}
, {"AliasPartRows", BREAK{static const int64_t other[3] = {4, 8, 4};
UNUSED;
p[kAlias] = p[kRows];
p[kAlias].name = "alias";
p[kAlias].alias_of = "rows";
p[kAlias].part_rows = other;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "part_rows differs", "'rows'"
}
}
, {"AliasHyperGroup", BREAK{UNUSED;
p[kAlias].hyper_group = 1;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "hyper_group differs"
}
}
, {"AliasPlacement", BREAK{UNUSED;
p[kAlias].placement = MFSDP_PLACEMENT_BANDED;
}
, MFSDP_E_ARGUMENT, {
  "'alias'", "placement differs", "'whole'"
}
}
,

    {"UnitMixesCompute", BREAK{UNUSED;
p[kFrozen].compute = MFSDP_BF16;
}
, MFSDP_E_UNSUPPORTED, {
  "'frozen'", "dtype compute is bf16 but f32 for 'vector'", "unit 2"
}
}
, {"UnitMixesMaster", BREAK{UNUSED;
p[kRows].master = MFSDP_F64;
}
, MFSDP_E_UNSUPPORTED, {
  "'rows'", "dtype master is f64 but f32 for 'batch'"
}
}
, {"UnitMixesGrad", BREAK{UNUSED;
p[kRows].grad = MFSDP_F16;
}
, MFSDP_E_UNSUPPORTED, {
  "dtype grad is f16"
}
}
, {"UnitMixesWire", BREAK{UNUSED;
p[kHeads].wire = MFSDP_BF16;
}
, MFSDP_E_UNSUPPORTED, {
  "'heads'", "dtype wire is bf16"
}
}
,
}
;

class PlanRule : public ::testing::TestWithParam<Rule> {};
std::string rule_name(const ::testing::TestParamInfo<Rule> &info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(All, PlanRule, ::testing::ValuesIn(kRules), rule_name);

void PrintTo(const Rule &rule, std::ostream *out) {
  *out << rule.name;
}

TEST_P(PlanRule, IsCheckedAndExplained) {
  const Rule &rule = GetParam();
  Params p;
  make_valid(&p);
  PlanRig rig;
  mfsdp_plan_desc desc = p.desc(3);
  rule.breaks(p.list, desc);
  EXPECT_EQ(rig.create(desc), rule.status);
  EXPECT_EQ(rig.plan, nullptr);
  for (const std::string &part : rule.says)
    EXPECT_NE(rig.message().find(part), std::string::npos)
        << "'" << part << "' is not in: " << rig.message();
  EXPECT_EQ(rig.context.total_nbytes, 0u);
}

TEST(PlanRules, TheListThatTheyBreakIsValid) {
  Params p;
  make_valid(&p);
  ASSERT_EQ(static_cast<int>(p.list.size()), static_cast<int>(kCount));
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(3)), MFSDP_OK) << rig.message();
}

TEST(PlanRules, NothingIsAllocatedForADescriptionThatIsInvalidByItself) {
  Params p;
  make_valid(&p);
  p.list[kCount - 1].ndim = 0;
  PlanRig rig;
  EXPECT_EQ(rig.create(p.desc(3)), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.memory.alloc_count(), 0);
}

TEST(PlanRules, NullArguments) {
  PlanRig rig;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  EXPECT_EQ(mfsdp_plan_create(nullptr, &desc, &rig.plan), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_plan_create(&rig.context, nullptr, &rig.plan), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("desc is NULL"), std::string::npos);
  EXPECT_EQ(mfsdp_plan_create(&rig.context, &desc, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_NE(rig.message().find("out is NULL"), std::string::npos);
  mfsdp_plan_destroy(&rig.context, nullptr);
}

/* ---- what must not be an error ---- */

TEST(PlanRules, ASliceIsAMatrixWhenTheCallerSaysSo) {
  Params p;
  mfsdp_param &slice = p.add("slice", MFSDP_ROLE_MATRIX, 0, {8, 8});
  slice.is_slice = slice.local_matrix_ok = 1;
  p.add("cut", MFSDP_ROLE_ELEMENTWISE, 0, {8, 8}).is_slice = 1; /* nothing to orthogonalize */
  PlanRig rig;
  EXPECT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
}

TEST(PlanRules, AViewIsNotUsedOutsideMatrices) {
  Params p;
  make_valid(&p);
  for (mfsdp_param &param : p.list)
    param.role = MFSDP_ROLE_ELEMENTWISE;
  p.list[kHeads].head_count = 3; /* does not divide */
  p.list[kRows].part_rows = nullptr;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  EXPECT_EQ(mfsdp_plan_param_matrices(rig.plan, kHeads), 0);
}

TEST(PlanRules, DtypesMayDifferBetweenUnitsAndFrozenNeedsNoGradients) {
  Params p;
  make_valid(&p);
  p.list[kFrozen].master = MFSDP_F64;
  p.list[kFrozen].grad = p.list[kFrozen].wire = MFSDP_BF16;
  p.list[kVector].unit = 4;
  p.list[kVector].compute = p.list[kVector].grad = MFSDP_BF16;
  p.list[kVector].wire = MFSDP_F16;
  PlanRig rig;
  ASSERT_EQ(rig.create(p.desc(2)), MFSDP_OK) << rig.message();
  EXPECT_EQ(mfsdp_plan_unit_dtype(rig.plan, 4, MFSDP_LAYOUT_GATHER), MFSDP_BF16);
  EXPECT_EQ(mfsdp_plan_unit_dtype(rig.plan, 4, MFSDP_LAYOUT_REDUCE), MFSDP_BF16);
  EXPECT_EQ(mfsdp_plan_unit_wire(rig.plan, 4), MFSDP_F16);
  EXPECT_EQ(mfsdp_plan_unit_master(rig.plan, 4), MFSDP_F32);
  EXPECT_EQ(mfsdp_plan_unit_wire(rig.plan, 2), MFSDP_F32); /* FROZEN and an alias only */
}

TEST(PlanRules, DefaultsAreInvalidWhereACallerMustDecide) {
  const mfsdp_param p = mfsdp_param_default();
  EXPECT_EQ(p.struct_nbytes, sizeof(p));
  EXPECT_EQ(p.name, nullptr);
  EXPECT_EQ(p.unit, -1);
  EXPECT_EQ(static_cast<int>(p.role), 0);
  EXPECT_EQ(p.ndim, 0);
  EXPECT_EQ(p.view, MFSDP_VIEW_WHOLE);
  EXPECT_EQ(p.placement, MFSDP_PLACEMENT_OWNED);
  for (mfsdp_dtype dtype : {p.compute, p.master, p.grad, p.wire})
    EXPECT_EQ(dtype, MFSDP_F32);
  const mfsdp_plan_desc d = mfsdp_plan_desc_default();
  EXPECT_EQ(d.struct_nbytes, sizeof(d));
  EXPECT_EQ(d.world, 0);
  EXPECT_EQ(d.planner, MFSDP_PLANNER_BALANCED);
  for (int64_t cap : {d.caps.max_resident_nbytes, d.caps.max_gamma_permille, d.caps.max_owners})
    EXPECT_EQ(cap, MFSDP_PLAN_NO_CAP);
}

/* One description alone, as a reader of foreign files would check it. */
TEST(PlanRules, ValidateOneDescription) {
  Params p;
  make_valid(&p);
  PlanRig rig;
  int64_t numel = -1;
  ASSERT_EQ(mfsdp_param_validate(&rig.context, &p.list[kConv], 0, &numel), MFSDP_OK);
  EXPECT_EQ(numel, 6 * 3 * 5 * 5);
  EXPECT_EQ(mfsdp_param_validate(&rig.context, nullptr, 4, &numel), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_param_validate(&rig.context, &p.list[kConv], 4, nullptr), MFSDP_E_ARGUMENT);
  p.list[kConv].shape[0] = 0; /* the others multiply past 64 bits: still no elements */
  p.list[kConv].shape[1] = p.list[kConv].shape[2] = INT64_MAX;
  ASSERT_EQ(mfsdp_param_validate(&rig.context, &p.list[kConv], 0, &numel), MFSDP_OK);
  EXPECT_EQ(numel, 0);
}

} // namespace
