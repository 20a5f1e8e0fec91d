"""`make lint` sees every shell script and Dockerfile of the repository, and new ones without being told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = Path(".ci/lint-shell")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SCRIPT = "#!/usr/bin/env bash\n"


def _run(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / LINT), *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with nothing but the linter."""
    (tmp_path / LINT).parent.mkdir()
    shutil.copy(ROOT / LINT, tmp_path / LINT)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


@pytest.fixture
def linters() -> None:
    missing = [tool for tool in ("shellcheck", "hadolint") if shutil.which(tool, path=PATH) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: `make lint` does that")


def test_scripts_are_linted_whatever_their_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    known = {".ci/run", "distributed_train.sh", "volo/commands/launch.sh", "docker/Dockerfile"}
    assert known <= set(_run(ROOT, "--list").stdout.splitlines())


def test_new_files_are_linted_and_ignored_ones_are_not(repository: Path) -> None:
    for name, text in {
        ".gitignore": "scratch/\n",
        "by_suffix.sh": "",
        "by_suffix.sbatch": "",
        "by_first_line": "#!/bin/bash -e\n",
        "with spaces and ü": SCRIPT,
        "docker/Dockerfile": "FROM scratch\n",
        "scratch/ignored.sh": "",
        "program.py": "#!/usr/bin/env python3\n",
        "fish": "#!/usr/bin/fish\n",
        "second_line": "\0\n#!/bin/bash\n",
    }.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    linted = {"by_suffix.sh", "by_suffix.sbatch", "by_first_line", "with spaces and ü", "docker/Dockerfile"}
    assert set(_run(repository, "--list").stdout.splitlines()) == {*linted, str(LINT)}


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("broken.sh", SCRIPT + "if true; then\n", "unexpected end of file"),
        ("job.sbatch", SCRIPT + "rm $1\n", "SC2086"),
        ("no_suffix", SCRIPT + "rm $1\n", "SC2086"),
        ("docker/Dockerfile", "FROM debian\n", "DL3006"),
    ],
)
@pytest.mark.usefixtures("linters")
def test_a_defect_fails_the_lint_and_is_named(repository: Path, name: str, text: str, finding: str) -> None:
    clean = _run(repository)
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    found = _run(repository)
    assert found.returncode == 1
    assert name in found.stdout + found.stderr and finding in found.stdout + found.stderr


def test_a_missing_linter_is_one_line(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    tools = tmp_path_factory.mktemp("tools")
    for tool in ("bash", "git", "dirname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    ended = subprocess.run([str(repository / LINT)], capture_output=True, text=True, env={"PATH": str(tools)})
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [f"{repository / LINT}: shellcheck is missing: pip install 'volo-tlt[dev]'"]
