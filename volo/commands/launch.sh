# Sourced by the launch scripts: start $program on the first argument's number of processes, with the other arguments.
#
# Environment:
#   PYTHON            default: python3 of the active environment, else of .venv beside the script
#   MAX_RESTARTS      start all processes again, up to so many times, after one was lost (0; on one node only)
#   SHUTDOWN_TIMEOUT  seconds that processes get to save and end after a signal (300; after another one failed: 8)
#   DRY_RUN=1         print what would be started, instead of starting it
# Several nodes: start the script on each, all with the same N and flags (lines then get a prefix, [HOST:RANK]), and
#   NNODES            how many there are (1)
#   NODE_RANK         this one's number, from 0; ranks are numbered in this order
#   MASTER_ADDR       IP address of node 0 that the others reach it by
#   MASTER_PORT       a port of node 0 (29500)
#   JOIN_TIMEOUT      seconds until all nodes must be there (60)
# shellcheck shell=bash disable=SC2154 # the scripts set here, program and usage
set -euo pipefail

case "${1:-}" in
  "" | *[!0-9]* | 0) echo "usage: $0 N $usage   (N: number of processes, one per GPU)" >&2; exit 2 ;;
esac
processes=$1
shift

# Without an active environment, the one that `make` has made beside the script.
[ -n "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$here/.venv/bin/python" ] || PYTHON=$here/.venv/bin/python
exec "${PYTHON:-python3}" "$here/volo/commands/launch.py" "$processes" "$here/$program" "$@"
