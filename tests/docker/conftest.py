"""The image on a small base, without a registry: Debian by debootstrap, and the torch of this Python mounted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # of Debian, by their Python: that of the mounted packages
PACKAGES = "ca-certificates,python3,python3-pip,python-is-python3"
SITE = Path("/opt/base/site")  # where the packages of this Python are mounted
LINKED = Path("/opt/base/linked")  # links to those of them that the base has
# The certificates: pip may have to go through a proxy that only this machine knows.
VOLUMES = ("--volume", f"{sysconfig.get_path('purelib')}:{SITE}:ro", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro")


class Buildah:
    """buildah with its storage in `folder`, so that nothing else on the machine is touched."""

    def __init__(self, folder: Path) -> None:
        self.printed = folder / "printed"
        settings = folder / "storage.conf"
        driver = os.environ.get("STORAGE_DRIVER", "overlay")
        settings.write_text(
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(settings), "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str | Path, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        """Run `buildah ARGUMENTS`; `more` is added to the environment."""
        return self.run("buildah", *arguments, check=check, **more)

    def run(self, *command: str | Path, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command that uses buildah; `more` is added to the environment."""
        ended = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            env={**self.environment, **more},
            timeout=900,
        )
        assert not check or ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended

    def inside(self, container: str, *command: str, flags: tuple[str, ...] = ()) -> str:
        """Run a command in a container, as the image's user; return what it prints."""
        self.printed.write_text("")
        self.printed.chmod(0o666)
        volumes = (*VOLUMES, "--volume", f"{self.printed}:/printed")
        # Through a file: buildah was seen to lose what a short command prints.
        self("run", *volumes, *flags, container, "--", "sh", "-c", '"$@" >/printed', "sh", *command)
        return self.printed.read_text()

    def build(self, base: str, tag: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run docker/build.sh on `base`."""
        settings = {"ENGINE": "buildah", "BASE": f"localhost/{base}", "TAG": tag}
        return self.run(ROOT / "docker/build.sh", *VOLUMES, check=check, **settings)


@pytest.fixture(scope="session")
def buildah() -> Iterator[Buildah]:
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: `make test-docker` does that")
    if os.geteuid():
        pytest.skip("needs root, for debootstrap")
    if sys.version_info[:2] not in SUITES:
        pytest.skip(f"no Debian has Python {sys.version_info[0]}.{sys.version_info[1]}")
    folder = Path(tempfile.mkdtemp(prefix="volo-image-"))
    yield Buildah(folder)
    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove what buildah has stored, unless something stays mounted there: it could be the packages of this Python."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", point], check=True)
    shutil.rmtree(folder)


def _torch_and_what_it_needs() -> list[Distribution]:
    waiting, found = [Requirement("torch"), Requirement("torchvision")], {}
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in found:
            continue
        found[str(wanted)] = distribution(wanted.name)
        for text in found[str(wanted)].requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in wanted.extras or {""}):
                waiting.append(needed)
    return list(found.values())


def _link_torch(root: Path) -> None:
    (root / SITE.relative_to("/")).mkdir(parents=True)
    links = root / LINKED.relative_to("/")
    links.mkdir()
    names = {file.parts[0] for each in _torch_and_what_it_needs() for file in each.files or []}
    for name in names - {"..", "__pycache__"}:
        (links / name).symlink_to(SITE / name)
    # Before Debian's own, whose setuptools is too old for torch.
    (root / "usr/lib/python3/dist-packages/linked.pth").write_text(f"import sys; sys.path.insert(1, '{LINKED}')\n")


@pytest.fixture(scope="session")
def base(buildah: Buildah) -> str:
    """Name of a Debian whose pip lists torch, torchvision and what they need."""
    container = buildah("from", "scratch").stdout.strip()
    root = Path(buildah("mount", container).stdout.strip())
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
