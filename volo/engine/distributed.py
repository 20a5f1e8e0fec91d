"""Processes: who am I, who else is there, and the few collectives that the programs need.

Rank and world size come from the environment that torchrun or `srun` sets; the `--local_rank` flag of old launchers is
only a fallback. NCCL joins GPUs, gloo joins CPUs.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from tlt.errors import UserError
from volo.engine.ranks import ranks_from_environment

T = TypeVar("T")
_CALLS = itertools.count()  # of `once_per_host`, in the same order on every rank
_GONE = re.compile(r"Connection (closed|reset) by|Broken pipe|Socket closed|Connection refused", re.IGNORECASE)


class RankLost(UserError):
    """Another rank's process has ended, so that this one can't go on."""

    exit_code = 5


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_primary(self) -> bool:
        """True on the one process of the whole run that prints and writes."""
        return self.rank == 0


def choose_device(requested: str | None, local_rank: int) -> torch.device:
    """Resolve `--device`: None or "auto" is this rank's GPU where there is one, else the CPU.

    Raises:
        UserError: A GPU is asked for that this machine doesn't have, or something that is neither CPU nor GPU.
    """
    name = requested or "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: cpu, cuda and cuda:N are the devices that this project runs on")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index is None or device.index >= count:
            raise UserError(f"--device {name}: needs GPU {device.index}, this machine shows {count}; use --device cpu")
        torch.cuda.set_device(device)
    return device


def init_world(device: str | None = None, local_rank: int = 0, timeout_s: float = 600.0) -> World:
    """Join the other processes, if there are any.

    Raises:
        UserError: Several tasks were started by srun on several nodes and nobody said where rank 0 listens.
    """
    rank, local_rank, size = ranks_from_environment(os.environ, local_rank)
    world = World(rank, local_rank, size, choose_device(device, local_rank))
    limit_threads(world)
    if size > 1:
        _set_rendezvous_address(size)
        dist.init_process_group(
            # What the hosts agree on (stop here?) goes by gloo, so that no GPU is waited for.
            "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    return world


def limit_threads(world: World) -> None:
    """Give a rank on the CPU its share of the cores, one left free for data loading; OMP_NUM_THREADS wins.

    Oversubscribed cores are many times slower than idle ones.
    """
    if world.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, (cores - 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def _set_rendezvous_address(size: int) -> None:
    if "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", "29500")
        return
    elsewhere = size > int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if elsewhere or int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        raise UserError(
            "MASTER_ADDR is not set: export the first node's address before srun or mpirun, or start with torchrun"
        )
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # Jobs that share a node must not share a port.
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))


@contextmanager
def lost_rank_explained() -> Iterator[None]:
    """Tell the end of a connection to another rank in one line."""
    try:
        yield
    except RuntimeError as error:
        if dist.is_initialized() and _GONE.search(str(error)):
            raise RankLost("another rank has ended: what it said, or the log of its machine, tells why") from error
        raise


def shut_down() -> None:
    """Leave the process group; safe to call when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over all ranks (the same tensor on every rank)."""
    if dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


def max_over_ranks(value: int) -> int:
    """Return the largest `value` of all ranks; the hosts wait for each other, not for their GPUs."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def from_primary(value: T) -> T:
    """Return rank 0's `value` on every rank; it must pickle."""
    if not dist.is_initialized():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: T) -> list[T]:
    """Return every rank's `value` on every rank, in the order of ranks; it must pickle."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Board:
    """Where ranks that work at their own pace leave word for each other: nobody waits for anybody to read it.

    Made by every rank, after `init_world`.
    """

    def __init__(self) -> None:
        joined = dist.is_initialized()
        self._store = dist.distributed_c10d._get_default_store() if joined else dist.HashStore()

    def add(self, name: str, amount: int) -> int:
        """Add to a number that starts at 0; return what it is now, over all ranks."""
        return self._store.add(f"board/{name}", amount)

    def fail(self) -> bool:
        """Say that this rank can't go on; True on the first one to say so."""
        try:
            return self.add("failed", 1) == 1
        except RuntimeError:  # a rank that failed before has taken the board with it
            return False

    def failed(self) -> bool:
        """Whether a rank has said that it can't go on, or has taken the board with it."""
        try:
            return self.add("failed", 0) > 0
        except RuntimeError:
            return True


def once_per_host(make: Callable[[], T], known: Sequence[object] = ()) -> T:
    """Return what `make` returns on the first rank of each host; its other ranks get a copy. All ranks return together.

    Nobody waits in a collective, which has a time limit: a file server may take long to list a data set. The watchdog
    decides who hangs.

    Args:
        make: What it returns must pickle. A UserError is raised on all ranks of the host.
        known: Objects that all ranks have already, and that copies are to share.
    """
    if not dist.is_initialized():
        return make()
    store, key = dist.distributed_c10d._get_default_store(), f"once/{next(_CALLS)}"
    hosts = from_all(_host())
    own = hosts[dist.get_rank()]
    first, others = hosts.index(own), hosts.count(own) - 1
    with ExitStack() as stack:
        if dist.get_rank() == first:
            try:
                value = make()
            except UserError as error:
                store.set(f"{key}/{first}", f"error {error}")
                # This rank may take the store with it: the others are to tell the same.
                _wait(lambda: store.add(f"{key}/{first}/told", 0) == others, seconds=10.0)
                raise
            store.set(f"{key}/{first}", f"file {stack.enter_context(_memory_file(value, known))}")
        else:
            _wait(lambda: store.check([f"{key}/{first}"]))
            kind, _, text = store.get(f"{key}/{first}").decode().partition(" ")
            if kind == "error":
                store.add(f"{key}/{first}/told", 1)
                raise UserError(text)
            try:
                with open(text, "rb") as file:
                    value = _Unpickler(file, known).load()
            except OSError:  # a kernel that lets no process look at another
                value = make()
        store.add(f"{key}/ready", 1)
        _wait(lambda: store.add(f"{key}/ready", 0) == dist.get_world_size())
    return value


def _host() -> str:
    """What processes have in common that can look at each other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


@contextmanager
def _memory_file(value: object, known: Sequence[object]) -> Iterator[str]:
    """A file that ends with this process, with a pickled value; yields where other processes find it."""
    with open(os.memfd_create("once"), "w+b") as file:
        _Pickler(file, known).dump(value)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes], known: Sequence[object]) -> None:
        super().__init__(file, protocol=5)
        self._known = known

    def persistent_id(self, value: object) -> int | None:
        return next((number for number, each in enumerate(self._known) if each is value), None)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, number: int) -> object:
        return self._known[number]


def _wait(happened: Callable[[], bool], seconds: float = math.inf) -> None:
    until, pause = time.monotonic() + seconds, 0.01
    while not happened() and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def wait_for_all() -> None:
    """Return when every rank has got here."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def primary_first() -> Iterator[None]:
    """Run the block on rank 0 while the others wait, then on the others; a UserError of rank 0 is raised everywhere."""
    primary = not dist.is_initialized() or dist.get_rank() == 0
    failure: str | None = None
    if primary:
        try:
            yield
        except UserError as error:
            failure = str(error)
    failure = from_primary(failure)
    if failure is not None:
        raise UserError(failure)
    if not primary:
        yield
