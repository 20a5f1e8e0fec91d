"""The installed package has what the checkout has: recipes, launcher, batch scripts, types."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds, from a copy of the files that git has: building leaves files behind."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("source")
    for name in ("volo", "tlt", "configs", "slurm"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "setup.py", "-q", "build"]
    built = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=LIMIT)
    assert built.returncode == 0, built.stderr
    return copy / "build" / "lib"


def volo(package: Path, where: Path, *words: str, **env: str) -> str:
    """The output of `volo` from the package, in a folder where nothing of the checkout is."""
    done = subprocess.run(
        [sys.executable, "-m", "volo", *words],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(package), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_recipe_is_found_by_its_name(package: Path, tmp_path: Path) -> None:
    code = "from volo.config.args import parse_train as p; print(p(['-c', 'volo_d1_224', '/data']).drop_path)"
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == "0.1\n", done.stderr
    assert {path.stem for path in (package / "volo/files/configs").iterdir()} == {
        path.stem for path in (ROOT / "configs").iterdir()
    }
    assert all((package / name / "py.typed").is_file() for name in ("volo", "tlt"))


def test_the_launcher_and_the_batch_scripts_are_there(package: Path, tmp_path: Path) -> None:
    command = volo(package, tmp_path, "launch", "2", "/data", "--model", "volo_d1", DRY_RUN="1")
    assert command.startswith("2 processes: ")
    assert command.rstrip().endswith("volo/__main__.py train /data --model volo_d1")
    assert " label /data out" in volo(package, tmp_path, "launch", "2", "label", "/data", "out", DRY_RUN="1")

    volo(package, tmp_path, "slurm", "jobs")
    jobs = tmp_path / "jobs"
    assert (jobs / "slurm" / "pretrain.sbatch").read_bytes() == (ROOT / "slurm" / "pretrain.sbatch").read_bytes()
    assert (jobs / "configs" / "volo_d5_224.yaml").is_file()
    env = {**os.environ, "PYTHONPATH": str(package), "PYTHON": sys.executable, "DRY_RUN": "1"}
    started = subprocess.run(
        ["./distributed_train.sh", "3", "/data"], cwd=jobs, env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert started.stdout.startswith("3 processes: ") and started.stdout.rstrip().endswith("train /data"), (
        started.stderr
    )
    command = [sys.executable, "-m", "volo", "slurm", "jobs"]
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 2 and "not empty" in again.stderr
