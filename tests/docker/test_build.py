"""docker/build.sh: which engine it takes, and what it tells it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the tools that the script needs, and no container engine."""
    for tool in ("bash", "dirname", "git", "sed"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def _add_engine(tools: Path, name: str, works: bool) -> None:
    """An engine that prints where it is and each argument on a line of its own."""
    engine = tools / name
    says = f'printf "%s\\n" "$PWD" {name} "$@"'
    engine.write_text(f'#!/usr/bin/env bash\n[ "$1" = info ] && exit {int(not works)}\n{says}\n')
    engine.chmod(0o755)


def _build(tools: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "docker/build.sh"), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": str(tools), **environment})


def test_the_first_engine_that_works_builds_the_dockerfile_of_this_checkout(tools: Path) -> None:
    _add_engine(tools, "docker", works=False)  # the client without its daemon
    _add_engine(tools, "podman", works=True)
    _add_engine(tools, "buildah", works=True)
    ended = _build(tools)
    assert ended.returncode == 0, ended.stderr
    folder, engine, *arguments = ended.stdout.splitlines()
    assert (folder, engine) == (str(ROOT), "podman")
    assert arguments[:4] == ["build", "--file", "docker/Dockerfile", "--tag"]
    name, _, version = arguments[4].partition(":")
    assert name == "volo-tlt" and f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert arguments[-1] == "." and not any(argument.startswith("BASE=") for argument in arguments)


def test_variables_and_flags_reach_the_engine(tools: Path) -> None:
    _add_engine(tools, "docker", works=True)
    _add_engine(tools, "buildah", works=True)
    settings = {"BASE": "registry/base:1", "TAG": "a/b:c", "EXTRAS": "plot,dali", "ENGINE": "buildah"}
    folder, engine, *arguments = _build(tools, "--label", "two words", **settings).stdout.splitlines()
    assert engine == "buildah"
    assert arguments[arguments.index("--tag") + 1] == "a/b:c"
    assert "BASE=registry/base:1" in arguments and "EXTRAS=plot,dali" in arguments
    assert arguments[-3:] == ["--label", "two words", "."]


def test_the_commit_goes_into_the_image(tools: Path) -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        pytest.skip("not a git checkout")
    _add_engine(tools, "docker", works=True)
    arguments = _build(tools).stdout.splitlines()
    revision = next(a for a in arguments if a.startswith("REVISION=")).removeprefix("REVISION=")
    assert revision.removesuffix("-dirty") == head.stdout.strip()


def test_a_dry_run_prints_the_command_alone(tools: Path) -> None:
    _add_engine(tools, "docker", works=True)
    ended = _build(tools, DRY_RUN="1")
    (line,) = ended.stdout.splitlines()
    assert ended.returncode == 0 and line.startswith("'docker' 'build' '--file' 'docker/Dockerfile'")


@pytest.mark.parametrize(("engine", "named"), [("", "docker, podman and buildah"), ("podman", "podman")])
def test_no_engine_is_one_line(tools: Path, engine: str, named: str) -> None:
    _add_engine(tools, "docker", works=False)
    ended = _build(tools, ENGINE=engine)
    assert ended.returncode == 2 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert "no container engine" in line and f"fails with {named};" in line
