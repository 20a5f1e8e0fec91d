"""The steps of docker/Dockerfile, run; and what is in the image then."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docker.conftest import LINKED, ROOT, Buildah

pytestmark = pytest.mark.docker
USER = 10001
Run = Callable[..., str]


@pytest.fixture(scope="module")
def container(buildah: Buildah, image: str) -> str:
    return buildah("from", image).stdout.strip()


@pytest.fixture(scope="module")
def run(buildah: Buildah, container: str) -> Run:
    """Return `run(*command, flags=())`: what the command prints in the container, as the image's user."""

    def run(*command: str, flags: tuple[str, ...] = ()) -> str:
        return buildah.inside(container, *command, flags=flags)

    return run


@pytest.fixture(scope="module")
def files(buildah: Buildah, image: str) -> Path:
    """The image's root directory; what runs in `container` leaves no traces there."""
    return Path(buildah("mount", buildah("from", image).stdout.strip()).stdout.strip())


def _packages(buildah: Buildah, name: str) -> set[str]:
    container = buildah("from", name).stdout.strip()
    return set(buildah.inside(container, "python3", "-m", "pip", "list").splitlines()[2:])


def test_every_package_of_the_base_is_as_it_was(buildah: Buildah, base: str, image: str, run: Run) -> None:
    before, after = _packages(buildah, base), _packages(buildah, image)
    assert any(line.startswith("torch ") for line in before)
    assert before <= after
    assert {line.split()[0] for line in after - before} >= {"timm", "volo-tlt", "safetensors"}
    assert run("python", "-c", "import torch; print(torch.__file__)") == f"{LINKED}/torch/__init__.py\n"


def test_the_user_is_not_root_and_cannot_write_the_code(buildah: Buildah, image: str, run: Run) -> None:
    assert run("id", "-u").strip() == str(USER)
    assert run("sh", "-c", "echo $HOME; touch ~/file && rm ~/file") == "/home/volo\n"
    assert run("sh", "-c", "touch /opt/volo/file 2>/dev/null || echo refused") == "refused\n"


def test_the_packages_and_programs_answer(run: Run) -> None:
    assert run("sh", "-c", "cd /; python -c 'import volo, tlt; print(volo.__file__)'") == "/opt/volo/volo/__init__.py\n"
    for program in ("python train.py", "python validate.py", "python generate_label.py", "volo train"):
        assert "usage: " in run(*program.split(), "--help")
    assert "train.py" in run("sh", "-c", "DRY_RUN=1 ./distributed_train.sh 2 /data")
    for tool in ("numactl", "ip", "ibv_devinfo"):
        run("sh", "-c", f"command -v {tool}")


def test_a_mounted_checkout_runs_on_the_images_python(run: Run, tmp_path: Path) -> None:
    for part in ("distributed_train.sh", "volo"):
        (tmp_path / part).symlink_to(f"/opt/volo/{part}")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/usr/bin/python3")
    tmp_path.chmod(0o755)
    printed = run(
        "sh", "-c", "DRY_RUN=1 /checkout/distributed_train.sh 1 /data", flags=("--volume", f"{tmp_path}:/checkout:ro")
    )
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
    assert (output / "run/last.pth.tar").is_file()
    assert (output / "run/last.pth.tar").stat().st_uid == USER


def test_no_cache_is_left(files: Path) -> None:
    left = [*files.glob("var/lib/apt/lists/*"), *files.glob("var/cache/apt/*.bin"), *files.glob("tmp/*")]
    left += [*files.glob("var/cache/apt/archives/*.deb"), *files.glob("root/.cache"), *files.glob("home/volo/.cache")]
    assert left == []


def test_it_holds_what_runs_and_nothing_else(files: Path) -> None:
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(listed, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git checkout")
    others = (".", "demo/", "docker/", "docs/", "tests/", "CITATION.cff", "CONTRIBUTING.md", "Makefile")
    expected = {name for name in git.stdout.splitlines() if not name.startswith(others) and (ROOT / name).is_file()}
    code = files / "opt/volo"
    held = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert {name for name in held if ".egg-info/" not in name and "__pycache__/" not in name} == expected


def test_labels_say_what_it_is_made_of(buildah: Buildah, image: str) -> None:
    inspected = json.loads(buildah("inspect", "--type", "image", image).stdout)["OCIv1"]["config"]
    labels = {name.removeprefix("org.opencontainers.image."): value for name, value in inspected["Labels"].items()}
    assert labels["title"] == "volo-tlt" and labels["licenses"] == "Apache-2.0"
    assert labels["base.name"] == "localhost/base"
    assert f'version = "{labels["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert len(labels["revision"].removesuffix("-dirty")) == 40
    assert inspected["WorkingDir"] == "/opt/volo" and inspected["Cmd"] == ["bash"] and "Entrypoint" not in inspected


def test_a_base_with_too_old_a_torch_stops_the_build(buildah: Buildah, base: str) -> None:
    container = buildah("from", base).stdout.strip()
    links = Path(buildah("mount", container).stdout.strip()) / LINKED.relative_to("/")
    (info,) = links.glob("torch-*.dist-info")
    info.unlink()
    old = links / "torch-2.8.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    buildah("commit", "--rm", container, "old")
    ended = buildah.build("old", "never", check=False)
    assert ended.returncode != 0
    assert "depends on torch>=2.9" in ended.stdout and "(constraint) torch==2.8.0" in ended.stdout
