#!/usr/bin/env bash
# What `make test-slurm` needs: root, for network namespaces and slurmd, and the programs of a few Debian packages, which
# are installed by apt-get if they are missing.
set -euo pipefail
packages="slurmctld slurmd slurm-client munge iproute2"

say() { echo "make test-slurm: $*" >&2; }

[ "$(id -u)" = 0 ] || { say "needs root, for network namespaces and slurmd: run it as root (sudo make test-slurm)"; exit 2; }
missing=
for program in slurmctld slurmd sbatch munged ip tc; do
  PATH=$PATH:/usr/sbin command -v "$program" >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || { say "needs$missing, and there is no apt-get to install them (Debian: $packages)"; exit 2; }
say "missing:$missing; now running: apt-get update && apt-get install $packages"
apt-get update -qq
# shellcheck disable=SC2086  # several
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >&2
