#!/bin/sh
# SPDX-License-Identifier: MIT
# Runs a command as MPI ranks on hosts that are network namespaces of this machine, over TCP.
#
#   scripts/test_hosts.sh [-n HOSTS] [-r MBIT] [-t SECONDS] -- COMMAND [ARGUMENT...]
#
# One rank for each of HOSTS (8). Each host has its own network and hostname; veth pairs join them to a
# bridge, which is in a namespace of its own: the machine's own network is not touched. -r: each link
# is shaped at both ends to MBIT Mbit/s (tc tbf); without it links are as fast as the machine.
# -t: the command is stopped after SECONDS. MPIRUN_ARGS: more arguments for mpirun.
# MFSDP_TEST_UNSHAPED=1 leaves the shapers out in spite of -r, to see that this is noticed.
#
# Prints what the command prints. With -r its output stands only if the links were what was asked:
# their rate is measured before, packets that the shapers dropped are counted after; otherwise the
# last line is `void REASON`, and the status 3. Where hosts cannot be made (root, iproute2, Open MPI
# and the kernel's support are needed), prints `skip REASON`, status 77. Else the command's status.
# Everything made is removed, also after Ctrl-C.
set -u
cd "$(dirname "$0")/.." || exit 1

hosts=8 rate='' limit_s=''
while getopts n:r:t: option; do
  case $option in
  n) hosts=$OPTARG ;;
  r) rate=$OPTARG ;;
  t) limit_s=$OPTARG ;;
  *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '3,18p' "$0" >&2; exit 2; }
case $hosts$rate in *[!0-9]*) echo "$0: -n and -r need whole numbers" >&2; exit 2 ;; esac

skip() { echo "skip $1"; exit 77; }
[ "$(id -u)" = 0 ] || skip 'network namespaces need root'
for tool in ip tc unshare hostname; do
  command -v $tool >/dev/null 2>&1 || skip "there is no $tool (Debian: iproute2, util-linux, hostname)"
done
mpirun --version 2>&1 | grep -qi 'open.mpi' || skip 'there is no mpirun of Open MPI'

probe_program=build/release/tests/mpi/mpi_check
[ -z "$rate" ] || [ -x $probe_program ] || skip "links are measured by $probe_program, which is not built (make does)"

id=mf$$
work=$(mktemp -d) || exit 1
child=''

# shellcheck disable=SC2317 # all of it: called by the trap
namespaces() { i=0; while [ "$i" -le "$hosts" ]; do echo "${id}h$i"; i=$((i + 1)); done; }
# Only processes inside namespaces that this run made are ended.
# shellcheck disable=SC2317
clean_up() {
  trap '' INT TERM HUP
  if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then
    i=0
    while [ "$i" -lt 30 ] && kill -0 "$child" 2>/dev/null; do sleep 0.1; i=$((i + 1)); done
  fi
  for ns in $(namespaces); do
    pids=$(ip netns pids "$ns" 2>/dev/null)
    # shellcheck disable=SC2086 # a list
    [ -z "$pids" ] || kill -KILL $pids 2>/dev/null
    ip netns del "$ns" 2>/dev/null
  done
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# ---- hosts: the bridge is in ${id}h0 ----
need() { "$@" >"$work/err" 2>&1 || skip "$*: $(head -n 1 "$work/err")"; }
shape() { # NAMESPACE DEVICE: a burst of 4 ms, and a queue that senders fill before they overflow it
  [ -z "$rate" ] || [ -n "${MFSDP_TEST_UNSHAPED-}" ] ||
    need tc -n "$1" qdisc add dev "$2" root tbf rate "${rate}mbit" burst $((rate * 500 < 16000 ? 16000 : rate * 500)) limit 32mb
}
need ip netns add "${id}h0"
need ip -n "${id}h0" link add br0 type bridge
need ip -n "${id}h0" link set br0 up
addresses=''
i=1
while [ $i -le "$hosts" ]; do
  host=${id}h$i
  need ip netns add "$host"
  need ip -n "${id}h0" link add p$i type veth peer name eth0 netns "$host"
  need ip -n "${id}h0" link set p$i master br0
  need ip -n "${id}h0" link set p$i up
  need ip -n "$host" addr add 10.77.0.$i/24 dev eth0
  need ip -n "$host" link set lo up
  need ip -n "$host" link set eth0 up
  # Nothing is lost in these queues, but they are long: TCP would take what waits in them for lost, and
  # send it again.
  [ -z "$rate" ] || need ip -n "$host" route replace 10.77.0.0/24 dev eth0 rto_min 10s
  shape "${id}h0" p$i
  shape "$host" eth0
  addresses=$addresses${addresses:+,}10.77.0.$i
  i=$((i + 1))
done

# mpirun's way to another host: its number is the last one of the address.
cat >"$work/agent" <<END
#!/bin/sh
number=\${1##*.}
shift
exec ip netns exec ${id}h\$number unshare -u sh -c "hostname ${id}h\$number; \$*"
END
chmod +x "$work/agent"

run() { # COMMAND...: as ranks; the shell waits so that signals reach it at once
  # Its session folders are named after TMPDIR, which must be short.
  # shellcheck disable=SC2086,SC2016 # lists of words; expanded by the inner shell
  TMPDIR=$work OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    ip netns exec "${id}h1" unshare -u sh -c 'hostname "$0"; exec "$@"' "${id}h1" \
    ${limit_s:+timeout -k 5 "$limit_s"} mpirun -np "$hosts" -H "$addresses" --oversubscribe \
    --mca plm_rsh_agent "$work/agent" --mca pml ob1 --mca btl tcp,self \
    --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 --mca mpi_yield_when_idle 1 \
    ${MPIRUN_ARGS-} "$@" </dev/null &
  child=$!
  wait $child
  status=$?
  child=''
  return $status
}

# ---- links: as asked? ----
void() { echo "void $1"; exit 3; }
measure_rate() { # half a second each; the slowest and the fastest link in Mbit/s
  run $probe_program wire $((rate * 62500)) >"$work/probe" 2>"$work/err" ||
    void "the links could not be measured: $(head -n 1 "$work/err")"
  read -r word slowest fastest <"$work/probe"
  [ "$word" = wire ] || void 'the links could not be measured'
  slowest=$((slowest / 125000)) fastest=$((fastest / 125000))
  echo "hosts: $hosts, asked for $rate Mbit/s, measured $slowest to $fastest Mbit/s"
}
# A busy machine gets three tries. A link that beats its shaper has none.
check_rate() {
  for try in 1 2 3; do
    measure_rate
    [ $((100 * fastest)) -le $((110 * rate)) ] || void 'a link is faster than asked: it is not shaped'
    [ $((100 * slowest)) -lt $((75 * rate)) ] || return 0
  done
  void "a link is slower than asked in $try tries: the machine is too busy"
}
count_drops() {
  {
    i=1
    while [ $i -le "$hosts" ]; do
      tc -n "${id}h$i" -s qdisc show dev eth0
      tc -n "${id}h0" -s qdisc show dev p$i
      i=$((i + 1))
    done
  } | sed -n 's/.*(dropped \([0-9]*\).*/\1/p' | awk '{ sum += $1 } END { print sum + 0, NR }'
}

[ -z "$rate" ] || check_rate
run "$@"
status=$?
if [ -n "$rate" ]; then
  counts=$(count_drops)
  [ "${counts#* }" = $((2 * hosts)) ] || void 'the shapers are gone'
  [ "${counts% *}" = 0 ] || void "the shapers dropped ${counts% *} packets"
fi
exit $status
