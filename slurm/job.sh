# shellcheck shell=bash disable=SC2154 # the batch scripts and sbatch set what is not set here
# pretrain.sbatch and finetune.sbatch source this file. It copies the data to the nodes, checks the machines, and trains.
#
# Each GPU has one task that runs train.py; Slurm starts, signals and ends the tasks. The environment of `sbatch` may set
# these variables; here are their defaults.

DATA=${DATA:-}                                              # required: folder with train/ and validation/; with STAGE_TO also a tar
LABELS=${LABELS:-}                                          # token labels, for --token-label-data
OUTPUT=${OUTPUT:-$REPO/output/train}                        # run directories
BRANCH=${BRANCH:-}                                          # checkpoint of another run, to begin as a branch of it
EXPERIMENT=${EXPERIMENT:-$SLURM_JOB_NAME-$SLURM_JOB_ID}     # name of the run's directory; a requeued job keeps it
LOGS=${LOGS:-$REPO/output/slurm}                            # a log per node, JOB-NODE.log
PROCESSES=${PROCESSES:-${SLURM_GPUS_ON_NODE:-}}             # tasks per node; required on nodes without GPUs
STAGE_TO=${STAGE_TO:-}                                      # folder on each node's own disk, to which DATA is copied first
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}                        # for pyxis: a .sqsh file or REGISTRY#IMAGE:TAG; empty: no container
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-}                      # besides checkout, data, labels and output: SOURCE:TARGET,...
PREFLIGHT=${PREFLIGHT:-1}                                   # 0 skips the check of the machines
MASTER_ADDR=${MASTER_ADDR:-}                                # IPv4 address of the first node; determined below if empty
# Below the ports that the kernel assigns (32768 and up). The preflight uses the next port.
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 5000 * 2))}

for folder in OUTPUT LOGS; do
  mkdir -p "${!folder}" && [ -w "${!folder}" ] || { echo "error: $folder=${!folder} cannot be written" >&2; exit 2; }
done
OUTPUT=$(realpath "$OUTPUT") LOGS=$(realpath "$LOGS")
export VOLO_COMPILED=${VOLO_COMPILED:-$OUTPUT/.compiled} # where a requeued job finds what torch and Triton have compiled
REQUEUE_MARKER=$LOGS/$SLURM_JOB_ID-requeue # on a file system that containers and all nodes see
# shellcheck source=requeue.sh
. "$REPO/slurm/requeue.sh"

# FLAGS...: print the model that they name.
model_of() { [[ " $* " =~ \ --model[=\ ]([^ ]+) ]]; echo "${BASH_REMATCH[1]:-volo_d5}"; }

# Print the address from which the first node, where this script runs, reaches the second. Its own host name often resolves
# to a loopback address (/etc/hosts).
first_address() {
  local address
  address=$(getent ahostsv4 "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)" | awk '{ print $1; exit }')
  address=$(ip -4 -o route get "${address:-none}" 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')
  echo "${address:-$(fail "the address of this node was not found: set MASTER_ADDR to one that the other nodes reach")}"
  [ -n "$address" ]
}

# TASKS per node, COMMAND...: print and run it on every node. The ranks bind themselves to CPUs, so srun must not.
on_nodes() {
  local tasks=$1
  shift
  set -- srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * tasks)) --ntasks-per-node="$tasks" \
    --cpu-bind=none ${SLURM_GPUS_ON_NODE:+--gpu-bind=none} --kill-on-bad-exit=1 --chdir="$REPO" "$@"
  printf '$'
  printf ' %q' "$@"
  echo
  step "$@"
}

# PATHS...: print srun's flags, one a line, for a container that sees these paths; nothing without a container. It gets no
# name, because a requeued job would find a named one as it was left.
container_flags() {
  local mounts=$REPO:$REPO names path
  [ -n "$CONTAINER_IMAGE" ] || return 0
  for path in "$OUTPUT" "$LOGS" "$@"; do
    [ -z "$path" ] || mounts+=,$path:$path
  done
  # Otherwise an image's own values of these variables would take precedence.
  names=MASTER_ADDR,MASTER_PORT,REQUEUE_MARKER,PYTHON$(compgen -e | awk '/^(NCCL|UCX|GLOO|OMP)_/ { printf ",%s", $0 }')
  printf -- '--container-%s\n' "image=$CONTAINER_IMAGE" "mounts=$mounts${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" \
    "workdir=$REPO" "env=$names"
}

