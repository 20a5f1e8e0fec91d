#!/usr/bin/env bash
# One rank, in its container where there is one: check the machines with all others, then train.
#
#     rank.sh [FLAGS of the preflight] -- DATA [FLAGS of train.py]
#
# Both in one step, so that an image is unpacked once.
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
exec "$PYTHON" -m volo train "$@" # there is a train.py in a checkout alone
