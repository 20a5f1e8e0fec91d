#!/usr/bin/env bash
# For batch scripts: run a training, pass Slurm's warnings on to it, and put the job back into the queue when it asks for that.
#
#     #SBATCH --signal=B:USR1@120      warn this script 120 s before the time limit
#     #SBATCH --requeue
#     #SBATCH --open-mode=append
#     slurm/requeue.sh ./distributed_train.sh 8 DATA -c RECIPE --experiment NAME --resume auto
#
# Exit code 85 means "start me again". So does an end by the warning itself, in the first seconds of a start. The script ends
# with the code of the training, also after a requeue.
set -uo pipefail

[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENTS]" >&2; exit 2; }

"$@" &
child=$!
warned=
# shellcheck disable=SC2329 # the traps call it
forward() {
  warned=1
  kill -s "$1" "$child" 2>/dev/null
}
for name in USR1 TERM INT; do
  # shellcheck disable=SC2064  # the name is this one
  trap "forward $name" "$name"
done

# A trapped signal ends `wait`, not the training.
while true; do
  wait "$child"
  code=$?
  kill -0 "$child" 2>/dev/null || break
done

case $code in
  85) again=1 ;;
  138 | 143) again=$warned ;; # 128 + SIGUSR1, SIGTERM
  *) again= ;;
esac
if [ -n "$again" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  scontrol requeue "${job:-$SLURM_JOB_ID}" || echo "$0: scontrol could not requeue job ${job:-$SLURM_JOB_ID}" >&2
fi
exit "$code"
