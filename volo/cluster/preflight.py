"""Checks whether machines are fit for a run: ranks examine their nodes, compare the results and time the all-reduce.

    volo launch N preflight [flags]                              on one machine; on several set NNODES and so on
    srun --ntasks-per-node=N python -m volo preflight [flags]
    torchrun --nproc-per-node N -m volo preflight [flags]

Rank 0 prints a table with a row for each node, and a line with the remedy for each problem. All ranks end with the same
exit code: 0 if the machines are fit, 6 if not, 2 for a bad flag, 5 if a node does not come within --timeout.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tlt.errors import UserError
from tlt.io.files import regular_only
from tlt.io.text import some_names, table
from volo.cluster.distributed import World, from_all, from_primary, init_world, shut_down
from volo.cluster.topology import read, read_machine
from volo.config.settings_tools import Fitness, PreflightSettings

GB = 1e9  # bytes
_MEMLOCK_GB = 1.0  # training locks more than this; the usual default limits are far below
_TIMES = 6  # timed all-reduces; the first one also connects the ranks
_REMEDIES = {  # by the first word of what differs between nodes
    "driver": "have the driver updated there, or leave the node out",
    "GPUs": "look for a failed GPU (nvidia-smi, dmesg), or give the job whole nodes of one kind",
    "card": "look at it (ibstat), or leave the node out",
    "size": "copy it there again, or mount the same one",
}
_MOUNT = "mount it there, and check its name and permissions"


class Unfit(UserError):
    """The machines are not fit for a run."""

    exit_code = 6


@dataclass(frozen=True)
class Node:
    """What one rank reports about its node; sizes are in GB (1e9 bytes)."""

    name: str
    ranks: list[int]
    equal: dict[str, str]  # what must be the same on all nodes, such as {"card mlx5_0:1": "ACTIVE at 400 Gb/s"}
    cpus: int
    shm_gb: float
    memlock_gb: float | None  # memory that a process may lock; None if unlimited
    free_gb: float | None  # free space for --output; None without that flag
    problems: Sequence[str] = ()  # what is wrong on this node alone, each with its remedy
    bandwidth: float | None = None  # of an all-reduce within this node, in GB/s per process; None if not measured


def run(settings: PreflightSettings) -> int:
    """Check the machines; return the exit code, the same on all ranks. Raises Unfit if an all-reduce fails."""
    world = init_world(settings.ranks.device, timeout_s=settings.ranks.timeout)
    if settings.fitness.min_bandwidth is not None and world.size == 1:
        raise UserError("--min-bandwidth has no effect with one process: volo launch N preflight ... starts N")
    try:
        nodes, overall = examine(settings, world)
    except RuntimeError as error:  # raised by NCCL or gloo
        reason = f"{socket.gethostname()}: the all-reduce fails ({str(error).splitlines()[0]})"
        raise Unfit(f"{reason}: NCCL_DEBUG=INFO tells more, unless a node's storage doesn't answer") from error
    findings = list(find_problems(nodes, overall, settings.fitness.min_bandwidth))
    if world.is_primary:
        print(*settings.notes, *report(nodes, overall, findings), sep="\n", flush=True)
    shut_down()
    return Unfit.exit_code if findings else 0


def examine(settings: PreflightSettings, world: World) -> tuple[list[Node], float | None]:
    """Return the reports of all nodes, ordered by their first ranks, and the bandwidth of the all-reduce over all ranks
    in GB/s per process (None with one rank)."""
    places = from_all(socket.gethostname())
    ranks = [rank for rank, place in enumerate(places) if place == places[world.rank]]
    inside = None
    if 1 < len(ranks) < world.size:
        group: Any = dist.new_group(ranks, timedelta(seconds=settings.ranks.timeout), use_local_synchronization=True)
        inside = all_reduce_bandwidth(world.device, group)
    nodes = from_all(
        asdict(examine_node(settings.fitness, places[world.rank], ranks, inside)) if world.rank == ranks[0] else None
    )
    overall = from_primary(all_reduce_bandwidth(world.device)) if world.size > 1 else None
    return [Node(**node) for node in nodes if node is not None], overall


def examine_node(wanted: Fitness, name: str, ranks: list[int], bandwidth: float | None, root: Path = Path("/")) -> Node:
    """Examine this node, on which `ranks` run; the kernel's files are read below `root`."""
    machine = read_machine(root)
    equal = _driver_and_gpus(root) | {f"card {port.name}": f"ACTIVE at {port.rate:g} Gb/s" for port in machine.ports}
    equal |= {f"card {card}": state for card, _, state in (idle.partition(" is ") for idle in machine.idle_ports)}
    problems = []
    free = None
    for path in wanted.data:
        try:
            equal[f"size of {path}"] = str(_size(path))
        except OSError as error:
            problems.append(f"can't read {path} ({error.strerror}): {_MOUNT}")
    try:
        free = _free_gb(wanted.output) if wanted.output else None
    except OSError as error:
        problems.append(f"can't write to --output ({error.strerror}): {_MOUNT}")
    if free is not None and free < wanted.free_gb:
        problems.append(f"{free:.3g} GB free for checkpoints, --free-gb {wanted.free_gb:g}: make room, or lower that")
    shm = shutil.disk_usage(root / "dev/shm").free / GB if (root / "dev/shm").exists() else 0.0
    needed = wanted.shm_gb * len(ranks)
    if shm < needed:
        remedy = "enlarge it (docker run --ipc=host, mount -o remount,size=...), or use fewer data workers and --shm-gb"
        problems.append(f"/dev/shm has {shm:.3g} GB free, {len(ranks)} ranks want {needed:g}: {remedy}")
    locked = re.search(r"Max locked memory\s+(\d+)", read(root / "proc/self/limits"))  # no match if "unlimited"
    memlock = int(locked[1]) / GB if locked else None
    if machine.ports and memlock is not None and memlock < _MEMLOCK_GB:
        remedy = "unlimited in limits.conf, slurmd's LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1"
        problems.append(f"a process may lock {memlock:.3g} GB of memory, too little for InfiniBand: {remedy}")
    return Node(name, ranks, equal, len(machine.allowed), shm, memlock, free, problems, bandwidth)


