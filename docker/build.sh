#!/usr/bin/env bash
# Build the image of docker/Dockerfile:
#
#     docker/build.sh [flags of `docker build`]
#
# Environment: BASE (default: the Dockerfile's), TAG (default: volo-tlt:VERSION), EXTRAS (extras of pyproject.toml, default: plot),
# ENGINE (docker, podman or buildah; default: the first of them that works), DRY_RUN=1 prints the command instead of running it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# docker's client is often there without its daemon, or without leave to use it.
engine=
for name in ${ENGINE:-docker podman buildah}; do
  if command -v "$name" >/dev/null && "$name" info >/dev/null 2>&1; then
    engine=$name
    break
  fi
done
if [ -z "$engine" ]; then
  echo "$0: no container engine: \`info\` fails with ${ENGINE:-docker, podman and buildah}; install or start one" >&2
  exit 2
fi

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
revision=$(git describe --always --dirty --abbrev=40 --exclude="*" 2>/dev/null || echo unknown)
command=("$engine" build --file docker/Dockerfile --tag "${TAG:-volo-tlt:$version}")
command+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
for name in BASE EXTRAS; do
  [ -z "${!name:-}" ] || command+=(--build-arg "$name=${!name}")
done
command+=("$@" .)
if [ -n "${DRY_RUN:-}" ]; then
  echo "${command[*]@Q}"
  exit
fi
exec "${command[@]}"