# Print a checksum of the names, times and sizes of all that DATA holds. This reads the attributes of every file, minutes
# for ImageNet on a slow file system; the folders' own times tell nothing of a file that was written again in place.
data_key() {
  find "$DATA" -type d -printf '%P/\n' -o -printf '%P %T@ %s\n' | LC_ALL=C sort | cksum | tr ' ' -
}

# FLAGS... of train.py: do the whole job, and exit.
run_job() {
  local data hang container preflight=()
  [ -n "$DATA" ] || fail "DATA is not set: DATA=/path/to/images sbatch ..."
  [ -r "$DATA" ] || fail "DATA=$DATA cannot be read on $(hostname)"
  [ -n "$PROCESSES" ] || fail "PROCESSES is not set, and Slurm gave this job no GPUs: sbatch --gpus-per-node=8, or PROCESSES=N"
  [ -z "$CONFIG" ] || [ -r "$CONFIG" ] || fail "no recipe $CONFIG: set CONFIG=FILE.yaml, or CONFIG= for none"
  if [[ $CONTAINER_IMAGE = *.sqsh ]]; then
    CONTAINER_IMAGE=$(realpath -m "$CONTAINER_IMAGE")
    [ -r "$CONTAINER_IMAGE" ] || fail "CONTAINER_IMAGE=$CONTAINER_IMAGE cannot be read: see docker/ for how to make it"
  fi
  # Absolute paths are valid on all nodes and in containers.
  DATA=$(realpath "$DATA") LABELS=${LABELS:+$(realpath -m "$LABELS")} FINETUNE=${FINETUNE:+$(realpath "$FINETUNE")}
  BRANCH=${BRANCH:+$(realpath -m "$BRANCH")} STAGE_TO=${STAGE_TO:+$(realpath -m "$STAGE_TO")}
  data=$DATA
  # The copy is named by what DATA holds, so that changed data are staged again.
  if [ -n "$STAGE_TO" ]; then
    data=$STAGE_TO/$(basename "${DATA%%.tar*}")-$(data_key) || fail "DATA=$DATA cannot be read on $(hostname)"
  fi
  mapfile -t container < <(container_flags "$data" "$LABELS" "${FINETUNE:+$(dirname "$FINETUNE")}" \
    "${BRANCH:+$(dirname "$BRANCH")}")
  # Without an active environment take the one that `make` made in the checkout; in a container, the image's Python.
  if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -n "$CONTAINER_IMAGE${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x .venv/bin/python ] || PYTHON=$REPO/.venv/bin/python
  fi
  export PYTHON CONTAINER_IMAGE MASTER_PORT
  echo "start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID: $SLURM_JOB_NUM_NODES x $PROCESSES processes on $SLURM_JOB_NODELIST"
  if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    MASTER_ADDR=${MASTER_ADDR:-$(first_address)} || exit 2
    export MASTER_ADDR
    echo "rank 0 is at $MASTER_ADDR, port $MASTER_PORT"
  fi

  [ -z "$STAGE_TO" ] || on_nodes 1 slurm/stage.sh "$DATA" "$data" || finish $?
  [ "$PREFLIGHT" = 0 ] || preflight=(--data "$data" ${LABELS:+"$LABELS"} --output "$OUTPUT" --timeout 600)
  # A hang must end later than Slurm notices a lost node. Otherwise the job fails before Slurm requeues it.
  hang=$(scontrol show config | awk '$1 == "SlurmdTimeout" { print 2 * $3 }')
  [ "${hang:-0}" -gt 120 ] || hang=120
  echo "logs: $LOGS/$SLURM_JOB_ID-NODE.log"
  on_nodes "$PROCESSES" --output="$LOGS/%j-%N.log" --open-mode=append "${container[@]}" slurm/rank.sh "${preflight[@]}" -- \
    "$data" ${CONFIG:+-c "$CONFIG"} ${LABELS:+--token-label-data "$LABELS"} ${FINETUNE:+--finetune "$FINETUNE"} \
    ${BRANCH:+--branch "$BRANCH"} --output "$OUTPUT" --experiment "$EXPERIMENT" --resume auto \
    --dist-timeout "$hang" "$@" || finish $?
  if [ "$(cat "$REQUEUE_MARKER.state" 2>/dev/null)" != 'done' ]; then # a step can exit with 0 without having started
    echo "error: the training has not said that it is done: see $LOGS" >&2
    finish 1
  fi
  finish 0
}