def _driver_and_gpus(root: Path) -> dict[str, str]:
    """Return the driver's version and the GPUs' models, which must be equal on all nodes; "none" if there are none."""
    driver = re.search(r"Kernel Module.*?\s(\d[\d.]+)\s", read(root / "proc/driver/nvidia/version"))
    models = Counter(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    gpus = ", ".join(f"{count} x {model}" for model, count in models.items())
    return {"driver": driver[1] if driver else "none", "GPUs": gpus or "none"}


def _size(path: str) -> int:
    """Return the size of a file in bytes, or the number of entries of a folder."""
    if os.path.isdir(path):
        return len(os.listdir(path))
    with open(path, "rb", opener=regular_only) as file:
        return file.seek(0, os.SEEK_END)


def _free_gb(path: str) -> float:
    """Return the free GB of the file system on which `path` is or would be; check it by writing a temporary file."""
    folder = next(parent for parent in (Path(path).absolute(), *Path(path).absolute().parents) if parent.exists())
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
    return shutil.disk_usage(folder).free / GB


def all_reduce_bandwidth(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Return the bus bandwidth of the fastest of several all-reduces in GB/s per process. As in nccl-tests it is
    bytes / s * 2 (n - 1) / n."""
    values = torch.zeros((1 << 26) if device.type == "cuda" else (1 << 22), device=device)  # 256 or 16 MiB
    times = []
    for _ in range(_TIMES):
        dist.all_reduce(values[:1], group=group)
        values[0].item()  # wait for the GPU, so that all ranks begin together
        begin = time.perf_counter()
        dist.all_reduce(values, group=group)
        values[0].item()
        times.append(time.perf_counter() - begin)
    size = dist.get_world_size(group)
    return values.nbytes / min(times[1:]) * 2 * (size - 1) / size / GB


def find_problems(nodes: Sequence[Node], overall: float | None, least: float | None) -> Iterator[str]:
    """Yield a line with its remedy for each problem: a difference between nodes, something wrong on a node, or an
    all-reduce slower than `least` GB/s (`--min-bandwidth`)."""
    for key in dict.fromkeys(key for node in nodes for key in node.equal):
        kind = key.split()[0]
        names = dict[str, list[str]]()
        for node in nodes:
            if key in node.equal or kind == "card":  # a path without a size can't be read, and has its own problem
                names.setdefault(node.equal.get(key, "none"), []).append(node.name)
        if len(names) > 1:
            differences = "; ".join(f"{value} on {some_names(same)}" for value, same in names.items())
            yield f"{key}: {differences}: {_REMEDIES[kind]}"
    for problem in dict.fromkeys(problem for node in nodes for problem in node.problems):
        yield f"{', '.join(node.name for node in nodes if problem in node.problems)}: {problem}"
    if overall is not None and least is not None and overall < least:
        remedy = "see which network it takes (NCCL_DEBUG=INFO), measure that with nccl-tests"
        yield f"all ranks: the all-reduce reaches {overall:.3g} GB/s, less than --min-bandwidth {least:g}: {remedy}"


def report(nodes: Sequence[Node], overall: float | None, findings: Sequence[str]) -> Iterator[str]:
    """Yield the lines that rank 0 prints."""
    common = [name for name in nodes[0].equal if len({node.equal.get(name) for node in nodes}) == 1]
    yield f"the same on all nodes: {', '.join(f'{name} {nodes[0].equal[name]}' for name in common)}"
    rows = [["node", "ranks", "GPUs", "CPUs", "shm GB", "memlock GB", "free GB", "GB/s"]]
    for node in nodes:
        sizes = (node.shm_gb, node.memlock_gb, node.free_gb, node.bandwidth)
        columns = ["-" if value is None else f"{value:.3g}" for value in sizes]
        rows.append([node.name, str(len(node.ranks)), node.equal["GPUs"], str(node.cpus), *columns])
    yield from table(rows)
    if overall is not None:
        yield f"all-reduce over all ranks: {overall:.3g} GB/s (bus bandwidth per process; in the table: within a node)"
    yield from findings
    yield f"not fit: {len(findings)} problem{'s' * (len(findings) > 1)}" if findings else "fit"
