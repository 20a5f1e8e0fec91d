"""The report of one node on itself."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from volo.cluster.preflight.rendezvous import own_name_note, within
from volo.cluster.topology import Machine, read_machine

GB = 1e9
NONE = "none"
ACTIVE = "ACTIVE"
_STORAGE_S = 8.0
_MANY_FOLDERS = 16  # the splits of a data set; the class folders below hold a million files


@dataclass(frozen=True)
class PathState:
    """The size of a path on a node, or the error that it met."""

    size: int = 0  # entries of a directory and its folders, bytes of a file
    error: str = ""


@dataclass(frozen=True)
class NodeReport:
    """One node; sizes in GB (1e9 bytes).

    Attributes:
        address: The node's own address on the way to node 0.
        versions: Versions that must be the same everywhere; "none" where there is none.
        gpus, gpu: Number of GPUs that torch sees, and their model.
        cards: State of each port of the network cards, see `cards`.
        memlock_gb: Memory that a process may pin; None if it is unlimited.
        free_gb: Free space on the file system of --output.
    """

    rank: int
    host: str
    address: str
    versions: dict[str, str]
    gpus: int
    gpu: str
    cpus: int
    cards: dict[str, str]
    paths: dict[str, PathState]
    shm_gb: float
    memlock_gb: float | None
    free_gb: float | None = None
    output_error: str = ""
    notes: list[str] = field(default_factory=list)


def node_report(
    rank: int, address: str, paths: Sequence[str], output: str | None, root: Path = Path("/")
) -> NodeReport:
    """Examine this node. `root` stands for / wherever sysfs and proc are read."""
    free_gb, output_error = output_state(output) if output else (None, "")
    machine = read_machine(root)
    note = None if address.startswith("127.") else own_name_note()  # a single node needs no name
    return NodeReport(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        versions=versions(root),
        gpus=torch.cuda.device_count(),
        gpu=gpu_models(root),
        cpus=len(machine.allowed) or os.cpu_count() or 1,
        cards=cards(machine),
        paths={path: path_state(path) for path in paths},
        shm_gb=_free(root / "dev/shm"),
        memlock_gb=_memlock_gb(),
        free_gb=free_gb,
        output_error=output_error,
        notes=[note] if note else [],
    )


def versions(root: Path = Path("/")) -> dict[str, str]:
    """Return the versions of what ranks on different nodes must share."""
    try:
        project = version("volo-tlt")
    except PackageNotFoundError:
        project = "not installed"
    return {
        "project": project,
        "code": code_digest(Path(__file__).parents[3]),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or NONE,
        "NCCL": _nccl(),
        "driver": _driver(root),
    }


def code_digest(folder: Path) -> str:
    """Return a short digest of the sources of volo and tlt below `folder`: a checkout may be stale on one node."""
    digest = hashlib.sha256()
    for file in sorted((*folder.glob("volo/**/*.py"), *folder.glob("tlt/**/*.py"))):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def _nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return NONE
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver(root: Path) -> str:
    """Return the version of the kernel module, which a container shares with its host."""
    found = re.search(r"Kernel Module.*?\s(\d[\d.]+)\s", _read(root / "proc/driver/nvidia/version"))
    return found[1] if found else NONE


def gpu_models(root: Path) -> str:
    """Return the models of the node's GPUs, from the driver: asking CUDA would take memory on each of them."""
    texts = [_read(file) for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    return ", ".join(sorted({found[1].strip() for text in texts if (found := re.search(r"Model:(.*)", text))})) or NONE


def cards(machine: Machine) -> dict[str, str]:
    """Return the state of every InfiniBand and RoCE port, such as {"mlx5_0:1": "ACTIVE at 200 Gb/s"}."""
    active = {port.name: f"{ACTIVE} at {port.rate:g} Gb/s" for port in machine.ports}
    return active | dict(idle.split(" is ", 1) for idle in machine.idle_ports)


def path_state(path: str) -> PathState:
    """Check that a path is readable: read a file's first byte, or list a directory."""
    try:
        return PathState(within(_STORAGE_S, partial(_size, path)))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError; ValueError: a NUL in the name
        return PathState(error=_text(error))


def _size(path: str) -> int:
    if not os.path.isdir(path):
        with open(path, "rb") as file:
            file.read(1)
            return os.fstat(file.fileno()).st_size
    with os.scandir(path) as entries:
        found = list(entries)
    folders = [entry.path for entry in found if entry.is_dir()]
    return len(found) + sum(len(os.listdir(each)) for each in folders if len(folders) <= _MANY_FOLDERS)


def output_state(path: str) -> tuple[float | None, str]:
    """Return the free space in GB where `path` is or would be made, and what is wrong with it."""

    def free_gb() -> float:
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        return shutil.disk_usage(folder).free / GB

    try:
        return within(_STORAGE_S, free_gb), ""
    except (OSError, ValueError) as error:
        return None, _text(error)


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _free(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free / GB
    except OSError:
        return 0.0


def _memlock_gb() -> float | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit / GB


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
