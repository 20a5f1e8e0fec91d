# Sourced by the launch scripts: start $program on the first argument's number of processes, with the other arguments.
#
# Environment: PYTHON (default: python3 of the active environment, else of .venv beside the script), OMP_NUM_THREADS
# (default: (cores - 1) / N on a machine without GPUs, else cores / N), MAX_RESTARTS=N starts the processes again up to N
# times after one was lost, DRY_RUN=1 prints the command instead of running it.
# shellcheck shell=bash disable=SC2154 # the scripts set here, program and usage
set -euo pipefail

case "${1:-}" in
  "" | *[!0-9]* | 0) echo "usage: $0 N $usage   (N: number of processes, one per GPU)" >&2; exit 2 ;;
esac
processes=$1
shift

if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  # Without GPUs one core stays free: data loading runs beside the ranks, and oversubscribed cores are many times slower.
  [ -e /proc/driver/nvidia ] || cores=$((cores - 1))
  threads=$((cores / processes))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# Without an active environment, the one that `make` has made beside the script.
[ -n "${PYTHON:-}${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$here/.venv/bin/python" ] || PYTHON=$here/.venv/bin/python
command=("${PYTHON:-python3}" "$here/volo/programs/launch.py" --standalone --nproc-per-node "$processes" "$here/$program" "$@")
if [ -n "${DRY_RUN:-}" ]; then
  echo "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]@Q}"
  exit 0
fi
exec "${command[@]}"
