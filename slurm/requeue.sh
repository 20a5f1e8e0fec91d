#!/usr/bin/env bash
# For batch scripts of your own: run a training, pass Slurm's warnings on to it, and put the job back into the queue when it
# asks for that. (pretrain.sbatch and finetune.sbatch do so themselves.)
#
#     #SBATCH --signal=B:USR1@120      warn this script 120 s before the time limit
#     #SBATCH --requeue
#     #SBATCH --open-mode=append
#     slurm/requeue.sh ./distributed_train.sh 8 DATA -c RECIPE --experiment NAME --resume auto
#
# The script ends with the code of the training, also after a requeue. A training on other nodes than this script's needs a
# REQUEUE_MARKER that both see.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

[ $# -gt 0 ] || fail "usage: $0 COMMAND [ARGUMENTS]"
step "$@"
finish $?
