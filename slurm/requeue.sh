#!/usr/bin/env bash
# Run a training, pass Slurm's warnings on to it, and put the job back into the queue when it asks for that. job.sh sources
# this; in batch scripts of your own:
#
#     #SBATCH --signal=B:USR1@120      warn this script 120 s before the time limit
#     #SBATCH --requeue
#     #SBATCH --open-mode=append
#     slurm/requeue.sh ./distributed_train.sh 8 DATA -c RECIPE --experiment NAME --resume auto
#
# The script ends with the code of the training, also after a requeue. A training that was told to end, and has saved,
# leaves the file REQUEUE_MARKER (rank 0 writes it; on other nodes than this script's it has to see it). That decides, not
# an exit code: that of srun mixes the codes of many processes.
REQUEUE_MARKER=${REQUEUE_MARKER:-$(mktemp)}
export REQUEUE_MARKER
# What an earlier start has left doesn't count, but for what `goes_on` compares.
rm -f "$REQUEUE_MARKER.state" # rank 0 writes "begun", then "done"
: >"$REQUEUE_MARKER" || exit 2

running='' # process id of the step
timer=''   # of what ends it if it has not begun
warning='' # the newest signal that this script was sent
warnings=0

fail() { echo "error: $*" >&2; exit 2; } # MESSAGE: the end, by the user's mistake

warned() { # SIGNAL
  warning=$1 warnings=$((warnings + 1))
  [ -n "$running" ] || return
  echo "$1 from Slurm: passed on to the running step" >&2
  kill -s "$1" "$running" 2>/dev/null
  # A node that is still busy unpacking an image hears nothing of it, and the others have nothing to save.
  { sleep 25 && [ ! -s "$REQUEUE_MARKER.state" ] && kill -TERM "$running"; } &>/dev/null &
  timer=$!
}
for signal in USR1 TERM INT; do
  # shellcheck disable=SC2064 # the name of now
  trap "warned $signal" "$signal"
done

# COMMAND...: run it, return its exit code when it has ended. A trapped signal ends `wait`, not the command.
step() {
  local code seen=-1
  [ -z "$warning" ] || return 143 # it came between two steps
  "$@" &
  running=$!
  while [ "$seen" != "$warnings" ]; do
    seen=$warnings
    wait "$running"
    code=$?
  done
  running=''
  [ -z "$timer" ] || kill "$timer" 2>/dev/null
  return "$code"
}

# CODE: whether the job that ended with it is to be started again.
to_be_requeued() {
  local state
  state=$(scontrol show job -o "$job")
  # What was cancelled shall not come back; what Slurm has preempted or lost a node of, it requeues itself.
  [[ -z $state || $state = *JobState=RUNNING* ]] || return 1
  [ ! -s "$REQUEUE_MARKER" ] || return 0
  # Told to end before there was anything to save. A preempted job's steps are signalled, this script isn't.
  [[ $1 =~ ^(85|138|143)$ ]] && { [ "$warning" = USR1 ] || [[ $state =~ PreemptTime=[0-9] ]]; }
}

# Whether it makes sense to start again: not where the time limit has ended two starts in a row without an update done.
goes_on() {
  local update before idle=0
  update=$(sed -n 's/.*"update": \([0-9]*\).*/\1/p' "$REQUEUE_MARKER")
  [ ! -s "$REQUEUE_MARKER.last" ] || read -r before idle <"$REQUEUE_MARKER.last"
  if [ "${update:-${before:-0}}" = "${before:-0}" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "${update:-${before:-0}} $idle" >"$REQUEUE_MARKER.last"
  [ "$warning" != USR1 ] || [ "$idle" -lt 2 ]
}

# CODE: end with it, back in the queue if the training was told to end.
finish() {
  local job
  trap '' TERM USR1 INT # requeueing a job signals this script
  # The id of one array task; the bare number may mean all of them.
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-${SLURM_JOB_ID:-}}
  if [ -z "$job" ] || ! to_be_requeued "$1"; then
    rm -f "$REQUEUE_MARKER.last"
  elif ! goes_on; then
    echo "error: the time limit has ended two starts in a row before they had done an update: ask for more (--time)" >&2
    rm -f "$REQUEUE_MARKER.last"
  else
    [ ! -s "$REQUEUE_MARKER" ] || echo "the training says: $(cat "$REQUEUE_MARKER")"
    scontrol requeue "$job" && echo "job $job goes back into the queue"
  fi
  rm -f "$REQUEUE_MARKER" "$REQUEUE_MARKER.state"
  exit "$1"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -uo pipefail
  [ $# -gt 0 ] || fail "usage: $0 COMMAND [ARGUMENTS]"
  step "$@"
  finish $?
fi
