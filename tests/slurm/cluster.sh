#!/usr/bin/env bash
# A real Slurm cluster on this machine, for the tests; needs root and Debian's slurmctld slurmd slurm-client munge iproute2.
#
#     cluster.sh up DIR         start a controller and node1 to node3, with their files in DIR
#     cluster.sh run COMMAND    run a command where the controller is, such as `sbatch`
#     cluster.sh kill NODE      as a power cut: nothing is sent any more, then all of its processes are gone
#     cluster.sh revive NODE    start it again
#     cluster.sh down           end everything, whatever state it is in
#
# Each node is a network, a host name and a mount namespace: own address, own /etc/hosts, which maps its own name to
# 127.0.1.1 as Debian's installer does, own disk DIR/disk. The bridge between them is in the controller's namespace, out
# of the reach of this machine's firewall; nothing else of the machine is touched.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
NODES=(node1 node2 node3)
NET=10.87.3
CONTROLLER=volo-ctl # network namespaces have this prefix

number_of() { echo "${1#node}"; }

write_configuration() {
  local node
  mkdir -p "$DIR"/{run,log,state,spool,disk}
  chmod 755 "$DIR" "$DIR/run"
  dd if=/dev/urandom of="$DIR/run/munge.key" bs=128 count=1 status=none
  chmod 600 "$DIR/run/munge.key"
  for node in ctl "${NODES[@]}"; do
    { echo "127.0.0.1 localhost"
      echo "127.0.1.1 $node"
      echo "$NET.1 ctl"
      for other in "${NODES[@]}"; do
        [ "$other" = "$node" ] || echo "$NET.1$(number_of "$other") $other"
      done
    } >"$DIR/hosts.$node"
  done
  cat >"$DIR/slurm.conf" <<END
ClusterName=test
SlurmctldHost=ctl($NET.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the old start's credentials have expired: 2 minutes, also if less than 5 s are asked for.
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=30
MessageTimeout=10
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,batch_sched_delay=1
# Nodes of several kinds.
NodeName=DEFAULT CPUs=4 RealMemory=4000 State=UNKNOWN
$(for node in "${NODES[@]}"; do echo "NodeName=$node NodeAddr=$NET.1$(number_of "$node") CPUs=$((5 - $(number_of "$node")))"; done)
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
END
}

connect() {
  local node number
  ip netns add "$CONTROLLER"
  ip -n "$CONTROLLER" link add nodes type bridge
  ip -n "$CONTROLLER" addr add "$NET.1/24" dev nodes
  ip -n "$CONTROLLER" link set nodes up
  ip -n "$CONTROLLER" link set lo up
  for node in "${NODES[@]}"; do
    number=$(number_of "$node")
    ip netns add "volo-$node"
    ip -n "$CONTROLLER" link add "$node" type veth peer name eth0 netns "volo-$node"
    ip -n "$CONTROLLER" link set "$node" master nodes up
    ip -n "volo-$node" addr add "$NET.1$number/24" dev eth0
    ip -n "volo-$node" link set eth0 up
    ip -n "volo-$node" link set lo up
  done
}

# NAMESPACE NAME COMMAND...: run it there. Not `ip netns exec`, which mounts /sys anew: slurmd finds no cgroups in it.
inside() {
  local namespace=$1 name=$2
  shift 2
  mkdir -p "$DIR/disk" "$DIR/disk.$name"
  # The controller's processes must not keep standard output open: who started the cluster may wait for its end.
  # shellcheck disable=SC2016 # the shell inside expands them
  nsenter --net="/run/netns/$namespace" unshare --uts --mount bash -euc '
    hostname "$1"; mount --bind "$2/hosts.$1" /etc/hosts; mount --bind "$2/disk.$1" "$2/disk"; shift 2; exec "$@"
  ' inside "$name" "$DIR" "$@"
}

start_node() {
  mkdir -p "$DIR/spool/$1"
  inside "volo-$1" "$1" slurmd -N "$1" -f "$DIR/slurm.conf" >>"$DIR/log/slurmd.$1.log" 2>&1
}

# NAMESPACE: kill all that runs there, and wait until it is gone.
kill_all() {
  local pid
  while pid=$(ip netns pids "$1" 2>/dev/null) && [ -n "$pid" ]; do
    # shellcheck disable=SC2086  # several
    kill -KILL $pid 2>/dev/null || true
    sleep 0.05
  done
}

up() {
  down
  mkdir -p "$DIR"
  echo "$DIR" >"$RECORD"
  write_configuration
  connect
  inside "$CONTROLLER" ctl munged --key-file="$DIR/run/munge.key" --socket="$DIR/run/munge.sock" --force \
    --pid-file="$DIR/run/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munged.seed" 2>>"$DIR/log/munged.log"
  inside "$CONTROLLER" ctl slurmctld -i -f "$DIR/slurm.conf" >>"$DIR/log/slurmctld.log" 2>&1
  local node
  for node in "${NODES[@]}"; do start_node "$node"; done
  for _ in $(seq 3000); do
    [ "$(run sinfo -h -N -p low -t idle -o %N 2>/dev/null | wc -l)" != ${#NODES[@]} ] || return 0
    sleep 0.1
  done
  run sinfo -N >&2
  tail -n 5 "$DIR"/log/*.log >&2
  down
  return 1
}

run() { nsenter --net="/run/netns/$CONTROLLER" env SLURM_CONF="$DIR/slurm.conf" "$@"; }

down() {
  local namespace
  for namespace in $CONTROLLER "${NODES[@]/#/volo-}"; do
    [ -e "/run/netns/$namespace" ] || continue
    kill_all "$namespace"
    ip netns del "$namespace"
  done
  rm -f "$RECORD"
}

RECORD=/run/volo-test-cluster # which DIR the running cluster has
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
  up)
    DIR=${1:?DIR}
    up
    ;;
  down) down ;;
  run)
    DIR=$(cat "$RECORD")
    run "$@"
    ;;
  kill)
    ip -n "$CONTROLLER" link set "$1" down
    kill_all "volo-$1"
    ;;
  revive)
    DIR=$(cat "$RECORD")
    ip -n "$CONTROLLER" link set "$1" up
    start_node "$1"
    ;;
  *) echo "usage: $0 up DIR | run COMMAND | kill NODE | revive NODE | down" >&2; exit 2 ;;
esac
