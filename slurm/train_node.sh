#!/usr/bin/env bash
# On each node, in its container where there is one: check the machines, then train.
#
#     train_node.sh [FLAGS of the preflight] -- N DATA [FLAGS of train.py]
#
# Both in one step, so that an image is unpacked once. What the training prints goes to LOGS/JOB-NODE.log.
set -uo pipefail

preflight=()
while [ "$1" != -- ]; do
  preflight+=("$1")
  shift
done
shift
if [ ${#preflight[@]} -gt 0 ]; then
  "$PYTHON" -m volo preflight "${preflight[@]}" || exit
fi
exec ./distributed_train.sh "$@" >>"$LOGS/$SLURM_JOB_ID-${SLURMD_NODENAME:-$(hostname -s)}.log" 2>&1
