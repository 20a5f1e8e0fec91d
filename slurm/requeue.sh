#!/usr/bin/env bash
# Run a training, pass Slurm's warnings on to it, and requeue the job when the training asks for that. In batch scripts of
# your own:
#
#     #SBATCH --signal=B:USR1@120      warn this script 120 s before the time limit
#     #SBATCH --requeue
#     #SBATCH --open-mode=append
#     slurm/requeue.sh ./distributed_train.sh 8 DATA -c RECIPE --experiment NAME --resume auto
#
# The script exits with the training's exit code, even after a requeue. When a signal has stopped the training and it has
# saved, rank 0 writes the file REQUEUE_MARKER, which rank 0's node must see. That file decides about requeueing, because
# the exit code of srun combines the codes of many processes. It may name nodes that compute wrong: the job is started
# again on others.
#
# A script that sources this file, as job.sh does, may set REQUEUE_MARKER before, and calls `fail`, `step` and `finish`.
# Variables that begin with _ are this file's own.
REQUEUE_MARKER=${REQUEUE_MARKER:-$(mktemp)}
export REQUEUE_MARKER
# Remove what an earlier start has left, except the file that `goes_on` reads.
rm -f "$REQUEUE_MARKER.state" # rank 0 writes "begun", then "done"
: >"$REQUEUE_MARKER" || exit 2

_signals='' # the signals that this script has received, in order, such as " USR1 TERM"
_passed=''  # those of them that it has passed on to a step
_running='' # process id of the running step
_timer=''   # process id of what ends the step if the training has not begun

fail() { echo "error: $*" >&2; exit 2; } # MESSAGE: exit because of the user's mistake

# Send the newest signal to the running step, if it doesn't know of it.
pass_on() {
  [ -n "$_running" ] && [ "$_passed" != "$_signals" ] || return 0
  _passed=$_signals
  echo "${_signals##* } from Slurm: passed on to the running step" >&2
  kill -s "${_signals##* }" "$_running" 2>/dev/null
  # A node that is still unpacking an image doesn't react, and the other nodes have nothing to save yet.
  { sleep 25 && [ ! -s "$REQUEUE_MARKER.state" ] && kill -TERM "$_running"; } &>/dev/null &
  _timer=$!
}
trap '_signals+=" USR1"; pass_on' USR1
trap '_signals+=" TERM"; pass_on' TERM
trap '_signals+=" INT"; pass_on' INT

# COMMAND...: run it, wait for it, and return its exit code. A trapped signal ends `wait`, but not the command.
step() {
  local code seen=none
  [ -z "$_signals" ] || return 143 # a signal came between two steps
  "$@" &
  _running=$!
  pass_on # a signal that came in the meantime
  while [ "$seen" != "$_signals" ]; do
    seen=$_signals
    wait "$_running"
    code=$?
  done
  _running=''
  [ -z "$_timer" ] || kill "$_timer" 2>/dev/null
  return "$code"
}

# CODE JOB: succeed if the job, which ended with this exit code, should be started again.
to_be_requeued() {
  local state
  state=$(scontrol show job -o "$2")
  # A cancelled job must not come back. Slurm itself requeues jobs that it preempted or that lost a node.
  [[ -z $state || $state = *JobState=RUNNING* ]] || return 1
  [ ! -s "$REQUEUE_MARKER" ] || return 0
  # The training was stopped before it had anything to save. On preemption Slurm signals the steps, but not this script.
  [[ $1 =~ ^(85|138|143)$ ]] && { [[ $_signals = *USR1 ]] || [[ $state =~ PreemptTime=[0-9] ]]; }
}

# Succeed unless the time limit has ended two starts in a row before any update was done.
goes_on() {
  local update before idle=0
  update=$(sed -n 's/.*"update": \([0-9]*\).*/\1/p' "$REQUEUE_MARKER")
  [ ! -s "$REQUEUE_MARKER.last" ] || read -r before idle <"$REQUEUE_MARKER.last"
  if [ "${update:-${before:-0}}" = "${before:-0}" ]; then idle=$((idle + 1)); else idle=0; fi
  echo "${update:-${before:-0}} $idle" >"$REQUEUE_MARKER.last"
  [[ $_signals != *USR1 ]] || [ "$idle" -lt 2 ]
}

# CODE: exit with it; requeue the job first if the training was stopped by a signal.
finish() {
  local job exclude others
  trap '' TERM USR1 INT # scontrol requeue signals this script
  # In a job array, name this task; the job's number alone may mean all tasks.
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-${SLURM_JOB_ID:-}}
  if [ -z "$job" ] || ! to_be_requeued "$1" "$job"; then
    rm -f "$REQUEUE_MARKER.last"
  elif ! goes_on; then
    echo "error: the time limit has ended two starts in a row before they had done an update: ask for more (--time)" >&2
    rm -f "$REQUEUE_MARKER.last"
  else
    [ ! -s "$REQUEUE_MARKER" ] || echo "the training says: $(cat "$REQUEUE_MARKER")"
    exclude=$(sed -n 's/.*"exclude": "\([^"]*\)".*/\1/p' "$REQUEUE_MARKER")
    if [ -z "$exclude" ]; then
      scontrol requeue "$job"
    else # Slurm lets only a job that waits exclude nodes: hold it until that is done
      others=$(scontrol show job -o "$job" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
      scontrol requeuehold "$job" && echo "not on $exclude, which computed or stored something wrong" &&
        { scontrol update JobId="$job" ExcNodeList="${others:+$others,}$exclude"; scontrol release "$job"; }
    fi && echo "job $job goes back into the queue"
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
