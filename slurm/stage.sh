#!/usr/bin/env bash
# Bring the data to a node's own disk, before the training and outside of its container: `stage.sh SOURCE TARGET` copies the
# folder SOURCE, or unpacks the tar SOURCE, to the folder TARGET. That appears when it is whole; where it exists nothing is
# done.
set -uo pipefail
node=$(hostname)

fail() { echo "error: $node: $*" >&2; exit 2; }

# tar does not mind where a file ends between two entries, without the empty blocks; compressed ones tell it themselves.
is_whole() {
  [ "$(tail -c +258 "$1" | head -c 5)" != ustar ] || [ "$(tail -c 1024 "$1" | tr -d '\0' | wc -c)" = 0 ]
}

source=$1 target=$2
if [ -d "$target" ]; then
  echo "$node: data are staged in $target"
  exit 0
fi
unfinished=$(dirname "$target")/.staging-$SLURM_JOB_ID
rm -rf "$unfinished" # of an earlier start
mkdir -p "$unfinished" || fail "STAGE_TO=$(dirname "$target") cannot be written"
trap 'rm -rf "$unfinished"' EXIT
trap 'exit 143' TERM
trap 'exit 138' USR1

if [ -d "$source" ]; then
  cp -a "$source/." "$unfinished"
else
  is_whole "$source" && tar -xf "$source" -C "$unfinished"
fi || fail "DATA=$source could not be brought to $unfinished"
root=$unfinished
[ -d "$root/train" ] || root=$(echo "$unfinished"/*) # the tar of a folder, not of what is in it
[ -d "$root/train" ] || fail "DATA=$source has no train/"
sync -f "$root"
# A job that did the same at the same time may have been quicker.
mv -T "$root" "$target" 2>/dev/null || [ -d "$target" ] || fail "$target could not be created"
echo "$node: data staged in $target"
