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
    [("job.sbatch", SCRIPT + "rm $1\n", "SC2086"), ("docker/Dockerfile", "FROM debian\n", "DL3006")],
)
def test_a_defect_fails_the_lint_and_is_named(repository: Path, name: str, text: str, finding: str) -> None:
    if missing := [tool for tool in ("shellcheck", "hadolint") if shutil.which(tool, path=PATH) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: `make lint` does that")
    clean = _run(repository)
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    found = _run(repository)
    assert found.returncode == 1
    assert name in found.stdout + found.stderr and finding in found.stdout + found.stderr
