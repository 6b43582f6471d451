#!/bin/sh
# SPDX-License-Identifier: MIT
# clang's static analyzer over the headers (each function is an entry, called or not), the examples and the
# benchmarks. Eight minutes of processor time: not part of make tidy.
#
#   scripts/analyze.sh [FILE.c...]    prints what is new; status 1 if that is something
#
# What it is told about the library stands in tidy_model.h. Findings that were read and are false stand at the
# end of this file, with message and source line, so that a changed line is judged again; one that no longer
# occurs is a finding, too, unless FILEs were named or a header was skipped, whose findings may be elsewhere.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v clang-tidy >/dev/null 2>&1 || { echo "analyze: there is no clang-tidy (apt-get install clang-tidy)" >&2; exit 2; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
. scripts/headers_lib.sh
find_vendors || exit 1

# Without "use memcpy_s", which C libraries do not have.
checks='-*,clang-analyzer-core*,clang-analyzer-deadcode*,clang-analyzer-nullability*,clang-analyzer-security*,clang-analyzer-unix*,clang-analyzer-valist*,clang-analyzer-apiModeling*,-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling'
all_flags="-std=c11 $POSIX -I. -Iexamples -Ibench -DMFSDP_BENCH_BUILD=__FILE__"
CUDA_INC=$(sed -n 's/^release_CUDA_CFLAGS := //p' "$tmp/config.mk") # the host double's where there is no toolkit
include_all "$tmp/all.c" matrixfsdp.h mfsdp/posix/*.h mfsdp/host/*.h mfsdp/mpi/*.h mfsdp/cuda/*.h >"$tmp/skipped"
cat "$tmp/skipped"
[ -z "$CBLAS_INC$LAPACKE_INC" ] || all_flags="$all_flags -DMFSDP_EXAMPLE_CBLAS=1 -DMFSDP_EXAMPLE_LAPACKE=1"
[ -z "$MPI_INC" ] || all_flags="$all_flags -DMFSDP_EXAMPLE_MPI=1"

analyze() { # FILE OPTIONS...
  file=$1
  shift
  # shellcheck disable=SC2086
  clang-tidy --quiet --checks="$checks" --header-filter='.*' "$file" -- $all_flags -include scripts/tidy_model.h "$@" 2>"$tmp/err"
  # 1: it found something. All else, and a file that is not there, is a failure of the tool.
  if [ $? -gt 1 ] || [ ! -e "$file" ]; then
    printf '%s: error: clang-tidy failed [tool]\n' "$file"
    tail -n 5 "$tmp/err"
  fi
}
whole=0
if [ $# = 0 ]; then
  [ -s "$tmp/skipped" ] || whole=1
  analyze "$tmp/all.c" -Xclang -analyzer-opt-analyze-headers >"$tmp/log"
  set -- examples/gpt/*.c examples/plan/*.c examples/*.c bench/support/*.c bench/*.c
fi
for file in "$@"; do
  case $file in *_mpi.c) [ -n "$MPI_INC" ] || continue ;; esac
  analyze "$file"
done >>"$tmp/log"

sed '1,/^# ---- known/d; /^#$/d; s/^# //' scripts/analyze.sh >"$tmp/known"
awk -v known="$tmp/known" -v whole=$whole -v root="$PWD/" '
  BEGIN {
    while ((getline line <known) > 0) { sub(/ \| because .*/, "", line); judged[line] = ++entries; entry[entries] = line }
  }
  /^[^ ].*: (warning|error): .*\[/ { head = $0; shown = 0; next }
  head != "" {
    at = what = head
    sub(/^.*: (warning|error): /, "", what)
    sub(/ \[[^\[]*\]$/, "", what)
    sub(/:[0-9]+:[0-9]+: .*/, "", at)
    if (index(at, root) == 1) at = substr(at, length(root) + 1)
    while (sub(/[^\/]+\/\.\.\//, "", at)) continue
    if (match(at, /(mfsdp|examples|bench)\/.*$/)) at = substr(at, RSTART)
    text = $0
    sub(/^ +/, "", text)
    line = at " | " what " | " text
    shown = !(line in judged)
    if (shown) { print head; found++ } else seen[judged[line]] = 1
    head = ""
  }
  shown { print }
  END {
    for (i = 1; whole && i <= entries; i++) {
      if (i in seen) continue
      print "scripts/analyze.sh: known, but no longer found: " entry[i]
      found++
    }
    if (!found) print "analyze: nothing found"
    exit found > 0
  }' "$tmp/log"
exit $?

# ---- known
# bench/collective.c | Address of stack memory associated with local variable 'set' is still referred to by the static variable 't' upon returning to the caller.  This will be a dangling reference | return run_mpi(&t); | because it returns from main
# bench/support/overlap.c | Assigned value is garbage or undefined | behind = u + 1 < units ? w->reduce[u + 1] : 0.0; | because the plan has the units of the run
# bench/support/overlap.c | The left operand of '+' is a garbage value | *transfer += w->gather[u] + w->reduce[u] + ahead; | because the plan has the units of the run
# examples/collective.c | 3rd function call argument is an uninitialized value | if (transport->rank == 1) printf("rank 1: sum over %d ranks of element 7 is %g\n", RANKS, sum[7]); | because rank 1 owns the buffer, so that the sums are written there
# examples/gpt/rank.c | Division by zero | i < labels / 2 ? "forward" : "backward", (int)(i % (labels / 2))); | because the table has two labels for each unit
# examples/gpt/trace.c | Dereference of null pointer | free(trace->ranks[r].phases); | because ranks are counted when they are there
# examples/optimizers_report.c | Access to field 'name' results in a dereference of a null pointer (loaded from variable 'r') | r->name = words[0]; | because without the table the status is not GPT_OK
# examples/train_gpt.c | Potential leak of memory pointed to by 'figures' | if (figures != NULL) return ranks; | because a process has a rank at least, which keeps them
# mfsdp/checkpoint/load.h | Access to field 'rt' results in a dereference of a null pointer (loaded from variable 'ck') | MFSDP_TRY(mfsdp__runtime_usable(ck->rt)); | because a checkpoint that was made is there
# mfsdp/checkpoint/save.h | Dereference of null pointer | pairs[i].key = ck->tensors[set->tensor_first + i].name; | because the table has an entry for each tensor
# mfsdp/checkpoint/share.h | Null pointer passed to 2nd parameter expecting 'nonnull' | if (parcel.nbytes > 0) memcpy(parcel.data, told->data + done, parcel.nbytes); | because what this rank tells is as long as it says
# mfsdp/checkpoint/state.h | Dereference of null pointer | state->pairs[state->count].key = key; | because the table has the pairs of the library at least
# mfsdp/collective.h | Array access (via field 'involved') results in a null pointer dereference | m->involved[m->involved_count++] = i; | because the tables have a place for each extent
# mfsdp/collective.h | Array access (via field 'owner_at') results in a null pointer dereference | m->owner_at[0] = 0; | because the tables have a place for each rank
# mfsdp/collective.h | Array access (via field 'owner_at') results in a null pointer dereference | m->owner_at[q + 1] += m->owner_at[q]; | because the tables have a place for each rank
# mfsdp/cuda/transport_nccl.h | Array access (via field 'node_of_rank') results in a null pointer dereference | t->node_of_rank[t->rank] = nodes[origin]; | because a world has a rank at least
# mfsdp/host/host_dense.h | Array access (from variable 'd') results in a null pointer dereference | d[i * args->d.row_stride + i] += args->diagonal; | because a result with elements has memory
# mfsdp/host/host_dense.h | Null pointer passed to 2nd parameter expecting 'nonnull' | memcpy(dst + i * dst_stride + first, src + i * src_stride + first, | because a matrix with elements has memory
# mfsdp/host/host_dense.h | Null pointer passed to 2nd parameter expecting 'nonnull' | memcpy(dst, src, (size_t)(rows * cols) * sizeof(float)); | because a matrix with elements has memory
# mfsdp/host/host_half.h | Array access (from variable 'data') results in a null pointer dereference | return dtype == MFSDP_BF16 ? mfsdp_f32_from_bf16(data[index]) : mfsdp_f32_from_f16(data[index]); | because a matrix with elements has memory
# mfsdp/host/host_half.h | The right operand of '*' is a garbage value | float value = args->alpha * sum[i * n + j]; | because k is not negative: 0 clears the sum, others compute it
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s0, row, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s1, row + 1, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s2, row + 2, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_f8, x, s3, row + 3, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s0, row, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s1, row + 1, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s2, row + 2, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s3, row + 3, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s4, row + 4, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s5, row + 5, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s6, row + 6, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, s7, row + 7, column); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t0, row, column + MFSDP__HOST_TINY_LANES); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t1, row + 1, column + MFSDP__HOST_TINY_LANES); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t2, row + 2, column + MFSDP__HOST_TINY_LANES); | because a product with a tile has memory
# mfsdp/host/host_tiny.h | Dereference of null pointer | MFSDP__HOST_TINY_STORE(mfsdp__host_fv, x, t3, row + 3, column + MFSDP__HOST_TINY_LANES); | because a product with a tile has memory
# mfsdp/host/threads_world.h | Null pointer passed to 1st parameter expecting 'nonnull' | memcpy(world->node_of_rank, world->desc.node_of_rank, count * sizeof(int32_t)); | because a world has a rank at least
# mfsdp/mpi/transport_mpi.h | Potential leak of memory pointed to by 'heads' | return MFSDP_OK; | because the description has a batch at least, which keeps them
# mfsdp/mpi/transport_mpi.h | Potential leak of memory pointed to by 'xfers' | return MFSDP_OK; | because the description has a batch at least, which keeps them
# mfsdp/optimizer.h | Access to field 'commit' results in a dereference of a null pointer (loaded from field 'stages') | MFSDP_TRY((job->staged ? algorithm->stages->commit : algorithm->run)(context, optimizer, queue, | because only a kind with stages is staged
# mfsdp/optimizer.h | Division by zero | return before % limit == 0; | because the largest need of all is no less than that of one, and the number no less than 1
# mfsdp/optimizer.h | Null pointer passed to 1st parameter expecting 'nonnull' | memcpy(optimizer->groups, desc->groups, (size_t)desc->group_count * sizeof(*desc->groups)); | because a description has a group at least, which the check before asks for
# mfsdp/plan/bound.h | Division by zero | if (reach == 0 || (reach < 0 && level - level % divisor < enough)) return 1; | because a search that is too long had a class, and costs are not 0
# mfsdp/plan/hybrid.h | The result of the left shift is undefined because the right operand is negative | const uint64_t bit = (uint64_t)1 << (mfsdp__hybrid_blocks(hybrid->rows[matrix]) - 1); | because a matrix that is banded has a row, and so a block, at least
# mfsdp/plan/table.h | Access to field 'world' results in a dereference of a null pointer (loaded from variable 'plan') | return plan->world; | because a plan that was made is there
# mfsdp/posix/thread.h | Null pointer passed to 1st parameter expecting 'nonnull' | (void)pthread_mutex_lock(&mutex->handle); | because the world of a thread rank is set before it starts
# mfsdp/runtime/setup_banded.h | Dereference of null pointer | tensors[b->matrices[i].tensor].direction = (float *)rt->banded.directions.data + direction; | because a banded matrix is a tensor of the table
# mfsdp/runtime/setup_units.h | Access to field 'group' results in a dereference of a null pointer (loaded from variable 'entry') | entry->group = g; | because the table has an entry for each parameter of the groups
# mfsdp/runtime/setup_units.h | Dereference of null pointer | status = mfsdp__setup_buffer(rt, (size_t)parts[group->replica_rank].count * sizeof(float), | because a group with replicas has a part for each
# mfsdp/runtime/setup_verdict.h | Dereference of null pointer | const int32_t owner = pieces[b->blocks[i].piece].owner; | because a plan with a block has a piece
# mfsdp/runtime/setup_verdict.h | Dereference of null pointer | rates[i].lr = rt->desc->optimizer->groups[i].lr; | because the table has a row for each group of the description
# mfsdp/runtime/setup_verdict.h | Null pointer passed to 2nd parameter expecting 'nonnull' | memcpy(out + (k * world + first) * nbytes, (unsigned char *)all + k * count * nbytes, | because copies and batch are not 0 where the loops run
# mfsdp/runtime/units.h | Access to field 'own_acquires' results in a dereference of a null pointer (loaded from variable 'u') | if (u->own_acquires == 0) | because a unit that was found is there
# mfsdp/runtime/units.h | Access to field 'param_slot' results in a dereference of a null pointer (loaded from variable 'unit') | available -= unit->param_slot >= 0 && unit->acquires == 0; /* its own slot is not up for taking */ | because a unit that was found is there
# mfsdp/safetensors/index.h | Access to field 'file_count' results in a dereference of a null pointer (loaded from variable 'index') | return (int32_t)index->file_count; | because a close keeps the failure before it
# mfsdp/safetensors/read.h | Access to field 'pair_count' results in a dereference of a null pointer (loaded from variable 'file') | return (int32_t)file->pair_count; | because a close keeps the failure before it
# mfsdp/safetensors/read.h | Access to field 'pairs' results in a dereference of a null pointer (loaded from variable 'file') | mfsdp__st_find_pair(file->pairs, file->order + file->tensor_count, file->pair_count, key); | because a close keeps the failure before it
# mfsdp/safetensors/text.h | Null pointer passed to 1st parameter expecting 'nonnull' | if (end <= out->capacity) memcpy(out->dst + out->nbytes, data, nbytes); | because without memory the capacity is 0, and the first text is not empty
