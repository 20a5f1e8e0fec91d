"""The steps of docker/Dockerfile, run; and what is in the image then."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.commands.conftest import ROOT
from tests.docker.conftest import LINKED, Buildah

pytestmark = pytest.mark.docker
USER = 10001
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(buildah: Buildah, image: str) -> Run:
    """Return `run(*command, flags=())`: what the command prints in a container, as the image's user."""
    return partial(buildah.inside, buildah("from", image))


def test_every_package_of_the_base_is_as_it_was(buildah: Buildah, base: str, run: Run) -> None:
    pip = ("python3", "-m", "pip", "list")
    before, after = set(buildah.inside(buildah("from", base), *pip).splitlines()[2:]), set(run(*pip).splitlines())
    assert any(line.startswith("torch ") for line in before) and before <= after
    assert {line.split()[0] for line in after - before} >= {"timm", "volo-tlt", "safetensors"}
    assert run("python", "-c", "import torch; print(torch.__file__)") == f"{LINKED}/torch/__init__.py\n"


def test_its_user_is_not_root_and_the_programs_answer(run: Run, tmp_path: Path) -> None:
    assert run("id", "-u").strip() == str(USER)
    assert run("sh", "-c", "touch ~/file && touch /opt/volo/file 2>/dev/null || echo refused") == "refused\n"
    for program in ("python train.py", "python validate.py", "python generate_label.py", "volo train"):
        assert "usage: " in run(*program.split(), "--help")
    run("sh", "-c", "command -v numactl && command -v ip && command -v ibv_devinfo")
    # A mounted checkout runs on the image's Python.
    for part in ("distributed_train.sh", "volo"):
        (tmp_path / part).symlink_to(f"/opt/volo/{part}")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/usr/bin/python3")
    tmp_path.chmod(0o755)
    dry_run = "DRY_RUN=1 /checkout/distributed_train.sh 1 /data"
    printed = run("sh", "-c", dry_run, flags=("--volume", f"{tmp_path}:/checkout:ro"))
    assert "python3" in printed and ".venv" not in printed


def test_two_processes_train_in_it(make_dataset: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    data, output = make_dataset(train=8, validation=4), tmp_path / "output"
    output.mkdir()
    os.chown(output, USER, USER)
    flags = "--model volo_test --img-size 32 --num-classes 4 -b 4 -j 0 --epochs 1 --warmup-epochs 0 --cooldown-epochs 0"
    command = f"./distributed_train.sh 2 /data {flags} --output /output --experiment run"
    # buildah names the container after itself, and leaves that name out of /etc/hosts.
    mounts = ("--volume", f"{data}:/data:ro", "--volume", f"{output}:/output", "--hostname", "localhost")
    run(*command.split(), flags=mounts)
    assert (output / "run/last.pth.tar").stat().st_uid == USER


def test_it_holds_what_runs_and_nothing_else(buildah: Buildah, image: str) -> None:
    files = Path(buildah("mount", buildah("from", image)))
    left = [*files.glob("var/lib/apt/lists/*"), *files.glob("var/cache/apt/archives/*.deb"), *files.glob("tmp/*")]
    assert [*left, *files.glob("root/.cache"), *files.glob("home/volo/.cache")] == []
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = ("LICENSE", "README.md", "configs/", "pyproject.toml", "slurm/", "tlt/", "volo/")  # of .dockerignore
    scripts = {name for name in listed if "/" not in name and name.endswith((".py", ".sh"))}
    expected = {name for name in {*scripts, *(n for n in listed if n.startswith(folders))} if (ROOT / name).is_file()}
    held = {str(path.relative_to(files / "opt/volo")) for path in (files / "opt/volo").rglob("*") if path.is_file()}
    assert {name for name in held if ".egg-info/" not in name and "__pycache__/" not in name} == expected
    inspected = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert inspected["WorkingDir"] == "/opt/volo" and inspected["Cmd"] == ["bash"] and "Entrypoint" not in inspected
    assert len(inspected["Labels"]["org.opencontainers.image.revision"].removesuffix("-dirty")) == 40


def test_a_base_with_too_old_a_torch_stops_the_build(buildah: Buildah, base: str) -> None:
    container = buildah("from", base)
    links = Path(buildah("mount", container)) / LINKED.relative_to("/")
    (info,) = links.glob("torch-*.dist-info")
    info.unlink()
    (links / "torch-2.8.0.dist-info").mkdir()
    (links / "torch-2.8.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    buildah("commit", "--rm", container, "old")
    assert "depends on torch>=2.10" in buildah.build("old", "never", check=False)
