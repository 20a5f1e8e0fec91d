#!/usr/bin/env bash
# Copy the data to a node's own disk, before the training and outside its container. `stage.sh SOURCE TARGET` copies the
# folder SOURCE, or unpacks the tar SOURCE, to the folder TARGET, which appears only when it is complete. If TARGET exists,
# the script does nothing.
set -uo pipefail
node=$(hostname)

fail() { echo "error: $node: $*" >&2; exit 2; }

source=$1 target=$2
if [ -d "$target" ]; then
  echo "$node: data are staged in $target"
  exit 0
fi
unfinished=$(dirname "$target")/.staging-$SLURM_JOB_ID
rm -rf "$unfinished" # left by an earlier start
mkdir -p "$unfinished" || fail "STAGE_TO=$(dirname "$target") cannot be written"
trap 'rm -rf "$unfinished"' EXIT
trap 'exit 143' TERM
trap 'exit 138' USR1

if [ -d "$source" ]; then
  cp -a "$source/." "$unfinished"
else
  # tar alone accepts a file that is cut between two entries, and leaves out what follows an end marker where tars were
  # joined. So have it go on there, and count the runs of empty blocks.
  ends=$(LC_ALL=C tar -xivRf "$source" -C "$unfinished" | cut -d: -f2- | uniq | grep -c '^ \*\* Block of NULs \*\*$') &&
    [ "$ends" = 1 ]
fi || fail "DATA=$source could not be brought to $unfinished"
root=$unfinished
[ -d "$root/train" ] || root=$(echo "$unfinished"/*) # if the tar contains the folder itself, not only its content
[ -d "$root/train" ] || fail "DATA=$source has no train/"
sync -f "$root"
# Another job that stages the same data may have been faster.
mv -T "$root" "$target" 2>/dev/null || [ -d "$target" ] || fail "$target could not be created"
echo "$node: data staged in $target"
