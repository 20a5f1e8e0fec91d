"""docker/build.sh: which engine it takes, and what it tells it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the tools that the script needs, and a docker client without its daemon."""
    for tool in ("bash", "dirname", "git", "sed"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    _add_engine(tmp_path, "docker", works=False)
    return tmp_path


def _add_engine(tools: Path, name: str, works: bool = True) -> None:
    """An engine that prints where it is and each argument on a line of its own."""
    says = f'printf "%s\\n" "$PWD" {name} "$@"'
    (tools / name).write_text(f'#!/usr/bin/env bash\n[ "$1" = info ] && exit {int(not works)}\n{says}\n')
    (tools / name).chmod(0o755)


def _build(tools: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "docker/build.sh"), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, cwd="/", env={"PATH": str(tools), **environment}, timeout=LIMIT
    )


def test_first_working_engine_builds_this_commits_dockerfile(tools: Path) -> None:
    _add_engine(tools, "podman")
    _add_engine(tools, "buildah")
    folder, engine, *arguments = _build(tools).stdout.splitlines()
    assert (folder, engine) == (str(ROOT), "podman")
    assert arguments[:4] == ["build", "--file", "docker/Dockerfile", "--tag"] and arguments[-1] == "."
    name, _, version = arguments[4].partition(":")
    assert name == "volo-tlt" and f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    (revision,) = (a.removeprefix("REVISION=") for a in arguments if a.startswith("REVISION="))
    assert head.returncode or revision.removesuffix("-dirty") == head.stdout.strip()
    assert _build(tools, DRY_RUN="1").stdout.startswith("'podman' 'build' '--file' 'docker/Dockerfile'")


def test_variables_and_flags_reach_the_engine(tools: Path) -> None:
    _add_engine(tools, "podman")
    _add_engine(tools, "buildah")
    settings = {"BASE": "registry/base:1", "TAG": "a/b:c", "EXTRAS": "plot,dali", "ENGINE": "buildah"}
    _, engine, *arguments = _build(tools, "--label", "two words", **settings).stdout.splitlines()
    assert engine == "buildah" and arguments[arguments.index("--tag") + 1] == "a/b:c"
    assert {"BASE=registry/base:1", "EXTRAS=plot,dali"} <= set(arguments)
    assert arguments[-3:] == ["--label", "two words", "."]


@pytest.mark.parametrize(("engine", "named"), [("", "docker, podman and buildah"), ("podman", "podman")])
def test_no_engine_is_one_line(tools: Path, engine: str, named: str) -> None:
    ended = _build(tools, ENGINE=engine)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "no container engine" in line and f"fails with {named};" in line
