"""The image on a small base, without a registry: Debian by debootstrap, and the torch of this Python mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands.conftest import ROOT

SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # of Debian, by their Python: that of the mounted packages
PACKAGES = "ca-certificates,python3,python3-pip,python-is-python3"
SITE = Path("/opt/base/site")  # where the packages of this Python are mounted
LINKED = Path("/opt/base/linked")  # links to those of them that the base has
# The certificates: pip may have to go through a proxy that only this machine knows.
VOLUMES = ("--volume", f"{sysconfig.get_path('purelib')}:{SITE}:ro", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro")


class Buildah:
    """buildah with its storage in `folder`, so that nothing else on the machine is touched."""

    def __init__(self, folder: Path) -> None:
        self.printed, settings = folder / "printed", folder / "storage.conf"
        driver = os.environ.get("STORAGE_DRIVER", "overlay")
        where = f'graphroot = "{folder}/storage"\nrunroot = "{folder}/run"'
        settings.write_text(f'[storage]\ndriver = "{driver}"\n{where}\n')
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(settings), "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str | Path) -> str:
        """Run `buildah ARGUMENTS`; return what it prints."""
        return self.run("buildah", *arguments)

    def run(self, *command: str | Path, check: bool = True, **more: str) -> str:
        """Run a command that uses buildah; `more` is added to the environment. Return what it prints."""
        words, env = [str(part) for part in command], {**self.environment, **more}
        ended = subprocess.run(words, capture_output=True, text=True, env=env, timeout=900)
        assert (ended.returncode == 0) == check, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended.stdout.strip() if check else ended.stdout + ended.stderr

    def inside(self, container: str, *command: str, flags: tuple[str, ...] = ()) -> str:
        """Run a command in a container, as the image's user; return what it prints."""
        self.printed.write_text("")
        self.printed.chmod(0o666)
        volumes = (*VOLUMES, "--volume", f"{self.printed}:/printed")
        # Through a file: buildah was seen to lose what a short command prints.
        self("run", *volumes, *flags, container, "--", "sh", "-c", '"$@" >/printed', "sh", *command)
        return self.printed.read_text()

    def build(self, base: str, tag: str, check: bool = True) -> str:
        """Run docker/build.sh on `base`; it fails unless `check`."""
        settings = {"ENGINE": "buildah", "BASE": f"localhost/{base}", "TAG": tag}
        return self.run(ROOT / "docker/build.sh", *VOLUMES, check=check, **settings)


@pytest.fixture(scope="session")
def buildah() -> Iterator[Buildah]:
    if missing := [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: `make test-docker` does that")
    if os.geteuid() or sys.version_info[:2] not in SUITES:
        pytest.skip("needs root, for debootstrap, and the Python of a Debian")
    folder = Path(tempfile.mkdtemp(prefix="volo-image-"))
    yield Buildah(folder)
    # Nothing may stay mounted there: it could be the packages of this Python.
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", point], check=True)
    shutil.rmtree(folder)


def _link_torch(root: Path) -> None:
    """Link torch, torchvision and what they need of this Python's packages, and nothing else."""
    waiting, packages = [Requirement("torch"), Requirement("torchvision")], {}
    while waiting:
        wanted = waiting.pop()
        if str(wanted) not in packages:
            needs = packages[str(wanted)] = distribution(wanted.name)
            for needed in map(Requirement, needs.requires or []):
                extras = wanted.extras or {""}
                if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(needed)
    (root / SITE.relative_to("/")).mkdir(parents=True)
    links = root / LINKED.relative_to("/")
    links.mkdir()
    for name in {file.parts[0] for owner in packages.values() for file in owner.files or []} - {"..", "__pycache__"}:
        (links / name).symlink_to(SITE / name)
    # Before Debian's own, whose setuptools is too old for torch.
    (root / "usr/lib/python3/dist-packages/linked.pth").write_text(f"import sys; sys.path.insert(1, '{LINKED}')\n")


@pytest.fixture(scope="session")
def base(buildah: Buildah) -> str:
    """Name of a Debian whose pip lists torch, torchvision and what they need."""
    container = buildah("from", "scratch")
    root = Path(buildah("mount", container))
    suite = SUITES[sys.version_info[:2]]
    buildah.run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root)
    _link_torch(root)
    buildah("commit", "--rm", container, "base")
    return "base"


@pytest.fixture(scope="session")
def image(buildah: Buildah, base: str) -> str:
    """Name of the image of docker/Dockerfile on that base."""
    buildah.build(base, "image")
    return "image"
