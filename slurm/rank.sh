#!/usr/bin/env bash
# Runs one rank, perhaps in a container: it checks the machines together with the other ranks, then trains.
#
#     rank.sh [FLAGS of the preflight] -- DATA [FLAGS of train.py]
#
# Both happen in one job step, so that a container image is unpacked only once.
set -uo pipefail
preflight=()
while [ "$1" != -- ]; do
  preflight+=("$1")
  shift
done
shift
if [ ${#preflight[@]} -gt 0 ]; then
  MASTER_PORT=$((MASTER_PORT + 1)) "$PYTHON" -m volo preflight "${preflight[@]}" || exit
fi
exec "$PYTHON" -m volo train "$@" # not train.py, which only a checkout has
