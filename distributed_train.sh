#!/usr/bin/env bash
# Train on N processes of this machine (one per GPU; on a machine without GPUs, N processes on the CPU):
#
#     ./distributed_train.sh N DATA --model volo_d1 [flags of train.py]
#
# Environment: see volo/commands/launch.sh.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=train.py usage="DATA [flags of train.py]"
. "$here/volo/commands/launch.sh"
