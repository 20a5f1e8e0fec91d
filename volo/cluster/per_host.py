"""A value that one rank of each host makes, and the other ranks of that host copy from its memory."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import torch.distributed as dist

from tlt.errors import UserError
from volo.cluster.distributed import Told, from_all
from volo.cluster.run_store import SignedStore, start_scope

T = TypeVar("T")
_CALLS = itertools.count()  # of `once_per_host`, in the same order on every rank


def once_per_host(make: Callable[[], T], known: Sequence[object] = ()) -> T:
    """Return what `make` returns on the first rank of each host; its other ranks get a copy. All ranks return together.

    No rank waits in a collective, which has a time limit: a file server may take long to list a data set. The watchdog
    decides which rank hangs.

    Args:
        make: Returns a value that pickles. Its UserError is raised on all ranks of the host.
        known: Objects that all ranks have already, and that the copies refer to.
    """
    if not dist.is_initialized():
        return make()
    store, key = dist.distributed_c10d._get_default_store(), f"once/{next(_CALLS)}"
    signed = SignedStore(store, start_scope())  # a forged path would be unpickled
    hosts = from_all(_host())
    own = hosts[dist.get_rank()]
    first, others = hosts.index(own), hosts.count(own) - 1
    with ExitStack() as stack:
        if dist.get_rank() == first:
            try:
                value = make()
            except UserError as error:
                signed.set(f"{key}/{first}", ["error", str(error)])
                # The store may end with this rank: first the others must have read the error.
                _wait_until(lambda: store.add(f"{key}/{first}/told", 0) == others, seconds=10.0)
                raise
            signed.set(f"{key}/{first}", ["file", stack.enter_context(_memory_file(value, known))])
        else:
            _wait_until(lambda: signed.get(f"{key}/{first}") is not None)
            kind, text = signed.get(f"{key}/{first}")
            if kind == "error":
                store.add(f"{key}/{first}/told", 1)
                raise Told(text)
            try:
                with open(text, "rb") as file:
                    if os.fstat(file.fileno()).st_uid != os.geteuid():
                        raise PermissionError(text)
                    value = _Unpickler(file, known).load()
            except OSError:  # this kernel lets no process read another's files
                value = make()
        store.add(f"{key}/ready", 1)
        _wait_until(lambda: store.add(f"{key}/ready", 0) == dist.get_world_size())
    return value


def _host() -> str:
    """Return what is the same for processes that can read each other's memory and see the same files."""
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *spaces])


@contextmanager
def _memory_file(value: object, known: Sequence[object]) -> Iterator[str]:
    """Pickle a value to a file in memory, which ends with the block; yield its path for other processes."""
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


def _wait_until(happened: Callable[[], bool], seconds: float = math.inf) -> None:
    until, pause = time.monotonic() + seconds, 0.01
    while not happened() and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
