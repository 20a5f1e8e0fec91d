#!/usr/bin/env bash
# Label a folder of images with N processes of this machine (one per GPU; on a machine without GPUs, N on the CPU):
#
#     ./distributed_generate_label.sh N DATA OUT --model dm_nfnet_f6 --pretrained [flags of generate_label.py]
#
# Environment: see volo/commands/launch.sh.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=generate_label.py usage="DATA OUT [flags of generate_label.py]"
. "$here/volo/commands/launch.sh"
