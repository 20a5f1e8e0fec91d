"""The installed package has what the checkout has: recipes, launcher, batch scripts, types."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def run(package: Path, tmp_path: Path) -> Callable[..., str]:
    """Return `run(*command, code=0)`: what it prints in a folder where nothing of the checkout is, DRY_RUN set."""

    def run(*command: str, code: int = 0, where: Path = tmp_path) -> str:
        env = {**os.environ, "PYTHONPATH": str(package), "PYTHON": sys.executable, "DRY_RUN": "1"}
        done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_recipe_is_found_by_its_name(package, run):
    code = "from volo.config.train import TRAIN; print(TRAIN.parse(['-c', 'volo_d1_224', '/data'])['drop_path'])"
    assert run(sys.executable, "-c", code) == "0.1\n"
    packed, here = (
        {file.stem for file in path.iterdir()} for path in (package / "volo/files/configs", ROOT / "configs")
    )
    assert packed == here
    assert all((package / name / "py.typed").is_file() for name in ("volo", "tlt"))


def test_the_launcher_and_the_batch_scripts_are_there(run, tmp_path):
    volo, jobs = (sys.executable, "-m", "volo"), tmp_path / "jobs"
    command = run(*volo, "launch", "2", "/data", "--model", "volo_d1")
    assert command.startswith("2 processes: ")
    assert command.rstrip().endswith("volo/__main__.py train /data --model volo_d1")
    assert " label /data out" in run(*volo, "launch", "2", "label", "/data", "out")

    run(*volo, "slurm", "jobs")
    assert (jobs / "slurm" / "pretrain.sbatch").read_bytes() == (ROOT / "slurm" / "pretrain.sbatch").read_bytes()
    assert (jobs / "configs" / "volo_d5_224.yaml").is_file()
    started = run("./distributed_train.sh", "3", "/data", where=jobs)
    assert started.startswith("3 processes: ") and started.rstrip().endswith("train /data")
    assert "not empty" in run(*volo, "slurm", "jobs", code=2)
