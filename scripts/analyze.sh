#!/bin/sh
# SPDX-License-Identifier: MIT
# clang's static analyzer over the headers (each function is an entry, called or not) and the code beside the
# examples and benchmarks. mfsdp/cuda is not among them yet. Minutes: not part of make tidy.
#
#   scripts/analyze.sh [FILE.c...]    prints what is new; status 1 if that is something
#
# What it is told about the library stands in tidy_model.h. Findings that were read and are false stand at the
# end of this file, with message and source line, so that a changed line is judged again.
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
include_all "$tmp/all.c" matrixfsdp.h mfsdp/posix/*.h mfsdp/host/*.h mfsdp/mpi/*.h
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
if [ $# = 0 ]; then
  analyze "$tmp/all.c" -Xclang -analyzer-opt-analyze-headers >"$tmp/log"
  set -- examples/gpt/*.c examples/plan/*.c bench/support/*.c
fi
for file in "$@"; do analyze "$file"; done >>"$tmp/log"

sed '1,/^# ---- known/d; /^#$/d; s/^# //' scripts/analyze.sh >"$tmp/known"
awk -v known="$tmp/known" -v root="$PWD/" '
  BEGIN { while ((getline line <known) > 0) { sub(/ \| because .*/, "", line); judged[line] = 1 } }
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
    shown = !((at " | " what " | " text) in judged)
    if (shown) { print head; found++ }
    head = ""
  }
  shown { print }
  END { if (!found) print "analyze: nothing found"; exit found > 0 }' "$tmp/log"
exit $?

# ---- known
# bench/support/overlap.c | Assigned value is garbage or undefined | behind = u + 1 < units ? w->reduce[u + 1] : 0.0; | because the plan has the units of the run
# bench/support/overlap.c | The left operand of '+' is a garbage value | *transfer += w->gather[u] + w->reduce[u] + ahead; | because the plan has the units of the run
# examples/gpt/rank.c | Division by zero | i < labels / 2 ? "forward" : "backward", (int)(i % (labels / 2))); | because the table has two labels for each unit
# examples/gpt/trace.c | Dereference of null pointer | free(trace->ranks[r].phases); | because ranks are counted when they are there
# mfsdp/checkpoint/save.h | Dereference of null pointer | pairs[i].key = ck->tensors[set->tensor_first + i].name; | because the table has an entry for each tensor
# mfsdp/checkpoint/share.h | Null pointer passed to 2nd parameter expecting 'nonnull' | if (parcel.nbytes > 0) memcpy(parcel.data, told->data + done, parcel.nbytes); | because what this rank tells is as long as it says
# mfsdp/checkpoint/state.h | Dereference of null pointer | state->pairs[state->count].key = key; | because the table has the pairs of the library at least
# mfsdp/collective.h | Array access (via field 'involved') results in a null pointer dereference | m->involved[m->involved_count++] = i; | because the tables have a place for each extent
# mfsdp/collective.h | Array access (via field 'owner_at') results in a null pointer dereference | m->owner_at[0] = 0; | because the tables have a place for each rank
# mfsdp/collective.h | Array access (via field 'owner_at') results in a null pointer dereference | m->owner_at[q + 1] += m->owner_at[q]; | because the tables have a place for each rank
# mfsdp/host/host_dense.h | Array access (from variable 'd') results in a null pointer dereference | d[i * args->d.row_stride + i] += args->diagonal; | because a result with elements has memory
# mfsdp/host/host_half.h | The right operand of '*' is a garbage value | float value = args->alpha * sum[i * n + j]; | because k is not negative: 0 clears the sum, others compute it
# mfsdp/host/threads_world.h | Null pointer passed to 1st parameter expecting 'nonnull' | memcpy(world->node_of_rank, world->desc.node_of_rank, count * sizeof(int32_t)); | because a world has a rank at least
# mfsdp/mpi/transport_mpi.h | Potential leak of memory pointed to by 'heads' | return MFSDP_OK; | because the description has a batch at least, which keeps them
# mfsdp/mpi/transport_mpi.h | Potential leak of memory pointed to by 'xfers' | return MFSDP_OK; | because the description has a batch at least, which keeps them
# mfsdp/optimizer.h | Access to field 'commit' results in a dereference of a null pointer (loaded from field 'stages') | MFSDP_TRY((job->staged ? algorithm->stages->commit : algorithm->run)(context, optimizer, queue, | because only a kind with stages is staged
# mfsdp/plan/bound.h | Division by zero | if (reach == 0 || (reach < 0 && level - level % divisor < enough)) return 1; | because a search that is too long had a class, and costs are not 0
# mfsdp/plan/table.h | Access to field 'world' results in a dereference of a null pointer (loaded from variable 'plan') | return plan->world; | because a plan that was made is there
# mfsdp/posix/thread.h | Null pointer passed to 1st parameter expecting 'nonnull' | (void)pthread_mutex_lock(&mutex->handle); | because the world of a thread rank is set before it starts
# mfsdp/runtime/setup_agree.h | Array access (from variable 'all') results in a null pointer dereference | *own = all[0]; | because a world has a rank at least
# mfsdp/runtime/setup_verdict.h | Null pointer passed to 2nd parameter expecting 'nonnull' | memcpy(out + (k * world + first) * nbytes, (unsigned char *)all + k * count * nbytes, | because copies and batch are not 0 where the loops run
# mfsdp/safetensors/index.h | Access to field 'file_count' results in a dereference of a null pointer (loaded from variable 'index') | return (int32_t)index->file_count; | because a close keeps the failure before it
# mfsdp/safetensors/read.h | Access to field 'pair_count' results in a dereference of a null pointer (loaded from variable 'file') | return (int32_t)file->pair_count; | because a close keeps the failure before it
# mfsdp/safetensors/read.h | Access to field 'pairs' results in a dereference of a null pointer (loaded from variable 'file') | mfsdp__st_find_pair(file->pairs, file->order + file->tensor_count, file->pair_count, key); | because a close keeps the failure before it
# mfsdp/safetensors/text.h | Null pointer passed to 1st parameter expecting 'nonnull' | if (end <= out->capacity) memcpy(out->dst + out->nbytes, data, nbytes); | because without memory the capacity is 0, and the first text is not empty
