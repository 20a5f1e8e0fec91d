"""The image on a small base, without a registry: Debian by debootstrap, and the torch of this Python mounted. The steps
of docker/Dockerfile are run; which engine docker/build.sh takes, and what it tells it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT

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


def test_first_working_engine_builds_this_commits_dockerfile(tools):
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


def test_variables_and_flags_reach_the_engine(tools):
    _add_engine(tools, "podman")
    _add_engine(tools, "buildah")
    settings = {"BASE": "registry/base:1", "TAG": "a/b:c", "EXTRAS": "plot,dali", "ENGINE": "buildah"}
    _, engine, *arguments = _build(tools, "--label", "two words", **settings).stdout.splitlines()
    assert engine == "buildah" and arguments[arguments.index("--tag") + 1] == "a/b:c"
    assert {"BASE=registry/base:1", "EXTRAS=plot,dali"} <= set(arguments)
    assert arguments[-3:] == ["--label", "two words", "."]


@pytest.mark.parametrize(("engine", "named"), [("", "docker, podman and buildah"), ("podman", "podman")])
def test_no_engine_is_one_line(tools, engine, named):
    ended = _build(tools, ENGINE=engine)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "no container engine" in line and f"fails with {named};" in line


USER = 10001
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(buildah: Buildah, image: str) -> Run:
    """Return `run(*command, flags=())`: what the command prints in a container, as the image's user."""
    return partial(buildah.inside, buildah("from", image))


@pytest.mark.docker
def test_every_package_of_the_base_is_as_it_was(buildah, base, run):
    pip = ("python3", "-m", "pip", "list")
    before, after = set(buildah.inside(buildah("from", base), *pip).splitlines()[2:]), set(run(*pip).splitlines())
    assert any(line.startswith("torch ") for line in before) and before <= after
    assert {line.split()[0] for line in after - before} >= {"timm", "volo-tlt", "safetensors"}
    assert run("python", "-c", "import torch; print(torch.__file__)") == f"{LINKED}/torch/__init__.py\n"


@pytest.mark.docker
def test_its_user_is_not_root_and_the_programs_answer(run, tmp_path):
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


@pytest.mark.docker
def test_two_processes_train_in_it(make_dataset, run, tmp_path):
    data, output = make_dataset(train=8, validation=4), tmp_path / "output"
    output.mkdir()
    os.chown(output, USER, USER)
    flags = "--model volo_test --img-size 32 --num-classes 4 -b 4 -j 0 --epochs 1 --warmup-epochs 0 --cooldown-epochs 0"
    command = f"./distributed_train.sh 2 /data {flags} --output /output --experiment run"
    # buildah names the container after itself, and leaves that name out of /etc/hosts.
    mounts = ("--volume", f"{data}:/data:ro", "--volume", f"{output}:/output", "--hostname", "localhost")
    run(*command.split(), flags=mounts)
    assert (output / "run/last.pth.tar").stat().st_uid == USER


@pytest.mark.docker
def test_it_holds_what_runs_and_nothing_else(buildah, image):
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


@pytest.mark.docker
def test_a_base_with_too_old_a_torch_stops_the_build(buildah, base):
    container = buildah("from", base)
    links = Path(buildah("mount", container)) / LINKED.relative_to("/")
    (info,) = links.glob("torch-*.dist-info")
    info.unlink()
    (links / "torch-2.8.0.dist-info").mkdir()
    (links / "torch-2.8.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.8.0\n")
    buildah("commit", "--rm", container, "old")
    assert "depends on torch>=2.10" in buildah.build("old", "never", check=False)
